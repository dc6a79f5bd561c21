// y = base + scaling · (x Aᵀ) Bᵀ in one launch, for batches of few rows, where latency is everything.
//
// A cluster of 8 blocks owns a tile of rows: up to BM tokens of one adapter, in one group (or in all of them, `merged`).
// Block c sums chunk c of D; its part of h goes to every block through distributed shared memory; every block adds the
// parts in order and then takes its share of N's columns. A cluster of 16 splits r in two as well (RS = 2); several
// clusters may share out N, each with an h of its own (`spread`).
//
// The order of every sum is that of the Triton kernels (kernels/shrink.py, kernels/expand.py), so a row has the same bits
// here and there: pieces of 128 columns of D, each from zero upwards in steps of 16, are added in order to their chunk's
// sum (launch.chunk_of), chunks in order to h; h = high + low; all of high before all of low; one fma with the base.
//
// With programmatic dependent launch the block runs ahead of the kernel before it: it guesses its rows from what memory
// holds now, fetches what they need into the L2, and once that kernel has ended reads everything again and compares.
#include "tile.cuh"

static constexpr u32 THREADS = 256, WARPS = 8;
static constexpr u32 PARTS = 8, MAX_SLICES = 8;         // chunks of D, as launch.PARTS; slices of N
static constexpr u32 PIECE = 128;                       // columns of D that are summed from zero upwards, as in kernels/shrink.py
static constexpr u32 PIECES = 4, WIDE = PIECE * PIECES; // columns of D a stage: a warp a piece
static constexpr u32 SCAN_MOST = THREADS;               // most tokens: ids are sorted with a thread a token
static constexpr u32 IDS64 = 1, COPY = 2, OVERLAP = 4;  // as in ops/delta_cuda.py

struct Params {
    const u16 *x, *a, *b, *base; // base may be null, or out
    u16 *out;
    const void *ids;
    const int *ranks; // may be null
    const float *scalings;
    i64 ids_stride;
    i64 x_t, x_g, a_l, a_g, a_r, b_l, b_g, b_n, p_t, p_g, o_t, o_g; // strides in elements; those of d, r and n are 1
    u32 tokens, slots, features, columns, rank;
    u32 chunk, parts; // columns of a chunk of D, and how many chunks there are
    u32 merged;       // log2 of the groups whose rows share a tile (they share A)
    u32 spread;       // clusters that share out N, each with an h of its own
    u32 flags;
    u32 slices;                 // 0, or the number of slices of N
    u32 starts[MAX_SLICES + 1]; // where each slice starts
};

// Read past the L1: the kernel before may have written these since they were guessed.
template <class V> __device__ __forceinline__ V fresh(const V *from);
template <> __device__ __forceinline__ i64 fresh(const i64 *from) {
    i64 v;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
template <> __device__ __forceinline__ int fresh(const int *from) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
template <> __device__ __forceinline__ float fresh(const float *from) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}
template <> __device__ __forceinline__ u32 fresh(const u32 *from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ u32 slot_of(const Params &p, u32 token) {
    const i64 id = p.flags & IDS64 ? fresh((const i64 *)p.ids + token * p.ids_stride) : fresh((const int *)p.ids + token * p.ids_stride);
    return id >= 0 && id < p.slots ? (u32)id : p.slots;
}

// 8 elements of a row from column `column` on; those past `valid` columns are zeros.
__device__ __forceinline__ void load8(u32 to, const u16 *row, u32 column, u32 valid) {
    const u32 there = valid > column ? min(valid - column, 8u) : 0;
    copy16(to, there ? row + column : row, 2 * there);
}

struct Selection {
    __align__(16) u32 slots[SCAN_MOST];
    u32 firsts[WARPS];
    u32 slot, first;
};

// Sort the tokens by slot (a thread a token): the slot of the cluster's tile, its tokens in rows[], and their number.
__device__ __forceinline__ u32 select(const Params &p, u32 tile, u32 height, u32 *rows, Selection &s, u32 &count) {
    const u32 t = threadIdx.x, n = p.tokens, mine = t < n ? slot_of(p, t) : ~0u;
    s.slots[t] = mine;
    if (t == 0) s.slot = p.slots + 1, s.first = 0;
    __syncthreads();
    u32 position = 0; // among the rows of its slot
    const uint4 *four = (const uint4 *)s.slots;
#pragma unroll 1
    for (u32 i = 0; 4 * i < min(n, (t & ~31u) + 32); ++i) {
        const uint4 v = four[i];
        position +=
            (4 * i < t && v.x == mine) + (4 * i + 1 < t && v.y == mine) + (4 * i + 2 < t && v.z == mine) + (4 * i + 3 < t && v.w == mine);
    }
    const bool first = t < n && (position & (height - 1)) == 0 && (mine < p.slots || (p.flags & COPY)); // a tile starts here
    const u32 votes = __ballot_sync(~0u, first);
    if (t % 32 == 0) s.firsts[t / 32] = __popc(votes);
    __syncthreads();
    u32 number = __popc(votes & ((1u << t % 32) - 1));
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) number += w < t / 32 ? s.firsts[w] : 0;
    if (first && number == tile) s.slot = mine, s.first = position;
    __syncthreads();
    const bool in = t < n && mine == s.slot && position - s.first < height;
    if (in) rows[position - s.first] = t;
    count = __syncthreads_count(in);
    return s.slot;
}

// Fetch `rows` rows of `bytes` bytes, `stride` elements apart, into the L2; the block's threads share the lines.
__device__ __forceinline__ void prefetch(const u16 *from, i64 stride, u32 rows, u32 bytes) {
    const u32 lines = (bytes + 127) / 128;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < rows * lines; i += THREADS) {
        const u32 row = i / lines;
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8 *)(from + row * stride) + (i - row * lines) * 128));
    }
}

// AHEAD: so many of a block's items have their part of B and base under way while h is made.
template <class E, u32 BM, u32 RP, u32 RS, u32 SN, u32 STAGES, u32 AHEAD> struct Kernel {
    static constexpr u32 CS = CLUSTERS ? PARTS * RS : 1, RL = CLUSTERS ? RP / RS : RP;
    static constexpr u32 WP = WIDE + 8, RPP = RP + 8; // padded rows: no two of eight in one bank
    static constexpr u32 MT = BM / 16, NT = RL / 16;  // a warp's 16 × 8 tiles of h: all rows, half of r
    static constexpr u32 XN = SN / WARPS / 8;         // … and of y
    static constexpr u32 BLOCK_R = RP < 128 ? RP : 128, BLOCKS_R = RP / BLOCK_R, KR = BLOCK_R / 16; // as launch.rank_block
    static_assert(XN >= 1 && NT >= 1);

    struct __align__(128) Shared {
        float pieces[PIECES][BM][RL];        // sums of this block's pieces
        float running[BM][RL];               // … of those before them
        float parts[PARTS][RP / RL][BM][RL]; // the cluster's chunks
        u16 high[BM][RPP], low[BM][RPP];
        float scale[BLOCKS_R][BM];
        u64 arrived;
        u32 rows[BM];
        u8 active[BM];
        Selection selection;
        __align__(128) u16 stages[STAGES][BM + RL][WP]; // last: a chunk of D that is one stage leaves no room for the others
    };
    static constexpr u32 ONE_STAGE = sizeof(Shared) - (STAGES - 1) * sizeof(u16) * (BM + RL) * WP;

    // One block of columns: its group in the tile, where it starts, how wide it is.
    struct Columns {
        u32 group, size;
        const u16 *b, *base;
        u16 *out;
        __device__ __forceinline__ Columns(const Params &p, u32 slot, u32 item, u32 blocks_n, u32 group0) {
            group = p.merged ? item / blocks_n : 0;
            const u32 n0 = (item - group * blocks_n) * SN, g = group0 + group;
            const u32 start = p.slices ? p.starts[g] + n0 : n0, end = p.slices ? p.starts[g + 1] : p.columns;
            size = min(SN, end - start);
            b = p.b + slot * p.b_l + g * p.b_g + start * p.b_n;
            base = p.base + g * p.p_g + start;
            out = p.out + g * p.o_g + start;
        }
    };

    static __device__ __forceinline__ void run(const Params &p) {
        extern __shared__ __align__(128) u8 memory[];
        Shared &s = *(Shared *)memory;
        const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
        const u32 me = CLUSTERS ? blockIdx.x : 0, r_first = me / PARTS * RL;
        u32 chunk = me % PARTS;
        const u32 height = BM >> p.merged, shift = (BM == 16 ? 4 : 5) - p.merged;
#if CLUSTERS
        const u32 arrived = shared_address(&s.arrived);
        if (t == 0) {
            barrier_init(arrived, 1);
            barrier_init_fence();
        }
        __syncwarp();
        cluster_arrive();
#endif

        u32 k_first = chunk * p.chunk, k_size = p.features > k_first ? min(p.chunk, p.features - k_first) : 0;
        const u32 z = blockIdx.z, group0 = (p.spread == 1 ? z : z / p.spread) << p.merged;
        const u32 item0 = p.spread == 1 ? me : me + z % p.spread * CS, item_step = CS * p.spread;
        const u32 width = p.slices ? p.starts[group0 + 1] - p.starts[group0] : p.columns;
        const u32 blocks_n = (width + SN - 1) / SN, items = blocks_n << p.merged;
        const bool single = p.slots == 1;

        u32 slot = 0, count = 0, rank = p.rank;
        float scaling = 0;
        const u32 across = t % (WIDE / 8) * 8, down = t / (WIDE / 8); // this thread's part of every load
        constexpr u32 DOWN = THREADS / (WIDE / 8);
        u32 bv[2][BLOCKS_R * KR][XN][2], kept[2][MT][XN][2];

        auto load_stage = [&](u32 round) {
            const u32 k = round * WIDE + across;
            const u32 to = shared_address(&s.stages[round % STAGES][down][across]);
#pragma unroll
            for (u32 i = 0; i < BM / DOWN; ++i) {
                const u32 row = down + i * DOWN, place = row & (height - 1);
                if (place < count) {
                    const u32 token = single ? blockIdx.y * height + place : s.rows[place];
                    load8(to + i * DOWN * WP * 2, p.x + token * p.x_t + (group0 + (row >> shift)) * p.x_g + k_first, k, k_size);
                }
            }
            const u16 *a = p.a + slot * p.a_l + group0 * p.a_g + (r_first + down) * p.a_r + k_first;
#pragma unroll
            for (u32 i = 0; i < RL / DOWN; ++i)
                if (r_first + down + i * DOWN < rank) load8(to + (BM + i * DOWN) * WP * 2, a + i * DOWN * p.a_r, k, k_size);
            copies_commit();
        };
        const u32 column = warp * (SN / WARPS) + lane / 4, pair = lane % 4 * 2;
        u16 *to[2];                             // where this thread's columns of an item go
        u32 size[2], h_row[2];                  // its width, and its rows' place in h
        auto load_item = [&](u32 j, u32 item) { // this thread's elements of B and base, where the matrix unit wants them
            if (item >= items) return;
            const Columns c(p, slot, item, blocks_n, group0);
            to[j] = c.out + warp * (SN / WARPS) + pair, size[j] = c.size, h_row[j] = c.group * height;
#pragma unroll
            for (u32 n = 0; n < XN; ++n) {
                const u16 *b = c.b + (column + n * 8) * p.b_n + pair;
#pragma unroll
                for (u32 k = 0; k < BLOCKS_R * KR; ++k)
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        bv[j][k][n][half] = 0;
                        if (column + n * 8 < c.size && k * 16 + half * 8 + pair < rank)
                            bv[j][k][n][half] = fresh((const u32 *)(b + k * 16 + half * 8));
                    }
                if (p.base)
#pragma unroll
                    for (u32 m = 0; m < MT; ++m)
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
                            const u32 row = m * 16 + half * 8 + lane / 4, n0 = warp * (SN / WARPS) + n * 8 + pair;
                            if (row < count && n0 < c.size) {
                                const u32 token = single ? blockIdx.y * height + row : s.rows[row];
                                kept[j][m][n][half] = fresh((const u32 *)(c.base + token * p.p_t + n0));
                            }
                        }
            }
        };

        auto load_items = [&] {
            load_item(0, item0);
            if (AHEAD > 1) load_item(1, item0 + item_step);
        };

        bool guess = CLUSTERS && (p.flags & OVERLAP), loaded = false;
#pragma unroll 1
        for (;;) { // again where the guess was wrong
            if (single) {
                count = min(height, p.tokens - blockIdx.y * height);
            } else
                slot = select(p, blockIdx.y, height, s.rows, s.selection, count);
            if (guess && slot < p.slots) { // all ranks of A and B: to know the true one takes as long as to fetch them
                const u32 first = single ? blockIdx.y * height : s.rows[0], rows = single ? count : 1;
                if (k_size) {
                    if (p.rank > r_first)
                        prefetch(p.a + slot * p.a_l + group0 * p.a_g + r_first * p.a_r + k_first, p.a_r, min(p.rank - r_first, RL),
                                 2 * k_size);
                    prefetch(p.x + first * p.x_t + group0 * p.x_g + k_first, p.x_t, rows, 2 * k_size);
                }
#pragma unroll 1
                for (u32 n = 0, item = item0; n < AHEAD && item < items; ++n, item += item_step) {
                    const Columns c(p, slot, item, blocks_n, group0);
                    if (p.b_n == p.rank)
                        prefetch(c.b, 0, 1, 2 * c.size * p.rank);
                    else
                        prefetch(c.b, p.b_n, c.size, 2 * p.rank);
                    if (p.base) prefetch(c.base + first * p.p_t, p.p_t, rows, 2 * c.size);
                }
            }
            if (slot < p.slots) {
                if (p.ranks) rank = min((u32)max(fresh(p.ranks + slot), 0), p.rank);
                scaling = fresh(p.scalings + slot);
            }
            if (!guess) break;
#if CLUSTERS
            wait_for_producer();
            let_consumer_start(); // not before: what it reads before it waits for us is older than the kernel ahead of us
#endif
            guess = false;
            u32 now = rank, scaling_now = __float_as_uint(scaling), mine = 0;
            if (slot < p.slots) {
                load_stage(0);
                if (p.ranks) now = min((u32)max(fresh(p.ranks + slot), 0), p.rank);
                scaling_now = __float_as_uint(fresh(p.scalings + slot));
            }
            if (single ? t < count : t < p.tokens) mine = slot_of(p, single ? blockIdx.y * height + t : t);
            if (slot < p.slots) load_items();
            copies_wait<0>();
            bool same = now == rank && scaling_now == __float_as_uint(scaling);
            if (single) {
                if (t < height) s.active[t] = t < count && mine == 0;
            } else if (t < p.tokens)
                same = same && mine == s.selection.slots[t];
            loaded = __syncthreads_and(same);
            if (loaded) break;
        }
        if (slot > p.slots || (slot == p.slots && !(p.flags & COPY))) {
#if CLUSTERS
            cluster_wait();
#endif
            return;
        }
        if (slot == p.slots) { // rows without an adapter
#if CLUSTERS
            cluster_wait();
#endif
#pragma unroll 1
            for (u32 item = item0; item < items; item += item_step) {
                const Columns c(p, 0, item, blocks_n, group0);
#pragma unroll 1
                for (u32 i = t; i < count * (SN / 8); i += THREADS) {
                    const u32 token = s.rows[i / (SN / 8)], n = i % (SN / 8) * 8;
                    if (n < c.size)
                        *(uint4 *)(c.out + token * p.o_t + n) = p.base ? *(const uint4 *)(c.base + token * p.p_t + n) : uint4{0, 0, 0, 0};
                }
            }
            return;
        }
        const u32 rank16 = (rank + 15) / 16 * 16;
        if (!loaded) load_stage(0), load_items();
        if (!single && t < height) s.active[t] = true;
        if (single && !loaded && t < height) s.active[t] = t < count && slot_of(p, blockIdx.y * height + t) == 0;
#if CLUSTERS
        if (t == 0) barrier_expect(arrived, p.parts * (count << p.merged) * rank16 * 4);
#endif

        // A chunk of h (without clusters: all of them in turn): a warp a piece of 128 columns and half of r.
        const u32 piece = warp % PIECES, r_half = warp / PIECES * (RL / 2);
        const bool shrinks = r_first + r_half < rank;
#pragma unroll 1
        for (;;) {
            const u32 rounds = (k_size + WIDE - 1) / WIDE;
#pragma unroll 1
            for (u32 round = 0; round < rounds; ++round) {
                if (STAGES > 1 && round + 1 < rounds) {
                    load_stage(round + 1);
                    copies_wait<1>();
                } else
                    copies_wait<0>();
                __syncthreads();
                const u32 k_here = min(WIDE, k_size - round * WIDE);
                if (shrinks && piece * PIECE < k_here) {
                    float acc[MT][NT][4] = {};
                    const u32 x_at = shared_address(&s.stages[round % STAGES][lane % 16][piece * PIECE + lane / 16 * 8]);
                    const u32 a_at = shared_address(&s.stages[round % STAGES][BM + r_half + lane % 8 + (NT > 1 ? lane / 16 * 8 : 0)]
                                                             [piece * PIECE + (NT > 1 ? lane / 8 % 2 : lane / 8) * 8]);
                    if constexpr (NT == 1) {
#pragma unroll
                        for (u32 k = 0; k < PIECE; k += 32) {
                            u32 av[4], xv[MT][2][4];
                            load_matrix4(av, a_at + k * 2);
#pragma unroll
                            for (u32 m = 0; m < MT; ++m) {
                                load_matrix4(xv[m][0], x_at + (m * 16 * WP + k) * 2);
                                load_matrix4(xv[m][1], x_at + (m * 16 * WP + k + 16) * 2);
                                E::mma(acc[m][0], xv[m][0], av[0], av[1]);
                                E::mma(acc[m][0], xv[m][1], av[2], av[3]);
                            }
                        }
                    } else {
#pragma unroll
                        for (u32 k = 0; k < PIECE; k += 16) {
                            u32 xv[MT][4], av[4];
#pragma unroll
                            for (u32 m = 0; m < MT; ++m) load_matrix4(xv[m], x_at + (m * 16 * WP + k) * 2);
#pragma unroll
                            for (u32 n = 0; n < NT; n += 2) {
                                load_matrix4(av, a_at + (n * 8 * WP + k) * 2);
#pragma unroll
                                for (u32 m = 0; m < MT; ++m) {
                                    E::mma(acc[m][n], xv[m], av[0], av[1]);
                                    E::mma(acc[m][n + 1], xv[m], av[2], av[3]);
                                }
                            }
                        }
                    }
#pragma unroll
                    for (u32 m = 0; m < MT; ++m)
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
                            const u32 row = m * 16 + half * 8 + lane / 4;
                            if ((row & (height - 1)) < count)
#pragma unroll
                                for (u32 n = 0; n < NT; ++n)
                                    *(float2 *)&s.pieces[piece][row][r_half + n * 8 + pair] = {acc[m][n][2 * half],
                                                                                               acc[m][n][2 * half + 1]};
                        }
                }
                __syncthreads();
                const u32 pieces = (k_here + PIECE - 1) / PIECE;
                const bool last = round + 1 == rounds;
                constexpr u32 QUADS = RL / 4; // four columns a thread
#if CLUSTERS
                if (last) cluster_wait(); // all blocks of the cluster have set up their barriers
                const u32 whom = t % CS, barrier = remote(arrived, whom),
                          parts_at = remote(shared_address(&s.parts[chunk][me / PARTS][0][0]), whom);
                const u32 first = last ? t / CS : t, step = last ? THREADS / CS : THREADS; // every number goes to every block
#else
                const u32 first = t, step = THREADS;
#endif
#pragma unroll 1
                for (u32 i = first; i < (count << p.merged) * QUADS; i += step) {
                    const u32 in = i / QUADS, c = i % QUADS * 4;
                    const u32 row = p.merged ? in / count * height + in % count : in;
                    if (r_first + c >= rank16) continue;
                    float4 v = {0, 0, 0, 0};
                    if (round > 0) v = *(const float4 *)&s.running[row][c];
#pragma unroll
                    for (u32 q = 0; q < PIECES; ++q)
                        if (q < pieces) {
                            const float4 w = *(const float4 *)&s.pieces[q][row][c];
                            v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
                        }
#if CLUSTERS
                    if (last)
                        send16(parts_at + (row * RL + c) * 4, v, barrier);
                    else
                        *(float4 *)&s.running[row][c] = v;
#else
                    *(float4 *)(last ? &s.parts[chunk][0][row][c] : &s.running[row][c]) = v;
#endif
                }
                if (!last) {
                    __syncthreads();
                    if (STAGES == 1) load_stage(round + 1);
                }
            }
#if CLUSTERS
            if (rounds == 0) cluster_wait();
            break;
#else
            __syncthreads();
            if (++chunk == p.parts) break;
            k_first += p.chunk;
            k_size = min(p.chunk, p.features - k_first);
            load_stage(0);
#endif
        }
#if CLUSTERS
        if (k_size == 0) __syncthreads(); // else done above
        barrier_wait(arrived, 0);
        cluster_arrive(); // no block leaves before all have what the others sent
#endif

        // h: the sum of its parts, split into high and low.
        {
            constexpr u32 QUADS = RP / 4, LANES = QUADS < 32 ? QUADS : 32;
#pragma unroll 1
            for (u32 i = t; i < BM * QUADS; i += THREADS) {
                const u32 row = i / QUADS, c = i % QUADS * 4, place = row & (height - 1);
                float v[4] = {0, 0, 0, 0};
                if (place < count && s.active[place] && c < rank16) {
                    float4 w[PARTS];
#pragma unroll
                    for (u32 q = 0; q < PARTS; ++q)
                        if (q < p.parts) w[q] = *(const float4 *)&s.parts[q][c / RL][row][c % RL];
#pragma unroll
                    for (u32 q = 0; q < PARTS; ++q)
                        if (q < p.parts) v[0] += w[q].x, v[1] += w[q].y, v[2] += w[q].z, v[3] += w[q].w;
                }
#pragma unroll
                for (u32 e = 0; e < 4; ++e)
                    if (c + e >= rank) v[e] = 0;
                if constexpr (E::SCALED) {
                    float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
                    for (u32 d = LANES / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
                    const u32 exponent = min(max((__float_as_uint(most) >> 23) & 255, 1u), 253u);
                    const float down = __uint_as_float((254 - exponent) << 23);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) v[e] *= down;
                    if (c % BLOCK_R == 0) s.scale[c / BLOCK_R][row] = __uint_as_float(exponent << 23);
                }
                u32 top[4], rest[4];
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    top[e] = E::round(v[e]);
                    const float whole = E::widen(top[e]);
                    rest[e] = E::round(whole == v[e] ? 0.0f : v[e] - whole);
                }
                *(uint2 *)&s.high[row][c] = {top[0] | top[1] << 16, top[2] | top[3] << 16};
                *(uint2 *)&s.low[row][c] = {rest[0] | rest[1] << 16, rest[2] | rest[3] << 16};
            }
        }
        __syncthreads();

        // y: this block's columns.
#pragma unroll 1
        for (u32 item = item0; item < items; item += item_step) {
            if (AHEAD == 1 || item > item0) load_item(1, item + item_step);
            if (rank % 2) // B's columns past the rank may hold anything
#pragma unroll
                for (u32 k = 0; k < BLOCKS_R * KR; ++k)
#pragma unroll
                    for (u32 half = 0; half < 2; ++half)
#pragma unroll
                        for (u32 n = 0; n < XN; ++n)
                            if (k * 16 + half * 8 + pair + 1 >= rank) bv[0][k][n][half] &= k * 16 + half * 8 + pair < rank ? 0xffff : 0;
            float y[MT][XN][4] = {}, sum[MT][XN][4] = {};
#pragma unroll
            for (u32 block = 0; block < BLOCKS_R; ++block) {
                u32 hv[2][KR][MT][4];
#pragma unroll
                for (u32 low = 0; low < 2; ++low)
#pragma unroll
                    for (u32 k = 0; k < KR; ++k)
#pragma unroll
                        for (u32 m = 0; m < MT; ++m) {
                            const u32 row = min(h_row[0] + m * 16 + lane % 16, BM - 1), r = block * BLOCK_R + k * 16 + lane / 16 * 8;
                            if (k * 16 + block * BLOCK_R < rank16)
                                load_matrix4(hv[low][k][m], shared_address(low ? &s.low[row][r] : &s.high[row][r]));
                        }
#pragma unroll
                for (u32 low = 0; low < 2; ++low)
#pragma unroll
                    for (u32 k = 0; k < KR; ++k)
                        if (k * 16 + block * BLOCK_R < rank16)
#pragma unroll
                            for (u32 m = 0; m < MT; ++m)
#pragma unroll
                                for (u32 n = 0; n < XN; ++n)
                                    E::mma(y[m][n], hv[low][k][m], bv[0][block * KR + k][n][0], bv[0][block * KR + k][n][1]);
                if constexpr (E::SCALED)
#pragma unroll
                    for (u32 m = 0; m < MT; ++m)
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
                            const float scale = s.scale[block][min(h_row[0] + m * 16 + half * 8 + lane / 4, BM - 1)];
#pragma unroll
                            for (u32 n = 0; n < XN; ++n)
#pragma unroll
                                for (u32 e = 2 * half; e < 2 * half + 2; ++e) {
                                    sum[m][n][e] = fmaf(y[m][n][e], scale, sum[m][n][e]);
                                    y[m][n][e] = 0;
                                }
                        }
            }
#pragma unroll
            for (u32 m = 0; m < MT; ++m)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u32 row = m * 16 + half * 8 + lane / 4;
                    if (row >= count) continue;
                    const bool active = s.active[row];
                    if (!active && !(p.flags & COPY)) continue;
                    const u32 token = single ? blockIdx.y * height + row : s.rows[row];
                    u16 *out = to[0] + token * p.o_t;
#pragma unroll
                    for (u32 n = 0; n < XN; ++n) {
                        u32 now = 0;
#pragma unroll
                        for (u32 e = 0; e < 2; ++e) {
                            const float v = E::SCALED ? sum[m][n][2 * half + e] : y[m][n][2 * half + e],
                                        delta = active ? v * scaling : 0.0f;
                            u32 is = E::round(delta);
                            if (p.base) {
                                const u16 was = kept[0][m][n][half] >> 16 * e;
                                is = delta == 0.0f ? was : E::round(fmaf(v, scaling, E::widen(was)));
                            }
                            now |= is << 16 * e;
                        }
                        if (warp * (SN / WARPS) + n * 8 + pair < size[0]) *(u32 *)(out + n * 8) = now;
                    }
                }
            if (item + item_step < items) {
                to[0] = to[1], size[0] = size[1], h_row[0] = h_row[1];
#pragma unroll
                for (u32 n = 0; n < XN; ++n) {
#pragma unroll
                    for (u32 k = 0; k < BLOCKS_R * KR; ++k) bv[0][k][n][0] = bv[1][k][n][0], bv[0][k][n][1] = bv[1][k][n][1];
#pragma unroll
                    for (u32 m = 0; m < MT; ++m) kept[0][m][n][0] = kept[1][m][n][0], kept[0][m][n][1] = kept[1][m][n][1];
                }
            }
        }
#if CLUSTERS
        cluster_wait();
#endif
    }
};

#if CLUSTERS
#define CLUSTER(RS) __cluster_dims__(PARTS *RS, 1, 1)
#else
#define CLUSTER(RS)
#endif
#define BOUNDS_1 __launch_bounds__(THREADS) // not (THREADS, 1): told so, ptxas takes more than 128 registers, and one block fits
#define BOUNDS_3 __launch_bounds__(THREADS, 3)
// delta_<type>_<rows>_<ranks>_<splits of r>_<columns of N a step>_<blocks a multiprocessor>; shared_<the same>: its bytes of shared
// memory; one_stage_<the same>: those where a chunk of D is one stage. An H200 has room for 15 clusters of 8 blocks where a
// multiprocessor holds one block, for 30 at two and 45 at three, and those of the next call are to find room beside these.
#define DELTA(E, BM, RP, RS, SN, BLOCKS, STAGES, AHEAD)                                                      \
    extern "C" __global__ void CLUSTER(RS)                                                                   \
        BOUNDS_##BLOCKS delta_##E##_##BM##_##RP##_##RS##_##SN##_##BLOCKS(const __grid_constant__ Params p) { \
        Kernel<E, BM, RP, RS, SN, STAGES, AHEAD>::run(p);                                                    \
    }                                                                                                        \
    extern "C" __device__ const int shared_delta_##E##_##BM##_##RP##_##RS##_##SN##_##BLOCKS =                \
        sizeof(Kernel<E, BM, RP, RS, SN, STAGES, AHEAD>::Shared);                                            \
    extern "C" __device__ const int one_stage_delta_##E##_##BM##_##RP##_##RS##_##SN##_##BLOCKS =             \
        Kernel<E, BM, RP, RS, SN, STAGES, AHEAD>::ONE_STAGE;

// As launch.CUDA_KERNELS; then stages of D in flight, and items ahead.
#define ALL(E)                        \
    DELTA(E, 16, 16, 1, 128, 1, 2, 1) \
    DELTA(E, 16, 16, 1, 128, 3, 2, 2) \
    DELTA(E, 16, 32, 1, 128, 1, 2, 1) \
    DELTA(E, 16, 64, 1, 128, 1, 1, 1) \
    DELTA(E, 16, 64, 2, 128, 1, 1, 1) \
    DELTA(E, 16, 64, 2, 64, 1, 1, 1)  \
    DELTA(E, 16, 128, 2, 64, 1, 1, 1)
ALL(bf16)
ALL(fp16)
