"""Adapters over tensor- and expert-parallel ranks: cutting and joining them, gradients, and DTensor rules.

How a projection is divided is a fact of its layout (`layouts.Shard`):
  column           A on every rank, B's rows divided; h is whole, y is the rank's rows. A's gradient is summed over tp.
  row              A's columns divided, B on every rank; h is summed over tp before B reads it, so that B's gradient is whole.
  grouped column   A on every rank, B's groups divided; x and y are the rank's groups, nothing is communicated forward.
  replicated       both on every rank.
  expert           experts divided over ep; a factor that all experts share is on every rank, its gradient summed over ep.

Importing this module registers DTensor rules for shrink, expand, delta, their backwards and plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import ops  # noqa: F401  (registers the ops that the rules below are for)
from .adapters import Adapter, ExpertModule, LoraModule
from .layouts import Model, Place, Shard, Share, Sized

_WHERE = "grouped_lora_ops.sharding"


def _report(where: str, problems: Sequence[str]) -> ValueError:
    return ValueError(f"{_WHERE}.{where}:" + "".join(f"\n  - {p}" for p in problems))


def _projection(model: Model, path: str) -> Sized:
    place = model.locate(path)
    if not isinstance(place, Place):
        raise ValueError(f"{_WHERE}: {path} {place if isinstance(place, str) else 'is no projection'}.")
    return place.projection


# ---- adapters ------------------------------------------------------------------------------------------------------------


def shard_adapter(adapter: Adapter, model: Model, share: Share, *, divide_rank: bool = False) -> Adapter:
    """What one process holds of a whole adapter, as copies.

    divide_rank: A of column projections is divided over its r rows too, [r/tp, D], as engines do that gather h between
    A and B. This library's modules have A whole there.

    Errors: one ValueError that lists the projections whose features, groups, experts or rank do not divide, and factors
    that are not the whole projection's.
    """
    problems: list[str] = []
    modules: dict[str, LoraModule] = {}
    experts: dict[str, ExpertModule] = {}
    for path, lora in (*adapter.modules.items(), *adapter.experts.items()):
        try:
            p = _projection(model, path)
            part = p.part(share)
        except ValueError as error:
            problems.append(str(error))
            continue
        if isinstance(lora, ExpertModule):
            counts = {len(lora.lora_a), len(lora.lora_b)}
            if not counts <= {1, p.experts}:
                problems.append(f"{path}: factors must be of 1 or {p.experts} experts; got {sorted(counts)}.")
                continue
            a, b = (f[part.experts].clone() if len(f) > 1 else f.clone() for f in (lora.lora_a, lora.lora_b))
            experts[path] = replace(lora, lora_a=a, lora_b=b)
            continue
        want = [lora.rank, p.in_features], [p.total_out, lora.rank]
        got = [list(lora.lora_a.shape), list(lora.lora_b.shape)]
        if got != list(want):
            problems.append(f"{path}: A and B must be {want[0]} and {want[1]}; got {got[0]} and {got[1]}.")
            continue
        a, b = lora.lora_a[:, part.columns], torch.cat([lora.lora_b[rows] for rows in part.rows])
        if divide_rank and p.facts.shard is Shard.COLUMN:
            if lora.rank % share.tp:
                problems.append(f"{path}: tp must divide the rank {lora.rank}; got {share.tp}.")
                continue
            a = a.chunk(share.tp)[share.tp_rank]
        modules[path] = replace(lora, lora_a=a.clone(), lora_b=b.clone())
    if problems:
        raise _report("shard_adapter", problems)
    return replace(adapter, modules=modules, experts=experts)


def unshard_adapter(shards: Sequence[tuple[Share, Adapter]], model: Model) -> Adapter:
    """The whole adapter of every process's share, `shard_adapter` backwards; A may be divided over its rank.

    Errors: one ValueError that lists ranks that are missing or given twice, modules that not all shares have, parts of
    a wrong shape, scalings that differ, and replicas that are not the same bit for bit.
    """
    where = "unshard_adapter"
    if not shards:
        raise ValueError(f"{_WHERE}.{where}: shards must not be empty.")
    first = shards[0][0]
    tp, ep = first.tp, first.ep
    given = [(share.tp, share.ep, share.tp_rank, share.ep_rank) for share, _ in shards]
    wanted = [(tp, ep, t, e) for t in range(tp) for e in range(ep)]
    if sorted(given) != sorted(wanted):
        lacking = [w[2:] for w in wanted if w not in given]
        raise ValueError(
            f"{_WHERE}.{where}: there must be one share of each (tp_rank, ep_rank) of tp={tp}, ep={ep}; "
            f"got {len(shards)}, without {lacking[:4]}."
        )
    whole = shards[0][1]
    problems: list[str] = []
    modules: dict[str, LoraModule] = {}
    experts: dict[str, ExpertModule] = {}
    for path, lora in (*whole.modules.items(), *whole.experts.items()):
        kind = "modules" if path in whole.modules else "experts"
        have = [(share, getattr(adapter, kind).get(path)) for share, adapter in shards]
        if any(other is None for _, other in have):
            problems.append(f"{path} is not in every share.")
        elif any((other.rank, other.scaling) != (lora.rank, lora.scaling) for _, other in have):
            problems.append(f"{path}: ranks or scalings differ.")
        else:
            try:
                p = _projection(model, path)
                a, b = _join_experts(path, p, have) if kind == "experts" else _join(path, p, have)
                (experts if kind == "experts" else modules)[path] = replace(lora, lora_a=a, lora_b=b)
            except ValueError as error:
                problems.append(str(error).removeprefix(f"{_WHERE}.{where}: "))
    extra = {path for _, adapter in shards for path in (*adapter.modules, *adapter.experts)} - {*whole.modules, *whole.experts}
    problems += [f"{path} is not in every share." for path in sorted(extra)]
    if problems:
        raise _report(where, problems)
    return replace(whole, modules=modules, experts=experts)


class _Canvas:
    """A whole factor that parts are written into; parts that overlap must agree."""

    def __init__(self, path: str, kind: str, shape: tuple[int, ...], like: Tensor):
        self.path, self.kind = path, kind
        self.whole, self.seen = like.new_zeros(shape), torch.zeros(shape, dtype=torch.bool)

    def put(self, where: tuple, part: Tensor) -> None:
        target = self.whole[where]
        if target.shape != part.shape or part.dtype != target.dtype:
            raise ValueError(f"{self.path}: {self.kind} must be {list(target.shape)}; got {list(part.shape)}.")
        seen = self.seen[where]
        if not _bits(target)[seen].equal(_bits(part)[seen]):
            raise ValueError(f"{self.path}: {self.kind} must be the same on all ranks that hold it, and is not.")
        self.whole[where], self.seen[where] = part, True


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _join(path: str, p: Sized, have) -> tuple[Tensor, Tensor]:
    lora = have[0][1]
    a = _Canvas(path, "A", (lora.rank, p.in_features), lora.lora_a)
    b = _Canvas(path, "B", (p.total_out, lora.rank), lora.lora_b)
    for share, own in have:
        part, rows = p.part(share), slice(None)
        if p.facts.shard is Shard.COLUMN and len(own.lora_a) * share.tp == lora.rank and share.tp > 1:
            rows = slice(share.tp_rank * len(own.lora_a), (share.tp_rank + 1) * len(own.lora_a))
        a.put((rows, part.columns), own.lora_a)
        sizes = [r.stop - r.start for r in part.rows]
        if len(own.lora_b) != sum(sizes):
            raise ValueError(f"{path}: B must have {sum(sizes)} rows on a rank; got {len(own.lora_b)}.")
        for r, piece in zip(part.rows, own.lora_b.split(sizes)):
            b.put((r,), piece)
    return a.whole, b.whole


def _join_experts(path: str, p: Sized, have) -> tuple[Tensor, Tensor]:
    made = []
    for kind in ("lora_a", "lora_b"):
        like = getattr(have[0][1], kind)
        part = p.part(have[0][0]).experts
        local = part.stop - part.start
        # one expert a rank: a factor that all ranks have alike is kept as one that they share, which is the same delta
        shared = len(like) == 1 and (local > 1 or all(_same(like, getattr(own, kind)) for _, own in have))
        canvas = _Canvas(path, kind[-1].upper(), ((1 if shared else p.experts), *like.shape[1:]), like)
        for own_share, own in have:
            canvas.put((slice(None) if shared else p.part(own_share).experts,), getattr(own, kind))
        made.append(canvas.whole)
    return made[0], made[1]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _bits(a).equal(_bits(b))


# ---- experts and gradients -----------------------------------------------------------------------------------------------


def local_expert_ids(topk_ids: Tensor, experts: slice) -> Tensor:
    """Ids among a rank's own experts [start, stop), −1 for those of other ranks: what the expert ops leave out."""
    inside = (topk_ids >= experts.start) & (topk_ids < experts.stop)
    return torch.where(inside, topk_ids - experts.start, -1)


def sum_gradients(
    factors: Sequence,
    model: Model,
    *,
    tp_group: torch.distributed.ProcessGroup | None = None,
    ep_group: torch.distributed.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Complete the gradients of factors that several ranks hold, in place, before the optimizer's step.

    factors: `Attached.factors`. Which factor is summed over which group is the layout's `gradient_sums`; sums, never
    means, in the gradient's dtype. All ranks of a group call this together; a gradient that is missing on a rank counts as
    zeros. Data-parallel reduction comes on top.

    Errors: ValueError, before anything is sent, if a group is needed and was not given.
    """
    groups, sums = {"tp": tp_group, "ep": ep_group}, []
    for f in factors:
        p = f.buffer.places[0].projection
        over = model.gradient_sums(p, sequence_parallel=sequence_parallel)
        for name, parameters in (("a", f.a), ("b", f.b)):
            names = over[name] + (over["shared"] if name in f.shared else ())
            for group in names:
                if groups[group] is None and _is_divided(f, group):
                    raise ValueError(f"{_WHERE}.sum_gradients: {f.buffer.key}: {group}_group must be given.")
                if groups[group] is not None:
                    sums += [(parameter, groups[group]) for parameter in parameters]
    for parameter, group in sums:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad, group=group)


def _is_divided(f, group: str) -> bool:
    p, part = f.buffer.places[0].projection, f.buffer.parts[0]
    if group == "ep":
        return part.experts is not None and part.experts.stop - part.experts.start < p.experts
    return part.columns.stop - part.columns.start < p.in_features or sum(r.stop - r.start for r in part.rows) < p.total_out


# ---- DTensor -------------------------------------------------------------------------------------------------------------


def _rules():
    """{op: rule}: a rule lists (placements of the outputs, placements of the arguments) that need no communication."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, total = Replicate(), Partial()

    def optional(t, placement=whole):
        return None if t is None else placement

    def needed(needs, *placements):
        return [p if need else whole for need, p in zip(needs, placements)]

    def shrink(x, a, ids, ranks=None, plan=None):
        def inputs(x_, a_, ids_=whole):
            return [x_, a_, ids_, optional(ranks), optional(plan)]

        rules = [([whole], inputs(whole, whole))]
        if plan is None:
            rules.append(([Shard(0)], inputs(Shard(0), whole, Shard(0))))
        if x.ndim == 3 or a.ndim == 4:
            rules.append(([Shard(1)], inputs(Shard(1) if x.ndim == 3 else whole, Shard(1) if a.ndim == 4 else whole)))
        rules.append(([total], inputs(Shard(x.ndim - 1), Shard(a.ndim - 1))))
        return rules

    def shrink_backward(grad, x, a, ids, ranks, plan, needs):
        def inputs(grad_, x_, a_, ids_=whole):
            return [grad_, x_, a_, ids_, optional(ranks), optional(plan), None]

        rules = [([whole, whole], inputs(whole, whole, whole))]
        if plan is None:
            rules.append((needed(needs, Shard(0), total), inputs(Shard(0), Shard(0), whole, Shard(0))))
        if x.ndim == 3 or a.ndim == 4:
            x_, a_ = Shard(1) if x.ndim == 3 else whole, Shard(1) if a.ndim == 4 else whole
            outputs = needed(needs, Shard(1) if x.ndim == 3 else total, Shard(1) if a.ndim == 4 else total)
            rules.append((outputs, inputs(Shard(1), x_, a_)))
        columns = Shard(x.ndim - 1), Shard(a.ndim - 1)
        rules.append((needed(needs, *columns), inputs(whole, *columns)))
        return rules

    def expand(h, b, ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
        def inputs(h_, b_, base_, ids_=whole):
            return [h_, b_, ids_, whole, optional(base, base_), None, optional(ranks), optional(plan)]

        rules = [([whole], inputs(whole, whole, whole))]
        if plan is None:
            rules.append(([Shard(0)], inputs(Shard(0), whole, Shard(0), Shard(0))))
        if out_sizes is None:
            last = Shard(b.ndim - 2)  # y is [T, N] or [T, G, N] where B is [L, N, r] or [L, G, N, r]
            rules.append(([last], inputs(whole, last, last)))
        if b.ndim == 4:
            rules.append(([Shard(1)], inputs(Shard(1) if h.ndim == 3 else whole, Shard(1), Shard(1))))
        return rules

    def expand_backward(grad, h, b, ids, scalings, out_sizes, ranks, plan, needs):
        def inputs(grad_, h_, b_, ids_=whole):
            return [grad_, h_, b_, ids_, whole, None, optional(ranks), optional(plan), None]

        rules = [([whole, whole], inputs(whole, whole, whole))]
        if plan is None:
            rules.append((needed(needs, Shard(0), total), inputs(Shard(0), Shard(0), whole, Shard(0))))
        if out_sizes is None:
            last = Shard(b.ndim - 2)
            rules.append((needed(needs, total, last), inputs(last, whole, last)))
        if b.ndim == 4:
            h_ = Shard(1) if h.ndim == 3 else whole
            rules.append((needed(needs, Shard(1) if h.ndim == 3 else total, Shard(1)), inputs(Shard(1), h_, Shard(1))))
        return rules

    def delta(x, a, b, ids, scalings, base=None, out_sizes=None, ranks=None, plan=None):
        def inputs(x_, a_, b_, base_, ids_=whole):
            return [x_, a_, b_, ids_, whole, optional(base, base_), None, optional(ranks), optional(plan)]

        rules = [([whole], inputs(whole, whole, whole, whole))]
        if plan is None:
            rules.append(([Shard(0)], inputs(Shard(0), whole, whole, Shard(0), Shard(0))))
        if out_sizes is None:
            last = Shard(b.ndim - 2)
            rules.append(([last], inputs(whole, whole, last, last)))
        if b.ndim == 4:
            x_, a_ = Shard(1) if x.ndim == 3 else whole, Shard(1) if a.ndim == 4 else whole
            rules.append(([Shard(1)], inputs(x_, a_, Shard(1), Shard(1))))
        if base is None:
            rules.append(([total], inputs(Shard(x.ndim - 1), Shard(a.ndim - 1), whole, whole)))
        return rules

    def delta_backward(grad, x, a, b, ids, scalings, out_sizes, ranks, plan, needs):
        def inputs(grad_, x_, a_, b_, ids_=whole):
            return [grad_, x_, a_, b_, ids_, whole, None, optional(ranks), optional(plan), None]

        rules = [([whole] * 3, inputs(whole, whole, whole, whole))]
        if plan is None:
            rules.append((needed(needs, Shard(0), total, total), inputs(Shard(0), Shard(0), whole, whole, Shard(0))))
        if out_sizes is None:
            last = Shard(b.ndim - 2)
            rules.append((needed(needs, total, total, last), inputs(last, whole, whole, last)))
        if b.ndim == 4:
            x_, a_ = Shard(1) if x.ndim == 3 else whole, Shard(1) if a.ndim == 4 else whole
            outputs = needed(needs, Shard(1) if x.ndim == 3 else total, Shard(1) if a.ndim == 4 else total, Shard(1))
            rules.append((outputs, inputs(Shard(1), x_, a_, Shard(1))))
        columns = Shard(x.ndim - 1), Shard(a.ndim - 1)
        rules.append((needed(needs, *columns, total), inputs(whole, *columns, whole)))
        return rules

    def plan(ids, num_slots):
        return [([whole], [whole, None])]

    rules = (shrink, shrink_backward, expand, expand_backward, delta, delta_backward, plan)
    return {getattr(torch.ops.grouped_lora, rule.__name__).default: rule for rule in rules}


def _register() -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    for op, rule in _rules().items():
        register_sharding(op)(rule)
        # register_sharding keys its cache by tensors and by what follows the first int argument; ours also have lists
        # (out_sizes, needs) on which the rules depend
        info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info.get(op)
        first = next((i for i, a in enumerate(op._schema.arguments) if "Tensor" not in str(a.type)), None)
        if info is not None and first is not None:
            info.static_argnum = first


_register()
