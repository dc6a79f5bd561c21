// y = base + factor · (x Aᵀ) Bᵀ in one launch, for batches of many rows, where memory decides.
//
// A block stays on its multiprocessor and takes tiles of BM rows of one adapter (and expert) in turn. Four warps feed it:
// they copy x and A, KS columns of D a stage, then B and base, NS columns of N a stage, and run on into the next tile while
// the other warps still compute, so that loads never pause. Each of those owns 16 rows from x to y: its sum of h is, in
// registers, what the product with B takes. No barrier but those of the stages.
//
// Where groups share A, CL of them may be a cluster (CL > 1): its blocks have a group each of the same rows, and each fetches a CLth
// of A for all of them. A stage is then free when all blocks have done with it.
//
// The order of every sum is that of the Triton kernels (kernels/shrink.py, kernels/expand.py and their expert twins).
#include "tile.cuh"

static constexpr u32 FEEDERS = 128;
static constexpr u32 SINGLE = 0, PLAN = 1; // one slot; rows by slot; tiles of (expert, slot) pairs
static constexpr u32 IDS64 = 1, COPY = 2;               // as in ops/rows_cuda.py
static constexpr u32 MOST_SLOTS = 1024;

struct Params {
    const u16 *x, *a, *b, *base; // base may be null, or out
    u16 *out;
    const void *ids;                 // SINGLE
    const int *plan, *ranks;         // ranks may be null
    const float *scalings, *weights; // weights (of rows) may be null
    i64 ids_stride, w_t;
    i64 x_t, x_g, a_l, a_e, a_g, a_r, b_l, b_e, b_g, b_n, p_t, p_g, o_t, o_g; // strides in elements; those of d, r and n are 1
    u32 rows, slots, experts, features, columns, rank, groups;
    u32 chunk, piece;    // columns of D that are summed from zero upwards: pieces make chunks, chunks make h
    u32 x_rows;          // rows of y that share a row of x
    u32 tile_rows, room; // EXPERTS: rows of the plan's tiles, and how many tiles it has room for
    u32 mode, flags;
};

#if CLUSTERS
// BM rows a tile; RP ranks, those of MG groups that have one x (its h for all of them comes from one pass); KS and NS columns a
// stage. SPLIT warps share 16 rows: half of the ranks each (above 16), then half of the columns.
template <class E, u32 BM, u32 RP, u32 KS, u32 NS, u32 STAGES, u32 CL, u32 SPLIT, u32 MG>
struct Rows {
    static constexpr u32 BANDS = BM / 16, WARPS = BANDS * SPLIT, THREADS = WARPS * 32 + FEEDERS, RING = STAGES + 2;
    static constexpr u32 RG = RP / MG;                           // ranks of a group
    static constexpr u32 KP = KS + 8, RPP = RG + 8, NP = NS + 8; // padded rows: no two of eight in one bank
    static constexpr bool PARTED = SPLIT > 1 && RP > 16;         // warps of a band sum their own ranks
    static constexpr u32 NT = RP / 8, OWN = PARTED ? NT / SPLIT : NT, KR = RG / 16;
    static constexpr u32 K_STAGE = (BM + RP) * KP, N_STAGE = NS * RPP + BM * NP, STAGE = K_STAGE > N_STAGE ? K_STAGE : N_STAGE;
    static constexpr u32 SWAP = RP + 8; // floats of a row of h, for the other warps of its band
    static_assert(KS % 128 == 0 && NS / SPLIT % 32 == 0 && FEEDERS % (KS / 8) == 0 && FEEDERS % (NS / 8) == 0 && BM <= FEEDERS);
    static_assert(RG % 16 == 0 && OWN % 2 == 0 && (CL == 1 || MG == 1));

    struct Tile {
        int rows[BM]; // a row; −1: none; −2 − row: one without the adapter
        u32 rank, lora;
        float scaling;
    };
    struct From { // where a tile's rows of x and base begin, in elements; −1: nothing is read of that row
        i64 x[BM], base[BM];
    };
    struct Shared {
        __align__(128) u16 stages[STAGES][STAGE];
        Tile tiles[RING];
        From from[2];
        float swap[PARTED ? BM * SWAP : 1];
        u64 full[STAGES], empty[STAGES];
        int starts[MOST_SLOTS + 2];
        u32 firsts[MOST_SLOTS + 2]; // the number of tiles of the slots before
        u32 tiles_there;
    };

    struct Found {
        int entry; // a row, as the ids or the plan say
        bool there, own;
        u32 slot, expert;
    };

    // This thread's row of a tile, and whose it is; `row_of` looks at it, so that what is read here may still be on its way.
    static __device__ __forceinline__ Found find(const Params &p, const Shared &s, u32 tile, u32 lane) {
        Found f = {0, false, false, 0, 0};
        if (p.mode == SINGLE) {
            const u32 row = tile * BM + lane;
            f.there = lane < BM && row < p.rows;
            if (f.there) f.entry = p.flags & IDS64 ? ((const i64 *)p.ids)[row * p.ids_stride] == 0 ? 0 : 1 : ((const int *)p.ids)[row * p.ids_stride];
            return f;
        }
        u32 first, end;
        if (p.mode == PLAN) {
            u32 low = 0, high = p.slots + 1; // the last slot whose first tile is not behind this one
            while (high - low > 1) {
                const u32 middle = (low + high) / 2;
                (s.firsts[middle] <= tile ? low : high) = middle;
            }
            f.slot = low;
            first = s.starts[low] + (tile - s.firsts[low]) * BM, end = s.starts[low + 1];
        } else {
            const int *head = p.plan + p.rows + p.experts + 1;
            const u32 parts = p.tile_rows / BM, entry = tile / parts;
            const int pair = head[entry];
            first = head[p.room + entry] + tile % parts * BM, end = head[p.room + entry + 1];
            f.expert = pair < 0 ? p.experts : min((u32)pair / (p.slots + 1), p.experts),
            f.slot = pair < 0 ? p.slots : (u32)pair % (p.slots + 1);
            if (pair < 0) end = first;
        }
        f.own = f.slot < p.slots && (p.mode == PLAN || f.expert < p.experts);
        f.there = lane < BM && first + lane < end && first + lane < p.rows;
        if (f.there) f.entry = p.plan[first + lane];
        return f;
    }

    // As in Tile. Whatever a plan says: a row is below p.rows.
    static __device__ __forceinline__ int row_of(const Params &p, const Found &f, u32 tile, u32 lane) {
        const int row = p.mode == SINGLE ? (int)(tile * BM + lane) : f.entry;
        const bool own = p.mode == SINGLE ? f.entry == 0 : f.own;
        return !f.there || row < 0 || (u32)row >= p.rows ? -1 : own ? row : -2 - row;
    }

    // A thread copies the same 16 bytes of every DOWN-th row. A row of x or A that is not copied leaves what is there: it reaches
    // no other row of h, and no other rank.
    static __device__ __forceinline__ void feed(const Params &p, Shared &s, u32 items, u32 lane) {
        constexpr u32 DOWN = FEEDERS / (KS / 8), N_DOWN = FEEDERS / (NS / 8), B_DOWN = FEEDERS / (RG / 8);
        constexpr u32 X_EACH = BM / DOWN, A_EACH = RP / DOWN, BASE_EACH = BM / N_DOWN, B_EACH = (NS + B_DOWN - 1) / B_DOWN;
        static_assert(RG % DOWN == 0 && (NS % B_DOWN == 0 || NS < B_DOWN) && X_EACH <= 32 && BASE_EACH <= 32);
        const u32 across = lane % (KS / 8) * 8, down = lane / (KS / 8);
        const u32 n_across = lane % (NS / 8) * 8, n_down = lane / (NS / 8), r = lane % (RG / 8) * 8, b_down = lane / (RG / 8);
        u32 n = 0, i = 0;
        Found next = {0, false, false, 0, 0};
        if (blockIdx.x < items) next = find(p, s, blockIdx.x / (p.groups / MG), lane);
        auto stage = [&] { return shared_address(s.stages[n % STAGES]); };
        auto free = [&] { barrier_wait_block(shared_address(&s.empty[n % STAGES]), n / STAGES % 2 ^ 1); };
#pragma unroll 1
        for (u32 item = blockIdx.x; item < items; item += gridDim.x, ++i) {
            Tile &t = s.tiles[i % RING];
            From &from = s.from[i % 2]; // the one before may still be read
            const Found f = next;
            const u32 g = item % (p.groups / MG) * MG;
            if (lane < BM) {
                const int code = row_of(p, f, item / (p.groups / MG), lane), row = code >= 0 ? code : -2 - code;
                t.rows[lane] = code;
                from.x[lane] = code >= 0 ? (u32)row / p.x_rows * p.x_t + g * p.x_g : -1;
                from.base[lane] = p.base && (code >= 0 || (code < -1 && (p.flags & COPY))) ? row * p.p_t + g * p.p_g : -1;
            }
            const bool lora = p.mode == SINGLE || f.own;
            const u32 rank = lora ? p.ranks ? min((u32)max(p.ranks[f.slot], 0), p.rank) : p.rank : 0;
            if (lane == 0) t.rank = rank, t.lora = lora, t.scaling = lora ? p.scalings[f.slot] : 0;
            if (item + gridDim.x < items) next = find(p, s, (item + gridDim.x) / (p.groups / MG), lane);
            group_sync(1, FEEDERS);
            if (lora) {
                const u16 *x[X_EACH], *a[A_EACH];
                u32 x_there = 0, a_there = 0;
#pragma unroll
                for (u32 j = 0; j < X_EACH; ++j) {
                    const i64 at = from.x[down + j * DOWN];
                    x[j] = p.x + at + across, x_there |= (at >= 0) << j;
                    keep(x[j]);
                }
#pragma unroll
                for (u32 j = 0; j < A_EACH; ++j) {
                    const u32 m = j * DOWN / RG, row = down + j * DOWN % RG;
                    a[j] = p.a + f.slot * p.a_l + f.expert * p.a_e + (g + m) * p.a_g + row * p.a_r + across, a_there |= (row < rank) << j;
                    keep(a[j]);
                }
                auto fetch_a = [&](u32 k0) {
                    const u32 row = blockIdx.x % CL * (RP / CL) + lane; // features are whole stages
                    if (lane < RP / CL && row < rank)
                        copy_to_cluster(stage() + (BM + row) * KP * 2, p.a + f.slot * p.a_l + g * p.a_g + row * p.a_r + k0, 2 * KS,
                                        shared_address(&s.full[n % STAGES]), CL);
                };
                u32 k0 = 0;
#pragma unroll 1
                for (; k0 + KS <= p.features; k0 += KS, ++n) {
                    const u32 to = stage() + (down * KP + across) * 2;
                    free();
#pragma unroll
                    for (u32 j = 0; j < X_EACH; ++j)
                        if (x_there >> j & 1) copy16(to + j * DOWN * KP * 2, x[j] + k0);
                    if constexpr (CL > 1) {
                        fetch_a(k0);
                    } else {
#pragma unroll
                        for (u32 j = 0; j < A_EACH; ++j)
                            if (a_there >> j & 1) copy16(to + (BM + j * DOWN) * KP * 2, a[j] + k0);
                    }
                    fed(s, n, lane, CL > 1 ? rank * KS * 2 : 0);
                }
                if (k0 < p.features) { // the last columns, zeros behind them
                    const u32 to = stage() + (down * KP + across) * 2, valid = p.features > k0 + across ? 2 * min(p.features - k0 - across, 8u) : 0;
                    free();
#pragma unroll
                    for (u32 j = 0; j < X_EACH; ++j)
                        if (x_there >> j & 1) copy16(to + j * DOWN * KP * 2, valid ? x[j] + k0 : p.x, valid);
#pragma unroll
                    for (u32 j = 0; j < A_EACH; ++j)
                        if (a_there >> j & 1) copy16(to + (BM + j * DOWN) * KP * 2, valid ? a[j] + k0 : p.a, valid);
                    fed(s, n, lane, 0);
                    ++n;
                }
            }
            const u32 valid = rank > r ? 2 * min(rank - r, 8u) : 0;
            const i64 b_step = B_DOWN * p.b_n;
#pragma unroll 1
            for (u32 m = 0; m < MG; ++m) {
                const u16 *b = p.b + f.slot * p.b_l + f.expert * p.b_e + (g + m) * p.b_g + b_down * p.b_n + (valid ? r : 0);
                const u16 *base[BASE_EACH];
                u32 base_there = 0;
#pragma unroll
                for (u32 j = 0; j < BASE_EACH; ++j) {
                    const i64 at = from.base[n_down + j * N_DOWN];
                    base[j] = p.base + at + m * p.p_g + n_across, base_there |= (at >= 0) << j;
                    keep(base[j]);
                }
#pragma unroll 1
                for (u32 n0 = 0; n0 < p.columns; n0 += NS, ++n) {
                    const u32 b_to = stage() + (b_down * RPP + r) * 2, base_to = stage() + (NS * RPP + n_down * NP + n_across) * 2;
                    const bool whole = n0 + NS <= p.columns;
                    const u16 *from_b = b;
                    b += NS * p.b_n;
                    free();
                    if (whole) { // zeros behind the rank
#pragma unroll
                        for (u32 j = 0; j < B_EACH; ++j, from_b += b_step)
                            if (NS >= B_DOWN || b_down < NS) copy16(b_to + j * B_DOWN * RPP * 2, from_b, valid);
                    } else {
#pragma unroll
                        for (u32 j = 0; j < B_EACH; ++j, from_b += b_step)
                            if (n0 + b_down + j * B_DOWN < p.columns) copy16(b_to + j * B_DOWN * RPP * 2, from_b, valid);
                    }
                    if (n0 + n_across < p.columns)
#pragma unroll
                        for (u32 j = 0; j < BASE_EACH; ++j)
                            if (base_there >> j & 1) copy16(base_to + j * N_DOWN * NP * 2, base[j] + n0);
                    fed(s, n, lane, 0);
                }
            }
        }
        copies_wait<0>();
    }

    // The stage is full once all feeders' copies have landed, and `sent` bytes from the cluster; one of them says so for what was
    // written by hand, too.
    static __device__ __forceinline__ void fed(Shared &s, u32 n, u32 lane, u32 sent) {
        const u32 full = shared_address(&s.full[n % STAGES]);
        barrier_arrive_after_copies(full);
        if (lane == 0) barrier_expect(full, sent);
    }

    static __device__ __forceinline__ void compute(const Params &p, Shared &s, u32 items, u32 warp, u32 lane) {
        u32 n = 0, i = 0;
        const u32 quad = lane / 4, pair = lane % 4 * 2;
        auto await = [&] { barrier_wait_block(shared_address(&s.full[n % STAGES]), n / STAGES % 2); };
        auto release = [&] {
            const u32 empty = shared_address(&s.empty[n % STAGES]);
            if constexpr (CL > 1) {
                before_copies();
                __syncwarp();
                if (lane < CL) barrier_arrive_remote(remote(empty, lane));
            } else {
                __syncwarp();
                if (lane == 0) barrier_arrive(empty);
            }
            ++n;
        };
        const u32 band = warp % BANDS, side = warp / BANDS; // of the rows; of the ranks and columns
        // where the four 8 × 8 matrices of an operand lie: [16 rows][16 columns] of x, [2 × 8 rows][16 columns] of A and B
        const u32 first_at = band * 16 + lane % 16, first_column = lane / 16 * 8, second_at = lane % 8 + lane / 16 * 8,
                  second_column = lane / 8 % 2 * 8;
#pragma unroll 1
        for (u32 item = blockIdx.x; item < items; item += gridDim.x, ++i) {
            await();
            const Tile &t = s.tiles[i % RING];
            const u32 g = item % (p.groups / MG) * MG, rank = t.rank;
            const bool lora = t.lora;
            const int rows[2] = {t.rows[band * 16 + quad], t.rows[band * 16 + quad + 8]};
            u32 high[MG * KR][4], low[MG * KR][4];
            float scale[MG][2], weight[2] = {1, 1};
            if (p.weights)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) weight[half] = rows[half] >= 0 ? p.weights[rows[half] * p.w_t] : 0.0f;
            if (lora) {
                float h[NT][4];
                sum(p, s, n, first_at * KP + first_column, (BM + (PARTED ? side * OWN * 8 : 0) + second_at) * KP + second_column, band, side, h,
                    await, release);
#pragma unroll
                for (u32 m = 0; m < MG; ++m) {
                    float most[2] = {0, 0};
#pragma unroll
                    for (u32 j = 0; j < RG / 8; ++j)
#pragma unroll
                        for (u32 e = 0; e < 4; ++e) {
                            float &v = h[m * (RG / 8) + j][e];
                            if (j * 8 + pair + e % 2 >= rank || rows[e / 2] < 0) v = 0;
                            most[e / 2] = fmaxf(most[e / 2], fabsf(v));
                        }
                    if constexpr (E::SCALED) {
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
                            for (u32 d = 1; d < 4; d *= 2) most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], d));
                            const u32 exponent = min(max((__float_as_uint(most[half]) >> 23) & 255, 1u), 253u);
                            const float down = __uint_as_float((254 - exponent) << 23);
                            scale[m][half] = __uint_as_float(exponent << 23);
#pragma unroll
                            for (u32 j = m * (RG / 8); j < (m + 1) * (RG / 8); ++j) h[j][2 * half] *= down, h[j][2 * half + 1] *= down;
                        }
                    }
                }
#pragma unroll
                for (u32 k = 0; k < MG * KR; ++k)
#pragma unroll
                    for (u32 q = 0; q < 4; ++q) {
                        u32 top[2], rest[2];
#pragma unroll
                        for (u32 e = 0; e < 2; ++e) {
                            const float v = h[2 * k + q / 2][q % 2 * 2 + e];
                            top[e] = E::round(v);
                            const float whole = E::widen(top[e]);
                            rest[e] = E::round(whole == v ? 0.0f : v - whole);
                        }
                        high[k][q] = top[0] | top[1] << 16, low[k][q] = rest[0] | rest[1] << 16;
                    }
            }
            const float factor[2] = {t.scaling * weight[0], t.scaling * weight[1]};
            const bool live[2] = {rows[0] >= 0, rows[1] >= 0};
            constexpr u32 VECTORS = NS / SPLIT / 8, EACH = 16 * VECTORS / 32; // 16-byte vectors of a row; those of a thread
            const u32 out_column = side * (NS / SPLIT) + lane % VECTORS * 8;
            u16 *out[EACH]; // null: not written
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) {
                const int code = t.rows[band * 16 + (lane + 32 * j) / VECTORS], row = code >= 0 ? code : -2 - code;
                out[j] = code >= 0 || (code < -1 && (p.flags & COPY)) ? p.out + row * p.o_t + g * p.o_g + out_column : nullptr;
            }
#pragma unroll
            for (u32 m = 0; m < MG; ++m) {
#pragma unroll 1
                for (u32 n0 = 0; n0 < p.columns; n0 += NS) {
                    if (m || n0 || lora) await();
                    u16 *stage = s.stages[n % STAGES], *bases = stage + NS * RPP + band * 16 * NP;
                    const u32 b_at = shared_address(stage + second_at * RPP + second_column);
                    const u32 has = p.base ? ~0u : 0, signs = p.base ? 0 : 0x80008000; // without base, 0 keeps its sign
                    if (lora) {
#pragma unroll 1
                        for (u32 c = side * (NS / SPLIT); c < (side + 1) * (NS / SPLIT); c += 32) { // all that is read comes before what is written
                            float y[4][4] = {};
                            u32 bv[2][KR][4], was[4][2];
                            u32 *at = (u32 *)(bases + quad * NP + c + pair);
#pragma unroll
                            for (u32 i = 0; i < 2; ++i)
#pragma unroll
                                for (u32 k = 0; k < KR; ++k) load_matrix4(bv[i][k], b_at + ((c + i * 16) * RPP + k * 16) * 2);
#pragma unroll
                            for (u32 j = 0; j < 4; ++j)
#pragma unroll
                                for (u32 half = 0; half < 2; ++half) was[j][half] = at[half * 4 * NP + j * 4] & has;
#pragma unroll
                            for (u32 k = 0; k < KR; ++k)
#pragma unroll
                                for (u32 j = 0; j < 4; ++j) E::mma(y[j], high[m * KR + k], bv[j / 2][k][j % 2 * 2], bv[j / 2][k][j % 2 * 2 + 1]);
#pragma unroll
                            for (u32 k = 0; k < KR; ++k)
#pragma unroll
                                for (u32 j = 0; j < 4; ++j) E::mma(y[j], low[m * KR + k], bv[j / 2][k][j % 2 * 2], bv[j / 2][k][j % 2 * 2 + 1]);
#pragma unroll
                            for (u32 j = 0; j < 4; ++j)
#pragma unroll
                                for (u32 half = 0; half < 2; ++half) {
                                    float v[2], d[2], sum[2];
#pragma unroll
                                    for (u32 e = 0; e < 2; ++e) {
                                        v[e] = live[half] ? y[j][2 * half + e] : 0.0f;
                                        if (E::SCALED) v[e] *= scale[m][half];
                                        d[e] = v[e] * factor[half];
                                        sum[e] = fmaf(v[e], factor[half], E::widen(was[j][half] >> 16 * e));
                                    }
                                    const u32 kept = was[j][half] | (__byte_perm(__float_as_uint(d[0]), __float_as_uint(d[1]), 0x7632) & signs);
                                    const u32 keep = (d[0] == 0 ? 0xffff : 0) | (d[1] == 0 ? 0xffff0000 : 0);
                                    at[half * 4 * NP + j * 4] = (kept & keep) | (E::round2(sum[0], sum[1]) & ~keep);
                                }
                        }
                    } else if (!p.base) {
#pragma unroll
                        for (u32 q = lane; q < 16 * VECTORS; q += 32)
                            *(uint4 *)(bases + q / VECTORS * NP + side * (NS / SPLIT) + q % VECTORS * 8) = uint4{0, 0, 0, 0};
                    }
                    __syncwarp();
                    if (n0 + out_column < p.columns)
#pragma unroll
                        for (u32 j = 0; j < EACH; ++j)
                            if (out[j])
                                *(uint4 *)(out[j] + m * p.o_g + n0) =
                                    *(const uint4 *)(bases + (lane + 32 * j) / VECTORS * NP + out_column);
                    release();
                }
            }
        }
    }

    // sum += 16 rows of x times the ranks of A, over 16 columns.
    static __device__ __forceinline__ void multiply(u32 x_at, u32 a_at, float (&sum)[OWN][4]) {
        u32 xv[4], av[4];
        load_matrix4(xv, x_at);
#pragma unroll
        for (u32 j = 0; j < OWN; j += 2) {
            load_matrix4(av, a_at + j * 8 * KP * 2);
            E::mma(sum[j], xv, av[0], av[1]);
            E::mma(sum[j + 1], xv, av[2], av[3]);
        }
    }

    // h of 16 rows, whole in each of the band's warps: pieces of D make chunks, chunks make h.
    template <class Await, class Release>
    static __device__ __forceinline__ void sum(const Params &p, Shared &s, const u32 &n, u32 x_at, u32 a_at, u32 band, u32 side,
                                               float (&h)[NT][4], Await &await, Release &release) {
        float acc[OWN][4] = {}, part[OWN][4] = {}, own[OWN][4] = {};
        auto add = [&](float (&to)[OWN][4], float (&from)[OWN][4]) {
#pragma unroll
            for (u32 j = 0; j < OWN; ++j)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) to[j][e] += from[j][e], from[j][e] = 0;
        };
        const bool pieces = p.piece == 128; // else a chunk is one
        u32 left = p.chunk;
#pragma unroll 1
        for (u32 k0 = 0; k0 < p.features; k0 += KS) {
            if (k0) await();
            const u32 stage = shared_address(s.stages[n % STAGES]);
            auto ended = [&](float (&sum)[OWN][4]) { // 128 columns
                left -= 128;
                if (pieces || !left) add(part, sum);
                if (!left) add(own, part), left = p.chunk;
            };
            if (OWN == 2 && KS == 256 && pieces) { // two pieces side by side: neither waits for the other's products
                float next[OWN][4] = {};
#pragma unroll
                for (u32 k = 0; k < 128; k += 16) {
                    multiply(stage + (x_at + k) * 2, stage + (a_at + k) * 2, acc);
                    multiply(stage + (x_at + k + 128) * 2, stage + (a_at + k + 128) * 2, next);
                }
                ended(acc), ended(next);
            } else {
#pragma unroll
                for (u32 k = 0; k < KS; k += 16) {
                    multiply(stage + (x_at + k) * 2, stage + (a_at + k) * 2, acc);
                    if (k % 128 == 112) ended(acc);
                }
            }
            release();
        }
        if (left != p.chunk) {
            if (!pieces) add(part, acc);
            add(own, part);
        }
        if constexpr (PARTED) {
            const u32 quad = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
            float *rows = s.swap + (band * 16 + quad) * SWAP + pair;
#pragma unroll
            for (u32 j = 0; j < OWN; ++j)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) rows[e / 2 * 8 * SWAP + (side * OWN + j) * 8 + e % 2] = own[j][e];
            group_sync(2 + band, SPLIT * 32);
#pragma unroll
            for (u32 j = 0; j < NT; ++j)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) h[j][e] = rows[e / 2 * 8 * SWAP + j * 8 + e % 2];
            group_sync(2 + band, SPLIT * 32); // all have read before the next tile's h is written
        } else {
#pragma unroll
            for (u32 j = 0; j < NT; ++j)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) h[j][e] = own[j][e];
        }
    }

    static __device__ __forceinline__ void run(const Params &p) {
        extern __shared__ __align__(128) u8 memory[];
        Shared &s = *(Shared *)memory;
        const u32 t = threadIdx.x;
        if (t < STAGES) {
            barrier_init(shared_address(&s.full[t]), FEEDERS + 1);
            barrier_init(shared_address(&s.empty[t]), WARPS * CL);
        }
        barrier_init_fence();
        if constexpr (CL > 1) {
            __syncwarp();
            cluster_arrive();
        }
        if (p.mode == PLAN) {
#pragma unroll 1
            for (u32 l = t; l < p.slots + 2; l += THREADS) s.starts[l] = min((u32)max(p.plan[p.rows + l], 0), p.rows);
            __syncthreads();
            if (t < 32) { // running sums of tiles
                const u32 buckets = p.slots + (p.flags & COPY ? 1 : 0);
                u32 before = 0;
#pragma unroll 1
                for (u32 l0 = 0; l0 < p.slots + 2; l0 += 32) {
                    const u32 l = l0 + t;
                    const u32 own = l < buckets ? (u32)max(s.starts[l + 1] - s.starts[l], 0) : 0;
                    u32 sum = (own + BM - 1) / BM;
                    const u32 tiles = sum;
#pragma unroll
                    for (u32 d = 1; d < 32; d *= 2) {
                        const u32 v = __shfl_up_sync(~0u, sum, d);
                        if (t >= d) sum += v;
                    }
                    if (l < p.slots + 2) s.firsts[l] = before + sum - tiles;
                    before += __shfl_sync(~0u, sum, 31);
                }
                if (t == 0) s.tiles_there = before;
            }
        } else if (t == 0)
            s.tiles_there =
                p.mode == SINGLE ? (p.rows + BM - 1) / BM : min((u32)max(p.plan[p.rows + p.experts], 0), p.room) * (p.tile_rows / BM);
        __syncthreads();
        if constexpr (CL > 1) cluster_wait();  // the barriers of all blocks are set up
        const u32 items = s.tiles_there * (p.groups / MG);
        if (t < WARPS * 32)
            compute(p, s, items, t / 32, t % 32);
        else
            feed(p, s, items, t - WARPS * 32);
        if constexpr (CL > 1) {  // no block leaves while another may still write into it
            __syncwarp();
            cluster_arrive();
            cluster_wait();
        }
    }
};

#define CLUSTER_1
#define CLUSTER_4 __cluster_dims__(4, 1, 1)
// rows_<type>_<rows>_<ranks>_<columns of D a stage>_<columns of N>_<stages>_<cluster>_<split>_<merged groups>, and shared_<the same>: its
// bytes of shared memory
#define ROWS(E, BM, RP, KS, NS, STAGES, CL, SPLIT, MG)                                                           \
    extern "C" __global__ void CLUSTER_##CL __launch_bounds__(BM * 2 * SPLIT + FEEDERS, 1)                       \
        rows_##E##_##BM##_##RP##_##KS##_##NS##_##STAGES##_##CL##_##SPLIT##_##MG(const __grid_constant__ Params p) { \
        Rows<E, BM, RP, KS, NS, STAGES, CL, SPLIT, MG>::run(p);                                                  \
    }                                                                                                            \
    extern "C" __device__ const int shared_rows_##E##_##BM##_##RP##_##KS##_##NS##_##STAGES##_##CL##_##SPLIT##_##MG = \
        sizeof(Rows<E, BM, RP, KS, NS, STAGES, CL, SPLIT, MG>::Shared);

// As launch.ROWS_KERNELS.
#define ALL(E)                             \
    ROWS(E, 32, 16, 256, 256, 5, 1, 2, 1)  \
    ROWS(E, 64, 16, 128, 128, 7, 1, 2, 1)  \
    ROWS(E, 64, 16, 256, 256, 4, 1, 2, 1)  \
    ROWS(E, 128, 16, 128, 128, 4, 1, 1, 1) \
    ROWS(E, 64, 32, 128, 128, 6, 1, 2, 1)  \
    ROWS(E, 128, 32, 128, 128, 4, 1, 1, 1) \
    ROWS(E, 64, 64, 128, 128, 5, 1, 2, 1)  \
    ROWS(E, 128, 64, 128, 128, 3, 1, 1, 1) \
    ROWS(E, 64, 64, 128, 128, 5, 1, 2, 2)  \
    ROWS(E, 128, 64, 128, 128, 3, 1, 1, 2) \
    ROWS(E, 32, 64, 128, 128, 7, 4, 2, 1)
ALL(bf16)
ALL(fp16)
#endif
