"""Reading PEFT adapter directories and stacking them: against what peft itself makes of them, and against bad files."""

import importlib.util
import json
import math
import shutil
import struct
from pathlib import Path
from types import MappingProxyType

import pytest
import safetensors.torch
import torch

from grouped_lora_ops.adapters import read_adapter, stack_adapters

FIXTURES = Path(__file__).parent / "fixtures"
Q, O = (f"model.layers.0.self_attn.{name}" for name in ("q_proj", "o_a_proj"))
PREFIX = "base_model.model."


def check_against_peft(directory):
    """Scaling equal, and scaling · B A equal in float64, for exactly the modules that peft adapted."""
    adapter = read_adapter(directory)
    expected = safetensors.torch.load_file(directory / "expected.safetensors")
    assert sorted(adapter.modules) == sorted(
        name.removesuffix(".delta") for name in expected if name.endswith(".delta")
    )
    for name, lora in adapter.modules.items():
        assert lora.scaling == expected[f"{name}.scaling"].item()
        assert lora.lora_a.shape[0] == lora.lora_b.shape[1] == lora.rank
        delta = lora.scaling * (lora.lora_b.double() @ lora.lora_a.double())
        torch.testing.assert_close(delta, expected[f"{name}.delta"], rtol=1e-12, atol=1e-12)
    return adapter


def test_shipped_patterns():
    adapter = check_against_peft(FIXTURES / "patterns")
    resolved = {name.split("layers.")[1]: (lora.rank, lora.scaling) for name, lora in adapter.modules.items()}
    assert resolved == {
        "0.self_attn.q_proj": (4, 12 / 4),
        "0.self_attn.o_a_proj": (3, 5 / 3),
        "1.self_attn.q_proj": (2, 7.5 / 2),
        "1.self_attn.o_a_proj": (4, 7.5 / 4),  # trained with alpha 5; peft sorted the patterns when it saved them
    }


def test_shipped_rslora():
    adapter = check_against_peft(FIXTURES / "rslora")
    assert {lora.scaling for lora in adapter.modules.values()} == {16 / math.sqrt(8)}


@pytest.mark.parametrize("name", ["patterns", "rslora"])
def test_real_peft_writes_what_is_read(name, tmp_path):
    pytest.importorskip("peft", reason="the real peft library is not installed")
    spec = importlib.util.spec_from_file_location("make_adapters", FIXTURES / "make_adapters.py")
    make_adapters = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_adapters)
    make_adapters.write(name, tmp_path)
    check_against_peft(tmp_path)


class Directory:
    """A valid adapter directory whose parts a test spoils."""

    def __init__(self, path, rank=2, sizes=MappingProxyType({Q: (8, 6), O: (8, 12)})):
        self.path, self.generator = path, torch.Generator().manual_seed(rank)
        self.config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj", "o_a_proj"]}
        self.tensors = {}
        for module, (in_features, out_features) in sizes.items():
            for factor, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                self.tensors[f"{PREFIX}{module}.lora_{factor}.weight"] = torch.randn(*shape, generator=self.generator)

    def write(self):
        self.path.mkdir(exist_ok=True)
        (self.path / "adapter_config.json").write_text(json.dumps(self.config))
        safetensors.torch.save_file(self.tensors, self.path / "adapter_model.safetensors")
        return self.path

    def read(self):
        return read_adapter(self.write())

    def problems(self):
        with pytest.raises(ValueError) as error:
            self.read()
        head, *problems = str(error.value).split("\n  - ")
        assert head == (
            f"grouped_lora_ops.adapters.read_adapter: {self.path} cannot be read as it is; nothing was loaded:"
        )
        return problems


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "adapter")


def test_the_valid_directory_is_valid(directory):
    adapter = directory.read()
    assert sorted(adapter.modules) == sorted([Q, O])
    assert adapter.config["r"] == 2 and adapter.path == directory.path
    lora = adapter.modules[O]
    assert torch.equal(lora.lora_a, directory.tensors[f"{PREFIX}{O}.lora_A.weight"])
    assert torch.equal(lora.lora_b, directory.tensors[f"{PREFIX}{O}.lora_B.weight"])
    assert (lora.rank, lora.scaling) == (2, 2.0)


def test_adapter_name_in_the_key(directory):
    directory.tensors = {k.replace(".weight", ".default.weight"): v for k, v in directory.tensors.items()}
    assert sorted(directory.read().modules) == sorted([Q, O])


def test_missing_files(directory):
    with pytest.raises(FileNotFoundError, match=r"must be an adapter's directory; there is none"):
        read_adapter(directory.path / "nowhere")
    directory.path.mkdir(exist_ok=True)
    with pytest.raises(
        FileNotFoundError, match=r"must hold adapter_config\.json and adapter_model\.safetensors; adapter_con"
    ):
        read_adapter(directory.path)
    directory.write()
    (directory.path / "adapter_model.safetensors").rename(directory.path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="adapter_model.bin is a pickle, which is never opened"):
        read_adapter(directory.path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 4]]),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("velora_config", {"num_groups": 64}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"n": 4}),
        ("init_lora_weights", 1),
        ("a_flag_of_tomorrow", True),
        ("a_number_of_tomorrow", 0),
    ],
)
def test_unsupported_features_are_refused_by_name(directory, field, value):
    directory.config[field] = value
    assert directory.problems() == [f"adapter_config.json: {field} = {json.dumps(value)} is not supported."]


def test_expert_parameters_need_a_layout(directory):
    directory.config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    assert directory.problems() == [
        'adapter_config.json: target_parameters = ["mlp.experts.gate_up_proj"] can be read only with the model\'s layout.'
    ]


def test_features_switched_off_are_accepted(directory):
    directory.config |= {"use_dora": False, "bias": "none", "modules_to_save": None, "loftq_config": {}, "tomorrow": []}
    directory.config |= {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "peft_version": "9"}
    directory.read()


@pytest.mark.parametrize(
    "field, value, sentence",
    [
        ("peft_type", "IA3", 'peft_type must be "LORA"; got "IA3"'),
        ("r", 0, "r must be a positive integer; got 0"),
        ("r", True, "r must be a positive integer; got true"),
        ("lora_alpha", float("nan"), "lora_alpha must be a finite number; got NaN"),
        ("lora_alpha", None, "lora_alpha must be a finite number; got null"),
        ("use_rslora", "yes", 'use_rslora must be true or false; got "yes"'),
        ("rank_pattern", {"q_proj": 0}, 'rank_pattern must be an object of positive integers; got {"q_proj": 0}'),
        ("alpha_pattern", {"q": "8"}, 'alpha_pattern must be an object of finite numbers; got {"q": "8"}'),
        ("rank_pattern", {"(": 2}, 'rank_pattern holds "(", which is not a regular expression: '),
        ("target_modules", "(", 'target_modules holds "(", which is not a regular expression: '),
        ("layers_pattern", ["h", "("], 'layers_pattern holds "(", which is not a regular expression: '),
        ("target_modules", None, "target_modules must be a string or a list of strings; got null"),
        ("layers_to_transform", [-1], "layers_to_transform must be a layer index or a list of them; got [-1]"),
        ("layers_pattern", 3, "layers_pattern must be a string or a list of strings; got 3"),
    ],
)
def test_bad_configuration_values(directory, field, value, sentence):
    directory.config[field] = value
    (problem,) = directory.problems()
    assert problem.startswith(f"adapter_config.json: {sentence}")


def test_configuration_that_is_no_object(directory):
    directory.config = [1]
    assert directory.problems() == ["adapter_config.json must hold an object; got list."]
    directory.write()
    (directory.path / "adapter_config.json").write_text('{"r": 8, "r": 16}')
    with pytest.raises(ValueError, match=r"adapter_config\.json is not readable JSON: r occurs twice\."):
        read_adapter(directory.path)


@pytest.mark.parametrize("alpha, rslora, scaling", [(0, False, 0.0), (-4, False, -2.0), (1, True, 2**-0.5), (2 / 3, False, 1 / 3)])
def test_any_finite_alpha(directory, alpha, rslora, scaling):
    directory.config |= {"lora_alpha": alpha, "use_rslora": rslora}
    assert directory.read().modules[Q].scaling == pytest.approx(scaling, rel=1e-15)


def test_everything_wrong_is_listed_at_once(directory):
    a, b = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
    del directory.tensors[b]
    directory.tensors[f"{PREFIX}{O}.lora_A.weight"] = torch.zeros(3, 8)
    directory.tensors[f"{PREFIX}{O}.lora_B.weight"][3, 1] = math.nan
    directory.tensors[f"{PREFIX}{O}.lora_magnitude_vector"] = torch.ones(12)
    directory.tensors["model.layers.1.self_attn.q_proj.lora_A.weight"] = torch.zeros(2, 8)
    directory.tensors |= {f"{PREFIX}lm_head.lora_{f}.weight": torch.zeros(2, 2) for f in "AB"}
    directory.tensors[f"{PREFIX}{O}.lora_A.default.weight"] = torch.zeros(2, 8)
    directory.config["target_modules"].append("k_proj")
    form = "is not of the form base_model.model.<module>.lora_A.weight or ….lora_B.weight."
    assert sorted(directory.problems()) == sorted(
        [
            f"{PREFIX}{O}.lora_A.weight and {PREFIX}{O}.lora_A.default.weight are the same factor.",
            f"{PREFIX}{O}.lora_magnitude_vector {form}",
            f"model.layers.1.self_attn.q_proj.lora_A.weight {form}",
            "lm_head has factors but is not among target_modules.",
            "target_modules names k_proj, but no module of that name has factors.",
            f"{a} has no lora_B beside it.",
            f"{PREFIX}{O}.lora_B.weight holds NaN or Inf.",
        ]
    )


@pytest.mark.parametrize(
    "name, tensor, sentence",
    [
        ("A", torch.zeros(3, 8), "must be [2, in] by the configuration's rank; got [3, 8]."),
        ("A", torch.zeros(2, 8, 1), "must be [2, in] by the configuration's rank; got [2, 8, 1]."),
        ("A", torch.zeros(2, 0), "must be [2, in] by the configuration's rank; got [2, 0]."),
        ("B", torch.zeros(2, 6), "must be [out, 2] by the configuration's rank; got [2, 6]."),
        ("B", torch.zeros(6, 2, dtype=torch.int8), "must be bfloat16, float16, float32 or float64; got int8."),
        ("B", torch.full((6, 2), math.inf), "holds NaN or Inf."),
    ],
)
def test_bad_tensors(directory, name, tensor, sentence):
    name = f"{PREFIX}{Q}.lora_{name}.weight"
    directory.tensors[name] = tensor
    assert directory.problems() == [f"{name} {sentence}"]


def test_no_factors_at_all(directory):
    directory.tensors, directory.config["target_modules"] = {}, "all-linear"
    assert directory.problems() == ["adapter_model.safetensors holds no LoRA factors."]


def test_layers_to_transform_and_exclude_modules(directory):
    directory.config["layers_to_transform"] = 0
    directory.read()
    directory.config["layers_to_transform"] = [1]
    assert directory.problems() == [
        f"{O} has factors but is not among layers_to_transform.",
        f"{Q} has factors but is not among layers_to_transform.",
        "layers_to_transform names layer 1, but no module of it has factors.",
    ]
    directory.config |= {"layers_to_transform": None, "exclude_modules": ["self_attn.q_proj"]}
    assert directory.problems() == [f"{Q} has factors but is among exclude_modules."]


def test_the_layer_is_the_first_number_of_a_path(tmp_path):
    module = "model.layers.1.mlp.experts.7.up_proj"
    directory = Directory(tmp_path / "adapter", sizes={module: (8, 8)})
    directory.config |= {"target_modules": ["up_proj"], "layers_to_transform": [1]}
    directory.read()
    directory.config["layers_pattern"] = ["h", "layers"]
    directory.read()
    directory.config |= {"layers_pattern": "experts", "layers_to_transform": [7]}
    directory.read()


def test_damaged_tensor_files(directory):
    file = directory.write() / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged: "):
        read_adapter(directory.path)
    header = (
        '{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 4)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged: t occurs twice\."):
        read_adapter(directory.path)
    for content in (b"", b"\xff" * 8, b"\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged: "):
            read_adapter(directory.path)


def test_a_failed_read_does_not_touch_the_directory(directory):
    directory.tensors[f"{PREFIX}{Q}.lora_B.weight"][0] = math.nan
    path = directory.write()
    copy = shutil.copytree(path, path.with_name("copy"))
    directory.problems()
    assert [f.read_bytes() for f in sorted(path.iterdir())] == [f.read_bytes() for f in sorted(copy.iterdir())]


@pytest.fixture
def adapters(tmp_path):
    return [Directory(tmp_path / f"r{rank}", rank=rank).read() for rank in (2, 5, 1)]


def test_stack_pads_every_rank_to_the_largest(adapters):
    lora_a, lora_b, scalings, ranks = stack_adapters(adapters, O, dtype=torch.float32, slots=5)
    assert (lora_a.shape, lora_b.shape) == ((5, 5, 8), (5, 12, 5))
    assert scalings.dtype == torch.float32 and scalings.tolist() == [2.0, torch.tensor(0.8).item(), 4.0, 0.0, 0.0]
    assert ranks.dtype == torch.int32 and ranks.tolist() == [2, 5, 1, 0, 0]
    for l, adapter in enumerate(adapters):
        lora = adapter.modules[O]
        assert torch.equal(lora_a[l, : lora.rank], lora.lora_a) and not lora_a[l, lora.rank :].any()
        assert torch.equal(lora_b[l, :, : lora.rank], lora.lora_b) and not lora_b[l, :, lora.rank :].any()
    assert not lora_a[3:].any() and not lora_b[3:].any()


def test_stack_groups_are_group_major_and_a_range_of_them_is_a_slice(adapters):
    whole = stack_adapters(adapters, O, dtype=torch.float32, groups=4)
    assert whole.lora_b.shape == (3, 4, 3, 5)
    for l, adapter in enumerate(adapters):
        for g in range(4):
            rows = adapter.modules[O].lora_b[3 * g : 3 * g + 3]
            assert torch.equal(whole.lora_b[l, g, :, : adapter.modules[O].rank], rows)
    part = stack_adapters(adapters, O, dtype=torch.float32, groups=4, group_range=(1, 3))
    assert torch.equal(part.lora_b, whole.lora_b[:, 1:3]) and part.lora_b.is_contiguous()
    assert torch.equal(part.lora_a, whole.lora_a)


def test_stack_casts_once_and_copies(adapters):
    stacked = stack_adapters(adapters, Q, dtype=torch.bfloat16)
    assert torch.equal(stacked.lora_a[1], adapters[1].modules[Q].lora_a.bfloat16())
    again = stack_adapters(adapters, Q, dtype=torch.float32)
    again.lora_a.zero_()
    assert adapters[0].modules[Q].lora_a.any()


def test_stack_keeps_an_empty_slot_for_none(adapters):
    lora_a, lora_b, scalings, ranks = stack_adapters([None, adapters[0]], Q, dtype=torch.float32)
    assert ranks.tolist() == [0, 2] and scalings.tolist() == [0.0, 2.0]
    assert not lora_a[0].any() and torch.equal(lora_a[1], adapters[0].modules[Q].lora_a)


def stack_problems(*args, **kwargs):
    with pytest.raises(ValueError) as error:
        stack_adapters(*args, **{"dtype": torch.float32} | kwargs)
    head, *problems = str(error.value).split("\n  - ")
    assert head == f"grouped_lora_ops.adapters.stack_adapters: {args[1]} cannot be stacked:"
    return problems


def test_stack_refuses(adapters, tmp_path):
    assert stack_problems(adapters, O, groups=5) == ["groups must divide the module's 12 out features; got 5."]
    for bad in ((0, 5), (2, 2), (-1, 2), (3, 1)):
        assert stack_problems(adapters, O, groups=4, group_range=bad) == [
            f"group_range must satisfy 0 <= lo < hi <= groups = 4; got {bad}."
        ]
    assert stack_problems(adapters, O, group_range=(0, 1)) == [
        "group_range needs groups, the number of groups of the whole module."
    ]
    assert stack_problems(adapters, O, groups=0) == ["groups must be at least 1; got 0."]
    assert stack_problems(adapters, O, slots=2) == ["slots must be at least the number of adapters, 3; got 2."]
    assert stack_problems([None], O) == ["adapters must hold at least one adapter."]
    assert stack_problems(adapters[:1], "o_a_proj") == [
        f"adapters[0] ({adapters[0].path}) has no module o_a_proj; it has {O}."
    ]
    wide = Directory(tmp_path / "wide", sizes={Q: (16, 6), O: (8, 24)}).read()
    assert stack_problems([adapters[0], wide], Q) == [
        "adapters[1] must have in and out features (8, 6) as adapters[0] has; got (16, 6)."
    ]
    large = Directory(tmp_path / "large")
    large.tensors[f"{PREFIX}{Q}.lora_B.weight"][0, 0] = 1e6
    assert stack_problems([large.read()], Q, dtype=torch.float16) == [f"adapters[0]'s B of {Q} overflows float16."]
