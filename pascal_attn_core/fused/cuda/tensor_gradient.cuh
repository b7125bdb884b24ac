// Both gradient kernels on Turing's tensor cores (m16n8k8) are one: a tile of rows that stay, in two tensors X and XX,
// meets tiles of columns that move, in two tensors Y and YY.
//   PA_KEYS 0  rows are queries: X = Q, XX = dO; columns are keys: Y = K, YY = V
//   PA_KEYS 1  rows are keys: X = K, XX = V; columns are the queries of all heads of a group: Y = Q, YY = dO
//   S = X Y^T    P = exp(S - lse)    dP = XX YY^T    dS = P * (dP - delta)
//   the rows' gradients: dX += dS Y, and with PA_KEYS 1 dXX += P YY
// A warp owns PA_MT * 16 rows for all columns, so that P and dS, rounded to halves, are the left operands of the second
// products as they lie: neither passes through shared memory. X and XX are left operands of the first products and stay
// in registers as far as they fit. Every gradient is summed by one warp in a fixed order.
// Compile-time parameters, besides those above:
//   PA_D      head_dim of the tiles, a multiple of 16; PA_PAD 1: the tensors' own may be smaller, a multiple of 4
//   PA_WARPS  warps of a block; PA_MT: tiles of 16 rows per warp
//   PA_BC     columns of a tile in shared memory, worked on PA_SC (16, 32) at a time
//   PA_XREG, PA_XXREG  16-byte columns of X and of XX that stay in registers, even numbers; the others are read from
//             shared memory for every PA_SC columns
//   PA_PACKED, PA_DYNAMIC, PA_MINB  as in the forward kernel
#define PA_NT (PA_WARPS * 32)
#define PA_WR (PA_MT * 16)
#define PA_BR (PA_WARPS * PA_WR)
#define CHUNKS (PA_D / 8)  // 16-byte pieces of a row
#define NT8 (PA_SC / 8)    // tiles of 8 columns

#if PA_D % 16 || (PA_SC != 16 && PA_SC != 32) || PA_BC % PA_SC || PA_XREG % 2 || PA_XXREG % 2
#error "unsupported tile geometry"
#endif
#if PA_XREG > CHUNKS || PA_XXREG > CHUNKS || 3 * PA_BC > PA_NT || (!PA_KEYS && PA_BC % 32)
#error "unsupported tile geometry"
#endif

struct TensorBackward : Backward {
    u32* mask_bits; u8* flags;  // of the mask, see tensor_gradient_masks.cuh; null: there is none
    i64 bits_b, bits_h, bits_q;     // of mask_bits, in words
    i64 flags_b, flags_h, flags_q;  // of flags, per tile of queries
    int mask_heads, mask_rows;      // of a mask, without those that repeat
};

typedef TensorBackward Params;

struct Lane {
    int tid, warp, lane;
};

INLINE Lane lane_of(int tid) {
    Lane t;
    t.tid = tid;
    t.warp = tid / 32;
    t.lane = tid % 32;
    return t;
}

INLINE Lane anew(Lane t) {
    OPAQUE(t.tid);
    return lane_of(t.tid);
}

// Not read from memory but of packed sequences.
INLINE Sequence sequence_of_call(const Params& p, int b) {
#if PA_PACKED
    return sequence_of(p, b);
#else
    Sequence s;
    s.lq = p.lq;
    s.lk = p.lk;
    const int corner = p.lower_right ? s.lk - s.lq : 0;
    s.band.low = p.low + corner;
    s.band.high = p.high + corner;
    return s;
#endif
}

// Where a block works: its rows, and the columns that any of them meets.
struct Place {
    int b, head, row0, rows;  // head: of the rows
    int begin, end;           // columns
    int length;               // of the columns' sequence
    int low, high;            // row i meets columns i + low ... i + high
    int first_q, first_k;     // PA_PACKED: the first tokens
};

INLINE Place find_place(const Params& p, int z) {
    Place at;
    at.b = z + p.first_batch;
    const Sequence s = sequence_of_call(p, at.b);
    at.head = blockIdx.y;
#if PA_PACKED
    at.first_q = p.cu_q[at.b];
    at.first_k = p.cu_k[at.b];
#else
    at.first_q = at.first_k = 0;
#endif
#if PA_KEYS
    at.row0 = ((int)blockIdx.x + p.first_tile) * PA_BR;
    at.rows = s.lk - at.row0;
    at.length = s.lq;
    at.low = -s.band.high;
    at.high = -s.band.low;
#else
    // Under a causal rule the last tiles have the most keys: they go first.
    const int tile = s.band.high < s.lk ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x;
    at.row0 = (tile + p.first_tile) * PA_BR;
    at.rows = s.lq - at.row0;
    at.length = s.lk;
    at.low = s.band.low;
    at.high = s.band.high;
#endif
    const int last = at.row0 + min_int(PA_BR, at.rows) - 1;
    at.begin = max_int(0, at.row0 + at.low);
#if PA_MASK
    at.begin -= at.begin % PA_BC;  // as the mask's tiles lie
#endif
    at.end = min_int(at.length, last + at.high + 1);
    return at;
}

// The place as the loop over tiles sees it. What is computed from the launch alone lies in Turing's uniform registers; what
// memory says, or depends on a mask, would take registers of the sums: it is read from shared memory where it is needed.
#define KEPT (PA_PACKED || PA_MASK)
#if KEPT
__shared__ Place kept_place;
#endif
struct Where {
#if KEPT
#define FIELD(name) __device__ __forceinline__ int name() const { return *(volatile const int*)&kept_place.name; }
#else
    Place at;
#define FIELD(name) __device__ __forceinline__ int name() const { return at.name; }
#endif
    FIELD(b) FIELD(head) FIELD(row0) FIELD(rows) FIELD(begin) FIELD(end) FIELD(length) FIELD(low) FIELD(high)
    FIELD(first_q) FIELD(first_k)
    // Where the queries, and the keys, of the sequence begin, in elements.
    __device__ __forceinline__ i64 queries(i64 batch, i64 token) const { return PA_PACKED ? first_q() * token : b() * batch; }
    __device__ __forceinline__ i64 keys(i64 batch, i64 token) const { return PA_PACKED ? first_k() * token : b() * batch; }
};

// ---- shared memory ---------------------------------------------------------------------------------------------------

#define PANEL_PITCH(n) (((n) % 8 == 0 || (n) == 4 ? (n) : (n) | 1) * 16)
#define TILE_BYTES (PA_BC * PANEL_PITCH(CHUNKS))
#define MOVING_BYTES (2 * TILE_BYTES)  // Y and YY of one tile; there are two places
#define X_LEFT (CHUNKS - PA_XREG)      // pieces of a row of X that stay in shared memory
#define XX_LEFT (CHUNKS - PA_XXREG)
#define X_BYTES (X_LEFT > 0 ? PA_BR * PANEL_PITCH(X_LEFT) : 0)
#define XX_BYTES (XX_LEFT > 0 ? PA_BR * PANEL_PITCH(XX_LEFT) : 0)
#define ROUND(pieces) ((pieces) < 8 ? (pieces) : 8)  // pieces that pass through shared memory at a time, to registers
#define STAGED_BYTES(pieces) (PA_BR * PANEL_PITCH(ROUND(pieces)))
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
#define FREE_BYTES MAX2(2 * MOVING_BYTES, MAX2(STAGED_BYTES(PA_XREG), STAGED_BYTES(PA_XXREG)))
#define SMEM_BYTES (FREE_BYTES + X_BYTES + XX_BYTES)
#define PIECES ((PA_BC * CHUNKS + PA_NT - 1) / PA_NT)  // of a tile of Y per thread

// Byte offset of a piece in a panel of n pieces per row.
INLINE u32 piece_at(int n, u32 row, u32 chunk) {
    if (n == 4) return (row >> 1) * 128 + (((row & 1) * 4 | chunk) ^ (row >> 1 & 3)) * 16;
    return row * PANEL_PITCH(n) + (n % 8 == 0 ? chunk ^ (row & 7) : chunk) * 16;
}

INLINE u32 panel_row(const char* panel, int n, int row, int chunk) {
    return shared_address(panel) + piece_at(n, row, chunk);
}
// From the address of a row's piece 0 or 1 to that of piece c or c + 1, for even c.
INLINE u32 panel_piece(u32 row, int n, int c) {
    if (n == 4) return row ^ (u32)(c * 16);
    return n % 8 == 0 ? (row ^ (u32)((c & 7) * 16)) + (c & ~7) * 16 : row + c * 16;
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

// A tile of Y and one of YY come in as 2 PIECES pieces of this thread, some in each of SLOTS stretches of the work on the
// tile before, so that few registers hold them.
#define SLOTS (2 * PA_BC / PA_SC)
#define SLOT_OF(piece) ((piece) * SLOTS / (2 * PIECES))
#define PER_SLOT ((2 * PIECES + SLOTS - 1) / SLOTS)

// Where a tile begins of which `rows` rows exist, and how many of its columns.
struct Source {
    const T* at;
    u32 stride;
    int rows, dim;
};

INLINE void fetch_piece(int4& r, const Source& from, int i, const Lane& t) {
    u32 tid = t.tid;
    OPAQUE(tid);
    const u32 e = tid + i * PA_NT, row = e / CHUNKS, chunk = e % CHUNKS;
    // Behind the last row comes the last again, which counts for nothing: see is_cut.
    const T* const piece = from.at + ((u32)min_int((int)row, from.rows - 1) * from.stride + chunk * 8);
    if ((i + 1) * PA_NT <= PA_BC * CHUNKS || row < PA_BC) r = load_eight(piece, from.dim - (int)chunk * 8);
}

INLINE void store_piece(char* to, const int4& r, int i, const Lane& t) {
    u32 tid = t.tid;
    OPAQUE(tid);
    const u32 e = tid + i * PA_NT, row = e / CHUNKS, chunk = e % CHUNKS;
    if ((i + 1) * PA_NT <= PA_BC * CHUNKS || row < PA_BC) *(int4*)(to + piece_at(CHUNKS, row, chunk)) = r;
}

// Pieces first ... first + n - 1 of every row that stays to a panel of their own; rows that do not exist are zero.
template <int n>
INLINE void stage_rows(char* to, const T* from, i64 stride, int rows, int first, int dim, const Lane& t) {
#pragma unroll 1
    for (u32 e = t.tid; e < PA_BR * n; e += PA_NT) {
        const u32 row = e / n, chunk = e % n;
        int4 piece = zero_piece();
        if ((int)row < rows) piece = load_eight(from + row * stride + (first + chunk) * 8, dim - (first + (int)chunk) * 8);
        *(int4*)(to + piece_at(n, row, chunk)) = piece;
    }
}

// ---- operands --------------------------------------------------------------------------------------------------------

// Left operands of two neighbouring pieces: with one tile of rows one load brings both.
struct Left { u32 x[2][PA_MT][2]; };

// This lane's row of a panel of n pieces, for load_left.
INLINE u32 left_address(const char* panel, int n, const Lane& t) {
#if PA_MT == 2
    return panel_row(panel, n, t.warp * PA_WR + t.lane, 0);
#else
    return panel_row(panel, n, t.warp * PA_WR + t.lane % 16, t.lane / 16);
#endif
}

INLINE void load_left(Left& a, u32 row, int n, int c) {
    u32 r[4];
#if PA_MT == 2
    FOR(d, 2) {
        load_blocks(r, d ? n == 4 || n % 8 == 0 ? panel_piece(row, n, c) ^ 16u : panel_piece(row, n, c) + 16 : panel_piece(row, n, c));
        FOR(m, 2) FOR(x, 2) a.x[d][m < PA_MT ? m : 0][x] = r[2 * m + x];
    }
#else
    load_blocks(r, panel_piece(row, n, c));
    FOR(d, 2) FOR(x, 2) a.x[d][0][x] = r[2 * d + x];
#endif
}

// This lane's row of a tile of Y, for blocks of PA_SC columns: 16 columns of two pieces, or 32 of one.
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
        const u32 at = panel_piece(row, CHUNKS, c);
        const u32 from = d ? CHUNKS == 4 || CHUNKS % 8 == 0 ? at ^ 16u : at + 16 : at;
        if (turned) load_blocks_turned(r, from);
        else load_blocks(r, from);
        FOR(n, 4) b.x[d][n < NT8 ? n : 0] = r[n];
    }
#endif
}

struct Scores { float x[PA_MT][NT8][4]; };
struct Halves { u32 x[PA_MT][NT8][2]; };
struct Sums { float x[PA_MT][CHUNKS][4]; };

// S = X Y^T; the first `kept` pieces of X are in registers, the others lie in shared memory.
template <int kept>
INLINE void product_rows(Scores& S, const Left (&X)[kept > 0 ? kept / 2 : 1], u32 x_row, u32 y_row) {
    OPAQUE(x_row);
    OPAQUE(y_row);
    FOR(c2, CHUNKS / 2) {
        const int c = 2 * c2;
        Left a;
        if (c < kept) a = X[c < kept ? c2 : 0];
        else load_left(a, x_row, CHUNKS - kept, c - kept);
        Right b;
        load_right<false>(b, y_row, c);
        FOR(d, 2) FOR(n, NT8) FOR(m, PA_MT) {
            if (c + d == 0) multiply_first(S.x[m][n], a.x[d][m], b.x[d][n]);
            else multiply_add(S.x[m][n], a.x[d][m], b.x[d][n]);
        }
    }
}

// O += P Y
INLINE void product_cols(Sums& O, const Halves& P, u32 y_row) {
    OPAQUE(y_row);
    FOR(c2, CHUNKS / 2) {
        Right b;
        load_right<true>(b, y_row, 2 * c2);
        FOR(n, NT8) FOR(d, 2) FOR(m, PA_MT) multiply_add(O.x[m][2 * c2 + d], P.x[m][n], b.x[d][n]);
    }
}

// Row h (0, 1) of tile m of this lane within the block; column i (0, 1) of tile n of 8.
INLINE int row_of(const Lane& t, int m, int h) { return t.warp * PA_WR + m * 16 + h * 8 + t.lane / 4; }
INLINE int col_of(const Lane& t, int n, int i) { return n * 8 + t.lane % 4 * 2 + i; }
