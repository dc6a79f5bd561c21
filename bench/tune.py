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
from grouped_lora_ops.ops import common, prepared

from . import workloads
from .measure import GpuTimer, sets_for

DEFAULT = launch.delta


def problem_of(w: workloads.Workload) -> launch.Problem:
    arch, sms = common._facts(torch.cuda.current_device())
    width = max(w.out_sizes) if w.out_sizes else w.N
    return launch.Problem(arch, sms, w.dtype.itemsize, w.T, w.G, w.D, width, w.rank, w.slots)


def two(p, shrink: dict, expand: dict, split: bool) -> launch.DeltaConfig:
    pdl = launch.has_pdl(p.arch)
    first = launch._retile(replace(launch.shrink(p, split=split), pdl=pdl), p, shrink)
    return launch.DeltaConfig(None, first, launch._retile(launch.expand(p, pdl=pdl), p, expand))


def shrinks(p: launch.Problem) -> list[tuple[dict, bool]]:
    """(changes, split over D) to try."""
    block = launch.rank_block(p.rank, p.itemsize)
    rows = p.tokens / min(p.tokens, p.slots)
    if p.tokens <= 64:
        tiles = (
            (16, 128, 2, 4), (16, 128, 4, 4), (16, 64, 2, 8), (32, 128, 2, 4), (32, 128, 4, 4), (64, 128, 4, 4),
            (64, 128, 8, 4), (64, 64, 4, 6), (64, 64, 4, 8),
        )  # fmt: skip
        return [(dict(block_m=16, block_r=r, block_k=k, num_warps=w, num_stages=s), True) for r, k, w, s in tiles if r <= block]
    tiles = (
        (16, 64, 4, 6, True), (16, 128, 4, 4, True), (32, 64, 4, 5, True), (32, 128, 4, 3, True), (64, 64, 4, 3, True), (64, 64, 4, 4, True),
        (64, 128, 4, 2, True), (128, 64, 4, 3, True), (128, 64, 8, 4, True), (128, 64, 8, 3, True), (16, 128, 4, 5, False), (32, 128, 4, 3, False),
        (32, 128, 4, 4, False), (64, 64, 4, 5, False), (64, 128, 4, 3, False), (128, 64, 8, 4, False), (128, 64, 4, 3, False),
    )  # fmt: skip
    return [
        (dict(block_m=m, block_r=block, block_k=k, num_warps=w, num_stages=s), split)
        for m, k, w, s, split in tiles
        if m <= max(16, 2 * rows) and not (p.tokens >= 8192 and m == 16)
    ]


def expands(p: launch.Problem) -> list[dict]:
    rows = p.tokens / min(p.tokens, p.slots)
    if p.tokens <= 64:
        tiles = (
            (16, 32, 1, 1, 1), (16, 32, 2, 1, 1), (16, 64, 2, 1, 1), (16, 64, 4, 1, 1), (16, 128, 4, 1, 1),
            (16, 128, 8, 1, 1), (16, 128, 4, 2, 2), (16, 128, 4, 4, 3),
        )  # fmt: skip
    else:
        tiles = (
            (16, 128, 4, 1, 1), (16, 128, 4, 4, 3), (16, 128, 4, 8, 3), (32, 128, 4, 1, 1), (32, 128, 4, 2, 2),
            (32, 128, 4, 4, 3), (32, 128, 4, 8, 3), (64, 128, 4, 1, 1), (64, 128, 4, 2, 2), (64, 128, 4, 4, 3),
            (64, 64, 4, 8, 4), (64, 128, 4, 8, 3), (128, 64, 8, 8, 3), (128, 128, 8, 4, 2), (128, 64, 4, 8, 3),
            (128, 128, 8, 8, 3),
        )  # fmt: skip
    return [
        dict(block_m=m, block_n=n, num_warps=w, loop=loop, num_stages=s)
        for m, n, w, loop, s in tiles
        if m <= max(16, 2 * rows)
    ]


def fuseds(p: launch.Problem) -> list[dict]:
    if p.tokens < 1024 or p.rank > 128:
        return []
    rows = p.tokens / min(p.tokens, p.slots)
    tiles = (
        (16, 128, 128, 4, 4, 3), (16, 128, 128, 4, 3, 4), (32, 128, 128, 4, 3, 3), (32, 64, 128, 4, 3, 4),
        (64, 64, 64, 4, 4, 3), (64, 64, 64, 4, 4, 4), (64, 128, 64, 4, 4, 3), (64, 64, 128, 4, 3, 4),
        (128, 64, 64, 8, 3, 3), (128, 64, 64, 4, 3, 3), (128, 32, 64, 4, 3, 4), (64, 32, 64, 4, 4, 4),
        (32, 64, 128, 4, 2, 4),
    )  # fmt: skip
    return [
        dict(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s, n_stages=ns)
        for m, n, k, w, s, ns in tiles
        if m <= 2 * rows
    ]


def candidates(p: launch.Problem, best: tuple[dict, bool] | None = None) -> dict[str, launch.DeltaConfig]:
    """Without `best`: every shrink with one expand, and the fused kernels; with it: every expand behind that shrink."""
    if best is not None:
        return {f"two {best} {e}": two(p, best[0], e, best[1]) for e in expands(p)}
    middle = expands(p)[min(5, len(expands(p)) - 1)]
    found = {"default": DEFAULT(p)}
    found.update({f"two {s} {middle}": two(p, s[0], middle, s[1]) for s in shrinks(p)})
    for c in fuseds(p):
        c = dict(c)
        label = f"fused {c}"
        found[label] = launch.DeltaConfig(launch.fused(p, c.pop("block_m"), **c), None, None)
    return found


def use(config: launch.DeltaConfig | None) -> None:
    """Make the op take config (None: its own choice); what it remembers of an earlier choice goes."""
    launch.delta = DEFAULT if config is None else lambda p: config
    common.configured.cache_clear()
    prepared.forget()


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
        best = min((r for r in rows if r["label"].startswith("two")), key=lambda r: r["us"])
        best = next(s for s in shrinks(p) if best["label"].startswith(f"two {s} "))
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
