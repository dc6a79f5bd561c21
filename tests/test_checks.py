"""The exact sentence of every argument check, before anything is launched or written."""

from __future__ import annotations

import re

import pytest
import torch

import grouped_lora_ops as glo
from grouped_lora_ops import _checks

T, G, D, N, R, L = 8, 2, 40, 24, 4, 3
OPS = torch.ops.grouped_lora


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def arguments(**changes):
    """delta's arguments in the form of wo_a; a change of None leaves an argument out."""
    args = {
        "x": zeros(T, G, D),
        "lora_a": zeros(L, R, D),
        "lora_b": zeros(L, G, N, R),
        "adapter_ids": zeros(T, dtype=torch.int64),
        "scalings": torch.ones(L),
        "base": zeros(T, G, N),
    }
    args.update(changes)
    return {k: v for k, v in args.items() if v is not None}


def call(op, **changes):
    """The op's function with the arguments it takes."""
    args = arguments(**changes)
    base = args.pop("base", None)
    if op.rstrip("_") in ("shrink", "expand"):
        args.setdefault("h", zeros(T, G, R))
    names = {
        "shrink": ("x", "lora_a", "adapter_ids", "ranks", "plan"),
        "expand": ("h", "lora_b", "adapter_ids", "scalings", "out_sizes", "ranks", "plan"),
        "delta": ("x", "lora_a", "lora_b", "adapter_ids", "scalings", "out_sizes", "ranks", "plan"),
    }[op.rstrip("_")]
    given = {k: args[k] for k in names if k in args}
    if op.endswith("_"):
        return getattr(glo, op)(base, **given)
    if op != "shrink":
        given["base"] = base
    return getattr(glo, op)(**given)


SENTENCES = [
    # groups, ranks and features that disagree
    (
        "delta",
        dict(lora_b=zeros(L, G * N, R)),
        "lora_b must be [L, 2, N, 4] to match x [8, 2, 40] = [T, G, D] "
        "(a flat [L, G·N, r] is a view of it, and unequal groups want out_sizes); got [3, 48, 4].",
    ),
    ("delta", dict(lora_b=zeros(L, 4, N, R)), "lora_b must be [L, 2, N, 4] to match x [8, 2, 40] = [T, G, D]; got [3, 4, 24, 4]."),
    ("delta", dict(lora_b=zeros(L, G, N, 5)), "lora_b must be [L, 2, N, 4] to match x [8, 2, 40] = [T, G, D]; got [3, 2, 24, 5]."),
    ("delta", dict(lora_b=zeros(2, G, N, R)), "lora_b must be of 3 slots like lora_a [3, 4, 40]; got [2, 2, 24, 4]."),
    ("delta", dict(lora_a=zeros(L, 4, R, D)), "lora_a must be [L, 2, r, 40] to match x [8, 2, 40]; got [3, 4, 4, 40]."),
    ("delta", dict(lora_a=zeros(L, R, 39)), "lora_a must be [L, r, 40] to match x [8, 2, 40]; got [3, 4, 39]."),
    ("delta", dict(lora_a=zeros(R, D)), "lora_a must be [L, r, 40] to match x [8, 2, 40]; got [4, 40]."),
    ("shrink", dict(lora_a=zeros(L, G, R, 41)), "lora_a must be [L, G, r, 40] to match x [8, 2, 40]; got [3, 2, 4, 41]."),
    ("shrink", dict(x=zeros(D)), "x must be [T, D] or [T, G, D]; got [40]."),
    ("delta", dict(x=zeros(T, 1, G, D)), "x must be [T, D] or [T, G, D]; got [8, 1, 2, 40]."),
    (
        "delta",
        dict(x=zeros(T, D), lora_a=zeros(L, G, R, D), lora_b=zeros(L, 4, N, R)),
        "lora_b must be [L, 2, N, 4] to match lora_a [3, 2, 4, 40]; got [3, 4, 24, 4].",
    ),
    (
        "delta",
        dict(x=zeros(T, D), lora_b=zeros(L, N, 5), base=None),
        "lora_b must be [L, N, 4] or [L, G, N, 4] to match lora_a [3, 4, 40]; got [3, 24, 5].",
    ),
    ("expand", dict(h=zeros(R)), "h must be [T, r] or [T, G, r]; got [4]."),
    ("expand", dict(lora_b=zeros(L, 4, N, R)), "lora_b must be [L, 2, N, 4] to match h [8, 2, 4] = [T, G, r]; got [3, 4, 24, 4]."),
    (
        "expand",
        dict(h=zeros(T, R), lora_b=zeros(L, N, 5), base=None),
        "lora_b must be [L, N, 4] or [L, G, N, 4] to match h [8, 4]; got [3, 24, 5].",
    ),
    # dtypes
    ("shrink", dict(x=zeros(T, D, dtype=torch.int32)), "x must be bfloat16, float16, float32 or float64 on cpu; got int32."),
    ("delta", dict(lora_a=zeros(L, R, D).half()), "lora_a must be float32 like x; got float16."),
    ("delta", dict(lora_b=zeros(L, G, N, R).bfloat16()), "lora_b must be float32 like x; got bfloat16."),
    ("delta", dict(base=zeros(T, G, N).half()), "base must be float32 like x; got float16."),
    ("delta_", dict(base=zeros(T, G, N).half()), "out must be float32 like x; got float16."),
    ("expand", dict(h=zeros(T, G, R).bfloat16()), "h must be float32; got bfloat16."),
    ("expand", dict(lora_b=zeros(L, G, N, R).double()), "h must be float64; got float32."),
    ("expand", dict(base=zeros(T, G, N).half()), "base must be float32 like lora_b; got float16."),
    ("delta", dict(adapter_ids=zeros(T)), "adapter_ids must be int32 or int64; got float32."),
    ("shrink", dict(adapter_ids=zeros(T).bool()), "adapter_ids must be int32 or int64; got bool."),
    ("delta", dict(scalings=torch.ones(L).double()), "scalings must be float32; got float64."),
    ("delta", dict(ranks=torch.ones(L).long()), "ranks must be int32; got int64."),
    ("delta", dict(plan=torch.zeros(13).long()), "plan must be int32; got int64."),
    # lengths
    ("delta", dict(adapter_ids=zeros(7).long()), "adapter_ids must be [8] to match x [8, 2, 40]; got [7]."),
    ("expand", dict(adapter_ids=zeros(8, 1).long()), "adapter_ids must be [8] to match h [8, 2, 4]; got [8, 1]."),
    ("delta", dict(scalings=torch.ones(2)), "scalings must be [3] to match lora_a [3, 4, 40]; got [2]."),
    ("delta", dict(scalings=torch.ones(())), "scalings must be [3] to match lora_a [3, 4, 40]; got []."),
    ("expand", dict(scalings=torch.ones(3, 1)), "scalings must be [3] to match lora_b [3, 2, 24, 4]; got [3, 1]."),
    ("shrink", dict(ranks=torch.ones(4).int()), "ranks must be [3] to match lora_a [3, 4, 40]; got [4]."),
    (
        "delta",
        dict(plan=torch.zeros(12).int()),
        "plan must be [13] = T + L + 2 for T = 8 rows and L = 3 slots, from grouped_lora.plan; got [12].",
    ),
    ("delta", dict(plan=torch.zeros(26).int()[::2]), "plan must be contiguous; got stride 2."),
    ("delta", dict(base=zeros(T, G * N)), "base must be [8, 2, 24] to match x [8, 2, 40]; got [8, 48]."),
    ("delta_", dict(base=zeros(T, G, 25)), "out must be [8, 2, 24] to match x [8, 2, 40]; got [8, 2, 25]."),
    ("expand_", dict(base=zeros(7, G, N)), "out must be [8, 2, 24] to match lora_b [3, 2, 24, 4]; got [7, 2, 24]."),
    # out_sizes
    (
        "delta",
        dict(out_sizes=[16, 8], lora_b=zeros(L, 25, R), base=None),
        "lora_b must be [L, 24, 4] to match out_sizes [16, 8] and x [8, 2, 40]; got [3, 25, 4].",
    ),
    (
        "delta",
        dict(out_sizes=[16, 8], base=None),
        "lora_b must be [L, 24, 4] to match out_sizes [16, 8] and x [8, 2, 40]; got [3, 2, 24, 4].",
    ),
    (
        "delta",
        dict(out_sizes=[24], lora_b=zeros(L, 24, R), base=None),
        "out_sizes must be 2 sizes, one for each group of x [8, 2, 40]; got [24].",
    ),
    ("expand", dict(out_sizes=[], base=None), "out_sizes must be at least one slice; got []."),
    ("expand", dict(out_sizes=[25, -1], base=None), "out_sizes must be sizes of zero or more; got [25, -1]."),
    # devices
    ("delta", dict(lora_a=zeros(L, R, D, device="meta")), "lora_a must be on cpu like x; got meta."),
    ("delta", dict(scalings=torch.ones(L, device="meta")), "scalings must be on cpu like x; got meta."),
    ("delta", dict(adapter_ids=zeros(T, device="meta").long()), "adapter_ids must be on cpu like x; got meta."),
    ("delta", dict(ranks=torch.ones(L, device="meta").int()), "ranks must be on cpu like x; got meta."),
    ("delta", dict(plan=torch.zeros(13, device="meta").int()), "plan must be on cpu like x; got meta."),
    ("delta", dict(base=zeros(T, G, N, device="meta")), "base must be on cpu like x; got meta."),
    ("expand", dict(lora_b=zeros(L, G, N, R, device="meta")), "lora_b must be on cpu like h; got meta."),
    # values, where reading them costs nothing
    ("delta", dict(adapter_ids=torch.tensor([0] * 7 + [3])), "adapter_ids must be -1 (no adapter) or a slot 0 … 2; got 3."),
    ("shrink", dict(adapter_ids=torch.tensor([0] * 7 + [-2])), "adapter_ids must be -1 (no adapter) or a slot 0 … 2; got -2."),
    ("expand_", dict(adapter_ids=torch.tensor([9] * 8)), "adapter_ids must be -1 (no adapter) or a slot 0 … 2; got 9."),
    ("delta_", dict(ranks=torch.tensor([0, 4, 5]).int()), "ranks must be 0 … 4, the rank of the stacked factors; got 5."),
    ("expand", dict(ranks=torch.tensor([0, 4, -1]).int()), "ranks must be 0 … 4, the rank of the stacked factors; got -1."),
    # in place
    (
        "delta_",
        dict(base=zeros(1, G, N).expand(T, G, N)),
        "out must be a tensor whose elements have memory of their own; got strides [0, 24, 1].",
    ),
]


@pytest.mark.parametrize("op, changes, sentence", SENTENCES, ids=[f"{op}-{s[:40]}" for op, _, s in SENTENCES])
def test_value_errors(op, changes, sentence):
    with pytest.raises(ValueError) as error:
        call(op, **changes)
    assert str(error.value) == f"grouped_lora.{op}: {sentence}"


@pytest.mark.parametrize("op", ["delta", "delta_", "shrink", "expand", "expand_"])
def test_the_arguments_that_the_sentences_change_are_good(op):
    call(op)
    call(op, ranks=torch.tensor([0, 4, 2]).int(), plan=glo.plan(zeros(T).long(), L), adapter_ids=zeros(T).int())


@pytest.mark.parametrize("op", ["delta", "delta_", "shrink", "expand", "expand_"])
def test_type_errors(op):
    required = {
        "delta": ("x", "lora_a", "lora_b", "adapter_ids", "scalings"),
        "shrink": ("x", "lora_a", "adapter_ids"),
        "expand": ("h", "lora_b", "adapter_ids", "scalings"),
    }[op.rstrip("_")]
    optional = ("ranks", "plan")
    for name in required:
        with pytest.raises(TypeError) as error:
            call(op, **{name: [1.0]})
        assert str(error.value) == f"grouped_lora.{op}: {name} must be a torch.Tensor; got list."
    for name in optional:
        with pytest.raises(TypeError) as error:
            call(op, **{name: 3})
        assert str(error.value) == f"grouped_lora.{op}: {name} must be a torch.Tensor or None; got int."
    if op in ("delta", "expand"):
        with pytest.raises(TypeError) as error:
            call(op, base=1.5)
        assert str(error.value) == f"grouped_lora.{op}: base must be a torch.Tensor or None; got float."
    if op.endswith("_"):
        with pytest.raises(TypeError) as error:
            call(op, base="out")
        assert str(error.value) == f"grouped_lora.{op}: out must be a torch.Tensor; got str."
    if op != "shrink":
        with pytest.raises(TypeError) as error:
            call(op, out_sizes=24)
        assert str(error.value) == f"grouped_lora.{op}: out_sizes must be a list of int or None; got int."


@pytest.mark.parametrize(
    "ids, slots, sentence",
    [
        (torch.zeros(3), 2, "adapter_ids must be int32 or int64; got float32."),
        (torch.zeros(3, 1).long(), 2, "adapter_ids must be [T]; got [3, 1]."),
        (torch.zeros(3).long(), -1, "num_slots must be zero or more; got -1."),
        (torch.tensor([0, 2]), 2, "adapter_ids must be -1 (no adapter) or a slot 0 … 1; got 2."),
    ],
)
def test_plan(ids, slots, sentence):
    with pytest.raises(ValueError) as error:
        glo.plan(ids, slots)
    assert str(error.value) == f"grouped_lora.plan: {sentence}"
    with pytest.raises(TypeError, match=r"^grouped_lora\.plan: adapter_ids must be a torch\.Tensor; got list\.$"):
        glo.plan([0], 1)


@pytest.mark.parametrize("op, which", [("delta_", n) for n in ("x", "lora_a", "lora_b", "base")] + [("expand_", "h")])
def test_in_place_ops_refuse_what_requires_grad(op, which):
    value = arguments()[which] if which != "h" else zeros(T, G, R)
    name = "out" if which == "base" else which
    with pytest.raises(ValueError) as error:
        call(op, **{which: value.requires_grad_()})
    assert str(error.value) == (
        f"grouped_lora.{op}: {name} must not require grad, the op works in place; use grouped_lora.{op[:-1]} with "
        "base=out, or call it under torch.no_grad()."
    )
    with torch.no_grad():
        call(op, **{which: value})


def test_out_may_not_overlap_an_operand():
    buffer = torch.zeros(T * G * D + 1000)
    x = buffer[: T * G * D].view(T, G, D)
    for offset in (0, 8, T * G * D - 1):
        out = buffer[offset : offset + T * G * N].view(T, G, N) if offset < 100 else buffer[offset:][: T * G * N].view(T, G, N)
        with pytest.raises(ValueError) as error:
            call("delta_", x=x, base=out)
        assert str(error.value) == "grouped_lora.delta_: out must be memory apart from x; got an out that overlaps x."
    call("delta_", x=x, base=buffer[T * G * D :][: T * G * N].view(T, G, N))
    b = torch.zeros(L * G * N * R)
    with pytest.raises(ValueError, match=r"^grouped_lora\.expand_: out must be memory apart from lora_b; "):
        call("expand_", lora_b=b.view(L, G, N, R), base=b[: T * G * N].view(T, G, N))


def test_column_slices_of_one_buffer_are_apart():
    wide = torch.zeros(T, 100)
    left, right = wide[:, :60], wide[:, 60:]
    assert not _checks.overlaps(left, right) and not _checks.overlaps(right, left)
    assert _checks.overlaps(wide[:, :61], right) and _checks.overlaps(right, wide[:, :61])
    assert _checks.overlaps(left, left) and _checks.overlaps(wide, left) and _checks.overlaps(wide[2:], wide[:3])
    assert not _checks.overlaps(wide[2:], wide[:2])
    assert not _checks.overlaps(wide[1:, :60], wide[:-1, 60:])
    assert not _checks.overlaps(wide[:0], wide)
    fused = torch.zeros(T, G, N + D)  # in every group a slice of out, then one of x
    assert not _checks.overlaps(fused[..., :N], fused[..., N:]) and not _checks.overlaps(fused[..., N:], fused[..., :N])
    assert _checks.overlaps(fused[..., : N + 1], fused[..., N:]) and _checks.overlaps(fused[:, 0], fused[:, :, 3:])
    assert not _checks.overlaps(fused[:, 0], fused[:, 1, 3:]) and not _checks.overlaps(fused[::2], fused[1::2])
    call("delta_", base=fused[..., :N], x=fused[..., N:])
    square = torch.zeros(10, 10)
    assert _checks.overlaps(square, square.t()) and _checks.overlaps(square.t()[2:], square[2:])
    groups = torch.zeros(T, 4, 30)
    assert not _checks.overlaps(groups[:, :2], groups[:, 2:])
    assert _checks.overlaps(groups[:, :3], groups[:, 2:])


def test_overlap_is_never_overlooked():
    """Random views of one buffer against the sets of their elements' addresses."""
    generator = torch.Generator().manual_seed(0)

    def draw(high):
        return int(torch.randint(high, (), generator=generator))

    buffer = torch.zeros(400, dtype=torch.int64)
    numbers = torch.arange(400)
    apart = 0
    for _ in range(2000):
        layouts = [((1 + draw(3), 1 + draw(3), 1 + draw(4)), (draw(40), draw(20), 1 + draw(2)), draw(60)) for _ in range(2)]
        a, b = (buffer.as_strided(*layout) for layout in layouts)
        touched = [set(numbers.as_strided(*layout).flatten().tolist()) for layout in layouts]
        if not _checks.overlaps(a, b):
            apart += 1
            assert not touched[0] & touched[1], layouts
    assert apart > 300


def test_meta_tensors_have_no_addresses():
    call("delta_", **{k: v.to("meta") for k, v in arguments().items()})


@pytest.mark.parametrize("op, changes, sentence", SENTENCES[:40:3], ids=[f"{op}-{s[:40]}" for op, _, s in SENTENCES[:40:3]])
def test_nothing_is_written_when_a_check_fails(op, changes, sentence):
    if op.startswith("shrink") or "base" in changes:
        pytest.skip("no out, or out itself is what is wrong")
    out = torch.full((T, G, N), 7.0)
    version = out._version
    with pytest.raises(ValueError, match=re.escape(f"grouped_lora.{op.rstrip('_')}_: ")):
        call(f"{op.rstrip('_')}_", **{**changes, "base": out})
    assert (out == 7).all() and out._version == version


def test_every_device_path_checks_alike(kernels):
    """The kernels' implementation refuses what the reference's does, and writes nothing."""
    out = torch.full((T, G, N), 7.0, device=kernels.device)
    args = {k: v.to(kernels.device) for k, v in arguments().items() if k != "base"}
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta_: lora_b must be \[L, 2, N, 4\] to match x \[8, 2, 40\] = "):
        kernels.delta_(out, *{**args, "lora_b": args["lora_b"].reshape(L, G * N, R)}.values())
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta_: x must not require grad"):
        kernels.delta_(out, *{**args, "x": args["x"].requires_grad_()}.values())
    assert (out == 7).all()


def test_checked_values_where_asked_for(kernels, monkeypatch):
    """GROUPED_LORA_CHECK=1: the kernels' path reads ids and ranks, too."""
    args = {k: v.to(kernels.device) for k, v in arguments().items() if k != "base"}
    args["adapter_ids"][2] = 3
    kernels.delta(*args.values())
    monkeypatch.setattr(_checks, "CHECK_IDS", True)
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta: adapter_ids must be -1 .* 0 … 2; got 3\.$"):
        kernels.delta(*args.values())
    with pytest.raises(ValueError, match=r"^grouped_lora\.plan: adapter_ids must be -1 .* 0 … 2; got 3\.$"):
        kernels.plan(args["adapter_ids"], 3)
    args["adapter_ids"][2] = 2
    ranks = torch.tensor([0, 5, 2], dtype=torch.int32, device=kernels.device)
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta: ranks must be 0 … 4, .*; got 5\.$"):
        kernels.delta(*args.values(), ranks=ranks)


@pytest.mark.gpu
def test_devices_may_not_mix():
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta: lora_a must be on cuda:0 like x; got cpu\.$"):
        OPS.delta(*[t.cuda() if n == "x" else t for n, t in arguments(base=None).items()])
    with pytest.raises(ValueError, match=r"^grouped_lora\.delta: x must be bfloat16, float16 or float32 on cuda; got float64"):
        OPS.delta(*[t.double().cuda() for t in arguments(base=None).values()])


@pytest.mark.parametrize(
    "call, error, sentence",
    [
        (lambda: glo.plan(zeros(3).int(), 2.5), TypeError, "plan: num_slots must be an int; got float."),
        (lambda: glo.plan(zeros(3).int(), None), TypeError, "plan: num_slots must be an int; got NoneType."),
        (lambda: glo.plan(zeros(3).int(), 2**31), ValueError, "plan: num_slots must be below 2^31; got 2147483648."),
        (lambda: glo.expert_plan(zeros(3, 2).int(), None, "4", 1), TypeError, "expert_plan: num_experts must be an int; got str."),
        (lambda: glo.expert_plan(zeros(3, 2).int(), None, 4, [1]), TypeError, "expert_plan: num_slots must be an int; got list."),
        (
            lambda: call("delta", out_sizes=[24, 1.5]),
            TypeError,
            "delta: out_sizes must be a list of int or None; got a list that holds float.",
        ),
    ],
    ids=["float", "none", "wide", "str", "list", "out_sizes"],
)
def test_integers_that_are_none(call, error, sentence):
    """The dispatcher's own words for these name neither the argument nor the cure, and come as RuntimeError."""
    with pytest.raises(error) as refused:
        call()
    assert str(refused.value) == f"grouped_lora.{sentence}"
    assert glo.plan(zeros(3).int(), torch.tensor([2]).numpy()[0]).shape == (7,), "numpy's integers are integers"


@pytest.mark.parametrize("name", ["x", "lora_b", "adapter_ids", "base"])
def test_sparse_tensors_are_refused(name):
    with pytest.raises(ValueError) as refused:
        call("delta", **{name: arguments()[name].to_sparse()})
    assert str(refused.value) == f"grouped_lora.delta: {name} must be a dense tensor; got one of layout sparse_coo."
    with pytest.raises(ValueError, match=r"^grouped_lora\.shrink: x must be a dense tensor; got one of layout sparse_csr\.$"):
        glo.shrink(zeros(T, D).to_sparse_csr(), zeros(L, R, D), zeros(T).int())
