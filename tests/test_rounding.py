"""The last step of every delta, base + factor · acc rounded once: `kernels.tile.add_rounded`, number by number."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from cases import DTYPES, assert_bits
from conftest import GPU

from grouped_lora_ops.kernels.tile import add_rounded, whole_blocks

DEVICE = "cuda" if GPU else "cpu"
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
pytestmark = [pytest.mark.gpu] if GPU else []


@triton.jit
def add_kernel(out, acc, factor, base, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)
    at = r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, add_rounded(tl.load(acc + at), tl.load(factor + r)[:, None], tl.load(base + at)))


def add(acc, factor, base):
    out = torch.empty_like(base)
    add_kernel[(1,)](out, acc, factor, base, *base.shape)
    return out


def special(dtype):
    """Every class of number, both signs, of the smallest, the largest and between."""
    info = torch.finfo(dtype)
    values = [0.0, info.smallest_normal, info.smallest_normal / 2, info.max, 1.0, 1.0 + info.eps, 3.0, float("inf"), float("nan")]
    base = torch.tensor([s * v for v in values for s in (1, -1)], dtype=dtype)
    odd_nan = torch.tensor([float("nan")], dtype=dtype)
    odd_nan.view(BITS[dtype])[0] += 5
    return torch.cat([base, odd_nan])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_special_numbers(dtype):
    """Zero keeps all of base's bits; what is not a number makes none; the rest as float32 has it."""
    base = special(dtype)
    acc = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-30, 1e30, 1e38, float("inf"), -float("inf"), float("nan")])
    factor = torch.tensor([1.0, -2.0, 0.0, 0.5, 2.0**-10, float("inf"), float("nan"), -0.0])
    b, a, f = (t.flatten() for t in torch.meshgrid(torch.arange(len(base)), torch.arange(len(acc)), torch.arange(len(factor)), indexing="ij"))
    padding = -len(b) % 32
    b, a, f = (torch.cat([t, t[:padding]]) for t in (b, a, f))
    order = torch.argsort(f, stable=True)  # rows of one factor: 32 wide, cut where it changes
    b, a, f = b[order], a[order], f[order]
    checked = 0
    for i in range(len(factor)):
        here = f == i
        bases, accs = base[b[here]], acc[a[here]]
        width, height = 32, 64
        room = width * height
        many = (room + len(bases) - 1) // len(bases)
        bases, accs = bases.repeat(many)[:room].view(height, width), accs.repeat(many)[:room].view(height, width)
        got = add(accs.to(DEVICE), factor[i].expand(height).contiguous().to(DEVICE), bases.to(DEVICE)).cpu()
        delta = accs * factor[i]
        total = (accs.double() * factor[i].double() + bases.double()).float().to(dtype)  # these sums are exact, or far from a tie
        zero = delta == 0
        assert_bits(got[zero], bases[zero])
        nan = total.isnan() & ~zero
        assert torch.equal(got.isnan() & ~zero, nan)
        rest = ~zero & ~nan
        assert_bits(got[rest], total[rest])
        checked += int(zero.any()) + int(nan.any()) + int(rest.any())
    assert checked > 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows,columns", [(16, 16), (16, 128), (64, 64)])
def test_one_rounding(dtype, rows, columns):
    """As exact arithmetic rounds to float32, then to base's dtype: sums near the middle of two numbers, and of any exponents."""
    generator = torch.Generator().manual_seed(rows + columns)
    base = torch.randn(rows, columns, generator=generator).to(dtype)
    acc = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-20, 3, (rows, columns), generator=generator)
    factor = torch.rand(rows, generator=generator) * 4 - 2
    half = torch.finfo(dtype).eps / 2 * base.float().abs()
    near = torch.rand(rows, columns, generator=generator) < 0.5
    acc = torch.where(near, half / factor[:, None] * (1 + torch.randn(rows, columns, generator=generator) * 1e-6), acc)
    if GPU:  # what cancels shows whether the product was rounded; Triton's interpreter does round it
        acc[:, ::3] = (-base.float() / factor[:, None])[:, ::3]
    got = add(acc.to(DEVICE), factor.to(DEVICE), base.to(DEVICE)).cpu()

    def to_float32(exact: Fraction) -> float:
        low = torch.tensor(float(exact), dtype=torch.float64).float()  # a neighbour; then the nearest of three, ties to even
        nearest = [torch.nextafter(low, torch.tensor(-float("inf"))), low, torch.nextafter(low, torch.tensor(float("inf")))]
        return min(nearest, key=lambda v: (abs(Fraction(v.item()) - exact), v.view(torch.int32).item() & 1)).item()

    exact = [
        to_float32(Fraction(a) * Fraction(f) + Fraction(b))
        for line, f, bases in zip(acc.tolist(), factor.tolist(), base.float().tolist())
        for a, b in zip(line, bases)
    ]
    assert_bits(got, torch.tensor(exact).view(rows, columns).to(dtype))


def test_whole_blocks():
    assert whole_blocks(64, 64) and whole_blocks(64, 64, 128, 0)
    assert not whole_blocks(64, 72, 64) and not whole_blocks(64, 64, 72) and not whole_blocks(64, 32)
