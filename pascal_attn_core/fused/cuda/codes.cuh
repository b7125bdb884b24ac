// What kernels of 8-bit codes share, and take from CUDA beyond hip.cuh.
#ifdef PA_HIP
#define uint4 pa_uint4
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define fminf __builtin_fminf
#define __ldg(p) (*(p))
#if defined(__GFX11__) || defined(__GFX12__)
#define __dp4a(a, b, sum) __builtin_amdgcn_sudot4(true, a, true, b, sum, false)
#else
#define __dp4a(a, b, sum) __builtin_amdgcn_sdot4(a, b, sum, false)
#endif
INLINE u32 __byte_perm(u32 a, u32 b, u32 s) {  // a byte of the instruction's selector is four bits of s
    return __builtin_amdgcn_perm(b, a, (s & 15) | (s & 0xf0) << 4 | (s & 0xf00) << 8 | (s & 0xf000) << 12);
}
// Each rounded on its own: products and sums in one expression would be one multiply-add.
INLINE float __fadd_rn(float x, float y) { return x + y; }
INLINE float __fsub_rn(float x, float y) { return x - y; }
INLINE float __fmul_rn(float x, float y) { return x * y; }
INLINE float __fdiv_rn(float x, float y) { return x / y; }
INLINE float __frcp_rn(float x) { return 1.f / x; }
INLINE float __int2float_rn(int x) { return (float)x; }
INLINE int __float2int_rn(float x) { return (int)__builtin_rintf(x); }
INLINE u32 pa_shfl_xor(u32 value, int mask) { return float_to_bits(pa_shfl_xor(bits_to_float(value), mask)); }
INLINE int pa_shfl_xor(int value, int mask) { return (int)pa_shfl_xor((u32)value, mask); }
// Of 32 lanes, whatever a wave has. 33: not equal.
INLINE u32 pa_ballot(bool x) {
    const unsigned long long lanes = __builtin_amdgcn_uicmp((u32)x, 0u, 33);
    return (u32)(PA_WAVE == 64 && threadIdx.x & 32 ? lanes >> 32 : lanes);
}
#define __ballot_sync(lanes, x) pa_ballot(x)
#endif

#define LEAST_SCALE 1e-30f  // of zeros

// What is derived from an opaque pointer is not computed anew from what the pointer was made of.
#if defined(PA_CPU_EMU) || defined(PA_HIP)
#define OPAQUE_POINTER(x)
#else
#define OPAQUE_POINTER(x) asm volatile("" : "+l"(x))
#endif
// AMD's compiler would read all factors of a product before the first sum, and have no registers for them.
#ifdef PA_HIP
#define IN_STEPS(x) OPAQUE(x)
#else
#define IN_STEPS(x)
#endif

INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// x / s, rounded correctly, where that is at least 1/2: with r = 1 / s rounded correctly and q within one unit in the last
// place, q + (x - q s) r rounded once is (Markstein, IBM J. Res. Dev. 34, 1990). Of less, only that it is less.
INLINE float quotient(float x, float s, float r) {
    float q = __fmul_rn(x, r);
    q = fmaf(fmaf(-q, s, x), r, q);
    return fmaf(fmaf(-q, s, x), r, q);
}
