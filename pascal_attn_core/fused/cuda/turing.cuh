// Rows and columns of a warp on Turing's tensor cores (m16n8k8). A lane has ROWS rows of S and of the sums: rows lane / 4,
// + 8, ... of its warp, of each of which four lanes share the columns. S, rounded to halves, is the left operand of the
// next product as it lies.
//
// Turing's shared memory gives 64 bytes a cycle. A product of 16 rows that reads its right operand (128 bytes) alone would
// use that up; with PA_MT 2 each block that is read serves two.
#define ROWS (2 * PA_MT)
#define ROW_LANES 3     // bits of the lane's number that differ between the lanes of one row
#define ROW_BITS 3      // up to the highest of them
#define PER_8 2         // columns of a lane in a tile of 8
#define COL_STEP(i) (i) // from the first of them

struct Scores { float x[PA_MT][NT8][4]; };
struct Probs { u32 x[PA_MT][NT8][2]; };
struct Sums { float x[PA_MT][CHUNKS][4]; };

INLINE float& score(Scores& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }
INLINE float score(const Scores& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }
INLINE float& sum_at(Sums& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }
INLINE float sum_at(const Sums& s, int r, int n, int i) { return s.x[r / 2][n][r % 2 * 2 + i]; }

// Row r of this lane within its warp; column i of its columns in tile n of 8 columns, or in fragment n of 8 sums.
INLINE int row_in_warp(const Lane& t, int r) { return r * 8 + t.lane / 4; }
INLINE int col_of(const Lane& t, int n, int i) { return n * 8 + t.lane % 4 * 2 + i; }
INLINE int sum_column(const Lane& t, int n, int i) { return n * 8 + t.lane % 4 * 2 + i; }

// Probabilities of tile n to operands.
INLINE void to_operand(Probs& P, int n, const u32 (&pairs)[ROWS][PER_8 / 2], const Lane&) {
    FOR(r, ROWS) P.x[r / 2][n][r % 2] = pairs[r][0];
}

struct Left { u32 x[PA_MT][2]; };  // left operands of one piece
