"""expert_mlp with adapters on the CPU: equal to merged weights, exact on small integers, every form of its arguments."""

from __future__ import annotations

import pytest
import torch
from cases import place
from expert_cases import (
    ACTIVATIONS,
    DTYPES,
    FACTORS,
    PLACEMENTS,
    WEIGHTS,
    Mlp,
    act,
    assert_bits,
    assert_equal,
    build_mlp,
    by_route,
    rounded,
)

import grouped_lora_ops as gl

RANKS = (1, 4, 5, 8, 12, 16)


def compare_with_merged(c: Mlp, bound=1e-9):
    """y and all gradients in float64 against autograd through W + s B A, route by route."""
    names = [n for n in Mlp.TENSORS if getattr(c, n) is not None]
    ours, merged = c.leaves(names), c.leaves(names)
    y, want = ours.call(gl.expert_mlp), by_route(merged)
    torch.testing.assert_close(y, want, rtol=bound, atol=bound)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    y.backward(grad), want.backward(grad)
    for name in names:
        got, wanted = getattr(ours, name).grad, getattr(merged, name).grad
        wanted = torch.zeros_like(got) if wanted is None else wanted
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_adapters_are_merged_weights(activation, placement, bias):
    """R2 and R8: forms of factors and weights, ranks and numbers of choices in turn."""
    place = 5 * list(ACTIVATIONS).index(activation) + PLACEMENTS.index(placement) + 3 * bias
    for step in (0, 3):
        i = place + step
        c = build_mlp(
            torch.float64,
            tokens=6,
            top_k=(1, 2, 4)[i % 3],
            activation=activation,
            placement=placement,
            bias=bias,
            factors=list(FACTORS)[i % 8],
            weights=WEIGHTS[(i + step) % 4],
            rank=RANKS[i % 6],
            ranks=[max(1, RANKS[i % 6] // 2), RANKS[i % 6]] if i % 2 else None,
            adapter_ids=None if i % 7 == 0 else "random",
            seed=i,
        )
        compare_with_merged(c)


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("which", ["gate_up", "down", "gate", "up"])
def test_one_projection_alone(which, factors):
    """BUGS.md 37: gate-only, up-only, gate_up-only and down-only adapters; what is used gets a gradient, what is zero stays zero."""
    c = build_mlp(torch.float64, factors=factors, ids=torch.tensor([[0, 1], [2, 3], [1, 1]]), adapter_ids=torch.tensor([0, 1, 0]), tokens=3)
    if which in ("gate", "up"):  # the other half's B is zero
        b = c.gate_up_b.clone()
        flat = b.flatten(2, 3) if b.dim() == 5 else b
        flat[:, :, 10:] = 0 if which == "gate" else flat[:, :, 10:]
        if which == "up":
            flat[:, :, :10] = 0
        c = c.with_(gate_up_b=flat.view(b.shape), down_a=None, down_b=None)
    else:
        other = "down" if which == "gate_up" else "gate_up"
        c = c.with_(**{f"{other}_a": None, f"{other}_b": None})
    compare_with_merged(c)
    ours = c.leaves()
    ours.call(gl.expert_mlp).square().sum().backward()
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        factor = getattr(ours, name)
        if factor is not None:
            assert factor.grad.any(), name


def test_every_factor_that_is_routed_gets_a_gradient():
    """BUGS.md 37, expert by expert and slot by slot."""
    ids = torch.tensor([[e, (e + 1) % 4] for e in range(4)] * 2)
    slots = torch.tensor([0] * 4 + [1] * 4)
    c = build_mlp(torch.float32, tokens=8, ids=ids, adapter_ids=slots, factors="an A each").leaves()
    c.call(gl.expert_mlp).square().sum().backward()
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        assert (getattr(c, name).grad.flatten(2).abs().sum(2) > 0).all(), name
    assert (c.gate_up_a.grad.flatten(3).abs().sum(3) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("factors", FACTORS)
def test_exact_on_small_integers(factors, placement, dtype):
    """R6: relu2 of small integers, weights that are powers of two: every sum is exact, so the stages' roundings are all there is."""
    sizes = dict(hidden=12, inner=10, rank=4, integer=2) if dtype == "fp32" else dict(hidden=9, inner=8, rank=3, integer=1)
    c = build_mlp(torch.float64, activation="relu2", placement=placement, factors=factors, top_k=3, bias=True, **sizes)
    c.x.mul_(5), c.b_gate_up.mul_(3)
    c.scalings.copy_(torch.tensor([1.0, -1.0]))
    narrow = c.map(lambda t: t.to(DTYPES[dtype])).with_(topk_weights=c.topk_weights.float())
    want = by_route(c, DTYPES[dtype])
    assert_equal(narrow.call(gl.expert_mlp), want.to(DTYPES[dtype]))
    if dtype == "bf16":
        assert not torch.equal(want, by_route(c)), "the case does not need the roundings"


def test_exact_gradients_on_small_integers():
    for placement in PLACEMENTS:
        for factors in FACTORS:
            c = build_mlp(
                torch.float64, activation="relu2", integer=2, placement=placement, factors=factors, bias=True, hidden=6, inner=5, rank=2
            )
            c.scalings.copy_(torch.tensor([1.0, -1.0]))
            narrow, exact = c.map(lambda t: t.float()).leaves(), c.leaves()
            grad = torch.randint(-2, 3, c.x.shape, generator=torch.Generator().manual_seed(0)).double()
            narrow.call(gl.expert_mlp).backward(grad.float())
            by_route(exact).backward(grad)
            for name in Mlp.TENSORS:
                assert_equal(getattr(narrow, name).grad, rounded(getattr(exact, name).grad, torch.float32), f"{factors} {name}")


def peers_way(c: Mlp) -> torch.Tensor:
    """The same in the narrow dtype as peers compute it: h, the delta and every stage rounded, torch's own linear."""

    def lora(x, w, a, b, s):
        y = torch.nn.functional.linear(x, w)
        return y if a is None else y + torch.nn.functional.linear(torch.nn.functional.linear(x, a), b) * s

    out = torch.zeros(*c.topk_ids.shape, c.x.shape[1])
    for t, k in (c.topk_ids >= 0).nonzero().tolist():
        e, slot, w = int(c.topk_ids[t, k]), int(c.adapter_ids[t]), c.topk_weights[t, k]
        pairs = [None] * 4 if slot < 0 else [f[slot, e] for f in (c.gate_up_a, c.gate_up_b, c.down_a, c.down_b)]
        s = c.scalings[slot]
        x = (c.x[t] * w).to(c.x.dtype) if c.router_weight == "input" else c.x[t]
        h = lora(x, c.w_gate_up[e], *pairs[:2], s).to(c.x.dtype)
        a = act(h.float(), c.activation, c.activation_limit)
        a = (a * w if c.router_weight == "pre_down" else a).to(c.x.dtype)
        y = lora(a, c.w_down[e], *pairs[2:], s).to(c.x.dtype).float()
        out[t, k] = y * w if c.router_weight == "post_down" else y
    return out.sum(1).to(c.x.dtype)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_against_float64(activation, placement):
    """R6: of y not above that of the peers' way with its roundings in between, of the gradient of x some roundings."""
    dtype = list(DTYPES.values())[(list(ACTIVATIONS).index(activation) + PLACEMENTS.index(placement)) % 3]
    c = build_mlp(dtype, tokens=10, hidden=64, inner=48, rank=8, activation=activation, placement=placement, seed=1)
    oracle = c.double().leaves(("x",))
    want = by_route(oracle)
    ours = c.leaves(("x",))
    y = ours.call(gl.expert_mlp)

    def error(t, of):
        return float((t.double() - of).norm() / of.norm())

    slack = 2.0 if dtype == torch.float32 else 1.1  # float32: the peers' way rounds nothing more than ours
    assert error(y.detach(), want.detach()) <= slack * error(peers_way(c), want.detach())
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    y.backward(grad), want.backward(grad.double())
    assert error(ours.x.grad, oracle.x.grad) <= (8 if dtype == torch.float32 else 3) * torch.finfo(dtype).eps


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_lora_joins_before_the_activation(placement):
    """BUGS.md 29: silu(g + dg) · (u + du)."""
    c = build_mlp(torch.float64, placement=placement, ids=torch.tensor([[0, 1]] * 3), adapter_ids=None, tokens=3)
    c.gate_up_b.mul_(50)
    compare_with_merged(c, 1e-8)
    base, delta = c.base().call(gl.expert_mlp), c.call(gl.expert_mlp)
    assert not torch.allclose(base, delta)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "ids",
    [[[1, 1, 1], [0, 0, 2], [2, 1, 2]], [[3], [0]], [[0, 0], [0, 0]], [[0, -1], [-1, 0]], [[2, 5, -1]]],
    ids=["duplicates", "K = 1", "one expert", "masked", "sentinel E"],
)
def test_routings(ids, placement):
    """R7; id E counts as −1."""
    ids = torch.tensor(ids)
    experts = 1 if int(ids.max()) == 0 else 5
    compare_with_merged(build_mlp(torch.float64, tokens=len(ids), ids=ids, experts=experts, placement=placement, bias=True))


@pytest.mark.parametrize("sentinel", [-1, 1024])
def test_1024_experts(sentinel):
    """BUGS.md 4 and 5: masked ids of a token with an adapter ≥ 1 reach no neighbour, which holds NaN."""
    ids = torch.tensor([[1023, sentinel], [sentinel, 0], [sentinel, sentinel], [5, 5]])
    c = build_mlp(torch.float32, tokens=4, ids=ids, experts=1024, hidden=4, inner=3, rank=2, adapter_ids=torch.tensor([1, 1, 1, 0]))
    for expert in set(range(1024)) - {0, 5, 1023}:
        c.w_gate_up[expert] = c.w_down[expert] = float("nan")
    c.gate_up_a[0, 1:5] = c.gate_up_a[0, 6:] = float("nan")
    c.down_b[0, 1:5] = c.down_b[0, 6:] = float("nan")
    y = c.call(gl.expert_mlp)
    assert y.isfinite().all() and not y[2].any() and y[[0, 1, 3]].abs().sum(1).all()


def test_stray_ids_raise_on_the_cpu():
    c = build_mlp(torch.float32)
    for ids in (torch.full((7, 2), 5), torch.full((7, 2), -2)):
        with pytest.raises(ValueError, match=r"topk_ids must be -1 or 4 \(masked\) or an expert 0 … 3; got (5|-2)"):
            c.with_(topk_ids=ids).call(gl.expert_mlp)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_base_storage(dtype, weights):
    """S1: every storage of the same values; used where it lies, frozen bases get no gradient."""
    c = build_mlp(DTYPES[dtype], weights=weights, bias=True)
    packed = build_mlp(DTYPES[dtype], weights="packed", bias=True)
    tensors = [c.w_gate_up, c.w_down, c.b_gate_up, c.b_down]
    before = [(t.data_ptr(), t.stride(), t.dtype, t._version) for t in tensors]
    if dtype != "fp32":  # the order inside a float32 product is the storage's
        torch.testing.assert_close(c.call(gl.expert_mlp), packed.call(gl.expert_mlp), rtol=2**-7, atol=2**-7)
    lora = c.leaves(("x", "gate_up_a", "gate_up_b", "down_a", "down_b"))
    lora.call(gl.expert_mlp).float().square().sum().backward()
    assert [(t.data_ptr(), t.stride(), t.dtype, t._version) for t in tensors] == before
    assert all(t.grad is None for t in tensors) and lora.topk_weights.grad is None
    halves = c.with_(b_gate_up=c.b_gate_up.unflatten(1, (2, 10)).transpose(1, 2).contiguous().transpose(1, 2))
    assert_bits(halves.call(gl.expert_mlp), c.call(gl.expert_mlp))


@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
def test_any_strides(layout):
    c = build_mlp(torch.bfloat16, bias=True, integer=2, activation="relu2", factors="B shared", ranks=[3, 2])
    moved = c.map(lambda t: place(t, layout))
    moved.topk_ids = torch.full((7, 4), 99)[:, ::2].copy_(c.topk_ids)
    assert_bits(moved.call(gl.expert_mlp), c.call(gl.expert_mlp))
    a, b = c.leaves(), moved.map(lambda t: t.detach().requires_grad_())
    grad = torch.randint(-2, 3, (7, 24)).bfloat16()[:, ::2]
    for case in (a, b):
        case.call(gl.expert_mlp).backward(grad)
    for name in Mlp.TENSORS:
        assert_equal(getattr(b, name).grad, getattr(a, name).grad, name)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_float32_masters(dtype, placement):
    """S3 and S4: float32 factors and biases on a narrow base, narrow weights of the router: y stays x's dtype, every
    gradient comes in its tensor's dtype, and float32 gradients were never narrow."""
    narrow = build_mlp(DTYPES[dtype], tokens=20, bias=True, placement=placement)
    lora = ("gate_up_a", "gate_up_b", "down_a", "down_b")
    wide = narrow.map(lambda t: t.float(), lora).leaves()
    y = wide.call(gl.expert_mlp)
    assert_bits(y.detach(), narrow.call(gl.expert_mlp))
    narrow = narrow.leaves()
    grad = torch.randn(y.shape).to(y.dtype)
    y.backward(grad), narrow.call(gl.expert_mlp).backward(grad)
    for name in lora:
        full = getattr(wide, name).grad
        assert full.dtype == torch.float32 and not torch.equal(full, full.to(y.dtype).float()), name
        assert_equal(full.to(y.dtype), getattr(narrow, name).grad, name)
    wide = narrow.map(lambda t: t.detach().float(), ("b_gate_up", "b_down")).map(lambda t: t.detach().to(y.dtype), ("topk_weights",))
    wide = wide.leaves()
    y = wide.call(gl.expert_mlp)
    assert y.dtype == DTYPES[dtype]
    y.backward(grad)
    assert wide.b_gate_up.grad.dtype == wide.b_down.grad.dtype == torch.float32
    assert wide.topk_weights.grad.dtype == DTYPES[dtype] == wide.w_gate_up.grad.dtype


def test_a_bias_in_float32_is_not_rounded_first():
    """h1 + b in float32, rounded once: a bias that bf16 would round away at a tie is seen."""
    x, ids, one = torch.full((1, 1), 256.0).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1)
    w = torch.ones(1, 1, 1).bfloat16()
    bias = torch.tensor([[1.001]])  # 256 + 1 is a tie of bf16 (257 → 256), 256 + 1.001 is not (→ 258)
    kw = dict(activation="relu2", router_weight="post_down")
    y = gl.expert_mlp(x, ids, one, w, w, *[None] * 6, b_gate_up=bias, **kw)
    assert float(y) == float(torch.tensor(258.0**2).bfloat16())


def test_router_weights_gradient():
    """R8: in the weights' dtype, none if frozen, defined where the weight is 0."""
    for placement in PLACEMENTS:
        c = build_mlp(torch.float64, placement=placement, bias=True, ids=torch.tensor([[0, 1], [2, -1], [3, 3]]), tokens=3)
        c.topk_weights.zero_()
        compare_with_merged(c)
        ours = c.leaves()
        ours.call(gl.expert_mlp).sum().backward()
        assert ours.topk_weights.grad[0].all() and ours.topk_weights.grad[1, 1] == 0
        frozen = c.leaves(("x",))
        frozen.call(gl.expert_mlp).sum().backward()
        assert frozen.topk_weights.grad is None


def test_rank_tails_are_never_used():
    c = build_mlp(torch.float32, rank=6, ranks=[4, 2], bias=True)
    clean = c.with_(**{n: getattr(c, n).clone() for n in ("gate_up_a", "gate_up_b", "down_a", "down_b")})
    for slot, rank in enumerate((4, 2)):
        for name in ("gate_up_a", "down_a"):
            getattr(c, name)[slot, ..., rank:, :] = float("nan")
        for name in ("gate_up_b", "down_b"):
            getattr(c, name)[slot, ..., rank:] = float("nan")
    assert_bits(c.call(gl.expert_mlp), clean.call(gl.expert_mlp))
    c, clean = c.leaves(), clean.leaves()
    for case in (c, clean):
        case.call(gl.expert_mlp).square().sum().backward()
    for name in Mlp.TENSORS:
        assert_equal(getattr(c, name).grad, getattr(clean, name).grad, name)
    assert not c.gate_up_a.grad[0, :, 4:].any() and not c.down_b.grad[1, ..., 2:].any()


def test_pairs_of_unequal_rank():
    """gate_up's buffers hold 3 columns, down's 8: a slot of rank 5 uses 3 and 5."""
    c, low = build_mlp(torch.float64, rank=8, ranks=[5, 8]), build_mlp(torch.float64, rank=3)
    c = c.with_(gate_up_a=low.gate_up_a, gate_up_b=low.gate_up_b)
    y = c.call(gl.expert_mlp)
    cut = c.with_(ranks=None, down_a=c.down_a.clone(), down_b=c.down_b.clone())
    cut.down_a[0, :, 5:] = 0
    torch.testing.assert_close(y, by_route(cut))


@pytest.mark.parametrize("seed", range(3))
def test_many_runs_one_result(seed):
    """BUGS.md 31: weights over six orders of magnitude, K = 8, bf16; the same bits again and again."""
    c = build_mlp(torch.bfloat16, tokens=5, top_k=8, experts=8, seed=seed, placement=PLACEMENTS[seed])
    c.topk_weights.copy_(10 ** (-6 * c.topk_weights))
    first = c.call(gl.expert_mlp)
    assert all(torch.equal(c.call(gl.expert_mlp), first) for _ in range(5))


@pytest.mark.parametrize("num_slots", [2])
def test_a_plan_changes_nothing(num_slots):
    c = build_mlp(torch.bfloat16)
    plan = gl.expert_plan(c.topk_ids, c.adapter_ids, 4, num_slots)
    assert_bits(c.call(gl.expert_mlp, plan=plan), c.call(gl.expert_mlp))
