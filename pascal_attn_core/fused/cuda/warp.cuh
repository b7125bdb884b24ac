// What a warp does as one on cards with tensor cores: 8 x 8 blocks of halves from shared memory to registers, products of
// such blocks (Turing: m16n8k8; Volta: m8n8k4), counters that warps wait for. Each PTX instruction lies in a small
// function of its own with a twin for the CPU emulation.
//
// Layout of a block of 8 x 8 halves in one register per lane: lane 4 r + q holds row r, columns 2q and 2q + 1 (turned:
// row r is column r of what lies in shared memory). A of m16n8k8 is two such blocks, one above the other; B is one, whose
// rows are the columns of B; C is two blocks of floats: (r, 2q), (r, 2q + 1), (r + 8, 2q), (r + 8, 2q + 1). So two
// neighbouring floats of C, rounded to halves, are one register of A of the next product.

#ifdef PA_CPU_EMU
INLINE u32 shared_address(const void* p) { return emu_shared_address(p); }
INLINE void load_blocks(u32 (&r)[4], u32 row) { emu_ldmatrix<4, false>(r, row); }
INLINE void load_blocks(u32 (&r)[2], u32 row) { emu_ldmatrix<2, false>(r, row); }
INLINE void load_blocks_turned(u32 (&r)[4], u32 row) { emu_ldmatrix<4, true>(r, row); }
INLINE void multiply_first(float (&c)[4], const u32 (&a)[2], u32 b) {
    c[0] = c[1] = c[2] = c[3] = 0.f;
    emu_mma_m16n8k8(c, a, b);
}
INLINE void multiply_add(float (&c)[4], const u32 (&a)[2], u32 b) { emu_mma_m16n8k8(c, a, b); }
INLINE void multiply_add_884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
    emu_mma_m8n8k4<true, false>(c, a0, a1, b0, b1);
}
INLINE void multiply_add_884_rows(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
    emu_mma_m8n8k4<true, true>(c, a0, a1, b0, b1);
}
INLINE void fence_block() { __threadfence_block(); }
INLINE void see(volatile u32* counters, int count, u32 n, int lane) { emu_see(counters + lane % count, n); }
INLINE int4 load_piece(const T* p) { return *(const int4*)p; }
INLINE u32 pack_halves(float low, float high) { return emu_float2half(low) | (u32)emu_float2half(high) << 16; }
INLINE float reciprocal(float x) { return 1.f / x; }
#else
INLINE u32 shared_address(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}
#if __CUDA_ARCH__ >= 750
// Lanes 8 i ... 8 i + 7 name the rows of block i (16 bytes each). volatile: stays between the barriers.
INLINE void load_blocks(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row));
}
INLINE void load_blocks(u32 (&r)[2], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row));
}
INLINE void load_blocks_turned(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row));
}
// c = a b: needs no cleared c.
INLINE void multiply_first(float (&c)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.f));
}
// c += a b
INLINE void multiply_add(float (&c)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
#endif
// Volta: c += a b of four products of 8 x 8 by 4, one per quad pair (lanes 4 g ... 4 g + 3 and 16 + 4 g ...). A lane
// holds row i of A, and column i of B, or with _rows columns 4 (lane / 16) ... + 3 of its row lane % 4.
#define MULTIPLY_884(name, layout)                                                                              \
    INLINE void name(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {                                           \
        asm("mma.sync.aligned.m8n8k4." layout ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, "   \
            "{%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"                                                     \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])    \
            : "r"(a0), "r"(a1), "r"(b0), "r"(b1));                                                              \
    }
MULTIPLY_884(multiply_add_884, "row.col")
MULTIPLY_884(multiply_add_884_rows, "row.row")
INLINE void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
// Until the counters of all warps are at least n.
INLINE void see(volatile u32* counters, int count, u32 n, int lane) {
    while (!__all_sync(FULL_WARP, (int)(counters[lane % count] - n) >= 0)) {}
}
// 16 bytes that nobody writes meanwhile. volatile: where it stands among the products, not before them all.
INLINE int4 load_piece(const T* p) {
    int4 r;
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
INLINE u32 pack_halves(float low, float high) {
    u32 r;
    asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(r) : "f"(low), "f"(high));
    return r;
}
INLINE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif

// A barrier in two halves. What this warp has done to shared memory before is done for whoever waits for its counter. By
// PTX's memory model ("Memory Consistency Model") a lane's fence speaks for the other lanes only behind a barrier of the
// warp; and a lane that waits has seen one counter, of which it tells the others by a barrier behind its fence. The first
// fence is there for ptxas, which spills without it.
INLINE void signal(volatile u32* counter, u32 n, int lane) {
    fence_block();
    __syncwarp();
    if (lane == 0) {
        fence_block();
        *counter = n;
    }
}
INLINE void wait_for(volatile u32* counters, int count, u32 n, int lane) {
    see(counters, count, n, lane);
    fence_block();
    __syncwarp();
}

// The same for numbers from 0 to 1, by integer arithmetic: conversions share a slow unit with exponentials. The factor
// 2^-112 (1 + 0.72 * 2^-11) makes a half's exponent of a float's, subnormal halves included; the bits below are cut off,
// which its second part makes up for on average. Nothing may be added to the bits: ptxas 11.7 to 13.5, from -O2 on, takes
// two values bits(f * c) * k + r of the same c and k for bits(f) * (c * k) + r, an integer product, which is 0 here.
INLINE u32 pack_shares(float low, float high) {
    const float c = 1.92660703e-34f;
    const u32 x = float_to_bits(low * c), y = float_to_bits(high * c);
    return x >> 13 | (y << 3 & 0xffff0000u);
}
