"""expert_mlp under DDP while one of two ranks has no tokens, or only masked ones."""

from __future__ import annotations

import sys

import pytest
import torch
import two_ranks

import grouped_lora_ops as gl

T, K, E, H, INNER, R, L = 5, 2, 4, 8, 6, 3, 2
SHAPES = {
    "gate_up_a": (L, 1, R, H),
    "gate_up_b": (L, E, 2 * INNER, R),
    "down_a": (L, E, R, INNER),
    "down_b": (L, 1, H, R),
    "router": (E, H),
}


class Layer(torch.nn.Module):
    """A router that is trained too, frozen experts, LoRA on both projections."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=g)))
        self.w_gate_up, self.w_down = torch.randn(E, 2 * INNER, H, generator=g), torch.randn(E, H, INNER, generator=g)

    def forward(self, x, adapter_ids, masked):
        weights, ids = (x @ self.router.t()).softmax(-1).topk(K)
        ids = torch.where(masked[:, None], -1, ids)
        factors = (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)
        return gl.expert_mlp(
            x, ids, weights, self.w_gate_up, self.w_down, *factors, adapter_ids, torch.ones(L), router_weight="post_down"
        )


def step(model, number, empty):
    g = torch.Generator().manual_seed(number)
    x, adapters, masked = torch.randn(T, H, generator=g), torch.tensor([0, 1, -1, 0, 1]), torch.zeros(T, dtype=torch.bool)
    if empty and number % 2:
        masked = ~masked
    elif empty:
        x, adapters, masked = x[:0], adapters[:0], masked[:0]
    return model(x, adapters, masked).square().sum()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo's file store")
def test_a_rank_without_tokens(tmp_path):
    two_ranks.check(tmp_path, Layer, step, lr=0.05, clip=1.0, rtol=1e-4, atol=1e-5)
