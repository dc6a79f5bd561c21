"""csrc/rows.cu behind `delta`, `delta_` and `expert_delta`. Without a GPU its source runs on the CPU, a fiber a thread (cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import NAN, assert_bits, assert_equal, build, rounded

from grouped_lora_ops import cuda, driver, launch, launch_experts, reference
from grouped_lora_ops.launch import ROWS_KERNELS as KERNELS
from grouped_lora_ops.ops import common, prepared, rows_cuda

ROOT = Path(__file__).parents[1]
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
single = [k for k in KERNELS if k.cluster == k.merged == 1]
clustered = [k for k in KERNELS if k.cluster > 1]
merged = [k for k in KERNELS if k.merged > 1]
R16, R32, R64 = (next(k for k in single if k.ranks == ranks) for ranks in (16, 32, 64))


def name_of(kernel):
    return "-".join(map(str, kernel))


# --- the source on the CPU ---


def translated() -> str:
    """csrc/rows.cu as C++: what is not plain C++ in it is replaced, each so often."""
    text = (ROOT / "csrc/rows.cu").read_text()
    for pattern, by, times in (
        (r'#include "tile.cuh"', f'#include "{ROOT / "tests/cuda_on_cpu.h"}"', 1),
        (r"extern __shared__ __align__\(128\) u8 memory\[\];", "u8 *memory = cpu::now->block->memory;", 1),
        (r"__align__\(128\)", "alignas(128)", 1),
        (r'extern "C" __global__ void CLUSTER_##CL __launch_bounds__\([^\\]*\\\n', 'extern "C" void \\\\\n', 1),
        (r'extern "C" __device__ const int', 'extern "C" const int', 1),
    ):
        text, found = re.subn(pattern, by, text)
        assert found == times, pattern
    run = (
        'extern "C" void run_%s(const Params *p, u32 blocks, u32 threads, u32 shared, u32 seed) {'
        " cpu::run(blocks, threads, shared, seed, [=] { %s(*p); }); }\n"
    )
    names = [f"rows_{e}_{name_of(k).replace('-', '_')}" for e in ("bf16", "fp16") for k in KERNELS]
    return text + "".join([run % (name, name) for name in names])


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    folder = tmp_path_factory.mktemp("rows_on_cpu")
    (folder / "rows.cpp").write_text(translated())
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", folder / "rows.so", folder / "rows.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "rows.so"))


@pytest.fixture
def on_cpu(library, monkeypatch):
    """rows_cuda's module and launches, on CPU tensors; on_cpu.seed orders the threads."""

    class OnCpu:
        seed = 1

        def constant(self, op, name):
            return ctypes.c_int.in_dll(library, name).value

        def function(self, op, name, shared, wide):
            return name

        def launch(self, function, grid, threads, layout, values, *, shared, pdl):
            data, _ = driver.pack(layout, values)
            getattr(library, f"run_{function}")(ctypes.c_char_p(data), grid[0], threads, shared, self.seed)

    module = OnCpu()
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: module)
    monkeypatch.setattr(cuda, "launch", module.launch)
    return module


def config_of(kernel, blocks=2, tile_rows=0):
    return launch.RowsConfig(kernel, blocks, 2 * kernel.rows * kernel.split + 128, tile_rows)


def run_dense(c, kernel, base=None, in_place=False, blocks=2):
    groups = c.base.dim() == 3
    x, a, b, out = (common.grouped(t, d) for t, d in ((c.x, 3), (c.a, 4), (c.b, 4), (c.base, 3)))
    out = out.clone() if in_place else torch.full_like(out, NAN)
    start = out if in_place else None if base is None else common.grouped(base, 3)
    assert rows_cuda.fits(x, a, b, start, out, None)
    plan = None if a.shape[0] == 1 else reference.plan(c.ids, a.shape[0])
    ranks = common.contiguous(c.ranks)
    assert rows_cuda.dense("delta", x, a, b, start, out, c.ids, plan, ranks, c.scalings, not in_place, config_of(kernel, blocks))
    return out if groups else out[:, 0]


def want_delta(c, base=True):
    w = c.wide()
    return rounded(reference.delta(*w.factors, base=w.base if base else None, **c.wide().kw), c.x.dtype)


@pytest.mark.parametrize("kernel", single, ids=name_of)
def test_exact(on_cpu, kernel):
    """Several tiles a block, parts of tiles, of stages and of chunks; ranks and tails of B that hold NaN."""
    rows, most, step = kernel[:3]
    c = build("plain", tokens=rows + 9, slots=3, features=step + 72, out=kernel[3] + 24, rank=most, ranks=True)
    assert_equal(run_dense(c, kernel, c.base, blocks=3), want_delta(c))


@pytest.mark.parametrize("kernel", clustered, ids=name_of)
def test_groups_that_share_a_fetch_it_together(on_cpu, kernel):
    """Four blocks, a group each, send each other a quarter of A; in turn for two sets of groups and several tiles."""
    for seed, (tokens, slots, groups, rank) in enumerate(((7, 1, 4, 64), (kernel[0] + 3, 2, 8, 40))):
        on_cpu.seed = seed + 1
        c = build("wo_a", tokens=tokens, slots=slots, groups=groups, features=256, out=136, rank=rank, ranks=True)
        assert_equal(run_dense(c, kernel, c.base, blocks=4), want_delta(c), f"{tokens} {groups}")


@halves
@pytest.mark.parametrize("kernel", [R16, R64], ids=name_of)
def test_exact_in_every_form(on_cpu, kernel, dtype):
    for seed, (form, tokens, slots, features, out, rank) in enumerate((
        ("wo_a", 7, 1, 64, 8, 8), ("plain", 40, 3, 328, 152, kernel.ranks), ("wo_a with an A per group", 35, 2, 136, 40, kernel.ranks - 8),
    )):  # fmt: skip
        c = build(form, dtype, tokens=tokens, slots=slots, groups=2, features=features, out=out, rank=rank, ranks=True)
        on_cpu.seed = seed
        message = f"{form} {tokens} {slots} {features} {out} {rank}"
        assert_equal(run_dense(c, kernel), want_delta(c, False), f"{message}, without base")
        assert_equal(run_dense(c, kernel, in_place=True), want_delta(c), f"{message}, in place")


@halves
def test_scaled_terms_and_ids_of_either_kind(on_cpu, dtype):
    """One slot, whose ids mask the rows; int64 ids with a stride; rows of x far larger than others."""
    c = build("wo_a", dtype, tokens=40, slots=1, features=128, out=64, rank=16, id_dtype=torch.int64, layout={"ids": "rows"})
    c.x[3] *= 4
    assert_equal(run_dense(c, R16, c.base), want_delta(c))


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_threads(on_cpu, seed):
    on_cpu.seed = 100 + seed
    c = build("wo_a", tokens=100, slots=4, groups=3, features=264, out=40, rank=16, ranks=True, seed=seed)
    assert_equal(run_dense(c, R16, in_place=True, blocks=1 + seed), want_delta(c))


def test_a_damaged_plan_stays_in_bounds(on_cpu):
    """Rows and starts may be anything: no row outside T is read or written, and it ends."""
    c = build("plain", tokens=70, slots=3, features=64, out=16, rank=8, poison=False)
    x, a, b, base = common.grouped(c.x, 3), common.grouped(c.a, 4), common.grouped(c.b, 4), common.grouped(c.base, 3)
    good = reference.plan(c.ids, 3)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        plan = torch.where(torch.rand(good.shape, generator=generator) < 0.3, torch.randint(-200, 200, good.shape, generator=generator), good.long())
        room = torch.full((90, 1, 16), NAN, dtype=base.dtype)
        out = room[10:80]
        assert rows_cuda.dense("delta", x, a, b, base, out, c.ids, plan.int(), None, c.scalings, True, config_of(R16))
        assert room[:10].isnan().all() and room[80:].isnan().all()


@pytest.mark.parametrize(
    "kernel, form, shared",
    [(R32, "whole", ""), (R16, "an A each", "a"), (R16, "halves of B", "b"), (merged[0], "halves of B", ""), *((k, "an A each", "") for k in merged)],
)
def test_experts(on_cpu, monkeypatch, kernel, form, shared):
    from test_expert_kernels import build as expert_case
    from test_expert_kernels import want_delta as want_expert

    from grouped_lora_ops.reference.expert_delta import forms

    monkeypatch.setattr(launch_experts, "plan_rows", lambda *sizes: 2 * kernel.rows)
    dtype = torch.float16 if shared == "a" else torch.bfloat16
    c = expert_case(
        dtype, form, tokens=45, top_k=3, experts=3, slots=2, features=296, out=80, rank=min(kernel.ranks // kernel.merged, 24), shared=shared,
        per_route=form == "whole", weights=True, ranks=True,
    )  # fmt: skip
    a, b = forms(c.a, c.b)
    plan = reference.expert_plan(c.ids, c.adapters, 3, 2)
    room = launch_experts.plan_room(135, 3, 2)
    for base in (c.base, None):
        out = torch.full_like(c.base, NAN).view(135, b.shape[2], -1)
        start = None if base is None else base.view(out.shape)
        assert rows_cuda.fits_experts(c.x, a, b, start, out, c.weights)
        assert rows_cuda.experts(
            "expert_delta", c.x, a, b, start, out, c.x.shape[0] == 45, c.ids, plan, c.ranks, c.scalings, c.weights, 3, room,
            config_of(kernel, 3, 2 * kernel.rows),
        )  # fmt: skip
        want = want_expert(c if base is not None else replace(c, base=None))
        assert_equal(out.view(want.shape), want, f"base {base is not None}")


# --- which kernel, and on a GPU ---


def test_the_kernels_are_those_of_the_source():
    text = (ROOT / "csrc/rows.cu").read_text()
    found = [tuple(map(int, m.split(", "))) for m in re.findall(r"ROWS\(E, (\d[\d, ]+)\)", text)]
    assert tuple(found) == KERNELS


def test_what_the_kernel_cannot_do_is_refused():
    p = launch.Problem("sm_90", 132, 2, 4096, 4, 4096, 1024, 64, 8)
    kernel = next(k for k in single if (k.rows, k.ranks, k.split) == (64, 64, 2))
    able = launch.rows(p, kernel)
    assert (able.blocks, able.threads) == (132, 384)
    for change in (dict(rank=65), dict(itemsize=4), dict(arch="sm_80"), dict(slots=1025)):
        assert launch.rows(replace(p, **change), kernel) is None
    together = clustered[0]
    assert launch.rows(p, together) is None  # an A for each group
    assert launch.rows(replace(p, shared_a=True), together).blocks == 128
    assert launch.rows(replace(p, shared_a=True, in_features=4104), together) is None
    assert launch.rows(p, merged[0]) is None  # the groups have each their own x
    few = launch_experts.ExpertProblem("sm_90", 132, 2, 512, 128, 1, 1, 1, 768, 2048, 32)
    assert launch_experts.rows(few, R32) is None  # the plan's tiles have 16 routes
    many = replace(few, routes=32768)
    assert launch_experts.rows(many, R32).tile_rows == 128
    assert launch_experts.rows(many, merged[0]) is None
    assert launch_experts.rows(replace(many, groups=2), merged[0]) is not None


def _use(monkeypatch, module, kernel):
    """Let `module`'s choice be this kernel."""
    choice = module.delta

    def chosen(p):
        rows = module.rows(p, kernel)
        assert rows is not None
        return replace(choice(p), rows=rows)

    monkeypatch.setattr(module, "delta", chosen)
    common.configured.cache_clear()
    prepared.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", single + clustered, ids=name_of)
@halves
def test_the_bits_of_the_triton_kernels(monkeypatch, kernel, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    for tokens, slots, features in ((200, 1, 4096), (1000, 3, 1032), (3000, 40, 520)):
        features = features // 128 * 128 if kernel.cluster > 1 else features
        x, base = (torch.randn(tokens, 4, n, generator=generator, device="cuda").to(dtype) for n in (features, 1000))
        a = (torch.randn(slots, kernel.ranks, features, generator=generator, device="cuda") * features**-0.5).to(dtype)
        b = torch.randn(slots, 4, 1000, kernel[1], generator=generator, device="cuda").to(dtype)
        ids = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda")
        x[ids < 0] = NAN
        scalings = torch.rand(slots, generator=generator, device="cuda") + 0.5
        args = (x, a, b, ids, scalings)
        want, alone = torch.ops.grouped_lora.delta(*args, base), torch.ops.grouped_lora.delta(*args)
        with monkeypatch.context() as patch:
            _use(patch, launch, kernel)
            assert_bits(torch.ops.grouped_lora.delta(*args, base), want, f"{tokens} {slots}")
            assert_bits(torch.ops.grouped_lora.delta(*args), alone, f"{tokens} {slots} without base")
            out = base.clone()
            torch.ops.grouped_lora.delta_(out, *args)
            assert_bits(out, want, f"{tokens} {slots} in place")
        common.configured.cache_clear()
        prepared.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", single + merged, ids=name_of)
@halves
def test_the_bits_of_the_triton_expert_kernels(monkeypatch, kernel, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    tokens, experts, slots, groups, rank = 4096, 16, 2, kernel.merged, kernel.ranks // kernel.merged
    x = torch.randn(tokens, 768, generator=generator, device="cuda").to(dtype)
    a = [torch.randn(slots, experts, rank, 768, generator=generator, device="cuda").div(28).to(dtype) for _ in range(groups)]
    b = [torch.randn(slots, experts, 1024, rank, generator=generator, device="cuda").to(dtype) for _ in range(groups)]
    base = torch.randn(8 * tokens, groups * 1024, generator=generator, device="cuda").to(dtype)
    ids = torch.randint(-1, experts + 1, (tokens, 8), generator=generator, device="cuda")
    adapters = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda")
    if groups > 1:
        a, b = torch.stack(a, 2), torch.stack(b, 2)
    else:
        (a,), (b,) = a, b
    args = (x, a, b, ids, adapters, torch.tensor([0.5, 2.0], device="cuda"), base)
    want = torch.ops.grouped_lora.expert_delta(*args)
    with monkeypatch.context() as patch:
        _use(patch, launch_experts, kernel)
        assert_bits(torch.ops.grouped_lora.expert_delta(*args), want)
    common.configured.cache_clear()
