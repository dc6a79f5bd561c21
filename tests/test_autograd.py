"""What every op promises to autograd and the compiler, on the CPU ops (a GPU runs the same registrations)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from cases import AsTraced

import grouped_lora_ops as gl

T, G, D, N, R, L = 7, 2, 12, 10, 3, 3
IDS = torch.tensor([2, -1, 0, 0, 2, -1, 2])  # slot 1 has no rows
SCALINGS = torch.tensor([0.5, 3.0, -1.25])
RANKS = torch.tensor([3, 2, 1], dtype=torch.int32)

FORMS = {
    "plain": ((T, D), (L, R, D), (L, N, R), None, (T, N)),
    "wo_a": ((T, G, D), (L, R, D), (L, G, N, R), None, (T, G, N)),
    "own_a": ((T, G, D), (L, G, R, D), (L, G, N, R), None, (T, G, N)),
    "shared_input": ((T, D), (L, G, R, D), (L, G, N, R), None, (T, G, N)),
    "shared_h": ((T, D), (L, R, D), (L, G, N, R), None, (T, G, N)),
    "slices": ((T, D), (L, G, R, D), (L, 3 + 7, R), [3, 7], (T, 10)),
}


def tensors(form, dtype=torch.float64, tokens=T):
    x, a, b, sizes, y = FORMS[form]
    g = torch.Generator().manual_seed(0)
    x, a, b, y = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in (x, a, b, y))
    return x[:tokens], a, b, y[:tokens], sizes


@pytest.mark.parametrize("ranks", [None, RANKS], ids=["full", "ranks"])
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form, ranks):
    x, a, b, base, sizes = tensors(form)
    for t in (x, a, b, base):
        t.requires_grad_()

    def delta(x, a, b, base):
        return gl.delta(x, a, b, IDS, SCALINGS, base=base, out_sizes=sizes, ranks=ranks)

    assert torch.autograd.gradcheck(delta, (x, a, b, base))
    assert torch.autograd.gradcheck(lambda x, a: gl.shrink(x, a, IDS, ranks=ranks), (x, a))
    h = gl.shrink(x, a, IDS, ranks=ranks).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, b, base: gl.expand(h, b, IDS, SCALINGS, base=base, out_sizes=sizes, ranks=ranks), (h, b, base)
    )


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_gradients_only_where_asked_for(wanted, with_base):
    x, a, b, base, _ = tensors("wo_a", torch.float32)
    leaves = [t.clone().requires_grad_(want) for t, want in zip((x, a, b), wanted)]
    y = gl.delta(*leaves, IDS, SCALINGS, **({"base": base} if with_base else {}))
    assert y.requires_grad == any(wanted)
    if not any(wanted):
        return
    y.backward(torch.ones_like(y))
    everything = [t.clone().requires_grad_() for t in (x, a, b)]
    gl.delta(*everything, IDS, SCALINGS).backward(torch.ones_like(y))
    for leaf, want, full in zip(leaves, wanted, everything):
        assert torch.equal(leaf.grad, full.grad) if want else leaf.grad is None


@pytest.mark.parametrize("op", ["delta", "shrink", "expand"])
@pytest.mark.parametrize("ids", [torch.empty(0, dtype=torch.int64), torch.full((T,), -1)], ids=["no rows", "no adapter"])
def test_empty_batches_stay_connected(op, ids):
    x, a, b, base, _ = tensors("wo_a", torch.bfloat16, tokens=len(ids))
    x.fill_(float("nan"))
    a.fill_(float("inf"))
    x, a, b, base = (t.requires_grad_() for t in (x, a, b, base))
    h = torch.zeros(len(ids), G, R, requires_grad=True)
    y, leaves = {
        "delta": lambda: (gl.delta(x, a, b, ids, SCALINGS, base=base), (x, a, b)),
        "shrink": lambda: (gl.shrink(x, a, ids), (x, a)),
        "expand": lambda: (gl.expand(h, b, ids, SCALINGS, base=base), (h, b)),
    }[op]()
    assert y.requires_grad
    assert torch.equal(y, torch.zeros_like(y) if op == "shrink" else base)
    y.sum().backward()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_second_derivatives_raise():
    x, a, b, _, _ = tensors("plain", torch.float32)
    x.requires_grad_()
    y = gl.delta(x, a, b, IDS, SCALINGS)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_lora.delta: second derivatives are not supported"):
        dx.sum().backward()


def test_forward_mode_raises_and_leaves_what_has_no_tangent():
    x, a, b, base, _ = tensors("plain", torch.float32)
    calls = {
        "delta": lambda x: gl.delta(x, a, b, IDS, SCALINGS),
        "linear": lambda x: gl.linear(x, torch.ones(N, D), a, b, IDS, SCALINGS),
        "shrink": lambda x: gl.shrink(x, a, IDS),
    }
    for name, call in calls.items():
        sentence = f"grouped_lora.{name}: forward-mode derivatives are not supported; x has a tangent"
        with pytest.raises(RuntimeError, match=sentence):
            torch.func.jvp(call, (x,), (x,))
        with torch.autograd.forward_ad.dual_level():
            with pytest.raises(RuntimeError, match=sentence):
                call(torch.autograd.forward_ad.make_dual(x, x))
            assert torch.equal(call(x), call(x.clone()))


@pytest.mark.parametrize("ids", [IDS, torch.full((T,), -1)], ids=["mixed", "none"])
@pytest.mark.parametrize("form", ["plain", "wo_a", "slices"])
def test_opcheck(form, ids):
    ops = torch.ops.grouped_lora
    x, a, b, base, sizes = tensors(form, torch.float32)
    h = gl.shrink(x, a, ids)
    out = base.clone()
    torch.library.opcheck(ops.delta_, (out, x, a, b, ids, SCALINGS, sizes, RANKS))
    torch.library.opcheck(ops.expand_, (out, h, b, ids, SCALINGS, sizes, RANKS))
    torch.library.opcheck(ops.plan, (ids, L))
    x, a, b, base, h = (t.detach().requires_grad_() for t in (x, a, b, base, h))
    for plan in (None, gl.plan(ids, L)):
        torch.library.opcheck(ops.delta, (x, a, b, ids, SCALINGS, base, sizes, RANKS, plan))
        torch.library.opcheck(ops.shrink, (x, a, ids, RANKS, plan))
        torch.library.opcheck(ops.expand, (h, b, ids, SCALINGS, base, sizes, None, plan))


@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients_have_the_strides_that_a_compiler_is_told(form):
    x, a, b, base, sizes = tensors(form, torch.float32)
    weight = torch.randn(*base.shape[1:], D)
    bias = base[0].clone()
    dense = x, a, b, base, weight, bias
    swapped = [t.mT.contiguous().mT for t in dense[:-1]]
    with AsTraced() as traced:
        for x, a, b, base, weight in (dense[:-1], swapped):
            x, a, b, base, weight, bias = (t.detach().requires_grad_() for t in (x, a, b, base, weight, bias))
            h = gl.shrink(x, a, IDS)
            for y in (
                gl.delta(x, a, b, IDS, SCALINGS, base=base, out_sizes=sizes),
                gl.expand(h, b, IDS, SCALINGS, base=base, out_sizes=sizes),
                gl.linear(x, weight, a, b, IDS, SCALINGS, bias=bias, out_sizes=sizes),
            ):
                y.backward(torch.ones_like(y), retain_graph=True)
    ops = {"delta", "expand", "linear", "shrink"}
    assert traced.seen == ops | {f"{op}_backward" for op in ops}


@pytest.mark.parametrize("zero", ["rank", "tokens", "scaling"])
def test_opcheck_of_nothing(zero):
    x, a, b, base, _ = tensors("wo_a", torch.float32, tokens=0 if zero == "tokens" else T)
    ids = IDS[: x.shape[0]]
    if zero == "rank":
        a, b = a[:, :0], b[..., :0]
    scalings = torch.zeros(L) if zero == "scaling" else SCALINGS
    x, a, b, base = (t.detach().requires_grad_() for t in (x, a, b, base))
    torch.library.opcheck(torch.ops.grouped_lora.delta, (x, a, b, ids, scalings, base))
    y = gl.delta(x, a, b, ids, scalings, base=base)
    assert torch.equal(y, base)
    assert y.data_ptr() != base.data_ptr() or y.numel() == 0


def test_compile_traces_whole_and_once_for_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, a, b, ids, base):
        return gl.delta(x, a, b, ids, SCALINGS, base=base * 2).square().sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    _, a, b, _, _ = tensors("wo_a", torch.float32)
    for tokens in (17, 2, 3, 64, 65):  # 17 first: a T that equals another size would be guarded to go on equalling it
        x, base = torch.randn(tokens, G, D), torch.randn(tokens, G, N)
        ids = torch.arange(tokens) % (L + 1) - 1
        grads = []
        for run in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, a, b)]
            run(*leaves, ids, base).backward()
            grads.append([t.grad for t in leaves])
        assert all(torch.equal(u, v) for u, v in zip(*grads))
    assert counter.frame_count == 1
    for tokens in (1, 0):
        ids = torch.zeros(tokens, dtype=torch.int64)
        compiled(torch.randn(tokens, G, D), a, b, ids, torch.randn(tokens, G, N))
    assert counter.frame_count <= 3


def test_compile_plans_and_ops_in_place_for_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, a, b, ids, base):
        plan = gl.plan(ids, L)
        h = gl.shrink(x, a, ids, plan=plan)
        y = gl.expand(h, b, ids, SCALINGS, base=base, plan=plan)
        out = y * 2
        gl.expand_(out, h, b, ids, SCALINGS, plan=plan)
        gl.delta_(out, x, a, b, ids, SCALINGS, plan=plan)
        return y, out, gl.expert_plan(ids[:, None], ids, L, L)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    _, a, b, _, _ = tensors("wo_a", torch.float32)
    for tokens in (17, 2, 3, 64, 200):
        args = torch.randn(tokens, G, D), a, b, torch.arange(tokens) % (L + 1) - 1, torch.randn(tokens, G, N)
        assert all(torch.equal(got, want) for got, want in zip(compiled(*args), step(*args)))
    assert counter.frame_count == 1


def test_autocast_casts_and_gradients_come_back_in_their_own_dtype():
    x, a, b, base, _ = tensors("wo_a", torch.float32)
    leaves = [t.requires_grad_() for t in (x, a, b, base)]
    with torch.autocast("cpu", torch.bfloat16):
        y = gl.delta(x, a, b, IDS, SCALINGS, base=base)
    assert y.dtype == torch.bfloat16
    want = gl.delta(*[t.detach().bfloat16() for t in (x, a, b)], IDS, SCALINGS, base=base.detach().bfloat16())
    assert torch.equal(y, want)
    y.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)
    again = [t.detach().clone().requires_grad_() for t in leaves]
    with torch.autocast("cpu", torch.bfloat16):  # a backward inside: its float32 products are not narrowed
        gl.delta(*again[:3], IDS, SCALINGS, base=again[3]).float().sum().backward()
    assert all(torch.equal(t.grad, u.grad) for t, u in zip(leaves, again))
    out = base.detach().clone()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        gl.delta_(out, x, a, b, IDS, SCALINGS)
    assert torch.equal(out, gl.delta(x, a, b, IDS, SCALINGS, base=base))


def test_in_place_ops_bump_the_version_and_refuse_gradients():
    x, a, b, out, _ = tensors("wo_a", torch.float32)
    version = out._version
    gl.delta_(out, x, a, b, IDS, SCALINGS)
    assert out._version > version
    before = out.clone()
    with pytest.raises(ValueError, match=r"grouped_lora.delta_: lora_a must not require grad.*grouped_lora.delta with base=out"):
        gl.delta_(out, x, a.requires_grad_(), b, IDS, SCALINGS)
    assert torch.equal(out, before)


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, x, a, b, ids, base):
            return gl.delta(x, a, b, ids, SCALINGS, base=base)

    x, a, b, base, _ = tensors("wo_a", torch.float32)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = {"x": {0: tokens}, "a": None, "b": None, "ids": {0: tokens}, "base": {0: tokens}}
    program = torch.export.export(Layer(), (x, a, b, IDS, base), dynamic_shapes=shapes)
    short = (x[:4], a, b, IDS[:4], base[:4])
    assert torch.equal(program.module()(*short), Layer()(*short))


def test_activation_checkpointing():
    x, a, b, base, _ = tensors("wo_a", torch.float32)
    grads = []
    for checkpointed in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, a, b, base)]

        def run(x, a, b, base):
            return gl.delta(x, a, b, IDS, SCALINGS, base=base)

        y = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False) if checkpointed else run(*leaves)
        y.square().sum().backward()
        grads.append([t.grad for t in leaves])
    assert all(torch.equal(u, v) for u, v in zip(*grads))
