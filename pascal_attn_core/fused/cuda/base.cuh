// Types, constants and conversions shared by all kernels. Nothing is included from outside: NVRTC, nvcc and the CPU
// emulation of the tests take the same text.
// Compile-time parameters (macros, all set by the host), besides those of each kind of kernel:
//   PA_DTYPE  0 float32, 1 float16, 2 bfloat16
//   PA_MASK   0 none, 1 bool (1 byte, nonzero = takes part), 2 added to the scores (float32 or the tensors' dtype)
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char i8;
typedef long long i64;

#if PA_DTYPE == 0
typedef float T;
#else
typedef u16 T;
#endif

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define FULL_WARP 0xffffffffu
#define INLINE static __device__ __forceinline__
#define FOR(i, n) _Pragma("unroll") for (int i = 0; i < (n); ++i)

#ifdef PA_CPU_EMU
INLINE float exp2_approx(float x) { return exp2f(x); }
INLINE float half_to_float(u16 h) { return emu_half2float(h); }
INLINE u16 float_to_half(float f) { return emu_float2half(f); }
INLINE float bits_to_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
INLINE u32 float_to_bits(float f) { u32 u; memcpy(&u, &f, 4); return u; }
INLINE float dot2(u32 a, u32 b, float sum) {
    sum = fmaf(half_to_float((u16)(a & 0xffffu)), half_to_float((u16)(b & 0xffffu)), sum);
    return fmaf(half_to_float((u16)(a >> 16)), half_to_float((u16)(b >> 16)), sum);
}
#define KEEP_BRANCH()
#define OPAQUE(x)
#define OPAQUE_UNIFORM(x)
#define OF_ALL_LANES(x) x
#if PA_AMD
INLINE float larger_of(float a, float b) { return fmaxf(a, b); }
INLINE float largest_of_three(float a, float b, float c) { return fmaxf(fmaxf(a, b), c); }
INLINE u32 pair_of(float low, float high) { return (u32)float_to_half(low) | (u32)float_to_half(high) << 16; }
#define ANY_LANE(x) emu_any_lane(x)
#else
#define ANY_LANE(x) x
#endif
#elif defined(PA_HIP)
#if __has_builtin(__builtin_amdgcn_exp2f)
INLINE float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
#else
INLINE float exp2_approx(float x) { return __builtin_exp2f(x); }
#endif
INLINE float half_to_float(u16 h) { return (float)__builtin_bit_cast(_Float16, h); }
INLINE u16 float_to_half(float f) { return __builtin_bit_cast(u16, (_Float16)f); }
INLINE float bits_to_float(u32 u) { return __builtin_bit_cast(float, u); }
INLINE u32 float_to_bits(float f) { return __builtin_bit_cast(u32, f); }
#if PA_PAIRS
// sum + a.x * b.x + a.y * b.y of float16 pairs: one instruction, exact products, float32 sums.
INLINE float dot2(u32 a, u32 b, float sum) {
    typedef _Float16 Half2 __attribute__((ext_vector_type(2)));
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(Half2, a), __builtin_bit_cast(Half2, b), sum, false);
}
#endif
// Of fmaxf the compiler makes another instruction for each operand, in case it is a signalling NaN: nothing here makes one.
INLINE float larger_of(float a, float b) { float r; asm("v_max_f32 %0, %1, %2" : "=v"(r) : "v"(a), "v"(b)); return r; }
INLINE float largest_of_three(float a, float b, float c) {
    float r;
    asm("v_max3_f32 %0, %1, %2, %3" : "=v"(r) : "v"(a), "v"(b), "v"(c));
    return r;
}
// Two floats as float16 in a word, rounded to nearest: the second one is written beside the first.
INLINE u32 pair_of(float low, float high) {
    u32 r;
    asm("v_fma_mixlo_f16 %0, %1, 1.0, 0\n\t"
        "v_fma_mixhi_f16 %0, %2, 1.0, 0"
        : "=&v"(r) : "v"(low), "v"(high));
    return r;
}
#define KEEP_BRANCH() asm volatile("")
#define OPAQUE(x) asm volatile("" : "+v"(x))
#define OPAQUE_UNIFORM(x) asm volatile("" : "+s"(x))
// Of a number that all lanes have, which the compiler computes in registers of lanes, as it does quotients.
#define OF_ALL_LANES(x) __builtin_amdgcn_readfirstlane(x)
#if __has_builtin(__builtin_amdgcn_ballot_w64) && PA_WAVE == 64
#define ANY_LANE(x) (__builtin_amdgcn_ballot_w64(x) != 0)
#elif __has_builtin(__builtin_amdgcn_ballot_w32) && PA_WAVE == 32
#define ANY_LANE(x) (__builtin_amdgcn_ballot_w32(x) != 0)
#else  // 33: not equal
#define ANY_LANE(x) (__builtin_amdgcn_uicmp((u32)(x), 0u, 33) != 0)
#endif
#else
INLINE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
INLINE u16 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
INLINE float bits_to_float(u32 u) { return __uint_as_float(u); }
INLINE u32 float_to_bits(float f) { return __float_as_uint(f); }
// Work for the rare tile stays behind a branch; otherwise the compiler turns it into selects that every tile pays for.
#define KEEP_BRANCH() asm volatile("")
// What depends on an opaque number is computed where it is used and takes no register in the rest of the loop.
#define OPAQUE(x) asm volatile("" : "+r"(x))
// The same of a number that all threads of a block share, which AMD's compiler must know.
#define OPAQUE_UNIFORM(x) OPAQUE(x)
// A condition of which it is enough that it holds for any lane of a wave: on AMD's cards one of the whole wave.
#define ANY_LANE(x) x
#endif
#define NEG_INF (bits_to_float(0xff800000u))
#define POS_INF (bits_to_float(0x7f800000u))

// Scores are kept in the unit in which exp2 or exp is taken of them: without an added mask times log2(e), folded into
// one multiply-add; with one in natural units, where the mask's largest numbers do not overflow.
#if PA_MASK == 2
#define UNIT_TO_LOG2 LOG2E
#define UNIT_TO_LN 1.f
#else
#define UNIT_TO_LOG2 1.f
#define UNIT_TO_LN LN2
#endif
