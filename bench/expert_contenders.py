"""Who runs a layer of experts with its base: our ops, with and without LoRA, and PyTorch's own way of the same layer.

`ways(op, contender, w, shared)` returns {variant: forward(t)} for `expert_linear` and `expert_mlp`; {} where there is no way.

PyTorch's way sorts the routes by expert, gathers their rows, multiplies by `grouped_mm`, and brings the results back into the
order of the routes; for a whole layer it also weights them and sums them over k, by `index_add_` ("scatter") or by the
inverse order and a sum ("gather"). With LoRA the delta takes two more `grouped_mm` a projection: over (expert, slot) pairs
("pairs"), or over experts with all slots' factors side by side and a mask ("masked", the only one from 1024 pairs on).
The sort is part of the call, as our plan is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import grouped_lora_ops as glo

from .contenders import GROUP_LIMIT, grouped_mm
from .expert_linear_workloads import LayerWorkload

NAMES = ("ours", "no_lora", "torch", "torch_lora")
Forward = Callable[[dict], Tensor]


def ways(op: str, contender: str, w: LayerWorkload, shared: dict) -> dict[str, Forward]:
    if contender in ("ours", "no_lora"):
        return {"": ours(op, w, shared, contender == "ours")}
    if w.dtype != torch.bfloat16 or any(n % 8 for part in w.parts for n in (part.D, part.N // part.groups, w.rank)):
        return {}
    loras = [""] if contender == "torch" else ["pairs"] if w.slots == 1 else ["pairs", "masked"]
    loras = [lora for lora in loras if lora != "pairs" or w.slots * w.experts < GROUP_LIMIT]
    if op == "expert_linear":
        return {lora: torch_linear(w, shared, lora) for lora in loras}
    return {
        ", ".join(filter(None, (back, lora))): torch_mlp(w, shared, lora, back)
        for back in ("scatter", "gather")
        for lora in loras
    }


# --- ours ---


def ours(
    op: str, w: LayerWorkload, shared: dict, lora: bool = True, plan: Tensor | None = None, library=glo
) -> Forward:
    """The op, or with library=glo.reference its reference."""
    ids, weights = shared["expert_ids"], shared["topk_weights"]
    given = (shared["adapter_ids"], shared["scalings"]) if lora else (None, None)

    def factors(t, prefix=""):
        return (t[f"{prefix}lora_a"], t[f"{prefix}lora_b"]) if lora else (None, None)

    if op == "expert_linear":
        row_weights = weights.view(-1) if w.projection == "down" else None
        run = library.expert_linear
        return lambda t: run(t["x"], t["weight"], *factors(t), ids, *given, row_weights=row_weights, plan=plan)

    def mlp(t):
        bases, options = (t["gate_up_weight"], t["down_weight"]), dict(router_weight="post_down", plan=plan)
        pairs = (*factors(t, "gate_up_"), *factors(t, "down_"))
        return library.expert_mlp(t["x"], ids, weights, *bases, *pairs, *given, **options)

    return mlp


# --- PyTorch's way ---


class Sorted:
    """Routes sorted by expert (by pair: expert, then slot), as `grouped_mm` wants them."""

    def __init__(self, w: LayerWorkload, shared: dict, lora: str):
        self.w, self.lora = w, lora
        by_slot = w.slots if lora == "pairs" else 1
        keys = shared["expert_ids"]
        if by_slot > 1:
            keys = keys * by_slot + shared["adapter_ids"][:, None]
        values, self.order = torch.sort(keys.flatten(), stable=True)
        bounds = shared["bounds"][: w.experts * by_slot]
        self.pair_ends = torch.searchsorted(values, bounds, right=True, out_int32=True)
        self.ends = self.pair_ends[by_slot - 1 :: by_slot].contiguous()
        self.tokens = self.order // w.top_k
        weights = shared["topk_weights"]
        self.weights = None if weights is None else weights.view(-1).index_select(0, self.order).to(w.dtype)[:, None]
        if lora:
            slots = 0 if w.slots == 1 else shared["adapter_ids"][self.tokens].long()
            self.scale = shared["scalings"].to(w.dtype)[slots]
            if lora == "masked":
                self.mask = (slots[:, None] == shared["bounds"][: w.slots]) * self.scale[:, None]

    def project(self, t: dict, rows: Tensor, part: LayerWorkload, prefix: str = "") -> Tensor:
        """x Wᵀ (+ delta) of the sorted rows."""
        y = grouped_mm(rows, t[f"{prefix}weight"].transpose(1, 2), self.ends)
        if not self.lora:
            return y
        a, b = by_expert(t, prefix)  # [E, L, G·r, D], [E, L, r, N]
        width = part.N // part.groups
        if self.lora == "pairs":
            h = grouped_mm(rows, a.flatten(0, 1).transpose(1, 2), self.pair_ends)
            h = (h * self.scale if self.w.slots == 1 else h * self.scale[:, None]).unflatten(1, (1, part.groups, -1))
            b, ends = b.flatten(0, 1), self.pair_ends
        else:
            h = grouped_mm(rows, a.flatten(1, 2).transpose(1, 2), self.ends)
            h = h.unflatten(1, (self.w.slots, part.groups, -1)) * self.mask[:, :, None, None]
            b, ends = b.flatten(1, 2), self.ends
        for g in range(part.groups):
            columns = slice(g * width, (g + 1) * width)
            y[:, columns] += grouped_mm(h[:, :, g].flatten(1), b[:, :, columns], ends)
        return y


def by_expert(t: dict, prefix: str) -> tuple[Tensor, Tensor]:
    """A as [E, L, G·r, D] and B as [E, L, r, N], kept that way from the first call on; with one slot views of what is there."""
    key = f"{prefix}by_expert"
    if key not in t:
        a, b = t[f"{prefix}lora_a"], t[f"{prefix}lora_b"]
        a = (a.flatten(2, 3) if a.dim() == 5 else a).transpose(0, 1)
        b = b.permute(1, 0, 3, 2)
        t[key] = (a, b) if a.shape[1] == 1 else (a.contiguous(), b.contiguous())
    return t[key]


def torch_linear(w: LayerWorkload, shared: dict, lora: str) -> Forward:
    shared = with_bounds(w, shared)

    def forward(t):
        s = Sorted(w, shared, lora)
        y = s.project(t, t["x"][s.order if w.projection == "down" else s.tokens], w)
        if w.projection == "down":
            y = y * s.weights
        return torch.empty_like(y).index_copy_(0, s.order, y)

    return forward


def torch_mlp(w: LayerWorkload, shared: dict, lora: str, back: str) -> Forward:
    shared = with_bounds(w, shared)
    places = torch.arange(w.M, device=shared["expert_ids"].device)

    def forward(t):
        s = Sorted(w, shared, lora)
        gate, up = s.project(t, t["x"][s.tokens], w.part("gate_up"), "gate_up_").chunk(2, 1)
        h2 = s.project(t, F.silu(gate) * up, w.part("down"), "down_") * s.weights
        if back == "scatter":
            return torch.zeros_like(t["x"]).index_add_(0, s.tokens, h2)
        inverse = torch.empty_like(s.order).index_copy_(0, s.order, places)
        return h2[inverse].view(w.T, w.top_k, -1).sum(1)

    return forward


def sorted_linear(w: LayerWorkload, shared: dict, sets: list[dict]) -> list[Callable[[], Tensor]]:
    """`grouped_mm` alone, over rows sorted and gathered beforehand: a call per set."""
    s = Sorted(w, with_bounds(w, shared), "")
    rows = [t["x"][s.order if w.projection == "down" else s.tokens] for t in sets]
    return [lambda t=t, r=r: grouped_mm(r, t["weight"].transpose(1, 2), s.ends) for t, r in zip(sets, rows)]


def with_bounds(w: LayerWorkload, shared: dict) -> dict:
    ids = shared["expert_ids"]
    return {**shared, "bounds": torch.arange(w.experts * w.slots, device=ids.device, dtype=ids.dtype)}
