"""`linear`: base and delta in one kernel against the reference, exactly, and against float64; see also test_linear_gpu.py."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_gpu
import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, FORMS, NAN, assert_bits, assert_equal, place
from linear_cases import WAYS, arguments, call, case, check, leaves_of, random_case, tiling, want_grads, want_linear

import grouped_lora_ops as gl
from grouped_lora_ops import launch, launch_linear, reference
from grouped_lora_ops.launch_linear import MIXED, ROWS, SORTED

ROOT = Path(__file__).parents[1]
thorough = pytest.mark.thorough
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SLOTS_TOO = pytest.mark.parametrize("way", ["short rows", "sorted", "slots", "plan"])


@pytest.fixture
def way_of(monkeypatch):
    """way_of("plan"): every product from here on is tiled so."""
    return tiling(monkeypatch, "linear", WAYS)


@pytest.mark.parametrize("form", FORMS)
@dtypes
def test_exact(kernels, form, dtype):
    c, weight, bias = case(form, dtype, ranks=True, device=kernels.device)
    check(kernels, c, weight, bias)


@thorough
@SLOTS_TOO
@pytest.mark.parametrize("form", ["plain", "wo_a", "shared input", "slices"])
def test_ways(kernels, way_of, way, form):
    way_of(way)
    for slots in (1, 3):
        for dtype in (torch.bfloat16, torch.float16) if form == "plain" else (torch.bfloat16,):
            c, weight, bias = case(form, dtype, tokens=40, slots=slots, features=140, ranks=True, device=kernels.device)
            check(kernels, c, weight, bias, f"L = {slots}")


def test_the_shrink_may_be_whole(kernels, monkeypatch):
    """h in one piece, as for long batches, and in pieces."""
    shrink = launch.shrink
    monkeypatch.setattr(launch, "shrink", lambda p, split=False: shrink(p, split=False))
    c, weight, bias = case("wo_a", features=600, device=kernels.device)
    assert launch_linear.linear(launch.Problem("sm_90", 132, 2, 7, 2, 600, 70, 5, 3)).shrink.split is False
    check(kernels, c, weight, bias)


@thorough
@pytest.mark.parametrize("rank", [1, 3, 8, 12, 33, 64, 128, 200])
def test_every_rank(kernels, way_of, rank):
    for way in ("short rows", "slots"):
        way_of(way)
        ids = [0, 1, 2, 0, 1, -1, 0]
        c, weight, _ = case("plain", rank=rank, features=100, ranks=[rank, rank // 2, 0], ids=ids, device=kernels.device)
        check(kernels, c, weight, what=way)


@pytest.mark.parametrize("tokens", [1, 17, 65, pytest.param(300, marks=thorough)])
def test_every_count(kernels, tokens):
    c, weight, bias = case("wo_a", tokens=tokens, features=64, out=20, device=kernels.device)
    check(kernels, c, weight, bias)


@thorough
@pytest.mark.parametrize("features, out", [(1, 1), (129, 127), (256, 129), (2100, 16)])
def test_every_width(kernels, features, out):
    c, weight, bias = case("plain", features=features, out=out, device=kernels.device)
    check(kernels, c, weight, bias)


@thorough
@pytest.mark.parametrize("sizes", [[1, 1, 1], [128, 64, 64], [7, 150], [40, 0, 24], [16]], ids=str)
def test_slices(kernels, sizes):
    c, weight, bias = case("slices", groups=len(sizes), sizes=sizes, features=64, ranks=True, device=kernels.device)
    check(kernels, c, weight, bias)


@thorough
@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
def test_layouts(kernels, way_of, layout):
    """All operands laid out so, then the weight alone: nothing is copied, what lies between its elements is NaN."""
    way_of("short rows")
    c, weight, bias = case("wo_a", rank=8, features=320, out=72, ranks=[8, 3, 5], layout=layout, device=kernels.device)
    weight = place(weight, layout, kernels.device)
    check(kernels, c, weight, bias, layout)
    c, _, _ = case("wo_a", rank=8, features=320, out=72, device=kernels.device)
    check(kernels, c, weight, place(bias, layout, kernels.device), f"{layout} weight")
    c, weight, _ = case("slices", rank=8, features=320, device=kernels.device)
    check(kernels, c, place(weight, layout, kernels.device), what=f"{layout} slices")


def test_a_float32_bias(kernels):
    """1/3 joins the sum in float32."""
    c, weight, _ = case("plain", features=64, device=kernels.device)
    c.x.zero_()
    bias = torch.full((70,), 1 / 3, device=kernels.device)
    y = kernels.linear(*arguments(c, weight, bias))
    assert_equal(y, bias.to(c.x.dtype).expand_as(y))
    assert_equal(reference.linear(c.x, weight, *c.factors[1:], bias=bias), y)


def test_one_rounding(kernels):
    """256 + 1 + 1/128 lies above the tie: base and delta rounded apart, or h rounded, would give 256."""
    x = torch.tensor([[256.0, 1.0]], device=kernels.device).bfloat16()
    weight = torch.tensor([[1.0, 0.0]], device=kernels.device).bfloat16()
    a = torch.tensor([[[0.0, 1.0]]], device=kernels.device).bfloat16()
    b = torch.tensor([[[1.0078125]]], device=kernels.device).bfloat16()
    ids, one = torch.zeros(1, dtype=torch.int32, device=kernels.device), torch.ones(1, device=kernels.device)
    assert kernels.linear(x, weight, a, b, ids, one).item() == 258.0
    third = torch.full((1,), 1 / 3, device=kernels.device)
    assert kernels.linear(x[:, 1:], weight[:, 1:], a[..., 1:], 3 * b.sign(), ids, third).item() == 1.0


@SLOTS_TOO
@pytest.mark.parametrize("slots", [1, 3])
def test_zero_adapters_change_nothing(kernels, way_of, way, slots):
    """B = 0, scaling 0, rank 0, ids −1: the bits of no LoRA at all, −0.0 of the bias and rows of zeros included."""
    way_of(way)
    for dtype in (torch.bfloat16, torch.float16) if way == "slots" and slots == 3 else (torch.bfloat16,):
        x, weight, a, b, ids, scalings, bias = random_case(kernels.device, dtype, 20, slots, features=140, out=40)
        x, weight = (x * 8).round() / 8, (weight * 8).round() / 8  # sums are exact, as numpy's BLAS adds in any order
        x[5], bias[0, :9] = 0, -0.0
        some, zero = ids.clamp(0), torch.zeros(slots, dtype=torch.int32, device=ids.device)
        parent = kernels.linear(x, weight, a[:, :0], b[..., :0], some, scalings, bias)
        assert_bits(kernels.linear(x, weight, a[:0], b[:0], some * 0 - 1, scalings[:0], bias), parent, "no slots")
        assert_bits(kernels.linear(x, weight, a * NAN, b * NAN, some * 0 - 1, scalings, bias), parent, "ids -1")
        assert_bits(kernels.linear(x, weight, a, b * 0, some, scalings, bias), parent, "B 0")
        assert_bits(kernels.linear(x, weight, a, b, some, scalings * 0, bias), parent, "scaling 0")
        assert_bits(kernels.linear(x, weight, a * NAN, b * NAN, some, scalings, bias, None, zero), parent, "rank 0")
        mixed = kernels.linear(x, weight, a, b, ids, scalings, bias)
        assert_bits(mixed[ids < 0], parent[ids < 0], "rows without an adapter")
        assert not torch.equal(mixed[ids >= 0], parent[ids >= 0])


@SLOTS_TOO
@pytest.mark.parametrize("slots", [1, 3])
def test_rows_beside_a_broken_adapter(kernels, way_of, way, slots):
    """A, B and scaling of NaN and Inf in slot 0: rows of another slot, or of none, never see them, forward or backward."""
    way_of(way)
    c, weight, bias = case("wo_a", slots=slots, ids=[0, -1, 0, slots - 1, -1, 0, -1], features=40, device=kernels.device)
    c.grad_y.clamp_(-4, 4)
    want, dx = want_linear(c, weight, bias), want_grads(c, weight, bias)[0]
    c.a[0], c.b[0], c.scalings[0] = NAN, float("inf"), NAN
    whole = c.ids != 0
    got = kernels.linear(*arguments(c, weight, bias))
    assert_bits(got[whole], want[whole])
    assert not got[~whole].isfinite().any()
    tail = (c.ids, c.scalings, bias, None, None, None, [True] + [False] * 4)
    assert_bits(kernels.linear_backward(c.grad_y, c.x, weight, c.a, c.b, *tail)[0][whole], dx[whole])


def test_dx_does_not_start_beside_the_kernel_that_makes_its_plan(kernels, monkeypatch):
    """Tiles are looked up in the plan before the kernel ahead is waited for: rows were lost where that was the plan's own."""
    op = importlib.import_module("grouped_lora_ops.ops.linear")
    pdl, product = [], op._base_and_delta

    def seen(*arguments):
        pdl.append(arguments[-1].pdl)
        product(*arguments[:-1], replace(arguments[-1], pdl=kernels.device == "cuda" and pdl[-1]))

    monkeypatch.setattr(op, "_base_and_delta", seen)
    monkeypatch.setattr(launch_linear, "linear", lambda p, *_: replace(WAYS["sorted"](p), pdl=True))
    c, weight, bias = case("plain", ids=[0, -1, 0, 2, -1, 0, 1], slots=3, features=40, device=kernels.device)
    for plan in (None, gl.plan(c.ids, 3)):
        tail = (c.ids, c.scalings, bias, None, None, plan, [True] + [False] * 4)
        dx = kernels.linear_backward(c.grad_y, c.x, weight, c.a, c.b, *tail)[0]
        assert_equal(dx, want_grads(c, weight, bias)[0])
    assert pdl == [False, True]


@thorough
@SLOTS_TOO
def test_ids_out_of_range_count_as_none(kernels, way_of, way):
    way_of(way)
    for slots in (1, 3):
        ids = [0, slots, -2, 2**31 - 1, -(2**31), 0, 10**6]
        c, weight, _ = case("plain", slots=slots, ids=ids, features=64, device=kernels.device)
        check(kernels, c, weight)


def test_a_plan_that_is_not_one_never_leads_out_of_bounds(kernels, way_of):
    """The result is unspecified; no address outside the operands is touched (the interpreter would fail)."""
    c, weight, _ = case("plain", tokens=20, features=64, ids=[0, 1] * 10, device=kernels.device)
    for way, wrong in itertools.product(("plan", "sorted"), (2**31 - 1, -(2**31), 1000, -7)):
        way_of(way)
        plan = torch.full((20 + 3 + 2,), wrong, dtype=torch.int32, device=kernels.device)
        kernels.linear(*arguments(c, weight, plan=plan))
        plan[20:] = torch.tensor([0, 7, 20, 20, 20], dtype=torch.int32)
        kernels.linear(*arguments(c, weight, plan=plan))


@thorough
def test_one_plan_serves_every_layout(kernels, way_of):
    plan = None
    for form, way in (("plain", "plan"), ("wo_a", "sorted"), ("slices", "plan")):
        way_of(way)
        c, weight, _ = case(form, tokens=20, features=40, ids=[2, 0, -1, 1, 2] * 4, device=kernels.device)
        plan = kernels.plan(c.ids, 3) if plan is None else plan
        assert_equal(kernels.linear(*arguments(c, weight, plan=plan)), want_linear(c, weight), form)


@thorough
@pytest.mark.parametrize("slots", [100, 1024])
def test_many_slots(kernels, way_of, slots):
    for way in ("short rows", "slots"):
        way_of(way)
        ids = [0, slots - 1, slots // 2, -1, 0, 7, slots - 1]
        c, weight, _ = case("plain", slots=slots, ids=ids, features=40, device=kernels.device)
        check(kernels, c, weight, what=way)


@pytest.mark.parametrize(
    "sizes", [dict(rank=0), dict(features=0), dict(out=0), dict(slots=0, ids=[-1] * 7), dict(groups=0), dict(tokens=0)], ids=str
)
def test_empty_sizes(kernels, sizes):
    c, weight, bias = case("wo_a", device=kernels.device, poison=False, **{"features": 40, **sizes})
    check(kernels, c, weight, bias)
    assert_equal(torch.ops.grouped_lora.linear(*arguments(c, weight, bias)), want_linear(c, weight, bias))
    grads = kernels.linear_backward(c.grad_y, c.x, weight, c.a, c.b, c.ids, c.scalings, bias, None, None, None, [True] * 5)
    for got, want in zip(grads, want_grads(c, weight, bias)):
        assert_equal(got, want)


@thorough
@pytest.mark.parametrize("way", ["rows", "slots"])
@dtypes
def test_no_further_from_float64_than_torch(kernels, way_of, dtype, way):
    """torch's own base, then our delta onto it, is rounded twice; float32 sums of long rows are cut as BLAS cuts them."""
    way_of(way)
    x, weight, a, b, ids, scalings, bias = random_case(kernels.device, dtype, tokens=24, features=900, rank=24)
    wide = [t.double() for t in (x, weight, a, b)]
    exact = reference.linear(*wide, ids, scalings, bias=bias.double())
    base = torch.einsum("tgd,gnd->tgn", x, weight) + bias
    torch_error = (reference.delta(x, a, b, ids, scalings, base=base).double() - exact).abs()
    error = (kernels.linear(x, weight, a, b, ids, scalings, bias).double() - exact).abs()
    # the largest of some thousand errors is a matter of the machine's BLAS: 1.02 on one, 0.45 on another
    assert error.mean() <= torch_error.mean() and error.max() <= 1.1 * torch_error.max()


def test_a_second_run_has_the_same_bits(kernels):
    args = random_case(kernels.device)
    assert_bits(kernels.linear(*args), kernels.linear(*args))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the interpreter stands in for one")
@pytest.mark.parametrize("form", ["plain", "slices"])
def test_a_repeated_call_reads_and_writes_its_own_tensors(monkeypatch, form):
    """The second call with such shapes repeats the first one's two launches, on its own operands, h and result."""
    pytest.importorskip("triton")
    gpu = fake_gpu.install(monkeypatch, "ctypes")
    run = importlib.import_module("grouped_lora_ops.ops.linear")._cuda
    for seed in (0, 1):
        c, weight, bias = case(form, tokens=5, features=64, ranks=True, seed=seed)
        weight += seed
        assert_equal(run(*arguments(c, weight, bias)), want_linear(c, weight, bias))
        assert len(gpu.launches) == 2 * seed
    assert len(run.table) == 1


# --- gradients ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *[pytest.param(t, marks=thorough) for t in (torch.float16, torch.float32)]], ids=str)
def test_exact_gradients(kernels, form, dtype):
    c, weight, bias = case(form, dtype, features=150, ranks=True, device=kernels.device)
    c.grad_y.clamp_(-4, 4)
    tail = (c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, [True] * 5)
    want = want_grads(c, weight, bias)
    for name, got, w in zip("xwabc", kernels.linear_backward(c.grad_y, c.x, weight, c.a, c.b, *tail), want):
        assert_equal(got, w, name)
    for name, got, w in zip("xwabc", reference.linear_backward(c.grad_y, c.x, weight, c.a, c.b, *tail), want):
        assert_equal(got, w, f"reference {name}")


@pytest.mark.parametrize("way", ["slots", pytest.param("plan", marks=thorough)])
def test_exact_gradients_in_other_ways(kernels, way_of, way):
    way_of(way)
    for form, layout in (("wo_a", "dense"), ("slices", "transposed")):
        c, weight, bias = case(form, tokens=40, features=72, rank=40, layout={"grad_y": layout, "x": layout}, device=kernels.device)
        c.grad_y.clamp_(-4, 4)
        tail = (c.ids, c.scalings, bias, c.out_sizes, None, None, [True, False, False, False, False])
        grads = kernels.linear_backward(c.grad_y, c.x, place(weight, layout, kernels.device), c.a, c.b, *tail)
        assert_equal(grads[0], want_grads(c, weight, bias)[0], form)
        assert all(g.numel() == 0 for g in grads[1:])


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    c, weight, bias = case(form, torch.float64, tokens=5, features=6, out=5, rank=3, ranks=True, sizes=[2, 3], poison=False)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(t.shape, generator=generator, dtype=torch.float64).requires_grad_() for t in leaves_of(c, weight, bias)]
    assert torch.autograd.gradcheck(lambda *t: call(t, c), leaves)


def test_gradients_only_where_asked_for():
    """A frozen weight (the default) gets none, and what is asked for does not depend on the rest."""
    c, weight, bias = case("wo_a", torch.float32, features=20, poison=False)
    everything = leaves_of(c, weight, bias)
    call(everything, c).sum().backward()
    for wanted in ([0], [2, 3], [0, 2, 3], [1], [4], [0, 1, 2, 3, 4]):
        leaves = [t.requires_grad_(i in wanted) for i, t in enumerate(leaves_of(c, weight, bias))]
        y = call(leaves, c)
        assert "grouped_lora" in y.grad_fn.name() or "Generated" in y.grad_fn.name()
        y.sum().backward()
        for i, (leaf, full) in enumerate(zip(leaves, everything)):
            assert torch.equal(leaf.grad, full.grad) if i in wanted else leaf.grad is None
    assert not call([t.detach() for t in everything], c).requires_grad


@pytest.mark.parametrize("ids", [[], [-1] * 7], ids=["no rows", "no adapter"])
def test_empty_batches_stay_connected(ids):
    c, weight, bias = case("wo_a", tokens=len(ids), ids=ids, features=20)
    c.a.fill_(NAN)
    leaves = leaves_of(c, weight, bias)
    y = call(leaves, c)
    y.sum().backward()
    assert y.isfinite().all()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all()
    assert not leaves[2].grad.any() and not leaves[3].grad.any()


def test_second_derivatives_raise():
    c, weight, bias = case("plain", torch.float32, features=20, poison=False)
    leaves = leaves_of(c, weight, bias)
    (dx,) = torch.autograd.grad(call(leaves, c).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_lora.linear: second derivatives are not supported"):
        dx.sum().backward()


@pytest.mark.parametrize("form", ["plain", "wo_a", "slices"])
def test_opcheck(form):
    c, weight, bias = case(form, torch.float32, features=12, ranks=True, poison=False)
    op = torch.ops.grouped_lora.linear
    x, weight, a, b, bias = leaves_of(c, weight, bias)
    for plan, given in ((None, bias), (torch.ops.grouped_lora.plan(c.ids, 3), None)):
        torch.library.opcheck(op, (x, weight, a, b, c.ids, c.scalings, given, c.out_sizes, c.ranks, plan))
    torch.library.opcheck(op, (x, weight.detach(), a, b, c.ids * 0 - 1, c.scalings, None, c.out_sizes))


def test_compile_traces_whole_and_once_for_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    c, weight, bias = case("wo_a", torch.float32, tokens=65, features=20, poison=False)

    def step(x, a, b, ids, weight, bias):
        return torch.ops.grouped_lora.linear(x * 2, weight, a, b, ids, c.scalings, bias).square().sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (17, 2, 3, 64, 65):
        grads = []
        for run in (step, compiled):
            x, w, a, b, k = leaves_of(c, weight, bias)
            run(x[:tokens], a, b, c.ids[:tokens], w, k).backward()
            grads.append([t.grad for t in (x, w, a, b, k)])
        assert all(torch.equal(u, v) for u, v in zip(*grads))
    assert counter.frame_count == 1


def test_autocast():
    c, weight, bias = case("wo_a", torch.float32, features=20, poison=False)
    leaves = leaves_of(c, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(leaves, c)
    x, w, a, b = (t.detach().bfloat16() for t in leaves[:4])
    assert_equal(y.detach(), torch.ops.grouped_lora.linear(x, w, a, b, c.ids, c.scalings, bias))
    y.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)
    again = leaves_of(c, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):  # the backward's float32 products are not narrowed either
        call(again, c).float().sum().backward()
    assert all(torch.equal(t.grad, u.grad) for t, u in zip(leaves, again))


# --- bad input ---

T, G, D, N, R, L = 8, 2, 40, 24, 4, 3


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


SENTENCES = [
    (dict(weight=zeros(G, N, 39)), "weight must be [2, 24, 40] to match x [8, 2, 40] and lora_b [3, 2, 24, 4]; got [2, 24, 39]."),
    (dict(weight=zeros(G * N, D)), "weight must be [2, 24, 40] to match x [8, 2, 40] and lora_b [3, 2, 24, 4]; got [48, 40]."),
    (dict(weight=zeros(G, D, N)), "weight must be [2, 24, 40] to match x [8, 2, 40] and lora_b [3, 2, 24, 4]; got [2, 40, 24]."),
    (dict(weight=zeros(G, N, D).half()), "weight must be float32 like x; got float16."),
    (dict(bias=zeros(N)), "bias must be [2, 24] to match x [8, 2, 40] and lora_b [3, 2, 24, 4]; got [24]."),
    (dict(bias=zeros(G, N).half()), "bias must be float32 like x, or float32; got float16."),
    (dict(lora_b=zeros(L, G, N, 5)), "lora_b must be [L, 2, N, 4] to match x [8, 2, 40] = [T, G, D]; got [3, 2, 24, 5]."),
    (dict(adapter_ids=zeros(7).long()), "adapter_ids must be [8] to match x [8, 2, 40]; got [7]."),
    (dict(adapter_ids=torch.full((T,), L)), "adapter_ids must be -1 (no adapter) or a slot 0 … 2; got 3."),
    (dict(scalings=torch.ones(2)), "scalings must be [3] to match lora_a [3, 4, 40]; got [2]."),
    (
        dict(plan=torch.zeros(12).int()),
        "plan must be [13] = T + L + 2 for T = 8 rows and L = 3 slots, from grouped_lora.plan; got [12].",
    ),
    (
        dict(out_sizes=[16, 8], lora_b=zeros(L, 24, R)),
        "weight must be [24, 40] to match x [8, 2, 40] and lora_b [3, 24, 4]; got [2, 24, 40].",
    ),
    (dict(weight=zeros(G, N, D).to("meta")), "weight must be on cpu like x; got meta."),
]


def given(**changes):
    args = dict(x=zeros(T, G, D), weight=zeros(G, N, D), lora_a=zeros(L, R, D), lora_b=zeros(L, G, N, R))
    return {**args, "adapter_ids": zeros(T).long(), "scalings": torch.ones(L), **changes}


@pytest.mark.parametrize("changes, sentence", SENTENCES, ids=[s[:44] for _, s in SENTENCES])
def test_sentences(kernels, changes, sentence):
    import grouped_lora_ops

    with pytest.raises(ValueError) as error:
        grouped_lora_ops.linear(**given(**changes))
    assert str(error.value) == f"grouped_lora.linear: {sentence}"
    if "slot 0" not in sentence and "meta" not in sentence:
        with pytest.raises(ValueError) as error:
            kernels.linear(**{n: t.to(kernels.device) if torch.is_tensor(t) else t for n, t in given(**changes).items()})
        assert str(error.value) == f"grouped_lora.linear: {sentence}"


@pytest.mark.parametrize("name", ["weight", "bias", "out_sizes"])
def test_wrong_types(name):
    import grouped_lora_ops

    must = {"weight": "a torch.Tensor", "bias": "a torch.Tensor or None", "out_sizes": "a list of int or None"}[name]
    with pytest.raises(TypeError) as error:
        grouped_lora_ops.linear(**given(**{name: 3}))
    assert str(error.value) == f"grouped_lora.linear: {name} must be {must}; got int."


# --- the launch choice and the compiled kernels ---


def problems(count):
    draw = random.Random(0)
    for _ in range(count):
        yield launch.Problem(
            arch=draw.choice(["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_123"]),
            sms=draw.choice([1, 20, 132, 148]),
            itemsize=draw.choice([2, 4]),
            tokens=int(2 ** draw.uniform(0, 18)),
            groups=draw.choice([1, 2, 8]),
            in_features=draw.choice([1, 100, 4096, 18432]),
            out_features=draw.choice([1, 127, 1024, 4096]),
            rank=draw.choice([0, 1, 16, 64, 512]),
            slots=draw.choice([0, 1, 2, 8, 64, 1024]),
        )


def test_every_problem_gets_a_configuration():
    """It fits into shared memory, covers the rows, and cuts the sum over r by r alone."""
    for p in problems(2000):
        for transposed, fp16 in ((False, False), (True, False), (False, True)):
            c = launch_linear.linear(p, transposed, fp16 and p.itemsize == 2)
            assert c.num_stages * (c.block_m + c.block_n) * c.block_k * p.itemsize <= launch_linear.shared_memory(p.arch)
            assert p.itemsize == 2 or c.block_k == launch_linear.FLOAT32_PIECE
            assert c.rank_block == launch_linear.rank_block(max(p.rank, 1), p.itemsize)
            assert (c.shrink is None) == (0 in (p.rank, p.slots))
            assert c.mode != launch.SINGLE or p.slots == 1
            assert c.mode in (*MIXED, launch.SINGLE) or c.tiles == launch.tile_count(c.block_m, p.tokens, p.slots, False)
            assert c.mode not in (*MIXED, launch.SINGLE) or (c.tiles - 1) * c.block_m < p.tokens <= c.tiles * c.block_m
            assert c.mode == ROWS or c.shrink is not None
            assert c.mode != SORTED or p.tokens > launch.SCAN_TOKENS


def test_a_weight_stream_keeps_the_memory_busy():
    """T ≤ 64 on 132 multiprocessors: nearly each has a program, with 32 KB of W or more under way."""
    for groups, out in ((4, 1024), (8, 1024), (1, 4096)):
        for tokens in (1, 8, 64):
            c = launch_linear.linear(launch.Problem("sm_90", 132, 2, tokens, groups, 4096, out, 16, 8))
            programs = groups * launch.cdiv(out, c.block_n)
            assert c.mode == ROWS and c.tiles == 1 and programs >= 0.9 * 132
            assert (c.num_stages - 1) * c.block_n * c.block_k * 2 >= 32 * 1024


# Bytes of stack on sm_90, where there are none up to Triton 3.8: (dtype, BLOCK_M, BLOCK_N, W_VEC); W_VEC 16 is an e4m3 weight.
SPILLS_FROM_TRITON_3_9 = {("*fp16", 128, 128, 16): 8}


@pytest.mark.parametrize("arch, sms, how", [("sm_90", 132, "all"), ("sm_120", 170, "quick"), ("sm_80", 108, "thorough")])
def test_they_compile_without_spills(arch, sms, how, tmp_path, request):
    """… within shared memory, with 16-byte loads of x, W and h (the few of less are ids, and ranks for each piece of r), stores alike."""
    pytest.importorskip("triton.backends.nvidia")
    if request.config.getoption("--thorough"):
        how = "thorough"
    elif how == "thorough":
        pytest.skip("thorough: only with --thorough")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT))
    command = [sys.executable, str(ROOT / "tests/compile_linear.py"), arch, str(sms), how]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    every = [json.loads(line) for line in run.stdout.splitlines()]
    others = ("shrink_kernel", "halves_kernel", "dequantize_kernel")
    shrinks, halves, dequantized = ([k for k in every if k["kernel"] == kernel] for kernel in others)
    lines = [k for k in every if k["kernel"] not in others]
    assert len(lines) >= {"quick": 6, "all": 20, "thorough": 29}[how]
    assert len(halves) == len(shrinks) == (4 if arch == "sm_90" else 0)
    for k in shrinks:
        assert k["constants"]["HALVES"] and k["stack"] == 0 and k["narrow stores"] == 0 and k["wide"] > 0, k
    for k in halves:  # 4 warps; nothing of the kernel ahead is touched before it has ended
        assert k["stack"] == 0 and k["registers"] <= 64 and k["launch_pdl"] and k["before wait"] == 0, k
        assert k["wide"] > 0 and k["narrow"] == 0 and k["narrow stores"] == 0, k
    assert len(dequantized) == 8
    for k in dequantized:
        assert k["stack"] == 0 and k["registers"] <= (64 if arch == "sm_90" else 128), k
        assert k["wide stores"] > 0 and k["narrow stores"] == 0 and k["narrow"] == 0, k
    assert any(k["constants"]["ONE_SCALE"] for k in lines)
    assert how == "quick" or {k["constants"]["ONE_SCALE"] for k in lines if k["scales"] == "*u8"} == {False, True}
    newer = tuple(map(int, pytest.importorskip("triton").__version__.split(".")[:2])) >= (3, 9)
    spills = SPILLS_FROM_TRITON_3_9 if newer and arch == "sm_90" else {}
    for k in lines:
        assert k["shared"] <= launch_linear.shared_memory(arch), k
        tile = (k["dtype"], *(k["constants"][name] for name in ("BLOCK_M", "BLOCK_N", "W_VEC")))
        assert k["stack"] <= spills.get(tile, 0 if arch == "sm_90" else 64), k
        slack = 100 if arch == "sm_80" and k["constants"]["W_VEC"] == 16 else 0  # e4m3 as bytes, converted before the mma
        assert k["wide"] > 0 and k["narrow stores"] == 0 and k["narrow"] <= (12 + slack) * k["constants"]["R_BLOCKS"], k
        assert k["launch_pdl"] == (arch != "sm_80"), k
        # an mma that takes columns in another order than a wgmma would give a row other bits in a tile of another height
        free = k["dtype"] == "*fp32" or (arch == "sm_80" and k["scales"] != "*u8")  # e8m0: W has the order of a weight in bf16 everywhere
        assert free or k["k widths"] in ([], ["2"]), k
