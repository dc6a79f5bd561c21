"""Time launch configurations of `delta_` against each other: `python -m bench.tune --out results.json [-k wo_a-r16]`.

For every chosen workload each candidate is called through the op itself (launch.delta is replaced by the candidate),
compared with the default configuration's bits, then timed like the benchmarks: cold L2, graph replay, median. Kernels
are compiled beforehand by worker processes. The rules of `grouped_lora_ops/launch.py` and `launch_tables/` come from
these figures.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import time
from dataclasses import asdict
from pathlib import Path

import torch

from grouped_lora_ops import launch
from grouped_lora_ops.ops import common
from grouped_lora_ops.tune.candidates import CHOICE as DEFAULT
from grouped_lora_ops.tune.candidates import best_shrink, config_of, one_launch, rules, shrinks, use

from . import workloads
from .measure import GpuTimer, sets_for


def problem_of(w: workloads.Workload) -> launch.Problem:
    arch, sms = common._facts(torch.cuda.current_device())
    width = max(w.out_sizes) if w.out_sizes else w.N
    return launch.Problem(arch, sms, w.dtype.itemsize, w.T, w.G, w.D, width, w.rank, w.slots)


def candidates(p: launch.Problem, best: tuple[dict, bool] | None = None) -> dict[str, launch.DeltaConfig]:
    """Without `best`: the library's choice, every shrink with one expand, the fused kernels; with it: every expand behind it."""
    found = {} if best is not None else {"default": DEFAULT(p)}
    chosen = rules(p, best) if best is not None else rules(p) | one_launch(p, cuda=p.tokens > 16)
    return found | {label: config_of(rule, p) for label, rule in chosen.items()}


def call(w, t, shared, plan):
    torch.ops.grouped_lora.delta_(
        t["out"], t["x"], t["lora_a"], t["lora_b"], shared["adapter_ids"], shared["scalings"],
        out_sizes=shared["out_sizes"], ranks=shared["ranks"], plan=plan,
    )  # fmt: skip


def prepare(w, sets: int):
    device = torch.device("cuda")
    shared = workloads.shared_inputs(w, device)
    made = [workloads.random_set(w, device, seed) for seed in range(sets)]
    plan = torch.ops.grouped_lora.plan(shared["adapter_ids"], w.slots) if launch.needs_plan(w.T, w.slots) else None
    return shared, made, plan


def compile_some(names_and_labels: list[tuple[str, str]]) -> list[str]:
    """In a worker: call each candidate once, so that its kernels are in Triton's cache on disk."""
    failed = []
    for name, label in names_and_labels:
        w = workloads.named(name)[0]
        shared, made, plan = prepare(w, 1)
        p = problem_of(w)
        config = {**candidates(p), **candidates(p, shrinks(p)[0])}[label]
        use(config)
        try:
            call(w, made[0], shared, plan)
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory, a compiler limit: the candidate drops out
            failed.append(f"{name} {label}: {type(error).__name__} {str(error)[:80]}")
    return failed


def precompile(chosen, workers: int) -> None:
    tasks, seen = [], set()
    for w in chosen:
        p = problem_of(w)
        for label, config in {**candidates(p), **candidates(p, shrinks(p)[0])}.items():
            parts = []
            for part in (config.fused, config.shrink, config.expand):
                parts.append(None if part is None else tuple((k, v) for k, v in asdict(part).items() if k != "tiles"))
            key = (w.layout, w.rank, w.dtype, w.out_sizes, bool(w.true_ranks), w.slots == 1, w.slots, tuple(parts))
            if key not in seen:
                seen.add(key)
                tasks.append((w.name, label))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failed in pool.map(compile_some, [tasks[i::workers] for i in range(workers)]):
            for line in failed:
                print("dropped:", line, flush=True)


def measure(w, configs: dict, made: list, shared: dict, plan, timer: GpuTimer) -> list[dict]:
    first, bits, rows = made[0]["out"].clone(), None, []
    for label, config in configs.items():
        use(config)
        try:
            made[0]["out"].copy_(first)
            call(w, made[0], shared, plan)
            got = made[0]["out"].clone()
            bits = got if bits is None else bits
            same = torch.equal(got, bits)
            us = timer.graph_us([lambda t=t: call(w, t, shared, plan) for t in made], rounds=7)
        except Exception as error:
            print("skipped:", w.name, label, type(error).__name__, str(error)[:80], flush=True)
            continue
        rows.append({"label": label, "us": round(us, 2), "same_bits": same})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-k", action="append", help="part of a workload's name; may be repeated")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--top", type=int, default=3)
    args = parser.parse_args()
    chosen = [w for w in workloads.TARGETS if not args.k or any(k in w.name for k in args.k)]
    start = time.time()
    precompile(chosen, args.workers)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    timer = GpuTimer(torch.device("cuda"))
    results = []
    for w in chosen:
        shared, made, plan = prepare(w, sets_for(workloads.bytes_per_set(w)))
        p = problem_of(w)
        rows = measure(w, candidates(p), made, shared, plan, timer)
        best = best_shrink(p, {r["label"]: r["us"] for r in rows})
        if best is not None:
            rows += measure(w, candidates(p, best), made, shared, plan, timer)
        use(None)
        rows.sort(key=lambda r: r["us"])
        differ = [r["label"] for r in rows if not r["same_bits"]]
        peer = min(w.peers.values())
        print(f"{w.name}: floor {workloads.floor_us(w):.2f} bar {workloads.bar_us(w):.1f} peer {peer} default", end=" ")
        print([r["us"] for r in rows if r["label"] == "default"], "differ:", differ[:4])
        for r in rows[: args.top]:
            print("   ", r["us"], r["label"], flush=True)
        results.append({"workload": w.name, "rows": rows})
        args.out.write_text(json.dumps(results, indent=0))
        del made, shared
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
