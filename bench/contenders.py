"""Who runs: our ops, the reference, and PyTorch's own ways of doing the same (which know no true ranks: the
random inputs hold zeros past them in A).

`variants(op, contender, w, sets)` returns {name: one call per input set}; metadata (sorted rows, offsets,
plans) is built here, outside the timing, for everyone alike. All of them update `out` in place for delta and
expand, and return h for shrink. An empty dictionary means that the contender has no way to run this workload;
`Unavailable` says why it cannot run here at all, or of one of its ways why that one cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .workloads import Workload

Call = Callable[[], object]
NAMES = ("ours", "reference", "torch", "sglang", "vllm", "no_lora", "torch_lora")  # the last two: of layers with a base
PLAN_FROM = 256  # tokens from which our ops get a plan built beforehand; `bench_plan` times the plan
GATHER_UP_TO = 256  # tokens up to which a copy of A and B per token is a way at all
GROUP_LIMIT = 1024  # of grouped_mm: "Can't process more than 1024 groups" begins with so many


class Unavailable(Exception):
    """The contender is not installed, or does not run on this device; one of its ways does not run at these sizes."""


@dataclass
class Inputs:
    """The sets of one workload, and what they share."""

    w: Workload
    sets: list[dict[str, Tensor]]
    shared: dict  # adapter_ids, scalings, ranks, out_sizes
    plan: Tensor | None = None

    @property
    def ids_and_scalings(self) -> tuple[Tensor, Tensor]:
        return self.shared["adapter_ids"], self.shared["scalings"]


def variants(op: str, contender: str, inputs: Inputs, left_out: dict[str, str] | None = None) -> dict[str, list[Call]]:
    """left_out receives {name: why} of the ways that cannot run these inputs."""
    if contender in ("sglang", "vllm"):
        from . import peers

        return peers.variants(op, contender, inputs)
    if contender == "torch":
        return _that_run(_TORCH[op], inputs, {} if left_out is None else left_out)
    return {"": _OURS[op](inputs, contender == "reference")}


def _that_run(ways: dict[str, Callable], inputs: Inputs, left_out: dict[str, str]) -> dict:
    """{name: what its way makes of inputs}, of those that have one; left_out receives {name: why} of those that cannot run it."""
    found = {}
    for name, way in ways.items():
        try:
            made = way(inputs)
        except Unavailable as reason:
            left_out[name] = str(reason)
            continue
        if made:
            found[name] = made
    return found


# --- ours and the reference ---


def ours_library():
    import grouped_lora_ops

    return grouped_lora_ops


def _op(name: str, reference: bool) -> Callable:
    """The op as a user reaches it, with its registration done, or its reference."""
    library = ours_library()
    return getattr(library.reference, name) if reference else getattr(torch.ops.grouped_lora, name)


def _delta(inputs: Inputs, reference: bool) -> list[Call]:
    op, s, ids, scalings = _op("delta_", reference), inputs.shared, *inputs.ids_and_scalings
    keywords = dict(out_sizes=s["out_sizes"], ranks=s["ranks"], plan=inputs.plan)
    return [lambda t=t: op(t["out"], t["x"], t["lora_a"], t["lora_b"], ids, scalings, **keywords) for t in inputs.sets]


def _shrink(inputs: Inputs, reference: bool) -> list[Call]:
    op, (ids, _) = _op("shrink", reference), inputs.ids_and_scalings
    keywords = dict(ranks=inputs.shared["ranks"], plan=inputs.plan)
    return [lambda t=t: op(t["x"], t["lora_a"], ids, **keywords) for t in inputs.sets]


def _expand(inputs: Inputs, reference: bool) -> list[Call]:
    op, s, ids, scalings = _op("expand_", reference), inputs.shared, *inputs.ids_and_scalings
    keywords = dict(out_sizes=s["out_sizes"], ranks=s["ranks"], plan=inputs.plan)
    return [lambda t=t: op(t["out"], t["h"], t["lora_b"], ids, scalings, **keywords) for t in inputs.sets]


def _plan(inputs: Inputs, reference: bool) -> list[Call]:
    op = _op("plan", reference)
    return [lambda t=t: op(t["adapter_ids"], inputs.w.slots) for t in inputs.sets]


_OURS = {"delta": _delta, "shrink": _shrink, "expand": _expand, "plan": _plan}


# --- PyTorch's own ways ---


@dataclass
class Rows:
    """The tokens of every adapter that occurs, on the host, as `torch` code that serves LoRA would keep
    them."""

    slots: list[int]
    rows: list[Tensor]  # int64, on the device
    scalings: list[float]

    @classmethod
    def of(cls, inputs: Inputs) -> Rows:
        ids = inputs.shared["adapter_ids"]
        slots = [slot for slot in ids.unique().tolist() if slot >= 0]
        scalings = inputs.shared["scalings"].tolist()
        return cls(slots, [(ids == slot).nonzero()[:, 0] for slot in slots], [scalings[slot] for slot in slots])


def _one_adapter_for_all(inputs: Inputs) -> bool:
    return inputs.w.slots == 1 and inputs.w.mix == "uniform"


def slices_of(w: Workload) -> list[slice]:
    """The output columns of each group, for layouts whose groups share x."""
    sizes = w.out_sizes or (w.N,) * w.G
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def flat(t: Tensor, w: Workload) -> Tensor:
    """A view of out as [T, width], of B as [L, width, r]."""
    return t.view(t.shape[0], w.width, *t.shape[3:]) if t.dim() > 2 and t.shape[1] == w.G else t


def flat_b(b: Tensor, w: Workload) -> Tensor:
    return b.view(b.shape[0], w.width, b.shape[-1])


def shrink_one(x: Tensor, a: Tensor, w: Workload) -> Tensor:
    """h of rows that share one adapter: [T, r] or [T, G, r]. a [r, D] or [G, r, D]."""
    if w.layout == "own_a":
        return torch.bmm(x.transpose(0, 1), a.transpose(1, 2)).transpose(0, 1)
    if w.layout == "stacked":
        return (x @ a.reshape(-1, w.D).t()).view(x.shape[0], w.G, w.rank)
    return x @ a.t()


def expand_one(h: Tensor, b: Tensor, w: Workload) -> Tensor:
    """The unscaled delta [T, width] of rows that share one adapter. b [N, r], [G, N, r] or [ΣN, r]."""
    if w.layout == "plain":
        return h @ b.t()
    if w.layout == "stacked":
        b = b.reshape(w.width, w.rank)
        return torch.cat([h[:, g] @ b[columns].t() for g, columns in enumerate(slices_of(w))], 1)
    return torch.bmm(h.transpose(0, 1), b.transpose(1, 2)).transpose(0, 1).reshape(-1, w.width)


def add_expand_one(out: Tensor, h: Tensor, b: Tensor, scaling: float, w: Workload) -> None:
    """out += scaling · h bᵀ in as few library calls as there are."""
    if w.layout == "plain":
        out.addmm_(h, b.t(), alpha=scaling)
    elif w.layout == "stacked":
        out, b = flat(out, w), b.reshape(w.width, w.rank)
        for g, columns in enumerate(slices_of(w)):
            out[:, columns].addmm_(h[:, g], b[columns].t(), alpha=scaling)
    else:
        out.transpose(0, 1).baddbmm_(h.transpose(0, 1), b.transpose(1, 2), alpha=scaling)


def _delta_bmm(inputs: Inputs) -> list[Call]:
    """One adapter for every token: two products, the second of which adds into out."""
    if not _one_adapter_for_all(inputs):
        return []
    w, scaling = inputs.w, Rows.of(inputs).scalings[0]

    def call(t):
        add_expand_one(t["out"], shrink_one(t["x"], t["lora_a"][0], w), t["lora_b"][0], scaling, w)

    return [lambda t=t: call(t) for t in inputs.sets]


def _delta_loop(inputs: Inputs) -> list[Call]:
    """A loop over adapters: gather rows, two products, scatter-add."""
    w, groups = inputs.w, Rows.of(inputs)
    if _one_adapter_for_all(inputs) or not groups.slots:
        return []

    def call(t):
        out = flat(t["out"], w)
        for slot, rows, scaling in zip(groups.slots, groups.rows, groups.scalings, strict=True):
            h = shrink_one(t["x"].index_select(0, rows), t["lora_a"][slot], w)
            out.index_add_(0, rows, expand_one(h, t["lora_b"][slot], w), alpha=scaling)

    return [lambda t=t: call(t) for t in inputs.sets]


def _delta_loop_copy(inputs: Inputs) -> list[Call]:
    """A loop over adapters that gathers out's rows too, adds in the product, and copies them back: no atomics."""
    w, groups = inputs.w, Rows.of(inputs)
    if _one_adapter_for_all(inputs) or not groups.slots or w.T < GATHER_UP_TO:
        return []

    def call(t):
        for slot, rows, scaling in zip(groups.slots, groups.rows, groups.scalings, strict=True):
            h, out = shrink_one(t["x"].index_select(0, rows), t["lora_a"][slot], w), t["out"].index_select(0, rows)
            add_expand_one(out, h, t["lora_b"][slot], scaling, w)
            t["out"].index_copy_(0, rows, out)

    return [lambda t=t: call(t) for t in inputs.sets]


def _gather_shrink(x: Tensor, a: Tensor, w: Workload) -> Tensor:
    """h from a copy of A per token: a [T, r, D] or [T, G, r, D]."""
    if w.layout == "grouped":
        return torch.bmm(x, a.transpose(1, 2))
    if w.layout == "plain":
        return torch.bmm(a, x.unsqueeze(2))[..., 0]
    if w.layout == "own_a":
        return torch.bmm(a.view(-1, w.rank, w.D), x.reshape(-1, w.D, 1)).view(-1, w.G, w.rank)
    return torch.bmm(a.view(w.T, -1, w.D), x.unsqueeze(2)).view(w.T, w.G, w.rank)


def _gather_expand_(out: Tensor, h: Tensor, b: Tensor, w: Workload) -> None:
    """out += b h from a copy of B per token; h is scaled already."""
    if w.layout == "stacked":
        out, b = flat(out, w), b.reshape(w.T, w.width, w.rank)
        for g, columns in enumerate(slices_of(w)):
            out[:, columns].unsqueeze(2).baddbmm_(b[:, columns], h[:, g].unsqueeze(2))
    else:
        out.view(-1, w.N, 1).baddbmm_(b.view(-1, w.N, w.rank), h.reshape(-1, w.rank, 1))


def _row_scalings(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(slot, scaling) of every token; tokens without an adapter take slot 0 times 0."""
    ids = inputs.shared["adapter_ids"].long()
    slots = ids.clamp_min(0)
    return slots, torch.where(ids >= 0, inputs.shared["scalings"][slots], 0.0).to(dtype)


def _delta_gather(inputs: Inputs) -> list[Call]:
    """A copy of A and B for every token, then batched products."""
    w = inputs.w
    if w.T > GATHER_UP_TO:
        return []
    slots, scale = _row_scalings(inputs, w.dtype)
    scale = scale.view(-1, *[1] * (1 if w.layout == "plain" else 2))

    def call(t):
        h = _gather_shrink(t["x"], t["lora_a"].index_select(0, slots), w) * scale
        _gather_expand_(t["out"], h, t["lora_b"].index_select(0, slots), w)

    return [lambda t=t: call(t) for t in inputs.sets]


@dataclass
class Sorted:
    """Rows sorted by adapter (or by (adapter, group) for layouts with an x per group), for `grouped_mm`."""

    order: Tensor  # into x seen as [T, D] or [T·G, D]
    slot_ends: Tensor  # int32 [L], where every slot's rows end
    group_ends: Tensor  # int32 [L·G], where every (slot, group)'s rows end
    scale: Tensor  # [rows, 1]

    @classmethod
    def of(cls, inputs: Inputs) -> Sorted:
        w, ids = inputs.w, inputs.shared["adapter_ids"].long()
        tokens = torch.argsort(ids, stable=True)[int((ids < 0).sum()) :]
        counts = torch.bincount(ids[tokens], minlength=w.slots)
        scale = inputs.shared["scalings"][ids[tokens]].to(w.dtype)
        if w.layout in ("plain", "stacked"):
            ends = counts.cumsum(0).to(torch.int32)
            return cls(tokens, ends, ends, scale[:, None])
        parts = [(rows[None] * w.G + torch.arange(w.G, device=ids.device)[:, None]).flatten() for rows in
                 tokens.split(counts.tolist())]  # fmt: skip
        group_counts = counts.repeat_interleave(w.G)
        return cls(
            torch.cat(parts),
            (counts * w.G).cumsum(0).to(torch.int32),
            group_counts.cumsum(0).to(torch.int32),
            scale.repeat_interleave(w.G)[:, None],  # one slot has one scaling, so the order inside it is free
        )


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    public = getattr(torch.nn.functional, "grouped_mm", None)
    return public(a, b, offs=ends) if public else torch._grouped_mm(a, b, offs=ends)


def _fits_grouped_mm(w: Workload) -> bool:
    """bf16, and rows whose bytes are multiples of 16. Unavailable for more groups than it takes."""
    sizes = (w.D, w.rank, *(w.out_sizes or (w.N,)))
    if w.dtype != torch.bfloat16 or any(size % 8 for size in sizes):
        return False
    groups = w.slots if w.layout in ("plain", "stacked") else w.slots * w.G
    if groups >= GROUP_LIMIT:
        raise Unavailable(f"grouped_mm takes fewer than {GROUP_LIMIT} groups; there are {groups}")
    return True


def gmm_delta(t: dict[str, Tensor], s: Sorted, w: Workload) -> list[tuple[slice, Tensor]]:
    """The scaled delta of the sorted rows, as (columns of the row, values) parts."""
    x = t["x"].view(-1, w.D).index_select(0, s.order)
    a, b = t["lora_a"], t["lora_b"]
    if w.layout == "own_a":
        h = grouped_mm(x, a.view(-1, w.rank, w.D).transpose(1, 2), s.group_ends)
    else:
        h = grouped_mm(x, a.view(w.slots, -1, w.D).transpose(1, 2), s.slot_ends)
    h = h * s.scale
    if w.layout == "stacked":
        b = flat_b(b, w)
        return [
            (c, grouped_mm(h[:, g * w.rank : (g + 1) * w.rank], b[:, c].transpose(1, 2), s.slot_ends))
            for g, c in enumerate(slices_of(w))
        ]
    return [(slice(0, w.N), grouped_mm(h, b.view(-1, w.N, w.rank).transpose(1, 2), s.group_ends))]


def out_rows(out: Tensor, w: Workload) -> Tensor:
    """A view of out with one row per sorted row: [T·G, N] where every group has its own x, else [T,
    width]."""
    return out.view(-1, w.N) if w.layout in ("grouped", "own_a") else flat(out, w)


def _delta_gmm(inputs: Inputs) -> list[Call]:
    """Sort rows, two `grouped_mm`, scatter-add."""
    w = inputs.w
    if _one_adapter_for_all(inputs) or not _fits_grouped_mm(w) or w.mix == "none":
        return []
    s = Sorted.of(inputs)

    def call(t):
        out = out_rows(t["out"], w)
        for columns, values in gmm_delta(t, s, w):
            out[:, columns].index_add_(0, s.order, values)

    return [lambda t=t: call(t) for t in inputs.sets]


def _shrink_bmm(inputs: Inputs) -> list[Call]:
    if not _one_adapter_for_all(inputs):
        return []
    return [lambda t=t: shrink_one(t["x"], t["lora_a"][0], inputs.w) for t in inputs.sets]


def _shrink_gather(inputs: Inputs) -> list[Call]:
    w = inputs.w
    if w.T > GATHER_UP_TO:
        return []
    slots, _ = _row_scalings(inputs, w.dtype)
    return [lambda t=t: _gather_shrink(t["x"], t["lora_a"].index_select(0, slots), w) for t in inputs.sets]


def _shrink_loop(inputs: Inputs) -> list[Call]:
    w, groups = inputs.w, Rows.of(inputs)
    if _one_adapter_for_all(inputs):
        return []

    def call(t):
        h = torch.zeros_like(t["h"], dtype=w.dtype)
        for slot, rows in zip(groups.slots, groups.rows, strict=True):
            h.index_copy_(0, rows, shrink_one(t["x"].index_select(0, rows), t["lora_a"][slot], w))
        return h

    return [lambda t=t: call(t) for t in inputs.sets]


def _narrow_h(inputs: Inputs) -> list[Tensor]:
    """PyTorch's products want h in B's dtype: cast outside the timing."""
    return [t["h"].to(inputs.w.dtype) for t in inputs.sets]


def _expand_bmm(inputs: Inputs) -> list[Call]:
    if not _one_adapter_for_all(inputs):
        return []
    w, scaling = inputs.w, Rows.of(inputs).scalings[0]
    return [
        lambda t=t, h=h: add_expand_one(t["out"], h, t["lora_b"][0], scaling, w)
        for t, h in zip(inputs.sets, _narrow_h(inputs), strict=True)
    ]


def _expand_gather(inputs: Inputs) -> list[Call]:
    w = inputs.w
    if w.T > GATHER_UP_TO:
        return []
    slots, scale = _row_scalings(inputs, w.dtype)
    scale = scale.view(-1, *[1] * (1 if w.layout == "plain" else 2))
    return [
        lambda t=t, h=h: _gather_expand_(t["out"], h * scale, t["lora_b"].index_select(0, slots), w)
        for t, h in zip(inputs.sets, _narrow_h(inputs), strict=True)
    ]


def _expand_loop(inputs: Inputs) -> list[Call]:
    w, groups = inputs.w, Rows.of(inputs)
    if _one_adapter_for_all(inputs):
        return []

    def call(t, h):
        out = flat(t["out"], w)
        for slot, rows, scaling in zip(groups.slots, groups.rows, groups.scalings, strict=True):
            out.index_add_(0, rows, expand_one(h.index_select(0, rows), t["lora_b"][slot], w), alpha=scaling)

    return [lambda t=t, h=h: call(t, h) for t, h in zip(inputs.sets, _narrow_h(inputs), strict=True)]


def _plan_sort(inputs: Inputs) -> list[Call]:
    """What `grouped_mm` needs: the order and the ends of every adapter's rows."""

    def call(t):
        ids = t["adapter_ids"]
        order = torch.argsort(ids, stable=True)
        slots = torch.arange(inputs.w.slots, device=ids.device, dtype=ids.dtype)
        return order, torch.searchsorted(ids[order], slots, right=True)

    return [lambda t=t: call(t) for t in inputs.sets]


_TORCH = {
    "delta": {
        "bmm": _delta_bmm,
        "gather": _delta_gather,
        "loop": _delta_loop,
        "loop_copy": _delta_loop_copy,
        "gmm": _delta_gmm,
    },
    "shrink": {"bmm": _shrink_bmm, "gather": _shrink_gather, "loop": _shrink_loop},
    "expand": {"bmm": _expand_bmm, "gather": _expand_gather, "loop": _expand_loop},
    "plan": {"sort": _plan_sort},
}


# --- training: y = base + delta, differentiable in x, A, B and base ---


def _train_ours(inputs: Inputs) -> Callable:
    s, op = inputs.shared, ours_library().delta
    keywords = dict(out_sizes=s["out_sizes"], ranks=s["ranks"], plan=inputs.plan)
    return lambda x, a, b, base: op(x, a, b, s["adapter_ids"], s["scalings"], base=base, **keywords)


def _train_bmm(inputs: Inputs) -> Callable | None:
    if not _one_adapter_for_all(inputs):
        return None
    w, scaling = inputs.w, Rows.of(inputs).scalings[0]

    def forward(x, a, b, base):
        h = shrink_one(x, a[0], w)
        if w.layout == "plain":
            return torch.addmm(base, h, b[0].t(), alpha=scaling)
        return torch.add(base, expand_one(h, b[0], w).view_as(base), alpha=scaling)

    return forward


def _train_loop(inputs: Inputs) -> Callable | None:
    if _one_adapter_for_all(inputs):
        return None
    w, groups = inputs.w, Rows.of(inputs)
    order = torch.cat(groups.rows)

    def forward(x, a, b, base):
        parts = []
        for slot, rows, scaling in zip(groups.slots, groups.rows, groups.scalings, strict=True):
            h = shrink_one(x.index_select(0, rows), a[slot], w)
            parts.append(expand_one(h, b[slot], w) * scaling)
        return flat(base, w).index_add(0, order, torch.cat(parts)).view_as(base)

    return forward


def _train_gmm(inputs: Inputs) -> Callable | None:
    w = inputs.w
    if not _fits_grouped_mm(w):
        return None
    s = Sorted.of(inputs)

    def forward(x, a, b, base):
        parts = gmm_delta({"x": x, "lora_a": a, "lora_b": b}, s, w)
        values = torch.cat([values for _, values in parts], 1) if len(parts) > 1 else parts[0][1]
        return out_rows(base, w).index_add(0, s.order, values).view_as(base)

    return forward


def training_variants(contender: str, inputs: Inputs) -> dict[str, Callable]:
    """{name: forward(x, A, B, base) → y}."""
    if contender == "ours":
        return {"": _train_ours(inputs)}
    if contender != "torch":
        return {}
    ways = {"bmm": _train_bmm, "loop": _train_loop, "gmm": _train_gmm}
    return _that_run(ways, inputs, {})
