// Runs CUDA C++ kernel source on a CPU: one fiber per CUDA thread, the next one drawn at random wherever a thread waits;
// one block after the other, or several that take turns. What a GPU would not tell:
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
static uint64_t random_state = 1, barriers = 0;

// swapcontext asks the kernel for the signal mask each time, which is most of its cost: it starts a fiber, and jumps go
// back and forth. The address sanitizer knows the former only. To the compiler either changes anything at all (noipa).
#ifdef __SANITIZE_ADDRESS__
static void resume(Fiber& fiber) {
    fiber.started = true;
    swapcontext(&state.main, &fiber.context);
}

static void leave() { swapcontext(&state.fibers[current].context, &state.main); }
#else
static __attribute__((noipa)) void resume(Fiber& fiber) {
    if (_setjmp(state.main_place)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

static __attribute__((noipa)) void leave() {
    if (!_setjmp(state.fibers[current].place)) _longjmp(state.main_place, 1);
}
#endif

void wait_for(const volatile uint32_t* number, uint32_t seen, bool is_counter) {
    Watch& watch = state.waiting[current].watch;
    watch = {number, seen, is_counter};
    if (!is_counter || !watch.is_over()) leave();
    watch.number = nullptr;
}

unsigned meet(Group& group, unsigned size) {
    const unsigned seen = group.generation;
    if (++group.waiting == size) {
        group.waiting = 0;
        ++group.generation;
    } else {
        wait_for(&group.generation, seen, false);
    }
    return seen;
}

int block_or(int value) {
    const unsigned slot = state.block.generation & 1;
    if (!state.block.waiting) { state.any[slot] = 0; ++barriers; }
    state.any[slot] |= value != 0;
    if (state.block.waiting + 1 == state.threads) state.turns = 0;  // other warps run ahead from here on
    meet(state.block, state.threads);
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
    uint32_t& any = state.votes[(group.generation & 1) * state.waves.count + wave];
    if (!group.waiting) any = 0;
    any |= value;
    meet(group, PA_WAVE);
    return any;
}

static void entry() {
    for (;;) {  // a thread of each block
        state.body(state.argument);
        state.waiting[current].done = true;
        --state.alive;
        leave();
    }
}

static uint64_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void start(unsigned threads) {
    state.threads = state.alive = threads;
    if (threads > state.fibers.count) {
        state.fibers.assign(threads, Fiber());
        state.waiting.assign(threads, Waiting());
        free(state.stacks);
        state.stacks = (char*)malloc(STACK * threads);  // memory that nobody touches is none
    }
    state.warps.assign(threads / 32, Group());
    state.waves.assign(threads / PA_WAVE, Group());
    state.votes.assign(2 * state.waves.count, 0);
    if (2 * threads > state.exchange.count) state.exchange.assign(2 * threads);
    state.block = Group();
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = state.fibers[i];
        const bool waits_for_work = fiber.started && state.waiting[i].done;
        state.waiting[i] = {Watch(), false};
        if (waits_for_work) continue;
        fiber.started = false;  // at first, and after a deadlock
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = state.stacks + STACK * i;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, (void (*)())entry, 0);
    }
}

// Which warps run for a while, as a mask: all of them, one alone, or about half. Where warps meet at every instruction
// of theirs, drawing the next thread alone would keep all warps in step.
static uint64_t draw_warps(unsigned warps) {
    const uint64_t one = 1ull << draw() % warps;
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
    state.ready.assign(threads);
}

// AHEAD: the warps that ran wait for the others. DEADLOCK: the threads wait for each other at different barriers, or some
// have left a barrier that others wait at.
enum Progress { GOES_ON, AHEAD, DONE, DEADLOCK };

// Lets the threads of this block run for so many rounds. is_shared: other blocks take turns with it.
static Progress run_rounds(uint64_t rounds, bool is_shared) {
    unsigned* const ready = state.ready.items;
    for (; rounds > 0 && state.alive; --rounds) {
        unsigned count = 0;
        for (unsigned thread = 0; thread < state.threads; ++thread)
            if (state.running >> (thread / PA_WAVE) & 1 && state.waiting[thread].can_run()) ready[count++] = thread;
        if (!count) {
            if (state.running == ~0ull) return DEADLOCK;
            state.running = ~0ull;
            state.turns = 0;
            if (is_shared) return AHEAD;
            continue;
        }
        // In random order: of the rest, one at a time.
        for (; count > 0; --count) {
            unsigned& drawn = ready[(draw() >> 32) * count >> 32];
            current = drawn;
            drawn = ready[count - 1];
            resume(state.fibers[current]);
        }
        if (state.turns-- == 0) {
            state.running = draw_warps(state.threads / PA_WAVE);
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
    bool sleeps = false;

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
            next.sleeps = false;
        }
        bool all_sleep = true;
        for (unsigned i = 0; i < count; ++i) all_sleep &= residents[i]->sleeps;
        if (all_sleep) residents[emu::draw() % count]->sleeps = false;
        const unsigned one = is_new ? count - 1 : emu::draw() % count;
        Resident& chosen = *residents[one];
        if (chosen.sleeps) continue;
        chosen.change_places();
        if (is_new) emu::begin_block(threads, body, p);
        const emu::Progress found = emu::run_rounds(1 + emu::draw() % (1u << emu::draw() % 12), true);
        chosen.change_places();
        if (found == emu::AHEAD) chosen.sleeps = emu::draw() % 4 == 0;
        if (found == emu::DONE) Resident::swap(residents[one], residents[--count]);
        if (found == emu::DEADLOCK) return false;
    }
    return true;
}

// Number of barriers passed, -1: the threads deadlocked, -2: no such kernel. together: blocks that run at a time; 1: one
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
    if (together > 1) return run_together(blocks, together, threads, body, (void*)params) ? (long)emu::barriers : -1;
    for (size_t i = 0; i < blocks.count; ++i) {
        blockIdx = blocks[i];
        emu::begin_block(threads, body, (void*)params);
        if (emu::run_rounds(~0ull, false) != emu::DONE) return -1;
    }
    return (long)emu::barriers;
}

