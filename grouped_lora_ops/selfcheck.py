"""Every op once, forward and backward, on small integers, against a plain float64 computation rounded where the contract says.

Small integers make all products and float32 sums exact: there is one right answer, and any other bit is a fault. The answers
are computed here, without the references, which are what an op runs on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .plan import expert_view, view

T, D, N, R, L, G = 9, 64, 48, 8, 3, 2  # tokens, features in and out, rank, adapter slots, groups
E, K, H, I = 4, 2, 32, 16  # experts, routes per token, hidden and inner width
MANY_T, MANY_N = 160, 2048  # `linear` again, with tiles enough for csrc/linear.cu


class Outcome(NamedTuple):
    op: str
    wrong: str | None  # what differs; None: every bit is right
    seconds: float


class Numbers:
    """Small integers on a device, the same on every machine."""

    def __init__(self, device: torch.device):
        self.device, self.generator = device, torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, span: int = 2, zeros: float = 0.0) -> Tensor:
        """From −span to span; the part `zeros` of them is 0."""
        made = torch.randint(-span, span + 1, shape, generator=self.generator)
        made[torch.rand(shape, generator=self.generator) < zeros] = 0
        return made.to(self.device, dtype)

    def ids(self, *shape: int, most: int) -> Tensor:
        """−1 … most − 1, all of them (7 shares no factor with L + 1 = 4 and E + 1 = 5)."""
        count = 1
        for size in shape:
            count *= size
        return (torch.arange(count) * 7 % (most + 1) - 1).view(shape).to(self.device, torch.int32)

    def scalings(self) -> Tensor:
        return torch.tensor([0.5, 1.0, 2.0], device=self.device)


def adapters_of(ids: Tensor, *factors: Tensor) -> list[Tensor]:
    """Each factor's slice for every token; zeros where there is no adapter."""
    keep = (ids >= 0).to(torch.float64)
    return [f[ids.clamp_min(0).long()] * keep.view(-1, *[1] * (f.dim() - 1)) for f in factors]


def dense_delta(x: Tensor, a: Tensor, b: Tensor, ids: Tensor, scalings: Tensor) -> Tensor:
    """x [T, G, D], A [L, r, D], B [L, G, N, r], all float64 → [T, G, N]."""
    at, bt = adapters_of(ids, a, b)
    h = torch.einsum("tgd,trd->tgr", x, at)
    return torch.einsum("tgr,tgnr->tgn", h, bt) * scalings.double()[ids.clamp_min(0).long()].view(-1, 1, 1)


def expert_product(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """x [M, D], W [E, N, D], ids [M] → [M, N], zero where the id is none of an expert."""
    here = (ids >= 0) & (ids < weight.shape[0])
    return torch.einsum("md,mnd->mn", x, weight[torch.where(here, ids, 0).long()]) * here.double()[:, None]


def expert_delta(x: Tensor, a: Tensor, b: Tensor, ids: Tensor, slots: Tensor, scalings: Tensor) -> Tensor:
    """x [M, D], A [L, E, r, D], B [L, E, N, r], ids and slots [M] → [M, N]."""
    here = (ids >= 0) & (ids < a.shape[1]) & (slots >= 0)
    at, bt = (f[slots.clamp_min(0).long(), torch.where(here, ids, 0).long()] for f in (a, b))
    scale = (scalings.double()[slots.clamp_min(0).long()] * here)[:, None]
    return torch.einsum("mr,mnr->mn", torch.einsum("md,mrd->mr", x, at), bt) * scale


def difference(names: str, got: tuple, want: tuple) -> str | None:
    """The first of several tensors that is not the wanted one, rounded once to the tensor's dtype."""
    for name, mine, right in zip(names.split(), got, want, strict=True):
        right = right.detach().float().to(mine.dtype).view(mine.shape)
        if not torch.equal(mine.detach(), right):
            return f"{name}: {int((mine.detach() != right).sum())} of {right.numel()} entries are wrong"
    return None


def forward_and_backward(
    names: str, run: Callable, model: Callable, tensors: tuple[Tensor, ...], seed: Numbers
) -> str | None:
    """y and the gradients of `tensors` of an op against those of its model in float64."""
    leaves, wide = (
        [t.detach().to(kind or t.dtype).requires_grad_() for t in tensors] for kind in (None, torch.float64)
    )
    y, right = run(*leaves), model(*wide)
    grad = seed(*y.shape, dtype=y.dtype, span=1)
    got = (y, *torch.autograd.grad(y, leaves, grad))
    want = (right, *torch.autograd.grad(right, wide, grad.double().view(right.shape)))
    return difference(f"y {names}", got, want)


def dense_inputs(make: Numbers) -> tuple[Tensor, ...]:
    return make(T, G, D), make(L, R, D), make(L, G, N, R), make.ids(T, most=L), make.scalings()


def check_plan(make: Numbers) -> str | None:
    ids = make.ids(300, most=L)
    found = view(ops.plan(ids, L), L)
    for slot in range(L + 1):
        if not torch.equal(found.of_slot(slot).long(), (ids == (slot if slot < L else -1)).nonzero()[:, 0]):
            return f"the rows of slot {slot} are not those with its id"
    return None


def check_shrink(make: Numbers) -> str | None:
    x, a, _, ids, _ = dense_inputs(make)

    def model(x, a):
        return torch.einsum("tgd,trd->tgr", x, adapters_of(ids, a)[0])

    return forward_and_backward("dx dA", lambda x, a: ops.shrink(x, a, ids), model, (x, a), make)


def check_expand(make: Numbers) -> str | None:
    _, _, b, ids, scalings = dense_inputs(make)
    h, base = make(T, G, R, dtype=torch.float32, span=300), make(T, G, N)
    eye = torch.eye(R, dtype=torch.float64, device=make.device).expand(L, R, R)

    def model(h, b, base):
        return base + dense_delta(h, eye, b, ids, scalings)

    wrong = forward_and_backward(
        "dh dB dbase", lambda h, b, base: ops.expand(h, b, ids, scalings, base=base), model, (h, b, base), make
    )
    out = base.clone()
    torch.ops.grouped_lora.expand_(out, h, b, ids, scalings)
    return wrong or difference("expand_", (out,), (model(h.double(), b.double(), base.double()),))


def check_delta(make: Numbers) -> str | None:
    x, a, b, ids, scalings = dense_inputs(make)
    base = make(T, G, N)

    def model(x, a, b, base):
        return base + dense_delta(x, a, b, ids, scalings)

    return forward_and_backward(
        "dx dA dB dbase",
        lambda x, a, b, base: ops.delta(x, a, b, ids, scalings, base=base),
        model,
        (x, a, b, base),
        make,
    )


def check_delta_(make: Numbers) -> str | None:
    x, a, b, ids, scalings = dense_inputs(make)
    out = make(T, G, N)
    right = out.double() + dense_delta(x.double(), a.double(), b.double(), ids, scalings)
    ops.delta_(out, x, a, b, ids, scalings)
    return difference("out", (out,), (right,))


def check_linear(make: Numbers) -> str | None:
    scalings = make.scalings()

    def wrong(tokens: int, columns: int) -> str | None:
        ids = make.ids(tokens, most=L)

        def model(x, weight, a, b):
            return torch.einsum("tgd,gnd->tgn", x, weight) + dense_delta(x, a, b, ids, scalings)

        tensors = make(tokens, G, D), make(G, columns, D), make(L, R, D), make(L, G, columns, R)
        return forward_and_backward("dx dW dA dB", lambda x, w, a, b: ops.linear(x, w, a, b, ids, scalings), model, tensors, make)

    return wrong(T, N) or wrong(MANY_T, MANY_N)


def expert_inputs(make: Numbers, dtype: torch.dtype = torch.bfloat16):
    """(x, gate_up's A and B, expert ids, the slot of every token, scalings), one id of −1 and one of E among them."""
    ids = make.ids(T, K, most=E)
    ids[-1, -1] = E
    return (
        make(T, H, dtype=dtype),
        make(L, E, R, H, dtype=dtype),
        make(L, E, 2 * I, R, dtype=dtype),
        ids,
        make.ids(T, most=L),
        make.scalings(),
    )


def check_expert_plan(make: Numbers) -> str | None:
    _, _, _, ids, slots, _ = expert_inputs(make)
    found = expert_view(ops.expert_plan(ids, slots, E, L), T * K, E, L)
    rows, start = found.rows.long(), 0
    for expert, end in enumerate(found.ends.tolist()):
        routes = (ids.flatten() == expert).nonzero()[:, 0]
        if not torch.equal(rows[start:end].sort().values, routes):
            return f"the routes of expert {expert} are not those with its id"
        start = end
    return None


def check_expert_delta(make: Numbers) -> str | None:
    x, a, b, ids, slots, scalings = expert_inputs(make)
    base = make(T * K, 2 * I)

    def model(x, a, b, base):
        rows, each = x.repeat_interleave(K, 0), slots.repeat_interleave(K)
        return base + expert_delta(rows, a, b, ids.flatten(), each, scalings)

    return forward_and_backward(
        "dx dA dB dbase",
        lambda x, a, b, base: ops.expert_delta(x, a, b, ids, slots, scalings, base=base),
        model,
        (x, a, b, base),
        make,
    )


def check_expert_linear(make: Numbers) -> str | None:
    x, a, b, ids, slots, scalings = expert_inputs(make)
    weight = make(E, 2 * I, H)

    def model(x, w, a, b):
        rows, each = x.repeat_interleave(K, 0), slots.repeat_interleave(K)
        return expert_product(rows, w, ids.flatten()) + expert_delta(rows, a, b, ids.flatten(), each, scalings)

    return forward_and_backward(
        "dx dW dA dB",
        lambda x, w, a, b: ops.expert_linear(x, w, a, b, ids, slots, scalings),
        model,
        (x, weight, a, b),
        make,
    )


def check_expert_mlp(make: Numbers) -> str | None:
    """relu2, whose values stay integers, and float32, in which no stage rounds; then the stages' rounding in bf16.

    Most numbers are 0, so that no sum of squares reaches 2²⁴, whatever its order.
    """
    _, _, _, ids, slots, scalings = expert_inputs(make)
    weights = torch.tensor([1.0, 2.0], device=make.device).expand(T, K).contiguous()
    shapes = dict(
        w_up=(E, I, H), w_down=(E, H, I), up_a=(L, E, R, H), up_b=(L, E, I, R), down_a=(L, E, R, I), down_b=(L, E, H, R)
    )
    tensors = [make(T, H, dtype=torch.float32, span=1, zeros=0.6), weights]
    tensors += [make(*shape, dtype=torch.float32, span=1, zeros=0.6) for shape in shapes.values()]
    each = slots.repeat_interleave(K)

    def model(x, weights, w_up, w_down, up_a, up_b, down_a, down_b, rounded=lambda t: t):
        x = x.repeat_interleave(K, 0)
        h1 = rounded(
            expert_product(x, w_up, ids.flatten()) + expert_delta(x, up_a, up_b, ids.flatten(), each, scalings)
        )
        a = rounded(h1.relu().square())
        h2 = rounded(
            expert_product(a, w_down, ids.flatten()) + expert_delta(a, down_a, down_b, ids.flatten(), each, scalings)
        )
        return (h2 * weights.view(-1, 1)).view(T, K, H).sum(1)

    def run(x, weights, w_up, w_down, *factors):
        return ops.expert_mlp(
            x, ids, weights, w_up, w_down, *factors, slots, scalings, activation="relu2", router_weight="post_down"
        )

    wrong = forward_and_backward(
        "dx dweights dW_up dW_down dA_up dB_up dA_down dB_down", run, model, tuple(tensors), make
    )
    if wrong:
        return f"float32, {wrong}"
    narrow = run(*[t.bfloat16() for t in tensors])
    right = model(*[t.double() for t in tensors], rounded=lambda t: t.float().bfloat16().double())
    wrong = difference("y", (narrow,), (right,))
    return wrong and f"bfloat16, {wrong}"


CHECKS: dict[str, Callable[[Numbers], str | None]] = {
    "plan": check_plan,
    "shrink": check_shrink,
    "expand, expand_": check_expand,
    "delta": check_delta,
    "delta_": check_delta_,
    "linear": check_linear,
    "expert_plan": check_expert_plan,
    "expert_delta": check_expert_delta,
    "expert_linear": check_expert_linear,
    "expert_mlp": check_expert_mlp,
}


def run(device: torch.device, say: Callable[[str], None] = lambda text: None) -> list[Outcome]:
    """Check every op on a device; an op that raises is wrong."""
    found = []
    for name, check in CHECKS.items():
        say(name)
        start = time.perf_counter()
        try:
            wrong = check(Numbers(device))
        except Exception as error:  # whatever a broken installation throws is a finding
            wrong = f"{type(error).__name__}: {_first_line(error)}"
        found.append(Outcome(name, wrong, time.perf_counter() - start))
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
