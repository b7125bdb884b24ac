// Rows, columns and products of a warp on Turing's tensor cores (m16n8k8). A lane has ROWS rows of S and of the sums:
// rows lane / 4, + 8, ... of its warp, of each of which four lanes share the columns. S, rounded to halves, is the left
// operand of P V as it lies.
//
// Turing's shared memory gives 64 bytes a cycle. A product of 16 rows that reads its block of K or V (128 bytes) alone
// would use that up; with PA_MT 2 each block serves two.
#define ROWS (2 * PA_MT)
#define ROW_LANES 3  // bits of the lane's number that differ between the lanes of one row
#define PER_8 2      // columns of a lane in a tile of 8
#define KEY_STEP(i) (i)  // from the first of them

struct Queries { u32 x[PA_QREG][PA_MT][2]; };
struct Scores { float x[PA_MT][NT8][4]; };
struct Probs { u32 x[PA_MT][NT8][2]; };
struct Sums { float x[PA_MT][CHUNKS][4]; };

INLINE float& score(Scores& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }
INLINE float score(const Scores& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }
INLINE float& sum_at(Sums& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }

// Row r of this lane within its warp; column i of its columns in tile n of 8 keys, or in fragment n of 8 sums.
INLINE int row_in_warp(const Lane& t, int r) { return r * 8 + t.lane / 4; }
INLINE int key_of(const Lane& t, int n, int i) { return n * 8 + t.lane % 4 * 2 + i; }
INLINE int sum_column(const Lane& t, int n, int i) { return n * 8 + t.lane % 4 * 2 + i; }

// Probabilities of tile n to operands of P V.
INLINE void to_operand(Probs& P, int n, const u32 (&pairs)[ROWS][PER_8 / 2], const Lane&) {
    FOR(r, ROWS) P.x[r / 2][n][r % 2] = pairs[r][0];
}

// The shared memory address of piece 0 of a row of a panel of n pieces per row, and of its piece c (less than n).
INLINE u32 panel_row(const char* panel, int n, int row) { return shared_address(panel) + piece_at(n, row, 0); }
INLINE u32 panel_piece(u32 row, int n, int c) {
    if (n == 4) return row ^ (u32)(c * 16);
    return n % 8 == 0 ? (row ^ (u32)((c & 7) * 16)) + (c & ~7) * 16 : row + c * 16;
}

// Where a lane's rows of a panel of Q begin, and of K; V's lie TILE_BYTES behind.
INLINE u32 query_address(const char* panel, int n, const Lane& t) {
    return panel_row(panel, n, t.warp * PA_WR + t.lane % PA_WR);
}
INLINE u32 tile_address(const char* panel, const Lane& t) { return panel_row(panel, CHUNKS, t.lane); }

INLINE void load_query(u32 (&a)[PA_MT][2], u32 row, int n, int c) {
#if PA_MT == 2
    u32 r[4];
    load_blocks(r, panel_piece(row, n, c));
    a[0][0] = r[0]; a[0][1] = r[1]; a[PA_MT - 1][0] = r[2]; a[PA_MT - 1][1] = r[3];
#else
    load_blocks(a[0], panel_piece(row, n, c));
#endif
}

// Column c of a panel of n columns of Q to its registers.
INLINE void keep_query(Queries& Q, int to, u32 row, int n, int c) { load_query(Q.x[to], row, n, c); }

// S = Q K^T
INLINE void product_scores(Scores& S, const Queries& Q, u32 q_row, u32 k_row) {
    OPAQUE(q_row);
    OPAQUE(k_row);
    FOR(c, CHUNKS) {
        u32 a[PA_MT][2];
        if (c < PA_QREG) {
            FOR(m, PA_MT) FOR(x, 2) a[m][x] = Q.x[c < PA_QREG ? c : 0][m][x];
        } else {
            load_query(a, q_row, Q_LEFT, c - PA_QREG);
        }
        FOR(g, PA_BC / 32) {
            u32 b[4];
            load_blocks(b, panel_piece(k_row, CHUNKS, c) + g * 32 * PITCH);
            FOR(j, 4) FOR(m, PA_MT) {
                if (c == 0) multiply_first(S.x[m][g * 4 + j], a[m], b[j]);
                else multiply_add(S.x[m][g * 4 + j], a[m], b[j]);
            }
        }
    }
}

// O += P V
INLINE void product_values(Sums& O, const Probs& P, u32 v_row) {
    OPAQUE(v_row);
    FOR(g, PA_BC / 32) FOR(c, (CHUNKS + 1) / 2) {
        u32 b[2][4];
        FOR(d, 2) if (2 * c + d < CHUNKS)
            load_blocks_turned(b[d], panel_piece(v_row, CHUNKS, 2 * c + d) + g * 32 * PITCH);
        FOR(j, 4) FOR(d, 2) FOR(m, PA_MT) if (2 * c + d < CHUNKS)
            multiply_add(O.x[m][2 * c + d < CHUNKS ? 2 * c + d : 0], P.x[m][g * 4 + j], b[d][j]);
    }
}
