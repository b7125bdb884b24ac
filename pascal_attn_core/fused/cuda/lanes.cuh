// Lanes i and i^1 share their columns, i and i^2 their rows, so that the hardware serves both 16-byte operand loads of
// a product in two passes instead of four: bit 0 selects the row group, the next bits the column group, the rest the
// row group again.
struct Lane {
    int tid, tx, ty;
};

INLINE Lane lane_of(int tid) {
    Lane t;
    t.tid = tid;
    t.tx = (tid >> 1) % PA_TX;
    t.ty = (tid & 1) | ((tid / (2 * PA_TX)) << 1);
    return t;
}

// The same lane, of which what is derived from its number is computed anew.
INLINE Lane anew(Lane t) {
    OPAQUE(t.tid);
    return t;
}

// AMD's compiler keeps all that is derived from a lane's number, and then has no registers for the sums: this takes the
// lane anew for the rest of a block of code, from the number of its wave, which takes none. Only where all lanes are
// active.
#ifdef PA_HIP
INLINE Lane lane_anew(const Lane& t) {
    int first = __builtin_amdgcn_readfirstlane(t.tid);
    OPAQUE_UNIFORM(first);
#if PA_WAVE == 64
    return lane_of(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, first)));
#else
    return lane_of(__builtin_amdgcn_mbcnt_lo(~0u, first));
#endif
}
#elif PA_AMD
INLINE Lane lane_anew(const Lane& t) { return t; }
#endif
#if PA_AMD
#define LANE_ANEW(t)                     \
    const Lane t##_anew = lane_anew(t);  \
    const Lane& t = t##_anew;
#else
#define LANE_ANEW(t)
#endif

// It keeps all parameters as well, in registers of a wave that overflow into those of its lanes: these are read anew.
#ifdef PA_HIP
template <class P>
INLINE const P& params_anew() {
    auto p = __builtin_amdgcn_kernarg_segment_ptr();
    OPAQUE_UNIFORM(p);
    return *(const P*)p;
}
#define PARAMS_ANEW(Params, p) const Params& p = params_anew<Params>();
#else
#define PARAMS_ANEW(Params, p)
#endif

// It also moves the last multiplications of a product behind the next branch, with all their operands: COMPLETE holds
// them back.
#ifdef PA_HIP
template <int rows, int cols>
INLINE void complete(float (&sums)[rows][cols]) {
    FOR(i, rows) FOR(j, cols) asm volatile("" : "+v"(sums[i][j]));
}
#define COMPLETE(sums) complete(sums);
#else
#define COMPLETE(sums)
#endif

#define ROW(i) (t.ty * 4 + ((i) & 3) + ((i) >> 2) * 4 * PA_TY)  // row i of this thread within the tile
#define COL(j) (t.tx * 4 + ((j) & 3) + ((j) >> 2) * 4 * PA_TX)  // column j of this thread within the tile
