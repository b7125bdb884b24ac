// CUDA's names for kernel source that fibers.cpp runs on a CPU.
#pragma once
#include "fibers.h"

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
struct alignas(16) uint4 { unsigned x, y, z, w; };

__attribute__((used)) __shared__ char emu_a_kernel_may_have_none[128];

struct ThreadIndex { operator unsigned() const { return emu::current; } };
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
    bits = emu::exchange(bits, (emu::current & 31 & -width) | (lane & (width - 1)));
    memcpy(&value, &bits, 4);
    return value;
}
template <class X>
static inline X __shfl_xor_sync(unsigned mask, X value, int lane_xor) {
    return __shfl_sync(mask, value, (emu::current & 31) ^ lane_xor);
}
static inline void __threadfence() { emu::fence(); }
template <class X>
static inline X atomicAdd(X* number, X more) {
    const X before = *(volatile X*)number;
    *(volatile X*)number = before + more;
    return before;
}
template <class X>
static inline X __ldcg(const X* at) { return *at; }
static inline void emu_wait(volatile uint32_t* counter, uint32_t n) { emu::wait_for(counter, n); *counter; }
static inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
    return sum;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = a | (uint64_t)b << 32;
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= (unsigned)(both >> 8 * (selector >> i / 2 & 7) & 255) << i;
    return r;
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
