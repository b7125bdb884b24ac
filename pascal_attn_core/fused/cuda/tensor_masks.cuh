// Masks by bits. pa_mask_bits reads a mask once: for each of its rows and 32 keys one word, whose bit says whether the
// key may take part, and for each tile of PA_BR rows and PA_BC keys one byte: SEEN if any key of any row may, CUT if some
// may not or a number is added. The forward kernel skips tiles that are not SEEN, and looks at bits and numbers only
// where they are CUT.
#if PA_MASK
#define SEEN 1
#define CUT 2
#define MASK_WORDS (PA_BC / 32)
#define MASK_WARPS 4

// What is added to a score; -inf: the key may not take part.
INLINE float mask_number(const Forward& p, i64 at) {
#if PA_MASK == 1
    return ((const u8*)p.mask)[at] ? 0.f : NEG_INF;
#else
    return p.mask_is_float32 ? ((const float*)p.mask)[at] : half_to_float(((const u16*)p.mask)[at]);
#endif
}

// One block per tile of keys (x), tile of rows (y), and batch element and head of the mask (z).
extern "C" __global__ void __launch_bounds__(MASK_WARPS * 32) pa_mask_bits(const Forward p) {
    const int lane = threadIdx.x % 32, col0 = blockIdx.x * PA_BC, row0 = blockIdx.y * PA_BR;
    const int b = blockIdx.z / p.mask_heads, h = blockIdx.z % p.mask_heads;
#if PA_SPLIT
    const int end = min_int(row0 + PA_BR, p.group * p.lq);
#else
    const int end = min_int(row0 + PA_BR, p.mask_rows);
#endif
    bool seen = false, cut = false;
    for (int row = row0 + threadIdx.x / 32; row < end; row += MASK_WARPS) {
#if PA_SPLIT
        const int head = h * p.group + row / p.lq, query = row % p.lq;
#else
        const int head = h, query = row;
#endif
        FOR(w, MASK_WORDS) {
            const int col = col0 + w * 32 + lane;
            const bool exists = col < p.lk;
            const float number = exists ? mask_number(p, b * p.mb + head * p.mh + query * p.mq + col * p.mk) : NEG_INF;
            const u32 allowed = __ballot_sync(FULL_WARP, number != NEG_INF);
            if (lane == 0) p.bits[b * p.bits_b + head * p.bits_h + query * p.bits_q + col0 / 32 + w] = allowed;
            seen |= allowed != 0;
            cut |= exists && number != 0.f;
        }
    }
    seen = __syncthreads_or(seen);
    cut = __syncthreads_or(cut);
    if (threadIdx.x == 0)
        p.flags[b * p.flags_b + h * p.flags_h + blockIdx.y * p.flags_q + blockIdx.x] = (seen ? SEEN : 0) | (cut ? CUT : 0);
}

// The flags of 32 tiles of keys, those of the one that was found last among them.
struct Flags {
    u32 seen, cut;
};

INLINE Flags read_flags(const Forward& p, const Place& at, int first, const Lane& t) {
    const int tile = first + t.lane;
    u32 flag = 0;
    if (tile * PA_BC < at.k_end) {
        const int h = PA_SPLIT ? at.hk : at.first_head;
        flag = p.flags ? p.flags[at.b * p.flags_b + h * p.flags_h + at.row0 / PA_BR * p.flags_q + tile] : SEEN;
    }
    Flags f;
    f.seen = __ballot_sync(FULL_WARP, (flag & SEEN) != 0);
    f.cut = __ballot_sync(FULL_WARP, (flag & CUT) != 0);
    return f;
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

// The bits of one row of a warp in one tile: lane l reads those of row l.
struct MaskBits {
    u32 word[MASK_WORDS];
};

INLINE MaskBits read_bits(const Forward& p, const Place& at, int col0, const Lane& t) {
    const int r = min_int(t.warp * PA_WR + t.lane % PA_WR, at.rows - 1);
    const u32* const from = p.bits + at.b * p.bits_b + at.head(r) * p.bits_h + at.query(r) * p.bits_q + col0 / 32;
    MaskBits m;
    FOR(w, MASK_WORDS) m.word[w] = from[w];
    return m;
}

// Adds a mask's numbers, and forbids what its bits forbid.
INLINE void apply_mask(Scores& S, const MaskBits& bits, const Forward& p, const Place& at, int col0, const Lane& t) {
    FOR(r, ROWS) {
#if PA_MASK == 2
        int row = min_int(t.warp * PA_WR + row_in_warp(t, r), at.rows - 1);
        OPAQUE(row);
        const i64 numbers = at.b * p.mb + at.head(row) * p.mh + at.query(row) * p.mq + col0 * p.mk;
#endif
        FOR(w, MASK_WORDS) {
            const u32 word = __shfl_sync(FULL_WARP, bits.word[w], row_in_warp(t, r)) >> key_of(t, 0, 0);
            FOR(n, 4) FOR(i, PER_8) {
                float& s = score(S, r, w * 4 + n, i);
                const bool is_allowed = word >> (n * 8 + KEY_STEP(i)) & 1;
#if PA_MASK == 2
                if (is_allowed) s += mask_number(p, numbers + (u32)(w * 32 + key_of(t, n, i)) * (u32)p.mk);
#endif
                if (!is_allowed) s = NEG_INF;
            }
        }
    }
}
#endif
