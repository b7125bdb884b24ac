// softmax(Q K^T * scale + mask) V by the online softmax, one block per tile of query rows.
// PA_SPLIT 0: pa_forward writes the output. PA_SPLIT 1: the rows of a tile are the queries of all heads of a group
// (few queries each), the keys are cut into p.splits ranges, one block each, and pa_combine joins the parts (combine.cuh).
// PA_RANGES 1, with PA_SPLIT 1: the keys are cut, but the rows of a tile are those of one head, as without PA_SPLIT.
// PA_CAPPED 1: scores may have a cap, and rows an attention sink.
#define IN_GROUPS (PA_SPLIT && !PA_RANGES)

struct Forward {
    const T* q; const T* k; const T* v; T* o;
    const void* mask;
    float* lse;                        // natural log of the denominator, or null
    float* log_sum;                    // its part besides the row maximum, or null
    float* part_sums; float* part_max; float* part_out;  // PA_SPLIT: [splits, B, Hq, Lq] twice and [..., dim_v]
    const int* cu_q; const int* cu_k;  // [B + 1] first tokens of packed sequences, or null
    i64 qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os;  // strides of batch, head, token in elements
    i64 mb, mh, mq, mk, lb, lh;                          // of the mask; of lse and log_sum (batch, head)
    int lq, lk, heads, group, batches;  // group: query heads per key/value head
    int low, high;                      // the band
    int lower_right;                    // add lk - lq to the band
    int dim, dim_v, mask_is_float32, splits;
    int first_tile, first_batch;        // of this launch
    float scale, scale_log2;            // softmax scale, and the same times log2(e)
#if PA_CAPPED
    const float* sinks;  // [Hq]: the score of one more key, whose value is zero; or null. PA_SPLIT: a part of its own
    float tanh_scale;    // scores are tanh(score), of which this is 2 log2(e) * what it is taken of; 0: no cap
#endif
};

// What a block works on. Row r of its tile is query query(r) of head head(r): of any head of a group where they are
// IN_GROUPS, elsewhere of one.
struct Place : Sequence {
    int b, hk, first_head;
    int row0, rows;                  // first row of the tile; rows from there on, may exceed BR
    int first_query, last_query;     // of the tile
    int k_begin, k_end, keys, split; // keys to visit; behind the last of `keys` nothing belongs to this block

#if IN_GROUPS
    __device__ __forceinline__ int query(int r) const { return (row0 + r) % lq; }
    __device__ __forceinline__ int head(int r) const { return first_head + (row0 + r) / lq; }
#else
    __device__ __forceinline__ int query(int r) const { return row0 + r; }
    __device__ __forceinline__ int head(int) const { return first_head; }
#endif
};

INLINE Place find_place(const Forward& p) {
    Place at;
    at.b = blockIdx.z + p.first_batch;
    (Sequence&)at = sequence_of(p, at.b);
#if IN_GROUPS
    at.hk = blockIdx.y;
    at.first_head = at.hk * p.group;
    at.split = blockIdx.x % p.splits;
    at.row0 = ((int)blockIdx.x / p.splits + p.first_tile) * PA_BR;
    at.rows = p.group * at.lq - at.row0;
    at.first_query = 0;
    at.last_query = at.lq - 1;
#else
    at.first_head = blockIdx.y;
    at.hk = at.first_head / p.group;
#if PA_SPLIT
    int tile = (int)blockIdx.x / p.splits;
    OPAQUE_UNIFORM(tile);  // AMD's compiler divides in registers of lanes
    at.split = (int)blockIdx.x - tile * p.splits;
#else
    at.split = 0;
    // Under a causal rule the last tiles have the most keys: they go first.
    const int tile = at.band.high < at.lk ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x;
#endif
    at.row0 = (tile + p.first_tile) * PA_BR;
    at.rows = at.lq - at.row0;
    at.first_query = at.row0;
    at.last_query = min_int(at.row0 + PA_BR, at.lq) - 1;
#endif
    at.k_begin = max_int(0, at.first_query + at.band.low);
    at.k_end = min_int(at.lk, at.last_query + at.band.high + 1);
    at.keys = at.lk;
#if PA_SPLIT
#if PA_RANGES
    const int tiles = (at.k_end - at.k_begin + PA_BC - 1) / PA_BC;
    const int each = OF_ALL_LANES((tiles + p.splits - 1) / p.splits);
#else
    const int tiles = (at.k_end - at.k_begin + PA_BC - 1) / PA_BC, each = (tiles + p.splits - 1) / p.splits;
#endif
    at.k_begin += at.split * each * PA_BC;
    at.k_end = min_int(at.k_end, at.k_begin + each * PA_BC);
    at.keys = min_int(at.lk, at.k_end);
#endif
    return at;
}

#if PA_MASK
// Where a row of the tile's mask begins, for the key col0.
struct PlacedMaskRow {
    const Place* place;
    i64 at, row, head;
    __device__ __forceinline__ i64 operator()(int r) const {
        return at + place->head(r) * head + place->query(r) * row;
    }
};

INLINE PlacedMaskRow mask_row_at(const Forward& p, const Place& place, int col0) {
    PlacedMaskRow row;
    row.place = &place;
    row.at = place.b * p.mb + col0 * p.mk;
    row.row = p.mq;
    row.head = p.mh;
    return row;
}
#endif

#if !PA_AMD
INLINE float prob_of(float s, float scale_log2, float row_max) {
#if PA_MASK == 2
    return exp2_approx((s - row_max) * LOG2E);
#else
    return exp2_approx(fmaf(s, scale_log2, -row_max));
#endif
}
#endif

#if PA_CAPPED
// The tanh of the scores: 1 - 2 / (1 + exp(2 x)).
INLINE void cap_scores(float (&S)[RM][CN], float tanh_scale) {
    if (tanh_scale != 0.f) {
        KEEP_BRANCH();
        FOR(i, RM) FOR(j, CN) S[i][j] = fmaf(-2.f, reciprocal(1.f + exp2_approx(S[i][j] * tanh_scale)), 1.f);
    }
}
#endif

#if !PA_AMD  // there they are those of amd_softmax.cuh
#define NO_REFERENCE NEG_INF  // of a row that has seen no key yet
#define LIFT 0.f
#define UNLIFTED(log2_of_sum) log2_of_sum
// A row's maximum is only replaced by one that is larger by so much (a factor of 256 of the probabilities, for which
// float32 has room): after a call's first tiles hardly ever, and the sums need not be scaled.
#define SLACK 8.f
// One step of the online softmax on a tile's scores: S becomes exp(S - max), row_max and row_sum are brought up to date
// (row_sum holds this lane's share), and the sums so far are scaled to the new maximum.
INLINE void softmax_step(float (&S)[RM][CN], float (&O)[RM][DN], float (&row_max)[RM], float (&row_sum)[RM],
                         float scale_log2) {
    float tile_max[RM];
    FOR(i, RM) tile_max[i] = S[i][0];
    FOR(j, CN) FOR(i, RM) tile_max[i] = fmaxf(tile_max[i], S[i][j]);
    FOR(s, 4) if ((2 << s) <= PA_TX)
        FOR(i, RM) tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(FULL_WARP, tile_max[i], 2 << s));
    bool rises = false;
    FOR(i, RM) {
#if PA_MASK != 2
        tile_max[i] *= scale_log2;  // rounded once: the same number is subtracted from every score of the row
#endif
        rises |= tile_max[i] > row_max[i] + SLACK / UNIT_TO_LOG2;
    }
    if (ANY_LANE(rises)) {
        KEEP_BRANCH();
        FOR(i, RM) if (tile_max[i] > row_max[i] + SLACK / UNIT_TO_LOG2) {
            const float fade = exp2_approx((row_max[i] - tile_max[i]) * UNIT_TO_LOG2);
            row_max[i] = tile_max[i];
            row_sum[i] *= fade;
            FOR(j, DN) O[i][j] *= fade;
        }
    }
    float reference[RM], sum[RM];
    FOR(i, RM) {
        reference[i] = row_max[i] == NEG_INF ? 0.f : row_max[i];  // a row that has seen no key yet
        sum[i] = 0.f;
    }
    FOR(j, CN) {
        FOR(i, RM) S[i][j] = prob_of(S[i][j], scale_log2, reference[i]);
        FOR(i, RM) sum[i] += S[i][j];
    }
    FOR(i, RM) row_sum[i] += sum[i];
}
#endif

// A float32 sum over n keys errs by sqrt(n) roundings. Every PA_FLUSH tiles the sums move to the output, so that none
// is longer than PA_FLUSH * PA_BC keys. They stay scaled to the row's maximum of that moment, `flushed_max`.
// A row moves as float4, and flushed_max is one register. With 32 columns of the sums per thread (head_dim 512) masked
// calls leave no register for that: there one number moves at a time, and flushed_max lies in shared memory, of which
// the one block that fits a multiprocessor has enough.
#define FLUSH_ROWS (DN <= 16)

#if PA_FLUSH && !FLUSH_ROWS
INLINE void flush_sums(float (&O)[RM][DN], const float (&row_max)[RM], float* flushed_max, float* o, i64 stride,
                       int rows, int dim, bool first, const Lane& t) {
    FOR(i, RM) {
        int r = ROW(i);
        OPAQUE(r);
        const float reference = row_max[i] == NEG_INF ? 0.f : row_max[i];
        const float fade = first ? 0.f : exp2_approx((flushed_max[r] - reference) * UNIT_TO_LOG2);
        volatile float* const row = o + (i64)r * stride;  // volatile: one at a time, with few registers
        FOR(j, DN) {
            const int c = sum_column(j, t);
            if (r < rows && (!PA_PAD || c < dim)) row[c] = first ? O[i][j] : fmaf(row[c], fade, O[i][j]);
            O[i][j] = 0.f;
        }
    }
    __syncwarp();  // the lanes that share a row have read its maximum
    FOR(i, RM) if (t.tx == 0) flushed_max[ROW(i)] = row_max[i];
}

// The sums of a row as if it had never been flushed.
INLINE void unflush_row(float (&O)[DN], float row_max, float flushed_max, const float* row, int dim, const Lane& t) {
    const float reference = row_max == NEG_INF ? 0.f : row_max;
    const float fade = exp2_approx((flushed_max - reference) * UNIT_TO_LOG2);
    FOR(j, DN) {
        const int c = sum_column(j, t);
        if (!PA_PAD || c < dim) O[j] = fmaf(row[c], fade, O[j]);
    }
}
#endif

INLINE void store_row(T* d, const float (&O)[DN], float factor, int dim, const Lane& t) {
    FOR(j, DN4) {
        const int c = j * 4 * PA_TX + t.tx * 4;
        float4 f;
        f.x = O[4 * j] * factor; f.y = O[4 * j + 1] * factor; f.z = O[4 * j + 2] * factor; f.w = O[4 * j + 3] * factor;
        if (!PA_PAD || c < dim) *(Raw4*)(d + c) = to_raw(f);
    }
    FOR(j, DNR) {
        const int c = sum_column(DN4 * 4 + j, t);
        if (!PA_PAD || c < dim) d[c] = to_storage(O[DN4 * 4 + j] * factor);
    }
}

#if PA_FLUSH && FLUSH_ROWS
// flushed_max of row i of this thread is with the lane whose tx is i, of those that share the row.
#if RM > PA_TX
#error "a thread has more rows than there are lanes to keep their flushed maximum"
#endif

#define NOT_FLUSHED (bits_to_float(0x7fffffffu))  // no number: no maximum is that

INLINE bool is_flushed(float flushed_max) { return flushed_max == flushed_max; }

INLINE float flushed_max_of(int i, float flushed_max, const Lane& t) {
    return __shfl_sync(FULL_WARP, flushed_max, (anew(t).tid & 1) | i << 1, 2 * PA_TX);
}

// Adds a row's flushed sums, scaled by `fade`.
INLINE void add_flushed(float (&O)[DN], const float* row, float fade, int dim, const Lane& t) {
    FOR(j, DN4) {
        const int c = j * 4 * PA_TX + t.tx * 4;
        if (PA_PAD && c >= dim) continue;
        const float4 f = *(const float4*)(row + c);
        O[4 * j] = fmaf(f.x, fade, O[4 * j]); O[4 * j + 1] = fmaf(f.y, fade, O[4 * j + 1]);
        O[4 * j + 2] = fmaf(f.z, fade, O[4 * j + 2]); O[4 * j + 3] = fmaf(f.w, fade, O[4 * j + 3]);
    }
    FOR(j, DNR) {
        const int c = sum_column(DN4 * 4 + j, t);
        if (!PA_PAD || c < dim) O[DN4 * 4 + j] = fmaf(row[c], fade, O[DN4 * 4 + j]);
    }
}

INLINE float fade_of_flushed(float flushed_max, float row_max) {
    const float reference = row_max == NEG_INF ? 0.f : row_max;
    return exp2_approx((flushed_max - reference) * UNIT_TO_LOG2);
}

INLINE void flush_sums(float (&O)[RM][DN], const float (&row_max)[RM], float& flushed_max, float* o, i64 stride,
                       int rows, int dim, const Lane& t) {
    FOR(i, RM) {
        int r = ROW(i);
        OPAQUE(r);
        float* const row = o + (i64)r * stride;
        const float before = flushed_max_of(i, flushed_max, t);
        if (r < rows) {
            if (is_flushed(before)) add_flushed(O[i], row, fade_of_flushed(before, row_max[i]), dim, t);
            store_row(row, O[i], 1.f, dim, t);
        }
        FOR(j, DN) O[i][j] = 0.f;
    }
    FOR(i, RM) if (t.tx == i) flushed_max = row_max[i];
}
#endif

#if PA_CAPPED
// Adds one more key of this score, whose value is zero.
INLINE void add_sink(float& row_max, float& row_sum, float& fade, float sink) {
    const float in_unit = sink * (LOG2E / UNIT_TO_LOG2);
    fade = 1.f;
    if (!(in_unit <= row_max)) {
        fade = exp2_approx((row_max - in_unit) * UNIT_TO_LOG2);
        row_max = in_unit;
        row_sum *= fade;
    }
    row_sum += exp2_approx((in_unit - row_max) * UNIT_TO_LOG2 + LIFT);
}
#endif

INLINE void store_lse(const Forward& p, i64 at, float row_max, float row_sum) {
    const float log_sum = row_sum > 0.f ? UNLIFTED(log2f(row_sum)) * LN2 : NEG_INF;
    p.lse[at] = row_sum > 0.f ? fmaf(row_max, UNIT_TO_LN, log_sum) : NEG_INF;
    if (p.log_sum) p.log_sum[at] = log_sum;
}

#if PA_SPLIT
INLINE void store_part(const Forward& p, i64 at, const float (&O)[DN], float row_max, float row_sum, const Lane& t) {
    FOR(j, DN) {
        const int c = sum_column(j, t);
        if (!PA_PAD || c < p.dim_v) p.part_out[at * p.dim_v + c] = O[j];
    }
    if (t.tx == 0) {
        p.part_max[at] = row_max;
        p.part_sums[at] = row_sum;
    }
}
#endif

// This thread's staged row of Q, row xr of the tile.
#define STAGED_QUERY                                                                                \
    p.q + sequence_at(p.cu_q, at.b, p.qb, p.qs) + at.head(xr) * p.qh + at.query(xr) * p.qs + \
        staged_x_col(t)
// On AMD's cards it is found anew for each tile, except where that takes divisions, or one tile is all there is.
#define QUERY_PER_TILE (PA_AMD && !IN_GROUPS && !PA_KEEP)

extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) PA_FORWARD_NAME(const Forward p) {
    __shared__ __align__(128) float sm[SMEM_TILE];
#if PA_FLUSH
#if FLUSH_ROWS
    float flushed_max = NOT_FLUSHED;
#else
    __shared__ float flushed_max[PA_BR];
    bool flushed = false;
#endif
#endif
    const Lane t = lane_of(threadIdx.x);
    const Place at = find_place(p);
    if (at.rows <= 0) return;

#if !QUERY_PER_TILE
    const int xr = min_int(staged_x_row(t), at.rows - 1);
    const T* const x = STAGED_QUERY;
#endif
    const T* k = p.k + sequence_at(p.cu_k, at.b, p.kb, p.ks) + at.hk * p.kh + at.k_begin * p.ks;
    const T* const first_value = p.v + sequence_at(p.cu_k, at.b, p.vb, p.vs) + at.hk * p.vh + at.k_begin * p.vs;
#if PA_AMD
    const T* value = first_value;
#else
    Moving v = moving_rows(first_value, p.vs, p.dim_v, t);
#endif

    float O[RM][DN], row_max[RM], row_sum[RM];
    clear(O);
    FOR(i, RM) {
        row_max[i] = NO_REFERENCE;
        row_sum[i] = 0.f;
    }
#if PA_AMD
#define NEXT_VALUES value += PA_BC * p.vs;
#else
#define NEXT_VALUES v.at += PA_BC * v.stride;
#endif
#if PA_MASK
    const MaskView mask = view_mask(p.mask, PA_SPLIT ? 1 : p.mq, p.mk, p.mask_is_float32);
#endif
#if PA_KEEP
    keep_rows(x, p.dim, sm, t);
#endif
    for (int col0 = at.k_begin; col0 < at.k_end; col0 += PA_BC) {
        LANE_ANEW(t)
        PARAMS_ANEW(Forward, p)
#if QUERY_PER_TILE
        const int xr = min_int(staged_x_row(t), at.rows - 1);
        const T* const x = STAGED_QUERY;
#endif
        const int cols = at.keys - col0;
#if PA_MASK
        u32 bits[MASK_WORDS];
        const PlacedMaskRow mask_row = mask_row_at(p, at, col0);
        if (p.mask && !__syncthreads_or(read_mask(bits, mask, mask_row, at.rows, cols, t))) {
            k += PA_BC * p.ks;  // nobody may look at any key of this tile
            NEXT_VALUES
            continue;
        }
#endif
        float S[RM][CN];
        product_rows(S, x, staged_row(k, p.ks, cols, t), p.dim, sm, t);
        k += PA_BC * p.ks;
#if PA_CAPPED
        cap_scores(S, p.tanh_scale);
#endif
        scale_scores(S, p.scale);
#if PA_MASK
        if (p.mask) apply_mask(S, bits, mask, mask_row, t);
#endif
        if (cols < PA_BC || band_cuts(at.band, at.first_query, at.last_query, col0)) {
            KEEP_BRANCH();
            FOR(i, RM) forbid_outside(S[i], at.query(ROW(i)) - col0, at.band, cols, t);
        }
        softmax_step(S, O, row_max, row_sum, p.scale_log2);
#if PA_AMD
        Moving v = moving_rows(value, p.vs, p.dim_v, t);
        NEXT_VALUES
#endif
        product_cols(O, S, v, cols, p.dim_v, sm, t);
#if PA_FLUSH
        if (flush_is_due(col0 - at.k_begin)) {
            int b = at.b;
            OPAQUE_UNIFORM(b);
            float* const o = p.o + sequence_at(p.cu_q, b, p.ob, p.os) + at.first_head * p.oh + at.row0 * p.os;
#if FLUSH_ROWS
            flush_sums(O, row_max, flushed_max, o, p.os, at.rows, p.dim_v, t);
#else
            flush_sums(O, row_max, flushed_max, o, p.os, at.rows, p.dim_v, !flushed, t);
            flushed = true;
#endif
        }
#endif
    }
#if PA_FLUSH && !FLUSH_ROWS
    __syncwarp();  // flushed_max is complete: the shuffles below bring the lanes together, but order no memory
#endif
    FOR(i, RM) {
        LANE_ANEW(t)
#if PA_AMD
        row_max[i] = maximum_of(row_max[i]);  // it was what probabilities are taken from
#endif
        float sum = row_sum[i];
        FOR(s, 4) if ((2 << s) <= PA_TX) sum += __shfl_xor_sync(FULL_WARP, sum, 2 << s);
#if PA_FLUSH && FLUSH_ROWS
        const float before = flushed_max_of(i, flushed_max, t);
#endif
        if (ROW(i) >= at.rows) continue;
        const int h = at.head(ROW(i)), query = at.query(ROW(i));
#if PA_SPLIT
        store_part(p, (((i64)at.split * p.batches + at.b) * p.heads + h) * at.lq + query, O[i], row_max[i], sum, t);
#else
        T* const o = p.o + sequence_at(p.cu_q, at.b, p.ob, p.os) + h * p.oh + query * p.os;
#if PA_FLUSH && FLUSH_ROWS
        if (is_flushed(before)) add_flushed(O[i], o, fade_of_flushed(before, row_max[i]), p.dim_v, t);
#elif PA_FLUSH
        if (flushed) unflush_row(O[i], row_max[i], flushed_max[ROW(i)], o, p.dim_v, t);
#endif
#if PA_CAPPED
        float fade = 1.f;
        if (p.sinks) add_sink(row_max[i], sum, fade, p.sinks[h]);
        store_row(o, O[i], sum > 0.f ? fade / sum : 0.f, p.dim_v, t);
#else
        store_row(o, O[i], sum > 0.f ? 1.f / sum : 0.f, p.dim_v, t);
#endif
        if (p.lse && t.tx == 0)
            store_lse(p, sequence_at(p.cu_q, at.b, p.lb, 1) + h * p.lh + query, row_max[i], sum);
#endif
    }
}
