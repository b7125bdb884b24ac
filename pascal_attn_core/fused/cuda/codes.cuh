// What kernels of 8-bit codes share.
#define LEAST_SCALE 1e-30f  // of zeros

// What is derived from an opaque pointer is not computed anew from what the pointer was made of.
#if defined(PA_CPU_EMU) || defined(PA_HIP)
#define OPAQUE_POINTER(x)
#else
#define OPAQUE_POINTER(x) asm volatile("" : "+l"(x))
#endif
// AMD's compiler would read all factors of a product before the first sum, and have no registers for them.
#ifdef PA_HIP
#define IN_STEPS(x) OPAQUE(x)
#else
#define IN_STEPS(x)
#endif

INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// x / s, rounded correctly, where that is at least 1/2: with r = 1 / s rounded correctly and q within one unit in the last
// place, q + (x - q s) r rounded once is (Markstein, IBM J. Res. Dev. 34, 1990). Of less, only that it is less.
INLINE float quotient(float x, float s, float r) {
    float q = __fmul_rn(x, r);
    q = fmaf(fmaf(-q, s, x), r, q);
    return fmaf(fmaf(-q, s, x), r, q);
}
