"""y = x Wᵀ + scaling · h Bᵀ + bias for a few rows, in one launch of csrc/stream.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cuda, driver
from . import linear_cuda
from .common import slice_starts, stride

THREADS, MAX_ROWS, MAX_SLICES, MAX_SLOTS, BOX_N, BOX_K = 288, 64, 8, 1024, 32, 64
IDS64, BIAS32, OVERLAP = 1, 2, 4
LAYOUT = "P15QP15Q7P10q30I"


def fits(x, w, h, b, bias, out, sizes) -> bool:
    """As linear_cuda.fits, for x [T, G or 1, D], w [1, G or 1, N, D], h [chunks, T, G' or 1, r] float32, b [L, 1, G' or 1, N, r]."""
    return x.shape[0] <= MAX_ROWS and out.dtype == torch.bfloat16 and not linear_cuda.transposed(w) and (
        h is None or h.shape[3] <= 64) and all(x.stride(axis) for axis in (0, 1) if x.shape[axis] > 1) and linear_cuda.fits(x, w, h, b, bias, out, sizes)


def product(name: str, x: Tensor, w: Tensor, h: Tensor | None, b: Tensor | None, bias: Tensor | None, out: Tensor,
            ids: Tensor | None, ranks: Tensor | None, scalings: Tensor | None, sizes: tuple | None, overlap: bool) -> bool:
    module = cuda.module(name, "stream", out.device.index)
    if module is None or not module.constant(name, "available") or not driver.has_tensor_maps():
        return False
    rows, groups, columns = out.shape
    tiles = next(t for t in (1, 2, 4) if rows <= 16 * t)
    rank = 0 if h is None else h.shape[3]
    ranks_at_once = next(r for r in (0, 16, 32, 64) if r >= rank)
    shared = module.constant(name, f"shared_bytes_{tiles}")
    function = module.function(name, f"stream_{tiles}_{ranks_at_once}", shared)
    flags = IDS64 if ids is not None and ids.dtype.itemsize == 8 else 0
    flags |= BIAS32 if bias is not None and bias.dtype == torch.float32 else 0
    flags |= OVERLAP if overlap and h is not None else 0
    words = driver.tensor_map(w, (3, 2, 1, 0), (BOX_K, BOX_N, 1, 1))
    x_words = driver.tensor_map(x, (2, 0, 1), (BOX_K, 16 * tiles, 1), pad=4)
    blocks = groups * -(-columns // BOX_N) if sizes is None else sum(-(-size // BOX_N) for size in sizes)
    values = (
        w, *words[1:], x, *x_words[1:], h, b, bias, out, ids, ranks, scalings,
        0 if ids is None else ids.stride(0), stride(h, 0), stride(h, 1), stride(h, 2), stride(b, 0), stride(b, 2), stride(b, 3), stride(bias, 1),
        stride(out, 0), stride(out, 1), rows, 0 if b is None else b.shape[0], x.shape[2], columns, rank, groups, x.shape[1], 0 if h is None else h.shape[0], flags,
        0 if sizes is None else len(sizes), *slice_starts(sizes, MAX_SLICES), *[0] * 11,
    )  # fmt: skip
    cuda.launch(function, (blocks, 1, 1), THREADS, LAYOUT, values, shared=shared, pdl=bool(flags & OVERLAP))
    return True
