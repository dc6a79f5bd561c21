"""adapter_config.json, by PEFT's rules: what is refused, and what a module's rank and scaling are."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# Fields that say nothing about what the trained factors mean.
_IGNORED = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform lora_alpha lora_dropout megatron_core peft_type peft_version qalora_group_size "
    "r rank_pattern revision runtime_config target_modules task_type use_rslora".split()
)
# Fields of which only these values are read, besides null: with others the delta is not scaling · B A, or not all of it.
_ALLOWED: dict[str, tuple] = {
    "bias": ("none",),
    # pissa, olora, corda, loftq, … train against a base weight that they changed
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_INERT = (None, False, {}, [], "")  # for every other field: switched off


def object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that occurs twice is refused (the last would win, in safetensors headers too)."""
    names = [name for name, _ in pairs]
    twins = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twins:
        raise ValueError(f"{', '.join(twins)} occurs twice")
    return dict(pairs)


def read_config(file: Path, problems: list[str], parameters: bool = False) -> dict[str, Any]:
    """The configuration; what is wrong with it is added to problems. parameters: target_parameters can be read."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=object_without_twins)
    except ValueError as error:
        problems.append(f"{CONFIG} is not readable JSON: {error}.")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{CONFIG} must hold an object; got {type(config).__name__}.")
        return {}

    def require(name: str, valid: bool, what: str) -> None:
        if not valid:
            problems.append(f"{CONFIG}: {name} must be {what}; got {json.dumps(config.get(name))}.")

    require("peft_type", config.get("peft_type") == "LORA", '"LORA"')
    require("r", _is_rank(config.get("r")), "a positive integer")
    require("lora_alpha", _is_number(config.get("lora_alpha")), "a finite number")
    require("use_rslora", isinstance(config.get("use_rslora", False), bool), "true or false")
    for name, valid, what in (
        ("rank_pattern", _is_rank, "an object of positive integers"),
        ("alpha_pattern", _is_number, "an object of finite numbers"),
    ):
        pattern = config.get(name)
        ok = pattern is None or (isinstance(pattern, dict) and all(map(valid, pattern.values())))
        require(name, ok, what)
        if ok:
            for key in pattern or ():
                _check_regex(name, key, problems)
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(name)
        needed = name == "target_modules" and not (parameters and config.get("target_parameters"))
        require(name, _is_text(value) or (value is None and not needed), "a string or a list of strings")
        if isinstance(value, str):
            _check_regex(name, value, problems)
        elif name == "layers_pattern" and _is_text(value):
            for key in value:
                _check_regex(name, key, problems)
    layers = config.get("layers_to_transform")
    indices = layers if isinstance(layers, list) else [layers]
    require("layers_to_transform", layers is None or all(map(_is_index, indices)), "a layer index or a list of them")
    for name in sorted(set(config) - _IGNORED):
        value = config[name]
        if name == "target_parameters" and value:
            if not isinstance(value, list) or not _is_text(value):
                require(name, False, "a list of strings")
            elif not parameters:
                problems.append(f"{CONFIG}: {name} = {json.dumps(value)} can be read only with the model's layout.")
            continue
        allowed = _ALLOWED.get(name, _INERT)
        if not any(value is a or (type(value) is type(a) and value == a) for a in (None, *allowed)):
            problems.append(f"{CONFIG}: {name} = {json.dumps(value)} is not supported.")
    for name in ("target_modules", "exclude_modules", "target_parameters"):
        if isinstance(config.get(name), list) and _is_text(config[name]):
            config[name] = Names(config[name])
    return config


class Names(list):
    """A list of target names that is asked about many modules: an adapter can have 10⁵ of both."""

    def __init__(self, names):
        super().__init__(names)
        self.known = frozenset(names)


@functools.lru_cache(maxsize=1 << 16)
def _pattern(key: str) -> re.Pattern:
    return re.compile(rf"(.*\.)?({key})$")


def resolve(module: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """(rank, scaling) of a module, by PEFT's rules."""
    values = []
    for patterns, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        patterns = config.get(patterns) or {}
        key = next((key for key in patterns if _pattern(key).match(module)), None)
        values.append(config[default] if key is None else patterns[key])
    rank, alpha = values
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora", False) else alpha / rank


def naming(field: str | list[str] | None, module: str) -> list[str]:
    """The entries of target_modules or exclude_modules that name the module: whole-path regex, or suffixes in a list."""
    if isinstance(field, str):
        return [field] if re.fullmatch(field, module) else []
    known = field.known if isinstance(field, Names) else frozenset(field or ())
    ends = [0, *(i + 1 for i, c in enumerate(module) if c == ".")] if known else ()
    return [module[i:] for i in ends if module[i:] in known]


def targeted(module: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT adapts a module of this path, where the model has one."""
    targets = config.get("target_modules") or []
    if targets != "all-linear" and not naming(targets, module):
        return False
    if naming(config.get("exclude_modules"), module):
        return False
    layers = config.get("layers_to_transform")
    layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    exact = isinstance(targets, list) and module in targets
    return not layers or exact or layer_index(module, config) in layers


def parameters_naming(parameter: str, config: Mapping[str, Any]) -> list[str]:
    """The entries of target_parameters that name the parameter: the whole path, or a suffix of it."""
    return naming(config.get("target_parameters") or [], parameter)


def layer_index(module: str, config: Mapping[str, Any]) -> int | None:
    """The first numbered part of the path, or the first that follows one of layers_pattern."""
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module)
        if match:
            return int(match["index"])
    return None


def _check_regex(name: str, key: str, problems: list[str]) -> None:
    try:
        re.compile(key)
    except re.error as error:
        problems.append(f"{CONFIG}: {name} holds {json.dumps(key)}, which is not a regular expression: {error}.")


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_rank(value: Any) -> bool:
    return _is_index(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
