"""How every figure is timed, so that figures compare: the timers that the benchmarks and `tune` share.

A device figure (`GpuTimer.graph`): one CUDA graph holds one call per input set, each set with tensors of its
own; the L2 is flushed before every replay; a round is one replay divided by the number of calls, a figure the
median of 15 rounds. It is what a layer of a model sees: cold weights, no Python. Beside it: `hot_us` (the
same call eight times, so everything may sit in the L2), `eager_us` (Python calls back to back between two
events) and `host_us` (what a call costs the CPU before it returns).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

ROUNDS = 15
L2_FLUSH_BYTES = 192 << 20  # more than three times the H200's 60 MB L2
REST = 0.05  # seconds
METHOD_GPU = "CUDA graph, one call per input set, L2 flushed before each replay, median of 15"
METHOD_CPU = "CPU wall clock at tiny sizes: not a figure"


def sets_for(bytes_per_set: int, at_least: float = 160e6, most: int = 16) -> int:
    """Input sets to rotate through: together at least `at_least` bytes, but no more than `most` sets."""
    return max(1, min(most, math.ceil(at_least / max(bytes_per_set, 1))))


def host_us(call: Call, calls: int = 200, rounds: int = 3, sync: Call = lambda: None) -> tuple[float, float]:
    """(minimum, median) µs of the CPU in one call: arguments, dispatch, launch; the device is not waited for.

    `calls` stays far below the ~1000 launches after which a full launch queue would make the CPU wait.
    """
    times = []
    for _ in range(rounds):
        sync()
        for _ in range(calls):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) * 1e-3)
    sync()
    return min(times), statistics.median(times)


class GpuTimer:
    """Times calls on one CUDA device, on a stream of its own."""

    method = METHOD_GPU

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.l2_flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def warm(self, calls: Sequence[Call]) -> None:
        """One call of each outside any capture: compiles, loads, initialises. Inputs made on other streams are ready."""
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
        torch.cuda.synchronize(self.device)

    def rest(self) -> None:
        """An idle moment, so that what ran before does not slow what is timed next: tens of ms at full power lower the clocks
        (`linear` of 8192 tokens took 2 to 14 % longer where 50 ms of it ran ahead)."""
        torch.cuda.synchronize(self.device)
        time.sleep(REST)

    def graph(self, calls: Sequence[Call], flush: bool = True, rest: bool = False) -> Callable[[], float]:
        """A function that replays the calls once and returns µs per call; `rest` before it is returned. It holds the graph: drop it
        to free memory."""
        self.warm(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for call in calls:
                call()
        if rest:
            self.rest()

        def round_us() -> float:
            with torch.cuda.stream(self.stream):
                if flush:
                    self.l2_flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / len(calls)

        return round_us

    def graph_us(self, calls: Sequence[Call], rounds: int = ROUNDS, flush: bool = True, rest: bool = False) -> float:
        round_us = self.graph(calls, flush, rest)
        round_us()
        return statistics.median(round_us() for _ in range(rounds))

    def hot_us(self, call: Call, repeat: int = 8) -> float:
        return self.graph_us([call] * repeat, flush=False)

    def eager_us(self, calls: Sequence[Call], rounds: int = 3) -> float:
        self.warm(calls)
        times = []
        with torch.cuda.stream(self.stream):
            for _ in range(rounds):
                torch.cuda.synchronize(self.device)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for call in calls:
                    call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / len(calls))
        return min(times)

    def host_us(self, call: Call) -> tuple[float, float]:
        with torch.cuda.stream(self.stream), torch.inference_mode():
            return host_us(call, sync=lambda: torch.cuda.synchronize(self.device))

    def peak_mib(self, call: Call) -> float:
        """Memory that one eager call holds at its worst moment, beyond what was allocated before it."""
        self.warm([call])
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.warm([call])
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


class WallTimer:
    """GpuTimer's interface on the wall clock, so that every path of the suites runs where there is no GPU."""

    method = METHOD_CPU

    def __init__(self, device: torch.device):
        self.device = device

    def warm(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()

    def rest(self) -> None:
        pass

    def graph(self, calls: Sequence[Call], flush: bool = True, rest: bool = False) -> Callable[[], float]:
        self.warm(calls)
        if rest:
            self.rest()

        def round_us() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) * 1e6 / len(calls)

        return round_us

    def graph_us(self, calls: Sequence[Call], rounds: int = ROUNDS, flush: bool = True, rest: bool = False) -> float:
        round_us = self.graph(calls, flush, rest)
        return statistics.median(round_us() for _ in range(rounds))

    def hot_us(self, call: Call, repeat: int = 2) -> float:
        return self.graph_us([call] * repeat, rounds=3)

    def eager_us(self, calls: Sequence[Call], rounds: int = 3) -> float:
        return self.graph_us(calls, rounds)

    def host_us(self, call: Call) -> tuple[float, float]:
        with torch.inference_mode():
            return host_us(call, calls=5, rounds=1)

    def peak_mib(self, call: Call) -> None:
        self.warm([call])
        return None


def timer_for(device: torch.device) -> GpuTimer | WallTimer:
    return GpuTimer(device) if device.type == "cuda" else WallTimer(device)
