// A variant of a kernel: its source, what of it can be left out, and its functions by name.
// KERNELS(X) lists them as X(name, type of the parameters).
#include "cuda_on_cpu.h"

// A statement of the source that can be left out, by its number.
static int left_out = -1;
extern "C" void leave_out(int place) { left_out = place; }
#define EMU_PLACE(place, ...) { if (left_out != place) { __VA_ARGS__ } }

#include SOURCE_FILE

#define AS_BODY(name, Params) \
    if (!strcmp(kernel, #name)) return [](void* p) { name(*(const Params*)p); };
void (*emu::body_of(const char* kernel))(void*) {
    KERNELS(AS_BODY)
    return nullptr;
}

#define SIZE_OF(name, Params) \
    if (!strcmp(kernel, #name)) return sizeof(Params);
extern "C" unsigned params_size(const char* kernel) {
    KERNELS(SIZE_OF)
    return 0;
}
