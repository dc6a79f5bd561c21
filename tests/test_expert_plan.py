"""`expert_plan`: routes sorted by (expert, slot) and cut into tiles."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cases import assert_equal
from torch._subclasses import FakeTensorMode

import grouped_lora_ops as glo
from grouped_lora_ops import launch_experts, reference

WILD = 2**31 - 1


def want(ids, adapters, experts, slots):
    """The definition, in Python."""
    per_token = len(ids[0]) if ids else 0
    pairs = []
    for t, row in enumerate(ids):
        slot = 0 if adapters is None else adapters[t] if 0 <= adapters[t] < slots else slots
        pairs += [e * (slots + 1) + slot if 0 <= e < experts else experts * (slots + 1) for e in row]
    rows = sorted(range(len(pairs)), key=lambda m: pairs[m])
    ends = [sum(p < (e + 1) * (slots + 1) for p in pairs) for e in range(experts)]
    height = launch_experts.plan_rows(len(ids) * per_token, experts, slots)
    tiles, at = [], 0
    for pair in sorted(set(pairs)):
        count = pairs.count(pair)
        tiles += [(pair, at + i) for i in range(0, count, height)]
        at += count
    room = launch_experts.plan_room(len(pairs), experts, slots)
    assert len(tiles) <= launch_experts.plan_tiles(len(pairs), experts, slots) <= room
    blank = room - len(tiles)
    parts = [*rows, *ends, len(tiles), *[p for p, _ in tiles], *[-1] * blank, *[s for _, s in tiles], *[len(pairs)] * (blank + 1)]
    return torch.tensor(parts, dtype=torch.int32)


def check(kernels, ids, adapters, experts, slots, dtype=torch.int32, per_token=None):
    ids_t = torch.tensor(ids, dtype=dtype, device=kernels.device).view(len(ids), per_token or len(ids[0]))
    adapters_t = None if adapters is None else torch.tensor(adapters, dtype=dtype, device=kernels.device)
    got = kernels.expert_plan(ids_t, adapters_t, experts, slots)
    assert_equal(got.cpu(), want(ids, adapters, experts, slots))
    assert_equal(reference.expert_plan(ids_t.cpu(), None if adapters is None else adapters_t.cpu(), experts, slots), got.cpu())
    return got


def draw(tokens, per_token, experts, slots, seed=0, low=-1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, experts, (tokens, per_token), generator=generator).tolist()
    return ids, torch.randint(-1, slots, (tokens,), generator=generator).tolist()


@pytest.mark.parametrize("tokens,per_token,experts,slots", [(1, 8, 128, 1), (7, 2, 3, 2), (40, 4, 5, 3), (33, 1, 1, 1), (20, 3, 1024, 64)])
def test_random(kernels, tokens, per_token, experts, slots):
    check(kernels, *draw(tokens, per_token, experts, slots), experts, slots)
    check(kernels, draw(tokens, per_token, experts, slots, 1)[0], None, experts, slots, torch.int64)


@pytest.mark.parametrize("ids", [[[0] * 4] * 9, [[2, 2, 2, 2]] * 9, [[-1] * 4] * 9, [[3, -1, 3, -1]] * 9, [[0, 1, 2, 0]] * 9], ids=str)
def test_extremes(kernels, ids):
    check(kernels, ids, [1, 0, -1] * 3, 3, 2)


def test_ids_out_of_range_are_masked(kernels):
    for dtype, wild in ((torch.int32, WILD), (torch.int64, 2**32 + 1)):
        ids_t = torch.tensor([[0, wild], [-5, 2], [1, -wild], [3, 4]], dtype=dtype, device=kernels.device)
        adapters_t = torch.tensor([0, wild, -wild, 2], dtype=dtype, device=kernels.device)
        got = kernels.expert_plan(ids_t, adapters_t, 3, 2)
        assert_equal(got.cpu(), want([[0, -1], [-1, 2], [1, -1], [-1, -1]], [0, -1, -1, -1], 3, 2))


def test_no_routes(kernels):
    for tokens, per_token in ((0, 2), (3, 0)):
        ids_t = torch.zeros(tokens, per_token, dtype=torch.int32, device=kernels.device)
        got = kernels.expert_plan(ids_t, None, 4, 1)
        assert_equal(got, torch.zeros(launch_experts.plan_size(0, 4, 1), dtype=torch.int32, device=kernels.device))
        assert_equal(reference.expert_plan(ids_t.cpu(), None, 4, 1), got.cpu())


@pytest.mark.parametrize("way", ["rank", "count", "sort"])
def test_every_way_makes_the_same_plan(kernels, monkeypatch, way):
    """The ways for many routes, at few: several programs and steps, tiles of 64 rows."""
    monkeypatch.setattr(launch_experts, "RANK_LIMIT", 10**6 if way == "rank" else 0)
    monkeypatch.setattr(launch_experts, "COUNT_LIMIT", 0 if way == "sort" else 2048)
    for tokens, experts, slots in ((150, 3, 2), (40, 7, 3)):
        assert launch_experts.expert_plan(tokens * 4, experts, slots).way == way
        check(kernels, *draw(tokens, 4, experts, slots), experts, slots)


@pytest.mark.thorough
def test_many_routes(kernels):
    """Real sizes: counts over several steps, and beyond what counting can do."""
    for tokens, per_token, experts, slots, way in ((2500, 4, 12, 2, "count"), (1100, 8, 256, 8, "sort"), (100, 8, 64, 1, "rank")):
        assert launch_experts.expert_plan(tokens * per_token, experts, slots).way == way
        ids, adapters = draw(tokens, per_token, experts, slots)
        ids_t, adapters_t = (torch.tensor(t, dtype=torch.int32, device=kernels.device) for t in (ids, adapters))
        got = kernels.expert_plan(ids_t, adapters_t, experts, slots)
        assert_equal(reference.expert_plan(ids_t.cpu(), adapters_t.cpu(), experts, slots), got.cpu())


def test_strided_ids(kernels):
    ids, adapters = draw(9, 4, 5, 2)
    wide = torch.full((9, 2, 8), 99, dtype=torch.int64, device=kernels.device)
    wide[:, 1, 1::2] = torch.tensor(ids, device=kernels.device)
    far = torch.full((9, 3), 99, dtype=torch.int32, device=kernels.device)
    far[:, 1] = torch.tensor(adapters, device=kernels.device)
    assert_equal(kernels.expert_plan(wide[:, 1, 1::2], far[:, 1], 5, 2).cpu(), want(ids, adapters, 5, 2))


def test_the_size_depends_on_shapes_alone():
    for routes, experts, slots in ((8, 128, 1), (512, 128, 4), (32768, 256, 1), (65536, 1024, 64)):
        assert launch_experts.plan_tiles(routes, experts, slots) <= launch_experts.plan_room(routes, experts, slots) <= routes
    assert launch_experts.plan_size(65536, 1024, 64) < 4 * 65536 + 1100  # never (expert, slot) pairs, of which there are 66560
    with FakeTensorMode():
        fake = glo.expert_plan(torch.empty(7, 3, dtype=torch.int32), None, 5, 2)
    assert fake.shape == (launch_experts.plan_size(21, 5, 2),) and fake.dtype == torch.int32


def test_the_view():
    """The example of its docstring; its rows and ends drive torch's own grouped product."""
    ids, adapters = torch.tensor([[1, 0], [1, -1]]), torch.tensor([0, -1])
    view = glo.expert_plan_view(glo.expert_plan(ids, adapters, 2, 1), 4, 2, 1)
    assert view.rows.tolist() == [1, 0, 2, 3] and view.ends.tolist() == [1, 3] and view.count.tolist() == [4]
    assert view.pairs.tolist() == [0, 2, 3, 4] and view.starts.tolist() == [0, 1, 2, 3, 4]
    ids, _ = (torch.tensor(t) for t in draw(20, 2, 5, 1))
    view = glo.expert_plan_view(glo.expert_plan(ids, None, 5, 1), 40, 5, 1)
    x, weight = torch.randn(20, 16).bfloat16(), torch.randn(5, 24, 16).bfloat16()
    live = int(view.ends[-1])
    rows = view.rows[:live]
    got = torch._grouped_mm(x[rows // 2], weight.transpose(1, 2), offs=view.ends)
    want = torch.stack([x[m // 2] @ weight[ids.flatten()[m]].t() for m in rows.tolist()])
    assert torch.allclose(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match=r"^grouped_lora.expert_plan: plan must be int32 \[\d+\] for 41 routes, 5 experts and 1 slots"):
        glo.expert_plan_view(view.rows, 41, 5, 1)


def problems(count):
    random_ = random.Random(0)
    for _ in range(count):
        p = launch_experts.ExpertProblem(
            arch=random_.choice(["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_123"]),
            sms=random_.choice([1, 20, 132, 148]),
            itemsize=random_.choice([2, 4]),
            routes=int(2 ** random_.uniform(0, 18)),
            experts=random_.choice([1, 8, 128, 256, 1024]),
            slots=random_.choice([1, 2, 8, 64]),
            groups=random_.choice([1, 2]),
            a_groups=random_.choice([1, 2]),
            in_features=random_.choice([1, 100, 768, 2048, 7168]),
            out_features=random_.choice([1, 127, 1024, 4096]),
            rank=random_.randint(1, 512),
        )
        yield replace(p, mixed=p.slots > 1 and random_.random() < 0.7, top_k=random_.choice([1, 2, 8]))


def test_every_problem_gets_a_configuration():
    """And what fixes a row's bits does not depend on the batch."""
    for p in problems(1500):
        rows, room = (f(p.routes, p.experts, p.slots) for f in (launch_experts.plan_rows, launch_experts.plan_room))
        fixed = launch_experts.chunk_of(p.in_features), launch_experts.chunks_of(p.in_features)
        block = launch_experts.rank_block(p.rank, p.itemsize)
        config = launch_experts.delta(p)
        assert (config.fused is None) == (config.shrink is not None) == (config.expand is not None)
        products = (launch_experts.linear(p), launch_experts.linear(p, True), launch_experts.gate_up(p))
        for part in (config.fused, config.shrink, config.expand, launch_experts.shrink(p, False), *products):
            if part is None:
                continue
            assert part.rank_block == block
            if hasattr(part, "chunk"):
                assert (part.chunk, part.chunks) == fixed and part.chunk % part.block_k == 0
            if part.mode == launch_experts.PLAN:
                assert part.plan_rows == rows and rows % part.block_m == 0
                assert part.tiles == launch_experts.plan_tiles(p.routes, p.experts, p.slots) * (rows // part.block_m)
                assert part.tiles <= room * 8
            elif part.mode == launch_experts.EXPERT:
                assert p.mixed and p.routes > launch_experts.ROUTE_LIMIT
                assert part.tiles == p.experts + launch_experts.cdiv(p.routes, part.block_m) and part.block_e > p.experts
            else:
                assert part.tiles == p.routes <= launch_experts.ROUTE_LIMIT
                assert part.plan_rows in (1, 16) and part.block_m == 16
        if config.fused is not None:
            assert p.rank <= block
        if config.shrink is not None:
            columns = block * launch_experts.cdiv(p.rank, block) * p.a_groups
            assert columns % min(config.shrink.block_c, columns) == 0
        for shared in (False, True):
            wgrad = launch_experts.wgrad(p, launch_experts.wgrad_takes_halves(p.arch), shared)
            assert wgrad.run >= 1 and wgrad.run & (wgrad.run - 1) == 0 and p.groups % wgrad.merged == 0
            assert wgrad.merged == 1 or (shared and wgrad.merged * wgrad.block_r <= 64)
        assert launch_experts.expert_plan(p.routes, p.experts, p.slots).programs >= 0


def test_programs_without_a_tile_share_those_of_others_while_they_are_few():
    for tokens, groups, columns in ((64, 2, 768), (256, 1, 7168), (512, 2, 2048)):
        p = launch_experts.ExpertProblem("sm_90", 132, 2, 8 * tokens, 128, 1, groups, groups, 2048, columns, 32)
        config = launch_experts.expand(p)
        blocks = groups * launch_experts.cdiv(columns, config.block_n * config.loop)
        assert config.loop > 1 and 0 < config.shares <= config.tiles and config.shares * blocks <= 4 * 132
        assert launch_experts.expand(replace(p, routes=8)).shares == 0, "no plan"


def test_nothing_to_write_is_no_error():
    assert launch_experts.expand(launch_experts.ExpertProblem("sm_90", 16, 2, 512, 1, 8, 2, 2, 16384, 0, 8)).shares >= 0


def test_routes_share_tiles_where_many_have_a_pair():
    p = launch_experts.ExpertProblem("sm_90", 132, 2, 128, 128, 1, 2, 2, 2048, 768, 32, top_k=2)
    few = dict(top_k=8, experts=8)
    for changes, tokens in (({}, 16), (dict(routes=64), 1), (dict(top_k=8), 1), (few | dict(slots=4), 16), (few | dict(slots=5), 1)):
        config = launch_experts.delta(replace(p, **changes))
        assert (config.shrink.plan_rows, config.expand.plan_rows) == (tokens, tokens), changes


@pytest.mark.parametrize(
    "sentence,kw",
    [
        ("topk_ids must be int32 or int64; got float32.", dict(topk_ids=torch.zeros(2, 2))),
        ("topk_ids must be [T, K]; got [4].", dict(topk_ids=torch.zeros(4, dtype=torch.int32))),
        ("adapter_ids must be [2] to match topk_ids [2, 2]; got [3].", dict(adapter_ids=torch.zeros(3, dtype=torch.int32))),
        ("adapter_ids must be int32 or int64; got float32.", dict(adapter_ids=torch.zeros(2))),
        ("num_experts must be zero or more; got -1.", dict(num_experts=-1)),
        ("topk_ids must be -1 or 3 (masked) or an expert 0 … 2; got 4.", dict(topk_ids=torch.tensor([[0, 4], [1, 1]]))),
        ("topk_ids must be -1 or 3 (masked) or an expert 0 … 2; got -2.", dict(topk_ids=torch.tensor([[0, -2], [1, 1]]))),
        ("adapter_ids must be -1 (no adapter) or a slot 0 … 0; got 1.", dict(adapter_ids=torch.tensor([0, 1]))),
    ],
)  # fmt: skip
def test_bad_input(sentence, kw):
    arguments = dict(topk_ids=torch.zeros(2, 2, dtype=torch.int32), adapter_ids=None, num_experts=3, num_slots=1) | kw
    with pytest.raises(ValueError) as caught:
        glo.expert_plan(**arguments)
    assert str(caught.value) == f"grouped_lora.expert_plan: {sentence}"


@pytest.mark.gpu
def test_a_captured_plan_follows_the_ids():
    ids, adapters = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in draw(700, 8, 64, 3))
    first = glo.expert_plan(ids, adapters, 64, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = glo.expert_plan(ids, adapters, 64, 3)
    for seed in (0, 1):
        new, others = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in draw(700, 8, 64, 3, seed))
        ids.copy_(new), adapters.copy_(others)
        graph.replay()
        assert_equal(out.cpu(), reference.expert_plan(new.cpu(), others.cpu(), 64, 3))
    assert not torch.equal(first, out)
