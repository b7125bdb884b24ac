// Rows, columns and products of a warp on Volta's tensor cores (m8n8k4; there is no ldmatrix). A quad pair owns 8 query
// rows, a warp 32; all quad pairs read the same K and V, which shared memory hands out once. A lane of C holds two rows,
// of A one: lanes whose numbers differ by 2 exchange half of P by two shuffles per 8 keys.
#define ROWS 2
#define ROW_LANES 2  // bits of the lane's number that differ between the lanes of one row
#define PER_8 4      // columns of a lane in a tile of 8
#define KEY_STEP(i) ((i) / 2 * 4 + (i) % 2)  // from the first of them

#if PA_MT != 2 || PA_D % 16
#error "unsupported tile geometry"
#endif

struct Queries { int4 x[PA_QREG]; };
struct Scores { float x[NT8][8]; };
struct Probs { u32 x[NT8][4]; };
struct Sums { float x[CHUNKS][8]; };

#define C_INDEX(r, i) ((r) * 2 + (i) / 2 * 4 + (i) % 2)  // the float of C of row r, column i
INLINE float& score(Scores& s, int r, int n, int i) { return s.x[n][C_INDEX(r, i)]; }
INLINE float score(const Scores& s, int r, int n, int i) { return s.x[n][C_INDEX(r, i)]; }
INLINE float& sum_at(Sums& s, int r, int n, int i) { return s.x[n][C_INDEX(r, i)]; }

INLINE int pair_of(const Lane& t) { return t.lane % 16 / 4; }
INLINE int lane_in_pair(const Lane& t) { return t.lane % 4 + t.lane / 16 * 4; }  // its row of A, and column of B
// Row r of this lane's C within its warp; column i of its columns in tile n of 8 keys.
INLINE int row_in_warp(const Lane& t, int r) { return pair_of(t) * 8 + (t.lane & 1) + t.lane / 16 * 4 + 2 * r; }
INLINE int key_of(const Lane& t, int n, int i) { return n * 8 + (t.lane & 2) + i / 2 * 4 + i % 2; }
// In fragment n of 8 sums: a lane reads 8 columns of V at once, the first four for an even fragment, the others for the
// odd one, so that 16 neighbouring columns are two fragments.
INLINE int sum_column(const Lane& t, int n, int i) {
    const int c = (t.lane & 2) + i / 2 * 4 + i % 2;
    return n / 2 * 16 + c / 4 * 8 + n % 2 * 4 + c % 4;
}

INLINE void to_operand(Probs& P, int n, const u32 (&pairs)[ROWS][PER_8 / 2], const Lane& t) {
    const bool lower = t.lane & 2;  // this lane's row of A is row 1 of its two rows of C
    FOR(x, 2) {
        const u32 mine = lower ? pairs[1][x] : pairs[0][x];
        const u32 other = __shfl_xor_sync(FULL_WARP, lower ? pairs[0][x] : pairs[1][x], 2);
        P.x[n][2 * x] = lower ? other : mine;
        P.x[n][2 * x + 1] = lower ? mine : other;
    }
}

INLINE int4 piece_of(u32 panel, int n, int row, int chunk) {
    const u32 at = panel + piece_at(n, row, chunk);
#ifdef PA_CPU_EMU
    return *(const int4*)(__start_shared_memory + at);
#else
    int4 r;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at));
    return r;
#endif
}

INLINE u32 query_address(const char* panel, int, const Lane&) { return shared_address(panel); }
INLINE u32 tile_address(const char* panel, const Lane&) { return shared_address(panel); }

INLINE int4 load_query(u32 panel, int n, int c, const Lane& t) {
    return piece_of(panel, n, t.warp * PA_WR + pair_of(t) * 8 + lane_in_pair(t), c);
}

INLINE void keep_query(Queries& Q, int to, u32 panel, int n, int c) {
    Q.x[to] = load_query(panel, n, c, lane_of(threadIdx.x));
}

// S = Q K^T
INLINE void product_scores(Scores& S, const Queries& Q, u32 q_panel, u32 k_panel) {
    int tid = threadIdx.x;
    OPAQUE(tid);  // addresses are computed here: kept, they would take the registers of the sums
    const Lane t = lane_of(tid);
    FOR(n, NT8) FOR(i, 8) S.x[n][i] = 0.f;
    FOR(c, CHUNKS) {
        const int4 a = c < PA_QREG ? Q.x[c < PA_QREG ? c : 0] : load_query(q_panel, Q_LEFT, c - PA_QREG, t);
        FOR(n, NT8) {
            const int4 b = piece_of(k_panel, CHUNKS, n * 8 + lane_in_pair(t), c);
            multiply_add_884(S.x[n], a.x, a.y, b.x, b.y);
            multiply_add_884(S.x[n], a.z, a.w, b.z, b.w);
        }
    }
}

// O += P V
INLINE void product_values(Sums& O, const Probs& P, u32 v_panel) {
    int tid = threadIdx.x;
    OPAQUE(tid);
    const Lane t = lane_of(tid);
    FOR(n, NT8) FOR(s, 2) FOR(f, CHUNKS / 2) {
        const int4 b = piece_of(v_panel, CHUNKS, n * 8 + s * 4 + t.lane % 4, f * 2 + t.lane / 16);
        multiply_add_884_rows(O.x[2 * f], P.x[n][2 * s], P.x[n][2 * s + 1], b.x, b.y);
        multiply_add_884_rows(O.x[2 * f + 1], P.x[n][2 * s], P.x[n][2 * s + 1], b.z, b.w);
    }
}
