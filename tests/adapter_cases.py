"""Helpers for tests of adapter files: directories made by hand, and what peft makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from grouped_lora_ops.adapters import read_adapter

PREFIX = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class Directory:
    """An adapter directory that a test fills and spoils."""

    def __init__(self, path: Path, rank: int = 2, alpha: float = 4, **config):
        self.path, self.generator = path, torch.Generator().manual_seed(rank)
        self.config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **config}
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, module: str, factor: str, *shape: int, dtype=torch.float32) -> torch.Tensor:
        tensor = torch.randn(*shape, generator=self.generator).to(dtype)
        self.tensors[f"{PREFIX}{module}.lora_{factor}.weight"] = tensor
        return tensor

    def pair(self, module: str, in_features: int, out_features: int, rank: int | None = None):
        rank = rank or self.config["r"]
        return self.add(module, "A", rank, in_features), self.add(module, "B", out_features, rank)

    def write(self) -> Path:
        self.path.mkdir(exist_ok=True)
        (self.path / CONFIG).write_text(json.dumps(self.config))
        safetensors.torch.save_file(self.tensors, self.path / TENSORS)
        return self.path

    def read(self, model=None, **options):
        return read_adapter(self.write(), model, **options)

    def problems(self, model=None, **options) -> list[str]:
        with pytest.raises(ValueError) as error:
            self.read(model, **options)
        head, *problems = str(error.value).split("\n  - ")
        assert head == (
            f"grouped_lora_ops.adapters.read_adapter: {self.path} cannot be read as it is; nothing was loaded:"
        )
        return problems


def ours(adapter, model) -> dict[str, torch.Tensor]:
    """{module or parameter: delta in float64}, of experts as the model stores them."""
    found = {path: m.scaling * (m.lora_b.double() @ m.lora_a.double()) for path, m in adapter.modules.items()}
    storage = model.layout.experts
    for path, expert in adapter.experts.items():
        (p,) = (p for p in model.projections if path.endswith("." + p.path) and p.experts)
        delta = torch.stack([expert.delta(e) for e in range(p.experts)])
        if p.gated and storage.interleaved:
            delta = torch.stack(delta.chunk(2, 1), 2).flatten(1, 2)
        found[path] = delta.transpose(1, 2) if storage.transposed else delta
    return found


def theirs(peft_model) -> dict[str, torch.Tensor]:
    """The same as peft computes it."""
    found = {}
    for name, module in peft_model.named_modules():
        if not getattr(module, "lora_A", None) or "default" not in module.lora_A:
            continue
        path = name.removeprefix(PREFIX)
        if type(module).__name__ == "ParamWrapper":
            while path.endswith(".base_layer"):
                path = path.removesuffix(".base_layer")
            if module.parameter_name != "weight":
                path = f"{path}.{module.parameter_name}"
            a, b = (getattr(module, f"lora_{f}")["default"].weight.double() for f in "AB")
            if module.num_experts > 1:
                a, b = a.view(module.num_experts, -1, a.shape[-1]), b.view(len(b), -1, module.num_experts)
                swapped = module._did_swap_in_out_features
                delta = torch.einsum("ore,eri->eoi" if swapped else "ore,eri->eio", b, a) * module.scaling["default"]
                torch.testing.assert_close(module.get_delta_weight("default").double(), delta, rtol=1e-4, atol=1e-5)
            else:
                delta = (b @ a) * module.scaling["default"]
            found[path] = delta.detach()
        else:
            a, b = (getattr(module, f"lora_{f}")["default"].weight.double() for f in "AB")
            found[path] = (b @ a).detach() * module.scaling["default"]
    return found


def assert_same_deltas(got: dict, want: dict, tolerance: float = 1e-12) -> None:
    assert sorted(got) == sorted(want)
    for path in want:
        torch.testing.assert_close(got[path], want[path], rtol=tolerance, atol=tolerance, msg=lambda m, path=path: f"{path}: {m}")


def random_adapter(model, selectors=None, rank=3, scaling=0.75, dtype=torch.float32, shared_outer=False, seed=0, each=True):
    """An adapter of a layout with random factors, made without any file."""
    from grouped_lora_ops.adapters import Adapter, ExpertModule, LoraModule

    g, modules, experts = torch.Generator().manual_seed(seed), {}, {}

    def random(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    for place in model.places(selectors or [p.path for p in model.projections]):
        p = place.projection
        if p.experts is None:
            modules[place.path] = LoraModule(random(rank, p.in_features), random(p.total_out, rank), rank, scaling)
            continue
        counts = [1 if shared_outer and p.gated == (f == "A") else p.experts for f in "AB"]
        middle = (2,) if p.gated and each else ()
        a, b = random(counts[0], *middle, rank, p.in_features), random(counts[1], p.out_features, rank)
        experts[place.path] = ExpertModule(a, b, rank, scaling)
    return Adapter(None, {}, modules, experts)
