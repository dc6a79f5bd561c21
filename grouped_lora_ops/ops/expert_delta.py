"""`expert_delta`: y = base + w · s · B (A x) over the routes of an MoE layer."""

from __future__ import annotations

import functools

from torch import Tensor

from .. import _checks_experts, reference
from .._library import define, once_differentiable
from . import common
from .expert_common import cast_unless_float32, gradient_of
from .prepared import prepared, straight


def expert_delta(
    x: Tensor,  # [T, D] or [T·K, D]
    lora_a: Tensor,  # [L, E|1, r, D] or [L, E|1, 2, r, D]
    lora_b: Tensor,  # [L, E|1, N, r] or [L, E|1, 2, N/2, r]
    expert_ids: Tensor,  # [T, K]
    adapter_ids: Tensor | None,  # [T]
    scalings: Tensor,  # [L]
    *,
    base: Tensor | None = None,  # [T·K, N]
    row_weights: Tensor | None = None,  # [T·K]
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[m] = base[m] + row_weights[m] · scalings[l] · B[l, e] (A[l, e] x[m]): m = t·K + k, l = adapter_ids[t], e = expert_ids[t, k].

    x: [T, D], every route of token t reads row t; or [T·K, D], a row for each route. bf16, fp16 or fp32 (fp64 on the CPU).
    lora_a, lora_b: an expert dimension of 1 is shared by all experts (never repeated in memory; its gradient is the
    sum over experts). Where both are shared, E = 1: an id is 0 or masked; where the layer has more experts, expand one
    of the two, `lora_b.expand(-1, E, -1, -1)`, which copies nothing. gate and up: an A each, [L, E|1, 2, r, D], or one
    A together; B's halves are its first and second N/2 rows, or an axis of their own. x's dtype, or float32: such
    factors take part rounded to x's dtype and get float32 gradients.
    expert_ids: int32 or int64; −1 or E = masked (not on this rank): the row is zero, or base's bits, and reads nothing.
    adapter_ids: int32 or int64, −1 = no adapter; None = slot 0 for every token. scalings: float32. ranks: int32, true ranks.
    row_weights: float32 or x's dtype; they multiply the delta alone, in float32.
    plan: from `expert_plan`; one serves every expert op and projection of a layer.

    Rounding: h = x Aᵀ is not rounded to x's dtype, sums run in float32, base joins before the one rounding; where the
    delta is zero base keeps its bits. Returns a new tensor [T·K, N].
    Differentiable in x (summed over k in float32 where it is [T, D]), lora_a, lora_b, base and row_weights; saved for
    the backward: the arguments (h is computed anew). Second derivatives raise RuntimeError.

    Raises ValueError before anything is launched for arguments that do not fit together, and on the CPU for ids out of
    range; TypeError for wrong types.
    """
    args = (x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan)
    done, y = _straight(*args)
    if done:
        return y
    _checks_experts.tensor_types(
        "expert_delta",
        {"x": x, "lora_a": lora_a, "lora_b": lora_b, "expert_ids": expert_ids, "scalings": scalings},
        {"adapter_ids": adapter_ids, "base": base, "row_weights": row_weights, "ranks": ranks, "plan": plan},
    )
    return _op(*args)


def _checked(values, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan):
    name = "expert_delta"
    dims = _checks_experts.delta(
        name, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan
    )
    if values:
        _checks_experts.id_values(
            name, "expert_ids", expert_ids, dims.experts, adapter_ids, dims.slots, ranks, dims.rank
        )
    return dims


def _cpu(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base=None, row_weights=None, ranks=None, plan=None):
    _checked(True, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan)
    return reference.expert_delta(
        x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base=base, row_weights=row_weights, ranks=ranks
    )


@prepared
def _cuda(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base=None, row_weights=None, ranks=None, plan=None):
    from . import expert_cuda

    args = (x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan)
    _checked(common.may_check_values(x), *args)
    return expert_cuda.delta(*args)


def _fake(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base=None, row_weights=None, ranks=None, plan=None):
    dims = _checked(False, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base, row_weights, ranks, plan)
    return x.new_empty(dims.tokens * dims.top_k, dims.out_features)


def _backward_cpu(grad_y, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, row_weights, ranks, plan, needs):
    grads = reference.expert_delta_backward(
        grad_y, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, row_weights, ranks, plan, needs
    )
    return tuple([x.new_empty(0) if g is None else g for g in grads])


@functools.partial(prepared, needs=10)
def _backward_cuda(*args):
    from . import expert_cuda

    return expert_cuda.delta_backward(*args)


def _backward_fake(grad_y, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, row_weights, ranks, plan, needs):
    return tuple([gradient_of(t, need, x) for need, t in zip(needs, (x, lora_a, lora_b, row_weights))])


def _setup(ctx, inputs, output):
    x, lora_a, lora_b, expert_ids, adapter_ids, scalings, _, row_weights, ranks, plan = inputs
    ctx.save_for_backward(x, lora_a, lora_b, expert_ids, adapter_ids, scalings, row_weights, ranks, plan)


def _grad(ctx, grad_y):
    needs = [common.needs_grad(ctx, i) for i in (0, 1, 2, 7)]
    dx = da = db = dw = None
    if any(needs):
        grads = _backward_op(grad_y, *ctx.saved_tensors, needs)
        dx, da, db, dw = [g if need else None for g, need in zip(grads, needs)]
    base = grad_y if common.needs_grad(ctx, 6) else None
    return dx, da, db, None, None, None, base, dw, None, None


def _autocast(
    cast, x, lora_a, lora_b, expert_ids, adapter_ids, scalings, base=None, row_weights=None, ranks=None, plan=None
):
    a, b = (cast_unless_float32(cast, t) for t in (lora_a, lora_b))
    w = cast_unless_float32(cast, row_weights)
    return cast(x), a, b, expert_ids, adapter_ids, scalings, cast(base), w, ranks, plan


_backward_op = define(
    "expert_delta_backward(Tensor grad_y, Tensor x, Tensor lora_a, Tensor lora_b, Tensor expert_ids, "
    "Tensor? adapter_ids, Tensor scalings, Tensor? row_weights, Tensor? ranks, Tensor? plan, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("expert_delta"),
)
_op = define(
    "expert_delta(Tensor x, Tensor lora_a, Tensor lora_b, Tensor expert_ids, Tensor? adapter_ids, Tensor scalings, "
    "Tensor? base=None, Tensor? row_weights=None, Tensor? ranks=None, Tensor? plan=None) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_straight = straight(_cuda)
