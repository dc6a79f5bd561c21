"""T = 1 … 512 as a curve: `delta_` of DeepSeek-V4's `wo_a` and of a 4096 → 4096 layer at 17 token counts, and three things that should cost
nothing, each beside the row that it is compared with: buffers with 64 slots of which one is active, ranks of 16 in slots padded to
256, and batches without an adapter (`idle`, beside the same batch with adapters).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import results
from .workloads import Workload

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
BESIDE_TOKENS = (1, 8, 64, 128, 256, 512)
SHAPES = {"wo_a": {"D": 4096, "N": 1024, "G": 4, "layout": "grouped"}, "plain": {"D": 4096, "N": 4096}}


@dataclass(frozen=True)
class CurveWorkload(Workload):
    """A `Workload` of `delta_`, and the names of rows that it is compared with."""

    before: str = field(default="", compare=False)  # the same with fewer tokens
    beside: str = field(default="", compare=False)  # the same batch without what this one is about

    def facts(self, op: str) -> dict:
        return results.facts(self, "delta")


def name(layer: str, rank: int, slots: int, tokens: int) -> str:
    return f"{layer}-r{rank}-S{slots}-T{tokens}"


def _curves() -> list[CurveWorkload]:
    rows = []
    for layer, shape in SHAPES.items():
        for rank in (16, 64):
            for slots in (1, 8):
                before = ""
                for tokens in TOKENS:
                    here = name(layer, rank, slots, tokens)
                    rows.append(CurveWorkload(here, tokens, rank=rank, slots=slots, before=before, **shape))
                    before = here
    return rows


def _beside() -> list[CurveWorkload]:
    rows = []
    for layer, shape in SHAPES.items():
        for tokens in BESIDE_TOKENS:
            one, eight = name(layer, 16, 1, tokens), name(layer, 16, 8, tokens)
            rows += [
                CurveWorkload(
                    f"{layer}-active1of64-r16-S64-T{tokens}", tokens, rank=16, slots=64, mix="one", beside=one, **shape
                ),
                CurveWorkload(
                    f"{layer}-r16in256-r256-S8-T{tokens}",
                    tokens,
                    rank=256,
                    slots=8,
                    true_ranks=(16,),
                    beside=eight,
                    **shape,
                ),
                CurveWorkload(
                    f"{layer}-idle-r16-S8-T{tokens}", tokens, rank=16, slots=8, mix="none", beside=eight, **shape
                ),
            ]
    return rows


CURVES = _curves()
CURVE = CURVES + _beside()
