"""PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`, for dense and grouped linears.

What an adapter means is read from its own file, by PEFT's rules; whatever those rules would drop or change without a
word (an orphan factor, a second spelling of a name, a NaN, a feature that is not read here) is refused. Pickle is never
opened. The `peft` library is not needed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

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

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(\.(?P<adapter>[^.]+))?\.weight")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class LoraModule:
    """One adapted linear: delta = scaling · B A."""

    lora_a: Tensor  # [r, in]
    lora_b: Tensor  # [out, r]; of a grouped linear, out = G·N, group-major
    rank: int
    scaling: float  # alpha/r, or alpha/√r with rsLoRA


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter directory as read: its configuration and, per module path of the base model, its factors."""

    path: Path
    config: Mapping[str, Any]
    modules: Mapping[str, LoraModule]


class Stacked(NamedTuple):
    """The adapter buffers of one module, in the order in which the ops take them."""

    lora_a: Tensor  # [L, r, D]
    lora_b: Tensor  # [L, N, r] or [L, G, N, r]
    scalings: Tensor  # [L] float32
    ranks: Tensor  # [L] int32


def read_adapter(path: str | os.PathLike) -> Adapter:
    """Read a PEFT LoRA directory: scaling · B A for every adapted linear, as PEFT itself resolves it.

    path holds `adapter_config.json` and `adapter_model.safetensors`. Names `base_model.model.<module>.lora_A.weight`
    [r, in] and `….lora_B.weight` [out, r] are read, with or without the adapter's name before `.weight`. Rank and alpha
    are the configuration's, through `rank_pattern` and `alpha_pattern` (the first pattern of the file that matches the
    module's path wins); scaling is alpha/r, with rsLoRA alpha/√r. Tensors stay on the CPU in the file's dtype.

    Errors: FileNotFoundError where the directory or a file is missing. One ValueError that lists everything wrong with
    the adapter, in which case nothing is returned: features that are not read here (DoRA, biases, modules_to_save,
    target_parameters, …, each by name), factors that are missing, unexpected, orphaned, of a wrong shape, rank or dtype,
    or not finite, and names that occur twice.
    """
    path = Path(path)
    for name in (CONFIG, TENSORS):
        if not (path / name).is_file():
            pickle = name == TENSORS and (path / "adapter_model.bin").is_file()
            raise FileNotFoundError(
                f"grouped_lora_ops.adapters.read_adapter: {path} must hold {CONFIG} and {TENSORS}; {name} is missing."
                + (
                    " Its adapter_model.bin is a pickle, which is never opened: save it as safetensors."
                    if pickle
                    else ""
                )
            )
    problems: list[str] = []
    config = _read_config(path / CONFIG, problems)
    tensors = _read_tensors(path / TENSORS, problems)
    modules: dict[str, LoraModule] = {}
    if not problems:
        factors = _sort_factors(tensors, config, problems)
        for module in sorted(factors):
            found = _check_module(module, factors[module], config, problems)
            if found is not None:
                modules[module] = found
        if not modules and not problems:
            problems.append(f"{TENSORS} holds no LoRA factors.")
    if problems:
        raise ValueError(
            f"grouped_lora_ops.adapters.read_adapter: {path} cannot be read as it is; nothing was loaded:"
            + "".join(f"\n  - {problem}" for problem in problems)
        )
    return Adapter(path, MappingProxyType(config), MappingProxyType(modules))


def stack_adapters(
    adapters: Sequence[Adapter | None],
    module: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    groups: int | None = None,
    group_range: tuple[int, int] | None = None,
    slots: int | None = None,
) -> Stacked:
    """Stack one module of several adapters into the ops' buffers: slot l holds adapters[l].

    Returns (lora_a [L, r, D], lora_b [L, N, r], scalings [L] float32, ranks [L] int32) with r the largest rank; smaller
    ranks are padded with zeros. With groups=G, B's rows are G groups of N and lora_b is [L, G, N, r], A shared by all;
    group_range=(lo, hi) keeps groups lo … hi−1, a tensor-parallel rank's share. slots=L leaves room for more adapters
    than are given; those slots, and the place of a None in adapters, hold zeros, scaling 0 and rank 0. Factors are cast
    to dtype once, each tensor is contiguous and new.

    Errors: one ValueError that lists everything wrong: an adapter without this module, adapters that disagree in a
    feature count, out features that groups does not divide, a group range that is empty or out of bounds, fewer slots
    than adapters, a factor that overflows dtype.
    """
    problems: list[str] = []
    found = {l: adapter.modules.get(module) for l, adapter in enumerate(adapters) if adapter is not None}
    for l, lora in found.items():
        if lora is None:
            near = [m for m in adapters[l].modules if m.rsplit(".", 1)[-1] == module.rsplit(".", 1)[-1]]
            near = near or list(adapters[l].modules)
            more = f", … ({len(near)})" if len(near) > 3 else ""
            problems.append(
                f"adapters[{l}] ({adapters[l].path}) has no module {module}; it has {', '.join(near[:3])}{more}."
            )
    present = {l: lora for l, lora in found.items() if lora is not None}
    if not found:
        problems.append("adapters must hold at least one adapter.")
    num_slots = len(adapters) if slots is None else slots
    if num_slots < len(adapters):
        problems.append(f"slots must be at least the number of adapters, {len(adapters)}; got {slots}.")
    if group_range is not None and groups is None:
        problems.append("group_range needs groups, the number of groups of the whole module.")
    if groups is not None and groups < 1:
        problems.append(f"groups must be at least 1; got {groups}.")
    elif groups is not None:
        lo, hi = group_range if group_range is not None else (0, groups)
        if not 0 <= lo < hi <= groups:
            problems.append(f"group_range must satisfy 0 <= lo < hi <= groups = {groups}; got ({lo}, {hi}).")
    if present:
        first_slot, first = next(iter(present.items()))
        in_features, out_features = first.lora_a.shape[1], first.lora_b.shape[0]
        for l, lora in present.items():
            sizes = (lora.lora_a.shape[1], lora.lora_b.shape[0])
            if sizes != (in_features, out_features):
                problems.append(
                    f"adapters[{l}] must have in and out features ({in_features}, {out_features}) as adapters[{first_slot}] "
                    f"has; got {sizes}."
                )
        if groups is not None and groups >= 1 and out_features % groups:
            problems.append(f"groups must divide the module's {out_features} out features; got {groups}.")
    if not problems:
        rank = max(lora.rank for lora in present.values())
        if groups is None:
            columns, b_shape = slice(None), (out_features,)
        else:
            size = out_features // groups
            columns, b_shape = slice(lo * size, hi * size), (hi - lo, size)
        lora_a = torch.zeros(num_slots, rank, in_features, dtype=dtype, device=device)
        lora_b = torch.zeros(num_slots, *b_shape, rank, dtype=dtype, device=device)
        scalings, ranks = [0.0] * num_slots, [0] * num_slots
        for l, lora in present.items():
            a, b = lora.lora_a.to(dtype), lora.lora_b[columns].to(dtype)
            for name, factor in (("A", a), ("B", b)):
                if not factor.isfinite().all():
                    problems.append(
                        f"adapters[{l}]'s {name} of {module} overflows {str(dtype).removeprefix('torch.')}."
                    )
            lora_a[l, : lora.rank] = a.to(device)
            lora_b[l, ..., : lora.rank] = b.view(*b_shape, lora.rank).to(device)
            scalings[l], ranks[l] = lora.scaling, lora.rank
    if problems:
        raise ValueError(
            f"grouped_lora_ops.adapters.stack_adapters: {module} cannot be stacked:"
            + "".join(f"\n  - {problem}" for problem in problems)
        )
    return Stacked(
        lora_a,
        lora_b,
        torch.tensor(scalings, dtype=torch.float32, device=device),
        torch.tensor(ranks, dtype=torch.int32, device=device),
    )


def _object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that occurs twice is refused (the last would win, in safetensors headers too)."""
    names = [name for name, _ in pairs]
    twins = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twins:
        raise ValueError(f"{', '.join(twins)} occurs twice")
    return dict(pairs)


def _read_config(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object_without_twins)
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
        require(name, _is_text(value) or (value is None and name != "target_modules"), "a string or a list of strings")
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
        allowed = _ALLOWED.get(name, _INERT)
        if not any(value is a or (type(value) is type(a) and value == a) for a in (None, *allowed)):
            problems.append(f"{CONFIG}: {name} = {json.dumps(value)} is not supported.")
    return config


def _read_tensors(file: Path, problems: list[str]) -> dict[str, Tensor]:
    try:
        with open(file, "rb") as stream:  # the library itself takes a name that occurs twice
            size = int.from_bytes(stream.read(8), "little")
            if size <= os.path.getsize(file):
                json.loads(stream.read(size), object_pairs_hook=_object_without_twins)
        return safetensors.torch.load_file(file)
    except (ValueError, safetensors.SafetensorError) as error:
        problems.append(f"{TENSORS} is damaged: {error}.")
        return {}


def _sort_factors(
    tensors: dict[str, Tensor], config: Mapping[str, Any], problems: list[str]
) -> dict[str, dict[str, tuple[str, Tensor]]]:
    """{module: {"A" or "B": (name, tensor)}}; what does not belong to a targeted module, or is not there, is a problem."""
    factors: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name in sorted(tensors):
        key = _KEY.fullmatch(name)
        if key is None:
            problems.append(f"{name} is not of the form base_model.model.<module>.lora_A.weight or ….lora_B.weight.")
            continue
        pair = factors.setdefault(key["module"], {})
        if key["factor"] in pair:
            problems.append(f"{name} and {pair[key['factor']][0]} are the same factor.")
        else:
            pair[key["factor"]] = (name, tensors[name])
    targets, layers = config["target_modules"], config.get("layers_to_transform")
    layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    seen_targets, seen_layers = set(), set()
    for module in sorted(factors):
        matched = [module] if targets == "all-linear" else _naming(targets, module)
        layer = _layer_index(module, config) if layers else None
        seen_targets.update(matched)
        seen_layers.add(layer)
        if not matched:
            problems.append(f"{module} has factors but is not among target_modules.")
        elif _naming(config.get("exclude_modules"), module):
            problems.append(f"{module} has factors but is among exclude_modules.")
        elif layers and layer not in layers and module not in matched:
            problems.append(f"{module} has factors but is not among layers_to_transform.")
    if isinstance(targets, list):
        for target in sorted(set(targets) - seen_targets):
            problems.append(f"target_modules names {target}, but no module of that name has factors.")
    for layer in sorted(set(layers) - seen_layers):
        problems.append(f"layers_to_transform names layer {layer}, but no module of it has factors.")
    return factors


def _check_module(
    module: str, factors: dict[str, tuple[str, Tensor]], config: Mapping[str, Any], problems: list[str]
) -> LoraModule | None:
    """The module's pair of factors, or None and what is wrong with it added to problems."""
    before = len(problems)
    rank, scaling = _resolve(module, config)
    for factor, other in (("A", "B"), ("B", "A")):
        if factor not in factors:
            problems.append(f"{factors[other][0]} has no lora_{factor} beside it.")
            continue
        name, tensor = factors[factor]
        want = f"[{rank}, in]" if factor == "A" else f"[out, {rank}]"
        if tensor.dtype not in _DTYPES:
            problems.append(f"{name} must be bfloat16, float16, float32 or float64; got {str(tensor.dtype)[6:]}.")
        elif tensor.dim() != 2 or tensor.shape[0 if factor == "A" else 1] != rank or 0 in tensor.shape:
            problems.append(f"{name} must be {want} by the configuration's rank; got {list(tensor.shape)}.")
        elif not tensor.isfinite().all():
            problems.append(f"{name} holds NaN or Inf.")
    if len(problems) > before:
        return None
    return LoraModule(factors["A"][1], factors["B"][1], rank, scaling)


def _resolve(module: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """(rank, scaling) of a module, by PEFT's rules."""
    values = []
    for patterns, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        patterns = config.get(patterns) or {}
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        values.append(config[default] if key is None else patterns[key])
    rank, alpha = values
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora", False) else alpha / rank


def _naming(field: str | list[str] | None, module: str) -> list[str]:
    """The entries of target_modules or exclude_modules that name the module: whole-path regex, or suffixes in a list."""
    if isinstance(field, str):
        return [field] if re.fullmatch(field, module) else []
    return [entry for entry in field or () if module == entry or module.endswith("." + entry)]


def _layer_index(module: str, config: Mapping[str, Any]) -> int | None:
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
