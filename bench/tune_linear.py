"""Time launch configurations of `linear` against PyTorch's base alone: `python -m bench.tune_linear --out results.json -k T8-`.

Every candidate must be exact on small integers before it is timed, and have the default's bits on random ones. The last
lines of a workload are its fastest candidates as `linear_with` takes them. --tiny: anywhere, at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

import grouped_lora_ops as glo
from grouped_lora_ops import launch, launch_linear
from grouped_lora_ops.launch_linear import MIXED, ROWS, SORTED, linear_with, scaled_with
from grouped_lora_ops.ops import common, prepared

from . import linear_workloads as workloads
from . import measure
from .bench_linear import base, exact, ours
from .workloads import shared_inputs

DEFAULT = launch_linear.linear
SCALED = launch_linear.scaled
NAMES = {ROWS: "rows", SORTED: "sorted", launch.PLAN: "plan", launch.SCAN: "scan", launch.SINGLE: "single"}
TILE = ("block_m", "block_n", "block_k", "num_warps", "num_stages")


def problem_of(w, device) -> launch.Problem:
    arch, sms = common._facts(device.index) if device.type == "cuda" else common.INTERPRETER
    return launch.Problem(arch, sms, w.dtype.itemsize, w.T, w.G, w.D, w.N, w.rank, w.slots)


def candidates(p: launch.Problem) -> dict[str, launch_linear.LinearConfig]:
    found = {"default": DEFAULT(p)}

    def add(mode, tile, **more):
        label = " ".join([NAMES[mode], str(tile), *map(str, more.items())])
        chosen = dict(zip(TILE, tile))
        found[label] = linear_with(p, mode, chosen.pop("block_m"), **chosen, **more)

    if p.tokens <= launch_linear.STREAM_TOKENS:
        m = max(16, launch.power_of_2(p.tokens))
        for n, k, stages in (
            (16, 256, 6), (16, 512, 4), (32, 128, 6), (32, 128, 8), (32, 256, 4), (32, 256, 6), (32, 512, 3), (64, 64, 8),
            (64, 128, 4), (64, 128, 6), (64, 256, 3), (128, 64, 6), (128, 128, 4),
        ):  # fmt: skip
            add(ROWS, (m, n, k, 4, stages))
        default = found["default"]
        found["default, no prefetch"] = replace(default, prefetch=False)
        found["default, 2 slot stages"] = replace(default, slot_stages=2)
        found["default, 4 slot stages"] = replace(default, slot_stages=4)
        found["default, 8 warps"] = replace(default, num_warps=8)
        found["default, h whole"] = replace(default, shrink=replace(launch.shrink(p), pdl=default.pdl))
        return found
    by_slot = launch.PLAN if p.tokens > launch.SCAN_TOKENS else launch.SCAN
    for mode in (ROWS, SORTED, by_slot) if p.slots > 1 else (ROWS, launch.SINGLE):
        for group in (4, 8, 16):
            add(mode, (128, 128, 64, 8, 4), tile_group=group)
        for tile in ((64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3), (64, 256, 64, 4, 4)):
            add(mode, tile)
        if mode not in MIXED:
            for group in (1, 2, 4, 8, 16):
                add(mode, (128, 256, 64, 8, 3), tile_group=group)
            for tile in ((64, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 32, 8, 5)):
                add(mode, tile)
    return found


def scaled_candidates(p: launch.Problem) -> dict[str, launch_linear.LinearConfig]:
    """The same for an e4m3 weight, whose steps are 128 columns of D."""
    found = {"default": SCALED(p)}

    def add(mode, block_m, block_n, warps, stages, **more):
        label = " ".join([NAMES[mode], str((block_m, block_n, warps, stages)), *map(str, more.items())])
        found[label] = scaled_with(p, mode, block_m, block_n=block_n, num_warps=warps, num_stages=stages, **more)

    if p.tokens <= launch_linear.STREAM_TOKENS:
        m = max(16, launch.power_of_2(p.tokens))
        for height in sorted({m, 64}):
            for n, warps, stages in (
                (16, 4, 6), (16, 4, 12), (32, 2, 8), (32, 4, 6), (32, 4, 8), (32, 4, 16), (32, 8, 12), (64, 4, 6), (64, 4, 12), (64, 8, 8),
                (128, 4, 4), (128, 8, 6),
            ):  # fmt: skip
                add(ROWS, height, n, warps, stages)
        found["default, h whole"] = replace(found["default"], shrink=replace(launch.shrink(p), pdl=found["default"].pdl))
        return found
    by_slot = launch.PLAN if p.tokens > launch.SCAN_TOKENS else launch.SCAN
    for mode in (ROWS, SORTED, by_slot) if p.slots > 1 else (ROWS, launch.SINGLE):
        for tile in (
            (64, 64, 4, 4), (64, 64, 8, 4), (64, 128, 4, 4), (64, 128, 8, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4),
            (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 2),
        ):  # fmt: skip
            add(mode, *tile)
        for group in (1, 4, 16):
            add(mode, 128, 128, 8, 3, tile_group=group)
    return found


def use(config: launch_linear.LinearConfig | None) -> None:
    launch_linear.linear = DEFAULT if config is None else lambda p, transposed=False, fp16=False: config
    launch_linear.scaled = SCALED if config is None else launch_linear.linear
    common.configured.cache_clear()
    prepared.forget()


def tuned(w, device, timer, rounds: int, tiny: bool) -> dict:
    shared, rows, bits = shared_inputs(w, device), [], None
    plan = glo.plan(shared["adapter_ids"], w.slots)
    way = ours(w, shared, plan)
    integers = workloads.integer_set(w, device)
    right = exact(w, shared, integers)
    count = measure.sets_for(workloads.bytes_per_set(w), most=2 if tiny else 8)
    sets = [workloads.random_set(w, device, seed) for seed in range(count)]
    problem = problem_of(w, device)
    in_tiles = w.scaled and (w.scale == torch.float32 or not launch_linear.dequantizes(problem))
    choices = (scaled_candidates if in_tiles else candidates)(problem)
    for label, config in choices.items():
        use(config)
        try:
            if not torch.equal(way(integers), right):
                rows.append({"label": label, "wrong": True})
                print(f"{w.name} {label}: WRONG, not timed", flush=True)
                continue
            got = way(sets[0])
            bits = got if bits is None else bits
            us = timer.graph_us([lambda t=t: way(t) for t in sets], rounds=rounds)
        except Exception as error:  # too much shared memory, a compiler limit: the candidate drops out
            print("skipped:", w.name, label, type(error).__name__, str(error)[:80], flush=True)
            continue
        rows.append({"label": label, "us": round(us, 2), "same_bits": torch.equal(got, bits)})
    use(None)
    alone = timer.graph_us([lambda t=t: base(t) for t in sets], rounds=rounds)
    return {"workload": w.name, "base_alone": round(alone, 2), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-k", action="append", help="part of a workload's name (plus a dash); may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    timer, results = measure.timer_for(device), []
    for w in workloads.LINEAR:
        if args.k and not any(k in f"{w.name}-" for k in args.k):
            continue
        results.append(found := tuned(w.tiny() if args.tiny else w, device, timer, args.rounds, args.tiny))
        args.out.write_text(json.dumps(results, indent=0))
        timed = sorted((r for r in found["rows"] if "us" in r), key=lambda r: r["us"])
        other = [r["label"] for r in timed if not r["same_bits"]]
        print(f"{w.name}: base alone {found['base_alone']}, default", [r["us"] for r in timed if r["label"] == "default"], end=" ")
        print("other bits:", other[:4])
        for r in timed[: args.top]:
            print("   ", r["us"], r["label"], flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
