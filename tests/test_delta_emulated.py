"""csrc/delta.cu on the CPU, a fiber a thread (delta_on_cpu.h): exact for small integers, whatever runs first and whatever was guessed.

What ops/delta_cuda.py packs drives it, by the ops themselves. Operands end where forbidden memory begins; shared memory is as long as
the launch says.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import emulation
import pytest
import torch
from cases import FORMS, build
from test_delta import check
from test_linear_csrc import OnCpu

from grouped_lora_ops import driver
from grouped_lora_ops.ops import common, delta_cuda

ROOT = Path(__file__).parents[1]
KERNEL = re.compile(r"^ +DELTA\(E, (\d+), (\d+), (\d+), (\d+), (\d+), \d+, \d+\) *\\?\n", re.MULTILINE)


def names_of(text: str) -> list[str]:
    return [f"delta_{dtype}_{'_'.join(sizes)}" for dtype in ("bf16", "fp16") for sizes in KERNEL.findall(text)]


def translated(change=lambda text: text, most=64) -> str:
    """csrc/delta.cu as C++, its kernels of up to `most` ranks: what is not plain C++ in it is replaced, each so often."""
    text = KERNEL.sub(lambda found: found[0] if int(found[2]) <= most else "", change((ROOT / "csrc/delta.cu").read_text()))
    text = re.sub(r"\\\n(ALL\()", r"\n\1", text)  # where the last line of the list is gone
    text = emulation.replaced(
        text,
        (r'#include "tile.cuh"', f'#include "{ROOT / "tests/delta_on_cpu.h"}"', 1),
        (r"extern __shared__ __align__\(128\) u8 memory\[\];", "u8 *memory = cpu::now->block->memory;", 1),
        (r'asm volatile\("ld\.relaxed\.gpu\.global\.[^;]*;".*', "v = *from;", 4),
        (r'asm volatile\("prefetch\.global\.L2[^;]*;".*', ";", 1),
    )
    text = re.sub(r"blockIdx\.([yz])", r"cpu::block_\1", text)
    run = (
        'extern "C" const char *run_%s(const Params *p, u32 blocks, u32 tiles, u32 deep, u32 shared, u32 seed) '
        "{ return cpu::run_clusters(blocks, tiles, deep, THREADS, shared, seed, [=] { %s(*p); }); }\n"
    )
    return text + "".join([run % (name, name) for name in names_of(text)])


def compiled(folder: Path, *how):
    text = translated(*how)
    return emulation.compiled(folder, "delta", text, names_of(text))


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    emulation.needs_compiler()
    return compiled(tmp_path_factory.mktemp("delta_on_cpu"))


class DeltaOnCpu(OnCpu):
    stem = "delta"

    def __init__(self, library, monkeypatch):
        super().__init__(library, monkeypatch)
        monkeypatch.setattr(common, "INTERPRETER", ("sm_90", 132))
        self.asked = []

    def function(self, op, name, shared, wide_cluster):
        return name, shared

    def launch(self, function, grid, threads, layout, values, *, shared, pdl):
        name, most = function
        data, _ = driver.pack(layout, values)
        assert threads == delta_cuda.THREADS and shared <= most <= 227 << 10
        self.asked.append((name, shared == most))
        x, ids, ranks, scalings = values[0], *values[5:8]
        for t in (x, ids, ranks, scalings) if pdl else ():  # the kernel ahead may write these
            if t is not None:
                whole = 0 if t.dtype.is_floating_point else t.element_size()
                span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
                self.library.hide(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(span * t.element_size()), whole)
        wrong = getattr(self.library, f"run_{name}")(ctypes.c_char_p(data), *grid, shared, self.seed)
        self.seed += 1
        assert wrong is None, f"{name}: {wrong.decode()}, seed {self.seed - 1}"


@pytest.fixture
def on_cpu(library, monkeypatch):
    made = DeltaOnCpu(library, monkeypatch)
    yield made
    made.close()


def at_edges(on_cpu, c):
    return replace(c, **{name: on_cpu.edge(getattr(c, name)) for name in ("x", "a", "b", "base", "ids", "scalings", "ranks")})


HOW = ["cuda", "cuda crowded", "cuda merged", "cuda split2", "cuda spread", "cuda early", "cuda crowded merged spread"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_exact(kernels, force, on_cpu, how, dtype):
    """One and several slots, tiles and chunks of D; two items of N a block and more; rows of no adapter."""
    force(how)
    for form, tokens, slots, features, out, rank in (
        ("wo_a", 5, 3, 520, 136, 12),
        ("plain", 18, 1, 264, 2312, 40 if "split2" in how else 16),
        ("slices", 3, 2, 64, 8, 6),
    ):
        sizes = [40, 0, 136] if form == "slices" else None
        c = build(form, dtype, tokens=tokens, slots=slots, features=features, out=out, rank=rank, ranks=True, sizes=sizes)
        before = len(on_cpu.asked)
        check(kernels, at_edges(on_cpu, c))
        assert len(on_cpu.asked) == before + 2, "delta and delta_"


@pytest.mark.parametrize("form", FORMS)
def test_forms(kernels, force, on_cpu, form):
    force("cuda crowded")
    for tokens in (1, 7):
        check(kernels, at_edges(on_cpu, build(form, tokens=tokens, features=136, out=24, rank=6, ranks=True, id_dtype=torch.int64)))
    assert bool(on_cpu.asked) == (form != "shared h")


@pytest.mark.parametrize("how", ["cuda", "cuda crowded"])
@pytest.mark.parametrize("features, one_stage", [(4096, True), (4104, False)])
def test_a_second_stage_has_memory_where_it_is_used(kernels, force, on_cpu, how, features, one_stage):
    force(how)
    check(kernels, at_edges(on_cpu, build("plain", tokens=2, slots=2, features=features, out=16, rank=16, ids=[1, 0])))
    assert {whole for _, whole in on_cpu.asked} == {not one_stage}


# edits of the source
FAULTS = {
    "a second stage that has no memory": [("round + 1 < rounds) {\n", "round + 1 <= rounds) {\n")],
    "the guess is believed": [("bool same = now == rank && scaling_now == __float_as_uint(scaling);", "bool same = true;"),
                              ("                same = same && mine == s.selection.slots[t];\n", "                ;\n")],
    "h is read before it has come": [("        barrier_wait(arrived, 0);\n", "")],
    "the second item is the first one's": [("load_item(1, item0 + item_step);", "load_item(1, item0);")],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_sees(monkeypatch, kernels, force, tmp_path, fault):
    source = (ROOT / "csrc/delta.cu").read_text()
    assert all(source.count(before) == 1 for before, _ in FAULTS[fault])

    def change(text):
        for before, after in FAULTS[fault]:
            text = text.replace(before, after)
        return text

    on_cpu = DeltaOnCpu(compiled(tmp_path, change, 16), monkeypatch)
    force("cuda crowded")
    c = at_edges(on_cpu, build("plain", tokens=6, slots=3, features=1024, out=2312, rank=16))
    with pytest.raises(AssertionError):
        for _ in range(4):  # orders of events
            check(kernels, c)
    on_cpu.close()
