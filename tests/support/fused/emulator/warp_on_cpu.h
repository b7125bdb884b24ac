// What the 32 lanes of a warp do as one: votes, blocks of halves from shared memory (ldmatrix), products on tensor cores,
// and counters in shared memory that one warp raises and others wait for. Every lane of the warp must take part.
//
// Where the elements of a fragment lie: PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16", "... for mma.m16n8k8",
// "Warp-level matrix load instruction: ldmatrix". A test compares every element with those definitions. Sums are made in
// float64 and rounded once: tensor cores round otherwise, and no two generations alike.
//
// Counters are seen at once and in order here. Whether a fence is missing, this emulation cannot tell.
#pragma once

namespace emu {
static uint64_t blocks_read = 0, passes_needed = 0;  // by ldmatrix: 8 x 8 blocks, and passes of shared memory for them

// The hands of this thread's warp in one meeting: `lay` fills this thread's, `last` runs once all are laid down and before
// any lane goes on.
template <class Lay, class Last>
static inline const Hand* meet_with(Lay lay, Last last) {
    const unsigned thread = state.current, first = thread / 32 * 32, slot = state.warps[thread / 32].generation & 1;
    Array<Hand>& hands = state.hands[slot];
    if (hands.count < state.threads) hands.assign(state.threads);
    Hand* const of_warp = hands.items + first;
    lay(hands[thread]);
    if (state.warps[thread / 32].waiting == 31) last(of_warp);
    meet(state.warps[thread / 32], 32);
    return of_warp;
}

static inline float half_of(const uint32_t* words, int i) {
    const uint16_t bits = (uint16_t)(words[i / 2] >> (i % 2 * 16));
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

// Passes of shared memory for 16 bytes of each of eight lanes: one if no two different pieces lie in the same quarter
// of the banks' 128 bytes.
static inline unsigned passes_of(const Hand* eight) {
    unsigned most = 1;
    for (int i = 0; i < 8; ++i) {
        unsigned here = 1;
        for (int j = 0; j < i; ++j) {
            const uint32_t a = eight[i].word[0] / 16, b = eight[j].word[0] / 16;
            if (a == b) { here = 0; break; }
            here += a % 8 == b % 8;
        }
        most = here > most ? here : most;
    }
    return most;
}
}  // namespace emu

static inline unsigned __ballot_sync(unsigned, int vote) {
    const emu::Hand* all = emu::meet_with([=](emu::Hand& mine) { mine.word[0] = vote != 0; }, [](emu::Hand* hand) {
        uint32_t votes = 0;
        for (int lane = 0; lane < 32; ++lane) votes |= hand[lane].word[0] << lane;
        hand[0].word[1] = votes;
    });
    return all[0].word[1];
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline void __threadfence_block() {}

// Bytes from the beginning of shared memory.
static inline uint32_t emu_shared_address(const void* p) { return (uint32_t)((const char*)p - __start_shared_memory); }

// Lane l names row l % 8 of block l / 8, for l below 8 * BLOCKS. It receives of every block row l / 4, columns
// 2 (l % 4) and the next; with TRANSPOSED the same of the transposed block.
template <int BLOCKS, bool TRANSPOSED>
static inline void emu_ldmatrix(uint32_t (&r)[BLOCKS], uint32_t address) {
    const emu::Hand* all = emu::meet_with([=](emu::Hand& mine) { mine.word[0] = address; }, [](emu::Hand* hand) {
        for (int lane = 0; lane < 8 * BLOCKS; ++lane) {
            const uint32_t at = hand[lane].word[0];
            if (at % 16 || at + 16 > (uint32_t)(__stop_shared_memory - __start_shared_memory)) abort();
            memcpy(hand[lane].row, __start_shared_memory + at, 16);
        }
        for (int b = 0; b < BLOCKS; ++b) emu::passes_needed += emu::passes_of(hand + b * 8);
        emu::blocks_read += BLOCKS;
    });
    const int lane = emu::state.current % 32, row = lane / 4, col = lane % 4 * 2;
    for (int b = 0; b < BLOCKS; ++b) {
        uint32_t x[2];
        for (int i = 0; i < 2; ++i) {
            const int from = TRANSPOSED ? col + i : row, element = TRANSPOSED ? row : col + i;
            x[i] = all[b * 8 + from].row[element / 2] >> (element % 2 * 16) & 0xffffu;
        }
        r[b] = x[0] | x[1] << 16;
    }
}

// A load of 16 bytes a lane takes four passes, of eight lanes each, as far as their pieces lie in different banks.
// Lanes meet for that count only: a plain load waits for nobody, so each reads before.
static inline int4 emu_load_16(uint32_t address) {
    if (address % 16 || address + 16 > (uint32_t)(__stop_shared_memory - __start_shared_memory)) abort();
    int4 found;
    memcpy(&found, __start_shared_memory + address, sizeof found);
    emu::meet_with([=](emu::Hand& mine) { mine.word[0] = address; }, [](emu::Hand* hand) {
        for (int b = 0; b < 4; ++b) emu::passes_needed += emu::passes_of(hand + b * 8);
        emu::blocks_read += 4;
    });
    return found;
}
static inline uint2 emu_load_8(uint32_t address) {
    if (address % 8 || address + 8 > (uint32_t)(__stop_shared_memory - __start_shared_memory)) abort();
    uint2 found;
    memcpy(&found, __start_shared_memory + address, sizeof found);
    return found;
}

// c += a b: 16 x 8 by 8 x 8.
static inline void emu_mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
    const auto lay = [&](emu::Hand& mine) {
        mine.word[0] = a[0];
        mine.word[1] = a[1];
        mine.word[2] = b;
        memcpy(mine.sum, c, sizeof c);
    };
    const emu::Hand* all = emu::meet_with(lay, [](emu::Hand* hand) {
        float A[16][8], B[8][8];  // B[column][k]
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) A[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = emu::half_of(hand[lane].word, i);
            for (int i = 0; i < 2; ++i) B[lane / 4][lane % 4 * 2 + i] = emu::half_of(hand[lane].word + 2, i);
        }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const float* x = A[lane / 4 + i / 2 * 8];
                const float* y = B[lane % 4 * 2 + i % 2];
                double sum = hand[lane].sum[i];
                for (int k = 0; k < 8; ++k) sum += (double)x[k] * y[k];
                hand[lane].sum[i] = (float)sum;
            }
    });
    memcpy(c, all[emu::state.current % 32].sum, sizeof c);
}

// Four products of 8 x 8 by 4 at once, each of the eight lanes 4 g ... 4 g + 3 and 16 + 4 g ... (quad pair g). Of these
// eight, lane number i holds row i of A by rows, or column i % 4, rows 4 (i / 4) ... + 3, by columns; B alike, transposed.
template <bool A_BY_ROWS, bool B_BY_ROWS>
static inline void emu_mma_m8n8k4(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    const auto lay = [&](emu::Hand& mine) {
        const uint32_t words[4] = {a0, a1, b0, b1};
        memcpy(mine.word, words, sizeof words);
        memcpy(mine.sum, c, sizeof c);
    };
    const emu::Hand* all = emu::meet_with(lay, [](emu::Hand* hand) {
        float A[4][8][4], B[4][8][4];  // [quad pair][row of A, column of B][k]
        for (int lane = 0; lane < 32; ++lane) {
            const int pair = lane % 16 / 4, first = lane / 16 * 4, number = first + lane % 4;
            for (int i = 0; i < 4; ++i) {
                (A_BY_ROWS ? A[pair][number][i] : A[pair][first + i][lane % 4]) = emu::half_of(hand[lane].word, i);
                (B_BY_ROWS ? B[pair][first + i][lane % 4] : B[pair][number][i]) = emu::half_of(hand[lane].word + 2, i);
            }
        }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i) {
                const float* x = A[lane % 16 / 4][(lane & 1) + lane / 16 * 4 + (i & 2)];
                const float* y = B[lane % 16 / 4][(lane & 2) + (i & 4) + (i & 1)];
                double sum = hand[lane].sum[i];
                for (int k = 0; k < 4; ++k) sum += (double)x[k] * y[k];
                hand[lane].sum[i] = (float)sum;
            }
    });
    memcpy(c, all[emu::state.current % 32].sum, sizeof c);
}

// Raises this warp's counter to n once all its lanes have got here.
static inline void emu_signal(volatile uint32_t* counter, uint32_t n) {
    __syncwarp();
    if (emu::state.current % 32 == 0) *counter = n;
}

// Until each of `count` counters is at least n. A loop that reads shared memory until it changes would never end here.
static inline void emu_wait_for(volatile uint32_t* counters, int count, uint32_t n) {
    for (int i = 0; i < count; ++i) emu::wait_for(counters + i, n, true);
    __syncwarp();
}
