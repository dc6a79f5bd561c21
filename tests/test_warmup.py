"""`warmup`: what it prepares is all that the calls need. Here launches are recorded by the key that compiles them."""

from __future__ import annotations

import importlib

import pytest
import torch

import grouped_lora_ops as glo
from grouped_lora_ops import Shape, cuda, driver
from grouped_lora_ops.ops import common

OPS = ("delta", "delta_", "shrink", "expand", "expand_", "linear")
SHAPES = {
    "wo_a": Shape(1280, 24, 5, 320, groups=2),
    "one slot": Shape(4096, 64, 1, 1024, groups=4),
    "many slots, fp32": Shape(1000, 7, 300, 129, dtype=torch.float32, ranks=False, id_dtype=torch.int64),
    "qkv": Shape(4096, 32, 8, out_sizes=(2048, 256, 256), shared_a=False),
    "qkv from one h": Shape(4096, 32, 8, out_sizes=(2048, 256, 256)),
    "shared input": Shape(2048, 16, 4, 1024, groups=3, shared_input=True, shared_a=False),
    "shared h": Shape(2048, 200, 4, 1024, groups=3, shared_input=True),
    "e4m3": Shape(1280, 16, 3, out_sizes=(384, 100), weight_scale=torch.float8_e8m0fnu),
    "e4m3, grouped": Shape(1280, 16, 3, 320, groups=2, weight_scale=torch.float8_e8m0fnu),
    "e4m3, float32 scales": Shape(1280, 16, 3, 320, weight_scale=torch.float32),
}
TOKENS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 128, 129, 200, 256, 257, 384, 385, 448, 500, 512]


class Delta(torch.autograd.Function):
    """delta by the kernels' implementation, with its backward, on CPU tensors."""

    @staticmethod
    def forward(ctx, x, a, b, ids, scalings, kw):
        ctx.save_for_backward(x, a, b, ids, scalings)
        ctx.kw = kw
        return implementation("delta")._cuda(x, a, b, ids, scalings, **kw)

    @staticmethod
    def backward(ctx, grad_y):
        kw = ctx.kw
        args = (kw.get("out_sizes"), kw.get("ranks"), None, [True] * 3)
        return *implementation("delta")._backward_cuda(grad_y, *ctx.saved_tensors, *args), None, None, None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, a, b, ids, scalings, kw):
        ctx.save_for_backward(x, weight, a, b, ids, scalings)
        ctx.kw = kw
        return implementation("linear")._cuda(x, weight, a, b, ids, scalings, **kw)

    @staticmethod
    def backward(ctx, grad_y):
        needs, scale = [True, False, True, True, False], ctx.kw.get("weight_scale")
        args = (None, ctx.kw.get("out_sizes"), ctx.kw.get("ranks"), None, needs, scale)
        dx, _, da, db, _ = implementation("linear")._backward_cuda(grad_y, *ctx.saved_tensors, *args)
        return dx, None, da, db, None, None, None


def linear(x, weight, a, b, ids, scalings, **kw):
    if x.requires_grad:
        return Linear.apply(x, weight, a, b, ids, scalings, kw)
    return implementation("linear")._cuda(x, weight, a, b, ids, scalings, **kw)


def implementation(stem):
    return importlib.import_module(f"grouped_lora_ops.ops.{stem}")


def delta(x, a, b, ids, scalings, **kw):
    if x.requires_grad:
        return Delta.apply(x, a, b, ids, scalings, kw)
    return implementation("delta")._cuda(x, a, b, ids, scalings, **kw)


class LinearCu:
    """csrc/linear.cu's or csrc/stream.cu's module, which notes the kernels that are asked for: inside a capture an unknown one is refused."""

    def __init__(self, seen: set):
        self.seen = seen

    def constant(self, op, name):
        return 1

    def function(self, op, name, shared):
        self.seen.add(name)


def with_linear_cu(monkeypatch, seen: set) -> None:
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: LinearCu(seen) if stem in ("linear", "stream") else None)
    monkeypatch.setattr(cuda, "launch", lambda *args, **kw: None)
    monkeypatch.setattr(driver, "has_tensor_maps", lambda: True)
    monkeypatch.setattr(driver, "tensor_map", lambda *args, **kw: [0] * 16)


@pytest.fixture
def keys(monkeypatch):
    """The keys under which launches compile, as if the CPU were an H200; nothing is launched."""
    pytest.importorskip("triton")
    seen = set()

    def record(name, kernel, grid, args, constants, num_warps, num_stages, pdl=False):
        kinds = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else a is None for a in args]
        seen.add((kernel, constants, num_warps, num_stages, pdl, *kinds))

    with_linear_cu(monkeypatch, seen)
    for stem in ("shrink", "expand", "delta", "plan", "wgrad", "linear", "halves", "dequantize"):
        monkeypatch.setattr(importlib.import_module(f"grouped_lora_ops.kernels.{stem}"), "launch", record)
    module = importlib.import_module("grouped_lora_ops.warmup")
    names = {"delta_": ("delta", "_cuda_"), "shrink": ("shrink", "_cuda"), "expand": ("expand", "_cuda")}
    names.update(expand_=("expand", "_cuda_"), plan=("plan", "_cuda"))
    for name, (stem, function) in names.items():
        monkeypatch.setattr(module, name, getattr(implementation(stem), function))
    monkeypatch.setattr(module, "delta", delta)
    monkeypatch.setattr(module, "linear", linear)
    monkeypatch.setattr(common, "facts", lambda t: ("sm_90", 132))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return seen


def calls(s: Shape, tokens: int):
    """What a user calls, on tensors as a user allocates them."""
    groups = len(s.out_sizes) if s.out_sizes else s.groups

    def empty(*size):
        return torch.empty(size, dtype=s.dtype)

    flat = groups is None or s.shared_input or s.out_sizes
    x = empty(tokens, s.in_features) if flat else empty(tokens, groups, s.in_features)
    a = empty(s.num_slots, *((groups,) if groups and not s.shared_a else ()), s.rank, s.in_features)
    out = (sum(s.out_sizes),) if s.out_sizes else (s.out_features,) if groups is None else (groups, s.out_features)
    b, y = empty(s.num_slots, *out, s.rank), empty(tokens, *out)
    ids, scalings = torch.zeros(tokens, dtype=s.id_dtype), torch.ones(s.num_slots)
    kw = {"ranks": torch.ones(s.num_slots, dtype=torch.int32) if s.ranks else None}
    sizes = {"out_sizes": list(s.out_sizes) if s.out_sizes else None}
    d, e = implementation("delta"), implementation("expand")
    yield "delta", lambda: d._cuda(x, a, b, ids, scalings, **kw, **sizes)
    yield "delta with base", lambda: d._cuda(x, a, b, ids, scalings, base=y, **kw, **sizes)
    yield "delta_", lambda: d._cuda_(y, x, a, b, ids, scalings, **kw, **sizes)
    h = implementation("shrink")._cuda(x, a, ids, **kw)
    yield "shrink", lambda: implementation("shrink")._cuda(x, a, ids, **kw)
    yield "expand", lambda: e._cuda(h, b, ids, scalings, **kw, **sizes)
    yield "expand with base", lambda: e._cuda(h, b, ids, scalings, base=y, **kw, **sizes)
    yield "expand_", lambda: e._cuda_(y, h, b, ids, scalings, **kw, **sizes)
    yield "plan", lambda: implementation("plan")._cuda(ids, s.num_slots)
    grads = (sizes["out_sizes"], kw["ranks"], None, [True] * 3)
    yield "backward", lambda: d._backward_cuda(torch.empty_like(y), x, a, b, ids, scalings, *grads)
    m, weight = implementation("linear"), torch.empty(*out, s.in_features, dtype=s.dtype)
    scale = None
    if s.weight_scale is not None:
        weight = weight.to(torch.float8_e4m3fn)
        blocks = (*out[:-1], -(-out[-1] // 128), -(-s.in_features // 128))
        scale = torch.ones(blocks).to(s.weight_scale)
    kw = {**kw, "weight_scale": scale}
    yield "linear", lambda: m._cuda(x, weight, a, b, ids, scalings, **kw, **sizes)
    yield "linear with bias", lambda: m._cuda(x, weight, a, b, ids, scalings, bias=y[0].clone(), **kw, **sizes)
    grads = (None, *grads[:-1], [True, False, True, True, False], scale)
    yield "backward of linear", lambda: m._backward_cuda(torch.empty_like(y), x, weight, a, b, ids, scalings, *grads)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_is_left_to_compile(keys, shape):
    assert glo.warmup([shape], tokens=TOKENS, ops=OPS, device="cpu:0", backward=True) == len(TOKENS) * len(OPS)
    prepared = set(keys)
    assert len(prepared) > 10
    for tokens in TOKENS:
        for name, call in calls(shape, tokens):
            call()
            assert keys == prepared, f"{name} at T = {tokens}"
    converts = any(getattr(key[0], "__name__", "") == "dequantize_kernel" for key in prepared)
    assert converts == (shape.weight_scale == torch.float8_e8m0fnu)
    if shape.weight_scale is not None and not shape.out_sizes:
        assert {f"stream_{rows}_32_{shape.rank}_e4m3" for rows in (16, 64)} <= prepared, "csrc/stream.cu"
    if shape in (SHAPES["one slot"], SHAPES["qkv"]):
        assert {f"stream_{rows}_32_{shape.rank}" for rows in (16, 64)} <= prepared, "csrc/stream.cu"
        names = {key for key in prepared if isinstance(key, str) and key.startswith("linear_bf16")}
        assert {name.endswith("transposed") for name in names} == {False, True}, "csrc/linear.cu, y and the gradient of x"


def test_every_count_up_to_tokens_is_called(keys, monkeypatch):
    counts = []
    module = importlib.import_module("grouped_lora_ops.warmup")
    monkeypatch.setattr(module, "delta_", lambda out, x, *args, **kw: counts.append(x.shape[0]))
    assert glo.warmup([SHAPES["wo_a"]], tokens=20, ops=["delta_"], device="cpu:0") == 20
    assert counts == list(range(1, 21))


def test_a_wrong_op_is_refused():
    with pytest.raises(ValueError) as error:
        glo.warmup([SHAPES["wo_a"]], ops=["delta", "wgrad"])
    assert str(error.value) == f"grouped_lora_ops.warmup: ops must be among {list(OPS)}; got 'wgrad'."


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_there_is_nothing_to_do():
    assert glo.warmup([SHAPES["wo_a"]]) == 0
