"""A decoder of our own with the llama layout's names, its q/k/v and gate/up apart or fused as serving engines have them."""

from __future__ import annotations

import copy

import torch
from torch import nn

CONFIG = dict(
    model_type="llama",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
)
QKV, GATE_UP = (32, 16, 16), (40, 40)


class Attention(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        if fused:
            self.qkv_proj = nn.Linear(32, sum(QKV), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj, self.fused = nn.Linear(32, 32, bias=False), fused

    def forward(self, x):
        q, k, v = self.qkv_proj(x).split(QKV, -1) if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        heads = torch.tanh(q).unflatten(-1, (-1, 2, 8)) * (k * v).unflatten(-1, (-1, 1, 8))  # two for each of k and v
        return self.o_proj(heads.flatten(-3))


class Mlp(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        if fused:
            self.gate_up_proj = nn.Linear(32, sum(GATE_UP), bias=False)
        else:
            self.gate_proj, self.up_proj = nn.Linear(32, 40, bias=False), nn.Linear(32, 40, bias=False)
        self.down_proj, self.fused = nn.Linear(40, 32, bias=False), fused

    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(GATE_UP, -1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(nn.functional.silu(gate) * up)


class Toy(nn.Module):
    def __init__(self, fused: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.self_attn, layer.mlp = Attention(fused), Mlp(fused)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer.self_attn(x))
            x = x + torch.tanh(layer.mlp(x))
        return x


def merged(model: nn.Module, layout, adapter) -> nn.Module:
    """A copy with scaling · B A in its weights; fused modules take their members' one below the other."""
    model = copy.deepcopy(model)
    for path, lora in adapter.modules.items():
        place = layout.locate(path)
        owner = model.get_submodule(path.rpartition(".")[0].removeprefix("model."))
        delta = lora.scaling * (lora.lora_b.double() @ lora.lora_a.double())
        leaf, row = place.projection.facts.leaf, 0
        if not hasattr(owner, leaf):
            family = place.projection.facts.family
            sizes = dict(zip(("q_proj", "k_proj", "v_proj"), QKV)) if family == "qkv_proj" else dict(gate_proj=40, up_proj=40)
            row, leaf = sum(list(sizes.values())[: list(sizes).index(leaf)]), family
        weight = getattr(owner, leaf).weight
        with torch.no_grad():
            weight[row : row + len(delta)] = (weight[row : row + len(delta)].double() + delta).to(weight.dtype)
    return model
