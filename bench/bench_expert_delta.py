"""expert_delta (base + scaling · B (A x) over routes) on the expert rows of the tables, and beyond (names start with `extra`);
skewed routing beside uniform routing of the same bytes (`skew`). Its training step is in bench_expert_train.py.

A figure of ours includes the plan: every call makes its own, though a layer's two projections share one. `given_us` is
the same call with the plan given, `plan_us` the plan alone. A row of skewed routing also has `twin_us`, what uniform routing takes
for the same bytes (of the batches in `twins`: token count and share), `times_twin` and `times_bar`.
"""

import pytest
import torch

from . import expert_workloads as workloads
from . import measure
from .contenders import GROUP_LIMIT, grouped_mm

CONTENDERS = ("ours", "torch")


@pytest.fixture(scope="module")
def case(request, device):
    """(workload, what its batch shares)."""
    w = request.param.tiny() if request.config.getoption("--tiny") else request.param
    yield w, workloads.shared_inputs(w, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ours(w, shared, plan=None):
    """forward(x, A, B, base) → y."""
    import grouped_lora_ops

    ids, adapters, scalings = shared["expert_ids"], shared["adapter_ids"], shared["scalings"]
    return lambda x, a, b, base: grouped_lora_ops.expert_delta(x, a, b, ids, adapters, scalings, base=base, plan=plan)


def gmm(w, shared):
    """PyTorch's way: sort routes by (expert, slot), gather rows, two `grouped_mm` a group, scatter into base's rows."""
    if w.dtype != torch.bfloat16 or w.shared or w.slots * w.experts >= GROUP_LIMIT or any(n % 8 for n in (w.D, w.N // w.groups, w.rank)):
        return None

    def forward(x, a, b, base):
        ids = shared["expert_ids"].flatten().long()
        pairs = ids if w.slots == 1 else shared["adapter_ids"].long().repeat_interleave(w.top_k) * w.experts + ids
        order = torch.argsort(pairs, stable=True)
        count = w.slots * w.experts
        ends = torch.searchsorted(pairs[order], torch.arange(count, device=ids.device), right=True).to(torch.int32)
        rows = x[order if w.projection == "down" else order // w.top_k]
        scale = shared["scalings"][pairs[order] // w.experts].to(w.dtype)[:, None]
        h = grouped_mm(rows, a.view(count, -1, w.D).transpose(1, 2), ends)
        width = w.N // w.groups
        parts = [
            grouped_mm(
                h[:, g * w.rank : (g + 1) * w.rank] * scale,
                b.view(count, w.N, w.rank)[:, g * width : (g + 1) * width].transpose(1, 2),
                ends,
            )
            for g in range(w.groups)
        ]
        return base.index_add(0, order, torch.cat(parts, 1) if w.groups > 1 else parts[0])

    return forward


def tensors(t: dict) -> tuple:
    return t["x"], t["lora_a"], t["lora_b"], t["base"]


def made(w, device, most: int) -> list[dict]:
    count = measure.sets_for(workloads.bytes_per_set(w), most=most)
    return [workloads.random_set(w, device, seed) for seed in range(count)]


def checked(w, shared, contender: str, device, most: int):
    """(forward, sets) of a contender that is right: ours bit for bit, torch within a tolerance."""
    forward = ours(w, shared) if contender == "ours" else gmm(w, shared)
    if forward is None:
        pytest.skip(f"{contender} has no way to run {w.name}")
    if contender == "ours":
        t = workloads.integer_set(w, device)
        if not torch.equal(forward(*tensors(t)), workloads.exact_delta(w, t, shared)):
            pytest.fail(f"exactness gate on {w.name}: no figure from a wrong kernel")
        return forward, made(w, device, most)
    sets = made(w, device, most)
    got, want = forward(*tensors(sets[0])), ours(w, shared)(*tensors(sets[0]))
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    assert error < 3e-2, f"torch's grouped_mm is off by {error:.3g} of the largest value"
    return forward, sets


def calls_of(forward, sets: list[dict]) -> list:
    return [lambda t=t: forward(*tensors(t)) for t in sets]


@pytest.fixture
def most(request):
    """Sets to rotate through at most."""
    return 2 if request.config.getoption("--tiny") else 16


@pytest.mark.parametrize("case", workloads.EXPERTS, indirect=True, ids=lambda w: w.name)
def test_delta(case, contender, device, figure, timer, most):
    w, shared = case
    forward, sets = checked(w, shared, contender, device, most)
    rest = measure.rests(w)

    def beside(us: float) -> dict:
        import grouped_lora_ops

        def plan():
            return grouped_lora_ops.expert_plan(shared["expert_ids"], shared["adapter_ids"], w.experts, w.slots)

        found = {"given_us": timer.graph_us(calls_of(ours(w, shared, plan()), sets), rest=rest)}
        found["plan_us"] = timer.graph_us([plan] * 4, rounds=5)
        of_host = timer.host_us(lambda: forward(*tensors(sets[0])))
        return found | dict(zip(("host_us", "host_median_us"), of_host, strict=True))

    round_us = timer.graph(calls_of(forward, sets), rest=rest)
    figure(w, "expert_delta", contender, round_us, after=beside if contender == "ours" else None)


@pytest.mark.parametrize("case", workloads.SKEWED, indirect=True, ids=lambda w: w.name)
def test_skew(case, contender, device, figure, timer, most):
    w, shared = case
    forward, sets = checked(w, shared, contender, device, most)
    rest, twin_us, twins = measure.rests(w), 0.0, workloads.twins(w)
    for twin, share in twins:
        calls = calls_of(*checked(twin, workloads.shared_inputs(twin, device), contender, device, most))
        twin_us += share * timer.graph_us(calls, rest=rest)
    more = {"twin_us": twin_us, "times_bar": workloads.SKEW_BAR, "twins": [[twin.T, round(share, 3)] for twin, share in twins]}
    round_us = timer.graph(calls_of(forward, sets), rest=rest)
    figure(w, "expert_delta", contender, round_us, after=lambda us: {"times_twin": us / twin_us}, **more)
