"""Prepare kernels before a CUDA graph capture or the first request: nothing is compiled afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .ops import delta, delta_, expand, expand_, linear, plan, shrink


@dataclass(frozen=True)
class Shape:
    """One dense layer and its adapter buffers, as they will be called.

    Sizes as in `delta`: in_features D, out_features N (of one group), rank r (of the buffers), num_slots L. groups:
    None for a plain linear, else G. out_sizes: unequal slices in place of out_features. shared_a: one A for all
    groups; shared_input: x is [T, D] for all groups. ranks: whether calls pass `ranks`. id_dtype: adapter_ids' dtype.
    weight_scale: the dtype of linear's `weight_scale`, where its weight is float8_e4m3fn.
    """

    in_features: int
    rank: int
    num_slots: int
    out_features: int = 0
    groups: int | None = None
    out_sizes: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    shared_a: bool = True
    shared_input: bool = False
    ranks: bool = True
    id_dtype: torch.dtype = torch.int32
    weight_scale: torch.dtype | None = None


OPS = ("delta", "delta_", "shrink", "expand", "expand_", "linear")


def warmup(
    shapes: Iterable[Shape],
    *,
    tokens: int | Iterable[int] = 512,
    ops: Iterable[str] = ("delta", "delta_"),
    device: torch.device | str | None = None,
    backward: bool = False,
) -> int:
    """Compile and load what `ops` need for `shapes` at T = 1 … tokens (or at the given Ts); returns the calls made.

    Each of those T is called once on dummy tensors with the layout of freshly allocated ones (contiguous, 16-byte
    aligned): afterwards such calls compile nothing, captured or not. Calls with other layouts (a transposed factor, an
    unaligned slice) want one call of their own. delta and expand are prepared with and without base, linear
    with and without a bias of x's dtype, `plan` always. backward: also the gradients of x, lora_a and lora_b: delta's, and
    linear's where it is among `ops`. Does nothing on a machine without a GPU.
    """
    return run("warmup", OPS, _call, shapes, tokens, ops, device, backward)


def run(
    name: str,
    known: tuple[str, ...],
    call: Callable,
    shapes: Iterable,
    tokens: int | Iterable[int],
    ops: Iterable[str],
    device: torch.device | str | None,
    backward: bool,
) -> int:
    """`call` for every shape at every T on the device; the number of calls made. What `warmup` and `warmup_experts` share."""
    ops = tuple(ops)
    for op in ops:
        if op not in known:
            raise ValueError(f"grouped_lora_ops.{name}: ops must be among {list(known)}; got {op!r}.")
    if not torch.cuda.is_available():
        return 0
    device = torch.device(device if device is not None else "cuda")
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    counts = list(range(1, tokens + 1) if isinstance(tokens, int) else tokens)
    calls = sum([call(shape, counts, ops, device, backward) for shape in shapes])
    torch.cuda.synchronize(device)
    return calls


def _call(s: Shape, counts: list, ops: tuple, device: torch.device, backward: bool) -> int:
    def make(*size, dtype=s.dtype):
        return torch.zeros(size, dtype=dtype, device=device)

    tokens = max(counts, default=0)
    groups = len(s.out_sizes) if s.out_sizes else s.groups
    flat_x = groups is None or s.shared_input or s.out_sizes
    xs = make(tokens, s.in_features) if flat_x else make(tokens, groups, s.in_features)
    per_group = groups is not None and not s.shared_a
    # one slot's memory serves all of them: strides of 0 keep the alignment that real buffers have
    a = make(1, *((groups,) if per_group else ()), s.rank, s.in_features)
    if s.out_sizes:
        b, wide = make(1, sum(s.out_sizes), s.rank), (sum(s.out_sizes),)
    elif groups is None:
        b, wide = make(1, s.out_features, s.rank), (s.out_features,)
    else:
        b, wide = make(1, groups, s.out_features, s.rank), (groups, s.out_features)
    a, b = (t.expand(s.num_slots, *t.shape[1:]) for t in (a, b))
    bias, base, weight = make(*wide), {}, None
    if "linear" in ops:  # all of it: the tensor maps of csrc/ have no stride of 0
        weight = make(*wide, s.in_features, dtype=s.dtype if s.weight_scale is None else torch.float8_e4m3fn)
    if s.weight_scale is not None:
        blocks = [*wide[:-1], *[(size + 127) // 128 for size in (wide[-1], s.in_features)]]
        base = {"weight_scale": torch.ones(blocks, device=device).to(s.weight_scale)}
    all_ids = torch.zeros(tokens, dtype=s.id_dtype, device=device)
    scalings = torch.ones(s.num_slots, device=device)
    kw = {"ranks": torch.full((s.num_slots,), s.rank, dtype=torch.int32, device=device) if s.ranks else None}
    sizes = {"out_sizes": list(s.out_sizes) if s.out_sizes else None}
    outs = make(tokens, *wide)
    for count in counts:
        x, ids, out = xs[:count], all_ids[:count], outs[:count]
        plan(ids, s.num_slots)
        if {"shrink", "expand", "expand_"} & set(ops):
            h = shrink(x, a, ids, **kw)
        for op in ops:
            if op == "delta":
                delta(x, a, b, ids, scalings, **kw, **sizes)
                delta(x, a, b, ids, scalings, base=out, **kw, **sizes)
            elif op == "delta_":
                delta_(out, x, a, b, ids, scalings, **kw, **sizes)
            elif op == "expand":
                expand(h, b, ids, scalings, **kw, **sizes)
                expand(h, b, ids, scalings, base=out, **kw, **sizes)
            elif op == "expand_":
                expand_(out, h, b, ids, scalings, **kw, **sizes)
            elif op == "linear":
                linear(x, weight, a, b, ids, scalings, **kw, **sizes, **base)
                linear(x, weight, a, b, ids, scalings, bias=bias, **kw, **sizes, **base)
        if backward:
            leaves = [t.detach().requires_grad_() for t in (x, a, b)]
            y = delta(*leaves, ids, scalings, **kw, **sizes)
            torch.autograd.grad(y, leaves, out)  # not the gradient of a sum, whose strides are 0
            if "linear" in ops:
                y = linear(leaves[0], weight, *leaves[1:], ids, scalings, **kw, **sizes, **base)
                torch.autograd.grad(y, leaves, out)
    return len(ops) * len(counts)
