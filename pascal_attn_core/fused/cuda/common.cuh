// Lane layout and tile geometry of the kernels on plain cores.
//
// Compile-time parameters (macros, all set by the host):
//   PA_D        head_dim of the register and shared memory tiles; the tensors' own may be smaller when PA_PAD is 1
//   PA_PAD      1: head_dim and head_dim_v are read from the parameters and columns behind them are zero
//   PA_BR/PA_BC rows of the tile that stays / of the tile that moves;  PA_TX x PA_TY thread grid
//   PA_KC       depth of a staged chunk of a row-by-row product (X Y^T);  PA_VC rows staged at a time of P Y
//   PA_PSPLIT   how many parts P is passed through shared memory in;  PA_MINB blocks that shall fit one SM
//   PA_FLUSH    tiles after which float32 sums move to the output (0: never), see flush_sums
// and on AMD's cards, with PA_AMD 1:
//   PA_WAVE     lanes of a wave
//   PA_PAIRS    1: float16 operands stay what they are in shared memory, two neighbours in a word, and row-by-row
//               products are dot products of pairs with float32 sums. 2: P is rounded to float16 for P Y, which is one too
//   PA_KEEP     1: the whole tile that stays lies in shared memory, staged once
//   PA_AHEAD    1: the factors of a step of a product are read while the step before is computed
#if !PA_AMD
#define PA_PAIRS 0
#define PA_KEEP 0
#define PA_AHEAD 0
#endif
#define PA_NT (PA_TX * PA_TY)
#define RM (PA_BR / PA_TY)         // rows of S and of the sums per thread
#define CN (PA_BC / PA_TX)         // columns of S per thread
#define DN (PA_D / PA_TX)          // columns of the sums per thread
#define DN4 (DN / 4)
#define DNR (DN % 4)
#define PCOLS (PA_BC / PA_PSPLIT)  // columns of P in shared memory at a time

#if (CN % 4) || (RM % 4) || ((CN / PA_PSPLIT) % 4) || (PCOLS % PA_VC) || (PA_VC % 4) || (PA_D % PA_TX)
#error "unsupported tile geometry"
#endif
#if PA_D % PA_KC && !PA_PAD && !PA_INT8
#error "unsupported chunk of the head dimension"
#endif
#if (PA_NT % PA_BR) || (PA_NT % PA_BC) || (PA_KC % (PA_PAIRS ? 8 : 4))
#error "unsupported staging geometry"
#endif
#if !PA_AMD && ((PA_BR * PA_KC) % (4 * PA_NT) || (PA_BC * PA_KC) % (4 * PA_NT))
#error "unsupported staging geometry"
#endif
#if PA_TX > 16
#error "the shuffles of a row reach 32 lanes"
#endif

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

// AMD's compiler keeps all that is derived from a lane's number, and then has no registers for the sums: this takes the
// lane anew for the rest of a block of code, from the number of its wave, which takes none. Only where all lanes are
// active.
#ifdef PA_HIP
INLINE Lane lane_anew(const Lane& t) {
    int first = __builtin_amdgcn_readfirstlane(t.tid);
    OPAQUE_UNIFORM(first);
#if PA_WAVE == 64
    return lane_of(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, first)));
#else
    return lane_of(__builtin_amdgcn_mbcnt_lo(~0u, first));
#endif
}
#elif PA_AMD
INLINE Lane lane_anew(const Lane& t) { return t; }
#endif
#if PA_AMD
#define LANE_ANEW(t)                     \
    const Lane t##_anew = lane_anew(t);  \
    const Lane& t = t##_anew;
#else
#define LANE_ANEW(t)
#endif

// It keeps all parameters as well, in registers of a wave that overflow into those of its lanes: these are read anew.
#ifdef PA_HIP
template <class P>
INLINE const P& params_anew() {
    auto p = __builtin_amdgcn_kernarg_segment_ptr();
    OPAQUE_UNIFORM(p);
    return *(const P*)p;
}
#define PARAMS_ANEW(Params, p) const Params& p = params_anew<Params>();
#else
#define PARAMS_ANEW(Params, p)
#endif

// It also moves the last multiplications of a product behind the next branch, with all their operands: COMPLETE holds
// them back.
#ifdef PA_HIP
template <int rows, int cols>
INLINE void complete(float (&sums)[rows][cols]) {
    FOR(i, rows) FOR(j, cols) asm volatile("" : "+v"(sums[i][j]));
}
#define COMPLETE(sums) complete(sums);
#else
#define COMPLETE(sums)
#endif

#define ROW(i) (t.ty * 4 + ((i) & 3) + ((i) >> 2) * 4 * PA_TY)  // row i of this thread within the tile
#define COL(j) (t.tx * 4 + ((j) & 3) + ((j) >> 2) * 4 * PA_TX)  // column j of this thread within the tile
