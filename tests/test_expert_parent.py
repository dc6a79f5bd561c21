"""expert_mlp without an active adapter is the parent, bit for bit: a plain loop over experts with the contract's stages."""

from __future__ import annotations

import pytest
import torch
from expert_cases import (
    ACTIVATIONS,
    DTYPES,
    PLACEMENTS,
    WEIGHTS,
    Mlp,
    Parent,
    act,
    assert_bits,
    assert_equal,
    build_mlp,
)

import grouped_lora_ops as gl
from grouped_lora_ops.reference.expert_activation import PASSES_AT_LIMIT
from grouped_lora_ops.reference.expert_routes import join


def run(c: Mlp, grad_y):
    c = c.leaves(("x", "topk_weights"))
    y = c.call(gl.expert_mlp)
    y.backward(grad_y)
    return y.detach(), c.x.grad, c.topk_weights.grad


def silent(c: Mlp) -> dict[str, Mlp]:
    """The ways in which LoRA changes nothing."""
    zero = {n: torch.zeros_like(getattr(c, n)) for n in ("gate_up_b", "down_b")}
    broken = {n: torch.full_like(getattr(c, n), float("nan")) for n in ("gate_up_a", "gate_up_b", "down_a", "down_b")}
    return {
        "absent": c.base(),
        "B = 0": c.with_(**zero),
        "no adapter": c.with_(adapter_ids=torch.full_like(c.adapter_ids, -1), **broken),
        "scaling 0": c.with_(scalings=torch.zeros_like(c.scalings)),
        "rank 0": c.with_(ranks=torch.zeros(len(c.scalings), dtype=torch.int32), **broken),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zero_adapters_are_the_parent(activation, placement, bias, dtype):
    """R1, in all storages of the weights in turn."""
    place = list(ACTIVATIONS).index(activation) + PLACEMENTS.index(placement) + 2 * bias
    c = build_mlp(
        DTYPES[dtype],
        tokens=9,
        top_k=3,
        hidden=20,
        activation=activation,
        placement=placement,
        bias=bias,
        weights=WEIGHTS[place % 4],
        bias_dtype=torch.float32 if place % 3 == 0 else None,
        weight_dtype=DTYPES[dtype] if place % 5 == 0 else torch.float32,
        seed=place,
    )
    parent = Parent(c.base())
    want = parent()
    grad_y = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(want.dtype)
    want.backward(grad_y)
    want_dx, want_dw = parent.input_grads()
    for how, case in silent(c).items():
        y, dx, dw = run(case, grad_y)
        assert_bits(y, want.detach(), how)
        assert_equal(dx, want_dx, how)
        torch.testing.assert_close(dw, want_dw, rtol=2e-2 if c.topk_weights.dtype != torch.float32 else 2e-5, atol=2e-5)


def test_the_sign_of_zero_survives_a_zero_delta():
    """−1e-30 · 1e-30 underflows to −0.0; + 0.0 would lose its sign, and R1's bits would differ from the parent's."""
    ids = torch.zeros(4, 2).long()
    x, weight = torch.full((4, 1), 1e-30), torch.full((1, 16, 1), -1e-30)
    a, b = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 16, 2)
    y = gl.expert_linear(x, weight, None, None, ids, None, None)
    assert_bits(gl.expert_linear(x, weight, a, b, ids, None, torch.ones(1)), y)
    minus, zero = torch.tensor([-0.0, 0.0, -0.0]), torch.tensor([0.0, -0.0, 1.0])
    assert_bits(join(minus, zero), torch.tensor([-0.0, 0.0, 1.0]))


@pytest.mark.parametrize("weight", [0.0, 1e-8, 3.0, -0.7, 1 / 3])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
def test_where_the_weight_acts(top_k, weight):
    """R3: with an activation of a weighted down input, pre_down and post_down round differently; input is another function."""
    ids = torch.arange(5 * top_k).view(5, top_k) % 8
    results, parents = {}, {}
    for placement in PLACEMENTS:
        c = build_mlp(torch.bfloat16, tokens=5, top_k=top_k, experts=8, hidden=64, inner=32, ids=ids, placement=placement, bias=True)
        c.topk_weights.add_(1).mul_(weight)
        results[placement] = c.call(gl.expert_mlp)
        assert results[placement].isfinite().all()
        parents[placement] = c
    exact = {p: Parent(c.double().base())() for p, c in parents.items()}
    torch.testing.assert_close(exact["pre_down"], exact["post_down"])
    if weight == 0.0:
        assert not results["pre_down"].any() and not results["post_down"].any() and results["input"].any()
        return
    assert not torch.equal(results["pre_down"], results["post_down"])
    assert not torch.allclose(results["input"].double(), results["post_down"].double(), rtol=0.05)


def test_post_down_hides_the_weight_from_down():
    """R3: a weight so small that a · weight underflows bf16's neighbourhood is seen by down in pre_down only."""
    c = build_mlp(torch.float16, tokens=2, top_k=1, experts=1, ids=torch.zeros(2, 1).long(), activation="relu2", placement="post_down")
    c.x.fill_(1.0)
    c.w_gate_up.fill_(0.01)
    c.w_down.fill_(100.0)
    c.topk_weights.fill_(1e-7)
    post = c.base().call(gl.expert_mlp)
    pre = c.base().with_(router_weight="pre_down").call(gl.expert_mlp)
    assert (post > 0).all() and not pre.any()


def test_float32_weights_keep_their_bits():
    """1/3 has more bits than bf16: the product is formed in float32 and rounded once, in every placement."""
    third = torch.full((1, 1), 1 / 3)
    ids = torch.zeros(1, 1).long()
    x = torch.full((1, 8), 77.0, dtype=torch.bfloat16)
    eye = torch.eye(8, dtype=torch.bfloat16)[None]
    down = torch.eye(8, dtype=torch.bfloat16)[None]

    def mlp(placement, x=x):
        return gl.expert_mlp(
            x, ids, third, eye, down, None, None, None, None, None, None, activation="relu2", router_weight=placement
        )

    # relu2 rounds 77² = 5929 to bf16's grid of 32 before post_down multiplies
    assert torch.equal(mlp("post_down"), (x.float() ** 2).bfloat16().float().mul(third).bfloat16())
    assert torch.equal(mlp("pre_down"), (x.float() ** 2 * third).bfloat16())
    assert torch.equal(mlp("input"), ((x.float() * third).bfloat16().float() ** 2).bfloat16())
    narrow = (x.float() ** 2 * third.bfloat16()).bfloat16()
    assert not torch.equal(mlp("pre_down"), narrow)


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_downs_bias(placement, top_k):
    """R4: all weights 0, only down's bias is left: Σ p · b before and after down, Σ b under input."""
    c = build_mlp(torch.bfloat16, tokens=6, top_k=top_k, bias=True, placement=placement, seed=top_k)
    c.w_gate_up.zero_(), c.w_down.zero_(), c.b_gate_up.zero_()
    y = c.base().call(gl.expert_mlp)
    want = torch.zeros(6, 12)
    for k in range(top_k):
        e, w = c.topk_ids[:, k], c.topk_weights[:, k, None]
        b = c.b_down.float()[e.clamp(min=0)]
        term = {"input": b, "pre_down": (b * w).bfloat16().float(), "post_down": b * w}[placement]
        want += torch.where(e[:, None] >= 0, term, 0)
    assert_equal(y, want.bfloat16())


def order_case(placement, values):
    """One token, K experts whose outputs are ± values."""
    top_k = len(values)
    x = torch.ones(1, 4)
    gate_up = torch.ones(top_k, 4, 4) / 4
    down = torch.tensor(values).view(-1, 1, 1) * torch.eye(4)
    ids = torch.arange(top_k)[None]
    args = dict(activation="relu2", router_weight=placement)
    return x, ids, torch.ones(1, top_k), gate_up, down, args


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_sum_over_k_is_in_slot_order(placement):
    """R5: 2²⁴ + 1 + 1 − 2²⁴ is 0 from the left in float32 and something else in any other order."""
    values = [2.0**24, 1.0, 1.0, -(2.0**24), 3.0]
    x, ids, weights, gate_up, down, kw = order_case(placement, values)
    y = gl.expert_mlp(x, ids, weights, gate_up, down, None, None, None, None, None, None, **kw)
    assert torch.equal(y, torch.full((1, 4), 3.0))
    swapped = gl.expert_mlp(x, ids[:, [1, 2, 0, 3, 4]], weights, gate_up, down, *[None] * 6, **kw)
    assert torch.equal(swapped, torch.full((1, 4), 5.0))
    # other names for the experts, the same slots: the same bits
    perm = torch.tensor([3, 0, 4, 1, 2])
    named = gl.expert_mlp(x, perm[ids], weights, gate_up[perm.argsort()], down[perm.argsort()], *[None] * 6, **kw)
    assert_bits(named, y)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_expert_names_do_not_matter(placement):
    """R5 with random numbers: permuting the experts leaves y and every gradient."""
    c = build_mlp(torch.bfloat16, tokens=12, top_k=3, experts=5, placement=placement, bias=True)
    perm = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    new = torch.where(c.topk_ids >= 0, perm[c.topk_ids], -1)
    inverse = perm.argsort()
    renamed = c.map(lambda t: t[inverse], ("w_gate_up", "w_down", "b_gate_up", "b_down"))
    renamed = renamed.map(lambda t: t[:, inverse], ("gate_up_a", "gate_up_b", "down_a", "down_b")).with_(topk_ids=new)
    c, renamed = c.leaves(), renamed.leaves()
    y, z = c.call(gl.expert_mlp), renamed.call(gl.expert_mlp)
    assert_bits(y.detach(), z.detach())
    grad = torch.randn(y.shape).bfloat16()
    y.backward(grad), z.backward(grad)
    assert_equal(c.x.grad, renamed.x.grad)
    assert_equal(c.topk_weights.grad, renamed.topk_weights.grad)
    assert_equal(c.gate_up_a.grad[:, inverse], renamed.gate_up_a.grad)
    assert_equal(c.w_down.grad[inverse], renamed.w_down.grad)


def test_a_weight_of_one_is_no_weight():
    """With weights of 1 all three placements are one function, bit for bit."""
    c = build_mlp(torch.bfloat16, tokens=11, bias=True)
    c.topk_weights.fill_(1.0)
    ys = [c.with_(router_weight=p).call(gl.expert_mlp) for p in PLACEMENTS]
    assert_bits(ys[0], ys[1])
    assert_bits(ys[0], ys[2])


@pytest.mark.parametrize("activation", ["swiglu clamped", "swigluoai clamped"])
def test_gradients_at_the_clamp(activation):
    """Exactly at the limit the gradient is torch.clamp's (1 up to torch 2.13, 0 since); above (gate) or beyond (up) it is zero."""
    name, limit = ACTIVATIONS[activation]
    h = torch.tensor([[limit, limit], [limit + 1, -limit], [-9 * limit, limit + 1], [0.5, -limit - 1], [-limit, 0.0]])
    eye, one = torch.eye(2)[None], torch.ones(5, 1)
    x = h.clone().requires_grad_()
    args = (torch.zeros(5, 1).long(), one, eye, torch.ones(1, 2, 1), *[None] * 6)
    gl.expert_mlp(x, *args, activation=name, activation_limit=limit).sum().backward()
    want = h.clone().requires_grad_()
    (2 * act(want, name, limit)).sum().backward()
    assert_equal(x.grad, want.grad)
    assert x.grad[0].bool().tolist() == [PASSES_AT_LIMIT] * 2 and x.grad[1, 0] == 0 and x.grad[2, 1] == 0 and x.grad[3, 1] == 0
