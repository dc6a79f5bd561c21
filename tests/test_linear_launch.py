"""What chooses csrc/linear.cu, for `linear` and for the expert ops, which layouts it takes, and what a launch is given."""

from __future__ import annotations

import ctypes
import importlib
import random
import re
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grouped_lora_ops import _builds, cuda, driver, launch, launch_experts, launch_linear
from grouped_lora_ops.launch_experts import ExpertProblem
from grouped_lora_ops.launch_linear import CudaConfig
from grouped_lora_ops.ops import common, expert_launch, linear_cuda

BF16 = torch.bfloat16

# --- the choice ---


def problem(**changes):
    return replace(launch.Problem("sm_90", 132, 2, 8192, 4, 4096, 1024, 16, 8), **changes)


def test_linear_takes_it_from_65_rows_on_where_its_tiles_fill_the_gpu():
    wide = dict(groups=8, out_features=18432)  # 576 blocks of columns
    below, first = (launch_linear.linear(problem(tokens=tokens, **wide)) for tokens in (64, 65))
    assert below.cuda is None and below.stream is not None
    assert first.cuda == CudaConfig(launch_linear.ROWS, 132, 8) and first.stream is None
    for tokens in (64, 65, 127, 128):
        c = launch_linear.linear(problem(tokens=tokens, **wide), True)
        assert c.stream is None and (c.cuda is not None) == (tokens == 128), "the gradient of x: from 128 on"
    assert launch_linear.linear(problem(tokens=65, groups=1, out_features=256)).cuda is None, "one tile for 132 multiprocessors"
    assert launch_linear.linear(problem(sms=20, tokens=65, out_features=1024)).cuda.programs == 16, "as many as there are tiles"
    for changes in (dict(), dict(slots=1), dict(rank=0), dict(slots=0), dict(tokens=1024)):
        assert launch_linear.linear(problem(**changes)).cuda is not None, changes
        assert launch_linear.linear(problem(**changes), True).cuda is not None, changes


def test_other_gpus_and_dtypes_do_not():
    for arch in ("sm_80", "sm_89", "sm_100", "sm_103", "sm_120"):
        assert launch_linear.linear(problem(arch=arch)).cuda is None
    assert launch_linear.linear(problem(itemsize=4)).cuda is None
    for transposed in (False, True):
        assert launch_linear.linear(problem(), transposed, fp16=True).cuda is None
        assert launch_linear.scaled(problem(), transposed, fp16=True).cuda is None
    assert launch_linear.scaled(problem(), True).cuda is None, "the gradient of x beside float32 scales"


def test_float32_scales_take_it_from_a_wave_of_tiles_of_128_columns_on():
    many = launch_linear.scaled(problem(tokens=1024))
    assert many.cuda == CudaConfig(launch_linear.SORTED, 132, 8, 128) and many.stream is None
    assert launch_linear.scaled(problem(tokens=1024, slots=1)).cuda.mode == launch_linear.ROWS
    assert launch_linear.scaled(problem(tokens=256)).cuda is None, "64 tiles for 132 multiprocessors"
    assert launch_linear.scaled(problem(tokens=64)).cuda is None and launch_linear.scaled(problem(tokens=64)).stream is not None
    assert launch_linear.scaled(problem(in_features=4096 - 32)).cuda == many.cuda
    for changes in (dict(in_features=4096 - 64), dict(arch="sm_89"), dict(arch="sm_100")):
        assert launch_linear.scaled(problem(**changes)).cuda is None, changes


def test_narrow_tiles_where_wide_ones_leave_multiprocessors_idle():
    for out, columns in ((1024, 256), (512, 128), (256, 64), (64, None)):
        c = launch_linear.linear(problem(tokens=1024, out_features=out)).cuda  # 128; 64, or 128; 128 of 64; 32 tiles
        assert (None if c is None else c.columns) == columns
        assert c is None or c.programs == 128


def test_a_plan_where_adapters_meet_in_many_rows():
    assert launch_linear.linear(problem()).cuda.mode == launch_linear.SORTED
    for changes in (dict(slots=1), dict(rank=0), dict(slots=0), dict(tokens=launch.SCAN_TOKENS, out_features=18432)):
        assert launch_linear.linear(problem(**changes)).cuda.mode == launch_linear.ROWS, changes


def test_every_choice_is_one_that_the_kernel_has():
    draw, taken = random.Random(0), 0
    for _ in range(3000):
        p = launch.Problem(
            arch=draw.choice(["sm_80", "sm_90", "sm_90", "sm_100", "sm_120"]), sms=draw.choice([1, 20, 132]), itemsize=draw.choice([2, 2, 4]),
            tokens=int(2 ** draw.uniform(0, 18)), groups=draw.choice([1, 2, 8]), in_features=draw.choice([1, 100, 4096]),
            out_features=draw.choice([1, 127, 1024, 4096]), rank=draw.choice([0, 1, 16, 64, 512]), slots=draw.choice([0, 1, 8, 1024]),
        )  # fmt: skip
        transposed, fp16 = draw.random() < 0.3, draw.random() < 0.2
        c = launch_linear.linear(p, transposed, fp16)
        other = launch_linear.tiles(p, transposed, fp16)
        assert replace(c, cuda=None, stream=None, shrink=None) == replace(other, shrink=None), "what else is chosen stays"
        assert c.cuda is None or c.stream is None or 64 < p.tokens <= 128, "which takes what csrc/stream.cu cannot"
        assert (c.shrink is None) == (other.shrink is None)
        if c.shrink is not None:
            same = ("mode", "chunk", "chunks", "block_r", "block_t", "block_l", "precision", "pdl")
            assert all(getattr(c.shrink, name) == getattr(other.shrink, name) for name in same), "what fixes a row's bits stays"
            if c.stream is not None:
                assert replace(c.shrink, num_stages=0, early=False) == replace(other.shrink, num_stages=0), "beside csrc/stream.cu"
                assert 2 <= c.shrink.num_stages <= other.shrink.num_stages
            assert c.cuda is not None or c.stream is not None or c.shrink == other.shrink
        if c.cuda is None:
            continue
        taken += 1
        assert (p.arch, p.itemsize, fp16) == ("sm_90", 2, False) and p.tokens >= launch_linear.CUDA_TOKENS
        assert 1 <= c.cuda.programs <= p.sms and c.cuda.tile_group >= 1
        assert c.cuda.mode == launch_linear.ROWS or (p.tokens > launch.SCAN_TOKENS and c.shrink is not None and p.slots > 1)
        assert c.rank_block in (16, 32), "the pieces of r that the kernel has stages for"
    assert taken > 100


def test_the_shrink_ahead_of_it():
    """Whole where the product starts beside it, on the same multiprocessors (tiles of 64 columns) or on others, or where rows are many;
    else split over D."""
    beside, alone, many = (launch_linear.linear(problem(tokens=tokens, rank=16)) for tokens in (256, 1024, 8192))
    assert not beside.shrink.split and beside.cuda.columns == 64 and beside.cuda.programs == 128
    apart = problem(tokens=256, rank=16, out_features=768, groups=4)
    chosen = launch_linear.linear(apart)
    assert not chosen.shrink.split and chosen.cuda.columns == 64
    assert alone.shrink.split and alone.shrink == launch_linear.tiles(problem(tokens=1024, rank=16)).shrink
    assert not many.shrink.split and many.shrink.num_stages == 5


def routed(**changes):
    return replace(ExpertProblem("sm_90", 132, 2, 8 * 4096, 128, 4, 2, 2, 2048, 768, 16, True), **changes)


def test_a_whole_shrink_ahead_of_csrcs_stream_stays_in_float32(monkeypatch):
    """Where both kernels of csrc may follow, the stream does, and it reads no halves."""
    p = launch.Problem("sm_90", 132, 2, 65, 60, 256, 64, 64, 1024)
    config = launch_linear.linear(p)
    assert config.stream is not None and config.cuda is not None and not config.shrink.split
    linear_op = importlib.import_module("grouped_lora_ops.ops.linear")
    monkeypatch.setattr(linear_cuda, "loaded", lambda *args: pytest.fail("asked for"))
    assert not linear_op._by_cuda("linear", None, None, None, None, None, None, None, config)


def test_without_lora_one_wave_of_wide_blocks():
    for groups, tokens, rank, rows in ((8, 8, 0, 64), (8, 8, 16, 16), (4, 8, 0, 16), (28, 8, 0, 16)):
        config = launch_linear.linear(problem(tokens=tokens, groups=groups, rank=rank))
        assert config.stream.rows == rows and config.stream.block_n == (64 if rows == 64 else 32)


def test_groups_that_share_a_are_shrunk_together_ahead_of_a_few_rows():
    for tokens in (1, 3, 4, 8, 32, 64, 128, 256):
        p = problem(tokens=tokens, rank=64, shared_a=True)
        shrink = launch_linear.linear(p).shrink
        assert shrink.merge == (4 if 4 <= tokens <= 128 else 1)
        if shrink.merge > 1 and tokens <= launch_linear.STREAM_TOKENS:
            assert (shrink.split, shrink.block_r) == (True, 64)
        assert launch_linear.linear(replace(p, shared_a=False)).shrink.merge == 1


def test_experts_take_it_where_they_have_many_routes():
    assert launch_experts.takes_cuda(routed())
    first = 128 * launch_experts.CUDA_ROUTES
    assert launch_experts.takes_cuda(routed(routes=first)) and not launch_experts.takes_cuda(routed(routes=first - 1))
    few = dict(experts=1, groups=1, out_features=256)
    assert not launch_experts.takes_cuda(routed(routes=launch_experts.ROUTE_LIMIT, **few | dict(out_features=1 << 20))), "no plan"
    assert not launch_experts.takes_cuda(routed(routes=1000, **few)), "8 tiles for 132 multiprocessors"
    for changes in (dict(itemsize=4), *[dict(arch=arch) for arch in ("sm_80", "sm_89", "sm_100", "sm_120")]):
        assert not launch_experts.takes_cuda(routed(**changes)), changes
    assert not launch_experts.takes_cuda(routed(routes=0, experts=0))


def test_experts_tiles_stay_as_they_were(monkeypatch):
    cases = [routed(**c) for c in (dict(), dict(slots=1, mixed=False), dict(rank=0), dict(rank=512), dict(routes=300))]
    chosen = [launch_experts.linear(p, transposed) for p in cases for transposed in (False, True)]
    assert [c.cuda for c in chosen] == [True] * 8 + [False] * 2
    assert all(c.rank_block in (16, 32, 64, 128) for c in chosen), "the pieces of r that the kernel has stages for"
    assert not any(launch_experts.gate_up(p).cuda for p in cases), "which holds gate and up in one program"
    monkeypatch.setattr(launch_experts, "takes_cuda", lambda p: False)
    without = [launch_experts.linear(p, transposed) for p in cases for transposed in (False, True)]
    assert [replace(c, cuda=False) for c in chosen] == without


def test_h1_is_stored_where_its_product_is_csrcs(monkeypatch):
    """Asked ahead of the product, so by what decides there: the choice, a plan, the kernel, the layouts of W and of the factors."""
    monkeypatch.setattr(common, "facts", lambda t: ("sm_90", 132))
    monkeypatch.setattr(linear_cuda, "loaded", lambda *args: object())
    launched = lambda *args: pytest.fail("a copy of a factor")  # noqa: E731
    monkeypatch.setattr(expert_launch, "in_dtype", launched)
    ids = torch.zeros(1, dtype=torch.int64)

    def asked(routes=1024, weight=None, rank=16, plan=ids, dtype=BF16, factor_dtype=None, adapters=ids):
        to = SimpleNamespace(routes=routes, experts=16, slots=2, adapters=adapters, top_k=8, plan=plan)
        x, weight = torch.empty(8, 64, dtype=dtype), torch.empty(16, 2048, 64, dtype=dtype) if weight is None else weight
        a = torch.empty(2, 16, rank, 64, dtype=factor_dtype or dtype)
        b = torch.empty(2, 16, 2048, rank, dtype=factor_dtype or dtype)
        bias = torch.empty(16, 2048)
        found = [expert_launch.by_cuda("expert_mlp", x, weight, *pair, to, bias) for pair in ((a, b), (None, None))]
        return tuple(found)

    assert asked() == asked(adapters=None) == asked(routes=1 << 15) == asked(factor_dtype=torch.float32) == (True, True)
    assert asked(weight=torch.empty(16, 2, 1024, 64, dtype=BF16)) == (True, True)
    assert asked(rank=12) == asked(rank=12, factor_dtype=torch.float32) == (False, True)
    interleaved = torch.empty(16, 1024, 2, 64, dtype=BF16).transpose(1, 2)
    assert asked(weight=interleaved) == (True, True), "rows that start at multiples of 16 bytes"
    gaps = torch.empty(16, 2048, 64, 2, dtype=BF16)[..., 0]
    for changes in (dict(weight=gaps), dict(plan=None), dict(routes=40), dict(dtype=torch.float16), dict(dtype=torch.float32)):
        assert asked(**changes) == (False, False), changes
    monkeypatch.setattr(linear_cuda, "loaded", lambda *args: None)
    assert asked() == (False, False)


# --- the layouts ---


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


def layouts(**changes) -> dict:
    return dict(
        x=empty(130, 2, 64), w=empty(3, 2, 24, 64), h=empty(2, 130, 2, 16, dtype=torch.float32), b=empty(4, 3, 2, 24, 16),
        bias=empty(3, 2, 24), out=empty(130, 2, 24), sizes=None,
    ) | changes  # fmt: skip


TAKEN = [
    dict(),
    dict(h=None, b=None, bias=None),
    dict(x=empty(130, 2, 80)[..., 8:72]),
    dict(x=empty(2, 130, 64).transpose(0, 1)),
    dict(x=empty(130, 1, 64)),
    dict(x=empty(130, 1, 64).expand(130, 2, 64)),
    dict(x=empty(1, 1, 65)[..., :64]),  # axes of size 1 have no stride that counts
    dict(bias=empty(3, 2, 24, dtype=torch.float32)),
    dict(out=empty(130, 2, 24, dtype=torch.float32)),
    dict(out=empty(130, 1, 96), sizes=(8, 24, 0, 64), w=empty(1, 1, 96, 64), b=empty(4, 1, 1, 96, 16), bias=None),
    dict(w=empty(3, 2, 64, 24).transpose(2, 3), b=empty(4, 3, 2, 16, 24).transpose(3, 4)),  # the gradient of x
    dict(w=empty(3, 2, 32, 128)[:, :, 8:, 64:]),
    dict(b=empty(1024, 1, 1, 24, 16)),
    dict(w=empty(1024, 1, 24, 64), b=empty(4, 1, 1, 24, 16), bias=None),
]
LEFT = [
    *[{name: layouts()[name].half()} for name in ("x", "w", "b", "out")],
    dict(x=empty(130, 2, 64, dtype=torch.float32)),
    dict(x=empty(130, 2, 80)[..., 1:65]),  # rows that start at 2 bytes
    dict(x=empty(130, 2, 65)[..., :64]),
    dict(x=empty(130, 64, 2).transpose(1, 2)),
    dict(x=empty(130, 2, 64)[..., :0], w=empty(3, 2, 24, 64)[..., :0]),  # no tensor map has an axis of size 0
    dict(x=empty(130, 2, 64)[..., :60], w=empty(3, 2, 24, 64)[..., :60]),
    dict(x=torch.empty_strided((130, 2, 64), (1 << 31, 64, 1), dtype=BF16, device="meta")),  # a row's place in 32 bits
    dict(w=empty(3, 2, 24, 72)[..., 4:68]),
    dict(w=empty(3, 2, 24, 65)[..., :64]),
    dict(w=empty(3, 2, 24, 128)[..., ::2]),  # no unit stride, along D or N
    dict(w=empty(3, 2, 48, 128)[:, :, ::2, ::2]),
    dict(w=empty(3, 2, 64, 25)[..., :24].transpose(2, 3), h=None, b=None),
    dict(w=empty(1, 2, 24, 64).expand(3, 2, 24, 64)),  # stride 0
    dict(w=empty(3, 2, 1, 64).expand(3, 2, 24, 64)),
    dict(w=empty(1025, 2, 24, 64), h=None, b=None, bias=None),  # experts
    dict(b=empty(1025, 1, 1, 24, 16)),  # slots
    dict(b=empty(4, 3, 2, 24, 16)[..., :12], h=empty(2, 130, 2, 12, dtype=torch.float32)),
    dict(b=empty(4, 3, 2, 24, 20)[..., 2:18]),
    dict(b=empty(4, 3, 2, 24, 20)[..., :16]),
    dict(b=empty(4, 3, 2, 16, 24).transpose(3, 4)),  # W along D, B along N
    dict(w=empty(3, 2, 64, 24).transpose(2, 3)),  # the other way round
    dict(x=empty(1, 2, 65)[..., :64]),
    dict(h=empty(2, 130, 2, 32, dtype=torch.float32)[..., :16]),
    dict(bias=empty(3, 2, 48)[..., ::2]),
    dict(out=empty(130, 2, 32)[..., 4:28]),
    dict(out=empty(130, 2, 25)[..., :24]),
    dict(out=empty(130, 2, 20), w=empty(3, 2, 20, 64), b=empty(4, 3, 2, 20, 16), bias=None),
    dict(out=empty(130, 1, 24), sizes=(4, 20)),
    dict(out=empty(130, 1, 72), sizes=(8,) * 9),
]


@pytest.mark.parametrize("change", TAKEN, ids=range(len(TAKEN)))
def test_layouts_it_takes(change):
    assert linear_cuda.fits(**layouts(**change))


@pytest.mark.parametrize("change", LEFT, ids=range(len(LEFT)))
def test_layouts_it_leaves_to_triton(change):
    assert not linear_cuda.fits(**layouts(**change))


# --- what the kernel is given ---


class Maps:
    """libcuda as far as tensor maps go. `calls`: what was asked; words: what a map holds behind its first word."""

    def __init__(self, words=lambda address: range(1, 16), first=lambda address: address):
        self.calls, self.words, self.first, self.code, self.dtypes = [], words, first, 0, set()

    def cuTensorMapEncodeTiled(self, to, dtype, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill):
        assert to % 64 == 0 and [type(v)._type_ for v in (sizes, strides, box, steps)] == [ctypes.c_uint64] * 2 + [ctypes.c_uint32] * 2
        assert (interleave, swizzle, promotion, fill) == (0, 3, 3, 0), "rows of 128 bytes swizzled, zeros outside"
        assert len(sizes) == len(box) == rank and len(strides) == rank - 1 and list(steps) == [1] * rank
        self.calls.append((address, list(sizes), list(strides), list(box)))
        self.dtypes.add(dtype)
        ctypes.memmove(to, struct.pack("@16Q", self.first(address), *self.words(address)), 128)
        return self.code

    def cuGetErrorString(self, code, out):
        out._obj.value = b"made up"
        return 0


@pytest.fixture
def maps(monkeypatch):
    found = Maps()
    monkeypatch.setattr(driver, "library", lambda: found)
    return found


@pytest.mark.parametrize(
    "w, along_n, sizes, strides, box",
    [
        (empty(3, 2, 24, 64), False, [64, 24, 2, 3], [128, 3072, 6144], [64, 128, 1, 1]),
        (empty(3, 2, 32, 128)[:, :, 8:, 64:], False, [64, 24, 2, 3], [256, 8192, 16384], [64, 128, 1, 1]),
        (empty(2, 3, 24, 64).transpose(0, 1), False, [64, 24, 2, 3], [128, 9216, 3072], [64, 128, 1, 1]),
        (empty(3, 2, 64, 24).transpose(2, 3), True, [24, 64, 2, 3], [48, 3072, 6144], [64, 64, 1, 1]),
        # an axis of size 1 has any stride, 1 and 0 too: that of the axis ahead stands in, which is a multiple of 16 bytes
        (torch.empty_strided((1, 1, 24, 64), (0, 1, 64, 1), dtype=BF16), False, [64, 24, 1, 1], [128, 128, 128], [64, 128, 1, 1]),
        (torch.empty_strided((3, 1, 1, 64), (4096, 1, 1, 1), dtype=BF16), False, [64, 1, 1, 3], [16, 16, 8192], [64, 128, 1, 1]),
        (empty(1, 2, 64, 8).transpose(2, 3), True, [8, 64, 2, 1], [16, 1024, 1024], [64, 64, 1, 1]),
    ],
    ids=range(7),
)
def test_the_tensor_map_of_a_weight(maps, w, along_n, sizes, strides, box):
    """Axes (d, n, group, expert), or (n, d, …): sizes in elements, strides in bytes."""
    assert linear_cuda.transposed(w) == along_n
    words = linear_cuda._map_of(w, along_n, 256)
    assert maps.calls == [(w.data_ptr(), sizes, strides, box)] and maps.dtypes == {9}, "bf16"
    assert words == [w.data_ptr(), *range(1, 16)]


def test_the_tensor_map_of_an_e4m3_weight(maps):
    """Its strides are its elements' number, its rows of 128 bytes twice as many elements; bytes as far as TMA is concerned."""
    w = torch.empty(1, 3, 40, 256, dtype=torch.float8_e4m3fn)[..., 16:176]
    driver.tensor_map(w, (3, 2, 1, 0), (128, 32, 1, 1))
    assert maps.calls == [(w.data_ptr(), [160, 40, 3, 1], [256, 10240, 10240], [128, 32, 1, 1])] and maps.dtypes == {0}


def test_an_address_that_the_driver_refuses_is_an_error(maps):
    maps.code = 1
    with pytest.raises(RuntimeError, match=r"a tensor map: made up \(CUDA error 1\)"):
        linear_cuda._map_of(empty(1, 1, 24, 64), False, 64)


def test_maps_are_used_where_they_follow_a_pointer(monkeypatch):
    """A prepared call fills in a map's first word alone."""
    for library, wanted in (
        (Maps(), True),
        (SimpleNamespace(), False),  # before CUDA 12
        (Maps(words=lambda address: [address >> 31, *range(2, 16)]), False),
        (Maps(first=lambda address: address | 1 << 31), False),  # right for the second address alone
        (Maps(first=lambda address: address & ~(1 << 31)), False),
    ):
        monkeypatch.setattr(driver, "library", lambda library=library: library)
        assert driver.has_tensor_maps.__wrapped__() == wanted


class Params(ctypes.Structure):
    """struct Params of csrc/linear.cu."""

    _fields_ = [
        *[(n, ctypes.c_uint64 * 16) for n in ("map", "x_map", "x_tail", "b_map")],
        *[(n, ctypes.c_void_p) for n in "x h b bias out ids plan ranks weights".split()],
        *[(n, ctypes.c_int64) for n in "ids_stride x_g h_g b_l b_e b_g b_n c_e c_g o_t o_g weights_stride".split()],
        *[(n, ctypes.c_uint32) for n in "x_t h_t rows slots features columns rank experts x_div h_div id_div groups".split()],
        *[(n, ctypes.c_uint32) for n in "sum_groups h_groups rank_block mode tile_group flags slices".split()],
        ("starts", ctypes.c_uint32 * 9),
        ("taken", ctypes.c_void_p),
        ("tail", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 7),
    ]


@pytest.fixture
def launched(maps, monkeypatch):
    """launched(**changes) → (the struct that a launch of `layouts` with them has, the function's name, the launch's keywords)."""
    seen = []

    def constant(name, what):
        return {"available": 1, "shared_bytes_256": 200_000, "shared_bytes_128": 190_000, "shared_bytes_64": 160_000}[what]

    def launch(function, grid, threads, layout, values, **kw):
        seen.append((Params.from_buffer_copy(driver.pack(layout, values)[0]), function, dict(grid=grid, threads=threads, **kw)))

    module = SimpleNamespace(constant=constant, function=lambda op, name, shared: (name, shared))
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: module)
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(driver, "has_tensor_maps", lambda: True)
    monkeypatch.setattr(importlib.import_module("grouped_lora_ops.kernels.halves"), "launch", lambda *args: None)
    defaults = dict(
        x_div=1, h_div=1, ids=torch.zeros(130, dtype=torch.int32), id_div=1, plan=None, ranks=None, scalings=None, weights=None,
        staged=False, mode=linear_cuda.ROWS, rank_block=16, tile_group=8, programs=7, overlap=True, columns=256,
    )  # fmt: skip
    order = "x w h b bias out ids divs plan ranks scalings weights staged sizes".split()

    def run(**changes):
        given = {**defaults, **layouts(), **changes}
        given["divs"] = tuple(given[name] for name in ("x_div", "h_div", "id_div"))
        tiling = linear_cuda.Tiling(*[given[name] for name in linear_cuda.Tiling._fields])
        assert linear_cuda.product("linear", *[given[name] for name in order], tiling)
        return seen[-1]

    return run


def test_the_struct_that_a_launch_has(launched, maps):
    given = layouts(b=empty(4, 3, 2, 24, 16))
    p, function, how = launched(**given)
    assert function == ("linear_bf16_256", 200_000)
    assert how == dict(grid=(7, 1, 1), threads=384, shared=200_000, pdl=True)
    for name in ("x", "b", "bias", "out"):
        assert getattr(p, name) == given[name].data_ptr(), name
    assert p.map[0] == given["w"].data_ptr() and p.x_map[0] == given["x"].data_ptr() and list(p.map[1:]) == [*range(1, 16)]
    of_b = (given["b"].data_ptr(), [16, 48, 3, 4], [32, 1536, 4608], [64, 128, 1, 1])
    assert maps.calls[1:] == [of_b, *[(given["x"].data_ptr(), [64, 130, 2, 1], [256, 128, 128], [64, rows, 1, 1]) for rows in (128, 8)]]
    assert p.b_map[0] == given["b"].data_ptr()
    assert p.x_tail[0] == given["x"].data_ptr() and p.tail == 8, "the last two rows have a box of eight"
    assert p.h and (p.plan, p.ranks, p.weights) == (None, None, None)
    assert (p.x_t, p.x_g, p.h_t, p.h_g) == (256, 64, 2 * 2 * 32, 32), "a row of h: its high parts, then its low ones"
    assert (p.b_l, p.b_e, p.b_g, p.b_n, p.c_e, p.c_g, p.o_t, p.o_g) == (2304, 768, 384, 16, 48, 24, 48, 24)
    assert (p.rows, p.slots, p.features, p.columns, p.rank, p.experts, p.groups) == (130, 4, 64, 24, 16, 3, 2)
    assert p.flags == linear_cuda.OVERLAP | linear_cuda.IN_ORDER | linear_cuda.BOXES and p.slices == 0


def test_flags_strides_and_slices(launched, maps):
    ids = torch.zeros(260, dtype=torch.int64)[::2]
    given = dict(bias=empty(3, 1, 24, dtype=torch.float32), out=empty(130, 1, 24, dtype=torch.float32), weights=torch.ones(130))
    p, _, how = launched(x=empty(65, 1, 64), x_div=2, ids=ids, staged=True, overlap=False, **given)
    F = linear_cuda
    assert p.flags == F.IDS64 | F.BIAS32 | F.OUT32 | F.WEIGHTS32 | F.STAGED | F.BOXES, "rows of x that several routes share are gathered"
    assert (p.ids_stride, p.weights_stride, p.x_g, p.o_g, p.c_g, p.x_div, p.sum_groups) == (2, 1, 0, 0, 0, 2, 2)
    assert len(maps.calls) == 2 and list(p.x_map) == list(p.x_tail) == [0] * 16 and not how["pdl"], "maps of W and B"
    for rows, boxes in ((128, [128]), (100, [104]), (256, [128])):
        maps.calls.clear()
        p = launched(x=empty(rows, 2, 64), h=empty(rows, 2, 2, 16), out=empty(rows, 2, 24), ids=ids[:1].expand(rows))[0]
        assert [call[3][1] for call in maps.calls[2:]] == boxes and bool(p.x_map[0]) == (rows >= 128) and bool(p.x_tail[0]) == (rows % 128 > 0)
    p, _, how = launched(h=None, b=None, ids=None)
    assert p.flags == F.IN_ORDER and (p.h, p.b, p.ids, p.slots, p.rank) == (None, None, None, 0, 0) and not how["pdl"], "nothing ahead"
    for mode, experts in ((F.SORTED, ""), (F.EXPERT, "_experts")):
        p, function, _ = launched(mode=mode, plan=torch.zeros(200, dtype=torch.int32))
        assert p.flags == F.OVERLAP | F.BOXES and function == (f"linear_bf16_256{experts}", 200_000)
        assert bool(p.taken) == bool(experts), "what blocks take their tiles from"
    assert launched(x=empty(1, 2, 64).expand(130, 2, 64))[0].flags == F.OVERLAP | F.BOXES, "a map has no stride of 0"
    p, function, _ = launched(w=empty(3, 2, 64, 24).transpose(2, 3), b=empty(4, 3, 2, 16, 24).transpose(3, 4))
    assert function == ("linear_bf16_256_transposed", 200_000) and p.b_n == 24, "that of r"
    assert launched(columns=128)[1] == ("linear_bf16_128", 190_000)
    assert launched(columns=64, w=empty(3, 2, 64, 24).transpose(2, 3))[1][0] == "linear_bf16_64_transposed"
    sliced = dict(out=empty(130, 1, 96), w=empty(1, 1, 96, 64), b=empty(4, 1, 1, 96, 16), bias=None)
    p = launched(sizes=(8, 24, 0, 64), **sliced)[0]
    assert p.slices == 4 and list(p.starts) == [0, 8, 32, 32, 96, 0, 0, 0, 0]


def test_numbers_are_those_of_the_source():
    text = (_builds.sources(cuda.PACKAGE) / "linear.cu").read_text()
    found = {}
    for line in re.findall(r"^static constexpr u32 (.*?);", text, re.MULTILINE):
        for name, value in re.findall(r"(\w+) = ([^,]+)", line):
            found[name] = eval(value, {}, found)  # numbers, sums and products
    for name in "THREADS MAX_SLICES MAX_SLOTS MAX_EXPERTS ROWS EXPERT IDS64 BIAS32 STAGED WEIGHTS32 OVERLAP IN_ORDER OUT32 BOXES".split():
        assert found[name] == getattr(linear_cuda, name), name
    assert (found["BM"], found["BK"]) == (linear_cuda.BOX_M, linear_cuda.BOX_K)
    assert f"sizeof(Params) == {ctypes.sizeof(Params)}" in text
