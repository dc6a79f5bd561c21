"""Check this machine: versions, GPUs, kernels, compilers, caches, launch tables, and every op on exact numbers.

Exit status 1 where something is wrong, each with its cure; a warning is something that costs speed and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from . import _builds, cuda, driver, launch, selfcheck

OLDEST_TORCH, OLDEST_TRITON, OLDEST_ARCH = (2, 11), (3, 6), 80
OPS = (
    "plan", "shrink", "expand", "expand_", "delta", "delta_", "linear", "expert_plan", "expert_delta", "expert_linear", "expert_mlp",
)  # fmt: skip
NAMES = (("error", "error"), ("warning", "warning"))
CLEAR = "\r\033[K"  # of a terminal's line
MARKS = {"ok": "  ok", "note": "note", "warning": "WARN", "error": "FAIL"}


@dataclass
class Finding:
    """One line of the doctor's. status: ok, note, warning (costs speed) or error (something is wrong)."""

    section: str
    status: str
    text: str
    cure: str = ""
    facts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    arch: str  # "sm_90"
    sms: int
    memory: int  # bytes

    @property
    def build(self) -> str | None:
        return _builds.build_for(self.arch)


def gpus() -> list[Gpu]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, p.name, f"sm_{p.major}{p.minor}", p.multi_processor_count, p.total_memory))
    return found


def version_of(*names: str) -> tuple[str, str] | None:
    """(distribution, version) of the first that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())


def said(*command: str) -> str:
    """What a program prints; "" where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- versions and GPUs ---


def versions(found: list[Gpu]) -> Iterator[Finding]:
    from . import __version__

    yield Finding("versions", "ok", f"grouped_lora_ops {__version__} in {cuda.PACKAGE}")
    yield Finding("versions", "ok", f"Python {platform.python_version()} on {platform.platform()}")
    old = numbers(torch.__version__) < OLDEST_TORCH
    wanted = ".".join(map(str, OLDEST_TORCH))
    text = f"torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA")
    cure = f"pip install 'torch>={wanted}'"
    yield Finding("versions", "error" if old else "ok", text, cure if old else "", {"torch": torch.__version__})
    yield triton_version(bool(found))
    cupy = version_of("cupy-cuda13x", "cupy-cuda12x", "cupy")
    text = " ".join(cupy) if cupy else "CuPy is not installed (NVRTC through it compiles csrc/ where no cubin fits)"
    yield Finding("versions", "ok" if cupy else "note", text, facts={"cupy": cupy and cupy[1]})


def triton_version(gpu: bool) -> Finding:
    found = version_of("triton", "pytorch-triton", "triton-windows")
    facts = {"triton": found and found[1]}
    if importlib.util.find_spec("triton") is None:
        cure = f"pip install 'triton>={'.'.join(map(str, OLDEST_TRITON))}'" if gpu else ""
        return Finding(
            "versions", "error" if gpu else "note", "Triton is not installed; the kernels for GPUs need it", cure, facts
        )
    version = found[1] if found else "of unknown version"
    if found and numbers(version) < OLDEST_TRITON:
        return Finding(
            "versions",
            "error" if gpu else "warning",
            f"Triton {version} is too old",
            "pip install 'triton>=3.6.0'",
            facts,
        )
    if found and not version.startswith(tuple(f"{release}." for release in driver._TRITON)):
        text = f"Triton {version} is newer than what eager calls are prepared for: they take the ordinary way, 150 to 420 µs a call"
        return Finding("versions", "warning", text, f"pip install 'triton=={driver._TRITON[-1]}.*'", facts)
    return Finding("versions", "ok", f"Triton {version}", facts=facts)


def hardware(found: list[Gpu]) -> Iterator[Finding]:
    listed = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    if not found and listed:
        why = "this torch has no CUDA" if torch.version.cuda is None else f"torch {torch.__version__} cannot use it"
        cure = "install a torch with CUDA (pip install torch), or a driver as new as torch's CUDA; CUDA_VISIBLE_DEVICES must not hide it"
        yield Finding("GPU", "error", f"the machine has {listed[0]}, but {why}", cure)
        return
    if not found:
        yield Finding("GPU", "note", "no NVIDIA GPU: the operators run in plain PyTorch on the CPU")
        return
    version = ctypes.c_int()
    try:
        driver.check(driver.library().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    except (OSError, AttributeError, RuntimeError) as error:
        yield Finding(
            "GPU",
            "error",
            f"the CUDA driver's library does not answer: {error}",
            "install NVIDIA's driver (libcuda.so.1)",
        )
    else:
        name = f"driver {listed[0].rpartition(', ')[2]}, " if listed else ""
        text = f"{name}CUDA up to {version.value // 1000}.{version.value % 1000 // 10}"
        yield Finding("GPU", "ok", text, facts={"driver": text})
    for gpu in found:
        facts = asdict(gpu)
        text = f"{gpu.index}: {gpu.name}, {gpu.arch}, {gpu.sms} multiprocessors, {gpu.memory / 2**30:.0f} GiB"
        if int(gpu.arch.removeprefix("sm_")) < OLDEST_ARCH:
            yield Finding(
                "GPU", "warning", f"{text}: older than sm_{OLDEST_ARCH}, on which nothing here was tried", "", facts
            )
        else:
            yield Finding("GPU", "ok", text, facts=facts)
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield Finding(
            "GPU", "warning", "TRITON_INTERPRET=1: kernels run in Triton's interpreter", "unset TRITON_INTERPRET"
        )


# --- kernels, compilers, caches ---


def packaged(stem: str, build: str) -> str:
    """How the package's cubin of csrc/<stem>.cu is: "fits", "absent", "other sources" or "broken"."""
    folder = cuda.PACKAGE / "cubins"
    try:
        entries = json.loads((folder / _builds.INDEX).read_text())
        entry = entries.get(f"{stem}.{build}")
        wanted = entry and (entry["source"], entry["sha256"])
    except FileNotFoundError:
        return "absent"
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return "broken"
    if wanted is None:
        return "absent"
    try:
        cubin = (folder / f"{stem}.{build}.cubin").read_bytes()
    except OSError:
        return "broken"
    if wanted[1] != hashlib.sha256(cubin).hexdigest():
        return "broken"
    return "fits" if wanted[0] == _builds.source_key(_builds.sources(cuda.PACKAGE), stem, build) else "other sources"


def cubins(found: list[Gpu]) -> Iterator[Finding]:
    stems = _builds.stems(_builds.sources(cuda.PACKAGE))
    if not stems:
        yield Finding("kernels", "error", "the CUDA sources (csrc/) are missing", "reinstall grouped_lora_ops")
        return
    states = {f"{stem}.{build}": packaged(stem, build) for stem in stems for build in _builds.ARCHS}
    by_state = {state: sorted(name for name in states if states[name] == state) for state in set(states.values())}
    if "broken" in by_state:
        cure = "reinstall grouped_lora_ops, or delete its cubins/ folder: the kernels are then compiled at first use"
        yield Finding(
            "kernels", "error", f"broken packaged cubins: {', '.join(by_state['broken'])}", cure, {"packaged": states}
        )
    if "other sources" in by_state:
        cure = "make them again: python grouped_lora_ops/_builds.py, or reinstall"
        names = ", ".join(by_state["other sources"])
        yield Finding(
            "kernels", "warning", f"packaged cubins of other sources, not used: {names}", cure, {"packaged": states}
        )
    if "fits" in by_state:
        yield Finding("kernels", "ok", f"packaged cubins: {', '.join(by_state['fits'])}", facts={"packaged": states})
    elif len(by_state) == 1:
        text = "no cubins are packaged (none are where nvcc was not on PATH at install, nor in an editable install)"
        yield Finding("kernels", "note", text, facts={"packaged": states})
    yield from cached_cubins()
    for gpu in found:
        yield from loaded(gpu, stems)


def cached_cubins() -> Iterator[Finding]:
    folder = cuda.cache_folder()
    files = sorted(folder.glob("*.cubin")) if folder is not None and folder.is_dir() else []
    broken = [path for path in files if cuda._cached(path) is None]
    if broken:
        cure = "delete them (they are made again): rm " + " ".join(map(str, broken))
        yield Finding("kernels", "error", f"{len(broken)} of {len(files)} cached cubins are broken", cure)
    whole = [path.name for path in files if path not in broken]
    if whole:
        kinds = sorted({".".join(name.split(".")[:2]) for name in whole})
        yield Finding("kernels", "ok", f"cached cubins: {', '.join(kinds)}", facts={"cached": whole})


def loaded(gpu: Gpu, stems: list[str]) -> Iterator[Finding]:
    """Each stem's module loaded on a GPU, compiled where that is how it is to be had."""
    for stem in stems:
        with torch.cuda.device(gpu.index):
            module = cuda.module("doctor", stem, gpu.index)
        if module is not None:
            yield Finding(
                "kernels", "ok", f"{stem} on GPU {gpu.index}: from {module.origin}", facts={"origin": module.origin}
            )
            continue
        why = cuda.why_not(stem, gpu.index) or "not loaded"
        cure = "pip install 'grouped_lora_ops[cuda]' (CuPy brings NVRTC), or put nvcc on PATH" if gpu.build else ""
        yield Finding("kernels", "warning" if gpu.build else "note", f"{stem} on GPU {gpu.index}: {why}", cure)


def compilers(found: list[Gpu]) -> Iterator[Finding]:
    nvcc = shutil.which("nvcc")
    release = next((line for line in said(nvcc, "--version").splitlines() if "release" in line), "") if nvcc else ""
    text = (
        f"nvcc: {nvcc}" + (f" ({release.rpartition('release ')[2]})" if release else "")
        if nvcc
        else "nvcc is not on PATH"
    )
    yield Finding("compilers", "ok" if nvcc else "note", text, facts={"nvcc": nvcc})
    if importlib.util.find_spec("cupy") is None:
        yield Finding("compilers", "note", "NVRTC: CuPy is not installed", facts={"nvrtc": None})
    else:
        try:
            from cupy.cuda import nvrtc

            version = ".".join(map(str, nvrtc.getVersion()))
            yield Finding("compilers", "ok", f"NVRTC {version} through CuPy", facts={"nvrtc": version})
        except Exception as error:  # whatever a broken CuPy throws
            fits = nvcc is not None or all(
                packaged(s, g.build) == "fits" for g in found if g.build for s in stems_here()
            )
            cure = "reinstall CuPy for this CUDA (pip install cupy-cuda13x), or put nvcc on PATH"
            text = f"NVRTC: CuPy does not work ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
            yield Finding("compilers", "note" if fits else "warning", text, "" if fits else cure, {"nvrtc": None})
    compiler = c_compiler()
    if compiler:
        yield Finding("compilers", "ok", f"C compiler: {compiler}", facts={"cc": compiler})
    else:
        text = "no C compiler: Triton builds a small launcher with one at its first kernel"
        cure = "install gcc or clang, or name one in CC" if found else ""
        yield Finding("compilers", "warning" if found else "note", text, cure, {"cc": None})
    if driver._launcher:
        yield Finding("compilers", "ok", "the C launcher is built: a prepared eager call is repeated in C")
    else:
        text = "the C launcher was not built: eager calls cost 2 to 5 µs more through ctypes"
        yield Finding("compilers", "note", text, "reinstall where a C compiler is" if found else "")


def stems_here() -> list[str]:
    return _builds.stems(_builds.sources(cuda.PACKAGE))


def c_compiler() -> str | None:
    chosen = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "").split(" ")[0]
    return next(filter(None, (shutil.which(name) for name in (chosen, "gcc", "clang", "cc", "cl") if name)), None)


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written below a folder, which need not exist; nothing is left behind."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place}: {error.strerror or error}"


def caches(found: list[Gpu]) -> Iterator[Finding]:
    folder = cuda.cache_folder()
    why = "there is no home folder" if folder is None else unwritable(folder)
    builds = {gpu.build for gpu in found if gpu.build}
    lacking = sorted(f"{stem}.{build}" for stem in stems_here() for build in builds if packaged(stem, build) != "fits")
    if why is None:
        yield Finding("caches", "ok", f"kernels of csrc/: {folder}, writable", facts={"cache": str(folder)})
    elif lacking:
        text = f"the cache cannot be written ({why}), and no packaged cubin fits: every process compiles {', '.join(lacking)} anew"
        yield Finding(
            "caches",
            "error",
            text,
            "set GROUPED_LORA_CACHE_DIR to a folder that can be written",
            {"cache": str(folder)},
        )
    else:
        what = "the packaged cubins serve" if found else "without a GPU nothing is kept there"
        yield Finding("caches", "note" if found else "warning", f"the cache cannot be written ({why}); {what}",
                      "set GROUPED_LORA_CACHE_DIR to a folder that can be written", {"cache": str(folder)})  # fmt: skip
    try:
        triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    except RuntimeError:
        triton, why = None, "there is no home folder"
    else:
        why = unwritable(triton)
    if why is None:
        yield Finding("caches", "ok", f"Triton's kernels: {triton}, writable")
    else:
        cure = "set TRITON_CACHE_DIR to a folder that can be written"
        yield Finding("caches", "error" if found else "warning", f"Triton's cache cannot be written ({why})", cure)


# --- launch tables and ops ---


def typical(arch: str, sms: int) -> list[launch.Problem]:
    """Dense problems of serving and training: 4096 → 4096, and four groups of 4096 → 1024."""
    return [
        launch.Problem(arch, sms, 2, tokens, groups, 4096, 4096 // groups, rank, slots, groups > 1)
        for tokens in (1, 8, 64, 256, 1024, 8192)
        for groups in (1, 4)
        for rank in (16, 64)
        for slots in (1, 8)
    ]


def tables(found: list[Gpu]) -> Iterator[Finding]:
    named = os.environ.get("GROUPED_LORA_TABLE")
    if not found and not named:
        folder = cuda.PACKAGE / "launch_tables"
        shipped = ", ".join(sorted(path.stem for path in folder.glob("*.json"))) or "none"
        yield Finding(
            "launch tables",
            "note",
            f"shipped: {shipped} (the closed form was measured on sm_90); no GPU to look one up for",
        )
    for arch, sms in sorted({(gpu.arch, gpu.sms) for gpu in found} or ({("sm_90", 132)} if named else set())):
        try:
            rules = launch.table(arch).get("delta", [])
            problems = typical(arch, sms)
            by_rule = sum(any(launch._matches(rule["when"], p) for rule in rules) for p in problems)
            for p in problems:
                launch.delta(p)
        except Exception as error:  # a table is written by hand, too
            what = named or f"launch_tables/{arch}.json"
            text = f"{what} is not a launch table: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            cure = "correct it, or unset GROUPED_LORA_TABLE" if named else "reinstall, or make it again with tune"
            yield Finding("launch tables", "error", text, cure)
            continue
        facts = {"arch": arch, "rules": len(rules), "problems": len(problems), "by_rule": by_rule}
        if rules:
            where = named or "shipped table"
            text = f"{arch}: {len(rules)} rules ({where}) decide {by_rule} of {len(problems)} typical problems, the closed form the others"
            yield Finding("launch tables", "ok", text, facts=facts)
        elif arch == "sm_90":
            yield Finding(
                "launch tables",
                "ok",
                "sm_90: no table is needed, the closed form was measured on this architecture",
                facts=facts,
            )
        else:
            text = f"{arch}: no table; the closed form, measured on sm_90, decides all {len(problems)} typical problems"
            cure = f"python -m grouped_lora_ops tune --out {arch}.json, then GROUPED_LORA_TABLE={arch}.json"
            yield Finding("launch tables", "warning", text, cure, facts)


def registered() -> Iterator[Finding]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    lacking = []
    for name in OPS:
        if not hasattr(torch.ops.grouped_lora, name):
            lacking.append(name)
            continue
        lacking += [f"{name} ({key})" for key in ("CPU", "CUDA", "Meta") if not has(f"grouped_lora::{name}", key)]
    if lacking:
        yield Finding(
            "ops", "error", f"not registered: {', '.join(lacking)}", "reinstall grouped_lora_ops", {"lacking": lacking}
        )
    else:
        yield Finding("ops", "ok", f"{len(OPS)} registered: {', '.join(OPS)}", facts={"ops": list(OPS)})


def exactness(say: Callable[[str], None]) -> Iterator[Finding]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for outcome in selfcheck.run(device, say):
        facts = {"op": outcome.op, "seconds": round(outcome.seconds, 3), "device": str(device)}
        if outcome.wrong is None:
            yield Finding("exactness", "ok", f"{outcome.op}: right to the bit ({outcome.seconds:.1f} s)", facts=facts)
        else:
            cure = "do not use this op here; report it with the output of doctor --json"
            yield Finding("exactness", "error", f"{outcome.op} on {device}: {outcome.wrong}", cure, facts)


def examine(say: Callable[[str], None] = lambda text: None) -> Iterator[Finding]:
    """Every finding, as it is made."""
    found = gpus()
    sections = (
        ("versions", lambda: versions(found)),
        ("GPU", lambda: hardware(found)),
        ("kernels", lambda: cubins(found)),
        ("compilers", lambda: compilers(found)),
        ("caches", lambda: caches(found)),
        ("launch tables", lambda: tables(found)),
        ("ops", registered),
        ("exactness", lambda: exactness(say)),
    )
    for name, look in sections:
        try:
            yield from look()
        except Exception as error:  # a doctor that falls over says where
            text = f"this check failed itself: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            yield Finding(name, "error", text, "report it with this output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the lines")


def run(options: argparse.Namespace) -> int:
    start, section, findings = time.perf_counter(), None, []
    terminal = sys.stderr.isatty() and not options.json
    for f in examine(progress if terminal else lambda op: None):
        findings.append(f)
        if options.json:
            continue
        if f.section != section:
            section = f.section
            print(section)
        print(f"{CLEAR if terminal else ''}  {MARKS[f.status]}  {f.text}")
        if f.cure and f.status != "ok":
            print(f"        cure: {f.cure}", flush=True)
    counts = {status: sum(f.status == status for f in findings) for status in MARKS}
    seconds = time.perf_counter() - start
    if options.json:
        head = {"ok": counts["error"] == 0, "seconds": round(seconds, 2), **counts}
        print(json.dumps({**head, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        found = [
            f"{counts[status]} {name}{'s' if counts[status] > 1 else ''}" for status, name in NAMES if counts[status]
        ]
        print(f"{', '.join(found) or 'nothing is wrong'} ({seconds:.1f} s)")
    return 1 if counts["error"] else 0


def progress(op: str) -> None:
    print(f"{CLEAR}        … {op}", end="\r", file=sys.stderr, flush=True)
