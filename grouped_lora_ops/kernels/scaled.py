"""x Wᵀ of e4m3 weights with a scale for every block of 128 × 128 elements: W unrounded, or (e8m0 beside bf16) as bf16 has it."""

import triton
import triton.language as tl

from .tile import INTERPRETED, dot, round_to


@triton.jit
def from_e4m3(w, DTYPE: tl.constexpr):
    """e4m3 in DTYPE (bf16 or fp16; of bytes float32, too), exactly, NaN included.

    uint8, the same bytes: by integers, where there is no such type (before sm_89; the interpreter makes 480 of NaN).
    Otherwise by assembly that Triton does not look through: it would order the columns of an mma by the width of what
    was loaded (kWidth 4), those of a wgmma not, and a row's bits would depend on the tile height.
    """
    if w.dtype == tl.uint8:
        bits = w.to(tl.int32)
        size = bits & 127
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True))
        value = tl.where(size == 127, float("nan"), value)
        return (value.to(tl.int32, bitcast=True) | ((bits & 128) << 24)).to(tl.float32, bitcast=True).to(DTYPE)
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b, c, d, e, f;
            .reg .b32 p, q;
            .reg .f32 g, h, i, j;
            mov.b32 {e, f}, $2;
            cvt.rn.f16x2.e4m3x2 p, e;
            cvt.rn.f16x2.e4m3x2 q, f;
            mov.b32 {a, b}, p;
            mov.b32 {c, d}, q;
            cvt.f32.f16 g, a;
            cvt.f32.f16 h, b;
            cvt.f32.f16 i, c;
            cvt.f32.f16 j, d;
            cvt.rn.bf16x2.f32 $0, h, g;
            cvt.rn.bf16x2.f32 $1, j, i;
            }""", "=r,=r,r", [w], tl.bfloat16, False, 4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 e, f;
            mov.b32 {e, f}, $2;
            cvt.rn.f16x2.e4m3x2 $0, e;
            cvt.rn.f16x2.e4m3x2 $1, f;
            }""", "=r,=r,r", [w], tl.float16, False, 4,
        )  # fmt: skip


@triton.jit
def scale_value(s):
    """A block's scale in float32; uint8 is e8m0: 2^(s − 127), 255 is NaN."""
    if s.dtype == tl.uint8:
        bits = s.to(tl.int32)
        power = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
        return tl.where(bits == 255, float("nan"), power)
    else:
        return s


@triton.jit
def dequantized(w, scale):
    """w · scale in bf16: e4m3 (or its bytes) and float32 of e8m0, whose product is exact in float32 or beyond its range.

    By assembly that Triton does not look through, as in `from_e4m3`: scales, too, are loads of a byte, as are the bytes of w.
    """
    if w.dtype == tl.uint8:
        value = from_e4m3(w, tl.float32)
    else:
        value = from_e4m3(w, tl.float16).to(tl.float32)  # one conversion less than by bf16
    if INTERPRETED:
        return round_to(value * scale, tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b;
            mul.rn.f32 a, $1, $3;
            mul.rn.f32 b, $2, $4;
            cvt.rn.bf16x2.f32 $0, b, a;
            }""", "=r,f,f,f,f", [value, scale], tl.bfloat16, False, 2,
        )  # fmt: skip


@triton.jit
def scaled_rows(
    x, w, scales, first, last, x_d, w_d, s_d, row_offsets, column_offsets, scale_offsets, inside, n_in, acc,
    EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr, ONE_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + Σ_b scale_b · (x W8ᵀ over the columns of block b): blocks of BLOCK_K = 128 columns of D, each summed from zero and
    added by one fma. Products of x and e4m3 are exact in float32, so nothing is rounded but float32 sums.

    e8m0 scales beside bf16: acc + x Wᵀ with `dequantized` W, the chain of products of `base_rows`.

    x, w and scales begin at a block's first column; first … last − 1 are the columns that count.
    """
    ROUNDED: tl.constexpr = scales.dtype.element_ty == tl.uint8 and x.dtype.element_ty == tl.bfloat16
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + row_offsets[:, None] + k[None, :] * x_d
    w_ptrs = w + column_offsets[None, :] + k[:, None] * w_d
    s_ptrs = scales + scale_offsets
    for step in range(tl.cdiv(last, BLOCK_K)):
        if EVEN_K:
            x_tile = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
            w_tile = tl.load(w_ptrs, mask=n_in[None, :], other=0.0)
        else:
            column = step * BLOCK_K + k
            there = (column >= first) & (column < last)
            x_tile = tl.load(x_ptrs, mask=inside[:, None] & there[None, :], other=0.0)
            w_tile = tl.load(w_ptrs, mask=n_in[None, :] & there[:, None], other=0.0)
        if ONE_SCALE:
            scale = scale_value(tl.load(s_ptrs))
        else:
            scale = scale_value(tl.load(s_ptrs, mask=n_in, other=0.0))[None, :]
        if ROUNDED:
            acc = dot(x_tile, dequantized(w_tile, scale), acc, PRECISION)
        else:
            if not ONE_SCALE:
                scale = tl.broadcast_to(scale, acc.shape)
            part = dot(x_tile, from_e4m3(w_tile, x_tile.dtype), tl.zeros(acc.shape, tl.float32), PRECISION)
            acc = tl.fma(part, scale, acc)
        x_ptrs += BLOCK_K * x_d
        w_ptrs += BLOCK_K * w_d
        s_ptrs += s_d
    return acc
