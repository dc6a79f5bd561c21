"""What every expert op on a GPU is made of: the routing, and our kernels behind the shapes of PyTorch tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import driver, launch_experts
from ..reference.expert_delta import forms
from . import common, linear_cuda
from .expand import fill_base
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


def routing(ids: Tensor, adapters: Tensor | None, experts: int, slots: int, plan: Tensor | None, sort: bool = False) -> Routing:
    """The routing with the plan that kernels need: the caller's or one made here; none for few routes unless `sort`."""
    routes = ids.shape[0] * ids.shape[1]
    if not (sort or launch_experts.needs_plan(routes)):
        plan = None
    elif plan is None:
        plan = build(ids, adapters, experts, slots)
    return Routing(ids, adapters, experts, slots, plan)


def problem(t: Tensor, to: Routing, groups: int, a_groups: int, in_features: int, out_features: int, rank: int):
    arch, sms = common.facts(t)
    return launch_experts.ExpertProblem(
        arch, sms, t.element_size(), to.routes, to.experts, to.slots, groups, a_groups, in_features, out_features, rank,
        to.slots > 1 and to.adapters is not None, to.top_k,
    )  # fmt: skip


def in_dtype(t: Tensor | None, x: Tensor) -> Tensor | None:
    """A float32 master copy takes part rounded to x's dtype."""
    return t if t is None or t.dtype == x.dtype else driver.copied(t, x.dtype)


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
    halves: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """h [chunks, M, G, r] float32 of every route; [1, T, G, r] where A is shared and x has a row for each token.

    fill: zeros in routes without an adapter, which else hold nothing; the per-token h has them always. halves: [M, G, 2, r], in
    two bf16, for a shrink that is not split, into `out` if that is given.
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
    shape, dtype = (chunks, to.routes, groups, rank), torch.float32
    if halves:
        shape, dtype = (to.routes, groups, 2, rank), x.dtype
    h = driver.empty(shape, dtype, x.device) if out is None else out
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


class Operands(NamedTuple):
    """What a projection's kernel reads, all with one number of groups: 2 where anything has an axis of halves."""

    w: Tensor  # [E, G, N, D]
    h: Tensor | None  # [chunks, M or T, G or 1, r]; or [M, G or 1, 2, r], scaling · h in two bf16
    b: Tensor | None  # [L, E|1, G, N, r]
    bias: Tensor | None  # [E, G, N]
    problem: launch_experts.ExpertProblem
    taken: Tensor | None  # csrc/linear.cu's counter, filled ahead of h, for what makes h is what that may overlap


def operands(
    name: str, x: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, to: Routing, bias: Tensor | None,
    ranks: Tensor | None, groups: int, scalings: Tensor | None = None, out: Tensor | None = None, keep: Tensor | None = None,
    kept: Tensor | None = None,
) -> Operands:  # fmt: skip
    """Views of the operands in `groups` groups or more, and h, by the shrink's launch. out [M, N]: where `run_linear` is to write.

    keep [M, G, 2, r]: gets scaling · h in two bf16, zeros without an adapter. kept: what such a call wrote there for this x.
    """
    h = taken = None
    factors = (in_dtype(lora_a, x), in_dtype(lora_b, x)) if _adds(lora_a, x, to) else (None, None)
    w, a, b, bias, p = _views(x, weight, *factors, to, bias, groups)
    if a is not None:
        config, halves = common.configured(launch_experts.shrink, p), False
        if out is not None and _takes_cuda(name, x, w, a, b, bias, outer(out, p.groups), to, p):
            taken = linear_cuda.counter(x.device)
            halves = not config.split and not (a.shape[1] == 1 and to.per_token(x))
        if taken is not None and kept is not None:
            h = kept
        elif halves:
            h = run_shrink(name, x[:, None], a, a.shape[2], to, ranks, scalings, keep is not None, config, halves, keep)
        else:
            h = run_shrink(name, x[:, None], a, a.shape[2], to, ranks, None, keep is not None, config)
            if keep is not None:
                in_halves(name, h, to, scalings, keep)
    return Operands(w, h, b, bias, p, taken)


def in_halves(name: str, h: Tensor, to: Routing, scalings: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """h [chunks, M, G, r] (· scaling) in two bf16, [M, G, 2, r], zeros without an adapter."""
    from ..kernels.halves import halves

    if out is None:
        out = driver.empty((*h.shape[1:3], 2, h.shape[3]), torch.bfloat16, h.device)
    if out.numel():
        halves(name, h, out, to.adapters, to.top_k, scalings, to.slots, False, fill=True)
    return out


def _adds(lora_a: Tensor | None, x: Tensor, to: Routing) -> bool:
    return lora_a is not None and lora_a.shape[-2] > 0 and to.slots > 0 and x.shape[1] > 0


def _views(x: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, to: Routing, bias: Tensor | None, groups: int) -> tuple:
    """(W, A, B, bias, problem), all in `groups` groups or more."""
    a, b = (None, None) if lora_a is None else forms(lora_a, lora_b)
    groups = max(groups, weight.dim() - 2, 1 if b is None else b.shape[2], 1 if bias is None else bias.dim() - 1)
    w = weight if weight.dim() == 4 else weight.unflatten(1, (groups, weight.shape[1] // groups))
    if bias is not None and bias.dim() == 2:
        bias = bias.unflatten(1, (groups, bias.shape[1] // groups))
    if b is not None and b.shape[2] != groups:
        b = b.unflatten(3, (groups, b.shape[3] // groups)).squeeze(2)
    p = problem(x, to, groups, 1 if a is None else a.shape[2], x.shape[1], w.shape[2], 0 if a is None else a.shape[3])
    return w, a, b, bias, p


def _takes_cuda(
    name: str, x: Tensor, w: Tensor, a: Tensor | None, b: Tensor | None, bias: Tensor | None, out: Tensor, to: Routing,
    p: launch_experts.ExpertProblem,
) -> bool:  # fmt: skip
    """Whether csrc/linear.cu is chosen, there, and can take the product."""
    if to.plan is None or not common.configured(launch_experts.linear, p).cuda or linear_cuda.loaded(name, x) is None:
        return False
    h = None if a is None else torch.empty(to.routes, a.shape[2], 2, a.shape[3], dtype=x.dtype, device="meta")
    return linear_cuda.fits(x[:, None], w, h, b, bias, out, None)


def by_cuda(
    name: str, x: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, to: Routing, bias: Tensor | None
) -> bool:
    """Whether `projection` with these is csrc/linear.cu's product. Nothing is launched, nothing copied."""
    factors = (None, None)
    if _adds(lora_a, x, to):
        factors = (t if t.dtype == x.dtype else torch.empty(t.shape, dtype=x.dtype, device="meta") for t in (lora_a, lora_b))
    w, a, b, bias, p = _views(x, weight, *factors, to, bias, 1)
    out = torch.empty(to.routes, *w.shape[1:3], dtype=x.dtype, device="meta")
    return _takes_cuda(name, x, w, a, b, bias, out, to, p)


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
    out: Tensor | None = None,  # [M, N], to write into
    keep: Tensor | None = None,  # as in `operands`
    kept: Tensor | None = None,
) -> Tensor:
    """(x Wᵀ + delta + bias) · weight of every route, [M, N]; staged: x Wᵀ + delta rounded, then + bias · weight.

    Base and delta share one float32 accumulator, so this is our own kernel everywhere: a product of PyTorch's
    `grouped_mm` is rounded to bf16 before a delta could join it, and without LoRA it would have other bits than with.
    """
    if out is None:
        out = driver.empty((to.routes, weight.shape[1:-1].numel()), x.dtype, x.device)
    if out.numel() == 0:
        return out
    if to.experts == 0:
        fill_base(None, out)
        return out
    w, h, b, bias, p, taken = operands(name, x, weight, lora_a, lora_b, to, bias, ranks, 1, scalings, out, keep, kept)
    config = without_overlap(common.configured(launch_experts.linear, p), h is not None and h is kept)
    run_linear(name, x[:, None], w, h, b, bias, outer(out, p.groups), to, ranks, scalings, weights, staged, config, taken)
    return out


def without_overlap(config: launch_experts.ExpertLinearConfig, so: bool = True) -> launch_experts.ExpertLinearConfig:
    """For an h that no launch just ahead has made: what is made there, the counter of tiles or W's other operands, is waited for."""
    return replace(config, pdl=False) if so else config


def run_linear(
    name: str,
    x: Tensor,  # [M or T, G or 1, D]
    w: Tensor,  # [E, G, N, D]
    h: Tensor | None,  # [chunks, M or T, G' or 1, r]; or [M, G' or 1, 2, r], scaling · h in two bf16, where csrc/linear.cu is known to run
    b: Tensor | None,  # [L, E|1, G', N, r]
    bias: Tensor | None,  # [E, G, N]
    out: Tensor,  # [M, G, N]; with one group: the sum over all groups of x and w, and of h and b
    to: Routing,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,
    staged: bool,
    config: launch_experts.ExpertLinearConfig,
    taken: Tensor | None = None,  # as `Operands` has it
) -> None:
    """Write out = (x Wᵀ + scaling · h Bᵀ + bias) · weight, by csrc/linear.cu where the choice and the layouts allow it."""
    if config.cuda and to.plan is not None and linear_cuda.fits(x, w, h, b, bias, out, None):
        per_route = h is None or h.shape[0 if h.dtype == x.dtype else 1] == to.routes
        h_div = 1 if per_route else to.top_k
        divs = (to.top_k if to.per_token(x) else 1, h_div, to.top_k)
        tiling = linear_cuda.Tiling(linear_cuda.EXPERT, config.rank_block, 1, common.facts(x)[1], config.pdl)
        if linear_cuda.product(
            name, x, w, h, b, bias, out, to.adapters, divs, to.plan, ranks, scalings, weights, staged, None, tiling, taken
        ):  # fmt: skip
            return
    from ..kernels import expert_linear as kernels

    kernels.linear(
        name, x, w, h, b, bias, out, to.per_token(x), to.ids, to.adapters, to.plan, ranks, scalings, weights, staged,
        to.experts, to.slots, to.room, config,
    )  # fmt: skip


def summed(name: str, rows: Tensor, like: Tensor, to: Routing, weights: Tensor | None = None) -> Tensor:
    """[T, W] = Σ_k rows [M, W] (· weight) in float32, in like's dtype."""
    out = driver.empty((to.tokens, rows.shape[1]), like.dtype, rows.device)
    if out.numel():
        from ..kernels import expert_rows as kernels

        kernels.combine(name, rows, out, to.ids, weights, to.experts)
    return out


def run_dot(name: str, p: Tensor, q: Tensor, out: Tensor, to: Routing, per_expert: bool = False) -> None:
    if to.routes and p.shape[1]:
        from ..kernels import expert_rows as kernels

        kernels.row_dot(name, p, q, out, to.ids, to.experts, per_expert)


def weighted_rows(name: str, rows: Tensor, weights: Tensor | None, to: Routing, dtype) -> Tensor:
    """rows [T or M, D] · weights [M], one row for each route, in dtype; zeros where it is masked."""
    out = driver.empty((to.routes, rows.shape[1]), dtype, rows.device)
    if out.numel():
        from ..kernels import expert_rows as kernels

        kernels.weighted(name, rows, out, to.ids, weights, to.experts)
    return out


def activated_projection(
    name: str, x: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, to: Routing, scalings: Tensor | None,
    bias: Tensor | None, weights: Tensor | None, ranks: Tensor | None, activation: str, limit: float | None,
) -> Tensor:  # fmt: skip
    """a = act(x Wᵀ + delta + bias) (· weight) of every route, [M, I], in one launch behind the shrink; h1 is not stored."""
    groups = 1 if activation == "relu2" else 2
    out = driver.empty((to.routes, weight.shape[1:-1].numel() // groups), x.dtype, x.device)
    if out.numel() == 0:
        return out
    if to.experts == 0:
        fill_base(None, out)
        return out
    from ..kernels import expert_gate_up as kernels

    w, h, b, bias, p, _ = operands(name, x, weight, lora_a, lora_b, to, bias, ranks, groups)
    kernels.gate_up(
        name, x, w, h, b, bias, out, to.per_token(x), to.ids, to.adapters, to.plan, ranks, scalings, weights, activation,
        limit, to.experts, to.slots, to.room, common.configured(launch_experts.gate_up, p),
    )  # fmt: skip
    return out
