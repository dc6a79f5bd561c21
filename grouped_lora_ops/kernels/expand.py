"""y = base + scaling · h Bᵀ: a program per (tile of rows, block of N, group)."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch import ExpandConfig, cdiv
from .shrink import strides
from .tile import (
    SCAN,
    SINGLE,
    add_rounded,
    dot_split,
    launch,
    round_to,
    slice_bounds,
    split,
    tile_rows,
    unit_axis,
    vector_width,
    whole_blocks,
)


@triton.jit
def finish(acc, scaling, base_tile, active, HAS_BASE: tl.constexpr, MIXED: tl.constexpr, OUT: tl.constexpr):
    """scaling · acc, added to base in float32 and rounded once; where it is zero base keeps its bits (−0.0 too).

    MIXED: the tile also has rows without an adapter, where acc and scaling may be NaN: 0 · Inf of the slot's weights.
    """
    if MIXED:
        acc = tl.where(active[:, None], acc, 0.0)
        scaling = tl.where(active, scaling, 0.0)[:, None]
    if HAS_BASE:
        return add_rounded(acc, scaling, base_tile)
    else:
        return round_to(acc * scaling, OUT)


@triton.jit
def load_h(
    h, rows, active, rank, R, h_c, h_t, h_offset, r0,
    CHUNKS: tl.constexpr, H_VEC: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h of a tile's rows, columns r0 …: the sum of its chunks in order, zeros past the rank."""
    r = r0 + tl.arange(0, BLOCK_R)
    ptrs = h + h_offset + rows[:, None] * (h_t * H_VEC) + r[None, :]
    vectors = tl.minimum((rank + H_VEC - 1) // H_VEC * H_VEC, R // H_VEC * H_VEC)
    mask = active[:, None] & (r < vectors)[None, :]
    tile = tl.load(ptrs, mask=mask, other=0.0)
    for c in tl.static_range(1, CHUNKS):
        tile += tl.load(ptrs + c * (h_c * H_VEC), mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], tile, 0.0)


@triton.jit
def copy_rows(
    p_base, o_base, p_n, o_n, row_p, row_o, inside, n_first, n_last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BASE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Rows without an adapter: base's bits, or zeros."""
    for n0 in range(n_first, n_last, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (n < n_last)[None, :]
        copied = tl.zeros((BLOCK_M, BLOCK_N), OUT)
        if HAS_BASE:
            copied = tl.load(p_base + row_p[:, None] + n[None, :] * p_n, mask=mask, other=0.0)
        tl.store(o_base + row_o[:, None] + n[None, :] * o_n, copied, mask=mask)


@triton.jit
def expand_rows(
    high, low, scale, high2, low2, scale2, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank, load_rank,
    n_first, n_last, scaling, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, HAS_BASE: tl.constexpr,
    MIXED: tl.constexpr, TAIL: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns n_first … n_last−1 of a tile whose h is split into high and low; high2, low2: its columns BLOCK_R …, or None.

    TAIL: b's vectors reach past the rank, into columns that may hold anything, and are zeroed there.
    """
    r = tl.arange(0, BLOCK_R)
    for n0 in tl.range(n_first, n_last, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        mask = write[:, None]
        b_mask = (r < load_rank)[:, None]
        if not EVEN_N:
            n_in = (n < n_last)[None, :]
            mask = mask & n_in
            b_mask = b_mask & n_in
        b_tile = tl.load(b_base + n[None, :] * b_n + r[:, None] * b_r, mask=b_mask, other=0.0)
        if TAIL:
            b_tile = tl.where((r < rank)[:, None], b_tile, 0.0)
        base_tile = tl.zeros((BLOCK_M, BLOCK_N), OUT)
        if HAS_BASE:
            base_tile = tl.load(p_base + row_p[:, None] + n[None, :] * p_n, mask=mask, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = dot_split(high, low, scale, b_tile, acc, PRECISION)
        if high2 is not None:
            b2_mask = (BLOCK_R + r < load_rank)[:, None]
            if not EVEN_N:
                b2_mask = b2_mask & n_in
            b2_tile = tl.load(b_base + n[None, :] * b_n + (BLOCK_R + r)[:, None] * b_r, mask=b2_mask, other=0.0)
            if TAIL:
                b2_tile = tl.where((BLOCK_R + r < rank)[:, None], b2_tile, 0.0)
            acc = dot_split(high2, low2, scale2, b2_tile, acc, PRECISION)
        y = finish(acc, scaling, base_tile, active, HAS_BASE, MIXED, OUT)
        tl.store(o_base + row_o[:, None] + n[None, :] * o_n, y, mask=mask)


@triton.jit
def expand_slot(
    h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank, load_rank,
    n_first, n_last, scaling, CHUNKS: tl.constexpr, H_VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCKS: tl.constexpr, HAS_BASE: tl.constexpr, MIXED: tl.constexpr, TAIL: tl.constexpr,
    EVEN_N: tl.constexpr, STAGES: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`expand_rows` with h from memory, BLOCKS (1 or 2) blocks of BLOCK_R columns."""
    h_tile = load_h(h, wide_rows, active, rank, R, h_c, h_t, h_offset, 0, CHUNKS, H_VEC, BLOCK_R)
    high, low, scale = split(h_tile, OUT)
    if BLOCKS == 2:
        h_tile = load_h(h, wide_rows, active, rank, R, h_c, h_t, h_offset, BLOCK_R, CHUNKS, H_VEC, BLOCK_R)
        high2, low2, scale2 = split(h_tile, OUT)
        expand_rows(
            high, low, scale, high2, low2, scale2, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
            load_rank, n_first, n_last, scaling, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, MIXED, TAIL, EVEN_N, STAGES, OUT, PRECISION,
        )  # fmt: skip
    else:
        expand_rows(
            high, low, scale, None, None, None, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
            load_rank, n_first, n_last, scaling, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BASE, MIXED, TAIL, EVEN_N, STAGES, OUT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=("T", "L", "N", "R", "ids_stride", "h_c", "h_t", "h_g", "b_l", "b_g", "b_n", "b_r", "b_s",
                               "o_t", "o_g", "o_n", "p_t", "p_g", "p_n"),
            do_not_specialize_on_alignment=("ids", "plan", "ranks", "scalings"))  # fmt: skip
def expand_kernel(
    h, b, base, out, ids, plan, ranks, scalings,
    T: "i32", L: "i32", N: "i32", R: "i32", ids_stride: "i64",
    h_c: "i64", h_t: "i64", h_g: "i64", b_l: "i64", b_g: "i64", b_n: "i64", b_r: "i64",
    p_t: "i64", p_g: "i64", p_n: "i64", o_t: "i64", o_g: "i64", o_n: "i64",
    SIZES: tl.constexpr, SUM_GROUPS: tl.constexpr, CHUNKS: tl.constexpr, COPY: tl.constexpr, MODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr,
    H_VEC: tl.constexpr, B_VEC: tl.constexpr, B_UNIT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, LOOP: tl.constexpr, N_STAGES: tl.constexpr, BLOCKS: tl.constexpr,
    NARROW: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """h's axes (chunk, t, g, r) with unit last stride, b's (l, g, n, r), base's and out's (t, g, n).

    LOOP: blocks of N a program takes in turn, with h in registers (then r ≤ BLOCKS · BLOCK_R and SUM_GROUPS = 1).
    NARROW: slots of ranks up to 16 and up to 64 have loops of their own, as narrow as they are.
    EVEN_N: every slice is whole blocks of N, so no column needs a mask.
    CHUNKS: h is the sum of so many partial sums, added in order. SUM_GROUPS: y sums over so many groups of h and b.
    SIZES: group g is that slice of b's and out's N axis. COPY: rows without an adapter are written too (base or zeros).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SPAN: tl.constexpr = BLOCK_N * LOOP
    if SIZES is None:
        n_blocks = tl.cdiv(N * O_VEC, SPAN)
        tile = tl.program_id(0) // n_blocks
        n_block = tl.program_id(0) % n_blocks
        group = tl.program_id(1)
        n_start = 0
        n_size = N * O_VEC
    else:
        all_blocks = 0
        for i in tl.static_range(len(SIZES)):
            all_blocks += (SIZES[i] * O_VEC + SPAN - 1) // SPAN
        tile = tl.program_id(0) // all_blocks
        n_block = tl.program_id(0) % all_blocks
        group = 0
        skipped = 0
        for i in tl.static_range(len(SIZES)):
            skipped += (SIZES[i] * O_VEC + SPAN - 1) // SPAN
            group += (n_block >= skipped).to(tl.int32)
        before = 0
        for i in tl.static_range(len(SIZES)):
            before += tl.where(i < group, (SIZES[i] * O_VEC + SPAN - 1) // SPAN, 0)
        n_block -= before
        start_v, size_v = slice_bounds(group, SIZES)
        n_start = start_v * O_VEC
        n_size = size_v * O_VEC
    slot, rows, inside, active = tile_rows(tile, ids, plan, T, L, ids_stride, MODE, BLOCK_M, BLOCK_T, BLOCK_L)
    if slot > L or (slot == L and not COPY):
        if PDL:  # a program may not end before the shrink has: what follows in the stream waits for this kernel alone
            tl.extra.cuda.gdc_wait()
        return
    if O_UNIT == 2:
        o_n = 1
        p_n = 1
    if B_UNIT == 3:
        b_r = 1
        b_n = b_n * B_VEC
    elif B_UNIT == 2:
        b_n = 1
        b_r = b_r * B_VEC
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < n_size
    wide_rows = rows.to(tl.int64)
    out_group = group
    if SIZES is not None:
        out_group = 0
    o_ptrs = out + wide_rows[:, None] * (o_t * O_VEC) + out_group * (o_g * O_VEC) + (n_start + n)[None, :] * o_n
    write = active
    if COPY:
        write = inside
    mask = write[:, None] & n_in[None, :]
    OUT: tl.constexpr = out.dtype.element_ty
    base_tile = tl.zeros((BLOCK_M, BLOCK_N), OUT)
    HAS_BASE: tl.constexpr = base is not None
    MIXED: tl.constexpr = COPY and MODE == SINGLE
    if LOOP > 1:
        n_first = n_block * SPAN
        n_last = tl.minimum(n_first + SPAN, n_size)
        p_base = base
        if HAS_BASE:
            p_base += out_group * (p_g * O_VEC) + n_start * p_n
        row_p = wide_rows * (p_t * O_VEC)
        row_o = wide_rows * (o_t * O_VEC)
        o_base = out + out_group * (o_g * O_VEC) + n_start * o_n
        if PDL:
            tl.extra.cuda.gdc_wait()
        if slot == L:
            copy_rows(p_base, o_base, p_n, o_n, row_p, row_o, inside, n_first, n_last, BLOCK_M, BLOCK_N, HAS_BASE, OUT)
            return
        rank = R
        if ranks is not None:
            rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
        scaling = 1.0
        if scalings is not None:
            scaling = tl.load(scalings + slot)
        h_offset = group * (h_g * H_VEC)
        b_base = b + slot.to(tl.int64) * (b_l * B_VEC)
        if SIZES is None:
            b_base += group * (b_g * B_VEC)
        b_base += n_start * b_n
        load_rank = rank
        if B_UNIT == 3:
            load_rank = tl.minimum((rank + B_VEC - 1) // B_VEC * B_VEC, R // B_VEC * B_VEC)
        if MODE == SCAN:  # no branch: Triton 3.6 fails to compile two such loops behind a scan of the ids
            expand_slot(
                h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
                load_rank, n_first, n_last, scaling, CHUNKS, H_VEC, BLOCK_M, BLOCK_N, BLOCK_R, BLOCKS, HAS_BASE, MIXED, True, EVEN_N, N_STAGES,
                OUT, PRECISION,
            )  # fmt: skip
        elif load_rank != rank:
            expand_slot(
                h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
                load_rank, n_first, n_last, scaling, CHUNKS, H_VEC, BLOCK_M, BLOCK_N, BLOCK_R, BLOCKS, HAS_BASE, MIXED, True, EVEN_N, 1, OUT,
                PRECISION,
            )  # fmt: skip
        elif NARROW and rank <= 16:
            expand_slot(
                h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
                load_rank, n_first, n_last, scaling, CHUNKS, H_VEC, BLOCK_M, BLOCK_N, 16, 1, HAS_BASE, MIXED, False, EVEN_N, N_STAGES,
                OUT, PRECISION,
            )  # fmt: skip
        elif NARROW and rank <= 64:
            expand_slot(
                h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
                load_rank, n_first, n_last, scaling, CHUNKS, H_VEC, BLOCK_M, BLOCK_N, 64, 1, HAS_BASE, MIXED, False, EVEN_N, N_STAGES,
                OUT, PRECISION,
            )  # fmt: skip
        elif BLOCKS == 2 and rank > BLOCK_R:
            expand_slot(
                h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
                load_rank, n_first, n_last, scaling, CHUNKS, H_VEC, BLOCK_M, BLOCK_N, BLOCK_R, 2, HAS_BASE, MIXED, False, EVEN_N, N_STAGES,
                OUT, PRECISION,
            )  # fmt: skip
        else:
            expand_slot(
                h, h_c, h_t, h_offset, R, wide_rows, b_base, p_base, o_base, b_n, b_r, p_n, o_n, row_p, row_o, write, active, rank,
                load_rank, n_first, n_last, scaling, CHUNKS, H_VEC, BLOCK_M, BLOCK_N, BLOCK_R, 1, HAS_BASE, MIXED, False, EVEN_N, N_STAGES,
                OUT, PRECISION,
            )  # fmt: skip
        return
    if HAS_BASE:
        p_ptrs = base + wide_rows[:, None] * (p_t * O_VEC) + out_group * (p_g * O_VEC) + (n_start + n)[None, :] * p_n
        base_tile = tl.load(p_ptrs, mask=mask, other=0.0)
    if slot == L:
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(o_ptrs, base_tile, mask=mask)
        return
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    scaling = 1.0
    if scalings is not None:
        scaling = tl.load(scalings + slot)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    lanes = tl.arange(0, BLOCK_R)
    b_group = group
    if SIZES is not None:
        b_group = 0
    b_base = b + slot.to(tl.int64) * (b_l * B_VEC) + b_group * (b_g * B_VEC) + (n_start + n)[None, :] * b_n
    for s in range(SUM_GROUPS):
        for r0 in range(0, rank, BLOCK_R):
            r = r0 + lanes
            load_rank = rank
            if B_UNIT == 3:
                load_rank = tl.minimum((rank + B_VEC - 1) // B_VEC * B_VEC, R // B_VEC * B_VEC)
            b_ptrs = b_base + s * (b_g * B_VEC) + r[:, None] * b_r
            b_tile = tl.load(b_ptrs, mask=(r < load_rank)[:, None] & n_in[None, :], other=0.0)
            if B_UNIT == 3:
                b_tile = tl.where((r < rank)[:, None], b_tile, 0.0)
            if PDL and r0 == 0:
                tl.extra.cuda.gdc_wait()
            h_tile = load_h(h, wide_rows, active, rank, R, h_c, h_t, (group + s) * (h_g * H_VEC), r0, CHUNKS, H_VEC, BLOCK_R)
            high, low, scale = split(h_tile, OUT)
            acc = dot_split(high, low, scale, b_tile, acc, PRECISION)
    if PDL and rank == 0:
        tl.extra.cuda.gdc_wait()
    y = finish(acc, scaling, base_tile, active, HAS_BASE, MIXED, OUT)
    tl.store(o_ptrs, y, mask=mask)


def expand(
    name: str,
    h: Tensor,  # [chunks, T, G or 1, r] float32 with unit last stride
    b: Tensor,  # [L, G or 1, N, r]
    base: Tensor | None,  # [T, G, N]
    out: Tensor,  # [T, G, N]
    ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    sizes: tuple | None,
    sum_groups: int,
    copy: bool,
    config: ExpandConfig,
) -> None:
    """Write out = base + scaling · h Bᵀ; base may be out itself. b's dtype is out's."""
    tokens, groups, features = out.shape
    slots, rank = b.shape[0], h.shape[3]
    b_unit, o_unit = unit_axis(b, 3, 2), unit_axis(out, 2)
    if base is not None and base.stride(2) != 1:
        o_unit = -1
    o_vec = vector_width(out, o_unit, features)
    if base is not None:
        o_vec = math.gcd(o_vec, vector_width(base, o_unit, features))
    b_vec = vector_width(b, b_unit, rank if b_unit == 3 else features)
    if b_unit == 2:
        o_vec = b_vec = math.gcd(o_vec, b_vec)
    blocks = cdiv(rank, config.rank_block)
    most = 2 if b.element_size() == 2 and config.mode != SCAN.value else 1
    loop = config.loop if blocks <= most and sum_groups == 1 else 1
    span = config.block_n * loop
    slices, n_blocks = None, cdiv(features, span)
    if sizes is not None:
        o_vec = math.gcd(o_vec, *sizes)
        if b_unit == 2:
            b_vec = o_vec
        slices = tuple([size // o_vec for size in sizes])
        n_blocks = sum([cdiv(size, span) for size in sizes])
    h_vec = vector_width(h, 3, rank)
    hs = strides(h, 3, h_vec)
    bs, os_ = strides(b, b_unit, b_vec), strides(out, o_unit, o_vec)
    ps = os_ if base is None else strides(base, o_unit, o_vec)
    launch(
        name,
        expand_kernel,
        (config.tiles * n_blocks, groups, 1),
        (
            h, b, base, out, ids, plan, ranks, scalings,
            tokens, slots, features // o_vec, rank, ids.stride(0),
            hs[0], hs[1], 0 if h.shape[2] == 1 else hs[2],
            bs[0], 0 if b.shape[1] == 1 else bs[1], bs[2], bs[3],
            *ps, *os_,
        ),
        (
            slices, sum_groups, h.shape[0], copy, config.mode, config.block_m, config.block_n, config.rank_block,
            config.block_t, config.block_l, h_vec, b_vec, b_unit, o_vec, o_unit, config.precision, config.pdl,
            loop, config.num_stages, blocks if loop > 1 else 1, config.narrow and loop > 1 and ranks is not None,
            loop > 1 and whole_blocks(config.block_n, *(sizes or (features,))),
        ),
        config.num_warps,
        1,
        config.pdl,
    )  # fmt: skip
