"""Sort routes by (expert, slot), stable, and cut them into tiles: two launches, no host sync.

Few routes: each is counted against all others (`rank_kernel`), then the tiles are numbered (`tiles_kernel`). Many:
programs count their pairs (`count_kernel`), then place their routes and tiles (`place_kernel`). A plan's parts are at
plan (rows), + M (expert ends), + M + E (tile count), + M + E + 1 (tile pairs), + TILES (tile starts).
"""

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertPlanConfig, cdiv
from .expert_tile import route_pair
from .tile import launch

_SIZES = ("M", "K", "E", "L", "TILES", "i_t", "i_k", "s_t")
_LOOSE = ("ids", "adapters", "plan", "scratch")


@triton.jit
def pair_of(m, ids, adapters, there, K, E, L, i_t, i_k, s_t):
    """The pair of routes m: expert · (L + 1) + slot; E · (L + 1) where masked."""
    expert, slot = route_pair(m, ids, adapters, there, K, E, L, i_t, i_k, s_t)
    return tl.where(expert < E, expert * (L + 1) + slot, E * (L + 1))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_LOOSE)
def rank_kernel(
    ids, adapters, plan, scratch,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", i_t: "i64", i_k: "i64", s_t: "i64",
    BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A route's place: the routes of smaller pairs, and the earlier ones of its own.

    Writes rows at their places, the places' pairs at scratch and their pairs' first places at scratch + M. Behind the
    routes every expert is asked for in the same way: its end is the number of routes of smaller pairs than the next's.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    route = m < M
    pair = pair_of(m, ids, adapters, route, K, E, L, i_t, i_k, s_t)
    pair = tl.where(route, pair, (m - M + 1) * (L + 1))
    smaller = tl.zeros((BLOCK,), tl.int32)
    earlier = tl.zeros((BLOCK,), tl.int32)
    for j0 in range(0, M, STEP):
        j = j0 + tl.arange(0, STEP)
        there = j < M
        other = pair_of(j, ids, adapters, there, K, E, L, i_t, i_k, s_t)
        smaller += tl.sum(((other[None, :] < pair[:, None]) & there[None, :]).to(tl.int32), 1)
        same = (other[None, :] == pair[:, None]) & there[None, :] & (j[None, :] < m[:, None])
        earlier += tl.sum(same.to(tl.int32), 1)
    place = smaller + earlier
    tl.store(plan + place, m, mask=route)
    tl.store(scratch + place, pair, mask=route)
    tl.store(scratch + M + place, smaller, mask=route)
    tl.store(plan + m, smaller, mask=(m >= M) & (m < M + E))


@triton.jit(do_not_specialize=("M", "E", "TILES"), do_not_specialize_on_alignment=_LOOSE)
def tiles_kernel(
    scratch, plan, M: "i32", E: "i32", TILES: "i32",
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Number the tiles: a position starts one where its distance from its pair's first place divides by ROWS."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    begin = tl.program_id(0) * BLOCK
    before = tl.zeros((STEP,), tl.int32)
    for q0 in range(0, begin, STEP):
        q = q0 + tl.arange(0, STEP)
        first = tl.load(scratch + M + q, mask=q < begin, other=0)
        before += ((q < begin) & ((q - first) % ROWS == 0)).to(tl.int32)
    position = begin + tl.arange(0, BLOCK)
    there = position < M
    first = tl.load(scratch + M + position, mask=there, other=0)
    starts = (there & ((position - first) % ROWS == 0)).to(tl.int32)
    number = tl.sum(before, 0) + tl.cumsum(starts, 0)
    tiles = plan + M + E + 1
    tl.store(tiles + number - 1, tl.load(scratch + position, mask=there, other=0), mask=starts == 1)
    tl.store(tiles + TILES + number - 1, position, mask=starts == 1)
    if begin + BLOCK >= M:
        count = tl.sum(before, 0) + tl.sum(starts, 0)
        tl.store(plan + M + E, count)
        for t0 in range(count, TILES, BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            tl.store(tiles + t, tl.full((BLOCK,), -1, tl.int32), mask=t < TILES)
            tl.store(tiles + TILES + t, tl.full((BLOCK,), 0, tl.int32) + M, mask=t < TILES)
        tl.store(tiles + 2 * TILES, M)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_LOOSE)
def count_kernel(
    ids, adapters, scratch, M: "i32", K: "i32", E: "i32", L: "i32", i_t: "i64", i_k: "i64", s_t: "i64",
    BLOCK: tl.constexpr, STEPS: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scratch[program] = how many routes of each pair the program's routes hold."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK_L,), tl.int32)
    for step in range(STEPS):
        m = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        pair = pair_of(m, ids, adapters, m < M, K, E, L, i_t, i_k, s_t)
        total += tl.histogram(pair, BLOCK_L, mask=m < M)
    tl.store(scratch + tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L), total)


@triton.jit(do_not_specialize=(*_SIZES, "programs"), do_not_specialize_on_alignment=_LOOSE)
def place_kernel(
    ids, adapters, scratch, plan,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", i_t: "i64", i_k: "i64", s_t: "i64", programs: "i32",
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, BLOCK_L: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A route's place: its pair's start + its pair's routes in earlier programs + those before it in its own.

    The route that starts a tile writes the tile; program 0 writes the ends of experts and what is left of the tiles.
    """
    lanes = tl.arange(0, BLOCK_L)
    lane = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_L,), tl.int32)
    earlier = tl.zeros((BLOCK_L,), tl.int32)
    for first in range(0, programs, AT_ONCE):  # rows of scratch at once: one after the other costs an L2 latency each
        other = first + tl.arange(0, AT_ONCE)
        part = tl.load(scratch + other[:, None] * BLOCK_L + lanes[None, :], mask=(other < programs)[:, None], other=0)
        total += tl.sum(part, 0)
        earlier += tl.sum(tl.where((other < pid)[:, None], part, 0), 0)
    starts = tl.cumsum(total, 0) - total
    tiles = (total + ROWS - 1) // ROWS
    first_tile = tl.cumsum(tiles, 0) - tiles
    ends = plan + M
    count_at = ends + E
    tile_pairs = count_at + 1
    tile_starts = tile_pairs + TILES
    if pid == 0:
        expert = lanes // (L + 1)
        tl.store(ends + expert - 1, starts, mask=(lanes % (L + 1) == 0) & (expert >= 1) & (expert <= E))
        count = tl.sum(tiles, 0)
        tl.store(count_at, count)
        for t0 in range(count, TILES, BLOCK):
            t = t0 + lane
            tl.store(tile_pairs + t, tl.full((BLOCK,), -1, tl.int32), mask=t < TILES)
            tl.store(tile_starts + t, tl.full((BLOCK,), 0, tl.int32) + M, mask=t < TILES)
        tl.store(tile_starts + TILES, M)
    next_place = starts + earlier
    for step in range(STEPS):
        m = (pid * STEPS + step) * BLOCK + lane
        there = m < M
        pair = pair_of(m, ids, adapters, there, K, E, L, i_t, i_k, s_t)
        same = (pair[:, None] == pair[None, :]) & (lane[None, :] < lane[:, None])
        place = tl.gather(next_place, pair, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(plan + place, m, mask=there)
        rank = place - tl.gather(starts, pair, 0)
        tile = tl.gather(first_tile, pair, 0) + rank // ROWS
        new = there & (rank % ROWS == 0)
        tl.store(tile_pairs + tile, pair, mask=new)
        tl.store(tile_starts + tile, place, mask=new)
        next_place += tl.histogram(pair, BLOCK_L, mask=there)


def sizes(ids: Tensor, adapters: Tensor | None, experts: int, slots: int) -> tuple:
    """M, K, E, L and the strides of ids, as the kernels take them."""
    return ids.shape[0] * ids.shape[1], ids.shape[1], experts, slots, ids.stride(0), ids.stride(1), 0 if adapters is None else adapters.stride(0)


def rank(name: str, ids: Tensor, adapters: Tensor | None, experts: int, slots: int, room: int, scratch: Tensor, out: Tensor,
         config: ExpertPlanConfig, pdl: bool) -> None:  # fmt: skip
    """Write the plan into out; scratch is [2 · M] int32."""
    m, k, e, slot_count, *strides = sizes(ids, adapters, experts, slots)
    step = 256 if m <= 256 else 512 if m <= 512 else 1024  # few steps: each waits for its ids
    launch(
        name, rank_kernel, (config.programs, 1, 1),
        (ids, adapters, out, scratch, m, k, e, slot_count, room, *strides), (config.block, step, pdl), step // 64, 1,
    )  # fmt: skip
    tiles(name, scratch, m, experts, room, out, config, pdl)


def tiles(name: str, scratch: Tensor, routes: int, experts: int, room: int, out: Tensor, config: ExpertPlanConfig, pdl: bool) -> None:
    """Write out's tiles; scratch holds the pair of every position, then the first position of every position's pair."""
    block, step = 256, 1024
    launch(name, tiles_kernel, (cdiv(routes, block), 1, 1), (scratch, out, routes, experts, room), (config.rows, block, step, pdl), 4, 1, pdl)


def count(name: str, ids: Tensor, adapters: Tensor | None, experts: int, slots: int, room: int, scratch: Tensor, out: Tensor,
          config: ExpertPlanConfig, pdl: bool) -> None:  # fmt: skip
    """Write the plan into out; scratch is [programs, BLOCK_L] int32."""
    m, k, e, slot_count, *strides = sizes(ids, adapters, experts, slots)
    constants = (config.block, config.steps, config.block_l)
    at_once = max(1, min(32, (8192 if config.block_l <= 512 else 4096) // config.block_l))  # more spill on sm_90
    grid = (config.programs, 1, 1)
    routes, at_a_time = config.block * config.steps, min(1024, config.block * config.steps)
    of_count = (at_a_time, cdiv(routes, at_a_time), config.block_l, pdl)
    launch(name, count_kernel, grid, (ids, adapters, scratch, m, k, e, slot_count, *strides), of_count, 4, 1)
    launch(
        name, place_kernel, grid,
        (ids, adapters, scratch, out, m, k, e, slot_count, room, *strides, config.programs),
        (config.rows, *constants, at_once, pdl), 16, 1, pdl,
    )  # fmt: skip
