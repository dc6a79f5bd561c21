"""Which kernel and which tile for a problem over experts: pure functions of sizes, in `launch.py`'s manner.

As there, `chunk_of` and `rank_block` alone fix the order of the sums and so a row's bits; tile heights, splits and
loops may depend on the batch. Whether a kernel reads a plan (PLAN) or takes every route for itself (ROUTE) changes no
bit either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .launch import (
    cdiv,
    chunk_of,
    chunks_of,
    has_pdl,
    narrow,
    power_of_2,
    precision,
    rank_block,
    tile_count,
)

ROUTE, PLAN, EXPERT = 0, 1, 2  # as in kernels.expert_tile
ROUTE_LIMIT = 128  # up to here programs look through the ids themselves and no plan is read, which would cost 4 µs
LONE_ROUTES = 64  # up to here every route is a tile of its own: to look for others takes longer than what they read
SHARE_PROGRAMS = 4  # a multiprocessor's, up to which an expand's programs share tiles
RANK_LIMIT = 4096  # up to here a route's place is counted against all others: M²/132 comparisons a multiprocessor
COUNT_LIMIT = 2048  # (expert, slot) pairs up to which programs count them in a row of scratch each


@dataclass(frozen=True)
class ExpertProblem:
    """One problem over experts as far as the choice of a kernel goes."""

    arch: str  # "sm_90"
    sms: int  # multiprocessors
    itemsize: int  # bytes of an element of x
    routes: int  # M
    experts: int  # E
    slots: int  # L
    groups: int  # outputs that share x: 2 for gate and up apart, else 1
    a_groups: int  # groups that have an A of their own: 2 or 1
    in_features: int
    out_features: int  # of one group
    rank: int
    mixed: bool = False  # tokens name their adapters, one of several: an expert's routes have different ones
    top_k: int = 8  # routes of a token


@dataclass(frozen=True)
class ExpertPlanConfig:
    way: str  # "rank", "count" or "sort"
    block: int  # routes (count: sorted at once; rank: placed by a program)
    steps: int  # count: such blocks a program
    programs: int
    block_l: int  # count: (expert, slot) pairs, padded
    rows: int  # routes of a tile of the plan


@dataclass(frozen=True)
class ExpertShrinkConfig:
    mode: int
    tiles: int
    plan_rows: int  # of mode ROUTE what `tokens_of_tile` says
    block_m: int
    block_c: int  # columns of h a program makes; they run through all groups
    rank_block: int
    block_k: int
    chunk: int
    chunks: int
    split: bool  # one chunk of D a program, summed by who reads h
    precision: str
    num_warps: int
    num_stages: int
    pdl: bool  # the expand behind it may start early
    early: bool  # it may itself start before the kernel ahead has ended
    ahead: int  # bytes of a row of A that are called into the L2 before the plan is there


@dataclass(frozen=True)
class ExpertExpandConfig:
    mode: int
    tiles: int
    plan_rows: int
    block_m: int
    block_n: int
    loop: int  # blocks of N a program takes in turn, with h in registers
    shares: int  # tiles and parts of tiles, up to which programs without a tile take a part of another's (PLAN); 0: none do
    rank_block: int
    precision: str
    num_warps: int
    num_stages: int  # pipeline depth of the loop over N
    pdl: bool


@dataclass(frozen=True)
class ExpertFusedConfig:
    mode: int
    tiles: int
    plan_rows: int
    block_m: int
    block_n: int
    block_k: int
    rank_block: int
    chunk: int
    chunks: int
    precision: str
    num_warps: int
    num_stages: int
    n_stages: int  # pipeline depth of the loop over N
    apart: bool  # gate and up are programs of their own
    pdl: bool  # it may start before the kernel ahead has ended
    ahead: int  # bytes of a row of A that are called into the L2 before the plan is there


@dataclass(frozen=True)
class ExpertDeltaConfig:
    """One launch (fused) or two (shrink, then expand)."""

    fused: ExpertFusedConfig | None
    shrink: ExpertShrinkConfig | None
    expand: ExpertExpandConfig | None


@dataclass(frozen=True)
class ExpertLinearConfig:
    mode: int
    tiles: int
    plan_rows: int
    block_m: int
    block_n: int
    block_k: int
    rank_block: int
    n_first: bool  # neighbouring programs share a tile of routes (x comes from the cache), not a block of W
    block_e: int  # EXPERT: experts and the masked routes, padded
    slot_stages: int  # EXPERT: pipeline depth of the loop over a tile's adapters
    prefetch: bool  # EXPERT: B is called into the L2 before the base
    precision: str
    num_warps: int
    num_stages: int
    pdl: bool
    cuda: bool = False  # csrc/linear.cu instead, where the layouts suit it


@dataclass(frozen=True)
class ExpertWgradConfig:
    block_t: int  # routes a step
    block_w: int
    block_r: int
    run: int  # tiles of the plan that one program takes in turn; longer runs of a pair are summed from parts
    loop: int  # blocks of W that it takes in turn
    precision: str
    num_warps: int
    num_stages: int
    merged: int = 1  # groups that it takes at once: those that have one W


def pairs(experts: int, slots: int) -> int:
    """(expert, slot) pairs, each expert's routes without an adapter being a pair of their own."""
    return experts * (slots + 1)


def plan_rows(routes: int, experts: int, slots: int) -> int:
    """Routes of a tile of the plan, from shapes alone; kernels with lower tiles divide it."""
    each = routes / max(1, min(routes, experts * max(slots, 1)))
    return 16 if each < 24 else 64 if each < 128 else 128


def plan_tiles(routes: int, experts: int, slots: int) -> int:
    """Most tiles that any ids can make."""
    return tile_count(plan_rows(routes, experts, slots), routes, pairs(experts, slots), False)


def plan_room(routes: int, experts: int, slots: int, least=min) -> int:
    """Tiles that a plan has room for: those of 16 rows, so that its size is one formula for a symbolic M (least: sym_min)."""
    return (routes + 15 * least(routes, pairs(experts, slots) + 1)) // 16


def plan_size(routes: int, experts: int, slots: int, least=min) -> int:
    """Entries of the plan of M routes: rows [M], expert ends [E], tile count, the tiles' pairs and starts, and M."""
    return routes + experts + 1 + 2 * plan_room(routes, experts, slots, least) + 1


def needs_plan(routes: int) -> bool:
    return routes > ROUTE_LIMIT


def tokens_of_tile(p: ExpertProblem) -> int:
    """How many tokens' routes may share a tile of mode ROUTE, which is 16 high: 1 where that is not to be expected.

    H200, qwen3-30b and dsv3, 128 routes: all on two experts 30 to 65 % less time, evenly spread up to 9 % more, 4 in the mean.
    """
    return 16 if p.routes > LONE_ROUTES and (p.top_k <= 4 or p.experts * max(p.slots, 1) <= 32) else 1


def expert_plan(routes: int, experts: int, slots: int) -> ExpertPlanConfig:
    """How the plan is made: two launches by counting; by torch.sort where both routes and (expert, slot) pairs are many."""
    rows, width = plan_rows(routes, experts, slots), power_of_2(pairs(experts, slots) + 2)
    if routes <= RANK_LIMIT:
        block = 16
        return ExpertPlanConfig("rank", block, 1, cdiv(routes + experts, block), 0, rows)
    if width <= COUNT_LIMIT:
        block = 128 if width <= 512 else 64  # 128 × 128 comparisons beside 1024 counts spill on sm_90
        blocks = cdiv(routes, block)
        steps = max(1, power_of_2(cdiv(blocks, 64)))
        return ExpertPlanConfig("count", block, steps, cdiv(blocks, steps), max(16, width), rows)
    return ExpertPlanConfig("sort", 0, 0, 0, 0, rows)


def _tiles(p: ExpertProblem, block_m: int) -> tuple[int, int, int, int]:
    """(mode, programs along the routes, plan_rows, block_m)."""
    if not needs_plan(p.routes):
        return ROUTE, p.routes, tokens_of_tile(p), 16
    rows = plan_rows(p.routes, p.experts, p.slots)
    block_m = min(block_m, rows)
    return PLAN, plan_tiles(p.routes, p.experts, p.slots) * (rows // block_m), rows, block_m


def rows_each(p: ExpertProblem) -> float:
    """Routes of an (expert, slot) pair that occurs, for evenly spread ids."""
    return p.routes / max(1, min(p.routes, p.experts * max(p.slots, 1)))


def estimated_tiles(p: ExpertProblem, block_m: int) -> float:
    """Tiles that evenly spread ids make."""
    if not needs_plan(p.routes):
        return p.routes
    each, all_pairs = rows_each(p), p.experts * max(p.slots, 1)
    occupied = all_pairs * (1 - (1 - 1 / all_pairs) ** p.routes) if each < 8 else all_pairs
    return max(occupied, occupied * each / block_m)


def shrink_with(p: ExpertProblem, block_m: int = 16, **changes) -> ExpertShrinkConfig:
    mode, tiles, rows, block_m = _tiles(p, block_m)
    width = rank_block(p.rank, p.itemsize)
    chosen = dict(
        mode=mode,
        tiles=tiles,
        plan_rows=rows,
        block_m=block_m,
        block_c=width,
        rank_block=width,
        block_k=128,
        chunk=chunk_of(p.in_features),
        chunks=chunks_of(p.in_features),
        split=False,
        precision=precision(p.itemsize),
        num_warps=4,
        num_stages=4,
        pdl=has_pdl(p.arch),
        early=has_pdl(p.arch) and p.routes <= 16,  # H200: 0.1 to 0.5 µs less at 8 routes, 0.4 more at 64
        ahead=0,
    )
    chosen.update(changes)
    if p.itemsize == 4:
        chosen["block_k"] = min(chosen["block_k"], 64)
        chosen["num_stages"] = min(chosen["num_stages"], 3)
    return ExpertShrinkConfig(**chosen)


def shrink(p: ExpertProblem, may_split: bool = True) -> ExpertShrinkConfig:
    """Split over D while programs are few; then whole rows, x read once for gate and up. By what was fastest on an H200 in bf16
    (bench/NOTES.md): qwen3-30b and dsv3, r 32."""
    width, rows = rank_block(p.rank, p.itemsize), rows_each(p)
    columns = width * p.a_groups
    tiles, chunks, deep = estimated_tiles(p, 16), chunks_of(p.in_features), p.in_features > 4096
    # a long D is split up to many tiles, though whole sums are 5 % faster from 128 evenly spread routes on: with two experts for all
    # tokens, so with few tiles, they take up to twice as long (dsv3, T = 256: 25 µs by chunks, 33)
    few = tiles < 0.75 * p.sms or (p.in_features > 1024 and not needs_plan(p.routes)) or (deep and tiles < 4 * p.sms)
    if may_split and few and tiles * chunks < 16 * p.sms:
        if tiles <= 16 and columns == 64:
            return shrink_with(p, 16, block_c=16, block_k=128 if tiles <= 8 else 64, num_warps=2, split=True, num_stages=6)
        block_c, least = min(columns, 64), 32 if 16 < tiles and columns <= 64 else 16
        while block_c > least and tiles * chunks * columns // block_c < 2 * p.sms:
            block_c //= 2
        stages = 5 if columns <= 32 and p.in_features <= 1024 else 4 if block_c <= 32 else 3
        return shrink_with(p, 16, block_c=block_c, split=True, num_stages=stages)
    block_m = 64 if rows >= 48 or (rows >= 32 and columns == 64) else 32 if rows >= 32 else 16
    block_c = min(columns, 128)
    if block_c >= 128:
        if width <= 64:  # H200, qwen3-30b gate_up r 64 S4 T = 4096 (64 rows): expert_linear 768 µs, by 8 warps 803; dsv3 (32 rows): 6632, 6827
            warps = 8 if block_m == 64 and p.arch != "sm_90" else 4  # 64 × 128 by 4 warps spill elsewhere
            return shrink_with(p, block_m, block_c=block_c, block_k=64, num_warps=warps, num_stages=4 if block_m == 32 else 3)
        return shrink_with(p, block_m, block_c=block_c, block_k=64, num_warps=8 if block_m > 16 else 4, num_stages=3)
    if rows >= 128 and block_c == 32 == width:  # H200, qwen3-30b r 32 T = 4096: for B of down 62 µs, not 89, for B of gate_up 54, not 66
        return shrink_with(p, 128, block_c=block_c, block_k=64, num_stages=4)
    if block_m == 64 and rows >= 48:
        return shrink_with(p, block_m, block_c=block_c, block_k=64, num_stages=5)
    stages = 4 if block_c <= 32 else 3
    if block_m == 16 and block_c == 64 and tiles <= 2.5 * p.sms:  # with one more, two programs fit a multiprocessor, not three
        stages = 4 if needs_plan(p.routes) else 5
    return shrink_with(p, block_m, block_c=block_c, block_k=128, num_stages=stages)


def expand_with(p: ExpertProblem, block_m: int = 16, **changes) -> ExpertExpandConfig:
    mode, tiles, rows, block_m = _tiles(p, block_m)
    width = rank_block(p.rank, p.itemsize)
    chosen = dict(
        mode=mode,
        tiles=tiles,
        plan_rows=rows,
        block_m=block_m,
        block_n=128,
        loop=1,
        rank_block=width,
        precision=precision(p.itemsize),
        num_warps=4,
        num_stages=2,
        pdl=has_pdl(p.arch),
    )
    chosen.update(changes)
    if p.itemsize == 4:
        chosen["block_n"] = min(chosen["block_n"], 64)
        chosen["num_stages"] = min(chosen["num_stages"], 2)
    if p.rank > width:
        chosen["loop"] = 1
    shares = 0
    if mode == PLAN and chosen["loop"] > 1:
        blocks = max(1, p.groups * cdiv(p.out_features, chosen["block_n"] * chosen["loop"]))
        shares = min(tiles, SHARE_PROGRAMS * p.sms // blocks)
    return ExpertExpandConfig(shares=shares, **chosen)


def expand(p: ExpertProblem) -> ExpertExpandConfig:
    """A block of N a program while they are few, then several behind one load of h. By what was fastest on an H200, as `shrink`."""
    width, rows = rank_block(p.rank, p.itemsize), rows_each(p)
    narrow_b = width <= 64
    block_n = 128 if narrow_b else 64
    if rows >= 32:
        if narrow_b:
            if p.out_features > 4096 and width <= 32:  # dsv3 down: T = 1024 127 µs, by 64 columns 131, T = 4096 343, 362
                return expand_with(p, 32, block_n=128, loop=16, num_stages=4)
            return expand_with(p, 32 if 48 <= rows < 96 else 64, block_n=64, loop=16, num_stages=4)
        return expand_with(p, 32, block_n=block_n, loop=4, num_stages=3)
    a_multiprocessor = estimated_tiles(p, 16) * p.groups * cdiv(p.out_features, block_n) / p.sms  # programs without a loop
    if a_multiprocessor <= 8:
        return expand_with(p, 16, block_n=block_n, num_stages=3)
    if narrow_b and p.itemsize == 2:
        two_warps = dict(num_warps=2, num_stages=2)
        if not needs_plan(p.routes):
            if p.routes <= 64 or a_multiprocessor <= 12:
                return expand_with(p, 16, block_n=128, loop=2, **two_warps)
        elif a_multiprocessor <= 16:
            if width <= 32 and (rows < 12 or p.groups == 2):
                return expand_with(p, 16, block_n=64, loop=4, **two_warps)
        elif p.out_features > 4096:
            return expand_with(p, 16, block_n=64, loop=8, num_warps=2, num_stages=3)
        elif width == 32 and 2 <= rows < 12 and p.slots > 1:  # with one slot experts that many tokens choose cost more than that gains
            return expand_with(p, 16, block_n=128, loop=8, **two_warps)
    return expand_with(p, 16, block_n=block_n, loop=8 if a_multiprocessor > 16 else 4, num_stages=3)


def fused_with(p: ExpertProblem, block_m: int, **changes) -> ExpertFusedConfig:
    mode, tiles, rows, block_m = _tiles(p, block_m)
    chosen = dict(
        mode=mode,
        tiles=tiles,
        plan_rows=rows,
        block_m=block_m,
        block_n=64,
        block_k=64 if p.itemsize == 2 else 32,
        rank_block=rank_block(p.rank, p.itemsize),
        chunk=chunk_of(p.in_features),
        chunks=chunks_of(p.in_features),
        precision=precision(p.itemsize),
        num_warps=4,
        num_stages=3,
        n_stages=3,
        apart=False,
        pdl=False,
        ahead=0,
    )
    chosen.update(changes)
    return ExpertFusedConfig(**chosen)


# Tiles of the one-launch kernel: (block_m, block_n, block_k, num_warps, num_stages, n_stages).
LOW, LOW_DEEP, LOW_SHORT = (16, 128, 128, 4, 4, 3), (16, 128, 64, 4, 6, 4), (16, 128, 128, 4, 3, 3)
MIDDLE, TALL, TALL_DEEP, TALL_LONG = (32, 128, 64, 4, 4, 3), (64, 64, 64, 4, 4, 4), (64, 64, 64, 4, 5, 4), (64, 64, 128, 4, 3, 4)


def _one_launch(p: ExpertProblem, tiles: tuple, apart: bool = False, ahead: int = 0) -> ExpertFusedConfig | None:
    """None where programs are too few: below 0.6 a multiprocessor, or below that for every 4096 columns of a program's loop over N.

    Both are on the safe side of what was measured (0.75 a multiprocessor, qwen3-30b down at T = 24; 1.7 and 1.9 for dsv3 down's
    7168 columns: 9 % more and 7 % less than two launches).
    """
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "n_stages")
    config = fused_with(p, **dict(zip(names, tiles)), apart=apart, pdl=has_pdl(p.arch), ahead=ahead if has_pdl(p.arch) else 0)
    programs = estimated_tiles(p, config.block_m) * (p.groups if apart else 1)
    loop = p.out_features * (1 if apart else p.groups)
    return config if programs >= 0.6 * p.sms * max(1, loop / 4096) else None


def _fused(p: ExpertProblem) -> ExpertFusedConfig | None:
    """One launch behind a plan, where it was the faster way on an H200 in bf16 (bench/NOTES.md: qwen3-30b and dsv3, ranks 16 to 64,
    1 to 8 adapters, T = 24 to 4096): x and A come while other programs write y, and h never leaves the registers.

    apart: twice the programs, each with half of A's columns; x is read by both.
    """
    width = rank_block(p.rank, p.itemsize)
    if p.itemsize != 2 or p.rank > width or width > 64 or not needs_plan(p.routes):
        return None
    rows, tiles, split = rows_each(p), estimated_tiles(p, 16), p.a_groups == 2 and p.groups == 2
    if p.in_features > 4096 and rows < 48:  # evenly spread up to 8 % faster in one, all on two experts up to 1.5 times slower: no D is split
        return None
    wide = width * p.a_groups > 64  # only apart then: too many columns of h for one program
    if plan_rows(p.routes, p.experts, p.slots) == 16:
        if split:
            if (wide and tiles > 2.6 * p.sms) or (width <= 16 and (rows >= 12 or tiles > 16 * p.sms)):
                return None
            apart = wide or width <= 16 or tiles < 1.8 * p.sms or rows >= 12
            return _one_launch(p, LOW if apart else LOW_SHORT, apart, 1024)
        if width == 64 or tiles >= (1.2 if p.out_features <= 4096 else 1.9) * p.sms:
            return _one_launch(p, LOW_SHORT if width >= 32 and tiles >= 2.4 * p.sms else LOW_DEEP, False, 1024)
        return None
    few = estimated_tiles(p, 64) < p.sms
    if split:
        apart = wide or few or (width <= 16 and rows < 48)
        return _one_launch(p, TALL_DEEP if apart or rows < 48 else TALL, apart)
    if p.out_features > 4096:  # two launches, dsv3 down: T = 1024 127 µs, by one 133, T = 4096 343, 372
        return None
    if width == 64:
        return _one_launch(p, TALL if rows >= 48 else LOW_DEEP if few else TALL_DEEP)
    if rows >= 48:
        return _one_launch(p, TALL_LONG if width == 32 and few else MIDDLE)
    return None if few else _one_launch(p, TALL if width == 32 else MIDDLE)


def delta(p: ExpertProblem) -> ExpertDeltaConfig:
    one = _fused(p)
    if one is not None:
        return ExpertDeltaConfig(one, None, None)
    first = shrink(p)
    if needs_plan(p.routes) and first.pdl:  # H200: 0.3 to 0.5 µs less, and up to 1.5 by calling A's rows while the plan is made
        first = replace(first, early=True, ahead=0 if first.split else 512)
    return ExpertDeltaConfig(None, first, expand(p))


def linear_with(p: ExpertProblem, block_m: int = 16, mixed: bool = False, **changes) -> ExpertLinearConfig:
    """mixed: tiles of an expert's routes whatever their slots, of any height; else the plan's."""
    if mixed and needs_plan(p.routes):
        mode, rows = EXPERT, 16
    else:
        mode, _, rows, block_m = _tiles(p, block_m)
    chosen = dict(
        mode=mode,
        plan_rows=rows,
        block_m=block_m,
        block_n=64,
        block_k=128,
        rank_block=rank_block(max(p.rank, 1), p.itemsize),
        n_first=True,
        block_e=max(16, power_of_2(p.experts + 1)) if mode == EXPERT else 16,
        slot_stages=2 if p.itemsize == 2 and p.rank <= 64 else 1,  # one more spills
        prefetch=mode == EXPERT and 0 < p.rank * p.itemsize <= 128 and (p.itemsize == 2 or block_m <= 32),
        precision=precision(p.itemsize),
        num_warps=4,
        num_stages=4,
        pdl=has_pdl(p.arch),
    )
    chosen.update(changes)
    if p.itemsize == 4:
        chosen.update(block_n=min(chosen["block_n"], 64), block_k=32, num_stages=min(chosen["num_stages"], 3))
        chosen["block_m"] = min(block_m, 64)
    if mode == EXPERT:
        tiles = p.experts + cdiv(p.routes, chosen["block_m"])
    else:
        tiles = _tiles(p, chosen["block_m"])[1]
    if narrow(p.arch):
        chosen["block_n"] = min(chosen["block_n"], 128)
        chosen["num_stages"] = min(chosen["num_stages"], 3)
    return ExpertLinearConfig(tiles=tiles, **chosen)


# From so many routes of an expert on csrc/linear.cu is the faster one: its tiles are 128 high, whatever adapters meet in them. H200,
# expert_mlp against Triton's kernels, qwen3-30b (128 experts, top-8) and dsv3 (256):
#   3 routes, 4 adapters of rank 16 341 µs, not 362; 16 routes, 4 adapters 391, not 447, 16 adapters 478, not 593, one adapter 351 and 352;
#   dsv3, one adapter, 16 routes 5318, not 6541, 4 routes 5152, not 5106; 2 routes, 4 adapters 4537, not 4466.
# gate_up leaves its activation to a kernel of its own then (256 routes, one adapter: 770 µs, not 852, for 100 MiB of h1).
CUDA_ROUTES = 3


def takes_cuda(p: ExpertProblem) -> bool:
    """Whether csrc/linear.cu may take the product; bf16 and the layouts are for the call to see."""
    if p.arch != "sm_90" or p.itemsize != 2 or not needs_plan(p.routes) or rows_of_expert(p) < CUDA_ROUTES:
        return False
    tiles = max(cdiv(p.routes, 128), min(p.routes, p.experts))  # an expert's last tile may have few rows
    return tiles * p.groups * cdiv(p.out_features, 256) >= 0.7 * p.sms


# From so many routes of a pair on its own tiles are the faster ones, whatever `linear_cost` says: H200, qwen3-30b with 4 adapters,
# T = 4096 (64 routes): expert_mlp 1418 µs, not 1601; dsv3 (32 routes): 13,753 µs, not 17,504.
LONG_RUNS = 48


def rows_of_expert(p: ExpertProblem) -> float:
    """Routes of an expert that occurs, for evenly spread ids, whatever their slots."""
    return p.routes / max(1, min(p.routes, p.experts))


def linear_cost(p: ExpertProblem, c: ExpertLinearConfig, columns: int) -> float:
    """What a configuration's tiles of one expert cost, in products of a row with a column of W; evenly spread ids.

    A tile multiplies its rows, filled or not, by W and by B of each adapter in it, for h's high and low halves. Reading its
    blocks of W and x (once for `columns` columns) takes as long as the products of `read` rows: the L2 gives 5.5 TB/s, the
    matrix units 550 TFLOP/s. The plan's tiles have one slot each; an expert's have the slots that follow one another in it.
    """
    rows, height = rows_of_expert(p), c.block_m
    slots = p.slots * (1 - (1 - 1 / p.slots) ** rows)
    if c.mode == EXPERT:
        runs, length, adapters = 1.0, rows, min(slots, 1 + (slots - 1) * height / rows)
    else:
        runs, length, adapters = slots, rows / slots, 1.0
    tiles = runs * max(1.0, length / height + 0.5)
    read = 100 if p.itemsize == 2 else 25
    return tiles * (p.in_features * (height + read * (1 + height / columns)) + 2 * p.rank * adapters * height)


def linear(p: ExpertProblem, transposed: bool = False) -> ExpertLinearConfig:
    """A stream of W with many loads in flight while a tile has few routes; tiles for the matrix units from 16 on.

    Where an expert's routes have several adapters its tiles may be cut without regard to them, so that W is read once for
    all. transposed: W's rows run along y, as in the gradient of x: blocks of 256 spill there.
    """
    chosen = _linear(p, rows_each(p), transposed, False)
    if p.mixed and needs_plan(p.routes) and rows_each(p) < LONG_RUNS:
        mixed = _linear(p, rows_of_expert(p), transposed, True)
        chosen = min(mixed, chosen, key=lambda c: linear_cost(p, c, c.block_n))
    return replace(chosen, cuda=True) if takes_cuda(p) else chosen


def _linear(p: ExpertProblem, rows: float, transposed: bool, mixed: bool) -> ExpertLinearConfig:
    """By the routes that a tile could have. Adapters that meet in a tile cost a second accumulator, and time behind the base
    that another block on the multiprocessor hides: 64 rows by 4 warps. (8 warps have another layout for h Bᵀ there than for
    the base, so that Triton moves the sums through shared memory.)
    """
    two, wide = mixed and p.rank > 0, p.rank <= 64 and not transposed
    if rows < 16:
        return linear_with(p, 16, mixed, block_n=64, block_k=128, num_stages=5)
    if two and p.itemsize == 4:
        return linear_with(p, 64, mixed, block_n=32, num_warps=8)
    if rows < 96 or two:
        warps = 8 if (p.rank > 64 if two else transposed) else 4
        more = dict(slot_stages=1) if transposed else {}
        return linear_with(p, 64, mixed, block_n=128, block_k=64, num_warps=warps, num_stages=4, **more)
    height = 128 if rows >= 256 and p.rank <= 64 else 64
    return linear_with(p, height, mixed, block_n=256 if wide else 128, block_k=64, num_warps=8, num_stages=3)


def gate_up(p: ExpertProblem) -> ExpertLinearConfig:
    """As `linear`, half as wide: a program holds gate and up."""
    pairs = _gate_up(p, rows_each(p), False)
    if not p.mixed or not needs_plan(p.routes) or rows_each(p) >= LONG_RUNS:
        return pairs
    mixed = _gate_up(p, rows_of_expert(p), True)
    return min(mixed, pairs, key=lambda c: linear_cost(p, c, c.block_n * p.groups))


def _gate_up(p: ExpertProblem, rows: float, mixed: bool) -> ExpertLinearConfig:
    """4 warps spill past rank 64."""
    two = mixed and p.rank > 0
    if rows < 16:
        return linear_with(p, 16, mixed, block_n=32, block_k=128, num_stages=5)
    if two and p.itemsize == 4:
        return linear_with(p, 64, mixed, block_n=32, num_warps=8)
    if rows < 96 or p.rank > 64 or narrow(p.arch) or two:
        return linear_with(p, 64, mixed, block_n=64, block_k=64, num_warps=8 if p.rank > 64 else 4, num_stages=4)
    return linear_with(p, 128 if rows >= 256 else 64, mixed, block_n=128, block_k=64, num_warps=8, num_stages=3)


def wgrad_takes_halves(arch: str) -> bool:
    """Whether dA and dB have their narrow operand in two bf16: where the matrix unit reads both from shared memory. Elsewhere Triton
    keeps no more than one step of such a loop on its way."""
    return arch.startswith(("sm_90", "sm_10"))


def wgrad(p: ExpertProblem, halves: bool = False, shared: bool = False) -> ExpertWgradConfig:
    """A program takes up to 1024 routes of a pair: enough of them for long pairs, few parts to sum; and several blocks of W,
    where there are enough programs: to find its routes costs as much as 32 of them.

    halves: narrow lies there as two bf16. shared: its groups meet the same columns of wide. H200, qwen3-30b T = 4096, of 13 ways each:
    128 columns and 32 routes a step were the fastest for r 16 and 32, one adapter and four (gate_up's A 67 and 94 µs, not 148 and 182).
    """
    half = p.itemsize == 2
    run = max(1, 1024 // plan_rows(p.routes, p.experts, p.slots))
    block_r = min(64, rank_block(p.rank, 2)) if half else min(32, rank_block(p.rank, 4))
    block_w = 128 if half else 64
    programs = min(p.routes, p.experts * max(p.slots, 1)) * p.groups * cdiv(p.rank, block_r) * cdiv(p.in_features, block_w)
    if halves:
        return ExpertWgradConfig(
            block_t=32, block_w=block_w, block_r=block_r, run=run, loop=1, precision="tf32", num_warps=4, num_stages=4,
            merged=p.groups if shared and p.groups * block_r <= 64 else 1,
        )  # fmt: skip
    return ExpertWgradConfig(
        block_t=16 if block_r <= 32 or not half else 32,  # r 32, T = 4096: 15 to 40 % less time than 32 routes a step
        block_w=block_w,
        block_r=block_r,
        loop=max(1, min(8, programs // (12 * p.sms))),
        run=run,
        precision=precision(p.itemsize),
        num_warps=8 if block_r == 64 else 4,
        num_stages=4 if block_r <= 32 and half else 3,
    )
