// The plan of a batch's rows, or of a layer's routes over experts, in one launch: a stable counting sort by one cluster.
//
// Items (rows, or routes t · K + k) are cut into a run a block, that into one a warp, that into rounds of 32. A warp
// counts its items in buckets of its own, in shared memory, and keeps each item's rank among the equal ones before it;
// a block adds its warps' counts and sends the sums to every block; every block then knows where its first item of each
// bucket goes.
//
// `plan`: a bucket is expert · (L + 1) + slot, the last one that of masked routes; for rows without experts it is the
// slot, the last one that of rows without an adapter (experts = L, slots = 0, no adapters, K = 1).
// `plan_pairs`: for more (expert, slot) pairs than can be counted; sorts by slot, in shared memory, then by expert, and
// finds the tiles where the sorted pairs change.
#include "tile.cuh"

static constexpr u32 THREADS = 512, WARPS = 16;
static constexpr u32 RANK_BITS = 10;                           // of an item among its warp's: at most 32 rounds
static constexpr u32 AT_ONCE = 4;                              // rounds in flight
[[maybe_unused]] static constexpr u32 TILES = 1, OVERLAP = 2;  // as in ops/plan_cuda.py
[[maybe_unused]] static constexpr u32 MOST_BLOCKS = 16;

struct Params {
    const u8 *ids, *adapters;  // adapters may be null
    int *plan;
    i64 i_t, i_k, s_t;            // strides in bytes
    u32 ids_high, adapters_high;  // where an id's upper half lies: 4, or 0 for 32-bit ids
    u32 items, per_token, experts, slots;
    u32 blocks, rounds;  // of the cluster; of a warp
    u32 shift, room;     // log2 of the rows of a tile, and how many tiles the plan has room for
    u32 flags;
};

// Read past the L1: the kernel before this one may have written it while this one's blocks were starting.
__device__ __forceinline__ u32 fresh(const u8 *from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// An id of either width; both halves are read without a branch, so that loads overlap.
struct Id {
    u32 low, high;
    __device__ __forceinline__ Id(const u8 *from, u32 upper) : low(fresh(from)), high(fresh(from + upper)) {}
    // The id where it is in 0 … limit − 1, else limit.
    __device__ __forceinline__ u32 within(u32 limit, u32 upper) const { return low < limit && (upper == 0 || high == 0) ? low : limit; }
};

// Expert (E where masked) and slot (L without an adapter) of an item.
struct Route {
    u32 expert, slot;
    __device__ __forceinline__ Route(const Params &p, u32 item) {
        const u32 token = item / p.per_token;
        const Id id(p.ids + token * p.i_t + (item - token * p.per_token) * p.i_k, p.ids_high);
        slot = 0;
        if (p.adapters) slot = Id(p.adapters + token * p.s_t, p.adapters_high).within(p.slots, p.adapters_high);
        expert = id.within(p.experts, p.ids_high);
    }
    __device__ __forceinline__ u32 pair(const Params &p) const { return expert * (p.slots + 1) + (expert < p.experts ? slot : 0); }
};

__device__ __forceinline__ uint4 operator+(uint4 a, uint4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

__device__ __forceinline__ u32 below(u32 lane) { return (1u << lane) - 1; }

// One counting sort of the cluster's items into `buckets` buckets.
struct Sort {
    u32 t, lane, warp, me;
    u32 buckets, width;  // width: a multiple of 8
    u16 *counts;         // [WARPS][width] of a warp, then of those before it
    u16 *parts;          // [blocks][width] of the cluster's blocks
    u32 *next;           // [width] where the block's first item of a bucket goes
    u32 *kept;           // [rounds][THREADS] bucket and rank of an item
    u64 *sums;           // [WARPS]
    u32 arrived;         // barrier

    __device__ __forceinline__ u16 *mine() const { return counts + warp * width; }
    __device__ __forceinline__ bool adds() const { return t < width / 8; }
    __device__ __forceinline__ void clear() const {
        for (u32 i = lane; i < width / 8; i += 32) ((uint4 *)mine())[i] = {0, 0, 0, 0};
        __syncwarp();
    }

    // Rank every item among the equal ones of its warp. bucket_of(i, round): the bucket of the thread's item in a round,
    // of any item past the last one; items: how many the block's run has.
    template <class F> __device__ __forceinline__ void count(u32 rounds, u32 items, F bucket_of) const {
        u16 *const mine = this->mine();
        const u32 first = warp * rounds * 32 + lane, bits = 32 - __clz(buckets - 1);
#pragma unroll 1
        for (u32 round = 0; round < rounds; round += AT_ONCE) {
            u32 bucket[AT_ONCE], same[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 item = first + (round + i) * 32;
                bucket[i] = bucket_of(item, round + i);
                same[i] = __ballot_sync(~0u, item < items);
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
                if (round + i >= rounds) break;
                const u32 before = mine[bucket[i]], earlier = __popc(same[i] & below(lane));
                __syncwarp();
                if (first + (round + i) * 32 < items && earlier == 0) mine[bucket[i]] = before + __popc(same[i]);
                __syncwarp();
                kept[(round + i) * THREADS + t] = bucket[i] << RANK_BITS | (before + earlier);
            }
        }
        __syncthreads();
    }

    // A thread eight buckets: add the warps' counts, and tell every block.
    __device__ __forceinline__ void share(u32 blocks, bool wait_for_cluster) const {
        const u32 row = width / 8;
        uint4 sum = {0, 0, 0, 0};
        if (adds()) {
            uint4 *const column = (uint4 *)counts + t;
#pragma unroll
            for (u32 half = 0; half < WARPS; half += WARPS / 2) {
                uint4 v[WARPS / 2];
#pragma unroll
                for (u32 w = 0; w < WARPS / 2; ++w) v[w] = column[(half + w) * row];
#pragma unroll
                for (u32 w = 0; w < WARPS / 2; ++w) {
                    column[(half + w) * row] = sum;
                    sum = sum + v[w];
                }
            }
        }
#if CLUSTERS
        if (blocks > 1) {
            if (wait_for_cluster) cluster_wait();  // all blocks have set up their barriers
            if (adds()) {
                const float4 v = {__uint_as_float(sum.x), __uint_as_float(sum.y), __uint_as_float(sum.z), __uint_as_float(sum.w)};
                const u32 to = shared_address((uint4 *)parts + me * row + t);
#pragma unroll 4
                for (u32 q = 0; q < blocks; ++q) send16(remote(to, q), v, remote(arrived, q));
            }
            barrier_wait(arrived, 0);
            return;
        }
#endif
        if (adds()) ((uint4 *)parts)[t] = sum;
    }

    // The thread's eight buckets: items of all blocks, and of those before this one.
    __device__ __forceinline__ void totals(u32 blocks, u32 (&all)[8], u32 (&earlier)[8]) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) all[i] = earlier[i] = 0;
        if (!adds()) return;
#pragma unroll 4
        for (u32 q = 0; q < blocks; ++q) {
            const uint4 v = ((const uint4 *)parts)[q * (width / 8) + t];
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 n = words[i / 2] >> i % 2 * 16 & 0xffff;
                all[i] += n;
                earlier[i] += q < me ? n : 0;
            }
        }
    }

    // The sum of the threads before this one, and of all.
    __device__ __forceinline__ void prefix(u64 value, u64 &before, u64 &total) const {
        u64 up_to = value;
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u64 other = __shfl_up_sync(~0u, up_to, d);
            if (lane >= d) up_to += other;
        }
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        before = up_to - value, total = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) {
            const u64 other = sums[w];
            total += other;
            before += w < warp ? other : 0;
        }
    }

    __device__ __forceinline__ u32 bucket(u32 round) const { return kept[round * THREADS + t] >> RANK_BITS; }
    __device__ __forceinline__ u32 place(u32 round) const {
        const u32 it = kept[round * THREADS + t], bucket = it >> RANK_BITS;
        return next[bucket] + mine()[bucket] + (it & ((1u << RANK_BITS) - 1));
    }
};

__device__ __forceinline__ void store8(u32 *to, const u32 (&v)[8]) {
    *(uint4 *)to = {v[0], v[1], v[2], v[3]};
    *(uint4 *)(to + 4) = {v[4], v[5], v[6], v[7]};
}

// What follows a plan's routes.
struct Behind {
    int *ends, *count, *pairs, *starts;
    __device__ __forceinline__ Behind(const Params &p) : ends(p.plan + p.items), count(ends + p.experts), pairs(count + 1), starts(pairs + p.room) {}
    __device__ __forceinline__ void tile(u32 number, u32 pair, u32 place) const {
        pairs[number] = pair;
        starts[number] = place;
    }
    __device__ __forceinline__ void no_more(const Params &p, u32 made) const {
        const u32 thread = blockIdx.x * THREADS + threadIdx.x;
        for (u32 number = made + thread; number < p.room; number += p.blocks * THREADS) tile(number, ~0u, p.items);
        if (thread == 0) {
            *count = made;
            starts[p.room] = p.items;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) plan(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    const bool tiles = p.flags & TILES;
    Sort s;
    s.t = threadIdx.x, s.lane = s.t % 32, s.warp = s.t / 32, s.me = blockIdx.x;
    s.buckets = p.experts * (p.slots + 1) + 1, s.width = (s.buckets + 7) & ~7u;
    s.counts = (u16 *)memory;
    s.parts = s.counts + WARPS * s.width;
    s.next = (u32 *)(s.parts + p.blocks * s.width);
    u32 *const starts = s.next + s.width, *const first_tile = starts + s.width;  // [width] of a bucket, with tiles
    s.kept = tiles ? first_tile + s.width : starts;
    s.sums = (u64 *)(s.kept + p.rounds * THREADS);
    s.arrived = shared_address(s.sums + WARPS);
#if CLUSTERS
    if (p.blocks > 1) {
        if (s.t == 0) {
            barrier_init(s.arrived, 1);
            barrier_init_fence();
            barrier_expect(s.arrived, p.blocks * s.width * 2);
        }
        __syncwarp();
        cluster_arrive();
    }
#endif
    s.clear();
#if CLUSTERS
    if (p.flags & OVERLAP) {
        wait_for_producer();
        let_consumer_start();  // not before: what it reads before it waits for us is older than the kernel ahead of us
    }
#endif

    const u32 run = s.me * p.rounds * THREADS, items = p.items > run ? p.items - run : 0;
    s.count(p.rounds, items, [&](u32 item, u32) { return Route(p, min(run + item, p.items - 1)).pair(p); });
    s.share(p.blocks, true);
    u32 all[8], earlier[8];
    s.totals(p.blocks, all, earlier);
    u64 sum = 0, before, total;  // items below, tiles above
#pragma unroll
    for (u32 i = 0; i < 8; ++i) sum += all[i] | (u64)((all[i] + (1u << p.shift) - 1) >> p.shift) << 32;
    s.prefix(sum, before, total);
    const Behind behind(p);
    if (s.adds()) {
        u32 start[8], tile[8], place = (u32)before, number = before >> 32;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            start[i] = place, tile[i] = number;
            earlier[i] += place;
            place += all[i];
            number += (all[i] + (1u << p.shift) - 1) >> p.shift;
        }
        store8(s.next + s.t * 8, earlier);
        if (tiles) store8(starts + s.t * 8, start), store8(first_tile + s.t * 8, tile);
        if (s.warp % p.blocks == s.me)
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 bucket = s.t * 8 + i, expert = tiles ? bucket / (p.slots + 1) : bucket + 1;
                if (bucket < s.buckets && expert > 0 && (!tiles || bucket == expert * (p.slots + 1))) behind.ends[expert - 1] = start[i];
            }
    }
    __syncthreads();

    const u32 first = s.warp * p.rounds * 32 + s.lane;
#pragma unroll 4
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 item = first + round * 32;
        if (item >= items) break;
        const u32 place = s.place(round);
        p.plan[place] = run + item;
        if (tiles) {
            const u32 bucket = s.bucket(round), rank = place - starts[bucket];
            if ((rank & ((1u << p.shift) - 1)) == 0) behind.tile(first_tile[bucket] + (rank >> p.shift), bucket, place);
        }
    }
    if (tiles)
        behind.no_more(p, total >> 32);
    else if (s.me == 0 && s.t == 0)
        behind.ends[s.buckets] = p.items;
}

#if CLUSTERS
// Stores into another block's shared memory, counted by that block's barrier.
__device__ __forceinline__ void send8(u32 to, u64 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to), "l"(v), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send4(u32 to, u32 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(barrier) : "memory");
}

// One number of every block's, made known to all.
struct Exchange {
    u32 *numbers;  // [MOST_BLOCKS]
    u32 barrier;
    // Every thread calls it; `value` is thread 0 … blocks − 1's.
    __device__ __forceinline__ void operator()(u32 blocks, u32 value) const {
        if (threadIdx.x < blocks) send4(remote(shared_address(numbers + blockIdx.x), threadIdx.x), value, remote(barrier, threadIdx.x));
        barrier_wait(barrier, 0);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) plan_pairs(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 slots8 = (p.slots + 8) & ~7u, experts8 = (p.experts + 8) & ~7u, most8 = max(slots8, experts8);
    const u32 size = p.rounds * THREADS, run = blockIdx.x * size, items = p.items > run ? min(p.items - run, size) : 0;
    Sort s;
    s.t = threadIdx.x, s.lane = s.t % 32, s.warp = s.t / 32, s.me = blockIdx.x;
    s.buckets = p.slots + 1, s.width = slots8;
    s.counts = (u16 *)memory;
    s.parts = s.counts + WARPS * most8;
    u16 *const parts2 = s.parts + p.blocks * slots8;
    s.next = (u32 *)(parts2 + p.blocks * experts8);
    s.kept = s.next + most8;
    u64 *const by_slot = (u64 *)(s.kept + size);  // [size] route and pair, sorted by slot
    u32 *const pairs = (u32 *)(by_slot + size);   // [size] of the routes in their order; then sorted
    s.sums = (u64 *)(pairs + size);
    u64 *const barriers = s.sums + WARPS;
    u32 *const numbers = (u32 *)(barriers + 6), *const of_warps = numbers + 2 * MOST_BLOCKS, *const pair_before = of_warps + WARPS;
    s.arrived = shared_address(barriers);
    const u32 arrived2 = s.arrived + 8, sorted = s.arrived + 16, sorted2 = s.arrived + 24;
    const Exchange heads = {numbers, s.arrived + 32}, made = {numbers + MOST_BLOCKS, s.arrived + 40};
    if (s.t == 0) {
#pragma unroll
        for (u32 i = 0; i < 6; ++i) barrier_init(s.arrived + i * 8, 1);
        barrier_init_fence();
        barrier_expect(s.arrived, p.blocks * slots8 * 2);
        barrier_expect(arrived2, p.blocks * experts8 * 2);
        barrier_expect(sorted, items * 8);
        barrier_expect(sorted2, items * 4 + (s.me > 0 && run <= p.items ? 4 : 0));
        barrier_expect(heads.barrier, p.blocks * 4);
        barrier_expect(made.barrier, p.blocks * 4);
    }
    __syncwarp();
    cluster_arrive();
    s.clear();
    if (p.flags & OVERLAP) {
        wait_for_producer();
        let_consumer_start();  // not before: what it reads before it waits for us is older than the kernel ahead of us
    }

    // By slot; a place is one of a block's run.
    const u32 first = s.warp * p.rounds * 32 + s.lane;
    s.count(p.rounds, items, [&](u32 item, u32 round) {
        const Route route(p, min(run + item, p.items - 1));
        if (round < p.rounds) pairs[round * THREADS + s.t] = route.pair(p);
        return route.expert < p.experts ? route.slot : 0;
    });
    u32 all[8], earlier[8];
    auto starts = [&](int *ends) {
        s.totals(p.blocks, all, earlier);
        u64 sum = 0, before, total;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum += all[i];
        s.prefix(sum, before, total);
        if (s.adds()) {
            u32 place = (u32)before;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 bucket = s.t * 8 + i;
                if (ends && bucket > 0 && bucket < s.buckets && s.warp % p.blocks == s.me) ends[bucket - 1] = place;
                earlier[i] += place;
                place += all[i];
            }
            store8(s.next + s.t * 8, earlier);
        }
        __syncthreads();
    };
    s.share(p.blocks, true);
    starts(nullptr);
#pragma unroll 4
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 item = first + round * 32;
        if (item >= items) break;
        const u32 place = s.place(round), q = place / size;
        send8(remote(shared_address(by_slot + (place - q * size)), q), (u64)pairs[round * THREADS + s.t] << 32 | (run + item), remote(sorted, q));
    }
    __syncthreads();  // all have read their warps' counts

    // By expert.
    s.buckets = p.experts + 1, s.width = experts8, s.parts = parts2, s.arrived = arrived2;
    s.clear();
    barrier_wait(sorted, 0);
    s.count(p.rounds, items, [&](u32 item, u32) { return (u32)(by_slot[min(item, size - 1)] >> 32) / (p.slots + 1) % s.buckets; });
    s.share(p.blocks, false);
    const Behind behind(p);
    starts(behind.ends);
#pragma unroll 4
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 item = first + round * 32;
        if (item >= items) break;
        const u64 it = by_slot[item];
        const u32 place = s.place(round), q = place / size, in = place - q * size;
        p.plan[place] = (u32)it;
        send4(remote(shared_address(pairs + in), q), it >> 32, remote(sorted2, q));
        if (in == size - 1 && q + 1 < p.blocks) send4(remote(shared_address(pair_before), q + 1), it >> 32, remote(sorted2, q + 1));
    }
    barrier_wait(sorted2, 0);

    // Where pairs start: the last such place in every warp, then in every block. Places count from 1 here, 0 is none.
    auto starts_pair = [&](u32 i) { return i < items && (run + i == 0 || pairs[i] != (i ? pairs[i - 1] : *pair_before)); };
    u32 last = 0;
#pragma unroll 1
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 i = first + round * 32, votes = __ballot_sync(~0u, starts_pair(i));
        if (votes) last = run + i - s.lane + 32 - __clz(votes);
    }
    if (s.lane == 0) of_warps[s.warp] = last;
    __syncthreads();
    u32 most = 0, carry = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
        most = max(most, of_warps[w]);
        if (w < s.warp) carry = max(carry, of_warps[w]);
    }
    heads(p.blocks, most);
    for (u32 q = 0; q < s.me; ++q) carry = max(carry, heads.numbers[q]);

    // Tiles start where the distance from there divides by their rows: number them in every warp, then in every block.
    u32 number = 0;
#pragma unroll 1
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 i = first + round * 32, votes = __ballot_sync(~0u, starts_pair(i)), up_to = votes & (below(s.lane) << 1 | 1);
        const u32 start = up_to ? run + i - s.lane + 32 - __clz(up_to) : carry;
        const bool tile = i < items && ((run + i + 1 - start) & ((1u << p.shift) - 1)) == 0;
        const u32 tiles = __ballot_sync(~0u, tile);
        s.kept[round * THREADS + s.t] = tile ? number + __popc(tiles & below(s.lane)) : ~0u;
        number += __popc(tiles);
        if (votes) carry = run + i - s.lane + 32 - __clz(votes);
    }
    __syncthreads();  // of_warps has been read
    if (s.lane == 0) of_warps[s.warp] = number;
    __syncthreads();
    u32 sum = 0, before = 0, total = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
        sum += of_warps[w];
        before += w < s.warp ? of_warps[w] : 0;
    }
    made(p.blocks, sum);
    for (u32 q = 0; q < p.blocks; ++q) {
        before += q < s.me ? made.numbers[q] : 0;
        total += made.numbers[q];
    }
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 i = first + round * 32, at = s.kept[round * THREADS + s.t];
        if (at != ~0u) behind.tile(before + at, pairs[i], run + i);
    }
    behind.no_more(p, total);
}
#endif
