"""The report's pictures, drawn with matplotlib: each a figure, a title and a sentence that says what to look for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from . import runs as results
from .compare import Comparison
from .drawing import (
    BAR,
    BASE,
    BESIDE,
    BLUE,
    CONTENDERS,
    FLOOR,
    GREEN,
    GRID,
    INK,
    MUTED,
    OF_LAYERS,
    ORANGE,
    PEER,
    RED,
    SKY,
    STEPS,
    STYLE,
    TORCH_LORA,
    Figure,
    Line2D,
    Picture,
    grid_of_panels,
    handle,
    legend,
    log_values,
    look_of,
    matplotlib,
    over_tokens,
    per_cent,
    plain,
    slug,
    ticker,
)
from .tables import tax_pct


def series(found: dict[tuple, dict], op: str | None = None) -> dict[tuple, dict[tuple, list[dict]]]:
    """{(op, family): {(rank, slots): [{contender: row}, …] by T}}."""
    out: dict[tuple, dict[tuple, list[dict]]] = {}
    for (one, _), by_contender in found.items():
        row = next(iter(by_contender.values()))
        if row.get("T") is None or (op is not None and one != op):
            continue
        key = (one, results.family(row))
        out.setdefault(key, {}).setdefault((row.get("rank"), row.get("slots")), []).append(by_contender)
    for lines in out.values():
        for points in lines.values():
            points.sort(key=lambda p: next(iter(p.values()))["T"])
    return out


SPOKEN = {"curve": "delta_ without a plan", "tax": "linear"}  # ops of rows that are no op's name


def curves(found: dict[tuple, dict]) -> Iterator[tuple[str, str, dict[tuple, list[dict]]]]:
    """(op, family, series of at least three T) of what is timed over T; the tax and the CPU's time have pictures of their own."""
    for (op, family), lines in sorted(series(found).items()):
        long = {key: points for key, points in lines.items() if len({next(iter(p.values()))["T"] for p in points}) >= 3}
        if long and op not in ("tax", "host"):
            yield op, family, long


def about(op: str, family: str, lines: dict) -> str:
    row, op = next(iter(next(iter(lines.values()))[0].values())), SPOKEN.get(op, op)
    n = row.get("N")
    sizes = f"{row['D']} → {' + '.join(map(str, n)) if isinstance(n, list) else n}" if "D" in row and n else ""
    groups = f"{row['G']} groups of " if (row.get("G") or 1) > 1 and not isinstance(n, list) else ""
    return f"{op}, {family}" + (f" ({groups}{sizes}{results.dtype_note(row)})" if sizes else "")


def values(points: list[dict], read: Callable[[dict], float | None]) -> tuple[list[int], list[float]]:
    pairs = [(next(iter(p.values()))["T"], read(p)) for p in points]
    kept = [(t, v) for t, v in pairs if v is not None and v > 0]
    return [t for t, _ in kept], [v for _, v in kept]


def panel_title(rank, slots) -> str:
    return ", ".join([*([f"rank {rank}"] if rank else []), f"{slots} slot{'' if slots == 1 else 's'}"])


# --- latency and roofline ---


def latency(found: dict[tuple, dict]) -> Iterator[Picture]:
    """A picture for each family of several ranks and slots, one for the others of an op."""
    others: dict[str, dict[tuple, list[dict]]] = {}
    for op, family, lines in curves(found):
        if len(lines) <= 2:
            others.setdefault(op, {}).update({(family, *key): points for key, points in lines.items()})
            continue
        ranks = sorted({rank for rank, _ in lines}, key=lambda r: r or 0)
        slots = sorted({count for _, count in lines}, key=lambda s: s or 0)
        places = {key: (ranks.index(key[0]), slots.index(key[1])) for key in lines}
        titles = {key: panel_title(*key) for key in lines}
        yield _latency(f"latency-{slug(op)}-{slug(family)}", about(op, family, lines), lines, places, titles)
    for op, lines in others.items():
        columns = min(4, len(lines))
        places = {key: divmod(n, columns) for n, key in enumerate(lines)}
        titles = {}
        for key, points in lines.items():
            layer, kind = results.kind(next(iter(points[0].values())))
            titles[key] = f"{layer}, {kind or panel_title(None if op == 'plan' else key[1], key[2])}"
        yield _latency(f"latency-{slug(op)}-other", f"{SPOKEN.get(op, op)}, one panel a shape", lines, places, titles)


def beside_us(row: dict) -> float | None:
    return row["us"] / row["times_beside"] if row.get("times_beside") else None


LINES = (  # what stands beside the contenders: label, look, what a row has of it
    ("best published peer", PEER, lambda row: row.get("best_peer_us")),
    ("floor", FLOOR, lambda row: row.get("floor_us")),
    ("the project's bar", BAR, lambda row: row.get("bar_us")),
    ("torch, the base alone", BASE, lambda row: row.get("base_us")),
    ("torch, with LoRA", TORCH_LORA, lambda row: row.get("torch_lora_us")),
    ("the batch without that", BESIDE, beside_us),
    ("uniform routing, same bytes", BESIDE, lambda row: row.get("twin_us")),
)


def _latency(name: str, title: str, lines: dict, places: dict, titles: dict) -> Picture:
    """lines, places (row, column) and titles of the panels, each by the panel's key."""
    figure, axes = grid_of_panels(*(1 + max(place[i] for place in places.values()) for i in (0, 1)))
    every = [r for points in lines.values() for p in points for r in p.values()]
    contenders = [name for name in CONTENDERS if any(r["contender"] == name for r in every)]
    others = [(label, look, read) for label, look, read in LINES if label == "floor" or any(read(r) for r in every)]
    taken = {place: key for key, place in places.items()}
    for i, row in enumerate(axes):
        for j, axis in enumerate(row):
            if (i, j) not in taken:
                axis.set_visible(False)
                continue
            points = lines[taken[i, j]]
            for _, look, read in others:
                axis.plot(*values(points, lambda p, read=read: read(next(iter(p.values())))), **look)
            for contender in reversed(contenders):
                drawn = values(points, lambda p, contender=contender: p[contender]["us"] if contender in p else None)
                axis.plot(*drawn, **look_of(contender))
            axis.set_title(titles[taken[i, j]])
            over_tokens(axis, [r["T"] for r in every])
            log_values(axis)
            if j == 0:
                axis.set_ylabel("µs per call")
            if not any((later, j) in taken for later in range(i + 1, len(axes))):
                axis.set_xlabel("T, tokens")
                axis.tick_params(labelbottom=True)
    looks = {contender: look_of(contender) for contender in contenders} | {label: look for label, look, _ in others}
    legend(figure, [Line2D([], [], label=label, **look) for label, look in looks.items()])
    text = "Lower is better; both axes are logarithmic. The floor is what moving the bytes (or the arithmetic) takes."
    return Picture(name, "Latency", title, text, figure)


def roofline(found: dict[tuple, dict]) -> Iterator[Picture]:
    """A picture for each op, a panel for each family and rank."""
    by_op: dict[str, dict[tuple, dict]] = {}
    titles: dict[str, str] = {}
    for op, family, lines in curves(found):
        titles[family] = ", ".join(filter(None, results.kind(next(iter(next(iter(lines.values()))[0].values())))))
        for (rank, slots), points in lines.items():
            x, y = values(points, lambda p: (p.get("ours") or {}).get("pct_of_floor"))
            if len(x) >= 3:
                by_op.setdefault(op, {}).setdefault((family, rank), {})[slots] = x, y
    for op, panels in by_op.items():
        columns = min(4, len(panels))
        figure, axes = grid_of_panels(-(-len(panels) // columns), columns, width=2.7, height=2.0)
        slots = sorted({count for lines in panels.values() for count in lines}, key=lambda s: s or 0)
        every = [t for lines in panels.values() for x, _ in lines.values() for t in x]
        for n, axis in enumerate(axes.flat):
            if n >= len(panels):
                axis.set_visible(False)
                continue
            (family, rank), lines = sorted(panels.items(), key=lambda item: (item[0][0], item[0][1] or 0))[n]
            for count, (x, y) in sorted(lines.items()):
                colour, marker = STEPS[slots.index(count) % len(STEPS)]
                axis.plot(x, y, color=colour, marker=marker)
            over_tokens(axis, every)
            axis.set_ylim(0, 100)
            axis.yaxis.set_major_locator(ticker.MultipleLocator(20))
            axis.set_title(titles[family] + (f", rank {rank}" if rank and op != "plan" and titles[family] == family else ""))
            if n + columns >= len(panels):
                axis.set_xlabel("T, tokens")
                axis.tick_params(labelbottom=True)
            if n % columns == 0:
                axis.set_ylabel("% of the roofline")
        legend(figure, [handle(panel_title(None, count), *STEPS[i % len(STEPS)]) for i, count in enumerate(slots)])
        text = "Floor over measured time: 100 % is all that memory (or the matrix units) can do. A launch costs some µs, so few tokens stay low."
        yield Picture(f"roofline-{slug(op)}", "Roofline", f"{SPOKEN.get(op, op)}: per cent of the roofline", text, figure)


# --- the tax ---


def taxed(found: dict[tuple, dict]) -> dict[str, list[dict]]:
    """{layer: rows of ours with a base's time}; `tax` rows where there are some, else those of `linear`."""
    out: dict[str, dict[str, list[dict]]] = {}
    for (op, _), by_contender in found.items():
        row = by_contender.get("ours")
        if op in ("tax", "linear") and row is not None and tax_pct(row) is not None:
            out.setdefault(op, {}).setdefault(results.family(row), []).append(row)
    return out.get("tax") or next(iter(out.values()), {})


def tax(found: dict[tuple, dict]) -> Iterator[Picture]:
    for layer, rows in sorted(taxed(found).items()):
        counts = sorted({row["T"] for row in rows})
        actives = sorted({row["active"] for row in rows})
        two_ways = any(tax_pct(row, "apart_us") is not None for row in rows)
        columns = min(3, len(counts))
        lines = -(-len(counts) // columns)
        figure, axes = grid_of_panels(lines, columns)
        for n, axis in enumerate(axes.flat):
            if n >= len(counts):
                axis.set_visible(False)
                continue
            here = [row for row in rows if row["T"] == counts[n]]
            for i, active in enumerate(actives):
                points = sorted((row for row in here if row["active"] == active), key=lambda row: row["rank"])
                colour, marker = STEPS[i % len(STEPS)]
                for us, dash in (("us", "-"), ("apart_us", "--")):
                    drawn = [(row["rank"], tax_pct(row, us)) for row in points if tax_pct(row, us) is not None]
                    axis.plot(
                        *zip(*drawn) if drawn else ([], []),
                        color=colour,
                        marker=marker,
                        linestyle=dash,
                        linewidth=1.6 if dash == "-" else 1.1,
                    )
            axis.axhline(0, color=INK, linewidth=0.9)
            over_tokens(axis, [row["rank"] for row in rows])
            per_cent(axis)
            base = statistics.median(row["base_us"] for row in here)
            axis.set_title(
                f"T = {counts[n]}, base {base:.1f} µs" if base < 100 else f"T = {counts[n]}, base {base:.0f} µs"
            )
            axis.tick_params(labelbottom=True)
            if n + columns >= len(counts):
                axis.set_xlabel("rank")
            if n % columns == 0:
                axis.set_ylabel("over the base")
        handles = [
            handle("no adapter" if not a else f"{a} adapter{'s' if a > 1 else ''}", *STEPS[i % len(STEPS)])
            for i, a in enumerate(actives)
        ]
        if two_ways:
            handles += [handle("linear (one kernel)", MUTED), handle("base, then delta_", MUTED, "", "--", 1.1)]
        legend(figure, handles)
        text = (
            "Time over that of PyTorch's base product alone, in per cent, by the adapters that occur in the batch; logarithmic beyond "
            "10 %. Below 0, linear is faster than the library product."
        )
        yield Picture(f"tax-{slug(layer)}", "LoRA's tax", f"What LoRA adds to {layer}", text, figure)


def idle(found: dict[tuple, dict]) -> Iterator[Picture]:
    """What a batch without adapters pays."""
    layers = {layer: [row for row in rows if row["active"] == 0] for layer, rows in sorted(taxed(found).items())}
    layers = {layer: rows for layer, rows in layers.items() if rows}
    alone: dict[str, dict[str, list[dict]]] = {}
    for (op, _), p in found.items():
        if op in ("delta", "curve") and "ours" in p and p["ours"].get("active") == 0:
            alone.setdefault(op, {}).setdefault(results.kind(p["ours"])[0], []).append(p["ours"])
    alone = alone.get("curve") or alone.get("delta") or {}
    panels = [*layers, *(["delta_ alone"] if alone else [])]
    if not panels:
        return
    figure, axes = grid_of_panels(1, len(panels), width=3.3, height=2.5, sharey=False, sharex=False)
    ways = (("us", BLUE, "o", "-"), ("apart_us", ORANGE, "D", "--"))
    for axis, layer in zip(axes[0], layers):
        rows = layers[layer]
        counts = sorted({row["T"] for row in rows})
        for us, colour, marker, dash in ways:
            spread = [[row[us] - row["base_us"] for row in rows if row["T"] == t and us in row] for t in counts]
            if all(spread):
                axis.plot(counts, [statistics.median(s) for s in spread], color=colour, marker=marker, linestyle=dash)
                axis.fill_between(
                    counts, [min(s) for s in spread], [max(s) for s in spread], color=colour, alpha=0.18, linewidth=0
                )
        axis.axhline(0, color=INK, linewidth=0.9)
        over_tokens(axis, counts)
        axis.set_title(layer)
    if alone:
        axis = axes[0][-1]
        for layer, (colour, marker) in zip(sorted(alone), OF_LAYERS):
            rows = sorted(alone[layer], key=lambda row: row["T"])
            axis.plot([row["T"] for row in rows], [row["us"] for row in rows], color=colour, marker=marker)
        over_tokens(axis, [row["T"] for rows in alone.values() for row in rows])
        axis.set_ylim(bottom=0)
        axis.set_title("delta_ alone")
        axis.set_ylabel("µs")
    for axis in axes[0]:
        axis.set_xlabel("T, tokens")
    if layers:
        axes[0][0].set_ylabel("µs over the base")
    handles = [handle("linear", BLUE, "o"), handle("base, then delta_", ORANGE, "D", "--")] if layers else []
    legend(figure, handles + [handle(f"delta_, {layer}", *look) for layer, look in zip(sorted(alone), OF_LAYERS)])
    text = "A batch in which no token has an adapter (all ids −1). Lines are the median over ranks, bands the least and the most."
    yield Picture("idle", "Idle cost", "What idle adapters cost", text, figure)


# --- host and memory ---


def host(found: dict[tuple, dict]) -> Iterator[Picture]:
    by_op: dict[str, list[dict]] = {}
    for (op, _), by_contender in found.items():
        row = by_contender.get("ours")
        if row is not None and "host_us" in row:
            by_op.setdefault(op, []).append(row)
    if by_op:
        names = sorted(by_op, reverse=True)
        figure = Figure(figsize=(7.2, 0.42 * len(names) + 1.3), layout="constrained", dpi=130)
        axis = figure.subplots()
        for y, op in enumerate(names):
            rows = by_op[op]
            axis.plot(
                [row["host_median_us"] for row in rows], [y] * len(rows), "o", color=BLUE, alpha=0.45, markeredgewidth=0
            )
            axis.plot([row["host_us"] for row in rows], [y] * len(rows), "|", color=ORANGE, markersize=11, alpha=0.8)
            middle = statistics.median(row["host_median_us"] for row in rows)
            axis.annotate(f"{middle:.0f} µs", (middle, y), (0, 8), textcoords="offset points", ha="center", fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(-0.6, len(names) - 0.3)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(10, (1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(plain))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.set_xlabel("µs of the CPU per eager call (inference mode)")
        legend(
            figure, [handle("median of a workload's calls", BLUE, "o", ""), handle("its fastest call", ORANGE, "|", "")]
        )
        text = "The CPU's part of one eager call until it returns: a point a workload. The number is the median of the medians."
        yield Picture("host", "Host cost", "What a call costs the CPU", text, figure)
    for (op, workload), by_contender in sorted(found.items()):
        pieces = (by_contender.get("ours") or {}).get("pieces")
        if op == "host" and pieces:
            names = list(pieces)[::-1]
            figure = Figure(figsize=(7.2, 0.27 * len(names) + 0.9), layout="constrained", dpi=130)
            axis = figure.subplots()
            axis.barh(
                range(len(names)),
                [pieces[n] for n in names],
                color=[SKY if n.startswith("…") else BLUE for n in names],
                height=0.66,
            )
            for y, name in enumerate(names):
                axis.annotate(
                    f"{pieces[name]:.1f}",
                    (pieces[name], y),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axis.set_yticks(range(len(names)), names)
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.1)
            axis.set_xlabel("µs")
            text = "Dark: whole calls. Light: parts of the one above."
            yield Picture(f"host-{slug(workload)}", "Host cost", f"Piece by piece: {workload}", text, figure)


def memory(found: dict[tuple, dict]) -> Iterator[Picture]:
    """Of a forward call: a panel for each op and family, a line for each rank, the most of any slots and adapters."""
    panels: dict[str, dict[int, dict[int, float]]] = {}
    for (op, _), by_contender in sorted(found.items()):
        row = by_contender.get("ours")
        if op in ("tax", "expert_linear", "expert_mlp") and row is not None and row.get("peak_mib"):
            title = f"{SPOKEN.get(op, op)}, {results.family(row)}"
            held = panels.setdefault(title, {}).setdefault(row["rank"], {})
            held[row["T"]] = max(row["peak_mib"], held.get(row["T"], 0))
    if not panels:
        return
    columns = min(4, len(panels))
    figure, axes = grid_of_panels(-(-len(panels) // columns), columns, width=2.7, height=2.0)
    ranks = sorted({rank for lines in panels.values() for rank in lines})
    for n, axis in enumerate(axes.flat):
        if n >= len(panels):
            axis.set_visible(False)
            continue
        title, lines = list(panels.items())[n]
        for rank, held in sorted(lines.items()):
            colour, marker = STEPS[ranks.index(rank) % len(STEPS)]
            axis.plot(*zip(*sorted(held.items())), color=colour, marker=marker)
        axis.set_title(title)
        over_tokens(axis, [t for lines in panels.values() for held in lines.values() for t in held])
        log_values(axis)
        if n + columns >= len(panels):
            axis.set_xlabel("T, tokens")
            axis.tick_params(labelbottom=True)
        if n % columns == 0:
            axis.set_ylabel("MiB")
    legend(figure, [handle(f"rank {rank}", *STEPS[i % len(STEPS)]) for i, rank in enumerate(ranks)])
    text = "What an eager forward call allocates at its worst moment, its result included, beyond its inputs. Both axes are logarithmic."
    yield Picture("memory-forward", "Memory", "Memory of a forward call", text, figure)


def bars(rows: dict[str, dict[str, dict]], key: str, label: str) -> Figure:
    """A number of every workload, a bar a contender."""
    names = sorted(rows, key=lambda name: results.order(name, rows[name]), reverse=True)
    figure = Figure(figsize=(7.4, 0.46 * len(names) + 1.2), layout="constrained", dpi=130)
    axis = figure.subplots()
    contenders = [name for name in ("ours", "torch") if any(key in p.get(name, {}) for p in rows.values())]
    height = 0.8 / len(contenders)
    for n, contender in enumerate(contenders):
        for y, name in enumerate(names):
            value = rows[name].get(contender, {}).get(key)
            if value is not None:
                place = y + 0.4 - height * (n + 0.5)
                axis.barh(place, value, height=height * 0.92, color=CONTENDERS[contender][0])
                at = dict(xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
                axis.annotate(f"{value:,.0f}", (value, place), **at)
    axis.set_yticks(range(len(names)), [name.removeprefix("extra-") for name in names])
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.12)
    axis.set_xlabel(label)
    legend(figure, [handle(name, CONTENDERS[name][0], "", "-", 6) for name in contenders])
    return figure


def training(found: dict[tuple, dict]) -> Iterator[Picture]:
    """Time and memory of forward and backward."""
    steps = {name: p for (op, name), p in found.items() if op in ("train", "expert_train") and "ours" in p}
    if steps:
        text = "Forward and backward in one graph. torch: autograd over the best of its own ways."
        figure = bars(steps, "us", "µs of a step; lower is better")
        yield Picture("training", "Training", "Time of a training step", text, figure)
    held = {name: p for name, p in steps.items() if "peak_mib" in p["ours"]}
    if held:
        text = "Forward and backward: what a step allocates at its worst moment beyond its inputs."
        figure = bars(held, "peak_mib", "MiB at the peak of one eager step, beyond its inputs")
        yield Picture("memory", "Memory", "Memory of a training step", text, figure)


# --- against earlier figures ---

MOST_CHANGES = 40


def changes(comparison: Comparison) -> Iterator[Picture]:
    ordered = sorted(comparison.changes, key=lambda c: -abs(c.ratio - 1) / c.noise)[:MOST_CHANGES]
    ordered.sort(key=lambda c: c.ratio)
    figure = Figure(figsize=(7.6, 0.2 * len(ordered) + 1.3), layout="constrained", dpi=130)
    axis = figure.subplots()
    looks = {"regression": (RED, "^"), "improvement": (GREEN, "v"), "same": (MUTED, "o")}
    for y, change in enumerate(ordered):
        colour, marker = looks[change.verdict]
        percent, band = 100 * (change.ratio - 1), 100 * change.noise
        axis.plot(
            [-100 * change.noise / (1 + change.noise), band], [y, y], color=GRID, linewidth=5, solid_capstyle="butt"
        )
        axis.plot([percent], [y], color=colour, marker=marker, markersize=6)
    axis.axvline(0, color=INK, linewidth=0.9)
    suffix = {"us": "", "peak_mib": ", memory"}
    axis.set_yticks(range(len(ordered)), [f"{c.op} {c.workload}{suffix[c.quantity]}" for c in ordered], fontsize=7)
    axis.set_ylim(-0.7, len(ordered) - 0.3)
    axis.grid(axis="y", visible=False)
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:+.0f} %" if v else "0"))
    axis.set_xlabel("change of the time (or memory), negative is better")
    legend(
        figure,
        [handle(name, *look, dash="") for name, look in looks.items()] + [handle("noise band", GRID, "", "-", 5)],
    )
    more = (
        f" The {MOST_CHANGES} that stand out most of {len(comparison.changes)}."
        if len(comparison.changes) > MOST_CHANGES
        else ""
    )
    text = "Against the earlier files; a mark outside its band is a change." + more
    yield Picture("changes", "Against earlier figures", "What became slower or faster", text, figure)


SECTIONS = (latency, roofline, tax, idle, host, training, memory)


def draw(found: dict[tuple, dict]) -> list[Picture]:
    """Every picture that one GPU's figures allow."""
    with matplotlib.rc_context(STYLE):
        return [picture for section in SECTIONS for picture in section(found)]


def draw_changes(comparison: Comparison) -> list[Picture]:
    with matplotlib.rc_context(STYLE):
        return list(changes(comparison))
