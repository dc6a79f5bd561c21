"""Two steps of tensor parallelism that autograd sees through."""

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


def sum_over(t: Tensor, group) -> Tensor:
    """Σ over the group's ranks; what is computed from it is the same on all ranks, so the gradient is complete."""
    return _Sum.apply(t, group)


def enter_columns(t: Tensor, group) -> Tensor:
    """t, before ranks compute different columns from it: its gradient is summed over them."""
    return _Enter.apply(t, group)
