// The forward kernel's products on Turing's tensor cores: right operands are read as blocks of 32 columns of one piece.
#define OWN_BITS (PA_MASK == 1)  // see KEY_OF_BIT; where numbers are added there are no registers for it

// Where a lane's rows of a panel of Q begin, and of K; V's lie TILE_BYTES behind.
INLINE u32 left_address(const char* panel, int n, const Lane& t) {
    return panel_row(panel, n, t.warp * PA_WR + t.lane % PA_WR, 0);
}
INLINE u32 right_address(const char* panel, const Lane& t) { return panel_row(panel, CHUNKS, t.lane, 0); }

INLINE void load_left(Left& a, u32 row, int n, int c) {
#if PA_MT == 2
    u32 r[4];
    load_blocks(r, panel_piece(row, n, c));
    a.x[0][0] = r[0]; a.x[0][1] = r[1]; a.x[PA_MT - 1][0] = r[2]; a.x[PA_MT - 1][1] = r[3];
#else
    load_blocks(a.x[0], panel_piece(row, n, c));
#endif
}

// S = Q K^T; the first `kept` pieces of Q are in registers, the others lie in shared memory.
template <int kept>
INLINE void product_rows(Scores& S, const Left (&Q)[kept], u32 q_row, u32 k_row) {
    OPAQUE(q_row);
    OPAQUE(k_row);
    FOR(c, CHUNKS) {
        Left a;
        if (c < kept) a = Q[c < kept ? c : 0];
        else load_left(a, q_row, CHUNKS - kept, c - kept);
        FOR(g, PA_BC / 32) {
            u32 b[4];
            load_blocks(b, panel_piece(k_row, CHUNKS, c) + g * 32 * PANEL_PITCH(CHUNKS));
            FOR(j, 4) FOR(m, PA_MT) {
                if (c == 0) multiply_first(S.x[m][g * 4 + j], a.x[m], b[j]);
                else multiply_add(S.x[m][g * 4 + j], a.x[m], b[j]);
            }
        }
    }
}

// O += P V
INLINE void product_cols(Sums& O, const Probs& P, u32 v_row) {
    OPAQUE(v_row);
    FOR(g, PA_BC / 32) FOR(c, (CHUNKS + 1) / 2) {
        u32 b[2][4];
        FOR(d, 2) if (2 * c + d < CHUNKS)
            load_blocks_turned(b[d], panel_piece(v_row, CHUNKS, 2 * c + d) + g * 32 * PANEL_PITCH(CHUNKS));
        FOR(j, 4) FOR(d, 2) FOR(m, PA_MT) if (2 * c + d < CHUNKS)
            multiply_add(O.x[m][2 * c + d < CHUNKS ? 2 * c + d : 0], P.x[m][g * 4 + j], b[d][j]);
    }
}
