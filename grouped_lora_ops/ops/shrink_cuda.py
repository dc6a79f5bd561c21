"""h = scaling · x Aᵀ of many rows as they lie, every adapter's A at once, in one launch of csrc/shrink.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cuda, driver
from ..launch import CudaShrinkConfig, ShrinkConfig, cdiv
from .common import rows_of_vectors

IDS64, HALVES, FILL = 1, 2, 4
# struct Params: tensor maps of A and x; h ids ranks scalings; strides; sizes and flags
LAYOUT = "P15QP15Q4P4q16I"
BOX_K, MAX_SHARED = 64, 227 << 10


def fits(x: Tensor, a: Tensor, h: Tensor, sizes: tuple | None, config: CudaShrinkConfig) -> bool:
    """Whether the kernel can read and write these layouts (as `shrink` takes them): bf16, unit strides along D, rows that start at
    multiples of 16 bytes; several adapters of the rank that the kernel keeps, or one of a lower rank."""
    slots, rank = a.shape[0], a.shape[2]
    if sizes is not None or rank == 0 or x.dtype != torch.bfloat16 or a.dtype != torch.bfloat16 or x.shape[2] == 0:
        return False
    if rank > config.keep or (slots > 1 and rank != config.keep):
        return False
    if h.dtype == torch.bfloat16 and not (config.whole and rank % 8 == 0):
        return False
    if not (rows_of_vectors(x, 2) and rows_of_vectors(a, 3)):
        return False
    return all(t.stride(i) for t in (x, a) for i in range(t.dim()) if t.shape[i] > 1)  # a map has no stride of 0


def shrink(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    a: Tensor,  # [L, G or 1, r, D]
    h: Tensor,  # [chunks, T, G, r] float32, dense; or [T, G, 2, r] bf16, dense, r a multiple of 8
    ids: Tensor,
    ranks: Tensor | None,
    scalings: Tensor | None,
    fill: bool,
    config: ShrinkConfig,
) -> bool:
    """Write h as kernels.shrink.shrink does, with the same bits. False where this GPU has no such kernel."""
    kind = config.cuda
    module = cuda.module(name, "shrink", x.device.index)
    if module is None or not module.constant(name, "available") or not driver.has_tensor_maps():
        return False
    in_halves = h.dtype == torch.bfloat16
    if in_halves:
        h = h[None, :, :, 0]
    tokens, groups, rank = h.shape[1:]
    slots, features = a.shape[0], x.shape[2]
    function = module.function(name, f"shrink_{kind.kernel}", MAX_SHARED)
    flags = (IDS64 if ids.dtype.itemsize == 8 else 0) | (HALVES if in_halves else 0) | (FILL if fill else 0)
    span = 0 if kind.whole else kind.span
    tiles, parts = cdiv(tokens, kind.rows), cdiv(config.chunks, span) if span else 1
    together = min(slots, kind.columns // kind.keep)
    turns = cdiv(slots, together)
    a_words = driver.tensor_map(a, (3, 2, 1, 0), (BOX_K, rank, 1, together))
    x_words = driver.tensor_map(x, (2, 0, 1), (BOX_K, kind.rows, 1), pad=4)
    values = (
        a, *a_words[1:], x, *x_words[1:], h, ids, ranks, scalings,
        ids.stride(0), h.stride(0), h.stride(1), h.stride(2),
        tokens, slots, features, rank, x.shape[1], a.shape[1], tiles, groups, turns, config.chunk, config.chunks, span, flags, kind.stages, *[0] * 2,
    )  # fmt: skip
    cuda.launch(function, (tiles * groups * turns * parts, 1, 1), kind.threads, LAYOUT, values, shared=kind.shared, pdl=config.early)
    return True
