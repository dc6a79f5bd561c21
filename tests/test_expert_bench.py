"""The expert workloads: their floors are the published ones, their gate catches a wrong kernel, the tuning script runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import expert_workloads as workloads  # noqa: E402
from bench import session  # noqa: E402
from grouped_lora_ops import reference  # noqa: E402
from grouped_lora_ops.report import tables  # noqa: E402


@pytest.mark.parametrize("w", workloads.TARGETS, ids=lambda w: w.name)
def test_floors_are_the_published_ones(w):
    """To what another draw of the routing may change: experts that occur at T = 8 are 49 or 58, not 49 or 54."""
    assert math.isclose(workloads.floor_us(w), w.published_floor, rel_tol=0.08, abs_tol=0.06)


def test_routing_is_a_top_k():
    for w in workloads.EXPERTS:
        if w.T <= 256:
            ids, adapters = workloads.routing(w)
            assert ids.shape == (w.T, w.top_k) and adapters.shape == (w.T,)
            assert all(len(set(row)) == w.top_k and min(row) >= 0 and max(row) < w.experts for row in ids.tolist())


@pytest.mark.parametrize("w", workloads.SKEWED, ids=lambda w: w.name)
def test_skewed_routing_has_uniform_twins_of_the_same_bytes(w):
    ids, _ = workloads.routing(w)
    counts = ids.flatten().long().bincount(minlength=w.experts)
    assert w.name.startswith("skew-") and counts.max() > 3 * w.M / w.experts  # uniform: 1 ×
    assert (counts > 0).sum() == 2 if w.mix == "two" else counts[0] == counts.max()
    twins = workloads.twins(w)
    assert sum(share for _, share in twins) == pytest.approx(1)
    assert sum(share * workloads.cost(twin)[0] for twin, share in twins) == pytest.approx(workloads.cost(w)[0], rel=1e-3)
    for twin, share in twins:
        assert 0 < share <= 1 and twin.mix == "uniform" and twin.T <= w.T
        assert (twin.experts, twin.top_k, twin.D, twin.N, twin.rank) == (w.experts, w.top_k, w.D, w.N, w.rank)


def test_skewed_routing_is_in_the_sessions_expert_delta_step():
    """Its -k "not extra" leaves rows out by name."""
    files, arguments, _, asked_for = session.SUITES["expert_delta"]
    assert files == "expert_delta" and arguments[:2] == ["-k", "not extra"] and not asked_for
    assert workloads.SKEWED and not any("extra" in w.name for w in workloads.SKEWED)
    assert {w.mix for w in workloads.SKEWED} == {"two", "zipf"} and workloads.SKEW_BAR == 1.3


def test_the_readme_has_skewed_routing_in_a_table_of_its_own():
    def row(name, **more):
        w = next(w for w in workloads.EXPERTS + workloads.SKEWED if w.name == name)
        return {"op": "expert_delta", "workload": name, "contender": "ours", **w.facts("expert_delta"), "us": 50.0, **more}

    names = workloads.TARGETS[0].name, workloads.SKEWED[0].name
    run = {"gpu": "a GPU", "versions": {}, "commit": "abc", "date": "2026-11-30", "method": "none", "tiny": False}
    text = tables.render([run | {"rows": [row(names[0]), row(names[1], twin_us=40.0, times_twin=1.25)]}])
    uniform, skewed = text.split("skewed routing beside")
    assert names[0] in uniform and names[1] not in uniform and "same bytes" not in uniform.split("**`expert_delta`")[1]
    assert names[1] in skewed and names[0] not in skewed and "| 40.0 | 1.25 |" in skewed


@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_the_exact_answer_is_the_references(projection):
    """What gates the figures on a GPU, against the library's own definition."""
    w = next(w for w in workloads.TARGETS if w.projection == projection and w.slots == 4 and w.T == 8).tiny()
    shared, t = workloads.shared_inputs(w, torch.device("cpu")), workloads.integer_set(w, torch.device("cpu"))
    ids = (shared["expert_ids"], shared["adapter_ids"], shared["scalings"])
    want = reference.expert_delta(t["x"], t["lora_a"], t["lora_b"], *ids, base=t["base"])
    assert torch.equal(workloads.exact_delta(w, t, shared), want)


def test_the_tuning_script_runs(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "tune.json"
    command = [sys.executable, "-W", "ignore", "-m", "bench.tune_experts", "--out", str(out), "--tiny", "--quick", "--rounds", "1"]
    done = subprocess.run([*command, "-k", "dsv3-down-r32-S1-T1"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert rows and all("wrong" not in row and row["rows"][0]["us"] > 0 for row in rows)
