"""What the ranks of `test_sharding.py` run, in turn or as two processes over gloo."""

from __future__ import annotations

import traceback

import torch
import torch.multiprocessing as mp
from adapter_cases import random_adapter
from tiny_models import CONFIGS
from torch import nn
from toy_model import CONFIG, Toy
from two_ranks import leave

import grouped_lora_ops as gl
from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import AdapterBank, plan_bank
from grouped_lora_ops.layouts import Share
from grouped_lora_ops.nn.parallel import enter_columns, gather_tokens, scatter_tokens, sum_over
from grouped_lora_ops.sharding import local_expert_ids, shard_adapter, sum_gradients, unshard_adapter

GPU = torch.cuda.is_available()
V4 = CONFIGS["deepseek_v4"] | dict(num_hidden_layers=1, o_groups=8, num_attention_heads=16, head_dim=32, o_lora_rank=24)


def each_share(tp: int, ep: int) -> list[Share]:
    return [Share(tp, t, ep, e) for t in range(tp) for e in range(ep)]


def output_projection(model, adapters, share, weight, x, base, ids, grad):
    """(y, dx, dA, dB) of a rank's groups, its factors from a bank that is planned for its share."""
    device = x.device
    bank = AdapterBank(plan_bank(model, slots=3, rank=16, selectors=["o_a_proj"], share=share), device=device)
    names = [f"a{n}" for n in range(len(adapters))]
    slots = torch.tensor([bank.load(name, adapter) for name, adapter in zip(names, adapters)] + [-1], device=device)
    for name in names:
        bank.acquire(name)  # work queued from here on waits for the uploads
    a, b, scalings, ranks, _ = bank["model.layers.0.self_attn.o_a_proj"]
    ids = slots[ids].to(torch.int32)
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Module()])
    module.layers[0].attn = nn.Module()
    module.layers[0].attn.wo_a = nn.Linear(weight.shape[2], weight.shape[0] * weight.shape[1], False, device, weight.dtype)
    attached = gnn.attach_bank(module, bank)
    attached.routing.set(ids)
    y = module.layers[0].attn.wo_a.add_delta(x, base.clone())  # the base's product is given: its bits are a library's
    a_, b_, x_ = (t.detach().clone().requires_grad_() for t in (a, b, x))
    other = gl.delta(x_, a_, b_, ids, scalings, base=base, ranks=ranks)
    other.backward(grad)
    assert torch.equal(other, y)
    order = slots[:-1]
    return y, x_.grad, a_.grad[order], b_.grad[order]


class ExpertLayer:
    """One rank's experts of expert_mlp on small integers, where all sums are exact."""

    SMALL, FULL = (4, 8, 4, 2, 2, 12, 2), (16, 128, 64, 4, 2, 300, 4)

    def __init__(self, share: Share, shared_outer: bool, router_weight: str, sizes=SMALL, device: str = "cpu"):
        self.E, self.H, self.INNER, self.R, self.L, self.T, self.K = sizes
        self.device = device
        self.part = slice(share.ep_rank * self.E // share.ep, (share.ep_rank + 1) * self.E // share.ep)
        self.shared_outer, self.router_weight = shared_outer, router_weight
        g = torch.Generator().manual_seed(0)

        def integers(*shape):
            return torch.randint(-1, 2, shape, generator=g).float().to(device)

        counts = [1 if shared_outer else self.E, self.E, self.E, 1 if shared_outer else self.E]
        shapes = dict(
            gate_up_a=(self.L, counts[0], self.R, self.H),
            gate_up_b=(self.L, counts[1], self.INNER, self.R),
            down_a=(self.L, counts[2], self.R, self.INNER),
            down_b=(self.L, counts[3], self.H, self.R),
        )
        self.factors = {}
        for name, shape in shapes.items():
            whole = integers(*shape)
            self.factors[name] = (whole if shape[1] == 1 else whole[:, self.part]).clone().requires_grad_()
        self.up, self.down = integers(self.E, self.INNER, self.H)[self.part], integers(self.E, self.H, self.INNER)[self.part]
        self.x, self.grad = integers(self.T, self.H), integers(self.T, self.H)
        self.ids = torch.stack([torch.randperm(self.E, generator=g)[: self.K] for _ in range(self.T)]).to(device)
        self.weights = torch.randint(1, 3, (self.T, self.K), generator=g).float().to(device)
        self.adapters = torch.randint(-1, self.L, (self.T,), generator=g).to(device)

    def shared(self, name: str) -> bool:
        return self.shared_outer and name in ("gate_up_a", "down_b")

    def run(self):
        x, w = self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()
        y = gl.expert_mlp(
            x,
            local_expert_ids(self.ids, self.part),
            w,
            self.up,
            self.down,
            *self.factors.values(),
            self.adapters,
            torch.ones(self.L, device=self.device),
            activation="relu2",
            router_weight=self.router_weight,
        )
        y.backward(self.grad)
        return y.detach(), x.grad, w.grad, {name: f.grad for name, f in self.factors.items()}


# ---- two processes ------------------------------------------------------------------------------------------------------


class Column(nn.Module):
    """A rank's rows of a linear layer; its input's gradient is summed over the ranks, or its input's tokens are gathered."""

    def __init__(self, whole: nn.Linear, part, group, sequence_dim=None):
        super().__init__()
        rows = torch.cat([torch.arange(r.start, r.stop) for r in part.rows])
        self.weight, self.group, self.sequence_dim = nn.Parameter(whole.weight[rows].detach().clone()), group, sequence_dim
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias[rows].detach().clone())

    def forward(self, x):
        d = self.sequence_dim
        x = enter_columns(x, self.group) if d is None else gather_tokens(x, d, self.group)
        return nn.functional.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """A rank's columns; outputs are summed over the ranks, each of which keeps all or its own tokens."""

    def __init__(self, whole: nn.Linear, part, group, sequence_dim=None):
        super().__init__()
        self.weight, self.group = nn.Parameter(whole.weight[:, part.columns].detach().clone()), group
        self.sequence_dim = sequence_dim

    def forward(self, x):
        y, d = nn.functional.linear(x, self.weight), self.sequence_dim
        return sum_over(y, self.group) if d is None else scatter_tokens(y, d, self.group)


def divided(model: nn.Module, layout, share: Share, group, sequence_dim=None) -> nn.Module:
    """The model with a rank's share of every projection."""
    for place in layout.places():
        owner = model.get_submodule(place.path.rpartition(".")[0].removeprefix("model."))
        kind = Row if place.projection.facts.shard is layouts.Shard.ROW else Column
        leaf = place.projection.facts.leaf
        setattr(owner, leaf, kind(getattr(owner, leaf), place.projection.part(share), group, sequence_dim))
    return model


def column_and_row_layers(rank, group):
    """TP = 2 of a whole model: outputs, the input's gradient, and every factor's gradient after `sum_gradients`; tokens whole,
    and divided (sequence parallelism) along either dimension."""
    layout, share = layouts.of(CONFIG), Share(2, rank)
    adapters = [random_adapter(layout, rank=r, scaling=0.2, seed=r, dtype=torch.float64) for r in (4, 3)]
    x = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1)).double()
    ids = torch.randint(-1, 2, (24,), generator=torch.Generator().manual_seed(2)).tolist()

    def run(model, **options):
        sequence_dim = options.get("sequence_dim")
        attached = gnn.attach_trainable(model, layout, rank=[4, 3], slots=2, alpha=0.8, dtype=torch.float64, **options)
        for slot, adapter in enumerate(adapters):
            attached.load(adapter, slot)
        attached.routing.set(ids)
        own = x if sequence_dim is None else x.chunk(2, sequence_dim)[rank]
        own = own.clone().requires_grad_()
        y = model(own)
        y.square().sum().backward()
        return y.detach(), own.grad, attached

    y, dx, attached = run(Toy().double())
    for dim in (None, 0, 1):
        options = dict(share=share, tp_group=group) | ({} if dim is None else dict(sequence_dim=dim))
        own_y, own_dx, own = run(divided(Toy().double(), layout, share, group, dim), **options)
        sum_gradients(own.factors, layout, tp_group=group, sequence_parallel=dim is not None)
        for got, want in ((own_y, y), (own_dx, dx)):
            want = want if dim is None else want.chunk(2, dim)[rank]
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        for f, mine in zip(attached.factors, own.factors):
            part = f.buffer.places[0].projection.part(share)
            for slot in range(2):
                torch.testing.assert_close(mine.a[slot].grad, f.a[slot].grad[:, part.columns], rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(mine.b[slot].grad, f.b[slot].grad[part.rows[0]], rtol=1e-9, atol=1e-9)
                assert mine.a[slot].grad.any() and mine.b[slot].grad.any()
        try:
            sum_gradients(own.factors, layout)
        except ValueError as error:
            assert "q_proj: tp_group must be given" in str(error)
        else:
            raise AssertionError("a missing group was not noticed")
    shards = [None, None]
    torch.distributed.all_gather_object(shards, own.adapter(), group=group)
    back = unshard_adapter([(Share(2, n), shard) for n, shard in enumerate(shards)], layout)
    assert all(torch.equal(back.modules[k].lora_b, lora.lora_b) for k, lora in adapters[0].modules.items())


def replicated_layers(rank, group):
    """Sequence parallelism of MLA's replicated projections, and of column ones whose parent gathered the tokens."""
    layout, share = layouts.of(CONFIGS["deepseek_v3"]), Share(2, rank)
    names = {"kv_a_proj_with_mqa": (32, 12), "q_b_proj": (16, 48)}
    g = torch.Generator().manual_seed(0)
    adapters = [random_adapter(layout, list(names), rank=r, scaling=0.5, seed=r, dtype=torch.float64) for r in (3, 2)]
    xs = {name: torch.randn(2, 6, d, generator=g).double() for name, (d, _) in names.items()}
    ids = torch.randint(-1, 2, (12,), generator=g).tolist()

    def run(ranked):
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in model.layers:
            layer.self_attn = nn.Module()
            for name, (d, n) in names.items():
                setattr(layer.self_attn, name, nn.Linear(d, n, bias=False).double())
            if ranked:  # a parent that gathers: no sum of its own, since its gather's backward has one
                whole = layer.self_attn.q_b_proj
                whole.weight = nn.Parameter(whole.weight[24 * rank : 24 * rank + 24].detach().clone())
        options = dict(share=share, tp_group=group, sequence_dim=1) if ranked else {}
        attached = gnn.attach_trainable(model, layout, rank=[3, 2], slots=2, selectors=list(names), dtype=torch.float64, **options)
        for slot, adapter in enumerate(adapters):
            attached.load(adapter, slot)
        attached.routing.set(ids)
        own = {n: (x.chunk(2, 1)[rank] if ranked else x).clone().requires_grad_() for n, x in xs.items()}
        found = {}
        for name, x in own.items():
            module = getattr(model.layers[1].self_attn, name)
            gathers = ranked and name == "q_b_proj"
            found[name] = module(gather_tokens(x, 1, group) if gathers else x)
            found[name].square().sum().backward()
            found[name + ".x"] = x.grad
        if ranked:
            sum_gradients(attached.factors[2:], layout, tp_group=group, sequence_parallel=True)
        return found, attached.factors[2:]

    (want, factors), (got, own) = run(False), run(True)
    for name in names:
        column = name == "q_b_proj"
        y = want[name].chunk(2, 2)[rank] if column else want[name].chunk(2, 1)[rank]
        torch.testing.assert_close(got[name], y, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got[name + ".x"], want[name + ".x"].chunk(2, 1)[rank], rtol=1e-9, atol=1e-9)
    for f, mine in zip(factors, own):
        rows = f.buffer.places[0].projection.part(share).rows[0]
        for slot in range(2):
            torch.testing.assert_close(mine.a[slot].grad, f.a[slot].grad, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(mine.b[slot].grad, f.b[slot].grad[rows], rtol=1e-9, atol=1e-9)
            assert mine.b[slot].grad.any()


def attached_together(rank, group):
    """What fails on one rank fails on all alike, before anything of the model has changed; then it can be attached."""
    layout, share = layouts.of(CONFIG), Share(2, rank)

    def refused(model, message, of=layout, **options):
        try:
            gnn.attach_trainable(model, of, share=share, tp_group=group, **options)
        except RuntimeError as error:
            texts = [None, None]
            torch.distributed.all_gather_object(texts, str(error), group=group)
            assert texts[0] == texts[1] and message in texts[0], texts
        else:
            raise AssertionError(f"not refused: {message}")
        assert not any(isinstance(m, gnn.LoraLinear) for m in model.modules())

    model = divided(Toy(), layout, share, group)
    proj = model.layers[1].mlp.down_proj
    good = proj.weight
    if rank == 1:
        proj.weight = nn.Parameter(good[:, :7].detach())
    refused(model, "rank 1: ValueError: grouped_lora_ops.nn.attach_trainable: nothing was attached:")
    refused(model, "mlp.down_proj: weight must be [32, 20] for these adapters; got [32, 7]")
    proj.weight = good
    refused(model, "all ranks must have the same factors; rank 0 has", rank=4 + rank)
    refused(model, "rank 1 ('ranks', [3, 2]", rank=[3, 3 - rank], slots=2)
    moe = layouts.of(CONFIGS["qwen3_moe"])
    refused(model, "model.layers.1.mlp.experts: experts are not attached with sequence_dim", of=moe, sequence_dim=0)
    attached = gnn.attach_trainable(model, layout, share=share, tp_group=group, sequence_dim=0)
    try:
        attached.linears["model.layers.1.mlp.down_proj"](torch.zeros(4, 20))
    except ValueError as error:
        assert "down_proj: base must return tokens [2] for x [4] with sequence_dim=0 and 2 ranks; got [4]" in str(error)
    else:
        raise AssertionError("a base that returns all tokens was not noticed")


def v4_output_projection(rank, group):
    """Each process its four groups; gathered, they have the whole's bits, and dA's sum is the whole's in small integers."""
    model, share = layouts.of(V4), Share(2, rank)
    g = torch.Generator().manual_seed(0)
    adapters = [random_adapter(model, ["o_a_proj"], rank=r, scaling=0.5, seed=r, dtype=torch.bfloat16) for r in (16, 5)]
    for adapter in adapters:
        for lora in adapter.modules.values():
            for t in (lora.lora_a, lora.lora_b):
                t.copy_(torch.randint(-1, 2, t.shape, generator=g))
    d, n, mine = 64, 24, slice(4 * rank, 4 * rank + 4)

    def integers(*shape):
        return torch.randint(-1, 2, shape, generator=g).bfloat16()

    for tokens in (8, 300):
        x, weight, grad, base = integers(tokens, 8, d), integers(8, n, d), integers(tokens, 8, n), integers(tokens, 8, n)
        ids = torch.tensor([0, 1, -1])[torch.randint(0, 3, (tokens,), generator=g)]
        whole = output_projection(model, adapters, Share(), weight, x, base, ids, grad)
        own = output_projection(model, adapters, share, weight[mine], x[:, mine], base[:, mine], ids, grad[:, mine])
        gathered = [torch.empty_like(own[0]) for _ in range(2)]
        torch.distributed.all_gather(gathered, own[0].contiguous(), group=group)
        assert torch.equal(torch.cat(gathered, 1), whole[0])
        exact = own[2].float()
        torch.distributed.all_reduce(exact, group=group)
        torch.testing.assert_close(exact, whole[2].float(), rtol=1e-2, atol=1.0)


def experts(rank, group):
    """EP = 2, forward and backward; the shared factors' gradients are complete after their sum over ep."""
    for shared_outer in (False, True):
        whole = ExpertLayer(Share(), shared_outer, "post_down")
        own = ExpertLayer(Share(ep=2, ep_rank=rank), shared_outer, "post_down")
        y, dx, dw, factors = whole.run()
        got = own.run()
        for t in got[:3]:
            torch.distributed.all_reduce(t, group=group)
        assert torch.equal(got[0], y) and torch.equal(got[1], dx) and torch.equal(got[2], dw)
        for name, grad in got[3].items():
            if whole.shared(name):
                torch.distributed.all_reduce(grad, group=group)
            assert torch.equal(grad, factors[name] if whole.shared(name) else factors[name][:, own.part])


def trained_experts(rank, group):
    """sum_gradients knows which factors of a real experts module all ranks hold."""
    try:
        gnn.experts.registry()
    except ImportError:
        return
    from tiny_models import transformers_model

    layout = layouts.of(CONFIGS["qwen3_moe"])
    share, part = Share(ep=2, ep_rank=rank), slice(2 * rank, 2 * rank + 2)
    g = torch.Generator().manual_seed(0)
    x, weights, grad = torch.randn(9, 32, generator=g), torch.rand(9, 2, generator=g), torch.randn(9, 32, generator=g)
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(9)])
    selectors, found = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], []
    adapter = random_adapter(layout, selectors, scaling=0.2, shared_outer=True)
    for options in ({}, dict(share=share)):
        model = transformers_model("qwen3_moe")
        module, own, w = model.model.layers[1].mlp.experts, ids, weights
        if options:
            for name in ("gate_up_proj", "down_proj"):
                setattr(module, name, nn.Parameter(getattr(module, name)[part].clone()))
            module.num_experts, module._is_expert_parallel = 2, True
            own = local_expert_ids(ids, part)
            own, w = torch.where(own < 0, 2, own), torch.where(own < 0, 0.0, weights)
        attached = gnn.attach_trainable(model, layout, rank=3, selectors=selectors, shared_outer=True, **options)
        attached.load(adapter)
        module(x, own, w).backward(grad)
        if options:
            sum_gradients(attached.factors, layout, ep_group=group)
        found.append(attached.factors)
    for f, mine in zip(*found):
        for name in "ab":
            want, got = getattr(f, name)[0].grad, getattr(mine, name)[0].grad
            torch.testing.assert_close(got, want if len(want) == 1 else want[part], rtol=1e-3, atol=1e-5)


def dtensor(rank, group):
    """Every rule: placements that need no communication give the unsharded result, forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as S
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, w, g = init_device_mesh("cpu", (2,)), Replicate(), torch.Generator().manual_seed(0)
    T, G, D, N, R, L = 6, 4, 8, 6, 2, 3

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=g).double()

    ids, scalings, ranks = torch.tensor([0, 2, -1, 1, 1, 0]), torch.tensor([1.0, 2.0, 0.5]), torch.tensor([2, 1, 2]).int()
    forms = {
        "plain": ((T, D), (L, R, D), (L, N, R), (T, N)),
        "grouped": ((T, G, D), (L, R, D), (L, G, N, R), (T, G, N)),
        "each": ((T, G, D), (L, G, R, D), (L, G, N, R), (T, G, N)),
        "fused": ((T, D), (L, G, R, D), (L, G * N, R), (T, G * N)),
        "same input": ((T, D), (L, G, R, D), (L, G, N, R), (T, G, N)),
    }
    placed = [  # form, x, a, b, base (None: no base), ids, y
        ("plain", w, w, w, w, w, w),
        ("plain", S(0), w, w, S(0), S(0), S(0)),
        ("plain", w, w, S(1), S(1), w, S(1)),
        ("plain", S(1), S(2), w, None, w, Partial()),
        ("grouped", S(1), w, S(1), S(1), w, S(1)),
        ("grouped", S(0), w, w, S(0), S(0), S(0)),
        ("grouped", w, w, S(2), S(2), w, S(2)),
        ("grouped", S(2), S(2), w, None, w, Partial()),
        ("each", S(1), S(1), S(1), S(1), w, S(1)),
        ("fused", S(0), w, w, S(0), S(0), S(0)),
        ("fused", S(1), S(3), w, None, w, Partial()),
        ("same input", w, S(1), S(1), S(1), w, S(1)),
    ]
    for form, x_, a_, b_, base_, ids_, y_ in placed:
        tensors = [integers(*shape) for shape in forms[form]]
        out_sizes = [N] * G if form == "fused" else None
        grad = integers(*forms[form][3])
        plain = [t.clone().requires_grad_() for t in tensors]
        base = plain[3] if base_ is not None else None
        want = gl.delta(*plain[:3], ids, scalings, base=base, out_sizes=out_sizes, ranks=ranks)
        want.backward(grad)
        own = [
            distribute_tensor(t, mesh, [p or w]).detach().requires_grad_() for t, p in zip(tensors, (x_, a_, b_, base_))
        ]
        small = [distribute_tensor(t, mesh, [p]) for t, p in ((ids, ids_), (scalings, w), (ranks, w))]
        with CommDebugMode() as seen:
            got = gl.delta(
                *own[:3], *small[:2], base=own[3] if base_ is not None else None, out_sizes=out_sizes, ranks=small[2]
            )
        assert seen.get_total_counts() == 0 and got.placements == (y_,), (form, got.placements)
        assert torch.equal(got.full_tensor(), want), form
        got.backward(distribute_tensor(grad, mesh, [w if y_ == Partial() else y_]))
        for t, p in zip(own[: 3 + (base_ is not None)], plain):
            assert torch.equal(t.grad.full_tensor(), p.grad), form
    # shrink, h summed, expand: a row projection
    x, a, b = integers(T, D), integers(L, R, D), integers(L, N, R)
    plain = [t.clone().requires_grad_() for t in (x, a, b)]
    want = gl.expand(gl.shrink(*plain[:2], ids), plain[2], ids, scalings)
    grad = integers(T, N)
    want.backward(grad)
    own = [distribute_tensor(t, mesh, [p]).detach().requires_grad_() for t, p in ((x, S(1)), (a, S(2)), (b, w))]
    small = [distribute_tensor(t, mesh, [w]) for t in (ids, scalings)]
    h = gl.shrink(*own[:2], small[0])
    assert h.placements == (Partial(),)
    got = gl.expand(h.redistribute(mesh, [w]), own[2], *small)
    got.backward(distribute_tensor(grad, mesh, [w]))
    assert torch.equal(got.full_tensor(), want)
    for t, p in zip(own, plain):
        assert torch.equal(t.grad.full_tensor(), p.grad)
    # the same op twice, at first with A's gradient alone: what was cached for the first must not serve the second
    for wanted in ((False, True, False), (True, True, True)):
        own = [t.detach().requires_grad_(need) for t, need in zip(own, wanted)]
        plain = [t.detach().requires_grad_(need) for t, need in zip(plain, wanted)]
        gl.delta(*own, *small).redistribute(mesh, [w]).backward(distribute_tensor(grad, mesh, [w]))
        gl.delta(*plain, ids, scalings).backward(grad)
        for t, p, need in zip(own, plain, wanted):
            assert (t.grad is not None) == need and (not need or torch.equal(t.grad.full_tensor(), p.grad))
    assert torch.equal(gl.plan(small[0], L).full_tensor(), gl.plan(ids, L))
    adapter = random_adapter(layouts.of(CONFIG))
    assert shard_adapter(adapter, layouts.of(CONFIG), Share(2, rank)).modules


LAYERS = (column_and_row_layers, replicated_layers, attached_together)
CHECKS = {f.__name__: f for f in (*LAYERS, v4_output_projection, experts, trained_experts, dtensor)}


def _work(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    done = []
    try:
        for name, check in CHECKS.items():
            check(rank, torch.distributed.group.WORLD)
            done.append(name)
    except BaseException:
        done.append(traceback.format_exc())
    results[rank] = done
    leave()


def two_processes(path):
    with mp.Manager() as manager:
        results = manager.dict()
        context = mp.spawn(_work, (str(path / "store"), results), nprocs=2, join=False)
        for _ in range(2):
            context.join(timeout=80)
        hang = [p for p in context.processes if p.is_alive()]
        for process in hang:
            process.kill()
        assert not hang, f"a rank hangs; {dict(results)}"
        return dict(results)
