"""DeepSeek-V4's output projection on two ranks, four of its eight groups each, captured and replayed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import grouped_lora_ops as gl
from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import Adapter, AdapterBank, LoraModule, plan_bank
from grouped_lora_ops.layouts import Share

from .run import Run, far

V4 = dict(model_type="deepseek_v4", num_hidden_layers=1, num_key_value_heads=1, q_lora_rank=64, o_groups=8)
V4 |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, vocab_size=64, qk_rope_head_dim=4)
V4_SIZES = dict(hidden_size=4096, num_attention_heads=64, head_dim=512, o_lora_rank=1024)  # D = 4096, N = 1024
V4_TINY = dict(hidden_size=32, num_attention_heads=16, head_dim=32, o_lora_rank=24)
V4_RANKS = (64, 16)
WO_A = "model.layers.0.self_attn.o_a_proj"
MIXES = {"captured": (0, 1, -1), "re-routed": (-1, 1, 0, 0), "swapped in place": (1, 0, -1, 1), "no adapter": (-1,)}


class Projection:
    """wo_a of a share, attached to a bank of two slots that is planned for it."""

    def __init__(self, run: Run, model: layouts.Model, share: Share, weight: Tensor):
        plan = plan_bank(model, slots=2, rank=max(V4_RANKS), selectors=["o_a_proj"], share=share)
        self.bank = AdapterBank(plan, device=run.device)
        self.groups, self.out_features, self.in_features = weight.shape
        self.module = nn.Module()
        self.module.layers = nn.ModuleList([nn.Module()])
        self.module.layers[0].attn = nn.Module()
        linear = nn.Linear(self.in_features, self.groups * self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.reshape(-1, self.in_features), requires_grad=False)
        self.module.layers[0].attn.wo_a = linear
        self.attached = gnn.attach_bank(self.module, self.bank)

    @property
    def wo_a(self):
        return self.module.layers[0].attn.wo_a

    def add(self, x: Tensor, out: Tensor, base: Tensor) -> Tensor:
        """base + delta for a base product that is given."""
        return self.wo_a.add_delta(x, out.copy_(base))

    def whole_step(self, x: Tensor) -> Tensor:
        """As DeepSeek's own code computes it."""
        return torch.einsum("tgd,gnd->tgn", x, self.wo_a.weight.view(self.groups, self.out_features, self.in_features))


def v4_adapters(run: Run, model: layouts.Model) -> dict[str, Adapter]:
    """a and b are there at capture; c takes b's place."""
    made = {}
    (p,) = model.targets(["o_a_proj"])
    for seed, (name, rank) in enumerate(zip("abc", (*V4_RANKS, 32))):
        a = run.random(10 + seed, rank, p.in_features, scale=p.in_features**-0.5).cpu()
        b = run.random(20 + seed, p.total_out, rank, scale=rank**-0.5).cpu()
        made[name] = Adapter(None, {}, {WO_A: LoraModule(a, b, rank, 0.5 + seed)})
    return made


def output_projection(run: Run) -> list[dict]:
    """TP = 2, four groups a rank; returns what it says about memory."""
    part, notes = "wo_a TP=2", []
    model = layouts.of(V4 | (V4_TINY if run.tiny else V4_SIZES))
    (p,) = model.targets(["o_a_proj"])
    mine = slice(4 * run.rank, 4 * run.rank + 4)
    weight = run.random(1, 8, p.out_features, p.in_features, scale=p.in_features**-0.5)
    adapters = v4_adapters(run, model)
    for tokens, what in ((8, "decode"), (300 if run.tiny else 8192, "prefill")):
        start = time.perf_counter()
        whole = Projection(run, model, Share(), weight)
        own = Projection(run, model, Share(2, run.rank), weight[mine])
        for name in "ab":
            slots = {projection.bank.load(name, adapters[name]) for projection in (whole, own)}
            run.check(part, f"{what}: both banks have {name} in one slot", len(slots) == 1)
        x = run.random(2, tokens, 8, p.in_features)
        x_own = x[:, mine].contiguous()
        with torch.no_grad():
            base = torch.einsum("tgd,gnd->tgn", x, weight).contiguous()
            notes.append(_output_projection(run, f"{what}, T={tokens}", whole, own, x, x_own, base, mine, adapters["c"]))
        if run.rank == 0:
            print(f"  {part}: {what} {time.perf_counter() - start:.1f} s", flush=True)
    return notes


def _output_projection(run: Run, what: str, whole, own, x, x_own, base, mine, other: Adapter) -> dict:
    part, (tokens, groups, n) = "wo_a TP=2", base.shape
    base_own, out, out_whole = base[:, mine].contiguous(), torch.empty_like(base[:, mine]).contiguous(), torch.empty_like(base)
    g = torch.Generator().manual_seed(tokens)
    mixes = {name: [mix[i] for i in torch.randint(0, len(mix), (tokens,), generator=g)] for name, mix in MIXES.items()}
    mixes["captured"][:3], mixes["re-routed"][:3] = [0, 1, -1], [1, -1, 0]  # all of them occur among eight rows, too
    mixes["swapped in place"][:3] = [-1, 0, 1]
    names = {name: [None if i < 0 else "ab"[i] for i in mix] for name, mix in mixes.items()}
    own.attached.prepare(tokens, run.device)
    steps: dict[str, Callable[[], Tensor]] = {
        "given base": lambda: own.add(x_own, out, base_own),
        "own product": lambda: own.whole_step(x_own),
    }
    graphs: dict[str, tuple] = {}
    if run.cuda:
        shape = gl.Shape(own.in_features, max(V4_RANKS), 2, own.out_features, groups=own.groups)
        gl.warmup([shape], tokens=[tokens], device=run.device)
        with own.attached.using(names["captured"]):
            for name, step in steps.items():
                side = torch.cuda.Stream(run.device)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step()
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events meanwhile
                    result = step()
                graphs[name] = graph, result
    largest, same_product = 0.0, False
    for stage, of_tokens in names.items():
        if stage == "swapped in place":
            slots = [projection.bank.load("b", other) for projection in (whole, own)]
            run.check(part, f"{what}: the swapped adapter has the slot of the old one", slots[0] == slots[1])
        with whole.attached.using(of_tokens), own.attached.using(of_tokens):
            full = whole.add(x, out_whole, base)
            want = full[:, mine]
            got = {}
            for name, step in steps.items():
                if graphs:
                    graphs[name][0].replay()
                    got[name] = graphs[name][1].clone()
                    run.equal(part, f"{what}, {stage}: replay = eager, {name}", got[name], step())
                else:
                    got[name] = step().clone()
            run.equal(part, f"{what}, {stage}: the rank's groups have the unsharded bits", got["given base"], want)
            joined = [torch.empty_like(got["given base"]) for _ in range(2)]
            dist.all_gather(joined, got["given base"].contiguous(), group=run.group)
            run.equal(part, f"{what}, {stage}: both ranks' groups joined are the unsharded output", torch.cat(joined, 1), full)
            rows = torch.tensor([n is None for n in of_tokens], device=run.device)
            run.equal(part, f"{what}, {stage}: rows without an adapter keep base's bits", got["given base"][rows], base_own[rows])
            if stage != "no adapter":
                moved = float((got["given base"] != base_own)[~rows].float().mean())
                run.above(part, f"{what}, {stage}: share of elements that an adapter changes", moved, 0.5)
            if stage == "captured":
                same_product = torch.equal(got["own product"], whole.whole_step(x)[:, mine])
            largest = max(largest, far(got["own product"], got["given base"]))
            if stage == "swapped in place":
                _errors(run, what, own, x_own, base_own, got["given base"], of_tokens)
    # a library's product need not give a group the same bits whatever else is in its batch
    run.below(part, f"{what}: base by the rank's own product instead, relative difference", largest, 1e-2)
    size = out.element_size()
    note = {"T": tokens, "G": own.groups, "N": n, "off_diagonal_bytes": tokens * own.groups * (own.groups - 1) * n * size}
    note["own_product_has_the_unsharded_bits"] = same_product
    note["off_diagonal_bytes_unsharded"] = tokens * groups * (groups - 1) * n * size
    if run.cuda:
        with own.attached.using(names["captured"]):
            own.add(x_own, out, base_own)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            own.add(x_own, out, base_own)
            torch.cuda.synchronize()
            note["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        if tokens >= 1024:
            most = note["off_diagonal_bytes"] // 4
            run.below(part, f"{what}: peak bytes of one call (bound: a quarter of what a G×G output would add)", note["peak_bytes"], most)
    return note


def _errors(run: Run, what: str, own: Projection, x: Tensor, base: Tensor, got: Tensor, names) -> None:
    """Maximum absolute error against float64 and against the reference in bf16."""
    part, (a, b, scalings, ranks, _) = "wo_a TP=2", own.bank[WO_A]
    ids = own.bank.adapter_ids(names)
    reference = gl.reference.delta(x, a, b, ids, scalings, base=base, ranks=ranks)
    exact = base.double()
    for slot, rank in enumerate(ranks.tolist()):
        rows = ids == slot
        h = x[rows].double() @ a[slot, :rank].double().t()
        exact[rows] += scalings[slot].double() * torch.einsum("tgr,gnr->tgn", h, b[slot, ..., :rank].double())
    theirs = float((reference.double() - exact).abs().max())
    ours = float((got.double() - exact).abs().max())
    run.below(part, f"{what}: max abs error against float64 (bound: 2 × the reference's)", ours, 2 * theirs)
    step = 2.0 ** (math.floor(math.log2(float(exact.abs().max()))) - 7)  # between neighbouring bf16 numbers of that size
    run.below(part, f"{what}: max abs difference to the bf16 reference (bound: one step)", float((got - reference).abs().max()), step)
