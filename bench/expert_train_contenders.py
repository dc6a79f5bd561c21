"""Who trains a layer of experts: our ops, and autograd over PyTorch's own way of the same layer.

`ways(contender, w, shared)` returns {variant: `Way`}; {} where there is no way.

PyTorch's way is that of `expert_contenders`: routes sorted by expert, rows gathered, `grouped_mm`, and back by `index_add`
("scatter") or by the inverse order ("gather"); LoRA over (expert, slot) pairs ("pairs") or over experts, slots side by side behind a
mask ("masked"). Written for autograd: rows are taken by `index_select`, whose gradient is an `index_add` and no sort, nothing is
written in place, and gate and up have a B each, so that no gradient is made of a slice. Its factors lie as `grouped_mm` wants
them, A as [E, L, G·r, D] and B as [E, L, r, N/G], and are the leaves. The sort is part of the step, as our plan is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import grouped_lora_ops as glo

from . import expert_train_workloads as workloads
from .contenders import GROUP_LIMIT, grouped_mm
from .expert_contenders import Sorted, with_bounds
from .expert_train_workloads import FACTORS, Trained

NAMES = ("torch", "ours")  # torch first: a row of ours says how many times torch's time it takes
Call = Callable[[], object]


@dataclass(frozen=True)
class Way:
    forward: Callable[[dict], Tensor]
    prepared: Callable[[dict], dict]  # of a set: the tensors that forward reads, the same for all ways of a contender
    leaves: tuple[str, ...]  # which of them have gradients
    in_order: Callable[[list[Tensor]], list[Tensor]]  # their gradients as those of `workloads.leaves`

    def step(self, t: dict, grad: Tensor) -> Call:
        """A call that returns y and the gradients, those of `leaves`; t is `prepared`."""
        t, forward = self.live(t), self.forward
        leaves = [t[name] for name in self.leaves]

        def call():
            y = forward(t)
            return y, *torch.autograd.grad(y, leaves, grad)

        return call

    def only_forward(self, t: dict) -> Call:
        """The forward of a step, with all that it keeps for a backward."""
        t, forward = self.live(t), self.forward
        return lambda: forward(t)

    def live(self, t: dict) -> dict:
        return {**t, **{name: t[name].detach().requires_grad_() for name in self.leaves}}


def ways(contender: str, w: Trained, shared: dict) -> dict[str, Way]:
    if contender == "ours":
        return {"": our_way(w, shared)}
    parts = parts_of(w)
    if w.dtype != torch.bfloat16 or any(n % 8 for part, _ in parts for n in (part.D, part.N // part.groups, w.rank)):
        return {}
    shared = with_bounds(w, shared)
    loras = ["pairs"] if w.slots == 1 else ["pairs", "masked"]
    loras = [lora for lora in loras if lora != "pairs" or w.slots * w.experts < GROUP_LIMIT]
    forward = torch_mlp if w.projection == "mlp" else torch_delta
    names = tuple(name for name in workloads.leaves(w) if "lora" not in name)
    factors = tuple(name for part, prefix in parts for name in factor_names(part, prefix))

    def prepared(t):
        made = {name: value for name, value in t.items() if "lora" not in name}
        for part, prefix in parts:
            made |= dict(
                zip(factor_names(part, prefix), as_torch_wants(part, t[f"{prefix}lora_a"], t[f"{prefix}lora_b"]))
            )
        return made

    def in_order(grads):
        found = dict(zip((*names, *factors), grads))
        for part, prefix in parts:
            a, *b = (found[name] for name in factor_names(part, prefix))
            found |= {f"{prefix}lora_a": as_a(part, a), f"{prefix}lora_b": as_b(b)}
        return [found[name] for name in workloads.leaves(w)]

    return {
        ", ".join((back, lora)): Way(forward(w, shared, lora, back), prepared, (*names, *factors), in_order)
        for back in ("scatter", "gather")
        for lora in loras
    }


def parts_of(w: Trained) -> list[tuple[Trained, str]]:
    """(projection, what the names of its tensors begin with)."""
    return [(part, f"{part.projection}_") for part in w.parts] if w.projection == "mlp" else [(w, "")]


# --- ours ---


def our_way(w: Trained, shared: dict, plan: Tensor | None = None) -> Way:
    return Way(ours(w, shared, plan), dict, workloads.leaves(w), list)


def ours(w: Trained, shared: dict, plan: Tensor | None = None) -> Callable[[dict], Tensor]:
    ids, given = shared["expert_ids"], (shared["adapter_ids"], shared["scalings"])

    def delta(t):
        pair = (t["lora_a"], t["lora_b"])
        return glo.expert_delta(t["x"], *pair, ids, *given, base=t["base"], row_weights=t.get("row_weights"), plan=plan)

    def mlp(t):
        layer = (t["topk_weights"], t["gate_up_weight"], t["down_weight"], *(t[name] for name in FACTORS))
        return glo.expert_mlp(t["x"], ids, *layer, *given, router_weight="post_down", plan=plan)

    return mlp if w.projection == "mlp" else delta


# --- PyTorch's way ---


def factor_names(part: Trained, prefix: str) -> list[str]:
    return [f"{prefix}a", *(f"{prefix}b{g}" for g in range(part.groups))]


def as_torch_wants(part: Trained, a: Tensor, b: Tensor) -> list[Tensor]:
    """A [L, E, (2,) r, D] as [E, L, G·r, D] and B [L, E, N, r] as [E, L, r, N/G] of each group."""
    a = (a.flatten(2, 3) if part.groups == 2 else a).transpose(0, 1).contiguous()
    return [a, *(half.permute(1, 0, 3, 2).contiguous() for half in b.chunk(part.groups, 2))]


def as_a(part: Trained, a: Tensor) -> Tensor:
    a = a.transpose(0, 1)
    return a.unflatten(2, (2, part.rank)) if part.groups == 2 else a


def as_b(parts: list[Tensor]) -> Tensor:
    return torch.cat([half.permute(1, 0, 3, 2) for half in parts], 2)


def delta_parts(s: Sorted, t: dict, rows: Tensor, part: Trained, prefix: str) -> list[Tensor]:
    """The delta of the sorted rows, of each group."""
    a, *b = (t[name] for name in factor_names(part, prefix))
    if s.lora == "pairs":
        h = grouped_mm(rows, a.flatten(0, 1).transpose(1, 2), s.pair_ends)
        h = (h * (s.scale if s.w.slots == 1 else s.scale[:, None])).chunk(part.groups, 1)
        return [grouped_mm(narrow, up.flatten(0, 1), s.pair_ends) for narrow, up in zip(h, b)]
    h = grouped_mm(rows, a.flatten(1, 2).transpose(1, 2), s.ends)
    h = (h.unflatten(1, (s.w.slots, part.groups, -1)) * s.mask[:, :, None, None]).unbind(2)
    return [grouped_mm(narrow.flatten(1), up.flatten(1, 2), s.ends) for narrow, up in zip(h, b)]


def torch_delta(w: Trained, shared: dict, lora: str, back: str) -> Callable[[dict], Tensor]:
    places = torch.arange(w.M, device=shared["expert_ids"].device)

    def forward(t):
        s = Sorted(w, {**shared, "topk_weights": t.get("row_weights")}, lora)
        rows = t["x"].index_select(0, s.order if w.projection == "down" else s.tokens)
        parts = delta_parts(s, t, rows, w, "")
        y = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        y = y if s.weights is None else y * s.weights
        if back == "scatter":
            return t["base"].index_add(0, s.order, y)
        return t["base"] + y.index_select(0, torch.empty_like(s.order).index_copy_(0, s.order, places))

    return forward


def torch_mlp(w: Trained, shared: dict, lora: str, back: str) -> Callable[[dict], Tensor]:
    places = torch.arange(w.M, device=shared["expert_ids"].device)
    gate_up, down = w.parts

    def forward(t):
        s = Sorted(w, {**shared, "topk_weights": t["topk_weights"]}, lora)
        rows = t["x"].index_select(0, s.tokens)
        bases = grouped_mm(rows, t["gate_up_weight"].transpose(1, 2), s.ends).chunk(2, 1)
        gate, up = (base + delta for base, delta in zip(bases, delta_parts(s, t, rows, gate_up, "gate_up_")))
        a = F.silu(gate) * up
        (delta,) = delta_parts(s, t, a, down, "down_")
        h2 = (grouped_mm(a, t["down_weight"].transpose(1, 2), s.ends) + delta) * s.weights
        if back == "scatter":
            return torch.zeros_like(t["x"]).index_add(0, s.tokens, h2)
        inverse = torch.empty_like(s.order).index_copy_(0, s.order, places)
        return h2.index_select(0, inverse).view(w.T, w.top_k, -1).sum(1)

    return forward
