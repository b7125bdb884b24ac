// dK and dV: one block per tile of key rows, over the queries of all heads that share them. The tile that stays holds
// keys, the one that moves queries: scores are transposed, S[key][query].
extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) pa_grad_key_value(const Backward p) {
    __shared__ __align__(128) float sm[SMEM_TILE];
    const Lane t = lane_of(threadIdx.x);
    const int b = blockIdx.z + p.first_batch, hk = blockIdx.y;
    const int row0 = ((int)blockIdx.x + p.first_tile) * PA_BR, rows = p.lk - row0;
    if (rows <= 0) return;
    const int last_row = min_int(row0 + PA_BR, p.lk) - 1;
    // Query i looks at keys i + low ... i + high: a key j is seen by queries j - high ... j - low.
    const int q_begin = max_int(0, row0 - p.high), q_end = min_int(p.lq, last_row - p.low + 1);
    Band band;
    band.low = -p.high;
    band.high = -p.low;

    const int xr = row0 + min_int(staged_x_row(t), rows - 1);
    const T* const k = p.k + b * p.kb + hk * p.kh + xr * p.ks + staged_x_col(t);
    const T* const v = p.v + b * p.vb + hk * p.vh + xr * p.vs + staged_x_col(t);
    float dK[RM][DN], dV[RM][DN];
    clear(dK);
    clear(dV);
#if PA_MASK
    const MaskView mask = view_mask(p.mask, p.mk, p.mq, p.mask_is_float32);
#endif
    bool flushed = false;
    for (int h = hk * p.group; h < (hk + 1) * p.group; ++h) {
        const i64 stats = ((i64)b * p.heads + h) * p.lq;
        const int y0 = q_begin + staged_y_row(t);
        const T* q = p.q + b * p.qb + h * p.qh + y0 * p.qs + staged_y_col(t);
        const T* g = p.g + b * p.gb + h * p.gh + y0 * p.gs + staged_y_col(t);
        Moving queries = moving_rows(p.q + b * p.qb + h * p.qh + q_begin * p.qs, p.qs, p.dim, t);
        Moving grads = moving_rows(p.g + b * p.gb + h * p.gh + q_begin * p.gs, p.gs, p.dim_v, t);
        for (int col0 = q_begin; col0 < q_end; col0 += PA_BC) {
            const int cols = p.lq - col0;
#if PA_MASK
            u32 bits[MASK_WORDS];
            MaskRow mask_row;
            mask_row.at = b * p.mb + h * p.mh + row0 * p.mk + col0 * p.mq;
            mask_row.row = p.mk;
            if (p.mask && !__syncthreads_or(read_mask(bits, mask, mask_row, rows, cols, t))) {
                q += PA_BC * p.qs;
                g += PA_BC * p.gs;
                queries.at += PA_BC * queries.stride;
                grads.at += PA_BC * grads.stride;
                continue;
            }
#endif
            float S[RM][CN], dP[RM][CN];
            product_rows(S, k, existing_row(q, p.qs, cols, t), p.dim, sm, t);
            scale_scores(S, p.scale);
#if PA_MASK
            if (p.mask) apply_mask(S, bits, mask, mask_row, t);
#endif
            if (cols < PA_BC || band_cuts(band, row0, last_row, col0)) {
                KEEP_BRANCH();
                FOR(i, RM) forbid_outside(S[i], row0 + ROW(i) - col0, band, cols, t);
            }
            FOR(j, CN) {
                const i64 at = stats + col0 + min_int(COL(j), cols - 1);
                const float shift = p.shift[at], bits_of = PA_MASK == 2 ? p.bits[at] : 0.f;
                FOR(i, RM) S[i][j] = prob_again(S[i][j], p, shift, bits_of);
            }
            product_rows(dP, v, existing_row(g, p.gs, cols, t), p.dim_v, sm, t);
            q += PA_BC * p.qs;
            g += PA_BC * p.gs;
            FOR(j, CN) {
                const float delta = p.delta[stats + col0 + min_int(COL(j), cols - 1)];
                FOR(i, RM) dP[i][j] = S[i][j] * (dP[i][j] - delta);
            }
            product_cols(dV, S, grads, cols, p.dim_v, sm, t);
            __syncthreads();  // P and dO have been consumed
            product_cols(dK, dP, queries, cols, p.dim, sm, t);
#if PA_FLUSH
            if (flush_is_due(col0 - q_begin)) {
                T* const dk = p.dk + b * p.dkb + hk * p.dkh + row0 * p.dks;
                T* const dv = p.dv + b * p.dvb + hk * p.dvh + row0 * p.dvs;
                store_gradient(dk, p.dks, dK, p.scale, rows, p.dim, flushed, t);
                store_gradient(dv, p.dvs, dV, 1.f, rows, p.dim_v, flushed, t);
                clear(dK);
                clear(dV);
                flushed = true;
            }
#endif
        }
    }
    T* const dk = p.dk + b * p.dkb + hk * p.dkh + row0 * p.dks;
    T* const dv = p.dv + b * p.dvb + hk * p.dvh + row0 * p.dvs;
    store_gradient(dk, p.dks, dK, p.scale, rows, p.dim, flushed, t);
    store_gradient(dv, p.dvs, dV, 1.f, rows, p.dim_v, flushed, t);
}
