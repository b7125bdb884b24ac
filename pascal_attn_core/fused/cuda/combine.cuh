#if PA_SPLIT
// Joins the parts of a forward kernel whose keys are cut into ranges: one warp per query row, lanes along head_dim_v.
extern "C" __global__ void __launch_bounds__(128) PA_COMBINE_NAME(const Forward p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32, total = (i64)p.batches * p.heads * p.lq;
    if (row >= total) return;
    float best = NEG_INF, sum = 0.f;
    for (int s = 0; s < p.splits; ++s) best = fmaxf(best, p.part_max[s * total + row]);
    const float reference = best == NEG_INF ? 0.f : best;
    for (int s = 0; s < p.splits; ++s) {
        const float fade = exp2_approx((p.part_max[s * total + row] - reference) * UNIT_TO_LOG2);
        sum = fmaf(p.part_sums[s * total + row], fade, sum);
    }
    const int i = (int)(row % p.lq), h = (int)(row / p.lq % p.heads), b = (int)(row / p.lq / p.heads);
    const float factor = sum > 0.f ? 1.f / sum : 0.f;
    for (int c = threadIdx.x % 32; c < p.dim_v; c += 32) {
        float out = 0.f;
        for (int s = 0; s < p.splits; ++s) {
            const float fade = exp2_approx((p.part_max[s * total + row] - reference) * UNIT_TO_LOG2);
            out = fmaf(p.part_out[(s * total + row) * p.dim_v + c], fade, out);
        }
        p.o[b * p.ob + h * p.oh + i * p.os + c] = to_storage(out * factor);
    }
    if (p.lse && threadIdx.x % 32 == 0) store_lse(p, b * p.lb + h * p.lh + i, best, sum);
}
#endif
