"""The gradients of `shrink`, `expand` and `delta`: our kernels against the reference, exactly; wgrad above all."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, FORMS, assert_bits, assert_equal, build, place, rounded, want_grads, want_shrink

from grouped_lora_ops import reference

thorough = pytest.mark.thorough
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
ALL = [True, True, True]
SUBSETS = [[bool(i & 1), bool(i & 2), bool(i & 4)] for i in range(8)]


def check(kernels, c, what="", plan=None, needs=ALL):
    want = want_grads(c)
    args = (c.out_sizes, c.ranks, plan, needs)
    got = kernels.delta_backward(c.grad_y, *c.factors, *args)
    ours = reference.delta_backward(c.grad_y, *c.factors, *args)
    for name, need, g, r, w in zip(("dx", "dA", "dB"), needs, got, ours, want):
        if need:
            assert_equal(r, w, f"reference {name} {what}")
            assert_equal(g, w, f"kernel {name} {what}")
        else:
            assert r is None and g.numel() == 0, f"{name} {what}"


def check_parts(kernels, c, what=""):
    """shrink_backward and expand_backward."""
    w = c.wide()
    h = want_shrink(c)
    args = (c.ids, c.scalings, c.out_sizes, c.ranks, None, [True, True])
    exact = reference.expand_backward(w.grad_y, h.double(), w.b, *args)
    dh = rounded(exact[0], torch.float32)
    got = kernels.expand_backward(c.grad_y, h, c.b, *args)
    assert_equal(got[0], dh, f"dh {what}")
    assert_equal(got[1], rounded(exact[1], c.b.dtype), f"dB {what}")
    args = (c.ids, c.ranks, None, [True, True])
    exact = reference.shrink_backward(dh.double(), w.x, w.a, *args)
    for layout in ("dense", "transposed"):
        got = kernels.shrink_backward(place(dh, layout, dh.device), c.x, c.a, *args)
        assert_equal(got[0], rounded(exact[0], c.x.dtype), f"dx {what}")
        assert_equal(got[1], rounded(exact[1], c.a.dtype), f"dA {what}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=thorough)], ids=["bf16", "fp32", "fp16"]
)
def test_exact(kernels, form, dtype):
    check(kernels, build(form, dtype, features=140, ranks=True, device=kernels.device))


@pytest.mark.parametrize("form", ["plain", "wo_a", "shared input", "shared h", "slices"])
def test_shrink_and_expand_by_themselves(kernels, form):
    check_parts(kernels, build(form, features=140, ranks=True, device=kernels.device))


def test_without_ranks(kernels):
    for form in ("wo_a", "slices"):
        check(kernels, build(form, features=140, device=kernels.device), form)


@thorough
@pytest.mark.parametrize("how", ["plan", "tall", "plan tall"])
@pytest.mark.parametrize("slots", [1, 3])
def test_modes(kernels, force, how, slots):
    force(how)
    for form in ("wo_a", "slices"):
        check(kernels, build(form, tokens=40, slots=slots, features=140, ranks=True, device=kernels.device), form)


def test_rows_of_a_damaged_plan_are_not_read(kernels, force):
    """Its ends are right, so that every part has rows, and those lie far behind the last one."""
    force("plan")
    c = build("wo_a", tokens=9, features=72, device=kernels.device)
    plan = reference.plan(c.ids.cpu(), c.a.shape[0]).to(kernels.device)
    plan[:9] = 2**30
    got = kernels.delta_backward(c.grad_y, *c.factors, c.out_sizes, c.ranks, plan, [False, True, True])
    assert not got[1].any() and not got[2].any()


@thorough
def test_many_rows_make_many_parts(kernels):
    for slots in (1, 3):
        c = build("wo_a", tokens=300, slots=slots, features=40, out=24, ranks=True, device=kernels.device)
        check(kernels, c, f"L = {slots}")


@pytest.mark.parametrize("needs", SUBSETS, ids=str)
def test_only_what_is_asked_for(kernels, needs):
    check(kernels, build("wo_a", features=64, device=kernels.device), needs=needs)


@pytest.mark.parametrize("rank", [1, 3, 8, 33, 64, 130])
def test_every_rank(kernels, rank):
    c = build("plain", rank=rank, features=64, ranks=[rank, rank // 2, 0], ids=[0, 1, 2, 0, 1, -1, 0], device=kernels.device)
    check(kernels, c)


@pytest.mark.parametrize("counts", [[3, 0, 5, 0], [0, 0, 5, 0], [0, 2, 0, 3], [0, 0, 0, 0]], ids=str)
def test_empty_slots_get_exact_zeros(kernels, counts):
    ids = [slot for slot, count in enumerate(counts) for _ in range(count)] + [-1]
    for dtype in (torch.bfloat16, torch.float32):
        c = build("wo_a", dtype, tokens=len(ids), slots=4, ids=ids, features=40, device=kernels.device)
        check(kernels, c)
        _, da, db = kernels.delta_backward(c.grad_y, *c.factors, None, None, None, ALL)
        for slot, count in enumerate(counts):
            if not count:
                assert_bits(da[slot], torch.zeros_like(da[slot]))
                assert_bits(db[slot], torch.zeros_like(db[slot]))


@pytest.mark.parametrize("slots", [1, 3])
def test_no_rows_and_no_adapters(kernels, slots):
    for tokens in (0, 5):
        c = build("wo_a", tokens=tokens, slots=slots, ids=[-1] * tokens, features=40, device=kernels.device)
        grads = kernels.delta_backward(c.grad_y, *c.factors, None, None, None, ALL)
        for grad, t in zip(grads, (c.x, c.a, c.b)):
            assert_bits(grad, torch.zeros_like(t))


@pytest.mark.parametrize("layout", ["odd", "transposed", *(pytest.param(p, marks=thorough) for p in ("slice", "rows", "scattered"))])
def test_layouts(kernels, layout):
    for form in ("wo_a", "slices"):
        c = build(form, rank=8, features=72, out=72, ranks=[8, 3, 5], layout=layout, device=kernels.device)
        check(kernels, c, f"{layout} {form}")


def test_a_broadcast_gradient(kernels):
    """grad_y of a sum: every stride is 0."""
    c = build("wo_a", features=40, device=kernels.device)
    c.grad_y = torch.ones((), dtype=c.x.dtype, device=kernels.device).expand(c.base.shape)
    check(kernels, c)


def test_ids_out_of_range_count_as_none(kernels):
    for slots in (1, 3):
        ids = [0, slots, -2, 2**31 - 1, -(2**31), 0, 10**6]
        check(kernels, build("plain", slots=slots, ids=ids, features=64, device=kernels.device))


@pytest.mark.parametrize("sizes", [dict(rank=0), dict(features=0), dict(out=0), dict(slots=0, ids=[-1] * 7)], ids=str)
def test_empty_sizes(kernels, sizes):
    check(kernels, build("wo_a", device=kernels.device, poison=False, **sizes))


def test_a_second_run_has_the_same_bits(kernels):
    generator = torch.Generator().manual_seed(0)
    x, a = torch.randn(90, 2, 100, generator=generator), torch.randn(3, 12, 100, generator=generator)
    b, grad_y = torch.randn(3, 2, 72, 12, generator=generator), torch.randn(90, 2, 72, generator=generator)
    ids, scalings = torch.arange(90, device=kernels.device) % 4 - 1, torch.tensor([0.3, 1.0, -2.1], device=kernels.device)
    x, a, b, grad_y = (t.to(kernels.device, torch.bfloat16) for t in (x, a, b, grad_y))
    first = kernels.delta_backward(grad_y, x, a, b, ids, scalings, None, None, None, ALL)
    again = kernels.delta_backward(grad_y, x, a, b, ids, scalings, None, None, None, ALL)
    for one, other in zip(first, again):
        assert_bits(one, other)


@thorough
@dtypes
def test_close_to_float64(kernels, dtype):
    generator = torch.Generator().manual_seed(1)
    x, a = torch.randn(50, 2, 200, generator=generator), torch.randn(2, 24, 200, generator=generator)
    b, grad_y = torch.randn(2, 2, 90, 24, generator=generator), torch.randn(50, 2, 90, generator=generator)
    x, a, b, grad_y = (t.to(kernels.device, dtype) for t in (x, a, b, grad_y))
    ids, scalings = torch.arange(50, device=kernels.device) % 3 - 1, torch.tensor([0.3, 1.7], device=kernels.device)
    tail = (ids, scalings, None, None, None, ALL)
    exact = reference.delta_backward(*(t.double() for t in (grad_y, x, a, b)), *tail)
    torchs = reference.delta_backward(grad_y, x, a, b, *tail)
    ours = kernels.delta_backward(grad_y, x, a, b, *tail)
    for name, e, t, o in zip(("dx", "dA", "dB"), exact, torchs, ours):
        assert (o - e).abs().max() <= 3 * (t - e).abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_gradients_on_a_gpu_are_ours_and_the_references(form):
    """opcheck does not notice a missing backward: the grad_fn is our op's, and its gradients are exact."""
    for dtype in (torch.bfloat16, torch.float32):
        c = build(form, dtype, tokens=200, features=256, out=264, ranks=True, device="cuda")
        want = want_grads(c)
        x, a, b, base = (t.clone().requires_grad_() for t in (c.x, c.a, c.b, c.base))
        y = torch.ops.grouped_lora.delta(x, a, b, c.ids, c.scalings, base, c.out_sizes, c.ranks)
        assert "grouped_lora" in y.grad_fn.name() or "GeneratedBackward" in y.grad_fn.name(), y.grad_fn.name()
        y.backward(c.grad_y)
        for name, got, w in zip(("dx", "dA", "dB"), (x.grad, a.grad, b.grad), want):
            assert_equal(got, w, f"{form} {name}")
        assert_equal(base.grad, c.grad_y)


@pytest.mark.gpu
@dtypes
def test_exact_at_real_sizes(kernels, dtype):
    for form, tokens, slots, rank in (("wo_a", 2000, 8, 16), ("wo_a", 1000, 1, 64), ("slices", 700, 3, 200)):
        if dtype != torch.bfloat16 and tokens != 1000:
            continue
        tokens = 40 if dtype == torch.float16 else tokens  # sums of more than 100 leave the range in which fp16's h is exact
        c = build(
            form, dtype, tokens=tokens, slots=slots, groups=4, features=1024, out=512, rank=rank, ranks=True,
            sizes=[512, 128, 128], device="cuda",
        )  # fmt: skip
        check(kernels, c, f"{form} {tokens} {slots} {rank}")


@pytest.mark.gpu
def test_dx_of_a_row_is_its_own():
    generator = torch.Generator(device="cuda").manual_seed(0)
    tokens, slots, rank = 3000, 5, 64
    x, grad_y = (torch.randn(tokens, 4, n, generator=generator, device="cuda").bfloat16() for n in (4096, 1000))
    a = torch.randn(slots, rank, 4096, generator=generator, device="cuda").bfloat16()
    b = torch.randn(slots, 4, 1000, rank, generator=generator, device="cuda").bfloat16()
    ids, scalings = torch.arange(tokens, device="cuda") % (slots + 1) - 1, torch.rand(slots, generator=generator, device="cuda")

    def dx(rows):
        tail = (a, b, ids[rows], scalings, None, None, None, [True, False, False])
        return torch.ops.grouped_lora.delta_backward(grad_y[rows], x[rows], *tail)[0]

    batch = dx(slice(None))
    for rows in (slice(1, 2), slice(299, 300), slice(0, 7), slice(0, 300), slice(1, 700)):
        assert_bits(dx(rows), batch[rows], str(rows))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    c = build("plain", tokens=3, features=64, out=72, ids=[2, 0, 2], device="cuda")
    want = want_grads(c)
    for name in ("x", "grad_y", "a", "b"):
        t = getattr(c, name)
        far = torch.empty_strided(t.shape, (2**30, *t.stride()[1:]), dtype=t.dtype, device="cuda").copy_(t)
        setattr(c, name, far)
        got = torch.ops.grouped_lora.delta_backward(c.grad_y, *c.factors, None, None, None, ALL)
        for grad, w in zip(got, want):
            assert_equal(grad, w, name)
        setattr(c, name, t)
        del far
