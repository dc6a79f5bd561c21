"""The steps of tensor and sequence parallelism that autograd sees through."""

from __future__ import annotations

import torch
from torch import Tensor


class _Sum(torch.autograd.Function):
    """Forward: the sum over ranks, which all of them have. Backward: the gradient, which all of them have too."""

    @staticmethod
    def forward(ctx, t, group):
        t = t.contiguous().clone()
        torch.distributed.all_reduce(t, group=group)
        return t

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Enter(torch.autograd.Function):
    """Forward: the same tensor. Backward: the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    """Forward: the ranks' tokens, all of them on every rank. Backward: the gradients' sum over ranks, of the own tokens."""

    @staticmethod
    def forward(ctx, t, dim, group):
        ctx.dim, ctx.group = dim, group
        return _all_gather(t, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """Forward: the sum over ranks, of which a rank has its own tokens. Backward: all ranks' gradients, one beside the other."""

    @staticmethod
    def forward(ctx, t, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(t, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


def _collective(name: str, before: str):
    """torch 2.13 renames them, and warns of the names that 2.11 has."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before, None)


_ALL_GATHER = _collective("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _collective("reduce_scatter_single", "reduce_scatter_tensor")


def _all_gather(t: Tensor, dim: int, group) -> Tensor:
    own = t.movedim(dim, 0).contiguous()
    whole = own.new_empty(own.shape[0] * torch.distributed.get_world_size(group), *own.shape[1:])
    _ALL_GATHER(whole, own, group=group)
    return whole.movedim(0, dim)


def _reduce_scatter(t: Tensor, dim: int, group) -> Tensor:
    whole = t.movedim(dim, 0).contiguous()
    own = whole.new_empty(whole.shape[0] // torch.distributed.get_world_size(group), *whole.shape[1:])
    _REDUCE_SCATTER(own, whole, group=group)
    return own.movedim(0, dim)


def sum_over(t: Tensor, group) -> Tensor:
    """Σ over the group's ranks; what is computed from it is the same on all ranks, so the gradient is complete."""
    return _Sum.apply(t, group)


def enter_columns(t: Tensor, group) -> Tensor:
    """t, before ranks compute different columns from it: its gradient is summed over them."""
    return _Enter.apply(t, group)


def gather_tokens(t: Tensor, dim: int, group) -> Tensor:
    """All ranks' t, joined along dim in rank order, before each computes other columns from it (sequence parallelism)."""
    return _Gather.apply(t, dim, group)


def scatter_tokens(t: Tensor, dim: int, group) -> Tensor:
    """The rank's piece along dim of Σ over the group's ranks (sequence parallelism)."""
    return _Scatter.apply(t, dim, group)
