"""What linear's tests share: cases with a base weight, the right answers, and the ways to tile them."""

from __future__ import annotations

from dataclasses import replace

import torch
from cases import assert_equal, build, rounded

from grouped_lora_ops import launch, launch_experts, launch_linear, reference
from grouped_lora_ops.launch_linear import ROWS, SORTED, linear_with, scaled_with
from grouped_lora_ops.ops import common, linear_cuda, prepared

# How rows are tiled: as they come (in one tile or several), or sorted by slot, by a scan of the ids or from a plan.
WAYS = {
    "rows": lambda p: linear_with(p, ROWS, 64, block_n=32),
    "short rows": lambda p: linear_with(p, ROWS, 16, block_n=64, block_k=128, tile_group=2),
    "slots": lambda p: linear_with(p, launch.row_mode(p.tokens, p.slots), 16, block_n=32, tile_group=1),
    "sorted": lambda p: linear_with(p, SORTED, 16, block_n=64),
    "plan": lambda p: linear_with(p, launch.SINGLE if p.slots == 1 else launch.PLAN, 32),
}


# the same for e4m3 weights
SCALED_WAYS = {
    "rows": lambda p: scaled_with(p, ROWS, 64, block_n=32),
    "short rows": lambda p: scaled_with(p, ROWS, 16, block_n=64, tile_group=2),
    "slots": lambda p: scaled_with(p, launch.row_mode(p.tokens, p.slots), 16, block_n=32, tile_group=1),
    "sorted": lambda p: scaled_with(p, SORTED, 16, block_n=128, num_warps=8),
    "plan": lambda p: scaled_with(p, launch.SINGLE if p.slots == 1 else launch.PLAN, 32),
}


def tiling(monkeypatch, choice, ways):
    """tiling(…)("plan"): every product whose tiles launch_linear.<choice> chooses has those of ways["plan"] from here on."""

    def apply(way: str):
        common.configured.cache_clear()
        prepared.forget()

        def choose(p, transposed=False, fp16=False):
            config = ways[way](p)
            if config.shrink is None:  # no adapters: the same tiles, of rows as they come
                config = replace(config, mode=ROWS, tiles=launch.cdiv(p.tokens, config.block_m))
            return config

        monkeypatch.setattr(launch_linear, choice, choose)

    return apply


def cuda_choice(monkeypatch):
    """choose(True): csrc/linear.cu takes every product of 65 rows (a gradient of x: of 128; experts: with a plan) that it can, however
    few tiles that makes; choose(False): none. whole: the shrink is not split over D, and so writes h as csrc/linear.cu reads it (None:
    where T is odd).
    Returns what its launches have answered since."""
    chosen, product, answers = launch_linear.linear, linear_cuda.product, []

    def counted(*args):
        answers.append(product(*args))
        return answers[-1]

    def apply(on: bool, programs: int | None = None, columns: int = 256, whole: bool | None = False) -> list:
        def dense(p, transposed=False, fp16=False):
            config = chosen(p, transposed, fp16)
            small = chosen(replace(p, sms=1), transposed, fp16).cuda if on else None  # one multiprocessor is never too large
            found = None if small is None else replace(small, programs=programs or p.sms, columns=columns)
            if (p.tokens % 2 if whole is None else whole) and found is not None and config.shrink is not None:
                shrink = launch.shrink_with(p, 32, launch.rank_block(p.rank, 2), 128, 4, 3, split=False)
                config = replace(config, shrink=replace(shrink, pdl=config.pdl))
            return replace(config, cuda=found)

        def experts(p):
            return on and p.arch == "sm_90" and p.itemsize == 2 and launch_experts.needs_plan(p.routes)

        monkeypatch.setattr(launch_linear, "linear", dense)
        monkeypatch.setattr(launch_experts, "takes_cuda", experts)
        monkeypatch.setattr(linear_cuda, "product", counted)
        common.configured.cache_clear()
        prepared.forget()
        answers.clear()
        return answers

    return apply


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


# --- e4m3 weights with a scale for every block of 128 × 128 ---


def blocks_of(weight):
    return [*weight.shape[:-2], *[-(-n // 128) for n in weight.shape[-2:]]]


def spread(scale, weight):
    """scale for each element of weight, float64."""
    wide = scale.float().double().repeat_interleave(128, -1).repeat_interleave(128, -2)
    return wide[..., : weight.shape[-2], : weight.shape[-1]]


def in_bf16(weight, scale):
    """W of e8m0 scales beside bf16: the weight that such a call is compared with."""
    return (weight.double() * spread(scale, weight)).bfloat16()


def e4m3_like(t):
    """t, a view of a larger buffer or dense, in e4m3: its strides and what lies between its elements too."""
    whole = (t if t._base is None else t._base).to(torch.float8_e4m3fn)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def scaled_case(form="wo_a", dtype=torch.bfloat16, e8m0=False, **kw):
    """(case, e4m3 weight, scale, bias): integers that e4m3 holds, and powers of two."""
    c, weight, bias = case(form, dtype, **kw)
    generator = torch.Generator().manual_seed(11)
    scale = 2.0 ** torch.randint(-1, 2, blocks_of(weight), generator=generator).float()
    scale = scale.to(torch.float8_e8m0fnu) if e8m0 else scale
    return c, weight.to(torch.float8_e4m3fn), scale.to(weight.device), bias


def random_scaled(device, dtype=torch.bfloat16, tokens=40, features=300, out=200, integers=False, e8m0=False, **kw):
    """`random_case` with an e4m3 weight and scales that are no powers of two (e8m0: that are). integers: x and weight, and a
    delta of 0."""
    x, weight, a, b, ids, scalings, bias = random_case(device, dtype, tokens, features=features, out=out, **kw)
    g = torch.Generator().manual_seed(3)
    if integers:
        x, weight = (x * 4).round(), (weight * 4).round()
        b = b * 0
    scale = torch.rand(blocks_of(weight), generator=g).add_(0.1).to(device)
    if e8m0:
        scale = torch.randint(120, 132, blocks_of(weight), generator=g).to(device, torch.uint8).view(torch.float8_e8m0fnu)
    return x, weight.to(torch.float8_e4m3fn), scale, a, b, ids, scalings, bias


def check_scaled(kernels, c, weight, scale, bias=None, what="", plan=None):
    want = want_linear(c, weight.double() * spread(scale, weight), bias)
    kw = dict(weight_scale=scale)
    assert_equal(reference.linear(c.x, weight, *c.factors[1:], bias=bias, **c.kw, **kw), want, f"reference {what}")
    assert_equal(kernels.linear(*arguments(c, weight, bias, plan), scale), want, what)
