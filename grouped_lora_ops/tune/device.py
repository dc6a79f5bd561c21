"""A point's tensors on a GPU, and what a launch configuration does with them: right or wrong, and how fast."""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing
from collections.abc import Callable

import torch

from .. import cuda, launch, ops, reference, timing
from ..ops import common
from . import candidates
from .grid import FEATURES, Point

ROUNDS = 7


class Device:
    """One GPU. `open` a point, then ask `wrong` and `us` of its configurations."""

    def __init__(self, index: int):
        self.device = torch.device("cuda", index)
        self.arch, self.sms = common._facts(index)
        self.name = torch.cuda.get_device_name(index)
        self.timer = timing.GpuTimer(self.device)
        self.has_cuda = cuda.module("tune", "delta", index) is not None

    def open(self, point: Point) -> None:
        self.close()
        self.point = point
        generator = torch.Generator().manual_seed(8)
        ids = torch.randperm(point.tokens, generator=generator) % point.slots  # evenly spread, as launch.Problem has it
        self.ids = ids.to(self.device, torch.int32)
        self.scalings = torch.tensor([(0.5, 1.0, 2.0)[slot % 3] for slot in range(point.slots)], device=self.device)
        self.plan = ops.plan(self.ids, point.slots) if launch.needs_plan(point.tokens, point.slots) else None
        size = 2 * sum(t.numel() for t in self._set(0).values())
        self.sets = [self._set(seed) for seed in range(timing.sets_for(size))]
        self.exact = self._set(0, integers=True)
        self.first = self.sets[0]["out"].clone()
        self.bits = None
        right = self.exact["out"].clone()
        reference.delta_(right, *(self.exact[name] for name in ("x", "lora_a", "lora_b")), self.ids, self.scalings)
        self.right = right

    def close(self) -> None:
        """Free a point's tensors, and use the library's own choices again."""
        candidates.use(None)
        self.sets, self.exact, self.right, self.first, self.bits = [], None, None, None, None
        torch.cuda.empty_cache()

    def _set(self, seed: int, integers: bool = False) -> dict[str, torch.Tensor]:
        p = self.point
        group = () if p.groups == 1 else (p.groups,)
        shapes = {
            "x": (p.tokens, *group, FEATURES),
            "lora_a": (p.slots, p.rank, FEATURES),
            "lora_b": (p.slots, *group, p.out_features, p.rank),
            "out": (p.tokens, *group, p.out_features),
        }
        scale = {"x": 1.0, "lora_a": FEATURES**-0.5, "lora_b": p.rank**-0.5, "out": 1.0}
        generator = torch.Generator(self.device).manual_seed(seed)
        made = {}
        for name, shape in shapes.items():
            if integers:
                made[name] = torch.randint(-3, 4, shape, device=self.device, generator=generator).bfloat16()
            else:
                made[name] = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=generator).mul_(
                    scale[name]
                )
        return made

    def _call(self, t: dict) -> None:
        ops.delta_(t["out"], t["x"], t["lora_a"], t["lora_b"], self.ids, self.scalings, plan=self.plan)

    def wrong(self, config: launch.DeltaConfig) -> str | None:
        """What is wrong: small integers not exact, or other bits than the first configuration's on random numbers."""
        candidates.use(config)
        mine = {**self.exact, "out": self.exact["out"].clone()}
        self._call(mine)
        if not torch.equal(mine["out"], self.right):
            return "not exact on small integers"
        self.sets[0]["out"].copy_(self.first)
        self._call(self.sets[0])
        got = self.sets[0]["out"].clone()
        self.bits = got if self.bits is None else self.bits
        return None if torch.equal(got, self.bits) else "of other bits than the closed form's"

    def us(self, config: launch.DeltaConfig) -> float:
        candidates.use(config)
        return self.timer.graph_us([lambda t=t: self._call(t) for t in self.sets], rounds=ROUNDS)

    def precompile(self, points: list[Point], workers: int, done: Callable[[int], None]) -> None:
        """Call every candidate once in worker processes, so that Triton's cache on disk holds its kernels. done(points).

        What goes wrong there goes wrong again, and is told, when it is measured.
        """
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            for future in concurrent.futures.as_completed(
                [pool.submit(_compile, self.device.index, point) for point in points]
            ):
                if isinstance(future.exception(), concurrent.futures.process.BrokenProcessPool):
                    return
                done(1)


def _compile(index: int, point: Point) -> None:
    """In a worker."""
    torch.cuda.set_device(index)
    device = Device(index)
    device.open(point)
    p = point.problem(device.arch, device.sms)
    every = candidates.one_launch(p, False) | candidates.rules(p) | candidates.rules(p, candidates.shrinks(p)[0])
    for rule in every.values():
        try:
            candidates.use(candidates.config_of(rule, p))
            device._call(device.sets[0])
            torch.cuda.synchronize()
        except Exception:  # too much shared memory, a compiler's limit
            continue
    device.close()
