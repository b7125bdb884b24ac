// x W^T + bias by dp4a: rows of x in 8 bits with a scale for each 32 columns, W in the blocks of a GGUF file as they
// lie. The definition is gguf_definition.py, bit for bit:
//
//   x~[m, k] = code[m, k] * a[m, k / 32]                           (pa_gguf_round)
//   W[n, k]  = d[n, k / 32] * q[n, k] + e[n, k / 32]               as the file has it; Q3_K, Q6_K: a d for each 16
//   of a block: s = sum of code * q, an integer below 2^22
//   sum = fma(round(s * d), a, sum), then sum = fma(e, a * sum of codes, sum)
//
// An accumulator that starts at the bits of M = 1.5 * 2^23 is a float after the dp4a: no conversion. fma(it, d, -M d)
// is s * d rounded once, since 3 d fits 24 bits: d is a float16 times at most an int8.
// Q3_K, Q6_K: v = fma(t0, d0, -M (d0 + d1)), v = fma(t1, d1, v), sum = fma(v, a, sum).
//
// Codes are bytes with a sign: an XOR of the top bit subtracts the zero of a format, so some are so many times q, and d
// as many times smaller. "Chunk": 64 columns, two blocks; in Q6_K blocks b and b + 2, which share their bytes.
//
// Many rows: tiles of 128 rows of x and 64 of the weight, PA_ROWS x 8 outputs of a thread, double buffered, one barrier
// per chunk. Words of x lie in memory as shared memory wants them; words of the weight become bytes on the way there.
// Few rows: a warp takes some rows of the weight, and its lanes share the chunks.
#define BR 128
#define BC 64
#define TX (BC / 8)
#define TY (BR / PA_ROWS)
#define THREADS (TX * TY)
#define CHUNK 16  // words of a row
#define X4 (CHUNK * BR / 4 / THREADS)
#define A_OF_THREAD (2 * BR / THREADS)
#define BAND 8    // tiles of rows that take the columns in step: what they read stays in L2
#define MAGIC 12582912.f
#define MAGIC_BITS 0x4B400000
#define LARGEST_CODE 127.f

#define Q8_0 0
#define Q4_0 1
#define Q4_1 2
#define Q5_0 3
#define Q5_1 4
#define Q4_K 5
#define Q5_K 6
#define Q6_K 7
#define IQ4_NL 8
#define IQ4_XS 9
#define Q3_K 10
#define IS(f) (PA_FORMAT == f)
// Words of the same bytes lie in both blocks of a chunk, else in both halves of a block.
#define IN_BOTH_BLOCKS (IS(Q4_K) || IS(Q5_K) || IS(Q6_K) || IS(Q3_K))
#define HAS_MINIMUM (IS(Q4_1) || IS(Q5_1) || IS(Q4_K) || IS(Q5_K))
#define TWO_SCALES (IS(Q6_K) || IS(Q3_K))
#define BLOCK_BYTES (IS(Q8_0) ? 34 : IS(Q4_0) || IS(IQ4_NL) ? 18 : IS(Q4_1) ? 20 : IS(Q5_0) ? 22 : IS(Q5_1) ? 24 \
                     : IS(Q4_K) ? 144 : IS(Q5_K) ? 176 : IS(Q6_K) ? 210 : IS(IQ4_XS) ? 136 : 110)
// Codes are so many times q.
#define CODE_UNIT (IS(Q4_0) ? 16.f : IS(Q5_0) ? 8.f : IS(Q6_K) ? 4.f : IS(Q3_K) ? 32.f : 1.f)
// Blocks that begin at a multiple of 16 bytes: a thread takes WIDE neighbouring words of one row at a time.
#define WIDE_FORMAT (IS(Q4_K) || IS(Q5_K))
#define WIDE (WIDE_FORMAT ? BC * 8 / THREADS : 1)
#define UNIT_LANES (IN_BOTH_BLOCKS || IS(Q8_0) ? 8 : 4)  // units of bytes of a block, or of a chunk
#define LANES (UNIT_LANES / WIDE)                        // that stage words of one row at a time
#define PITCH (UNIT_LANES == 8 ? BC + 4 : BC + 8)        // of a word's row in shared memory: no bank conflicts
#define COLUMNS (BC * LANES / THREADS)                   // rows of the weight of which a thread stages words
#define UNITS (IN_BOTH_BLOCKS ? COLUMNS : 2 * COLUMNS)
#define SUMS (HAS_MINIMUM ? 2 : 1)
#define SCALES (TWO_SCALES || HAS_MINIMUM ? 3 : 2)

#ifdef PA_CPU_EMU
INLINE const void* at_multiple(const void* p, size_t bytes) { if ((size_t)p % bytes) abort(); return p; }
INLINE u32 load32(const u8* p) { return *(const u32*)at_multiple(p, 4); }
INLINE u32 load16(const u8* p) { return *(const u16*)at_multiple(p, 2); }
INLINE int4 load128(const void* p) { return *(const int4*)at_multiple(p, 16); }
INLINE float2 load_two(const float* p) { return *(const float2*)at_multiple(p, 8); }
INLINE float load_float(const float* p) { return *p; }
#else
// On sm_61 only such loads are cached in L1, and a sector of W is read by two to five instructions.
INLINE u32 load32(const u8* p) { return __ldg((const u32*)p); }
INLINE u32 load16(const u8* p) { return __ldg((const u16*)p); }
INLINE int4 load128(const void* p) { return __ldg((const int4*)p); }
INLINE float2 load_two(const float* p) { return __ldg((const float2*)p); }
INLINE float load_float(const float* p) { return __ldg(p); }
#endif
INLINE float half_at(u32 bits) { return half_to_float((u16)bits); }

// ---- rows of x ------------------------------------------------------------------------------------------------------

#if PA_ROWS == 8
struct GgufRound {
    const void* x;   // [rows, columns], of the type x_kind
    int* words;      // many rows: [tiles][chunks][CHUNK][BR]; few: [rows][chunks][CHUNK]
    float* scales;   // a, then a times the sum of the codes: [tiles][chunks][SUMS][2][BR]; few: [SUMS][rows][chunks][2]
    i64 row_stride;  // in elements
    int rows, columns, chunks;
    int x_kind;      // 0 float32, 1 float16, 2 bfloat16
};

INLINE float element(const void* x, i64 at, int kind) {
    if (kind == 0) return ((const float*)x)[at];
    const u16 bits = ((const u16*)x)[at];
    return kind == 1 ? half_to_float(bits) : bits_to_float((u32)bits << 16);
}

// Where block b lies in the order in which the products take them.
INLINE int place_of(int b) { return IS(Q6_K) ? (b & ~3) | (b & 1) << 1 | (b >> 1 & 1) : b; }

// Word `lane` of eight of a block of x, the block's scale and the sum of its codes. Where it holds a NaN or an
// infinity, all quotients are NaN, which is converted to zero.
INLINE u32 round_word(const GgufRound& p, int row, int block, int lane, float& scale, int& sum) {
    const int first = 32 * block + 4 * lane;
    float v[4];
    u32 most = 0, word = 0;
    FOR(j, 4) {
        v[j] = row < p.rows && first < p.columns ? element(p.x, row * p.row_stride + first + j, p.x_kind) : 0.f;
        const u32 bits = float_to_bits(v[j]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    for (int s = 1; s < 8; s *= 2) {
        const u32 other = __shfl_xor_sync(FULL_WARP, most, s);
        most = other > most ? other : most;
    }
    scale = __fdiv_rn(bits_to_float(most), LARGEST_CODE);
    if (scale < LEAST_SCALE) scale = LEAST_SCALE;
    const float inverse = __frcp_rn(scale);
    sum = 0;
    FOR(j, 4) {
        const int code = __float2int_rn(quotient(v[j], scale, inverse));
        sum += code;
        word |= ((u32)code & 0xffu) << (8 * j);
    }
    for (int s = 1; s < 8; s *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, s);
    return word;
}

// A block of threads for each block of columns and tile of rows.
extern "C" __global__ void __launch_bounds__(256) pa_gguf_round(const GgufRound p) {
    __shared__ __align__(16) int words[8][BR];
    const int tile = blockIdx.y, at = place_of(blockIdx.x), lane = threadIdx.x % 8;
    float* const scales = p.scales + ((i64)tile * p.chunks + at / 2) * (SUMS * 2 * BR) + at % 2 * BR;
    FOR(i, 4) {
        const int local = threadIdx.x / 8 + 32 * i;
        float scale;
        int sum;
        words[lane][local] = (int)round_word(p, tile * BR + local, blockIdx.x, lane, scale, sum);
        if (lane == 0) scales[local] = scale;
        if (HAS_MINIMUM && lane == 0) scales[2 * BR + local] = __fmul_rn(__int2float_rn(sum), scale);
    }
    __syncthreads();
    int* const to = p.words + (((i64)tile * p.chunks + at / 2) * CHUNK + at % 2 * 8) * BR;
    *(int4*)(to + 4 * threadIdx.x) = *(const int4*)(&words[0][0] + 4 * threadIdx.x);
}

// A block of threads for 32 blocks of columns and a row.
extern "C" __global__ void __launch_bounds__(256) pa_gguf_round_few(const GgufRound p) {
    const int block = blockIdx.x * 32 + threadIdx.x / 8, lane = threadIdx.x % 8, row = blockIdx.y;
    float scale;
    int sum;
    const u32 word = round_word(p, row, block, lane, scale, sum);
    if (block >= 2 * p.chunks) return;
    const int at = row * 2 * p.chunks + place_of(block);
    p.words[8 * at + lane] = (int)word;
    if (lane == 0) p.scales[at] = scale;
    if (HAS_MINIMUM && lane == 0) p.scales[p.rows * 2 * p.chunks + at] = __fmul_rn(__int2float_rn(sum), scale);
}
#endif

// ---- words and scales of the weight ---------------------------------------------------------------------------------

struct Raw { u32 a, b, c, d; };  // a unit, as loaded: four bytes of nibbles, and what belongs to them

// What begins at a multiple of two bytes only comes as two halves.
INLINE void load_halves(const u8* p, u32& low, u32& high) { low = load16(p); high = load16(p + 2); }
INLINE u32 joined(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }
INLINE u32 spread(u32 nibble) { return nibble * 0x10204080u; }  // bit i to bit 8 i + 7

// 16 int8 values for the eight nibbles of a word: low ones, high ones.
INLINE void table_of(u32 q, u32& low, u32& high) {
    const u32 t0 = 0xbfad9881u, t1 = 0xf6eaddcfu, t2 = 0x26190d01u, t3 = 0x71594535u;
    u32 found[2];
    FOR(i, 2) {
        const u32 s = q >> (16 * i), of = (0x32103210u | (q & 0x88888888u) >> 1) >> (16 * i);
        found[i] = __byte_perm(__byte_perm(t0, t1, s & 0x7777u), __byte_perm(t2, t3, s & 0x7777u), of & 0x7777u);
    }
    low = __byte_perm(found[0], found[1], 0x6420);
    high = __byte_perm(found[0], found[1], 0x7531);
}

// The first byte of unit `lane` in the codes of a block, or of a chunk.
INLINE int first_byte(int lane) {
    return IS(Q8_0) || IS(Q4_0) || IS(IQ4_NL) ? 2 + 4 * lane : IS(Q4_1) ? 4 + 4 * lane : IS(Q5_0) ? 6 + 4 * lane
         : IS(Q5_1) ? 8 + 4 * lane : 4 * lane;
}

// From a row's first byte to a block of the file. A chunk's second block may not exist: x is zero there, and the first
// one will do.
INLINE u32 offset_of(int blocks, int c, int block) {
    if (IN_BOTH_BLOCKS || IS(IQ4_XS)) return (u32)(c >> 2) * BLOCK_BYTES;
    return (u32)c * (2 * BLOCK_BYTES) + (block && 2 * c + 1 < blocks ? BLOCK_BYTES : 0);
}

// p: a block of the file, and first_byte of the unit.
INLINE Raw load_unit(const u8* p, int c, int block, int lane) {
    Raw r;
#if IN_BOTH_BLOCKS
    const int part = c & 3;
#if IS(Q4_K)
    r.a = load32(p + 16 + 32 * part);
#elif IS(Q5_K)
    r.a = load32(p + 48 + 32 * part);
    r.b = load32(p + 16);
#elif IS(Q6_K)
    load_halves(p + 32 * part, r.a, r.b);
    load_halves(p + 128 + (part >> 1) * 32, r.c, r.d);
#else
    load_halves(p + 32 + (part >> 1) * 32, r.a, r.b);
    load_halves(p, r.c, r.d);
#endif
#elif IS(IQ4_XS)
    r.a = load32(p + 8 + 16 * (2 * (c & 3) + block));
#elif IS(Q4_1) || IS(Q5_1)
    r.a = load32(p);
    if (IS(Q5_1)) r.b = load32(p - 4 - 4 * lane);
#else
    load_halves(p, r.a, r.b);
    if (IS(Q5_0)) load_halves(p - 4 - 4 * lane, r.c, r.d);
#endif
    return r;
}

// Four codes of the first block or half, and of the second one; of Q8_0 there is only the first.
INLINE void unpack(const Raw& r, int c, int lane, u32& low, u32& high) {
#if IS(Q8_0)
    low = joined(r.a, r.b);
#elif IS(Q4_0)
    const u32 q = joined(r.a, r.b) ^ 0x88888888u;
    low = q << 4 & 0xf0f0f0f0u;
    high = q & 0xf0f0f0f0u;
#elif IS(IQ4_NL)
    table_of(joined(r.a, r.b), low, high);
#elif IS(IQ4_XS)
    table_of(r.a, low, high);
#elif IS(Q4_1) || IS(Q4_K)
    low = r.a & 0x0f0f0f0fu;
    high = r.a >> 4 & 0x0f0f0f0fu;
#elif IS(Q5_0)
    const u32 q = joined(r.a, r.b);
    low = (q << 3 & 0x78787878u) | (~spread(r.c >> (4 * lane) & 15) & 0x80808080u);
    high = (q >> 1 & 0x78787878u) | (~spread(r.d >> (4 * lane) & 15) & 0x80808080u);
#elif IS(Q5_1)
    low = (r.a & 0x0f0f0f0fu) | (spread(r.b >> (4 * lane) & 15) >> 3 & 0x10101010u);
    high = (r.a >> 4 & 0x0f0f0f0fu) | (spread(r.b >> (4 * lane + 16) & 15) >> 3 & 0x10101010u);
#elif IS(Q5_K)
    const u32 bits = r.b >> (2 * (c & 3));
    low = (r.a & 0x0f0f0f0fu) | (bits << 4 & 0x10101010u);
    high = (r.a >> 4 & 0x0f0f0f0fu) | (bits << 3 & 0x10101010u);
#elif IS(Q6_K)
    const u32 q = joined(r.a, r.b), bits = (joined(r.c, r.d) ^ 0xaaaaaaaau) << (2 - 2 * (c & 1));
    low = (q << 2 & 0x3c3c3c3cu) | (bits << 4 & 0xc0c0c0c0u);
    high = (q >> 2 & 0x3c3c3c3cu) | (bits & 0xc0c0c0c0u);
#else
    const u32 q = joined(r.a, r.b) >> (4 * (c & 1)), bits = ~joined(r.c, r.d) >> (2 * (c & 3));
    low = (q << 5 & 0x60606060u) | (bits << 7 & 0x80808080u);
    high = (q << 3 & 0x60606060u) | (bits << 6 & 0x80808080u);
#endif
}

// What the scales of a block come from; p: a block of the file.
INLINE int4 load_scales(const u8* p, int c, int block) {
    int4 r;
#if IS(Q4_K) || IS(Q5_K)
    r = load128(p);
#elif IS(Q6_K)
    r.x = (int)load16(p + 208);
    r.y = (int)load16(p + 192 + 2 * ((c & 2) * 2 + (c & 1) + 2 * block));
#elif IS(Q3_K)
    const int j = 2 * (c & 3) + block;
    r.x = (int)load16(p + 108);
    r.y = (int)load16(p + 96 + 2 * (j & 3));
    r.z = (int)load16(p + 104 + 2 * (j & 1));
#elif IS(IQ4_XS)
    r.x = (int)load32(p);
    r.y = (int)load32(p + 4);
#else
    r.x = (int)(IS(Q4_1) || IS(Q5_1) ? load32(p) : load16(p));
#endif
    return r;
}

// d, -M d, and the minimum or the second d, `step` apart.
INLINE void store_scales(float* to, int step, const int4& r, int c, int block) {
    const float d = half_at((u32)r.x & 0xffffu), unit = 1.f / CODE_UNIT;
    const int j = 2 * (c & 3) + block;  // of the eight of a block of 256
#if TWO_SCALES
#if IS(Q6_K)
    const int first = (i8)(r.y & 0xff), second = (i8)(r.y >> 8 & 0xff);
#else
    const int low = r.y >> (j & 4), high = r.z >> (2 * (j >> 1));
    const int first = ((low & 15) | (high & 3) << 4) - 32, second = ((low >> 8 & 15) | (high >> 8 & 3) << 4) - 32;
#endif
    const float one = __fmul_rn(__fmul_rn(d, unit), __int2float_rn(first));
    const float two = __fmul_rn(__fmul_rn(d, unit), __int2float_rn(second));
    to[0] = one;
    to[step] = __fmul_rn(-MAGIC, __fadd_rn(one, two));
    to[2 * step] = two;
#elif IS(Q4_K) || IS(Q5_K)
    const int shift = 8 * (j & 3);
    const u32 low = (u32)r.y >> shift, mid = (u32)r.z >> shift, high = (u32)r.w >> shift;
    const u32 sc = j < 4 ? low & 63 : (high & 15) | (low >> 2 & 48);
    const u32 m = j < 4 ? mid & 63 : (high >> 4 & 15) | (mid >> 2 & 48);
    const float scale = __fmul_rn(d, __int2float_rn((int)sc));
    to[0] = scale;
    to[step] = __fmul_rn(-MAGIC, scale);
    to[2 * step] = -__fmul_rn(half_at((u32)r.x >> 16), __int2float_rn((int)m));
#elif IS(IQ4_XS)
    const int sc = (int)((u32)r.y >> (4 * j) & 15 | ((u32)r.x >> (16 + 2 * j) & 3) << 4) - 32;
    const float scale = __fmul_rn(d, __int2float_rn(sc));
    to[0] = scale;
    to[step] = __fmul_rn(-MAGIC, scale);
#else
    to[0] = __fmul_rn(d, unit);
    to[step] = __fmul_rn(-MAGIC * unit, d);
    if (HAS_MINIMUM) to[2 * step] = half_at((u32)r.x >> 16);
#endif
}

// ---- products -------------------------------------------------------------------------------------------------------

struct GgufLinear {
    const int* x;          // as pa_gguf_round or pa_gguf_round_few writes them
    const float* x_scales;
    const u8* weight;      // [cols][row_bytes]
    const float* bias;     // [cols], or null
    void* out;             // [rows, cols], of the type out_kind
    i64 row_bytes;
    int rows, cols, blocks, chunks;  // blocks of 32 of a row
    int out_kind;          // 0 float32, 1 float16, 2 bfloat16
    int row_tiles, col_tiles, first_tile;
};

INLINE float bias_of(const GgufLinear& p, int n) { return p.bias ? load_float(p.bias + least(n, p.cols - 1)) : 0.f; }

INLINE void store(const GgufLinear& p, int row, int n, float y) {
    if (row >= p.rows || n >= p.cols) return;
    const i64 at = (i64)row * p.cols + n;
    if (p.out_kind == 0) ((float*)p.out)[at] = y;
    else ((u16*)p.out)[at] = p.out_kind == 1 ? float_to_half(y) : float_to_bfloat(y);
}

// ---- many rows ------------------------------------------------------------------------------------------------------

struct Buffer {
    int xs[CHUNK * BR];
    float a[SUMS * 2 * BR];    // scales of x, then times the sums
    int ws[CHUNK * PITCH];
    float d[SCALES * 2 * BC];  // d, -M d, minima or second scales
};

// Columns of a thread whose sums of words there are at a time: where v takes as many, there are no registers for all.
#if TWO_SCALES && (PA_AMD || PA_ROWS == 4)
#define HELD 4
#else
#define HELD 8
#endif

INLINE void get(float (&to)[HELD], const float* from) {
    FOR(h, HELD / 4) *(float4*)&to[4 * h] = *(const float4*)(from + h * 4 * TX);
}

// The sums of words first ... first + count - 1.
INLINE void dot(int (&t)[PA_ROWS][HELD], const int* x, const int* w, int first, int count) {
    FOR(k, count) {
        int a[PA_ROWS], b[HELD];
        FOR(i, PA_ROWS / 4) *(int4*)&a[4 * i] = *(const int4*)(x + (first + k) * BR + i * 4 * TY);
        FOR(j, HELD / 4) *(int4*)&b[4 * j] = *(const int4*)(w + (first + k) * PITCH + j * 4 * TX);
        FOR(i, PA_ROWS) FOR(j, HELD) t[i][j] = __dp4a(a[i], b[j], k ? t[i][j] : MAGIC_BITS);
        FOR(i, PA_ROWS) FOR(j, HELD) IN_STEPS(t[i][j]);
    }
}

// Of columns `col` ... of the thread's.
INLINE void multiply_columns(float (&sums)[PA_ROWS][8], const Buffer& s, int block, int tx, int ty, int col) {
    const int* const x = s.xs + block * 8 * BR + ty * 4;
    const float* const of_rows = s.a + block * BR + ty * 4;
    const int* const w = s.ws + block * 8 * PITCH + tx * 4 + col * TX;
    const float* const d = s.d + block * BC + tx * 4 + col * TX;
    float scale[HELD], offset[HELD], a[PA_ROWS];
    int t[PA_ROWS][HELD];
    dot(t, x, w, 0, TWO_SCALES ? 4 : 8);
    get(scale, d);
    get(offset, d + 2 * BC);
#if TWO_SCALES
    float v[PA_ROWS][HELD];
    FOR(i, PA_ROWS) FOR(j, HELD) v[i][j] = fmaf(bits_to_float((u32)t[i][j]), scale[j], offset[j]);
    FOR(i, PA_ROWS) FOR(j, HELD) IN_STEPS(v[i][j]);
    dot(t, x, w, 4, 4);
    get(scale, d + 4 * BC);
#endif
    FOR(i, PA_ROWS / 4) *(float4*)&a[4 * i] = *(const float4*)(of_rows + i * TY * 4);
    FOR(i, PA_ROWS) FOR(j, HELD) {
#if TWO_SCALES
        offset[j] = v[i][j];
#endif
        float& sum = sums[i][col + j];
        sum = fmaf(fmaf(bits_to_float((u32)t[i][j]), scale[j], offset[j]), a[i], sum);
        IN_STEPS(sum);
    }
#if HAS_MINIMUM
    get(scale, d + 4 * BC);
    FOR(i, PA_ROWS / 4) *(float4*)&a[4 * i] = *(const float4*)(of_rows + 2 * BR + i * TY * 4);
    FOR(i, PA_ROWS) FOR(j, HELD) sums[i][col + j] = fmaf(scale[j], a[i], sums[i][col + j]);
#endif
}

// zero: what no compiler can know to be; else words of x read for some columns would stay in registers for the others.
INLINE void multiply_block(float (&sums)[PA_ROWS][8], const Buffer& s, int block, int tx, int ty, int zero) {
    FOR(i, 8 / HELD) multiply_columns(sums, s, block, tx, ty + i * zero, i * HELD);
}

struct Stage {
    const u8* rows[COLUMNS];  // of the weight: the lane's first byte
    const u8* scale_row;
    const char *x, *a;  // and the thread's words and scales of x
    int tid, lane, blocks;
};

INLINE void store_unit(int* ws, const Raw& r, int c, int block, int lane) {
    u32 low, high;
    unpack(r, c, lane, low, high);
    const int at = IN_BOTH_BLOCKS ? lane : 8 * block + lane;
    ws[at * PITCH] = (int)low;
    if (!IS(Q8_0)) ws[(at + UNIT_LANES) * PITCH] = (int)high;
}

#if WIDE_FORMAT
struct Words { u32 at[WIDE]; };
struct Weight { Words q, high; };
INLINE Words load_wide(const u8* p) {
    Words w;
#ifdef PA_CPU_EMU
    w = *(const Words*)at_multiple(p, 4 * WIDE);
#else
    if (WIDE == 4) {
        const uint4 v = __ldg((const uint4*)p);
        w.at[0] = v.x; w.at[1 % WIDE] = v.y; w.at[2 % WIDE] = v.z; w.at[3 % WIDE] = v.w;
    } else {
        const uint2 v = __ldg((const uint2*)p);
        w.at[0] = v.x; w.at[1 % WIDE] = v.y;
    }
#endif
    return w;
}
INLINE void load_weight(Weight& raw, int4& scales, const Stage& s, int c) {
    const u8* const p = s.rows[0] + offset_of(s.blocks, c, 0);
    raw.q = load_wide(p + (IS(Q5_K) ? 48 : 16) + 32 * (c & 3));
    if (IS(Q5_K)) raw.high = load_wide(p + 16);
    if (s.tid < 2 * BC && !(c & 3))  // once for a block of 256
        scales = load_scales(s.scale_row + offset_of(s.blocks, c, 0), c, 0);
}
INLINE void store_weight(Buffer& to, const Weight& raw, const int4& scales, const Stage& s, int c) {
    FOR(i, WIDE) {
        Raw r;
        r.a = raw.q.at[i];
        r.b = raw.high.at[i];
        store_unit(to.ws + s.tid / LANES, r, c, 0, WIDE * s.lane + i);
    }
    if (s.tid < 2 * BC) store_scales(to.d + s.tid, 2 * BC, scales, c, s.tid / BC);
}
#else
struct Weight { Raw units[UNITS]; };
INLINE void load_weight(Weight& raw, int4& scales, const Stage& s, int c) {
    FOR(i, COLUMNS) {
        if (IN_BOTH_BLOCKS) raw.units[i] = load_unit(s.rows[i] + offset_of(s.blocks, c, 0), c, 0, s.lane);
        else FOR(b, 2) raw.units[2 * i + b] = load_unit(s.rows[i] + offset_of(s.blocks, c, b), c, b, s.lane);
    }
    const int block = s.tid / BC;
    if (s.tid < 2 * BC) scales = load_scales(s.scale_row + offset_of(s.blocks, c, block), c, block);
}
INLINE void store_weight(Buffer& to, const Weight& raw, const int4& scales, const Stage& s, int c) {
    FOR(i, COLUMNS) {
        int* const ws = to.ws + s.tid / LANES + i * (THREADS / LANES);
        if (IN_BOTH_BLOCKS) store_unit(ws, raw.units[i], c, 0, s.lane);
        else FOR(b, 2) store_unit(ws, raw.units[2 * i + b], c, b, s.lane);
    }
    if (s.tid < 2 * BC) store_scales(to.d + s.tid, 2 * BC, scales, c, s.tid / BC);
}
#endif

INLINE void load_x(int4 (&x)[X4], float (&a)[A_OF_THREAD * SUMS], const Stage& s, int c) {
    FOR(i, X4) x[i] = load128(s.x + (u32)c * (CHUNK * BR * 4) + i * (16 * THREADS));
    FOR(i, SUMS) {
        const float* const from = (const float*)(s.a + (u32)c * (SUMS * 2 * BR * 4)) + i * 2 * BR;
        if (A_OF_THREAD == 1) {
            a[i] = load_float(from);
        } else {
            const float2 f = load_two(from);
            a[A_OF_THREAD * i] = f.x; a[A_OF_THREAD * i + A_OF_THREAD - 1] = f.y;
        }
    }
}
INLINE void store_x(Buffer& to, const int4 (&x)[X4], const float (&a)[A_OF_THREAD * SUMS], const Stage& s) {
    FOR(i, X4) *(int4*)(to.xs + 4 * (s.tid + i * THREADS)) = x[i];
    FOR(i, SUMS) {
        float* const at = to.a + i * 2 * BR + A_OF_THREAD * s.tid;
        if (A_OF_THREAD == 1) {
            *at = a[i];
        } else {
            float2 f;
            f.x = a[A_OF_THREAD * i]; f.y = a[A_OF_THREAD * i + A_OF_THREAD - 1];
            *(float2*)at = f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) pa_gguf_linear(const GgufLinear p) {
    __shared__ __align__(16) char buffers[2 * sizeof(Buffer)];
    const int tid = threadIdx.x, tx = (tid >> 1) % TX, ty = (tid & 1) | (tid / (2 * TX)) << 1;
    const int tile = (int)blockIdx.x + p.first_tile, band = tile / (BAND * p.col_tiles);
    const int height = least(BAND, p.row_tiles - band * BAND), within = tile - band * BAND * p.col_tiles;
    const int row_tile = band * BAND + within % height, n0 = within / height * BC;
    Stage s;
    s.tid = tid;
    s.lane = tid % LANES;
    s.blocks = p.blocks;
    FOR(i, COLUMNS) {
        const int n = least(n0 + tid / LANES + i * (THREADS / LANES), p.cols - 1);
        s.rows[i] = p.weight + n * p.row_bytes + first_byte(WIDE * s.lane);
    }
    s.scale_row = p.weight + least(n0 + tid % BC, p.cols - 1) * p.row_bytes;
    s.x = (const char*)(p.x + (i64)row_tile * p.chunks * (CHUNK * BR) + 4 * tid);
    s.a = (const char*)(p.x_scales + (i64)row_tile * p.chunks * (SUMS * 2 * BR) + A_OF_THREAD * tid);
    FOR(i, COLUMNS) OPAQUE_POINTER(s.rows[i]);
    OPAQUE_POINTER(s.scale_row);
    OPAQUE_POINTER(s.x);
    OPAQUE_POINTER(s.a);

    float sums[PA_ROWS][8];
    FOR(i, PA_ROWS) FOR(j, 8) sums[i][j] = 0.f;
    Weight raw;
    int4 scales, x[X4];
    float a[A_OF_THREAD * SUMS];
    load_weight(raw, scales, s, 0);
    load_x(x, a, s, 0);
    store_weight(*(Buffer*)buffers, raw, scales, s, 0);
    store_x(*(Buffer*)buffers, x, a, s);
    int place = 0;
#pragma unroll 1
    for (int c = 1, half = 0;; c += half, half ^= 1) {  // blocks of 32: one copy of the product; c is the next chunk
        const Buffer& now = *(const Buffer*)(buffers + place);
        Buffer& next = *(Buffer*)(buffers + ((int)sizeof(Buffer) - place));
        const bool is_last = c == p.chunks;
        if (!half) __syncthreads();  // the chunk is there; the one before has been consumed
        if (!is_last) {
            if (!half) load_weight(raw, scales, s, c);
            else load_x(x, a, s, c);
        }
        multiply_block(sums, now, half, tx, ty, p.out_kind >> 2);
        if (is_last && half) break;
        if (!is_last) {
            if (!half) store_weight(next, raw, scales, s, c);
            else store_x(next, x, a, s);
        }
        if (half) place = (int)sizeof(Buffer) - place;
    }
    const int first_row = row_tile * BR + ty * 4, first_col = n0 + tx * 4;
    float bias[8];
    FOR(j, 8) bias[j] = bias_of(p, first_col + (j & 3) + (j >> 2) * 4 * TX);
    FOR(i, PA_ROWS) FOR(j, 8) {  // in a loop over rows it would cost moves in that over blocks
        const int row = first_row + (i & 3) + (i >> 2) * 4 * TY;
        store(p, row, first_col + (j & 3) + (j >> 2) * 4 * TX, __fadd_rn(sums[i][j], bias[j]));
    }
}

// ---- few rows -------------------------------------------------------------------------------------------------------

#if PA_ROWS == 8
#define FEW_WARPS 8

// The sixteen words of a chunk of a row of the weight, and d, -M d, minimum or second d of both blocks.
INLINE void unpack_chunk(u32 (&w)[CHUNK], float (&d)[2][3], const GgufLinear& p, const u8* row, int c) {
    FOR(block, IN_BOTH_BLOCKS ? 1 : 2) FOR(lane, UNIT_LANES) {
        const int at = 8 * block + lane;
        u32 high;
        const u8* const unit = row + offset_of(p.blocks, c, block) + first_byte(lane);
        unpack(load_unit(unit, c, block, lane), c, lane, w[at], high);
        if (!IS(Q8_0)) w[at + UNIT_LANES] = high;
    }
    FOR(block, 2) {
        const int4 scales = load_scales(row + offset_of(p.blocks, c, block), c, block);
        store_scales(d[block], 1, scales, c, block);
    }
}

INLINE int dot4(const int4& x, const u32* w, int sum) {
    sum = __dp4a(x.x, (int)w[0], sum);
    sum = __dp4a(x.y, (int)w[1], sum);
    sum = __dp4a(x.z, (int)w[2], sum);
    return __dp4a(x.w, (int)w[3], sum);
}

INLINE float add_block(
    float sum, const int4& first, const int4& second, const u32* w, const float (&d)[3], float a, float e
) {
    int t = dot4(first, w, MAGIC_BITS);
    float v;
    if (TWO_SCALES) {
        v = fmaf(bits_to_float((u32)t), d[0], d[1]);
        v = fmaf(bits_to_float((u32)dot4(second, w + 4, MAGIC_BITS)), d[2], v);
    } else {
        v = fmaf(bits_to_float((u32)dot4(second, w + 4, t)), d[0], d[1]);
    }
    sum = fmaf(v, a, sum);
    return HAS_MINIMUM ? fmaf(d[2], e, sum) : sum;
}

// ROWS rows of x by EACH rows of the weight for each warp. A lane takes every 32nd chunk of a row, as it lies.
template <int ROWS, int EACH>
INLINE void multiply_few(const GgufLinear& p, int4 (&xs)[ROWS][4][32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n0 = (((int)blockIdx.x + p.first_tile) * FEW_WARPS + warp) * EACH;
    const u8* rows[EACH];
    FOR(r, EACH) rows[r] = p.weight + least(n0 + r, p.cols - 1) * p.row_bytes;
    float sums[ROWS][EACH];
    FOR(m, ROWS) FOR(r, EACH) sums[m][r] = 0.f;
#pragma unroll 1
    for (int first = 0; first < p.chunks; first += 32) {
        const int count = least(32, p.chunks - first);
        for (int i = threadIdx.x; i < ROWS * 4 * count; i += 32 * FEW_WARPS) {
            const int m = i / (4 * count), at = i % (4 * count);
            int4 x;
            x.x = x.y = x.z = x.w = 0;
            if (m < p.rows) x = load128(p.x + ((i64)m * p.chunks + first) * CHUNK + 4 * at);
            xs[m][at % 4][at / 4] = x;
        }
        __syncthreads();  // these chunks are there
        const int c = first + lane;
        if (c < p.chunks) FOR(r, EACH) {
            u32 w[CHUNK];
            float d[2][3];
            unpack_chunk(w, d, p, rows[r], c);
            FOR(m, ROWS) {
                if (m >= p.rows) continue;
                const float* const a = p.x_scales + 2 * (m * p.chunks + c);
                const float2 scale = load_two(a);
                float2 sum = scale;
                if (HAS_MINIMUM) sum = load_two(a + 2 * p.rows * p.chunks);
                sums[m][r] = add_block(sums[m][r], xs[m][0][lane], xs[m][1][lane], w, d[0], scale.x, sum.x);
                sums[m][r] = add_block(sums[m][r], xs[m][2][lane], xs[m][3][lane], w + 8, d[1], scale.y, sum.y);
            }
        }
        __syncthreads();  // and have been consumed
    }
    float sum = 0.f;  // lane EACH m + r keeps that of row m with row r of the weight
    FOR(m, ROWS) FOR(r, EACH) {
        for (int s = 16; s; s >>= 1) sums[m][r] = __fadd_rn(sums[m][r], __shfl_xor_sync(FULL_WARP, sums[m][r], s));
        if (lane == m * EACH + r) sum = sums[m][r];
    }
    const int n = n0 + lane % EACH;
    if (lane < ROWS * EACH) store(p, lane / EACH, n, __fadd_rn(sum, bias_of(p, n)));
}

#define PA_FEW(name, ROWS, EACH)                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS, 2) name(const GgufLinear p) {                 \
        __shared__ int4 xs[ROWS][4][32];                                                                    \
        multiply_few<ROWS, EACH>(p, xs);                                                                    \
    }
PA_FEW(pa_gguf_few, 4, 2)
PA_FEW(pa_gguf_some, 16, 1)
#endif
