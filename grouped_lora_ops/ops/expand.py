"""`expand` and `expand_`: y = base + scaling · h Bᵀ."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _checks, driver, launch, reference
from .._library import define, once_differentiable
from . import common
from .prepared import prepared, prepared_in_place, straight
from .shrink import run as run_shrink
from .wgrad import wgrad


def expand(
    h: Tensor,  # [T, r] or [T, G, r]
    lora_b: Tensor,  # [L, N, r], [L, G, N, r] or [L, ΣN, r]
    adapter_ids: Tensor,  # [T]
    scalings: Tensor,  # [L]
    *,
    base: Tensor | None = None,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,  # [L]
    plan: Tensor | None = None,
) -> Tensor:
    """y[t, g] = base[t, g] + scalings[l] · B[l, g] h[t, g] with l = adapter_ids[t].

    h: [T, r] or [T, G, r] float32, from `shrink`. lora_b: [L, N, r] or [L, G, N, r] (a flat group-major [L, G·N, r] is
    a view of it); with out_sizes [N0, N1, …] it is [L, ΣN, r] and group g of h makes slice g. scalings: [L] float32.
    base: y's shape, lora_b's dtype; without it y is the delta alone. ranks, plan, adapter_ids: as in `shrink`.

    Returns a new tensor [T, N], [T, G, N] or [T, ΣN] in lora_b's dtype: products and sums in float32 (with bf16 weights
    h enters as two bf16 terms, 16 bits of it; with fp16 weights as two fp16 terms, 22 bits of the row's largest), scaled and added to base in
    float32, one rounding. Where the delta is zero base keeps its bits. Differentiable in h, lora_b, base.

    Raises as `shrink` does.
    """
    done, y = _straight(h, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    if done:
        return y
    _checks.tensor_types(
        "expand",
        {"h": h, "lora_b": lora_b, "adapter_ids": adapter_ids, "scalings": scalings},
        {"base": base, "ranks": ranks, "plan": plan},
    )
    _checks.out_sizes_type("expand", out_sizes)
    return _op(h, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)


def expand_(
    out: Tensor,
    h: Tensor,
    lora_b: Tensor,
    adapter_ids: Tensor,
    scalings: Tensor,
    *,
    out_sizes: list[int] | None = None,
    ranks: Tensor | None = None,
    plan: Tensor | None = None,
) -> None:
    """out[t, g] += scalings[l] · B[l, g] h[t, g], in place; `expand` with base=out, without a new tensor.

    Rows without an adapter are not written. Raises ValueError also where an operand requires grad (use `expand`), or
    out overlaps an operand.
    """
    if _straight_(out, h, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)[0]:
        return
    _checks.tensor_types(
        "expand_",
        {"out": out, "h": h, "lora_b": lora_b, "adapter_ids": adapter_ids, "scalings": scalings},
        {"ranks": ranks, "plan": plan},
    )
    _checks.out_sizes_type("expand_", out_sizes)
    _op_(out, h, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)


def fill_base(base: Tensor | None, out: Tensor) -> None:
    """out where there is nothing to add: base, or zeros, by PyTorch's kernels."""
    driver.refuse()
    if base is None:
        out.zero_()
    elif base is not out:
        out.copy_(base)


def run(
    name: str,
    h: Tensor,  # [chunks, T, G or 1, r] float32, unit last stride
    b: Tensor,  # [L, G or 1, N, r]
    base: Tensor | None,
    out: Tensor,  # [T, G or 1, N]
    adapter_ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    sizes: tuple | None,
    sum_groups: int,
    copy: bool,
) -> None:
    """Write out by our kernel; arguments already checked. copy: also rows without an adapter."""
    tokens, groups, features = out.shape
    slots, rank = b.shape[0], b.shape[3]
    if out.numel() == 0:
        return
    if rank == 0 or slots == 0 or sum_groups == 0:
        fill_base(base, out)
        return
    from ..kernels import expand as kernels

    config = common.configured(launch.expand, common.problem(out, tokens, groups, 0, features, rank, slots))
    plan = common.plan_for(adapter_ids, slots, plan, config.mode == launch.PLAN)
    kernels.expand(name, h, b, base, out, adapter_ids, plan, ranks, scalings, sizes, sum_groups, copy, config)


def _run(name, dims, h, lora_b, base, out, adapter_ids, scalings, ranks, plan, copy):
    hg = common.grouped(h, 3)
    if dims.rank and hg.stride(2) != 1:
        hg = hg.contiguous()
    sizes = dims.out_sizes if dims.h_grouped else None
    outg = common.grouped(out, 3)
    baseg = outg if base is out else None if base is None else common.grouped(base, 3)
    run(
        name, hg[None], common.grouped(lora_b, 4), baseg, outg, adapter_ids, plan,
        common.contiguous(ranks), common.contiguous(scalings), sizes, 1, copy,
    )  # fmt: skip


def output_shape(dims: _checks.Dims) -> tuple:
    return (dims.tokens, dims.groups, dims.out_features) if dims.y_grouped else (dims.tokens, dims.out_features)


def _cpu(h, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    dims = _checks.expand("expand", h, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    _checks.id_values("expand", adapter_ids, dims.slots, ranks, dims.rank)
    return reference.expand(h, lora_b, adapter_ids, scalings, base=base, out_sizes=out_sizes, ranks=ranks)


@prepared
def _cuda(h, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    dims = _checks.expand("expand", h, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    common.check_values("expand", adapter_ids, dims.slots, ranks, dims.rank)
    out = driver.empty(output_shape(dims), lora_b.dtype, h.device)
    _run("expand", dims, h, lora_b, base, out, adapter_ids, scalings, ranks, plan, True)
    return out


def _fake(h, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    dims = _checks.expand("expand", h, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan)
    return h.new_empty(output_shape(dims), dtype=lora_b.dtype)


def _cpu_(out, h, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    dims = _checks.expand("expand_", h, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan, out)
    _checks.id_values("expand_", adapter_ids, dims.slots, ranks, dims.rank)
    reference.expand_(out, h, lora_b, adapter_ids, scalings, out_sizes=out_sizes, ranks=ranks)


@prepared_in_place(3)
def _cuda_(out, h, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    dims = _checks.expand("expand_", h, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan, out)
    common.check_values("expand_", adapter_ids, dims.slots, ranks, dims.rank)
    _run("expand_", dims, h, lora_b, out, out, adapter_ids, scalings, ranks, plan, False)
    torch.autograd.graph.increment_version(out)


def _fake_(out, h, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    _checks.expand("expand_", h, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan, out)


def _backward_cpu(grad_y, h, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs):
    grads = reference.expand_backward(
        grad_y, h, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs
    )
    return tuple([t.new_empty(0) if g is None else g for g, t in zip(grads, (h, lora_b))])


def grad_h(name, grad_y, h_groups: int, h_grouped: bool, lora_b, adapter_ids, scalings, out_sizes, ranks, plan) -> Tensor:
    """dh [T, G, r] = scalings[l] · grad_y B, summed over groups that share h: a shrink by B transposed."""
    dy, b = common.grouped(grad_y, 3), common.grouped(lora_b, 4)
    sizes = tuple(out_sizes) if out_sizes is not None and h_grouped else None
    if not h_grouped and dy.shape[1] != 1:  # all groups' products are one sum
        dy, b = dy.flatten(1).unsqueeze(1), b.flatten(1, 2).unsqueeze(1)
    return run_shrink(name, dy, b.transpose(2, 3), h_groups, adapter_ids, ranks, plan, scalings, sizes)


def grad_b(name, grad_y, h, h_grouped: bool, lora_b, db, adapter_ids, scalings, out_sizes, ranks, plan) -> None:
    """dB[l, g] = scalings[l] · Σ_t grad_y[t, g]ᵀ h[t, g] into db; h is [T, G or 1, r]."""
    sizes = tuple(out_sizes) if out_sizes is not None and h_grouped else None
    dbt = common.grouped(db, 4).transpose(2, 3)
    wgrad(name, h, common.grouped(grad_y, 3), dbt, adapter_ids, plan, ranks, scalings, sizes)


@functools.partial(prepared, needs=8)
def _backward_cuda(grad_y, h, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs):
    name = "expand_backward"
    hg, h_grouped, slots = common.grouped(h, 3), h.dim() == 3, lora_b.shape[0]
    ranks, scalings = common.contiguous(ranks), common.contiguous(scalings)
    if h.shape[-1] and hg.stride(2) != 1:
        hg = hg.contiguous()
    if (needs[1] or launch.needs_plan(h.shape[0], slots)) and slots > 1 and h.shape[0] > 0:
        plan = common.plan_for(adapter_ids, slots, plan, True)
    dh, db = common.nothing(h), common.empty_like_unless(needs[1], lora_b)
    if needs[0]:
        dh = grad_h(name, grad_y, hg.shape[1], h_grouped, lora_b, adapter_ids, scalings, out_sizes, ranks, plan)
        dh = dh.view(h.shape)
    if needs[1]:
        grad_b(name, grad_y, hg, h_grouped, lora_b, db, adapter_ids, scalings, out_sizes, ranks, plan)
    return dh, db


def _backward_fake(grad_y, h, lora_b, adapter_ids, scalings, out_sizes, ranks, plan, needs):
    return tuple([common.empty_like_unless(need, t) for need, t in zip(needs, (h, lora_b))])


def _setup(ctx, inputs, output):
    h, lora_b, adapter_ids, scalings, _, ctx.out_sizes, ranks, plan = inputs
    ctx.save_for_backward(h, lora_b, adapter_ids, scalings, ranks, plan)


def _grad(ctx, grad_y):
    h, lora_b, adapter_ids, scalings, ranks, plan = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:2])
    dh = db = None
    if any(needs):
        dh, db = _backward_op(grad_y, h, lora_b, adapter_ids, scalings, ctx.out_sizes, ranks, plan, needs)
    base = grad_y if common.needs_grad(ctx, 4) else None
    return dh if needs[0] else None, db if needs[1] else None, None, None, base, None, None, None


def _autocast(cast, h, lora_b, adapter_ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
    return h, cast(lora_b), adapter_ids, scalings, cast(base), out_sizes, ranks, plan


def _autocast_(cast, out, h, lora_b, adapter_ids, scalings, out_sizes=None, ranks=None, plan=None):
    return out, h, lora_b.to(out.dtype), adapter_ids, scalings, out_sizes, ranks, plan


_backward_op = define(
    "expand_backward(Tensor grad_y, Tensor h, Tensor lora_b, Tensor adapter_ids, Tensor scalings, SymInt[]? out_sizes, "
    "Tensor? ranks, Tensor? plan, bool[] needs) -> (Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=once_differentiable("expand"),
)
_op = define(
    "expand(Tensor h, Tensor lora_b, Tensor adapter_ids, Tensor scalings, Tensor? base=None, SymInt[]? out_sizes=None, "
    "Tensor? ranks=None, Tensor? plan=None) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_grad,
    setup_context=_setup,
    autocast=_autocast,
)
_op_ = define(
    "expand_(Tensor(a!) out, Tensor h, Tensor lora_b, Tensor adapter_ids, Tensor scalings, SymInt[]? out_sizes=None, "
    "Tensor? ranks=None, Tensor? plan=None) -> ()",
    cpu=_cpu_,
    cuda=_cuda_,
    fake=_fake_,
    autocast=_autocast_,
)
_straight, _straight_ = straight(_cuda), straight(_cuda_, in_place=True)
