// delta and the shift of every row's scores: one warp per query row.
extern "C" __global__ void __launch_bounds__(128) pa_delta(const Backward p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.lq) return;
    const int i = (int)(row % p.lq), h = (int)(row / p.lq % p.heads), b = (int)(row / p.lq / p.heads);
    const T* const o = p.o + b * p.ob + h * p.oh + i * p.os;
    const T* const g = p.g + b * p.gb + h * p.gh + i * p.gs;
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < p.dim_v; c += 32) sum = fmaf(load_one(o + c), load_one(g + c), sum);
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, s);
    if (threadIdx.x % 32) return;
    const float lse = p.lse[row], log_sum = p.log_sum ? p.log_sum[row] : 0.f;
    const bool empty = lse == NEG_INF;  // a row that may look at no key: every probability is zero
    p.delta[row] = empty ? 0.f : sum - (p.grad_lse ? p.grad_lse[row] : 0.f);
#if PA_MASK == 2
    p.shift[row] = empty ? 0.f : lse - log_sum;
    p.bits[row] = empty ? POS_INF : log_sum * LOG2E;
#else
    p.shift[row] = empty ? POS_INF : lse * LOG2E;
#endif
}

// dQ: one block per tile of query rows, over all keys.
extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) pa_grad_query(const Backward p) {
    __shared__ __align__(128) float sm[SMEM_TILE];
    const Lane t = lane_of(threadIdx.x);
    const int b = blockIdx.z + p.first_batch, h = blockIdx.y, hk = h / p.group;
    const int tile = p.high < p.lk ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x;
    const int row0 = (tile + p.first_tile) * PA_BR, rows = p.lq - row0;
    if (rows <= 0) return;
    const int last_row = min_int(row0 + PA_BR, p.lq) - 1;
    const int k_begin = max_int(0, row0 + p.low), k_end = min_int(p.lk, last_row + p.high + 1);
    Band band;
    band.low = p.low;
    band.high = p.high;

    const int xr = row0 + min_int(staged_x_row(t), rows - 1), y0 = k_begin + staged_y_row(t);
    const T* const q = p.q + b * p.qb + h * p.qh + xr * p.qs + staged_x_col(t);
    const T* const g = p.g + b * p.gb + h * p.gh + xr * p.gs + staged_x_col(t);
    const T* k = p.k + b * p.kb + hk * p.kh + y0 * p.ks + staged_y_col(t);
    const T* v = p.v + b * p.vb + hk * p.vh + y0 * p.vs + staged_y_col(t);
    Moving keys = moving_rows(p.k + b * p.kb + hk * p.kh + k_begin * p.ks, p.ks, p.dim, t);

    float dQ[RM][DN], shift[RM], delta[RM], bits_of[RM];
    clear(dQ);
    FOR(i, RM) {
        const i64 at = ((i64)b * p.heads + h) * p.lq + row0 + min_int(ROW(i), rows - 1);
        shift[i] = p.shift[at];
        delta[i] = p.delta[at];
        bits_of[i] = PA_MASK == 2 ? p.bits[at] : 0.f;
    }
#if PA_MASK
    const MaskView mask = view_mask(p.mask, p.mq, p.mk, p.mask_is_float32);
#endif
    bool flushed = false;
    for (int col0 = k_begin; col0 < k_end; col0 += PA_BC) {
        const int cols = p.lk - col0;
#if PA_MASK
        u32 bits[MASK_WORDS];
        MaskRow mask_row;
        mask_row.at = b * p.mb + h * p.mh + row0 * p.mq + col0 * p.mk;
        mask_row.row = p.mq;
        if (p.mask && !__syncthreads_or(read_mask(bits, mask, mask_row, rows, cols, t))) {
            k += PA_BC * p.ks;
            v += PA_BC * p.vs;
            keys.at += PA_BC * keys.stride;
            continue;
        }
#endif
        float S[RM][CN], dP[RM][CN];
        product_rows(S, q, existing_row(k, p.ks, cols, t), p.dim, sm, t);
        scale_scores(S, p.scale);
#if PA_MASK
        if (p.mask) apply_mask(S, bits, mask, mask_row, t);
#endif
        if (cols < PA_BC || band_cuts(band, row0, last_row, col0)) {
            KEEP_BRANCH();
            FOR(i, RM) forbid_outside(S[i], row0 + ROW(i) - col0, band, cols, t);
        }
        FOR(i, RM) FOR(j, CN) S[i][j] = prob_again(S[i][j], p, shift[i], bits_of[i]);
        product_rows(dP, g, existing_row(v, p.vs, cols, t), p.dim_v, sm, t);
        k += PA_BC * p.ks;
        v += PA_BC * p.vs;
        FOR(i, RM) FOR(j, CN) S[i][j] *= dP[i][j] - delta[i];
        product_cols(dQ, S, keys, cols, p.dim, sm, t);
#if PA_FLUSH
        if (flush_is_due(col0 - k_begin)) {
            T* const out = p.dq + b * p.dqb + h * p.dqh + row0 * p.dqs;
            store_gradient(out, p.dqs, dQ, p.scale, rows, p.dim, flushed, t);
            clear(dQ);
            flushed = true;
        }
#endif
    }
    T* const out = p.dq + b * p.dqb + h * p.dqh + row0 * p.dqs;
    store_gradient(out, p.dqs, dQ, p.scale, rows, p.dim, flushed, t);
}
