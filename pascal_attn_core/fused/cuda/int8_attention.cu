// The attention of int8_pack.cuh's words, whose head says what is computed. One block per tile of query rows.

// Part `chunk` of `chunks` of a tile's words, as they lie.
template <int chunks>
INLINE void load_pieces(int4 (&r)[PIECES / chunks], const int* words, int chunk, const Lane& t) {
    FOR(i, PIECES / chunks) r[i] = ((const int4*)words)[(chunk * (PIECES / chunks) + i) * PA_NT + t.tid];
}
template <int chunks>
INLINE void store_pieces(int* to, const int4 (&r)[PIECES / chunks], int chunk, const Lane& t) {
    FOR(i, PIECES / chunks) ((int4*)to)[(chunk * (PIECES / chunks) + i) * PA_NT + t.tid] = r[i];
}

template <int n>
INLINE void load_words(int (&w)[n], const int* at, int step) {
    FOR(i, n / 4) {
        const int4 four = *(const int4*)(at + i * step);
        w[4 * i] = four.x; w[4 * i + 1] = four.y; w[4 * i + 2] = four.z; w[4 * i + 3] = four.w;
    }
}

// Spreads the stores of P over the banks: groups of four rows, of a group of keys, are xor-ed with this.
#define SWIZZLE(g) (((g) & 3) << 1)

// One chunk of S. a, b: the factors of the first step; left there: those of the next chunk's, or behind the last one
// words of Q's, which nobody uses. `first`: the sums begin at MAGIC, one register for all of them.
template <bool first>
INLINE void multiply_rows_chunk(int (&S)[RM][CN], int (&a)[2][RM], int (&b)[2][CN], const int* qs, const int* ks,
                                const int* next) {
    FOR(w, PA_KC) {
#if PA_AHEAD
        load_words(a[w + 1 & 1], w + 1 < PA_KC ? qs + (w + 1) * PA_BR : next, 4 * PA_TY);
        load_words(b[w + 1 & 1], ks + (w + 1) * PA_BC, 4 * PA_TX);
#else
        load_words(a[w & 1], qs + w * PA_BR, 4 * PA_TY);
        load_words(b[w & 1], ks + w * PA_BC, 4 * PA_TX);
#endif
        FOR(i, RM) FOR(j, CN) S[i][j] = __dp4a(a[w & 1][i], b[w & 1][j], first && w == 0 ? MAGIC_BITS : S[i][j]);
    }
}

// S[i][j] as the bits of MAGIC + sum of q k. Meanwhile the words of V's tile travel to shared memory.
INLINE void multiply_rows(int (&S)[RM][CN], const int* Qs, const int* Ks, int* Vs, const int* v, const Lane& t) {
    const int* qs = Qs + t.ty * 4;
    const int* ks = Ks + t.tx * 4;
    int4 piece[PIECES / QK_CHUNKS];
    load_pieces<QK_CHUNKS>(piece, v, 0, t);
    int a[2][RM], b[2][CN];
    load_words(a[0], qs, 4 * PA_TY);
    load_words(b[0], ks, 4 * PA_TX);
    multiply_rows_chunk<true>(S, a, b, qs, ks, QK_CHUNKS > 1 ? qs + PA_KC * PA_BR : qs);
    store_pieces<QK_CHUNKS>(Vs, piece, 0, t);
#pragma unroll 1
    for (int c = 1; c < QK_CHUNKS; ++c) {
        load_pieces<QK_CHUNKS>(piece, v, c, t);
        qs += PA_KC * PA_BR;
        ks += PA_KC * PA_BC;
        multiply_rows_chunk<false>(S, a, b, qs, ks, c + 1 < QK_CHUNKS ? qs + PA_KC * PA_BR : Qs + t.ty * 4);
        store_pieces<QK_CHUNKS>(Vs, piece, c, t);
    }
}

// The same of A. next: V's words of the next chunk; behind the last one any that are not being written.
template <bool first>
INLINE void multiply_columns_chunk(int (&A)[RM][DN], int (&a)[2][RM], int (&b)[2][DN], const int* const (&ps)[4],
                                   const int* vs, const int* next) {
    FOR(g, PA_VC) {
#if PA_AHEAD
        load_words(a[g + 1 & 1], ps[g + 1 & 3] + (g + 1) * PA_BR, 4 * PA_TY);
        load_words(b[g + 1 & 1], g + 1 < PA_VC ? vs + (g + 1) * PA_D : next, 4 * PA_TX);
#else
        load_words(a[g & 1], ps[g & 3] + g * PA_BR, 4 * PA_TY);
        load_words(b[g & 1], vs + g * PA_D, 4 * PA_TX);
#endif
        FOR(i, RM) FOR(j, DN)
            A[i][j] = dp4a_unsigned((u32)a[g & 1][i], b[g & 1][j], first && g == 0 ? FIRST_SUM(i, j) : A[i][j]);
    }
}

// A[i][d] as the bits of MAGIC + sum of p v. Meanwhile the words of the next tile of K travel to shared memory.
INLINE void multiply_columns(int (&A)[RM][DN], const int* Ps, const int* Vs, int* Ks, const int* k, const Lane& t) {
    const int* vs = Vs + t.tx * 4;
    const int* ps[4];
    FOR(g, 4) ps[g] = Ps + (t.ty ^ SWIZZLE(g)) * 4;
    int4 piece[PIECES / PV_CHUNKS];
    load_pieces<PV_CHUNKS>(piece, k, 0, t);
    int a[2][RM], b[2][DN];
    load_words(a[0], ps[0], 4 * PA_TY);
    load_words(b[0], vs, 4 * PA_TX);
    multiply_columns_chunk<true>(A, a, b, ps, vs, PV_CHUNKS > 1 ? vs + PA_VC * PA_D : vs);
    store_pieces<PV_CHUNKS>(Ks, piece, 0, t);
#pragma unroll 1
    for (int c = 1; c < PV_CHUNKS; ++c) {
        load_pieces<PV_CHUNKS>(piece, k, c, t);
        FOR(g, 4) ps[g] += PA_VC * PA_BR;
        vs += PA_VC * PA_D;
        multiply_columns_chunk<false>(A, a, b, ps, vs, c + 1 < PV_CHUNKS ? vs + PA_VC * PA_D : Vs + t.tx * 4);
        store_pieces<PV_CHUNKS>(Ks, piece, c, t);
    }
}

#if PA_MASK
// Of the tiles of the block's rows. Worked out where it is needed: kept, it takes registers of the sums.
INLINE const u8* flags_of(const Int8Attention& p, int row_tile) {
    int b = blockIdx.z + p.first_batch;
    OPAQUE_UNIFORM(b);
    return p.flags + b * p.flags_b + blockIdx.y * p.flags_h + row_tile * p.flags_q;
}

// Scores of the tile that begins at key0 which the mask's bits forbid are -inf.
INLINE void forbid_by_mask(float (&S)[RM][CN], const Int8Attention& p, int row0, int key0, const Lane& t) {
    int b = blockIdx.z + p.first_batch;
    OPAQUE_UNIFORM(b);
    const u32* const bits = p.mask_bits + b * p.bits_b + blockIdx.y * p.bits_h + key0 / 32;
    FOR(i, RM) {
        const u32* const row = bits + min_int(row0 + ROW(i), p.lq - 1) * p.bits_q;
        FOR(j, CN / 4) {
            const u32 four = row[COL(4 * j) / 32] >> COL(4 * j) % 32;
            FOR(c, 4) if (!(four >> c & 1)) S[i][4 * j + c] = NEG_INF;
        }
    }
}
#endif

// The first tile from `tile` on in which a row of the block sees a key by the mask; `end` or more: in none.
INLINE int next_seen(const Int8Attention& p, int row_tile, int tile, int end) {
#if PA_MASK
    const u8* const flags = flags_of(p, row_tile);
    while (tile < end && !(flags[tile] & SEEN)) ++tile;
#endif
    return tile;
}

#define LOAD_ROW_SCALE(i) scale[i] = p.q_scales[q_head * p.lq + row0 + min_int(ROW(i), rows - 1)];
// A number for each column of a thread, of the tile that begins at `at`.
#define LOAD_COLUMNS(to, from) FOR(j, CN / 4) *(float4*)&to[4 * j] = *(const float4*)(p.from + at + COL(4 * j));

#if PA_AMD
#define ANY_OF_WARP(x) ANY_LANE(x)
#else
#define ANY_OF_WARP(x) __any_sync(FULL_WARP, x)
#endif
// Whether the tile has a key whose value has not lost the mean.
INLINE bool has_mean(const float (&inverse)[CN]) {
    u32 bits = 0;
    FOR(j, CN) bits |= float_to_bits(inverse[j]);
    return ANY_OF_WARP((bits & 1) != 0);
}

// Subtracts the mean times the weight of such keys: in the end it is added with the weight of all. What is opaque would
// otherwise be shared with P, or kept, and takes registers.
INLINE void subtract_mean(float (&O)[RM][DN], const float (&S)[RM][CN], const float (&top)[RM], const float (&weight)[RM],
                          const float (&inverse)[CN], const float* mean, const Lane& t) {
    FOR(i, RM) {
        u32 own_top = float_to_bits(top[i]);
        OPAQUE(own_top);
        float of_row = 0.f;
        FOR(j, CN) {
            u32 bits = float_to_bits(inverse[j]);
            OPAQUE(bits);
            of_row = fmaf(exp2_approx(S[i][j] - bits_to_float(own_top)), bits & 1 ? inverse[j] : 0.f, of_row);
        }
        for (int s = 2; s < 2 * PA_TX; s *= 2) of_row += __shfl_xor_sync(FULL_WARP, of_row, s);
        of_row *= -LARGEST * weight[i];
        FOR(j, DN / 4) {
            int d = COL(4 * j);
            OPAQUE(d);
            FOR(c, 4) O[i][4 * j + c] = fmaf(of_row, mean[d + c], O[i][4 * j + c]);
        }
    }
}

#define ROUND_PROB(i, j)                                \
    {                                                   \
        const float x = exp2_approx(S[i][j] - top[i]);  \
        sum[i] = fmaf(x, inverse[j], sum[i]);           \
        S[i][j] = fmaf(x, LARGEST, BYTE_MAGIC);         \
    }
// A word is four keys.
#define STORE_PROBS(i4, j)                                                                              \
    {                                                                                                   \
        u32 word[4];                                                                                    \
        FOR(i, 4) word[i] = word_of(&S[4 * i4 + i][4 * j]);                                             \
        const int g = t.tx + j * PA_TX;                                                                 \
        int4 four;                                                                                      \
        four.x = (int)word[0]; four.y = (int)word[1]; four.z = (int)word[2]; four.w = (int)word[3];     \
        *(int4*)(Ps + g * PA_BR + ((t.ty ^ SWIZZLE(t.tx)) + i4 * PA_TY) * 4) = four;                    \
    }

extern "C" __global__ void __launch_bounds__(PA_NT, PA_MINB) pa_int8_attention(const Int8Attention p) {
    __shared__ __align__(128) int sm[WORDS * PA_BR + 2 * TILE_WORDS + GROUPS * PA_BR];
    int* const Ps = sm;                     // [GROUPS][BR], swizzled
    int* const Vs = Ps + GROUPS * PA_BR;    // [GROUPS][D]
    int* const Ks = Vs + TILE_WORDS;        // [WORDS][BC]
    int* const Qs = Ks + TILE_WORDS;        // [WORDS][BR], the last: nothing behind it may be read
#if PA_AMD
    Lane t = lane_of(threadIdx.x);
#else
    const Lane t = lane_of(threadIdx.x);
#endif
    const int b = blockIdx.z + p.first_batch, h = blockIdx.y;
    // Under a causal rule the last tiles of rows have the most keys: they go first.
    const int row_tile = (p.high < p.lk ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x) + p.first_tile;
    const int row0 = row_tile * PA_BR, rows = p.lq - row0;
    const i64 q_head = (i64)b * p.heads + h, k_head = (i64)b * (p.heads / p.group) + h / p.group;
    const int k_end = min_int(p.lk, min_int(row0 + PA_BR, p.lq) + p.high), end = (k_end + PA_BC - 1) / PA_BC;
    int tile = next_seen(p, row_tile, max_int(0, row0 + p.low) / PA_BC, end);
    const int* k = p.k + (k_head * p.tiles + tile) * TILE_WORDS;
    const int* v = p.v + (k_head * p.tiles + tile) * V_WORDS;

    for (int e = t.tid; e < PA_BR * WORDS / 4; e += PA_NT) {  // Q, transposed
        const int r = e % PA_BR, w = e / PA_BR * 4;
        const int4 four = *(const int4*)(p.q + (q_head * p.lq + row0 + min_int(r, rows - 1)) * WORDS + w);
        Qs[w * PA_BR + r] = four.x; Qs[(w + 1) * PA_BR + r] = four.y;
        Qs[(w + 2) * PA_BR + r] = four.z; Qs[(w + 3) * PA_BR + r] = four.w;
    }
    if (tile < end) FOR(c, PV_CHUNKS) {
        int4 piece[PIECES / PV_CHUNKS];
        load_pieces<PV_CHUNKS>(piece, k, c, t);
        store_pieces<PV_CHUNKS>(Ks, piece, c, t);
    }
    float O[RM][DN], row_max[RM], row_sum[RM], scale[RM];
    FOR(i, RM) {
        FOR(j, DN) O[i][j] = 0.f;
        row_max[i] = LOWEST;
        row_sum[i] = 0.f;
        LOAD_ROW_SCALE(i)
    }
    __syncthreads();
#ifdef PA_HIP
    t.tid = __builtin_amdgcn_readfirstlane(t.tid);  // which takes no register of lanes: all that LANE_ANEW reads
#endif

#pragma unroll 1
    while (tile < end) {
        LANE_ANEW(t)
        PARAMS_ANEW(Int8Attention, p)
#if PA_AMD  // scales are not on their way during the product: there are no registers for them
        int bits[RM][CN];
        multiply_rows(bits, Qs, Ks, Vs, v, t);
        FOR(i, RM) FOR(j, CN) OPAQUE(bits[i][j]);
        FOR(i, RM) LOAD_ROW_SCALE(i)
        int behind_it = tile;
        OPAQUE_UNIFORM(behind_it);
        const i64 at = (k_head * p.tiles + behind_it) * PA_BC;
#else
        const i64 at = (k_head * p.tiles + tile) * PA_BC;
#endif
        float k_scale[CN], v_log[CN];
        LOAD_COLUMNS(k_scale, k_scales)
        LOAD_COLUMNS(v_log, v_logs)
#if !PA_AMD
        int bits[RM][CN];
        multiply_rows(bits, Qs, Ks, Vs, v, t);
#endif
        float S[RM][CN];
        FOR(i, RM) FOR(j, CN) S[i][j] = bits_to_float((u32)bits[i][j]);
#if !PA_AMD
        float inverse[CN];
        LOAD_COLUMNS(inverse, v_scales)
#endif
        FOR(j, CN) {
            const float offset = -MAGIC * k_scale[j];  // exact
            FOR(i, RM) S[i][j] = fmaf(S[i][j], k_scale[j], offset);
        }
        FOR(j, CN) FOR(i, RM) S[i][j] = fmaf(S[i][j], scale[i], v_log[j]);
        const int key0 = tile * PA_BC;
        if (key0 + PA_BC - 1 > row0 + p.high || key0 < row0 + PA_BR - 1 + p.low) {
            KEEP_BRANCH();
            FOR(i, RM) FOR(j, CN) {
                const int distance = key0 + COL(j) - row0 - ROW(i);
                if (distance > p.high || distance < p.low) S[i][j] = NEG_INF;
            }
        }
#if PA_MASK
        if (flags_of(p, row_tile)[tile] & CUT) {
            KEEP_BRANCH();
            forbid_by_mask(S, p, row0, key0, t);
        }
#endif
        float top[RM];  // the tile's maximum
        FOR(i, RM) top[i] = LOWEST;
#if PA_AMD
        FOR(j, CN / 2) FOR(i, RM) top[i] = largest_of_three(top[i], S[i][2 * j], S[i][2 * j + 1]);
#else
        FOR(j, CN) FOR(i, RM) top[i] = fmaxf(top[i], S[i][j]);
#endif
        for (int s = 2; s < 2 * PA_TX; s *= 2) FOR(i, RM) top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], s));

        float weight[RM];  // of the tile against the running maximum
        bool rises = false;
        FOR(i, RM) rises |= top[i] > row_max[i] + SLACK;
        if (ANY_LANE(rises)) {
            KEEP_BRANCH();
            FOR(i, RM) {  // without branches, for which AMD's compiler would copy the sums
                const bool is_higher = top[i] > row_max[i] + SLACK;
                const float fade = is_higher ? exp2_approx(row_max[i] - top[i]) : 1.f;
                row_max[i] = is_higher ? top[i] : row_max[i];
                row_sum[i] *= fade;
                FOR(j, DN) O[i][j] *= fade;
            }
        }
        FOR(i, RM) weight[i] = exp2_approx(top[i] - row_max[i]);

#if PA_AMD
        float inverse[CN];
        {
            LANE_ANEW(t)
            LOAD_COLUMNS(inverse, v_scales)
        }
#endif
        if (has_mean(inverse)) {
            KEEP_BRANCH();
            LANE_ANEW(t)
            subtract_mean(O, S, top, weight, inverse, p.mean + k_head * PA_D, t);
        }

        {  // P, rounded and packed
            LANE_ANEW(t)
            float sum[RM];
            FOR(i, RM) sum[i] = 0.f;
#if PA_AMD  // four columns after the other: all at once would take too many registers
            FOR(j, CN / 4) {
                FOR(c, 4) FOR(i, RM) OPAQUE(S[i][4 * j + c]);
                FOR(c, 4) FOR(i, RM) ROUND_PROB(i, 4 * j + c)
                FOR(i4, RM / 4) STORE_PROBS(i4, j)
            }
#else
            FOR(j, CN) FOR(i, RM) ROUND_PROB(i, j)
#endif
            FOR(i, RM) row_sum[i] = fmaf(sum[i], weight[i], row_sum[i]);
        }
#if !PA_AMD
        FOR(j, CN / 4) FOR(i4, RM / 4) STORE_PROBS(i4, j)
#endif
        __syncthreads();  // P and V's tile are there, K's is consumed

#if PA_AMD
        const int* const first_sums = v + TILE_WORDS;
#endif
        const int next = next_seen(p, row_tile, tile + 1, end);
        if (next < end) k += (i64)(next - tile) * TILE_WORDS;  // behind the last: that one once more, without a branch
        v += (i64)(next - tile) * V_WORDS;
        tile = next;
        int A[RM][DN];
#if PA_AMD
        {
            LANE_ANEW(t)
            load_words(A[0], first_sums + t.tx * 4, 4 * PA_TX);
            FOR(i, RM) FOR(j, DN) A[i][j] = A[0][j];
            multiply_columns(A, Ps, Vs, Ks, k, t);
        }
#else
        multiply_columns(A, Ps, Vs, Ks, k, t);
#endif
        FOR(i, RM) FOR(j, DN) O[i][j] = fmaf(bits_to_float((u32)A[i][j]) - MAGIC, weight[i], O[i][j]);
        __syncthreads();  // K's next tile is there, P and V's are consumed
    }

    FOR(i, RM) {
        LANE_ANEW(t)
        PARAMS_ANEW(Int8Attention, p)
        float sum = row_sum[i];
        for (int s = 2; s < 2 * PA_TX; s *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, s);
        const float factor = sum == 0.f ? 0.f : (1.f / LARGEST) / sum;  // 0: a row without any key
        const float* const mean = p.mean + k_head * PA_D;
        FOR(j, DN) O[i][j] = fmaf(O[i][j], factor, mean[COL(j)]);
        rotate(O[i], t.tx, PA_TX, 2);
        if (ROW(i) >= rows) continue;
        const i64 row = row0 + ROW(i);
        if (p.lse && t.tx == 0)
            p.lse[b * p.lb + h * p.lh + row] =
                sum == 0.f ? NEG_INF : fmaf(row_max[i] + log2f(sum), LN2, p.mean_scores[q_head * p.lq + row]);
        T* const o = p.o + b * p.ob + h * p.oh + row * p.os;
        FOR(j, DN / 4) {
            const int d = COL(4 * j);
            if (d >= p.dim_v) continue;
            float4 f;
            f.x = O[i][4 * j]; f.y = O[i][4 * j + 1]; f.z = O[i][4 * j + 2]; f.w = O[i][4 * j + 3];
            if (sum == 0.f) f.x = f.y = f.z = f.w = 0.f;
            *(Raw4*)(o + d) = to_raw(f);
        }
    }
}
