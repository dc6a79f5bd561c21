"""What the expert ops share beside `common`: optional gradients, master copies under autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gradient_of(t: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    """A dense gradient of t, or an empty stand-in where none is wanted."""
    return t.new_empty(t.shape) if wanted else x.new_empty(0)


def cast_unless_float32(cast: Callable, t: Tensor | None) -> Tensor | None:
    """Autocast for what may be float32 beside a narrower x: such a tensor keeps its bits."""
    return t if t is None or t.dtype == torch.float32 else cast(t)


def kept_shape(x: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, ids: Tensor, experts: int) -> tuple:
    """Of what training keeps of a projection's LoRA: scaling · A x of every route in two bf16, [M, G, 2, r]; (0,) where it keeps nothing."""
    if lora_a is None or x.dtype != torch.bfloat16:
        return (0,)
    slots, features, rank = lora_a.shape[0], lora_a.shape[-1], lora_a.shape[-2]
    if not (lora_a.shape[1] == lora_b.shape[1] == experts > 1 and slots and features and rank) or rank % 8:  # one A: h may be a token's
        return (0,)
    return ids.shape[0] * ids.shape[1], lora_a.shape[2] if lora_a.dim() == 5 else 1, 2, rank
