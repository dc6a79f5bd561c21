"""The routes of one tile: one (expert, adapter slot) pair's, or one expert's whatever their slots."""

import triton
import triton.language as tl

ROUTE = tl.constexpr(0)  # few routes: a tile is one route, its ids are read on the spot
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
def route_pair(m, ids, adapters, there, K, E, L, i_t, i_k, s_t):
    """(expert, slot) of routes m: expert E where masked, slot L without an adapter; ids of any width and value."""
    t = (m // K).to(tl.int64)
    e = tl.load(ids + t * i_t + (m % K) * i_k, mask=there, other=-1)
    expert = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    slot = expert * 0
    if adapters is not None:
        s = tl.load(adapters + t * s_t, mask=there, other=-1)
        slot = tl.where((s >= 0) & (s < L), s, L).to(tl.int32)
    return expert, slot


@triton.jit
def expert_tile(
    tile, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, PLAN_ROWS: tl.constexpr,
):  # fmt: skip
    """(expert, slot, rows [BLOCK_M], inside [BLOCK_M]) of one tile.

    expert: E where the routes are masked, more than E for a tile that has none. slot: L without an adapter. rows:
    route numbers t·K + k. inside: lanes that hold one. A damaged plan never leads outside M routes and E experts.
    """
    lane = tl.arange(0, BLOCK_M)
    if MODE == ROUTE:
        expert, slot = route_pair(tile, ids, adapters, tile < M, K, E, L, i_t, i_k, s_t)
        rows = tile + lane * 0
        inside = lane == 0
    else:
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
        expert = tl.where(empty, E + 1, expert)
    return expert, slot, rows, inside


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
