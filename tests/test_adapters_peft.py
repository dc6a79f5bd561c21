"""The real peft library and real model classes judge what is read and what is written."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import replace

import pytest
import torch
from adapter_cases import Directory, assert_same_deltas, ours, random_adapter, theirs
from tiny_models import CONFIGS, real_models, transformers_model

from grouped_lora_ops import layouts
from grouped_lora_ops.adapters import Base, read_adapter, write_adapter

peft = pytest.importorskip("peft", minversion="0.19.1", reason="the real peft library is not installed")
real_models()

ATTENTION = {
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "deepseek_v4": [f"self_attn.{leaf}" for leaf in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")],
    "qwen3_5_moe_text": ["q_proj", "o_proj", "linear_attn.in_proj_qkv", "out_proj"],
}
GQA = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE = ("llama", "qwen3")


def lora(name, **changes):
    """A peft configuration for one architecture, with patterns that some of its modules match."""
    modules = ATTENTION.get(name, GQA) + (["gate_proj", "up_proj", "down_proj"] if name in DENSE else [])
    parameters = None if name in DENSE else EXPERTS
    options = dict(r=4, lora_alpha=6, target_modules=modules, target_parameters=parameters)
    options |= dict(rank_pattern={"o_proj": 3, r".*\.gate_up_proj": 2}, alpha_pattern={r"layers\.1\..*o_b?_?proj": 5})
    return peft.LoraConfig(**options | changes)


def adapted(model, config):
    """peft's model with random factors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator)
    return model


@pytest.mark.parametrize(
    "name, rslora", [*((n, False) for n in CONFIGS if n != "kimi_k2"), ("llama", True), ("qwen3_moe", True)]
)
def test_what_peft_saves_of_real_models(name, rslora, tmp_path):
    model = adapted(transformers_model(name), lora(name, use_rslora=rslora))
    model.save_pretrained(tmp_path)
    layout = layouts.of(CONFIGS[name])
    adapter = read_adapter(tmp_path, layout)
    assert_same_deltas(ours(adapter, layout), theirs(model))
    scalings = {m.scaling for m in adapter.modules.values()}
    assert len(scalings) > 1 and len({m.rank for m in adapter.modules.values()}) + len(adapter.experts) > 1
    # the same file without a layout: dense modules only, under the names that it has
    if name in DENSE:
        assert_same_deltas(ours(read_adapter(tmp_path), layout), theirs(model))


def test_bare_names_reach_v4s_indexer_and_are_refused(tmp_path):
    model = adapted(transformers_model("deepseek_v4"), peft.LoraConfig(r=2, target_modules=["q_b_proj", "kv_proj"]))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        read_adapter(tmp_path, layouts.of(CONFIGS["deepseek_v4"]))
    problems = str(error.value).split("\n  - ")[1:]
    assert problems and all("self_attn.compressor." in p and "cannot be adapted: the indexer and" in p for p in problems)


def test_expert_pairs_are_what_peft_makes_of_them(tmp_path):
    """peft itself turns a pair for every expert into 3-D parameters; the weights it adds are the ones read here."""
    layout, directory = layouts.of(CONFIGS["qwen3_moe"]), Directory(tmp_path / "a", target_modules=["gate_proj", "up_proj", "down_proj"])
    directory.config["target_modules"] = [f"mlp.experts.{e}.{leaf}_proj" for e in range(4) for leaf in ("gate", "up", "down")]
    for e in range(4):
        for leaf, sizes in (("gate", (32, 24)), ("up", (32, 24)), ("down", (24, 32))):
            directory.pair(f"model.layers.1.mlp.experts.{e}.{leaf}_proj", *sizes)
    got = ours(directory.read(layout), layout)
    directory.config["target_modules"] = ["gate_proj", "up_proj", "down_proj"]
    directory.write()
    model = transformers_model("qwen3_moe", mlp_only_layers=[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judged = theirs(peft.PeftModel.from_pretrained(model, directory.path))
    assert_same_deltas(got, {k: v for k, v in judged.items() if "layers.1." in k}, 1e-6)


def test_fused_targets_that_peft_rewrote(tmp_path):
    """gate_proj and up_proj on fused experts are saved as parameters with rank 2r and alpha 2·alpha, B of any form."""
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    model = adapted(transformers_model("qwen3_moe", mlp_only_layers=[]), config)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(saved["target_parameters"]) == ["down_proj", "gate_up_proj"] and saved["rank_pattern"]
    layout = layouts.of(CONFIGS["qwen3_moe"] | {"mlp_only_layers": []})
    adapter = read_adapter(tmp_path, layout)
    assert_same_deltas(ours(adapter, layout), theirs(model))
    assert {m.rank for k, m in adapter.experts.items() if "gate_up" in k} == {4}
    assert {m.scaling for m in adapter.experts.values()} == {1.5}


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_one_expert_parameter_alone(parameter, tmp_path):
    model = adapted(transformers_model("glm4_moe"), peft.LoraConfig(r=2, target_modules=[], target_parameters=[parameter]))
    model.save_pretrained(tmp_path)
    layout = layouts.of(CONFIGS["glm4_moe"])
    adapter = read_adapter(tmp_path, layout)
    assert [k.rpartition(".")[2] for k in adapter.experts] == [parameter]
    assert_same_deltas(ours(adapter, layout), theirs(model))


def test_a_single_expert(tmp_path):
    model = adapted(transformers_model("glm4_moe", n_routed_experts=1, num_experts_per_tok=1), lora("glm4_moe"))
    model.save_pretrained(tmp_path)
    layout = layouts.of(CONFIGS["glm4_moe"] | {"n_routed_experts": 1})
    got, want = ours(read_adapter(tmp_path, layout), layout), theirs(model)
    assert_same_deltas(got, {k: v.view(got[k].shape) for k, v in want.items()})


def test_an_adapter_of_the_inner_model(tmp_path):
    """peft around the decoder itself: names without `model.`."""
    model = adapted(transformers_model("llama").model, lora("llama"))
    model.save_pretrained(tmp_path)
    layout = layouts.of(CONFIGS["llama"])
    assert_same_deltas(ours(read_adapter(tmp_path, layout), layout), {f"model.{k}": v for k, v in theirs(model).items()})


def test_outputs_are_the_models(tmp_path):
    """The deltas that were read, added to the base weights, give the logits of peft's model: V4 but for wo_a."""
    config = lora("deepseek_v4", target_modules=[t for t in ATTENTION["deepseek_v4"] if "o_a" not in t])
    eager = dict(_experts_implementation="eager")  # the grouped one takes no float64
    base = transformers_model("deepseek_v4", **eager).double()
    tokens = torch.arange(12)[None] % 64
    model = adapted(base, config)
    for parameter in model.parameters():
        parameter.data *= 0.3 if parameter.requires_grad else 1
    want = model(tokens).logits
    model.save_pretrained(tmp_path)
    layout, plain = layouts.of(CONFIGS["deepseek_v4"]), transformers_model("deepseek_v4", **eager).double()
    parameters = dict(plain.named_parameters())
    for path, delta in ours(read_adapter(tmp_path, layout), layout).items():
        parameters[path if path in parameters else f"{path}.weight"].data += delta
    torch.testing.assert_close(plain(tokens).logits, want, rtol=1e-8, atol=1e-8)
    untouched = transformers_model("deepseek_v4", **eager).double()
    assert not torch.allclose(untouched(tokens).logits, want, atol=1e-3)


def test_a_text_model_inside_a_multimodal_one(tmp_path):
    """Paths are the real class's (model.language_model.layers), in what is read and in what is written."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = CONFIG_MAPPING["qwen3_5_moe"](text_config=CONFIGS["qwen3_5_moe_text"], vision_config=vision)
    model = adapted(AutoModelForImageTextToText.from_config(config), lora("qwen3_5_moe_text"))
    model.save_pretrained(tmp_path / "theirs")
    layout = layouts.of(config)
    adapter = read_adapter(tmp_path / "theirs", layout)
    assert_same_deltas(ours(adapter, layout), theirs(model))
    write_adapter(tmp_path / "ours", adapter, layout, base=Base("org/model", "1"))
    loaded = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_config(config), tmp_path / "ours")
    assert_same_deltas(theirs(loaded), theirs(model))


class ModuleExperts(torch.nn.Module):
    """Experts as transformers 4 had them: a module for each. Tiny, and only to be adapted."""

    def __init__(self, layout):
        super().__init__()
        for place in layout.places(["q_proj", "k_proj", "v_proj", *EXPERTS]):
            p = place.projection
            for e in range(p.experts or 1):
                for member in p.facts.members or ((p.facts.leaf,),):
                    out = p.out_features // len(p.facts.members or (1,))
                    owner = place.path.rpartition(".")[0] + (f".{e}" if p.experts else "")
                    self.make(owner.split("."), member[0], torch.nn.Linear(p.in_features, out, bias=False))

    def make(self, path, leaf, linear):
        module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.add_module(leaf, linear)


@pytest.mark.parametrize("form", ["experts", "serving"])
def test_a_module_for_every_expert(form, tmp_path):
    """Ranks and scalings that differ by layer; peft's deltas of every expert are the adapter's."""
    layout = layouts.of(CONFIGS["qwen3_moe"] | {"mlp_only_layers": []})
    adapter = random_adapter(layout, ["self_attn.q_proj", *EXPERTS])
    experts = dict(adapter.experts)
    down = "model.layers.1.mlp.experts.down_proj"
    experts[down] = replace(experts[down], scaling=1.25)
    other = random_adapter(layout, ["mlp.experts.gate_up_proj"], rank=2, seed=5).experts
    experts["model.layers.0.mlp.experts.gate_up_proj"] = other["model.layers.0.mlp.experts.gate_up_proj"]
    adapter = replace(adapter, experts=experts)
    write_adapter(tmp_path, adapter, layout, base=Base("org/model", "1"), form=form)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    # q_proj of two layers (for serving k and v with it), and what every layer's experts are called
    assert len(config["target_modules"]) == (2 if form == "experts" else 6) + 3 * 4
    got = theirs(peft.PeftModel.from_pretrained(ModuleExperts(layout), tmp_path))
    for path, expert in adapter.experts.items():
        owner = path.rpartition(".")[0]
        for e in range(4):
            leaves = ("gate_proj", "up_proj") if "gate_up" in path else ("down_proj",)
            delta = torch.cat([got.pop(f"{owner}.{e}.{leaf}") for leaf in leaves])
            torch.testing.assert_close(delta, expert.delta(e), rtol=1e-6, atol=1e-6)
    assert len(got) == (2 if form == "experts" else 6)
    for path, delta in got.items():
        lora = adapter.modules.get(path)
        want = torch.zeros_like(delta) if lora is None else lora.scaling * (lora.lora_b.double() @ lora.lora_a.double())
        torch.testing.assert_close(delta, want, rtol=1e-6, atol=1e-6)


PATTERNS = [r"layers\.0\..*", r".*\.1\..*_proj", "o_proj", r".*experts.*", r".*\.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("seed", range(6))
def test_random_configurations(seed, tmp_path):
    """Overlapping patterns included: a file that peft can load again is read as peft reads it, or peft cannot either."""
    draw = random.Random(seed)
    name = draw.choice([n for n in CONFIGS if n != "kimi_k2"])
    modules = ATTENTION.get(name, GQA)
    patterns = [{p: draw.randint(1, 6) for p in draw.sample(PATTERNS, draw.randint(0, 3))} for _ in range(2)]
    changes = dict(r=draw.randint(1, 5), lora_alpha=draw.choice([1, 7.5, 16]), use_rslora=draw.random() < 0.3)
    changes |= dict(rank_pattern=patterns[0], alpha_pattern=patterns[1], target_modules=draw.sample(modules, 2))
    adapted(transformers_model(name), lora(name, **changes)).save_pretrained(tmp_path)
    layout = layouts.of(CONFIGS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = peft.PeftModel.from_pretrained(transformers_model(name), tmp_path)
        except RuntimeError:  # sorted patterns gave a module another rank than it was trained with
            with pytest.raises(ValueError, match="by the configuration and the model; got"):
                read_adapter(tmp_path, layout)
            return
    adapter = read_adapter(tmp_path, layout)
    assert_same_deltas(ours(adapter, layout), theirs(loaded))
    write_adapter(tmp_path / "ours", adapter, layout, base=Base("org/model", "1"))
    assert_same_deltas(theirs(peft.PeftModel.from_pretrained(transformers_model(name), tmp_path / "ours")), theirs(loaded), 1e-6)
