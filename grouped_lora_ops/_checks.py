"""The argument checks and their sentences. They read shapes, strides, dtypes and devices, never device memory.

Every sentence has one form: `grouped_lora.<op>: <argument> must be <what>; got <what it was>.`
"""

from __future__ import annotations

import os
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

CHECK_IDS = os.environ.get("GROUPED_LORA_CHECK", "0") == "1"

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CPU_DTYPES = (*_GPU_DTYPES, torch.float64)
_ID_DTYPES = (torch.int32, torch.int64)
SCALE_DTYPES = (torch.float32, *[getattr(torch, n) for n in ("float8_e8m0fnu",) if hasattr(torch, n)])


class Dims(NamedTuple):
    """The sizes of one dense problem."""

    tokens: int  # T
    groups: int  # G: groups of h and of the output; 1 where neither has a group axis
    in_features: int  # D
    out_features: int  # N of one group; ΣN with out_sizes
    rank: int  # r
    slots: int  # L
    h_grouped: bool  # h has a group axis
    y_grouped: bool  # y is [T, G, N]; False: [T, N] or [T, ΣN]
    out_sizes: tuple | None


def fail(op: str, name: str, must: str, got) -> None:
    raise ValueError(f"grouped_lora.{op}: {name} must be {must}; got {got}.")


def shape(t: Tensor) -> str:
    return str(list(t.shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_types(op: str, required: dict, optional: dict) -> None:
    """TypeError unless every required argument is a Tensor and every optional one a Tensor or None."""
    for name, value in required.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"grouped_lora.{op}: {name} must be a torch.Tensor; got {type(value).__name__}.")
    for name, value in optional.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"grouped_lora.{op}: {name} must be a torch.Tensor or None; got {type(value).__name__}.")
    if forward_ad._current_level >= 0:
        _no_tangents(op, {**required, **optional})


def _no_tangents(op: str, tensors: dict) -> None:
    """RuntimeError for a dual tensor: torch would drop its tangent without a word, which makes it zero."""
    for name, t in tensors.items():
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(f"grouped_lora.{op}: forward-mode derivatives are not supported; {name} has a tangent.")


def instance(where: str, name: str, value, kind: type, cure: str) -> None:
    """TypeError unless value is a kind: for the classes above the ops. cure: where one comes from."""
    if not isinstance(value, kind):
        raise TypeError(f"grouped_lora_ops.{where}: {name} must be {kind.__name__}, {cure}; got {type(value).__name__}.")


def out_sizes_type(op: str, out_sizes) -> None:
    if out_sizes is None:
        return
    if not isinstance(out_sizes, (list, tuple)):
        raise TypeError(f"grouped_lora.{op}: out_sizes must be a list of int or None; got {type(out_sizes).__name__}.")
    for size in out_sizes:
        int_type(op, "out_sizes", size, "a list of int or None", "a list that holds ")


def int_type(op: str, name: str, value, must: str = "an int", holds: str = "") -> None:
    """TypeError unless value is an integer, ValueError where int32 cannot hold it."""
    if not isinstance(value, (int, torch.SymInt)) and not isinstance(value, Integral):
        raise TypeError(f"grouped_lora.{op}: {name} must be {must}; got {holds}{type(value).__name__}.")
    if isinstance(value, int) and value >= 2**31:
        fail(op, name, "below 2^31", f"{holds}{value}")


def _device(op: str, first_name: str, first: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and t.device != first.device:
            fail(op, name, f"on {first.device} like {first_name}", t.device)


def _float(op: str, name: str, t: Tensor) -> None:
    allowed = _CPU_DTYPES if t.device.type == "cpu" else _GPU_DTYPES
    if t.dtype not in allowed:
        names = [dtype_name(d) for d in allowed]
        fail(op, name, f"{', '.join(names[:-1])} or {names[-1]} on {t.device.type}", dtype_name(t.dtype))


def _same_dtype(op: str, name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    if t.dtype != like.dtype:
        fail(op, name, f"{dtype_name(like.dtype)} like {like_name}", dtype_name(t.dtype))


def _ids(op: str, adapter_ids: Tensor, tokens, token_name: str, token_tensor: Tensor) -> None:
    if adapter_ids.dtype not in _ID_DTYPES:
        fail(op, "adapter_ids", "int32 or int64", dtype_name(adapter_ids.dtype))
    if adapter_ids.dim() != 1 or adapter_ids.shape[0] != tokens:
        fail(op, "adapter_ids", f"[{tokens}] to match {token_name} {shape(token_tensor)}", shape(adapter_ids))


def _slots(op: str, slots, name: str, stacked: Tensor, scalings: Tensor | None, ranks: Tensor | None) -> None:
    if scalings is not None:
        if scalings.dtype != torch.float32:
            fail(op, "scalings", "float32", dtype_name(scalings.dtype))
        if scalings.dim() != 1 or scalings.shape[0] != slots:
            fail(op, "scalings", f"[{slots}] to match {name} {shape(stacked)}", shape(scalings))
    if ranks is not None:
        if ranks.dtype != torch.int32:
            fail(op, "ranks", "int32", dtype_name(ranks.dtype))
        if ranks.dim() != 1 or ranks.shape[0] != slots:
            fail(op, "ranks", f"[{slots}] to match {name} {shape(stacked)}", shape(ranks))


def _plan(op: str, plan: Tensor | None, tokens, slots) -> None:
    if plan is None:
        return
    if plan.dtype != torch.int32:
        fail(op, "plan", "int32", dtype_name(plan.dtype))
    if plan.dim() != 1 or plan.shape[0] != tokens + slots + 2:
        fail(
            op,
            "plan",
            f"[{tokens + slots + 2}] = T + L + 2 for T = {tokens} rows and L = {slots} slots, from grouped_lora.plan",
            shape(plan),
        )
    if plan.stride(0) != 1:
        fail(op, "plan", "contiguous", f"stride {plan.stride(0)}")


def _x_and_a(op: str, x: Tensor, lora_a: Tensor) -> None:
    if x.dim() not in (2, 3):
        fail(op, "x", "[T, D] or [T, G, D]", shape(x))
    _float(op, "x", x)
    _same_dtype(op, "lora_a", lora_a, "x", x)
    features = x.shape[-1]
    if lora_a.dim() not in (3, 4) or lora_a.shape[-1] != features:
        form = f"[L, r, {features}]" if lora_a.dim() != 4 else f"[L, G, r, {features}]"
        fail(op, "lora_a", f"{form} to match x {shape(x)}", shape(lora_a))
    if x.dim() == 3 and lora_a.dim() == 4 and lora_a.shape[1] != x.shape[1]:
        fail(op, "lora_a", f"[L, {x.shape[1]}, r, {features}] to match x {shape(x)}", shape(lora_a))


def _b(op: str, lora_b: Tensor, h_name: str, h: Tensor, groups, h_grouped: bool, rank, out_sizes) -> None:
    """lora_b against h (or what makes h): its form, groups and rank."""
    if out_sizes is not None:
        if len(out_sizes) == 0:
            fail(op, "out_sizes", "at least one slice", "[]")
        if any(size < 0 for size in out_sizes):
            fail(op, "out_sizes", "sizes of zero or more", list(out_sizes))
        if h_grouped and len(out_sizes) != groups:
            fail(op, "out_sizes", f"{groups} sizes, one for each group of {h_name} {shape(h)}", list(out_sizes))
        total = sum(out_sizes)
        if lora_b.dim() != 3 or lora_b.shape[1] != total or lora_b.shape[2] != rank:
            fail(op, "lora_b", f"[L, {total}, {rank}] to match out_sizes {list(out_sizes)} and {h_name} {shape(h)}", shape(lora_b))
    elif h_grouped:
        if lora_b.dim() != 4 or lora_b.shape[1] != groups or lora_b.shape[3] != rank:
            form = {"x": " = [T, G, D]", "h": " = [T, G, r]"}.get(h_name, "")
            flat = lora_b.dim() == 3 and lora_b.shape[2] == rank
            cure = " (a flat [L, G·N, r] is a view of it, and unequal groups want out_sizes)" if flat else ""
            fail(op, "lora_b", f"[L, {groups}, N, {rank}] to match {h_name} {shape(h)}{form}{cure}", shape(lora_b))
    elif lora_b.dim() not in (3, 4) or lora_b.shape[-1] != rank:
        fail(op, "lora_b", f"[L, N, {rank}] or [L, G, N, {rank}] to match {h_name} {shape(h)}", shape(lora_b))


def _output(op: str, name: str, t: Tensor, dims: Dims, like_name: str, like: Tensor) -> None:
    _same_dtype(op, name, t, like_name, like)
    wanted = [dims.tokens, dims.groups, dims.out_features] if dims.y_grouped else [dims.tokens, dims.out_features]
    if list(t.shape) != wanted:
        fail(op, name, f"{wanted} to match {like_name} {shape(like)}", shape(t))


def _dims(tokens, groups, in_features, rank, h_grouped: bool, lora_b: Tensor, out_sizes) -> Dims:
    y_grouped = lora_b.dim() == 4
    return Dims(
        tokens=tokens,
        groups=lora_b.shape[1] if y_grouped else groups,
        in_features=in_features,
        out_features=lora_b.shape[2] if y_grouped else lora_b.shape[1],
        rank=rank,
        slots=lora_b.shape[0],
        h_grouped=h_grouped,
        y_grouped=y_grouped,
        out_sizes=None if out_sizes is None else tuple(out_sizes),
    )


def shrink(op: str, x, lora_a, adapter_ids, ranks, plan) -> Dims:
    _x_and_a(op, x, lora_a)
    tokens, slots = x.shape[0], lora_a.shape[0]
    _ids(op, adapter_ids, tokens, "x", x)
    _slots(op, slots, "lora_a", lora_a, None, ranks)
    _plan(op, plan, tokens, slots)
    _device(op, "x", x, lora_a=lora_a, adapter_ids=adapter_ids, ranks=ranks, plan=plan)
    h_grouped = x.dim() == 3 or lora_a.dim() == 4
    groups = x.shape[1] if x.dim() == 3 else lora_a.shape[1] if lora_a.dim() == 4 else 1
    return Dims(tokens, groups, x.shape[-1], 0, lora_a.shape[-2], slots, h_grouped, False, None)


def expand(op: str, h, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan, out=None) -> Dims:
    if h.dim() not in (2, 3):
        fail(op, "h", "[T, r] or [T, G, r]", shape(h))
    _float(op, "lora_b", lora_b)
    h_dtype = torch.float64 if lora_b.dtype == torch.float64 else torch.float32
    if h.dtype != h_dtype:
        fail(op, "h", dtype_name(h_dtype), dtype_name(h.dtype))
    tokens, rank, h_grouped = h.shape[0], h.shape[-1], h.dim() == 3
    groups = h.shape[1] if h_grouped else 1
    _b(op, lora_b, "h", h, groups, h_grouped, rank, out_sizes)
    dims = _dims(tokens, groups, 0, rank, h_grouped, lora_b, out_sizes)
    _ids(op, adapter_ids, tokens, "h", h)
    _slots(op, dims.slots, "lora_b", lora_b, scalings, ranks)
    _plan(op, plan, tokens, dims.slots)
    _device(
        op, "h", h, lora_b=lora_b, adapter_ids=adapter_ids, scalings=scalings, base=base, out=out, ranks=ranks, plan=plan
    )
    for name, t in (("base", base), ("out", out)):
        if t is not None:
            _output(op, name, t, dims, "lora_b", lora_b)
    if out is not None:
        _in_place(op, out, h=h, lora_b=lora_b)
    return dims


def delta(op: str, x, lora_a, lora_b, adapter_ids, scalings, base, out_sizes, ranks, plan, out=None) -> Dims:
    _x_and_a(op, x, lora_a)
    _same_dtype(op, "lora_b", lora_b, "x", x)
    tokens, rank, slots = x.shape[0], lora_a.shape[-2], lora_a.shape[0]
    h_grouped = x.dim() == 3 or lora_a.dim() == 4
    groups = x.shape[1] if x.dim() == 3 else lora_a.shape[1] if lora_a.dim() == 4 else 1
    h_name, h = ("x", x) if x.dim() == 3 else ("lora_a", lora_a)
    _b(op, lora_b, h_name, h, groups, h_grouped, rank, out_sizes)
    if lora_b.shape[0] != slots:
        fail(op, "lora_b", f"of {slots} slots like lora_a {shape(lora_a)}", shape(lora_b))
    dims = _dims(tokens, groups, x.shape[-1], rank, h_grouped, lora_b, out_sizes)
    _ids(op, adapter_ids, tokens, "x", x)
    _slots(op, slots, "lora_a", lora_a, scalings, ranks)
    _plan(op, plan, tokens, slots)
    _device(
        op,
        "x",
        x,
        lora_a=lora_a,
        lora_b=lora_b,
        adapter_ids=adapter_ids,
        scalings=scalings,
        base=base,
        out=out,
        ranks=ranks,
        plan=plan,
    )
    for name, t in (("base", base), ("out", out)):
        if t is not None:
            _output(op, name, t, dims, "x", x)
    if out is not None:
        _in_place(op, out, x=x, lora_a=lora_a, lora_b=lora_b)
    return dims


def linear(op: str, x, weight, lora_a, lora_b, adapter_ids, scalings, bias, out_sizes, ranks, plan, weight_scale=None) -> Dims:
    dims = delta(op, x, lora_a, lora_b, adapter_ids, scalings, None, out_sizes, ranks, plan)
    if weight.dtype == torch.float8_e4m3fn:
        if x.dtype not in (torch.bfloat16, torch.float16):
            fail(op, "x", "bfloat16 or float16 beside a weight of float8_e4m3fn", dtype_name(x.dtype))
    else:
        _same_dtype(op, "weight", weight, "x", x)
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        fail(op, "bias", f"{dtype_name(x.dtype)} like x, or float32", dtype_name(bias.dtype))
    _device(op, "x", x, weight=weight, bias=bias)
    rows = [dims.groups, dims.out_features] if dims.y_grouped else [dims.out_features]
    for name, t, wanted in (("weight", weight, [*rows, dims.in_features]), ("bias", bias, rows)):
        if t is not None and list(t.shape) != wanted:
            fail(op, name, f"{wanted} to match x {shape(x)} and lora_b {shape(lora_b)}", shape(t))
    _weight_scale(op, weight, weight_scale)
    return dims


def _weight_scale(op: str, weight: Tensor, scale: Tensor | None) -> None:
    if weight.dtype != torch.float8_e4m3fn:
        if scale is not None:
            must = f"None beside a weight of {dtype_name(weight.dtype)} (a scale belongs to float8_e4m3fn)"
            fail(op, "weight_scale", must, shape(scale))
        return
    blocks = [*weight.shape[:-2], *[(size + 127) // 128 for size in weight.shape[-2:]]]
    form = f"{blocks}, a scale for every block of 128 x 128 of weight {shape(weight)}"
    if scale is None:
        fail(op, "weight_scale", form, None)
    if scale.dtype not in SCALE_DTYPES:
        fail(op, "weight_scale", " or ".join([dtype_name(d) for d in SCALE_DTYPES]), dtype_name(scale.dtype))
    _device(op, "weight", weight, weight_scale=scale)
    if list(scale.shape) != blocks:
        fail(op, "weight_scale", form, shape(scale))


def frozen_scaled(op: str, weight: Tensor, scale: Tensor | None) -> None:
    """ValueError for an 8-bit weight, or its scale, that requires grad: there is no gradient to give it."""
    for name, t in (("weight", weight), ("weight_scale", scale)):
        if scale is not None and t.requires_grad:
            raise ValueError(f"grouped_lora.{op}: {name} must not require grad, an 8-bit weight is frozen; detach it.")


def plan(op: str, adapter_ids: Tensor, num_slots: int) -> None:
    if adapter_ids.dtype not in _ID_DTYPES:
        fail(op, "adapter_ids", "int32 or int64", dtype_name(adapter_ids.dtype))
    if adapter_ids.dim() != 1:
        fail(op, "adapter_ids", "[T]", shape(adapter_ids))
    if num_slots < 0:
        fail(op, "num_slots", "zero or more", num_slots)


def id_values(op: str, adapter_ids: Tensor, slots: int, ranks: Tensor | None = None, rank: int = 0) -> None:
    """ValueError for ids outside −1 … L−1 and ranks outside 0 … r. Reads the values: on a GPU this synchronises."""
    if adapter_ids.numel():
        low, high = (int(v) for v in torch.aminmax(adapter_ids))
        if low < -1 or high >= slots:
            fail(op, "adapter_ids", f"-1 (no adapter) or a slot 0 … {slots - 1}", low if low < -1 else high)
    if ranks is not None and ranks.numel():
        low, high = (int(v) for v in torch.aminmax(ranks))
        if low < 0 or high > rank:
            fail(op, "ranks", f"0 … {rank}, the rank of the stacked factors", low if low < 0 else high)


def _in_place(op: str, out: Tensor, **operands: Tensor) -> None:
    functional = op.rstrip("_")
    if torch.is_grad_enabled():
        for name, t in (("out", out), *operands.items()):
            if t.requires_grad:
                raise ValueError(
                    f"grouped_lora.{op}: {name} must not require grad, the op works in place; use "
                    f"grouped_lora.{functional} with base=out, or call it under torch.no_grad()."
                )
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride())):
        fail(op, "out", "a tensor whose elements have memory of their own", f"strides {list(out.stride())}")
    if torch.compiler.is_compiling() or isinstance(out, torch._subclasses.FakeTensor) or out.is_meta:
        return  # such a tensor has no address to compare
    for name, t in operands.items():
        if overlaps(out, t):
            fail(op, "out", f"memory apart from {name}", f"an out that overlaps {name}")


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share an element: False is certain, True errs for interleaved exotic strides.

    Column slices of one buffer, of its rows or of the groups inside its rows, are recognised as apart.
    """
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.numel() == 0 or b.numel() == 0:
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    end_a, end_b = start_a + span(a), start_b + span(b)
    if end_a <= start_b or end_b <= start_a:
        return False
    for period in {stride * t.element_size() for t in (a, b) for stride in t.stride() if stride > 1}:
        offset = (start_b - start_a) % period  # modulo the period a lies in [0, its span), b in [offset, offset + its span)
        if span(a, period) <= offset and offset + span(b, period) <= period:
            return False
    return True


def span(t: Tensor, period: int | None = None) -> int:
    """Bytes from the first element to past the last; with a period, axes whose stride is a multiple of it are left out."""
    size = t.element_size()
    steps = [(n - 1) * s * size for n, s in zip(t.shape, t.stride()) if period is None or s * size % period]
    return sum(steps) + size
