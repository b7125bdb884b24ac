// Rows, columns and products of a wave on AMD's matrix instructions: see wave.cuh. S is computed transposed, K times
// Q^T, and so is the output: a lane has one query of each 16, of whose keys and sums the lane l ^ 16 has the other half;
// maxima, sums and factors of a row need one exchange, and P is the right operand of the next product as it lies (gfx12),
// or with what the other half of the wave has (gfx11). Rows of the left operand are taken in an order of their own
// (left_row), such that a lane's keys and columns lie together in fours.
#define ROWS PA_MT
#define ROW_LANES 16    // bits of the lane's number that differ between the lanes of one row
#define ROW_BITS 5      // up to the highest of them
#define PER_8 4         // columns of a lane in a tile of 8
#define COL_STEP(i) (i) // from the first of them
#define OWN_BITS 0      // see KEY_OF_BIT

#if NT8 % 2 || CHUNKS % 2
#error "unsupported tile geometry"
#endif

struct Scores { float x[PA_MT][NT8 / 2][8]; };
struct Probs { Factor x[PA_MT][NT8 / 2]; };
struct Sums { float x[PA_MT][CHUNKS / 2][8]; };
struct Left { Factor x[PA_MT]; };                   // two pieces of Q's rows, the first of even number; else nothing

INLINE float& score(Scores& s, int r, int n, int i) { return s.x[r][n / 2][n % 2 * 4 + i]; }
INLINE float score(const Scores& s, int r, int n, int i) { return s.x[r][n / 2][n % 2 * 4 + i]; }
INLINE float& sum_at(Sums& s, int r, int n, int i) { return s.x[r][n / 2][n % 2 * 4 + i]; }
INLINE float sum_at(const Sums& s, int r, int n, int i) { return s.x[r][n / 2][n % 2 * 4 + i]; }

INLINE int half_of(const Lane& t) { return t.lane >> 4; }
INLINE int row_in_warp(const Lane& t, int r) { return r * 16 + (t.lane & 15); }
INLINE int col_of(const Lane& t, int n, int i) { return n * 8 + half_of(t) * 4 + i; }
INLINE int sum_column(const Lane& t, int n, int i) { return n * 8 + half_of(t) * 4 + i; }

// A lane has row lane % 16 of the left operand. Of 16 keys, or columns of V: the one whose score, or sum, goes to such a
// place of C that each half of the wave gets every other four.
INLINE u32 left_row(u32 tid) {
    const u32 m = tid & 15;
    return PA_WMMA == 11 ? (m & 8) | (m & 1) << 2 | m >> 1 & 3 : (m & 4) << 1 | m >> 1 & 4 | m & 3;
}

// Panels are handed on by their address; what a lane reads of them is computed where it is read.
INLINE u32 left_address(const char* panel, int, const Lane&) { return shared_address(panel); }
INLINE u32 right_address(const char* panel, const Lane&) { return shared_address(panel); }
INLINE u32 this_thread() {
    u32 tid = threadIdx.x;
    OPAQUE(tid);
    return tid;
}

// The half of two neighbouring pieces that this lane has of a factor.
INLINE u32 own_piece(u32 tid) { return PA_WMMA == 12 ? tid & 16 : 0; }

// Pieces c and c + 1 of this lane's rows of Q.
INLINE void load_left(Left& a, u32 panel, int n, int c) {
    if (c % 2) return;
    const u32 tid = this_thread();
    const u32 at = panel + piece_at(n, tid / 32 * PA_WR + (tid & 15), 0) + own_piece(tid);
    FOR(m, PA_MT) a.x[m] = load_factor(at + piece_at(n, m * 16, c));
}

// S^T = K Q^T; the first `kept` pieces of Q are in registers, the others lie in shared memory.
template <int kept>
INLINE void product_rows(Scores& S, const Left (&Q)[kept > 0 ? kept : 1], u32 q_panel, u32 k_panel) {
    const u32 tid = this_thread();
    k_panel += piece_at(CHUNKS, left_row(tid), 0) + own_piece(tid);
    FOR(c, CHUNKS / 2) {
        Left q;
        if (2 * c < kept) q = Q[2 * c < kept ? 2 * c : 0];
        else load_left(q, q_panel, CHUNKS - kept, 2 * c - kept);
        FOR(n, NT8 / 2) {
            const Factor k = load_factor(k_panel + piece_at(CHUNKS, n * 16, 2 * c));
            FOR(m, PA_MT) {
                if (c == 0) multiply_first(S.x[m][n], k, q.x[m]);
                else multiply_add(S.x[m][n], k, q.x[m]);
            }
        }
    }
}

// Probabilities of tile n to operands: on gfx11 in the order of the keys, in both halves of the wave.
INLINE void to_operand(Probs& P, int n, const u32 (&pairs)[ROWS][PER_8 / 2], const Lane& t) {
    FOR(r, ROWS) {
#if PA_WMMA == 11
        FOR(x, 2) {
            const u32 other = float_to_bits(other_half(bits_to_float(pairs[r][x])));
            P.x[r][n / 2][n % 2 * 4 + x] = half_of(t) ? other : pairs[r][x];
            P.x[r][n / 2][n % 2 * 4 + 2 + x] = half_of(t) ? pairs[r][x] : other;
        }
#else
        FOR(x, 2) P.x[r][n / 2][n % 2 * 2 + x] = pairs[r][x];
#endif
    }
}

// A thread has pieces of two neighbouring keys of V, of which it stores eight pairs.
INLINE void fetch_values(int4 (&r)[PIECES], const T* base, u32 stride, int rows, int dim, const Lane&) {
    const u32 tid = this_thread();
    FOR(i, PIECES) {
        const u32 e = tid + i / 2 * PA_NT, key = e % (PA_BC / 2) * 2 + i % 2, chunk = e / (PA_BC / 2);
        const T* const from = ELEMENT(base, (u32)min_int((int)key, rows - 1) * stride + chunk * 8);
        if ((i / 2 + 1) * PA_NT <= PA_BC / 2 * CHUNKS || chunk < CHUNKS) r[i] = load_eight(from, dim - (int)chunk * 8);
    }
}

INLINE void store_values(char* to, const int4 (&r)[PIECES], const Lane&) {
    const u32 tid = this_thread();
    FOR(i, PIECES / 2) {
        const u32 e = tid + i * PA_NT, pair = e % (PA_BC / 2), chunk = e / (PA_BC / 2);
        if ((i + 1) * PA_NT > PA_BC / 2 * CHUNKS && chunk >= CHUNKS) continue;
        const int low[4] = {r[2 * i].x, r[2 * i].y, r[2 * i].z, r[2 * i].w};
        const int high[4] = {r[2 * i + 1].x, r[2 * i + 1].y, r[2 * i + 1].z, r[2 * i + 1].w};
        FOR(x, 4) {
            u32* const at = (u32*)(to + piece_at(NT8, chunk * 8 + 2 * x, 0) + pair * 4);
            at[0] = bytes_of(high[x], low[x], 0x05040100u);
            at[PANEL_PITCH(NT8) / 4] = bytes_of(high[x], low[x], 0x07060302u);
        }
    }
}

// O^T += V^T P^T
INLINE void product_cols(Sums& O, const Probs& P, u32 v_panel) {
    const u32 tid = this_thread();
    v_panel += piece_at(NT8, left_row(tid), 0) + (PA_WMMA == 12 ? (tid & 16) / 2 : 0);
    FOR(n, NT8 / 2) FOR(c, CHUNKS / 2) {
        const u32 at = v_panel + piece_at(NT8, c * 16, 2 * n);
#if PA_WMMA == 11
        const Factor v = load_factor(at);
#else
        // four keys of each eight, as the probabilities lie
        Factor v;
        const uint2 first = load_shared_half(at), second = load_shared_half(at + 16);
        v[0] = first.x;
        v[1] = first.y;
        v[2] = second.x;
        v[3] = second.y;
#endif
        FOR(m, PA_MT) multiply_add(O.x[m][c], v, P.x[m][n]);
    }
}
