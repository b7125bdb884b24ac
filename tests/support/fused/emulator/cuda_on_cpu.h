// Runs CUDA C++ kernel source on a CPU: one fiber per CUDA thread, the next one drawn at random wherever a thread waits;
// one block after the other, or several that take turns (launch.cpp). What a GPU would not tell:
//   a barrier that not all threads reach            -> DEADLOCK (nobody can move)
//   shared memory that is read before it is written -> NaN: it is poisoned before every block
//   a missing barrier                               -> other numbers: the order of the threads is random, and warps drawn
//                                                      at random run ahead of the others
//   an access outside of a tensor                   -> built with -fsanitize=address
// On AMD's cards the lanes that execute together are a wave of 32 or 64; shuffles stay within 32.
#pragma once
#ifndef PA_WAVE
#define PA_WAVE 32
#endif
#undef _FORTIFY_SOURCE  // it holds a jump to another stack for an error
// Hundreds of kernels are compiled: the headers of C alone take less time.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS 1
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct Index3 { unsigned x, y, z; };

extern "C" char __start_shared_memory[] __attribute__((visibility("hidden")));
extern "C" char __stop_shared_memory[] __attribute__((visibility("hidden")));
__attribute__((used)) __shared__ char emu_a_kernel_may_have_none[128];

namespace emu {
constexpr size_t STACK = 64 << 10;
// Zeros, or copies of one item; what it held is lost. It lives as long as the library.
template <class X>
struct Array {
    X* items = nullptr;
    size_t count = 0, room = 0;
    X& operator[](size_t i) { return items[i]; }
    void assign(size_t wanted, X item = X()) {
        if (wanted > room) {
            free(items);
            items = (X*)malloc(wanted * sizeof(X));
            room = wanted;
        }
        count = wanted;
        for (size_t i = 0; i < wanted; ++i) items[i] = item;
    }
};
// What a waiting thread watches: a number in memory that must no longer be `seen`, or that must have reached it.
struct Watch {
    const volatile uint32_t* number = nullptr;
    uint32_t seen = 0;
    bool is_counter = false;
    bool is_over() const { return is_counter ? (int32_t)(*number - seen) >= 0 : *number != seen; }
};
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool started = false, done = true;
    Watch watch;
    bool can_run() const { return !done && (!watch.number || watch.is_over()); }
};
struct Group { uint32_t waiting = 0, generation = 0; };  // threads that meet at a barrier
struct Hand {           // of a lane in a meeting of its warp, see warp_on_cpu.h
    uint32_t word[6];   // what it lays down
    uint32_t row[4];    // ldmatrix: the 16 bytes at its address
    float sum[8];       // mma: its share of the product
};
// Of a block.
struct State {
    ucontext_t main;
    jmp_buf main_place;
    Array<Fiber> fibers;
    Array<unsigned> ready;  // threads that can run
    char* stacks = nullptr;
    Array<Group> warps, waves;
    Array<uint32_t> votes;     // [generation & 1][wave]
    Array<uint32_t> exchange;  // [generation & 1][thread]
    Group block;
    Array<Hand> hands[2];
    unsigned threads = 0, current = 0, alive = 0, any[2] = {0, 0}, turns = 0;
    uint64_t running = ~0ull;  // the warps that may run now
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};
static State state;  // of the block that runs now
static uint64_t random_state = 1, barriers = 0;

// swapcontext asks the kernel for the signal mask each time, which is most of its cost: it starts a fiber, and jumps go
// back and forth. The address sanitizer knows the former only. To the compiler either changes anything at all (noipa).
#ifdef __SANITIZE_ADDRESS__
static void resume(Fiber& fiber) {
    fiber.started = true;
    swapcontext(&state.main, &fiber.context);
}

static void leave() { swapcontext(&state.fibers[state.current].context, &state.main); }
#else
static __attribute__((noipa)) void resume(Fiber& fiber) {
    if (_setjmp(state.main_place)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

static __attribute__((noipa)) void leave() {
    if (!_setjmp(state.fibers[state.current].place)) _longjmp(state.main_place, 1);
}
#endif

// This thread goes on once the watched number is another, or for a counter has reached `seen`.
static inline void wait_for(const volatile uint32_t* number, uint32_t seen, bool is_counter) {
    Watch& watch = state.fibers[state.current].watch;
    watch = {number, seen, is_counter};
    if (!is_counter || !watch.is_over()) leave();
    watch.number = nullptr;
}

static inline unsigned meet(Group& group, unsigned size) {
    const unsigned seen = group.generation;
    if (++group.waiting == size) {
        group.waiting = 0;
        ++group.generation;
    } else {
        wait_for(&group.generation, seen, false);
    }
    return seen;
}

static inline int block_or(int value) {
    const unsigned slot = state.block.generation & 1;
    if (!state.block.waiting) { state.any[slot] = 0; ++barriers; }
    state.any[slot] |= value != 0;
    if (state.block.waiting + 1 == state.threads) state.turns = 0;  // other warps run ahead from here on
    meet(state.block, state.threads);
    return state.any[slot];
}

// The value of another lane of this thread's warp.
static inline uint32_t exchange(uint32_t value, unsigned lane) {
    const unsigned thread = state.current, warp = thread / 32;
    uint32_t* slot = state.exchange.items + (state.warps[warp].generation & 1) * state.threads;
    slot[thread] = value;
    meet(state.warps[warp], 32);
    return slot[warp * 32 + lane];
}

// Whether any lane of this thread's wave has a true value.
static inline bool any_lane(bool value) {
    const unsigned wave = state.current / PA_WAVE;
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
        state.fibers[state.current].done = true;
        --state.alive;
        leave();
    }
}

static inline uint64_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void start(unsigned threads) {
    state.threads = state.alive = threads;
    if (threads > state.fibers.count) {
        state.fibers.assign(threads, Fiber());
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
        const bool waits_for_work = fiber.started && fiber.done;
        fiber.done = false;
        fiber.watch = Watch();
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
            if (state.running >> (thread / PA_WAVE) & 1 && state.fibers[thread].can_run()) ready[count++] = thread;
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
            state.current = drawn;
            drawn = ready[count - 1];
            resume(state.fibers[state.current]);
        }
        if (state.turns-- == 0) {
            state.running = draw_warps(state.threads / PA_WAVE);
            state.turns = draw() % (32u << draw() % 8);  // up to some tiles
        }
    }
    return state.alive ? GOES_ON : state.block.waiting == 0 ? DONE : DEADLOCK;
}
}  // namespace emu

static Index3 blockIdx, gridDim;
struct ThreadIndex { operator unsigned() const { return emu::state.current; } };
static struct { ThreadIndex x; } threadIdx;
static inline void __syncthreads() { emu::block_or(0); }
static inline int __syncthreads_or(int value) { return emu::block_or(value); }
static inline void __syncwarp() { emu::any_lane(false); }
static inline bool emu_any_lane(bool value) { return emu::any_lane(value); }
// Among `width` neighbouring lanes.
template <class X>
static inline X __shfl_sync(unsigned, X value, int lane, int width = 32) {
    static_assert(sizeof(X) == 4, "a shuffle moves 32 bits");
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = emu::exchange(bits, (emu::state.current & 31 & -width) | (lane & (width - 1)));
    memcpy(&value, &bits, 4);
    return value;
}
template <class X>
static inline X __shfl_xor_sync(unsigned mask, X value, int lane_xor) {
    return __shfl_sync(mask, value, (emu::state.current & 31) ^ lane_xor);
}
static inline void __threadfence() {}
template <class X>
static inline X atomicAdd(X* number, X more) {
    const X before = *number;
    *number += more;
    return before;
}
static inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
    return sum;
}
static inline int __float2int_rn(float x) { return x == x ? (int)nearbyintf(x) : 0; }
// Each rounded on its own, as everything is here: built with -ffp-contract=off.
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __frcp_rn(float x) { return 1.f / x; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float emu_half2float(unsigned short bits) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
static inline unsigned short emu_float2half(float x) {
    const _Float16 half = (_Float16)x;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}

#include "warp_on_cpu.h"
