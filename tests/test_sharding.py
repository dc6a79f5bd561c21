"""Tensor- and expert-parallel shares: cut and joined again, run in turn on one device, and by two processes over gloo."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import sharding_ranks
import torch
from adapter_cases import random_adapter
from sharding_ranks import GPU, V4, ExpertLayer, each_share, output_projection
from tiny_models import CONFIGS

from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import AdapterBank, ExpertModule, LoraModule, plan_bank
from grouped_lora_ops.layouts import Share
from grouped_lora_ops.sharding import local_expert_ids, shard_adapter, unshard_adapter


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(a, b):
    assert list(a.modules) == list(b.modules) and list(a.experts) == list(b.experts)
    for found, other in ((a.modules, b.modules), (a.experts, b.experts)):
        for path, lora in found.items():
            assert torch.equal(lora.lora_a, other[path].lora_a) and torch.equal(lora.lora_b, other[path].lora_b), path
            assert (lora.rank, lora.scaling) == (other[path].rank, other[path].scaling)
    return True


@pytest.mark.parametrize("divide_rank", [False, True])
@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_declared_layout_comes_back_from_its_shares(name, shared_outer, divide_rank):
    model = layouts.of(CONFIGS[name])
    whole = random_adapter(model, rank=4, shared_outer=shared_outer, dtype=torch.bfloat16)
    cut = set()
    for tp, ep in ((1, 1), (2, 1), (1, 2), (2, 2), (2, 4)):
        shards = [(share, shard_adapter(whole, model, share, divide_rank=divide_rank)) for share in each_share(tp, ep)]
        assert same(unshard_adapter(shards[::-1], model), whole)
        for _, shard in shards:
            for path, lora in (*shard.modules.items(), *shard.experts.items()):
                p = model.locate(path).projection
                full = whole.modules.get(path) or whole.experts[path]
                kept = [lora.lora_a.shape == full.lora_a.shape, lora.lora_b.shape == full.lora_b.shape]
                if not all(kept):
                    cut.add(p.facts.shard)
                if isinstance(lora, LoraModule) and tp == 2:
                    want = {"column": (not divide_rank, False), "row": (False, True), "replicated": (True, True)}
                    assert tuple(kept) == want.get(p.facts.shard.value, (True, False)), path
        if (tp, ep) != (1, 1):  # and a bank that is planned for a share takes the same parts of the whole
            share, shard = shards[-1]
            plan = plan_bank(model, slots=1, rank=4, share=share, shared_outer=shared_outer, selectors=[p.path for p in model.projections])
            bank = AdapterBank(plan)
            bank.load("a", whole)
            for path, lora in (*shard.modules.items(), *shard.experts.items()):
                a, b = bank[path].lora_a[0], bank[path].lora_b[0]
                column = model.locate(path).projection.facts.shard is layouts.Shard.COLUMN
                assert (divide_rank and column) or torch.equal(a, lora.lora_a)
                assert torch.equal(b if isinstance(lora, ExpertModule) else b.flatten(0, -2), lora.lora_b)
    assert cut == {p.facts.shard for p in model.projections} - {layouts.Shard.REPLICATED}


def test_what_does_not_divide_is_refused():
    v4 = layouts.of(CONFIGS["deepseek_v4"])
    adapter = random_adapter(v4)
    with pytest.raises(ValueError, match="tp must divide the 2 groups of self_attn.o_a_proj; got 4") as error:
        shard_adapter(adapter, v4, Share(tp=4))
    assert "o_b_proj" in str(error.value) and "q_a_proj" not in str(error.value)
    with pytest.raises(ValueError, match=r"ep must divide the 4 experts of mlp\.experts\.gate_up_proj; got 3"):
        shard_adapter(adapter, v4, Share(ep=3))
    llama = layouts.of(CONFIGS["llama"])
    with pytest.raises(ValueError, match="q_proj: tp must divide the rank 3; got 2"):
        shard_adapter(random_adapter(llama), llama, Share(tp=2), divide_rank=True)
    shards = [shard_adapter(adapter, v4, share) for share in each_share(2, 1)]
    with pytest.raises(ValueError, match=r"o_b_proj: A and B must be \[3, 24\] and \[32, 3\]; got \[3, 12\] and \[32, 3\]"):
        shard_adapter(shards[0], v4, Share(tp=2))
    with pytest.raises(ValueError, match="tp must divide the 2 groups"):
        gnn.attach_trainable(torch.nn.Module(), v4, share=Share(tp=4))
    with pytest.raises(ValueError, match="tp must divide the 2 groups"):
        plan_bank(v4, slots=1, rank=4, share=Share(tp=4))


def test_shares_that_do_not_belong_together_are_refused():
    model = layouts.of(CONFIGS["deepseek_v4"])
    adapter = random_adapter(model, rank=4)
    shares = each_share(2, 2)
    shards = [(s, shard_adapter(adapter, model, s)) for s in shares]
    for wrong in (shards[:3], shards[:3] + shards[:1], [*shards[:3], (Share(), adapter)]):
        with pytest.raises(ValueError, match=r"one share of each \(tp_rank, ep_rank\) of tp=2, ep=2"):
            unshard_adapter(wrong, model)
    with pytest.raises(ValueError, match="must not be empty"):
        unshard_adapter([], model)

    def spoiled(change):
        other = copy.deepcopy(shards)
        change(other[-1][1].modules, other[-1][1].experts)
        with pytest.raises(ValueError) as error:
            unshard_adapter(other, model)
        return str(error.value)

    path, experts = "model.layers.0.self_attn.o_a_proj", "model.layers.1.mlp.experts.down_proj"

    def nudge(lora, kind):
        getattr(lora, kind).view(-1)[0] += 1

    assert f"{path}: A must be the same on all ranks" in spoiled(lambda m, e: nudge(m[path], "lora_a"))
    assert f"{path}: B must be the same on all ranks" in spoiled(lambda m, e: nudge(m[path], "lora_b"))  # over ep
    assert f"{experts}: B must be the same" in spoiled(lambda m, e: nudge(e[experts], "lora_b"))  # over tp
    assert f"{path} is not in every share" in spoiled(lambda m, e: m.pop(path))
    assert "model.x is not in every share" in spoiled(lambda m, e: m.update({"model.x": m[path]}))
    assert f"{path}: ranks or scalings differ" in spoiled(lambda m, e: m.update({path: replace(m[path], scaling=0.5)}))
    assert "B must have 12 rows" in spoiled(lambda m, e: m.update({path: replace(m[path], lora_b=m[path].lora_b[:3])}))
    half = lambda m, e: m.update({path: replace(m[path], lora_a=m[path].lora_a[:, :7])})  # noqa: E731
    assert f"{path}: A must be [4, 32]; got [4, 7]" in spoiled(half)


# ---- each rank's shard in turn, on one device -------------------------------------------------------------------------------

CASES = [(8, False), (300, False), (8, True), (8192, True)]


@pytest.mark.parametrize(
    "tokens, full", [pytest.param(t, f, marks=[pytest.mark.gpu] if f else []) for t, f in CASES]
)
def test_v4s_output_projection_is_bitwise_the_unsharded_one(tokens, full):
    """TP = 2, four groups a rank, two adapters: a rank's groups have the bits that they have in the whole projection."""
    device, dtype = ("cuda" if GPU else "cpu"), torch.bfloat16
    config = V4 | dict(num_attention_heads=64, head_dim=512, o_lora_rank=1024, hidden_size=4096) if full else V4
    model = layouts.of(config)
    p = next(p for p in model.projections if p.path == "self_attn.o_a_proj")
    assert p.groups == 8 and (not full or (p.in_features, p.out_features) == (4096, 1024))
    adapters = [random_adapter(model, ["o_a_proj"], rank=r, scaling=0.2, seed=r, dtype=dtype) for r in (16, 5)]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 8, p.in_features, generator=g).to(dtype).to(device)
    weight = (torch.randn(8, p.out_features, p.in_features, generator=g) / 64).to(dtype).to(device)
    base = torch.einsum("tgd,gnd->tgn", x, weight)  # the product's own bits may depend on how many groups it has
    ids = torch.tensor([0, 1, -1])[torch.randint(0, 3, (tokens,), generator=g)].to(device)
    grad = torch.randn(tokens, 8, p.out_features, generator=g).to(dtype).to(device)
    whole = output_projection(model, adapters, Share(), weight, x, base, ids, grad)
    assert (whole[0] != base)[ids >= 0].float().mean() > 0.9 and torch.equal(whole[0][ids < 0], base[ids < 0])
    total = torch.zeros_like(whole[2], dtype=torch.float32)
    for rank, share in enumerate(each_share(2, 1)):
        mine = slice(4 * rank, 4 * rank + 4)
        part = output_projection(model, adapters, share, weight[mine], x[:, mine], base[:, mine], ids, grad[:, mine])
        y, dx, da, db = part
        assert torch.equal(y, whole[0][:, mine]) and torch.equal(dx, whole[1][:, mine])
        if GPU:  # how the sum over tokens is cut may depend on how many groups there are
            torch.testing.assert_close(db, whole[3][:, mine], rtol=1e-2, atol=1e-2 * whole[3].abs().max().item())
        else:
            assert torch.equal(db, whole[3][:, mine])
        total += da.float()
    torch.testing.assert_close(total, whole[2].float(), rtol=2e-2, atol=2e-2 * whole[2].float().abs().max().item())


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("router_weight", ["pre_down", "post_down"])
def test_expert_shares_in_turn(shared_outer, router_weight, full):
    """EP = 2, forward and backward, in small integers: what the ranks compute adds up to the whole, bit for bit."""
    sizes, device = (ExpertLayer.FULL, "cuda") if full else (ExpertLayer.SMALL, "cpu")
    whole = ExpertLayer(Share(), shared_outer, router_weight, sizes, device)
    y, dx, dw, factors = whole.run()
    shares = each_share(1, 2)
    parts = [ExpertLayer(share, shared_outer, router_weight, sizes, device).run() for share in shares]
    assert torch.equal(sum(p[0] for p in parts), y) and torch.equal(sum(p[1] for p in parts), dx)
    assert torch.equal(sum(p[2] for p in parts), dw)
    for name, grad in factors.items():
        own = [p[3][name] for p in parts]
        if whole.shared(name):
            assert torch.equal(sum(own), grad)
        else:
            assert torch.equal(torch.cat(own, 1), grad)
        assert grad.any() and all(o.any() for o in own)
    if full:  # and the whole is the reference's
        host = ExpertLayer(Share(), shared_outer, router_weight, sizes).run()
        for got, want in zip((y, dx, dw, *factors.values()), (*host[:3], *host[3].values())):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("shared_outer", [False, True])
def test_integers_of_the_full_size_are_exact(shared_outer):
    """In float32 as in float64, so that the test above asks for bits that exist."""
    runs = []
    for dtype in (torch.float32, torch.float64):
        layer = ExpertLayer(Share(), shared_outer, "pre_down", ExpertLayer.FULL)
        for name in ("up", "down", "x", "grad", "weights"):
            setattr(layer, name, getattr(layer, name).to(dtype))
        layer.factors = {k: f.detach().to(dtype).requires_grad_() for k, f in layer.factors.items()}
        y, dx, dw, factors = layer.run()
        runs.append([y, dx, dw, *factors.values()])
    for single, double in zip(*runs):
        assert torch.equal(single.double(), double)


def test_local_expert_ids():
    ids = torch.tensor([[0, 3, -1], [2, 4, 5]])
    assert local_expert_ids(ids, slice(2, 4)).tolist() == [[-1, 1, -1], [0, -1, -1]]


def test_real_experts_with_a_share_each(monkeypatch):
    """transformers' experts module with a rank's experts, E_loc as the id of other ranks' routes: outputs add up."""
    pytest.importorskip("transformers", minversion="5.24")
    from tiny_models import transformers_model

    layout = layouts.of(CONFIGS["qwen3_moe"])
    adapter = random_adapter(layout, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], scaling=0.2)
    x, weights = torch.randn(9, 32), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])

    def run(share, mode):
        model = transformers_model("qwen3_moe")
        module, part = model.model.layers[1].mlp.experts, slice(2 * share.ep_rank, 2 * share.ep_rank + 2)
        own, w = ids, weights
        if share.ep > 1:
            for name in ("gate_up_proj", "down_proj"):
                setattr(module, name, torch.nn.Parameter(getattr(module, name)[part].clone()))
            module.num_experts, module._is_expert_parallel = 2, True
            own = local_expert_ids(ids, part)
            own, w = torch.where(own < 0, 2, own), torch.where(own < 0, 0.0, weights)
        plan = plan_bank(layout, slots=1, rank=3, dtype=torch.float32, share=share, selectors=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        bank = AdapterBank(plan)
        bank.load("a", adapter)
        with gnn.attach_bank(model, bank, experts=mode).using(["a"] * 6 + [None] * 3), torch.no_grad():
            return module(x, own, w)

    for mode in ("parent", "fused"):
        whole, parts = run(Share(), mode), [run(share, mode) for share in each_share(1, 2)]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-6)
    # a bank that holds all experts does not fit a rank's module
    model = transformers_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"gate_up_proj: must be \[2, 48, 32\] for these adapters; got \[4, 48, 32\]"):
        gnn.attach_trainable(model, layout, share=Share(ep=2), selectors=["mlp.experts.gate_up_proj"])


def test_a_divided_sequence_needs_its_group():
    for wrong in (0, -1, "s"):
        with pytest.raises(ValueError, match=rf"sequence_dim must be a dimension \(0, 1, …\), given with tp_group; got {wrong!r}"):
            gnn.attach_trainable(torch.nn.Module(), layouts.of(CONFIGS["llama"]), sequence_dim=wrong)


def test_a_row_projection_needs_its_group():
    from toy_model import CONFIG, Toy

    model, layout = Toy(), layouts.of(CONFIG)
    for layer in model.layers:
        layer.self_attn.o_proj = torch.nn.Linear(16, 32, bias=False)
    with pytest.raises(ValueError, match=r"o_proj is divided by rows; tp_group must be given"):
        gnn.attach_trainable(model, layout, selectors=["o_proj"], share=Share(tp=2))


# ---- two processes ------------------------------------------------------------------------------------------------------


def test_two_processes(tmp_path):
    """Column and row layers, V4's projection, experts, and DTensor placements, each against the unsharded result."""
    results = sharding_ranks.two_processes(tmp_path)
    assert all(results[rank] == list(sharding_ranks.CHECKS) for rank in range(2)), results
