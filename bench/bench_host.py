"""What one eager `delta` and one eager `expert_mlp` cost the CPU before they return, whole and piece by piece. Asserts nothing of them.

    pytest bench/bench_host.py -s

µs, the median of 600 calls; the bars of delta are 12 in inference mode and 20 under no_grad. "The ordinary way" is what a call
costs that is not prepared: checks, strides, launch choice, Triton's own launch.
"""

import importlib
from functools import partial

import pytest
import torch

import grouped_lora_ops as gl
from grouped_lora_ops import driver

from . import expert_linear_workloads, measure, results
from .workloads import named

CONTENDERS = ("ours",)
METHOD = "the CPU's time until a call returns, median of 600 calls"
EXPERTS = [w for w in expert_linear_workloads.EXPERT_MLP if w.name in ("qwen3-30b-r16-S1-T1", "qwen3-30b-r16-S4-T8", "qwen3-30b-r16-S4-T256")]


def pieces(case):
    """(name, mode, call) of each piece, the headline first. What lies below the dispatcher needs a GPU."""
    t, s = case.timed.sets[0], case.timed.shared
    kw = {"out_sizes": s.get("out_sizes"), "ranks": s.get("ranks"), "plan": case.timed.plan}
    factors = (t["x"], t["lora_a"], t["lora_b"], s["adapter_ids"], s["scalings"])
    positional = (*factors, None, *kw.values())
    leaf, infer, no_grad = t["x"].detach().requires_grad_(), torch.inference_mode, torch.no_grad
    yield "delta, inference mode", infer, lambda: gl.delta(*factors, **kw)
    yield "… torch.ops.grouped_lora.delta", infer, lambda: torch.ops.grouped_lora.delta.default(*positional)
    yield "delta_, inference mode", infer, lambda: gl.delta_(t["out"], *factors, **kw)
    yield "delta, no_grad", no_grad, lambda: gl.delta(*factors, **kw)
    yield "delta_, no_grad", no_grad, lambda: gl.delta_(t["out"], *factors, **kw)
    yield "delta, x requires grad", torch.enable_grad, lambda: gl.delta(leaf, *factors[1:], **kw)
    yield "torch.empty_like(out)", infer, lambda: torch.empty_like(t["out"])
    if leaf.is_cuda:
        yield from below_the_dispatcher("delta", positional)


def below_the_dispatcher(name, positional):
    implementation = importlib.import_module(f"grouped_lora_ops.ops.{name}")._cuda
    implementation(*positional)
    found, infer = implementation.table.get(driver.describe(positional)), torch.inference_mode
    yield "the implementation", infer, lambda: implementation(*positional)
    yield "… the ordinary way", infer, lambda: implementation.__wrapped__(*positional)
    yield f"… describe ({'C' if driver._launcher else 'Python'})", infer, lambda: driver.describe(positional)
    if found is not None:
        made = found.allocate(positional)
        stream = driver.stream_of(found.device)
        yield f"… {len(made)} allocations", infer, lambda: found.allocate(positional)
        calls = [step.call for step in found.steps] or [found.call]
        yield "… all launches", infer, lambda: [driver.run(one, stream, positional, made) for one in calls]


def expert_pieces(w, device):
    t, s = expert_linear_workloads.random_set(w, device), expert_linear_workloads.shared_inputs(w, device)
    x, ids, adapters, scalings = t["x"], s["expert_ids"], s["adapter_ids"], s["scalings"]
    gate_up, down = ((t[f"{name}_lora_a"], t[f"{name}_lora_b"]) for name in ("gate_up", "down"))
    layer = (x, ids, s["topk_weights"], t["gate_up_weight"], t["down_weight"], *gate_up, *down, adapters, scalings)
    leaf, infer, no_grad = gate_up[0].detach().requires_grad_(), torch.inference_mode, torch.no_grad
    positional = (*layer, None, None, "swiglu", None, "post_down")
    mlp = partial(gl.expert_mlp, router_weight="post_down")
    yield "expert_mlp, inference mode", infer, lambda: mlp(*layer)
    yield "… torch.ops.grouped_lora.expert_mlp", infer, lambda: torch.ops.grouped_lora.expert_mlp.default(*positional)
    yield "expert_mlp, no_grad", no_grad, lambda: mlp(*layer)
    yield "expert_mlp, gate_up_a requires grad", torch.enable_grad, lambda: mlp(*layer[:5], leaf, *layer[6:])
    if w.T <= 64:  # with many rows the GPU takes longer than the CPU
        trained = [x.detach().requires_grad_(), *[factor.detach().requires_grad_() for factor in layer[5:9]]]
        ones = torch.ones_like(x)
        yield "… and the gradients of x and the factors", torch.enable_grad, lambda: torch.autograd.grad(
            mlp(trained[0], *layer[1:5], *trained[1:], *layer[9:]), trained, ones
        )
    of_gate_up = (x, t["gate_up_weight"], *gate_up, ids, adapters, scalings)
    yield "expert_linear, inference mode", infer, lambda: gl.expert_linear(*of_gate_up)
    yield "expert_linear, no_grad", no_grad, lambda: gl.expert_linear(*of_gate_up)
    of_delta = (x, *gate_up, ids, adapters, scalings)
    yield "expert_delta, inference mode", infer, lambda: gl.expert_delta(*of_delta)
    yield "expert_plan, inference mode", infer, lambda: gl.expert_plan(ids, adapters, w.experts, w.slots)
    if device.type == "cuda":
        yield from below_the_dispatcher("expert_mlp", positional)


def run(w, found, contender, benchmark, keep, device):
    gpu, figures = device.type == "cuda", {}
    for name, mode, call in found:
        with mode():
            call()
            sync = torch.cuda.synchronize if gpu else lambda: None
            # few calls a round: those that a full launch queue holds up would count as the CPU's time
            figures[name] = measure.host_us(call, calls=100 if gpu else 1, rounds=6 if gpu else 1, sync=sync)[1]
    headline = next(iter(figures.values()))
    benchmark.pedantic(lambda: measure.advance(headline), rounds=1)
    pieces_us = {name: round(us, 3) for name, us in figures.items()}
    keep(results.row(w, "host", contender, headline, method=METHOD, pieces=pieces_us), w.peers)
    print(f"\n{w.name}: µs of the CPU a call" + "".join(f"\n  {us:8.2f}  {name}" for name, us in figures.items()))


@pytest.mark.parametrize("case", named("wo_a-r16-S8-T1", "plain-r16-S8-T8", "wo_a-r16-S8-T256"), indirect=True, ids=lambda w: w.name)
def test_host(case, contender, benchmark, keep, device):
    run(case.w, pieces(case), contender, benchmark, keep, device)


@pytest.mark.parametrize("case", EXPERTS, ids=lambda w: w.name)
def test_host_of_experts(case, contender, benchmark, keep, device, request):
    w = case.tiny() if request.config.getoption("--tiny") else case
    run(w, expert_pieces(w, device), contender, benchmark, keep, device)
