"""The routes of one tile: one (expert, adapter slot) pair's, or one expert's whatever their slots."""

import triton
import triton.language as tl

from .tile import prefetch

ROUTE = tl.constexpr(0)  # few routes: programs read the ids and find the routes of a tile themselves
PLAN = tl.constexpr(1)  # the plan's tiles
EXPERT = tl.constexpr(2)  # runs of one expert's routes in the plan's order: few slots meet in a tile


@triton.jit
def program_tile(n_blocks, N_FIRST: tl.constexpr):
    """(tile, block of N) of a program; N_FIRST: neighbouring programs share a tile of routes, not a block of W."""
    if N_FIRST:
        tile = tl.program_id(0) // n_blocks
        n_block = tl.program_id(0) % n_blocks
    else:
        tiles = tl.num_programs(0) // n_blocks
        tile = tl.program_id(0) % tiles
        n_block = tl.program_id(0) // tiles
    return tile, n_block


@triton.jit
def masked(ids, count):
    """ids of any width and value as int32: `count` where they name none of 0 … count − 1."""
    return tl.where((ids >= 0) & (ids < count), ids, count).to(tl.int32)


@triton.jit
def route_pair(m, ids, adapters, there, K, E, L, i_t, i_k, s_t):
    """(expert, slot) of routes m: expert E where masked, slot L without an adapter; ids of any width and value."""
    t = (m // K).to(tl.int64)
    e = tl.load(ids + t * i_t + (m % K) * i_k, mask=there, other=-1)
    expert = masked(e, E)
    slot = expert * 0
    if adapters is not None:
        slot = masked(tl.load(adapters + t * s_t, mask=there, other=-1), L)
    return expert, slot


@triton.jit
def route_tile(
    tile, ids, adapters, M, K, E, L, i_t, i_k, s_t, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """(expert, slot, rows, inside, part, parts): the tile that route number `tile` is in.

    TOKENS 1: it has one of its own. BLOCK_M: the routes of so many tokens, counted from 0, that have the same k and the same
    pair share one; this is number `part` of `parts`, whose programs may share the work or leave it to the first. Routes whose k
    differ would have to be searched for, which costs all others 1 µs.
    """
    tl.static_assert(TOKENS == 1 or (TOKENS == BLOCK_M and BLOCK_M == 16))
    lane = tl.arange(0, BLOCK_M)
    expert, slot = route_pair(tile, ids, adapters, tile < M, K, E, L, i_t, i_k, s_t)
    if TOKENS == 1:
        return expert, slot, tile + lane * 0, lane == 0, tile * 0, tile * 0 + 1
    else:
        own = tile // K % BLOCK_M
        rows = tile + (lane - own) * K
        there = rows < M
        t = (tile // K - own).to(tl.int64)  # no lane divides by K
        e = tl.load(ids + t * i_t + (tile % K) * i_k + lane * i_t, mask=there, other=-1)
        same = there & (masked(e, E) == expert)
        if adapters is not None:
            same = same & (masked(tl.load(adapters + t * s_t + lane * s_t, mask=there, other=-1), L) == slot)
        # one sum for the lanes that are inside (bits 0 … 15), `part` (16 …) and `parts` (24 …): who reads them has no loads to repeat
        bits = tl.sum(same.to(tl.int32) * ((1 << lane) + ((lane < own).to(tl.int32) << 16) + (1 << 24)), 0)
        return expert, slot, rows, (bits >> lane) & 1 == 1, (bits >> 16) & 15, bits >> 24


@triton.jit
def rows_over(rows, tile, div, K, MODE: tl.constexpr, BLOCK_M: tl.constexpr, PLAN_ROWS: tl.constexpr):
    """rows // div as int64, where div is 1 or K: of mode ROUTE without a division in each lane, else by unsigned ones of 32 bits."""
    if MODE == ROUTE:
        lane = tl.arange(0, BLOCK_M)
        steps = lane * 0 if PLAN_ROWS == 1 else lane - tile // K % BLOCK_M
        return (tile // div + steps * (K // div)).to(tl.int64)
    else:
        return (rows.to(tl.uint32) // div.to(tl.uint32)).to(tl.int64)


@triton.jit
def plan_tile(tile, plan, M, E, L, TILES, BLOCK_M: tl.constexpr, PLAN_ROWS: tl.constexpr):
    """(expert, slot, rows, inside) of one of the plan's tiles, or of a part of one that is BLOCK_M high.

    A damaged plan never leads outside M routes and E experts.
    """
    lane = tl.arange(0, BLOCK_M)
    PARTS: tl.constexpr = PLAN_ROWS // BLOCK_M
    entry = tile // PARTS
    head = plan + M + E
    there = entry < TILES  # behind the last tile pairs are −1: to ask the count first would cost a load's latency
    pair = tl.load(head + 1 + entry, mask=there, other=-1)
    start = tl.load(head + 1 + TILES + entry, mask=there, other=0)
    end = tl.load(head + 2 + TILES + entry, mask=there, other=0)
    want = start + (tile % PARTS) * BLOCK_M + lane
    inside = (want < end) & (want >= 0) & (want < M)
    rows = tl.load(plan + want, mask=inside, other=0)
    inside = inside & (rows >= 0) & (rows < M)
    expert = pair // (L + 1)
    slot = pair % (L + 1)
    empty = (pair < 0) | (expert > E) | (start + (tile % PARTS) * BLOCK_M >= end)
    return tl.where(empty, E + 1, expert), slot, rows, inside


@triton.jit
def expert_tile(
    tile, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, PLAN_ROWS: tl.constexpr,
):  # fmt: skip
    """(expert, slot, rows [BLOCK_M], inside [BLOCK_M]) of one tile.

    expert: E where the routes are masked, more than E for a tile that has none. slot: L without an adapter. rows:
    route numbers t·K + k. inside: lanes that hold one. PLAN_ROWS: routes of a plan's tile; of mode ROUTE `route_tile`'s
    TOKENS.
    """
    if MODE == ROUTE:
        expert, slot, rows, inside, part, _ = route_tile(tile, ids, adapters, M, K, E, L, i_t, i_k, s_t, BLOCK_M, PLAN_ROWS)
        expert = tl.where(part > 0, E + 1, expert)
    else:
        expert, slot, rows, inside = plan_tile(tile, plan, M, E, L, TILES, BLOCK_M, PLAN_ROWS)
    return expert, slot, rows, inside


@triton.jit
def lines_of_a(tile, tiles, rows, ids, adapters, M, K, E, L, D, i_t, i_k, s_t, a_l, a_e, SIZE: tl.constexpr, BYTES: tl.constexpr):
    """(offsets into a [rows, lines of 128 bytes], whether there is an adapter): the first BYTES of A's rows, of the pair that a route
    has. Tiles' routes are M // tiles apart, or neighbours; a tile beyond the last route has none."""
    m = tile * tl.maximum(M // tiles, 1)
    expert, slot = route_pair(m, ids, adapters, m < M, K, E, L, i_t, i_k, s_t)
    d = tl.minimum(tl.arange(0, BYTES // 128) * (128 // SIZE), D - 1)
    offsets = slot.to(tl.int64) * a_l + expert.to(tl.int64) * a_e + rows[:, None] + d[None, :]
    return offsets, (expert < E) & (slot < L)


@triton.jit
def call_a(tile, tiles, a, rows, ids, adapters, M, K, E, L, D, i_t, i_k, s_t, a_l, a_e, BYTES: tl.constexpr):
    """Call `lines_of_a` into the L2: while the plan is being made, which says whose rows this program will need, the memory would
    do nothing. Only a hint: ids may be stale, for nobody has waited yet. For kernels with a plan, and an A whose rows lie along D."""
    SIZE: tl.constexpr = a.dtype.element_ty.primitive_bitwidth // 8
    offsets, there = lines_of_a(tile, tiles, rows, ids, adapters, M, K, E, L, D, i_t, i_k, s_t, a_l, a_e, SIZE, BYTES)
    if there:
        prefetch(a + offsets)


@triton.jit
def shared_tile(
    tile, shares, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, PLAN_ROWS: tl.constexpr,
):  # fmt: skip
    """`expert_tile`, and (part, parts): a program for whose number there is no tile of its own, because fewer occur than
    could, takes a part of another's. shares: of a plan, how many tiles and parts of tiles there are at most; 0: no parts."""
    if MODE == ROUTE:
        expert, slot, rows, inside, part, parts = route_tile(tile, ids, adapters, M, K, E, L, i_t, i_k, s_t, BLOCK_M, PLAN_ROWS)
    else:
        part = tile * 0
        parts = part + 1
        if shares > 0:
            count = tl.maximum(tl.load(plan + M + E) * (PLAN_ROWS // BLOCK_M), 1)
            parts = tl.maximum(shares // count, 1)
            part = tile // count
            tile = tile % count
        expert, slot, rows, inside = plan_tile(tile, plan, M, E, L, TILES, BLOCK_M, PLAN_ROWS)
        expert = tl.where(part < parts, expert, E + 1)
    return expert, slot, rows, inside, part, parts


@triton.jit
def expert_rows(tile, plan, M, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, rows, inside, before, follows: [BLOCK_M]) of one tile of mode EXPERT, the first three as `expert_tile` has them.

    before: the row ahead of each in the tile, where it follows one. An expert's routes lie slot by slot.

    An expert's tiles begin at number start // BLOCK_M + expert: never below the last of the expert before, so that no
    program adds up the experts' tiles. Numbers that are left out have no routes; there are E + ⌈M / BLOCK_M⌉ in all.
    """
    experts = tl.arange(0, BLOCK_E)
    starts = tl.load(plan + M + experts - 1, mask=(experts > 0) & (experts <= E), other=0)
    expert = tl.sum(((experts <= E) & (starts // BLOCK_M + experts <= tile)).to(tl.int32), 0) - 1
    start = tl.load(plan + M + expert - 1, mask=expert > 0, other=0)
    end = tl.load(plan + M + expert, mask=expert < E, other=M)
    place = start + (tile - start // BLOCK_M - expert) * BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    want = place + lane
    inside = (want < end) & (want >= 0) & (want < M)
    follows = inside & (lane > 0) & (want > 0)
    rows = tl.load(plan + want, mask=inside, other=0)
    before = tl.load(plan + want - 1, mask=follows, other=0)
    inside = inside & (rows >= 0) & (rows < M)
    follows = follows & (before >= 0) & (before < M)
    expert = tl.where(place >= end, E + 1, expert)
    return expert, rows, inside, before, follows
