// Tiles of Q, K and V on their way from global to shared memory, through registers.
#define PITCH PANEL_PITCH(CHUNKS)  // bytes of a row of K and V
#define KEY_BYTES (PA_BC * PITCH)
#if PA_WMMA  // V lies transposed, its columns as rows, and a thread has pieces of two keys: see wmma.cuh
#define PIECES ((PA_BC * CHUNKS + 2 * PA_NT - 1) / (2 * PA_NT) * 2)
#define VALUE_BYTES (PA_D * PANEL_PITCH(NT8))
#define TILE_BYTES (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES)
#else
#define PIECES ((PA_BC * CHUNKS + PA_NT - 1) / PA_NT)  // of K or V per thread
#define TILE_BYTES KEY_BYTES
#define fetch_values fetch_tile
#define store_values store_tile
#endif
#define Q_LEFT (CHUNKS - PA_QREG)                      // pieces of a row of Q that stay in shared memory
#define Q_ROUND (PA_QREG < 8 ? PA_QREG : 8)            // the others pass through it so many at a time
#define Q_ROUNDS ((PA_QREG + 7) / 8)
#define Q_STAGED (PA_BR * PANEL_PITCH(Q_ROUND))
#define Q_KEPT (PA_BR * PANEL_PITCH(Q_LEFT) * (Q_LEFT > 0))
#define MOVING (4 * TILE_BYTES)  // K and V have two places each
#define SMEM_MOVING (MOVING > Q_STAGED ? MOVING : Q_STAGED)
#define SMEM_BYTES (SMEM_MOVING + Q_KEPT)

#if PA_WMMA  // by a byte offset of 32 bits, which AMD's loads add to an address that all lanes have
#define ELEMENT(base, number) (const T*)((const char*)base + (number) * (u32)sizeof(T))
#else
#define ELEMENT(base, number) base + (number)
#endif

// This thread's pieces of a tile of K or V of which `rows` rows exist: behind the last comes the last again, whose
// scores are forbidden. Addresses are computed for every tile (OPAQUE): kept, they would take the registers of the sums.
INLINE void fetch_tile(int4 (&r)[PIECES], const T* base, u32 stride, int rows, int dim, const Lane& t) {
    u32 tid = t.tid;
    OPAQUE(tid);
    FOR(i, PIECES) {
        const u32 e = tid + i * PA_NT, row = e / CHUNKS, chunk = e % CHUNKS;
        const T* const from = ELEMENT(base, (u32)min_int((int)row, rows - 1) * stride + chunk * 8);
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
        if ((int)row < at.rows && (CHUNKS % n == 0 || first + (int)chunk < CHUNKS)) {  // n may not divide a row
            const T* const from = q + at.head(row) * p.qh + at.query(row) * p.qs + (first + chunk) * 8;
            piece = load_eight(from, p.dim - (first + (int)chunk) * 8);
        }
        *(int4*)(to + piece_at(n, row, chunk)) = piece;
    }
}
