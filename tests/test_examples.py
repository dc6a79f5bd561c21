"""The example runs, says what it checked, and fails when a result is wrong."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import grouped_lora_ops as gl

FILE = Path(__file__).resolve().parents[1] / "examples" / "decode_loop.py"
SHORT = ["--device", "cpu", "--steps", "4", "--batch", "4", "--prefill", "16"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("decode_loop", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["decode_loop"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["decode_loop"]


def run(*command, timeout=120):
    path = os.pathsep.join([str(FILE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment)


def test_a_newcomers_run_on_a_cpu():
    result = run(str(FILE), "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert (
        "8 groups (0 to 7 of 8), 512 -> 128 each, bfloat16; 3 adapters of ranks 8, 16, 64 read from disk"
        in result.stdout
    )
    assert "checked: a prefill of 96 tokens and 32 decode steps of 8 rows, in each another mix" in result.stdout
    assert "nothing differs" in result.stdout


def test_one_tensor_parallel_rank(example, capsys):
    assert example.main([*SHORT, "--tp", "2", "--tp-rank", "1"]) == 0
    assert "wo_a: 4 groups (4 to 7 of 8)" in capsys.readouterr().out


def test_without_peft_the_same_directories_are_written(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)  # import peft raises ImportError
    (tmp_path / "plain").mkdir()
    plain = example.write_adapters(tmp_path / "plain", 64, 32, seed=3)
    assert "with safetensors (peft is not installed)" in capsys.readouterr().out
    monkeypatch.undo()
    pytest.importorskip("peft", reason="the real peft library is not installed")
    (tmp_path / "peft").mkdir()
    real = example.write_adapters(tmp_path / "peft", 64, 32, seed=3)
    for a, b in zip(plain, real):
        ours, theirs = (safetensors.torch.load_file(path / "adapter_model.safetensors") for path in (a, b))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
        a, b = (example.read_adapter(path).modules[example.MODULE] for path in (a, b))
        assert (a.rank, a.scaling) == (b.rank, b.scaling) == (a.rank, 2.0)


def test_adapters_of_ones_own(example, tmp_path, capsys):
    paths = [str(path) for path in example.write_adapters(tmp_path, 64, 4 * 24, seed=1)]
    assert example.main([*SHORT, "--groups", "4", "--adapters", *paths[1:]]) == 0
    assert "4 groups (0 to 3 of 4), 64 -> 24 each, bfloat16; 2 adapters of ranks 16, 64" in capsys.readouterr().out
    assert example.main([*SHORT, "--groups", "5", "--adapters", *paths]) == 2
    assert "groups must divide the module's 96 out features; got 5." in capsys.readouterr().err
    assert example.main([*SHORT, "--adapters", str(tmp_path / "none")]) == 2
    assert "must be an adapter's directory; there is none." in capsys.readouterr().err


def test_every_step_has_another_mix_and_a_row_without_adapter(example):
    problem = example.Problem(torch.zeros(1, 1, 1), *[torch.zeros(2)] * 4)
    mixes = [ids for _, _, ids in example.inputs(problem, 2, 60, torch.Generator().manual_seed(0))]
    assert all((ids < 0).any() for ids in mixes) and len({int(i) for ids in mixes for i in ids}) == 3
    assert not any(torch.equal(a, b) for a, b in zip(mixes, mixes[1:]))


def no_adapter_1(ids):
    return torch.where(ids == 1, -1, ids)


FAULTS = {
    "an adapter left out": lambda delta_, out, x, a, b, ids, s, **kw: delta_(out, x, a, b, no_adapter_1(ids), s, **kw),
    "a scaling of 2 % more": lambda delta_, out, x, a, b, ids, s, **kw: delta_(out, x, a, b, ids, s * 1.02, **kw),
    "groups rotated": lambda delta_, out, x, a, b, ids, s, **kw: delta_(out, x, a, b.roll(1, 1), ids, s, **kw),
    "rows without adapter written": lambda delta_, out, x, a, b, ids, s, **kw: (
        delta_(out, x, a, b, ids, s, **kw),
        out.masked_fill_((ids < 0)[:, None, None], 0.0),
    ),
    "NaN": lambda delta_, out, x, a, b, ids, s, **kw: out.fill_(float("nan")),
    "one last bit": lambda delta_, out, x, a, b, ids, s, **kw: (
        delta_(out, x, a, b, ids, s, **kw),
        out.view(torch.int16).bitwise_xor_((ids >= 0).to(torch.int16)[:, None, None]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_decode_step_is_noticed(example, monkeypatch, capsys, fault):
    right = gl.delta_
    monkeypatch.setattr(gl, "delta_", lambda *args, **kwargs: FAULTS[fault](right, *args, **kwargs))
    assert example.main(SHORT) == 1
    out, err = capsys.readouterr()
    assert "FAILED: decode step" in err and "nothing differs" not in out


def test_a_wrong_prefill_is_noticed(example, monkeypatch, capsys):
    right = gl.delta
    monkeypatch.setattr(gl, "delta", lambda x, a, b, ids, s, **kw: right(x, a, b, no_adapter_1(ids), s, **kw))
    assert example.main(SHORT) == 1
    assert "FAILED: prefill: the op's result at token" in capsys.readouterr().err


def test_a_wrong_reference_is_noticed(example, monkeypatch, capsys):
    """Op and reference that agree with each other but not with float64."""
    right = gl.reference.delta
    wrong = lambda x, a, b, ids, s, **kw: right(x, a, b, ids, s * 1.02, **kw)  # noqa: E731
    monkeypatch.setattr(gl, "delta", wrong)
    monkeypatch.setattr(gl.reference, "delta", wrong)
    assert example.main(SHORT) == 1
    assert "float64 gives" in capsys.readouterr().err


def test_the_exit_status_of_a_failed_run():
    code = (
        "import sys, runpy, grouped_lora_ops as gl; gl.delta_ = lambda *args, **kwargs: None; "
        f"sys.argv[1:] = {SHORT!r}; runpy.run_path({str(FILE)!r}, run_name='__main__')"
    )
    result = run("-c", code)
    assert result.returncode == 1
    assert "FAILED: decode step 0: the op's result at token" in result.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--tp", "3"], "--tp must divide the 8 groups"),
        (["--tp", "2", "--tp-rank", "2"], "--tp-rank must be 0 to 1"),
        (["--batch", "1"], "--batch must be at least 2"),
    ],
)
def test_bad_arguments(example, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as exit:
        example.parse(arguments)
    assert exit.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_newcomers_run_on_a_gpu():
    result = run(str(FILE), "--tp", "2", "--steps", "20", timeout=300)
    assert result.returncode == 0, result.stderr
    assert "4 groups (0 to 3 of 8), 4096 -> 1024 each" in result.stdout
    assert "every replay of the CUDA graph has the bits of an eager call" in result.stdout
    table = {line[:14].strip(): line.split()[-2:] for line in result.stdout.splitlines()}
    without, with_lora = (float(table[name][0]) for name in ("without LoRA", "with LoRA"))
    assert 0 < without < with_lora  # the host's part of a launch would drown what LoRA adds
