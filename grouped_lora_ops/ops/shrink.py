"""`shrink`: h = x Aᵀ."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _checks, driver, launch, reference
from .._library import define, once_differentiable
from . import common
from .prepared import prepared, straight
from .wgrad import wgrad


def shrink(
    x: Tensor,  # [T, D] or [T, G, D]
    lora_a: Tensor,  # [L, r, D] or [L, G, r, D]
    adapter_ids: Tensor,  # [T]
    *,
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """h[t, g] = A[l, g] x[t, g] with l = adapter_ids[t].

    x: [T, D], or [T, G, D] with an input for each group; bf16, fp16 or fp32 (float64 on the CPU), any strides.
    lora_a: [L, r, D], one A for all groups, or [L, G, r, D]; x's dtype. With x [T, D] and lora_a [L, G, r, D] all
    groups read the same input. adapter_ids: [T] int32 or int64, −1 = no adapter. ranks: [L] int32, the true rank of
    each slot. plan: from `plan`, optional.

    Returns h, [T, r] or [T, G, r] float32: sums in float32, in an order that depends on D alone; exact zeros for rows
    without an adapter (even if x holds NaN there) and in columns past the slot's rank. Differentiable in x, lora_a.

    Raises ValueError, before anything is launched, for arguments that do not fit together; on the CPU also for ids
    out of range (on a GPU such rows count as −1; GROUPED_LORA_CHECK=1 checks there too).
    """
    done, h = _straight(x, lora_a, adapter_ids, ranks, plan)
    if done:
        return h
    _checks.tensor_types(
        "shrink", {"x": x, "lora_a": lora_a, "adapter_ids": adapter_ids}, {"ranks": ranks, "plan": plan}
    )
    return _op(x, lora_a, adapter_ids, ranks, plan)


def run(
    name: str,
    x: Tensor,  # [T, G or 1, D]
    a: Tensor,  # [L, G or 1, r, D]
    groups: int,
    adapter_ids: Tensor,
    ranks: Tensor | None,
    plan: Tensor | None,
    scalings: Tensor | None = None,
    sizes: tuple | None = None,
    flat: bool = False,
) -> Tensor:
    """h [T, G, r] by our kernel, times scalings[l] where given; arguments already checked. flat: h [T, r], G = 1."""
    tokens, slots, rank, features = x.shape[0], a.shape[0], a.shape[2], x.shape[2]
    if tokens == 0 or groups == 0 or rank == 0 or features == 0 or slots == 0:
        return torch.zeros((tokens, rank) if flat else (tokens, groups, rank), dtype=torch.float32, device=x.device)
    from ..kernels import shrink as kernels

    h = driver.empty((tokens, rank) if flat else (tokens, groups, rank), torch.float32, x.device)
    widest = features if sizes is None else max(sizes)
    config = common.configured(launch.shrink, common.problem(x, tokens, groups, widest, 0, rank, slots))
    plan = common.plan_for(adapter_ids, slots, plan, config.mode == launch.PLAN)
    kernels.shrink(name, x, a, h.view(1, tokens, groups, rank), adapter_ids, plan, ranks, scalings, sizes, True, config)
    return h


def _cpu(x, lora_a, adapter_ids, ranks=None, plan=None):
    dims = _checks.shrink("shrink", x, lora_a, adapter_ids, ranks, plan)
    _checks.id_values("shrink", adapter_ids, dims.slots, ranks, dims.rank)
    return reference.shrink(x, lora_a, adapter_ids, ranks=ranks)


@prepared
def _cuda(x, lora_a, adapter_ids, ranks=None, plan=None):
    dims = _checks.shrink("shrink", x, lora_a, adapter_ids, ranks, plan)
    common.check_values("shrink", adapter_ids, dims.slots, ranks, dims.rank)
    xg, ag = common.grouped(x, 3), common.grouped(lora_a, 4)
    return run("shrink", xg, ag, dims.groups, adapter_ids, common.contiguous(ranks), plan, flat=not dims.h_grouped)


def _fake(x, lora_a, adapter_ids, ranks=None, plan=None):
    dims = _checks.shrink("shrink", x, lora_a, adapter_ids, ranks, plan)
    shape = (dims.tokens, dims.groups, dims.rank) if dims.h_grouped else (dims.tokens, dims.rank)
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _backward_cpu(grad_h, x, lora_a, adapter_ids, ranks, plan, needs):
    grads = reference.shrink_backward(grad_h, x, lora_a, adapter_ids, ranks, plan, needs)
    return tuple([t.new_empty(0) if g is None else g for g, t in zip(grads, (x, lora_a))])


def backward(name, grad_h, x, lora_a, adapter_ids, ranks, plan, needs):
    """(dx, dA) from float32 grad_h by our kernels; empty tensors where not needed."""
    from .expand import run as run_expand

    tokens = x.shape[0]
    xg, ag, dh = common.grouped(x, 3), common.grouped(lora_a, 4), common.grouped(grad_h, 3)
    ranks = common.contiguous(ranks)
    if dh.stride(2) != 1:
        dh = dh.contiguous()
    if (needs[1] or launch.needs_plan(tokens, lora_a.shape[0])) and lora_a.shape[0] > 1 and tokens > 0:
        plan = common.plan_for(adapter_ids, lora_a.shape[0], plan, True)
    dx, da = (common.empty_like_unless(need, t) for need, t in zip(needs, (x, lora_a)))
    if needs[0]:
        sum_groups = dh.shape[1] if xg.shape[1] == 1 else 1
        dxg = common.grouped(dx, 3)
        run_expand(name, dh[None], ag.transpose(2, 3), None, dxg, adapter_ids, plan, ranks, None, None, sum_groups, True)
    if needs[1]:
        wgrad(name, dh, xg, common.grouped(da, 4), adapter_ids, plan, ranks, None)
    return dx, da


@functools.partial(prepared, needs=6)
def _backward_cuda(grad_h, x, lora_a, adapter_ids, ranks, plan, needs):
    return backward("shrink_backward", grad_h, x, lora_a, adapter_ids, ranks, plan, needs)


def _backward_fake(grad_h, x, lora_a, adapter_ids, ranks, plan, needs):
    return tuple([common.empty_like_unless(need, t) for need, t in zip(needs, (x, lora_a))])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grad(ctx, grad_h):
    x, lora_a, adapter_ids, ranks, plan = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:2])
    grads = _backward_op(grad_h, x, lora_a, adapter_ids, ranks, plan, needs)
    return *[g if need else None for g, need in zip(grads, needs)], None, None, None


def _autocast(cast, x, lora_a, adapter_ids, ranks=None, plan=None):
    return cast(x), cast(lora_a), adapter_ids, ranks, plan


_backward_op = define(
    "shrink_backward(Tensor grad_h, Tensor x, Tensor lora_a, Tensor adapter_ids, Tensor? ranks, Tensor? plan, "
    "bool[] needs) -> (Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("shrink"),
)
_op = define(
    "shrink(Tensor x, Tensor lora_a, Tensor adapter_ids, Tensor? ranks=None, Tensor? plan=None) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_straight = straight(_cuda)
