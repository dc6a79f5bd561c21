// h = scaling · x Aᵀ for many rows that lie in order: x and A by TMA, every adapter's A at once, wgmma.
//
// A block has a tile of rows, some chunks of D and some adapters. One warp fetches, a ring of stages of 64 columns of D; the others
// multiply 64 rows each by the A of all these adapters, side by side, and each row keeps the columns of its own. So rows need no order,
// no plan and no gathering, as long as few adapters share the rows. Blocks whose adapters no row has end at once.
//
// The order of every sum is that of kernels/shrink.py: pieces of 128 columns from zero, added in order to their chunk's sum, chunks in
// order to the total.
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __device__ const int available = 1;
#else
extern "C" __device__ const int available = 0; // no wgmma: the kernels below are empty
#endif

static constexpr u32 BK = 64, PIECE = 128, MAX_STAGES = 8;
static constexpr u32 IDS64 = 1, HALVES = 2, FILL = 4; // flags

struct __align__(64) Params {
    u64 map[16];   // A's: axes (d, r, group, adapter)
    u64 x_map[16]; // x's: axes (d, row, group)
    void *h;       // float32; by HALVES bf16: a row's high parts, then its low ones
    const void *ids;       // null: slot 0
    const int *ranks;      // may be null
    const float *scalings; // may be null
    i64 ids_stride, h_c, h_t, h_g; // elements
    u32 rows, slots, features, rank;
    u32 x_groups, a_groups;
    u32 tiles, groups, turns; // blocks: tiles · groups · turns of adapters · parts of D
    u32 chunk, chunks, span; // columns of a chunk; chunks of D; chunks of a block, each written apart (0: all, added)
    u32 flags;
    u32 stages; // of the ring
    u32 unused[2];
};
static_assert(sizeof(Params) == 384); // as ops/shrink_cuda.py packs it

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ROWS of a tile; COLUMNS of all adapters.
template <u32 ROWS, u32 COLUMNS> struct Shared {
    static constexpr u32 X_BYTES = ROWS * BK * 2, STAGE = X_BYTES + COLUMNS * BK * 2;
    union {
        struct { u64 full[MAX_STAGES], empty[MAX_STAGES]; };
        u8 head[1024]; // swizzled tiles start at multiples of 1024 bytes
    };
    u8 stages[][STAGE]; // as many as the launch has room for
};

struct Ring {
    u32 count, stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == count) stage = 0, phase ^= 1;
    }
};

struct Part { u32 tile, group, slot, first, last; }; // rows; the first adapter; chunks first … last − 1
template <u32 ADAPTERS> __device__ __forceinline__ Part part_of(const Params &p) {
    const u32 tile = blockIdx.x % p.tiles, rest = blockIdx.x / p.tiles, group = rest % p.groups, turn = rest / p.groups % p.turns;
    const u32 first = rest / p.groups / p.turns * p.span;
    return {tile, group, turn * ADAPTERS, first, p.span ? min(first + p.span, p.chunks) : p.chunks};
}

template <u32 ROWS, u32 ADAPTERS, class S> __device__ __forceinline__ void fetch(const Params &p, S &s, const Part &part) {
    if (threadIdx.x != 2 * ROWS) return;
    const u32 end = min(part.last * p.chunk, p.features), bytes = S::X_BYTES + min(p.slots, ADAPTERS) * p.rank * (BK * 2);
    const u32 x_group = p.x_groups > 1 ? part.group : 0, a_group = p.a_groups > 1 ? part.group : 0;
    Ring ring{p.stages};
    for (u32 k = part.first * p.chunk; k < end; k += BK, ring.next()) {
        const u64 &full = s.full[ring.stage];
        const u32 at = shared_address(s.stages[ring.stage]);
        wait(s.empty[ring.stage], ring.phase ^ 1);
        barrier_expect(shared_address(&full), bytes);
        fetch_box(at, p.x_map, k, part.tile * ROWS, x_group, 0, full);
        fetch_box(at + S::X_BYTES, p.map, k, 0, a_group, part.slot, full);
    }
}

__device__ __forceinline__ u32 slot_of(const Params &p, u32 row) {
    if (p.ids == nullptr) return 0;
    const i64 at = row * p.ids_stride;
    const i64 id = p.flags & IDS64 ? ((const i64 *)p.ids)[at] : ((const int *)p.ids)[at];
    return id >= 0 && id < p.slots ? (u32)id : p.slots;
}

__device__ __forceinline__ u32 low_half(float v, u32 high) {
    const float whole = bf16::widen(high);
    return bf16::round(whole == v ? 0.0f : v - whole);
}

// A thread's part of a row of h: two columns of every eight.
template <u32 KEEP, u32 ADAPTERS>
__device__ __forceinline__ void write(const Params &p, const Part &part, u32 row, u32 slot, u32 chunk, const float (&sums)[KEEP / 2], u32 lower) {
    const bool active = slot < p.slots;
    if (row >= p.rows || (active ? slot - part.slot >= ADAPTERS : !(p.flags & FILL) || part.slot)) return;
    const u32 rank = !active ? 0 : p.ranks == nullptr ? p.rank : (u32)min(max(p.ranks[slot], 0), (int)p.rank), quad = threadIdx.x % 4;
    const float scaling = active && p.scalings != nullptr ? p.scalings[slot] : 1.0f;
    const i64 at = chunk * p.h_c + row * p.h_t + part.group * p.h_g;
#pragma unroll
    for (u32 j = 0; j < KEEP / 8; ++j) {
        const u32 r = 8 * j + 2 * quad;
        const float v0 = r < rank ? product(sums[4 * j + lower], scaling) : 0.0f;
        const float v1 = r + 1 < rank ? product(sums[4 * j + lower + 1], scaling) : 0.0f;
        if (p.flags & HALVES) {
            if (r >= p.rank) continue;
            u16 *h = (u16 *)p.h + at + r;
            const u32 high = two(v0, v1);
            *(u32 *)h = high;
            *(u32 *)(h + p.rank) = low_half(v0, high & 0xffff) | low_half(v1, high >> 16) << 16;
        } else {
            float *h = (float *)p.h + at + r;
            if (p.rank % 2 == 0) {
                if (r < p.rank) *(float2 *)h = make_float2(v0, v1);
            } else {
                if (r < p.rank) h[0] = v0;
                if (r + 1 < p.rank) h[1] = v1;
            }
        }
    }
}

template <u32 ROWS, u32 COLUMNS, u32 KEEP, bool WHOLE, class S>
__device__ __forceinline__ void multiply_and_write(const Params &p, S &s, const Part &part, const u32 (&slots)[2]) {
    static constexpr u32 ADAPTERS = COLUMNS / KEEP;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, upper = warp / 4;
    const u32 row = part.tile * ROWS + upper * 64 + warp % 4 * 16 + lane / 4; // and the eighth behind it
    float d[COLUMNS / 2], sums[KEEP / 2], total[WHOLE ? KEEP / 2 : 1];
#pragma unroll
    for (u32 i = 0; i < KEEP / 2; ++i) sums[i] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < (WHOLE ? KEEP / 2 : 1); ++i) total[i] = 0.0f;
    const u32 end = min(part.last * p.chunk, p.features);
    u32 chunk = part.first;
    Ring ring{p.stages};
#pragma unroll 1
    for (u32 k = part.first * p.chunk; k < end; k += PIECE) {
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 2; ++j) d[j] = 0.0f;
#pragma unroll 1
        for (u32 half = k; half < min(k + PIECE, end); half += BK, ring.next()) {
            wait(s.full[ring.stage], ring.phase);
            const u32 at = shared_address(s.stages[ring.stage]);
            const u64 x = k_major(at + upper * (64 * 128)), a = k_major(at + S::X_BYTES);
            multiplies_begin();
#pragma unroll
            for (u32 j = 0; j < BK / 16; ++j) multiply<false>(d, x + K_MAJOR_16 * j, a + K_MAJOR_16 * j);
            multiplies_commit();
            multiplied(d);
            if (lane == 0) arrive(s.empty[ring.stage]);
        }
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 2; ++j)
            if (ADAPTERS == 1 || slots[j / 2 % 2] - part.slot == j / (KEEP / 2)) sums[j % (KEEP / 2)] += d[j];
        if ((k + PIECE) % p.chunk != 0 && k + PIECE < end) continue;
        if constexpr (!WHOLE) {
            write<KEEP, ADAPTERS>(p, part, row, slots[0], chunk, sums, 0);
            write<KEEP, ADAPTERS>(p, part, row + 8, slots[1], chunk, sums, 2);
        }
        ++chunk;
#pragma unroll
        for (u32 j = 0; j < KEEP / 2; ++j) {
            if constexpr (WHOLE) total[j] += sums[j];
            sums[j] = 0.0f;
        }
    }
    if constexpr (WHOLE) {
        write<KEEP, ADAPTERS>(p, part, row, slots[0], 0, total, 0);
        write<KEEP, ADAPTERS>(p, part, row + 8, slots[1], 0, total, 2);
    }
}

template <u32 ROWS> static constexpr u32 THREADS = 2 * ROWS + (ROWS == 256 ? 128 : 32); // registers move between groups of four warps

template <u32 ROWS, u32 COLUMNS, u32 KEEP, bool WHOLE> __device__ __forceinline__ void run(const Params &p) {
    static constexpr u32 ADAPTERS = COLUMNS / KEEP;
    extern __shared__ u8 memory[];
    using S = Shared<ROWS, COLUMNS>;
    S &s = *(S *)(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < p.stages; ++i) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), ROWS / 16);
        }
        barrier_init_fence();
    }
    wait_for_producer(); // first wait, then let the next start: what it reads before it waits for this kernel is older than the one before
    let_consumer_start();
    const Part part = part_of<ADAPTERS>(p);
    u32 slots[2] = {p.slots, p.slots};
    bool mine = false;
    if (threadIdx.x < 2 * ROWS) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 row = part.tile * ROWS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
            if (row < p.rows) slots[i] = slot_of(p, row);
            mine |= slots[i] - part.slot < ADAPTERS && slots[i] < p.slots;
        }
    }
    const bool some = any_of<THREADS<ROWS>>(1, mine);
    if (!some && p.turns > 1 && !(part.slot == 0 && p.flags & FILL)) return;
    if (threadIdx.x < 2 * ROWS) {
        if constexpr (ROWS == 256) more_registers<112>(); // of 96 that each of 640 threads starts with
        multiply_and_write<ROWS, COLUMNS, KEEP, WHOLE>(p, s, part, slots);
    } else {
        if constexpr (ROWS == 256) fewer_registers<24>();
        fetch<ROWS, ADAPTERS>(p, s, part);
    }
}

#define KERNEL(name, rows, columns, keep, blocks, whole)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS<rows>, blocks)    shrink_##name(const __grid_constant__ Params p) {                       \
        run<rows, columns, keep, whole>(p);                                                                                                        \
    }
#else
#define KERNEL(name, rows, columns, keep, blocks, whole) extern "C" __global__ void shrink_##name(const __grid_constant__ Params p) {}
#endif

// Rows of a tile, columns of all adapters, those that a row keeps; blocks on a multiprocessor; whether chunks are added.
KERNEL(64_16_16, 64, 16, 16, 2, false)
KERNEL(64_32_32, 64, 32, 32, 2, false)
KERNEL(64_64_64, 64, 64, 64, 2, false)
KERNEL(64_128_16, 64, 128, 16, 1, false)
KERNEL(64_128_32, 64, 128, 32, 1, false)
KERNEL(64_128_64, 64, 128, 64, 1, false)
KERNEL(128_16_16, 128, 16, 16, 2, false)
KERNEL(128_32_32, 128, 32, 32, 2, false)
KERNEL(128_64_64, 128, 64, 64, 2, false)
KERNEL(128_32_16, 128, 32, 16, 2, false)
KERNEL(128_64_16, 128, 64, 16, 2, false)
KERNEL(128_64_32, 128, 64, 32, 2, false)
KERNEL(128_128_16, 128, 128, 16, 1, false)
KERNEL(128_128_32, 128, 128, 32, 1, false)
KERNEL(128_128_64, 128, 128, 64, 1, false)
KERNEL(256_128_16, 256, 128, 16, 1, false)
KERNEL(128_16_16_whole, 128, 16, 16, 2, true)
KERNEL(128_32_32_whole, 128, 32, 32, 2, true)
KERNEL(128_64_64_whole, 128, 64, 64, 1, true)
KERNEL(128_32_16_whole, 128, 32, 16, 2, true)
KERNEL(128_64_16_whole, 128, 64, 16, 2, true)
KERNEL(128_64_32_whole, 128, 64, 32, 2, true)
KERNEL(128_128_32_whole, 128, 128, 32, 1, true)
KERNEL(128_128_64_whole, 128, 128, 64, 1, true)
KERNEL(256_128_16_whole, 256, 128, 16, 1, true)
