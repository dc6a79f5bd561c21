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
