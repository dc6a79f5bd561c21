"""The gradient of a low-rank factor, used by the backwards of shrink, expand and delta."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import driver, launch
from . import common


def wgrad(
    name: str,
    narrow: Tensor,  # [T, G or 1, r] float32, unit last stride
    wide: Tensor,  # [T, G or 1, W]
    out: Tensor,  # [L, G or 1, r, W], any strides; written whole
    adapter_ids: Tensor,
    plan: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    sizes: tuple | None = None,
) -> None:
    """out[l, g] = s_l Σ_t narrow[t, g]ᵀ wide[t, g], summed over the groups where out has one and both inputs have G."""
    if out.numel() == 0:
        return
    if wide.shape[0] == 0:
        driver.refuse()
        out.zero_()
        return
    from ..kernels import wgrad as kernels

    slots, groups, rank, width = out.shape
    sum_groups = narrow.shape[1] if groups == 1 and sizes is None else 1
    parts_of = len(sizes) if sizes is not None else groups
    problem = common.problem(wide, wide.shape[0], parts_of, width, 0, rank, slots)
    config = common.configured(launch.wgrad, problem, width if sizes is None else max(sizes))
    plan = common.plan_for(adapter_ids, slots, plan, config.mode == launch.PLAN)
    parts = driver.empty((config.tiles, groups, rank, width), torch.float32, wide.device)
    kernels.wgrad(name, narrow, wide, parts, out, adapter_ids, plan, ranks, scalings, sizes, sum_groups, config)
