"""Where a module's A and B come from: a bank's slots, or parameters that are trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..adapters import Adapter, ExpertModule, LoraModule, Slots
from ..layouts import Buffer

Stacks = tuple[Tensor, Tensor, Tensor, "Tensor | None"]  # lora_a, lora_b, scalings [L], ranks [L]


class BankFactors:
    """A bank's buffers of one module, which never move."""

    def __init__(self, slots: Slots):
        self.slots = slots

    def __deepcopy__(self, memo):
        """A copied model reads the same bank."""
        return self

    @property
    def out_sizes(self) -> list[int] | None:
        return None if self.slots.out_sizes is None else list(self.slots.out_sizes)

    def stacks(self, x: Tensor) -> Stacks:
        return self.slots[:4]


class LoraFactors(nn.Module):
    """A and B of one module as parameters, a pair for every slot (job), so that each may have its own optimizer and rank.

    a[l] is [r_l, D], fused [M, r_l, D], experts [E|1, r_l, D] or [E|1, 2, r_l, D]; b[l] is [N, r_l], grouped [G, N, r_l],
    fused [ΣN, r_l], experts [E|1, N, r_l]. The ops get them stacked over the slots, ranks padded with zeros; a slot without
    tokens gets gradients of exact zeros. A starts uniform in ±√(1/D) (`kaiming_uniform_` with a = √5), B at zero.
    """

    def __init__(
        self,
        buffer: Buffer,
        ranks: Sequence[int],
        scalings: Sequence[float],
        *,
        dtype: torch.dtype,
        device: torch.device,
        shared: Sequence[str] = (),
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.shared = tuple(shared)  # "a" or "b", where all experts share it
        self.buffer, self.ranks, self.scalings = buffer, list(ranks), list(scalings)
        a_shape, b_shape = buffer.a_shape[1:], buffer.b_shape[1:]
        factory = dict(dtype=dtype, device=device)
        self.a = nn.ParameterList(nn.Parameter(torch.empty(*a_shape[:-2], r, a_shape[-1], **factory)) for r in self.ranks)
        self.b = nn.ParameterList(nn.Parameter(torch.empty(*b_shape[:-1], r, **factory)) for r in self.ranks)
        self._small: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.reset_parameters(generator)

    @property
    def out_sizes(self) -> list[int] | None:
        return None if self.buffer.out_sizes is None else list(self.buffer.out_sizes)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for a, b in zip(self.a, self.b):
            bound = math.sqrt(1 / a.shape[-1])
            a.uniform_(-bound, bound, generator=generator)
            b.zero_()

    def stacks(self, x: Tensor) -> Stacks:
        if x.device not in self._small:
            with torch.inference_mode(False):  # an evaluation may come first, and a backward use them later
                ranks = torch.tensor(self.ranks, dtype=torch.int32, device=x.device)
                self._small[x.device] = torch.tensor(self.scalings, dtype=torch.float32, device=x.device), ranks
        scalings, ranks = self._small[x.device]
        a, b = (_stack(list(factors), axis, max(self.ranks)) for factors, axis in ((self.a, -2), (self.b, -1)))
        if self.buffer.kind != "experts":  # the expert ops take float32 masters as they are
            a, b = a.to(x.dtype), b.to(x.dtype)
        return a, b, scalings, ranks

    def set_scaling(self, slot: int, scaling: float) -> None:
        """In place where a graph may read it."""
        self.scalings[slot] = scaling
        for scalings, _ in self._small.values():
            scalings[slot] = scaling

    def add_to(self, slot: int, modules: dict, experts: dict) -> None:
        """What this slot holds, under the layout's paths."""
        a, b = (factors[slot].detach().cpu().clone() for factors in (self.a, self.b))
        rank, scaling, places = self.ranks[slot], self.scalings[slot], self.buffer.places
        if self.buffer.kind == "experts":
            experts[places[0].path] = ExpertModule(a, b, rank, scaling)
            return
        if self.buffer.kind != "fused":
            modules[places[0].path] = LoraModule(a, b.flatten(0, -2), rank, scaling)
            return
        for place, own_a, own_b in zip(places, a, b.split(self.out_sizes)):
            modules[place.path] = LoraModule(own_a.clone(), own_b.clone(), rank, scaling)


def _stack(factors: list[Tensor], axis: int, rank: int) -> Tensor:
    """[L, …] with the rank axis padded with zeros."""
    if len(factors) == 1:
        return factors[0].unsqueeze(0)

    def padded(t):
        short = rank - t.shape[axis]
        return t if not short else nn.functional.pad(t, (0, 0, 0, short) if axis == -2 else (0, short))

    return torch.stack([padded(t) for t in factors])


def adapter_of(factors: Sequence[LoraFactors], slot: int) -> Adapter:
    modules: dict[str, LoraModule] = {}
    experts: dict[str, ExpertModule] = {}
    for f in factors:
        f.add_to(slot, modules, experts)
    return Adapter(None, {}, modules, experts)
