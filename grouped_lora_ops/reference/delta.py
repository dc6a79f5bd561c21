"""y = base + scaling · (x Aᵀ) Bᵀ, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .expand import add_to_base, expand_backward, scaled_delta
from .shrink import shrink, shrink_backward


def delta(
    x: Tensor,  # [T, D] or [T, G, D]
    lora_a: Tensor,  # [L, r, D] or [L, G, r, D]
    lora_b: Tensor,  # [L, N, r], [L, G, N, r] or [L, ΣN, r]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor,  # [L]
    *,
    base: Tensor | None = None,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """y[t, g] = base[t, g] + scalings[l] · B[l, g] (A[l, g] x[t, g]) with l = adapter_ids[t], rounded once to x's dtype."""
    h = shrink(x, lora_a, adapter_ids, ranks=ranks)
    return add_to_base(scaled_delta(h, lora_b, adapter_ids, scalings, out_sizes, ranks), base, x.dtype)


def delta_(
    out: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    *,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> None:
    """out += delta(x, …), rounded once."""
    out.copy_(delta(x, lora_a, lora_b, adapter_ids, scalings, base=out, out_sizes=out_sizes, ranks=ranks))


def delta_backward(
    grad_y: Tensor,  # like y
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    out_sizes: list[int] | None,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # gradient wanted for x, for lora_a, for lora_b
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `expand` and `shrink` in turn; h is computed again and, as dh, never rounded."""
    if needs[2]:
        h = shrink(x, lora_a, adapter_ids, ranks=ranks)
    else:  # only h's shape and dtype are needed
        shape = [x.shape[0], *lora_a.shape[1:3]] if lora_a.dim() == 4 else [*x.shape[:-1], lora_a.shape[1]]
        h = torch.zeros(1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device).expand(shape)
    need_dh = needs[0] or needs[1]
    dh, db = expand_backward(
        grad_y, h, lora_b, adapter_ids, scalings, out_sizes, ranks, None, [need_dh, needs[2]]
    )
    dx = da = None
    if dh is not None:
        dx, da = shrink_backward(dh, x, lora_a, adapter_ids, ranks, None, needs[:2])
    return dx, da, db
