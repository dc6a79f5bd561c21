"""Which rows belong to which adapter slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def plan(adapter_ids: Tensor, num_slots: int) -> Tensor:
    """The plan of `adapter_ids`: rows sorted by slot (stable), then the slots' first positions.

    plan[:T] lists the rows, slot by slot; rows without an adapter (id outside 0 … L−1) come last.
    plan[T + l] is the position of slot l's first row, plan[T + L] that of the first row without an adapter, and
    plan[T + L + 1] = T. int32, T + L + 2 entries: the size depends on shapes alone.
    """
    bucket = torch.where((adapter_ids >= 0) & (adapter_ids < num_slots), adapter_ids, num_slots)
    rows = torch.argsort(bucket, stable=True)
    slots = torch.arange(num_slots + 2, device=adapter_ids.device, dtype=bucket.dtype)
    starts = torch.searchsorted(bucket[rows].contiguous(), slots)
    return torch.cat([rows, starts]).to(torch.int32)


def slot_rows(adapter_ids: Tensor, num_slots: int) -> Iterator[tuple[int, Tensor]]:
    """(slot, its rows) for every slot that has rows; ids outside 0 … num_slots−1 are skipped."""
    for slot in adapter_ids.unique().tolist():
        if 0 <= slot < num_slots:
            yield slot, (adapter_ids == slot).nonzero()[:, 0]
