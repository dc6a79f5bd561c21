"""The README's benchmark tables, made from result files: of each (GPU, op, workload, contender) the newest figure. Times are µs."""

from __future__ import annotations

from pathlib import Path

from . import runs as results

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
EMPTY = "No figures are committed yet; bench/NOTES.md says how they are measured."
PEERS = (
    "measured 2026-11-29 on an H200 by the same method, torch 2.11, Triton 3.6, sglang 0.5.23, vLLM's Triton kernels"
)
FAMILIES = (  # (op, what a workload's name starts with, title)
    (
        "delta",
        "wo_a-",
        "`delta_`, DeepSeek-V4 `wo_a`: x [T, 4, 4096], one A for all groups, N = 1024 per group",
    ),
    ("delta", "plain-", "`delta_`, one linear layer, 4096 → 4096"),
    ("delta", "extra-", "`delta_`, other shapes, mixes and dtypes"),
    ("shrink", "", "`shrink` alone"),
    ("expand", "", "`expand_` alone"),
    ("linear", "", "`linear`: base and delta in one kernel, beside the base alone"),
    ("expert_linear", "", "`expert_linear`: one projection of a layer of experts, beside PyTorch's base alone (sort, gather, `grouped_mm`, scatter)"),
    ("expert_mlp", "", "`expert_mlp`: a whole layer of experts, beside PyTorch's base alone (sort, gather, `grouped_mm`, scatter)"),
    ("plan", "", "`plan`, once per batch"),
    (
        "expert_delta",
        "",
        "`expert_delta`: per-expert A and B, top-8 of uniform routing, a plan of its own in every call",
    ),
    ("expert_delta", "skew-", "`expert_delta`, skewed routing beside uniform routing that moves as many bytes"),
    ("train", "", "Forward and backward"),
    ("expert_train", "", "Experts, forward and backward, base frozen: `expert_delta` and (mlp) `expert_mlp`, beside autograd over `grouped_mm`"),
)
CURVE_TITLES = (
    "`delta_` over token counts, no plan given: µs, and how many times the row above",
    "`delta_`, 64 slots of which 1 is active, ranks of 16 padded to 256, no adapter in the batch: µs, and how many times the batch without that",
)
TAX_RANKS = (16, 64)  # of the README's; the report draws all


def cell(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def measured(row: dict | None) -> str:
    if row is None:
        return "–"
    return cell(row["us"]) + (f" ({row['variant']})" if row.get("variant") else "")


def in_order(rows: dict[str, dict[str, dict]]) -> list[str]:
    return sorted(rows, key=lambda name: results.order(name, rows[name]))


def columns_and_lines(rows: dict[str, dict[str, dict]]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of {workload: {contender: row}}; ours stands out in bold."""

    def any_has(key: str) -> bool:
        return any(row.get(key) is not None for found in rows.values() for row in found.values())

    has_bar, has_peer, has_memory, has_base, has_apart, has_library, has_parent = (
        any_has(key)
        for key in ("bar_us", "best_peer_us", "peak_mib", "base_us", "apart_us", "torch_lora_us", "parent_us")
    )
    others = [
        name for name in ("torch", "sglang", "vllm", "reference") if any(name in found for found in rows.values())
    ]
    if has_base:
        others = [name for name in others if name != "torch"]  # torch's row is the base alone
    head = ["workload", "floor", "ours", "% of floor"]
    head += (["bar"] if has_bar else []) + (["best published peer"] if has_peer else [])
    head += ["base alone", "× base"] if has_base else []
    has_twin = any_has("twin_us")
    head += ["uniform, same bytes", "× that"] if has_twin else []
    beside = [("apart_us", "base, then `delta_`", has_apart), ("torch_lora_us", "torch's base and LoRA", has_library)]
    beside = [(key, title) for key, title, there in [*beside, ("parent_us", "ours without LoRA", has_parent)] if there]
    head += [title for _, title in beside]
    head += [f"{name}, same run" for name in others]
    has_times, has_forward = any_has("times_torch"), any_has("forward_us")
    has_eager = has_forward and any_has("eager_us")
    head += (["torch / ours"] if has_times else []) + (["forward: ours, torch"] if has_forward else [])
    head += ["without a graph: ours, torch"] if has_eager else []
    head += ["peak MiB: ours, torch"] if has_memory else []
    lines = []
    for name in in_order(rows):
        found = rows[name]
        any_row, ours = next(iter(found.values())), found.get("ours")
        cells = [name.removeprefix("extra-"), cell(any_row.get("floor_us"), 2)]
        cells += [f"**{cell(ours['us'])}**", cell(ours.get("pct_of_floor"), 0)] if ours else ["–", "–"]
        cells += [cell(any_row.get("bar_us"))] if has_bar else []
        if has_peer:
            peer = any_row.get("best_peer_us")
            cells.append("–" if peer is None else f"{cell(peer)} ({any_row['best_peer']})")
        if has_base:
            base = (ours or {}).get("base_us")
            cells += [cell(base), cell(ours["us"] / base if base else None, 2)]
        if has_twin:
            cells += [cell((ours or {}).get("twin_us")), cell((ours or {}).get("times_twin"), 2)]
        cells += [cell((ours or {}).get(key)) for key, _ in beside]
        cells += [measured(found.get(other)) for other in others]
        both = [found.get(contender, {}) for contender in ("ours", "torch")]
        if has_times:
            cells.append(cell(1 / ours["times_torch"] if ours and ours.get("times_torch") else None, 2))
        if has_forward:
            cells.append(", ".join(cell(row.get("forward_us")) for row in both))
        if has_eager:
            cells.append(", ".join(cell(row.get("eager_us")) for row in both))
        if has_memory:
            cells.append(", ".join(cell(row.get("peak_mib"), 0) for row in both))
        lines.append(cells)
    return head, lines


def markdown(head: list[str], lines: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(cells) + " |" for cells in lines),
    ]


def table(rows: dict[str, dict[str, dict]]) -> list[str]:
    return markdown(*columns_and_lines(rows))


def tax_pct(row: dict, us: str = "us") -> float | None:
    """What LoRA adds to the base's time, in per cent: 100 · (us / base_us − 1)."""
    base, took = row.get("base_us"), row.get(us)
    return None if not base or took is None else 100 * (took / base - 1)


def tax_columns_and_lines(rows: dict[str, dict[str, dict]], ranks: tuple[int, ...] | None = None):
    """Per cent over the base, `linear` and, behind it, the base followed by `delta_`: a line per layer, T and rank."""
    cells: dict[tuple, dict[int, str]] = {}
    for name in in_order(rows):
        row = rows[name].get("ours")
        if row is None or tax_pct(row) is None or (ranks and row["rank"] not in ranks):
            continue
        parts = [tax_pct(row), tax_pct(row, "apart_us")]
        text = " / ".join("–" if part is None else f"{part:+.0f}" for part in parts)
        cells.setdefault((results.family(row), row["T"], row["rank"], row["base_us"]), {})[row["active"]] = text
    merged: dict[tuple, tuple[list[float], dict[int, str]]] = {}
    for (layer, tokens, rank, base), found in cells.items():
        bases, texts = merged.setdefault((layer, tokens, rank), ([], {}))
        bases.append(base)
        texts.update(found)
    actives = sorted({active for _, texts in merged.values() for active in texts})
    head = ["layer", "T", "rank", "base, µs", *(f"{n} adapter{'' if n == 1 else 's'}" for n in actives)]
    lines = [
        [layer, str(tokens), str(rank), cell(sorted(bases)[len(bases) // 2]), *(texts.get(n, "–") for n in actives)]
        for (layer, tokens, rank), (bases, texts) in sorted(merged.items())
    ]
    return head, lines


def curve_tables(rows: dict[str, dict[str, dict]]) -> list[tuple[list[str], list[list[str]]]]:
    """Two, each with a line a token count: of every layer, rank and slot count µs and how many times the line above it is; of idle
    slots, padded ranks and idle batches µs and how many times the row beside it."""
    found: tuple[dict, dict] = {}, {}
    for name in in_order(rows):
        row = rows[name].get("ours")
        if row is None:
            continue
        layer, about = results.kind(row)
        slots = f"{row['slots']} slot{'' if row['slots'] == 1 else 's'}"
        column = f"{layer}, {about}" if about else f"{layer} r {row['rank']}, {slots}"
        times = row.get("times_beside" if about else "jump")
        text = cell(row["us"]) + ("" if times is None else f" ({times:.2f})")
        found[bool(about)].setdefault(column, {})[row["T"]] = text
    made = []
    for columns in found:
        counts = sorted({count for column in columns.values() for count in column})
        lines = [[str(count), *(column.get(count, "–") for column in columns.values())] for count in counts]
        made.append((["T", *columns], lines))
    return made


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
        parts.append(f"{date[:10]} at {commit[:7]} ({named})")
    return " ".join(["Measured " + "; ".join(parts) + ".", *dict.fromkeys(notes)])


def method_of(runs: list[dict], gpu: str) -> str:
    return next(run["method"] for run in reversed(runs) if run["gpu"] == gpu)


def explanation(runs: list[dict], gpu: str) -> str:
    return (
        f"Times are µs per call: {method_of(runs, gpu)}. The floor is what moving the bytes takes at 4.3 TB/s "
        "(or the arithmetic at 790 TFLOP/s): x and the active A and B read, the output read and written, once. "
        f"Published peers: {PEERS}; their routing metadata is not in their times, as our plan is not in ours. "
        "`reference` is timed in eager mode."
    )


def render(runs: list[dict]) -> str:
    """The README's part, in Markdown. Runs at tiny sizes are no figures."""
    runs = [run for run in runs if not run["tiny"]]
    if not runs:
        return EMPTY
    out = []
    for gpu, found in sorted(results.newest(runs).items()):
        out += [f"### {gpu}", "", explanation(runs, gpu), ""]
        for op, prefix, title in FAMILIES:
            elsewhere = tuple(other for o, other, _ in FAMILIES if o == op and other and not prefix)
            here = {name: row for (o, name), row in found.items() if o == op and name.startswith(prefix)}
            rows = {name: row for name, row in here.items() if not name.startswith(elsewhere)}
            if rows:
                out += [f"**{title}**", "", *table(rows), "", caption(rows), ""]
        rows = {name: row for (o, name), row in found.items() if o == "tax"}
        head, lines = tax_columns_and_lines(rows, TAX_RANKS)
        if lines:
            title = "What LoRA adds to the base layer, per cent: `linear` / base, then `delta_`; by adapters that occur in the batch"
            out += [f"**{title}**", "", *markdown(head, lines), "", caption(rows), ""]
        rows = {name: row for (o, name), row in found.items() if o == "curve"}
        for title, (head, lines) in zip(CURVE_TITLES, curve_tables(rows)):
            if lines:
                out += [f"**{title}**", "", *markdown(head, lines), "", caption(rows), ""]
    return "\n".join(out).strip()


def replaced(text: str, tables: str) -> str:
    start, end = text.find(START), text.find(END)
    if start < 0 or end < start:
        raise ValueError(f"the README has no {START} … {END}.")
    return text[: start + len(START)] + "\n" + tables + "\n" + text[end:]


def write(readme: Path, runs: list[dict], check: bool = False) -> bool:
    """Put the tables into a README; returns whether it already showed them. check: write nothing."""
    old = readme.read_text(encoding="utf-8")
    new = replaced(old, render(runs))
    if new != old and not check:
        readme.write_text(new, encoding="utf-8")
    return new == old
