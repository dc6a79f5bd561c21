"""The adapter buffers of one dense module, made of several adapters at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import dtype_name
from .adapter import Adapter


class Stacked(NamedTuple):
    """The adapter buffers of one module, in the order in which the ops take them."""

    lora_a: Tensor  # [L, r, D]
    lora_b: Tensor  # [L, N, r] or [L, G, N, r]
    scalings: Tensor  # [L] float32
    ranks: Tensor  # [L] int32


def stack_adapters(
    adapters: Sequence[Adapter | None],
    module: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    groups: int | None = None,
    group_range: tuple[int, int] | None = None,
    slots: int | None = None,
) -> Stacked:
    """Stack one module of several adapters into the ops' buffers: slot l holds adapters[l].

    Returns (lora_a [L, r, D], lora_b [L, N, r], scalings [L] float32, ranks [L] int32) with r the largest rank; smaller
    ranks are padded with zeros. With groups=G, B's rows are G groups of N and lora_b is [L, G, N, r], A shared by all;
    group_range=(lo, hi) keeps groups lo … hi−1, a tensor-parallel rank's share. slots=L leaves room for more adapters
    than are given; those slots, and the place of a None in adapters, hold zeros, scaling 0 and rank 0. Factors are cast
    to dtype once, each tensor is contiguous and new.

    Errors: one ValueError that lists everything wrong: an adapter without this module, adapters that disagree in a
    feature count, out features that groups does not divide, a group range that is empty or out of bounds, fewer slots
    than adapters, a factor that overflows dtype.
    """
    problems: list[str] = []
    found = {l: adapter.modules.get(module) for l, adapter in enumerate(adapters) if adapter is not None}
    for l, lora in found.items():
        if lora is None:
            near = [m for m in adapters[l].modules if m.rsplit(".", 1)[-1] == module.rsplit(".", 1)[-1]]
            near = near or list(adapters[l].modules)
            more = f", … ({len(near)})" if len(near) > 3 else ""
            problems.append(
                f"adapters[{l}] ({adapters[l].path}) has no module {module}; it has {', '.join(near[:3])}{more}."
            )
    present = {l: lora for l, lora in found.items() if lora is not None}
    if not found:
        problems.append("adapters must hold at least one adapter.")
    num_slots = len(adapters) if slots is None else slots
    if num_slots < len(adapters):
        problems.append(f"slots must be at least the number of adapters, {len(adapters)}; got {slots}.")
    if group_range is not None and groups is None:
        problems.append("group_range needs groups, the number of groups of the whole module.")
    if groups is not None and groups < 1:
        problems.append(f"groups must be at least 1; got {groups}.")
    elif groups is not None:
        lo, hi = group_range if group_range is not None else (0, groups)
        if not 0 <= lo < hi <= groups:
            problems.append(f"group_range must satisfy 0 <= lo < hi <= groups = {groups}; got ({lo}, {hi}).")
    if present:
        first_slot, first = next(iter(present.items()))
        in_features, out_features = first.lora_a.shape[1], first.lora_b.shape[0]
        for l, lora in present.items():
            sizes = (lora.lora_a.shape[1], lora.lora_b.shape[0])
            if sizes != (in_features, out_features):
                problems.append(
                    f"adapters[{l}] must have in and out features ({in_features}, {out_features}) as adapters[{first_slot}] "
                    f"has; got {sizes}."
                )
        if groups is not None and groups >= 1 and out_features % groups:
            problems.append(f"groups must divide the module's {out_features} out features; got {groups}.")
    if not problems:
        rank = max(lora.rank for lora in present.values())
        if groups is None:
            columns, b_shape = slice(None), (out_features,)
        else:
            size = out_features // groups
            columns, b_shape = slice(lo * size, hi * size), (hi - lo, size)
        lora_a = torch.zeros(num_slots, rank, in_features, dtype=dtype, device=device)
        lora_b = torch.zeros(num_slots, *b_shape, rank, dtype=dtype, device=device)
        scalings, ranks = [0.0] * num_slots, [0] * num_slots
        for l, lora in present.items():
            a, b = lora.lora_a.to(dtype), lora.lora_b[columns].to(dtype)
            for name, factor in (("A", a), ("B", b)):
                if not factor.isfinite().all():
                    problems.append(
                        f"adapters[{l}]'s {name} of {module} overflows {dtype_name(dtype)}."
                    )
            lora_a[l, : lora.rank] = a.to(device)
            lora_b[l, ..., : lora.rank] = b.view(*b_shape, lora.rank).to(device)
            scalings[l], ranks[l] = lora.scaling, lora.rank
    if problems:
        raise ValueError(
            f"grouped_lora_ops.adapters.stack_adapters: {module} cannot be stacked:"
            + "".join(f"\n  - {problem}" for problem in problems)
        )
    return Stacked(
        lora_a,
        lora_b,
        torch.tensor(scalings, dtype=torch.float32, device=device),
        torch.tensor(ranks, dtype=torch.int32, device=device),
    )
