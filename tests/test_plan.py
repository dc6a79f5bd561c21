"""`plan`, its readable view and its refill."""

from __future__ import annotations

import pytest
import torch
from cases import UNSORTED, assert_equal

import grouped_lora_ops as glo
from grouped_lora_ops import launch, reference


def want(ids, slots):
    """The definition, in Python."""
    bucket = [i if 0 <= i < slots else slots for i in ids]
    rows = sorted(range(len(ids)), key=lambda t: bucket[t])
    starts = [sum(b < slot for b in bucket) for slot in range(slots + 1)]
    return torch.tensor([*rows, *starts, len(ids)], dtype=torch.int32)


def check(kernels, ids, slots, dtype=torch.int32):
    ids_t = torch.tensor(ids, dtype=dtype, device=kernels.device)
    got = kernels.plan(ids_t, slots)
    assert_equal(got.cpu(), want(ids, slots))
    assert_equal(reference.plan(ids_t, slots), got)
    return got


@pytest.mark.parametrize("ids", UNSORTED, ids=str)
def test_unsorted(kernels, ids):
    for slots in (max(ids) + 1, max(ids) + 3):
        check(kernels, ids, slots)


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [1, 2, 8, 15, 16, 64, 255, 1024])
@pytest.mark.parametrize("tokens", [0, 1, 7, 256, 300])
def test_random(kernels, slots, tokens):
    generator = torch.Generator().manual_seed(slots + tokens)
    ids = torch.randint(-1, slots, (tokens,), generator=generator).tolist()
    check(kernels, ids, slots, torch.int64 if tokens == 7 else torch.int32)


@pytest.mark.parametrize("ids", [[-1] * 9, [2] * 9, [0] * 9, [2, -1] * 5, [0, 0, 2, 2, -1]], ids=str)
def test_extremes(kernels, ids):
    check(kernels, ids, 3)


def test_several_programs_and_steps(kernels):
    generator = torch.Generator().manual_seed(0)
    for tokens in (2000, 16385 + 700):
        assert launch.plan(tokens, 5).programs > 1
        check(kernels, torch.randint(-1, 5, (tokens,), generator=generator).tolist(), 5)
    assert launch.plan(16385 + 700, 5).steps > 1


def test_ids_out_of_range_count_as_none(kernels):
    check(kernels, [0, 3, -2, 2**31 - 1, -(2**31), 2, 1], 3)
    check(kernels, [0, 2**32, -(2**32), 2**32 + 1, 2**63 - 1, 2, -1], 3, torch.int64)


def test_strided_ids(kernels):
    ids = torch.tensor([2, 99, 99, 0, 99, 99, -1, 99, 99, 2], dtype=torch.int64, device=kernels.device)[::3]
    assert_equal(kernels.plan(ids, 3).cpu(), want([2, 0, -1, 2], 3))


def test_no_slots(kernels):
    check(kernels, [-1, -1], 0)


def test_the_documented_example():
    ids = torch.tensor([1, -1, 0, 1])
    plan = glo.plan(ids, 2)
    assert plan.tolist() == [2, 0, 3, 1, 0, 1, 3, 4]
    view = glo.plan_view(plan, 2)
    assert view.rows.tolist() == [2, 0, 3, 1] and view.starts.tolist() == [0, 1, 3, 4]
    assert view.rows.data_ptr() == plan.data_ptr()
    assert [view.of_slot(slot).tolist() for slot in range(3)] == [[2], [0, 3], [1]]


def test_refill_keeps_the_tensor():
    plan = glo.plan(torch.tensor([1, -1, 0, 1]), 2)
    address, version = plan.data_ptr(), plan._version
    glo.refill(plan, torch.tensor([-1, 1, 1, 0]), 2)
    assert plan.data_ptr() == address and plan._version > version
    assert plan.tolist() == glo.plan(torch.tensor([-1, 1, 1, 0]), 2).tolist()


def test_a_view_of_something_else_is_refused():
    sentence = r"^grouped_lora\.plan: plan must be int32 \[T \+ 4\]; got "
    for plan, was in (
        (torch.zeros(8), r"float32 \[8\]\.$"),
        (torch.zeros(3, dtype=torch.int32), r"int32 \[3\]\.$"),
        (torch.zeros(2, 4, dtype=torch.int32), r"int32 \[2, 4\]\.$"),
    ):
        with pytest.raises(ValueError, match=sentence + was):
            glo.plan_view(plan, 2)


def test_out_of_range_ids_raise_on_the_cpu():
    for bad in (2, -2):
        with pytest.raises(ValueError, match=rf"^grouped_lora\.plan: adapter_ids must be -1 .*0 … 1; got {bad}\.$"):
            glo.plan(torch.tensor([0, bad]), 2)


@pytest.mark.gpu
def test_hundreds_of_thousands_of_rows():
    generator = torch.Generator(device="cuda").manual_seed(0)
    for tokens, slots in ((300_000, 8), (300_001, 1024), (20_000, 64)):
        ids = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        plan = torch.ops.grouped_lora.plan(ids, slots)
        assert_equal(plan, reference.plan(ids, slots))
