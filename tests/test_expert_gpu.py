"""The expert ops on a GPU: captured with routing that changes at replay, without a synchronisation, rows of their own bits."""

from __future__ import annotations

import importlib

import pytest
import torch
from cases import assert_bits, assert_equal, rounded
from test_expert_kernels import build as case
from test_expert_kernels import want_delta
from test_expert_mlp_kernels import PLACEMENTS, gradients, layer, run_reference
from test_graphs import captured

import grouped_lora_ops as glo
from grouped_lora_ops import launch, launch_experts, reference
from grouped_lora_ops.ops import common

build = importlib.import_module("grouped_lora_ops.ops.expert_plan").build

pytestmark = pytest.mark.gpu
OPTIONS = ("b_gate_up", "b_down", "activation", "activation_limit", "router_weight", "ranks", "plan")


def mlp(c, **changed):
    return glo.expert_mlp(*c.args()[:11], **(dict(zip(OPTIONS, c.args()[11:])) | changed))


@pytest.mark.parametrize("tokens", [4, 100])
@pytest.mark.parametrize("router_weight", PLACEMENTS)
def test_a_replay_follows_the_routing(router_weight, tokens):
    c = layer(router_weight=router_weight, tokens=tokens, top_k=4, experts=8, hidden=128, inner=64, rank=8, poison=False)
    mlp(c, plan=glo.expert_plan(c.topk_ids, c.adapter_ids, 8, 2))  # compiles and loads both
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = glo.expert_plan(c.topk_ids, c.adapter_ids, 8, 2)
        y = mlp(c, plan=plan)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        c.topk_ids.copy_(torch.randint(-1, 9, c.topk_ids.shape, generator=generator))
        c.adapter_ids.copy_(torch.randint(-1, 2, c.adapter_ids.shape, generator=generator))
        c.topk_weights.copy_(torch.rand(c.topk_weights.shape, generator=generator))
        c.scalings.copy_(torch.rand(2, generator=generator))
        c.gate_up_b.normal_(), c.down_a.normal_()  # another adapter in the slots
        graph.replay()
        assert_bits(y, mlp(c))
        exact, usual = run_reference(c.wide())[0], run_reference(c)[0]
        assert (y - exact).abs().max() <= 3 * (usual - exact).abs().max() + 1e-5


def test_a_first_call_inside_a_capture_names_its_op():
    c = case(tokens=3, features=200, out=136, rank=11, seed=1)

    def call():
        return torch.ops.grouped_lora.expert_delta(*c.args(), c.base)

    with pytest.raises(RuntimeError, match=r"^grouped_lora\.expert_delta: .*not compiled yet"):
        captured(call, warm=False)
    torch.cuda.synchronize()
    graph, y = captured(call)
    graph.replay()
    assert_equal(y, want_delta(c))


def test_no_op_synchronises():
    for tokens in (4, 200):
        c = layer(tokens=tokens, poison=False)
        x = c.x.requires_grad_()
        factors = [t.requires_grad_() for t in (c.gate_up_a, c.gate_up_b, c.down_a, c.down_b)]
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                glo.expert_plan(c.topk_ids, c.adapter_ids, 4, 2)
                glo.expert_linear(c.x, c.w_gate_up, c.gate_up_a, c.gate_up_b, c.topk_ids, c.adapter_ids, c.scalings)
                y = mlp(c)
                glo.expert_delta(c.x, c.gate_up_a, c.gate_up_b, c.topk_ids, c.adapter_ids, c.scalings).sum().backward()
                torch.autograd.grad(y, [x, *factors], c.grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_exact_at_real_sizes(dtype):
    for kw in (
        dict(tokens=1, top_k=8, experts=128, features=2048, out=1536, rank=32, slots=1, form="an A each"),
        dict(tokens=64, top_k=8, experts=128, features=768, out=2048, rank=32, slots=3, per_route=True),
        dict(tokens=1000, top_k=8, experts=16, features=512, out=768, rank=64, slots=2, form="halves of B", ranks=True),
        dict(tokens=700, top_k=2, experts=1, features=512, out=512, rank=16, slots=1, shared="ab"),
        dict(tokens=300, top_k=8, experts=1024, features=256, out=256, rank=16, slots=3),
    ):
        c = case(dtype, weights=True, **kw)
        got = torch.ops.grouped_lora.expert_delta(*c.args(), c.base, c.weights, c.ranks)
        assert_equal(got, want_delta(c), str(kw))


def test_a_linears_bits_are_its_own():
    """Over T, the plan and the launch choice: base and delta of a row do not know the batch."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    tokens, top_k, experts, slots, rank = 3000, 4, 8, 3, 32
    x, w = randn(tokens, 1024), randn(experts, 2, 384, 1024)
    a, b = randn(slots, experts, 2, rank, 1024), randn(slots, experts, 768, rank)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator, device="cuda")
    adapters = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda")
    scalings = torch.rand(slots, generator=generator, device="cuda")

    def run(rows):
        return glo.expert_linear(x[rows], w, a, b, ids[rows], adapters[rows], scalings)

    batch = run(slice(0, tokens))
    for rows in (slice(1, 2), slice(299, 300), slice(0, 7), slice(0, 100), slice(0, 700)):
        assert_bits(run(rows), batch[rows.start * top_k : rows.stop * top_k], str(rows))


def test_gradients_have_the_same_bits_again():
    c = layer(tokens=500, top_k=4, hidden=256, inner=128, rank=16, poison=False)
    needs = [True] * 10
    for one, other in zip(gradients(c, None, needs), gradients(c, None, needs)):
        assert_bits(one, other)


def test_plans_at_real_sizes(monkeypatch):
    for tokens, top_k, experts, slots in ((64, 8, 128, 1), (4096, 8, 128, 4), (4096, 8, 256, 1), (8192, 8, 1024, 64), (1000, 8, 8, 2)):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(-1, experts, (tokens, top_k), generator=generator, dtype=torch.int32)
        adapters = torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)
        want = reference.expert_plan(ids, adapters, experts, slots)
        assert_equal(glo.expert_plan(ids.cuda(), adapters.cuda(), experts, slots).cpu(), want, f"{tokens} {experts}")
        monkeypatch.setattr(launch, "plan_cuda", lambda *sizes: None)  # by Triton's kernels, as GPUs without clusters make it
        for way in ("rank", "count", "sort"):
            if way == "rank" and tokens > 1000 or way == "count" and launch_experts.pairs(experts, slots) > 2000:
                continue
            monkeypatch.setattr(launch_experts, "RANK_LIMIT", 10**6 if way == "rank" else 0)
            monkeypatch.setattr(launch_experts, "COUNT_LIMIT", 0 if way == "sort" else 2048)
            common.configured.cache_clear()
            got = build(ids.cuda(), adapters.cuda(), experts, slots)
            assert_equal(got.cpu(), want, f"{tokens} {experts} {way}")
        monkeypatch.undo()
        common.configured.cache_clear()


def test_rows_beyond_2_to_the_31_elements():
    c = case(tokens=3, top_k=1, features=64, out=72, ids=[[2], [0], [3]], poison=False, per_route=True)
    want = want_delta(c)
    for name in ("x", "base", "a", "b"):
        t = getattr(c, name)
        far = torch.empty_strided(t.shape, (2**30, *t.stride()[1:]), dtype=t.dtype, device="cuda").copy_(t)
        setattr(c, name, far)
        assert_equal(torch.ops.grouped_lora.expert_delta(*c.args(), c.base), want, name)
        setattr(c, name, t)
        del far


def test_gradients_on_a_gpu_are_ours_and_the_references():
    c = case(features=72, out=40, rank=5, weights=True, poison=False)
    for name in ("x", "a", "b", "grad"):
        setattr(c, name, getattr(c, name).sign())
    w = c.wide()
    exact = reference.expert_delta_backward(w.grad, *w.args(), w.weights, None, None, [True] * 4)
    leaves = [t.clone().requires_grad_() for t in (c.x, c.a, c.b, c.weights, c.base)]
    y = torch.ops.grouped_lora.expert_delta(*leaves[:3], c.ids, c.adapters, c.scalings, leaves[4], leaves[3])
    assert "grouped_lora" in y.grad_fn.name() or "GeneratedBackward" in y.grad_fn.name(), y.grad_fn.name()
    for g, e, t in zip(torch.autograd.grad(y, leaves, c.grad), (*exact, w.grad), leaves):
        assert_equal(g, rounded(e, t.dtype))
