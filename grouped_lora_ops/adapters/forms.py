"""An adapter as the tensors and the configuration of a file: peft's, peft's with a pair for every expert, or a serving one."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layouts import Model, Place
from .adapter import Adapter, Base, ExpertModule, LoraModule, scaled
from .experts import wrap

FORMS = ("peft", "experts", "serving")
PEFT_VERSION = "0.19.1"  # the release whose form of 3-D parameters is written; later ones read the same


def make(adapter: Adapter, model: Model, base: Base, form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by their name in the file, adapter_config.json)."""
    if form != "peft":
        adapter = _an_a_each(adapter, model)
    if form == "serving":
        adapter = uniform(zero_filled(adapter, model))
    adapter = in_order(adapter, model)
    tensors: dict[str, Tensor] = {}
    entries: list[tuple[str, int, float]] = []  # (pattern of a path, rank, scaling)
    modules: dict[str, None] = {}
    parameters: list[str] = []
    for path, lora in adapter.modules.items():
        _add(tensors, path, lora.lora_a, lora.lora_b)
        if form == "peft" and path.rpartition(".")[2] in model.layout.peft_fused:
            # as a module peft would take it for the experts'; as a parameter it is left alone
            path = f"{path}.weight"
            parameters.append(path)
        else:
            modules[path] = None
        entries.append((re.escape(path), lora.rank, lora.scaling))
    owners: dict[str, list[tuple[str, Place, ExpertModule]]] = {}
    for path, expert in adapter.experts.items():
        owners.setdefault(path.rpartition(".")[0], []).append((path, model.locate(path), expert))
    for owner, found in owners.items():
        found.sort(key=lambda one: not one[1].projection.gated)
        for path, place, expert in found:
            p = place.projection
            if form == "peft":
                inner = p.gated and len(found) == 2
                a, b, rank = wrap(expert, p.experts, p.gated, model.layout.experts)
                _add(tensors, f"{owner}.base_layer" if inner else owner, a, b)
                entries.append((re.escape(path), rank, expert.scaling))
                parameters.append(path)
                continue
            leaves = [member[0] for member in p.facts.members]
            names = _expert_tensors(tensors, owner, leaves, expert, p.experts, form)
            if all(model.path(layer, p) in adapter.experts for layer in p.layers):
                # the same for every layer: peft compares every name with every module
                names = [name[len(f"{model.prefix}.{place.layer}.") :] for name in names]
            modules.update(dict.fromkeys(names))
            entries.append((re.escape(owner) + rf"\.(\d+\.)?({'|'.join(leaves)})", expert.rank, expert.scaling))
    config = {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "task_type": adapter.config.get("task_type"),
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
    }
    if parameters:
        config["target_parameters"] = parameters
    return tensors, config | _scaling_fields(entries)


def _add(tensors: dict[str, Tensor], path: str, a: Tensor, b: Tensor) -> None:
    for factor, tensor in (("A", a), ("B", b)):  # a copy: factors that share memory cannot be written
        tensors[f"base_model.model.{path}.lora_{factor}.weight"] = tensor.detach().cpu().contiguous().clone()


def _expert_tensors(tensors, owner, leaves, expert: ExpertModule, experts: int, form: str) -> list[str]:
    """A pair for every expert; a serving form keeps factors that all experts share as stacks. Returns target names."""
    halves = [(leaves[0], expert.lora_a, expert.lora_b)]
    if len(leaves) == 2:
        halves = list(zip(leaves, expert.lora_a.unbind(1), expert.lora_b.chunk(2, 1)))
    shared = experts > 1 and (len(expert.lora_a) == 1 or len(expert.lora_b) == 1)
    names = []
    for leaf, a, b in halves:
        if form == "serving" and shared:
            _add(tensors, f"{owner}.{leaf}", a, b)
            names.append(f"{owner}.{leaf}")
            continue
        for e in range(experts):
            _add(tensors, f"{owner}.{e}.{leaf}", a[e if len(a) > 1 else 0], b[e if len(b) > 1 else 0])
            names.append(f"{owner}.{e}.{leaf}")
    return names


def alpha_of(scaling: float, rank: int, rslora: bool) -> float | None:
    """The alpha that a reader turns into this scaling: in float64 if there is one, else in float32."""
    divisor = math.sqrt(rank) if rslora else rank
    alpha = scaling * divisor
    near = [alpha]
    for direction in (math.inf, -math.inf):
        value = alpha
        for _ in range(3):
            value = math.nextafter(value, direction)
            near.append(value)
    exact = [a for a in near if a / divisor == scaling]
    close = [a for a in near if torch.tensor(a / divisor, dtype=torch.float32) == torch.tensor(scaling, dtype=torch.float32)]
    found = (exact or close or [None])[0]
    return int(found) if found is not None and found.is_integer() else found


def _scaling_fields(entries: list[tuple[str, int, float]]) -> dict[str, Any]:
    """r, lora_alpha and the patterns for what differs from them. Each pattern matches one path, so their order is free."""
    for rslora in (False, True):
        alphas = [alpha_of(scaling, rank, rslora) for _, rank, scaling in entries]
        if None not in alphas:
            break
    else:
        raise ValueError("the scalings have no alphas that give them back.")
    ranks = [rank for _, rank, _ in entries]
    r, alpha = (max(set(values), key=lambda v: (values.count(v), v)) for values in (ranks, alphas))
    return {
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "rank_pattern": {pattern: rank for (pattern, rank, _) in entries if rank != r},
        "alpha_pattern": {pattern: a for (pattern, _, _), a in zip(entries, alphas) if a != alpha},
    }


def zero_filled(adapter: Adapter, model: Model) -> Adapter:
    """The adapter with every family complete, which serving engines fuse: absent members get zero factors."""
    modules = dict(adapter.modules)
    for family in model.families.values():
        for layer in family[0].layers:
            paths = [model.path(layer, p) for p in family]
            present = [modules[path] for path in paths if path in modules]
            for p, path in zip(family, paths) if present else ():
                if path not in modules:
                    like = present[0]
                    a = like.lora_a.new_zeros(like.rank, p.in_features)
                    modules[path] = LoraModule(a, like.lora_b.new_zeros(p.total_out, like.rank), like.rank, like.scaling)
    return replace(adapter, modules=modules)


def in_order(adapter: Adapter, model: Model) -> Adapter:
    """The same adapter, layer by layer and in the layout's order: equal adapters make equal files."""
    paths = [place.path for place in model.places([p.path for p in model.projections])]
    modules, experts = ({p: found[p] for p in paths if p in found} for found in (adapter.modules, adapter.experts))
    return replace(adapter, modules=modules, experts=experts)


def _an_a_each(adapter: Adapter, model: Model) -> Adapter:
    experts = {
        path: m.with_an_a_each() if model.locate(path).projection.gated else m for path, m in adapter.experts.items()
    }
    return replace(adapter, experts=experts)


def uniform(adapter: Adapter) -> Adapter:
    """The adapter with one rank and one scaling, for readers that know no patterns: zero rows and columns pad the ranks,
    and ratios of scalings go into B (exact in its dtype for powers of two, else in float32)."""
    everything = [*adapter.modules.values(), *adapter.experts.values()]
    rank = max(m.rank for m in everything)
    scaling = max((m.scaling for m in everything), key=abs)

    def pad(m):
        a = torch.nn.functional.pad(m.lora_a, (0, 0, 0, rank - m.rank))
        b = torch.nn.functional.pad(m.lora_b, (0, rank - m.rank))
        ratio = m.scaling / scaling if scaling else 1.0
        return replace(m, lora_a=a, lora_b=b if ratio == 1 else scaled(b, ratio), rank=rank, scaling=scaling)

    experts = {path: pad(m) for path, m in adapter.experts.items()}
    return replace(adapter, modules={path: pad(m) for path, m in adapter.modules.items()}, experts=experts)
