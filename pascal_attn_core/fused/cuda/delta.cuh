// delta and the shift of every row's scores: one warp per query row. Packed sequences are one long one here.
// PA_ALL 1: and what the kernel for all gradients needs to be zero.
#if PA_ALL
extern "C" __global__ void __launch_bounds__(128) pa_delta_all(const AllGradients p) {
#else
extern "C" __global__ void __launch_bounds__(128) pa_delta(const Backward p) {
#endif
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.lq) return;
    const int i = (int)(row % p.lq), h = (int)(row / p.lq % p.heads), b = (int)(row / p.lq / p.heads);
    const T* const o = p.o + b * p.ob + h * p.oh + i * p.os;
    const T* const g = p.g + b * p.gb + h * p.gh + i * p.gs;
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < p.dim_v; c += 32) sum = fmaf(load_one(o + c), load_one(g + c), sum);
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, s);
#if PA_ALL
    float* const sums = p.sums + b * p.sums_b + h * p.sums_h + i * p.sums_s;
    for (int c = threadIdx.x % 32; c < (p.dim + 3) / 4 * 4; c += 32) sums[c] = 0.f;
#endif
    if (threadIdx.x % 32) return;
#if PA_ALL
    p.turns[row] = 0;
    if (row == 0) *p.begun = 0;
#endif
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
