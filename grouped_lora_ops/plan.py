"""The readable view of a plan tensor, and how to refill one in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PlanView(NamedTuple):
    """A plan's parts, views of the one tensor.

    For adapter_ids = [1, −1, 0, 1] and L = 2 slots the plan is [2, 0, 3, 1 | 0, 1, 3, 4]:
    rows   = [2, 0, 3, 1]: row 2 has slot 0, rows 0 and 3 slot 1, row 1 no adapter.
    starts = [0, 1, 3, 4]: slot 0 begins at position 0, slot 1 at 1, the rows without an adapter at 3, and 4 = T.
    """

    rows: Tensor  # [T]
    starts: Tensor  # [L + 2]

    def of_slot(self, slot: int) -> Tensor:
        """The rows of a slot (slot = L: those without an adapter). Reads the starts: synchronises on a GPU."""
        return self.rows[int(self.starts[slot]) : int(self.starts[slot + 1])]


def view(plan: Tensor, num_slots: int) -> PlanView:
    """Take a plan tensor of `num_slots` slots apart; no copy."""
    tokens = plan.shape[0] - num_slots - 2
    if plan.dim() != 1 or plan.dtype != torch.int32 or tokens < 0:
        raise ValueError(
            f"grouped_lora.plan: plan must be int32 [T + {num_slots + 2}]; got {str(plan.dtype).removeprefix('torch.')} "
            f"{list(plan.shape)}."
        )
    return PlanView(plan[:tokens], plan[tokens:])


def refill(plan: Tensor, adapter_ids: Tensor, num_slots: int) -> None:
    """Make `plan` the plan of other ids, in place: what a captured graph replays, or a buffer that outlives a batch."""
    plan.copy_(torch.ops.grouped_lora.plan(adapter_ids, num_slots))
