"""What the dense ops share: the facts of a device, the group axis, the plan a launch needs, the device guard."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from .. import _checks, driver, launch

INTERPRETER = ("sm_80", 4)  # (arch, multiprocessors) where Triton's interpreter runs the kernels on the CPU


@functools.cache
def _facts(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return f"sm_{properties.major}{properties.minor}", properties.multi_processor_count


def facts(t: Tensor) -> tuple[str, int]:
    """(arch, multiprocessors) of t's device."""
    return _facts(t.device.index) if t.is_cuda else INTERPRETER


def device_of(t: Tensor):
    """`with device_of(t):` t's device is the current one: kernels launch in its context, on its current stream."""
    device = t.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def on_device(run):
    """Run with the first tensor's device current."""

    @functools.wraps(run)
    def guarded(*args, **kwargs):
        with device_of(args[0] if args else next(iter(kwargs.values()))):
            return run(*args, **kwargs)

    return guarded


def may_check_values(t: Tensor) -> bool:
    """Whether ids are read and checked on the GPU too: with GROUPED_LORA_CHECK=1, except inside a capture."""
    return _checks.CHECK_IDS and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def check_values(name: str, adapter_ids: Tensor, slots: int, ranks: Tensor | None, rank: int) -> None:
    """ValueError for ids and ranks out of range, where they may be read."""
    if may_check_values(adapter_ids):
        _checks.id_values(name, adapter_ids, slots, ranks, rank)


def grouped(t: Tensor, ndim: int) -> Tensor:
    """t with its group axis at 1, of size 1 where it has none."""
    return t if t.dim() == ndim else t.unsqueeze(1)


def rows_of_vectors(t: Tensor | None, unit: int = -1) -> bool:
    """Whether t's elements lie side by side along axis `unit`, and every such row starts at a multiple of 16 bytes; axes of size 1
    have no stride that counts."""
    if t is None:
        return True
    each = 16 // t.element_size()
    axes = [axis for axis in range(t.dim()) if axis != unit % t.dim() and t.shape[axis] != 1]
    side_by_side = t.stride(unit) == 1 or t.shape[unit] == 1
    return side_by_side and t.data_ptr() % 16 == 0 and all(t.stride(axis) % each == 0 for axis in axes)


def stride(t: Tensor | None, axis: int) -> int:
    """The stride that csrc/ is given: 0 along an axis of size 1, which all of a larger one's places share."""
    return 0 if t is None or t.shape[axis] == 1 else t.stride(axis)


def slice_starts(sizes: tuple | None, most: int) -> list[int]:
    """Where each of `most` slices starts, and the last one ends: zeros without slices and behind them."""
    starts = [0] * (most + 1)
    for i, size in enumerate(sizes or ()):
        starts[i + 1] = starts[i] + size
    return starts


def contiguous(t: Tensor | None) -> Tensor | None:
    """ranks and scalings are read with unit stride."""
    return t if t is None or t.stride(0) == 1 else t.contiguous()


def problem(
    t: Tensor, tokens: int, groups: int, in_features: int, out_features: int, rank: int, slots: int, shared_a: bool = False,
    stacked: bool = False,
) -> launch.Problem:  # fmt: skip
    arch, sms = facts(t)
    return launch.Problem(arch, sms, t.element_size(), tokens, groups, in_features, out_features, rank, slots, shared_a, stacked)


@functools.lru_cache(maxsize=4096)
def configured(choose, *args):
    """`choose(*args)` of launch.py, which is pure, remembered: choosing anew costs 10 µs a call."""
    return choose(*args)


def plan_for(adapter_ids: Tensor, slots: int, plan: Tensor | None, required: bool) -> Tensor | None:
    """The plan a launch reads: none where it does not need one, else the caller's or one made here."""
    if not required or plan is not None:
        return plan if required else None
    from .plan import build

    return build(adapter_ids, slots)


def empty_like_unless(wanted: bool, like: Tensor) -> Tensor:
    """A dense tensor of like's shape, or an empty stand-in for a gradient nobody asked for."""
    return driver.empty(like.shape, like.dtype, like.device) if wanted else nothing(like)


def nothing(like: Tensor) -> Tensor:
    """An empty stand-in."""
    return driver.empty((0,), like.dtype, like.device)


def needs_grad(ctx, position: int) -> bool:
    """ctx.needs_input_grad[position]; the dispatcher drops trailing arguments that have their default value."""
    return position < len(ctx.needs_input_grad) and ctx.needs_input_grad[position]
