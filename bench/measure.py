"""The benchmarks' timing: the package's timers, and the clock that pytest-benchmark reads.

`gpu_clock` only moves when a round advances it, so pytest-benchmark's statistics are device time.
"""

from __future__ import annotations

from grouped_lora_ops.timing import (
    L2_FLUSH_BYTES,
    METHOD_CPU,
    METHOD_GPU,
    ROUNDS,
    Call,
    GpuTimer,
    WallTimer,
    host_us,
    sets_for,
    timer_for,
)

__all__ = [
    "L2_FLUSH_BYTES",
    "METHOD_CPU",
    "METHOD_EAGER",
    "METHOD_GPU",
    "RESTS_FROM",
    "ROUNDS",
    "SHORTLIST_ROUNDS",
    "Call",
    "GpuTimer",
    "WallTimer",
    "advance",
    "gpu_clock",
    "host_us",
    "rests",
    "sets_for",
    "timer_for",
]

SHORTLIST_ROUNDS = 5  # per variant of a contender, to find the best one, which then gets all rounds
METHOD_EAGER = "eager calls between two CUDA events, minimum of 3 rounds"
RESTS_FROM = 1024  # tokens: from there on products can keep a GPU at full power; with fewer they wait for memory

_clock = 0.0  # seconds


def gpu_clock() -> float:
    """The timer handed to pytest-benchmark: seconds of measured time, moved by `advance` alone."""
    return _clock


def advance(us: float) -> None:
    global _clock
    _clock += us * 1e-6


def rests(w) -> bool:
    """Whether the GPU idles for a moment ahead of each figure of w, so that all of them begin at the same clocks."""
    return w.T >= RESTS_FROM
