// Q K^T in 8-bit integers by dp4a (sm_61 and newer): four products in one instruction. Each row of Q and K has its own
// scale; the mean key, which changes no probability, has been subtracted from K (pa_quantize).

struct Quantize {
    const T* x;         // [B, H, rows, dim]
    const float* mean;  // [B, H, dim], or null
    int* words;         // [B, H, rows, row_words]: four elements in each, zero behind dim
    float* scales;      // [B, H, rows]
    i64 xb, xh, xs;     // strides in elements
    int rows, heads, batches, dim, row_words;
};

// One warp per row.
extern "C" __global__ void __launch_bounds__(128) pa_quantize(const Quantize p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.rows) return;
    const i64 head = row / p.rows;
    const T* const x = p.x + head / p.heads * p.xb + head % p.heads * p.xh + row % p.rows * p.xs;
    const int lane = threadIdx.x % 32;
    float largest = 0.f;
    for (int c = lane; c < p.dim; c += 32)
        largest = fmaxf(largest, fabsf(load_one(x + c) - (p.mean ? p.mean[head * p.dim + c] : 0.f)));
    for (int s = 16; s; s >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, s));
    const float factor = largest > 0.f ? 127.f / largest : 0.f;
    for (int w = lane; w < p.row_words; w += 32) {
        u32 word = 0;
        FOR(e, 4) if (w * 4 + e < p.dim) {
            const float centred = load_one(x + w * 4 + e) - (p.mean ? p.mean[head * p.dim + w * 4 + e] : 0.f);
            word |= ((u32)__float2int_rn(centred * factor) & 0xffu) << (8 * e);
        }
        p.words[row * p.row_words + w] = (int)word;
    }
    if (lane == 0) p.scales[row] = largest / 127.f;
}

INLINE void store_words(int* d, int rows, int4 words) {
    d[0] = words.x; d[rows] = words.y; d[2 * rows] = words.z; d[3 * rows] = words.w;
}

// S[r][c] = sum_w dp4a(X[r][w], Y[c][w]), in chunks of KC words; x, y: this thread's staged rows. One chunk is
// staged at a time: it holds 4 * KC elements of a row.
INLINE void product_words(int (&S)[RM][CN], const int* x, const int* y, int row_words, float* sm, const Lane& t) {
    int* const Xs = (int*)sm;             // [KC][BR]
    int* const Ys = Xs + PA_KC * PA_BR;   // [KC][BC]
    FOR(i, RM) FOR(j, CN) S[i][j] = 0;
#pragma unroll 1
    for (int w = 0; w < row_words; w += PA_KC) {
        int4 rx[X4], ry[Y4];
        FOR(i, X4) rx[i] = *(const int4*)(x + w + staged_x_col(t) + i * (PA_NT / PA_BR) * 4);
        FOR(i, Y4) ry[i] = *(const int4*)(y + w + staged_y_col(t) + i * (PA_NT / PA_BC) * 4);
        __syncthreads();  // what was staged before has been consumed
        FOR(i, X4) store_words(Xs + (staged_x_col(t) + i * (PA_NT / PA_BR) * 4) * PA_BR + staged_x_row(t), PA_BR, rx[i]);
        FOR(i, Y4) store_words(Ys + (staged_y_col(t) + i * (PA_NT / PA_BC) * 4) * PA_BC + staged_y_row(t), PA_BC, ry[i]);
        __syncthreads();
        FOR(kk, PA_KC) {
            int a[RM], b[CN];
            FOR(i, RM / 4) *(int4*)&a[4 * i] = *(const int4*)(Xs + kk * PA_BR + t.ty * 4 + i * 4 * PA_TY);
            FOR(j, CN / 4) *(int4*)&b[4 * j] = *(const int4*)(Ys + kk * PA_BC + t.tx * 4 + j * 4 * PA_TX);
            FOR(i, RM) FOR(j, CN) S[i][j] = __dp4a(a[i], b[j], S[i][j]);
        }
    }
    __syncthreads();  // P takes this memory
}

// Scores in float32 from the integer sums and the scales of their rows.
INLINE void scores_of_words(float (&S)[RM][CN], const int (&sums)[RM][CN], const float* x_scales,
                            const float* y_scales, int rows, int cols, const Lane& t) {
    float ys[CN];
    FOR(j, CN) ys[j] = y_scales[min_int(COL(j), cols - 1)];
    FOR(i, RM) {
        const float xs = x_scales[min_int(ROW(i), rows - 1)];
        FOR(j, CN) S[i][j] = (float)sums[i][j] * (xs * ys[j]);
    }
}
