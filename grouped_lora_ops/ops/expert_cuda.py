"""The expert ops on a GPU: which of our kernels run, on what views, in what order. Arguments are checked already."""

from __future__ import annotations

from torch import Tensor

from .. import driver, launch_experts
from ..reference.expert_delta import forms
from . import common
from .expand import fill_base
from .expert_grads import delta_backward, linear_backward
from .expert_launch import in_dtype, outer, problem, projection, routing, run_expand, run_shrink
from .expert_stages import mlp, mlp_backward, mlp_train

__all__ = ["delta", "delta_backward", "linear", "linear_backward", "mlp", "mlp_backward", "mlp_train"]


def delta(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan) -> Tensor:
    name = "expert_delta"
    a, b = forms(in_dtype(lora_a, x), in_dtype(lora_b, x))
    groups, out_features = b.shape[2], b.shape[3]
    routes = expert_ids.shape[0] * expert_ids.shape[1]
    out = driver.empty((routes, groups * out_features), x.dtype, x.device)
    experts, slots, rank, features = max(a.shape[1], b.shape[1]), a.shape[0], a.shape[3], x.shape[1]
    if min(a.shape[1], b.shape[1]) == 0:
        experts = 0
    if out.numel() == 0:
        return out
    if rank == 0 or slots == 0 or features == 0 or experts == 0:
        fill_base(base, out)
        return out
    to = routing(expert_ids, adapter_ids, experts, slots, plan)
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    outg, baseg = outer(out, groups), None if base is None else outer(base, groups)
    p = problem(x, to, groups, a.shape[2], features, out_features, rank)
    config = common.configured(launch_experts.delta, p)
    per_token = to.per_token(x)
    shared = a.shape[1] == 1 and per_token
    if config.fused is not None and not shared:
        from ..kernels import expert_delta as kernels

        kernels.delta(
            name, x, a, b, baseg, outg, per_token, to.ids, to.adapters, to.plan, ranks, scalings, row_weights,
            to.experts, to.room, config.fused,
        )  # fmt: skip
        return out
    h = run_shrink(name, x[:, None], a, a.shape[2], to, ranks, config=config.shrink)
    run_expand(name, h, b, baseg, outg, to, ranks, scalings, row_weights, config.expand)
    return out


def linear(x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan) -> Tensor:
    slots = 0 if lora_a is None else lora_a.shape[0]
    if lora_a is None:  # a plan is cut by the slots of the layer's adapters, which this call does not know
        adapter_ids = plan = None
    to = routing(expert_ids, adapter_ids, weight.shape[0], slots, plan)
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    return projection("expert_linear", x, weight, lora_a, lora_b, to, scalings, bias, row_weights, ranks, False)
