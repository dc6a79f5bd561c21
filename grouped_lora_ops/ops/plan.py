"""`plan`: rows sorted by adapter slot, once for all layers of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, driver, launch, reference
from .._library import define
from . import common, plan_cuda
from .prepared import prepared, straight


def plan(adapter_ids: Tensor, num_slots: int) -> Tensor:
    """The plan of a batch: one int32 tensor [T + L + 2] that lists the rows slot by slot.

    plan[:T]: row numbers, those of slot 0 first, each slot's in their order, rows without an adapter last.
    plan[T + l]: position of slot l's first row (l = L: of the first row without an adapter); plan[T + L + 1] = T.

    adapter_ids: [T] int32 or int64, −1 = no adapter. num_slots: L, the slots of the adapter buffers.
    A plan serves every dense op and layout of the batch whose ids it was made from; it is needed only from
    T = 129 on (below, kernels read adapter_ids themselves), and an op without one makes its own. One launch (two
    where csrc/plan.cu cannot be had or the sizes do not fit it), no host sync; its size depends on T and L alone, so a
    captured graph can make it anew at every replay.

    Raises ValueError for a wrong shape or dtype, and on the CPU for an id outside −1 … L−1; TypeError for wrong types.
    """
    done, made = _straight(adapter_ids, num_slots)
    if done:
        return made
    _checks.tensor_types("plan", {"adapter_ids": adapter_ids}, {})
    _checks.int_type("plan", "num_slots", num_slots)
    return _op(adapter_ids, num_slots)


def build(adapter_ids: Tensor, num_slots: int) -> Tensor:
    """The plan by our kernels, arguments already checked."""
    tokens, arch = adapter_ids.shape[0], common.facts(adapter_ids)[0]
    out = driver.empty((tokens + num_slots + 2,), torch.int32, adapter_ids.device)
    one = common.configured(launch.plan_cuda, arch, tokens, num_slots, 0, False) if adapter_ids.is_cuda else None
    if one is not None and plan_cuda.make("plan", adapter_ids, None, num_slots, 0, out, one):
        return out
    from ..kernels import plan as kernels

    config = launch.plan(tokens, num_slots)
    scratch = driver.empty((config.programs * config.block_l,), torch.int32, adapter_ids.device)
    kernels.plan("plan", adapter_ids, num_slots, scratch, out, config, launch.has_pdl(arch))
    return out


def _cpu(adapter_ids: Tensor, num_slots: int) -> Tensor:
    _checks.plan("plan", adapter_ids, num_slots)
    _checks.id_values("plan", adapter_ids, num_slots)
    return reference.plan(adapter_ids, num_slots)


@prepared
def _cuda(adapter_ids: Tensor, num_slots: int) -> Tensor:
    _checks.plan("plan", adapter_ids, num_slots)
    common.check_values("plan", adapter_ids, num_slots, None, 0)
    return build(adapter_ids, num_slots)


def _fake(adapter_ids: Tensor, num_slots: int) -> Tensor:
    _checks.plan("plan", adapter_ids, num_slots)
    return adapter_ids.new_empty(adapter_ids.shape[0] + num_slots + 2, dtype=torch.int32)


_op = define("plan(Tensor adapter_ids, SymInt num_slots) -> Tensor", cpu=_cpu, cuda=_cuda, fake=_fake)
_straight = straight(_cuda)
