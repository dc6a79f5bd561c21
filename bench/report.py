"""The README's benchmark tables, made from the committed results.

    python -m bench.report            write the tables between <!-- bench:start --> and <!-- bench:end -->
    python -m bench.report --check    exit 1 where the README does not show what bench/results holds

Of each (GPU, op, workload, contender) the newest figure counts. Times are µs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import results, workloads

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
EMPTY = "No figures are committed yet; bench/NOTES.md says how they are measured."
FAMILIES = (
    (
        "delta",
        "wo_a-",
        "`delta_`, DeepSeek-V4 `wo_a`: x [T, 4, 4096], one A for all groups, N = 1024 per group",
    ),
    ("delta", "plain-", "`delta_`, one linear layer, 4096 → 4096"),
    ("delta", "extra-", "`delta_`, other shapes, mixes and dtypes"),
    ("shrink", "", "`shrink` alone"),
    ("expand", "", "`expand_` alone"),
    ("plan", "", "`plan`, once per batch"),
    ("expert_delta", "", "`expert_delta`: per-expert A and B, top-8 of uniform routing, a plan of its own in every call"),
    ("train", "", "Forward and backward"),
)


def newest(runs: list[dict]) -> dict[str, dict[tuple, dict]]:
    """{gpu: {(op, workload): {contender: row}}}; every row knows its run."""
    found: dict[str, dict[tuple, dict]] = {}
    for run in runs:
        for row in run["rows"]:
            by_contender = found.setdefault(run["gpu"], {}).setdefault((row["op"], row["workload"]), {})
            by_contender[row["contender"]] = row | {"run": run}
    return found


def cell(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def measured(row: dict | None) -> str:
    if row is None:
        return "–"
    return cell(row["us"]) + (f" ({row['variant']})" if row.get("variant") else "")


def table(op: str, rows: dict[str, dict[str, dict]]) -> list[str]:
    others = [name for name in ("torch", "sglang", "vllm", "reference") if any(name in r for r in rows.values())]
    has_bar = any(next(iter(r.values()))["bar_us"] is not None for r in rows.values())
    has_peer = any(next(iter(r.values()))["best_peer_us"] is not None for r in rows.values())
    has_memory = any("peak_mib" in row for r in rows.values() for row in r.values())
    head = ["workload", "floor", "ours", "% of floor"]
    head += (["bar"] if has_bar else []) + (["best published peer"] if has_peer else [])
    head += [f"{name}, same run" for name in others] + (["peak MiB: ours, torch"] if has_memory else [])
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    order = {w.name: i for i, w in enumerate(workloads.DENSE + workloads.PLANS + workloads.TRAINING)}
    for name in sorted(rows, key=lambda name: (order.get(name, len(order)), name)):
        found = rows[name]
        any_row, ours = next(iter(found.values())), found.get("ours")
        cells = [name.removeprefix("extra-"), cell(any_row["floor_us"], 2)]
        cells += [f"**{cell(ours['us'])}**", f"{ours['pct_of_floor']:.0f}"] if ours else ["–", "–"]
        cells += [cell(any_row["bar_us"])] if has_bar else []
        if has_peer:
            peer = any_row["best_peer_us"]
            cells.append("–" if peer is None else f"{cell(peer)} ({any_row['best_peer']})")
        cells += [measured(found.get(other)) for other in others]
        if has_memory:
            peaks = [found.get(contender, {}).get("peak_mib") for contender in ("ours", "torch")]
            cells.append(", ".join(cell(peak, 0) for peak in peaks))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def caption(rows: dict[str, dict[str, dict]]) -> str:
    """Which runs the figures of a table come from."""
    runs = {}
    for found in rows.values():
        for row in found.values():
            run = row["run"]
            runs[run["date"], run["commit"]] = run
    parts, notes = [], []
    for (date, commit), run in sorted(runs.items()):
        notes += [run["note"]] if run.get("note") else []
        named = ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))
        parts.append(f"{date[:10]} at {commit} ({named})")
    return " ".join(["Measured " + "; ".join(parts) + ".", *dict.fromkeys(notes)])


def render(runs: list[dict]) -> str:
    if not runs:
        return EMPTY
    out = []
    for gpu, found in sorted(newest(runs).items()):
        out += [
            f"### {gpu}",
            "",
            f"Times are µs per call: {method_of(runs, gpu)}. The floor is what moving the bytes takes at 4.3 TB/s "
            "(or the arithmetic at 790 TFLOP/s): x and the active A and B read, the output read and written, once. "
            f"Published peers: {workloads.SOURCE}; their routing metadata is not in their times, as our plan is not in ours. "
            "`reference` is timed in eager mode.",
            "",
        ]
        for op, prefix, title in FAMILIES:
            rows = {name: row for (o, name), row in found.items() if o == op and name.startswith(prefix)}
            if rows:
                out += [f"**{title}**", "", *table(op, rows), "", caption(rows), ""]
    return "\n".join(out).strip()


def method_of(runs: list[dict], gpu: str) -> str:
    return next(run["method"] for run in reversed(runs) if run["gpu"] == gpu)


def replaced(text: str, tables: str) -> str:
    start, end = text.find(START), text.find(END)
    if start < 0 or end < start:
        raise ValueError(f"the README has no {START} … {END}")
    return text[: start + len(START)] + "\n" + tables + "\n" + text[end:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the README is stale")
    parser.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    options = parser.parse_args(arguments)
    try:
        old = options.readme.read_text(encoding="utf-8")
        new = replaced(old, render(results.committed(options.results)))
    except (OSError, ValueError) as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 1
    if old == new:
        print("README is up to date")
        return 0
    if options.check:
        print("bench.report: the README's tables are stale; run `python -m bench.report`", file=sys.stderr)
        return 1
    options.readme.write_text(new, encoding="utf-8")
    print(f"wrote {options.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
