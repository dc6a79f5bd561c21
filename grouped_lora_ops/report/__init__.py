"""Draw benchmark results, compare them with earlier ones, and write the README's tables.

    python -m grouped_lora_ops report RESULTS… --out report          report/index.html and PNGs
    python -m grouped_lora_ops report NEW… --compare OLD…            exit status 1 on a regression beyond the noise
    python -m grouped_lora_ops report bench/results --readme README.md [--check]

RESULTS are files of `pytest bench --bench-json` or `--benchmark-json`, or folders of them. Drawing needs matplotlib:
pip install 'grouped_lora_ops[report]'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import runs as results
from .compare import compare as compared
from .compare import text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="result files, or folders of them")
    parser.add_argument(
        "--out", type=Path, help="folder for the page and the PNGs (default, where nothing else is asked for: report)"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="OLD",
        help="earlier results; exit status 1 on a regression beyond noise",
    )
    parser.add_argument(
        "--readme", type=Path, help="write the tables between its <!-- bench:start --> and <!-- bench:end -->"
    )
    parser.add_argument(
        "--check", action="store_true", help="with --readme: write nothing; exit status 1 where it is stale"
    )


def run(options: argparse.Namespace) -> int:
    if options.check and options.readme is None:
        raise ValueError("--check needs --readme.")
    runs, status, comparison = results.read_all(options.results), 0, None
    if options.readme is not None:
        status = _tables(options, runs)
    if options.compare is not None:
        comparison = compared(runs, results.read_all(options.compare))
        print(text(comparison))
        status = max(status, int(bool(comparison.regressions)))
    out = options.out
    if out is None and options.readme is None and options.compare is None:
        out = Path("report")
    if out is not None:
        count = write(out, runs, comparison)
        print(f"wrote {out / 'index.html'} and {count} pictures")
    return status


def _tables(options: argparse.Namespace, runs: list[dict]) -> int:
    from . import tables

    current = tables.write(options.readme, runs, check=options.check)
    if options.check and not current:
        print(f"the tables of {options.readme} are stale; run the same command without --check", file=sys.stderr)
        return 1
    print(f"{options.readme} is up to date" if current else f"wrote {options.readme}")
    return 0


def write(out: Path, runs: list[dict], comparison=None) -> int:
    """The page and its pictures as PNG files; returns how many pictures. ValueError where there is nothing, or no matplotlib."""
    from .drawing import slug
    from .page import page
    from .pictures import draw, draw_changes

    found = results.newest(runs)
    if not found:
        raise ValueError("there are no figures in these files.")
    pictures = {gpu: draw(rows) for gpu, rows in found.items()}
    changes = draw_changes(comparison) if comparison is not None else []
    out.mkdir(parents=True, exist_ok=True)
    files = [(f"{slug(gpu)}-{picture.name}", picture) for gpu, drawn in pictures.items() for picture in drawn]
    for name, picture in [*files, *((picture.name, picture) for picture in changes)]:
        (out / f"{name}.png").write_bytes(picture.png())
    (out / "index.html").write_text(page(runs, pictures, comparison, changes), encoding="utf-8")
    return len(files) + len(changes)
