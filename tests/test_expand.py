"""`expand` and `expand_`: our kernel against the reference, exactly, and against float64."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, FORMS, NAN, RANKS, UNSORTED, assert_bits, assert_equal, build, place, rounded, want_shrink

from grouped_lora_ops import reference

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def want(c, h, base):
    w = c.wide()
    base = w.base if base else None
    return rounded(reference.expand(h.double(), w.b, c.ids, c.scalings, base=base, **c.kw), c.x.dtype)


def check(kernels, c, h=None, what="", base=True):
    """With base, in place and (base=False) without; h's columns past the rank and its rows without an adapter are NaN."""
    h = want_shrink(c) if h is None else h
    stale = h.clone()
    stale[(c.ids < 0) | (c.ids >= c.b.shape[0])] = NAN
    if c.ranks is not None and h.shape[0] and c.b.shape[0]:
        rank = c.ranks[c.ids.clamp(0, c.b.shape[0] - 1).long()]
        past = torch.arange(h.shape[-1], device=h.device) >= rank[:, None]
        stale.masked_fill_(past if h.dim() == 2 else past[:, None], NAN)
    y = kernels.expand(stale, c.b, c.ids, c.scalings, base=c.base, **c.kw)
    assert_equal(y, want(c, h, True), f"with base {what}")
    assert_equal(reference.expand(h, c.b, c.ids, c.scalings, base=c.base, **c.kw), y, f"reference {what}")
    if not base:
        delta = kernels.expand(stale, c.b, c.ids, c.scalings, **c.kw)
        assert_equal(delta, want(c, h, False), f"without base {what}")
    out = c.base
    kernels.expand_(out, stale, c.b, c.ids, c.scalings, **c.kw)
    assert_equal(out, y, f"in place {what}")
    return y


@pytest.mark.parametrize("form", FORMS)
@dtypes
def test_exact(kernels, form, dtype):
    check(kernels, build(form, dtype, features=150, ranks=True, device=kernels.device), base=False)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["plain", "slices"])
@dtypes
def test_exact_without_ranks(kernels, form, dtype):
    check(kernels, build(form, dtype, features=150, device=kernels.device))


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["", "plan", "tall", "plan tall"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("form", ["wo_a", "slices"])
def test_modes(kernels, force, how, slots, form):
    force(how)
    check(kernels, build(form, tokens=40, slots=slots, features=150, ranks=True, device=kernels.device))


@pytest.mark.thorough
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(kernels, rank):
    for dtype in DTYPES.values() if rank in (7, 200) else [torch.bfloat16]:
        c = build("plain", dtype, features=64, rank=rank, ranks=[rank, rank // 2, 0], device=kernels.device)
        check(kernels, c)


@pytest.mark.thorough
@pytest.mark.parametrize("out", [1, 8, 127, 129, 1000])
def test_every_width(kernels, out):
    check(kernels, build("wo_a", features=64, out=out, device=kernels.device))


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [[1, 1, 1], [128, 64, 64], [7, 300], [40, 0, 24], [16], [0, 0]], ids=str)
def test_slices(kernels, sizes):
    check(kernels, build("slices", groups=len(sizes), sizes=sizes, features=64, ranks=True, device=kernels.device))


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [0, 1, 17, 65, 300])
def test_every_count(kernels, tokens):
    check(kernels, build("wo_a", tokens=tokens, features=64, out=20, device=kernels.device))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
def test_layouts(kernels, layout):
    for form, out in (("wo_a", 72), ("slices", 0)):
        c = build(form, rank=8, features=64, out=out, ranks=[8, 3, 5], layout=layout, device=kernels.device)
        check(kernels, c, what=f"{layout} {form} {out}")
    for one in ("b", "base") if layout in ("odd", "transposed") else ():
        c = build("wo_a", rank=8, features=64, out=72, layout={one: layout}, device=kernels.device)
        check(kernels, c, what=f"{layout} {one}")


@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
def test_layouts_of_h(kernels, layout):
    c = build("wo_a", rank=8, features=64, ranks=[8, 3, 5], device=kernels.device)
    h = place(want_shrink(c), layout, kernels.device)
    assert_equal(kernels.expand(h, c.b, c.ids, c.scalings, ranks=c.ranks), want(c, h, False))


@pytest.mark.parametrize("ids", UNSORTED, ids=str)
def test_unsorted_ids(kernels, force, ids):
    for how in ("", "plan"):
        force(how)
        c = build("plain", tokens=len(ids), slots=max(ids) + 2, ids=ids, features=64, device=kernels.device)
        check(kernels, c)


@pytest.mark.thorough
def test_ids_of_either_dtype_and_any_stride(kernels):
    for id_dtype in (torch.int32, torch.int64):
        for layout in ("dense", "rows"):
            check(kernels, build("plain", id_dtype=id_dtype, features=64, layout={"ids": layout}, device=kernels.device))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("slots, how", [(1, ""), (3, ""), (3, "plan")])
def test_a_zero_delta_leaves_the_bits_of_base(kernels, force, dtype, slots, how):
    """Rows without an adapter, B = 0, scaling 0 and rank 0: −0.0, NaN and infinities of base stay as they are."""
    force(how)
    c = build("wo_a", dtype, slots=slots, features=64, device=kernels.device, poison=False)
    h = want_shrink(c)
    special = torch.tensor([-0.0, 0.0, NAN, float("inf"), -float("inf"), 1.5], device=kernels.device).to(dtype)
    base = special.repeat(c.base.numel() // 6 + 1)[: c.base.numel()].view(c.base.shape)
    none = torch.full_like(c.ids, -1)
    zero_rank = torch.zeros(slots, dtype=torch.int32, device=kernels.device)
    calls = {
        "ids -1": (h * NAN, c.b, none, c.scalings, None),
        "B 0": (h, torch.zeros_like(c.b), c.ids.clamp(0), c.scalings, None),
        "scaling 0": (h, c.b, c.ids.clamp(0), torch.zeros_like(c.scalings), None),
        "rank 0": (h * NAN, c.b * NAN, c.ids.clamp(0), c.scalings, zero_rank),
    }
    for what, (h_, b, ids, scalings, ranks) in calls.items():
        assert_bits(kernels.expand(h_, b, ids, scalings, base=base, ranks=ranks), base, what)
        out = base.clone()
        kernels.expand_(out, h_, b, ids, scalings, ranks=ranks)
        assert_bits(out, base, f"{what}, in place")
        assert not kernels.expand(h_, b, ids, scalings, ranks=ranks).any(), what


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("how", ["", "plan"])
def test_ids_out_of_range_count_as_none(kernels, force, slots, how):
    force(how)
    ids = [0, slots, -2, 2**31 - 1, -(2**31), 0, 10**6]
    check(kernels, build("plain", slots=slots, ids=ids, features=64, device=kernels.device))


@pytest.mark.parametrize("slots", [100, 1024])
def test_many_slots(kernels, slots):
    ids = [0, slots - 1, slots // 2, -1, 0, 7, slots - 1]
    check(kernels, build("plain", slots=slots, ids=ids, features=40, device=kernels.device))


@pytest.mark.parametrize("sizes", [dict(rank=0), dict(out=0), dict(slots=0, ids=[-1] * 7), dict(groups=0)], ids=str)
def test_empty_sizes(kernels, sizes):
    c = build("wo_a", device=kernels.device, features=20, poison=False, **sizes)
    check(kernels, c)
    h = want_shrink(c)
    assert_bits(torch.ops.grouped_lora.expand(h, c.b, c.ids, c.scalings, c.base), want(c, h, True))


def test_strided_scalings_and_ranks(kernels):
    c = build("plain", ranks=True, features=64, device=kernels.device)
    c.ranks = torch.stack([c.ranks, c.ranks.new_full((3,), 99)], 1)[:, 0]
    c.scalings = torch.stack([c.scalings, c.scalings.new_full((3,), NAN)], 1)[:, 0]
    c.kw["ranks"] = c.ranks
    check(kernels, c)


def test_scaling_multiplies_in_float32_and_one_rounding_joins_base(kernels):
    """1/3 is not rounded to bf16, and base + delta is not rounded before the end."""
    h = torch.full((1, 16), 1.0, device=kernels.device)
    b = torch.zeros(1, 1, 16, dtype=torch.bfloat16, device=kernels.device)
    b[0, 0, 0] = 3.0
    ids, third = torch.zeros(1, dtype=torch.int32, device=kernels.device), torch.tensor([1 / 3], device=kernels.device)
    assert kernels.expand(h, b, ids, third).item() == 1.0
    base = torch.tensor([[256.0]], dtype=torch.bfloat16, device=kernels.device)
    b[0, 0, :3] = torch.tensor([1.0, 2**-7, 0.0])  # 256 + 1.0078 is above the tie at 257: up; delta alone rounds to 1.0
    h[0, 1] = 2**-2
    assert kernels.expand(h, b, ids, torch.ones(1, device=kernels.device), base=base).item() == 258.0


@dtypes
def test_close_to_float64(kernels, dtype):
    """h is random float32: what is kept of it (16 bits for bf16 weights) is far finer than the result's rounding."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(9, 2, 24, generator=generator).to(kernels.device)
    b, base = torch.randn(2, 2, 90, 24, generator=generator), torch.randn(9, 2, 90, generator=generator)
    b, base = b.to(kernels.device, dtype), base.to(kernels.device, dtype)
    ids, scalings = torch.arange(9, device=kernels.device) % 2, torch.tensor([0.3, 1.7], device=kernels.device)
    exact = reference.expand(h.double(), b.double(), ids, scalings, base=base.double())
    torch_error = (reference.expand(h, b, ids, scalings, base=base) - exact).abs().max()
    error = (kernels.expand(h, b, ids, scalings, base=base) - exact).abs().max()
    assert error <= 2 * torch_error


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["", "plan"])
def test_rows_beyond_2_to_the_31_elements(force, how):
    """Row 2 of out, base and h, and slot 2 of B, begin 2³¹ elements in."""
    force(how)
    c = build("plain", tokens=3, features=64, out=256, ids=[2, 0, 2], device="cuda")
    h = want_shrink(c)
    y = want(c, h, True)
    far = torch.empty_strided((3, 256), (2**30, 1), dtype=torch.bfloat16, device="cuda")
    far.copy_(c.base)
    assert_equal(torch.ops.grouped_lora.expand(h, c.b, c.ids, c.scalings, far), y)
    torch.ops.grouped_lora.expand_(far, h, c.b, c.ids, c.scalings)
    assert_equal(far, y)
    del far
    b = torch.empty_strided((3, 256, 5), (2**30, 5, 1), dtype=torch.bfloat16, device="cuda").copy_(c.b)
    assert_equal(torch.ops.grouped_lora.expand(h, b, c.ids, c.scalings, c.base), y)
    del b
    far_h = torch.empty_strided((3, 5), (2**30, 1), dtype=torch.float32, device="cuda").copy_(h)
    assert_equal(torch.ops.grouped_lora.expand(far_h, c.b, c.ids, c.scalings, c.base), y)


@pytest.mark.gpu
@dtypes
def test_exact_at_real_sizes(kernels, dtype):
    for tokens, slots, rank, ranks in ((64, 8, 64, True), (600, 3, 512, True), (2000, 8, 16, False), (2000, 1, 128, True)):
        c = build(
            "wo_a", dtype, tokens=tokens, slots=slots, groups=8, features=512, out=1024, rank=rank, ranks=ranks, device="cuda"
        )
        check(kernels, c, what=f"{tokens} {slots} {rank}", base=dtype != torch.bfloat16)


@pytest.mark.gpu
@dtypes
def test_batch_invariance_at_real_sizes(dtype):
    generator = torch.Generator(device="cuda").manual_seed(0)
    for rank in (16, 200):
        h = torch.randn(3000, 4, rank, generator=generator, device="cuda")
        b = torch.randn(4, 4, 1000, rank, generator=generator, device="cuda").to(dtype)
        base = torch.randn(3000, 4, 1000, generator=generator, device="cuda").to(dtype)
        ids, scalings = torch.arange(3000, device="cuda") % 5 - 1, torch.tensor([0.3, 1.0, 1.7, -2.1], device="cuda")
        plan = torch.ops.grouped_lora.plan(ids, 4)
        expand = torch.ops.grouped_lora.expand
        batch = expand(h, b, ids, scalings, base)
        assert_bits(expand(h, b, ids, scalings, base, plan=plan), batch, "with a plan")
        for rows in (slice(0, 1), slice(299, 300), slice(0, 7), slice(0, 300), slice(1, 1200)):
            assert_bits(expand(h[rows], b, ids[rows], scalings, base[rows]), batch[rows], str(rows))
        out = base.clone()
        torch.ops.grouped_lora.expand_(out, h, b, ids, scalings)
        assert_bits(out, batch, "in place")
