"""`python -m grouped_lora_ops warmup`: the shapes that it prepares are those that a model with adapters calls."""

from __future__ import annotations

import importlib
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import CONFIGS, real_models, transformers_model

from grouped_lora_ops import ExpertShape, Shape, layouts, warmup_model
from grouped_lora_ops import __main__ as entry
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import AdapterBank, plan_bank

NAMES = ("llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "deepseek_v4")


def jobs(name: str, **options):
    return warmup_model.jobs_of(layouts.of(CONFIGS[name]), 3, 4, dtype=torch.float32, **options)


@pytest.fixture
def config(tmp_path):
    """A folder with config.json of a tiny model."""

    def write(name: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        return str(tmp_path)

    return write


def described(x, a, b, sizes):
    """What `Shape` says of a dense call."""
    groups = b.shape[1] if b.dim() == 4 else None
    return Shape(
        x.shape[-1],
        a.shape[-2],
        a.shape[0],
        0 if sizes else b.shape[-2],
        groups,
        tuple(sizes) if sizes else None,
        x.dtype,
        a.dim() == 3,
    )


@pytest.fixture
def called(monkeypatch):
    """The shapes of the calls that nn makes, as `warmup` knows them."""
    seen = set()
    linear, experts = (importlib.import_module(f"grouped_lora_ops.nn.{stem}") for stem in ("linear", "experts"))
    right = SimpleNamespace(
        delta=linear.delta, delta_=linear.delta_, expert_delta=experts.expert_delta, expert_mlp=experts.expert_mlp
    )

    def delta(x, a, b, ids, scalings, *, base, out_sizes, ranks, plan):
        assert ranks is not None
        seen.add(("delta", described(x, a, b, out_sizes)))
        return right.delta(x, a, b, ids, scalings, base=base, out_sizes=out_sizes, ranks=ranks, plan=plan)

    def delta_(out, x, a, b, ids, scalings, *, out_sizes, ranks, plan):
        assert ranks is not None
        seen.add(("delta_", described(x, a, b, out_sizes)))
        return right.delta_(out, x, a, b, ids, scalings, out_sizes=out_sizes, ranks=ranks, plan=plan)

    def expert_delta(x, a, b, routes, ids, scalings, *, base, ranks, plan):
        assert ranks is not None and routes.shape[1] == 1 and len(x) == len(routes)
        up = a.dim() == 5
        seen.add(
            ("expert_delta", "gate_up" if up else "down", a.shape[-1], b.shape[2], a.shape[1], x.dtype, a.shape[-2])
        )
        return right.expert_delta(x, a, b, routes, ids, scalings, base=base, ranks=ranks, plan=plan)

    def expert_mlp(x, ids, weights, up, down, ua, ub, da, db, adapters, scalings, **options):
        seen.add(("expert_mlp", ids.shape[1], up.shape[0], x.shape[1], down.shape[2], ua.dim() == 5, options["b_down"] is not None,
                  options["activation"], options["activation_limit"], options["router_weight"], "ranks" in options))  # fmt: skip
        return right.expert_mlp(x, ids, weights, up, down, ua, ub, da, db, adapters, scalings, **options)

    for module, function in ((linear, delta), (linear, delta_), (experts, expert_delta), (experts, expert_mlp)):
        monkeypatch.setattr(module, function.__name__, function)
    return seen


def expected(job) -> set:
    s = job.shape
    if not job.experts:
        assert s.ranks
        plain = Shape(s.in_features, s.rank, s.num_slots, s.out_features, s.groups, s.out_sizes, s.dtype, s.shared_a)
        return {
            ("delta" if s.groups else "delta_", plain)
        }  # DeepSeek-V4's wo_a is multiplied by its parent; see nn.weight
    if job.ops == ("expert_delta",):
        assert s.top_k == 1 and s.ranks
        facts = (s.num_experts, s.dtype, s.rank)
        return {
            ("expert_delta", "gate_up", s.hidden, 2 * s.inner, *facts),
            ("expert_delta", "down", s.inner, s.hidden, *facts),
        }
    return {
        (
            "expert_mlp",
            s.top_k,
            s.num_experts,
            s.hidden,
            s.inner,
            s.a_each,
            s.bias,
            s.activation,
            s.activation_limit,
            s.router_weight,
            s.ranks,
        )
    }


@pytest.mark.parametrize("experts", ["parent", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_the_shapes_are_those_that_a_real_model_calls(name, experts, called):
    real_models()
    changes = {"head_dim": 4} if name == "deepseek_v3" else {}
    model, layout = transformers_model(name, **changes), layouts.of(CONFIGS[name])
    has_experts = layout.layout.experts is not None
    if experts == "parent" and has_experts:
        model.set_experts_implementation("grouped_mm")
    bank = AdapterBank(plan_bank(layout, slots=3, rank=4, dtype=torch.float32))
    attached = gnn.attach_bank(model, bank, experts=experts if has_experts else None)
    attached.routing.set(torch.tensor([0]), active=True)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long))
    assert called == set().union(*(expected(job) for job in jobs(name, experts=experts)))


@pytest.mark.parametrize(
    "name, path, sizes",
    [("llama", "self_attn.qkv_proj", (32, 16, 16)), ("deepseek_v4", "self_attn.fused_wqa_wkv", (16, 16))],
)
def test_fused_modules_are_one_shape_with_an_a_for_each_member(name, path, sizes):
    (job,) = [job for job in jobs(name, fused=True) if path in job.paths]
    assert job.shape.out_sizes == sizes and not job.shape.shared_a
    assert not any("q_proj" in p and "qkv" not in p for job in jobs("llama", fused=True) for p in job.paths)


def test_a_rank_of_tensor_and_expert_parallelism_has_its_share():
    whole, shared = (
        {path: job for job in jobs("deepseek_v4", share=share) for path in job.paths}
        for share in (None, layouts.Share(tp=2, ep=2))
    )
    assert (whole["self_attn.o_a_proj"].shape.groups, shared["self_attn.o_a_proj"].shape.groups) == (2, 1)
    assert shared["self_attn.q_b_proj"].shape.out_features * 2 == whole["self_attn.q_b_proj"].shape.out_features
    assert shared["self_attn.o_b_proj"].shape.in_features * 2 == whole["self_attn.o_b_proj"].shape.in_features
    assert whole["self_attn.o_b_proj"].ops == ("delta", "delta_") and shared["self_attn.o_b_proj"].ops == (
        "shrink",
        "expand",
    )
    assert (whole["mlp.experts"].shape.num_experts, shared["mlp.experts"].shape.num_experts) == (4, 2)


def test_equal_shapes_are_one_job_and_layers_are_counted():
    found = jobs("llama")
    assert len({(job.shape, job.ops) for job in found}) == len(found) < len(layouts.of(CONFIGS["llama"]).projections)
    (kv,) = [job for job in found if "self_attn.k_proj" in job.paths]
    assert kv.paths == ("self_attn.k_proj", "self_attn.v_proj") and kv.layers == 2


def test_the_list_needs_no_gpu(config, capsys):
    assert (
        entry.main(["warmup", config("deepseek_v4"), "--adapters", "3", "--rank", "4", "--list", "--tokens", "1,8"])
        == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("deepseek_v4, 3 slots of rank 4, bf16, T in 1, 8: ")
    assert re.search(r"^  self_attn\.o_a_proj \(4 layers\): 2 groups of 32 → 12; delta, delta_$", text, re.M)
    assert "mlp.experts (4 layers): 4 experts, top 2, 32 → 24 → 32; expert_delta" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_and_fails(config, capsys):
    assert entry.main(["warmup", config("llama"), "--adapters", "3", "--rank", "4"]) == 1
    assert "there is no NVIDIA GPU that torch can use here" in capsys.readouterr().err


def test_every_shape_is_called_at_every_t(config, monkeypatch, capsys):
    calls = []

    def record(kind):
        def run(shapes, *, tokens, ops, device, backward):
            calls.append((kind, *shapes, tuple(tokens), ops, backward))
            return len(tokens) * len(ops)

        return run

    monkeypatch.setattr(warmup_model, "warmup", record("dense"))
    monkeypatch.setattr(warmup_model, "warmup_experts", record("experts"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    options = ["--adapters", "3", "--rank", "4", "--dtype", "fp32", "--tokens", "40", "--backward"]
    assert entry.main(["warmup", config("qwen3_moe"), *options]) == 0
    for job in jobs("qwen3_moe"):
        mine = [call for call in calls if call[1] == job.shape]
        kind = "experts" if isinstance(job.shape, ExpertShape) else "dense"
        assert {(call[0], *call[3:]) for call in mine} == {(kind, job.ops, True)}
        assert [t for call in mine for t in call[2]] == [t * job.routes for t in range(1, 41)]
    said = capsys.readouterr().out
    count = len(jobs("qwen3_moe"))
    assert f"prepared {count} shapes, {sum(40 * len(job.ops) for job in jobs('qwen3_moe'))} calls, in " in said


@pytest.mark.parametrize(
    "options, says",
    [
        (["--tp", "3"], "tp must divide"),
        (["--ops", "gamma"], "--ops: unknown gamma"),
        (["--targets", "nothing"], "nothing is no projection"),
        (["--targets", "gate_up_proj", "--experts", "fused"], "name both, or use --experts parent"),
    ],
)
def test_what_cannot_be_is_an_error_in_a_sentence(options, says, config, capsys):
    assert entry.main(["warmup", config("qwen3_moe"), "--adapters", "3", "--rank", "4", "--list", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0", "8,0", "x", ""])
def test_tokens_must_be_numbers(tokens, config, capsys):
    with pytest.raises(SystemExit):
        entry.main(["warmup", config("llama"), "--adapters", "3", "--rank", "4", "--tokens", tokens])
    assert "must be a number of tokens" in capsys.readouterr().err


def test_a_name_on_the_hub_is_looked_up_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    asked = []

    def hf_hub_download(repository, name):
        asked.append((repository, name))
        return str(tmp_path / "config.json")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download))
    arguments = ["warmup", "org/model", "--adapters", "3", "--rank", "4", "--list"]
    assert entry.main(arguments) == 0 and asked == [("org/model", "config.json")]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert entry.main(arguments) == 2 and "org/model is no path here" in capsys.readouterr().err
    assert entry.main(["warmup", "./org/model", *arguments[2:]]) == 2 and "does not exist" in capsys.readouterr().err
