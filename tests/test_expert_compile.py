"""The expert kernels compile for GPUs that are not here, within their shared memory, without spills, with 16-byte loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grouped_lora_ops import launch_experts

ROOT = Path(__file__).parents[1]
KB = 1024
# arch: multiprocessors, shared memory of a block, how much is compiled
TARGETS = {"sm_90": (132, 227 * KB, "all"), "sm_120": (170, 99 * KB, "quick")}
PRODUCTS = ("expert_shrink_kernel", "expert_expand_kernel", "expert_delta_kernel", "expert_linear_kernel", "gate_up_kernel")
# Bytes of stack on sm_90, whose tiles are tuned: (kernel, dtype, MODE, BLOCK_M, BLOCK_R). 64 rows by 128 columns and 4 warps are faster than
# what does not spill (768 µs, 776 by 64 columns, 803 by 8 warps: bench/NOTES.md). Newer Tritons' stand apart.
SPILLS = {("expert_shrink_kernel", dtype, 1, 64, 64): 200 for dtype in ("*bf16", "*fp16")}
SPILLS_FROM_TRITON_3_8 = {("gate_up_kernel", "*bf16", 2, 64, 128): 536}
SPILLS_FROM_TRITON_3_9 = {("gate_up_kernel", "*bf16", 2, 64, 128): 72, ("expert_linear_kernel", "*bf16", 2, 64, 128): 56}
ROWS = ("activation_kernel", "activation_backward_kernel", "combine_kernel", "weighted_kernel", "row_dot_kernel")


@pytest.mark.parametrize("arch", TARGETS)
def test_they_fit(arch, tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    triton = pytest.importorskip("triton")
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    newer = SPILLS_FROM_TRITON_3_9 if release >= (3, 9) else SPILLS_FROM_TRITON_3_8 if release >= (3, 8) else {}
    spills = SPILLS | newer if arch == "sm_90" else {}
    sms, shared, how = TARGETS[arch]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT))
    command = [sys.executable, str(ROOT / "tests/compile_experts.py"), arch, str(sms), how]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    found = {k["kernel"] for k in lines}
    assert {*PRODUCTS, "rank_kernel", "tiles_kernel", "count_kernel", "place_kernel", "combine_kernel"} <= found
    assert any(k["constants"].get("HALVES") for k in lines)
    if how == "all":  # tiles of an expert, for which several slots are chosen, in every dtype
        mixed = {(k["kernel"], k["dtype"]) for k in lines if k["constants"].get("MODE") == launch_experts.EXPERT}
        assert mixed == {(name, dtype) for name in PRODUCTS[3:] for dtype in ("*bf16", "*fp16", "*fp32")}
    for k in lines:
        assert k["shared"] <= shared, k
        constants = k["constants"]  # the backward reads A and B across their rows
        tile = (k["kernel"], k["dtype"], *(constants.get(name) for name in ("MODE", "BLOCK_M", "BLOCK_R")))
        room = 0 if arch == "sm_90" else 64
        assert k["stack"] <= (16 + room if constants.get("HALVES") else spills.get(tile, room)), k
        if k["kernel"] in PRODUCTS and constants.get("A_UNIT", 4) == 4 and constants.get("B_UNIT", 4) in (4, -1):
            ranks = 12 * constants["R_BLOCKS"] if constants["MODE"] == launch_experts.EXPERT else 0  # those of a tile's adapters
            assert k["wide"] > 0 and k["narrow"] <= ranks and k["narrow stores"] == 0, k
        if k["kernel"] in ROWS:
            assert k["narrow"] == 0 and k["narrow stores"] == 0, k
