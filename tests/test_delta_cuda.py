"""`delta` by csrc/delta.cu as far as its parameters: without a GPU, a stand-in computes from what the kernel's struct says."""

from __future__ import annotations

import ctypes
import importlib

import fake_gpu
import pytest
import torch
from cases import assert_equal, build, want_delta
from test_cuda import House

from grouped_lora_ops import cuda, driver, launch, reference
from grouped_lora_ops.ops import common


class DeltaParams(ctypes.Structure):
    """struct Params of csrc/delta.cu."""

    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("x", "a", "b", "base", "out", "ids", "ranks", "scalings")],
        *[(n, ctypes.c_int64) for n in "ids_stride x_t x_g a_l a_g a_r b_l b_g b_n p_t p_g o_t o_g".split()],
        *[
            (n, ctypes.c_uint32)
            for n in "tokens slots features columns rank chunk chunks merged spread flags slices".split()
        ],
        ("starts", ctypes.c_uint32 * 9),
    ]


def compute_delta(gpu, launch, parameters):
    """out = base + delta (or only rows with an adapter, without COPY), read and written through the struct's addresses and strides."""
    p = DeltaParams.from_buffer_copy(ctypes.string_at(parameters[0], ctypes.sizeof(DeltaParams)))
    groups = launch.grid[2] // p.spread << p.merged

    def view(address, shape, strides, offset=0):
        t = gpu.tensors[address]
        return t.as_strided(shape, strides, t.storage_offset() + offset)

    starts = list(p.starts[: p.slices + 1])
    assert not p.merged or len({b - a for a, b in zip(starts, starts[1:])}) < 2, "a tile has its first group's columns"
    ids = view(p.ids, (p.tokens,), (p.ids_stride,)).long()
    assert (gpu.tensors[p.ids].dtype == torch.int64) == bool(p.flags & 1)
    for g in range(groups):
        n, columns, whole = (starts[g], starts[g + 1] - starts[g], 0) if p.slices else (0, p.columns, g)
        x = view(p.x, (p.tokens, p.features), (p.x_t, 1), g * p.x_g)
        a = view(p.a, (p.slots, p.rank, p.features), (p.a_l, p.a_r, 1), g * p.a_g)
        b = view(p.b, (p.slots, columns, p.rank), (p.b_l, p.b_n, 1), whole * p.b_g + n * p.b_n)
        out = view(p.out, (p.tokens, columns), (p.o_t, 1), whole * p.o_g + n)
        base = view(p.base, (p.tokens, columns), (p.p_t, 1), whole * p.p_g + n) if p.base else None
        ranks = gpu.tensors[p.ranks] if p.ranks else None
        scalings = gpu.tensors[p.scalings]
        y = reference.delta(
            x.double(), a.double(), b.double(), ids, scalings, base=None if base is None else base.double(), ranks=ranks
        )
        rows = torch.ones_like(ids, dtype=torch.bool) if p.flags & 2 else ids >= 0
        out[rows] = y[rows].to(out.dtype)


@pytest.fixture
def delta_gpu(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the GPU's own kernel is tested there")
    pytest.importorskip("triton")
    pytest.importorskip("grouped_lora_ops.ops.delta_cuda")
    house = House(tmp_path, monkeypatch)
    (house.csrc / "delta.cu").write_text("")
    gpu = fake_gpu.install(monkeypatch, "C" if driver._launcher else "ctypes")
    house.driver.cuLaunchKernelEx = gpu.cuLaunchKernelEx
    house.driver.cuModuleGetFunction = lambda out, module, name: setattr(out._obj, "value", 0xF1) or 0
    house.driver.cuModuleGetGlobal_v2 = lambda address, size, module, name: setattr(address._obj, "value", 0xB0) or 0
    monkeypatch.setattr(driver, "library", lambda: house.driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(common, "facts", lambda t: ("sm_90", 132))
    module, launch = cuda.module, cuda.launch
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: module(op, stem, 0))

    def watched(function, grid, threads, layout, values, **kw):
        gpu.tensors.update({t.data_ptr(): t for t in values if isinstance(t, torch.Tensor)})
        gpu.first += 1
        launch(function, grid, threads, layout, values, **kw)

    gpu.first = 0
    gpu.run_kernel = lambda seen, parameters: compute_delta(gpu, seen, parameters)
    monkeypatch.setattr(cuda, "launch", watched)
    return gpu


@pytest.mark.parametrize("layout", ["dense", "slice"])
@pytest.mark.parametrize(
    "form", ["plain", "wo_a", "wo_a with an A per group", "shared input", "slices", "slices of grouped x"]
)
def test_delta_hands_its_cuda_kernel_the_right_memory(delta_gpu, form, layout):
    ops = importlib.import_module("grouped_lora_ops.ops.delta")
    id_dtype = torch.int64 if layout == "slice" else torch.int32
    for seed in range(3):
        c = build(
            form,
            tokens=3,
            features=1024,
            out=32,
            rank=8,
            sizes=[24, 16],
            ranks=True,
            layout=layout,
            seed=seed,
            id_dtype=id_dtype,
        )
        want = want_delta(c)
        assert_equal(ops._cuda(*c.factors, c.base, c.out_sizes, c.ranks), want, f"call {seed}")
        assert_equal(
            ops._cuda(*c.factors, None, c.out_sizes, c.ranks), want_delta(c, base=False), f"without base, call {seed}"
        )
        ops._cuda_(c.base, *c.factors, c.out_sizes, c.ranks)
        assert_equal(c.base, want, f"in place, call {seed}")
    assert delta_gpu.first == 3 and len(delta_gpu.launches) == 9, "each signature goes the ordinary way once"


@pytest.mark.parametrize("sizes", [[32] * 8, [24, 152, *[24] * 6]], ids=["even", "uneven"])
def test_groups_that_share_a_tile_are_equally_wide(delta_gpu, sizes):
    ops = importlib.import_module("grouped_lora_ops.ops.delta")
    c = build("slices of grouped x", tokens=8, slots=4, groups=8, features=1024, rank=8, sizes=sizes)
    for _ in range(2):
        assert_equal(ops._cuda(*c.factors, c.base, c.out_sizes), want_delta(c))
    assert delta_gpu.first == 1 and len(delta_gpu.launches) == 2


# tokens, groups, D, N, rank, slots, shared A; what an H200 was fastest with (bench/NOTES.md): (clusters that share N, whether
# groups share a tile; by the kernel of three blocks a multiprocessor), "early" or "in turn" for two launches of Triton's
FEW = {
    "plain r16 T1": ((1, 1, 4096, 4096, 16, 8, True), (4, False)),
    "plain N8192 T1": ((1, 1, 4096, 8192, 16, 8, True), (8, False)),
    "plain N11264 T8": ((8, 1, 4096, 11264, 16, 8, True), "in turn"),
    "gate_up r16 T8": ((8, 2, 4096, 14336, 16, 8, False), "in turn"),
    "gate_up r16 T2": ((2, 2, 4096, 14336, 16, 8, False), "early"),
    "wo_a r16 T4": ((4, 4, 4096, 1024, 16, 8, True), (1, False)),
    "wo_a r16 T8": ((8, 4, 4096, 1024, 16, 8, True), (1, False, "crowded")),
    "wo_a r16 T32": ((32, 4, 4096, 1024, 16, 8, True), (1, False, "crowded")),
    "wo_a r16 S1 T32": ((32, 4, 4096, 1024, 16, 1, True), (1, False)),
    "wo_a_g8 r16 T4": ((4, 8, 4096, 1024, 16, 8, True), (1, False, "crowded")),
    "wo_a_g8 r16 T8": ((8, 8, 4096, 1024, 16, 8, True), "in turn"),
    "qkv r16 T8": ((8, 3, 4096, 4096, 16, 8, False), (2, False, "crowded")),
    "plain r16 T8": ((8, 1, 4096, 4096, 16, 8, True), (2, False, "crowded")),
    "plain r16 S64 T16": ((16, 1, 4096, 4096, 16, 64, True), (2, False, "crowded")),
    "wo_a r64 T1": ((1, 4, 4096, 1024, 64, 8, True), (1, False)),
    "wo_a r64 T2": ((2, 4, 4096, 1024, 64, 8, True), "early"),
    "wo_a r64 T4": ((4, 4, 4096, 1024, 64, 8, True), "in turn"),
    "wo_a r64 S1 T4": ((4, 4, 4096, 1024, 64, 1, True), (1, False)),
    "plain r16 T16": ((16, 1, 4096, 4096, 16, 8, True), (2, False, "crowded")),
    "plain r16 T32": ((32, 1, 4096, 4096, 16, 8, True), "early"),
    "plain r16 S64 T64": ((64, 1, 4096, 4096, 16, 64, True), "in turn"),
    "wo_a_g8 r16 T32": ((32, 8, 4096, 1024, 16, 8, True), "in turn"),
}


@pytest.mark.parametrize("point", FEW)
def test_few_rows_go_where_they_were_fastest(point):
    sizes, want = FEW[point]
    c = launch.delta(launch.Problem("sm_90", 132, 2, *sizes))
    how = () if c.cuda is None else (c.cuda.spread, c.cuda.merged > 1, *(["crowded"] if c.cuda.blocks > 1 else []))
    assert (how or ("early" if c.shrink.early else "in turn")) == want


def test_a_longer_d_leaves_room_for_fewer_clusters():
    """Its chunks take two stages of shared memory, with which two blocks of that kernel fit a multiprocessor, not three."""
    p = launch.Problem("sm_90", 132, 2, 8, 4, 4096, 1024, 16, 8, True)
    assert launch.delta(p).cuda.blocks == 3 and launch.delta(launch.replace(p, in_features=7168)).cuda is None
