"""`expert_mlp`: the whole expert block of an MoE layer, gate_up, activation, down and the sum over k, with LoRA on both projections."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _checks_experts, launch_experts, reference
from .._checks_experts import Mlp
from .._library import define, once_differentiable
from . import common
from .expert_common import cast_unless_float32, gradient_of, kept_shape
from .prepared import prepared, straight

# positions of what the backward op has gradients for, in its order
DIFFERENTIABLE = tuple(
    Mlp._fields.index(name)
    for name in "x topk_weights w_gate_up w_down gate_up_a gate_up_b down_a down_b b_gate_up b_down".split()
)


def expert_mlp(
    x: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, K]
    topk_weights: Tensor,  # [T, K]
    w_gate_up: Tensor,  # [E, 2I, H] or [E, 2, I, H]; [E, I, H] ungated
    w_down: Tensor,  # [E, H, I]
    gate_up_a: Tensor | None,  # [L, E|1, r, H] or [L, E|1, 2, r, H]
    gate_up_b: Tensor | None,  # [L, E|1, 2I, r] or [L, E|1, 2, I, r]
    down_a: Tensor | None,  # [L, E|1, r, I]
    down_b: Tensor | None,  # [L, E|1, H, r]
    adapter_ids: Tensor | None,  # [T]
    scalings: Tensor | None,  # [L]
    *,
    b_gate_up: Tensor | None = None,  # [E, 2I] or [E, 2, I]; [E, I] ungated
    b_down: Tensor | None = None,  # [E, H]
    activation: str = "swiglu",
    activation_limit: float | None = None,
    router_weight: str = "pre_down",
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[t] = Σ_k down_e(act(gate_up_e(x[t]))), e = topk_ids[t, k], weighted by topk_weights[t, k] where router_weight says.

    Each stage of a route is computed in float32 and rounded once to x's dtype:
      xₖ = x · weight (`input` only; else x itself)            h1 = W_gate_up xₖ + delta            h1 = h1 + b_gate_up
      a = act(h1), · weight before the rounding (`pre_down`)   h2 = W_down a + delta
      h2 = h2 + b_down (`pre_down`: + b_down · weight)         y = Σ_k h2 (`post_down`: h2 · weight, not rounded), in
    slot order 0 … K−1 in float32, rounded once. delta = scalings[l] · B[l, e] (A[l, e] input), l = adapter_ids[t]; a
    delta of zero (no LoRA, B = 0, adapter −1) leaves the bits of the same call without LoRA.

    activation: `swiglu` silu(g) · u; `swigluoai` g · sigmoid(1.702 g) · (u + 1); `geglu_tanh` gelu_tanh(g) · u; ungated
    `relu2` relu(h1)². activation_limit, for the first two: g = min(g, limit), u = clamp(u, −limit, limit); None: no clamp.
    topk_ids: int32 or int64; −1 or E = masked: adds nothing and reads nothing. topk_weights: float32 or x's dtype; they
    keep their bits until the product. Weights: x's dtype, any strides, used where they lie (halves of gate and up:
    the first and second I rows, or an axis of their own). Biases: x's dtype or float32. Each LoRA pair may be None, and
    scalings where both are. Factors: x's dtype, or float32, which take part rounded to x's dtype and get float32
    gradients; an expert dimension of 1 is shared by all experts. ranks, adapter_ids and plan (not read without LoRA) as
    in `expert_delta`.

    Returns [T, H], exactly zero where nothing is routed, whatever x and the weights hold.
    Differentiable in x, topk_weights, the base weights and biases and the LoRA factors. Saved for the backward: the
    arguments, h1 [T·K, 2I], the plan and, on a GPU in bf16, scalings · A input of both projections, 4 bytes for each of
    T·K · r (the op `torch.ops.grouped_lora.expert_mlp` called directly saves the arguments and computes these anew); a,
    and for the weights of `post_down` h2, are computed anew. The gradient of a rounded stage is rounded once
    to x's dtype, that of x after the sum over k in float32; weights are never divided by. Second derivatives raise
    RuntimeError.

    Raises ValueError before anything is launched for arguments that do not fit together, and on the CPU for ids out of
    range; TypeError for wrong types.
    """
    args = (
        x, topk_ids, topk_weights, w_gate_up, w_down, gate_up_a, gate_up_b, down_a, down_b, adapter_ids, scalings,
        b_gate_up, b_down, activation, activation_limit, router_weight, ranks, plan,
    )  # fmt: skip
    done, y = _straight(*args)
    if done:
        return y
    m = Mlp(*args)
    _checks_experts.mlp_types("expert_mlp", m)
    if torch.is_grad_enabled() and any(m[i] is not None and m[i].requires_grad for i in DIFFERENTIABLE):
        return _train_op(*m)[0]
    return _op(*m)


def _checked(values: bool, args: tuple) -> tuple[Mlp, _checks_experts.MlpDims]:
    """All arguments, of which the dispatcher leaves out trailing ones that have their default value, and their sizes."""
    m = Mlp(*args)
    dims = _checks_experts.mlp("expert_mlp", m)
    if values:
        _checks_experts.id_values(
            "expert_mlp", "topk_ids", m.topk_ids, dims.down.experts, m.adapter_ids, dims.slots, m.ranks, dims.rank
        )
    return m, dims


def _reference(run, m: Mlp):
    names = ("b_gate_up", "b_down", "activation", "activation_limit", "router_weight", "ranks")
    return run(*m[:11], **{name: getattr(m, name) for name in names})


def _cpu(*args):
    return _reference(reference.expert_mlp, _checked(True, args)[0])


def _train_cpu(*args):
    m, _ = _checked(True, args)
    return *_reference(reference.expert_mlp_train, m), m.x.new_empty(0), m.x.new_empty(0), m.topk_ids.new_empty(0, dtype=torch.int32)


@prepared
def _cuda(*args):
    from . import expert_cuda

    return expert_cuda.mlp(*_checked(common.may_check_values(args[0]), args)[0])


@prepared
def _train_cuda(*args):
    from . import expert_cuda

    return expert_cuda.mlp_train(*_checked(common.may_check_values(args[0]), args)[0])


def _fake(*args):
    m, _ = _checked(False, args)
    return m.x.new_empty(m.x.shape)


def _train_fake(*args):
    m, dims = _checked(False, args)
    experts, plan, shapes = dims.down.experts, 0, [(0,), (0,)]
    if m.x.is_cuda:
        shapes = [kept_shape(m.x, a, b, m.topk_ids, experts) for a, b in ((m.gate_up_a, m.gate_up_b), (m.down_a, m.down_b))]
        if m.plan is None and (m.gate_up_a is not None or m.down_a is not None):
            plan = launch_experts.plan_size(dims.down.tokens * dims.down.top_k, experts, dims.slots, torch.sym_min)
    return (
        m.x.new_empty(m.x.shape),
        m.x.new_empty(dims.down.tokens * dims.down.top_k, dims.gate_up.out_features),
        *[m.x.new_empty(shape) for shape in shapes],
        m.topk_ids.new_empty(plan, dtype=torch.int32),
    )


def _backward_cpu(grad_y, h1, h_gate_up, h_down, made, *args):
    x = args[0]
    grads = reference.expert_mlp_backward(grad_y, h1, *args)
    return tuple([x.new_empty(0) if g is None else g for g in grads])


@functools.partial(prepared, needs=23)
def _backward_cuda(*args):
    from . import expert_cuda

    return expert_cuda.mlp_backward(*args)


def _backward_fake(grad_y, h1, h_gate_up, h_down, made, *args):
    needs = args[-1]
    return tuple([gradient_of(args[i], need, args[0]) for need, i in zip(needs, DIFFERENTIABLE)])


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.choices = inputs[13:16]
    kept = [None] * 4
    if not isinstance(output, Tensor):
        kept = output[1:]
        ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*kept, *inputs[:13], *inputs[16:])


def _grad(ctx, grad_y, *_):
    result = [None] * len(Mlp._fields)
    if grad_y is None:  # not materialised: nobody used y, and h1's zeros would cost an allocation as large as h1
        return tuple(result)
    saved = ctx.saved_tensors
    needs = [common.needs_grad(ctx, i) for i in DIFFERENTIABLE]
    grads = _backward_op(grad_y, *saved[:17], *ctx.choices, *saved[17:], needs)
    for i, need, grad in zip(DIFFERENTIABLE, needs, grads):
        result[i] = grad if need else None
    return tuple(result)


def _autocast(cast, *args):
    m = Mlp(*args)
    narrow = {name: cast(getattr(m, name)) for name in ("x", "w_gate_up", "w_down")}
    names = ("topk_weights", "gate_up_a", "gate_up_b", "down_a", "down_b", "b_gate_up", "b_down")
    return m._replace(**narrow, **{name: cast_unless_float32(cast, getattr(m, name)) for name in names})


_ARGUMENTS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? gate_up_a, "
    "Tensor? gate_up_b, Tensor? down_a, Tensor? down_b, Tensor? adapter_ids, Tensor? scalings"
)
_OPTIONS = (
    "Tensor? b_gate_up=None, Tensor? b_down=None, str activation='swiglu', float? activation_limit=None, "
    "str router_weight='pre_down', Tensor? ranks=None, Tensor? plan=None"
)
_backward_op = define(
    "expert_mlp_backward(Tensor grad_y, Tensor? h1, Tensor? h_gate_up, Tensor? h_down, Tensor? made, "
    f"{_ARGUMENTS}, Tensor? b_gate_up, Tensor? b_down, str activation, "
    "float? activation_limit, str router_weight, Tensor? ranks, Tensor? plan, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("expert_mlp"),
)
_op = define(
    f"expert_mlp({_ARGUMENTS}, {_OPTIONS}) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_straight = straight(_cuda, op=_op)
_train_op = define(
    f"expert_mlp_train({_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_train_cpu,
    cuda=_train_cuda,
    fake=_train_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
