"""`delta` and `delta_`: our kernels against the reference, exactly, and against float64."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, FORMS, NAN, UNSORTED, assert_bits, assert_equal, build, want_delta, want_shrink

from grouped_lora_ops import launch, reference

thorough = pytest.mark.thorough
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def check(kernels, c, what="", base=True, plan=None):
    """delta_, delta with base and (base=False) without."""
    want = want_delta(c)
    assert_equal(reference.delta(*c.factors, base=c.base, **c.kw), want, f"reference {what}")
    assert_equal(kernels.delta(*c.factors, base=c.base, plan=plan, **c.kw), want, f"with base {what}")
    if not base:
        assert_equal(kernels.delta(*c.factors, plan=plan, **c.kw), want_delta(c, base=False), f"without base {what}")
    out = c.base
    kernels.delta_(out, *c.factors, plan=plan, **c.kw)
    assert_equal(out, want, f"in place {what}")


@pytest.mark.parametrize("form", FORMS)
@dtypes
@pytest.mark.parametrize("way", ["fused", pytest.param("split", marks=thorough)])
def test_exact(kernels, force, form, dtype, way):
    if way == "split" and dtype == torch.float32 and form != "wo_a":
        pytest.skip("float32 h is split into nothing")
    force(way)
    check(kernels, build(form, dtype, ranks=True, device=kernels.device), base=False)


def test_the_cases_catch_a_rounded_h():
    """A kernel that rounded h to bf16 or fp16 would fail these cases."""
    for form in FORMS:
        for dtype in (torch.bfloat16, torch.float16):
            c = build(form, dtype)
            h = want_shrink(c)
            y = reference.expand(h.to(dtype).float(), c.b, c.ids, c.scalings, base=c.base, **c.kw)
            assert not torch.equal(y, want_delta(c)), form


@thorough
@dtypes
def test_exact_as_chosen_and_without_ranks(kernels, dtype):
    for form in ("plain", "slices"):
        check(kernels, build(form, dtype, device=kernels.device), form, base=False)


@thorough
@pytest.mark.parametrize("how", ["plan", "tall", "plan tall"])
@pytest.mark.parametrize("way", ["fused", "split"])
@pytest.mark.parametrize("form", ["wo_a", "slices"])
def test_modes(kernels, force, how, way, form):
    force(f"{how} {way}")
    for slots in (1, 3):
        check(kernels, build(form, tokens=40, slots=slots, ranks=True, device=kernels.device), f"L = {slots}")


@pytest.mark.parametrize("form, features", [("wo_a", 900), ("slices", 1024)])
def test_several_chunks_a_program(kernels, force, form, features):
    """Four chunks of D, the last a part or whole, by programs of three."""
    for how in ("split span", "plan split span"):
        force(how)
        for slots in (1, 3):
            check(kernels, build(form, tokens=5, slots=slots, features=features, ranks=True, device=kernels.device), how)


@pytest.mark.parametrize("way", ["fused", "whole"])
def test_the_same_plan_serves_every_layout(kernels, force, way):
    force(f"plan {way}")
    plan = None
    for form in FORMS:
        c = build(form, tokens=20, features=40, ids=[2, 0, -1, 1, 2] * 4, device=kernels.device)
        plan = kernels.plan(c.ids, 3) if plan is None else plan
        assert_equal(kernels.delta(*c.factors, base=c.base, plan=plan, **c.kw), want_delta(c), form)


def test_a_plan_is_accepted_where_none_is_needed(kernels):
    for slots in (1, 3):
        c = build("wo_a", slots=slots, device=kernels.device)
        check(kernels, c, plan=kernels.plan(c.ids, slots))


@pytest.mark.parametrize("way", [pytest.param("fused", marks=thorough), "split"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 8, 12, 33, 64, 128, 200])
def test_every_rank(kernels, force, way, rank):
    if way == "fused" and rank > 128:
        pytest.skip("h of a fused tile is at most 128 wide")
    force(way)
    ranks = [rank, rank // 2, 0]
    check(kernels, build("plain", rank=rank, features=160, ranks=ranks, ids=[0, 1, 2, 0, 1, -1, 0], device=kernels.device))


@pytest.mark.parametrize("rank, ranks", [(128, [128, 16, 60]), (96, [7, 96, 33]), (256, [256, 16, 136]), (200, [130, 64, 0])], ids=str)
def test_ranks_far_below_the_widest(kernels, force, rank, ranks):
    """Slots of few ranks in wide buffers have narrower products; 130 and 60 end within a vector of B."""
    force("plan split")
    c = build("plain", tokens=110, features=160, out=150, rank=rank, ranks=ranks, device=kernels.device)
    p = launch.Problem("sm_90", 132, 2, 110, 1, 160, 150, rank, 3)
    assert launch.expand(p).narrow and launch.expand(p).loop > 1
    check(kernels, c)
    single = build("wo_a", tokens=40, slots=1, features=160, out=80, rank=rank, ranks=ranks[1:2], device=kernels.device)
    check(kernels, single, base=False)
    check(kernels, build("plain", torch.float16, tokens=110, features=160, out=150, rank=rank, ranks=ranks, device=kernels.device))


@pytest.mark.parametrize("out", [64, 70, 128])
def test_one_launch_of_whole_and_cut_blocks(kernels, force, out):
    """Of N, and slots whose rank ends within a vector of B beside ones whose does not."""
    force("plan fused")
    check(kernels, build("plain", tokens=40, features=160, out=out, rank=16, ranks=[16, 5, 8], device=kernels.device), base=False)


@pytest.mark.parametrize("form", ["slices", "shared input"])
@pytest.mark.parametrize("layout", ["dense", "slice", "transposed"])
def test_groups_that_share_x_are_shrunk_as_one(kernels, monkeypatch, form, layout):
    """Their As, one behind the other, are one A of G · r rows; what lies past a slot's rank is NaN and is not read from h."""
    from grouped_lora_ops.kernels import shrink

    monkeypatch.setattr(launch, "_fused", lambda p: launch.fused(p, 16))
    seen, run = [], shrink.shrink
    monkeypatch.setattr(shrink, "shrink", lambda name, x, a, h, *args: (seen.append(tuple(h.shape)), run(name, x, a, h, *args)))
    for slots in (1, 3):
        check(kernels, build(form, tokens=20, slots=slots, ranks=True, layout={"a": layout}, device=kernels.device), base=False)
    dense = layout != "transposed"  # r and D swapped in memory: no view has the groups' rows as one axis
    assert set(seen) == ({(1, 20, 1, 10)} if dense else set())


@pytest.mark.parametrize("groups, tokens", [(2, 9), (4, 21), (8, 12), (6, 5)])
def test_groups_that_share_a_have_their_rows_in_one_tile(kernels, force, groups, tokens):
    force("split")
    p = launch.Problem("sm_90", 132, 2, tokens, groups, 160, 20, 5, 3, shared_a=True)
    assert launch.shrink(p, True).merge == {2: 2, 4: 4, 8: 8, 6: 2}[groups]
    c = build("wo_a", tokens=tokens, groups=groups, features=160, out=20, rank=40, ranks=True, device=kernels.device)
    check(kernels, c, base=False)
    check(kernels, build("slices of grouped x", tokens=tokens, features=160, sizes=[24] * groups, device=kernels.device))


@thorough
@pytest.mark.parametrize("way", ["fused", "split"])
def test_every_width(kernels, force, way):
    force(way)
    for features, out in ((1, 1), (129, 127), (256, 129), (2100, 64)):
        check(kernels, build("plain", features=features, out=out, device=kernels.device), f"{features} {out}")


@pytest.mark.parametrize("sizes", [[1, 1, 1], [128, 64, 64], [7, 150], [40, 0, 24], [16]], ids=str)
@pytest.mark.parametrize("way", [pytest.param("fused", marks=thorough), "split"])
def test_slices(kernels, force, way, sizes):
    force(way)
    check(kernels, build("slices", groups=len(sizes), sizes=sizes, features=64, ranks=True, device=kernels.device))


@pytest.mark.parametrize("tokens", [0, 1, 17, 65, 300])
def test_every_count(kernels, tokens):
    check(kernels, build("wo_a", tokens=tokens, features=64, out=20, device=kernels.device))


@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
@pytest.mark.parametrize("way", [pytest.param("fused", marks=thorough), "split"])
def test_layouts(kernels, force, layout, way):
    force(way)
    for form in ("wo_a", "slices"):
        c = build(form, rank=8, features=320, out=72, ranks=[8, 3, 5], layout=layout, device=kernels.device)
        check(kernels, c, f"{layout} {form}")
    for one in ("x", "a", "b", "base") if layout in ("odd", "transposed") else ():
        c = build("wo_a", rank=8, features=320, out=72, ranks=[8, 3, 5], layout={one: layout}, device=kernels.device)
        assert_equal(kernels.delta(*c.factors, base=c.base, **c.kw), want_delta(c), f"{layout} {one}")


def test_one_slot_may_be_all_slots(kernels, force):
    """Factors broadcast over the slots with stride 0."""
    for way in ("fused", "split"):
        force(way)
        c = build("wo_a", device=kernels.device, poison=False)
        c.a, c.b = (t[:1].expand_as(t) for t in (c.a, c.b))
        check(kernels, c, way)


@pytest.mark.parametrize("ids", UNSORTED, ids=str)
def test_unsorted_ids(kernels, force, ids):
    for how in ("fused", "split", "plan fused", "plan split"):
        force(how)
        check(kernels, build("plain", tokens=len(ids), slots=max(ids) + 2, ids=ids, features=64, device=kernels.device), how)


@thorough
@pytest.mark.parametrize("how", ["fused", "split", "plan fused"])
def test_ids_of_either_dtype_and_any_stride(kernels, force, how):
    force(how)
    for slots in (1, 3):
        c = build("plain", slots=slots, id_dtype=torch.int64, features=64, layout={"ids": "rows"}, device=kernels.device)
        check(kernels, c)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("how", [pytest.param("fused", marks=thorough), "split", pytest.param("plan fused", marks=thorough)])
def test_a_zero_delta_leaves_the_bits_of_base(kernels, force, slots, how):
    """ids −1 (with x NaN), B = 0, scaling 0 and rank 0: −0.0, NaN and infinities of base stay as they are."""
    force(how)
    dtype = torch.float32 if how == "split" else torch.bfloat16
    c = build("wo_a", dtype, slots=slots, features=64, device=kernels.device, poison=False)
    special = torch.tensor([-0.0, 0.0, NAN, float("inf"), -float("inf"), 1.5], device=kernels.device).to(dtype)
    base = special.repeat(c.base.numel() // 6 + 1)[: c.base.numel()].view(c.base.shape)
    none, some = torch.full_like(c.ids, -1), c.ids.clamp(0)
    zero_rank = torch.zeros(slots, dtype=torch.int32, device=kernels.device)
    calls = {
        "ids -1": (c.x * NAN, c.a, c.b, none, c.scalings, None),
        "B 0": (c.x, c.a, torch.zeros_like(c.b), some, c.scalings, None),
        "scaling 0": (c.x, c.a, c.b, some, torch.zeros_like(c.scalings), None),
        "rank 0": (c.x * NAN, c.a * NAN, c.b * NAN, some, c.scalings, zero_rank),
    }
    for what, (*factors, ranks) in calls.items():
        assert_bits(kernels.delta(*factors, base=base, ranks=ranks), base, what)
        out = base.clone()
        kernels.delta_(out, *factors, ranks=ranks)
        assert_bits(out, base, f"{what}, in place")
        assert not kernels.delta(*factors, ranks=ranks).any(), what


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("how", ["fused", "split", pytest.param("whole tall", marks=thorough)])
def test_rows_without_an_adapter_beside_a_broken_one(kernels, force, how, slots):
    """Weights and scalings of NaN and Inf: rows of another slot, or of none, never see them, forward or backward."""
    force(how)
    c = build("wo_a", slots=slots, ids=[0, -1, 0, -1, -1, 0, -1], device=kernels.device)
    c.a[0], c.b[0], c.scalings[0] = NAN, float("inf"), NAN
    none = c.ids < 0
    c.base[:] = -0.0
    assert_bits(kernels.delta(*c.factors, base=c.base)[none], c.base[none])
    assert not kernels.delta(*c.factors)[none].any()
    grads = kernels.delta_backward(c.grad_y, *c.factors, None, None, None, [True] * 3)
    assert not grads[0][none].any()
    c.ids[:] = -1
    assert_bits(kernels.delta(*c.factors, base=c.base), c.base)
    for grad in kernels.delta_backward(c.grad_y, *c.factors, None, None, None, [True] * 3):
        assert not grad.any()


@pytest.mark.parametrize("how", ["fused", "split", "plan fused"])
def test_ids_out_of_range_count_as_none(kernels, force, how):
    force(how)
    for slots in (1, 3):
        ids = [0, slots, -2, 2**31 - 1, -(2**31), 0, 10**6]
        check(kernels, build("plain", slots=slots, ids=ids, features=64, device=kernels.device))


@pytest.mark.parametrize("how", ["fused", "split"])
def test_a_plan_that_is_not_one_never_leads_out_of_bounds(kernels, force, how):
    """Rows and starts far outside: the result is unspecified, the guard rows around out are not touched."""
    force(f"plan {how}")
    c = build("plain", tokens=20, features=64, ids=[0, 1] * 10, device=kernels.device)
    guard = c.base.new_full((60, c.base.shape[1]), 7.0)
    out = guard[20:40]
    for wrong in (2**31 - 1, -(2**31), 1000, -7):
        plan = torch.full((20 + 3 + 2,), wrong, dtype=torch.int32, device=kernels.device)
        kernels.delta_(out, *c.factors, plan=plan)
        plan[20:] = torch.tensor([0, 7, 20, 20, 20], dtype=torch.int32)
        kernels.delta_(out, *c.factors, plan=plan)
        plan[:20] = torch.arange(20, dtype=torch.int32)
        plan[20:] = torch.tensor([0, 2**30, -(2**30), 2**31 - 1, 20], dtype=torch.int32)
        kernels.delta_(out, *c.factors, plan=plan)
    assert (guard[:20] == 7).all() and (guard[40:] == 7).all()


@thorough
@pytest.mark.parametrize("slots", [100, 1024])
def test_many_slots(kernels, force, slots):
    ids = [0, slots - 1, slots // 2, -1, 0, 7, slots - 1]
    for how in ("fused", "split"):
        force(how)
        check(kernels, build("plain", slots=slots, ids=ids, features=40, device=kernels.device))


@pytest.mark.parametrize(
    "sizes", [dict(rank=0), dict(features=0), dict(out=0), dict(slots=0, ids=[-1] * 7), dict(groups=0)], ids=str
)
def test_empty_sizes(kernels, sizes):
    c = build("wo_a", device=kernels.device, poison=False, **sizes)
    check(kernels, c)
    assert_equal(torch.ops.grouped_lora.delta(*c.factors, c.base), want_delta(c))


def test_only_its_own_group_reaches_a_group(kernels, force):
    """BUGS: an input in group 0 alone makes an output in group 0 alone, equal to the dense block-diagonal product."""
    for way in ("fused", "split"):
        force(way)
        c = build("wo_a", ids=[0, 1, 2, 0, 1, 2, 0], groups=3, device=kernels.device)
        c.x[:, 1:] = 0
        y = kernels.delta(*c.factors)
        assert y[:, 0].any() and not y[:, 1:].any()


def test_out_beside_x_in_one_buffer(kernels, force):
    """out and x are adjacent column slices of one buffer."""
    for way in ("fused", "split"):
        force(way)
        c = build("plain", features=64, out=72, device=kernels.device)
        want = want_delta(c)
        buffer = torch.empty(7, 136, dtype=c.x.dtype, device=kernels.device)
        buffer[:, :64], buffer[:, 64:] = c.x, c.base
        x, out = buffer[:, :64], buffer[:, 64:]
        kernels.delta_(out, x, *c.factors[1:])
        assert_equal(out, want)
        assert_bits(x.clone(), c.x)


@thorough
@pytest.mark.parametrize("how", ["fused", "split", "plan fused"])
def test_a_second_run_has_the_same_bits(kernels, force, how):
    force(how)
    generator = torch.Generator().manual_seed(0)
    x, a = torch.randn(40, 2, 520, generator=generator), torch.randn(3, 12, 520, generator=generator)
    b, base = torch.randn(3, 2, 72, 12, generator=generator), torch.randn(40, 2, 72, generator=generator)
    ids, scalings = torch.arange(40, device=kernels.device) % 4 - 1, torch.tensor([0.3, 1.0, -2.1], device=kernels.device)
    for dtype in (torch.bfloat16, torch.float32):
        factors = [t.to(kernels.device, dtype) for t in (x, a, b)]
        base_ = base.to(kernels.device, dtype)
        first = kernels.delta(*factors, ids, scalings, base=base_)
        assert_bits(kernels.delta(*factors, ids, scalings, base=base_), first)
        out = base_.clone()
        kernels.delta_(out, *factors, ids, scalings)
        assert_bits(out, first)


@dtypes
@pytest.mark.parametrize("way", ["fused", "split"])
def test_close_to_float64(kernels, force, dtype, way):
    force(way)
    generator = torch.Generator().manual_seed(1)
    x, a = torch.randn(9, 2, 900, generator=generator), torch.randn(2, 24, 900, generator=generator)
    b, base = torch.randn(2, 2, 90, 24, generator=generator), torch.randn(9, 2, 90, generator=generator)
    x, a, b, base = (t.to(kernels.device, dtype) for t in (x, a, b, base))
    ids, scalings = torch.arange(9, device=kernels.device) % 2, torch.tensor([0.3, 1.7], device=kernels.device)
    exact = reference.delta(x.double(), a.double(), b.double(), ids, scalings, base=base.double())
    torch_error = (reference.delta(x, a, b, ids, scalings, base=base) - exact).abs().max()
    error = (kernels.delta(x, a, b, ids, scalings, base=base) - exact).abs().max()
    assert error <= 2 * torch_error


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["fused", "split", "plan fused", "plan split"])
def test_rows_beyond_2_to_the_31_elements(force, how):
    """Row 2 of x and of out, and slot 2 of A and B, begin 2³¹ elements in."""
    force(how)
    c = build("plain", tokens=3, features=256, out=256, ids=[2, 0, 2], device="cuda")
    want = want_delta(c)
    for name, t in (("x", c.x), ("a", c.a), ("b", c.b), ("base", c.base)):
        far = torch.empty_strided(t.shape, (2**30, *t.stride()[1:]), dtype=t.dtype, device="cuda").copy_(t)
        d = build("plain", tokens=3, features=256, out=256, ids=[2, 0, 2], device="cuda")
        setattr(d, name, far)
        assert_equal(torch.ops.grouped_lora.delta(*d.factors, d.base), want, name)
        torch.ops.grouped_lora.delta_(d.base, *d.factors)
        assert_equal(d.base, want, f"{name}, in place")
        del far, d


@pytest.mark.gpu
@dtypes
def test_exact_at_real_sizes(kernels, dtype):
    for form, tokens, slots, rank, ranks in (
        ("wo_a", 1, 8, 16, True),
        ("wo_a", 64, 8, 64, True),
        ("wo_a", 300, 3, 64, True),
        ("plain", 600, 3, 512, True),
        ("wo_a", 2000, 8, 16, False),
        ("wo_a", 4000, 1, 64, True),
        ("slices", 2000, 1, 128, True),
        ("shared input", 8192, 2, 24, True),
    )[:: 1 if dtype == torch.bfloat16 else 3]:
        c = build(
            form, dtype, tokens=tokens, slots=slots, groups=4, features=4096, out=1024, rank=rank, ranks=ranks,
            sizes=[2048, 256, 256], device="cuda",
        )  # fmt: skip
        check(kernels, c, f"{form} {tokens} {slots} {rank}", base=dtype != torch.bfloat16)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("rank", [16, 64])
def test_a_rows_bits_are_its_own(dtype, rank):
    """Alone, in T = 7 … 6000, from a plan or not, fused or split, in another order: the same bits."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    tokens, groups = 6000, 4
    x = torch.randn(tokens, groups, 4096, generator=generator, device="cuda").to(dtype)
    base = torch.randn(tokens, groups, 1000, generator=generator, device="cuda").to(dtype)
    delta = torch.ops.grouped_lora.delta
    for slots in (1, 5):
        a = torch.randn(slots, rank, 4096, generator=generator, device="cuda").to(dtype)
        b = torch.randn(slots, groups, 1000, rank, generator=generator, device="cuda").to(dtype)
        ids = torch.arange(tokens, device="cuda") % (slots + 1) - 1
        scalings = torch.tensor([0.3, 1.0, 1.7, -2.1, 0.7], device="cuda")[:slots]
        ranks = torch.tensor([rank, rank, rank // 2, 3, rank], dtype=torch.int32, device="cuda")[:slots]
        batch = delta(x, a, b, ids, scalings, base, None, ranks)
        plan = torch.ops.grouped_lora.plan(ids, slots)
        assert_bits(delta(x, a, b, ids, scalings, base, None, ranks, plan), batch, "with a plan")
        for rows in (slice(1, 2), slice(299, 300), slice(0, 7), slice(0, 64), slice(0, 300), slice(1, 700), slice(0, 2500)):
            got = delta(x[rows], a, b, ids[rows], scalings, base[rows], None, ranks)
            assert_bits(got, batch[rows], f"L {slots}, rows {rows}")
        order = torch.randperm(tokens, generator=generator, device="cuda")
        got = delta(x[order], a, b, ids[order], scalings, base[order], None, ranks)
        assert_bits(got, batch[order], "in another order")
        others = torch.where(torch.arange(tokens, device="cuda") % 7 == 0, ids, -1)
        got = delta(x, a, b, others, scalings, base, None, ranks)
        assert_bits(got[::7], batch[::7], "with other neighbours")
        out = base.clone()
        torch.ops.grouped_lora.delta_(out, x, a, b, ids, scalings, None, ranks)
        assert_bits(out, batch, "in place")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [8, 300, 3000])
def test_a_wide_buffer_gives_the_bits_of_a_narrow_one(dtype, tokens):
    """An adapter's rows do not tell how wide the other adapters are."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, base = (torch.randn(tokens, n, generator=generator, device="cuda").to(dtype) for n in (2048, 1000))
    ranks = [128, 16, 60, 8, 100]
    a, b = (torch.randn(5, *s, generator=generator, device="cuda").to(dtype) for s in ((256, 2048), (1000, 256)))
    scalings = torch.rand(5, generator=generator, device="cuda")
    ids = torch.randint(-1, 5, (tokens,), generator=generator, device="cuda")
    for wide in (256, 136, 128):
        all_ranks = torch.tensor(ranks, device="cuda", dtype=torch.int32)
        y = torch.ops.grouped_lora.delta(x, a[:, :wide].contiguous(), b[..., :wide].contiguous(), ids, scalings, base, None, all_ranks)
        for slot, rank in enumerate(ranks):
            mine = (ids == slot).nonzero()[:, 0]
            own = [t.contiguous() for t in (a[slot : slot + 1, :rank], b[slot : slot + 1, :, :rank])]
            alone = torch.ops.grouped_lora.delta(x[mine], *own, torch.zeros_like(mine), scalings[slot : slot + 1], base[mine])
            assert_bits(y[mine], alone, f"{wide} {rank}")
        none = (ids == -1).nonzero()[:, 0]
        assert_bits(y[none], base[none])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_groups_shrunk_as_one_keep_their_bits(dtype):
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(6000, 2048, generator=generator, device="cuda").to(dtype)
    a = torch.randn(8, 3, 16, 2048, generator=generator, device="cuda").to(dtype)
    b = torch.randn(8, 1536, 16, generator=generator, device="cuda").to(dtype)
    ids, scalings = torch.randint(-1, 8, (6000,), generator=generator, device="cuda"), torch.rand(8, generator=generator, device="cuda")
    p = launch.Problem("sm_90", 132, 2, 6000, 3, 2048, 1024, 16, 8, stacked=True)
    assert launch.delta(p).merged
    whole = torch.ops.grouped_lora.delta(x, a, b, ids, scalings, None, [1024, 256, 256])
    for rows in (slice(0, 8), slice(100, 500)):
        assert_bits(torch.ops.grouped_lora.delta(x[rows], a, b, ids[rows], scalings, None, [1024, 256, 256]), whole[rows])


@pytest.mark.gpu
@dtypes
def test_every_choice_gives_the_same_bits(dtype, monkeypatch):
    """All tiles, fused or two launches with D cut or whole: bits depend on D and r alone."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(300, 2, 4096, generator=generator, device="cuda").to(dtype)
    a, b = (torch.randn(3, *s, generator=generator, device="cuda").to(dtype) for s in ((48, 4096), (2, 500, 48)))
    ids, scalings = torch.arange(300, device="cuda") % 4 - 1, torch.tensor([0.3, 1.0, 1.7], device="cuda")
    first = torch.ops.grouped_lora.delta(x, a, b, ids, scalings)
    choose = {
        "fused 16": lambda p: launch.DeltaConfig(launch.fused(p, 16), None, None),
        "fused 32": lambda p: launch.DeltaConfig(launch.fused(p, 32), None, None),
        "split": lambda p: launch.DeltaConfig(None, launch.shrink(p, True), launch.expand(p)),
        "whole": lambda p: launch.DeltaConfig(None, launch.shrink(p), launch.expand(p)),
    }
    for name, choice in choose.items():
        monkeypatch.setattr(launch, "delta", choice)
        assert_bits(torch.ops.grouped_lora.delta(x, a, b, ids, scalings), first, name)
