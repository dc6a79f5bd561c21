"""Compile the expert kernels as the ops launch them, for a GPU that need not be there: `compile_kernels.py`'s manner.

    python tests/compile_experts.py sm_90 132 [quick]
"""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from compile_kernels import compiled, jobs, record

from grouped_lora_ops import launch_experts
from grouped_lora_ops.ops import common, expert_cuda, expert_launch

expert_plan = importlib.import_module("grouped_lora_ops.ops.expert_plan")

EXPERT = ("expert_plan", "expert_shrink", "expert_expand", "expert_delta", "expert_linear", "expert_wgrad", "expert_rows",
          "expert_gate_up")  # fmt: skip
KERNELS = (*EXPERT, "shrink", "expand", "plan", "wgrad", "halves")
# T, E, L, r, H, I, dtype
CASES = [
    (8, 128, 1, 32, 2048, 768, torch.bfloat16),
    (1500, 128, 1, 32, 2048, 768, torch.bfloat16),
    (64, 128, 1, 64, 2048, 768, torch.bfloat16),
    (1024, 128, 1, 32, 2048, 768, torch.bfloat16),
    (1024, 256, 1, 32, 7168, 2048, torch.bfloat16),
    (4096, 128, 1, 32, 2048, 768, torch.bfloat16),
    (64, 128, 4, 32, 2048, 768, torch.bfloat16),
    (4096, 128, 4, 64, 2048, 768, torch.float16),
    (512, 8, 2, 128, 2048, 768, torch.bfloat16),
    (1500, 128, 4, 16, 2048, 768, torch.bfloat16),
    (1500, 128, 4, 64, 2048, 768, torch.float16),
    (64, 8, 4, 128, 2048, 768, torch.bfloat16),
    (300, 128, 2, 16, 512, 256, torch.float32),
    (64, 128, 4, 16, 512, 256, torch.float32),
    (1500, 128, 4, 16, 512, 256, torch.float32),
]
QUICK = 2
# Shrinks ahead of csrc/linear.cu, which no CPU has: T, E, L, r, D, groups of A.
AHEAD = [
    (4096, 128, 4, 64, 2048, 2), (4096, 128, 4, 64, 768, 1), (4096, 256, 4, 64, 7168, 2), (512, 8, 2, 128, 2048, 1), (4096, 128, 1, 16, 2048, 2),
]  # fmt: skip


def empty(*shape, dtype=torch.bfloat16):
    """A tensor whose memory is never touched: big ones cost nothing."""
    return torch.empty(shape, dtype=dtype)


def main(arch: str, sms: int, quick: bool) -> None:
    common.INTERPRETER = (arch, sms)
    for name in KERNELS:
        importlib.import_module(f"grouped_lora_ops.kernels.{name}").launch = record
    for tokens, experts, slots, rank, hidden, inner, dtype in CASES[:QUICK] if quick else CASES:
        ids = torch.zeros(tokens, 8, dtype=torch.int32)
        adapters = torch.zeros(tokens, dtype=torch.int32) if slots > 1 else None
        scalings, ranks = torch.ones(slots), torch.full((slots,), rank, dtype=torch.int32) if slots > 1 else None
        routes = 8 * tokens
        gate_up = (empty(slots, experts, 2, rank, hidden, dtype=dtype), empty(slots, experts, 2 * inner, rank, dtype=dtype))
        down = (empty(slots, experts, rank, inner, dtype=dtype), empty(slots, experts, hidden, rank, dtype=dtype))
        x, a = empty(tokens, hidden, dtype=dtype), empty(routes, inner, dtype=dtype)
        h1, h2 = empty(routes, 2 * inner, dtype=dtype), empty(routes, hidden, dtype=dtype)
        expert_cuda.delta(x, *gate_up, ids, adapters, scalings, h1, None, ranks, None)
        w_gate_up = empty(1, 2, inner, hidden, dtype=dtype).expand(experts, -1, -1, -1)  # input-major and packed ones are views too
        w_down = empty(1, hidden, inner, dtype=dtype).expand(experts, -1, -1)
        expert_cuda.linear(x, w_gate_up, *gate_up, ids, adapters, scalings, None, None, ranks, None)
        expert_cuda.linear(a, w_down, *down, ids, adapters, scalings, None, None, ranks, None)
        weights = torch.ones(tokens, 8)
        layer = (x, ids, weights, w_gate_up, w_down, *gate_up, *down, adapters, scalings, None, None)
        for run in (expert_cuda.mlp, expert_cuda.mlp_train):
            run(*layer, "swiglu", None, "pre_down", ranks, None)
        if not quick and experts == 128 and (tokens == 4096 or rank == 64):
            needs = [True, True, False, False, True, True, True, True, False, False]
            expert_cuda.mlp_backward(x, h1, None, None, None, *layer, "swigluoai", 7.0, "post_down", ranks, None, needs)
            expert_cuda.delta_backward(h1, x, *gate_up, ids, adapters, scalings, None, ranks, None, [True] * 3 + [False])
        expert_cuda.delta(a, *down, ids, adapters, scalings, h2, None, ranks, None)
    for tokens, experts, slots, rank, features, groups in AHEAD[:1] if quick else AHEAD:
        ids, adapters = torch.zeros(tokens, 8, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32) if slots > 1 else None
        to = expert_launch.routing(ids, adapters, experts, slots, None)
        x, a = empty(8 * tokens, 1, features), empty(slots, experts, groups, rank, features)
        p = expert_launch.problem(x, to, groups, groups, features, 0, rank)
        ranks = torch.full((slots,), rank, dtype=torch.int32)
        config = launch_experts.shrink(p, False)
        expert_launch.run_shrink("expert_linear", x, a, groups, to, ranks, torch.ones(slots), False, config, True)
    for tokens, experts, slots in ((64, 128, 1), (4096, 128, 4), (4096, 256, 1), (8192, 256, 64)):
        expert_plan.build(torch.zeros(tokens, 8, dtype=torch.int32), None, experts, slots)
    capability = int(arch.removeprefix("sm_"))
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda job: compiled(job, capability), jobs.values()):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "quick" in sys.argv[3:])
