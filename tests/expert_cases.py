"""Inputs for the expert ops, a parent MLP as a plain loop over experts, and float64 oracles that share no code with the reference.

Small-integer cases make every product and sum exact in float32, so any kernel must equal them bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import DTYPES, NAN, SCALINGS, assert_bits, assert_equal, bits, rounded
from torch import Tensor
from torch.nn import functional as F

__all__ = ["DTYPES", "NAN", "assert_bits", "assert_equal", "bits", "rounded"]

torch.set_num_threads(1)  # products of 10 × 20 numbers: two threads on a busy machine wait 10 ms for each other, every time

PLACEMENTS = ("input", "pre_down", "post_down")
ACTIVATIONS = {  # name: (activation, activation_limit)
    "swiglu": ("swiglu", None),
    "swiglu clamped": ("swiglu", 1.5),
    "swigluoai": ("swigluoai", None),
    "swigluoai clamped": ("swigluoai", 1.25),
    "geglu_tanh": ("geglu_tanh", None),
    "relu2": ("relu2", None),
}
# (A shared, an A for each of gate and up, B shared, B with an axis of halves)
FACTORS = {
    "per expert": (False, False, False, False),
    "an A each": (False, True, False, False),
    "an A each, B in halves": (False, True, False, True),
    "one A, B in halves": (False, False, False, True),
    "A shared": (True, False, False, False),
    "an A each, shared": (True, True, False, False),
    "B shared": (False, False, True, False),
    "both shared": (True, True, True, True),
}
WEIGHTS = ("packed", "halves", "interleaved", "transposed")


@dataclass
class Mlp:
    """The arguments of expert_mlp."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    adapter_ids: Tensor | None
    scalings: Tensor | None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    activation: str = "swiglu"
    activation_limit: float | None = None
    router_weight: str = "pre_down"
    ranks: Tensor | None = None

    TENSORS = (
        "x",
        "topk_weights",
        "w_gate_up",
        "w_down",
        "gate_up_a",
        "gate_up_b",
        "down_a",
        "down_b",
        "b_gate_up",
        "b_down",
    )

    @property
    def args(self):
        names = (*"x topk_ids topk_weights w_gate_up w_down gate_up_a gate_up_b down_a down_b".split(),)
        return *[getattr(self, n) for n in names], self.adapter_ids, self.scalings

    @property
    def kw(self):
        names = ("b_gate_up", "b_down", "activation", "activation_limit", "router_weight", "ranks")
        return {n: getattr(self, n) for n in names}

    @property
    def all_args(self):
        """As the schema orders them, without plan."""
        return *self.args, *self.kw.values()

    def call(self, op, **changes):
        return op(*self.args, **{**self.kw, **changes})

    def with_(self, **changes):
        return replace(self, **changes)

    def base(self):
        """The same without LoRA."""
        return replace(self, gate_up_a=None, gate_up_b=None, down_a=None, down_b=None)

    def map(self, change, names=TENSORS):
        return replace(self, **{n: change(getattr(self, n)) for n in names if getattr(self, n) is not None})

    def double(self):
        return self.map(lambda t: t.detach().double())

    def leaves(self, names=TENSORS):
        """The same with fresh leaves that require grad."""
        return self.map(lambda t: t.detach().clone(memory_format=torch.preserve_format).requires_grad_(), names)

    def grads(self, names=TENSORS):
        return {n: getattr(self, n).grad for n in names if getattr(self, n) is not None}


def store(t: Tensor, form: str) -> Tensor:
    """[E, 2I, …] as another storage of the same values: a view, with halves as an axis of their own where it needs one."""
    if form == "packed":
        return t
    split = t.unflatten(1, (2, t.shape[1] // 2))
    if form == "halves":
        return split.contiguous()
    if form == "interleaved":  # gate and up rows alternate in memory
        return split.transpose(1, 2).contiguous().transpose(1, 2)
    return t.transpose(1, 2).contiguous().transpose(1, 2)  # input-major


def build_mlp(
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = 7,
    top_k: int = 2,
    experts: int = 4,
    hidden: int = 12,
    inner: int = 10,
    rank: int = 4,
    slots: int = 2,
    activation: str = "swiglu",
    placement: str = "pre_down",
    bias: bool = False,
    factors: str = "per expert",
    weights: str = "packed",
    lora_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype = torch.float32,
    ids: Tensor | None = None,
    adapter_ids: Tensor | None | str = "random",
    ranks: list | None = None,
    integer: int = 0,
    seed: int = 0,
) -> Mlp:
    """integer: small integers up to this bound in place of normal numbers."""
    g = torch.Generator().manual_seed(seed)

    def numbers(*shape, scale=1.0):
        if integer:
            return torch.randint(-integer, integer + 1, shape, generator=g).double()
        return torch.randn(*shape, generator=g, dtype=torch.float64) * scale

    name, limit = ACTIVATIONS[activation]
    gated = name != "relu2"
    wide = 2 * inner if gated else inner
    a_shared, each, b_shared, b_halves = FACTORS[factors]
    ea, eb = (1 if shared else experts for shared in (a_shared, b_shared))
    if ids is None:
        ids = torch.randint(-1, experts, (tokens, top_k), generator=g)
    tokens, top_k = ids.shape
    if isinstance(adapter_ids, str):
        adapter_ids = torch.randint(-1, slots, (tokens,), generator=g)
    x = numbers(tokens, hidden)
    w_gate_up, w_down = numbers(experts, wide, hidden, scale=max(hidden, 1) ** -0.5), numbers(experts, hidden, inner, scale=max(inner, 1) ** -0.5)
    gate_up_a = numbers(slots, ea, *((2,) if each and gated else ()), rank, hidden, scale=max(hidden, 1) ** -0.5)
    gate_up_b = numbers(slots, eb, wide, rank)
    # down mirrors the sharing: where gate_up's A is shared, down's B is
    down_a, down_b = numbers(slots, eb, rank, inner, scale=max(inner, 1) ** -0.5), numbers(slots, ea, hidden, rank)
    topk_weights = torch.rand(tokens, top_k, generator=g, dtype=torch.float64)
    if integer:
        topk_weights = torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=torch.float64)[torch.randint(4, (tokens, top_k), generator=g)]
    lora = lora_dtype or dtype
    b_dtype = bias_dtype or dtype
    w_dtype = torch.float64 if dtype == torch.float64 else weight_dtype
    gate_up_b = gate_up_b.to(lora)
    return Mlp(
        x.to(dtype),
        ids,
        topk_weights.to(w_dtype),
        store(w_gate_up.to(dtype), weights if gated or weights == "transposed" else "packed"),
        store(w_down.to(dtype), "transposed" if weights == "transposed" else "packed"),
        gate_up_a.to(lora),
        gate_up_b.unflatten(2, (2, inner)) if b_halves and gated else gate_up_b,
        down_a.to(lora),
        down_b.to(lora),
        adapter_ids,
        torch.tensor(SCALINGS).repeat(slots // len(SCALINGS) + 1)[:slots],
        numbers(experts, wide).to(b_dtype) if bias else None,
        numbers(experts, hidden).to(b_dtype) if bias else None,
        name,
        limit,
        placement,
        None if ranks is None else torch.tensor(ranks, dtype=torch.int32),
    )


def act(h: Tensor, activation: str, limit: float | None) -> Tensor:
    if activation == "relu2":
        return F.relu(h) ** 2
    gate, up = h.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


class Parent:
    """The parent as a plain loop over experts, with the contract's stages, differentiated by autograd.

    Every route has a float32 copy of its token's row and its weight as leaves, so that the sum of a token's gradients
    over k is written here, not taken from an index's backward.
    """

    def __init__(self, c: Mlp):
        self.c, self.dtype = c, c.x.dtype
        self.acc = torch.float64 if c.x.dtype == torch.float64 else torch.float32
        top_k = c.topk_ids.shape[1]
        self.x = torch.stack([c.x.detach().to(self.acc)] * top_k, 1).requires_grad_()
        self.weights = c.topk_weights.detach().to(self.acc).clone().requires_grad_()

    def project(self, rows: Tensor, weight: Tensor) -> Tensor:
        parts = weight if weight.dim() == 3 else (weight,)
        return torch.cat([rows @ part.to(self.acc).T for part in parts], -1).to(self.dtype)

    def with_bias(self, h: Tensor, bias: Tensor | None, weight=None) -> Tensor:
        if bias is None:
            return h
        term = bias.reshape(-1).to(self.acc)
        return (h.to(self.acc) + (term if weight is None else term * weight)).to(self.dtype)

    def __call__(self) -> Tensor:
        c, acc = self.c, self.acc
        routes = torch.zeros(*c.topk_ids.shape, c.x.shape[1], dtype=acc)
        for e in range(c.w_down.shape[0]):
            t, k = torch.where(c.topk_ids == e)
            if len(t) == 0:
                continue
            rows, weight = self.x[t, k], self.weights[t, k].unsqueeze(1)
            if c.router_weight == "input":
                rows = (rows * weight).to(self.dtype).to(acc)
            h1 = self.with_bias(self.project(rows, c.w_gate_up[e]), None if c.b_gate_up is None else c.b_gate_up[e])
            a = act(h1.to(acc), c.activation, c.activation_limit)
            a = (a * weight if c.router_weight == "pre_down" else a).to(self.dtype)
            h2 = self.project(a.to(acc), c.w_down[e])
            b = None if c.b_down is None else c.b_down[e]
            h2 = self.with_bias(h2, b, weight if c.router_weight == "pre_down" else None).to(acc)
            routes[t, k] = h2 * weight if c.router_weight == "post_down" else h2
        total = torch.zeros_like(routes[:, 0])
        for k in range(routes.shape[1]):
            total = total + routes[:, k]
        return total.to(self.dtype)

    def input_grads(self) -> tuple[Tensor, Tensor]:
        """dx and d topk_weights after a backward."""
        total = torch.zeros_like(self.x[:, 0])
        for k in range(self.x.shape[1]):
            total = total + self.x.grad[:, k]
        return total.to(self.dtype), self.weights.grad.to(self.c.topk_weights.dtype)


def effective(c: Mlp, slot: int | None) -> tuple[Tensor, Tensor]:
    """W + s B A of both projections of one slot, [E, U, H] and [E, H, I]: what LoRA means."""

    def merged(weight, a, b):
        flat = weight.flatten(1, -2) if weight.dim() == 4 else weight
        if slot is None or a is None:
            return flat
        experts = flat.shape[0]
        rank = a.shape[-2] if c.ranks is None else int(c.ranks[slot])
        a, b = a[slot], b[slot]
        b = b.flatten(1, 2) if b.dim() == 4 else b
        a, b = (t.expand(experts, *t.shape[1:]) for t in (a, b))
        a, b = a[..., :rank, :], b[..., :rank]
        if a.dim() == 4:
            half = b.shape[1] // 2
            product = torch.cat([b[:, :half] @ a[:, 0], b[:, half:] @ a[:, 1]], 1)
        else:
            product = b @ a
        return flat + float(c.scalings[slot]) * product

    return merged(c.w_gate_up, c.gate_up_a, c.gate_up_b), merged(c.w_down, c.down_a, c.down_b)


def by_route(c: Mlp, dtype: torch.dtype | None = None) -> Tensor:
    """The MLP route by route with merged weights, in c's dtype (float64: the oracle), through autograd.

    dtype: every stage is rounded to it, and asserted to be exact in float32 before: then its bits are known.
    """

    def stage(t):
        if dtype is None:
            return t
        assert torch.equal(t.float().double(), t), "the case leaves the range where sums are exact"
        return t.float().to(dtype).double()

    merged = {None: effective(c, None)}
    rows = []
    for t in range(c.x.shape[0]):
        slot = 0 if c.adapter_ids is None else int(c.adapter_ids[t])
        slot = None if slot < 0 else slot
        if slot not in merged:
            merged[slot] = effective(c, slot)
        w_gate_up, w_down = merged[slot]
        total = torch.zeros_like(c.x[t])
        for k, e in enumerate(c.topk_ids[t].tolist()):
            if not 0 <= e < w_down.shape[0]:
                continue
            w = c.topk_weights[t, k]
            h = stage(w_gate_up[e] @ (stage(c.x[t] * w) if c.router_weight == "input" else c.x[t]))
            h = h if c.b_gate_up is None else stage(h + c.b_gate_up[e].reshape(-1))
            a = act(h, c.activation, c.activation_limit)
            pre = c.router_weight == "pre_down"
            y = stage(w_down[e] @ stage(a * w if pre else a))
            y = y if c.b_down is None else stage(y + (c.b_down[e] * w if pre else c.b_down[e]))
            total = total + (y * w if c.router_weight == "post_down" else y)
        rows.append(stage(total))
    return torch.stack(rows) if rows else c.x.new_zeros(c.x.shape)


@dataclass
class Routes:
    """The arguments of expert_delta and expert_linear."""

    x: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor
    ids: Tensor
    adapter_ids: Tensor | None
    scalings: Tensor
    base: Tensor
    bias: Tensor
    row_weights: Tensor
    grad_y: Tensor
    ranks: Tensor | None = None

    TENSORS = ("x", "weight", "a", "b", "base", "bias", "row_weights", "grad_y")

    def map(self, change, names=TENSORS):
        return replace(self, **{n: change(getattr(self, n)) for n in names})

    def double(self):
        return self.map(lambda t: t.detach().double())

    def leaves(self, names=TENSORS):
        return self.map(lambda t: t.detach().clone(memory_format=torch.preserve_format).requires_grad_(), names)

    def grads(self, names):
        return {n: getattr(self, n).grad for n in names}

    def delta(self, op, base=True, weighted=True, **kw):
        return op(
            self.x,
            self.a,
            self.b,
            self.ids,
            self.adapter_ids,
            self.scalings,
            base=self.base if base else None,
            row_weights=self.row_weights if weighted else None,
            ranks=self.ranks,
            **kw,
        )

    def linear(self, op, bias=True, weighted=True, lora=True, **kw):
        return op(
            self.x,
            self.weight,
            self.a if lora else None,
            self.b if lora else None,
            self.ids,
            self.adapter_ids,
            self.scalings,
            bias=self.bias if bias else None,
            row_weights=self.row_weights if weighted else None,
            ranks=self.ranks if lora else None,
            **kw,
        )


def build_routes(
    factors: str = "per expert",
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 7,
    top_k: int = 3,
    experts: int = 4,
    features: int = 40,
    out: int = 24,
    rank: int = 5,
    slots: int = 3,
    per_route: bool = False,
    weights: str = "packed",
    ids: Tensor | None = None,
    adapter_ids: Tensor | None | str = "random",
    ranks: list | None = None,
    lora_dtype: torch.dtype | None = None,
    row_dtype: torch.dtype = torch.float32,
    integer: bool = True,
    poison: bool = True,
    seed: int = 0,
) -> Routes:
    """Small integers whose h needs more bits than bf16 has. poison: NaN wherever nothing may be read."""
    g = torch.Generator().manual_seed(seed)

    def numbers(bound, *shape):
        if integer:
            return torch.randint(-bound, bound + 1, shape, generator=g).double()
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    half = dtype == torch.float16
    x_bound, b_bound = (8, 1) if half else (8, 4)
    a_shared, each, b_shared, b_halves = FACTORS[factors]
    ea, eb = (1 if shared else experts for shared in (a_shared, b_shared))
    if ids is None:
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g)
    tokens, top_k = ids.shape
    if isinstance(adapter_ids, str):
        adapter_ids = torch.randint(-1, slots, (tokens,), generator=g)
    routes = tokens * top_k
    x = numbers(x_bound, routes if per_route else tokens, features)
    a = numbers(x_bound, slots, ea, *((2,) if each else ()), rank, features)
    b = numbers(b_bound, slots, eb, out, rank)
    weight = numbers(2, experts, out, features)
    row_weights = torch.tensor([1.0, 2.0, 0.5, -1.0, 4.0], dtype=torch.float64)[torch.randint(5, (routes,), generator=g)]
    if not integer:
        row_weights = torch.rand(routes, generator=g, dtype=torch.float64)
    base, bias, grad_y = numbers(100, routes, out), numbers(20, experts, out), numbers(4, routes, out)
    scalings = torch.tensor(SCALINGS)[:slots]
    if poison:
        e, l = ids.reshape(-1), torch.zeros(tokens, dtype=torch.int64) if adapter_ids is None else adapter_ids
        l = l.repeat_interleave(top_k)
        routed = (e >= 0) & (e < experts)
        row_weights[~routed] = NAN
        if per_route:
            x[~routed] = NAN
        else:
            x[~routed.view(tokens, top_k).any(1)] = NAN
        for expert in set(range(experts)) - set(e.tolist()):
            weight[expert] = NAN
            bias[expert] = NAN
        for slot in range(slots):
            used = set(e[routed & (l == slot)].tolist())
            if not used:
                a[slot], b[slot], scalings[slot] = NAN, NAN, NAN
            for expert in set(range(experts)) - used:
                if not a_shared:
                    a[slot, expert] = NAN
                if not b_shared:
                    b[slot, expert] = float("inf")
            if ranks is not None:
                a[slot, ..., ranks[slot] :, :] = NAN
                b[slot, ..., ranks[slot] :] = NAN
    w_dtype = torch.float64 if dtype == torch.float64 else row_dtype
    lora = lora_dtype or dtype
    weight = store(weight.to(dtype), weights)
    return Routes(
        x.to(dtype),
        weight,
        a.to(lora),
        b.to(lora).unflatten(2, (2, out // 2)) if b_halves else b.to(lora),
        ids,
        adapter_ids,
        scalings,
        base.to(dtype),
        bias.to(dtype),
        row_weights.to(w_dtype),
        grad_y.to(dtype),
        None if ranks is None else torch.tensor(ranks, dtype=torch.int32),
    )


def delta_by_route(c: Routes, base=True, weighted=True) -> Tensor:
    """expert_delta row by row in c's dtype, through autograd."""
    rows, top_k = [], c.ids.shape[1]
    experts = max(c.a.shape[1], c.b.shape[1], c.weight.shape[0])
    b = c.b.flatten(2, 3) if c.b.dim() == 5 else c.b
    for m, e in enumerate(c.ids.reshape(-1).tolist()):
        t = m // top_k
        slot = 0 if c.adapter_ids is None else int(c.adapter_ids[t])
        y = c.base[m] if base else torch.zeros_like(c.base[m])
        if 0 <= e < experts and slot >= 0:
            x = c.x[m] if c.x.shape[0] != c.ids.shape[0] else c.x[t]
            rank = c.a.shape[-2] if c.ranks is None else int(c.ranks[slot])
            ae, be = (f[slot, e if f.shape[1] > 1 else 0] for f in (c.a, b))
            ae, be = ae[..., :rank, :], be[:, :rank]
            if ae.dim() == 3:
                half = be.shape[0] // 2
                d = torch.cat([be[:half] @ (ae[0] @ x), be[half:] @ (ae[1] @ x)])
            else:
                d = be @ (ae @ x)
            d = d * float(c.scalings[slot])
            y = y + (d * c.row_weights[m] if weighted else d)
        rows.append(y)
    return torch.stack(rows) if rows else c.base.new_zeros(c.base.shape)


def linear_by_route(c: Routes, bias=True, weighted=True, lora=True) -> Tensor:
    """expert_linear row by row in c's dtype, through autograd."""
    rows, top_k = [], c.ids.shape[1]
    w = c.weight.flatten(1, 2) if c.weight.dim() == 4 else c.weight
    deltas = delta_by_route(c, base=False, weighted=False) if lora else torch.zeros_like(c.base)
    for m, e in enumerate(c.ids.reshape(-1).tolist()):
        y = torch.zeros_like(c.base[m])
        if 0 <= e < w.shape[0]:
            x = c.x[m] if c.x.shape[0] != c.ids.shape[0] else c.x[m // top_k]
            y = w[e] @ x + deltas[m]
            y = y + c.bias[e] if bias else y
            y = y * c.row_weights[m] if weighted else y
        rows.append(y)
    return torch.stack(rows) if rows else c.base.new_zeros(c.base.shape)
