"""One slot of a bank: where every factor lies in it, and how an adapter becomes the bytes of a slot.

A slot is one contiguous image, so that loading an adapter is one copy. Every buffer of a bank is a view [L, …] of
storage [L, image], with the image's length as the stride over slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import dtype_name, instance
from ..layouts import Buffer, Model, Share
from ..layouts.model import WHOLE
from .adapter import Adapter, ExpertModule, LoraModule, common_scaling, report, scaled

_ALIGN = 256  # bytes: every factor starts where vector loads and copies are fastest


@dataclass(frozen=True)
class BankPlan:
    """The buffers and the memory of a bank, before anything is allocated. Make one with `plan_bank`."""

    model: Model
    buffers: tuple[Buffer, ...]
    offsets: tuple[tuple[int, int], ...]  # of every buffer's A and B in the image, in elements
    slots: int  # L
    rank: int
    dtype: torch.dtype
    image: int  # elements of a slot
    host_adapters: int

    @property
    def slot_bytes(self) -> int:
        return self.image * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """Storage, and a float32 scaling and an int32 rank for every slot and buffer."""
        return self.slots * (self.slot_bytes + 8 * len(self.buffers))

    @property
    def host_bytes(self) -> int:
        """Copies of waiting adapters, and one image to stage in; pinned where the bank is on a GPU."""
        return (self.host_adapters + 1) * (self.slot_bytes + 8 * len(self.buffers))

    def __str__(self) -> str:
        def mib(size):
            return f"{size / 2**20:.1f} MiB"

        return (
            f"{self.slots} slots of {mib(self.slot_bytes)} (rank {self.rank}, {dtype_name(self.dtype)}, {len(self.buffers)} buffers): "
            f"{mib(self.device_bytes)} on the device, {mib(self.host_bytes)} on the host"
        )


def plan_bank(
    model: Model,
    *,
    slots: int,
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    selectors: Sequence[str] | None = None,
    share: Share = WHOLE,
    fused: bool = False,
    shared_outer: bool = False,
    gate_up_each: bool = True,
    host_adapters: int = 0,
    max_bytes: int | None = None,
) -> BankPlan:
    """Lay out a bank: L slots for adapters of rank up to `rank`, for a process's share of a model.

    selectors, share, fused, shared_outer and gate_up_each: see `layouts.Model.buffers`. host_adapters: how many adapters
    wait on the host. max_bytes: the device memory that must not be exceeded.

    Errors: ValueError for sizes below 1, a share that does not divide, and a plan larger than max_bytes.
    """
    where = "grouped_lora_ops.adapters.plan_bank"
    instance("adapters.plan_bank", "model", model, Model, "as layouts.of makes it")
    for name, value, least in (("slots", slots, 1), ("rank", rank, 1), ("host_adapters", host_adapters, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{where}: {name} must be an integer of at least {least}; got {value!r}.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{where}: dtype must be a floating-point dtype; got {dtype}.")
    options = dict(selectors=selectors, share=share, fused=fused, shared_outer=shared_outer, gate_up_each=gate_up_each)
    plan = lay_out(model, model.buffers(slots, rank, **options), slots, rank, dtype, host_adapters)
    if max_bytes is not None and plan.device_bytes > max_bytes:
        raise ValueError(f"{where}: the bank must fit in {max_bytes / 2**20:.1f} MiB; it needs {plan}.")
    return plan


def lay_out(model: Model, buffers: tuple[Buffer, ...], slots: int, rank: int, dtype: torch.dtype, host_adapters: int = 0) -> BankPlan:
    """Where every factor of these buffers lies in a slot."""
    unit, position, offsets = max(_ALIGN // dtype.itemsize, 1), 0, []
    for buffer in buffers:
        here = []
        for shape in (buffer.a_shape, buffer.b_shape):
            here.append(position)
            position += -(-math.prod(shape[1:]) // unit) * unit
        offsets.append(tuple(here))
    return BankPlan(model, buffers, tuple(offsets), slots, rank, dtype, position, host_adapters)


def views(plan: BankPlan, storage: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A and B of every buffer in storage [image] or [L, image]."""
    found = []
    for buffer, offsets in zip(plan.buffers, plan.offsets):
        pair = []
        for shape, offset in zip((buffer.a_shape, buffer.b_shape), offsets):
            flat = storage[..., offset : offset + math.prod(shape[1:])]
            pair.append(flat.unflatten(-1, shape[1:]))
        found.append(tuple(pair))
    return found


def fill(plan: BankPlan, adapter: Adapter, image: Tensor, scalings: Tensor, ranks: Tensor) -> None:
    """Make an adapter the content of image [image], scalings [P] float32 and ranks [P] int32, P buffers.

    Everything that the adapter does not fill is zero. Factors are cast to the bank's dtype once.

    Errors: one ValueError that lists what does not fit (a rank above the bank's, modules that the bank has no buffer for,
    other shapes, factors that overflow the dtype or are not finite); what was written is then to be discarded.
    """
    problems: list[str] = []
    image.zero_(), scalings.zero_(), ranks.zero_()
    held = {place.path for buffer in plan.buffers for place in buffer.places}
    for name in sorted({*adapter.modules, *adapter.experts} - held):
        problems.append(f"{name}: the bank has no buffer for it.")
    for n, (buffer, (a, b)) in enumerate(zip(plan.buffers, views(plan, image))):
        if buffer.kind == "experts":
            found = _fill_experts(buffer, adapter.experts.get(buffer.key), a, b, plan.rank, problems)
        else:
            found = _fill_modules(buffer, adapter, a, b, plan.rank, problems)
        if found is not None:
            ranks[n], scalings[n] = found
            if not (a.isfinite().all() and b.isfinite().all()):
                problems.append(f"{buffer.key}: a factor is not finite in {dtype_name(plan.dtype)}.")
    if problems:
        raise report("AdapterBank: the adapter does not fit; nothing was loaded:", problems)


def _fill_modules(buffer: Buffer, adapter: Adapter, a: Tensor, b: Tensor, most: int, problems) -> tuple[int, float] | None:
    """A linear, grouped or fused buffer of one slot: A [r, D] or [M, r, D], B [N, r], [G, N, r] or [ΣN, r]."""
    present = [adapter.modules.get(place.path) for place in buffer.places]
    known = [lora for lora in present if lora is not None]
    if not known:
        return None
    before = len(problems)
    for place, lora in zip(buffer.places, present):
        p = place.projection
        if lora is not None:
            want = [lora.rank, p.in_features], [p.total_out, lora.rank]
            _check(place.path, lora, want, most, problems)
    if len(problems) > before:
        return None
    scaling, ratios = common_scaling([lora.scaling for lora in known])
    ratios = iter(ratios or [1.0] * len(known))
    rows = b.flatten(0, -2)
    start = 0
    for m, (lora, part) in enumerate(zip(present, buffer.parts)):
        size = sum(r.stop - r.start for r in part.rows)
        if lora is not None:
            (a[m] if buffer.kind == "fused" else a)[: lora.rank].copy_(lora.lora_a[:, part.columns])
            own = torch.cat([lora.lora_b[r] for r in part.rows]) if len(part.rows) > 1 else lora.lora_b[part.rows[0]]
            ratio = next(ratios)
            rows[start : start + size, : lora.rank].copy_(own if ratio == 1 else scaled(own, ratio))
        start += size
    return max(lora.rank for lora in known), scaling


def _fill_experts(buffer: Buffer, expert: ExpertModule | None, a, b, most: int, problems) -> tuple[int, float] | None:
    """An expert buffer of one slot: A [E|1, r, D] or [E|1, 2, r, D], B [E|1, N, r]."""
    if expert is None:
        return None
    p, part = buffer.places[0].projection, buffer.parts[0]
    counts = [len(f) if len(f) in (1, p.experts) else p.experts for f in (expert.lora_a, expert.lora_b)]
    before = len(problems)
    want = [counts[0], *([2] if expert.each and p.gated else []), expert.rank, p.in_features], [counts[1], p.out_features, expert.rank]
    _check(buffer.key, expert, want, None, problems)
    if len(problems) > before:
        return None
    if p.gated:
        expert = expert.with_an_a_each() if a.dim() == 4 else expert.with_one_a()
    if expert.rank > most:
        problems.append(f"{buffer.key}: rank must be at most the bank's {most}; got {expert.rank}.")
        return None
    for kind, factor, target, rank_axis in (("A", expert.lora_a, a, -2), ("B", expert.lora_b, b, -1)):
        if len(factor) > 1:
            if len(target) == 1 and part.experts.stop - part.experts.start > 1:  # not a rank's only expert
                problems.append(f"{buffer.key}: the bank shares {kind} among all experts; the adapter has one for each.")
                return None
            factor = factor[part.experts]
        target.narrow(rank_axis, 0, expert.rank).copy_(factor)
    return expert.rank, expert.scaling


def _check(name: str, lora: LoraModule | ExpertModule, want, most: int | None, problems: list[str]) -> None:
    for kind, factor, shape in zip("AB", (lora.lora_a, lora.lora_b), want):
        if list(factor.shape) != shape:
            problems.append(f"{name}: {kind} must be {shape}; got {list(factor.shape)}.")
    if most is not None and lora.rank > most:
        problems.append(f"{name}: rank must be at most the bank's {most}; got {lora.rank}.")
