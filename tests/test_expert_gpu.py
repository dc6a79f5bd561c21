"""The registered expert ops on a GPU: bits and gradients of the reference, no synchronisation, graphs that follow the routing."""

from __future__ import annotations

import pytest
import torch
from expert_cases import (
    ACTIVATIONS,
    DTYPES,
    FACTORS,
    PLACEMENTS,
    WEIGHTS,
    Mlp,
    assert_bits,
    assert_equal,
    build_mlp,
    build_routes,
)

import grouped_lora_ops as gl

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DELTA_GRADS = ("x", "a", "b", "base", "row_weights")
LINEAR_GRADS = ("x", "weight", "a", "b", "bias", "row_weights")
LORA = ("gate_up_a", "gate_up_b", "down_a", "down_b")


def to_gpu(c):
    """The same arguments there, in the same storage order."""
    return type(c)(**{n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in c.__dict__.items()})


def compare(c, names, run, what=""):
    """Output and gradients of a case whose sums are all exact: the GPU's bits are the reference's."""
    here, there = c.leaves(names), to_gpu(c).leaves(names)
    y, z = run(here), run(there)
    assert_equal(z.detach().cpu(), y.detach(), f"{what} y")
    grad = torch.randint(-2, 3, y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    y.backward(grad), z.backward(grad.to(DEVICE))
    for name in names:
        if getattr(c, name) is not None:
            assert_equal(getattr(there, name).grad.cpu(), getattr(here, name).grad, f"{what} {name}")
    return z


@pytest.mark.parametrize("tokens", [1, 7, 150])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", [f for f in FACTORS if f != "both shared"])
def test_projections(factors, dtype, tokens):
    """Few routes, whose ids the kernels read themselves, and many, which are sorted by a plan; poisoned neighbours."""
    i = list(FACTORS).index(factors) + list(DTYPES).index(dtype)
    c = build_routes(
        factors, DTYPES[dtype], tokens=tokens, features=72, out=48, ranks=[5, 0, 3], per_route=i % 2 == 1, seed=i,
        weights=WEIGHTS[i % 4], experts=6,
    )  # fmt: skip
    z = compare(c, DELTA_GRADS, lambda c: c.delta(gl.expert_delta), "delta")
    assert "expert_delta" in z.grad_fn.name()
    z = compare(c, LINEAR_GRADS, lambda c: c.linear(gl.expert_linear), "linear")
    assert "expert_linear" in z.grad_fn.name()
    compare(c, LINEAR_GRADS[:2], lambda c: c.linear(gl.expert_linear, lora=False, bias=False, weighted=False), "base")


@pytest.mark.parametrize("tokens", [7, 150])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("factors", ["per expert", "an A each", "both shared", "one A, B in halves"])
def test_mlp(factors, placement, dtype, tokens):
    """relu2 of small integers: all stages are known bit for bit, forward and backward."""
    sizes = dict(hidden=24, inner=16, rank=3, integer=1, tokens=tokens, experts=5, top_k=3)
    c = build_mlp(DTYPES[dtype], activation="relu2", placement=placement, factors=factors, bias=True, **sizes)
    c.scalings.copy_(torch.tensor([1.0, -1.0]))
    z = compare(c, Mlp.TENSORS, lambda c: c.call(gl.expert_mlp))
    assert "expert_mlp" in z.grad_fn.name()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zero_adapters_are_the_call_without_lora(activation, placement, dtype):
    """R1 on a GPU: B = 0, adapter −1 beside NaN; forward and input gradient, bit for bit; and near the reference."""
    for tokens in (5, 100):
        i = list(ACTIVATIONS).index(activation) + PLACEMENTS.index(placement)
        c = build_mlp(
            DTYPES[dtype], tokens=tokens, top_k=3, hidden=64, inner=32, rank=8, activation=activation, placement=placement,
            bias=i % 2 == 0, weights=WEIGHTS[i % 4],
        )  # fmt: skip
        there = to_gpu(c)
        zero = there.map(torch.zeros_like, ("gate_up_b", "down_b"))
        broken = there.map(lambda t: torch.full_like(t, float("nan")), LORA)
        broken = broken.with_(adapter_ids=torch.full_like(there.adapter_ids, -1))
        grad = torch.randn(c.x.shape, generator=torch.Generator().manual_seed(0)).to(c.x.dtype).to(DEVICE)
        results = []
        for case in (there.base(), zero, broken):
            case = case.leaves(("x", "topk_weights"))
            y = case.call(gl.expert_mlp)
            y.backward(grad)
            results.append((y.detach(), case.x.grad, case.topk_weights.grad))
        for other in results[1:]:
            for got, want in zip(other, results[0]):
                assert_equal(got, want)
        want = c.base().call(gl.expert_mlp)
        tolerance = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}[dtype]
        torch.testing.assert_close(results[0][0].cpu(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_near_float64(activation):
    """Of all ten, with adapters, against the CPU's in float64."""
    for placement in PLACEMENTS:
        c = build_mlp(
            torch.float32, tokens=60, top_k=3, hidden=48, inner=24, rank=6, activation=activation, placement=placement, bias=True,
            factors="an A each",
        )  # fmt: skip
        there, exact = to_gpu(c).leaves(), c.double().leaves()
        grad = torch.randn(c.x.shape, generator=torch.Generator().manual_seed(0))
        there.call(gl.expert_mlp).backward(grad.to(DEVICE))
        exact.call(gl.expert_mlp).backward(grad.double())
        for name in Mlp.TENSORS:
            got, want = getattr(there, name).grad.cpu().double(), getattr(exact, name).grad
            assert float((got - want).norm()) <= 1e-4 * float(want.norm()), (name, placement)


def everything(tokens: int):
    """(call, the ids it follows) for every op, forward and backward."""
    c = to_gpu(build_mlp(torch.bfloat16, tokens=tokens, top_k=3, hidden=64, inner=32, rank=8, bias=True)).leaves()
    r = to_gpu(build_routes("an A each", torch.bfloat16, tokens=tokens, features=64, out=64, rank=8, poison=False, slots=2))
    r.ids, r.adapter_ids = c.topk_ids, c.adapter_ids
    d, l = r.leaves(DELTA_GRADS), r.leaves(LINEAR_GRADS)

    def grads(y, case, names):
        return [y, *torch.autograd.grad(y.float().square().sum(), [getattr(case, n) for n in names])]

    return {
        "expert_plan": lambda: [gl.expert_plan(c.topk_ids, c.adapter_ids, 4, 2)],
        "expert_delta": lambda: grads(d.delta(gl.expert_delta), d, DELTA_GRADS),
        "expert_linear": lambda: grads(l.linear(gl.expert_linear), l, LINEAR_GRADS),
        "expert_mlp": lambda: grads(c.call(gl.expert_mlp), c, Mlp.TENSORS),
        "with a plan": lambda: grads(
            c.call(gl.expert_mlp, plan=gl.expert_plan(c.topk_ids, c.adapter_ids, 4, 2)), c, Mlp.TENSORS
        ),
    }, (c.topk_ids, c.adapter_ids)


@pytest.mark.parametrize("tokens", [5, 200])
def test_no_call_synchronises(tokens):
    calls, _ = everything(tokens)
    for call in calls.values():  # compiles
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [5, 200])
def test_a_graph_follows_the_routing(tokens):
    """Captured with every route masked; replayed with other experts and adapters: the bits of an eager call."""
    calls, (ids, adapters) = everything(tokens)
    g = torch.Generator().manual_seed(1)
    routings = [(torch.randint(-1, 5, ids.shape, generator=g), torch.randint(-1, 2, adapters.shape, generator=g)) for _ in range(3)]
    routings += [(torch.full(ids.shape, 3), torch.ones(adapters.shape)), (torch.full(ids.shape, -1), torch.zeros(adapters.shape))]
    for name, call in calls.items():
        call()
        ids.fill_(-1)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = call()
        torch.cuda.empty_cache()
        for experts, slots in routings:
            ids.copy_(experts), adapters.copy_(slots)
            graph.replay()
            got = [t.detach().clone() for t in results]
            for mine, eager in zip(got, call()):
                assert_bits(mine, eager.detach(), name)


@pytest.mark.parametrize("tokens", [5, 200])
def test_stray_ids_touch_nothing(tokens):
    """Ids far out of range count as masked; BUGS.md 3–5."""
    c = to_gpu(build_mlp(torch.bfloat16, tokens=tokens, top_k=3, hidden=64, inner=32, rank=8, bias=True))
    stray = (torch.arange(tokens * 3, device=DEVICE) % 4 == 1).view(tokens, 3)
    masked = c.with_(topk_ids=torch.where(stray, -1, c.topk_ids))
    wild = torch.tensor([4, 5, 2**40, -(2**40), -2, 10**9], device=DEVICE)[torch.arange(tokens * 3, device=DEVICE) % 6]
    c = c.with_(topk_ids=torch.where(stray, wild.view(tokens, 3), c.topk_ids))
    for case in (masked, c):
        leaf = case.leaves()
        case.y = leaf.call(gl.expert_mlp)
        case.y.float().sum().backward()
        case.g = leaf.grads()
    assert_bits(c.y.detach(), masked.y.detach())
    for name, grad in masked.g.items():
        assert_equal(c.g[name], grad, name)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ids", [torch.empty(0, 2).long(), torch.full((5, 2), -1), torch.full((200, 2), 4)], ids=["T = 0", "all -1", "all E"])
def test_nothing_routed(ids, placement):
    c = to_gpu(build_mlp(torch.bfloat16, ids=ids, bias=True, placement=placement, factors="B shared", hidden=64, inner=32))
    for name in Mlp.TENSORS:
        getattr(c, name).fill_(float("nan"))
    c = c.leaves()
    y = c.call(gl.expert_mlp)
    assert_equal(y.detach(), torch.zeros_like(c.x))
    y.sum().backward()
    for name in Mlp.TENSORS:
        assert_equal(getattr(c, name).grad, torch.zeros_like(getattr(c, name)), name)


def test_a_rows_bits_are_its_own():
    """expert_delta, y and dx of a route: whatever T, its place, the other routes' adapters, with or without a plan."""
    c = to_gpu(build_routes("an A each", torch.bfloat16, tokens=300, features=512, out=256, rank=16, integer=False, poison=False, per_route=True))

    def run(tokens, plan=None, adapters=None):
        routes = 3 * len(tokens)
        rows = (tokens[:, None] * 3 + torch.arange(3, device=DEVICE)).flatten()
        x = c.x[rows].requires_grad_()
        ids, slots = c.ids[tokens], c.adapter_ids[tokens] if adapters is None else adapters
        plan = None if plan is None else gl.expert_plan(ids, slots, 4, 3)
        y = gl.expert_delta(x, c.a, c.b, ids, slots, c.scalings, base=c.base[rows], row_weights=c.row_weights[rows], plan=plan)
        (dx,) = torch.autograd.grad(y, x, c.grad_y[rows])
        return y.detach().view(routes // 3, -1), dx.view(routes // 3, -1)

    every = torch.arange(300, device=DEVICE)
    whole = run(every)
    for t in (0, 17, 299):
        for got, want in zip(run(every[t : t + 1]), whole):
            assert_bits(got[0], want[t])
    for tokens in (every.flip(0), every[100:140], every[::7]):
        for plan in (None, True):
            for got, want in zip(run(tokens, plan), whole):
                assert_bits(got, want[tokens])
    lonely = torch.full_like(c.adapter_ids, -1)
    lonely[17] = c.adapter_ids[17]
    for got, want in zip(run(every, None, lonely), whole):
        assert_bits(got[17], want[17])


def test_compiled_on_a_gpu():
    c = to_gpu(build_mlp(torch.bfloat16, tokens=40, top_k=3, hidden=64, inner=32, rank=8)).leaves()

    def step(x, weights, ids):
        return gl.expert_mlp(x, ids, weights, *c.args[3:])

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    results = []
    for run in (step, compiled):
        y = run(c.x, c.topk_weights, c.topk_ids)
        y.float().square().sum().backward()
        results.append((y.detach(), c.grads()))
        for name in Mlp.TENSORS:
            if getattr(c, name) is not None:
                getattr(c, name).grad = None
    assert_bits(results[1][0], results[0][0])
    for name, grad in results[0][1].items():
        if grad is not None:
            assert_equal(results[1][1][name], grad, name)
