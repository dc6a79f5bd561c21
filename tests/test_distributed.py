"""`bench/distributed` with two processes over gloo, at small sizes; and that what it checks can be found wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.distributed import __main__ as distributed  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun, gloo")


def torchrun(*command: str, processes: int = 2):
    """The ranks see no GPU: this is a test of the script, with the reference for kernels."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run([*launcher, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)


def test_two_ranks(tmp_path):
    out = tmp_path / "run.json"
    done = torchrun("-m", "bench.distributed", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(out.read_text())
    assert run["finished"] and run["tiny"] and (run["backend"], run["gpus"], run["link"]) == ("gloo", 0, "none: CPU")
    assert run["suite"] == "distributed" and run["commit"] and "torch" in run["versions"]
    assert all(c["ok"] for c in run["checks"]) and f"{len(run['checks'])} checks, all right" in done.stdout
    parts = {}
    for c in run["checks"]:
        parts.setdefault(c["part"], set()).add(c["check"])
    assert set(run["seconds"]) == {*distributed.PARTS, distributed.LATENCY}
    for t in ("decode, T=8", "prefill, T=300"):
        for stage in ("captured", "re-routed", "swapped in place", "no adapter"):
            assert f"{t}, {stage}: the rank's groups have the unsharded bits" in parts["wo_a TP=2"]
        assert f"{t}: max abs error against float64 (bound: 2 × the reference's)" in parts["wo_a TP=2"]
    layers = [name for name in parts if name.startswith("layers TP=2")]
    assert len(layers) == 6 and all("replicated factors' gradients, summed once" in parts[name] for name in layers)
    for kind in ("general", "shared-outer"):
        for optimizer in ("SGD", "AdamW"):
            assert "3 optimiser steps: what they changed" in parts[f"experts EP=2, {kind}, {optimizer}"]
        assert "forward and backward, a rank without tokens: factors' gradients" in parts[f"experts EP=2, {kind}"]
    assert {f"{name}: both ranks raise the same error" for name in ("export to a full disk", "a weight of another shape")} <= parts[
        "a failing rank"
    ]
    contenders = {(r["T"], r["contender"]) for r in run["rows"]}
    assert contenders == {(t, name) for t in (8, 9) for name in ("ours", "torch", "torch_bmm", "base_bmm")}
    for row in run["rows"]:
        assert row["us"] == max(row["us_by_rank"]) > 0 and ("times_ours" in row) == (row["contender"] != "ours")
    assert [m["off_diagonal_bytes"] for m in run["wo_a"]] == [t * 4 * 3 * 24 * 2 for t in (8, 300)]


# what is spoilt in one run, on both ranks alike, and what must be found
SPOILT = """
import sys
sys.path.insert(0, {root!r})
from bench.distributed import __main__ as distributed, experts, failing, layers
from grouped_lora_ops.nn import linear
real, plain = layers.sum_gradients, linear.delta_
def of_other_rows(out, x, a, b, ids, *rest, **options):  # where a rank has its groups only
    plain(out, x, a, b, ids.roll(1) if x.dim() == 3 and x.shape[1] == 4 else ids, *rest, **options)
linear.delta_ = of_other_rows
layers.sum_gradients = experts.sum_gradients = lambda *a, **k: [real(*a, **k) for _ in range(2)]
failing.write_adapter = lambda *a, **k: None
sys.exit(distributed.main(["--tiny", "--out", {out!r}, "--parts", "wo_a,layers,experts,failing"]))
"""
FOUND = [
    "wo_a TP=2: decode, T=8, captured: the rank's groups have the unsharded bits",
    "wo_a TP=2: prefill, T=300, swapped in place: both ranks' groups joined are the unsharded output",
    "wo_a TP=2: prefill, T=300, re-routed: rows without an adapter keep base's bits",
    "wo_a TP=2: prefill, T=300: max abs error against float64 (bound: 2 × the reference's)",
    "layers TP=2, float32, apart, sequence whole: replicated factors' gradients, summed once",
    "layers TP=2, bfloat16, fused, sequence divided: replicated factors' gradients, summed once",
    "experts EP=2, shared-outer: forward and backward: factors' gradients",
    "experts EP=2, shared-outer, SGD: 3 optimiser steps: what they changed",
    "a failing rank: export to a full disk: both ranks raise the same error",
    "a failing rank: afterwards an export succeeds",
]


def test_what_is_wrong_is_found(tmp_path):
    script, out = tmp_path / "spoilt.py", tmp_path / "run.json"
    script.write_text(SPOILT.format(root=str(ROOT), out=str(out)))
    done = torchrun(str(script))
    assert done.returncode != 0
    checks = {f"{c['part']}: {c['check']}": c["ok"] for c in json.loads(out.read_text())["checks"]}
    assert not any(checks[name] for name in FOUND), [name for name in FOUND if checks[name]]
    assert checks["experts EP=2, general, SGD: 3 optimiser steps: what they changed"]  # nothing is summed there
    assert checks["layers TP=2, float32, apart, sequence divided: divided factors' gradients"]


def test_one_process_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        distributed.parse(["--tiny"])
    assert "two ranks are needed: torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_a_check_is_right_if_it_is_on_both_ranks():
    def line(ok, value):
        return {"part": "p", "check": "c", "ok": ok, "value": value, "bound": 1.0}

    assert distributed.merged([[line(True, 0.1)], [line(True, 0.5)]]) == [line(True, 0.5)]
    for ranks in ([line(True, 0.5)], [line(False, 2.0)]), ([line(False, 2.0)], [line(True, 0.5)]):
        assert distributed.merged(list(ranks)) == [line(False, 2.0)]
    text = distributed.table([line(False, 2.0), line(True, None)], [], [], {"p": 1.0})
    assert "FAILED c" in text and text.endswith("2 checks, 1 FAILED")
