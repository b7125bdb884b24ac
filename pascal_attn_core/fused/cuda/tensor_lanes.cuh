// What the kernels on tensor cores share: lanes, sequences, and tiles of rows in shared memory.
#define PA_NT (PA_WARPS * 32)
#define PA_WR (PA_MT * 16)  // rows of a warp
#define PA_BR (PA_WARPS * PA_WR)
#define CHUNKS (PA_D / 8)   // 16-byte pieces of a row

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

// The same lane, of which what is derived from its number is computed anew: for rare work, so that it keeps no registers.
INLINE Lane anew(Lane t) {
    OPAQUE(t.tid);
    return lane_of(t.tid);
}

// Row r of this lane within its warp: see the files of the two generations; and within the block.
INLINE int row_in_warp(const Lane& t, int r);
INLINE int row_of(const Lane& t, int r) { return t.warp * PA_WR + row_in_warp(t, r); }

template <class P>
INLINE Sequence sequence_at(const P& p, int b) {
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

// tanh(x) for s * tanh_scale = 2 log2(e) x.
INLINE float tanh_of(float s, float tanh_scale) {
    return fmaf(-2.f, reciprocal(1.f + exp2_approx(s * tanh_scale)), 1.f);
}

// ---- panels ----------------------------------------------------------------------------------------------------------

// A panel has n 16-byte pieces of each of its rows. Eight neighbouring rows of one column of pieces must lie in eight
// different bank groups: an odd n sees to that by itself; else pieces of a row change places, as far as n leaves rows in
// the same group.
#if PA_WMMA  // always an odd number of 16-byte pieces: addresses of pieces differ by numbers that instructions can hold
#define PANEL_PITCH(n) (((n) | 1) * 16)
INLINE u32 turned_by(int, u32) { return 0; }
#else
#define PANEL_PITCH(n) ((n) * 16)  // bytes of a row

INLINE u32 turned_by(int n, u32 row) { return n % 8 == 0 ? row & 7 : n % 4 == 0 ? row >> 1 & 3 : n % 2 == 0 ? row >> 2 & 1 : 0; }
#endif

// Byte offset of a piece.
INLINE u32 piece_at(int n, u32 row, u32 chunk) { return row * PANEL_PITCH(n) + (chunk ^ turned_by(n, row)) * 16; }

// The shared memory address of a piece.
INLINE u32 panel_row(const char* panel, int n, int row, int chunk) {
    return shared_address(panel) + piece_at(n, row, chunk);
}
// From there to the piece c further on, if the first one's number has no bit in common with c.
INLINE u32 panel_piece(u32 first, int n, int c) {
    const int low = n % 8 == 0 ? 7 : n % 4 == 0 ? 3 : n % 2 == 0 ? 1 : 0;  // bits that change places
    return (first ^ (u32)((c & low) * 16)) + (c & ~low) * 16;
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
