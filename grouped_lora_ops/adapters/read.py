"""PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`, for dense, grouped and expert weights.

What an adapter means is read from its own file, by PEFT's rules; whatever those rules would drop or change without a
word (an orphan factor, a second spelling of a name, a NaN, a feature that is not read here) is refused. Pickle is never
opened. The `peft` library is not needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .._checks import dtype_name, instance
from ..layouts import Fused, Model, Place
from .adapter import Adapter, Base, ExpertModule, LoraModule, report
from .config import (
    CONFIG,
    TENSORS,
    layer_index,
    naming,
    object_without_twins,
    parameters_naming,
    read_config,
    resolve,
    targeted,
)
from .experts import Factor, Parameters, gather, unwrap

STAMP, COMPLETE = "grouped_lora_ops.json", ".complete"
AUTOMODEL_STAMP = "automodel_peft_config.json"

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(\.(?P<adapter>[^.]+))?\.weight")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FORM = "is not of the form base_model.model.<module>.lora_A.weight or ….lora_B.weight."


def read_adapter(
    path: str | os.PathLike,
    model: Model | None = None,
    *,
    base: Base | None = None,
    expert_order: str | None = None,
    expert_swapped: bool | None = None,
) -> Adapter:
    """Read a LoRA directory: scaling · B A for every adapted linear and expert, as PEFT itself resolves it.

    path holds `adapter_config.json` and `adapter_model.safetensors`. Names `base_model.model.<module>.lora_A.weight`
    [r, in] and `….lora_B.weight` [out, r] are read, with or without the adapter's name before `.weight`. Rank and alpha
    are the configuration's, through `rank_pattern` and `alpha_pattern` (the first pattern of the file that matches the
    module's path wins); scaling is alpha/r, with rsLoRA alpha/√r. Tensors stay on the CPU in the file's dtype.

    With a model's layout (`layouts.of`) every name and shape is checked against it and the adapter must be complete: a
    module that the configuration targets and the model has must have its factors. Then experts are read too, in any of
    these forms: a 2-D pair per expert (gate without up, ranks and alphas of their own, experts that are not targets:
    zero); peft's 2-D pairs for 3-D parameters (`….experts.base_layer`, `….experts`); 3-D stacks [E|1, r, in] and
    [E|1, out, r], a first dimension of 1 shared by all experts, also beside 2-D factors of the other side; and fused
    modules (`qkv_proj`, `gate_up_proj`: an A for all members, or one each below another).

    peft before 0.19.1 wrote the pairs of 3-D parameters with A and B exchanged, and other writers order B's columns by
    expert. Which it is, shapes say, or a stamp beside the file, or its peft version; expert_swapped (True: A and B are
    exchanged) and expert_order ("rank-major", as peft: column k·E + e; "expert-major": e·r + k) say it where nothing
    does. Nothing is guessed.

    base: the model that the adapter is to be used with; an adapter that is pinned to another one is refused. A directory
    with a `.complete` marker is checked against the hashes in it; one that `write_adapter` left unfinished is refused.

    Errors: FileNotFoundError where the directory or a file is missing. One ValueError that lists everything wrong with
    the adapter, in which case nothing is returned: features that are not read here (DoRA, biases, modules_to_save, …,
    each by name), factors that are missing, unexpected, orphaned, of a wrong shape, rank or dtype, or not finite, names
    that occur twice, and 3-D factors that could be read in two ways.
    """
    return read_directory(Path(path), model, base=base, expert_order=expert_order, expert_swapped=expert_swapped)


def read_directory(path: Path, model=None, *, base=None, expert_order=None, expert_swapped=None, finished=True) -> Adapter:
    """`read_adapter`; finished=False reads an export that has no marker yet."""
    if expert_order not in (None, "rank-major", "expert-major"):
        raise ValueError(
            f'grouped_lora_ops.adapters.read_adapter: expert_order must be "rank-major" or "expert-major"; got {expert_order!r}.'
        )
    if model is not None:
        instance("adapters.read_adapter", "model", model, Model, "as layouts.of makes it")
    if not path.is_dir():
        raise FileNotFoundError(f"grouped_lora_ops.adapters.read_adapter: {path} must be an adapter's directory; there is none.")
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
    before = _state(path)
    stamp = _check_marker(path, problems, finished)
    config = read_config(path / CONFIG, problems, parameters=model is not None)
    pinned = _read_pin(stamp, base, problems)
    tensors = _read_tensors(path / TENSORS, problems)
    modules: dict[str, LoraModule] = {}
    experts: dict[str, ExpertModule] = {}
    if not problems:
        reading = _Reading(config, model, problems)
        reading.sort(tensors)
        reading.check_targets()
        modules = reading.dense()
        if model is not None:
            stamps = _expert_stamp(path, stamp, model, problems)
            experts = reading.expert_modules(expert_swapped, expert_order, stamps)
            reading.check_complete()
        if not modules and not experts and not problems:
            problems.append(f"{TENSORS} holds no LoRA factors.")
    if _state(path) != before:
        problems.append("the directory was written to while it was read.")
    if problems:
        raise report(f"read_adapter: {path} cannot be read as it is; nothing was loaded:", problems)
    return Adapter(path, MappingProxyType(config), MappingProxyType(modules), MappingProxyType(experts), pinned)


def _state(path: Path) -> list[bytes | None]:
    """What an export changes before and after everything else."""
    return [file.read_bytes() if file.is_file() else None for file in (path / COMPLETE, path / STAMP)]


def file_hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(stream)


def _digest(stream) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _read_json(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=object_without_twins)
        if not isinstance(value, dict):
            raise ValueError(f"an object is expected, not {type(value).__name__}")
        return value
    except ValueError as error:
        problems.append(f"{file.name} is not readable JSON: {error}.")
        return {}


def _check_marker(path: Path, problems: list[str], finished: bool) -> dict[str, Any]:
    """The stamp of an export; what its marker and its files disagree in is added to problems."""
    stamp = _read_json(path / STAMP, problems) if (path / STAMP).is_file() else {}
    marker = path / COMPLETE
    if not finished:
        return stamp
    if (path / STAMP).is_file() and not marker.is_file():
        problems.append(f"{COMPLETE} is missing: the export that wrote {STAMP} was not finished.")
    elif marker.is_file() and marker.stat().st_size:  # an empty one is another tool's
        files = _read_json(marker, problems).get("sha256")
        if not isinstance(files, dict) or not {CONFIG, TENSORS} <= set(files):
            problems.append(f"{COMPLETE} must hold the hashes of {CONFIG} and {TENSORS}.")
        for name, digest in files.items() if isinstance(files, dict) else ():
            if Path(name).name != name or not (path / name).is_file():
                problems.append(f"{name} is missing, but {COMPLETE} names it.")
            elif file_hash(path / name) != digest:
                problems.append(f"{name} is not the file that {COMPLETE} was written for: its hash differs.")
    return stamp


def _read_pin(stamp: dict[str, Any], base: Base | None, problems: list[str]) -> Base | None:
    pin = stamp.get("base")
    if not isinstance(pin, dict):
        return None
    try:
        pinned = Base(**pin)
    except TypeError:
        problems.append(f"{STAMP}: base must hold name, revision and sha256; got {json.dumps(pin)}.")
        return None
    different = pinned.differs(base) if base is not None else None
    if different:
        problems.append(f"the adapter belongs to another base: {different}.")
    return pinned


def _expert_stamp(path: Path, stamp: dict[str, Any], model: Model, problems: list[str]) -> tuple[bool | None, str | None]:
    """(swapped, order) as a stamp beside the file states them."""
    if "expert_order" in stamp:
        return stamp.get("expert_swapped"), stamp["expert_order"]
    if (path / AUTOMODEL_STAMP).is_file():
        kind = _read_json(path / AUTOMODEL_STAMP, problems).get("paramwrapper_layout")
        if kind is not None:
            transposed = model.layout.experts is not None and model.layout.experts.transposed
            if kind not in ("peft-0.19.1", "peft-0.18"):
                problems.append(f"{AUTOMODEL_STAMP}: paramwrapper_layout = {json.dumps(kind)} is not known.")
                return None, None
            return kind == "peft-0.18" and not transposed, "rank-major"
    return None, None


def _read_tensors(file: Path, problems: list[str]) -> dict[str, Tensor]:
    try:
        with open(file, "rb") as stream:  # the library itself takes a name that occurs twice
            size = int.from_bytes(stream.read(8), "little")
            if size <= os.path.getsize(file):
                json.loads(stream.read(size), object_pairs_hook=object_without_twins)
        return safetensors.torch.load_file(file)
    except (ValueError, safetensors.SafetensorError) as error:
        problems.append(f"{TENSORS} is damaged: {error}.")
        return {}


def _wrapped(place: Place | Fused | None) -> bool:
    """Whether a module holds a pair of peft's for a 3-D parameter."""
    return isinstance(place, Place) and place.form in ("inner", "outer")


@dataclass
class _Reading:
    """One directory while it is read: factors by module path, and what each path means in the model."""

    config: Mapping[str, Any]
    model: Model | None
    problems: list[str]
    factors: dict[str, dict[str, Factor]] = field(default_factory=dict)  # {module of the file: {"A" or "B": factor}}
    places: dict[str, Place | Fused] = field(default_factory=dict)  # {module of the file: what it means}
    parameters: dict[str, str] = field(default_factory=dict)  # {module of the file: the parameter that peft targeted}

    def sort(self, tensors: Mapping[str, Tensor]) -> None:
        """Pair the factors; find out what their modules mean; refuse tensors that can never be right."""
        for name in sorted(tensors):
            key = _KEY.fullmatch(name)
            if key is None:
                self.problems.append(f"{name} {_FORM}")
                continue
            pair = self.factors.setdefault(key["module"], {})
            tensor = tensors[name]
            if key["factor"] in pair:
                self.problems.append(f"{name} and {pair[key['factor']].name} are the same factor.")
                continue
            pair[key["factor"]] = Factor(name, tensor, key["module"])
            if tensor.dtype not in _DTYPES:
                self.problems.append(f"{name} must be bfloat16, float16, float32 or float64; got {dtype_name(tensor.dtype)}.")
                pair[key["factor"]].bad = True
        if self.model is None:
            return
        taken: dict[tuple, str] = {}
        for module in sorted(self.factors):
            place = self.model.locate(module)
            if isinstance(place, str):
                self.problems.append(f"{module} {place}.")
                del self.factors[module]
                continue
            self.places[module] = place
            members = place.members if isinstance(place, Fused) else (place,)
            for p in members:
                for factor in self.factors[module]:
                    same = (p.path, p.form, p.member, p.expert, factor)
                    if same in taken:
                        self.problems.append(f"{taken[same]} and {self.factors[module][factor].name} are the same factor.")
                    taken.setdefault(same, self.factors[module][factor].name)
        for module, place in self.places.items():
            if _wrapped(place):
                self._name_parameter(module, place)

    def _name_parameter(self, module: str, place: Place) -> None:
        """Which parameter a pair of peft's belongs to: of two, gate_up is the inner one; of one, the one that is targeted."""
        owner = module.removesuffix(".base_layer") if place.form == "inner" else module
        leaves = [p.facts.leaf for p in self.model.projections if p.facts.owner == place.projection.facts.owner]
        named = [leaf for leaf in leaves if parameters_naming(f"{owner}.{leaf}", self.config)]
        if place.form == "inner":
            leaf = leaves[0]
        elif f"{owner}.base_layer" in self.places:
            leaf = leaves[1]
        elif len(named) == 1:
            leaf = named[0]
        else:
            self.problems.append(
                f"{module} holds the factors of one parameter, but target_parameters names {' and '.join(named) or 'none'} of it."
            )
            return
        self.parameters[module] = f"{owner}.{leaf}"

    def check_targets(self) -> None:
        """Every module is a target, and every target has a module."""
        config = self.config
        targets, layers = config.get("target_modules") or [], config.get("layers_to_transform")
        layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
        seen_targets, seen_layers = set(), set()
        for module in sorted(self.factors):
            parameter = self.parameters.get(module, f"{module}.weight")
            matched = parameters_naming(parameter, config)
            if matched:
                seen_targets.update(matched)
                continue
            if _wrapped(self.places.get(module)):
                if module in self.parameters:
                    self.problems.append(f"{module} holds the factors of {parameter}, which is not among target_parameters.")
                continue
            matched = [module] if targets == "all-linear" else naming(targets, module)
            layer = layer_index(module, config) if layers else None
            seen_targets.update(matched)
            seen_layers.add(layer)
            if not matched:
                self.problems.append(f"{module} has factors but is not among target_modules.")
            elif naming(config.get("exclude_modules"), module):
                self.problems.append(f"{module} has factors but is among exclude_modules.")
            elif layers and layer not in layers and module not in matched:
                self.problems.append(f"{module} has factors but is not among layers_to_transform.")
        for field_name, what in (("target_modules", "module"), ("target_parameters", "parameter")):
            names = config.get(field_name)
            for target in sorted(set(names) - seen_targets) if isinstance(names, list) else ():
                if self._knows(target):
                    continue  # check_complete says whether one was to be expected
                self.problems.append(f"{field_name} names {target}, but no {what} of that name has factors.")
        for layer in sorted(set(layers) - seen_layers):
            self.problems.append(f"layers_to_transform names layer {layer}, but no module of it has factors.")

    def _knows(self, target: str) -> bool:
        """Whether a target is a linear of the model, which the layers that were adapted may lack."""
        if self.model is None:
            return False
        place = self.model.locate(target)
        if isinstance(place, Place):
            return place.projection.experts is None
        dense = (p.facts for p in self.model.projections if p.experts is None)
        return any(f".{name}".endswith(f".{target}") for facts in dense for name in self.model.layout.names(facts))

    def resolve(self, module: str) -> tuple[int, float]:
        """Patterns match the parameter's own name where one was targeted."""
        parameter = f"{module}.weight"
        if module not in self.parameters and parameters_naming(parameter, self.config):
            return resolve(parameter, self.config)
        return resolve(self.parameters.get(module, module), self.config)

    def dense(self) -> dict[str, LoraModule]:
        """The adapted linears; a fused module as its members."""
        found: dict[str, LoraModule] = {}
        for module in sorted(self.factors):
            place = self.places.get(module)
            if isinstance(place, Place) and place.projection.experts is not None:
                continue
            if isinstance(place, Fused):
                found |= self._fused(module, place)
                continue
            rank, scaling = self.resolve(module)
            sizes = ("in", "out") if place is None else (place.projection.in_features, place.projection.total_out)
            pair = self._pair(module, ((rank, sizes[0]), (sizes[1], rank)))
            if pair is not None:
                found[module if place is None else place.path] = LoraModule(*pair, rank, scaling)
        return found

    def _fused(self, module: str, fused: Fused) -> dict[str, LoraModule]:
        rank, scaling = self.resolve(module)
        members = [p.projection for p in fused.members]
        a = self.factors[module].get("A")
        stacked = a is not None and a.tensor.dim() == 2 and len(a.tensor) == rank * len(members)
        rows = rank * len(members) if stacked else rank
        out = sum(p.total_out for p in members)
        pair = self._pair(module, ((rows, members[0].in_features), (out, rank)))
        if pair is None:
            return {}
        a_parts = pair[0].split(rank) if stacked else [pair[0]] * len(members)
        b_parts = pair[1].split([p.total_out for p in members])
        return {p.path: LoraModule(a, b, rank, scaling) for p, a, b in zip(fused.members, a_parts, b_parts)}

    def _pair(self, module: str, shapes) -> tuple[Tensor, Tensor] | None:
        """The two factors, or None and what is wrong with them added to problems. A size that is a word may be any."""
        factors, before = self.factors[module], len(self.problems)
        for (factor, other), shape in zip((("A", "B"), ("B", "A")), shapes):
            if factor not in factors:
                self.problems.append(f"{factors[other].name} has no lora_{factor} beside it.")
                continue
            factors[factor].check(shape, self.problems)
        bad = any(f.bad for f in factors.values())
        return None if bad or len(self.problems) > before else (factors["A"].tensor, factors["B"].tensor)

    def expert_modules(self, swapped, order, stamp) -> dict[str, ExpertModule]:
        """The experts, whatever form they have in the file."""
        wrapped, listed = [], []
        for module in sorted(self.factors):
            place = self.places[module]
            if isinstance(place, Fused) or place.projection.experts is None:
                continue
            rank, scaling = self.resolve(module)
            if _wrapped(place):
                if module not in self.parameters:
                    continue
                leaf = self.parameters[module].rpartition(".")[2]
                (p,) = (p for p in self.model.projections if (p.facts.owner, p.facts.leaf) == (place.projection.facts.owner, leaf))
                real = Place(place.layer, p, self.model.path(place.layer, p))
                factors = self.factors[module]
                for factor, other in (("A", "B"), ("B", "A")):
                    if factor not in factors:
                        self.problems.append(f"{factors[other].name} has no lora_{factor} beside it.")
                if len(factors) == 2 and not any(f.bad for f in factors.values()):
                    wrapped.append(Parameters(real, factors["A"], factors["B"], rank, scaling))
            else:
                listed += [(place, kind, f, rank, scaling) for kind, f in self.factors[module].items() if not f.bad]
        storage = self.model.layout.experts
        version = self.config.get("peft_version")
        found = unwrap(wrapped, storage, version, (swapped, order), stamp, self.problems)
        for path, expert in gather(listed, storage, self.problems, self._is_target).items():
            if path in found:
                self.problems.append(f"{path} has factors in two forms.")
            found[path] = expert
        return found

    def _is_target(self, module: str) -> bool:
        return targeted(module, self.config)

    def check_complete(self) -> None:
        """Every module of the model that the configuration targets has its factors."""
        if not self.factors:
            return
        have = {p.path for place in self.places.values() for p in (place.members if isinstance(place, Fused) else (place,))}
        have |= {self._canonical(parameter) for parameter in self.parameters.values()}
        unclear = {p.path for module, p in self.places.items() if _wrapped(p) and module not in self.parameters}
        prefix = self._file_prefix()
        per_expert = any(isinstance(p, Place) and p.form == "expert" for p in self.places.values())
        for place in self.model.places([p.path for p in self.model.projections]):
            p = place.projection
            if place.path in have or place.path.removesuffix(f".{p.facts.leaf}") in unclear:
                continue
            spelled = [f"{prefix}.{place.layer}.{name}" for name in self.model.layout.names(p.facts)]
            if p.experts is None:
                expected = any(targeted(s, self.config) or parameters_naming(f"{s}.weight", self.config) for s in spelled)
            else:
                expected = any(parameters_naming(s, self.config) for s in spelled)
                if per_expert:
                    owner = f"{prefix}.{place.layer}.{p.facts.owner}"
                    expected |= any(targeted(f"{owner}.0.{leaf}", self.config) for member in p.facts.members for leaf in member[:1])
            if expected:
                self.problems.append(f"{place.path} is among the targets, but has no factors.")

    def _canonical(self, parameter: str) -> str:
        place = self.model.locate(parameter)
        return place.path if isinstance(place, Place) else parameter

    def _file_prefix(self) -> str:
        """What stands before a layer's index in this file."""
        module = next(iter(self.factors))
        place = self.places[module]
        layer = (place.members[0] if isinstance(place, Fused) else place).layer
        return module[: module.index(f".{layer}.")]
