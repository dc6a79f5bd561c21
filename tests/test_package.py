"""What is installed: a light import, no demands on the machine, complete archives, types that a checker reads."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import typing
import zipfile
from pathlib import Path

import pytest

import grouped_lora_ops as gl

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ("", ".adapters", ".layouts", ".nn", ".sharding", ".plan", ".warmup", ".warmup_experts")
HEAVY = ("triton", "cupy", "transformers", "peft", "matplotlib", "tqdm", "accelerate", "pandas")


def python(code: str, **env) -> str:
    """What a fresh process prints that runs the code in an empty folder's stead, with this checkout to import from."""
    full = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {"PYTHONPATH": str(ROOT), **env}
    run = subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_it_imports_and_runs_on_a_bare_machine(tmp_path):
    """No GPU, no compiler on PATH, no CuPy, no Triton, and a home folder that cannot be written: a file is in its place."""
    home = tmp_path / "home"
    home.write_text("no folder")
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('cupy', 'triton'): raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import torch, grouped_lora_ops as gl\n"
        "x, a, b = (torch.ones(s, requires_grad=True) for s in ((3, 2, 8), (2, 4, 8), (2, 2, 5, 4)))\n"
        "y = gl.delta(x, a, b, torch.tensor([0, -1, 1]), torch.ones(2))\n"
        "y.sum().backward()\n"
        "print(y[0, 0, 0].item(), y[1].any().item(), b.grad.sum().item())\n"
    )
    env = dict(HOME=str(home), XDG_CACHE_HOME=str(home / "cache"), PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert python(code, **env).split() == ["32.0", "False", str(2.0 * 2 * 5 * 4 * 8)]
    assert home.read_text() == "no folder"


def test_an_import_is_light():
    """Under 0.3 s beside torch's own, the best of a few tries, and nothing heavy comes along."""
    names = [f"grouped_lora_ops{name}" for name in PUBLIC]
    loaded = python(f"import sys, {', '.join(names)}\nprint(*sys.modules)").split()
    without = python("import sys, torch, torch.distributed\nprint(*sys.modules)").split()
    assert not (set(loaded) - set(without)) & set(HEAVY)
    code = "import torch, time\nstart = time.perf_counter()\nimport grouped_lora_ops\nprint(time.perf_counter() - start)"
    times = []
    for _ in range(5):
        times.append(float(python(code)))
        if times[-1] < 0.3:
            return
    pytest.fail(f"an import took {min(times):.2f} s")


def build(what: str, source: Path, out: Path, **env) -> Path:
    """`sdist` or `wheel` of a folder by the backend that pyproject.toml names, without a network."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools >= 77 is needed to build")
    code = f"import setuptools.build_meta as b; print(); print(b.build_{what}({str(out)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, env={**os.environ, **env}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out / run.stdout.split()[-1]


def test_an_sdist_makes_a_complete_wheel(tmp_path):
    """From a clean copy, without nvcc: every module, table and CUDA source is inside, and the metadata says what is needed."""
    clean, unpacked = tmp_path / "clean", tmp_path / "unpacked"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "cubins")
    clean.mkdir()
    for name in ("grouped_lora_ops", "csrc", "tests"):
        shutil.copytree(ROOT / name, clean / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, clean)
    files = [p.relative_to(clean) for p in (clean / "grouped_lora_ops").rglob("*") if p.is_file()]
    sdist = build("sdist", clean, tmp_path)  # which may leave bytecode behind
    with tarfile.open(sdist) as archive:
        filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.10.12, 3.11.4 and newer
        archive.extractall(unpacked, **filtered)
    (unpacked,) = unpacked.iterdir()
    assert not (unpacked / "tests").exists(), "a part of the tests, without what they import"
    assert (unpacked / "CHANGELOG.md").is_file() and (unpacked / "csrc" / "launcher.c").is_file()
    wheel = zipfile.ZipFile(build("wheel", unpacked, tmp_path, GROUPED_LORA_BUILD_ARCHS=""))
    packed = set(wheel.namelist())
    assert {str(p) for p in files} <= packed
    assert {f"grouped_lora_ops/csrc/{p.name}" for p in (ROOT / "csrc").iterdir() if p.suffix in (".cu", ".cuh")} <= packed
    assert not [name for name in packed if name.endswith(".cubin") or name.split("/")[0] in ("tests", "bench", "examples")]
    (metadata,) = [wheel.read(name).decode() for name in packed if name.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {gl.__version__}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, flags=re.M))
    assert {"cuda", "cuda12", "cuda13", "test", "bench"} <= extras
    assert re.search(r"^Requires-Dist: cupy-cuda12x; extra == .cuda12.$", metadata, flags=re.M)
    assert re.search(r"^Requires-Dist: cupy-cuda13x; extra == .cuda13.$", metadata, flags=re.M)
    (tags,) = [wheel.read(name).decode() for name in packed if name.endswith(".dist-info/WHEEL")]
    if not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled():
        assert re.search(r"^Tag: cp310-abi3-", tags, flags=re.M)


def test_one_version():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', text, flags=re.M) == [gl.__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gl.__version__), "a semantic version"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changes, flags=re.M).group(1) == gl.__version__


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_typed(name):
    """Every parameter and result of the public functions, classes and their public methods has a type that resolves."""
    module = importlib.import_module(f"grouped_lora_ops{name}")
    names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
    missing = []

    def look(where, function, method):
        parameters = list(inspect.signature(function).parameters.values())[method:]
        missing.extend(f"{where}: {p.name}" for p in parameters if p.annotation is p.empty)
        if inspect.signature(function).return_annotation is inspect.Signature.empty:
            missing.append(f"{where}: the result")
        typing.get_type_hints(function)

    for public in names:
        value = getattr(module, public)
        where = f"{module.__name__}.{public}"
        if not getattr(value, "__module__", "").startswith("grouped_lora_ops"):
            continue
        if inspect.isfunction(value):
            look(where, value, 0)
        elif inspect.isclass(value):
            for attribute, method in list(vars(value).items()):
                if attribute in getattr(value, "__annotations__", {}):
                    continue  # a field whose default is a function
                static = isinstance(method, staticmethod)
                method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if inspect.isfunction(method) and not attribute.startswith("_") and method.__module__ == value.__module__:
                    look(f"{where}.{attribute}", method, not static)
    assert not missing, "\n".join(missing)


def test_a_checker_accepts_a_users_program(tmp_path):
    """mypy --strict on a program that uses the public API as README.md does, and it reads our types: a wrong call is found."""
    pytest.importorskip("mypy")
    assert (ROOT / "grouped_lora_ops" / "py.typed").is_file()
    program = (ROOT / "tests" / "typed_use.py").read_text(encoding="utf-8")
    (tmp_path / "good.py").write_text(program, encoding="utf-8")
    (tmp_path / "bad.py").write_text(
        "import torch\nimport grouped_lora_ops as gl\n"
        "x = torch.ones(3, 8)\ngl.delta(x, x, x, x, x, ranks=[1, 2])\ny: int = gl.shrink(x, x, x)\ngl.nowhere\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict", "--cache-dir", str(tmp_path / "cache")]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    good = subprocess.run([*command, "good.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = subprocess.run([*command, "bad.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    found = re.findall(r"^bad\.py:(\d): error: .*\[(.*)\]$", bad.stdout, flags=re.M)
    assert found == [("4", "arg-type"), ("5", "assignment"), ("6", "attr-defined")], bad.stdout
