"""csrc/linear.cu on the CPU, a fiber a thread (hopper_on_cpu.h): exact for small integers, whatever runs first.

What ops/linear_cuda.py packs drives it. Operands end where forbidden memory begins, and NaN lies wherever nothing may be read.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path

import emulation
import pytest
import torch
from cases import FORMS, NAN, assert_equal, place, rounded
from expert_cases import FACTORS, build_routes
from linear_cases import case, scaled_case, spread, want_grads, want_linear

from grouped_lora_ops import _checks, cuda, driver, launch, launch_experts, launch_linear, reference
from grouped_lora_ops.kernels import halves as kernels
from grouped_lora_ops.ops import common, expert_grads, expert_launch, linear_cuda
from grouped_lora_ops.reference.expert_delta import forms

linear_op = importlib.import_module("grouped_lora_ops.ops.linear")  # not the function

ROOT = Path(__file__).parents[1]
PAGE = mmap.PAGESIZE
MAP = 0x70616D20726F736E  # as in hopper_on_cpu.h
H_AT, SUMS_AT = 65, 97  # places of h, and of sum_groups and h_groups, among the values of struct Params
BF16 = torch.bfloat16


# --- the source on the CPU ---


def translated(change=lambda text: text, stem="linear") -> str:
    """csrc/<stem>.cu as C++. What is no assembly in hopper.cuh and a mistake could hide in, the descriptors, comes from there."""
    text, hopper = (change((ROOT / "csrc" / name).read_text()) for name in (f"{stem}.cu", "hopper.cuh"))
    lines = re.findall(r"^.*(?:u64 [kn]_major\(|u32 K_MAJOR_16).*$", hopper, re.MULTILINE)
    assert len(lines) == 3
    head = "\n".join([f'#include "{ROOT / "tests/hopper_on_cpu.h"}"', *lines])
    # the header's templates use the constants' types only, so that what it includes may stand in front
    text = emulation.replaced(
        text,
        (r'#include "hopper.cuh"', head, 1),
        (r"extern __shared__ u8 memory\[\];", "u8 *memory = cpu::now->block->memory;", 1),
    )
    run = (
        'extern "C" const char *run_%s(const Params *p, u32 blocks, u32 threads, u32 shared, u32 seed, void *ahead, '
        "size_t bytes) { return cpu::run_grid(blocks, threads, shared, seed, ahead, bytes, [=] { %s(*p); }); }\n"
    )
    return text + "".join([run % (name, name) for name in kernels_of(text)])


def kernels_of(text: str) -> list[str]:
    return re.findall(r"^KERNEL\((\w+),", text, re.MULTILINE)


def compiled(folder: Path, change=lambda text: text, stem="linear"):
    text = translated(change, stem)
    return emulation.compiled(folder, stem, text, kernels_of(text))


def compiled_once(tmp_path_factory, stem):
    emulation.needs_compiler()
    return compiled(tmp_path_factory.mktemp(f"{stem}_on_cpu"), stem=stem)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compiled_once(tmp_path_factory, "linear")


def map_words(t, order, box, pad=0):
    """What driver.tensor_map makes, in hopper_on_cpu.h's words, and what cuTensorMapEncodeTiled asks for."""
    strides, last = [], 16
    for axis in order[1:]:
        last = t.element_size() * t.stride(axis) if t.shape[axis] > 1 else last
        strides.append(last)
    more = max(0, pad - len(order))
    sizes = [t.shape[axis] for axis in order] + [1] * more
    strides += [last] * more
    box = [*box, *[1] * more]
    assert len(sizes) == 4 and t.data_ptr() % 16 == 0 and t.dtype in (BF16, torch.float8_e4m3fn)
    assert t.stride(order[0]) == 1 or t.shape[order[0]] == 1
    assert all(0 < size <= 1 << 32 for size in sizes) and all(0 < n <= 256 for n in box) and box[0] * t.element_size() <= 128
    assert all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in strides)
    return [t.data_ptr(), *sizes, *strides, *box, MAP, t.element_size(), 0, 0]


class OnCpu:
    """linear_cuda's module and launches, on CPU tensors."""

    stem = "linear"

    def __init__(self, library, monkeypatch):
        self.library, self.seed, self.launches, self.pages = library, 1, [], []
        libc = ctypes.CDLL(None)
        libc.mmap.restype, libc.mmap.argtypes = (
            ctypes.c_void_p,
            [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
        )
        libc.mprotect.argtypes, libc.munmap.argtypes = (
            [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
            [ctypes.c_void_p, ctypes.c_size_t],
        )
        self.libc = libc
        monkeypatch.setattr(cuda, "module", lambda op, stem, device: self if stem == self.stem else None)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(driver, "has_tensor_maps", lambda: True)
        monkeypatch.setattr(driver, "tensor_map", map_words)
        monkeypatch.setattr(
            driver,
            "empty",
            lambda shape, dtype, device: self.edge(
                torch.full(tuple(shape), NAN if dtype.is_floating_point else -77, dtype=dtype)
            ),
        )
        monkeypatch.setattr(common, "INTERPRETER", ("sm_80", 2))  # the experts' kernel has so many blocks
        halves = kernels.halves
        monkeypatch.setattr(kernels, "halves", lambda *args, **more: halves(*args[:7], False, **more))  # the interpreter has no overlap

    def constant(self, op, name):
        return ctypes.c_int.in_dll(self.library, name).value

    def function(self, op, name, shared):
        return name, shared

    def launch(self, function, grid, threads, layout, values, *, shared, pdl):
        name, room = function
        assert threads == linear_cuda.THREADS and room == shared <= 227 << 10 and grid[1:] == (1, 1)
        data, _ = driver.pack(layout, values)
        h = values[H_AT]
        assert len(data) == 832 and (h is None or int.from_bytes(data[520:528], "little") == h.data_ptr())
        self.launches.append((name, values))
        self.last = name
        ahead = (0, 0) if h is None or not pdl else (h.data_ptr(), 2 * h.numel())
        self.run(name, data, grid[0], threads, shared, ahead)

    def run(self, name, data, blocks, threads, shared, ahead):
        address, length = ctypes.c_void_p(ahead[0]), ctypes.c_size_t(ahead[1])
        run = getattr(self.library, f"run_{name}")
        wrong = run(ctypes.c_char_p(data), blocks, threads, shared, self.seed, address, length)
        self.seed += 1
        assert wrong is None, f"{wrong.decode()}, seed {self.seed - 1}"

    def edge(self, t):
        """t with its strides, in memory of its own behind which nothing may be read; NaN between its elements."""
        if t is None or t.numel() == 0:
            return t
        span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        used = span if t.dtype != torch.float8_e4m3fn else -(-span // 16) * 16  # the last row need not end at a multiple of 16
        used *= t.element_size()
        length = (used + PAGE - 1) // PAGE * PAGE
        base = self.libc.mmap(
            None, length + PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert self.libc.mprotect(base + length, PAGE, 0) == 0
        self.pages.append((base, length + PAGE))
        flat = torch.frombuffer((ctypes.c_uint8 * used).from_address(base + length - used), dtype=t.dtype)
        if t.dtype.is_floating_point:
            flat.fill_(NAN)
        return flat.as_strided(t.shape, t.stride()).copy_(t)

    def close(self):
        for page in self.pages:
            self.libc.munmap(*page)


@pytest.fixture
def on_cpu(library, monkeypatch):
    made = OnCpu(library, monkeypatch)
    yield made
    made.close()


# --- dense ---


def h_of(c, generator, chunks):
    """h in `chunks` pieces; NaN in rows without an adapter and past an adapter's rank."""
    h = common.grouped(reference.shrink(c.x, c.a, c.ids, ranks=c.ranks), 3)
    slots, rank = c.a.shape[0], h.shape[2]
    there = (c.ids >= 0) & (c.ids < slots)
    ranks = torch.full((slots,), rank) if c.ranks is None else c.ranks.long()
    live = torch.where(there, ranks[c.ids.long().clamp(0, slots - 1)], 0)
    return in_pieces(h, chunks, generator).masked_fill(torch.arange(rank) >= live[:, None, None], NAN)


def in_pieces(h, chunks, generator):
    parts = [torch.randint(-99, 100, h.shape, generator=generator).float() for _ in range(chunks - 1)]
    return torch.stack([*parts, h - sum(parts, torch.zeros_like(h))])


def room_for(on_cpu, out, dtype=BF16):
    """(a view of out's shape, whether nothing was written beside it)"""
    room = on_cpu.edge(torch.full((*out.shape[:-1], out.shape[-1] + 16), NAN, dtype=dtype))
    columns = slice(8, 8 + out.shape[-1])

    def untouched():
        edges = room.clone()
        edges[..., columns] = NAN
        return bool(edges.isnan().all())

    return room[..., columns], untouched


def run_dense(on_cpu, c, weight, bias, h, sort=False, programs=2, tile_group=2, pdl=True, columns=256):
    """y, by `linear`'s way to the kernel from the shrink on."""
    x, w, b = common.grouped(c.x, 3), linear_op._outer(weight, 3), None if h is None else common.grouped(c.b, 4)
    out, untouched = room_for(on_cpu, common.grouped(c.base, 3))
    slots, sizes = c.a.shape[0], None if c.out_sizes is None else tuple(c.out_sizes)
    p = launch.Problem(
        "sm_90", 132, 2, x.shape[0], out.shape[1], x.shape[2], out.shape[2], 0 if h is None else h.shape[3], slots
    )
    choice = launch_linear.CudaConfig(
        launch_linear.SORTED if sort else launch_linear.ROWS, programs, tile_group, columns
    )
    config = replace(launch_linear.linear_with(p, launch_linear.ROWS, 64), cuda=choice, pdl=pdl)
    x = x if 0 in x.stride() else on_cpu.edge(x)
    w, b, bias = on_cpu.edge(w), on_cpu.edge(b), None if bias is None else on_cpu.edge(linear_op._outer(bias, 2))
    plan = reference.plan(c.ids, slots) if sort and h is not None else None
    linear_op._base_and_delta(
        "linear", x, w, None, h, b, bias, out, c.ids, plan, c.ranks, c.scalings, slots, sizes, None, False, config
    )
    assert len(on_cpu.launches) == 1, "the layouts did not suit the kernel"
    on_cpu.launches.clear()
    assert untouched(), "written beside out"
    return out.reshape(c.base.shape).clone()


def dense(on_cpu, c, weight, bias=None, *, lora=True, chunks=2, what="", **how):
    h = h_of(c, torch.Generator().manual_seed(5), chunks) if lora else None
    shown = c if lora else replace(c, ids=torch.full_like(c.ids, -1))
    assert_equal(
        run_dense(on_cpu, c, weight, bias, h, **how),
        want_linear(shown, weight, bias),
        f"{what} {how}, seed {on_cpu.seed - 1}",
    )


SIZES = dict(tokens=200, slots=3, features=72, out=264, rank=16)
both_orders = pytest.mark.parametrize("sort", [False, True], ids=["rows as they lie", "plan order"])
all_widths = pytest.mark.parametrize("columns", [256, 128, 64])


@all_widths
@both_orders
@pytest.mark.parametrize("form", FORMS)
def test_forms(on_cpu, form, sort, columns):
    sizes = [40, 264, 8] if "slices" in form else None
    c, weight, bias = case(form, **SIZES, ranks=True, sizes=sizes)
    dense(on_cpu, c, weight, bias, sort=sort, columns=columns)
    if sizes and columns == 256:  # the last block first: what a tile writes past its slice is not written over
        dense(on_cpu, c, weight, bias, sort=sort, programs=3)


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("form", ["plain", "wo_a", "slices"])
def test_the_shrink_writes_what_the_kernel_reads(on_cpu, monkeypatch, form, rank):
    """The whole forward, from x on: a whole shrink leaves nothing to kernels/halves.py, a split one does."""
    sizes = [40, 136, 8] if form == "slices" else None
    c, weight, bias = case(form, **SIZES | dict(rank=rank, out=136, features=520), ranks=True, sizes=sizes)
    made = []
    halves = kernels.halves
    monkeypatch.setattr(kernels, "halves", lambda *args: made.append(args[1].shape) or halves(*args))
    for split in (False, True):
        whole_forward(on_cpu, monkeypatch, c, weight, bias, split)
        assert bool(made) == split and len(on_cpu.launches) == 1 + split


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("form", ["plain", "wo_a"])
def test_a_layout_that_the_kernel_leaves_has_its_h_in_float32(on_cpu, monkeypatch, form, split):
    """Chosen for csrc/linear.cu, with the shrink that goes ahead of it, and done by Triton's kernel: from one h, not from two."""
    made, empty = [], driver.empty
    monkeypatch.setattr(driver, "empty", lambda shape, dtype, device: made.append(dtype) or empty(shape, dtype, device))
    for rank, features, layout in ((12, 136, "dense"), (16, 132, "dense"), (16, 136, "gaps")):
        c, weight, bias = case(form, **SIZES | dict(rank=rank, out=136, features=features), ranks=True)
        if layout == "gaps":
            weight = torch.stack([weight, weight], -1)[..., 0]
        made.clear()
        whole_forward(on_cpu, monkeypatch, c, weight, bias, split)
        assert made.count(torch.float32) == 1 and BF16 not in made and not on_cpu.launches


def whole_forward(on_cpu, monkeypatch, c, weight, bias, split):
    """`linear` from x on, with a choice of csrc/linear.cu behind a shrink that is whole or split over D."""

    def choose(p, transposed=False, fp16=False):
        shrink = launch.shrink_with(p, 32, launch.rank_block(p.rank, 2), 128, 4, 3, split)
        chosen = launch_linear.CudaConfig(launch_linear.SORTED, 2, 2)
        return replace(launch_linear.linear_with(p, launch_linear.ROWS, 64), cuda=chosen, shrink=shrink, pdl=False)

    monkeypatch.setattr(launch_linear, "linear", choose)
    common.configured.cache_clear()
    out, untouched = room_for(on_cpu, common.grouped(c.base, 3))
    y = out.view(c.base.shape) if c.base.dim() == 3 else out[:, 0]
    x, w, a, b = (on_cpu.edge(t) for t in (c.x, weight, c.a, c.b))
    dims = _checks.linear("linear", c.x, weight, c.a, c.b, c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, None)
    linear_op._run("linear", dims, x, w, a, b, y, c.ids, c.scalings, bias, c.ranks, None, None)
    assert_equal(y, want_linear(c, weight, bias), f"split {split}, seed {on_cpu.seed - 1}")
    assert untouched()


@both_orders
@pytest.mark.parametrize(
    "form, sizes, features, rank",
    [
        ("plain", None, 128, 16), ("wo_a", None, 200, 40), ("wo_a with an A per group", None, 112, 8), ("slices", [40, 264, 120], 256, 24),
        ("slices of grouped x", [128, 8, 136], 96, 64), ("shared input", None, 256, 0),
    ],
)  # fmt: skip
def test_scales_of_blocks(on_cpu, monkeypatch, form, sizes, features, rank, sort):
    """A weight in e4m3 with float32 scales, from x on: W in bf16 without them, tiles whose columns have one row of scales or two."""
    c, weight, scale, bias = scaled_case(form, BF16, **SIZES | dict(rank=max(rank, 8), features=features, tokens=150), ranks=True, sizes=sizes)
    scale *= torch.randint(1, 4, scale.shape, generator=torch.Generator().manual_seed(2))
    if rank == 0:
        c = replace(c, a=c.a[..., :0, :], b=c.b[..., :0])

    def choose(p, transposed=False, fp16=False):
        chosen = launch_linear.CudaConfig(launch_linear.SORTED if sort else launch_linear.ROWS, 2, 2, 128)
        shrink = launch.shrink_with(p, 32, launch.rank_block(p.rank, 2), 128, 4, 3, split=not sort) if p.rank else None
        return replace(launch_linear.scaled_with(p, launch_linear.ROWS, 64), cuda=chosen, shrink=shrink, pdl=False)

    monkeypatch.setattr(launch_linear, "scaled", choose)
    common.configured.cache_clear()
    out, untouched = room_for(on_cpu, common.grouped(c.base, 3))
    y = out.view(c.base.shape) if c.base.dim() == 3 else out[:, 0]
    x, w, a, b, s = (on_cpu.edge(t) for t in (c.x, weight, c.a, c.b, scale))
    dims = _checks.linear("linear", c.x, weight, c.a, c.b, c.ids, c.scalings, bias, c.out_sizes, c.ranks, None, scale)
    linear_op._run("linear", dims, x, w, a, b, y, c.ids, c.scalings, bias, c.ranks, None, s)
    assert on_cpu.last == "linear_bf16_128_scaled" and untouched()
    assert_equal(y, want_linear(c, weight.double() * spread(scale, weight), bias), f"seed {on_cpu.seed - 1}")


@both_orders
@pytest.mark.parametrize("rank", [8, 16, 24, 32, 40, 64, 128])
def test_ranks(on_cpu, rank, sort):
    for ranks in (False, [rank, 0, rank // 2 + 1, 3]):
        c, weight, bias = case("plain", **SIZES | dict(rank=rank, slots=4, tokens=150, out=40), ranks=ranks)
        dense(on_cpu, c, weight, sort=sort, chunks=3, what=ranks)


@both_orders
@pytest.mark.parametrize("features", [8, 64, 72, 136, 200, 320])
def test_features_and_what_lies_behind_a_row(on_cpu, features, sort):
    """x and the factors are slices of wider buffers that hold NaN."""
    c, weight, bias = case("wo_a", **SIZES | dict(features=features, tokens=140, out=16), layout="slice")
    dense(on_cpu, c, place(weight, "slice"), bias, sort=sort)


@all_widths
@pytest.mark.parametrize("out", [8, 128, 136, 256, 264, 520])
def test_columns(on_cpu, out, columns):
    c, weight, bias = case("wo_a", **SIZES | dict(out=out, tokens=70, rank=24))
    dense(on_cpu, c, weight, bias, columns=columns)


@both_orders
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 400])
def test_rows(on_cpu, tokens, sort):
    c, weight, bias = case("plain", **SIZES | dict(tokens=tokens, out=280), ranks=True)
    for programs, tile_group in ((1, 1), (2, 8), (3, 2)):
        dense(on_cpu, c, weight, bias, sort=sort, programs=programs, tile_group=tile_group, pdl=programs > 1)


@both_orders
def test_ids_and_many_slots(on_cpu, sort):
    """More adapters than fit into a word of the mask; ids of 64 bits, between others, some far out."""
    c, weight, bias = case("plain", **SIZES | dict(slots=70, rank=8, out=32), ranks=True)
    c.ids[::9] = -7
    c.ids[4::9] = 70
    for ids in (c.ids, c.ids.long(), torch.stack([c.ids, c.ids * 0], 1)[:, 0]):
        dense(on_cpu, replace(c, ids=ids), weight, bias, sort=sort, programs=1)
    far = c.ids.long()
    far[::7] = 2**32 + 1
    dense(on_cpu, replace(c, ids=far), weight, sort=sort)
    dense(on_cpu, replace(c, ids=torch.full_like(c.ids, -1)), weight, bias, sort=sort)
    dense(on_cpu, replace(c, ids=torch.full_like(c.ids, int(c.ids.max()))), weight, bias, sort=sort)


def test_bias_of_float32_and_no_adapters(on_cpu):
    c, weight, bias = case("wo_a", **SIZES | dict(tokens=130))
    dense(on_cpu, c, weight, bias.float() + 0.5)
    dense(on_cpu, c, weight, bias, lora=False)
    dense(on_cpu, c, weight, lora=False, sort=True)


def test_one_row_for_all_tokens(on_cpu):
    """A tensor map has no stride of 0: such an x is gathered."""
    c, weight, bias = case("plain", **SIZES, ids=[0, 1, 2, -1] * 50)
    dense(on_cpu, replace(c, x=c.x[:1].expand(200, -1)), weight, bias)


@all_widths
@both_orders
@pytest.mark.parametrize("form", ["plain", "wo_a", "slices"])
def test_factors_stored_along_columns(on_cpu, form, sort, columns):
    for rank, features in ((8, 72), (72, 200)):
        c, weight, bias = case(form, **SIZES | dict(rank=rank, features=features), sizes=[8, 264, 40], ranks=True)
        c = replace(c, b=place(c.b, "transposed"))
        dense(on_cpu, c, place(weight, "transposed"), bias, sort=sort, columns=columns)
        assert on_cpu.last == f"linear_bf16_{columns}_transposed"


@both_orders
@pytest.mark.parametrize(
    "form", ["plain", "wo_a", "wo_a with an A per group", "shared input", "shared h", "slices of one h"]
)
def test_gradient_of_x(on_cpu, monkeypatch, form, sort):
    """grad_y W + v A, summed over the groups that share x (and over those of A, if it has one for each)."""
    sizes = [40, 8, 72] if "slices" in form else None
    c, weight, bias = case(form, **SIZES | dict(features=264, out=72, rank=24), sizes=sizes, ranks=True)
    c = c if c.ranks is None else replace(c, b=without_tails(c.b, c.ranks))
    groups = c.a.shape[1] if c.a.dim() == 4 else c.x.shape[1] if c.x.dim() == 3 else 1
    v = torch.zeros(c.x.shape[0], groups, 24)
    parts = c.grad_y.split(sizes, 1) if sizes else c.grad_y.unbind(1) if c.grad_y.dim() == 3 else [c.grad_y]
    factors = c.b.split(sizes, 1) if sizes else c.b.unbind(1) if c.b.dim() == 4 else [c.b]
    for i, (part, factor) in enumerate(zip(parts, factors)):
        for slot in range(3):
            rows = c.ids == slot
            v[rows, i % groups] += c.scalings[slot] * (part[rows].float() @ factor[slot].float())
    v[~((c.ids >= 0) & (c.ids < 3))] = NAN
    choice = launch_linear.CudaConfig(launch_linear.SORTED if sort else launch_linear.ROWS, 2, 2)
    monkeypatch.setattr(
        launch_linear,
        "linear",
        lambda p, *more: replace(launch_linear.linear_with(p, launch_linear.ROWS, 64), cuda=choice, pdl=False),
    )
    plan = reference.plan(c.ids, 3)
    w, a = on_cpu.edge(weight), on_cpu.edge(c.a)
    got = linear_op._dx("linear_backward", c.grad_y, c.x, w, a, v, c.ids, c.out_sizes, c.ranks, plan, None)
    assert len(on_cpu.launches) == 1 and on_cpu.last == "linear_bf16_256_transposed"
    assert_equal(got, want_grads(c, weight, bias)[0], f"seed {on_cpu.seed - 1}")


def without_tails(b, ranks):
    """b with zeros where nothing may be read, for a torch product."""
    return torch.where(torch.arange(b.shape[-1]) < ranks.view(-1, *[1] * (b.dim() - 1)), b, 0)


@all_widths
@pytest.mark.parametrize("stored", ["dense", "transposed"])
@pytest.mark.parametrize("rank, sort", [(16, False), (16, True), (32, False), (72, True)])
def test_inf_and_nan_of_an_adapter_are_its_rows_alone(on_cpu, rank, stored, sort, columns):
    c, weight, bias = case("wo_a", **SIZES | dict(rank=rank, features=64), ranks=[rank, rank - 3, rank])
    clean = want_linear(c, weight, bias)
    b = c.b.clone()
    b[1, 0, 5, 2], b[1, 1, 263, rank - 4], b[1, 0, 100, 0] = float("inf"), NAN, float("-inf")
    b[2, 1, 17, rank - 1] = NAN
    c = replace(c, b=place(b, stored))
    got = run_dense(on_cpu, c, place(weight, stored), bias, h_of(c, torch.Generator(), 1), sort, columns=columns)
    wrong = torch.zeros(got.shape, dtype=torch.bool)
    wrong[c.ids == 1, 0, 5] = wrong[c.ids == 1, 1, 263] = wrong[c.ids == 1, 0, 100] = wrong[c.ids == 2, 1, 17] = True
    assert wrong.any() and torch.equal(~got.isfinite(), wrong), f"seed {on_cpu.seed - 1}"
    assert_equal(got.masked_fill(wrong, 0), clean.masked_fill(wrong, 0))


# --- experts ---


def routes(counts, masked, per_token=2, seed=0):
    """[T, K] ids: so many routes of each expert, and masked ones, in any order."""
    generator = torch.Generator().manual_seed(seed)
    none = [(-1, len(counts), 2**30, -5)[i % 4] for i in range(masked)]
    flat = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)] + none)
    return flat[torch.randperm(len(flat), generator=generator)].view(-1, per_token)


IDS = routes([0, 130, 20, 64, 0], 26)  # half a tile without routes, experts without any


def route_rows(x, ids):
    return x if x.shape[0] != ids.shape[0] else x.repeat_interleave(ids.shape[1], 0)


def slots_of(c):
    """([M] expert, slot of each route; whether it has both)."""
    experts, slots = c.weight.shape[0], c.a.shape[0]
    e, l = (
        c.ids.reshape(-1),
        torch.zeros(c.ids.shape[0], dtype=torch.long) if c.adapter_ids is None else c.adapter_ids.long(),
    )
    l = l.repeat_interleave(c.ids.shape[1])
    return e.clamp(0, experts - 1), l.clamp(0, slots - 1), (e >= 0) & (e < experts) & (l >= 0) & (l < slots)


def route_h(c, x, a, scale=None):
    """a [L, E|1, G, r, D] times each route's row of x [M, G or 1, D]; NaN wherever no one may look."""
    e, l, there = slots_of(c)
    factor = torch.where(a.isfinite(), a, 0)[l, e if a.shape[1] > 1 else 0].float()
    h = torch.einsum("mgrd,mgd->mgr", factor, torch.where(x.isfinite(), x, 0).float().expand(-1, a.shape[2], -1))
    h = h if scale is None else h * torch.where(there, c.scalings[l], 0)[:, None, None]
    rank = torch.full((c.a.shape[0],), a.shape[3]) if c.ranks is None else c.ranks.long()
    live = torch.where(there, rank[l], 0)
    return h.masked_fill(torch.arange(a.shape[3]) >= live[:, None, None], NAN)


def use_cuda(monkeypatch, pdl=True):
    def choose(p, transposed=False):
        return replace(launch_experts.linear_with(p, 16, True), cuda=True, pdl=pdl)

    monkeypatch.setattr(launch_experts, "linear", choose)


def routing_of(c, lora=True):
    experts, slots = c.weight.shape[0], c.a.shape[0] if lora else 0
    adapters = c.adapter_ids if lora else None
    return expert_launch.Routing(
        c.ids, adapters, experts, slots, reference.expert_plan(c.ids, adapters, experts, slots)
    )


def experts(on_cpu, monkeypatch, c, *, bias=True, weighted=True, staged=False, lora=True, chunks=1, pdl=True):
    """y of `projection`, the shrink's h made by torch, in so many chunks; 0: by the shrink."""
    generator = torch.Generator().manual_seed(3)

    def shrink(name, x, a, groups, to, ranks, scalings=None, fill=False, config=None, halves=False, out=None):
        assert scalings is None and not halves
        h = route_h(c, route_rows(c.x, c.ids)[:, None], a)
        if a.shape[1] > 1 or not to.per_token(c.x):
            return in_pieces(h, chunks, generator)
        each = h.unflatten(0, c.ids.shape)  # a token's h is that of any of its routes
        return torch.where(each[:, 0].isnan(), each[:, 1], each[:, 0])[None].contiguous()

    use_cuda(monkeypatch, pdl)
    if chunks:
        monkeypatch.setattr(expert_launch, "run_shrink", shrink)
        monkeypatch.setattr(expert_launch, "_takes_cuda", lambda *args: False)  # float32 h
    out, untouched = room_for(on_cpu, c.base)
    placed = replace(c, x=on_cpu.edge(c.x), weight=on_cpu.edge(c.weight), b=on_cpu.edge(c.b), bias=on_cpu.edge(c.bias))
    placed.row_weights = on_cpu.edge(c.row_weights)
    expert_launch.projection(
        "expert_linear", placed.x, placed.weight, c.a if lora else None, placed.b if lora else None, routing_of(c, lora), c.scalings,
        placed.bias if bias else None, placed.row_weights if weighted else None, c.ranks, staged, out,
    )  # fmt: skip
    assert len(on_cpu.launches) == 1, "the layouts did not suit the kernel"
    on_cpu.launches.clear()
    assert untouched(), "written beside out"
    wide = c.double()
    if not staged:
        want = rounded(wide.linear(reference.expert_linear, bias, weighted, lora), BF16)
    else:
        first = rounded(wide.linear(reference.expert_linear, False, False, lora), BF16)
        e, _, _ = slots_of(c)
        routed = (c.ids.reshape(-1) >= 0) & (c.ids.reshape(-1) < c.weight.shape[0])
        more = c.bias[e].flatten(1).float() * (c.row_weights.float()[:, None] if weighted else 1)
        want = torch.where(routed[:, None], (first.float() + more).to(BF16), 0)
    assert_equal(out.clone(), want, f"seed {on_cpu.seed - 1}")
    return out


EXPERTS = dict(features=72, out=264, rank=16, slots=3, ids=IDS)


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("weights", ["packed", "halves"])
def test_experts(on_cpu, monkeypatch, factors, weights):
    for per_route in (False, True):
        c = build_routes(
            factors, experts=5, weights=weights, per_route=per_route, ranks=[16, 5, 0], **EXPERTS | dict(out=272)
        )
        experts(on_cpu, monkeypatch, c, chunks=2, pdl=per_route)


@pytest.mark.parametrize("factors", ["per expert", "an A each", "A shared"])
def test_the_shrink_of_experts_writes_what_the_kernel_reads(on_cpu, monkeypatch, factors):
    """A whole shrink leaves nothing to kernels/halves.py, if routes have an h each; a split one does."""
    made, halves = [], kernels.halves
    monkeypatch.setattr(kernels, "halves", lambda *args: made.append(args[1].shape) or halves(*args))
    for rank, features, split, per_route in ((16, 136, False, False), (40, 520, False, True), (16, 520, True, True)):
        c = build_routes(
            factors, experts=5, per_route=per_route, ranks=[rank, 5, 0], **EXPERTS | dict(rank=rank, features=features, out=80)
        )
        monkeypatch.setattr(launch_experts, "shrink", lambda p, *a, split=split: launch_experts.shrink_with(p, 16, block_c=16, split=split))
        common.configured.cache_clear()
        experts(on_cpu, monkeypatch, c, chunks=0, pdl=False)
        assert bool(made) == (split or (factors == "A shared" and not per_route)), (rank, made)
        made.clear()


@pytest.mark.parametrize("rank", [8, 24, 32, 40, 64, 72, 128, 200])
def test_ranks_of_experts(on_cpu, monkeypatch, rank):
    """Pieces of 16, 32, 64 and 128 columns of h."""
    for ranks in (None, [rank, rank // 2 + 1, 3]):
        c = build_routes("per expert", experts=5, ranks=ranks, **EXPERTS | dict(rank=rank, out=40))
        experts(on_cpu, monkeypatch, c)


def threads_copy_b(monkeypatch):
    monkeypatch.setattr(linear_cuda, "_map_of_b", lambda *args: None)


@pytest.mark.parametrize("rank", [16, 24, 40, 64, 128])
def test_b_by_threads(on_cpu, monkeypatch, rank):
    """Where no box can bring it: of experts and of a dense layer, forward and along N."""
    threads_copy_b(monkeypatch)
    for ranks in (None, [rank, rank // 2 + 1, 3]):
        experts(on_cpu, monkeypatch, build_routes("an A each", experts=5, ranks=ranks, **EXPERTS | dict(rank=rank, out=48)))
    c, weight, bias = case("wo_a", **SIZES | dict(rank=rank, out=136), ranks=True)
    for columns in (256, 64):
        dense(on_cpu, c, weight, bias, columns=columns)
    c = build_routes("per expert", experts=5, weights="transposed", **EXPERTS | dict(rank=rank))
    experts(on_cpu, monkeypatch, replace(c, b=place(c.b, "transposed"), x=place(c.x, "slice")))
    assert on_cpu.last == "linear_bf16_256_experts_transposed"


@pytest.mark.parametrize("rank", [16, 40, 64, 72])
def test_what_a_box_has_past_a_rank(on_cpu, monkeypatch, rank):
    """NaN there, in tiles of one adapter, whose own Inf and NaN need no care; along N other groups' rows, too."""
    sizes = EXPERTS | dict(rank=rank, slots=1, out=272)
    for ranks in ([rank - 3], [rank]):
        c = build_routes("an A each", experts=5, ranks=ranks, adapter_ids=None, **sizes)
        assert ranks == [rank] or c.b[..., rank - 3 :].isnan().all()
        experts(on_cpu, monkeypatch, c)
        c = build_routes("per expert", experts=5, weights="transposed", ranks=ranks, adapter_ids=None, **sizes)
        experts(on_cpu, monkeypatch, replace(c, b=place(c.b, "transposed"), x=place(c.x, "slice")))
        assert on_cpu.last == "linear_bf16_256_experts_transposed"


@pytest.mark.parametrize("rank", [16, 64])
def test_which_b_comes_by_boxes(on_cpu, rank):
    """Groups behind one another, whatever lies between slots, experts and rows; not groups with a gap, nor one row for all."""
    b = torch.zeros(3, 5, 2, 24, rank, dtype=BF16)
    padded = torch.zeros(3, 5, 2, 32, 2 * rank, dtype=BF16)
    along = torch.zeros(3, 5, 2, rank, 24, dtype=BF16).transpose(3, 4)
    assert linear_cuda._map_of_b(b, False, rank, 256) and linear_cuda._map_of_b(along, True, rank, 256)
    assert linear_cuda._map_of_b(padded[:, :, :1, :24, :rank], False, rank, 256)
    assert linear_cuda._map_of_b(padded[..., :rank], False, rank, 256)
    assert linear_cuda._map_of_b(b[:, :1], False, rank, 256)
    assert linear_cuda._map_of_b(padded[..., :24, :rank], False, rank, 256) is None
    assert linear_cuda._map_of_b(torch.zeros(3, 5, 2, 2 * rank, 24, dtype=BF16)[:, :, :, :rank].transpose(3, 4), True, rank, 256) is None
    assert linear_cuda._map_of_b(b[:, :, :, :1].expand(-1, -1, -1, 24, -1), False, rank, 256) is None


def test_biases_and_weights_of_routes(on_cpu, monkeypatch):
    for row_dtype, bias_dtype in ((torch.float32, BF16), (BF16, torch.float32)):
        c = build_routes("per expert", experts=5, row_dtype=row_dtype, **EXPERTS | dict(out=40))
        c.bias, c.row_weights = c.bias.to(bias_dtype), torch.stack([c.row_weights, c.row_weights * 0], 1)[:, 0]
        for bias, weighted in ((True, True), (True, False), (False, True), (False, False)):
            experts(on_cpu, monkeypatch, c, bias=bias, weighted=weighted)
            if bias:
                experts(on_cpu, monkeypatch, c, weighted=weighted, staged=True)
        experts(on_cpu, monkeypatch, c, lora=False)


@pytest.mark.parametrize(
    "ids", [routes([0, 0], 132), routes([300], 0, 1), routes([128, 128, 1], 1), routes([3] * 20, 0)], ids=range(4)
)
def test_routings(on_cpu, monkeypatch, ids):
    """All masked; one expert; whole tiles; experts of few routes. Slot 0 for every token where adapters have no names."""
    for adapters in ("random", None):
        c = build_routes("A shared", experts=40, **EXPERTS | dict(ids=ids, out=16), adapter_ids=adapters)
        if ids.shape[1] == 2:
            experts(on_cpu, monkeypatch, c)
        c = build_routes(
            "per expert", experts=40, **EXPERTS | dict(ids=ids, out=16), adapter_ids=adapters, per_route=True
        )
        experts(on_cpu, monkeypatch, c)


def test_other_storage_of_experts(on_cpu, monkeypatch):
    c = build_routes("one A, B in halves", experts=5, weights="interleaved", **EXPERTS | dict(out=272))
    experts(on_cpu, monkeypatch, c)
    c = build_routes("per expert", experts=5, weights="transposed", **EXPERTS)
    experts(on_cpu, monkeypatch, replace(c, b=place(c.b, "transposed"), x=place(c.x, "slice")))
    assert on_cpu.last == "linear_bf16_256_experts_transposed"


@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize("factors", ["per expert", "an A each", "both shared"])
@pytest.mark.parametrize("weights", ["packed", "halves"])
def test_gradient_of_x_of_experts(on_cpu, monkeypatch, factors, weights, rank):
    """Summed over the halves of W, of A, or of both; rounded, or left in float32."""
    sizes = EXPERTS | dict(rank=rank, features=264, out=144)
    c = build_routes(factors, experts=5, weights=weights, per_route=True, **sizes, ranks=[rank, 7, rank - 7])
    wide = c.double()
    needs = [True, *[False] * 5]
    want = reference.expert_linear_backward(
        wide.grad_y,
        wide.x,
        wide.weight,
        wide.a,
        wide.b,
        c.ids,
        c.adapter_ids,
        c.scalings,
        None,
        wide.row_weights,
        c.ranks,
        None,
        needs,
    )[0]
    a, b = forms(c.a, c.b)
    v = route_h(c, expert_launch.outer(c.grad_y, b.shape[2]), b.transpose(3, 4), scale=True)
    v = v if a.shape[2] == v.shape[1] else v.sum(1, keepdim=True)
    use_cuda(monkeypatch)
    w, factor = on_cpu.edge(c.weight), on_cpu.edge(c.a)
    for dtype in (BF16, torch.float32):
        got = expert_grads.input_rows(
            "expert_linear_backward", on_cpu.edge(c.grad_y), w, factor, v, routing_of(c), c.ranks, c.row_weights, dtype
        )
        assert_equal(got, rounded(want, dtype), f"seed {on_cpu.seed - 1}")
        values = on_cpu.launches.pop()[1]
        assert on_cpu.last == "linear_bf16_256_experts_transposed" and values[SUMS_AT : SUMS_AT + 2] == (
            w.shape[1] if w.dim() == 4 else 1,
            a.shape[2],
        )


@pytest.mark.parametrize("rank", [16, 32, 64, 128])
def test_inf_and_nan_of_experts(on_cpu, monkeypatch, rank):
    c = build_routes("per expert", experts=5, **EXPERTS | dict(rank=rank))
    clean = rounded(c.double().linear(reference.expert_linear), BF16)
    b = c.b.clone()
    b[1, 1, 5, 2], b[0, 1, 263, rank - 1], b[2, 3, 100, 0] = float("inf"), NAN, float("-inf")
    e, l, there = slots_of(c)
    wrong = torch.zeros(clean.shape, dtype=torch.bool)
    wrong[there & (l == 1) & (e == 1), 5] = wrong[there & (l == 0) & (e == 1), 263] = wrong[
        there & (l == 2) & (e == 3), 100
    ] = True
    monkeypatch.setattr(sys.modules[__name__], "assert_equal", lambda *args: None)
    got = experts(on_cpu, monkeypatch, replace(c, b=b))
    monkeypatch.undo()
    assert wrong.any() and torch.equal(~got.isfinite(), wrong)
    assert_equal(got.masked_fill(wrong, 0), clean.masked_fill(wrong, 0))


# --- what must not happen ---


@both_orders
def test_a_damaged_plan_leads_nowhere_else(on_cpu, sort):
    """Rows and ends of any value: every row that is written is one of y's, and nothing lies outside its tensor."""
    generator = torch.Generator().manual_seed(0)
    wild = torch.randint(-(2**31), 2**31 - 1, (280,), generator=generator, dtype=torch.int32)
    near = torch.randint(-3, 250, (280,), generator=generator, dtype=torch.int32)
    x, w, b = (torch.ones(*shape, dtype=BF16) for shape in ((240, 1, 72), (40, 1, 40, 72), (3, 40, 1, 40, 16)))
    h, ids, scalings = torch.ones(1, 240, 1, 16), torch.zeros(240, dtype=torch.int32), torch.ones(3)
    for plan in (wild, near, torch.where(near % 3 == 0, wild, near)):
        out, untouched = room_for(on_cpu, torch.empty(240, 1, 40))
        mode = linear_cuda.SORTED if sort else linear_cuda.EXPERT
        operands = (on_cpu.edge(x), on_cpu.edge(w), h, on_cpu.edge(b), None, out, on_cpu.edge(ids), (1, 1, 1), on_cpu.edge(plan))
        tiling = linear_cuda.Tiling(mode, 16, 1, 2, False)
        assert linear_cuda.product("linear", *operands, None, scalings, None, False, None, tiling)
        assert untouched()
        assert (out.isnan() | (out == 0) | (out == 72 + 16)).all()


def test_no_columns_of_x():
    """A tensor map has none of size 0."""
    x, w, out = (torch.empty(*shape, dtype=BF16) for shape in ((200, 1, 64), (1, 1, 40, 64), (200, 1, 40)))
    assert linear_cuda.fits(x, w, None, None, None, out, None)
    assert not linear_cuda.fits(x[..., :0], w[..., :0], None, None, None, out, None)


def test_y_is_written_behind_the_kernel_ahead(library, monkeypatch, tmp_path):
    """Tiles that need no h could be done while the shrink still runs, and y may lie where that reads for the last time."""
    write, ahead = "*(uint4 *)to = masked ?", "            wait_for_producer();\n"
    text = (ROOT / "csrc/linear.cu").read_text()
    assert text.count(write) == 1 and text.count(ahead) == 1, "where the gatherers wait"

    def change(text):
        text = text.replace(write, f'if (cpu::is_hidden) cpu::fail("y is written while the kernel ahead runs"); {write}')
        text = text.replace(ahead, f"for (u32 i = 0; i < 3000; ++i) cpu::yield();\n{ahead}")
        return only_experts(text)

    on_cpu = OnCpu(compiled(tmp_path, change), monkeypatch)
    masked = build_routes("per expert", experts=5, **EXPERTS | dict(ids=routes([0, 130, 20, 64, 0], 300), out=16))
    without = build_routes("per expert", experts=5, **EXPERTS | dict(out=16), adapter_ids="random")
    without.adapter_ids[:] = -1
    for c in 3 * (masked, without):
        experts(on_cpu, monkeypatch, c)
    on_cpu.close()


FAULTS = {
    "a stage is given back too early": (
        "                if (i > 0) release(used - 1);\n",
        "                release(used);\n",
    ),
    "copies are signalled too early": ("{ arrive_with_copies(s.full[", "{ arrive(s.full["),
    "B is changed without a fence": ("    if (found) written_for_matrix_units();\n", ""),
    "W is fetched a use of a stage ahead": (
        "            wait(s.empty[stage], (number / STAGES & 1) ^ 1);\n            if (p.flags & BOXES) {",
        "            if (p.flags & BOXES) {",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_sees(library, monkeypatch, tmp_path, fault):
    before, after = FAULTS[fault]
    assert (ROOT / "csrc/linear.cu").read_text().count(before) == 1
    one_kernel = re.compile(r"^KERNEL\((?!linear_bf16_256,).*$", re.MULTILINE)  # the others would only be compiled
    on_cpu = OnCpu(compiled(tmp_path, lambda text: one_kernel.sub("", text.replace(before, after))), monkeypatch)
    c, weight, bias = case("plain", **SIZES | dict(rank=40, slots=4, tokens=300))
    seen = torch.arange(264) != 7  # B is Inf there
    want, h = want_linear(c, weight, bias)[:, seen], h_of(c, torch.Generator(), 1)
    c.b[0, 7, 1] = float("inf")
    with pytest.raises(AssertionError):
        for _ in range(8):  # orders of events
            assert_equal(run_dense(on_cpu, c, weight, bias, h, programs=1)[:, seen], want)
    on_cpu.close()


def only_experts(text):
    return re.sub(r"^KERNEL\((?!linear_bf16_256_experts,).*$", "", text, flags=re.MULTILINE)


def test_the_emulation_sees_what_low_reads(monkeypatch, tmp_path):
    """Of 64 columns high and low have one B: its stage must be kept until low's products are done."""
    emulation.needs_compiler()
    kept, given = "if (!low && (SCALED ? 0 : steps) + i > 0) release(used - 1);", "if (!low && reuses && i > 0) release(used - 2);"
    end = "if (reuses && more > 0) release(used - 2);"
    assert all((ROOT / "csrc/linear.cu").read_text().count(line) == 1 for line in (kept, given, end))

    def change(text):
        return only_experts(text.replace(kept, kept.replace("!low && ", "")).replace(given, "").replace(end, ""))

    on_cpu = OnCpu(compiled(tmp_path, change), monkeypatch)
    c = build_routes("per expert", experts=5, **EXPERTS | dict(rank=64))
    with pytest.raises(AssertionError):
        for _ in range(8):
            experts(on_cpu, monkeypatch, c)
    on_cpu.close()


def test_rows_that_a_tile_has_not_are_not_copied(on_cpu, monkeypatch):
    """Nor is one row in the place of all of them: the whole GPU would ask for it. 214 routes have an expert, one block of columns."""
    c = build_routes("per expert", experts=5, **EXPERTS | dict(features=200, out=40))
    copies = ctypes.c_uint64.in_dll(on_cpu.library, "copies_made")
    copies.value = 0
    experts(on_cpu, monkeypatch, c, lora=False)
    assert copies.value == 214 * 4 * 8  # stages of 64 columns; 16 bytes a copy
