"""y = base + w · s · Bₑ (Aₑ x) over routes, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .expand import add_to_base
from .expert_routes import active, bucket_rows, halves, rows_of, sum_routes
from .shrink import accumulator


def expert_delta(
    x: Tensor,  # [T, D] or [T·K, D]
    lora_a: Tensor,  # [L, E|1, r, D] or [L, E|1, 2, r, D]
    lora_b: Tensor,  # [L, E|1, N, r] or [L, E|1, 2, N/2, r]
    expert_ids: Tensor,  # [T, K]
    adapter_ids: Tensor | None,  # [T]
    scalings: Tensor,  # [L]
    *,
    base: Tensor | None = None,  # [T·K, N]
    row_weights: Tensor | None = None,  # [T·K]
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[m] = base[m] + row_weights[m] · scalings[l] · B[l, e] (A[l, e] x[m]), rounded once to x's dtype."""
    delta = route_delta(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, ranks)
    if row_weights is not None:
        routed = active(expert_ids, experts_of(lora_a, lora_b))
        delta = torch.where(routed & (delta != 0), delta * row_weights.to(delta.dtype).unsqueeze(1), delta)
    return add_to_base(delta, base, x.dtype)


def experts_of(lora_a: Tensor, lora_b: Tensor) -> int:
    """E as a pair says it: 1 only where both factors are shared."""
    return lora_b.shape[1] if lora_a.shape[1] == 1 else lora_a.shape[1]


def forms(lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
    """Views with an axis of halves each: A [L, E|1, 1 or 2, r, D] and B [L, E|1, 1 or 2, N/1 or N/2, r].

    With an A for each half, B has two; a B of two halves may read one A.
    """
    a = halves(lora_a, 2, 4)
    if lora_b.dim() == 4 and a.shape[2] == 2:
        return a, lora_b.unflatten(2, (2, lora_b.shape[2] // 2))
    return a, halves(lora_b, 2, 4)


def _buckets(x, a, b, expert_ids, adapter_ids, scalings, ranks, num_experts=None):
    """(slot, expert's index in A, in B, rows, scaling, A's halves, B's halves) of every bucket that has rows.

    The factors take part in x's dtype (a float32 master is rounded to it) and are cut to the slot's rank.
    """
    acc = accumulator(x.dtype)
    num_experts = experts_of(a, b) if num_experts is None else num_experts
    for expert, slot, rows in bucket_rows(expert_ids, adapter_ids, num_experts, a.shape[0]):
        rank = a.shape[3] if ranks is None else min(int(ranks[slot]), a.shape[3])
        ea, eb = (expert if t.shape[1] > 1 else 0 for t in (a, b))
        ar = a[slot, ea, :, :rank].to(x.dtype).to(acc)
        br = b[slot, eb, ..., :rank].to(x.dtype).to(acc)
        yield slot, ea, eb, rank, rows, scalings[slot].to(acc), ar, br


def route_delta(
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    expert_ids: Tensor,
    adapter_ids: Tensor | None,
    scalings: Tensor,
    ranks: Tensor | None,
    num_experts: int | None = None,
) -> Tensor:
    """s · B (A x) of every route, [M, N], not rounded; zeros where there is no adapter. num_experts: where A and B are shared."""
    acc = accumulator(x.dtype)
    a, b = forms(lora_a, lora_b)
    y = torch.zeros(expert_ids.numel(), b.shape[2], b.shape[3], dtype=acc, device=x.device)
    for _, _, _, _, rows, scaling, ar, br in _buckets(x, a, b, expert_ids, adapter_ids, scalings, ranks, num_experts):
        h = rows_of(x, rows, expert_ids).to(acc) @ ar.transpose(1, 2)  # [1 or 2, n, r]
        y[rows] = (scaling * (h @ br.transpose(1, 2))).transpose(0, 1)
    return y.flatten(1)


def route_delta_backward(
    grad: Tensor,  # [M, N]
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    expert_ids: Tensor,
    adapter_ids: Tensor | None,
    scalings: Tensor,
    row_weights: Tensor | None,
    ranks: Tensor | None,
    needs: list[bool],  # gradient wanted for x, for lora_a, for lora_b, for row_weights
    num_experts: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """With v = s · grad B in rank space: dx = w v A of every route, [M, D], and dw = <h, v>, neither rounded;
    dA = Σ (w v)ᵀ x and dB = s Σ (w grad)ᵀ h over the rows of a bucket, summed over the experts that share a factor,
    rounded once to the factor's dtype; exact zeros for buckets without rows and past the slot's rank.
    """
    acc = accumulator(x.dtype)
    a, b = forms(lora_a, lora_b)
    g = grad.unflatten(1, (b.shape[2], b.shape[3]))
    dx = torch.zeros(expert_ids.numel(), a.shape[4], dtype=acc, device=x.device) if needs[0] else None
    da = torch.zeros(a.shape, dtype=acc, device=x.device) if needs[1] else None
    db = torch.zeros(b.shape, dtype=acc, device=x.device) if needs[2] else None
    dw = torch.zeros(expert_ids.numel(), dtype=acc, device=x.device) if needs[3] else None
    for slot, ea, eb, rank, rows, scaling, ar, br in _buckets(
        x, a, b, expert_ids, adapter_ids, scalings, ranks, num_experts
    ):
        gr = g[rows].to(acc).transpose(0, 1)  # [1 or 2, n, N/…]
        xr = rows_of(x, rows, expert_ids).to(acc)
        h = xr @ ar.transpose(1, 2)  # [1 or 2, n, r]
        v = scaling * (gr @ br)
        if needs[3]:
            dw[rows] = (h * v).sum((0, 2))
        if row_weights is not None:
            w = row_weights[rows].to(acc).unsqueeze(1)
            v, gr = v * w, gr * w
        if needs[2]:
            db[slot, eb, :, :, :rank] += scaling * (gr.transpose(1, 2) @ h)
        if v.shape[0] != ar.shape[0]:  # both halves read one A
            v = v.sum(0, keepdim=True)
        if needs[0]:
            dx[rows] = (v @ ar).sum(0)
        if needs[1]:
            da[slot, ea, :, :rank] += v.transpose(1, 2) @ xr
    da = None if da is None else da.to(lora_a.dtype).view(lora_a.shape)
    db = None if db is None else db.to(lora_b.dtype).view(lora_b.shape)
    return dx, da, db, dw


def expert_delta_backward(
    grad_y: Tensor,  # [T·K, N]
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    expert_ids: Tensor,
    adapter_ids: Tensor | None,
    scalings: Tensor,
    row_weights: Tensor | None,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # gradient wanted for x, lora_a, lora_b, row_weights
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dx (summed over k in float32 where x is [T, D]), dA, dB and d row_weights, each rounded once."""
    dx, da, db, dw = route_delta_backward(
        grad_y, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, row_weights, ranks, needs
    )
    dx = None if dx is None else sum_routes(dx, x, expert_ids)
    return dx, da, db, None if dw is None else dw.to(row_weights.dtype)
