"""What fails on one of two ranks: both end with the same error, in time."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import Adapter, Base, write_adapter
from grouped_lora_ops.layouts import Share

from .layers import DENSE, DENSE_TINY, Decoder, job_adapters
from .run import Run

FAIL_SECONDS = 30


def failing_rank(run: Run) -> None:
    """Something fails on the second rank alone: both end with one error, in time, with nothing that looks finished."""
    part, layout = "a failing rank", layouts.of(DENSE | DENSE_TINY)
    group = dist.new_group(timeout=timedelta(seconds=FAIL_SECONDS))
    adapter = job_adapters(run, layout)[0]
    broken = dict(adapter.modules)
    path = next(iter(broken))
    broken[path] = replace(broken[path], lora_a=broken[path].lora_a[:, :-1])
    roots: list = [tempfile.mkdtemp(prefix="grouped-lora-") if run.rank == 0 else None]
    dist.broadcast_object_list(roots, group=run.group)
    root = Path(roots[0])

    def full_disk(tensors, file, **options):
        Path(file).write_bytes(b"\0" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    def export(name: str, what: Adapter, everywhere: bool = True) -> None:
        base = Base("org/model", revision="1")
        write_adapter(root / name / f"rank{run.rank}", what, layout, base=base, group=group, everywhere=everywhere)

    def full() -> None:
        with mock.patch.object(safetensors.torch, "save_file", full_disk) if run.rank == 1 else nullcontext():
            export("full", adapter)

    def attach() -> None:
        model = Decoder(run, layout, Share(2, run.rank), False, None, torch.float32)
        if run.rank == 1:
            model.layers[1].mlp.down_proj.weight = nn.Parameter(model.layers[1].mlp.down_proj.weight[:, 1:].detach())
        gnn.attach_trainable(model, layout, share=Share(2, run.rank), tp_group=group)

    def ranks() -> None:
        model = Decoder(run, layout, Share(2, run.rank), False, None, torch.float32)
        gnn.attach_trainable(model, layout, share=Share(2, run.rank), tp_group=group, rank=4 + run.rank)

    cases = {
        "export to a full disk": (full, "No space left on device"),
        "export of a misshapen factor": (lambda: export("shape", adapter if run.rank == 0 else replace(adapter, modules=broken)), "A must be"),
        "a weight of another shape": (attach, "must be"),
        "factors of another rank": (ranks, "all ranks must have the same factors"),
    }
    try:
        for name, (action, needle) in cases.items():
            start, text = time.perf_counter(), "nothing was raised"
            try:
                action()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - start
            texts: list = [None, None]
            dist.all_gather_object(texts, text, group=run.group)
            alike = texts[0] == texts[1] and needle in text and text.startswith("RuntimeError: grouped_lora_ops.")
            run.check(part, f"{name}: both ranks raise the same error", alike)
            if not alike:
                print(f"rank {run.rank}: {name}: {text}", flush=True)
            run.below(part, f"{name}: seconds until then", seconds, FAIL_SECONDS)
        dist.barrier(group=run.group)
        left = [str(f) for pattern in ("**/.complete", "**/.writing-*") for f in root.glob(pattern)]
        run.check(part, "no export that failed looks finished", not left, len(left), 0)
        export("good", adapter)
        dist.barrier(group=run.group)
        run.check(part, "afterwards an export succeeds", all((root / "good" / f"rank{r}" / ".complete").is_file() for r in range(2)))
        dist.barrier(group=run.group)
    finally:
        if run.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
