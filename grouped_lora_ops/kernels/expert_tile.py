"""The routes of one tile: one (expert, adapter slot) pair's."""

import triton
import triton.language as tl

ROUTE = tl.constexpr(0)  # few routes: a tile is one route, its ids are read on the spot
PLAN = tl.constexpr(1)  # the plan's tiles


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
