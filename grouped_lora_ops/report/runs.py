"""Result files as lists of runs: the compact JSON of `pytest bench --bench-json`, and pytest-benchmark's own `--benchmark-json`.

A run is its file's head (gpu, versions, commit, date, method, tiny, …) with `rows`. A row is one figure: op, workload, contender,
us (µs per call), and where they are known floor_us, q1_us and q3_us (quartiles of the rounds), host_us, peak_mib, base_us, …
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

SCHEMA = 1  # of the compact JSON
HEAD = ("gpu", "versions", "commit", "date", "method", "tiny")
NAME = re.compile(
    r"^(?:extra-)?(?P<family>.*?)(?:-r(?P<rank>\d+))?(?:-S(?P<slots>\d+))?(?:-a(?P<active>\d+))?-T(?P<tokens>\d+)$"
)
SAME_SHAPE = {"curve": "wo_a"}  # workloads that only add token counts to another family
KINDS = {  # rows of the curve that stand beside others, by what follows the layer in their family's name
    "active1of64": "1 of 64 slots active",
    "r16in256": "ranks of 16 padded to 256",
    "idle": "no adapter in the batch",
}


def read(path: Path) -> list[dict]:
    """The runs of one file. ValueError where it is none of the two kinds, or of another schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is neither a result file of `pytest bench` nor of pytest-benchmark.")
    if "benchmarks" in data:
        return _of_pytest_benchmark(path, data)
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path.name}: schema {data.get('schema')!r}, this version reads {SCHEMA}.")
    lacking = [key for key in (*HEAD, "rows") if key not in data]
    if lacking:
        raise ValueError(f"{path.name} lacks {', '.join(lacking)}.")
    return [data]


def _of_pytest_benchmark(path: Path, data: dict) -> list[dict]:
    """What bench/conftest.py puts into extra_info: the row, and its run's head under `run`; the rounds are in stats."""
    runs: dict[str, dict] = {}
    for entry in data["benchmarks"]:
        row = dict(entry.get("extra_info") or {})
        head = row.pop("run", None)
        if head is None or "us" not in row:
            continue  # a benchmark of someone else's
        if head.get("schema") != SCHEMA:
            raise ValueError(f"{path.name}: schema {head.get('schema')!r}, this version reads {SCHEMA}.")
        row.pop("peers", None)
        stats = entry.get("stats") or {}
        if stats.get("rounds", 0) >= 4:
            row.setdefault("q1_us", round(stats["q1"] * 1e6, 3))
            row.setdefault("q3_us", round(stats["q3"] * 1e6, 3))
        key = json.dumps(head, sort_keys=True)
        runs.setdefault(key, head | {"rows": []})["rows"].append(row)
    if not runs:
        raise ValueError(
            f"{path.name} holds no figures of this project's suites (pytest bench --benchmark-json={path.name})."
        )
    return list(runs.values())


def read_all(paths: Iterable[Path]) -> list[dict]:
    """The runs of files and of folders full of them, the oldest first."""
    files = []
    for path in map(Path, paths):
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist.")
        files += found
    return sorted((run for path in files for run in read(path)), key=lambda run: run["date"])


def newest(runs: list[dict]) -> dict[str, dict[tuple, dict]]:
    """{gpu: {(op, workload): {contender: row}}}, of each the newest figure; every row knows its run."""
    found: dict[str, dict[tuple, dict]] = {}
    for run in runs:
        for row in run["rows"]:
            if row.get("us") is None or "workload" not in row:
                continue
            by_contender = found.setdefault(run["gpu"], {}).setdefault((row["op"], row["workload"]), {})
            by_contender[row["contender"]] = row | {"run": run}
    return found


def family(row: dict) -> str:
    """The workload's name without its numbers: what a curve over T is drawn for."""
    match = NAME.match(row["workload"])
    name = match["family"] if match else row["workload"]
    return SAME_SHAPE.get(name, name)


def kind(row: dict) -> tuple[str, str | None]:
    """(layer, what a row of the curve is about, where it stands beside another); of other rows (family, None)."""
    layer, _, about = family(row).partition("-")
    return (layer, KINDS[about]) if about in KINDS else (family(row), None)


def tokens(row: dict) -> int | None:
    return row.get("T")


def order(name: str, row: dict) -> tuple:
    """Workloads of a family by rank, slots, adapters, then tokens."""
    match = NAME.match(name)
    if match is None:
        return (name, 0, 0, 0, 0)
    return (match["family"], *(int(match[part] or 0) for part in ("rank", "slots", "active", "tokens")))


def dtype_note(row: dict) -> str:
    return "" if row.get("dtype") in (None, "bfloat16") else f", {row['dtype']}"
