"""expert_linear (base and delta of one projection over routes) beside itself without LoRA and beside PyTorch's way.

    pytest bench/bench_expert_linear.py --contenders ours --bench-json …     all figures below, in rows of ours
    pytest bench/bench_expert_linear.py -k "qwen3-30b-down and T8-"          some; with a row for every contender

A row of ours also holds, measured in the same test: `base_us` (PyTorch's base alone: sort, gather, `grouped_mm`, back into the
order of the routes), `times_base` and `times_bar`; `torch_lora_us` (that with LoRA by `grouped_mm`); `parent_us` (our op
without LoRA) and `tax` (ours over that); `given_us` (the plan given, of which every other call makes its own), `sorted_us`
(`grouped_mm` alone over rows that lie sorted); `peak_mib`. gate_up reads tokens, down reads routes and weights them.
"""

from functools import cached_property

import pytest
import torch

import grouped_lora_ops as glo

from . import expert_contenders as who
from . import expert_linear_workloads as workloads
from . import measure
from .conftest import shortlist

CONTENDERS = who.NAMES


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated, what PyTorch keeps for reuse included; None on the CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


class Layer:
    """One workload: what its batch shares, its sets, made when first asked for, and whether our op gets it right."""

    def __init__(self, w: workloads.LayerWorkload, op: str, device: torch.device, tiny: bool):
        self.w, self.op, self.device = w, op, device
        self.most = 2 if tiny else 16
        self.shared = workloads.shared_inputs(w, device)

    @cached_property
    def count(self) -> int:
        count = workloads.set_count(self.w, free_bytes(self.device), self.most)
        if not count:
            pytest.skip(
                f"{workloads.bytes_per_set(self.w) / 1e9:.0f} GB of tensors, and as much for the check, do not fit this GPU"
            )
        return count

    @cached_property
    def sets(self) -> list[dict]:
        return [workloads.random_set(self.w, self.device, seed) for seed in range(self.count)]

    @cached_property
    def mismatch(self) -> str | None:
        """None where ours, with and without LoRA, with and without a plan, has the reference's bits on small integers."""
        t, shared = workloads.integer_set(self.w, self.device), workloads.with_exact_weights(self.shared)
        for lora in (True, False):
            want = who.ours(self.op, self.w, shared, lora, library=glo.reference)(t)
            for plan in (None, self.plan()) if lora else (None,):
                if not torch.equal(who.ours(self.op, self.w, shared, lora, plan)(t), want):
                    return f"{'with' if lora else 'without'} LoRA{'' if plan is None else ', plan given'}"
        return None

    def plan(self) -> torch.Tensor:
        return glo.expert_plan(self.shared["expert_ids"], self.shared["adapter_ids"], self.w.experts, self.w.slots)

    def calls(self, forward) -> list:
        return [lambda t=t: forward(t) for t in self.sets]

    def best(self, contender: str, timer) -> tuple[str, list]:
        """(variant, its calls) of a contender, no calls where it has no way; torch's variants must be right, the fastest is chosen."""
        ways = who.ways(self.op, contender, self.w, self.shared)
        if not ways:
            return "", []
        if contender.startswith("torch"):
            want = who.ours(self.op, self.w, self.shared, contender == "torch_lora")(self.sets[0]).float()
            for name, forward in ways.items():
                error = float((forward(self.sets[0]).float() - want).abs().max() / want.abs().max())
                assert error < 3e-2, f"{contender} {name} is off by {error:.3g} of the largest value"
        made = {name: self.calls(forward) for name, forward in ways.items()}
        tried = shortlist(timer, made)
        name = min(tried, key=tried.__getitem__) if tried else next(iter(made))
        return name, made[name]


@pytest.fixture(scope="module")
def case(request, device):
    tiny = request.config.getoption("--tiny")
    op = request.path.stem.removeprefix("bench_")
    layer = Layer(request.param.tiny() if tiny else request.param, op, device, tiny)
    yield layer
    layer.__dict__.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(layer: Layer, contender: str, figure, timer) -> None:
    """Check, time, keep the row; ours with all that stands beside it."""
    w, op, rest = layer.w, layer.op, measure.rests(layer.w)
    if layer.count and contender in ("ours", "no_lora") and layer.mismatch:
        pytest.fail(f"exactness gate on {w.name}: {layer.mismatch}: no figure from a wrong kernel")
    variant, calls = layer.best(contender, timer)
    if not calls:
        pytest.skip(f"{contender} has no way to run {w.name}")
    more = {"variant": variant, "peak_mib": timer.peak_mib(calls[0]), "sets": len(calls)}
    if contender != "ours":
        figure(w, op, contender, timer.graph(calls, rest=rest), **more)
        return
    for name, other in (("base_us", "torch"), ("torch_lora_us", "torch_lora"), ("parent_us", "no_lora")):
        beside = layer.best(other, timer)[1]
        more[name] = timer.graph_us(beside, rest=rest) if beside else None

    def after(us: float) -> dict:
        given = layer.calls(who.ours(op, w, layer.shared, plan=layer.plan()))
        found = {"tax": us / more["parent_us"], "given_us": timer.graph_us(given, rest=rest)}
        if more["base_us"]:
            found |= {"times_base": us / more["base_us"], "times_bar": w.bar(op)}
            if op == "expert_linear":
                found["sorted_us"] = timer.graph_us(who.sorted_linear(w, layer.shared, layer.sets), rest=rest)
        return found

    figure(w, op, contender, timer.graph(calls, rest=rest), after=after, **more)


@pytest.mark.parametrize("case", workloads.EXPERT_LINEAR, indirect=True, ids=lambda w: w.name)
def test_expert_linear(case, contender, figure, timer):
    run(case, contender, figure, timer)
