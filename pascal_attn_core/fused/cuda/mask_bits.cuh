// Masks by bits. MASK_FUNCTION reads a mask once: for each of its rows and 32 keys one word, whose bit says whether the
// key may take part, and for each tile of TILE_QUERIES rows and TILE_KEYS keys one byte: SEEN if any key of any row may,
// CUT if some may not or a number is added. The main kernels skip tiles that are not SEEN, and look at bits and numbers
// only where they are CUT.
#if PA_MASK
#define SEEN 1
#define CUT 2
#define MASK_WARPS 4

// What is added to a score; -inf: the key may not take part. volatile: one at a time, with few registers.
template <class P>
INLINE float mask_number(const P& p, i64 at) {
#if PA_MASK == 1
    return ((const u8*)p.mask)[at] ? 0.f : NEG_INF;
#else
    return p.mask_is_float32 ? ((volatile const float*)p.mask)[at] : half_to_float(((volatile const u16*)p.mask)[at]);
#endif
}

// One block per tile of keys (x), tile of rows (y), and batch element and head of the mask (z).
extern "C" __global__ void __launch_bounds__(MASK_WARPS * 32) MASK_FUNCTION(const Params p) {
    const int lane = threadIdx.x % 32, key0 = blockIdx.x * TILE_KEYS, row0 = blockIdx.y * TILE_QUERIES;
    const int b = blockIdx.z / p.mask_heads, h = blockIdx.z % p.mask_heads;
#if PA_SPLIT
    const int end = min_int(row0 + TILE_QUERIES, p.group * p.lq);
#else
    const int end = min_int(row0 + TILE_QUERIES, p.mask_rows);
#endif
    bool seen = false, cut = false;
    for (int row = row0 + threadIdx.x / 32; row < end; row += MASK_WARPS) {
#if PA_SPLIT
        const int head = h * p.group + row / p.lq, query = row % p.lq;
#else
        const int head = h, query = row;
#endif
        for (int w = 0; w < TILE_KEYS / 32; ++w) {
            const int key = key0 + KEY_OF_BIT(w * 32 + lane);
            const bool exists = key < p.lk;
            const float number = exists ? mask_number(p, b * p.mb + head * p.mh + query * p.mq + key * p.mk) : NEG_INF;
            const u32 allowed = __ballot_sync(FULL_WARP, number != NEG_INF);
            if (lane == 0) p.mask_bits[b * p.bits_b + head * p.bits_h + query * p.bits_q + key0 / 32 + w] = allowed;
            seen |= allowed != 0;
            cut |= exists && number != 0.f;
        }
    }
    seen = __syncthreads_or(seen);
    cut = __syncthreads_or(cut);
    if (threadIdx.x == 0)
        p.flags[b * p.flags_b + h * p.flags_h + blockIdx.y * p.flags_q + blockIdx.x] = (seen ? SEEN : 0) | (cut ? CUT : 0);
}

// The flags of 32 tiles, among them the one that was found last.
struct Flags {
    u32 seen, cut;
};

// Of which this lane has that of one tile.
INLINE Flags flags_of_lanes(u32 flag) {
    Flags f;
    f.seen = __ballot_sync(FULL_WARP, (flag & SEEN) != 0);
    f.cut = __ballot_sync(FULL_WARP, (flag & CUT) != 0);
    return f;
}
#endif
