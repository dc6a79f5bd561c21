"""Layouts: against the real model classes of transformers where it is installed, and what is derived from them."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace

import pytest
import torch
from tiny_models import CONFIGS, real_models, transformers_config, transformers_model

from grouped_lora_ops import layouts
from grouped_lora_ops.layouts import Layout, Projection, Shard, Share, Status, size

V4_FLASH = dict(
    model_type="deepseek_v4",
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    moe_intermediate_size=2048,
    swiglu_limit=10,
)
V4_PRO = V4_FLASH | dict(hidden_size=7168, num_attention_heads=128, o_groups=16)
V4_TARGETS = ["self_attn." + leaf for leaf in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_of_the_real_model_is_declared_or_refused(name):
    """Names and shapes are the class's own, none is missing, and no other linear or 3-D parameter is left unmentioned."""
    real_models()
    real, model = transformers_model(name, "meta"), layouts.of(CONFIGS[name])
    assert layouts.of(transformers_config(name)).projections == model.projections or name == "kimi_k2"
    parameters = dict(real.named_parameters())
    declared = {}
    for place in model.places([p.path for p in model.projections]):
        p = place.projection
        declared[place.path if p.experts else f"{place.path}.weight"] = (
            [p.total_out, p.in_features]
            if p.experts is None
            else [p.experts, p.in_features, p.out_features]
            if model.layout.experts.transposed
            else [p.experts, p.out_features, p.in_features]
        )
    assert {key: list(parameters[key].shape) for key in declared} == declared
    for key, parameter in parameters.items():
        if key in declared or not key.startswith("model.layers.") or parameter.dim() < 2:
            continue
        owner = real.get_submodule(key.rpartition(".")[0])
        if isinstance(owner, torch.nn.Linear) or (parameter.dim() == 3 and "expert" in key):
            assert "cannot be adapted: " in str(model.locate(key.removesuffix(".weight"))), key
    for p in model.projections:
        if p.experts is not None:
            owner = real.get_submodule(f"model.layers.{p.layers[0]}.{p.facts.owner}")
            storage = model.layout.experts
            assert (owner.is_transposed, owner.is_concatenated) == (storage.transposed, not storage.interleaved)
            assert owner.has_bias == storage.bias and owner.has_gate
        if p.groups is not None:
            assert real.get_submodule(f"model.layers.0.{p.path}").n_groups == p.groups


@pytest.mark.parametrize("name", [t for layout in layouts.known() for t in layout.model_types])
def test_default_sizes_of_the_real_classes(name):
    """The sizes that transformers' own default configurations have, multimodal classes included, on the meta device."""
    transformers = real_models()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        assert name == "kimi_k2"  # comes with code of its own
        return
    config = CONFIG_MAPPING[name]()
    kind = "ImageTextToText" if name in ("kimi_k25", "qwen3_5_moe") else "CausalLM"
    with torch.device("meta"):
        parameters = dict(getattr(transformers, f"AutoModelFor{kind}").from_config(config).named_parameters())
    model = layouts.of(json.loads(config.to_json_string(use_diff=False)))
    for place in model.places([p.path for p in model.projections]):
        p = place.projection
        shape = [p.total_out, p.in_features]
        if p.experts is not None:
            shape = [p.experts, *(shape[::-1] if model.layout.experts.transposed else shape)]
        assert list(parameters[place.path if p.experts else f"{place.path}.weight"].shape) == shape, place.path


def test_status_and_reason():
    by_status = {s: [k.name for k in layouts.known() if k.status is s] for s in Status}
    assert by_status[Status.UNSTABLE] == []
    assert by_status[Status.STRUCTURAL] == ["gqa_gdn_moe", "kimi_k2"]
    assert all(k.reason for k in layouts.known() if k.status is not Status.VALIDATED)
    llama = layouts.of(CONFIGS["llama"]).layout
    unstable = replace(llama, name="soon", model_types=("soon",), status=Status.UNSTABLE, reason="names may change")
    with pytest.raises(ValueError, match="layout soon is UNSTABLE and must give a reason"):
        replace(unstable, reason="")
    layouts.register(unstable)
    try:
        with pytest.warns(layouts.UnstableLayout, match="layout soon is UNSTABLE: names may change"):
            layouts.of(CONFIGS["llama"] | {"model_type": "soon"})
        assert "unstable: names may change" in layouts.preflight(CONFIGS["llama"] | {"model_type": "soon"}).notes
        with pytest.raises(ValueError, match="the model type soon of soon2 is that of soon"):
            layouts.register(replace(unstable, name="soon2"))
        with pytest.raises(ValueError, match="the name of soon is that of soon"):
            layouts.register(replace(unstable, model_types=("later",)))
    finally:
        layouts.unregister("soon")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in CONFIGS.values():
            layouts.of(config)


def test_a_new_layout_is_a_few_lines_of_facts():
    hidden, heads, wide = size("hidden_size"), size("heads"), size("wide")
    layout = Layout(
        name="new",
        model_types=("new",),
        projections=(
            Projection("attn.q", hidden, hidden, Shard.COLUMN, units=heads, family="qk"),
            Projection("attn.k", hidden, hidden, Shard.COLUMN, units=heads, family="qk"),
            Projection("attn.o", hidden, wide, Shard.GROUPED_COLUMN, groups=heads),
        ),
        prefixes=("blocks",),
        status=Status.STRUCTURAL,
    )
    model = layouts.Model(layout, dict(hidden_size=8, heads=2, wide=3, num_hidden_layers=1))
    fused, grouped = model.buffers(4, 2, fused=True, share=Share(tp=2))
    assert (fused.key, fused.a_shape, fused.b_shape, fused.out_sizes) == ("blocks.0.attn.qk", (4, 2, 2, 8), (4, 8, 2), (4, 4))
    assert (grouped.kind, grouped.a_shape, grouped.b_shape) == ("grouped", (4, 2, 8), (4, 1, 3, 2))


def facts(**changes):
    return Layout(**{"name": "x", "model_types": ("x",), "status": Status.STRUCTURAL} | changes)


@pytest.mark.parametrize(
    "projections, sentence",
    [
        ([("*.q", Shard.COLUMN, {})], r"'\*\.q' must be a plain name; patterns would silently widen a target"),
        ([("a.q.*", Shard.COLUMN, {})], "must be a plain name"),
        ([("a.q", Shard.COLUMN, {"aliases": (".*_proj",)})], "must be a plain name"),
        ([("q", Shard.COLUMN, {})], "q must be qualified by its owner"),
        ([("a.q", Shard.COLUMN, {}), ("a.k", Shard.COLUMN, {"aliases": ("q",)})], "a.q names both a.q and a.k"),
        ([("a.q", Shard.GROUPED_COLUMN, {})], "a.q must state its groups"),
        ([("a.q", Shard.COLUMN, {"groups": size("g")})], "a.q must state its groups"),
        ([("a.q", Shard.EXPERT, {"experts": size("e")})], "a.q must state experts and members"),
        ([("a.q", Shard.EXPERT, {"experts": size("e"), "members": (("q",),)})], "a.q needs the layout's ExpertStorage"),
        (
            [("a.q", Shard.COLUMN, {"family": "f"}), ("a.k", Shard.REPLICATED, {"family": "f"})],
            "a.q and a.k cannot be one family",
        ),
        ([], "must have projections"),
    ],
)
def test_wrong_facts_are_refused(projections, sentence):
    made = tuple(Projection(path, size("d"), size("n"), shard, **more) for path, shard, more in projections)
    with pytest.raises(ValueError, match=sentence):
        facts(projections=made)
    with pytest.raises(ValueError, match="a.q is a projection and must not be refused"):
        facts(projections=(Projection("a.q", size("d"), size("n"), Shard.COLUMN),), refused={"a.q": "no"})


def test_v4_targets_are_qualified_by_their_owner():
    model = layouts.of(V4_FLASH)
    assert [p.path for p in model.targets()][:5] == V4_TARGETS
    for name, path in zip(("wq_a", "wq_b", "wkv", "wo_a", "wo_b"), V4_TARGETS):
        for prefix in ("model.layers.3.attn.", "layers.3.attn.", "model.layers.3.self_attn."):
            assert model.locate(prefix + name).path == f"model.layers.3.{path}"
        assert [p.path for p in model.targets([name])] == [path]
    for other in (
        "self_attn.compressor.indexer.q_b_proj",
        "self_attn.compressor.indexer.kv_proj",
        "self_attn.compressor.kv_proj",
        "self_attn.indexer.wq_b",
        "attn.indexer.wq_b",
        "attn.indexer.compressor.wkv",
        "attn.compressor.wkv",
        "ffn.gate",
    ):
        assert model.locate(f"layers.3.{other}").startswith("cannot be adapted: ")
        with pytest.raises(ValueError, match=f"{other} (cannot be a target|is no projection)"):
            model.targets([other])
    assert [p.path for p in model.targets(["wo_a", "q_a_proj"])] == ["self_attn.q_a_proj", "self_attn.o_a_proj"]  # its order


@pytest.mark.parametrize("config, groups, heads", [(V4_FLASH, 8, 64), (V4_PRO, 16, 128)])
def test_v4_sizes(config, groups, heads):
    model, hidden = layouts.of(config), config["hidden_size"]
    sizes = {p.path: (p.in_features, p.out_features, p.groups) for p in model.targets(V4_TARGETS)}
    assert sizes == {
        "self_attn.q_a_proj": (hidden, 1024, None),
        "self_attn.q_b_proj": (1024, heads * 512, None),
        "self_attn.kv_proj": (hidden, 512, None),
        "self_attn.o_a_proj": (4096, 1024, groups),
        "self_attn.o_b_proj": (groups * 1024, hidden, None),
    }
    (buffer,) = (b for b in model.buffers(8, 16, selectors=["o_a_proj"], share=Share(tp=4)) if ".0." in b.key)
    assert (buffer.kind, buffer.a_shape, buffer.b_shape) == ("grouped", (8, 16, 4096), (8, groups // 4, 1024, 16))
    with pytest.raises(ValueError, match=f"tp must divide the {groups} groups of self_attn.o_a_proj; got 3"):
        model.buffers(8, 16, selectors=["o_a_proj"], share=Share(tp=3))


def test_targets_refuse_what_would_widen():
    model = layouts.of(CONFIGS["deepseek_v3"])
    for pattern in ("all-linear", "*_proj", ".*q_b_proj", "self_attn.(q|kv)_b_proj", "q_?_proj"):
        with pytest.raises(ValueError, match="is a pattern and could name more than was meant"):
            model.targets([pattern])
    with pytest.raises(ValueError, match=r"gate_proj names mlp\.experts\.gate_up_proj \(with .*, mlp\.gate_proj, mlp\.shared_experts"):
        model.targets(["gate_proj"])
    with pytest.raises(ValueError, match=r"down_proj names mlp\.down_proj, mlp\.experts\.down_proj, mlp\.shared_experts"):
        model.targets(["down_proj"])
    with pytest.raises(ValueError, match=r"mlp\.experts\.up_proj is a part of one parameter"):
        model.targets(["mlp.experts.up_proj"])
    with pytest.raises(ValueError, match="q_c_proj is no projection of mla_moe. Name one of: self_attn.q_a_proj, "):
        model.targets(["q_c_proj"])
    with pytest.raises(ValueError, match="mlp.gate cannot be a target: the router"):
        model.targets(["mlp.gate"])
    with pytest.raises(TypeError, match="must be a list of names; got the string 'q_b_proj'"):
        model.targets("q_b_proj")
    assert [p.path for p in model.targets(["mlp.shared_experts.gate_proj", "q_b_proj"])] == [
        "self_attn.q_b_proj",
        "mlp.shared_experts.gate_proj",
    ]


def test_mla_without_a_low_rank_q():
    paths = [p.path for p in layouts.of(CONFIGS["deepseek_v3"] | {"q_lora_rank": None}).projections]
    assert paths[:3] == ["self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"]
    assert "self_attn.fused_qkv_a_proj_with_mqa" not in layouts.of(CONFIGS["deepseek_v3"] | {"q_lora_rank": None}).families
    assert "self_attn.fused_qkv_a_proj_with_mqa" in layouts.of(CONFIGS["deepseek_v3"]).families


@pytest.mark.parametrize(
    "name, module, form, member, expert, path",
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj", "expert", 1, 3, "mlp.experts.gate_up_proj"),
        ("qwen3_moe", "model.layers.1.mlp.experts.0.w2", "expert", None, 0, "mlp.experts.down_proj"),
        ("qwen3_moe", "model.layers.1.mlp.experts.base_layer", "inner", None, None, "mlp.experts"),
        ("qwen3_moe", "model.layers.1.mlp.experts", "outer", None, None, "mlp.experts"),
        ("qwen3_moe", "model.layers.1.mlp.experts.w3", "stack", 1, None, "mlp.experts.gate_up_proj"),
        ("qwen3_moe", "model.layers.1.mlp.experts.gate_up_proj", "stack", None, None, "mlp.experts.gate_up_proj"),
        ("qwen3_5_moe_text", "model.language_model.layers.3.self_attn.q_proj", "module", None, None, "self_attn.q_proj"),
        ("kimi_k2", "language_model.model.layers.1.self_attn.kv_b_proj", "module", None, None, "self_attn.kv_b_proj"),
    ],
)
def test_locate(name, module, form, member, expert, path):
    place = layouts.of(CONFIGS[name]).locate(module)
    assert (place.form, place.member, place.expert) == (form, member, expert)
    assert place.path == f"model.layers.{place.layer}.{path}"


@pytest.mark.parametrize(
    "name, module, reason",
    [
        ("llama", "lm_head", "is outside the decoder layers"),
        ("llama", "model.layers.2.self_attn.q_proj", "is in layer 2 of a model with 2 layers"),
        ("llama", "model.layers.01.self_attn.q_proj", "is outside the decoder layers"),
        ("llama", "model.layers.1.q_proj", "is no projection of gqa_dense"),
        ("llama", "visual.model.layers.1.self_attn.q_proj", "is outside the decoder layers"),
        ("deepseek_v3", "model.layers.0.mlp.experts.1.up_proj", "is in layer 0, which has no mlp.experts.gate_up_proj"),
        ("deepseek_v3", "model.layers.1.mlp.up_proj", "is in layer 1, which has no mlp.up_proj"),
        ("deepseek_v3", "model.layers.1.mlp.experts.4.up_proj", "is of expert 4 of a model with 4 experts"),
        ("qwen3_5_moe_text", "model.layers.0.self_attn.q_proj", "is in layer 0, which has no self_attn.q_proj"),
        ("qwen3_5_moe_text", "model.layers.0.mlp.shared_expert_gate", "cannot be adapted: one gate value"),
    ],
)
def test_what_a_path_cannot_mean(name, module, reason):
    assert layouts.of(CONFIGS[name]).locate(module).startswith(reason)


def test_fused_names():
    fused = layouts.of(CONFIGS["llama"]).locate("model.layers.1.self_attn.qkv_proj")
    assert [m.path.rpartition(".")[2] for m in fused.members] == ["q_proj", "k_proj", "v_proj"]
    fused = layouts.of(V4_FLASH).locate("layers.1.attn.fused_wqa_wkv")
    assert [m.path.rpartition(".")[2] for m in fused.members] == ["q_a_proj", "kv_proj"]


def rebuilt(model, p, tp):
    """The features, groups and experts that the shares of all ranks cover, in order."""
    parts = [p.part(Share(tp=tp, tp_rank=k, ep=tp, ep_rank=k)) for k in range(tp)]
    rows = [i for k in range(tp) for r in parts[k].rows for i in range(r.start, r.stop)]
    columns = [i for k in range(tp) for i in range(parts[k].columns.start, parts[k].columns.stop)]
    experts = [i for k in range(tp) for i in range(*parts[k].experts.indices(p.experts))] if p.experts else None
    return rows, columns, experts


@pytest.mark.parametrize("name", CONFIGS)
def test_shares_cover_every_feature_once(name):
    model = layouts.of(CONFIGS[name])
    for p in model.projections:
        rows, columns, experts = rebuilt(model, p, 2)
        everything = [list(range(p.total_out)), list(range(p.in_features))]
        shard = p.facts.shard
        assert sorted(rows) == everything[0] if shard in (Shard.COLUMN, Shard.GROUPED_COLUMN) else rows == everything[0] * 2
        assert columns == everything[1] if shard is Shard.ROW else columns == everything[1] * 2
        if p.experts:
            assert experts == list(range(p.experts))


def test_a_linear_with_parts_is_divided_part_by_part():
    model = layouts.of(CONFIGS["qwen3_5_moe_text"])
    (p,) = model.targets(["linear_attn.in_proj_qkv"])  # q and k of 16 features, v of 32
    assert p.part(Share(tp=2, tp_rank=1)).rows == (slice(8, 16), slice(24, 32), slice(48, 64))
    assert not p.facts.default


def test_shares_that_do_not_divide():
    model = layouts.of(CONFIGS["llama"])
    for tp, sentence in ((4, "tp must divide the 2 heads or features of self_attn.k_proj; got 4"), (3, "of self_attn.q_proj; got 3")):
        with pytest.raises(ValueError, match=sentence):
            model.buffers(2, 4, share=Share(tp=tp))
    with pytest.raises(ValueError, match="ep must divide the 4 experts of mlp.experts.gate_up_proj; got 3"):
        layouts.of(CONFIGS["gpt_oss"]).buffers(2, 4, share=Share(ep=3))
    for bad in (dict(tp=0), dict(tp=2, tp_rank=2), dict(ep=2, ep_rank=-1)):
        with pytest.raises(ValueError, match="_rank must be in 0 … "):
            Share(**bad)


def test_expert_buffers():
    model = layouts.of(CONFIGS["qwen3_moe"])  # E 4, H 32, I 24
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def shapes(**options):
        return [(b.a_shape, b.b_shape) for b in model.buffers(3, 8, selectors=experts, **options)]

    assert shapes() == [((3, 4, 2, 8, 32), (3, 4, 48, 8)), ((3, 4, 8, 24), (3, 4, 32, 8))]
    assert shapes(gate_up_each=False, share=Share(ep=2)) == [((3, 2, 8, 32), (3, 2, 48, 8)), ((3, 2, 8, 24), (3, 2, 32, 8))]
    assert shapes(shared_outer=True) == [((3, 1, 2, 8, 32), (3, 4, 48, 8)), ((3, 4, 8, 24), (3, 1, 32, 8))]


def test_fused_buffers_hold_the_whole_family():
    model = layouts.of(CONFIGS["llama"])
    first, second = model.buffers(3, 8, selectors=["v_proj"], fused=True)
    assert (first.key, second.key) == ("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj")
    assert (first.kind, first.a_shape, first.b_shape, first.out_sizes) == ("fused", (3, 3, 8, 32), (3, 64, 8), (32, 16, 16))
    assert len(model.buffers(3, 8, fused=True)) == 2 * 4  # qkv, o, gate_up, down


def test_gradient_sums():
    llama, v4 = layouts.of(CONFIGS["llama"]), layouts.of(V4_FLASH)
    q, o = llama.targets(["q_proj", "o_proj"])
    assert llama.gradient_sums(q) == {"a": ("tp",), "b": (), "shared": ()}
    assert llama.gradient_sums(o) == {"a": (), "b": (), "shared": ()}
    assert llama.gradient_sums(o, sequence_parallel=True) == {"a": (), "b": ("tp",), "shared": ()}
    mla = layouts.of(CONFIGS["deepseek_v3"])
    (kv_a,) = mla.targets(["kv_a_proj_with_mqa"])
    assert mla.gradient_sums(kv_a, sequence_parallel=True)["a"] == ("tp",) and mla.gradient_sums(kv_a)["a"] == ()
    # V4's attention sees the whole sequence: replicated projections must not be summed, sequence parallel or not
    for p in v4.targets(V4_TARGETS):
        sums = v4.gradient_sums(p, sequence_parallel=True)
        assert sums["b"] == () and sums["a"] == (("tp",) if p.path.endswith(("q_b_proj", "o_a_proj")) else ())
    gate_up = v4.targets(["mlp.experts.gate_up_proj"])[0]
    assert v4.gradient_sums(gate_up) == {"a": (), "b": (), "shared": ("ep",)}


@pytest.mark.parametrize("name", CONFIGS)
def test_preflight(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    start = time.perf_counter()
    report = layouts.preflight(tmp_path, share=Share(tp=2, ep=2))
    assert time.perf_counter() - start < 1
    assert report.ok and len(report.supported) == len(layouts.of(tmp_path).projections)
    assert str(report).startswith(f"{name}: layout {report.layout}, {report.status.value}\n  + ")


def test_preflight_says_what_is_missing(tmp_path):
    report = layouts.preflight({"model_type": "gpt2"})
    assert not report.ok and report.missing[0].startswith("there is no layout for this model type; known: llama, ")
    with pytest.raises(TypeError, match=r"must be given as a folder, .*; got Linear\.$"):
        layouts.of(torch.nn.Linear(1, 1))
    model = torch.nn.Linear(1, 1)
    model.config = {"model_type": "llama"}
    with pytest.raises(TypeError, match=r"got Linear; pass its \.config"):
        layouts.of(model)
    with pytest.raises(ValueError, match="no layout for model type 'gpt2'; there are layouts for llama, "):
        layouts.of({"model_type": "gpt2"})
    lacking = {k: v for k, v in V4_FLASH.items() if k not in ("o_groups", "moe_intermediate_size")}
    report = layouts.preflight(lacking)
    assert not report.ok and "self_attn.o_a_proj: o_groups is not in the config" in report.missing
    assert any(line.startswith("self_attn.q_a_proj: 4096 → 1024") for line in report.supported)
    with pytest.raises(ValueError, match="the config of a deepseek_v4 model lacks o_groups"):
        layouts.of(lacking)
    assert layouts.preflight({"model_type": "llama"}).missing == ("num_hidden_layers is not in the config",)
    with pytest.raises(ValueError, match="lacks num_hidden_layers"):
        layouts.of({"model_type": "llama"})
    uneven = layouts.preflight(V4_FLASH | {"o_groups": 7})
    assert any("self_attn.o_a_proj: " in line and "is not whole: 32768 / 7" in line for line in uneven.missing)
    shared = layouts.preflight(V4_FLASH, share=Share(tp=16))
    assert shared.missing == (
        "tp must divide the 8 groups of self_attn.o_a_proj; got 16.",
        "tp must divide the 8 heads or features of self_attn.o_b_proj; got 16.",
    )
    notes = layouts.preflight(V4_FLASH | {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}).notes
    assert "base weights are quantised (fp8): deltas apply, the fused linear ops need plain weights" in notes
    assert "the 1 multi-token-prediction layer(s) are not adapted" in notes and not any("weight_scale" in note for note in notes)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    notes = layouts.preflight(V4_FLASH | {"quantization_config": blocks}).notes
    assert "e4m3 weights with 128 × 128 scales: linear multiplies them as they are (weight_scale)" in notes
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        layouts.preflight(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not readable JSON"):
        layouts.of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be an object; got list"):
        layouts.of(tmp_path / "config.json")


def test_a_text_model_inside_a_multimodal_one():
    text = CONFIGS["qwen3_5_moe_text"]
    model = layouts.of({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}})
    assert model.projections == layouts.of(text).projections
    assert model.path(3, model.projections[0]) == "model.language_model.layers.3.self_attn.q_proj"
    for prefix in ("model.layers", "layers", "model.language_model.layers"):
        assert model.locate(f"{prefix}.3.self_attn.q_proj").path == "model.language_model.layers.3.self_attn.q_proj"
    kimi = layouts.of({"model_type": "kimi_k25", "text_config": CONFIGS["deepseek_v3"] | {"model_type": "unheard_of"}})
    assert kimi.layout.name == "kimi_k2"
