"""`expert_mlp` by our kernels: against the reference, its zero adapters, empty routes and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from cases import NAN, assert_bits, assert_equal, rounded
from conftest import GPU
from test_expert_kernels import DEVICE, force, kernels, two_bf16  # noqa: F401  (fixtures)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from grouped_lora_ops.reference.expert_mlp import expert_mlp_backward, expert_mlp_train
from grouped_lora_ops.reference.expert_plan import expert_plan

PLACEMENTS = ("input", "pre_down", "post_down")
ACTIVATIONS = ("swiglu", "swigluoai", "geglu_tanh", "relu2")
NAMES = ("x", "topk_weights", "w_gate_up", "w_down", "gate_up_a", "gate_up_b", "down_a", "down_b", "b_gate_up", "b_down")
OPTIONS = ("b_gate_up", "b_down", "activation", "activation_limit", "router_weight", "ranks")


@dataclass
class Layer:
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    adapter_ids: Tensor | None
    scalings: Tensor | None
    b_gate_up: Tensor | None
    b_down: Tensor | None
    activation: str
    activation_limit: float | None
    router_weight: str
    ranks: Tensor | None
    plan: Tensor | None
    grad: Tensor

    def args(self):
        return tuple(vars(self).values())[:18]

    def wide(self):
        return replace(self, **{n: t.double() for n, t in vars(self).items() if isinstance(t, Tensor) and t.is_floating_point()})


def layer(
    dtype=torch.bfloat16, activation="swiglu", router_weight="pre_down", *, tokens=3, top_k=2, experts=4, slots=2, hidden=72, inner=40,
    rank=5, bias=True, lora="gate_up down", an_a_each=True, shared="", limit=None, integers=False, ids=None, poison=True, seed=0,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    gated = activation != "relu2"
    wide = 2 * inner if gated else inner

    def make(*shape, bound=1):
        if integers:
            return torch.randint(-bound, bound + 1, shape, generator=generator).to(DEVICE, dtype)
        return (0.4 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)

    def experts_of(name):
        return 1 if name in shared else experts

    each = (2,) if an_a_each and gated else ()
    ids_t = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator) if ids is None else torch.tensor(ids)
    weights = torch.tensor([0.5, 1.0, -2.0]).repeat(tokens * top_k)[: tokens * top_k].view(tokens, top_k)
    weights = weights if integers else torch.rand(tokens, top_k, generator=generator)
    adapters = torch.randint(-1, slots, (tokens,), generator=generator)
    made = Layer(
        x=make(tokens, hidden, bound=2),
        topk_ids=ids_t.to(DEVICE, torch.int32),
        topk_weights=weights.to(DEVICE),
        w_gate_up=make(experts, wide, hidden),
        w_down=make(experts, hidden, inner),
        gate_up_a=make(slots, experts_of("gate_up_a"), *each, rank, hidden) if "gate_up" in lora else None,
        gate_up_b=make(slots, experts_of("gate_up_b"), wide, rank) if "gate_up" in lora else None,
        down_a=make(slots, experts_of("down_a"), rank, inner) if "down" in lora.split() else None,
        down_b=make(slots, experts_of("down_b"), hidden, rank) if "down" in lora.split() else None,
        adapter_ids=adapters.to(DEVICE) if lora else None,
        scalings=torch.tensor([1.0, 0.5][:slots]).to(DEVICE) if lora else None,
        b_gate_up=make(experts, wide, bound=3) if bias else None,
        b_down=make(experts, hidden, bound=3) if bias else None,
        activation=activation,
        activation_limit=limit,
        router_weight=router_weight,
        ranks=torch.tensor([rank, rank // 2][:slots], dtype=torch.int32, device=DEVICE) if lora else None,
        plan=None,
        grad=make(tokens, hidden),
    )
    if poison:
        live = (made.topk_ids >= 0) & (made.topk_ids < experts)
        made.x[~live.any(1)], made.grad[~live.any(1)] = NAN, NAN
        made.topk_weights[~live] = NAN
        for e in range(experts):
            if e not in ids_t:
                for name in NAMES[2:]:
                    t = getattr(made, name)
                    if t is not None and name not in shared:
                        (t if name[:2] in ("w_", "b_") else t.transpose(0, 1))[e] = NAN
    return made


def run_reference(c: Layer):
    return expert_mlp_train(*c.args()[:11], **dict(zip(OPTIONS, c.args()[11:17])))


def close(got: Tensor, plain: Tensor, exact: Tensor, what) -> None:
    """No further from float64 than a small multiple of the same computation in torch."""
    assert (got.dtype, got.shape) == (plain.dtype, plain.shape), what
    if got.numel():
        error, usual = (float((t.double() - exact).abs().max()) for t in (got, plain))
        assert error <= 3 * usual + 1e-6 * float(exact.abs().max()), (what, error, usual)


def gradients(c: Layer, h1: Tensor | None, needs: list, kept=(None, None, None)):
    return kernels("mlp_backward")(c.grad, h1, *kept, *c.args(), needs)


def check(c: Layer, what=""):
    wide = c.wide()
    plain, exact = run_reference(c), run_reference(wide)
    y, h1, *kept = kernels("mlp_train")(*c.args())
    close(y, plain[0], exact[0], f"y {what}")
    again = kernels("mlp")(*c.args())
    if GPU or y.dtype != torch.float32:  # the interpreter's float32 products sum in an order of their own for every shape
        assert_bits(again, y, f"h1 kept or not {what}")
    close(again, plain[0], exact[0], f"y at once {what}")
    needs = [getattr(c, name) is not None for name in NAMES]
    got = gradients(c, h1, needs, kept)
    plain = expert_mlp_backward(c.grad, plain[1], *c.args(), needs)
    exact = expert_mlp_backward(wide.grad, exact[1], *wide.args(), needs)
    for name, need, g, p, e in zip(NAMES, needs, got, plain, exact):
        if need:
            close(g, p, e, f"{name} {what}")


@pytest.mark.parametrize("activation,router_weight", [*product(ACTIVATIONS, PLACEMENTS)][:: 1 if GPU else 2], ids=str)
def test_close_to_float64(activation, router_weight):
    limit = 0.6 if activation.startswith("swiglu") else None
    check(layer(torch.float32 if activation == "relu2" else torch.bfloat16, activation, router_weight, limit=limit))


@pytest.mark.parametrize("rank", [5, 8])
def test_a_second_run_and_h1_computed_anew_give_the_same_bits(rank):
    c = layer(rank=rank)
    needs = [True] * 10
    _, h1, *kept = kernels("mlp_train")(*c.args())
    for g, again in zip(gradients(c, h1, needs, kept), gradients(c, None, needs)):
        assert_bits(g, again)


def kept_of(x: Tensor, a: Tensor, c: Layer) -> Tensor:
    """scaling · A x of every route, [M, G, r], zeros where it is masked or has no adapter."""
    ids, adapters = c.topk_ids.reshape(-1), c.adapter_ids.repeat_interleave(c.topk_ids.shape[1])
    live = (ids >= 0) & (ids < c.w_down.shape[0]) & (adapters >= 0)
    factors = a if a.dim() == 5 else a[:, :, None]
    h = torch.einsum("mgrd,md->mgr", factors[adapters * live, ids * live], torch.where(live[:, None], x, 0))
    return h * (c.scalings[adapters * live] * live)[:, None, None]


@pytest.mark.parametrize("an_a_each", [True, False])
@pytest.mark.parametrize("router_weight", PLACEMENTS)
def test_what_training_keeps(router_weight, an_a_each):
    """Ranks of whole vectors in bf16: scaling · A x of both projections in two bf16 each, and the plan; the gradients read those."""
    c = layer(rank=8, router_weight=router_weight, an_a_each=an_a_each, integers=True, poison=False)
    for name in ("gate_up_a", "down_a"):
        getattr(c, name).mul_(37)  # h needs more than the 8 bits of one bf16
    x = c.x.repeat_interleave(c.topk_ids.shape[1], 0)
    if router_weight == "input":
        x = (x.float() * c.topk_weights.reshape(-1)[:, None]).bfloat16()
    _, h1, h_gate_up, h_down, plan = kernels("mlp_train")(*c.args())
    assert h_gate_up.shape == (6, 2 if an_a_each else 1, 2, 8) and h_down.shape == (6, 1, 2, 8)
    assert_equal(h_gate_up.float().sum(2), kept_of(x.float(), c.gate_up_a.float(), c))
    assert h_gate_up[:, :, 1].any()
    want = expert_plan(c.topk_ids, c.adapter_ids, 4, 2)
    assert_equal(plan, want)
    needs, kept = [True] * 10, (h_gate_up, h_down, plan)
    given = replace(c, plan=want)
    assert kernels("mlp_train")(*given.args())[4].numel() == 0
    for other in (gradients(given, h1, needs, (h_gate_up, h_down, plan[:0])), gradients(c, h1, needs)):
        for g, again in zip(gradients(c, h1, needs, kept), other):
            assert_bits(g, again)
    nothing = torch.zeros_like(h_gate_up), torch.zeros_like(h_down), plan
    changed = [name for name, g, h in zip(NAMES, gradients(c, h1, needs, nothing), gradients(c, h1, needs, kept)) if not torch.equal(g, h)]
    assert {"gate_up_b", "down_b"} <= set(changed)
    check(layer(rank=8, router_weight=router_weight, an_a_each=an_a_each))


FORMS_OF_A_LAYER = [
    dict(rank=8), dict(rank=8, an_a_each=False), dict(rank=5), dict(rank=8, lora="down"), dict(rank=8, lora=""), dict(rank=8, tokens=0),
    dict(rank=8, shared="gate_up_a down_b"), dict(rank=8, dtype=torch.float32), dict(rank=16, top_k=1, experts=1),
    dict(rank=8, activation="relu2"), dict(rank=8, experts=0, ids=[[-1, 0]] * 3, tokens=3, poison=False), dict(rank=8, plan=True),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS_OF_A_LAYER, ids=str)
def test_a_tracer_sees_the_shapes_of_a_gpu(form):
    """What torch.compile is told that training returns on a GPU, against what it does return."""
    form = dict(form)
    given = form.pop("plan", False)
    c = layer(**form)
    if given:
        c = replace(c, plan=expert_plan(c.topk_ids, c.adapter_ids, 4, 2))
    made = kernels("mlp_train")(*c.args())
    with FakeTensorMode():
        args = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") if isinstance(t, Tensor) else t for t in c.args()]
        told = torch.ops.grouped_lora.expert_mlp_train(*args)
    assert [(t.shape, t.dtype) for t in told] == [(t.shape, t.dtype) for t in made]


def test_master_copies_train_with_what_is_kept():
    c = layer(rank=8)
    plain = gradients(c, None, [True] * 10)
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        setattr(c, name, getattr(c, name).float())
    _, h1, *kept = kernels("mlp_train")(*c.args())
    assert kept[0].dim() == 4
    for name, g, narrow in zip(NAMES, gradients(c, h1, [True] * 10, kept), plain):
        assert g.dtype == getattr(c, name).dtype, name
        assert_bits(g.to(narrow.dtype), narrow, name)


@pytest.mark.parametrize("lora", ["gate_up", "down"])
def test_one_pair_alone(lora):
    check(layer(lora=lora, an_a_each=False, bias=False))


@pytest.mark.parametrize("shared,router_weight", [("gate_up_a down_b", "post_down"), ("gate_up_a down_b", "input"),
                                                  ("gate_up_b down_a", "post_down")])  # fmt: skip
def test_shared_outer_factors(force, shared, router_weight):  # noqa: F811
    force("plan")
    check(layer(shared=shared, router_weight=router_weight))


@pytest.mark.parametrize("router_weight", PLACEMENTS)
def test_exact(force, router_weight):  # noqa: F811
    """relu2 of integers: every sum is exact, so the roundings of the stages leave one right answer, whatever the order."""
    for how, dtype in (("split", torch.float32), ("plan whole", torch.bfloat16)):
        force(how)
        c = layer(dtype, "relu2", router_weight, integers=True, hidden=24, inner=12, rank=4, poison=False, top_k=3)
        if dtype == torch.bfloat16:
            c.x *= 37
            h1 = run_reference(c)[1]
            assert (h1.abs() > 256).any()  # where bf16 rounds integers
        else:
            assert_equal(run_reference(c)[0], rounded(run_reference(c.wide())[0], dtype))
        want = run_reference(c)[0]
        assert_equal(kernels("mlp")(*c.args()), want, f"{how} {dtype}")
        assert_equal(kernels("mlp_train")(*c.args())[0], want, f"h1 kept {how} {dtype}")


CASES = [*product(ACTIVATIONS, PLACEMENTS, (False, True))][:: 1 if GPU else 5]  # all of them on the CPU: test_expert_mlp.py


@pytest.mark.parametrize("activation,router_weight,bias", CASES, ids=str)
def test_zero_adapters_change_no_bit(activation, router_weight, bias):
    """Both pairs None is the parent: B = 0 and adapter −1 give its bits, forward and in x's and the weights' gradients."""
    c = layer(activation=activation, router_weight=router_weight, bias=bias, poison=False, tokens=2, hidden=40, inner=24)
    needs = [True, True, *[False] * 8]
    nothing = dict(gate_up_a=None, gate_up_b=None, down_a=None, down_b=None, adapter_ids=None, scalings=None, ranks=None)
    parent = replace(c, **nothing)
    y, h1, *kept = kernels("mlp_train")(*parent.args())
    dx, dw = gradients(parent, h1, needs, kept)[:2]
    zero = replace(c, gate_up_b=torch.zeros_like(c.gate_up_b), down_b=torch.zeros_like(c.down_b))
    without = replace(c, adapter_ids=torch.full_like(c.adapter_ids, -1))
    for what, other in (("B = 0", zero), ("adapter -1", without)):
        got, hidden, *kept_too = kernels("mlp_train")(*other.args())
        assert_bits(got, y, what)
        grads = gradients(other, hidden, needs, kept_too)
        assert_bits(grads[0], dx, f"dx {what}")
        assert_bits(grads[1], dw, f"d topk_weights {what}")


@pytest.mark.parametrize("router_weight", PLACEMENTS if GPU else PLACEMENTS[:1])
@pytest.mark.parametrize("case", [dict(tokens=0), dict(ids=[[-1, 4]] * 3, tokens=3), dict(top_k=0), dict(experts=0, tokens=2)], ids=str)
def test_empty_routes(case, router_weight):
    """Outputs and gradients are exact zeros of full shape, even where x, the weights and the factors hold NaN."""
    c = layer(router_weight=router_weight, rank=8, **case)
    y, h1, *kept = kernels("mlp_train")(*c.args())
    assert_bits(y, torch.zeros_like(c.x))
    for name, g in zip(NAMES, gradients(c, h1, [True] * 10, kept)):
        assert_bits(g, torch.zeros_like(getattr(c, name)), name)


def test_one_expert_and_several_routes_a_token():
    """Its A is one for all routes of a token, and so is h: nothing of it is kept for the backward."""
    c = layer(rank=8, experts=1, top_k=2, tokens=5, poison=False, ids=[[0, -1], [1, 0], [0, 1], [-1, -1], [0, -1]])
    assert kernels("mlp_train")(*c.args())[2].numel() == 0
    check(c)


def test_some_experts_are_empty():
    for ids in ([[1, 2]] * 3, [[3, 3], [9, 3], [-7, 2**31 - 1]]):  # out of range counts as masked
        check(layer(ids=ids), str(ids))


def test_a_weight_of_more_bits_than_bf16_keeps_them():
    """float32 router weights: 1/3 takes part in float32, not as bf16's 0.33398."""
    c = layer(router_weight="post_down", poison=False, lora="", bias=False)
    c.topk_weights.fill_(1 / 3)
    close(kernels("mlp")(*c.args()), run_reference(c)[0], run_reference(c.wide())[0], "1/3")
    rough = replace(c, topk_weights=c.topk_weights.bfloat16())
    assert not torch.equal(kernels("mlp")(*c.args()), kernels("mlp")(*rough.args()))


@pytest.mark.parametrize("passes", [True, False], ids=["gradient 1 at the limit", "gradient 0 at the limit"])
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
def test_the_gradient_at_the_clamp_is_what_torchs_is(monkeypatch, activation, passes):
    """Of either kind of torch, whichever is there: at the limit itself, beside it, beyond it, of NaN."""
    from grouped_lora_ops.kernels import expert_rows
    from grouped_lora_ops.reference import expert_activation

    values, limit = [7.0, -7.0, 7.25, -7.25, 6.75, 0.5, NAN, 0.0], 7.0
    gate, up = (t.flatten() for t in torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij"))
    h = torch.cat([gate, up])[None].to(DEVICE)  # one route
    grad = torch.full((1, len(gate)), 2.0, device=DEVICE)
    monkeypatch.setattr(expert_activation, "PASSES_AT_LIMIT", passes)
    want = expert_activation.activate_backward(grad, h, activation, limit)[0].view(2, -1)
    got = torch.full((1, 2, len(gate)), NAN, device=DEVICE)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    expert_rows.activation_backward("expert_mlp", h.view(1, 2, -1), grad, got, None, ids, None, 1, activation, limit, passes)
    cut = (gate.abs() > limit) | (up.abs() > limit) | gate.isnan() | up.isnan()
    assert torch.equal(got[0] == 0, want == 0) and cut.any()
    torch.testing.assert_close(got[0], want, equal_nan=True)
    at_gate, at_up = gate == limit, up.abs() == limit
    inner = ~(gate.isnan() | up.isnan())
    assert (want[0].cpu()[at_gate & inner & (up != 0) & (up != -1)] != 0).all() == passes
    assert (want[1].cpu()[at_up & inner & (gate != 0)] != 0).all() == passes


@pytest.mark.parametrize("inner", [96, 768, 1000])
def test_a_routes_products_of_rows_are_its_own(inner):
    """The gradient of a router weight has the bits that it has alone, at every place and with how many other routes: one order of sums."""
    from grouped_lora_ops.kernels import expert_rows

    assert len({expert_rows._tile(routes, inner, 1024, split=False)[:2] for routes in (1, 7, 64, 1 << 15)}) == 1
    generator = torch.Generator().manual_seed(0)
    routes = 300
    h, grad = (torch.randn(routes, size, generator=generator).to(DEVICE, torch.bfloat16) for size in (2 * inner, inner))
    ids = torch.randint(-1, 4, (routes, 1), generator=generator).to(DEVICE)

    def sums(rows):
        dot, dw = torch.zeros(2, len(rows), device=DEVICE)
        out = torch.empty_like(h[rows])
        expert_rows.row_dot("expert_mlp", grad[rows], h[rows, :inner].contiguous(), dot, ids[rows], 4)
        halves = (h[rows].view(-1, 2, inner), grad[rows], out.view(-1, 2, inner))
        expert_rows.activation_backward("expert_mlp", *halves, dw, ids[rows], None, 4, "swiglu", None, True)
        return torch.stack([dot, dw])

    every = sums(torch.arange(routes))
    assert (every[:, ids[:, 0].cpu() >= 0] != 0).all()
    for rows in (torch.tensor([5]), torch.tensor([299, 5, 0]), torch.randperm(routes, generator=generator)):
        assert_bits(sums(rows), every[:, rows], str(len(rows)))
