// What the 32 lanes of a warp do as one: votes, blocks of halves from shared memory (ldmatrix), products on tensor cores,
// and counters in shared memory that one warp raises and others wait for. Every lane of the warp must take part.
//
// Counters are seen at once and in order here: whether a fence is missing, races.cpp tells.
#pragma once

static inline unsigned __ballot_sync(unsigned, int vote) { return emu::ballot(vote != 0); }
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline void __threadfence_block() { emu::fence(); }

// Bytes from the beginning of shared memory.
static inline uint32_t emu_shared_address(const void* p) { return (uint32_t)((const char*)p - __start_shared_memory); }

// Lane l names row l % 8 of block l / 8, for l below 8 * BLOCKS. It receives of every block row l / 4, columns
// 2 (l % 4) and the next; with TRANSPOSED the same of the transposed block.
template <int BLOCKS, bool TRANSPOSED>
static inline void emu_ldmatrix(uint32_t (&r)[BLOCKS], uint32_t address) {
    emu::ldmatrix(r, address, BLOCKS, TRANSPOSED);
}

// A load of 16 bytes a lane takes four passes, of eight lanes each, as far as their pieces lie in different banks.
// Lanes meet for that count only: a plain load waits for nobody, so each reads before.
static inline int4 emu_load_16(uint32_t address) {
    if (address % 16 || address + 16 > (uint32_t)(__stop_shared_memory - __start_shared_memory)) abort();
    int4 found;
    memcpy(&found, __start_shared_memory + address, sizeof found);
    emu::count_passes_of_16(address);
    return found;
}
static inline uint2 emu_load_8(uint32_t address) {
    if (address % 8 || address + 8 > (uint32_t)(__stop_shared_memory - __start_shared_memory)) abort();
    uint2 found;
    memcpy(&found, __start_shared_memory + address, sizeof found);
    return found;
}

// c += a b: 16 x 8 by 8 x 8.
static inline void emu_mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], uint32_t b) { emu::mma_m16n8k8(c, a, b); }

// Four products of 8 x 8 by 4 at once, each of the eight lanes 4 g ... 4 g + 3 and 16 + 4 g ... (quad pair g). Of these
// eight, lane number i holds row i of A by rows, or column i % 4, rows 4 (i / 4) ... + 3, by columns; B alike, transposed.
template <bool A_BY_ROWS, bool B_BY_ROWS>
static inline void emu_mma_m8n8k4(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    emu::mma_m8n8k4(c, a0, a1, b0, b1, A_BY_ROWS, B_BY_ROWS);
}

// c += a b of AMD's matrix instructions: 16 x 16 by 16 x 16, see wave.cuh. Where the halves of a wave have other factors
// on gfx11, sums are NaN.
template <int GENERATION, bool IS_BFLOAT, int N>
static inline void emu_wmma(float (&c)[8], const uint32_t (&a)[N], const uint32_t (&b)[N]) {
    static_assert(N == (GENERATION == 11 ? 8 : 4), "registers of a factor");
    emu::wmma(c, a, b, GENERATION, IS_BFLOAT);
}
// v_perm_b32 for the numbers of bytes.
static inline uint32_t emu_bytes(uint32_t high, uint32_t low, uint32_t which) {
    const uint64_t both = low | (uint64_t)high << 32;
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 8) r |= (uint32_t)(both >> 8 * (which >> i & 7) & 255) << i;
    return r;
}

// Until this lane's counter is at least n, and those of the warp's other lanes. A loop that reads shared memory until it
// changes would never end here.
static inline void emu_see(volatile uint32_t* counter, uint32_t n) {
    emu::wait_for(counter, n);
    *counter;
    __all_sync(0xffffffffu, 1);
}
