"""Which kernels `launch_experts.delta` chooses: what a kernel takes for granted, and what was measured to be faster."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from grouped_lora_ops import launch_experts
from grouped_lora_ops.launch import cdiv

SIZES = {"qwen3-30b": (2048, 768, 128), "dsv3": (7168, 2048, 256), "mixtral": (4096, 14336, 8), "small": (72, 40, 3)}


def problem(model, projection, tokens, slots=1, rank=32, itemsize=2, arch="sm_90", a_groups=None, top_k=8):
    hidden, inner, experts = SIZES[model]
    groups = 2 if projection == "gate_up" else 1
    features, out = (hidden, inner) if projection == "gate_up" else (inner, hidden)
    return launch_experts.ExpertProblem(
        arch, 132, itemsize, tokens * top_k, experts, slots, groups, a_groups or groups, features, out, rank, slots > 1, top_k
    )


GRID = list(
    itertools.product(SIZES, ("gate_up", "down"), (1, 8, 17, 24, 64, 256, 1024, 4096, 100_000), (1, 4, 64), (1, 16, 32, 64, 128, 300))
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_the_kernels_take_for_granted(arch, itemsize):
    ones = 0
    for model, projection, tokens, slots, rank in GRID:
        p = problem(model, projection, tokens, slots, rank, itemsize, arch)
        config = launch_experts.delta(p)
        kernels = [c for c in (config.fused, config.shrink, config.expand) if c is not None]
        assert (config.fused is None) == (config.shrink is not None) == (config.expand is not None)
        for c in kernels:
            assert c.mode == (launch_experts.PLAN if launch_experts.needs_plan(p.routes) else launch_experts.ROUTE)
            assert c.block_m >= 16 and (c.mode == launch_experts.ROUTE or c.plan_rows % c.block_m == 0)
            assert c.num_warps in (1, 2, 4, 8)
        if config.fused is not None:
            c, ones = config.fused, ones + 1
            assert c.mode == launch_experts.PLAN and p.rank <= c.rank_block <= 64
            assert c.rank_block * (1 if c.apart else p.a_groups) <= 64  # columns of h in a program
            assert not c.apart or p.groups == 2
            assert c.chunk % c.block_k == 0 and c.ahead in (0, 1024)
            assert (c.pdl or not c.ahead) and c.pdl == (arch != "sm_80")
            loop = p.out_features * (1 if c.apart else p.groups)
            programs = launch_experts.estimated_tiles(p, c.block_m) * (2 if c.apart else 1)
            assert programs >= 0.6 * p.sms and programs * 4096 >= 0.6 * p.sms * loop
        else:
            c = config.shrink
            assert c.ahead == 0 or (c.early and c.mode == launch_experts.PLAN and not c.split)
            assert not c.early or c.pdl  # who starts early waits
            assert c.pdl == (arch != "sm_80")
    assert (ones > 0) == (itemsize == 2)


@pytest.mark.parametrize(
    "model, projection, tokens, slots, rank, one, apart",
    [
        ("qwen3-30b", "gate_up", 8, 1, 32, False, False),  # no plan
        ("qwen3-30b", "gate_up", 64, 1, 32, True, True),
        ("qwen3-30b", "gate_up", 64, 4, 32, True, False),
        ("qwen3-30b", "gate_up", 64, 4, 64, True, True),
        ("qwen3-30b", "gate_up", 256, 4, 64, False, False),
        ("qwen3-30b", "gate_up", 1024, 1, 32, True, True),
        ("qwen3-30b", "gate_up", 4096, 1, 32, True, False),
        ("qwen3-30b", "gate_up", 4096, 1, 64, True, True),
        ("qwen3-30b", "down", 64, 1, 32, False, False),
        ("qwen3-30b", "down", 64, 4, 32, True, False),
        ("qwen3-30b", "down", 4096, 1, 32, True, False),
        ("qwen3-30b", "gate_up", 1024, 8, 16, True, True),
        ("qwen3-30b", "gate_up", 8192, 64, 16, False, False),
        ("dsv3", "gate_up", 64, 1, 32, False, False),  # its long D is split where few tiles may occur
        ("dsv3", "gate_up", 1024, 1, 32, False, False),
        ("dsv3", "gate_up", 2048, 1, 32, True, False),
        ("qwen3-30b", "gate_up", 2048, 8, 16, False, False),
        ("qwen3-30b", "gate_up", 1024, 4, 32, True, True),
        ("qwen3-30b", "gate_up", 4096, 8, 16, True, True),
        ("qwen3-30b", "down", 64, 1, 64, True, False),
        ("qwen3-30b", "down", 512, 1, 32, False, False),
        ("dsv3", "gate_up", 4096, 1, 32, True, False),
        ("dsv3", "down", 64, 1, 32, False, False),
        ("dsv3", "down", 256, 1, 32, True, False),
        ("dsv3", "down", 4096, 1, 32, False, False),
        ("mixtral", "gate_up", 64, 1, 16, False, False),  # eight tiles, each with a loop over 14336 columns
    ],
)
def test_what_was_faster(model, projection, tokens, slots, rank, one, apart):
    config = launch_experts.delta(problem(model, projection, tokens, slots, rank))
    assert (config.fused is not None) == one
    assert config.fused is None or config.fused.apart == apart


@pytest.mark.parametrize("out, apart, fewest", [(2048, False, 80), (2048, True, 40), (6144, False, 238), (6144, True, 60)])
def test_the_fewest_programs_of_one_launch(out, apart, fewest):
    """0.6 a multiprocessor, and that for every 4096 columns of a program's loop over N; apart: twice the programs, half the loop."""
    p = replace(problem("qwen3-30b", "gate_up", 4096), out_features=out)
    for experts in (fewest, fewest - 1):
        q = replace(p, experts=experts, routes=16 * experts)  # full tiles of 16 routes
        assert launch_experts.estimated_tiles(q, 16) == experts
        assert (launch_experts._one_launch(q, launch_experts.LOW, apart) is not None) == (experts == fewest)


def test_tiles_of_one_launch():
    def tile(*case):
        c = launch_experts.delta(problem(*case)).fused
        return c.block_m, c.block_n, c.block_k, c.num_stages, c.n_stages

    assert tile("qwen3-30b", "gate_up", 4096) == (64, 64, 64, 4, 4)  # three blocks a multiprocessor
    assert tile("qwen3-30b", "gate_up", 1024) == (64, 64, 64, 5, 4)
    assert tile("qwen3-30b", "down", 4096) == (32, 128, 64, 4, 3)
    assert tile("qwen3-30b", "down", 1024) == (64, 64, 128, 3, 4)
    assert tile("qwen3-30b", "gate_up", 64, 4) == (16, 128, 128, 3, 3)
    assert tile("qwen3-30b", "down", 256, 1, 64) == (16, 128, 64, 6, 4)


def test_two_launches_behind_a_plan_start_early():
    """With a plan the shrink starts while it is made, and calls A's first bytes; of few routes it starts early up to 16."""
    config = launch_experts.delta(problem("qwen3-30b", "down", 64))
    assert config.shrink.early and config.shrink.ahead == 512
    split = launch_experts.delta(problem("dsv3", "gate_up", 20, a_groups=1, rank=128))
    assert split.shrink.early and split.shrink.split and split.shrink.ahead == 0
    assert not launch_experts.delta(problem("qwen3-30b", "down", 16)).shrink.early
    assert not launch_experts.shrink(problem("qwen3-30b", "down", 64)).early  # ahead of a product, too


def test_long_rows_take_wide_blocks():
    c = launch_experts.delta(problem("dsv3", "down", 4096)).expand
    assert (c.block_m, c.block_n, c.loop) == (32, 128, 16) and c.tiles % cdiv(launch_experts.plan_rows(32768, 256, 1), 32) == 0
