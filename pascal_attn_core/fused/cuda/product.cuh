// The two tile products that every kernel is made of, both through shared memory and double buffered:
//   product_rows:  S[r][c] += sum_d X[r][d] * Y[c][d]     X and Y are staged transposed, a chunk of d at a time
//   product_cols:  O[r][d] += sum_c P[r][c] * Y[c][d]     P comes from registers, Y is staged as it lies
// X is the tile that stays (its rows belong to the block), Y the one that moves.

// Shared memory is made of words: float32, or pairs of float16, which travel as float32 does.
#if PA_PAIRS
#define PIECE 8  // elements that a thread stages at a time
#define Piece int4
#define TO_WORDS(elements) ((elements) / 2)
#define MULTIPLY(a, b) dot2(float_to_bits(a), float_to_bits(b), 0.f)
#define MULTIPLY_ADD(a, b, sum) dot2(float_to_bits(a), float_to_bits(b), sum)
#else
#define PIECE 4
#define Piece Raw4
#define TO_WORDS(elements) elements
#define MULTIPLY(a, b) a * b
#define MULTIPLY_ADD(a, b, sum) fmaf(a, b, sum)
#endif
// Pieces per thread and chunk. Where a chunk is no multiple of what all threads stage, some have nothing at the end.
#if (PA_BR * PA_KC) % (PIECE * PA_NT)
#define X4 (PA_BR * PA_KC / PIECE / PA_NT + 1)
#define IF_STAGED_X(i) if (staged_x_col(t) + (i) * (PA_NT / PA_BR) * PIECE < PA_KC)
#else
#define X4 (PA_BR * PA_KC / PIECE / PA_NT)
#define IF_STAGED_X(i)
#endif
#if (PA_BC * PA_KC) % (PIECE * PA_NT)
#define Y4 (PA_BC * PA_KC / PIECE / PA_NT + 1)
#define IF_STAGED_Y(i) if (staged_y_col(t) + (i) * (PA_NT / PA_BC) * PIECE < PA_KC)
#else
#define Y4 (PA_BC * PA_KC / PIECE / PA_NT)
#define IF_STAGED_Y(i)
#endif
// Of a staged chunk of V a thread takes pieces of four columns, with PA_PAIRS 2 of two rows each.
#if PA_PAIRS == 2
#define V_ROWS 2
#define V_PIECES PA_VC / 2 * PA_D / 4
#define P_WORDS (PCOLS / 2 * PA_BR)
#else
#define V_ROWS 1
#define V_PIECES PA_VC * PA_D / 4
#define P_WORDS PCOLS * PA_BR
#endif
#define V4R ((V_PIECES) % PA_NT)
#define V4 (V_PIECES / PA_NT + (V4R ? 1 : 0))
// A product of one chunk needs no second buffer. On AMD's cards registers limit how many blocks run, not shared memory.
#if PA_KC < PA_D || PA_AMD
#define ROW_BUFFERS 2
#define CHUNKS(dim) PA_PAD ? (dim + PA_KC - 1) / PA_KC : PA_D / PA_KC
#else
#define ROW_BUFFERS 1
#define CHUNKS(dim) 1
#endif
#if PA_VC < PA_BC || (PA_ALL && PA_VC < PA_BR) || PA_AMD
#define COLUMN_BUFFERS 2
#else
#define COLUMN_BUFFERS 1
#endif
#if PA_KEEP
#define SMEM_KEPT ((PA_D + PA_KC - 1) / PA_KC * TO_WORDS(PA_KC) * PA_BR)
#define SMEM_ROWS (ROW_BUFFERS * TO_WORDS(PA_KC) * PA_BC)
#else
#define SMEM_ROWS (ROW_BUFFERS * TO_WORDS(PA_KC) * (PA_BR + PA_BC))
#endif
#define SMEM_COLS (P_WORDS + COLUMN_BUFFERS * PA_VC * TO_WORDS(PA_D))
#if PA_KEEP
#define SMEM_TILE (SMEM_KEPT + (SMEM_ROWS > SMEM_COLS ? SMEM_ROWS : SMEM_COLS))
#else
#define SMEM_TILE (SMEM_ROWS > SMEM_COLS ? SMEM_ROWS : SMEM_COLS)
#endif
#if PA_AMD && PA_VC > (PA_DTYPE == 0 ? 16 : 32)
#error "offsets within a staged chunk of rows are 32-bit numbers of bytes"
#endif

// A thread stages one row of X and one of Y: neighbouring lanes take neighbouring rows, so that the transposing
// stores have no bank conflicts.
INLINE int staged_x_row(const Lane& t) { return t.tid % PA_BR; }
INLINE int staged_y_row(const Lane& t) { return t.tid % PA_BC; }
INLINE int staged_x_col(const Lane& t) { return t.tid / PA_BR * PIECE; }
INLINE int staged_y_col(const Lane& t) { return t.tid / PA_BC * PIECE; }

INLINE Piece load_within(const T* p, int col, int dim) {
#if PA_PAIRS
    const Raw4 low = !PA_PAD || col < dim ? load_raw(p) : zero_raw();
    const Raw4 high = !PA_PAD || col + 4 < dim ? load_raw(p + 4) : zero_raw();
    Piece piece;
    piece.x = (int)low.x; piece.y = (int)low.y; piece.z = (int)high.x; piece.w = (int)high.y;
    return piece;
#elif PA_PAD
    return col < dim ? load_raw(p) : zero_raw();
#else
    return load_raw(p);
#endif
}

INLINE void store_transposed(float* d, int rows, Piece raw) {
#if PA_PAIRS
    int* const words = (int*)d;
    words[0] = raw.x; words[rows] = raw.y; words[2 * rows] = raw.z; words[3 * rows] = raw.w;
#else
    const float4 f = to_float4(raw);
    d[0] = f.x; d[rows] = f.y; d[2 * rows] = f.z; d[3 * rows] = f.w;
#endif
}

#if PA_AHEAD
// What one step multiplies.
struct RowFactors {
    __align__(16) float a[RM];
    __align__(16) float w[CN];
};

INLINE void load_row_factors(RowFactors& f, const float* xs, const float* ys) {
    FOR(i, RM / 4) *(float4*)&f.a[4 * i] = *(const float4*)(xs + i * 4 * PA_TY);
    FOR(j, CN / 4) *(float4*)&f.w[4 * j] = *(const float4*)(ys + j * 4 * PA_TX);
}
#endif

// S (+)= the product of one staged chunk. `first`: S is set, so that it need not be cleared before.
template <bool first>
INLINE void multiply_chunk(float (&S)[RM][CN], const float* xs, const float* ys) {
#if PA_AHEAD
    RowFactors factors[2];
    load_row_factors(factors[0], xs, ys);
    FOR(kk, TO_WORDS(PA_KC)) {
        RowFactors &f = factors[kk & 1], &next = factors[kk + 1 & 1];
        if (kk + 1 < TO_WORDS(PA_KC)) load_row_factors(next, xs + (kk + 1) * PA_BR, ys + (kk + 1) * PA_BC);
        FOR(i, RM) FOR(j, CN)
            S[i][j] = first && kk == 0 ? MULTIPLY(f.a[i], f.w[j]) : MULTIPLY_ADD(f.a[i], f.w[j], S[i][j]);
    }
#else
    FOR(kk, TO_WORDS(PA_KC)) {
        float a[RM], w[CN];
        FOR(i, RM / 4) *(float4*)&a[4 * i] = *(const float4*)(xs + kk * PA_BR + i * 4 * PA_TY);
        FOR(j, CN / 4) *(float4*)&w[4 * j] = *(const float4*)(ys + kk * PA_BC + j * 4 * PA_TX);
        FOR(i, RM) FOR(j, CN) S[i][j] = first && kk == 0 ? MULTIPLY(a[i], w[j]) : MULTIPLY_ADD(a[i], w[j], S[i][j]);
    }
#endif
    COMPLETE(S)
}

// The chunks of one product_rows: what is staged, and where.
struct RowChunks {
    const T* x; const T* y;  // this thread's staged rows at its staged columns of the next chunk
    float* Xs; float* Ys;    // [ROW_BUFFERS][KC][BR] and [ROW_BUFFERS][KC][BC]; with PA_PAIRS KC / 2 words,
                             // with PA_KEEP all chunks of X
    int dim;                 // columns that exist from the next chunk on
    Piece rx[X4], ry[Y4];    // the next chunk, on its way
};

INLINE void load_chunk(RowChunks& r, const Lane& t) {
#if !PA_KEEP
    FOR(i, X4) IF_STAGED_X(i) {
        const int col = i * (PA_NT / PA_BR) * PIECE;
        r.rx[i] = load_within(r.x + col, staged_x_col(t) + col, r.dim);
    }
#endif
    FOR(i, Y4) IF_STAGED_Y(i) {
        const int col = i * (PA_NT / PA_BC) * PIECE;
        r.ry[i] = load_within(r.y + col, staged_y_col(t) + col, r.dim);
    }
    r.x += PA_KC;
    r.y += PA_KC;
    r.dim -= PA_KC;
}

INLINE void store_chunk(const RowChunks& r, int buffer, const Lane& t) {
#if !PA_KEEP
    float* const xs = r.Xs + buffer * TO_WORDS(PA_KC) * PA_BR + TO_WORDS(staged_x_col(t)) * PA_BR + staged_x_row(t);
#endif
    float* const ys = r.Ys + buffer * TO_WORDS(PA_KC) * PA_BC + TO_WORDS(staged_y_col(t)) * PA_BC + staged_y_row(t);
#if !PA_KEEP
    FOR(i, X4) IF_STAGED_X(i) store_transposed(xs + TO_WORDS(i * (PA_NT / PA_BR) * PIECE) * PA_BR, PA_BR, r.rx[i]);
#endif
    FOR(i, Y4) IF_STAGED_Y(i) store_transposed(ys + TO_WORDS(i * (PA_NT / PA_BC) * PIECE) * PA_BC, PA_BC, r.ry[i]);
}

#if PA_KEEP
// Stages all chunks of X. x: this thread's staged row at its staged columns.
INLINE void keep_rows(const T* x, int dim, float* sm, const Lane& t) {
    FOR(c, (PA_D + PA_KC - 1) / PA_KC) FOR(i, X4) IF_STAGED_X(i) {
        const int col = c * PA_KC + i * (PA_NT / PA_BR) * PIECE;
        float* const xs = sm + TO_WORDS(c * PA_KC + staged_x_col(t) + i * (PA_NT / PA_BR) * PIECE) * PA_BR;
        store_transposed(xs + staged_x_row(t), PA_BR, load_within(x + col, staged_x_col(t) + col, dim));
    }
}
#define BEHIND_KEPT(sm) sm + SMEM_KEPT
#else
#define BEHIND_KEPT(sm) sm
#endif

// Multiplies one chunk while the next one is on its way.
template <bool first>
INLINE void chunk_step(float (&S)[RM][CN], RowChunks& r, int buffer, bool more, const Lane& t) {
    if (more) load_chunk(r, t);
#if PA_KEEP
    multiply_chunk<first>(S, r.Xs + t.ty * 4, r.Ys + buffer * TO_WORDS(PA_KC) * PA_BC + t.tx * 4);
    r.Xs += TO_WORDS(PA_KC) * PA_BR;
#else
    multiply_chunk<first>(S, r.Xs + buffer * TO_WORDS(PA_KC) * PA_BR + t.ty * 4,
                          r.Ys + buffer * TO_WORDS(PA_KC) * PA_BC + t.tx * 4);
#endif
    if (more) store_chunk(r, buffer ^ 1, t);
    __syncthreads();
}

// x, y: this thread's staged rows at its staged columns; dim: columns that exist.
INLINE void product_rows(float (&S)[RM][CN], const T* x, const T* y, int dim, float* sm, const Lane& t) {
    RowChunks r;
    r.x = x;
    r.y = y;
    r.Xs = sm;
#if PA_KEEP
    r.Ys = sm + SMEM_KEPT;
#else
    r.Ys = sm + ROW_BUFFERS * TO_WORDS(PA_KC) * PA_BR;
#endif
    r.dim = dim;
    const int chunks = CHUNKS(dim);
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
    u32 offset[V4];  // of this thread's pieces within a chunk, in elements; PA_AMD: in bytes, as its loads add them
};

#if PA_AMD
#define MOVING_PIECE(y, i) (const T*)((const char*)y.at + y.offset[i])
#else
#define MOVING_PIECE(y, i) y.at + y.offset[i]
#endif

INLINE Moving moving_rows(const T* base, i64 stride, int dim, const Lane& t) {
    Moving y;
    y.at = base;
    y.stride = stride;
    FOR(i, V4) {
#if PA_PAIRS == 2
        const int e = t.tid + i * PA_NT, row = e / (PA_D / 4) * 2, col = e % (PA_D / 4) * 4;
#else
        const int e = t.tid + i * PA_NT, row = e / (PA_D / 4), col = e % (PA_D / 4) * 4;
#endif
        y.offset[i] = (u32)row * (u32)stride + (PA_PAD && col >= dim ? 0u : (u32)col);
#if PA_AMD
        y.offset[i] *= (u32)sizeof(T);
#endif
    }
    return y;
}

#if PA_PAIRS == 2
// The same columns of two rows, the second of which becomes the upper halves of the words of shared memory.
struct MovingPiece {
    Raw4 low, high;
};

INLINE void load_moving(MovingPiece (&r)[V4], const Moving& y, int first, int rows, int dim, const Lane& t) {
    Moving upper = y;
    upper.at += y.stride;
    FOR(i, V4) {
        const int e = t.tid + i * PA_NT, row = first + e / (PA_D / 4) * 2;
        const bool exists = (i < V4 - 1 || V4R == 0 || t.tid < V4R) && (!PA_PAD || e % (PA_D / 4) * 4 < dim);
        if (first + PA_VC > rows) {
            KEEP_BRANCH();
            r[i].low = exists && row < rows ? load_raw(MOVING_PIECE(y, i)) : zero_raw();
            r[i].high = exists && row + 1 < rows ? load_raw(MOVING_PIECE(upper, i)) : zero_raw();
        } else {
            r[i].low = exists ? load_raw(MOVING_PIECE(y, i)) : zero_raw();
            r[i].high = exists ? load_raw(MOVING_PIECE(upper, i)) : zero_raw();
        }
    }
}

INLINE void store_moving(float* Vs, const MovingPiece (&r)[V4], const Lane& t) {
    FOR(i, V4) if (i < V4 - 1 || V4R == 0 || t.tid < V4R) {
        const Raw4 low = r[i].low, high = r[i].high;
        int4 words;
        words.x = (int)((low.x & 0xffffu) | (high.x << 16)); words.y = (int)((low.x >> 16) | (high.x & 0xffff0000u));
        words.z = (int)((low.y & 0xffffu) | (high.y << 16)); words.w = (int)((low.y >> 16) | (high.y & 0xffff0000u));
        *(int4*)(Vs + (t.tid + i * PA_NT) * 4) = words;
    }
}
#else
#define MovingPiece Raw4

// The rows of a chunk from `first` on (within the tile) of which the tile has `rows`; those behind are zero.
INLINE void load_moving(Raw4 (&r)[V4], const Moving& y, int first, int rows, int dim, const Lane& t) {
    if (first + PA_VC > rows) {
        KEEP_BRANCH();
        FOR(i, V4) {
            const int e = t.tid + i * PA_NT, row = e / (PA_D / 4);
            r[i] = first + row < rows ? load_raw(MOVING_PIECE(y, i)) : zero_raw();
        }
    } else {
        FOR(i, V4) if (i < V4 - 1 || V4R == 0 || t.tid < V4R) r[i] = load_raw(MOVING_PIECE(y, i));
    }
#if PA_PAD
    FOR(i, V4) if ((t.tid + i * PA_NT) % (PA_D / 4) * 4 >= dim) r[i] = zero_raw();
#endif
}

INLINE void store_moving(float* Vs, const Raw4 (&r)[V4], const Lane& t) {
#if PA_PAIRS
    FOR(i, V4) if (i < V4 - 1 || V4R == 0 || t.tid < V4R) *(Raw4*)(Vs + (t.tid + i * PA_NT) * 2) = r[i];
#else
    FOR(i, V4) if (i < V4 - 1 || V4R == 0 || t.tid < V4R) *(float4*)(Vs + (t.tid + i * PA_NT) * 4) = to_float4(r[i]);
#endif
}
#endif

// P[col][row] with the row groups of four xor-ed with the column's group: spreads the float4 stores of eight
// neighbouring tx over all banks. SWIZZLE(a ^ b) = SWIZZLE(a) ^ SWIZZLE(b), and it stays below PA_TY, so that it can be
// applied to an address.
#define SWIZZLE(g) (((((g) & 3) << 1) | (((g) >> 2) & 1)) & (PA_TY - 1))

INLINE void store_probs(float* Ps, const float (&P)[RM][CN], int part, const Lane& t) {
#if PA_PAIRS == 2
    FOR(j, CN / PA_PSPLIT / 2) {
        const int jj = part * (CN / PA_PSPLIT / 2) + j;
        const int pair = (COL(2 * jj) - part * PCOLS) / 2;
        FOR(i, RM / 4) {
            float4 f;
            f.x = P[4 * i][jj]; f.y = P[4 * i + 1][jj]; f.z = P[4 * i + 2][jj]; f.w = P[4 * i + 3][jj];
            *(float4*)(Ps + pair * PA_BR + ((t.ty ^ SWIZZLE(t.tx)) + i * PA_TY) * 4) = f;
        }
    }
#else
    FOR(j, CN / PA_PSPLIT) {
        const int jj = part * (CN / PA_PSPLIT) + j;
        const int col = COL(jj) - part * PCOLS;
        FOR(i, RM / 4) {
            float4 f;
            f.x = P[4 * i][jj]; f.y = P[4 * i + 1][jj]; f.z = P[4 * i + 2][jj]; f.w = P[4 * i + 3][jj];
            *(float4*)(Ps + col * PA_BR + ((t.ty ^ SWIZZLE(t.tx)) + i * PA_TY) * 4) = f;
        }
    }
#endif
}

#if PA_PAIRS == 1
INLINE int sum_column(int j, const Lane& t);

// This thread's columns of a row of float16.
INLINE void load_columns(float (&w)[DN], const float* row, const Lane& t) {
    const u16* const at = (const u16*)row;
    FOR(j, DN4) {
        const uint2 four = *(const uint2*)(at + j * 4 * PA_TX + t.tx * 4);
        w[4 * j] = half_to_float((u16)(four.x & 0xffffu)); w[4 * j + 1] = half_to_float((u16)(four.x >> 16));
        w[4 * j + 2] = half_to_float((u16)(four.y & 0xffffu)); w[4 * j + 3] = half_to_float((u16)(four.y >> 16));
    }
    FOR(j, DNR) w[DN4 * 4 + j] = half_to_float(at[sum_column(DN4 * 4 + j, t)]);
}
#else
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
#endif

// Column of the sums that this thread's column j is.
INLINE int sum_column(int j, const Lane& t) {
    if (j < DN4 * 4) return (j / 4) * 4 * PA_TX + t.tx * 4 + j % 4;
    if (DNR == 3) return j < DN4 * 4 + 2 ? DN4 * 4 * PA_TX + t.tx * 2 + j % 4 : (DN4 * 4 + 2) * PA_TX + t.tx;
    return DN4 * 4 * PA_TX + t.tx * DNR + j % 4;
}

#if PA_AMD || PA_AHEAD
// What one step multiplies.
struct ColumnFactors {
    __align__(16) float a[RM];
    __align__(16) float w[DN];
};

INLINE void load_column_factors(ColumnFactors& f, const float* Ps, u32 pb, const float* vb, int kk, const Lane& t) {
    const char* const pr = (const char*)Ps + (pb ^ (u32)(SWIZZLE(kk * V_ROWS / 4) << 4));
    FOR(i, RM / 4) *(float4*)&f.a[4 * i] = *(const float4*)(pr + (kk * PA_BR + i * 4 * PA_TY) * 4);
    load_columns(f.w, vb + kk * V_ROWS * TO_WORDS(PA_D), t);
}

// O += the product of one staged chunk. pb: byte offset of this thread's rows of P in its first column.
INLINE void multiply_columns(float (&O)[RM][DN], const float* Ps, u32 pb, const float* vb, const Lane& t) {
#if PA_PAIRS == 2
#define ADD_PRODUCT MULTIPLY_ADD
#else
#define ADD_PRODUCT fmaf
#endif
    ColumnFactors factors[2];
    if (PA_AHEAD) load_column_factors(factors[0], Ps, pb, vb, 0, t);
    FOR(kk, PA_VC / V_ROWS) {
        ColumnFactors &f = factors[kk & 1], &next = factors[kk + 1 & 1];
        if (!PA_AHEAD) load_column_factors(f, Ps, pb, vb, kk, t);
        if (PA_AHEAD && kk + 1 < PA_VC / V_ROWS) load_column_factors(next, Ps, pb, vb, kk + 1, t);
        FOR(i, RM) FOR(j, DN) O[i][j] = ADD_PRODUCT(f.a[i], f.w[j], O[i][j]);
    }
    COMPLETE(O)
}
#endif

// y.at is left behind the tile's last chunk. rows: how many rows the moving tile has.
INLINE void product_cols(float (&O)[RM][DN], const float (&P)[RM][CN], Moving& y, int rows, int dim, float* sm,
                         const Lane& t) {
    float* const Ps = BEHIND_KEPT(sm);            // [PCOLS][BR], with PA_PAIRS 2 [PCOLS / 2][BR]
    float* const Vs = BEHIND_KEPT(sm) + P_WORDS;  // [COLUMN_BUFFERS][VC][D], with PA_PAIRS half as many words
    MovingPiece ry[V4];
    FOR(part, PA_PSPLIT) {
        LANE_ANEW(t)
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
            const float* vb = Vs + bf * PA_VC * TO_WORDS(PA_D);
            // Byte offset of this thread's rows in the chunk's first column, for the writer's tx.
#if PA_AMD || PA_AHEAD
            const u32 pb = (u32)c * (PA_VC / V_ROWS * PA_BR * 4) + (((u32)t.ty ^ SWIZZLE(c * (PA_VC / 4))) << 4);
            multiply_columns(O, Ps, pb, vb, t);
#else
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
#endif
            if (more) store_moving(Vs + (bf ^ 1) * PA_VC * TO_WORDS(PA_D), ry, t);
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
