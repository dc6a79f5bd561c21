"""Compile and load the kernels that a model's adapters need, ahead of the first request or capture.

    python -m grouped_lora_ops warmup path/to/model --adapters 8 --rank 64 --tokens 512 [--tp 2] [--dtype bf16]
    python -m grouped_lora_ops warmup path/to/model --adapters 8 --rank 64 --list          the shapes, on any machine

The shapes are those of the model's layout (its config.json says the rest): what `nn.attach_bank` with a bank of so many slots
and this rank calls on one rank of tp × ep. Kernels stay in the caches on disk; a process loads them at its own first call.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import layouts
from ._progress import Progress
from .warmup import OPS, Shape, warmup
from .warmup_experts import ExpertShape, warmup_experts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEP = 16  # token counts between two movements of the bar


@dataclass(frozen=True)
class Job:
    """One distinct shape and what is called with it."""

    shape: Shape | ExpertShape
    ops: tuple[str, ...]
    paths: tuple[str, ...]  # below a layer
    layers: int  # that have it
    routes: int = 1  # token counts are multiplied by this: experts behind a parent's own products see routes

    @property
    def experts(self) -> bool:
        return isinstance(self.shape, ExpertShape)

    @property
    def sizes(self) -> str:
        s = self.shape
        if self.experts:
            return f"{s.num_experts} experts, top {s.top_k * self.routes}, {s.hidden} → {s.inner} → {s.hidden}"
        if s.out_sizes:
            return f"{s.in_features} → {' + '.join(map(str, s.out_sizes))}"
        groups = f"{s.groups} groups of " if s.groups else ""
        return f"{groups}{s.in_features} → {s.out_features}"

    def __str__(self) -> str:
        return f"{', '.join(self.paths)} ({self.layers} layers): {self.sizes}; {', '.join(self.ops)}"


def read_config(source: str) -> Mapping[str, Any]:
    """A model's config.json: of a path, else of a repository on the Hugging Face hub, where huggingface_hub is installed."""
    if Path(source).exists() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        return layouts.read_config(source)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ValueError(
            f"{source} is no path here, and huggingface_hub, which would fetch its config.json, is not installed."
        ) from None
    try:
        return layouts.read_config(hf_hub_download(source, "config.json"))
    except Exception as error:  # a network, a missing repository or file, a missing permission
        first = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{source} is no path here, and its config.json cannot be had: {type(error).__name__}: {first}"
        ) from None


def jobs_of(
    model: layouts.Model,
    slots: int,
    rank: int,
    *,
    share: layouts.Share | None = None,
    dtype: torch.dtype = torch.bfloat16,
    selectors: list[str] | None = None,
    fused: bool = False,
    shared_outer: bool = False,
    experts: str = "parent",
    ops: tuple[str, ...] = ("delta", "delta_"),
) -> list[Job]:
    """What a model's layers call, each distinct shape once.

    fused: siblings are one module (`qkv_proj`). shared_outer: gate_up's A and down's B are shared by all experts. experts:
    "parent" (`expert_delta` behind the model's own products) or "fused" (`expert_mlp`), as in `nn.attach_bank`.
    Row-parallel layers (tp > 1) call shrink and expand, between which h is summed.
    """
    share = share or layouts.Share()
    buffers = model.buffers(slots, rank, selectors=selectors, share=share, fused=fused, shared_outer=shared_outer)
    found: dict[tuple, dict] = {}

    def add(shape, ops: tuple[str, ...], path: str, layer: int, routes: int = 1) -> None:
        one = found.setdefault((shape, ops, routes), {"paths": {}, "layers": set()})
        one["paths"][path] = None
        one["layers"].add(layer)

    pairs: dict[tuple[int, str], dict[str, layouts.Buffer]] = {}
    for b in buffers:
        place = b.places[0]
        projection, below = place.projection, b.key.removeprefix(f"{model.prefix}.{place.layer}.")
        if b.kind == "experts":
            pairs.setdefault((place.layer, projection.facts.owner), {})["gate_up" if projection.gated else "down"] = b
            continue
        common = dict(rank=rank, num_slots=slots, dtype=dtype, in_features=b.a_shape[-1])
        if b.kind == "fused":
            shape = Shape(**common, out_sizes=b.out_sizes, shared_a=False)
        elif b.kind == "grouped":
            shape = Shape(**common, out_features=b.b_shape[2], groups=b.b_shape[1])
        else:
            shape = Shape(**common, out_features=b.b_shape[1])
        divided = share.tp > 1 and projection.facts.shard is layouts.Shard.ROW
        add(shape, ("shrink", "expand") if divided else ops, below, place.layer)
    for (layer, owner), pair in pairs.items():
        shape, op, routes = expert_shape(model, pair, slots, rank, dtype, shared_outer, experts)
        add(shape, (op,), owner, layer, routes)
    return [
        Job(shape, ops, tuple(one["paths"]), len(one["layers"]), routes) for (shape, ops, routes), one in found.items()
    ]


def expert_shape(model, pair, slots, rank, dtype, shared_outer, experts) -> tuple[ExpertShape, str, int]:
    """(shape, op, routes a token) of a layer's experts."""
    if len(pair) < 2 and experts == "fused":
        raise ValueError(
            "expert_mlp is prepared with adapters on gate_up and on down; name both, or use --experts parent."
        )
    storage = model.layout.experts
    sized = {name: buffer.places[0].projection for name, buffer in pair.items()}
    hidden = sized["gate_up"].in_features if "gate_up" in sized else sized["down"].out_features
    inner = sized["down"].in_features if "down" in sized else sized["gate_up"].out_features // 2
    part = next(iter(pair.values())).parts[0].experts
    top_k = layouts.size("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk").of(
        model.config
    )
    limit = storage.activation_limit
    parent = experts == "parent"
    shape = ExpertShape(
        hidden=hidden,
        inner=inner,
        num_experts=part.stop - part.start,
        top_k=1 if parent else top_k,
        rank=rank,
        num_slots=slots,
        dtype=dtype,
        shared=("gate_up_a", "down_b") if shared_outer else (),
        bias=storage.bias,
        ranks=parent,  # nn gives expert_mlp none: what lies past a slot's rank is zero
        activation=storage.activation,
        activation_limit=None if limit is None else float(limit.of(model.config)),
        router_weight=storage.router_weight,
    )
    return shape, "expert_delta" if parent else "expert_mlp", top_k if parent else 1


def steps(job: Job, tokens: list[int]) -> Iterator[list[int]]:
    counts = [count * job.routes for count in tokens]
    for start in range(0, len(counts), STEP):
        yield counts[start : start + STEP]


def prepare(job: Job, tokens: list[int], device: torch.device, backward: bool, bar: Progress) -> int:
    """Call everything once at each T; returns the calls made."""
    run, calls = warmup_experts if job.experts else warmup, 0
    for counts in steps(job, tokens):
        calls += run([job.shape], tokens=counts, ops=job.ops, device=device, backward=backward)
        bar.add(len(counts))
    return calls


def tokens_of(text: str) -> list[int]:
    """ "512" → 1 … 512; "1,8,512" → these."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens, or several with commas, of at least 1; got {text!r}"
        )
    return list(range(1, numbers[0] + 1)) if len(numbers) == 1 else sorted(set(numbers))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model's folder, its config.json, or its name on the Hugging Face hub")
    parser.add_argument("--adapters", type=positive, required=True, help="adapter slots L of the buffers")
    parser.add_argument("--rank", type=positive, required=True, help="rank of the buffers: that of the largest adapter")
    parser.add_argument(
        "--tokens", type=tokens_of, default="512", help="every T up to this, or a list (1,8,512); default 512"
    )
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=positive, default=1, help="expert-parallel ranks")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--targets", type=lambda text: text.split(","), help="projections, with commas; default: the layout's"
    )
    parser.add_argument("--fused", action="store_true", help="the model has fused modules (qkv_proj, gate_up_proj)")
    parser.add_argument("--shared-outer", action="store_true", help="experts share gate_up's A and down's B")
    parser.add_argument(
        "--experts",
        choices=("parent", "fused"),
        default="parent",
        help="expert_delta behind the model's own products, or expert_mlp",
    )
    parser.add_argument(
        "--ops", default="delta,delta_", help=f"of the dense layers, of {', '.join(OPS)}; default delta,delta_"
    )
    parser.add_argument("--backward", action="store_true", help="also the gradients (of delta, linear and expert_mlp)")
    parser.add_argument("--list", action="store_true", help="print the shapes and prepare nothing; needs no GPU")


def run(options: argparse.Namespace) -> int:
    ops = tuple(options.ops.split(","))
    if unknown := sorted(set(ops) - set(OPS)):
        raise ValueError(f"--ops: unknown {', '.join(unknown)}; there are {', '.join(OPS)}.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = layouts.of(read_config(options.model))
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    storage = model.layout.experts
    if options.experts == "fused" and storage is not None and (storage.transposed or storage.interleaved):
        print(
            "note: this model stores its experts transposed or interleaved; those views want one call of their own.",
            file=sys.stderr,
        )
    jobs = jobs_of(
        model,
        options.adapters,
        options.rank,
        share=layouts.Share(tp=options.tp, ep=options.ep),
        dtype=DTYPES[options.dtype],
        selectors=options.targets,
        fused=options.fused,
        shared_outer=options.shared_outer,
        experts=options.experts,
        ops=ops,
    )
    tokens = options.tokens
    span = (
        f"T = 1 … {tokens[-1]}" if tokens == list(range(1, len(tokens) + 1)) else f"T in {', '.join(map(str, tokens))}"
    )
    head = f"{model.layout.name}, {options.adapters} slots of rank {options.rank}, {options.dtype}, {span}"
    if options.list:
        print("\n".join([f"{head}: {len(jobs)} shapes", *(f"  {job}" for job in jobs)]))
        return 0
    if not torch.cuda.is_available():
        print(
            "there is no NVIDIA GPU that torch can use here, so there is nothing to prepare; --list prints the shapes.",
            file=sys.stderr,
        )
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{head}, on {torch.cuda.get_device_name(device)}")
    start, calls = time.perf_counter(), 0
    with Progress(len(jobs) * len(tokens), "T") as bar:
        for job in jobs:
            bar.what(job.paths[0])
            began = time.perf_counter()
            calls += prepare(job, tokens, device, options.backward, bar)
            bar.say(f"  {job}  {time.perf_counter() - began:.1f} s")
    print(f"prepared {len(jobs)} shapes, {calls} calls, in {time.perf_counter() - start:.1f} s")
    return 0
