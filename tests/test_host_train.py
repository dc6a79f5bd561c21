"""Prepared backwards and training forwards: on a GPU that is not there, as in test_host.py, a repeated call launches the right kernels
on the right memory and returns every gradient; on one that is, it has the bits of the ordinary call."""

from __future__ import annotations

import importlib

import pytest
import torch
from cases import assert_bits
from conftest import poisoned
from test_expert_host import block, linear_args, small
from test_expert_kernels import force  # noqa: F401  (a fixture)
from test_expert_mlp_kernels import PLACEMENTS
from test_host import elsewhere, gpu, one_launcher  # noqa: F401  (fixtures)
from test_host import small as dense

import grouped_lora_ops as glo
from grouped_lora_ops import driver, reference
from grouped_lora_ops.ops import prepared

BACKWARDS = ("shrink", "expand", "delta", "linear")
COUNTS = {"shrink": 2, "expand": 2, "delta": 3, "linear": 5}  # of gradients


def implementation(name, kind="_backward_cuda"):
    return getattr(importlib.import_module(f"grouped_lora_ops.ops.{name}"), kind)


def compare(got, want, what=""):
    assert len(got) == len(want)
    for i, (one, other) in enumerate(zip(got, want)):
        assert one.shape == other.shape and one.stride() == other.stride()
        assert_bits(one, other, f"{what}, result {i}")


def both(call, args, what=""):
    """What a call gives, held against the ordinary way's bits."""
    with poisoned():
        want = call.__wrapped__(*args)
        got = call(*args)
    compare(got, want, what)
    return got


def backward_args(name, seed, needs, form="wo_a", tokens=3):
    c = dense(form, tokens=tokens, seed=seed, poison=False)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-3, 4, shape, generator=generator).to(c.x.dtype)

    h = reference.shrink(c.x, c.a, c.ids, ranks=c.ranks)
    grad_y = draw(*c.base.shape)
    if name == "shrink":
        return torch.randn(h.shape, generator=generator), c.x, c.a, c.ids, c.ranks, None, needs
    if name == "expand":
        return grad_y, h, c.b, c.ids, c.scalings, c.out_sizes, c.ranks, None, needs
    if name == "delta":
        return grad_y, *c.factors, c.out_sizes, c.ranks, None, needs
    weight = draw(*c.base.shape[1:], c.x.shape[-1])
    return grad_y, c.x, weight, *c.factors[1:], None, c.out_sizes, c.ranks, None, needs


# --- on a GPU that is not there ---


@one_launcher
@pytest.mark.parametrize("form", ["plain", "wo_a", "slices"])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_repeated_backward_reads_and_writes_its_own_tensors(gpu, name, form):  # noqa: F811
    """Of all gradients that a frozen base has, of each alone, and of none of the first's."""
    call, count = implementation(name), COUNTS[name]
    frozen = [i for i in range(count) if name != "linear" or i not in (1, 4)]
    wanted = [frozen, *[[i] for i in frozen]]
    for which in wanted:
        needs = [i in which for i in range(count)]
        before = len(gpu.launches)
        for seed in range(2):
            got = both(call, backward_args(name, seed, needs, form), f"{needs}, call {seed}")
            assert [t.numel() > 0 for t in got] == needs
        assert len(gpu.launches) > before, "the ordinary way"
    assert len(call.table) == len(wanted)


@one_launcher
def test_many_rows_make_their_plan_again(gpu):  # noqa: F811
    """A plan inside the backward: two launches of the tape."""
    for name in ("delta", "linear"):
        call = implementation(name)
        for seed in range(2):
            both(call, backward_args(name, seed, [True] * 3 if name == "delta" else [True, False, True, True, False], tokens=140))
        assert len(call.table) == 1 and gpu.launches


@one_launcher
def test_what_torch_computes_is_not_repeated(gpu):  # noqa: F811
    """The gradient of a base weight, and of a bias, are torch's products and sums: such a call takes the ordinary way each time."""
    call = implementation("linear")
    for which in (1, 4):
        args = list(backward_args("linear", 0, [i in (0, which) for i in range(5)]))
        if which == 4:
            args[7] = torch.zeros(args[0].shape[1:], dtype=torch.bfloat16)
        for _ in range(2):
            both(call, tuple(args))
    assert not call.table and not gpu.launches


@pytest.mark.parametrize(
    "placement, weights, need_w, how",
    [
        ("input", torch.float32, True, "plan whole"),
        ("pre_down", torch.bfloat16, True, "plan whole"),
        ("post_down", torch.float32, False, "plan whole"),
        ("post_down", torch.bfloat16, True, "split"),
    ],
)
def test_a_repeated_layer_of_experts(gpu, force, placement, weights, need_w, how):  # noqa: F811
    """Forward and backward, with the router's gradient (in float32, and cast) and without."""
    force(how)
    forward, backward = implementation("expert_mlp", "_train_cuda"), implementation("expert_mlp")
    needs = [True, need_w, False, False, True, True, True, True, False, False]
    for seed in range(2):
        c = block(router_weight=placement, seed=seed, bias=False)
        args = list(c.args())
        args[2] = args[2].to(weights)
        if how == "split":  # float32 masters: copied in every call
            args[5:9] = [t.float() for t in args[5:9]]
        y, *kept = both(forward, tuple(args), f"forward {seed}")
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
        full = args + [None] * (18 - len(args))
        grads = both(backward, (grad, *kept, *full, needs), f"backward {seed}")
        assert [t.numel() > 0 for t in grads] == needs
        assert not need_w or grads[1].dtype == weights
        assert all(grad.dtype == t.dtype for grad, t in zip(grads[4:8], args[5:9]))
    assert len(forward.table) == len(backward.table) == 1 and gpu.launches
    assert [len(found.zeroed) for found in backward.table.values()] == [need_w], "zeros for what a kernel writes"


@pytest.mark.parametrize("how", ["split", "plan whole"])
def test_a_repeated_backward_of_experts(gpu, force, how):  # noqa: F811
    force(how)
    linear, delta = implementation("expert_linear"), implementation("expert_delta")
    for seed in range(3):
        c = small("per expert", base=False, seed=seed)
        grad = torch.randn(c.ids.numel(), c.w.shape[-2], generator=torch.Generator().manual_seed(seed)).to(c.x.dtype)
        args = list(linear_args(c))
        args[7] = None  # no bias
        both(linear, (grad, *args, [True, False, True, True, False, True]), f"linear {seed}")
        x, a, b, ids, adapters, scalings = c.args()
        both(delta, (grad, x, a, b, ids, adapters, scalings, c.weights, c.ranks, None, [True] * 4), f"delta {seed}")
    assert len(linear.table) == len(delta.table) == 1 and gpu.launches
    for call in (linear, delta):
        assert [len(found.zeroed) for found in call.table.values()] == [1], "zeros for what a kernel writes"


def test_gradients_are_new_and_start_from_zeros(gpu, force):  # noqa: F811
    """Factors of experts without routes get zeros in every call, whatever lay there; no call holds another's memory."""
    force("plan whole")
    call = implementation("expert_delta")
    results = []
    for seed in range(3):
        c = small("per expert", base=False, seed=seed)
        ids = torch.zeros_like(c.ids)  # expert 0 alone
        grad = torch.ones(ids.numel(), c.b.shape[-2], dtype=c.x.dtype)
        args = (grad, c.x, c.a, c.b, ids, c.adapters, c.scalings, None, None, None, [True, True, True, False])
        results.append(both(call, args, f"call {seed}"))
        assert results[-1][1][:, 1:].count_nonzero() == 0 and results[-1][1].count_nonzero()
    assert len({t.data_ptr() for grads in results for t in grads if t.numel()}) == 9


def test_large_tensors_are_held_while_they_are_needed(gpu, force, monkeypatch):  # noqa: F811
    """With everything large, each launch finds what it reads and no more: h1, a and their like are gone when it was read last."""
    force("plan whole")
    monkeypatch.setattr(prepared, "LARGE", 1)
    forward, backward = implementation("expert_mlp", "_train_cuda"), implementation("expert_mlp")
    needs = [True, True, False, False, True, True, True, True, False, False]
    for seed in range(2):
        args = list(block(router_weight="post_down", seed=seed, bias=False).args())
        y, *kept = both(forward, tuple(args), f"forward {seed}")
        both(backward, (torch.ones_like(y), *kept, *args, *[None] * (18 - len(args)), needs), f"backward {seed}")
    for call in (forward, backward):
        (found,) = call.table.values()
        held, most = set(), 0
        for step in found.steps:
            assert not held & set(step.fresh)
            held |= set(step.fresh)
            most = max(most, len(held))
            held -= set(step.over)
        results = {one if isinstance(one, int) else one.index for one in found.result}
        assert results <= held and most < len(found.made) - 3 * (call is backward)
        assert [step.end for step in found.steps][:-1] == [step.first for step in found.steps][1:]
        given = tuple(args) if call is forward else (torch.ones_like(y), *kept, *args, *[None] * (18 - len(args)), needs)
        assert {i for i, t in enumerate(found.repeat(given)) if t is not None} == held, "held to the end"


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_is_repeated_on_the_device_of_its_tensors(elsewhere, name):  # noqa: F811
    call, needs = implementation(name), [True, *[False] * (COUNTS[name] - 1)]
    for seed, current in enumerate((0xC0, elsewhere.home, 0xC0)):
        elsewhere.context = current
        args = backward_args(name, seed, needs)
        with elsewhere.device_of(args[0]):
            want = call.__wrapped__(*args)
        compare(call(*args), want, f"call {seed}")
    assert len(call.table) == 1 and {seen.context for seen in elsewhere.launches} == {elsewhere.home}


def test_results_of_every_kind():
    """As it was made, a view of it, its cast, a view of that; nothing else."""
    with driver.recording(()) as tape:
        made = driver.empty((2, 6), torch.float32, torch.device("cpu")).copy_(torch.arange(12).view(2, 6))
        cast = driver.cast(made, torch.bfloat16)
        same = driver.cast(made, torch.float32)
    assert same is made
    given = (made, made.view(3, 4), made[1], cast, cast.view(12))
    found = [prepared._result(tape, t) for t in given]
    fresh = made + 100
    for one, t in zip(found, given):
        again = fresh if isinstance(one, int) else one.of((fresh,))
        assert again.dtype == t.dtype and torch.equal(again.float(), t.float() + 100)
    assert prepared._result(tape, made + 1) is None and prepared._result(tape, made.to(torch.float16)) is None


# --- on one that is ---


def repeats(step):
    """step()'s gradients: of the first call, which records, and of the second; and what the ordinary way gives."""
    prepared.forget()
    first, second = step(), step()
    held = sum(len(table) for table in prepared._tables)
    prepared.forget()
    return first, second, step(), held


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 70, 700])
def test_training_steps_are_repeated(tokens):
    """Through autograd: delta and linear with frozen bases, and a layer of experts with the router's gradient."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    x, w, a, b = randn(tokens, 256), randn(512, 256) / 16, randn(3, 16, 256) / 16, randn(3, 512, 16)
    ids, scalings = torch.arange(tokens, device="cuda", dtype=torch.int32) % 4 - 1, torch.rand(3, device="cuda") + 0.5
    experts, k, hidden, inner = 4, 2, 256, 128
    topk = torch.randint(0, experts, (tokens, k), generator=generator, device="cuda")
    routers = torch.rand(tokens, k, device="cuda").bfloat16()
    w13, w2 = randn(experts, 2 * inner, hidden) / 16, randn(experts, hidden, inner) / 16
    factors = [randn(3, experts, 16, hidden) / 16, randn(3, experts, 2 * inner, 16), randn(3, experts, 16, inner) / 16, randn(3, experts, hidden, 16)]

    def grads(y, leaves):
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    def step_dense(op, *base):
        leaves = [t.detach().requires_grad_() for t in (x, a, b)]
        return grads(op(leaves[0], *base, *leaves[1:], ids, scalings), leaves)

    def step_experts(placement, dtype=torch.bfloat16):
        leaves = [t.detach().requires_grad_() for t in (x, routers, *[t.to(dtype) for t in factors])]
        y = glo.expert_mlp(leaves[0], topk, leaves[1], w13, w2, *leaves[2:], ids, scalings, router_weight=placement)
        return grads(y, leaves)

    steps = [lambda: step_dense(glo.delta), lambda: step_dense(glo.linear, w)]
    steps += [lambda placement=placement: step_experts(placement) for placement in PLACEMENTS]
    steps.append(lambda: step_experts("pre_down", torch.float32))
    for i, step in enumerate(steps):
        first, second, ordinary, held = repeats(step)
        assert held == 2, "forward and backward"
        compare(second, first, f"step {i}, recorded")
        compare(second, ordinary, f"step {i}, the ordinary way")
