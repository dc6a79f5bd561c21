"""Real model classes with random weights: the same logits as peft, not a bit changed by a zero adapter, training that ends in serving."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from adapter_cases import ours, random_adapter
from tiny_models import CONFIGS, real_models, transformers_model

from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import AdapterBank, Base, plan_bank, read_adapter, write_adapter

real_models()
peft = pytest.importorskip("peft", minversion="0.19.1", reason="the real peft library is not installed")

NAMES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "deepseek_v4")
MOE = NAMES[2:]
IDS = torch.randint(0, 64, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products: two threads that wait for each other on a busy machine took 50 s for what one does in 1 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(name, implementation=None, dtype=torch.float32, **changes):
    if name == "deepseek_v3":
        changes["head_dim"] = 4  # what transformers gives the rotary embedding
    model = transformers_model(name, **changes)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model.to(dtype)


def layout_of(name):
    return layouts.of(CONFIGS[name])


def every(layout):
    return [p.path for p in layout.projections]


def bank_of(layout, adapters, rank=4, dtype=torch.float32, **options):
    options.setdefault("selectors", every(layout))
    bank = AdapterBank(plan_bank(layout, slots=len(adapters) + 1, rank=rank, dtype=dtype, **options))
    for name, adapter in adapters.items():
        bank.load(name, adapter)
    return bank


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def merged(model, layout, adapter):
    """A copy with every delta in its weights, experts as the model stores them."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    for path, delta in ours(adapter, layout).items():
        weight = parameters[path if path in parameters else f"{path}.weight"]
        weight.data = (weight.double() + delta).to(weight.dtype)
    return model


@pytest.mark.parametrize("experts", [None, "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_merged_weights(name, experts):
    model, layout = model_of(name), layout_of(name)
    if experts == "fused" and name not in MOE:
        return
    adapters = {"a": random_adapter(layout, every(layout), scaling=0.1), "b": random_adapter(layout, every(layout), rank=4, scaling=0.2, seed=1)}
    plain, wants = logits(model), {k: logits(merged(model, layout, a)) for k, a in adapters.items()}
    attached = gnn.attach_bank(model, bank_of(layout, adapters), experts=experts)
    with attached.using(["b", None, "a"]):
        got = logits(model)
    torch.testing.assert_close(got, torch.stack([wants["b"][0], plain[1], wants["a"][2]]), rtol=1e-3, atol=2e-5)
    assert (got - plain)[[0, 2]].abs().amax((1, 2)).min() > 0.05
    attached.detach()
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_pefts_on_the_same_adapter(name, dtype, tmp_path):
    modules = {
        "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    }.get(name, ["q_proj", "k_proj", "v_proj", "o_proj"] + (["gate_proj", "up_proj", "down_proj"] if name not in MOE else []))
    if name == "deepseek_v4":  # bare names would reach the indexer, and peft cannot run o_a_proj
        modules = r".*self_attn\.(q_a_proj|kv_proj|o_b_proj)"
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if name in MOE else None
    config = peft.LoraConfig(r=4, lora_alpha=2, target_modules=modules, target_parameters=parameters)
    model, layout = model_of(name, dtype=dtype), layout_of(name)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = peft.get_peft_model(twin, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in other.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(generator=generator).mul_(0.3)
    other.save_pretrained(tmp_path)
    if name == "deepseek_v4":  # a regular expression is no list of names: the file is as peft would write it for these
        saved = json.loads((tmp_path / "adapter_config.json").read_text())
        saved["target_modules"] = [f"model.layers.{i}.self_attn.{leaf}" for i in range(4) for leaf in ("q_a_proj", "kv_proj", "o_b_proj")]
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    adapter = read_adapter(tmp_path, layout)
    plain, want = logits(model).float(), logits(other).float()
    attached = gnn.attach_bank(model, bank_of(layout, {"a": adapter}, rank=8, dtype=dtype, gate_up_each=False))
    with attached.using(["a"]):
        got = logits(model).float()
    error = (got - want).abs().max()
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-5)
    else:  # by bf16's own error: what the same weights give in float32 is as far from peft's
        exact = logits(merged(model_of(name, dtype=dtype).float(), layout, adapter))
        assert (got - exact).abs().mean() <= 1.25 * (want - exact).abs().mean() + 1e-4
    assert (want - plain).abs().max() > 10 * error or dtype == torch.bfloat16
    assert (want - plain).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, implementation", [("llama", None), ("qwen3", None), *((n, i) for n in MOE for i in ("grouped_mm", "batched_mm"))]
)
def test_a_zero_adapter_changes_no_bit(name, implementation, dtype):
    model, layout = model_of(name, implementation, dtype), layout_of(name)
    plain = logits(model)
    adapter = random_adapter(layout, every(layout), scaling=0.5)
    for lora in (*adapter.modules.values(), *adapter.experts.values()):
        lora.lora_b.zero_()
    attached = gnn.attach_bank(model, bank_of(layout, {"a": adapter}, dtype=dtype))
    for names in ([None], ["a"], ["a", None, "a"]):
        with attached.using(names):
            assert torch.equal(logits(model), plain)
    attached.prepare(18, "cpu")  # as in a captured graph, where the ops always run
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("name", MOE)
def test_one_op_for_the_experts_and_a_zero_adapter(name):
    """fused: not a bit from the same op without LoRA; from the model's own function by no more than rounding."""
    model, layout = model_of(name, dtype=torch.bfloat16), layout_of(name)
    parent = logits(model)
    adapter = random_adapter(layout, every(layout), scaling=0.5)
    for lora in (*adapter.modules.values(), *adapter.experts.values()):
        lora.lora_b.zero_()
    attached = gnn.attach_bank(model, bank_of(layout, {"a": adapter}, dtype=torch.bfloat16), experts="fused")
    without = logits(model)
    with attached.using(["a", None, "a"]):
        assert torch.equal(logits(model), without)
    exact = logits(model_of(name, dtype=torch.bfloat16).float())
    assert (without - exact).abs().mean() <= 1.1 * (parent - exact).abs().mean() + 1e-4


TRAINED = [
    ("llama", None, {}),
    ("qwen3_moe", None, {}),
    ("qwen3_moe", "fused", {"shared_outer": True}),
    ("deepseek_v3", "fused", {}),
    ("deepseek_v4", None, {}),
]


@pytest.mark.parametrize("name, experts, options", TRAINED)
def test_fifty_steps_then_save_load_and_serve(name, experts, options, tmp_path):
    model, layout = model_of(name, dtype=torch.bfloat16), layout_of(name)
    base = {k: t.clone() for k, t in model.state_dict().items()}
    ids, target = IDS[:, :-1], IDS[:, 1:]
    attached = gnn.attach_trainable(
        model, layout, rank=4, alpha=8, experts=experts, generator=torch.Generator().manual_seed(0), **options
    )
    optimizer = torch.optim.AdamW(attached.parameters(), lr=1e-2)
    losses = []
    for _ in range(50):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1).float(), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.87 * losses[0], losses  # the frozen head's small weights bound it: 4.16 → 3.55
    assert all(p.grad is not None and p.dtype == torch.float32 for p in attached.parameters())
    want = logits(model)
    trained = attached.adapter()
    attached.detach()
    assert all(torch.equal(t, base[k]) for k, t in model.state_dict().items())
    write_adapter(tmp_path, trained, layout, base=Base("tiny", revision="0"))
    adapter = read_adapter(tmp_path, layout)
    served = gnn.attach_bank(
        model, bank_of(layout, {"a": adapter}, dtype=torch.bfloat16, selectors=None), experts=experts
    )
    with served.using(["a"]):
        assert torch.equal(logits(model), want)
    assert not torch.equal(logits(model), want)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_merged_weights(name, implementation):
    """dA and dB from the gradients of the merged weights, and the input's own gradient."""
    layout = layout_of(name)
    model = model_of(name, implementation)
    selectors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    attached = gnn.attach_trainable(model, layout, rank=3, alpha=1.5, selectors=selectors)
    assert {e.mode for e in attached.experts.values()} == {"fused" if implementation == "eager" else "parent"}
    with torch.no_grad():
        for n, p in enumerate(attached.parameters()):
            p.normal_(generator=torch.Generator().manual_seed(n)).mul_(0.3)
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.square().sum().backward()
    got, dx = {f.buffer.key: f for f in attached.factors}, embedded.grad.clone()
    adapter = attached.adapter()
    attached.detach()
    other = merged(model, layout, adapter)
    other.requires_grad_(True)
    twin = embedded.detach().requires_grad_()
    other(inputs_embeds=twin).logits.square().sum().backward()
    torch.testing.assert_close(dx, twin.grad, rtol=1e-3, atol=1e-3)
    weights = dict(other.named_parameters())
    for key, factors in got.items():
        grad = weights[key].grad
        grad = grad.transpose(1, 2) if layout.layout.experts.transposed else grad  # [E, N, D]
        a, b = factors.a[0], factors.b[0]
        if a.dim() == 4:
            if layout.layout.experts.interleaved:
                grad = grad.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            halves = zip(grad.chunk(2, 1), a.unbind(1), b.chunk(2, 1), a.grad.unbind(1), b.grad.chunk(2, 1))
        else:
            halves = [(grad, a, b, a.grad, b.grad)]
        for g, one_a, one_b, da, db in halves:
            torch.testing.assert_close(da, 0.5 * one_b.mT @ g, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(db, 0.5 * g @ one_a.mT, rtol=1e-3, atol=1e-3)
            assert da.any() and db.any()


def test_layers_without_adapters_and_detaching_leave_the_registry_as_it_was():
    model, layout = model_of("glm4_moe", num_hidden_layers=3), layouts.of(CONFIGS["glm4_moe"])
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    plain, config = logits(model), model.model.layers[1].mlp.experts.config
    attached = gnn.attach_trainable(model, layout, selectors=["mlp.experts.gate_up_proj"], rank=2)
    assert list(attached.experts) == ["model.layers.1.mlp.experts"] and "grouped_lora" in ALL_EXPERTS_FUNCTIONS
    assert config._experts_implementation == "grouped_lora"
    assert torch.equal(logits(model), plain)  # layer 2 has none: its own function, unchanged
    keys = [k for k in model.state_dict() if "lora" in k]
    assert keys == [f"model.layers.1.mlp.experts.gate_up_proj_lora.{f}.0" for f in "ab"]
    with pytest.raises(ValueError, match="adapters attached already"):
        gnn.attach_trainable(model, layout, selectors=["mlp.experts.down_proj"])
    other = gnn.attach_trainable(model, layout, selectors=["self_attn.q_proj"])  # beside it, and neither freezes the other's
    assert all(p.requires_grad for p in (*attached.parameters(), *other.parameters()))
    attached.detach()
    assert sum(p.requires_grad for p in model.parameters()) > len(other.parameters())
    other.detach()
    assert config._experts_implementation == "grouped_mm" and torch.equal(logits(model), plain)
    assert not any("lora" in k for k in model.state_dict()) and "_grouped_lora" not in vars(model.model.layers[2].mlp.experts)
    config._experts_implementation = "grouped_lora"
    with pytest.raises(RuntimeError, match="nothing is attached to this module"):
        logits(model)


def test_experts_that_cannot_be_attached(monkeypatch):
    layout = layout_of("qwen3_moe")
    model = model_of("qwen3_moe", "eager")
    with pytest.raises(ValueError, match='the model runs eager, which has no place for deltas; use experts="fused"'):
        gnn.attach_trainable(model, layout, experts="parent")
    assert model.config._experts_implementation == "eager"
    model = model_of("qwen3_moe", hidden_act="gelu")
    for module in model.modules():
        if hasattr(module, "is_concatenated"):
            module.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match='expert_mlp has no activation like that of Qwen3MoeExperts; use experts="parent"'):
        gnn.attach_trainable(model, layout, experts="fused")
    assert model.config._experts_implementation == "grouped_mm" and not any("lora" in k for k in model.state_dict())
    gnn.attach_trainable(model, layout)  # the parent computes whatever it is
    model = model_of("gpt_oss")
    model.model.layers[0].mlp.experts.alpha = 1.5
    with pytest.raises(ValueError, match="no activation like that of GptOssExperts"):
        gnn.attach_trainable(model, layout_of("gpt_oss"), experts="fused")
    model = model_of("qwen3_moe", num_experts=8)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj: must be \[4, 48, 32\] for these adapters; got \[8, 48, 32\]"):
        gnn.attach_trainable(model, layout)
    # a version that hands rows over in another order is noticed before anything is attached
    gnn.experts._order_is_known.cache_clear()
    functions, sort = gnn.experts.registry(), torch.sort
    run = functions["grouped_mm"]

    def other(self, x, ids, weights):
        monkeypatch.setattr(torch, "sort", lambda t, **k: sort(t, descending=True))
        try:
            return run(self, x, ids, weights)
        finally:
            monkeypatch.setattr(torch, "sort", sort)

    monkeypatch.setitem(functions._local_mapping, "grouped_mm", other)
    with pytest.raises(RuntimeError, match="orders routes in another way"):
        gnn.attach_trainable(model_of("qwen3_moe"), layout)
    monkeypatch.undo()
    gnn.experts._order_is_known.cache_clear()
    gnn.attach_trainable(model_of("qwen3_moe"), layout)


def test_one_scaling_for_both_expert_projections_of_the_fused_op():
    layout = layout_of("qwen3_moe")
    adapter = random_adapter(layout, every(layout), scaling=0.1)
    object.__setattr__(adapter.experts["model.layers.1.mlp.experts.down_proj"], "scaling", 0.3)
    model, bank = model_of("qwen3_moe"), bank_of(layout, {"a": adapter})
    want = logits(merged(model, layout, adapter))
    attached = gnn.attach_bank(model, bank, experts="fused")
    with pytest.raises(ValueError, match="a scales gate_up_proj and down_proj differently"), attached.using(["a"]):
        pass
    assert not bank.pinned
    attached.detach()
    with gnn.attach_bank(model, bank, experts="parent").using(["a"]):
        torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("experts", ["parent", "fused"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_routes_of_other_ranks_are_left_out(experts, implementation):
    """transformers' expert parallelism gives routes of other ranks the id E: they add nothing, with gradients as well."""
    model, layout = model_of("qwen3_moe", implementation), layout_of("qwen3_moe")
    attached = gnn.attach_trainable(model, layout, rank=3, experts=experts, selectors=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    with torch.no_grad():
        for p in attached.parameters():
            p.normal_(generator=torch.Generator().manual_seed(p.numel())).mul_(0.3)
    module = model.model.layers[1].mlp.experts
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 3], [2, 1], [1, 3], [3, 2], [2, 0]]), torch.rand(5, 2)
    attached.routing.set([0])

    def run(ids, weights):
        x_, w_ = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(x_, ids, w_)
        y.square().sum().backward()
        return y.detach(), x_.grad, w_.grad

    want = run(ids, torch.where(ids == 3, 0, weights))
    module._is_expert_parallel = True
    got = run(torch.where(ids == 3, 4, ids), torch.where(ids == 3, 0, weights))
    for g, w in zip(got[:2], want[:2]):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert not got[2][ids == 3].any() and torch.allclose(got[2][ids != 3], want[2][ids != 3], atol=1e-3)


@pytest.mark.parametrize("experts", ["parent", "fused"])
def test_training_under_autocast(experts):
    """float32 weights and bfloat16 products: transformers' grouped_mm keeps float32, and so must what joins it."""
    model, layout = model_of("qwen3_moe"), layout_of("qwen3_moe")
    with torch.autocast("cpu", torch.bfloat16):
        plain = logits(model)
    attached = gnn.attach_trainable(model, layout, rank=2, experts=experts, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert experts == "fused" or torch.equal(logits(model), plain)  # B = 0
    with torch.no_grad():
        for f in attached.factors:
            f.b[0].normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
    want = logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(IDS).logits
    y.float().square().sum().backward()
    assert (y.float() - want).abs().mean() < 0.05 * want.abs().mean()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in attached.parameters())


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_many_routes_have_a_plan(implementation, monkeypatch):
    """From 129 routes on the deltas read a plan of their rows; these are those of the same tokens in smaller batches."""
    plans, run = [], gnn.experts.expert_delta

    def spy(x, a, b, routes, adapter_ids, *args, plan=None, **options):
        plans.append(plan is not None)
        assert plan is None or torch.equal(plan, torch.ops.grouped_lora.expert_plan(routes, adapter_ids, 4, 3))
        return run(x, a, b, routes, adapter_ids, *args, plan=plan, **options)

    monkeypatch.setattr(gnn.experts, "expert_delta", spy)
    layout, g = layout_of("gpt_oss"), torch.Generator().manual_seed(0)
    selectors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = {k: random_adapter(layout, selectors, scaling=0.2, seed=s) for k, s in (("a", 0), ("b", 1))}
    model = model_of("gpt_oss", implementation)
    attached = gnn.attach_bank(model, bank_of(layout, adapters, selectors=selectors))
    module, x = model.model.layers[0].mlp.experts, torch.randn(150, 32, generator=g)
    ids, weights = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(150)]), torch.rand(150, 2, generator=g)
    names = [("a", None, "b")[t % 3] for t in range(150)]
    with torch.no_grad(), attached.using(names):
        whole = module(x, ids, weights)
    for start in range(0, 150, 30):
        part = slice(start, start + 30)
        with torch.no_grad(), attached.using(names[part]):
            torch.testing.assert_close(module(x[part], ids[part], weights[part]), whole[part], rtol=1e-4, atol=1e-5)
    assert plans == [True] * 2 + [False] * 10


@pytest.mark.parametrize("experts", ["parent", "fused"])
def test_experts_of_an_idle_job_get_gradients_of_zeros(experts):
    model, layout = model_of("qwen3_moe"), layout_of("qwen3_moe")
    attached = gnn.attach_trainable(model, layout, rank=2, experts=experts, slots=2)
    attached.routing.set([-1])
    model(IDS).logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in attached.parameters())


def test_generate_with_an_adapter_for_each_sequence():
    """Prefill and cached decode: the ids of the sequences serve every length."""
    model, layout = model_of("qwen3"), layout_of("qwen3")
    adapters = {k: random_adapter(layout, scaling=0.3, seed=s) for k, s in (("a", 0), ("b", 1))}
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    alone = {None: model.generate(IDS[:1], **options)}
    attached = gnn.attach_bank(model, bank_of(layout, adapters))
    for k in adapters:
        with attached.using([k]):
            alone[k] = model.generate(IDS[:1], **options)
    with attached.using(["b", None, "a"]):
        together = model.generate(IDS[:1].expand(3, -1), **options)
    assert [row.tolist() for row in together] == [alone[k][0].tolist() for k in ("b", None, "a")]
    assert len({tuple(row.tolist()) for row in together}) == 3


@pytest.mark.parametrize("experts", ["parent", "fused"])
def test_experts_on_the_meta_device(experts):
    model, layout = transformers_model("gpt_oss", device="meta"), layout_of("gpt_oss")
    attached = gnn.attach_trainable(model, layout, rank=2, experts=experts)
    assert all(p.is_meta for p in attached.parameters()) and len(attached.experts) == 2
    model.to_empty(device="cpu")
    attached.reset_parameters()
    assert all(f.a[0].device.type == "cpu" and not f.b[0].any() for f in attached.factors)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(names) == len(attached.parameters()) == 2 * len(attached.factors)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["parent", "fused"])
@pytest.mark.parametrize("tokens", [8, 300])
def test_a_graph_of_the_experts_follows_ids_and_adapters(experts, tokens):
    """On a GPU: a captured experts module, replayed with other ids, routes and adapters, equals the eager call bit for bit."""
    layout, g = layout_of("qwen3_moe"), torch.Generator().manual_seed(0)
    selectors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = model_of("qwen3_moe", dtype=torch.bfloat16).cuda()
    bank = AdapterBank(plan_bank(layout, slots=2, rank=4, selectors=selectors, host_adapters=2), device="cuda")
    for name, seed in (("a", 0), ("b", 1)):
        bank.add(name, random_adapter(layout, selectors, scaling=0.2, seed=seed))
    module = model.model.layers[1].mlp.experts
    x = torch.randn(tokens, 32, generator=g).to("cuda", torch.bfloat16)
    weights, ids = torch.rand(tokens, 2, generator=g).cuda(), torch.zeros(tokens, 2, dtype=torch.int64, device="cuda")

    def route():
        ids.copy_(torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(tokens)]))

    route()
    with torch.no_grad():
        plain = module(x, ids, weights)
        attached = gnn.attach_bank(model, bank, experts=experts)
        attached.prepare(tokens, "cuda")
        with attached.using(["a", None]):
            module(x, ids, weights)  # kernels are compiled
        if experts == "parent":
            assert torch.equal(module(x, ids, weights), plain)  # the ops run, for nobody
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            module(x, ids, weights)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = module(x, ids, weights)
        seen = []
        for names in (["a", None], ["b"], [None], ["b", "a"]):
            route()
            with attached.using(names):
                graph.replay()
                assert torch.equal(y, module(x, ids, weights))
            seen.append(y.clone())
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])
