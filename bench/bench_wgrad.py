"""Training: forward and backward of y = base + delta, gradients for x, A, B and base, against autograd over
PyTorch's own ways. One graph holds forward and backward; peak memory is that of one eager step beyond its
inputs."""

import pytest
import torch

from . import contenders as who
from . import measure
from .conftest import shortlist
from .workloads import TRAINING, integer_set

CONTENDERS = ("ours", "torch")
NEEDS_GRAD = ("x", "lora_a", "lora_b", "base")


def step(forward, t: dict, grad_y: torch.Tensor):
    """A call that returns y and the gradients of NEEDS_GRAD."""
    leaves = [t[name].detach().requires_grad_() for name in ("x", "lora_a", "lora_b", "out")]

    def call():
        y = forward(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad_y)

    return call


def exact_answer(inputs: who.Inputs, t: dict, grad_y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y and the gradients in float64, a token's adapter at a time, rounded once: on integers, the one right
    answer."""
    w, s = inputs.w, inputs.shared
    wide = {name: t[name].double() for name in ("x", "lora_a", "lora_b", "out")}

    def forward(x, a, b, base):
        ids = s["adapter_ids"]
        y = who.flat(base, w)
        for slot in ids.unique().tolist():
            if slot >= 0:
                rows = (ids == slot).nonzero()[:, 0]
                h = who.shrink_one(x[rows], a[slot], w)
                y = y.index_add(0, rows, who.expand_one(h, b[slot], w) * s["scalings"][slot].double())
        return y.view_as(base)

    return tuple(part.to(w.dtype) for part in step(forward, wide, grad_y.double())())


def mismatch(case) -> str | None:
    """h and dh take values in the hundreds here: sums stay exact, roundings of h or dh to bf16 show."""
    t = integer_set(case.w, case.device, span=1)
    generator = torch.Generator(case.device).manual_seed(2)
    shape = t["out"].shape
    grad_y = torch.randint(-1, 2, shape, device=case.device, generator=generator).to(case.w.dtype)
    inputs = case.inputs([t])
    forward = who.training_variants("ours", inputs)[""]
    got, want = step(forward, t, grad_y)(), exact_answer(inputs, t, grad_y)
    for name, mine, right in zip(("y", *NEEDS_GRAD), got, want, strict=True):
        if not torch.equal(mine, right):
            wrong = int((mine != right).sum())
            what = name if name == "y" else f"the gradient of {name}"
            return f"{what} differs in {wrong} of {right.numel()} entries"
    return None


@pytest.mark.parametrize("case", TRAINING, indirect=True, ids=lambda w: w.name)
def test_train(case, contender, figure, timer):
    w = case.w
    if contender == "ours" and (wrong := mismatch(case)):
        pytest.fail(f"exactness gate, training on {w.name}: {wrong}: no figure from a wrong kernel")
    generator = torch.Generator(case.device).manual_seed(3)
    grad_y = torch.randn(case.timed.sets[0]["out"].shape, device=case.device, dtype=w.dtype, generator=generator)
    ways = {
        name: [step(forward, t, grad_y) for t in case.timed.sets]
        for name, forward in who.training_variants(contender, case.timed).items()
    }
    if contender == "torch":
        want = step(who.training_variants("ours", case.timed)[""], case.timed.sets[0], grad_y)()
        for name, calls in ways.items():
            for part, mine, right in zip(("y", *NEEDS_GRAD), calls[0](), want, strict=True):
                error = float((mine.float() - right.float()).abs().max() / right.float().abs().max())
                assert error < 5e-2, f"torch's {name}: {part} is off by {error:.3g} of the largest value"
    tried = shortlist(timer, ways)
    best = min(tried, key=tried.__getitem__) if tried else next(iter(ways))
    calls = ways[best]

    def after(us: float) -> dict:
        return {"peak_mib": timer.peak_mib(calls[0]), "eager_us": timer.eager_us(calls)}

    round_us = timer.graph(calls, rest=measure.rests(w))
    figure(w, "train", contender, round_us, after=after, variant=best, variants=tried)
