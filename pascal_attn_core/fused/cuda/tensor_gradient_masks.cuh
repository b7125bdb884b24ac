// Masks by bits. pa_gradient_bits reads a mask once: for each of its rows and 32 keys one word, whose bit says whether the
// key may take part, and for each tile of the gradient kernel one byte: SEEN if any key of any query may, CUT if some may
// not or a number is added. The kernel skips tiles that are not SEEN, and looks at bits and numbers only where they are
// CUT.
#if PA_MASK
#define SEEN 1
#define CUT 2
#define TILE_QUERIES (PA_KEYS ? PA_BC : PA_BR)
#define TILE_KEYS (PA_KEYS ? PA_BR : PA_BC)
#define MASK_WARPS 4
#define ROW_WORDS (TILE_KEYS / 32)  // of a query's row of a tile
#define WORDS (TILE_QUERIES * ROW_WORDS)

#if WORDS > PA_NT
#error "a thread brings one word of the mask at most"
#endif

__shared__ u32 words[2][WORDS];  // [place][query][keys]

// What is added to a score; -inf: the key may not take part. volatile: one at a time, with few registers.
INLINE float mask_number(const Params& p, i64 at) {
#if PA_MASK == 1
    return ((const u8*)p.mask)[at] ? 0.f : NEG_INF;
#else
    return p.mask_is_float32 ? ((volatile const float*)p.mask)[at] : half_to_float(((volatile const u16*)p.mask)[at]);
#endif
}

// One block per tile of keys (x), tile of queries (y), and batch element and head of the mask (z).
extern "C" __global__ void __launch_bounds__(MASK_WARPS * 32) pa_gradient_bits(const Params p) {
    const int lane = threadIdx.x % 32, key0 = blockIdx.x * TILE_KEYS, query0 = blockIdx.y * TILE_QUERIES;
    const int b = blockIdx.z / p.mask_heads, h = blockIdx.z % p.mask_heads;
    const int end = min_int(query0 + TILE_QUERIES, p.mask_rows);
    bool seen = false, cut = false;
    for (int query = query0 + threadIdx.x / 32; query < end; query += MASK_WARPS) {
        for (int w = 0; w < ROW_WORDS; ++w) {
            const int key = key0 + w * 32 + lane;
            const bool exists = key < p.lk;
            const float number = exists ? mask_number(p, b * p.mb + h * p.mh + query * p.mq + key * p.mk) : NEG_INF;
            const u32 allowed = __ballot_sync(FULL_WARP, number != NEG_INF);
            if (lane == 0) p.mask_bits[b * p.bits_b + h * p.bits_h + query * p.bits_q + key0 / 32 + w] = allowed;
            seen |= allowed != 0;
            cut |= exists && number != 0.f;
        }
    }
    seen = __syncthreads_or(seen);
    cut = __syncthreads_or(cut);
    if (threadIdx.x == 0)
        p.flags[b * p.flags_b + h * p.flags_h + blockIdx.y * p.flags_q + blockIdx.x] = (seen ? SEEN : 0) | (cut ? CUT : 0);
}

// The flags of the 32 tiles of columns around the one that was found last, of one head.
struct Flags {
    u32 seen, cut;
};

INLINE int query_head(const Params& p, const Where& at, int head) { return PA_KEYS ? at.head() * p.group + head : at.head(); }

INLINE Flags read_flags(const Params& p, const Where& at, int head, int first, const Lane& t) {
    const int tile = first + t.lane;
    u32 flag = 0;
    if (tile * PA_BC < at.end()) {
        flag = SEEN;
        if (p.flags) {
            const int keys = PA_KEYS ? at.row0() / PA_BR : tile, queries = PA_KEYS ? tile : at.row0() / PA_BR;
            flag = p.flags[at.b() * p.flags_b + query_head(p, at, head) * p.flags_h + queries * p.flags_q + keys];
        }
    }
    Flags f;
    f.seen = __ballot_sync(FULL_WARP, (flag & SEEN) != 0);
    f.cut = __ballot_sync(FULL_WARP, (flag & CUT) != 0);
    return f;
}

// The word that this thread brings to `words` for the tile at col0.
INLINE u32 word_of(const Params& p, const Where& at, int head, int col0, const Lane& t) {
    const int query0 = PA_KEYS ? col0 : at.row0(), key0 = PA_KEYS ? at.row0() : col0;
    const int query = min_int(query0 + t.tid / ROW_WORDS, p.lq - 1);
    return p.mask_bits[at.b() * p.bits_b + query_head(p, at, head) * p.bits_h + query * p.bits_q + key0 / 32 + t.tid % ROW_WORDS];
}

// Adds a mask's numbers, and forbids what its bits forbid, in PA_SC columns from `first` on of the tile at col0.
INLINE void apply_mask(Scores& S, const u32* bits, const Params& p, const Where& at, int head, int col0, int first,
                       const Lane& t) {
    FOR(n, NT8) FOR(i, 2) {
        int col = first + col_of(t, n, i);
        OPAQUE(col);
        FOR(m, PA_MT) FOR(h, 2) {
            const int row = row_of(t, m, h), query = PA_KEYS ? col : row, key = PA_KEYS ? row : col;
            float& s = S.x[m][n][2 * h + i];
            const bool is_allowed = bits[query * ROW_WORDS + key / 32] >> key % 32 & 1;
#if PA_MASK == 2
            if (is_allowed) {
                const int q = min_int(query + (PA_KEYS ? col0 : at.row0()), p.lq - 1);
                const int k = key + (PA_KEYS ? at.row0() : col0);
                s += mask_number(p, at.b() * p.mb + query_head(p, at, head) * p.mh + q * p.mq + k * p.mk);
            }
#endif
            if (!is_allowed) s = NEG_INF;
        }
    }
}
#endif
