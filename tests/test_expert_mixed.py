"""Tiles of an expert's routes whatever their slots: the same rows as tiles of one slot give, exactly, and none of a neighbour's."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import DTYPES, NAN, assert_bits, assert_equal
from test_expert_kernels import (
    DEVICE,
    FORMS,
    check_linear,
    check_linear_backward,
    force,
    gradient_case,
    kernels,
    linear_case,
)
from test_expert_mlp_kernels import gradients, layer, run_reference

from grouped_lora_ops import launch_experts, reference
from grouped_lora_ops.launch_experts import EXPERT, PLAN, ExpertProblem
from grouped_lora_ops.ops import common

__all__ = ["force"]
MIXED = "plan whole mixed"
ALL_SLOTS = [0, 2, -1, 1, 0, 2, -1, 1, 1]


def case(dtype=torch.bfloat16, form="whole", **kw):
    """Three slots and rows without one, in tokens next to one another."""
    chosen = {"tokens": 9, "experts": 3, "slots": 3, "features": 72, "out": 24, "ranks": True} | kw
    chosen.setdefault("adapters", (ALL_SLOTS * chosen["tokens"])[: chosen["tokens"]] if chosen["slots"] == 3 else True)
    return linear_case(dtype, form, **chosen)


def tiles_of(height, mixed, config, p, transposed=False):
    return launch_experts.linear_with(p, height, mixed and p.mixed, **config)


@pytest.fixture
def launched(monkeypatch):
    """The modes of the products launched."""
    modes = []
    for name in ("expert_linear", "expert_gate_up"):
        module = importlib.import_module(f"grouped_lora_ops.kernels.{name}")

        def record(op, kernel, grid, args, constants, *how, launch=module.launch):
            modes.append(dict(zip(kernel.arg_names, (*args, *constants)))["MODE"])
            launch(op, kernel, grid, args, constants, *how)

        monkeypatch.setattr(module, "launch", record)
    return modes


@pytest.mark.parametrize("dtype, form", [*zip(DTYPES.values(), FORMS), *zip(DTYPES.values(), FORMS[1:])], ids=str)
def test_exact(force, launched, dtype, form):
    force(MIXED)
    check_linear(case(dtype, form, weights=True, bias=True, per_route=form == "whole"))
    assert launched == [EXPERT]


@pytest.mark.parametrize("shared", ["a", "b"])
def test_shared_factors_and_h_in_chunks(force, shared):
    """With A shared h has a row for each token; the shrink cut over D leaves it in pieces."""
    force("plan split mixed")
    check_linear(case(form="an A each", shared=shared, features=300), shared)


@pytest.mark.parametrize("dtype, rank", [(torch.bfloat16, 1), (torch.float16, 130), (torch.float32, 40)], ids=str)
def test_ranks(force, dtype, rank):
    force(MIXED)
    check_linear(case(dtype, rank=rank))


@pytest.mark.parametrize("layout", ["odd", "transposed"])
def test_layouts(force, layout):
    force(MIXED)
    check_linear(case(rank=8, out=40, layout=layout, bias=True))


ROUTINGS = {
    "one expert has all": ([[1]] * 40, 3),
    "whole tiles": ([[0]] * 16 + [[2]] * 16 + [[3]] * 16, 4),
    "one more than a tile": ([[0]] * 17 + [[1]] * 15 + [[4]], 5),
    "masked ones": ([[0], [-1], [2], [3], [-1]] * 8, 3),
    "all masked": ([[-1]] * 40, 2),
    "out of range": ([[0], [2**31 - 1], [-(2**31)], [1]] * 6, 2),
    "many experts": ([[e % 9] for e in range(18)], 14),
}


@pytest.mark.parametrize("ids, experts", ROUTINGS.values(), ids=ROUTINGS)
def test_every_route_has_one_tile(force, ids, experts):
    force(MIXED)
    check_linear(case(tokens=len(ids), top_k=1, ids=ids, experts=experts, features=16, out=8, rank=3))


def test_tiles_of_every_height_and_block(force, monkeypatch):
    force(MIXED)
    c = case(tokens=36, top_k=1, experts=2, features=40, out=40)
    for height, more in ((32, dict(block_n=64, prefetch=True)), (64, dict(n_first=False, slot_stages=3)), (128, {})):
        config = dict(block_n=32, block_k=32) | more
        monkeypatch.setattr(launch_experts, "linear", partial(tiles_of, height, True, config))
        common.configured.cache_clear()
        check_linear(c, f"{height}")


def test_the_plan_may_be_given_and_slots_be_one_or_unnamed(force, launched):
    """Slot 0 for every route where adapters have no names, one slot for all, as the plan's tiles give."""
    force(MIXED)
    c = case()
    check_linear(c, plan=reference.expert_plan(c.ids.cpu(), c.adapters.cpu(), 3, 3).to(DEVICE))
    check_linear(case(adapters=False), "no names")
    check_linear(case(slots=1), "one slot")
    check_linear(case(), "no LoRA", lora=False)
    assert launched == [EXPERT] * 4


def test_a_damaged_plan_never_leads_out_of_bounds(force):
    """The result is unspecified; no address outside the operands is touched (the interpreter would fail)."""
    force(MIXED)
    c = case(tokens=10, features=16, out=8)
    plan = reference.expert_plan(c.ids.cpu(), c.adapters.cpu(), 3, 3).to(DEVICE)
    broken = [plan.clone() for _ in range(4)]
    for t, part, damage in zip(broken, (slice(20, 23), slice(20, 23), slice(0, 20)), (2**31 - 1, -(2**31), 2**31 - 1)):
        t[part] = damage
    broken[3][20:23], broken[3][:20] = plan[20:23].flip(0), -1
    for t in broken:
        y = kernels("linear")(c.x, c.w, *c.args()[1:], None, None, c.ranks, t)
        assert y.shape == (20, 8)
    d = layer(tokens=10, experts=3, hidden=24, inner=8)
    plan = reference.expert_plan(d.topk_ids.cpu(), d.adapter_ids.cpu(), 3, 2).to(DEVICE)
    plan[20:23] = 2**30
    kernels("mlp")(*replace(d, plan=plan).args())


def test_rows_beside_a_broken_adapter(force):
    """A, B and scaling of NaN and Inf in slot 0: rows of another slot, or of none, keep their bits, forward and backward."""
    force(MIXED)
    c = gradient_case(base=False, tokens=9, top_k=1, experts=1, slots=3, ids=[[0]] * 9, features=16, out=8)
    c.adapters = torch.tensor(ALL_SLOTS, device=DEVICE)
    c.a, c.b = (torch.where(t.isnan(), 0, t) for t in (c.a, c.b))
    c.scalings = torch.ones_like(c.scalings)
    needs = [True] + [False] * 5
    tail = (*c.args()[3:], None, None, None, None)
    y, dx = kernels("linear")(c.x, c.w, c.a, c.b, *tail), kernels("linear_backward")(c.grad, c.x, c.w, c.a, c.b, *tail, needs)[0]
    c.a[0], c.b[0], c.scalings[0] = NAN, float("inf"), NAN
    whole = c.adapters != 0
    got = kernels("linear")(c.x, c.w, c.a, c.b, *tail)
    assert_bits(got[whole], y[whole])
    assert not got[~whole].isfinite().any()
    assert_bits(kernels("linear_backward")(c.grad, c.x, c.w, c.a, c.b, *tail, needs)[0][whole], dx[whole])
    d = layer(tokens=9, top_k=1, experts=1, ids=[[0]] * 9, hidden=16, inner=8, poison=False)
    d.adapter_ids = c.adapters.clamp(max=1)
    y = kernels("mlp")(*d.args())
    d.gate_up_a[0], d.gate_up_b[0], d.down_b[0] = NAN, float("inf"), NAN
    assert_bits(kernels("mlp")(*d.args())[d.adapter_ids != 0], y[d.adapter_ids != 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_other_tiles(force, dtype):
    """A row of an expert's tile, of a slot's and of its own program; without an adapter and with B = 0 those of the parent."""
    c = case(dtype, poison=False, bias=True, weights=True, tokens=4, experts=2)
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(-9, 10, t.shape, generator=generator) / 8 for t in (c.x, c.w)]  # numpy's BLAS adds in any order
    c.x, c.w = (t.to(DEVICE, dtype) for t in numbers)

    def run(a, b, adapters):
        return kernels("linear")(c.x, c.w, a, b, c.ids, adapters, c.scalings, c.bias, c.weights, None, None)

    want, parent = run(c.a, c.b, c.adapters), run(None, None, None)
    force("plan whole")
    assert_bits(run(c.a, c.b, c.adapters), want)
    force(MIXED)
    got = run(c.a, c.b, c.adapters)
    assert_bits(got, want)
    none = (c.adapters < 0).repeat_interleave(2)
    assert_bits(got[none], parent[none], "rows without an adapter")
    assert_bits(run(c.a, c.b * 0, c.adapters), parent, "B = 0")
    assert not torch.equal(want[~none], parent[~none]) and none.any()


@pytest.mark.parametrize("router_weight", ["input", "pre_down"])
def test_a_layer_is_exact(force, launched, router_weight):
    force(MIXED)
    dtype = torch.float32 if router_weight == "input" else torch.bfloat16
    c = layer(dtype, "relu2", router_weight, integers=True, tokens=7, top_k=3, experts=2, hidden=24, inner=12, rank=4, poison=False)
    assert_equal(kernels("mlp")(*c.args()), run_reference(c)[0])
    assert launched == [EXPERT] * 2


def test_a_layers_bits(force):
    """gate and up in one program, h1 kept or not, in an expert's tiles and in a slot's; also x's gradient."""
    c = layer(tokens=4, experts=2, hidden=24, inner=16, shared="gate_up_a down_b", limit=0.6)
    for t in (c.x, c.w_gate_up, c.w_down, c.grad):  # numpy's BLAS adds in any order
        t.copy_((t * 8).round() / 8)
    found = []
    for how in (MIXED, "plan whole"):
        force(how)
        y, h1, *kept = kernels("mlp_train")(*c.args())
        if how == MIXED:
            assert_bits(kernels("mlp")(*c.args()), y)
        found.append((y, h1, gradients(c, h1, [True] + [False] * 9, kept)[0]))
    for name, one, other in zip(("y", "h1", "dx"), *found):
        assert_bits(one, other, name)


@pytest.mark.parametrize("form", FORMS[1:])
def test_gradients(force, launched, form):
    force(MIXED)
    dtype = torch.float32 if form == "halves of B" else torch.bfloat16
    c = gradient_case(dtype, form, base=False, tokens=6, experts=2, slots=3, features=24, out=16, ranks=True, weights=form != FORMS[1])
    check_linear_backward(c, needs=[True, False, False, False, False, form != FORMS[1]])
    assert set(launched) == {EXPERT}


# --- the choice ---


def problem(tokens, slots=4, rank=16, experts=128, groups=2, mixed=True, features=2048, **kw):
    return ExpertProblem("sm_90", 132, 2, 8 * tokens, experts, slots, groups, groups, features, 768, rank, mixed, **kw)


def test_w_is_read_once_for_several_adapters():
    """Until the runs of each adapter are long."""
    for tokens in (17, 64, 256, 1024):
        for rank in (0, 16, 64, 128):
            for slots in (2, 4, 64):
                p = problem(tokens, slots, rank)
                for c in (launch_experts.linear(p), launch_experts.linear(p, True), launch_experts.gate_up(p)):
                    assert c.mode == EXPERT and c.tiles == 128 + launch_experts.cdiv(8 * tokens, c.block_m), p
                    assert c.block_e == 256
    for p in (problem(64, 1, mixed=False), problem(1024, mixed=False), problem(32768), problem(32768, 2, 64)):
        assert launch_experts.gate_up(p).mode == launch_experts.linear(p).mode == PLAN, p


def test_who_names_no_adapter_has_tiles_of_slots(monkeypatch, launched):
    """adapter_ids None and one slot: nothing meets in a tile, so that no program asks."""
    monkeypatch.setattr(launch_experts, "ROUTE_LIMIT", 0)
    common.configured.cache_clear()
    for kw in (dict(adapters=False), dict(slots=1)):
        check_linear(case(**kw))
    check_linear(case())
    assert launched == [PLAN, PLAN, EXPERT]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_random_rows_have_the_bits_of_other_tiles(monkeypatch, dtype):
    """… of every height, and of a slot's tiles, at sizes that the matrix units see."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    tokens, top_k, experts, slots, rank = 700, 4, 8, 3, 48
    x, w = randn(tokens, 1024), randn(experts, 2, 320, 1024)
    a, b = randn(slots, experts, 2, rank, 1024), randn(slots, experts, 640, rank)
    down, down_a, down_b = randn(experts, 1024, 320), randn(slots, experts, rank, 320), randn(slots, experts, 1024, rank)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator, device="cuda")
    adapters = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda")
    scalings, weights = (torch.rand(n, generator=generator, device="cuda") for n in (slots, tokens * top_k))
    grad, hidden = randn(tokens * top_k, 640), weights.view(tokens, top_k)

    def run():
        common.configured.cache_clear()
        y = kernels("linear")(x, w, a, b, ids, adapters, scalings, None, weights, None, None)
        dx = kernels("linear_backward")(grad, x, w, a, b, ids, adapters, scalings, None, None, None, None, [True] + [False] * 5)[0]
        args = (x, ids, hidden, w, down, a, b, down_a, down_b, adapters, scalings, None, None, "swiglu", None, "post_down", None, None)
        return y, dx, kernels("mlp")(*args)

    want = run()
    tiles = [(16, 32, True), (64, 64, True), (128, 64, True), (16, 64, False), (64, 128, False)]
    for height, columns, mixed in tiles:
        config = dict(block_n=columns, block_k=64, num_warps=8 if height > 16 else 4, num_stages=3)
        for name in ("linear", "gate_up"):
            monkeypatch.setattr(launch_experts, name, partial(tiles_of, height, mixed, config))
        for name, got, other in zip(("y", "dx", "mlp"), run(), want):
            assert_bits(got, other, f"{name} {height} {columns} {mixed}")
