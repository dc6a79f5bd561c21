"""Options, fixtures and the compact JSON of `pytest bench`.

    pytest bench                                                  everything (needs a CUDA GPU)
    pytest bench/bench_delta.py -k "not extra" --contenders ours,torch --bench-json out.json
    pytest bench --tiny                                           every code path at tiny sizes, CPU or GPU

Before a contender is timed it must be right: ours bit for bit on small-integer inputs of that very workload,
the others within a bf16 tolerance of the reference. A wrong one fails (a peer's wrong variant is dropped, and
said so).
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

from . import contenders as who
from . import measure, results, workloads
from .contenders import Inputs, Unavailable
from .workloads import Workload

HERE = Path(__file__).resolve().parent
OPS = {f"bench_{op}": op for op in ("delta", "shrink", "expand", "plan", "expert_delta", "linear")}
OPS |= {f"bench_{op}": op for op in ("expert_linear", "expert_mlp", "expert_train", "curve")}
OPS |= {"bench_wgrad": "train", "bench_host": "delta", "bench_tax": "tax"}

_rows = pytest.StashKey[list]()
_timer = pytest.StashKey[object]()
_started = pytest.StashKey[str]()
_saved = pytest.StashKey[float]()
TIMES = (("times_base", "× base"), ("times_twin", "× twin"), ("times_torch", "× torch"), ("times_beside", "× the row beside it"),
         ("jump", "× fewer tokens"), ("tax", "tax"))  # fmt: skip
SAVE_EVERY = 5.0  # seconds: what is measured survives a run that is killed


def pytest_addoption(parser):
    group = parser.getgroup("grouped_lora_ops bench")
    group.addoption(
        "--tiny", action="store_true", help="tiny sizes, on the CPU where there is no GPU: tests the scripts"
    )
    group.addoption("--contenders", default=",".join(who.NAMES), help="comma-separated, of: " + ", ".join(who.NAMES))
    group.addoption("--bench-json", type=Path, help="write the compact JSON here")
    group.addoption("--bench-commit", help="commit to record where the sources are not in a git checkout")
    group.addoption(
        "--peer-path", action="append", default=[], help="a folder with an unpacked peer package; repeatable"
    )


def pytest_configure(config):
    if config.getoption("--tiny") and not torch.cuda.is_available():
        torch.set_num_threads(1)  # tiny products: threads on a busy machine wait for each other, up to 100 ms a product
    config.stash[_rows], config.stash[_started], config.stash[_saved] = [], results.now(), time.monotonic()
    sys.path.extend(config.getoption("--peer-path"))
    names = config.getoption("--contenders").split(",")
    if unknown := sorted(set(names) - set(who.NAMES)):
        raise pytest.UsageError(f"--contenders: unknown {', '.join(unknown)}; there are {', '.join(who.NAMES)}")


def pytest_collect_file(file_path, parent):
    """bench_*.py are test files here, whatever python_files says."""
    patterns = parent.config.getini("python_files")
    is_bench = file_path.parent == HERE and file_path.match("bench_*.py")
    if is_bench and not any(file_path.match(pattern) for pattern in patterns):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(trylast=True)  # after the workloads, so that ids read workload-contender
def pytest_generate_tests(metafunc):
    if "contender" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--contenders").split(",")
        able = metafunc.module.CONTENDERS
        metafunc.parametrize("contender", [name for name in able if name in chosen])


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if item.path.parent == HERE]
    for item in ours:
        item.add_marker(pytest.mark.benchmark(timer=measure.gpu_clock, group=OPS[item.path.stem]))
    if config.getoption("--tiny"):  # many workloads are the same batch once they are small: run one of each
        seen, kept = set(), []
        for item in items:
            if item in ours:
                w = item.callspec.params["case"].tiny()
                key = (item.originalname, item.callspec.params["contender"], replace(w, name="", peers=()))
                if key in seen:
                    continue
                seen.add(key)
            kept.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    elif not torch.cuda.is_available():
        reason = "needs a CUDA GPU (--tiny runs every code path at tiny sizes without one)"
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


class Case:
    """One op on one workload: its tensors, made when first asked for, and whether our op gets it right."""

    def __init__(self, w: Workload, op: str, device: torch.device, tiny: bool):
        self.w, self.op, self.device, self.tiny = w, op, device, tiny
        self.shared = workloads.shared_inputs(w, device)

    def inputs(self, sets: list[dict]) -> Inputs:
        plan = None
        if self.w.T >= (2 if self.tiny else who.PLAN_FROM):
            plan = who.ours_library().plan(self.shared["adapter_ids"], self.w.slots)
        return Inputs(self.w, sets, self.shared, plan)

    @cached_property
    def timed(self) -> Inputs:
        if self.op == "plan":
            count = 2 if self.tiny else 16
            return Inputs(
                self.w,
                [{"adapter_ids": self.shared["adapter_ids"].clone()} for _ in range(count)],
                self.shared,
            )
        most = 2 if self.tiny else 4 if self.op == "train" else 16
        count = measure.sets_for(workloads.bytes_per_set(self.w), most=most)
        return self.inputs([workloads.random_set(self.w, self.device, seed) for seed in range(count)])

    @cached_property
    def expected(self) -> torch.Tensor | None:
        """The reference's answer for the first timed set, with its original out."""
        t = self.fresh()
        return self.run_reference(self.inputs([t]), t)

    def fresh(self) -> dict:
        return workloads.random_set(self.w, self.device, 0)

    def run_reference(self, inputs: Inputs, t: dict) -> torch.Tensor:
        result = who.variants(self.op, "reference", inputs)[""][0]()
        return t["out"] if result is None else result

    @cached_property
    def mismatch(self) -> str | None:
        """None where ours equals the reference bit for bit on small integers, else what differs."""
        if self.op == "plan":
            return self._plan_mismatch()
        exact = workloads.integer_set(self.w, self.device)
        mine = {**exact, "out": exact["out"].clone()}
        want = self.run_reference(self.inputs([exact]), exact)
        result = who.variants(self.op, "ours", self.inputs([mine]))[""][0]()
        got = mine["out"] if result is None else result
        return difference(got, want)

    def _plan_mismatch(self) -> str | None:
        """A plan is right if a delta computed with it is, and the same ids give the same plan."""
        ids, slots = self.shared["adapter_ids"], self.w.slots
        plan = who.ours_library().plan(ids, slots)
        if not torch.equal(plan, who.ours_library().plan(ids, slots)):
            return "two plans of the same ids differ"
        exact = workloads.integer_set(self.w, self.device)
        mine = {**exact, "out": exact["out"].clone()}
        want = Case(self.w, "delta", self.device, self.tiny).run_reference(Inputs(self.w, [exact], self.shared), exact)
        who.variants("delta", "ours", Inputs(self.w, [mine], self.shared, plan))[""][0]()
        return difference(mine["out"], want)


def difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    if torch.equal(got, want):
        return None
    wrong = got != want
    first = wrong.nonzero()[0].tolist()
    values = f"{got[tuple(first)]} ≠ {want[tuple(first)]}"
    return f"{int(wrong.sum())} of {wrong.numel()} entries, the first at {first}: {values}"


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error relative to the largest value."""
    want = want.float()
    return float((got.float() - want).abs().max() / want.abs().max().clamp_min(1e-6))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def timer(device, request):
    made = request.config.stash[_timer] = measure.timer_for(device)
    return made


@pytest.fixture(scope="module")
def case(request, device):
    tiny = request.config.getoption("--tiny")
    w = request.param.tiny() if tiny else request.param
    made = Case(w, OPS[request.path.stem], device, tiny)
    yield made
    made.__dict__.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def keep(benchmark, request, timer):
    """keep(row, peers): for --bench-json, and with its run's head for pytest-benchmark's own JSON."""

    def keep_it(row: dict, peers: dict | None = None) -> None:
        config = request.config
        if benchmark.enabled:
            config.stash[_rows].append(row)
            if time.monotonic() - config.stash[_saved] > SAVE_EVERY:
                save(config)
        head = results.header(row["op"], timer.method, config.getoption("--tiny"), _commit(config))
        head["date"] = config.stash[_started]
        benchmark.extra_info.update(row | {"run": head, "peers": dict(peers or {})})

    return keep_it


@pytest.fixture
def figure(benchmark, keep):
    """figure(w, op, contender, round_us, …): time it, hand it to pytest-benchmark, keep the row with … and what `after` makes of the µs:
    ratios, and what is timed behind the figure's rounds, as the GPU may be slower then."""

    def time_it(w: Workload, op: str, contender: str, round_us, rounds: int = measure.ROUNDS, after=None, **more) -> float:
        times = []

        def one_round():
            us = round_us()
            times.append(us)
            measure.advance(us)

        benchmark.pedantic(one_round, rounds=rounds, warmup_rounds=1)
        times = times[1:] or times
        us = statistics.median(times)
        if len(times) >= 4:
            more["q1_us"], _, more["q3_us"] = statistics.quantiles(times, n=4, method="inclusive")
        more |= after(us) if after else {}
        keep(results.row(w, op, contender, us, min_us=min(times), **more), w.peers)
        return us

    return time_it


@pytest.fixture
def measure_op(figure, timer, case, contender):
    """Check, find the best variant, time it."""

    def run() -> None:
        w, op = case.w, case.op
        if contender == "ours" and case.mismatch:
            pytest.fail(f"exactness gate, {op} on {w.name}: {case.mismatch}: no figure from a wrong kernel")
        left_out: dict = {}
        try:
            ways = who.variants(op, contender, case.timed, left_out)
        except Unavailable as reason:
            pytest.skip(str(reason))
        more: dict = {}
        if op != "plan" and contender not in ("ours", "reference"):
            ways, wrong = _right_ones(case, contender, ways)
            more["dropped"] = left_out | wrong
        if contender == "reference":  # it looks at ids on the host, so no graph can hold it
            more["method"] = measure.METHOD_EAGER if isinstance(timer, measure.GpuTimer) else timer.method
            (calls,) = ways.values()
            figure(w, op, contender, lambda: timer.eager_us(calls, rounds=1), rounds=3, **more)
            return
        tried = shortlist(timer, ways, more.get("dropped"))
        if not ways:
            why = f": {more['dropped']}" if more.get("dropped") else ""
            pytest.skip(f"{contender} has no way to run {op} on {w.name}{why}")
        best = min(tried, key=tried.__getitem__) if tried else next(iter(ways))
        calls = ways[best]

        def beside(us: float) -> dict:
            found = {"hot_us": timer.hot_us(calls[0]), "eager_us": timer.eager_us(calls)}
            return found | dict(zip(("host_us", "host_median_us"), timer.host_us(calls[0]), strict=True))

        round_us = timer.graph(calls, rest=measure.rests(w))
        figure(w, op, contender, round_us, after=beside if contender == "ours" else None, variant=best, variants=tried, **more)

    return run


def shortlist(timer, ways: dict, dropped: dict | None = None) -> dict[str, float]:
    """A quick figure of every variant, where there is a choice; with `dropped`, one that no graph can hold leaves ways."""
    if len(ways) < 2 and dropped is None:
        return {}
    tried = {}
    for name in list(ways):
        try:
            tried[name] = round(timer.graph_us(ways[name], measure.SHORTLIST_ROUNDS), 3)
        except RuntimeError as failure:
            if dropped is None:
                raise
            dropped[name] = f"not in a graph: {failure}"[:200]
            del ways[name]
    return tried


def _right_ones(case: Case, contender: str, ways: dict) -> tuple[dict, dict]:
    """The variants whose result agrees with the reference, and what was wrong with the others."""
    tolerance = 3e-2 if case.w.dtype != torch.float32 else 1e-3
    right, dropped = {}, {}
    t = case.fresh()
    original = t["out"].clone()
    for name, (call,) in who.variants(case.op, contender, case.inputs([t])).items():
        t["out"].copy_(original)
        try:
            result = call()
            error = _error(t["out"] if result is None else result, case.expected)
        except Exception as failure:  # a peer's kernel that does not compile or launch here
            if contender == "torch":
                raise
            dropped[name] = f"{type(failure).__name__}: {failure}"[:200]
            continue
        if error <= tolerance:
            right[name] = ways[name]
        elif contender == "torch":
            pytest.fail(f"torch's {name}, {case.op} on {case.w.name}: error {error:.3g} against the reference")
        else:
            dropped[name] = f"error {error:.3g} against the reference"
    return right, dropped


# --- results ---


def _commit(config) -> str:
    return config.getoption("--bench-commit") or results.commit()


def save(config) -> None:
    """What is measured so far, to --bench-json."""
    config.stash[_saved] = time.monotonic()
    path, rows = config.getoption("--bench-json"), config.stash[_rows]
    if path and rows:
        suite = "-".join(sorted({row["op"] for row in rows}))
        method = config.stash[_timer].method
        results.write(path, results.header(suite, method, config.getoption("--tiny"), _commit(config)), rows)


def pytest_sessionfinish(session):
    save(session.config)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """One line per workload: what the reader of a run looks for first."""
    rows = config.stash[_rows]
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section(f"figures, µs ({config.stash[_timer].method})")
    write(
        f"{'op':14}{'workload':36}{'floor':>8}{'ours':>9}{'% floor':>8}{'bar':>8}{'best peer':>10}  measured beside it"
    )
    by_key: dict[tuple, dict] = {}
    for row in rows:
        by_key.setdefault((row["op"], row["workload"]), {})[row["contender"]] = row
    above_bar = slower = count = 0
    for (op, name), found in by_key.items():
        any_row = next(iter(found.values()))
        ours, bar, peer = found.get("ours"), any_row["bar_us"], any_row["best_peer_us"]
        rest = {key: row for key, row in found.items() if key != "ours"}
        others = [row["us"] for key, row in rest.items() if key not in ("reference", "no_lora")]
        best = min([*others, *([peer] if peer else [])], default=None)
        marks = ""
        if ours:
            count += 1
            times = next((ours[key] for key in ("times_base", "times_twin", "times_torch") if key in ours), 0)
            if (bar and ours["us"] > bar) or times > ours.get("times_bar", math.inf):
                above_bar, marks = above_bar + 1, marks + " >bar"
            if best and ours["us"] > best:
                slower, marks = slower + 1, marks + " >PEER"
        beside = ", ".join(f"{key} {row['us']:.1f}" + (f" ({row['variant']})" if row.get("variant") else "")
                           for key, row in rest.items())  # fmt: skip
        for key, name_of in TIMES:
            if ours and key in ours:
                beside = ", ".join(filter(None, (beside, f"{name_of} {ours[key]:.2f}")))
        figures = (ours["us"], ours["pct_of_floor"]) if ours else (None, None)
        cells = [any_row["floor_us"], *figures, bar, peer]
        text = "".join(f"{'–' if c is None else format(c, '.2f' if i == 0 else '.1f'):>{width}}"
                       for i, (c, width) in enumerate(zip(cells, (8, 9, 8, 8, 10), strict=True)))  # fmt: skip
        write(f"{op:14}{name:36}{text}  {beside}{marks}")
    write(
        f"ours on {count} rows: {above_bar} above the bar, {slower} slower than the best peer (published or beside it)"
    )
