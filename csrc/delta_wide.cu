// y = base + scaling · (x Aᵀ) Bᵀ in one launch, for a few hundred to a few thousand rows.
//
// A cluster of 8 blocks owns a tile of up to BM rows of one adapter and group. Block c sums chunk c of D, so that A is read
// once a tile, by all blocks together. Each block adds up an eighth of the tile's rows (their 8 parts come from the
// cluster's shared memory, by the copy engine) and hands their h, split into high and low, to all; then every block takes
// its share of N's columns, for all rows. Two launches move h's parts through the L2 and read A or x once more.
//
// Orders of sums: as in delta.cu.
#include "delta.cuh"

// A column of 32 in shared memory, so that a thread's products are 8 neighbours: 8 q + 2 j + e ↔ matrix j, row 2 q + e.
__device__ __forceinline__ u32 dealt(u32 n) { return (n & ~31u) | (n % 8 / 2 * 8) | (n % 32 / 8 * 2) | (n % 2); }

template <class E, u32 BM, u32 RP, u32 KS, u32 STAGES> struct Wide {
    static constexpr u32 THREADS = BM == 256 ? 512 : 256, WARPS = THREADS / 32, OWN = BM / PARTS;
    static constexpr u32 KP = KS + 8, RPP = RP + 8, SN = 128;   // padded rows: no two of eight in one bank
    static constexpr u32 WR = RP >= 32 ? 2 : 1, WM = WARPS / WR < BM / 16 ? WARPS / WR : BM / 16;  // warps along r and the rows
    static constexpr u32 MT = BM / 16 / WM, NT = RP / 8 / WR;   // a warp's 16 × 8 tiles of h
    static constexpr u32 XM = WARPS / 2, EM = BM / 16 / XM, XN = SN / 2 / 8;  // … of y: half of a step's columns
    static constexpr u32 STEPS = PIECE / KS;                    // stages a piece
    static_assert(NT % 2 == 0 && EM >= 1 && RP <= 128 && STEPS * KS == PIECE);

    struct Stage {
        u16 x[BM][KP], a[RP][KP];
    };
    struct Sums {  // takes the stages' place
        float own[BM][RPP];            // this block's chunk of h
        u16 high[BM][RPP], low[BM][RPP];  // h; past the ranks: a row's scale
    };
    struct Shared {
        union {
            __align__(128) Stage stages[STAGES];
            Sums sums;
        };
        union {
            __align__(128) float parts[PARTS][OWN][RPP];  // the chunks of the rows this block adds up
            u16 b[SN][RPP];
        };
        u64 parts_in, h_in;
        u32 rows[BM];
        u8 active[BM];
        u32 totals[WARPS], slot, first, count;
    };

    // The tile's slot and its tokens in rows[]; slots: rows without an adapter; more: no rows.
    static __device__ __forceinline__ u32 select(const Params &p, u32 tile, Shared &s) {
        const u32 t = threadIdx.x;
        if (p.slots == 1) {
            if (t < BM) {
                const u32 token = tile * BM + t;
                s.rows[t] = token < p.tokens ? token : ~0u;
                s.active[t] = token < p.tokens && slot_of(p, token) == 0;
            }
            __syncthreads();
            return 0;
        }
        const int *starts = p.plan + p.tokens;
        const u32 kinds = p.flags & COPY ? p.slots + 1 : p.slots;
        if (t == 0) s.slot = p.slots + 1, s.count = 0;
        u32 before = 0;
#pragma unroll 1
        for (u32 base = 0; base < kinds; base += THREADS) {
            const u32 slot = base + t;
            u32 begin = 0, count = 0;
            if (slot < kinds) {
                begin = starts[slot];
                count = starts[slot + 1] - begin;
                if (begin > p.tokens || count > p.tokens - begin) count = 0;
            }
            const u32 tiles = (count + BM - 1) / BM;
            u32 upto = tiles;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u32 other = __shfl_up_sync(~0u, upto, d);
                if (t % 32 >= d) upto += other;
            }
            if (t % 32 == 31) s.totals[t / 32] = upto;
            __syncthreads();
            u32 total = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                if (w < t / 32) upto += s.totals[w];
                total += s.totals[w];
            }
            upto += before;
            if (tile < upto && tile >= upto - tiles) {
                const u32 index = tile - (upto - tiles);
                s.slot = slot, s.first = begin + index * BM, s.count = min(BM, count - index * BM);
            }
            before += total;
            __syncthreads();
            if (tile < before) break;
        }
        const u32 slot = s.slot, count = s.count;
        if (t < BM) {
            const u32 token = t < count ? (u32)p.plan[s.first + t] : ~0u;
            s.rows[t] = token < p.tokens ? token : ~0u;
            s.active[t] = token < p.tokens;
        }
        __syncthreads();
        return slot;
    }

    static __device__ __forceinline__ void run(const Params &p) {
#if CLUSTERS
        extern __shared__ __align__(128) u8 memory[];
        Shared &s = *(Shared *)memory;
        const u32 t = threadIdx.x, lane = t % 32, warp = t / 32, me = blockIdx.x, group = blockIdx.z;
        const u32 parts_in = shared_address(&s.parts_in), h_in = shared_address(&s.h_in);
        if (t == 0) {
            barrier_init(parts_in, 1);
            barrier_init(h_in, 1);
            barrier_init_fence();
            barrier_expect(parts_in, p.parts * OWN * RPP * 4);
            barrier_expect(h_in, PARTS * 2 * OWN * RPP * 2);
        }
        __syncwarp();
        cluster_arrive();
        if (p.flags & OVERLAP) {
            let_consumer_start();
            wait_for_producer();
        }
        const u32 slot = select(p, blockIdx.y, s);
        if (slot > p.slots || (slot == p.slots && !(p.flags & COPY))) {
            cluster_wait();
            return;
        }
        const u32 first_column = p.slices ? p.starts[group] : 0, columns = p.slices ? p.starts[group + 1] - first_column : p.columns;
        const u16 *base = p.base ? p.base + group * p.p_g + first_column : nullptr;
        u16 *out = p.out + group * p.o_g + first_column;
        if (slot == p.slots) {  // rows without an adapter
            cluster_wait();
#pragma unroll 1
            for (u32 n = me * SN + t % (SN / 8) * 8; n < columns; n += PARTS * SN)
#pragma unroll 1
                for (u32 row = t / (SN / 8); row < BM; row += THREADS / (SN / 8)) {
                    const u32 token = s.rows[row];
                    if (token != ~0u) *(uint4 *)(out + token * p.o_t + n) = base ? *(const uint4 *)(base + token * p.p_t + n) : uint4{0, 0, 0, 0};
                }
            return;
        }
        const u32 k_first = me * p.chunk, k_size = p.features > k_first ? min(p.chunk, p.features - k_first) : 0;
        u32 rank = p.rank;
        if (p.ranks) rank = min((u32)max(fresh(p.ranks + slot), 0), p.rank);
        const float scaling = fresh(p.scalings + slot);
        const u32 rank16 = (rank + 15) / 16 * 16;

        // This block's chunk of h.
        constexpr u32 ACROSS = KS / 8, DOWN = THREADS / ACROSS, XI = (BM + DOWN - 1) / DOWN, AI = (RP + DOWN - 1) / DOWN;
        const u32 across = t % ACROSS * 8, down = t / ACROSS;
        const u16 *x_from[XI];
#pragma unroll
        for (u32 i = 0; i < XI; ++i) {
            const u32 row = down + i * DOWN, token = row < BM ? s.rows[row] : ~0u;
            x_from[i] = token == ~0u ? nullptr : p.x + token * p.x_t + group * p.x_g + k_first;
        }
        const u16 *a_from = p.a + slot * p.a_l + group * p.a_g + down * p.a_r + k_first;
        auto load_stage = [&](u32 stage) {
            const u32 k = stage * KS + across, x_to = shared_address(&s.stages[stage % STAGES].x[down][across]),
                      a_to = shared_address(&s.stages[stage % STAGES].a[down][across]);
#pragma unroll
            for (u32 i = 0; i < XI; ++i)
                if (x_from[i]) load8(x_to + i * DOWN * KP * 2, x_from[i], k, k_size);
#pragma unroll
            for (u32 i = 0; i < AI; ++i)
                if (down + i * DOWN < rank) load8(a_to + i * DOWN * KP * 2, a_from + i * DOWN * p.a_r, k, k_size);
        };
        const u32 stages = (k_size + KS - 1) / KS, wm = warp / WR, wr = warp % WR;
        const bool shrinks = wm < WM && wr * NT * 8 < rank;
#pragma unroll
        for (u32 i = 0; i < STAGES - 1; ++i) {
            if (i < stages) load_stage(i);
            copies_commit();
        }
        float acc[MT][NT][4] = {}, sum[MT][NT][4] = {};
#pragma unroll 1
        for (u32 stage = 0; stage < stages; ++stage) {
            copies_wait<STAGES - 2>();
            __syncthreads();
            if (stage + STAGES - 1 < stages) load_stage(stage + STAGES - 1);
            copies_commit();
            if (shrinks) {
                const Stage &now = s.stages[stage % STAGES];
                const u32 x_at = shared_address(&now.x[wm * MT * 16 + lane % 16][lane / 16 * 8]);
                const u32 a_at = shared_address(&now.a[wr * NT * 8 + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
                for (u32 k = 0; k < KS; k += 16) {
                    u32 xv[MT][4], av[4];
#pragma unroll
                    for (u32 m = 0; m < MT; ++m) load_matrix4(xv[m], x_at + (m * 16 * KP + k) * 2);
#pragma unroll
                    for (u32 n = 0; n < NT; n += 2) {
                        load_matrix4(av, a_at + (n * 8 * KP + k) * 2);
#pragma unroll
                        for (u32 m = 0; m < MT; ++m) {
                            E::mma(acc[m][n], xv[m], av[0], av[1]);
                            E::mma(acc[m][n + 1], xv[m], av[2], av[3]);
                        }
                    }
                }
                if (stage % STEPS == STEPS - 1 || stage + 1 == stages)
#pragma unroll
                    for (u32 m = 0; m < MT; ++m)
#pragma unroll
                        for (u32 n = 0; n < NT; ++n)
#pragma unroll
                            for (u32 e = 0; e < 4; ++e) sum[m][n][e] += acc[m][n][e], acc[m][n][e] = 0;
            }
        }
        copies_wait<0>();
        __syncthreads();  // the sums take the stages' place
        if (k_size) {
            if (wm < WM)
#pragma unroll
            for (u32 m = 0; m < MT; ++m)
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
#pragma unroll
                    for (u32 n = 0; n < NT; ++n)
                        *(float2 *)&s.sums.own[(wm * MT + m) * 16 + half * 8 + lane / 4][(wr * NT + n) * 8 + lane % 4 * 2] = {sum[m][n][2 * half],
                                                                                                                         sum[m][n][2 * half + 1]};
            bulk_fence();
        }
        __syncthreads();
        cluster_wait();  // all blocks of the cluster have set up their barriers
        if (k_size && t < PARTS)
            send_bulk(remote(shared_address(&s.parts[me][0][0]), t), shared_address(&s.sums.own[t * OWN][0]), OWN * RPP * 4, remote(parts_in, t));

        // Base, on its way while h is put together. A thread's columns of a step: 8 in each half of its warp's 64.
        const u32 xm = warp / 2, column = warp % 2 * (SN / 2) + lane % 4 * 8;
        uint4 kept[EM][2][2];
        auto load_base = [&](u32 n0) {
#pragma unroll
            for (u32 m = 0; m < EM; ++m)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u32 token = s.rows[(xm * EM + m) * 16 + half * 8 + lane / 4];
#pragma unroll
                    for (u32 h = 0; h < 2; ++h) {
                        kept[m][half][h] = {0, 0, 0, 0};
                        if (token != ~0u && n0 + column + h * 32 < columns) kept[m][half][h] = *(const uint4 *)(base + token * p.p_t + n0 + column + h * 32);
                    }
                }
        };
        if (base) load_base(me * SN);

        // h of this block's rows: the parts in order, split into high and low, sent to all.
        barrier_wait(parts_in, 0);
        {
            constexpr u32 QUADS = RP / 4;
#pragma unroll 1
            for (u32 i = t; i < OWN * QUADS; i += THREADS) {
                const u32 row = i / QUADS, c = i % QUADS * 4, place = me * OWN + row;
                float v[4] = {0, 0, 0, 0};
                if (s.active[place]) {
#pragma unroll
                    for (u32 q = 0; q < PARTS; ++q)
                        if (q < p.parts) {
                            const float4 w = *(const float4 *)&s.parts[q][row][c];
                            v[0] += w.x, v[1] += w.y, v[2] += w.z, v[3] += w.w;
                        }
                }
#pragma unroll
                for (u32 e = 0; e < 4; ++e)
                    if (c + e >= rank) v[e] = 0;
                if constexpr (E::SCALED) {
                    float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
                    for (u32 d = QUADS / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
                    const u32 exponent = min(max((__float_as_uint(most) >> 23) & 255, 1u), 253u);
                    const float less = __uint_as_float((254 - exponent) << 23);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) v[e] *= less;
                    if (c == 0) *(float *)&s.sums.high[place][RP] = __uint_as_float(exponent << 23);
                }
                u32 top[4], rest[4];
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    top[e] = E::round(v[e]);
                    const float whole = E::widen(top[e]);
                    rest[e] = E::round(whole == v[e] ? 0.0f : v[e] - whole);
                }
                *(uint2 *)&s.sums.high[place][c] = {top[0] | top[1] << 16, top[2] | top[3] << 16};
                *(uint2 *)&s.sums.low[place][c] = {rest[0] | rest[1] << 16, rest[2] | rest[3] << 16};
            }
            bulk_fence();
        }
        __syncthreads();
        if (t < PARTS) {
            const u32 high = shared_address(&s.sums.high[me * OWN][0]), low = shared_address(&s.sums.low[me * OWN][0]), barrier = remote(h_in, t);
            send_bulk(remote(high, t), high, OWN * RPP * 2, barrier);
            send_bulk(remote(low, t), low, OWN * RPP * 2, barrier);
        }

        // y: this block's columns, 128 at a time. B takes the parts' place.
        const u16 *b = p.b + slot * p.b_l + group * p.b_g + first_column * p.b_n;
        auto load_b = [&](u32 n0) {
#pragma unroll 1
            for (u32 i = t; i < SN * (RP / 8); i += THREADS) {
                const u32 n = i / (RP / 8), r = i % (RP / 8) * 8;
                if (r < rank16 && n0 + n < columns) load8(shared_address(&s.b[dealt(n)][r]), b + (n0 + n) * p.b_n, r, rank);
            }
            copies_commit();
        };
        load_b(me * SN);
        barrier_wait(h_in, 0);
        cluster_arrive();  // what was sent here has been read where it came from
#pragma unroll 1
        for (u32 n0 = me * SN; n0 < columns; n0 += PARTS * SN) {
            if (n0 != me * SN) {
                __syncthreads();
                load_b(n0);
                if (base) load_base(n0);
            }
            copies_wait<0>();
            __syncthreads();
            float y[EM][XN][4] = {};
#pragma unroll
            for (u32 low = 0; low < 2; ++low)
#pragma unroll
                for (u32 k = 0; k < RP; k += 16)
                    if (k < rank16) {
                        u32 hv[EM][4], bv[4];
#pragma unroll
                        for (u32 m = 0; m < EM; ++m) {
                            const u32 row = (xm * EM + m) * 16 + lane % 16, r = k + lane / 16 * 8;
                            load_matrix4(hv[m], shared_address(low ? &s.sums.low[row][r] : &s.sums.high[row][r]));
                        }
#pragma unroll
                        for (u32 n = 0; n < XN; n += 2) {
                            load_matrix4(bv, shared_address(&s.b[warp % 2 * (SN / 2) + n * 8 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]));
#pragma unroll
                            for (u32 m = 0; m < EM; ++m) {
                                E::mma(y[m][n], hv[m], bv[0], bv[1]);
                                E::mma(y[m][n + 1], hv[m], bv[2], bv[3]);
                            }
                        }
                    }
#pragma unroll
            for (u32 m = 0; m < EM; ++m)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u32 row = (xm * EM + m) * 16 + half * 8 + lane / 4, token = s.rows[row];
                    const bool active = s.active[row];
                    if (token == ~0u || (!active && !(p.flags & COPY))) continue;
                    float scale = 1;
                    if constexpr (E::SCALED) scale = *(const float *)&s.sums.high[row][RP];
#pragma unroll
                    for (u32 h = 0; h < 2; ++h) {
                        if (n0 + column + h * 32 >= columns) continue;
                        const u32 old[4] = {kept[m][half][h].x, kept[m][half][h].y, kept[m][half][h].z, kept[m][half][h].w};
                        u32 now[4];
#pragma unroll
                        for (u32 j = 0; j < 4; ++j) {
                            now[j] = 0;
#pragma unroll
                            for (u32 e = 0; e < 2; ++e) {
                                float v = y[m][h * 4 + j][2 * half + e];
                                if constexpr (E::SCALED) v *= scale;
                                const float delta = active ? v * scaling : 0.0f;
                                u32 is = E::round(delta);
                                if (base) {
                                    const u16 was = old[j] >> 16 * e;
                                    is = delta == 0.0f ? was : E::round(fmaf(v, scaling, E::widen(was)));
                                }
                                now[j] |= is << 16 * e;
                            }
                        }
                        *(uint4 *)(out + token * p.o_t + n0 + column + h * 32) = {now[0], now[1], now[2], now[3]};
                    }
                }
        }
        cluster_wait();
#endif
    }
};

// delta_wide_<type>_<rows>_<ranks>, and shared_<the same>: its bytes of shared memory. Without clusters there is none.
#if CLUSTERS
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif
#define WIDE(E, BM, RP, KS, STAGES, BLOCKS)                                                                                   \
    extern "C" __global__ void CLUSTER __launch_bounds__(Wide<E, BM, RP, KS, STAGES>::THREADS, BLOCKS)                        \
        delta_wide_##E##_##BM##_##RP(const __grid_constant__ Params p) {                                                     \
        Wide<E, BM, RP, KS, STAGES>::run(p);                                                                                 \
    }                                                                                                                        \
    extern "C" __device__ const int shared_delta_wide_##E##_##BM##_##RP = sizeof(Wide<E, BM, RP, KS, STAGES>::Shared);

// As launch.WIDE_KERNELS. Columns of D a stage, stages, blocks on a multiprocessor.
#define ALL(E)               \
    WIDE(E, 64, 16, 64, 6, 2)   \
    WIDE(E, 128, 16, 64, 4, 2)  \
    WIDE(E, 64, 64, 64, 4, 2)   \
    WIDE(E, 128, 64, 32, 4, 2)  \
    WIDE(E, 256, 16, 64, 4, 1)  \
    WIDE(E, 256, 64, 64, 3, 1)
ALL(bf16)
ALL(fp16)
