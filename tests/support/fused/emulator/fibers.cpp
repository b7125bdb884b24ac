// Runs CUDA C++ kernel source on a CPU: one fiber per CUDA thread. Where a thread waits, another one of its wave goes on,
// drawn at random; where lanes have met, or all of a wave wait, another wave does, drawn at random, too. One block runs
// after the other, or several take turns. What a GPU would not tell:
//   a barrier that not all threads reach            -> DEADLOCK (nobody can move)
//   shared memory that is read before it is written -> NaN: it is poisoned before every block
//   a missing barrier                               -> other numbers: the order of the threads is random, and warps drawn
//                                                      at random run ahead of the others
//   an access outside of a tensor                   -> built with -fsanitize=address
// On AMD's cards the lanes that execute together are a wave of 32 or 64; shuffles stay within 32.
#include "state.h"

Index3 blockIdx, gridDim;

namespace emu {
unsigned current;
State state;
uint64_t random_state = 1;
static uint64_t barriers = 0;

void wait_for(const volatile uint32_t* number, uint32_t wanted) {
    Watch& watch = state.watches[current];
    watch = {number, wanted};
    if (watch.is_over()) return;
    Wave& wave = state.of_lanes[current / PA_WAVE];
    const uint64_t mine = 1ull << current % PA_WAVE;
    wave.able &= ~mine;
    wave.watching |= mine;
    leave();
}

int block_or(int value) {
    const unsigned slot = state.block.generation & 1;
    if (!state.block.waiting) { state.any[slot] = 0; ++barriers; }
    state.any[slot] |= value != 0;
    if (state.block.waiting + 1 == state.threads) state.turns = 0;  // other warps run ahead from here on
    arrive(0, slot, !state.block.waiting);
    meet(state.block, state.threads);
    depart(0, slot);
    return state.any[slot];
}

uint32_t exchange(uint32_t value, unsigned lane) {
    const unsigned thread = current, warp = thread / 32;
    uint32_t* slot = state.exchange.items + (state.warps[warp].generation & 1) * state.threads;
    slot[thread] = value;
    meet(state.warps[warp], 32);
    return slot[warp * 32 + lane];
}

bool any_lane(bool value) {
    const unsigned wave = current / PA_WAVE;
    Group& group = state.waves[wave];
    const unsigned slot = group.generation & 1;
    uint32_t& any = state.votes[slot * state.waves.count + wave];
    if (!group.waiting) any = 0;
    any |= value;
    arrive(1 + wave, slot, !group.waiting);
    meet(group, PA_WAVE);
    depart(1 + wave, slot);
    return any;
}

static void entry() {
    for (;;) {  // a thread of each block
        state.body(state.argument);
        state.fibers[current].waits_for_work = true;
        state.of_lanes[current / PA_WAVE].able &= ~(1ull << current % PA_WAVE);
        --state.alive;
        leave();
    }
}

static void start(unsigned threads) {
    state.threads = state.alive = threads;
    if (threads > state.fibers.count) {
        state.fibers.assign(threads, Fiber());
        state.watches.assign(threads);
        free(state.stacks);
        state.stacks = (char*)malloc(STACK * threads);  // memory that nobody touches is none
    }
    state.warps.assign(threads / 32, Group());
    state.waves.assign(threads / PA_WAVE, Group());
    state.votes.assign(2 * state.waves.count, 0);
    if (2 * threads > state.exchange.count) state.exchange.assign(2 * threads);
    state.block = Group();
    state.of_lanes.assign(threads / PA_WAVE, {ALL_LANES, 0});
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = state.fibers[i];
        const bool waits_for_work = fiber.waits_for_work;
        fiber.waits_for_work = false;
        if (waits_for_work) continue;
        fiber.begin(entry, state.stacks + STACK * i);  // at first, and after a deadlock
    }
}

// Which waves run for a while, as a mask: all of them, one alone, or about half. Where they meet at every instruction
// of theirs, drawing the next thread alone would keep all waves in step.
static uint64_t draw_waves(unsigned waves) {
    const uint64_t one = 1ull << draw() % waves;
    switch (draw() % 4) {
    case 0: return ~0ull;
    case 1: return one;
    default: return draw() | one;
    }
}

static void begin_block(unsigned threads, void (*body)(void*), void* argument) {
    memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    state.body = body;
    state.argument = argument;
    state.running = ~0ull;
    state.turns = 0;
    start(threads);
    state.ready.assign(threads / PA_WAVE);
}

// AHEAD: the warps that ran wait for the others. WAITS: nobody can move before another block has counted. DEADLOCK: the
// threads wait for each other at different barriers, or some have left a barrier that others wait at.
enum Progress { GOES_ON, AHEAD, WAITS, DONE, DEADLOCK };

// Whether any lane can; those whose counters have got there can, from now on.
static bool can_run(unsigned number) {
    Wave& wave = state.of_lanes[number];
    for (uint64_t rest = wave.watching; rest; rest &= rest - 1) {
        const unsigned lane = __builtin_ctzll(rest);
        if (!state.watches[number * PA_WAVE + lane].is_over()) continue;
        wave.watching &= ~(1ull << lane);
        wave.able |= 1ull << lane;
    }
    return wave.able;
}

// Lets the threads of this block run for so many rounds. is_shared: other blocks take turns with it.
static Progress run_rounds(uint64_t rounds, bool is_shared) {
    unsigned* const ready = state.ready.items;
    const unsigned waves = state.threads / PA_WAVE;
    for (; rounds > 0 && state.alive; --rounds) {
        unsigned count = 0;
        for (unsigned wave = 0; wave < waves; ++wave)
            if (state.running >> wave & 1 && can_run(wave)) ready[count++] = wave;
        if (!count) {
            if (state.running == ~0ull) {
                for (unsigned wave = 0; is_shared && wave < waves; ++wave)
                    if (state.of_lanes[wave].watching) return WAITS;
                return DEADLOCK;
            }
            state.running = ~0ull;
            state.turns = 0;
            if (is_shared) return AHEAD;
            continue;
        }
        // In random order: of the rest, one at a time, until its lanes have met or none of them can run.
        for (; count > 0; --count) {
            unsigned& drawn = ready[(draw() >> 32) * count >> 32];
            const unsigned wave = drawn;
            drawn = ready[count - 1];
            current = wave * PA_WAVE + draw_lane(state.of_lanes[wave].able);
            state.has_met = false;
            state.main.jump(state.fibers[current]);
        }
        if (state.turns-- == 0) {
            state.running = draw_waves(waves);
            state.turns = draw() % (32u << draw() % 8);  // up to some tiles
        }
    }
    return state.alive ? GOES_ON : state.block.waiting == 0 ? DONE : DEADLOCK;
}
}  // namespace emu

// A block that has begun, while another one runs.
struct Resident {
    emu::State state;
    emu::Array<char> shared;
    Index3 index;
    bool sleeps = false, waits = false;

    void change_places() {
        swap(emu::state, state);
        swap(blockIdx, index);
        for (size_t i = 0; i < shared.count; ++i) swap(shared[i], __start_shared_memory[i]);
    }
    template <class X>
    static void swap(X& a, X& b) {
        const X before = a;
        a = b;
        b = before;
    }
};

// Blocks as the card may have them: in no order, up to MOST_TOGETHER at once, each a little while. Some whose warps are
// not equally far sleep until all the others do, or are done: what these should have waited for is missing then.
#define MOST_TOGETHER 16
static Resident pool[MOST_TOGETHER];  // fibers are kept for the next launch
static bool run_together(emu::Array<Index3> blocks, unsigned together, unsigned threads, void (*body)(void*), void* p) {
    Resident* residents[MOST_TOGETHER];
    for (size_t i = blocks.count; i > 1; --i) Resident::swap(blocks[i - 1], blocks[emu::draw() % i]);
    for (unsigned i = 0; i < MOST_TOGETHER; ++i) residents[i] = pool + i;
    unsigned count = 0;
    while (blocks.count || count) {
        const bool is_new = blocks.count && count < together;
        if (is_new) {
            Resident& next = *residents[count++];
            next.shared.assign(__stop_shared_memory - __start_shared_memory);
            next.index = blocks[--blocks.count];
            next.sleeps = next.waits = false;
        }
        bool all_sleep = true, all_wait = true;
        for (unsigned i = 0; i < count; ++i) {
            all_sleep &= residents[i]->sleeps || residents[i]->waits;
            all_wait &= residents[i]->waits;
        }
        if (all_wait) return false;
        if (all_sleep) residents[emu::draw() % count]->sleeps = false;
        const unsigned one = is_new ? count - 1 : emu::draw() % count;
        Resident& chosen = *residents[one];
        if (chosen.sleeps) continue;
        chosen.change_places();
        if (is_new) emu::begin_block(threads, body, p);
        const emu::Progress found = emu::run_rounds(1 + emu::draw() % (1u << emu::draw() % 12), true);
        chosen.change_places();
        for (unsigned i = 0; found != emu::WAITS && i < count; ++i) residents[i]->waits = false;
        chosen.waits = found == emu::WAITS;
        if (found == emu::AHEAD) chosen.sleeps = emu::draw() % 4 == 0;
        if (found == emu::DONE) Resident::swap(residents[one], residents[--count]);
        if (found == emu::DEADLOCK) return false;
    }
    return true;
}

// Number of barriers passed, -1: the threads deadlocked, -2: no such kernel, -3: races (see races.cpp). together: blocks that run at a time; 1: one
// after the other, in their order.
extern "C" long launch(const char* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, const void* params,
                       unsigned long long seed, unsigned together) {
    void (*const body)(void*) = emu::body_of(kernel);
    if (!body || together > MOST_TOGETHER) return -2;
    emu::random_state = seed * 2654435769ull + 88172645463325252ull;
    emu::barriers = 0;
    gridDim = {x, y, z};
    static emu::Array<Index3> blocks;
    blocks.assign((size_t)x * y * z);
    for (size_t i = 0; i < blocks.count; ++i) blocks[i] = {(unsigned)(i % x), (unsigned)(i / x % y), (unsigned)(i / x / y)};
    emu::begin_races(blocks.count, threads);
    bool is_done = together == 1 || run_together(blocks, together, threads, body, (void*)params);
    for (size_t i = 0; together == 1 && is_done && i < blocks.count; ++i) {
        blockIdx = blocks[i];
        emu::begin_block(threads, body, (void*)params);
        is_done = emu::run_rounds(~0ull, false) == emu::DONE;
    }
    return !is_done ? -1 : emu::has_races() ? -3 : (long)emu::barriers;
}

