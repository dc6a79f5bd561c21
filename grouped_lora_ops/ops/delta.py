"""`delta` and `delta_`: y = base + scaling · (x Aᵀ) Bᵀ, what LoRA adds to a base output."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _checks, driver, launch, reference
from .._library import define, once_differentiable
from . import common, delta_cuda
from .expand import fill_base, grad_b, grad_h, output_shape
from .prepared import prepared, prepared_in_place, straight
from .shrink import backward as shrink_backward
from .shrink import run as run_shrink


def delta(
    x: Tensor,  # [T, D] or [T, G, D]
    lora_a: Tensor,  # [L, r, D] or [L, G, r, D]
    lora_b: Tensor,  # [L, N, r], [L, G, N, r] or [L, ΣN, r]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor,  # [L]
    *,
    base: Tensor | None = None,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[t, g] = base[t, g] + scalings[l] · B[l, g] (A[l, g] x[t, g]) with l = adapter_ids[t].

    The forms (shapes as in `shrink` and `expand`; every tensor but h has x's dtype):
      plain linear           x [T, D],    lora_a [L, r, D],    lora_b [L, N, r]                → y [T, N]
      grouped (V4 wo_a)      x [T, G, D], lora_a [L, r, D],    lora_b [L, G, N, r]             → y [T, G, N]
      … with an A per group  x [T, G, D], lora_a [L, G, r, D], lora_b [L, G, N, r]             → y [T, G, N]
      fused q/k/v, gate/up   x [T, D],    lora_a [L, G, r, D], lora_b [L, ΣN, r] + out_sizes   → y [T, ΣN]
    Token t's group g receives only its own group's product; nothing of size G×G exists.

    Returns a new tensor. h = x Aᵀ is never rounded to x's dtype (see `expand`); one rounding at the end. Rows without
    an adapter keep base's bits (or are zero). A row's bits do not depend on T, on its place, on other rows or on the
    plan (on one GPU). Differentiable in x, lora_a, lora_b, base; second derivatives raise RuntimeError.

    Raises ValueError before anything is launched for arguments that do not fit together, TypeError for wrong types.
    """
    done, y = _straight(x, lora_a, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    if done:
        return y
    _checks.tensor_types(
        "delta",
        {"x": x, "lora_a": lora_a, "lora_b": lora_b, "adapter_ids": adapter_ids, "scalings": scalings},
        {"base": base, "ranks": ranks, "plan": plan},
    )
    _checks.out_sizes_type("delta", out_sizes)
    return _op(x, lora_a, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)


def delta_(
    out: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    *,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> None:
    """out[t, g] += scalings[l] · B[l, g] (A[l, g] x[t, g]), in place; `delta` with base=out, without a new tensor.

    Rows without an adapter are not written. Raises ValueError also where an operand requires grad (use `delta`), or
    out overlaps an operand.
    """
    if _straight_(out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)[0]:
        return
    _checks.tensor_types(
        "delta_",
        {"out": out, "x": x, "lora_a": lora_a, "lora_b": lora_b, "adapter_ids": adapter_ids, "scalings": scalings},
        {"ranks": ranks, "plan": plan},
    )
    _checks.out_sizes_type("delta_", out_sizes)
    _op_(out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)


def _run(name, dims, x, lora_a, lora_b, base, out, adapter_ids, scalings, ranks, plan, copy):
    """Write out by our kernels: one launch or two, CUDA or Triton, as launch.delta says."""
    if out.numel() == 0:
        return
    if dims.rank == 0 or dims.slots == 0 or dims.in_features == 0:
        fill_base(base, out)
        return
    from ..kernels import delta as fused
    from ..kernels import expand, shrink

    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    xg, ag, bg, outg = common.grouped(x, 3), common.grouped(lora_a, 4), common.grouped(lora_b, 4), common.grouped(out, 3)
    baseg = outg if base is out else None if base is None else common.grouped(base, 3)
    sizes = dims.out_sizes if dims.h_grouped else None
    widest, even = dims.out_features if sizes is None else max(sizes), sizes is None or len(set(sizes)) == 1
    shared_a = ag.shape[1] == 1 and xg.shape[1] > 1 and even  # groups that share a tile of csrc/delta.cu are equally wide
    stacked = dims.h_grouped and xg.shape[1] == 1 < ag.shape[1] and ag.stride(1) == dims.rank * ag.stride(2)
    problem = common.problem(x, dims.tokens, dims.groups, dims.in_features, widest, dims.rank, dims.slots, shared_a, stacked)
    config = common.configured(launch.delta, problem)
    if config.cuda is not None and delta_cuda.fits(xg, ag, bg, baseg, outg, sizes):
        if delta_cuda.delta(name, xg, ag, bg, baseg, outg, adapter_ids, ranks, scalings, sizes, copy, config.cuda):
            return
    mode = (config.fused or config.shrink).mode
    plan = common.plan_for(adapter_ids, dims.slots, plan, mode == launch.PLAN)
    if config.fused is not None:
        fused.delta(name, xg, ag, bg, baseg, outg, adapter_ids, plan, ranks, scalings, sizes, copy, config.fused)
        return
    h_groups = dims.groups if dims.h_grouped else 1
    chunks = config.shrink.chunks if config.shrink.split else 1
    h = driver.empty((chunks, dims.tokens, h_groups, dims.rank), torch.float32, x.device)
    if config.merged:
        all_a, all_h = ag.view(dims.slots, 1, -1, dims.in_features), h.view(chunks, dims.tokens, 1, -1)
        shrink.shrink(name, xg, all_a, all_h, adapter_ids, plan, None, None, None, False, config.shrink)
    else:
        shrink.shrink(name, xg, ag, h, adapter_ids, plan, ranks, None, None, False, config.shrink)
    expand.expand(name, h, bg, baseg, outg, adapter_ids, plan, ranks, scalings, sizes, 1, copy, config.expand)


def _cpu(x, lora_a, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    dims = _checks.delta("delta", x, lora_a, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    _checks.id_values("delta", adapter_ids, dims.slots, ranks, dims.rank)
    return reference.delta(x, lora_a, lora_b, adapter_ids, scalings, base=base, out_sizes=out_sizes, ranks=ranks)


@prepared
def _cuda(x, lora_a, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    dims = _checks.delta("delta", x, lora_a, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    common.check_values("delta", adapter_ids, dims.slots, ranks, dims.rank)
    out = driver.empty(output_shape(dims), x.dtype, x.device)
    _run("delta", dims, x, lora_a, lora_b, base, out, adapter_ids, scalings, ranks, plan, True)
    return out


def _fake(x, lora_a, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    dims = _checks.delta("delta", x, lora_a, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    return x.new_empty(output_shape(dims))


def _cpu_(out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    dims = _checks.delta("delta_", x, lora_a, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan, out)
    _checks.id_values("delta_", adapter_ids, dims.slots, ranks, dims.rank)
    reference.delta_(out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes=out_sizes, ranks=ranks)


@prepared_in_place(4)
def _cuda_(out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    dims = _checks.delta("delta_", x, lora_a, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan, out)
    common.check_values("delta_", adapter_ids, dims.slots, ranks, dims.rank)
    _run("delta_", dims, x, lora_a, lora_b, out, out, adapter_ids, scalings, ranks, plan, False)
    torch.autograd.graph.increment_version(out)


def _fake_(out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    _checks.delta("delta_", x, lora_a, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan, out)


def _backward_cpu(grad_y, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs):
    grads = reference.delta_backward(
        grad_y, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs
    )
    return tuple([t.new_empty(0) if g is None else g for g, t in zip(grads, (x, lora_a, lora_b))])


@functools.partial(prepared, needs=9)
def _backward_cuda(grad_y, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs):
    name = "delta_backward"
    slots, h_grouped = lora_a.shape[0], x.dim() == 3 or lora_a.dim() == 4
    groups = x.shape[1] if x.dim() == 3 else lora_a.shape[1] if lora_a.dim() == 4 else 1
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    if slots > 1 and x.shape[0] > 0:
        plan = common.plan_for(adapter_ids, slots, plan, True)
    dx, da, db = common.nothing(x), common.nothing(lora_a), common.empty_like_unless(needs[2], lora_b)
    if needs[0] or needs[1]:
        dh = grad_h(name, grad_y, groups, h_grouped, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)
        dx, da = shrink_backward(name, dh, x, lora_a, adapter_ids, ranks, plan, needs[:2])
    if needs[2]:
        h = run_shrink(name, common.grouped(x, 3), common.grouped(lora_a, 4), groups, adapter_ids, ranks, plan)
        grad_b(name, grad_y, h, h_grouped, lora_b, db, adapter_ids, scalings, out_sizes, ranks, plan)
    return dx, da, db


def _backward_fake(grad_y, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs):
    return tuple([common.empty_like_unless(need, t) for need, t in zip(needs, (x, lora_a, lora_b))])


def _setup(ctx, inputs, output):
    x, lora_a, lora_b, adapter_ids, scalings, _, ctx.out_sizes, ranks, plan = inputs
    ctx.save_for_backward(x, lora_a, lora_b, adapter_ids, scalings, ranks, plan)


def _grad(ctx, grad_y):
    x, lora_a, lora_b, adapter_ids, scalings, ranks, plan = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads = (None, None, None)
    if any(needs):
        grads = _backward_op(
            grad_y, x, lora_a, lora_b, adapter_ids, scalings, ctx.out_sizes, ranks, plan, needs
        )
    base = grad_y if common.needs_grad(ctx, 5) else None
    return *[g if need else None for g, need in zip(grads, needs)], None, None, base, None, None, None


def _autocast(cast, x, lora_a, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    return cast(x), cast(lora_a), cast(lora_b), adapter_ids, scalings, cast(base), out_sizes, ranks, plan


def _autocast_(cast, out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    x, lora_a, lora_b = (t.to(out.dtype) for t in (x, lora_a, lora_b))
    return out, x, lora_a, lora_b, adapter_ids, scalings, out_sizes, ranks, plan


_backward_op = define(
    "delta_backward(Tensor grad_y, Tensor x, Tensor lora_a, Tensor lora_b, Tensor adapter_ids, Tensor scalings, "
    "SymInt[]? out_sizes, Tensor? ranks, Tensor? plan, bool[] needs) -> (Tensor, Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("delta"),
)
_op = define(
    "delta(Tensor x, Tensor lora_a, Tensor lora_b, Tensor adapter_ids, Tensor scalings, Tensor? base=None, "
    "SymInt[]? out_sizes=None, Tensor? ranks=None, Tensor? plan=None) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_op_ = define(
    "delta_(Tensor(a!) out, Tensor x, Tensor lora_a, Tensor lora_b, Tensor adapter_ids, Tensor scalings, "
    "SymInt[]? out_sizes=None, Tensor? ranks=None, Tensor? plan=None) -> ()",
    cpu=_cpu_,
    cuda=_cuda_,
    fake=_fake_,
    autocast=_autocast_,
)
_straight, _straight_ = straight(_cuda), straight(_cuda_, in_place=True)
