// How the gradient kernels find the tiles that a mask lets take part, and apply the mask to scores.
#if PA_MASK
#define ROW_WORDS (TILE_KEYS / 32)  // of a query's row of a tile
#define WORDS (TILE_QUERIES * ROW_WORDS)

#if WORDS > PA_NT
#error "a thread brings one word of the mask at most"
#endif

__shared__ u32 words[2][WORDS];  // [place][query][keys]

INLINE int query_head(const Params& p, const Where& at, int head) { return PA_KEYS ? at.head() * p.group + head : at.head(); }

// The flags of the 32 tiles of columns from `first` on, of one head.
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
    return flags_of_lanes(flag);
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
    FOR(n, NT8) FOR(i, PER_8) {
        int col = first + col_of(t, n, i);
        OPAQUE(col);
        FOR(r, ROWS) {
            const int row = row_of(t, r), query = PA_KEYS ? col : row, key = PA_KEYS ? row : col;
            float& s = score(S, r, n, i);
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
