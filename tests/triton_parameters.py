"""Compile kernels as Triton's own launch would, and print what a recorded launch says of their parameters beside what the cubin says.

    python tests/triton_parameters.py

Runs without Triton's interpreter, so in a process of its own; `test_host.py` reads the JSON lines.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from grouped_lora_ops import driver
from grouped_lora_ops.ops import common

TARGET = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def record(name, kernel, grid, args, constants, num_warps, num_stages, pdl=False):
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl, "debug": False}
    backend = make_backend(TARGET)
    bound, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(*args, *constants, **options)
    parsed, signature, fixed, attributes = kernel._pack_args(backend, dict(options), bound, specialization, rest)
    compiled = triton.compile(ASTSource(kernel, signature, fixed, attributes), target=TARGET, options=parsed.__dict__)
    with driver.recording(tuple([a for a in args if isinstance(a, torch.Tensor)])) as tape:
        driver.record_triton(SimpleNamespace(metadata=compiled.metadata, src=compiled.src, function=1), grid, (*args, *constants))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOL, "-elf", file.name], capture_output=True, text=True, check=True).stdout
    found = {(int(i, 16), int(size, 16)) for i, size in re.findall(r"Ordinal\s*:\s*0x(\w+)\s*Offset\s*:\s*0x\w+\s*Size\s*:\s*0x(\w+)", text)}
    (launch,) = tape.launches
    ends = [*launch.offsets[1:], len(launch.data)]
    line = {
        "kernel": kernel.__name__,
        "cubin": [size for _, size in sorted(found)],
        "recorded": [end - start for start, end in zip(launch.offsets, ends)],
        "pdl": [launch.pdl, pdl],
        "pointers": [len(launch.slots), len([a for a in args if isinstance(a, torch.Tensor)])],
        "threads": [launch.threads, 32 * num_warps],
        "shared": [launch.shared, compiled.metadata.shared],
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    common.INTERPRETER = ("sm_90", 132)
    experts = ("expert_shrink", "expert_expand", "expert_linear", "expert_gate_up", "expert_rows")
    for stem in ("shrink", "expand", "delta", "plan", *experts):
        importlib.import_module(f"grouped_lora_ops.kernels.{stem}").launch = record
    ops = importlib.import_module("grouped_lora_ops.ops.delta")
    for tokens, slots, ranks in ((1, 8, torch.ones(8, dtype=torch.int32)), (8192, 2, None)):
        x, out = (torch.empty(tokens, 2, size, dtype=torch.bfloat16) for size in (256, 64))
        a, b = torch.empty(slots, 16, 256, dtype=torch.bfloat16), torch.empty(slots, 2, 64, 16, dtype=torch.bfloat16)
        ops._cuda_.__wrapped__(out, x, a, b, torch.zeros(tokens, dtype=torch.int32), torch.ones(slots), None, ranks)
    ids, x = torch.zeros(1, 2, dtype=torch.int32), torch.empty(1, 64, dtype=torch.bfloat16)
    w, down = torch.empty(2, 64, 64, dtype=torch.bfloat16), torch.empty(2, 64, 32, dtype=torch.bfloat16)
    a, b = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16), torch.empty(1, 2, 64, 16, dtype=torch.bfloat16)
    layer = (x, ids, torch.ones(1, 2), w, down, a, b, None, None, None, torch.ones(1))
    importlib.import_module("grouped_lora_ops.ops.expert_mlp")._cuda.__wrapped__(*layer, None, None, "swiglu", 7.0, "input")
    importlib.import_module("grouped_lora_ops.ops.expert_delta")._cuda.__wrapped__(x, a, b, ids, None, torch.ones(1))


if __name__ == "__main__":
    main()
