// act(x W^T + bias) in 8-bit integers by dp4a: four products in one instruction (sm_61, sm_70 and newer).
//
//   codes, scale = a row of x, rotated, rounded to 8 bits (pa_linear_quantize)
//   y = float(sum of codes * weight codes) * (scale * weight scale) + bias, each step rounded on its own
//
// and then the activation, and one rounding to the output's type. A "word" is four neighbouring codes of a row. Rows of x
// are padded with zeros to whole chunks of words, so that it never matters which words of the weight meet the padding.
//
// Large tiles: BR x BC outputs of a block, 8 x 8 of a thread. Words of both factors go through registers to shared memory,
// transposed, one chunk ahead of the products. Few rows of x: a warp takes some rows of the weight, which is read once
// for all of them, and its lanes share the columns.
//
// Gated activations: the weight has 2 N rows. The columns of a tile are the values in its first half, the gates in its
// second one, so that a thread holds both of an output.
#define CHUNK 8                 // words of a row in shared memory at a time
#define PITCH(rows) ((rows) + 4)  // of a word's row there: lanes that store the halves of a chunk meet in no bank
#define BAND 8                  // tiles of rows that take the columns in step: what they read stays in L2
#define LARGEST_CODE 127.f

// ---- rows of x ------------------------------------------------------------------------------------------------------

struct QuantizeRows {
    const T* x;       // [rows, columns], one block for each row
    int* words;       // [rows, row_words]
    float* scales;    // [rows]
    i64 row_stride;   // of x, in elements
    int columns;      // a multiple of 4
    int row_words;    // a multiple of CHUNK
    int rotation;     // 0, 4, 16, 64 or 256
    int warps;        // of a block
    int in_fours;     // four elements of x at a time can be read
};

#define PIECE 256  // elements of a row that a warp holds: element 128 j + 4 lane + i is v[j][i]
#define KEPT 4     // pieces that it keeps in registers between the maximum and the rounding
#define MOST_WARPS 8

INLINE void load_piece(float (&v)[2][4], const QuantizeRows& p, const T* x, int first, int lane) {
    FOR(j, 2) {
        const int c = first + 128 * j + 4 * lane;
        FOR(i, 4) v[j][i] = 0.f;
        if (c >= p.columns) continue;
        if (p.in_fours) {
            const float4 f = to_float4(load_raw(x + c));
            v[j][0] = f.x; v[j][1] = f.y; v[j][2] = f.z; v[j][3] = f.w;
        } else {
            FOR(i, 4) v[j][i] = load_one(x + c + i);
        }
    }
}

// (total - 2 x) / 2, where no step may be joined with another: 2 x can overflow.
INLINE float reflected(float total, float x) { return __fmul_rn(__fsub_rn(total, __fadd_rn(x, x)), 0.5f); }

// One digit, in base 4, of an element's number, which lies in the lane's bits `step` and 2 `step`.
INLINE float rotated_across(float x, int step) {
    const float pair = x + __shfl_xor_sync(FULL_WARP, x, step);
    const float total = pair + __shfl_xor_sync(FULL_WARP, pair, 2 * step);
    return reflected(total, __shfl_xor_sync(FULL_WARP, x, 3 * step));
}

// Groups of `rotation` neighbouring elements times the regular Hadamard matrix of that size: digit i of an element's
// number becomes half of the sum over the digit minus the element with 3 - i. The lowest digit is the first.
INLINE void rotate(float (&v)[2][4], int rotation) {
    if (rotation >= 4) FOR(j, 2) {
        const float a = v[j][0], b = v[j][1], c = v[j][2], d = v[j][3], total = (a + b) + (c + d);
        v[j][0] = reflected(total, d);
        v[j][1] = reflected(total, c);
        v[j][2] = reflected(total, b);
        v[j][3] = reflected(total, a);
    }
    if (rotation >= 16) FOR(j, 2) FOR(i, 4) v[j][i] = rotated_across(v[j][i], 1);
    if (rotation >= 64) FOR(j, 2) FOR(i, 4) v[j][i] = rotated_across(v[j][i], 4);
    if (rotation >= 256) FOR(i, 4) {  // the digit is 2 j + lane / 16
        const float near = __shfl_xor_sync(FULL_WARP, v[0][i], 16), far = __shfl_xor_sync(FULL_WARP, v[1][i], 16);
        const float total = (v[0][i] + near) + (v[1][i] + far);
        v[0][i] = reflected(total, far);
        v[1][i] = reflected(total, near);
    }
}

// The largest magnitude of a piece and of `most`, as bits.
INLINE u32 largest_of(const float (&v)[2][4], u32 most) {
    FOR(j, 2) FOR(i, 4) {
        const u32 bits = float_to_bits(v[j][i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most;
}

// Words of a piece. Where its row holds a NaN or an infinity, all quotients are NaN, which is converted to zero.
INLINE void store_piece(int* words, const float (&v)[2][4], float scale, float inverse, int first, int row_words,
                        int lane) {
    FOR(j, 2) {
        const int w = first / 4 + 32 * j + lane;
        u32 word = 0;
        FOR(i, 4) word |= ((u32)__float2int_rn(quotient(v[j][i], scale, inverse)) & 0xffu) << (8 * i);
        if (w < row_words) words[w] = (int)word;
    }
}

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS) pa_linear_quantize(const QuantizeRows p) {
    __shared__ u32 of_warps[MOST_WARPS];
    const i64 row = blockIdx.x;
    const T* x = p.x + row * p.row_stride;
    int* words = p.words + row * p.row_words;
    OPAQUE_POINTER(x);
    OPAQUE_POINTER(words);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, round = p.warps * KEPT * PIECE;
    const bool is_long = round < p.columns;  // such a row is read twice
    float v[KEPT][2][4], scale = 1.f, inverse = 1.f;
    u32 most = 0;  // of the magnitudes, as bits: those of a NaN are the largest
#pragma unroll 1
    for (int pass = 0;; ++pass) {  // the maximum, then the codes
#pragma unroll 1
        for (int first = 0; first < p.columns; first += round)
            FOR(k, KEPT) {
                const int at = first + (k * p.warps + warp) * PIECE;
                if (at >= p.columns) continue;
                if (pass == 0 || is_long) {
                    load_piece(v[k], p, x, at, lane);
                    rotate(v[k], p.rotation);
                }
                if (pass == 0) most = largest_of(v[k], most);
                else store_piece(words, v[k], scale, inverse, at, p.row_words, lane);
            }
        if (pass) return;
        for (int s = 16; s; s >>= 1) {
            const u32 other = __shfl_xor_sync(FULL_WARP, most, s);
            most = other > most ? other : most;
        }
        if (lane == 0) of_warps[warp] = most;
        __syncthreads();
        for (int w = 0; w < p.warps; ++w) most = of_warps[w] > most ? of_warps[w] : most;
        scale = __fdiv_rn(bits_to_float(most), LARGEST_CODE);
        if (scale < LEAST_SCALE) scale = LEAST_SCALE;
        inverse = __frcp_rn(scale);
        if (threadIdx.x == 0) p.scales[row] = scale;
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

struct Linear {
    const int* x;            // [rows, x_words], as pa_linear_quantize writes them
    const float* x_scales;   // [rows]
    const int* weight;       // [cols or 2 cols, words]
    const float* scales;     // of its rows, scale_step apart
    const void* bias;        // [cols or 2 cols], of the type bias_kind
    T* out;                  // [rows, cols]
    int rows, cols, words, x_words;
    int scale_step;          // 0: one scale for all rows of the weight
    int bias_kind;           // 0 none, 1 float32, 2 float16, 3 bfloat16
    int activation;          // 0 none, 1 gelu, 2 gelu by tanh, 3 silu
    int is_gated;            // the activation is the gates', and multiplies the values
    int in_fours;            // bit 0: four words of the weight at a time can be read, bit 1: four outputs written
    int row_tiles, col_tiles, first_tile;
};

INLINE float bias_of(const Linear& p, i64 n) {
    switch (p.bias_kind) {
        case 1: return ((const float*)p.bias)[n];
        case 2: return half_to_float(((const u16*)p.bias)[n]);
        case 3: return bits_to_float(((u32)((const u16*)p.bias)[n]) << 16);
    }
    return 0.f;
}

INLINE float activated(float y, int kind) {
    switch (kind) {
        case 1: return 0.5f * y * (1.f + erff(y * 0.70710678118654752f));
        case 2: return 0.5f * y * (1.f + tanhf(0.79788456080286536f * (y + 0.044715f * y * y * y)));
        case 3: return y / (1.f + expf(-y));
    }
    return y;
}

INLINE float scaled(const Linear& p, int sum, float x_scale, float scale, float bias) {
    const float y = __fmul_rn(__int2float_rn(sum), __fmul_rn(x_scale, scale));
    return p.bias_kind ? __fadd_rn(y, bias) : y;
}

// Four words from word w of a row, or from the last ones that it has: x is zero where it has none.
INLINE int4 weight_words(const Linear& p, const int* row, int w) {
    if (p.in_fours & 1) return *(const int4*)(row + least(w, p.words - 4));
    KEEP_BRANCH();
    int4 found;
    found.x = row[least(w, p.words - 1)];
    found.y = row[least(w + 1, p.words - 1)];
    found.z = row[least(w + 2, p.words - 1)];
    found.w = row[least(w + 3, p.words - 1)];
    return found;
}

// The row of the weight for column c of `cols` that begin at output n0, half of them gates where there are any.
INLINE int weight_row(const Linear& p, int n0, int c, int cols) {
    const bool is_gate = p.is_gated && c >= cols / 2;
    return least(n0 + (is_gate ? c - cols / 2 : c), p.cols - 1) + (is_gate ? p.cols : 0);
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// Where the 8 x 8 outputs of a thread lie in a tile. Lanes i and i ^ 1 share their columns: see lane_of of the attention
// kernels.
template <int BR, int BC>
struct Tile {
    static constexpr int TX = BC / 8, TY = BR / 8, THREADS = TX * TY;
    static constexpr int QUADS = CHUNK / 4;                                             // of words, of a row
    static constexpr int X4 = BR * QUADS / THREADS, W4 = BC * QUADS / THREADS;          // that a thread stages
    static constexpr int WORDS = CHUNK * (PITCH(BR) + PITCH(BC));                       // of one chunk
    int tx, ty;
    __device__ __forceinline__ Tile() {
        const int tid = threadIdx.x;
        tx = (tid >> 1) % TX;
        ty = (tid & 1) | ((tid / (2 * TX)) << 1);
    }
    __device__ __forceinline__ int row(int i) const { return ty * 4 + (i & 3) + (i >> 2) * 4 * TY; }
    __device__ __forceinline__ int col(int j) const { return tx * 4 + (j & 3) + (j >> 2) * 4 * TX; }
};

INLINE void store_words(int* at, int pitch, int4 words) {
    at[0] = words.x; at[pitch] = words.y; at[2 * pitch] = words.z; at[3 * pitch] = words.w;
}

// Four outputs from column n.
INLINE void store_outputs(const Linear& p, T* out, int n, const float (&y)[4]) {
    if (p.in_fours & 2) {
        float4 f;
        f.x = y[0]; f.y = y[1]; f.z = y[2]; f.w = y[3];
        if (n < p.cols) *(Raw4*)(out + n) = to_raw(f);
    } else {
        FOR(j, 4) if (n + j < p.cols) out[n + j] = to_storage(y[j]);
    }
}

// The outputs of a thread, row by row and four at a time. The sums of each row move to the first place: one copy of this
// code, not sixteen.
template <int BR, int BC>
INLINE void finish(const Linear& p, int (&sums)[8][8], int row0, int n0, const Tile<BR, BC>& t) {
    float scale[8], bias[8];
    FOR(j, 8) {
        const int n = weight_row(p, n0, t.col(j), BC);
        scale[j] = p.scales[(i64)n * p.scale_step];
        bias[j] = bias_of(p, n);
    }
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const int row = row0 + t.row(i);
        if (row < p.rows) {
            const float x_scale = p.x_scales[row];
            T* const out = p.out + (i64)row * p.cols;
            float y[2][4];
            FOR(h, 2) FOR(j, 4) y[h][j] = scaled(p, sums[0][4 * h + j], x_scale, scale[4 * h + j], bias[4 * h + j]);
#pragma unroll 1
            for (int h = 0; h < (p.is_gated ? 1 : 2); ++h) {
                float found[4];
                FOR(j, 4) {
                    found[j] = activated(h || p.is_gated ? y[1][j] : y[0][j], p.activation);
                    if (p.is_gated) found[j] *= y[0][j];
                }
                store_outputs(p, out, n0 + t.tx * 4 + h * (BC / 2), found);
            }
        }
        FOR(r, 7) FOR(j, 8) sums[r][j] = sums[r + 1][j];
    }
}

template <int BR, int BC>
INLINE void multiply(const Linear& p, int* sm) {
    typedef Tile<BR, BC> Shape;
    const Shape t;
    const int tile = (int)blockIdx.x + p.first_tile, band = tile / (BAND * p.col_tiles);
    const int height = least(BAND, p.row_tiles - band * BAND), within = tile - band * BAND * p.col_tiles;
    const int row0 = (band * BAND + within % height) * BR;
    const int n0 = within / height * (p.is_gated ? BC / 2 : BC);

    // Neighbouring threads stage the quads of one row, further ones other rows. Rows that do not exist are some other one.
    const int quad = threadIdx.x % Shape::QUADS * 4, line = threadIdx.x / Shape::QUADS;
    const int *x[Shape::X4], *weight[Shape::W4];
    FOR(i, Shape::X4) {
        const int row = least(row0 + line + i * (BR / Shape::X4), p.rows - 1);
        x[i] = p.x + (i64)row * p.x_words + quad;
    }
    FOR(i, Shape::W4) weight[i] = p.weight + (i64)weight_row(p, n0, line + i * (BC / Shape::W4), BC) * p.words;

    int4 next_x[Shape::X4], next_w[Shape::W4];
    int sums[8][8];
    FOR(i, 8) FOR(j, 8) sums[i][j] = 0;
    FOR(i, Shape::X4) next_x[i] = *(const int4*)x[i];
    FOR(i, Shape::W4) next_w[i] = weight_words(p, weight[i], quad);
    int place = 0;
#pragma unroll 1
    for (int w = 0;;) {
        int* const xs = sm + place;  // [CHUNK][PITCH(BR)], then [CHUNK][PITCH(BC)]
        int* const ws = xs + CHUNK * PITCH(BR);
        FOR(i, Shape::X4) store_words(xs + quad * PITCH(BR) + line + i * (BR / Shape::X4), PITCH(BR), next_x[i]);
        FOR(i, Shape::W4) store_words(ws + quad * PITCH(BC) + line + i * (BC / Shape::W4), PITCH(BC), next_w[i]);
        __syncthreads();  // the chunk is there; the one before the last has been consumed
        w += CHUNK;
        const bool is_last = w >= p.x_words;
        if (!is_last) {
            FOR(i, Shape::X4) next_x[i] = *(const int4*)(x[i] + w);
            FOR(i, Shape::W4) next_w[i] = weight_words(p, weight[i], w + quad);
        }
        FOR(k, CHUNK) {
            int a[8], b[8];
            FOR(i, 2) *(int4*)&a[4 * i] = *(const int4*)(xs + k * PITCH(BR) + t.row(4 * i));
            FOR(j, 2) *(int4*)&b[4 * j] = *(const int4*)(ws + k * PITCH(BC) + t.col(4 * j));
            FOR(i, 8) FOR(j, 8) sums[i][j] = __dp4a(a[i], b[j], sums[i][j]);
        }
        if (is_last) break;
        place = Shape::WORDS - place;
    }
    finish<BR, BC>(p, sums, row0, n0, t);
}

#define PA_TILED(name, BR, BC, blocks)                                                                      \
    extern "C" __global__ void __launch_bounds__(BR * BC / 64, blocks) name(const Linear p) {               \
        __shared__ __align__(16) int sm[2 * Tile<BR, BC>::WORDS];                                           \
        multiply<BR, BC>(p, sm);                                                                            \
    }
PA_TILED(pa_linear, 128, 128, 2)
PA_TILED(pa_linear_small, 64, 64, 6)

// ---- few rows -------------------------------------------------------------------------------------------------------

#define FEW_WARPS 8

// The words from number w of the rows of x that a warp stages, zero behind the last, and of the weight's rows that it takes.
template <int STAGED, int ROWS, int EACH>
INLINE void load_few(const Linear& p, int4 (&x)[STAGED], int4 (&weight)[EACH], const int* const (&rows)[EACH], int row0,
                     int warp, int w) {
    FOR(i, STAGED) {
        const int m = warp + i * FEW_WARPS;
        x[i].x = x[i].y = x[i].z = x[i].w = 0;
        if (m < ROWS && row0 + m < p.rows && w < p.x_words) x[i] = *(const int4*)(p.x + (i64)(row0 + m) * p.x_words + w);
    }
    FOR(r, EACH) weight[r] = weight_words(p, rows[r], w);
}

// ROWS rows of x by EACH rows of the weight for each warp, whose lanes hold 16 codes each of 512 columns at a time.
template <int ROWS, int EACH>
INLINE void multiply_few(const Linear& p, int4 (&xs)[2][ROWS][32]) {
    constexpr int STAGED = (ROWS + FEW_WARPS - 1) / FEW_WARPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = blockIdx.y * ROWS;
    const int outputs = p.is_gated ? EACH / 2 : EACH;  // of a row of x
    const int n0 = (((int)blockIdx.x + p.first_tile) * FEW_WARPS + warp) * outputs;
    const int* rows[EACH];
    FOR(r, EACH) rows[r] = p.weight + (i64)weight_row(p, n0, r, EACH) * p.words;
    int sums[ROWS][EACH];
    FOR(m, ROWS) FOR(r, EACH) sums[m][r] = 0;

    int4 next_x[STAGED], next[EACH];
    load_few<STAGED, ROWS, EACH>(p, next_x, next, rows, row0, warp, 4 * lane);
#pragma unroll 1
    for (int first = 0, place = 0;; place ^= 1) {
        FOR(i, STAGED) if (warp + i * FEW_WARPS < ROWS) xs[place][warp + i * FEW_WARPS][lane] = next_x[i];
        int4 weight[EACH];
        FOR(r, EACH) weight[r] = next[r];
        __syncthreads();  // these columns are there; those before the last have been consumed
        first += 128;
        const bool is_last = first >= p.x_words;
        if (!is_last) load_few<STAGED, ROWS, EACH>(p, next_x, next, rows, row0, warp, first + 4 * lane);
        FOR(m, ROWS) {
            const int4 x = xs[place][m][lane];
            FOR(r, EACH) {
                sums[m][r] = __dp4a(x.x, weight[r].x, sums[m][r]);
                sums[m][r] = __dp4a(x.y, weight[r].y, sums[m][r]);
                sums[m][r] = __dp4a(x.z, weight[r].z, sums[m][r]);
                sums[m][r] = __dp4a(x.w, weight[r].w, sums[m][r]);
            }
        }
        if (is_last) break;
    }

    // Lane EACH m + r keeps the sum of row m with row r of the weight, and the gate's where that is a value.
    int sum = 0, gate = 0;
    FOR(m, ROWS) FOR(r, EACH) {
        for (int s = 16; s; s >>= 1) sums[m][r] += __shfl_xor_sync(FULL_WARP, sums[m][r], s);
    }
    FOR(m, ROWS) FOR(r, EACH) if (lane == m * EACH + r) {
        sum = sums[m][r];
        gate = sums[m][(r + EACH / 2) % EACH];
    }
    const int row = row0 + lane / EACH, r = lane % EACH, n = n0 + r;
    if (lane >= ROWS * EACH || r >= outputs || row >= p.rows || n >= p.cols) return;
    const float x_scale = p.x_scales[row];
    const i64 gate_row = (i64)n + (p.is_gated ? p.cols : 0);
    const float value = scaled(p, sum, x_scale, p.scales[(i64)n * p.scale_step], bias_of(p, n));
    float y = p.is_gated ? scaled(p, gate, x_scale, p.scales[gate_row * p.scale_step], bias_of(p, gate_row)) : value;
    y = activated(y, p.activation);
    p.out[(i64)row * p.cols + n] = to_storage(p.is_gated ? value * y : y);
}

#define PA_FEW(name, ROWS, EACH)                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS) name(const Linear p) {                     \
        __shared__ int4 xs[2][ROWS][32];                                                                    \
        multiply_few<ROWS, EACH>(p, xs);                                                                    \
    }
PA_FEW(pa_linear_few, 4, 4)
PA_FEW(pa_linear_some, 16, 2)
