"""Inputs for the dense ops. Small integers make every product and sum exact in float32, so any kernel must equal the
reference bit for bit; h needs more bits than x's dtype has, so that a kernel which rounds h is caught."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from grouped_lora_ops import reference

# name: groups of x, of A, of B (0: no group axis); "slices": B is [L, ΣN, r] with out_sizes
FORMS = {
    "plain": (0, 0, 0),
    "wo_a": ("G", 0, "G"),
    "wo_a with an A per group": ("G", "G", "G"),
    "shared input": (0, "G", "G"),
    "shared h": (0, 0, "G"),
    "slices": (0, "G", "slices"),
    "slices of grouped x": ("G", 0, "slices"),
    "slices of one h": (0, 0, "slices"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALINGS = (1.0, 0.5, -1.0, 2.0, 0.25)
NAN = float("nan")
UNSORTED = ([1, 2, 3, 2, 3, 2, 3, 3], [2, 0, 2, 1, 0], [5, 3, 3, 0])
RANKS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 33, 48, 64, 96, 128, 200, 256)


@dataclass
class Case:
    x: Tensor
    a: Tensor
    b: Tensor
    ids: Tensor
    scalings: Tensor
    base: Tensor
    grad_y: Tensor
    out_sizes: list | None
    ranks: Tensor | None
    kw: dict = field(default_factory=dict)  # out_sizes and ranks

    def __post_init__(self):
        self.kw = {"out_sizes": self.out_sizes, "ranks": self.ranks}

    @property
    def factors(self):
        return self.x, self.a, self.b, self.ids, self.scalings

    def wide(self):
        """The same values in float64, dense."""
        x, a, b, base, grad_y = (t.double() for t in (self.x, self.a, self.b, self.base, self.grad_y))
        return Case(x, a, b, self.ids, self.scalings, base, grad_y, self.out_sizes, self.ranks)


def place(t: Tensor, layout: str, device="cpu") -> Tensor:
    """t in memory of its own, laid out; what lies between its elements is NaN.

    dense; slice: aligned columns of a wider buffer; odd: rows of an odd length from an odd offset; rows: every other
    row; transposed: the last two axes swapped in memory; scattered: no axis has unit stride.
    """
    t = t.to(device)
    if layout == "dense":
        return t.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    shape = list(t.shape)
    if layout == "slice":
        view = t.new_full([*shape[:-1], shape[-1] + 144], NAN)[..., 128 : 128 + shape[-1]]
    elif layout == "odd":
        width = shape[-1] + 4 + (shape[-1] + 1) % 2
        view = t.new_full([*shape[:-1], width], NAN)[..., 3 : 3 + shape[-1]]
    elif layout == "rows":
        view = t.new_full([2 * shape[0], *shape[1:]], NAN)[::2]
    elif layout == "scattered":
        view = t.new_full([*shape, 3], NAN)[..., 1]
    else:
        raise ValueError(layout)
    return view.copy_(t)


def build(
    form: str = "wo_a",
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 7,
    slots: int = 3,
    groups: int = 2,
    features: int = 300,
    out: int = 70,
    rank: int = 5,
    ranks: bool | list = False,
    ids: list | None = None,
    id_dtype: torch.dtype = torch.int32,
    sizes: list | None = None,
    layout: str | dict = "dense",
    device: str = "cpu",
    poison: bool = True,
    seed: int = 0,
) -> Case:
    """A case of one form. poison: NaN in slots no row uses, in rank tails and in x rows without an adapter.

    layout: one for x, a, b and base, or a dict with one for each ("dense" where it has none).
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(bound, *shape):
        return torch.randint(-bound, bound + 1, shape, generator=generator).to(dtype)

    half = dtype == torch.float16
    x_bound, b_bound, y_bound = (16, 1, 128) if half else (8, 4, 16)
    x_groups, a_groups, b_groups = ({"G": groups}.get(g, g) for g in FORMS[form])
    if b_groups == "slices":
        sizes = sizes or [40, 8, 130][: max(groups, 2)]
        groups = len(sizes)
        x_groups, a_groups = (groups if g else 0 for g in (x_groups, a_groups))
        b_shape, y_shape = (slots, sum(sizes), rank), (tokens, sum(sizes))
    else:
        sizes = None
        b_shape = (slots, *((b_groups,) if b_groups else ()), out, rank)
        y_shape = (tokens, *((b_groups,) if b_groups else ()), out)
    x = integers(x_bound, tokens, *((x_groups,) if x_groups else ()), features)
    a = integers(x_bound, slots, *((a_groups,) if a_groups else ()), rank, features)
    b = integers(b_bound, *b_shape)
    base, grad_y = integers(100, *y_shape), integers(y_bound, *y_shape)
    if ids is None:
        ids_t = torch.randint(-1, slots, (tokens,), generator=generator)
    else:
        ids_t = torch.tensor(ids)
    scalings = torch.tensor(SCALINGS).repeat(-(-slots // len(SCALINGS)))[:slots]
    if ranks is True:
        ranks_t = torch.randint(0, rank + 1, (slots,), generator=generator)
        ranks_t[0] = rank
    else:
        ranks_t = None if ranks is False else torch.tensor(ranks)
    if poison:
        x[(ids_t < 0) | (ids_t >= slots)] = NAN
        used = set(ids_t.tolist())
        for slot in range(slots):
            if slot not in used:
                a[slot], b[slot], scalings[slot] = NAN, float("inf"), NAN
            elif ranks_t is not None:
                a[slot, ..., int(ranks_t[slot]) :, :] = NAN
                b[slot, ..., int(ranks_t[slot]) :] = NAN
    layouts = layout if isinstance(layout, dict) else dict.fromkeys(("x", "a", "b", "base", "grad_y"), layout)
    at = {n: place(t, layouts.get(n, "dense"), device) for n, t in dict(x=x, a=a, b=b, base=base, grad_y=grad_y).items()}
    ids_t = ids_t.to(device, id_dtype)
    if layouts.get("ids") == "rows":
        ids_t = ids_t.new_full((3 * tokens,), 99)[1::3].copy_(ids_t)
    return Case(
        **at,
        ids=ids_t,
        scalings=scalings.to(device),
        out_sizes=sizes,
        ranks=None if ranks_t is None else ranks_t.to(device, torch.int32),
    )


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 result that is exact in float32, rounded once to dtype."""
    finite = exact[exact.isfinite()]
    assert finite.numel() == 0 or float(finite.abs().max()) < 2**23, "the case leaves the range where sums are exact"
    assert torch.equal(finite.float().double(), finite), "the case is not exact in float32"
    return exact.float().to(dtype)


def want_delta(c: Case, base: bool = True) -> Tensor:
    w = c.wide()
    return rounded(reference.delta(*w.factors, base=w.base if base else None, **w.kw), c.x.dtype)


def want_shrink(c: Case) -> Tensor:
    w = c.wide()
    return rounded(reference.shrink(w.x, w.a, w.ids, ranks=w.ranks), torch.float32)


def want_grads(c: Case) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dA, dB of delta."""
    w = c.wide()
    grads = reference.delta_backward(w.grad_y, *w.factors, w.out_sizes, w.ranks, None, [True] * 3)
    return tuple(rounded(g, c.x.dtype) for g in grads)


def bits(t: Tensor) -> Tensor:
    """The bit patterns: tells −0.0 from 0.0 and compares NaN with NaN."""
    return t.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_equal(got: Tensor, want: Tensor, what: str = "") -> None:
    """Equal values, dtype and shape; says where they differ."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (what, got.dtype, got.shape, want.dtype, want.shape)
    if not torch.equal(got, want):
        wrong = ~((got == want) | (got.isnan() & want.isnan()))
        first = wrong.nonzero()[0].tolist() if wrong.any() else "NaN"
        at = tuple(first) if wrong.any() else ()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {got.numel()} differ, the first at {first}: "
            f"{got[at] if at else got}, not {want[at] if at else want}"
        )


def assert_bits(got: Tensor, want: Tensor, what: str = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    assert torch.equal(bits(got), bits(want)), what


class AsTraced(TorchDispatchMode):
    """Every op of ours, backwards too, returns what its fake says: shapes, dtypes and strides. Inductor believes the fake and
    stops where they differ; opcheck looks at the forward's strides alone."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "grouped_lora":
            mode = FakeTensorMode()
            fakes = pytree.tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t.detach()), (args, kwargs or {}))
            with mode, torch.no_grad():
                told = pytree.tree_leaves(func(*fakes[0], **fakes[1]))
            for i, (real, fake) in enumerate(zip(pytree.tree_leaves(result), told, strict=True)):
                assert form(real) == form(fake), (func, i)
            self.seen.add(func._schema.name.removeprefix("grouped_lora::"))
        return result


def form(t: Tensor) -> tuple:
    """Shape, dtype, and the strides that an element's place depends on."""
    strides = [s for s, n in zip(t.stride(), t.shape) if n > 1] if t.numel() else None
    return list(t.shape), t.dtype, strides
