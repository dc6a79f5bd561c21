#!/usr/bin/env python3
"""Multi-adapter prefill and decode through DeepSeek-V4's grouped output projection, every step checked.

    python examples/decode_loop.py                     # a GPU where there is one, else smaller sizes on the CPU
    python examples/decode_loop.py --tp 2              # one tensor-parallel rank's half of the groups
    python examples/decode_loop.py --adapters a/ b/ c/ # your own PEFT directories

`wo_a` (`o_a_proj` in transformers) maps G=8 groups of the attention output, D=4096 features each, to N=1024 features
each, and an adapter's B is grouped like the weight:

    out[t, g] = W[g] x[t, g] + scaling · B[l, g] (A[l] x[t, g]),    l = the adapter of token t, −1 = none

Three adapters of ranks 8, 16 and 64 are written to disk in PEFT's format and read back. A prefill of several sequences
follows, then a decode loop in which every row changes its adapter at random from step to step and at least one row has
none. On a GPU the step (base product, then `delta_` in place) is captured once in a CUDA graph and replayed with new
activations and ids in its static buffers. Every result is compared with `grouped_lora_ops.reference` and with float64;
the exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

import grouped_lora_ops as gl
from grouped_lora_ops.adapters import read_adapter, stack_adapters

MODULE = "model.layers.0.self_attn.o_a_proj"
RANKS = (8, 16, 64)
DTYPE = torch.bfloat16


class Mismatch(Exception):
    """A result that differs from what it must be."""


@dataclass
class Problem:
    """The projection, and its adapters as `stack_adapters` lays them out."""

    weight: Tensor  # [G, N, D]
    lora_a: Tensor  # [L, r, D]
    lora_b: Tensor  # [L, G, N, r]
    scalings: Tensor  # [L]
    ranks: Tensor  # [L]

    def base(self, x: Tensor) -> Tensor:
        return torch.einsum("tgd,gnd->tgn", x, self.weight)

    def lora(self, adapter_ids: Tensor) -> tuple:
        """What every op takes after x."""
        return self.lora_a, self.lora_b, adapter_ids, self.scalings


@dataclass
class Checker:
    """Compares results with the reference and with float64; remembers how close they came."""

    problem: Problem
    rows: int = 0
    rows_without: int = 0
    worst: float = 0.0  # of the error bound
    identical: list[float] = field(default_factory=list)  # share of elements with the reference's bits

    def check(self, what: str, out: Tensor, base: Tensor, x: Tensor, adapter_ids: Tensor) -> None:
        """out = base + delta: base's bits where the id is −1, else within the bound; the reference likewise."""
        p = self.problem
        reference = gl.reference.delta(x, *p.lora(adapter_ids), base=base, ranks=p.ranks)
        exact, bound = exact_and_bound(p, x, base, adapter_ids)
        without = adapter_ids < 0
        for name, result in (("the op's result", out), ("the reference", reference)):
            if (result.shape, result.dtype) != (base.shape, base.dtype):
                raise Mismatch(f"{what}: {name} is {result.dtype} {list(result.shape)}, not as the base.")
            if not torch.equal(result[without].view(torch.int16), base[without].view(torch.int16)):
                raise Mismatch(f"{what}: {name} changed the bits of a row without an adapter.")
            excess = (result.double() - exact).abs() / bound
            if not (excess <= 1).all():  # NaN is not
                t, g, n = (int(i) for i in (~(excess <= 1)).nonzero()[0])
                raise Mismatch(
                    f"{what}: {name} at token {t} (adapter {int(adapter_ids[t])}), group {g}, feature {n} is "
                    f"{float(result[t, g, n])!r}; float64 gives {float(exact[t, g, n]):.6f} ± {float(bound[t, g, n]):.2g}."
                )
            if name == "the op's result":
                self.worst = max(self.worst, float(excess.max()))
        if out.device.type == "cpu" and not torch.equal(out, reference):
            raise Mismatch(f"{what}: on a CPU the op is the reference, but their bits differ.")
        self.rows += len(adapter_ids)
        self.rows_without += int(without.sum())
        self.identical.append(float((out == reference).double().mean()))


def exact_and_bound(p: Problem, x: Tensor, base: Tensor, adapter_ids: Tensor) -> tuple[Tensor, Tensor]:
    """base + delta in float64, and how far a float32 computation with one rounding to x's dtype may be from it.

    A float32 sum of n terms is within 8 √n 2⁻²⁴ Σ|terms| of the truth in any order, but for a vanishing share of inputs
    (Higham and Mary, 2019). 2⁻¹⁵ |h| allows a kernel to hand h to the matrix units as a sum of two bfloat16 numbers.
    """
    exact, error = base.double(), torch.zeros_like(base, dtype=torch.float64)
    for slot, (scaling, rank) in enumerate(zip(p.scalings.tolist(), p.ranks.tolist())):
        rows = adapter_ids == slot
        a, b, rows_x = p.lora_a[slot, :rank].double(), p.lora_b[slot, :, :, :rank].double(), x[rows].double()
        h = torch.einsum("tgd,rd->tgr", rows_x, a)
        h_error = 8 * math.sqrt(x.shape[-1] + rank) * 2**-24 * torch.einsum("tgd,rd->tgr", rows_x.abs(), a.abs())
        exact[rows] += scaling * torch.einsum("tgr,gnr->tgn", h, b)
        error[rows] = abs(scaling) * torch.einsum("tgr,gnr->tgn", h_error + 2**-15 * h.abs(), b.abs())
    rounding = torch.finfo(x.dtype).eps / 2
    return exact, error + rounding * (exact.abs() + error) + torch.finfo(x.dtype).tiny


def write_adapters(directory: Path, in_features: int, out_features: int, seed: int) -> list[Path]:
    """Adapters of ranks 8, 16 and 64 in PEFT's layout: A [r, D], B [G·N, r] group-major. By peft itself if installed."""
    generator = torch.Generator().manual_seed(seed)
    factors = {
        rank: (
            torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features),
            torch.randn(out_features, rank, generator=generator) / math.sqrt(rank),
        )
        for rank in RANKS
    }
    try:
        import peft
    except ImportError:
        for rank, (a, b) in factors.items():
            path = directory / f"rank{rank}"
            path.mkdir()
            config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=["o_a_proj"], bias="none")
            (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
            name = f"base_model.model.{MODULE}.lora_{{}}.weight"
            tensors = {name.format("A"): a, name.format("B"): b}
            safetensors.torch.save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        print("wrote three adapter directories with safetensors (peft is not installed)")
        return [directory / f"rank{rank}" for rank in RANKS]

    class Layer(nn.Module):  # just enough of the model for MODULE to be a path in it
        def __init__(self):
            super().__init__()
            self.self_attn = nn.Module()
            self.self_attn.o_a_proj = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)

    root = nn.Module()
    root.model = nn.Module()
    root.model.layers = nn.ModuleList([Layer()])
    configs = {
        f"rank{rank}": peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["o_a_proj"]) for rank in RANKS
    }
    model = peft.get_peft_model(root, configs["rank8"], adapter_name="rank8")
    for name in list(configs)[1:]:
        model.add_adapter(name, configs[name])
    linear = model.base_model.model.model.layers[0].self_attn.o_a_proj
    with torch.no_grad():
        for rank, (a, b) in factors.items():
            linear.lora_A[f"rank{rank}"].weight.copy_(a)
            linear.lora_B[f"rank{rank}"].weight.copy_(b)
    model.save_pretrained(directory)  # each adapter in a folder of its name
    print(f"wrote three adapter directories with peft {peft.__version__}")
    return [directory / name for name in configs]


def random_ids(rows: int, num_slots: int, generator: torch.Generator) -> Tensor:
    """An adapter for every row, with at least one row that has none."""
    adapter_ids = torch.randint(-1, num_slots, (rows,), generator=generator, dtype=torch.int32)
    adapter_ids[torch.randint(rows, (1,), generator=generator)] = -1
    return adapter_ids


def prefill(checker: Checker, tokens: int, sequences: int, generator: torch.Generator, device: str) -> None:
    """One eager call over several sequences of different lengths: the first without an adapter, the others each with one."""
    p = checker.problem
    cuts = torch.randperm(tokens - 1, generator=generator)[: sequences - 1].add(1).sort().values.tolist()
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, tokens])]
    of_sequence = [-1] + [i % len(p.ranks) for i in range(sequences - 1)]
    adapter_ids = torch.tensor(of_sequence, dtype=torch.int32).repeat_interleave(torch.tensor(lengths)).to(device)
    x = torch.randn(tokens, p.weight.shape[0], p.weight.shape[2], generator=generator).to(device, DTYPE)
    base = p.base(x)
    out = gl.delta(x, *p.lora(adapter_ids), base=base, ranks=p.ranks)
    checker.check("prefill", out, base, x, adapter_ids)


def inputs(p: Problem, rows: int, steps: int, generator: torch.Generator):
    """(step, x [rows, G, D], adapter_ids [rows]) of every decode step; the adapter mix differs from the step before."""
    before = None
    for step in tqdm(range(steps), desc="decode", unit="step", disable=None, leave=False):
        adapter_ids = random_ids(rows, len(p.ranks), generator)
        while before is not None and torch.equal(adapter_ids, before):
            adapter_ids = random_ids(rows, len(p.ranks), generator)
        before = adapter_ids
        yield step, torch.randn(rows, p.weight.shape[0], p.weight.shape[2], generator=generator), adapter_ids


def decode_on_cpu(checker: Checker, rows: int, steps: int, generator: torch.Generator) -> None:
    p = checker.problem
    for step, x, adapter_ids in inputs(p, rows, steps, generator):
        x = x.to(DTYPE)
        base = p.base(x)
        out = base.clone()
        gl.delta_(out, x, *p.lora(adapter_ids), ranks=p.ranks)
        checker.check(f"decode step {step}", out, base, x, adapter_ids)


def decode_on_gpu(checker: Checker, rows: int, steps: int, generator: torch.Generator) -> dict[str, list[float]]:
    """The decode loop from two CUDA graphs, the step without and with LoRA; returns µs per replay, L2 flushed before."""
    p = checker.problem
    static_x = torch.zeros(rows, p.weight.shape[0], p.weight.shape[2], dtype=DTYPE, device="cuda")
    static_ids = torch.full((rows,), -1, dtype=torch.int32, device="cuda")

    def step_without() -> Tensor:
        return p.base(static_x)

    def step_with() -> Tensor:
        out = p.base(static_x)
        gl.delta_(out, static_x, *p.lora(static_ids), ranks=p.ranks)
        return out

    started = time.perf_counter()
    shape = gl.Shape(
        in_features=p.weight.shape[2],
        out_features=p.weight.shape[1],
        rank=p.lora_a.shape[1],
        num_slots=p.lora_a.shape[0],
        groups=p.weight.shape[0],
        dtype=DTYPE,
    )
    gl.warmup([shape], tokens=[rows])  # nothing may be compiled inside a capture
    print(f"kernels ready in {time.perf_counter() - started:.1f} s")

    graphs, results = {}, {}
    for name, step in (("without LoRA", step_without), ("with LoRA", step_with)):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            results[name] = step()

    # Writing 1 GiB empties the L2, and takes the GPU longer than the host needs to launch the replay behind it: the
    # time between the events is the GPU's alone.
    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    microseconds: dict[str, list[float]] = {name: [] for name in graphs}
    for step, x, adapter_ids in inputs(p, rows, steps, generator):
        static_x.copy_(x)
        static_ids.copy_(adapter_ids)
        for name in sorted(graphs, reverse=step % 2 == 1):  # neither always goes first
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            microseconds[name].append(start.elapsed_time(end) * 1e3)
        base, out = results["without LoRA"], results["with LoRA"]
        checker.check(f"decode step {step}", out, base, static_x, static_ids)
        eager = base.clone()
        gl.delta_(eager, static_x, *p.lora(static_ids), ranks=p.ranks)
        if not torch.equal(eager.view(torch.int16), out.view(torch.int16)):
            raise Mismatch(f"decode step {step}: the replay and an eager call of delta_ differ.")
    return microseconds


def latency_table(microseconds: dict[str, list[float]]) -> str:
    def row(name: str, values: list[float]) -> str:
        return f"{name:14}{statistics.median(values):12.1f}{statistics.quantiles(values, n=10)[-1]:12.1f}"

    without, with_lora = microseconds.values()
    added = [b - a for a, b in zip(without, with_lora)]
    rows = [row(name, values) for name, values in microseconds.items()] + [row("LoRA adds", added)]
    return "\n".join([f"{'µs per step':14}{'median':>12}{'p90':>12}", *rows])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--adapters", nargs="+", type=Path, metavar="DIR", help="PEFT directories to read")
    parser.add_argument("--module", default=MODULE, help="the grouped projection's path in them (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="o_groups, all ranks together (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks that share the groups")
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--steps", type=int, help="decode steps (default: 200, on a CPU 32)")
    parser.add_argument("--batch", type=int, help="rows of a decode step (default: 32, on a CPU 8)")
    parser.add_argument("--prefill", type=int, help="tokens of the prefill (default: 512, on a CPU 96)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    args.steps = args.steps if args.steps is not None else 200 if on_gpu else 32
    args.batch = args.batch if args.batch is not None else 32 if on_gpu else 8
    args.prefill = args.prefill if args.prefill is not None else 512 if on_gpu else 96
    for name, least in (("steps", 2), ("batch", 2), ("prefill", 8), ("groups", 1), ("tp", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if args.groups % args.tp:
        parser.error(f"--tp must divide the {args.groups} groups")
    if not 0 <= args.tp_rank < args.tp:
        parser.error(f"--tp-rank must be 0 to {args.tp - 1}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    on_gpu = args.device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "CPU, with smaller sizes than the real ones"
    print(f"grouped_lora_ops decode loop on: {where}; torch {torch.__version__}")
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        in_features, out_features = (4096, 1024) if on_gpu else (512, 128)
        paths = args.adapters or write_adapters(Path(scratch), in_features, args.groups * out_features, args.seed)
        local = args.groups // args.tp
        group_range = (args.tp_rank * local, (args.tp_rank + 1) * local)
        try:
            stacked = stack_adapters(
                [read_adapter(path) for path in paths],
                args.module,
                groups=args.groups,
                group_range=group_range,
                dtype=DTYPE,
                device=args.device,
            )
        except (ValueError, FileNotFoundError) as error:
            print(error, file=sys.stderr)
            return 2
    _, groups, out_features, _ = stacked.lora_b.shape
    in_features = stacked.lora_a.shape[2]
    weight = torch.randn(groups, out_features, in_features, generator=generator) / math.sqrt(in_features)
    problem = Problem(weight.to(args.device, DTYPE), *stacked)
    checker = Checker(problem)
    print(
        f"wo_a: {groups} groups ({group_range[0]} to {group_range[1] - 1} of {args.groups}), {in_features} -> "
        f"{out_features} each, bfloat16; {len(paths)} adapters of ranks {', '.join(map(str, stacked.ranks.tolist()))} "
        "read from disk"
    )
    microseconds = None
    try:
        prefill(checker, args.prefill, min(6, args.prefill // 2), generator, args.device)
        if on_gpu:
            microseconds = decode_on_gpu(checker, args.batch, args.steps, generator)
        else:
            decode_on_cpu(checker, args.batch, args.steps, generator)
    except Mismatch as mismatch:
        print(f"FAILED: {mismatch}", file=sys.stderr)
        return 1
    print(
        f"checked: a prefill of {args.prefill} tokens and {args.steps} decode steps of {args.batch} rows, in each another mix"
    )
    print(f"  {checker.rows_without} of {checker.rows} rows have no adapter: they keep the base product's bits")
    print(
        f"  the others are within the float64 error bound (at worst {checker.worst:.0%} of it), as is the reference; "
        f"{statistics.fmean(checker.identical):.2%} of all elements have the reference's bits"
    )
    if microseconds:
        print("  every replay of the CUDA graph has the bits of an eager call")
        print(
            f"\nlatency of one replay, {args.batch} rows, L2 flushed before each ({where}, torch {torch.__version__})"
        )
        print(latency_table(microseconds))
    print(f"nothing differs; {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
