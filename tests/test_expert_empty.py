"""Routes that are not there: no tokens, all masked, no local expert, empty experts, and NaN in what nobody may read."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.utils.checkpoint
from expert_cases import ACTIVATIONS, PLACEMENTS, Mlp, assert_bits, assert_equal, build_mlp, build_routes

import grouped_lora_ops as gl

NAN = float("nan")
NOTHING = {
    "T = 0": torch.empty(0, 2, dtype=torch.int64),
    "all -1": torch.full((5, 2), -1),
    "all E": torch.full((5, 2), 4),
    "mixed sentinels": torch.tensor([[-1, 4], [4, -1], [4, 4], [-1, -1], [4, -1]]),
    "K = 0": torch.empty(5, 0, dtype=torch.int64),
}
TRAINED = {
    "all": Mlp.TENSORS,
    "LoRA": ("gate_up_a", "gate_up_b", "down_a", "down_b"),
    "LoRA and x": ("x", "gate_up_a", "gate_up_b", "down_a", "down_b"),
    "router": ("topk_weights",),
    "frozen": (),
}


def poison(c: Mlp) -> Mlp:
    """NaN and Inf in x, router weights, base and LoRA."""
    for i, name in enumerate(Mlp.TENSORS):
        if getattr(c, name) is not None:
            getattr(c, name).fill_((NAN, float("inf"), -float("inf"))[i % 3])
    return c


@pytest.mark.parametrize("what", NOTHING)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nothing_routed(placement, trained, what):
    """E1, E2, E5: the table of zero routes; activation, bias and dtype in turn."""
    i = list(NOTHING).index(what) + list(TRAINED).index(trained) + PLACEMENTS.index(placement)
    c = build_mlp(
        (torch.bfloat16, torch.float32, torch.float16)[i % 3],
        ids=NOTHING[what],
        activation=list(ACTIVATIONS)[i % 6],
        placement=placement,
        bias=i % 2 == 0 or trained == "all",
        lora_dtype=torch.float32 if i % 4 == 0 else None,
        factors=("per expert", "B shared", "an A each, shared")[i % 3],
    )
    c = poison(c).leaves(TRAINED[trained])
    y = c.call(gl.expert_mlp)
    assert_equal(y.detach(), torch.zeros_like(c.x))
    assert y.requires_grad == bool(TRAINED[trained])
    if y.requires_grad:
        y.sum().backward()
    for name, grad in c.grads().items():
        if name in TRAINED[trained]:
            assert_equal(grad, torch.zeros_like(getattr(c, name)), name)
        else:
            assert grad is None, name


@pytest.mark.parametrize("what", NOTHING)
@pytest.mark.parametrize("op", ["delta", "linear"])
def test_nothing_routed_in_the_projections(op, what):
    """Rows are zero or base's bits; a dispatcher's N = 0 rows with T > 0 are a K of 0 (E4)."""
    c = build_routes("an A each", torch.bfloat16, ids=NOTHING[what], poison=False, per_route="K" in what)
    for name in ("x", "weight", "a", "b", "bias", "row_weights"):
        getattr(c, name).fill_(NAN)
    names = ("x", "a", "b", "base", "row_weights") if op == "delta" else ("x", "weight", "a", "b", "bias", "row_weights")
    c = c.leaves(names)
    y = getattr(c, op)(getattr(gl, f"expert_{op}"))
    assert_bits(y.detach(), c.base.detach() if op == "delta" else torch.zeros_like(c.base))
    y.float().sum().backward()
    for name, grad in c.grads(names).items():
        want = torch.ones_like(c.base) if name == "base" else torch.zeros_like(getattr(c, name))
        assert_equal(grad, want, name)


PRESENT = {"first": [1, 2, 3], "last": [0, 1, 2], "middle": [0, 3], "all but one": [2], "none": [0, 1, 2, 3]}


@pytest.mark.parametrize("empty", PRESENT)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_empty_experts(dtype, placement, empty):
    """E6, BUGS.md 32: gradients of experts without routes are exact zeros, whatever their weights hold."""
    present = torch.tensor(PRESENT[empty])
    ids = present[torch.randint(len(present), (9, 2), generator=torch.Generator().manual_seed(0))]
    clean = build_mlp(dtype, ids=ids, placement=placement, bias=True)
    c = clean.map(torch.clone)
    absent = [e for e in range(4) if e not in ids]
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        getattr(c, name)[absent] = NAN
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        getattr(c, name)[:, absent] = NAN
    clean, c = clean.leaves(), c.leaves()
    results = [case.call(gl.expert_mlp) for case in (clean, c)]
    assert_bits(results[0].detach(), results[1].detach())
    for y in results:
        y.float().square().sum().backward()
    for name in Mlp.TENSORS:
        grad = getattr(c, name).grad
        assert_equal(grad, getattr(clean, name).grad, name)
        if name not in ("x", "topk_weights"):
            expert_axis = grad if grad.shape[0] == 4 else grad.transpose(0, 1)
            assert not expert_axis[absent].any() and expert_axis[ids.unique()].any()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rank_with_a_slice_of_the_experts(placement):
    """E3, BUGS.md 3: local ids, −1 for the others'; slices add up to the whole, a slice without routes to nothing."""
    whole = build_mlp(torch.float64, tokens=10, top_k=3, experts=6, placement=placement, bias=True)
    whole.topk_ids[whole.topk_ids == 5] = 4
    total, grads = torch.zeros_like(whole.x), torch.zeros_like(whole.x)
    for first, last in ((0, 2), (2, 5), (5, 6)):
        local = whole.topk_ids - first
        local[(local < 0) | (local >= last - first)] = -1
        c = whole.map(lambda t: t[first:last], ("w_gate_up", "w_down", "b_gate_up", "b_down"))  # noqa: B023
        c = c.map(lambda t: t[:, first:last], ("gate_up_a", "gate_up_b", "down_a", "down_b"))  # noqa: B023
        c = c.with_(topk_ids=local).leaves(("x",))
        y = c.call(gl.expert_mlp)
        y.sum().backward()
        assert first != 5 or (not y.any() and not c.x.grad.any())
        total, grads = total + y.detach(), grads + c.x.grad
    whole = whole.leaves(("x",))
    y = whole.call(gl.expert_mlp)
    y.sum().backward()
    torch.testing.assert_close(total, y.detach())
    torch.testing.assert_close(grads, whole.x.grad)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_masked_routes_between_others(placement):
    """E5: NaN in the weights of masked routes and in the rows of tokens that have only such; the others' bits stay."""
    ids = torch.tensor([[0, -1], [-1, -1], [4, 2], [4, 4], [1, 3]])
    clean = build_mlp(torch.bfloat16, ids=ids, placement=placement, bias=True, adapter_ids=torch.tensor([0, 1, 1, -1, -1]))
    c = clean.map(torch.clone)
    masked = (ids < 0) | (ids >= 4)
    c.topk_weights[masked] = NAN
    c.x[masked.all(1)] = float("inf")
    clean, c = clean.leaves(), c.leaves()
    for case, elsewhere in ((clean, 1.0), (c, NAN)):
        case.y = case.call(gl.expert_mlp)
        grad = torch.ones_like(case.y)
        grad[masked.all(1)] = elsewhere
        case.y.backward(grad)
    assert_bits(c.y.detach(), clean.y.detach())
    assert not c.y[masked.all(1)].any()
    for name in Mlp.TENSORS:
        assert_equal(getattr(c, name).grad, getattr(clean, name).grad, name)
    assert not c.topk_weights.grad[masked].any() and not c.x.grad[masked.all(1)].any()


@pytest.mark.parametrize("op", ["delta", "linear"])
def test_masked_rows_of_grad_y_reach_nothing(op):
    """Their grad_y is NaN, as an uninitialised buffer's: gradients are those of a grad_y that is zero there."""
    names = ("x", "a", "b", "row_weights") if op == "delta" else ("x", "weight", "a", "b", "bias", "row_weights")
    grads = []
    for elsewhere in (0.0, NAN):
        c = build_routes("an A each", torch.bfloat16)  # poisoned
        c = c.leaves(names)
        grad = c.grad_y.clone()
        grad[((c.ids < 0) | (c.ids >= 4)).flatten()] = elsewhere
        getattr(c, op)(getattr(gl, f"expert_{op}")).backward(grad)
        grads.append(c.grads(names))
    for name in names:
        assert grads[1][name].isfinite().all(), name
        assert_equal(grads[1][name], grads[0][name], name)


def test_rows_without_an_adapter_read_none():
    """BUGS.md 25: a batch whose rows have no adapter beside slots that hold NaN."""
    c = build_mlp(torch.bfloat16, adapter_ids=torch.full((7,), -1))
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        getattr(c, name).fill_(NAN)
    c.scalings.fill_(NAN)
    ours, base = c.leaves(("x", "topk_weights")), c.base().leaves(("x", "topk_weights"))
    for case in (ours, base):
        case.y = case.call(gl.expert_mlp)
        case.y.sum().backward()
    assert_bits(ours.y.detach(), base.y.detach())
    assert_equal(ours.x.grad, base.x.grad)
    assert_equal(ours.topk_weights.grad, base.topk_weights.grad)


@pytest.mark.parametrize("what", NOTHING)
def test_backward_twice_and_beside_another_branch(what):
    """E7: into existing gradients, and an empty branch that leaves the other's alone."""
    c = build_mlp(torch.float32, ids=NOTHING[what]).leaves()
    other = torch.randn(3, requires_grad=True)
    for _ in range(2):
        (c.call(gl.expert_mlp).sum() + other.square().sum()).backward()
    assert_equal(other.grad, 4 * other.detach())
    assert all(not g.any() for g in c.grads().values())
    full = build_mlp(torch.float32).leaves()
    y = full.call(gl.expert_mlp)
    y.sum().backward(retain_graph=True)
    once = {n: g.clone() for n, g in full.grads().items() if g is not None}
    y.sum().backward()
    for name, grad in once.items():
        assert_equal(getattr(full, name).grad, 2 * grad, name)


@pytest.mark.parametrize("what", [*NOTHING, "routed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, what):
    """A1: the same bits and gradients with the op inside a checkpoint."""
    ids = None if what == "routed" else NOTHING[what]
    results = []
    for checkpointed in (False, True):
        c = build_mlp(torch.bfloat16, ids=ids, bias=True).leaves()

        def run(*tensors):
            return Mlp.call(c.with_(**dict(zip(Mlp.TENSORS, tensors))), gl.expert_mlp)  # noqa: B023

        tensors = [getattr(c, n) for n in Mlp.TENSORS]
        y = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=reentrant) if checkpointed else run(*tensors)
        y.float().square().sum().backward()
        results.append((y.detach(), c.grads()))
    assert_bits(results[0][0], results[1][0])
    for name in Mlp.TENSORS:
        assert_equal(results[0][1][name], results[1][1][name], name)


def test_gradients_are_none_where_nothing_is_asked_for():
    """Each of the ten gradients alone is the one of all ten."""
    everything = build_mlp(torch.float32, bias=True, factors="an A each").leaves()
    everything.call(gl.expert_mlp).square().sum().backward()
    names = list(Mlp.TENSORS)
    for i, wanted in enumerate([(n,) for n in names] + list(itertools.combinations(names[::3], 2))):
        for placement in ("pre_down", PLACEMENTS[i % 3]):
            c = build_mlp(torch.float32, bias=True, factors="an A each", placement=placement).leaves(wanted)
            c.call(gl.expert_mlp).square().sum().backward()
            for name in names:
                grad = getattr(c, name).grad
                if name not in wanted:
                    assert grad is None, name
                elif placement == "pre_down":
                    assert_equal(grad, getattr(everything, name).grad, name)
                else:
                    assert grad.any(), name


def test_backwards_with_empty_experts_finish():
    """BUGS.md 34: within a minute, from another thread, whichever experts are empty."""

    def train():
        for ids in ([[0, 0]], [[3, 3]], [[1, 2]], [[-1, -1]], [[0, 3]]):
            c = build_mlp(torch.bfloat16, ids=torch.tensor(ids * 3)).leaves()
            c.call(gl.expert_mlp).sum().backward()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.parametrize("sizes", [dict(rank=0), dict(slots=0), dict(hidden=0), dict(inner=0), dict(experts=0), dict(tokens=1, top_k=1)], ids=str)
def test_sizes_of_zero(sizes):
    ids = torch.full((7, 2), -1) if "experts" in sizes else None
    adapters = torch.full((7,), -1) if "slots" in sizes else "random"
    c = build_mlp(torch.float32, bias=True, ids=ids, adapter_ids=adapters, **({"hidden": 6} | sizes))
    c = c.map(lambda t: t.nan_to_num(0, 0, 0)).leaves()
    y = c.call(gl.expert_mlp)
    if "rank" in sizes or "slots" in sizes:
        assert_bits(y.detach(), c.base().call(gl.expert_mlp).detach())
    y.square().sum().backward()
    for name, grad in c.grads().items():
        assert grad.shape == getattr(c, name).shape, name


@pytest.mark.parametrize("shared", ["lora_a", "lora_b", "both"])
def test_a_rank_without_experts_takes_shared_factors(shared):
    """E = 0: id 0 is E, the sentinel, and a factor that all experts share is read by nobody."""
    ids, adapters, scalings = torch.tensor([[0, -1], [0, 0]]), torch.tensor([0, 0]), torch.ones(1)
    a = torch.full((1, 1 if shared != "lora_b" else 0, 2, 8), NAN, requires_grad=True)
    b = torch.full((1, 1 if shared != "lora_a" else 0, 6, 2), NAN, requires_grad=True)
    x = torch.full((2, 8), NAN, requires_grad=True)
    ops = [lambda: gl.expert_linear(x, torch.empty(0, 6, 8), a, b, ids, adapters, scalings, row_weights=torch.full((4,), NAN))]
    if shared != "both":  # both shared says E = 1
        ops.append(lambda: gl.expert_delta(x, a, b, ids, adapters, scalings, row_weights=torch.full((4,), NAN)))
    for op in ops:
        y = op()
        assert_equal(y.detach(), torch.zeros(4, 6))
        for t, grad in zip((x, a, b), torch.autograd.grad(y.sum(), (x, a, b))):
            assert_equal(grad, torch.zeros_like(t))
