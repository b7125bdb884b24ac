// What a tile is allowed to look at: the band (causal rule, sliding window), the end of the sequence, and the mask.

#define MASK_WORDS ((RM * CN + 31) / 32)

#define MASK_BIT(bits, i, j) (((bits)[((i) * CN + (j)) / 32] >> (((i) * CN + (j)) % 32)) & 1u)

// Where a row of the tile's mask begins, for the tile's first column.
struct MaskRow {
    i64 at, row;
    __device__ __forceinline__ i64 operator()(int r) const { return at + r * row; }
};

// A mask seen from one tile: element (row r, column c) lies at `row_at(r) + c * col`, in elements from `data`.
// Row addresses are made one at a time (OPAQUE): all at once they would take the registers of the sums.
struct MaskView {
    const void* data;
    i64 row;
    u32 col;
    int is_float32;
};

INLINE MaskView view_mask(const void* data, i64 row, i64 col, int is_float32) {
    MaskView m;
    m.data = data;
    m.row = row;
    m.col = (u32)col;
    m.is_float32 = is_float32;
    return m;
}

INLINE bool mask_allows(const MaskView& m, i64 at) {
#if PA_MASK == 1
    return ((const u8*)m.data)[at] != 0;
#else
    return (m.is_float32 ? ((const float*)m.data)[at] : load_one((const T*)m.data + at)) != NEG_INF;
#endif
}

// Reads the tile's mask once: bit i * CN + j of `bits` says whether element (i, j) of this thread may take part.
// Returns whether any may. A mask that is the same for all rows (row stride 0) is read once per column.
template <class RowAt>
INLINE bool read_mask(u32 (&bits)[MASK_WORDS], const MaskView& m, const RowAt& row_at, int rows, int cols,
                      const Lane& t) {
    FOR(w, MASK_WORDS) bits[w] = 0;
    u32 any = 0;
    FOR(i, RM) {
        u32 line = 0;
        if (i > 0 && m.row == 0) {
            line = bits[0] & ((1u << CN) - 1u);
        } else if (ROW(i) < rows || m.row == 0) {
            int r = min_int(ROW(i), rows - 1);
            OPAQUE(r);
            const i64 base = row_at(r);
            FOR(j, CN) if (COL(j) < cols) line |= (u32)mask_allows(m, base + (u32)COL(j) * m.col) << j;
        }
        any |= line;
        bits[i * CN / 32] |= line << (i * CN % 32);
    }
    return any != 0;
}

#if PA_MASK == 2
template <class RowAt>
INLINE void add_mask(float (&S)[RM][CN], const u32 (&bits)[MASK_WORDS], const MaskView& m, const RowAt& row_at,
                     const Lane& t) {
    FOR(i, RM) {
        int r = ROW(i);
        OPAQUE(r);
        const i64 base = row_at(r);
        FOR(j, CN) if (MASK_BIT(bits, i, j)) {
            const i64 at = base + (u32)COL(j) * m.col;
            S[i][j] += m.is_float32 ? ((const float*)m.data)[at] : load_one((const T*)m.data + at);
        }
    }
}
#endif

#if PA_MASK
template <class RowAt>
INLINE void apply_mask(float (&S)[RM][CN], const u32 (&bits)[MASK_WORDS], const MaskView& m, const RowAt& row_at,
                       const Lane& t) {
#if PA_MASK == 2
    add_mask(S, bits, m, row_at, t);
#endif
    FOR(i, RM) FOR(j, CN) if (!MASK_BIT(bits, i, j)) S[i][j] = NEG_INF;
}
#endif

// Rows first ... last against the tile's columns from col0 on: does the band cut into it?
INLINE bool band_cuts(const Band& b, int first, int last, int col0) {
    return col0 + PA_BC - 1 > first + b.high || col0 < last + b.low;
}

// Forbids what the band does not allow to a row, and the columns that do not exist. `distance`: the row's position
// minus that of the tile's first column.
INLINE void forbid_outside(float (&S)[CN], int distance, const Band& b, int cols, const Lane& t) {
    const int last = min_int(cols - 1, distance + b.high), first = distance + b.low;
    FOR(j, CN) if (COL(j) > last || COL(j) < first) S[j] = NEG_INF;
}

// With an added mask scores are scaled before; otherwise in prob_of.
INLINE void scale_scores(float (&S)[RM][CN], float scale) {
#if PA_MASK == 2
    FOR(i, RM) FOR(j, CN) S[i][j] *= scale;
#endif
}
