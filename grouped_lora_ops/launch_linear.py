"""Which tiles for `linear`: pure functions of sizes, as in `launch`.

The order of the sums is fixed whatever is chosen here: one chain of products over D (float32: pieces of 16 columns, added in
order), then h Bᵀ in pieces of `rank_block`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import launch
from .launch import PLAN, SCAN, SINGLE, Problem, ShrinkConfig, cdiv, has_pdl, power_of_2, precision, tile_count

ROWS = 3  # tiles are runs of rows; each adapter that occurs in a tile adds its product to its rows
SORTED = 4  # the same for the rows in the plan's order
MIXED = (ROWS, SORTED)
CUDA_TOKENS = 65  # from here on csrc/linear.cu, where csrc/stream.cu does not take two blocks of rows; for the gradient of x from 128 on
SORT_STAGES = 2.5  # so many stages of LoRA less a tile are worth a plan and rows that are gathered
STREAM_TOKENS = 64  # up to here all rows are one tile and W is read once; by csrc/stream.cu up to twice as many in two
STREAM_RANKS = (0, 16, 32, 64)  # of the kernels of csrc/stream.cu
STREAM_COLUMNS = 64  # of its widest blocks
STREAM_STEP = {16: 256, 64: 128}  # columns of D of a stage, by its rows
STREAM_CONVERTED = {(16, 32): 0, (64, 32): 4, (64, 64): 2}  # its stages of an e4m3 weight in bf16, by rows and columns
SCALE_BLOCK = 128  # rows and columns of an e4m3 weight that share a scale; a step's columns of D
DEQUANTIZE_TOKENS = 129  # from here on a weight with e8m0 scales is made bf16 by a kernel of its own, ahead of the product
FLOAT32_PIECE = 16  # float32: D is cut into pieces of so many columns, a step each (32 spill: both operands sit in registers)
KB = 1024
STREAM_FIXED = 4 * KB  # a block's shared memory beside `stream_bytes`, and what the system takes


@dataclass(frozen=True)
class CudaConfig:
    """A launch of csrc/linear.cu: tiles of 128 rows, a block a multiprocessor that takes several in turn."""

    mode: int  # ROWS, or SORTED
    programs: int
    tile_group: int
    columns: int = 256  # of a tile: 256, 128 or 64


@dataclass(frozen=True)
class StreamConfig:
    """A launch of csrc/stream.cu: all rows in a block or in two, W and x by TMA in rings of stages of 128 columns of D."""

    rows: int  # a block's, 16 or 64; of more than 64 half as many each
    block_n: int
    stages: int  # of W; of e4m3 with 64 rows an even number
    x_stages: int
    adapters: int  # whose B there is room for; more come in turns
    next_early: bool  # the kernel behind it may start early
    late: bool = False  # B comes to where the rings were
    e4m3: bool = False  # W is, with scales


@dataclass(frozen=True)
class LinearConfig:
    shrink: ShrinkConfig | None  # what makes h; None without LoRA
    mode: int
    tiles: int  # programs along the rows: an upper bound on the tiles any ids can make
    block_m: int
    block_n: int
    block_k: int
    rank_block: int
    block_t: int
    block_l: int
    tile_group: int  # so many tiles of rows take turns at a block of W, so that both stay in the L2
    precision: str
    num_warps: int
    num_stages: int
    slot_stages: int  # pipeline depth of the loop over a tile's adapters (MIXED)
    prefetch: bool  # ROWS: B is called into the L2 before the base
    pdl: bool
    cuda: CudaConfig | None = None  # csrc/linear.cu instead, where the layouts suit it
    stream: StreamConfig | None = None  # csrc/stream.cu instead, likewise


def rank_block(rank: int, itemsize: int) -> int:
    """Length of the pieces that the sum over r is cut into: 64 beside an accumulator of 128 × 256 spill."""
    return min(32 if itemsize == 2 else 16, max(16, power_of_2(rank)))


def shared_memory(arch: str) -> int:
    """Bytes of shared memory a block may have."""
    return {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}.get(arch, 99) * KB


def has_e4m3(arch: str) -> bool:
    """Whether Triton knows the type there."""
    return int(arch.removeprefix("sm_")) >= 89


def linear_with(p: Problem, mode: int, block_m: int, **changes) -> LinearConfig:
    """A configuration by its tile; stages, then columns of D a step, become fewer until it fits into shared memory."""
    block_t, block_l = (16, 16) if mode in MIXED else launch._blocks(mode, p.tokens, p.slots)
    chosen = dict(
        shrink=_shrink(p),
        mode=mode,
        tiles=cdiv(p.tokens, block_m) if mode in MIXED else tile_count(block_m, p.tokens, p.slots, mode == SINGLE),
        block_m=block_m,
        block_n=64,
        block_k=64,
        rank_block=rank_block(max(p.rank, 1), p.itemsize),
        block_t=block_t,
        block_l=block_l,
        tile_group=8,
        precision=precision(p.itemsize),
        num_warps=4,
        num_stages=4,
        slot_stages=3,
        prefetch=mode == ROWS and p.tokens <= STREAM_TOKENS and p.rank * p.itemsize <= 128,
        pdl=has_pdl(p.arch),
    )
    chosen.update(changes)
    if p.itemsize == 4:
        chosen["block_k"] = FLOAT32_PIECE
    room = shared_memory(p.arch) - 8 * KB - 2 * 2 * block_m * chosen["rank_block"]  # h's two halves

    def stages() -> int:
        return room // ((block_m + chosen["block_n"]) * chosen["block_k"] * p.itemsize)

    while stages() < 3 and chosen["block_k"] > 32:
        chosen["block_k"] //= 2
    chosen["num_stages"] = max(2, min(chosen["num_stages"], stages()))
    return LinearConfig(**chosen)


def _shrink(p: Problem) -> ShrinkConfig | None:
    """As `launch.delta` chooses it for two launches."""
    if p.rank == 0 or p.slots == 0 or p.in_features == 0:
        return None
    work = p.tokens * p.groups
    split = work < 16 * p.sms or (work < 64 * p.sms and launch.rank_block(p.rank, p.itemsize) <= 32)
    return replace(launch.shrink(p, split=split), pdl=has_pdl(p.arch))


def _shrink_ahead(p: Problem, config: ShrinkConfig | None, programs: int) -> ShrinkConfig | None:
    """config, or what was faster on an H200 (bench/NOTES.md) ahead of csrc/linear.cu, so many blocks of which leave it no room on
    their multiprocessors."""
    if config is None:
        return None
    block_r, rows = launch.rank_block(p.rank, p.itemsize), p.rows_per_slot
    whole = None
    if block_r <= 32 and rows >= 32 and p.sms // 8 <= launch.estimated_tiles(p, 32) * p.groups <= p.sms - programs:
        whole = (32, 128, 4, 4)  # few programs leave room for the product to start beside them; fewer would take longer than it
    elif p.tokens >= 8192 and block_r <= 32 and rows >= 32:
        whole = (32, 128, 4, 5)
    elif p.tokens >= 8192 and block_r == 64 and rows >= 256:
        whole = (64, 128, 4, 3)
    if whole is None:
        return config
    block_m, block_k, warps, stages = whole
    return replace(launch.shrink_with(p, block_m, block_r, block_k, warps, stages, split=False), pdl=config.pdl)


def _stream(p: Problem) -> LinearConfig:
    """All rows in one tile: W is read once, in blocks of N narrow enough that nearly every multiprocessor has one.

    The floor is the bytes of W, so what counts is how many of them are under way: at least 32 KB on each of 132.
    """
    block_m = max(16, power_of_2(p.tokens))
    block_n = 32
    for wider in (128, 64) if p.itemsize == 2 else (64,):
        if p.groups * cdiv(p.out_features, wider) >= 0.9 * p.sms:
            block_n = wider
            break
    block_k = 256 if block_n == 32 and block_m <= 32 else 128
    warps = 8 if p.itemsize == 4 and block_m == 64 else 4
    stages = 12 if p.itemsize == 4 else 6 if block_k == 128 else 5
    return linear_with(p, ROWS, block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages)


def stream_ranks(rank: int) -> int:
    """The ranks of the kernel of csrc/stream.cu that takes `rank`."""
    return next(r for r in STREAM_RANKS if r >= rank)


def stream_bytes(c: StreamConfig, ranks: int) -> int:
    """Shared memory of its rings, h's parts and B; `ranks` of its kernel."""
    return _rings(c) + (c.rows * (4 * ranks + 16) + (0 if c.late else c.adapters * _factor(c, ranks)) if ranks else 0)


def _rings(c: StreamConfig) -> int:
    """Bytes of the stages of W and x."""
    weight = c.stages + 2 * STREAM_CONVERTED[c.rows, c.block_n] if c.e4m3 else 2 * c.stages
    return STREAM_STEP[c.rows] * (weight * c.block_n + 2 * c.x_stages * c.rows)


def _factor(c: StreamConfig, ranks: int) -> int:
    """Bytes of an adapter's B."""
    return c.block_n * (2 * ranks + 16)


def stream(p: Problem, e4m3: bool = False) -> StreamConfig:
    """A block of 32 columns for every multiprocessor, or two; with many rows, whose x costs as much as W, of 64 where these are enough.

    40 KB and more of W are under way on a multiprocessor, of e4m3, whose products take longer than its bytes, 16 to 32. The rest of its
    shared memory is for the shrink ahead, beside which the stream of W begins.
    """
    ranks = stream_ranks(p.rank if p.slots else 0)
    wide = cdiv(p.tokens, 64) * p.groups * cdiv(p.out_features, 64) >= 0.9 * p.sms
    # without LoRA a wave of blocks of 64 columns is faster than two of 32 on each multiprocessor (8 groups, T = 1 to 16: 20.1 µs, 24.0)
    one_wave = ranks == 0 and not e4m3 and wide and p.groups * cdiv(p.out_features, 64) <= p.sms
    rows = 16 if p.tokens <= 16 and not one_wave else 64
    block_n = 64 if rows == 64 and wide else 32
    two = block_n == 32 and p.groups * cdiv(p.out_features, 32) > p.sms and (rows == 16 or not e4m3)  # blocks on a multiprocessor
    if rows == 16:
        stages, x_stages = (3, 3) if two else (4, 3) if e4m3 or (ranks == 64 and p.tokens <= 8) else (5, 4)
    elif e4m3:
        stages, x_stages = (4, 3) if block_n == 64 or ranks == 64 else (6, 5)
    else:
        stages, x_stages = (4, 3) if block_n == 64 or two else (5, 4) if ranks == 64 else (6, 5)
    config = StreamConfig(rows, block_n, stages, x_stages, 0, has_pdl(p.arch), e4m3=e4m3)
    if ranks == 0:
        return config
    late = block_n == 64 and ranks > 16 and p.slots > 1  # beside the rings and the shrink there is no room for B
    room = (104 if two else 172) * KB - STREAM_FIXED - stream_bytes(config, ranks)
    if late:
        room = _rings(config)
    return replace(config, adapters=max(1, min(p.slots, p.tokens, room // _factor(config, ranks))), late=late)


def _shrink_beside(p: Problem, config: ShrinkConfig | None, beside: StreamConfig) -> ShrinkConfig | None:
    """config with as many stages as leave room for a block of csrc/stream.cu beside all of its own; it has the time that W takes."""
    if config is None:
        return None
    block_r = launch.rank_block(p.rank, p.itemsize)
    if config.merge > 1 and block_r > 16:  # all ranks at once: fewer programs beside W's (wo_a r 64 T = 32: 23.4 µs, by 16 ranks 24.7)
        whole = launch.shrink_with(p, config.block_m, block_r, 64, 4, 6, True)
        config = replace(whole, pdl=config.pdl, merge=config.merge)
    if beside.e4m3 and beside.block_n == 64:  # its 512 threads take all registers: nothing runs beside it
        return replace(config, early=config.pdl)
    # with low ranks three stages are as good as four, so there is room for programs without rows, too (wo_a r 16 T = 64: 18.7 µs, 20.9)
    low = p.rank <= 16
    height = config.block_m // config.merge  # tokens of a tile
    tiles = launch.tile_count(height, p.tokens, p.slots, p.slots == 1) if low else launch.estimated_tiles(p, height)
    programs = tiles * cdiv(p.rank, config.block_r) * config.chunks * p.groups // config.merge
    stage = (config.block_m + config.block_r) * config.block_k * p.itemsize
    room = shared_memory(p.arch) - STREAM_FIXED - stream_bytes(beside, stream_ranks(p.rank))
    fit = (room // cdiv(programs, p.sms) - 2 * KB) // stage  # Triton has one less in shared memory
    return replace(config, num_stages=min(config.num_stages, max(3 if low else 2, fit + 1)), early=config.pdl)


def _streams(p: Problem) -> bool:
    """Whether csrc/stream.cu is the faster one: for up to twice its rows where two blocks, which read W once from memory, are still one wave."""
    blocks = p.groups * cdiv(p.out_features, 64)
    return p.tokens <= STREAM_TOKENS or (p.tokens <= 2 * STREAM_TOKENS and 0.9 * p.sms <= 2 * blocks <= p.sms)


def _with_stream(p: Problem, config: LinearConfig, transposed: bool, fp16: bool, e4m3: bool = False) -> LinearConfig:
    """config, and csrc/stream.cu in its place where that is the faster one."""
    if p.arch != "sm_90" or p.itemsize != 2 or fp16 or transposed or p.rank > STREAM_RANKS[-1] or not _streams(p):
        return config
    chosen = stream(p, e4m3)
    return replace(config, shrink=_shrink_beside(p, config.shrink, chosen), stream=chosen)


def linear(p: Problem, transposed: bool = False, fp16: bool = False) -> LinearConfig:
    """`tiles`, and csrc/linear.cu in its place where that is the faster one: where its tiles keep most multiprocessors busy."""
    config = _with_stream(p, tiles(p, transposed, fp16), transposed, fp16)
    if p.arch != "sm_90" or p.itemsize != 2 or fp16 or p.tokens < (128 if transposed else CUDA_TOKENS):
        return config
    columns = next((width for width in (256, 128) if _programs(p, 128, width) >= 0.7 * p.sms), 64)
    programs = _programs(p, 128, columns)
    if programs < 0.45 * p.sms:
        return config
    cuda = CudaConfig(SORTED if _sorts(p) else ROWS, min(p.sms, programs), 8, columns)
    if config.stream is not None:  # csrc/linear.cu is for the layouts that csrc/stream.cu does not take
        return replace(config, cuda=cuda)
    return replace(config, shrink=_shrink_ahead(p, config.shrink, 0 if columns == 64 else programs), cuda=cuda)


def _sorts(p: Problem) -> bool:
    """Whether tiles of 128 rows in the plan's order, where few adapters meet, are worth it; for evenly spread ids."""
    if p.rank == 0 or p.tokens <= launch.SCAN_TOKENS:
        return False
    block = rank_block(p.rank, p.itemsize)
    stages = cdiv(p.rank, block) * (0.5 if block == 16 else 1)  # an adapter's, in stages of 64 columns
    fewer = min(p.slots, 128) - min(p.slots, 1 + p.slots * 128 / p.tokens)
    return fewer * stages >= SORT_STAGES


def tiles(p: Problem, transposed: bool = False, fp16: bool = False) -> LinearConfig:
    """A few rows: a stream of W. Else tiles for the matrix units, of rows that may have different adapters or of one slot
    each, whichever adds less. Two accumulators of 128 × 256 spill, so blocks are narrower where a tile needs them (MIXED
    with LoRA; fp16, whose h is scaled by row), and where W's and B's rows run along y (transposed: the gradient of x).
    """
    lora = p.rank > 0 and p.slots > 0
    if p.tokens <= STREAM_TOKENS:
        return _stream(p)
    if p.itemsize == 4:  # ordinary multiply-adds
        return linear_with(p, launch.row_mode(p.tokens, p.slots) if lora else ROWS, 64, block_n=64, num_warps=8, num_stages=3)
    block_m = 128
    if not lora or p.slots == 1:
        mode, fill = ROWS if not lora else SINGLE, 1.0
    else:
        mode, fill = _rows_or_slots(p, block_m)
    while block_m > 64 and (p.tokens * fill < block_m or _programs(p, block_m, 256) < 0.7 * p.sms):
        block_m //= 2
    one = not lora or (mode not in MIXED and not fp16)
    wide = one and not transposed and has_pdl(p.arch) and shared_memory(p.arch) > 200 * KB and _programs(p, block_m, 256) >= 0.7 * p.sms
    warps = 8 if wide or block_m == 128 or mode in MIXED else 4
    block_n = 256 if wide else 128 if _programs(p, block_m, 128) >= 0.7 * p.sms else 64
    return linear_with(
        p, mode, block_m, block_n=block_n, block_k=64, num_warps=warps, num_stages=3 if wide else 4
    )


def scaled_with(p: Problem, mode: int, block_m: int, **changes) -> LinearConfig:
    """`linear_with` for an e4m3 weight: 128 columns of D a step, W a byte each and once more converted."""
    config = linear_with(p, mode, block_m, **changes, block_k=16)
    converted = 2 * config.block_n * SCALE_BLOCK
    room = shared_memory(p.arch) - 8 * KB - 2 * 2 * block_m * config.rank_block - converted
    stages = room // ((2 * block_m + config.block_n) * SCALE_BLOCK)
    wanted = changes.get("num_stages", 4)
    return replace(config, block_k=SCALE_BLOCK, num_stages=max(2, min(wanted, stages)))


def scaled(p: Problem, transposed: bool = False, fp16: bool = False) -> LinearConfig:
    """As `linear` for an e4m3 weight. A step's sum is apart from the accumulator: 128 × 256 does not fit into registers, and
    where bytes are converted by integers 128 rows do not either. A stream's steps hold half the bytes, so more are under way.
    """
    wgmma = has_pdl(p.arch) and shared_memory(p.arch) > 200 * KB  # which reads W, converted, from shared memory
    if p.tokens <= STREAM_TOKENS:
        block_m = max(16, power_of_2(p.tokens))
        block_n = 64 if p.groups * cdiv(p.out_features, 64) >= 0.9 * p.sms else 32
        warps = 8 if block_m == 64 and not wgmma else 4
        config = scaled_with(p, ROWS, block_m, block_n=block_n, num_warps=warps, num_stages=12)
    else:
        config = tiles(p, transposed, fp16)
        block_m = config.block_m if has_e4m3(p.arch) else min(config.block_m, 64)
        config = scaled_with(p, config.mode, block_m, block_n=min(config.block_n, 128 if wgmma else 64), num_warps=8)
    config, programs = _with_stream(p, config, transposed, fp16, True), _programs(p, 128, 128)
    whole = cdiv(p.in_features, 64) % 2 == 0  # stages of 64 columns of D, of which a block of scales has two
    if p.arch != "sm_90" or p.itemsize != 2 or fp16 or transposed or not whole or config.stream is not None or programs < 0.7 * p.sms:
        return config
    # csrc/linear.cu multiplies by W in bf16 without its scales (kernels/dequantize.py), which it has for every 128 columns of D
    cuda = CudaConfig(SORTED if _sorts(p) else ROWS, min(p.sms, programs), 8, 128)
    return replace(config, shrink=_shrink_ahead(p, config.shrink, programs), cuda=cuda)


def dequantizes(p: Problem) -> bool:
    """Whether W of e4m3 with e8m0 scales is made bf16 ahead of the product (`linear`), not in each of its tiles (`scaled`).

    That moves 5 bytes an element, not 1, but once; in its tiles W is converted again for every tile of rows.
    """
    return p.tokens >= DEQUANTIZE_TOKENS


def _programs(p: Problem, block_m: int, block_n: int) -> int:
    return cdiv(p.tokens, block_m) * p.groups * cdiv(p.out_features, block_n)


def _rows_or_slots(p: Problem, block_m: int) -> tuple[int, float]:
    """(mode, the part of the rows that a tile's height must suit), by what each adds to the base's work.

    Rows: the products with a tile's adapters (high and low half of h), and narrower blocks, 8 %. Slots: half a tile each.
    """
    present = min(p.slots, p.tokens)
    in_plan_order = p.tokens > launch.SCAN_TOKENS
    adapters = min(present, block_m, 1 + present * block_m / p.tokens if in_plan_order else block_m)
    by_rows = 0.08 + 2 * max(16, p.rank) * adapters / max(p.in_features, 1)
    if by_rows <= 0.5 * present * block_m / p.tokens:
        return (SORTED if in_plan_order else ROWS), 1.0
    return (PLAN if in_plan_order else SCAN), 1 / present
