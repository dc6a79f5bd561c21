"""What is measured: shapes, the published figures to beat, the floor under each, and the tensors.

The floor of an op is max(bytes / 4.3 TB/s, flops / 790 TFLOP/s), where bytes are what the operation cannot
avoid:

* x of every row that has an adapter, read once;
* A and B of every adapter that occurs in the batch, up to its true rank, read once;
* the output twice, since `delta_` adds to it in place: read once, written once.

h never counts for a delta (a fused kernel keeps it on chip). The published floors count the adapters that
occurred in the measured batch, not the slots and not an expectation: at T = 8, 8 slots held 6 and 64 slots
held 8; at T = 64, 64 slots held 42. `adapter_ids` draws with a seed that has those counts, so every floor of
the tables comes out of the formula to the last printed digit (tests/test_bench.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

HBM_BYTES_PER_US = 4.3e6
FLOPS_PER_US = {torch.bfloat16: 790e6, torch.float16: 790e6, torch.float32: 67e6}  # fp32: CUDA cores, no TF32
IDS_SEED = 8


@dataclass(frozen=True)
class Workload:
    """One batch through one projection. `layout` says what the groups share:

    plain    x [T, D],    A [L, r, D],               B [L, N, r],                 out [T, N]
    grouped  x [T, G, D], A [L, r, D] (one for all), B [L, G, N, r],              out [T, G, N]
    own_a    x [T, G, D], A [L, G, r, D],            B [L, G, N, r],              out [T, G, N]
    stacked  x [T, D],    A [L, G, r, D],            B [L, G, N, r] or [L, ΣN, r], out [T, G, N] or [T, ΣN]
    """

    name: str
    T: int
    D: int
    N: int
    rank: int
    slots: int
    G: int = 1
    layout: str = "plain"
    out_sizes: tuple[int, ...] | None = None  # stacked only: unequal slices
    dtype: torch.dtype = torch.bfloat16
    mix: str = "uniform"  # or "skewed" (90 % of the tokens share an adapter), "one" (all do), "none" (all −1), "some" (−1 is one more)
    true_ranks: tuple[int, ...] | None = None  # of the slots, cycled; None: every slot has the full rank
    active: int | None = None  # so many adapters occur, for as many tokens each; None: what mix draws
    peers: Mapping[str, float] = field(default_factory=dict)  # published µs, see grouped_lora_ops.report.tables.PEERS

    @property
    def width(self) -> int:
        """Output columns of a token."""
        return sum(self.out_sizes) if self.out_sizes else self.G * self.N

    @property
    def x_width(self) -> int:
        return self.D * (self.G if self.layout in ("grouped", "own_a") else 1)

    @property
    def h_rows(self) -> int:
        """Rows of h per token."""
        return 1 if self.layout == "plain" else self.G

    @property
    def a_count(self) -> int:
        """A matrices of an adapter."""
        return self.G if self.layout in ("own_a", "stacked") else 1

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=self.peers.__getitem__) if self.peers else None

    def tiny(self) -> Workload:
        """The same structure at sizes a CPU runs in milliseconds."""
        sizes = tuple(range(16, 16 + 8 * len(self.out_sizes), 8)) if self.out_sizes else None
        odd = any(size % 8 for size in (self.D, self.N, self.rank))
        shape = {"D": 40, "N": 41, "rank": 3} if odd else {"D": 64, "N": 32, "rank": 8}
        ranks = tuple(max(1, 8 * r // self.rank) for r in self.true_ranks) if self.true_ranks else None
        small = {"T": min(self.T, 9), "G": min(self.G, 3), "slots": min(self.slots, 3)}
        small["active"] = None if self.active is None else min(self.active, 3)
        return replace(self, out_sizes=sizes, true_ranks=ranks, peers={}, **small, **shape)


def adapter_ids(w: Workload) -> Tensor:
    """[T] int32 on the CPU, the same for every run of every machine."""
    if w.active is not None:
        ids = torch.arange(w.T, dtype=torch.int32) % max(w.active, 1)
        shuffled = ids[torch.randperm(w.T, generator=torch.Generator().manual_seed(IDS_SEED))]
        return shuffled if w.active else torch.full_like(ids, -1)
    if w.mix in ("none", "one"):
        return torch.full((w.T,), -1 if w.mix == "none" else 0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(IDS_SEED)
    ids = torch.randint(-(w.mix == "some"), w.slots, (w.T,), generator=generator, dtype=torch.int64)
    if w.mix == "skewed":
        ids[torch.rand(w.T, generator=generator) < 0.9] = 0
    return ids.to(torch.int32)


def slot_ranks(w: Workload) -> Tensor:
    """[L] int32, the true rank of every slot."""
    ranks = w.true_ranks or (w.rank,)
    return torch.tensor([ranks[slot % len(ranks)] for slot in range(w.slots)], dtype=torch.int32)


@dataclass(frozen=True)
class Batch:
    """What the ids of a workload amount to."""

    rows: int  # tokens with an adapter
    adapters: int  # adapters that occur
    adapter_ranks: int  # the sum of their ranks
    row_ranks: int  # the sum of the rows' ranks


def batch(w: Workload) -> Batch:
    ids = adapter_ids(w)
    ids = ids[ids >= 0].long()
    ranks = slot_ranks(w).long()
    active = ids.unique()
    return Batch(ids.numel(), active.numel(), int(ranks[active].sum()), int(ranks[ids].sum()))


def cost(w: Workload, op: str) -> tuple[int, int]:
    """(bytes, flops) that `op` on this workload cannot do without."""
    b, size = batch(w), w.dtype.itemsize
    x, out = size * b.rows * w.x_width, size * b.rows * w.width
    a, up = size * b.adapter_ranks * w.D * w.a_count, size * b.adapter_ranks * w.width
    shrink_flops, expand_flops = 2 * b.row_ranks * w.D * w.h_rows, 2 * b.row_ranks * w.width
    if op == "delta":
        return x + a + up + 2 * out, shrink_flops + expand_flops
    if op == "shrink":  # h is float32 and whole: zeros for rows without an adapter and past the true rank
        return x + a + 4 * w.T * w.h_rows * w.rank, shrink_flops
    if op == "expand":
        return 4 * b.row_ranks * w.h_rows + up + 2 * out, expand_flops
    if op == "plan":  # ids in, an int32 plan out: at least a row number per token and a bound per slot
        return 4 * (w.T + w.T + w.slots), 0
    if op == "train":
        # Forward: x, A, B, base in, y out. Backward: dy, x, A, B in, dx out, and dA, dB of every slot, zeros too.
        slot_weights = size * w.slots * w.rank * (w.D * w.a_count + w.width)
        return 3 * x + 3 * out + 2 * (a + up) + slot_weights, 3 * (shrink_flops + expand_flops)
    raise ValueError(f"no cost formula for {op!r}")


def floor_us(w: Workload, op: str = "delta") -> float:
    nbytes, flops = cost(w, op)
    return max(nbytes / HBM_BYTES_PER_US, flops / FLOPS_PER_US[w.dtype])


def bar_us(w: Workload, op: str = "delta") -> float | None:
    """The project's own bar for deltas."""
    if op != "delta":
        return None
    floor = floor_us(w)
    return 1.08 * floor + 3.0 if w.T >= 4096 else 1.15 * floor + 3.5


# --- tensors ---


def shapes(w: Workload) -> dict[str, tuple[int, ...]]:
    grouped_x = w.layout in ("grouped", "own_a")
    flat = w.layout == "plain"
    return {
        "x": (w.T, w.G, w.D) if grouped_x else (w.T, w.D),
        "lora_a": (w.slots, w.rank, w.D) if w.a_count == 1 else (w.slots, w.G, w.rank, w.D),
        "lora_b": (w.slots, w.width, w.rank) if flat or w.out_sizes else (w.slots, w.G, w.N, w.rank),
        "out": (w.T, w.width) if flat or w.out_sizes else (w.T, w.G, w.N),
        "h": (w.T, w.rank) if flat else (w.T, w.G, w.rank),
    }


def bytes_per_set(w: Workload) -> int:
    s = shapes(w)
    return w.dtype.itemsize * sum(math.prod(s[name]) for name in ("x", "lora_a", "lora_b", "out"))


def shared_inputs(w: Workload, device: torch.device) -> dict:
    """What all input sets of a batch have in common: the ids and what hangs on the slots. Scalings are powers
    of two, so a peer that folds them into B computes the same numbers."""
    return {
        "adapter_ids": adapter_ids(w).to(device),
        "scalings": torch.tensor([(0.5, 1.0, 2.0)[slot % 3] for slot in range(w.slots)], device=device),
        "ranks": slot_ranks(w).to(device) if w.true_ranks else None,
        "out_sizes": list(w.out_sizes) if w.out_sizes else None,
    }


def random_set(w: Workload, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """x, A, B, out and h of one set, scaled so that h and the delta are of order one; A is 0 past the true
    ranks."""
    generator = torch.Generator(device).manual_seed(seed)
    scale = {"x": 1.0, "lora_a": w.D**-0.5, "lora_b": w.rank**-0.5, "out": 1.0, "h": 1.0}
    made = {}
    for name, shape in shapes(w).items():
        dtype = torch.float32 if name == "h" else w.dtype
        made[name] = torch.randn(shape, device=device, dtype=dtype, generator=generator).mul_(scale[name])
    if w.true_ranks:
        for slot, rank in enumerate(slot_ranks(w).tolist()):
            made["lora_a"][slot, ..., rank:, :] = 0
    return made


def integer_set(w: Workload, device: torch.device, seed: int = 1, span: int = 3) -> dict[str, Tensor]:
    """The same tensors holding small integers: every product and every float32 sum is exact, so there is one
    right answer, whatever the order. In bf16 h reaches a thousand and more, beyond what bf16 holds: a kernel
    that rounds h is found out. fp16 takes −1, 0, 1, whose outputs stay below its largest number."""
    generator = torch.Generator(device).manual_seed(seed)
    span = 1 if w.dtype == torch.float16 else span
    made = {}
    for name, shape in shapes(w).items():
        dtype, top = (torch.float32, 300) if name == "h" else (w.dtype, span)
        made[name] = torch.randint(-top, top + 1, shape, device=device, generator=generator).to(dtype)
    return made


# --- the rows with published peer figures ---

# rank, slots, T: sglang's default backends, sglang's best kernel, torch's best
_WO_A = """
16 1 1     14.0   8.4    9.5
16 1 8     14.4   8.8    9.5
16 1 64    15.0   9.7    10.4
16 1 256   16.5   12.3   12.3
16 1 1024  39.6   25.5   24.2
16 1 8192  225.7  128.8  125.0
16 2 1     14.0   8.4    9.4
16 2 8     14.5   9.0    19.7
16 2 64    15.2   9.9    33.7
16 2 256   17.5   12.3   43.4
16 2 1024  41.3   27.0   91.2
16 2 8192  219.1  128.7  607.7
16 8 1     13.9   8.5    9.5
16 8 8     14.6   9.7    20.0
16 8 64    16.8   10.8   39.7
16 8 256   24.7   13.4   53.3
16 8 1024  50.6   27.8   103.2
16 8 8192  235.1  130.2  594.6
64 1 1     15.9   10.0   9.7
64 1 8     16.4   10.5   9.9
64 1 64    18.9   13.3   10.8
64 1 256   28.7   19.8   12.7
64 1 1024  96.6   33.6   22.4
64 1 8192  686.2  139.4  127.0
64 2 1     16.0   9.9    9.7
64 2 8     16.5   10.9   22.1
64 2 64    19.6   13.6   33.9
64 2 256   34.9   20.2   44.3
64 2 1024  101.3  34.5   93.7
64 2 8192  680.4  141.6  598.8
64 8 1     15.9   9.9    9.7
64 8 8     17.4   12.7   23.1
64 8 64    20.3   15.1   45.2
64 8 256   40.1   20.0   54.5
64 8 1024  110.9  35.5   102.4
64 8 8192  678.7  143.8  593.2
"""

# rank, slots, T: sglang's default backends, sglang's best kernel, vLLM's shrink + expand, torch's best
_PLAIN = """
16 1 8     14.4   9.2    9.4    9.5
16 1 64    14.7   10.3   10.0   9.7
16 1 8192  148.6  80.5   86.5   77.0
16 2 8     14.5   9.3    9.4    18.7
16 2 64    15.0   10.6   10.3   31.0
16 2 8192  142.6  80.6   92.3   366.0
16 8 8     14.9   9.7    10.5   19.2
16 8 64    16.3   11.2   11.9   39.6
16 8 8192  156.9  79.6   112.5  405.0
16 64 8    15.7   10.1   11.8   19.7
16 64 64   21.3   16.2   30.1   42.1
16 64 8192 196.4  86.0   375.5  476.2
64 1 8     17.3   9.8    10.7   9.7
64 1 64    19.8   11.9   12.1   10.2
64 1 8192  471.2  86.4   131.1  76.5
64 2 8     17.5   10.1   11.4   22.0
64 2 64    20.8   12.2   12.8   31.6
64 2 8192  465.3  84.8   139.2  363.4
64 8 8     19.3   11.2   14.7   23.1
64 8 64    22.0   14.3   19.0   43.9
64 8 8192  480.1  87.9   168.0  408.5
64 64 8    22.1   17.2   25.2   24.8
64 64 64   50.3   26.4   67.1   57.8
64 64 8192 522.5  102.3  552.9  480.7
"""


def _table(family: str, text: str, columns: tuple[str, ...], **shape) -> list[Workload]:
    rows = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        rank, slots, tokens, *figures = line.split()
        rows.append(
            Workload(
                name=f"{family}-r{rank}-S{slots}-T{tokens}",
                T=int(tokens),
                rank=int(rank),
                slots=int(slots),
                peers=dict(zip(columns, map(float, figures), strict=True)),
                **shape,
            )
        )
    return rows


WO_A = _table("wo_a", _WO_A, ("sglang default", "sglang best", "torch"), D=4096, N=1024, G=4, layout="grouped")
PLAIN = _table("plain", _PLAIN, ("sglang default", "sglang best", "vllm", "torch"), D=4096, N=4096)
TARGETS = WO_A + PLAIN

# --- beyond the tables ---


def _wo_a(name: str, tokens: int, rank: int = 16, slots: int = 8, **changed) -> Workload:
    shape = {"D": 4096, "N": 1024, "G": 4, "layout": "grouped"} | changed
    return Workload(f"extra-{name}-r{rank}-S{slots}-T{tokens}", tokens, rank=rank, slots=slots, **shape)


def _plain(name: str, tokens: int, rank: int = 16, slots: int = 8, **changed) -> Workload:
    shape = {"D": 4096, "N": 4096} | changed
    return Workload(f"extra-{name}-r{rank}-S{slots}-T{tokens}", tokens, rank=rank, slots=slots, **shape)


_QKV = {"layout": "stacked", "G": 3, "out_sizes": (4096, 1024, 1024)}
_GATE_UP = {"layout": "stacked", "G": 2, "N": 14336}

EXTRA = [
    *(_wo_a("wo_a_g8", tokens, rank, G=8) for rank in (16, 64) for tokens in (1, 8, 64, 256, 8192)),
    *(_wo_a("wo_a_own_a", tokens, layout="own_a") for tokens in (8, 8192)),
    *(_wo_a("wo_a_skewed", tokens, 64, mix="skewed") for tokens in (64, 256, 8192)),
    *(_wo_a("wo_a_none", tokens, mix="none") for tokens in (8, 8192)),
    *(_wo_a("wo_a_one_of_64", tokens, slots=64, mix="one") for tokens in (8, 64)),
    *(_wo_a("curve", tokens, 16, slots) for slots in (1, 8) for tokens in (2, 4, 9, 16, 32, 128, 129, 200, 512)),
    *(_wo_a("wo_a", tokens, 32, slots) for slots in (1, 8) for tokens in (1, 4, 64, 8192)),
    *(_plain("qkv", tokens, rank, **_QKV) for rank in (16, 64) for tokens in (1, 8, 256, 8192)),
    *(_plain("gate_up", tokens, **_GATE_UP) for tokens in (8, 256, 4096)),
    *(_plain("skewed", tokens, 64, slots=64, mix="skewed") for tokens in (64, 8192)),
    *(_plain("rank16_in_256", tokens, 256, true_ranks=(16,)) for tokens in (8, 256, 8192)),
    *(_plain("mixed_ranks", tokens, 256, true_ranks=(256, 16, 64, 8)) for tokens in (8, 256, 8192)),
    *(_plain("rank16_in_64", tokens, 64, true_ranks=(16,)) for tokens in (8, 256, 8192)),
    *(_plain("wide", tokens, rank) for rank in (128, 256) for tokens in (8, 256, 1024, 8192)),
    *(_wo_a("few", tokens, 64) for tokens in (4, 16, 32, 128)),
    *(_wo_a("r32", 1024, 32, slots) for slots in (1, 8)),
    *(_plain("odd", tokens, 24, D=1000, N=1001) for tokens in (8, 256, 8192)),
    *(_plain("fp16", tokens, dtype=torch.float16) for tokens in (8, 8192)),
    *(_plain("fp32", tokens, dtype=torch.float32) for tokens in (8, 1024)),
    *(_plain("d7168", tokens, rank, D=7168, N=7168) for rank in (16, 64) for tokens in (8, 64, 8192)),
    *(_plain("slots1024", tokens, slots=1024) for tokens in (64, 8192)),
]

DENSE = TARGETS + EXTRA


def named(*names: str) -> list[Workload]:
    by_name = {w.name: w for w in DENSE}
    return [by_name[name] for name in names]


# shrink and expand alone: enough shapes to see which half of a delta costs what
HALVES = named(
    *(f"wo_a-r{rank}-S{slots}-T{tokens}" for rank in (16, 64) for slots, tokens in ((1, 8192), (2, 8), (8, 64))),
    *(f"plain-r{rank}-S{slots}-T{tokens}" for rank in (16, 64) for slots, tokens in ((1, 8192), (8, 8), (64, 64))),
    "extra-qkv-r16-S8-T256",
    "extra-odd-r24-S8-T256",
)

PLANS = [
    Workload(f"plan-S{slots}-T{tokens}", tokens, D=32, N=32, rank=8, slots=slots)
    for slots, tokens in (
        (8, 1),
        (8, 64),
        (8, 512),
        (8, 8192),
        (64, 1024),
        (64, 8192),
        (1024, 8192),
        (64, 65536),
    )
]

TRAINING = [
    *(_wo_a("train_wo_a", 8192, rank, slots) for rank, slots in ((16, 1), (64, 1), (16, 4))),
    *(_plain("train", 8192, rank, slots) for rank, slots in ((16, 1), (64, 1), (64, 8))),
    _plain("train", 512, 16, 1),
    _plain("train_qkv", 8192, 16, 1, **_QKV),
    _plain("train_gate_up", 4096, 16, 1, **_GATE_UP),
]
