"""Call our op once on each workload of the suites, in several processes, so that no suite compiles while it is timed.

    python -m bench.once [--suites delta,expert_mlp] [--workers 16]     compile what the suites (and --few) will launch
    python -m bench.once --few                                          few calls in this process, for compute-sanitizer

The first form keeps one expert's memory for all experts and slots (strides of 0 or of a row, which are aligned as real ones are):
launch choices depend on sizes, kernels on alignment, neither on what is read. --few has real buffers, and first checks every op on
small integers. The exit status is 1 where a call raised or was wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import grouped_lora_ops as glo
from grouped_lora_ops import _builds, cuda, selfcheck

from . import contenders as who
from . import (
    curve_workloads,
    expert_contenders,
    expert_linear_workloads,
    expert_train_workloads,
    expert_workloads,
    linear_workloads,
    workloads,
)

FEW = {
    "delta": (
        "wo_a-r16-S8-T1",
        "wo_a-r16-S2-T8",
        "wo_a-r64-S1-T1",
        "wo_a-r64-S8-T64",
        "plain-r16-S64-T64",
        "extra-odd-r24-S8-T256",
    ),
    "plan": ("plan-S8-T512", "plan-S64-T1024"),
    "linear": ("wo_a_g4-r16-S8-T8", "plain-r64-S8-T64"),
    "expert_delta": ("qwen3-30b-gate_up-r32-S4-T8", "qwen3-30b-down-r32-S4-T64"),
    "expert_linear": ("qwen3-30b-down-r16-S4-T8", "qwen3-30b-gate_up-r64-S4-T64"),
    "expert_mlp": ("qwen3-30b-r16-S4-T8",),
}


def expanded(shape: tuple[int, ...], w, device: torch.device, whole: bool) -> Tensor:
    """A tensor of zeros; what has a matrix for each expert, or slot and expert, keeps one of them, unless `whole`: experts' weights lie
    a row apart, for csrc/linear.cu takes no stride of 0 there."""
    if not whole and len(shape) == 3:
        experts, rows, columns = shape
        return torch.zeros(rows + experts - 1, columns, dtype=w.dtype, device=device).as_strided(shape, (columns, columns, 1))
    lead = 0 if whole or len(shape) < 3 else 2
    return torch.zeros((1,) * lead + shape[lead:], dtype=w.dtype, device=device).expand(shape)


def dense(op: str) -> Callable:
    def call(w, device, whole):
        shared = workloads.shared_inputs(w, device)
        t = {"adapter_ids": shared["adapter_ids"]} if op == "plan" else workloads.random_set(w, device, 0)
        plan = glo.plan(shared["adapter_ids"], w.slots) if w.T >= who.PLAN_FROM and op != "plan" else None
        inputs = who.Inputs(w, [t], shared, plan)
        if op == "train":
            with_gradients(who.training_variants("ours", inputs)[""], [t[n] for n in ("x", "lora_a", "lora_b", "out")])
        else:
            who.variants(op, "ours", inputs)[""][0]()

    return call


def curve(w, device, whole):
    shared, t = workloads.shared_inputs(w, device), workloads.random_set(w, device, 0)
    for plan in (None, glo.plan(shared["adapter_ids"], w.slots)):
        who.variants("delta", "ours", who.Inputs(w, [t], shared, plan))[""][0]()


def linear(w, device, whole):
    from . import bench_linear

    shared, t = workloads.shared_inputs(w, device), linear_workloads.random_set(w, device, 0)
    for plan in (None, glo.plan(shared["adapter_ids"], w.slots)):
        bench_linear.ours(w, shared, plan)(t)
        bench_linear.apart(w, shared, plan)(t)
    bench_linear.parent(w, shared)(t)


def expert_tensors(w, device, whole) -> list[Tensor]:
    shapes = expert_workloads.shapes(w)
    return [expanded(shapes[name], w, device, whole) for name in ("x", "lora_a", "lora_b", "base")]


def expert_delta(w, device, whole):
    from . import bench_expert_delta

    shared, tensors = expert_workloads.shared_inputs(w, device), expert_tensors(w, device, whole)
    for plan in (None, glo.expert_plan(shared["expert_ids"], shared["adapter_ids"], w.experts, w.slots)):
        bench_expert_delta.ours(w, shared, plan)(*tensors)


def expert_train(w, device, whole):
    from . import expert_train_contenders

    layer = w.projection == "mlp"
    shapes = (expert_linear_workloads if layer else expert_workloads).shapes(w)
    made = {name: expanded(shape, w, device, whole) for name, shape in shapes.items()}
    t = expert_train_workloads.with_router_weights(w, made, torch.zeros(w.T, w.top_k, device=device))
    shared, grad = expert_workloads.shared_inputs(w, device), expert_train_workloads.grad_of(w, device)
    for plan in (None, glo.expert_plan(shared["expert_ids"], shared["adapter_ids"], w.experts, w.slots)):
        expert_train_contenders.our_way(w, shared, plan).step(t, grad)()


def expert_layer(op: str) -> Callable:
    def call(w, device, whole):
        shared = expert_linear_workloads.shared_inputs(w, device)
        t = {name: expanded(shape, w, device, whole) for name, shape in expert_linear_workloads.shapes(w).items()}
        plan = glo.expert_plan(shared["expert_ids"], shared["adapter_ids"], w.experts, w.slots)
        for lora, given in ((True, None), (True, plan), (False, None)):
            expert_contenders.ours(op, w, shared, lora, given)(t)

    return call


def with_gradients(forward: Callable, tensors: list[Tensor]) -> None:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = forward(*leaves)
    torch.autograd.grad(y, leaves, torch.ones_like(y))


SKEWED = [*expert_workloads.SKEWED, *(twin for w in expert_workloads.SKEWED for twin, _ in expert_workloads.twins(w))]
SUITES: dict[str, list[tuple[list, Callable]]] = {  # by the suite's file: bench_<name>.py
    "delta": [(workloads.DENSE, dense("delta"))],
    "curve": [(curve_workloads.CURVE, curve)],
    "shrink": [(workloads.HALVES, dense("shrink"))],
    "expand": [(workloads.HALVES, dense("expand"))],
    "plan": [(workloads.PLANS, dense("plan"))],
    "wgrad": [(workloads.TRAINING, dense("train"))],
    "linear": [(linear_workloads.LINEAR, linear)],
    "tax": [(linear_workloads.TAX, linear)],
    "expert_delta": [(expert_workloads.EXPERTS + SKEWED, expert_delta)],
    "expert_train": [(expert_train_workloads.TRAINING, expert_train)],
    "expert_linear": [(expert_linear_workloads.EXPERT_LINEAR, expert_layer("expert_linear"))],
    "expert_mlp": [(expert_linear_workloads.EXPERT_MLP, expert_layer("expert_mlp"))],
}


def tasks(suites: list[str], tiny: bool = False) -> list[tuple[str, int, int, bool]]:
    """(suite, part, workload, tiny) of each call; neighbours are far apart in their suite, so that processes do not compile the same."""
    every = [
        (suite, part, number, tiny)
        for suite in suites
        for part, (rows, _) in enumerate(SUITES[suite])
        for number in range(len(rows))
    ]
    return sorted(every, key=lambda task: (task[2] * 37 % 101, task))


def tasks_of_few(tiny: bool) -> list[tuple[str, int, int, bool]]:
    rows = {suite: [w.name for w in SUITES[suite][0][0]] for suite in FEW}
    return [(suite, 0, rows[suite].index(name), tiny) for suite, names in FEW.items() for name in names]


def call_once(task: tuple[str, int, int, bool], whole: bool = False) -> str | None:
    """What went wrong, else None."""
    suite, part, number, tiny = task
    rows, call = SUITES[suite][part]
    w = rows[number].tiny() if tiny else rows[number]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        call(w, device, whole)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:
        return f"{suite} {w.name}: {type(error).__name__}: {str(error)[:200]}"
    return None


def load(stem: str) -> None:
    """csrc/<stem>.cu, into the cache on disk."""
    cuda.module("once", stem, torch.cuda.current_device() if torch.cuda.is_available() else None)


def few(tiny: bool) -> list[str]:
    """Every op's check on small integers, then the workloads of FEW with real buffers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = [f"{found.op}: {found.wrong}" for found in selfcheck.run(device) if found.wrong]
    for task in tasks_of_few(tiny):
        suite, part, number, _ = task
        print(suite, SUITES[suite][part][0][number].name, flush=True)
        failed += filter(None, [call_once(task, whole=True)])
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default=",".join(SUITES), help="comma-separated, of: " + ", ".join(SUITES))
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--few", action="store_true", help="few calls, in this process")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, anywhere")
    options = parser.parse_args()
    suites = options.suites.split(",")
    if unknown := sorted(set(suites) - set(SUITES)):
        parser.error(f"--suites: unknown {', '.join(unknown)}")
    start = time.monotonic()
    if options.few:
        failed, count = few(options.tiny), sum(map(len, FEW.values()))
    else:
        todo = list(dict.fromkeys(tasks(suites, options.tiny) + tasks_of_few(options.tiny)))
        failed, count, last = [], len(todo), start
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
            list(pool.map(load, _builds.stems(_builds.sources(cuda.PACKAGE))))  # else each process compiles csrc for itself
            for number, wrong in enumerate(pool.map(call_once, todo), 1):
                failed += [wrong] if wrong else []
                if time.monotonic() - last > 10:
                    last = time.monotonic()
                    print(f"{number} of {count} after {last - start:.0f} s", flush=True)
    for line in failed:
        print("FAILED", line)
    print(f"{count} workloads called in {time.monotonic() - start:.0f} s, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
