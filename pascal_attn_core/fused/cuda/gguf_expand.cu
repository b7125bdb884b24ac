// The weights in blocks of a GGUF file as float32, float16 or bfloat16: the definition is gguf_blocks.py, bit for bit.
//
// PA_DTYPE is the dtype of the arithmetic: every step is computed in float32 and rounded to it, which is what torch does
// for float16 and bfloat16. The output is a second rounding. A thread writes four neighbouring weights of a block. Blocks
// begin at any byte.

struct GgufExpand {
    const u8* blocks;
    void* out;
    i64 count;       // of weights, a multiple of four
    int out_kind;    // 0 float32, 1 float16, 2 bfloat16
    int wide_table;  // of IQ4_NL, IQ4_XS: the product of scale and number is not rounded
};

#ifdef PA_CPU_EMU
INLINE int byte_at(const u8* p) { return *p; }
#else
INLINE int byte_at(const u8* p) { return __ldg(p); }
#endif

INLINE float rounded(float x) {
#if PA_DTYPE == 0
    return x;
#elif PA_DTYPE == 1
    return half_to_float(float_to_half(x));
#else
    return bits_to_float((u32)float_to_bfloat(x) << 16);
#endif
}

INLINE float half_at(const u8* p) { return rounded(half_to_float((u16)(byte_at(p) | byte_at(p + 1) << 8))); }
INLINE float product(float a, float b) { return rounded(__fmul_rn(a, b)); }
INLINE int signed_at(const u8* p) { return (i8)byte_at(p); }
INLINE int field(const u8* p, int shift, int bits) { return byte_at(p) >> shift & ((1 << bits) - 1); }

// ---- blocks of 32: weights j to j + 3 of the block at p --------------------------------------------------------------

INLINE void q8_0(const u8* p, int j, int, float (&w)[4]) {
    const float d = half_at(p);
    FOR(i, 4) w[i] = product(d, (float)signed_at(p + 2 + j + i));
}

// Scale, minimum, high bits, nibbles; `bits` and `codes` say at which byte, bits 0 = there are none.
INLINE void of_32(const u8* p, int j, float (&w)[4], int bits, int codes, int zero, bool has_minimum) {
    const float d = half_at(p), m = has_minimum ? half_at(p + 2) : 0.f;
    FOR(i, 4) {
        int q = field(p + codes + j % 16 + i, j / 16 * 4, 4);
        if (bits) q |= field(p + bits + j / 8, j % 8 + i, 1) << 4;
        w[i] = product(d, (float)(q - zero));
        if (has_minimum) w[i] = rounded(__fadd_rn(w[i], m));
    }
}
INLINE void q4_0(const u8* p, int j, int, float (&w)[4]) { of_32(p, j, w, 0, 2, 8, false); }
INLINE void q4_1(const u8* p, int j, int, float (&w)[4]) { of_32(p, j, w, 0, 4, 0, true); }
INLINE void q5_0(const u8* p, int j, int, float (&w)[4]) { of_32(p, j, w, 2, 6, 16, false); }
INLINE void q5_1(const u8* p, int j, int, float (&w)[4]) { of_32(p, j, w, 4, 8, 0, true); }

// Four nibbles from p times a scale, by the table of sixteen signed bytes.
INLINE void looked_up(const u8* p, int shift, float scale, int is_wide, float (&w)[4]) {
    FOR(i, 4) {
        const int q = field(p + i, shift, 4);
        const u32 four = q < 8 ? q < 4 ? 0xbfad9881u : 0xf6eaddcfu : q < 12 ? 0x26190d01u : 0x71594535u;
        const float y = __fmul_rn(scale, (float)(i8)(four >> (q % 4 * 8)));
        w[i] = is_wide ? y : rounded(y);
    }
}
INLINE void iq4_nl(const u8* p, int j, int is_wide, float (&w)[4]) {
    looked_up(p + 2 + j % 16, j / 16 * 4, half_at(p), is_wide, w);
}

// ---- blocks of 256 ---------------------------------------------------------------------------------------------------

INLINE void less(float (&w)[4], float scale, const int (&q)[4], float m) {
    FOR(i, 4) w[i] = rounded(__fsub_rn(product(scale, (float)q[i]), m));
}

INLINE void q2_k(const u8* p, int j, int, float (&w)[4]) {
    const int scale = byte_at(p + j / 16);
    int q[4];
    FOR(i, 4) q[i] = field(p + 16 + j / 128 * 32 + j % 32 + i, j % 128 / 32 * 2, 2);
    less(w, product(half_at(p + 80), (float)(scale & 15)), q, product(half_at(p + 82), (float)(scale >> 4)));
}

INLINE void q3_k(const u8* p, int j, int, float (&w)[4]) {
    const int g = j / 16, low = field(p + 96 + g % 8, g / 8 * 4, 4), high = field(p + 104 + g % 4, g / 4 * 2, 2);
    const float d = product(half_at(p + 108), (float)((low | high << 4) - 32));
    FOR(i, 4) {
        const int two = field(p + 32 + j / 128 * 32 + j % 32 + i, j % 128 / 32 * 2, 2);
        w[i] = product(d, (float)(two + 4 * field(p + j % 32 + i, j / 32, 1) - 4));
    }
}

// Of Q4_K and Q5_K: nibbles from `codes` on, fifth bits from byte 16 on.
INLINE void of_k(const u8* p, int j, float (&w)[4], int codes, bool has_high_bits) {
    const int g = j / 32;
    int scale, m, q[4];
    if (g < 4) {
        scale = byte_at(p + 4 + g) & 63;
        m = byte_at(p + 8 + g) & 63;
    } else {
        const int low = byte_at(p + 8 + g);
        scale = (low & 15) | (byte_at(p + g) >> 2 & 48);
        m = low >> 4 | (byte_at(p + 4 + g) >> 2 & 48);
    }
    FOR(i, 4) {
        q[i] = field(p + codes + j / 64 * 32 + j % 32 + i, g % 2 * 4, 4);
        if (has_high_bits) q[i] |= field(p + 16 + j % 32 + i, g, 1) << 4;
    }
    less(w, product(half_at(p), (float)scale), q, product(half_at(p + 2), (float)m));
}
INLINE void q4_k(const u8* p, int j, int, float (&w)[4]) { of_k(p, j, w, 16, false); }
INLINE void q5_k(const u8* p, int j, int, float (&w)[4]) { of_k(p, j, w, 48, true); }

INLINE void q6_k(const u8* p, int j, int, float (&w)[4]) {
    const float d = product(half_at(p + 208), (float)signed_at(p + 192 + j / 16));
    const int half = j / 128, k = j % 128;
    FOR(i, 4) {
        const int low = field(p + 64 * half + k % 64 + i, k / 64 * 4, 4);
        w[i] = product(d, (float)((low | field(p + 128 + 32 * half + k % 32 + i, k / 32 * 2, 2) << 4) - 32));
    }
}

INLINE void iq4_xs(const u8* p, int j, int is_wide, float (&w)[4]) {
    const int g = j / 32, low = field(p + 4 + g / 2, g % 2 * 4, 4), high = field(p + 2 + g / 4, g % 4 * 2, 2);
    const float d = product(half_at(p), (float)((low | high << 4) - 32));
    looked_up(p + 8 + 16 * g + j % 16, j % 32 / 16 * 4, d, is_wide, w);
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

INLINE void store(const GgufExpand& p, i64 at, const float (&w)[4]) {
    if (p.out_kind == 0) {
        float4 four;
        four.x = w[0]; four.y = w[1]; four.z = w[2]; four.w = w[3];
        *(float4*)((float*)p.out + at) = four;
        return;
    }
    u32 h[4];
    FOR(i, 4) h[i] = p.out_kind == 1 ? float_to_half(w[i]) : float_to_bfloat(w[i]);
    uint2 four;
    four.x = h[0] | h[1] << 16;
    four.y = h[2] | h[3] << 16;
    *(uint2*)((u16*)p.out + at) = four;
}

#define KERNEL(name, weights, bytes)                                                           \
    extern "C" __global__ void __launch_bounds__(256) pa_gguf_##name(const GgufExpand p) {     \
        const i64 at = 4 * ((i64)blockIdx.x * 256 + threadIdx.x);                              \
        if (at >= p.count) return;                                                             \
        float w[4];                                                                            \
        name(p.blocks + at / weights * bytes, (int)(at % weights), p.wide_table, w);           \
        store(p, at, w);                                                                       \
    }
KERNEL(q4_0, 32, 18)
KERNEL(q4_1, 32, 20)
KERNEL(q5_0, 32, 22)
KERNEL(q5_1, 32, 24)
KERNEL(q8_0, 32, 34)
KERNEL(q2_k, 256, 84)
KERNEL(q3_k, 256, 110)
KERNEL(q4_k, 256, 144)
KERNEL(q5_k, 256, 176)
KERNEL(q6_k, 256, 210)
KERNEL(iq4_nl, 32, 18)
KERNEL(iq4_xs, 256, 136)
