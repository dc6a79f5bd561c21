"""`expert_linear`: y = (x Wᵀ + s · B (A x) + bias) · w over the routes of an MoE layer, rounded once."""

from __future__ import annotations

import functools

from torch import Tensor

from .. import _checks_experts, reference
from .._library import define, once_differentiable
from . import common
from .expert_common import cast_unless_float32, gradient_of
from .prepared import prepared, straight


def expert_linear(
    x: Tensor,  # [T, D] or [T·K, D]
    weight: Tensor,  # [E, N, D] or [E, 2, N/2, D]
    lora_a: Tensor | None,  # [L, E|1, r, D] or [L, E|1, 2, r, D]
    lora_b: Tensor | None,  # [L, E|1, N, r] or [L, E|1, 2, N/2, r]
    expert_ids: Tensor,  # [T, K]
    adapter_ids: Tensor | None,  # [T]
    scalings: Tensor | None,  # [L]
    *,
    bias: Tensor | None = None,  # [E, N] or [E, 2, N/2]
    row_weights: Tensor | None = None,  # [T·K]
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[m] = (W[e] x[m] + scalings[l] · B[l, e] (A[l, e] x[m]) + bias[e]) · row_weights[m]: m = t·K + k, l = adapter_ids[t], e = expert_ids[t, k].

    weight: x's dtype, any strides, used where it lies: packed, interleaved and transposed storage come in as views, the
    halves of gate and up as an axis of their own where one stride cannot name both. bias: likewise; its dtype and that
    of row_weights is x's or float32. lora_a and lora_b may be None together (then scalings may be, too): the base
    alone, which reads no plan. The other arguments are those of `expert_delta`, with E = weight's experts.

    Rounding: base, delta, bias and row_weights meet in float32, rounded once to x's dtype. A delta of zero leaves the
    bits of the op without LoRA. Masked routes give zero rows and read nothing. Returns a new tensor [T·K, N].
    Differentiable in x (summed over k in float32 where it is [T, D]), weight, lora_a, lora_b, bias and row_weights;
    saved for the backward: the arguments (h, and for row_weights y, are computed anew). Second derivatives raise
    RuntimeError.

    Raises ValueError before anything is launched for arguments that do not fit together, and on the CPU for ids out of
    range; TypeError for wrong types.
    """
    args = (x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan)
    done, y = _straight(*args)
    if done:
        return y
    _checks_experts.tensor_types(
        "expert_linear",
        {"x": x, "weight": weight, "expert_ids": expert_ids},
        {
            "lora_a": lora_a,
            "lora_b": lora_b,
            "adapter_ids": adapter_ids,
            "scalings": scalings,
            "bias": bias,
            "row_weights": row_weights,
            "ranks": ranks,
            "plan": plan,
        },
    )
    return _op(*args)


def _checked(values, x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan):
    name = "expert_linear"
    dims = _checks_experts.linear(
        name, x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan
    )
    if values:
        _checks_experts.id_values(
            name, "expert_ids", expert_ids, dims.experts, adapter_ids, dims.slots, ranks, dims.rank
        )
    return dims


def _cpu(
    x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias=None, row_weights=None, ranks=None, plan=None
):
    args = (x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings)
    _checked(True, *args, bias, row_weights, ranks, plan)
    return reference.expert_linear(*args, bias=bias, row_weights=row_weights, ranks=ranks)


@prepared
def _cuda(
    x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias=None, row_weights=None, ranks=None, plan=None
):
    from . import expert_cuda

    args = (x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan)
    _checked(common.may_check_values(x), *args)
    return expert_cuda.linear(*args)


def _fake(
    x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias=None, row_weights=None, ranks=None, plan=None
):
    args = (x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan)
    dims = _checked(False, *args)
    return x.new_empty(dims.tokens * dims.top_k, dims.out_features)


def _backward_cpu(grad_y, x, *args):
    grads = reference.expert_linear_backward(grad_y, x, *args)
    return tuple([x.new_empty(0) if g is None else g for g in grads])


@functools.partial(prepared, needs=12)
def _backward_cuda(*args):
    from . import expert_cuda

    return expert_cuda.linear_backward(*args)


def _backward_fake(
    grad_y, x, weight, lora_a, lora_b, expert_ids, adapter_ids, scalings, bias, row_weights, ranks, plan, needs
):
    inputs = (x, weight, lora_a, lora_b, bias, row_weights)
    return tuple([gradient_of(t, need, x) for need, t in zip(needs, inputs)])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grad(ctx, grad_y):
    needs = [common.needs_grad(ctx, i) for i in (0, 1, 2, 3, 7, 8)]
    grads = _backward_op(grad_y, *ctx.saved_tensors, needs)
    dx, dweight, da, db, dbias, dw = [g if need else None for g, need in zip(grads, needs)]
    return dx, dweight, da, db, None, None, None, dbias, dw, None, None


def _autocast(
    cast,
    x,
    weight,
    lora_a,
    lora_b,
    expert_ids,
    adapter_ids,
    scalings,
    bias=None,
    row_weights=None,
    ranks=None,
    plan=None,
):
    a, b, bias, w = (cast_unless_float32(cast, t) for t in (lora_a, lora_b, bias, row_weights))
    return cast(x), cast(weight), a, b, expert_ids, adapter_ids, scalings, bias, w, ranks, plan


_backward_op = define(
    "expert_linear_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor? lora_a, Tensor? lora_b, Tensor expert_ids, "
    "Tensor? adapter_ids, Tensor? scalings, Tensor? bias, Tensor? row_weights, Tensor? ranks, Tensor? plan, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("expert_linear"),
)
_op = define(
    "expert_linear(Tensor x, Tensor weight, Tensor? lora_a, Tensor? lora_b, Tensor expert_ids, Tensor? adapter_ids, "
    "Tensor? scalings, Tensor? bias=None, Tensor? row_weights=None, Tensor? ranks=None, Tensor? plan=None) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_straight = straight(_cuda, op=_op)
