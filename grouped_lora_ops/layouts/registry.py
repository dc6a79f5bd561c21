"""Which layout a model has, how far it can be trusted, and what of a model is supported."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import deepseek, dense, moe
from .facts import Layout, MissingKey, Shard, Status
from .model import TEXT_MODEL, Model, Share

_LAYOUTS: dict[str, Layout] = {}


class UnstableLayout(UserWarning):
    """A layout whose facts may change, for a reason that the warning states."""


def register(layout: Layout) -> Layout:
    """Add a layout. ValueError if its name or one of its model types is taken."""
    for taken in _LAYOUTS.values():
        both = set(taken.model_types) & set(layout.model_types)
        if taken.name == layout.name or both:
            what = f"model type {', '.join(sorted(both))}" if both else "name"
            raise ValueError(f"grouped_lora_ops.layouts.register: the {what} of {layout.name} is that of {taken.name}.")
    _LAYOUTS[layout.name] = layout
    return layout


def unregister(name: str) -> None:
    del _LAYOUTS[name]


def known() -> tuple[Layout, ...]:
    """Every registered layout."""
    return tuple(_LAYOUTS.values())


for _layout in (*dense.LAYOUTS, *moe.LAYOUTS, *deepseek.LAYOUTS):
    register(_layout)


def read_config(source: str | os.PathLike | Mapping[str, Any] | Any) -> dict[str, Any]:
    """A model's configuration as a dictionary: from a config.json, its directory, a mapping, or an object with to_dict().

    Of a multimodal model it is the text model's, with the outer model type if that has a layout.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"grouped_lora_ops.layouts: {path} does not exist.")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"grouped_lora_ops.layouts: {path} is not readable JSON: {error}.") from None
    elif isinstance(source, Mapping):
        config = source
    elif hasattr(source, "to_dict"):
        config = source.to_dict()
    else:
        hint = "; pass its .config" if hasattr(source, "config") else ""
        raise TypeError(
            "grouped_lora_ops.layouts: a model must be given as a folder, a config.json, a mapping or a config with to_dict(); "
            f"got {type(source).__name__}{hint}."
        )
    if not isinstance(config, Mapping):
        raise ValueError(f"grouped_lora_ops.layouts: a model's config must be an object; got {type(config).__name__}.")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = {k: config[k] for k in ("quantization_config", "_name_or_path") if config.get(k) is not None}
        kind = config.get("model_type") if _find(config.get("model_type")) else text.get("model_type")
        config = {**outer, **text, "model_type": kind, TEXT_MODEL: True}
    return dict(config)


def _find(model_type: str | None) -> Layout | None:
    return next((layout for layout in _LAYOUTS.values() if model_type in layout.model_types), None)


def of(source: str | os.PathLike | Mapping[str, Any] | Any) -> Model:
    """The layout of a model, with its sizes. source: see `read_config`.

    Errors: ValueError if no layout knows the model type, or the configuration lacks a size or holds impossible ones.
    A layout that is UNSTABLE warns (`UnstableLayout`) with its reason.
    """
    config = read_config(source)
    layout = _find(config.get("model_type"))
    if layout is None:
        raise ValueError(
            f"grouped_lora_ops.layouts.of: no layout for model type {config.get('model_type')!r}; "
            f"there are layouts for {', '.join(t for known in _LAYOUTS.values() for t in known.model_types)}."
        )
    try:
        model = Model(layout, config)
    except MissingKey as error:
        raise ValueError(f"grouped_lora_ops.layouts.of: the config of a {layout.name} model lacks {error}.") from None
    except KeyError as error:
        raise ValueError(f"grouped_lora_ops.layouts.of: the config of a {layout.name} model lacks {error.args[0]}.") from None
    if layout.status is Status.UNSTABLE:
        warnings.warn(f"layout {layout.name} is UNSTABLE: {layout.reason}", UnstableLayout, stacklevel=2)
    return model


@dataclass(frozen=True)
class Preflight:
    """What `preflight` found; print it, or look at `ok`."""

    model_type: str | None
    layout: str | None
    status: Status | None
    supported: tuple[str, ...]
    missing: tuple[str, ...]  # what keeps the model, or a part of it, from being adapted
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.layout is not None and not self.missing

    def __str__(self) -> str:
        head = f"{self.model_type}: " + (f"layout {self.layout}, {self.status.value}" if self.layout else "no layout")
        lines = [f"  + {line}" for line in self.supported] + [f"  - {line}" for line in self.missing]
        return "\n".join([head, *lines, *(f"  note: {line}" for line in self.notes)])


def preflight(source: str | os.PathLike | Mapping[str, Any] | Any, *, share: Share | None = None) -> Preflight:
    """Say, from a model's config.json alone, what can be adapted and what is missing. No GPU, no weights, no warning.

    share: also check that every projection divides among so many ranks.
    """
    config = read_config(source)
    layout = _find(config.get("model_type"))
    if layout is None:
        line = f"there is no layout for this model type; known: {', '.join(t for k in _LAYOUTS.values() for t in k.model_types)}"
        return Preflight(config.get("model_type"), None, None, (), (line,))
    supported, missing, sized, notes = [], [], [], list(layout.notes)
    if layout.reason:
        notes.insert(0, f"{layout.status.value}: {layout.reason}")
    if not isinstance(config.get("num_hidden_layers"), int):
        missing.append("num_hidden_layers is not in the config")
    else:
        for p in layout.projections:
            try:
                one = Model.__new__(Model)
                one.layout, one.config = layout, config
                if p.when(config) and len(p.layers(config)):
                    sized.append(one._sized(p))
            except MissingKey as error:
                missing.append(f"{p.path}: {error} is not in the config")
            except ValueError as error:
                missing.append(f"{p.path}: {error}")
    for p in sized:
        if share is not None:
            try:
                p.part(share)
            except ValueError as error:
                missing.append(str(error).removeprefix("grouped_lora_ops.layouts: "))
        shape = f"{p.in_features} → {p.out_features}"
        shape = f"{p.groups} groups of {shape}" if p.groups else f"{p.experts} experts of {shape}" if p.experts else shape
        layers = f"layers {p.layers[0]}–{p.layers[-1]}" if len(p.layers) > 1 else f"layer {p.layers[0]}"
        optional = "" if p.facts.default else ", only if named"
        supported.append(f"{p.path}: {shape}, {p.facts.shard.value}, {len(p.layers)} of {layers}{optional}")
    for name, reason in layout.refused.items():
        notes.append(f"{name} is refused: {reason}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        notes.append(f"base weights are quantised ({method}): deltas apply, the fused linear ops need plain weights")
        if method == "fp8" and list(config["quantization_config"].get("weight_block_size") or []) == [128, 128]:
            notes.append("e4m3 weights with 128 × 128 scales: linear multiplies them as they are (weight_scale)")
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        if config.get(key):
            notes.append(f"the {config[key]} multi-token-prediction layer(s) are not adapted")
    if layout.experts is not None and any(p.facts.shard is Shard.EXPERT for p in sized):
        e = layout.experts
        notes.append(
            f"experts: {e.activation}, router weight {e.router_weight}, "
            f"{'[E, in, out]' if e.transposed else '[E, out, in]'}{', gate and up interleaved' if e.interleaved else ''}"
        )
    return Preflight(config.get("model_type"), layout.name, layout.status, tuple(supported), tuple(missing), tuple(notes))
