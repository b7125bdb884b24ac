// Behind the source of 8-bit attention, in place of its kernels: the multiplications of p.rows chunks of Q K, by FFMA or
// dp4a from registers (PA_RATE 0, 1), or by dp4a with the loads of the main loop (2), in as many blocks as it has.
#if PA_RATE
#define MULTIPLY(sum, a, b) sum = __dp4a(a, b, sum);
#else
#define MULTIPLY(sum, a, b) sum = (int)float_to_bits(fmaf(BITS(a), BITS(b), BITS(sum)));
#define BITS(x) bits_to_float((u32)x)
#endif

extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) pa_pack_rate(const Pack p) {
    __shared__ __align__(128) int sm[WORDS * PA_BR + 2 * TILE_WORDS + GROUPS * PA_BR];
    const Lane t = lane_of(threadIdx.x);
    for (int i = t.tid; i < (int)(sizeof sm / sizeof *sm); i += PA_NT) sm[i] = i;
    __syncthreads();
    int S[RM][CN], a[2][RM], b[2][CN], at = t.ty * 4;
    load_words(a[0], sm + at, 4 * PA_TY);
    load_words(b[0], sm + t.tx * 4, 4 * PA_TX);
    FOR(i, RM) FOR(j, CN) S[i][j] = 0;
#pragma unroll 1
    for (int n = 0; n < p.rows; ++n) {
#if PA_RATE == 2
        OPAQUE(at);  // or one round's words would do for all
        multiply_rows_chunk<false>(S, a, b, sm + at, sm + t.tx * 4, sm + at);
#else
        FOR(w, PA_KC) FOR(i, RM) FOR(j, CN) MULTIPLY(S[i][j], a[0][i], b[0][j])
#endif
    }
    int sum = 0;
    FOR(i, RM) FOR(j, CN) sum ^= S[i][j];
    p.words[blockIdx.x * PA_NT + t.tid] = sum;
}
