"""out[l, g] = s_l Σ_t narrow[t, g]ᵀ wide[t, g]: partial sums over chunks of a slot's rows, then added in order."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch import WgradConfig, cdiv
from .shrink import strides
from .tile import (
    SINGLE,
    dot_split,
    launch,
    pick_tile,
    round_to,
    slice_bounds,
    split,
    unit_axis,
    vector_width,
)


@triton.jit
def slot_chunk(tile, plan, T, L, MODE: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr):
    """(slot, first position, one past the last) of a chunk of sorted rows; slot ≥ L where there is none."""
    if MODE == SINGLE:
        return tile * 0, tile * CHUNK_ROWS, tl.minimum((tile + 1) * CHUNK_ROWS, T)
    else:
        lanes = tl.arange(0, BLOCK_L)
        starts = tl.load(plan + T + lanes, mask=lanes < L, other=0)
        ends = tl.load(plan + T + lanes + 1, mask=lanes < L, other=0)
        tiles = (tl.maximum(ends - starts, 0) + CHUNK_ROWS - 1) // CHUNK_ROWS
        slot, index = pick_tile(tl.cumsum(tiles, 0), tiles, tile, lanes)
        first = tl.sum(tl.where(lanes == slot, starts, 0), 0) + index * CHUNK_ROWS
        last = tl.minimum(first + CHUNK_ROWS, tl.sum(tl.where(lanes == slot, ends, 0), 0))
        return slot, tl.maximum(first, 0), tl.minimum(last, T)


@triton.jit(do_not_specialize=("T", "L", "W", "R", "ids_stride", "n_t", "n_g", "w_t", "w_g", "w_w"),
            do_not_specialize_on_alignment=("ids", "plan", "ranks"))  # fmt: skip
def wgrad_kernel(
    narrow, wide, parts, ids, plan, ranks,
    T: "i32", L: "i32", W: "i32", R: "i32", ids_stride: "i64",
    n_t: "i64", n_g: "i64", w_t: "i64", w_g: "i64", w_w: "i64",
    SIZES: tl.constexpr, GROUPS: tl.constexpr, SUM_GROUPS: tl.constexpr, MODE: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr, W_VEC: tl.constexpr, W_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[chunk, g, r, w] = Σ over the chunk's rows; SUM_GROUPS: over the groups too. Grid (W blocks, r blocks · g, chunks)."""
    chunk = tl.program_id(2)
    group = tl.program_id(1) % GROUPS
    r = (tl.program_id(1) // GROUPS) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    slot, first, last = slot_chunk(chunk, plan, T, L, MODE, CHUNK_ROWS, BLOCK_L)
    if slot >= L:
        return
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    if W_UNIT == 2:
        w_w = 1
    size = W * W_VEC
    start = 0
    if SIZES is not None:
        start_v, size_v = slice_bounds(group, SIZES)
        start = start_v * W_VEC
        size = size_v * W_VEC
    w_in = w < size
    acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    DTYPE: tl.constexpr = wide.dtype.element_ty
    for s in range(SUM_GROUPS):
        w_base = wide + start * w_w
        if SIZES is None:
            w_base += (group + s) * (w_g * W_VEC)
        for t0 in range(first, last, BLOCK_T):
            position = t0 + tl.arange(0, BLOCK_T)
            live = position < last
            if MODE == SINGLE:
                rows = position
                live = live & (tl.load(ids + rows * ids_stride, mask=live, other=-1) == 0)
            else:
                rows = tl.load(plan + position, mask=live, other=0)
                live = live & (rows >= 0) & (rows < T)
            rows = rows.to(tl.int64)
            n_tile = tl.load(
                narrow + (group + s) * n_g + rows[None, :] * n_t + r[:, None],
                mask=(r < rank)[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            w_tile = tl.load(
                w_base + rows[:, None] * (w_t * W_VEC) + w[None, :] * w_w, mask=live[:, None] & w_in[None, :], other=0.0
            )
            high, low, scale = split(n_tile, DTYPE)
            acc = dot_split(high, low, scale, w_tile, acc, PRECISION)
    out = parts + ((chunk * GROUPS + group).to(tl.int64) * R + r[:, None]) * size + w[None, :]
    if SIZES is not None:
        out = parts + (chunk.to(tl.int64) * R + r[:, None]) * (W * W_VEC) + (start + w)[None, :]
    tl.store(out, acc, mask=(r < rank)[:, None] & w_in[None, :])


@triton.jit(do_not_specialize=("T", "L", "W", "R", "chunks", "o_l", "o_g", "o_r", "o_w"),
            do_not_specialize_on_alignment=("plan", "ranks", "scalings"))  # fmt: skip
def wgrad_sum_kernel(
    parts, out, plan, ranks, scalings,
    T: "i32", L: "i32", W: "i32", R: "i32", chunks: "i32", o_l: "i64", o_g: "i64", o_r: "i64", o_w: "i64",
    GROUPS: tl.constexpr, MODE: tl.constexpr, CHUNK_ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """out[slot, g] = s_slot · the sum of the slot's parts in order; zeros where it has none and past its rank."""
    slot = tl.program_id(2)
    group = tl.program_id(1) % GROUPS
    r = (tl.program_id(1) // GROUPS) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    if MODE == SINGLE:
        first = 0
        last = chunks
    else:
        lanes = tl.arange(0, BLOCK_L)
        starts = tl.load(plan + T + lanes, mask=lanes < L, other=0)
        ends = tl.load(plan + T + lanes + 1, mask=lanes < L, other=0)
        tiles = (tl.maximum(ends - starts, 0) + CHUNK_ROWS - 1) // CHUNK_ROWS
        first = tl.sum(tl.where(lanes < slot, tiles, 0), 0)
        last = tl.minimum(first + tl.sum(tl.where(lanes == slot, tiles, 0), 0), chunks)
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    inside = (r < R)[:, None] & (w < W)[None, :]
    for chunk in range(first, last):
        part = parts + ((chunk * GROUPS + group).to(tl.int64) * R + r[:, None]) * W + w[None, :]
        acc += tl.load(part, mask=inside & (r < rank)[:, None], other=0.0)
    if scalings is not None:
        acc = tl.where(acc == 0, 0.0, acc * tl.load(scalings + slot))  # a slot without rows may hold any scaling
    o_ptrs = out + slot.to(tl.int64) * o_l + group * o_g + r[:, None] * o_r + w[None, :] * o_w
    tl.store(o_ptrs, round_to(acc, out.dtype.element_ty), mask=inside)


def wgrad(
    name: str,
    narrow: Tensor,  # [T, G or 1, r] float32 with unit last stride
    wide: Tensor,  # [T, G or 1, W]
    parts: Tensor,  # scratch, [chunks, G or 1, r, W] float32
    out: Tensor,  # [L, G or 1, r, W], any strides
    ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    sizes: tuple | None,
    sum_groups: int,
    config: WgradConfig,
) -> None:
    """Two launches: the parts, then their sum. With sizes, group g of narrow belongs to slice g of wide and out."""
    tokens, slots, rank, width = wide.shape[0], out.shape[0], out.shape[2], out.shape[3]
    w_unit = unit_axis(wide, 2)
    vec = vector_width(wide, w_unit, width)
    slices, groups, widest = None, out.shape[1], width
    if sizes is not None:
        vec = math.gcd(vec, *sizes)
        slices, groups, widest = tuple([size // vec for size in sizes]), len(sizes), max(sizes)
    ws = strides(wide, w_unit, vec)
    r_blocks = cdiv(rank, config.block_r)
    launch(
        name,
        wgrad_kernel,
        (cdiv(widest, config.block_w), r_blocks * groups, config.tiles),
        (
            narrow, wide, parts, ids, plan, ranks,
            tokens, slots, width // vec, rank, ids.stride(0),
            narrow.stride(0), 0 if narrow.shape[1] == 1 else narrow.stride(1),
            ws[0], 0 if wide.shape[1] == 1 else ws[1], ws[2],
        ),
        (
            slices, groups, sum_groups, config.mode, config.chunk_rows, config.block_t, config.block_w,
            config.block_r, config.block_l, vec, w_unit, config.precision,
        ),
        config.num_warps,
        config.num_stages,
    )  # fmt: skip
    launch(
        name,
        wgrad_sum_kernel,
        (cdiv(width, config.block_w), r_blocks * out.shape[1], slots),
        (parts, out, plan, ranks, scalings, tokens, slots, width, rank, config.tiles, *out.stride()),
        (out.shape[1], config.mode, config.chunk_rows, config.block_w, config.block_r, config.block_l),
        4,
        1,
    )
