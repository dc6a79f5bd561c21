"""Which route rows belong to which expert and adapter slot, and the base product over them.

Route row m = t·K + k is token t's k-th choice. Rows of masked routes (id outside 0 … E−1) belong to nobody: no function
here reads x, a weight or a factor for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .shrink import accumulator


def _groups(keys: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(key, its positions in ascending order) for every key ≥ 0 that occurs, ascending."""
    values, counts = keys.unique(return_counts=True)
    for key, rows in zip(values.tolist(), keys.argsort(stable=True).split(counts.tolist())):
        if key >= 0:
            yield key, rows


def expert_rows(expert_ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, its route rows) for every expert that has some, ascending."""
    flat = expert_ids.reshape(-1)
    return _groups(torch.where(flat < num_experts, flat, -1))


def bucket_rows(
    expert_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(expert, slot, its route rows): by expert, then by slot. adapter_ids None: slot 0 for every row."""
    flat = expert_ids.reshape(-1).long()
    slots = torch.zeros_like(flat) if adapter_ids is None else adapter_ids.long().repeat_interleave(expert_ids.shape[1])
    known = (flat >= 0) & (flat < num_experts) & (slots >= 0) & (slots < num_slots)
    for key, rows in _groups(torch.where(known, flat * num_slots + slots, -1)):
        yield *divmod(key, num_slots), rows


def active(expert_ids: Tensor, num_experts: int) -> Tensor:
    """[M, 1] bool: the routes that are not masked."""
    flat = expert_ids.reshape(-1, 1)
    return (flat >= 0) & (flat < num_experts)


def rows_of(x: Tensor, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """The rows of x that route rows read: x is [T·K, D], or [T, D] where every route of t reads row t."""
    tokens, top_k = expert_ids.shape
    return x[rows] if x.shape[0] != tokens or top_k == 1 else x[rows // top_k]


def halves(t: Tensor, dim: int, flat_ndim: int) -> Tensor:
    """t with an axis of halves (gate, up) at `dim`: the one that it has, or one of size 1."""
    return t.unsqueeze(dim) if t.dim() == flat_ndim else t


def sum_over_k(t: Tensor, expert_ids: Tensor) -> Tensor:
    """[T·K, W] → [T, W]: 0 + t₀ + t₁ + … in slot order, in t's dtype."""
    tokens, top_k = expert_ids.shape
    t = t.view(tokens, top_k, t.shape[1])
    total = torch.zeros(tokens, t.shape[2], dtype=t.dtype, device=t.device)
    for k in range(top_k):
        total += t[:, k]
    return total


def sum_routes(t: Tensor, x: Tensor, expert_ids: Tensor) -> Tensor:
    """The gradient of x from that of its routes: summed over k where x is [T, D], rounded once to x's dtype."""
    return (t if t.shape[0] == x.shape[0] else sum_over_k(t, expert_ids)).to(x.dtype)


def join(base: Tensor, delta: Tensor) -> Tensor:
    """base + delta in the dtype of the sums; where the delta is zero, base keeps its bits (−0.0 + 0.0 would not)."""
    return torch.where(delta == 0, base, base + delta)


def route_base(x: Tensor, weight: Tensor, expert_ids: Tensor) -> Tensor:
    """x Wₑᵀ of every route, [M, N], not rounded: one product for each expert (and half) over all its rows."""
    acc = accumulator(x.dtype)
    w = halves(weight, 1, 3)
    y = torch.zeros(expert_ids.numel(), w.shape[1], w.shape[2], dtype=acc, device=x.device)
    for expert, rows in expert_rows(expert_ids, w.shape[0]):
        xr = rows_of(x, rows, expert_ids).to(acc)
        for half in range(w.shape[1]):
            y[rows, half] = xr @ w[expert, half].to(acc).t()
    return y.flatten(1)


def route_base_backward(
    grad: Tensor,  # [M, N]
    x: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    needs: list[bool],  # gradient wanted for x, for weight
) -> tuple[Tensor | None, Tensor | None]:
    """dx of every route, [M, D], not rounded: grad Wₑ; dWₑ = Σ grad_mᵀ x_m over the rows of e, rounded once."""
    acc = accumulator(x.dtype)
    w = halves(weight, 1, 3)
    g = grad.unflatten(1, (w.shape[1], w.shape[2]))
    dx = torch.zeros(expert_ids.numel(), w.shape[3], dtype=acc, device=x.device) if needs[0] else None
    dw = torch.zeros(w.shape, dtype=acc, device=x.device) if needs[1] else None
    for expert, rows in expert_rows(expert_ids, w.shape[0]):
        gr = g[rows].to(acc)
        if needs[0]:
            part = gr[:, 0] @ w[expert, 0].to(acc)
            for half in range(1, w.shape[1]):
                part = part + gr[:, half] @ w[expert, half].to(acc)
            dx[rows] = part
        if needs[1]:
            xr = rows_of(x, rows, expert_ids).to(acc)
            for half in range(w.shape[1]):
                dw[expert, half] = gr[:, half].t() @ xr
    return dx, None if dw is None else dw.to(weight.dtype).view(weight.shape)


def route_bias(bias: Tensor, expert_ids: Tensor, acc: torch.dtype) -> Tensor:
    """biasₑ of every route, [M, N]; zeros for masked routes."""
    y = torch.zeros(expert_ids.numel(), math.prod(bias.shape[1:]), dtype=acc, device=bias.device)
    for expert, rows in expert_rows(expert_ids, bias.shape[0]):
        y[rows] = bias[expert].reshape(1, -1).to(acc)
    return y


def route_bias_backward(grad: Tensor, bias: Tensor, expert_ids: Tensor) -> Tensor:
    """dbₑ = Σ grad_m over the rows of e, rounded once to bias's dtype. grad is [M, N] in the dtype of the sums."""
    db = torch.zeros(bias.shape, dtype=grad.dtype, device=bias.device)
    for expert, rows in expert_rows(expert_ids, bias.shape[0]):
        db[expert] = grad[rows].sum(0).view(bias.shape[1:])
    return db.to(bias.dtype)
