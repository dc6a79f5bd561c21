"""A linear layer of a model with LoRA: plain, fused or grouped."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..layouts import Buffer, Shard
from ..ops import delta, delta_, expand, shrink
from .factors import BankFactors, LoraFactors
from .parallel import enter_columns, gather_tokens, scatter_tokens, sum_over
from .routing import Routing
from .weight import stand_in

_WHERE = "grouped_lora_ops.nn.LoraLinear"


class LoraLinear(nn.Module):
    """y = base(x) + scaling · B (A x), in the place of a model's own linear layer.

    x: [..., D], grouped [..., G, D]; y: [..., N], fused [..., ΣN], grouped [..., G, N]. base is called as it is (its hooks
    fire, its class computes); its parameters, buffers and their names are this module's own, the same objects: a
    state_dict has what it had, and `lora.…` beside it where factors are trained. The delta is added in float32 and
    rounded once more; without an adapter, or with B = 0, a row keeps base's bits.

    direct: the parent multiplies with `.weight` itself and never calls this module. `.weight` is then a stand-in (see
    `weight.stand_in`) that adds the delta in that product.
    tp_group: tensor parallelism; x of a column projection is one that all ranks have, and the gradient that the delta
    gives it is summed over the group; h = A x of a row projection is summed before B reads it, and base must
    return the sum over ranks, as it does without LoRA.
    sequence_dim: sequence parallelism; ranks divide the tokens between parallel layers along this dimension of x. A column
    base is given the rank's tokens and returns all of them (only h, r numbers a token, is gathered for the delta), or
    is given all, gathered by a parent whose backward sums over ranks; a row base returns the rank's tokens of the sum; a
    replicated one keeps to the rank's tokens. adapter_ids are those of all tokens.

    Errors: ValueError where base returns other tokens than that; RuntimeError if the weight is not the one that the adapters
    were made for (sliced meanwhile, say) while one is in use; without one the base's result is returned.
    """

    def __init__(
        self,
        base: nn.Module,
        factors: BankFactors | LoraFactors,
        buffer: Buffer,
        routing: Routing,
        *,
        direct: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        state = self.__dict__
        state["base"] = base  # not a child: its parameters would be counted twice
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            state[name] = base.__dict__[name]
        state["factors"] = factors
        if isinstance(factors, LoraFactors):
            self._modules["lora"] = factors
        self.buffer, self.routing, self.direct, self.tp_group = buffer, routing, direct, tp_group
        self.grouped = buffer.kind == "grouped"
        facts = buffer.places[0].projection.facts
        self.shard = facts.shard
        divided = facts.shard in (Shard.COLUMN, Shard.ROW, Shard.REPLICATED) and not facts.whole_sequence
        self.sequence_dim = sequence_dim if divided else None
        self.training = base.training

    def __getattr__(self, name: str):
        if name == "weight" and self.__dict__.get("direct"):
            return stand_in(super().__getattr__(name), self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "base" not in self.__dict__:
                raise
            return getattr(self.__dict__["base"], name)

    def release(self) -> nn.Module:
        """base as it was."""
        self._modules.pop("lora", None)
        return self.base

    def train(self, mode: bool = True) -> LoraLinear:
        self.base.train(mode)
        return super().train(mode)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.base._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args, **kwargs):
        self.base._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{type(self.base).__name__}, {self.buffer.kind}"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.add_delta(x, self.base(x, *args, **kwargs))

    def add_delta(self, x: Tensor, y: Tensor) -> Tensor:
        """y + delta for a y that someone else multiplied out. Without gradients y may be written in place."""
        if self.sequence_dim is not None:
            return self._add_divided(x, y)
        lead = x.shape[: -2 if self.grouped else -1]
        tokens = lead.numel()
        if self.routing.idle(tokens, x.device, isinstance(self.factors, LoraFactors)):
            return y
        self._check_weight()
        with without_autocast(x.device):
            return self._add(x.to(y.dtype), y, lead, tokens)

    def _add(self, x: Tensor, y: Tensor, lead: torch.Size, tokens: int) -> Tensor:
        ids, plan = self.routing.rows(tokens, x.device, lead[0] if len(lead) > 1 and tokens else 1)
        rows, out = x.reshape(tokens, *x.shape[len(lead) :]), y.reshape(tokens, *y.shape[len(lead) :])
        a, b, scalings, ranks = self.factors.stacks(x)
        options = dict(out_sizes=self.factors.out_sizes, ranks=ranks, plan=plan)
        if self.tp_group is not None and self.shard is Shard.ROW:
            h = sum_over(shrink(rows, a, ids, ranks=ranks, plan=plan), self.tp_group)
            return expand(h, b, ids, scalings, base=out, **options).view(y.shape)
        if self.tp_group is not None and self.shard is Shard.COLUMN:
            rows = enter_columns(rows, self.tp_group)
        if torch.is_grad_enabled() or x.requires_grad or y.requires_grad or not y.is_contiguous():
            return delta(rows, a, b, ids, scalings, base=out, **options).view(y.shape)
        delta_(out, rows, a, b, ids, scalings, **options)
        return y

    def _add_divided(self, x: Tensor, y: Tensor) -> Tensor:
        """y + delta where ranks divide the tokens between parallel layers."""
        dim, group, ndim = self.sequence_dim, self.tp_group, x.dim() - 1
        size = torch.distributed.get_world_size(group)
        whole = list(x.shape[:-1])
        gathers = self.shard is Shard.COLUMN and y.shape[:-1] != x.shape[:-1]  # else its parent did
        if gathers or self.shard is Shard.REPLICATED:
            whole[dim] *= size
        expected = list(x.shape[:-1]) if self.shard is Shard.REPLICATED else list(whole)
        if self.shard is Shard.ROW:
            expected[dim] //= size
        if list(y.shape[:-1]) != expected or whole[dim] % size:
            raise ValueError(
                f"{_WHERE}: {self.buffer.key}: base must return tokens {expected} for x {list(x.shape[:-1])} with "
                f"sequence_dim={dim} and {size} ranks; got {list(y.shape[:-1])}."
            )
        tokens = math.prod(whole)
        if self.routing.idle(tokens, x.device, isinstance(self.factors, LoraFactors)):
            return y
        self._check_weight()
        with without_autocast(x.device):
            x = x.to(y.dtype)
            ids, plan = self.routing.rows(tokens, x.device)
            a, b, scalings, ranks = self.factors.stacks(x)
            sizes = self.factors.out_sizes
            rows, out = x.flatten(0, -2), y.flatten(0, -2)
            own = ids.view(whole).chunk(size, dim)[torch.distributed.get_rank(group)].reshape(-1)
            if self.shard is Shard.REPLICATED:
                return delta(rows, a, b, own, scalings, base=out, out_sizes=sizes, ranks=ranks).view(y.shape)
            if self.shard is Shard.COLUMN and not gathers:
                return delta(rows, a, b, ids, scalings, base=out, out_sizes=sizes, ranks=ranks, plan=plan).view(y.shape)
            if self.shard is Shard.COLUMN:
                h = shrink(rows, a, own, ranks=ranks).unflatten(0, x.shape[:-1])
                h = gather_tokens(h, dim, group).flatten(0, ndim - 1)
                return expand(h, b, ids, scalings, base=out, out_sizes=sizes, ranks=ranks, plan=plan).view(y.shape)
            h = shrink(rows, a, ids, ranks=ranks, plan=plan).unflatten(0, x.shape[:-1])
            h = scatter_tokens(h, dim, group).flatten(0, ndim - 1)
            return expand(h, b, own, scalings, base=out, out_sizes=sizes, ranks=ranks).view(y.shape)

    def _check_weight(self) -> None:
        wrong = misfit(self.buffer, self._parameters.get("weight"))
        if wrong:
            raise RuntimeError(
                f"{_WHERE}: {self.buffer.key}: an adapter is in use, but {wrong}: it was loaded for another layout. "
                f"Run this layout without adapters, or attach a bank that is planned for it."
            )


def without_autocast(device: torch.device):
    """What the base computed decides the dtype of the delta, whether autocast reached the base or not."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def misfit(buffer: Buffer, weight: Tensor | None) -> str | None:
    """Why a weight is not the one of a buffer. Packed weights (quantised, not floating point or not 2-D) are not judged."""
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return None
    rows = sum(r.stop - r.start for part in buffer.parts for r in part.rows)
    columns = buffer.parts[0].columns.stop - buffer.parts[0].columns.start
    if tuple(weight.shape) == (rows, columns):
        return None
    return f"weight must be [{rows}, {columns}] for these adapters; got {list(weight.shape)}"
