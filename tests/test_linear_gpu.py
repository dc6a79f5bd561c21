"""`linear` on a GPU: exact at real sizes, a row's bits, zero adapters, cuBLAS's error, graphs, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import DTYPES, assert_bits
from linear_cases import (
    SCALED_WAYS,
    WAYS,
    call,
    case,
    check,
    check_scaled,
    in_bf16,
    random_case,
    random_scaled,
    scaled_case,
    spread,
)

from grouped_lora_ops import launch, launch_linear, reference
from grouped_lora_ops.launch_linear import ROWS, SORTED, linear_with, scaled_with
from grouped_lora_ops.ops import common, linear_cuda, prepared

pytestmark = pytest.mark.gpu
TAIL = (None, None, None, None, [True, False, False, False, False])  # no bias, sizes, ranks, plan; the gradient of x
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@dtypes
def test_exact_at_real_sizes(kernels, dtype):
    for form, tokens, slots, rank, ranks in (
        ("wo_a", 1, 8, 16, True),
        ("wo_a", 8, 8, 64, True),
        ("plain", 64, 64, 64, True),
        ("wo_a", 64, 1, 16, False),
        ("wo_a", 100, 3, 64, True),
        ("slices", 1024, 8, 16, True),
        ("plain", 1000, 3, 200, True),
        ("wo_a", 4000, 1, 64, True),
        ("shared input", 4000, 4, 64, False),
        ("wo_a", 8192, 8, 64, True),
    ):
        c, weight, bias = case(
            form, dtype, tokens=tokens, slots=slots, groups=4, features=1024, out=512, rank=rank, ranks=ranks,
            sizes=[512, 128, 128], device="cuda",
        )  # fmt: skip
        check(kernels, c, weight, bias, f"{form} {tokens} {slots} {rank}")


@dtypes
@pytest.mark.parametrize("rank", [16, 64, 200])
@pytest.mark.parametrize("slots", [1, 5])
def test_a_rows_bits_are_its_own(dtype, rank, slots):
    """Alone, in T = 7 … 5000, from a plan, in another order, beside others: the same bits, of y and of dx."""
    linear = torch.ops.grouped_lora.linear
    x, weight, a, b, ids, scalings, bias = random_case("cuda", dtype, 5000, slots, 4, 2048, 512, rank)
    ranks = torch.tensor([rank, rank, rank // 2, 3, rank], dtype=torch.int32, device="cuda")[:slots]
    grad = torch.randn_like(x[..., :512])

    def run(rows, ids, plan=None):
        leaf = x[rows].requires_grad_()
        y = linear(leaf, weight, a, b, ids, scalings, bias, None, ranks, plan)
        return y.detach(), torch.autograd.grad(y, leaf, grad[rows])[0]

    batch = run(slice(None), ids)
    plan = torch.ops.grouped_lora.plan(ids, slots)
    order = torch.randperm(5000, device="cuda")
    others = torch.where(torch.arange(5000, device="cuda") % 7 == 0, ids, -1)
    parts = [slice(1, 2), slice(299, 300), slice(0, 7), slice(0, 20), slice(0, 64), slice(0, 65), slice(9, 300), slice(1, 1025)]
    for got, want in zip(run(slice(None), ids, plan), batch):
        assert_bits(got, want, "with a plan")
    for rows in [*parts, order]:
        for got, want in zip(run(rows, ids[rows]), batch):
            assert_bits(got, want[rows], f"rows {rows}")
    for got, want in zip(run(slice(None), others), batch):
        assert_bits(got[::7], want[::7], "with other neighbours")
    parent = linear(x, weight, a[:, :0], b[..., :0], ids, scalings, bias)
    assert_bits(batch[0][ids < 0], parent[ids < 0], "without an adapter")
    for rows in (slice(0, 5), slice(0, 64), slice(0, 200), slice(None)):
        zero = linear(x[rows], weight, a, b * 0, ids[rows], scalings, bias, None, ranks)
        assert_bits(zero, parent[rows], f"zero adapters, rows {rows}")


@dtypes
def test_every_choice_gives_the_same_bits(dtype, monkeypatch):
    x, weight, a, b, ids, scalings, bias = random_case("cuda", dtype, 300, 3, 2, 1000, 500, 48)
    want = torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings, bias)
    choices = {
        **WAYS,
        "tall": lambda p: linear_with(p, launch.PLAN, 128, block_n=128, num_warps=8, num_stages=3),
        "tall rows": lambda p: linear_with(p, ROWS, 128, block_n=64, block_k=128, num_warps=8, num_stages=2),
        "tall sorted": lambda p: linear_with(p, SORTED, 128, block_n=128, num_warps=8),
        "stream": lambda p: linear_with(p, ROWS, 16, block_n=32, block_k=256, num_stages=5, prefetch=True),
    }
    for name, choose in choices.items():
        monkeypatch.setattr(launch_linear, "linear", lambda p, *_, choose=choose: choose(p))
        common.configured.cache_clear()
        prepared.forget()
        assert_bits(torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings, bias), want, name)


@dtypes
@pytest.mark.parametrize("tokens", [8, 64, 1000])
def test_no_further_from_float64_than_cublas(dtype, tokens):
    x, weight, a, b, ids, scalings, _ = random_case("cuda", dtype, tokens, 3, 2, 4096, 512, 16)
    exact = reference.linear(*[t.double() for t in (x, weight, a, b)], ids, scalings)
    base = torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
    both = torch.ops.grouped_lora.delta(x, a, b, ids, scalings, base)
    got = torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings)
    error, other = ((t.double() - exact).abs() for t in (got, both))
    # 12,288 numbers: the mean of two equally good sums differs by 1 % by chance
    assert error.mean() <= 1.02 * other.mean() and error.max() <= 1.1 * other.max()


@pytest.mark.parametrize("tokens", [1, 8, 64, 100, 300, 2000])
def test_replays_follow_ids_weights_and_scalings(tokens):
    x, weight, a, b, ids, scalings, bias = random_case("cuda", torch.bfloat16, tokens, 6, 4, 1024, 256, 16)
    ranks = torch.tensor([16, 3, 8, 16, 1, 12], dtype=torch.int32, device="cuda")

    def step():
        return torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings, bias, None, ranks)

    mixed = ids.clone()
    ids.zero_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for other in (mixed, mixed.flip(0), torch.full_like(mixed, -1), torch.full_like(mixed, 5)):
        ids.copy_(other)
        a.mul_(1.25)
        b.neg_()
        scalings.add_(0.125)
        ranks.copy_(ranks.roll(1))
        for _ in range(20):
            graph.replay()
        assert_bits(y.clone(), step())


def test_a_first_call_inside_a_capture_names_its_op():
    c, weight, _ = case("plain", tokens=9, features=456, out=104, rank=6, device="cuda", poison=False)
    with pytest.raises(RuntimeError, match=r"^grouped_lora\.linear: .*warmup"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call((c.x, weight, c.a, c.b, None), c)
    torch.cuda.synchronize()
    want = call((c.x, weight, c.a, c.b, None), c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call((c.x, weight, c.a, c.b, None), c)
    graph.replay()
    assert_bits(y, want)


@dtypes
def test_gradients_are_ours(dtype):
    x, weight, a, b, ids, scalings, bias = random_case("cuda", dtype, 300, 3, 2, 512, 256, 16)
    leaves = [t.requires_grad_() for t in (x, weight, a, b, bias)]
    y = torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings, bias)
    assert "grouped_lora" in type(y.grad_fn).__name__ or "Generated" in type(y.grad_fn).__name__
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, grad)
    args = [t.detach().double() for t in (grad, x, weight, a, b)]
    want = reference.linear_backward(*args, ids, scalings, bias.detach().double(), None, None, None, [True] * 5)
    for mine, exact in zip(got, want):
        assert mine.dtype == dtype and (mine.double() - exact).norm() <= 4e-3 * exact.norm()


def test_rows_beyond_2_to_the_31_elements():
    """The last row of x, of W and of grad_y, and slot 2 of A and B, begin 2³¹ elements in."""
    c, weight, bias = case("plain", tokens=3, features=256, out=256, ids=[2, 0, 2], device="cuda")
    want = torch.ops.grouped_lora.linear(c.x, weight, c.a, c.b, c.ids, c.scalings, bias)
    dx = torch.ops.grouped_lora.linear_backward(c.grad_y, c.x, weight, c.a, c.b, c.ids, c.scalings, *TAIL)[0]
    for which in range(5):
        operands = [c.x, weight, c.a, c.b, c.grad_y]
        near = operands[which]
        step = -(-(2**31) // (len(near) - 1)) // 16 * 16 + 16
        operands[which] = torch.empty_strided(near.shape, (step, *near.stride()[1:]), dtype=near.dtype, device="cuda").copy_(near)
        x, w, a, b, grad_y = operands
        assert_bits(torch.ops.grouped_lora.linear(x, w, a, b, c.ids, c.scalings, bias), want, str(which))
        assert_bits(torch.ops.grouped_lora.linear_backward(grad_y, x, w, a, b, c.ids, c.scalings, *TAIL)[0], dx, str(which))
        del operands, x, w, a, b, grad_y


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one():
    args = random_case("cuda:1", tokens=300)
    here = [t.to("cuda:0") for t in args]
    linear = torch.ops.grouped_lora.linear
    for _ in range(2):
        assert_bits(linear(*args).cpu(), linear(*here).cpu())


def test_it_never_waits_for_the_device():
    for tokens in (8, 100, 2000):
        *args, bias = random_case("cuda", tokens=tokens, features=512)
        leaves = [t.requires_grad_() for t in args[:4]]
        torch.ops.grouped_lora.linear(*args, bias).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = torch.ops.grouped_lora.linear(*args, bias)
            torch.autograd.grad(y.sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- e4m3 weights with a scale for every block of 128 × 128 ---

scaled_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@scaled_dtypes
def test_scaled_exact_at_real_sizes(kernels, dtype):
    for form, tokens, slots, rank, e8m0 in (
        ("wo_a", 1, 8, 16, True),
        ("wo_a", 8, 8, 64, False),
        ("plain", 64, 64, 64, True),
        ("wo_a", 100, 3, 64, False),
        ("slices", 1024, 8, 16, False),
        ("slices of grouped x", 300, 3, 16, True),
        ("wo_a", 4000, 1, 64, False),
        ("shared input", 4000, 4, 64, True),
        ("wo_a", 8192, 8, 64, False),
    ):
        c, weight, scale, bias = scaled_case(
            form, dtype, e8m0, tokens=tokens, slots=slots, groups=4, features=1024, out=512, rank=rank, ranks=True,
            sizes=[512, 128, 72], device="cuda",
        )  # fmt: skip
        what = f"{form} {tokens} {slots} {rank}"
        check_scaled(kernels, c, weight, scale, bias, what)
        wide = c.wide()
        tail = (c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, [True] + [False] * 4)
        c.grad_y.clamp_(-2, 2)
        exact = weight.double() * spread(scale, weight)
        want = reference.linear_backward(c.grad_y.double(), wide.x, exact, wide.a, wide.b, *tail[:2], bias.double(), *tail[3:])[0]
        got = kernels.linear_backward(c.grad_y, c.x, weight, c.a, c.b, *tail, scale)[0]
        assert torch.equal(got, want.float().to(dtype)), what


@scaled_dtypes
@pytest.mark.parametrize("rank, slots", [(16, 5), (64, 1), (200, 5)])
def test_a_scaled_rows_bits_are_its_own(dtype, rank, slots):
    """Alone, in T = 7 … 5000 (mma below 64 rows, wgmma from there), from a plan, in another order: the same bits of y and dx."""
    linear = torch.ops.grouped_lora.linear
    x, weight, scale, a, b, ids, scalings, bias = random_scaled(
        "cuda", dtype, 5000, 2048, 512, slots=slots, groups=4, rank=rank
    )
    grad = torch.randn_like(x[..., :512])

    def run(rows, ids, plan=None):
        leaf = x[rows].requires_grad_()
        y = linear(leaf, weight, a, b, ids, scalings, bias, None, None, plan, scale)
        return y.detach(), torch.autograd.grad(y, leaf, grad[rows])[0]

    batch = run(slice(None), ids)
    order = torch.randperm(5000, device="cuda")
    for got, want in zip(run(slice(None), ids, torch.ops.grouped_lora.plan(ids, slots)), batch):
        assert_bits(got, want, "with a plan")
    parts = [slice(1, 2), slice(0, 7), slice(0, 20), slice(0, 64), slice(0, 65), slice(9, 300), slice(1, 1025), order]
    for rows in parts:
        for got, want in zip(run(rows, ids[rows]), batch):
            assert_bits(got, want[rows], f"rows {rows}")
    parent = linear(x, weight, a[:, :0], b[..., :0], ids, scalings, bias, None, None, None, scale)
    assert_bits(batch[0][ids < 0], parent[ids < 0], "without an adapter")
    for rows in (slice(0, 5), slice(0, 64), slice(0, 200), slice(None)):
        zero = linear(x[rows], weight, a, b * 0, ids[rows], scalings, bias, None, None, None, scale)
        assert_bits(zero, parent[rows], f"zero adapters, rows {rows}")


@scaled_dtypes
def test_every_scaled_choice_gives_the_same_bits(dtype, monkeypatch):
    x, weight, scale, a, b, ids, scalings, bias = random_scaled("cuda", dtype, 300, 1000, 500, slots=3, rank=48)
    weight_t = weight.transpose(1, 2).contiguous().transpose(1, 2)
    args = (a, b, ids, scalings, bias, None, None, None, scale)
    want = torch.ops.grouped_lora.linear(x, weight, *args)
    choices = {
        **SCALED_WAYS,
        "tall": lambda p: scaled_with(p, launch.PLAN, 128, block_n=128, num_warps=8),
        "tall rows": lambda p: scaled_with(p, ROWS, 128, block_n=64, num_warps=8),
        "stream": lambda p: scaled_with(p, ROWS, 16, block_n=32, num_stages=12, prefetch=True),
    }
    for name, choose in choices.items():
        monkeypatch.setattr(launch_linear, "scaled", lambda p, *_, choose=choose: choose(p))
        common.configured.cache_clear()
        prepared.forget()
        assert_bits(torch.ops.grouped_lora.linear(x, weight, *args), want, name)
        assert_bits(torch.ops.grouped_lora.linear(x, weight_t, *args), want, f"{name}, transposed")


@pytest.mark.parametrize("features, out, sizes", [(1024, 504, None), (640, 136, None), (352, 528, [200, 264, 64])])
def test_float32_scales_by_csrcs_kernel(monkeypatch, features, out, sizes):
    """The bits of the Triton kernels, in both orders of rows, with as many blocks as there are and with few."""
    product, answers = linear_cuda.product, []
    monkeypatch.setattr(linear_cuda, "product", lambda *args: answers.append(product(*args)) or answers[-1])
    for rank, slots, tokens in ((16, 5, 1000), (64, 1, 300), (40, 3, 129), (0, 1, 700)):
        x, weight, scale, a, b, ids, scalings, bias = random_scaled(
            "cuda", torch.bfloat16, tokens, features, out, slots=slots, groups=4, rank=max(rank, 8)
        )
        if sizes:
            x, weight, scale, b, bias = x[:, 0], weight[0], scale[0], b[:, 0], bias[0]
            a = a[:, None].expand(-1, 3, -1, -1).contiguous()
        if rank == 0:
            a, b = a[..., :0, :], b[..., :0]
        args = (x, weight, a, b, ids, scalings, bias, sizes, None, None, scale)

        def result(cuda, args=args):
            def choose(p, *_):
                config = scaled_with(p, ROWS, 64, block_n=64, num_warps=8)
                return replace(config, cuda=cuda, shrink=None if p.rank == 0 else replace(config.shrink, pdl=True))

            monkeypatch.setattr(launch_linear, "scaled", choose)
            common.configured.cache_clear()
            prepared.forget()
            return torch.ops.grouped_lora.linear(*args)

        want = result(None)
        assert not answers
        for mode, programs in ((ROWS, 132), (SORTED, 132), (SORTED, 3)):
            assert_bits(result(launch_linear.CudaConfig(mode, programs, 8, 128)), want, f"{rank} {slots} {tokens} {mode} {programs}")
            assert answers == [True]
            answers.clear()


@scaled_dtypes
@pytest.mark.parametrize("tokens", [8, 64, 1000])
def test_scaled_is_nearer_to_float64_than_a_dequantised_weight(dtype, tokens):
    x, weight, scale, a, b, ids, scalings, _ = random_scaled("cuda", dtype, tokens, 4096, 512, slots=3, rank=16)
    exact_weight = weight.double() * spread(scale, weight)
    exact = reference.linear(x.double(), exact_weight, a.double(), b.double(), ids, scalings)
    base = torch.bmm(x.transpose(0, 1), exact_weight.to(dtype).mT).transpose(0, 1)
    both = torch.ops.grouped_lora.delta(x, a, b, ids, scalings, base)
    got = torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings, None, None, None, None, scale)
    error, other = ((t.double() - exact).abs() for t in (got, both))
    assert error.mean() < other.mean() and error.max() <= other.max()


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_scaled_replays_follow_the_weight_its_scales_and_ids(tokens):
    x, weight, scale, a, b, ids, scalings, bias = random_scaled("cuda", torch.bfloat16, tokens, 1024, 256, slots=6, groups=4)

    def step():
        return torch.ops.grouped_lora.linear(x, weight, a, b, ids, scalings, bias, None, None, None, scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for other in (ids.flip(0), torch.full_like(ids, -1), torch.full_like(ids, 5)):
        ids.copy_(other)
        scale.mul_(1.25)
        weight.view(torch.uint8).bitwise_xor_(128)
        graph.replay()
        assert_bits(y.clone(), step())


# --- e8m0 scales beside bf16: y and dx have the bits of W in bf16 ---


@pytest.mark.parametrize("rank, slots", [(16, 5), (64, 1), (200, 5)])
def test_e8m0_rows_have_the_bits_of_the_weight_in_bf16(rank, slots):
    """A row alone, in T = 16 … 5000 (converted by tiles of 16 to 128 rows, or ahead), in another order: those of W, forward and dx."""
    linear = torch.ops.grouped_lora.linear
    x, weight, scale, a, b, ids, scalings, bias = random_scaled(
        "cuda", torch.bfloat16, 5000, 2048, 512, slots=slots, groups=4, rank=rank, e8m0=True
    )
    grad = torch.randn_like(x[..., :512])
    columns = weight.transpose(1, 2).contiguous().transpose(1, 2)

    def run(rows, w, s):
        leaf = x[rows].requires_grad_()
        y = linear(leaf, w, a, b, ids[rows], scalings, bias, None, None, None, s)
        return y.detach(), torch.autograd.grad(y, leaf, grad[rows])[0]

    want = run(slice(None), in_bf16(weight, scale), None)
    parts = [slice(0, tokens) for tokens in (1, 16, 64, 65, 128, 129, 300, 5000)]
    for rows in [*parts, slice(299, 300), slice(4999, 5000), slice(4000, 4200), torch.randperm(5000, device="cuda")]:
        for w in (weight, columns):
            for got, whole in zip(run(rows, w, scale), want):
                assert_bits(got, whole[rows], f"rows {rows}")
    parent = linear(x, weight, a[:, :0], b[..., :0], ids, scalings, bias, None, None, None, scale)
    for rows in parts:
        zero = linear(x[rows], weight, a, b * 0, ids[rows], scalings, bias, None, None, None, scale)
        assert_bits(zero, parent[rows], f"zero adapters, rows {rows}")


def test_every_way_to_make_w_gives_the_same_bits(monkeypatch):
    x, weight, scale, a, b, ids, scalings, bias = random_scaled("cuda", torch.bfloat16, 300, 1000, 500, slots=3, rank=48, e8m0=True)
    columns = weight.transpose(1, 2).contiguous().transpose(1, 2)
    args = (a, b, ids, scalings, bias, None, None, None)
    want = torch.ops.grouped_lora.linear(x, in_bf16(weight, scale), *args)
    choices = {
        **SCALED_WAYS,
        "default": launch_linear.scaled,
        "tall": lambda p: scaled_with(p, launch.PLAN, 128, block_n=128, num_warps=8),
        "tall rows": lambda p: scaled_with(p, ROWS, 128, block_n=64, num_warps=8),
        "stream": lambda p: scaled_with(p, ROWS, 16, block_n=32, num_stages=12, prefetch=True),
        "ahead": None,
    }
    for name, choose in choices.items():
        monkeypatch.setattr(launch_linear, "dequantizes", lambda p, ahead=choose is None: ahead)
        if choose is not None:
            monkeypatch.setattr(launch_linear, "scaled", lambda p, *_, choose=choose: choose(p))
        common.configured.cache_clear()
        prepared.forget()
        for w in (weight, columns):
            assert_bits(torch.ops.grouped_lora.linear(x, w, *args, scale), want, name)


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 300])
def test_e8m0_replays_follow_the_weight_its_scales_and_ids(tokens):
    """… forward and dx."""
    x, weight, scale, a, b, ids, scalings, bias = random_scaled("cuda", torch.bfloat16, tokens, 1024, 256, slots=6, groups=4, e8m0=True)
    grad = torch.randn_like(x[..., :256])

    def step(w, s):
        y = torch.ops.grouped_lora.linear(x, w, a, b, ids, scalings, bias, None, None, None, s)
        tail = (ids, scalings, bias, None, None, None, [True] + [False] * 4, s)
        return y, torch.ops.grouped_lora.linear_backward(grad, x, w, a, b, *tail)[0]

    step(weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(weight, scale)
    for other in (ids.flip(0), torch.full_like(ids, -1), torch.full_like(ids, 5)):
        ids.copy_(other)
        scale.view(torch.uint8).add_(1)
        weight.view(torch.uint8).bitwise_xor_(128)
        for _ in range(3):
            graph.replay()
        for got, want in zip(found, step(in_bf16(weight, scale), None)):
            assert_bits(got.clone(), want)


def test_an_e4m3_weight_beyond_2_to_the_31_elements():
    """Its last row begins 2³¹ elements in: converted in tiles (3 rows) and ahead (200), and for dx."""
    for tokens in (3, 200):
        x, weight, scale, a, b, ids, scalings, bias = random_scaled("cuda", tokens=tokens, features=256, out=256, groups=1, e8m0=True)
        step = -(-(2**31) // 255) // 16 * 16 + 16
        far = torch.empty_strided(weight.shape, (256 * step, step, 1), dtype=torch.uint8, device="cuda").view(weight.dtype).copy_(weight)
        needs = (ids, scalings, bias, None, None, None, [True] + [False] * 4, scale)
        grad = torch.randn_like(x)
        near, other = (
            (
                torch.ops.grouped_lora.linear(x, w, a, b, ids, scalings, bias, None, None, None, scale),
                torch.ops.grouped_lora.linear_backward(grad, x, w, a, b, *needs)[0],
            )
            for w in (weight, far)
        )
        for got, want in zip(other, near):
            assert_bits(got, want, str(tokens))
        del far


def test_w_of_more_than_2_to_the_31_elements():
    """Five groups that share a weight of 2²⁹ elements."""
    from grouped_lora_ops.kernels.dequantize import dequantize

    weight = torch.randint(0, 120, (1, 32768, 16384), dtype=torch.uint8, device="cuda")
    scales = torch.randint(100, 150, (1, 256, 128), dtype=torch.uint8, device="cuda")
    out = torch.full((5, 32768, 16384), 3.0, dtype=torch.bfloat16, device="cuda")
    dequantize("linear", weight.view(torch.float8_e4m3fn).expand(5, -1, -1), scales.expand(5, -1, -1), out)
    for rows in (slice(0, 256), slice(32768 - 256, 32768)):
        of = scales[0, rows.start // 128 : rows.stop // 128].view(torch.float8_e8m0fnu)
        assert_bits(out[4, rows], in_bf16(weight[0, rows].view(torch.float8_e4m3fn), of), str(rows))
    for group in range(4):
        assert torch.equal(out[group].view(torch.int16), out[4].view(torch.int16))


def test_scaled_never_waits_for_the_device():
    for tokens in (8, 100, 2000):
        x, weight, scale, a, b, ids, scalings, bias = random_scaled("cuda", tokens=tokens, features=512)
        scale = scale.to(torch.float8_e8m0fnu)
        leaves = [t.requires_grad_() for t in (x, a, b)]
        args = (x, weight, a, b, ids, scalings, bias, None, None, None, scale)
        torch.ops.grouped_lora.linear(*args).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(torch.ops.grouped_lora.linear(*args).sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
