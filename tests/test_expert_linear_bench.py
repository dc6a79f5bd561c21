"""The suites of expert_linear and expert_mlp: integers that are exact at real sizes, a gate that notices, floors, sets that fit."""

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
from bench import expert_contenders as who  # noqa: E402
from bench import expert_linear_workloads as workloads  # noqa: E402
from grouped_lora_ops.report import tables  # noqa: E402

CPU = torch.device("cpu")


def workload(op: str, **changed) -> workloads.LayerWorkload:
    rows = workloads.EXPERT_MLP if op == "expert_mlp" else workloads.EXPERT_LINEAR
    return replace(next(w for w in rows if w.slots == 4 and w.T == 8), **changed)


def float64_answer(w, t: dict, shared: dict, h_dtype=torch.float64) -> torch.Tensor:
    """The layer in float64, route by route, every stage rounded once to x's dtype."""

    def rounded(v):
        return v.to(w.dtype).double()

    def project(x, prefix, part, expert, slot):
        y = t[f"{prefix}weight"][expert].double() @ x
        a, b = (t[f"{prefix}lora_{c}"][slot, expert].double() for c in "ab")
        a, b = a.view(part.groups, w.rank, -1), b.view(part.groups, -1, w.rank)
        delta = torch.cat([b[g] @ (a[g] @ x).to(h_dtype).double() for g in range(part.groups)])
        return y + float(shared["scalings"][slot]) * delta

    rows = []
    for token in range(w.T):
        slot = int(shared["adapter_ids"][token])
        for k in range(w.top_k):
            expert, weight = int(shared["expert_ids"][token, k]), float(shared["topk_weights"][token, k])
            x = t["x"][token * w.top_k + k if w.projection == "down" else token].double()
            if w.projection != "mlp":
                rows.append(rounded(project(x, "", w, expert, slot) * (weight if w.projection == "down" else 1.0)))
                continue
            gate, up = rounded(project(x, "gate_up_", w.part("gate_up"), expert, slot)).chunk(2)
            a = rounded(F.silu(gate) * up)
            rows.append(rounded(project(a, "down_", w.part("down"), expert, slot)) * weight)
    y = torch.stack(rows)
    return (y.view(w.T, w.top_k, -1).sum(1) if w.projection == "mlp" else y).to(w.dtype)


@pytest.mark.parametrize(
    "op, projection", [("expert_linear", "gate_up"), ("expert_linear", "down"), ("expert_mlp", "mlp")]
)
def test_the_integers_are_exact_at_the_largest_sizes(op, projection):
    """dsv3's widths, rank 64: float32 sums give the float64 answer's bits, and an h rounded to bf16 does not."""
    w = workload(op, projection=projection, T=4, rank=64, slots=3, sizes=(7168, 2048, 2, 2))
    t = workloads.integer_set(w, CPU)
    shared = workloads.with_exact_weights(workloads.shared_inputs(w, CPU))
    got = who.ours(op, w, shared, library=glo.reference)(t)
    assert torch.equal(got, float64_answer(w, t, shared))
    assert not torch.equal(got, float64_answer(w, t, shared, torch.bfloat16))
    assert got.count_nonzero() > 0.9 * got.numel()


def layer(op: str, w):
    pytest.importorskip("pytest_benchmark")
    from bench.bench_expert_linear import Layer

    return Layer(w, op, CPU, tiny=True)


@pytest.mark.parametrize("op", ["expert_linear", "expert_mlp"])
@pytest.mark.parametrize("broken", ["scalings", "weights", "plan", "parent"])
def test_the_gate_notices(op, broken, monkeypatch):
    w = workload(op, projection="mlp" if op == "expert_mlp" else "down").tiny()
    assert layer(op, w).mismatch is None
    right = getattr(glo, op)

    def wrong(*args, **kwargs):
        args, without = list(args), args[6 if op == "expert_linear" else 10] is None
        if broken == "scalings" and not without:
            at = 6 if op == "expert_linear" else 10
            args[at] = torch.ones_like(args[at])
        if broken == "weights":
            if op == "expert_mlp":
                args[2] = torch.ones_like(args[2])
            else:
                kwargs["row_weights"] = None
        y = right(*args, **kwargs)
        if (broken == "plan" and kwargs["plan"] is not None) or (broken == "parent" and without):
            y[-1, -1] = float("inf")
        return y

    monkeypatch.setattr(glo, op, wrong)
    want = {"plan": "with LoRA, plan given", "parent": "without LoRA"}.get(broken, "with LoRA")
    assert layer(op, w).mismatch == want


@pytest.mark.parametrize("tokens, base_us", [(64, 187), (256, 190)])
def test_floors_without_lora_are_the_published_ones(tokens, base_us):
    w = replace(next(w for w in workloads.EXPERT_LINEAR if w.T == tokens and w.projection == "gate_up"), rank=0)
    assert workloads.floor_us(w) == pytest.approx(base_us, rel=0.03)


def test_a_layer_costs_its_projections_without_what_lies_between():
    w = next(w for w in workloads.EXPERT_MLP if w.T == 64)
    (total, flops), up, down = workloads.cost(w), workloads.cost(w.part("gate_up")), workloads.cost(w.part("down"))
    between = 2 * w.M * (w.part("gate_up").N + w.part("down").D + w.part("down").N) - 2 * w.T * w.hidden
    assert (total, flops) == (up[0] + down[0] - between, up[1] + down[1])


def test_bars_and_names():
    names = [w.name for w in workloads.EXPERT_LINEAR + workloads.EXPERT_MLP]
    assert len(names) == len(set(names)) == 2 * 2 * 2 * 2 * 5 + 2 * 2 * 2 * 5
    for w in workloads.EXPERT_LINEAR:
        assert w.bar("expert_linear") == (1.0 if w.T <= 64 else {16: 1.04, 64: 1.1}[w.rank])
    assert {w.bar("expert_mlp") for w in workloads.EXPERT_MLP} == {1.0}


def test_sets_fit_the_memory():
    large = next(w for w in workloads.EXPERT_MLP if w.model == "dsv3" and w.rank == 64 and w.slots == 4 and w.T == 4096)
    assert 22e9 < workloads.bytes_per_set(large) < 34e9
    assert workloads.set_count(large, int(140e9)) == 1
    assert workloads.set_count(large, int(40e9)) == 0
    small = next(w for w in workloads.EXPERT_LINEAR if w.model == "qwen3-30b" and w.projection == "down" and w.T == 1)
    assert workloads.set_count(small, None) == workloads.set_count(small, int(140e9)) > 2
    assert workloads.set_count(small, 4 * workloads.bytes_per_set(small)) == 2


def test_the_reports_table_has_the_base_the_ratio_and_the_tax():
    w = workloads.EXPERT_MLP[0]
    row = {
        "op": "expert_mlp",
        "workload": w.name,
        "contender": "ours",
        **w.facts("expert_mlp"),
        "us": 80.0,
        "base_us": 100.0,
    }
    row |= {"torch_lora_us": 150.0, "parent_us": 75.0, "peak_mib": 3.0}
    head, (line,) = tables.columns_and_lines({w.name: {"ours": row}})
    found = dict(zip(head, line))
    assert (found["base alone"], found["× base"], found["torch's base and LoRA"]) == ("100.0", "0.80", "150.0")
    assert found["ours without LoRA"] == "75.0" and "base, then `delta_`" not in head
