"""`doctor`: what it finds on a machine that is well, and that it finds what is wrong, with a cure and exit status 1."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grouped_lora_ops import __main__ as entry
from grouped_lora_ops import _builds, cuda, doctor, driver, launch, selfcheck

ROOT = Path(__file__).parents[1]
H200 = doctor.Gpu(0, "NVIDIA H200", "sm_90", 132, 140 << 30)


@pytest.fixture
def every_op():
    """Asks for the exactness checks of all ops, not of one."""


@pytest.fixture(autouse=True)
def surroundings(request, tmp_path, monkeypatch):
    """Caches in a folder of the test's own, and no table of the caller's."""
    if "every_op" not in request.fixturenames:
        monkeypatch.setattr(selfcheck, "CHECKS", {"plan": selfcheck.check_plan})
    monkeypatch.setenv("GROUPED_LORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("GROUPED_LORA_TABLE", raising=False)
    launch.table.cache_clear()
    yield
    launch.table.cache_clear()


def examined(capsys, *options) -> tuple[int, dict]:
    status = entry.main(["doctor", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def errors(report: dict) -> list[dict]:
    return [f for f in report["findings"] if f["status"] == "error"]


@pytest.fixture
def gpu(monkeypatch):
    """As if there were an H200 whose kernels load; the exactness checks stay on the CPU."""
    state = SimpleNamespace(gpus=[H200], refused=None)
    library = SimpleNamespace(cuDriverGetVersion=lambda out: setattr(out._obj, "value", 13000) or 0)
    monkeypatch.setattr(doctor, "gpus", lambda: state.gpus)
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(
        cuda, "module", lambda op, stem, index: None if state.refused else SimpleNamespace(origin="package")
    )
    monkeypatch.setattr(cuda, "why_not", lambda stem, index: state.refused)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return state


class Package:
    """A package whose cubins a test makes; csrc/ is the real one."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder / "cubins"
        self.folder.mkdir(parents=True)
        (folder / "csrc").symlink_to(ROOT / "csrc")
        monkeypatch.setattr(cuda, "PACKAGE", folder)
        self.index = {}

    def pack(self, stem: str, build: str, cubin: bytes = b"cubin", **changes) -> Path:
        path = self.folder / f"{stem}.{build}.cubin"
        path.write_bytes(cubin)
        key = _builds.source_key(ROOT / "csrc", stem, build)
        self.index[f"{stem}.{build}"] = {"source": key, "sha256": hashlib.sha256(cubin).hexdigest(), **changes}
        (self.folder / _builds.INDEX).write_text(json.dumps(self.index))
        return path

    def pack_all(self, build: str = "sm_90a") -> None:
        for stem in _builds.stems(ROOT / "csrc"):
            self.pack(stem, build)


@pytest.fixture
def package(tmp_path, monkeypatch):
    return Package(tmp_path / "package", monkeypatch)


def test_a_machine_that_is_well(every_op, capsys):
    start = time.perf_counter()
    status, report = examined(capsys)
    assert status == 0 and report["ok"] and not errors(report)
    assert time.perf_counter() - start < 10
    sections = list(dict.fromkeys(f["section"] for f in report["findings"]))
    assert sections == ["versions", "GPU", "kernels", "compilers", "caches", "launch tables", "ops", "exactness"]
    assert [f["facts"]["op"] for f in report["findings"] if f["section"] == "exactness"] == list(selfcheck.CHECKS)
    assert (
        any(f["text"] == f"torch {torch.__version__}, without CUDA" for f in report["findings"]) or torch.version.cuda
    )


def test_the_lines_for_people(capsys):
    assert entry.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "\nexactness\n    ok  plan: right to the bit" in text and "cure:" not in text.split("exactness")[1]


def test_every_op_is_checked_and_looked_for(every_op):
    named = {name for names in selfcheck.CHECKS for name in names.split(", ")}
    assert named == set(doctor.OPS)
    ops = importlib.import_module("grouped_lora_ops.ops")
    assert set(ops.__all__) | {"expand_"} == set(doctor.OPS) | {"expand_"}


def test_any_order_of_the_sums_is_exact(every_op, monkeypatch):
    """With all signs alike no result reaches 2²⁴ quarters: whatever a kernel's order, float32 holds every partial sum."""
    largest = []

    def bound(names, run, model, tensors, seed):
        wide = [t.detach().abs().double().requires_grad_() for t in tensors]
        y = model(*wide)
        largest.extend(float(t.detach().max()) for t in (y, *torch.autograd.grad(y, wide, torch.ones_like(y))))

    monkeypatch.setattr(selfcheck, "forward_and_backward", bound)
    for check in selfcheck.CHECKS.values():
        check(selfcheck.Numbers(torch.device("cpu")))
    assert len(largest) > 30 and max(largest) < 2**22


def off_by_one(op):
    """The op, with one entry of its result a little wrong."""

    def wrong(*args, **kwargs):
        y = op(*args, **kwargs)
        if y is None:
            args[0].view(-1)[3] += 1
        else:
            y = y.clone()
            y.view(-1)[3] += 1
        return y

    return wrong


@pytest.mark.parametrize(
    "name",
    [
        "plan",
        "shrink",
        "expand",
        "delta",
        "delta_",
        "linear",
        "expert_plan",
        "expert_delta",
        "expert_linear",
        "expert_mlp",
    ],
)
def test_one_wrong_entry_is_found(name, every_op, monkeypatch, capsys):
    monkeypatch.setattr(selfcheck.ops, name, off_by_one(getattr(selfcheck.ops, name)))
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["facts"]["op"].split(", ")[0] == name and "report it" in found["cure"]


def test_a_wrong_gradient_is_found(every_op, monkeypatch, capsys):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    delta = selfcheck.ops.delta
    monkeypatch.setattr(selfcheck.ops, "delta", lambda *args, **kwargs: Doubled.apply(delta(*args, **kwargs)))
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["text"].startswith("delta on cpu: dx: ")


def test_an_op_that_raises_is_a_finding_and_the_others_are_still_checked(every_op, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(selfcheck.ops, "linear", broken)
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["text"] == "linear on cpu: RuntimeError: no kernel image"
    assert sum(f["section"] == "exactness" for f in report["findings"]) == len(selfcheck.CHECKS)


# --- cubins and caches ---


def test_a_broken_packaged_cubin_is_an_error(package, capsys):
    package.pack_all()
    package.pack("delta", "sm_90a").write_bytes(b"cub")
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["text"] == "broken packaged cubins: delta.sm_90a" and "reinstall" in found["cure"]


@pytest.mark.parametrize("damage", ["{", "[]", '{"delta.sm_90a": {}}'])
def test_an_index_that_says_nothing_is_an_error(package, damage, capsys):
    package.pack_all()
    (package.folder / _builds.INDEX).write_text(damage)
    assert examined(capsys)[0] == 1


def test_cubins_of_other_sources_are_a_warning(package, capsys):
    package.pack_all()
    package.pack("plan", "sm_90a", source="0" * 64)
    status, report = examined(capsys)
    (found,) = [f for f in report["findings"] if "other sources" in f["text"]]
    assert (status, found["status"]) == (0, "warning") and "plan.sm_90a" in found["text"]


def test_a_broken_cached_cubin_is_an_error(tmp_path, capsys):
    path = tmp_path / "cache" / "delta.sm_90a.0123.cubin"
    cuda._keep(path, b"cubin")
    assert examined(capsys)[0] == 0
    path.write_bytes(path.read_bytes()[:-1])
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["cure"].endswith(str(path))


def test_a_cache_that_cannot_be_written_matters_where_no_packaged_cubin_fits(
    gpu, package, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("a file where the folder should be")
    monkeypatch.setenv("GROUPED_LORA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    status, report = examined(capsys)
    (found,) = errors(report)
    every = ", ".join([f"{stem}.sm_90a" for stem in _builds.stems(ROOT / "csrc")])
    assert status == 1 and f"compiles {every} anew" in found["text"] and "GROUPED_LORA_CACHE_DIR" in found["cure"]
    package.pack_all()
    status, report = examined(capsys)
    assert status == 0 and any("the packaged cubins serve" in f["text"] for f in report["findings"])
    gpu.gpus = []
    assert examined(capsys)[0] == 0


def test_the_doctor_leaves_nothing_in_the_caches(tmp_path, capsys):
    examined(capsys)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "triton").exists()


def test_tritons_cache_must_be_writable_on_a_gpu(gpu, package, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    status, report = examined(capsys)
    assert status == 1 and "TRITON_CACHE_DIR" in errors(report)[0]["cure"]


# --- a GPU ---


def test_a_gpu_that_is_well(gpu, package, capsys):
    package.pack_all()
    status, report = examined(capsys)
    texts = [f["text"] for f in report["findings"]]
    assert status == 0
    assert "0: NVIDIA H200, sm_90, 132 multiprocessors, 140 GiB" in texts and "delta on GPU 0: from package" in texts
    assert any(text.endswith("CUDA up to 13.0") for text in texts)


def test_kernels_that_cannot_be_had_are_a_warning_with_a_cure(gpu, package, capsys):
    gpu.refused = "grouped_lora: no CUDA kernels of delta on sm_90, Triton's are used: …"
    status, report = examined(capsys)
    found = [f for f in report["findings"] if f["section"] == "kernels" and f["status"] == "warning"]
    assert status == 0 and len(found) == len(doctor.stems_here()) and "CuPy" in found[0]["cure"]
    gpu.gpus = [doctor.Gpu(0, "unknown", "sm_130", 200, 1 << 34)]  # no build of csrc/ runs there: nothing to cure
    assert not [f for f in examined(capsys)[1]["findings"] if f["section"] == "kernels" and f["status"] == "warning"]


def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gpus", list)
    monkeypatch.setattr(doctor, "said", lambda *command: "NVIDIA H200, 580.1" if command[0] == "nvidia-smi" else "")
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["text"].startswith("the machine has NVIDIA H200, 580.1, but ")


def test_a_driver_that_does_not_answer_is_an_error(gpu, package, monkeypatch, capsys):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "library", missing)
    status, report = examined(capsys)
    assert status == 1 and "libcuda.so.1" in errors(report)[0]["text"]


def test_versions_that_are_too_old_are_errors(gpu, package, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr(doctor, "version_of", lambda *names: ("triton", "3.5.1") if "triton" in names else None)
    status, report = examined(capsys)
    assert status == 1 and [f["cure"] for f in errors(report)] == [
        "pip install 'torch>=2.11'",
        "pip install 'triton>=3.6.0'",
    ]
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(doctor, "version_of", lambda *names: ("triton", "3.99.0") if "triton" in names else None)
    status, report = examined(capsys)
    assert status == 0 and any("newer than what eager calls are prepared for" in f["text"] for f in report["findings"])


# --- launch tables and ops ---


def test_how_much_of_the_launch_table_serves_this_gpu(gpu, package, tmp_path, monkeypatch, capsys):
    gpu.gpus = [doctor.Gpu(0, "L40S", "sm_89", 142, 48 << 30)]
    (found,) = [f for f in examined(capsys)[1]["findings"] if f["section"] == "launch tables"]
    assert found["status"] == "warning" and "tune --out sm_89.json" in found["cure"]
    table = tmp_path / "sm_89.json"
    table.write_text('{"delta": [{"when": {"tokens": [8192, 8192]}, "split": false, "shrink": {}, "expand": {}}]}')
    monkeypatch.setenv("GROUPED_LORA_TABLE", str(table))
    launch.table.cache_clear()
    (found,) = [f for f in examined(capsys)[1]["findings"] if f["section"] == "launch tables"]
    assert found["facts"] == {"arch": "sm_89", "rules": 1, "problems": 48, "by_rule": 8} and found["status"] == "ok"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"delta": [{"when": {}, "split": true, "shrink": {"rows": 3}, "expand": {}}]}',
        '{"delta": [{"when": {"x": [1, 2]}}]}',
        None,
    ],
)
def test_a_launch_table_that_is_none_is_an_error(text, tmp_path, monkeypatch, capsys):
    table = tmp_path / "table.json"
    if text is not None:
        table.write_text(text)
    monkeypatch.setenv("GROUPED_LORA_TABLE", str(table))
    status, report = examined(capsys)
    assert (
        status == 1
        and errors(report)[0]["section"] == "launch tables"
        and "GROUPED_LORA_TABLE" in errors(report)[0]["cure"]
    )


def test_an_op_that_is_not_registered_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "OPS", (*doctor.OPS, "gamma"))
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and found["facts"]["lacking"] == ["gamma"]


def test_a_check_that_fails_itself_is_an_error_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "c_compiler", lambda: 1 / 0)
    status, report = examined(capsys)
    (found,) = errors(report)
    assert status == 1 and "ZeroDivisionError" in found["text"]
    assert report["findings"][-1]["section"] == "exactness"


@pytest.mark.gpu
def test_every_op_is_exact_on_this_gpu(every_op):
    assert [outcome for outcome in selfcheck.run(torch.device("cuda")) if outcome.wrong] == []
