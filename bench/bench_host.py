"""What one eager `delta` costs the CPU before it returns, whole and piece by piece. Asserts nothing.

    pytest bench/bench_host.py -s

µs, the median of 600 calls; the bars are 12 in inference mode and 20 under no_grad. "The ordinary way" is what a call costs
that is not prepared: checks, strides, launch choice, Triton's own launch.
"""

import importlib

import pytest
import torch

import grouped_lora_ops as gl
from grouped_lora_ops import driver

from . import measure, results
from .workloads import named

CONTENDERS = ("ours",)
METHOD = "the CPU's time until a call returns, median of 600 calls"


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
    if not leaf.is_cuda:
        return
    implementation = importlib.import_module("grouped_lora_ops.ops.delta")._cuda
    implementation(*positional)
    found = implementation.table.get(driver.describe(positional))
    yield "the implementation", infer, lambda: implementation(*positional)
    yield "… the ordinary way", infer, lambda: implementation.__wrapped__(*positional)
    yield f"… describe ({'C' if driver._launcher else 'Python'})", infer, lambda: driver.describe(positional)
    if found is not None:
        made = found.allocate()
        stream = driver.stream_of(found.device)
        yield f"… {len(made)} allocations", infer, found.allocate
        yield "… all launches", infer, lambda: driver.run(found.call, stream, positional, made)


@pytest.mark.parametrize("case", named("wo_a-r16-S8-T1", "plain-r16-S8-T8", "wo_a-r16-S8-T256"), indirect=True, ids=lambda w: w.name)
def test_host(case, contender, benchmark, keep, device):
    gpu, figures = device.type == "cuda", {}
    for name, mode, call in pieces(case):
        with mode():
            call()
            sync = torch.cuda.synchronize if gpu else lambda: None
            figures[name] = measure.host_us(call, calls=200 if gpu else 1, rounds=3 if gpu else 1, sync=sync)[1]
    headline = next(iter(figures.values()))
    benchmark.pedantic(lambda: measure.advance(headline), rounds=1)
    pieces_us = {name: round(us, 3) for name, us in figures.items()}
    keep(results.row(case.w, "host", contender, headline, method=METHOD, pieces=pieces_us), case.w.peers)
    print(f"\n{case.w.name}: µs of the CPU a call" + "".join(f"\n  {us:8.2f}  {name}" for name, us in figures.items()))
