"""The expert MLP with LoRA on both projections, stage by stage, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .expert_activation import activate, activate_backward
from .expert_delta import route_delta, route_delta_backward
from .expert_routes import (
    active,
    expert_rows,
    join,
    route_base,
    route_base_backward,
    route_bias,
    route_bias_backward,
    sum_over_k,
)
from .shrink import accumulator


def expert_mlp(
    x: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, K]
    topk_weights: Tensor,  # [T, K]
    w_gate_up: Tensor,  # [E, 2I, H] or [E, 2, I, H]; [E, I, H] ungated
    w_down: Tensor,  # [E, H, I]
    gate_up_a: Tensor | None,  # [L, E|1, r, H] or [L, E|1, 2, r, H]
    gate_up_b: Tensor | None,  # [L, E|1, 2I, r] or [L, E|1, 2, I, r]
    down_a: Tensor | None,  # [L, E|1, r, I]
    down_b: Tensor | None,  # [L, E|1, H, r]
    adapter_ids: Tensor | None,  # [T]
    scalings: Tensor | None,  # [L]
    *,
    b_gate_up: Tensor | None = None,  # [E, 2I] or [E, 2, I]
    b_down: Tensor | None = None,  # [E, H]
    activation: str = "swiglu",
    activation_limit: float | None = None,
    router_weight: str = "pre_down",
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[t] = Σ_k down(act(gate_up(x[t]))) of expert topk_ids[t, k], its weight where router_weight says; see the op."""
    return expert_mlp_train(
        x,
        topk_ids,
        topk_weights,
        w_gate_up,
        w_down,
        gate_up_a,
        gate_up_b,
        down_a,
        down_b,
        adapter_ids,
        scalings,
        b_gate_up=b_gate_up,
        b_down=b_down,
        activation=activation,
        activation_limit=activation_limit,
        router_weight=router_weight,
        ranks=ranks,
    )[0]


def _projection(x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, ranks) -> Tensor:
    """x Wₑᵀ + delta of every route, rounded once."""
    y = route_base(x, weight, expert_ids)
    if lora_a is not None:
        y = join(y, route_delta(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, ranks, weight.shape[0]))
    return y.to(x.dtype)


def _inputs(x, topk_ids, route_weights, router_weight) -> Tensor:
    """What gate_up reads: x itself, or under `input` x · weight of every route, rounded."""
    if router_weight != "input":
        return x
    return (x.to(route_weights.dtype).repeat_interleave(topk_ids.shape[1], 0) * route_weights).to(x.dtype)


def _route_weights(x: Tensor, topk_weights: Tensor) -> Tensor:
    """[M, 1] in the dtype of the sums: a float32 weight keeps its bits until the product."""
    return topk_weights.reshape(-1, 1).to(accumulator(x.dtype))


def _hidden(x, topk_ids, weights, w_gate_up, a, b, adapter_ids, scalings, bias, router_weight, ranks) -> Tensor:
    """Stages 1–3: h1 of every route, with its bias, as the activation reads it: [M, U] in x's dtype."""
    inputs = _inputs(x, topk_ids, weights, router_weight)
    h1 = _projection(inputs, w_gate_up, a, b, topk_ids, adapter_ids, scalings, ranks)
    return h1 if bias is None else (h1.to(weights.dtype) + route_bias(bias, topk_ids, weights.dtype)).to(x.dtype)


def _activated(h1, topk_ids, weights, activation, limit, router_weight, num_experts) -> Tensor:
    """Stage 4: a of every route, [M, I] in h1's dtype; the activation is evaluated for an expert's rows at a time."""
    inner = h1.shape[1] if activation == "relu2" else h1.shape[1] // 2
    a = torch.zeros(h1.shape[0], inner, dtype=h1.dtype, device=h1.device)
    for _, rows in expert_rows(topk_ids, num_experts):
        value = activate(h1[rows].to(weights.dtype), activation, limit)
        a[rows] = (value * weights[rows] if router_weight == "pre_down" else value).to(h1.dtype)
    return a


def _down(a, topk_ids, weights, w_down, lora_a, lora_b, adapter_ids, scalings, bias, router_weight, ranks) -> Tensor:
    """Stages 5 and 6: h2 of every route with its bias, [M, H] in a's dtype."""
    h2 = _projection(a, w_down, lora_a, lora_b, topk_ids, adapter_ids, scalings, ranks)
    if bias is None:
        return h2
    term = route_bias(bias, topk_ids, weights.dtype)
    if router_weight == "pre_down":
        term = torch.where(active(topk_ids, w_down.shape[0]), term * weights, 0)
    return (h2.to(weights.dtype) + term).to(a.dtype)


def expert_mlp_train(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    adapter_ids: Tensor | None,
    scalings: Tensor | None,
    *,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "swiglu",
    activation_limit: float | None = None,
    router_weight: str = "pre_down",
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, h1): h1 is what the activation reads, [T·K, U] in x's dtype, kept for the backward; masked rows mean nothing."""
    weights = _route_weights(x, topk_weights)
    h1 = _hidden(
        x, topk_ids, weights, w_gate_up, gate_up_a, gate_up_b, adapter_ids, scalings, b_gate_up, router_weight, ranks
    )
    a = _activated(h1, topk_ids, weights, activation, activation_limit, router_weight, w_down.shape[0])
    h2 = _down(a, topk_ids, weights, w_down, down_a, down_b, adapter_ids, scalings, b_down, router_weight, ranks)
    routes = h2.to(weights.dtype)
    if router_weight == "post_down":
        routes = torch.where(active(topk_ids, w_down.shape[0]), routes * weights, 0)
    return sum_over_k(routes, topk_ids).to(x.dtype), h1


def expert_mlp_backward(
    grad_y: Tensor,  # [T, H]
    h1: Tensor | None,  # [T·K, U] of expert_mlp_train; None: computed anew
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    adapter_ids: Tensor | None,
    scalings: Tensor | None,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    activation: str,
    activation_limit: float | None,
    router_weight: str,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # for x, topk_weights, w_gate_up, w_down, gate_up_a, gate_up_b, down_a, down_b, b_gate_up, b_down
) -> tuple[Tensor | None, ...]:
    """The ten gradients, None where not wanted.

    As autograd has it for the stages: the gradient of a rounded stage (g2 of h2, ga of a, g1 of h1, gx of xₖ under
    `input`) is summed in float32 and rounded once to x's dtype; dx is summed over k in float32 in slot order and rounded
    once. The gradient of a weight: pre_down <act(h1), ga> + <b_down, g2>; post_down <h2, grad_y>, h2 computed anew;
    input <x, gx>. Nothing is divided by the weight.
    """
    acc = accumulator(x.dtype)
    need_x, need_w, need_wgu, need_wd, need_gua, need_gub, need_da, need_db, need_bgu, need_bd = needs
    pre, post, at_input = (router_weight == name for name in ("pre_down", "post_down", "input"))
    experts, top_k = w_down.shape[0], topk_ids.shape[1]
    routed = active(topk_ids, experts)
    weights = _route_weights(x, topk_weights)
    if h1 is None:
        h1 = _hidden(
            x, topk_ids, weights, w_gate_up, gate_up_a, gate_up_b, adapter_ids, scalings, b_gate_up, router_weight, ranks
        )
    a = _activated(h1, topk_ids, weights, activation, activation_limit, router_weight, experts)
    dw = torch.zeros(topk_ids.numel(), dtype=acc, device=x.device)

    grad = torch.where(routed, grad_y.to(acc).repeat_interleave(top_k, 0), 0)
    g2 = (grad * weights if post else grad).to(x.dtype)
    if need_w and post:
        h2 = _down(a, topk_ids, weights, w_down, down_a, down_b, adapter_ids, scalings, b_down, router_weight, ranks)
        dw += (h2.to(acc) * grad).sum(1)
    d_bd = None
    if b_down is not None and (need_bd or (need_w and pre)):
        g = g2.to(acc)
        if need_bd:
            d_bd = route_bias_backward(g * weights if pre else g, b_down, topk_ids)
        if need_w and pre:
            dw += (g * route_bias(b_down, topk_ids, acc)).sum(1)

    need_h1 = need_x or need_wgu or need_gua or need_gub or need_bgu or (need_w and at_input)
    need_a = need_h1 or (need_w and pre)
    ga, d_wd = route_base_backward(g2, a, w_down, topk_ids, [need_a, need_wd])
    d_da = d_db = d_gua = d_gub = None
    if down_a is not None:
        part, d_da, d_db, _ = route_delta_backward(
            g2, a, down_a, down_b, topk_ids, adapter_ids, scalings, None, ranks, [need_a, need_da, need_db, False], experts
        )
        ga = ga if part is None else join(ga, part)
    dx = d_wgu = d_bgu = None
    if need_a:
        g1 = torch.zeros(h1.shape, dtype=x.dtype, device=x.device)
        ga = ga.to(x.dtype)
        for _, rows in expert_rows(topk_ids, experts):
            h, g = h1[rows].to(acc), ga[rows].to(acc)
            if pre:
                if need_w:
                    dw[rows] += (g * activate(h, activation, activation_limit)).sum(1)
                g = g * weights[rows]
            g1[rows] = activate_backward(g, h, activation, activation_limit).to(x.dtype)
    if need_h1:
        if need_bgu:
            d_bgu = route_bias_backward(g1.to(acc), b_gate_up, topk_ids)
        inputs = _inputs(x, topk_ids, weights, router_weight)
        need_gx = need_x or (need_w and at_input)
        gx, d_wgu = route_base_backward(g1, inputs, w_gate_up, topk_ids, [need_gx, need_wgu])
        if gate_up_a is not None:
            part, d_gua, d_gub, _ = route_delta_backward(
                g1,
                inputs,
                gate_up_a,
                gate_up_b,
                topk_ids,
                adapter_ids,
                scalings,
                None,
                ranks,
                [need_gx, need_gua, need_gub, False],
                experts,
            )
            gx = gx if part is None else join(gx, part)
        if at_input and need_gx:
            gx = gx.to(x.dtype).to(acc)
            if need_w:
                dw += torch.where(routed, gx * x.to(acc).repeat_interleave(top_k, 0), 0).sum(1)
            gx = torch.where(routed, gx * weights, 0)
        dx = sum_over_k(gx, topk_ids).to(x.dtype) if need_x else None
    dw = dw.to(topk_weights.dtype).view(topk_weights.shape) if need_w else None
    return dx, dw, d_wgu, d_wd, d_gua, d_gub, d_da, d_db, d_bgu, d_bd
