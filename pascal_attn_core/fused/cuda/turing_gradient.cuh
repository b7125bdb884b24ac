// The gradient kernels' products on Turing's tensor cores: operands are read for two neighbouring pieces, right ones as
// blocks of 16 columns of both or of 32 of each.

// This lane's row of a panel of n pieces, for load_two: with one tile of rows one load brings both pieces.
INLINE u32 left_address(const char* panel, int n, const Lane& t) {
#if PA_MT == 2
    return panel_row(panel, n, t.warp * PA_WR + t.lane, 0);
#else
    return panel_row(panel, n, t.warp * PA_WR + t.lane % 16, t.lane / 16);
#endif
}

// Pieces c and c + 1 of a panel of n, both even.
INLINE void load_two(Left& a, Left& b, u32 row, int n, int c) {
    u32 r[4];
#if PA_MT == 2
    load_blocks(r, panel_piece(row, n, c));
    FOR(m, 2) FOR(x, 2) a.x[m < PA_MT ? m : 0][x] = r[2 * m + x];
    load_blocks(r, panel_piece(row, n, c) ^ 16u);
    FOR(m, 2) FOR(x, 2) b.x[m < PA_MT ? m : 0][x] = r[2 * m + x];
#else
    load_blocks(r, panel_piece(row, n, c));
    FOR(x, 2) a.x[0][x] = r[x];
    FOR(x, 2) b.x[0][x] = r[2 + x];
#endif
}

// This lane's row of a tile of Y.
INLINE u32 right_address(const char* tile, const Lane& t) {
    return panel_row(tile, CHUNKS, t.lane % PA_SC, t.lane / PA_SC);
}

struct Right { u32 x[2][NT8]; };  // [piece][8 columns]

template <bool turned>
INLINE void load_right(Right& b, u32 row, int c) {
    u32 r[4];
#if PA_SC == 16
    if (turned) load_blocks_turned(r, panel_piece(row, CHUNKS, c));
    else load_blocks(r, panel_piece(row, CHUNKS, c));
    FOR(d, 2) FOR(n, 2) b.x[d][n < NT8 ? n : 0] = r[2 * d + n];
#else
    FOR(d, 2) {
        const u32 from = d ? panel_piece(row, CHUNKS, c) ^ 16u : panel_piece(row, CHUNKS, c);
        if (turned) load_blocks_turned(r, from);
        else load_blocks(r, from);
        FOR(n, 4) b.x[d][n < NT8 ? n : 0] = r[n];
    }
#endif
}

// S = X Y^T; the first `kept` pieces of X are in registers, the others lie in shared memory.
template <int kept>
INLINE void product_rows(Scores& S, const Left (&X)[kept > 0 ? kept : 1], u32 x_row, u32 y_row) {
    OPAQUE(x_row);
    OPAQUE(y_row);
    FOR(c2, CHUNKS / 2) {
        const int c = 2 * c2;
        Left a[2];
        if (c < kept) FOR(d, 2) a[d] = X[c + d < kept ? c + d : 0];
        else load_two(a[0], a[1], x_row, CHUNKS - kept, c - kept);
        Right b;
        load_right<false>(b, y_row, c);
        FOR(d, 2) FOR(n, NT8) FOR(m, PA_MT) {
            if (c + d == 0) multiply_first(S.x[m][n], a[d].x[m], b.x[d][n]);
            else multiply_add(S.x[m][n], a[d].x[m], b.x[d][n]);
        }
    }
}

// O += P Y
INLINE void product_cols(Sums& O, const Probs& P, u32 y_row) {
    OPAQUE(y_row);
    FOR(c2, CHUNKS / 2) {
        Right b;
        load_right<true>(b, y_row, 2 * c2);
        FOR(n, NT8) FOR(d, 2) FOR(m, PA_MT) multiply_add(O.x[m][2 * c2 + d], P.x[m][n], b.x[d][n]);
    }
}
