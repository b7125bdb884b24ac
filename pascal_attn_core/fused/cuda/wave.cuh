// What warp.cuh gives the kernels on tensor cores, for AMD's waves of 32 lanes and their matrix instructions (WMMA:
// 16 x 16 x 16, float16 or bfloat16 factors, float32 sums). Where the elements lie in registers ("RDNA3", 7.9; "RDNA4",
// 7.12, AMD's ISA documents), by lane l, with h = l / 16:
//   A  row l % 16, B  column l % 16:  on gfx11 all 16 numbers, which both halves of the wave must have; on gfx12 eight of
//      them, the other half has the other eight, in A and B alike
//   C  column l % 16, register i:  row 2 i + h on gfx11, row i + 8 h on gfx12
// Set by the host: PA_WMMA  11 or 12, the generation.
#if PA_DTYPE == 2  // from here on a number of 16 bits is one of these
INLINE float bfloat_to_float(u16 b) { return bits_to_float((u32)b << 16); }
INLINE u16 float_to_bfloat(float f) {
    const u32 u = float_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)0x7fc0;
    return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
#define half_to_float bfloat_to_float
#define float_to_half float_to_bfloat
#endif

#define FACTOR_WORDS (PA_WMMA == 11 ? 8 : 4)  // registers of A or B, two numbers in each

#ifdef PA_CPU_EMU
struct Factor {
    u32 words[FACTOR_WORDS];
    u32& operator[](int i) { return words[i]; }
};
INLINE u32 shared_address(const void* p) { return emu_shared_address(p); }
INLINE int4 load_shared(u32 at) { return emu_load_16(at); }
INLINE uint2 load_shared_half(u32 at) { return emu_load_8(at); }
INLINE void multiply_add(float (&c)[8], const Factor& a, const Factor& b) {
    emu_wmma<PA_WMMA, PA_DTYPE == 2>(c, a.words, b.words);
}
INLINE void multiply_first(float (&c)[8], const Factor& a, const Factor& b) {
    FOR(i, 8) c[i] = 0.f;
    multiply_add(c, a, b);
}
INLINE float other_half(float x) { return __shfl_xor_sync(FULL_WARP, x, 16); }
INLINE u32 bytes_of(u32 high, u32 low, u32 which) { return emu_bytes(high, low, which); }
INLINE float reciprocal(float x) { return 1.f / x; }
#else
typedef u32 Factor __attribute__((ext_vector_type(FACTOR_WORDS)));
typedef float Eight __attribute__((ext_vector_type(8)));
#define SHARED __attribute__((address_space(3)))
INLINE u32 shared_address(const void* p) { return (u32)(const SHARED char*)(const char*)p; }
INLINE int4 load_shared(u32 at) {
    typedef int Four __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(int4, *(const SHARED Four*)at);
}
INLINE uint2 load_shared_half(u32 at) {
    typedef u32 Two __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint2, *(const SHARED Two*)at);
}
// Not by the compiler's functions: their vectors of halves it takes apart and puts together for each product.
#if PA_DTYPE == 2
#define WMMA "v_wmma_f32_16x16x16_bf16 "
#else
#define WMMA "v_wmma_f32_16x16x16_f16 "
#endif
// c += a b
INLINE void multiply_add(float (&c)[8], const Factor& a, const Factor& b) {
    Eight sums;
    FOR(i, 8) sums[i] = c[i];
    asm(WMMA "%0, %1, %2, %0" : "+v"(sums) : "v"(a), "v"(b));
    FOR(i, 8) c[i] = sums[i];
}
// c = a b: needs no cleared c.
INLINE void multiply_first(float (&c)[8], const Factor& a, const Factor& b) {
    Eight sums;
    asm(WMMA "%0, %1, %2, 0" : "=&v"(sums) : "v"(a), "v"(b));
    FOR(i, 8) c[i] = sums[i];
}
// What lane l ^ 16 has.
INLINE float other_half(float x) {
    const u32 u = float_to_bits(x);
    return bits_to_float(__builtin_amdgcn_permlanex16(u, u, 0x76543210u, 0xfedcba98u, true, false));
}
// Four bytes of the eight of high and low; each byte of `which` is the number of one, from the lowest of low on.
INLINE u32 bytes_of(u32 high, u32 low, u32 which) { return __builtin_amdgcn_perm(high, low, which); }
INLINE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
#undef __shfl_sync
#define __shfl_sync(lanes, word, lane) (u32)__builtin_amdgcn_ds_bpermute((lane) << 2, (int)(word))
#undef __shfl_xor_sync
#define __shfl_xor_sync(lanes, x, mask) other_half(x)  // of the lanes of a row
#define __ballot_sync(lanes, vote) __builtin_amdgcn_ballot_w32(vote)
#define fmaxf larger_of
#define __ffs __builtin_ffs
#endif

// Two neighbouring pieces of 16 bytes as a factor, of which on gfx12 each half of the wave needs one.
INLINE Factor load_factor(u32 at) {
    Factor f;
    FOR(i, FACTOR_WORDS / 4) {
        const int4 piece = load_shared(at + i * 16);
        f[4 * i] = piece.x;
        f[4 * i + 1] = piece.y;
        f[4 * i + 2] = piece.z;
        f[4 * i + 3] = piece.w;
    }
    return f;
}
INLINE int4 load_piece(const T* p) { return *(const int4*)p; }

#if PA_DTYPE == 2
INLINE u32 pack_halves(float low, float high) { return float_to_bfloat(low) | (u32)float_to_bfloat(high) << 16; }
// The same for numbers from 0 to 1; one in the middle is rounded up.
INLINE u32 pack_shares(float low, float high) {
    return bytes_of(float_to_bits(high) + 0x8000u, float_to_bits(low) + 0x8000u, 0x07060302u);
}
#else
INLINE u32 pack_halves(float low, float high) {
#ifdef PA_CPU_EMU
    return pair_of(low, high);
#else
    // Written as sums of products, each becomes one instruction, the second beside the first. Not by asm: on gfx11 the
    // compiler must know who reads an exponential, which is not there yet for some instructions.
    typedef _Float16 Pair __attribute__((ext_vector_type(2)));
    float one = 1.f;
    OPAQUE_UNIFORM(one);
    Pair pair;
    pair[0] = (_Float16)fmaf(low, one, 0.f);
    pair[1] = (_Float16)fmaf(high, one, 0.f);
    return __builtin_bit_cast(u32, pair);
#endif
}
INLINE u32 pack_shares(float low, float high) { return pack_halves(low, high); }
#endif
