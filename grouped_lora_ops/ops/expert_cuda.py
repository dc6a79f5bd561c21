"""The expert ops on a GPU: which of our kernels run, on what views, in what order. Arguments are checked already."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks, launch_experts
from ..reference.expert_delta import forms
from . import common
from .expert_plan import build
from .shrink import run as dense_shrink


class Routing(NamedTuple):
    """Where the routes go, as kernels take it."""

    ids: Tensor  # [T, K]
    adapters: Tensor | None  # [T]
    experts: int
    slots: int  # 0 without LoRA
    plan: Tensor | None  # None while kernels read the ids themselves

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    @property
    def routes(self) -> int:
        return self.ids.shape[0] * self.ids.shape[1]

    @property
    def room(self) -> int:
        return common.configured(launch_experts.plan_room, self.routes, self.experts, self.slots)

    def per_token(self, t: Tensor) -> bool:
        """Whether t has a row for each token, not for each route (with K = 1 that is the same)."""
        return t.shape[0] != self.routes


def routing(op: str, ids: Tensor, adapters: Tensor | None, experts: int, slots: int, plan: Tensor | None, sort: bool = False) -> Routing:
    """The routing with the plan that kernels need: the caller's or one made here; none for few routes unless `sort`."""
    routes = ids.shape[0] * ids.shape[1]
    if plan is not None:
        size = common.configured(launch_experts.plan_size, routes, experts, slots)
        if plan.shape[0] != size:
            must = f"[{size}] for {routes} routes, {experts} experts and {slots} slots, from grouped_lora.expert_plan"
            _checks.fail(op, "plan", must, _checks.shape(plan))
    if not (sort or launch_experts.needs_plan(routes)):
        plan = None
    elif plan is None:
        plan = build(ids, adapters, experts, slots)
    return Routing(ids, adapters, experts, slots, plan)


def problem(t: Tensor, to: Routing, groups: int, a_groups: int, in_features: int, out_features: int, rank: int):
    arch, sms = common.facts(t)
    return launch_experts.ExpertProblem(
        arch, sms, t.element_size(), to.routes, to.experts, to.slots, groups, a_groups, in_features, out_features, rank
    )


def in_dtype(t: Tensor | None, x: Tensor) -> Tensor | None:
    """A float32 master copy takes part rounded to x's dtype."""
    return t if t is None or t.dtype == x.dtype else t.to(x.dtype)


def outer(t: Tensor, groups: int) -> Tensor:
    """[M, N] as [M, G, N/G]: a view."""
    return t.unflatten(1, (groups, t.shape[1] // groups))


def run_shrink(
    name: str,
    x: Tensor,  # [M or T, G or 1, D]
    a: Tensor,  # [L, E|1, G or 1, r, D]
    groups: int,  # of h; 1 with x and A of two: their sum
    to: Routing,
    ranks: Tensor | None,
    scalings: Tensor | None = None,
    fill: bool = False,
    config: launch_experts.ExpertShrinkConfig | None = None,
) -> Tensor:
    """h [chunks, M, G, r] float32 of every route; [1, T, G, r] where A is shared and x has a row for each token.

    fill: zeros in routes without an adapter, which else hold nothing; the per-token h has them always.
    """
    rank, features = a.shape[3], x.shape[2]
    per_token = to.per_token(x)
    if a.shape[1] == 1 and per_token and scalings is None and x.shape[1] == 1:
        ids = to.adapters
        if ids is None:
            ids = torch.zeros(to.tokens, dtype=torch.int32, device=x.device)
        return dense_shrink(name, x, a[:, 0], groups, ids, ranks, None)[None]
    if rank == 0 or features == 0 or to.slots == 0 or to.routes == 0:
        return torch.zeros(1, to.routes, groups, rank, dtype=torch.float32, device=x.device)
    from ..kernels import expert_shrink as kernels

    if config is None:
        p = problem(x, to, groups, groups if x.shape[1] == 1 else 1, features, 0, rank)
        config = common.configured(launch_experts.shrink, p, False)
    chunks = config.chunks if config.split else 1
    h = torch.empty(chunks, to.routes, groups, rank, dtype=torch.float32, device=x.device)
    kernels.shrink(
        name, x, a, h, per_token, to.ids, to.adapters, to.plan, ranks, scalings, to.experts, to.room, fill, config
    )
    return h


def run_expand(
    name: str,
    h: Tensor,  # [chunks, M or T, G or 1, r]
    b: Tensor,  # [L, E|1, G, N, r]
    base: Tensor | None,  # [M, G, N]
    out: Tensor,  # [M, G, N]; with one group of two of h and b: their sum
    to: Routing,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,
    config: launch_experts.ExpertExpandConfig | None = None,
) -> None:
    """Write out = base + weight · scaling · h Bᵀ of every route."""
    from ..kernels import expert_expand as kernels

    if config is None:
        p = problem(b, to, out.shape[1], 1, 0, out.shape[2], h.shape[3])
        config = common.configured(launch_experts.expand, p)
    per_token = h.shape[1] != to.routes
    kernels.expand(
        name, h, b, base, out, per_token, to.ids, to.adapters, to.plan, ranks, scalings, weights, to.experts, to.room, config
    )


def delta(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan) -> Tensor:
    name = "expert_delta"
    a, b = forms(in_dtype(lora_a, x), in_dtype(lora_b, x))
    groups, out_features = b.shape[2], b.shape[3]
    routes = expert_ids.shape[0] * expert_ids.shape[1]
    out = x.new_empty(routes, groups * out_features)
    experts, slots, rank, features = max(a.shape[1], b.shape[1]), a.shape[0], a.shape[3], x.shape[1]
    if min(a.shape[1], b.shape[1]) == 0:
        experts = 0
    to = routing(name, expert_ids, adapter_ids, experts, slots, plan)
    if out.numel() == 0:
        return out
    if rank == 0 or slots == 0 or features == 0 or experts == 0:
        return out.zero_() if base is None else out.copy_(base)
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    outg, baseg = outer(out, groups), None if base is None else outer(base, groups)
    p = problem(x, to, groups, a.shape[2], features, out_features, rank)
    config = common.configured(launch_experts.delta, p)
    per_token = to.per_token(x)
    shared = a.shape[1] == 1 and per_token
    if config.fused is not None and not shared:
        from ..kernels import expert_delta as kernels

        kernels.delta(
            name, x, a, b, baseg, outg, per_token, to.ids, to.adapters, to.plan, ranks, scalings, row_weights,
            to.experts, to.room, config.fused,
        )  # fmt: skip
        return out
    h = run_shrink(name, x[:, None], a, a.shape[2], to, ranks, config=config.shrink)
    run_expand(name, h, b, baseg, outg, to, ranks, scalings, row_weights, config.expand)
    return out
