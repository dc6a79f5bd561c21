// y = x Wᵀ + scaling · h Bᵀ + bias for a few rows (up to 128), in one accumulator: W streams by TMA, LoRA is made ready beside it.
//
// A block has all rows of BN columns of y, or from 65 rows on half of them. Four warps multiply (16 rows: mma, eight columns a warp; 64:
// wgmma). One thread fetches W by TMA and one x, each into a ring of stages of 128 columns of D (16 rows: 256); x, which is in the L2,
// arrives sooner and so needs fewer. With LoRA three more warps (where W is converted, two) find the adapters that occur, copy their B
// into shared memory, wait for the kernel ahead, which has meanwhile made h in chunks, add these up, scale them and cut them into two
// bf16, high and low. Then a row's h meets every adapter's B that occurs in its 16 rows, and keeps its own adapter's sum alone; so Inf
// and NaN stay with their rows.
//
// Shared memory is what the launch needs, so that blocks of the kernel ahead have room beside it. Where that leaves none for B (LATE),
// B is called into the L2 at first and comes to where the rings were when they are no longer needed.
//
// W of e4m3 arrives as it is. For up to 16 rows the warps that multiply convert it into bf16 in registers; for more, whose products read
// shared memory, eight more warps do, into a ring of a few stages. Scales of e8m0 multiply W there; those of float32 a block's sum, which
// starts from zero.
//
// The order of every sum is that of kernels/linear.py: one chain over D (or one a block of 128 columns, added by an fma), then for each
// piece of `rank_block` columns of h all of high before all of low.
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __device__ const int available = 1;
#else
extern "C" __device__ const int available = 0;
#endif

static constexpr u32 MATH = 128, FETCH = MATH, FETCH_X = FETCH + 32, HELP = FETCH_X + 32;
static constexpr u32 CONVERTERS = 256, GROUP = 128; // each of two groups has every other stage, so rings of even lengths
static constexpr u32 BLOCK = 128; // rows and columns of W that share a scale
static constexpr u32 MAX_ROWS = 64, MAX_SLICES = 8, MAX_STAGES = 16, MAX_CONVERTED = 4;
static constexpr u32 IDS64 = 1, BIAS32 = 2, OVERLAP = 4, NEXT = 8, LATE = 16, POWERS = 32; // POWERS: scales are e8m0

struct __align__(64) Params {
    u64 map[16];    // W's: axes (d, n, group, 1)
    u64 x_map[16];  // x's: axes (d, row, group)
    const float *h; // chunks of x Aᵀ
    const u16 *b;
    const void *bias; // may be null
    u16 *out;
    const void *ids; // null: slot 0
    const int *ranks;
    const float *scalings; // may be null
    i64 ids_stride, h_c, h_t, h_g, b_l, b_g, b_n, c_g, o_t, o_g; // elements
    u32 rows, slots, features, columns, rank, x_groups;
    u32 chunks, flags;
    u32 stages, x_stages, adapters; // of the rings; whose B there is room for
    u32 slices;
    u32 starts[MAX_SLICES + 1];
    u32 height; // rows of a block, a multiple of 8
    const void *scales; // of W in e4m3: axes (group, 128 of n, 128 of d)
    i64 s_g, s_n, s_d;
};
static_assert(sizeof(Params) == 512);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Shared { // behind the rings; then h's parts, then B
    u32 slots[MAX_ROWS]; // p.slots: none
    u32 ranks[MAX_ROWS];
    float scalings[MAX_ROWS];
    u32 list[MAX_ROWS]; // a row of each adapter that occurs
    u64 full[MAX_STAGES], empty[MAX_STAGES], x_full[MAX_STAGES], x_empty[MAX_STAGES], converted[MAX_CONVERTED], used[MAX_CONVERTED];
    u32 count;
};
extern "C" __device__ const int shared_bytes = 1024 + (sizeof(Shared) + 15) / 16 * 16;

struct Block { u32 group, out_group, n, n_end, first, rows; }; // rows: from the first on
template <u32 BN> __device__ __forceinline__ Block block_of(const Params &p) {
    u32 block = blockIdx.x, first = 0;
    if (p.rows > p.height) first = block % 2 * p.height, block /= 2; // two blocks, which read W at the same time
    const u32 rows = min(p.height, p.rows - first);
    if (!p.slices) {
        const u32 width = (p.columns + BN - 1) / BN;
        return {block / width, block / width, block % width * BN, p.columns, first, rows};
    }
    u32 group = 0;
    for (u32 width; block >= (width = (p.starts[group + 1] - p.starts[group] + BN - 1) / BN);) block -= width, ++group;
    return {group, 0, p.starts[group] + block * BN, p.starts[group + 1], first, rows};
}

template <u32 ROWS_, u32 BN_, u32 RANKS_, bool E4M3_> struct Sizes {
    static constexpr u32 ROWS = ROWS_, BN = BN_, RANKS = RANKS_;
    static constexpr bool E4M3 = E4M3_, CONVERTS = E4M3 && ROWS > 16; // by warps of their own
    static constexpr u32 HELPERS = CONVERTS ? 64 : 96, CONVERT = HELP + (RANKS ? HELPERS : 0);
    static constexpr u32 THREADS = CONVERT + (CONVERTS ? CONVERTERS : 0);
    static constexpr u32 CONVERTED = BN == 32 ? 4 : 2; // stages of W in bf16
    static constexpr u32 BK = ROWS == 16 ? 256 : 128; // columns of D of a stage
    static constexpr u32 W_BYTES = BN * BK * 2, RAW_BYTES = E4M3 ? W_BYTES / 2 : W_BYTES, X_BYTES = ROWS * BK * 2; // of a stage
    static constexpr u32 PARTS = RAW_BYTES / (BN * 128); // of W's rows, 128 bytes each
    // rows of h and of B: and 16 bytes more, so that eight rows lie in different banks
    static constexpr u32 H_PITCH = 4 * RANKS + 16, B_PITCH = 2 * RANKS + 16, FACTOR = BN * B_PITCH;
    static constexpr u32 WARP_COLUMNS = ROWS == 16 ? BN / 4 : BN, TILES = WARP_COLUMNS / 8;
};

struct Room {
    u8 *w, *raw, *x; // w: in bf16, raw: as it arrives; the same where nothing is converted ahead of the products
    Shared *s;
    u8 *h, *b;
};
struct Ring {
    u32 count, stage = 0, phase = 0;
    __device__ __forceinline__ void next(u32 by = 1) {
        if ((stage += by) >= count) stage -= count, phase ^= 1;
    }
    __device__ __forceinline__ u32 before() const { return (stage ? stage : count) - 1; }
};

template <class S> __device__ __forceinline__ void fetch_w(const Params &p, const Room &room, const Block &block, u32 stage, u32 k) {
    const u64 &full = room.s->full[stage];
    barrier_expect(shared_address(&full), S::RAW_BYTES);
#pragma unroll
    for (u32 part = 0; part < S::PARTS; ++part)
        fetch_box(shared_address(room.raw + stage * S::RAW_BYTES) + part * (S::BN * 128), p.map, k + S::BK / S::PARTS * part, block.n,
                  block.out_group, 0, full);
}
template <class S> __device__ __forceinline__ void fetch_x(const Params &p, const Room &room, const Block &block, u32 stage, u32 k) {
    const u64 &full = room.s->x_full[stage];
    barrier_expect(shared_address(&full), p.height * (S::BK * 2)); // what lies behind them in a stage is multiplied, and not looked at
#pragma unroll
    for (u32 part = 0; part < S::BK / 64; ++part)
        fetch_box(shared_address(room.x + stage * S::X_BYTES) + part * (S::ROWS * 128), p.x_map, k + 64 * part, block.first,
                  p.x_groups > 1 ? block.group : 0, 0, full);
}

// By one thread each: what the rings hold, in the order in which it is needed; then the rest of W, and of x.
template <class S> __device__ __forceinline__ void begin(const Params &p, const Room &room, const Block &block) {
#pragma unroll 1
    for (u32 i = 0; i < max(p.stages, p.x_stages) && i * S::BK < p.features; ++i) {
        if (i < p.x_stages) fetch_x<S>(p, room, block, i, i * S::BK);
        if (i < p.stages) fetch_w<S>(p, room, block, i, i * S::BK);
    }
}
template <class S> __device__ __forceinline__ void go_on(const Params &p, const Room &room, const Block &block, bool w) {
    Shared &s = *room.s;
    Ring ring{w ? p.stages : p.x_stages, 0, 1};
#pragma unroll 1
    for (u32 k = ring.count * S::BK; k < p.features; k += S::BK, ring.next()) {
        wait((w ? s.empty : s.x_empty)[ring.stage], ring.phase ^ 1);
        if (w) fetch_w<S>(p, room, block, ring.stage, k);
        else fetch_x<S>(p, room, block, ring.stage, k);
    }
}

// --- W of e4m3 ---

__device__ __forceinline__ float power_of_e8m0(u8 v) { // 2^(v − 127), 255: NaN
    return __uint_as_float(v == 255 ? 0x7fc00000 : v == 0 ? 1 << 22 : (u32)v << 23);
}
// A power of two as two bf16, which W is multiplied with; by ones where it is a block's sum that is scaled.
__device__ __forceinline__ u32 pair_of(float power) { return (__float_as_uint(power) >> 16) * 0x10001; }
static constexpr u32 ONES = 0x3f803f80;
// Two e4m3, which bf16 holds, times two equal scales, rounded to bf16.
__device__ __forceinline__ u32 bf16_of_e4m3(u16 bytes, u32 scales) {
    const Two v = two_of_e4m3(bytes);
    return products(__byte_perm(__float_as_uint(v.first), __float_as_uint(v.second), 0x7632), scales);
}

// The scales of a block's columns, from the first one on: lane i reads that of 128 · (32 a + i) columns of D on. Behind D they are 1.
struct Scales {
    u32 first = 0;
    float mine = 1.0f;
    __device__ __forceinline__ float of(const Params &p, const Block &block, u32 which) {
        if (which % 32 == first) {
            const u32 at = which - first + threadIdx.x % 32;
            const i64 place = block.out_group * p.s_g + block.n / BLOCK * p.s_n + at * p.s_d;
            if (at * BLOCK >= p.features) mine = 1.0f;
            else mine = p.flags & POWERS ? power_of_e8m0(((const u8 *)p.scales)[place]) : ((const float *)p.scales)[place];
        }
        return __shfl_sync(~0u, mine, which % 32);
    }
};

template <class S> __device__ __forceinline__ void convert(const Params &p, const Room &room, const Block &block) {
    static constexpr u32 CHUNKS = S::BN / 16; // of a thread: 16 elements of a row each
    Shared &s = *room.s;
    const u32 lane = threadIdx.x % 32, warp = (threadIdx.x - S::CONVERT) % GROUP / 32, steps = (p.features + S::BK - 1) / S::BK;
    const u32 first = (threadIdx.x - S::CONVERT) / GROUP;
    Ring raw{p.stages, first}, ring{S::CONVERTED, first};
    Scales scales{first * S::PARTS};
#pragma unroll 1
    for (u32 step = first; step < steps; step += 2, raw.next(2), ring.next(2)) {
        wait(s.full[raw.stage], raw.phase);
        wait(s.used[ring.stage], ring.phase ^ 1);
#pragma unroll
        for (u32 part = 0; part < S::PARTS; ++part) { // 128 columns of D
            const u32 from = shared_address(room.raw + raw.stage * S::RAW_BYTES) + part * (S::BN * 128);
            const u32 to = shared_address(room.w + ring.stage * S::W_BYTES) + part * (S::BN * 256);
            // of 32 rows at once, whose places lie in different banks
            auto row_of = [&](u32 i) { return i / 2 * 32 + lane; };
            auto chunk_of = [&](u32 i) { return i % 2 * 4 + warp; };
            uint4 chunks[CHUNKS];
#pragma unroll
            for (u32 i = 0; i < CHUNKS; ++i) chunks[i] = load16(from + row_of(i) * 128 + (chunk_of(i) ^ row_of(i) % 8) * 16);
            const u32 scale = p.flags & POWERS ? pair_of(scales.of(p, block, step * S::PARTS + part)) : ONES;
            auto eight = [=](u32 a, u32 b) {
                return make_uint4(bf16_of_e4m3(a, scale), bf16_of_e4m3(a >> 16, scale), bf16_of_e4m3(b, scale), bf16_of_e4m3(b >> 16, scale));
            };
#pragma unroll
            for (u32 i = 0; i < CHUNKS; ++i) {
                const u32 row = to + chunk_of(i) / 4 * (S::BN * 128) + row_of(i) * 128, place = chunk_of(i) % 4 * 2;
                store16(row + (place ^ row_of(i) % 8) * 16, eight(chunks[i].x, chunks[i].y));
                store16(row + (place + 1 ^ row_of(i) % 8) * 16, eight(chunks[i].z, chunks[i].w));
            }
        }
        written_for_matrix_units();
        __syncwarp();
        if (lane == 0) {
            arrive(s.converted[ring.stage]);
            if (step + p.stages < steps) arrive(s.empty[raw.stage]);
        }
    }
}

// --- the helpers: adapters, B, h ---

template <class S> __device__ __forceinline__ void find_adapters(const Params &p, Shared &s, const Block &block) {
    const u32 row = threadIdx.x - HELP;
    u32 slot = p.slots;
    if (row < S::ROWS) {
        if (row < block.rows) {
            if (p.ids == nullptr) slot = 0;
            else {
                const i64 at = (block.first + row) * p.ids_stride;
                const i64 id = p.flags & IDS64 ? ((const i64 *)p.ids)[at] : ((const int *)p.ids)[at];
                if (id >= 0 && id < p.slots) slot = (u32)id;
            }
        }
        s.slots[row] = slot;
        if (row == 0) s.count = 0;
    }
    any_of<S::HELPERS>(2, false);
    if (row < S::ROWS) {
        bool first = slot < p.slots;
        const u32 rank = !first ? 0 : p.ranks == nullptr ? p.rank : (u32)min(max(p.ranks[slot], 0), (int)p.rank);
        s.ranks[row] = rank;
        s.scalings[row] = first && p.scalings != nullptr ? p.scalings[slot] : 1.0f;
        for (u32 other = 0; other < row; ++other) first &= s.slots[other] != slot;
        if (first) s.list[atomicAdd(&s.count, 1)] = row;
    }
    any_of<S::HELPERS>(2, false);
}

template <class S> __device__ __forceinline__ void load_factors(const Params &p, const Room &room, const Block &block, u32 first) {
    static constexpr u32 PARTS = S::RANKS / 8; // of a row, 16 bytes each
    const Shared &s = *room.s;
    const u32 count = min(s.count - first, p.adapters);
#pragma unroll 4
    for (u32 i = threadIdx.x - HELP; i < count * S::BN * PARTS; i += S::HELPERS) {
        const u32 adapter = i / (S::BN * PARTS), rest = i % (S::BN * PARTS), n = rest / PARTS, r = rest % PARTS * 8;
        const u32 row = s.list[first + adapter], slot = s.slots[row], rank = s.ranks[row];
        const u32 bytes = block.n + n < block.n_end && r < rank ? 2 * min(rank - r, 8u) : 0;
        const u16 *from = p.b + slot * p.b_l + block.out_group * p.b_g + (block.n + n) * p.b_n + r;
        copy16(shared_address(room.b) + adapter * S::FACTOR + n * S::B_PITCH + r * 2, bytes ? from : p.b, bytes);
    }
    copies_commit();
}

struct Halves { u32 high, low; }; // of two floats, bf16 each
__device__ __forceinline__ Halves halves(float a, float b) {
    const u32 high = two(a, b);
    const float wide_a = bf16::widen(high & 0xffff), wide_b = bf16::widen(high >> 16);
    return {high, two(wide_a == a ? 0.0f : a - wide_a, wide_b == b ? 0.0f : b - wide_b)};
}

// scaling · h, high and low of a row side by side.
template <class S> __device__ __forceinline__ void add_chunks(const Params &p, const Room &room, const Block &block) {
    static constexpr u32 QUADS = S::RANKS / 4;
    const Shared &s = *room.s;
#pragma unroll 2
    for (u32 i = threadIdx.x - HELP; i < S::ROWS * QUADS; i += S::HELPERS) {
        const u32 row = i / QUADS, r = i % QUADS * 4, rank = s.ranks[row];
        float4 chunks[8];
        const float *from = p.h + (block.first + row) * p.h_t + block.group * p.h_g + r;
#pragma unroll
        for (u32 c = 0; c < 8; ++c) {
            chunks[c] = r < rank && c < p.chunks ? *(const float4 *)from : float4{0.0f, 0.0f, 0.0f, 0.0f};
            from += p.h_c;
        }
        float4 sum = chunks[0];
#pragma unroll
        for (u32 c = 1; c < 8; ++c)
            if (c < p.chunks) sum.x += chunks[c].x, sum.y += chunks[c].y, sum.z += chunks[c].z, sum.w += chunks[c].w;
        const float scaling = s.scalings[row];
        auto scaled = [&](float v, u32 at) { return at < rank ? product(v, scaling) : 0.0f; };
        const Halves a = halves(scaled(sum.x, r), scaled(sum.y, r + 1)), b = halves(scaled(sum.z, r + 2), scaled(sum.w, r + 3));
        u8 *to = room.h + row * S::H_PITCH + r * 2;
        *(uint2 *)to = make_uint2(a.high, b.high);
        *(uint2 *)(to + S::RANKS * 2) = make_uint2(a.low, b.low);
    }
}

template <class S> __device__ __forceinline__ void call_factors(const Params &p, const Room &room, const Block &block) {
    const Shared &s = *room.s;
    for (u32 i = threadIdx.x - HELP; i < s.count * S::BN; i += S::HELPERS) {
        const u32 row = s.list[i / S::BN], n = block.n + i % S::BN;
        if (n < block.n_end && s.ranks[row]) call_into_l2(p.b + s.slots[row] * p.b_l + block.out_group * p.b_g + n * p.b_n);
    }
}

template <class S> __device__ __forceinline__ void help(const Params &p, const Room &room, const Block &block) {
    find_adapters<S>(p, *room.s, block);
    if (p.flags & LATE) call_factors<S>(p, room, block);
    else load_factors<S>(p, room, block, 0);
    if (p.flags & OVERLAP) wait_for_producer(); // it makes h
    add_chunks<S>(p, room, block);
    if (p.flags & LATE) {
        any_of<MATH + S::HELPERS>(1, false);
        load_factors<S>(p, room, block, 0);
    }
    for (u32 first = 0;;) {
        copies_wait<0>();
        any_of<MATH + S::HELPERS>(1, false);
        if ((first += p.adapters) >= room.s->count) break;
        any_of<MATH + S::HELPERS>(1, false); // more adapters than there is room for
        load_factors<S>(p, room, block, first);
    }
}

// --- the others: y ---

template <class S> __device__ __forceinline__ void multiply(const Params &p, const Room &room, const Block &block, float (&d)[4 * S::TILES]) {
    Shared &s = *room.s;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (p.features + S::BK - 1) / S::BK;
    const u32 stages = S::CONVERTS ? S::CONVERTED : p.stages;
    u64 *const full = S::CONVERTS ? s.converted : s.full, *const empty = S::CONVERTS ? s.used : s.empty;
    auto release = [&](u32 step, u32 stage, u32 x_stage) { // where somebody waits
        if (lane == 0 && step + stages < steps) arrive(empty[stage]);
        if (lane == 0 && step + p.x_stages < steps) arrive(s.x_empty[x_stage]);
    };
    Ring ring{stages}, x_ring{p.x_stages};
    auto arrived = [&] {
        wait(s.x_full[x_ring.stage], x_ring.phase);
        wait(full[ring.stage], ring.phase);
    };
    const bool apart = S::E4M3 && !(p.flags & POWERS); // a block's sum
    float total[S::E4M3 ? 4 * S::TILES : 1];
    Scales scales;
    float scale = 1.0f;
    if constexpr (S::E4M3)
#pragma unroll
        for (u32 i = 0; i < 4 * S::TILES; ++i) total[i] = 0.0f;
    auto add_block = [&](float scale) {
        if constexpr (S::E4M3)
#pragma unroll
            for (u32 i = 0; i < 4 * S::TILES; ++i) total[i] = __fmaf_rn(d[i], scale, total[i]), d[i] = 0.0f;
    };
    auto next = [&] { ring.next(), x_ring.next(); };
    if constexpr (S::ROWS == 16) {
        // Every product waits for the one before. Behind the first of four what the next four need is loaded: more often, and a product
        // would wait for loads that were issued just ahead of it.
        static constexpr u32 QUARTERS = S::BK / 64;
        const u32 w_row = warp * 8 + (S::E4M3 ? lane / 4 : lane % 8), x_row = lane % 16;
        struct Four { u32 w[2][4], x[4][4]; } four[2]; // products: of a quarter of a stage
        auto load = [&](Four &to, u32 quarter) {
            const u32 x_at = shared_address(room.x + x_ring.stage * S::X_BYTES) + quarter * (S::ROWS * 128) + x_row * 128;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) load_matrix4(to.x[i], x_at + ((2 * i + lane / 16) ^ x_row) % 8 * 16);
            const u32 w_at = shared_address(room.raw + ring.stage * S::RAW_BYTES) + quarter * S::PARTS / QUARTERS * (S::BN * 128) + w_row * 128;
            if constexpr (S::E4M3) { // two times two bytes of each 16
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 from = w_at + ((quarter % 2 * 4 + i) ^ w_row % 8) * 16 + lane % 4 * 2;
                    to.w[i / 2][i % 2 * 2] = load2(from), to.w[i / 2][i % 2 * 2 + 1] = load2(from + 8);
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < 2; ++i) load_matrix4(to.w[i], w_at + ((4 * i + lane / 8) ^ w_row) % 8 * 16);
            }
        };
        auto add = [&](const Four &v, u32 i, u32 powers) {
            u32 b[2] = {v.w[i / 2][i % 2 * 2], v.w[i / 2][i % 2 * 2 + 1]};
            if constexpr (S::E4M3)
#pragma unroll
                for (u32 &part : b) part = bf16_of_e4m3((u16)part, powers);
            bf16::mma(d, v.x[i], b[0], b[1]);
        };
        arrived();
        load(four[0], 0);
#pragma unroll 1
        for (u32 step = 0; step < steps; ++step) {
            const u32 stage = ring.stage, x_stage = x_ring.stage;
#pragma unroll
            for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
                const Four &mine = four[quarter % 2];
                if (S::E4M3 && quarter % 2 == 0) scale = scales.of(p, block, step * (S::BK / BLOCK) + quarter / 2);
                const u32 powers = p.flags & POWERS ? pair_of(scale) : ONES;
                add(mine, 0, powers);
                if (quarter == QUARTERS - 1) {
                    next();
                    if (step + 1 < steps) arrived();
                    __syncwarp();
                }
                load(four[(quarter + 1) % 2], (quarter + 1) % QUARTERS); // behind the last stage of what lies there
#pragma unroll
                for (u32 i = 1; i < 4; ++i) add(mine, i, powers);
                if (apart && quarter % 2) add_block(scale);
            }
            release(step, stage, x_stage);
        }
    } else {
        auto issue = [&] {
            const u32 w_at = shared_address(room.w + ring.stage * S::W_BYTES), x_at = shared_address(room.x + x_ring.stage * S::X_BYTES);
            arrived();
            multiplies_begin();
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                ::multiply<false>(d, k_major(x_at + i / 4 * (S::ROWS * 128)) + i % 4 * K_MAJOR_16,
                                  k_major(w_at + i / 4 * (S::BN * 128)) + i % 4 * K_MAJOR_16);
            multiplies_commit();
        };
        // A stage that is held longer is one less under way. Where there are few, and W comes from memory (of two blocks one reads it in the
        // L2), that costs more than a stage's products that begin while those of the one before still run are worth.
        const bool few = S::BN == 64 && (S::CONVERTS || p.rows <= p.height);
        if (apart || few) {
#pragma unroll 1
            for (u32 step = 0; step < steps; ++step, next()) {
                issue();
                if (apart) scale = scales.of(p, block, step);
                multiplied(d);
                release(step, ring.stage, x_ring.stage);
                if (apart) add_block(scale);
            }
        } else {
#pragma unroll 1
            for (u32 step = 0; step < steps; ++step, next()) {
                issue();
                multiplies_wait<1>();
                if (step > 0) release(step - 1, ring.before(), x_ring.before());
            }
            multiplied(d);
        }
    }
    if constexpr (S::E4M3)
        if (apart)
#pragma unroll
            for (u32 i = 0; i < 4 * S::TILES; ++i) d[i] = total[i];
}

template <class S> __device__ __forceinline__ void add_lora(const Params &p, const Room &room, float (&d)[4 * S::TILES]) {
    static constexpr u32 DEEP = S::RANKS / 16;
    const Shared &s = *room.s;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, start = S::ROWS == 16 ? 0 : warp * 16;
    const u32 column = S::ROWS == 16 ? warp * 8 : 0;
    // an adapter's sum starts from the base, not from where the adapter before left its own rows: their chains do not wait for one another
    static constexpr bool APART = S::ROWS == 16; // elsewhere they lack registers: 2 µs more at 64 rows, r 64
    float base[APART ? 4 * S::TILES : 1];
    if constexpr (APART)
#pragma unroll
        for (u32 i = 0; i < 4 * S::TILES; ++i) base[i] = d[i];
    u32 h[2][DEEP][4], slots[2];
    if (p.flags & LATE) any_of<MATH + S::HELPERS>(1, false); // the rings are read
    for (u32 first = 0; !first || first < s.count; first += p.adapters) {
        any_of<MATH + S::HELPERS>(1, false);
        if (!first) {
#pragma unroll
            for (u32 part = 0; part < 2; ++part)
#pragma unroll
                for (u32 deep = 0; deep < DEEP; ++deep)
                    load_matrix4(h[part][deep],
                                 shared_address(room.h) + (start + lane % 16) * S::H_PITCH + part * S::RANKS * 2 + deep * 32 + lane / 16 * 16);
#pragma unroll
            for (u32 low = 0; low < 2; ++low) slots[low] = s.slots[start + lane / 4 + 8 * low];
        }
        const u32 count = min(s.count - first, p.adapters);
#pragma unroll(S::ROWS == 16 ? 4 : 1)
        for (u32 i = 0; i < count; ++i) {
            const u32 slot = s.slots[s.list[first + i]];
            if (S::ROWS > 16 && !__any_sync(~0u, slots[0] == slot || slots[1] == slot)) continue;
#pragma unroll
            for (u32 tile = 0; tile < S::TILES; ++tile) {
                u32 b[DEEP][2];
                const u32 at = shared_address(room.b) + i * S::FACTOR + (column + tile * 8 + lane % 8) * S::B_PITCH;
                if constexpr (DEEP == 1) {
                    u32 four[4];
                    load_matrix4(four, at + lane / 8 % 2 * 16); // the upper 16 lanes' are not used
                    b[0][0] = four[0], b[0][1] = four[1];
                } else {
#pragma unroll
                    for (u32 deep = 0; deep < DEEP; deep += 2) {
                        u32 four[4];
                        load_matrix4(four, at + deep * 32 + lane / 8 * 16);
                        b[deep][0] = four[0], b[deep][1] = four[1], b[deep + 1][0] = four[2], b[deep + 1][1] = four[3];
                    }
                }
                float sum[4];
#pragma unroll
                for (u32 j = 0; j < 4; ++j) sum[j] = APART ? base[APART ? 4 * tile + j : 0] : d[4 * tile + j];
#pragma unroll
                for (u32 piece = 0; piece < DEEP; piece += 2) // of 32 columns (of 16: DEEP is 1)
#pragma unroll
                    for (u32 part = 0; part < 2; ++part)
#pragma unroll
                        for (u32 deep = piece; deep < min(piece + 2, DEEP); ++deep) bf16::mma(sum, h[part][deep], b[deep][0], b[deep][1]);
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    if (slots[j / 2] == slot) d[4 * tile + j] = sum[j];
            }
        }
        if (first + p.adapters < s.count) any_of<MATH + S::HELPERS>(1, false);
    }
}

template <class S> __device__ __forceinline__ void write(const Params &p, const Block &block, const float (&d)[4 * S::TILES]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (u32 tile = 0; tile < S::TILES; ++tile)
#pragma unroll
        for (u32 low = 0; low < 2; ++low) {
            const u32 row = (S::ROWS == 16 ? 0 : warp * 16) + lane / 4 + 8 * low;
            const u32 n = block.n + (S::ROWS == 16 ? warp * 8 : tile * 8) + lane % 4 * 2;
            if (row >= block.rows || n >= block.n_end) continue;
            float v[2] = {d[4 * tile + 2 * low], d[4 * tile + 2 * low + 1]};
            if (p.bias != nullptr) {
                const i64 c = block.out_group * p.c_g + n;
#pragma unroll
                for (u32 i = 0; i < 2; ++i) v[i] += p.flags & BIAS32 ? ((const float *)p.bias)[c + i] : bf16::widen(((const u16 *)p.bias)[c + i]);
            }
            *(u32 *)(p.out + (block.first + row) * p.o_t + block.out_group * p.o_g + n) = two(v[0], v[1]);
        }
}

template <class S> __device__ __forceinline__ void run(const Params &p) {
    extern __shared__ u8 memory[];
    Room room;
    room.w = memory + (-shared_address(memory) & 1023);
    room.raw = S::CONVERTS ? room.w + S::CONVERTED * S::W_BYTES : room.w;
    room.x = room.raw + p.stages * S::RAW_BYTES;
    room.s = (Shared *)(room.x + p.x_stages * S::X_BYTES);
    room.h = (u8 *)room.s + (sizeof(Shared) + 15) / 16 * 16;
    room.b = p.flags & LATE ? room.w : room.h + S::ROWS * S::H_PITCH;
    const Block block = block_of<S::BN>(p);
    const u32 i = threadIdx.x - FETCH;
    if (i < MAX_STAGES) {
        auto make = [](u64 &barrier, u32 count) { barrier_init(shared_address(&barrier), count); };
        if (i < p.stages) make(room.s->full[i], 1), make(room.s->empty[i], MATH / 32); // a group of converters are as many
        if (i < p.x_stages) make(room.s->x_full[i], 1), make(room.s->x_empty[i], MATH / 32);
        if (S::CONVERTS && i < S::CONVERTED) make(room.s->converted[i], GROUP / 32), make(room.s->used[i], MATH / 32);
        barrier_init_fence();
    }
    __syncwarp();
    if (S::RANKS == 0 && p.flags & OVERLAP) wait_for_producer(); // any kernel: it may write x
    if (p.flags & NEXT) let_consumer_start(); // all that is older than the shrink ahead has ended
    if (threadIdx.x == FETCH) begin<S>(p, room, block); // before anybody waits for anybody
    __syncthreads();
    if (threadIdx.x < MATH) {
        float d[4 * S::TILES];
#pragma unroll
        for (u32 i = 0; i < 4 * S::TILES; ++i) d[i] = 0.0f;
        multiply<S>(p, room, block, d);
        if constexpr (S::RANKS > 0) add_lora<S>(p, room, d);
        write<S>(p, block, d);
    } else if (threadIdx.x < HELP) {
        if (threadIdx.x == FETCH) go_on<S>(p, room, block, true);
        if (threadIdx.x == FETCH_X) go_on<S>(p, room, block, false);
    } else if (S::CONVERTS && threadIdx.x >= S::CONVERT) {
        if constexpr (S::CONVERTS) convert<S>(p, room, block);
    } else if constexpr (S::RANKS > 0) help<S>(p, room, block);
}

// Few registers, so that the kernel ahead has some. Where 96 are too few, a little is spilled by them. Beside warps that convert there is
// no second block, but without a limit ptxas takes registers until it spills, so those of 32 columns are said to be larger than they are.
constexpr bool many_registers(u32 columns, u32 ranks) { return columns == 64 && ranks && ranks < 64; }
template <class S> struct Bounds {
    static constexpr u32 THREADS = S::CONVERTS && S::BN == 32 ? 544 : S::THREADS, BLOCKS = S::CONVERTS || many_registers(S::BN, S::RANKS) ? 1 : 2;
};
#define KERNEL(name, rows, columns, ranks, e4m3)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(Bounds<Sizes<rows, columns, ranks, e4m3>>::THREADS,                                                \
                                                 Bounds<Sizes<rows, columns, ranks, e4m3>>::BLOCKS) name(const __grid_constant__ Params p) {        \
        run<Sizes<rows, columns, ranks, e4m3>>(p);                                                                                                  \
    }
#else
extern "C" __device__ const int shared_bytes = 0;
#define KERNEL(name, rows, columns, ranks, e4m3) extern "C" __global__ void name(const __grid_constant__ Params p) {}
#endif

KERNEL(stream_16_32_0, 16, 32, 0, false)
KERNEL(stream_16_32_16, 16, 32, 16, false)
KERNEL(stream_16_32_32, 16, 32, 32, false)
KERNEL(stream_16_32_64, 16, 32, 64, false)
KERNEL(stream_64_32_0, 64, 32, 0, false)
KERNEL(stream_64_32_16, 64, 32, 16, false)
KERNEL(stream_64_32_32, 64, 32, 32, false)
KERNEL(stream_64_32_64, 64, 32, 64, false)
KERNEL(stream_64_64_0, 64, 64, 0, false)
KERNEL(stream_64_64_16, 64, 64, 16, false)
KERNEL(stream_64_64_32, 64, 64, 32, false)
KERNEL(stream_64_64_64, 64, 64, 64, false)
KERNEL(stream_16_32_0_e4m3, 16, 32, 0, true)
KERNEL(stream_16_32_16_e4m3, 16, 32, 16, true)
KERNEL(stream_16_32_32_e4m3, 16, 32, 32, true)
KERNEL(stream_16_32_64_e4m3, 16, 32, 64, true)
KERNEL(stream_64_32_0_e4m3, 64, 32, 0, true)
KERNEL(stream_64_32_16_e4m3, 64, 32, 16, true)
KERNEL(stream_64_32_32_e4m3, 64, 32, 32, true)
KERNEL(stream_64_32_64_e4m3, 64, 32, 64, true)
KERNEL(stream_64_64_0_e4m3, 64, 64, 0, true)
KERNEL(stream_64_64_16_e4m3, 64, 64, 16, true)
KERNEL(stream_64_64_32_e4m3, 64, 64, 32, true)
KERNEL(stream_64_64_64_e4m3, 64, 64, 64, true)
