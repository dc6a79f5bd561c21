"""y = x Wᵀ + scaling · h Bᵀ + bias for many rows, dense or routed to experts, in one launch of csrc/linear.cu."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import cuda, driver
from ..launch import cdiv
from .common import rows_of_vectors, slice_starts, stride

THREADS, MAX_SLICES, MAX_SLOTS, MAX_EXPERTS = 384, 8, 1024, 1024
ROWS, SORTED, EXPERT = 0, 1, 2  # modes: rows as they lie; in the plan's order; by experts in the plan's order, masked routes behind
IDS64, BIAS32, STAGED, WEIGHTS32, OVERLAP, IN_ORDER, OUT32, BOXES = 1, 2, 4, 8, 16, 32, 64, 128
# struct Params: tensor maps of W, x, x's tail, B; x h b bias out ids plan ranks weights; strides; x_t, sizes, flags; starts of slices; taken,
# tail, scales and their strides
LAYOUT = "P15QP15QP15QP15Q9P12q28IP2IP4I"
BOX_M = 128  # rows of x that TMA brings at once where they follow one another
BOX_N, BOX_K = 128, 64  # of W's rows and columns that TMA brings at once; 64 × 64 where its elements lie side by side along N


def transposed(w: Tensor) -> bool:
    """Whether W's elements lie side by side along N, as in the gradient of x."""
    return w.stride(-1) != 1 and w.stride(-2) == 1


def fits(
    x: Tensor,  # [M, G or 1, D]
    w: Tensor,  # [E, G, N, D]
    h: Tensor | None,  # as `product` takes it
    b: Tensor | None,  # [L, E|1, G', N, r]
    bias: Tensor | None,  # [E, G, N]
    out: Tensor,  # [M, G, N]
    sizes: tuple | None,
    w_dtype: torch.dtype = torch.bfloat16,
) -> bool:
    """Whether the kernel can read and write these layouts: bf16 (W: w_dtype), unit strides along D (W, B: or along N, both), rows that
    start at multiples of 16 bytes, and sizes that are multiples of 8."""
    if not all(t is None or t.dtype == torch.bfloat16 for t in (x, b)) or w.dtype != w_dtype or out.dtype not in (torch.bfloat16, torch.float32):
        return False
    along_n = transposed(w)
    widths = (out.shape[2],) if sizes is None else sizes
    if len(widths) > MAX_SLICES or any(width % 8 for width in widths) or x.shape[2] % 8 or w.shape[0] > MAX_EXPERTS:
        return False
    if x.shape[2] == 0:  # a tensor map has no axis of size 0
        return False
    if not (rows_of_vectors(x, 2) and rows_of_vectors(out, 2) and rows_of_vectors(w, 2 if along_n else 3)) or 0 in w.stride():
        return False
    if x.stride(0) * 2 >= 1 << 32 or not (bias is None or bias.stride(2) == 1 or bias.shape[2] == 1):
        return False
    if h is None:
        return True
    dense_h = (h if h.dtype == torch.bfloat16 else h[0]).is_contiguous()
    return dense_h and b.shape[4] % 8 == 0 and b.shape[0] <= MAX_SLOTS and rows_of_vectors(b, 3 if along_n else 4)


def loaded(name: str, like: Tensor, stem: str = "linear") -> cuda.Module | None:
    """The kernels of csrc/<stem>.cu for a tensor's device, or None where this GPU has none."""
    module = cuda.module(name, stem, like.device.index)
    there = module is not None and module.constant(name, "available") and driver.has_tensor_maps()
    return module if there else None


def _map_of(w: Tensor, along_n: bool, columns: int) -> list[int]:
    """The words of W's tensor map, axes (d, n, group, expert) or (n, d, group, expert)."""
    order = (2, 3, 1, 0) if along_n else (3, 2, 1, 0)
    box = (64, 64, 1, 1) if along_n else (BOX_K, min(BOX_N, columns), 1, 1)
    return driver.tensor_map(w, order, box)


def _map_of_b(b: Tensor, along_n: bool, rank_block: int, columns: int) -> list[int] | None:
    """Of B [L, E|1, G', N, r], axes (r, n through all groups, expert, slot) or (n, r through all groups, …); None where threads copy it,
    as groups that do not lie one behind the other."""
    unit, other = (3, 4) if along_n else (4, 3)
    apart = b.shape[2] > 1 and b.stride(2) != b.shape[other] * b.stride(other)
    if apart or any(b.stride(axis) == 0 and b.shape[axis] > 1 for axis in (0, 1, other)):
        return None
    rows = b.as_strided((*b.shape[:2], b.shape[2] * b.shape[other], b.shape[unit]), (*b.stride()[:2], b.stride(other), 1))
    return driver.tensor_map(rows, (3, 2, 1, 0), (64, min(rank_block, 64), 1, 1) if along_n else (BOX_K, min(BOX_N, columns), 1, 1))


def counter(device: torch.device) -> Tensor:
    """What blocks take their tiles from: of one launch."""
    return driver.zeros((1,), torch.int32, device)


class Tiling(NamedTuple):
    """How the work is cut and dealt out."""

    mode: int
    rank_block: int  # columns of h whose high parts are all added before their low ones
    tile_group: int  # so many tiles of rows take turns at a block of W
    programs: int  # blocks
    overlap: bool  # programmatic dependent launch
    columns: int = 256  # of a tile: 256, 128 or 64


def product(
    name: str,
    x: Tensor,  # [M or M / x_div, G or 1, D]
    w: Tensor,  # [E, G or 1, N, D]; dense: E = 1
    h: Tensor | None,  # [chunks, M or M / h_div, G' or 1, r] float32; or [M, G' or 1, 2, r] bf16, scaling · h in two parts
    b: Tensor | None,  # [L, E|1, G' or 1, N, r]
    bias: Tensor | None,  # [E, G or 1, N]
    out: Tensor,  # [M, G, N]; one group of y from two of x and W, or of h and B: their sum
    ids: Tensor | None,  # adapters of the tokens; None: slot 0
    divs: tuple[int, int, int],  # rows of y that share a row of x, a row of h, and an id
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,  # [M]
    staged: bool,
    sizes: tuple | None,
    tiling: Tiling,
    taken: Tensor | None = None,  # EXPERT: `counter`, made ahead of what the launch may overlap
    scales: Tensor | None = None,  # [G or 1, ⌈N/128⌉, ⌈D/128⌉] float32: W is w · scales, by tiles of 128 columns
) -> bool:
    """Write out = (x Wᵀ + scaling · h Bᵀ + bias) · weight; staged: round(x Wᵀ + …) + bias · weight, rounded again. False where
    this GPU has no such kernel.
    """
    mode, rank_block, tile_group, programs, overlap, tile_columns = tiling
    x_div, h_div, id_div = divs
    module = loaded(name, out)
    if module is None:
        return False
    rows, groups, columns = out.shape
    sums = (w.shape[1], 1 if b is None else b.shape[2]) if groups == 1 and sizes is None else (1, 1)
    along_n = transposed(w)
    shared = module.constant(name, f"shared_bytes_{tile_columns}")
    words = (str(tile_columns), "" if scales is None else "_scaled", "_experts" if mode == EXPERT else "", "_transposed" if along_n else "")
    kernel = f"linear_bf16_{''.join(words)}"
    function = module.function(name, kernel, shared)

    flags = IDS64 if ids is not None and ids.dtype.itemsize == 8 else 0
    flags |= BIAS32 if bias is not None and bias.dtype == torch.float32 else 0
    flags |= OUT32 if out.dtype == torch.float32 else 0
    flags |= WEIGHTS32 if weights is not None and weights.dtype == torch.float32 else 0
    flags |= (STAGED if staged else 0) | (OVERLAP if overlap and h is not None else 0)
    words, both = _map_of(w, along_n, tile_columns), h
    if mode == EXPERT and taken is None:
        taken = counter(x.device)
    if h is not None and h.dtype == torch.float32:
        from ..kernels.halves import halves

        both = driver.empty((*h.shape[1:3], 2, h.shape[3]), x.dtype, x.device)
        halves(name, h, both, ids, id_div // h_div, scalings, b.shape[0], overlap, overlap and mode != EXPERT)
    b_words = None if h is None else _map_of_b(b, along_n, rank_block, tile_columns)
    flags |= 0 if b_words is None else BOXES
    b_words = b_words or [0] * 16
    x_words, tail_words, tail = [0] * 16, [0] * 16, cdiv(rows % BOX_M, 8) * 8
    if mode == ROWS and x_div == 1 and all(x.stride(axis) for axis in (0, 1) if x.shape[axis] > 1):  # a map has no stride of 0
        flags |= IN_ORDER
        # a tile's last rows by a box of their own: each row outside the tensor costs TMA 1.3 ns (T = 129: 34 µs, 160 rows 28, 256 23)
        if rows >= BOX_M:
            x_words = driver.tensor_map(x, (2, 0, 1), (BOX_K, BOX_M, 1), pad=4)
        if tail:
            tail_words = driver.tensor_map(x, (2, 0, 1), (BOX_K, tail, 1), pad=4)
    values = (
        w, *words[1:], x if x_words[0] else None, *x_words[1:], x if tail_words[0] else None, *tail_words[1:],
        b if b_words[0] else None, *b_words[1:], x, both, b, bias, out, ids, plan, ranks, weights,
        0 if ids is None else ids.stride(0), stride(x, 1), stride(both, 1),
        stride(b, 0), stride(b, 1), stride(b, 2), 0 if b is None else b.stride(4 if along_n else 3),
        stride(bias, 0), stride(bias, 1), stride(out, 0), stride(out, 1), 0 if weights is None else weights.stride(0),
        2 * stride(x, 0), 2 * stride(both, 0), rows, 0 if h is None else b.shape[0], x.shape[2], columns, 0 if h is None else h.shape[3], w.shape[0],
        *divs, groups, *sums, rank_block, mode, tile_group, flags,
        0 if sizes is None else len(sizes), *slice_starts(sizes, MAX_SLICES),
        taken, tail, 0, scales, *((0,) * 3 if scales is None else (stride(scales, 0), *scales.stride()[1:])), 0,
    )  # fmt: skip
    cuda.launch(function, (programs, 1, 1), THREADS, LAYOUT, values, shared=shared, pdl=bool(flags & OVERLAP))
    return True
