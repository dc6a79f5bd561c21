"""y = x Wᵀ + scaling · h Bᵀ + bias for a few rows, in one launch of csrc/stream.cu."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from .. import cuda, driver, launch_linear
from ..launch import cdiv
from ..launch_linear import StreamConfig
from . import linear_cuda
from .common import slice_starts, stride

MAX_SLICES, BOX_BYTES = 8, 128
MAX_SHARED = 227 * launch_linear.KB
IDS64, BIAS32, OVERLAP, NEXT, LATE, POWERS = 1, 2, 4, 8, 16, 32
# struct Params: tensor maps of W and x; h b bias out ids ranks scalings; strides; sizes and flags; where slices start; height;
# scales and their strides
LAYOUT = "P15QP15Q7P10q22IP3q"


def fits(
    x: Tensor,  # [T, G or 1, D]
    w: Tensor,  # [1, G or 1, N, D]; e4m3 with scales
    scales: Tensor | None,  # [G or 1, ⌈N/128⌉, ⌈D/128⌉] float32, or e8m0's bytes
    h: Tensor | None,  # [chunks, T, G' or 1, r] float32
    b: Tensor | None,  # [L, 1, G' or 1, N, r]
    bias: Tensor | None,  # [1, G or 1, N]
    out: Tensor,  # [T, G, N]
    sizes: tuple | None,
) -> bool:
    """As `linear_cuda.fits`; x's rows and groups lie apart, and W's elements side by side along D. With scales slices do not begin
    inside a block's columns."""
    if x.shape[0] > 2 * launch_linear.STREAM_TOKENS or out.dtype != torch.bfloat16 or linear_cuda.transposed(w):
        return False
    if h is not None and (h.dtype != torch.float32 or h.shape[0] > 8 or h.shape[3] > launch_linear.STREAM_RANKS[-1]):
        return False
    if not all(x.stride(axis) for axis in (0, 1) if x.shape[axis] > 1):  # a map has no stride of 0
        return False
    if scales is None:
        return linear_cuda.fits(x, w, h, b, bias, out, sizes)
    if sizes is not None and any(start % launch_linear.STREAM_COLUMNS for start in accumulate(sizes[:-1])):
        return False
    return linear_cuda.fits(x, w, h, b, bias, out, sizes, torch.float8_e4m3fn)


def _threads(config: StreamConfig, lora: bool) -> int:
    """Those that multiply, that fetch, that convert, and that make LoRA ready."""
    if config.e4m3 and config.rows > 16:
        return 128 + 64 + 256 + (64 if lora else 0)
    return 128 + 64 + (96 if lora else 0)


def product(
    name: str,
    x: Tensor,  # as in `fits`
    w: Tensor,
    scales: Tensor | None,
    h: Tensor | None,
    b: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    ids: Tensor | None,  # None: slot 0
    ranks: Tensor | None,
    scalings: Tensor | None,
    sizes: tuple | None,
    config: StreamConfig,
    overlap: bool,  # programmatic dependent launch
) -> bool:
    """Write out = x Wᵀ + scaling · h Bᵀ + bias, W = w · scales. False where this GPU has no such kernel."""
    module = linear_cuda.loaded(name, out, "stream")
    if module is None:
        return False
    rows, groups, columns = out.shape
    rank = 0 if h is None else h.shape[3]
    ranks_at_once = launch_linear.stream_ranks(rank)
    # what a launch asks for depends on T, what the kernel may ask for does not: it is set once
    function = module.function(name, f"stream_{config.rows}_{config.block_n}_{ranks_at_once}{'_e4m3' if config.e4m3 else ''}", MAX_SHARED)
    shared = module.constant(name, "shared_bytes") + launch_linear.stream_bytes(config, ranks_at_once)
    blocks = groups * cdiv(columns, config.block_n) if sizes is None else sum([cdiv(size, config.block_n) for size in sizes])

    flags = IDS64 if ids is not None and ids.dtype.itemsize == 8 else 0
    flags |= BIAS32 if bias is not None and bias.dtype == torch.float32 else 0
    flags |= POWERS if scales is not None and scales.dtype == torch.uint8 else 0
    flags |= (OVERLAP if overlap else 0) | (NEXT if config.next_early else 0) | (LATE if config.late else 0)
    words = driver.tensor_map(w, (3, 2, 1, 0), (BOX_BYTES // w.element_size(), config.block_n, 1, 1))
    # no more rows than there are, in eights: each one outside the tensor costs TMA 1.3 ns (17 rows by boxes of 64: 18.0 µs, 64 rows 13.9)
    tiles = cdiv(rows, config.rows)
    height = cdiv(rows, 8 * tiles) * 8
    x_words = driver.tensor_map(x, (2, 0, 1), (BOX_BYTES // 2, height, 1), pad=4)
    values = (
        w, *words[1:], x, *x_words[1:], h, b, bias, out, ids, ranks, scalings,
        0 if ids is None else ids.stride(0), stride(h, 0), stride(h, 1), stride(h, 2), stride(b, 0), stride(b, 2), stride(b, 3),
        stride(bias, 1), stride(out, 0), stride(out, 1), rows, 0 if b is None else b.shape[0], x.shape[2], columns, rank, x.shape[1],
        0 if h is None else h.shape[0], flags, config.stages, config.x_stages, config.adapters,
        0 if sizes is None else len(sizes), *slice_starts(sizes, MAX_SLICES), height,
        scales, *[stride(scales, axis) for axis in range(3)],
    )  # fmt: skip
    threads = _threads(config, rank > 0)
    cuda.launch(function, (blocks * tiles, 1, 1), threads, LAYOUT, values, shared=shared, pdl=overlap)
    return True
