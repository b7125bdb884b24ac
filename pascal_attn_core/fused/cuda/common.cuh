// Types, conversions and lane layout shared by all kernels. Nothing is included from outside: NVRTC, nvcc and the CPU
// emulation of the tests take the same text.
//
// Compile-time parameters (macros, all set by the host):
//   PA_D        head_dim of the register and shared memory tiles; the tensors' own may be smaller when PA_PAD is 1
//   PA_DTYPE    0 float32, 1 float16, 2 bfloat16
//   PA_MASK     0 none, 1 bool (1 byte, nonzero = takes part), 2 added to the scores (float32 or the tensors' dtype)
//   PA_PAD      1: head_dim and head_dim_v are read from the parameters and columns behind them are zero
//   PA_BR/PA_BC rows of the tile that stays / of the tile that moves;  PA_TX x PA_TY thread grid
//   PA_KC       depth of a staged chunk of a row-by-row product (X Y^T);  PA_VC rows staged at a time of P Y
//   PA_PSPLIT   how many parts P is passed through shared memory in;  PA_MINB blocks that shall fit one SM
//   PA_FLUSH    tiles after which float32 sums move to the output (0: never), see flush_sums
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

#define PA_NT (PA_TX * PA_TY)
#define RM (PA_BR / PA_TY)         // rows of S and of the sums per thread
#define CN (PA_BC / PA_TX)         // columns of S per thread
#define DN (PA_D / PA_TX)          // columns of the sums per thread
#define DN4 (DN / 4)
#define DNR (DN % 4)
#define PCOLS (PA_BC / PA_PSPLIT)  // columns of P in shared memory at a time
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define FULL_WARP 0xffffffffu
#define INLINE static __device__ __forceinline__

#if (CN % 4) || (RM % 4) || ((CN / PA_PSPLIT) % 4) || (PCOLS % PA_VC) || (PA_VC % 4) || (PA_D % PA_TX)
#error "unsupported tile geometry"
#endif
#if PA_D % PA_KC && !PA_PAD && !PA_INT8
#error "unsupported chunk of the head dimension"
#endif
#if (PA_NT % PA_BR) || (PA_NT % PA_BC) || (PA_BR * PA_KC) % (4 * PA_NT) || (PA_BC * PA_KC) % (4 * PA_NT)
#error "unsupported staging geometry"
#endif

#ifdef PA_CPU_EMU
INLINE float exp2_approx(float x) { return exp2f(x); }
INLINE float half_to_float(u16 h) { return emu_half2float(h); }
INLINE u16 float_to_half(float f) { return emu_float2half(f); }
INLINE float bits_to_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
INLINE u32 float_to_bits(float f) { u32 u; memcpy(&u, &f, 4); return u; }
#define KEEP_BRANCH()
#define OPAQUE(x)
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
#endif
#define NEG_INF (bits_to_float(0xff800000u))
#define POS_INF (bits_to_float(0x7f800000u))

INLINE u16 float_to_bfloat(float f) {
    const u32 u = float_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)0x7fc0;
    return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

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

// Lanes i and i^1 share their columns, i and i^2 their rows, so that the hardware serves both 16-byte operand loads of
// a product in two passes instead of four: bit 0 selects the row group, the next bits the column group, the rest the
// row group again.
struct Lane {
    int tid, tx, ty;
};

INLINE Lane lane_of(int tid) {
    Lane t;
    t.tid = tid;
    t.tx = (tid >> 1) % PA_TX;
    t.ty = (tid & 1) | ((tid / (2 * PA_TX)) << 1);
    return t;
}

// The same lane, of which what is derived from its number is computed anew.
INLINE Lane anew(Lane t) {
    OPAQUE(t.tid);
    return t;
}

#define ROW(i) (t.ty * 4 + ((i) & 3) + ((i) >> 2) * 4 * PA_TY)  // row i of this thread within the tile
#define COL(j) (t.tx * 4 + ((j) & 3) + ((j) >> 2) * 4 * PA_TX)  // column j of this thread within the tile
#define FOR(i, n) _Pragma("unroll") for (int i = 0; i < (n); ++i)

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }

// Which keys a query row may look at: row i sees keys i + low ... i + high (within [0, keys)).
struct Band {
    int low, high;
};
