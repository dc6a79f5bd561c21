"""Prepared calls of the expert ops: on a GPU that is not there, as in test_host.py, a repeated call launches the right kernels on
the right memory; on one that is, it has the bits of the ordinary call."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import NAN, assert_bits, assert_equal, rounded
from conftest import poisoned
from test_expert_kernels import FORMS, force, want_delta  # noqa: F401  (a fixture)
from test_expert_kernels import build as routes
from test_expert_mlp_kernels import PLACEMENTS, layer, run_reference
from test_host import both_ways, elsewhere, gpu, held, one_launcher, op, two_gpus  # noqa: F401  (fixtures)

import grouped_lora_ops as glo
from grouped_lora_ops import driver, launch, launch_experts, reference
from grouped_lora_ops._checks_experts import Mlp
from grouped_lora_ops.ops import prepared

MOST_OPERANDS = 96  # csrc/launcher.c's MAX_OPERANDS
LAUNCHES = {"split": 2, "plan whole": 4, "plan fused": 3}  # of a delta; a plan takes two


def module(name):
    return importlib.import_module(f"grouped_lora_ops.ops.{name}")


def small(form="whole", **kw):
    return routes(**{"form": form, "tokens": 4, "experts": 3, "features": 40, "out": 24, "rank": 4, "weights": True, "ranks": True, **kw})


def block(*args, **kw):
    return layer(*args, **{"tokens": 3, "experts": 3, "hidden": 40, "inner": 16, "rank": 4, **kw})


def delta_args(c, plan=None):
    return (*c.args(), c.base, c.weights, c.ranks, plan)


def linear_args(c, lora=True, plan=None):
    a, b, adapters, scalings, ranks = (c.a, c.b, c.adapters, c.scalings, c.ranks) if lora else (None,) * 5
    return c.x, c.w, a, b, c.ids, adapters, scalings, c.bias, c.weights, ranks, plan


def want_linear(c, lora=True):
    w = c.wide()
    x, weight, a, b, ids, adapters, scalings, bias, weights, ranks, _ = linear_args(w, lora)
    y = reference.expert_linear(x, weight, a, b, ids, adapters, scalings, bias=bias, row_weights=weights, ranks=ranks)
    return rounded(y, c.x.dtype)


def call(name, args):
    """The implementation as the dispatcher calls it, on poisoned memory."""
    with poisoned():
        return op(name)(*args)


def ordinary(name, args):
    with poisoned():
        return op(name).__wrapped__(*args)


# --- on a GPU that is not there ---


@pytest.mark.parametrize("how", LAUNCHES)
@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_delta_reads_and_writes_its_own_tensors(gpu, force, form, how):  # noqa: F811
    force(how)
    for seed in range(3):
        c = small(form, seed=seed)
        assert_equal(call("expert_delta", delta_args(c)), want_delta(c), f"call {seed}")
    assert len(held("expert_delta")) == 1 and len(gpu.launches) == 2 * LAUNCHES[how]
    c = small(form, base=False)
    for _ in range(2):
        assert_equal(call("expert_delta", delta_args(c)), want_delta(c), "another signature")
    assert len(held("expert_delta")) == 2


@pytest.mark.parametrize("how", ["split", "plan whole", "plan whole mixed"])
def test_a_repeated_linear_reads_and_writes_its_own_tensors(gpu, force, how):  # noqa: F811
    force(how)
    for lora in (True, False):
        for seed in range(3):
            c = small("an A each", base=False, bias=True, halves="w", slots=3, adapters=[2, 0, -1, 1], seed=seed)
            assert_equal(call("expert_linear", linear_args(c, lora)), want_linear(c, lora), f"call {seed}")
    plans = 4 if "plan" in how else 0
    assert len(held("expert_linear")) == 2 and len(gpu.launches) == 2 * (2 + 1) + 2 * plans


@pytest.mark.parametrize("how", ["split", "plan whole"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_repeated_mlp_reads_and_writes_its_own_tensors(gpu, force, placement, how):  # noqa: F811
    force(how)
    for seed in range(3):
        args = block(router_weight=placement, seed=seed).args()
        want = ordinary("expert_mlp", args)
        assert_bits(call("expert_mlp", args), want, f"call {seed}")
    assert len(held("expert_mlp")) == 1
    assert len(gpu.launches) == 2 * (5 + (placement == "input") + 2 * ("plan" in how))


@one_launcher
def test_a_repeated_mlp_equals_the_reference(gpu, force):  # noqa: F811
    force("plan whole")
    for seed in range(2):
        c = block(torch.float32, "relu2", "input", integers=True, seed=seed, poison=False)
        assert_equal(call("expert_mlp", c.args()), run_reference(c)[0], f"call {seed}")
    assert len(gpu.launches) == 8


def test_words_and_limits_have_entries_of_their_own(gpu):  # noqa: F811
    choices = [("swiglu", None), ("swiglu", 0.5), ("swiglu", 0.25), ("swigluoai", 0.25), ("geglu_tanh", None)]
    for seed in range(2):
        results = []
        for activation, limit in choices:
            args = block(activation=activation, limit=limit, seed=seed, bias=False, tokens=2).args()
            results.append(ordinary("expert_mlp", args))
            assert_bits(call("expert_mlp", args), results[-1], f"{activation} {limit}, call {seed}")
        assert not any(torch.equal(one, two) for i, one in enumerate(results) for two in results[:i])
    assert len(held("expert_mlp")) == len(choices) and len(gpu.launches) == 5 * len(choices)


@one_launcher
@pytest.mark.parametrize("shared", ["a", "b", "ab"])
@pytest.mark.parametrize("planned", [False, True])
def test_shared_factors_are_repeated(gpu, force, monkeypatch, shared, planned):  # noqa: F811
    """An A that all experts share is multiplied once a token, by the dense ops' kernel with a plan of its own."""
    if planned:
        force("plan")
        monkeypatch.setattr(launch, "SCAN_TOKENS", 0)
    for seed in range(2):
        c = small(shared=shared, experts=1 if shared == "ab" else 3, seed=seed)
        assert_equal(call("expert_delta", delta_args(c)), want_delta(c), f"call {seed}")
        c = small(shared=shared, experts=3, base=False, seed=seed)
        assert_equal(call("expert_linear", linear_args(c)), want_linear(c), f"call {seed}")
    assert len(held("expert_delta")) == len(held("expert_linear")) == 1
    assert len(gpu.launches) == 4 + planned * (4 + 4 * ("a" in shared))


def test_a_call_is_repeated_on_the_device_of_its_tensors(elsewhere, force):  # noqa: F811
    force("plan whole")
    for seed, current in enumerate((0xC0, 0xC0, elsewhere.home, 0xC0)):
        elsewhere.context, c = current, small(seed=seed)
        linear = small("an A each", base=False, bias=True, halves="w", slots=3, adapters=[2, 0, -1, 1], seed=seed)
        for name, args in (
            ("expert_plan", (c.ids, c.adapters, 3, 2)),
            ("expert_delta", delta_args(c)),
            ("expert_linear", linear_args(linear)),
            ("expert_mlp", block(seed=seed).args()),
        ):
            with poisoned():
                assert_bits(*both_ways(elsewhere, name, args), f"{name}, call {seed}")
            assert elsewhere.context == current and not elsewhere.pushed and len(held(name)) == 1
    assert {seen.context for seen in elsewhere.launches} == {elsewhere.home} and len(elsewhere.launches) > 3 * 4


def test_a_given_plan_is_read_at_every_call(gpu, force):  # noqa: F811
    force("plan")
    for seed in range(3):
        c = small(seed=seed)
        plan = reference.expert_plan(c.ids, c.adapters, 3, 2)
        assert_equal(call("expert_delta", delta_args(c, plan)), want_delta(c), f"call {seed}")
        damaged = torch.full_like(plan, 2**30)
        call("expert_delta", delta_args(c, damaged))  # nothing is read out of bounds
    assert len(held("expert_delta")) == 1 and len(gpu.launches) == 5 * 2


@one_launcher
@pytest.mark.parametrize("way", ["rank", "count", "sort"])
def test_plans_of_every_way(gpu, monkeypatch, way):  # noqa: F811
    """torch.sort is not ours: such a plan, and a call that makes one, takes the ordinary way every time."""
    monkeypatch.setattr(launch_experts, "ROUTE_LIMIT", 0)
    monkeypatch.setattr(launch_experts, "RANK_LIMIT", 10**6 if way == "rank" else 0)
    monkeypatch.setattr(launch_experts, "COUNT_LIMIT", 0 if way == "sort" else 2048)
    for seed in range(2):
        c = small(seed=seed)
        assert_equal(call("expert_plan", (c.ids, c.adapters, 3, 2)), reference.expert_plan(c.ids, c.adapters, 3, 2))
        assert_equal(call("expert_delta", delta_args(c)), want_delta(c))
    assert len(held("expert_plan")) == len(held("expert_delta")) == (way != "sort")
    assert len(gpu.launches) == (0 if way == "sort" else 2 + 4)


NOTHING = {
    "no rank": dict(rank=0, ranks=False),
    "no features": dict(features=0),
    "no slot": dict(slots=0, adapters=False),
    "no expert": dict(experts=0),
    "no token": dict(tokens=0),
    "no column": dict(out=0),
}


@one_launcher
@pytest.mark.parametrize("what", NOTHING)
@pytest.mark.parametrize("how", ["split", "plan whole"])
def test_fills_are_not_prepared(gpu, force, what, how):  # noqa: F811
    """PyTorch fills results that nothing is added to, with a plan made before them or without."""
    force(how)
    for seed in range(2):
        c = small(seed=seed, poison=False, weights=False, **NOTHING[what])
        if c.a.shape[0]:
            assert_equal(call("expert_delta", delta_args(c)), want_delta(c), f"call {seed}")
        c.base, c.bias = None, None
        assert_equal(call("expert_linear", linear_args(c)), want_linear(c), f"call {seed}")
    assert not held("expert_delta")
    if what == "no expert":
        assert not held("expert_linear")


@one_launcher
@pytest.mark.parametrize("case", [dict(tokens=0), dict(experts=0), dict(top_k=0), dict(ids=[[-1, 3]] * 3), dict(lora="")], ids=str)
@pytest.mark.parametrize("how", ["split", "plan whole"])
def test_an_mlp_of_nothing(gpu, force, case, how):  # noqa: F811
    force(how)
    for seed in range(3):
        args = block(seed=seed, **case).args()
        want = ordinary("expert_mlp", args)
        assert_bits(call("expert_mlp", args), want, f"call {seed}")
        if "lora" not in case:
            assert_bits(want, torch.zeros_like(want))


@one_launcher
def test_a_master_copy_is_cast_in_every_call(gpu):  # noqa: F811
    """Float32 factors beside a bf16 x, changed in place between calls, too."""
    for seed in range(3):
        c = small(seed=seed)
        for changed in (dict(a=c.a.float()), dict(b=c.b.float()), dict(a=c.a.float(), b=c.b.float())):
            assert_equal(call("expert_delta", delta_args(replace(c, **changed))), want_delta(c), f"{list(changed)}, call {seed}")
        c = block(seed=seed)
        want = ordinary("expert_mlp", c.args())
        assert_bits(call("expert_mlp", replace(c, down_a=c.down_a.float()).args()), want, f"call {seed}")
    assert len(held("expert_delta")) == 3 and len(held("expert_mlp")) == 1
    c = small(seed=7)
    masters = replace(c, a=c.a.float())
    for factor in (1, 2):
        c.a.mul_(factor), masters.a.mul_(factor)
        assert_equal(call("expert_delta", delta_args(masters)), want_delta(c), f"times {factor}")


@one_launcher
def test_copies_on_the_way_are_not_prepared(gpu):  # noqa: F811
    """Strided ranks, scalings and router weights: right, and not recorded."""

    def strided(t):
        return t.repeat_interleave(2, 0)[::2]

    for seed in range(2):
        c = small(seed=seed)
        want = want_delta(c)
        for changed in (dict(ranks=strided(c.ranks)), dict(scalings=strided(c.scalings))):
            assert_equal(call("expert_delta", delta_args(replace(c, **changed))), want, str(list(changed)))
        c = block(seed=seed)
        want = ordinary("expert_mlp", c.args())
        changed = replace(c, topk_weights=c.topk_weights.t().contiguous().t())
        assert_bits(call("expert_mlp", changed.args()), want)
        c = small(adapters=False, shared="a", seed=seed)  # the shrink of shared factors reads an adapter a token: zeros by PyTorch
        assert_equal(call("expert_delta", delta_args(c)), want_delta(c))
    assert not held("expert_delta") and not held("expert_mlp") and not gpu.launches


def test_strided_row_weights_and_ids_are_repeated(gpu):  # noqa: F811
    """Kernels read them with their strides: no copy."""
    for seed in range(2):
        c = small(seed=seed)
        want = want_delta(c)
        ids, adapters = c.ids.repeat_interleave(2, 0)[::2], c.adapters.repeat_interleave(2)[::2]
        c = replace(c, weights=c.weights.repeat_interleave(3)[::3], ids=ids, adapters=adapters)
        assert_equal(call("expert_delta", delta_args(c)), want)
    assert len(held("expert_delta")) == 1 and len(gpu.launches) == 2


def recorded(gpu, name, args):  # noqa: F811
    """What a call puts on the tape, without addresses."""
    with driver.recording(args) as tape:
        ordinary(name, args)
    assert tape.launches and not tape.refused and len(args) + len(tape.made) <= MOST_OPERANDS
    made = [(tuple(t.shape), t.stride(), t.dtype) for t in tape.made]
    launches = []
    for one in tape.launches:
        kernel, _, values = gpu.kernels[one.function]
        constants = [v for v in values if not isinstance(v, torch.Tensor)]
        data = bytearray(one.data)
        for at, _ in one.slots:
            data[at : at + 8] = bytes(8)
        launches.append((kernel, constants, bytes(data), one._replace(function=0, data=b"")))
    return made, launches


BATCHES = (  # expert ids, adapters, ranks
    ([[-1, 3]] * 3, [-1, -1, -1], 0),
    ([[1, 1]] * 3, [0, 0, 0], 4),
    ([[0, 1], [2, -1], [2**31 - 1, 0]], [1, -7, 0], 9),
)


@one_launcher
@pytest.mark.parametrize("how", ["split", "plan whole", "plan whole mixed"])
@pytest.mark.parametrize("name", ["expert_delta", "expert_linear", "expert_mlp"])
def test_launches_depend_on_shapes_alone(gpu, force, name, how):  # noqa: F811
    """Whatever ids, adapters, ranks, scalings and values: a prepared call launches what a new recording would."""
    force(how)
    seen = []
    for experts, adapters, rank in BATCHES:
        ids, slots = torch.tensor(experts, dtype=torch.int32), torch.tensor(adapters, dtype=torch.int32)
        if name == "expert_mlp":
            c = replace(block(poison=False), topk_ids=ids, adapter_ids=slots)
        else:
            c = replace(small(tokens=3, poison=False, base=name == "expert_delta"), ids=ids, adapters=slots)
        c.ranks.fill_(rank)
        if seen:
            c.x.fill_(NAN), c.scalings.zero_()
        args = c.args() if name == "expert_mlp" else delta_args(c) if name == "expert_delta" else linear_args(c)
        seen.append(recorded(gpu, name, args))
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_largest_call_fits_the_launcher(gpu, monkeypatch, placement):  # noqa: F811
    """Every optional argument, plans made inside, h in chunks: csrc/launcher.c numbers 32 operands."""
    monkeypatch.setattr(launch_experts, "ROUTE_LIMIT", 0)
    monkeypatch.setattr(launch, "SCAN_TOKENS", 0)
    for shared in ("gate_up_a down_b", "gate_up_b down_a"):
        c = block(router_weight=placement, shared=shared, limit=0.5, tokens=2)
        want = ordinary("expert_mlp", c.args())
        recorded(gpu, "expert_mlp", c.args())
        for _ in range(2):
            assert_bits(call("expert_mlp", c.args()), want)
    assert len(held("expert_mlp")) == 2


def test_bad_arguments_still_raise(gpu):  # noqa: F811
    c, m = small(), block()
    for _ in range(2):
        call("expert_delta", delta_args(c)), call("expert_mlp", m.args())
    with pytest.raises(ValueError, match="expert_delta: lora_b must be"):
        call("expert_delta", delta_args(replace(c, b=c.b[..., :3])))
    with pytest.raises(ValueError, match="expert_mlp: activation must be one of"):
        call("expert_mlp", replace(m, activation="swish").args())
    with pytest.raises(ValueError, match="expert_mlp: activation_limit must be None or a positive"):
        call("expert_mlp", replace(m, activation_limit=NAN).args())
    assert len(held("expert_delta")) == len(held("expert_mlp")) == 1


# --- past the dispatcher ---


@pytest.fixture
def straight(gpu, monkeypatch):  # noqa: F811
    """Tensors of the CPU count as a GPU's for calls past the dispatcher; what the dispatcher is asked to do is counted."""
    monkeypatch.setattr(prepared, "_on_gpu", lambda t: True)
    dispatched = []
    for name in ("plan", "expert_plan", "expert_delta", "expert_linear", "expert_mlp"):
        whole = module(name)._op
        monkeypatch.setattr(module(name), "_op", lambda *args, whole=whole: dispatched.append(whole) or whole(*args))
    return dispatched


def calls(seed):
    """(name, what the dispatcher hands on, the documented call, the right answer)."""
    c, plain = small(seed=seed), small(seed=seed, base=False, bias=True, weights=False, ranks=False)
    named = dict(base=c.base, row_weights=c.weights, ranks=c.ranks)
    yield "expert_delta", delta_args(c)[:-1], lambda: glo.expert_delta(*c.args(), **named), want_delta(c)
    bare = (plain.x, plain.w, None, None, plain.ids, None, None)
    biased = linear_args(plain)[:8]
    yield "expert_linear", bare, lambda: glo.expert_linear(*bare), want_linear(replace(plain, bias=None), False)
    yield "expert_linear", biased, lambda: glo.expert_linear(*biased[:7], bias=plain.bias), want_linear(plain)
    ids = plain.ids, plain.adapters
    yield "expert_plan", (*ids, 3, 2), lambda: glo.expert_plan(*ids, 3, 2), reference.expert_plan(*ids, 3, 2)
    yield "plan", (ids[1], 2), lambda: glo.plan(ids[1], 2), reference.plan(ids[1], 2)


def test_prepared_calls_go_past_the_dispatcher(gpu, straight):  # noqa: F811
    for name, args, _, _ in calls(0):
        call(name, args)
    for mode in (torch.inference_mode, torch.no_grad):
        for name, _, documented, want in calls(1):
            before = len(gpu.launches)
            with mode():
                y = documented()
            assert_equal(y, want, name)
            assert not straight and len(gpu.launches) > before and y.is_inference() == (mode is torch.inference_mode), name


MLPS = {  # options, and how many arguments the dispatcher leaves
    "all at their defaults": (dict(bias=False), dict(ranks=None), 11),
    "biases": (dict(), dict(ranks=None), 13),
    "another activation": (dict(activation="geglu_tanh"), dict(ranks=None), 14),
    "a limit": (dict(limit=0.5), dict(ranks=None), 15),
    "a placement": (dict(router_weight="input"), dict(ranks=None), 16),
    "ranks": (dict(bias=False), dict(), 17),
}


def options(c):
    return {name: getattr(c, name) for name in Mlp._fields[11:]}


@pytest.mark.parametrize("which", MLPS)
def test_a_prepared_mlp_goes_past_the_dispatcher(gpu, straight, which):  # noqa: F811
    made, changed, left = MLPS[which]
    first, second = (replace(block(seed=seed, **made), **changed) for seed in (0, 1))
    call("expert_mlp", first.args()[:left])
    want = ordinary("expert_mlp", second.args())
    words = {k: "".join(list(v)) if isinstance(v, str) else v for k, v in options(second).items()}  # as read from a file: no constants
    with torch.inference_mode():
        y = glo.expert_mlp(*second.args()[:11], **words)
    assert_bits(y, want)
    assert not straight and len(gpu.launches) == 5 + (which == "a placement")


@pytest.mark.parametrize("name", ["expert_linear", "expert_mlp"])
def test_the_dispatcher_leaves_out_what_straight_calls_leave_out(monkeypatch, name):
    """Asked of the dispatcher itself, by an op of the same schema."""
    whole = module(name)._op
    library = torch.library.Library(f"grouped_lora_like_{name}", "DEF")
    library.define(str(whole._schema).removeprefix("grouped_lora::"))
    handed, found = [], []
    library.impl(name, lambda *args: handed.append(args) or args[0].clone(), "CPU")
    like = getattr(getattr(torch.ops, f"grouped_lora_like_{name}"), name).default
    monkeypatch.setattr(prepared, "_on_gpu", lambda t: True)
    monkeypatch.setattr(prepared, "_find", lambda table, args: (None, found.append(args)))
    straight_call = prepared.straight(op(name), op=whole)
    x = torch.ones(2)
    given = {"expert_linear": [x] * 7, "expert_mlp": [x] * 11}[name]
    rest = {
        "expert_linear": [(None, x)] * 4,
        "expert_mlp": [(None, x), (None, x), ("swiglu", "relu2"), (None, 0.5), ("pre_down", "input"), (None, x), (None, x)],
    }[name]
    with torch.inference_mode():
        for chosen in product(*rest):
            like(*given, *chosen)
            assert straight_call(*given, *chosen) == (False, None)
        none = [None if a.name not in ("x", "weight", "expert_ids") else x for a in whole._schema.arguments[: len(given)]]
        if name == "expert_linear":
            like(*none, None, None, None, None)
            straight_call(*none, None, None, None, None)
    assert [len(args) for args in handed] == [len(args) for args in found]
    for one, other in zip(handed, found):
        assert all(a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other))


def test_whatever_the_dispatcher_has_to_do_it_does(gpu, straight):  # noqa: F811
    c = block()
    call("expert_mlp", c.args()[:17])

    def goes(**changed):
        straight.clear()
        glo.expert_mlp(*c.args()[:11], **{**options(c), **changed})
        return bool(straight)

    with torch.inference_mode():
        assert not goes()
        assert goes(activation="swigluoai") and goes(activation_limit=0.5) and goes(router_weight="input") and goes(ranks=None)
        for wrong in (dict(activation=None), dict(activation_limit=True), dict(router_weight=1), dict(ranks=[1, 2]), dict(plan=0.5)):
            with pytest.raises(TypeError):
                goes(**wrong)
    c.x.requires_grad_()
    train = module("expert_mlp")._train_op
    assert train is not None and not goes() and not straight, "a training call has an op of its own"
    with torch.no_grad():
        assert not goes()


# --- on a GPU ---


def gpu_calls(tokens, seed):
    """(op, its arguments) at sizes of real layers."""
    sizes = dict(tokens=tokens, top_k=8, experts=32, slots=3, rank=16, seed=seed, poison=False)
    c = routes(form="an A each", features=2048, out=1536, weights=True, ranks=True, **sizes)
    per_route = routes(features=768, out=2048, base=False, bias=True, weights=True, per_route=True, ranks=True, **sizes)
    shared = routes(form="an A each", features=1024, out=512, shared="a", **sizes)
    yield "expert_plan", (c.ids, c.adapters, 32, 3)
    yield "expert_delta", delta_args(c)
    yield "expert_delta", delta_args(shared)
    yield "expert_linear", linear_args(per_route)
    yield "expert_linear", linear_args(per_route, lora=False)
    for placement, activation, limit in (("pre_down", "swiglu", None), ("input", "swigluoai", 7.0), ("post_down", "relu2", None)):
        sizes["slots"] = 2
        made = layer(router_weight=placement, activation=activation, limit=limit, hidden=1024, inner=768, bias=placement == "input", **sizes)
        yield "expert_mlp", made.args()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
def test_the_repeated_call_has_the_bits_of_the_ordinary_one(tokens):
    """Other ids, tensors and weights at every call; the first is recorded, the others are repetitions."""
    for seed in range(3):
        for name, args in gpu_calls(tokens, seed):
            want = op(name).__wrapped__(*args)
            with poisoned():
                assert_bits(getattr(torch.ops.grouped_lora, name)(*args), want, f"{name}, call {seed}")
    assert [len(held(name)) for name in ("expert_plan", "expert_delta", "expert_linear", "expert_mlp")] == [1, 2, 2, 3]


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("tokens", [1, 64])
def test_prepared_calls_of_two_devices(tokens):
    sets = []
    for device in (0, 1):
        with torch.cuda.device(device):
            sets.append(list(gpu_calls(tokens, 0)))
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for (name, first), (_, second) in zip(*sets):
                with poisoned():
                    one, other = (getattr(torch.ops.grouped_lora, name)(*args) for args in (first, second))
                assert (one.get_device(), other.get_device()) == (0, 1)
                assert_bits(one.cpu(), other.cpu(), f"{name}, current GPU {current}")
            assert torch.cuda.current_device() == current
    assert [len(held(name)) for name in ("expert_plan", "expert_delta", "expert_linear", "expert_mlp")] == [2, 4, 4, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 64])
def test_a_documented_call_goes_past_the_dispatcher_on_a_gpu(monkeypatch, tokens):
    c = layer(tokens=tokens, top_k=4, experts=8, hidden=256, inner=128, rank=8, poison=False)

    def run():
        given = options(c)
        return (
            glo.expert_mlp(*c.args()[:11], **given),
            glo.expert_mlp(*c.args()[:11]),
            glo.expert_linear(c.x, c.w_gate_up, c.gate_up_a, c.gate_up_b, c.topk_ids, c.adapter_ids, c.scalings),
            glo.expert_linear(c.x, c.w_gate_up, None, None, c.topk_ids, None, None),
            glo.expert_delta(c.x, c.gate_up_a, c.gate_up_b, c.topk_ids, c.adapter_ids, c.scalings),
            glo.expert_plan(c.topk_ids, c.adapter_ids, 8, 2),
            glo.plan(c.adapter_ids, 2),
        )

    with torch.inference_mode():
        want = run()
        for name in ("plan", "expert_plan", "expert_delta", "expert_linear", "expert_mlp"):
            monkeypatch.setattr(module(name), "_op", None)
        for one, other in zip(run(), want):
            assert_bits(one, other)


@pytest.mark.gpu
def test_a_captured_repetition_follows_ids_and_weights():
    c = layer(tokens=40, top_k=4, experts=8, hidden=256, inner=128, rank=8, poison=False, router_weight="input")
    run = op("expert_mlp")
    run(*c.args())
    assert len(run.table) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(*c.args())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        c.topk_ids.copy_(torch.randint(-1, 9, c.topk_ids.shape, generator=generator))
        c.adapter_ids.copy_(torch.randint(-1, 2, c.adapter_ids.shape, generator=generator))
        c.gate_up_b.normal_(), c.scalings.uniform_()
        graph.replay()
        assert_bits(y, run.__wrapped__(*c.args()), f"replay {seed}")
