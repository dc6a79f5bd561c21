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
    weight_scale: Tensor | None = None,  # of an e4m3 weight: weight's shape with ⌈N/128⌉ and ⌈D/128⌉
) -> Tensor:
    """y[t, g] = W[g] x[t, g] + scalings[l] · B[l, g] (A[l, g] x[t, g]) + bias[g], rounded once to x's dtype.

    Where the delta is zero y has the bits of x Wᵀ + bias alone. With weight_scale the base is the sum over blocks of 128
    columns of D of (x weightᵀ over the block) · scale: W itself is never formed. Of e8m0 beside bfloat16 x it is: `dequantized`.
    """
    weight, weight_scale = _rounded(x, weight, weight_scale)
    h = shrink(x, lora_a, adapter_ids, ranks=ranks)
    base = _base(x, weight, out_sizes) if weight_scale is None else _scaled_base(x, weight, out_sizes, weight_scale)
    y = join(base, scaled_delta(h, lora_b, adapter_ids, scalings, out_sizes, ranks))
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def _base(x: Tensor, weight: Tensor, out_sizes: list[int] | None) -> Tensor:
    acc = accumulator(x.dtype)
    x, weight = x.to(acc), weight.to(acc)
    if weight.dim() == 3:
        return torch.einsum("tgd,gnd->tgn" if x.dim() == 3 else "td,gnd->tgn", x, weight)
    if x.dim() == 2:
        return x @ weight.t()
    return torch.cat([x[:, g] @ weight[columns].t() for g, columns in enumerate(slices(out_sizes))], 1)


BLOCK = 128


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """bf16(weight · scale): e4m3 and e8m0, whose product is exact in float32 or beyond its range."""
    wide = scale.float().repeat_interleave(BLOCK, -2)[..., : weight.shape[-2], :]
    return (weight.float() * wide.repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]).bfloat16()


def _rounded(x: Tensor, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if scale is None or scale.dtype == torch.float32 or x.dtype != torch.bfloat16:
        return weight, scale
    return dequantized(weight, scale), None


def _scaled_base(x: Tensor, weight: Tensor, out_sizes: list[int] | None, scale: Tensor) -> Tensor:
    scale = scale.to(accumulator(x.dtype))
    total = _base(x[..., :0], weight[..., :0], out_sizes)
    for i, start in enumerate(range(0, x.shape[-1], BLOCK)):
        columns = slice(start, start + BLOCK)
        of_rows = scale[..., i].repeat_interleave(BLOCK, -1)[..., : weight.shape[-2]]
        total = total + _base(x[..., columns], weight[..., columns], out_sizes) * of_rows
    return total


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
    weight_scale: Tensor | None = None,
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
        w, scale = _rounded(x, weight, weight_scale)
        base = _base_dx(g, x, w, out_sizes) if scale is None else _scaled_dx(g, x, w, out_sizes, scale)
        dx = join(base, dx).to(x.dtype)
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


def _scaled_dx(g: Tensor, x: Tensor, weight: Tensor, out_sizes: list[int] | None, scale: Tensor) -> Tensor:
    """As `_scaled_base`: sums over blocks of 128 rows of W, counted from its first, each times its scale."""
    weight, scale = weight.to(g.dtype), scale.to(g.dtype)
    if weight.dim() == 3:
        parts = [_rows_dx(g[:, i], weight[i], scale[i], 0, weight.shape[1]) for i in range(weight.shape[0])]
    elif x.dim() == 2:
        return _rows_dx(g, weight, scale, 0, weight.shape[0])
    else:
        parts = [_rows_dx(g, weight, scale, columns.start, columns.stop) for columns in slices(out_sizes)]
    zero = g.new_zeros(*x.shape)
    return zero + sum(parts) if x.dim() == 2 else torch.stack(parts, 1) if parts else zero


def _rows_dx(g: Tensor, weight: Tensor, scale: Tensor, start: int, stop: int) -> Tensor:
    """Rows start … stop − 1 of W: g's columns of these numbers times them."""
    total = g.new_zeros(g.shape[0], weight.shape[1])
    for i in range(start // BLOCK, -(-stop // BLOCK)):
        rows = slice(max(start, i * BLOCK), min(stop, (i + 1) * BLOCK))
        total = total + (g[:, rows] @ weight[rows]) * scale[i].repeat_interleave(BLOCK)[: weight.shape[1]]
    return total


def _base_dweight(g: Tensor, x: Tensor, weight: Tensor, out_sizes: list[int] | None) -> Tensor:
    if weight.dim() == 3:
        return torch.einsum("tgn,tgd->gnd", g, with_groups(x, 1, 3).expand(-1, weight.shape[0], -1))
    if x.dim() == 2:
        return g.t() @ x
    return torch.cat([g[:, columns].t() @ x[:, i] for i, columns in enumerate(slices(out_sizes))], 0)
