"""The public ops against models in float64, on calls that hypothesis draws: any result or gradient has one right value.

A normal run draws the same few calls every time. `--fuzz-seconds 600` draws other ones for that long, all tests together; with
`-s` it prints each seed and, at once, the call that goes wrong. `--fuzz-seed N` begins with one of them.
"""

from __future__ import annotations

import importlib
import re
import time

import pytest
import torch
from cases import assert_bits, assert_equal
from conftest import GPU, poisoned
from fuzz_cases import DIFFERENTIABLE, Call, Draw, dense, experts, mlps
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from linear_cases import cuda_choice

import grouped_lora_ops as gl

DEVICE = "cuda" if GPU else "cpu"
QUIET = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)


@pytest.fixture
def fuzz(request):
    """fuzz(check, strategy, examples): check on that many draws, the same every time; for its share of --fuzz-seconds on others."""
    seconds = request.config.getoption("--fuzz-seconds")
    items = [item for item in request.session.items if "fuzz" in getattr(item, "fixturenames", ())]
    tests = sum(not any(mark.name == "skip" or mark.args[:1] == (True,) for mark in item.iter_markers()) for item in items)

    def run(check, strategy, examples):
        printed = set()

        def told(value):
            """Prints the first call that goes wrong at a seed at once: on a GPU it can take long to find a smaller one."""
            if turn not in printed and time.monotonic() > end:
                return  # the rest of a seed's draws, each of which may compile kernels
            try:
                check(value)
            except UnsatisfiedAssumption:
                raise
            except Exception as error:
                if turn not in printed:
                    printed.add(turn)
                    print(f"seed {turn}: {type(error).__name__}: {str(error)[:500]}\n{value}", flush=True)
                raise

        if not seconds:
            settings(max_examples=examples, derandomize=True, phases=(Phase.generate, Phase.shrink), **QUIET)(given(strategy)(check))()
            return
        first = request.config.getoption("--fuzz-seed")
        end, turn = time.monotonic() + seconds / tests, time.time_ns() % 2**32 if first is None else first - 1
        while time.monotonic() < end:
            turn += 1
            print(f"seed {turn}", flush=True)
            seed(turn)(settings(max_examples=50, **QUIET)(given(strategy)(told)))()

    return run


def run_public(c: Call):
    """(y, gradients) as a user has them."""
    args = {n: v.detach().requires_grad_() if n in c.needs else v for n, v in c.args.items()}
    y = getattr(gl, c.op)(**args)
    if c.op.endswith("_"):
        assert y is None
        return c.args["out"], {}
    assert y.requires_grad == bool(c.needs)
    if not c.needs:
        return y, {}
    again = getattr(gl, c.op)(**args)
    assert_bits(again.detach(), y.detach(), "a second call")
    return y.detach(), dict(zip(c.needs, torch.autograd.grad(y, [args[n] for n in c.needs], c.grad_y)))


def run_kernels(c: Call):
    """(y, gradients) by our kernels in Triton's interpreter, on poisoned memory."""
    module = importlib.import_module(f"grouped_lora_ops.ops.{c.op.rstrip('_')}")
    schema = getattr(torch.ops.grouped_lora, c.op).default._schema
    with poisoned():
        y = getattr(module, "_cuda_" if c.op.endswith("_") else "_cuda")(*[c.args[a.name] for a in schema.arguments])
        if c.op.endswith("_"):
            return c.args["out"], {}
        wanted = DIFFERENTIABLE[c.op]
        own = {"grad_y": c.grad_y, "grad_h": c.grad_y, "needs": [n in c.needs for n in wanted]}
        own |= dict.fromkeys(("h1", "h_gate_up", "h_down", "made"))  # what expert_mlp_train keeps
        schema = getattr(torch.ops.grouped_lora, c.op + "_backward").default._schema
        values = {**c.args, **own}
        grads = module._backward_cuda(*[values[a.name] for a in schema.arguments]) if any(own["needs"]) else [None] * len(wanted)
    return y, {n: g for n, g in zip(wanted, grads) if n in c.needs}


def surroundings(out: torch.Tensor) -> torch.Tensor:
    """The whole memory that a view lies in."""
    return out.new_empty(0).set_(out.untyped_storage())


def agree(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """assert_equal, where NaN equals NaN."""
    both = want.isnan() & got.isnan() if got.shape == want.shape else False
    assert_equal(torch.where(both, 0, got), torch.where(both, 0, want), what) if isinstance(both, torch.Tensor) else assert_equal(got, want, what)


def compare(c: Call, run) -> None:
    before = {n: v.clone() for n, v in c.args.items() if isinstance(v, torch.Tensor)}
    want, grads = c.want()
    around = None
    if "out" in c.args:
        around = surroundings(c.args["out"]).clone()
        view = around.as_strided(want.shape, c.args["out"].stride(), c.args["out"].storage_offset())
        view.copy_(want)
    y, got = run(c)
    agree(y.cpu(), want, c.op)
    base = before.get("base", before.get("out"))
    if base is not None and y.dtype == base.dtype:
        same = (want == base.cpu()) & (want == 0) | base.cpu().isnan()
        assert torch.equal(torch.signbit(y.cpu())[same], torch.signbit(base.cpu())[same]), "the sign of zero"
    for name, grad in grads.items():
        if name in got:
            agree(got[name].cpu(), grad, f"{c.op}: the gradient of {name}")
    for name, value in before.items():
        if name == "out":
            agree(surroundings(c.args["out"]).cpu(), around.cpu(), "the memory around out")
        else:
            assert_bits(c.args[name].cpu(), value.cpu(), f"{c.op} changed {name}")


STRATEGIES = {"dense": (dense, 120), "experts": (experts, 80), "mlp": (mlps, 80)}
kinds = pytest.mark.parametrize("kind", STRATEGIES)


@kinds
def test_ops(fuzz, kind):
    strategy, examples = STRATEGIES[kind]
    fuzz(lambda call: compare(call, run_public), strategy(), examples)


@pytest.mark.skipif(GPU, reason="the interpreter is for machines without a GPU")
@kinds
def test_kernels_in_the_interpreter(fuzz, kind):
    fuzz(lambda call: compare(call, run_kernels), STRATEGIES[kind][0](kernels=True), 6)


@pytest.mark.gpu
@kinds
def test_ops_on_a_gpu(fuzz, kind):
    """Few calls, for each compiles kernels; with --fuzz-seconds as many as there is time for."""
    fuzz(lambda call: compare(call, run_public), STRATEGIES[kind][0](device="cuda", kernels=True), 8)


MANY_ROWS = {"dense": lambda **kw: dense(ops=("linear",), **kw), "experts": lambda **kw: experts(ops=("expert_linear",), **kw), "mlp": mlps}


@kinds
def test_many_rows(fuzz, kind):
    fuzz(lambda call: compare(call, run_public), MANY_ROWS[kind](many=True), 5)


@pytest.mark.gpu
@kinds
def test_many_rows_by_csrc_linear(fuzz, kind, monkeypatch):
    """What csrc/linear.cu can take it takes, however few tiles that makes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90")
    answers = cuda_choice(monkeypatch)(True, whole=None)
    fuzz(lambda call: compare(call, run_public), MANY_ROWS[kind](device="cuda", kernels=True, many=True), 8)
    assert True in answers, "no call reached the kernel"


@st.composite
def batches(draw, kernels=False, device="cpu"):
    """(topk_ids, adapter_ids or None, E, L)"""
    d = Draw(draw, device, kernels)
    T, K, E, L = d.size("T", 9, 17, 130), d.size("K", 4), d.size("E", 5, 300), d.size("L", 5, 70)
    return d.ids("topk_ids", -1, E, T, K), d.ids("adapter_ids", -1, L - 1, T), E, L


def check_plans(make, adapters, topk_ids, num_experts, num_slots):
    """Both plans against Python's sort, which is stable, too."""
    ids = adapters.tolist()
    slots = [l if 0 <= l < num_slots else num_slots for l in ids]
    view = gl.plan_view(make("plan", adapters, num_slots), num_slots)
    assert view.rows.tolist() == sorted(range(len(ids)), key=lambda t: slots[t])
    assert view.starts.tolist() == [sum(s < l for s in slots) for l in range(num_slots + 1)] + [len(ids)]
    for given_ids, token_slots in ((adapters, slots), (None, [0] * len(ids))):
        top_k, flat = topk_ids.shape[1], topk_ids.reshape(-1).tolist()
        masked = num_experts * (num_slots + 1)
        pairs = [e * (num_slots + 1) + token_slots[m // top_k] if 0 <= e < num_experts else masked for m, e in enumerate(flat)]
        plan = gl.expert_plan_view(make("expert_plan", topk_ids, given_ids, num_experts, num_slots), len(flat), num_experts, num_slots)
        order = sorted(range(len(flat)), key=lambda m: pairs[m])
        assert plan.rows.tolist() == order
        assert plan.ends.tolist() == [sum(p < (e + 1) * (num_slots + 1) for p in pairs) for e in range(num_experts)]
        count, starts, tiles = int(plan.count), plan.starts.tolist(), plan.pairs.tolist()
        assert set(tiles[count:]) <= {-1} and set(starts[count:]) == {len(flat)}
        for first, end, pair in zip(starts[:count], starts[1:], tiles):
            assert first < end and {pairs[m] for m in order[first:end]} == {pair}
        assert sum(starts[1 : count + 1]) - sum(starts[:count]) == len(flat)


def public(name, *args):
    return getattr(gl, name)(*args)


def test_plans(fuzz):
    fuzz(lambda batch: check_plans(public, batch[1], batch[0], *batch[2:]), batches(), 60)


@pytest.mark.gpu
def test_plans_on_a_gpu(fuzz):
    fuzz(lambda batch: check_plans(public, batch[1], batch[0], *batch[2:]), batches(device="cuda", kernels=True), 12)


@pytest.mark.skipif(GPU, reason="the interpreter is for machines without a GPU")
def test_plans_in_the_interpreter(fuzz):
    def make(name, *args):
        module = importlib.import_module(f"grouped_lora_ops.ops.{name}")
        with poisoned():
            return module._cuda(*args)

    fuzz(lambda batch: check_plans(make, batch[1], batch[0], *batch[2:]), batches(kernels=True), 5)


# ------------------------------------------------------------------------------------------------------------ bad input

NO_TENSORS = (3, 2.5, "x", [1.0], True, b"x", {"a": 1})
WRONG_CHOICES = {
    "activation": ("gelu", "", 3, None, b"swiglu"),
    "activation_limit": (0.0, -1.0, float("nan"), float("inf"), "7", True, [1.0], 1 + 1j),
    "router_weight": ("both", "", 0, None, True),
    "out_sizes": ([], [-1], ["a"], [1.5], [None], "ab", 3, 2.5, {"a": 1}, [[1]], [2**70]),
    "num_slots": (-1, 2.5, "3", None, [1], 2**70),
    "num_experts": (-1, 2.5, "3", None, [1], 2**70),
}
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
OPTIONAL = ("base", "bias", "ranks", "plan", "row_weights", "b_gate_up", "b_down")
FOLLOWERS = ("out", "adapter_ids", "scalings", *OPTIONAL)  # arguments whose shapes the other ones decide


def slots_of(c: Call) -> int:
    """L of an expert op; 0 without LoRA, and then adapter ids are not read."""
    return 0 if c.args["scalings"] is None else len(c.args["scalings"])


def spoilt(d: Draw, c: Call) -> str:
    """Make one argument of the call certainly wrong; says which."""
    names = [n for n, v in c.args.items() if isinstance(v, torch.Tensor) or n in WRONG_CHOICES or n in OPTIONAL]
    name = d.of(*names, label="argument")
    value = c.args[name]
    if name in WRONG_CHOICES:
        c.args[name] = d.of(*WRONG_CHOICES[name], label="value")
        return name
    ways = ["type"]
    if value is not None:
        ways += ["dtype", "axes", "scalar", *(["sparse"] if value.dtype not in EIGHT_BITS else []), *(["device"] if c.op != "plan" else [])]
        unread = name == "adapter_ids" and c.op.startswith("expert_") and c.op != "expert_plan" and not slots_of(c)
        if name.endswith("ids") and value.numel() and not unread:
            ways += ["range"] * 3
        if name == "ranks" and value.numel():
            ways += ["range"]
        if name not in OPTIONAL and name not in ("adapter_ids", "scalings") and not name.startswith(("lora", "gate", "down")):
            ways += ["none"]
        if name in FOLLOWERS and value.dim() and c.op != "plan":
            ways += ["longer", "shorter"] if 0 not in value.shape else ["longer"]
        if name.endswith(("_a", "_b")) and c.op != "shrink" and value.dim() > 2:
            ways += ["slots"]
        if c.op.endswith("_") and value.is_floating_point() and name != "scalings":
            ways += ["requires grad"]
    way = d.of(*ways, label="way")
    if way == "type":
        value = d.of(*NO_TENSORS, label="value")
    elif way == "none":
        value = None
    elif way == "dtype":
        others = [torch.bool, torch.int8, torch.complex64, *([] if name == "weight" and c.op == "linear" else [torch.float8_e4m3fn])]
        value = (value.float() if value.dtype in EIGHT_BITS else value).to(d.of(*others, label="dtype"))
    elif way == "sparse":
        value = value.detach().contiguous().to_sparse()
    elif way == "axes":
        value = value[None, None, None]
    elif way in ("longer", "slots"):
        axis = 0 if way == "slots" else d(st.integers(0, value.dim() - 1), label="axis")
        shape = list(value.shape)
        shape[axis] = 1
        value = torch.cat([value, value.new_zeros(shape)], axis)
    elif way == "shorter":
        axis = d(st.integers(0, value.dim() - 1), label="axis")
        value = value.narrow(axis, 0, value.shape[axis] - 1)
    elif way == "scalar":
        value = torch.zeros((), dtype=value.dtype)
    elif way == "device":
        value = value.to("meta")
    elif way == "requires grad":
        value = value.detach().requires_grad_()
    elif name == "ranks":
        value = torch.full_like(value, d.of(-1, 99, label="value"))
    else:
        value = value.clone()
        value.view(-1)[-1] = d.of(-2, 1000, 2**31 - 1, -(2**31), label="value")
    c.args[name] = value
    return f"{name}: {way}"


def changed(d: Draw, c: Call) -> str:
    """Change the shape or the dtype of one tensor a little: the call may still be a good one."""
    name = d.of(*[n for n, v in c.args.items() if isinstance(v, torch.Tensor)], label="argument")
    t = c.args[name]
    way = d.of("longer", "shorter", "flip", "join", "split", "dtype", "drop", label="way")
    axis = d(st.integers(0, t.dim() - 1), label="axis")
    if way == "longer":
        t = torch.cat([t, t.narrow(axis, 0, min(1, t.shape[axis]))], axis)
    elif way == "shorter":
        t = t.narrow(axis, 0, max(t.shape[axis] - 1, 0))
    elif way == "flip":
        t = t.transpose(0, axis)
    elif way == "join" and axis:
        t = t.flatten(axis - 1, axis)
    elif way == "split":
        t = t.unsqueeze(axis)
    elif way == "dtype":
        t = t.to(d.of(torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, label="dtype"))
    elif way == "drop":
        t = t.select(axis, 0) if t.shape[axis] else None
    c.args[name] = t
    return f"{name}: {way}"


def plan_calls():
    """Calls of the plans, to be spoilt like the others."""

    @st.composite
    def calls(draw):
        topk_ids, adapters, experts_, slots = draw(batches())
        if draw(st.booleans(), label="expert_plan"):
            args = dict(topk_ids=topk_ids, adapter_ids=adapters, num_experts=experts_, num_slots=slots)
            return Call("expert_plan", args, topk_ids)
        return Call("plan", dict(adapter_ids=adapters, num_slots=slots), adapters)

    return calls()


@st.composite
def bad_calls(draw):
    c = draw(st.one_of(dense(), experts(), mlps(), plan_calls()))
    d = Draw(draw, "cpu", False)
    certain = d.maybe("certainly wrong")
    return c, certain, (spoilt if certain else changed)(d, c)


def check_refusal(bad):
    """ValueError or TypeError in one sentence that names the op, or, where the call may be good, none; never another one."""
    c, certain, what = bad
    out = c.args.get("out")
    held = isinstance(out, torch.Tensor) and out.layout is torch.strided and not out.is_meta
    before = surroundings(out).clone() if held else None
    try:
        getattr(gl, c.op)(**c.args)
    except (ValueError, TypeError) as error:
        sentence = str(error)
        assert re.fullmatch(rf"grouped_lora\.{c.op}: \w+ must [^\n]+\.", sentence), sentence
        named = sentence.split()[1] == what.split(":")[0]
        assert named or not certain or what.endswith(("device", "range", "slots")), (what, sentence)
        if before is not None:
            assert torch.equal(*(t.view(torch.uint8) for t in (surroundings(out), before))), "out was written"
    else:
        assert not certain, f"{c.op} took {what}"


def test_bad_input_is_refused_in_one_sentence(fuzz):
    fuzz(check_refusal, bad_calls(), 250)
