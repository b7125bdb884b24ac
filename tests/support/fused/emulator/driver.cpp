// The functions of the CUDA driver that the package calls, with the types that cuda.h declares, as a library for
// machines without a GPU: each hands its arguments to one callback. What they mean is decided in ../driver.py.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef int (*Callback)(const char* function, const u64* arguments);
static Callback callback;

#define ANSWER(name, ...) { const u64 arguments[] = {__VA_ARGS__}; return callback(name, arguments); }
#define ADDRESS(x) (u64)(x)

extern "C" {
void answer_with(Callback answer) { callback = answer; }
int cuInit(u32 flags) ANSWER("cuInit", flags)
int cuGetErrorString(int code, const char** words) ANSWER("cuGetErrorString", (u32)code, ADDRESS(words))
int cuDeviceGet(int* device, int index) ANSWER("cuDeviceGet", ADDRESS(device), (u32)index)
int cuDevicePrimaryCtxRetain(void** context, int device) ANSWER("cuDevicePrimaryCtxRetain", ADDRESS(context), (u32)device)
int cuCtxPushCurrent_v2(void* context) ANSWER("cuCtxPushCurrent_v2", ADDRESS(context))
int cuCtxGetCurrent(void** context) ANSWER("cuCtxGetCurrent", ADDRESS(context))
int cuCtxPopCurrent_v2(void** context) ANSWER("cuCtxPopCurrent_v2", ADDRESS(context))
int cuThreadExchangeStreamCaptureMode(int* mode) ANSWER("cuThreadExchangeStreamCaptureMode", ADDRESS(mode))
int cuModuleLoadData(void** module, const void* image) ANSWER("cuModuleLoadData", ADDRESS(module), ADDRESS(image))
int cuModuleGetFunction(void** function, void* module, const char* name)
    ANSWER("cuModuleGetFunction", ADDRESS(function), ADDRESS(module), ADDRESS(name))
int cuFuncSetAttribute(void* function, int attribute, int value)
    ANSWER("cuFuncSetAttribute", ADDRESS(function), (u32)attribute, (u32)value)
int cuLaunchKernel(void* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x, u32 block_y, u32 block_z,
                   u32 shared_bytes, void* stream, void** params, void** extra)
    ANSWER("cuLaunchKernel", ADDRESS(function), grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
           ADDRESS(stream), ADDRESS(params), ADDRESS(extra))
}
