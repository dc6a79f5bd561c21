"""The suite of experts in training: integers exact at real sizes, a gate that notices, torch's way right, floors, a tiny run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grouped_lora_ops as glo  # noqa: E402
from bench import expert_linear_workloads as layers  # noqa: E402
from bench import expert_train_contenders as who  # noqa: E402
from bench import expert_train_workloads as workloads  # noqa: E402
from bench import expert_workloads as deltas  # noqa: E402
from grouped_lora_ops.report import tables  # noqa: E402

CPU = torch.device("cpu")


def workload(projection: str, **changed):
    return replace(next(w for w in workloads.TRAINING if w.projection == projection and w.slots == 4), **changed)


# --- the exact answer ---


class Rounded(torch.autograd.Function):
    """A stage: rounded to bf16, and its gradient, too."""

    @staticmethod
    def forward(ctx, v):
        return v.bfloat16().double()

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().double()


class Kept(torch.autograd.Function):
    """h, and its gradient, as a kernel that multiplies `terms` bf16 numbers in place of each keeps them."""

    @staticmethod
    def forward(ctx, v, terms):
        ctx.terms = terms
        return kept(v, terms)

    @staticmethod
    def backward(ctx, grad):
        return kept(grad, ctx.terms), None


def kept(v: torch.Tensor, terms: int) -> torch.Tensor:
    total = torch.zeros_like(v)
    for _ in range(terms):
        total = total + (v - total).bfloat16().double()
    return total


def float64_step(w, t: dict, shared: dict, grad: torch.Tensor, terms: int) -> list[torch.Tensor]:
    """y and the gradients of `leaves` by autograd in float64, route by route, stages rounded, h in `terms` bf16 numbers."""
    t = {name: value.double().requires_grad_(name in workloads.leaves(w)) for name, value in t.items()}
    ids, slots = shared["expert_ids"].tolist(), shared["adapter_ids"]
    slots = [0] * w.T if slots is None else slots.tolist()

    def delta(x, prefix, part, expert, slot):
        a, b = (t[f"{prefix}lora_{c}"][slot, expert] for c in "ab")
        a, b = a.view(part.groups, w.rank, -1), b.view(part.groups, -1, w.rank)
        each = [b[g] @ Kept.apply(a[g] @ x, terms) for g in range(part.groups)]
        return float(shared["scalings"][slot]) * torch.cat(each)

    rows = []
    for token in range(w.T):
        for k, expert in enumerate(ids[token]):
            row, slot = token * w.top_k + k, slots[token]
            if w.projection == "mlp":
                up, down = w.parts
                x = t["x"][token]
                h1 = Rounded.apply(t["gate_up_weight"][expert] @ x + delta(x, "gate_up_", up, expert, slot))
                gate, up = h1.chunk(2)
                a = Rounded.apply(F.silu(gate) * up)
                h2 = Rounded.apply(t["down_weight"][expert] @ a + delta(a, "down_", down, expert, slot))
                rows.append(h2 * t["topk_weights"][token, k])
            else:
                x = t["x"][row if w.projection == "down" else token]
                weight = t["row_weights"][row] if "row_weights" in t else 1.0
                rows.append(t["base"][row] + weight * delta(x, "", w, expert, slot))
    y = torch.stack(rows)
    y = y.view(w.T, w.top_k, -1).sum(1) if w.projection == "mlp" else y
    wanted = [t[name] for name in workloads.leaves(w)]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad.double())]


@pytest.mark.parametrize("projection, experts", [("gate_up", 2), ("down", 2), ("mlp", 1)])
def test_the_integers_are_exact_at_the_largest_sizes_and_show_an_h_in_bf16(projection, experts):
    """dsv3's widths, rank 32: 16 bits of h and of its gradient are all of it, 8 are not."""
    w = workload(projection, T=6, rank=32, slots=2, sizes=(7168, 2048, experts, experts))
    shared, t = deltas.shared_inputs(w, CPU), workloads.integer_set(w, CPU)
    grad, names = workloads.grad_of(w, CPU, integers=True), ("y", *workloads.leaves(w))
    want = workloads.exact_answer(w, t, shared, grad)
    assert all(right.count_nonzero() > 0 for right in want)
    differ = {}
    for terms in (2, 1):
        got = float64_step(w, t, shared, grad, terms)
        differ[terms] = {n for n, mine, right in zip(names, got, want, strict=True) if not torch.equal(mine.to(right.dtype), right)}
    assert not differ[2] and {name for name in names if "lora" in name} <= differ[1]


def bits(t: torch.Tensor) -> float:
    """log2 of the largest entry over the largest power of two that divides all entries."""
    t = t.double().abs()
    step = next(k for k in range(30, -30, -1) if torch.equal((t * 2.0**-k).round(), t * 2.0**-k))
    return float(t.max().log2()) - step


@pytest.mark.parametrize("projection", ["gate_up", "down", "mlp"])
def test_sums_over_as_many_routes_as_an_expert_has_fit_float32(projection):
    """qwen3-30b's widths, 256 routes of one expert, gradients that nothing rounded: 24 bits with some to spare for more sums than
    these, and the same in another order."""
    w = workload(projection, T=256, rank=32, slots=1, sizes=(2048, 768, 1, 1))
    shared, t = deltas.shared_inputs(w, CPU), workloads.integer_set(w, CPU)
    grad = workloads.grad_of(w, CPU, integers=True)
    if projection == "mlp":  # its stages round to bf16; factors in float32 get gradients in float32
        t |= {name: t[name].float() for name in workloads.FACTORS}
        found = dict(zip(("y", *workloads.leaves(w)), workloads.exact_answer(w, t, shared, grad), strict=True))
        turned = {**t, "x": t["x"].flip(0), "topk_weights": t["topk_weights"].flip(0)}
        again = dict(zip(found, workloads.exact_answer(w, turned, shared, grad.flip(0)), strict=True))
        assert all(torch.equal(again[name], found[name]) for name in workloads.FACTORS)
        gate, up = found.pop("gate_up_lora_b").chunk(2, 2)  # other powers of two in each
        found |= {"gate": gate, "up": up}
    else:
        wide = {name: value.double() for name, value in t.items()}
        args = (grad.double(), wide["x"], wide["lora_a"], wide["lora_b"], shared["expert_ids"], None, shared["scalings"])
        grads = glo.reference.expert_delta_backward(*args, wide.get("row_weights"), None, None, [True, True, True, "row_weights" in t])
        found = dict(zip(("x", "lora_a", "lora_b", "row_weights"), filter(lambda g: g is not None, grads)))
    assert max(map(bits, found.values())) < 21.5, {name: bits(value) for name, value in found.items()}


# --- the gate, and torch's way ---


def trained(w):
    pytest.importorskip("pytest_benchmark")
    from bench.bench_expert_train import Trained

    return Trained(w, CPU, tiny=True)


@pytest.mark.parametrize("projection", ["gate_up", "down", "mlp"])
@pytest.mark.parametrize("broken", ["scalings", "plan", "gradient"])
def test_the_gate_notices(projection, broken, monkeypatch):
    w = workload(projection).tiny()
    assert trained(w).mismatch is None
    name = "expert_mlp" if projection == "mlp" else "expert_delta"
    right = getattr(glo, name)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def wrong(*args, **kwargs):
        at, args = 10 if name == "expert_mlp" else 5, list(args)
        if broken == "scalings":
            args[at] = torch.ones_like(args[at])
        y = right(*args, **kwargs)
        if broken == "gradient":
            return Wrong.apply(y)
        if broken == "plan" and kwargs["plan"] is not None:
            return y + 1
        return y

    monkeypatch.setattr(glo, name, wrong)
    said = trained(w).mismatch
    begins = {"scalings": "y differs", "plan": "y differs", "gradient": "the gradient of x differs"}[broken]
    assert said.startswith(begins) and said.endswith("plan given") == (broken == "plan")


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("projection", ["gate_up", "down", "mlp"])
def test_torchs_ways_have_our_gradients_in_our_order(projection, slots):
    pytest.importorskip("pytest_benchmark")
    from bench.bench_expert_train import check

    w = workload(projection, slots=slots).tiny()
    layer = trained(w)
    ways = who.ways("torch", w, layer.shared)
    assert set(ways) == {f"{back}, {lora}" for back in ("scatter", "gather") for lora in (["pairs", "masked"] if slots > 1 else ["pairs"])}
    grad = workloads.grad_of(w, CPU)
    t = next(iter(ways.values())).prepared(layer.sets[0])
    check(layer, ways, t, grad)
    t = {**t, "a" if w.projection != "mlp" else "down_a": t["a" if w.projection != "mlp" else "down_a"] * 1.5}
    with pytest.raises(AssertionError, match="is off by"):
        check(layer, ways, t, grad)


@pytest.mark.parametrize("captures", ["both", "not pairs", "none"])
def test_what_no_graph_can_hold_is_timed_eagerly_and_said(captures):
    pytest.importorskip("pytest_benchmark")
    from bench import bench_expert_train, measure

    rows = {}

    def figure(w, op, contender, round_us, rounds=1, after=None, **more):
        us = round_us()
        rows[contender] = more | after(us) | {"us": us}
        return us

    class Timer(measure.WallTimer):
        graphs = 0

        def graph(self, calls, flush=True, rest=False):
            self.graphs += 1
            if torchs_turn and (captures == "none" or captures == "not pairs" and self.graphs in (1, 3)):
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().graph(calls, flush)

        def eager_us(self, calls, rounds=3):
            return super().graph(calls)()

    layer = trained(workload("gate_up").tiny())
    for contender in who.NAMES:
        torchs_turn = contender == "torch"
        bench_expert_train.test_train(layer, contender, figure, Timer(CPU))
    of_torch, ours = rows["torch"], rows["ours"]
    assert ours["times_bar"] == 0.5 and "method" not in ours and ours["forward_us"] > 0
    if captures == "none":
        assert of_torch["method"] == measure.METHOD_EAGER and len(of_torch["dropped"]) == 4
        assert ours["times_torch"] == ours["eager_us"] / of_torch["us"]
        return
    assert "method" not in of_torch and ours["times_torch"] == ours["us"] / of_torch["us"]
    assert set(of_torch["dropped"]) == ({"scatter, pairs", "gather, pairs"} if captures == "not pairs" else set())
    assert set(of_torch["variants"]) | set(of_torch["dropped"]) == set(who.ways("torch", layer.w, layer.shared))


def test_pairs_need_fewer_than_1024_groups():
    w = next(w for w in workloads.TRAINING if w.model == "dsv3" and w.slots == 4)
    assert {name.split(", ")[1] for name in who.ways("torch", w, deltas.shared_inputs(w, CPU))} == {"masked"}


# --- workloads, floors, the report ---


def test_there_is_a_row_for_every_model_projection_rank_and_slot_count():
    names = [w.name for w in workloads.TRAINING]
    assert len(names) == len(set(names)) == 2 * 3 * 2 * 2
    assert {w.T for w in workloads.TRAINING} == {4096} and {(w.rank, w.slots) for w in workloads.TRAINING} == {
        (rank, slots) for rank in (16, 32) for slots in (1, 4)
    }


def test_a_step_costs_its_forward_and_its_backward():
    w = workload("gate_up")
    forward, flops = deltas.cost(w)
    size, factors = 2, w.rank * (2 * w.D + w.N)
    again = forward - size * w.M * w.N  # dy, x, A and B; base has gone by
    gradients = size * (w.T * w.D + w.slots * w.experts * factors)
    assert workloads.cost(w) == (forward + again + gradients, 3 * flops)
    layer = workload("mlp")
    nbytes, flops = workloads.cost(layer)
    forward, forward_flops = layers.cost(layer)
    of_lora = sum(2 * layer.M * layer.rank * (part.groups * part.D + part.N) for part in layer.parts)
    assert flops == 2 * forward_flops + of_lora
    held = size * sum(layer.slots * layer.experts * layer.rank * (p.groups * p.D + p.N) for p in layer.parts)
    assert nbytes == 2 * forward + size * layer.T * layer.hidden + held


def test_dsv3_fits_an_h200_once_with_room_for_the_check():
    w = next(w for w in workloads.TRAINING if w.model == "dsv3" and w.projection == "mlp" and w.rank == 32 and w.slots == 4)
    assert 22e9 < workloads.bytes_per_set(w) < 35e9


def test_the_readme_says_how_many_times_faster_a_step_is():
    w = workload("mlp")
    facts = {"op": "expert_train", "workload": w.name, **w.facts("expert_train")}
    rows = [
        facts
        | {"contender": "torch", "us": 3000.0, "forward_us": 900.0, "eager_us": 4000.0, "peak_mib": 5000.0, "variant": "gather, masked"},
        facts
        | {"contender": "ours", "us": 1200.0, "forward_us": 300.0, "eager_us": 1500.0, "peak_mib": 2000.0}
        | {"times_torch": 0.4, "times_bar": 0.5},
    ]
    run = {"gpu": "a GPU", "versions": {}, "commit": "abc", "date": "2026-11-30", "method": "none", "tiny": False}
    text = tables.render([run | {"rows": rows}])
    lines = text[text.index("**Experts, forward and backward") :].splitlines()
    found = dict(zip(lines[2].split(" | "), lines[4].split(" | "), strict=True))
    assert found["ours"] == "**1200.0**" and found["torch, same run"] == "3000.0 (gather, masked)"
    assert (found["torch / ours"], found["forward: ours, torch"]) == ("2.50", "300.0, 900.0")
    assert found["without a graph: ours, torch"] == "1500.0, 4000.0"
    assert found["peak MiB: ours, torch |"] == "2000, 5000 |"
