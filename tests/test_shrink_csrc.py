"""csrc/shrink.cu on the CPU, a fiber a thread (hopper_on_cpu.h): exact for small integers, whatever runs first.

What ops/shrink_cuda.py packs drives it. Operands end where forbidden memory begins, and NaN lies wherever nothing may be read.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from cases import NAN, assert_equal, place
from linear_cases import case
from test_linear_csrc import BF16, ROOT, OnCpu, compiled

from grouped_lora_ops import cuda, driver, launch, reference
from grouped_lora_ops.kernels import halves as kernels
from grouped_lora_ops.ops import common, shrink_cuda

KERNELS = re.findall(
    r"^KERNEL\((\w+), (\d+), (\d+), (\d+), \d, (\w+)\)", (ROOT / "csrc/shrink.cu").read_text(), re.MULTILINE
)
CONFIGS = {
    name: launch.CudaShrinkConfig(int(rows), int(columns), int(keep), whole == "true", stages=3)
    for name, rows, columns, keep, whole in KERNELS
}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    return compiled(tmp_path_factory.mktemp("shrink_on_cpu"), stem="shrink", prefix="shrink_")


class ShrinkOnCpu(OnCpu):
    def __init__(self, library, monkeypatch):
        super().__init__(library, monkeypatch)
        monkeypatch.setattr(cuda, "module", lambda op, stem, device: self if stem == "shrink" else None)

    def launch(self, function, grid, threads, layout, values, *, shared, pdl):
        name, room = function
        assert shared <= room == 227 << 10 and grid[1:] == (1, 1)
        data, _ = driver.pack(layout, values)
        assert len(data) == 384
        self.launches.append(name)
        self.run(name.removeprefix("shrink_"), data, grid[0], threads, shared, (0, 0))


@pytest.fixture
def on_cpu(library, monkeypatch):
    made = ShrinkOnCpu(library, monkeypatch)
    yield made
    made.close()


def test_the_kernels_are_those_that_can_be_asked_for():
    assert len(CONFIGS) >= 20 and all(name == config.kernel for name, config in CONFIGS.items())


def shrunk(on_cpu, c, config, chunk=128, fill=False, span=1, halves=False, factors=None):
    """(h [chunks, T, G, r] or its halves [T, G, 2, r], whether nothing was written beside it)"""
    x, a = common.grouped(c.x, 3), common.grouped(c.a, 4)
    chunks = launch.cdiv(x.shape[2], chunk)
    p = launch.Problem("sm_90", 132, 2, x.shape[0], 1, x.shape[2], 0, a.shape[2], a.shape[0])
    split = not config.whole
    shape = launch.shrink_with(p, 16, 16, 64, 4, 3, split)
    shape = replace(shape, chunk=chunk, chunks=chunks, cuda=replace(config, span=span))
    groups = max(x.shape[1], a.shape[1])
    if halves:
        h = on_cpu.edge(torch.full((x.shape[0], groups, 2, a.shape[2]), NAN, dtype=BF16))
    else:
        h = on_cpu.edge(torch.full((chunks if split else 1, x.shape[0], groups, a.shape[2]), NAN))
    x, a = on_cpu.edge(x), on_cpu.edge(a)
    assert shrink_cuda.fits(x, a, h, None, shape.cuda)
    assert shrink_cuda.shrink("shrink", x, a, h, c.ids, c.ranks, factors, fill, shape)
    assert len(on_cpu.launches) == 1
    on_cpu.launches.clear()
    return h


def live_rows(c):
    return (c.ids >= 0) & (c.ids < c.a.shape[0])


def check(on_cpu, c, config, chunk=128, fill=False, span=1, factors=None):
    got = shrunk(on_cpu, c, config, chunk, fill, span, factors=factors)
    whole = common.grouped(reference.shrink(c.x, c.a, c.ids, ranks=c.ranks), 3)
    live = live_rows(c)
    if factors is not None:
        whole = whole * factors[c.ids.long().clamp(0, c.a.shape[0] - 1)][:, None, None]
    what = f"{config}, chunk {chunk}, span {span}, seed {on_cpu.seed - 1}"
    if not fill:
        assert got[:, ~live].isnan().all(), what
        assert_equal(got.sum(0)[live], whole[live], what)
    else:
        assert_equal(got.sum(0), whole.masked_fill(~live[:, None, None], 0.0), what)
    if config.whole:
        return
    for i, part in enumerate(got):  # each chunk's sum, apart
        one = c.x.clone()
        one[..., : i * chunk] = 0
        one[..., (i + 1) * chunk :] = 0
        want = common.grouped(reference.shrink(one, c.a, c.ids, ranks=c.ranks), 3)
        if factors is not None:
            want = want * factors[c.ids.long().clamp(0, c.a.shape[0] - 1)][:, None, None]
        assert_equal(part[live], want[live], f"chunk {i}, {what}")


def fitting(config, **more):
    """A problem for a kernel: all the adapters that it has room for."""
    slots = config.columns // config.keep
    sizes = dict(tokens=config.rows + 37, slots=slots, features=328, out=8, rank=config.keep)
    return case(more.pop("form", "wo_a"), **sizes | more)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels(on_cpu, name):
    config = CONFIGS[name]
    check(on_cpu, fitting(config, ranks=True), config)
    check(on_cpu, fitting(config, form="plain"), config, chunk=256, fill=True)


@pytest.mark.parametrize("name", ["64_16_16", "128_64_64", "128_64_16", "128_16_16_whole", "256_128_16_whole"])
@pytest.mark.parametrize("features", [8, 64, 72, 128, 200, 320, 1000])
def test_features_and_what_lies_behind_a_row(on_cpu, name, features):
    """x and A are slices of wider buffers that hold NaN."""
    config = CONFIGS[name]
    c = fitting(config, features=features, layout="slice", tokens=70)
    for span in (1, 2, 3):
        check(on_cpu, c, config, span=span)


@pytest.mark.parametrize("form", ["plain", "wo_a", "wo_a with an A per group", "shared input"])
@pytest.mark.parametrize("name", ["64_16_16", "128_64_16", "128_64_32_whole"])
def test_forms(on_cpu, name, form):
    config = CONFIGS[name]
    check(on_cpu, fitting(config, form=form, ranks=True, tokens=150), config, fill=True)


@pytest.mark.parametrize("rank", [1, 3, 8, 12, 15, 16])
@pytest.mark.parametrize("name", ["64_16_16", "128_16_16_whole"])
def test_any_rank_of_one_adapter(on_cpu, name, rank):
    config = CONFIGS[name]
    c = fitting(config, rank=rank, tokens=80)
    check(on_cpu, c, config)
    check(on_cpu, c, config, fill=True)


def test_any_number_of_adapters(on_cpu):
    """Fewer than a block has room for, and more: in turns, of which some have no rows."""
    for name, slots in (("128_128_16", 5), ("128_64_16", 3), ("128_128_64", 1), ("64_128_16", 70), ("64_128_64", 7), ("128_64_32_whole", 9)):
        for fill in (False, True):
            check(on_cpu, fitting(CONFIGS[name], slots=slots, tokens=80, ranks=slots < 10), CONFIGS[name], fill=fill)


def test_rows_without_an_adapter_alone(on_cpu):
    for name, slots in (("64_128_16", 20), ("64_16_16", 1)):
        c = fitting(CONFIGS[name], slots=slots, tokens=30)
        for fill in (False, True):
            check(on_cpu, replace(c, ids=torch.full_like(c.ids, -1)), CONFIGS[name], fill=fill)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_adapter(on_cpu, dtype):
    config = CONFIGS["128_64_16"]
    c = fitting(config)
    wild = torch.tensor([-1, 2, 99, -(2**31), 2**31 - 1, 0, 4], dtype=dtype)
    c = replace(c, ids=wild[torch.arange(len(c.ids)) % 7])
    live = live_rows(c)
    got = shrunk(on_cpu, c, config)
    safe = replace(c, ids=torch.where(live, c.ids, -1))
    want = common.grouped(reference.shrink(c.x, c.a, safe.ids), 3)
    assert got[:, ~live].isnan().all() and torch.equal(got.sum(0)[live], want[live])


def test_nonfinite_numbers_stay_with_their_rows_and_adapters(on_cpu):
    for name in ("128_64_16", "256_128_16_whole"):
        config = CONFIGS[name]
        c = fitting(config)
        a, x = c.a.clone(), c.x.clone()
        a[1] = float("nan")
        a[2, :, 5] = float("inf")
        x[::9] = float("nan")
        broken = replace(c, a=a, x=x)
        good, got = shrunk(on_cpu, c, config), shrunk(on_cpu, broken, config)
        kept = live_rows(c) & (c.ids != 1) & (c.ids != 2)
        kept[::9] = False
        assert kept.any() and torch.equal(good[:, kept], got[:, kept])
        assert got[:, c.ids == 1].isnan().all()


@pytest.mark.parametrize(
    "rank,slots,name",
    [(16, 8, "256_128_16_whole"), (16, 1, "128_16_16_whole"), (64, 2, "128_128_64_whole"), (24, 1, "128_32_32_whole")],
)
def test_halves(on_cpu, rank, slots, name):
    """The two bf16 that csrc/linear.cu reads, as kernels/halves.py makes them of h, for numbers of any size, and Inf and NaN."""
    c = fitting(CONFIGS[name], rank=rank, slots=slots, ranks=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(c.x.shape, generator=generator).to(BF16)
    x[3], x[5, ..., 0] = float("inf"), float("nan")
    c = replace(c, x=x)
    factors = torch.rand(slots, generator=generator) + 0.5
    h = shrunk(on_cpu, c, CONFIGS[name])
    got = shrunk(on_cpu, c, CONFIGS[name], halves=True, factors=factors)
    want = torch.full_like(got, NAN)
    kernels.halves("shrink", h.clone(), want, c.ids, 1, factors, slots, False)
    live = live_rows(c)
    assert got[~live].isnan().all()
    assert torch.equal(got[live].view(torch.int16).where(~got[live].isnan(), 0), want[live].view(torch.int16).where(~want[live].isnan(), 0))
    assert torch.equal(got[live].isnan(), want[live].isnan())


def test_what_the_kernel_leaves(on_cpu):
    config = CONFIGS["128_64_16"]
    c = fitting(config)
    x, a = common.grouped(c.x, 3), common.grouped(c.a, 4)
    h = torch.empty(3, x.shape[0], x.shape[1], 16)
    fits = lambda x=x, a=a, h=h, sizes=None, config=config: shrink_cuda.fits(x, a, h, sizes, config)  # noqa: E731
    assert fits()
    assert not fits(x=x.half(), a=a.half()) and not fits(sizes=(8, 8)) and not fits(a=a[:, :, :0])
    assert not fits(a=a[:, :, :8].contiguous())  # two adapters of rank 8 where rows keep 16
    assert not fits(x=x[:1].expand(x.shape)) and not fits(h=torch.empty(x.shape[0], x.shape[1], 2, 16, dtype=BF16))
    assert not fits(x=torch.stack([x, x], -1)[..., 0]) and not fits(x=place(x, "dense")[..., 1:9], a=a[..., 1:9])
