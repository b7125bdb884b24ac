// What the kernels on tensor cores are given, and what one of their blocks works on.
// Compile-time parameters:
//   PA_D        head_dim of the tiles, a multiple of 8
//   PA_PAD      1: head_dim and head_dim_v are read from the parameters, multiples of 4, columns behind them are zero,
//               and rows are read 8 bytes at a time, not 16
//   PA_MASK     0 none, 1 bits, 2 bits and numbers that are added to the scores: see mask_bits.cuh
//   PA_WARPS    warps of a block; PA_MT: tiles of 16 query rows per warp (1, 2); PA_BC: keys per tile, a
//               multiple of 32
//   PA_QREG     16-byte columns of Q that stay in registers, the others are read from shared memory for every tile
//   PA_COUNTERS 1: warps wait for each other's counters instead of a barrier for each tile, which leaves half a tile of
//               slack between them
//   PA_PACKED   1: cu_q, cu_k. A macro, since numbers read from memory cannot lie in Turing's uniform registers
//   PA_SPLIT    1: the rows of a tile are the queries of all heads of a group, the keys are cut into p.splits ranges, one
//               block each
//   PA_EVEN     1: the keys of some tiles are cut so that all multiprocessors end together: see tensor_even.cuh; and then
//   PA_BOUNDS   1: the range of tiles that lie within the band is read from shared memory for each of them, where registers
//               are short
//   PA_INTEGER_PACKED  of four tiles of 8 keys, those whose probabilities become halves by integer arithmetic
//   PA_DYNAMIC  1: more than 48 KiB of shared memory, which has to be asked for at launch; PA_MINB: blocks that shall
//               fit one multiprocessor
#define NT8 (PA_BC / 8)  // tiles of 8 keys
#define TILE_QUERIES PA_BR
#define TILE_KEYS PA_BC
#if PA_EVEN
#define MASK_FUNCTION pa_even_bits
#else
#define MASK_FUNCTION pa_mask_bits
#endif
// The key of a tile that a bit of its words stands for. With OWN_BITS those of a lane's scores lie together, so that each
// lane reads its own.
#define KEY_OF_BIT(bit) (OWN_BITS ? (bit) % (PA_BC / 4) / 2 * 8 + (bit) / (PA_BC / 4) * 2 + (bit) % 2 : (bit))

#if PA_D % 8 || PA_BC % 32 || PA_QREG > CHUNKS || PA_QREG < 1
#error "unsupported tile geometry"
#endif

struct TensorForward {
    const T* q; const T* k; const T* v; T* o;
    const void* mask;                  // the numbers that are added, or null
    float* lse;                        // natural log of the denominator, or null
    float* log_sum;                    // its part besides the row maximum, or null
    float* part_sums; float* part_max; float* part_out;  // splits > 1: [splits, B, Hq, Lq] twice and [..., dim_v]
    const int* cu_q; const int* cu_k;  // PA_PACKED: [B + 1] first tokens of the sequences
    u32* mask_bits; u8* flags;         // of the mask, see mask_bits.cuh; null: there is none
    const float* sinks;                // [Hq]: the score of one more key, whose value is zero; or null
    i64 qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os;  // strides of batch, head, token in elements
    i64 mb, mh, mq, mk, lb, lh;                          // of the mask; of lse and log_sum (batch, head)
    i64 bits_b, bits_h, bits_q;                          // of mask_bits, in words
    i64 flags_b, flags_h, flags_q;                       // of flags, per tile of rows
    int lq, lk, heads, group, batches;  // group: query heads per key/value head
    int low, high;                      // the band
    int lower_right;                    // add lk - lq to the band
    int dim, dim_v, mask_is_float32, splits;
    int first_tile, first_batch;        // of this launch
    int mask_heads, mask_rows;          // of a mask, without those that repeat
    float scale, scale_log2;            // softmax scale, and the same times log2(e); with a softcap, of the capped scores
    float tanh_scale;                   // scores are tanh(score), of which this is 2 log2(e) * what it is taken of; 0: no cap
#if PA_EVEN
    float4* parts; u32* arrived;        // memory for the sums of cut tiles, and for each listed tile a zero
    int row_tiles, whole;               // tiles of a head; blocks that take one tile each, before those that are listed
    u32 pieces[2 * MOST_PIECES];        // of the others: see Piece
#endif
};

typedef TensorForward Params;
#if PA_EVEN
typedef TensorForward TensorEven;  // its name in fused/code/params.py
#endif
typedef TensorForward Forward;

#if PA_EVEN
// What a block does: tiles first ... end - 1 of the keys that a tile of rows meets. Where these are cut, it is number
// `part` of `parts`; the sums of part 0 have place number `slot` in memory, the others those behind it. Two words:
// tile - whole, 12 bits; slot, 12; part, 4; parts, 4; and first, end, 16 each. As fused/launch/stream_k.py packs them.
struct Piece {
    int tile, slot, part, parts, first, end;
};

INLINE Piece piece_of(const TensorForward& p, int block) {
    const int listed = block - p.whole;
    Piece piece;
    piece.tile = block;
    piece.slot = piece.part = piece.first = 0;
    piece.parts = 1;
    piece.end = 0xffff;
    if (listed >= 0) {
        const u32 who = p.pieces[2 * listed], keys = p.pieces[2 * listed + 1];
        piece.tile = p.whole + (who & 0xfff);
        piece.slot = who >> 12 & 0xfff;
        piece.part = who >> 24 & 0xf;
        piece.parts = who >> 28;
        piece.first = keys & 0xffff;
        piece.end = keys >> 16;
    }
    return piece;
}
#define PLACE_OF blockIdx.x
#else
#define PLACE_OF blockIdx.z
#endif

INLINE T to_storage(float f) { return float_to_half(f); }

// Row r of a block's tile is query query(r) of head head(r): of any head of a group with PA_SPLIT, elsewhere of one.
struct Place : Sequence {
    int b, hk, first_head;
    int row0, rows;                   // first row of the tile; rows from there on, may exceed PA_BR
    int first_query, last_query;      // of the tile
    int k_begin, k_end, keys, split;  // keys to visit; behind the last of `keys` nothing belongs to this block

#if PA_SPLIT
    __device__ __forceinline__ int query(int r) const { return (row0 + r) % lq; }
    __device__ __forceinline__ int head(int r) const { return first_head + (row0 + r) / lq; }
#else
    __device__ __forceinline__ int query(int r) const { return row0 + r; }
    __device__ __forceinline__ int head(int) const { return first_head; }
#endif
};

INLINE i64 first_token_at(const int* first_tokens, int b, i64 batch_stride, i64 token_stride) {
#if PA_PACKED
    return first_tokens[b] * token_stride;
#else
    return b * batch_stride;
#endif
}

// `z` is PLACE_OF this block.
INLINE Place find_place(const Forward& p, int z) {
    Place at;
#if PA_EVEN
    const Piece piece = piece_of(p, z);
    const int unit = piece.tile / p.row_tiles;
    at.b = unit / p.heads;
#else
    at.b = z + p.first_batch;
#endif
    (Sequence&)at = sequence_at(p, at.b);
#if PA_SPLIT
    at.hk = blockIdx.y;
    at.first_head = at.hk * p.group;
    at.split = blockIdx.x % p.splits;
    const int tiles_of_group = gridDim.x / p.splits;
    int tile = blockIdx.x / p.splits;
    if (at.band.high < at.lk) tile = tiles_of_group - 1 - tile;
    at.row0 = tile * PA_BR;
    at.rows = p.group * at.lq - at.row0;
    at.first_query = at.row0 % at.lq;
    at.last_query = at.first_query + min_int(PA_BR, at.rows) - 1;
    if (at.last_query >= at.lq) {  // the tile holds rows of several heads
        at.first_query = 0;
        at.last_query = at.lq - 1;
    }
#else
#if PA_EVEN
    at.first_head = unit % p.heads;
    at.row0 = piece.tile % p.row_tiles * PA_BR;
#else
    at.first_head = blockIdx.y;
    // Under a causal rule the last tiles have the most keys: they go first.
    const int tile = at.band.high < at.lk ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x;
    at.row0 = (tile + p.first_tile) * PA_BR;
#endif
    at.hk = at.first_head / p.group;
    at.split = 0;
    at.rows = at.lq - at.row0;
    at.first_query = at.row0;
    at.last_query = min_int(at.row0 + PA_BR, at.lq) - 1;
#endif
    at.k_begin = max_int(0, at.first_query + at.band.low);
#if PA_MASK
    at.k_begin -= at.k_begin % PA_BC;  // as the mask's tiles lie
#endif
    at.k_end = min_int(at.lk, at.last_query + at.band.high + 1);
    at.keys = at.lk;
#if PA_SPLIT
    const int tiles = (at.k_end - at.k_begin + PA_BC - 1) / PA_BC, each = (tiles + p.splits - 1) / p.splits;
    at.k_begin += at.split * each * PA_BC;
    at.k_end = min_int(at.k_end, at.k_begin + each * PA_BC);
    at.keys = min_int(at.lk, at.k_end);
#elif PA_EVEN
    at.k_end = min_int(at.k_end, at.k_begin + piece.end * PA_BC);
    at.k_begin += piece.first * PA_BC;
    at.keys = at.k_end;  // behind it nobody sees a key: one register less
#endif
    return at;
}
