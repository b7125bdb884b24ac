// GPGPU-Sim behind five C functions, for tools/simulate.py: loads PTX, copies memory, launches a kernel whose one
// parameter is a struct, and counts cycles.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include "libcuda/cuda_api_object.h"
#include "libcuda/gpgpu_context.h"
#include "src/cuda-sim/cuda-sim.h"
#include "src/cuda-sim/ptx_ir.h"
#include "src/gpgpu-sim/gpu-sim.h"
#include "src/gpgpusim_entrypoint.h"
#include "src/stream_manager.h"

// The simulator reads a member that it never sets: all its memory begins as zeros.
void* operator new(size_t n) {
    void* p = calloc(1, n ? n : 1);
    if (!p) abort();
    return p;
}
void* operator new[](size_t n) { return operator new(n); }
void operator delete(void* p) noexcept { free(p); }
void operator delete[](void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete[](void* p, size_t) noexcept { free(p); }

gpgpu_context* GPGPU_Context();
static gpgpu_context* context;
static gpgpu_sim* gpu;
static symbol_table* symbols;

extern "C" {
int sim_load(const char* ptx_file) {
    context = GPGPU_Context();
    gpu = context->gpgpu_ptx_sim_init_perf();
    symbols = context->gpgpu_ptx_sim_load_ptx_from_filename(ptx_file);
    return gpu && symbols;
}

unsigned long long sim_malloc(unsigned long long bytes) { return (unsigned long long)gpu->gpu_malloc(bytes); }
void sim_to_gpu(unsigned long long to, const void* from, unsigned long long bytes) {
    gpu->memcpy_to_gpu(to, from, bytes);
}
void sim_from_gpu(void* to, unsigned long long from, unsigned long long bytes) {
    gpu->memcpy_from_gpu(to, from, bytes);
}

// Cycles, or -1: there is no such kernel. Registers and shared memory decide how many blocks the multiprocessor holds.
long long sim_launch(const char* name, int registers, int shared_bytes, const unsigned* grid, unsigned threads,
                     const void* params, unsigned size) {
    symbol* found = symbols->lookup(name);
    if (!found) return -1;
    function_info* function = found->get_pc();
    gpgpu_ptx_sim_info info;
    memset(&info, 0, sizeof info);
    info.regs = registers;
    info.smem = shared_bytes;
    info.maxthreads = threads;
    function->set_kernel_info(info);
    kernel_info_t* kernel = new kernel_info_t(dim3(grid[0], grid[1], grid[2]), dim3(threads, 1, 1), function,
                                              gpu->getNameArrayMapping(), gpu->getNameInfoMapping());
    gpgpu_ptx_sim_arg argument(params, size, 0);
    function->add_param_data(0, &argument);
    function->finalize(kernel->get_param_memory());
    if (!function->is_pdom_set()) {
        function->do_pdom();
        function->set_pdom();
    }
    gpu->launch(kernel);
    gpu->init();
    while (gpu->active()) {
        gpu->cycle();
        gpu->deadlock_check();
    }
    const long long cycles = gpu->gpu_sim_cycle;
    gpu->update_stats();
    fflush(stdout);
    return cycles;
}
}
