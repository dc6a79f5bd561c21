"""delta under DDP while one of two ranks never has a token."""

from __future__ import annotations

import sys

import pytest
import torch
import two_ranks

import grouped_lora_ops as gl

G, D, N, R, L = 2, 8, 6, 3, 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = torch.nn.Parameter(torch.randn(L, R, D, generator=generator))
        self.b = torch.nn.Parameter(torch.randn(L, G, N, R, generator=generator))

    def forward(self, x, ids):
        return gl.delta(x, self.a, self.b, ids, torch.ones(L))


def step(model, number, empty):
    generator = torch.Generator().manual_seed(number)
    x, ids = torch.randn(5, G, D, generator=generator), torch.tensor([0, 1, -1, 0, 1])
    return model(x[:0], ids[:0]).square().sum() if empty else model(x, ids).square().sum()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo's file store")
def test_a_rank_without_tokens(tmp_path):
    two_ranks.check(tmp_path, Layer, step, lr=0.1)
