"""Compile our kernels as the ops launch them, for a GPU that need not be there, and print what came out as JSON lines.

    python tests/compile_kernels.py sm_90 132 [quick]

quick: what CI has time for. Runs without Triton's interpreter, so in a process of its own; `test_compile.py` reads the lines. The tensors are
empty CPU ones: the launch is replaced by a compilation with the same signature, constants and alignment.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from grouped_lora_ops import launch
from grouped_lora_ops.kernels import delta, expand, plan, shrink, wgrad
from grouped_lora_ops.ops import common

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
UNALIGNED = ("scales", "ids", "plan", "ranks", "scalings", "counts")  # the kernels do not specialise on their alignment
# dtype, T, L, r, ranks given, out_sizes: decode, scan, plan, one adapter, prefill
CASES = [
    (torch.bfloat16, 8, 1, 64, True, None),
    (torch.bfloat16, 1, 8, 16, True, None),
    (torch.bfloat16, 256, 1, 64, False, None),
    (torch.bfloat16, 8192, 1, 64, True, None),
    (torch.float16, 64, 8, 64, True, None),
    (torch.bfloat16, 4096, 2, 256, True, None),
    (torch.float32, 64, 8, 16, True, None),
    (torch.bfloat16, 64, 8, 64, True, None),
    (torch.bfloat16, 1024, 64, 16, True, None),
    (torch.bfloat16, 8192, 8, 16, True, None),
    (torch.bfloat16, 2048, 2, 128, True, None),
    (torch.float16, 300, 4, 128, True, None),
    (torch.bfloat16, 8192, 1, 32, True, [4096, 1024, 1024]),
    (torch.float16, 8192, 8, 16, True, [4096, 1024, 1024]),
    (torch.bfloat16, 64, 8, 16, True, [2048, 256, 256]),
    (torch.float16, 4096, 8, 64, True, None),
    (torch.float32, 4096, 2, 64, True, None),
]
QUICK = 7  # so many of them
jobs: dict = {}


def record(name, kernel, grid, args, constants, num_warps, num_stages, pdl=False):
    signature, fixed, attributes = {}, {}, {}
    for i, (argument, value) in enumerate(zip(kernel.arg_names, (*args, *constants))):
        if kernel.params[i].is_constexpr or value is None:
            signature[argument], fixed[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[argument] = POINTERS[value.dtype]
            if argument not in UNALIGNED and value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = kernel.params[i].annotation_type
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
    key = (kernel.__name__, str(signature), str(fixed), str(attributes), str(options))
    jobs.setdefault(key, (kernel, signature, fixed, attributes, options))


def compiled(job, capability: int) -> dict:
    kernel, signature, fixed, attributes, options = job
    source = ASTSource(kernel, signature, fixed, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    ptx = result.asm["ptx"]
    names = [kernel.arg_names[i] for (i,) in fixed]
    return {
        "kernel": kernel.__name__,
        "dtype": signature.get("x") or signature.get("b") or signature.get("wide"),
        "constants": {n: v for n, v in zip(names, fixed.values()) if isinstance(v, (int, str, bool))},
        "registers": int(registers),
        "stack": int(stack),
        "shared": result.metadata.shared,
        "wide": ptx.count("cp.async.cg.shared.global") + len(re.findall(r"ld\.global[.a-z0-9:]*\.v4\.b32", ptx)),
        "narrow": len(re.findall(r"ld\.global[.a-z0-9:]*\.b16", ptx)) + ptx.count("cp.async.ca.shared.global"),
        "before wait": len(re.findall(r"\b(?:ld|st|atom|red)\.global|cp\.async", ptx.split("griddepcontrol.wait")[0])),
        "k widths": sorted(set(re.findall(r"kWidth = (\d+)", result.asm["ttgir"]))),
        "scales": signature.get("scales"),
        "wide stores": len(re.findall(r"st\.global[.a-z0-9:]*\.v4\.b32", ptx)),
        "narrow stores": len(re.findall(r"st\.global[.a-z0-9:]*\.b16", ptx)),
        **options,
    }


def main(arch: str, sms: int, quick: bool) -> None:
    common.INTERPRETER = (arch, sms)
    for module in (shrink, expand, delta, plan, wgrad):
        module.launch = record
    ops = importlib.import_module("grouped_lora_ops.ops.delta")
    for dtype, tokens, slots, rank, ranks, sizes in CASES[:QUICK] if quick else CASES:
        groups, features, out = (len(sizes) if sizes else 4), 4096, 1024
        x = torch.empty((tokens, features) if sizes else (tokens, groups, features), dtype=dtype)
        a = torch.empty(*((slots, groups) if sizes else (slots,)), rank, features, dtype=dtype)
        b = torch.empty((slots, sum(sizes), rank) if sizes else (slots, groups, out, rank), dtype=dtype)
        y = torch.empty((tokens, sum(sizes)) if sizes else (tokens, groups, out), dtype=dtype)
        ids, scalings = torch.zeros(tokens, dtype=torch.int32), torch.ones(slots)
        kw = {"out_sizes": sizes, "ranks": torch.full((slots,), rank, dtype=torch.int32) if ranks else None}
        assert all(t.data_ptr() % 16 == 0 for t in (x, a, b, y))
        ops._cuda_(y, x, a, b, ids, scalings, **kw)
        if quick:
            continue
        ops._cuda(x, a, b, ids, scalings, base=y, **kw)
        if tokens in (64, 2048, 4096):
            ops._backward_cuda(y, x, a, b, ids, scalings, sizes, kw["ranks"], None, [True] * 3)
    for tokens, slots in ((300, 8),) if quick else ((300, 8), (100_000, 8), (5000, 1000)):
        plan.plan("plan", torch.zeros(tokens, dtype=torch.int32), slots, ids, ids, launch.plan(tokens, slots), launch.has_pdl(arch))
    capability = int(arch.removeprefix("sm_"))
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda job: compiled(job, capability), jobs.values()):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "quick" in sys.argv[3:])
