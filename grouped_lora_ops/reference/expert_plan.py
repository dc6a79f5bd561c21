"""Which routes belong to which (expert, adapter slot) pair, and in which tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import launch_experts


def route_pairs(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    """[M] the pair e · (L + 1) + l of every route t·K + k; l = L without an adapter; E · (L + 1) where masked."""
    tokens, per_token = topk_ids.shape
    ids = topk_ids.reshape(-1).long()
    if adapter_ids is None:
        slots = torch.zeros_like(ids)
    else:
        slots = adapter_ids.long()
        slots = torch.where((slots >= 0) & (slots < num_slots), slots, num_slots)
        slots = slots[:, None].expand(tokens, per_token).reshape(-1)
    pairs = launch_experts.pairs(num_experts, num_slots)
    return torch.where((ids >= 0) & (ids < num_experts), ids * (num_slots + 1) + slots, pairs)


def expert_plan(topk_ids: Tensor, adapter_ids: Tensor | None, num_experts: int, num_slots: int) -> Tensor:
    """The plan of a layer's routing: routes sorted by (expert, slot), stable, and cut into tiles.

    plan[:M] lists the routes pair by pair: expert by expert, inside it slot by slot, then those without an adapter;
    masked routes last. plan[M : M+E] holds the position behind each expert's last route, as `grouped_mm` wants it.
    plan[M+E] counts the tiles: runs of at most `launch_experts.plan_rows` routes of one pair. Then follow, with room
    for as many as any ids can make, the tiles' pairs (−1 where there is none) and the tiles' first positions (M where
    there is none), and one more M.
    """
    pair = route_pairs(topk_ids, adapter_ids, num_experts, num_slots)
    device, routes = pair.device, pair.shape[0]
    rows = torch.argsort(pair, stable=True)
    in_order = pair[rows]
    experts = torch.arange(1, num_experts + 1, device=device) * (num_slots + 1)
    ends = torch.searchsorted(in_order, experts)
    height, room = (f(routes, num_experts, num_slots) for f in (launch_experts.plan_rows, launch_experts.plan_room))
    position = torch.arange(routes, device=device)
    first = (position - torch.searchsorted(in_order, in_order)) % height == 0
    starts = position[first]
    count = starts.shape[0]
    tile_pairs = torch.full((room,), -1, device=device)
    tile_pairs[:count] = in_order[starts]
    tile_starts = torch.full((room + 1,), routes, device=device)
    tile_starts[:count] = starts
    return torch.cat([rows, ends, torch.tensor([count], device=device), tile_pairs, tile_starts]).to(torch.int32)
