"""Reading experts: every form that files have, against what peft makes of them; and what could be read in two ways."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from adapter_cases import PREFIX, Directory, assert_same_deltas, ours
from tiny_models import CONFIGS

from grouped_lora_ops import layouts
from grouped_lora_ops.adapters import ExpertModule
from grouped_lora_ops.adapters.experts import wrap, written_by

FIXTURES = Path(__file__).parent / "fixtures"
CASES = json.loads((FIXTURES / "experts.json").read_text())
SIZES = {"both": (8, 4), "uneven": (6, 5), "gate_up": (8, 4), "down": (6, 6)}  # H, I
FLOAT32 = 1e-5  # peft computed the fixtures' deltas in float32
EXPERTS = "model.layers.0.mlp.experts"


def model_of(h: int, i: int, transposed: bool = False, experts: int = 3, layers: int = 1):
    name, width = ("gpt_oss", "intermediate_size") if transposed else ("qwen3_moe", "moe_intermediate_size")
    config = CONFIGS[name] | {"hidden_size": h, width: i, "num_hidden_layers": layers, "mlp_only_layers": []}
    return layouts.of(config | {"num_experts": experts, "num_local_experts": experts})


@pytest.fixture(scope="module")
def saved_by_peft():
    return safetensors.torch.load_file(FIXTURES / "experts.safetensors")


def unpack(name, saved, path):
    """A directory as peft saved it, the model's layout, and the deltas that peft computed, as the model stores them."""
    _, case, *rest = name.split(" ")
    transposed = "[E, in, out]" in name
    directory = Directory(path)
    directory.config = dict(CASES[name])
    directory.tensors = {k.split("/")[1]: v for k, v in saved.items() if k.startswith(f"{name}/base")}
    deltas = {f"{EXPERTS}.{k.split('/delta.')[1]}": v for k, v in saved.items() if k.startswith(f"{name}/delta")}
    deltas = {k: v.transpose(1, 2) if transposed else v for k, v in deltas.items()}
    return directory, model_of(*SIZES[case], transposed), deltas


def exchanged(name):
    """Whether A and B of a case are exchanged."""
    plain, bare = "[E, out, in]" in name, "bare" in name
    return {"0.18.1": plain, "0.19.0": plain or not bare, "0.21.2": not plain and bare}[name.split(" ")[0]]


def square_and_silent(name):
    """peft ≥ 0.19 on [E, in, out]: what it does depends on an attribute that the file does not mention."""
    return not name.startswith("0.18") and "[E, in, out]" in name and name.split(" ")[1] in ("gate_up", "down")


@pytest.mark.parametrize("name", CASES)
def test_what_three_releases_of_peft_saved(name, saved_by_peft, tmp_path):
    directory, model, expected = unpack(name, saved_by_peft, tmp_path / "adapter")
    if square_and_silent(name):
        (problem,) = directory.problems(model)
        assert "the model's sizes are equal, and nothing says whether A and B are exchanged" in problem
        assert_same_deltas(ours(directory.read(model, expert_swapped=exchanged(name)), model), expected, FLOAT32)
        return
    assert_same_deltas(ours(directory.read(model), model), expected, FLOAT32)


@pytest.mark.parametrize("name", [n for n in CASES if n.split(" ")[1] in ("gate_up", "down")])
def test_square_factors_without_a_version_are_refused(name, saved_by_peft, tmp_path):
    directory, model, expected = unpack(name, saved_by_peft, tmp_path / "adapter")
    swapped = exchanged(name)
    del directory.config["peft_version"]
    for version in (None, "", "nightly", "0.19.1.dev0", "0.16.0"):
        directory.config["peft_version"] = version
        (problem,) = directory.problems(model)
        assert "nothing says whether A and B are exchanged" in problem and problem.endswith("pass expert_swapped=True or False.")
    (problem,) = directory.problems(model, expert_swapped=swapped)
    assert problem.endswith('does not write such a file): pass expert_order="rank-major" or "expert-major".')
    read = directory.read(model, expert_swapped=swapped, expert_order="rank-major")
    assert_same_deltas(ours(read, model), expected, FLOAT32)
    stamp = tmp_path / "adapter" / "automodel_peft_config.json"
    if "out, in" in name:  # Automodel's stamp
        stamp.write_text(json.dumps({"paramwrapper_layout": "peft-0.18" if swapped else "peft-0.19.1"}))
        assert_same_deltas(ours(directory.read(model), model), expected, FLOAT32)
        stamp.write_text(json.dumps({"paramwrapper_layout": "peft-9"}))
        assert 'automodel_peft_config.json: paramwrapper_layout = "peft-9" is not known.' in directory.problems(model)


def test_shapes_say_it_without_a_version_but_not_the_order(saved_by_peft, tmp_path):
    for name in ("0.18.1 uneven [E, out, in]", "0.21.2 uneven [E, out, in]"):
        directory, model, expected = unpack(name, saved_by_peft, tmp_path / name[:4])
        del directory.config["peft_version"]
        (problem,) = directory.problems(model)
        assert problem.endswith('pass expert_order="rank-major" or "expert-major".')
        assert_same_deltas(ours(directory.read(model, expert_order="rank-major"), model), expected, FLOAT32)
        wrong = ours(directory.read(model, expert_order="expert-major"), model)
        assert not torch.allclose(wrong[f"{EXPERTS}.down_proj"], expected[f"{EXPERTS}.down_proj"])


def test_a_version_that_does_not_write_such_a_file(saved_by_peft, tmp_path):
    """Exporters exist that emit the exchanged form with columns in another order than peft's."""
    directory, model, _ = unpack("0.18.1 uneven [E, out, in]", saved_by_peft, tmp_path / "a")
    directory.config["peft_version"] = "0.21.2"
    (problem,) = directory.problems(model)
    assert "(peft '0.21.2' does not write such a file)" in problem
    (problem,) = directory.problems(model, expert_swapped=False)
    assert problem.endswith("has A and B exchanged; expert_swapped says otherwise.")
    stamp = tmp_path / "a" / "automodel_peft_config.json"
    stamp.write_text(json.dumps({"paramwrapper_layout": "peft-0.19.1"}))
    assert directory.problems(model)[0].endswith("has A and B exchanged; the stamp beside the file says otherwise.")
    with pytest.raises(ValueError, match='expert_order must be "rank-major" or "expert-major"; got .k-major.'):
        directory.read(model, expert_order="k-major")


def test_one_file_is_of_one_kind(saved_by_peft, tmp_path):
    directory, model, _ = unpack("0.21.2 uneven [E, out, in]", saved_by_peft, tmp_path / "a")
    old, _, _ = unpack("0.18.1 uneven [E, out, in]", saved_by_peft, tmp_path / "b")
    directory.tensors |= {k: v for k, v in old.tensors.items() if "base_layer" in k}
    assert directory.problems(model)[0].endswith("has them exchanged: one file cannot have both.")


def test_columns_of_b_are_rank_major(tmp_path):
    """E = 3, r = 2, B[o, j] = j: expert e has the columns e and e + E. E = 1 or r = 1 would hide a mistake."""
    directory = Directory(tmp_path / "a", peft_version="0.21.2", target_parameters=["experts.down_proj"])
    directory.add(EXPERTS, "A", 6, 5)
    directory.tensors[f"{PREFIX}{EXPERTS}.lora_B.weight"] = torch.arange(6.0).expand(6, -1).contiguous()
    model = model_of(6, 5)
    (expert,) = directory.read(model).experts.values()
    for e in range(3):
        assert expert.lora_b[e].tolist() == [[e, e + 3]] * 6
        assert torch.equal(expert.lora_a[e], directory.tensors[f"{PREFIX}{EXPERTS}.lora_A.weight"][2 * e : 2 * e + 2])
    (expert,) = directory.read(model, expert_order="expert-major").experts.values()
    assert expert.lora_b[1].tolist() == [[2, 3]] * 6


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("order", ["rank-major", "expert-major"])
def test_all_four_ways_to_hold_experts_in_a_pair(swapped, order, tmp_path):
    """I = H: nothing but what is said tells them apart, and each of the four is another adapter."""
    model, g = model_of(6, 6), torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 6, generator=g), torch.randn(3, 6, 2, generator=g)  # [E, r, in], [E, out, r]
    rows, columns = (b.transpose(1, 2), a.transpose(1, 2)) if swapped else (a, b)
    columns = columns.permute(1, 2, 0) if order == "rank-major" else columns.permute(1, 0, 2)
    directory = Directory(tmp_path / "a", target_parameters=["down_proj"])
    directory.tensors = {
        f"{PREFIX}{EXPERTS}.lora_A.weight": rows.reshape(6, 6).contiguous(),
        f"{PREFIX}{EXPERTS}.lora_B.weight": columns.reshape(6, 6).contiguous(),
    }
    (expert,) = directory.read(model, expert_swapped=swapped, expert_order=order).experts.values()
    assert torch.equal(expert.lora_a, a) and torch.equal(expert.lora_b, b)


def test_one_parameter_alone_is_told_apart_by_its_target(tmp_path):
    directory = Directory(tmp_path / "a", peft_version="0.21.2", target_parameters=["mlp.experts.gate_up_proj"])
    directory.add(EXPERTS, "A", 6, 6)
    directory.add(EXPERTS, "B", 10, 6)
    model = model_of(6, 5)
    assert list(directory.read(model).experts) == [f"{EXPERTS}.gate_up_proj"]
    directory.config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert directory.problems(model)[0] == (
        f"{EXPERTS} holds the factors of one parameter, but target_parameters names gate_up_proj and down_proj of it."
    )
    directory.config |= {"target_parameters": [], "target_modules": ["experts"]}
    assert directory.problems(model)[0].endswith("but target_parameters names none of it.")


def test_patterns_match_the_parameters_name(tmp_path):
    pattern = {r".*\.gate_up_proj": 4}
    directory = Directory(tmp_path / "a", peft_version="0.21.2", rank_pattern=pattern, alpha_pattern={r".*\.gate_up_proj": 20})
    directory.config["target_parameters"] = ["down_proj", "gate_up_proj"]  # their order does not matter
    directory.add(f"{EXPERTS}.base_layer", "A", 12, 6)
    directory.add(f"{EXPERTS}.base_layer", "B", 10, 12)
    directory.add(EXPERTS, "A", 6, 5)
    directory.add(EXPERTS, "B", 6, 6)
    experts = directory.read(model_of(6, 5)).experts
    assert {k.rpartition(".")[2]: (m.rank, m.scaling) for k, m in experts.items()} == {
        "gate_up_proj": (4, 5.0),
        "down_proj": (2, 2.0),
    }


def test_pairs_of_3d_parameters_that_are_wrong(tmp_path):
    directory = Directory(tmp_path / "a", peft_version="0.21.2", target_parameters=["gate_up_proj", "down_proj"])
    directory.add(f"{EXPERTS}.base_layer", "A", 6, 6)
    directory.add(EXPERTS, "A", 6, 4)
    directory.add(EXPERTS, "B", 6, 6)
    assert directory.problems(model_of(6, 5)) == [
        f"{PREFIX}{EXPERTS}.base_layer.lora_A.weight has no lora_B beside it.",
        f"{PREFIX}{EXPERTS}.lora_A.weight and {PREFIX}{EXPERTS}.lora_B.weight must be [6, 5] and [6, 6] (or exchanged, [6, 6] "
        "and [5, 6]) by the configuration and the model; got [6, 4] and [6, 6].",
    ]


@pytest.mark.parametrize(
    "version, plain, transposed",
    [
        ("0.18.1", {True}, {False}),
        ("0.17.0", {True}, {False}),
        ("0.18.2.dev0", {True}, {False}),
        ("0.19.0", {True}, {False, True}),
        ("0.19.0.dev0", set(), set()),
        ("0.19.1", {False}, {False, True}),
        ("0.21.2", {False}, {False, True}),
        ("1.0.0", {False}, {False, True}),
        ("0.16.9", set(), set()),
        (None, set(), set()),
    ],
)
def test_what_a_version_says(version, plain, transposed):
    assert written_by(version, False) == plain and written_by(version, True) == transposed


# ---- pairs of single experts -------------------------------------------------------------------------------------------


def per_expert(path, leaves=("gate_proj", "up_proj", "down_proj"), experts=range(3), h=6, i=5, **config):
    directory = Directory(path, target_modules=list(leaves), **config)
    for e in experts:
        for leaf in leaves:
            directory.pair(f"{EXPERTS}.{e}.{leaf}", *((i, h) if leaf in ("down_proj", "w2") else (h, i)))
    return directory


def delta_of(directory, module, scaling):
    a, b = (directory.tensors[f"{PREFIX}{module}.lora_{f}.weight"].double() for f in "AB")
    return scaling * (b @ a)


@pytest.mark.parametrize("leaves", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_a_pair_for_every_expert(leaves, tmp_path):
    directory = per_expert(tmp_path / "a", leaves)
    experts = directory.read(model_of(6, 5)).experts
    gate_up, down = experts[f"{EXPERTS}.gate_up_proj"], experts[f"{EXPERTS}.down_proj"]
    assert (gate_up.lora_a.shape, gate_up.lora_b.shape) == ((3, 2, 2, 6), (3, 10, 2)) and gate_up.each
    assert (down.lora_a.shape, down.lora_b.shape) == ((3, 2, 5), (3, 6, 2))
    for e in range(3):
        gate, up = (delta_of(directory, f"{EXPERTS}.{e}.{leaf}", 2.0) for leaf in leaves[:2])
        assert torch.equal(gate_up.delta(e), torch.cat([gate, up]))
        assert torch.equal(down.delta(e), delta_of(directory, f"{EXPERTS}.{e}.{leaves[2]}", 2.0))


@pytest.mark.parametrize("leaf, half", [("gate_proj", 0), ("up_proj", 1)])
def test_gate_without_up(leaf, half, tmp_path):
    directory = per_expert(tmp_path / "a", (leaf,))
    (expert,) = directory.read(model_of(6, 5)).experts.values()
    for e in range(3):
        halves = expert.delta(e).split(5)
        assert torch.equal(halves[half], delta_of(directory, f"{EXPERTS}.{e}.{leaf}", 2.0)) and not halves[1 - half].any()


@pytest.mark.parametrize("alpha, folded", [(None, False), (2, True), (3, True)])
def test_ranks_and_alphas_of_single_experts(alpha, folded, tmp_path):
    """Expert 1's gate has rank 3; its scaling stays 2 (alpha 6), or becomes 2/3 or 1."""
    module = f"{EXPERTS}.1.gate_proj"
    directory = per_expert(tmp_path / "a", rank_pattern={re.escape(module): 3}, alpha_pattern={re.escape(module): alpha or 6})
    directory.pair(module, 6, 5, rank=3)
    expert = directory.read(model_of(6, 5)).experts[f"{EXPERTS}.gate_up_proj"]
    assert (expert.rank, expert.folded, expert.scaling) == (3, folded, 2.0)
    for e in range(3):
        for n, leaf in enumerate(("gate_proj", "up_proj")):
            scaling = (alpha or 6) / 3 if (e, n) == (1, 0) else 2.0
            want = delta_of(directory, f"{EXPERTS}.{e}.{leaf}", scaling)
            torch.testing.assert_close(expert.delta(e).split(5)[n], want, rtol=1e-6, atol=1e-6)
    assert not expert.lora_a[0, 0, 2].any() and not expert.lora_b[0, :5, 2].any()


def test_scalings_that_are_powers_of_two_apart_stay_exact(tmp_path):
    module = f"{EXPERTS}.2.down_proj"
    directory = per_expert(tmp_path / "a", ("down_proj",), alpha_pattern={re.escape(module): 1})
    directory.tensors = {k: v.bfloat16() for k, v in directory.tensors.items()}
    (expert,) = directory.read(model_of(6, 5)).experts.values()
    assert expert.lora_b.dtype == torch.bfloat16 and expert.folded
    assert torch.equal(expert.delta(2), delta_of(directory, module, 0.5))


def test_missing_experts_are_an_error_unless_they_are_no_targets(tmp_path):
    directory = per_expert(tmp_path / "a", ("down_proj",), experts=(0, 2))
    model = model_of(6, 5)
    assert directory.problems(model) == [f"{EXPERTS}.1.down_proj is among the targets, but has no factors."]
    directory.config["target_modules"] = [f"{EXPERTS}.{e}.down_proj" for e in (0, 2)]
    (expert,) = directory.read(model).experts.values()
    assert not expert.delta(1).any() and expert.delta(0).any()
    directory.config["target_modules"] = r".*experts\.[02]\.down_proj"
    (expert,) = directory.read(model).experts.values()
    assert not expert.delta(1).any()
    directory.config |= {"target_modules": ["down_proj"], "exclude_modules": ["experts.1.down_proj"]}
    directory.read(model)


def test_a_rank_that_the_configuration_does_not_state(tmp_path):
    """A trainer that gives experts a rank of r // K without writing a pattern: refused, not guessed."""
    directory = Directory(tmp_path / "a", rank=4, target_modules=["down_proj"])
    for e in range(3):
        directory.pair(f"{EXPERTS}.{e}.down_proj", 5, 6, rank=2)
    problems = directory.problems(model_of(6, 5))
    assert len(problems) == 6
    assert problems[0] == (
        f"{PREFIX}{EXPERTS}.0.down_proj.lora_A.weight must be [4, 5] by the configuration and the model; got [2, 5]."
    )


def test_what_is_wrong_with_single_experts(tmp_path):
    directory = per_expert(tmp_path / "a", ("gate_proj", "down_proj"))
    del directory.tensors[f"{PREFIX}{EXPERTS}.0.gate_proj.lora_B.weight"]
    directory.tensors[f"{PREFIX}{EXPERTS}.1.down_proj.lora_A.weight"][0, 0] = torch.nan
    directory.tensors[f"{PREFIX}{EXPERTS}.2.down_proj.lora_B.weight"] = torch.zeros(5, 2)
    directory.pair(f"{EXPERTS}.3.down_proj", 5, 6)
    directory.pair(f"{EXPERTS}.2.w1", 6, 5)
    directory.config["target_modules"].append("w1")
    assert sorted(directory.problems(model_of(6, 5))) == sorted(
        [
            f"{EXPERTS}.3.down_proj is of expert 3 of a model with 3 experts.",
            f"{PREFIX}{EXPERTS}.2.gate_proj.lora_A.weight and {PREFIX}{EXPERTS}.2.w1.lora_A.weight are the same factor.",
            f"{PREFIX}{EXPERTS}.2.gate_proj.lora_B.weight and {PREFIX}{EXPERTS}.2.w1.lora_B.weight are the same factor.",
            f"{PREFIX}{EXPERTS}.0.gate_proj.lora_A.weight has no lora_B beside it.",
            f"{PREFIX}{EXPERTS}.1.down_proj.lora_A.weight holds NaN or Inf.",
            f"{PREFIX}{EXPERTS}.2.down_proj.lora_B.weight must be [6, 2] by the configuration and the model; got [5, 2].",
        ]
    )


# ---- stacks, and factors that experts share -------------------------------------------------------------------------------


def test_shared_outer_factors(tmp_path):
    """gate's and up's A and down's B are one for all experts: [1, …] beside [E, …]."""
    directory = Directory(tmp_path / "a", target_modules=["w1", "w3", "w2"])
    for leaf in ("w1", "w3"):
        directory.add(f"{EXPERTS}.{leaf}", "A", 1, 2, 6), directory.add(f"{EXPERTS}.{leaf}", "B", 3, 5, 2)
    directory.add(f"{EXPERTS}.w2", "A", 3, 2, 5), directory.add(f"{EXPERTS}.w2", "B", 1, 6, 2)
    experts = directory.read(model_of(6, 5)).experts
    gate_up, down = experts[f"{EXPERTS}.gate_up_proj"], experts[f"{EXPERTS}.down_proj"]
    assert (gate_up.lora_a.shape, gate_up.lora_b.shape) == ((1, 2, 2, 6), (3, 10, 2))
    assert (down.lora_a.shape, down.lora_b.shape) == ((3, 2, 5), (1, 6, 2))
    t = {k.removeprefix(f"{PREFIX}{EXPERTS}."): v.double() for k, v in directory.tensors.items()}
    for e in range(3):
        gate, up = (2 * (t[f"{w}.lora_B.weight"][e] @ t[f"{w}.lora_A.weight"][0]) for w in ("w1", "w3"))
        assert torch.equal(gate_up.delta(e), torch.cat([gate, up]))
        assert torch.equal(down.delta(e), 2 * (t["w2.lora_B.weight"][0] @ t["w2.lora_A.weight"][e]))


def test_a_shared_factor_beside_a_pair_for_every_expert(tmp_path):
    """The shared side once, without an index; the other side expert by expert."""
    directory = Directory(tmp_path / "a", target_modules=["gate_proj", "up_proj"])
    for leaf in ("gate_proj", "up_proj"):
        directory.add(f"{EXPERTS}.{leaf}", "A", *((1, 2, 6) if leaf == "gate_proj" else (2, 6)))
        for e in range(3):
            directory.add(f"{EXPERTS}.{e}.{leaf}", "B", 5, 2)
    (expert,) = directory.read(model_of(6, 5)).experts.values()
    assert (expert.lora_a.shape, expert.lora_b.shape) == ((1, 2, 2, 6), (3, 10, 2))
    b = directory.tensors[f"{PREFIX}{EXPERTS}.2.up_proj.lora_B.weight"].double()
    a = directory.tensors[f"{PREFIX}{EXPERTS}.up_proj.lora_A.weight"].double()
    assert torch.equal(expert.delta(2)[5:], 2 * (b @ a))


def test_a_shared_factor_has_the_scaling_of_the_others(tmp_path):
    directory = Directory(tmp_path / "a", target_modules=["down_proj"], alpha_pattern={r".*experts\.1\.down_proj": 3})
    directory.add(f"{EXPERTS}.down_proj", "B", 1, 6, 2)
    for e in range(3):
        directory.add(f"{EXPERTS}.{e}.down_proj", "A", 2, 5, dtype=torch.bfloat16 if e else torch.float32)
    name = f"{PREFIX}{EXPERTS}.down_proj.lora_B.weight"
    assert directory.problems(model_of(6, 5)) == [
        f"{name}: the configuration gives it the scaling 2.0, and the other factor [1.5, 2.0]."
    ]
    del directory.config["alpha_pattern"]
    (expert,) = directory.read(model_of(6, 5)).experts.values()
    assert expert.lora_a.dtype == torch.float32 and len(expert.lora_b) == 1


@pytest.mark.parametrize("rows, each", [(2, False), (4, True)])
def test_a_stack_of_gate_and_up_together(rows, each, tmp_path):
    """One A for both, or one below the other."""
    directory = Directory(tmp_path / "a", target_modules=["gate_up_proj"])
    a = directory.add(f"{EXPERTS}.gate_up_proj", "A", 1, rows, 6).double()[0]
    b = directory.add(f"{EXPERTS}.gate_up_proj", "B", 3, 10, 2).double()
    (expert,) = directory.read(model_of(6, 5)).experts.values()
    assert expert.each is each
    want = torch.cat([b[1, :5] @ a[:2], b[1, 5:] @ a[-2:]])
    assert torch.equal(expert.delta(1), 2 * want)


def test_what_is_wrong_with_stacks(tmp_path):
    directory = Directory(tmp_path / "a", target_modules=["gate_up_proj", "w2", "gate_proj"])
    directory.add(f"{EXPERTS}.w2", "A", 2, 2, 5), directory.add(f"{EXPERTS}.w2", "B", 1, 6, 3)
    assert directory.problems(model_of(6, 5))[-2:] == [
        f"{PREFIX}{EXPERTS}.w2.lora_A.weight must be [1 or 3, 2, 5] by the configuration and the model; got [2, 2, 5].",
        f"{PREFIX}{EXPERTS}.w2.lora_B.weight must be [1 or 3, 6, 2] by the configuration and the model; got [1, 6, 3].",
    ]
    directory = Directory(tmp_path / "b", target_modules=["gate_up_proj", "w2"])
    directory.add(f"{EXPERTS}.w2", "A", 3, 2, 5), directory.add(f"{EXPERTS}.w2", "B", 1, 6, 2)
    for f, shape in (("A", (1, 2, 6)), ("B", (3, 10, 2))):
        directory.add(f"{EXPERTS}.gate_up_proj", f, *shape)
    directory.read(model_of(6, 5))
    assert "is ambiguous where the model interleaves them" in directory.problems(model_of(6, 5, transposed=True))[0]
    directory.add(f"{EXPERTS}.0.w2", "A", 2, 5)
    assert f"{PREFIX}{EXPERTS}.w2.lora_A.weight and {PREFIX}{EXPERTS}.0.w2.lora_A.weight are the same factor." in (
        directory.problems(model_of(6, 5))
    )


# ---- one A or two for gate and up -----------------------------------------------------------------------------------------


def random_expert(shared=False, each=True, rank=2, h=6, i=5, experts=3):
    g = torch.Generator().manual_seed(rank)
    count = 1 if shared else experts
    a = torch.randn(count, 2, rank, h, generator=g) if each else torch.randn(count, rank, h, generator=g)
    return ExpertModule(a, torch.randn(experts, 2 * i, rank, generator=g), rank, 0.5)


@pytest.mark.parametrize("shared", [False, True])
def test_block_diagonal_and_back(shared):
    expert = random_expert(shared)
    one = expert.with_one_a()
    assert (one.rank, one.lora_a.shape[1:], one.lora_b.shape) == (4, (4, 6), (3, 10, 4))
    back = one.with_an_a_each()
    assert torch.equal(back.lora_a, expert.lora_a) and torch.equal(back.lora_b, expert.lora_b) and back.rank == 2
    for e in range(3):
        torch.testing.assert_close(one.delta(e), expert.delta(e), rtol=1e-12, atol=1e-12)
    assert expert.with_an_a_each() is expert and one.with_one_a() is one


@pytest.mark.parametrize("rank", [3, 4])
def test_an_a_for_both_that_is_not_block_diagonal_is_taken_twice(rank):
    expert = random_expert(each=False, rank=rank)
    both = expert.with_an_a_each()
    assert both.rank == rank and both.lora_a.shape == (3, 2, rank, 6)
    torch.testing.assert_close(both.delta(1), expert.delta(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_wrapping_is_the_inverse_of_reading(transposed, tmp_path):
    model, expert = model_of(6, 5, transposed), random_expert()
    a, b, rank = wrap(expert, 3, True, model.layout.experts)
    directory = Directory(tmp_path / "a", rank=rank, alpha=rank / 2, peft_version="0.21.2", target_parameters=["gate_up_proj"])
    directory.tensors = {f"{PREFIX}{EXPERTS}.lora_A.weight": a.contiguous(), f"{PREFIX}{EXPERTS}.lora_B.weight": b.contiguous()}
    (back,) = directory.read(model).experts.values()
    assert torch.equal(back.lora_a, expert.with_one_a().lora_a) and torch.equal(back.lora_b, expert.with_one_a().lora_b)


# ---- fused modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 6])
def test_a_fused_module_is_read_as_its_members(rows, tmp_path):
    model = layouts.of(CONFIGS["llama"] | {"num_hidden_layers": 1})  # q 32, k and v 16
    directory = Directory(tmp_path / "a", target_modules=["qkv_proj"])
    module = "model.layers.0.self_attn"
    a, b = directory.add(f"{module}.qkv_proj", "A", rows, 32), directory.add(f"{module}.qkv_proj", "B", 64, 2)
    modules = directory.read(model).modules
    assert list(modules) == [f"{module}.{leaf}_proj" for leaf in "qkv"]
    for n, (leaf, start, stop) in enumerate((("q", 0, 32), ("k", 32, 48), ("v", 48, 64))):
        lora = modules[f"{module}.{leaf}_proj"]
        assert torch.equal(lora.lora_b, b[start:stop])
        assert torch.equal(lora.lora_a, a if rows == 2 else a[2 * n : 2 * n + 2])
    directory.pair(f"{module}.k_proj", 32, 16)
    directory.config["target_modules"].append("k_proj")
    assert f"{PREFIX}{module}.k_proj.lora_A.weight and {PREFIX}{module}.qkv_proj.lora_A.weight are the same factor." in (
        directory.problems(model)
    )
    directory = Directory(tmp_path / "b", target_modules=["qkv_proj"])
    directory.add(f"{module}.qkv_proj", "A", 4, 32), directory.add(f"{module}.qkv_proj", "B", 60, 2)
    assert len(directory.problems(model)) == 2


# ---- completeness, and names ------------------------------------------------------------------------------------------------


def test_a_target_that_has_no_factors_in_some_layer(tmp_path):
    """peft loads such a file with a warning, and the layer stays as it was."""
    model = layouts.of(CONFIGS["llama"])
    directory = Directory(tmp_path / "a", target_modules=["q_proj", "k_proj"])
    for layer in range(2):
        directory.pair(f"model.layers.{layer}.self_attn.q_proj", 32, 32)
    directory.pair("model.layers.0.self_attn.k_proj", 32, 16)
    missing = ["model.layers.1.self_attn.k_proj is among the targets, but has no factors."]
    assert directory.problems(model) == missing
    directory.read()  # without a layout nobody knows which layers there are
    for targets in (r".*(q|k)_proj", "all-linear"):
        directory.config["target_modules"] = targets
        assert missing[0] in directory.problems(model)
    directory.config |= {"target_modules": ["q_proj", "model.layers.0.self_attn.k_proj"]}
    directory.read(model)
    directory.config |= {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0]}
    directory.tensors = {k: v for k, v in directory.tensors.items() if ".1." not in k}
    directory.read(model)
    directory.config |= {"layers_to_transform": None, "target_modules": ["qkv_proj"]}
    directory.tensors = {}
    directory.pair("model.layers.0.self_attn.qkv_proj", 32, 64)
    directory.read(model)  # nothing says that layer 1 was meant to have it


def test_a_target_that_the_adapted_layers_do_not_have(tmp_path):
    """q_proj belongs to the full-attention layers alone; a name that no linear has, or that experts have, is refused."""
    model = layouts.of(CONFIGS["qwen3_5_moe_text"])
    directory = Directory(tmp_path / "a", target_modules=["q_proj", "out_proj"], layers_to_transform=[1])
    directory.pair("model.layers.1.linear_attn.out_proj", 32, 32)
    directory.read(model)
    for name in ("lm_head", "experts.3.gate_proj", "gate_up_proj", "q"):
        directory.config["target_modules"] = ["out_proj", name]
        assert directory.problems(model) == [f"target_modules names {name}, but no module of that name has factors."]
    directory.config |= {"target_modules": ["q_proj", "out_proj"], "layers_to_transform": [1, 3]}
    assert "model.layers.3.self_attn.q_proj is among the targets, but has no factors." in directory.problems(model)


def test_experts_that_have_no_factors_in_some_layer(tmp_path):
    model = model_of(6, 5, layers=2)
    directory = per_expert(tmp_path / "a", ("down_proj",))
    path = "model.layers.1.mlp.experts.down_proj is among the targets, but has no factors."
    assert directory.problems(model) == [path]
    directory.config["layers_to_transform"] = [0]
    directory.read(model)
    directory = Directory(tmp_path / "b", peft_version="0.21.2", target_parameters=["mlp.experts.down_proj"])
    directory.add(EXPERTS, "A", 6, 5), directory.add(EXPERTS, "B", 6, 6)
    assert directory.problems(model) == [path]
    directory.config["target_parameters"] = [f"{EXPERTS}.down_proj"]
    directory.read(model)


def test_everything_that_is_wrong_is_in_one_report(tmp_path):
    """Missing, extra, orphaned, of a wrong shape, not finite, ambiguous: all the problems of one file."""
    model = model_of(6, 6, layers=2)
    attention = "model.layers.0.self_attn"
    directory = Directory(tmp_path / "a", target_modules=["q_proj", "o_proj", "k_proj"], target_parameters=["down_proj"])
    a, b = directory.pair(f"{attention}.q_proj", 6, 32)
    b[3, 1] = torch.inf
    directory.add(f"{attention}.o_proj", "A", 2, 32)
    directory.pair(f"{attention}.k_proj", 6, 17)
    directory.pair("model.layers.0.mlp.gate", 6, 3)
    directory.add(EXPERTS, "A", 6, 6), directory.add(EXPERTS, "B", 6, 6)
    problems = sorted(directory.problems(model))
    name = f"{PREFIX}{attention}"
    missing = "is among the targets, but has no factors."
    assert problems == sorted(
        [
            f"{name}.q_proj.lora_B.weight holds NaN or Inf.",
            f"{name}.o_proj.lora_A.weight has no lora_B beside it.",
            f"{name}.k_proj.lora_B.weight must be [16, 2] by the configuration and the model; got [17, 2].",
            "model.layers.0.mlp.gate cannot be adapted: the router's logits are not adapted: no op of this library reads such an adapter.",
            *(f"model.layers.1.self_attn.{leaf}_proj {missing}" for leaf in "qok"),
            f"model.layers.1.mlp.experts.down_proj {missing}",
            next(p for p in problems if "nothing says whether A and B are exchanged" in p),
        ]
    )


@pytest.mark.parametrize(
    "module, reason",
    [
        ("lm_head", "is outside the decoder layers (model.layers.<layer>.…)."),
        ("self_attn.q_proj", "is outside the decoder layers (model.layers.<layer>.…)."),
        ("model.layers.0.mlp.gate", "cannot be adapted: the router's logits are not adapted"),
        ("model.layers.7.self_attn.q_proj", "is in layer 7 of a model with 1 layers."),
        ("model.layers.0.self_attn.q_proj_2", "is no projection of qwen3_moe."),
    ],
)
def test_modules_that_the_model_does_not_have(module, reason, tmp_path):
    directory = Directory(tmp_path / "a", target_modules=[module])
    directory.pair(module, 6, 6)
    assert directory.problems(model_of(6, 5))[0].startswith(f"{module} {reason}")


def test_global_shapes_are_checked_against_the_model(tmp_path):
    directory = Directory(tmp_path / "a", target_modules=["o_a_proj"])
    model = layouts.of(CONFIGS["deepseek_v4"] | {"num_hidden_layers": 1})  # G 2, D 32, N 12
    path = "model.layers.0.self_attn.o_a_proj"
    directory.pair(path, 32, 24)
    directory.read(model)
    directory.pair(path, 64, 12)
    by = "by the configuration and the model"
    assert directory.problems(model) == [
        f"{PREFIX}{path}.lora_A.weight must be [2, 32] {by}; got [2, 64].",
        f"{PREFIX}{path}.lora_B.weight must be [24, 2] {by}; got [12, 2].",
    ]


@pytest.mark.parametrize(
    "name", ["embed_tokens.lora_embedding_A", "layers.0.self_attn.q_proj.lora_magnitude_vector", "layers.0.self_attn.q_proj.bias"]
)
def test_tensors_that_are_no_factors(name, tmp_path):
    directory = Directory(tmp_path / "a", target_modules=["q_proj"])
    directory.pair("model.layers.0.self_attn.q_proj", 32, 32)
    directory.tensors[f"{PREFIX}model.{name}"] = torch.ones(2)
    assert directory.problems(layouts.of(CONFIGS["llama"] | {"num_hidden_layers": 1})) == [
        f"{PREFIX}model.{name} is not of the form base_model.model.<module>.lora_A.weight or ….lora_B.weight."
    ]


def test_original_names_become_the_layouts(tmp_path):
    """DeepSeek's own names, and every other spelling, arrive under one path; two spellings of one are refused."""
    model = layouts.of(CONFIGS["deepseek_v4"] | {"num_hidden_layers": 1})
    directory = Directory(tmp_path / "a", target_modules=["wo_a", "w2"])
    directory.pair("layers.0.attn.wo_a", 32, 24)
    for e in range(4):
        directory.pair(f"layers.0.ffn.experts.{e}.w2", 24, 32)
    shared = "model.layers.0.mlp.shared_experts.down_proj"
    assert directory.problems(model) == [f"{shared} is among the targets, but has no factors."]
    directory.pair("layers.0.ffn.shared_experts.w2", 24, 32)
    adapter = directory.read(model)
    assert sorted(adapter.modules) == [shared, "model.layers.0.self_attn.o_a_proj"]
    assert list(adapter.experts) == ["model.layers.0.mlp.experts.down_proj"]
    directory.pair("model.layers.0.self_attn.o_a_proj", 32, 24)
    directory.config["target_modules"].append("o_a_proj")
    assert directory.problems(model)[0] == (
        f"{PREFIX}layers.0.attn.wo_a.lora_A.weight and {PREFIX}model.layers.0.self_attn.o_a_proj.lora_A.weight are the same factor."
    )


def test_many_targets_and_many_modules_are_not_compared_each_with_each(tmp_path):
    """61 layers of 256 experts have 10⁵ factors and as many target names."""
    import time

    from grouped_lora_ops.adapters.config import Names, naming

    names = Names([f"model.layers.{l}.mlp.experts.{e}.up_proj" for l in range(61) for e in range(256)])
    start = time.perf_counter()
    assert all(naming(names, f"base.{name}") == [name] for name in names)
    assert time.perf_counter() - start < 5
