// What fibers.cpp and warp.cpp know of the block that runs.
#pragma once
#include "fibers.h"

#include <setjmp.h>
#include <ucontext.h>

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
    bool started = false;
};
// Of a thread; apart from its fiber, since all threads are asked in each round.
struct Waiting {
    Watch watch;
    bool done = true;
    bool can_run() const { return !done && (!watch.number || watch.is_over()); }
};
struct Group { uint32_t waiting = 0, generation = 0; };  // threads that meet at a barrier
struct Hand {           // of a lane in a meeting of its warp, see warp.cpp
    uint32_t word[6];   // what it lays down
    uint32_t row[4];    // ldmatrix: the 16 bytes at its address
    float sum[8];       // mma: its share of the product
};
// Of a block.
struct State {
    ucontext_t main;
    jmp_buf main_place;
    Array<Fiber> fibers;
    Array<Waiting> waiting;
    Array<unsigned> ready;  // threads that can run
    char* stacks = nullptr;
    Array<Group> warps, waves;
    Array<uint32_t> votes;     // [generation & 1][wave]
    Array<uint32_t> exchange;  // [generation & 1][thread]
    Group block;
    Array<Hand> hands[2];
    unsigned threads = 0, alive = 0, any[2] = {0, 0}, turns = 0;
    uint64_t running = ~0ull;  // the warps that may run now
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};

extern State state;  // of the block that runs now

unsigned meet(Group& group, unsigned size);
}  // namespace emu
