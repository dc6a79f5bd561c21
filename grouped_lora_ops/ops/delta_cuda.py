"""y = base + scaling · (x Aᵀ) Bᵀ for a few rows, in one launch of csrc/delta.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cuda
from ..launch import CUDA_STAGE, CudaConfig, chunk_of, chunks_of
from .common import rows_of_vectors, slice_starts, stride

THREADS, MAX_SLICES = 256, 8
IDS64, COPY, OVERLAP = 1, 2, 4
# struct Params: x a b base out ids ranks scalings; strides; sizes and flags; where slices start
LAYOUT = "8P13q11I9I"


def fits(x: Tensor, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor, sizes: tuple | None) -> bool:
    """Whether the kernel can read and write these layouts: unit last strides, and rows that start at 16 bytes (b: 4)."""
    if not all(rows_of_vectors(t) for t in (x, a, base, out)) or not (b.stride(-1) == 1 or b.shape[-1] == 1):
        return False
    if sizes is not None and len(sizes) > MAX_SLICES:
        return False
    if out.shape[1] > 1 and x.shape[1] == 1 and a.shape[1] == 1:
        return False  # all groups share one h
    widths = sizes if sizes is not None else (out.shape[2],)
    aligned = b.data_ptr() % 4 == 0 and not any(b.shape[i] > 1 and b.stride(i) % 2 for i in range(3))
    return aligned and not any(width % 8 for width in widths)


def delta(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    a: Tensor,  # [L, G or 1, r, D]
    b: Tensor,  # [L, G or 1, N, r]
    base: Tensor | None,  # [T, G, N]
    out: Tensor,  # [T, G, N]
    ids: Tensor,
    ranks: Tensor | None,
    scalings: Tensor,
    sizes: tuple | None,
    copy: bool,
    config: CudaConfig,
) -> bool:
    """Write out = base + scaling · (x Aᵀ) Bᵀ; base may be out itself. False where this GPU has no such kernel.

    The layouts must be such as `fits` accepts.
    """
    module = cuda.module(name, "delta", out.device.index)
    if module is None:
        return False
    tokens, groups, columns = out.shape
    slots, rank, features = a.shape[0], a.shape[2], x.shape[2]
    groups = groups if sizes is None else len(sizes)
    kernel = f"{'fp16' if x.dtype == torch.float16 else 'bf16'}_{config.kernel}"
    shared = module.constant(name, f"shared_delta_{kernel}")
    function = module.function(name, f"delta_{kernel}", shared, config.cluster > 8)
    if config.cluster > 1 and chunk_of(features) <= CUDA_STAGE:
        shared = module.constant(name, f"one_stage_delta_{kernel}")

    flags = (IDS64 if ids.dtype.itemsize == 8 else 0) | (COPY if copy else 0) | (OVERLAP if config.overlap else 0)
    values = (
        x, a, b, base, out, ids, ranks, scalings,
        ids.stride(0), stride(x, 0), stride(x, 1), stride(a, 0), stride(a, 1), stride(a, 2),
        stride(b, 0), stride(b, 1), stride(b, 2), stride(base, 0), stride(base, 1), stride(out, 0), stride(out, 1),
        tokens, slots, features, columns, rank, chunk_of(features), chunks_of(features),
        config.merged.bit_length() - 1, config.spread, flags, 0 if sizes is None else len(sizes), *slice_starts(sizes, MAX_SLICES),
    )  # fmt: skip
    cuda.launch(
        function,
        (config.cluster, config.tiles, groups // config.merged * config.spread),
        THREADS,
        LAYOUT,
        values,
        shared=shared,
        pdl=config.overlap,
    )
    return True
