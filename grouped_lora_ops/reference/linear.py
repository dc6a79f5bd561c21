"""y = x Wᵀ + scaling · (x Aᵀ) Bᵀ + bias, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .delta import delta_backward
from .expand import scaled_delta, slices
from .expert_routes import join
from .shrink import accumulator, shrink, with_groups


def linear(
    x: Tensor,  # [T, D] or [T, G, D]
    weight: Tensor,  # [N, D], [G, N, D] or [ΣN, D]
    lora_a: Tensor,  # [L, r, D] or [L, G, r, D]
    lora_b: Tensor,  # [L, N, r], [L, G, N, r] or [L, ΣN, r]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor,  # [L]
    *,
    bias: Tensor | None = None,  # [N], [G, N] or [ΣN]
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """y[t, g] = W[g] x[t, g] + scalings[l] · B[l, g] (A[l, g] x[t, g]) + bias[g], rounded once to x's dtype.

    Where the delta is zero y has the bits of x Wᵀ + bias alone.
    """
    h = shrink(x, lora_a, adapter_ids, ranks=ranks)
    y = join(_base(x, weight, out_sizes), scaled_delta(h, lora_b, adapter_ids, scalings, out_sizes, ranks))
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def _base(x: Tensor, weight: Tensor, out_sizes: list[int] | None) -> Tensor:
    acc = accumulator(x.dtype)
    x, weight = x.to(acc), weight.to(acc)
    if weight.dim() == 3:
        return torch.einsum("tgd,gnd->tgn" if x.dim() == 3 else "td,gnd->tgn", x, weight)
    if x.dim() == 2:
        return x @ weight.t()
    return torch.cat([x[:, g] @ weight[columns].t() for g, columns in enumerate(slices(out_sizes))], 1)


def linear_backward(
    grad_y: Tensor,  # like y
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    bias: Tensor | None,
    out_sizes: list[int] | None,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # gradient wanted for x, weight, lora_a, lora_b, bias
) -> tuple[Tensor | None, ...]:
    """dx = grad_y W + delta's dx, joined before the one rounding; dW[g] = Σ_t grad_y[t, g]ᵀ x[t, g]; dbias = Σ_t grad_y;
    dA and dB as in `delta`."""
    need_x, need_weight, need_a, need_b, need_bias = needs
    acc = accumulator(x.dtype)
    wide, g = x.to(acc), grad_y.to(acc)
    dx, da, db = delta_backward(
        grad_y, wide, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, [need_x, need_a, need_b]
    )
    if need_x:
        dx = join(_base_dx(g, x, weight, out_sizes), dx).to(x.dtype)
    dweight = _base_dweight(g, wide, weight, out_sizes).to(weight.dtype) if need_weight else None
    dbias = g.sum(0).to(bias.dtype) if need_bias else None
    return dx, dweight, da, db, dbias


def _base_dx(g: Tensor, x: Tensor, weight: Tensor, out_sizes: list[int] | None) -> Tensor:
    weight = weight.to(g.dtype)
    if weight.dim() == 3:
        return torch.einsum("tgn,gnd->tgd" if x.dim() == 3 else "tgn,gnd->td", g, weight)
    if x.dim() == 2:
        return g @ weight
    return torch.stack([g[:, columns] @ weight[columns] for columns in slices(out_sizes)], 1)


def _base_dweight(g: Tensor, x: Tensor, weight: Tensor, out_sizes: list[int] | None) -> Tensor:
    if weight.dim() == 3:
        return torch.einsum("tgn,tgd->gnd", g, with_groups(x, 1, 3).expand(-1, weight.shape[0], -1))
    if x.dim() == 2:
        return g.t() @ x
    return torch.cat([g[:, columns].t() @ x[:, i] for i, columns in enumerate(slices(out_sizes))], 0)
