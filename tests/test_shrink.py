"""`shrink`: our kernel against the reference, exactly, and against float64."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, RANKS, UNSORTED, assert_bits, assert_equal, build, place, want_shrink

from grouped_lora_ops import launch, reference

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
# shrink sees x and A alone: the forms that differ in these
forms = pytest.mark.parametrize("form", ["plain", "wo_a", "wo_a with an A per group", "shared input"])


def check(kernels, c, what=""):
    got = kernels.shrink(c.x, c.a, c.ids, ranks=c.ranks)
    assert_equal(got, want_shrink(c), f"kernel {what}")
    assert_equal(reference.shrink(c.x, c.a, c.ids, ranks=c.ranks), want_shrink(c), f"reference {what}")
    return got


@forms
@dtypes
@pytest.mark.parametrize("ranks", [False, True], ids=["full", "ranks"])
def test_exact(kernels, form, dtype, ranks):
    check(kernels, build(form, dtype, ranks=ranks, device=kernels.device))


def test_the_cases_catch_a_rounded_h():
    for dtype in (torch.bfloat16, torch.float16):
        h = want_shrink(build("wo_a", dtype, ids=[0, 1, 2, 0, 1, 2, 0]))
        assert (h.to(dtype).float() != h).float().mean() > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["", "plan", "tall", "plan tall"])
@pytest.mark.parametrize("slots", [1, 3])
def test_modes(kernels, force, how, slots):
    force(how)
    check(kernels, build("wo_a", torch.bfloat16, tokens=40, slots=slots, ranks=True, device=kernels.device))


@dtypes
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(kernels, dtype, rank):
    if dtype != torch.bfloat16 and rank not in (1, 7, 16, 200):
        pytest.skip("bf16 walks through all ranks")
    check(kernels, build("plain", dtype, rank=rank, features=288, ranks=[rank, rank // 2, 0], device=kernels.device))


@pytest.mark.parametrize("features", [1, 15, 127, 129, 256, 257, 1000, 2100])
def test_every_width(kernels, features):
    check(kernels, build("plain", torch.bfloat16, features=features, device=kernels.device))


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 64, 65, 300])
def test_every_count(kernels, tokens):
    check(kernels, build("wo_a", torch.bfloat16, tokens=tokens, features=140, device=kernels.device))


@pytest.mark.parametrize("layout", ["slice", "odd", "rows", "transposed", "scattered"])
@pytest.mark.parametrize("features", [300, 320])
def test_layouts(kernels, layout, features):
    for dtype in (torch.bfloat16, torch.float32):
        c = build("wo_a", dtype, rank=6, features=features, ranks=[6, 3, 5], layout=layout, device=kernels.device)
        check(kernels, c, f"{layout} x and A")
    for one in ("x", "a"):
        c = build("wo_a", rank=8, features=features, ranks=[8, 3, 5], layout={one: layout}, device=kernels.device)
        check(kernels, c, f"{layout} {one}")


@pytest.mark.parametrize("ids", UNSORTED, ids=str)
def test_unsorted_ids(kernels, force, ids):
    slots = max(ids) + 2
    for how in ("", "plan"):
        force(how)
        check(kernels, build("plain", tokens=len(ids), slots=slots, ids=ids, ranks=True, device=kernels.device))


@pytest.mark.thorough
def test_ids_of_either_dtype_and_any_stride(kernels, force):
    want = None
    for how in ("", "plan"):
        force(how)
        for id_dtype in (torch.int32, torch.int64):
            for layout in ("dense", "rows"):
                c = build("plain", id_dtype=id_dtype, layout={"ids": layout}, device=kernels.device)
                got = check(kernels, c, f"{id_dtype} {layout}")
                want = got if want is None else want
                assert_bits(got, want)


def test_single_slot_with_strided_ids(kernels):
    check(kernels, build("plain", slots=1, id_dtype=torch.int64, layout={"ids": "rows"}, device=kernels.device))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("how", ["", "plan"])
def test_rows_without_an_adapter_are_zero_whatever_x_holds(kernels, force, slots, how):
    force(how)
    c = build("wo_a", slots=slots, tokens=5, ids=[-1] * 5, ranks=True, device=kernels.device)
    assert c.x.isnan().all()
    assert_bits(kernels.shrink(c.x, c.a, c.ids, ranks=c.ranks), torch.zeros(5, 2, 5, device=kernels.device))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("how", ["", "plan"])
def test_ids_out_of_range_count_as_none(kernels, force, slots, how):
    force(how)
    ids = [0, slots, -2, 2**31 - 1, -(2**31), 0, 10**6]
    c = build("plain", slots=slots, ids=ids, device=kernels.device)
    check(kernels, c)
    c.ids = torch.tensor([0, 2**32, -(2**32), 2**32 + 1, 2**63 - 1, 0, -1], device=kernels.device)
    check(kernels, c, "int64 ids whose low half is a slot")


def test_ranks_out_of_range_are_held_within_the_factors(kernels):
    c = build("plain", ids=[0, 1, 2, 0, 1, 2, 0], device=kernels.device)
    ranks = torch.tensor([-3, 5, 2**31 - 1], dtype=torch.int32, device=kernels.device)
    within = ranks.clamp(0, 5)
    got = kernels.shrink(c.x, c.a, c.ids, ranks=ranks)
    assert_equal(got, reference.shrink(c.x, c.a, c.ids, ranks=within))


@pytest.mark.parametrize("slots", [100, 1024])
def test_many_slots(kernels, slots):
    ids = [0, slots - 1, slots // 2, -1, 0, 7, slots - 1]
    check(kernels, build("plain", slots=slots, ids=ids, features=40, device=kernels.device))


@pytest.mark.parametrize("sizes", [dict(rank=0), dict(features=0), dict(slots=0, ids=[-1] * 7), dict(groups=0)], ids=str)
def test_empty_sizes(kernels, sizes):
    c = build("wo_a", device=kernels.device, poison=False, **sizes)
    want = reference.shrink(c.x, c.a, c.ids)
    assert_bits(kernels.shrink(c.x, c.a, c.ids), want)
    assert_bits(torch.ops.grouped_lora.shrink(c.x, c.a, c.ids), want)


def test_strided_ranks(kernels):
    c = build("plain", ranks=True, device=kernels.device)
    c.ranks = torch.stack([c.ranks, c.ranks.new_full((3,), 99)], 1)[:, 0]
    assert c.ranks.stride(0) == 2
    check(kernels, c)


@pytest.mark.parametrize("how", ["", "plan"])
def test_a_second_run_has_the_same_bits(kernels, force, how):
    force(how)
    generator = torch.Generator().manual_seed(0)
    x, a = torch.randn(40, 520, generator=generator), torch.randn(3, 12, 520, generator=generator)
    ids = torch.arange(40, device=kernels.device) % 4 - 1
    for dtype in (torch.bfloat16, torch.float32):
        xs, as_ = x.to(kernels.device, dtype), a.to(kernels.device, dtype)
        first = kernels.shrink(xs, as_, ids)
        assert_bits(kernels.shrink(xs, as_, ids), first)
        if how == "plan":
            assert_bits(kernels.shrink(xs, as_, ids, plan=kernels.plan(ids, 3)), first, "with a plan")


@dtypes
def test_close_to_float64(kernels, dtype):
    generator = torch.Generator().manual_seed(1)
    x, a = torch.randn(9, 2, 900, generator=generator), torch.randn(2, 24, 900, generator=generator)
    x, a = x.to(kernels.device, dtype), a.to(kernels.device, dtype)
    ids = torch.arange(9, device=kernels.device) % 2
    want = reference.shrink(x.double(), a.double(), ids)
    torch_error = (reference.shrink(x, a, ids) - want).abs().max()
    error = (kernels.shrink(x, a, ids) - want).abs().max()
    assert error <= 4 * torch_error


def test_chunk_sums_cancel_as_in_float32(kernels):
    """Terms that cancel: large ones in the first chunks, small ones that only float32 sums keep."""
    x = torch.ones(1, 1024, dtype=torch.bfloat16)
    a = torch.zeros(1, 1, 1024, dtype=torch.bfloat16)
    a[..., 0], a[..., 1], a[..., 300] = 4096.0, 1.0, -4096.0
    got = kernels.shrink(x.to(kernels.device), a.to(kernels.device), torch.zeros(1, dtype=torch.int32, device=kernels.device))
    assert got.tolist() == [[1.0]]


def test_nothing_past_the_rank_is_read(kernels):
    """A's rows past a slot's rank, and its guard rows, are NaN; a transposed A keeps them in one vector."""
    for layout in ("dense", "transposed"):
        for rank in (1, 3, 4, 7):
            c = build("plain", rank=8, ranks=[rank] * 3, layout={"a": layout}, device=kernels.device)
            assert c.a.isnan().any()
            check(kernels, c, f"rank {rank}, {layout}")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["", "plan"])
def test_rows_beyond_2_to_the_31_elements(force, how):
    """x's row 2 begins 2³¹ elements in, and so does adapter slot 2."""
    force(how)
    x = torch.empty_strided((3, 256), (2**30, 1), dtype=torch.bfloat16, device="cuda")
    c = build("plain", tokens=3, features=256, ids=[2, 0, 2], device="cuda")
    x.copy_(c.x)
    assert_equal(torch.ops.grouped_lora.shrink(x, c.a, c.ids), want_shrink(c))
    del x
    a = torch.empty_strided((3, 5, 256), (2**30, 256, 1), dtype=torch.bfloat16, device="cuda")
    a.copy_(c.a)
    assert_equal(torch.ops.grouped_lora.shrink(c.x, a, c.ids), want_shrink(c))


@pytest.mark.gpu
@dtypes
def test_exact_at_real_sizes(dtype):
    for tokens, slots, rank in ((64, 8, 64), (600, 3, 512), (2000, 8, 16), (2000, 1, 128)):
        c = build("wo_a", dtype, tokens=tokens, slots=slots, groups=8, features=4096, rank=rank, ranks=True, device="cuda")
        assert_equal(torch.ops.grouped_lora.shrink(c.x, c.a, c.ids, ranks=c.ranks), want_shrink(c))


@pytest.mark.gpu
@dtypes
def test_batch_invariance_at_real_sizes(dtype):
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(2000, 4, 7168, generator=generator, device="cuda").to(dtype)
    a = torch.randn(4, 64, 7168, generator=generator, device="cuda").to(dtype)
    ids = torch.arange(2000, device="cuda") % 5 - 1
    plan = torch.ops.grouped_lora.plan(ids, 4)
    batch = torch.ops.grouped_lora.shrink(x, a, ids)
    assert_bits(torch.ops.grouped_lora.shrink(x, a, ids, None, plan), batch, "with a plan")
    for tokens in (1, 7, 300, 700):
        assert_bits(torch.ops.grouped_lora.shrink(x[:tokens], a, ids[:tokens]), batch[:tokens], f"T = {tokens}")
    for t in (3, 299, 1999):
        one = slice(t, t + 1)
        for _ in range(20):
            assert_bits(torch.ops.grouped_lora.shrink(x[one], a, ids[one]), batch[one], f"row {t} alone")


def test_launch_constants_are_those_of_the_kernels(kernels):
    from grouped_lora_ops.kernels import tile

    assert (launch.SINGLE, launch.SCAN, launch.PLAN) == (tile.SINGLE.value, tile.SCAN.value, tile.PLAN.value)
    odd = place(torch.zeros(3, 5), "odd")
    assert odd.data_ptr() % 16 and odd.stride(0) % 2
