"""linear (base and delta in one kernel) beside PyTorch's base alone and beside PyTorch's base followed by our `delta_`.

    pytest bench/bench_linear.py -s --bench-json …          all rows
    pytest bench/bench_linear.py -s -k "wo_a_g4 and T8-"    some

A row of ours also holds, measured in the same test: `base_us` and `times_base` (the bar is a multiple of it), `apart_us`
(base, then delta_), `parent_us` (our kernel without LoRA) and `tax` (ours over that). torch's row is its base alone.
Where the weight is e4m3 (`wo_a_g4_e4m3`, `wo_a_g4_e8m0`) the base is a bf16 product with the dequantised weight; `scaled_mm_us` is
torch._scaled_mm for each group, x quantised by 128 columns of a token and scales in float32 beforehand, or `scaled_mm` says why
it does not run.
"""

from functools import partial

import pytest
import torch

import grouped_lora_ops as glo

from . import contenders as who
from . import linear_workloads as workloads
from . import measure
from .workloads import shared_inputs

CONTENDERS = ("ours", "torch")


@pytest.fixture(scope="module")
def case(request, device):
    """(workload, what its batch shares)."""
    w = request.param.tiny() if request.config.getoption("--tiny") else request.param
    yield w, shared_inputs(w, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ours(w, shared, plan):
    linear, ids, scalings = glo.linear, shared["adapter_ids"], shared["scalings"]

    def call(t):
        return linear(t["x"], t["weight"], t["lora_a"], t["lora_b"], ids, scalings, plan=plan, weight_scale=t.get("weight_scale"))

    return call


def parent(w, shared):
    """Our kernel with no adapter slots."""
    linear, none, nothing = glo.linear, torch.full_like(shared["adapter_ids"], -1), shared["scalings"][:0]

    def call(t):
        return linear(t["x"], t["weight"], t["lora_a"][:0], t["lora_b"][:0], none, nothing, weight_scale=t.get("weight_scale"))

    return call


def base(t):
    """PyTorch's product, as a model without adapters runs it: y [T, G, N] is a view of bmm's [G, T, N]."""
    weight = t.get("base_weight", t["weight"])
    if weight.dim() == 2:
        return torch.nn.functional.linear(t["x"], weight)
    return torch.bmm(t["x"].transpose(0, 1), weight.mT).transpose(0, 1)


def quantised(t):
    """t with x in e4m3 and a scale for each token's 128 columns, all scales float32, as torch._scaled_mm takes them: groups in front."""
    x = t["x"].float().transpose(0, 1).unflatten(-1, (-1, 128))
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    x8 = (x / scale).to(torch.float8_e4m3fn).flatten(-2)
    return {**t, "x8": x8, "x8_scale": scale[..., 0].mT.contiguous().mT, "weight_scale": t["weight_scale"].float()}


def scaled_mm(t):
    """PyTorch's base through 8-bit matrix units, a group after the other."""
    return [
        torch._scaled_mm(x8, w.t(), scale_a=x_scale, scale_b=w_scale.t(), out_dtype=torch.bfloat16)
        for x8, x_scale, w, w_scale in zip(t["x8"], t["x8_scale"], t["weight"], t["weight_scale"])
    ]


def scaled_mm_time(sets, timed) -> dict:
    try:
        sets = [quantised(t) for t in sets]
        error = (torch.stack(scaled_mm(sets[0]), 1).float() - base(sets[0]).float()).norm() / base(sets[0]).float().norm()
    except Exception as reason:  # a shape, a GPU or a release that it does not know
        return {"scaled_mm": f"{type(reason).__name__}: {str(reason).splitlines()[0][:120]}"}
    return {"scaled_mm_us": timed([lambda t=t: scaled_mm(t) for t in sets]), "scaled_mm_error": float(error)}


def apart(w, shared, plan):
    delta_, ids, scalings = glo.delta_, shared["adapter_ids"], shared["scalings"]

    def call(t):
        y = base(t)
        delta_(y, t["x"], t["lora_a"], t["lora_b"], ids, scalings, plan=plan)
        return y

    return call


def exact(w, shared, t):
    ids, scalings = shared["adapter_ids"], shared["scalings"]
    more = {"weight_scale": t["weight_scale"]} if "weight_scale" in t else {}
    return glo.reference.linear(t["x"], t["weight"], t["lora_a"], t["lora_b"], ids, scalings, **more)


@pytest.mark.parametrize("case", workloads.LINEAR, indirect=True, ids=lambda w: w.name)
def test_linear(case, contender, device, figure, timer, request):
    w, shared = case
    tiny = request.config.getoption("--tiny")
    plan = None
    if w.T >= (2 if tiny else who.PLAN_FROM):
        plan = glo.plan(shared["adapter_ids"], w.slots)
    if contender == "ours":
        t = workloads.integer_set(w, device)
        for name, way in {"linear": ours(w, shared, plan), "linear without a plan": ours(w, shared, None)}.items():
            if not torch.equal(way(t), exact(w, shared, t)):
                pytest.fail(f"exactness gate on {w.name}: {name}: no figure from a wrong kernel")
        del t
    count = measure.sets_for(workloads.bytes_per_set(w), most=2 if tiny else 16)
    sets = [workloads.random_set(w, device, seed) for seed in range(count)]

    def calls(way):
        return [lambda t=t: way(t) for t in sets]

    rest = measure.rests(w)
    timed = partial(timer.graph_us, rest=rest)
    if contender == "torch":
        figure(w, "linear", contender, timer.graph(calls(base), rest=rest), variant="base alone")
        return
    fused = calls(ours(w, shared, plan))
    more = {
        "base_us": timed(calls(base)),
        "apart_us": timed(calls(apart(w, shared, plan))),
        "parent_us": timed(calls(parent(w, shared))),
    }
    if w.scaled:
        more |= scaled_mm_time(sets, timed)

    def beside(us: float) -> dict:
        ratios = {"times_base": us / more["base_us"], "times_bar": w.bar, "tax": us / more["parent_us"]}
        return ratios | {"hot_us": timer.hot_us(fused[0])}

    us = figure(w, "linear", contender, timer.graph(fused, rest=rest), after=beside, **more)
    print(
        f"\n{w.name}: {us:.1f} µs, base alone {more['base_us']:.1f} ({us / more['base_us']:.2f} ×, bar {w.bar} ×), base then delta_ "
        f"{more['apart_us']:.1f}, without LoRA {more['parent_us']:.1f}, floor {workloads.floor_us(w):.1f}"
    )
