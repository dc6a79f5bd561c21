"""Prepared calls, on a GPU that is not there: a repeated call launches the right kernels on the right memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import fake_gpu
import pytest
import torch
from cases import FORMS, assert_equal, build, want_delta, want_shrink

import grouped_lora_ops as gl
from grouped_lora_ops import _checks, cuda, driver, launch, reference
from grouped_lora_ops.ops import common, prepared

WAYS = ["C", "ctypes"]


@pytest.fixture(params=WAYS)
def gpu(request, monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("without a GPU the interpreter stands in for one")
    if request.param == "C" and driver._launcher is None:
        pytest.skip("csrc/launcher.c was not built")
    return fake_gpu.install(monkeypatch, request.param)


# For tests of what an op records, or does not, and of how it is made again: launchers see no more of that than in those tests that
# run with both.
one_launcher = pytest.mark.parametrize("gpu", ["C" if driver._launcher else "ctypes"], indirect=True)


def op(name):
    stem, in_place = name.rstrip("_"), name.endswith("_")
    return getattr(importlib.import_module(f"grouped_lora_ops.ops.{stem}"), "_cuda_" if in_place else "_cuda")


def held(name):
    """The prepared calls of an op."""
    return op(name).table


def delta(c, base=True, plan=None):
    return op("delta")(*c.factors, c.base if base else None, c.out_sizes, c.ranks, plan)


def small(form="wo_a", dtype=torch.bfloat16, **kw):
    return build(form, dtype, **{"features": 64, "out": 16, "sizes": [24, 8], "ranks": True, **kw})


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_delta_reads_and_writes_its_own_tensors(gpu, form):
    tokens = 1 if form == "plain" else 3
    first, second = (small(form, tokens=tokens, seed=seed) for seed in (0, 1))
    assert_equal(delta(first), want_delta(first))
    assert len(held("delta")) == 1 and not gpu.launches
    y = delta(second)
    assert_equal(y, want_delta(second))
    assert len(gpu.launches) == 2 and {seen.stream for seen in gpu.launches} == {fake_gpu.STREAM}
    assert y.data_ptr() not in [t.data_ptr() for t in (second.base, second.x)]
    assert_equal(delta(second, base=False), want_delta(second, base=False), "another signature")
    assert len(held("delta")) == 2
    out = second.base
    want = want_delta(second)
    op("delta_")(first.base, *first.factors, first.out_sizes, first.ranks)
    version = out._version
    op("delta_")(out, *second.factors, second.out_sizes, second.ranks)
    assert_equal(out, want, "in place")
    assert out._version > version and len(held("delta_")) == 1


@pytest.mark.parametrize("form", ["slices", "shared input"])
def test_groups_shrunk_as_one_are_repeated(gpu, monkeypatch, form):
    """Their A and h are views, whose addresses are those of the call's tensors."""
    monkeypatch.setattr(launch, "_fused", lambda p: launch.fused(p, 16))
    for seed in (0, 1, 2):
        c = small(form, tokens=9, seed=seed)
        assert_equal(delta(c), want_delta(c))
        assert len(held("delta")) == 1
    assert len(gpu.launches) == 4, "two launches, twice"


@pytest.fixture
def straight(gpu, monkeypatch):
    """Tensors of the CPU count as a GPU's, for calls past the dispatcher; what the dispatcher is asked to do is counted."""
    monkeypatch.setattr(prepared, "_on_gpu", lambda t: True)
    ops = importlib.import_module("grouped_lora_ops.ops.delta")
    dispatched = []
    for name in ("_op", "_op_"):
        whole = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *args, whole=whole: dispatched.append(whole) or whole(*args))
    return dispatched


def test_a_prepared_call_goes_past_the_dispatcher(gpu, straight):
    first, second = (small(tokens=3, seed=seed) for seed in (0, 1))
    op("delta")(*first.factors, first.base, None, first.ranks)  # prepares; arguments as the dispatcher hands them on
    op("delta_")(first.base, *first.factors, None, first.ranks)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            y = gl.delta(*second.factors, base=second.base, out_sizes=second.out_sizes, ranks=second.ranks)
        assert_equal(y, want_delta(second))
        assert y.is_inference() == (mode is torch.inference_mode)
    want, version = want_delta(second), second.base._version
    with torch.no_grad():
        gl.delta_(second.base, *second.factors, out_sizes=second.out_sizes, ranks=second.ranks)
    assert_equal(second.base, want)
    assert second.base._version > version and not straight and len(gpu.launches) == 6


@pytest.mark.parametrize("scales", [None, torch.float32, torch.float8_e8m0fnu], ids=str)
def test_a_linear_goes_past_the_dispatcher(gpu, monkeypatch, scales):
    monkeypatch.setattr(prepared, "_on_gpu", lambda t: True)
    linear = importlib.import_module("grouped_lora_ops.ops.linear")
    first, second = (small(tokens=3, seed=seed, poison=False) for seed in (0, 1))
    weight = torch.randint(-2, 3, (*second.base.shape[1:], second.x.shape[-1])).to(second.x.dtype)
    more, kw = (), {}
    if scales is not None:
        weight = weight.to(torch.float8_e4m3fn)
        scale = torch.full([*weight.shape[:-2], *[-(-size // 128) for size in weight.shape[-2:]]], 2.0).to(scales)
        more, kw = (None, scale), {"weight_scale": scale}
    op("linear")(first.x, weight, *first.factors[1:], None, None, first.ranks, *more)
    monkeypatch.setattr(linear, "_op", None)
    with torch.inference_mode():
        y = gl.linear(second.x, weight, *second.factors[1:], ranks=second.ranks, **kw)
    assert_equal(y, reference.linear(second.x, weight, *second.factors[1:], ranks=second.ranks, **kw))
    if scales is not None:
        with torch.no_grad(), pytest.raises(ValueError, match="must not require grad"):
            gl.linear(second.x, weight, *second.factors[1:], ranks=second.ranks, weight_scale=kw["weight_scale"].requires_grad_())


class Named(torch.Tensor):
    pass


def test_whatever_the_dispatcher_has_to_do_it_does(gpu, straight, monkeypatch):
    """Autograd, a subclass, modes, autocast, functorch, a profiler, a lazy negation, another signature, wrong arguments."""
    from torch.overrides import BaseTorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    c = small(tokens=3, dtype=torch.float32)
    op("delta")(*c.factors, c.base, None, c.ranks)
    kw = dict(base=c.base, out_sizes=c.out_sizes, ranks=c.ranks)

    def goes(args=c.factors, **changed):
        straight.clear()
        gl.delta(*args, **{**kw, **changed})
        return bool(straight)

    with torch.no_grad():
        assert not goes()
        assert goes((c.x.as_subclass(Named), *c.factors[1:]))
        assert not goes((torch.nn.Parameter(c.x), *c.factors[1:]))
        assert goes(base=None)
        with pytest.raises(ValueError, match="x must be a dense tensor"):
            gl.delta(c.x.to_sparse(), *c.factors[1:], **kw)
        negated = torch._neg_view(c.x)  # as the imaginary part of a conjugate is; with x's strides, so with its key
        assert negated.is_neg() and goes((negated, *c.factors[1:]))
        for mode in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False), torch.profiler.profile(), BaseTorchFunctionMode()):
            with mode:
                assert goes(), mode
        assert not goes()
        torch.vmap(lambda x: straight.append(prepared._undispatched(c.factors)) or x)(torch.ones(2))
        assert straight == [False]
        with pytest.raises(TypeError):
            gl.delta(c.x.tolist(), *c.factors[1:], **kw)
    assert goes()
    monkeypatch.setattr(_checks, "CHECK_IDS", True)
    with torch.no_grad():
        assert goes()


@pytest.mark.parametrize("form", ["plain", "wo_a", "slices"])
def test_shrink_expand_and_plan_are_repeated(gpu, form):
    for c in (small(form, seed=seed) for seed in (0, 1)):
        h = op("shrink")(c.x, c.a, c.ids, c.ranks)
        assert_equal(h, want_shrink(c))
        want = want_delta(c)
        assert_equal(op("expand")(h, c.b, c.ids, c.scalings, c.base, c.out_sizes, c.ranks), want)
        op("expand_")(c.base, h, c.b, c.ids, c.scalings, c.out_sizes, c.ranks)
        assert_equal(c.base, want)
        assert_equal(op("plan")(c.ids, 3), reference.plan(c.ids, 3))
    assert [len(held(name)) for name in ("shrink", "expand", "expand_", "plan")] == [1] * 4
    assert len(gpu.launches) == 5  # the plan takes two


@pytest.mark.parametrize("way", ["fused", "split"])
def test_a_plan_made_inside_a_call_is_made_again(gpu, force, way):
    force(f"plan {way}")
    for seed in (0, 1):
        c = small(tokens=9, seed=seed)
        assert_equal(delta(c), want_delta(c))
    assert len(gpu.launches) == (3 if way == "fused" else 4)
    given = reference.plan(c.ids, 3)
    for _ in range(2):
        assert_equal(delta(c, plan=given), want_delta(c), "with the caller's plan")


@pytest.mark.parametrize("layout", ["odd", "rows", "scattered"])
def test_layouts_are_part_of_the_key(gpu, layout):
    for seed in (0, 1):
        for at in ("dense", layout):
            c = small(tokens=2, layout=at, seed=seed, id_dtype=torch.int64)
            assert_equal(delta(c), want_delta(c), at)
    assert len(held("delta")) == 2 and len(gpu.launches) == 4


def test_every_number_of_the_arguments_is_part_of_the_key(gpu):
    c = small()
    keys = {driver.describe((*c.factors, c.base, None, c.ranks))}
    other = [
        small(tokens=6), small(slots=4), small(features=128), small(out=32), small(rank=6), small(groups=3),
        small(dtype=torch.float16), small(id_dtype=torch.int64), small(layout="rows"), small(layout="odd"),
        small(layout={"x": "slice"}), small(layout={"b": "transposed"}), small(layout={"base": "rows"}),
    ]  # fmt: skip
    for o in other:
        keys.add(driver.describe((*o.factors, o.base, None, o.ranks)))
    keys |= {driver.describe((*c.factors, c.base, sizes, c.ranks)) for sizes in ([8, 8], [4, 12], [16], [])}
    keys |= {driver.describe((*c.factors, None, None, c.ranks)), driver.describe((*c.factors, c.base, None, None))}
    keys |= {driver.describe((*c.factors, c.x, None, c.ranks))}  # x again as base: they share an address
    keys |= {driver.describe((c.ids, 3)), driver.describe((c.ids, 4)), driver.describe((c.ids,))}
    assert len(keys) == 1 + len(other) + 4 + 2 + 1 + 3
    again = small(seed=5)
    assert driver.describe((*again.factors, again.base, None, again.ranks)) in keys
    assert driver.describe((c.x, [0.5])) is None
    assert driver.describe((c.x, [True])) is None


def test_words_and_numbers_are_part_of_the_key_with_their_types(gpu):
    values = ["swiglu", "relu2", "input", "", "1", "é", 1, True, 1.0, 0, False, 0.0, -0.0, 7.0, float("nan"), float("inf"), None, [1], [0]]
    keys = [driver.describe((value, "x")) for value in values]
    assert None not in keys and len(set(keys)) == len(values)
    again = [driver.describe((value, "x")) for value in ["".join(["swi", "glu"]), float("7"), float("nan")]]
    assert again == [keys[0], keys[13], keys[14]], "by value"
    assert driver.describe(("ab", "c")) != driver.describe(("a", "bc"))

    class Word(str):
        pass

    class Number(float):
        pass

    for value in (Word("swiglu"), Number(7.0), {}, b"swiglu", 1j):
        assert driver.describe((value,)) is None


def test_a_tensor_whose_address_is_not_aligned_has_another_key(gpu):
    flat = torch.zeros(64, dtype=torch.bfloat16)
    keys = {driver.describe((flat[at : at + 8],)) for at in range(48)}
    assert len(keys) == 4  # 2, 4, 8 and 16 bytes


def test_arguments_that_are_the_same_tensor(gpu):
    """x as base: the recording cannot tell one from the other, so calls with two tensors are another key."""
    for seed in (0, 1):
        c = small("plain", features=32, out=32, seed=seed, poison=False)
        got = op("delta")(*c.factors, c.x, None, c.ranks)
        want = reference.delta(*c.wide().factors, base=c.x.double(), **c.kw).to(c.x.dtype)
        assert_equal(got, want)
        other = c.x.clone() + 1
        want = reference.delta(*c.wide().factors, base=other.double(), **c.kw).to(c.x.dtype)
        assert_equal(op("delta")(*c.factors, other, None, c.ranks), want)
    assert len(held("delta")) == 2 and len(gpu.launches) == 4


def test_weights_that_move(gpu):
    """`.data` swaps keep the Python object and change its memory; freed memory comes back as another tensor."""
    c = small(tokens=2)
    delta(c)
    c.a = torch.nn.Parameter(c.a, requires_grad=False)
    for seed in range(1, 3):
        c.a.data = small(seed=seed).a
        c.b.data = small(seed=seed).b
        c.a.data[~c.a.isfinite()] = 0
        c.b.data[~c.b.isfinite()] = 0
        assert_equal(delta(c), want_delta(c))
    c.b.data = c.b.data.transpose(2, 3).contiguous().transpose(2, 3)  # the same object and shape, other strides
    assert_equal(delta(c), want_delta(c))
    for seed in range(4, 8):
        c = small(seed=seed, tokens=2)
        assert_equal(delta(c), want_delta(c))
        del c
        gc.collect()
    assert len(held("delta")) == 2


def test_out_that_overlaps_is_refused_at_every_address(gpu):
    c = small("plain", features=32, out=32, poison=False)

    def at(out_start, x_start):
        buffer = torch.zeros(7, 128, dtype=torch.bfloat16)
        out, x = buffer[:, out_start : out_start + 32], buffer[:, x_start : x_start + 32]
        x.copy_(c.x), out.copy_(c.base)
        want = reference.delta(x, *c.factors[1:], base=out, **c.kw)
        op("delta_")(out, x, *c.factors[1:], None, c.ranks)
        assert_equal(out, want)

    at(0, 32)
    at(0, 32)
    assert len(gpu.launches) == 2, "interleaved columns at a distance that was checked are repeated"
    at(0, 64)
    at(64, 0)
    assert len(gpu.launches) == 2, "at another distance the exact check decides"
    with pytest.raises(ValueError, match="delta_: out must be memory apart from x"):
        at(0, 16)
    buffer = torch.zeros(14, 32, dtype=torch.bfloat16)
    for _ in range(2):
        op("delta_")(buffer[:7], c.x, *c.factors[1:], None, c.ranks)
    with pytest.raises(ValueError, match="delta_: out must be memory apart from x"):
        op("delta_")(buffer[:7], buffer[3:10], *c.factors[1:], None, c.ranks)


@pytest.mark.parametrize("name", ["delta_", "expand_"])
def test_operands_that_require_grad_are_refused_in_place(gpu, name):
    c = small("plain")
    h = torch.zeros(7, 5)
    args = (c.x, c.a, c.b) if name == "delta_" else (h, c.b)
    for _ in range(2):
        op(name)(c.base, *args, c.ids, c.scalings, None, c.ranks)
    assert gpu.launches
    args[-1].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: lora_b must not require grad"):
        op(name)(c.base, *args, c.ids, c.scalings, None, c.ranks)
    with torch.no_grad():
        op(name)(c.base, *args, c.ids, c.scalings, None, c.ranks)


def test_bad_arguments_still_raise(gpu):
    c = small()
    delta(c), delta(c)
    with pytest.raises(ValueError, match="lora_b must be"):
        op("delta")(c.x, c.a, c.b[..., :4], c.ids, c.scalings, c.base, None, c.ranks, None)
    with pytest.raises(ValueError, match="scalings must be float32"):
        op("delta")(c.x, c.a, c.b, c.ids, c.scalings.double(), c.base, None, c.ranks, None)
    assert len(held("delta")) == 1


def test_ids_are_checked_when_asked_for(gpu, monkeypatch):
    c = small()
    delta(c), delta(c)
    monkeypatch.setattr(_checks, "CHECK_IDS", True)
    c.ids[0] = 9
    with pytest.raises(ValueError, match="adapter_ids must be"):
        delta(c)


def test_what_is_not_prepared(gpu):
    """Copies on the way, fills without a kernel, empty results: right, and not recorded."""
    for _ in range(2):
        c = small()
        c.ranks = c.ranks.repeat_interleave(2)[::2]
        c.kw["ranks"] = c.ranks
        assert_equal(delta(c), want_delta(c), "strided ranks")
        c = small(rank=0, ranks=False)
        assert_equal(delta(c), c.base)
        assert_equal(op("shrink")(c.x, c.a, c.ids, None), torch.zeros(7, 2, 0))
        c = small(tokens=0)
        assert delta(c).shape == (0, 2, 16)
    assert not held("delta") and not held("shrink") and not gpu.launches


def test_results_are_new_and_memory_is_held_by_nobody(gpu):
    c = small()
    results = [delta(c) for _ in range(4)]
    assert len({t.data_ptr() for t in results}) == 4
    (entry,) = held("delta").values()
    assert not [o for o in gc.get_referents(entry) if isinstance(o, torch.Tensor)]


def test_the_table_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(prepared, "LIMIT", 3)
    for tokens in (1, 2, 3, 4, 5, 1):
        c = small(tokens=tokens)
        assert_equal(delta(c), want_delta(c))
        assert len(held("delta")) <= 3
    assert not gpu.launches, "the oldest left"


def test_another_context_is_made_current_for_the_launch(gpu):
    c = small()
    delta(c)
    gpu.context = 0xD0  # this thread's current device is another now
    assert_equal(delta(c), want_delta(c))
    assert [seen.context for seen in gpu.launches] == [0xC0] * 2 and not gpu.pushed


@pytest.fixture
def elsewhere(gpu, monkeypatch):
    """The tensors' GPU is not the current one."""
    gpu.home = 0xD0
    monkeypatch.setattr(common, "device_of", gpu.device_of)
    return gpu


DENSE = {"plan": 2, "shrink": 1, "expand": 1, "expand_": 1, "delta": 2, "delta_": 2, "linear": 2}  # launches


def arguments(name, seed):
    c = small(tokens=3, seed=seed, poison=False)
    h = reference.shrink(c.x, c.a, c.ids, ranks=c.ranks)
    weight = torch.randint(-2, 3, (*c.base.shape[1:], c.x.shape[-1])).to(c.x.dtype)
    whole = {
        "plan": (c.ids, 3),
        "shrink": (c.x, c.a, c.ids, c.ranks),
        "expand": (h, c.b, c.ids, c.scalings, c.base, None, c.ranks),
        "delta": (*c.factors, c.base, None, c.ranks),
        "linear": (c.x, weight, *c.factors[1:], None, None, c.ranks),
        "expand_": (c.base, h, c.b, c.ids, c.scalings, None, c.ranks),
        "delta_": (c.base, *c.factors, None, c.ranks),
    }
    return whole[name]


def both_ways(gpu, name, args):
    """What the op gives, and what it gives in the ordinary way with the tensors' device current; of one in place, out."""
    copies = (args[0].clone(), *args[1:])
    with gpu.device_of(args[0]):
        want = op(name).__wrapped__(*copies)
    got = op(name)(*args)
    return (args[0], copies[0]) if got is None else (got, want)


@pytest.mark.parametrize("name", DENSE)
def test_a_call_is_repeated_on_the_device_of_its_tensors(elsewhere, name):
    """A kernel belongs to the context that it was loaded in, whatever is current when the call is recorded or repeated."""
    for seed, current in enumerate((0xC0, 0xC0, elsewhere.home, 0xC0)):
        elsewhere.context = current
        assert_equal(*both_ways(elsewhere, name, arguments(name, seed)), f"call {seed}")
        assert elsewhere.context == current and not elsewhere.pushed
    assert len(held(name)) == 1 and [seen.context for seen in elsewhere.launches] == [elsewhere.home] * 3 * DENSE[name]


def test_a_kernel_of_csrc_is_repeated_on_the_device_of_its_tensors(elsewhere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    elsewhere.run_kernel = lambda seen, parameters: None

    @prepared.prepared
    def copy(x):
        y = driver.empty(x.shape, x.dtype, x.device)
        cuda.launch(0xF1, (1, 1, 1), 32, "2P", (x, y))
        return y

    for current in (0xC0, 0xC0, elsewhere.home):
        elsewhere.context = current
        copy(torch.zeros(4))
        assert elsewhere.context == current and not elsewhere.pushed
    assert len(copy.table) == 1 and [seen.context for seen in elsewhere.launches] == [elsewhere.home] * 3


def test_a_launch_that_fails_raises(gpu):
    c = small()
    delta(c)
    gpu.fail_with = 700
    with pytest.raises(RuntimeError, match=r"a kernel launch failed: made up \(CUDA error 700\)"):
        delta(c)


def test_attributes_blocks_and_shared_memory_reach_the_driver(gpu):
    x, y = torch.zeros(8), torch.zeros(4)
    data, tensors = driver.pack("PqP", (x, 3, y))
    with driver.recording((x, y)) as tape:
        tape.add(driver.Launch(5, (7, 2, 1), 96, (8, 1, 1), 70000, True, data, (0,), ()), tensors)
        tape.add(driver.Launch(6, (1, 1, 1), 32, (1, 1, 1), 0, False, data, (0, 8, 16), ()), tensors)
    call = driver.call(0xC0, 2, tuple(tape.launches))
    seen_data = []

    def kernel(seen, parameters):
        seen_data.append([ctypes.c_uint64.from_address(parameters[i]).value for i in range(1 if seen.function == 5 else 3)])

    gpu.run_kernel = kernel
    other = torch.zeros(8), torch.zeros(4)
    assert driver.run(call, 99, other, ()) == 0
    first, second = gpu.launches
    assert (first.grid, first.block, first.shared, first.stream) == ((7, 2, 1), (96, 1, 1), 70000, 99)
    assert first.attributes == {4: (8, 1, 1), 6: (1, 0, 0)} and second.attributes == {}
    assert (second.grid, second.block, second.shared) == ((1, 1, 1), (32, 1, 1), 0)
    assert seen_data == [[other[0].data_ptr()], [other[0].data_ptr(), 3, other[1].data_ptr()]]
    with pytest.raises(ValueError, match="another call's operands"):
        driver.run(call, 99, other, (x,))


def test_programmatic_dependent_launch_is_recorded(gpu):
    metadata = SimpleNamespace(
        num_ctas=1, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0,
        launch_pdl=True, num_warps=2, shared=512,
    )  # fmt: skip
    compiled = SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature={"x": "*fp32", "n": "i32", "B": "constexpr"}), function=3)
    x = torch.zeros(4)
    with driver.recording((x,)) as tape:
        driver.record_triton(compiled, (5, 1, 1), (x, 4, 64))
        driver.record_triton(compiled, (0, 1, 1), (x, 4, 64))
    (one,) = tape.launches
    assert (one.grid, one.threads, one.shared, one.pdl, one.slots) == ((5, 1, 1), 64, 512, True, ((0, 0),))
    assert one.offsets == (0, 8, 16, 24) and len(one.data) == 32
    refused = ({"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"profile_scratch_size": 8})
    for changed in (*refused, {"instrumentation_mode": "gsan"}):
        compiled.metadata = SimpleNamespace(**{**vars(metadata), **changed})
        with driver.recording((x,)) as tape:
            driver.record_triton(compiled, (5, 1, 1), (x, 4, 64))
        assert tape.refused and not tape.launches


def test_profilers_hear_of_every_launch(gpu):
    from triton import knobs

    def hook(metadata):
        pass

    c = small()
    delta(c)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        delta(c)
        assert not gpu.launches
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    delta(c)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_in_the_chains_place_is_heard(monkeypatch, name):
    """Triton calls whatever stands there, and nothing where None does."""
    knobs = pytest.importorskip("triton.knobs")
    for hook in (lambda metadata: None, None):
        driver._triton_runtime.cache_clear()  # nobody has asked before
        monkeypatch.setattr(knobs.runtime, name, hook)
        assert driver.triton_hooks() == (hook is not None)


def test_an_unknown_triton_launches_the_ordinary_way(gpu, monkeypatch):
    monkeypatch.setattr(driver, "_triton_is_known", lambda: False)
    c = small()
    for _ in range(2):
        assert_equal(delta(c), want_delta(c))
    assert not held("delta") and not gpu.launches
    assert driver.parameters_of(SimpleNamespace(metadata=SimpleNamespace())) is None  # whatever such a Triton calls things


def test_threads_do_not_meet(gpu):
    """Recordings and repetitions of the same shapes from several threads: each launch has its own thread's pointers."""
    launched: dict[int, list] = {}

    def kernel(seen, parameters):
        numbers = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(4)]
        launched.setdefault(threading.get_ident(), []).append(numbers)

    gpu.run_kernel, gpu.quiet = kernel, True
    wrong, barrier = [], threading.Barrier(4)

    def work(seed):
        c = small(seed=seed, tokens=2)
        barrier.wait()
        for i in range(200):
            mine = launched.setdefault(threading.get_ident(), [])
            mine.clear()
            x, out = c.x.clone(), c.base.clone()
            op("delta_")(out, x, c.a, c.b, c.ids, c.scalings, None, c.ranks)
            if mine and ((mine[0][:2], mine[1][1:]) != ([x.data_ptr(), c.a.data_ptr()], [c.b.data_ptr()] + 2 * [out.data_ptr()])):
                wrong.append((seed, i))
            if mine and mine[0][2] != mine[1][0]:  # h, written by one and read by the other
                wrong.append((seed, i, "h"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(gpu.launches) > 1000 and driver.recordings == 0 and not gpu.errors


def test_nested_recordings_do_not_lose_launches():
    with driver.recording(()) as outer:
        with driver.recording(()) as inner:
            driver.empty((1,), torch.float32, torch.device("cpu"))
        assert driver.tape() is outer
    assert outer.refused and not inner.refused and len(inner.made) == 1 and driver.tape() is None


def test_a_launcher_of_fewer_operands_is_not_used():
    """Those of version 3 took 32, and a backward of expert_mlp has more."""
    if driver._launcher is None:
        pytest.skip("csrc/launcher.c was not built")
    with pytest.raises(RuntimeError, match="built from an older launcher.c"):
        driver._launcher.setup(3, torch.Tensor, torch.Tensor.__dlpack_c_exchange_api__)


def test_pack_lays_a_struct_out_as_c_does():
    class Params(ctypes.Structure):
        _fields_ = [
            ("x", ctypes.c_void_p), ("n", ctypes.c_int32), ("b", ctypes.c_void_p), ("f", ctypes.c_float),
            ("sizes", ctypes.c_int32 * 3), ("stride", ctypes.c_int64), ("last", ctypes.c_int32),
        ]  # fmt: skip

    x = torch.zeros(4)
    data, tensors = driver.pack("P i P f 3i q i", (x, -7, None, 0.5, 1, 2, 3, 1 << 40, 9))
    assert len(data) == ctypes.sizeof(Params)
    p = Params.from_buffer_copy(data)
    assert (p.x, p.n, p.b, p.f, list(p.sizes), p.stride, p.last) == (x.data_ptr(), -7, None, 0.5, [1, 2, 3], 1 << 40, 9)
    assert tensors == [(0, x)]
    with pytest.raises(ValueError, match="2 values for the 1 fields"):
        driver.pack("P", (x, 1))


def test_a_recorded_launch_has_the_parameters_of_tritons_cubin():
    """What Triton compiles for sm_90 says how many parameters of which size it wants; a recorded launch has just those."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[1]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(root / "tests" / "triton_parameters.py")]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    dense = {"shrink_kernel", "expand_kernel", "delta_kernel", "count_kernel", "place_kernel"}
    experts = {f"{name}_kernel" for name in ("expert_shrink", "expert_expand", "expert_linear", "gate_up", "weighted", "combine")}
    assert {line["kernel"] for line in lines} == dense | experts
    for line in lines:
        assert len(line["cubin"]) == len(line["recorded"]) > 5, line
        assert all(wanted <= room <= 8 for wanted, room in zip(line["cubin"], line["recorded"])), line
        assert all(line[name][0] == line[name][1] for name in ("pdl", "pointers", "threads", "shared")), line
    assert {line["pdl"][0] for line in lines} == {False, True}


# --- on a GPU ---


def on_gpu(tokens=1, device="cuda", **kw):
    c = build("wo_a", torch.bfloat16, **{"tokens": tokens, "features": 4096, "out": 1024, "rank": 16, "ranks": True, "device": device, **kw})
    return (*c.factors, c.base, None, c.ranks, None)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 200, 3000])
def test_the_repeated_call_has_the_bits_of_the_ordinary_one(tokens):
    run, run_ = op("delta"), op("delta_")
    for seed in range(4):
        args = on_gpu(tokens, seed=seed)
        want = run.__wrapped__(*args)
        assert_equal(torch.ops.grouped_lora.delta(*args), want, f"call {seed}")
        out = args[5].clone()
        torch.ops.grouped_lora.delta_(out, *args[:5], None, args[7])
        assert_equal(out, want, f"in place, call {seed}")
    assert len(run.table) == 1 and len(run_.table) == 1, "the calls were not prepared"


@pytest.mark.gpu
def test_prepared_calls_follow_streams_captures_and_threads():
    """On the current stream, captured or not, also in a thread that has no CUDA context yet."""
    run = op("delta")
    args = on_gpu(8)
    want = run(*args)
    assert len(run.table) == 1
    x, stream = args[0].clone(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        args[0].copy_(x)
        y = run(*args)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(y, want, "another stream")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(*args)
    args[0].neg_()
    graph.replay()
    assert_equal(y, run(*args), "a replay")
    args[0].neg_()
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(run(*args)))
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert_equal(found[0], want), assert_equal(found[1], want)
    assert len(run.table) == 1


@pytest.mark.gpu
def test_a_threads_first_call_may_be_a_kernels_first():
    """Kernels are asked for, and their tensor maps made, in a thread that has no CUDA context yet."""
    args = on_gpu(8, poison=False)
    weight = torch.ones(2, 1024, 4096, dtype=torch.bfloat16, device="cuda")

    def calls():
        return op("delta")(*args), op("linear")(args[0], weight, *args[1:5], None, None, args[7]), op("plan")(args[3], 3)

    want, found = calls(), []
    torch.cuda.synchronize()
    prepared.forget()
    for module in cuda._modules.values():
        if isinstance(module, cuda.Module):
            module._functions.clear(), module._constants.clear()
    thread = threading.Thread(target=lambda: found.extend(calls()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(found) == len(want)
    for one, other in zip(found, want):
        assert_equal(one, other)


def everything(device, tokens) -> list:
    """What every dense op gives on a device: recorded or repeated, with and without the dispatcher, and backward."""
    x, a, b, ids, scalings, base, _, ranks, _ = on_gpu(tokens, device, poison=False)
    weight = torch.arange(base[0].numel() * 4096, device=device).remainder_(5).sub_(2).view(*base.shape[1:], 4096).to(x.dtype)
    factors = (a, b, ids, scalings)
    with torch.no_grad():
        h, out, sum_ = gl.shrink(x, a, ids, ranks=ranks), base.clone(), base.clone()
        gl.delta_(out, x, *factors, ranks=ranks)
        gl.expand_(sum_, h, *factors[1:], ranks=ranks)
        results = [gl.plan(ids, len(a)), h, out, sum_, gl.expand(h, *factors[1:], base=base, ranks=ranks)]
        results += [gl.delta(x, *factors, base=base, ranks=ranks), gl.linear(x, weight, *factors, ranks=ranks)]
    leaves = [t.detach().requires_grad_() for t in (x, a, b)]
    for y in (gl.delta(*leaves, ids, scalings, ranks=ranks), gl.linear(leaves[0], weight, *leaves[1:], ids, scalings, ranks=ranks)):
        results += [y.detach(), *torch.autograd.grad(y, leaves, base)]
    return results


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("tokens", [3, 200])
def test_every_op_on_the_gpu_of_its_tensors(tokens):
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            first, second = everything("cuda:0", tokens), everything("cuda:1", tokens)
            for i, (one, other) in enumerate(zip(first, second, strict=True)):
                assert (one.get_device(), other.get_device()) == (0, 1)
                assert_equal(one.cpu(), other.cpu(), f"result {i}, current GPU {current}")
            assert torch.cuda.current_device() == current
    assert all(len(held(name)) >= 2 for name in DENSE), "calls that were not prepared"


@pytest.mark.gpu
@two_gpus
def test_prepared_calls_of_two_devices():
    run = op("delta")
    first, second = on_gpu(3, "cuda:0"), on_gpu(3, "cuda:1")
    for _ in range(3):
        for current in (0, 1):
            with torch.cuda.device(current):
                assert_equal(run(*first).cpu(), run(*second).cpu())
                assert torch.cuda.current_device() == current
    assert len(run.table) == 2
