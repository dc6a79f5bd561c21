"""y = base + w · scaling · h Bᵀ over routes: a program per (tile of routes, blocks of N, group)."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertExpandConfig, cdiv
from .expand import copy_rows
from .expert_tile import rows_over, shared_tile
from .shrink import strides
from .tile import add_rounded, dot_split, launch, round_to, split, unit_axis, vector_width, whole_blocks


@triton.jit
def join(acc, factor, base_tile, HAS_BASE: tl.constexpr, OUT: tl.constexpr):
    """factor · acc, added to base in float32 and rounded once; where it is zero base keeps its bits (−0.0 too)."""
    if HAS_BASE:
        return add_rounded(acc, factor, base_tile)
    else:
        return round_to(acc * factor, OUT)


@triton.jit
def load_h(
    h, row_offsets, inside, rank, R, h_c, r0,
    CHUNKS: tl.constexpr, H_VEC: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h of a tile's rows, columns r0 …: the sum of its chunks in order, zeros past the rank."""
    r = r0 + tl.arange(0, BLOCK_R)
    ptrs = h + row_offsets[:, None] + r[None, :]
    vectors = tl.minimum((rank + H_VEC - 1) // H_VEC * H_VEC, R // H_VEC * H_VEC)
    mask = inside[:, None] & (r < vectors)[None, :]
    tile = tl.load(ptrs, mask=mask, other=0.0)
    for c in tl.static_range(1, CHUNKS):
        tile += tl.load(ptrs + c * (h_c * H_VEC), mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], tile, 0.0)


@triton.jit
def load_b(b_base, n, n_in, r, b_n, b_r, rank, load_rank, TAIL: tl.constexpr = True):
    """Bᵀ [BLOCK_R, BLOCK_N]: whole vectors along r, zeros past the rank, whatever lies there. TAIL: load_rank may be more than rank.
    n_in None: all columns are there."""
    mask = (r < load_rank)[:, None]
    if n_in is not None:
        mask = mask & n_in[None, :]
    b_tile = tl.load(b_base + n[None, :] * b_n + r[:, None] * b_r, mask=mask, other=0.0)
    if TAIL:
        b_tile = tl.where((r < rank)[:, None], b_tile, 0.0)
    return b_tile


@triton.jit
def blocks_of_n(
    high, low, scale, high2, low2, scale2, b_base, b_next, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, inside,
    rank, load_rank, n_first, n_last, factor, SUM_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, HAS_BASE: tl.constexpr, TAIL: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns n_first … n_last−1 of a tile whose h is split into high and low; of the sum over two groups, b_next apart."""
    r = tl.arange(0, BLOCK_R)
    for n0 in tl.range(n_first, n_last, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        n_in = None
        mask = inside[:, None]
        if not EVEN_N:
            n_in = n < n_last
            mask = mask & n_in[None, :]
        b_tile = load_b(b_base, n, n_in, r, b_n, b_r, rank, load_rank, TAIL)
        base_tile = tl.zeros((BLOCK_M, BLOCK_N), OUT)
        if HAS_BASE:
            base_tile = tl.load(p_base + row_p[:, None] + n[None, :] * p_n, mask=mask, other=0.0)
        acc = dot_split(high, low, scale, b_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        if SUM_GROUPS == 2:
            b_tile = load_b(b_base + b_next, n, n_in, r, b_n, b_r, rank, load_rank, TAIL)
            acc = dot_split(high2, low2, scale2, b_tile, acc, PRECISION)
        y = join(acc, factor, base_tile, HAS_BASE, OUT)
        tl.store(o_base + row_o[:, None] + n[None, :] * o_n, y, mask=mask)


@triton.jit
def n_loop(
    high, low, scale, high2, low2, scale2, b_base, b_next, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, inside,
    rank, load_rank, n_first, n_last, factor, SUM_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, HAS_BASE: tl.constexpr, MAY_TAIL: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`blocks_of_n`; MAY_TAIL: the slot's rank may end inside of a vector, and then its B goes through registers."""
    if MAY_TAIL and load_rank != rank:
        blocks_of_n(
            high, low, scale, high2, low2, scale2, b_base, b_next, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, inside, rank, load_rank,
            n_first, n_last, factor, SUM_GROUPS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, True, EVEN_N, 1, OUT, PRECISION,
        )  # fmt: skip
    else:
        blocks_of_n(
            high, low, scale, high2, low2, scale2, b_base, b_next, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, inside, rank, load_rank,
            n_first, n_last, factor, SUM_GROUPS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, False, EVEN_N, STAGES, OUT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "shares", "N", "R", "h_div", "i_t", "i_k", "s_t", "w_m", "h_c", "h_m", "h_g",
                               "b_l", "b_e", "b_g", "b_n", "b_r", "p_m", "p_g", "p_n", "o_m", "o_g", "o_n"),
            do_not_specialize_on_alignment=("ids", "adapters", "plan", "ranks", "scalings", "weights"))  # fmt: skip
def expert_expand_kernel(
    h, b, base, out, ids, adapters, plan, ranks, scalings, weights,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", shares: "i32", N: "i32", R: "i32", h_div: "i32",
    i_t: "i64", i_k: "i64", s_t: "i64", w_m: "i64", h_c: "i64", h_m: "i64", h_g: "i64",
    b_l: "i64", b_e: "i64", b_g: "i64", b_n: "i64", b_r: "i64",
    p_m: "i64", p_g: "i64", p_n: "i64", o_m: "i64", o_g: "i64", o_n: "i64",
    SUM_GROUPS: tl.constexpr, CHUNKS: tl.constexpr, MODE: tl.constexpr, PLAN_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, BLOCK_R: tl.constexpr, R_BLOCKS: tl.constexpr,
    H_VEC: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
    N_VEC: tl.constexpr, EVEN_N: tl.constexpr, N_STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h's axes (chunk, m, g, r) with unit last stride, b's (l, e, g, n, r), base's and out's (m, g, n); unit axes 4 (r) or 3 (n)
    for b, 2 for base and out, −1 for none.

    Route m reads row m // h_div of h. SUM_GROUPS: y sums over so many groups of h and b. LOOP: blocks of N a program
    takes in turn, with h in registers (then R_BLOCKS = 1 and SUM_GROUPS = 1 or 2), or fewer: `shared_tile`. Routes without an
    adapter get base or zeros.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SPAN: tl.constexpr = BLOCK_N * LOOP
    n_size = N * N_VEC
    n_blocks = tl.cdiv(n_size, SPAN)
    tile = tl.program_id(0) // n_blocks
    n_first = (tl.program_id(0) % n_blocks) * SPAN
    n_last = tl.minimum(n_first + SPAN, n_size)
    group = tl.program_id(1)
    expert, slot, rows, inside, part, parts = shared_tile(
        tile, shares, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t, MODE, BLOCK_M, PLAN_ROWS
    )
    columns = tl.cdiv(tl.cdiv(n_last - n_first, BLOCK_N), parts) * BLOCK_N
    n_first += part * columns
    n_last = tl.minimum(n_last, n_first + columns)
    if (expert > E) | (n_first >= n_last):
        if PDL:  # a program may not end before the shrink has: what follows in the stream waits for this kernel alone
            tl.extra.cuda.gdc_wait()
        return
    if O_UNIT == 2:
        o_n = 1
        p_n = 1
    if B_UNIT == 4:
        b_r = 1
        b_n = b_n * B_VEC
    elif B_UNIT == 3:
        b_n = 1
        b_r = b_r * B_VEC
    OUT: tl.constexpr = out.dtype.element_ty
    HAS_BASE: tl.constexpr = base is not None
    wide_rows = rows.to(tl.int64)
    row_o = wide_rows * (o_m * O_VEC)
    row_p = wide_rows * (p_m * O_VEC)
    o_base = out + group * (o_g * O_VEC)
    p_base = base
    if HAS_BASE:
        p_base += group * (p_g * O_VEC)
    if (expert == E) | (slot == L):
        if PDL:
            tl.extra.cuda.gdc_wait()
        copy_rows(p_base, o_base, p_n, o_n, row_p, row_o, inside, n_first, n_last, BLOCK_M, BLOCK_N, HAS_BASE, OUT)
        return
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    scaling = 1.0
    if scalings is not None:
        scaling = tl.load(scalings + slot)
    factor = tl.full((BLOCK_M, 1), 1.0, tl.float32) * scaling
    if weights is not None:
        factor *= tl.load(weights + wide_rows * w_m, mask=inside, other=0.0).to(tl.float32)[:, None]
    load_rank = rank
    if B_UNIT == 4:
        load_rank = tl.minimum((rank + B_VEC - 1) // B_VEC * B_VEC, R // B_VEC * B_VEC)
    b_base = b + slot.to(tl.int64) * (b_l * B_VEC) + expert.to(tl.int64) * (b_e * B_VEC) + group * (b_g * B_VEC)
    h_rows = rows_over(rows, tile, h_div, K, MODE, BLOCK_M, PLAN_ROWS) * (h_m * H_VEC) + group * (h_g * H_VEC)
    DTYPE: tl.constexpr = b.dtype.element_ty
    if LOOP > 1:
        if PDL:
            tl.extra.cuda.gdc_wait()
        high, low, scale = split(load_h(h, h_rows, inside, rank, R, h_c, 0, CHUNKS, H_VEC, BLOCK_R), DTYPE)
        high2, low2, scale2 = high, low, scale
        if SUM_GROUPS == 2:
            high2, low2, scale2 = split(load_h(h, h_rows + h_g * H_VEC, inside, rank, R, h_c, 0, CHUNKS, H_VEC, BLOCK_R), DTYPE)
        n_loop(
            high, low, scale, high2, low2, scale2, b_base, b_g * B_VEC, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, inside, rank, load_rank,
            n_first, n_last, factor, SUM_GROUPS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, ranks is not None and B_UNIT == 4, EVEN_N, N_STAGES,
            OUT, PRECISION,
        )  # fmt: skip
    else:
        n = n_first + tl.arange(0, BLOCK_N)
        n_in = n < n_last
        mask = inside[:, None] & n_in[None, :]
        base_tile = tl.zeros((BLOCK_M, BLOCK_N), OUT)
        if HAS_BASE:
            base_tile = tl.load(p_base + row_p[:, None] + n[None, :] * p_n, mask=mask, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for s in tl.static_range(SUM_GROUPS):
            for block in tl.static_range(R_BLOCKS):
                r = block * BLOCK_R + tl.arange(0, BLOCK_R)
                b_tile = load_b(b_base + s * (b_g * B_VEC), n, n_in, r, b_n, b_r, rank, load_rank)
                if PDL and s == 0 and block == 0:
                    tl.extra.cuda.gdc_wait()
                h_tile = load_h(h, h_rows + s * (h_g * H_VEC), inside, rank, R, h_c, block * BLOCK_R, CHUNKS, H_VEC, BLOCK_R)
                high, low, scale = split(h_tile, DTYPE)
                acc = dot_split(high, low, scale, b_tile, acc, PRECISION)
        y = join(acc, factor, base_tile, HAS_BASE, OUT)
        tl.store(o_base + row_o[:, None] + n[None, :] * o_n, y, mask=mask)


def widths(b: Tensor, out: Tensor, base: Tensor | None, rank: int) -> tuple:
    """(b's unit axis and vector width, out's and base's, the width that N is a multiple of) for loads along N or r."""
    features = out.shape[2]
    b_unit, o_unit = unit_axis(b, 4, 3), unit_axis(out, 2)
    if base is not None and base.stride(2) != 1:
        o_unit = -1
    o_vec = vector_width(out, o_unit, features)
    if base is not None:
        o_vec = math.gcd(o_vec, vector_width(base, o_unit, features))
    b_vec = vector_width(b, b_unit, rank if b_unit == 4 else features)
    return b_unit, b_vec, o_unit, o_vec, max(o_vec, b_vec if b_unit == 3 else 1)


def expand(
    name: str,
    h: Tensor,  # [chunks, M or T, G or 1, r] float32 with unit last stride
    b: Tensor,  # [L, E|1, G, N, r]
    base: Tensor | None,  # [M, G, N]
    out: Tensor,  # [M, G, N]
    per_token: bool,  # h is [.., T, …]
    ids: Tensor,  # [T, K]
    adapters: Tensor | None,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,  # [M]
    experts: int,
    room: int,
    config: ExpertExpandConfig,
) -> None:
    """Write out = base + weight · scaling · h Bᵀ, summed over the groups of h and b where out has one of two."""
    routes, groups, features = out.shape
    slots, rank = b.shape[0], h.shape[3]
    sum_groups = b.shape[2] if groups == 1 else 1
    b_unit, b_vec, o_unit, o_vec, n_vec = widths(b, out, base, rank)
    r_blocks = cdiv(rank, config.rank_block)
    loop = config.loop if r_blocks == 1 and sum_groups <= 2 else 1
    h_vec = vector_width(h, 3, rank)
    hs, bs, os_ = strides(h, 3, h_vec), strides(b, b_unit, b_vec), strides(out, o_unit, o_vec)
    ps = os_ if base is None else strides(base, o_unit, o_vec)
    launch(
        name,
        expert_expand_kernel,
        (config.tiles * cdiv(features, config.block_n * loop), groups, 1),
        (
            h, b, base, out, ids, adapters, plan, ranks, scalings, weights,
            routes, ids.shape[1], experts, slots, room, config.shares, features // n_vec, rank,
            ids.shape[1] if per_token else 1,
            ids.stride(0), ids.stride(1), 0 if adapters is None else adapters.stride(0),
            0 if weights is None else weights.stride(0),
            hs[0], hs[1], 0 if h.shape[2] == 1 else hs[2],
            bs[0], 0 if b.shape[1] == 1 else bs[1], 0 if b.shape[2] == 1 else bs[2], bs[3], bs[4],
            *ps, *os_,
        ),
        (
            sum_groups, h.shape[0], config.mode, config.plan_rows, config.block_m, config.block_n, loop, config.rank_block,
            r_blocks, h_vec, b_vec, b_unit, o_vec, o_unit, n_vec, loop > 1 and whole_blocks(config.block_n, features), config.num_stages,
            config.precision, config.pdl,
        ),
        config.num_warps,
        1,
        config.pdl,
    )  # fmt: skip
