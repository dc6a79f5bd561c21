"""What the expert ops promise to autograd and the compiler, on the CPU ops (a GPU runs the same registrations)."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from cases import AsTraced
from expert_cases import ACTIVATIONS, FACTORS, PLACEMENTS, Mlp, assert_bits, assert_equal, build_mlp, build_routes
from torch.utils._python_dispatch import TorchDispatchMode

import grouped_lora_ops as gl

OPS = torch.ops.grouped_lora
IDS = torch.tensor([[0, 2], [-1, 4], [2, 2], [3, -1], [4, 0]])
ADAPTERS = torch.tensor([1, 0, 0, -1, 1])


def mlp(**kw) -> Mlp:
    kw = {"ids": IDS, "adapter_ids": ADAPTERS, "bias": True, "hidden": 5, "inner": 4, "rank": 3, **kw}
    return build_mlp(kw.pop("dtype", torch.float64), **kw)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, placement):
    i = list(ACTIVATIONS).index(activation) + PLACEMENTS.index(placement)
    c = mlp(activation=activation, placement=placement, factors=list(FACTORS)[i % 8], seed=1)

    def run(*tensors):
        return c.with_(**dict(zip(Mlp.TENSORS, tensors))).call(gl.expert_mlp)

    leaves = c.leaves()
    assert torch.autograd.gradcheck(run, tuple(getattr(leaves, n) for n in Mlp.TENSORS), fast_mode=i > 0)


@pytest.mark.parametrize("per_route", [False, True], ids=["tokens", "routes"])
@pytest.mark.parametrize("factors", ["per expert", "an A each, shared", "one A, B in halves"])
def test_gradcheck_of_the_projections(factors, per_route):
    c = build_routes(
        factors, torch.float64, ids=IDS, adapter_ids=ADAPTERS, features=5, out=4, rank=3, ranks=[3, 2, 1], per_route=per_route,
        integer=False, poison=False, weights="halves",
    )  # fmt: skip

    def delta(x, a, b, base, w):
        return gl.expert_delta(x, a, b, IDS, ADAPTERS, c.scalings, base=base, row_weights=w, ranks=c.ranks)

    def linear(x, weight, a, b, bias, w):
        return gl.expert_linear(x, weight, a, b, IDS, ADAPTERS, c.scalings, bias=bias, row_weights=w, ranks=c.ranks)

    for run, names in (
        (delta, ("x", "a", "b", "base", "row_weights")),
        (linear, ("x", "weight", "a", "b", "bias", "row_weights")),
    ):
        leaves = c.leaves(names)
        assert torch.autograd.gradcheck(run, tuple(getattr(leaves, n) for n in names))


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "parent"])
@pytest.mark.parametrize("ids", [IDS, torch.full((5, 2), -1), torch.empty(0, 2, dtype=torch.int64)], ids=["mixed", "none", "T = 0"])
def test_opcheck(ids, lora):
    c = mlp(dtype=torch.float32, ids=ids, adapter_ids=ADAPTERS[: len(ids)], ranks=[3, 2], placement="post_down")
    c = (c if lora else c.base()).leaves()
    plan = gl.expert_plan(ids, c.adapter_ids, 4, 2)
    for given in (None, plan):
        torch.library.opcheck(OPS.expert_mlp, (*c.all_args, given))
        torch.library.opcheck(OPS.expert_mlp_train, (*c.all_args, given))
    r = build_routes("B shared", torch.float32, ids=ids, adapter_ids=ADAPTERS[: len(ids)], poison=False, slots=2, ranks=[3, 2])
    r = r.leaves(("x", "weight", "a", "b", "base", "bias", "row_weights"))
    torch.library.opcheck(OPS.expert_delta, (r.x, r.a, r.b, ids, r.adapter_ids, r.scalings, r.base, r.row_weights, r.ranks, None))
    pair = (r.a, r.b) if lora else (None, None)
    torch.library.opcheck(
        OPS.expert_linear, (r.x, r.weight, *pair, ids, r.adapter_ids, r.scalings, r.bias, r.row_weights, r.ranks, None)
    )


@pytest.mark.parametrize("factors", FACTORS)
def test_results_and_gradients_have_the_strides_that_a_compiler_is_told(factors):
    names = ("x", "weight", "a", "b", "base", "bias", "row_weights")
    kw = dict(ids=IDS, adapter_ids=ADAPTERS, poison=False, experts=5)
    with AsTraced() as traced:
        for placement in PLACEMENTS:
            mlp(dtype=torch.float32, factors=factors, placement=placement).leaves().call(gl.expert_mlp).sum().backward()
        for per_route in (False, True):
            r = build_routes(factors, torch.float32, per_route=per_route, **kw).leaves(names)
            args = r.a, r.b, IDS, ADAPTERS, r.scalings
            gl.expert_linear(r.x, r.weight, *args, bias=r.bias, row_weights=r.row_weights).sum().backward()
            if factors != "both shared":  # the number of experts is in neither factor
                gl.expert_delta(r.x, *args, base=r.base, row_weights=r.row_weights).sum().backward()
    assert {"expert_mlp_train", "expert_mlp_backward", "expert_linear", "expert_linear_backward"} <= traced.seen


def test_the_op_called_directly_has_the_same_bits_and_gradients():
    """It saves no h1 and computes it anew."""
    for placement in PLACEMENTS:
        ours, direct = (mlp(dtype=torch.bfloat16, placement=placement).leaves() for _ in range(2))
        y, z = ours.call(gl.expert_mlp), OPS.expert_mlp(*direct.all_args)
        assert_bits(y.detach(), z.detach())
        y.float().square().sum().backward(), z.float().square().sum().backward()
        for name in Mlp.TENSORS:
            assert_equal(getattr(direct, name).grad, getattr(ours, name).grad, name)


def test_what_is_saved():
    """The arguments and one tensor [T·K, 2I], as the docstring says."""
    c = mlp(dtype=torch.bfloat16, activation="swiglu clamped").leaves()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        c.call(gl.expert_mlp)
    inputs = {id(t) for t in c.all_args if isinstance(t, torch.Tensor)}
    of_its_own = [t for t in saved if id(t) not in inputs and t.data_ptr() not in {getattr(c, n).data_ptr() for n in Mlp.TENSORS}]
    assert [tuple(t.shape) for t in of_its_own if t.is_floating_point() and t.numel() > 2] == [(10, 8)]
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("saved"), lambda t: t):
        c.call(gl.expert_mlp)


def test_second_derivatives_raise():
    c = mlp(dtype=torch.float32).leaves(("x",))
    (dx,) = torch.autograd.grad(c.call(gl.expert_mlp).square().sum(), c.x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_lora.expert_mlp: second derivatives are not supported"):
        dx.sum().backward()
    for op in ("delta", "linear"):
        r = build_routes("per expert", torch.float32, poison=False).leaves(("x",))
        (dx,) = torch.autograd.grad(getattr(r, op)(getattr(gl, f"expert_{op}")).square().sum(), r.x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"grouped_lora.expert_{op}: second derivatives are not supported"):
            dx.sum().backward()


def compiles_once(step, inputs, tensors):
    """`step(*inputs(T))` compiled: one graph for every T ≥ 2, the same results and gradients of `tensors`."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (17, 2, 3, 64, 65):  # 17 first: a T that equals another size would be guarded to go on equalling it
        results = []
        for run in (step, compiled):
            args = inputs(tokens)
            leaves = [args[i] for i in tensors]
            for t in leaves:
                t.requires_grad_()
                t.grad = None
            y = run(*args)
            y.float().square().sum().backward()
            results.append((y.detach(), *[t.grad for t in leaves]))
        for a, b in zip(*results):
            assert_equal(b, a)
    assert counter.frame_count == 1
    for tokens in (1, 0):
        compiled(*inputs(tokens))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_compile_the_mlp(placement):
    def inputs(tokens):
        c = build_mlp(torch.bfloat16, tokens=tokens, top_k=3, experts=5, inner=11, bias=True, placement=placement, factors="an A each")
        return [*c.args, c.b_gate_up, c.b_down, gl.expert_plan(c.topk_ids, c.adapter_ids, 5, 2)]

    def step(*args):
        *args, b_gate_up, b_down, plan = args
        return gl.expert_mlp(*args, b_gate_up=b_gate_up, b_down=b_down, router_weight=placement, plan=plan)

    compiles_once(step, inputs, (0, 2, 5, 6, 7, 8, 12))


@pytest.mark.parametrize("per_route", [False, True], ids=["tokens", "routes"])
def test_compile_the_projections(per_route):
    def inputs(tokens):
        c = build_routes("B shared", torch.bfloat16, tokens=tokens, per_route=per_route, experts=5, features=41, poison=False)
        return [c.x, c.weight, c.a, c.b, c.base, c.bias, c.row_weights, c.ids, c.adapter_ids, c.scalings]

    def step(x, weight, a, b, base, bias, w, ids, adapters, scalings):
        y = gl.expert_linear(x, weight, a, b, ids, adapters, scalings, bias=bias, row_weights=w)
        return y + gl.expert_delta(x, a, b, ids, adapters, scalings, base=base, row_weights=w)

    compiles_once(step, inputs, (0, 1, 2, 3, 4, 5, 6))


def test_compile_without_gradients_and_export():
    c = build_mlp(torch.float32, tokens=9, top_k=3, inner=11)

    class Layer(torch.nn.Module):
        def forward(self, x, ids, weights, adapters):
            return gl.expert_mlp(x, ids, weights, *c.args[3:9], adapters, c.scalings)

    args = (c.x, c.topk_ids, c.topk_weights, c.adapter_ids)
    with torch.no_grad():
        compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
        assert_bits(compiled(*args), Layer()(*args))
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        program = torch.export.export(Layer(), args, dynamic_shapes=tuple({0: tokens} for _ in args))
        short = tuple(t[:4] for t in args)
        torch.testing.assert_close(program.module()(*short), Layer()(*short))


def test_autocast():
    """Activations, weights and narrow tensors are cast; float32 factors, biases and router weights keep their bits."""
    c = build_mlp(torch.float32, bias=True, tokens=20).leaves()
    with torch.autocast("cpu", torch.bfloat16):
        y = c.call(gl.expert_mlp)
        r = build_routes("per expert", torch.float32, poison=False, integer=False)
        delta, linear = r.delta(gl.expert_delta), r.linear(gl.expert_linear)
    assert y.dtype == delta.dtype == linear.dtype == torch.bfloat16
    narrow = c.map(lambda t: t.detach().bfloat16(), ("x", "w_gate_up", "w_down"))
    assert_bits(y.detach(), narrow.map(lambda t: t.detach()).call(gl.expert_mlp))
    y.float().square().sum().backward()
    assert all(g.dtype == torch.float32 for g in c.grads().values())
    assert not torch.equal(c.gate_up_a.grad, c.gate_up_a.grad.bfloat16().float())
    r = r.map(lambda t: t.bfloat16(), ("x", "weight", "base"))
    assert_bits(delta, r.delta(gl.expert_delta))
    assert_bits(linear, r.linear(gl.expert_linear))


def test_keyword_calls_of_the_ops():
    c = mlp(dtype=torch.float32)
    names = "x topk_ids topk_weights w_gate_up w_down gate_up_a gate_up_b down_a down_b adapter_ids scalings".split()
    got = OPS.expert_mlp(**dict(zip(names, c.args)), router_weight="post_down", b_down=c.b_down)
    assert_bits(got, c.with_(b_gate_up=None, router_weight="post_down").call(gl.expert_mlp))
    r = build_routes("per expert", torch.float32)
    got = OPS.expert_delta(r.x, r.a, r.b, r.ids, r.adapter_ids, r.scalings, row_weights=r.row_weights)
    assert_bits(got, r.delta(gl.expert_delta, base=False))


def test_ungiven_gradients_cost_nothing():
    """grad_y with strides of zero, as from .sum(), and a y that nobody differentiates."""
    c = mlp(dtype=torch.float32).leaves()
    c.call(gl.expert_mlp).sum().backward()
    d = mlp(dtype=torch.float32).leaves()
    d.call(gl.expert_mlp).backward(torch.ones(5, 5))
    for name in Mlp.TENSORS:
        assert_equal(getattr(c, name).grad, getattr(d, name).grad, name)
    y, h1, *kept = OPS.expert_mlp_train(*c.all_args)
    assert y.requires_grad and not h1.requires_grad


def test_h1_gets_no_gradient_of_zeros():
    """It is an output that nobody differentiates; zeros in its place would be as large as h1 itself."""
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.append((func.name(), getattr(result, "shape", None)))
            return result

    c = mlp(dtype=torch.float32).leaves()
    y = c.call(gl.expert_mlp)
    with Watch():
        y.backward(torch.ones_like(y))
    assert any(name == "grouped_lora::expert_mlp_backward" for name, _ in made)
    assert not any(shape == (10, 8) for name, shape in made if name.startswith("aten::") and "zero" in name)
