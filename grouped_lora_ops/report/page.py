"""The report as one HTML page that loads nothing: pictures as SVG, tables folded away, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from . import runs as results
from .compare import Comparison
from .drawing import THEME, Picture
from .tables import CURVE_TITLES, columns_and_lines, curve_tables, explanation, tax_columns_and_lines

LIGHT = "".join(f"{variable}:{colour};" for colour, (variable, _) in THEME.items())
DARK = "".join(f"{variable}:{colour};" for variable, colour in THEME.values())
CSS = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
body {{ background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, 'DejaVu Sans', sans-serif; }}
body {{ margin: 0 auto; max-width: 84rem; padding: 1.5rem; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .3rem; }} h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--grid); }}
h3 {{ font-size: 1rem; margin: 1.4rem 0 .3rem; }} p, figcaption {{ max-width: 75ch; }} figcaption, .quiet {{ color: var(--muted); }}
nav a {{ margin-right: 1rem; }} a {{ color: var(--blue); }} figure {{ margin: 0 0 1.2rem; }} svg {{ width: 100%; height: auto; display: block; }}
svg text {{ font-family: system-ui, 'DejaVu Sans', sans-serif; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; margin: .5rem 0 1rem; }}
th, td {{ padding: .15rem .7rem .15rem 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }} summary {{ cursor: pointer; color: var(--blue); }}
.numbers {{ display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1rem 0; }} .numbers b {{ font-size: 1.35rem; display: block; }}
.worse {{ color: var(--red); }} .better {{ color: var(--green); }}
"""


def escaped(text: str) -> str:
    """Text for HTML; `code` and **bold** as Markdown has them."""
    out = html.escape(str(text))
    for mark, tag in (("**", "b"), ("`", "code")):
        parts = out.split(mark)
        if len(parts) % 2:
            out = "".join(part if i % 2 == 0 else f"<{tag}>{part}</{tag}>" for i, part in enumerate(parts))
    return out


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    top = "".join(f"<th>{escaped(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in line) + "</tr>\n" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def folded(title: str, content: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{content}</details>\n"


def figure(picture: Picture) -> str:
    return f"<figure><h3>{escaped(picture.title)}</h3>\n{picture.svg()}\n<figcaption>{escaped(picture.text)}</figcaption></figure>\n"


def numbers(found: dict[tuple, dict]) -> str:
    """What a reader wants first: how many figures, how near the floor, how often behind."""
    ours = [p["ours"] for (op, _), p in found.items() if "ours" in p and op != "host"]
    long = [row["pct_of_floor"] for row in ours if (row.get("T") or 0) >= 1024 and row.get("pct_of_floor")]
    peers = [row for row in ours if row.get("best_peer_us")]
    slower = sum(row["us"] > row["best_peer_us"] for row in peers)
    bars = [row for row in ours if row.get("bar_us")]
    above = sum(row["us"] > row["bar_us"] for row in bars)
    shown = [(str(len(ours)), "figures of ours")]
    if long:
        mean = math.exp(sum(map(math.log, long)) / len(long))
        shown.append((f"{mean:.0f} %", "of the roofline at T ≥ 1024 (geometric mean)"))
    if peers:
        shown.append((f"{slower} of {len(peers)}", "slower than the best published peer"))
    if bars:
        shown.append((f"{above} of {len(bars)}", "above the project's bar"))
    return (
        '<div class="numbers">'
        + "".join(f"<div><b>{value}</b>{escaped(text)}</div>" for value, text in shown)
        + "</div>\n"
    )


def provenance(runs: list[dict]) -> str:
    lines = [
        [
            run["date"],
            run["gpu"],
            run.get("suite", "–"),
            run["commit"],
            ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items())),
            str(len(run["rows"])),
        ]
        for run in runs
    ]
    notes = "".join(f"<p>{escaped(note)}</p>" for note in dict.fromkeys(run["note"] for run in runs if run.get("note")))
    return table(["date", "GPU", "suite", "commit", "versions", "rows"], lines) + notes


def tables_of(found: dict[tuple, dict]) -> str:
    out = []
    for op in sorted({op for op, _ in found}):
        rows = {name: p for (one, name), p in found.items() if one == op}
        if op == "tax":
            head, lines = tax_columns_and_lines(rows)
            out.append(
                folded(
                    f"{op}: per cent over the base, linear / base then delta_ ({len(lines)} lines)", table(head, lines)
                )
            )
        if op == "curve":
            titled = zip(CURVE_TITLES, curve_tables(rows))
            out += [folded(title, table(head, lines)) for title, (head, lines) in titled if lines]
        head, lines = columns_and_lines(rows)
        out.append(folded(f"{op} ({len(lines)} workloads)", table(head, lines)))
    return "".join(out)


WORST = 20  # regressions that are not folded away


def comparison_part(comparison: Comparison, pictures: list[Picture]) -> str:
    worse, better = comparison.regressions, comparison.improvements
    head = ["op, workload", "old, µs", "new, µs", "change", "noise"]

    def lines(changes):
        for c in changes:
            unit = "" if c.quantity == "us" else " MiB"
            band = f"{100 * c.noise:.1f} %{', default' if c.stated else ''}"
            yield [
                f"{c.op} {c.workload}",
                f"{c.old:.2f}{unit}",
                f"{c.new:.2f}{unit}",
                f"{100 * (c.ratio - 1):+.1f} %",
                band,
            ]

    parts = [
        f'<p><b class="worse">{len(worse)}</b> slower, <b class="better">{len(better)}</b> faster, beyond the noise.</p>'
    ]
    parts += list(map(figure, pictures))
    parts += [table(head, lines(worse[:WORST]))] if worse else []
    parts += (
        [folded(f"{len(worse) - WORST} more that became slower", table(head, lines(worse[WORST:])))]
        if worse[WORST:]
        else []
    )
    parts += [folded("what became faster", table(head, lines(better)))] if better else []
    parts += (
        [folded("rows that are gone", "<p>" + escaped(", ".join(comparison.gone)) + "</p>")] if comparison.gone else []
    )
    return "".join(parts)


def page(
    runs: list[dict], pictures: dict[str, list[Picture]], comparison: Comparison | None, changes: list[Picture]
) -> str:
    """The whole document. pictures: those of every GPU."""
    found = results.newest(runs)
    tiny = any(run["tiny"] for run in runs)
    body = ["<h1>grouped_lora_ops: benchmark report</h1>\n"]
    if tiny:
        body.append(
            '<p class="worse">Runs at tiny sizes are among these: they test the scripts and are no figures.</p>\n'
        )
    contents = []
    if comparison is not None:
        contents.append(("changes", "Against earlier figures", comparison_part(comparison, changes)))
    for gpu, of_gpu in sorted(found.items()):
        of_pictures = pictures.get(gpu, [])
        parts = [f"<p>{escaped(explanation(runs, gpu))}</p>\n", numbers(of_gpu)]
        for section in dict.fromkeys(picture.section for picture in of_pictures):
            parts.append(f"<h2>{escaped(section)}</h2>\n")
            parts += [figure(picture) for picture in of_pictures if picture.section == section]
        parts.append("<h2>All figures</h2>\n" + tables_of(of_gpu))
        contents.append((f"gpu-{len(contents)}", gpu, "".join(parts)))
    contents.append(("runs", "Where the figures come from", provenance(runs)))
    body.append("<nav>" + "".join(f'<a href="#{key}">{escaped(title)}</a>' for key, title, _ in contents) + "</nav>\n")
    body += [f'<section id="{key}"><h2>{escaped(title)}</h2>\n{text}</section>\n' for key, title, text in contents]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>grouped_lora_ops report</title>'
        f"<style>{CSS}</style></head>\n<body>\n{''.join(body)}</body></html>\n"
    )
