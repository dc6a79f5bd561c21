"""h = x Aᵀ: a program per (tile of rows, block of r, chunk of D, group)."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ShrinkConfig, cdiv, tile_count
from .tile import (
    SINGLE,
    dot,
    launch,
    scaled,
    slice_bounds,
    split,
    tile_rows,
    unit_axis,
    vector_width,
    wait_then_start_next,
)

_SIZES = ("T", "L", "D", "R", "ids_stride")


@triton.jit
def shrink_rows(
    x, a, T, D, x_d, a_r, a_d, row_offsets, active, r0, rank,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    first, last, ONE: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    out, h_c, keep, scaling, written, APART: tl.constexpr,
):  # fmt: skip
    """Sum of chunks first … last−1 of x Aᵀ for one tile, in an order that D alone fixes; APART: chunk c's sum to out + c · h_c.

    Pieces of 128 columns are summed from zero upwards; pieces are added in order to their chunk's sum, chunks in order
    to the total (ONE: there is one chunk, and no such sum to hold in registers). That makes a row's bits the same in
    every tile height, split or fused, and in csrc/delta.cu, which gives a warp a piece (one chain of products down a
    whole chunk would take it 0.6 µs).
    """
    k = tl.arange(0, BLOCK_K)
    r = r0 + tl.arange(0, BLOCK_R)
    x_ptrs = x + row_offsets[:, None] + (first * CHUNK + k[None, :]) * x_d
    a_ptrs = a + r[None, :] * a_r + (first * CHUNK + k[:, None]) * a_d
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    part = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    STEPS: tl.constexpr = CHUNK // BLOCK_K
    PIECE_STEPS: tl.constexpr = 128 // BLOCK_K
    begin = first * STEPS
    end = tl.minimum(last * STEPS, tl.cdiv(D, BLOCK_K))
    for step in range(begin, end):
        if EVEN_K:
            x_tile = tl.load(x_ptrs, mask=active[:, None], other=0.0)
            a_tile = tl.load(a_ptrs, mask=(r < rank)[None, :], other=0.0)
        else:
            inside = step * BLOCK_K + k < D
            x_tile = tl.load(x_ptrs, mask=active[:, None] & inside[None, :], other=0.0)
            a_tile = tl.load(a_ptrs, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
        acc = dot(x_tile, a_tile, acc, PRECISION)
        if step % PIECE_STEPS == PIECE_STEPS - 1:
            part = tl.fma(acc, 1.0, part)  # an add that Triton cannot fold into the product, which would make one chain of it
            acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        if not ONE:
            if step % STEPS == STEPS - 1:
                if APART:
                    tl.store(out + (step // STEPS) * h_c, tl.where(keep, part * scaling, 0.0), mask=written)
                else:
                    total += part
                part = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        x_ptrs += BLOCK_K * x_d
        a_ptrs += BLOCK_K * a_d
    if ONE:
        if end % PIECE_STEPS != 0:
            part = tl.fma(acc, 1.0, part)
        total = part
    elif end % STEPS != 0:
        if end % PIECE_STEPS != 0:
            part = tl.fma(acc, 1.0, part)
        if APART:
            tl.store(out + (end // STEPS) * h_c, tl.where(keep, part * scaling, 0.0), mask=written)
        else:
            total += part
    return total


@triton.jit
def repeat(v, WHOLE: tl.constexpr, TIMES: tl.constexpr):
    """[WHOLE // TIMES] → [WHOLE], each element so many times."""
    return tl.reshape(tl.broadcast_to(v[:, None], (WHOLE // TIMES, TIMES)), (WHOLE,))


@triton.jit(do_not_specialize=_SIZES + ("x_t", "x_g", "x_d", "a_l", "a_g", "a_r", "a_d", "h_c", "h_t", "h_g"),
            do_not_specialize_on_alignment=("ids", "plan", "ranks", "scalings"))  # fmt: skip
def shrink_kernel(
    x, a, h, ids, plan, ranks, scalings,
    T: "i32", L: "i32", D: "i32", R: "i32", ids_stride: "i64",
    x_t: "i64", x_g: "i64", x_d: "i64", a_l: "i64", a_g: "i64", a_r: "i64", a_d: "i64",
    h_c: "i64", h_t: "i64", h_g: "i64",
    SIZES: tl.constexpr, MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, FILL: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr, X_VEC: tl.constexpr, X_UNIT: tl.constexpr,
    A_VEC: tl.constexpr, A_UNIT: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """x's axes (t, g, d), a's (l, g, r, d); unit axes are 2 for x, 3 (d) or 2 (r) for a, −1 for none.

    SPAN: so many chunks a program, their sums at h[chunk]; 0: the sum of all. FILL: rows without an adapter and columns
    past the rank are written as zeros. SIZES: group g reads that slice of x's and a's last axis, in place of D.
    HALVES (then SPAN is 0): h is bf16, a row's high parts, then its low ones, as kernels/halves.py makes them; R and its strides are
    multiples of 8. MERGE: so many groups, which share a, have their rows side by side in a tile of BLOCK_M // MERGE tokens.
    """
    if PDL:
        wait_then_start_next()
    r_blocks = tl.cdiv(R, BLOCK_R)
    tile = tl.program_id(0) // r_blocks
    r0 = (tl.program_id(0) % r_blocks) * BLOCK_R
    first = tl.program_id(1) * SPAN
    last = tl.minimum(first + SPAN, CHUNKS)
    if SPAN == 0:
        last = CHUNKS
    group = tl.program_id(2) * MERGE
    slot, rows, inside, active = tile_rows(tile, ids, plan, T, L, ids_stride, MODE, BLOCK_M // MERGE, BLOCK_T, BLOCK_L)
    if MERGE > 1:
        rows = repeat(rows, BLOCK_M, MERGE)
        inside = repeat(inside.to(tl.int32), BLOCK_M, MERGE) != 0
        active = repeat(active.to(tl.int32), BLOCK_M, MERGE) != 0
    if slot > L or (slot == L and not FILL):
        return
    rank = R
    if slot == L:
        rank = 0
    elif ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    columns = r0 + tl.arange(0, BLOCK_R)
    wide_rows = rows.to(tl.int64)
    if HALVES:
        h_g = h_g // 8 * 8
        h_t = h_t // 8 * 8
        R = R // 8 * 8
    out = h + group * h_g + wide_rows[:, None] * h_t + columns[None, :]
    x_rows = wide_rows * (x_t * X_VEC)
    if MERGE > 1:
        nth = (tl.arange(0, BLOCK_M) % MERGE).to(tl.int64)
        out += nth[:, None] * h_g
        x_rows += nth * (x_g * X_VEC)
    if SPAN <= 1:
        out += first * h_c
    if r0 >= rank:
        if FILL:
            tl.store(out, tl.zeros((BLOCK_M, BLOCK_R), tl.float32), mask=inside[:, None] & (columns < R)[None, :])
        return
    if X_UNIT == 2:
        x_d = 1
        D = D * X_VEC
    if A_UNIT == 3:
        a_d = 1
        a_r = a_r * A_VEC
    elif A_UNIT == 2:
        a_r = 1
        a_d = a_d * A_VEC
    x_base = x + group * (x_g * X_VEC)
    a_base = a + slot.to(tl.int64) * (a_l * A_VEC) + group * (a_g * A_VEC)
    if SIZES is not None:
        start, size = slice_bounds(group, SIZES)
        x_base += start * X_VEC * x_d
        a_base += start * X_VEC * a_d
        D = size * X_VEC
    load_rank = rank
    if A_UNIT == 2:  # whole vectors: what lies past the rank only reaches columns that are zeroed below
        load_rank = tl.minimum((rank + A_VEC - 1) // A_VEC * A_VEC, R)
    scaling = 1.0
    if scalings is not None:
        scaling = tl.load(scalings + slot)
    keep = (columns < rank)[None, :] & active[:, None]
    written = active[:, None] & (columns < R)[None, :]
    if FILL:
        written = inside[:, None] & (columns < R)[None, :]
    total = shrink_rows(
        x_base, a_base, T, D, x_d, a_r, a_d, x_rows, active, r0, load_rank,
        BLOCK_M, BLOCK_R, BLOCK_K, CHUNK, first, last, SPAN == 1, EVEN_K, PRECISION,
        out, h_c, keep, scaling, written, SPAN > 1,
    )  # fmt: skip
    if HALVES:
        high, low, _ = split(tl.where(keep, scaled(total, scaling), 0.0), tl.bfloat16)
        tl.store(out, high, mask=written)
        tl.store(out + R, low, mask=written)
    elif SPAN <= 1:
        tl.store(out, tl.where(keep, total * scaling, 0.0), mask=written)


def strides(t: Tensor, unit: int, width: int) -> tuple:
    """t's strides in vectors; the unit axis and axes of size 1 carry no stride to divide."""
    return tuple([s if axis == unit else s // width for axis, s in enumerate(t.stride())])


def shrink(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    a: Tensor,  # [L, G or 1, r, D]
    h: Tensor,  # [chunks, T, G, r] float32 with unit last stride; or [T, G, 2, r] bf16, dense, r a multiple of 8
    ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    sizes: tuple | None,
    fill: bool,
    config: ShrinkConfig,
) -> None:
    """Write h = scaling · x Aᵀ, all of it (one chunk) or chunk by chunk (config.split); bf16: its high and low parts, all of it."""
    in_halves = h.dtype == torch.bfloat16
    if in_halves:
        h = h[None, :, :, 0]
    tokens, groups = h.shape[1], h.shape[2]
    slots, features, rank = a.shape[0], x.shape[2], a.shape[2]
    x_unit, a_unit = unit_axis(x, 2), unit_axis(a, 3, 2)
    x_vec = vector_width(x, x_unit, features)
    a_vec = vector_width(a, a_unit, features if a_unit == 3 else rank)
    if a_unit == 3:
        x_vec = a_vec = min(x_vec, a_vec)
    even = features % config.block_k == 0
    slices, span = None, config.span if config.split else 0
    if sizes is not None:
        span = min(span, 1)  # a short slice lacks the last chunks, whose sums must be written all the same
        x_vec = math.gcd(x_vec, *sizes)
        if a_unit == 3:
            a_vec = x_vec
        slices = tuple([size // x_vec for size in sizes])
        even = all(size % config.block_k == 0 for size in sizes)
    xs, as_ = strides(x, x_unit, x_vec), strides(a, a_unit, a_vec)
    merge = config.merge if x.shape[1] == groups and a.shape[1] == 1 and sizes is None and groups % config.merge == 0 else 1
    tiles = config.tiles if merge == 1 else tile_count(config.block_m // merge, tokens, slots, config.mode == SINGLE.value)
    launch(
        name,
        shrink_kernel,
        (tiles * cdiv(rank, config.block_r), cdiv(config.chunks, span) if span else 1, groups // merge),
        (
            x, a, h, ids, plan, ranks, scalings,
            tokens, slots, features // x_vec if x_unit == 2 else features, rank, ids.stride(0),
            xs[0], 0 if x.shape[1] == 1 else xs[1], xs[2],
            as_[0], 0 if a.shape[1] == 1 else as_[1], as_[2], as_[3],
            h.stride(0), h.stride(1), h.stride(2),
        ),
        (
            slices, config.mode, config.block_m, config.block_r, config.block_k, config.chunk, config.chunks,
            span, fill, in_halves, config.block_t, config.block_l, x_vec, x_unit, a_vec, a_unit, even,
            config.precision, config.pdl, merge,
        ),
        config.num_warps,
        config.num_stages,
        config.early,
    )  # fmt: skip
