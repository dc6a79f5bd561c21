"""out[l, e, g] = s_l Σ_m w_m narrow[m, g]ᵀ wide[m, g] over the routes of every (expert, slot) pair.

A program takes a run of the plan's tiles: those of one pair inside a window of RUN tiles. A pair that lies in one
window is written at once; of a longer one every window's sum goes to a part, and the parts are added in order.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import ExpertWgradConfig, cdiv
from .shrink import strides
from .tile import dot, dot_split, launch, round_to, split, unit_axis, vector_width


@triton.jit
def pair_at(head, tile, count):
    """The pair of a tile, −1 where there is none."""
    return tl.load(head + 1 + tile, mask=(tile >= 0) & (tile < count), other=-1)


@triton.jit
def store_pair(
    acc, out, scalings, pair, E, L, r, w, R, W, group, o_l, o_e, o_g, o_r, o_w,
    ANY_SLOT: tl.constexpr, O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
):  # fmt: skip
    """Write a pair's sum, times its scaling. out's axes (l, e, g, r, w); its unit axis: 4, 3 or −1."""
    if O_UNIT == 4:
        o_w = 1
        o_r = o_r * O_VEC
    elif O_UNIT == 3:
        o_r = 1
        o_w = o_w * O_VEC
        R = R // O_VEC * O_VEC  # as it is; whole vectors for the compiler
    expert = pair // (L + 1)
    slot = pair % (L + 1)
    if scalings is not None:
        acc = acc * tl.load(scalings + slot)
    start = expert.to(tl.int64) * (o_e * O_VEC) + group * (o_g * O_VEC)
    if not ANY_SLOT:
        start += slot.to(tl.int64) * (o_l * O_VEC)
    ptrs = out + start + r[:, None] * o_r + w[None, :] * o_w
    tl.store(ptrs, round_to(acc, out.dtype.element_ty), mask=(r < R)[:, None] & (w < W)[None, :])


@triton.jit(do_not_specialize=("M", "K", "E", "L", "TILES", "W", "R", "n_m", "n_g", "n_r", "w_m", "w_g", "w_w", "v_m",
                               "o_l", "o_e", "o_g", "o_r", "o_w"),
            do_not_specialize_on_alignment=("plan", "ranks", "scalings", "weights"))  # fmt: skip
def expert_wgrad_kernel(
    narrow, wide, out, parts, plan, ranks, scalings, weights,
    M: "i32", K: "i32", E: "i32", L: "i32", TILES: "i32", W: "i32", R: "i32",
    n_m: "i64", n_g: "i64", n_r: "i64", w_m: "i64", w_g: "i64", w_w: "i64", v_m: "i64",
    o_l: "i64", o_e: "i64", o_g: "i64", o_r: "i64", o_w: "i64",
    GROUPS: tl.constexpr, RUN: tl.constexpr, ANY_SLOT: tl.constexpr, EXACT: tl.constexpr, N_PER_TOKEN: tl.constexpr,
    W_PER_TOKEN: tl.constexpr, LOOP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    W_VEC: tl.constexpr, W_UNIT: tl.constexpr, N_VEC: tl.constexpr, N_UNIT: tl.constexpr, O_VEC: tl.constexpr,
    O_UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """narrow's axes (m, g, r), wide's (m, g, w); grid (tiles · runs of LOOP blocks of W, r blocks · groups). Route m reads rows m,
    or m // K of what has one for each token.

    ANY_SLOT: a pair is an expert (L = 0). EXACT: narrow already has wide's dtype.
    """
    w_blocks = tl.cdiv(W * W_VEC, BLOCK_W)
    turns = tl.cdiv(w_blocks, LOOP)
    tile = tl.program_id(0) // turns
    w_first = (tl.program_id(0) % turns) * LOOP
    w_last = tl.minimum(w_first + LOOP, w_blocks)
    group = tl.program_id(1) % GROUPS
    r = (tl.program_id(1) // GROUPS) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = plan + M + E
    count = tl.minimum(tl.load(head), TILES)
    if tile >= count:
        return
    pair = pair_at(head, tile, count)
    slot = pair % (L + 1)
    if (pair < 0) | (pair >= E * (L + 1)):
        return
    if not ANY_SLOT:
        if slot == L:
            return
    new = pair_at(head, tile - 1, count) != pair
    window = tile // RUN
    if not (new | (tile % RUN == 0)):
        return
    mates = tile + tl.arange(0, RUN)
    size = tl.sum(((mates < (window + 1) * RUN) & (pair_at(head, mates, count) == pair)).to(tl.int32), 0)
    first = tl.load(head + 1 + TILES + tile)
    last = tl.load(head + 1 + TILES + tile + size)
    first = tl.minimum(tl.maximum(first, 0), M)
    last = tl.minimum(last, M)
    rank = R
    if ranks is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks + slot), 0), R)
    if W_UNIT == 2:
        w_w = 1
    if N_UNIT == 2:
        n_r = 1
        rank = tl.minimum((rank + N_VEC - 1) // N_VEC * N_VEC, R // N_VEC * N_VEC)  # whole vectors: zeros past the rank
    DTYPE: tl.constexpr = wide.dtype.element_ty
    alone = new & (pair_at(head, tile + size, count) != pair)
    for w_block in tl.range(w_first, w_last, num_stages=1, disable_licm=True):
        w = w_block * BLOCK_W + tl.arange(0, BLOCK_W)
        w_in = w < W * W_VEC
        acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
        for p0 in range(first, last, BLOCK_T):
            position = p0 + tl.arange(0, BLOCK_T)
            live = position < last
            rows = tl.load(plan + position, mask=live, other=0)
            live = live & (rows >= 0) & (rows < M)
            n_rows = rows  # a division of 64-bit numbers would take more instructions than all else here
            w_rows = rows
            if N_PER_TOKEN:
                n_rows = rows // K
            if W_PER_TOKEN:
                w_rows = rows // K
            n_tile = tl.load(
                narrow + group * (n_g * N_VEC) + n_rows.to(tl.int64)[None, :] * (n_m * N_VEC) + r[:, None] * n_r,
                mask=(r < rank)[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            w_tile = tl.load(
                wide + group * (w_g * W_VEC) + w_rows.to(tl.int64)[:, None] * (w_m * W_VEC) + w[None, :] * w_w,
                mask=live[:, None] & w_in[None, :], other=0.0,
            )  # fmt: skip
            if EXACT:
                acc = dot(n_tile, w_tile, acc, PRECISION)
            else:
                n_tile = n_tile.to(tl.float32)
                if weights is not None:
                    n_tile *= tl.load(weights + rows.to(tl.int64) * v_m, mask=live, other=0.0).to(tl.float32)[None, :]
                high, low, scale = split(n_tile, DTYPE)
                acc = dot_split(high, low, scale, w_tile, acc, PRECISION)
        if alone:
            store_pair(
                acc, out, scalings, pair, E, L, r, w, R, W * W_VEC, group, o_l, o_e, o_g, o_r, o_w, ANY_SLOT, O_VEC, O_UNIT
            )
        else:
            part = 2 * window + new.to(tl.int32)  # in a window one pair at most comes from the last, and one goes on into the next
            p_ptrs = parts + ((part * GROUPS + group).to(tl.int64) * R + r[:, None]) * (W * W_VEC) + w[None, :]
            tl.store(p_ptrs, acc, mask=(r < R)[:, None] & w_in[None, :])


@triton.jit(do_not_specialize=("M", "E", "L", "TILES", "W", "R", "o_l", "o_e", "o_g", "o_r", "o_w"),
            do_not_specialize_on_alignment=("plan", "scalings"))  # fmt: skip
def expert_wgrad_sum_kernel(
    parts, out, plan, scalings,
    M: "i32", E: "i32", L: "i32", TILES: "i32", W: "i32", R: "i32",
    o_l: "i64", o_e: "i64", o_g: "i64", o_r: "i64", o_w: "i64",
    GROUPS: tl.constexpr, RUN: tl.constexpr, ANY_SLOT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    O_VEC: tl.constexpr, O_UNIT: tl.constexpr,
):  # fmt: skip
    """A pair that goes on from the window where it begins: its parts, in order. Grid (W blocks, r blocks · groups, windows)."""
    window = tl.program_id(2)
    group = tl.program_id(1) % GROUPS
    r = (tl.program_id(1) // GROUPS) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    head = plan + M + E
    count = tl.minimum(tl.load(head), TILES)
    pair = pair_at(head, (window + 1) * RUN, count)
    if (pair < 0) | (pair >= E * (L + 1)):
        return
    if not ANY_SLOT:
        if pair % (L + 1) == L:
            return
    begins = (pair_at(head, window * RUN, count) != pair) | (pair_at(head, window * RUN - 1, count) != pair)
    if (pair_at(head, (window + 1) * RUN - 1, count) != pair) | (not begins):
        return
    inside = (r < R)[:, None] & (w < W)[None, :]
    columns = r[:, None] * W + w[None, :]
    size = R.to(tl.int64) * W
    acc = tl.load(parts + ((2 * window + 1) * GROUPS + group) * size + columns, mask=inside, other=0.0)
    window += 1
    while pair_at(head, window * RUN, count) == pair:
        acc += tl.load(parts + (2 * window * GROUPS + group) * size + columns, mask=inside, other=0.0)
        window += 1
    store_pair(acc, out, scalings, pair, E, L, r, w, R, W, group, o_l, o_e, o_g, o_r, o_w, ANY_SLOT, O_VEC, O_UNIT)


def wgrad(
    name: str,
    narrow: Tensor,  # [M or T, G or 1, r]
    wide: Tensor,  # [M or T, G or 1, W]
    out: Tensor,  # [L, E, G, r, W], any strides, all zeros; [1, E, G, r, W] with L = 0
    parts: Tensor | None,  # scratch, [2 · windows, G, r, W] float32; None where no pair can have more than one run
    ids: Tensor,  # [T, K]
    plan: Tensor,
    ranks: Tensor | None,
    scalings: Tensor | None,
    weights: Tensor | None,  # [M], multiplies narrow
    slots: int,
    tiles: int,
    room: int,
    config: ExpertWgradConfig,
) -> None:
    """Write the pairs that have routes; the others keep their zeros."""
    routes, top_k = ids.shape[0] * ids.shape[1], ids.shape[1]
    _, experts, groups, rank, width = out.shape
    w_unit = unit_axis(wide, 2)
    vec = vector_width(wide, w_unit, width)
    ws = strides(wide, w_unit, vec)
    n_unit = unit_axis(narrow, 2)
    n_vec = vector_width(narrow, n_unit, rank)
    ns = strides(narrow, n_unit, n_vec)
    o_unit = unit_axis(out, 4, 3)
    o_vec = vector_width(out, o_unit, width if o_unit == 4 else rank)
    os_ = strides(out, o_unit, o_vec)
    grid = cdiv(width, config.block_w), cdiv(rank, config.block_r) * groups
    launch(
        name,
        expert_wgrad_kernel,
        (tiles * cdiv(grid[0], config.loop), grid[1], 1),
        (
            narrow, wide, out, out if parts is None else parts, plan, ranks, scalings, weights,
            routes, top_k, experts, slots, room, width // vec, rank,
            ns[0], 0 if narrow.shape[1] == 1 else ns[1], ns[2],
            ws[0], 0 if wide.shape[1] == 1 else ws[1], ws[2], 0 if weights is None else weights.stride(0), *os_,
        ),
        (
            groups, config.run, slots == 0, narrow.dtype == wide.dtype and weights is None, narrow.shape[0] != routes,
            wide.shape[0] != routes, config.loop, config.block_t, config.block_w, config.block_r, vec, w_unit, n_vec, n_unit,
            o_vec, o_unit, config.precision,
        ),
        config.num_warps,
        config.num_stages,
    )  # fmt: skip
    if parts is not None:
        launch(
            name,
            expert_wgrad_sum_kernel,
            (grid[0], cdiv(rank, 16) * groups, cdiv(tiles, config.run)),
            (parts, out, plan, scalings, routes, experts, slots, room, width, rank, *os_),
            (groups, config.run, slots == 0, config.block_w, 16, o_vec, o_unit),
            4,
            1,
        )
