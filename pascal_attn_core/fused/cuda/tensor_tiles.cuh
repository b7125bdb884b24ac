// Tiles of Q, K and V on their way from global to shared memory, through registers.
//
// Eight neighbouring rows of one column of 16-byte pieces must lie in eight different bank groups. A panel of n pieces
// per row: xor-ed with the row where rows are whole multiples of 128 bytes; two rows in 128 bytes, and xor-ed, where they
// are half of it; an odd number of pieces per row elsewhere.
#define PANEL_PITCH(n) (((n) % 8 == 0 || (n) == 4 ? (n) : (n) | 1) * 16)
#define PITCH PANEL_PITCH(CHUNKS)  // bytes of a row of K and V
#define TILE_BYTES (PA_BC * PITCH)
#define PIECES ((PA_BC * CHUNKS + PA_NT - 1) / PA_NT)  // of K or V per thread
#define Q_LEFT (CHUNKS - PA_QREG)                      // pieces of a row of Q that stay in shared memory
#define Q_ROUND (PA_QREG < 8 ? PA_QREG : 8)            // the others pass through it so many at a time
#define Q_ROUNDS ((PA_QREG + 7) / 8)
#define Q_STAGED (PA_BR * PANEL_PITCH(Q_ROUND))
#define Q_KEPT (PA_BR * PANEL_PITCH(Q_LEFT) * (Q_LEFT > 0))
#define MOVING (4 * TILE_BYTES)  // K and V have two places each
#define SMEM_MOVING (MOVING > Q_STAGED ? MOVING : Q_STAGED)
#define SMEM_BYTES (SMEM_MOVING + Q_KEPT)

// Byte offset of a piece in a panel of n pieces per row.
INLINE u32 piece_at(int n, u32 row, u32 chunk) {
    if (n == 4) return (row >> 1) * 128 + (((row & 1) * 4 | chunk) ^ (row >> 1 & 3)) * 16;
    return row * PANEL_PITCH(n) + (n % 8 == 0 ? chunk ^ (row & 7) : chunk) * 16;
}

INLINE int4 zero_piece() {
    int4 z;
    z.x = z.y = z.z = z.w = 0;
    return z;
}

// Eight elements of a row, of which the first `left` exist: a multiple of 4, or less than 1.
INLINE int4 load_eight(const T* from, int left) {
#if PA_PAD
    int4 r = zero_piece();
    if (left > 0) {
        const uint2 half = *(const uint2*)from;
        r.x = half.x;
        r.y = half.y;
    }
    if (left > 4) {
        const uint2 half = *(const uint2*)(from + 4);
        r.z = half.x;
        r.w = half.y;
    }
    return r;
#else
    return load_piece(from);
#endif
}

// This thread's pieces of a tile of K or V of which `rows` rows exist: behind the last comes the last again, whose
// scores are forbidden. Addresses are computed for every tile (OPAQUE): kept, they would take the registers of the sums.
INLINE void fetch_tile(int4 (&r)[PIECES], const T* base, u32 stride, int rows, int dim, const Lane& t) {
    u32 tid = t.tid;
    OPAQUE(tid);
    FOR(i, PIECES) {
        const u32 e = tid + i * PA_NT, row = e / CHUNKS, chunk = e % CHUNKS;
        const T* const from = base + ((u32)min_int((int)row, rows - 1) * stride + chunk * 8);
        if ((i + 1) * PA_NT <= PA_BC * CHUNKS || row < PA_BC) r[i] = load_eight(from, dim - (int)chunk * 8);
    }
}

INLINE void store_tile(char* to, const int4 (&r)[PIECES], const Lane& t) {
    u32 tid = t.tid;
    OPAQUE(tid);
    FOR(i, PIECES) {
        const u32 e = tid + i * PA_NT, row = e / CHUNKS, chunk = e % CHUNKS;
        if ((i + 1) * PA_NT <= PA_BC * CHUNKS || row < PA_BC) *(int4*)(to + piece_at(CHUNKS, row, chunk)) = r[i];
    }
}

// Pieces first ... first + n - 1 of every row of Q to a panel of their own; rows that do not exist are zero.
template <int n>
INLINE void stage_query(char* to, const Forward& p, const Place& at, int first, const Lane& t) {
    const T* const q = p.q + first_token_at(p.cu_q, at.b, p.qb, p.qs);
#pragma unroll 1
    for (u32 e = t.tid; e < PA_BR * n; e += PA_NT) {
        const u32 row = e / n, chunk = e % n;
        int4 piece = zero_piece();
        if ((int)row < at.rows) {
            const T* const from = q + at.head(row) * p.qh + at.query(row) * p.qs + (first + chunk) * 8;
            piece = load_eight(from, p.dim - (first + (int)chunk) * 8);
        }
        *(int4*)(to + piece_at(n, row, chunk)) = piece;
    }
}
