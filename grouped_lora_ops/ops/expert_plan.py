"""`expert_plan`: routes sorted by (expert, adapter slot), once for both projections of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, _checks_experts, driver, launch, launch_experts, reference
from .._library import define
from ..reference.expert_plan import route_pairs
from . import common, plan_cuda
from .prepared import prepared, straight


def expert_plan(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    """The plan of a layer's routing: one int32 tensor that lists the M = T·K routes pair by pair, and their tiles.

    A route t·K + k has the pair (expert topk_ids[t, k], slot adapter_ids[t]). Parts, one behind the other:
    rows [M]: routes, those of expert 0 first, inside an expert slot by slot, each in their order; an expert's routes
    without an adapter behind its slots', masked routes (id −1, E, or out of range) last.
    ends [E]: the position behind each expert's last route, as `torch._grouped_mm` takes offsets.
    tiles [1]: how many tiles there are; then room for as many as any ids can make, of each: pair e·(L+1) + l (l = L:
    no adapter; −1: no such tile) and first position (M: none); at the very end M.

    topk_ids: [T, K] int32 or int64. adapter_ids: [T] int32 or int64, −1 = no adapter; None: slot 0 for every token.
    num_experts: E. num_slots: L, the slots of the adapter buffers. A plan serves every expert op of that layer; it is
    needed only from M = 129 on (below, kernels read the ids themselves), and an op without one makes its own. One
    launch and no host sync; its size depends on M, E and L alone, so a captured graph can make it anew at every replay.
    Where csrc/plan.cu cannot be had or the sizes do not fit it: two launches; more than 4096 routes over more than 2046
    pairs are then sorted by torch.sort, in some launches more.

    Raises ValueError for a wrong shape or dtype, and on the CPU for an id outside −1 … E or an adapter outside −1 … L−1;
    TypeError for wrong types.
    """
    done, made = _straight(topk_ids, adapter_ids, num_experts, num_slots)
    if done:
        return made
    _checks.tensor_types("expert_plan", {"topk_ids": topk_ids}, {"adapter_ids": adapter_ids})
    _checks.int_type("expert_plan", "num_experts", num_experts)
    _checks.int_type("expert_plan", "num_slots", num_slots)
    return _op(topk_ids, adapter_ids, num_experts, num_slots)


def build(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    """The plan by our kernels, arguments already checked."""
    routes = topk_ids.shape[0] * topk_ids.shape[1]
    size, room = (f(routes, num_experts, num_slots) for f in (launch_experts.plan_size, launch_experts.plan_room))
    if routes == 0:
        return torch.zeros(size, dtype=torch.int32, device=topk_ids.device)
    out = driver.empty((size,), torch.int32, topk_ids.device)
    arch = common.facts(topk_ids)[0]
    one = common.configured(launch.plan_cuda, arch, routes, num_experts, num_slots, True) if topk_ids.is_cuda else None
    rows = launch_experts.plan_rows(routes, num_experts, num_slots)
    if one is not None and plan_cuda.make("expert_plan", topk_ids, adapter_ids, num_experts, num_slots, out, one, rows, room):
        return out
    from ..kernels import expert_plan as kernels

    config = common.configured(launch_experts.expert_plan, routes, num_experts, num_slots)
    pdl = launch.has_pdl(arch)
    if config.way == "sort":
        pair, rows = torch.sort(route_pairs(topk_ids, adapter_ids, num_experts, num_slots), stable=True)
        experts = torch.arange(1, num_experts + 1, device=pair.device) * (num_slots + 1)
        out[:routes] = rows
        out[routes : routes + num_experts] = torch.searchsorted(pair, experts)
        scratch = torch.cat([pair, torch.searchsorted(pair, pair)]).to(torch.int32)
        kernels.tiles("expert_plan", scratch, routes, num_experts, room, out, config, False)
        return out
    words = 2 * routes if config.way == "rank" else config.programs * config.block_l
    scratch = driver.empty((words,), torch.int32, topk_ids.device)
    make = kernels.rank if config.way == "rank" else kernels.count
    make("expert_plan", topk_ids, adapter_ids, num_experts, num_slots, room, scratch, out, config, pdl)
    return out


def _check(values: bool, topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> None:
    _checks_experts.plan("expert_plan", topk_ids, adapter_ids, num_experts, num_slots)
    if values:
        _checks_experts.expert_id_values("expert_plan", "topk_ids", topk_ids, num_experts)
        if adapter_ids is not None:
            _checks.id_values("expert_plan", adapter_ids, num_slots)


def _cpu(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    _check(True, topk_ids, adapter_ids, num_experts, num_slots)
    return reference.expert_plan(topk_ids, adapter_ids, num_experts, num_slots)


@prepared
def _cuda(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    _check(common.may_check_values(topk_ids), topk_ids, adapter_ids, num_experts, num_slots)
    return build(topk_ids, adapter_ids, num_experts, num_slots)


def _fake(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    _check(False, topk_ids, adapter_ids, num_experts, num_slots)
    routes = topk_ids.shape[0] * topk_ids.shape[1]
    return topk_ids.new_empty(launch_experts.plan_size(routes, num_experts, num_slots, torch.sym_min), dtype=torch.int32)


_op = define(
    "expert_plan(Tensor topk_ids, Tensor? adapter_ids, SymInt num_experts, SymInt num_slots) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
_straight = straight(_cuda)
