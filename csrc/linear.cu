// y = x Wᵀ + scaling · h Bᵀ + bias for many rows, in one accumulator: TMA, wgmma, one persistent block a multiprocessor.
//
// A tile is 128 rows × 256 columns of y (128 or 64 where those make too few tiles), a stage of the ring 64 columns of D. Warps have parts
// to play:
//   1 fetches W by TMA, x too where a tile's rows follow one another, and LoRA's B unless its groups lie apart.
//   2 gather x's rows by cp.async from wherever they lie else (a plan's order, an expert's routes: no permuted copy of x
//     exists), and LoRA: more stages of the same kind behind D's last column, for each adapter that occurs in the tile. x's
//     place holds scaling · h of the adapter's rows as two bf16, high and low (kernels/halves.py; zeros in all other rows),
//     W's place holds B. A box of B has all columns up to the next 16, 32 or 64, whatever lies past the adapter's rank.
//   1 finds the rows and the adapters of the tiles ahead.
//   8 multiply: two groups of 64 rows each, all of the accumulator in registers, then write y. All they know of LoRA is how many
//     stages it has and that high and low may meet one B; a zero h or B adds zeros, and a tile's rows may have different adapters.
//
// Tiles are dealt out to the blocks in turn. Those of experts (CLAIMS) take unequal time, and the last of them stood alone: there a block
// takes the next tile from a counter when it is about to end one.
//
// W with a scale for each block of 128 × 128 (SCALED, tiles of 128 columns) comes unscaled: each 128 columns of D have a sum of their own
// from zero, which joins the accumulator by one fma.
//
// The order of every sum is that of kernels/linear.py and kernels/expert_linear.py: one chain over D, then for each piece
// of `rank_block` columns of h all of high before all of low. An adapter's Inf or NaN in B must not meet the zeros of other
// rows: where adapters are mixed it is taken out of B, and put to its own rows behind the last stage.
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __device__ const int available = 1;
#else
extern "C" __device__ const int available = 0; // no wgmma: the kernels below are empty
#endif

static constexpr u32 BM = 128, BK = 64;
static constexpr u32 MULTIPLY = 256, GATHER = 64, FETCH = 32, FIND = 32, THREADS = MULTIPLY + GATHER + FETCH + FIND;
static constexpr u32 X_BYTES = BM * BK * 2;
static constexpr u32 ENDING = 6; // CLAIMS: so many stages before its last one of D a block takes its next tile
static constexpr u32 MAX_SLICES = 8, MAX_SLOTS = 1024, MAX_EXPERTS = 1024;
static constexpr u32 ROWS = 0, EXPERT = 2; // modes, as in ops/linear_cuda.py (1: the plan's order)
static constexpr u32 IDS64 = 1, BIAS32 = 2, STAGED = 4, WEIGHTS32 = 8, OVERLAP = 16, IN_ORDER = 32, OUT32 = 64, BOXES = 128; // flags

struct __align__(64) Params {
    u64 map[16];   // W's tensor map: axes (d, n, group, expert), or (n, d, …) where W's elements lie side by side along n
    u64 x_map[16]; // x's: axes (d, row, group), by boxes of BM rows
    u64 x_tail[16]; // by boxes of tail rows, for a tile that has fewer than BM
    u64 b_map[16];  // BOXES: B's: axes (r, n through all groups, expert, slot), or (n, r through all groups, …)
    const u16 *x;
    const u16 *h; // scaling · h: a row's high parts, then its low ones; may be null: no LoRA
    const u16 *b;
    const void *bias; // may be null
    void *out; // bf16, or float32 by OUT32
    const void *ids;  // of tokens; null: slot 0
    const int *plan;  // null for ROWS
    const int *ranks; // may be null
    const void *weights; // of routes; may be null
    i64 ids_stride, x_g, h_g, b_l, b_e, b_g, b_n, c_e, c_g, o_t, o_g, weights_stride; // elements; b_n: that of r where transposed
    u32 x_t, h_t; // bytes
    u32 rows, slots, features, columns, rank, experts;
    u32 x_div, h_div, id_div;    // a route's row of x, of h, and its token
    u32 groups;                  // of y
    u32 sum_groups, h_groups;    // y sums over so many groups of x and W, of h and B
    u32 rank_block;              // columns of h whose high parts are all added before their low ones
    u32 mode, tile_group, flags; // tile_group: so many tiles of rows take turns at a block of W
    u32 slices;                  // 0, or the number of slices of N, one for each group of x and h
    u32 starts[MAX_SLICES + 1];
    u32 *taken; // CLAIMS: zero, tiles taken so far
    u32 tail;
    const float *scales;  // SCALED: of W's blocks
    u32 s_g, s_n, s_d;    // elements: from group to group, from 128 rows of W to the next, from 128 columns
    u32 unused;
};
static_assert(sizeof(Params) == 832); // as ops/linear_cuda.py packs it

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Info { // of a tile
    int rows[BM]; // −1: none
    int x_rows[BM];
    u32 slots[BM];
    uint2 h[BM];                // where its row of h begins, in 16 bytes, and its slot once more
    u32 list[BM], ends[BM]; // adapters that occur, and the number of the last stage of each + 1
    u32 steps;              // stages of LoRA
    u32 mixed;              // its rows do not all have one adapter
    u32 index;              // CLAIMS: its number
};

template <u32 BLOCK_N> struct Shared {
    static constexpr u32 BN = BLOCK_N, W_BYTES = BN * BK * 2, STAGE = X_BYTES + W_BYTES;
    static constexpr u32 STAGES = BN == 256 ? 4 : 6; // 64: a shrink's block has room beside it
    __align__(1024) u8 stages[STAGES][STAGE];
    Info info[2];
    u32 mask[MAX_SLOTS / 32];     // slots that occur in a tile
    int ends[MAX_EXPERTS + 1];    // an expert's last route + 1, masked routes behind
    int tiles[MAX_EXPERTS + 1];   // … last tile + 1
    u64 full[STAGES], empty[STAGES], told[2], heard[2];
    u64 claimed[2], ending; // CLAIMS: info.index is there; the tile is about to end
};
extern "C" __device__ const int shared_bytes_256 = sizeof(Shared<256>) + 1024;
extern "C" __device__ const int shared_bytes_128 = sizeof(Shared<128>) + 1024;
extern "C" __device__ const int shared_bytes_64 = sizeof(Shared<64>) + 1024;

// --- tiles ---

struct Tile {
    u32 first, end; // places of its rows in the plan's order
    u32 expert;     // p.experts: masked routes, whose rows of y are zeros
    u32 n, n_end;   // columns
    u32 group, w_group;
};

template <u32 BN> __device__ __forceinline__ u32 column_blocks(const Params &p) {
    if (!p.slices) return p.groups * ((p.columns + BN - 1) / BN);
    u32 blocks = 0;
    for (u32 i = 0; i < p.slices; ++i) blocks += (p.starts[i + 1] - p.starts[i] + BN - 1) / BN;
    return blocks;
}

template <u32 BN> __device__ __forceinline__ Tile tile_of(const Params &p, const Shared<BN> &s, u32 index, u32 row_tiles, u32 blocks) {
    Tile t;
    t.expert = 0, t.end = p.rows;
    u32 block;
    if (p.mode == EXPERT) { // an expert's tiles of rows take turns at each block of W: the L2 has it for all but the first
        u32 low = 0, high = p.experts; // the first expert whose tiles end behind this one
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (s.tiles[middle] * blocks > index) high = middle;
            else low = middle + 1;
        }
        const u32 before = low ? s.tiles[low - 1] : 0, height = s.tiles[low] - before, place = index - before * blocks;
        t.expert = low, t.end = s.ends[low];
        t.first = (low ? s.ends[low - 1] : 0) + place % height * BM;
        block = place / height;
    } else {
        const u32 turn = index / (p.tile_group * blocks), place = index % (p.tile_group * blocks);
        const u32 height = min(row_tiles - turn * p.tile_group, p.tile_group);
        t.first = (turn * p.tile_group + place % height) * BM;
        block = place / height;
    }
    if (p.slices) {
        t.group = 0, t.w_group = 0;
        for (u32 width; block >= (width = (p.starts[t.group + 1] - p.starts[t.group] + BN - 1) / BN);) block -= width, ++t.group;
        t.n = p.starts[t.group] + block * BN, t.n_end = p.starts[t.group + 1];
    } else {
        const u32 width = (p.columns + BN - 1) / BN;
        t.group = t.w_group = block / width;
        t.n = block % width * BN, t.n_end = p.columns;
    }
    return t;
}

// The tile that all parts of the block have in this turn; false: there are no more.
template <bool CLAIMS, u32 BN>
__device__ __forceinline__ bool next_tile(const Params &p, Shared<BN> &s, Tile &t, u32 turn, u32 row_tiles, u32 blocks) {
    u32 index = blockIdx.x + turn * gridDim.x;
    if constexpr (CLAIMS) {
        wait(s.claimed[turn & 1], turn >> 1 & 1);
        index = s.info[turn & 1].index;
    }
    if (index >= row_tiles * blocks) return false;
    t = tile_of(p, s, index, row_tiles, blocks);
    return true;
}

// --- adapters ---

__device__ __forceinline__ u32 slot_of(const Params &p, u32 row) {
    if (p.ids == nullptr) return 0;
    const i64 at = row / p.id_div * p.ids_stride;
    const i64 id = p.flags & IDS64 ? ((const i64 *)p.ids)[at] : ((const int *)p.ids)[at];
    return id >= 0 && id < p.slots ? (u32)id : p.slots;
}

__device__ __forceinline__ u32 rank_of(const Params &p, u32 slot) {
    return p.ranks == nullptr ? p.rank : (u32)min(max(p.ranks[slot], 0), (int)p.rank);
}

// Stages that an adapter of this rank takes: [high | low] of up to 32 columns share one; else high's, then low's of 64 columns each. Blocks
// of 64 columns (`twice`) have B in high's stage alone: low's products read it there.
__device__ __forceinline__ u32 rank_steps(const Params &p, u32 rank) {
    if (p.rank_block <= 32) return (rank + p.rank_block - 1) / p.rank_block;
    return 2 * ((rank + BK - 1) / BK);
}

__device__ __forceinline__ bool twice(const Params &p) { return p.rank_block == BK; }

// Where stage `step` of an adapter begins: its group, its column of h, and whether h is low there (of up to 32 columns it is high and low).
struct Piece {
    u32 g, r, part;
};

__device__ __forceinline__ Piece piece_of(const Params &p, u32 rank, u32 step) {
    const u32 all = rank_steps(p, rank), g = p.h_groups == 1 ? 0 : step / all;
    step -= g * all;
    if (p.rank_block <= 32) return {g, step * p.rank_block, 0};
    const u32 pieces = p.rank_block / BK, block = step / (2 * pieces), rest = step % (2 * pieces);
    const u32 here = min(pieces, (rank - block * p.rank_block + BK - 1) / BK); // the last block may be shorter
    return {g, block * p.rank_block + rest % here * BK, rest / here};
}

__device__ __forceinline__ const u16 *factor(const Params &p, const Tile &t, u32 slot, u32 group) {
    return p.b + slot * p.b_l + t.expert * p.b_e + (t.w_group + group) * p.b_g;
}

__device__ __forceinline__ u32 infinite2(u32 v) { return (v & 0x7f807f80u) + 0x00800080u & 0x80008000u; } // not 0: one of two is Inf or NaN
__device__ __forceinline__ u32 finite2(u32 v) { // Inf and NaN are zeros
    if ((v & 0x7f80u) == 0x7f80u) v &= 0xffff0000u;
    if ((v & 0x7f800000u) == 0x7f800000u) v &= 0xffffu;
    return v;
}

// --- finding ---

template <bool CLAIMS, u32 BN> __device__ __forceinline__ void find(const Params &p, Shared<BN> &s, u32 row_tiles, u32 blocks) {
    const u32 lane = threadIdx.x % 32;
    Tile t;
    for (u32 turn = 0;; ++turn) {
        Info &info = s.info[turn & 1];
        wait(s.heard[turn & 1], (turn >> 1 & 1) ^ 1);
        if (CLAIMS && lane == 0) { // alone: from here on the others of the block may go on to the next phase of `ending`
            if (turn) wait(s.ending, (turn - 1) & 1);
            info.index = atomicAdd(p.taken, 1u);
            arrive(s.claimed[turn & 1]);
        }
        if (!next_tile<CLAIMS>(p, s, t, turn, row_tiles, blocks)) break;
        const bool lora = p.h != nullptr && t.expert < p.experts;
        if (lane < MAX_SLOTS / 32) s.mask[lane] = 0;
        __syncwarp();
        int rows[BM / 32];
#pragma unroll
        for (u32 j = 0; j < BM / 32; ++j) {
            const u32 place = t.first + 32 * j + lane;
            rows[j] = place >= t.end ? -1 : p.mode == ROWS ? (int)place : p.plan[place];
        }
#pragma unroll
        for (u32 j = 0; j < BM / 32; ++j) {
            if ((u32)rows[j] >= p.rows) rows[j] = -1;
            info.rows[32 * j + lane] = rows[j];
            info.x_rows[32 * j + lane] = (u32)max(rows[j], 0) / p.x_div; // of a damaged plan's row that is none: row 0, and no one looks at it
        }
        u32 slots[BM / 32];
        bool without = false;
#pragma unroll
        for (u32 j = 0; j < BM / 32; ++j) slots[j] = lora && rows[j] >= 0 ? slot_of(p, rows[j]) : p.slots;
#pragma unroll
        for (u32 j = 0; j < BM / 32; ++j) {
            info.slots[32 * j + lane] = slots[j];
            info.h[32 * j + lane] = make_uint2((u64)((u32)max(rows[j], 0) / p.h_div) * p.h_t / 16, slots[j]);
            without |= rows[j] >= 0 && slots[j] == p.slots;
            if (slots[j] < p.slots) atomicOr(&s.mask[slots[j] / 32], 1u << slots[j] % 32);
        }
        without = __any_sync(~0u, without);
        __syncwarp();
        u32 count = 0, steps = 0;
        bool padded = false; // a box of B has more than its adapter's rank, whatever lies there
        for (u32 word = 0; lora && word < (p.slots + 31) / 32; ++word)
            for (u32 rest = s.mask[word]; rest; rest &= rest - 1) {
                const u32 slot = 32 * word + __ffs(rest) - 1;
                steps += rank_steps(p, rank_of(p, slot)) * p.h_groups;
                padded |= p.flags & BOXES && (rank_of(p, slot) < p.rank || p.rank % min(p.rank_block, BK));
                if (lane == 0) info.list[count] = slot, info.ends[count] = steps;
                ++count;
            }
        if (lane == 0) info.steps = steps, info.mixed = count > 1 || without || padded;
        __syncwarp();
        if (lane == 0) arrive(s.told[turn & 1]);
    }
}

// --- fetching ---

// A piece of B: all of its columns of h at once (past the last one zeros, or the next group's, which meet zeros), or (transposed) as many.
template <bool TRANSPOSED, u32 BN>
__device__ __forceinline__ void fetch_factor(const Params &p, const Tile &t, const Piece &piece, u32 slot, u32 to, const u64 &full) {
    static constexpr u32 BOX = TRANSPOSED ? 64 : BN < 128 ? BN : 128;
    const u32 expert = p.b_e ? t.expert : 0, group = p.b_g ? t.w_group + piece.g : 0; // 0: one for all
    barrier_expect(shared_address(&full), TRANSPOSED ? min(p.rank_block, BK) * BN * 2 : Shared<BN>::W_BYTES);
#pragma unroll
    for (u32 n = 0; n < BN; n += BOX) {
        if constexpr (TRANSPOSED) fetch_box(to + n * 128, p.b_map, t.n + n, group * p.rank + piece.r, expert, slot, full);
        else fetch_box(to + n * 128, p.b_map, piece.r, group * p.columns + t.n + n, expert, slot, full);
    }
}

template <bool TRANSPOSED, bool CLAIMS, u32 BN>
__device__ __forceinline__ void fetch(const Params &p, Shared<BN> &s, u32 row_tiles, u32 blocks) {
    static constexpr u32 STAGES = Shared<BN>::STAGES;
    if (threadIdx.x % 32) return;
    const bool in_order = p.flags & IN_ORDER; // a tile's rows of x are one box
    u32 number = 0;                           // stages since the kernel began
    Tile t;
    for (u32 turn = 0; next_tile<CLAIMS>(p, s, t, turn, row_tiles, blocks); ++turn) {
        const u32 sums = t.expert < p.experts ? p.sum_groups : 0;
        const u32 all = sums * ((p.features + BK - 1) / BK), ending = number + max(all, ENDING) - ENDING;
        if (CLAIMS && all == 0) arrive(s.ending);
        // what lies behind a tail's rows in a stage is multiplied, and not looked at
        const bool tail = in_order && t.first + BM > p.rows;
        const u32 x_bytes = !in_order ? 0 : tail ? p.tail * (BK * 2) : X_BYTES;
        for (u32 g = 0; g < sums; ++g) {
#pragma unroll 1
            for (u32 k = 0; k < p.features; k += BK, ++number) {
                if (CLAIMS && number == ending) arrive(s.ending);
                const u32 stage = number % STAGES, at = shared_address(s.stages[stage]);
                wait(s.empty[stage], (number / STAGES & 1) ^ 1);
                barrier_expect(shared_address(&s.full[stage]), Shared<BN>::W_BYTES + x_bytes);
                if constexpr (TRANSPOSED) {
#pragma unroll
                    for (u32 c = 0; c < BN / 64; ++c)
                        fetch_box(at + X_BYTES + c * (64 * 128), p.map, t.n + 64 * c, k, t.w_group + g, t.expert, s.full[stage]);
                } else {
                    static constexpr u32 BOX = BN < 128 ? BN : 128;
#pragma unroll
                    for (u32 c = 0; c < BN / BOX; ++c)
                        fetch_box(at + X_BYTES + c * (BOX * 128), p.map, k, t.n + BOX * c, t.w_group + g, t.expert, s.full[stage]);
                }
                if (in_order) fetch_box(at, tail ? p.x_tail : p.x_map, k, t.first, p.x_g ? t.group + g : 0, 0, s.full[stage]);
            }
        }
        wait(s.told[turn & 1], turn >> 1 & 1);
        // LoRA's stages: to be more than one use of a stage ahead, or behind, is to take another phase of its barrier for the one that is
        // wanted. So it waits for each, and none is full without it, in place of W's bytes.
        const Info &info = s.info[turn & 1];
        u32 adapter = 0, before = 0;
        for (u32 i = 0; i < info.steps; ++i, ++number) {
            const u32 stage = number % STAGES;
            wait(s.empty[stage], (number / STAGES & 1) ^ 1);
            if (p.flags & BOXES) {
                while (info.ends[adapter] <= i) before = info.ends[adapter++];
                const u32 slot = info.list[adapter];
                const Piece piece = piece_of(p, rank_of(p, slot), i - before);
                if (!(piece.part && twice(p))) {
                    fetch_factor<TRANSPOSED, BN>(p, t, piece, slot, shared_address(s.stages[stage]) + X_BYTES, s.full[stage]);
                    continue;
                }
            }
            arrive(s.full[stage]);
        }
        arrive(s.heard[turn & 1]);
    }
}

// --- gathering ---

static constexpr u32 EACH = GATHER / 8, PASSES = BM / EACH; // 8 threads a row of x: so many rows at once, so many times

// A stage of LoRA, number `step` of those of one adapter. WIDTH columns of h: high and low side by side, or (64) one of them.
template <bool TRANSPOSED, u32 BN, u32 WIDTH>
__device__ __forceinline__ void load_lora(const Params &p, const Tile &t, const Info &info, u32 at, u32 slot, u32 step, u32 thread) {
    static constexpr bool SHARES = WIDTH <= 32;
    static constexpr u32 CHUNKS = WIDTH / 8, ACROSS = SHARES ? 2 * CHUNKS : CHUNKS; // threads to a row of h
    static constexpr u32 AT_ONCE = GATHER / ACROSS, TIMES = BM / AT_ONCE;
    const u32 rank = rank_of(p, slot);
    const auto [g, r, part] = piece_of(p, rank, step);
    const u32 left = rank - r; // the adapter's columns from r on
    {
        const u32 across = thread % ACROSS, lead = thread / ACROSS, column = across % CHUNKS * 8;
        const u32 valid = column < left ? 2 * min(left - column, 8u) : 0;
        const u8 *h = (const u8 *)(p.h + (t.group + g) * p.h_g + r + (SHARES ? across / CHUNKS : part) * p.rank + column);
        const u32 to = at + lead * 128 + ((across ^ lead) % 8) * 16;
#pragma unroll
        for (u32 j = 0; j < TIMES; ++j) { // zeros are not read from anywhere
            const uint2 row = info.h[j * AT_ONCE + lead];
            copy16(to + j * (AT_ONCE * 128), h + (u64)row.x * 16, row.y == slot ? valid : 0);
        }
    }
    if ((part && twice(p)) || p.flags & BOXES) return;
    const u16 *b = factor(p, t, slot, g);
    const u32 chunks = TRANSPOSED ? BN / 8 : CHUNKS, c = thread % chunks, rows = TRANSPOSED ? WIDTH : BN;
    // of B's rows along K, or of a row of B
    const u32 whole = TRANSPOSED ? (t.n + 8 * c < t.n_end ? 16 : 0) : (8 * c < left ? 2 * min(left - 8 * c, 8u) : 0);
    const u32 limit = TRANSPOSED ? left : t.n_end - t.n;
    b += TRANSPOSED ? (r + thread / chunks) * p.b_n + t.n + 8 * c : (t.n + thread / chunks) * p.b_n + r + 8 * c;
    const i64 stride = GATHER / chunks * p.b_n;
    static_assert(GATHER % (BN / 8) == 0);
#pragma unroll 4
    for (u32 row = thread / chunks; row < rows; row += GATHER / chunks, b += stride) {
        const u32 to = at + X_BYTES + (TRANSPOSED ? c / 8 * (64 * 128) : 0) + row * 128 + ((c ^ row) % 8) * 16;
        copy16(to, b, row < limit ? whole : 0);
    }
}

// The gatherers' place in the ring. A thread's copies arrive at the stage's barrier by themselves, so no one waits for them. No fence
// between proxies stands behind them: what cp.async wrote behind a barrier wgmma reads without (CUTLASS's
// sm90_mma_multistage_gmma_ss_warpspecialized does so).
template <class S> struct Ring {
    u32 issued = 0; // stages since the kernel began

    __device__ __forceinline__ u32 next(S &s) const {
        wait(s.empty[issued % S::STAGES], (issued / S::STAGES & 1) ^ 1);
        return issued % S::STAGES;
    }
    __device__ __forceinline__ void copying(S &s) { arrive_with_copies(s.full[issued++ % S::STAGES]); }
};

template <bool TRANSPOSED, bool CLAIMS, u32 BN>
__device__ __forceinline__ void gather(const Params &p, Shared<BN> &s, u32 row_tiles, u32 blocks) {
    const u32 thread = threadIdx.x % GATHER, chunk = thread % 8, lead = thread / 8;
    const bool in_order = p.flags & IN_ORDER;
    const u32 tail = p.features % BK; // columns of the last stage, if it is not whole
    Ring<Shared<BN>> ring;
    bool waited = !(p.flags & OVERLAP);
    Tile t;
    for (u32 turn = 0; next_tile<CLAIMS>(p, s, t, turn, row_tiles, blocks); ++turn) {
        const Info &info = s.info[turn & 1];
        if (!in_order) wait(s.told[turn & 1], turn >> 1 & 1);
        const u32 rows = t.end > t.first ? min(t.end - t.first, BM) : 0, mine = rows > lead ? (rows - lead + EACH - 1) / EACH : 0;
        for (u32 g = 0; g < (t.expert < p.experts ? p.sum_groups : 0); ++g) {
            const u8 *x[PASSES];
            if (!in_order) {
                const u8 *start = (const u8 *)(p.x + (t.group + g) * p.x_g + 8 * chunk);
#pragma unroll
                for (u32 j = 0; j < PASSES; ++j) x[j] = start + (u64)(u32)info.x_rows[j * EACH + lead] * p.x_t;
            }
#pragma unroll 1
            for (u32 k = 0; k < p.features; k += BK) {
                const u32 stage = ring.next(s), to = shared_address(s.stages[stage]) + lead * 128 + ((chunk ^ lead) % 8) * 16;
                if (in_order) {
                    arrive(s.full[ring.issued++ % Shared<BN>::STAGES]);
                    continue;
                }
                // Rows that a tile has not are not copied: no one looks at what is multiplied there. (One row of x in the place of all
                // of them is where all blocks meet in the L2: experts of 16 rows took 316 µs, and 213 without.)
                if (tail == 0 || k + BK <= p.features) {
#pragma unroll
                    for (u32 j = 0; j < PASSES; ++j) {
                        if (j < mine) copy16(to + j * (EACH * 128), x[j]);
                        x[j] += 2 * BK;
                    }
                } else {
                    const u32 bytes = 8 * chunk < tail ? 16 : 0; // W's zeros must not meet Inf or NaN
#pragma unroll
                    for (u32 j = 0; j < PASSES; ++j)
                        if (j < mine) copy16(to + j * (EACH * 128), bytes ? x[j] : (const u8 *)p.x, bytes);
                }
                ring.copying(s);
            }
        }
        if (!waited) { // h is made by the kernel before
            wait_for_producer();
            waited = true;
        }
        wait(s.told[turn & 1], turn >> 1 & 1);
        const u32 steps = info.steps;
        u32 adapter = 0, before = 0;
#pragma unroll 1
        for (u32 i = 0; i < steps; ++i) {
            while (info.ends[adapter] <= i) before = info.ends[adapter++];
            const u32 slot = info.list[adapter], stage = ring.next(s), at = shared_address(s.stages[stage]);
            if (p.rank_block == 16) load_lora<TRANSPOSED, BN, 16>(p, t, info, at, slot, i - before, thread);
            else if (p.rank_block == 32) load_lora<TRANSPOSED, BN, 32>(p, t, info, at, slot, i - before, thread);
            else load_lora<TRANSPOSED, BN, 64>(p, t, info, at, slot, i - before, thread);
            ring.copying(s);
        }
        __syncwarp();
        if (thread % 32 == 0) arrive(s.heard[turn & 1]);
    }
    copies_commit();
    copies_wait<0>();
}

// --- multiplying ---

template <u32 N> struct Number { static constexpr u32 value = N; };

// Takes Inf and NaN out of B as it lies in a stage, `width` columns of h; all multiplying threads meet here. Whether there was any.
template <bool TRANSPOSED, u32 BN> __device__ __forceinline__ bool take_nonfinite(u32 at, u32 width) {
    bool found = false;
    for (u32 i = threadIdx.x; i < BN * width / 8; i += MULTIPLY) {
        // a chunk of a row of B, or (transposed) of one of its columns
        const u32 row = TRANSPOSED ? i / (BN / 8) : i % BN, chunk = TRANSPOSED ? i % (BN / 8) : i / BN;
        const u32 from = at + (TRANSPOSED ? chunk / 8 * (64 * 128) : 0) + row * 128 + ((chunk ^ row) % 8) * 16;
        const uint4 v = load16(from);
        if (infinite2(v.x) | infinite2(v.y) | infinite2(v.z) | infinite2(v.w))
            found = true, store16(from, make_uint4(finite2(v.x), finite2(v.y), finite2(v.z), finite2(v.w)));
    }
    if (found) written_for_matrix_units();
    return any_of<MULTIPLY>(1, found);
}

// What was taken out of B, for a row of its adapter: high · B + low · B is Inf or NaN.
template <bool TRANSPOSED> __device__ __noinline__ float with_nonfinite(const Params &p, const Tile &t, u32 row, u32 slot, u32 n, float v) {
    if (slot >= p.slots) return v;
    const u32 rank = rank_of(p, slot);
    for (u32 g = 0; g < p.h_groups; ++g) {
        const u16 *b = factor(p, t, slot, g), *h = p.h + (u64)(row / p.h_div) * (p.h_t / 2) + (t.group + g) * p.h_g;
        for (u32 r = 0; r < rank; ++r) {
            const u16 f = TRANSPOSED ? b[r * p.b_n + n] : b[n * p.b_n + r];
            if ((f & 0x7f80) != 0x7f80) continue;
            v += bf16::widen(h[r]) * bf16::widen(f);
            v += bf16::widen(h[p.rank + r]) * bf16::widen(f);
        }
    }
    return v;
}

__device__ __forceinline__ float bias_at(const Params &p, i64 at) {
    return p.flags & BIAS32 ? ((const float *)p.bias)[at] : bf16::widen(((const u16 *)p.bias)[at]);
}

// d += Σ_b scale[·, b] · (x[:, b] W[:, b]ᵀ) over blocks b of 128 columns of D, two stages each (D's stages are an even number); of a
// tile's columns some may lie in the next 128 rows of W, with scales of their own.
template <u32 BN, class Release>
__device__ __forceinline__ void add_scaled_blocks(const Params &p, const Tile &t, Shared<BN> &s, float (&d)[BN / 2], u32 &used, u32 steps, u32 upper,
                                                  Release release) {
    static constexpr u32 STAGES = Shared<BN>::STAGES, BLOCK = 128;
    const u32 first = t.n / BLOCK, last = (min(t.n + BN, t.n_end) - 1) / BLOCK;
    const u32 own = first == last ? BN : last * BLOCK - t.n; // columns that have the first scale
    const float *scales = p.scales + (u64)t.w_group * p.s_g;
#pragma unroll 1
    for (u32 i = 0; i < steps; i += BLOCK / BK) {
        const u32 block = i / (BLOCK / BK);
        const float scale = scales[(u64)first * p.s_n + block * p.s_d], next = scales[(u64)last * p.s_n + block * p.s_d];
        float part[BN / 2];
#pragma unroll
        for (u32 half = 0; half < BLOCK / BK; ++half, ++used) {
            wait(s.full[used % STAGES], used / STAGES & 1);
            const u32 at = shared_address(s.stages[used % STAGES]);
            const u64 a = k_major(at + upper * (64 * 128)), b = k_major(at + X_BYTES);
            multiplies_begin();
#pragma unroll
            for (u32 k = 0; k < BK / 16; ++k) {
                if (half == 0 && k == 0) multiply_first<false>(part, a, b);
                else multiply<false>(part, a + K_MAJOR_16 * k, b + K_MAJOR_16 * k);
            }
            multiplies_commit();
        }
        multiplies_wait<1>();
        release(used - 2);
        multiplied(part);
        release(used - 1);
        if (own == BN) {
#pragma unroll
            for (u32 j = 0; j < BN / 2; ++j) d[j] = __fmaf_rn(part[j], scale, d[j]);
        } else {
#pragma unroll
            for (u32 j = 0; j < BN / 2; ++j) d[j] = __fmaf_rn(part[j], j / 4 * 8 < own ? scale : next, d[j]);
        }
    }
}

template <bool TRANSPOSED, bool CLAIMS, bool SCALED, u32 BN>
__device__ __forceinline__ void multiply_and_write(const Params &p, Shared<BN> &s, u32 row_tiles, u32 blocks) {
    static constexpr u32 STAGES = Shared<BN>::STAGES;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, upper = warp / 4; // upper: which 64 rows
    u32 used = 0; // stages since the kernel began
    bool waited = !(p.flags & OVERLAP);
    Tile t;
    for (u32 turn = 0; next_tile<CLAIMS>(p, s, t, turn, row_tiles, blocks); ++turn) {
        const Info &info = s.info[turn & 1];
        const bool masked = t.expert >= p.experts;
        float d[BN / 2];
#pragma unroll
        for (u32 i = 0; i < BN / 2; ++i) d[i] = 0.0f;
        const bool idle = t.first + 64 * upper >= t.end; // none of this half's rows is there
        auto take = [&] {
            wait(s.full[used % STAGES], used / STAGES & 1);
            return shared_address(s.stages[used % STAGES]);
        };
        auto release = [&](u32 stage) {
            if (lane == 0) arrive(s.empty[stage % STAGES]);
        };
        auto all_but_the_newest = [] { // are read
            multiplies_commit();
            multiplies_wait<1>();
        };
        auto unread = [&] {
            __syncwarp();
            release(used++);
        };
        static constexpr u32 B_16 = TRANSPOSED ? N_MAJOR_16 : K_MAJOR_16;
        const u32 steps = masked ? 0 : p.sum_groups * ((p.features + BK - 1) / BK), width = min(p.rank_block, BK);
        const bool reuses = twice(p);
        bool nonfinite = false;
        if (idle) {
            for (u32 i = 0; i < steps; ++i) take(), unread();
            wait(s.told[turn & 1], turn >> 1 & 1);
            for (u32 i = 0; i < info.steps; ++i) {
                const u32 at = take();
                if (info.mixed && !(reuses && i % 2)) take_nonfinite<TRANSPOSED, BN>(at + X_BYTES, width);
                unread();
            }
        } else {
            if constexpr (SCALED) add_scaled_blocks(p, t, s, d, used, steps, upper, release);
#pragma unroll 1
            for (u32 i = 0; !SCALED && i < steps; ++i) {
                const u32 at = take();
                const u64 a = k_major(at + upper * (64 * 128)), b = TRANSPOSED ? n_major(at + X_BYTES) : k_major(at + X_BYTES);
                multiplies_begin();
#pragma unroll
                for (u32 k = 0; k < BK / 16; ++k) multiply<TRANSPOSED>(d, a + K_MAJOR_16 * k, b + B_16 * k);
                all_but_the_newest();
                if (i > 0) release(used - 1);
                ++used;
            }
            wait(s.told[turn & 1], turn >> 1 & 1);
            const u32 more = info.steps;
            // high and low side by side meet one B: of SLICES products of 16 columns the second half has B's columns again
            auto add_lora = [&](auto slices, auto again) {
                constexpr u32 SLICES = decltype(slices)::value, AGAIN = decltype(again)::value;
#pragma unroll 1
                for (u32 i = 0; i < more; ++i) {
                    const u32 at = take();
                    const bool low = reuses && i % 2; // B lies in the stage before, which is kept for it
                    const u32 b_at = (low ? shared_address(s.stages[(used - 1) % STAGES]) : at) + X_BYTES;
                    if (info.mixed && !low) nonfinite |= take_nonfinite<TRANSPOSED, BN>(b_at, width);
                    const u64 a = k_major(at + upper * (64 * 128)), b = TRANSPOSED ? n_major(b_at) : k_major(b_at);
                    multiplies_begin();
#pragma unroll
                    for (u32 k = 0; k < SLICES; ++k) multiply<TRANSPOSED>(d, a + K_MAJOR_16 * k, b + B_16 * (k & AGAIN));
                    all_but_the_newest();
                    if (!low && (SCALED ? 0 : steps) + i > 0) release(used - 1);
                    if (!low && reuses && i > 0) release(used - 2);
                    ++used;
                }
                multiplied(d);
            };
            if (p.rank_block == 16) add_lora(Number<2>(), Number<0>());
            else if (p.rank_block == 32) add_lora(Number<4>(), Number<1>());
            else add_lora(Number<4>(), Number<3>());
            if ((SCALED ? 0 : steps) + more > 0) release(used - 1);
            if (reuses && more > 0) release(used - 2);
        }

        if (!waited) wait_for_producer(), waited = true; // y may lie where the kernel ahead reads for the last time
        const u32 quad = lane % 4;
        const u32 in_tile = upper * 64 + warp % 4 * 16 + lane / 4;
        int rows[2] = {info.rows[in_tile], info.rows[in_tile + 8]};
        const u32 slot0 = info.slots[in_tile], slot1 = info.slots[in_tile + 8];
        __syncwarp();
        if (lane == 0) arrive(s.heard[turn & 1]);
        if (nonfinite) {
#pragma unroll
            for (u32 i = 0; i < BN / 2; ++i) {
                const u32 n = t.n + i / 4 * 8 + quad * 2 + i % 2, row = i / 2 % 2;
                if (rows[row] >= 0 && n < t.n_end) d[i] = with_nonfinite<TRANSPOSED>(p, t, rows[row], row ? slot1 : slot0, n, d[i]);
            }
        }
        float weights[2] = {1.0f, 1.0f};
        if (p.weights != nullptr) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const i64 at = (u32)max(rows[i], 0) * p.weights_stride;
                weights[i] = p.flags & WEIGHTS32 ? ((const float *)p.weights)[at] : bf16::widen(((const u16 *)p.weights)[at]);
            }
        }
        if (p.bias != nullptr && !masked) {
            const i64 c = t.expert * p.c_e + t.w_group * p.c_g;
            const bool staged = p.flags & STAGED; // a rounding between, and weights with the bias alone
#pragma unroll
            for (u32 i = 0; i < BN / 2; ++i) {
                const u32 n = t.n + i / 4 * 8 + quad * 2 + i % 2;
                const float bias = n < t.n_end ? bias_at(p, c + n) : 0.0f;
                d[i] = staged ? bf16::widen(bf16::round(d[i])) + product(bias, weights[i / 2 % 2]) : d[i] + bias;
            }
            if (staged) weights[0] = weights[1] = 1.0f;
        }
        if (p.weights != nullptr) {
#pragma unroll
            for (u32 i = 0; i < BN / 2; ++i) d[i] = product(d[i], weights[i / 2 % 2]);
        }
        if (p.flags & OUT32) {
            const bool odd = quad & 1;
#pragma unroll
            for (u32 i = 0; i < BN / 2; i += 8) { // of two blocks of 8 columns neighbours share out the pairs: one has four columns of each
#pragma unroll
                for (u32 row = 0; row < 2; ++row) {
                    const float a0 = d[i + 2 * row], a1 = d[i + 2 * row + 1], b0 = d[i + 2 * row + 4], b1 = d[i + 2 * row + 5];
                    const float g0 = __uint_as_float(exchange(__float_as_uint(odd ? a0 : b0), 1));
                    const float g1 = __uint_as_float(exchange(__float_as_uint(odd ? a1 : b1), 1));
                    const u32 n = t.n + i * 2 + (odd ? 8 : 0) + (quad & 2) * 2;
                    const float4 v = make_float4(odd ? g0 : a0, odd ? g1 : a1, odd ? b0 : g0, odd ? b1 : g1);
                    float4 *to = (float4 *)((float *)p.out + (u32)max(rows[row], 0) * p.o_t + t.w_group * p.o_g + n);
                    if (rows[row] >= 0 && n < t.n_end) *to = masked ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : v;
                }
            }
            continue;
        }
#pragma unroll
        for (u32 four = 0; four < BN / 32; ++four) { // 32 columns
            u32 pairs[2][4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 i = 16 * four + 4 * j;
                pairs[0][j] = two(d[i], d[i + 1]), pairs[1][j] = two(d[i + 2], d[i + 3]);
            }
#pragma unroll
            for (u32 i = 0; i < 2; ++i) { // a lane's pairs of four blocks of 8 columns become one block's 8 columns
                u32(&q)[4] = pairs[i];
#pragma unroll
                for (u32 j = 0; j < 4; j += 2) {
                    const u32 got = exchange(quad & 1 ? q[j] : q[j + 1], 1);
                    if (quad & 1) q[j] = got;
                    else q[j + 1] = got;
                }
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    const u32 got = exchange(quad & 2 ? q[j] : q[j + 2], 2);
                    if (quad & 2) q[j] = got;
                    else q[j + 2] = got;
                }
                const u32 n = t.n + (4 * four + quad) * 8;
                if (rows[i] >= 0 && n < t.n_end) {
                    u16 *to = (u16 *)p.out + (u32)rows[i] * p.o_t + t.w_group * p.o_g + n;
                    *(uint4 *)to = masked ? make_uint4(0, 0, 0, 0) : make_uint4(q[0], q[1], q[2], q[3]);
                }
            }
        }
    }
}

template <bool TRANSPOSED, bool CLAIMS, bool SCALED, u32 BN> __device__ __forceinline__ void run(const Params &p) {
    extern __shared__ u8 memory[];
    Shared<BN> &s = *(Shared<BN> *)(memory + (-shared_address(memory) & 1023)); // swizzled tiles start at multiples of 1024 bytes
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < s.STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), GATHER + 1); // and W's bytes are announced
            barrier_init(shared_address(&s.empty[i]), MULTIPLY / 32);
        }
        for (u32 i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.told[i]), 1);
            barrier_init(shared_address(&s.heard[i]), (MULTIPLY + GATHER + FETCH) / 32);
            barrier_init(shared_address(&s.claimed[i]), 1);
        }
        barrier_init(shared_address(&s.ending), 1);
        barrier_init_fence();
    }
    u32 row_tiles = (p.rows + BM - 1) / BM;
    if (p.mode == EXPERT) { // a damaged plan leads nowhere outside its own rows: ends are made to rise, and to lie within M
        for (u32 e = threadIdx.x; e <= p.experts; e += THREADS)
            s.ends[e] = e < p.experts ? min(max(p.plan[p.rows + e], 0), (int)p.rows) : (int)p.rows;
        __syncthreads();
        if (threadIdx.x < 32) {
            int end = 0, tiles = 0;
            for (u32 first = 0; first <= p.experts; first += 32) {
                const u32 e = first + threadIdx.x;
                int mine = e <= p.experts ? s.ends[e] : 0;
#pragma unroll
                for (u32 i = 1; i < 32; i *= 2) {
                    const int other = __shfl_up_sync(~0u, mine, i);
                    if (threadIdx.x >= i) mine = max(mine, other);
                }
                mine = max(mine, end);
                const int before = __shfl_up_sync(~0u, mine, 1), start = threadIdx.x ? before : end;
                int count = e <= p.experts ? (mine - start + (int)BM - 1) / (int)BM : 0;
#pragma unroll
                for (u32 i = 1; i < 32; i *= 2) {
                    const int other = __shfl_up_sync(~0u, count, i);
                    if (threadIdx.x >= i) count += other;
                }
                count += tiles;
                if (e <= p.experts) s.ends[e] = mine, s.tiles[e] = count;
                end = __shfl_sync(~0u, mine, 31), tiles = __shfl_sync(~0u, count, 31);
            }
        }
    }
    __syncthreads();
    if (p.mode == EXPERT) row_tiles = s.tiles[p.experts];
    const u32 blocks = column_blocks<BN>(p);
    if (threadIdx.x < MULTIPLY) {
        if constexpr (BN > 64) more_registers<200>();
        multiply_and_write<TRANSPOSED, CLAIMS, SCALED>(p, s, row_tiles, blocks);
    } else {
        if constexpr (BN > 64) fewer_registers<104>();
        if (threadIdx.x < MULTIPLY + GATHER) gather<TRANSPOSED, CLAIMS>(p, s, row_tiles, blocks);
        else if (threadIdx.x < MULTIPLY + GATHER + FETCH) fetch<TRANSPOSED, CLAIMS>(p, s, row_tiles, blocks);
        else find<CLAIMS>(p, s, row_tiles, blocks);
    }
}

// 64: at most 128 registers a thread, though no more threads run: a shrink's block has some beside it.
#define KERNEL(name, transposed, claims, scaled, columns)                                                                                           \
    extern "C" __global__ void __launch_bounds__(columns == 64 ? 512 : THREADS) name(const __grid_constant__ Params p) {                            \
        run<transposed, claims, scaled, columns>(p);                                                                                                \
    }
#else
extern "C" __device__ const int shared_bytes_256 = 0;
extern "C" __device__ const int shared_bytes_128 = 0;
extern "C" __device__ const int shared_bytes_64 = 0;
#define KERNEL(name, transposed, claims, scaled, columns)                                                                                           \
    extern "C" __global__ void name(const __grid_constant__ Params p) {}
#endif

KERNEL(linear_bf16_256, false, false, false, 256)
KERNEL(linear_bf16_256_transposed, true, false, false, 256)
KERNEL(linear_bf16_256_experts, false, true, false, 256)
KERNEL(linear_bf16_256_experts_transposed, true, true, false, 256)
KERNEL(linear_bf16_128, false, false, false, 128)
KERNEL(linear_bf16_128_scaled, false, false, true, 128)
KERNEL(linear_bf16_128_transposed, true, false, false, 128)
KERNEL(linear_bf16_64, false, false, false, 64)
KERNEL(linear_bf16_64_transposed, true, false, false, 64)
