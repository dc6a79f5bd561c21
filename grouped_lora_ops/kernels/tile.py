"""What every kernel shares: finding a tile's rows, dots with the library's precision, addressing, and the launch.

Addressing: strides reach a kernel divided by a tensor's vector width (a constexpr) and are multiplied back, so that
Triton knows their divisibility without specialising on their values: one compiled kernel serves every size.
"""



import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .. import driver

INTERPRETED = tl.constexpr(knobs.runtime.interpret)

SINGLE = tl.constexpr(0)  # one slot: tiles are runs of rows, ids mask them
SCAN = tl.constexpr(1)  # few rows: every program sorts adapter_ids itself, no plan is needed or read
PLAN = tl.constexpr(2)  # the plan lists the rows slot by slot


@triton.jit
def pick_tile(cumulative, tiles, tile, lanes):
    """(slot, tile index inside the slot) of a tile, from the slots' tile counts and their running sum."""
    slot = tl.sum((cumulative <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(lanes == slot, cumulative - tiles, 0), 0)
    return slot, tile - before


@triton.jit
def tile_rows(
    tile, ids, plan, T, L, ids_stride,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The rows of one tile: (slot, rows [BLOCK_M], inside [BLOCK_M], active [BLOCK_M]).

    slot: the adapter of the tile; L for rows without an adapter; more than L for a tile that has no rows.
    inside: lanes that hold a row at all. active: lanes whose row has the tile's adapter.
    Rows of one slot keep their order. Ids and plan entries outside their range never lead outside T rows.
    """
    lane = tl.arange(0, BLOCK_M)
    if MODE == SINGLE:
        rows = tile * BLOCK_M + lane
        inside = rows < T
        active = (tl.load(ids + rows * ids_stride, mask=inside, other=-1) == 0) & inside
        slot = tile * 0
    elif MODE == SCAN:
        offsets = tl.arange(0, BLOCK_T)
        there = offsets < T
        ident = tl.load(ids + offsets * ids_stride, mask=there, other=-1)
        bucket = tl.where((ident >= 0) & (ident < L), ident, L).to(tl.int32)
        if BLOCK_L <= 256:
            slots = tl.arange(0, BLOCK_L)
            counts = tl.histogram(bucket, BLOCK_L, mask=there)
            tiles = (counts + BLOCK_M - 1) // BLOCK_M
            slot, index = pick_tile(tl.cumsum(tiles, 0), tiles, tile, slots)
            count = tl.sum(tl.where(slots == slot, counts, 0), 0)
            mine = (bucket == slot) & there
            position = tl.cumsum(mine.to(tl.int32), 0) - 1
        else:  # many slots: a tile is found by its first row, so that no work grows with them (5 µs more at T = 64)
            earlier = (bucket[None, :] == bucket[:, None]) & (offsets[None, :] < offsets[:, None])
            position = tl.sum((earlier & there[None, :]).to(tl.int32), 1)
            first = there & (position % BLOCK_M == 0)
            chosen = first & (tl.cumsum(first.to(tl.int32), 0) - 1 == tile)
            slot = tl.max(tl.where(chosen, bucket, -1), 0)
            slot = tl.where(slot < 0, L + 1, slot)
            index = tl.sum(tl.where(chosen, position // BLOCK_M, 0), 0)
            mine = (bucket == slot) & there
            count = tl.sum(mine.to(tl.int32), 0)
        want = index * BLOCK_M + lane
        hit = mine[None, :] & (position[None, :] == want[:, None])
        rows = tl.sum(tl.where(hit, offsets[None, :], 0), 1)
        inside = want < count
        active = inside & (slot < L)
    else:
        slots = tl.arange(0, BLOCK_L)
        starts = tl.load(plan + T + slots, mask=slots <= L, other=0)
        ends = tl.load(plan + T + slots + 1, mask=slots <= L, other=0)
        counts = tl.maximum(ends - starts, 0)
        tiles = (counts + BLOCK_M - 1) // BLOCK_M
        slot, index = pick_tile(tl.cumsum(tiles, 0), tiles, tile, slots)
        count = tl.sum(tl.where(slots == slot, counts, 0), 0)
        start = tl.sum(tl.where(slots == slot, starts, 0), 0)
        want = index * BLOCK_M + lane
        inside = (want < count) & (start + want >= 0) & (start + want < T)
        rows = tl.load(plan + start + want, mask=inside, other=0)
        inside = inside & (rows >= 0) & (rows < T)
        active = inside & (slot < L)
    return slot, rows, inside, active


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a b + acc. Triton's interpreter multiplies the bit patterns of bf16 operands, so it gets float32 ones."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def round_to(v, DTYPE: tl.constexpr):
    """float32 v in DTYPE, to the nearest, ties to even. The interpreter's own bf16 cast breaks ties the other way."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        even = ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        v = tl.where(v == v, even, v)
    return v.to(DTYPE)


@triton.jit
def scaled(h, factor):
    """factor · h, rounded: a multiplication that no compiler can join with `split`'s subtraction, whose bits would then depend
    on the code around it (measured on an H200: they did)."""
    if INTERPRETED:
        return h * factor
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [h, factor], tl.float32, True, 1)


@triton.jit
def split(h, DTYPE: tl.constexpr):
    """(high, low, scale): float32 h as (high + low) · scale for a matrix unit that multiplies DTYPE operands.

    bf16: high and low keep 16 bits of h; no scale. fp16: rows are scaled to at most 2 by a power of two, so that nothing
    overflows; high and low keep 22 bits of the row's largest element. (tf32 would do without scales, but mma and wgmma
    add tf32 products in different orders: measured on an H200, a row's bits then depend on the tile height.)
    float32: high is h.
    """
    if DTYPE == tl.bfloat16:
        high = round_to(h, tl.bfloat16)
        whole = high.to(tl.float32)
        return high, round_to(tl.where(whole == h, 0.0, h - whole), tl.bfloat16), h
    elif DTYPE == tl.float16:
        exponent = (tl.max(tl.abs(h), 1).to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = h * down[:, None]
        high = scaled.to(tl.float16)
        whole = high.to(tl.float32)
        low = tl.where(whole == scaled, 0.0, scaled - whole).to(tl.float16)
        return high, low, (exponent << 23).to(tl.float32, bitcast=True)
    else:
        return h, h, h


@triton.jit
def dot_split(high, low, scale, w, acc, PRECISION: tl.constexpr):
    """h w + acc, with h from `split`."""
    if w.dtype == tl.bfloat16:
        acc = dot(high, w, acc, "tf32")
        acc = dot(low, w, acc, "tf32")
    elif w.dtype == tl.float16:
        part = dot(high, w, tl.zeros(acc.shape, tl.float32), "tf32")
        part = dot(low, w, part, "tf32")
        acc += part * scale[:, None]
    else:
        acc = dot(high, w, acc, PRECISION)
    return acc


# Operands: y, acc of two columns, factor of both, base. p: base keeps its bits.
_ADD_ROUNDED = """{{
    .reg .b16 h0, h1;
    .reg .b32 y;
    .reg .f32 b0, b1, d0, d1, t0, t1;
    .reg .pred p0, p1;
    {unpack}
    mul.rn.f32 d0, $1, $3;
    mul.rn.f32 d1, $2, $4;
    fma.rn.f32 t0, $1, $3, b0;
    fma.rn.f32 t1, $2, $4, b1;
    cvt.rn.{half}x2.f32 y, t1, t0;
    setp.eq.f32 p0, d0, 0f00000000;
    setp.eq.f32 p1, d1, 0f00000000;
    @p0 prmt.b32 y, y, $5, 0x3254;
    @p1 prmt.b32 y, y, $5, 0x7610;
    mov.b32 $0, y;
}}"""
_ADD_BF16 = tl.constexpr(_ADD_ROUNDED.format(half="bf16", unpack="shl.b32 b0, $5, 16; and.b32 b1, $5, 0xffff0000;"))
_ADD_FP16 = tl.constexpr(_ADD_ROUNDED.format(half="f16", unpack="mov.b32 {h0, h1}, $5; cvt.f32.f16 b0, h0; cvt.f32.f16 b1, h1;"))


@triton.jit
def add_rounded(acc, factor, base):
    """base + factor · acc by one fma in float32, then in base's dtype; where factor · acc is zero base keeps its bits (−0.0 too).

    Two of 16 bits at once: Triton rounds them one by one, and with a select behind it the compiler takes a conversion that runs
    at an eighth of the rate.
    """
    if INTERPRETED or base.dtype == tl.float32:
        total = round_to(tl.fma(acc, factor, base.to(tl.float32)), base.dtype)
        return tl.where(acc * factor == 0, base, total)
    else:
        ASM: tl.constexpr = _ADD_BF16 if base.dtype == tl.bfloat16 else _ADD_FP16
        return tl.inline_asm_elementwise(ASM, "=r,f,f,f,f,r", [acc, factor, base], base.dtype, True, 2)


@triton.jit
def wait_then_start_next():
    """Wait for the kernel ahead, then let the next one start: what that reads before it waits for us is older than the kernel ahead."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptrs):
    """Call the 128 bytes around each address into the L2."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1)


@triton.jit
def slice_bounds(index, SIZES: tl.constexpr):
    """(start, size) of one of several unequal slices."""
    start = 0
    size = 0
    total = 0
    for i in tl.static_range(len(SIZES)):
        start = tl.where(index == i, total, start)
        size = tl.where(index == i, SIZES[i], size)
        total += SIZES[i]
    return start, size


def vector_width(t: Tensor, unit: int, size: int) -> int:
    """Elements of a 16-byte load along axis `unit` that every address of t allows; 1 where there is no such axis."""
    widest = 16 // t.element_size()
    if unit < 0 or t.data_ptr() % 16:
        return 1
    width = math.gcd(widest, size)
    for axis, stride in enumerate(t.stride()):
        if axis != unit and t.shape[axis] > 1:
            width = math.gcd(width, stride)
    return width


def whole_blocks(block: int, *sizes: int) -> bool:
    """Whether blocks of that width cut every slice without a rest."""
    return not any(size % block for size in sizes)


def unit_axis(t: Tensor, *preferred: int) -> int:
    """The first of the axes whose elements lie side by side, else −1."""
    for axis in preferred:
        if t.stride(axis) == 1:
            return axis
    return -1


_ready: dict = {}  # compiled kernels, and how their parameters lie


def launch(name: str, kernel, grid: tuple, args: tuple, constants: tuple, num_warps: int, num_stages: int, pdl: bool = False):
    """Launch `kernel` on the current stream of the current device; compile it first unless a capture is running.

    args: the kernel's tensors and ints in order, constants: its constexprs after them.
    """
    if INTERPRETED:
        kernel[grid](*args, *constants)
        if driver.tape() is not None:
            driver.tape().refuse()
        return
    key = (
        kernel,
        torch.cuda.current_device(),
        constants,
        num_warps,
        num_stages,
        pdl,
        tuple(
            [
                (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else None if a is None else a > 2147483647
                for a in args
            ]
        ),
    )
    ready = _ready.get(key)
    if ready is not None:
        compiled, parameters = ready
        values = (*args, *constants)
        launched = driver.triton_launch(compiled, parameters, grid, values)
        if launched is None or driver.triton_hooks():  # Triton's own launcher asks the driver about every pointer
            compiled[grid](*values)
        elif grid[0] * grid[1] * grid[2]:
            driver.launch(launched[0], driver.stream_of(key[1]))
        driver.record(launched)
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"grouped_lora.{name}: a kernel for this shape is not compiled yet and nothing is compiled inside a CUDA "
            "graph capture; prepare the shape with grouped_lora_ops.warmup(...) or call the op once outside the "
            "capture, then capture again."
        )
    compiled = kernel[grid](*args, *constants, num_warps=num_warps, num_stages=num_stages, launch_pdl=pdl)
    _ready[key] = compiled, driver.parameters_of(compiled)
    driver.record_triton(compiled, grid, (*args, *constants))
