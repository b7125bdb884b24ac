// All three gradients in five products instead of seven: one block per tile of key rows, over the queries of all heads
// that share them. As in pa_grad_key_value scores are transposed, S[key][query], and dK and dV stay in registers; what
// the tile's keys give to dQ is added to sums in memory. Blocks add in any order, so that the last bits of dQ differ from
// run to run.
extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) pa_grad_all(const AllGradients p) {
    __shared__ __align__(128) float sm[SMEM_TILE];
    const Lane t = lane_of(threadIdx.x);
    const int b = blockIdx.z + p.first_batch, hk = blockIdx.y;
    const int row0 = ((int)blockIdx.x + p.first_tile) * PA_BR, rows = sequence_of(p, b).lk - row0;
    if (rows <= 0) return;
    // Query i looks at keys i + low ... i + high: a key j is seen by queries j - high ... j - low.
    const Sequence whole = sequence_of(p, b);
    const int q_begin = max_int(0, row0 - whole.band.high);
    const int q_end = min_int(whole.lq, row0 + min_int(PA_BR, rows) - whole.band.low);

    float dK[RM][DN], dV[RM][DN];
    clear(dK);
    clear(dV);
#if PA_MASK
    const MaskView mask = view_mask(p.mask, p.mk, p.mq, p.mask_is_float32);
#endif
    bool flushed = false;
    for (int h = hk * p.group; h < (hk + 1) * p.group; ++h) {
        const i64 stats = sequence_at(p.cu_q, b, p.lb, 1) + h * p.lh;
        const T* q = p.q + sequence_at(p.cu_q, b, p.qb, p.qs) + h * p.qh + q_begin * p.qs;
        const T* g = p.g + sequence_at(p.cu_q, b, p.gb, p.gs) + h * p.gh + q_begin * p.gs;
        for (int col0 = q_begin; col0 < q_end; col0 += PA_BC) {
            const int cols = sequence_of(p, b).lq - col0;
#if PA_MASK
            u32 bits[MASK_WORDS];
            const MaskRow mask_row = mask_row_at(p, b, h, row0, p.mk, col0, p.mq);
            if (p.mask && !__syncthreads_or(read_mask(bits, mask, mask_row, rows, cols, t))) {
                q += PA_BC * p.qs;
                g += PA_BC * p.gs;
                continue;
            }
#endif
            float S[RM][CN], dP[RM][CN];
            const T* const k = p.k + sequence_at(p.cu_k, b, p.kb, p.ks) + hk * p.kh;
            product_rows(S, staying_row(k, p.ks, row0, rows, t), staged_row(q, p.qs, cols, t), p.dim, sm, t);
            scale_scores(S, p.scale);
#if PA_MASK
            if (p.mask) apply_mask(S, bits, mask, mask_row_at(p, b, h, row0, p.mk, col0, p.mq), t);
#endif
            const Sequence seq = sequence_of(p, b);
            Band band;
            band.low = -seq.band.high;
            band.high = -seq.band.low;
            if (cols < PA_BC || band_cuts(band, row0, row0 + min_int(PA_BR, rows) - 1, col0)) {
                KEEP_BRANCH();
                FOR(i, RM) forbid_outside(S[i], row0 + ROW(i) - col0, band, cols, t);
            }
            FOR(j, CN) {
                const i64 at = stats + col0 + min_int(COL(j), cols - 1);
                const float shift = p.shift[at], bits_of = PA_MASK == 2 ? p.bits[at] : 0.f;
                FOR(i, RM) S[i][j] = prob_again(S[i][j], p, shift, bits_of);
            }
            const T* const v = p.v + sequence_at(p.cu_k, b, p.vb, p.vs) + hk * p.vh;
            product_rows(dP, staying_row(v, p.vs, row0, rows, t), staged_row(g, p.gs, cols, t), p.dim_v, sm, t);
            FOR(j, CN) {
                const float delta = p.delta[stats + col0 + min_int(COL(j), cols - 1)];
                FOR(i, RM) dP[i][j] = S[i][j] * (dP[i][j] - delta);
            }
            Moving grads = moving_rows(g, p.gs, p.dim_v, anew(t));
            product_cols(dV, S, grads, cols, p.dim_v, sm, t);
            __syncthreads();  // P and dO have been consumed
            Moving queries = moving_rows(q, p.qs, p.dim, anew(t));
            product_cols(dK, dP, queries, cols, p.dim, sm, t);
            __syncthreads();  // dS and Q too
            float dQ[QN][DN];
            FOR(i, QN) FOR(j, DN) dQ[i][j] = 0.f;
            // Rows behind the last key hold that key's dS, or zeros where its probability is; of K they read zeros.
            const T* const first_key = p.k + sequence_at(p.cu_k, b, p.kb, p.ks) + hk * p.kh + row0 * p.ks;
            Moving keys = moving_rows(first_key, p.ks, p.dim, anew(t));
            product_queries(dQ, dP, keys, rows, p.dim, sm, anew(t));
            __syncthreads();  // dS and K too
            float* const sums = p.sums + sequence_at(p.cu_q, b, p.sums_b, p.sums_s) + h * p.sums_h + col0 * p.sums_s;
            add_queries(sums, p.sums_s, dQ, p.scale, cols, p.dim, sm, anew(t));
            q += PA_BC * p.qs;
            g += PA_BC * p.gs;
#if PA_FLUSH
            if (flush_is_due(col0 - q_begin)) {
                T* const dk = p.dk + sequence_at(p.cu_k, b, p.dkb, p.dks) + hk * p.dkh + row0 * p.dks;
                T* const dv = p.dv + sequence_at(p.cu_k, b, p.dvb, p.dvs) + hk * p.dvh + row0 * p.dvs;
                store_gradient(dk, p.dks, dK, p.scale, rows, p.dim, flushed, t);
                store_gradient(dv, p.dvs, dV, 1.f, rows, p.dim_v, flushed, t);
                clear(dK);
                clear(dV);
                flushed = true;
            }
#endif
        }
    }
    T* const dk = p.dk + sequence_at(p.cu_k, b, p.dkb, p.dks) + hk * p.dkh + row0 * p.dks;
    T* const dv = p.dv + sequence_at(p.cu_k, b, p.dvb, p.dvs) + hk * p.dvh + row0 * p.dvs;
    store_gradient(dk, p.dks, dK, p.scale, rows, p.dim, flushed, t);
    store_gradient(dv, p.dvs, dV, 1.f, rows, p.dim_v, flushed, t);
}

// The finished sums of dQ in its own dtype: one warp per query row.
extern "C" __global__ void __launch_bounds__(128) pa_round_query(const AllGradients p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.lq) return;
    const int i = (int)(row % p.lq), h = (int)(row / p.lq % p.heads), b = (int)(row / p.lq / p.heads);
    const float* const sums = p.sums + b * p.sums_b + h * p.sums_h + i * p.sums_s;
    T* const dq = p.dq + b * p.dqb + h * p.dqh + i * p.dqs;
    for (int c = threadIdx.x % 32; c < p.dim; c += 32) dq[c] = to_storage(sums[c]);
}
