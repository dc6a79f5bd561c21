"""The benchmarks' own logic: floors, bars and ids against the published tables, the report, and a tiny
run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import (  # noqa: E402
    curve_workloads,
    expert_linear_workloads,
    expert_train_workloads,
    expert_workloads,
    linear_workloads,
    measure,
    results,
    workloads,
)
from grouped_lora_ops import reference  # noqa: E402
from grouped_lora_ops.report import runs as result_files  # noqa: E402

# name: floor and bar as the tables print them
PUBLISHED = {
    "wo_a-r16-S1-T1": ("0.07", "3.6"),
    "wo_a-r16-S1-T64": ("0.79", "4.4"),
    "wo_a-r16-S2-T8": ("0.21", "3.7"),
    "wo_a-r16-S8-T1": ("0.07", "3.6"),
    "wo_a-r16-S8-T8": ("0.46", "4.0"),
    "wo_a-r16-S8-T64": ("1.22", "4.9"),
    "wo_a-r16-S8-T1024": ("12.19", "17.5"),
    "wo_a-r16-S8-T8192": ("94.13", "104.7"),
    "wo_a-r64-S1-T1024": ("11.95", "17.2"),
    "wo_a-r64-S2-T256": ("3.41", "7.4"),
    "wo_a-r64-S8-T8": ("1.55", "5.3"),
    "wo_a-r64-S8-T8192": ("95.59", "106.2"),
    "plain-r16-S1-T8": ("0.11", "3.6"),
    "plain-r16-S8-T8": ("0.41", "4.0"),
    "plain-r16-S64-T8": ("0.53", "4.1"),
    "plain-r16-S64-T64": ("2.93", "6.9"),
    "plain-r16-S64-T8192": ("50.72", "57.8"),
    "plain-r64-S2-T8": ("0.53", "4.1"),
    "plain-r64-S64-T8": ("2.00", "5.8"),
    "plain-r64-S64-T64": ("10.61", "15.7"),
    "plain-r64-S64-T8192": ("62.43", "70.4"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_floor_and_bar_are_the_published_ones(name):
    (w,) = workloads.named(name)
    assert (f"{workloads.floor_us(w):.2f}", f"{workloads.bar_us(w):.1f}") == PUBLISHED[name]


def test_there_is_a_row_for_every_row_of_the_tables():
    assert (len(workloads.WO_A), len(workloads.PLAIN)) == (36, 24)
    names = [w.name for w in workloads.DENSE + workloads.PLANS + workloads.TRAINING]
    assert len(names) == len(set(names))
    assert all(w.best_peer for w in workloads.TARGETS)
    (w,) = workloads.named("wo_a-r64-S1-T64")
    assert (w.best_peer, w.peers[w.best_peer]) == ("torch", 10.8)


@pytest.mark.parametrize("tokens, slots, adapters", [(1, 8, 1), (8, 2, 2), (8, 8, 6), (8, 64, 8), (64, 64, 42)])
def test_the_ids_hold_as_many_adapters_as_the_published_batches(tokens, slots, adapters):
    w = workloads.Workload("w", tokens, 64, 64, 16, slots)
    assert workloads.batch(w).adapters == adapters


def test_mixes():
    skewed = workloads.adapter_ids(workloads.Workload("w", 8192, 64, 64, 16, 8, mix="skewed"))
    assert 0.88 < (skewed == 0).float().mean() < 0.94 and skewed.unique().numel() == 8
    some = workloads.Workload("w", 8192, 64, 64, 16, 2, mix="some")
    assert workloads.adapter_ids(some).unique().tolist() == [-1, 0, 1] and 0.3 < workloads.batch(some).rows / 8192 - 1 / 3 < 0.37
    none = workloads.Workload("w", 8, 64, 64, 16, 8, mix="none")
    assert workloads.adapter_ids(none).eq(-1).all() and workloads.floor_us(none) == 0


def test_only_true_ranks_and_rows_with_an_adapter_cost_anything():
    whole = workloads.Workload("w", 64, 128, 256, 16, 4)
    padded = workloads.Workload("w", 64, 128, 256, 64, 4, true_ranks=(16,))
    assert workloads.cost(whole, "delta") == workloads.cost(padded, "delta")


def test_a_delta_costs_its_halves_without_h():
    w = workloads.Workload("w", 64, 128, 256, 16, 4)
    (total, flops), (a, a_flops), (b, b_flops) = (workloads.cost(w, op) for op in ("delta", "shrink", "expand"))
    h = 4 * 64 * 16
    assert (total, flops) == (a + b - 2 * h, a_flops + b_flops)


@pytest.mark.parametrize("w", [w for w in workloads.DENSE if "T8-" in w.name + "-"], ids=lambda w: w.name)
def test_integer_inputs_are_small_integers_of_the_workloads_shape_and_dtype(w):
    small = w.tiny()
    made = workloads.integer_set(small, torch.device("cpu"))
    for name, shape in workloads.shapes(small).items():
        assert made[name].shape == shape and made[name].equal(made[name].round())
        assert made[name].dtype == (torch.float32 if name == "h" else w.dtype)


def test_sets_together_exceed_the_l2_but_stay_few():
    assert measure.sets_for(1000) == 16
    assert measure.sets_for(400_000_000) == 1
    assert measure.sets_for(20_000_000) == 8


def test_the_clock_moves_only_when_a_round_moves_it():
    before = measure.gpu_clock()
    assert measure.gpu_clock() == before
    measure.advance(2.5)
    assert measure.gpu_clock() - before == pytest.approx(2.5e-6)


def test_host_us_times_every_call():
    calls = []
    least, median = measure.host_us(lambda: calls.append(1), calls=7, rounds=2)
    assert len(calls) == 14 and 0 < least <= median


# --- the exactness gate ---


def gate(monkeypatch, ours) -> str | None:
    """What the gate says of `ours(t, shared, reference)`, which updates t["out"]."""
    from bench import contenders
    from bench.conftest import Case

    def variant(inputs, is_reference):
        reference, (t,), s = contenders.ours_library().reference, inputs.sets, inputs.shared
        way = ours if not is_reference else right_way
        return [lambda: way(t, s, reference)]

    monkeypatch.setitem(contenders._OURS, "delta", variant)
    w = workloads.Workload("w", 8, 2048, 64, 16, 2)
    return Case(w, "delta", torch.device("cpu"), tiny=False).mismatch


def right_way(t, s, reference):
    reference.delta_(t["out"], t["x"], t["lora_a"], t["lora_b"], s["adapter_ids"], s["scalings"])


def test_the_gate_passes_what_is_right(monkeypatch):
    assert gate(monkeypatch, right_way) is None


def test_the_gate_notices_an_h_rounded_to_bf16(monkeypatch):
    def rounds_h(t, s, reference):
        h = reference.shrink(t["x"], t["lora_a"], s["adapter_ids"]).bfloat16().float()
        reference.expand_(t["out"], h, t["lora_b"], s["adapter_ids"], s["scalings"])

    assert "entries, the first at" in gate(monkeypatch, rounds_h)


def test_the_gate_notices_a_missing_scaling(monkeypatch):
    def unscaled(t, s, reference):
        ones = torch.ones_like(s["scalings"])
        reference.delta_(t["out"], t["x"], t["lora_a"], t["lora_b"], s["adapter_ids"], ones)

    assert "entries, the first at" in gate(monkeypatch, unscaled)


# --- results and report ---


def run_of(us: float, date: str, commit: str = "abc1234", tiny: bool = False) -> dict:
    (w,) = workloads.named("wo_a-r16-S2-T8")
    rows = [results.row(w, "delta", "ours", us), results.row(w, "delta", "torch", 19.7, variant="gather")]
    head = results.header("delta", measure.METHOD_GPU, tiny, commit)
    return head | {"gpu": "NVIDIA H200", "date": date, "rows": rows}


def write(folder: Path, run: dict) -> Path:
    path = folder / "nvidia-h200" / f"{run['date'][:10]}-{run['commit']}.json"
    results.write(path, {key: value for key, value in run.items() if key != "rows"}, run["rows"])
    return path


def test_a_row_says_how_far_from_the_floor_it_is():
    ours, torch_row = run_of(4.2, "2026-11-30T10:00:00Z")["rows"]
    assert (ours["floor_us"], ours["pct_of_floor"], ours["bar_us"]) == (0.213, 5.1, 3.745)
    assert (ours["best_peer"], ours["best_peer_us"], ours["active"]) == ("sglang best", 9.0, 2)
    assert torch_row["variant"] == "gather" and "variant" not in ours


def test_results_survive_the_file_and_put_a_row_on_a_line(tmp_path):
    run = run_of(4.2, "2026-11-30T10:00:00Z")
    path = write(tmp_path, run)
    assert result_files.read(path) == [run]
    assert len(path.read_text().splitlines()) == len(run["rows"]) + 2


def test_adapters_that_are_asked_for_occur_equally_often():
    for active in (0, 1, 8, 32):
        ids = workloads.adapter_ids(workloads.Workload("w", 64, 64, 64, 16, 32, active=active))
        assert ids.unique(return_counts=True)[1].tolist() == ([64 // active] * active if active else [64])
        assert (ids >= 0).all() == bool(active)


def test_the_tax_is_measured_wherever_so_many_adapters_can_occur():
    names = {w.name for w in linear_workloads.TAX}
    assert len(names) == len(linear_workloads.TAX) == 2 * 6 * (2 + 3 + 4 + 4 + 4)
    assert all(workloads.batch(w).adapters == w.active for w in linear_workloads.TAX)


def test_an_e8m0_scale_is_the_smallest_that_fits():
    weight = torch.randn(2, 130, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, :128, :128].clamp_(-1.75, 1.75)[0, 0] = 1.75  # 448 · 2⁻⁸
    made = linear_workloads.with_scales(weight, False, torch.float8_e8m0fnu)
    small, scale, whole = made["weight"], made["weight_scale"], made["base_weight"]
    assert small.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu and scale.shape == (2, 2, 2)
    assert scale[0, 0, 0].float() == 2.0**-8
    wide = linear_workloads.spread(scale.float(), weight)
    assert torch.equal(whole.float(), small.float() * wide)
    assert ((whole.float() - weight.float()).abs() <= weight.float().abs() / 16 + wide * 2.0**-10).all()
    blocks = torch.nn.functional.max_pool2d(weight.float().abs(), 128, ceil_mode=True) / scale.float()
    assert (blocks > 224).all() and (blocks <= 448).all()


def test_e8m0_is_measured_as_it_is_multiplied():
    (w,) = (w for w in linear_workloads.SCALED if w.name == "wo_a_g4_e8m0-r16-S8-T256")
    t = linear_workloads.random_set(w.tiny(), torch.device("cpu"), 0)
    assert t["weight_scale"].dtype == torch.float8_e8m0fnu and w.facts("linear")["weight_scale"] == "float8_e8m0fnu"
    x, a, b = t["x"], t["lora_a"], t["lora_b"]
    ids, scalings = torch.full((x.shape[0],), -1), torch.ones(3)
    y = reference.linear(x, t["weight"], a, b, ids, scalings, weight_scale=t["weight_scale"])
    assert torch.equal(y, reference.linear(x, t["base_weight"], a, b, ids, scalings))


@pytest.mark.parametrize("broken", ["linear", "delta_"])
def test_the_taxs_gate_notices_a_wrong_bit(broken, monkeypatch):
    import grouped_lora_ops as glo
    from bench import bench_tax

    w = next(w for w in linear_workloads.TAX if w.active == 8).tiny()
    shared = workloads.shared_inputs(w, torch.device("cpu"))
    t = linear_workloads.integer_set(w, torch.device("cpu"))
    assert bench_tax.mismatch(w, shared, None, t) is None
    right = getattr(glo, broken)

    def wrong(first, *args, **kwargs):
        y = right(first, *args, **kwargs)
        (first if y is None else y)[(-1,) * first.dim()] += 1
        return y

    monkeypatch.setattr(glo, broken, wrong)
    assert bench_tax.mismatch(w, shared, None, t) == {"linear": "linear", "delta_": "base, then delta_"}[broken]


# --- the curve ---


def test_the_curves_rows_come_after_those_that_they_are_compared_with():
    by_name: dict[str, curve_workloads.CurveWorkload] = {}
    for w in curve_workloads.CURVE:
        assert w.name not in by_name and bool(w.before) + bool(w.beside) == (w.T > 1 or bool(w.beside))
        if w.before:
            before = by_name[w.before]
            at = curve_workloads.TOKENS.index(w.T)
            assert (before.T, before.rank, before.slots, before.layout) == (curve_workloads.TOKENS[at - 1], w.rank, w.slots, w.layout)
        if w.beside:
            beside = by_name[w.beside]
            assert (beside.T, beside.layout, beside.rank) == (w.T, w.layout, 16)
            assert workloads.cost(w, "delta") == ((0, 0) if w.mix == "none" else workloads.cost(beside, "delta"))
        by_name[w.name] = w
    assert len(by_name) == 2 * 2 * 2 * 17 + 2 * 3 * 6


@pytest.mark.parametrize("broken", ["no plan", "plan"])
def test_the_curves_gate_notices_a_wrong_bit_with_a_plan_and_without(broken, monkeypatch):
    import grouped_lora_ops as glo
    from bench import bench_curve, contenders
    from bench.conftest import Case

    right = contenders._OURS["delta"]

    def wrong(inputs, is_reference):
        calls = right(inputs, is_reference)
        if is_reference or (inputs.plan is None) != (broken == "no plan"):
            return calls

        def call():
            calls[0]()
            inputs.sets[0]["out"][-1, -1] += 1

        return [call]

    case = Case(next(w for w in curve_workloads.CURVES if w.slots == 8 and w.T == 8).tiny(), "delta", torch.device("cpu"), True)
    plans = [None, glo.plan(case.shared["adapter_ids"], case.w.slots)]
    assert bench_curve.mismatch(case, plans) is None
    monkeypatch.setitem(contenders._OURS, "delta", wrong)
    assert bench_curve.mismatch(case, plans).endswith(", plan given") == (broken == "plan")


# --- who runs what ---


@pytest.mark.parametrize("size, groups", [(dict(slots=1024), 1024), (dict(slots=300, G=4, layout="grouped"), 1200)], ids=str)
def test_a_way_that_cannot_run_is_left_out_and_says_why(size, groups):
    """grouped_mm takes fewer than 1024 groups, and raises for more; torch's other ways are timed all the same."""
    from bench import contenders

    cpu, left_out = torch.device("cpu"), {}
    for slots in (size["slots"], 200):
        w = workloads.Workload("w", 8, 64, 64, 16, **{**size, "slots": slots})
        inputs = contenders.Inputs(w, [workloads.random_set(w, cpu, 0)], workloads.shared_inputs(w, cpu))
        ways = contenders.variants("delta", "torch", inputs, left_out)
        for names in (set(ways), set(contenders.training_variants("torch", inputs))):
            assert "loop" in names and ("gmm" in names) == (slots == 200)
        assert left_out == {"gmm": f"grouped_mm takes fewer than 1024 groups; there are {groups}"}


# --- what is timed in which order ---


def one_of(suite: str, figure, timer) -> None:
    """The test of ours on one workload of a suite, tiny, as pytest would call it."""
    from bench.bench_expert_linear import Layer
    from bench.conftest import Case

    cpu, options = torch.device("cpu"), SimpleNamespace(config=SimpleNamespace(getoption=lambda name: True))
    module = importlib.import_module("bench.bench_" + suite.removesuffix(" skew"))
    if suite in ("linear", "tax"):
        w = (linear_workloads.SCALED if suite == "linear" else linear_workloads.TAX)[0].tiny()
        getattr(module, f"test_{suite}")((w, workloads.shared_inputs(w, cpu)), "ours", cpu, figure, timer, options)
    elif suite in ("expert_linear", "expert_mlp"):
        w = getattr(expert_linear_workloads, suite.upper())[0].tiny()
        getattr(module, f"test_{suite}")(Layer(w, suite, cpu, True), "ours", figure, timer)
    elif suite == "expert_train":
        layer = module.Trained(expert_train_workloads.TRAINING[0].tiny(), cpu, True)
        module.test_train(layer, "ours", figure, timer)
    elif suite == "curve":
        module.test_curve(Case(curve_workloads.CURVE[0].tiny(), "delta", cpu, True), "ours", figure, {}, timer)
    elif suite == "wgrad":
        module.test_train(Case(workloads.TRAINING[0].tiny(), "train", cpu, True), "ours", figure, timer)
    else:
        skew = suite.endswith("skew")
        w = (expert_workloads.SKEWED if skew else expert_workloads.EXPERTS)[0].tiny()
        test = module.test_skew if skew else module.test_delta
        test((w, expert_workloads.shared_inputs(w, cpu)), "ours", cpu, figure, timer, 2)


SUITES = ["linear", "tax", "expert_linear", "expert_mlp", "expert_train", "expert_delta", "expert_delta skew", "wgrad", "curve"]


@pytest.mark.parametrize("suite", SUITES)
def test_figures_begin_rested_and_ahead_of_what_tires_the_gpu(suite, monkeypatch):
    """Eight products back to back ahead of a row's own rounds made them up to 14 % longer; ratios are of the row's own rounds."""
    pytest.importorskip("pytest_benchmark")
    seen, rows = [], []

    class Timer(measure.WallTimer):
        def graph(self, calls, flush=True, rest=False):
            seen.append("rested" if rest else "not rested")
            return super().graph(calls, flush, rest)

        def graph_us(self, calls, rounds=measure.ROUNDS, flush=True, rest=False):
            seen.append("rested" if rest or rounds < measure.ROUNDS else "not rested")
            return 2.0

        def hot_us(self, call, repeat=2):
            return seen.append("tires") or 2.0

        def eager_us(self, calls, rounds=3):
            return seen.append("tires") or 2.0

        def host_us(self, call):
            return (seen.append("tires") or 2.0,) * 2

    def figure(w, op, contender, round_us, rounds=1, after=None, **more):
        seen.append("figure")
        rows.append(more | (after(1.0) if after else {}))
        return 1.0

    monkeypatch.setattr(measure, "RESTS_FROM", 1)
    one_of(suite, figure, Timer(torch.device("cpu")))
    ahead = seen[: seen.index("figure")]
    assert ahead[-1] == "rested" or suite == "curve", "its batches are small"
    assert "tires" not in ahead and ("not rested" not in seen or suite == "curve")
    assert ("tires" in seen) == (suite in ("linear", "expert_train", "expert_delta", "wgrad", "curve"))
    ratios = {"linear": ["times_base", "tax"], "expert_linear": ["times_base", "tax"], "expert_mlp": ["times_base", "tax"]}
    for name in ratios.get(suite, []) + ["times_twin"] * suite.endswith("skew"):
        assert rows[0][name] == 0.5, name


def test_a_timer_rests_behind_the_calls_that_warm_up(monkeypatch):
    seen = []

    class Timer(measure.WallTimer):
        def rest(self):
            seen.append("rest")

    timer = Timer(torch.device("cpu"))
    timer.graph_us([lambda: seen.append("call")], rounds=2, rest=True)
    timer.graph_us([lambda: seen.append("call")], rounds=1)
    assert seen == ["call", "rest", "call", "call"] + ["call"] * 2


# --- the suites themselves, tiny, on the CPU ---


def test_every_suite_runs_at_tiny_sizes(tmp_path):
    pytest.importorskip("pytest_benchmark")
    out, theirs = tmp_path / "tiny.json", tmp_path / "pytest-benchmark.json"
    command = [sys.executable, "-m", "pytest", str(ROOT / "bench"), "--tiny", "-q", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # it is no process of xdist's
    done = subprocess.run(
        [*command, "--bench-json", str(out), f"--benchmark-json={theirs}"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (run,) = result_files.read(out)
    assert run["tiny"] and {row["op"] for row in run["rows"]} == {
        "delta",
        "shrink",
        "expand",
        "plan",
        "train",
        "expert_delta",
        "expert_train",
        "linear",
        "expert_linear",
        "expert_mlp",
        "host",
        "tax",
        "curve",
    }
    assert {row["contender"] for row in run["rows"]} >= {"ours", "reference", "torch"}
    assert all(row["us"] > 0 for row in run["rows"])
    for row in run["rows"]:
        if row["op"] == "expert_train":
            assert row["forward_us"] > 0 and row["floor_us"] > 0
            assert (row["contender"] == "ours") == ("times_torch" in row) == ("given_us" in row)
        if row["op"] == "curve":
            assert ("jump" in row) == (row["T"] > 1 and "beside" not in row and "-T64" not in row["workload"]), row
            assert row["hot_us"] > 0 and row["contender"] == "ours"
    of_theirs = [row for one in result_files.read(theirs) for row in one["rows"]]
    assert sorted(of_theirs, key=str) == sorted(run["rows"], key=str)
    heads = [{key: value for key, value in one.items() if key not in ("rows", "suite")} for one in result_files.read(theirs)]
    assert all(head | {"date": run["date"]} == {k: v for k, v in run.items() if k not in ("rows", "suite")} for head in heads)
