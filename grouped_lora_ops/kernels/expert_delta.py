"""y = base + w · scaling · (x Aᵀ) Bᵀ over routes in one launch: a program per tile of routes keeps h in registers."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertFusedConfig
from .expand import copy_rows
from .expert_expand import n_loop, widths
from .expert_shrink import expert_rows
from .expert_tile import call_a, expert_tile, rows_over
from .shrink import strides
from .tile import launch, split, unit_axis, vector_width, wait_then_start_next, whole_blocks


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "D", "N", "R", "x_div", "i_t", "i_k", "s_t", "w_m", "x_m", "x_d",
                               "a_l", "a_e", "a_g", "a_r", "a_d", "b_l", "b_e", "b_g", "b_n", "b_r",
                               "p_m", "p_g", "p_n", "o_m", "o_g", "o_n"),
            do_not_specialize_on_alignment=("ids", "adapters", "plan", "ranks", "scalings", "weights"))  # fmt: skip
def expert_delta_kernel(
    x, a, b, base, out, ids, adapters, plan, ranks, scalings, weights,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", D: "i32", N: "i32", R: "i32", x_div: "i32",
    i_t: "i64", i_k: "i64", s_t: "i64", w_m: "i64", x_m: "i64", x_d: "i64",
    a_l: "i64", a_e: "i64", a_g: "i64", a_r: "i64", a_d: "i64",
    b_l: "i64", b_e: "i64", b_g: "i64", b_n: "i64", b_r: "i64",
    p_m: "i64", p_g: "i64", p_n: "i64", o_m: "i64", o_g: "i64", o_n: "i64",
    GROUPS: tl.constexpr, A_GROUPS: tl.constexpr, MODE: tl.constexpr, PLAN_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, X_VEC: tl.constexpr, X_UNIT: tl.constexpr, A_UNIT: tl.constexpr,
    B_VEC: tl.constexpr, B_UNIT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr, N_VEC: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, N_STAGES: tl.constexpr, APART: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Axes as in `expert_shrink_kernel` and `expert_expand_kernel`, x's (m, d); a has x's vector width; r ≤ BLOCK_R.

    A_GROUPS: 2 where gate and up have an A each; x is read once for both. APART: gate and up are programs of their own (grid axis 1),
    and GROUPS and A_GROUPS are 1. AHEAD: `call_a`'s BYTES, 0 for none.
    """
    tile = tl.program_id(0)
    if X_UNIT == 1:
        x_d = 1
    if A_UNIT == 4:
        a_d = 1
        a_r = a_r * X_VEC
    if APART:
        group = tl.program_id(1)
        a += group * (a_g * X_VEC)
        b += group * (b_g * B_VEC)
        out += group * (o_g * O_VEC)
        if base is not None:
            base += group * (p_g * O_VEC)
    c = tl.arange(0, A_GROUPS * BLOCK_R)
    columns = (c // BLOCK_R) * (a_g * X_VEC) + (c % BLOCK_R) * a_r
    if AHEAD > 0:
        called = (c // BLOCK_R) * (a_g * X_VEC) + tl.minimum(c % BLOCK_R, R - 1) * a_r
        call_a(tile, tl.num_programs(0), a, called, ids, adapters, M, K, E, L, D * X_VEC, i_t, i_k, s_t, a_l * X_VEC, a_e * X_VEC, AHEAD)
    if PDL:
        wait_then_start_next()
    expert, slot, rows, inside = expert_tile(
        tile, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t, MODE, BLOCK_M, PLAN_ROWS
    )
    if expert > E:
        return
    if B_UNIT == 4:
        b_r = 1
        b_n = b_n * B_VEC
    elif B_UNIT == 3:
        b_n = 1
        b_r = b_r * B_VEC
    if O_UNIT == 2:
        o_n = 1
        p_n = 1
    OUT: tl.constexpr = out.dtype.element_ty
    HAS_BASE: tl.constexpr = base is not None
    wide_rows = rows.to(tl.int64)
    row_o = wide_rows * (o_m * O_VEC)
    row_p = wide_rows * (p_m * O_VEC)
    n_size = N * N_VEC
    if (expert == E) | (slot == L):
        for g in tl.static_range(GROUPS):
            p_base = base
            if HAS_BASE:
                p_base += g * (p_g * O_VEC)
            copy_rows(
                p_base, out + g * (o_g * O_VEC), p_n, o_n, row_p, row_o, inside, 0, n_size, BLOCK_M, BLOCK_N, HAS_BASE, OUT
            )
        return
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    h = expert_rows(
        x, a + slot.to(tl.int64) * (a_l * X_VEC) + expert.to(tl.int64) * (a_e * X_VEC), D * X_VEC, x_d, a_d,
        rows_over(rows, tile, x_div, K, MODE, BLOCK_M, PLAN_ROWS) * (x_m * X_VEC), columns, inside, c % BLOCK_R < rank,
        BLOCK_M, A_GROUPS * BLOCK_R, BLOCK_K, CHUNK, 0, CHUNKS, EVEN_K, PRECISION,
    )  # fmt: skip
    h = tl.where((c % BLOCK_R < rank)[None, :] & inside[:, None], h, 0.0)
    factor = tl.full((BLOCK_M, 1), 1.0, tl.float32) * tl.load(scalings + slot)
    if weights is not None:
        factor *= tl.load(weights + wide_rows * w_m, mask=inside, other=0.0).to(tl.float32)[:, None]
    load_rank = rank
    if B_UNIT == 4:
        load_rank = tl.minimum((rank + B_VEC - 1) // B_VEC * B_VEC, R // B_VEC * B_VEC)
    b_base = b + slot.to(tl.int64) * (b_l * B_VEC) + expert.to(tl.int64) * (b_e * B_VEC)
    if A_GROUPS == 2:
        first, second = tl.split(tl.permute(tl.reshape(h, (BLOCK_M, 2, BLOCK_R)), (0, 2, 1)))
    else:
        first = h
        second = h
    for g in tl.static_range(GROUPS):
        if g == 0:
            high, low, scale = split(first, OUT)
        else:
            high, low, scale = split(second, OUT)
        p_base = base
        if HAS_BASE:
            p_base += g * (p_g * O_VEC)
        n_loop(
            high, low, scale, high, low, scale, b_base + g * (b_g * B_VEC), 0, p_base, out + g * (o_g * O_VEC), b_n, b_r, p_n, o_n, row_p, row_o,
            inside, rank, load_rank, 0, n_size, factor, 1, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, ranks is not None and B_UNIT == 4,
            EVEN_N, N_STAGES, OUT, PRECISION,
        )  # fmt: skip


def delta(
    name: str,
    x: Tensor,  # [M or T, D]
    a: Tensor,  # [L, E|1, G or 1, r, D]
    b: Tensor,  # [L, E|1, G, N, r]
    base: Tensor | None,  # [M, G, N]
    out: Tensor,  # [M, G, N]
    per_token: bool,
    ids: Tensor,
    adapters: Tensor | None,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor,
    weights: Tensor | None,
    experts: int,
    room: int,
    config: ExpertFusedConfig,
) -> None:
    """Write out = base + weight · scaling · (x Aᵀ) Bᵀ."""
    routes, groups, out_features = out.shape
    slots, features, rank = a.shape[0], x.shape[1], a.shape[3]
    x_unit, a_unit = unit_axis(x, 1), unit_axis(a, 4)
    x_vec = math.gcd(vector_width(x, x_unit, features), vector_width(a, a_unit, features))
    b_unit, b_vec, o_unit, o_vec, n_vec = widths(b, out, base, rank)
    xs, as_ = strides(x, x_unit, x_vec), strides(a, a_unit, x_vec)
    bs, os_ = strides(b, b_unit, b_vec), strides(out, o_unit, o_vec)
    ps = os_ if base is None else strides(base, o_unit, o_vec)
    launch(
        name,
        expert_delta_kernel,
        (config.tiles, groups if config.apart else 1, 1),
        (
            x, a, b, base, out, ids, adapters, plan, ranks, scalings, weights,
            routes, ids.shape[1], experts, slots, room, features // x_vec, out_features // n_vec, rank,
            ids.shape[1] if per_token else 1, ids.stride(0), ids.stride(1), 0 if adapters is None else adapters.stride(0),
            0 if weights is None else weights.stride(0), *xs,
            as_[0], 0 if a.shape[1] == 1 else as_[1], 0 if a.shape[2] == 1 else as_[2], as_[3], as_[4],
            bs[0], 0 if b.shape[1] == 1 else bs[1], bs[2], bs[3], bs[4], *ps, *os_,
        ),
        (
            1 if config.apart else groups, 1 if config.apart else a.shape[2], config.mode, config.plan_rows, config.block_m,
            config.block_n, config.block_k, config.rank_block, config.chunk, config.chunks, x_vec, x_unit, a_unit, b_vec, b_unit, o_vec,
            o_unit, n_vec, features % config.block_k == 0, whole_blocks(config.block_n, out_features), config.precision, config.n_stages,
            config.apart, config.pdl, config.ahead if a_unit == 4 else 0,
        ),
        config.num_warps,
        config.num_stages,
        config.pdl,
    )  # fmt: skip
