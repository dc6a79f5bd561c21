"""One rank's side of a run: its device and groups, and what it has checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FP32_BOUND = 1e-4  # ‖rank − one device‖ / ‖one device‖: sums of the same float32 numbers in another order


@dataclass
class Run:
    """One rank's view of the run, and what it has found."""

    rank: int
    device: torch.device
    tiny: bool
    group: object  # both ranks
    alone: object  # this rank
    checks: list[dict] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def check(self, part: str, name: str, ok: bool, value: float | None = None, bound: float | None = None) -> None:
        self.checks.append({"part": part, "check": name, "ok": bool(ok), "value": value, "bound": bound})
        if not ok:
            print(f"rank {self.rank}: FAILED {part}: {name}: {value} (bound {bound})", flush=True)

    def below(self, part: str, name: str, value: float, bound: float) -> None:
        self.check(part, name, value <= bound, value, bound)  # a NaN is not below

    def above(self, part: str, name: str, value: float, bound: float) -> None:
        self.check(part, name, value >= bound, value, bound)

    def equal(self, part: str, name: str, got: Tensor, want: Tensor, bits: bool = True) -> None:
        """Bit for bit (or, −0 being 0, number for number); the value is how many elements differ."""
        compared = (_bits(got), _bits(want)) if bits else (got, want)
        wrong = got.numel() if got.shape != want.shape else int((compared[0] != compared[1]).sum())
        self.check(part, name, wrong == 0, wrong, 0)

    def random(self, seed: int, *shape: int, scale: float = 1.0, dtype=torch.bfloat16) -> Tensor:
        """The same numbers on every rank."""
        g = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(*shape, generator=g, device=self.device) * scale).to(dtype)


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def far(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
