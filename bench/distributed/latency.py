"""What wo_a's delta costs a rank of two, beside PyTorch's own products and sglang's kernels."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
import torch.distributed as dist

from .. import measure, results
from ..workloads import Workload
from .run import Run
from .wo_a import V4_RANKS

LATENCY = "latency"


def shares() -> list[Workload]:
    """What a rank of two runs: 4 of 8 groups, two adapters of different rank, a third of the rows without one."""
    shape = dict(D=4096, N=1024, G=4, layout="grouped", rank=max(V4_RANKS), slots=2, true_ranks=V4_RANKS, mix="some")
    return [Workload(f"tp2-wo_a-r{max(V4_RANKS)}-S2-T{tokens}", tokens, **shape) for tokens in (8, 8192)]


def latency(run: Run) -> list[dict]:
    """Rows of every contender, the slower rank's figure in each."""
    from .. import contenders as who
    from ..conftest import Case, _right_ones, shortlist

    timer, rows = measure.timer_for(run.device), []
    for w in shares():
        w = w.tiny() if run.tiny else w
        case = Case(w, "delta", run.device, run.tiny)
        run.check(LATENCY, f"{w.name}: ours has the reference's bits on small integers", case.mismatch is None)
        wrong: list = [None, None]
        dist.all_gather_object(wrong, case.mismatch, group=run.group)
        if any(wrong):  # no figure from a wrong kernel, whichever rank it ran on
            print(f"rank {run.rank}: {w.name}: {case.mismatch}", flush=True)
            continue
        sets = case.timed.sets
        ways: dict[str, dict] = {"ours": who.variants("delta", "ours", case.timed)}
        ways["torch"], _ = _right_ones(case, "torch", who.variants("delta", "torch", case.timed))
        one = who.Inputs(replace(w, slots=1, mix="uniform"), sets, case.shared)
        ways["torch_bmm"] = {"bmm": who.variants("delta", "torch", one)["bmm"]}
        weights = [torch.randn(w.G, w.D, w.N, device=run.device, dtype=w.dtype) for _ in sets]  # cold, as a layer finds its own
        ways["base_bmm"] = {"": [lambda t=t, v=v: torch.bmm(t["x"].transpose(0, 1), v) for t, v in zip(sets, weights)]}
        dropped: dict = {}
        try:
            ways["sglang"], dropped = _right_ones(case, "sglang", who.variants("delta", "sglang", case.timed))
        except who.Unavailable as reason:
            if run.rank == 0:
                print(f"  sglang: {reason}", flush=True)
        for contender, found in ways.items():
            tried = shortlist(timer, found, dropped if contender == "sglang" else None)
            names: list = [None, None]  # ranks time the same variant: the one that rank 0 found best
            best = min(tried, key=tried.__getitem__) if tried else next(iter(found), None)
            dist.all_gather_object(names, best, group=run.group)
            there: list = [None, None]
            dist.all_gather_object(there, names[0] in found, group=run.group)
            if not all(there):
                if run.rank == 0:
                    print(f"  {w.name}: {contender} has no way that works on both ranks {dropped or ''}", flush=True)
                continue
            round_us = timer.graph(found[names[0]])
            dist.barrier(group=run.group)
            round_us()
            times: list = [None, None]
            dist.all_gather_object(times, sorted(round_us() for _ in range(measure.ROUNDS)), group=run.group)
            both = [statistics.median(t) for t in times]
            slower = times[both.index(max(both))]
            more = dict(ranks=list(w.true_ranks), variant=names[0], variants=tried, us_by_rank=[round(us, 3) for us in both], min_us=slower[0])
            more |= dict(zip(("q1_us", "q3_us"), statistics.quantiles(slower, n=4)[::2]))
            more |= {"dropped": dropped} if contender == "sglang" else {}
            if rows and rows[-1]["workload"] == w.name:
                ours = next(r for r in rows if r["workload"] == w.name)
                more["times_ours"] = max(both) / ours["us"]
            rows.append(results.row(w, "delta", contender, max(both), **more))
            del round_us
        if run.rank == 0:
            figures = [f"{r['contender']} {r['us']}" for r in rows if r["workload"] == w.name]
            print(f"  {w.name}: {', '.join(figures)} µs", flush=True)
        del case, sets, ways, one, weights
        if run.cuda:
            torch.cuda.empty_cache()
    return rows
