"""csrc/plan.cu behind `plan` and `expert_plan`. Without a GPU its source runs on the CPU, a fiber a thread (cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from pathlib import Path

import emulation
import pytest
import torch
from cases import assert_equal

import grouped_lora_ops as glo
from grouped_lora_ops import cuda, driver, launch, launch_experts, reference
from grouped_lora_ops.ops import plan_cuda

dense_op, expert_op = (importlib.import_module(f"grouped_lora_ops.ops.{name}") for name in ("plan", "expert_plan"))  # not the functions

ROOT = Path(__file__).parents[1]
PAGE = mmap.PAGESIZE
WILD = {torch.int32: (-(2**31), 2**31 - 1), torch.int64: (-(2**32), 2**32, 2**32 + 1, -(2**63), 2**63 - 1)}


# --- the source on the CPU ---


def translated() -> str:
    """csrc/plan.cu as C++: what is not plain C++ in it is replaced, each so often."""
    text = (ROOT / "csrc/plan.cu").read_text()
    text = emulation.replaced(
        text,
        (r'#include "tile.cuh"', f'#include "{ROOT / "tests/cuda_on_cpu.h"}"', 1),
        (r"extern __shared__ __align__\(128\) u8 memory\[\];", "u8 *memory = cpu::now->block->memory;", 2),
        (r'asm volatile\("ld\.relaxed\.gpu\.global\.u32 [^;]*;".*', "v = *(const u32 *)from;", 1),
        (r'asm volatile\("st\.async\.[^;]*;".*', "send(to, &v, sizeof v, barrier);", 2),
    )
    run = 'extern "C" void run_%s(const Params *p, u32 blocks, u32 shared, u32 seed) { cpu::run(blocks, THREADS, shared, seed, [=] { %s(*p); }); }\n'
    return text + "".join([run % (name, name) for name in ("plan", "plan_pairs")])


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    emulation.needs_compiler()
    return emulation.compiled(tmp_path_factory.mktemp("plan_on_cpu"), "plan", translated())


class OnCpu:
    """plan_cuda's module and launches, on CPU tensors whose ends meet forbidden memory."""

    def __init__(self, library, monkeypatch):
        self.library, self.seed, self.launches = library, 1, []
        libc = ctypes.CDLL(None)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.libc = libc
        monkeypatch.setattr(cuda, "module", lambda op, stem, device: self)
        monkeypatch.setattr(cuda, "launch", self.launch)

    def function(self, op, name, shared, wide):
        return name

    def launch(self, function, grid, threads, layout, values, *, cluster, shared, pdl):
        assert grid == cluster and threads == launch.PLAN_THREADS
        self.launches.append(function)
        data, _ = driver.pack(layout, values)
        getattr(self.library, f"run_{function}")(ctypes.c_char_p(data), cluster[0], shared, self.seed)

    def empty(self, n: int) -> torch.Tensor:
        length = (4 * n + PAGE - 1) // PAGE * PAGE
        base = self.libc.mmap(None, length + PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert self.libc.mprotect(base + length, PAGE, 0) == 0
        memory = (ctypes.c_int32 * n).from_address(base + length - 4 * n)
        return torch.frombuffer(memory, dtype=torch.int32).fill_(2**31 - 1)

    def dense(self, ids, slots, config=None):
        config = config or launch.plan_cuda("sm_90", ids.shape[0], slots, 0, False)
        out = self.empty(ids.shape[0] + slots + 2)
        assert plan_cuda.make("plan", ids, None, slots, 0, out, config)
        assert_equal(out, reference.plan(ids, slots), f"T = {ids.shape[0]}, L = {slots}, {config}, seed {self.seed}")

    def experts(self, ids, adapters, experts, slots, config=None):
        routes = ids.shape[0] * ids.shape[1]
        config = config or launch.plan_cuda("sm_90", routes, experts, slots, True)
        size, rows, room = (
            f(routes, experts, slots) for f in (launch_experts.plan_size, launch_experts.plan_rows, launch_experts.plan_room)
        )
        out = self.empty(size)
        assert plan_cuda.make("expert_plan", ids, adapters, experts, slots, out, config, rows, room)
        message = f"ids {list(ids.shape)}, E = {experts}, L = {slots}, {config}, seed {self.seed}"
        assert_equal(out, reference.expert_plan(ids, adapters, experts, slots), message)


@pytest.fixture
def on_cpu(library, monkeypatch):
    return OnCpu(library, monkeypatch)


def draw(shape, limit, seed=0, dtype=torch.int32, device="cpu", wild=True):
    """Ids −1 … limit, among them some far out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, limit + 1, shape, generator=generator, dtype=dtype)
    if wild:
        for value in WILD[dtype]:
            ids[torch.rand(shape, generator=generator) < 0.01] = value
    return ids.to(device)


@pytest.mark.parametrize("slots", [0, 1, 7, 8, 64, 1000])
def test_rows_on_the_cpu(on_cpu, slots):
    for tokens, dtype in ((0, torch.int32), (1, torch.int64), (33, torch.int32), (512, torch.int64), (513, torch.int32), (1300, torch.int64)):
        on_cpu.seed += 1
        on_cpu.dense(draw((tokens,), slots, tokens, dtype), slots)


def test_several_rounds_of_a_warp_on_the_cpu(on_cpu):
    """5 rounds are one more than are in flight at once; the last warps have no rows."""
    for blocks, tokens in ((1, 2500), (2, 4700)):
        config = launch.plan_cuda_with("sm_90", tokens, 37, 0, False, blocks)
        assert config.rounds == 5
        on_cpu.dense(draw((tokens,), 37), 37, config)
        on_cpu.dense(torch.full((tokens,), 36), 37, config)
        assert launch.plan_pairs_with("sm_90", tokens, 6, 5, 2) is not None
        on_cpu.experts(draw((tokens, 1), 6), draw((tokens,), 5), 6, 5, launch.plan_pairs_with("sm_90", tokens, 6, 5, 2))


def test_a_whole_cluster_on_the_cpu(on_cpu):
    config = launch.plan_cuda("sm_90", 16 * 512 + 9, 5, 2, True)
    assert (config.blocks, config.rounds) == (16, 2)
    on_cpu.experts(draw((8201, 1), 5), draw((8201,), 2), 5, 2)
    assert launch.plan_cuda("sm_90", 2100, 4, 1023, True).kernel == "plan_pairs"
    on_cpu.experts(draw((2100, 1), 4), draw((2100,), 1023), 4, 1023)
    assert on_cpu.launches == ["plan", "plan_pairs"]


@pytest.mark.parametrize("kernel", ["plan", "plan_pairs"])
def test_routes_on_the_cpu(on_cpu, kernel):
    choose = launch.plan_pairs_with if kernel == "plan_pairs" else lambda a, m, e, s, b: launch.plan_cuda_with(a, m, e, s, True, b)
    for tokens, per_token, experts, slots, blocks in (
        (3, 2, 3, 2, 2), (100, 8, 64, 1, 2), (300, 4, 5, 3, 4), (150, 8, 128, 16, 4), (520, 2, 1, 0, 4), (512, 2, 2, 1, 2)
    ):  # fmt: skip
        config = choose("sm_90", tokens * per_token, experts, slots, blocks)
        for kind in ("random", "no adapters", "masked", "one expert", "one pair", "few pairs"):
            on_cpu.seed += 1
            ids, adapters = draw((tokens, per_token), experts, tokens, torch.int64), draw((tokens,), slots, tokens + 1)
            if kind == "masked":
                ids.fill_(-1)
            elif kind == "few pairs":
                ids.clamp_(0, 1), adapters.clamp_(-1, 0)
            elif kind.startswith("one"):
                ids.fill_(experts - 1)
                adapters = torch.zeros_like(adapters) if kind == "one pair" else adapters
            on_cpu.experts(ids, None if kind == "no adapters" else adapters, experts, slots, config)
    assert set(on_cpu.launches) == {kernel}


def test_strides_on_the_cpu(on_cpu):
    on_cpu.dense(draw((90, 3), 5)[:, 1], 5)
    on_cpu.dense(draw((180,), 5, dtype=torch.int64)[1::2], 5)
    on_cpu.experts(draw((8, 60), 5).t()[:, ::2], draw((60, 3), 2, dtype=torch.int64)[:, 2], 5, 2)
    on_cpu.experts(draw((40, 1), 5).expand(40, 4), draw((1,), 2).expand(40), 5, 2)
    on_cpu.experts(draw((9, 2, 8), 5, dtype=torch.int64)[:, 1, 1::2], draw((9,), 2), 5, 2, launch.plan_pairs_with("sm_90", 36, 5, 2, 2))


# --- the choice ---


def test_what_fits_is_taken_and_what_does_not_is_left():
    """On an H200: 64k rows of 1024 slots, 32k routes of 512 pairs, and more pairs than can be counted."""
    assert launch.plan_cuda("sm_90", 65536, 1024, 0, False).kernel == "plan"
    assert launch.plan_cuda("sm_90", 32768, 128, 3, True).kernel == "plan"
    assert launch.plan_cuda("sm_90", 65536, 256, 64, True).kernel == "plan_pairs"
    assert launch.plan_cuda("sm_90", 300_000, 8, 0, False) is None and launch.plan_cuda("sm_90", 64, 40_000, 0, False) is None
    for arch in ("sm_80", "sm_89"):
        assert launch.plan_cuda(arch, 512, 8, 0, False) is None


@pytest.mark.parametrize("arch,limit,most", [("sm_90", 227, 16), ("sm_100", 227, 16), ("sm_120", 99, 8), ("sm_103", 99, 8)])
def test_the_choice_stays_inside_what_a_block_has(arch, limit, most):
    taken = set()
    for items in (0, 1, 511, 513, 4096, 32768, 65536, 262144, 262145):
        for experts in (0, 1, 8, 128, 1024, 4096, 10_000):
            for slots in (0, 1, 3, 64, 1024, 5000):
                c = launch.plan_cuda(arch, items, experts, slots, True)
                if c is None:
                    continue
                taken.add((c.kernel, c.blocks))
                assert c.shared <= c.most_shared == limit << 10 and c.blocks <= most and c.blocks & (c.blocks - 1) == 0
                assert c.blocks * c.rounds * launch.PLAN_THREADS >= items and c.rounds <= launch.PLAN_ROUNDS
                assert (experts if c.kernel == "plan_pairs" else experts * (slots + 1)) < 4096
    assert {("plan", 1), ("plan", most), ("plan_pairs", 2), ("plan_pairs", most)} <= taken


def test_without_the_module_triton_plans(monkeypatch):
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: None)
    config = launch.plan_cuda("sm_90", 9, 3, 0, False)
    assert plan_cuda.make("plan", torch.zeros(9, dtype=torch.int32), None, 3, 0, torch.empty(14, dtype=torch.int32), config) is False


# --- on a GPU ---


@pytest.fixture
def taken(monkeypatch):
    """The configurations that csrc/plan.cu was launched with; each call must be."""
    seen, make = [], plan_cuda.make

    def watched(name, ids, adapters, experts, slots, out, config, *tiles):
        done = make(name, ids, adapters, experts, slots, out, config, *tiles)
        assert done, cuda.why_not("plan", out.device.index)
        seen.append(config)
        return done

    monkeypatch.setattr(plan_cuda, "make", watched)
    return seen


def forms(ids):
    yield ids
    yield ids.long()
    yield torch.stack([ids, ids], -1)[..., 1]
    yield torch.full_like(ids, -1)
    yield ids.clamp(max=0).clamp(min=0)
    yield ids.flatten().sort(descending=True).values.view(ids.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [0, 1, 8, 64, 257, 1024, 2000])
def test_rows(taken, slots):
    tokens = (0, 1, 7, 128, 129, 512, 513, 2048, 4096, 10_000, 32768, 65536, 200_000)
    for count in tokens:
        for ids in forms(draw((count,), slots, count, device="cuda")):
            got = glo.plan(ids, slots)
            assert_equal(got, reference.plan(ids, slots), f"T = {count}, L = {slots}")
    assert {c.blocks for c in taken} >= {1, 2, 16}


@pytest.mark.gpu
@pytest.mark.parametrize("experts,slots", [(8, 0), (8, 1), (128, 1), (128, 3), (256, 7), (256, 64), (1024, 64), (3, 1000)])
def test_routes(taken, experts, slots):
    for tokens, per_token in ((1, 8), (7, 2), (64, 8), (65, 8), (512, 8), (700, 6), (4096, 8), (8192, 8), (33_000, 1)):
        adapters = draw((tokens,), slots, tokens, device="cuda")
        for i, ids in enumerate(forms(draw((tokens, per_token), experts, tokens, device="cuda"))):
            chosen = (adapters, None, adapters.long(), adapters, adapters.clamp(-1, 0), adapters)[i]
            got = glo.expert_plan(ids, chosen, experts, slots)
            assert_equal(got, reference.expert_plan(ids, chosen, experts, slots), f"{tokens} × {per_token}, form {i}")
    assert ("plan_pairs" if experts * (slots + 1) >= 4096 else "plan") in {c.kernel for c in taken}


@pytest.mark.gpu
def test_captured_and_replayed_after_whatever_writes_the_ids(taken):
    """The plan's blocks start while the kernel ahead still writes the ids, through which they go again and again."""
    for experts, slots in ((64, 3), (256, 64)):
        ids, adapters = (draw(s, n, device="cuda", wild=False) for s, n in (((700, 8), experts), ((700,), slots)))
        step = torch.arange(5600, device="cuda", dtype=torch.int32).view(700, 8)
        glo.expert_plan(ids, adapters, experts, slots), glo.plan(adapters, slots)
        graph, seen = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(12):
                ids.add_(step).remainder_(experts + 1)
                adapters.add_(step[:, 0]).remainder_(slots + 1)
                seen.append((glo.expert_plan(ids, adapters, experts, slots), glo.plan(adapters, slots), ids.clone(), adapters.clone()))
        for _ in range(10):
            graph.replay()
            for routed, rows, now, at in seen:
                assert_equal(routed, reference.expert_plan(now, at, experts, slots))
                assert_equal(rows, reference.plan(at, slots))


@pytest.mark.gpu
def test_a_known_kernel_is_captured_at_new_sizes(taken):
    ids = draw((900,), 5, device="cuda")
    glo.plan(ids, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = glo.plan(ids[:700], 300)
    graph.replay()
    assert_equal(got, reference.plan(ids[:700], 300))


@pytest.mark.gpu
def test_calls_are_prepared(taken):
    for seed in range(4):
        ids, adapters = draw((300, 8), 16, seed, device="cuda"), draw((300,), 4, seed, device="cuda")
        assert_equal(glo.expert_plan(ids, adapters, 16, 4), reference.expert_plan(ids, adapters, 16, 4))
        assert_equal(glo.plan(adapters, 4), reference.plan(adapters, 4))
    assert len(taken) == 2 and len(expert_op._cuda.table) == len(dense_op._cuda.table) == 1


@pytest.mark.gpu
def test_triton_makes_the_same_plans(monkeypatch):
    ids, adapters = draw((300, 8), 16, device="cuda"), draw((300,), 4, device="cuda")
    made = glo.expert_plan(ids, adapters, 16, 4), glo.plan(adapters, 4)
    expert_op._cuda.table.clear(), dense_op._cuda.table.clear()
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: None)
    for one, other in zip(made, (glo.expert_plan(ids, adapters, 16, 4), glo.plan(adapters, 4))):
        assert_equal(one, other)
