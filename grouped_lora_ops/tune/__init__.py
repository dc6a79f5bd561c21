"""Measure launch configurations of the delta on this GPU and write them as a launch table.

    python -m grouped_lora_ops tune --out sm_89.json           all of it; Ctrl-C at any time
    python -m grouped_lora_ops tune --out sm_89.json           goes on where the last run ended (sm_89.json.journal)
    python -m grouped_lora_ops tune -k r16- -k S1-T8-          only points whose names hold one of these

Each point is a problem (rank, slots, groups, tokens) that stands for its neighbourhood. A configuration counts only if it is
exact on small integers and has the closed form's bits on random numbers; one that is at least 3 % faster than the closed form,
when both are timed in turn, becomes a rule. The table is used where GROUPED_LORA_TABLE names it; in grouped_lora_ops/launch_tables/ it ships.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from .. import launch
from .._progress import Progress
from . import candidates, grid
from .grid import Point
from .journal import Journal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="the table (default: <arch>.json here); the journal is <out>.journal")
    parser.add_argument(
        "-k", action="append", metavar="PART", help="part of a point's name, as in G4-r16-S8-T64-; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the points and measure nothing; needs no GPU")
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile ahead; 0: none"
    )


def head_of(device) -> dict:
    """What figures depend on: a journal of another GPU or of other versions is refused."""
    from .. import __version__

    return {
        "gpu": device.name,
        "arch": device.arch,
        "multiprocessors": device.sms,
        "grouped_lora_ops": __version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "method": "in turn, ids evenly spread",
    }


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


class WrongKernel(RuntimeError):
    """The library's own choice computes something else: nothing is to be timed."""


def measure(point: Point, device, say) -> dict:
    """{"default_us", "us", "label", "rule", "tried", "dropped"} of a point: the fastest rule that is right.

    device: see `device.Device`. WrongKernel where the closed form itself is wrong.
    """
    p = point.problem(device.arch, device.sms)
    device.open(point)
    default = candidates.closed_form(p)
    wrong = device.wrong(default)
    if wrong:
        raise WrongKernel(f"{point.name}: the closed form's own kernels are {wrong}; run the doctor.")
    default_us, times, dropped = device.us(default), {}, {}
    own = set()  # rules that are the closed form: none to write down, but every expand is tried behind the best shrink

    def drop(label: str, error: Exception) -> None:
        dropped[label] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:120]

    def try_all(rules: dict[str, dict]) -> None:
        for label, rule in rules.items():
            try:
                config = candidates.config_of(rule, p)
                if config == default:
                    own.add(label)
                wrong = device.wrong(config)
                if wrong:
                    dropped[label] = wrong
                    say(f"  {point.name} {label}: {wrong}, not timed")
                    continue
                times[label] = device.us(config)
            except Exception as error:  # too much shared memory, a compiler's limit, memory: the candidate drops out
                drop(label, error)

    def fastest_rule() -> str | None:
        return min([label for label in times if label not in own], key=times.__getitem__, default=None)

    rules = candidates.one_launch(p, device.has_cuda)
    try_all(rules)
    best = None
    for middle in candidates.middles(p):
        rules |= (tried := candidates.rules(p, middle=middle))
        try_all(tried)
        best = candidates.best_shrink(p, times)
        if best is not None:
            break
    if best is not None:
        behind = {label: rule for label, rule in candidates.rules(p, best).items() if label not in rules}
        rules |= behind
        try_all(behind)
    while (fastest := fastest_rule()) is not None and times[fastest] < default_us:
        config = candidates.config_of(rules[fastest], p)
        try:
            default_us, times[fastest] = _in_turn(device, (default, config), (default_us, times[fastest]))
            break
        except Exception as error:  # once it ran: other memory is free now
            drop(fastest, error)
            del times[fastest]
    found = {"default_us": round(default_us, 3), "us": round(times.get(fastest, default_us), 3), "label": fastest}
    return found | {"rule": rules.get(fastest), "tried": len(times), "dropped": dropped}


def _in_turn(device, configs: tuple, us: tuple) -> list[float]:
    """The medians of `us` and two more times of each, one after the other: the GPU has another clock and temperature now than when the
    first configuration was timed."""
    times = [[first] for first in us]
    for _ in range(2):
        for config, its in zip(configs, times):
            its.append(device.us(config))
    return [statistics.median(its) for its in times]


def tune(points: list[Point], device, out: Path, workers: int = 0) -> dict:
    """Measure what the journal lacks, writing the table after every point; returns the table."""
    head = head_of(device)
    journal = Journal(out.with_name(out.name + ".journal"), head)
    left = [point for point in points if point.name not in journal.results]
    if len(left) < len(points):
        print(f"{len(points) - len(left)} of {len(points)} points are in {journal.path.name}")
    if workers and left:
        with Progress(len(left), "point compiled") as bar:
            device.precompile(left, workers, bar.add)
    try:
        with Progress(len(left), "point") as bar:
            for point in left:
                bar.what(point.name)
                try:
                    result = measure(point, device, bar.say)
                except torch.OutOfMemoryError:
                    bar.say(f"{point.name}: more memory than this GPU has free, left out")
                    bar.add()
                    continue
                journal.add(point.name, result)
                grid.write(out, grid.table_of(journal.results, head))
                gain = 100 * (1 - result["us"] / result["default_us"])
                verdict = (
                    f"{result['us']:.1f} ({gain:.0f} % less) by {result['label']}"
                    if grid.rule_of(point, result)
                    else "stays"
                )
                bar.say(f"{point.name}: closed form {result['default_us']:.1f} µs, {verdict}")
                bar.add()
    finally:
        device.close()
    table = grid.table_of(journal.results, head)
    grid.write(out, table)
    return table


def check(path: Path, arch: str, sms: int) -> None:
    """Read the table as the library does, for every point."""
    before = os.environ.get("GROUPED_LORA_TABLE")
    os.environ["GROUPED_LORA_TABLE"] = str(path)
    launch.table.cache_clear()
    try:
        for point in grid.points():
            launch.delta(point.problem(arch, sms))
    finally:
        launch.table.cache_clear()
        if before is None:
            del os.environ["GROUPED_LORA_TABLE"]
        else:
            os.environ["GROUPED_LORA_TABLE"] = before


def run(options: argparse.Namespace) -> int:
    points = grid.points(options.k)
    if not points:
        raise ValueError(f"-k: no point's name holds {' or '.join(options.k)}; --list prints them.")
    if options.list:
        print("\n".join(point.name for point in points))
        return 0
    if not torch.cuda.is_available():
        print(
            "there is no NVIDIA GPU that torch can use here, so there is nothing to measure; --list prints the points.",
            file=sys.stderr,
        )
        return 1
    from .device import Device

    start, device = time.perf_counter(), Device(torch.cuda.current_device())
    out = options.out or Path(f"{device.arch}.json")
    print(f"{device.name}, {device.arch}: {len(points)} points, table {out}")
    try:
        table = tune(points, device, out, options.workers)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {out}.journal", file=sys.stderr)
        return 130
    except WrongKernel as error:
        print(f"{error}", file=sys.stderr)
        return 1
    check(out, device.arch, device.sms)
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(table['delta'])} rules in {out} after {minutes:.0f} min; use it with GROUPED_LORA_TABLE={out}")
    return 0
