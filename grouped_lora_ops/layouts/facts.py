"""What a layout is made of: sizes as a config.json states them, projections, and the layout of one architecture.

These are facts and nothing else. Everything that follows from them (targets, families, buffer shapes, checkpoint names)
is derived in `model.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WILD = frozenset("*?[](){}|^$+\\ ")  # what would make a name a pattern


class MissingKey(KeyError):
    """A key that a layout needs and a config.json lacks."""

    def __str__(self) -> str:
        return " or ".join(self.args)


@dataclass(frozen=True)
class Size:
    """A number of features: a config key (or its synonyms), or a sum, product or exact quotient of sizes."""

    op: str
    args: tuple

    def of(self, config: Mapping[str, Any]) -> int:
        if self.op == "key":
            keys, default = self.args
            for key in keys:
                if config.get(key) is not None:
                    return config[key]
            if default is None:
                raise MissingKey(*keys)
            return default.of(config)
        if self.op == "number":
            return self.args[0]
        a, b = (arg.of(config) for arg in self.args)
        if self.op == "+":
            return a + b
        if self.op == "*":
            return a * b
        if a % b and self.op != "floor":
            raise ValueError(f"{self} is not whole: {a} / {b}")
        return a // b

    def __add__(self, other):
        return Size("+", (self, other))

    def __mul__(self, other):
        return Size("*", (self, other if isinstance(other, Size) else Size("number", (other,))))

    def __floordiv__(self, other):
        return Size("//", (self, other))

    def floor(self, other: Size) -> Size:
        """The quotient as transformers takes it where a config states no size of its own."""
        return Size("floor", (self, other))

    def __str__(self) -> str:
        if self.op == "key":
            return self.args[0][0]
        if self.op == "number":
            return str(self.args[0])
        return f"({self.args[0]} {self.op} {self.args[1]})"


def size(*keys: str, default: Size | int | None = None) -> Size:
    return Size("key", (keys, Size("number", (default,)) if isinstance(default, int) else default))


class Shard(enum.Enum):
    """How tensor or expert parallelism divides a projection's weight."""

    COLUMN = "column"  # out features; A is replicated, B's rows are divided
    ROW = "row"  # in features; A's columns are divided, B is replicated
    REPLICATED = "replicated"
    GROUPED_COLUMN = "grouped column"  # whole groups; A is replicated, B's groups are divided, nothing is communicated
    EXPERT = "expert"  # experts; factors shared by all experts are replicated


class Status(enum.Enum):
    """How far a layout can be trusted."""

    VALIDATED = "validated"  # names, shapes and adapters were compared with the real model class
    STRUCTURAL = "structural"  # only names and shapes were
    UNSTABLE = "unstable"  # may be wrong, for the reason that is given


Layers = Callable[[Mapping[str, Any]], "range | list[int]"]


def every_layer(config: Mapping[str, Any]) -> range:
    return range(config["num_hidden_layers"])


@dataclass(frozen=True)
class Projection:
    """One weight that can have a LoRA: y = W x, y[g] = W[g] x[g], or one such per expert.

    `path` is the Hugging Face path of the module (of an expert projection: of the 3-D parameter) below a decoder layer.
    """

    path: str
    in_features: Size  # D: of one group, one expert
    out_features: Size  # N: of one group, one expert; of gate and up together
    shard: Shard
    aliases: tuple[str, ...] = ()  # other names of the leaf
    units: Size | None = None  # the pieces that the divided features may be cut into: heads, say; None: single features
    out_parts: tuple[Size, ...] = ()  # out features in parts that are each divided on their own
    groups: Size | None = None  # G
    experts: Size | None = None  # E
    members: tuple[tuple[str, ...], ...] = ()  # experts: the leaves of per-expert checkpoints, each with its aliases
    family: str | None = None  # the leaf of the fused module that serving engines make of its siblings and itself
    layers: Layers = every_layer
    when: Callable[[Mapping[str, Any]], bool] = field(default=lambda config: True)  # not every model has it
    default: bool = True  # a target when none are named
    whole_sequence: bool = False  # sees every token of the sequence even where sequence parallelism is on

    @property
    def owner(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class ExpertStorage:
    """How a model stores its experts' 3-D parameters, and where it applies the router weight."""

    transposed: bool = False  # [E, in, out] instead of [E, out, in]
    interleaved: bool = False  # gate and up rows alternate instead of standing one after the other
    activation: str = "swiglu"
    activation_limit: Size | None = None
    router_weight: str = "post_down"
    bias: bool = False


@dataclass(frozen=True)
class Layout:
    """The projections of one architecture, in the order in which they are listed as targets."""

    name: str
    model_types: tuple[str, ...]
    projections: tuple[Projection, ...]
    status: Status
    reason: str = ""  # why UNSTABLE; for the others what the status rests on
    experts: ExpertStorage | None = None
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other names of an owner
    # what may stand before a layer's index; the first one is this library's own, of a multimodal model the one that ends in
    # language_model.layers. "layers": peft was put around the inner model
    prefixes: tuple[str, ...] = ("model.layers", "layers")
    refused: Mapping[str, str] = field(default_factory=dict)  # path below a layer: why it cannot be a target
    peft_fused: tuple[str, ...] = ()  # leaves that peft rewrites to expert parameters wherever they stand
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        where = f"grouped_lora_ops.layouts: layout {self.name}"
        if self.status is Status.UNSTABLE and not self.reason:
            raise ValueError(f"{where} is UNSTABLE and must give a reason.")
        if not self.projections or not self.model_types:
            raise ValueError(f"{where} must have projections and model_types.")
        seen: dict[str, Projection] = {}
        families: dict[str, Projection] = {}
        for p in self.projections:
            for name in (p.path, *p.aliases, *(m for member in p.members for m in member), p.family or "x", *self.refused):
                if not name or WILD & set(name) or not all(name.split(".")):
                    raise ValueError(f"{where}: {name!r} must be a plain name; patterns would silently widen a target.")
            if "." not in p.path:
                raise ValueError(f"{where}: {p.path} must be qualified by its owner, as in self_attn.{p.path}.")
            if (p.shard is Shard.GROUPED_COLUMN) != (p.groups is not None):
                raise ValueError(f"{where}: {p.path} must state its groups exactly if it is sharded by grouped column.")
            if (p.shard is Shard.EXPERT) != (p.experts is not None) or (p.experts is None) == bool(p.members):
                raise ValueError(f"{where}: {p.path} must state experts and members exactly if it is sharded by expert.")
            if p.experts is not None and self.experts is None:
                raise ValueError(f"{where}: {p.path} needs the layout's ExpertStorage.")
            if p.path in self.refused:
                raise ValueError(f"{where}: {p.path} is a projection and must not be refused.")
            for name in self.names(p):
                if name in seen:
                    raise ValueError(f"{where}: {name} names both {seen[name].path} and {p.path}.")
                seen[name] = p
            if p.family is not None:
                first = families.setdefault(f"{p.owner}.{p.family}", p)
                if (p.in_features, p.shard, p.layers, p.whole_sequence) != (
                    first.in_features,
                    first.shard,
                    first.layers,
                    first.whole_sequence,
                ) or p.shard not in (Shard.COLUMN, Shard.REPLICATED):
                    raise ValueError(f"{where}: {first.path} and {p.path} cannot be one family: they differ.")

    def renamed(self, path: str) -> tuple[str, ...]:
        """A path below a layer, and the same path with the other names of its owner."""
        for owner, others in self.owners.items():
            if path == owner or path.startswith(owner + "."):
                return (path, *(other + path[len(owner) :] for other in others))
        return (path,)

    def names(self, p: Projection) -> tuple[str, ...]:
        """Every owner-qualified name of a projection, its path first."""
        return tuple(f"{owner}.{leaf}" for owner in self.renamed(p.owner) for leaf in (p.leaf, *p.aliases))
