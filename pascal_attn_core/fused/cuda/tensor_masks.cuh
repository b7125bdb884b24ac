// How the forward kernel finds the tiles of keys that a mask lets take part, and applies the mask to scores.
#if PA_MASK
#define MASK_WORDS (PA_BC / 32)

INLINE Flags read_flags(const Forward& p, const Place& at, int first, const Lane& t) {
    const int tile = first + t.lane;
    u32 flag = 0;
    if (tile * PA_BC < at.k_end) {
        const int h = PA_SPLIT ? at.hk : at.first_head;
        flag = p.flags ? p.flags[at.b * p.flags_b + h * p.flags_h + at.row0 / PA_BR * p.flags_q + tile] : SEEN;
    }
    return flags_of_lanes(flag);
}

// The first column of the first tile from `col0` on that is SEEN; at.k_end or more: none is. `flags` are those around the
// tile before, or is_first.
INLINE int next_seen(Flags& flags, const Forward& p, const Place& at, int col0, bool is_first, const Lane& t) {
    int tile = col0 / PA_BC;
    while (tile * PA_BC < at.k_end) {
        if (is_first || tile % 32 == 0) flags = read_flags(p, at, tile / 32 * 32, anew(t));
        is_first = false;
        const u32 left = flags.seen >> tile % 32;
        if (left) return (tile + __ffs(left) - 1) * PA_BC;
        tile = tile / 32 * 32 + 32;
    }
    return at.k_end;
}

// The bits of a warp's rows in one tile.
#if OWN_BITS
#if PA_BC == 64
typedef u16 RowBits;
#elif PA_BC == 32
typedef u8 RowBits;
#else
#error "unsupported tile geometry"
#endif
struct MaskBits {
    u32 of_row[ROWS];  // of this lane's scores
};

INLINE MaskBits read_bits(const Forward& p, const Place& at, int col0, const Lane& t) {
    const RowBits* const own = (const RowBits*)(p.mask_bits + at.b * p.bits_b + col0 / 32) + col_of(t, 0, 0) / 2;
    MaskBits m;
    FOR(r, ROWS) {
        const int row = min_int(row_of(t, r), at.rows - 1);
        m.of_row[r] = *(const RowBits*)((const u32*)own + at.head(row) * p.bits_h + at.query(row) * p.bits_q);
    }
    return m;
}

// Of row r and keys w * 32 ... w * 32 + 31, from bit 0 on; and which of them is that of column i in tile n of 8.
INLINE u32 bits_of(const MaskBits& m, int r, int w, const Lane&) { return m.of_row[r] >> w * 8; }
#define BIT_OF(n, i) ((n) * 2 + (i))
#else
struct MaskBits {
    u32 word[MASK_WORDS];  // lane l has those of row l
};

INLINE MaskBits read_bits(const Forward& p, const Place& at, int col0, const Lane& t) {
    const int r = min_int(t.warp * PA_WR + t.lane % PA_WR, at.rows - 1);
    const u32* const from = p.mask_bits + at.b * p.bits_b + at.head(r) * p.bits_h + at.query(r) * p.bits_q + col0 / 32;
    MaskBits m;
    FOR(w, MASK_WORDS) m.word[w] = from[w];
    return m;
}

INLINE u32 bits_of(const MaskBits& m, int r, int w, const Lane& t) {
    return __shfl_sync(FULL_WARP, m.word[w], row_in_warp(t, r)) >> col_of(t, 0, 0);
}
#define BIT_OF(n, i) ((n) * 8 + COL_STEP(i))
#endif

// Adds a mask's numbers, and forbids what its bits forbid.
INLINE void apply_mask(Scores& S, const MaskBits& bits, const Forward& p, const Place& at, int col0, const Lane& t) {
    FOR(r, ROWS) {
#if PA_MASK == 2
        int row = min_int(row_of(t, r), at.rows - 1);
        OPAQUE(row);
        const i64 numbers = at.b * p.mb + at.head(row) * p.mh + at.query(row) * p.mq + col0 * p.mk;
#endif
        FOR(w, MASK_WORDS) {
            const u32 word = bits_of(bits, r, w, t);
            FOR(n, 4) FOR(i, PER_8) {
                float& s = score(S, r, w * 4 + n, i);
                const bool is_allowed = word >> BIT_OF(n, i) & 1;
#if PA_MASK == 2
                if (is_allowed) s += mask_number(p, numbers + (u32)(w * 32 + col_of(t, n, i)) * (u32)p.mk);
#endif
                if (!is_allowed) s = NEG_INF;
            }
        }
    }
}
#endif
