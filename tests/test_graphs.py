"""Captured loops on a GPU: training, ops in place, every op's first call; see also test_capture.py."""

from __future__ import annotations

import pytest
import torch
from cases import assert_bits, build

from grouped_lora_ops import _checks

pytestmark = pytest.mark.gpu
OPS = torch.ops.grouped_lora


def captured(step, warm=True):
    if warm:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def mixes(tokens, slots):
    """Ids that a loop meets one after the other."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def some():
        return torch.randint(-1, slots, (tokens,), generator=generator, device="cuda", dtype=torch.int32)

    none = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    return [some(), torch.full_like(none, slots - 1), some(), none, some().sort().values, torch.zeros_like(none), some()]


@pytest.mark.parametrize("tokens", [4, 64, 300, 2000])
@pytest.mark.parametrize("slots", [1, 5])
def test_ops_in_place_follow_ids(tokens, slots):
    """Captured with ids all 0; two layers share the ids, one in place and one by shrink and expand_."""
    c = build("wo_a", tokens=tokens, slots=slots, features=512, out=256, rank=16, ranks=True, device="cuda", poison=False)
    d = build("wo_a", tokens=tokens, slots=slots, features=512, out=256, rank=16, device="cuda", poison=False, seed=1)
    ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    outs = [c.base.clone(), d.base.clone()]

    def step():
        outs[0].copy_(c.base)
        outs[1].copy_(d.base)
        OPS.delta_(outs[0], c.x, c.a, c.b, ids, c.scalings, None, c.ranks)
        h = OPS.shrink(d.x, d.a, ids)
        OPS.expand_(outs[1], h, d.b, ids, d.scalings)

    graph, _ = captured(step)
    torch.cuda.empty_cache()
    for other in mixes(tokens, slots):
        ids.copy_(other)
        c.b.neg_()
        d.scalings.mul_(2)
        c.ranks.copy_(c.ranks.roll(1))
        graph.replay()
        got = [out.clone() for out in outs]
        step()
        for mine, eager, base in zip(got, outs, (c.base, d.base)):
            assert_bits(mine, eager)
            assert_bits(mine[other < 0], base[other < 0])


@pytest.mark.parametrize("tokens", [4, 300])
def test_a_captured_training_step(tokens):
    c = build("wo_a", tokens=tokens, slots=4, features=512, out=256, rank=16, ranks=True, device="cuda", poison=False)
    leaves = [t.requires_grad_() for t in (c.x, c.a, c.b)]
    ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")

    def step():
        y = OPS.delta(*leaves, ids, c.scalings, c.base, None, c.ranks)
        return [y, *torch.autograd.grad(y, leaves, c.grad_y)]

    graph, results = captured(step)
    for other in mixes(tokens, 4):
        ids.copy_(other)
        graph.replay()
        for mine, eager in zip(results, step()):
            assert_bits(mine.detach(), eager.detach())


def test_a_first_call_inside_a_capture_names_its_op():
    """Every op fails closed on a shape that is not compiled; afterwards the stream works and the capture succeeds."""
    c = build("plain", tokens=600, slots=3, features=456, out=104, rank=6, device="cuda", poison=False)
    h = torch.zeros(600, 6, device="cuda")
    plan = OPS.plan(c.ids, 3)
    calls = {
        "shrink": lambda: OPS.shrink(c.x, c.a, c.ids, None, plan),
        "expand": lambda: OPS.expand(h, c.b, c.ids, c.scalings, None, None, None, plan),
        "expand_": lambda: OPS.expand_(c.base, h, c.b, c.ids, c.scalings, None, None, plan),
        "delta": lambda: OPS.delta(*c.factors, None, None, torch.full_like(c.ids[:3], 5), plan),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^grouped_lora\.{name}: .*grouped_lora_ops\.warmup\("):
            captured(call, warm=False)
        torch.cuda.synchronize()
        assert torch.ones(3, device="cuda").sum().item() == 3
        graph, _ = captured(call)
        graph.replay()
        torch.cuda.synchronize()


def test_checked_values_are_left_out_of_a_capture(monkeypatch):
    """GROUPED_LORA_CHECK=1 reads ids; inside a capture it cannot, and does not try."""
    monkeypatch.setattr(_checks, "CHECK_IDS", True)
    c = build("plain", tokens=8, slots=3, features=64, out=64, device="cuda", poison=False)
    graph, y = captured(lambda: OPS.delta(*c.factors, c.base))
    graph.replay()
    assert_bits(y, OPS.delta(*c.factors, c.base))
    c.ids[0] = 3
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta: adapter_ids must be "):
        OPS.delta(*c.factors, c.base)


def test_hundreds_of_thousands_of_rows_past_2_to_the_31_elements():
    """T·G·D past 2³¹ in dense memory: the last rows equal the same rows alone."""
    tokens, groups, features = 290_000, 8, 1024
    x = torch.zeros(tokens, groups, features, dtype=torch.bfloat16, device="cuda")
    c = build("wo_a", tokens=64, slots=3, groups=groups, features=features, out=16, rank=8, device="cuda", poison=False)
    assert x.numel() > 2**31
    x[-64:] = c.x
    ids = torch.full((tokens,), 1, dtype=torch.int32, device="cuda")
    ids[-64:] = c.ids
    y = OPS.delta(x, c.a, c.b, ids, c.scalings)
    assert_bits(y[-64:], OPS.delta(*c.factors))
    assert not y[:-64].any()
    grad_y = torch.zeros_like(y)
    grad_y[-64:] = c.grad_y
    tail = (c.scalings, None, None, None, [True] * 3)
    dx, da, db = OPS.delta_backward(grad_y, x, c.a, c.b, ids, *tail)
    alone = OPS.delta_backward(c.grad_y, *c.factors, None, None, None, [True] * 3)
    assert_bits(dx[-64:], alone[0])
    assert torch.equal(da, alone[1]) and torch.equal(db, alone[2])
