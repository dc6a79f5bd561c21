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
from dataclasses import asdict, replace
from pathlib import Path

import torch

from grouped_lora_ops import launch
from grouped_lora_ops.ops import common

from . import workloads
from .measure import GpuTimer, sets_for

DEFAULT = launch.delta


def problem_of(w: workloads.Workload) -> launch.Problem:
    arch, sms = common._facts(torch.cuda.current_device())
    width = max(w.out_sizes) if w.out_sizes else w.N
    return launch.Problem(arch, sms, w.dtype.itemsize, w.T, w.G, w.D, width, w.rank, w.slots)


def two(p, shrink: dict, expand: dict, split: bool, pdl: bool = True) -> launch.DeltaConfig:
    shrink, expand = dict(shrink), dict(expand)
    first = replace(launch.shrink(p, split=split, block_m=shrink.pop("block_m", None)), pdl=pdl, **shrink)
    second = replace(launch.expand(p, block_m=expand.pop("block_m", None), pdl=pdl), **expand)
    return launch.DeltaConfig(None, first, second)


def candidates(p: launch.Problem) -> dict[str, launch.DeltaConfig]:
    found = {"default": DEFAULT(p)}
    block = launch.rank_block(p.rank)
    if p.tokens <= 64:
        shrinks = [
            dict(block_r=br, block_k=bk, num_warps=w, num_stages=s)
            for br, bk, w, s in (
                (16, 128, 2, 4), (16, 128, 4, 4), (16, 64, 2, 8), (32, 128, 2, 4), (32, 128, 4, 4), (64, 128, 4, 4), (64, 128, 8, 4), (64, 64, 4, 6),
            )
            if br <= block
        ]  # fmt: skip
        expands = [dict(block_n=n, num_warps=w) for n, w in ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))]
        for s in shrinks:
            found[f"split {s}"] = two(p, s, expands[3], True)
        for e in expands:
            found[f"split-e {e}"] = two(p, shrinks[-1] if block < 64 else shrinks[5], e, True)
        found["split no pdl"] = two(p, shrinks[1], expands[3], True, pdl=False)
    rows = p.tokens / min(p.tokens, p.slots)
    if p.tokens >= 64:
        sizes = [bm for bm in (16, 32, 64, 128) if bm <= 2 * rows or bm == 16]
        first = {
            (16, True): dict(block_m=16, block_r=block, block_k=64, num_warps=4, num_stages=6),
            (32, True): dict(block_m=32, block_r=block, block_k=64, num_warps=4, num_stages=5),
            (64, True): dict(block_m=64, block_r=block, block_k=64, num_warps=4, num_stages=4),
            (128, True): dict(block_m=128, block_r=block, block_k=64, num_warps=8 if block > 32 else 4, num_stages=3),
            (16, False): dict(block_m=16, block_r=block, block_k=128, num_warps=4, num_stages=5),
            (64, False): dict(block_m=64, block_r=block, block_k=64, num_warps=4, num_stages=5),
        }  # fmt: skip
        second = [
            dict(block_m=16, block_n=128, loop=1), dict(block_m=16, block_n=128, loop=4, num_stages=3),
            dict(block_m=16, block_n=64, loop=8, num_stages=4), dict(block_m=32, block_n=128, loop=2, num_stages=2),
            dict(block_m=32, block_n=128, loop=4, num_stages=3), dict(block_m=64, block_n=64, loop=4, num_stages=3),
            dict(block_m=64, block_n=64, loop=8, num_stages=4), dict(block_m=64, block_n=128, loop=4, num_stages=3),
            dict(block_m=64, block_n=64, loop=16, num_stages=4),
        ]  # fmt: skip
        for (bm, split), s in first.items():
            if bm in sizes and (p.tokens < 8192 or bm > 16):
                for e in second if (bm == 64 and split) else second[4:8] if bm > 16 else second[:4]:
                    if e["block_m"] in sizes:
                        found[f"{'split' if split else 'whole'} {s} {e}"] = two(p, s, e, split)
    if p.tokens >= 1024:
        for bm, bn, bk, w, st, ns in (
            (16, 128, 128, 4, 4, 3), (16, 128, 128, 4, 3, 4), (32, 128, 128, 4, 3, 3), (32, 64, 128, 4, 3, 4),
            (64, 64, 64, 4, 4, 3), (64, 64, 64, 4, 4, 4), (64, 128, 64, 4, 4, 3), (64, 128, 64, 4, 5, 4), (64, 64, 128, 4, 3, 4),
            (128, 64, 64, 8, 3, 3), (128, 64, 64, 4, 3, 3), (128, 128, 64, 8, 4, 3), (128, 64, 64, 4, 4, 4),
        ):  # fmt: skip
            if bm <= 2 * rows:
                c = dict(block_n=bn, block_k=bk, num_warps=w, num_stages=st, n_stages=ns)
                found[f"fused bm={bm} {c}"] = launch.DeltaConfig(launch.fused(p, bm, **c), None, None)
    return found


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
        config = candidates(problem_of(w))[label]
        launch.delta = lambda p, config=config: config
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
        for label, config in candidates(p).items():
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
        first = made[0]["out"].clone()
        rows, bits = [], None
        for label, config in candidates(problem_of(w)).items():
            launch.delta = lambda p, config=config: config
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
            for t in made[1:]:
                t["out"].zero_()
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
