// What both backward kernels share. With P the probabilities of a tile, dO the gradient of the output:
//   P  = exp(scores - lse)                 dV = P^T dO
//   dS = P * (dO V^T - delta)              dQ = dS K * scale,  dK = dS^T Q * scale
//   delta = rowsum(dO * O) - dlse
// (Dao et al., "FlashAttention", 2022, appendix B.) Every gradient is summed by one block in a fixed order.

struct Backward {
    const T* q; const T* k; const T* v; const T* o; const T* g;  // g: gradient of the output
    T* dq; T* dk; T* dv;
    const void* mask;
    const float* lse; const float* log_sum; const float* grad_lse;  // [B, Hq, Lq]; the last two may be null
    float* delta; float* shift; float* bits;                        // [B, Hq, Lq], written by pa_delta
    const int* cu_q; const int* cu_k;  // [B + 1] first tokens of packed sequences, or null; packed, the above are [Hq, Lq]
    i64 qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, gb, gh, gs;  // strides of batch, head, token in elements
    i64 dqb, dqh, dqs, dkb, dkh, dks, dvb, dvh, dvs;
    i64 mb, mh, mq, mk, lb, lh;  // of the mask; of the [B, Hq, Lq] arrays (batch, head)
    int lq, lk, heads, group, batches;
    int low, high;    // the band
    int lower_right;  // add lk - lq to the band
    int dim, dim_v, mask_is_float32;
    int first_tile, first_batch;
    float scale, scale_log2;
};

// exp(score - lse) from pa_delta's numbers. With an added mask lse is kept in two parts: next to a row maximum of
// -3e38 the logarithm of the sum would be lost.
INLINE float prob_again(float s, const Backward& p, float shift, float bits) {
#if PA_MASK == 2
    return exp2_approx(fmaf(s - shift, LOG2E, -bits));
#else
    return exp2_approx(fmaf(s, p.scale_log2, -shift));
#endif
}

#if PA_MASK
// Where the tile's mask rows begin, for the column col0. Made anew for each use.
INLINE MaskRow mask_row_at(const Backward& p, int b, int h, int row0, i64 row_step, int col0, i64 col_step) {
    OPAQUE(b);
    MaskRow m;
    m.at = b * p.mb + h * p.mh + row0 * row_step + col0 * col_step;
    m.row = row_step;
    return m;
}
#endif

INLINE void store_gradient(T* out, i64 stride, const float (&O)[RM][DN], float factor, int rows, int dim, bool add,
                           const Lane& t) {
    FOR(i, RM) {
        int r = ROW(i);
        OPAQUE(r);
        volatile T* const row = out + (i64)r * stride;
        FOR(j, DN) {
            const int c = sum_column(j, t);
            if (r < rows && (!PA_PAD || c < dim)) {
#if PA_FLUSH
                row[c] = add ? fmaf(O[i][j], factor, row[c]) : O[i][j] * factor;
#else
                row[c] = to_storage(O[i][j] * factor);
#endif
            }
        }
    }
}
