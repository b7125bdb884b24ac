// What the kernels take from CUDA, for AMD's compilers: clang alone brings none of it, HIPRTC brings its own, which is
// put aside so that both make the same code. Set by the host besides the kernels' own macros:
//   PA_WAVES  waves of a SIMD for which the compiler leaves registers
#define PA_HIP 1
#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __align__
#undef __launch_bounds__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(threads, ...) \
    __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(PA_WAVES)))

#define float4 pa_float4
#define float2 pa_float2
#define uint2 pa_uint2
#define int4 pa_int4
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };

struct PaThread { __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_workitem_id_x(); } };
struct PaGroupX { __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_x(); } };
struct PaGroupY { __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_y(); } };
struct PaGroupZ { __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_z(); } };
struct PaGroupsX {
    __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_grid_size_x() / (PA_TX * PA_TY); }
};
struct PaThreads { PaThread x; };
struct PaGroup { PaGroupX x; PaGroupY y; PaGroupZ z; };
struct PaGroups { PaGroupsX x; };
#define threadIdx (PaThreads{})
#define blockIdx (PaGroup{})
#define gridDim (PaGroups{})  // of kernels with PA_TX * PA_TY threads

#define fmaf __builtin_fmaf
#define fmaxf __builtin_fmaxf
#define fabsf __builtin_fabsf
#define log2f __builtin_log2f

static __device__ __forceinline__ void pa_syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
#define __syncthreads pa_syncthreads

// Whether any thread's value is true. It is written again behind at least two barriers.
static __device__ __forceinline__ int pa_syncthreads_or(int value) {
    __shared__ int any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (value) any = 1;
    __syncthreads();
    return __builtin_amdgcn_readfirstlane(any);
}
#define __syncthreads_or pa_syncthreads_or

// Memory order among the lanes of one wave.
static __device__ __forceinline__ void pa_syncwarp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#define __syncwarp pa_syncwarp

// Shuffles stay within 32 lanes, whatever a wave has. The exchanged bit is a constant after unrolling: no address
// register, and no shared memory, is needed.
static __device__ __forceinline__ float pa_shfl_xor(float value, int mask) {
    const int bits = __builtin_bit_cast(int, value);
    int got;
    switch (mask) {
        case 1: got = __builtin_amdgcn_ds_swizzle(bits, 0x041f); break;
        case 2: got = __builtin_amdgcn_ds_swizzle(bits, 0x081f); break;
        case 4: got = __builtin_amdgcn_ds_swizzle(bits, 0x101f); break;
        case 8: got = __builtin_amdgcn_ds_swizzle(bits, 0x201f); break;
        default: got = __builtin_amdgcn_ds_swizzle(bits, 0x401f); break;
    }
    return __builtin_bit_cast(float, got);
}
#define __shfl_xor_sync(lanes, value, mask) pa_shfl_xor(value, mask)

// The value of lane `lane` of `width` neighbouring ones.
static __device__ __forceinline__ float pa_shfl(float value, int lane, int width) {
    const int own = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));  // wave of 32: the high half adds 0
    const int from = (own & -width) | (lane & (width - 1));
    return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(from << 2, __builtin_bit_cast(int, value)));
}
#define __shfl_sync(lanes, value, lane, width) pa_shfl(value, lane, width)
