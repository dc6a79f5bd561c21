"""What an adapter is once it is read: per module or expert parameter, its factors and its scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def report(where: str, problems: Sequence[str]) -> ValueError:
    """One error that lists every problem."""
    return ValueError(f"grouped_lora_ops.adapters.{where}" + "".join(f"\n  - {problem}" for problem in problems))


@dataclass(frozen=True, eq=False)
class LoraModule:
    """One adapted linear: delta = scaling · B A."""

    lora_a: Tensor  # [r, in]
    lora_b: Tensor  # [out, r]; of a grouped linear, out = G·N, group-major
    rank: int
    scaling: float  # alpha/r, or alpha/√r with rsLoRA


@dataclass(frozen=True, eq=False)
class ExpertModule:
    """One adapted 3-D parameter: delta[e] = scaling · B[e] A[e]; with an A for gate and up each, half by half.

    A first dimension of 1 is shared by all experts. Of a gated parameter B's rows are gate's, then up's, however the
    model stores them.
    """

    lora_a: Tensor  # [E|1, r, D]; [E|1, 2, r, D]: gate and up have an A each
    lora_b: Tensor  # [E|1, N, r]; gate and up together N = 2I
    rank: int
    scaling: float
    folded: bool = False  # scalings differed among experts or halves: their ratios are in the factors, as float32

    @property
    def each(self) -> bool:
        return self.lora_a.dim() == 4

    @property
    def num_experts(self) -> int:
        return max(len(self.lora_a), len(self.lora_b))

    def delta(self, expert: int) -> Tensor:
        """scaling · B A of one expert in float64: [N, D]."""
        a, b = (f[expert if len(f) > 1 else 0].double() for f in (self.lora_a, self.lora_b))
        if not self.each:
            return self.scaling * (b @ a)
        return self.scaling * torch.cat([half @ one for half, one in zip(b.chunk(2), a)])

    def with_one_a(self) -> ExpertModule:
        """The same delta with one A for gate and up: rank 2r, B block-diagonal. Itself where there is one already."""
        if not self.each:
            return self
        experts, _, rank, d = self.lora_a.shape
        gate, up = self.lora_b.chunk(2, dim=1)
        b = self.lora_b.new_zeros(len(gate), 2 * gate.shape[1], 2 * rank)
        b[:, : gate.shape[1], :rank], b[:, gate.shape[1] :, rank:] = gate, up
        return replace(self, lora_a=self.lora_a.reshape(experts, 2 * rank, d), lora_b=b, rank=2 * rank)

    def with_an_a_each(self) -> ExpertModule:
        """The same delta with an A for gate and up each: half the rank where B is block-diagonal, else A twice."""
        if self.each:
            return self
        half, rank = self.lora_b.shape[1] // 2, self.rank // 2
        gate, up = self.lora_b[:, :half], self.lora_b[:, half:]
        if self.rank % 2 == 0 and not gate[..., rank:].any() and not up[..., :rank].any():
            a = self.lora_a.reshape(len(self.lora_a), 2, rank, -1)
            return replace(self, lora_a=a, lora_b=torch.cat([gate[..., :rank], up[..., rank:]], 1), rank=rank)
        return replace(self, lora_a=self.lora_a[:, None].expand(-1, 2, -1, -1))


@dataclass(frozen=True)
class Base:
    """The base model that an adapter belongs to."""

    name: str
    revision: str | None = None
    sha256: str | None = None  # see `base_hash`

    def differs(self, other: Base) -> str | None:
        """What tells two bases apart, by what both state."""
        for name in ("sha256", "revision", "name"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and a != b:
                return f"{name} {a}, not {b}"
            if name == "sha256" and a is not None and a == b:
                return None  # the same weights, wherever they are kept
        return None


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter: its configuration and, per module path of the base model, its factors.

    With a model's layout, paths are the layout's own (`model.layers.0.self_attn.o_a_proj`), whatever the file calls them,
    and experts are gathered in `experts` under their parameter (`model.layers.0.mlp.experts.gate_up_proj`).
    """

    path: Path | None
    config: Mapping[str, Any]
    modules: Mapping[str, LoraModule]
    experts: Mapping[str, ExpertModule] = field(default_factory=lambda: MappingProxyType({}))
    base: Base | None = None  # what the file is pinned to

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((m.rank for m in (*self.modules.values(), *self.experts.values())), default=0)

    def __repr__(self) -> str:
        """What it is, without its numbers."""
        held = f"{len(self.modules)} modules" + (f" and {len(self.experts)} experts' parameters" if self.experts else "")
        pinned = f", for {self.base.name}" if self.base else ""
        return f"<Adapter {self.path or 'in memory'}: {held}, rank {self.rank}{pinned}>"


def common_scaling(scalings: Sequence[float]) -> tuple[float, list[float] | None]:
    """(scaling, ratios): the one scaling, or the largest and what each is of it."""
    if len(set(scalings)) == 1:
        return scalings[0], None
    largest = max(scalings, key=abs)
    return largest, [s / largest for s in scalings]


def scaled(factor: Tensor, ratio: float) -> Tensor:
    """factor · ratio: exact in its dtype for a power of two, else in float32 (float64 stays)."""
    if ratio in (0.0, 1.0) or math.frexp(abs(ratio))[0] == 0.5:
        result = factor * ratio
        if torch.equal(result.double(), factor.double() * ratio):  # no subnormal was rounded
            return result
    return factor.to(torch.promote_types(factor.dtype, torch.float32)) * ratio
