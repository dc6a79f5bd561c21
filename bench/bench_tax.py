"""What LoRA costs a layer, in per cent of the base alone: the base, the base followed by `delta_`, and `linear`.

    pytest bench/bench_tax.py --bench-json …                  204 rows: wo_a (4 groups) and 4096 → 4096
    pytest bench/bench_tax.py -k "plain-r16 and T64" …        some: names are layer-r<rank>-a<adapters>-T<tokens>

A row is `linear`'s time; `base_us` is PyTorch's product alone, `apart_us` that and delta_ behind it. The plan is made outside.
a0: no token has an adapter, what an idle bank costs. All buffers have 32 slots.
"""

import pytest
import torch

import grouped_lora_ops as glo

from . import linear_workloads as workloads
from . import measure
from .bench_linear import apart, base, case, exact, ours  # noqa: F401  (case is a fixture)
from .contenders import PLAN_FROM

CONTENDERS = ("ours",)


def mismatch(w, shared, plan, t) -> str | None:
    """What is wrong on small integers: linear's bits, or what delta_ adds to the base's own bits."""
    if not torch.equal(ours(w, shared, plan)(t), exact(w, shared, t)):
        return "linear"
    want = base(t).contiguous()
    glo.reference.delta_(want, t["x"], t["lora_a"], t["lora_b"], shared["adapter_ids"], shared["scalings"])
    return None if torch.equal(apart(w, shared, plan)(t), want) else "base, then delta_"


@pytest.mark.parametrize("case", workloads.TAX, indirect=True, ids=lambda w: w.name)
def test_tax(case, contender, device, figure, timer, request):  # noqa: F811
    w, shared = case
    tiny = request.config.getoption("--tiny")
    plan = glo.plan(shared["adapter_ids"], w.slots) if w.T >= (2 if tiny else PLAN_FROM) else None
    wrong = mismatch(w, shared, plan, workloads.integer_set(w, device))
    if wrong:
        pytest.fail(f"exactness gate on {w.name}: {wrong}: no figure from a wrong kernel")
    count = measure.sets_for(workloads.bytes_per_set(w), most=2 if tiny else 16)
    sets = [workloads.random_set(w, device, seed) for seed in range(count)]

    def calls(way):
        return [lambda t=t: way(t) for t in sets]

    fused, rest = calls(ours(w, shared, plan)), measure.rests(w)
    base_us = timer.graph_us(calls(base), rest=rest)
    apart_us = timer.graph_us(calls(apart(w, shared, plan)), rest=rest)
    more = {"base_us": base_us, "apart_us": apart_us, "peak_mib": timer.peak_mib(fused[0])}
    us = figure(w, "tax", contender, timer.graph(fused, rest=rest), **more)
    taxes = [f"{100 * (part / base_us - 1):+.0f} %" for part in (us, apart_us)]
    print(
        f"\n{w.name}: base {base_us:.1f} µs, linear {us:.1f} ({taxes[0]}), base then delta_ {apart_us:.1f} ({taxes[1]})"
    )
