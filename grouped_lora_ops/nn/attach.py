"""Attaching adapters to a model by its layout, and taking them off again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._checks import dtype_name, instance
from ..adapters import Adapter, AdapterBank
from ..adapters.collective import Together
from ..adapters.image import fill, lay_out, views
from ..layouts import Buffer, Model, Shard, Share
from ..layouts.model import WHOLE
from . import experts as registry_of
from .experts import NAME, ORDERED, ExpertsLora
from .factors import BankFactors, LoraFactors, adapter_of
from .linear import LoraLinear, misfit
from .routing import Routing

_WHERE = "grouped_lora_ops.nn"
MODES = (None, "parent", "fused")


class Attached:
    """Adapters on a model; `detach` takes them off. Made by `attach_bank` and `attach_trainable`."""

    def __init__(self, model: nn.Module, layout: Model, routing: Routing, bank: AdapterBank | None = None):
        self.model, self.layout, self.routing, self.bank = model, layout, routing, bank
        self.linears: dict[str, LoraLinear] = {}  # by buffer key
        self.experts: dict[str, ExpertsLora] = {}  # by the path of the experts module
        self.factors: list[LoraFactors] = []  # what is trained, in the layout's order
        self._undo: list = []
        self._checked: dict[int, int] = {}  # {slot: its generation} of the scalings looked at

    def __repr__(self) -> str:
        what = "trained" if self.factors else "served from a bank"
        return f"<Attached: {len(self.linears)} linears and {len(self.experts)} experts of {type(self.model).__name__}, {what}>"

    def detach(self) -> None:
        """The model as it was: its modules, its requires_grad, its experts implementation. Twice is no error."""
        while self._undo:
            self._undo.pop()()
        self.linears, self.experts = {}, {}

    def prepare(self, tokens: int, device: torch.device | str) -> Tensor:
        """Fixed ids of T tokens, for a graph; see `Routing.prepare`."""
        return self.routing.prepare(tokens, device)

    # ---- serving -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def using(self, names: Sequence[str | None]) -> Iterator[dict[str, int]]:
        """Hold adapters of the bank and give each sequence (or token; see `Routing`) its own; afterwards ids are what they were."""
        if self.bank is None:
            raise RuntimeError(f"{_WHERE}.Attached: factors that are trained are in no bank; say the slots with routing.set.")
        with self.bank.using(names) as slots:
            self._check_scalings(slots)
            before = self.routing.state
            try:
                self.routing.set(self.bank.adapter_ids(names), active=any(n is not None for n in names))
                yield slots
            finally:
                self.routing.state = before

    def _check_scalings(self, slots: dict[str, int]) -> None:
        """expert_mlp has one scaling for gate_up and down; read once for every content of a slot."""
        pairs = [(e.up, e.down) for e in self.experts.values() if e.mode == "fused" and e.up is not None and e.down is not None]
        for name, slot in slots.items() if pairs else ():
            if self._checked.get(slot) == self.bank.generation(slot):
                continue
            both = torch.stack([torch.stack([f.slots.scalings[slot] for f in pair]) for pair in pairs])
            if not bool((both[:, 0] == both[:, 1]).all()):
                raise ValueError(
                    f"{_WHERE}.Attached: {name} scales gate_up_proj and down_proj differently, which expert_mlp cannot; "
                    'attach with experts="parent".'
                )
            self._checked[slot] = self.bank.generation(slot)

    # ---- training ------------------------------------------------------------------------------------------------------

    def parameters(self, slot: int | None = None) -> list[nn.Parameter]:
        """The factors of one slot (job), or of all."""
        return [p for f in self.factors for factors in (f.a, f.b) for p in (factors if slot is None else [factors[slot]])]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initial values, for factors that were made on the meta device."""
        for f in self.factors:
            f.reset_parameters(generator)

    def adapter(self, slot: int = 0) -> Adapter:
        """A copy of what a slot has learned, as `write_adapter` and a bank take it; of a rank's share, that share."""
        if not self.factors:
            raise RuntimeError(f"{_WHERE}.Attached: nothing is trained here.")
        return adapter_of(self.factors, slot)

    @torch.no_grad()
    def load(self, adapter: Adapter, slot: int = 0) -> None:
        """Start a slot from a whole adapter, of which a rank takes its share. Where it has no module, or a lower
        rank, B is zero and A stays as it was.

        Errors: ValueError that lists all that does not fit; then nothing has changed.
        """
        if not self.factors:
            raise RuntimeError(f"{_WHERE}.Attached: nothing is trained here; load adapters into the bank.")
        rank, dtype = max(f.ranks[slot] for f in self.factors), self.factors[0].a[slot].dtype
        plan = lay_out(self.layout, tuple(f.buffer for f in self.factors), 1, rank, dtype)
        image, count = torch.zeros(plan.image, dtype=dtype), len(self.factors)
        scalings, ranks = torch.zeros(count), torch.zeros(count, dtype=torch.int32)
        fill(plan, adapter, image, scalings, ranks)
        for f, (a, b), scaling, filled in zip(self.factors, views(plan, image), scalings.tolist(), ranks.tolist()):
            f.b[slot].copy_(b[..., : f.ranks[slot]])
            f.a[slot].narrow(-2, 0, filled).copy_(a.narrow(-2, 0, filled))  # the rest of A stays random, or it would never learn
            if filled:
                f.set_scaling(slot, scaling)


@dataclass(frozen=True)
class _Options:
    direct: tuple[str, ...] | None
    experts: str | None
    tp_group: object
    sequence_dim: int | None


def attach_bank(
    model: nn.Module,
    bank: AdapterBank,
    *,
    direct: Sequence[str] | None = None,
    experts: str | None = None,
    tp_group: torch.distributed.ProcessGroup | None = None,
    sequence_dim: int | None = None,
) -> Attached:
    """Serve a model with the adapters of a bank: every projection that the bank has buffers for reads its slots.

    Linear modules are replaced by a `LoraLinear` that calls them; they, and all parameters, stay the same objects, and a
    state_dict stays what it was. Experts are reached through transformers' registry (see `ExpertsLora` for experts=
    "parent" and "fused"; None: parent where the model runs `grouped_mm` or `batched_mm`, else fused). Fused modules
    (`qkv_proj`) need a bank planned with fused=True, which serves separate ones too.

    direct: projections whose parent multiplies with `.weight` itself (see `LoraLinear`); None: the grouped ones.
    tp_group: the process group of tensor parallelism, for a bank planned with a share of tp > 1 (see `LoraLinear`). Its ranks
    attach together: if one cannot, or has factors of other shapes, all raise the same RuntimeError, and nothing is attached
    anywhere. sequence_dim: with sequence parallelism, the dimension of activations along which ranks divide the tokens.
    Until `using` or `routing.set` says otherwise no token has an adapter.

    Errors: one ValueError that lists modules which are missing, attached already, or of another shape or dtype; nothing
    has changed then.
    """
    instance("nn.attach_bank", "model", model, nn.Module, "the model itself")
    instance("nn.attach_bank", "bank", bank, AdapterBank, "of the plan of this model")
    attached = Attached(model, bank.plan.model, Routing(bank.plan.slots, [-1]), bank)
    options = _options("attach_bank", direct, experts, tp_group, sequence_dim)
    return _attach("attach_bank", attached, bank.plan.buffers, options, lambda b, path, weight: BankFactors(bank[path]), bank.plan.dtype)


def attach_trainable(
    model: nn.Module,
    layout: Model,
    *,
    rank: int | Sequence[int] = 8,
    alpha: float | Sequence[float] | None = None,
    slots: int = 1,
    selectors: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    share: Share = WHOLE,
    fused: bool = False,
    shared_outer: bool = False,
    gate_up_each: bool = True,
    direct: Sequence[str] | None = None,
    experts: str | None = None,
    tp_group: torch.distributed.ProcessGroup | None = None,
    sequence_dim: int | None = None,
    generator: torch.Generator | None = None,
) -> Attached:
    """Train adapters on a model: its parameters are frozen, and every target gets A and B (`LoraFactors`) to train.

    slots: jobs that are trained side by side, a slot each; rank and alpha (None: rank) may be given for each. With one slot
    every token has it; with more, `routing.set` says which sequence belongs to which job, and `parameters(slot)` are
    a job's own. dtype: of the factors; float32 masters take part rounded to the activations' dtype. None: the weight's.
    Factors are on their weight's device, meta too. The other arguments: as in `attach_bank` and `layouts.Model.buffers`.

    Errors: as `attach_bank`; ValueError for ranks or alphas that are not one for each slot.
    """
    where = f"{_WHERE}.attach_trainable"
    instance("nn.attach_trainable", "model", model, nn.Module, "the model itself")
    instance("nn.attach_trainable", "layout", layout, Model, "as layouts.of(model.config) makes it")
    if not isinstance(slots, int) or slots < 1:
        raise ValueError(f"{where}: slots must be an integer of at least 1; got {slots!r}.")
    ranks = [rank] * slots if isinstance(rank, int) else list(rank)
    alphas = ranks if alpha is None else [alpha] * slots if isinstance(alpha, (int, float)) else list(alpha)
    if len(ranks) != slots or len(alphas) != slots or not all(isinstance(r, int) and r > 0 for r in ranks):
        raise ValueError(f"{where}: rank and alpha must be positive, one or one for each of {slots} slots; got {rank}, {alpha}.")
    scalings = [a / r for a, r in zip(alphas, ranks)]
    kinds = dict(selectors=selectors, share=share, fused=fused, shared_outer=shared_outer, gate_up_each=gate_up_each)
    buffers = layout.buffers(slots, max(ranks), **kinds)
    attached = Attached(model, layout, Routing(slots, [0] if slots == 1 else None))

    def factors(buffer: Buffer, path: str, weight: Tensor) -> LoraFactors:
        options = dict(dtype=dtype or weight.dtype, device=weight.device, generator=generator)
        if shared_outer and buffer.kind == "experts":
            options["shared"] = "a" if buffer.places[0].projection.gated else "b"
        made = LoraFactors(buffer, ranks, scalings, **options)
        attached.factors.append(made)
        return made

    options = _options("attach_trainable", direct, experts, tp_group, sequence_dim)
    found = _attach("attach_trainable", attached, buffers, options, factors, None, ("ranks", ranks, "scalings", scalings))
    trained = {id(p) for m in model.modules() if isinstance(m, LoraFactors) for p in m.parameters()}  # others' factors too
    for p in model.parameters():
        if id(p) not in trained and p.requires_grad:
            p.requires_grad_(False)
            attached._undo.append(lambda p=p: p.requires_grad_(True))
    return found


def _options(where: str, direct, experts, tp_group, sequence_dim) -> _Options:
    if experts not in MODES:
        raise ValueError(f'{_WHERE}.{where}: experts must be None, "parent" or "fused"; got {experts!r}.')
    if sequence_dim is not None and (not isinstance(sequence_dim, int) or sequence_dim < 0 or tp_group is None):
        raise ValueError(f"{_WHERE}.{where}: sequence_dim must be a dimension (0, 1, …), given with tp_group; got {sequence_dim!r}.")
    return _Options(None if direct is None else tuple(direct), experts, tp_group, sequence_dim)


def _find(model: nn.Module, layout: Model, layer: int, names: Sequence[str]) -> tuple[nn.Module, str, nn.Module] | None:
    """(parent, attribute, module) of the first of these paths below a layer that the model has, under any prefix."""
    for prefix in (layout.prefix, *layout.layout.prefixes):
        for name in names:
            owner, _, leaf = f"{prefix}.{layer}.{name}".rpartition(".")
            try:
                parent = model.get_submodule(owner)
                return parent, leaf, parent.get_submodule(leaf)
            except AttributeError:
                continue
    return None


def _attach(where, attached: Attached, buffers: Sequence[Buffer], options: _Options, factors, dtype, also: tuple = ()) -> Attached:
    """Look at everything first, then change the model."""
    model, layout = attached.model, attached.layout
    problems: list[str] = []
    linears: list[tuple] = []
    other_dtype: list[tuple] = []
    owners: dict[str, dict[str, Buffer]] = {}
    direct = options.direct
    direct = None if direct is None else {p.path for p in layout.targets(direct)}
    for buffer in buffers:
        if buffer.kind == "experts":
            owners.setdefault(buffer.key.rpartition(".")[0], {})[buffer.key] = buffer
            continue
        for one, path, module in _modules(model, layout, buffer, problems):
            if isinstance(module[2], LoraLinear):
                problems.append(f"{path} has adapters attached already; detach those first.")
                continue
            weight = getattr(module[2], "weight", None)
            wrong = misfit(one, weight)
            plain = weight is not None and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
            if wrong:
                problems.append(f"{path}: {wrong}.")
            elif dtype is not None and plain and weight.dtype != dtype:
                other_dtype.append((path, weight.dtype))
            p = one.places[0].projection
            columns = one.parts[0].columns
            if options.tp_group is None and p.facts.shard is Shard.ROW and columns.stop - columns.start < p.in_features:
                problems.append(f"{path} is divided by rows; tp_group must be given, over which h is summed.")
            linears.append((one, path, module, p.path in direct if direct is not None else one.kind == "grouped"))
    for wanted in dict.fromkeys(w for _, w in other_dtype):  # one line each, or a model in another dtype makes hundreds
        first, *others = (path for path, w in other_dtype if w == wanted)
        also_there = f" and {len(others)} more" if others else ""
        problems.append(
            f"{first}{also_there}: the bank must be {dtype_name(wanted)} like the weight "
            f"(plan_bank(…, dtype=torch.{dtype_name(wanted)})); got {dtype_name(dtype)}."
        )
    found_experts = [_experts(model, layout, owner, group, options, problems) for owner, group in owners.items()]
    if options.sequence_dim is not None:
        problems += [f"{owner}: experts are not attached with sequence_dim; name selectors without them." for owner in owners]
    Together(f"{_WHERE}.{where}", options.tp_group).step("attaching", lambda: _refuse(where, problems))
    _same_everywhere(where, [also, *((b.key, b.a_shape, b.b_shape) for b in buffers)], options.tp_group)
    try:
        order = {key: n for n, key in enumerate(key for b in buffers for key in (b.key, *(p.path for p in b.places)))}
        parallel = dict(tp_group=options.tp_group, sequence_dim=options.sequence_dim)
        for buffer, path, (parent, name, base), is_direct in linears:
            f = factors(buffer, path, getattr(base, "weight", next(base.parameters(), None)))
            made = LoraLinear(base, f, buffer, attached.routing, direct=is_direct, **parallel)
            setattr(parent, name, made)
            attached._undo.append(lambda parent=parent, name=name, made=made: setattr(parent, name, made.release()))
            attached.linears[path] = made
        for owner, module, group, mode in found_experts:
            _attach_experts(attached, owner, module, group, mode, factors)
        attached.factors.sort(key=lambda f: order[f.buffer.key])
    except BaseException:
        attached.detach()
        raise
    return attached


def _refuse(where: str, problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"{_WHERE}.{where}: nothing was attached:" + "".join(f"\n  - {p}" for p in problems))


def _same_everywhere(where: str, own: list[tuple], group) -> None:
    """Ranks whose factors have other shapes would wait for each other in the first sum, or add what does not belong together."""
    first, *others = Together(_WHERE, group).gather(own)
    for rank, other in enumerate(others, 1):
        if other != first:
            mine, theirs = next(((a, b) for a, b in zip(first, other) if a != b), (len(first), len(other)))
            raise RuntimeError(f"{_WHERE}.{where}: all ranks must have the same factors; rank 0 has {mine}, rank {rank} {theirs}.")


def _modules(model, layout: Model, buffer: Buffer, problems: list[str]) -> list[tuple[Buffer, str, tuple]]:
    """The modules that read a buffer: one, or a fused family's members where the model keeps them apart."""
    places = buffer.places
    if buffer.kind == "fused":
        family = buffer.key.removeprefix(f"{layout.prefix}.{places[0].layer}.")
        found = _find(model, layout, places[0].layer, layout.layout.renamed(family))
        if found is not None:
            return [(buffer, buffer.key, found)]
    made = []
    for n, place in enumerate(places):
        found = _find(model, layout, place.layer, layout.layout.names(place.projection.facts))
        if found is None:
            facts = place.projection.facts
            fused = facts.family and _find(model, layout, place.layer, layout.layout.renamed(f"{facts.owner}.{facts.family}"))
            cure = f"; the model has {facts.family}, which needs buffers made with fused=True" if fused else ""
            problems.append(f"{place.path}: the model has no such module{cure}.")
            continue
        one = buffer if buffer.kind != "fused" else _member(buffer, n)
        made.append((one, place.path, found))
    return made


def _member(buffer: Buffer, n: int) -> Buffer:
    """A fused buffer's member as a plain one of its own."""
    size = buffer.out_sizes[n]
    a, b = (buffer.a_shape[0], *buffer.a_shape[2:]), (buffer.b_shape[0], size, buffer.b_shape[-1])
    return Buffer(buffer.places[n].path, (buffer.places[n],), "plain", a, b, None, (buffer.parts[n],))


def _experts(model, layout: Model, owner: str, group: dict[str, Buffer], options: _Options, problems: list[str]):
    """(owner, module, {leaf: buffer}, mode) of one layer's experts."""
    place = next(iter(group.values())).places[0]
    below = place.projection.facts.owner
    found = _find(model, layout, place.layer, layout.layout.renamed(below))
    if found is None:
        problems.append(f"{owner}: the model has no such module.")
        return None
    module = found[2]
    leaves = {buffer.places[0].projection.facts.leaf: buffer for buffer in group.values()}
    try:
        functions = registry_of.registry()
    except ImportError as error:
        problems.append(f"{owner}: {error}")
        return None
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")):
        problems.append(f"{owner}: {type(module).__name__} does not ask transformers' registry for its forward.")
        return None
    if "_grouped_lora" in module.__dict__:  # all layers share one config, and one attachment
        problems.append(f"{owner}: the model's experts have adapters attached already; detach those first.")
        return None
    configured = module.config._experts_implementation
    mode = options.experts or ("parent" if configured in ORDERED and configured in functions else "fused")
    if mode == "parent" and configured not in ORDERED:
        problems.append(f'{owner}: the model runs {configured}, which has no place for deltas; use experts="fused", or one of {ORDERED}.')
    for leaf, buffer in leaves.items():
        weight, part = getattr(module, leaf, None), buffer.parts[0].experts
        p = buffer.places[0].projection
        want = [part.stop - part.start, p.out_features, p.in_features]
        want = [want[0], want[2], want[1]] if module.is_transposed else want
        if weight is None or (weight.dim() == 3 and weight.is_floating_point() and list(weight.shape) != want):
            got = "none" if weight is None else list(weight.shape)
            problems.append(f"{owner}.{leaf}: must be {want} for these adapters; got {got}.")
    return owner, module, leaves, mode


def _attach_experts(attached: Attached, owner: str, module: nn.Module, leaves: dict[str, Buffer], mode: str, factors) -> None:
    config = module.config
    if config._experts_implementation != NAME:
        parent = config._experts_implementation
        for other in attached.model.modules():  # layers without adapters share the config
            if getattr(other, "config", None) is config and "is_transposed" in other.__dict__ and "_grouped_lora" not in other.__dict__:
                other.__dict__["_grouped_lora"] = ExpertsLora(other, parent, "none")
                attached._undo.append(lambda other=other: other.__dict__.pop("_grouped_lora"))
        config._experts_implementation = NAME
        attached._undo.append(lambda: setattr(config, "_experts_implementation", parent))
    before = module.__dict__["_grouped_lora"]
    sources: dict[str, BankFactors | LoraFactors] = {}
    for leaf, buffer in leaves.items():
        sources[leaf] = factors(buffer, buffer.key, getattr(module, leaf))
        if isinstance(sources[leaf], LoraFactors):
            name = f"{leaf}_lora"
            module._modules[name] = sources[leaf]
            attached._undo.append(lambda name=name: module._modules.pop(name))
    down = sources.get("down_proj")
    up = next((source for leaf, source in sources.items() if leaf != "down_proj"), None)
    storage = attached.layout.layout.experts
    lora = ExpertsLora(module, before.parent, mode, storage, up, down, attached.routing)
    module.__dict__["_grouped_lora"] = lora

    def undo():
        module.__dict__["_grouped_lora"] = before

    attached._undo.append(undo)
    attached.experts[owner] = lora
