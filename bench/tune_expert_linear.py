"""Time launch configurations of `expert_linear` against `grouped_mm`'s base alone: `python -m bench.tune_expert_linear --out results.json`.

Every candidate must be exact on small integers (base and delta in float64, rounded once) before it is timed, and have the
default's bits on random ones. "base alone" is PyTorch's grouped_mm over rows that are sorted already; "no lora" our own
kernel without a delta; "mlp" a whole `expert_mlp` with both pairs (its plan made inside). With several slots candidates
are tiles of a slot ("slots …") or of an expert ("mixed …"), each with its own default, and "mlp, slots" and "mlp, mixed" the
layer with such tiles alone. Rows "act-…": gate and up with their activation in one launch, as `expert_mlp` runs
them, which must have the bits of the two launches of training. --tiny: anywhere, tiny.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from grouped_lora_ops import launch_experts as le
from grouped_lora_ops.ops import common, expert_cuda
from grouped_lora_ops.ops.expert_stages import Layer

from . import expert_workloads as workloads
from .contenders import grouped_mm
from .measure import timer_for
from .tune_experts import DEVICE, make_plan

DEFAULT, DEFAULT_ACT = le.linear, le.gate_up
TOKENS = (1, 8, 64, 256, 4096)


@dataclass(frozen=True)
class Product(workloads.ExpertWorkload):
    act: bool = False  # gate_up with its activation


def chosen(args) -> list[Product]:
    rows = [
        Product(f"{kind}-{model}-{projection}-r{rank}-S{slots}-T{tokens}", model, projection, tokens, rank, slots, act=kind == "act")
        for model in ("qwen3-30b", "dsv3")
        for kind, projection in (("linear", "gate_up"), ("linear", "down"), ("act", "gate_up"))
        for rank in (16, 64)
        for slots in (1, 4)
        for tokens in TOKENS
    ]
    rows = [w for w in rows if not args.k or any(k in w.name for k in args.k)]
    return [w.tiny() for w in rows] if args.tiny else rows


def tiles_of(rows: float, act: bool) -> list[tuple]:
    """(block_m, block_n, block_k, num_warps, num_stages, n_first); of act's two accumulators each has block_n columns."""
    tiles = [
        (16, 32, 128, 4, 5, True), (16, 64, 128, 4, 4, True), (16, 64, 128, 4, 5, False), (16, 64, 64, 4, 8, True),
        (16, 128, 64, 4, 6, True), (16, 128, 128, 4, 4, True), (16, 64, 256, 4, 3, True), (16, 32, 256, 4, 4, True),
    ]  # fmt: skip
    if rows >= 12:
        tiles += [(32, 64, 128, 4, 4, True), (32, 128, 64, 4, 4, True), (64, 64, 64, 4, 4, True), (64, 128, 64, 4, 4, True)]
    if rows >= 24:
        tiles = tiles[-4:] + [
            (64, 128, 64, 4, 3, False), (64, 256, 64, 8, 3, True), (64, 256, 64, 8, 4, False), (128, 128, 64, 8, 4, True),
            (128, 128, 64, 8, 3, False), (128, 128, 64, 4, 3, True), (128, 256, 64, 8, 3, True), (128, 256, 64, 8, 3, False),
        ]  # fmt: skip
    return [t for t in tiles if t[1] <= 128] + [(64, 128, 64, 8, 4, True), (128, 64, 64, 8, 4, True)] if act else tiles


def default_of(p: le.ExpertProblem, act: bool, mixed: bool) -> le.ExpertLinearConfig:
    """The default among tiles of one slot, or of an expert."""
    rows = le.rows_of_expert(p) if mixed else le.rows_each(p)
    return le._gate_up(p, rows, mixed) if act else le._linear(p, rows, False, mixed)


def candidates(p: le.ExpertProblem, act: bool) -> dict[str, le.ExpertLinearConfig]:
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "n_first")
    found = {"default": (DEFAULT_ACT if act else DEFAULT)(p)}
    ways = {"": (le.rows_each(p), False)}
    if p.mixed and le.needs_plan(p.routes):
        found["slots default"], found["mixed default"] = (default_of(p, act, mixed) for mixed in (False, True))
        found["mixed default, not fetched"] = replace(found["mixed default"], prefetch=False)
        ways = {"slots ": ways[""], "mixed ": (le.rows_of_expert(p), True)}
    for way, (rows, mixed) in ways.items():
        found.update({f"{way}{t}": le.linear_with(p, mixed=mixed, **dict(zip(names, t))) for t in tiles_of(rows, act)})
    return found


def tensors(w, seed: int | None) -> dict:
    """x, W, A, B: small integers for seed None."""
    make = workloads.integer_set if seed is None else workloads.random_set
    t = make(w, DEVICE, 0 if seed is None else seed)
    del t["base"]
    generator = torch.Generator(DEVICE).manual_seed(7)
    shape = (w.experts, w.N, w.D)
    if seed is None:
        t["weight"] = torch.randint(-2, 3, shape, device=DEVICE, dtype=torch.int8, generator=generator).to(w.dtype)
    else:
        t["weight"] = torch.randn(shape, device=DEVICE, dtype=w.dtype, generator=generator).mul_(w.D**-0.5)
    return t


def call(w, t: dict, shared: dict, plan, lora: bool = True):
    if w.act:
        layer = layer_of(w, t, shared, plan, lora)
        return layer.activated_at_once("expert_mlp", layer.x, layer.routing())
    a, b, scalings = (t["lora_a"], t["lora_b"], shared["scalings"]) if lora else (None, None, None)
    return expert_cuda.linear(t["x"], t["weight"], a, b, shared["expert_ids"], shared["adapter_ids"], scalings, None, None, None, plan)


def layer_of(w, t: dict, shared: dict, plan, lora: bool = True) -> Layer:
    """What gate and up need of a layer."""
    a, b, scalings = (t["lora_a"], t["lora_b"], shared["scalings"]) if lora else (None, None, None)
    down = t["x"].new_empty(1).expand(w.experts, w.D, w.N // 2)  # its sizes alone
    args = (t["x"], shared["expert_ids"], None, t["weight"], down, a, b, None, None, shared["adapter_ids"], scalings)
    return Layer(*args, None, None, "swiglu", None, "post_down", None, plan).prepared()


def use(config: le.ExpertLinearConfig | None) -> None:
    """For both products; None: the default."""
    le.linear = DEFAULT if config is None else lambda p, transposed=False: config
    le.gate_up = DEFAULT_ACT if config is None else lambda p: config
    common.configured.cache_clear()


def use_tiles(mixed: bool) -> None:
    le.linear, le.gate_up = (lambda p, transposed=False: default_of(p, False, mixed)), (lambda p: default_of(p, True, mixed))
    common.configured.cache_clear()


def exact(w, t: dict, shared: dict, plan) -> torch.Tensor:
    if w.act:
        use(None)
        layer = layer_of(w, t, shared, plan)
        to = layer.routing()
        return layer.activated("expert_mlp", layer.hidden("expert_mlp", to), to)
    ids = shared["expert_ids"].flatten().long()
    base = torch.zeros(w.M, w.N, dtype=torch.float64, device=DEVICE)
    for e in ids.unique().tolist():
        rows = (ids == e).nonzero()[:, 0]
        base[rows] = t["x"][rows if w.projection == "down" else rows // w.top_k].double() @ t["weight"][e].double().t()
    wide = (t[name].double() for name in ("x", "lora_a", "lora_b"))
    return workloads.float64_delta(w, *wide, base, shared).float().to(w.dtype)


def base_alone(w, t: dict, shared: dict):
    """grouped_mm over rows gathered and sorted before the clock starts."""
    ids = shared["expert_ids"].flatten().long()
    order = torch.argsort(ids, stable=True)
    rows = t["x"][order if w.projection == "down" else order // w.top_k].contiguous()
    ends = torch.searchsorted(ids[order], torch.arange(w.experts, device=DEVICE), right=True).to(torch.int32)
    return lambda: grouped_mm(rows, t["weight"].transpose(1, 2), ends)


def mlp_call(w):
    """A whole layer, for the model's down as well."""
    down = replace(w, projection="down")
    first, second = tensors(w, 1), tensors(down, 2)
    shared = workloads.shared_inputs(w, DEVICE)
    weights = torch.rand(w.T, w.top_k, device=DEVICE)
    factors = (first["lora_a"], first["lora_b"], second["lora_a"], second["lora_b"], shared["adapter_ids"], shared["scalings"])
    layer = (first["x"], shared["expert_ids"], weights, first["weight"], second["weight"], *factors,
             None, None, "swiglu", None, "post_down", None, None)  # fmt: skip
    return lambda: expert_cuda.mlp(*layer)


def problem_of(w) -> le.ExpertProblem:
    arch, sms = common._facts(torch.cuda.current_device()) if DEVICE.type == "cuda" else common.INTERPRETER
    return le.ExpertProblem(
        arch, sms, w.dtype.itemsize, w.M, w.experts, w.slots, w.groups, w.groups, w.D, w.N // w.groups, w.rank, w.slots > 1,
        w.top_k,
    )  # fmt: skip


def compile_some(tasks: list[tuple]) -> list[str]:
    """In a worker: one call of each candidate, on 8 experts: kernels know no sizes, only the tile and the alignment."""
    failed = []
    for w, label in tasks:
        config = candidates(problem_of(w), w.act)[label]
        few = replace(w, sizes=(*w.shape[:2], 8, 8), T=min(w.T, 64) if w.M <= le.ROUTE_LIMIT else 64)
        shared = workloads.shared_inputs(few, DEVICE)
        use(config)
        try:
            call(few, tensors(few, 1), shared, make_plan(few, shared) if le.needs_plan(few.M) else None)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{w.name} {label}: {type(error).__name__} {str(error)[:80]}")
    return failed


def precompile(rows: list, workers: int) -> None:
    tasks = {}
    for w in rows:
        for label, config in candidates(problem_of(w), w.act).items():
            key = (w.act, w.groups, w.rank, w.slots > 1, tuple((k, v) for k, v in asdict(config).items() if k != "tiles"))
            tasks.setdefault(key, (w, label))
    tasks = list(tasks.values())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failed in pool.map(compile_some, [tasks[i::workers] for i in range(workers)]):
            for line in failed:
                print("dropped:", line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-k", action="append", help="part of a workload's name; may be repeated")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    workload_rows, start = chosen(args), time.time()
    if args.tiny:
        le.ROUTE_LIMIT = 8  # so that plans are read
    if not args.tiny:
        precompile(workload_rows, args.workers)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    timer, results = timer_for(DEVICE), []
    for w in workload_rows:
        shared = workloads.shared_inputs(w, DEVICE)
        plan = make_plan(w, shared) if le.needs_plan(w.M) else None
        p = problem_of(w)
        integers = tensors(w, None)
        right = exact(w, integers, shared, plan)
        made, rows, bits = None, [], None
        for label, config in candidates(p, w.act).items():
            use(config)
            try:
                if not torch.equal(call(w, integers, shared, plan), right):
                    print(f"{w.name} {label}: WRONG, not timed", flush=True)
                    rows.append({"label": label, "wrong": True})
                    continue
                made = made or tensors(w, 1)
                got = call(w, made, shared, plan)
                bits = got if bits is None else bits
                us = timer.graph_us([lambda w=w, t=made, s=shared, q=plan: call(w, t, s, q)], rounds=args.rounds)
            except Exception as error:  # too much shared memory, a compiler limit: the candidate drops out
                print("skipped:", w.name, label, type(error).__name__, str(error)[:80], flush=True)
                continue
            rows.append({"label": label, "us": round(us, 2), "same_bits": torch.equal(got, bits)})
        use(None)
        integers = right = None
        alone = None
        if w.dtype == torch.bfloat16:
            try:
                alone = round(timer.graph_us([base_alone(w, made, shared)], rounds=args.rounds), 2)
            except RuntimeError as error:
                print("no grouped_mm:", w.name, str(error)[:80])
        ours = timer.graph_us([lambda w=w, t=made, s=shared: call(w, t, s, None, False)], rounds=args.rounds)
        whole = {}
        if w.act and w.model != "dsv3":
            for label, mixed in (("mlp", None), ("mlp, slots", False), ("mlp, mixed", True)):
                if mixed is None or (p.mixed and le.needs_plan(p.routes)):
                    use(None) if mixed is None else use_tiles(mixed)
                    whole[label] = round(timer.graph_us([mlp_call(w)], rounds=args.rounds), 2)
            use(None)
        timed = sorted((r for r in rows if "us" in r), key=lambda r: r["us"])
        print(f"{w.name}: grouped_mm base alone {alone}, no lora {ours:.1f}, {whole}, default", end=" ")
        print([(r["label"], r["us"]) for r in timed if "default" in r["label"]], "differ:", [r["label"] for r in timed if not r["same_bits"]][:4])
        for r in timed[: args.top]:
            print("   ", r["us"], r["label"], flush=True)
        results.append({"workload": w.name, "base_alone": alone, "no_lora": round(ours, 2), **whole, "rows": rows})
        args.out.write_text(json.dumps(results, indent=0))
        made = None
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
