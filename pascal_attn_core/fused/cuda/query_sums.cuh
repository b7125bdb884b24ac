// The fifth product of the backward pass in one kernel, and its way into memory:
//   product_queries:  O[c][d] += sum_r dS[r][c] * K[r][d]     dS comes from registers, K is staged as it lies
//   add_queries:      sums[c][d] += O[c][d]                   behind what the tiles of keys before have added
// r counts the keys of the tile that stays, c the queries of the one that moves.
//
// A tile of queries is added to by the tiles of keys that see it, one after the other: turns says how many have, and a
// block waits until it is its turn. Blocks take the tiles of keys in the order in which they begin, the first of all
// heads first: a block waits only for such as have begun before it, so that one of them always goes on, whichever blocks
// a device holds at a time.

#define QN (PA_BC / PA_TY)             // queries of O per thread
#define PART_KEYS (PA_BR / PA_PSPLIT)  // keys of dS in shared memory at a time
#define QUERY(i) (t.ty * 4 + ((i) & 3) + ((i) >> 2) * 4 * PA_TY)

#if (QN % 4) || (RM / PA_PSPLIT % 4) || (PART_KEYS % PA_VC) || (PA_VC % 8) || (PA_TX % 8) || (PA_TY % 8)
#error "unsupported geometry of the product for dQ"
#endif

// dS[key][query] with the groups of four queries xor-ed with this: spreads the float4 stores of lanes that hold
// neighbouring groups of keys over all banks.
#define KEY_SWIZZLE(key_group) (((key_group) & 1) << 2)

INLINE void store_grad_scores(float* Ds, const float (&dS)[RM][CN], int part, const Lane& t) {
    FOR(i, RM / PA_PSPLIT) {
        const int ii = part * (RM / PA_PSPLIT) + i;
        float* const row = Ds + (ROW(ii) - part * PART_KEYS) * PA_BC;
        FOR(j, CN / 4) {
            float4 f;
            f.x = dS[ii][4 * j]; f.y = dS[ii][4 * j + 1]; f.z = dS[ii][4 * j + 2]; f.w = dS[ii][4 * j + 3];
            *(float4*)(row + ((t.tx ^ KEY_SWIZZLE(t.ty)) + j * PA_TX) * 4) = f;
        }
    }
}

// y: K, whose `at` is left behind the tile's last chunk. keys: how many the tile has.
INLINE void product_queries(float (&O)[QN][DN], const float (&dS)[RM][CN], Moving& y, int keys, int dim, float* sm,
                            const Lane& t) {
    float* const Ds = sm;            // [PART_KEYS][BC]
    float* const Ks = sm + P_WORDS;  // [COLUMN_BUFFERS][VC][D]
    Raw4 ry[V4];
    FOR(part, PA_PSPLIT) {
        if (part == 0) load_moving(ry, y, 0, keys, dim, t);
        store_grad_scores(Ds, dS, part, t);  // the barrier of the previous part's last chunk lies behind us
        if (part == 0) store_moving(Ks, ry, t);
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < PART_KEYS / PA_VC; ++c) {
            const int r0 = part * PART_KEYS + c * PA_VC;
            const int buffer = (r0 / PA_VC) & 1;
            const bool more = r0 + PA_VC < PA_BR;
            y.at += PA_VC * y.stride;
            if (more) load_moving(ry, y, r0 + PA_VC, keys, dim, t);
            const float* const ds = Ds + c * PA_VC * PA_BC;
            const float* const ks = Ks + buffer * PA_VC * PA_D;
            FOR(k, PA_VC) {
                float a[QN], w[DN];
                FOR(i, QN / 4)
                    *(float4*)&a[4 * i] = *(const float4*)(ds + k * PA_BC + ((t.ty ^ KEY_SWIZZLE(k / 4)) + i * PA_TY) * 4);
                load_columns(w, ks + k * PA_D, t);
                FOR(i, QN) FOR(j, DN) O[i][j] = fmaf(a[i], w[j], O[i][j]);
            }
            if (more) store_moving(Ks + (buffer ^ 1) * PA_VC * PA_D, ry, t);
            if (more) __syncthreads();
        }
    }
}

// out: the sums of the tile's first query; queries: how many the tile has.
INLINE void add_queries(float* out, i64 stride, const float (&O)[QN][DN], float factor, int queries, int dim,
                        const Lane& t) {
    FOR(i, QN) {
        if (QUERY(i) >= queries) continue;
        float* const row = out + QUERY(i) * stride;
        FOR(j, DN4) {
            const int c = j * 4 * PA_TX + t.tx * 4;
            if (PA_PAD && c >= dim) continue;
            float4 f = __ldcg((const float4*)(row + c));
            f.x = fmaf(O[i][4 * j], factor, f.x);
            f.y = fmaf(O[i][4 * j + 1], factor, f.y);
            f.z = fmaf(O[i][4 * j + 2], factor, f.z);
            f.w = fmaf(O[i][4 * j + 3], factor, f.w);
            *(float4*)(row + c) = f;
        }
        FOR(j, DNR) {
            const int c = sum_column(DN4 * 4 + j, t);
            if (PA_PAD && c >= dim) continue;
            row[c] = fmaf(O[i][DN4 * 4 + j], factor, __ldcg(row + c));
        }
    }
}

struct AllGradients : Backward {
    float* sums;  // [B, Hq, Lq, D] of dQ, rows of whole float4: dQ itself where that is float32
    i64 sums_b, sums_h, sums_s;
    u32* turns;  // [B, Hq, Lq], of a tile of queries the number at its first one
    u32* begun;  // how many blocks have
};

// The number of this block among all of the call, which may be launched in parts.
INLINE u32 number_of_block(u32* begun, float* sm, const Lane& t) {
    if (t.tid == 0) sm[0] = bits_to_float(atomicAdd(begun, 1u));
    __syncthreads();
    return float_to_bits(sm[0]);  // a barrier stands before what products stage
}

// The turns of the queries from col0 on, and which is that of the keys from row0 on: how many tiles of keys see these
// queries before.
struct Turn {
    volatile u32* at;
    u32 own;
};

INLINE Turn turn_of(const AllGradients& p, int b, int h, int row0, int col0) {
    Turn turn;
    turn.at = p.turns + sequence_at(p.cu_q, b, p.lb, 1) + h * p.lh + col0;
    turn.own = row0 / PA_BR - max_int(0, col0 + sequence_of(p, b).band.low) / PA_BR;
    return turn;
}

// One thread waits, and passes the turn on, for its block. By PTX's memory model ("Memory Consistency Model") a fence
// speaks for what barriers before it have told its thread, and for what the thread itself has read: behind the next
// barrier the block sees the sums.
INLINE void wait_for_turn(Turn turn) {
#ifdef PA_CPU_EMU
    emu_wait(turn.at, turn.own);
#else
    while (*turn.at != turn.own) {}
#endif
    __threadfence();
}

INLINE void pass_turn(Turn turn) {
    __threadfence();
    *turn.at = turn.own + 1;
}

// What the keys of the tile from row0 on give to dQ of the queries from col0 on: `rows` and `cols` are how many there are.
INLINE void add_to_queries(const AllGradients& p, const float (&dS)[RM][CN], int b, int h, int hk, int row0, int rows,
                           int col0, int cols, float* sm, const Lane& t) {
    float dQ[QN][DN];
    FOR(i, QN) FOR(j, DN) dQ[i][j] = 0.f;
    // Rows behind the last key hold that key's dS, or zeros where its probability is; of K they read zeros.
    const T* const first_key = p.k + sequence_at(p.cu_k, b, p.kb, p.ks) + hk * p.kh + row0 * p.ks;
    Moving keys = moving_rows(first_key, p.ks, p.dim, anew(t));
    __syncthreads();  // dS and Q of the product for dK have been consumed
    product_queries(dQ, dS, keys, rows, p.dim, sm, anew(t));
    if (t.tid == 0) wait_for_turn(turn_of(p, b, h, row0, col0));
    __syncthreads();  // its turn has come
    float* const sums = p.sums + sequence_at(p.cu_q, b, p.sums_b, p.sums_s) + h * p.sums_h + col0 * p.sums_s;
    add_queries(sums, p.sums_s, dQ, p.scale, cols, p.dim, anew(t));
    __syncthreads();  // its sums are there
    if (t.tid == 0) pass_turn(turn_of(p, b, h, row0, col0));
}

// The finished sums of dQ in its own dtype: one warp per query row.
extern "C" __global__ void __launch_bounds__(128) pa_round_query(const AllGradients p) {
    const i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (i64)p.batches * p.heads * p.lq) return;
    const int i = (int)(row % p.lq), h = (int)(row / p.lq % p.heads), b = (int)(row / p.lq / p.heads);
    const float* const sums = p.sums + b * p.sums_b + h * p.sums_h + i * p.sums_s;
    T* const dq = p.dq + b * p.dqb + h * p.dqh + i * p.dqs;
    for (int c = threadIdx.x % 32; c < p.dim; c += 32) dq[c] = to_storage(sums[c]);
}
