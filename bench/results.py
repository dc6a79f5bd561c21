"""The compact JSON of a run: what was measured, on what, with one line per figure, so that a diff shows the
figures.

{"schema": 1, "suite": "delta", "date": "2026-11-30T10:00:00Z", "gpu": "NVIDIA H200", "versions": {"torch": …},
 "commit": "1a2b3c4", "source": "<hash of the package's files>", "method": …, "tiny": false,
 "rows": [
{"op": "delta", "workload": "wo_a-r16-S2-T8", "contender": "ours", "variant": "", "T": 8, …, "us": 3.9,
 "floor_us": 0.21, "pct_of_floor": 5.5, "bar_us": 3.7, "best_peer": "sglang best", "best_peer_us": 9.0, …}
]}

us is µs per call; pct_of_floor is 100 · floor / us (100 = at the floor); q1_us and q3_us are the quartiles of the rounds. A row
whose `method` differs from the run's has one of its own. `variants` holds the figures of every way a contender could do it; `us` is the
best one's.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from grouped_lora_ops.report.runs import SCHEMA

from . import workloads
from .workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


@functools.cache
def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("triton", "sglang", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache
def commit() -> str:
    """The short commit, with `+` where the package differs from it; "unknown" outside a git checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "grouped_lora_ops") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@functools.cache
def source() -> str:
    """A hash of the package's sources: says which code ran where there is no git."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "grouped_lora_ops").rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".json"):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def header(suite: str, method: str, tiny: bool, commit_id: str | None = None) -> dict:
    return {
        "schema": SCHEMA,
        "suite": suite,
        "date": now(),
        "gpu": gpu_name(),
        "versions": versions(),
        "commit": commit_id or commit(),
        "source": source(),
        "method": method,
        "tiny": tiny,
    }


def facts(w: Workload, op: str) -> dict:
    """What a row says about its workload."""
    peer = w.best_peer if op == "delta" else None
    return {
        "T": w.T,
        "G": w.G,
        "D": w.D,
        "N": list(w.out_sizes) if w.out_sizes else w.N,
        "rank": w.rank,
        "slots": w.slots,
        "active": workloads.batch(w).adapters,
        "layout": w.layout,
        "dtype": str(w.dtype).removeprefix("torch."),
        "floor_us": None if op == "host" else workloads.floor_us(w, op),
        "bar_us": workloads.bar_us(w, op),
        "best_peer": peer,
        "best_peer_us": w.peers[peer] if peer else None,
    }


def row(w: Workload, op: str, contender: str, us: float, **more) -> dict:
    of_workload = w.facts(op) if hasattr(w, "facts") else facts(w, op)
    figures = {name: of_workload.pop(name) for name in ("floor_us", "bar_us", "best_peer", "best_peer_us")}
    made = {"op": op, "workload": w.name, "contender": contender, **of_workload, "us": round(us, 3)}
    floor = figures["floor_us"]  # None: of the CPU's time there is none
    made["floor_us"] = None if floor is None else round(floor, 3)
    made["pct_of_floor"] = None if floor is None else round(100 * floor / us, 1)
    made["bar_us"] = None if figures["bar_us"] is None else round(figures["bar_us"], 3)
    made |= {"best_peer": figures["best_peer"], "best_peer_us": figures["best_peer_us"]}
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in more.items()}
    return made | {key: value for key, value in rounded.items() if value not in (None, "", {})}


def write(path: Path, head: dict, rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    body = json.dumps(head, ensure_ascii=False)[:-1] + ', "rows": [\n' + lines + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body, encoding="utf-8")
