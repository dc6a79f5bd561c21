"""Figures against earlier ones of the same GPU, op and workload, with a noise band.

A figure is the median of its rounds. The band of a row is the quartile distance of the rounds over their median, the larger of
the two runs', about three standard errors of the difference of two medians of 15, and at least LEAST; where a file does not
hold the quartiles it is at least DEFAULT. The CPU's time of a call is compared with a band of HOST, memory with one of MEMORY.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import runs as results

LEAST, DEFAULT, HOST, MEMORY = 0.02, 0.05, 0.25, 0.05


@dataclass(frozen=True)
class Change:
    gpu: str
    op: str
    workload: str
    quantity: str  # "us" or "peak_mib"
    old: float
    new: float
    noise: float  # relative
    stated: bool  # the noise is a stated default

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def verdict(self) -> str:
        """ "regression", "improvement" or "same"."""
        if self.ratio > 1 + self.noise:
            return "regression"
        return "improvement" if self.ratio < 1 / (1 + self.noise) else "same"

    def __str__(self) -> str:
        unit = {"us": "µs", "peak_mib": "MiB at the peak"}[self.quantity]
        band = f"{100 * self.noise:.1f} %{' (default)' if self.stated else ''}"
        change = f"{100 * (self.ratio - 1):+.1f} %, noise {band}"
        return f"{self.op} {self.workload}: {self.old:.2f} → {self.new:.2f} {unit} ({change})"


def noise(old: dict, new: dict) -> tuple[float, bool]:
    """(relative band, whether it is the stated default)."""
    if new["op"] == "host":
        return HOST, True
    spreads = [(row["q3_us"] - row["q1_us"]) / row["us"] for row in (old, new) if "q1_us" in row and row["us"]]
    stated = len(spreads) < 2
    return max(DEFAULT if stated else LEAST, *spreads, 0.0), stated


@dataclass(frozen=True)
class Comparison:
    changes: tuple[Change, ...]
    gone: tuple[str, ...]  # rows of ours that the new files lack, of the GPUs and ops that they have

    @property
    def regressions(self) -> list[Change]:
        return sorted((c for c in self.changes if c.verdict == "regression"), key=lambda c: -c.ratio)

    @property
    def improvements(self) -> list[Change]:
        return sorted((c for c in self.changes if c.verdict == "improvement"), key=lambda c: c.ratio)


def compare(new_runs: list[dict], old_runs: list[dict]) -> Comparison:
    """Our rows of both. ValueError where they have none in common."""
    new, old = results.newest(new_runs), results.newest(old_runs)
    changes, gone = [], []
    for gpu, found in new.items():
        ops = {op for op, _ in found}
        for (op, workload), before in old.get(gpu, {}).items():
            if "ours" not in before or op not in ops:
                continue
            after = found.get((op, workload), {}).get("ours")
            if after is None:
                gone.append(f"{op} {workload}")
                continue
            before = before["ours"]
            if before["us"] > 0:
                changes.append(Change(gpu, op, workload, "us", before["us"], after["us"], *noise(before, after)))
            if before.get("peak_mib") and after.get("peak_mib"):
                changes.append(
                    Change(gpu, op, workload, "peak_mib", before["peak_mib"], after["peak_mib"], MEMORY, True)
                )
    if not changes:
        raise ValueError(
            f"nothing to compare: no op and workload of ours is in both; new: {', '.join(sorted(new)) or 'no GPU'}, "
            f"old: {', '.join(sorted(old)) or 'no GPU'}."
        )
    return Comparison(tuple(changes), tuple(gone))


def text(c: Comparison) -> str:
    """The comparison in lines, the worst first."""
    lines = [f"REGRESSION {change}" for change in c.regressions] + [
        f"improvement {change}" for change in c.improvements
    ]
    lines += [f"gone {name}" for name in c.gone]
    same = sum(change.verdict == "same" for change in c.changes)
    count = len(c.regressions)
    verdict = (
        f"{count} regression{'s' if count != 1 else ''}, {len(c.improvements)} improvements, {same} within the noise"
    )
    return "\n".join([*lines, verdict])
