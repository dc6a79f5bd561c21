"""The problems that are measured, the part of the space that each stands for, and the launch table that follows."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import launch

FEATURES = 4096  # D, and all output columns of a token
RANKS, SLOTS, GROUPS = (16, 32, 64, 128), (1, 8, 64), (1, 4)
TOKENS = (1, 8, 64, 256, 1024, 8192)
END = 1 << 40
GAIN = 0.03  # a rule must be faster than the closed form by so much, or there is none


@dataclass(frozen=True)
class Point:
    """One measured problem in bf16: a plain layer 4096 → 4096, or four groups of 4096 → 1024 with one A."""

    tokens: int
    groups: int
    rank: int
    slots: int

    @property
    def name(self) -> str:
        return f"G{self.groups}-r{self.rank}-S{self.slots}-T{self.tokens}"

    @property
    def out_features(self) -> int:
        return FEATURES // self.groups

    def problem(self, arch: str, sms: int) -> launch.Problem:
        return launch.Problem(
            arch, sms, 2, self.tokens, self.groups, FEATURES, self.out_features, self.rank, self.slots, self.groups > 1
        )

    @property
    def when(self) -> dict:
        """The ranges of a rule made from here: up to the geometric middle between this point and the next."""
        block = launch.rank_block(self.rank, 2)
        return {
            "itemsize": [2, 2],
            "rank": [block, block],
            "groups": _range(self.groups, GROUPS),
            "slots": _range(self.slots, SLOTS),
            "tokens": _range(self.tokens, TOKENS),
        }


def _range(value: int, values: tuple[int, ...]) -> list[int]:
    """[low, high] of the whole numbers that value stands for: up to the geometric middles between it and its neighbours."""
    place = values.index(value)
    low = 1 if place == 0 else _middle(values[place - 1], value) + 1
    return [low, END if place + 1 == len(values) else _middle(value, values[place + 1])]


def _middle(a: int, b: int) -> int:
    return 1 if a == 1 else math.isqrt(a * b)  # one slot, one token, one group: kernels of their own


def points(parts: list[str] | None = None) -> list[Point]:
    """The grid, the commonest ranks first; parts: only points whose name (and a dash) holds one of them."""
    every = [Point(t, g, r, s) for r in RANKS for g in GROUPS for s in SLOTS for t in TOKENS]
    return [p for p in every if not parts or any(part in f"{p.name}-" for part in parts)]


def rule_of(point: Point, result: dict) -> dict | None:
    """The rule that a measured point gives, None where the closed form is as good."""
    if not result.get("rule") or result["us"] > (1 - GAIN) * result["default_us"]:
        return None
    # a fused kernel holds one block of ranks: the largest block stands for larger ranks, too
    if "fused" in result["rule"] and launch.rank_block(point.rank, 2) == launch.rank_block(1 << 20, 2):
        return None
    when = point.when
    if result["rule"].get("split"):  # its scratch grows with T: 8 · T · r numbers
        when["tokens"][1] = min(when["tokens"][1], 2 * max(TOKENS))
    return {"when": when, **result["rule"]}


def table_of(results: dict[str, dict], made_by: dict) -> dict:
    """The launch table of {point's name: result}; `made_by` says what it was measured on."""
    by_name = {point.name: point for point in points()}
    rules = [rule_of(by_name[name], result) for name, result in results.items() if name in by_name]
    return {"measured": made_by, "delta": [rule for rule in rules if rule is not None]}


def write(path: Path, table: dict) -> None:
    """One rule a line; under a temporary name first, so that a reader sees a whole table."""
    rules = ",\n".join(json.dumps(rule) for rule in table["delta"])
    text = f'{{"measured": {json.dumps(table["measured"])},\n"delta": [\n{rules}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
