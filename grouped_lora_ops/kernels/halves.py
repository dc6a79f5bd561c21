"""scaling · h as the sum of two bf16, for a matrix unit that reads its operands from shared memory (csrc/linear.cu)."""

import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, power_of_2
from .mixed import slot_of_rows
from .tile import launch, scaled, split


@triton.jit(do_not_specialize=("ROWS", "G", "R_8", "L", "id_div", "ids_stride", "h_c"),
            do_not_specialize_on_alignment=("ids", "scalings"))  # fmt: skip
def halves_kernel(
    h, out, ids, scalings, ROWS: "i32", G: "i32", R_8: "i32", L: "i32", id_div: "i32", ids_stride: "i64", h_c: "i64",
    CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """h's axes (chunk, row, r), out's (row, half, r), dense, r of 8 · R_8. The sums, the product and the split are those of
    `mixed_rows`. EARLY: the next kernel may start before this one's wait. FILL: zeros in rows without an adapter."""
    R = R_8 * 8
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < ROWS
    r = tl.arange(0, BLOCK_R)
    slot = slot_of_rows(ids, rows // G // id_div, inside, ids_stride, L)
    live = inside & (slot < L)
    mask = live[:, None] & (r < R)[None, :]
    at = rows.to(tl.int64)[:, None] * R + r[None, :]
    v = tl.load(h + at, mask=mask, other=0.0)
    for c in tl.static_range(1, CHUNKS):
        v += tl.load(h + c * (h_c * 8) + at, mask=mask, other=0.0)
    if scalings is not None:
        v = scaled(v, tl.load(scalings + slot, mask=live, other=0.0)[:, None])
    high, low, _ = split(v, tl.bfloat16)
    to = out + rows.to(tl.int64)[:, None] * (2 * R) + r[None, :]
    if FILL:
        mask = inside[:, None] & (r < R)[None, :]
    tl.store(to, high, mask=mask)
    tl.store(to + R, low, mask=mask)


def halves(
    name: str,
    h: Tensor,  # [chunks, M, G, r] float32, dense, r a multiple of 8
    out: Tensor,  # [M, G, 2, r] bf16, dense
    ids: Tensor | None,  # adapters of the tokens; None: slot 0
    id_div: int,  # rows of a token
    scalings: Tensor | None,
    slots: int,
    pdl: bool,
    early: bool = False,
    fill: bool = False,
) -> None:
    """Write high and low of scaling · h; rows without an adapter are left as they are (fill: get zeros).

    early: the kernel just ahead is the shrink that made h, which lets others start only when all before it have ended. So the product
    may start, and read what is older than h, while this kernel still waits.
    """
    chunks, rows, groups, rank = h.shape
    width = power_of_2(rank)
    block_m = max(1, 2048 // width)
    launch(
        name, halves_kernel, (cdiv(rows * groups, block_m), 1, 1),
        (h, out, ids, scalings, rows * groups, groups, rank // 8, slots, id_div, 0 if ids is None else ids.stride(0), h.stride(0) // 8),
        (chunks, block_m, width, pdl, early, fill), 4, 1, pdl,
    )  # fmt: skip
