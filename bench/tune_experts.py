"""Time launch configurations of `expert_delta` and `expert_plan`: `python -m bench.tune_experts --out results.json [-k T64]`.

For every chosen workload the default configuration must equal a float64 computation bit for bit on small integers
before anything is timed. Then each candidate is called through the op itself (launch_experts.delta is replaced by the
candidate), compared with the default's bits, and timed like the benchmarks: cold L2, graph replay, median. The plan is
made outside and timed by itself ("plan" rows); "with plan" is the default call that makes its own. Kernels are compiled
beforehand by worker processes. --tiny: the script itself, anywhere, at tiny sizes.
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

from grouped_lora_ops import launch_experts as le
from grouped_lora_ops.launch import has_pdl
from grouped_lora_ops.ops import common, prepared

from . import expert_workloads as workloads
from .measure import sets_for, timer_for

DEFAULT = le.delta
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def problem_of(w: workloads.ExpertWorkload) -> le.ExpertProblem:
    arch, sms = common._facts(torch.cuda.current_device()) if DEVICE.type == "cuda" else common.INTERPRETER
    return le.ExpertProblem(
        arch, sms, w.dtype.itemsize, w.M, w.experts, w.slots, w.groups, w.groups, w.D, w.N // w.groups, w.rank,
        top_k=w.top_k,
    )  # fmt: skip


def shrinks(p: le.ExpertProblem) -> list[dict]:
    columns, rows = le.rank_block(p.rank, p.itemsize) * p.a_groups, le.rows_each(p)
    tiles = [
        (16, 16, 128, 4, 4, True), (16, 32, 128, 4, 4, True), (16, 32, 128, 2, 4, True), (16, 64, 128, 4, 3, True),
        (16, 64, 64, 4, 5, True), (16, 32, 256, 4, 2, True), (16, 32, 128, 4, 4, False), (16, 64, 128, 4, 3, False),
        (16, 64, 128, 4, 4, False), (16, 64, 64, 4, 6, False), (16, 128, 128, 4, 3, False),
    ]  # fmt: skip
    if rows >= 24:
        tiles = [t for t in tiles if not t[5]] + [
            (32, 64, 128, 4, 3, False), (32, 64, 64, 4, 4, False), (64, 64, 64, 4, 3, False), (64, 64, 64, 4, 4, False),
            (64, 64, 128, 4, 2, False), (64, 64, 128, 8, 3, False), (64, 32, 64, 4, 4, False), (64, 128, 64, 8, 3, False),
        ]  # fmt: skip
    return [
        dict(block_m=m, block_c=c, block_k=k, num_warps=w, num_stages=s, split=split)
        for m, c, k, w, s, split in tiles
        if c <= columns and le.chunk_of(p.in_features) % k == 0
    ]


def expands(p: le.ExpertProblem) -> list[dict]:
    rows = le.rows_each(p)
    tiles = [
        (16, 32, 1, 4, 1), (16, 64, 1, 2, 1), (16, 64, 1, 4, 1), (16, 128, 1, 4, 1), (16, 128, 1, 8, 1), (16, 256, 1, 4, 1),
        (16, 128, 2, 4, 2), (16, 128, 4, 4, 3), (16, 128, 8, 4, 3), (16, 64, 4, 4, 4), (16, 256, 2, 4, 2),
    ]  # fmt: skip
    if rows >= 24:
        tiles += [
            (32, 128, 1, 4, 1), (32, 128, 4, 4, 3), (32, 128, 8, 4, 3), (64, 128, 2, 4, 2), (64, 64, 4, 4, 3), (64, 64, 8, 4, 4),
            (64, 128, 4, 4, 3), (64, 128, 8, 4, 3), (64, 128, 4, 8, 3), (64, 64, 16, 4, 3), (32, 256, 4, 8, 3), (32, 256, 8, 4, 2),
            (64, 128, 16, 8, 3), (32, 128, 16, 4, 3), (64, 256, 8, 8, 2), (128, 64, 16, 8, 3), (32, 64, 16, 4, 4),
        ]  # fmt: skip
    return [dict(block_m=m, block_n=n, loop=loop, num_warps=w, num_stages=s) for m, n, loop, w, s in tiles]


def fuseds(p: le.ExpertProblem) -> list[dict]:
    """Columns of h that a program holds: 128 at most; apart, gate's or up's alone. Each starts while the plan is made."""
    width = le.rank_block(p.rank, p.itemsize)
    if not le.needs_plan(p.routes) or p.rank > width:
        return []
    tiles = [le.LOW, le.LOW_DEEP, le.LOW_SHORT, (16, 64, 64, 4, 4, 3), (16, 128, 64, 4, 4, 2), (16, 128, 128, 2, 3, 3)]
    if le.rows_each(p) >= 24:
        tiles += [
            le.MIDDLE, le.TALL, le.TALL_DEEP, le.TALL_LONG, (32, 64, 128, 4, 3, 4), (32, 128, 64, 4, 3, 3), (32, 64, 64, 4, 3, 3),
            (64, 64, 64, 4, 3, 3), (32, 128, 128, 4, 2, 4), (32, 128, 128, 4, 3, 3), (64, 64, 128, 4, 2, 4), (64, 128, 64, 4, 3, 2),
            (64, 128, 64, 8, 3, 3), (64, 64, 128, 8, 2, 3), (64, 32, 64, 4, 4, 4),
        ]  # fmt: skip
    more = dict(pdl=has_pdl(p.arch), ahead=1024 if has_pdl(p.arch) and le.rows_each(p) < 24 else 0)
    return [
        dict(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s, n_stages=ns, apart=apart, **more)
        for m, n, k, w, s, ns in tiles
        for apart in ((False, True) if p.groups == 2 else (False,))
        if le.chunk_of(p.in_features) % k == 0 and width * (1 if apart else p.a_groups) <= 128
    ]


def two(p: le.ExpertProblem, shrink: dict, expand: dict) -> le.ExpertDeltaConfig:
    return le.ExpertDeltaConfig(None, le.shrink_with(p, **shrink), le.expand_with(p, **expand))


def middle(p: le.ExpertProblem) -> dict:
    return dict(block_m=64 if le.rows_each(p) >= 96 else 16, block_n=128, loop=4, num_warps=4, num_stages=3)


def candidates(p: le.ExpertProblem, best: dict | None = None) -> dict[str, le.ExpertDeltaConfig]:
    """Without `best`: every shrink with one expand, and the fused kernels; with it: every expand behind that shrink."""
    if best is not None:
        return {f"two {best} {e}": two(p, best, e) for e in expands(p)}
    found = {"default": DEFAULT(p), "default two": le.ExpertDeltaConfig(None, le.shrink(p), le.expand(p))}
    found.update({f"two {s} {middle(p)}": two(p, s, middle(p)) for s in shrinks(p)})
    found.update({f"fused {c}": le.ExpertDeltaConfig(le.fused_with(p, **c), None, None) for c in fuseds(p)})
    return found


def use(config: le.ExpertDeltaConfig | None) -> None:
    le.delta = DEFAULT if config is None else lambda p: config
    common.configured.cache_clear()
    prepared.forget()


def call(w, t: dict, shared: dict, plan):
    op = torch.ops.grouped_lora.expert_delta if DEVICE.type == "cuda" else _interpreted
    return op(t["x"], t["lora_a"], t["lora_b"], shared["expert_ids"], shared["adapter_ids"], shared["scalings"], t["base"], None, None, plan)


def _interpreted(*args):
    from grouped_lora_ops.ops import expert_cuda

    return expert_cuda.delta(*args)


def make_plan(w, shared: dict):
    from grouped_lora_ops.ops.expert_plan import build

    return build(shared["expert_ids"], shared["adapter_ids"], w.experts, w.slots)


def prepare(w, sets: int):
    shared = workloads.shared_inputs(w, DEVICE)
    plan = make_plan(w, shared) if le.needs_plan(w.M) else None
    return shared, [workloads.random_set(w, DEVICE, seed) for seed in range(sets)], plan


def compile_some(tasks: list[tuple]) -> list[str]:
    """In a worker: call each candidate once, so that its kernels are in Triton's cache on disk."""
    failed, ready = [], None
    for w, label in tasks:
        if ready is None or ready[0] != w:
            ready = None
            ready = (w, *prepare(w, 1))
        p = problem_of(w)
        config = {**candidates(p), **candidates(p, shrinks(p)[0])}[label]
        use(config)
        try:
            call(w, ready[2][0], ready[1], ready[3])
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory, a compiler limit: the candidate drops out
            failed.append(f"{w.name} {label}: {type(error).__name__} {str(error)[:80]}")
    return failed


def precompile(chosen: list, workers: int) -> None:
    tasks, seen = [], set()
    for w in chosen:
        p = problem_of(w)
        for label, config in {**candidates(p), **candidates(p, shrinks(p)[0])}.items():
            parts = [None if part is None else tuple((k, v) for k, v in asdict(part).items() if k != "tiles")
                     for part in (config.fused, config.shrink, config.expand)]  # fmt: skip
            key = (w.model, w.projection, w.rank, w.slots == 1, w.shared, w.dtype, tuple(parts))
            if key not in seen:
                seen.add(key)
                tasks.append((w, label))
    context = multiprocessing.get_context("spawn")
    size = -(-len(tasks) // workers)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failed in pool.map(compile_some, [tasks[i : i + size] for i in range(0, len(tasks), size)]):
            for line in failed:
                print("dropped:", line, flush=True)


def wrong(w) -> str | None:
    """What differs from the float64 answer, on small integers."""
    shared, t = workloads.shared_inputs(w, DEVICE), workloads.integer_set(w, DEVICE)
    use(None)
    got, want = call(w, t, shared, None), workloads.exact_delta(w, t, shared)
    return None if torch.equal(got, want) else f"{int((got != want).sum())} of {got.numel()} entries differ from the exact answer"


def measure(w, configs: dict, made: list, shared: dict, plan, timer, rounds: int) -> list[dict]:
    bits, rows = None, []
    for label, config in configs.items():
        use(config)
        try:
            got = call(w, made[0], shared, plan)
            bits = got if bits is None else bits
            same = torch.equal(got, bits)
            us = timer.graph_us([lambda t=t: call(w, t, shared, plan) for t in made], rounds=rounds)
        except Exception as error:
            print("skipped:", w.name, label, type(error).__name__, str(error)[:80], flush=True)
            continue
        rows.append({"label": label, "us": round(us, 2), "same_bits": same})
    return rows


def measure_plan(w, shared: dict, timer, rounds: int) -> dict:
    """The plan by itself, whether or not the op needs one at this size."""
    return {"us": round(timer.graph_us([lambda: make_plan(w, shared)] * 8, rounds=rounds), 2), "way": le.expert_plan(w.M, w.experts, w.slots).way}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-k", action="append", help="part of a workload's name; may be repeated")
    parser.add_argument("--extra", action="store_true", help="the workloads beyond the tables, too")
    parser.add_argument("--quick", action="store_true", help="the default configuration and the plan alone")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    chosen = [w for w in workloads.TARGETS + (workloads.EXTRA if args.extra else []) if not args.k or any(k in w.name for k in args.k)]
    if args.tiny:
        chosen = [w.tiny() for w in chosen]
    chosen.sort(key=lambda w: (w.model, w.projection, w.slots))  # neighbours share kernels and tensors
    start = time.time()
    if not args.quick and not args.tiny:
        precompile(chosen, args.workers)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    timer, results = timer_for(DEVICE), []
    for w in chosen:
        problem = wrong(w)
        if problem:
            print(f"{w.name}: WRONG, {problem}: not timed", flush=True)
            results.append({"workload": w.name, "wrong": problem})
            continue
        shared, made, plan = prepare(w, 1 if args.tiny else sets_for(workloads.bytes_per_set(w)))
        p = problem_of(w)
        defaults = {label: c for label, c in candidates(p).items() if label.startswith("default")}
        rows = measure(w, defaults if args.quick else candidates(p), made, shared, plan, timer, args.rounds)
        if not args.quick:
            found = [r for r in rows if r["label"].startswith("two")]
            if found:
                best = min(found, key=lambda r: r["us"])
                best = next(s for s in shrinks(p) if best["label"].startswith(f"two {s} "))
                rows += measure(w, candidates(p, best), made, shared, plan, timer, args.rounds)
        rows.sort(key=lambda r: r["us"])
        whole = measure(w, {"default": DEFAULT(p)}, made, shared, None, timer, args.rounds)[0]["us"]
        of_plan = measure_plan(w, shared, timer, args.rounds)
        default = [r["us"] for r in rows if r["label"] == "default"]
        differ = [r["label"] for r in rows if not r["same_bits"]]
        peer = min(w.peers.values(), default=None)
        print(
            f"{w.name}: floor {workloads.floor_us(w):.2f} bar {workloads.bar_us(w):.1f} peer {peer} default {default} "
            f"with plan {whole} plan {of_plan} differ: {differ[:4]}"
        )
        for r in rows[: args.top]:
            print("   ", r["us"], r["label"], flush=True)
        results.append({"workload": w.name, "floor": workloads.floor_us(w), "with_plan": whole, "plan": of_plan, "rows": rows})
        args.out.write_text(json.dumps(results, indent=0))
        del made, shared
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
