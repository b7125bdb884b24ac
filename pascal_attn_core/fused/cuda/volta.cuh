// Rows, columns and products of a warp on Volta's tensor cores (m8n8k4; there is no ldmatrix). An instruction makes four
// products of 8 x 8, one for each quad pair. Here two quad pairs have 8 rows each, and two the two sides of 16 columns: one
// load of 16 bytes a lane brings right operands for 16 columns, each of which two quad pairs read, and with PA_MT 2 it
// serves two tiles of rows. Before the next product the two sides exchange their probabilities: three shuffles for 8 keys.
#define ROWS (2 * PA_MT)
#define ROW_LANES 6     // bits of the lane's number that differ between the lanes of one row
#define ROW_BITS 3      // up to the highest of them
#define PER_8 2         // columns of a lane in a tile of 8
#define COL_STEP(i) (i) // from the first of them
#define OWN_BITS 0      // see KEY_OF_BIT: there are no registers for it

#if NT8 % 2 || CHUNKS % 2
#error "unsupported tile geometry"
#endif

struct Scores { float x[PA_MT][NT8 / 2][8]; };
struct Probs { u32 x[PA_MT][NT8][2]; };
struct Sums { float x[PA_MT][CHUNKS / 2][8]; };
struct Left { int4 x[PA_MT]; };  // left operands of one piece

#define C_INDEX(r, n, i) ((r) % 2 * 2 + (n) % 2 * 4 + (i))
INLINE float& score(Scores& s, int r, int n, int i) { return s.x[r / 2][n / 2][C_INDEX(r, n, i)]; }
INLINE float score(const Scores& s, int r, int n, int i) { return s.x[r / 2][n / 2][C_INDEX(r, n, i)]; }
INLINE float& sum_at(Sums& s, int r, int n, int i) { return s.x[r / 2][n / 2][C_INDEX(r, n, i)]; }
INLINE float sum_at(const Sums& s, int r, int n, int i) { return s.x[r / 2][n / 2][C_INDEX(r, n, i)]; }

INLINE int side_of(const Lane& t) { return t.lane / 4 % 2; }
// A quad pair is lanes 4 q ... 4 q + 3 and 16 more. Its row of A, less 8 times the tile of 8 rows.
INLINE int row_in_pair(const Lane& t) { return t.lane % 4 + t.lane / 16 * 4; }
INLINE int first_row(const Lane& t) { return t.lane / 8 % 2 * 8; }

// Row r of this lane's C within its warp; column i of its columns in tile n of 8.
INLINE int row_in_warp(const Lane& t, int r) {
    return r / 2 * 16 + first_row(t) + (t.lane & 1) + t.lane / 16 * 4 + r % 2 * 2;
}
INLINE int col_of(const Lane& t, int n, int i) { return n * 8 + side_of(t) * 4 + (t.lane & 2) + i; }

// Of four neighbouring pieces of the sums each side has two, of which the upper and the lower half of a quad pair read one
// each: fragment 2 f has the first four columns of both, fragment 2 f + 1 the last four. Which two: such that in shared
// memory no two of the eight rows and pieces that are read at once lie in the same banks. Two pieces that are left over
// are one for each side.
#define FOURS (CHUNKS / 4)
INLINE int piece_of_four(const Lane& t, int upper) {
    return CHUNKS % 4 == 2 ? 2 * side_of(t) + upper : 2 * upper + side_of(t);
}
INLINE int sum_column(const Lane& t, int n, int i) {
    const int c = (t.lane & 2) + i, fragment = n / 2;
    if (fragment >= 2 * FOURS) return (4 * FOURS + side_of(t)) * 8 + n % 2 * 4 + c;
    return (fragment / 2 * 4 + piece_of_four(t, n % 2)) * 8 + fragment % 2 * 4 + c;
}

// Of the keys of tile n a lane keeps those of its side, of one row.
INLINE void to_operand(Probs& P, int n, const u32 (&pairs)[ROWS][PER_8 / 2], const Lane& t) {
    const bool lower = t.lane & 2;  // this lane's row of A is the second of its two rows of C
    FOR(m, PA_MT) {
        const u32 mine = lower ? pairs[2 * m + 1][0] : pairs[2 * m][0];
        const u32 other = __shfl_xor_sync(FULL_WARP, lower ? pairs[2 * m][0] : pairs[2 * m + 1][0], 2);
        P.x[m][n][0] = lower ? other : mine;
        P.x[m][n][1] = lower ? mine : other;
    }
}

INLINE int4 load_shared(u32 at) {
#ifdef PA_CPU_EMU
    return emu_load_16(at);
#else
    int4 r;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at));
    return r;
#endif
}
INLINE uint2 load_shared_half(u32 at) {
#ifdef PA_CPU_EMU
    return emu_load_8(at);
#else
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(at));
    return r;
#endif
}

// Panels are handed on by their address; what a lane reads of them is computed where it is read: kept, it would take the
// registers of the sums.
INLINE u32 left_address(const char* panel, int, const Lane&) { return shared_address(panel); }
INLINE u32 right_address(const char* panel, const Lane&) { return shared_address(panel); }
INLINE Lane this_lane() {
    int tid = threadIdx.x;
    OPAQUE(tid);
    return lane_of(tid);
}

INLINE u32 left_row(u32 panel, int n, const Lane& t) {
    return panel + piece_at(n, t.warp * PA_WR + first_row(t) + row_in_pair(t), 0);
}
INLINE void load_left_row(Left& a, u32 row, int n, int c) {
    FOR(m, PA_MT) a.x[m] = load_shared(panel_piece(row, n, c) + m * 16 * PANEL_PITCH(n));
}
INLINE void load_left(Left& a, u32 panel, int n, int c) { load_left_row(a, left_row(panel, n, this_lane()), n, c); }
INLINE void load_two(Left& a, Left& b, u32 panel, int n, int c) {
    load_left(a, panel, n, c);
    load_left(b, panel, n, c + 1);
}

// S = X Y^T; the first `kept` pieces of X are in registers, the others lie in shared memory.
template <int kept>
INLINE void product_rows(Scores& S, const Left (&X)[kept > 0 ? kept : 1], u32 x_panel, u32 y_panel) {
    const Lane t = this_lane();
    const u32 x_row = kept < CHUNKS ? left_row(x_panel, kept < CHUNKS ? CHUNKS - kept : 1, t) : 0;
    const u32 y_row = y_panel + piece_at(CHUNKS, t.lane / 16 * 8 + t.lane % 8, 0);
    FOR(m, PA_MT) FOR(n, NT8 / 2) FOR(i, 8) S.x[m][n][i] = 0.f;
    FOR(c, CHUNKS) {
        Left a;
        if (c < kept) a = X[c < kept ? c : 0];
        else load_left_row(a, x_row, CHUNKS - kept, c - kept);
        FOR(n, NT8 / 2) {
            const int4 b = load_shared(panel_piece(y_row, CHUNKS, c) + n * 16 * PANEL_PITCH(CHUNKS));
            FOR(m, PA_MT) {
                multiply_add_884(S.x[m][n], a.x[m].x, a.x[m].y, b.x, b.y);
                multiply_add_884(S.x[m][n], a.x[m].z, a.x[m].w, b.z, b.w);
            }
        }
    }
}

// O += P Y: first the keys of each quad pair's own side, then those of the other one.
INLINE void product_cols(Sums& O, const Probs& P, u32 y_panel) {
    const Lane t = this_lane();
    const int upper = t.lane / 16;
    u32 row[2], left_over[2];
    FOR(s, 2) {
        const int r = (side_of(t) ^ s) * 4 + t.lane % 4;
        row[s] = y_panel + piece_at(CHUNKS, r, piece_of_four(t, upper));
        left_over[s] = y_panel + piece_at(CHUNKS, r, 4 * FOURS + side_of(t)) + upper * 8;
    }
    FOR(n, NT8) FOR(s, 2) {
        u32 a[PA_MT][2];
        FOR(m, PA_MT) FOR(x, 2) a[m][x] = s ? __shfl_xor_sync(FULL_WARP, P.x[m][n][x], 4) : P.x[m][n][x];
        FOR(f, FOURS) {
            const int4 b = load_shared(panel_piece(row[s], CHUNKS, 4 * f) + n * 8 * PANEL_PITCH(CHUNKS));
            FOR(m, PA_MT) {
                multiply_add_884_rows(O.x[m][2 * f], a[m][0], a[m][1], b.x, b.y);
                multiply_add_884_rows(O.x[m][2 * f + 1], a[m][0], a[m][1], b.z, b.w);
            }
        }
        if (CHUNKS % 4) {
            const uint2 b = load_shared_half(left_over[s] + n * 8 * PANEL_PITCH(CHUNKS));
            FOR(m, PA_MT) multiply_add_884_rows(O.x[m][CHUNKS / 2 - 1], a[m][0], a[m][1], b.x, b.y);
        }
    }
}
