"""`delta_` at 17 token counts from 1 to 512, and what idle slots, padded ranks and idle batches cost: see `curve_workloads`.

    pytest bench/bench_curve.py --bench-json …                       all rows, some 172
    pytest bench/bench_curve.py -k "wo_a-r16-S8-T" …                 one curve

Every call is the same at every T: no plan is given, an op that needs one makes it (from 129 tokens of several slots on). `jump` is a
row's time over that of the row with the next fewer tokens: a path that is chosen too early or too late stands out. `hot_us` has
everything in the L2; `given_us`, and its `given_jump`, a plan made beforehand, where one is needed. `times_beside` is the time over
that of the row named in `beside`. Ratios are there where both rows ran.
"""

import pytest
import torch

from grouped_lora_ops import launch

from . import contenders as who
from . import measure, workloads
from .conftest import Case, difference
from .curve_workloads import CURVE

CONTENDERS = ("ours",)
ROUNDS = 9  # of each figure: 172 rows are to take less than 90 s


@pytest.fixture(scope="module")
def case(request, device):
    tiny = request.config.getoption("--tiny")
    made = Case(request.param.tiny() if tiny else request.param, "delta", device, tiny)
    yield made
    made.__dict__.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[float, float]]:
    """{row: (µs, µs with the plan given)} of this run."""
    return {}


def calls_of(w, sets: list[dict], shared: dict, plan) -> list:
    return who.variants("delta", "ours", who.Inputs(w, sets, shared, plan))[""]


def mismatch(case: Case, plans: list) -> str | None:
    """None where ours has the reference's bits on small integers, without a plan and with one."""
    exact = workloads.integer_set(case.w, case.device)
    outs = [exact["out"].clone() for _ in plans]
    want = case.run_reference(who.Inputs(case.w, [exact], case.shared), exact)
    for plan, out in zip(plans, outs, strict=True):
        calls_of(case.w, [{**exact, "out": out}], case.shared, plan)[0]()
        if found := difference(out, want):
            return found + ("" if plan is None else ", plan given")
    return None


@pytest.mark.parametrize("case", CURVE, indirect=True, ids=lambda w: w.name)
def test_curve(case, contender, figure, figures, timer):
    w, plans = case.w, [None]
    if launch.needs_plan(w.T, w.slots) or (case.tiny and w.slots > 1):
        plans.append(who.ours_library().plan(case.shared["adapter_ids"], w.slots))
    if wrong := mismatch(case, plans):
        pytest.fail(f"exactness gate on {w.name}: {wrong}: no figure from a wrong kernel")
    count = measure.sets_for(workloads.bytes_per_set(w), most=2 if case.tiny else 16)
    sets = [workloads.random_set(w, case.device, seed) for seed in range(count)]
    calls, given = calls_of(w, sets, case.shared, None), None
    if len(plans) > 1:
        given = timer.graph_us(calls_of(w, sets, case.shared, plans[1]), ROUNDS)

    def after(us: float) -> dict:
        more = {"given_us": given, "hot_us": timer.hot_us(calls[0])}
        if w.before in figures:
            us_before, given_before = figures[w.before]
            more |= {"jump": us / us_before, "given_jump": given and given / given_before}
        if w.beside in figures:
            more |= {"beside": w.beside, "times_beside": us / figures[w.beside][0]}
        return more

    us = figure(w, "curve", contender, timer.graph(calls), rounds=ROUNDS, after=after)
    figures[w.name] = us, given or us
