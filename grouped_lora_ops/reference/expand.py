"""y = base + scaling · h Bᵀ, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import slot_rows
from .shrink import accumulator, with_groups
from .wgrad import wgrad


def slices(out_sizes: list[int]) -> list[slice]:
    """The columns of every output slice."""
    ends = [sum(out_sizes[: i + 1]) for i in range(len(out_sizes))]
    return [slice(end - size, end) for end, size in zip(ends, out_sizes)]


def scaled_delta(
    h: Tensor, lora_b: Tensor, adapter_ids: Tensor, scalings: Tensor, out_sizes: list[int] | None, ranks: Tensor | None
) -> Tensor:
    """s_l · h Bᵀ in h's dtype, before the rounding; zeros for rows without an adapter."""
    if out_sizes is not None and h.dim() == 3:
        parts = [
            scaled_delta(h[:, g], lora_b[:, columns], adapter_ids, scalings, None, ranks)
            for g, columns in enumerate(slices(out_sizes))
        ]
        return torch.cat(parts, 1)
    hg, bg = with_groups(h, 1, 3), with_groups(lora_b, 1, 4)
    y = torch.zeros(h.shape[0], bg.shape[1], bg.shape[2], dtype=h.dtype, device=h.device)
    for slot, rows in slot_rows(adapter_ids, lora_b.shape[0]):
        rank = h.shape[-1] if ranks is None else int(ranks[slot])
        product = torch.einsum("tgr,gnr->tgn", hg[rows, :, :rank], bg[slot, :, :, :rank].to(h.dtype))
        y[rows] = scalings[slot].to(h.dtype) * product
    return y if lora_b.dim() == 4 else y[:, 0]


def add_to_base(delta: Tensor, base: Tensor | None, dtype: torch.dtype) -> Tensor:
    """base + delta, rounded once; where the delta is zero, base keeps its bits (−0.0 + 0.0 would lose the sign)."""
    if base is None:
        return delta.to(dtype)
    return torch.where(delta == 0, base, (base.to(delta.dtype) + delta).to(base.dtype))


def expand(
    h: Tensor,  # [T, r] or [T, G, r]
    lora_b: Tensor,  # [L, N, r], [L, G, N, r] or [L, ΣN, r]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor,  # [L]
    *,
    base: Tensor | None = None,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """y[t, g] = base[t, g] + scalings[l] · B[l, g] h[t, g] with l = adapter_ids[t], rounded once to base's (else lora_b's) dtype."""
    delta = scaled_delta(h, lora_b, adapter_ids, scalings, out_sizes, ranks)
    return add_to_base(delta, base, lora_b.dtype)


def expand_(
    out: Tensor,
    h: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    *,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> None:
    """out += expand(h, …), rounded once."""
    out.copy_(expand(h, lora_b, adapter_ids, scalings, base=out, out_sizes=out_sizes, ranks=ranks))


def expand_backward(
    grad_y: Tensor,  # like y
    h: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    out_sizes: list[int] | None,
    ranks: Tensor | None,
    plan: Tensor | None,
    needs: list[bool],  # gradient wanted for h, for lora_b
) -> tuple[Tensor | None, Tensor | None]:
    """dh[t, g] = s_l · grad_y[t, g] B[l, g] (summed over groups that share h); dB[l, g] = s_l Σ_t grad_y[t, g]ᵀ h[t, g]."""
    if out_sizes is not None and h.dim() == 3:
        parts = [
            expand_backward(grad_y[:, c], h[:, g], lora_b[:, c], adapter_ids, scalings, None, ranks, None, needs)
            for g, c in enumerate(slices(out_sizes))
        ]
        dh = torch.stack([p[0] for p in parts], 1) if needs[0] else None
        db = torch.cat([p[1] for p in parts], 1) if needs[1] else None
        return dh, db
    acc = accumulator(h.dtype)
    hg, bg, dy = with_groups(h, 1, 3), with_groups(lora_b, 1, 4), with_groups(grad_y, 1, 3)
    dh = db = None
    if needs[0]:
        dhg = torch.zeros(hg.shape, dtype=acc, device=h.device)
        for slot, rows in slot_rows(adapter_ids, lora_b.shape[0]):
            rank = h.shape[-1] if ranks is None else int(ranks[slot])
            part = torch.einsum("tgn,gnr->tgr", dy[rows].to(acc), bg[slot, :, :, :rank].to(acc))
            part = part if hg.shape[1] == part.shape[1] else part.sum(1, keepdim=True)
            dhg[rows, :, :rank] = scalings[slot].to(acc) * part
        dh = dhg.view(h.shape)
    if needs[1]:
        db = wgrad(hg, dy, adapter_ids, scalings, lora_b.shape[0], bg.shape[1], ranks, lora_b.dtype)
        db = db.transpose(2, 3).reshape(lora_b.shape).contiguous()  # dense, as a compiler has been told
    return dh, db
