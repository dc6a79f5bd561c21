// The plan of a batch's rows, or of a layer's routes over experts, in one launch: a stable counting sort by one cluster.
//
// Items (rows, or routes t · K + k) are cut into a run a block, that into one a warp, that into rounds of 32. A warp
// counts its items in buckets of its own, in shared memory, and keeps each item's rank among the equal ones before it;
// a block adds its warps' counts and sends the sums to every block; every block then knows where its first item of each
// bucket goes. Where warps have several rounds the items travel through shared memory to the block that writes their places.
//
// `plan`: a bucket is expert · (L + 1) + slot, the last one that of masked routes; for rows without experts it is the
// slot, the last one that of rows without an adapter (experts = L, slots = 0, no adapters, K = 1).
// `plan_pairs`: for more (expert, slot) pairs than can be counted; sorts by slot, in shared memory, then by expert, and
// finds the tiles where the sorted pairs change.
//
// With programmatic dependent launch the blocks start before the kernel ahead has ended and wait for it before they read
// an id or write. Then they let the next kernel start, which must wait for them before it reads the plan.
#include "tile.cuh"

static constexpr u32 THREADS = 512, WARPS = 16;
static constexpr u32 RANK_BITS = 10;                           // of an item among its warp's: at most 32 rounds
static constexpr u32 AT_ONCE = 4;                              // rounds in flight
[[maybe_unused]] static constexpr u32 MOST_BLOCKS = 16, ITEM_BITS = 18;
[[maybe_unused]] static constexpr u32 TILES = 1, OVERLAP = 2, GATHER = 4;  // as in ops/plan_cuda.py

struct Params {
    const u8 *ids, *adapters;  // adapters may be null
    int *plan;
    i64 i_t, i_k, s_t;  // strides in bytes
    u64 per_token, size;  // of a token's items, and of a block's: reciprocals, see `divide`
    u32 ids_wide, adapters_wide;  // whether ids have 64 bits
    u32 items, top_k, experts, slots;
    u32 blocks, rounds;  // of the cluster; of a warp
    u32 shift, room;     // log2 of the rows of a tile, and how many tiles the plan has room for
    u32 flags;
};

// n / d for n and d below 2^20, from ⌈2^40 / d⌉.
__device__ __forceinline__ u32 divide(u32 n, u64 reciprocal) { return n * reciprocal >> 40; }

// Read past the L1: the kernel before this one may have written it while this one's blocks were starting. 0 unless `there`;
// a predicate, not a branch, so that many loads are in flight.
__device__ __forceinline__ u32 fresh(const u8 *from, bool there) {
    u32 v;
    asm volatile("{\n.reg .pred there;\nsetp.ne.u32 there, %2, 0;\nmov.u32 %0, 0;\n@there ld.relaxed.gpu.global.u32 %0, [%1];\n}"
                 : "=&r"(v)
                 : "l"(from), "r"((u32)there)
                 : "memory");
    return v;
}

// An id of either width.
struct Id {
    u32 low, high;
    __device__ __forceinline__ void load(const u8 *from, bool there, bool wide) { low = fresh(from, there), high = fresh(from + 4, there && wide); }
    // The id where it is in 0 … limit − 1, else limit.
    __device__ __forceinline__ u32 within(u32 limit) const { return low < limit && high == 0 ? low : limit; }
};

// Expert (E where masked) and slot (L without an adapter) of an item.
struct Route {
    Id expert_id, slot_id;
    __device__ __forceinline__ void load(const Params &p, u32 item, bool there) {
        const u32 token = divide(item, p.per_token);
        expert_id.load(p.ids + token * p.i_t + (item - token * p.top_k) * p.i_k, there, p.ids_wide);
        slot_id.load(p.adapters + token * p.s_t, there && p.adapters, p.adapters_wide);
    }
    __device__ __forceinline__ u32 expert(const Params &p) const { return expert_id.within(p.experts); }
    // 0 where masked: those routes keep their order.
    __device__ __forceinline__ u32 slot(const Params &p) const { return p.adapters && expert(p) < p.experts ? slot_id.within(p.slots) : 0; }
    __device__ __forceinline__ u32 pair(const Params &p) const { return expert(p) * (p.slots + 1) + slot(p); }
};

__device__ __forceinline__ u32 below(u32 lane) { return (1u << lane) - 1; }

#if CLUSTERS
// Stores into another block's shared memory, counted by that block's barrier.
__device__ __forceinline__ void send8(u32 to, u64 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to), "l"(v), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send4(u32 to, u32 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(barrier) : "memory");
}
#endif

// One counting sort of the cluster's items into `buckets` buckets.
struct Sort {
    u32 t, lane, warp, me;
    u32 buckets, width;  // width: a multiple of 8
    u16 *counts;         // [WARPS][width] of a warp, then of those before it
    u16 *parts;          // [blocks][width] of the cluster's blocks
    u32 *next;           // [width] where the block's first item of a bucket goes
    u32 *starts;         // [width] where a bucket starts
    u32 *tiles;          // [width] its first tile, or null
    u32 *kept;           // [rounds][THREADS] bucket and rank of an item
    u64 *sums;           // [2][WARPS]
    u32 arrived;         // barrier

    __device__ __forceinline__ u16 *mine() const { return counts + warp * width; }
    __device__ __forceinline__ void clear() const {
#pragma unroll 1
        for (u32 i = lane; i < width / 8; i += 32) ((uint4 *)mine())[i] = {0, 0, 0, 0};
        __syncwarp();
    }

    // Rank every item among the equal ones of its warp. load(v, item, there): what is read for an item of the run, if it is
    // there; bucket_of(v, round, there): its bucket, any if it is not. items: how many the block's run has.
    template <class V, class Load, class Bucket>
    __device__ __forceinline__ void count(u32 rounds, u32 items, Load load, Bucket bucket_of) const {
        u16 *const mine = this->mine();
        const u32 first = warp * rounds * 32 + lane, bits = 32 - __clz(buckets - 1);
#pragma unroll 1
        for (u32 round = 0; round < rounds; round += AT_ONCE) {
            V v[AT_ONCE];
            u32 bucket[AT_ONCE], same[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) load(v[i], first + (round + i) * 32, round + i < rounds && first + (round + i) * 32 < items);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const bool there = round + i < rounds && first + (round + i) * 32 < items;
                bucket[i] = bucket_of(v[i], round + i, there);
                same[i] = __ballot_sync(~0u, there);
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

    // Add the warps' counts, two buckets a thread, and tell every block, a warp a block.
    __device__ __forceinline__ void share(u32 blocks, bool wait_for_cluster) const {
        u32 *const sum_of = (u32 *)(parts + me * width);
#pragma unroll 1
        for (u32 c = t; c < width / 2; c += THREADS) {
            u32 *const column = (u32 *)counts + c, v[WARPS], sum = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) v[w] = column[w * (width / 2)];
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                column[w * (width / 2)] = sum;
                sum += v[w];
            }
            sum_of[c] = sum;
        }
        __syncthreads();
#if CLUSTERS
        if (blocks == 1) return;
        if (wait_for_cluster) cluster_wait();  // all blocks have set up their barriers
        if (warp < blocks && warp != me) {
            const u32 to = remote(shared_address(sum_of), warp), barrier = remote(arrived, warp);
#pragma unroll 1
            for (u32 c = lane; c < width / 8; c += 32) send16(to + c * 16, ((const float4 *)sum_of)[c], barrier);
        }
        barrier_wait(arrived, 0);
#endif
    }
    // What the other blocks send.
    __device__ __forceinline__ u32 shared_bytes(u32 blocks) const { return (blocks - 1) * width * 2; }

    // Where buckets start, where this block's part of them does, and their first tiles, of 1 << shift items at most; returns
    // how many tiles there are.
    __device__ __forceinline__ u32 scan(u32 blocks, u32 shift) const {
        u64 carry = 0;  // items below, tiles above
        u32 parity = 0;
#pragma unroll 1
        for (u32 c = t; c - t < width / 2; c += THREADS, parity ^= WARPS) {
            u32 all[2] = {}, earlier[2] = {};
            if (c < width / 2)
#pragma unroll 4
                for (u32 q = 0; q < blocks; ++q) {
                    const u32 v = ((const u32 *)parts)[q * (width / 2) + c], low = v & 0xffff, high = v >> 16;
                    all[0] += low, all[1] += high;
                    if (q < me) earlier[0] += low, earlier[1] += high;
                }
            const u32 more = (1u << shift) - 1, tiles0 = (all[0] + more) >> shift, tiles1 = (all[1] + more) >> shift;
            const u64 sum = all[0] + all[1] | (u64)(tiles0 + tiles1) << 32;
            u64 up_to = sum;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u64 other = __shfl_up_sync(~0u, up_to, d);
                if (lane >= d) up_to += other;
            }
            if (lane == 31) sums[parity + warp] = up_to;
            __syncthreads();
            u64 before = carry + up_to - sum;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                const u64 other = sums[parity + w];
                carry += other;
                before += w < warp ? other : 0;
            }
            if (c < width / 2) {
                const u32 start = (u32)before, tile = before >> 32;
                *(uint2 *)(starts + 2 * c) = {start, start + all[0]};
                *(uint2 *)(next + 2 * c) = {start + earlier[0], start + all[0] + earlier[1]};
                if (tiles) *(uint2 *)(tiles + 2 * c) = {tile, tile + tiles0};
            }
        }
        __syncthreads();
        return carry >> 32;
    }

    __device__ __forceinline__ u32 place(u32 it) const {
        const u32 bucket = it >> RANK_BITS;
        return next[bucket] + mine()[bucket] + (it & ((1u << RANK_BITS) - 1));
    }
};

// What follows a plan's items. The blocks share out what is written here.
struct Behind {
    int *ends, *count, *pairs, *starts;
    u32 thread, threads;
    __device__ __forceinline__ Behind(const Params &p)
        : ends(p.plan + p.items), count(ends + p.experts), pairs(count + 1), starts(pairs + p.room),
          thread(blockIdx.x * THREADS + threadIdx.x), threads(p.blocks * THREADS) {}
    // ends[i] = starts[first + i · step]
    __device__ __forceinline__ void positions(const u32 *starts, u32 first, u32 step, u32 n) const {
#pragma unroll 1
        for (u32 i = thread; i < n; i += threads) ends[i] = starts[first + i * step];
    }
    __device__ __forceinline__ void tile(u32 number, u32 pair, u32 place) const {
        pairs[number] = pair;
        starts[number] = place;
    }
    __device__ __forceinline__ void no_more(const Params &p, u32 made) const {
#pragma unroll 1
        for (u32 number = made + thread; number < p.room; number += threads) tile(number, ~0u, p.items);
        if (thread == 0) {
            *count = made;
            starts[p.room] = p.items;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) plan(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    const bool tiles = p.flags & TILES;
    const u32 size = p.rounds * THREADS, run = blockIdx.x * size, items = p.items > run ? min(p.items - run, size) : 0;
    Sort s;
    s.t = threadIdx.x, s.lane = s.t % 32, s.warp = s.t / 32, s.me = blockIdx.x;
    s.buckets = p.experts * (p.slots + 1) + 1, s.width = (s.buckets + 7) & ~7u;
    s.counts = (u16 *)memory;
    s.parts = s.counts + WARPS * s.width;
    s.next = (u32 *)(s.parts + p.blocks * s.width);
    s.starts = s.next + s.width;
    s.tiles = tiles ? s.starts + s.width : nullptr;
    s.kept = s.starts + (tiles ? 2 : 1) * s.width;
    s.sums = (u64 *)(s.kept + size);
    u64 *const barriers = s.sums + 2 * WARPS;
    s.arrived = shared_address(barriers);
#if CLUSTERS
    u32 *const gathered = (u32 *)(barriers + 2);  // [size] the items of the block's run of places
    const u32 sorted = s.arrived + 8;
    if (p.blocks > 1) {
        if (s.t == 0) {
            barrier_init(s.arrived, 1);
            barrier_init(sorted, 1);
            barrier_init_fence();
            barrier_expect(s.arrived, s.shared_bytes(p.blocks));
            if (p.flags & GATHER) barrier_expect(sorted, items * 4);
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
    s.count<Route>(
        p.rounds, items, [&](Route &route, u32 item, bool there) { route.load(p, run + item, there); },
        [&](const Route &route, u32, bool there) { return there ? route.pair(p) : 0; });
    s.share(p.blocks, true);
    const u32 made = s.scan(p.blocks, p.shift);

    const Behind behind(p);
    const u32 first = s.warp * p.rounds * 32 + s.lane;
#pragma unroll 2
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 item = first + round * 32;
        if (item >= items) break;
        const u32 it = s.kept[round * THREADS + s.t], place = s.place(it);
#if CLUSTERS
        if (p.flags & GATHER) {
            const u32 q = divide(place, p.size);
            send4(remote(shared_address(gathered + (place - q * size)), q), run + item, remote(sorted, q));
        } else
#endif
            p.plan[place] = run + item;
        if (tiles) {
            const u32 bucket = it >> RANK_BITS, rank = place - s.starts[bucket];
            if ((rank & ((1u << p.shift) - 1)) == 0) behind.tile(s.tiles[bucket] + (rank >> p.shift), bucket, place);
        }
    }
    behind.positions(s.starts, tiles ? p.slots + 1 : 0, tiles ? p.slots + 1 : 1, tiles ? p.experts : s.buckets);
    if (tiles)
        behind.no_more(p, made);
    else if (behind.thread == 0)
        behind.ends[s.buckets] = p.items;
#if CLUSTERS
    if (p.flags & GATHER) {  // scattered stores to memory are slow: 3 cycles each, where a store to another block takes a third
        barrier_wait(sorted, 0);
#pragma unroll 2
        for (u32 item = first; item - first < p.rounds * 32 && item < items; item += 32) p.plan[run + item] = gathered[item];
    }
#endif
}

#if CLUSTERS
// One number of every block's, made known to all.
struct Exchange {
    u32 *numbers;  // [MOST_BLOCKS]
    u32 barrier;
    // Every thread calls it with the block's value.
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
    s.counts = (u16 *)memory;
    u16 *const parts = s.counts + WARPS * most8, *const parts2 = parts + p.blocks * slots8;
    s.next = (u32 *)(parts2 + p.blocks * experts8);
    s.starts = s.next + most8, s.tiles = nullptr;
    s.kept = s.starts + most8;
    u64 *const by_slot = (u64 *)(s.kept + size);  // [size] items sorted by slot: below the item and its expert, above its pair
    u64 *const by_pair = by_slot + size;          // [size] before and after that: as they came, then sorted by pair
    s.sums = by_pair + size;
    u64 *const barriers = s.sums + 2 * WARPS;
    u32 *const numbers = (u32 *)(barriers + 6), *const of_warps = numbers + 2 * MOST_BLOCKS, *const pair_before = of_warps + WARPS;
    const u32 arrived = shared_address(barriers), arrived2 = arrived + 8, sorted = arrived + 16, sorted2 = arrived + 24;
    const Exchange heads = {numbers, arrived + 32}, made = {numbers + MOST_BLOCKS, arrived + 40};
    s.buckets = p.experts + 1, s.width = experts8, s.parts = parts2, s.arrived = arrived2;
    Sort by_expert = s;
    s.buckets = p.slots + 1, s.width = slots8, s.parts = parts, s.arrived = arrived;
    if (s.t == 0) {
#pragma unroll
        for (u32 i = 0; i < 6; ++i) barrier_init(arrived + i * 8, 1);
        barrier_init_fence();
        barrier_expect(arrived, s.shared_bytes(p.blocks));
        barrier_expect(arrived2, by_expert.shared_bytes(p.blocks));
        barrier_expect(sorted, items * 8);
        barrier_expect(sorted2, items * 8 + (s.me > 0 && run <= p.items ? 4 : 0));
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

    // By slot.
    const u32 first = s.warp * p.rounds * 32 + s.lane;
    s.count<Route>(
        p.rounds, items, [&](Route &route, u32 item, bool there) { route.load(p, run + item, there); },
        [&](const Route &route, u32 round, bool there) {
            const u32 item = run + first + round * 32;
            if (there) by_pair[round * THREADS + s.t] = (u64)route.pair(p) << 32 | route.expert(p) << ITEM_BITS | item;
            return there ? route.slot(p) : 0;
        });
    s.share(p.blocks, true);
    s.scan(p.blocks, 0);
#pragma unroll 2
    for (u32 round = 0; round < p.rounds; ++round) {
        if (first + round * 32 >= items) break;
        const u32 at = round * THREADS + s.t, place = s.place(s.kept[at]), q = divide(place, p.size);
        send8(remote(shared_address(by_slot + (place - q * size)), q), by_pair[at], remote(sorted, q));
    }
    __syncthreads();  // all have read their warps' counts

    // By expert.
    by_expert.clear();
    barrier_wait(sorted, 0);
    by_expert.count<u64>(
        p.rounds, items, [&](u64 &it, u32 item, bool there) { it = there ? by_slot[item] : 0; },
        [&](u64 it, u32, bool) { return (u32)it >> ITEM_BITS; });
    by_expert.share(p.blocks, false);
    by_expert.scan(p.blocks, 0);
#pragma unroll 2
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 item = first + round * 32;
        if (item >= items) break;
        const u64 it = by_slot[item];
        const u32 place = by_expert.place(s.kept[round * THREADS + s.t]), q = divide(place, p.size), in = place - q * size;
        send8(remote(shared_address(by_pair + in), q), it, remote(sorted2, q));
        if (in == size - 1 && q + 1 < p.blocks) send4(remote(shared_address(pair_before), q + 1), it >> 32, remote(sorted2, q + 1));
    }
    const Behind behind(p);
    behind.positions(s.starts, 1, 1, p.experts);
    barrier_wait(sorted2, 0);

    // Where pairs start: the last such place in every warp, then in every block. Places count from 1 here, 0 is none.
    auto pair_of = [&](u32 i) { return (u32)(by_pair[i] >> 32); };
    auto starts_pair = [&](u32 i) { return i < items && (run + i == 0 || pair_of(i) != (i ? pair_of(i - 1) : *pair_before)); };
    u32 last = 0;
#pragma unroll 1
    for (u32 round = 0; round < p.rounds; ++round) {
        const u32 i = first + round * 32, votes = __ballot_sync(~0u, starts_pair(i));
        if (votes) last = run + i - s.lane + 32 - __clz(votes);
        if (i < items) p.plan[run + i] = (u32)by_pair[i] & ((1u << ITEM_BITS) - 1);
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
        if (at != ~0u) behind.tile(before + at, pair_of(i), run + i);
    }
    behind.no_more(p, total);
}
#endif
