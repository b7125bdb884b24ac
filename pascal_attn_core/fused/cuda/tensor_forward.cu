// softmax(Q K^T * scale + mask) V on tensor cores: float16 in and out, float32 sums. One block per tile of PA_BR query
// rows; a warp owns PA_WR of them for all keys, so that S and the sums never leave its registers. K and V pass through
// registers to shared memory, the next tile while this one is used. With PA_SPLIT see forward.cu.

#if PA_DYNAMIC && !defined(PA_CPU_EMU)
extern __shared__ __align__(128) char sm[];
#else
__shared__ __align__(128) char sm[SMEM_BYTES];
#endif

#if PA_COUNTERS
__shared__ u32 stored[2][PA_WARPS];  // how many tiles of K (0) and of V (1) each warp has stored its share of
#define WAIT_FOR(what, tiles) wait_for(stored[what], PA_WARPS, tiles, t.lane)
#define SIGNAL(what, tiles) signal(&stored[what][t.warp], tiles, t.lane)
#else
#define WAIT_FOR(what, tiles)
#define SIGNAL(what, tiles)
#endif

#if PA_BOUNDS
__shared__ volatile int bounds[2];
#define UNCUT_FROM bounds[0]
#define UNCUT_TO bounds[1]
#else
#define UNCUT_FROM uncut_from
#define UNCUT_TO uncut_to
#endif

INLINE float prob_of(float s, float scale_log2, float row_max) {
#if PA_MASK == 2
    return exp2_approx((s - row_max) * LOG2E);
#else
    return exp2_approx(fmaf(s, scale_log2, -row_max));
#endif
}

// The sum, and the largest, of what the lanes of a row have.
INLINE float row_total(float x) {
    FOR(bit, ROW_BITS) if (ROW_LANES >> bit & 1) x += __shfl_xor_sync(FULL_WARP, x, 1 << bit);
    return x;
}
INLINE float row_largest(float x) {
    FOR(bit, ROW_BITS) if (ROW_LANES >> bit & 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1 << bit));
    return x;
}

// One step of the online softmax: P = exp(S - max), rounded to halves; row_max and row_sum are brought up to date
// (row_sum holds this lane's share), and the sums so far are scaled to the new maximum. Unlike in forward.cu every new
// maximum counts: a key that has most of the weight is then 1 exactly, where halves would round it.
INLINE void softmax_step(Probs& P, const Scores& S, Sums& O, float (&row_max)[ROWS], float (&row_sum)[ROWS],
                         float scale_log2, const Lane& t) {
    float tile_max[ROWS];
    bool rises = false;
    FOR(r, ROWS) {
        float mx = score(S, r, 0, 0);
#if PA_WMMA
        FOR(n, NT8) FOR(i, PER_8 / 2) mx = largest_of_three(mx, score(S, r, n, 2 * i), score(S, r, n, 2 * i + 1));
#else
        FOR(n, NT8) FOR(i, PER_8) mx = fmaxf(mx, score(S, r, n, i));
#endif
        mx = row_largest(mx);
#if PA_MASK != 2
        mx *= scale_log2;
#endif
        tile_max[r] = mx;
        rises |= mx > row_max[r];
    }
    if (rises) {
        KEEP_BRANCH();
        FOR(r, ROWS) if (tile_max[r] > row_max[r]) {
            const float fade = exp2_approx((row_max[r] - tile_max[r]) * UNIT_TO_LOG2);
            row_max[r] = tile_max[r];
            row_sum[r] *= fade;
            FOR(n, CHUNKS) FOR(i, PER_8) sum_at(O, r, n, i) *= fade;
        }
    }
    float reference[ROWS];
    FOR(r, ROWS) reference[r] = row_max[r] == NEG_INF ? 0.f : row_max[r];  // a row that has seen no key yet
    FOR(n, NT8) {
        u32 pairs[ROWS][PER_8 / 2];
        FOR(r, ROWS) FOR(x, PER_8 / 2) {
            const float y = prob_of(score(S, r, n, 2 * x), scale_log2, reference[r]);
            const float z = prob_of(score(S, r, n, 2 * x + 1), scale_log2, reference[r]);
            pairs[r][x] = n % 4 < PA_INTEGER_PACKED ? pack_shares(y, z) : pack_halves(y, z);
            row_sum[r] += y + z;
        }
        to_operand(P, n, pairs, t);
    }
}

// Forbids what the band does not allow and the columns that do not exist. Rare: all it needs is computed anew.
INLINE void forbid_outside(Scores& S, const Forward& p, int col0, const Lane& lane) {
    const Lane t = anew(lane);
    int z = PLACE_OF;
    OPAQUE_UNIFORM(z);
    const Place at = find_place(p, z);
    FOR(r, ROWS) {
        const int distance = at.query(row_of(t, r)) - col0;
        const int last = min_int(at.keys - 1 - col0, distance + at.band.high), first = distance + at.band.low;
        FOR(n, NT8) FOR(i, PER_8)
            if (col_of(t, n, i) > last || col_of(t, n, i) < first) score(S, r, n, i) = NEG_INF;
    }
}

INLINE void store_lse(const Forward& p, i64 at, float row_max, float row_sum) {
    const float log_sum = row_sum > 0.f ? log2f(row_sum) * LN2 : NEG_INF;
    p.lse[at] = row_sum > 0.f ? fmaf(row_max, UNIT_TO_LN, log_sum) : NEG_INF;
    if (p.log_sum) p.log_sum[at] = log_sum;
}

// What is left of the scores after the product: with a softcap their tanh, with numbers to be added the scale.
INLINE void finish_scores(Scores& S, const Forward& p) {
    if (p.tanh_scale != 0.f) {
        KEEP_BRANCH();
        FOR(r, ROWS) FOR(n, NT8) FOR(i, PER_8) {
            float& s = score(S, r, n, i);
            s = tanh_of(s, p.tanh_scale);
        }
    }
#if PA_MASK == 2
    FOR(r, ROWS) FOR(n, NT8) FOR(i, PER_8) score(S, r, n, i) *= p.scale;
#endif
}

// Adds one more key of this score, whose value is zero.
INLINE void add_sink(float& row_max, float& row_sum, float& fade, float sink) {
    const float in_unit = sink * (LOG2E / UNIT_TO_LOG2);
    fade = 1.f;
    if (!(in_unit <= row_max)) {
        fade = exp2_approx((row_max - in_unit) * UNIT_TO_LOG2);
        row_max = in_unit;
        row_sum *= fade;
    }
    row_sum += exp2_approx((in_unit - row_max) * UNIT_TO_LOG2);
}

extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) PA_FORWARD_NAME(const Forward p) {
    int tid = threadIdx.x;
    OPAQUE(tid);  // else ptxas keeps more in registers than there are (head_dim 128)
    const Lane t = lane_of(tid);
#if PA_EVEN
    Place at = find_place(p, PLACE_OF);
#else
    const Place at = find_place(p, PLACE_OF);
#endif
    if (at.rows <= 0) return;
    char* const q_sm = sm + SMEM_MOVING;
    Left Q[PA_QREG];
#if PA_QREG < PA_D / 8
    stage_query<Q_LEFT>(q_sm, p, at, PA_QREG, t);
#endif
    FOR(round, Q_ROUNDS) {
        if (round > 0) __syncthreads();  // the round before is in registers
        stage_query<Q_ROUND>(sm, p, at, round * Q_ROUND, t);
        __syncthreads();
        const u32 from = left_address(sm, Q_ROUND, t);
        FOR(c, Q_ROUND) if (round * Q_ROUND + c < PA_QREG)
            load_left(Q[round * Q_ROUND + c < PA_QREG ? round * Q_ROUND + c : 0], from, Q_ROUND, c);
    }
    const u32 q_from = Q_LEFT > 0 ? left_address(q_sm, Q_LEFT, t) : 0;
    u32 k_from = right_address(sm, t);

    int col0 = at.k_begin;
#if PA_MASK
    Flags flags;
    col0 = next_seen(flags, p, at, col0, true, t);
#endif
    const T* k = p.k + first_token_at(p.cu_k, at.b, p.kb, p.ks) + at.hk * p.kh + col0 * p.ks;
    const T* v = p.v + first_token_at(p.cu_k, at.b, p.vb, p.vs) + at.hk * p.vh + col0 * p.vs;
    Sums O;
    float row_max[ROWS], row_sum[ROWS];
    FOR(r, ROWS) {
        FOR(n, CHUNKS) FOR(i, PER_8) sum_at(O, r, n, i) = 0.f;
        row_max[r] = NEG_INF;
        row_sum[r] = 0.f;
    }
    __syncthreads();  // Q is in registers
    if (col0 < at.k_end) {
        int4 r[PIECES];
        fetch_tile(r, k, (u32)p.ks, at.keys - col0, p.dim, t);
        store_tile(sm, r, t);
        fetch_values(r, v, (u32)p.vs, at.keys - col0, p.dim_v, t);
        store_values(sm + TILE_BYTES, r, t);
#if PA_COUNTERS
        if (t.tid < 2 * PA_WARPS) stored[t.tid / PA_WARPS][t.tid % PA_WARPS] = 1;
#endif
        __syncthreads();
    }
#if PA_COUNTERS
    u32 tiles = 1;  // stored by this warp
#endif
    // Tiles from uncut_from to uncut_to exist as a whole and lie within the band of all rows.
    const int uncut_from = at.last_query + at.band.low;
    const int uncut_to = min_int(at.first_query + at.band.high, at.keys - 1) - PA_BC + 1;
#if PA_BOUNDS
    bounds[0] = uncut_from;  // every thread reads what it wrote
    bounds[1] = uncut_to;
#endif
    // Shared memory: [K, V, next K, next V], the pairs changing places.
    char* next_sm = sm + 2 * TILE_BYTES;
#pragma unroll 1
    while (col0 < at.k_end) {
        const int cols = at.keys - col0;
#if PA_MASK
        const bool is_cut = flags.cut >> col0 / PA_BC % 32 & 1;
        MaskBits bits;
        if (is_cut) bits = read_bits(p, at, col0, anew(t));
        const int next = next_seen(flags, p, at, col0 + PA_BC, false, t), step = next - col0;
#else
        const int next = col0 + PA_BC, step = PA_BC;
#endif
        // Behind the last tile comes the last again, which nobody uses: loads without a branch can be moved freely.
        const bool more = next < at.k_end;
        const int next_cols = more ? cols - step : cols;
        int4 r[PIECES];
        Scores S;
        Probs P;
        k += more ? step * p.ks : 0;
        fetch_tile(r, k, (u32)p.ks, next_cols, p.dim, t);
        // Everybody has stored its share of this K: hence nobody reads the one before any more, which the next replaces.
        WAIT_FOR(0, tiles);
        product_rows<PA_QREG>(S, Q, q_from, k_from);
        store_tile(next_sm, r, t);
        SIGNAL(0, tiles + 1);
        v += more ? step * p.vs : 0;
        fetch_values(r, v, (u32)p.vs, next_cols, p.dim_v, t);
        finish_scores(S, p);
#if PA_MASK
        if (is_cut) {
            KEEP_BRANCH();
            apply_mask(S, bits, p, at, col0, anew(t));
        }
#endif
        if (col0 < UNCUT_FROM || col0 > UNCUT_TO) {
            KEEP_BRANCH();
            forbid_outside(S, p, col0, t);
        }
        WAIT_FOR(1, tiles);  // the same for V; not later, where P V begins between exponentials
        softmax_step(P, S, O, row_max, row_sum, p.scale_log2, t);
        product_cols(O, P, k_from + TILE_BYTES);
        store_values(next_sm + TILE_BYTES, r, t);
#if PA_COUNTERS
        ++tiles;
        SIGNAL(1, tiles);
#else
        __syncthreads();  // the next K and V are there, these have been used
#endif
        const u32 there = (u32)(next_sm - sm);
        next_sm = sm + 2 * TILE_BYTES - there;
        k_from += 2 * there - 2 * TILE_BYTES;
        col0 = next;
    }
#if PA_EVEN
    if (!join_parts(O, row_max, row_sum, p, t)) return;
    int block = PLACE_OF;
    OPAQUE(block);
    at = find_place(p, block);  // not kept, where ptxas has no uniform registers for it
#endif
    FOR(r, ROWS) {
        float sum = row_total(row_sum[r]), largest = row_max[r], fade = 1.f;
        const int row = row_of(t, r);
        if (row >= at.rows) continue;
        const int h = at.head(row), query = at.query(row);
        const bool is_leader = (t.lane & ROW_LANES) == 0;
#if PA_SPLIT
        if (p.splits > 1) {
            const i64 part = (((i64)at.split * p.batches + at.b) * p.heads + h) * at.lq + query;
            FOR(n, CHUNKS) FOR(i, PER_8) {
                const int d = sum_column(t, n, i);
                if (!PA_PAD || d < p.dim_v) p.part_out[part * p.dim_v + d] = sum_at(O, r, n, i);
            }
            if (is_leader) {
                p.part_max[part] = largest;
                p.part_sums[part] = sum;
            }
            continue;
        }
#endif
        if (p.sinks) add_sink(largest, sum, fade, p.sinks[h]);
        const float factor = sum > 0.f ? fade / sum : 0.f;
        T* const o = p.o + first_token_at(p.cu_q, at.b, p.ob, p.os) + h * p.oh + query * p.os;
        FOR(n, CHUNKS) FOR(i, PER_8) if (i % 2 == 0) {
            const int d = sum_column(t, n, i);
            if (!PA_PAD || d < p.dim_v)
                *(u32*)(o + d) = pack_halves(sum_at(O, r, n, i) * factor, sum_at(O, r, n, i + 1) * factor);
        }
        if (p.lse && is_leader)
            store_lse(p, first_token_at(p.cu_q, at.b, p.lb, 1) + h * p.lh + query, largest, sum);
    }
}
