"""a = act(x Wᵀ + scaling · h Bᵀ + bias) (· weight) over routes: gate and up of a tile in one program, h1 never leaves it.

The stages, their roundings and the order of every sum are those of `expert_linear_kernel` followed by
`activation_kernel`, so the bits are theirs too; x is read once for both halves.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertLinearConfig, cdiv
from .expert_linear import fetch_slots, slot_rows
from .expert_rows import ACTIVATIONS, activate
from .expert_tile import EXPERT, expert_rows, expert_tile, program_tile, rows_over
from .mixed import mixed_rows, slot_rank, slots_in_order
from .shrink import strides
from .tile import dot, launch, round_to, unit_axis, vector_width


@triton.jit
def staged(acc, bias, n, n_in, c_n, HAS_BIAS: tl.constexpr, OUT: tl.constexpr):
    """round(acc), and round(that + bias), in float32."""
    acc = round_to(acc, OUT).to(tl.float32)
    if HAS_BIAS:
        c = tl.load(bias + n * c_n, mask=n_in, other=0.0).to(tl.float32)
        acc = round_to(acc + c[None, :], OUT).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "D", "N", "R", "x_div", "h_div", "i_t", "i_k", "s_t", "v_m",
                               "x_m", "x_d", "w_e", "w_g", "w_n", "w_d", "h_c", "h_m", "h_g",
                               "b_l", "b_e", "b_g", "b_n", "b_r", "c_e", "c_g", "c_n", "o_m"),
            do_not_specialize_on_alignment=("ids", "adapters", "plan", "ranks", "scalings", "weights", "bias"))  # fmt: skip
def gate_up_kernel(
    x, w, h, b, bias, out, ids, adapters, plan, ranks, scalings, weights, limit: "fp32",
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", D: "i32", N: "i32", R: "i32", x_div: "i32", h_div: "i32",
    i_t: "i64", i_k: "i64", s_t: "i64", v_m: "i64", x_m: "i64", x_d: "i64",
    w_e: "i64", w_g: "i64", w_n: "i64", w_d: "i64", h_c: "i64", h_m: "i64", h_g: "i64",
    b_l: "i64", b_e: "i64", b_g: "i64", b_n: "i64", b_r: "i64", c_e: "i64", c_g: "i64", c_n: "i64", o_m: "i64",
    GROUPS: tl.constexpr, CHUNKS: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, MODE: tl.constexpr,
    PLAN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    R_BLOCKS: tl.constexpr, N_FIRST: tl.constexpr, X_VEC: tl.constexpr, X_UNIT: tl.constexpr, W_VEC: tl.constexpr,
    W_UNIT: tl.constexpr, H_VEC: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr, O_VEC: tl.constexpr,
    N_VEC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axes as in `expert_linear_kernel`, x's (m, d), out's (m, n) with n side by side. GROUPS: 2 for gate and up, 1 for an
    ungated activation. Masked routes get zeros."""
    n_size = N * N_VEC
    n_blocks = tl.cdiv(n_size, BLOCK_N)
    tile, n_block = program_tile(n_blocks, N_FIRST)
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
    if X_UNIT == 1:
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
    OUT: tl.constexpr = out.dtype.element_ty
    wide_rows = rows.to(tl.int64)
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < n_size
    o_ptrs = out + wide_rows[:, None] * (o_m * O_VEC) + n[None, :]
    o_mask = inside[:, None] & n_in[None, :]
    if expert == E:
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(o_ptrs, tl.zeros((BLOCK_M, BLOCK_N), OUT), mask=o_mask)
        return
    wide_expert = expert.to(tl.int64)
    if h is not None and MIXED:
        bucket, first, order, count = slots_in_order(adapters, rows // K, before // K, inside, follows, s_t, L)
        b_offset = wide_expert * (b_e * B_VEC)
        if PREFETCH:
            b_rows = b + b_offset + tl.where(n_in, n, 0) * b_n
            fetch_slots(b_rows, bucket, first, order, count, b_l * B_VEC)
            if GROUPS == 2:
                fetch_slots(b_rows + b_g * B_VEC, bucket, first, order, count, b_l * B_VEC)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + (rows_over(rows, tile, x_div, K, MODE, BLOCK_M, PLAN_ROWS) * (x_m * X_VEC))[:, None] + k[None, :] * x_d
    w_ptrs = w + wide_expert * (w_e * W_VEC) + (n * w_n)[None, :] + k[:, None] * w_d
    u_ptrs = w_ptrs + w_g * W_VEC
    for step in range(tl.cdiv(D, BLOCK_K)):
        there = step * BLOCK_K + k < D
        x_mask = inside[:, None]
        w_mask = n_in[None, :]
        if not EVEN_K:
            x_mask = x_mask & there[None, :]
            w_mask = w_mask & there[:, None]
        x_tile = tl.load(x_ptrs, mask=x_mask, other=0.0)
        gate = dot(x_tile, tl.load(w_ptrs, mask=w_mask, other=0.0), gate, PRECISION)
        if GROUPS == 2:
            up = dot(x_tile, tl.load(u_ptrs, mask=w_mask, other=0.0), up, PRECISION)
        x_ptrs += BLOCK_K * x_d
        w_ptrs += BLOCK_K * w_d
        u_ptrs += BLOCK_K * w_d
    if PDL:
        tl.extra.cuda.gdc_wait()
    if h is not None:
        h_of = rows_over(rows, tile, h_div, K, MODE, BLOCK_M, PLAN_ROWS)
        if MIXED:
            gate = mixed_rows(
                h, b, ranks, scalings, bucket, first, order, count, h_of, n, n_in, L, R, h_c, h_m, 0, b_l, b_offset,
                b_n, b_r, gate, CHUNKS, BLOCK_M, BLOCK_R, R_BLOCKS, H_VEC, B_VEC, B_UNIT == 4, STAGES, PRECISION,
            )  # fmt: skip
            if GROUPS == 2:
                up = mixed_rows(
                    h, b, ranks, scalings, bucket, first, order, count, h_of, n, n_in, L, R, h_c, h_m, h_g * H_VEC,
                    b_l, b_offset + b_g * B_VEC, b_n, b_r, up, CHUNKS, BLOCK_M, BLOCK_R, R_BLOCKS, H_VEC, B_VEC, B_UNIT == 4,
                    STAGES, PRECISION,
                )  # fmt: skip
        elif slot < L:
            rank, load_rank = slot_rank(ranks, slot, R, B_VEC, B_UNIT == 4)
            b_base = b + slot.to(tl.int64) * (b_l * B_VEC) + wide_expert * (b_e * B_VEC)
            h_rows = h_of * (h_m * H_VEC)
            scaling = tl.load(scalings + slot)
            gate = slot_rows(
                gate, h, b_base, h_rows, scaling, n, n_in, b_n, b_r, inside, rank, load_rank, R, h_c,
                CHUNKS, H_VEC, BLOCK_R, R_BLOCKS, b.dtype.element_ty, PRECISION,
            )  # fmt: skip
            if GROUPS == 2:
                up = slot_rows(
                    up, h, b_base + b_g * B_VEC, h_rows + h_g * H_VEC, scaling, n, n_in, b_n, b_r, inside, rank, load_rank,
                    R, h_c, CHUNKS, H_VEC, BLOCK_R, R_BLOCKS, b.dtype.element_ty, PRECISION,
                )  # fmt: skip
    HAS_BIAS: tl.constexpr = bias is not None
    c = bias
    if HAS_BIAS:
        c += wide_expert * c_e
    gate = staged(gate, c, n, n_in, c_n, HAS_BIAS, OUT)
    if GROUPS == 2:
        if HAS_BIAS:
            c += c_g
        up = staged(up, c, n, n_in, c_n, HAS_BIAS, OUT)
    a = activate(gate, up, limit, ACT, CLAMP)
    if weights is not None:
        a = a * tl.load(weights + wide_rows * v_m, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(o_ptrs, round_to(a, OUT), mask=o_mask)


def gate_up(
    name: str,
    x: Tensor,  # [M or T, D]
    w: Tensor,  # [E, 1 or 2, I, D]
    h: Tensor | None,  # [chunks, M or T, 1 or 2, r] float32 with unit last stride
    b: Tensor | None,  # [L, E|1, 1 or 2, I, r]
    bias: Tensor | None,  # [E, 1 or 2, I]
    out: Tensor,  # [M, I], dense
    x_per_token: bool,
    ids: Tensor,  # [T, K]
    adapters: Tensor | None,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,  # [M]
    activation: str,
    limit: float | None,
    experts: int,
    slots: int,
    room: int,
    config: ExpertLinearConfig,
) -> None:
    """Write out = act(x Wᵀ + scaling · h Bᵀ + bias) (· weight), h1's stages rounded as `expert_mlp` has them."""
    routes, inner = out.shape
    features, groups, top_k = x.shape[1], w.shape[1], ids.shape[1]
    rank = 0 if h is None else h.shape[3]
    x_unit, w_unit = unit_axis(x, 1), unit_axis(w, 3, 2)
    x_vec = vector_width(x, x_unit, features)
    w_vec = vector_width(w, w_unit, features if w_unit == 3 else inner)
    if w_unit == 3:
        x_vec = w_vec = min(x_vec, w_vec)
    o_vec = vector_width(out, 1, inner)
    n_vec = max(o_vec, w_vec if w_unit == 2 else 1)
    b_unit, b_vec, h_vec, hs, bs, per_token = -1, 1, 1, (0,) * 4, (0,) * 5, False
    if h is not None:
        b_unit, h_vec = unit_axis(b, 4, 3), vector_width(h, 3, rank)
        b_vec = vector_width(b, b_unit, rank if b_unit == 4 else inner)
        n_vec = max(n_vec, b_vec if b_unit == 3 else 1)
        hs, bs = strides(h, 3, h_vec), strides(b, b_unit, b_vec)
        per_token = h.shape[1] != routes
    xs, ws = strides(x, x_unit, x_vec), strides(w, w_unit, w_vec)
    pdl = config.pdl and h is not None  # behind the shrink alone: another kernel that lets us start early may be writing x
    launch(
        name,
        gate_up_kernel,
        (config.tiles * cdiv(inner, config.block_n), 1, 1),
        (
            x, w, h, b, bias, out, ids, adapters, plan, ranks, scalings, weights, 0.0 if limit is None else float(limit),
            routes, top_k, experts, slots, room, features // x_vec if x_unit == 1 else features, inner // n_vec, rank,
            top_k if x_per_token else 1, top_k if per_token else 1,
            ids.stride(0), ids.stride(1), 0 if adapters is None else adapters.stride(0), 0 if weights is None else weights.stride(0),
            *xs, *ws, hs[0], hs[1], 0 if h is None or h.shape[2] == 1 else hs[2],
            bs[0], 0 if b is None or b.shape[1] == 1 else bs[1], bs[2], bs[3], bs[4],
            *((0, 0, 0) if bias is None else bias.stride()), out.stride(0) // o_vec,
        ),
        (
            groups, 1 if h is None else h.shape[0], ACTIVATIONS[activation], limit is not None, config.mode, config.plan_rows,
            config.block_m, config.block_n, config.block_k, config.rank_block, max(1, cdiv(rank, config.rank_block)),
            config.n_first, x_vec, x_unit, w_vec, w_unit, h_vec, b_vec, b_unit, o_vec, n_vec,
            features % config.block_k == 0, config.block_e, config.slot_stages, config.prefetch and b_unit == 4, config.precision, pdl,
        ),
        config.num_warps,
        config.num_stages,
        pdl,
    )  # fmt: skip
