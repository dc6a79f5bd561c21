"""A layout with a model's sizes: targets, fused families, buffer shapes of every rank, and checkpoint names, all derived."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .facts import WILD, Layout, Projection, Shard

TEXT_MODEL = "_text_model"  # set in a config that is the text_config of a multimodal model's


@dataclass(frozen=True)
class Share:
    """Which part of a model a process holds: rank `tp_rank` of `tp` for dense weights, `ep_rank` of `ep` for experts."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0

    def __post_init__(self):
        for name, size, rank in (("tp", self.tp, self.tp_rank), ("ep", self.ep, self.ep_rank)):
            if size < 1 or not 0 <= rank < size:
                raise ValueError(
                    f"grouped_lora_ops.layouts.Share: {name}_rank must be in 0 … {name} − 1; got {name}_rank={rank}, {name}={size}."
                )


WHOLE = Share()


@dataclass(frozen=True)
class Part:
    """The share of one projection: ranges of A's columns, B's rows, groups and experts."""

    columns: slice  # of D
    rows: tuple[slice, ...]  # of N; of the flat group-major [G·N] for a grouped projection
    groups: slice | None
    experts: slice | None


@dataclass(frozen=True)
class Sized:
    """A projection with its sizes in one model."""

    facts: Projection
    in_features: int  # D
    out_features: int  # N
    groups: int | None  # G
    experts: int | None  # E
    units: int
    out_parts: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def path(self) -> str:
        return self.facts.path

    @property
    def total_out(self) -> int:
        """Rows of the weight, and of a checkpoint's B, of one expert."""
        return self.out_features * (self.groups or 1)

    @property
    def gated(self) -> bool:
        return len(self.facts.members) == 2

    def part(self, share: Share = WHOLE) -> Part:
        """What a process holds of it. ValueError where the features, groups or experts do not divide."""
        shard, whole = self.facts.shard, (slice(0, self.total_out),)
        columns, rows, groups, experts = slice(0, self.in_features), whole, None, None
        if self.groups is not None:
            groups = slice(0, self.groups)
        if shard is Shard.EXPERT:
            experts = self._cut(self.experts, share.ep, share.ep_rank, "experts", "ep")
        elif share.tp > 1 and shard is Shard.GROUPED_COLUMN:
            groups = self._cut(self.groups, share.tp, share.tp_rank, "groups", "tp")
            rows = (slice(groups.start * self.out_features, groups.stop * self.out_features),)
        elif share.tp > 1 and shard is not Shard.REPLICATED:
            self._cut(self.units, share.tp, share.tp_rank, "heads or features", "tp")
            if shard is Shard.ROW:
                columns = self._cut(self.in_features, share.tp, share.tp_rank, "in features", "tp")
            else:
                start, found = 0, []
                for size in self.out_parts or (self.out_features,):
                    cut = self._cut(size, share.tp, share.tp_rank, "out features", "tp")
                    found.append(slice(start + cut.start, start + cut.stop))
                    start += size
                rows = tuple(found)
        return Part(columns, rows, groups, experts)

    def _cut(self, size: int, count: int, rank: int, what: str, name: str) -> slice:
        if size % count:
            raise ValueError(
                f"grouped_lora_ops.layouts: {name} must divide the {size} {what} of {self.path}; got {count}."
            )
        piece = size // count
        return slice(rank * piece, (rank + 1) * piece)


@dataclass(frozen=True)
class Place:
    """What a checkpoint's module path means."""

    layer: int
    projection: Sized
    path: str  # canonical: the model's prefix, the layer, the projection's path
    form: str = "module"  # module; expert: one expert's 2-D module; inner, outer: 3-D parameters as peft nests them; stack: 3-D
    member: int | None = None  # 0 gate, 1 up, of an expert form; None: the whole parameter
    expert: int | None = None


@dataclass(frozen=True)
class Fused:
    """A fused module of a serving engine: its members, in the order of its rows."""

    path: str  # canonical
    members: tuple[Place, ...]


@dataclass(frozen=True)
class Buffer:
    """Adapter buffers of one projection, or of one family, of one layer, as the ops take them."""

    key: str  # canonical path of the projection, or of the fused module
    places: tuple[Place, ...]  # one, or a family's members
    kind: str  # plain, grouped, fused, experts
    a_shape: tuple[int, ...]  # [L, r, D], fused [L, M, r, D]; experts [L, E|1, r, D] or [L, E|1, 2, r, D]
    b_shape: tuple[int, ...]  # [L, N, r], fused [L, ΣN, r], grouped [L, G, N, r]; experts [L, E|1, N, r]
    out_sizes: tuple[int, ...] | None  # fused: N of every member
    parts: tuple[Part, ...]  # of every place


class Model:
    """A layout bound to one model's config; see `layouts.of`."""

    def __init__(self, layout: Layout, config: Mapping[str, Any], name: str | None = None):
        self.layout, self.config, self.name = layout, dict(config), name or config.get("_name_or_path")
        self.num_layers: int = config["num_hidden_layers"]
        inner = [p for p in layout.prefixes if p.endswith("language_model.layers")] if config.get(TEXT_MODEL) else []
        self.prefix = (inner or layout.prefixes)[0]  # what stands before a layer's index in this library's paths
        self.projections: tuple[Sized, ...] = tuple(
            self._sized(p) for p in layout.projections if p.when(config) and len(p.layers(config))
        )

    def _sized(self, p: Projection) -> Sized:
        def of(size):
            return None if size is None else size.of(self.config)

        n, d, groups, experts = (of(s) for s in (p.out_features, p.in_features, p.groups, p.experts))
        units = of(p.units) or (d if p.shard is Shard.ROW else n)
        parts = tuple(of(s) for s in p.out_parts)
        return Sized(p, d, n, groups, experts, units, parts, tuple(p.layers(self.config)))

    @cached_property
    def _by_name(self) -> dict[str, Sized]:
        return {name: p for p in self.projections for name in self.layout.names(p.facts)}

    @cached_property
    def _expert_owners(self) -> list[tuple[Sized, tuple[str, ...]]]:
        return [(p, self.layout.renamed(p.facts.owner)) for p in self.projections if p.experts is not None]

    @cached_property
    def families(self) -> dict[str, tuple[Sized, ...]]:
        """{fused path below a layer: its members in row order}, where a family has more than one member."""
        found: dict[str, list[Sized]] = {}
        for p in self.projections:
            if p.facts.family is not None:
                found.setdefault(f"{p.facts.owner}.{p.facts.family}", []).append(p)
        return {path: tuple(members) for path, members in found.items() if len(members) > 1}

    def path(self, layer: int, projection: Sized) -> str:
        return f"{self.prefix}.{layer}.{projection.path}"

    def targets(self, selectors: Sequence[str] | None = None) -> tuple[Sized, ...]:
        """The projections that selectors name, in the layout's order; without selectors the default ones.

        A selector is a leaf (`o_a_proj`) or an owner-qualified name (`self_attn.o_a_proj`), aliases included.

        Errors: ValueError for a pattern, an unknown or refused name, and a leaf that several projections share: what it
        would adapt beyond the one that was meant has to be asked for by name.
        """
        if selectors is None:
            return tuple(p for p in self.projections if p.facts.default)
        where = "grouped_lora_ops.layouts.Model.targets"
        if isinstance(selectors, str):
            raise TypeError(f"{where}: selectors must be a list of names; got the string {selectors!r}.")
        chosen = set()
        for selector in selectors:
            if selector == "all-linear" or WILD & set(selector):
                raise ValueError(
                    f"{where}: {selector!r} is a pattern and could name more than was meant; name projections: {self._names()}."
                )
            found = {p.path for name, p in self._by_name.items() if selector in (name, name.rpartition(".")[2])}
            members = {
                f"{p.path} (with {p.facts.owner}.{selector.rpartition('.')[2]} in it)"
                for p in self.projections
                for member in p.facts.members
                for leaf in member
                if leaf != p.facts.leaf and selector in (leaf, f"{p.facts.owner}.{leaf}")
            }
            if not found and members:
                raise ValueError(f"{where}: {selector} is a part of one parameter; name {', '.join(sorted(members))}.")
            if not found:
                reason = next((why for name, why in self.layout.refused.items() if selector in self.layout.renamed(name)), None)
                why = f"cannot be a target: {reason}" if reason else f"is no projection of {self.layout.name}"
                raise ValueError(f"{where}: {selector} {why}. Name one of: {self._names()}.")
            if len(found | members) > 1:
                raise ValueError(f"{where}: {selector} names {', '.join(sorted(found | members))}; name the one that is meant.")
            chosen |= found
        return tuple(p for p in self.projections if p.path in chosen)

    def _names(self) -> str:
        return ", ".join(p.path for p in self.projections)

    @cached_property
    def _prefix(self) -> re.Pattern:
        prefixes = "|".join(re.escape(p) for p in sorted(self.layout.prefixes, key=len, reverse=True))
        return re.compile(rf"(?:{prefixes})\.(?P<layer>0|[1-9]\d*)\.(?P<rest>.+)")

    def locate(self, module: str) -> Place | Fused | str:
        """What a module path of a checkpoint means; a string is the reason why it means nothing here."""
        match = self._prefix.fullmatch(module)
        if match is None:
            return f"is outside the decoder layers ({self.prefix}.<layer>.…)"
        layer, rest = int(match["layer"]), match["rest"]
        if layer >= self.num_layers:
            return f"is in layer {layer} of a model with {self.num_layers} layers"
        found = self._find(layer, rest)
        if isinstance(found, (str, Fused)):
            return found
        if layer not in found.projection.layers:
            return f"is in layer {layer}, which has no {found.projection.path}"
        return found

    def _find(self, layer: int, rest: str) -> Place | Fused | str:
        p = self._by_name.get(rest)
        if p is not None and p.experts is None:
            return Place(layer, p, self.path(layer, p))
        for p, owners in self._expert_owners:
            path = self.path(layer, p)
            for owner in owners:
                if not rest.startswith(owner):
                    continue
                if rest == f"{owner}.base_layer":
                    return Place(layer, p, f"{self.prefix}.{layer}.{p.facts.owner}", "inner")
                if rest == owner:
                    return Place(layer, p, f"{self.prefix}.{layer}.{p.facts.owner}", "outer")
                tail = rest.removeprefix(f"{owner}.")
                if tail == rest:
                    continue
                index, _, leaf = tail.rpartition(".")
                for m, member in enumerate(p.facts.members):
                    number = m if p.gated else None
                    if index.isdecimal() and leaf in member:
                        if int(index) >= p.experts:
                            return f"is of expert {index} of a model with {p.experts} experts"
                        return Place(layer, p, path, "expert", number, int(index))
                    if not index and leaf in member:
                        return Place(layer, p, path, "stack", number)
                if tail == p.facts.leaf:
                    return Place(layer, p, path, "stack")
        for path, members in self.families.items():
            if rest in self.layout.renamed(path) and layer in members[0].layers:
                places = tuple(Place(layer, p, self.path(layer, p)) for p in members)
                return Fused(f"{self.prefix}.{layer}.{path}", places)
        for name, reason in self.layout.refused.items():
            if any(rest == n or rest.startswith(n + ".") for n in self.layout.renamed(name)):
                return f"cannot be adapted: {reason}"
        return f"is no projection of {self.layout.name}"

    def places(self, selectors: Sequence[str] | None = None) -> tuple[Place, ...]:
        """Every place that an adapter of these targets has, layer by layer."""
        chosen = self.targets(selectors)
        return tuple(
            Place(layer, p, self.path(layer, p)) for layer in range(self.num_layers) for p in chosen if layer in p.layers
        )

    def buffers(
        self,
        slots: int,
        rank: int,
        *,
        selectors: Sequence[str] | None = None,
        share: Share = WHOLE,
        fused: bool = False,
        shared_outer: bool = False,
        gate_up_each: bool = True,
    ) -> tuple[Buffer, ...]:
        """Shapes of the stacked adapter buffers of a process, in the order of layers and targets.

        slots is L, rank the largest r. fused: siblings that a serving engine fuses get one buffer, an A each, absent
        members zero. shared_outer: gate_up's A and down's B have an expert dimension of 1. gate_up_each: gate and up have
        an A each ([L, E, 2, r, D]); else one A for both, where separate ones take twice the rank.

        Errors: ValueError where share does not divide a projection.
        """
        chosen = self.targets(selectors)
        found = []
        for layer in range(self.num_layers):
            here = [p for p in chosen if layer in p.layers]
            done = set()
            for p in here:
                if p.path in done:
                    continue
                family = f"{p.facts.owner}.{p.facts.family}"
                if fused and family in self.families and len(self.families[family]) > 1:
                    members = self.families[family]  # the whole family, though some members may not be targets
                    done |= {m.path for m in members}
                    found.append(self._buffer(layer, members, slots, rank, share, family))
                else:
                    experts = (shared_outer, gate_up_each)
                    found.append(self._buffer(layer, (p,), slots, rank, share, None, experts))
        return tuple(found)

    def _buffer(self, layer, members, slots, rank, share, family, experts=(False, True)) -> Buffer:
        parts = tuple(p.part(share) for p in members)
        places = tuple(Place(layer, p, self.path(layer, p)) for p in members)
        sizes = tuple(sum(r.stop - r.start for r in part.rows) for part in parts)
        p, part = members[0], parts[0]
        d = part.columns.stop - part.columns.start
        out_sizes, key, kind = None, places[0].path, "plain"
        a_shape, b_shape = (slots, rank, d), (slots, sizes[0], rank)
        if family is not None:
            kind, key, out_sizes = "fused", f"{self.prefix}.{layer}.{family}", sizes
            a_shape, b_shape = (slots, len(members), rank, d), (slots, sum(sizes), rank)
        elif p.groups is not None:
            kind = "grouped"
            b_shape = (slots, part.groups.stop - part.groups.start, p.out_features, rank)
        elif p.experts is not None:
            kind = "experts"
            shared_outer, each = experts
            count = part.experts.stop - part.experts.start
            a_count, b_count = (1 if shared_outer and p.gated else count), (1 if shared_outer and not p.gated else count)
            a_shape = (slots, a_count, 2, rank, d) if p.gated and each else (slots, a_count, rank, d)
            b_shape = (slots, b_count, p.out_features, rank)
        return Buffer(key, places, kind, a_shape, b_shape, out_sizes, parts)

    def gradient_sums(self, projection: Sized, *, sequence_parallel: bool = False) -> dict[str, tuple[str, ...]]:
        """The groups over which the gradients of A, of B, and of a factor shared by all experts must be summed.

        {"a": …, "b": …, "shared": …} with "tp" and "ep" for the tensor- and expert-parallel group. An empty tuple: the
        rank's own gradient is complete. Sums, never means.
        """
        shard = projection.facts.shard
        split = sequence_parallel and not projection.facts.whole_sequence
        tokens = ("tp",) if split else ()
        a, b = {
            Shard.COLUMN: (("tp",), ()),
            Shard.GROUPED_COLUMN: (("tp",), ()),
            Shard.ROW: ((), tokens),
            Shard.REPLICATED: (tokens, tokens),
            Shard.EXPERT: ((), ()),
        }[shard]
        return {"a": a, "b": b, "shared": ("ep",) if shard is Shard.EXPERT else ()}
