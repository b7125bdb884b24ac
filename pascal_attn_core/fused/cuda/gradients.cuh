// What all backward kernels share. With P the probabilities of a tile, dO the gradient of the output:
//   P  = exp(scores - lse)                 dV = P^T dO
//   dS = P * (dO V^T - delta)              dQ = dS K * scale,  dK = dS^T Q * scale
//   delta = rowsum(dO * O) - dlse
// (Dao et al., "FlashAttention", 2022, appendix B.) Every gradient is summed in a fixed order.

struct Backward {
    const T* q; const T* k; const T* v; const T* o; const T* g;  // g: gradient of the output
    T* dq; T* dk; T* dv;
    const void* mask;
    const float* lse; const float* log_sum; const float* grad_lse;  // [B, Hq, Lq]; the last two may be null
    float* delta; float* shift; float* bits;                        // [B, Hq, Lq], written by pa_delta
    const int* cu_q; const int* cu_k;  // [B + 1] first tokens of packed sequences (the above are then [Hq, Lq]) or null
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
