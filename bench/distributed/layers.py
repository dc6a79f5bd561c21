"""Column and row layers on two ranks: outputs, gradients, and which gradients are summed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import Adapter, LoraModule
from grouped_lora_ops.layouts import Share
from grouped_lora_ops.nn.parallel import enter_columns, gather_tokens, scatter_tokens, sum_over
from grouped_lora_ops.sharding import sum_gradients

from .run import FP32_BOUND, Run, far

BF16_BOUND = 4.0  # times one device's own error against float32: some sums of a rank are of two halves that were rounded before
FAR = 0.1  # a gradient that was summed too often, or not at all, is at least this far off


DENSE = dict(model_type="llama", num_hidden_layers=2, vocab_size=64)
DENSE_SIZES = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64, intermediate_size=2816)
DENSE_TINY = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40)
JOB_RANKS = (16, 8)


class Column(nn.Module):
    """A rank's rows. sequence_dim: its tokens are gathered before; else all ranks have them, and x's gradient is summed."""

    def __init__(self, weight: Tensor, group, sequence_dim: int | None):
        super().__init__()
        self.weight, self.group, self.sequence_dim = nn.Parameter(weight), group, sequence_dim

    def forward(self, x):
        d = self.sequence_dim
        x = enter_columns(x, self.group) if d is None else gather_tokens(x, d, self.group)
        return nn.functional.linear(x, self.weight)


class Row(nn.Module):
    """A rank's columns; outputs are summed, and with sequence_dim a rank keeps its tokens of them."""

    def __init__(self, weight: Tensor, group, sequence_dim: int | None):
        super().__init__()
        self.weight, self.group, self.sequence_dim = nn.Parameter(weight), group, sequence_dim

    def forward(self, x):
        y, d = nn.functional.linear(x, self.weight), self.sequence_dim
        return sum_over(y, self.group) if d is None else scatter_tokens(y, d, self.group)


class Whole(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Decoder(nn.Module):
    """Layers with the llama layout's names, q/k/v and gate/up apart or fused; of a share, or (group None) whole."""

    def __init__(self, run: Run, layout: layouts.Model, share: Share, fused: bool, sequence_dim: int | None, dtype):
        super().__init__()
        self.head_dim = layout.config["head_dim"]
        self.repeat = layout.config["num_attention_heads"] // layout.config["num_key_value_heads"]
        self.layers = nn.ModuleList(nn.Module() for _ in range(layout.num_layers))
        divided = share.tp > 1
        for n, layer in enumerate(self.layers):
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            weights: dict[str, list[Tensor]] = {}
            for m, p in enumerate(layout.targets()):
                part = p.part(share)
                w = run.random(100 * n + m, p.total_out, p.in_features, scale=p.in_features**-0.5, dtype=dtype)
                w = torch.cat([w[rows] for rows in part.rows])[:, part.columns].contiguous()
                family = p.facts.family if fused else None
                weights.setdefault(f"{p.facts.owner}.{family}" if family else p.path, []).append(w)
            for path, found in weights.items():
                owner, leaf = path.split(".")
                w = torch.cat(found)
                kind = Row if leaf in ("o_proj", "down_proj") else Column
                setattr(getattr(layer, owner), leaf, kind(w, run.group, sequence_dim) if divided else Whole(w))
                if len(found) > 1:
                    getattr(layer, owner).sizes = [len(w) for w in found]

    def forward(self, x):
        for layer in self.layers:
            attn, mlp = layer.self_attn, layer.mlp
            apart = hasattr(attn, "q_proj")
            q, k, v = (attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)) if apart else attn.qkv_proj(x).split(attn.sizes, -1)
            kv = torch.tanh(k * v).unflatten(-1, (-1, 1, self.head_dim))
            x = x + attn.o_proj((torch.tanh(q).unflatten(-1, (-1, self.repeat, self.head_dim)) * kv).flatten(-3))
            gate, up = (mlp.gate_proj(x), mlp.up_proj(x)) if apart else mlp.gate_up_proj(x).split(mlp.sizes, -1)
            x = x + mlp.down_proj(nn.functional.silu(gate) * up)
        return x


def job_adapters(run: Run, layout: layouts.Model) -> list[Adapter]:
    made = []
    for job, rank in enumerate(JOB_RANKS):
        modules = {}
        for n, place in enumerate(layout.places()):
            p = place.projection
            a = run.random(1000 + 100 * job + n, rank, p.in_features, scale=p.in_features**-0.5)  # bf16: cast without loss
            b = run.random(2000 + 100 * job + n, p.total_out, rank, scale=0.5 * rank**-0.5)
            modules[place.path] = LoraModule(a.float().cpu(), b.float().cpu(), rank, 0.5)
        made.append(Adapter(None, {}, modules))
    return made


def column_and_row_layers(run: Run) -> None:
    """TP = 2 of a decoder, the tokens whole or divided, q/k/v and gate/up apart or fused, two jobs and rows of neither."""
    layout = layouts.of(DENSE | (DENSE_TINY if run.tiny else DENSE_SIZES))
    cases = [(torch.float32, fused, dim) for fused in (False, True) for dim in (None, 1)] + [(torch.bfloat16, True, d) for d in (None, 1)]
    for dtype, fused, dim in cases:
        start = time.perf_counter()
        name = f"layers TP=2, {str(dtype)[6:]}, {'fused' if fused else 'apart'}, sequence {'whole' if dim is None else 'divided'}"
        _layers(run, name, layout, dtype, fused, dim)
        if run.rank == 0:
            print(f"  {name} {time.perf_counter() - start:.1f} s", flush=True)


@dataclass
class _Compared:
    """What a rank has, what one device has of it, and what that would be in float32."""

    got: Tensor
    one: Tensor
    exact: Tensor

    @property
    def error(self) -> float:
        return far(self.got, self.exact)


def _within(run: Run, part: str, name: str, found: list[_Compared], dtype) -> None:
    """The largest relative difference to one device; in bf16 both against float32."""
    bound = FP32_BOUND if dtype == torch.float32 else BF16_BOUND * max(far(c.one, c.exact) for c in found)
    run.below(part, name, max(c.error for c in found), bound)


def _layers(run: Run, part: str, layout: layouts.Model, dtype, fused: bool, dim: int | None) -> None:
    batch, length = (2, 16) if run.tiny else (4, 128)
    hidden = layout.config["hidden_size"]
    x, dy = (run.random(seed, batch, length, hidden, dtype=dtype) for seed in (5, 6))
    ids = torch.randint(-1, 2, (batch * length,), generator=torch.Generator().manual_seed(7)).tolist()
    adapters, share = job_adapters(run, layout), Share(2, run.rank)

    def forward(share: Share, as_dtype, **parallel):
        sequence_dim = parallel.get("sequence_dim")
        model = Decoder(run, layout, share, fused, sequence_dim, dtype).to(as_dtype)
        kinds = dict(rank=JOB_RANKS, alpha=[r / 2 for r in JOB_RANKS], slots=2, fused=fused, share=share)
        attached = gnn.attach_trainable(model, layout, **kinds, **parallel)
        for job, adapter in enumerate(adapters):
            attached.load(adapter, job)
        attached.routing.set(ids)
        own, grad = ((t if sequence_dim is None else t.chunk(2, sequence_dim)[run.rank]) for t in (x, dy))
        own = own.to(as_dtype, copy=True).requires_grad_()
        y = model(own)
        y.backward(grad.to(as_dtype))
        return y.detach(), own.grad, attached.factors

    one = forward(Share(), dtype)
    exact = one if dtype == torch.float32 else forward(Share(), torch.float32)
    *tensors, factors = forward(share, dtype, tp_group=run.group, sequence_dim=dim)
    for name, got, *wanted in zip(("output", "x's gradient"), tensors, one, exact):
        wanted = wanted if dim is None else [w.chunk(2, dim)[run.rank] for w in wanted]
        _within(run, part, name, [_Compared(got, *wanted)], dtype)

    summed, complete = [], []
    for mine, f, e in zip(factors, one[2], exact[2]):
        p, parts = mine.buffer.places[0].projection, mine.buffer.parts
        over = layout.gradient_sums(p, sequence_parallel=dim is not None)
        starts = [sum(place.projection.total_out for place in mine.buffer.places[:m]) for m in range(len(parts))]
        rows = torch.cat([s + torch.arange(r.start, r.stop) for s, part_ in zip(starts, parts) for r in part_.rows]).to(run.device)
        for job in range(2):
            columns = [t.a[job].grad[..., parts[0].columns] for t in (f, e)]
            (summed if over["a"] else complete).append(_Compared(mine.a[job].grad, *columns))
            (summed if over["b"] else complete).append(_Compared(mine.b[job].grad, *(t.b[job].grad[rows] for t in (f, e))))
    before = [c.got.clone() for c in complete]
    alone = torch.tensor([c.error for c in summed], device=run.device)
    dist.all_reduce(alone, op=dist.ReduceOp.MAX, group=run.group)  # one rank may have most of a small batch
    run.above(part, "replicated factors' gradients before the sum: the least difference", float(alone.min()), FAR)
    groups = dict(tp_group=run.group, ep_group=run.alone, sequence_parallel=dim is not None)
    sum_gradients(factors, layout, **groups)
    _within(run, part, "replicated factors' gradients, summed once", summed, dtype)
    _within(run, part, "divided factors' gradients", complete, dtype)
    same = all(torch.equal(c.got, b) for c, b in zip(complete, before))
    run.check(part, f"{len(complete)} complete gradients are in no sum, {len(summed)} are", same and bool(summed))
    sum_gradients(factors, layout, **groups)
    run.above(part, "replicated factors' gradients, summed twice: the least difference", min(c.error for c in summed), FAR)
