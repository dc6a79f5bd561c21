"""The expert ops on a GPU: which of our kernels run, on what views, in what order. Arguments are checked already."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks, launch_experts
from ..reference.expert_delta import forms
from . import common
from .expand import run as dense_expand
from .expert_plan import build
from .shrink import run as dense_shrink
from .wgrad import wgrad as dense_wgrad


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
    weights: Tensor | None = None,
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


def projection(
    name: str,
    x: Tensor,  # [M or T, D]
    weight: Tensor,  # [E, N, D] or [E, 2, N/2, D]
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    to: Routing,
    scalings: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,  # [M]
    ranks: Tensor | None,
    staged: bool,
) -> Tensor:
    """(x Wᵀ + delta + bias) · weight of every route, [M, N]; staged: x Wᵀ + delta rounded, then + bias · weight.

    Base and delta share one float32 accumulator, so this is our own kernel everywhere: a product of PyTorch's
    `grouped_mm` is rounded to bf16 before a delta could join it, and without LoRA it would have other bits than with.
    """
    out = x.new_empty(to.routes, weight.shape[1:-1].numel())
    if out.numel() == 0:
        return out
    if to.experts == 0:
        return out.zero_()
    from ..kernels import expert_linear as kernels

    a = b = h = None
    lora = lora_a is not None and lora_a.shape[-2] > 0 and to.slots > 0 and x.shape[1] > 0
    if lora:
        a, b = forms(in_dtype(lora_a, x), in_dtype(lora_b, x))
    groups = max(weight.dim() - 2, 1 if b is None else b.shape[2], 1 if bias is None else bias.dim() - 1)
    w = weight if weight.dim() == 4 else weight.unflatten(1, (groups, weight.shape[1] // groups))
    p = problem(x, to, groups, 1 if a is None else a.shape[2], x.shape[1], w.shape[2], 0 if a is None else a.shape[3])
    if lora:
        if b.shape[2] != groups:
            b = b.unflatten(3, (groups, b.shape[3] // groups)).squeeze(2)
        config = common.configured(launch_experts.shrink, p)
        h = run_shrink(name, x[:, None], a, a.shape[2], to, ranks, config=config)
    if bias is not None:
        bias = bias if bias.dim() == 3 else bias.unflatten(1, (groups, bias.shape[1] // groups))
    kernels.linear(
        name, x[:, None], w, h, b, bias, outer(out, groups), to.per_token(x), to.ids, to.adapters, to.plan, ranks,
        scalings, weights, staged, to.experts, to.slots, to.room, common.configured(launch_experts.linear, p),
    )  # fmt: skip
    return out


def linear(x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan) -> Tensor:
    slots = 0 if lora_a is None else lora_a.shape[0]
    if lora_a is None:  # a plan is cut by the slots of the layer's adapters, which this call does not know
        adapter_ids = plan = None
    to = routing("expert_linear", expert_ids, adapter_ids, weight.shape[0], slots, plan)
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    return projection("expert_linear", x, weight, lora_a, lora_b, to, scalings, bias, row_weights, ranks, False)


# --- gradients ---


def wanted(t: Tensor | None, need: bool, x: Tensor) -> Tensor:
    """Zeros for a gradient, or an empty stand-in for one that nobody asked for: kernels write pairs that have routes."""
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if need else x.new_empty(0)


def run_wgrad(
    name: str,
    narrow: Tensor,  # [M or T, G or 1, r]
    wide: Tensor,  # [M or T, G or 1, W]
    out: Tensor,  # [L, E, G, r, W], zeros
    to: Routing,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None = None,
) -> None:
    """out[l, e, g] += s_l Σ_m w_m narrow[m, g]ᵀ wide[m, g]."""
    if out.numel() == 0 or to.routes == 0:
        return
    from ..kernels import expert_wgrad as kernels

    _, _, groups, rank, width = out.shape
    p = problem(wide, to, groups, 1, width, 0, rank)
    config = common.configured(launch_experts.wgrad, p)
    tiles = common.configured(launch_experts.plan_tiles, to.routes, to.experts, to.slots)
    parts = None
    if tiles > config.run or to.routes > config.run * launch_experts.plan_rows(to.routes, to.experts, to.slots):
        windows = launch_experts.cdiv(tiles, config.run)
        parts = torch.empty(2 * windows, groups, rank, width, dtype=torch.float32, device=wide.device)
    kernels.wgrad(
        name, narrow, wide, out, parts, to.ids, to.plan, ranks, scalings, weights, to.slots, tiles, to.room, config
    )


def per_expert(to: Routing) -> Routing:
    """The routing by experts alone: the gradients of base weights and biases do not know slots."""
    return routing("expert_linear", to.ids, None, to.experts, 0, None, True)


def weight_grad(name: str, grad: Tensor, x: Tensor, weight: Tensor, to: Routing, weights: Tensor | None = None) -> Tensor:
    """dWₑ = Σ w_m grad_mᵀ x_m, like weight [E, N, D] or [E, 2, N/2, D]; `to` is `per_expert`."""
    dw = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    view = dw if dw.dim() == 4 else dw[:, None]
    run_wgrad(name, outer(grad, view.shape[1]), x[:, None], view[None], to, None, None, weights)
    return dw


def bias_grad(name: str, grad: Tensor, bias: Tensor, to: Routing, weights: Tensor | None = None) -> Tensor:
    """dbₑ = Σ w_m grad_m, like bias; `to` is `per_expert`. The products with ones sum in float32."""
    db = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    ones = torch.ones(1, 1, 1, dtype=torch.float32, device=grad.device).expand(to.routes, 1, 1)
    run_wgrad(name, ones, grad[:, None], db.view(1, bias.shape[0], 1, 1, -1), to, None, None, weights)
    return db


def route_slots(to: Routing) -> Tensor:
    """[M] the adapter of every route, −1 where it is masked: what the dense kernels read for factors that experts share."""
    flat = to.ids.reshape(-1)
    slots = torch.zeros_like(flat) if to.adapters is None else to.adapters.to(flat.dtype).repeat_interleave(to.top_k)
    return torch.where((flat >= 0) & (flat < to.experts), slots, -1)


def token_slots(to: Routing) -> Tensor:
    """[T] the adapter of every token, −1 where all its routes are masked: nothing of it may be read."""
    slots = to.ids.new_zeros(to.tokens) if to.adapters is None else to.adapters
    return torch.where(((to.ids >= 0) & (to.ids < to.experts)).any(1), slots, -1)


def summed(name: str, rows: Tensor, like: Tensor, to: Routing, weights: Tensor | None = None) -> Tensor:
    """[T, W] = Σ_k rows [M, W] (· weight) in float32, in like's dtype."""
    out = torch.empty(to.tokens, rows.shape[1], dtype=like.dtype, device=rows.device)
    if out.numel():
        from ..kernels import expert_rows as kernels

        kernels.combine(name, rows, out, to.ids, weights, to.experts)
    return out


def run_dot(name: str, p: Tensor, q: Tensor, out: Tensor, to: Routing, per_expert: bool = False) -> None:
    if to.routes and p.shape[1]:
        from ..kernels import expert_rows as kernels

        kernels.row_dot(name, p, q, out, to.ids, to.experts, per_expert)


class FactorGrads(NamedTuple):
    v: Tensor  # [M, G, r] float32, s · grad B: zeros where there is no adapter; not weighted
    da: Tensor
    db: Tensor
    dot: Tensor | None  # [M] float32, <h, v>


def factor_grads(
    name: str,
    grad: Tensor,  # [M or T, N]
    x: Tensor,  # [M or T, D]
    lora_a: Tensor,
    lora_b: Tensor,
    to: Routing,
    scalings: Tensor,
    weights: Tensor | None,  # [M]
    ranks: Tensor | None,
    needs: list[bool],  # lora_a, lora_b, dot
) -> FactorGrads:
    """dA = Σ (w v)ᵀ x and dB = s Σ (w grad)ᵀ h over a pair's routes; `to` has a plan. grad is in x's dtype."""
    a, b = forms(in_dtype(lora_a, x), in_dtype(lora_b, x))
    grad = outer(grad, b.shape[2])
    groups = a.shape[2]
    if groups == 1 and b.shape[2] == 2:  # both halves read one h: v is the sum of theirs
        v = run_shrink(name, grad, b.transpose(3, 4), 1, to, ranks, scalings, True)[0]
    else:
        v = run_shrink(name, grad, b.transpose(3, 4), groups, to, ranks, scalings, True)[0]
    da, db, dot = wanted(lora_a, needs[0], x), wanted(lora_b, needs[1], x), None
    if needs[1] or needs[2]:
        h = run_shrink(name, x[:, None], a, groups, to, ranks, fill=True)[0]
    if needs[1]:
        view = forms(lora_a, db)[1].transpose(3, 4)  # [L, E|1, G, r, N/G]
        if b.shape[1] == 1 and to.experts > 1:
            slots = route_slots(to)
            rows = h if h.shape[0] == to.routes else h.repeat_interleave(to.top_k, 0)
            if weights is not None:
                rows = rows * torch.where(slots >= 0, weights.float(), 0)[:, None, None]
            wide = grad if grad.shape[0] == to.routes else grad.repeat_interleave(to.top_k, 0)
            shared_wgrad(name, rows, wide, view[:, 0], slots, ranks, scalings)
        else:
            run_wgrad(name, h, grad, view, to, ranks, scalings, weights)
    if needs[2]:
        dot = torch.zeros(to.routes, dtype=torch.float32, device=x.device)
        run_dot(name, v.flatten(1), h.flatten(1), dot, to)
    if needs[0]:
        view = forms(da, lora_b)[0]
        if a.shape[1] == 1 and to.experts > 1:
            if to.per_token(x):
                rows = summed(name, v.flatten(1), v, to, weights).view(-1, groups, v.shape[2])
                slots = token_slots(to)
            else:
                slots = route_slots(to)
                rows = v if weights is None else v * torch.where(slots >= 0, weights.float(), 0)[:, None, None]
            shared_wgrad(name, rows, x[:, None], view[:, 0], slots, ranks, None)
        else:
            run_wgrad(name, v, x[:, None], view, to, ranks, None, weights)
    return FactorGrads(v, da, db, dot)


def shared_wgrad(name, narrow, wide, out, slots: Tensor, ranks, scalings) -> None:
    """The gradient [L, G, r, W] of a factor that all experts share: the dense ops' kernel, over routes or tokens."""
    if wide.shape[1] == 2 and narrow.shape[1] == 1:  # both halves of B read one h
        narrow = narrow.expand(-1, 2, -1)
    dense_wgrad(name, narrow, wide, out, slots, None, ranks, scalings)


def delta_backward(
    grad_y, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, row_weights, ranks, plan, needs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    name = "expert_delta_backward"
    experts, slots = max(lora_a.shape[1], lora_b.shape[1]), lora_a.shape[0]
    if min(lora_a.shape[1], lora_b.shape[1]) == 0:
        experts = 0
    routes = expert_ids.shape[0] * expert_ids.shape[1]
    if 0 in (routes, slots, experts, lora_a.shape[-2], x.shape[1], grad_y.shape[1]):
        return tuple([wanted(t, need, x) for t, need in zip((x, lora_a, lora_b, row_weights), needs)])
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    to = routing(name, expert_ids, adapter_ids, experts, slots, plan, True)
    found = factor_grads(name, grad_y, x, lora_a, lora_b, to, scalings, row_weights, ranks, needs[1:])
    dx = x.new_empty(0)
    if needs[0]:
        a = forms(in_dtype(lora_a, x), lora_b)[0]
        if a.shape[1] == 1 and to.per_token(x):  # Σ_k in rank space, then one product a token
            v = summed(name, found.v.flatten(1), found.v, to, row_weights).view(1, to.tokens, a.shape[2], a.shape[3])
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            b = a[:, 0].transpose(2, 3)
            dense_expand(name, v, b, None, dx[:, None], token_slots(to), None, ranks, None, None, a.shape[2], True)
        else:
            rows = torch.empty(to.routes, x.shape[1], dtype=torch.float32 if to.per_token(x) else x.dtype, device=x.device)
            run_expand(name, found.v[None], a.transpose(3, 4), None, rows[:, None], to, ranks, None, row_weights)
            dx = summed(name, rows, x, to) if to.per_token(x) else rows
    dw = x.new_empty(0) if not needs[3] else found.dot.to(row_weights.dtype)
    return dx, found.da, found.db, dw


def input_rows(
    name: str, grad: Tensor, weight: Tensor, lora_a: Tensor | None, v: Tensor | None, to: Routing, ranks, weights, dtype
) -> Tensor:
    """(grad Wₑ + v Aₑ) · w of every route, [M, D] in dtype: the product of `projection`, with W and A transposed."""
    from ..kernels import expert_linear as kernels

    w = weight if weight.dim() == 4 else weight[:, None]
    out = torch.empty(to.routes, weight.shape[-1], dtype=dtype, device=grad.device)
    if out.numel() == 0:
        return out
    if to.experts == 0 or grad.shape[1] == 0:
        return out.zero_()
    b = None if v is None else v_factor(lora_a, grad).transpose(3, 4)
    p = problem(grad, to, 1, 1, w.shape[2], out.shape[1], 0 if v is None else v.shape[2])
    kernels.linear(
        name, outer(grad, w.shape[1]), w.transpose(2, 3), None if v is None else v[None], b, None, out[:, None],
        to.per_token(grad), to.ids, to.adapters, to.plan, ranks, None, weights, False, to.experts, to.slots, to.room,
        common.configured(launch_experts.linear, p),
    )  # fmt: skip
    return out


def v_factor(lora_a: Tensor, x: Tensor) -> Tensor:
    a = in_dtype(lora_a, x)
    return a if a.dim() == 5 else a[:, :, None]


def linear_backward(
    grad_y, x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan, needs
) -> tuple[Tensor, ...]:
    name = "expert_linear_backward"
    need_x, need_weight, need_a, need_b, need_bias, need_w = needs
    routes = expert_ids.shape[0] * expert_ids.shape[1]
    inputs = (x, weight, lora_a, lora_b, bias, row_weights)
    if 0 in (routes, weight.shape[0], grad_y.shape[1]):
        return tuple([wanted(t, need, x) for t, need in zip(inputs, needs)])
    lora = lora_a is not None and 0 not in (lora_a.shape[0], lora_a.shape[-2], x.shape[1])
    slots = 0 if lora_a is None else lora_a.shape[0]
    if lora_a is None:
        adapter_ids = plan = None
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    to = routing(name, expert_ids, adapter_ids, weight.shape[0], slots, plan, need_a or need_b)
    dx = dweight = dbias = dw = x.new_empty(0)
    v, da, db = None, wanted(lora_a, need_a, x), wanted(lora_b, need_b, x)
    if lora and (need_x or need_a or need_b or need_w):
        found = factor_grads(name, grad_y, x, lora_a, lora_b, to, scalings, row_weights, ranks, [need_a, need_b, False])
        v, da, db = found.v, found.da, found.db
    if need_x or need_w:
        apart = need_w or to.per_token(x)  # <x, dx> is the gradient of the weight, less the bias's
        rows = input_rows(
            name, grad_y, weight, lora_a, v, to, ranks, None if need_w else row_weights, torch.float32 if apart else x.dtype
        )
        if need_w:
            dot = torch.zeros(routes, dtype=torch.float32, device=x.device)
            run_dot(name, x, rows, dot, to)
            if bias is not None:
                run_dot(name, grad_y, bias.flatten(1), dot, to, True)
            dw = dot.to(row_weights.dtype)
        if need_x and to.per_token(x):
            dx = summed(name, rows, x, to, row_weights if need_w else None)
        elif need_x:
            dx = rows if not need_w else weighted_rows(name, rows, row_weights, to, x.dtype)
    if need_weight or need_bias:
        by_expert = per_expert(to)
        if need_weight:
            dweight = weight_grad(name, grad_y, x, weight, by_expert, row_weights)
        if need_bias:
            dbias = bias_grad(name, grad_y, bias, by_expert, row_weights)
    return dx, dweight, da, db, dbias, dw


def weighted_rows(name: str, rows: Tensor, weights: Tensor | None, to: Routing, dtype) -> Tensor:
    """rows [T or M, D] · weights [M], one row for each route, in dtype; zeros where it is masked."""
    out = torch.empty(to.routes, rows.shape[1], dtype=dtype, device=rows.device)
    if out.numel():
        from ..kernels import expert_rows as kernels

        kernels.weighted(name, rows, out, to.ids, weights, to.experts)
    return out
