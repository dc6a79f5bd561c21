"""expert_delta and expert_linear on the CPU: exact on small integers, gradients against autograd through single rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cases import place
from expert_cases import (
    DTYPES,
    FACTORS,
    WEIGHTS,
    Routes,
    assert_bits,
    assert_equal,
    build_routes,
    delta_by_route,
    linear_by_route,
    rounded,
)

import grouped_lora_ops as gl

DELTA_GRADS = ("x", "a", "b", "base", "row_weights")
LINEAR_GRADS = ("x", "weight", "a", "b", "bias", "row_weights")
SHAPES = {
    "tokens": dict(),
    "routes": dict(per_route=True),
    "mixed ranks": dict(ranks=[3, 0, 5]),
    "one slot for all": dict(adapter_ids=None),
    "K = 1": dict(top_k=1, tokens=9),
    "E = 1": dict(experts=1),
    "odd rank": dict(rank=7, features=41),
    "all on one expert": dict(ids=torch.full((6, 2), 2)),
    "duplicates": dict(ids=torch.tensor([[1, 1, 1], [0, 0, -1], [3, 1, 3]])),
    "many experts": dict(experts=1024, tokens=5, features=9, out=6, rank=3),
}


def finite(c: Routes) -> Routes:
    """c with zeros where the case holds NaN and Inf that nobody reads; for oracles that multiply them by zero."""
    return replace(c.map(lambda t: t.nan_to_num(0, 0, 0)), scalings=c.scalings.nan_to_num(0))


def compare_delta(c: Routes, base: bool, weighted: bool):
    want = rounded(delta_by_route(finite(c).double(), base, weighted), c.x.dtype)
    assert_equal(c.delta(gl.expert_delta, base, weighted), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factors", FACTORS)
def test_delta_is_exact_on_small_integers(factors, shape):
    kw = SHAPES[shape]
    if factors == "both shared":  # nobody but the factors says how many experts there are
        kw = {**kw, "experts": 1, "ids": torch.tensor([[0, 1, 0], [-1, -1, -1], [0, 0, 0], [1, 0, -1]])}
    for i, dtype in enumerate(DTYPES.values()):
        for base, weighted in itertools.product([True, False], repeat=2):
            compare_delta(build_routes(factors, dtype, seed=i, **kw), base, weighted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factors", FACTORS)
def test_linear_is_exact_on_small_integers(factors, shape):
    for i, dtype in enumerate(DTYPES.values()):
        c = build_routes(factors, dtype, seed=i, weights=WEIGHTS[(i + len(shape)) % 4], **SHAPES[shape])
        c.base.zero_()  # linear has its own base
        for bias, weighted in itertools.product([True, False], repeat=2):
            want = rounded(linear_by_route(finite(c).double(), bias, weighted), dtype)
            assert_equal(c.linear(gl.expert_linear, bias, weighted), want)


@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
@pytest.mark.parametrize("factors", ["per expert", "an A each", "B shared"])
def test_any_strides(factors, layout):
    c = build_routes(factors, torch.bfloat16, ranks=[5, 2, 1])
    moved = c.map(lambda t: place(t, layout) if t.dim() > 1 else place(t[None], "rows")[0])
    moved.ids = torch.full((7, 6), 99)[:, ::2].copy_(c.ids)
    moved.adapter_ids = torch.full((14,), 99)[::2].copy_(c.adapter_ids)
    assert_bits(moved.delta(gl.expert_delta), c.delta(gl.expert_delta))
    assert_bits(moved.linear(gl.expert_linear), c.linear(gl.expert_linear))
    a, b = c.leaves(LINEAR_GRADS), moved.map(lambda t: t.detach().requires_grad_(), LINEAR_GRADS)
    for case in (a, b):
        case.linear(gl.expert_linear).backward(case.grad_y)
    for name in LINEAR_GRADS:
        assert_equal(getattr(b, name).grad, getattr(a, name).grad, name)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_both_kinds_of_ids(id_dtype):
    c = build_routes()
    want = c.delta(gl.expert_delta)
    c.ids, c.adapter_ids = c.ids.to(id_dtype), c.adapter_ids.to(id_dtype)
    assert_bits(c.delta(gl.expert_delta), want)


def test_halves_of_packed_factors_are_views():
    """B's halves as halves of one packed B, A of gate and up as two slices of one wider buffer: BUGS.md 14."""
    c = build_routes("an A each, B in halves", torch.float32, ranks=[5, 5, 5], poison=False)
    packed = c.b.flatten(2, 3).contiguous()
    assert_bits(replace(c, b=packed).delta(gl.expert_delta), c.delta(gl.expert_delta))
    wide = torch.full((3, 4, 2 * 5 + 3, 40), float("nan"))
    view = wide.as_strided((3, 4, 2, 5, 40), (4 * 13 * 40, 13 * 40, 6 * 40, 40, 1), 40)
    view.copy_(c.a)
    assert_bits(replace(c, a=view).delta(gl.expert_delta), c.delta(gl.expert_delta))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("per_route", [False, True], ids=["tokens", "routes"])
@pytest.mark.parametrize("factors", FACTORS)
def test_gradients_on_small_integers(factors, per_route, dtype):
    """Every sum is exact in float32: each gradient is the float64 one, rounded once."""
    kw = dict(per_route=per_route, features=12, out=8, ranks=[3, 2, 5])
    one = dict(experts=1, ids=torch.tensor([[0, 1, 0], [-1, 0, 0]])) if factors == "both shared" else {}
    for op, names, oracle, more in (
        ("delta", DELTA_GRADS, delta_by_route, one),
        ("linear", LINEAR_GRADS, linear_by_route, dict(weights="halves")),
    ):
        c = build_routes(factors, DTYPES[dtype], **kw, **more)
        ours, exact = c.leaves(names), finite(c).double().leaves(names)
        getattr(ours, op)(getattr(gl, f"expert_{op}")).backward(c.grad_y)
        oracle(exact).backward(exact.grad_y.detach())
        for name in names:
            got = getattr(ours, name).grad
            assert_equal(got, rounded(getattr(exact, name).grad, got.dtype), f"{op} {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["delta", "linear"])
def test_one_rounding(op, dtype):
    """Random numbers, a long D: the error against float64 is that of one rounding and of sums in float32."""
    c = build_routes("an A each", DTYPES[dtype], features=2000, out=32, rank=16, integer=False, poison=False, experts=3)
    big = c.double()
    run, oracle = {"delta": (c.delta(gl.expert_delta), delta_by_route(big)), "linear": (c.linear(gl.expert_linear), linear_by_route(big))}[op]
    size = big.map(torch.abs)
    size.scalings = c.scalings.abs()
    magnitude = {"delta": delta_by_route, "linear": linear_by_route}[op](size)
    unit = torch.finfo(DTYPES[dtype]).eps / 2
    bound = unit * oracle.abs() * (1 + 2**-10) + magnitude * 2**-21 + torch.finfo(DTYPES[dtype]).tiny
    assert ((run.double() - oracle).abs() <= bound).all()


def test_rows_without_a_delta_keep_bases_bits():
    c = build_routes("per expert", torch.bfloat16)
    c.base[::2] = -0.0
    c.base[1::4] = float("nan")
    c.base.view(torch.int16)[3] = 0x7FB1  # a NaN with a payload
    for ids, adapters in ((torch.full_like(c.ids, -1), c.adapter_ids), (c.ids, torch.full_like(c.adapter_ids, -1))):
        c.row_weights.fill_(float("nan"))
        c.ids, c.adapter_ids = ids, adapters
        got = c.delta(gl.expert_delta)
        assert_bits(got, c.base)
        assert got.data_ptr() != c.base.data_ptr()
    c = build_routes("per expert", torch.bfloat16, poison=False)
    c.base[::2] = -0.0
    c.b.zero_()
    assert_bits(c.delta(gl.expert_delta), c.base)


def test_row_weights_multiply_the_delta_alone_and_all_of_linear():
    c = build_routes("per expert", torch.float32, poison=False)
    c.row_weights.zero_()
    assert_equal(c.delta(gl.expert_delta), c.base)
    assert not c.linear(gl.expert_linear).any()


@pytest.mark.parametrize("op", ["delta", "linear"])
def test_float32_row_weights_keep_their_bits(op):
    c = build_routes("per expert", torch.bfloat16, poison=False)
    c.base.zero_(), c.bias.zero_()
    c.row_weights.fill_(1 / 3)
    run = getattr(c, op)
    exact = {"delta": delta_by_route, "linear": linear_by_route}[op](c.double())
    assert_equal(run(getattr(gl, f"expert_{op}")), exact.float().bfloat16())
    c.row_weights = c.row_weights.bfloat16()
    assert not torch.equal(run(getattr(gl, f"expert_{op}")), exact.float().bfloat16())


@pytest.mark.parametrize("op", ["delta", "linear"])
def test_a_shared_factor_is_its_copies(op):
    """BUGS.md 75: values, and the gradient of a shared factor is the sum over experts; its copies never exist."""
    shared = build_routes("both shared", torch.float32, experts=4, ids=torch.tensor([[0, 1, 3], [3, 3, 0], [2, -1, 1]]), poison=False)
    if op == "delta":  # E = 1 where both are shared
        shared = replace(shared, b=shared.b.expand(-1, 4, -1, -1, -1).clone())
    names = ("a", "b")
    copies = shared.map(lambda t: t.expand(-1, 4, *[-1] * (t.dim() - 2)).clone(), names)
    shared, copies = shared.leaves(names), copies.leaves(names)
    for c in (shared, copies):
        y = getattr(c, op)(getattr(gl, f"expert_{op}"))
        y.backward(c.grad_y)
        c.y = y.detach()
    assert_bits(shared.y, copies.y)
    for name in names:
        grad, of_copies = getattr(shared, name).grad, getattr(copies, name).grad
        assert_equal(grad, of_copies.sum(1, keepdim=True) if grad.shape[1] == 1 else of_copies, name)
    assert shared.a.grad.shape[1] == 1


def test_expanded_factors_say_how_many_experts():
    c = build_routes("both shared", torch.float32, experts=4, ids=torch.tensor([[0, 3], [2, -1]]), poison=False)
    got = gl.expert_delta(c.x, c.a, c.b.expand(-1, 4, -1, -1, -1), c.ids, c.adapter_ids, c.scalings)
    assert_equal(got, rounded(delta_by_route(c.double(), False, False), torch.float32))


@pytest.mark.parametrize("op", ["delta", "linear"])
def test_float32_factors_on_a_narrow_base(op):
    """S3: they take part rounded to bf16; their gradients are float32 sums that were never rounded to bf16."""
    wide = build_routes("per expert", torch.bfloat16, lora_dtype=torch.float32, integer=False, poison=False, tokens=30)
    narrow = wide.map(lambda t: t.bfloat16(), ("a", "b"))
    wide, narrow = wide.leaves(("x", "a", "b")), narrow.leaves(("x", "a", "b"))
    for c in (wide, narrow):
        y = getattr(c, op)(getattr(gl, f"expert_{op}"))
        y.backward(c.grad_y)
        c.y = y.detach()
    assert_bits(wide.y, narrow.y)
    assert_equal(wide.x.grad, narrow.x.grad)
    for name in ("a", "b"):
        full, rounded_once = getattr(wide, name).grad, getattr(narrow, name).grad
        assert full.dtype == torch.float32 and not torch.equal(full, full.bfloat16().float())
        assert_equal(full.bfloat16(), rounded_once)


def test_linear_without_lora():
    c = build_routes("per expert", torch.bfloat16)
    base = c.linear(gl.expert_linear, lora=False)
    assert_equal(base, rounded(linear_by_route(finite(c).double(), lora=False), torch.bfloat16))
    bare = gl.expert_linear(c.x, c.weight, None, None, c.ids, None, None, bias=c.bias, row_weights=c.row_weights)
    assert_bits(bare, base)
    c.adapter_ids = torch.full_like(c.adapter_ids, -1)
    assert_bits(c.linear(gl.expert_linear), base)


def test_row_weights_gradient_divides_by_nothing():
    """A weight of 0 has a gradient: the unweighted row against grad_y."""
    for op, names in (("delta", DELTA_GRADS), ("linear", LINEAR_GRADS)):
        c = build_routes("an A each", torch.float32, poison=False)
        c.row_weights.zero_()
        ours, exact = c.leaves(names), c.double().leaves(names)
        getattr(ours, op)(getattr(gl, f"expert_{op}")).backward(c.grad_y)
        {"delta": delta_by_route, "linear": linear_by_route}[op](exact).backward(exact.grad_y.detach())
        assert_equal(ours.row_weights.grad, exact.row_weights.grad.float(), op)
        assert ours.row_weights.grad.any()


def test_base_weights_lie_where_they_lay():
    """S1: no copy, no change of storage, dtype, strides or version by a forward and a backward."""
    for weights in WEIGHTS:
        c = build_routes("per expert", torch.bfloat16, weights=weights, poison=False).leaves(("x", "a", "b"))
        before = (c.weight.data_ptr(), c.weight.stride(), c.weight.dtype, c.weight._version)
        c.linear(gl.expert_linear).backward(c.grad_y)
        assert (c.weight.data_ptr(), c.weight.stride(), c.weight.dtype, c.weight._version) == before
        assert c.weight.grad is None
        assert c.a.grad.any() and c.b.grad.any()
