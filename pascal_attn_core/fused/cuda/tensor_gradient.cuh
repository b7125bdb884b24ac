// Both gradient kernels on tensor cores are one: a tile of rows that stay, in two tensors X and XX, meets tiles of columns
// that move, in two tensors Y and YY.
//   PA_KEYS 0  rows are queries: X = Q, XX = dO; columns are keys: Y = K, YY = V
//   PA_KEYS 1  rows are keys: X = K, XX = V; columns are the queries of all heads of a group: Y = Q, YY = dO
//   S = X Y^T    P = exp(S - lse)    dP = XX YY^T    dS = P * (dP - delta)      with a softcap times 1 - tanh^2
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
//   PA_CAPPED 1: there is a softcap. A macro: its slope takes registers
//   PA_PACKED, PA_DYNAMIC, PA_MINB  as in the forward kernel
#define NT8 (PA_SC / 8)  // tiles of 8 columns
#define TILE_QUERIES (PA_KEYS ? PA_BC : PA_BR)
#define TILE_KEYS (PA_KEYS ? PA_BR : PA_BC)
#define MASK_FUNCTION pa_gradient_bits
#define KEY_OF_BIT(bit) bit

#if PA_D % 16 || (PA_SC != 16 && PA_SC != 32) || PA_BC % PA_SC || PA_XREG % 2 || PA_XXREG % 2
#error "unsupported tile geometry"
#endif
#if PA_XREG > CHUNKS || PA_XXREG > CHUNKS || 3 * PA_BC > PA_NT || (!PA_KEYS && PA_BC % 32)
#error "unsupported tile geometry"
#endif

struct TensorBackward : Backward {
    u32* mask_bits; u8* flags;      // of the mask, see mask_bits.cuh; null: there is none
    i64 bits_b, bits_h, bits_q;     // of mask_bits, in words
    i64 flags_b, flags_h, flags_q;  // of flags, per tile of queries
    int mask_heads, mask_rows;      // of a mask, without those that repeat
    int range, range_end;           // batch element b has the columns from b * range on, range_end at most
    float tanh_scale;               // PA_CAPPED: as in the forward kernel; scale and scale_log2 are of the capped scores
    float grad_scale;               // of dX: the softmax scale
};

typedef TensorBackward Params;

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
    const Sequence s = sequence_at(p, at.b);
    // Under a causal rule the tiles with the most columns go first: the last queries, the first keys. They do so of all
    // heads, where padding and a cap leave the registers.
    const bool is_causal = s.band.high < s.lk;
#if PA_PAD || PA_CAPPED && (PA_KEYS || PA_D > 64)
    const int tile = (int)blockIdx.x;
    at.head = blockIdx.y;
#else
    const int block = (int)(blockIdx.y * gridDim.x + blockIdx.x), heads = (int)gridDim.y;
    const int tile = is_causal ? block / heads : (int)blockIdx.x;
    at.head = is_causal ? block - tile * heads : (int)blockIdx.y;
#endif
#if PA_PACKED
    at.first_q = p.cu_q[at.b];
    at.first_k = p.cu_k[at.b];
#else
    at.first_q = at.first_k = 0;
#endif
#if PA_KEYS
    at.row0 = (tile + p.first_tile) * PA_BR;
    at.rows = s.lk - at.row0;
    at.length = s.lq;
    at.low = -s.band.high;
    at.high = -s.band.low;
#else
    at.row0 = ((is_causal ? (int)gridDim.x - 1 - tile : tile) + p.first_tile) * PA_BR;
    at.rows = s.lq - at.row0;
    at.length = s.lk;
    at.low = s.band.low;
    at.high = s.band.high;
#endif
    const int last = at.row0 + min_int(PA_BR, at.rows) - 1;
    at.begin = max_int(at.b * p.range, at.row0 + at.low);
    if (PA_MASK || p.range) at.begin -= at.begin % PA_BC;  // as the mask's tiles lie, and the next range's
    at.end = min_int(min_int(at.length, at.b * p.range + p.range_end), last + at.high + 1);
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
        if ((int)row < rows && (CHUNKS % n == 0 || first + (int)chunk < CHUNKS))  // n may not divide a row
            piece = load_eight(from + row * stride + (first + chunk) * 8, dim - (first + (int)chunk) * 8);
        *(int4*)(to + piece_at(n, row, chunk)) = piece;
    }
}
