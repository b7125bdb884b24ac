// P is kept times 2^PROB_BITS: of small probabilities a half would lose bits. delta and the shift of every row's scores,
// scaled for that: one warp per query row. Packed sequences are one long one here.
#define PROB_BITS 12.f
#define PROB_UNIT (1.f / 4096.f)

extern "C" __global__ void __launch_bounds__(128) pa_tensor_delta(const Backward p) {
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

// Where a block works: its rows, and the columns that any of them meets.
struct Place : Sequence {
    int b, head, row0, rows;  // head: of the rows
    int begin, end;           // columns
    int length;               // of the columns' sequence
    Band cols;                // which columns row i meets: i + low ... i + high
};

INLINE Place find_place(const Backward& p, int z) {
    Place at;
    at.b = z + p.first_batch;
    (Sequence&)at = sequence_of_call(p, at.b);
    at.head = blockIdx.y;
#if PA_KEYS
    at.row0 = ((int)blockIdx.x + p.first_tile) * PA_BR;
    at.rows = at.lk - at.row0;
    at.length = at.lq;
    at.cols.low = -at.band.high;
    at.cols.high = -at.band.low;
#else
    // Under a causal rule the last tiles have the most keys: they go first.
    const int tile = at.band.high < at.lk ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x;
    at.row0 = (tile + p.first_tile) * PA_BR;
    at.rows = at.lq - at.row0;
    at.length = at.lk;
    at.cols = at.band;
#endif
    const int last = at.row0 + min_int(PA_BR, at.rows) - 1;
    at.begin = max_int(0, at.row0 + at.cols.low);
    at.end = min_int(at.length, last + at.cols.high + 1);
    return at;
}

// Forbids what the band does not allow, and keys that do not exist. Rare: all it needs is computed anew.
INLINE void forbid_outside(Scores& S, const Backward& p, int col0, const Lane& lane) {
    const Lane t = anew(lane);
    int z = blockIdx.z;
    OPAQUE(z);
    const Place at = find_place(p, z);
    FOR(m, PA_MT) FOR(h, 2) {
        const int distance = at.row0 + row_of(t, m, h) - col0;
        const int last = min_int(at.length - 1 - col0, distance + at.cols.high), first = distance + at.cols.low;
        FOR(n, NT8) FOR(i, 2) if (col_of(t, n, i) > last || col_of(t, n, i) < first) S.x[m][n][2 * h + i] = NEG_INF;
    }
}

// A moving tile: its first column, and of which head of the group.
struct Step {
    int col0, head;
};

INLINE void advance(Step& s, const Place& at) {
    s.col0 += PA_BC;
    if (PA_KEYS && s.col0 >= at.end) {
        s.col0 = at.begin;
        ++s.head;
    }
}

// Whether the band or an end cuts into the PA_SC columns from col0 on. Queries that do not exist need no care: their
// shift is infinite.
INLINE bool is_cut(const Place& at, int col0) {
    const int last = at.row0 + min_int(PA_BR, at.rows) - 1;
    const bool ends = !PA_KEYS && col0 + PA_SC > at.length;
    return ends || col0 + PA_SC - 1 > at.row0 + at.cols.high || col0 < last + at.cols.low;
}

#if PA_KEYS
// The number that this thread brings to `stats`: threads below PA_BC the shift of a query, those behind delta.
INLINE float stat_of(const Backward& p, i64 of_head, int col0, int length, const Lane& t) {
    const int col = col0 + t.tid % PA_BC;
    const float* const from = t.tid < PA_BC ? p.shift : p.delta;
    const float x = from[of_head + min_int(col, length - 1)];
    return col < length ? x : t.tid < PA_BC ? POS_INF : 0.f;
}
#endif

INLINE void store_rows(T* to, i64 stride, const Sums& O, float factor, int rows, int dim, const Lane& t) {
    FOR(m, PA_MT) FOR(h, 2) {
        int r = row_of(t, m, h);
        OPAQUE(r);
        if (r >= rows) continue;
        T* const row = to + r * stride;
        FOR(c, CHUNKS) {
            const int d = col_of(t, c, 0);
            if (!PA_PAD || d < dim)
                *(u32*)(row + d) = pack_halves(O.x[m][c][2 * h] * factor, O.x[m][c][2 * h + 1] * factor);
        }
    }
}

#if PA_DYNAMIC && !defined(PA_CPU_EMU)
extern __shared__ __align__(128) char sm[];
#else
__shared__ __align__(128) char sm[SMEM_BYTES];
#endif
#if PA_KEYS
__shared__ __align__(16) float stats[2][2][PA_BC];  // [place][shift, delta] of the moving queries
#endif

template <int kept>
INLINE void keep_rows(Left (&X)[kept > 0 ? kept / 2 : 1], const T* from, i64 stride, int rows, int dim, const Lane& t) {
    FOR(round, (kept + 7) / 8) {
        __syncthreads();  // what has passed through here before is in registers
        stage_rows<ROUND(kept)>(sm, from, stride, rows, round * 8, dim, t);
        __syncthreads();
        const u32 row = left_address(sm, ROUND(kept), t);
        FOR(c2, 4) if (round * 8 + 2 * c2 < kept)
            load_left(X[round * 4 + c2 < (kept + 1) / 2 ? round * 4 + c2 : 0], row, ROUND(kept), 2 * c2);
    }
}

extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) PA_GRADIENT_NAME(const Backward p) {
    int tid = threadIdx.x;
    OPAQUE(tid);
    const Lane t = lane_of(tid);
    const Place at = find_place(p, blockIdx.z);
    if (at.rows <= 0) return;
#if PA_KEYS
    const int heads = p.group, first_head = at.head * p.group, dim_y = p.dim, dim_yy = p.dim_v;
    const i64 xs = p.ks, xxs = p.vs, ys = p.qs, yys = p.gs, yh = p.qh, yyh = p.gh;
    const T* const x = p.k + first_token_at(p.cu_k, at.b, p.kb, p.ks) + at.head * p.kh + at.row0 * p.ks;
    const T* const xx = p.v + first_token_at(p.cu_k, at.b, p.vb, p.vs) + at.head * p.vh + at.row0 * p.vs;
    const T* const y = p.q + first_token_at(p.cu_q, at.b, p.qb, p.qs) + first_head * p.qh;
    const T* const yy = p.g + first_token_at(p.cu_q, at.b, p.gb, p.gs) + first_head * p.gh;
    const i64 of_stats = first_token_at(p.cu_q, at.b, p.lb, 1) + first_head * p.lh;
#else
    const int heads = 1, hk = at.head / p.group, dim_y = p.dim, dim_yy = p.dim_v;
    const i64 xs = p.qs, xxs = p.gs, ys = p.ks, yys = p.vs, yh = 0, yyh = 0;
    const T* const x = p.q + first_token_at(p.cu_q, at.b, p.qb, p.qs) + at.head * p.qh + at.row0 * p.qs;
    const T* const xx = p.g + first_token_at(p.cu_q, at.b, p.gb, p.gs) + at.head * p.gh + at.row0 * p.gs;
    const T* const y = p.k + first_token_at(p.cu_k, at.b, p.kb, p.ks) + hk * p.kh;
    const T* const yy = p.v + first_token_at(p.cu_k, at.b, p.vb, p.vs) + hk * p.vh;
    const i64 of_stats = first_token_at(p.cu_q, at.b, p.lb, 1) + at.head * p.lh + at.row0;
#endif
    char* const x_sm = sm + FREE_BYTES;
    char* const xx_sm = x_sm + X_BYTES;
    Left X[PA_XREG > 0 ? PA_XREG / 2 : 1], XX[PA_XXREG > 0 ? PA_XXREG / 2 : 1];
    keep_rows<PA_XREG>(X, x, xs, at.rows, p.dim, t);
    keep_rows<PA_XXREG>(XX, xx, xxs, at.rows, p.dim_v, t);
#if PA_XREG < PA_D / 8
    stage_rows<X_LEFT>(x_sm, x, xs, at.rows, PA_XREG, p.dim, t);
#endif
#if PA_XXREG < PA_D / 8
    stage_rows<XX_LEFT>(xx_sm, xx, xxs, at.rows, PA_XXREG, p.dim_v, t);
#endif
    const u32 x_row = X_LEFT > 0 ? left_address(x_sm, X_LEFT > 0 ? X_LEFT : 8, t) : 0;
    const u32 xx_row = XX_LEFT > 0 ? left_address(xx_sm, XX_LEFT > 0 ? XX_LEFT : 8, t) : 0;
    u32 y_row = right_address(sm, t);

    Sums dX;
    FOR(m, PA_MT) FOR(c, CHUNKS) FOR(i, 4) dX.x[m][c][i] = 0.f;
#if PA_KEYS
    Sums dXX;
    FOR(m, PA_MT) FOR(c, CHUNKS) FOR(i, 4) dXX.x[m][c][i] = 0.f;
#else
    float shift[PA_MT][2], delta[PA_MT][2];
    FOR(m, PA_MT) FOR(h, 2) {
        const int r = min_int(row_of(t, m, h), at.rows - 1);
        shift[m][h] = p.shift[of_stats + r];
        delta[m][h] = p.delta[of_stats + r];
    }
#endif
    __syncthreads();  // X and XX are in registers
    Step now;
    now.col0 = at.begin;
    now.head = at.begin < at.end ? 0 : heads;
    if (now.head < heads) {
        int4 r[PIECES];
        fetch_tile(r, y + at.begin * ys, (u32)ys, at.length - at.begin, dim_y, t);
        store_tile(sm, r, t);
        fetch_tile(r, yy + at.begin * yys, (u32)yys, at.length - at.begin, dim_yy, t);
        store_tile(sm + TILE_BYTES, r, t);
#if PA_KEYS
        if (t.tid < 2 * PA_BC) stats[0][t.tid / PA_BC][t.tid % PA_BC] = stat_of(p, of_stats, at.begin, at.length, t);
#endif
    }
    __syncthreads();
    int place = 0;  // of this tile; the next one comes to the other
#pragma unroll 1
    while (now.head < heads) {
        // Behind the last tile comes the last again, which nobody uses: loads without a branch can be moved freely.
        Step next = now;
        advance(next, at);
        const bool more = next.head < heads && next.col0 < at.end;
        const Step from = more ? next : now;
        char* const next_sm = sm + (place ^ 1) * MOVING_BYTES;
        int4 r[PIECES];
        fetch_tile(r, y + from.head * yh + from.col0 * ys, (u32)ys, at.length - from.col0, dim_y, t);
#if PA_KEYS
        float stat = 0.f;
        if (t.tid < 2 * PA_BC) stat = stat_of(p, of_stats + from.head * p.lh, from.col0, at.length, t);
#endif
        FOR(part, PA_BC / PA_SC) {
            const int col0 = now.col0 + part * PA_SC;
            const u32 y_part = y_row + part * PA_SC * PANEL_PITCH(CHUNKS);
            Scores S, dP;
            Halves P;
            product_rows<PA_XREG>(S, X, x_row, y_part);
            if (part == 0) {
                store_tile(next_sm, r, t);
                fetch_tile(r, yy + from.head * yyh + from.col0 * yys, (u32)yys, at.length - from.col0, dim_yy, t);
            }
            if (is_cut(at, col0)) {
                KEEP_BRANCH();
                forbid_outside(S, p, col0, t);
            }
            FOR(n, NT8) {
#if PA_KEYS
                const float2 of_cols = *(const float2*)&stats[place][0][part * PA_SC + col_of(t, n, 0)];
#endif
                FOR(m, PA_MT) FOR(h, 2) {
                    FOR(i, 2) {
                        float& s = S.x[m][n][2 * h + i];
#if PA_KEYS
                        s = exp2_approx(fmaf(s, p.scale_log2, -(i ? of_cols.y : of_cols.x)));
#else
                        s = exp2_approx(fmaf(s, p.scale_log2, -shift[m][h]));
#endif
                    }
                    P.x[m][n][h] = pack_halves(S.x[m][n][2 * h], S.x[m][n][2 * h + 1]);
                }
            }
#if PA_KEYS
            product_cols(dXX, P, y_part + TILE_BYTES);
#endif
            product_rows<PA_XXREG>(dP, XX, xx_row, y_part + TILE_BYTES);
            FOR(n, NT8) {
#if PA_KEYS
                const float2 of_cols = *(const float2*)&stats[place][1][part * PA_SC + col_of(t, n, 0)];
#endif
                FOR(m, PA_MT) FOR(h, 2) {
                    float ds[2];
                    FOR(i, 2) {
#if PA_KEYS
                        const float d = i ? of_cols.y : of_cols.x;
#else
                        const float d = delta[m][h];
#endif
                        ds[i] = S.x[m][n][2 * h + i] * fmaf(dP.x[m][n][2 * h + i], PROB_UNIT, -d);
                    }
                    P.x[m][n][h] = pack_halves(ds[0], ds[1]);
                }
            }
            product_cols(dX, P, y_part);
        }
        store_tile(next_sm + TILE_BYTES, r, t);
#if PA_KEYS
        if (t.tid < 2 * PA_BC) stats[place ^ 1][t.tid / PA_BC][t.tid % PA_BC] = stat;
#endif
        __syncthreads();  // the next tile is there, this one has been used
        place ^= 1;
        y_row = y_row + (place ? MOVING_BYTES : -MOVING_BYTES);
        now = next;
        if (!more) now.head = heads;
    }
#if PA_KEYS
    T* const dx = p.dk + first_token_at(p.cu_k, at.b, p.dkb, p.dks) + at.head * p.dkh + at.row0 * p.dks;
    T* const dxx = p.dv + first_token_at(p.cu_k, at.b, p.dvb, p.dvs) + at.head * p.dvh + at.row0 * p.dvs;
    store_rows(dx, p.dks, dX, p.scale, at.rows, p.dim, t);
    store_rows(dxx, p.dvs, dXX, PROB_UNIT, at.rows, p.dim_v, t);
#else
    T* const dx = p.dq + first_token_at(p.cu_q, at.b, p.dqb, p.dqs) + at.head * p.dqh + at.row0 * p.dqs;
    store_rows(dx, p.dqs, dX, p.scale, at.rows, p.dim, t);
#endif
}
