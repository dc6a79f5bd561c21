"""Tiles whose rows have different adapters: which ones meet in a tile, and each one's product for its own rows."""

import triton
import triton.language as tl

from .expert_expand import load_b
from .tile import dot_split, scaled, split


@triton.jit
def slot_rank(ranks, slot, R, B_VEC: tl.constexpr, R_UNIT: tl.constexpr):
    """(rank of a slot, how far its B is loaded): whole vectors where B's elements lie side by side along r (R_UNIT)."""
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    load_rank = rank
    if R_UNIT:
        load_rank = tl.minimum((rank + B_VEC - 1) // B_VEC * B_VEC, R // B_VEC * B_VEC)
    return rank, load_rank


@triton.jit
def slot_of_rows(ids, rows, inside, ids_stride, L):
    """Rows' slots, L for none. ids None: slot 0 for all rows."""
    if ids is None:
        bucket = tl.where(inside, 0, L)
    else:
        ident = tl.load(ids + rows * ids_stride, mask=inside, other=-1)
        bucket = tl.where((ident >= 0) & (ident < L), ident, L).to(tl.int32)
    return bucket


@triton.jit
def slots_of_rows(ids, rows, inside, ids_stride, L, BLOCK_M: tl.constexpr):
    """(bucket, first, order, count): rows' slots, L for none; which rows are the first of their slot, their numbers, how many."""
    lanes = tl.arange(0, BLOCK_M)
    bucket = slot_of_rows(ids, rows, inside, ids_stride, L)
    earlier = (bucket[None, :] == bucket[:, None]) & (lanes[None, :] < lanes[:, None])
    first = (bucket < L) & (tl.sum(earlier.to(tl.int32), 1) == 0)
    count = first.to(tl.int32)
    return bucket, first, tl.cumsum(count, 0) - 1, tl.sum(count, 0)


@triton.jit
def slots_in_order(ids, rows, before, inside, follows, ids_stride, L):
    """`slots_of_rows` for rows that lie slot by slot: a slot's first row is one whose row before, where one follows another,
    has another slot. (128 × 128 comparisons are 3000 instructions ahead of W.)"""
    bucket = slot_of_rows(ids, rows, inside, ids_stride, L)
    first = (bucket < L) & (bucket != slot_of_rows(ids, before, follows, ids_stride, L))
    count = first.to(tl.int32)
    return bucket, first, tl.cumsum(count, 0) - 1, tl.sum(count, 0)


@triton.jit
def nth_slot(bucket, first, order, i):
    return tl.max(tl.where(first & (order == i), bucket, 0), 0)


@triton.jit
def mixed_rows(
    h, b, ranks, scalings, bucket, first, order, count, wide_rows, n, n_in, L, R, h_c, h_t, h_offset, b_l, b_offset, b_n, b_r,
    acc, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, R_BLOCKS: tl.constexpr, H_VEC: tl.constexpr,
    B_VEC: tl.constexpr, R_UNIT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + scaling · h Bᵀ where every row has an adapter of its own: the tile times each adapter's B, of which a row keeps
    its own adapter's, so that no other B reaches it, whatever it holds."""
    live = bucket < L
    row_ranks = tl.where(live, R, 0)
    if ranks is not None:
        row_ranks = tl.minimum(tl.maximum(tl.load(ranks + bucket, mask=live, other=0), 0), R)
    scaling = tl.full((BLOCK_M,), 1.0, tl.float32)
    if scalings is not None:
        scaling = tl.load(scalings + bucket, mask=live, other=0.0)
    vectors = tl.minimum((row_ranks + H_VEC - 1) // H_VEC * H_VEC, R // H_VEC * H_VEC)
    for block in tl.static_range(R_BLOCKS):
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        ptrs = h + h_offset + wide_rows[:, None] * (h_t * H_VEC) + r[None, :]
        mask = r[None, :] < vectors[:, None]
        h_tile = tl.load(ptrs, mask=mask, other=0.0)
        for c in tl.static_range(1, CHUNKS):
            h_tile += tl.load(ptrs + c * (h_c * H_VEC), mask=mask, other=0.0)
        h_tile = tl.where(r[None, :] < row_ranks[:, None], scaled(h_tile, scaling[:, None]), 0.0)
        high, low, scale = split(h_tile, b.dtype.element_ty)
        for i in tl.range(0, count, num_stages=STAGES):
            slot = nth_slot(bucket, first, order, i)
            rank, load_rank = slot_rank(ranks, slot, R, B_VEC, R_UNIT)
            b_base = b + slot.to(tl.int64) * (b_l * B_VEC) + b_offset
            b_tile = load_b(b_base, n, n_in, r, b_n, b_r, rank, load_rank)
            acc = tl.where((bucket == slot)[:, None], dot_split(high, low, scale, b_tile, acc, PRECISION), acc)
    return acc
