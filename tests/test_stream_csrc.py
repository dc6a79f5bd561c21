"""csrc/stream.cu on the CPU, a fiber a thread (hopper_on_cpu.h): exact for small integers, whatever runs first.

What ops/stream_cuda.py packs drives it; the rest is as in test_linear_csrc.py.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import random
import re
from dataclasses import replace

import pytest
import torch
from cases import FORMS, NAN, assert_equal, place
from linear_cases import blocks_of, case, scaled_case, spread, want_linear
from test_linear_csrc import BF16, ROOT, OnCpu, compiled, compiled_once, h_of, room_for

from grouped_lora_ops import driver, launch_linear
from grouped_lora_ops.launch import Problem
from grouped_lora_ops.launch_linear import KB, StreamConfig, stream_ranks
from grouped_lora_ops.ops import common, stream_cuda

linear_op = importlib.import_module("grouped_lora_ops.ops.linear")  # not the function

H_AT = 32  # place of h among the values of struct Params
SIZES = dict(tokens=20, slots=3, features=328, out=72, rank=16)
E8M0 = [False, True]  # scales of float32, of e8m0


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compiled_once(tmp_path_factory, "stream")


class StreamOnCpu(OnCpu):
    stem = "stream"

    def launch(self, function, grid, threads, layout, values, *, shared, pdl):
        name, most = function
        data, tensors = driver.pack(layout, values)
        h = values[H_AT]
        assert shared <= most == 227 * KB and grid[1:] == (1, 1)
        assert len(data) == 512 and (h is None or int.from_bytes(data[256:264], "little") == h.data_ptr())
        x = values[16]
        tiles, box = 1 + (x.shape[0] > 64), int.from_bytes(data[200:208], "little")  # rows of x's box
        assert box % 8 == 0 and 0 <= tiles * box - x.shape[0] < 8 * tiles, "more rows than there are cost time"
        ctypes.c_uint32.in_dll(self.library, "behind_any_kernel").value = h is None and pdl
        made = (
            h if h is not None else x if x.is_contiguous() else None
        )  # by the kernel ahead, which without LoRA is any one
        ahead = (0, 0) if made is None or not pdl else (made.data_ptr(), made.element_size() * made.numel())
        self.last, self.packed = name, (data, tensors)
        self.run(name, data, grid[0], threads, shared, ahead)


@pytest.fixture
def on_cpu(library, monkeypatch):
    made = StreamOnCpu(library, monkeypatch)
    yield made
    made.close()


def config(c, block_n=32, stages=3, x_stages=2, adapters=3, late=False, scale=None):
    rows = 16 if c.x.shape[0] <= 16 and block_n == 32 else 64
    stages += stages % 2 if scale is not None and rows == 64 else 0
    return StreamConfig(rows, block_n, stages, x_stages, adapters, True, late, scale is not None)


def run(on_cpu, c, weight, bias=None, lora=True, chunks=3, pdl=True, ranks=None, scale=None, **how):
    x = common.grouped(c.x, 3)
    weight, scales = linear_op._as_kernels_read(weight, scale, "sm_90")
    out, untouched = room_for(on_cpu, common.grouped(c.base, 3))
    sizes = None if c.out_sizes is None else tuple(c.out_sizes)
    b = h = None
    if lora:
        b = on_cpu.edge(common.grouped(c.b, 4)[:, None])
        h = on_cpu.edge(h_of(c, torch.Generator().manual_seed(5), chunks))
    x, w = on_cpu.edge(x), on_cpu.edge(weight[None])
    scales = None if scales is None else on_cpu.edge(scales)
    bias = None if bias is None else on_cpu.edge(linear_op._outer(bias, 2)[None])
    assert stream_cuda.fits(x, w, scales, h, b, bias, out, sizes)
    rest = (
        c.ids if lora else None,
        c.ranks if ranks is None else ranks,
        c.scalings if lora else None,
        sizes,
        config(c, scale=scale, **how),
        pdl,
    )
    assert stream_cuda.product("linear", x, w, scales, h, b, bias, out, *rest)
    assert untouched(), "written beside out"
    return out.reshape(c.base.shape).clone()


def check(on_cpu, c, weight, bias=None, lora=True, scale=None, **how):
    shown = c if lora else replace(c, ids=torch.full_like(c.ids, -1))
    got = run(on_cpu, c, weight, bias, lora, scale=scale, **how)
    exact = weight if scale is None else weight.double() * spread(scale, weight)
    assert_equal(got, want_linear(shown, exact, bias), f"seed {on_cpu.seed - 1}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 40, 64, 65, 128])
def test_forms(on_cpu, form, tokens):
    """T of every kind; blocks of 32 and of 64 columns."""
    sizes = [40, 72, 8] if "slices" in form else None
    c, weight, bias = case(form, **SIZES | dict(tokens=tokens, out=104), ranks=True, sizes=sizes)
    for block_n in (32, 64)[: 1 + (tokens > 16)]:
        check(on_cpu, c, weight, bias, block_n=block_n)
        check(on_cpu, c, weight, bias, block_n=block_n, stages=2, x_stages=3, pdl=False)
        assert on_cpu.last == f"stream_{16 if tokens <= 16 else 64}_{block_n}_16"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 16, 50, 100])
def test_forms_of_e4m3(on_cpu, form, tokens):
    """Scales of both types, of more blocks than one along both axes; blocks of 32 and of 64 columns."""
    sizes = [64, 128, 8] if "slices" in form else None
    for e8m0 in E8M0:
        shape = SIZES | dict(tokens=tokens, out=200, features=336)
        c, weight, scale, bias = scaled_case(form, e8m0=e8m0, **shape, ranks=True, sizes=sizes)
        for block_n in (32, 64):
            check(on_cpu, c, weight, bias, scale=scale, block_n=block_n, stages=6, adapters=2)
            rows = 16 if tokens <= 16 and block_n == 32 else 64
            assert on_cpu.last == f"stream_{rows}_{block_n}_16_e4m3"
        check(on_cpu, c, weight, bias, lora=False, scale=scale, pdl=False)


@pytest.mark.parametrize("rank", [8, 24, 40])
@pytest.mark.parametrize("tokens", [9, 50])
def test_ranks_of_e4m3(on_cpu, rank, tokens):
    c, weight, scale, bias = scaled_case("wo_a", **SIZES | dict(features=336, rank=rank, tokens=tokens), ranks=True)
    check(on_cpu, c, weight, bias, scale=scale)
    check(on_cpu, c, weight, bias, scale=scale, block_n=64, late=True, adapters=2, pdl=False)


@pytest.mark.parametrize("features", [8, 128, 136, 4240])
@pytest.mark.parametrize("tokens", [3, 40])
def test_features_of_e4m3(on_cpu, features, tokens):
    """Fewer stages than its rings have, and more scales than a warp has lanes; x, W and its scales in larger tensors."""
    for e8m0 in E8M0:
        shape = SIZES | dict(features=features, tokens=tokens, out=64)
        c, weight, scale, bias = scaled_case("plain", e8m0=e8m0, **shape, layout={"x": "slice"})
        larger = torch.full((weight.shape[0], features // 16 * 16 + 64), NAN).to(weight.dtype)
        larger[:, 16 : 16 + features] = weight
        scales = torch.full((scale.shape[0], 2 * scale.shape[1]), NAN).to(scale.dtype)
        scales[:, ::2] = scale
        for stages in (2, 16):
            check(on_cpu, c, larger[:, 16 : 16 + features], bias, scale=scales[:, ::2], stages=stages)


def test_every_e4m3_by_scales_of_every_size(on_cpu):
    """x of ones and zeros shows W = weight · scale, rounded to bf16: far below its least normal number, too."""
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[every & 127 != 127]
    numbers = torch.cat((finite, finite[:2])).view(4, 64)  # columns of D that x shows in turn
    c, weight, bias = case("plain", tokens=64, features=128, out=2048, rank=8)
    x = torch.cat((torch.eye(64), torch.zeros(64, 64)), 1).to(BF16)
    for some in numbers:
        weight = torch.cat((some, some.flip(0))).expand(2048, 128).contiguous().view(torch.float8_e4m3fn)
        for first in range(0, 246, 16):  # beyond 2^119 some products are infinite
            powers = torch.arange(first, first + 16).clamp(max=246).to(torch.uint8)[:, None].view(torch.float8_e8m0fnu)
            got = run(on_cpu, replace(c, x=x), weight, lora=False, scale=powers, block_n=64, stages=4)
            want = (weight.float() * powers.float().repeat_interleave(128, 0)).to(BF16)[:, :64].t()
            assert_equal(got, want + 0, f"2^{first - 127}")


@pytest.mark.parametrize("tokens, block_n", [(16, 32), (64, 64)])
def test_the_greatest_scales(on_cpu, tokens, block_n):
    """2^127 makes Inf of what is too large; behind it comes NaN, also of numbers of which Inf would make none: whole stages of ones."""
    c, _, _ = case("plain", tokens=tokens, features=256, out=256, rank=8)
    weight = torch.ones(256, 256).to(torch.float8_e4m3fn)
    weight[:128, 3] = 448.0
    scales = torch.tensor([[254, 254], [255, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = run(on_cpu, replace(c, x=torch.ones_like(c.x)), weight, lora=False, scale=scales, block_n=block_n)
    assert (got[:, :128] == float("inf")).all() and got[:, 128:].isnan().all()


@pytest.mark.parametrize("e8m0", E8M0)
def test_nan_of_a_weight_and_of_a_scale(on_cpu, e8m0):
    """They are in the columns of y whose rows of W, or whose block, have one."""
    c, weight, scale, bias = scaled_case("plain", e8m0=e8m0, **SIZES | dict(features=336, out=264))
    clean = want_linear(c, weight.double() * spread(scale, weight), bias)
    bad, worse = weight.clone(), scale.clone()
    bad.view(torch.uint8)[5, 300] = 127
    bad.view(torch.uint8)[77, 2] = 255
    worse[1, 2] = NAN
    got = run(on_cpu, c, bad, bias, scale=worse)
    wrong = torch.zeros(got.shape, dtype=torch.bool)
    wrong[:, [5, 77]] = wrong[:, 128:256] = True
    assert torch.equal(got.isnan(), wrong)
    assert_equal(got.masked_fill(wrong, 0), clean.masked_fill(wrong, 0))


def test_a_stage_is_summed_from_zero(on_cpu):
    """Where a scale is float32: one product and one sum a stage, rounded once, in order."""
    c, _, bias = case("plain", tokens=5, features=1024, out=64, rank=8)
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, c.x.shape, generator=g).to(BF16)
    weight = torch.randint(-8, 9, (64, 1024), generator=g).to(torch.float8_e4m3fn)
    scale = torch.rand(blocks_of(weight), generator=g) + 0.1
    got = run(on_cpu, replace(c, x=x), weight, lora=False, scale=scale)
    total = torch.zeros(5, 64)
    for i in range(8):
        part = x[:, i * 128 : i * 128 + 128].double() @ weight[:, i * 128 : i * 128 + 128].double().t()
        total = (total.double() + part * scale[:, i].double()).float()  # exact in float64: 11 bits by 24, and 24 beside them
    assert_equal(got, total.to(BF16))


@pytest.mark.parametrize("rank", [8, 16, 24, 32, 40, 64])
@pytest.mark.parametrize("tokens", [9, 50, 90])
def test_ranks(on_cpu, rank, tokens):
    for ranks in (False, [rank, 0, rank // 2 + 1, 3]):
        c, weight, bias = case("plain", **SIZES | dict(rank=rank, slots=4, tokens=tokens), ranks=ranks)
        for chunks in (1, 8):
            check(on_cpu, c, weight, bias, chunks=chunks, block_n=64 if chunks == 8 and tokens > 16 else 32)
        assert on_cpu.last.endswith(f"_{stream_ranks(rank)}")


@pytest.mark.parametrize("tokens", [9, 50])
def test_ranks_out_of_range(on_cpu, tokens):
    """Below 0 is 0, past r is r."""
    c, weight, bias = case("plain", **SIZES | dict(rank=24, tokens=tokens), ranks=[0, 24, 7])
    got = run(on_cpu, c, weight, bias, ranks=torch.tensor([-3, 40, 7], dtype=torch.int32))
    assert_equal(got, want_linear(c, weight, bias), f"seed {on_cpu.seed - 1}")


@pytest.mark.parametrize("adapters", [1, 7, 64])
@pytest.mark.parametrize("rank, tokens", [(16, 64), (64, 64), (32, 16)])
def test_more_adapters_than_room(on_cpu, rank, tokens, adapters):
    c, weight, bias = case("plain", **SIZES | dict(slots=70, rank=rank, out=32, tokens=tokens), ranks=True)
    adapters = min(adapters, 28 if rank == 64 else 50 if tokens == 16 else 64)  # shared memory
    check(on_cpu, c, weight, bias, adapters=adapters)
    check(on_cpu, replace(c, ids=c.ids.long()), weight, bias.float(), adapters=adapters)
    check(on_cpu, replace(c, ids=c.ids.repeat_interleave(2)[::2]), weight, adapters=adapters)
    check(on_cpu, c, weight, bias, adapters=min(adapters, 4), late=True)  # 24 KB of W's ring
    check(on_cpu, c, weight, bias, adapters=min(adapters, 4), late=True, pdl=False, block_n=64 if tokens == 64 else 32)


@pytest.mark.parametrize("tokens", [7, 33, 100])
def test_ids_that_name_no_adapter(on_cpu, tokens):
    c, weight, bias = case("wo_a", **SIZES | dict(tokens=tokens))
    check(on_cpu, replace(c, ids=torch.full_like(c.ids, -1)), weight, bias)
    for wild in (3, 2**31 - 1, -(2**31), -7):
        check(on_cpu, replace(c, ids=torch.where(torch.arange(tokens) % 2 == 0, wild, c.ids).int()), weight, bias)
    for wild in (2**32 + 1, 1 - 2**32):  # their lower halves name one
        check(on_cpu, replace(c, ids=torch.where(torch.arange(tokens) % 2 == 0, wild, c.ids.long())), weight, bias)
    check(on_cpu, c, weight, bias, lora=False)
    assert on_cpu.last.endswith("_0")


@pytest.mark.parametrize("features", [8, 64, 136, 2056])
@pytest.mark.parametrize("tokens", [3, 40])
def test_features(on_cpu, features, tokens):
    """Fewer stages than the ring has, and many more; a tail; x and W that lie in larger tensors."""
    c, weight, bias = case("wo_a", **SIZES | dict(features=features, tokens=tokens, out=64), layout="slice")
    check(on_cpu, c, place(weight, "slice"), bias, stages=8 if tokens == 3 else 4, x_stages=4)
    check(on_cpu, c, place(weight, "slice"), bias)


@pytest.mark.parametrize("tokens, block_n", [(16, 32), (48, 32), (48, 64)])
@pytest.mark.parametrize("rank", [16, 40])
def test_inf_and_nan_of_an_adapter_are_its_rows_alone(on_cpu, rank, tokens, block_n):
    c, weight, bias = case("wo_a", **SIZES | dict(rank=rank, tokens=tokens, features=64), ranks=[rank, rank - 3, rank])
    clean = want_linear(c, weight, bias)
    b = c.b.clone()
    b[1, 0, 5, 2], b[1, 1, 71, rank - 4], b[1, 0, 33, 0] = float("inf"), NAN, float("-inf")
    b[2, 1, 17, rank - 1] = NAN
    got = run(on_cpu, replace(c, b=b), weight, bias, block_n=block_n)
    wrong = torch.zeros(got.shape, dtype=torch.bool)
    wrong[c.ids == 1, 0, 5] = wrong[c.ids == 1, 1, 71] = wrong[c.ids == 1, 0, 33] = wrong[c.ids == 2, 1, 17] = True
    assert wrong.any() and torch.equal(~got.isfinite(), wrong), f"seed {on_cpu.seed - 1}"
    assert_equal(got.masked_fill(wrong, 0), clean.masked_fill(wrong, 0))


def test_a_row_of_x_that_is_not_finite_stays_alone(on_cpu):
    for tokens in (16, 50):
        c, weight, bias = case("plain", **SIZES | dict(tokens=tokens))
        clean = want_linear(c, weight, bias)
        h = linear_op.reference.shrink(c.x, c.a, c.ids)  # before
        x = c.x.clone()
        x[3, 7], x[9, 300] = float("inf"), NAN
        assert h.isfinite().all()
        got = run(on_cpu, replace(c, x=x), weight, bias)
        others = [row for row in range(tokens) if row not in (3, 9)]
        assert_equal(got[others], clean[others])
        assert not got[[3, 9]].isfinite().any()


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("tokens", [16, 40])
def test_a_recorded_launch_is_another_calls_but_for_its_tensors(on_cpu, monkeypatch, tokens, lora):
    """What ops/prepared.py repeats: two tensor maps whose first words are addresses, and nothing else that is one."""
    operands, packed, product = [], [], stream_cuda.product

    def noted(*args):
        operands.append(tuple([t for t in args if isinstance(t, torch.Tensor)]))
        return product(*args)

    monkeypatch.setattr(stream_cuda, "product", noted)
    for seed in (0, 1):
        c, weight, bias = case("wo_a", **SIZES | dict(tokens=tokens), ranks=True, seed=seed)
        check(on_cpu, c, weight, bias, lora)
        packed.append(on_cpu.packed)
    tape = driver.Tape(operands[0])
    tape.add(driver.Launch(0, (1, 1, 1), 32, (1, 1, 1), 0, True, packed[0][0], (0,), ()), packed[0][1])
    (launch,) = tape.launches
    filled = bytearray(launch.data)
    for at, operand in launch.slots:
        filled[at : at + 8] = operands[1][operand].data_ptr().to_bytes(8, "little")
    assert not tape.refused and filled == packed[1][0]


def test_what_does_not_fit():
    x, w, out = (torch.empty(*shape, dtype=BF16) for shape in ((64, 1, 64), (1, 1, 40, 64), (64, 1, 40)))
    h, b = torch.empty(2, 64, 1, 16), torch.empty(3, 1, 1, 40, 16, dtype=BF16)
    fits = stream_cuda.fits
    assert fits(x, w, None, None, None, None, out, None) and fits(x, w, None, h, b, None, out, None)
    more, wide = torch.empty(129, 1, 64, dtype=BF16), torch.empty(2, 64, 1, 72)
    assert not fits(more, w, None, None, None, None, torch.empty(129, 1, 40, dtype=BF16), None)
    assert not fits(x, w, None, wide, torch.empty(3, 1, 1, 40, 72, dtype=BF16), None, out, None)
    assert not fits(x, w, None, torch.empty(64, 1, 2, 16, dtype=BF16), b, None, out, None), "h in halves"
    assert not fits(x[:1].expand(64, 1, 64), w, None, None, None, None, out, None)
    assert not fits(x, w.mT.contiguous().mT, None, None, None, None, out, None)
    assert not fits(x, w, None, None, None, None, out.float(), None)
    small, scales = w.to(torch.float8_e4m3fn), torch.ones(1, 1, 1)
    assert fits(x, small, scales, h, b, None, out, None)
    assert not fits(x, small, None, None, None, None, out, None) and not fits(x, w, scales, None, None, None, out, None)
    three, sliced = torch.empty(64, 3, 64, dtype=BF16), torch.empty(64, 1, 200, dtype=BF16)
    small = torch.empty(1, 1, 200, 64).to(torch.float8_e4m3fn)
    for sizes, there in (((64, 128, 8), True), ((64, 72, 64), False), ((32, 160, 8), False)):
        assert fits(three, small, torch.ones(1, 2, 1), None, None, None, sliced, sizes) == there
    odd = torch.empty(1, 1, 40, 72).to(torch.float8_e4m3fn)
    assert not fits(torch.empty(64, 1, 72, dtype=BF16), odd, scales, None, None, None, out, None), "rows of 72 bytes"


def test_choices_fit_into_shared_memory():
    for tokens in (1, 8, 16, 17, 64, 65, 128):
        for groups, columns in ((1, 8), (1, 4096), (4, 1024), (8, 1024), (1, 28672)):
            if tokens > 64 and groups * columns != 4096:  # two blocks of rows are more than one wave, or few
                assert launch_linear.linear(Problem("sm_90", 132, 2, tokens, groups, 4096, columns, 16, 8)).stream is None
                continue
            for rank, choose in itertools.product((0, 8, 16, 24, 64), (launch_linear.linear, launch_linear.scaled)):
                for slots in (0, 1, 8, 300):
                    p = Problem("sm_90", 132, 2, tokens, groups, 4096, columns, rank, slots)
                    chosen = choose(p).stream
                    assert chosen.e4m3 == (choose is launch_linear.scaled)
                    assert not chosen.e4m3 or chosen.rows == 16 or chosen.stages % 2 == 0
                    assert chosen.rows * (1 + (tokens > 64)) >= tokens and 16 >= chosen.stages >= chosen.x_stages >= 2
                    ranks = stream_ranks(rank if slots else 0)
                    assert launch_linear.STREAM_FIXED + launch_linear.stream_bytes(chosen, ranks) <= 172 * KB
                    assert chosen.adapters <= min(tokens, slots) and (chosen.adapters > 0) == (ranks > 0)
    p = Problem("sm_90", 132, 2, 8, 4, 4096, 1024, 16, 8)
    for choose in (launch_linear.linear, launch_linear.scaled):
        for other in (dict(tokens=129), dict(rank=72), dict(arch="sm_100"), dict(itemsize=4)):
            assert choose(replace(p, **other)).stream is None
        assert choose(p).stream is not None and choose(p, True).stream is None and choose(p, False, True).stream is None


def test_random_choices():
    """Any problem gets a launch that fits, and a shrink of the same bits, which no more than starts earlier with fewer stages."""
    draw = random.Random(0)
    for _ in range(3000):
        tokens, groups, slots = (
            draw.randint(1, 64),
            draw.choice((1, 2, 3, 8, 40)),
            draw.choice((0, 1, 2, 8, 64, 1024, 5000)),
        )
        features, columns, rank = (
            draw.choice((0, 1, 8, 129, 4096)),
            draw.choice((1, 8, 33, 1024, 28672)),
            draw.randint(0, 64),
        )
        p = Problem("sm_90", draw.choice((1, 16, 78, 114, 132)), 2, tokens, groups, features, columns, rank, slots)
        e4m3 = draw.random() < 0.3
        config, tiles = launch_linear.scaled(p) if e4m3 else launch_linear.linear(p), launch_linear.tiles(p)
        chosen, ranks = config.stream, stream_ranks(rank if slots else 0)
        used = launch_linear.STREAM_FIXED + launch_linear.stream_bytes(chosen, ranks)
        blocks = 2 if chosen.block_n == 32 and groups * -(-columns // 32) > p.sms and (chosen.rows == 16 or not e4m3) else 1
        assert used * blocks <= 227 * KB and min(chosen.stages, chosen.x_stages) >= 2, p
        if chosen.late:
            assert chosen.adapters * launch_linear._factor(chosen, ranks) <= launch_linear._rings(chosen), p
        assert (config.shrink is None) == (tiles.shrink is None), p
        if config.shrink is not None:
            assert 2 <= config.shrink.num_stages <= tiles.shrink.num_stages, p
            assert (
                replace(config.shrink, num_stages=tiles.shrink.num_stages, early=tiles.shrink.early) == tiles.shrink
            ), p


# edits of the source, and how the kernel is launched where that matters
FAULTS = {
    "a stage is given back too early": (
        [
            (
                "                multiplies_wait<1>();\n                if (step > 0) release(step - 1, ring.before(), x_ring.before());\n",
                "                release(step, ring.stage, x_ring.stage);\n                multiplies_wait<1>();\n",
            )
        ],
        {},
    ),
    "W is fetched a use of a stage ahead": ([("        wait((w ? s.empty : s.x_empty)", "        if (!w) wait((w ? s.empty : s.x_empty)")], {}),
    "x is fetched a use of a stage ahead": ([("        wait((w ? s.empty : s.x_empty)", "        if (w) wait((w ? s.empty : s.x_empty)")], {}),
    "h is read before it is made": ([("    if (p.flags & OVERLAP) wait_for_producer(); // it makes h\n", "")], {}),
    "x is read before it is made": (
        [
            ("    if (S::RANKS == 0 && p.flags & OVERLAP) wait_for_producer(); // any kernel: it may write x\n", ""),
            (
                "    if (p.flags & NEXT) let_consumer_start(); // all that is older than the shrink ahead has ended\n",
                "",
            ),
        ],
        dict(lora=False),
    ),
    "the kernel behind starts before any kernel ahead has ended": (
        [
            (
                "    if (S::RANKS == 0 && p.flags & OVERLAP)",
                "    let_consumer_start();\n    if (S::RANKS == 0 && p.flags & OVERLAP)",
            )
        ],
        dict(lora=False),
    ),
    "B is not waited for": ([("        copies_wait<0>();\n", "")], {}),
    "B comes to where the one before is still read": (
        [
            ("        any_of<MATH + S::HELPERS>(1, false); // more adapters than there is room for\n", ""),
            ("        if (first + p.adapters < s.count) any_of<MATH + S::HELPERS>(1, false);\n", ""),
        ],
        {},
    ),
    "B comes to where the rings are still read": (
        [
            ("        any_of<MATH + S::HELPERS>(1, false);\n        load_factors", "        load_factors"),
            ("    if (p.flags & LATE) any_of<MATH + S::HELPERS>(1, false); // the rings are read\n", ""),
        ],
        dict(late=True),
    ),
    "W is converted over what is still multiplied": ([("        wait(s.used[ring.stage], ring.phase ^ 1);\n", "")], dict(e4m3=True)),
    "W is converted before it has arrived": ([("        wait(s.full[raw.stage], raw.phase);\n", "")], dict(e4m3=True)),
    "W is fetched over what is not converted": ([("        wait((w ? s.empty", "        if (!w) wait((w ? s.empty")], dict(e4m3=True)),
    "the matrix units do not see what was converted": ([("        written_for_matrix_units();\n", "")], dict(e4m3=True)),
    "a warp's part is multiplied before it is converted": (
        [
            ("            arrive(s.converted[ring.stage]);\n", ""),
            (
                "        wait(s.used[ring.stage], ring.phase ^ 1);\n",
                "        wait(s.used[ring.stage], ring.phase ^ 1);\n        if (lane == 0) arrive(s.converted[ring.stage]);\n",
            ),
        ],
        dict(e4m3=True),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_sees(library, monkeypatch, tmp_path, fault):
    edits, how = FAULTS[fault]
    how = dict(how)
    e4m3 = how.pop("e4m3", False)
    tail = "_e4m3" if e4m3 else ""
    source = (ROOT / "csrc/stream.cu").read_text()
    assert all(source.count(before) == 1 for before, _ in edits)

    def change(text):
        for before, after in edits:
            text = text.replace(before, after)
        # the other kernels would only be compiled
        return re.sub(rf"^KERNEL\((?!stream_64_32_(?:16|0){tail},).*$", "", text, flags=re.MULTILINE)

    on_cpu = StreamOnCpu(compiled(tmp_path, change, "stream"), monkeypatch)
    shape = SIZES | dict(tokens=50, features=1024, out=64)
    if e4m3:
        c, weight, how["scale"], bias = scaled_case("plain", e8m0=True, **shape)
    else:
        c, weight, bias = case("plain", **shape)
    with pytest.raises(AssertionError):
        for _ in range(8):  # orders of events
            check(on_cpu, c, weight, bias, stages=2, adapters=1, **how)
    on_cpu.close()
