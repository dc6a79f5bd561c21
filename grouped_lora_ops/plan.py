"""The readable view of a plan tensor, and how to refill one in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import launch_experts
from ._checks import dtype_name


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
            f"grouped_lora.plan: plan must be int32 [T + {num_slots + 2}]; got {dtype_name(plan.dtype)} "
            f"{list(plan.shape)}."
        )
    return PlanView(plan[:tokens], plan[tokens:])


def refill(plan: Tensor, adapter_ids: Tensor, num_slots: int) -> None:
    """Make `plan` the plan of other ids, in place: what a captured graph replays, or a buffer that outlives a batch."""
    plan.copy_(torch.ops.grouped_lora.plan(adapter_ids, num_slots))


class ExpertPlanView(NamedTuple):
    """The parts of `expert_plan`'s tensor, views of it.

    For topk_ids = [[1, 0], [1, −1]], adapter_ids = [0, −1], E = 2 experts and L = 1 slot the routes' pairs e · 2 + l are
    [2, 0, 3, masked 4], and the plan says:
    rows   = [1, 0, 2, 3]: expert 0's route, expert 1's with adapter 0, expert 1's without one, the masked route.
    ends   = [1, 3]: behind expert 0's last route, behind expert 1's. count = [4] tiles.
    pairs  = [0, 2, 3, 4], starts = [0, 1, 2, 3 | 4]: the tiles and, at the end, M; −1 and M where there is room for more.
    """

    rows: Tensor  # [M], the order that `grouped_mm` wants
    ends: Tensor  # [E], its offsets
    count: Tensor  # [1]
    pairs: Tensor  # [room]
    starts: Tensor  # [room + 1]


def expert_view(plan: Tensor, routes: int, num_experts: int, num_slots: int) -> ExpertPlanView:
    """Take the plan of M routes, E experts and L slots apart; no copy."""
    size = launch_experts.plan_size(routes, num_experts, num_slots)
    if plan.dim() != 1 or plan.dtype != torch.int32 or plan.shape[0] != size:
        raise ValueError(
            f"grouped_lora.expert_plan: plan must be int32 [{size}] for {routes} routes, {num_experts} experts and "
            f"{num_slots} slots; got {dtype_name(plan.dtype)} {list(plan.shape)}."
        )
    room = launch_experts.plan_room(routes, num_experts, num_slots)
    return ExpertPlanView(*plan.split([routes, num_experts, 1, room, room + 1]))
