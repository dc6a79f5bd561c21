"""out[l, e, g] = s_l Σ_m w_m narrow[m, g]ᵀ wide[m, g] over the routes of every (expert, slot) pair.

A program takes a run of the plan's tiles: those of one pair, up to RUN of them, or those of a longer pair inside a window of RUN tiles.
A pair of one run is written at once; of a longer one every window's sum goes to a part, and the parts are added in order.

Two kernels: one for any narrow, whose float32 is split into two of wide's dtype on the way, and one for a narrow that lies there as two
bf16 (kernels/halves.py), which like wide goes from memory straight to where the matrix unit reads it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertWgradConfig, cdiv
from .shrink import strides
from .tile import INTERPRETED, dot, dot_split, launch, round_to, split, unit_axis, vector_width


@triton.jit
def pair_at(head, tile, count):
    """The pair of a tile, −1 where there is none."""
    return tl.load(head + 1 + tile, mask=(tile >= 0) & (tile < count), other=-1)


@triton.jit
def tiles_around(head, tile, count, pair, RUN: tl.constexpr):
    """(places, whether the tile there is the pair's) of the RUN tiles before this one and the RUN from it on. More than RUN are the
    pair's where it is longer than a run, if it begins before `tile`."""
    places = tile - RUN + tl.arange(0, 2 * RUN)
    return places, pair_at(head, places, count) == pair


@triton.jit
def run_of_tile(plan, M, E, L, TILES, tile, most, ANY_SLOT: tl.constexpr, RUN: tl.constexpr):
    """(pair, first, last, part, alone) of the run that begins with this tile of the plan: its places, its part, and whether it is all of
    its pair. pair −1: no run with an adapter begins here. most: tiles that any ids can make, whatever the plan says; TILES: its room."""
    head = plan + M + E
    count = tl.minimum(tl.load(head), most)
    pair = pair_at(head, tile, count)
    new = pair_at(head, tile - 1, count) != pair
    places, its = tiles_around(head, tile, count, pair, RUN)
    alone = (tl.sum(its.to(tl.int32), 0) <= RUN) & (pair_at(head, tile + RUN, count) != pair)
    window = tile // RUN
    begins = (pair >= 0) & (pair < E * (L + 1)) & (new | ((tile % RUN == 0) & (alone == 0)))
    if not ANY_SLOT:
        begins = begins & (pair % (L + 1) != L)
    size = tl.sum((its & (places >= tile) & (alone | (places < (window + 1) * RUN))).to(tl.int32), 0)
    first = tl.load(head + 1 + TILES + tile, mask=begins, other=0)
    last = tl.load(head + 1 + TILES + tile + size, mask=begins, other=0)
    part = 2 * window + new.to(tl.int32)  # in a window one pair at most comes from the last, and one goes on into the next
    return tl.where(begins, pair, -1), tl.minimum(tl.maximum(first, 0), M), tl.minimum(last, M), part, alone


@triton.jit
def store_pair(
    acc, out, scalings, pair, E, L, r, w, R, W, group, o_l, o_e, o_g, o_r, o_w,
    ANY_SLOT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
):  # fmt: skip
    """Write a pair's sum, times its scaling. out's axes (l, e, g, r, w); its unit axis: 4, 3 or −1."""
    if O_UNIT == 4:
        o_w = 1
        o_r = o_r * O_VEC
    elif O_UNIT == 3:
        o_r = 1
        o_w = o_w * O_VEC
        R = R // O_VEC * O_VEC  # as it is; whole vectors for the compiler
    expert = pair // (L + 1)
    slot = pair % (L + 1)
    if scalings is not None:
        acc = acc * tl.load(scalings + slot)
    start = expert.to(tl.int64) * (o_e * O_VEC) + group * (o_g * O_VEC)
    if not ANY_SLOT:
        start += slot.to(tl.int64) * (o_l * O_VEC)
    ptrs = out + start + r[:, None] * o_r + w[None, :] * o_w
    tl.store(ptrs, round_to(acc, out.dtype.element_ty), mask=(r < R)[:, None] & (w < W)[None, :])


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "W", "R", "n_m", "n_g", "n_r", "w_m", "w_g", "w_w", "v_m",
                               "o_l", "o_e", "o_g", "o_r", "o_w"),
            do_not_specialize_on_alignment=("plan", "ranks", "scalings", "weights"))  # fmt: skip
def expert_wgrad_kernel(
    narrow, wide, out, parts, plan, ranks, scalings, weights,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", W: "i32", R: "i32",
    n_m: "i64", n_g: "i64", n_r: "i64", w_m: "i64", w_g: "i64", w_w: "i64", v_m: "i64",
    o_l: "i64", o_e: "i64", o_g: "i64", o_r: "i64", o_w: "i64",
    GROUPS: tl.constexpr, RUN: tl.constexpr, ANY_SLOT: tl.constexpr, EXACT: tl.constexpr, N_PER_TOKEN: tl.constexpr,
    W_PER_TOKEN: tl.constexpr, LOOP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    W_VEC: tl.constexpr, W_UNIT: tl.constexpr, N_VEC: tl.constexpr, N_UNIT: tl.constexpr, O_VEC: tl.constexpr,
    O_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """narrow's axes (m, g, r), wide's (m, g, w); grid (tiles · runs of LOOP blocks of W, r blocks · groups). Route m reads rows m,
    or m // K of what has one for each token.

    ANY_SLOT: a pair is an expert (L = 0). EXACT: narrow already has wide's dtype.
    """
    w_blocks = tl.cdiv(W * W_VEC, BLOCK_W)
    turns = tl.cdiv(w_blocks, LOOP)
    tile = tl.program_id(0) // turns
    w_first = (tl.program_id(0) % turns) * LOOP
    w_last = tl.minimum(w_first + LOOP, w_blocks)
    group = tl.program_id(1) % GROUPS
    r = (tl.program_id(1) // GROUPS) * BLOCK_R + tl.arange(0, BLOCK_R)
    pair, first, last, part, alone = run_of_tile(plan, M, E, L, TILES, tile, tl.num_programs(0) // turns, ANY_SLOT, RUN)
    if pair < 0:
        return
    slot = pair % (L + 1)
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    if W_UNIT == 2:
        w_w = 1
    if N_UNIT == 2:
        n_r = 1
        rank = tl.minimum((rank + N_VEC - 1) // N_VEC * N_VEC, R // N_VEC * N_VEC)  # whole vectors: zeros past the rank
    DTYPE: tl.constexpr = wide.dtype.element_ty
    for w_block in tl.range(w_first, w_last, num_stages=1, disable_licm=True):
        w = w_block * BLOCK_W + tl.arange(0, BLOCK_W)
        w_in = w < W * W_VEC
        acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
        for p0 in range(first, last, BLOCK_T):
            position = p0 + tl.arange(0, BLOCK_T)
            live = position < last
            rows = tl.load(plan + position, mask=live, other=0)
            live = live & (rows >= 0) & (rows < M)
            n_rows = rows  # a division of 64-bit numbers would take more instructions than all else here
            w_rows = rows
            if N_PER_TOKEN:
                n_rows = rows // K
            if W_PER_TOKEN:
                w_rows = rows // K
            n_tile = tl.load(
                narrow + group * (n_g * N_VEC) + n_rows.to(tl.int64)[None, :] * (n_m * N_VEC) + r[:, None] * n_r,
                mask=(r < rank)[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            w_tile = tl.load(
                wide + group * (w_g * W_VEC) + w_rows.to(tl.int64)[:, None] * (w_m * W_VEC) + w[None, :] * w_w,
                mask=live[:, None] & w_in[None, :], other=0.0,
            )  # fmt: skip
            if EXACT:
                acc = dot(n_tile, w_tile, acc, PRECISION)
            else:
                n_tile = n_tile.to(tl.float32)
                if weights is not None:
                    n_tile *= tl.load(weights + rows.to(tl.int64) * v_m, mask=live, other=0.0).to(tl.float32)[None, :]
                high, low, scale = split(n_tile, DTYPE)
                acc = dot_split(high, low, scale, w_tile, acc, PRECISION)
        if alone:
            store_pair(
                acc, out, scalings, pair, E, L, r, w, R, W * W_VEC, group, o_l, o_e, o_g, o_r, o_w, ANY_SLOT, O_VEC, O_UNIT
            )
        else:
            p_ptrs = parts + ((part * GROUPS + group).to(tl.int64) * R + r[:, None]) * (W * W_VEC) + w[None, :]
            tl.store(p_ptrs, acc, mask=(r < R)[:, None] & w_in[None, :])


@triton.jit(do_not_specialize=("M", "E", "L", "TILES", "W", "R_8", "n_m", "n_g", "w_m", "w_g", "o_l", "o_e", "o_g", "o_r", "o_w"),
            do_not_specialize_on_alignment=("plan", "scalings"))  # fmt: skip
def expert_wgrad_halves_kernel(
    narrow, wide, out, parts, plan, scalings,
    M: "i32", E: "i32", L: "i32", TILES: "i32", W: "i32", R_8: "i32", n_m: "i64", n_g: "i64", w_m: "i64", w_g: "i64",
    o_l: "i64", o_e: "i64", o_g: "i64", o_r: "i64", o_w: "i64",
    GROUPS: tl.constexpr, MERGED: tl.constexpr, RUN: tl.constexpr, W_DIV: tl.constexpr, LOOP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, W_VEC: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
):  # fmt: skip
    """narrow's axes (m, g, half, r), dense, of two bf16 that are summed; wide's (m, g, w), w dense; grid (tiles · runs of LOOP blocks of W,
    r blocks · GROUPS / MERGED). Route m reads row m // W_DIV of wide. MERGED: so many groups of narrow meet the same columns of wide, so
    that a program reads those once for all. n_m and n_g count in 8 elements.

    The sum is the transpose, [w, r]: wide is what the matrix unit takes 64 columns of at once.
    """
    R = R_8 * 8
    w_blocks = tl.cdiv(W * W_VEC, BLOCK_W)
    turns = tl.cdiv(w_blocks, LOOP)
    tile = tl.program_id(0) // turns
    w_first = (tl.program_id(0) % turns) * LOOP
    w_last = tl.minimum(w_first + LOOP, w_blocks)
    pair, first, last, part, alone = run_of_tile(plan, M, E, L, TILES, tile, tl.num_programs(0) // turns, False, RUN)
    if pair < 0:
        return
    SETS: tl.constexpr = GROUPS // MERGED
    c = tl.arange(0, MERGED * BLOCK_R)
    r = (tl.program_id(1) // SETS) * BLOCK_R + c % BLOCK_R
    w_group = tl.program_id(1) % SETS
    group = w_group * MERGED + c // BLOCK_R
    columns = narrow + (group * (n_g * 8) + r)[None, :]
    for w_block in tl.range(w_first, w_last, num_stages=1, disable_licm=True):
        w = w_block * BLOCK_W + tl.arange(0, BLOCK_W)
        acc = tl.zeros((BLOCK_W, MERGED * BLOCK_R), tl.float32)
        for p0 in range(first, last, BLOCK_T):
            position = p0 + tl.arange(0, BLOCK_T)
            live = position < last
            rows = tl.load(plan + position, mask=live, other=0)
            live = live & (rows >= 0) & (rows < M)
            ptrs = columns + rows.to(tl.int64)[:, None] * (n_m * 8)
            w_ptrs = wide + w_group * (w_g * W_VEC) + (rows // W_DIV).to(tl.int64)[:, None] * (w_m * W_VEC) + w[None, :]
            there = live[:, None] & (r < R)[None, :]
            w_tile = tl.trans(tl.load(w_ptrs, mask=live[:, None] & (w < W * W_VEC)[None, :], other=0.0))
            acc = dot(w_tile, tl.load(ptrs, mask=there, other=0.0), acc, "tf32")
            acc = dot(w_tile, tl.load(ptrs + R, mask=there, other=0.0), acc, "tf32")
        sums = tl.trans(acc)
        if alone:
            store_pair(
                sums, out, scalings, pair, E, L, r, w, R, W * W_VEC, group[:, None], o_l, o_e, o_g, o_r, o_w, False, O_VEC, O_UNIT
            )
        else:
            p_ptrs = parts + ((part * GROUPS + group[:, None]).to(tl.int64) * R + r[:, None]) * (W * W_VEC) + w[None, :]
            tl.store(p_ptrs, sums, mask=(r < R)[:, None] & (w < W * W_VEC)[None, :])


@triton.jit(do_not_specialize=("M", "E", "L", "TILES", "W", "R", "o_l", "o_e", "o_g", "o_r", "o_w"),
            do_not_specialize_on_alignment=("plan", "scalings"))  # fmt: skip
def expert_wgrad_sum_kernel(
    parts, out, plan, scalings,
    M: "i32", E: "i32", L: "i32", TILES: "i32", W: "i32", R: "i32",
    o_l: "i64", o_e: "i64", o_g: "i64", o_r: "i64", o_w: "i64",
    GROUPS: tl.constexpr, RUN: tl.constexpr, ANY_SLOT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
):  # fmt: skip
    """A pair of more than one run that goes on from the window where it begins: its parts, in order. Grid (W blocks, r blocks · groups, windows)."""
    window = tl.program_id(2)
    group = tl.program_id(1) % GROUPS
    r = (tl.program_id(1) // GROUPS) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    head = plan + M + E
    count = tl.minimum(tl.load(head), tl.num_programs(2) * RUN)  # of so many windows parts have room
    pair = pair_at(head, (window + 1) * RUN, count)
    if (pair < 0) | (pair >= E * (L + 1)):
        return
    if not ANY_SLOT:
        if pair % (L + 1) == L:
            return
    begins = (pair_at(head, window * RUN, count) != pair) | (pair_at(head, window * RUN - 1, count) != pair)
    if (pair_at(head, (window + 1) * RUN - 1, count) != pair) | (not begins):
        return
    _, its = tiles_around(head, (window + 1) * RUN, count, pair, RUN)
    if tl.sum(its.to(tl.int32), 0) <= RUN:
        return
    inside = (r < R)[:, None] & (w < W)[None, :]
    columns = r[:, None] * W + w[None, :]
    size = R.to(tl.int64) * W
    acc = tl.load(parts + ((2 * window + 1) * GROUPS + group) * size + columns, mask=inside, other=0.0)
    window += 1
    while pair_at(head, window * RUN, count) == pair:
        acc += tl.load(parts + (2 * window * GROUPS + group) * size + columns, mask=inside, other=0.0)
        window += 1
    store_pair(acc, out, scalings, pair, E, L, r, w, R, W, group, o_l, o_e, o_g, o_r, o_w, ANY_SLOT, O_VEC, O_UNIT)


@triton.jit
def clear(out, at, SIZE, BLOCK: tl.constexpr):
    """Zeros into out's row `at` of SIZE: this program's share."""
    for first in range(tl.program_id(1) * BLOCK, SIZE, tl.num_programs(1) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(out + at.to(tl.int64) * SIZE + i, tl.zeros((BLOCK,), out.dtype.element_ty), mask=i < SIZE)


@triton.jit(do_not_specialize=("M", "E", "L", "TILES", "SIZE", "MORE"), do_not_specialize_on_alignment=("plan",))
def absent_kernel(
    out, more, plan, M: "i32", E: "i32", L: "i32", TILES: "i32", SIZE: "i32", MORE: "i32", VEC: tl.constexpr, MORE_VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out's axes (l, e, SIZE vectors) and more's, dense: zeros for a pair that no tile of the plan has. Grid (L · E, shares of a pair)."""
    at = tl.program_id(0)
    pair = at % E * (L + 1) + at // E
    head = plan + M + E
    low = 0
    high = tl.minimum(tl.load(head), TILES)
    count = high
    while low < high:  # tiles lie in the order of their pairs
        middle = (low + high) // 2
        if tl.load(head + 1 + middle) < pair:
            low = middle + 1
        else:
            high = middle
    if pair_at(head, low, count) != pair:
        clear(out, at, SIZE * VEC, BLOCK)
        if more is not None:
            clear(more, at, MORE * MORE_VEC, BLOCK)


def clear_absent(name: str, outs: list[Tensor], routes: int, plan: Tensor, room: int) -> None:
    """Write zeros into one or two [L, E, …], dense, for the pairs without routes, which no other kernel here writes."""
    slots, experts = outs[0].shape[:2]
    sizes = [t[0, 0].numel() for t in outs]
    vecs = [
        16 // t.element_size() if t.data_ptr() % 16 == 0 and size * t.element_size() % 16 == 0 else 1 for t, size in zip(outs, sizes)
    ]
    more, more_size, more_vec = (outs[1], sizes[1], vecs[1]) if len(outs) > 1 else (None, 0, 1)
    block = 128 if INTERPRETED else 4096
    launch(
        name, absent_kernel, (slots * experts, min(4, cdiv(max(sizes), block)), 1),
        (outs[0], more, plan, routes, experts, slots, room, sizes[0] // vecs[0], more_size // more_vec),
        (vecs[0], more_vec, block), 4, 1,
    )  # fmt: skip


def wgrad(
    name: str,
    narrow: Tensor,  # [M or T, G or 1, r]; or [M, G or 1, 2, r] in two bf16, dense, zeros past a rank (as `takes_halves` says)
    wide: Tensor,  # [M or T, G or 1, W]
    out: Tensor,  # [L, E, G, r, W], any strides; [1, E, G, r, W] with L = 0
    parts: Tensor | None,  # scratch, [2 · windows, G, r, W] float32; None where no pair can have more than one run
    ids: Tensor,  # [T, K]
    plan: Tensor,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,  # [M], multiplies narrow
    slots: int,
    tiles: int,
    room: int,
    config: ExpertWgradConfig,
) -> None:
    """Write the pairs that have routes; the others stay as they are (zeros, or `clear_absent`)."""
    if narrow.dim() == 4:
        return wgrad_of_halves(name, narrow, wide, out, parts, ids, plan, scalings, slots, tiles, room, config)
    routes, top_k = ids.shape[0] * ids.shape[1], ids.shape[1]
    _, experts, groups, rank, width = out.shape
    w_unit = unit_axis(wide, 2)
    vec = vector_width(wide, w_unit, width)
    ws = strides(wide, w_unit, vec)
    n_unit = unit_axis(narrow, 2)
    n_vec = vector_width(narrow, n_unit, rank)
    ns = strides(narrow, n_unit, n_vec)
    o_unit = unit_axis(out, 4, 3)
    o_vec = vector_width(out, o_unit, width if o_unit == 4 else rank)
    os_ = strides(out, o_unit, o_vec)
    grid = cdiv(width, config.block_w), cdiv(rank, config.block_r) * groups
    launch(
        name,
        expert_wgrad_kernel,
        (tiles * cdiv(grid[0], config.loop), grid[1], 1),
        (
            narrow, wide, out, out if parts is None else parts, plan, ranks, scalings, weights,
            routes, top_k, experts, slots, room, width // vec, rank,
            ns[0], 0 if narrow.shape[1] == 1 else ns[1], ns[2],
            ws[0], 0 if wide.shape[1] == 1 else ws[1], ws[2], 0 if weights is None else weights.stride(0), *os_,
        ),
        (
            groups, config.run, slots == 0, narrow.dtype == wide.dtype and weights is None, narrow.shape[0] != routes,
            wide.shape[0] != routes, config.loop, config.block_t, config.block_w, config.block_r, vec, w_unit, n_vec, n_unit,
            o_vec, o_unit, config.precision,
        ),
        config.num_warps,
        config.num_stages,
    )  # fmt: skip
    if parts is not None:
        sum_parts(name, parts, out, plan, scalings, routes, slots, tiles, room, config.run, config.block_w, os_, o_vec, o_unit)


def takes_halves(wide: Tensor, rank: int) -> bool:
    """Whether a narrow in two bf16 can meet this wide."""
    return wide.dtype == torch.bfloat16 and rank % 8 == 0 and unit_axis(wide, 2) == 2


def wgrad_of_halves(
    name: str, narrow: Tensor, wide: Tensor, out: Tensor, parts: Tensor | None, ids: Tensor, plan: Tensor, scalings: Tensor | None,
    slots: int, tiles: int, room: int, config: ExpertWgradConfig,
) -> None:  # fmt: skip
    """`wgrad` of a narrow [M, G or 1, 2, r] in two bf16."""
    routes = ids.shape[0] * ids.shape[1]
    _, experts, groups, rank, width = out.shape
    vec = vector_width(wide, 2, width)
    ws = strides(wide, 2, vec)
    o_unit = unit_axis(out, 4, 3)
    o_vec = vector_width(out, o_unit, width if o_unit == 4 else rank)
    os_ = strides(out, o_unit, o_vec)
    merged = config.merged
    launch(
        name,
        expert_wgrad_halves_kernel,
        (tiles * cdiv(cdiv(width, config.block_w), config.loop), cdiv(rank, config.block_r) * (groups // merged), 1),
        (
            narrow, wide, out, out if parts is None else parts, plan, scalings, routes, experts, slots, room, width // vec, rank // 8,
            narrow.stride(0) // 8, 0 if narrow.shape[1] == 1 else narrow.stride(1) // 8, ws[0], 0 if wide.shape[1] == 1 else ws[1], *os_,
        ),
        (
            groups, merged, config.run, 1 if wide.shape[0] == routes else ids.shape[1], config.loop, config.block_t, config.block_w,
            config.block_r, vec, o_vec, o_unit,
        ),
        config.num_warps,
        config.num_stages,
    )  # fmt: skip
    if parts is not None:
        sum_parts(name, parts, out, plan, scalings, routes, slots, tiles, room, config.run, config.block_w, os_, o_vec, o_unit)


def sum_parts(
    name: str, parts: Tensor, out: Tensor, plan: Tensor, scalings: Tensor | None, routes: int, slots: int, tiles: int, room: int,
    run: int, block_w: int, out_strides: tuple, o_vec: int, o_unit: int,
) -> None:  # fmt: skip
    """Pairs of more than one run: their parts, in order."""
    _, experts, groups, rank, width = out.shape
    launch(
        name,
        expert_wgrad_sum_kernel,
        (cdiv(width, block_w), cdiv(rank, 16) * groups, cdiv(tiles, run)),
        (parts, out, plan, scalings, routes, experts, slots, room, width, rank, *out_strides),
        (groups, run, slots == 0, block_w, 16, o_vec, o_unit),
        4,
        1,
    )
