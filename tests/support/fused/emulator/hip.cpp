// The functions of the HIP runtime that the package calls, with the types that hip_runtime_api.h declares, as a library
// for machines without a GPU: each hands its arguments to one callback. What they mean is decided in ../hip.py.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef int (*Callback)(const char* function, const u64* arguments);
static Callback callback;

#define ANSWER(name, ...) { const u64 arguments[] = {__VA_ARGS__}; return callback(name, arguments); }
#define ADDRESS(x) (u64)(x)

extern "C" {
void answer_with(Callback answer) { callback = answer; }
const char* hipGetErrorString(int code) {
    const char* words = 0;
    const u64 arguments[] = {(u32)code, ADDRESS(&words)};
    callback("hipGetErrorString", arguments);
    return words;
}
int hipInit(u32 flags) ANSWER("hipInit", flags)
int hipRuntimeGetVersion(int* version) ANSWER("hipRuntimeGetVersion", ADDRESS(version))
int hipGetDevice(int* device) ANSWER("hipGetDevice", ADDRESS(device))
int hipSetDevice(int device) ANSWER("hipSetDevice", (u32)device)
int hipThreadExchangeStreamCaptureMode(int* mode) ANSWER("hipThreadExchangeStreamCaptureMode", ADDRESS(mode))
int hipModuleLoadData(void** module, const void* image) ANSWER("hipModuleLoadData", ADDRESS(module), ADDRESS(image))
int hipModuleGetFunction(void** function, void* module, const char* name)
    ANSWER("hipModuleGetFunction", ADDRESS(function), ADDRESS(module), ADDRESS(name))
int hipModuleLaunchKernel(void* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x, u32 block_y, u32 block_z,
                          u32 shared_bytes, void* stream, void** params, void** extra)
    ANSWER("hipModuleLaunchKernel", ADDRESS(function), grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
           ADDRESS(stream), ADDRESS(params), ADDRESS(extra))
}
