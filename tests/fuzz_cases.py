"""Calls of the public ops as hypothesis draws them, and what they must give: loops over tokens, groups and routes in float64.

The models share no code with the library, and autograd differentiates them. All numbers are small integers, so there is
one right answer, bit for bit. Whatever an op must not read is NaN: rows without an adapter, slots and experts that nobody
uses, rank tails, the memory between a view's elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import DTYPES, FORMS, NAN, place
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from grouped_lora_ops import reference

SCALINGS = (1.0, 0.5, -1.0, 2.0, 0.25)
ROUTE_WEIGHTS = (1.0, 2.0, 0.5, -1.0, 257 / 32)  # bf16 would round the last
LAYOUTS = ("dense", "dense", "slice", "odd", "rows", "transposed", "scattered", "expanded")
# what has a gradient, in the order of the op's backward; base's is grad_y itself
DIFFERENTIABLE = {
    "shrink": ("x", "lora_a"),
    "expand": ("h", "lora_b"),
    "delta": ("x", "lora_a", "lora_b"),
    "linear": ("x", "weight", "lora_a", "lora_b", "bias"),
    "expert_delta": ("x", "lora_a", "lora_b", "row_weights"),
    "expert_linear": ("x", "weight", "lora_a", "lora_b", "bias", "row_weights"),
    "expert_mlp": tuple("x topk_weights w_gate_up w_down gate_up_a gate_up_b down_a down_b b_gate_up b_down".split()),
}


@dataclass
class Call:
    """One call: the op's arguments by name, the upstream gradient and the names whose gradients are wanted."""

    op: str
    args: dict
    grad_y: Tensor
    needs: tuple = ()

    def doubles(self) -> dict:
        """The arguments in float64, those that have gradients as leaves."""
        leaves = {}
        for name, value in self.args.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.detach().double().cpu().requires_grad_(name in self.needs)
            leaves[name] = value.cpu() if isinstance(value, Tensor) else value
        return leaves

    def want(self) -> tuple[Tensor, dict]:
        """The result and the wanted gradients, rounded once each; cases whose sums are not exact in float32 are left out."""
        d = self.doubles()
        y = MODELS[self.op](self, d)
        grads = [None] * len(self.needs)
        if self.needs and y.requires_grad:
            grads = torch.autograd.grad(y, [d[n] for n in self.needs], self.grad_y.cpu().double(), allow_unused=True)
        found = {n: torch.zeros_like(d[n]) if g is None else g for n, g in zip(self.needs, grads)}
        return rounded(y.detach(), result_dtype(self)), {n: rounded(g, self.args[n].dtype) for n, g in found.items()}


def sums(dtype: torch.dtype) -> torch.dtype:
    """What sums over tensors of this dtype run in, and h has."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def result_dtype(c: Call) -> torch.dtype:
    if c.op == "shrink":
        return sums(c.args["x"].dtype)
    return c.args["lora_b" if c.op in ("expand", "expand_") else "x"].dtype


def exact(t: Tensor) -> bool:
    """Whether sums that end here are exact in float32 in any order: multiples of 1/64 far below 2^24 of them."""
    t = t[t.isfinite()]
    return bool((t.abs() < 2**16).all() and (t * 64 == (t * 64).round()).all())


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    assume(exact(t))
    return t if dtype == torch.float64 else t.float().to(dtype)


class Stage(torch.autograd.Function):
    """Rounding to a dtype, forward, and of the gradient, backward."""

    @staticmethod
    def forward(ctx, t, dtype):
        ctx.dtype = dtype
        return rounded(t, dtype).double()

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad, ctx.dtype).double(), None


class Probe(torch.autograd.Function):
    """h as it is. Kernels with 16-bit weights read h, and its gradient, as two terms of that type: such cases only."""

    @staticmethod
    def forward(ctx, h, dtype):
        ctx.dtype = dtype
        assume(in_two_terms(h, dtype))
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        assume(in_two_terms(grad, ctx.dtype))
        return grad, None


class Join(torch.autograd.Function):
    """base + delta; base as it is (a −0.0) where the delta is zero."""

    @staticmethod
    def forward(ctx, base, delta):
        return torch.where(delta == 0, base, base + delta)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def in_two_terms(h: Tensor, dtype: torch.dtype) -> bool:
    high = h.to(dtype).double()
    return exact(h) and torch.equal(high + (h - high).to(dtype).double(), h)


# ---------------------------------------------------------------------------------------------------------------- draws


# sizes that csrc/linear.cu takes: more rows than a tile has, widths of multiples of 8
MANY = {
    "T": (128, 131, 300),
    "L": (1, 2, 3),
    "G": (1, 2),
    "D": (8, 64, 136),
    "H": (8, 16),  # of expert_mlp, whose gates are to stay saturated
    "N": (8, 72, 264),
    "slice": (8, 16, 136),
    "N/2": (8, 68),
    "I": (8, 40),
    "r": (0, 8, 16, 24, 72),
    "r of the layer": (0, 8),
    "K": (1, 2),
    "E": (1, 3),
}


class Draw:
    """What strategies share: sizes, values by a seed, layouts. many: bf16, and the sizes of MANY."""

    def __init__(self, draw, device: str, kernels: bool, many: bool = False):
        self.draw, self.device, self.kernels, self.many = draw, device, kernels, many
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16), label="seed"))

    def __call__(self, strategy, label=None):
        return self.draw(strategy, label=label)

    def of(self, *values, label=None):
        return self.draw(st.sampled_from(values), label=label)

    def size(self, label, most, *odd):
        """1 … most, with 0 and the odd ones now and then; few different ones where each makes the kernels compile anew."""
        if self.many:
            return self.of(*MANY[label], label=label)
        if self.kernels:
            sizes = st.sampled_from(sorted({1, most, most, most * 2 // 3 or 1, 0}))
            return self.draw(sizes, label=label)
        return self.draw(st.one_of(st.integers(1, most), st.integers(0, most), *([st.sampled_from(odd)] if odd else [])), label=label)

    def dtype(self):
        """float64 is for the CPU's implementation alone; a GPU compiles kernels for every dtype."""
        if self.many:
            return torch.bfloat16
        few = [torch.bfloat16, torch.float32] if self.device != "cpu" else [*DTYPES.values()]
        return self.of(*few, *([] if self.kernels else [torch.float64]), label="dtype")

    def float32_or(self, dtype, label):
        return self.of(dtype, *([torch.float32] if dtype != torch.float64 else []), label=label)

    def maybe(self, label):
        return self.draw(st.booleans(), label=label)

    def integers(self, bound, *shape) -> Tensor:
        return torch.randint(-bound, bound + 1, shape, generator=self.generator).double()

    def among(self, values, *shape) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), shape, generator=self.generator)]

    def lay(self, name: str, t: Tensor, dtype: torch.dtype, writable=False) -> Tensor:
        """t in a drawn layout; `expanded` repeats one entry of an axis by stride 0, which changes the values."""
        layouts = LAYOUTS if self.device == "cpu" else ("dense", "dense", "slice", "expanded")  # others are kernels of their own
        t, layout = t.to(dtype), self.of(*layouts[: -1 if writable else None], label=f"{name} lies")
        if t.dim() < 2 and layout == "transposed" or t.dim() == 0:
            layout = "dense"
        if layout == "expanded" and not t.isfinite().all():
            layout = "dense"  # what must not be read would be everywhere
        if layout == "expanded":
            axis = self.draw(st.integers(0, t.dim() - 1), label=f"{name} repeats")
            t = t.to(self.device)
            return t.narrow(axis, 0, 1).expand(t.shape) if t.shape[axis] > 1 else t
        return place(t, layout, self.device)

    def ids(self, name: str, low: int, high: int, *shape) -> Tensor:
        """Ids low … high in a drawn mix: any, all the same, none. Kernels take those out of range for −1, too."""
        if self.kernels:
            low, high = low - 2, high + 2
        how = self.of("any", "any", "same", "none", label=name)
        if how == "none":
            ids = torch.full(shape, -1)
        elif how == "same":
            ids = torch.full(shape, self.draw(st.integers(low, high), label=f"{name} all"))
        else:
            ids = torch.randint(low, high + 1, shape, generator=self.generator)
        dtype = self.of(torch.int32, torch.int64, label=f"{name} dtype")
        ids = ids.to(self.device, dtype)
        if self.maybe(f"{name} strided"):
            ids = torch.stack([ids, torch.full_like(ids, 99)], -1)[..., 0]
        return ids

    def plan(self, op: str, *args) -> Tensor:
        """By the op; by the reference where ids may be out of range, which the op refuses on the CPU."""
        return getattr(reference if self.kernels and self.device == "cpu" else torch.ops.grouped_lora, op)(*args)

    def needs(self, op: str, args: dict) -> tuple:
        wanted = self.of("all", "all", "some", "none", label="gradients")
        names = [n for n in (*DIFFERENTIABLE.get(op, ()), "base") if args.get(n) is not None and args[n].itemsize > 1]
        if wanted == "some":
            names = [n for n in names if self.draw(st.booleans(), label=f"{n} requires grad")]
        return tuple(names) if wanted != "none" else ()


def with_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t, and what lies between its elements, in another dtype."""
    whole = t.new_empty(0).set_(t.untyped_storage()).to(dtype)
    return t if t.dtype == dtype else whole.as_strided(t.shape, t.stride(), t.storage_offset())


def strided_vector(d: Draw, t: Tensor, label: str) -> Tensor:
    """scalings and ranks: dense, or every other entry of a longer one."""
    if d.maybe(label):
        longer = t.new_full((2 * len(t) + 1,), 77)
        longer[1::2] = t
        t = longer.to(d.device)[1::2]
    return t.to(d.device)


@st.composite
def dense(draw, ops=("shrink", "expand", "expand_", "delta", "delta_", "linear"), device="cpu", kernels=False, many=False):
    """A call of a dense op."""
    d = Draw(draw, device, kernels, many)
    op = d.of(*ops, label="op")
    form = d.of(*FORMS, label="form")
    dtype = d.dtype()
    T, L, G = d.size("T", 9, 17, 33, 130), d.size("L", 4), d.size("G", 4)
    D, N, r = d.size("D", 40, 64, 300), d.size("N", 20, 65, 129), d.size("r", 8, 16, 17)
    x_grouped, a_grouped, b_form = FORMS[form]
    sizes = None
    if b_form == "slices":
        G = max(G, 1)
        sizes = [d.size("slice", 20) for _ in range(G)]
        b_shape, y_shape = (L, sum(sizes), r), (T, sum(sizes))
    else:
        b_shape = (L, *((G,) if b_form else ()), N, r)
        y_shape = (T, *((G,) if b_form else ()), N)
    axis = {True: (G,), False: ()}  # the group axis of what has one
    h_axis = axis[bool(x_grouped or a_grouped)]
    ids = d.ids("adapter_ids", -1, L - 1, T)
    scalings = torch.tensor(SCALINGS).repeat(L // len(SCALINGS) + 1)[:L]
    ranks = torch.randint(0, r + 1, (L,), generator=d.generator).int() if d.maybe("ranks") else None
    x, a = d.integers(3, T, *axis[bool(x_grouped)], D), d.integers(3, L, *axis[bool(a_grouped)], r, D)
    h, b = d.integers(40, T, *h_axis, r), d.integers(2, *b_shape)
    base = d.integers(50, *y_shape)
    weight, bias = d.integers(2, *y_shape[1:], D), d.integers(30, *y_shape[1:])
    scale = None
    if op == "linear" and dtype in (torch.bfloat16, torch.float16) and d.maybe("e4m3 weight"):
        blocks = [*weight.shape[:-2], *[-(-size // 128) for size in weight.shape[-2:]]]
        kind = d.of(torch.float32, torch.float8_e8m0fnu, label="weight_scale's dtype")
        scale = with_dtype(d.lay("weight_scale", d.among((0.5, 1.0, 2.0), *blocks), torch.float32), kind)
    used = set(ids.tolist())
    idle = ((ids < 0) | (ids >= L)).cpu()
    if d.maybe("poison"):
        h[idle] = NAN
        if op != "linear":
            x[idle] = NAN
        for slot in range(L):
            if slot not in used:
                a[slot], b[slot], scalings[slot] = NAN, float("inf"), NAN
            elif ranks is not None:
                a[slot, ..., int(ranks[slot]) :, :] = NAN
                b[slot, ..., int(ranks[slot]) :] = NAN
                h[torch.as_tensor(ids.cpu() == slot), ..., int(ranks[slot]) :] = NAN
        base[idle] = d.among([NAN, -0.0, 1.0, float("inf")], *base[idle].shape)
    base[~idle] = torch.where(base[~idle] == 0, -0.0, base[~idle])
    in_place = op.endswith("_")
    args = {
        "out": d.lay("out", base, dtype, writable=True) if in_place else None,
        "x": d.lay("x", x, dtype),
        "h": d.lay("h", h, sums(dtype)),
        "weight": with_dtype(d.lay("weight", weight, dtype), dtype if scale is None else torch.float8_e4m3fn),
        "weight_scale": scale,
        "lora_a": d.lay("A", a, dtype),
        "lora_b": d.lay("B", b, dtype),
        "adapter_ids": ids,
        "scalings": strided_vector(d, scalings, "scalings strided"),
        "base": d.lay("base", base, dtype) if not in_place and d.maybe("base") else None,
        "bias": d.lay("bias", bias, d.float32_or(dtype, "bias's dtype")) if d.maybe("bias") else None,
        "out_sizes": sizes,
        "ranks": None if ranks is None else strided_vector(d, ranks, "ranks strided"),
        "plan": d.plan("plan", ids, L) if d.maybe("plan") else None,
    }
    names = {
        "shrink": "x lora_a adapter_ids ranks plan",
        "expand": "h lora_b adapter_ids scalings base out_sizes ranks plan",
        "expand_": "out h lora_b adapter_ids scalings out_sizes ranks plan",
        "delta": "x lora_a lora_b adapter_ids scalings base out_sizes ranks plan",
        "delta_": "out x lora_a lora_b adapter_ids scalings out_sizes ranks plan",
        "linear": "x weight lora_a lora_b adapter_ids scalings bias out_sizes ranks plan weight_scale",
    }[op].split()
    args = {n: args[n] for n in names}
    grad_shape, grad_dtype = (h.shape, sums(dtype)) if op == "shrink" else (y_shape, dtype)
    grad_y = d.lay("grad_y", d.integers(3, *grad_shape), grad_dtype)
    return Call(op, args, grad_y, d.needs(op, args))


def adapter_of(d: dict, row: int, slots: int) -> int | None:
    if d["adapter_ids"] is None:
        return 0 if slots else None
    slot = int(d["adapter_ids"][row])
    return slot if 0 <= slot < slots else None


def rank_of(d: dict, slot: int, rank: int) -> int:
    return rank if d["ranks"] is None else int(d["ranks"][slot])


def h_rows(d: dict, t: int, slot: int) -> list[Tensor]:
    """h of one token for every group, cut to the slot's rank."""
    x, a = d["x"], d["lora_a"]
    rank = rank_of(d, slot, a.shape[-2])
    groups = x.shape[1] if x.dim() == 3 else a.shape[1] if a.dim() == 4 else 1
    return [(a[slot, g] if a.dim() == 4 else a[slot])[:rank] @ (x[t, g] if x.dim() == 3 else x[t]) for g in range(groups)]


def model_shrink(c: Call, d: dict) -> Tensor:
    x, a = d["x"], d["lora_a"]
    grouped, r = x.dim() == 3 or a.dim() == 4, a.shape[-2]
    groups = x.shape[1] if x.dim() == 3 else a.shape[1] if grouped else 1
    rows = []
    for t in range(x.shape[0]):
        slot = adapter_of(d, t, a.shape[0])
        h = torch.zeros(groups, r, dtype=torch.float64)
        if slot is not None and groups:
            rank = rank_of(d, slot, r)
            h = torch.cat([torch.stack(h_rows(d, t, slot)), h[:, rank:]], 1)
        rows.append(h if grouped else h[0])
    return torch.stack(rows) if rows else torch.zeros(0, *((groups,) if grouped else ()), r, dtype=torch.float64)


def model_dense(c: Call, d: dict) -> Tensor:
    """expand, expand_, delta, delta_ and linear."""
    b, sizes = d["lora_b"], d["out_sizes"]
    base = d.get("base", d.get("out"))
    slots, y_groups = b.shape[0], b.shape[1] if b.dim() == 4 else 1
    tokens = d["adapter_ids"].shape[0]
    rows = []
    for t in range(tokens):
        slot = adapter_of(d, t, slots)
        if c.op == "linear":
            row = linear_row(d, t)
            row = row if d["bias"] is None else row + d["bias"]
        else:
            row = None if base is None else base[t]
        if slot is None:
            rows.append(torch.zeros(b.shape[1:-1], dtype=torch.float64) if row is None else row)
            continue
        rank = rank_of(d, slot, b.shape[-1])
        if "h" in d:
            h = [hg[:rank] for hg in (d["h"][t] if d["h"].dim() == 3 else d["h"][t : t + 1])]
            grouped = d["h"].dim() == 3
        else:
            h, grouped = h_rows(d, t, slot), d["x"].dim() == 3 or d["lora_a"].dim() == 4
        if b.dim() == 4:
            parts = [b[slot, g, :, :rank] @ (h[g] if grouped else h[0]) for g in range(y_groups)]
            delta = torch.stack(parts) if parts else torch.zeros(b.shape[1:-1], dtype=torch.float64)
        elif sizes is not None and grouped:
            delta = torch.cat([part @ hg for part, hg in zip(b[slot, :, :rank].split(sizes), h)])
        else:
            delta = b[slot, :, :rank] @ h[0]
        delta = delta * float(d["scalings"][slot])
        rows.append(delta if row is None else Join.apply(row, delta))
    shape = (0, *b.shape[1:-1])
    return torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.float64)


def linear_row(d: dict, t: int) -> Tensor:
    x, w, sizes = d["x"], d["weight"], d["out_sizes"]
    if d["weight_scale"] is not None:
        scale = d["weight_scale"].repeat_interleave(128, -1).repeat_interleave(128, -2)
        w = w * scale[..., : w.shape[-2], : w.shape[-1]]
    if w.dim() == 3:
        parts = [w[g] @ (x[t, g] if x.dim() == 3 else x[t]) for g in range(w.shape[0])]
        return torch.stack(parts) if parts else torch.zeros(w.shape[:2], dtype=torch.float64)
    if x.dim() == 3:
        return torch.cat([part @ x[t, g] for g, part in enumerate(w.split(sizes))])
    return w @ x[t]


# -------------------------------------------------------------------------------------------------------------- experts


def in_halves(d: Draw, name: str, bias: Tensor) -> Tensor:
    """A bias [E, N], or the same as [E, 2, N/2]."""
    return bias.unflatten(1, (2, -1)) if bias.shape[1] and bias.shape[1] % 2 == 0 and d.maybe(f"{name} in halves") else bias


@st.composite
def experts(draw, ops=("expert_delta", "expert_linear"), device="cpu", kernels=False, many=False):
    """A call of expert_delta or expert_linear."""
    d = Draw(draw, device, kernels, many)
    op = d.of(*ops, label="op")
    dtype = d.dtype()
    T, K, L, E = d.size("T", 6, 40), d.size("K", 3), d.size("L", 3), d.size("E", 4)
    D, r, half = d.size("D", 20), d.size("r", 6), d.size("N/2", 8)
    a_shared, each, b_shared, b_halves = (d.maybe(n) for n in ("A shared", "an A each", "B shared", "B in halves"))
    N = 2 * half if each or b_halves else d.size("N", 16)
    if op == "expert_delta" and a_shared and b_shared:
        E = 1
    ea, eb = (1 if shared else E for shared in (a_shared, b_shared))
    ids = d.ids("expert_ids", -1, E, T, K)
    adapters = d.ids("adapter_ids", -1, L - 1, T) if d.of(True, True, False, label="adapter_ids given") else None
    lora = op == "expert_delta" or d.of(True, True, True, False, label="lora")
    per_route = d.maybe("x per route")
    x = d.integers(3, T * K if per_route else T, D)
    a, b = d.integers(3, L, ea, *((2,) if each else ()), r, D), d.integers(2, L, eb, *((2, N // 2) if b_halves else (N,)), r)
    halves = N % 2 == 0 and d.maybe("weight in halves")
    weight, bias = d.integers(2, E, *((2, N // 2) if halves else (N,)), D), d.integers(30, E, N)
    base, weights = d.integers(50, T * K, N), d.among(ROUTE_WEIGHTS, T * K)
    scalings = torch.tensor(SCALINGS)[:L].clone()
    ranks = torch.randint(0, r + 1, (L,), generator=d.generator).int() if d.maybe("ranks") else None
    if d.maybe("poison"):
        flat = ids.reshape(-1).cpu()
        slots = torch.zeros(T, dtype=torch.int64) if adapters is None else adapters.cpu()
        slots = slots.repeat_interleave(K)
        routed = (flat >= 0) & (flat < E)
        reads = routed if op == "expert_linear" else routed & (slots >= 0) & (slots < L)
        weights[~routed] = NAN
        x[~(reads if per_route else reads.view(T, K).any(1) if K else torch.zeros(T, dtype=torch.bool))] = NAN
        for expert in set(range(E)) - set(flat.tolist()):
            weight[expert], bias[expert] = NAN, NAN
        for slot in range(L):
            on = set(flat[routed & (slots == slot)].tolist())
            for factor in (a, b):
                for expert in range(factor.shape[1]):
                    if not on or (factor.shape[1] == E and E != 1 and expert not in on):
                        factor[slot, expert] = NAN
            if ranks is not None:
                a[slot, ..., int(ranks[slot]) :, :] = NAN
                b[slot, ..., int(ranks[slot]) :] = NAN
    lora_dtype, wide = d.float32_or(dtype, "factors' dtype"), d.float32_or(dtype, "row_weights' dtype")
    args = {
        "x": d.lay("x", x, dtype),
        "weight": d.lay("weight", weight, dtype),
        "lora_a": d.lay("A", a, lora_dtype) if lora else None,
        "lora_b": d.lay("B", b, lora_dtype) if lora else None,
        "expert_ids": ids,
        "adapter_ids": adapters,
        "scalings": strided_vector(d, scalings, "scalings strided") if lora else None,
        "base": d.lay("base", base, dtype) if d.maybe("base") else None,
        "bias": in_halves(d, "bias", d.lay("bias", bias, d.float32_or(dtype, "bias's dtype"))) if d.maybe("bias") else None,
        "row_weights": d.lay("row_weights", weights, wide) if d.maybe("row_weights") else None,
        "ranks": None if ranks is None or not lora else strided_vector(d, ranks, "ranks strided"),
        "plan": d.plan("expert_plan", ids, adapters, E, L) if lora and d.maybe("plan") else None,
    }
    for name in ("base",) if op == "expert_linear" else ("weight", "bias"):
        del args[name]
    grad_y = d.lay("grad_y", d.integers(3, T * K, N), dtype)
    return Call(op, args, grad_y, d.needs(op, args))


def route_delta(d: dict, names: tuple, x: Tensor, e: int, slot: int | None, dtype) -> Tensor | None:
    """s · B (A x) of one route; None without an adapter."""
    a, b = (d[n] for n in names)
    if a is None or slot is None:
        return None
    rank = rank_of(d, slot, a.shape[-2])
    rank = min(rank, a.shape[-2])
    a, b = (f[slot, e if f.shape[1] > 1 else 0] for f in (a, b))
    b = b.flatten(0, 1) if b.dim() == 3 else b
    a, b = a[..., :rank, :], b[:, :rank]
    if a.dim() == 3:
        half = b.shape[0] // 2
        y = torch.cat([b[:half] @ Probe.apply(a[0] @ x, dtype), b[half:] @ Probe.apply(a[1] @ x, dtype)])
    else:
        y = b @ Probe.apply(a @ x, dtype)
    return y * float(d["scalings"][slot])


def model_experts(c: Call, d: dict) -> Tensor:
    """expert_delta and expert_linear, route by route."""
    ids, x, dtype = d["expert_ids"], d["x"], c.args["x"].dtype
    tokens, top_k = ids.shape
    factor = d["lora_b"] if d["lora_b"] is not None else None
    shape = d["weight"].shape[1:-1] if factor is None else factor.shape[2:-1]
    out = int(torch.Size(shape).numel())
    slots = 0 if factor is None else factor.shape[0]
    count = d["weight"].shape[0] if c.op == "expert_linear" else None
    if count is None:
        count = d["lora_a"].shape[1] if d["lora_a"].shape[1] != 1 else d["lora_b"].shape[1]
    rows = []
    for m, e in enumerate(ids.reshape(-1).tolist()):
        t = m // top_k
        row = torch.zeros(out, dtype=torch.float64)
        base = d.get("base")
        if not 0 <= e < count:
            rows.append(row if base is None else base[m])
            continue
        xm = x[m] if x.shape[0] != tokens else x[t]
        delta = route_delta(d, ("lora_a", "lora_b"), xm, e, adapter_of(d, t, slots), dtype)
        w = 1.0 if d["row_weights"] is None else d["row_weights"][m]
        if c.op == "expert_delta":
            if delta is not None:
                delta = delta * w
                row = delta if base is None else Join.apply(base[m], delta)
            elif base is not None:
                row = base[m]
        else:
            row = d["weight"][e].flatten(0, -2) @ xm
            row = row if delta is None else row + delta
            row = row if d["bias"] is None else row + d["bias"][e].flatten()
            row = row * w
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, out, dtype=torch.float64)


@st.composite
def mlps(draw, device="cpu", kernels=False, many=False):
    """A call of expert_mlp. A bias of ±128 and more saturates the gates, so that silu, sigmoid and tanh are exact."""
    d = Draw(draw, device, kernels, many)
    dtype = d.dtype()
    activation = d.of("relu2", "swiglu", "swigluoai", "geglu_tanh", label="activation")
    if dtype == torch.float64:
        activation = "relu2"  # float64 does not underflow so soon
    gated = activation != "relu2"
    T, K, E, L = d.size("T", 5), d.size("K", 3), d.size("E", 4), d.size("L", 3)
    H, inner, r = d.size("H", 6), d.size("I", 4), d.size("r of the layer", 3)
    wide = 2 * inner if gated else inner
    placement = d.of("input", "pre_down", "post_down", label="router_weight")
    ids = d.ids("topk_ids", -1, E, T, K)
    adapters = d.ids("adapter_ids", -1, L - 1, T) if d.of(True, True, False, label="adapter_ids given") else None
    pairs = d.of("both", "both", "gate_up", "down", "none", label="LoRA")
    split = lambda name: gated and d.maybe(name)  # noqa: E731
    ea, eb, ec, ed = (1 if d.maybe(f"{n} shared") else E for n in ("gate_up_a", "gate_up_b", "down_a", "down_b"))
    x = d.integers(2, T, H)
    w1 = d.integers(1, E, *((2, inner) if split("w_gate_up in halves") else (wide,)), H)
    w2 = d.integers(1, E, H, inner)
    gua = d.integers(1, L, ea, *((2,) if split("an A each") else ()), r, H)
    gub = d.integers(1, L, eb, *((2, inner) if split("gate_up_b in halves") else (wide,)), r)
    da, db = d.integers(1, L, ec, r, inner), d.integers(1, L, ed, H, r)
    b1, b2 = d.integers(3, E, wide), d.integers(9, E, H)
    if gated:
        b1[:, :inner] += d.among([128.0, 128.0, -256.0], E, inner)
    limit = 40.0 if activation in ("swiglu", "swigluoai") and d.maybe("clamped") else None
    scalings = torch.tensor([1.0, 0.5, -1.0])[:L]
    ranks = torch.randint(0, r + 1, (L,), generator=d.generator).int() if d.maybe("ranks") else None
    weights = d.among(ROUTE_WEIGHTS, T, K)
    if d.maybe("poison"):
        routed = ((ids >= 0) & (ids < E)).cpu()
        weights[~routed] = NAN
        x[~routed.any(1)] = NAN
        for expert in set(range(E)) - set(ids.reshape(-1).tolist()):
            w1[expert], w2[expert], b1[expert], b2[expert] = NAN, NAN, NAN, float("inf")
        used = {0} if adapters is None else set(adapters.tolist())
        for slot in range(L):
            for f in (gua, gub, da, db):
                if slot not in used:
                    f[slot] = NAN
            if ranks is not None:
                for f in (gua, da):
                    f[slot, ..., int(ranks[slot]) :, :] = NAN
                for f in (gub, db):
                    f[slot, ..., int(ranks[slot]) :] = NAN
    lora_dtype = d.float32_or(dtype, "factors' dtype")
    lays = {n: d.lay(n, t, lora_dtype) for n, t in (("gate_up_a", gua), ("gate_up_b", gub), ("down_a", da), ("down_b", db))}
    lora = {n: t if pairs in ("both", n[: n.rindex("_")]) else None for n, t in lays.items()}
    any_lora = pairs != "none"
    args = {
        "x": d.lay("x", x, dtype),
        "topk_ids": ids,
        "topk_weights": d.lay("topk_weights", weights, d.float32_or(dtype, "topk_weights' dtype")),
        "w_gate_up": d.lay("w_gate_up", w1, dtype),
        "w_down": d.lay("w_down", w2, dtype),
        **lora,
        "adapter_ids": adapters,
        "scalings": strided_vector(d, scalings, "scalings strided") if any_lora else None,
        "b_gate_up": None,
        "b_down": d.lay("b_down", b2, d.float32_or(dtype, "b_down's dtype")) if d.maybe("b_down") else None,
        "activation": activation,
        "activation_limit": limit,
        "router_weight": placement,
        "ranks": ranks.to(d.device) if ranks is not None and any_lora else None,
        "plan": d.plan("expert_plan", ids, adapters, E, L) if any_lora and d.maybe("plan") else None,
    }
    if gated or d.maybe("b_gate_up"):
        b1 = d.lay("b_gate_up", b1, d.float32_or(dtype, "b_gate_up's dtype"))
        args["b_gate_up"] = in_halves(d, "b_gate_up", b1) if gated else b1
    grad_y = d.lay("grad_y", d.integers(2, T, H), dtype)
    return Call("expert_mlp", args, grad_y, d.needs("expert_mlp", args))


def saturated(h: Tensor, activation: str, limit: float | None) -> Tensor:
    """The activation where its sigmoid or tanh is exactly 0 or 1."""
    if activation == "relu2":
        return h.relu() ** 2
    gate, up = h.chunk(2)
    assume(bool(((gate >= 40) | (gate <= -120)).all()))
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.relu() * (up + 1 if activation == "swigluoai" else up)


def model_mlp(c: Call, d: dict) -> Tensor:
    """expert_mlp, route by route, with the contract's stages."""
    dtype, where = c.args["x"].dtype, d["router_weight"]
    stage = lambda t: Stage.apply(t, dtype)  # noqa: E731
    slots = max((d[n].shape[0] for n in ("gate_up_a", "down_a") if d[n] is not None), default=0)
    rows = []
    for t, row in enumerate(d["topk_ids"].tolist()):
        slot = adapter_of(d, t, slots)
        total = torch.zeros(d["x"].shape[1], dtype=torch.float64)
        for k, e in enumerate(row):
            if not 0 <= e < d["w_down"].shape[0]:
                continue
            w = d["topk_weights"][t, k]
            x = stage(d["x"][t] * w) if where == "input" else d["x"][t]
            h = d["w_gate_up"][e].flatten(0, -2) @ x
            delta = route_delta(d, ("gate_up_a", "gate_up_b"), x, e, slot, dtype)
            h = stage(h if delta is None else h + delta)
            h = h if d["b_gate_up"] is None else stage(h + d["b_gate_up"][e].flatten())
            a = saturated(h, d["activation"], d["activation_limit"])
            a = stage(a * w if where == "pre_down" else a)
            y = d["w_down"][e] @ a
            delta = route_delta(d, ("down_a", "down_b"), a, e, slot, dtype)
            y = stage(y if delta is None else y + delta)
            if d["b_down"] is not None:
                y = stage(y + (d["b_down"][e] * w if where == "pre_down" else d["b_down"][e]))
            total = total + (y * w if where == "post_down" else y)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros(0, d["x"].shape[1], dtype=torch.float64)


MODELS = {
    "shrink": model_shrink,
    **dict.fromkeys(("expand", "expand_", "delta", "delta_", "linear"), model_dense),
    **dict.fromkeys(("expert_delta", "expert_linear"), model_experts),
    "expert_mlp": model_mlp,
}
