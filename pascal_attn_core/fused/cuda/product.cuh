// The two tile products that every kernel is made of, both through shared memory and double buffered:
//   product_rows:  S[r][c] += sum_d X[r][d] * Y[c][d]     X and Y are staged transposed, a chunk of d at a time
//   product_cols:  O[r][d] += sum_c P[r][c] * Y[c][d]     P comes from registers, Y is staged as it lies
// X is the tile that stays (its rows belong to the block), Y the one that moves.

#define X4 (PA_BR * PA_KC / 4 / PA_NT)  // float4 per thread and chunk
#define Y4 (PA_BC * PA_KC / 4 / PA_NT)
#define V4R ((PA_VC * PA_D / 4) % PA_NT)
#define V4 (PA_VC * PA_D / 4 / PA_NT + (V4R ? 1 : 0))
#define SMEM_ROWS (2 * PA_KC * (PA_BR + PA_BC))
#define SMEM_COLS (PCOLS * PA_BR + 2 * PA_VC * PA_D)
#define SMEM_TILE (SMEM_ROWS > SMEM_COLS ? SMEM_ROWS : SMEM_COLS)

// A thread stages one row of X and one of Y: neighbouring lanes take neighbouring rows, so that the transposing
// stores have no bank conflicts.
INLINE int staged_x_row(const Lane& t) { return t.tid % PA_BR; }
INLINE int staged_y_row(const Lane& t) { return t.tid % PA_BC; }
INLINE int staged_x_col(const Lane& t) { return t.tid / PA_BR * 4; }
INLINE int staged_y_col(const Lane& t) { return t.tid / PA_BC * 4; }

INLINE Raw4 load_within(const T* p, int col, int dim) {
#if PA_PAD
    return col < dim ? load_raw(p) : zero_raw();
#else
    return load_raw(p);
#endif
}

INLINE void store_transposed(float* d, int rows, Raw4 raw) {
    const float4 f = to_float4(raw);
    d[0] = f.x; d[rows] = f.y; d[2 * rows] = f.z; d[3 * rows] = f.w;
}

// S (+)= the product of one staged chunk. `first`: S is set, so that it need not be cleared before.
template <bool first>
INLINE void multiply_chunk(float (&S)[RM][CN], const float* xs, const float* ys) {
    FOR(kk, PA_KC) {
        float a[RM], w[CN];
        FOR(i, RM / 4) *(float4*)&a[4 * i] = *(const float4*)(xs + kk * PA_BR + i * 4 * PA_TY);
        FOR(j, CN / 4) *(float4*)&w[4 * j] = *(const float4*)(ys + kk * PA_BC + j * 4 * PA_TX);
        FOR(i, RM) FOR(j, CN) S[i][j] = first && kk == 0 ? a[i] * w[j] : fmaf(a[i], w[j], S[i][j]);
    }
}

// The chunks of one product_rows: what is staged, and where.
struct RowChunks {
    const T* x; const T* y;  // this thread's staged rows at its staged columns of the next chunk
    float* Xs; float* Ys;    // [2][KC][BR] and [2][KC][BC]
    int dim;                 // columns that exist from the next chunk on
    Raw4 rx[X4], ry[Y4];     // the next chunk, on its way
};

INLINE void load_chunk(RowChunks& r, const Lane& t) {
    FOR(i, X4) {
        const int col = i * (PA_NT / PA_BR) * 4;
        r.rx[i] = load_within(r.x + col, staged_x_col(t) + col, r.dim);
    }
    FOR(i, Y4) {
        const int col = i * (PA_NT / PA_BC) * 4;
        r.ry[i] = load_within(r.y + col, staged_y_col(t) + col, r.dim);
    }
    r.x += PA_KC;
    r.y += PA_KC;
    r.dim -= PA_KC;
}

INLINE void store_chunk(const RowChunks& r, int buffer, const Lane& t) {
    float* const xs = r.Xs + buffer * PA_KC * PA_BR + staged_x_col(t) * PA_BR + staged_x_row(t);
    float* const ys = r.Ys + buffer * PA_KC * PA_BC + staged_y_col(t) * PA_BC + staged_y_row(t);
    FOR(i, X4) store_transposed(xs + i * (PA_NT / PA_BR) * 4 * PA_BR, PA_BR, r.rx[i]);
    FOR(i, Y4) store_transposed(ys + i * (PA_NT / PA_BC) * 4 * PA_BC, PA_BC, r.ry[i]);
}

// Multiplies one chunk while the next one is on its way.
template <bool first>
INLINE void chunk_step(float (&S)[RM][CN], RowChunks& r, int buffer, bool more, const Lane& t) {
    if (more) load_chunk(r, t);
    multiply_chunk<first>(S, r.Xs + buffer * PA_KC * PA_BR + t.ty * 4, r.Ys + buffer * PA_KC * PA_BC + t.tx * 4);
    if (more) store_chunk(r, buffer ^ 1, t);
    __syncthreads();
}

// x, y: this thread's staged rows at its staged columns; dim: columns that exist.
INLINE void product_rows(float (&S)[RM][CN], const T* x, const T* y, int dim, float* sm, const Lane& t) {
    RowChunks r;
    r.x = x;
    r.y = y;
    r.Xs = sm;
    r.Ys = sm + 2 * PA_KC * PA_BR;
    r.dim = dim;
    const int chunks = PA_PAD ? (dim + PA_KC - 1) / PA_KC : PA_D / PA_KC;
    load_chunk(r, t);
    __syncthreads();  // what the previous product staged has been consumed
    store_chunk(r, 0, t);
    __syncthreads();
    chunk_step<true>(S, r, 0, chunks > 1, t);
#pragma unroll 1
    for (int c = 1; c < chunks; ++c) chunk_step<false>(S, r, c & 1, c + 1 < chunks, t);
}

// This thread's share of the rows of a moving tile that product_cols stages: element e of a chunk lies in row
// e / (D / 4). The offsets are the same for every chunk.
struct Moving {
    const T* at;     // first row of the next chunk
    i64 stride;      // of a row, in elements
    u32 offset[V4];  // of this thread's pieces within a chunk, in elements
};

INLINE Moving moving_rows(const T* base, i64 stride, int dim, const Lane& t) {
    Moving y;
    y.at = base;
    y.stride = stride;
    FOR(i, V4) {
        const int e = t.tid + i * PA_NT, row = e / (PA_D / 4), col = e % (PA_D / 4) * 4;
        y.offset[i] = (u32)row * (u32)stride + (PA_PAD && col >= dim ? 0u : (u32)col);
    }
    return y;
}

// The rows of a chunk from `first` on (within the tile) of which the tile has `rows`; those behind are zero.
INLINE void load_moving(Raw4 (&r)[V4], const Moving& y, int first, int rows, int dim, const Lane& t) {
    if (first + PA_VC > rows) {
        KEEP_BRANCH();
        FOR(i, V4) {
            const int e = t.tid + i * PA_NT, row = e / (PA_D / 4);
            r[i] = first + row < rows ? load_raw(y.at + y.offset[i]) : zero_raw();
        }
    } else {
        FOR(i, V4) if (i < V4 - 1 || V4R == 0 || t.tid < V4R) r[i] = load_raw(y.at + y.offset[i]);
    }
#if PA_PAD
    FOR(i, V4) if ((t.tid + i * PA_NT) % (PA_D / 4) * 4 >= dim) r[i] = zero_raw();
#endif
}

INLINE void store_moving(float* Vs, const Raw4 (&r)[V4], const Lane& t) {
    FOR(i, V4) if (i < V4 - 1 || V4R == 0 || t.tid < V4R) *(float4*)(Vs + (t.tid + i * PA_NT) * 4) = to_float4(r[i]);
}

// P[col][row] with the row groups of four xor-ed with the column's group: spreads the float4 stores of eight
// neighbouring tx over all banks. SWIZZLE(a ^ b) = SWIZZLE(a) ^ SWIZZLE(b), and it stays below PA_TY, so that it can be
// applied to an address.
#define SWIZZLE(g) (((((g) & 3) << 1) | (((g) >> 2) & 1)) & (PA_TY - 1))

INLINE void store_probs(float* Ps, const float (&P)[RM][CN], int part, const Lane& t) {
    FOR(j, CN / PA_PSPLIT) {
        const int jj = part * (CN / PA_PSPLIT) + j;
        const int col = COL(jj) - part * PCOLS;
        FOR(i, RM / 4) {
            float4 f;
            f.x = P[4 * i][jj]; f.y = P[4 * i + 1][jj]; f.z = P[4 * i + 2][jj]; f.w = P[4 * i + 3][jj];
            *(float4*)(Ps + col * PA_BR + ((t.ty ^ SWIZZLE(t.tx)) + i * PA_TY) * 4) = f;
        }
    }
}

INLINE void load_columns(float (&w)[DN], const float* row, const Lane& t) {
    FOR(j, DN4) *(float4*)&w[4 * j] = *(const float4*)(row + j * 4 * PA_TX + t.tx * 4);
    const float* rest = row + DN4 * 4 * PA_TX + t.tx * (DNR == 3 ? 2 : DNR);
#if DNR >= 2
    const float2 two = *(const float2*)rest;
    w[DN4 * 4] = two.x; w[DN4 * 4 + 1] = two.y;
#endif
#if DNR == 3
    w[DN4 * 4 + 2] = row[(DN4 * 4 + 2) * PA_TX + t.tx];
#elif DNR == 1
    w[DN4 * 4] = rest[0];
#endif
}

// Column of the sums that this thread's column j is.
INLINE int sum_column(int j, const Lane& t) {
    if (j < DN4 * 4) return (j / 4) * 4 * PA_TX + t.tx * 4 + j % 4;
    if (DNR == 3) return j < DN4 * 4 + 2 ? DN4 * 4 * PA_TX + t.tx * 2 + j % 4 : (DN4 * 4 + 2) * PA_TX + t.tx;
    return DN4 * 4 * PA_TX + t.tx * DNR + j % 4;
}

// y.at is left behind the tile's last chunk. rows: how many rows the moving tile has.
INLINE void product_cols(float (&O)[RM][DN], const float (&P)[RM][CN], Moving& y, int rows, int dim, float* sm,
                         const Lane& t) {
    float* const Ps = sm;                  // [PCOLS][BR]
    float* const Vs = sm + PCOLS * PA_BR;  // [2][VC][D]
    Raw4 ry[V4];
    FOR(part, PA_PSPLIT) {
        if (part == 0) load_moving(ry, y, 0, rows, dim, t);
        store_probs(Ps, P, part, t);  // the barrier of the previous part's last chunk lies behind us
        if (part == 0) store_moving(Vs, ry, t);
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < PCOLS / PA_VC; ++c) {
            const int r0 = part * PCOLS + c * PA_VC;
            const int bf = (r0 / PA_VC) & 1;
            const bool more = r0 + PA_VC < PA_BC;
            y.at += PA_VC * y.stride;
            if (more) load_moving(ry, y, r0 + PA_VC, rows, dim, t);
            const float* vb = Vs + bf * PA_VC * PA_D;
            // Byte offset of this thread's rows in the chunk's first column, for the writer's tx.
            const u32 pb = (u32)c * (PA_VC * PA_BR * 4) + (((u32)t.ty ^ SWIZZLE(c * (PA_VC / 4))) << 4);
            FOR(k4, PA_VC / 4) {
                const char* const pr = (const char*)Ps + (pb ^ (u32)(SWIZZLE(k4) << 4));
                FOR(kk, 4) {
                    float a[RM], w[DN];
                    FOR(i, RM / 4)
                        *(float4*)&a[4 * i] = *(const float4*)(pr + ((k4 * 4 + kk) * PA_BR + i * 4 * PA_TY) * 4);
                    load_columns(w, vb + (k4 * 4 + kk) * PA_D, t);
                    FOR(i, RM) FOR(j, DN) O[i][j] = fmaf(a[i], w[j], O[i][j]);
                }
            }
            if (more) store_moving(Vs + (bf ^ 1) * PA_VC * PA_D, ry, t);
            if (more) __syncthreads();
        }
    }
}

// Where this thread's staged row of the moving tile begins, at its staged columns; `first` is the tile's first row,
// which is taken where the tile has no such row. Made anew for every tile: kept, it would take registers of the sums.
INLINE const T* staged_row(const T* first, i64 stride, int rows, const Lane& t) {
    int r = staged_y_row(t);
    OPAQUE(r);
    return first + (r < rows ? r : 0) * stride + staged_y_col(t);
}

// The same of the tile that stays, whose first row is row row0 of its head.
INLINE const T* staying_row(const T* head, i64 stride, int row0, int rows, const Lane& t) {
    int r = staged_x_row(t);
    OPAQUE(r);
    return head + (row0 + min_int(r, rows - 1)) * stride + staged_x_col(t);
}

INLINE void clear(float (&O)[RM][DN]) {
    FOR(i, RM) FOR(j, DN) O[i][j] = 0.f;
}

#if PA_FLUSH
// Whether float32 sums move to the output after the tile that begins `done` columns behind the first one.
INLINE bool flush_is_due(int done) { return (u32)done / PA_BC % PA_FLUSH == PA_FLUSH - 1; }
#endif
