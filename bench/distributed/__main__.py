"""Two GPUs: what tensor and expert parallelism must get right, and what a rank's share of DeepSeek-V4's wo_a costs.

    torchrun --nproc-per-node 2 -m bench.distributed --out FILE.json [--peer-path DIR]
    torchrun --nproc-per-node 2 -m bench.distributed --out FILE.json --tiny     small sizes; gloo where there are no two GPUs

Every check compares a rank with the unsharded computation on its own device (a module for each part). One table at the end;
exit status 1 if anything in it is wrong. An exception on one rank ends both, and a collective that waits for a rank that is
gone ends with the process group's timeout.

FILE.json is as `bench/results.py` says, with "link" (nvidia-smi topo -m), "wo_a" and "checks" beside the rows. us is the
slower rank's; us_by_rank has both. Contenders: ours; torch, its best way of several; torch_bmm, two batched products as if all
rows had one adapter; base_bmm, the base product of the same shape; sglang, its best kernel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .. import measure, results
from .experts import experts
from .failing import failing_rank
from .latency import LATENCY, latency
from .layers import column_and_row_layers
from .run import Run
from .wo_a import output_projection

TIMEOUT = timedelta(seconds=120)  # ranks compile the same kernels, not always at the same time
PARTS = {
    "wo_a": output_projection,
    "layers": column_and_row_layers,
    "experts": experts,
    "failing": failing_rank,
}


# ---- where it ran ----------------------------------------------------------------------------------------------------------


def link() -> str:
    """How the two GPUs are connected, in the words of nvidia-smi topo -m: NV18, SYS …"""
    if not torch.cuda.is_available():
        return "none: CPU"
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    rows = {cells[0]: cells[1:] for line in done.stdout.splitlines() if (cells := line.split())}
    return rows["GPU0"][1] if len(rows.get("GPU0", ())) > 1 else "unknown"


def merged(of_ranks: list[list[dict]]) -> list[dict]:
    """One line a check: right if it is on every rank that made it, with the value that is farthest from 0."""
    found: dict[tuple, dict] = {}
    for checks in of_ranks:
        for c in checks:
            seen = found.setdefault((c["part"], c["check"]), dict(c))
            seen["ok"] &= c["ok"]
            if c["value"] is not None and (seen["ok"] == c["ok"]) and abs(c["value"]) > abs(seen["value"]):
                seen["value"], seen["bound"] = c["value"], c["bound"]
    return list(found.values())


def table(checks: list[dict], rows: list[dict], notes: list[dict], seconds: dict[str, float]) -> str:
    def number(value) -> str:
        return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    lines, part = [], None
    for c in checks:
        if c["part"] != part:
            part = c["part"]
            lines.append(part)
        lines.append(f"  {'ok    ' if c['ok'] else 'FAILED'} {c['check']:100} {number(c['value']):>10} {number(c['bound']):>10}")
    lines.append("wo_a: off_diagonal_bytes are those of a G×G output less its diagonal, which is never allocated")
    lines += [f"  {', '.join(f'{k} {v}' for k, v in note.items())}" for note in notes]
    lines.append("latency of wo_a's delta on a rank, µs (slower rank); × ours")
    for r in rows:
        times = f"{r['times_ours']:.2f} ×" if "times_ours" in r else f"{r['pct_of_floor']} % of the floor"
        lines.append(f"  {r['workload']:28} {r['contender']:10} {r.get('variant', ''):16} {r['us']:10.1f}  {times}")
    lines.append(f"seconds: {', '.join(f'{name} {s:.0f}' for name, s in seconds.items())}")
    wrong = sum(not c["ok"] for c in checks)
    lines.append(f"{len(checks)} checks, {wrong} FAILED" if wrong else f"{len(checks)} checks, all right")
    return "\n".join(lines)


# ---- the run -----------------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU where there are no two GPUs")
    parser.add_argument("--parts", default=",".join([*PARTS, LATENCY]), help="which parts to run (default: %(default)s)")
    parser.add_argument("--bench-commit", help="commit to record where the sources are not in a git checkout")
    parser.add_argument("--peer-path", action="append", default=[], help="a folder with an unpacked peer package; repeatable")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := sorted({*args.parts} - {*PARTS, LATENCY}):
        parser.error(f"--parts: unknown {', '.join(unknown)}; there are {', '.join([*PARTS, LATENCY])}")
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("two ranks are needed: torchrun --nproc-per-node 2 -m bench.distributed …")
    if torch.cuda.device_count() < 2 and not args.tiny:
        parser.error(f"two GPUs are needed, there are {torch.cuda.device_count()}; --tiny runs small sizes on the CPU")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sys.path.extend(args.peer_path)
    rank, cuda = int(os.environ["RANK"]), torch.cuda.device_count() >= 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, **(dict(device_id=device) if cuda else {}))
    alone = [dist.new_group([r]) for r in range(2)][rank]
    run = Run(rank, device, args.tiny, dist.group.WORLD, alone)
    head = results.header("distributed", measure.timer_for(device).method, args.tiny, args.bench_commit)
    head |= {} if cuda else {"gpu": "CPU"}
    head |= {"gpus": 2 if cuda else 0, "backend": backend, "link": link()}
    if rank == 0:
        print(f"two ranks on {head['gpu']}, {backend}, link {head['link']}; torch {torch.__version__}", flush=True)
    notes, rows, checks, seconds = [], [], [], {}
    for name in args.parts:
        start = time.perf_counter()
        if rank == 0:
            print(f"{name} …", flush=True)
        if name == LATENCY:
            rows = latency(run)
        else:
            notes = PARTS[name](run) or notes
        seconds[name] = round(time.perf_counter() - start, 1)
        gathered: list = [None, None]
        dist.all_gather_object(gathered, run.checks)
        checks = merged(gathered)
        if rank == 0 and args.out:  # after every part: what a later one breaks off is not lost
            finished = name == args.parts[-1]
            results.write(args.out, head | {"finished": finished, "seconds": seconds, "wo_a": notes, "checks": checks}, rows)
    if rank == 0:
        print(table(checks, rows, notes, seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(c["ok"] for c in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
