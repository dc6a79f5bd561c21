"""Sort rows by slot, stable, in two launches and without a host sync: count per block of rows, then place."""

import triton
import triton.language as tl
from torch import Tensor

from ..launch import PlanConfig
from .tile import launch


@triton.jit
def buckets(ids, offsets, T, L, ids_stride):
    """The slot of each row, L for none; (bucket, row exists)."""
    there = offsets < T
    ident = tl.load(ids + offsets.to(tl.int64) * ids_stride, mask=there, other=-1)
    return tl.where((ident >= 0) & (ident < L), ident, L).to(tl.int32), there


@triton.jit(do_not_specialize=("T", "L", "ids_stride"), do_not_specialize_on_alignment=("ids", "counts"))
def count_kernel(
    ids, counts, T: "i32", L: "i32", ids_stride: "i64",
    BLOCK: tl.constexpr, STEPS: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[program] = how many rows of each slot the program's rows hold."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lanes = tl.arange(0, BLOCK_L)
    total = tl.zeros((BLOCK_L,), tl.int32)
    for step in range(STEPS):
        offsets = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        bucket, there = buckets(ids, offsets, T, L, ids_stride)
        total += tl.histogram(bucket, BLOCK_L, mask=there)
    tl.store(counts + tl.program_id(0) * BLOCK_L + lanes, total)


@triton.jit(do_not_specialize=("T", "L", "ids_stride", "programs"), do_not_specialize_on_alignment=("ids", "counts", "plan"))
def place_kernel(
    ids, counts, plan, T: "i32", L: "i32", ids_stride: "i64", programs: "i32",
    BLOCK: tl.constexpr, STEPS: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's place: its slot's start + its slot's rows in earlier blocks + those before it in its own block."""
    lanes = tl.arange(0, BLOCK_L)
    pid = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_L,), tl.int32)
    earlier = tl.zeros((BLOCK_L,), tl.int32)
    for other in range(programs):
        part = tl.load(counts + other * BLOCK_L + lanes)
        total += part
        earlier += tl.where(other < pid, part, 0)
    starts = tl.cumsum(total, 0) - total
    if pid == 0:
        tl.store(plan + T + lanes, starts, mask=lanes <= L)
        tl.store(plan + T + L + 1, T)
    next_place = starts + earlier
    for step in range(STEPS):
        lane = tl.arange(0, BLOCK)
        offsets = (pid * STEPS + step) * BLOCK + lane
        bucket, there = buckets(ids, offsets, T, L, ids_stride)
        same = (bucket[:, None] == bucket[None, :]) & (lane[None, :] < lane[:, None])
        before = tl.sum(same.to(tl.int32), 1)
        place = tl.gather(next_place, bucket, 0) + before
        tl.store(plan + place, offsets, mask=there)
        next_place += tl.histogram(bucket, BLOCK_L, mask=there)


def plan(name: str, ids: Tensor, num_slots: int, counts: Tensor, out: Tensor, config: PlanConfig, pdl: bool) -> None:
    """Write the plan of ids into out; counts is scratch, [programs, BLOCK_L] int32."""
    sizes = (ids.shape[0], num_slots, ids.stride(0))
    constants = (config.block, config.steps, config.block_l, pdl)
    grid = (config.programs, 1, 1)
    launch(name, count_kernel, grid, (ids, counts, *sizes), constants, 4, 1)
    launch(name, place_kernel, grid, (ids, counts, out, *sizes, config.programs), constants, 8, 1, pdl)
