"""The exact sentence of every argument check of the expert ops, before anything is launched or written."""

from __future__ import annotations

import importlib

import pytest
import torch

import grouped_lora_ops as gl
from grouped_lora_ops import _checks

T, K, E, D, N, R, L, INNER = 6, 2, 4, 20, 12, 3, 2, 8
M = T * K


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ids(*shape, value=0, dtype=torch.int64):
    return torch.full(shape, value, dtype=dtype)


def arguments(op):
    common = {"adapter_ids": ids(T), "scalings": torch.ones(L)}
    if op == "expert_mlp":
        return {
            "x": zeros(T, D),
            "topk_ids": ids(T, K),
            "topk_weights": zeros(T, K),
            "w_gate_up": zeros(E, 2 * INNER, D),
            "w_down": zeros(E, D, INNER),
            "gate_up_a": zeros(L, E, R, D),
            "gate_up_b": zeros(L, E, 2 * INNER, R),
            "down_a": zeros(L, E, R, INNER),
            "down_b": zeros(L, E, D, R),
            **common,
            "b_gate_up": zeros(E, 2 * INNER),
            "b_down": zeros(E, D),
        }
    args = {"x": zeros(T, D), "lora_a": zeros(L, E, R, D), "lora_b": zeros(L, E, N, R), "expert_ids": ids(T, K), **common}
    if op == "expert_linear":
        return {**args, "weight": zeros(E, N, D), "bias": zeros(E, N), "row_weights": zeros(M)}
    return {**args, "base": zeros(M, N), "row_weights": zeros(M)}


def call(op, **changes):
    return getattr(gl, op)(**{**arguments(op), **changes})


A_FORM, DOWN_A = "[L, E or 1, r, 20] or [L, E or 1, 2, r, 20]", "[L, 4 or 1, r, 8] or [L, 4 or 1, 2, r, 8]"
META = "must be on cpu like x; got meta."
SENTENCES = [
    # expert_delta: x and ids
    ("expert_delta", dict(x=zeros(D)), "x must be [T, D] or [T·K, D]; got [20]."),
    ("expert_delta", dict(x=zeros(T, 1, D)), "x must be [T, D] or [T·K, D]; got [6, 1, 20]."),
    ("expert_delta", dict(x=zeros(7, D)), "x must be [6, D] or [12, D] to match expert_ids [6, 2]; got [7, 20]."),
    ("expert_delta", dict(x=zeros(T, D).long()), "x must be bfloat16, float16, float32 or float64 on cpu; got int64."),
    ("expert_delta", dict(expert_ids=ids(M)), "expert_ids must be [T, K]; got [12]."),
    ("expert_delta", dict(expert_ids=zeros(T, K)), "expert_ids must be int32 or int64; got float32."),
    ("expert_delta", dict(adapter_ids=ids(M)), "adapter_ids must be [6] to match expert_ids [6, 2]; got [12]."),
    ("expert_delta", dict(adapter_ids=ids(T, 1)), "adapter_ids must be [6] to match expert_ids [6, 2]; got [6, 1]."),
    ("expert_delta", dict(adapter_ids=zeros(T).bool()), "adapter_ids must be int32 or int64; got bool."),
    # … factors
    ("expert_delta", dict(lora_a=zeros(L, R, D)), f"lora_a must be {A_FORM}; got [2, 3, 20]."),
    ("expert_delta", dict(lora_a=zeros(L, E, R, 19)), f"lora_a must be {A_FORM}; got [2, 4, 3, 19]."),
    ("expert_delta", dict(lora_a=zeros(L, E, 3, R, D)), f"lora_a must be {A_FORM}; got [2, 4, 3, 3, 20]."),
    (
        "expert_delta",
        dict(lora_a=zeros(L, E, R, D).half()),
        "lora_a must be float32; got float16.",
    ),
    (
        "expert_delta",
        dict(x=zeros(T, D).bfloat16(), base=None, lora_b=zeros(L, E, N, R).half()),
        "lora_b must be bfloat16 like x, or float32; got float16.",
    ),
    (
        "expert_delta",
        dict(lora_b=zeros(L, E, N, 4)),
        "lora_b must be [L, E or 1, N, 3] or [L, E or 1, 2, N/2, 3] to match lora_a [2, 4, 3, 20]; got [2, 4, 12, 4].",
    ),
    (
        "expert_delta",
        dict(lora_b=zeros(L, E, 3, 4, R)),
        "lora_b must be [L, E or 1, N, 3] or [L, E or 1, 2, N/2, 3] to match lora_a [2, 4, 3, 20]; got [2, 4, 3, 4, 3].",
    ),
    (
        "expert_delta",
        dict(lora_a=zeros(L, E, 2, R, D), lora_b=zeros(L, E, 11, R)),
        "lora_b must be [L, E or 1, N, 3] or [L, E or 1, 2, N/2, 3] to match lora_a [2, 4, 2, 3, 20]; got [2, 4, 11, 3].",
    ),
    ("expert_delta", dict(lora_b=zeros(3, E, N, R)), "lora_b must be of 2 slots like lora_a [2, 4, 3, 20]; got [3, 4, 12, 3]."),
    (
        "expert_delta",
        dict(lora_b=zeros(L, 5, N, R)),
        "lora_b must be of 4 experts like lora_a [2, 4, 3, 20], or of 1 that all share; got [2, 5, 12, 3].",
    ),
    ("expert_delta", dict(scalings=torch.ones(3)), "scalings must be [2] to match lora_a [2, 4, 3, 20]; got [3]."),
    ("expert_delta", dict(scalings=torch.ones(L).double()), "scalings must be float32; got float64."),
    ("expert_delta", dict(ranks=torch.ones(3).int()), "ranks must be [2] to match lora_a [2, 4, 3, 20]; got [3]."),
    ("expert_delta", dict(ranks=torch.ones(L).long()), "ranks must be int32; got int64."),
    # … base, row_weights, plan
    ("expert_delta", dict(base=zeros(T, N)), "base must be [12, 12] to match expert_ids [6, 2] and lora_b [2, 4, 12, 3]; got [6, 12]."),
    ("expert_delta", dict(base=zeros(M, N).half()), "base must be float32 like x; got float16."),
    ("expert_delta", dict(row_weights=zeros(T, K)), "row_weights must be [12] to match expert_ids [6, 2]; got [6, 2]."),
    ("expert_delta", dict(row_weights=zeros(M).half()), "row_weights must be float32; got float16."),
    ("expert_delta", dict(plan=zeros(3)), "plan must be int32; got float32."),
    (
        "expert_delta",
        dict(plan=ids(9, dtype=torch.int32)),
        "plan must be [{plan}] for M = 12 routes, E = 4 experts and L = 2 slots, from grouped_lora.expert_plan; got [9].",
    ),
    # … devices
    *[("expert_delta", {name: t.to("meta")}, f"{name} {META}") for name, t in arguments("expert_delta").items() if name != "x"],
    ("expert_delta", dict(ranks=zeros(L, dtype=torch.int32, device="meta")), f"ranks {META}"),
    # … values, where reading them costs nothing
    ("expert_delta", dict(expert_ids=ids(T, K, value=5)), "expert_ids must be -1 or 4 (masked) or an expert 0 … 3; got 5."),
    ("expert_delta", dict(expert_ids=ids(T, K, value=-2)), "expert_ids must be -1 or 4 (masked) or an expert 0 … 3; got -2."),
    ("expert_delta", dict(adapter_ids=ids(T, value=2)), "adapter_ids must be -1 (no adapter) or a slot 0 … 1; got 2."),
    ("expert_delta", dict(ranks=ids(L, value=4).int()), "ranks must be 0 … 3, the rank of the stacked factors; got 4."),
    # expert_linear
    ("expert_linear", dict(weight=zeros(N, D)), "weight must be [E, N, 20] or [E, 2, N/2, 20] to match x [6, 20]; got [12, 20]."),
    ("expert_linear", dict(weight=zeros(E, D, N)), "weight must be [E, N, 20] or [E, 2, N/2, 20] to match x [6, 20]; got [4, 20, 12]."),
    (
        "expert_linear",
        dict(weight=zeros(E, 3, 4, D)),
        "weight must be [E, N, 20] or [E, 2, N/2, 20] to match x [6, 20]; got [4, 3, 4, 20].",
    ),
    ("expert_linear", dict(weight=zeros(E, N, D).half()), "weight must be float32 like x; got float16."),
    ("expert_linear", dict(lora_b=None), "lora_b must be given together with lora_a; got None."),
    ("expert_linear", dict(lora_a=None), "lora_a must be given together with lora_b; got None."),
    ("expert_linear", dict(scalings=None), "scalings must be [2] to match lora_a [2, 4, 3, 20]; got None."),
    (
        "expert_linear",
        dict(lora_a=zeros(L, 2, R, D)),
        "lora_a must be of 4 experts like weight [4, 12, 20], or of 1 that all share; got [2, 2, 3, 20].",
    ),
    (
        "expert_linear",
        dict(lora_b=zeros(L, E, 13, R)),
        "lora_b must be [L, 4 or 1, 12, 3] or [L, 4 or 1, 2, 6, 3] to match lora_a [2, 4, 3, 20]; got [2, 4, 13, 3].",
    ),
    (
        "expert_linear",
        dict(lora_b=zeros(L, E, 2, 7, R)),
        "lora_b must be [L, 4 or 1, 12, 3] or [L, 4 or 1, 2, 6, 3] to match lora_a [2, 4, 3, 20]; got [2, 4, 2, 7, 3].",
    ),
    ("expert_linear", dict(bias=zeros(N)), "bias must be [4, 12] or [4, 2, 6] to match weight [4, 12, 20]; got [12]."),
    ("expert_linear", dict(bias=zeros(E, 3, 4)), "bias must be [4, 12] or [4, 2, 6] to match weight [4, 12, 20]; got [4, 3, 4]."),
    ("expert_linear", dict(bias=zeros(E, N).half()), "bias must be float32; got float16."),
    ("expert_linear", dict(row_weights=zeros(T)), "row_weights must be [12] to match expert_ids [6, 2]; got [6]."),
    *[("expert_linear", {name: t.to("meta")}, f"{name} {META}") for name, t in arguments("expert_linear").items() if name != "x"],
    ("expert_linear", dict(expert_ids=ids(T, K, value=9)), "expert_ids must be -1 or 4 (masked) or an expert 0 … 3; got 9."),
    # expert_mlp: words and numbers
    ("expert_mlp", dict(activation="silu"), "activation must be one of swiglu, swigluoai, geglu_tanh, relu2; got 'silu'."),
    ("expert_mlp", dict(router_weight="pre"), "router_weight must be one of input, pre_down, post_down; got 'pre'."),
    (
        "expert_mlp",
        dict(activation="geglu_tanh", activation_limit=7.0),
        "activation_limit must be None with geglu_tanh, which has no clamp; got 7.0.",
    ),
    (
        "expert_mlp",
        dict(activation="relu2", activation_limit=7.0),
        "activation_limit must be None with relu2, which has no clamp; got 7.0.",
    ),
    ("expert_mlp", dict(activation_limit=0.0), "activation_limit must be None or a positive finite number; got 0.0."),
    ("expert_mlp", dict(activation_limit=-1.0), "activation_limit must be None or a positive finite number; got -1.0."),
    ("expert_mlp", dict(activation_limit=float("nan")), "activation_limit must be None or a positive finite number; got nan."),
    # … shapes
    ("expert_mlp", dict(x=zeros(M, D)), "x must be [6, H] to match topk_ids [6, 2]; got [12, 20]."),
    ("expert_mlp", dict(x=zeros(T, 1, D)), "x must be [6, H] to match topk_ids [6, 2]; got [6, 1, 20]."),
    ("expert_mlp", dict(x=zeros(T, D).int()), "x must be bfloat16, float16, float32 or float64 on cpu; got int32."),
    ("expert_mlp", dict(topk_ids=ids(M)), "topk_ids must be [T, K]; got [12]."),
    ("expert_mlp", dict(topk_ids=zeros(T, K)), "topk_ids must be int32 or int64; got float32."),
    ("expert_mlp", dict(topk_weights=zeros(T, 3)), "topk_weights must be [6, 2] to match topk_ids [6, 2]; got [6, 3]."),
    ("expert_mlp", dict(topk_weights=zeros(T, K).half()), "topk_weights must be float32; got float16."),
    ("expert_mlp", dict(w_gate_up=zeros(E, 16, 19)), "w_gate_up must be [E, 2I, 20] or [E, 2, I, 20] to match x [6, 20]; got [4, 16, 19]."),
    ("expert_mlp", dict(w_gate_up=zeros(E, 15, D)), "w_gate_up must be [E, 2I, 20] or [E, 2, I, 20] for swiglu; got [4, 15, 20]."),
    ("expert_mlp", dict(w_gate_up=zeros(E, 3, 8, D)), "w_gate_up must be [E, 2I, 20] or [E, 2, I, 20] to match x [6, 20]; got [4, 3, 8, 20]."),
    (
        "expert_mlp",
        dict(w_gate_up=zeros(E, 2, 8, D), activation="relu2"),
        "w_gate_up must be [E, I, 20] for relu2; got [4, 2, 8, 20].",
    ),
    ("expert_mlp", dict(w_gate_up=zeros(E, 16, D).half()), "w_gate_up must be float32 like x; got float16."),
    ("expert_mlp", dict(w_down=zeros(E, INNER, D)), "w_down must be [4, 20, 8] to match w_gate_up [4, 16, 20]; got [4, 8, 20]."),
    ("expert_mlp", dict(activation="relu2"), "w_down must be [4, 20, 16] to match w_gate_up [4, 16, 20]; got [4, 20, 8]."),
    ("expert_mlp", dict(w_down=zeros(E, D, INNER).half()), "w_down must be float32 like x; got float16."),
    ("expert_mlp", dict(b_gate_up=zeros(E, D)), "b_gate_up must be [4, 16] or [4, 2, 8] to match w_gate_up [4, 16, 20]; got [4, 20]."),
    ("expert_mlp", dict(b_down=zeros(E, INNER)), "b_down must be [4, 20] to match w_down [4, 20, 8]; got [4, 8]."),
    # … LoRA pairs
    ("expert_mlp", dict(gate_up_b=None), "gate_up_b must be given together with gate_up_a; got None."),
    ("expert_mlp", dict(down_a=None), "down_a must be given together with down_b; got None."),
    ("expert_mlp", dict(scalings=None), "scalings must be [2] to match gate_up_a [2, 4, 3, 20]; got None."),
    (
        "expert_mlp",
        dict(gate_up_a=None, gate_up_b=None, scalings=torch.ones(3)),
        "scalings must be [2] to match down_a [2, 4, 3, 8]; got [3].",
    ),
    ("expert_mlp", dict(down_a=zeros(L, E, R, D)), f"down_a must be {DOWN_A}; got [2, 4, 3, 20]."),
    (
        "expert_mlp",
        dict(down_a=zeros(L, E, 2, R, INNER)),
        "down_a must be without an axis of halves, which only gate and up have; got [2, 4, 2, 3, 8].",
    ),
    (
        "expert_mlp",
        dict(down_b=zeros(L, E, 2, D // 2, R)),
        "down_b must be without an axis of halves, which only gate and up have; got [2, 4, 2, 10, 3].",
    ),
    ("expert_mlp", dict(down_b=zeros(3, E, D, R)), "down_b must be of 2 slots like down_a [2, 4, 3, 8]; got [3, 4, 20, 3]."),
    (
        "expert_mlp",
        dict(down_a=zeros(3, E, R, INNER), down_b=zeros(3, E, D, R)),
        "down_a must be of 2 slots like gate_up_a [2, 4, 3, 20]; got [3, 4, 3, 8].",
    ),
    (
        "expert_mlp",
        dict(gate_up_a=zeros(L, 3, R, D)),
        "gate_up_a must be of 4 experts like w_gate_up [4, 16, 20], or of 1 that all share; got [2, 3, 3, 20].",
    ),
    (
        "expert_mlp",
        dict(gate_up_b=zeros(L, E, 15, R)),
        "gate_up_b must be [L, 4 or 1, 16, 3] or [L, 4 or 1, 2, 8, 3] to match gate_up_a [2, 4, 3, 20]; got [2, 4, 15, 3].",
    ),
    (
        "expert_mlp",
        dict(plan=ids(1, dtype=torch.int32)),
        "plan must be [{plan}] for M = 12 routes, E = 4 experts and L = 2 slots, from grouped_lora.expert_plan; got [1].",
    ),
    *[("expert_mlp", {name: t.to("meta")}, f"{name} {META}") for name, t in arguments("expert_mlp").items() if name != "x"],
    # … values
    ("expert_mlp", dict(topk_ids=ids(T, K, value=-3)), "topk_ids must be -1 or 4 (masked) or an expert 0 … 3; got -3."),
    ("expert_mlp", dict(adapter_ids=ids(T, value=-2)), "adapter_ids must be -1 (no adapter) or a slot 0 … 1; got -2."),
    ("expert_mlp", dict(ranks=ids(L, value=-1).int()), "ranks must be 0 … 3, the rank of the stacked factors; got -1."),
]


@pytest.mark.parametrize("op, changes, sentence", SENTENCES, ids=[f"{op}-{s[:44]}" for op, _, s in SENTENCES])
def test_value_errors(op, changes, sentence):
    size = gl.expert_plan(ids(T, K), ids(T), E, L).shape[0]
    with pytest.raises(ValueError) as error:
        call(op, **changes)
    assert str(error.value) == f"grouped_lora.{op}: {sentence.replace('{plan}', str(size))}"


@pytest.mark.parametrize("op", ["expert_delta", "expert_linear", "expert_mlp"])
def test_the_arguments_that_the_sentences_change_are_good(op):
    call(op)
    plan = gl.expert_plan(ids(T, K), ids(T), E, L)
    call(op, ranks=ids(L, value=3).int(), plan=plan, adapter_ids=ids(T).int())
    with pytest.raises(ValueError, match=f"grouped_lora.{op}: plan must be contiguous; got stride 2"):
        call(op, plan=plan.repeat_interleave(2)[::2])
    optional = ("base", "row_weights", "bias", "b_gate_up", "b_down", "adapter_ids")
    call(op, **{name: None for name in optional if name in arguments(op)})
    call(op, **{name: t.to("meta") for name, t in arguments(op).items()})


@pytest.mark.parametrize("op", ["expert_delta", "expert_linear", "expert_mlp"])
def test_type_errors(op):
    optional = ("adapter_ids", "base", "bias", "row_weights", "ranks", "plan", "b_gate_up", "b_down")
    if op != "expert_delta":
        optional += ("scalings", "lora_a", "lora_b", "gate_up_a", "gate_up_b", "down_a", "down_b")
    for name in [*arguments(op), "ranks", "plan"]:
        with pytest.raises(TypeError) as error:
            call(op, **{name: 3})
        or_none = " or None" if name in optional else ""
        assert str(error.value) == f"grouped_lora.{op}: {name} must be a torch.Tensor{or_none}; got int."
        if not or_none:
            with pytest.raises(TypeError, match=rf"{name} must be a torch\.Tensor; got NoneType"):
                call(op, **{name: None})


def test_words_and_numbers():
    for name in ("activation", "router_weight"):
        for value, got in ((None, "NoneType"), (3, "int")):
            with pytest.raises(TypeError, match=f"^grouped_lora.expert_mlp: {name} must be a str; got {got}.$"):
                call("expert_mlp", **{name: value})
    for value, got in (("7", "str"), (True, "bool")):
        with pytest.raises(TypeError, match=f"^grouped_lora.expert_mlp: activation_limit must be a float or None; got {got}.$"):
            call("expert_mlp", activation_limit=value)
    call("expert_mlp", activation_limit=7)


def test_ids_beside_no_slot_are_not_read():
    """Without LoRA adapter ids have no slots to be in, and a plan, of whatever slots, is not read."""
    lora = dict.fromkeys(("gate_up_a", "gate_up_b", "down_a", "down_b"))
    call("expert_mlp", adapter_ids=ids(T, value=5), scalings=None, **lora)
    call("expert_linear", adapter_ids=ids(T, value=5), scalings=None, lora_a=None, lora_b=None)
    plan = gl.expert_plan(ids(T, K), ids(T), E, L)
    call("expert_mlp", plan=plan, **lora)
    call("expert_linear", plan=plan, lora_a=None, lora_b=None)
    with pytest.raises(ValueError, match="plan must be int32; got int64"):
        call("expert_mlp", plan=plan.long(), **lora)
    with pytest.raises(ValueError, match=r"adapter_ids must be \[6\] to match topk_ids \[6, 2\]; got \[5\]"):
        call("expert_mlp", adapter_ids=ids(5), **lora)


def test_the_checks_are_those_of_every_path():
    """A gradient that is asked for takes another op; compiled calls and direct ones check alike."""
    grad = {"x": zeros(T, D).requires_grad_()}
    must = r"^grouped_lora\.expert_mlp: w_down must be \[4, 20, 8\] to match w_gate_up \[4, 16, 20\]; got \[4, 8, 20\]\.$"
    with pytest.raises(ValueError, match=must):
        call("expert_mlp", w_down=zeros(E, INNER, D), **grad)
    args = arguments("expert_mlp")
    with pytest.raises(ValueError, match=must):
        torch.ops.grouped_lora.expert_mlp(*{**args, "w_down": zeros(E, INNER, D)}.values())
    with pytest.raises(ValueError, match="topk_ids must be -1 or 4"):
        call("expert_mlp", topk_ids=ids(T, K, value=7), **grad)


def test_checked_values_where_asked_for(monkeypatch):
    """GROUPED_LORA_CHECK=1: a GPU's path reads ids and ranks, too, and says the same."""
    path = importlib.import_module("grouped_lora_ops.ops.expert_delta")  # the package's own name is the function
    monkeypatch.setattr(_checks, "CHECK_IDS", True)
    args = {**arguments("expert_delta"), "expert_ids": ids(T, K, value=7)}
    with pytest.raises(ValueError, match="expert_ids must be -1 or 4"):
        path._cuda(*[args[n] for n in ("x", "lora_a", "lora_b", "expert_ids", "adapter_ids", "scalings")])
