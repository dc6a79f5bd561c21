"""Result files of a GPU that does not exist: figures by formula, for every picture and table of the report."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import curve_workloads, expert_train_workloads, linear_workloads, results, workloads  # noqa: E402

GPU = "NVIDIA Made-up"


def row(w, op, contender, us, **more):
    return results.row(w, op, contender, us, q1_us=us * 0.99, q3_us=us * 1.01, **more)


def rows(slower: float = 1.0) -> list[dict]:
    """ours takes 1.2 × floor + 3.5 µs, times `slower`."""
    out = []
    for w in workloads.DENSE:
        us = slower * (1.2 * workloads.floor_us(w) + 3.5)
        out.append(row(w, "delta", "ours", us, host_us=8.0 + w.rank / 50, host_median_us=9.0 + w.rank / 30))
        out.append(row(w, "delta", "torch", 1.5 * workloads.floor_us(w) + 9 + w.slots))
    for w in workloads.PLANS:
        out.append(row(w, "plan", "ours", slower * (3 + w.T / 8192)))
    for w in workloads.TRAINING:
        floor = workloads.floor_us(w, "train")
        out.append(row(w, "train", "ours", slower * (1.4 * floor + 20), peak_mib=w.T * w.width / 2**19))
        out.append(row(w, "train", "torch", 2.2 * floor + 60, peak_mib=2.5 * w.T * w.width / 2**19))
    for w in expert_train_workloads.TRAINING:
        floor = expert_train_workloads.floor_us(w)
        more = dict(forward_us=0.5 * floor, peak_mib=w.M / 32)
        out.append(row(w, "expert_train", "torch", 3 * floor, **more))
        out.append(row(w, "expert_train", "ours", slower * 1.4 * floor, times_torch=slower * 1.4 / 3, **more))
    taken = {}
    for w in curve_workloads.CURVE:
        taken[w.name] = us = slower * (1.2 * workloads.floor_us(w) + 3.5 + w.slots / 16)
        more = {"jump": us / taken[w.before]} if w.before else {}
        more |= {"beside": w.beside, "times_beside": us / taken[w.beside]} if w.beside else {}
        out.append(row(w, "curve", "ours", us, hot_us=0.9 * us, **more))
    for w in linear_workloads.TAX:
        floor = linear_workloads.floor_us(w)
        base = 1.2 * w.T * w.width * w.D * 2 / 790e6 + 9
        more = 0.02 * w.rank * w.active**0.5 + w.T * w.rank / 3e4 if w.active else 0.1
        out.append(
            row(
                w,
                "tax",
                "ours",
                slower * (0.95 * base + more),
                base_us=base,
                apart_us=base + 3 + 2 * more,
                peak_mib=w.T / 64,
            )
        )
        assert floor > 0
    for w in workloads.named("wo_a-r16-S8-T1", "plain-r16-S8-T8"):
        pieces = {
            "delta, inference mode": 12.4,
            "… describe (C)": 0.6,
            "… all launches": 4.1,
            "delta_, inference mode": 9.7,
        }
        out.append(results.row(w, "host", "ours", slower * 12.4, pieces=pieces))
    return out


def run(slower: float = 1.0, date: str = "2026-11-30T10:00:00Z", commit: str = "abc1234", tiny: bool = False) -> dict:
    head = results.header("made-up", "by formula: not a figure", tiny, commit)
    return head | {"gpu": GPU, "date": date, "rows": rows(slower)}


def write(path: Path, made: dict) -> Path:
    results.write(path, {key: value for key, value in made.items() if key != "rows"}, made["rows"])
    return path
