"""`warmup_experts`: what it prepares is all that the calls need. Launches are recorded by the key that compiles them."""

from __future__ import annotations

import importlib

import pytest
import torch
from test_warmup import with_linear_cu

import grouped_lora_ops as glo
from grouped_lora_ops import ExpertShape
from grouped_lora_ops.ops import common

SHAPES = {
    "gate and up apart": ExpertShape(256, 128, 16, 4, 16, 3),
    "one slot, input": ExpertShape(2048, 768, 128, 8, 32, 1, a_each=False, router_weight="input", adapter_ids=False, ranks=False),
    "shared outer, biases": ExpertShape(512, 96, 8, 2, 12, 2, shared=("gate_up_a", "down_b"), bias=True, router_weight="pre_down"),
    "fp32 relu2": ExpertShape(100, 40, 4, 2, 5, 2, dtype=torch.float32, activation="relu2", id_dtype=torch.int64),
    "the parent": ExpertShape(256, 128, 16, 4, 16, 3, lora=False),
    "many routes": ExpertShape(256, 128, 2, 4, 16, 3),
}
TOKENS = [1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 200]
OPS = ("expert_mlp", "expert_linear", "expert_delta")
STEMS = (
    "shrink", "expand", "plan", "wgrad", "expert_plan", "expert_shrink", "expert_expand", "expert_delta", "expert_linear",
    "expert_gate_up", "expert_rows", "expert_wgrad", "halves",
)  # fmt: skip
OPTIONS = ("b_gate_up", "b_down", "activation", "activation_limit", "router_weight", "ranks", "plan")
LEAVES = (0, 2, 3, 4, 5, 6, 7, 8, 11, 12)


def cuda(name):
    return importlib.import_module("grouped_lora_ops.ops.expert_cuda").__dict__[name]


class Mlp(torch.autograd.Function):
    """expert_mlp by the kernels' implementation, with its backward, on CPU tensors."""

    @staticmethod
    def forward(ctx, *args):
        y, *kept = cuda("mlp_train")(*args)
        ctx.args, ctx.kept = args, kept
        return y

    @staticmethod
    def backward(ctx, grad_y):
        needs = [ctx.needs_input_grad[i] for i in LEAVES]
        grads = dict(zip(LEAVES, cuda("mlp_backward")(grad_y, *ctx.kept, *ctx.args, needs)))
        return tuple([grads[i] if ctx.needs_input_grad[i] else None for i in range(18)])


def mlp(*args, **kw):
    args = (*args, *[kw[name] for name in OPTIONS])
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
        return Mlp.apply(*args)
    return cuda("mlp")(*args)


def linear(x, w, a, b, ids, adapters, scalings, *, ranks, plan):
    return cuda("linear")(x, w, a, b, ids, adapters, scalings, None, None, ranks, plan)


def delta(x, a, b, ids, adapters, scalings, *, ranks, plan, base=None):
    return cuda("delta")(x, a, b, ids, adapters, scalings, base, None, ranks, plan)


def plan(ids, adapters, experts, slots):
    return importlib.import_module("grouped_lora_ops.ops.expert_plan").build(ids, adapters, experts, slots)


@pytest.fixture
def keys(monkeypatch):
    """The keys under which launches compile, as if the CPU were an H200; nothing is launched."""
    pytest.importorskip("triton")
    seen = set()

    def record(name, kernel, grid, args, constants, num_warps, num_stages, pdl=False):
        kinds = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else a is None for a in args]
        seen.add((kernel, constants, num_warps, num_stages, pdl, *kinds))

    with_linear_cu(monkeypatch, seen)
    for stem in STEMS:
        monkeypatch.setattr(importlib.import_module(f"grouped_lora_ops.kernels.{stem}"), "launch", record)
    module = importlib.import_module("grouped_lora_ops.warmup_experts")
    for name, run in (("expert_mlp", mlp), ("expert_linear", linear), ("expert_delta", delta), ("expert_plan", plan)):
        monkeypatch.setattr(module, name, run)
    monkeypatch.setattr(common, "facts", lambda t: ("sm_90", 132))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return seen


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_is_left_to_compile(keys, monkeypatch, shape):
    """Real tensors, one for every expert and slot, and no plan given."""
    s = shape
    if s is SHAPES["many routes"]:  # a GPU so small that csrc/linear.cu's tiles fill it
        monkeypatch.setattr(common, "facts", lambda t: ("sm_90", 2))
    assert glo.warmup_experts([s], tokens=TOKENS, ops=OPS, device="cpu:0", backward=True) == len(TOKENS) * len(OPS)
    prepared = set(keys)
    assert len(prepared) > 10
    wide = s.inner if s.activation == "relu2" else 2 * s.inner
    each = (2,) if s.a_each and s.activation != "relu2" else ()

    def empty(*size):
        return torch.empty(size, dtype=s.dtype)

    def factor(name, *size):
        return empty(s.num_slots, 1 if name in s.shared else s.num_experts, *size)

    gate_up = factor("gate_up_a", *each, s.rank, s.hidden), factor("gate_up_b", wide, s.rank)
    down = factor("down_a", s.rank, s.inner), factor("down_b", s.hidden, s.rank)
    weights = empty(s.num_experts, wide, s.hidden), empty(s.num_experts, s.hidden, s.inner)
    biases = (empty(s.num_experts, wide), empty(s.num_experts, s.hidden)) if s.bias else (None, None)
    scalings = torch.ones(s.num_slots) if s.lora else None
    ranks = torch.ones(s.num_slots, dtype=torch.int32) if s.ranks and s.lora else None
    pairs = (*gate_up, *down) if s.lora else (None,) * 4
    for tokens in TOKENS:
        ids = torch.zeros(tokens, s.top_k, dtype=s.id_dtype)
        adapters = torch.zeros(tokens, dtype=s.id_dtype) if s.adapter_ids and s.lora else None
        x, a = empty(tokens, s.hidden), empty(tokens * s.top_k, s.inner)
        router = torch.zeros(tokens, s.top_k, dtype=s.weight_dtype)
        args = [x, ids, router, *weights, *pairs, adapters, scalings, *biases, s.activation, s.activation_limit, s.router_weight]
        cuda("mlp")(*args, ranks, None)
        assert keys == prepared, f"expert_mlp at T = {tokens}"
        needs = [True, True, False, False, *[s.lora] * 4, False, False]
        _, *kept = cuda("mlp_train")(*args, ranks, None)
        cuda("mlp_backward")(empty(tokens, s.hidden), *kept, *args, ranks, None, needs)
        assert keys == prepared, f"backward at T = {tokens}"
        for rows, weight, factors, width in ((x, weights[0], gate_up, wide), (a, weights[1], down, s.hidden)):
            linear(rows, weight, *(factors if s.lora else (None, None)), ids, adapters, scalings, ranks=ranks, plan=None)
            assert keys == prepared, f"expert_linear at T = {tokens}"
            if s.lora:
                for base in (None, empty(tokens * s.top_k, width)):
                    delta(rows, *factors, ids, adapters, scalings, ranks=ranks, plan=None, base=base)
                    assert keys == prepared, f"expert_delta at T = {tokens}"
    if s is SHAPES["many routes"]:
        assert {"linear_bf16_256_experts", "linear_bf16_256_experts_transposed"} <= prepared, "csrc/linear.cu, y and the gradient of x"


def test_a_wrong_op_is_refused():
    with pytest.raises(ValueError) as error:
        glo.warmup_experts([SHAPES["the parent"]], ops=["delta"])
    assert str(error.value) == f"grouped_lora_ops.warmup_experts: ops must be among {list(OPS)}; got 'delta'."


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_there_is_nothing_to_do():
    assert glo.warmup_experts([SHAPES["the parent"]]) == 0
