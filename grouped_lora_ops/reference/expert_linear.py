"""y = (x Wₑᵀ + delta + biasₑ) · w over routes, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .expert_delta import route_delta, route_delta_backward
from .expert_routes import active, join, route_base, route_base_backward, route_bias, route_bias_backward, sum_routes
from .shrink import accumulator


def expert_linear(
    x: Tensor,  # [T, D] or [T·K, D]
    weight: Tensor,  # [E, N, D] or [E, 2, N/2, D]
    lora_a: Tensor | None,  # [L, E|1, r, D] or [L, E|1, 2, r, D]
    lora_b: Tensor | None,  # [L, E|1, N, r] or [L, E|1, 2, N/2, r]
    expert_ids: Tensor,  # [T, K]
    adapter_ids: Tensor | None,  # [T]
    scalings: Tensor | None,  # [L]
    *,
    bias: Tensor | None = None,  # [E, N] or [E, 2, N/2]
    row_weights: Tensor | None = None,  # [T·K]
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[m] = (x[m] W[e]ᵀ + scalings[l] · B[l, e] (A[l, e] x[m]) + bias[e]) · row_weights[m], rounded once to x's dtype."""
    y = _unweighted(x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, ranks)
    if row_weights is not None:
        y = torch.where(active(expert_ids, weight.shape[0]), y * row_weights.to(y.dtype).unsqueeze(1), 0)
    return y.to(x.dtype)


def _unweighted(x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, ranks) -> Tensor:
    y = route_base(x, weight, expert_ids)
    if lora_a is not None:
        y = join(y, route_delta(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, ranks, weight.shape[0]))
    return y if bias is None else y + route_bias(bias, expert_ids, y.dtype)


def expert_linear_backward(
    grad_y: Tensor,  # [T·K, N]
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    expert_ids: Tensor,
    adapter_ids: Tensor | None,
    scalings: Tensor | None,
    bias: Tensor | None,
    row_weights: Tensor | None,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # gradient wanted for x, weight, lora_a, lora_b, bias, row_weights
) -> tuple[Tensor | None, ...]:
    """With g = w · grad_y in float32: dx = g W + s (g B) A, summed over k where x is [T, D]; the factors' gradients as
    in `expert_delta`; dW, dbias = sums over an expert's rows; dw = <y / w, grad_y>, y / w computed anew. Rounded once each.
    """
    acc = accumulator(x.dtype)
    need_x, need_weight, need_a, need_b, need_bias, need_w = needs
    experts = weight.shape[0]
    g = grad_y.to(acc)
    dw = None
    if need_w:
        y = _unweighted(x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, ranks)
        dw = torch.where(active(expert_ids, experts), y * g, 0).sum(1).to(row_weights.dtype)
    if row_weights is not None:
        g = g * row_weights.to(acc).unsqueeze(1)
    dx, dweight = route_base_backward(g, x, weight, expert_ids, [need_x, need_weight])
    da = db = None
    if lora_a is not None:
        part, da, db, _ = route_delta_backward(
            g, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, None, ranks, [need_x, need_a, need_b, False], experts
        )
        dx = dx if part is None else join(dx, part)
    dx = None if dx is None else sum_routes(dx, x, expert_ids)
    dbias = route_bias_backward(g, bias, expert_ids) if need_bias else None
    return dx, dweight, da, db, dbias, dw
