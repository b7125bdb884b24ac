// The few functions of the CUDA driver that the package calls, as a library for machines without a GPU: it accepts
// modules that begin with an ELF head and counts what is asked of it. Never shows a kernel to be right.
#include <atomic>
#include <cstring>
#include <mutex>

typedef int Result;
static std::atomic<int> loads{0}, launches{0}, depth{0}, overlapping{0}, last_x{0}, last_threads{0};
static std::atomic<void*> last_stream{nullptr};
static char first_bytes[16];

extern "C" {
Result cuInit(unsigned) { return 0; }
Result cuGetErrorString(Result, const char** words) { *words = "invalid kernel image"; return 0; }
Result cuDeviceGet(int* device, int index) { *device = index; return 0; }
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(long)(1000 + device); return 0; }
Result cuCtxPushCurrent_v2(void*) { ++depth; return 0; }
Result cuCtxPopCurrent_v2(void** context) { *context = nullptr; --depth; return 0; }
Result cuThreadExchangeStreamCaptureMode(int* mode) { *mode = 0; return 0; }
Result cuModuleLoadData(void** module, const void* image) {
    ++loads;
    if (memcmp(image, "\x7f" "ELF", 4)) return 200;  // CUDA_ERROR_INVALID_IMAGE
    *module = (void*)1;
    return 0;
}
Result cuModuleGetFunction(void** function, void*, const char* name) {
    *function = (void*)name;
    return strncmp(name, "pa_", 3) ? 500 : 0;
}
Result cuLaunchKernel(void*, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                      void* stream, void** params, void**) {
    ++launches;
    last_x = (int)x;
    last_threads = (int)threads;
    last_stream = stream;
    memcpy(first_bytes, params[0], sizeof(first_bytes));
    return depth > 0 ? 0 : 201;  // no current context: CUDA_ERROR_INVALID_CONTEXT
}
int fake_loads() { return loads; }
int fake_launches() { return launches; }
int fake_depth() { return depth; }
int fake_last_x() { return last_x; }
int fake_last_threads() { return last_threads; }
void* fake_last_stream() { return last_stream; }
const char* fake_first_bytes() { return first_bytes; }
}
