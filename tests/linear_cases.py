"""What linear's tests share: cases with a base weight, the right answers, and the ways to tile them."""

from __future__ import annotations

import torch
from cases import assert_equal, build, rounded

from grouped_lora_ops import launch, reference
from grouped_lora_ops.launch_linear import ROWS, SORTED, linear_with

# How rows are tiled: as they come (in one tile or several), or sorted by slot, by a scan of the ids or from a plan.
WAYS = {
    "rows": lambda p: linear_with(p, ROWS, 64, block_n=32),
    "short rows": lambda p: linear_with(p, ROWS, 16, block_n=64, block_k=128, tile_group=2),
    "slots": lambda p: linear_with(p, launch.row_mode(p.tokens, p.slots), 16, block_n=32, tile_group=1),
    "sorted": lambda p: linear_with(p, SORTED, 16, block_n=64),
    "plan": lambda p: linear_with(p, launch.SINGLE if p.slots == 1 else launch.PLAN, 32),
}


def case(form="wo_a", dtype=torch.bfloat16, **kw):
    """(case, weight, bias): x is finite in all rows, for the base reads them."""
    c = build(form, dtype, **kw)
    generator = torch.Generator().manual_seed(7)

    def integers(bound, *shape):
        return torch.randint(-bound, bound + 1, shape, generator=generator).to(c.x.device, dtype)

    none = (c.ids < 0) | (c.ids >= c.a.shape[0])
    c.x[none] = integers(4, *c.x[none].shape)
    out = c.base.shape[1:]
    bound = 1 if dtype == torch.float16 else 4
    return c, integers(bound, *out, c.x.shape[-1]), integers(50, *out)


def arguments(c, weight, bias=None, plan=None):
    return (c.x, weight, c.a, c.b, c.ids, c.scalings, bias, c.out_sizes, c.ranks, plan)


def want_linear(c, weight, bias=None):
    w = c.wide()
    bias = None if bias is None else bias.double()
    return rounded(reference.linear(w.x, weight.double(), *w.factors[1:], bias=bias, **w.kw), c.x.dtype)


def want_grads(c, weight, bias):
    w = c.wide()
    args = (w.grad_y, w.x, weight.double(), *w.factors[1:], bias.double(), w.out_sizes, w.ranks, None, [True] * 5)
    return [rounded(g, c.x.dtype) for g in reference.linear_backward(*args)]


def check(kernels, c, weight, bias=None, what="", plan=None):
    want = want_linear(c, weight, bias)
    assert_equal(reference.linear(*c.factors[:1], weight, *c.factors[1:], bias=bias, **c.kw), want, f"reference {what}")
    assert_equal(kernels.linear(*arguments(c, weight, bias, plan)), want, what)


def random_case(device, dtype=torch.bfloat16, tokens=40, slots=3, groups=2, features=300, out=70, rank=12):
    g = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(size, generator=g).to(device, dtype)

    ids = (torch.arange(tokens) % (slots + 1) - 1).to(device)
    scalings = (torch.rand(slots, generator=g) + 0.5).to(device)
    x, weight, bias = randn(tokens, groups, features), randn(groups, out, features), randn(groups, out)
    return x, weight, randn(slots, rank, features), randn(slots, groups, out, rank), ids, scalings, bias


def leaves_of(c, weight, bias):
    return [t.detach().clone().requires_grad_() for t in (c.x, weight, c.a, c.b, bias)]


def call(leaves, c, plan=None, **kw):
    x, weight, a, b, bias = leaves
    return torch.ops.grouped_lora.linear(x, weight, a, b, c.ids, c.scalings, bias, c.out_sizes, c.ranks, plan, **kw)
