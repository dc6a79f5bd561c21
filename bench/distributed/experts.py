"""Experts divided over two ranks: forward, backward, and steps of an optimiser."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import grouped_lora_ops as gl
from grouped_lora_ops import layouts
from grouped_lora_ops.layouts import Share
from grouped_lora_ops.nn.factors import LoraFactors
from grouped_lora_ops.nn.parallel import enter_columns, sum_over
from grouped_lora_ops.sharding import local_expert_ids, sum_gradients

from .run import FP32_BOUND, Run, far

MOE = dict(model_type="qwen3_moe", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64)
EXPERT_LEAVES = ("gate_up_proj", "down_proj")
STEPS = 3
EMPTY_STEP = 1  # in which the second rank gets no token


@dataclass(frozen=True)
class ExpertSizes:
    experts: int
    hidden: int
    inner: int
    tokens: int
    top_k: int
    ranks: tuple[int, int]


class Experts:
    """A rank's experts with two jobs' factors from the layout, all ranks' tokens in, the sum over ranks out."""

    def __init__(self, run: Run, sizes: ExpertSizes, share: Share, shared_outer: bool, integers: bool):
        self.run, self.sizes, self.share, self.integers = run, sizes, share, integers
        config = dict(hidden_size=sizes.hidden, moe_intermediate_size=sizes.inner, intermediate_size=sizes.inner)
        config |= dict(num_experts=sizes.experts, num_experts_per_tok=sizes.top_k)
        self.model = layouts.of(MOE | config)
        kinds = dict(selectors=[f"mlp.experts.{leaf}" for leaf in EXPERT_LEAVES], shared_outer=shared_outer)
        whole = self.model.buffers(2, max(sizes.ranks), **kinds)
        buffers = self.model.buffers(2, max(sizes.ranks), share=share, **kinds)
        self.part = buffers[0].parts[0].experts
        self.weights, self.factors = [], []
        for n, (all_of_it, buffer) in enumerate(zip(whole, buffers)):
            p, shared = buffer.places[0].projection, ("ab"[n],) if shared_outer else ()
            self.weights.append(self.made(n, p.experts, p.out_features, p.in_features, scale=p.in_features**-0.5)[self.part])
            scalings = [1.0, 2.0]
            f = LoraFactors(buffer, sizes.ranks, scalings, dtype=torch.float32, device=run.device, shared=shared)
            for kind, factors, shape in (("a", f.a, all_of_it.a_shape[1:]), ("b", f.b, all_of_it.b_shape[1:])):
                for job, (parameter, rank) in enumerate(zip(factors, sizes.ranks)):
                    shape = (*shape[:-2], rank, shape[-1]) if kind == "a" else (*shape[:-1], rank)
                    value = self.made(10 + 4 * n + 2 * job + (kind == "b"), *shape, scale=shape[-1] ** -0.5)
                    parameter.data.copy_(value if len(value) == 1 else value[self.part])
            self.factors.append(f)

    def made(self, seed: int, *shape: int, scale: float = 1.0) -> Tensor:
        if not self.integers:
            return self.run.random(seed, *shape, scale=scale, dtype=torch.float32)
        return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float().to(self.run.device)

    def batch(self, step: int, first_half: bool) -> tuple[Tensor, ...]:
        """x, topk_ids, topk_weights, adapter_ids, the output's gradient."""
        s, g = self.sizes, torch.Generator().manual_seed(1000 + step)
        most = s.experts // 2 if first_half else s.experts
        ids = torch.stack([torch.randperm(most, generator=g)[: s.top_k] for _ in range(s.tokens)])
        adapters = torch.randint(-1, 2, (s.tokens,), generator=g)
        w = torch.randint(1, 3, (s.tokens, s.top_k), generator=g).float() if self.integers else torch.rand(s.tokens, s.top_k, generator=g)
        x, dy = (self.made(seed + step, s.tokens, s.hidden) for seed in (2000, 3000))
        return x, ids.to(self.run.device), w.to(self.run.device), adapters.to(self.run.device), dy

    def step(self, number: int, first_half: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """y and the gradients of x and of the router weights, complete; factors' gradients as this rank has them."""
        x, ids, w, adapters, dy = self.batch(number, first_half)
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        xs, ws = (enter_columns(t, self.run.group) if self.share.ep > 1 else t for t in (x, w))
        (a, b, scalings, ranks), (down_a, down_b, _, _) = (f.stacks(x) for f in self.factors)
        if self.integers:
            scalings = torch.ones_like(scalings)
        local = local_expert_ids(ids, self.part)
        if self.integers:  # ungated, with polynomial activation: sums stay exact
            up = self.weights[0][:, : self.sizes.inner]
            a, b = a[:, :, 0], b[:, :, : self.sizes.inner]
            kind = dict(activation="relu2", router_weight="pre_down")
        else:
            up, kind = self.weights[0], dict(activation="swiglu", router_weight="post_down")
        y = gl.expert_mlp(xs, local, ws, up, self.weights[1], a, b, down_a, down_b, adapters, scalings, ranks=ranks, **kind)
        y = sum_over(y, self.run.group) if self.share.ep > 1 else y
        y.backward(dy)
        return y.detach(), x.grad, w.grad

    def parameters(self) -> list[nn.Parameter]:
        return [p for f in self.factors for p in (*f.a, *f.b)]

    def shared(self) -> list[bool]:
        return [kind in f.shared for f in self.factors for kind in "aabb"]

    def mine(self, t: Tensor) -> Tensor:
        """This rank's experts of a factor (or gradient) of all."""
        return t if len(t) == 1 else t[self.part]


def experts(run: Run) -> None:
    for shared_outer in (False, True):
        start = time.perf_counter()
        name = "shared-outer" if shared_outer else "general"
        _experts_exactly(run, f"experts EP=2, {name}", shared_outer)
        _experts_trained(run, f"experts EP=2, {name}", shared_outer)
        if run.rank == 0:
            print(f"  experts EP=2, {name} {time.perf_counter() - start:.1f} s", flush=True)


def _experts_exactly(run: Run, part: str, shared_outer: bool) -> None:
    """Forward and backward in small integers: bit for bit; also where the second rank has no token."""
    sizes = ExpertSizes(4, 8, 4, 12, 2, (2, 1)) if run.tiny else ExpertSizes(16, 128, 64, 300, 4, (4, 2))
    for first_half in (False, True):
        whole = Experts(run, sizes, Share(), shared_outer, integers=True)
        own = Experts(run, sizes, Share(ep=2, ep_rank=run.rank), shared_outer, integers=True)
        want, got = whole.step(0, first_half), own.step(0, first_half)
        what = "forward and backward" + (", a rank without tokens" if first_half else "")
        for name, g, w in zip(("output", "x's gradient", "router weights' gradient"), got, want):
            run.equal(part, f"{what}: {name}", g, w, bits=False)
        found, expected = own.parameters(), whole.parameters()
        there = all(p.grad is not None for p in found) and any(p.grad.any() for p in found) != (first_half and run.rank == 1)
        run.check(part, f"{what}: every factor has a gradient, of zeros on a rank without tokens", there)
        for again in (False, True):
            sum_gradients(own.factors, own.model, ep_group=run.group, tp_group=run.alone)
            pairs = [(g.grad, own.mine(w.grad), s) for g, w, s in zip(found, expected, own.shared())]
            wrong = sum(int((g != w).sum()) for g, w, s in pairs if not (s and again))
            name = "the experts' own gradients after another sum" if again else "factors' gradients"
            run.check(part, f"{what}: {name}", wrong == 0, wrong, 0)
            if again and shared_outer:
                doubled = all(torch.equal(g, 2 * w) and w.any() for g, w, s in pairs if s)
                run.check(part, f"{what}: shared factors summed twice would be doubled", doubled)


def _experts_trained(run: Run, part: str, shared_outer: bool) -> None:
    """Three steps, the second without a token on the second rank; of AdamW, and of SGD, which knows how large a gradient is."""
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        options = dict(lr=1e-4, momentum=0.9) if optimizer is torch.optim.SGD else dict(lr=1e-2, weight_decay=0.0)
        _steps(run, f"{part}, {optimizer.__name__}", shared_outer, lambda p, make=optimizer, options=options: make(p, **options))


def _steps(run: Run, part: str, shared_outer: bool, make: Callable) -> None:
    sizes = ExpertSizes(4, 16, 8, 24, 2, (4, 2)) if run.tiny else ExpertSizes(16, 1024, 512, 512, 4, (16, 8))
    whole = Experts(run, sizes, Share(), shared_outer, integers=False)
    own = Experts(run, sizes, Share(ep=2, ep_rank=run.rank), shared_outer, integers=False)
    start = [p.detach().clone() for p in own.parameters()]
    optimizers = [make(e.parameters()) for e in (whole, own)]
    for number in range(STEPS):
        empty = number == EMPTY_STEP
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        want, got = whole.step(number, empty), own.step(number, empty)
        sum_gradients(own.factors, own.model, ep_group=run.group, tp_group=run.alone)
        worst = max(far(g, w) for g, w in zip(got, want))
        run.below(part, f"step {number + 1}: output, x's and router weights' gradients", worst, FP32_BOUND)
        grads = [(g.grad, own.mine(w.grad)) for g, w in zip(own.parameters(), whole.parameters())]
        worst = max(far(g, w) if w.any() else float(g.abs().max()) for g, w in grads)
        run.below(part, f"step {number + 1}: factors' gradients", worst, FP32_BOUND)
        for optimizer in optimizers:
            optimizer.step()
    moved = [(p.detach() - s, own.mine(w.detach()) - s) for p, w, s in zip(own.parameters(), whole.parameters(), start)]
    run.below(part, f"{STEPS} optimiser steps: what they changed", max(far(g, w) for g, w in moved), 10 * FP32_BOUND)
