"""Sizes of zero and one, wild ids and wild plans: the kernels equal the reference and stay inside their tensors."""

from __future__ import annotations

import pytest
import torch

import grouped_lora_ops as gl


def integers(kernels, *size):
    return torch.randint(-2, 3, size).float().to(kernels.device)


SIZES = [  # T, G, D, N, r, L
    (0, 2, 8, 8, 2, 3),
    (5, 0, 8, 8, 2, 3),
    (5, 2, 0, 8, 2, 3),
    (5, 2, 8, 0, 2, 3),
    (5, 2, 8, 8, 0, 3),
    (5, 2, 8, 8, 2, 0),
    (5, 2, 8, 8, 2, 1),
    (1, 1, 1, 1, 1, 1),
    (3, 2, 8, 8, 2, 300),
    (130, 1, 8, 8, 2, 70),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_of_zero_and_one(kernels, size):
    T, G, D, N, r, L = size
    torch.manual_seed(0)
    ids = (torch.randint(-1, L, (T,)) if L else torch.full((T,), -1)).to(kernels.device)
    x, a, b, base = (integers(kernels, *s) for s in ((T, G, D), (L, r, D), (L, G, N, r), (T, G, N)))
    scalings = torch.ones(L, device=kernels.device)
    for given in (base, None):
        got = kernels.delta(x, a, b, ids, scalings, given, None, None, None)
        assert torch.equal(got, gl.reference.delta(x, a, b, ids, scalings, base=given))
    needs = [True, True, True]
    got = kernels.delta_backward(base, x, a, b, ids, scalings, None, None, None, needs)
    want = gl.reference.delta_backward(base, x, a, b, ids, scalings, None, None, None, needs)
    assert all(torch.equal(u, v) for u, v in zip(got, want))


@pytest.mark.parametrize("tokens, slots, out", [(0, 3, 8), (5, 3, 0), (5, 0, 8), (0, 0, 0)])
def test_groups_that_share_h_without_tokens_slots_or_features(kernels, tokens, slots, out):
    ids = torch.full((tokens,), min(slots, 1) - 1, device=kernels.device)
    x, a, b = integers(kernels, tokens, 8), integers(kernels, slots, 2, 8), integers(kernels, slots, 2, out, 2)
    weight, bias, grad_y = integers(kernels, 2, out, 8), integers(kernels, 2, out), integers(kernels, tokens, 2, out)
    h, scalings = integers(kernels, tokens, 2), torch.ones(slots, device=kernels.device)
    rest = (ids, scalings, None, None, None)
    calls = {
        "expand_backward": (grad_y, h, b, *rest, [True] * 2),
        "delta_backward": (grad_y, x, a, b, *rest, [True] * 3),
        "linear_backward": (grad_y, x, weight, a, b, ids, scalings, bias, None, None, None, [True] * 5),
    }
    for name, args in calls.items():
        for got, want in zip(getattr(kernels, name)(*args), getattr(gl.reference, name)(*args)):
            assert got.dtype == want.dtype and torch.equal(got, want), name


def test_an_empty_slice(kernels):
    x, a, b = integers(kernels, 5, 8), integers(kernels, 3, 3, 2, 8), integers(kernels, 3, 12, 2)
    ids, scalings = torch.tensor([0, 1, -1, 2, 0], device=kernels.device), torch.ones(3, device=kernels.device)
    got = kernels.delta(x, a, b, ids, scalings, None, [4, 0, 8], None, None)
    assert torch.equal(got, gl.reference.delta(x, a, b, ids, scalings, out_sizes=[4, 0, 8]))


@pytest.mark.parametrize("tokens", [9, 150])
def test_ids_out_of_range_count_as_none(kernels, tokens):
    torch.manual_seed(0)
    x, a, b = integers(kernels, tokens, 8), integers(kernels, 3, 2, 8), integers(kernels, 3, 8, 2)
    scalings = torch.ones(3, device=kernels.device)
    ids = torch.randint(-5, 99, (tokens,), device=kernels.device) % torch.tensor(2**40) - 3
    ids[0], ids[1], ids[2] = 2**40, -(2**40), 1
    known = torch.where((ids >= 0) & (ids < 3), ids, -1)
    got = kernels.delta(x, a, b, ids, scalings, None, None, None, None)
    assert torch.equal(got, gl.reference.delta(x, a, b, known, scalings))


def test_a_plan_of_nonsense_reads_and_writes_nothing_outside(kernels):
    """Its result means nothing; the rows before and behind the output's keep their values."""
    x, a, b = integers(kernels, 150, 8), integers(kernels, 3, 2, 8), integers(kernels, 3, 8, 2)
    ids, scalings = torch.zeros(150, dtype=torch.int64, device=kernels.device), torch.ones(3, device=kernels.device)
    plan = torch.full((155,), 10**9, dtype=torch.int32, device=kernels.device)
    plan[100:140] = -(10**9)
    plan[-5:] = torch.tensor([-7, 500, 3, 10**8, -1], dtype=torch.int32)
    around = torch.full((170, 8), 7.0, device=kernels.device)
    kernels.delta_(around[10:160], x, a, b, ids, scalings, None, None, plan)
    assert torch.equal(around[:10], torch.full_like(around[:10], 7)) and torch.equal(around[160:], torch.full_like(around[160:], 7))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_scaling_that_no_row_uses_reaches_no_gradient(kernels, slots):
    """A slot that was never filled may hold NaN; with one slot its rows and those without an adapter share a tile."""
    h, b, grad_y = integers(kernels, 3, 4), integers(kernels, slots, 8, 4), integers(kernels, 3, 8)
    ids, scalings = torch.full((3,), -1, device=kernels.device), torch.full((slots,), float("nan"), device=kernels.device)
    for got in kernels.expand_backward(grad_y, h, b, ids, scalings, None, None, None, [True, True]):
        assert torch.equal(got, torch.zeros_like(got))
