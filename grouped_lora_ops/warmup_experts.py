"""Prepare the expert kernels before a CUDA graph capture or the first request, as `warmup` does the dense ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .ops import expert_delta, expert_linear, expert_mlp, expert_plan
from .warmup import run

EXPERT_OPS = ("expert_mlp", "expert_linear", "expert_delta")


@dataclass(frozen=True)
class ExpertShape:
    """One layer of experts and its adapter buffers, as they will be called.

    hidden H, inner I, num_experts E, top_k K, rank r (of the buffers), num_slots L. a_each: gate and up with an A each.
    shared: which of "gate_up_a", "gate_up_b", "down_a", "down_b" all experts share. lora False: both pairs None.
    bias, ranks, adapter_ids: whether calls pass them; weight_dtype: topk_weights' dtype.
    """

    hidden: int
    inner: int
    num_experts: int
    top_k: int
    rank: int
    num_slots: int
    dtype: torch.dtype = torch.bfloat16
    a_each: bool = True
    shared: tuple[str, ...] = ()
    lora: bool = True
    bias: bool = False
    ranks: bool = True
    adapter_ids: bool = True
    activation: str = "swiglu"
    activation_limit: float | None = None
    router_weight: str = "post_down"
    weight_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32


def warmup_experts(
    shapes: Iterable[ExpertShape],
    *,
    tokens: int | Iterable[int] = 512,
    ops: Iterable[str] = ("expert_mlp",),
    device: torch.device | str | None = None,
    backward: bool = False,
) -> int:
    """Compile and load what `ops` need for `shapes` at T = 1 … tokens (or at the given Ts); returns the calls made.

    Each of those T is called once, with a plan made by `expert_plan`, on dummy tensors laid out as freshly allocated
    ones are. expert_delta and expert_linear are called for gate_up and for down. Calls with other layouts (transposed
    weights, halves on an axis of their own) want one call of their own. backward: also the gradients of x, of the router
    weights and of the factors, of `expert_mlp`. Does nothing on a machine without a GPU.
    """
    return run("warmup_experts", EXPERT_OPS, _call, shapes, tokens, ops, device, backward)


def _call(s: ExpertShape, counts: list, ops: tuple, device: torch.device, backward: bool) -> int:
    wide = s.inner if s.activation == "relu2" else 2 * s.inner

    def make(*size):
        return torch.zeros(size, dtype=s.dtype, device=device)

    # one's memory serves all of them: strides keep the alignment that real buffers have
    def per_expert(rows, columns):  # a row further on for each, for csrc/linear.cu's tensor map has no stride of 0
        return make(rows + s.num_experts - 1, columns).as_strided((s.num_experts, rows, columns), (columns, columns, 1))

    def bias(size):
        return make(1, size).expand(s.num_experts, size) if s.bias else None

    def factor(name, *size):
        experts = 1 if name in s.shared else s.num_experts
        return make(1, 1, *size).expand(s.num_slots, experts, *size)

    each = (2,) if s.a_each and s.activation != "relu2" else ()
    gate_up = factor("gate_up_a", *each, s.rank, s.hidden), factor("gate_up_b", wide, s.rank)
    down = factor("down_a", s.rank, s.inner), factor("down_b", s.hidden, s.rank)
    w_gate_up, w_down = per_expert(wide, s.hidden), per_expert(s.hidden, s.inner)
    b_gate_up, b_down = bias(wide), bias(s.hidden)
    most = max(counts, default=0)
    xs, hidden = make(most, s.hidden), make(most * s.top_k, s.inner)
    bases = make(most * s.top_k, wide), make(most * s.top_k, s.hidden)
    all_ids = torch.zeros(most, s.top_k, dtype=s.id_dtype, device=device)
    all_adapters = torch.zeros(most, dtype=s.id_dtype, device=device)
    all_weights = torch.zeros(most, s.top_k, dtype=s.weight_dtype, device=device)
    scalings = torch.ones(s.num_slots, device=device) if s.lora else None
    ranks = torch.full((s.num_slots,), s.rank, dtype=torch.int32, device=device) if s.ranks and s.lora else None
    pairs = (*gate_up, *down) if s.lora else (None,) * 4
    options = dict(activation=s.activation, activation_limit=s.activation_limit, router_weight=s.router_weight)
    options.update(b_gate_up=b_gate_up, b_down=b_down, ranks=ranks)
    for count in counts:
        routes = count * s.top_k
        ids, weights = all_ids[:count], all_weights[:count]
        adapters = all_adapters[:count] if s.adapter_ids and s.lora else None
        plan = expert_plan(ids, adapters, s.num_experts, s.num_slots) if s.lora else None
        sides = ((xs[:count], w_gate_up, gate_up, bases[0]), (hidden[:routes], w_down, down, bases[1]))
        for op in ops:
            if op == "expert_mlp":
                expert_mlp(xs[:count], ids, weights, w_gate_up, w_down, *pairs, adapters, scalings, plan=plan, **options)
            elif op == "expert_linear":
                for x, w, factors, _ in sides:
                    factors = factors if s.lora else (None, None)
                    expert_linear(x, w, *factors, ids, adapters, scalings, ranks=ranks, plan=plan)
            elif s.lora:
                for x, _, factors, base in sides:
                    expert_delta(x, *factors, ids, adapters, scalings, base=base[:routes], ranks=ranks, plan=plan)
                    expert_delta(x, *factors, ids, adapters, scalings, ranks=ranks, plan=plan)
        if backward:
            leaves = [t.detach().requires_grad_() for t in (xs[:count], weights, *pairs) if t is not None]
            y = expert_mlp(
                leaves[0], ids, leaves[1], w_gate_up, w_down, *(leaves[2:] or pairs), adapters, scalings, plan=plan, **options
            )
            torch.autograd.grad(y, leaves, xs[:count])  # not the gradient of a sum, whose strides are 0
    return len(ops) * len(counts)
