// What a kernel's source on a CPU shares with fibers.cpp and warp.cpp, which run it: these are compiled once, and each
// variant of a kernel is linked to them.
#pragma once
#ifndef PA_WAVE
#define PA_WAVE 32
#endif
#undef _FORTIFY_SOURCE  // it holds a jump to another stack for an error
// Hundreds of kernels are compiled: the headers of C alone take less time.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS 1
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct Index3 { unsigned x, y, z; };

// The shared memory of the block that runs now: a section of the library.
extern "C" char __start_shared_memory[] __attribute__((visibility("hidden")));
extern "C" char __stop_shared_memory[] __attribute__((visibility("hidden")));

#pragma GCC visibility push(hidden)
extern Index3 blockIdx, gridDim;

namespace emu {
extern unsigned current;  // the thread that runs

// What the threads of a block or the lanes of a warp do as one; each returns when all of them have called it.
int block_or(int value);
// Whether any lane of this thread's wave has a true value.
bool any_lane(bool value);
// The value of another lane of this thread's warp.
uint32_t exchange(uint32_t value, unsigned lane);
// This thread goes on once the counter has reached `wanted`.
void wait_for(const volatile uint32_t* counter, uint32_t wanted);

// races.cpp: of the thread that runs, where a kernel is built to find races; else nothing.
#ifdef PA_RACES
void begin_races(size_t blocks, unsigned of_block);
bool has_races();
void fence();
void arrive(unsigned group, unsigned slot, bool is_first);
void depart(unsigned group, unsigned slot);
void note(const void* begin, unsigned bytes, bool writes);
#else
static inline void begin_races(size_t, unsigned) {}
static inline bool has_races() { return false; }
static inline void fence() {}
static inline void arrive(unsigned, unsigned, bool) {}
static inline void depart(unsigned, unsigned) {}
static inline void note(const void*, unsigned, bool) {}
#endif

// warp.cpp; what they give is said where kernels call them, in warp_on_cpu.h.
unsigned ballot(bool vote);
void ldmatrix(uint32_t* r, uint32_t address, int blocks, bool is_transposed);
// Counts the passes of shared memory when the lanes of a warp load 16 bytes each, at these addresses.
void count_passes_of_16(uint32_t address);
void mma_m16n8k8(float* c, const uint32_t* a, uint32_t b);
void mma_m8n8k4(float* c, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1, bool a_by_rows, bool b_by_rows);
void wmma(float* c, const uint32_t* a, const uint32_t* b, int generation, bool is_bfloat);

// A kernel of this library; null if it has none of this name.
void (*body_of(const char* kernel))(void*);
}  // namespace emu
#pragma GCC visibility pop
