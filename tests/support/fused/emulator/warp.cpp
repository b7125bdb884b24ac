// What all lanes of a warp compute at once: see warp_on_cpu.h.
//
// Where the elements of a fragment lie: PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16", "... for mma.m16n8k8",
// "Warp-level matrix load instruction: ldmatrix". A test compares every element with those definitions. Sums are made in
// float64 and rounded once: tensor cores round otherwise, and no two generations alike.
#include "state.h"

namespace emu {
static uint64_t blocks_read = 0, passes_needed = 0;  // by ldmatrix: 8 x 8 blocks, and passes of shared memory for them

// The hands of this thread's warp in one meeting: `lay` fills this thread's, `last` runs once all are laid down and before
// any lane goes on.
template <class Lay, class Last>
static inline const Hand* meet_with(Lay lay, Last last) {
    const unsigned thread = current, first = thread / 32 * 32, slot = state.warps[thread / 32].generation & 1;
    Array<Hand>& hands = state.hands[slot];
    if (hands.count < state.threads) hands.assign(state.threads);
    Hand* const of_warp = hands.items + first;
    lay(hands[thread]);
    if (state.warps[thread / 32].waiting == 31) last(of_warp);
    meet(state.warps[thread / 32], 32);
    return of_warp;
}

// Two halves as floats.
static inline void halves_of(uint32_t word, float& low, float& high) {
    _Float16 halves[2];
    memcpy(halves, &word, 4);
    low = (float)halves[0];
    high = (float)halves[1];
}

// Passes of shared memory for 16 bytes of each of eight lanes: one if no two different pieces lie in the same quarter
// of the banks' 128 bytes.
static unsigned passes_of(const Hand* eight) {
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

static void count_passes(const Hand* hand, int blocks) {
    for (int b = 0; b < blocks; ++b) passes_needed += passes_of(hand + b * 8);
    blocks_read += blocks;
}

unsigned ballot(bool vote) {
    const Hand* all = meet_with([=](Hand& mine) { mine.word[0] = vote; }, [](Hand* hand) {
        uint32_t votes = 0;
        for (int lane = 0; lane < 32; ++lane) votes |= hand[lane].word[0] << lane;
        hand[0].word[1] = votes;
    });
    return all[0].word[1];
}

void ldmatrix(uint32_t* r, uint32_t address, int blocks, bool is_transposed) {
    if ((int)current % 32 < 8 * blocks) note(__start_shared_memory + address, 16, false);
    const Hand* all = meet_with([=](Hand& mine) { mine.word[0] = address; }, [=](Hand* hand) {
        for (int lane = 0; lane < 8 * blocks; ++lane) {
            const uint32_t at = hand[lane].word[0];
            if (at % 16 || at + 16 > (uint32_t)(__stop_shared_memory - __start_shared_memory)) abort();
            memcpy(hand[lane].row, __start_shared_memory + at, 16);
        }
        count_passes(hand, blocks);
    });
    const int lane = current % 32, row = lane / 4, col = lane % 4 * 2;
    for (int b = 0; b < blocks; ++b) {
        uint32_t x[2];
        for (int i = 0; i < 2; ++i) {
            const int from = is_transposed ? col + i : row, element = is_transposed ? row : col + i;
            x[i] = all[b * 8 + from].row[element / 2] >> (element % 2 * 16) & 0xffffu;
        }
        r[b] = x[0] | x[1] << 16;
    }
}

void count_passes_of_16(uint32_t address) {
    meet_with([=](Hand& mine) { mine.word[0] = address; }, [](Hand* hand) { count_passes(hand, 4); });
}

void mma_m16n8k8(float* c, const uint32_t* a, uint32_t b) {
    const auto lay = [=](Hand& mine) {
        mine.word[0] = a[0];
        mine.word[1] = a[1];
        mine.word[2] = b;
        memcpy(mine.sum, c, sizeof mine.sum / 2);
    };
    const Hand* all = meet_with(lay, [](Hand* hand) {
        float A[16][8], B[8][8];  // B[k][column]
        double sums[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, col = lane % 4 * 2;
            halves_of(hand[lane].word[0], A[row][col], A[row][col + 1]);
            halves_of(hand[lane].word[1], A[row + 8][col], A[row + 8][col + 1]);
            halves_of(hand[lane].word[2], B[col][row], B[col + 1][row]);
            for (int i = 0; i < 4; ++i) sums[row + i / 2 * 8][col + i % 2] = hand[lane].sum[i];
        }
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 8; ++k)
                for (int col = 0; col < 8; ++col) sums[row][col] += (double)A[row][k] * B[k][col];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) hand[lane].sum[i] = (float)sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
    memcpy(c, all[current % 32].sum, 4 * sizeof *c);
}

void mma_m8n8k4(float* c, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1, bool a_by_rows, bool b_by_rows) {
    const auto lay = [=](Hand& mine) {
        const uint32_t words[4] = {a0, a1, b0, b1};
        memcpy(mine.word, words, sizeof words);
        memcpy(mine.sum, c, sizeof mine.sum);
    };
    const Hand* all = meet_with(lay, [=](Hand* hand) {
        float A[4][8][4], B[4][4][8];  // [quad pair][row][column]
        double sums[4][8][8];
        const auto row_of = [](int lane, int i) { return (lane & 1) + lane / 16 * 4 + (i & 2); };
        const auto col_of = [](int lane, int i) { return (lane & 2) + (i & 4) + (i & 1); };
        for (int lane = 0; lane < 32; ++lane) {
            const int pair = lane % 16 / 4, first = lane / 16 * 4, number = first + lane % 4;
            float a[4], b[4];
            for (int i = 0; i < 2; ++i) {
                halves_of(hand[lane].word[i], a[2 * i], a[2 * i + 1]);
                halves_of(hand[lane].word[2 + i], b[2 * i], b[2 * i + 1]);
            }
            for (int i = 0; i < 4; ++i) {
                (a_by_rows ? A[pair][number][i] : A[pair][first + i][lane % 4]) = a[i];
                (b_by_rows ? B[pair][lane % 4][first + i] : B[pair][i][number]) = b[i];
            }
            for (int i = 0; i < 8; ++i) sums[pair][row_of(lane, i)][col_of(lane, i)] = hand[lane].sum[i];
        }
        for (int pair = 0; pair < 4; ++pair)
            for (int row = 0; row < 8; ++row)
                for (int k = 0; k < 4; ++k)
                    for (int col = 0; col < 8; ++col)
                        sums[pair][row][col] += (double)A[pair][row][k] * B[pair][k][col];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i)
                hand[lane].sum[i] = (float)sums[lane % 16 / 4][row_of(lane, i)][col_of(lane, i)];
    });
    memcpy(c, all[current % 32].sum, 8 * sizeof *c);
}

void wmma(float* c, const uint32_t* a, const uint32_t* b, int generation, bool is_bfloat) {
    const int words = generation == 11 ? 8 : 4;
    const auto lay = [=](Hand& mine) {
        memcpy(mine.word, a, words * sizeof *a);
        memcpy(mine.word + 8, b, words * sizeof *b);
        memcpy(mine.sum, c, sizeof mine.sum);
    };
    const Hand* all = meet_with(lay, [=](Hand* hand) {
        float A[16][16], B[16][16];  // B[column][k]
        double sums[16][16];
        const auto number = [=](uint32_t word, int i) {
            const uint16_t bits = (uint16_t)(word >> 16 * i);
            const uint32_t as_float = (uint32_t)bits << 16;
            _Float16 half;
            float wide;
            memcpy(&half, &bits, 2);
            memcpy(&wide, &as_float, 4);
            return is_bfloat ? wide : (float)half;
        };
        const auto row_of = [=](int lane, int i) { return generation == 11 ? 2 * i + lane / 16 : i + lane / 16 * 8; };
        for (int lane = 0; lane < 32; ++lane) {
            const uint32_t* const words_of_other = hand[lane ^ 16].word;
            const bool are_alike = generation == 12 || !memcmp(hand[lane].word, words_of_other, sizeof hand->word);
            for (int k = 0; k < 2 * words; ++k) {
                const int at = k + (generation == 11 ? 0 : lane / 16 * 8);
                A[lane % 16][at] = number(hand[lane].word[k / 2], k % 2);
                B[lane % 16][at] = number(hand[lane].word[8 + k / 2], k % 2);
            }
            for (int i = 0; i < 8; ++i) sums[row_of(lane, i)][lane % 16] = are_alike ? hand[lane].sum[i] : NAN;
        }
        for (int row = 0; row < 16; ++row)
            for (int col = 0; col < 16; ++col)
                for (int k = 0; k < 16; ++k) sums[row][col] += (double)A[row][k] * B[col][k];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i) hand[lane].sum[i] = (float)sums[row_of(lane, i)][lane % 16];
    });
    memcpy(c, all[current % 32].sum, 8 * sizeof *c);
}
}  // namespace emu

// Since the library was loaded: 8 x 8 blocks that ldmatrix has read, and the passes of shared memory that they took.
extern "C" __attribute__((visibility("default"))) void blocks_and_passes(unsigned long long* blocks,
                                                                         unsigned long long* passes) {
    *blocks = emu::blocks_read;
    *passes = emu::passes_needed;
}
