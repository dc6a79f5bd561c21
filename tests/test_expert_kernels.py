"""Our expert kernels against the reference, exactly: small integers leave one right answer, whatever the order of the sums."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from cases import DTYPES, NAN, assert_bits, assert_equal, place, rounded
from conftest import GPU, poisoned
from torch import Tensor

from grouped_lora_ops import launch_experts, reference
from grouped_lora_ops.kernels import expert_tile
from grouped_lora_ops.ops import common, prepared

DEVICE = "cuda" if GPU else "cpu"
thorough = pytest.mark.thorough
on_both = pytest.mark.gpu if GPU else lambda test: test  # on a GPU, too
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
FORMS = ("whole", "an A each", "halves of B")  # of A and B: one pair; gate and up with an A each; B's halves an axis


def kernels(name):
    """A function of ops/expert_cuda.py, on poisoned memory."""
    run = getattr(importlib.import_module("grouped_lora_ops.ops.expert_cuda"), name)

    def call(*args, **kw):
        with poisoned():
            return run(*args, **kw)

    return call


@pytest.fixture(autouse=True)
def two_bf16(monkeypatch):
    """In the interpreter, too, dA and dB of ranks of whole vectors have their narrow operand in two bf16, as on sm_90."""
    if not GPU:
        monkeypatch.setattr(launch_experts, "wgrad_takes_halves", lambda arch: True)


@pytest.fixture
def force(monkeypatch):
    """force("plan fused") makes the launch choice at sizes that would choose otherwise.

    plan: tiles come from a plan at any number of routes. fused, split, whole: delta in one launch, or two with the sum
    over D cut or not. apart: gate and up are programs of their own. tall: plan tiles of 64 routes, kernels of 32, several blocks of N
    a program. ahead: A is called into the L2 before the plan is read. mixed: base and delta over tiles of an expert, whatever the
    slots; without it (and with a plan) over the plan's tiles. together: routes of a pair share tiles without a plan, at any number of
    routes.
    """

    def apply(how: str):
        words = how.split()
        common.configured.cache_clear()
        prepared.forget()
        if "plan" in words:
            monkeypatch.setattr(launch_experts, "ROUTE_LIMIT", 0)
        monkeypatch.setattr(launch_experts, "LONE_ROUTES", 0 if "together" in words else 64)
        tall = "tall" in words
        if tall:
            monkeypatch.setattr(launch_experts, "plan_rows", lambda *sizes: 64)
        m, loop = (32, 4) if tall else (16, 1)

        def shrink(p, may_split=True):
            more = dict(ahead=128 if "ahead" in words else 0)
            return launch_experts.shrink_with(p, m, split=may_split and "split" in words, block_c=16 if "split" in words else 64, **more)

        def expand(p):
            return launch_experts.expand_with(p, m, block_n=32, loop=loop)

        def delta(p):
            if "fused" in words:
                more = dict(apart="apart" in words, pdl=launch_experts.has_pdl(p.arch), ahead=128 if "ahead" in words else 0)
                return launch_experts.ExpertDeltaConfig(launch_experts.fused_with(p, m, block_n=32, **more), None, None)
            return launch_experts.ExpertDeltaConfig(None, shrink(p), expand(p))

        def linear(p, transposed=False):
            if "mixed" in words:
                return launch_experts.linear_with(p, 16, True, block_n=32, block_k=64)
            return launch_experts._linear(p, launch_experts.rows_each(p), transposed, False)

        def gate_up(p):
            return linear(p) if "mixed" in words else launch_experts._gate_up(p, launch_experts.rows_each(p), False)

        if "plan" in words:
            for name, choice in (("linear", linear), ("gate_up", gate_up)):
                monkeypatch.setattr(launch_experts, name, choice)
        if len(words) > ("plan" in words):
            for name, choice in (("shrink", shrink), ("expand", expand), ("delta", delta)):
                monkeypatch.setattr(launch_experts, name, choice)

    return apply


@dataclass
class Case:
    x: Tensor
    a: Tensor
    b: Tensor
    ids: Tensor
    adapters: Tensor | None
    scalings: Tensor
    base: Tensor | None
    weights: Tensor | None
    ranks: Tensor | None
    grad: Tensor
    w: Tensor
    bias: Tensor | None

    def args(self):
        return self.x, self.a, self.b, self.ids, self.adapters, self.scalings

    def wide(self):
        names = ("x", "a", "b", "base", "weights", "grad", "w", "bias")
        values = {n: None if getattr(self, n) is None else getattr(self, n).double() for n in names}
        return replace(self, **values)


def build(
    dtype=torch.bfloat16, form="whole", *, tokens=5, top_k=2, experts=4, slots=2, features=300, out=72, rank=5,
    shared="", per_route=False, adapters=True, base=True, weights=False, ranks=False, layout="dense", ids=None, id_dtype=torch.int32,
    poison=True, seed=0, halves="",
    bias=False,
):  # fmt: skip
    """adapters: random ones, these, or none named. shared: "a" and "b" name factors that all experts share; halves: "w" and "b"
    name weight and bias where they have an axis of halves. poison: NaN in what no route may read."""
    generator = torch.Generator().manual_seed(seed)

    def integers(bound, *shape):
        return torch.randint(-bound, bound + 1, shape, generator=generator).to(dtype)

    half = dtype == torch.float16
    routes, m = tokens * top_k, 2 if half else 6
    x = integers(m, routes if per_route else tokens, features)
    ea, eb = (1 if which in shared else experts for which in "ab")
    a = integers(2 if half else 4, slots, ea, *((2,) if form == "an A each" else ()), rank, features)
    b = integers(1 if half else 3, slots, eb, *((2, out // 2) if form == "halves of B" else (out,)), rank)
    ids_t = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator) if ids is None else torch.tensor(ids)
    adapters_t = torch.randint(-1, slots, (tokens,), generator=generator) if adapters else None
    if isinstance(adapters, list):
        adapters_t = torch.tensor(adapters)
    scalings = torch.tensor([1.0, 0.5, -2.0])[:slots]
    weights_t = torch.tensor([1.0, -0.5, 2.0]).repeat(routes)[:routes] if weights else None
    ranks_t = torch.tensor([rank, rank // 2, 1][:slots], dtype=torch.int32) if ranks else None
    base_t = integers(50, routes, out) if base else None
    grad = integers(4, routes, out)
    w = integers(2 if half else 3, experts, *((2, out // 2) if "w" in halves else (out,)), features)
    bias_t = integers(9, experts, *((2, out // 2) if "b" in halves else (out,))) if bias else None
    if poison:
        flat = ids_t.flatten()
        slot_of = torch.zeros(routes, dtype=torch.long) if adapters_t is None else adapters_t.repeat_interleave(top_k)
        live = (flat >= 0) & (flat < experts) & (slot_of >= 0) & (slot_of < slots)
        read = live if base else (flat >= 0) & (flat < experts)  # a base product reads x without an adapter, too
        if per_route:
            x[~read] = NAN
        else:
            x[~read.view(tokens, top_k).any(1)] = NAN
        grad[~read] = NAN
        routed = (flat >= 0) & (flat < experts)
        if weights_t is not None:
            weights_t[~live if base else ~routed] = NAN
        for e in range(experts):
            if e not in flat.tolist():
                w[e] = NAN
                if bias:
                    bias_t[e] = NAN
        used = {(int(slot_of[i]), int(flat[i])) for i in live.nonzero()[:, 0]}
        for slot in range(slots):
            for t, e_count in ((a, ea), (b, eb)):
                for e in range(e_count):
                    if not any(s == slot and (e_count == 1 or k == e) for s, k in used):
                        t[slot, e] = NAN
            if not any(s == slot for s, _ in used):
                scalings[slot] = NAN
            if ranks_t is not None:
                a[slot, ..., int(ranks_t[slot]) :, :] = NAN
                b[slot, ..., int(ranks_t[slot]) :] = NAN
    at = {n: None if t is None else place(t, layout, DEVICE) for n, t in dict(x=x, a=a, b=b, base=base_t, grad=grad, w=w, bias=bias_t).items()}
    moved = {n: None if t is None else t.to(DEVICE) for n, t in dict(scalings=scalings, weights=weights_t, ranks=ranks_t).items()}
    return Case(
        **at, **moved, ids=ids_t.to(DEVICE, id_dtype), adapters=None if adapters_t is None else adapters_t.to(DEVICE, id_dtype)
    )


def want_delta(c):
    w = c.wide()
    return rounded(reference.expert_delta(*w.args(), base=w.base, row_weights=w.weights, ranks=w.ranks), c.x.dtype)


def check_delta(c, what="", plan=None):
    want = want_delta(c)
    got = kernels("delta")(*c.args(), c.base, c.weights, c.ranks, plan)
    assert_equal(got, want, what)
    return got


@on_both
@pytest.mark.parametrize("how", ["split", "plan split", "plan fused", "plan fused apart ahead", "plan whole tall", "plan fused tall"])
@pytest.mark.parametrize("form", FORMS)
def test_delta(force, form, how):
    force(how)
    for dtype in (torch.bfloat16, torch.float32)[: 2 if form == "an A each" else 1]:
        check_delta(build(dtype, form, ranks=True, weights=True, tokens=9 if "tall" in how else 5), f"{dtype}")


def crowded_ids(tokens, top_k, experts=4):
    """Columns of one expert each, but for every fifth token's, which are random, and every seventh token's, which are masked."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.arange(top_k).expand(tokens, top_k) % experts
    ids = torch.where((torch.arange(tokens) % 5 == 4)[:, None], torch.randint(0, experts, ids.shape, generator=generator), ids)
    return torch.where((torch.arange(tokens) % 7 == 6)[:, None], -1, ids).tolist()


@on_both
@pytest.mark.parametrize("form", FORMS)
def test_routes_of_a_pair_share_tiles(force, form):
    """Without a plan, too: those of 16 tokens that have the same k."""
    for tokens, top_k, how, per_route in ((19, 1, "together split", False), (17, 2, "together whole", True), (5, 3, "together split", False)):
        force(how)
        sizes = dict(tokens=tokens, top_k=top_k, features=72, out=40)
        c = build(form=form, ids=crowded_ids(tokens, top_k), per_route=per_route, ranks=True, weights=True, **sizes)
        check_delta(c, how)
        got = kernels("linear")(c.x, c.w, None, None, c.ids, None, None, None, None, None, None)
        force("split")
        assert_bits(got, kernels("linear")(c.x, c.w, None, None, c.ids, None, None, None, None, None, None), how)


@on_both
@pytest.mark.parametrize("how", ["split", "plan whole tall"])
def test_a_shared_tile_changes_no_bit(force, monkeypatch, how):
    """Neither routes that share one without a plan nor parts of one that programs share."""
    c = build(tokens=18, ids=crowded_ids(18, 2), features=72, out=70, poison=False, ranks=True)
    generator = torch.Generator().manual_seed(0)
    for t in (c.x, c.a, c.b):
        t.copy_(torch.randn(t.shape, generator=generator).to(t.dtype))
    force(how)
    monkeypatch.setattr(launch_experts, "SHARE_PROGRAMS", 0)
    alone = kernels("delta")(*c.args(), c.base, None, c.ranks, None)
    force(f"{how} together")
    monkeypatch.setattr(launch_experts, "SHARE_PROGRAMS", 100)
    assert_bits(kernels("delta")(*c.args(), c.base, None, c.ranks, None), alone)


@triton.jit
def parts_kernel(out, ids, adapters, plan, M, K, E, L, TILES, shares, MODE: tl.constexpr, PLAN_ROWS: tl.constexpr):
    """out [programs, 20]: expert, slot, part, parts and the 16 rows of a program's tile, −1 where none is inside."""
    expert, slot, rows, inside, part, parts = expert_tile.shared_tile(
        tl.program_id(0), shares, ids, adapters, plan, M, K, E, L, TILES, K, 1, 1, MODE, 16, PLAN_ROWS
    )
    line = out + tl.program_id(0) * 20
    tl.store(line, expert)
    tl.store(line + 1, slot)
    tl.store(line + 2, part)
    tl.store(line + 3, parts)
    tl.store(line + 4 + tl.arange(0, 16), tl.where(inside, rows, -1))


def tiles_of(ids, adapters, experts, slots, programs, shares=0, plan=None, tokens=16):
    """What `parts_kernel` writes; behind a plan lie numbers that could be one's."""
    out = torch.full((programs, 20), -7, dtype=torch.int32, device=DEVICE)
    mode, height = launch_experts.ROUTE, tokens
    if plan is not None:
        mode, height = launch_experts.PLAN, launch_experts.plan_rows(ids.numel(), experts, slots)
        plan = torch.cat([plan, torch.zeros(4 * programs, dtype=torch.int32, device=DEVICE)])[: len(plan)]
    room = launch_experts.plan_room(ids.numel(), experts, slots)
    parts_kernel[(programs,)](out, ids, adapters, plan, ids.numel(), ids.shape[1], experts, slots, room, shares, mode, height)
    return out.tolist()


@on_both
@pytest.mark.parametrize("tokens,top_k", [(1, 3), (16, 1), (40, 2), (33, 3)])
def test_each_route_is_in_one_tile_and_each_part_is_one_programs(tokens, top_k):
    """As programs find tiles without a plan: of the same pair, k and 16 tokens; and with one, of which fewer occur than could."""
    ids = torch.tensor(crowded_ids(tokens, top_k), dtype=torch.int32, device=DEVICE)
    if tokens == 16:
        ids.fill_(2)  # a full tile
    adapters = (torch.arange(tokens, device=DEVICE) % (11 if tokens != 16 else 1) == 0).to(torch.int32) - 1  # none, or the first
    plan = reference.expert_plan(ids.cpu(), adapters.cpu(), 4, 1).to(DEVICE)
    for shares in (None, 0, 5, 200):
        most = launch_experts.plan_tiles(ids.numel(), 4, 1) * launch_experts.plan_rows(ids.numel(), 4, 1) // 16
        programs = ids.numel() if shares is None else max(most, shares)
        found = {}
        lines = tiles_of(ids, adapters, 4, 1, programs, shares or 0, None if shares is None else plan)
        for number, (expert, slot, part, parts, *rows) in enumerate(lines):
            if expert > 4 or part >= parts:
                continue
            rows = tuple(r for r in rows if r >= 0)
            slots = {int(adapters[r // top_k]) % 2 for r in rows}
            assert {int(ids.flatten()[r]) % 5 for r in rows} == {expert} and (slots == {slot} or (expert == 4 and shares is not None))
            if shares is None:
                assert {(r // top_k // 16, r % top_k) for r in rows} == {(number // top_k // 16, number % top_k)}
                assert parts == len(rows)
            assert part not in found.setdefault(rows, {}), "two programs have one part"
            found[rows][part] = parts
        assert sorted(r for rows in found for r in rows) == list(range(ids.numel()))
        for taken in found.values():
            assert sorted(taken) == list(range(next(iter(taken.values())))), "a part is nobody's"
        assert shares != 200 or min(map(len, found.values())) > 1
    assert all(parts == 1 and rows[0] == n for n, (_, _, _, parts, *rows) in enumerate(tiles_of(ids, adapters, 4, 1, ids.numel(), 0, None, 1)))


@triton.jit
def lines_kernel(out, ids, adapters, M, K, E, L, D, a_l, a_e, a_r, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """out [programs, 1 + ROWS · BYTES // 128]: whether a program calls, and its offsets."""
    rows = tl.arange(0, ROWS) * a_r
    tile = tl.program_id(0)
    offsets, there = expert_tile.lines_of_a(
        tile, tl.num_programs(0), rows, ids, adapters, M, K, E, L, D, K, 1, 1, a_l, a_e, 2, BYTES
    )
    LINES: tl.constexpr = BYTES // 128
    line = out + tile * (1 + ROWS * LINES)
    tl.store(line, there.to(tl.int64))
    tl.store(line + 1 + tl.arange(0, ROWS)[:, None] * LINES + tl.arange(0, LINES)[None, :], offsets)


@on_both
@pytest.mark.parametrize("programs", [1, 5, 66, 80])
def test_lines_that_are_called_ahead_are_of_a_routes_factor(programs):
    """Of routes from one end to the other, never outside A's rows, whatever the ids say."""
    experts, slots, rank, features = 4, 2, 8, 40
    ids = torch.tensor(crowded_ids(34, 2), dtype=torch.int32, device=DEVICE)  # the last token is nobody's
    ids[3], ids[4], ids[33] = torch.tensor([2**31 - 1, 4]), torch.tensor([-(2**31), -7]), torch.tensor([1, 1])
    adapters = torch.arange(34, dtype=torch.int32, device=DEVICE) % 3 - 1
    adapters[33] = 0
    out = torch.full((programs, 1 + rank * 2), -7, dtype=torch.int64, device=DEVICE)
    size = rank * features
    lines_kernel[(programs,)](out, ids, adapters, 66, 2, experts, slots, features, experts * size, size, features, rank, 256)
    taken = set()
    for tile, (there, *offsets) in enumerate(out.tolist()):
        m = tile * max(66 // programs, 1)
        expert, slot = (int(ids.flatten()[m]), int(adapters[m // 2])) if m < 66 else (-1, -1)
        assert there == (0 <= expert < experts and 0 <= slot < slots)
        if there:
            begin = (slot * experts + expert) * size
            assert offsets == [begin + r * features + d for r in range(rank) for d in (0, features - 1)]
            taken.add(m)
    assert programs == 1 or max(taken) >= (60 if programs >= 66 else 1)


@pytest.mark.skipif(GPU, reason="records what the interpreter would call")
@pytest.mark.parametrize("layout", ["dense", "transposed", "rows"])
@pytest.mark.parametrize("how", ["plan fused ahead", "plan fused apart ahead", "plan whole ahead"])
def test_what_is_called_ahead_is_a(force, monkeypatch, how, layout):
    """Addresses of A's rows alone, of gate's and up's, of pairs that routes have; none where A's rows do not lie along D."""
    called = []
    monkeypatch.setattr(expert_tile, "prefetch", lambda pointers: called.extend(pointers.handle.data.flatten().tolist()))
    force(how)
    adapters = [0, 1, -1, 1, 0, 0, 1, 0, 1]
    c = build(form="an A each", rank=5, features=96, tokens=9, layout=layout, adapters=adapters)
    check_delta(c)
    if layout == "transposed":
        assert not called
        return
    at = {}
    for index in torch.cartesian_prod(*(torch.arange(n) for n in c.a.shape[:4])).tolist():
        begin = c.a.data_ptr() + 2 * sum(i * s for i, s in zip(index, c.a.stride()))
        at[begin] = tuple(index[:3])
    assert called and set(called) <= set(at), "something else is called"
    ids, adapters = c.ids.flatten().tolist(), c.adapters.repeat_interleave(2).tolist()
    pairs = {(s, e) for s, e in zip(adapters, ids) if 0 <= s < 2 and 0 <= e < 4}
    assert {at[p][:2] for p in called} <= pairs
    for slot, expert in {at[p][:2] for p in called}:
        assert {p for p, (s, e, _) in at.items() if (s, e) == (slot, expert)} <= set(called), "not all of its rows"


@pytest.mark.parametrize("pdl", [False, True])
def test_who_starts_early_waits(monkeypatch, pdl):
    """The attribute of the launch and the wait inside come from one switch."""
    module = importlib.import_module("grouped_lora_ops.kernels.expert_delta")
    seen = []
    monkeypatch.setattr(module, "launch", lambda name, kernel, grid, args, constants, *options: seen.append((kernel, constants, options)))
    p = launch_experts.ExpertProblem("sm_90", 132, 2, 256, 4, 2, 1, 1, 64, 72, 8, True)
    config = launch_experts.fused_with(p, 16, pdl=pdl)
    c = build(tokens=128, features=64, rank=8, poison=False)
    monkeypatch.setattr(launch_experts, "delta", lambda p: launch_experts.ExpertDeltaConfig(config, None, None))
    common.configured.cache_clear()
    importlib.import_module("grouped_lora_ops.ops.expert_cuda").delta(*c.args(), c.base, None, None, None)
    common.configured.cache_clear()
    ((kernel, constants, (_, _, early)),) = seen
    names = kernel.arg_names if hasattr(kernel, "arg_names") else list(kernel.signature.parameters)
    assert early == pdl == dict(zip(names[-len(constants) :], constants))["PDL"]


@on_both
def test_a_damaged_plan_leads_no_program_elsewhere():
    """Whatever a plan says, rows are routes and experts are experts, or the tile is empty."""
    ids = torch.tensor(crowded_ids(40, 2), dtype=torch.int32, device=DEVICE)
    adapters = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    good = reference.expert_plan(ids.cpu(), adapters.cpu(), 4, 1)
    for round_ in range(12):
        wild = torch.randint(-(2**31), 2**31, good.shape, generator=generator) >> (round_ * 2)  # ever smaller
        plan = torch.where(torch.rand(good.shape, generator=generator) < 0.4, wild, good).to(torch.int32)
        for expert, slot, part, parts, *rows in tiles_of(ids, adapters, 4, 1, 40, (0, 5, 40)[round_ % 3], plan.to(DEVICE)):
            assert all(-1 <= r < 80 for r in rows) and expert >= 0 and (expert > 4 or 0 <= slot <= 1) and parts >= 1 and part >= 0


@pytest.mark.parametrize("shared", ["a", "b", "ab"])
@pytest.mark.parametrize("per_route", [False, True])
def test_shared_factors(force, shared, per_route):
    """An A that all experts share and an x per token: h is made once per token."""
    for how, form in (("split", "whole"), ("plan fused", "an A each")):
        force(how)
        experts = 1 if shared == "ab" else 4
        check_delta(build(form=form, shared=shared, per_route=per_route, experts=experts, ranks=True, tokens=4), how)


@dtypes
def test_dtypes_and_options(dtype):
    for base, weights, adapters, per_route in ((True, False, False, False), (False, True, True, True), (False, False, True, False)):
        check_delta(build(dtype, base=base, weights=weights, adapters=adapters, per_route=per_route))


@pytest.mark.parametrize("layout", ["odd", "transposed", "rows", "scattered"])
def test_layouts(force, layout):
    for how in ("split", "plan fused", "plan fused apart ahead", "plan whole tall ahead"):
        force(how)
        for form in FORMS[:2]:
            check_delta(build(form=form, rank=8, features=72, ranks=True, layout=layout), f"{layout} {how}")


@on_both
@pytest.mark.parametrize("rank", [1, 8, 33, 130])
def test_ranks(force, rank):
    """8: slots whose rank is whole vectors of B and ones whose is not, and N whole blocks or not."""
    for how in ("split", "plan whole tall", *(["plan fused apart ahead", "plan fused tall"] if rank < 130 else [])):
        for out in (72, 64) if rank == 8 else (72,):
            force(how)
            check_delta(build(form="an A each", rank=rank, features=64, out=out, ranks=True), f"{how} {out}")


def test_ids_out_of_range_are_masked():
    wild = 2**31 - 1
    for how in (0, 1):
        ids = [[0, wild], [-5, 1], [-wild, 3], [4, 2]]
        check_delta(build(tokens=4, ids=ids, id_dtype=torch.int64 if how else torch.int32))


@pytest.mark.parametrize("how", ["", "plan", "plan fused"])
def test_nothing_routed_keeps_bases_bits(force, how):
    force(how)
    for base in (True, False):
        c = build(tokens=3, ids=[[-1, 4]] * 3, base=base)
        if base:
            c.base[0, :3] = torch.tensor([-0.0, NAN, float("inf")])
        got = kernels("delta")(*c.args(), c.base, None, None, None)
        assert_bits(got, c.base if base else torch.zeros_like(got))


@pytest.mark.parametrize("sizes", [dict(tokens=0), dict(top_k=0), dict(rank=0), dict(features=0), dict(out=0)], ids=str)
def test_empty_sizes(sizes):
    check_delta(build(poison=False, **sizes))


@on_both
@dtypes
def test_a_zero_delta_keeps_bases_bits(force, dtype):
    """Also of a NaN that is not the one that arithmetic makes."""
    for how in ("split", "plan fused", "plan fused tall", "plan whole tall"):
        force(how)
        c = build(dtype, poison=False)
        c.b.zero_()
        c.base[:, 0] = -0.0
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        c.base[:, 1:3] = NAN
        c.base.view(bits)[:, 1] += 5
        assert_bits(kernels("delta")(*c.args(), c.base, None, None, None), c.base, how)


def test_a_given_plan_is_read(force):
    force("plan")
    c = build(tokens=9)
    check_delta(c, plan=reference.expert_plan(c.ids.cpu(), c.adapters.cpu(), 4, 2).to(DEVICE))
    damaged = torch.full_like(reference.expert_plan(c.ids.cpu(), c.adapters.cpu(), 4, 2), 2**30).to(DEVICE)
    kernels("delta")(*c.args(), c.base, None, None, damaged)  # nothing is read out of bounds


# --- expert_linear ---


def linear_case(dtype=torch.bfloat16, form="whole", **kw):
    return build(dtype, form, base=False, **kw)


def check_linear(c, what="", lora=True, plan=None):
    w = c.wide()
    a, b = (w.a, w.b) if lora else (None, None)
    exact = reference.expert_linear(w.x, w.w, a, b, *w.args()[3:], bias=w.bias, row_weights=w.weights, ranks=w.ranks)
    a, b = (c.a, c.b) if lora else (None, None)
    got = kernels("linear")(c.x, c.w, a, b, *c.args()[3:], c.bias, c.weights, c.ranks, plan)
    assert_equal(got, rounded(exact, c.x.dtype), what)
    return got


@pytest.mark.parametrize("how", ["split", "plan whole tall"])
@pytest.mark.parametrize("form", FORMS)
def test_linear(force, form, how):
    force(how)
    for dtype in (torch.bfloat16, torch.float32)[: 2 if form == "whole" else 1]:
        check_linear(linear_case(dtype, form, ranks=True, weights=True, bias=True), f"{dtype}")


@dtypes
def test_linear_forms(dtype):
    for i, halves in enumerate(("wb", "", "w", "b")[: 4 if dtype == torch.bfloat16 else 1]):
        check_linear(linear_case(dtype, FORMS[i % 3], halves=halves, bias=i != 1, per_route=i % 2 == 1, tokens=3), halves)
        check_linear(linear_case(dtype, halves=halves, bias=i != 1, weights=True, tokens=3), f"no LoRA {halves}", lora=False)


@pytest.mark.parametrize("shared", ["a", "b", "ab"])
def test_linear_shared_factors(force, shared):
    for how in ("split", "plan whole"):
        force(how)
        check_linear(linear_case(form="an A each", shared=shared, ranks=True), how)


@pytest.mark.parametrize("layout", ["odd", "transposed", "rows", "scattered"])
def test_linear_layouts(layout):
    check_linear(linear_case(rank=8, features=72, layout=layout, bias=True))


def test_linear_zero_adapters_change_no_bit(force):
    """B = 0, adapter −1 and no LoRA at all: one code path, one result."""
    for how in ("split", "plan whole"):
        force(how)
        generator = torch.Generator().manual_seed(0)
        c = linear_case(poison=False, bias=True, weights=True, per_route=True)
        c.x, c.w = (torch.randn(t.shape, generator=generator).to(DEVICE, t.dtype) for t in (c.x, c.w))
        run = kernels("linear")
        parent = run(c.x, c.w, None, None, c.ids, None, None, c.bias, c.weights, None, None)
        zero = run(c.x, c.w, c.a, torch.zeros_like(c.b), c.ids, c.adapters, c.scalings, c.bias, c.weights, None, None)
        without = run(c.x, c.w, c.a, c.b, c.ids, torch.full_like(c.adapters, -1), c.scalings, c.bias, c.weights, None, None)
        assert_bits(zero, parent, how)
        assert_bits(without, parent, how)


# --- gradients ---

DELTA_ARGUMENTS = ("x", "lora_a", "lora_b", "row_weights")
LINEAR_ARGUMENTS = ("x", "weight", "lora_a", "lora_b", "bias", "row_weights")


def compare(names, needs, got, exact, inputs, what):
    """Each wanted gradient rounded once to its argument's dtype; nothing for the others."""
    for name, need, g, e, t in zip(names, needs, got, exact, inputs):
        if need:
            assert_equal(g, rounded(e, t.dtype), f"{name} {what}")
        else:
            assert g.numel() == 0, f"{name} {what}"


def gradient_case(dtype=torch.bfloat16, form="whole", **kw):
    """Sums of products stay exact: smaller numbers than the forward's."""
    c = build(dtype, form, **({"features": 72, "out": 40, "rank": 5} | kw))
    for name in ("x", "a", "b", "grad", "w"):
        t = getattr(c, name)
        setattr(c, name, place(torch.where(t.isnan(), t, t.sign() * (t.abs() > 1)), kw.get("layout", "dense"), DEVICE))
    return c


def check_delta_backward(c, what="", needs=None):
    w = c.wide()
    needs = needs or [True, True, True, c.weights is not None]
    exact = reference.expert_delta_backward(w.grad, *w.args(), w.weights, w.ranks, None, needs)
    got = kernels("delta_backward")(c.grad, *c.args(), c.weights, c.ranks, None, needs)
    compare(DELTA_ARGUMENTS, needs, got, exact, (c.x, c.a, c.b, c.weights), what)
    return got


def check_linear_backward(c, what="", needs=None, lora=True):
    w = c.wide()
    needs = needs or [True, True, lora, lora, c.bias is not None, c.weights is not None]
    a, b = (w.a, w.b) if lora else (None, None)
    exact = reference.expert_linear_backward(w.grad, w.x, w.w, a, b, *w.args()[3:], w.bias, w.weights, w.ranks, None, needs)
    a, b = (c.a, c.b) if lora else (None, None)
    got = kernels("linear_backward")(c.grad, c.x, c.w, a, b, *c.args()[3:], c.bias, c.weights, c.ranks, None, needs)
    compare(LINEAR_ARGUMENTS, needs, got, exact, (c.x, c.w, c.a, c.b, c.bias, c.weights), what)


@pytest.mark.parametrize("per_route", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_delta_backward(form, per_route):
    dtype = torch.float32 if per_route and form == "whole" else torch.bfloat16
    check_delta_backward(gradient_case(dtype, form, per_route=per_route, weights=form != "whole", ranks=True))


@pytest.mark.parametrize("shared", ["a", "b", "ab"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_shared_factors(form, shared):
    experts, per_route = 1 if shared == "ab" else 4, form == "an A each"
    check_delta_backward(gradient_case(form=form, shared=shared, per_route=per_route, experts=experts, weights=True, tokens=4))
    if form == "whole" and shared != "ab":
        check_delta_backward(gradient_case(shared=shared, per_route=True, weights=True, tokens=4))


@pytest.mark.parametrize("needs", [[True, False, False, False], [False, True, False, False], [False, False, True, False],
                                   [False, False, False, True]], ids=str)  # fmt: skip
def test_only_what_is_asked_for(needs):
    check_delta_backward(gradient_case(weights=True), needs=needs)


@pytest.mark.parametrize("per_route", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_linear_backward(form, per_route):
    dtype = torch.float32 if per_route and form == "whole" else torch.bfloat16
    options = dict(weights=True, bias=True) if form != "halves of B" else {}
    check_linear_backward(gradient_case(dtype, form, base=False, per_route=per_route, ranks=True, tokens=4, **options))


def test_linear_backward_forms():
    for i, halves in enumerate(("", "w", "b", "wb")):
        c = gradient_case(form=FORMS[i % 3], base=False, halves=halves, bias=True, weights=i == 3, tokens=3)
        check_linear_backward(c, halves, lora=i < 2)
    for shared in ("a", "b"):
        needs = [True, False, True, True, False, False]
        check_linear_backward(gradient_case(base=False, shared=shared), shared, needs)


@pytest.mark.parametrize("rank", [5, 8])
@pytest.mark.parametrize(
    "counts", [[3, 0, 5, 0], [0, 2, 0, 3], [0, 0, 0, 0], [60, 0, 3, 0], [3, 30, 49, 0], [20, 64, 20, 33], [3, 32, 3, 90]], ids=str
)
def test_pairs_without_routes_get_exact_zeros(counts, rank, monkeypatch):
    """And a pair with several runs is the sum of its parts: pairs of one run to several, from any tile of a window of two on."""
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: t.fill_(NAN) if (t := made(*a, **k)).is_floating_point() else t)
    monkeypatch.setattr(launch_experts, "wgrad", lambda *p, chosen=launch_experts.wgrad: replace(chosen(*p), run=2))
    ids = [[e] for e, count in enumerate(counts) for _ in range(count)] + [[-1]]
    c = gradient_case(tokens=len(ids), top_k=1, ids=ids, slots=1, adapters=False, features=40, out=24, rank=rank)
    _, da, db, _ = check_delta_backward(c)
    for e, count in enumerate(counts):
        if not count:
            assert_bits(da[0, e], torch.zeros_like(da[0, e]))
            assert_bits(db[0, e], torch.zeros_like(db[0, e]))


def test_a_plan_of_more_tiles_than_there_can_be(monkeypatch):
    """A damaged one: dA and its parts end where they end, in both kernels."""
    c = gradient_case(tokens=300, top_k=1, ids=[[0]] * 300, experts=1, slots=1, adapters=False, features=40, out=24, rank=8, poison=False)
    plan = reference.expert_plan(c.ids, None, 1, 1)
    room = launch_experts.plan_room(300, 1, 1)
    plan[301], plan[302 : 302 + room] = room, 0
    made = []
    empty = torch.empty

    def guarded(*args, **kw):
        t = empty(*args, **kw)
        if not t.is_floating_point():
            return t
        whole = empty(t.numel() + 40_000, **kw).fill_(7)
        made.append(whole[t.numel() :])
        return whole[: t.numel()].view(t.shape)

    monkeypatch.setattr(torch, "empty", guarded)
    for halves in (True, False):
        monkeypatch.setattr(launch_experts, "wgrad_takes_halves", lambda arch, halves=halves: halves)
        kernels("delta_backward")(c.grad, *c.args(), None, None, plan, [False, True, True, False])
    assert made and all(bool((rest == 7).all()) for rest in made)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_without_two_bf16(monkeypatch, form):
    """Ranks of whole vectors where the GPU's matrix unit does not read both operands from shared memory."""
    monkeypatch.setattr(launch_experts, "wgrad_takes_halves", lambda arch: False)
    check_delta_backward(gradient_case(form=form, rank=8, ranks=True))
    check_linear_backward(gradient_case(form=form, rank=8, base=False))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_whose_programs_take_several_blocks_in_turn(force, monkeypatch, form):
    """dx: blocks of N behind one h, or one of gate and one of up; dA and dB: blocks of W, the last turn shorter."""
    force("plan tall")
    turns = []

    def wgrad(*p, chosen=launch_experts.wgrad):
        turns.append(p)
        return replace(chosen(*p), block_w=32, loop=2)

    monkeypatch.setattr(launch_experts, "wgrad", wgrad)
    check_delta_backward(gradient_case(form=form, tokens=20, experts=2, features=152, out=152, weights=True, ranks=True))
    assert turns


@pytest.mark.parametrize("sizes", [dict(tokens=0), dict(top_k=0), dict(rank=0), dict(features=0), dict(out=0)], ids=str)
def test_gradients_of_empty_sizes(sizes):
    c = gradient_case(poison=False, weights=True, **sizes)
    got = kernels("delta_backward")(c.grad, *c.args(), c.weights, None, None, [True] * 4)
    for g, t in zip(got, (c.x, c.a, c.b, c.weights)):
        assert_bits(g, torch.zeros_like(t))


@pytest.mark.parametrize("layout", ["odd", "transposed", "scattered"])
def test_gradient_layouts(force, layout):
    for how in ("", "plan tall"):
        force(how)
        check_delta_backward(gradient_case(form="an A each", rank=8, out=48, ranks=True, layout=layout))
    check_linear_backward(gradient_case(rank=8, out=48, base=False, layout=layout, bias=True))


def test_a_broadcast_gradient():
    c = gradient_case(weights=True)
    c.grad = torch.ones((), dtype=c.x.dtype, device=DEVICE).expand(c.grad.shape)
    check_delta_backward(c)


def test_float32_master_copies():
    """Factors in float32 beside a bf16 x compute in bf16; their gradients are float32."""
    c = gradient_case()
    exact = reference.expert_delta_backward(*(c.wide().grad, *c.wide().args()), None, None, None, [True, True, True, False])
    c.a, c.b = c.a.float(), c.b.float()
    got = kernels("delta_backward")(c.grad, *c.args(), None, None, None, [True, True, True, False])
    for g, e, dtype in zip(got, exact, (torch.bfloat16, torch.float32, torch.float32)):
        assert_equal(g, rounded(e, dtype))
    want = rounded(reference.expert_delta(*c.wide().args()), torch.bfloat16)
    assert_equal(kernels("delta")(*c.args(), None, None, None, None), want)


@pytest.mark.gpu
def test_a_rows_bits_are_its_own():
    """Over T, place, plan and launch choice."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    tokens, top_k, experts, slots, rank = 3000, 4, 16, 3, 32
    x, a, b = randn(tokens, 2048), randn(slots, experts, 2, rank, 2048), randn(slots, experts, 1536, rank)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator, device="cuda")
    adapters = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda")
    scalings, base = torch.rand(slots, generator=generator, device="cuda"), randn(tokens * top_k, 1536)

    def run(rows):
        first = slice(rows.start * top_k, rows.stop * top_k)
        return kernels("delta")(x[rows], a, b, ids[rows], adapters[rows], scalings, base[first], None, None, None)

    batch = run(slice(0, tokens))
    for rows in (slice(1, 2), slice(299, 300), slice(0, 7), slice(0, 100), slice(0, 700), slice(5, 2000)):
        assert_bits(run(rows), batch[rows.start * top_k : rows.stop * top_k], str(rows))
