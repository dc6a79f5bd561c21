"""Expert factors as files hold them, made into `ExpertModule`s, and back into peft's pairs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layouts import ExpertStorage, Place
from .adapter import ExpertModule, common_scaling, scaled


@dataclass
class Factor:
    """One tensor of a file."""

    name: str
    tensor: Tensor
    module: str  # its module path in the file
    bad: bool = False  # a problem with it was reported

    def check(self, shape: Sequence[int | str], problems: list[str]) -> bool:
        """Whether it has this shape and is finite; a size that is a word may be any but 0."""
        if self.bad:
            return False
        got = list(self.tensor.shape)
        fits = len(got) == len(shape) and all(g == s or (isinstance(s, str) and g > 0) for g, s in zip(got, shape))
        if not fits:
            source = "the configuration's rank" if any(isinstance(s, str) for s in shape) else "the configuration and the model"
            problems.append(f"{self.name} must be [{', '.join(map(str, shape))}] by {source}; got {got}.")
        elif not self.tensor.isfinite().all():
            problems.append(f"{self.name} holds NaN or Inf.")
        else:
            return True
        self.bad = True
        return False


@dataclass
class Parameters:
    """A pair of peft's for one 3-D parameter: two 2-D tensors that hold every expert."""

    place: Place
    a: Factor
    b: Factor
    rank: int
    scaling: float


# ---- peft's pairs ----------------------------------------------------------------------------------------------------


def written_by(version: str | None, transposed: bool) -> set[bool]:
    """Whether peft of this version exchanges A and B of a 3-D parameter; both where that depends on what no file says.

    Observed by running them: 0.18 takes the middle dimension for `in`, which is wrong for [E, out, in]. 0.19.0 does that
    too, and then exchanges the factors of [E, in, out]; from 0.19.1 on those of [E, out, in], so that both are right.
    [E, in, out] is recognised by an attribute of the model class that older releases of transformers lack.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", version or "")
    if match is None:
        return set()
    release, suffix = tuple(int(n) for n in match.groups()[:3]), match[4]
    if release < (0, 17, 0) or (suffix and release in ((0, 19, 0), (0, 19, 1))):
        return set()  # no target_parameters yet, or a snapshot from between the changes
    if release < (0, 19, 0):
        return {not transposed}
    return {False, True} if transposed else {release == (0, 19, 0)}


def unwrap(
    pairs: Sequence[Parameters],
    storage: ExpertStorage | None,
    version: str | None,
    asked: tuple[bool | None, str | None],
    stamp: tuple[bool | None, str | None],
    problems: list[str],
) -> dict[str, ExpertModule]:
    """peft's pairs as expert modules: A [r·E, in] holds row e·r + k, B [out, r·E] column k·E + e of expert e.

    A file is of one kind: whether A and B are exchanged is voted by the shapes of all its pairs.
    """
    votes: dict[bool, str] = {}
    good = []
    for pair in pairs:
        p, flat = pair.place.projection, pair.place.projection.experts * pair.rank
        plain, exchanged = ([flat, p.in_features], [p.out_features, flat]), ([flat, p.out_features], [p.in_features, flat])
        got = (list(pair.a.tensor.shape), list(pair.b.tensor.shape))
        if got not in (plain, exchanged):
            want = f"{plain[0]} and {plain[1]}" + ("" if plain == exchanged else f" (or exchanged, {exchanged[0]} and {exchanged[1]})")
            problems.append(f"{pair.a.name} and {pair.b.name} must be {want} by the configuration and the model; got {got[0]} and {got[1]}.")
            continue
        finite = [f.check(f.tensor.shape, problems) for f in (pair.a, pair.b)]
        if plain != exchanged:
            votes.setdefault(got == exchanged, pair.a.name)
        if all(finite):
            good.append(pair)
    if not pairs:
        return {}
    if len(votes) == 2:
        problems.append(f"{votes[False]} has A and B in place, {votes[True]} has them exchanged: one file cannot have both.")
        return {}
    possible = written_by(version, storage.transposed)
    swapped = next(iter(votes)) if votes else None
    for said, who in ((asked[0], "expert_swapped"), (stamp[0], "the stamp beside the file")):
        if swapped is not None and said is not None and said != swapped:
            problems.append(f"{next(iter(votes.values()))} has A and B {'exchanged' if swapped else 'in place'}; {who} says otherwise.")
            return {}
    for said in (asked[0], stamp[0], next(iter(possible)) if len(possible) == 1 else None):
        swapped = said if swapped is None else swapped
    if swapped is None:
        problems.append(
            f"{pairs[0].a.name}: the model's sizes are equal, and nothing says whether A and B are exchanged (peft before "
            f"0.19.1 did that; peft_version is {version!r}): pass expert_swapped=True or False."
        )
        return {}
    order = asked[1] or stamp[1]
    if order is None and (swapped in possible or all(p.rank == 1 or p.place.projection.experts == 1 for p in pairs)):
        order = "rank-major"
    if order not in ("rank-major", "expert-major"):
        problems.append(
            f"{pairs[0].b.name}: nothing says in which order its columns hold the experts (peft {version!r} does not write "
            'such a file): pass expert_order="rank-major" or "expert-major".'
        )
        return {}
    return {pair.place.path: _unwrap(pair, storage, swapped, order) for pair in good}


def _unwrap(pair: Parameters, storage: ExpertStorage, swapped: bool, order: str) -> ExpertModule:
    experts, rank = pair.place.projection.experts, pair.rank
    rows = pair.a.tensor.view(experts, rank, -1)  # [E, r, ·]
    if order == "rank-major":
        columns = pair.b.tensor.view(-1, rank, experts).permute(2, 0, 1)  # [E, ·, r]
    else:
        columns = pair.b.tensor.view(-1, experts, rank).permute(1, 0, 2)
    a, b = (columns.transpose(1, 2), rows.transpose(1, 2)) if swapped else (rows, columns)
    if pair.place.projection.gated and storage.interleaved:
        b = torch.cat([b[:, 0::2], b[:, 1::2]], 1)
    return ExpertModule(a.contiguous(), b.contiguous(), rank, pair.scaling)


def wrap(expert: ExpertModule, experts: int, gated: bool, storage: ExpertStorage) -> tuple[Tensor, Tensor, int]:
    """(A [r·E, in], B [out, r·E], r) as peft ≥ 0.19.1 holds them; the inverse of reading. One A for gate and up."""
    expert = expert.with_one_a()
    a, b = (f.expand(experts, -1, -1) for f in (expert.lora_a, expert.lora_b))
    if gated and storage.interleaved:
        b = torch.stack(b.chunk(2, dim=1), 2).flatten(1, 2)
    return a.reshape(experts * expert.rank, -1), b.permute(1, 2, 0).reshape(b.shape[1], -1), expert.rank


# ---- pairs and stacks of experts --------------------------------------------------------------------------------------


@dataclass
class _Side:
    """A or B of one member (gate, up, down, or gate and up together): a stack, or a tensor for each expert."""

    stack: tuple | None = None  # (factor, rank, scaling)
    single: dict | None = None  # {expert: (factor, rank, scaling)}


def gather(
    listed: Sequence[tuple[Place, str, Factor, int, float]],
    storage: ExpertStorage | None,
    problems: list[str],
    is_target: Callable[[str], bool],
) -> dict[str, ExpertModule]:
    """2-D factors of single experts, and 3-D stacks, as expert modules.

    Every expert has gate and up of its own rank and scaling: they are padded with zeros to the largest rank, and a
    scaling that differs goes into a factor.
    """
    sides: dict[str, dict[tuple, _Side]] = {}
    places: dict[str, Place] = {}
    for place, kind, factor, rank, scaling in listed:
        side = sides.setdefault(place.path, {}).setdefault((place.member, kind), _Side())
        places.setdefault(place.path, place)
        if place.form == "stack":
            side.stack = (factor, rank, scaling)
        else:
            side.single = side.single or {}
            side.single[place.expert] = (factor, rank, scaling)
    found = {}
    for path, parts in sides.items():
        before = len(problems)
        made = _gather_one(places[path], parts, storage, problems, is_target)
        if made is not None and len(problems) == before:
            found[path] = made
    return found


def _gather_one(place, parts, storage, problems, is_target) -> ExpertModule | None:
    p = place.projection
    members = {member for member, _ in parts}
    if None in members and p.gated:
        if len(members) > 1:
            problems.append(f"{place.path} has factors of the whole and of its halves.")
            return None
        if storage.interleaved:
            problems.append(f"{place.path}: a stack of gate and up together is ambiguous where the model interleaves them.")
            return None
    pieces: dict[int | None, tuple] = {}
    for member in sorted(members, key=lambda m: -1 if m is None else m):
        a, b = parts.get((member, "A"), _Side()), parts.get((member, "B"), _Side())
        piece = _pair_up(place, member, a, b, problems, is_target)
        if piece is not None:
            pieces[member] = piece
    if len(pieces) < len(members):
        return None
    rank = max(a.shape[-2] for a, *_ in pieces.values())
    scaling, ratios = common_scaling([s for _, _, scalings in pieces.values() for s in scalings])
    halves = []
    for member in (0, 1) if p.gated and None not in members else sorted(pieces, key=str):
        if member not in pieces:  # gate without up, or the other way round: the other half is zero
            (a, b, _) = next(iter(pieces.values()))
            halves.append((torch.zeros_like(a[:1]), torch.zeros_like(b[:1])))
            continue
        a, b, scalings = pieces[member]
        if ratios is not None:
            factor = a if len(b) == 1 and len(a) > 1 else b
            each = scalings * (len(factor) // len(scalings))
            made = [scaled(f, s / scaling) for f, s in zip(factor, each)]
            made = torch.stack([m.to(max((m.dtype for m in made), key=lambda d: d.itemsize)) for m in made])
            a, b = (made, b) if factor is a else (a, made)
        halves.append((a, b))
    a_parts = [_pad(a, rank, -2) for a, _ in halves]
    b_parts = [_pad(b, rank, -1) for _, b in halves]
    if len(halves) == 1:
        return ExpertModule(a_parts[0], b_parts[0], rank, scaling, ratios is not None)
    a_count, b_count = max(map(len, a_parts)), max(map(len, b_parts))
    a = torch.stack([x.expand(a_count, -1, -1) for x in a_parts], 1)
    b = torch.cat([x.expand(b_count, -1, -1) for x in b_parts], 1)
    return ExpertModule(a.contiguous(), b.contiguous(), rank, scaling, ratios is not None)


def _pad(factor: Tensor, rank: int, dim: int) -> Tensor:
    missing = rank - factor.shape[dim]
    return torch.nn.functional.pad(factor, (0, 0, 0, missing) if dim == -2 else (0, missing)) if missing else factor


def _pair_up(place, member, a: _Side, b: _Side, problems, is_target) -> tuple[Tensor, Tensor, list[float]] | None:
    """(A [E|1, r, D], B [E|1, n, r], scaling of every expert, or one) of one member."""
    p, before = place.projection, len(problems)
    rows = p.out_features // 2 if p.gated and member is not None else p.out_features
    for side, other, kind in ((a, b, "A"), (b, a, "B")):
        if side.stack is not None and side.single is not None:
            problems.append(f"{side.stack[0].name} and {next(iter(side.single.values()))[0].name} are the same factor.")
        if side.stack is None and side.single is None:
            there = other.stack or next(iter(other.single.values()))
            problems.append(f"{there[0].name} has no lora_{kind} beside it.")
    if len(problems) > before:
        return None
    if a.single is not None and b.single is not None:
        for one, other, kind in ((a.single, b.single, "A"), (b.single, a.single, "B")):
            for expert in sorted(set(other) - set(one)):
                problems.append(f"{other[expert][0].name} has no lora_{kind} beside it.")
    singles = {**(a.single or {}), **(b.single or {})}
    for expert in sorted(set(range(p.experts)) - set(singles)) if singles else ():
        sibling = next(iter(singles.values()))[0].module
        path = re.sub(r"\.\d+(\.[^.]+)$", rf".{expert}\1", sibling)
        if is_target(path):
            problems.append(f"{path} is among the targets, but has no factors.")
    made = []
    for side, shape_of in ((a, lambda r: (r, p.in_features)), (b, lambda r: (rows, r))):
        if side.stack is not None:
            factor, rank, scaling = side.stack
            tensor = factor.tensor[None] if factor.tensor.dim() == 2 else factor.tensor
            made.append(_stack(factor, tensor, rank, shape_of(rank), p, member, problems))
            continue
        rank = max(r for _, r, _ in side.single.values())
        good = [f.check(shape_of(r), problems) for f, r, _ in side.single.values()]
        if all(good):
            dtype = functools.reduce(torch.promote_types, (f.tensor.dtype for f, _, _ in side.single.values()))
            whole = torch.zeros(p.experts, *shape_of(rank), dtype=dtype)
            for expert, (f, r, _) in side.single.items():
                whole[expert][tuple(slice(0, s) for s in shape_of(r))] = f.tensor
            made.append(whole)
    if len(problems) > before:
        return None
    single = a.single or b.single
    if single is None:
        scalings = [a.stack[2]]
    else:
        scalings = [single[e][2] if e in single else None for e in range(p.experts)]
        known = next(s for s in scalings if s is not None)
        scalings = [known if s is None else s for s in scalings]
        stack = a.stack or b.stack
        if stack is not None and {stack[2]} != set(scalings):
            problems.append(
                f"{stack[0].name}: the configuration gives it the scaling {stack[2]}, and the other factor {sorted(set(scalings))}."
            )
            return None
    one, other = made
    if one.shape[-2] != other.shape[-1]:
        problems.append(f"{place.path}: A has rank {one.shape[-2]}, B rank {other.shape[-1]}.")
        return None
    return one, other, scalings


def _stack(factor, tensor, rank, shape, p, member, problems) -> Tensor | None:
    """A 3-D stack: [E|1, r, D] or [E|1, n, r]; of gate and up together, A may hold one below the other."""
    got, counts = list(tensor.shape), (1, p.experts)
    if p.gated and member is None and tensor.dim() == 3 and shape[1] == p.in_features and got[1] == 2 * shape[0]:
        tensor, got = tensor.view(got[0], 2, shape[0], got[2]), [got[0], *shape]
        return tensor if got[0] in counts and factor.check(factor.tensor.shape, problems) else None
    if tensor.dim() != 3 or got[0] not in counts or tuple(got[1:]) != tuple(shape):
        problems.append(
            f"{factor.name} must be [{' or '.join(map(str, sorted(set(counts))))}, {', '.join(map(str, shape))}] by the "
            f"configuration and the model; got {list(factor.tensor.shape)}."
        )
        return None
    return tensor if factor.check(factor.tensor.shape, problems) else None
