// P is kept times 2^PROB_BITS, since a half has few bits for small numbers. Here delta and the shift of every row's scores
// are computed for that: one warp per query row. Packed sequences are one long one here.
#define PROB_BITS 12.f
#define PROB_UNIT (1.f / 4096.f)

#if !PA_KEYS
extern "C" __global__ void __launch_bounds__(128) pa_tensor_delta(const Params p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.lq) return;
    const int i = (int)(row % p.lq), h = (int)(row / p.lq % p.heads), b = (int)(row / p.lq / p.heads);
    const T* const o = p.o + b * p.ob + h * p.oh + i * p.os;
    const T* const g = p.g + b * p.gb + h * p.gh + i * p.gs;
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < p.dim_v; c += 32) sum = fmaf(half_to_float(o[c]), half_to_float(g[c]), sum);
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, s);
    if (threadIdx.x % 32) return;
    const float lse = p.lse[row], log_sum = p.log_sum ? p.log_sum[row] : 0.f;
    const bool empty = lse == NEG_INF;  // a row that may look at no key: every probability is zero
    p.delta[row] = empty ? 0.f : (sum - (p.grad_lse ? p.grad_lse[row] : 0.f)) * PROB_UNIT;
#if PA_MASK == 2
    p.shift[row] = empty ? 0.f : lse - log_sum;
    p.bits[row] = empty ? POS_INF : log_sum * LOG2E - PROB_BITS;
#else
    p.shift[row] = empty ? POS_INF : lse * LOG2E - PROB_BITS;
#endif
}
#endif

// What a query's column or row of scores needs.
struct Stats {
    float shift, delta, bits;
};

INLINE float prob_of(float s, const Params& p, const Stats& of) {
#if PA_MASK == 2
    return exp2_approx(fmaf(s - of.shift, LOG2E, -of.bits));
#else
    return exp2_approx(fmaf(s, p.scale_log2, -of.shift));
#endif
}

#if PA_CAPPED
// Scores to their tanh, and its slope.
INLINE void cap_scores(Scores& S, Scores& slope, float tanh_scale) {
    FOR(r, ROWS) FOR(n, NT8) FOR(i, PER_8) {
        float& s = score(S, r, n, i);
        s = tanh_of(s, tanh_scale);
        score(slope, r, n, i) = fmaf(-s, s, 1.f);
    }
}
#endif

// Whether the band or an end cuts into the PA_SC columns from col0 on. Queries that do not exist need no care: their
// probabilities are zero.
INLINE bool is_cut(const Where& at, int col0) {
    const int last = at.row0() + min_int(PA_BR, at.rows()) - 1;
    const bool ends = !PA_KEYS && col0 + PA_SC > at.length();
    return ends || col0 + PA_SC - 1 > at.row0() + at.high() || col0 < last + at.low();
}

// Forbids what the band does not allow, and keys that do not exist. Rare: all it needs is computed anew.
INLINE void forbid_outside(Scores& S, const Params& p, const Where& where, int col0, const Lane& lane) {
    const Lane t = anew(lane);
#if KEPT
    const Where& at = where;
#else
    int z = blockIdx.z;
    OPAQUE(z);
    Where at;
    at.at = find_place(p, z);
#endif
    FOR(r, ROWS) {
        const int distance = at.row0() + row_of(t, r) - col0;
        const int last = min_int(at.length() - 1 - col0, distance + at.high()), first = distance + at.low();
        FOR(n, NT8) FOR(i, PER_8)
            if (col_of(t, n, i) > last || col_of(t, n, i) < first) score(S, r, n, i) = NEG_INF;
    }
}

// A moving tile: its first column, of which head of the group, and whether the mask cuts into it.
struct Step {
    int col0, head;
    bool is_masked;
};

// The tile of Y, or of YY, of a step.
INLINE Source source_of(const Params& p, const Where& at, const Step& s, bool is_y) {
    Source from;
#if PA_KEYS
    const i64 stride = is_y ? p.qs : p.gs;
    const int head = at.head() * p.group + s.head;
    from.at = (is_y ? p.q : p.g) + at.queries(is_y ? p.qb : p.gb, stride) + head * (is_y ? p.qh : p.gh) + s.col0 * stride;
#else
    const i64 stride = is_y ? p.ks : p.vs;
    const int head = at.head() / p.group;
    from.at = (is_y ? p.k : p.v) + at.keys(is_y ? p.kb : p.vb, stride) + head * (is_y ? p.kh : p.vh) + s.col0 * stride;
#endif
    from.stride = (u32)stride;
    from.rows = at.length() - s.col0;
    from.dim = is_y ? p.dim : p.dim_v;
    return from;
}

// The first step from `s` on that is worth taking; heads: none is. `fresh`: flags are not those of its head yet.
#if PA_MASK
INLINE void settle(Step& s, Flags& flags, bool fresh, const Params& p, const Where& at, int heads, const Lane& t) {
    while (s.head < heads) {
        const int tile = s.col0 / PA_BC;
        if (s.col0 < at.end()) {
            if (fresh || tile % 32 == 0) flags = read_flags(p, at, s.head, tile / 32 * 32, anew(t));
            fresh = false;
            const u32 left = flags.seen >> tile % 32;
            if (left) {
                const int skipped = __ffs(left) - 1;
                s.col0 = (tile + skipped) * PA_BC;
                s.is_masked = flags.cut >> (tile + skipped) % 32 & 1;
                return;
            }
            s.col0 = (tile / 32 * 32 + 32) * PA_BC;
        }
        if (s.col0 >= at.end()) {
            s.col0 = at.begin();
            ++s.head;
            fresh = true;
        }
    }
}
#endif

INLINE void store_rows(T* to, i64 stride, const Sums& O, float factor, int rows, int dim, const Lane& t) {
    FOR(r, ROWS) {
        int at = row_of(t, r);
        OPAQUE(at);
        if (at >= rows) continue;
        T* const row = to + at * stride;
        FOR(c, CHUNKS) {
            const int d = sum_column(t, c, 0);
            if (!PA_PAD || d < dim)
                *(u32*)(row + d) = pack_halves(sum_at(O, r, c, 0) * factor, sum_at(O, r, c, 1) * factor);
        }
    }
}

#if PA_DYNAMIC && !defined(PA_CPU_EMU)
extern __shared__ __align__(128) char sm[];
#else
__shared__ __align__(128) char sm[SMEM_BYTES];
#endif
#define STATS (PA_MASK == 2 ? 3 : 2)
#if PA_KEYS
__shared__ __align__(16) float stats[2][STATS][PA_BC];  // [place][shift, delta, bits] of the moving queries

// The number that this thread brings to `stats`.
INLINE float stat_of(const Params& p, const Where& at, const Step& s, const Lane& t) {
    const int which = t.tid / PA_BC, col = s.col0 + t.tid % PA_BC;
    if (col >= at.length()) return which == (PA_MASK == 2 ? 2 : 0) ? POS_INF : 0.f;
    const i64 of_head = at.queries(p.lb, 1) + (at.head() * p.group + s.head) * p.lh;
    return (which == 0 ? p.shift : which == 1 ? p.delta : p.bits)[of_head + col];
}
#endif

// The first `kept` pieces of this warp's rows, through shared memory, to registers.
template <int kept>
INLINE void keep_rows(Left (&X)[kept > 0 ? kept : 1], const T* from, i64 stride, int rows, int dim, const Lane& t) {
    FOR(round, (kept + 7) / 8) {
        __syncthreads();  // what has passed through here before is in registers
        stage_rows<ROUND(kept)>(sm, from, stride, rows, round * 8, dim, t);
        __syncthreads();  // these pieces are there
        const u32 row = left_address(sm, ROUND(kept), t);
        FOR(c2, 4) if (round * 8 + 2 * c2 < kept) {
            const int c = round * 8 + 2 * c2 + 1 < kept ? round * 8 + 2 * c2 : 0;
            load_two(X[c], X[c + 1 < kept ? c + 1 : 0], row, ROUND(kept), 2 * c2);
        }
    }
}

extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) PA_GRADIENT_NAME(const Params p) {
    int tid = threadIdx.x;
    OPAQUE(tid);
    const Lane t = lane_of(tid);
    Where at;
    {
        const Place place = find_place(p, blockIdx.z);
        if (place.rows <= 0) return;
#if KEPT
        if (tid == 0) kept_place = place;
        __syncthreads();  // the place is there
#else
        at.at = place;
#endif
    }
    const int heads = PA_KEYS ? p.group : 1;
#if PA_KEYS
    const i64 xs = p.ks, xxs = p.vs;
    const T* const x = p.k + at.keys(p.kb, xs) + at.head() * p.kh + at.row0() * xs;
    const T* const xx = p.v + at.keys(p.vb, xxs) + at.head() * p.vh + at.row0() * xxs;
#else
    const i64 xs = p.qs, xxs = p.gs;
    const T* const x = p.q + at.queries(p.qb, xs) + at.head() * p.qh + at.row0() * xs;
    const T* const xx = p.g + at.queries(p.gb, xxs) + at.head() * p.gh + at.row0() * xxs;
#endif
    char* const x_sm = sm + FREE_BYTES;
    char* const xx_sm = x_sm + X_BYTES;
    Left X[PA_XREG > 0 ? PA_XREG : 1], XX[PA_XXREG > 0 ? PA_XXREG : 1];
    keep_rows<PA_XREG>(X, x, xs, at.rows(), p.dim, t);
    keep_rows<PA_XXREG>(XX, xx, xxs, at.rows(), p.dim_v, t);
#if PA_XREG < PA_D / 8
    stage_rows<X_LEFT>(x_sm, x, xs, at.rows(), PA_XREG, p.dim, t);
#endif
#if PA_XXREG < PA_D / 8
    stage_rows<XX_LEFT>(xx_sm, xx, xxs, at.rows(), PA_XXREG, p.dim_v, t);
#endif
    const u32 x_row = X_LEFT > 0 ? left_address(x_sm, X_LEFT > 0 ? X_LEFT : 8, t) : 0;
    const u32 xx_row = XX_LEFT > 0 ? left_address(xx_sm, XX_LEFT > 0 ? XX_LEFT : 8, t) : 0;
    u32 y_row = right_address(sm, t);

    Sums dX;
    FOR(r, ROWS) FOR(c, CHUNKS) FOR(i, PER_8) sum_at(dX, r, c, i) = 0.f;
#if PA_KEYS
    Sums dXX;
    FOR(r, ROWS) FOR(c, CHUNKS) FOR(i, PER_8) sum_at(dXX, r, c, i) = 0.f;
#else
    Stats of_rows[ROWS];
    FOR(r, ROWS) {
        const i64 from = at.queries(p.lb, 1) + at.head() * p.lh + at.row0() + min_int(row_of(t, r), at.rows() - 1);
        of_rows[r].shift = p.shift[from];
        of_rows[r].delta = p.delta[from];
        of_rows[r].bits = PA_MASK == 2 ? p.bits[from] : 0.f;
    }
#endif
    __syncthreads();  // X and XX are in registers
    Step now;
    now.col0 = at.begin();
    now.head = now.col0 < at.end() ? 0 : heads;
    now.is_masked = false;
#if PA_MASK
    Flags flags;
    settle(now, flags, true, p, at, heads, t);
#endif
    if (now.head < heads) {
        FOR(j, 2 * PIECES) {
            int4 r;
            fetch_piece(r, source_of(p, at, now, j < PIECES), j % PIECES, t);
            store_piece(sm + (j < PIECES ? 0 : TILE_BYTES), r, j % PIECES, t);
        }
#if PA_KEYS
        if (t.tid < STATS * PA_BC)
            stats[0][t.tid / PA_BC][t.tid % PA_BC] = stat_of(p, at, now, t);
#endif
#if PA_MASK
        if (now.is_masked && t.tid < WORDS) words[0][t.tid] = word_of(p, at, now.head, now.col0, t);
#endif
    }
    __syncthreads();  // the first tile is there
    int place = 0;  // of this tile; the next one comes to the other
#pragma unroll 1
    while (now.head < heads) {
        Step next = now;
        next.col0 += PA_BC;
#if PA_MASK
        settle(next, flags, false, p, at, heads, t);
#else
        if (next.col0 >= at.end()) {
            next.col0 = at.begin();
            ++next.head;
        }
#endif
        // Behind the last tile comes the last again, which nobody uses: loads without a branch can be moved freely.
        const bool more = next.head < heads;
        const Step from = more ? next : now;
        char* const next_sm = sm + (place ^ 1) * MOVING_BYTES;
#if PA_KEYS
        float stat = 0.f;
        if (t.tid < STATS * PA_BC) stat = stat_of(p, at, from, t);
#endif
#if PA_MASK
        u32 word = 0;
        if (from.is_masked && t.tid < WORDS) word = word_of(p, at, from.head, from.col0, t);
#endif
        int4 r[PER_SLOT];
#define FETCH(slot)                                     \
    FOR(j, 2 * PIECES) if (SLOT_OF(j) == (slot))         \
        fetch_piece(r[j % PER_SLOT], source_of(p, at, from, j < PIECES), j % PIECES, t);
#define STORE(slot)                                     \
    FOR(j, 2 * PIECES) if (SLOT_OF(j) == (slot))         \
        store_piece(next_sm + (j < PIECES ? 0 : TILE_BYTES), r[j % PER_SLOT], j % PIECES, t);
        FOR(part, PA_BC / PA_SC) {
            const int col0 = now.col0 + part * PA_SC;
            const u32 y_part = y_row + part * PA_SC * PANEL_PITCH(CHUNKS);
            Scores S, dP;
            Probs P;
            FETCH(2 * part)
            product_rows<PA_XREG>(S, X, x_row, y_part);
#if PA_CAPPED
            Scores slope;
            cap_scores(S, slope, p.tanh_scale);
#endif
#if PA_MASK == 2
            FOR(r, ROWS) FOR(n, NT8) FOR(i, PER_8) score(S, r, n, i) *= p.scale;
#endif
#if PA_MASK
            if (now.is_masked) {
                KEEP_BRANCH();
                apply_mask(S, words[place], p, at, now.head, now.col0, part * PA_SC, anew(t));
            }
#endif
            if (is_cut(at, col0)) {
                KEEP_BRANCH();
                forbid_outside(S, p, at, col0, t);
            }
            FOR(n, NT8) {
                u32 pairs[ROWS][PER_8 / 2];
                FOR(r, ROWS) {
                    FOR(i, PER_8) {
#if PA_KEYS
                        const int c = part * PA_SC + col_of(t, n, i);
                        const Stats of = {stats[place][0][c], 0.f, PA_MASK == 2 ? stats[place][STATS - 1][c] : 0.f};
#else
                        const Stats of = of_rows[r];
#endif
                        score(S, r, n, i) = prob_of(score(S, r, n, i), p, of);
                    }
                    FOR(x, PER_8 / 2) pairs[r][x] = pack_halves(score(S, r, n, 2 * x), score(S, r, n, 2 * x + 1));
                }
                if (PA_KEYS) to_operand(P, n, pairs, t);
            }
#if PA_CAPPED
            FOR(r, ROWS) FOR(n, NT8) FOR(i, PER_8) score(S, r, n, i) *= score(slope, r, n, i);
#endif
#if PA_KEYS
            product_cols(dXX, P, y_part + TILE_BYTES);
#endif
            STORE(2 * part)
            if (part == 0) {
#if PA_KEYS
                if (t.tid < STATS * PA_BC) stats[place ^ 1][t.tid / PA_BC][t.tid % PA_BC] = stat;
#endif
#if PA_MASK
                if (t.tid < WORDS) words[place ^ 1][t.tid] = word;
#endif
            }
            FETCH(2 * part + 1)
            product_rows<PA_XXREG>(dP, XX, xx_row, y_part + TILE_BYTES);
            FOR(n, NT8) {
                u32 pairs[ROWS][PER_8 / 2];
                FOR(r, ROWS) FOR(x, PER_8 / 2) {
                    float ds[2];
                    FOR(i, 2) {
#if PA_KEYS
                        const float delta = stats[place][1][part * PA_SC + col_of(t, n, 2 * x + i)];
#else
                        const float delta = of_rows[r].delta;
#endif
                        ds[i] = score(S, r, n, 2 * x + i) * fmaf(score(dP, r, n, 2 * x + i), PROB_UNIT, -delta);
                    }
                    pairs[r][x] = pack_halves(ds[0], ds[1]);
                }
                to_operand(P, n, pairs, t);
            }
            STORE(2 * part + 1)
            product_cols(dX, P, y_part);
        }
        __syncthreads();  // the next tile is there, this one has been used
        place ^= 1;
        y_row += place ? MOVING_BYTES : -MOVING_BYTES;
        now = next;
    }
#if PA_KEYS
    T* const dx = p.dk + at.keys(p.dkb, p.dks) + at.head() * p.dkh + at.row0() * p.dks;
    T* const dxx = p.dv + at.keys(p.dvb, p.dvs) + at.head() * p.dvh + at.row0() * p.dvs;
    store_rows(dx, p.dks, dX, p.grad_scale, at.rows(), p.dim, t);
    store_rows(dxx, p.dvs, dXX, PROB_UNIT, at.rows(), p.dim_v, t);
#else
    T* const dx = p.dq + at.queries(p.dqb, p.dqs) + at.head() * p.dqh + at.row0() * p.dqs;
    store_rows(dx, p.dqs, dX, p.grad_scale, at.rows(), p.dim, t);
#endif
}
