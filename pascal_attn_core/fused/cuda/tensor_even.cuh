// Even distribution: blocks that take a whole tile of rows, as many as fill the card some times over, then those of
// p.pieces, whose key ranges are cut so that all multiprocessors end at about the same time: see fused/launch/stream_k.py.
//
// The parts of a tile are put together by whichever of its blocks is the last to be done; no block ever waits for
// another one. Each counts itself in p.arrived once its sums lie in memory. Whose turn it is changes no bit: of two parts
// the one with the smaller maximum is scaled and added to the other, and more than two are added in their order. A part
// lies in memory as the threads have it: float4 number f of thread tid is number f * PA_NT + tid.
#define OWN_SUMS (ROWS * CHUNKS * PER_8)  // of a thread
#define PART_FOURS (OWN_SUMS / 4 + ROWS / 2)

INLINE float& own_sum(Sums& O, int e) { return sum_at(O, e / (CHUNKS * PER_8), e / PER_8 % CHUNKS, e % PER_8); }

// What another block has written, past a cache that may hold what was there before.
INLINE float4 load_part(const float4* from) {
#ifdef PA_CPU_EMU
    return *from;
#else
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
    return x;
#endif
}

INLINE void store_part(float4* to, Sums& O, const float (&row_max)[ROWS], const float (&row_sum)[ROWS], const Lane& t) {
    FOR(f, OWN_SUMS / 4) {
        float4 x;
        x.x = own_sum(O, 4 * f);
        x.y = own_sum(O, 4 * f + 1);
        x.z = own_sum(O, 4 * f + 2);
        x.w = own_sum(O, 4 * f + 3);
        to[f * PA_NT + t.tid] = x;
    }
    FOR(f, ROWS / 2) {
        float4 x;
        x.x = row_max[2 * f];
        x.y = row_max[2 * f + 1];
        x.z = row_sum[2 * f];
        x.w = row_sum[2 * f + 1];
        to[(OWN_SUMS / 4 + f) * PA_NT + t.tid] = x;
    }
}

// One row's maximum and sum of another part. `fade` is that of the part with the smaller maximum.
INLINE void add_row(float& row_max, float& row_sum, float& fade, bool& is_above, float other_max, float other_sum) {
    is_above = row_max >= other_max;
    const float above = is_above ? row_max : other_max, below = is_above ? other_max : row_max;
    fade = exp2_approx((below - (above == NEG_INF ? 0.f : above)) * UNIT_TO_LOG2);
    row_sum = is_above ? fmaf(other_sum, fade, row_sum) : fmaf(row_sum, fade, other_sum);
    row_max = above;
}

INLINE void add_part(Sums& O, float (&row_max)[ROWS], float (&row_sum)[ROWS], const float4* from, const Lane& t) {
    float fade[ROWS];
    bool is_above[ROWS];
    FOR(f, ROWS / 2) {
        const float4 x = load_part(from + (OWN_SUMS / 4 + f) * PA_NT + t.tid);
        add_row(row_max[2 * f], row_sum[2 * f], fade[2 * f], is_above[2 * f], x.x, x.z);
        add_row(row_max[2 * f + 1], row_sum[2 * f + 1], fade[2 * f + 1], is_above[2 * f + 1], x.y, x.w);
    }
    FOR(f, OWN_SUMS / 4) {
        if (f % 4 == 0) __syncwarp();  // else ptxas loads more at once than there are registers for
        const float4 x = load_part(from + f * PA_NT + t.tid);
        const float other[4] = {x.x, x.y, x.z, x.w};
        FOR(j, 4) {
            const int r = (4 * f + j) / (CHUNKS * PER_8);
            float& mine = own_sum(O, 4 * f + j);
            mine = is_above[r] ? fmaf(other[j], fade[r], mine) : fmaf(mine, fade[r], other[j]);
        }
    }
}

// How many blocks are counted; count(): with this one. One thread asks for its block. By PTX's memory model ("Memory
// Consistency Model") a fence speaks for what barriers before it have told its thread, here of the block's sums, and for
// what the thread itself has read: behind the next barrier the block sees the sums of the counted ones.
INLINE u32 counted(const u32* arrived) {
    const u32 n = *(const volatile u32*)arrived;
    __threadfence();
    return n;
}
INLINE u32 count(u32* arrived) {
    __threadfence();
    const u32 n = atomicAdd(arrived, 1u);
    __threadfence();
    return n;
}

// Whether this block has its whole tile, and is to write it: not if another one of its blocks will.
INLINE bool join_parts(Sums& O, float (&row_max)[ROWS], float (&row_sum)[ROWS], const Forward& p, const Lane& lane) {
    int block = blockIdx.x;
    OPAQUE(block);
    const Piece piece = piece_of(p, block);
    if (piece.parts == 1) return true;
    const Lane t = anew(lane);
    u32* const arrived = p.arrived + (piece.tile - p.whole);
    const u32 others = piece.parts - 1;
    float4* const parts = p.parts + (i64)piece.slot * (PART_FOURS * PA_NT);
    // Where the other one of two is done, this one's sums can stay in its registers.
    bool is_last = others == 1 && __syncthreads_or(t.tid == 0 && counted(arrived) == others);
    if (!is_last) {
        store_part(parts + piece.part * (PART_FOURS * PA_NT), O, row_max, row_sum, t);
        __syncthreads();  // all of this block's sums are there
        is_last = __syncthreads_or(t.tid == 0 && count(arrived) == others);
        if (!is_last) return false;
    }
    if (others > 1) {
        FOR(e, OWN_SUMS) own_sum(O, e) = 0.f;
        FOR(r, ROWS) {
            row_max[r] = NEG_INF;
            row_sum[r] = 0.f;
        }
    }
#pragma unroll 1
    for (int i = 0; i < piece.parts; ++i)
        if (others > 1 || i != piece.part) add_part(O, row_max, row_sum, parts + i * (PART_FOURS * PA_NT), t);
    return true;
}
