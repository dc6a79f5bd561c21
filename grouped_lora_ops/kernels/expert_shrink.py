"""h = x Aᵀ over routes: a program per (tile of routes, block of h's columns, chunk of D, group of x)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertShrinkConfig, cdiv
from .expert_tile import call_a, expert_tile, rows_over
from .shrink import strides
from .tile import dot, launch, scaled, split, unit_axis, vector_width, wait_then_start_next


@triton.jit
def expert_rows(
    x, a, D, x_d, a_d, row_offsets, column_offsets, inside, columns,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    first, last, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of chunks first … last−1 of x Aᵀ, with A's rows anywhere (column_offsets): as `shrink_rows`, but a chunk is one
    sum, not a sum of pieces, so a row's bits are not those of the dense ops."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + row_offsets[:, None] + (first * CHUNK + k[None, :]) * x_d
    a_ptrs = a + column_offsets[None, :] + (first * CHUNK + k[:, None]) * a_d
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    STEPS: tl.constexpr = CHUNK // BLOCK_K
    begin = first * STEPS
    end = tl.minimum(last * STEPS, tl.cdiv(D, BLOCK_K))
    for step in range(begin, end):
        if EVEN_K:
            x_tile = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
            a_tile = tl.load(a_ptrs, mask=columns[None, :], other=0.0)
        else:
            there = step * BLOCK_K + k < D
            x_tile = tl.load(x_ptrs, mask=inside[:, None] & there[None, :], other=0.0)
            a_tile = tl.load(a_ptrs, mask=columns[None, :] & there[:, None], other=0.0)
        acc = dot(x_tile, a_tile, acc, PRECISION)
        if step % STEPS == STEPS - 1:
            total += acc
            acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        x_ptrs += BLOCK_K * x_d
        a_ptrs += BLOCK_K * a_d
    if end % STEPS != 0:
        total += acc
    return total


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "D", "R", "x_div", "i_t", "i_k", "s_t", "x_m", "x_g", "x_d",
                               "a_l", "a_e", "a_g", "a_r", "a_d", "h_c", "h_m", "h_g"),
            do_not_specialize_on_alignment=("ids", "adapters", "plan", "ranks", "scalings"))  # fmt: skip
def expert_shrink_kernel(
    x, a, h, ids, adapters, plan, ranks, scalings,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", D: "i32", R: "i32", x_div: "i32",
    i_t: "i64", i_k: "i64", s_t: "i64", x_m: "i64", x_g: "i64", x_d: "i64",
    a_l: "i64", a_e: "i64", a_g: "i64", a_r: "i64", a_d: "i64", h_c: "i64", h_m: "i64", h_g: "i64",
    GROUPS: tl.constexpr, SUM_GROUPS: tl.constexpr, MODE: tl.constexpr, PLAN_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, R_BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr, FILL: tl.constexpr, HALVES: tl.constexpr,
    X_VEC: tl.constexpr, X_UNIT: tl.constexpr, A_VEC: tl.constexpr, A_UNIT: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x's axes (m, g, d), a's (l, e, g, r, d), h's (chunk, m, g, r); unit axes 2 for x, 4 (d) or 3 (r) for a, −1 for none.

    Route m reads row m // x_div of x. GROUPS: groups of A that read the same x; h's columns run through all of them,
    so that x is read once. Grid axis 2 is the groups that have an x each (then GROUPS is 1). SUM_GROUPS: h sums over so
    many groups of x and a. SPLIT: one chunk a program, its sum at h[chunk]. FILL: zeros where there is no adapter and
    past the rank; without it h holds nothing there, and nobody may read it. HALVES (then nothing is split): h is bf16, a row's
    high parts, then its low ones, as kernels/halves.py makes them; R and its strides are multiples of 8. AHEAD: `call_a`'s BYTES,
    0 for none.
    """
    C_BLOCKS: tl.constexpr = GROUPS * R_BLOCKS * BLOCK_R // BLOCK_C
    tile = tl.program_id(0) // C_BLOCKS
    c = (tl.program_id(0) % C_BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk = tl.program_id(1)
    x_group = tl.program_id(2)
    if AHEAD > 0:
        called = (c // (R_BLOCKS * BLOCK_R)) * (a_g * A_VEC) + tl.minimum(c % (R_BLOCKS * BLOCK_R), R - 1) * (a_r * A_VEC)
        tiles = tl.num_programs(0) // C_BLOCKS
        call_a(tile, tiles, a, called, ids, adapters, M, K, E, L, D * X_VEC, i_t, i_k, s_t, a_l * A_VEC, a_e * A_VEC, AHEAD)
    if PDL:
        wait_then_start_next()
    expert, slot, rows, inside = expert_tile(
        tile, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t, MODE, BLOCK_M, PLAN_ROWS
    )
    if expert > E:
        return
    none = (expert == E) | (slot == L)
    if none and not FILL:
        return
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot, mask=slot < L, other=0), 0), R)
    if none:
        rank = 0
    group = c // (R_BLOCKS * BLOCK_R)
    r = c % (R_BLOCKS * BLOCK_R)
    wide_rows = rows.to(tl.int64)
    if HALVES:
        h_c = h_c // 8 * 8
        h_g = h_g // 8 * 8
        h_m = h_m // 8 * 8
        R = R // 8 * 8
    out = h + chunk * h_c + x_group * h_g + wide_rows[:, None] * h_m + (group * h_g + r)[None, :]
    if X_UNIT == 2:
        x_d = 1
        D = D * X_VEC
    if A_UNIT == 4:
        a_d = 1
        a_r = a_r * A_VEC
    elif A_UNIT == 3:
        a_r = 1
        a_d = a_d * A_VEC
    load_rank = rank
    if A_UNIT == 3:  # whole vectors: what lies past the rank only reaches columns that are zeroed below
        load_rank = tl.minimum((rank + A_VEC - 1) // A_VEC * A_VEC, R)
    first = 0
    last = CHUNKS
    if SPLIT:
        first = chunk
        last = chunk + 1
    if none:
        last = first
    safe_expert = tl.where(none, 0, expert).to(tl.int64)
    safe_slot = tl.where(none, 0, slot).to(tl.int64)
    x_base = x + x_group * (x_g * X_VEC)
    a_base = a + safe_slot * (a_l * A_VEC) + safe_expert * (a_e * A_VEC) + x_group * (a_g * A_VEC)
    columns = group * (a_g * A_VEC) + r * a_r
    row_offsets = rows_over(rows, tile, x_div, K, MODE, BLOCK_M, PLAN_ROWS) * (x_m * X_VEC)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for s in tl.static_range(SUM_GROUPS):
        total += expert_rows(
            x_base + s * (x_g * X_VEC), a_base + s * (a_g * A_VEC), D, x_d, a_d, row_offsets, columns, inside, r < load_rank,
            BLOCK_M, BLOCK_C, BLOCK_K, CHUNK, first, last, EVEN_K, PRECISION,
        )  # fmt: skip
    total = tl.where((r < rank)[None, :], total, 0.0)
    written = inside[:, None] & (r < R)[None, :]
    if HALVES:
        if scalings is not None:
            total = scaled(total, tl.load(scalings + slot, mask=slot < L, other=0.0))
        high, low, _ = split(total, tl.bfloat16)
        tl.store(out, high, mask=written)
        tl.store(out + R, low, mask=written)
    else:
        if scalings is not None:
            total *= tl.load(scalings + slot, mask=slot < L, other=0.0)
        tl.store(out, total, mask=written)


def shrink(
    name: str,
    x: Tensor,  # [M or T, G or 1, D]
    a: Tensor,  # [L, E|1, G or 1, r, D]
    h: Tensor,  # [chunks, M, G or 1, r] float32, the last two axes dense; or [M, G or 1, 2, r] bf16, dense, r a multiple of 8
    per_token: bool,  # x is [T, …]
    ids: Tensor,  # [T, K]
    adapters: Tensor | None,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    experts: int,
    room: int,
    fill: bool,
    config: ExpertShrinkConfig,
) -> None:
    """Write h = x Aᵀ (· scaling), all of it or chunk by chunk (config.split); bf16: its high and low parts, all of it.

    x with G groups and A with G: every group its own; x with one: all groups of A read it; h with one group of two of
    x and A: their sum.
    """
    in_halves = h.dtype == torch.bfloat16
    if in_halves:
        h = h[None, :, :, 0]
    routes, groups = h.shape[1], h.shape[2]
    slots, features, rank = a.shape[0], x.shape[2], a.shape[3]
    x_groups, sum_groups, columns = 1, 1, groups
    if x.shape[1] > 1 and groups == 1:
        sum_groups, columns = x.shape[1], 1
    elif x.shape[1] > 1:
        x_groups, columns = groups, 1
    x_unit, a_unit = unit_axis(x, 2), unit_axis(a, 4, 3)
    x_vec = vector_width(x, x_unit, features)
    a_vec = vector_width(a, a_unit, features if a_unit == 4 else rank)
    if a_unit == 4:
        x_vec = a_vec = min(x_vec, a_vec)
    xs, as_ = strides(x, x_unit, x_vec), strides(a, a_unit, a_vec)
    r_blocks = cdiv(rank, config.rank_block)
    block_c = min(config.block_c, columns * r_blocks * config.rank_block)
    launch(
        name,
        expert_shrink_kernel,
        (config.tiles * (columns * r_blocks * config.rank_block // block_c), config.chunks if config.split else 1, x_groups),
        (
            x, a, h, ids, adapters, plan, ranks, scalings,
            routes, ids.shape[1], experts, slots, room, features // x_vec if x_unit == 2 else features, rank,
            ids.shape[1] if per_token else 1, ids.stride(0), ids.stride(1), 0 if adapters is None else adapters.stride(0),
            xs[0], 0 if x.shape[1] == 1 else xs[1], xs[2],
            as_[0], 0 if a.shape[1] == 1 else as_[1], 0 if a.shape[2] == 1 else as_[2], as_[3], as_[4],
            h.stride(0), h.stride(1), h.stride(2),
        ),
        (
            columns, sum_groups, config.mode, config.plan_rows, config.block_m, block_c, config.rank_block, r_blocks,
            config.block_k, config.chunk, config.chunks, config.split, fill, in_halves, x_vec, x_unit, a_vec, a_unit,
            features % config.block_k == 0, config.precision, config.pdl, config.ahead if a_unit == 4 and x_unit == 2 else 0,
        ),
        config.num_warps,
        config.num_stages,
        config.early,
    )  # fmt: skip
