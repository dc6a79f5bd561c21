"""The gradient of a low-rank factor: a sum over the tokens of each slot."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import slot_rows


def wgrad(
    narrow: Tensor,  # [T, G or 1, r] float32 (or float64)
    wide: Tensor,  # [T, G or 1, W]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor | None,  # [L] or None for 1
    num_slots: int,
    out_groups: int,  # G, or 1 to sum over the groups
    ranks: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """out[l, g] = s_l Σ_t narrow[t, g]ᵀ wide[t, g] over the rows of slot l, [L, G, r, W].

    Sums in narrow's dtype and rounds to `dtype` once; exact zeros for slots without rows and past ranks[l].
    """
    acc = narrow.dtype
    out = torch.zeros(num_slots, out_groups, narrow.shape[2], wide.shape[2], dtype=acc, device=wide.device)
    for slot, rows in slot_rows(adapter_ids, num_slots):
        rank = narrow.shape[2] if ranks is None else int(ranks[slot])
        groups = wide.shape[1] if narrow.shape[1] == 1 else narrow.shape[1]
        n, w = narrow[rows, :, :rank].expand(-1, groups, -1), wide[rows].to(acc).expand(-1, groups, -1)
        part = torch.einsum("tgr,tgw->grw", n, w)
        if out_groups == 1:
            part = part.sum(0, keepdim=True)
        out[slot, :, :rank] = part if scalings is None else scalings[slot].to(acc) * part
    return out.to(dtype)
