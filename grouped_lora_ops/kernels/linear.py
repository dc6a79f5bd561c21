"""y = x Wᵀ + scaling · h Bᵀ + bias in one accumulator: a program per (tile of rows, block of N, group)."""

import math
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from ..launch_linear import LinearConfig, cdiv
from .expand import load_h
from .expert_expand import load_b
from .expert_linear import base_rows
from .mixed import mixed_rows, nth_slot, slot_rank, slots_of_rows
from .scaled import scaled_rows
from .shrink import strides
from .tile import (
    SINGLE,
    dot,
    dot_split,
    launch,
    prefetch,
    round_to,
    scaled,
    slice_bounds,
    split,
    tile_rows,
    unit_axis,
    vector_width,
)

ROWS = tl.constexpr(3)  # tiles are runs of rows, whatever their adapters
SORTED = tl.constexpr(4)  # … of the rows in the plan's order, so that few adapters meet in a tile


@triton.jit
def base_pieces(
    x, w, D, x_d, w_d, row_offsets, column_offsets, inside, n_in, acc, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x Wᵀ for float32: pieces of BLOCK_K columns are summed from zero, 16 of them in order, then these sums in order.

    One chain down D would be further from the exact sum than cuBLAS, which cuts D, too. BLOCK_K fixes a row's bits here.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + row_offsets[:, None] + k[None, :] * x_d
    w_ptrs = w + column_offsets[None, :] + k[:, None] * w_d
    whole = tl.zeros(acc.shape, tl.float32)
    for step in range(tl.cdiv(D, BLOCK_K)):
        there = step * BLOCK_K + k < D
        x_tile = tl.load(x_ptrs, mask=inside[:, None] & there[None, :], other=0.0)
        w_tile = tl.load(w_ptrs, mask=n_in[None, :] & there[:, None], other=0.0)
        part = dot(x_tile, w_tile, tl.zeros(acc.shape, tl.float32), PRECISION)
        acc = tl.fma(part, 1.0, acc)  # an add that Triton cannot fold into the product, which would make one chain of it
        if step % 16 == 15:
            whole += acc
            acc = tl.zeros(acc.shape, tl.float32)
        x_ptrs += BLOCK_K * x_d
        w_ptrs += BLOCK_K * w_d
    return whole + acc


@triton.jit
def write(acc, bias, c_n, out, rows, n, o_t, o_n, written, n_in):
    if bias is not None:
        acc = acc + tl.load(bias + n * c_n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    ptrs = out + rows.to(tl.int64)[:, None] * o_t + n[None, :] * o_n
    tl.store(ptrs, round_to(acc, out.dtype.element_ty), mask=written[:, None] & n_in[None, :])


@triton.jit(do_not_specialize=("T", "L", "D", "N", "R", "ids_stride", "x_t", "x_g", "x_d", "w_g", "w_n", "w_d", "s_g", "s_n",
                               "s_d", "h_c", "h_t", "h_g", "b_l", "b_g", "b_n", "b_r", "c_g", "c_n", "o_t", "o_g", "o_n"),
            do_not_specialize_on_alignment=("scales", "ids", "plan", "ranks", "scalings", "bias"))  # fmt: skip
def linear_kernel(
    x, w, scales, h, b, bias, out, ids, plan, ranks, scalings,
    T: "i32", L: "i32", D: "i32", N: "i32", R: "i32", ids_stride: "i64",
    x_t: "i64", x_g: "i64", x_d: "i64", w_g: "i64", w_n: "i64", w_d: "i64", s_g: "i64", s_n: "i64", s_d: "i64",
    h_c: "i64", h_t: "i64", h_g: "i64", b_l: "i64", b_g: "i64", b_n: "i64", b_r: "i64", c_g: "i64", c_n: "i64",
    o_t: "i64", o_g: "i64", o_n: "i64",
    SIZES: tl.constexpr, D_SIZES: tl.constexpr, SUM_GROUPS: tl.constexpr, H_GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    R_BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr, TILE_GROUP: tl.constexpr, X_VEC: tl.constexpr,
    X_UNIT: tl.constexpr, W_VEC: tl.constexpr, W_UNIT: tl.constexpr, H_VEC: tl.constexpr, B_VEC: tl.constexpr,
    B_UNIT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr, N_VEC: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_SCALE: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x's axes (t, g, d), w's (g, n, d), scales' (g, block of n, of d), h's (chunk, t, g, r) with unit last stride, b's
    (l, g, n, r), bias's (g, n), out's (t, g, n). Unit axes: 2 for x and out; 2 (d) or 1 (n) for w; 3 (r) or 2 (n) for b; −1 for none.

    The delta joins the base's accumulator behind D's last element, so that a zero h or B leaves its bits, and h, which the
    kernel ahead is still making, is wanted late. Scaling multiplies h: one accumulator is enough.

    scales None: w has x's type. Else it is e4m3 (or its bytes) with a scale for each block of 128 × 128, counted from w's first
    row and column; ONE_SCALE: a program's columns lie in one row of blocks.

    h None: no LoRA, by the same code. SIZES: group g is that slice of w's, b's, bias's and out's N axis. D_SIZES: group g
    is that slice of x's and w's D axis. SUM_GROUPS, H_GROUPS: y sums over so many groups of x and w, of h and b. N, SIZES
    are in units of N_VEC, D (where X_UNIT = 2) and D_SIZES of X_VEC.
    """
    group = tl.program_id(1)
    if SIZES is None:
        n_blocks = tl.cdiv(N * N_VEC, BLOCK_N)
    else:
        n_blocks = 0
        for i in tl.static_range(len(SIZES)):
            n_blocks += (SIZES[i] * N_VEC + BLOCK_N - 1) // BLOCK_N
    tiles = tl.num_programs(0) // n_blocks
    turn = tl.program_id(0) // (TILE_GROUP * n_blocks)
    place = tl.program_id(0) % (TILE_GROUP * n_blocks)
    height = tl.minimum(tiles - turn * TILE_GROUP, TILE_GROUP)
    tile = turn * TILE_GROUP + place % height
    n_block = place // height
    n_start = 0
    n_size = N * N_VEC
    if SIZES is not None:
        group = 0
        skipped = 0
        for i in tl.static_range(len(SIZES)):
            skipped += (SIZES[i] * N_VEC + BLOCK_N - 1) // BLOCK_N
            group += (n_block >= skipped).to(tl.int32)
        before = 0
        for i in tl.static_range(len(SIZES)):
            before += tl.where(i < group, (SIZES[i] * N_VEC + BLOCK_N - 1) // BLOCK_N, 0)
        n_block -= before
        start_v, size_v = slice_bounds(group, SIZES)
        n_start = start_v * N_VEC
        n_size = size_v * N_VEC
    if MODE == ROWS or MODE == SINGLE:
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < T
        active = inside
        slot = tile * 0
    elif MODE == SORTED:
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tl.load(plan + place, mask=place < T, other=-1)
        inside = (rows >= 0) & (rows < T)
        rows = tl.where(inside, rows, 0)
        active = inside
        slot = tile * 0
    else:
        slot, rows, inside, active = tile_rows(tile, ids, plan, T, L, ids_stride, MODE, BLOCK_M, BLOCK_T, BLOCK_L)
        if slot > L:
            if PDL:  # a program may not end before the shrink has: what follows in the stream waits for this kernel alone
                tl.extra.cuda.gdc_wait()
            return
    if X_UNIT == 2:
        x_d = 1
        D = D * X_VEC
    if W_UNIT == 2:
        w_d = 1
        w_n = w_n * W_VEC
    elif W_UNIT == 1:
        w_n = 1
        w_d = w_d * W_VEC
    if B_UNIT == 3:
        b_r = 1
        b_n = b_n * B_VEC
    elif B_UNIT == 2:
        b_n = 1
        b_r = b_r * B_VEC
    if O_UNIT == 2:
        o_n = 1
    w_group = group
    if SIZES is not None:
        w_group = 0
    wide_rows = rows.to(tl.int64)
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < n_size
    n = n_start + n
    x_base = x + group * (x_g * X_VEC)
    w_base = w + w_group * (w_g * W_VEC)
    if D_SIZES is not None:
        start_d, size_d = slice_bounds(group, D_SIZES)
        x_base += start_d * X_VEC * x_d
        w_base += start_d * X_VEC * w_d
        D = size_d * X_VEC
    if scales is not None:
        skip = 0
        s_base = scales + w_group * s_g
        if D_SIZES is not None:  # a slice may begin inside a block
            skip = (start_d * X_VEC) % BLOCK_K
            s_base += (start_d * X_VEC) // BLOCK_K * s_d
            x_base -= skip * x_d
            w_base -= skip * w_d
        if ONE_SCALE:
            s_rows = (n_start + n_block * BLOCK_N) // BLOCK_K * s_n
        else:
            s_rows = n // BLOCK_K * s_n
    b_base = w_group * (b_g * B_VEC)
    MIXED: tl.constexpr = MODE == ROWS or MODE == SORTED
    if h is not None and MIXED:
        bucket, first, order, count = slots_of_rows(ids, rows, inside, ids_stride, L, BLOCK_M)
        if PREFETCH:
            b_rows = b + b_base + tl.where(n_in, n, n_start) * b_n
            for i in range(count):
                prefetch(b_rows + nth_slot(bucket, first, order, i).to(tl.int64) * (b_l * B_VEC))
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(SUM_GROUPS):
        x_s, w_s = x_base + s * (x_g * X_VEC), w_base + s * (w_g * W_VEC)
        if x.dtype.element_ty == tl.float32:
            acc = base_pieces(x_s, w_s, D, x_d, w_d, wide_rows * (x_t * X_VEC), n * w_n, inside, n_in, acc, BLOCK_K, PRECISION)
        elif scales is not None:
            acc = scaled_rows(
                x_s, w_s, s_base + s * s_g, skip, skip + D, x_d, w_d, s_d, wide_rows * (x_t * X_VEC), n * w_n, s_rows, inside, n_in,
                acc, EVEN_K, BLOCK_K, ONE_SCALE, PRECISION,
            )  # fmt: skip
        else:
            acc = base_rows(
                x_s, w_s, D, x_d, w_d, wide_rows * (x_t * X_VEC), n * w_n, inside, n_in, acc, BLOCK_K, EVEN_K, PRECISION
            )
    o_base = out + w_group * (o_g * O_VEC)
    c_base = bias
    if bias is not None:
        c_base += w_group * c_g
    written = inside
    if PDL:
        tl.extra.cuda.gdc_wait()
    if h is not None:
        h_base = group * (h_g * H_VEC)
        if MIXED:
            for s in range(H_GROUPS):
                acc = mixed_rows(
                    h, b, ranks, scalings, bucket, first, order, count, wide_rows, n, n_in, L, R, h_c, h_t,
                    h_base + s * (h_g * H_VEC), b_l, b_base + s * (b_g * B_VEC), b_n, b_r, acc, CHUNKS, BLOCK_M, BLOCK_R, R_BLOCKS,
                    H_VEC, B_VEC, B_UNIT == 3, STAGES, PRECISION,
                )  # fmt: skip
        elif slot < L:
            if MODE == SINGLE:  # rows without the adapter leave before it comes: 0 · Inf of its B would be NaN
                active = inside & (tl.load(ids + rows * ids_stride, mask=inside, other=-1) == 0)
                idle = inside & (active == 0)
                if tl.max(idle.to(tl.int32), 0) > 0:
                    write(acc, c_base, c_n, o_base, rows, n, o_t * O_VEC, o_n, idle, n_in)
                written = active
            rank, load_rank = slot_rank(ranks, slot, R, B_VEC, B_UNIT == 3)
            scaling = 1.0
            if scalings is not None:
                scaling = tl.load(scalings + slot)
            b_slot = b + slot.to(tl.int64) * (b_l * B_VEC) + b_base
            for s in range(H_GROUPS):
                for block in tl.range(0, R_BLOCKS, num_stages=2):  # unrolled, or not pipelined, 128 × 256 spills
                    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
                    b_tile = load_b(b_slot + s * (b_g * B_VEC), n, n_in, r, b_n, b_r, rank, load_rank)
                    h_tile = load_h(
                        h, wide_rows, active, rank, R, h_c, h_t, h_base + s * (h_g * H_VEC), block * BLOCK_R, CHUNKS, H_VEC,
                        BLOCK_R,
                    )  # fmt: skip
                    high, low, scale = split(scaled(h_tile, scaling), b.dtype.element_ty)
                    acc = dot_split(high, low, scale, b_tile, acc, PRECISION)
    write(acc, c_base, c_n, o_base, rows, n, o_t * O_VEC, o_n, written, n_in)


def linear(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    w: Tensor,  # [G or 1, N, D]; e4m3 or its bytes with scales
    scales: Tensor | None,  # [G or 1, ⌈N/128⌉, ⌈D/128⌉] float32, or e8m0's bytes
    h: Tensor | None,  # [chunks, T, G or 1, r] float32 with unit last stride
    b: Tensor | None,  # [L, G or 1, N, r]
    bias: Tensor | None,  # [G, N]
    out: Tensor,  # [T, G, N]
    ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    slots: int,
    sizes: tuple | None,  # N's slices, one for each group of x and h
    d_sizes: tuple | None,  # D's slices, one for each group of out
    summed: bool,  # out has one group: the sum over the groups of x and w, and of h and b
    config: LinearConfig,
) -> None:
    """Write out = x Wᵀ + scaling · h Bᵀ + bias, W = w · scales."""
    tokens, groups, out_features = out.shape
    features = w.shape[2] if d_sizes is None else x.shape[2]
    rank = 0 if h is None else h.shape[3]
    x_unit, w_unit, o_unit = unit_axis(x, 2), unit_axis(w, 2, 1), unit_axis(out, 2)
    x_vec = vector_width(x, x_unit, features)
    w_vec = vector_width(w, w_unit, features if w_unit == 2 else out_features)
    if w_unit == 2 and scales is None:
        x_vec = w_vec = min(x_vec, w_vec)
    even = features % config.block_k == 0
    if d_sizes is not None:
        x_vec = math.gcd(x_vec, *d_sizes)
        if w_unit == 2:
            w_vec = min(w_vec, x_vec)
        even = all(size % config.block_k == 0 for size in d_sizes)
    o_vec = vector_width(out, o_unit, out_features)
    b_unit, b_vec, h_vec, hs, bs = -1, 1, 1, (0,) * 4, (0,) * 4
    if h is not None:
        b_unit, h_vec = unit_axis(b, 3, 2), vector_width(h, 3, rank)
        b_vec = vector_width(b, b_unit, rank if b_unit == 3 else out_features)
    if sizes is not None:
        o_vec = math.gcd(o_vec, *sizes)
        w_vec = math.gcd(w_vec, *sizes) if w_unit == 1 else w_vec
        b_vec = math.gcd(b_vec, *sizes) if b_unit == 2 else b_vec
    # every width divides N and its slices
    n_vec = max(o_vec, w_vec if w_unit == 1 else 1, b_vec if b_unit == 2 else 1)
    if h is not None:
        hs, bs = strides(h, 3, h_vec), strides(b, b_unit, b_vec)
    xs, ws, os_ = strides(x, x_unit, x_vec), strides(w, w_unit, w_vec), strides(out, o_unit, o_vec)
    ss = (0, 0, 0) if scales is None else (0 if scales.shape[0] == 1 else scales.stride(0), *scales.stride()[1:])
    n_blocks = cdiv(out_features, config.block_n)
    one_scale = scales is not None and config.block_n <= 128
    if sizes is not None:
        n_blocks = sum([cdiv(size, config.block_n) for size in sizes])
        one_scale = one_scale and all(start % config.block_n == 0 for start in accumulate(sizes[:-1]))
    pdl = config.pdl and h is not None  # behind the shrink alone: another kernel that lets us start early may be writing x
    launch(
        name,
        linear_kernel,
        (config.tiles * n_blocks, groups, 1),
        (
            x, w, scales, h, b, bias, out, ids, plan, ranks, scalings,
            tokens, slots, features // x_vec if x_unit == 2 else features, out_features // n_vec, rank, ids.stride(0),
            xs[0], 0 if x.shape[1] == 1 else xs[1], xs[2], 0 if w.shape[0] == 1 else ws[0], ws[1], ws[2],
            *ss, hs[0], hs[1], 0 if h is None or h.shape[2] == 1 else hs[2],
            bs[0], 0 if b is None or b.shape[1] == 1 else bs[1], bs[2], bs[3],
            *((0, 0) if bias is None else bias.stride()), os_[0], os_[1], os_[2],
        ),
        (
            None if sizes is None else tuple([size // n_vec for size in sizes]),
            None if d_sizes is None else tuple([size // x_vec for size in d_sizes]),
            w.shape[0] if summed else 1, h.shape[2] if summed and h is not None else 1, 1 if h is None else h.shape[0],
            config.mode, config.block_m, config.block_n, config.block_k, config.rank_block,
            max(1, cdiv(rank, config.rank_block)), config.block_t, config.block_l, config.tile_group, x_vec, x_unit, w_vec, w_unit,
            h_vec, b_vec, b_unit, o_vec, o_unit, n_vec, even, one_scale, config.slot_stages, config.prefetch and b_unit == 3,
            config.precision, pdl,
        ),
        config.num_warps,
        config.num_stages,
        pdl,
    )  # fmt: skip
