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
// mean value from V (the first changes no probability, the second is added back; not from values that it would make
// more than twice as large) and after a rotation x -> H x of the channels, which is orthogonal and spreads the large ones
// over all:
//   Q[i,d] = q[i,d] * a_i          q in -127 ... 127, a_i = max|Q_i| / 127 (times softmax scale and log2(e))
//   K[j,d] = k[j,d] * b_j          b_j a float of 22 bits, so that MAGIC * b_j is exact
//   V[j,d] = v[j,d] * c_j          half of each rounding error is added to the next key before it is rounded
//   u_ij   = log2 of P[i,j] c_j    = (sum_d q k) a_i b_j + log2(c_j): the weight of v[j], not of V[j]
//   p_ij   = round(255 * 2^(u_ij - max of u_i over this tile of keys))   0 ... 255, relative to the tile's own maximum
//            (the difference first: it is never above 0, so that no rounding of large scores makes a byte of 256)
//   O_i    = sum over tiles of 2^(tile's maximum) * (sum_j p v), divided by the sum of the unrounded P[i,j]
// Why u: a key with a large V needs a precise weight, one with a small V does not; and a row that looks mostly at a key
// with a tiny V (an attention sink) loses nothing. Why the tile's own maximum: relative to the row's running maximum a
// long flat row with one peak would round to nothing but that peak. Why small values keep the mean: an attention sink has
// nearly all of the weight, and without the mean its rounding error, of a row as large as the mean, would outweigh the
// output. The lowest bit of 1 / c_j marks such keys; where a tile has one, the mean times their weight is subtracted.
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

#if PA_AMD
INLINE int dp4a_unsigned(u32 a, int b, int sum) { return __dp4a((int)a, b, sum); }
#elif defined(PA_CPU_EMU)
INLINE int dp4a_unsigned(u32 a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(u8)(a >> i) * (int)(i8)(b >> i);
    return sum;
}
#else
INLINE int dp4a_unsigned(u32 a, int b, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}
#endif
// The lowest bytes of four neighbours: numbers that have been rounded by adding MAGIC or BYTE_MAGIC.
INLINE u32 word_of(const float* x) {
    const u32 low = __byte_perm(float_to_bits(x[0]), float_to_bits(x[1]), 0x0040);
    return __byte_perm(low, __byte_perm(float_to_bits(x[2]), float_to_bits(x[3]), 0x0040), 0x5410);
}

// ---- packing --------------------------------------------------------------------------------------------------------

// Eight lanes hold a row: channel CHANNEL(e) + i is v[4 * e + i].
#define OF_LANE (PA_D / 8)
#define CHANNEL(e) (4 * (8 * (e) + lane))
#define OF_ROTATION (PA_D == 64 ? 0.125f : 0.08838834764831845f)  // 1 / sqrt(PA_D)

// x -> H x, H the Hadamard matrix over sqrt(PA_D): symmetric, its own inverse. Each step rounded on its own. The lowest
// two bits of a channel's number are those of its place in v, the next ones those of `lane`, one of `lanes` that are
// `distance` apart, and the rest the place's again.
template <int n>
INLINE void rotate(float (&v)[n], int lane, int lanes, int distance) {
    for (int s = 1; s < n; s *= 2) {
        FOR(c, n) if (!(c & s)) {
            const float a = v[c], b = v[c | s];
            v[c] = __fadd_rn(a, b);
            v[c | s] = __fsub_rn(a, b);
        }
        if (s == 2) for (int l = 1; l < lanes; l *= 2) {
            const float sign = lane & l ? -1.f : 1.f;
            FOR(c, n) v[c] = fmaf(v[c], sign, __shfl_xor_sync(FULL_WARP, v[c], distance * l));
        }
    }
    FOR(c, n) v[c] = __fmul_rn(v[c], OF_ROTATION);
}

struct Pack {
    const T* x;          // [B, H, rows, dim] of Q, K or V
    const float* mean;   // [B, H / group, dim] of K or V; for Q null, or K's, for the scores
    int* words;          // Q: [B, H, rows, WORDS];  K: [B, H, tiles, WORDS, BC];  V: [B, H, tiles, V_WORDS],
                         // first [BC / 4, D]
    float* scales;       // Q: [B, H, rows] a_i;  K: [B, H, tiles, BC] b_j;  V: 1 / c_j, 0 behind the last key; its lowest
                         // bit is 1 where the mean has not been subtracted
    float* logs;         // V: log2(c_j), -inf behind the last key: it has no weight
    float* mean_scores;  // Q: [B, H, rows], the score of the mean key, which lse lacks; or null
    i64 xb, xh, xs;      // strides in elements
    int rows, heads, group, tiles, dim;  // tiles: of a head, of BC rows
    float scale, scale_log2;  // Q: softmax scale, and the same times log2(e)
};

// What a warp packs: a tile, from its row `first` on every `step`-th row. Behind the last row comes that row again.
struct Rows {
    const T* x;             // the lane's first channel of a row
    Raw4 raw[OF_LANE / 4];  // that row, on its way; 0 where there is no channel
    float mean[OF_LANE];    // of the lane's channels, the same
    int head, tile, lane, j, left, step;  // j: of the row in the tile; left: rows from it on

    __device__ __forceinline__ Rows(const Pack& p, int first, int step_) {
        head = blockIdx.z * p.heads + blockIdx.y;
        tile = blockIdx.x * 4 + threadIdx.x / 32;
        lane = threadIdx.x % 8;
        j = first;
        step = step_;
        left = p.rows - tile * PA_BC - first;
        x = p.x + blockIdx.z * p.xb + blockIdx.y * p.xh + (p.rows - max_int(left, 1)) * p.xs + CHANNEL(0);
        const float* const from = p.mean + (i64)(head / p.group) * p.dim;
        FOR(c, OF_LANE) mean[c] = p.mean && CHANNEL(c / 4) < p.dim ? from[CHANNEL(c / 4) + c % 4] : 0.f;
        FOR(e, OF_LANE / 4) raw[e] = zero_raw();
        load(p.dim);
    }
    __device__ __forceinline__ void load(int dim) {
        FOR(e, OF_LANE / 4) if (CHANNEL(e) < dim) raw[e] = load_raw(x + 32 * e);
    }
    // Where this one has been taken.
    __device__ __forceinline__ void load_next(const Pack& p) {
        if (left > step) x += step * p.xs;
        load(p.dim);
    }
};

INLINE void take_row(float (&v)[OF_LANE], const Rows& t) {
    FOR(e, OF_LANE / 4) {
        const float4 f = to_float4(t.raw[e]);
        v[4 * e] = f.x; v[4 * e + 1] = f.y; v[4 * e + 2] = f.z; v[4 * e + 3] = f.w;
    }
}

INLINE float at_least(float x) { return x < LEAST_SCALE ? LEAST_SCALE : x; }

// The largest magnitude of a row. Compared as bits: a NaN is the largest.
INLINE float largest_of(const float (&v)[OF_LANE]) {
    u32 most = 0;
    FOR(c, OF_LANE) most = larger(most, float_to_bits(v[c]) & 0x7fffffffu);
    for (int s = 1; s < 8; s *= 2) most = larger(most, __shfl_xor_sync(FULL_WARP, most, s));
    return bits_to_float(most);
}

// Of a row, NaN where it has a number that is not finite, and so reaches the output.
INLINE float scale_of(const float (&v)[OF_LANE]) {
    const float largest = largest_of(v);
    return at_least(fmaf(largest, 1.f / 127.f, largest - largest));
}

// v / scale rounded, to every `step`-th word.
INLINE void store_codes(int* words, int step, float (&v)[OF_LANE], float scale) {
    const float inverse = __frcp_rn(scale);
    FOR(c, OF_LANE) v[c] = fmaf(v[c], inverse, MAGIC);
    FOR(e, OF_LANE / 4) words[e * step] = (int)word_of(v + 4 * e);
}

extern "C" __global__ void __launch_bounds__(128) pa_pack_queries(const Pack p) {
    Rows t(p, threadIdx.x / 8 % 4, 4);
    if (t.tile >= p.tiles) return;
    i64 row = (i64)t.head * p.rows + t.tile * PA_BC + t.j;
#pragma unroll 1
    for (; t.j < PA_BC; t.j += t.step, t.left -= t.step, row += t.step) {
        float v[OF_LANE], score = 0.f;
        take_row(v, t);
        t.load_next(p);
        FOR(c, OF_LANE) score = fmaf(v[c], t.mean[c], score);
        for (int s = 4; s; s >>= 1) score = __fadd_rn(score, __shfl_xor_sync(FULL_WARP, score, s));
        rotate(v, t.lane, 8, 1);
        const float scale = scale_of(v);
        if (t.left <= 0) continue;
        store_codes(p.words + row * WORDS + t.lane, 8, v, scale);
        if (t.lane) continue;
        p.scales[row] = at_least(__fmul_rn(scale, p.scale_log2));
        if (p.mean_scores) p.mean_scores[row] = __fmul_rn(score, p.scale);
    }
}

extern "C" __global__ void __launch_bounds__(128) pa_pack_keys(const Pack p) {
    Rows t(p, threadIdx.x / 8 % 4, 4);
    if (t.tile >= p.tiles) return;
    const i64 at = (i64)t.head * p.tiles + t.tile;
    int* const words = p.words + at * TILE_WORDS + t.lane * PA_BC;
    float* const scales = p.scales + at * PA_BC;
#pragma unroll 1
    for (; t.j < PA_BC; t.j += t.step, t.left -= t.step) {
        float v[OF_LANE];
        take_row(v, t);
        t.load_next(p);
        FOR(c, OF_LANE) v[c] = __fsub_rn(v[c], t.mean[c]);
        rotate(v, t.lane, 8, 1);
        const float scale = bits_to_float(float_to_bits(scale_of(v)) & ~3u);  // of 22 bits: MAGIC times it is a float
        store_codes(words + t.j, 8 * PA_BC, v, scale);
        if (t.lane == 0) scales[t.j] = scale;
    }
}

// Eight lanes take a quarter of the tile, key after key: half of what rounding does to a key is added to the next one,
// so that the errors of neighbours, which often have similar weights, cancel. No more of it than half a step of the next
// key: one with a small V may have most of the weight. So no code is above 127.
extern "C" __global__ void __launch_bounds__(128) pa_pack_values(const Pack p) {
    Rows t(p, threadIdx.x / 8 % 4 * (PA_BC / 4), 1);
    if (t.tile >= p.tiles) return;
    const int lane = t.lane, quarter = threadIdx.x / 8 % 4;
    const i64 at = (i64)t.head * p.tiles + t.tile;
    int* words = p.words + at * V_WORDS + quarter * (GROUPS / 4) * PA_D + CHANNEL(0);
    float *const scales = p.scales + at * PA_BC, *const logs = p.logs + at * PA_BC;
    float carry[OF_LANE];
    FOR(c, OF_LANE) carry[c] = 0.f;
#pragma unroll 1
    for (int g = 0; g < GROUPS / 4; ++g, words += PA_D) {
        u32 word[OF_LANE];
        FOR(c, OF_LANE) word[c] = 0;
#pragma unroll 1
        for (int k = 0; k < 4; ++k, t.j += t.step, t.left -= t.step) {
            float v[OF_LANE];
            take_row(v, t);
            const float own = largest_of(v);
            FOR(c, OF_LANE) v[c] = __fsub_rn(v[c], t.mean[c]);
            const bool is_small = 2.f * own < largest_of(v);
            if (is_small) {
                KEEP_BRANCH();
                take_row(v, t);
            }
            t.load_next(p);
            rotate(v, t.lane, 8, 1);
            const float scale = scale_of(v), inverse = __frcp_rn(scale), most = 0.5f * scale;
            FOR(c, OF_LANE) {
                const float wanted = fmaf(fminf(fmaxf(carry[c], -most), most), HANDED_ON, v[c]);
                const float code = fmaf(wanted, inverse, MAGIC);
                carry[c] = fmaf(MAGIC - code, scale, wanted);
                word[c] = __byte_perm(word[c], float_to_bits(code), 0x4321);
            }
            if (lane) continue;
            scales[t.j] = t.left > 0 ? bits_to_float((float_to_bits(inverse) & ~1u) | is_small) : 0.f;
            logs[t.j] = t.left > 0 ? log2f(scale) : NEG_INF;
        }
        FOR(e, OF_LANE / 4) {
            int4 four;
            four.x = (int)word[4 * e]; four.y = (int)word[4 * e + 1];
            four.z = (int)word[4 * e + 2]; four.w = (int)word[4 * e + 3];
            *(int4*)(words + 32 * e) = four;
        }
    }
#if PA_AMD
    for (int c = 0; c < OF_LANE; ++c) {  // what the lane has written
        const int d = 32 * (c / 4) + c % 4;
        int sum = 0;
        for (int g = 1; g <= GROUPS / 4; ++g) sum = __dp4a(words[d - g * PA_D], 0x01010101, sum);
        for (int s = 8; s < 32; s *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, s);
        if (quarter == 3) words[d] = MAGIC_BITS + 128 * sum;  // behind the tile's codes
    }
#endif
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Tensors of words as in Pack, those of Q's heads and of K's and V's.
struct Int8Attention {
    const int* q; const float* q_scales;
    const int* k; const float* k_scales;
    const int* v; const float* v_scales; const float* v_logs;
    const float* mean;          // [B, Hkv, D] of V, rotated
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
