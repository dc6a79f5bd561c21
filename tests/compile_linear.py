"""Compile linear's kernel as the op launches it, for a GPU that need not be there: `compile_kernels.py`'s manner.

    python tests/compile_linear.py sm_90 132 [quick | thorough]
"""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from compile_kernels import compiled, jobs, record

from grouped_lora_ops import launch, launch_linear
from grouped_lora_ops.launch_linear import has_e4m3
from grouped_lora_ops.ops import common

# dtype, T, L, r, ranks given, out_sizes: streams, rows as they come or in the plan's order, tiles of a slot, one slot
CASES = [
    (torch.bfloat16, 8, 8, 16, True, None),
    (torch.bfloat16, 8192, 8, 64, True, None),
    (torch.bfloat16, 64, 8, 64, True, None),
    (torch.bfloat16, 1024, 8, 64, False, None),
    (torch.bfloat16, 100, 8, 16, True, None),
    (torch.bfloat16, 8192, 1, 64, True, None),
    (torch.bfloat16, 1024, 64, 16, True, [2048, 256, 256]),
    (torch.float16, 1024, 8, 16, True, None),
    (torch.float16, 8192, 1, 64, True, None),
    (torch.float32, 64, 8, 64, True, None),
    (torch.float32, 1024, 8, 64, True, None),
]
# the same with an e4m3 weight; the gradient of x of the second (with `thorough`: of the first four)
SCALED = [
    (torch.bfloat16, 8, 8, 16, True, None),
    (torch.bfloat16, 8192, 8, 64, True, None),
    (torch.float16, 1024, 8, 64, True, None),
    (torch.bfloat16, 1024, 64, 16, True, [2048, 256, 200]),
    (torch.bfloat16, 64, 8, 64, True, None),
    (torch.bfloat16, 100, 8, 16, True, None),
    (torch.float16, 8192, 1, 64, True, None),
    (torch.bfloat16, 8192, 1, 16, True, None),
]
# the same beside e8m0 scales: tiles that lie in one row of blocks and that do not; more rows have W in bf16
ROUNDED = [
    (torch.bfloat16, 8, 8, 16, True, None),
    (torch.bfloat16, 100, 64, 16, True, [2048, 256, 200]),
    (torch.bfloat16, 64, 8, 64, True, [2048, 136, 200]),
    (torch.bfloat16, 128, 1, 64, True, None),
    (torch.bfloat16, 100, 8, 16, True, [100, 30, 200]),
]
# W itself: shape, storage
DEQUANTIZED = [((4, 1024, 4096), "dense"), ((4, 1024, 4096), "transposed"), ((1, 200, 1000), "dense"), ((2, 136, 80), "transposed")]
# scaling · h split for csrc/linear.cu: chunks, rows, groups, r, ids' dtype, with scalings (without: the gradient of x)
HALVES = [
    (4, 8192, 4, 64, torch.int32, True),
    (1, 1024, 1, 16, torch.int64, False),
    (2, 1024, 1, 128, torch.int32, True),
    (1, 4096, 2, 200, None, True),
]
WHOLE = [(8192, 4, 16), (8192, 4, 64), (256, 4, 16), (1024, 4, 64)]  # T, G, r where the shrink itself writes them
QUICK = 2
BACKWARD = 4  # of so many also the gradient of x


def main(arch: str, sms: int, how: str) -> None:
    common.INTERPRETER = (arch, sms)
    for name in ("shrink", "plan", "dequantize"):
        importlib.import_module(f"grouped_lora_ops.kernels.{name}").launch = lambda *args, **kw: None
    importlib.import_module("grouped_lora_ops.kernels.linear").launch = record
    ops = importlib.import_module("grouped_lora_ops.ops.linear")
    every = {"quick": (CASES[:QUICK], SCALED[:QUICK]), "all": (CASES, SCALED[:3]), "thorough": (CASES, SCALED)}[how]
    for cases, scaled in zip(every, (False, True)):
        backward = () if how == "quick" else (1,) if scaled and how == "all" else range(BACKWARD)
        record_cases(ops, cases, scaled, backward)
    rounded = {"quick": ROUNDED[:QUICK], "all": ROUNDED[:3], "thorough": ROUNDED}[how]
    record_cases(ops, rounded, True, (), torch.float8_e8m0fnu)
    record_dequantized(has_e4m3(arch))
    if arch == "sm_90":
        record_halves()
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda job: compiled(job, int(arch.removeprefix("sm_"))), jobs.values()):
            print(json.dumps(line), flush=True)


def record_cases(ops, cases: list, scaled: bool, backward, scales=torch.float32) -> None:
    for i, (dtype, tokens, slots, rank, ranks, sizes) in enumerate(cases):
        groups, features, out = (len(sizes) if sizes else 4), 4096, (sum(sizes),) if sizes else (4, 1024)
        x = torch.empty((tokens, features) if sizes else (tokens, groups, features), dtype=dtype)
        a = torch.empty((slots, groups, rank, features) if sizes else (slots, rank, features), dtype=dtype)
        weight, b, y = (torch.empty(s, dtype=dtype) for s in ((*out, features), (slots, *out, rank), (tokens, *out)))
        ids, scalings = torch.zeros(tokens, dtype=torch.int32), torch.ones(slots)
        ranks = torch.full((slots,), rank, dtype=torch.int32) if ranks else None
        scale = None
        if scaled:
            weight, scale = weight.to(torch.float8_e4m3fn), torch.empty(*out[:-1], -(-out[-1] // 128), features // 128).to(scales)
        ops._cuda(x, weight, a, b, ids, scalings, None, sizes, ranks, None, scale)
        if i in backward:
            ops._backward_cuda(y, x, weight, a, b, ids, scalings, None, sizes, ranks, None, [True] + [False] * 4, scale)


def record_dequantized(typed: bool) -> None:
    kernels = importlib.import_module("grouped_lora_ops.kernels.dequantize")
    kernels.launch = record
    for (groups, rows, columns), storage in DEQUANTIZED:
        dtype = torch.float8_e4m3fn if typed else torch.uint8
        weight = torch.empty(groups, columns, rows, dtype=dtype).mT if storage == "transposed" else torch.empty(groups, rows, columns, dtype=dtype)
        scales = torch.empty(groups, -(-rows // 128), -(-columns // 128), dtype=torch.uint8)
        for given in (scales, None):
            kernels.dequantize("linear", weight, given, torch.empty(groups, rows, columns, dtype=torch.bfloat16))


def record_halves() -> None:
    kernels = importlib.import_module("grouped_lora_ops.kernels.halves")
    kernels.launch = record
    for chunks, rows, groups, rank, id_dtype, scaled in HALVES:
        h, both = torch.empty(chunks, rows, groups, rank), torch.empty(rows, groups, 2, rank, dtype=torch.bfloat16)
        ids = None if id_dtype is None else torch.zeros(rows, dtype=id_dtype)
        kernels.halves("linear", h, both, ids, 1, torch.ones(8) if scaled else None, 8, True, chunks == 2)
    kernels = importlib.import_module("grouped_lora_ops.kernels.shrink")
    kernels.launch = record
    for tokens, groups, rank in WHOLE:
        x, a = torch.empty(tokens, groups, 4096, dtype=torch.bfloat16), torch.empty(8, 1, rank, 4096, dtype=torch.bfloat16)
        both, ids = torch.empty(tokens, groups, 2, rank, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int32)
        config = launch_linear.linear(launch.Problem("sm_90", 132, 2, tokens, groups, 4096, 1024, rank, 8)).shrink
        plan, ranks = torch.zeros(tokens + 10, dtype=torch.int32), torch.full((8,), rank, dtype=torch.int32)
        kernels.shrink("linear", x, a, both, ids, plan, ranks, torch.ones(8), None, False, config)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "all")
