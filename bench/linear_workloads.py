"""What is measured of `linear`: base and delta of DeepSeek-V4's `wo_a` (4 and 8 groups a rank; 4 also with an e4m3 weight,
beside float32 scales and beside the e8m0 ones that its checkpoints hold) and of a 4096 → 4096 layer.

The floor is max(bytes / 4.3 TB/s, flops / 790 TFLOP/s) as in `workloads`: x, W and the active A and B read once, y written
once. The bar is PyTorch's base alone, measured beside it: ≤ 1 × at T ≤ 64, above ≤ 1.04 × (r 16) and 1.10 × (r 64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import workloads
from .workloads import FLOPS_PER_US, HBM_BYTES_PER_US, Workload


@dataclass(frozen=True)
class LinearWorkload(Workload):
    """A `Workload` ("plain" or "grouped") with the base weight [N, D] or [G, N, D]. scale: it is e4m3 with a scale of that dtype
    for every block of 128 × 128; PyTorch multiplies by `base_weight`, the same in x's dtype."""

    scale: torch.dtype | None = None

    @property
    def scaled(self) -> bool:
        return self.scale is not None

    def tiny(self) -> LinearWorkload:
        active = None if self.active is None else min(self.active, 3)
        return replace(self, T=min(self.T, 9), G=min(self.G, 3), slots=min(self.slots, 3), D=64, N=32, rank=8, active=active)

    @property
    def bar(self) -> float:
        """How many times PyTorch's base alone it may take."""
        return 1.0 if self.T <= 64 else 1.04 if self.rank <= 16 else 1.1

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.N, self.D) if self.layout == "plain" else (self.G, self.N, self.D)

    def facts(self, op: str) -> dict:
        """What a row of the results says about the workload."""
        return {
            "T": self.T,
            "G": self.G,
            "D": self.D,
            "N": self.N,
            "rank": self.rank,
            "slots": self.slots,
            "active": workloads.batch(self).adapters,
            "layout": self.layout,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight": "float8_e4m3fn" if self.scaled else str(self.dtype).removeprefix("torch."),
            **({"weight_scale": str(self.scale).removeprefix("torch.")} if self.scaled else {}),
            "floor_us": floor_us(self),
            "bar_us": None,
            "best_peer": None,
            "best_peer_us": None,
        }


def floor_us(w: LinearWorkload) -> float:
    b, size = workloads.batch(w), w.dtype.itemsize
    weight = w.width * w.D
    nbytes = size * (w.T * (w.x_width + w.width) + b.adapter_ranks * (w.D + w.width)) + weight_bytes(w)
    flops = 2 * (w.T * weight + b.row_ranks * (w.D * w.h_rows + w.width))
    return max(nbytes / HBM_BYTES_PER_US, flops / FLOPS_PER_US[w.dtype])


def weight_bytes(w: LinearWorkload) -> int:
    return w.width * w.D * (1 if w.scaled else w.dtype.itemsize)


def _linear(family: str, **shape) -> list[LinearWorkload]:
    return [
        LinearWorkload(f"{family}-r{rank}-S8-T{tokens}", tokens, rank=rank, slots=8, D=4096, **shape)
        for rank in (16, 64)
        for tokens in (1, 8, 64, 256, 512, 1024, 8192)
        if rank == 16 or tokens not in (256, 512)
    ]


SCALED = [
    LinearWorkload(f"{family}-r16-S8-T{tokens}", tokens, rank=16, slots=8, D=4096, G=4, N=1024, layout="grouped", scale=scale)
    for family, scale, counts in (
        ("wo_a_g4_e4m3", torch.float32, (1, 64, 1024, 8192)),
        ("wo_a_g4_e8m0", torch.float8_e8m0fnu, (1, 8, 64, 256, 1024, 8192)),
    )
    for tokens in counts
]
LINEAR = [
    *_linear("wo_a_g4", G=4, N=1024, layout="grouped"),
    *_linear("wo_a_g8", G=8, N=1024, layout="grouped"),
    *_linear("plain", N=4096),
    *SCALED,
]


def _tax(family: str, **shape) -> list[LinearWorkload]:
    """Ranks, and adapters that occur of a bank's 32: as many as there are tokens at most."""
    return [
        LinearWorkload(f"{family}-r{rank}-a{active}-T{tokens}", tokens, rank=rank, slots=32, active=active, D=4096, **shape)
        for tokens in (1, 8, 64, 1024, 8192)
        for rank in (8, 16, 32, 64, 128, 256)
        for active in (0, 1, 8, 32)
        if active <= tokens
    ]


TAX = [*_tax("wo_a_g4", G=4, N=1024, layout="grouped"), *_tax("plain", N=4096)]


def with_weight(w: LinearWorkload, made: dict[str, Tensor], seed: int, integers: bool) -> dict[str, Tensor]:
    device = made["x"].device
    generator = torch.Generator(device).manual_seed(seed)
    if integers:
        weight = torch.randint(-3, 4, w.weight_shape, device=device, generator=generator).to(w.dtype)
    else:
        weight = torch.randn(w.weight_shape, device=device, dtype=w.dtype, generator=generator).mul_(w.D**-0.5)
    return {**made, **(with_scales(weight, integers, w.scale) if w.scaled else {"weight": weight})}


def with_scales(weight: Tensor, integers: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """weight in e4m3, each block as large as fits (integers: as it is), its scale (e8m0: the smallest power of two with which it
    fits), and what both say, rounded to weight's dtype."""
    blocks = [*weight.shape[:-2], *[-(-size // 128) for size in weight.shape[-2:]]]
    if integers:
        scale = 2.0 ** (torch.arange(math.prod(blocks), device=weight.device) % 3 - 1).view(blocks).float()
        small = weight.float()
    else:
        largest = torch.nn.functional.max_pool2d(weight.float().abs().view(-1, *weight.shape[-2:]), 128, ceil_mode=True)
        scale = (largest / 448).view(blocks)
        if dtype != torch.float32:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        small = weight.float() / spread(scale, weight)
    small = small.to(torch.float8_e4m3fn)
    base_weight = (small.float() * spread(scale, weight)).to(weight.dtype)
    return {"weight": small, "weight_scale": scale.to(dtype), "base_weight": base_weight}


def spread(scale: Tensor, weight: Tensor) -> Tensor:
    rows, columns = weight.shape[-2:]
    return scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]


def random_set(w: LinearWorkload, device: torch.device, seed: int) -> dict[str, Tensor]:
    return with_weight(w, workloads.random_set(w, device, seed), seed, False)


def integer_set(w: LinearWorkload, device: torch.device) -> dict[str, Tensor]:
    """Small integers: every product and float32 sum is exact, h needs more bits than bf16 has."""
    return with_weight(w, workloads.integer_set(w, device), 1, True)


def bytes_per_set(w: LinearWorkload) -> int:
    return workloads.bytes_per_set(w) + weight_bytes(w)
