// Elements of tensors as float32, and back.
INLINE u16 float_to_bfloat(float f) {
    const u32 u = float_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)0x7fc0;
    return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if PA_CAPPED
#ifdef PA_CPU_EMU
INLINE float reciprocal(float x) { return 1.f / x; }
#elif defined(PA_HIP)
INLINE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
#else
INLINE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif
#endif

INLINE float load_one(const T* p) {
#if PA_DTYPE == 0
    return *p;
#elif PA_DTYPE == 1
    return half_to_float(*p);
#else
    return bits_to_float(((u32)*p) << 16);
#endif
}

INLINE T to_storage(float f) {
#if PA_DTYPE == 0
    return f;
#elif PA_DTYPE == 1
    return float_to_half(f);
#else
    return float_to_bfloat(f);
#endif
}

// Four neighbouring elements as raw bits: they stay raw while a prefetch is in flight.
#if PA_DTYPE == 0
typedef float4 Raw4;
#else
typedef uint2 Raw4;
#endif

INLINE Raw4 load_raw(const T* p) { return *(const Raw4*)p; }

INLINE Raw4 zero_raw() {
    Raw4 r;
#if PA_DTYPE == 0
    r.x = r.y = r.z = r.w = 0.f;
#else
    r.x = r.y = 0u;
#endif
    return r;
}

INLINE float4 to_float4(Raw4 r) {
    float4 f;
#if PA_DTYPE == 0
    f = r;
#elif PA_DTYPE == 1
    f.x = half_to_float((u16)(r.x & 0xffffu)); f.y = half_to_float((u16)(r.x >> 16));
    f.z = half_to_float((u16)(r.y & 0xffffu)); f.w = half_to_float((u16)(r.y >> 16));
#else
    f.x = bits_to_float(r.x << 16); f.y = bits_to_float(r.x & 0xffff0000u);
    f.z = bits_to_float(r.y << 16); f.w = bits_to_float(r.y & 0xffff0000u);
#endif
    return f;
}

INLINE Raw4 to_raw(float4 f) {
    Raw4 r;
#if PA_DTYPE == 0
    r = f;
#else
    r.x = (u32)to_storage(f.x) | ((u32)to_storage(f.y) << 16);
    r.y = (u32)to_storage(f.z) | ((u32)to_storage(f.w) << 16);
#endif
    return r;
}
