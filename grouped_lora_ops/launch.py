"""Which kernel and which tile for a problem: pure functions of sizes, a table lookup with a closed form behind it.

Three numbers may depend on D or r alone, never on T, because they fix the order of the sums and so a row's bits
(batch invariance): `chunk_of` (where the sum over D is cut), `rank_block` (how the sum over r is cut).
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

SINGLE, SCAN, PLAN = 0, 1, 2  # as in kernels.tile
SCAN_TOKENS = 128  # up to here every program sorts the ids itself and no plan is read
PARTS = 8  # D is cut into at most this many chunks


@dataclass(frozen=True)
class Problem:
    """One dense problem as far as the choice of a kernel goes."""

    arch: str  # "sm_90"
    sms: int  # multiprocessors
    itemsize: int  # bytes of an element of x
    tokens: int
    groups: int
    in_features: int
    out_features: int  # of one group; the largest slice with out_sizes
    rank: int
    slots: int
    shared_a: bool = False  # one A for several groups that each have an input
    stacked: bool = False  # groups that share one input, their As one behind the other

    @property
    def rows_per_slot(self) -> float:
        """Of evenly spread ids."""
        return self.tokens / max(1, min(self.tokens, self.slots))


@dataclass(frozen=True)
class ShrinkConfig:
    mode: int
    tiles: int  # programs along the rows: an upper bound on the tiles any ids can make
    block_m: int
    block_r: int
    block_k: int
    chunk: int
    chunks: int
    split: bool  # the sums of chunks apart, added by the expand
    block_t: int
    block_l: int
    precision: str
    num_warps: int
    num_stages: int
    span: int = 1  # chunks a program takes in turn, where split
    pdl: bool = False  # the expand behind it may start early
    early: bool = False  # it may itself start before the kernel ahead has ended
    merge: int = 1  # groups whose rows share a tile, a power of 2: they share A


@dataclass(frozen=True)
class ExpandConfig:
    mode: int
    tiles: int
    block_m: int
    block_n: int
    rank_block: int
    block_t: int
    block_l: int
    precision: str
    num_warps: int
    num_stages: int  # pipeline depth of the loop over N
    loop: int = 1  # blocks of N a program takes in turn, with h in registers
    pdl: bool = False
    narrow: bool = False  # adapters of at most 16 and at most 64 ranks have loops of their own


@dataclass(frozen=True)
class FusedConfig:
    mode: int
    tiles: int
    block_m: int
    block_n: int
    block_k: int
    rank_block: int
    chunk: int
    chunks: int
    block_t: int
    block_l: int
    precision: str
    num_warps: int
    num_stages: int
    n_stages: int  # pipeline depth of the loop over N


@dataclass(frozen=True)
class CudaConfig:
    """A kernel of csrc/delta.cu, by its five sizes, and how the work is dealt out."""

    tiles: int  # clusters along the rows
    block_m: int  # rows of a tile
    ranks: int  # the most it can do
    rank_split: int  # blocks of a cluster that share r
    block_n: int
    blocks: int = 1  # a multiprocessor holds, at least
    merged: int = 1  # groups whose rows share a tile, a power of 2
    spread: int = 1  # clusters that share N
    cluster: int = 8  # blocks
    overlap: bool = True  # programmatic dependent launch

    @property
    def kernel(self) -> str:
        return f"{self.block_m}_{self.ranks}_{self.rank_split}_{self.block_n}_{self.blocks}"


@dataclass(frozen=True)
class DeltaConfig:
    """One launch (fused) or two (shrink, then expand); before them cuda, where it is given and the layout fits it."""

    fused: FusedConfig | None
    shrink: ShrinkConfig | None
    expand: ExpandConfig | None
    cuda: CudaConfig | None = None
    merged: bool = False  # groups that share x: the shrink takes their As for one of G · r rows, and reads x once


@dataclass(frozen=True)
class PlanConfig:
    block: int  # rows sorted at once
    steps: int  # such blocks a program
    programs: int
    block_l: int


@dataclass(frozen=True)
class PlanCudaConfig:
    """csrc/plan.cu: one cluster, `rounds` items a thread."""

    kernel: str  # "plan" or "plan_pairs"
    blocks: int
    rounds: int
    shared: int  # bytes
    most_shared: int  # … that a block of this GPU may have
    wide: bool  # clusters of 16 blocks, not 8
    overlap: bool  # programmatic dependent launch


@dataclass(frozen=True)
class WgradConfig:
    mode: int
    tiles: int  # row chunks, an upper bound
    chunk_rows: int
    block_t: int  # rows a step
    block_w: int
    block_r: int
    block_l: int
    precision: str
    num_warps: int
    num_stages: int


def power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def chunk_of(features: int) -> int:
    """Length of the pieces that the sum over D is cut into: D/8, a multiple of 128, at least 256."""
    return max(256, cdiv(cdiv(features, PARTS), 128) * 128)


def chunks_of(features: int) -> int:
    return max(1, cdiv(features, chunk_of(features)))


def rank_block(rank: int, itemsize: int) -> int:
    """Length of the pieces that the sum over r is cut into; the matrix units want at least 16.

    float32 runs on the ordinary units, where 64 × 32 blocks of h are what fits in registers.
    """
    return min(128 if itemsize == 2 else 32, max(16, power_of_2(rank)))


def precision(itemsize: int) -> str:
    """How float32 operands are multiplied; half-precision ones are multiplied exactly in any case."""
    return "ieee" if itemsize == 4 else "tf32"


def tile_count(block_m: int, tokens: int, slots: int, single: bool) -> int:
    """Most tiles that `tokens` rows can make: each slot, and the rows without one, ends in a part-filled tile."""
    if single:
        return cdiv(tokens, block_m)
    return (tokens + (block_m - 1) * min(tokens, slots + 1)) // block_m


def row_mode(tokens: int, slots: int) -> int:
    return SINGLE if slots == 1 else SCAN if tokens <= SCAN_TOKENS else PLAN


def has_pdl(arch: str) -> bool:
    """Whether the GPU knows programmatic dependent launch."""
    return int(arch.removeprefix("sm_")) >= 90


def narrow(arch: str) -> bool:
    """Whether a block has 99 KB of shared memory only (consumer GPUs), not 163 or more."""
    return int(arch.removeprefix("sm_")) not in (80, 87, 90, 100, 101, 103, 110)


def needs_plan(tokens: int, slots: int) -> bool:
    return row_mode(tokens, slots) == PLAN


def _blocks(mode: int, tokens: int, slots: int) -> tuple[int, int]:
    """(BLOCK_T, BLOCK_L): few distinct values, so that few kernels are compiled."""
    if mode == SINGLE:
        return 16, 16
    block_l = max(16, power_of_2(slots + 1))
    if mode == PLAN:
        return 16, block_l
    return (16 if tokens <= 16 else 64 if tokens <= 64 else SCAN_TOKENS), block_l


def estimated_tiles(p: Problem, block_m: int) -> int:
    """Tiles that evenly spread ids make."""
    slots = max(1, min(p.tokens, p.slots))
    return slots * cdiv(cdiv(p.tokens, slots), block_m)


def shrink_with(p: Problem, block_m: int, block_r: int, block_k: int, num_warps: int, num_stages: int, split: bool) -> ShrinkConfig:
    mode = row_mode(p.tokens, p.slots)
    block_t, block_l = _blocks(mode, p.tokens, p.slots)
    if p.itemsize == 4:
        block_k //= 2
    return ShrinkConfig(
        mode=mode,
        tiles=tile_count(block_m, p.tokens, p.slots, mode == SINGLE),
        block_m=block_m,
        block_r=block_r,
        block_k=block_k,
        chunk=chunk_of(p.in_features),
        chunks=chunks_of(p.in_features),
        split=split,
        block_t=block_t,
        block_l=block_l,
        precision=precision(p.itemsize),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _merged(tokens: int, block_r: int) -> tuple[int, int, int, int, int]:
    """Tiles of a shrink whose groups share A and whose slots have few rows: a tile holds the rows of several groups, so that A is read
    once for them (H200: wo_a r 64 S8, T = 8 7.4 µs, not 8.8; with 8 groups 11.1, not 17.2)."""
    if tokens <= 8 or (tokens <= 16 and block_r <= 16):
        return 16, 16, 128, 4, 4
    if tokens <= 16:
        return 16, 32, 64, 4, 6
    if tokens <= 64 or block_r <= 16:
        return 32 if tokens > 48 and block_r > 16 else 16, 16, 128, 2, 4
    return 16, block_r, 64, 4, 4


def shrink(p: Problem, split: bool = False) -> ShrinkConfig:
    """Rows, ranks and stages that were fastest on an H200 (bench/tune.py, bench/NOTES.md), in bf16."""
    block_r, rows = rank_block(p.rank, p.itemsize), p.rows_per_slot
    merge = next((n for n in (8, 4, 2) if p.groups % n == 0), 1) if p.shared_a and p.itemsize == 2 else 1
    if split and merge > 1 and p.slots > 1 and block_r <= 64 and 4 <= p.tokens <= SCAN_TOKENS and rows < 32:
        return replace(shrink_with(p, *_merged(p.tokens, block_r), True), merge=merge)
    if split and p.tokens <= 64:
        if block_r <= 16 < p.tokens and p.slots > 1:
            return shrink_with(p, 16, block_r, 128, 2, 4, True)
        # few programs: spread them over r; each loads its whole chunk of A at once
        programs = estimated_tiles(p, 16) * p.groups * chunks_of(p.in_features)
        while block_r > 16 and programs * rank_block(p.rank, p.itemsize) // block_r < p.sms // 2:
            block_r //= 2
        if block_r <= 32:
            return shrink_with(p, 16, block_r, 128, 4, 4, True)
        return shrink_with(p, 16, block_r, 64, 4, 6 if block_r <= 64 else 4, True)
    if split and p.itemsize == 2 and block_r <= 64 and rows >= 32 and not narrow(p.arch):
        if p.tokens * p.groups < 4096:
            if rows < 256:
                return shrink_with(p, 32, block_r, 128, 4, 3, True)
            return shrink_with(p, 64, block_r, 64, 8 if block_r == 64 else 4, 6, True)
        # one wave of programs, each with several chunks of D: 13.5 µs where one chunk each took 14.5 (wo_a r 16, T = 1024)
        if block_r == 64 and rows < 1024:
            return replace(shrink_with(p, 32, block_r, 128, 4, 4, True), span=4)
        if rows >= 64:
            return replace(shrink_with(p, 64, block_r, *{16: (128, 4, 3), 32: (64, 4, 4), 64: (64, 4, 5)}[block_r], True), span=2)
    # ranks above 64 in narrow blocks: those past an adapter's rank leave at once (rank 16 in 256, T = 1024: 27 µs, 37 by blocks of 128)
    if split and block_r > 64 and rows >= 32 and p.tokens > SCAN_TOKENS:
        return shrink_with(p, 32, 32, 128, 4, 3, True)
    if split:
        block_m = 64 if rows >= 256 and (block_r >= 64 or p.tokens * p.groups >= 4096) else 32 if rows >= 32 else 16
        while block_m > 16 and estimated_tiles(p, block_m) * p.groups * chunks_of(p.in_features) < p.sms // 2:
            block_m //= 2
        return shrink_with(p, block_m, block_r, 64, 4, {64: 3 if block_r <= 32 else 4}.get(block_m, 5) if block_r <= 64 else 3, True)
    if block_r > 64:
        if rows < 64:
            return shrink_with(p, 16, block_r, 64, 4, 3, False)
        if p.arch != "sm_90":  # 64 × 64 by 4 warps spill elsewhere
            return shrink_with(p, 64, block_r, 64, 8, 3, False)
        return shrink_with(p, 64, 64, *((128, 4, 3) if p.rank <= 128 else (64, 4, 5)), False)
    if p.tokens * p.groups < 16 * p.sms:
        return shrink_with(p, 16, block_r, 128, 4, 4, False)
    if block_r == 64 and rows < 256:
        if rows < 64:
            return shrink_with(p, 16, block_r, 64, 4, 5, False)
        # steps of 128 columns leave room for one block on a multiprocessor: for one wave of them (plain r 64 S64, T = 8192, two
        # waves: 117 µs, 101 by steps of 64)
        one_wave = (p.tokens / 64 + p.slots / 2) * p.groups <= p.sms and not narrow(p.arch)  # a slot's last tile is half full
        return shrink_with(p, 64, block_r, 128, 4, 4, False) if one_wave else shrink_with(p, 64, block_r, 64, 4, 5, False)
    if block_r == 64 and rows < 1024:
        return shrink_with(p, 16, block_r, 128, 4, 5, False)
    return shrink_with(p, 32 if rows >= 32 else 16, block_r, 128, 4, 4, False)


def expand(p: Problem, pdl: bool = False) -> ExpandConfig:
    """As `shrink`: small tiles while programs are few, then several blocks of N a program behind one load of h."""
    mode, rows, block_r = row_mode(p.tokens, p.slots), p.rows_per_slot, rank_block(p.rank, p.itemsize)
    block_t, block_l = _blocks(mode, p.tokens, p.slots)
    work = p.tokens * p.groups
    block_m, block_n, num_warps, loop, num_stages = 16, 128, 4, 1, 1
    if p.tokens < 64 or block_r > 64 or p.itemsize == 4:
        block_n = 64
    programs = estimated_tiles(p, 16) * p.groups * cdiv(p.out_features, block_n)
    if programs > 4 * p.sms:
        loop, num_stages = 4, 3
    elif p.itemsize == 2 and block_r <= 64 and p.tokens > SCAN_TOKENS:
        if rows >= 256 and p.out_features % 256 == 0:
            block_n, num_warps = 256, 8
        elif block_r == 64 and rows >= 32:
            loop, num_stages = 2, 2
    if work >= 4096 and rows >= 32:
        if block_r == 32:
            block_m, loop, num_stages = 16, 4, 4
        elif block_r < 32:
            block_m, loop, num_stages = (16, 4, 3) if rows >= 1024 else (32, 2, 1)
        else:
            block_m, loop, num_stages = 32 if rows < 256 else 16, 4, 3
    if work >= 8192 and block_r > 32:
        if rows >= 2048:
            block_m, block_n, num_warps, loop, num_stages = 128, 64, 8, 8, 3
        elif rows >= 32:
            block_m, loop, num_stages = 64 if rows >= 256 else 32, 8, 3
    if block_r > 64 and rows >= 64 and work >= 2048:
        block_m, block_n, num_warps = 64, 128, 8
    if block_r > 64 or p.itemsize == 4:
        num_stages = min(num_stages, 2)
        block_m = min(block_m, 64 if p.itemsize == 2 else 32)
    if block_r > 64 and p.rank <= 2 * block_r and rows >= 32 and mode != SCAN:
        whole = work >= 16 * p.sms  # behind a shrink split over D tall tiles of h spill, whose parts are added here
        if p.rank <= block_r:
            chosen = (64, 64, 4, 8, 3) if whole and rows >= 64 else (16, 64, 4, 8, 3) if rows >= 64 else (16, 128, 4, 2, 1)
        else:
            chosen = (64, 64, 4, 8, 1) if whole and rows >= 256 and p.arch == "sm_90" else (16, 64, 4, 8, 3)
        block_m, block_n, num_warps, loop, num_stages = chosen
    return ExpandConfig(
        mode=mode,
        tiles=tile_count(block_m, p.tokens, p.slots, mode == SINGLE),
        block_m=block_m,
        block_n=block_n,
        rank_block=block_r,
        block_t=block_t,
        block_l=block_l,
        precision=precision(p.itemsize),
        num_warps=num_warps,
        num_stages=num_stages,
        loop=loop,
        pdl=pdl,
        narrow=block_r > 64,
    )


def fused(p: Problem, block_m: int, **changes) -> FusedConfig:
    mode = row_mode(p.tokens, p.slots)
    block_t, block_l = _blocks(mode, p.tokens, p.slots)
    config = FusedConfig(
        mode=mode,
        tiles=tile_count(block_m, p.tokens, p.slots, mode == SINGLE),
        block_m=block_m,
        block_n=64,
        block_k=64 if p.itemsize == 2 else 32,
        rank_block=rank_block(p.rank, p.itemsize),
        chunk=chunk_of(p.in_features),
        chunks=chunks_of(p.in_features),
        block_t=block_t,
        block_l=block_l,
        precision=precision(p.itemsize),
        num_warps=4,
        num_stages=3,
        n_stages=2,
    )
    return replace(config, **changes)


def _fused(p: Problem) -> FusedConfig | None:
    """The one-launch kernel where the rows alone fill the GPU and it was faster than two launches, else None."""
    block_r, rows, work = rank_block(p.rank, p.itemsize), p.rows_per_slot, p.tokens * p.groups
    if p.itemsize == 4:
        return fused(p, 64) if p.rank <= block_r and rows >= 64 and work >= 128 * p.sms else None
    if block_r <= 32 and work >= 128 * p.sms and rows >= 64:
        return fused(p, 64 if block_r == 32 and rows >= 256 else 32, block_k=128, num_stages=2, n_stages=4)
    if block_r <= 32 and work >= 48 * p.sms and rows >= 32:
        return fused(p, 16, block_n=128, block_k=128, num_stages=4, n_stages=3)
    if block_r == 64 and work >= 128 * p.sms and rows >= 256:
        if rows >= 2048:
            return fused(p, 128, n_stages=3)  # spills on sm_90; 8 warps, which do not: 142 µs, not 115, at T = 8192
        return fused(p, 64, block_k=128, n_stages=4)
    return None


# The kernels that csrc/delta.cu instantiates: (rows, ranks, splits of r, columns of N a step, blocks a multiprocessor).
CUDA_KERNELS = (
    (16, 16, 1, 128, 1), (16, 16, 1, 128, 3), (16, 32, 1, 128, 1), (16, 64, 1, 128, 1), (16, 64, 2, 128, 1), (16, 64, 2, 64, 1),
    (16, 128, 2, 64, 1),
)  # fmt: skip
CUDA_TOKENS = 256  # it sorts the ids with a thread a token
CUDA_STAGE = 512  # columns of D that a block holds at once


def cuda(p: Problem, kernel: tuple[int, ...], merge: bool = False, spread: int = 1, overlap: bool = True):
    """CudaConfig of a kernel, or None where it would compute something else: whatever a table's rule asks for."""
    block_m, ranks, rank_split, block_n, blocks = (*kernel, 1)[:5]
    if p.itemsize != 2 or p.rank > ranks or p.tokens > CUDA_TOKENS:
        return None
    if merge and not (p.shared_a and p.groups in (2, 4, 8)):
        return None
    merged = p.groups if merge else 1
    return CudaConfig(
        tiles=tile_count(block_m // merged, p.tokens, p.slots, p.slots == 1),
        block_m=block_m,
        ranks=ranks,
        rank_split=rank_split,
        block_n=block_n,
        blocks=blocks,
        merged=merged,
        spread=spread,
        cluster=PARTS * rank_split if has_pdl(p.arch) else 1,
        overlap=overlap and has_pdl(p.arch),
    )


def _cuda(p: Problem) -> CudaConfig | None:
    """csrc/delta.cu where it was faster than the Triton kernels on an H200 (bench/NOTES.md): a few rows."""
    if p.arch != "sm_90" or p.itemsize != 2 or p.rank > 64 or p.in_features < 1024:
        return None
    if p.rank <= 16:
        return _cuda_16(p)
    if p.tokens > 4 or p.groups == 1:
        return None
    kernel = (16, 32, 1, 128) if p.rank <= 32 else (16, 64, 2, 64)
    clusters, blocks = estimated_tiles(p, 16) * p.groups, cdiv(p.out_features, kernel[3] * PARTS * kernel[2])
    if p.rank > 32 and (clusters > 4 or blocks > 1):
        return None
    if p.shared_a and p.groups in (2, 4, 8) and clusters > 16:
        return cuda(p, kernel, merge=True, spread=p.groups // 2)
    spread = max(1, min(8, blocks, 16 // max(1, clusters)))
    if p.out_features > 4096 and blocks > spread:  # a block's steps along N follow one another: gate_up T = 8 18.2 µs, not 10.4
        return None
    return cuda(p, kernel, spread=spread)


def _cuda_16(p: Problem) -> CudaConfig | None:
    """Up to 16 clusters have their next call's beside them; with more it takes blocks of which three fit a multiprocessor
    (wo_a S8, T = 8: 5.7 µs, not 6.3; T = 32: 6.7, by Triton 7.6)."""
    if p.tokens > 8:
        most = 8 if p.groups == 1 and p.slots == 1 else 32 if p.groups > 1 and not p.stacked else 16
        if p.tokens > most or (p.slots > 1 and p.rows_per_slot > 12):
            return None
    clusters, blocks = estimated_tiles(p, 16) * p.groups, cdiv(p.out_features, 128 * PARTS)
    few = max(1, min(8, blocks, 16 // max(1, clusters)))
    if p.out_features > 4096 and blocks > few:
        return None
    if clusters * few <= 16 and blocks <= few:
        return cuda(p, (16, 16, 1, 128), spread=few)
    spread = min(8, cdiv(blocks, 2))
    if clusters * spread <= (48 if chunk_of(p.in_features) <= CUDA_STAGE else 30):  # two stages leave room for two such blocks, not three
        return cuda(p, (16, 16, 1, 128, 3), spread=spread)
    if p.tokens > 8 or (p.shared_a and p.groups % 2 == 0):  # a shrink of merged groups: 8 of them, T = 8 7.7 µs, here 8.4
        return None
    return cuda(p, (16, 16, 1, 128), spread=few)


def delta(p: Problem) -> DeltaConfig:
    """A few rows: csrc/delta.cu. Long batches: one launch (fused). Else a shrink, split over D while its programs are few,
    then an expand. Where csrc/delta.cu cannot be had or the layout does not fit it, what would be chosen without it."""
    for rule in table(p.arch).get("delta", ()):
        if _matches(rule["when"], p):
            if "cuda" in rule:
                return replace(_triton(p), cuda=cuda(p, **rule["cuda"]) if rule["cuda"] else None)
            if "fused" in rule:
                if p.rank > rank_block(p.rank, p.itemsize):  # it holds h in one block of ranks
                    continue
                return DeltaConfig(fused(p, **rule["fused"]), None, None)
            first = replace(shrink(p, split=rule["split"]), pdl=has_pdl(p.arch))
            return DeltaConfig(None, _retile(first, p, rule["shrink"]), _retile(expand(p, pdl=has_pdl(p.arch)), p, rule["expand"]))
    return replace(_triton(p), cuda=_cuda(p))


def _triton(p: Problem) -> DeltaConfig:
    one, block_r = _fused(p), rank_block(p.rank, p.itemsize)
    if one is not None and p.stacked and p.itemsize == 2 and p.groups * p.rank <= 64:  # x read once: qkv r 16, T = 8192 89 µs, not 107
        every = replace(p, groups=1, rank=p.groups * p.rank)
        first = shrink_with(every, 32, rank_block(every.rank, p.itemsize), 128, 4, 4, False)
        behind = _retile(expand(p, pdl=has_pdl(p.arch)), p, {"block_m": 32, "block_n": 128, "num_warps": 4, "loop": 4, "num_stages": 3})
        return DeltaConfig(None, replace(first, pdl=has_pdl(p.arch)), behind, merged=True)
    if one is not None:
        return DeltaConfig(one, None, None)
    work = p.tokens * p.groups
    split = work < 16 * p.sms or (block_r <= 32 and work < 64 * p.sms) or (block_r == 64 and p.rows_per_slot >= 512 and work < 48 * p.sms)
    pdl = has_pdl(p.arch)
    return DeltaConfig(None, replace(shrink(p, split=split), pdl=pdl, early=pdl and _early(p)), expand(p, pdl=pdl))


def _early(p: Problem) -> bool:
    """Whether the shrink starts before the kernel ahead has ended.

    Blocks that wait early take the room, and the even spread over multiprocessors, from what runs: with many rows that cost up
    to 25 % (wo_a r 64 T = 1024: 34.5 µs, not 27.9), with 64 adapters 8 %. Here it gains 0.1 to 1.1 µs.
    """
    if p.slots == 1:
        return p.tokens <= 8 or (p.tokens <= 64 and (p.groups > 1 or p.rank <= 32))
    if p.tokens <= 2:
        return True
    return 24 <= p.tokens <= 64 and p.rank <= 16 and p.slots <= 32 and p.groups <= 4 and max(p.in_features, p.out_features) <= 4096


def _retile(config, p: Problem, changes: dict):
    """A configuration with a rule's changes; the number of tiles follows the tile height."""
    config = replace(config, **changes)
    return replace(config, tiles=tile_count(config.block_m, p.tokens, p.slots, config.mode == SINGLE))


def plan(tokens: int, slots: int) -> PlanConfig:
    """Blocks of 256 rows; a program takes up to 16 in turn, so that hundreds of thousands of rows stay cheap."""
    block = 256
    blocks = max(1, cdiv(tokens, block))
    steps = 1 if blocks <= 64 else 4 if blocks <= 512 else 16
    return PlanConfig(block, steps, cdiv(blocks, steps), max(16, power_of_2(slots + 1)))


PLAN_THREADS, PLAN_ROUNDS = 512, 32  # as in csrc/plan.cu; the most items of a thread


def _plan_cuda(arch: str, kernel: str, items: int, blocks: int, width: int, shared: int) -> PlanCudaConfig | None:
    """shared: bytes beside those for items; None where that is more than there is."""
    wide = arch in ("sm_90", "sm_100")
    most, rounds = (227 if wide else 99) << 10, cdiv(items, blocks * PLAN_THREADS)
    shared += rounds * PLAN_THREADS * (16 if kernel == "plan_pairs" else 4)
    if shared > most or rounds > PLAN_ROUNDS or width > 8 * PLAN_THREADS or blocks > (16 if wide else 8):
        return None
    return PlanCudaConfig(kernel, blocks, rounds, shared, most, wide, has_pdl(arch))


def plan_cuda_with(arch: str, items: int, experts: int, slots: int, tiles: bool, blocks: int) -> PlanCudaConfig | None:
    """csrc/plan.cu's `plan` by `blocks` blocks, where it fits; rows without experts: experts = L, slots = 0, no tiles."""
    width = cdiv(experts * (slots + 1) + 1, 8) * 8
    return _plan_cuda(arch, "plan", items, blocks, width, width * (32 + 2 * blocks + (12 if tiles else 4)) + 256)


def plan_pairs_with(arch: str, items: int, experts: int, slots: int, blocks: int) -> PlanCudaConfig | None:
    """csrc/plan.cu's `plan_pairs` by `blocks` blocks, where it fits."""
    widths = [cdiv(n + 1, 8) * 8 for n in (slots, experts)]
    return _plan_cuda(arch, "plan_pairs", items, blocks, max(widths), 36 * max(widths) + 2 * blocks * sum(widths) + 384)


def plan_cuda(arch: str, items: int, experts: int, slots: int, tiles: bool) -> PlanCudaConfig | None:
    """A block for every 512 items, up to a cluster; plan_pairs where there are more pairs than a block can count."""
    if not has_pdl(arch):
        return None  # no clusters
    most = 16 if arch in ("sm_90", "sm_100") else 8
    blocks = min(most, power_of_2(cdiv(max(items, 1), PLAN_THREADS)))
    one = plan_cuda_with(arch, items, experts, slots, tiles, blocks)
    return plan_pairs_with(arch, items, experts, slots, max(2, blocks)) if one is None and tiles else one


def wgrad(p: Problem, width: int) -> WgradConfig:
    """Rows in chunks whose partial sums are added in order; as many as fill the GPU."""
    mode = SINGLE if p.slots == 1 else PLAN
    half = p.itemsize == 2
    block_w, block_r = (128, min(64, rank_block(p.rank, 2))) if half else (64, min(32, rank_block(p.rank, 4)))
    columns = cdiv(width, block_w) * max(1, p.groups) * cdiv(p.rank, block_r)
    wanted = max(1, (2 * p.sms) // columns)
    chunk_rows = max(64, power_of_2(cdiv(p.tokens, wanted)))
    return WgradConfig(
        mode=mode,
        tiles=tile_count(chunk_rows, p.tokens, p.slots, mode == SINGLE),
        chunk_rows=chunk_rows,
        block_t=32 if half else 16,
        block_w=block_w,
        block_r=block_r,
        block_l=max(16, power_of_2(p.slots + 1)),
        precision=precision(p.itemsize),
        num_warps=8 if block_r == 64 else 4,
        num_stages=3,
    )


def _matches(when: dict, p: Problem) -> bool:
    rows = p.rows_per_slot
    work = p.tokens * p.groups
    values = {"itemsize": p.itemsize, "rank": rank_block(p.rank, p.itemsize), "rows": rows, "work": work, "tokens": p.tokens}
    values.update(groups=p.groups, out=p.out_features, slots=p.slots)
    return all(low <= values[name] <= high for name, (low, high) in when.items())


@functools.cache
def table(arch: str) -> dict:
    """Rules that come before the closed form: `launch_tables/<arch>.json`, or the file GROUPED_LORA_TABLE names; or none.

    {"delta": [{"when": {"rank": [64, 64], "work": [4096, 8191]}, "split": false, "shrink": {"block_m": 16},
    "expand": {"loop": 4, "num_stages": 3}}, {"when": {…}, "fused": {"block_m": 64}}]}: the first rule whose ranges all
    hold is taken. `when` knows itemsize, rank (its block), rows (per slot), work (T · G), tokens, groups, out, slots;
    the changes are fields of ShrinkConfig (merge: 1, 2, 4 or 8), ExpandConfig and FusedConfig. "cuda": null in their place keeps
    csrc/delta.cu out, "cuda": {"kernel": [16, 64, 2, 128], "spread": 2} asks for one of CUDA_KERNELS (the fifth number 1 if not
    given). "fused" is passed over where r is more than a block. A rule
    may not change what fixes a row's bits: chunk, chunks and rank_block.
    """
    path = os.environ.get("GROUPED_LORA_TABLE") or Path(__file__).parent / "launch_tables" / f"{arch}.json"
    try:
        rules = json.loads(Path(path).read_text())
    except FileNotFoundError:
        if "GROUPED_LORA_TABLE" in os.environ:
            raise ValueError(f"grouped_lora: GROUPED_LORA_TABLE must name a file; got {path}.") from None
        return {}
    for rule in rules.get("delta", ()):
        frozen = {"chunk", "chunks", "rank_block"} & {k for part in ("shrink", "expand", "fused") for k in rule.get(part, ())}
        if frozen:
            raise ValueError(f"grouped_lora: a rule of {path} must not change {sorted(frozen)}, which fix a row's bits; got {rule}.")
        if rule.get("shrink", {}).get("merge", 1) not in (1, 2, 4, 8):
            raise ValueError(f"grouped_lora: a rule of {path} must merge 1, 2, 4 or 8 groups; got {rule}.")
        if rule.get("cuda") and (*rule["cuda"].get("kernel", ()), 1)[:5] not in CUDA_KERNELS:
            raise ValueError(f"grouped_lora: a rule of {path} must ask for a kernel of csrc/delta.cu; got {rule}.")
    return rules
