"""The activations of `expert_mlp` and their gradients, in the dtype of the sums: a function of an expert's rows [n, U]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ALPHA = 1.702  # swigluoai's sigmoid
ACTIVATIONS = ("swiglu", "swigluoai", "geglu_tanh", "relu2")
# At the limit itself torch.clamp's gradient is 1 up to torch 2.13, and 0 from 2.14 on. The parent's is torch's, so ours is, too.
PASSES_AT_LIMIT = tuple([int(part) for part in torch.__version__.split(".")[:2]]) < (2, 14)


def _gate_up(h: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, -1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def activate(h: Tensor, activation: str, limit: float | None) -> Tensor:
    """swiglu: silu(g) · u; swigluoai: g · sigmoid(1.702 g) · (u + 1); geglu_tanh: gelu_tanh(g) · u; relu2: relu(h)².

    g = min(gate, limit) and u = clamp(up, −limit, limit) where there is a limit (swiglu and swigluoai).
    """
    if activation == "relu2":
        return F.relu(h).square()
    gate, up = _gate_up(h, limit)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return gate * torch.sigmoid(gate * ALPHA) * (up + 1)


def activate_backward(grad: Tensor, h: Tensor, activation: str, limit: float | None) -> Tensor:
    """The gradient of `activate` in h: zero where a clamp is active; at the limit itself as in the torch that is there."""
    if activation == "relu2":
        return torch.where(h > 0, grad * (2 * F.relu(h)), 0)
    gate, up = _gate_up(h, limit)
    if activation == "swiglu":
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        d_up = grad * F.silu(gate)
    elif activation == "geglu_tanh":
        d_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        d_up = grad * F.gelu(gate, approximate="tanh")
    else:
        sigmoid = torch.sigmoid(gate * ALPHA)
        inner = grad * (up + 1)
        d_gate = inner * sigmoid + torch.ops.aten.sigmoid_backward(inner * gate, sigmoid) * ALPHA
        d_up = grad * (gate * sigmoid)
    if limit is not None:
        raw_gate, raw_up = h.chunk(2, -1)
        within = torch.le if PASSES_AT_LIMIT else torch.lt
        d_gate = torch.where(within(raw_gate, limit), d_gate, 0)
        d_up = torch.where(within(raw_up, limit) & within(-raw_up, limit), d_up, 0)
    return torch.cat([d_gate, d_up], -1)
