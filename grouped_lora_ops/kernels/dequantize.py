"""An e4m3 weight in bf16: as it is, or bf16(weight · scale) with an e8m0 scale for every block of 128 × 128 elements."""

import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv
from .scaled import dequantized, from_e4m3, scale_value
from .shrink import strides
from .tile import launch, unit_axis, vector_width

_BLOCK = tl.constexpr(128)  # rows and columns of a scale


@triton.jit(do_not_specialize=("N", "D", "w_g", "w_n", "w_d", "s_g", "s_n", "s_d"), do_not_specialize_on_alignment=("scales",))
def dequantize_kernel(
    w, scales, out,
    N: "i32", D: "i32", w_g: "i64", w_n: "i64", w_d: "i64", s_g: "i64", s_n: "i64", s_d: "i64",
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, W_VEC: tl.constexpr, W_UNIT: tl.constexpr, N_VEC: tl.constexpr,
    D_VEC: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """w's axes (g, n, d), scales' (g, block of n, of d), out's (g, n, d), dense. W_UNIT: 2 (d) or 1 (n), −1 for none. N is in
    units of N_VEC, D of D_VEC. A program's tile lies in one block."""
    N = N * N_VEC
    D = D * D_VEC
    if W_UNIT == 2:
        w_d = 1
        w_n = w_n * W_VEC
    elif W_UNIT == 1:
        w_n = 1
        w_d = w_d * W_VEC
    d_blocks = tl.cdiv(D, BLOCK_D)
    n_start = tl.program_id(0) // d_blocks * BLOCK_N
    d_start = tl.program_id(0) % d_blocks * BLOCK_D
    group = tl.program_id(1).to(tl.int64)
    n = n_start + tl.arange(0, BLOCK_N)
    d = d_start + tl.arange(0, BLOCK_D)
    w_ptrs = w + group * (w_g * W_VEC) + n[:, None] * w_n + d[None, :] * w_d
    out_ptrs = out + (group * N + n)[:, None] * D + d[None, :]
    if EVEN_N and EVEN_D:
        mask = None
        weight = tl.load(w_ptrs)
    else:
        mask = (n < N)[:, None] & (d < D)[None, :]
        weight = tl.load(w_ptrs, mask=mask, other=0.0)
    if scales is None:
        weight = from_e4m3(weight, tl.bfloat16)
    else:
        weight = dequantized(weight, scale_value(tl.load(scales + group * s_g + n_start // _BLOCK * s_n + d_start // _BLOCK * s_d)))
    tl.store(out_ptrs, weight, mask=mask)


def dequantize(
    name: str,
    weight: Tensor,  # [G, N, D] e4m3 or its bytes
    scales: Tensor | None,  # [G, ⌈N/128⌉, ⌈D/128⌉] e8m0's bytes; None: they are left to the product
    out: Tensor,  # [G, N, D] bf16, dense
) -> None:
    """Write out = bf16(weight · scale), or weight, which bf16 has exactly."""
    groups, out_features, features = out.shape
    w_unit = unit_axis(weight, 2, 1)
    # along D 8 bytes a thread are one 16-byte store; of 16 bytes each half would have to go to another thread
    w_vec = vector_width(weight, w_unit, out_features if w_unit == 1 else features)
    w_vec = min(w_vec, 8) if w_unit == 2 else w_vec
    n_vec, d_vec = w_vec if w_unit == 1 else 1, vector_width(out, 2, features)
    block_n, block_d = (128, 64) if w_unit == 1 else (64, 128)
    ws = strides(weight, w_unit, w_vec)
    launch(
        name,
        dequantize_kernel,
        (cdiv(out_features, block_n) * cdiv(features, block_d), groups, 1),
        (weight, scales, out, out_features // n_vec, features // d_vec, *ws, *((0,) * 3 if scales is None else scales.stride())),
        (block_n, block_d, w_vec, w_unit, n_vec, d_vec, out_features % block_n == 0, features % block_d == 0),
        4,
        1,
    )
