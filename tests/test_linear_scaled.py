"""`linear` with an e4m3 weight and a scale for every block of 128 × 128: exactly, in one order of sums, and against float64;
with e8m0 scales beside bf16 as with W in bf16. See also test_linear_gpu.py."""

from __future__ import annotations

import importlib
import itertools

import fake_gpu
import pytest
import torch
import torch._dynamo.testing
import triton
import triton.language as tl
from cases import FORMS, NAN, AsTraced, assert_bits, assert_equal, place
from linear_cases import (
    SCALED_WAYS,
    arguments,
    blocks_of,
    check_scaled,
    e4m3_like,
    in_bf16,
    random_scaled,
    scaled_case,
    spread,
    tiling,
    want_grads,
    want_linear,
)

import grouped_lora_ops as gl
from grouped_lora_ops import launch, launch_linear, reference
from grouped_lora_ops.kernels import dequantize as dequantize_module
from grouped_lora_ops.kernels.dequantize import dequantize
from grouped_lora_ops.kernels.scaled import from_e4m3, scale_value
from grouped_lora_ops.launch_linear import ROWS
from grouped_lora_ops.ops import common, prepared
from grouped_lora_ops.reference.linear import dequantized as from_reference

thorough = pytest.mark.thorough
DTYPES = (torch.bfloat16, torch.float16)
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@pytest.fixture
def way_of(monkeypatch):
    """way_of("plan"): every product with an e4m3 weight is tiled so from here on."""
    return tiling(monkeypatch, "scaled", SCALED_WAYS)


# float32 scales; e8m0 beside bf16, W converted in the product's tiles or ahead of it
KINDS = ("float32", "in tiles", "ahead")


@pytest.fixture
def ahead(monkeypatch):
    """ahead("in tiles"): no forward makes W in bf16 from here on, however many rows it has; ahead("ahead"): every one does."""

    def apply(kind: str):
        common.configured.cache_clear()
        prepared.forget()
        monkeypatch.setattr(launch_linear, "dequantizes", lambda p: kind == "ahead")

    return apply


def check_dx(kernels, c, weight, scale, bias):
    c.grad_y.clamp_(-4, 4)
    want = want_grads(c, weight.double() * spread(scale, weight), bias)[0]
    tail = (c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, [True] + [False] * 4, scale)
    for run in (kernels.linear_backward, reference.linear_backward):
        assert_equal(run(c.grad_y, c.x, weight, c.a, c.b, *tail)[0], want, "dx")


@pytest.mark.parametrize("form, dtype", [(form, DTYPES[i % 2]) for i, form in enumerate(FORMS)], ids=str)
def test_exact(kernels, form, dtype):
    """y and dx; blocks that N and D do not fill, and slices that begin inside one."""
    e8m0 = form in ("wo_a", "slices")
    c, weight, scale, bias = scaled_case(form, dtype, e8m0, out=140, features=140, ranks=True, device=kernels.device)
    check_scaled(kernels, c, weight, scale, bias)
    check_dx(kernels, c, weight, scale, bias)


@pytest.mark.parametrize("way, slots", [("rows", 3), ("slots", 3), ("sorted", 3), ("plan", 1)])
def test_ways(kernels, way_of, way, slots):
    way_of(way)
    form = "plain" if way in ("slots", "plan") else "slices of grouped x"
    c, weight, scale, bias = scaled_case(
        form, tokens=20, slots=slots, features=130, out=70, sizes=[40, 90], rank=3, device=kernels.device
    )
    check_scaled(kernels, c, weight, scale, bias)
    check_dx(kernels, c, weight, scale, bias)


@pytest.mark.parametrize("features, out", [(1, 1), pytest.param(129, 257, marks=thorough), (384, 127)])
def test_every_width(kernels, features, out):
    c, weight, scale, bias = scaled_case("plain", features=features, out=out, device=kernels.device)
    check_scaled(kernels, c, weight, scale, bias)


@pytest.mark.parametrize("sizes", [[128, 64], [7, 130, 0]], ids=str)
def test_slices_lie_in_blocks_of_the_whole_weight(kernels, sizes):
    c, weight, scale, bias = scaled_case("slices of grouped x", sizes=sizes, groups=len(sizes), features=32, device=kernels.device)
    check_scaled(kernels, c, weight, scale, bias)
    check_dx(kernels, c, weight, scale, bias)


@pytest.mark.parametrize("layout", ["slice", "odd", "transposed", "scattered"])
def test_layouts(kernels, layout):
    """weight and its scales where they lie; what is between their elements is NaN."""
    c, weight, scale, bias = scaled_case("wo_a", tokens=3, features=160, out=32, layout={"x": layout}, device=kernels.device)
    weight = e4m3_like(place(weight.float(), layout, kernels.device))
    check_scaled(kernels, c, weight, place(scale, layout, kernels.device), bias, layout)
    check_dx(kernels, c, weight, place(scale, layout, kernels.device), bias)


def test_views_of_a_checkpoint(kernels):
    """A flat [G·N, D] with e8m0 scales [G·N/128, D/128] is wo_a's weight as a view, group by group."""
    c, weight, scale, _ = scaled_case("wo_a", e8m0=True, tokens=2, features=32, out=256, device=kernels.device)
    flat, flat_scale = weight.flatten(0, 1), scale.flatten(0, 1)
    assert blocks_of(flat) == [4, 1] == list(flat_scale.shape)
    check_scaled(kernels, c, flat.view(2, 256, 32), flat_scale.view(2, 2, 1))


@triton.jit
def converted(bytes_in, scales, values, powers, DTYPE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(values + i, from_e4m3(tl.load(bytes_in + i), DTYPE))
    tl.store(powers + i, scale_value(tl.load(scales + i)))


def test_every_byte(kernels):
    """e4m3's and e8m0's 256 values as PyTorch has them, NaN too: from bytes, and (on a GPU) from the type itself."""
    every = torch.arange(256, dtype=torch.uint8, device=kernels.device)
    for dtype, given in itertools.product((torch.bfloat16, torch.float16), (every, every.view(FP8))):
        if given.dtype == FP8 and kernels.device == "cpu":
            continue
        values, powers = torch.full((256,), 3.0, device=kernels.device, dtype=dtype), torch.zeros(256, device=kernels.device)
        converted[(1,)](given, every, values, powers, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16)
        same_or_nan(values, every.view(FP8).to(dtype), 2)
        same_or_nan(powers, every.view(E8M0).float(), 1)


def same_or_nan(got, want, nans):
    assert got.isnan().sum() == nans and torch.equal(got.isnan(), want.isnan())
    assert_bits(got[~got.isnan()], want[~got.isnan()])


@pytest.mark.parametrize("way", ["rows", "sorted", "plan"])
def test_blocks_are_added_in_order(kernels, way_of, way):
    """Sums inside a block are exact here, their sum over blocks is not: the same bits from any tile."""
    args = random_scaled(kernels.device, tokens=20, features=300, out=70, groups=1, rank=3, integers=True)
    x, weight, scale, a, b, ids, scalings, bias = args
    want = kernels.linear(x, weight, a, b, ids, scalings, bias, weight_scale=scale)
    way_of(way)
    assert_bits(kernels.linear(x, weight, a, b, ids, scalings, bias, weight_scale=scale), want, way)
    row = slice(3, 4)
    assert_bits(kernels.linear(x[row], weight, a, b, ids[row], scalings, bias, weight_scale=scale), want[row], "alone")
    if kernels.device == "cpu":  # where an fma rounds twice, too
        assert_bits(reference.linear(x, weight, a, b, ids, scalings, bias=bias, weight_scale=scale), want, "reference")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error(kernels, dtype):
    """Nothing but float32 sums and the one rounding; a weight dequantised to x's dtype loses more."""
    x, weight, scale, a, b, ids, scalings, bias = random_scaled(
        kernels.device, dtype, tokens=16, features=600, out=130, groups=1, slots=1, rank=1
    )
    b = b * 0
    exact_weight = weight.double() * spread(scale, weight)
    wide = x.double(), exact_weight, a.double(), b.double()
    exact = reference.linear(*wide, ids, scalings, bias=bias.double())
    y = kernels.linear(x, weight, a, b, ids, scalings, bias, weight_scale=scale)
    error = (y.double() - exact).abs()
    sizes = torch.einsum("tgd,gnd->tgn", x.double().abs(), exact_weight.abs()) + bias.double().abs()
    unit = torch.finfo(dtype).eps / 2
    bound = unit * exact.abs() + (128 + 5 + 2) * 2.0**-24 * sizes * (1 + unit)  # a block's sum, 5 blocks, bias
    assert (error <= bound).all()
    rounded_weight = exact_weight.to(dtype)
    other = kernels.linear(x, rounded_weight, a, b, ids, scalings, bias)
    assert error.mean() < 0.9 * (other.double() - exact).abs().mean()
    assert (error - unit * exact.abs()).max() < 0.1 * ((other.double() - exact).abs() - unit * exact.abs()).max()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_adapters_change_nothing(kernels, ahead, kind):
    ahead(kind)
    x, weight, scale, a, b, ids, scalings, bias = random_scaled(
        kernels.device, tokens=8, features=140, out=40, rank=3, integers=True, e8m0=kind != "float32"
    )
    kw = dict(weight_scale=scale)
    parent = kernels.linear(x, weight, a[:, :0], b[..., :0], ids, scalings, bias, **kw)
    assert_bits(kernels.linear(x, weight, a, b, ids, scalings, bias, **kw), parent, "B 0")
    b = b + 1
    assert_bits(kernels.linear(x, weight, a * NAN, b * NAN, ids * 0 - 1, scalings, bias, **kw), parent, "ids -1")
    mixed = kernels.linear(x, weight, a, b, ids, scalings, bias, **kw)
    assert_bits(mixed[ids < 0], parent[ids < 0])
    assert not torch.equal(mixed[ids >= 0], parent[ids >= 0])


@pytest.mark.parametrize("sizes", [dict(rank=0), dict(features=0), dict(out=0), dict(tokens=0), dict(groups=0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_sizes(kernels, ahead, sizes, kind):
    ahead(kind)
    sizes = {"features": 40, "out": 20, **sizes}
    c, weight, scale, bias = scaled_case("wo_a", e8m0=kind != "float32", device=kernels.device, poison=False, **sizes)
    check_scaled(kernels, c, weight, scale, bias)
    check_dx(kernels, c, weight, scale, bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the interpreter stands in for one")
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_reads_its_own_weight_and_scales(monkeypatch, ahead, kind):
    """… forward, and the gradient of x."""
    gpu = fake_gpu.install(monkeypatch, "ctypes")
    ahead(kind)
    ops = importlib.import_module("grouped_lora_ops.ops.linear")
    launches = 0
    for seed in (0, 1):
        c, weight, scale, bias = scaled_case("plain", e8m0=kind != "float32", tokens=5, features=140, seed=seed)
        c.grad_y.clamp_(-4, 4)
        if seed:
            weight, scale = (-weight.float()).to(FP8), (2 * scale.float()).to(scale.dtype)
        exact = weight.double() * spread(scale, weight)
        assert_equal(ops._cuda(*arguments(c, weight, bias), scale), want_linear(c, exact, bias))
        launches += seed * (2 + (kind == "ahead"))
        assert len(gpu.launches) == launches
        tail = (c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, [True] + [False] * 4, scale)
        assert_equal(ops._backward_cuda(c.grad_y, c.x, weight, c.a, c.b, *tail)[0], want_grads(c, exact, bias)[0])
        launches += seed * (2 + (kind != "float32"))
        assert len(gpu.launches) == launches
    assert len(ops._cuda.table) == len(ops._backward_cuda.table) == 1


# --- e8m0 scales beside bf16: W is bf16(weight · scale) ---


def every_value(weight, scale):
    """bf16(weight · scale) by float64: the nearest multiple of a unit of 8 bits, ties to even; no unit below 2⁻¹³³."""
    exact = weight.double() * scale
    unit = (torch.floor(torch.log2(exact.abs())).clamp(min=-126) - 7).exp2()
    nearest = torch.where(exact == 0, exact, torch.round(exact / unit) * unit)
    nearest = torch.where(nearest.abs() < 2.0**128, nearest, nearest.sign() * float("inf"))
    got = nearest.to(torch.bfloat16)
    assert torch.equal(got[~got.isnan()].double(), nearest[~got.isnan()])
    return got


def power(scale):
    """e8m0's bytes, float64."""
    return torch.where(scale == 255, NAN, (scale.double() - 127).exp2())


def written(weight, scales):
    """What `dequantize` writes, and nothing behind it."""
    room = torch.full((weight.numel() + 256,), 3.0, device=weight.device, dtype=torch.bfloat16)
    out = room[: weight.numel()].view(weight.shape)
    dequantize("linear", weight, scales, out)
    assert (room[weight.numel() :] == 3).all()
    return out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_byte_times_every_scale(kernels):
    every = torch.arange(256, dtype=torch.uint8, device=kernels.device)
    weight, scales = every.view(1, 2, 128).expand(256, -1, -1), every.view(256, 1, 1)
    values = weight.view(FP8).cpu()
    want = every_value(values, power(scales).cpu())
    torch_s = (values.float() * scales.view(E8M0).float().cpu()).bfloat16()
    same_or_nan(torch_s, want, 256 + 2 * 255)
    same_or_nan(from_reference(values, scales.view(E8M0).cpu()), want, 256 + 2 * 255)
    for given in (weight, weight.view(FP8)):
        if given.dtype == torch.uint8 or kernels.device == "cuda":
            same_or_nan(written(given, scales).cpu(), want, 256 + 2 * 255)
            same_or_nan(written(given, None).cpu(), values.to(torch.bfloat16), 2 * 256)
    exact = values.double() * power(scales).cpu()
    plain = (scales.cpu() >= 127 - 124) & (scales.cpu() <= 127 + 119) & ~exact.isnan()
    assert torch.equal(want[plain].double(), exact[plain])


SHAPES = [(1, 128, 128), (2, 256, 384), (3, 130, 200), (1, 257, 48), (2, 1, 1), (1, 60, 127), (1, 64, 1000), (1, 192, 128)]


@pytest.mark.parametrize("layout", ["dense", "slice", "odd", "rows", "transposed", "scattered"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize_layouts(kernels, shape, layout):
    """weight and scales of any strides, all of W and nothing else; NaN lies between the elements."""
    g = torch.Generator().manual_seed(2)
    values = (torch.randn(shape, generator=g) * 30).to(FP8)
    scales = torch.randint(100, 150, blocks_of(values), generator=g)
    weight = e4m3_like(place(values.float(), layout, kernels.device))
    weight = weight if kernels.device == "cuda" else weight.view(torch.uint8)
    placed = place(scales.float(), layout, kernels.device)
    whole = torch.where((placed if placed._base is None else placed._base).isnan(), 255.0, placed if placed._base is None else placed._base)
    placed = whole.to(torch.uint8).as_strided(placed.shape, placed.stride(), placed.storage_offset())
    want = (values.double() * spread_power(scales, values)).bfloat16()
    assert_bits(written(weight, placed).cpu(), want)
    shared = written(weight[:1].expand(3, -1, -1), placed[:1].expand(3, -1, -1)).cpu()  # groups of stride 0
    assert_bits(shared, want[:1].expand(3, -1, -1))


def spread_power(scales, like):
    wide = power(scales).repeat_interleave(128, -1).repeat_interleave(128, -2)
    return wide[..., : like.shape[-2], : like.shape[-1]]


def both(kernels, c, weight, scale, bias):
    """(y, dx) of the call with scales and of that with W."""
    needs = (c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, [True] + [False] * 4)
    found = []
    for w, s in ((weight, scale), (in_bf16(weight, scale), None)):
        y = kernels.linear(*arguments(c, w, bias), s)
        found.append((y, kernels.linear_backward(c.grad_y, c.x, w, c.a, c.b, *needs, s)[0]))
    return zip(*found)


@pytest.mark.parametrize("way", ["in tiles", "ahead"])
@pytest.mark.parametrize("form", ["plain", "wo_a", "shared input", "slices", "slices of grouped x", "slices of one h"])
def test_e8m0_has_the_bits_of_the_weight_in_bf16(kernels, monkeypatch, ahead, form, way):
    """y and dx, of numbers whose sums are not exact; on a CPU, where a product's bits are those of its tile, by the same tiles."""
    ahead(way)
    if kernels.device == "cpu" and way == "in tiles":
        monkeypatch.setattr(launch_linear, "linear", launch_linear.scaled)
    seen = dequantize_launches(monkeypatch)
    c, weight, scale, bias = scaled_case(form, e8m0=True, tokens=9, features=300, out=140, rank=3, ranks=True, device=kernels.device)
    g = torch.Generator().manual_seed(4)
    for t in (c.x, c.grad_y):
        t.copy_(torch.randn(t.shape, generator=g).to(t))
    weight = torch.randn(weight.shape, generator=g).to(weight.device, FP8)
    scale = torch.randint(118, 136, scale.shape, generator=g).to(scale.device, torch.uint8).view(E8M0)
    for name, (got, want) in zip(("y", "dx"), both(kernels, c, weight, scale, bias)):
        assert_bits(got, want, name)
    assert len(seen) == (2 if way == "ahead" else 1)  # dx always has W whole


def dequantize_launches(monkeypatch) -> list:
    seen, launch_it = [], dequantize_module.launch

    def counted(*args):
        seen.append(args)
        return launch_it(*args)

    monkeypatch.setattr(dequantize_module, "launch", counted)
    return seen


def test_w_is_made_ahead_of_all_that_others_overlap(kernels, monkeypatch, ahead):
    """A kernel that starts beside the one ahead may read whatever is older than that one's result: W must be."""
    ahead("ahead")
    order = []
    for stem in ("dequantize", "shrink", "expand", "linear"):
        module = importlib.import_module(f"grouped_lora_ops.kernels.{stem}")

        def noted(*args, stem=stem, launch_it=module.launch):
            order.append(stem)
            return launch_it(*args)

        monkeypatch.setattr(module, "launch", noted)
    c, weight, scale, bias = scaled_case("wo_a", e8m0=True, tokens=5, features=140, out=20, device=kernels.device)
    kernels.linear(*arguments(c, weight, bias), scale)
    assert order == ["dequantize", "shrink", "linear"]
    order.clear()
    kernels.linear_backward(c.grad_y, c.x, weight, c.a, c.b, c.ids, c.scalings, bias, None, c.ranks, None, [True] + [False] * 4, scale)
    assert order[0] == "dequantize" and order[-1] == "linear" and len(order) == 3


@pytest.mark.parametrize("tokens", [launch_linear.DEQUANTIZE_TOKENS - 1, launch_linear.DEQUANTIZE_TOKENS])
def test_either_side_of_the_choice(kernels, monkeypatch, tokens):
    seen = dequantize_launches(monkeypatch)
    c, weight, scale, bias = scaled_case("wo_a", e8m0=True, tokens=tokens, features=140, out=20, device=kernels.device)
    check_scaled(kernels, c, weight, scale, bias)
    assert len(seen) == (tokens >= launch_linear.DEQUANTIZE_TOKENS)
    check_dx(kernels, c, weight, scale, bias)
    for other, dtype in ((scale.float(), c.x.dtype), (scale, torch.float16)):  # what keeps W unrounded never has it whole
        seen.clear()
        more = c if dtype == c.x.dtype else scaled_case("wo_a", dtype, tokens=tokens, features=140, out=20, device=kernels.device)[0]
        check_scaled(kernels, more, weight, other, bias.to(dtype))
        check_dx(kernels, more, weight, other, bias.to(dtype))
        assert not seen


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("way", ["in tiles", "ahead"])
def test_e8m0_beyond_the_exact_range(kernels, ahead, way):
    """W's subnormals are rounded, what is too large is Inf, and a scale of 255 or a weight of NaN is NaN in its columns alone."""
    ahead(way)
    c, weight, _, _ = scaled_case("plain", tokens=3, features=128, out=640, rank=3, poison=False)
    weight = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).mul_(0.01).to(FP8)
    weight[256:384] = 448.0
    weight[600, 5] = NAN
    scale = torch.tensor([[0], [1], [254], [255], [127]], dtype=torch.uint8).view(E8M0)
    c.x.fill_(1)[:, 0] = 2.0 ** torch.arange(120, 123)
    exact, w = weight.double() * spread(scale, weight), in_bf16(weight, scale)
    x, a, b, ids, scalings, weight, scale, w = (
        t.to(kernels.device) for t in (c.x, c.a, c.b * 0, c.ids, c.scalings, weight, scale, w)
    )
    for run in (kernels.linear, reference.linear):
        y, want = run(x, weight, a, b, ids, scalings, weight_scale=scale), run(x, w, a, b, ids, scalings)
        assert y[:, 256:384].isposinf().all()
        assert y.isnan().any(0).nonzero().flatten().tolist() == [*range(384, 512), 600]
        assert torch.equal(y.isnan(), want.isnan())
        assert_bits(y[~y.isnan()], want[~y.isnan()])
    assert not torch.equal(want[:, :256].cpu(), (c.x.double() @ exact[:256].T).bfloat16()), "W was not rounded"


def test_fp16_keeps_w_unrounded(kernels):
    """… beside e8m0 scales, too: y and dx are finite where bf16(448 · 2¹²⁷) would be Inf, and have the bits of float32 scales."""
    x, weight, scale, a, b, ids, scalings, bias = random_scaled(
        kernels.device, torch.float16, tokens=20, features=300, out=140, groups=1, rank=3, e8m0=True
    )
    weight.view(torch.uint8)[:, :128, 128:256] = 126  # 448
    x[..., 128:256], grad = 0, torch.randn_like(x[..., :140])
    grad[..., :128] = 0
    scale.view(torch.uint8)[:, 0, 1] = 254
    found = []
    for s, linear, backward in (
        (scale, kernels.linear, kernels.linear_backward),
        (scale.float(), kernels.linear, kernels.linear_backward),
        (scale, reference.linear, reference.linear_backward),
    ):
        y = linear(x, weight, a, b, ids, scalings, bias=bias, weight_scale=s)
        tail = (ids, scalings, bias, None, None, None, [True] + [False] * 4, s)
        found.append((y, backward(grad, x, weight, a, b, *tail)[0]))
        assert y.isfinite().all() and found[-1][1].isfinite().all()
    for got, want in zip(*found[:2]):
        assert_bits(got, want)


# --- as a PyTorch op ---


def small(device="cpu", dtype=torch.bfloat16, **kw):
    c, weight, scale, bias = scaled_case("wo_a", dtype, features=140, out=20, poison=False, device=device, **kw)
    leaves = [t.detach().clone().requires_grad_() for t in (c.x, c.a, c.b, bias)]
    return c, weight, scale, leaves


def call(c, weight, scale, leaves):
    x, a, b, bias = leaves
    return gl.linear(x, weight, a, b, c.ids, c.scalings, bias=bias, weight_scale=scale)


def test_gradients_reach_all_but_the_weight():
    c, weight, scale, leaves = small()
    y = call(c, weight, scale, leaves)
    y.backward(c.grad_y)
    want = reference.linear_backward(
        c.grad_y, c.x, weight, c.a, c.b, c.ids, c.scalings, leaves[3], None, None, None, [True, False, True, True, True], scale
    )
    for leaf, grad in zip(leaves, (want[0], *want[2:])):
        assert torch.equal(leaf.grad, grad)
    assert weight.grad is None and scale.grad is None


@pytest.mark.parametrize("tokens", [7, 130])
def test_opcheck(tokens):
    c, weight, scale, (x, a, b, bias) = small(e8m0=True, tokens=tokens)
    args = (x, weight, a, b, c.ids, c.scalings, bias, None, None, None, scale)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # test_schema multiplies 8-bit floats
    torch.library.opcheck(torch.ops.grouped_lora.linear, args, test_utils=checks)
    with AsTraced() as mode:
        call(c, weight, scale, (x, a, b, bias)).sum().backward()
    assert mode.seen >= {"linear", "linear_backward"}


@pytest.mark.parametrize("e8m0", [False, True])
def test_compile_traces_whole_and_once_for_every_length(e8m0):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    c, weight, scale, _ = small(tokens=130, e8m0=e8m0)

    def step(x, a, b, ids, bias):
        return gl.linear(x * 2, weight, a, b, ids, c.scalings, bias=bias, weight_scale=scale).float().square().sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (17, 2, 130):
        grads = []
        for run in (step, compiled):
            x, a, b, bias = leaves = [t.detach().clone().requires_grad_() for t in (c.x[:tokens], c.a, c.b, c.base[0])]
            run(x, a, b, c.ids[:tokens], bias).backward()
            grads.append([t.grad for t in leaves])
        assert all(torch.equal(u, v) for u, v in zip(*grads))
    assert counter.frame_count == 1


@pytest.mark.parametrize("e8m0", [False, True])
def test_export(e8m0):
    c, weight, scale, _ = small(tokens=135, e8m0=e8m0)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", weight)
            self.register_buffer("scale", scale)

        def forward(self, x, ids):
            return gl.linear(x, self.weight, c.a, c.b, ids, c.scalings, weight_scale=self.scale)

    shapes = {"x": {0: torch.export.Dim("T", min=2)}, "ids": {0: torch.export.Dim("T", min=2)}}
    exported = torch.export.export(Layer(), (c.x, c.ids), dynamic_shapes=shapes)
    for tokens in (5, 130):
        assert_equal(exported.module()(c.x[:tokens], c.ids[:tokens]), Layer()(c.x[:tokens], c.ids[:tokens]))


def test_autocast_leaves_the_weight_alone():
    c, weight, scale, leaves = small(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(c, weight, scale, leaves)
        y.float().sum().backward()
    x, a, b = (t.detach().bfloat16() for t in leaves[:3])
    assert_equal(y.detach(), call(c, weight, scale, (x, a, b, leaves[3].detach())))
    assert all(t.grad.dtype == torch.float32 for t in leaves)


# --- bad input ---

T, G, D, N, R, L = 8, 2, 130, 24, 4, 3


def given(**changes):
    args = dict(x=torch.zeros(T, G, D), lora_a=torch.zeros(L, R, D), lora_b=torch.zeros(L, G, N, R))
    args = {n: t.bfloat16() for n, t in args.items()} | {"weight": torch.zeros(G, N, D).to(FP8)}
    args |= {"adapter_ids": torch.zeros(T).long(), "scalings": torch.ones(L), "weight_scale": torch.ones(G, 1, 2)}
    return {**args, **changes}


FORM = "weight_scale must be [2, 1, 2], a scale for every block of 128 x 128 of weight [2, 24, 130]"
SENTENCES = [
    (dict(weight_scale=None), f"{FORM}; got None."),
    (dict(weight_scale=torch.ones(G, 1, 3)), f"{FORM}; got [2, 1, 3]."),
    (dict(weight_scale=torch.ones(1, 2)), f"{FORM}; got [1, 2]."),
    (dict(weight_scale=torch.ones(G, 1, 2).half()), "weight_scale must be float32 or float8_e8m0fnu; got float16."),
    (dict(weight_scale=torch.ones(G, 1, 2, device="meta")), "weight_scale must be on cpu like weight; got meta."),
    (
        dict(weight=torch.zeros(G, N, D).bfloat16()),
        "weight_scale must be None beside a weight of bfloat16 (a scale belongs to float8_e4m3fn); got [2, 1, 2].",
    ),
    (dict(weight=torch.zeros(G, N, D).to(torch.float8_e5m2)), "weight must be bfloat16 like x; got float8_e5m2."),
    (
        {n: given()[n].float() for n in ("x", "lora_a", "lora_b")},
        "x must be bfloat16 or float16 beside a weight of float8_e4m3fn; got float32.",
    ),
]


@pytest.mark.parametrize("changes, sentence", SENTENCES, ids=[s[:60] for _, s in SENTENCES])
def test_sentences(kernels, changes, sentence):
    calls = [lambda args: gl.linear(**args)]
    if "meta" not in sentence:
        calls.append(lambda args: kernels.linear(**{n: None if t is None else t.to(kernels.device) for n, t in args.items()}))
    for run in calls:
        with pytest.raises(ValueError) as error:
            run(given(**changes))
        assert str(error.value) == f"grouped_lora.linear: {sentence}"


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_what_is_frozen_may_not_require_grad(name):
    args = given()
    args[name] = args[name].detach().requires_grad_()
    sentence = f"grouped_lora.linear: {name} must not require grad, an 8-bit weight is frozen; detach it."
    ordered = [args[n] for n in ("x", "weight", "lora_a", "lora_b", "adapter_ids", "scalings")]
    for run in (lambda: gl.linear(**args), lambda: torch.ops.grouped_lora.linear(*ordered, None, None, None, None, args["weight_scale"])):
        with pytest.raises(ValueError) as error:
            run()
        assert str(error.value) == sentence


def test_a_scale_of_a_wrong_type():
    with pytest.raises(TypeError) as error:
        gl.linear(**given(weight_scale=2.0))
    assert str(error.value) == "grouped_lora.linear: weight_scale must be a torch.Tensor or None; got float."


# --- the launch choice; that its kernels compile without spills is test_linear.py's ---


def test_every_problem_gets_a_configuration():
    """It fits into shared memory with W's converted tile, and a step is a block of D."""
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"):
        for tokens in (1, 7, 33, 64, 65, 300, 1024, 8192):
            for groups, out, rank, slots in ((1, 4096, 16, 8), (4, 1024, 64, 8), (8, 100, 200, 1), (1, 127, 0, 0)):
                p = launch.Problem(arch, 132, 2, tokens, groups, 4096, out, rank, slots)
                for transposed, fp16 in ((False, False), (True, False), (False, True)):
                    c = launch_linear.scaled(p, transposed, fp16)
                    used = c.num_stages * (2 * c.block_m + c.block_n) + 2 * c.block_n
                    assert 128 * used <= launch_linear.shared_memory(arch)
                    assert c.block_k == launch_linear.SCALE_BLOCK == 128 and 128 % c.block_n == 0
                    assert c.mode not in (*launch_linear.MIXED, launch.SINGLE) or (c.tiles - 1) * c.block_m < tokens <= c.tiles * c.block_m
                    assert (c.shrink is None) == (rank == 0)


def test_a_weight_stream_keeps_the_memory_busy():
    for groups, out in ((4, 1024), (8, 1024), (1, 4096)):
        for tokens in (1, 8, 64):
            c = launch_linear.scaled(launch.Problem("sm_90", 132, 2, tokens, groups, 4096, out, 16, 8))
            assert c.mode == ROWS and c.tiles == 1 and groups * launch.cdiv(out, c.block_n) >= 0.9 * 132
            assert (c.num_stages - 1) * c.block_n * c.block_k >= 32 * 1024


def test_w_is_made_ahead_of_many_rows():
    for arch in ("sm_80", "sm_90", "sm_120"):
        for tokens in (1, 64, 128, 129, 8192):
            assert launch_linear.dequantizes(launch.Problem(arch, 132, 2, tokens, 4, 4096, 1024, 16, 8)) == (tokens > 128)


def test_scales_have_a_block_for_every_128():
    assert blocks_of(torch.empty(4, 129, 256)) == [4, 2, 2]
