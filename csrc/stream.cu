// y = x Wᵀ + scaling · h Bᵀ + bias for a few rows (up to 64), in one accumulator: W streams by TMA, every adapter's B is called for at the start.
//
// A block has 32 columns of y and all rows. One thread fetches W and x by TMA, a ring of stages of 128 columns of D. Eight warps: first
// they find the adapters that occur and copy their B into shared memory, then they multiply (mma), then they add LoRA: the kernel
// ahead has meanwhile made h, in chunks, which are added up, scaled and cut into two bf16, high and low. A row's h meets every
// adapter's B that occurs in its 16 rows, and keeps its own adapter's sum alone; so Inf and NaN stay with their rows.
//
// The order of every sum is that of kernels/linear.py: one chain over D, then for each piece of `rank_block` columns of h all of
// high before all of low.
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __device__ const int available = 1;
#else
extern "C" __device__ const int available = 0;
#endif

static constexpr u32 BN = 32, BK = 128, MATH = 256, THREADS = MATH + 32;
static constexpr u32 MAX_ROWS = 64, MAX_SLICES = 8, MAX_SLOTS = 1024;
static constexpr u32 IDS64 = 1, BIAS32 = 2, OVERLAP = 4;
static constexpr u32 B_ROOM = 36 << 10;

struct __align__(64) Params {
    u64 map[16];   // W's: axes (d, n, group, 1)
    u64 x_map[16]; // x's: axes (d, row, group)
    const float *h; // chunks of x Aᵀ; may be null: no LoRA
    const u16 *b;
    const void *bias; // may be null
    u16 *out;
    const void *ids; // null: slot 0
    const int *ranks;
    const float *scalings; // may be null
    i64 ids_stride, h_c, h_t, h_g, b_l, b_g, b_n, c_g, o_t, o_g; // elements
    u32 rows, slots, features, columns, rank, groups, x_groups;
    u32 chunks, flags;
    u32 slices;
    u32 starts[MAX_SLICES + 1];
    u32 unused[11];
};
static_assert(sizeof(Params) == 512);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <u32 TILES> struct Shared { // TILES of 16 rows
    static constexpr u32 ROWS = 16 * TILES, W_BYTES = BN * BK * 2, X_BYTES = ROWS * BK * 2, STAGE = W_BYTES + X_BYTES;
    static constexpr u32 STAGES = TILES == 1 ? 15 : TILES == 2 ? 11 : 7;
    __align__(1024) u8 stages[STAGES][STAGE];
    __align__(16) u8 b[B_ROOM];
    u32 slots[MAX_ROWS]; // p.slots: none
    u32 list[MAX_ROWS];  // adapters that occur
    u32 mask[MAX_SLOTS / 32];
    u32 count;
    u64 full[STAGES], empty[STAGES];
};
extern "C" __device__ const int shared_bytes_1 = sizeof(Shared<1>) + 1024;
extern "C" __device__ const int shared_bytes_2 = sizeof(Shared<2>) + 1024;
extern "C" __device__ const int shared_bytes_4 = sizeof(Shared<4>) + 1024;

struct Block { u32 group, out_group, n, n_end; };
__device__ __forceinline__ Block block_of(const Params &p) {
    u32 block = blockIdx.x;
    if (!p.slices) {
        const u32 width = (p.columns + BN - 1) / BN;
        return {block / width, block / width, block % width * BN, p.columns};
    }
    u32 group = 0;
    for (u32 width; block >= (width = (p.starts[group + 1] - p.starts[group] + BN - 1) / BN);) block -= width, ++group;
    return {group, 0, p.starts[group] + block * BN, p.starts[group + 1]};
}

template <u32 TILES> __device__ __forceinline__ void fetch(const Params &p, Shared<TILES> &s, const Block &block) {
    using S = Shared<TILES>;
    if (threadIdx.x % 32) return;
    for (u32 k = 0, i = 0; k < p.features; k += BK, ++i) {
        const u32 stage = i % S::STAGES, at = shared_address(s.stages[stage]);
        wait(s.empty[stage], (i / S::STAGES & 1) ^ 1);
        barrier_expect(shared_address(&s.full[stage]), S::STAGE);
        const u32 w_group = block.out_group, x_group = p.x_groups > 1 ? block.group : 0;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            fetch_box(at + half * (BN * 128), p.map, k + 64 * half, block.n, w_group, 0, s.full[stage]);
            fetch_box(at + S::W_BYTES + half * (S::ROWS * 128), p.x_map, k + 64 * half, 0, x_group, 0, s.full[stage]);
        }
    }
}

__device__ __forceinline__ u32 rank_of(const Params &p, u32 slot) {
    return p.ranks == nullptr ? p.rank : (u32)min(max(p.ranks[slot], 0), (int)p.rank);
}

struct Halves { u32 high, low; }; // of two floats, bf16 each
__device__ __forceinline__ Halves halves(float a, float b) {
    const u32 high = two(a, b);
    const float wide_a = bf16::widen(high & 0xffff), wide_b = bf16::widen(high >> 16);
    return {high, two(wide_a == a ? 0.0f : a - wide_a, wide_b == b ? 0.0f : b - wide_b)};
}

template <u32 RANKS> struct Factors { // B of an adapter in shared memory: rows of RANKS and 8 more, so that eight rows lie in different banks
    static constexpr u32 PITCH = 2 * RANKS + 16, BYTES = BN * PITCH, MOST = B_ROOM / BYTES;
};

template <u32 TILES, u32 RANKS>
__device__ __forceinline__ void load_factors(const Params &p, Shared<TILES> &s, const Block &block, u32 first) {
    using F = Factors<RANKS>;
    const u32 count = min(s.count - first, F::MOST);
    for (u32 i = threadIdx.x; i < count * BN * (RANKS / 8); i += MATH) {
        const u32 adapter = i / (BN * (RANKS / 8)), rest = i % (BN * (RANKS / 8)), n = rest / (RANKS / 8), r = rest % (RANKS / 8) * 8;
        const u32 slot = s.list[first + adapter], rank = rank_of(p, slot);
        const u32 bytes = block.n + n < block.n_end && r < rank ? 2 * min(rank - r, 8u) : 0;
        const u16 *from = p.b + slot * p.b_l + block.out_group * p.b_g + (block.n + n) * p.b_n + r;
        copy16(shared_address(s.b) + adapter * F::BYTES + n * F::PITCH + r * 2, bytes ? from : p.b, bytes);
    }
    copies_commit();
}

template <u32 TILES, u32 RANKS> __device__ __forceinline__ void multiply_and_write(const Params &p, Shared<TILES> &s, const Block &block) {
    using S = Shared<TILES>;
    static constexpr u32 MINE = TILES == 4 ? 2 : 1; // tiles of 16 rows a warp has, two apart
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, quad = lane % 4, eight = warp % 4;
    const bool idle = TILES == 1 && warp >= 4;
    if (RANKS) {
        if (thread < MAX_ROWS) {
            u32 slot = p.slots;
            if (thread < p.rows) {
                if (p.ids == nullptr) slot = 0;
                else {
                    const i64 at = thread * p.ids_stride;
                    const i64 id = p.flags & IDS64 ? ((const i64 *)p.ids)[at] : ((const int *)p.ids)[at];
                    if (id >= 0 && id < p.slots) slot = (u32)id;
                }
            }
            s.slots[thread] = slot;
        }
        if (thread < MAX_SLOTS / 32) s.mask[thread] = 0;
        any_of<MATH>(1, false);
        if (thread < MAX_ROWS && s.slots[thread] < p.slots) atomicOr(&s.mask[s.slots[thread] / 32], 1u << s.slots[thread] % 32);
        any_of<MATH>(1, false);
        if (thread == 0) {
            u32 count = 0;
            for (u32 word = 0; word < (p.slots + 31) / 32; ++word)
                for (u32 rest = s.mask[word]; rest; rest &= rest - 1) s.list[count++] = 32 * word + __ffs(rest) - 1;
            s.count = count;
        }
        any_of<MATH>(1, false);
        if constexpr (RANKS > 0) load_factors<TILES, RANKS>(p, s, block, 0);
    }

    float d[MINE][4];
#pragma unroll
    for (u32 m = 0; m < MINE; ++m)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) d[m][i] = 0.0f;
    const u32 w_row = eight * 8 + lane % 8, w_chunk = lane / 8; // of W's 8 rows: four chunks of 8 columns at once
    const u32 x_row = warp / 4 * 16 + lane % 16, x_chunk = lane / 16;
    for (u32 k = 0, i = 0; k < p.features; k += BK, ++i) {
        const u32 stage = i % S::STAGES, at = shared_address(s.stages[stage]);
        wait(s.full[stage], i / S::STAGES & 1);
        if (!idle) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
#pragma unroll
                for (u32 pair = 0; pair < 2; ++pair) { // of 16 columns
                    u32 w[4];
                    load_matrix4(w, at + half * (BN * 128) + w_row * 128 + (((4 * pair + w_chunk) ^ w_row) % 8) * 16);
#pragma unroll
                    for (u32 one = 0; one < 2; ++one)
#pragma unroll
                        for (u32 m = 0; m < MINE; ++m) {
                            u32 x[4];
                            const u32 row = x_row + 32 * m;
                            load_matrix4(x, at + S::W_BYTES + half * (S::ROWS * 128) + row * 128 + (((4 * pair + 2 * one + x_chunk) ^ row) % 8) * 16);
                            bf16::mma(d[m], x, w[2 * one], w[2 * one + 1]);
                        }
                }
        }
        __syncwarp();
        if (lane == 0) arrive(s.empty[stage]);
    }

    if constexpr (RANKS > 0) {
        using F = Factors<RANKS>;
        static constexpr u32 DEEP = RANKS / 16;
        if (p.flags & OVERLAP) wait_for_producer(); // it makes h
        u32 h[MINE][2][DEEP][4], slots[MINE][2];
#pragma unroll
        for (u32 m = 0; m < MINE; ++m)
#pragma unroll
            for (u32 low = 0; low < 2; ++low) {
                const u32 row = warp / 4 * 16 + 32 * m + lane / 4 + 8 * low;
                slots[m][low] = idle ? p.slots : s.slots[row];
            }
        // h's parts, by all threads, where the ring was: high and low of a row side by side
        static constexpr u32 PITCH = 4 * RANKS + 16, PAIRS = S::ROWS * (RANKS / 2);
        static_assert(S::ROWS * PITCH <= sizeof(s.stages));
        u8 *parts = s.stages[0];
        any_of<MATH>(1, false); // nobody reads the ring any more
#pragma unroll
        for (u32 turn = 0; turn < (PAIRS + MATH - 1) / MATH; ++turn) {
            const u32 pair = turn * MATH + thread, row = pair / (RANKS / 2), r = pair % (RANKS / 2) * 2;
            if (PAIRS % MATH && pair >= PAIRS) break;
            const u32 slot = s.slots[row], rank = slot < p.slots ? rank_of(p, slot) : 0;
            float2 chunks[8];
            const float *from = p.h + row * p.h_t + block.group * p.h_g + r;
#pragma unroll
            for (u32 c = 0; c < 8; ++c) chunks[c] = r < rank && c < p.chunks ? *(const float2 *)(from + c * p.h_c) : make_float2(0.0f, 0.0f);
            float2 sum = chunks[0];
#pragma unroll
            for (u32 c = 1; c < 8; ++c)
                if (c < p.chunks) sum.x += chunks[c].x, sum.y += chunks[c].y;
            const float scaling = slot < p.slots && p.scalings != nullptr ? p.scalings[slot] : 1.0f;
            const Halves v = halves(r < rank ? product(sum.x, scaling) : 0.0f, r + 1 < rank ? product(sum.y, scaling) : 0.0f);
            *(u32 *)(parts + row * PITCH + r * 2) = v.high;
            *(u32 *)(parts + row * PITCH + RANKS * 2 + r * 2) = v.low;
        }
        any_of<MATH>(1, false);
#pragma unroll
        for (u32 m = 0; m < MINE; ++m)
#pragma unroll
            for (u32 part = 0; part < 2; ++part)
#pragma unroll
                for (u32 deep = 0; deep < DEEP; ++deep)
                    if (!idle) load_matrix4(h[m][part][deep], shared_address(parts) + (x_row + 32 * m) * PITCH + part * RANKS * 2 + deep * 32 + x_chunk * 16);
        for (u32 first = 0; first < s.count; first += F::MOST) {
            if (first) { // more adapters than there is room for
                any_of<MATH>(1, false);
                load_factors<TILES, RANKS>(p, s, block, first);
            }
            copies_wait<0>();
            any_of<MATH>(1, false);
            const u32 count = min(s.count - first, F::MOST);
            for (u32 i = 0; i < count && !idle; ++i) {
                const u32 slot = s.list[first + i];
                bool any = false;
#pragma unroll
                for (u32 m = 0; m < MINE; ++m) any |= slots[m][0] == slot || slots[m][1] == slot;
                if (!__any_sync(~0u, any)) continue;
                u32 b[DEEP][2];
                const u32 at = shared_address(s.b) + i * F::BYTES + (eight * 8 + lane % 8) * F::PITCH;
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
#pragma unroll
                for (u32 m = 0; m < MINE; ++m) {
                    float sum[4] = {d[m][0], d[m][1], d[m][2], d[m][3]};
#pragma unroll
                    for (u32 start = 0; start < DEEP; start += 2) // pieces of 32 columns (of 16: DEEP is 1)
#pragma unroll
                        for (u32 part = 0; part < 2; ++part)
#pragma unroll
                            for (u32 deep = start; deep < min(start + 2, DEEP); ++deep) bf16::mma(sum, h[m][part][deep], b[deep][0], b[deep][1]);
#pragma unroll
                    for (u32 j = 0; j < 4; ++j)
                        if (slots[m][j / 2] == slot) d[m][j] = sum[j];
                }
            }
        }
    }
    if (idle) return;
#pragma unroll
    for (u32 m = 0; m < MINE; ++m)
#pragma unroll
        for (u32 low = 0; low < 2; ++low) {
            const u32 row = warp / 4 * 16 + 32 * m + lane / 4 + 8 * low, n = block.n + eight * 8 + quad * 2;
            if (row >= p.rows || n >= block.n_end) continue;
            float v[2] = {d[m][2 * low], d[m][2 * low + 1]};
            if (p.bias != nullptr) {
                const i64 c = block.out_group * p.c_g + n;
#pragma unroll
                for (u32 i = 0; i < 2; ++i) v[i] += p.flags & BIAS32 ? ((const float *)p.bias)[c + i] : bf16::widen(((const u16 *)p.bias)[c + i]);
            }
            *(u32 *)(p.out + row * p.o_t + block.out_group * p.o_g + n) = two(v[0], v[1]);
        }
}

template <u32 TILES, u32 RANKS> __device__ __forceinline__ void run(const Params &p) {
    extern __shared__ u8 memory[];
    Shared<TILES> &s = *(Shared<TILES> *)(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < s.STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), MATH / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const Block block = block_of(p);
    if (threadIdx.x < MATH) multiply_and_write<TILES, RANKS>(p, s, block);
    else fetch(p, s, block);
}

#define KERNEL(name, tiles, ranks)                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Params p) { run<tiles, ranks>(p); }
#else
extern "C" __device__ const int shared_bytes_1 = 0;
extern "C" __device__ const int shared_bytes_2 = 0;
extern "C" __device__ const int shared_bytes_4 = 0;
#define KERNEL(name, tiles, ranks)                                                                                                                  \
    extern "C" __global__ void name(const __grid_constant__ Params p) {}
#endif

KERNEL(stream_1_0, 1, 0)
KERNEL(stream_1_16, 1, 16)
KERNEL(stream_1_32, 1, 32)
KERNEL(stream_1_64, 1, 64)
KERNEL(stream_2_0, 2, 0)
KERNEL(stream_2_16, 2, 16)
KERNEL(stream_2_32, 2, 32)
KERNEL(stream_2_64, 2, 64)
KERNEL(stream_4_0, 4, 0)
KERNEL(stream_4_16, 4, 16)
KERNEL(stream_4_32, 4, 32)
KERNEL(stream_4_64, 4, 64)
