// softmax(Q K^T * scale) V with both products in 8-bit integers by dp4a (sm_61, sm_70 and newer), on AMD's cards by
// v_dot4_i32_i8. Never exact. What it computes, in PyTorch: fused/launch/int8_definition.py.
//
// Compile-time parameters besides those of base.cuh:
//   PA_D               head_dim of the tiles: 64 or 128. Channels behind the tensors' own are zero before the rotation
//   PA_BR, PA_BC       query rows and keys of a tile;  PA_TX x PA_TY thread grid;  PA_MINB blocks per multiprocessor
//   PA_KC, PA_VC       words of a row of K, and of a channel of V, that are multiplied between two pieces of the next
//                      tile on their way
//
// What is rounded, for query row i, key j, channel d, all of it after the mean key has been subtracted from K and the
// mean value from V (the first changes no probability, the second is added back) and after a rotation x -> H x of the
// channels, which is orthogonal and spreads the large ones over all:
//   Q[i,d] = q[i,d] * a_i          q in -127 ... 127, a_i = max|Q_i| / 127 (times softmax scale and log2(e))
//   K[j,d] = k[j,d] * b_j          b_j a float of 22 bits, so that MAGIC * b_j is exact
//   V[j,d] = v[j,d] * c_j          half of each rounding error is added to the next key before it is rounded
//   u_ij   = log2 of P[i,j] c_j    = (sum_d q k) a_i b_j + log2(c_j): the weight of v[j], not of V[j]
//   p_ij   = round(255 * 2^(u_ij - max of u_i over this tile of keys))   0 ... 255, relative to the tile's own maximum
//            (the difference first: it is never above 0, so that no rounding of large scores makes a byte of 256)
//   O_i    = sum over tiles of 2^(tile's maximum) * (sum_j p v), divided by the sum of the unrounded P[i,j]
// Why u: a key with a large V needs a precise weight, one with a small V does not; and a row that looks mostly at a key
// with a tiny V (an attention sink) loses nothing. Why the tile's own maximum: relative to the row's running maximum a
// long flat row with one peak would round to nothing but that peak.
//
// Integers become floats, and back, without conversion instructions (a quarter of the rate of FFMA on sm_61): sums
// start at the bits of MAGIC = 1.5 * 2^23, and stay below 2^22 in magnitude:
//   127 * 127 * D < 2^22 for D <= 256;  255 * 127 * keys of a tile < 2^22 for up to 129 keys.
#define MAGIC 12582912.f
#define MAGIC_BITS 0x4b400000
#if PA_AMD  // signed bytes by signed ones only: a byte of P holds p - 128, and sums start at MAGIC + 128 * sum of v
#define BYTE_MAGIC 8388736.f  // 2^23 + 128: the low byte of p + it is round(p) - 128
#define V_WORDS (TILE_WORDS + PA_D)  // of V's tile: behind its codes where the sum of each channel starts
#define FIRST_SUM(i, j) A[i][j]
#else
#define BYTE_MAGIC 8388608.f  // 2^23: the low byte of p + 2^23 is round(p)
#define V_WORDS TILE_WORDS
#define FIRST_SUM(i, j) MAGIC_BITS
#endif
#define LEAST_SCALE 1e-30f
#define LOWEST -1e30f         // in place of -inf where one is subtracted from another
#define LARGEST 255.f
#define HANDED_ON 0.5f         // of what rounding does to a key's V
#define SLACK 8.f

#define WORDS (PA_D / 4)         // of a row of Q and K
#define GROUPS (PA_BC / 4)       // words of a channel of V's tile, of a row of P
#define PA_NT (PA_TX * PA_TY)
#define RM (PA_BR / PA_TY)
#define CN (PA_BC / PA_TX)
#define DN (PA_D / PA_TX)
#define TILE_WORDS (PA_BC * WORDS)  // of K's tile and of V's
#define PIECES (TILE_WORDS / 4 / PA_NT)
#define QK_CHUNKS (WORDS / PA_KC)
#define PV_CHUNKS (GROUPS / PA_VC)
#if RM % 4 || CN % 4 || DN % 4 || DN > 8 || WORDS % PA_KC || GROUPS % PA_VC || PA_KC % 4 || PA_VC % 4 || PA_TY % 8
#error "unsupported tile geometry"
#endif
#if TILE_WORDS % (4 * PA_NT) || PIECES % QK_CHUNKS || PIECES % PV_CHUNKS || PA_BC > 128 || PA_BC % 32 || PA_D > 256
#error "unsupported tile geometry"
#endif

#ifdef PA_CPU_EMU
INLINE int dp4a_signed(int a, int b, int sum) { return __dp4a(a, b, sum); }
#if PA_AMD
INLINE int dp4a_unsigned(u32 a, int b, int sum) { return __dp4a((int)a, b, sum); }
#else
INLINE int dp4a_unsigned(u32 a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(u8)(a >> i) * (int)(i8)(b >> i);
    return sum;
}
#endif
INLINE u32 permuted(u32 a, u32 b, u32 selector) {
    const unsigned long long both = a | (unsigned long long)b << 32;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
#elif defined(PA_HIP)
#if defined(__GFX11__) || defined(__GFX12__)
INLINE int dp4a_signed(int a, int b, int sum) { return __builtin_amdgcn_sudot4(true, a, true, b, sum, false); }
#else
INLINE int dp4a_signed(int a, int b, int sum) { return __builtin_amdgcn_sdot4(a, b, sum, false); }
#endif
INLINE int dp4a_unsigned(u32 a, int b, int sum) { return dp4a_signed((int)a, b, sum); }
INLINE u32 permuted(u32 a, u32 b, u32 s) {  // a byte of the instruction's selector is four bits of s
    return __builtin_amdgcn_perm(b, a, (s & 15) | (s & 0xf0) << 4 | (s & 0xf00) << 8 | (s & 0xf000) << 12);
}
// Each rounded on its own: products and sums in one expression would be one multiply-add.
INLINE float __fadd_rn(float x, float y) { return x + y; }
INLINE float __fsub_rn(float x, float y) { return x - y; }
INLINE float __fmul_rn(float x, float y) { return x * y; }
INLINE float __fdiv_rn(float x, float y) { return x / y; }
INLINE float __frcp_rn(float x) { return 1.f / x; }
INLINE int __float2int_rn(float x) { return (int)__builtin_rintf(x); }
#define rintf __builtin_rintf
#define fminf __builtin_fminf
INLINE u32 pa_shfl_xor(u32 value, int mask) { return float_to_bits(pa_shfl_xor(bits_to_float(value), mask)); }
// Of 32 lanes, whatever a wave has. 33: not equal.
INLINE u32 pa_ballot(bool x) {
    const unsigned long long lanes = __builtin_amdgcn_uicmp((u32)x, 0u, 33);
    return (u32)(PA_WAVE == 64 && threadIdx.x & 32 ? lanes >> 32 : lanes);
}
#define __ballot_sync(lanes, x) pa_ballot(x)
#else
INLINE int dp4a_signed(int a, int b, int sum) {
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}
INLINE int dp4a_unsigned(u32 a, int b, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}
INLINE u32 permuted(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
#endif

// ---- packing --------------------------------------------------------------------------------------------------------

// A warp holds a row: channel 32 e + lane is v[e].
#define PER_LANE (PA_D / 32)

INLINE void load_row(float (&v)[PER_LANE], const T* x, const float* mean, int dim, int lane) {
    FOR(e, PER_LANE) {
        const int c = 32 * e + lane;
        v[e] = c < dim ? load_one(x + c) - (mean ? mean[c] : 0.f) : 0.f;
    }
}

#define OF_ROTATION (PA_D == 64 ? 0.125f : 0.08838834764831845f)  // 1 / sqrt(PA_D)

// v -> H v, H the Hadamard matrix over sqrt(PA_D): symmetric, its own inverse. Each step rounded on its own.
INLINE void rotate(float (&v)[PER_LANE], int lane) {
    for (int s = 1; s < 32; s *= 2) FOR(e, PER_LANE) {
        const float other = __shfl_xor_sync(FULL_WARP, v[e], s);
        v[e] = lane & s ? __fsub_rn(other, v[e]) : __fadd_rn(v[e], other);
    }
    for (int s = 1; s < PER_LANE; s *= 2) FOR(e, PER_LANE) if (!(e & s)) {
        const float a = v[e], b = v[e | s];
        v[e] = __fadd_rn(a, b);
        v[e | s] = __fsub_rn(a, b);
    }
    FOR(e, PER_LANE) v[e] = __fmul_rn(v[e], OF_ROTATION);
}

// Compared as bits: a NaN is the largest, makes a scale of NaN, and so reaches the output.
INLINE float larger_magnitude(float a, float b) {
    const u32 x = float_to_bits(a) & 0x7fffffffu, y = float_to_bits(b) & 0x7fffffffu;
    return bits_to_float(x > y ? x : y);
}

INLINE float largest_of_row(const float (&v)[PER_LANE]) {
    float largest = 0.f;
    FOR(e, PER_LANE) largest = larger_magnitude(largest, v[e]);
    for (int s = 16; s; s >>= 1) largest = larger_magnitude(largest, __shfl_xor_sync(FULL_WARP, largest, s));
    return largest;
}

struct Pack {
    const T* x;          // [B, H, rows, dim] of Q, K or V
    const float* mean;   // [B, H, dim] of K or V; for Q null, or [B, H / group, dim] of K, for the scores
    int* words;          // Q: [B, H, rows, WORDS];  K: [B, H, tiles, WORDS, BC];  V: [B, H, tiles, V_WORDS],
                         // first [BC / 4, D]
    float* scales;       // Q: [B, H, rows] a_i;  K: [B, H, tiles, BC] b_j;  V: 1 / c_j, 0 behind the last key
    float* logs;         // V: log2(c_j), -inf behind the last key: it has no weight
    float* mean_scores;  // Q: [B, H, rows], the score of the mean key, which lse lacks; or null
    i64 xb, xh, xs;      // strides in elements
    int rows, heads, batches, group, tiles, dim;
    float scale, scale_log2;  // Q: softmax scale, and the same times log2(e)
};

INLINE u32 code_of(float x, float inverse) { return (u32)__float2int_rn(__fmul_rn(x, inverse)) & 0xffu; }
INLINE float at_least(float x) { return x < LEAST_SCALE ? LEAST_SCALE : x; }
INLINE float scale_of(float largest) { return at_least(__fdiv_rn(largest, 127.f)); }
// Of 22 bits: MAGIC = 3 * 2^22 times it is a float.
INLINE float short_scale(float scale) { return bits_to_float((float_to_bits(scale) + 3u) & ~3u); }

// Four neighbouring channels, of four lanes, in the word of the first of them.
INLINE u32 word_of(u32 code) {
    code |= __shfl_xor_sync(FULL_WARP, code, 1) << 8;
    return code | __shfl_xor_sync(FULL_WARP, code, 2) << 16;
}

// One warp per row.
extern "C" __global__ void __launch_bounds__(128) pa_pack_queries(const Pack p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.rows) return;
    const i64 head = row / p.rows;
    const int lane = threadIdx.x % 32;
    float v[PER_LANE];
    load_row(v, p.x + head / p.heads * p.xb + head % p.heads * p.xh + row % p.rows * p.xs, 0, p.dim, lane);
    if (p.mean_scores) {
        const float* const mean = p.mean + head / p.group * p.dim;
        float score = 0.f;
        FOR(e, PER_LANE) if (32 * e + lane < p.dim) score = fmaf(v[e], mean[32 * e + lane], score);
        for (int s = 16; s; s >>= 1) score = __fadd_rn(score, __shfl_xor_sync(FULL_WARP, score, s));
        if (lane == 0) p.mean_scores[row] = __fmul_rn(score, p.scale);
    }
    rotate(v, lane);
    const float scale = scale_of(largest_of_row(v)), inverse = __frcp_rn(scale);
    FOR(e, PER_LANE) {
        const u32 word = word_of(code_of(v[e], inverse));
        if (lane % 4 == 0) p.words[row * WORDS + 8 * e + lane / 4] = (int)word;
    }
    if (lane == 0) p.scales[row] = at_least(__fmul_rn(scale, p.scale_log2));
}

// What a block of 128 threads packs: a tile of keys.
struct KeyTile {
    const T* x;
    const float* mean;
    i64 at, step;  // at: the tile among all
    int keys, dim;
};

INLINE KeyTile key_tile(const Pack& p) {
    KeyTile t;
    t.at = blockIdx.x;
    const i64 head = t.at / p.tiles, first = t.at % p.tiles * PA_BC;
    t.x = p.x + head / p.heads * p.xb + head % p.heads * p.xh + first * p.xs;
    t.mean = p.mean + head * p.dim;
    t.step = p.xs;
    t.keys = min_int(PA_BC, p.rows - (int)first);
    t.dim = p.dim;
    return t;
}

// Key j of a tile without the mean, rotated; zeros behind the last.
INLINE void load_key(float (&v)[PER_LANE], const KeyTile& t, int j, int lane) {
    FOR(e, PER_LANE) v[e] = 0.f;
    if (j < t.keys) {
        load_row(v, t.x + j * t.step, t.mean, t.dim, lane);
        rotate(v, lane);
    }
}

// A warp takes every fourth key.
extern "C" __global__ void __launch_bounds__(128) pa_pack_keys(const Pack p) {
    const KeyTile tile = key_tile(p);
    const int lane = threadIdx.x % 32;
    for (int j = threadIdx.x / 32; j < PA_BC; j += 4) {
        float v[PER_LANE];
        load_key(v, tile, j, lane);
        const float scale = short_scale(scale_of(largest_of_row(v))), inverse = __frcp_rn(scale);
        FOR(e, PER_LANE) {
            const u32 word = word_of(code_of(v[e], inverse));
            if (lane % 4 == 0) p.words[tile.at * TILE_WORDS + (8 * e + lane / 4) * PA_BC + j] = (int)word;
        }
        if (lane == 0) p.scales[tile.at * PA_BC + j] = scale;
    }
}

// A warp takes a quarter of the tile, key after key: half of what rounding does to a key is added to the next one, so
// that the errors of neighbours, which often have similar weights, cancel. No more of it than half a step of the next
// key: one with a small V may have most of the weight.
extern "C" __global__ void __launch_bounds__(128) pa_pack_values(const Pack p) {
    const KeyTile tile = key_tile(p);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float carry[PER_LANE];
    FOR(e, PER_LANE) carry[e] = 0.f;
#if PA_AMD
    __shared__ int sums[4][PA_D];
    int sum[PER_LANE];
    FOR(e, PER_LANE) sum[e] = 0;
#endif
    for (int g = warp * (GROUPS / 4); g < (warp + 1) * (GROUPS / 4); ++g) {
        u32 word[PER_LANE];
        FOR(e, PER_LANE) word[e] = 0;
        for (int k = 0; k < 4; ++k) {
            const int j = 4 * g + k;
            float v[PER_LANE];
            load_key(v, tile, j, lane);
            const float scale = scale_of(largest_of_row(v)), inverse = __frcp_rn(scale), most = 0.5f * scale;
            FOR(e, PER_LANE) {
                const float wanted = fmaf(fminf(fmaxf(carry[e], -most), most), HANDED_ON, v[e]);
                const float code = fminf(fmaxf(rintf(__fmul_rn(wanted, inverse)), -127.f), 127.f);
                carry[e] = fmaf(-code, scale, wanted);
                word[e] |= ((u32)__float2int_rn(code) & 0xffu) << 8 * k;
#if PA_AMD
                sum[e] += __float2int_rn(code);
#endif
            }
            if (lane == 0) {
                p.scales[tile.at * PA_BC + j] = j < tile.keys ? inverse : 0.f;
                p.logs[tile.at * PA_BC + j] = j < tile.keys ? log2f(scale) : NEG_INF;
            }
        }
        FOR(e, PER_LANE) p.words[tile.at * V_WORDS + g * PA_D + 32 * e + lane] = (int)word[e];
    }
#if PA_AMD
    FOR(e, PER_LANE) sums[warp][32 * e + lane] = sum[e];
    __syncthreads();
    const int d = threadIdx.x;
    if (d < PA_D)
        p.words[tile.at * V_WORDS + TILE_WORDS + d] = MAGIC_BITS + 128 * (sums[0][d] + sums[1][d] + sums[2][d] + sums[3][d]);
#endif
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Tensors of words as in Pack, those of Q's heads and of K's and V's.
struct Int8Attention {
    const int* q; const float* q_scales;
    const int* k; const float* k_scales;
    const int* v; const float* v_scales; const float* v_logs;
    const float* mean;          // [B, Hkv, dim_v] of V
    const float* mean_scores;   // see Pack
    T* o;
    float* lse;                 // natural log of the denominator, or null
    const void* mask; u32* mask_bits; u8* flags;
    i64 ob, oh, os, lb, lh, mb, mh, mq, mk;  // strides in elements
    i64 bits_b, bits_h, bits_q, flags_b, flags_h, flags_q;
    int lq, lk, heads, group, tiles, dim_v;
    int low, high;              // the band
    int first_tile, first_batch;  // of this launch
    int mask_heads, mask_rows, mask_is_float32;
};

typedef Int8Attention Params;
#define MASK_FUNCTION pa_int8_mask_bits
#define TILE_QUERIES PA_BR
#define TILE_KEYS PA_BC
#define KEY_OF_BIT(bit) (bit)
