"""y = (x Wᵀ + scaling · h Bᵀ + bias) · w over routes in one accumulator: a program per (tile of routes, block of N, group)."""

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertLinearConfig, cdiv
from .expert_expand import load_b, load_h
from .expert_tile import EXPERT, expert_rows, expert_tile, program_tile, rows_over
from .mixed import mixed_rows, nth_slot, slot_rank, slots_in_order
from .shrink import strides
from .tile import dot, dot_split, launch, prefetch, round_to, scaled, split, unit_axis, vector_width

NONE = tl.constexpr(0)
IN_SUM = tl.constexpr(1)  # y = (sum + bias) · weight, rounded once
STAGED = tl.constexpr(2)  # y = round(round(sum) + bias · weight): expert_mlp's stages


@triton.jit
def base_rows(
    x, w, D, x_d, w_d, row_offsets, column_offsets, inside, n_in, acc,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x Wᵀ, over D from its first element to its last."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + row_offsets[:, None] + k[None, :] * x_d
    w_ptrs = w + column_offsets[None, :] + k[:, None] * w_d
    for step in range(tl.cdiv(D, BLOCK_K)):
        if EVEN_K:
            x_tile = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
            w_tile = tl.load(w_ptrs, mask=n_in[None, :], other=0.0)
        else:
            there = step * BLOCK_K + k < D
            x_tile = tl.load(x_ptrs, mask=inside[:, None] & there[None, :], other=0.0)
            w_tile = tl.load(w_ptrs, mask=n_in[None, :] & there[:, None], other=0.0)
        acc = dot(x_tile, w_tile, acc, PRECISION)
        x_ptrs += BLOCK_K * x_d
        w_ptrs += BLOCK_K * w_d
    return acc


@triton.jit
def slot_rows(
    acc, h, b_base, h_rows, scaling, n, n_in, b_n, b_r, inside, rank, load_rank, R, h_c,
    CHUNKS: tl.constexpr, H_VEC: tl.constexpr, BLOCK_R: tl.constexpr, R_BLOCKS: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + (scaling · h) Bᵀ of a tile of one slot."""
    for block in tl.static_range(R_BLOCKS):
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        b_tile = load_b(b_base, n, n_in, r, b_n, b_r, rank, load_rank)
        h_tile = load_h(h, h_rows, inside, rank, R, h_c, block * BLOCK_R, CHUNKS, H_VEC, BLOCK_R)
        high, low, scale = split(scaled(h_tile, scaling), DTYPE)
        acc = dot_split(high, low, scale, b_tile, acc, PRECISION)
    return acc


@triton.jit
def fetch_slots(b_rows, bucket, first, order, count, b_l):
    """Call the tile's adapters' rows of B into the L2, 128 bytes of each: they are wanted behind the base, all at once."""
    for i in range(count):
        prefetch(b_rows + nth_slot(bucket, first, order, i).to(tl.int64) * b_l)


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "D", "N", "R", "x_div", "h_div", "i_t", "i_k", "s_t", "r_m",
                               "x_m", "x_g", "x_d", "w_e", "w_g", "w_n", "w_d", "h_c", "h_m", "h_g",
                               "b_l", "b_e", "b_g", "b_n", "b_r", "c_e", "c_g", "c_n", "o_m", "o_g", "o_n"),
            do_not_specialize_on_alignment=("ids", "adapters", "plan", "ranks", "scalings", "weights", "bias"))  # fmt: skip
def expert_linear_kernel(
    x, w, h, b, bias, out, ids, adapters, plan, ranks, scalings, weights,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", D: "i32", N: "i32", R: "i32", x_div: "i32", h_div: "i32",
    i_t: "i64", i_k: "i64", s_t: "i64", r_m: "i64", x_m: "i64", x_g: "i64", x_d: "i64",
    w_e: "i64", w_g: "i64", w_n: "i64", w_d: "i64", h_c: "i64", h_m: "i64", h_g: "i64",
    b_l: "i64", b_e: "i64", b_g: "i64", b_n: "i64", b_r: "i64", c_e: "i64", c_g: "i64", c_n: "i64",
    o_m: "i64", o_g: "i64", o_n: "i64",
    SUM_GROUPS: tl.constexpr, H_GROUPS: tl.constexpr, CHUNKS: tl.constexpr, BIAS: tl.constexpr, MODE: tl.constexpr,
    PLAN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    R_BLOCKS: tl.constexpr, N_FIRST: tl.constexpr, X_VEC: tl.constexpr, X_UNIT: tl.constexpr, W_VEC: tl.constexpr,
    W_UNIT: tl.constexpr, H_VEC: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr, O_VEC: tl.constexpr,
    O_UNIT: tl.constexpr, N_VEC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scaling multiplies h, so that delta and base need one accumulator (two of 128 × 256 spill), which keeps its bits where
    h or b is zero.

    x's axes (m, g, d), w's (e, g, n, d), h's (chunk, m, g, r), b's (l, e, g, n, r), bias's (e, g, n), out's (m, g, n).

    Unit axes: 2 for x and out; 3 (d) or 2 (n) for w; 4 (r) or 3 (n) for b; −1 for none. h None: no LoRA, by the same
    code. SUM_GROUPS: y sums over so many groups of x and w (and H_GROUPS of h and b): the gradient of x. Mode EXPERT: W
    is read once for all adapters that meet in a tile.
    """
    n_size = N * N_VEC
    n_blocks = tl.cdiv(n_size, BLOCK_N)
    tile, n_block = program_tile(n_blocks, N_FIRST)
    group = tl.program_id(1)
    MIXED: tl.constexpr = MODE == EXPERT
    if MIXED:
        expert, rows, inside, before, follows = expert_rows(tile, plan, M, E, BLOCK_M, BLOCK_E)
    else:
        expert, slot, rows, inside = expert_tile(
            tile, ids, adapters, plan, M, K, E, L, TILES, i_t, i_k, s_t, MODE, BLOCK_M, PLAN_ROWS
        )
    if expert > E:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    if X_UNIT == 2:
        x_d = 1
        D = D * X_VEC
    if W_UNIT == 3:
        w_d = 1
        w_n = w_n * W_VEC
    elif W_UNIT == 2:
        w_n = 1
        w_d = w_d * W_VEC
    if B_UNIT == 4:
        b_r = 1
        b_n = b_n * B_VEC
    elif B_UNIT == 3:
        b_n = 1
        b_r = b_r * B_VEC
    if O_UNIT == 2:
        o_n = 1
    OUT: tl.constexpr = out.dtype.element_ty
    wide_rows = rows.to(tl.int64)
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < n_size
    o_ptrs = out + wide_rows[:, None] * (o_m * O_VEC) + group * (o_g * O_VEC) + n[None, :] * o_n
    o_mask = inside[:, None] & n_in[None, :]
    if expert == E:
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(o_ptrs, tl.zeros((BLOCK_M, BLOCK_N), OUT), mask=o_mask)
        return
    wide_expert = expert.to(tl.int64)
    if h is not None and MIXED:
        bucket, first, order, count = slots_in_order(adapters, rows // K, before // K, inside, follows, s_t, L)
        b_offset = wide_expert * (b_e * B_VEC) + group * (b_g * B_VEC)
        if PREFETCH:
            fetch_slots(b + b_offset + tl.where(n_in, n, 0) * b_n, bucket, first, order, count, b_l * B_VEC)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in tl.static_range(SUM_GROUPS):
        acc = base_rows(
            x + (group + s) * (x_g * X_VEC), w + wide_expert * (w_e * W_VEC) + (group + s) * (w_g * W_VEC), D, x_d, w_d,
            rows_over(rows, tile, x_div, K, MODE, BLOCK_M, PLAN_ROWS) * (x_m * X_VEC), n * w_n, inside, n_in, acc, BLOCK_K, EVEN_K, PRECISION,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    if h is not None:
        h_of = rows_over(rows, tile, h_div, K, MODE, BLOCK_M, PLAN_ROWS)
        if MIXED:
            for s in tl.static_range(H_GROUPS):
                acc = mixed_rows(
                    h, b, ranks, scalings, bucket, first, order, count, h_of, n, n_in, L, R, h_c, h_m,
                    (group + s) * (h_g * H_VEC), b_l, b_offset + s * (b_g * B_VEC), b_n, b_r, acc, CHUNKS, BLOCK_M, BLOCK_R,
                    R_BLOCKS, H_VEC, B_VEC, B_UNIT == 4, STAGES, PRECISION,
                )  # fmt: skip
        elif slot < L:
            rank, load_rank = slot_rank(ranks, slot, R, B_VEC, B_UNIT == 4)
            b_base = b + slot.to(tl.int64) * (b_l * B_VEC) + wide_expert * (b_e * B_VEC) + group * (b_g * B_VEC)
            h_rows = h_of * (h_m * H_VEC) + group * (h_g * H_VEC)
            scaling = 1.0
            if scalings is not None:
                scaling = tl.load(scalings + slot)
            for s in tl.static_range(H_GROUPS):
                acc = slot_rows(
                    acc, h, b_base + s * (b_g * B_VEC), h_rows + s * (h_g * H_VEC), scaling, n, n_in, b_n, b_r, inside, rank,
                    load_rank, R, h_c, CHUNKS, H_VEC, BLOCK_R, R_BLOCKS, b.dtype.element_ty, PRECISION,
                )  # fmt: skip
    if weights is not None:
        weight = tl.load(weights + wide_rows * r_m, mask=inside, other=0.0).to(tl.float32)[:, None]
    if BIAS != NONE:
        c_ptrs = bias + wide_expert * c_e + group * c_g + n * c_n
        c = tl.load(c_ptrs, mask=n_in, other=0.0).to(tl.float32)[None, :]
    if BIAS == STAGED:
        acc = round_to(acc, OUT).to(tl.float32)
        if weights is not None:
            c = scaled(c, weight)  # not part of an fma: csrc/linear.cu has the same bits
        acc = acc + c
    else:
        if BIAS == IN_SUM:
            acc = acc + c
        if weights is not None:
            acc = acc * weight
    tl.store(o_ptrs, round_to(acc, OUT), mask=o_mask)


def linear(
    name: str,
    x: Tensor,  # [M or T, G or 1, D]
    w: Tensor,  # [E, G, N, D]
    h: Tensor | None,  # [chunks, M or T, G' or 1, r] float32 with unit last stride
    b: Tensor | None,  # [L, E|1, G', N, r]
    bias: Tensor | None,  # [E, G, N]
    out: Tensor,  # [M, G, N]; with one group: the sum over all groups of x and w, and of h and b
    x_per_token: bool,
    ids: Tensor,  # [T, K]
    adapters: Tensor | None,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,  # [M]
    staged: bool,
    experts: int,
    slots: int,
    room: int,
    config: ExpertLinearConfig,
) -> None:
    """Write out = (x Wᵀ + scaling · h Bᵀ + bias) · weight; staged: round(x Wᵀ + …) + bias · weight, rounded again."""
    routes, groups, out_features = out.shape
    features = x.shape[2]
    sum_groups = w.shape[1] if groups == 1 else 1
    rank = 0 if h is None else h.shape[3]
    x_unit, w_unit, o_unit = unit_axis(x, 2), unit_axis(w, 3, 2), unit_axis(out, 2)
    x_vec = vector_width(x, x_unit, features)
    w_vec = vector_width(w, w_unit, features if w_unit == 3 else out_features)
    if w_unit == 3:
        x_vec = w_vec = min(x_vec, w_vec)
    o_vec = vector_width(out, o_unit, out_features)
    n_vec = max(o_vec, w_vec if w_unit == 2 else 1)  # every width divides N
    b_unit, b_vec, h_vec, hs, bs, h_groups, per_token = -1, 1, 1, (0,) * 4, (0,) * 5, 1, False
    if h is not None:
        b_unit, h_vec = unit_axis(b, 4, 3), vector_width(h, 3, rank)
        b_vec = vector_width(b, b_unit, rank if b_unit == 4 else out_features)
        n_vec = max(n_vec, b_vec if b_unit == 3 else 1)
        hs, bs = strides(h, 3, h_vec), strides(b, b_unit, b_vec)
        h_groups = b.shape[2] if groups == 1 else 1
        per_token = h.shape[1] != routes
    xs, ws, os_ = strides(x, x_unit, x_vec), strides(w, w_unit, w_vec), strides(out, o_unit, o_vec)
    n_blocks = cdiv(out_features, config.block_n)
    top_k = ids.shape[1]
    pdl = config.pdl and h is not None  # behind the shrink alone: another kernel that lets us start early may be writing x
    launch(
        name,
        expert_linear_kernel,
        (config.tiles * n_blocks, groups, 1),
        (
            x, w, h, b, bias, out, ids, adapters, plan, ranks, scalings, weights,
            routes, top_k, experts, slots, room, features // x_vec if x_unit == 2 else features, out_features // n_vec, rank,
            top_k if x_per_token else 1, top_k if per_token else 1,
            ids.stride(0), ids.stride(1), 0 if adapters is None else adapters.stride(0), 0 if weights is None else weights.stride(0),
            xs[0], 0 if x.shape[1] == 1 else xs[1], xs[2], ws[0], ws[1], ws[2], ws[3],
            hs[0], hs[1], 0 if h is None or h.shape[2] == 1 else hs[2],
            bs[0], 0 if b is None or b.shape[1] == 1 else bs[1], 0 if b is None or b.shape[2] == 1 else bs[2], bs[3], bs[4],
            *((0, 0, 0) if bias is None else bias.stride()), *os_,
        ),
        (
            sum_groups, h_groups, 1 if h is None else h.shape[0], 0 if bias is None else 2 if staged else 1, config.mode,
            config.plan_rows, config.block_m, config.block_n, config.block_k, config.rank_block,
            max(1, cdiv(rank, config.rank_block)), config.n_first, x_vec, x_unit, w_vec, w_unit, h_vec, b_vec, b_unit, o_vec,
            o_unit, n_vec, features % config.block_k == 0, config.block_e, config.slot_stages, config.prefetch and b_unit == 4,
            config.precision, pdl,
        ),
        config.num_warps,
        config.num_stages,
        pdl,
    )  # fmt: skip
