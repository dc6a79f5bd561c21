"""The argument checks of the expert ops, in the manner and the form of `_checks`; they read no device memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import launch_experts
from ._checks import _ID_DTYPES, _device, _float, _same_dtype, _slots, dtype_name, fail, shape, tensor_types
from ._checks import id_values as dense_id_values

ROUTER_WEIGHTS = ("input", "pre_down", "post_down")
ACTIVATIONS = ("swiglu", "swigluoai", "geglu_tanh", "relu2")
CLAMPED = ("swiglu", "swigluoai")


class ExpertDims(NamedTuple):
    """The sizes of one expert projection."""

    tokens: int  # T
    top_k: int  # K; the route rows are M = T·K
    per_route: bool  # x has a row for each route, [T·K, D]
    experts: int  # E
    in_features: int  # D
    out_features: int  # N, both halves
    rank: int  # r; 0 without LoRA
    slots: int  # L; 0 without LoRA
    halves: int  # 2 where A, B or the weight has an axis of halves (gate, up), else 1


class Mlp(NamedTuple):
    """The arguments of `expert_mlp` in its schema's order, with the defaults that the dispatcher leaves out."""

    x: Tensor  # [T, H]
    topk_ids: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K]
    w_gate_up: Tensor
    w_down: Tensor
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    adapter_ids: Tensor | None
    scalings: Tensor | None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    activation: str = "swiglu"
    activation_limit: float | None = None
    router_weight: str = "pre_down"
    ranks: Tensor | None = None
    plan: Tensor | None = None


class MlpDims(NamedTuple):
    """The sizes of one expert MLP."""

    gate_up: ExpertDims  # x [T, H] → h1 [T·K, U]; U = 2I, or I where the activation is not gated
    down: ExpertDims  # a [T·K, I] → h2 [T·K, H]
    slots: int  # L; 0 without LoRA
    rank: int  # the larger of the two ranks


def _expert_ids(op: str, name: str, expert_ids: Tensor) -> None:
    if expert_ids.dtype not in _ID_DTYPES:
        fail(op, name, "int32 or int64", dtype_name(expert_ids.dtype))
    if expert_ids.dim() != 2:
        fail(op, name, "[T, K]", shape(expert_ids))


def _adapter_ids(op: str, adapter_ids: Tensor | None, ids_name: str, expert_ids: Tensor) -> None:
    if adapter_ids is None:
        return
    if adapter_ids.dtype not in _ID_DTYPES:
        fail(op, "adapter_ids", "int32 or int64", dtype_name(adapter_ids.dtype))
    if adapter_ids.dim() != 1 or adapter_ids.shape[0] != expert_ids.shape[0]:
        fail(op, "adapter_ids", f"[{expert_ids.shape[0]}] to match {ids_name} {shape(expert_ids)}", shape(adapter_ids))


def _wide_or(op: str, name: str, t: Tensor, x: Tensor) -> None:
    """t may be float32 whatever x is: a router weight, a bias, a factor's master copy."""
    if t.dtype not in (x.dtype, torch.float32):
        either = dtype_name(x.dtype) if x.dtype == torch.float32 else f"{dtype_name(x.dtype)} like x, or float32"
        fail(op, name, either, dtype_name(t.dtype))


def _per_route(op: str, x: Tensor, expert_ids: Tensor) -> bool:
    tokens, top_k = expert_ids.shape
    if x.dim() != 2:
        fail(op, "x", "[T, D] or [T·K, D]", shape(x))
    _float(op, "x", x)
    if x.shape[0] == tokens:
        return False
    if x.shape[0] != tokens * top_k:
        fail(op, "x", f"[{tokens}, D] or [{tokens * top_k}, D] to match expert_ids {shape(expert_ids)}", shape(x))
    return True


def _plan(op: str, plan: Tensor | None, routes, experts, slots) -> None:
    if plan is None:
        return
    if plan.dtype != torch.int32:
        fail(op, "plan", "int32", dtype_name(plan.dtype))
    if slots is None:  # without LoRA a plan is not read: it may be that of layers with adapters
        return
    size = launch_experts.plan_size(routes, experts, slots, torch.sym_min)
    if plan.dim() != 1 or plan.shape[0] != size:
        made = f"M = {routes} routes, E = {experts} experts and L = {slots} slots, from grouped_lora.expert_plan"
        fail(op, "plan", f"[{size}] for {made}", shape(plan))
    if plan.stride(0) != 1:
        fail(op, "plan", "contiguous", f"stride {plan.stride(0)}")


class _Names(NamedTuple):
    """What the arguments of one projection are called."""

    a: str = "lora_a"
    b: str = "lora_b"
    weight: str = "weight"
    x: str = "x"


def _factors(op: str, names: _Names, x: Tensor, features, a: Tensor, b: Tensor, experts, out) -> tuple:
    """(rank, out features, halves) of a pair; experts and out None: what the pair says."""
    for name, t in ((names.a, a), (names.b, b)):
        _float(op, name, t)
        _wide_or(op, name, t, x)
    e = "E" if experts is None else experts
    if a.dim() not in (4, 5) or a.shape[-1] != features or (a.dim() == 5 and a.shape[2] != 2):
        fail(op, names.a, f"[L, {e} or 1, r, {features}] or [L, {e} or 1, 2, r, {features}]", shape(a))
    slots, rank = a.shape[0], a.shape[-2]
    n, half = ("N", "N/2") if out is None else (out, out // 2 if out % 2 == 0 else f"{out}/2")
    if (
        b.dim() not in (4, 5)
        or b.shape[-1] != rank
        or (b.dim() == 5 and b.shape[2] != 2)
        or (a.dim() == 5 and b.dim() == 4 and b.shape[2] % 2 != 0)
        or (out is not None and math.prod(b.shape[2:-1]) != out)
    ):
        fail(
            op,
            names.b,
            f"[L, {e} or 1, {n}, {rank}] or [L, {e} or 1, 2, {half}, {rank}] to match {names.a} {shape(a)}",
            shape(b),
        )
    if b.shape[0] != slots:
        fail(op, names.b, f"of {slots} slots like {names.a} {shape(a)}", shape(b))
    return rank, math.prod(b.shape[2:-1]), 2 if a.dim() == 5 or b.dim() == 5 else 1


def _experts_of(op: str, names: _Names, a: Tensor, b: Tensor, experts, like: str) -> None:
    for name, t in ((names.a, a), (names.b, b)):
        if t.shape[1] != experts and t.shape[1] != 1:
            fail(op, name, f"of {experts} experts like {like}, or of 1 that all share", shape(t))


def _pair(op: str, names: _Names, a: Tensor | None, b: Tensor | None) -> bool:
    if (a is None) != (b is None):
        given, missing = (names.a, names.b) if b is None else (names.b, names.a)
        fail(op, missing, f"given together with {given}", "None")
    return a is not None


def _vector(op: str, name: str, t: Tensor | None, x: Tensor, wanted: list, like: str) -> None:
    if t is None:
        return
    _float(op, name, t)
    _wide_or(op, name, t, x)
    if list(t.shape) != wanted:
        fail(op, name, f"{wanted} to match {like}", shape(t))


def _bias(op: str, name: str, bias: Tensor | None, x: Tensor, weight_name: str, weight: Tensor) -> None:
    """[E, N] or, where N has halves, [E, 2, N/2]."""
    if bias is None:
        return
    _float(op, name, bias)
    _wide_or(op, name, bias, x)
    experts, out = weight.shape[0], math.prod(weight.shape[1:-1])
    flat = bias.dim() == 2 and bias.shape[1] == out
    split = bias.dim() == 3 and bias.shape[1] == 2 and 2 * bias.shape[2] == out
    if not (flat or split) or bias.shape[0] != experts:
        form = f"[{experts}, {out}]" + (f" or [{experts}, 2, {out // 2}]" if out % 2 == 0 else "")
        fail(op, name, f"{form} to match {weight_name} {shape(weight)}", shape(bias))


def _weight(op: str, name: str, weight: Tensor, x: Tensor, features, form: str) -> None:
    _same_dtype(op, name, weight, "x", x)
    if weight.dim() not in (3, 4) or weight.shape[-1] != features or (weight.dim() == 4 and weight.shape[1] != 2):
        fail(op, name, form, shape(weight))


def delta(op: str, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan) -> ExpertDims:
    _expert_ids(op, "expert_ids", expert_ids)
    per_route = _per_route(op, x, expert_ids)
    tokens, top_k = expert_ids.shape
    names = _Names()
    rank, out, halves = _factors(op, names, x, x.shape[1], lora_a, lora_b, None, None)
    experts = lora_b.shape[1] if lora_a.shape[1] == 1 else lora_a.shape[1]
    _experts_of(op, names, lora_a, lora_b, experts, f"lora_a {shape(lora_a)}")
    dims = ExpertDims(tokens, top_k, per_route, experts, x.shape[1], out, rank, lora_a.shape[0], halves)
    _adapter_ids(op, adapter_ids, "expert_ids", expert_ids)
    _slots(op, dims.slots, "lora_a", lora_a, scalings, ranks)
    if base is not None:
        _same_dtype(op, "base", base, "x", x)
        if list(base.shape) != [tokens * top_k, out]:
            fail(op, "base", f"[{tokens * top_k}, {out}] to match expert_ids {shape(expert_ids)} and lora_b {shape(lora_b)}", shape(base))
    _vector(op, "row_weights", row_weights, x, [tokens * top_k], f"expert_ids {shape(expert_ids)}")
    _plan(op, plan, tokens * top_k, experts, dims.slots)
    _device(
        op,
        "x",
        x,
        lora_a=lora_a,
        lora_b=lora_b,
        expert_ids=expert_ids,
        adapter_ids=adapter_ids,
        scalings=scalings,
        base=base,
        row_weights=row_weights,
        ranks=ranks,
        plan=plan,
    )
    return dims


def _lora_slots(op: str, scalings, adapter_ids, ids_name, expert_ids, ranks, name: str | None, a: Tensor | None) -> None:
    _adapter_ids(op, adapter_ids, ids_name, expert_ids)
    if a is None:
        return
    if scalings is None:
        fail(op, "scalings", f"[{a.shape[0]}] to match {name} {shape(a)}", "None")
    _slots(op, a.shape[0], name, a, scalings, ranks)


def linear(
    op: str, x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan
) -> ExpertDims:
    _expert_ids(op, "expert_ids", expert_ids)
    per_route = _per_route(op, x, expert_ids)
    tokens, top_k = expert_ids.shape
    features = x.shape[1]
    _weight(op, "weight", weight, x, features, f"[E, N, {features}] or [E, 2, N/2, {features}] to match x {shape(x)}")
    experts, out = weight.shape[0], math.prod(weight.shape[1:-1])
    rank = slots = 0
    halves = 2 if weight.dim() == 4 else 1
    names = _Names()
    if _pair(op, names, lora_a, lora_b):
        rank, _, lora_halves = _factors(op, names, x, features, lora_a, lora_b, experts, out)
        _experts_of(op, names, lora_a, lora_b, experts, f"weight {shape(weight)}")
        slots, halves = lora_a.shape[0], max(halves, lora_halves)
    _lora_slots(op, scalings, adapter_ids, "expert_ids", expert_ids, ranks, "lora_a", lora_a)
    _bias(op, "bias", bias, x, "weight", weight)
    _vector(op, "row_weights", row_weights, x, [tokens * top_k], f"expert_ids {shape(expert_ids)}")
    _plan(op, plan, tokens * top_k, experts, None if lora_a is None else slots)
    _device(
        op,
        "x",
        x,
        weight=weight,
        lora_a=lora_a,
        lora_b=lora_b,
        expert_ids=expert_ids,
        adapter_ids=adapter_ids,
        scalings=scalings,
        bias=bias,
        row_weights=row_weights,
        ranks=ranks,
        plan=plan,
    )
    return ExpertDims(tokens, top_k, per_route, experts, features, out, rank, slots, halves)


def choice_types(op: str, activation, activation_limit, router_weight) -> None:
    for name, value in (("activation", activation), ("router_weight", router_weight)):
        if not isinstance(value, str):
            raise TypeError(f"grouped_lora.{op}: {name} must be a str; got {type(value).__name__}.")
    if activation_limit is not None and (isinstance(activation_limit, bool) or not isinstance(activation_limit, (int, float))):
        got = type(activation_limit).__name__
        raise TypeError(f"grouped_lora.{op}: activation_limit must be a float or None; got {got}.")


def choices(op: str, activation, activation_limit, router_weight) -> None:
    """The words and numbers of `expert_mlp`."""
    if activation not in ACTIVATIONS:
        fail(op, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    if router_weight not in ROUTER_WEIGHTS:
        fail(op, "router_weight", f"one of {', '.join(ROUTER_WEIGHTS)}", repr(router_weight))
    if activation_limit is not None:
        if activation not in CLAMPED:
            fail(op, "activation_limit", f"None with {activation}, which has no clamp", activation_limit)
        if not (activation_limit > 0 and math.isfinite(activation_limit)):
            fail(op, "activation_limit", "None or a positive finite number", activation_limit)


def mlp_types(op: str, m: Mlp) -> None:
    """TypeError unless every argument is of its type."""
    kinds = {name: value for name, value in zip(Mlp._fields, m) if name not in ("activation", "activation_limit", "router_weight")}
    required = ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down")
    tensor_types(op, {n: kinds[n] for n in required}, {n: v for n, v in kinds.items() if n not in required})
    choice_types(op, m.activation, m.activation_limit, m.router_weight)


def mlp(op: str, m: Mlp) -> MlpDims:
    x, topk_ids, w_gate_up, w_down = m.x, m.topk_ids, m.w_gate_up, m.w_down
    choices(op, m.activation, m.activation_limit, m.router_weight)
    _expert_ids(op, "topk_ids", topk_ids)
    tokens, top_k = topk_ids.shape
    if x.dim() != 2 or x.shape[0] != tokens:
        fail(op, "x", f"[{tokens}, H] to match topk_ids {shape(topk_ids)}", shape(x))
    _float(op, "x", x)
    _vector(op, "topk_weights", m.topk_weights, x, [tokens, top_k], f"topk_ids {shape(topk_ids)}")
    hidden = x.shape[1]
    gated = m.activation != "relu2"
    form = f"[E, 2I, {hidden}] or [E, 2, I, {hidden}]" if gated else f"[E, I, {hidden}]"
    _weight(op, "w_gate_up", w_gate_up, x, hidden, f"{form} to match x {shape(x)}")
    experts, wide = w_gate_up.shape[0], math.prod(w_gate_up.shape[1:-1])
    if (gated and wide % 2 != 0) or (not gated and w_gate_up.dim() == 4):
        fail(op, "w_gate_up", f"{form} for {m.activation}", shape(w_gate_up))
    inner = wide // 2 if gated else wide
    _same_dtype(op, "w_down", w_down, "x", x)
    if list(w_down.shape) != [experts, hidden, inner]:
        fail(op, "w_down", f"[{experts}, {hidden}, {inner}] to match w_gate_up {shape(w_gate_up)}", shape(w_down))
    ranks_of, slots, first = [0, 0], 0, None
    gate_up_halves = 2 if w_gate_up.dim() == 4 else 1
    pairs = (
        (_Names("gate_up_a", "gate_up_b", "w_gate_up"), m.gate_up_a, m.gate_up_b, hidden, wide, w_gate_up),
        (_Names("down_a", "down_b", "w_down"), m.down_a, m.down_b, inner, hidden, w_down),
    )
    for i, (names, a, b, features, out, weight) in enumerate(pairs):
        if not _pair(op, names, a, b):
            continue
        ranks_of[i], _, lora_halves = _factors(op, names, x, features, a, b, experts, out)
        if lora_halves == 2 and (i == 1 or not gated):
            name, t = (names.a, a) if a.dim() == 5 else (names.b, b)
            fail(op, name, "without an axis of halves, which only gate and up have", shape(t))
        _experts_of(op, names, a, b, experts, f"{names.weight} {shape(weight)}")
        if first is not None and a.shape[0] != slots:
            fail(op, names.a, f"of {slots} slots like {first[0]} {shape(first[1])}", shape(a))
        slots = a.shape[0]
        first = first or (names.a, a)
        if i == 0:
            gate_up_halves = max(gate_up_halves, lora_halves)
    name, a = first or (None, None)
    _lora_slots(op, m.scalings, m.adapter_ids, "topk_ids", topk_ids, m.ranks, name, a)
    _bias(op, "b_gate_up", m.b_gate_up, x, "w_gate_up", w_gate_up)
    _vector(op, "b_down", m.b_down, x, [experts, hidden], f"w_down {shape(w_down)}")
    _plan(op, m.plan, tokens * top_k, experts, None if first is None else slots)
    others = {name: value for name, value in zip(Mlp._fields, m) if isinstance(value, Tensor) and name != "x"}
    _device(op, "x", x, **others)
    gate_up = ExpertDims(tokens, top_k, False, experts, hidden, wide, ranks_of[0], slots, gate_up_halves)
    down = ExpertDims(tokens, top_k, True, experts, inner, hidden, ranks_of[1], slots, 1)
    return MlpDims(gate_up, down, slots, max(ranks_of))


def plan(op: str, topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> None:
    _expert_ids(op, "topk_ids", topk_ids)
    _adapter_ids(op, adapter_ids, "topk_ids", topk_ids)
    _device(op, "topk_ids", topk_ids, adapter_ids=adapter_ids)
    for name, count in (("num_experts", num_experts), ("num_slots", num_slots)):
        if count < 0:
            fail(op, name, "zero or more", count)


def expert_id_values(op: str, ids_name: str, expert_ids: Tensor, experts: int) -> None:
    """ValueError for expert ids outside −1 … E. Reads the values."""
    if expert_ids.numel():
        low, high = (int(v) for v in torch.aminmax(expert_ids))
        if low < -1 or high > experts:
            must = f"-1 or {experts} (masked) or an expert 0 … {experts - 1}"
            fail(op, ids_name, must, low if low < -1 else high)


def id_values(
    op: str,
    ids_name: str,
    expert_ids: Tensor,
    experts: int,
    adapter_ids: Tensor | None,
    slots: int,
    ranks: Tensor | None = None,
    rank: int = 0,
) -> None:
    """ValueError for expert ids outside −1 … E and for adapter ids and ranks as in the dense ops. Reads the values."""
    expert_id_values(op, ids_name, expert_ids, experts)
    if slots > 0:
        none = expert_ids.new_empty(0)
        dense_id_values(op, none if adapter_ids is None else adapter_ids, slots, ranks, rank)


__all__ = ["ExpertDims", "Mlp", "MlpDims", "choices", "delta", "expert_id_values", "id_values", "linear", "mlp", "mlp_types", "plan", "tensor_types"]
