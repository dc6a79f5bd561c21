"""Without a GPU our Triton kernels run in Triton's interpreter, on CPU tensors; with one, on it.

A test that takes the fixture `kernels` runs our kernels. On a machine with a GPU such tests carry the mark `gpu`. Those
marked `thorough` compile many kernels that no caller meets: a GPU runs them only with `--thorough`.
"""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

GPU = torch.cuda.is_available()
if GPU:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter  # imports Triton, which looks at that variable

    interpreter.prepare()
    torch.set_num_threads(1)  # tiny products: two threads on a busy machine wait for each other, up to 10 ms a product


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Without a GPU a run of everything uses all cores, where pytest-xdist is installed; `-n 0` keeps to one process."""
    if hasattr(config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ:
        return  # one of those processes itself
    whole = not config.option.file_or_dir and not config.option.collectonly and not config.option.usepdb
    if not GPU and whole and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = os.cpu_count()


def pytest_addoption(parser):
    about = "on a GPU, run the tests marked thorough, too; without one, compile all kernels, not some"
    parser.addoption("--thorough", action="store_true", help=about)
    parser.addoption("--fuzz-seconds", type=float, default=0, help="draw calls for test_fuzz.py this long, other ones each time")
    parser.addoption("--fuzz-seed", type=int, help="begin with this seed, as such a run printed it")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: compiles many kernels; on a GPU only with --thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if GPU and item.get_closest_marker("thorough") and not config.getoption("--thorough"):
            item.add_marker(pytest.mark.skip(reason="thorough: only with --thorough"))
        if "kernels" in getattr(item, "fixturenames", ()) and GPU:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@contextmanager
def poisoned():
    """Every torch.empty is filled with NaN (integers: their largest value)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Kernels:
    """The ops as our kernels run them, on poisoned memory: `torch.ops` on a GPU, else the interpreter."""

    device = "cuda" if GPU else "cpu"
    STEMS = {
        "plan": ("plan", "_cuda"),
        "expert_plan": ("expert_plan", "_cuda"),
        "shrink": ("shrink", "_cuda"),
        "expand": ("expand", "_cuda"),
        "expand_": ("expand", "_cuda_"),
        "delta": ("delta", "_cuda"),
        "delta_": ("delta", "_cuda_"),
        "linear": ("linear", "_cuda"),
        "linear_backward": ("linear", "_backward_cuda"),
        "shrink_backward": ("shrink", "_backward_cuda"),
        "expand_backward": ("expand", "_backward_cuda"),
        "delta_backward": ("delta", "_backward_cuda"),
    }

    def __getattr__(self, name):
        stem, implementation = self.STEMS[name]
        if GPU:
            run = getattr(torch.ops.grouped_lora, name)
        else:
            run = getattr(importlib.import_module(f"grouped_lora_ops.ops.{stem}"), implementation)

        def call(*args, **kwargs):
            with poisoned():
                return run(*args, **kwargs)

        return call


@pytest.fixture
def kernels():
    return Kernels()


@pytest.fixture(autouse=True)
def fresh_choices():
    """Launch choices are remembered; a test that changes how they are made must not meet, or leave, older ones."""
    from grouped_lora_ops.ops import common, prepared

    common.configured.cache_clear()
    prepared.forget()
    yield
    common.configured.cache_clear()
    prepared.forget()


@pytest.fixture
def force(monkeypatch):
    """force("plan fused tall") makes the launch choice at sizes that would choose otherwise.

    cuda: csrc/delta.cu (on a GPU); merged: the groups' rows in one tile; spread: two clusters share N; early: not
    started before the kernel ahead has ended; split2: its blocks split r;
    crowded: the kernel that is one of three on a multiprocessor. plan: rows come from a plan at any T. fused,
    split, whole: delta in one launch, or two with the sum over D cut or not; span: three of its chunks a
    program. tall: 64-row tiles and several blocks of N
    a program.
    """
    from grouped_lora_ops import launch
    from grouped_lora_ops.ops import common, prepared

    shrink, expand, fused = launch.shrink, launch.expand, launch.fused

    def tall(config, p, **changes):
        tiles = launch.tile_count(64, p.tokens, p.slots, config.mode == launch.SINGLE)
        return replace(config, block_m=64, tiles=tiles, **changes)

    def apply(how: str):
        words = how.split()
        common.configured.cache_clear()
        prepared.forget()
        if "plan" in words:
            monkeypatch.setattr(launch, "SCAN_TOKENS", 0)
        if "tall" in words:
            monkeypatch.setattr(launch, "shrink", lambda p, *args, **kw: tall(shrink(p, *args, **kw), p))
            monkeypatch.setattr(launch, "expand", lambda p, **kw: tall(expand(p, **kw), p, block_n=64, loop=4))
        if "fused" in words:
            block_m = 64 if "tall" in words else 16
            monkeypatch.setattr(launch, "delta", lambda p: launch.DeltaConfig(fused(p, block_m), None, None))
        elif "cuda" in words:

            def choose(p):
                two = launch.DeltaConfig(None, launch.shrink(p, True), launch.expand(p))
                able = [k for k in launch.CUDA_KERNELS if k[1] >= p.rank and (k[2] > 1 or "split2" not in words)]
                able = [k for k in able if (k[4] > 1) == ("crowded" in words)]
                if not able:
                    return two
                merge = "merged" in words and p.shared_a and p.groups in (2, 4, 8)
                return replace(two, cuda=launch.cuda(p, able[0], merge, 1 + ("spread" in words), "early" not in words))

            monkeypatch.setattr(launch, "delta", choose)
        elif "split" in words:
            span = 3 if "span" in words else 1
            monkeypatch.setattr(
                launch, "delta", lambda p: launch.DeltaConfig(None, replace(launch.shrink(p, True), span=span), launch.expand(p))
            )
        elif "whole" in words:
            monkeypatch.setattr(launch, "delta", lambda p: launch.DeltaConfig(None, launch.shrink(p), launch.expand(p)))

    return apply
