// What fibers.cpp and warp.cpp know of the block that runs.
#pragma once
#include "fibers.h"

#include <ucontext.h>

namespace emu {
constexpr size_t STACK = 64 << 10;
constexpr uint64_t ALL_LANES = PA_WAVE == 64 ? ~0ull : 0xffffffffull;
// Zeros, or copies of one item; what it held is lost. It lives as long as the library.
template <class X>
struct Array {
    X* items = nullptr;
    size_t count = 0, room = 0;
    X& operator[](size_t i) { return items[i]; }
    X* begin() { return items; }
    X* end() { return items + count; }
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
// A thread's place on a stack of its own, and jumps from one to another. swapcontext asks the kernel for the signal mask
// each time, which is most of its cost: it serves other processors, and the address sanitizer, which knows nothing else.
// A jump is no call: the processor would predict its return wrongly.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
struct Fiber {
    void *next = nullptr, *stack = nullptr, *frame = nullptr;  // the next instruction; rsp and rbp there
    bool waits_for_work = false;
    void begin(void (*entry)(), char* memory) {
        next = (void*)entry;
        stack = memory + STACK - 64 - 8;  // as after a call
    }
    __attribute__((always_inline)) void jump(Fiber& other) {
        Fiber *from = this, *to = &other;
        asm volatile(
            "leaq 1f(%%rip), %%rax\n\tmovq %%rax, (%0)\n\tmovq %%rsp, 8(%0)\n\tmovq %%rbp, 16(%0)\n\t"
            "movq 8(%1), %%rsp\n\tmovq 16(%1), %%rbp\n\tjmpq *(%1)\n1:"
            : "+D"(from), "+S"(to)
            :
            : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0",
              "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
              "xmm14", "xmm15");
    }
};
#else
struct Fiber {
    ucontext_t context;
    bool waits_for_work = false;
    void begin(void (*entry)(), char* memory) {
        getcontext(&context);
        context.uc_stack.ss_sp = memory;
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    __attribute__((noipa)) void jump(Fiber& other) { swapcontext(&context, &other.context); }
};
#endif
// A counter in memory that must have reached `wanted`.
struct Watch {
    const volatile uint32_t* number;
    uint32_t wanted;
    bool is_over() const { return (int32_t)(*number - wanted) >= 0; }
};
// The lanes that execute together, as masks.
struct Wave {
    uint64_t able = 0;      // can run
    uint64_t watching = 0;  // wait for a counter
};
struct Group { uint32_t waiting = 0, generation = 0; };  // threads that meet at a barrier
struct Hand {           // of a lane in a meeting of its warp, see warp.cpp
    uint32_t word[16];  // what it lays down
    uint32_t row[4];    // ldmatrix: the 16 bytes at its address
    float sum[8];       // mma: its share of the product
};
// Of a block.
struct State {
    Fiber main;
    Array<Fiber> fibers;
    Array<Watch> watches;   // of each thread, the last one
    Array<Wave> of_lanes;
    Array<unsigned> ready;  // waves that can run
    char* stacks = nullptr;
    Array<Group> warps, waves;
    Array<uint32_t> votes;     // [generation & 1][wave]
    Array<uint32_t> exchange;  // [generation & 1][thread]
    Group block;
    Array<Hand> hands[2];
    unsigned threads = 0, alive = 0, any[2] = {0, 0}, turns = 0;
    uint64_t running = ~0ull;  // the waves that may run now
    bool has_met = false;      // a meeting is over: the wave's turn is, too
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};

extern State state;  // of the block that runs now
extern uint64_t random_state;

static inline uint64_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

// One of these lanes, at random.
static inline unsigned draw_lane(uint64_t lanes) {
    const unsigned first = (unsigned)(draw() >> 40) % PA_WAVE;
    const uint64_t behind = lanes >> first;
    return behind ? first + __builtin_ctzll(behind) : __builtin_ctzll(lanes);
}

// This thread cannot go on, or its wave's turn is over: another lane of the wave does, if one can, drawn at random, else
// those who draw waves.
static inline __attribute__((always_inline)) void leave() {
    Fiber& mine = state.fibers[current];
    const unsigned wave = current / PA_WAVE;
    const uint64_t able = state.has_met ? 0 : state.of_lanes[wave].able;
    Fiber* next = &state.main;
    if (able) {
        current = wave * PA_WAVE + draw_lane(able);
        next = &state.fibers[current];
    }
    mine.jump(*next);
}

// Returns once so many lanes have called it, of which this thread's is one: those of a warp, a wave or the block.
static inline __attribute__((always_inline)) void meet(Group& group, unsigned size) {
    const unsigned lane = current % PA_WAVE, wave = current / PA_WAVE;
    if (++group.waiting < size) {
        state.of_lanes[wave].able &= ~(1ull << lane);
    } else {
        group.waiting = 0;
        ++group.generation;
        if (size == 32) {
            state.of_lanes[wave].able |= 0xffffffffull << lane / 32 * 32;
        } else if (size == PA_WAVE) {
            state.of_lanes[wave].able = ALL_LANES;
        } else {
            for (Wave& each : state.of_lanes) each.able = ALL_LANES;
        }
        state.has_met = true;
    }
    leave();
}
}  // namespace emu
