"""`linear`: y = x Wᵀ + scaling · (x Aᵀ) Bᵀ + bias, base and delta in one accumulator."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from .. import _checks, driver, launch, launch_linear, reference
from .._library import define, once_differentiable
from . import common, linear_cuda, stream_cuda
from .expand import grad_b, grad_h, output_shape
from .expert_common import cast_unless_float32, gradient_of
from .prepared import prepared, straight
from .shrink import backward as shrink_backward
from .shrink import run as run_shrink


def linear(
    x: Tensor,  # [T, D] or [T, G, D]
    weight: Tensor,  # [N, D], [G, N, D] or [ΣN, D]
    lora_a: Tensor,  # [L, r, D] or [L, G, r, D]
    lora_b: Tensor,  # [L, N, r], [L, G, N, r] or [L, ΣN, r]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor,  # [L]
    *,
    bias: Tensor | None = None,  # [N], [G, N] or [ΣN]
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
    weight_scale: Tensor | None = None,  # of an e4m3 weight: [⌈N/128⌉, ⌈D/128⌉], [G, ⌈N/128⌉, ⌈D/128⌉] or [⌈ΣN/128⌉, ⌈D/128⌉]
) -> Tensor:
    """y[t, g] = W[g] x[t, g] + scalings[l] · B[l, g] (A[l, g] x[t, g]) + bias[g] with l = adapter_ids[t].

    The forms and the LoRA arguments are those of `delta`. weight: x's dtype, with y's axes behind T and then D:
    [N, D], [G, N, D], or with out_sizes [ΣN, D]; any strides, used where it lies (a transposed storage comes in as a
    view). bias: weight's shape without D; x's dtype or float32.

    weight may be float8_e4m3fn beside x of bf16 or fp16, with weight_scale: float32 (or float8_e8m0fnu) and the scale, not
    its inverse, of every block of 128 × 128 elements, counted from weight's first row and column ([ΣN, D]: from the first
    row of all; a checkpoint's flat [G·N, D] with N a multiple of 128, and its scales, come in as views). W[n, d] =
    weight[n, d] · weight_scale[n // 128, d // 128]. With float32 scales, and beside fp16, it is not rounded:

        x Wᵀ = Σ_b scale[·, b] · (x[:, b] weight[:, b]ᵀ)   over blocks b of 128 columns of D, in order

    with exact products, float32 sums from zero inside a block, and one fma a block. dx sums over blocks of 128 rows of
    weight in the same way. With float8_e8m0fnu beside bf16 W is rounded to bf16, and y and dx have the bits that they have
    with W as weight. That W is exact where scales are 2⁻¹²⁴ to 2¹¹⁹ (e4m3 has 4 significant bits); beyond, it is the nearest,
    ties to even, or Inf, and NaN where weight is or the scale's byte is 255. For many rows, and for dx, it exists
    during the call, and beside float32 scales for many rows weight itself in bf16: 2 bytes an element of weight. float32
    scales that are powers of two can be given as `.to(torch.float8_e8m0fnu)`. A weight in 8 bits (and its scale) is frozen:
    ValueError if it requires grad.

    Returns a new tensor of `delta`'s shape. Base, delta and bias meet in float32 and are rounded once to x's dtype;
    h = x Aᵀ is never rounded (with 16-bit weights scaling · h enters the product as in `expand`). A zero delta (B = 0,
    scaling 0, adapter −1) leaves the bits of the op without LoRA. x's rows without an adapter are read, too: the base is
    theirs. A row's bits do not depend on T, on its place, on other rows or on the plan (on one GPU). Differentiable in x,
    lora_a, lora_b, and in weight and bias where they require grad; second derivatives raise RuntimeError. dx joins both
    parts in float32 and rounds once; the gradient of weight is a library product with float32 sums.

    Raises ValueError before anything is launched for arguments that do not fit together, TypeError for wrong types.
    """
    if weight_scale is None or not any(getattr(t, "requires_grad", False) for t in (weight, weight_scale)):  # else it is refused below
        done, y = _straight(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, weight_scale)
        if done:
            return y
    _checks.tensor_types(
        "linear",
        {"x": x, "weight": weight, "lora_a": lora_a, "lora_b": lora_b, "adapter_ids": adapter_ids, "scalings": scalings},
        {"bias": bias, "ranks": ranks, "plan": plan, "weight_scale": weight_scale},
    )
    _checks.out_sizes_type("linear", out_sizes)
    if weight_scale is None:
        return _op(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan)
    _checks.frozen_scaled("linear", weight, weight_scale)
    return _op(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, weight_scale)


def _run(name, dims, x, weight, lora_a, lora_b, out, adapter_ids, scalings, bias, ranks, plan, weight_scale):
    """Write out: W, or W without its scales, in bf16 where that is a step of its own, the shrink, then the product."""
    if out.numel() == 0:
        return
    from ..kernels import shrink

    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    xg, outg = common.grouped(x, 3), common.grouped(out, 3)
    sizes = dims.out_sizes if dims.h_grouped else None
    widest, groups = (dims.out_features, dims.groups) if sizes is None else (max(sizes), len(sizes))
    shared_a = dims.rank > 0 and dims.slots > 0 and lora_a.dim() == 3 and xg.shape[1] > 1
    problem = common.problem(x, dims.tokens, groups, dims.in_features, widest, dims.rank, dims.slots, shared_a)
    if _rounds(x, weight_scale) and launch_linear.dequantizes(problem):
        weight, weight_scale = _dequantized(name, weight, weight_scale, problem.arch), None
    choose = launch_linear.linear if weight_scale is None else launch_linear.scaled
    config = common.configured(choose, problem, False, x.dtype == torch.float16)
    weight, scales = _as_kernels_read(weight, weight_scale, problem.arch)
    bias = None if bias is None else _outer(bias, 2)
    h = b = halves = None
    if config.shrink is not None:
        b = common.grouped(lora_b, 4)
        h_groups = dims.groups if dims.h_grouped else 1
        halves = (dims.tokens, h_groups, 2, dims.rank)  # the high and the low part of each
    w = weight if scales is None else torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
    by_cuda = _by_cuda(name, xg, w, b, bias, outg, sizes, halves, config)
    if by_cuda and scales is not None:
        weight = _dequantized(name, weight, None, problem.arch)
    if config.shrink is not None:
        plan = common.plan_for(adapter_ids, dims.slots, plan, launch.PLAN == config.shrink.mode or _by_plan(config))
        if by_cuda and not config.shrink.split:
            h, factors = driver.empty(halves, x.dtype, x.device), scalings
        else:
            chunks = config.shrink.chunks if config.shrink.split else 1
            h, factors = driver.empty((chunks, dims.tokens, h_groups, dims.rank), torch.float32, x.device), None
        shrink.shrink(name, xg, common.grouped(lora_a, 4), h, adapter_ids, plan, ranks, factors, None, False, config.shrink)
    _base_and_delta(name, xg, weight, scales, h, b, bias, outg, adapter_ids, plan, ranks, scalings, dims.slots, sizes, None, False, config)


def _by_plan(config: launch_linear.LinearConfig) -> bool:
    return config.mode in (launch.PLAN, launch_linear.SORTED) or (config.cuda is not None and config.cuda.mode == launch_linear.SORTED)


def _by_cuda(name, x, weight, b, bias, out, sizes, halves, config: launch_linear.LinearConfig) -> bool:
    """Whether csrc/linear.cu makes the product, by W in bf16. A whole shrink then writes scaling · h for it, in parts of shape halves."""
    if config.cuda is None or config.stream is not None or linear_cuda.loaded(name, out) is None:
        return False
    w, b5, bias3 = _one_expert(weight, b, bias)
    h = None if halves is None else torch.empty(halves, dtype=x.dtype, device="meta")
    return linear_cuda.fits(x, w, h, b5, bias3, out, sizes)


def _one_expert(weight: Tensor, b: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(weight, b, bias) with the axis of experts, here of size 1, that csrc/linear.cu reads."""
    return weight[None], None if b is None else b[:, None], None if bias is None else bias[None]


def _base_and_delta(
    name, x, weight, scales, h, b, bias, out, adapter_ids, plan, ranks, scalings, slots, sizes, d_sizes, summed, config
) -> None:
    """`kernels.linear.linear`, or csrc/stream.cu or csrc/linear.cu where the choice and the layouts allow it."""
    stream, cuda = config.stream, config.cuda
    if (stream is not None or cuda is not None) and d_sizes is None:
        w, b5, bias3 = _one_expert(weight, b, bias)
        if stream is not None and not summed and stream_cuda.fits(x, w, scales, h, b5, bias3, out, sizes):
            if stream_cuda.product(name, x, w, scales, h, b5, bias3, out, adapter_ids, ranks, scalings, sizes, stream, config.pdl):
                return
        if cuda is not None and linear_cuda.fits(x, w, h, b5, bias3, out, sizes):
            mode = linear_cuda.SORTED if cuda.mode == launch_linear.SORTED and h is not None else linear_cuda.ROWS
            tiling = linear_cuda.Tiling(mode, config.rank_block, cuda.tile_group, cuda.programs, config.pdl, cuda.columns)
            if linear_cuda.product(
                name, x, w, h, b5, bias3, out, adapter_ids, (1, 1, 1), plan if mode else None, ranks, scalings, None, False, sizes, tiling,
                None, scales,
            ):  # fmt: skip
                return
    from ..kernels import linear as kernels

    kernels.linear(
        name, x, weight, scales, h, b, bias, out, adapter_ids, plan, ranks, scalings, slots, sizes, d_sizes, summed, config
    )


def _as_kernels_read(weight: Tensor, scale: Tensor | None, arch: str) -> tuple[Tensor, Tensor | None]:
    """(weight, scales) with the group axis in front; e8m0 as its bytes, and e4m3, too, where Triton does not know it."""
    weight = _outer(weight, 3)
    if scale is None:
        return weight, None
    if not launch_linear.has_e4m3(arch):
        weight = weight.view(torch.uint8)
    return weight, _outer(scale if scale.dtype == torch.float32 else scale.view(torch.uint8), 3)


def _rounds(x: Tensor, scale: Tensor | None) -> bool:
    """Whether W is bf16(weight · scale)."""
    return scale is not None and scale.dtype != torch.float32 and x.dtype == torch.bfloat16


def _dequantized(name: str, weight: Tensor, scale: Tensor | None, arch: str) -> Tensor:
    """That W, or without a scale weight itself, in bf16 with the group axis in front.

    Made ahead of what makes h: the product, which may start before h is there, reads W before it waits for that.
    """
    weight, scales = _as_kernels_read(weight, scale, arch)
    out = driver.empty(weight.shape, torch.bfloat16, weight.device)
    if out.numel():
        from ..kernels.dequantize import dequantize

        dequantize(name, weight, scales, out)
    return out


def _outer(t: Tensor, ndim: int) -> Tensor:
    """t with its group axis in front, of size 1 where it has none."""
    return t if t.dim() == ndim else t.unsqueeze(0)


def _cpu(
    x, weight, lora_a, lora_b, adapter_ids, scalings, bias=None, out_sizes=None, ranks=None, plan=None, weight_scale=None
):
    dims = _checked(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, weight_scale)
    _checks.id_values("linear", adapter_ids, dims.slots, ranks, dims.rank)
    return reference.linear(
        x, weight, lora_a, lora_b, adapter_ids, scalings, bias=bias, out_sizes=out_sizes, ranks=ranks, weight_scale=weight_scale
    )


_checked = functools.partial(_checks.linear, "linear")


@prepared
def _cuda(
    x, weight, lora_a, lora_b, adapter_ids, scalings, bias=None, out_sizes=None, ranks=None, plan=None, weight_scale=None
):
    dims = _checked(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, weight_scale)
    common.check_values("linear", adapter_ids, dims.slots, ranks, dims.rank)
    out = driver.empty(output_shape(dims), x.dtype, x.device)
    _run("linear", dims, x, weight, lora_a, lora_b, out, adapter_ids, scalings, bias, ranks, plan, weight_scale)
    return out


def _fake(
    x, weight, lora_a, lora_b, adapter_ids, scalings, bias=None, out_sizes=None, ranks=None, plan=None, weight_scale=None
):
    dims = _checked(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, weight_scale)
    return x.new_empty(output_shape(dims))


def _backward_cpu(
    grad_y, x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, needs, weight_scale=None
):
    grads = reference.linear_backward(
        grad_y, x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, needs, weight_scale
    )
    return tuple([x.new_empty(0) if g is None else g for g in grads])


@functools.partial(prepared, needs=11)
def _backward_cuda(
    grad_y, x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, needs, weight_scale=None
):
    name = "linear_backward"
    need_x, need_weight, need_a, need_b, need_bias = needs
    tokens, slots, h_grouped = x.shape[0], lora_a.shape[0], x.dim() == 3 or lora_a.dim() == 4
    groups = x.shape[1] if x.dim() == 3 else lora_a.shape[1] if lora_a.dim() == 4 else 1
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    if (need_a or need_b or launch.needs_plan(tokens, slots)) and slots > 1 and tokens > 0:
        plan = common.plan_for(adapter_ids, slots, plan, True)
    dx, v, da = common.nothing(x), None, common.nothing(lora_a)
    db = common.empty_like_unless(need_b, lora_b)
    w, scale = weight, weight_scale
    if need_x and x.numel() and _rounds(x, scale):
        w, scale = _dequantized(name, weight, scale, common.facts(x)[0]), None
    if need_x or need_a:
        v = grad_h(name, grad_y, groups, h_grouped, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)
    if need_x:
        dx = _dx(name, grad_y, x, w, lora_a, v, adapter_ids, out_sizes, ranks, plan, scale)
    if need_a:
        _, da = shrink_backward(name, v, x, lora_a, adapter_ids, ranks, plan, [False, True])
    if need_b:
        h = run_shrink(name, common.grouped(x, 3), common.grouped(lora_a, 4), groups, adapter_ids, ranks, plan)
        grad_b(name, grad_y, h, h_grouped, lora_b, db, adapter_ids, scalings, out_sizes, ranks, plan)
    dweight = _dweight(grad_y, x, weight, out_sizes) if need_weight else common.nothing(x)
    dbias = grad_y.sum(0, dtype=torch.float32).to(bias.dtype) if need_bias else common.nothing(x)
    return dx, dweight, da, db, dbias


def _dx(name, grad_y, x, weight, lora_a, v, adapter_ids, out_sizes, ranks, plan, weight_scale) -> Tensor:
    """grad_y W + v A, summed over the groups that share x: the product of `_run`, with W and A transposed."""
    dx = driver.empty(x.shape, x.dtype, x.device)
    if dx.numel() == 0:
        return dx
    out, g = common.grouped(dx, 3), common.grouped(grad_y, 3)
    w, scales = _as_kernels_read(weight, weight_scale, common.facts(x)[0])
    w, scales = w.transpose(1, 2), None if scales is None else scales.transpose(1, 2)
    d_sizes = tuple(out_sizes) if x.dim() == 3 and out_sizes is not None else None
    v = v.view(x.shape[0], -1, lora_a.shape[-2]) if v.numel() else None
    deep = w.shape[2] if d_sizes is None else max(d_sizes, default=0)
    slots, rank = lora_a.shape[0], 0 if v is None else v.shape[2]
    problem = common.problem(g, x.shape[0], out.shape[1], deep, out.shape[2], rank, slots)
    choose = launch_linear.linear if scales is None else launch_linear.scaled
    config = common.configured(choose, problem, True, x.dtype == torch.float16)
    b = None if v is None else common.grouped(lora_a, 4).transpose(2, 3)
    made = plan is None
    plan = common.plan_for(adapter_ids, slots, plan, v is not None and _by_plan(config))
    if made and plan is not None:  # its kernel is the one just ahead, and tiles are looked up before what is ahead is waited for
        config = replace(config, pdl=False)
    _base_and_delta(
        name, g, w, scales, None if v is None else v[None], b, None, out, adapter_ids, plan, ranks, None, slots, None, d_sizes,
        x.dim() == 2, config,
    )  # fmt: skip
    return dx


def _dweight(grad_y: Tensor, x: Tensor, weight: Tensor, out_sizes) -> Tensor:
    """dW[g] = Σ_t grad_y[t, g]ᵀ x[t, g]: PyTorch's product with float32 sums and results, rounded once."""
    g, rows = common.grouped(grad_y, 3).transpose(0, 1), common.grouped(x, 3).transpose(0, 1)  # [G, T, N], [G or 1, T, D]
    with torch.autocast(x.device.type, enabled=False):
        if out_sizes is not None and x.dim() == 3:
            parts = [_product(part[None].mT, rows[i : i + 1]) for i, part in enumerate(g[0].split(list(out_sizes), 1))]
            return torch.cat(parts, 1)[0].to(weight.dtype)
        return _product(g.mT, rows.expand(g.shape[0], -1, -1)).to(weight.dtype).view(weight.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _backward_fake(
    grad_y, x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, needs, weight_scale=None
):
    return tuple([gradient_of(t, need, x) for need, t in zip(needs, (x, weight, lora_a, lora_b, bias))])


def _setup(ctx, inputs, output):
    x, weight, lora_a, lora_b, adapter_ids, scalings, bias, ctx.out_sizes, ranks, plan, weight_scale = inputs
    _checks.frozen_scaled("linear", weight, weight_scale)
    ctx.save_for_backward(x, weight, lora_a, lora_b, adapter_ids, scalings, bias, ranks, plan, weight_scale)


def _grad(ctx, grad_y):
    *operands, bias, ranks, plan, weight_scale = ctx.saved_tensors
    needs = [common.needs_grad(ctx, i) for i in (0, 1, 2, 3, 6)]
    grads = _backward_op(grad_y, *operands, bias, ctx.out_sizes, ranks, plan, needs, weight_scale)
    dx, dweight, da, db, dbias = [g if need else None for g, need in zip(grads, needs)]
    return dx, dweight, da, db, None, None, dbias, None, None, None, None


def _autocast(
    cast, x, weight, lora_a, lora_b, adapter_ids, scalings, bias=None, out_sizes=None, ranks=None, plan=None, weight_scale=None
):
    x, a, b = cast(x), cast(lora_a), cast(lora_b)
    weight = cast(weight) if weight_scale is None else weight
    return x, weight, a, b, adapter_ids, scalings, cast_unless_float32(cast, bias), out_sizes, ranks, plan, weight_scale


_backward_op = define(
    "linear_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor adapter_ids, "
    "Tensor scalings, Tensor? bias, SymInt[]? out_sizes, Tensor? ranks, Tensor? plan, bool[] needs, "
    "Tensor? weight_scale=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("linear"),
)
_op = define(
    "linear(Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor adapter_ids, Tensor scalings, "
    "Tensor? bias=None, SymInt[]? out_sizes=None, Tensor? ranks=None, Tensor? plan=None, Tensor? weight_scale=None) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_straight = straight(_cuda)
