"""h = x Aᵀ, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import slot_rows
from .wgrad import wgrad


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums run in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_groups(t: Tensor, dim: int, grouped_ndim: int) -> Tensor:
    """t with a group axis at `dim`: one that it has, or one of size 1."""
    return t if t.dim() == grouped_ndim else t.unsqueeze(dim)


def shrink(
    x: Tensor,  # [T, D] or [T, G, D]
    lora_a: Tensor,  # [L, r, D] or [L, G, r, D]
    adapter_ids: Tensor,  # [T]
    *,
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """h[t, g] = A[l, g] x[t, g] with l = adapter_ids[t]; float32; exact zeros for rows without an adapter and past ranks[l]."""
    acc = accumulator(x.dtype)
    xg, ag = with_groups(x, 1, 3), with_groups(lora_a, 1, 4)
    groups = ag.shape[1] if x.dim() == 2 else x.shape[1]
    h = torch.zeros(x.shape[0], groups, lora_a.shape[-2], dtype=acc, device=x.device)
    for slot, rows in slot_rows(adapter_ids, lora_a.shape[0]):
        rank = h.shape[2] if ranks is None else int(ranks[slot])
        h[rows, :, :rank] = torch.einsum("tgd,grd->tgr", xg[rows].to(acc), ag[slot, :, :rank].to(acc))
    return h if x.dim() == 3 or lora_a.dim() == 4 else h[:, 0]


def shrink_backward(
    grad_h: Tensor,  # [T, r] or [T, G, r]
    x: Tensor,
    lora_a: Tensor,
    adapter_ids: Tensor,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # gradient wanted for x, for lora_a
) -> tuple[Tensor | None, Tensor | None]:
    """dx[t, g] = grad_h[t, g] A[l, g] (summed over groups that share x); dA[l, g] = Σ_t grad_h[t, g]ᵀ x[t, g]."""
    acc = accumulator(x.dtype)
    xg, ag, dh = with_groups(x, 1, 3), with_groups(lora_a, 1, 4), with_groups(grad_h, 1, 3).to(acc)
    dx = da = None
    if needs[0]:
        dxg = torch.zeros(xg.shape, dtype=acc, device=x.device)
        for slot, rows in slot_rows(adapter_ids, lora_a.shape[0]):
            rank = dh.shape[2] if ranks is None else int(ranks[slot])
            part = torch.einsum("tgr,grd->tgd", dh[rows, :, :rank], ag[slot, :, :rank].to(acc))
            dxg[rows] = part if xg.shape[1] == part.shape[1] else part.sum(1, keepdim=True)
        dx = dxg.to(x.dtype).view(x.shape)
    if needs[1]:
        da = wgrad(dh, xg, adapter_ids, None, lora_a.shape[0], ag.shape[1], ranks, lora_a.dtype).view(lora_a.shape)
    return dx, da
