"""The benchmarks' own logic: floors, bars and ids against the published tables, the report, and a tiny
run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure, report, results, workloads  # noqa: E402

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


@pytest.fixture
def files(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    return readme, tmp_path / "results"


def report_main(files, *options: str) -> int:
    return report.main([*options, "--readme", str(files[0]), "--results", str(files[1])])


def test_a_row_says_how_far_from_the_floor_it_is():
    ours, torch_row = run_of(4.2, "2026-11-30T10:00:00Z")["rows"]
    assert (ours["floor_us"], ours["pct_of_floor"], ours["bar_us"]) == (0.213, 5.1, 3.745)
    assert (ours["best_peer"], ours["best_peer_us"], ours["active"]) == ("sglang best", 9.0, 2)
    assert torch_row["variant"] == "gather" and "variant" not in ours


def test_results_survive_the_file_and_put_a_row_on_a_line(tmp_path):
    run = run_of(4.2, "2026-11-30T10:00:00Z")
    path = write(tmp_path, run)
    assert results.read(path) == run
    assert len(path.read_text().splitlines()) == len(run["rows"]) + 2


def test_an_unknown_schema_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 0, "rows": []}))
    with pytest.raises(ValueError, match="old.json: schema 0, this version reads 1"):
        results.read(path)


def test_report_writes_checks_and_notices_what_is_stale(files, capsys):
    readme, folder = files
    write(folder, run_of(4.2, "2026-11-30T10:00:00Z"))
    assert report_main(files, "--check") == 1 and "stale" in capsys.readouterr().err
    assert report_main(files) == 0 and report_main(files, "--check") == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| wo_a-r16-S2-T8 | 0.21 | **4.2** | 5 | 3.7 | 9.0 (sglang best) | 19.7 (gather) |" in text
    write(folder, run_of(3.9, "2026-12-01T10:00:00Z", "def5678"))
    assert report_main(files, "--check") == 1
    readme.write_text(text.replace("4.2", "1.0"))
    assert report_main(files, "--check") == 1


def test_the_newest_figure_counts_and_tiny_runs_never(files):
    readme, folder = files
    write(folder, run_of(3.9, "2026-12-01T10:00:00Z", "def5678"))
    write(folder, run_of(4.2, "2026-11-30T10:00:00Z"))
    write(folder, run_of(0.1, "2026-12-02T10:00:00Z", "aaa0000", tiny=True))
    report_main(files)
    text = readme.read_text()
    assert "**3.9**" in text and "**4.2**" not in text and "**0.1**" not in text
    assert "2026-12-01 at def5678" in text


def test_without_results_the_report_says_how_to_get_some(files):
    assert report_main(files) == 0
    assert report.EMPTY in files[0].read_text()


def test_a_readme_without_the_markers_is_an_error(files, capsys):
    files[0].write_text("nothing here")
    assert report_main(files) == 1
    assert "has no <!-- bench:start -->" in capsys.readouterr().err


def test_the_readme_shows_the_committed_results():
    assert report.main(["--check"]) == 0


# --- the suites themselves, tiny, on the CPU ---


def test_every_suite_runs_at_tiny_sizes(tmp_path):
    pytest.importorskip("pytest_benchmark")
    out = tmp_path / "tiny.json"
    command = [sys.executable, "-m", "pytest", str(ROOT / "bench"), "--tiny", "-q", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # it is no process of xdist's
    done = subprocess.run(
        [*command, "--bench-json", str(out)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    run = results.read(out)
    assert run["tiny"] and {row["op"] for row in run["rows"]} == {
        "delta",
        "shrink",
        "expand",
        "plan",
        "train",
        "expert_delta",
        "expert_train",
        "linear",
    }
    assert {row["contender"] for row in run["rows"]} >= {"ours", "reference", "torch"}
    assert all(row["us"] > 0 for row in run["rows"])
