"""The gradients of the expert ops on a GPU. Arguments are checked already."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import driver, launch_experts
from ..reference.expert_delta import forms
from . import common, linear_cuda
from .expand import run as dense_expand
from .expert_launch import (
    Routing,
    in_dtype,
    in_halves,
    outer,
    problem,
    routing,
    run_dot,
    run_expand,
    run_linear,
    run_shrink,
    summed,
    weighted_rows,
    without_overlap,
)
from .wgrad import wgrad as dense_wgrad


def wanted(t: Tensor | None, need: bool, x: Tensor) -> Tensor:
    """Zeros for a gradient, or an empty stand-in for one that nobody asked for: kernels write pairs that have routes."""
    return driver.zeros(t.shape, t.dtype, t.device) if need else common.nothing(x)


def wanted_of_pairs(name: str, factors: list[Tensor], needs: list[bool], to: Routing, x: Tensor) -> list[Tensor]:
    """`wanted` for factors of every expert: zeros in the pairs that have no route, nothing yet in the others."""
    made = [driver.empty(t.shape, t.dtype, t.device) if need else common.nothing(x) for t, need in zip(factors, needs)]
    if filled := [t for t in made if t.numel()]:
        from ..kernels import expert_wgrad as kernels

        kernels.clear_absent(name, filled, to.routes, to.plan, to.room)
    return made


def run_wgrad(
    name: str,
    narrow: Tensor,  # [M or T, G or 1, r]; or [M, G or 1, 2, r] in two bf16
    wide: Tensor,  # [M or T, G or 1, W]
    out: Tensor,  # [L, E, G, r, W]
    to: Routing,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None = None,
) -> None:
    """out[l, e, g] = s_l Σ_m w_m narrow[m, g]ᵀ wide[m, g], of pairs that have routes."""
    if out.numel() == 0 or to.routes == 0:
        return
    from ..kernels import expert_wgrad as kernels

    _, _, groups, rank, width = out.shape
    p = problem(wide, to, groups, 1, width, 0, rank)
    halves = narrow.dim() == 4
    config = common.configured(launch_experts.wgrad, p, halves, halves and wide.shape[1] == 1)
    tiles = common.configured(launch_experts.plan_tiles, to.routes, to.experts, to.slots)
    parts = None
    if tiles > config.run or to.routes > config.run * launch_experts.plan_rows(to.routes, to.experts, to.slots):
        windows = launch_experts.cdiv(tiles, config.run)
        parts = driver.empty((2 * windows, groups, rank, width), torch.float32, wide.device)
    kernels.wgrad(
        name, narrow, wide, out, parts, to.ids, to.plan, ranks, scalings, weights, to.slots, tiles, to.room, config
    )


def per_expert(to: Routing) -> Routing:
    """The routing by experts alone: the gradients of base weights and biases do not know slots."""
    return routing(to.ids, None, to.experts, 0, None, True)


def weight_grad(name: str, grad: Tensor, x: Tensor, weight: Tensor, to: Routing, weights: Tensor | None = None) -> Tensor:
    """dWₑ = Σ w_m grad_mᵀ x_m, like weight [E, N, D] or [E, 2, N/2, D]; `to` is `per_expert`."""
    dw = driver.zeros(weight.shape, weight.dtype, weight.device)
    view = dw if dw.dim() == 4 else dw[:, None]
    run_wgrad(name, outer(grad, view.shape[1]), x[:, None], view[None], to, None, None, weights)
    return dw


def bias_grad(name: str, grad: Tensor, bias: Tensor, to: Routing, weights: Tensor | None = None) -> Tensor:
    """dbₑ = Σ w_m grad_m, like bias; `to` is `per_expert`. The products with ones sum in float32."""
    db = driver.zeros(bias.shape, bias.dtype, bias.device)
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


class FactorGrads(NamedTuple):
    v: Tensor  # [M, G, r] float32, s · grad B: zeros where there is no adapter; not weighted. Or [M, G, 2, r], in two bf16
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
    kept: Tensor | None = None,  # [M, G, 2, r], what `operands` kept of x
    halves: bool = False,  # whether v may come in two bf16
) -> FactorGrads:
    """dA = Σ (w v)ᵀ x and dB = s Σ (w grad)ᵀ h over a pair's routes; `to` has a plan. grad is in x's dtype.

    Where it can be, v and s · h are made in two bf16 each, which is what the matrix unit takes.
    """
    a, b = forms(in_dtype(lora_a, x), in_dtype(lora_b, x))
    grad = outer(grad, b.shape[2])
    groups, rank = a.shape[2], a.shape[3]
    a_shared, b_shared = (factor.shape[1] == 1 and to.experts > 1 for factor in (a, b))
    da, db = wanted_of_pairs(name, [lora_a, lora_b], [needs[0] and not a_shared, needs[1] and not b_shared], to, x)
    if a_shared:
        da = wanted(lora_a, needs[0], x)
    if b_shared:
        db = wanted(lora_b, needs[1], x)
    x_halves, grad_halves = (weights is None and takes_halves(wide, rank) for wide in (x[:, None], grad))
    dot = None
    # both halves of B may read one h: then v is the sum of theirs
    shrink = functools.partial(run_shrink, name, grad, b.transpose(3, 4), groups, to, ranks, scalings, True)
    halves = halves and x_halves and not a_shared
    v = shrink(halves=True) if halves else shrink()[0]
    if needs[1] and grad_halves and not (a_shared or b_shared or needs[2]):
        if kept is None:
            kept = run_shrink(name, x[:, None], a, groups, to, ranks, scalings, True, halves=True)
        run_wgrad(name, kept, grad, forms(lora_a, db)[1].transpose(3, 4), to, ranks, None)
    elif needs[1] or needs[2]:
        h = run_shrink(name, x[:, None], a, groups, to, ranks, fill=True)[0]
        if needs[1]:
            view = forms(lora_a, db)[1].transpose(3, 4)  # [L, E|1, G, r, N/G]
            if b_shared:
                slots = route_slots(to)
                rows = h if h.shape[0] == to.routes else h.repeat_interleave(to.top_k, 0)
                if weights is not None:
                    rows = rows * torch.where(slots >= 0, weights.float(), 0)[:, None, None]
                wide = grad if grad.shape[0] == to.routes else grad.repeat_interleave(to.top_k, 0)
                shared_wgrad(name, rows, wide, view[:, 0], slots, ranks, scalings)
            else:
                run_wgrad(name, h, grad, view, to, ranks, scalings, weights)
        if needs[2]:
            dot = driver.zeros((to.routes,), torch.float32, x.device)
            run_dot(name, v.flatten(1), h.flatten(1), dot, to)
    if needs[0]:
        view = forms(da, lora_b)[0]
        if a_shared:
            if to.per_token(x):
                rows = summed(name, v.flatten(1), v, to, weights).view(-1, groups, v.shape[2])
                slots = token_slots(to)
            else:
                slots = route_slots(to)
                rows = v if weights is None else v * torch.where(slots >= 0, weights.float(), 0)[:, None, None]
            shared_wgrad(name, rows, x[:, None], view[:, 0], slots, ranks, None)
        else:
            narrow = in_halves(name, v[None], to) if x_halves and not halves else v
            run_wgrad(name, narrow, x[:, None], view, to, ranks, None, weights)
    return FactorGrads(v, da, db, dot)


def takes_halves(wide: Tensor, rank: int) -> bool:
    """Whether `run_wgrad` is to meet this wide with a narrow in two bf16."""
    from ..kernels import expert_wgrad as kernels

    return launch_experts.wgrad_takes_halves(common.facts(wide)[0]) and kernels.takes_halves(wide, rank)


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
    to = routing(expert_ids, adapter_ids, experts, slots, plan, True)
    found = factor_grads(name, grad_y, x, lora_a, lora_b, to, scalings, row_weights, ranks, needs[1:])
    dx = common.nothing(x)
    if needs[0]:
        a = forms(in_dtype(lora_a, x), lora_b)[0]
        if a.shape[1] == 1 and to.per_token(x):  # Σ_k in rank space, then one product a token
            v = summed(name, found.v.flatten(1), found.v, to, row_weights).view(1, to.tokens, a.shape[2], a.shape[3])
            dx = driver.empty(x.shape, x.dtype, x.device)
            b = a[:, 0].transpose(2, 3)
            dense_expand(name, v, b, None, dx[:, None], token_slots(to), None, ranks, None, None, a.shape[2], True)
        else:
            rows = driver.empty((to.routes, x.shape[1]), torch.float32 if to.per_token(x) else x.dtype, x.device)
            run_expand(name, found.v[None], a.transpose(3, 4), None, rows[:, None], to, ranks, None, row_weights)
            dx = summed(name, rows, x, to) if to.per_token(x) else rows
    dw = common.nothing(x) if not needs[3] else driver.cast(found.dot, row_weights.dtype)
    return dx, found.da, found.db, dw


def input_rows(
    name: str, grad: Tensor, weight: Tensor, lora_a: Tensor | None, v: Tensor | None, to: Routing, ranks, weights, dtype
) -> Tensor:
    """(grad Wₑ + v Aₑ) · w of every route, [M, D] in dtype: the product of `projection`, with W and A transposed. v as `FactorGrads` has
    it, in two bf16 where `rows_by_cuda` says so."""
    out = driver.empty((to.routes, weight.shape[-1]), dtype, grad.device)
    if out.numel() == 0:
        return out
    if to.experts == 0 or grad.shape[1] == 0:
        driver.refuse()
        return out.zero_()
    b = None if v is None else v_factor(lora_a, grad).transpose(3, 4)
    x, w, config = _transposed(grad, weight, to, 0 if v is None else v.shape[-1])
    h = v if v is None or v.dim() == 4 else v[None]
    config = without_overlap(config, h is not None and h is v)
    run_linear(name, x, w, h, b, None, out[:, None], to, ranks, None, weights, False, config)
    return out


def _transposed(grad: Tensor, weight: Tensor, to: Routing, rank: int) -> tuple:
    """(grad, W, config) as `run_linear` takes them."""
    w = weight if weight.dim() == 4 else weight[:, None]
    p = problem(grad, to, 1, 1, w.shape[2], weight.shape[-1], rank)
    return outer(grad, w.shape[1]), w.transpose(2, 3), common.configured(launch_experts.linear, p, True)


def rows_by_cuda(name: str, grad: Tensor, weight: Tensor, lora_a: Tensor, to: Routing, dtype) -> bool:
    """Whether `input_rows` is csrc/linear.cu's product, which takes v in two bf16. Nothing is launched, nothing copied."""
    if to.plan is None or 0 in (to.experts, to.routes, *grad.shape, weight.shape[-1]):
        return False
    a = lora_a if lora_a.dtype == grad.dtype else torch.empty(lora_a.shape, dtype=grad.dtype, device="meta")
    b = v_factor(a, grad).transpose(3, 4)
    x, w, config = _transposed(grad, weight, to, b.shape[4])
    if not config.cuda or linear_cuda.loaded(name, grad) is None:
        return False
    v = torch.empty(to.routes, b.shape[2], 2, b.shape[4], dtype=grad.dtype, device="meta")
    return linear_cuda.fits(x, w, v, b, None, torch.empty(to.routes, 1, weight.shape[-1], dtype=dtype, device="meta"), None)


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
    to = routing(expert_ids, adapter_ids, weight.shape[0], slots, plan, need_a or need_b)
    dx = dweight = dbias = dw = common.nothing(x)
    apart = need_w or to.per_token(x)  # <x, dx> is the gradient of the weight, less the bias's
    dtype = torch.float32 if apart else x.dtype
    if lora and (need_x or need_a or need_b or need_w):
        halves = rows_by_cuda(name, grad_y, weight, lora_a, to, dtype)
        found = factor_grads(
            name, grad_y, x, lora_a, lora_b, to, scalings, row_weights, ranks, [need_a, need_b, False], halves=halves
        )
        v, da, db = found.v, found.da, found.db
    else:
        v, da, db = None, wanted(lora_a, need_a, x), wanted(lora_b, need_b, x)
    if need_x or need_w:
        rows = input_rows(name, grad_y, weight, lora_a, v, to, ranks, None if need_w else row_weights, dtype)
        if need_w:
            dot = driver.zeros((routes,), torch.float32, x.device)
            run_dot(name, x, rows, dot, to)
            if bias is not None:
                run_dot(name, grad_y, bias.flatten(1), dot, to, True)
            dw = driver.cast(dot, row_weights.dtype)
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
