"""Which adapter every token has, in one place that all modules of a model read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import dtype_name
from ..ops import plan as make_plan
from ..plan import refill

PLAN_ROWS = 128  # up to here kernels read the ids themselves, and a plan is of no use to them


class Routing:
    """adapter_ids of the batch that runs next, a plan where it is worth one, and fixed tensors for captured graphs.

        routing.set([0, −1])          # a batch of two sequences: the first has slot 0, the second no adapter
        routing.prepare(8)            # T = 8 tokens get tensors of their own, which `set` writes in place from now on
        graph.capture(…)              # they are what the graph reads
        routing.set(next_ids); graph.replay()

    n ids serve any batch whose T tokens are a multiple of n: T/n neighbouring tokens each (n = 1: all; n = batch size: a
    sequence each; n = T: a token each). Tokens are counted as the model flattens them, batch first.
    """

    def __init__(self, num_slots: int, ids: Sequence[int] | None = None):
        self.num_slots = num_slots
        self._ids: Tensor | None = None
        self._active: bool | None = None  # None: the ids are on a GPU and were not looked at
        self._fixed: dict[tuple[int, torch.device], tuple[Tensor, Tensor | None]] = {}
        self._latest: dict[tuple[int, torch.device], tuple[Tensor, Tensor | None]] = {}  # of this `set`
        if ids is not None:
            self.set(ids)

    def __deepcopy__(self, memo):
        """A copied model is told its ids with the original."""
        return self

    @property
    def active(self) -> bool:
        """False where it is known, without asking a device, that no token has an adapter."""
        return self._active is not False

    @property
    def state(self) -> tuple[Tensor | None, bool | None]:
        """The ids that were set and whether any is in use, to be set again later."""
        return self._ids, self._active

    @state.setter
    def state(self, state: tuple[Tensor | None, bool | None]) -> None:
        self._ids, self._active, self._latest = *state, {}
        for key, (fixed, plan) in self._fixed.items():
            self._fill(key[0], fixed, plan)

    def idle(self, tokens: int, device: torch.device, trained: bool) -> bool:
        """Nothing to add to a batch. Not where a graph may be captured, whose next replay has other ids; nor where factors
        are trained, which get gradients of zeros (a data-parallel reduction waits for them)."""
        if (tokens, device) in self._fixed or self.active:  # in this order: a compiled graph then has no guard on the ids
            return False
        return not (trained and torch.is_grad_enabled())

    def set(self, ids: Sequence[int] | Tensor, *, active: bool | None = None) -> None:
        """The slots of the next batch, −1 = no adapter: a list, or an int32 or int64 tensor [n].

        active=False: promise that all are −1, for ids on a GPU. Fixed tensors of T tokens are written in place; where n
        does not divide T they become −1.

        Errors: ValueError for another shape or dtype, and for a listed slot outside −1 … L−1.
        """
        if not isinstance(ids, Tensor):
            ids = list(ids)
            wrong = [i for i in ids if not -1 <= i < self.num_slots]
            if wrong:
                raise ValueError(f"grouped_lora_ops.nn.Routing: ids must be in -1 … {self.num_slots - 1}; got {wrong[0]}.")
            active = any(i >= 0 for i in ids)
            ids = torch.tensor(ids, dtype=torch.int32)
        elif ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"grouped_lora_ops.nn.Routing: ids must be int32 or int64 [n]; got {dtype_name(ids.dtype)} {list(ids.shape)}."
            )
        elif ids.device.type == "cpu":
            active = bool((ids >= 0).any())
        self.state = ids.to(torch.int32, copy=True), active

    def clear(self) -> None:
        """No token has an adapter."""
        self.set([-1])

    def prepare(self, tokens: int, device: torch.device | str) -> Tensor:
        """Fixed tensors for batches of `tokens` tokens on a device, before a graph is captured. Returns the ids [T]."""
        device = torch.empty(0, device=device).device
        if (tokens, device) not in self._fixed:
            with torch.inference_mode(False):  # or they could be written, and saved for a backward, nowhere else
                fixed = torch.full((tokens,), -1, dtype=torch.int32, device=device)
                plan = make_plan(fixed, self.num_slots) if tokens > PLAN_ROWS else None
                self._fill(tokens, fixed, plan)
            self._fixed[tokens, device] = fixed, plan
        return self._fixed[tokens, device][0]

    def _fill(self, tokens: int, fixed: Tensor, plan: Tensor | None) -> None:
        given = 0 if self._ids is None else len(self._ids)
        if given and tokens % given == 0:
            fixed.view(given, -1).copy_(self._ids[:, None].expand(-1, tokens // given))
        else:
            fixed.fill_(-1)
        if plan is not None:
            refill(plan, fixed, self.num_slots)

    def rows(self, tokens: int, device: torch.device, sequences: int = 1) -> tuple[Tensor, Tensor | None]:
        """(adapter_ids [T], plan or None) of a batch of T tokens. sequences: B where the caller sees [B, S, …], else 1.

        Errors: RuntimeError if no ids were set, or for T without fixed tensors inside a capture; ValueError if n does
        not divide T, or an id would go from one sequence into the next.
        """
        if (tokens, device) in self._fixed:
            return self._fixed[tokens, device]
        given = 0 if self._ids is None else len(self._ids)
        if given and given % sequences and sequences % given:
            raise ValueError(
                f"grouped_lora_ops.nn.Routing: there must be an id for each of the batch's {sequences} sequences (or one for "
                f"several whole ones, or as many for each); got {given}."
            )
        if (tokens, device) in self._latest:
            return self._latest[tokens, device]
        if self._ids is None:
            raise RuntimeError("grouped_lora_ops.nn.Routing: no ids were set; say which slot each sequence has with set().")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"grouped_lora_ops.nn.Routing: a capture needs fixed tensors; call prepare({tokens}, device) before it."
            )
        if tokens and (not given or tokens % given):
            raise ValueError(
                f"grouped_lora_ops.nn.Routing: the number of ids must divide the batch's {tokens} tokens; got {given}."
            )
        # new tensors, not the old ones refilled: a backward may still need those
        with torch.inference_mode(False):
            ids = self._ids.to(device).repeat_interleave(tokens // max(given, 1))[:tokens]
            found = ids, make_plan(ids, self.num_slots) if tokens > PLAN_ROWS else None
        self._latest[tokens, device] = found
        return found
