"""`plan` and `expert_plan` in one launch of csrc/plan.cu."""

from __future__ import annotations

from torch import Tensor

from .. import cuda
from ..launch import PLAN_THREADS, PlanCudaConfig

TILES, OVERLAP = 1, 2
# struct Params: ids adapters plan; strides in bytes; where ids have their upper halves; sizes, the launch, tiles, flags
LAYOUT = "3P3q11I"


def make(
    name: str,
    ids: Tensor,  # [T, K] experts, or [T] slots of rows without experts
    adapters: Tensor | None,  # [T]
    experts: int,  # … or the slots of rows without experts
    slots: int,
    out: Tensor,
    config: PlanCudaConfig,
    tile_rows: int = 0,  # a power of 2; 0: the plan has no tiles
    room: int = 0,  # tiles that out has room for
) -> bool:
    """Write the plan of ids into out. False where this GPU has no such kernel."""
    module = cuda.module(name, "plan", out.device.index)
    if module is None:
        return False
    # the most that any size asks for, so that inside a capture a known kernel serves sizes that are new
    function = module.function(name, config.kernel, config.most_shared, config.wide)

    def high(t: Tensor | None) -> int:
        return 0 if t is None or t.dtype.itemsize == 4 else 4

    per_token = 1 if ids.dim() == 1 else ids.shape[1]
    bytes_t, bytes_k = ids.stride(0) * ids.dtype.itemsize, 0 if ids.dim() == 1 else ids.stride(1) * ids.dtype.itemsize
    bytes_a = 0 if adapters is None else adapters.stride(0) * adapters.dtype.itemsize
    flags = (TILES if tile_rows else 0) | (OVERLAP if config.overlap else 0)
    values = (
        ids, adapters, out, bytes_t, bytes_k, bytes_a, high(ids), high(adapters),
        ids.shape[0] * per_token, per_token, experts, slots, config.blocks, config.rounds,
        max(tile_rows.bit_length() - 1, 0), room, flags,
    )  # fmt: skip
    cuda.launch(
        function,
        (config.blocks, 1, 1),
        PLAN_THREADS,
        LAYOUT,
        values,
        cluster=(config.blocks, 1, 1),
        shared=config.shared,
        pdl=config.overlap,
    )
    return True
