"""y = base + factor · (x Aᵀ) Bᵀ for many rows, or routes to experts, in one launch of csrc/rows.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cuda
from ..launch import RowsConfig, chunk_of
from .delta_cuda import _unit, _vectors

SINGLE, PLAN, EXPERTS = 0, 1, 2
IDS64, COPY = 1, 2
PIECE = 128  # columns of D that the dense kernels sum from zero upwards; the experts' take a chunk whole
# struct Params: x a b base out ids plan ranks scalings weights; strides; sizes; mode and flags
LAYOUT = "10P16q14I"


def _stride(t: Tensor | None, axis: int) -> int:
    return 0 if t is None or t.shape[axis] == 1 else t.stride(axis)


def _rows_fit(x: Tensor, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor) -> bool:
    """Unit last strides, every row at a multiple of 16 bytes, whole vectors of y."""
    tensors = [t for t in (x, a, b, base, out) if t is not None]
    return out.shape[-1] % 8 == 0 and all(_unit(t) and _vectors(t, *range(t.dim() - 1)) for t in tensors)


def fits(x: Tensor, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor, sizes: tuple | None) -> bool:
    return sizes is None and _rows_fit(x, a, b, base, out)


def fits_experts(x: Tensor, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor, weights: Tensor | None) -> bool:
    return _rows_fit(x, a, b, base, out) and (weights is None or weights.dtype == torch.float32)


def _launch(name: str, x: Tensor, pointers: tuple, strides: tuple, sizes: tuple, config: RowsConfig) -> bool:
    module = cuda.module(name, "rows", x.device.index)
    if module is None:
        return False
    kernel = f"{'fp16' if x.dtype == torch.float16 else 'bf16'}_{'_'.join(map(str, config.kernel))}"
    shared = module.constant(name, f"shared_rows_{kernel}")
    function = module.function(name, f"rows_{kernel}", shared, False)
    grid = (config.blocks, 1, 1)  # a kernel names its cluster itself
    cuda.launch(function, grid, config.threads, LAYOUT, (*pointers, *strides, *sizes), shared=shared, pdl=False)
    return True


def dense(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    a: Tensor,  # [L, G or 1, r, D]
    b: Tensor,  # [L, G or 1, N, r]
    base: Tensor | None,  # [T, G, N]
    out: Tensor,  # [T, G, N]
    ids: Tensor,
    plan: Tensor | None,  # not where there is one slot
    ranks: Tensor | None,
    scalings: Tensor,
    copy: bool,
    config: RowsConfig,
) -> bool:
    """Write out = base + scaling · (x Aᵀ) Bᵀ; base may be out itself. False where this GPU has no such kernel."""
    tokens, groups, columns = out.shape
    slots, rank, features = a.shape[0], a.shape[2], x.shape[2]
    flags = (IDS64 if ids.dtype.itemsize == 8 else 0) | (COPY if copy else 0)
    strides = (
        ids.stride(0), 0, _stride(x, 0), _stride(x, 1), _stride(a, 0), 0, _stride(a, 1), _stride(a, 2),
        _stride(b, 0), 0, _stride(b, 1), _stride(b, 2), _stride(base, 0), _stride(base, 1), _stride(out, 0), _stride(out, 1),
    )  # fmt: skip
    mode = SINGLE if slots == 1 else PLAN
    sizes = (tokens, slots, 0, features, columns, rank, groups, chunk_of(features), PIECE, 1, 0, 0, mode, flags)
    return _launch(name, x, (x, a, b, base, out, ids, plan, ranks, scalings, None), strides, sizes, config)


def experts(
    name: str,
    x: Tensor,  # [M or T, D]
    a: Tensor,  # [L, E|1, G or 1, r, D]
    b: Tensor,  # [L, E|1, G, N, r]
    base: Tensor | None,  # [M, G, N]
    out: Tensor,  # [M, G, N]
    per_token: bool,
    ids: Tensor,  # [T, K]
    plan: Tensor,
    ranks: Tensor | None,
    scalings: Tensor,
    weights: Tensor | None,  # [M] float32
    num_experts: int,
    room: int,
    config: RowsConfig,
) -> bool:
    """Write out = base + weight · scaling · (x Aᵀ) Bᵀ. False where this GPU has no such kernel."""
    routes, groups, columns = out.shape
    slots, rank, features = a.shape[0], a.shape[3], x.shape[1]
    strides = (
        0, 0 if weights is None else weights.stride(0), _stride(x, 0), 0,
        _stride(a, 0), _stride(a, 1), _stride(a, 2), _stride(a, 3), _stride(b, 0), _stride(b, 1), _stride(b, 2), _stride(b, 3),
        _stride(base, 0), _stride(base, 1), _stride(out, 0), _stride(out, 1),
    )  # fmt: skip
    chunk = chunk_of(features)
    sizes = (
        routes, slots, num_experts, features, columns, rank, groups, chunk, chunk,
        ids.shape[1] if per_token else 1, config.tile_rows, room, EXPERTS, COPY,
    )  # fmt: skip
    return _launch(name, x, (x, a, b, base, out, None, plan, ranks, scalings, weights), strides, sizes, config)
