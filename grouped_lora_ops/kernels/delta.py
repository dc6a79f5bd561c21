"""y = base + scaling · (x Aᵀ) Bᵀ in one launch: a program per (tile of rows, group) keeps h in registers."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch import FusedConfig
from .expand import copy_rows, expand_rows
from .shrink import shrink_rows, strides
from .tile import SCAN, SINGLE, launch, slice_bounds, split, tile_rows, unit_axis, vector_width, whole_blocks


@triton.jit(do_not_specialize=("T", "L", "D", "N", "R", "ids_stride", "x_t", "x_g", "x_d", "a_l", "a_g", "a_r", "a_d",
                               "b_l", "b_g", "b_n", "b_r", "p_t", "p_g", "p_n", "o_t", "o_g", "o_n"),
            do_not_specialize_on_alignment=("ids", "plan", "ranks", "scalings"))  # fmt: skip
def delta_kernel(
    x, a, b, base, out, ids, plan, ranks, scalings,
    T: "i32", L: "i32", D: "i32", N: "i32", R: "i32", ids_stride: "i64",
    x_t: "i64", x_g: "i64", x_d: "i64", a_l: "i64", a_g: "i64", a_r: "i64", a_d: "i64",
    b_l: "i64", b_g: "i64", b_n: "i64", b_r: "i64",
    p_t: "i64", p_g: "i64", p_n: "i64", o_t: "i64", o_g: "i64", o_n: "i64",
    SIZES: tl.constexpr, COPY: tl.constexpr, MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr,
    X_VEC: tl.constexpr, X_UNIT: tl.constexpr, A_UNIT: tl.constexpr,
    B_VEC: tl.constexpr, B_UNIT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, N_STAGES: tl.constexpr,
):  # fmt: skip
    """Axes as in `shrink_kernel` and `expand_kernel`; a has x's vector width; r ≤ BLOCK_R."""
    tile = tl.program_id(0)
    group = tl.program_id(1)
    slot, rows, inside, active = tile_rows(tile, ids, plan, T, L, ids_stride, MODE, BLOCK_M, BLOCK_T, BLOCK_L)
    if slot > L or (slot == L and not COPY):
        return
    if X_UNIT == 2:
        x_d = 1
    if A_UNIT == 3:
        a_d = 1
        a_r = a_r * X_VEC
    if B_UNIT == 3:
        b_r = 1
        b_n = b_n * B_VEC
    elif B_UNIT == 2:
        b_n = 1
        b_r = b_r * B_VEC
    if O_UNIT == 2:
        o_n = 1
        p_n = 1
    OUT: tl.constexpr = out.dtype.element_ty
    HAS_BASE: tl.constexpr = base is not None
    MIXED: tl.constexpr = COPY and MODE == SINGLE
    wide_rows = rows.to(tl.int64)
    row_o = wide_rows * (o_t * O_VEC)
    row_p = wide_rows * (p_t * O_VEC)
    n_size = N * O_VEC
    o_base = out
    p_base = base
    b_base = b + slot.to(tl.int64) * (b_l * B_VEC)
    if SIZES is None:
        o_base += group * (o_g * O_VEC)
        if HAS_BASE:
            p_base += group * (p_g * O_VEC)
        b_base += group * (b_g * B_VEC)
    else:
        start_v, size_v = slice_bounds(group, SIZES)
        n_size = size_v * O_VEC
        o_base += start_v * O_VEC * o_n
        if HAS_BASE:
            p_base += start_v * O_VEC * p_n
        b_base += start_v * O_VEC * b_n
    if slot == L:
        copy_rows(p_base, o_base, p_n, o_n, row_p, row_o, inside, 0, n_size, BLOCK_M, BLOCK_N, HAS_BASE, OUT)
        return
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    a_base = a + slot.to(tl.int64) * (a_l * X_VEC) + group * (a_g * X_VEC)
    h = shrink_rows(
        x + group * (x_g * X_VEC), a_base, T, D * X_VEC, x_d, a_r, a_d, wide_rows * (x_t * X_VEC), active, 0, rank,
        BLOCK_M, BLOCK_R, BLOCK_K, CHUNK, 0, CHUNKS, CHUNKS == 1, EVEN_K, PRECISION,
        None, None, None, None, None, False,
    )  # fmt: skip
    h = tl.where((tl.arange(0, BLOCK_R) < rank)[None, :] & active[:, None], h, 0.0)
    high, low, scale = split(h, OUT)
    scaling = tl.load(scalings + slot)
    write = active
    if COPY:
        write = inside
    if B_UNIT == 3:
        load_rank = tl.minimum((rank + B_VEC - 1) // B_VEC * B_VEC, R // B_VEC * B_VEC)
    else:
        load_rank = rank
    if MODE == SCAN:  # no branch: Triton 3.6 fails to compile two such loops behind a scan of the ids
        expand_rows(
            high, low, scale, None, None, None, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
            load_rank, 0, n_size, scaling, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, MIXED, True, EVEN_N, N_STAGES, OUT, PRECISION,
        )  # fmt: skip
    elif load_rank == rank:
        expand_rows(
            high, low, scale, None, None, None, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
            load_rank, 0, n_size, scaling, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, MIXED, False, EVEN_N, N_STAGES, OUT, PRECISION,
        )  # fmt: skip
    else:
        expand_rows(
            high, low, scale, None, None, None, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
            load_rank, 0, n_size, scaling, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, MIXED, True, EVEN_N, 1, OUT, PRECISION,
        )  # fmt: skip


def delta(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    a: Tensor,  # [L, G or 1, r, D]
    b: Tensor,  # [L, G or 1, N, r]
    base: Tensor | None,  # [T, G, N]
    out: Tensor,  # [T, G, N]
    ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor,
    sizes: tuple | None,
    copy: bool,
    config: FusedConfig,
) -> None:
    """Write out = base + scaling · (x Aᵀ) Bᵀ; base may be out itself."""
    tokens, groups, out_features = out.shape
    slots, features, rank = a.shape[0], x.shape[2], a.shape[2]
    x_unit, a_unit = unit_axis(x, 2), unit_axis(a, 3)
    x_vec = math.gcd(vector_width(x, x_unit, features), vector_width(a, a_unit, features))
    b_unit, o_unit = unit_axis(b, 3, 2), unit_axis(out, 2)
    if base is not None and base.stride(2) != 1:
        o_unit = -1
    o_vec = vector_width(out, o_unit, out_features)
    if base is not None:
        o_vec = math.gcd(o_vec, vector_width(base, o_unit, out_features))
    b_vec = vector_width(b, b_unit, rank if b_unit == 3 else out_features)
    if b_unit == 2:
        o_vec = b_vec = math.gcd(o_vec, b_vec)
    slices = None
    if sizes is not None:
        groups = len(sizes)
        o_vec = math.gcd(o_vec, *sizes)
        if b_unit == 2:
            b_vec = o_vec
        slices = tuple([size // o_vec for size in sizes])
    xs, as_ = strides(x, x_unit, x_vec), strides(a, a_unit, x_vec)
    bs, os_ = strides(b, b_unit, b_vec), strides(out, o_unit, o_vec)
    ps = os_ if base is None else strides(base, o_unit, o_vec)
    launch(
        name,
        delta_kernel,
        (config.tiles, groups, 1),
        (
            x, a, b, base, out, ids, plan, ranks, scalings,
            tokens, slots, features // x_vec, out_features // o_vec, rank, ids.stride(0),
            xs[0], 0 if x.shape[1] == 1 else xs[1], xs[2],
            as_[0], 0 if a.shape[1] == 1 else as_[1], as_[2], as_[3],
            bs[0], 0 if b.shape[1] == 1 else bs[1], bs[2], bs[3], *ps, *os_,
        ),
        (
            slices, copy, config.mode, config.block_m, config.block_n, config.block_k, config.rank_block,
            config.chunk, config.chunks, config.block_t, config.block_l, x_vec, x_unit, a_unit, b_vec, b_unit,
            o_vec, o_unit, features % config.block_k == 0, whole_blocks(config.block_n, *(sizes or (out_features,))),
            config.precision, config.n_stages,
        ),
        config.num_warps,
        config.num_stages,
    )  # fmt: skip
