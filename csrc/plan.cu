// The plan of a batch's rows, or of a layer's routes over experts, in one launch: a stable counting sort by one cluster.
//
// Items (rows, or routes t · K + k) are cut into a run a block, that into one a warp, that into rounds of 32. A warp
// counts its items in buckets of its own, in shared memory, and keeps each item's rank among the equal ones before it;
// a block adds its warps' counts and sends the sums to every block; every block then knows where its first item of each
// bucket goes. A bucket is expert · (L + 1) + slot, the last one that of masked routes; for rows without experts it is
// the slot, the last one that of rows without an adapter (experts = L, slots = 0, no adapters, K = 1).
//
// Shared memory a bucket: 2 bytes a warp, 2 a block, 4 (with tiles 12); beside that 4 bytes an item.
#include "tile.cuh"

static constexpr u32 THREADS = 512, WARPS = 16;
static constexpr u32 RANK_BITS = 10;          // of an item among its warp's: at most 32 rounds
static constexpr u32 AT_ONCE = 4;             // rounds in flight
static constexpr u32 TILES = 1, OVERLAP = 2;  // as in ops/plan_cuda.py

struct Params {
    const u8 *ids, *adapters;  // adapters may be null
    int *plan;
    i64 i_t, i_k, s_t;          // strides in bytes
    u32 ids_high, adapters_high;  // where an id's upper half lies: 4, or 0 for 32-bit ids
    u32 items, per_token, experts, slots;
    u32 blocks, rounds;  // of the cluster, at most 16; of a warp
    u32 shift, room;  // log2 of the rows of a tile, and how many tiles the plan has room for
    u32 flags;
};

// Read past the L1: the kernel before this one may have written it while this one's blocks were starting.
__device__ __forceinline__ u32 fresh(const u8 *from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// An id of either width in 0 … limit − 1, else limit; both halves are read without a branch, so that loads overlap.
struct Id {
    u32 low, high;
    __device__ __forceinline__ Id(const u8 *from, u32 upper) : low(fresh(from)), high(fresh(from + upper)) {}
    __device__ __forceinline__ u32 within(u32 limit, u32 upper) const { return low < limit && (upper == 0 || high == 0) ? low : limit; }
};

__device__ __forceinline__ uint4 operator+(uint4 a, uint4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

extern "C" __global__ void __launch_bounds__(THREADS) plan(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 t = threadIdx.x, lane = t % 32, warp = t / 32, me = blockIdx.x;
    const u32 buckets = p.experts * (p.slots + 1) + 1, width = (buckets + 7) & ~7u;
    const bool tiles = p.flags & TILES;
    u16 *counts = (u16 *)memory;                            // [WARPS][width]: of a warp, then of those before it
    u16 *parts = counts + WARPS * width;                    // [blocks][width]: of the cluster's blocks
    u32 *next = (u32 *)(parts + p.blocks * width);          // [width] where the block's first item of a bucket goes
    u32 *starts = next + width, *first_tile = starts + width;  // [width], with tiles
    u32 *kept = tiles ? first_tile + width : starts;        // [rounds][THREADS] bucket and rank of an item
    u64 *sums = (u64 *)(kept + p.rounds * THREADS);         // [WARPS]
    const u32 arrived = shared_address(sums + WARPS);

#if CLUSTERS
    if (p.flags & OVERLAP) let_consumer_start();
    if (p.blocks > 1) {
        if (t == 0) {
            barrier_init(arrived, 1);
            barrier_init_fence();
            barrier_expect(arrived, p.blocks * width * 2);
        }
        __syncwarp();
        cluster_arrive();
    }
#endif
    u16 *mine = counts + warp * width;
    for (u32 i = lane; i < width / 8; i += 32) ((uint4 *)mine)[i] = {0, 0, 0, 0};
    __syncwarp();
#if CLUSTERS
    if (p.flags & OVERLAP) wait_for_producer();
#endif

    // Count, and rank every item among the equal ones of its warp.
    const u32 first = (me * WARPS + warp) * p.rounds * 32 + lane, bits = 32 - __clz(buckets - 1);
#pragma unroll 1
    for (u32 round = 0; round < p.rounds; round += AT_ONCE) {
        u32 bucket[AT_ONCE], same[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 item = first + (round + i) * 32, at = min(item, p.items - 1), token = at / p.per_token;
            const Id id(p.ids + token * p.i_t + (at - token * p.per_token) * p.i_k, p.ids_high);
            u32 slot = 0;
            if (p.adapters) slot = Id(p.adapters + token * p.s_t, p.adapters_high).within(p.slots, p.adapters_high);
            const u32 expert = id.within(p.experts, p.ids_high);
            bucket[i] = expert < p.experts ? expert * (p.slots + 1) + slot : buckets - 1;
            same[i] = __ballot_sync(~0u, item < p.items);
        }
#pragma unroll 1
        for (u32 bit = 0; bit < bits; ++bit)
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const bool set = bucket[i] >> bit & 1;
                const u32 votes = __ballot_sync(~0u, set);
                same[i] &= set ? votes : ~votes;
            }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 item = first + (round + i) * 32;
            if (round + i >= p.rounds) break;
            const u32 before = mine[bucket[i]], earlier = __popc(same[i] & ((1u << lane) - 1));
            __syncwarp();
            if (item < p.items && earlier == 0) mine[bucket[i]] = before + __popc(same[i]);
            __syncwarp();
            kept[(round + i) * THREADS + t] = bucket[i] << RANK_BITS | (before + earlier);
        }
    }
    __syncthreads();

    // A thread eight buckets: add the warps' counts, and send the sums to every block.
    const bool adds = t < width / 8;
    if (adds) {
        uint4 *column = (uint4 *)counts + t, sum = {0, 0, 0, 0};
#pragma unroll
        for (u32 half = 0; half < WARPS; half += WARPS / 2) {
            uint4 v[WARPS / 2];
#pragma unroll
            for (u32 w = 0; w < WARPS / 2; ++w) v[w] = column[(half + w) * (width / 8)];
#pragma unroll
            for (u32 w = 0; w < WARPS / 2; ++w) {
                column[(half + w) * (width / 8)] = sum;
                sum = sum + v[w];
            }
        }
        ((uint4 *)parts)[me * (width / 8) + t] = sum;
    }
#if CLUSTERS
    if (p.blocks > 1) {
        cluster_wait();  // all blocks have set up their barriers
        if (adds) {
            const uint4 sum = ((const uint4 *)parts)[me * (width / 8) + t];
            const float4 bits_of = {__uint_as_float(sum.x), __uint_as_float(sum.y), __uint_as_float(sum.z), __uint_as_float(sum.w)};
            const u32 to = shared_address((uint4 *)parts + me * (width / 8) + t);
#pragma unroll 4
            for (u32 q = 0; q < p.blocks; ++q) send16(remote(to, q), bits_of, remote(arrived, q));
        }
        barrier_wait(arrived, 0);
    }
#endif

    // Where buckets start, where this block's part of them does, and their first tiles.
    u32 all[8] = {}, earlier[8] = {};
    if (adds)
#pragma unroll 4
        for (u32 q = 0; q < p.blocks; ++q) {
            const uint4 v = ((const uint4 *)parts)[q * (width / 8) + t];
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 n = words[i / 2] >> i % 2 * 16 & 0xffff;
                all[i] += n;
                earlier[i] += q < me ? n : 0;
            }
        }
    u64 sum = 0;  // items below, tiles above
#pragma unroll
    for (u32 i = 0; i < 8; ++i) sum += all[i] | (u64)(tiles ? (all[i] + (1u << p.shift) - 1) >> p.shift : 0) << 32;
    u64 up_to = sum;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(~0u, up_to, d);
        if (lane >= d) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    u64 before = up_to - sum, total = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
        const u64 other = sums[w];
        total += other;
        before += w < warp ? other : 0;
    }
    int *const behind = p.plan + p.items;  // what follows the sorted items
    if (adds) {
        u32 start[8], tile[8];
        u32 place = (u32)before, number = before >> 32;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            start[i] = place, tile[i] = number;
            earlier[i] += place;
            place += all[i];
            number += (all[i] + (1u << p.shift) - 1) >> p.shift;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i += 4) {
            *(uint4 *)(next + t * 8 + i) = {earlier[i], earlier[i + 1], earlier[i + 2], earlier[i + 3]};
            if (tiles) {
                *(uint4 *)(starts + t * 8 + i) = {start[i], start[i + 1], start[i + 2], start[i + 3]};
                *(uint4 *)(first_tile + t * 8 + i) = {tile[i], tile[i + 1], tile[i + 2], tile[i + 3]};
            }
        }
        if (warp % p.blocks == me)
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 bucket = t * 8 + i, expert = tiles ? bucket / (p.slots + 1) : bucket + 1;
                if (bucket < buckets && expert > 0 && (!tiles || bucket == expert * (p.slots + 1))) behind[expert - 1] = start[i];
            }
    }
    __syncthreads();

    int *const tile_pairs = behind + p.experts + 1, *const tile_starts = tile_pairs + p.room;
#pragma unroll 1
    for (u32 round = 0; round < p.rounds; round += AT_ONCE) {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 item = first + (round + i) * 32;
            if (round + i >= p.rounds || item >= p.items) break;
            const u32 it = kept[(round + i) * THREADS + t], bucket = it >> RANK_BITS;
            const u32 place = next[bucket] + mine[bucket] + (it & ((1u << RANK_BITS) - 1));
            p.plan[place] = item;
            if (tiles) {
                const u32 rank = place - starts[bucket];
                if ((rank & ((1u << p.shift) - 1)) == 0) {
                    const u32 number = first_tile[bucket] + (rank >> p.shift);
                    tile_pairs[number] = bucket;
                    tile_starts[number] = place;
                }
            }
        }
    }
    if (!tiles) {
        if (me == 0 && t == 0) behind[buckets] = p.items;
        return;
    }
    const u32 made = total >> 32;
    for (u32 number = made + me * THREADS + t; number < p.room; number += p.blocks * THREADS) {
        tile_pairs[number] = -1;
        tile_starts[number] = p.items;
    }
    if (me == 0 && t == 0) {
        behind[p.experts] = made;
        tile_starts[p.room] = p.items;
    }
}
