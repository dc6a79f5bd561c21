"""What is measured of the expert ops: shapes, the published figures to beat, the floor under each, and the tensors.

The floor of a projection's delta is max(bytes / 4.3 TB/s, flops / 790 TFLOP/s) as in `workloads`: x of every token
(gate_up) or route (down) once, A and B of every (expert, slot) pair that occurs once, the output read once and written
once (`base` in, a new tensor out). The bar includes one plan a layer: gate_up's row carries it, so does down's, as a
call without a plan makes its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .workloads import FLOPS_PER_US, HBM_BYTES_PER_US

IDS_SEED = 8
MODELS = {  # hidden, intermediate, experts, top-k
    "qwen3-30b": (2048, 768, 128, 8),
    "dsv3": (7168, 2048, 256, 8),
    "glm46": (5120, 1536, 160, 8),
    "kimi-k2": (7168, 2048, 384, 8),
}


@dataclass(frozen=True)
class ExpertWorkload:
    """One batch through one projection of a layer of experts: gate_up (an A each for gate and up) or down."""

    name: str
    model: str
    projection: str
    T: int
    rank: int
    slots: int
    mix: str = "uniform"  # or "two" (every token on the same two experts), "zipf" (experts by 1 / rank ** exponent)
    exponent: float = 1.0  # of "zipf"
    shared: str = ""  # "a", "b": factors that all experts share
    dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, int, int, int] | None = None  # in place of the model's
    peers: Mapping[str, float] = field(default_factory=dict, compare=False)  # published µs, see grouped_lora_ops.report.tables.PEERS
    published_floor: float | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.sizes or MODELS[self.model]

    @property
    def experts(self) -> int:
        return self.shape[2]

    @property
    def top_k(self) -> int:
        return 2 if self.mix == "two" else self.shape[3]

    @property
    def M(self) -> int:
        return self.T * self.top_k

    @property
    def groups(self) -> int:
        return 2 if self.projection == "gate_up" else 1

    @property
    def D(self) -> int:
        return self.shape[0] if self.projection == "gate_up" else self.shape[1]

    @property
    def N(self) -> int:
        """Output columns of a route."""
        return 2 * self.shape[1] if self.projection == "gate_up" else self.shape[0]

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=self.peers.__getitem__) if self.peers else None

    def facts(self, op: str) -> dict:
        """What a row of the results says about the workload."""
        delta = op == "expert_delta"
        return {
            "T": self.T,
            "K": self.top_k,
            "E": self.experts,
            "D": self.D,
            "N": self.N,
            "rank": self.rank,
            "slots": self.slots,
            "active": active_pairs(self)[0],
            "layout": self.projection,
            "dtype": str(self.dtype).removeprefix("torch."),
            "floor_us": floor_us(self),
            "bar_us": bar_us(self) if delta else None,
            "best_peer": self.best_peer if delta else None,
            "best_peer_us": self.peers[self.best_peer] if delta and self.peers else None,
        }

    def tiny(self) -> ExpertWorkload:
        """The same structure at sizes a CPU runs in milliseconds."""
        small = {"T": min(self.T, 9), "rank": 8, "slots": min(self.slots, 2), "sizes": (64, 32, 4, 2)}
        return replace(self, model="tiny", peers={}, published_floor=None, **small)


@functools.cache
def routing(w: ExpertWorkload) -> tuple[Tensor, Tensor]:
    """([T, K] expert ids, all of a token's different, [T] adapter ids): int32 on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(IDS_SEED)
    if w.mix == "two":
        ids = torch.arange(2).expand(w.T, 2)
    else:
        score = torch.rand(w.T, w.experts, generator=generator)
        if w.mix == "zipf":  # Gumbel's trick: the top k of log p − log(−log u) are drawn by p
            score = -torch.log(-torch.log(score)) - w.exponent * torch.log(torch.arange(1, w.experts + 1))
        ids = score.topk(w.top_k, 1).indices
    adapters = torch.randint(0, w.slots, (w.T,), generator=generator)
    return ids.to(torch.int32).contiguous(), adapters.to(torch.int32)


@functools.cache
def active_pairs(w: ExpertWorkload) -> tuple[int, int]:
    """((expert, slot) pairs that occur, slots that occur)."""
    ids, adapters = routing(w)
    pairs = ids.long() * w.slots + adapters.long()[:, None]
    return int(pairs.unique().numel()), int(adapters.unique().numel())


def cost(w: ExpertWorkload) -> tuple[int, int]:
    """(bytes, flops) that the delta cannot do without."""
    pairs, slots = active_pairs(w)
    size = w.dtype.itemsize
    x = (w.T if w.projection == "gate_up" else w.M) * w.D
    a = (slots if "a" in w.shared else pairs) * w.groups * w.rank * w.D
    b = (slots if "b" in w.shared else pairs) * w.N * w.rank
    rows = w.T if "a" in w.shared and w.projection == "gate_up" else w.M
    flops = 2 * w.rank * (rows * w.groups * w.D + w.M * w.N)
    return size * (x + a + b + 2 * w.M * w.N), flops


def twins(w: ExpertWorkload) -> list[tuple[ExpertWorkload, float]]:
    """Uniform batches that together move as many bytes as the skewed w: [(batch, its share)].

    The same experts, k, rank and slots, but every token's experts drawn uniformly from all: more A and B for fewer tokens. One
    token more or less is one step of bytes, so of two neighbouring token counts, whose bytes enclose w's, each has the
    share that makes the mean of their bytes w's, and the time of equal bytes is the same mean of their times.
    """
    most = replace(w, mix="uniform", sizes=(*w.shape[:3], w.top_k), name=f"{w.name}-twin")
    target = cost(w)[0]
    if cost(most)[0] <= target:
        return [(most, 1.0)]  # with the same tokens uniform routing moves no fewer bytes: then they are the same
    low, high = 0, w.T
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(replace(most, T=middle))[0] <= target else (low, middle)
    few, many = replace(most, T=max(low, 1)), replace(most, T=high)
    if few.T == many.T:
        return [(many, 1.0)]
    share = (target - cost(few)[0]) / (cost(many)[0] - cost(few)[0])
    return [(few, 1.0 - share), (many, share)] if share else [(few, 1.0)]


def floor_us(w: ExpertWorkload) -> float:
    nbytes, flops = cost(w)
    return max(nbytes / HBM_BYTES_PER_US, flops / FLOPS_PER_US[w.dtype])


def bar_us(w: ExpertWorkload) -> float:
    return 1.2 * floor_us(w) + 5.0


def shapes(w: ExpertWorkload) -> dict[str, tuple[int, ...]]:
    ea, eb = (1 if which in w.shared else w.experts for which in "ab")
    return {
        "x": (w.T if w.projection == "gate_up" else w.M, w.D),
        "lora_a": (w.slots, ea, *((2,) if w.groups == 2 else ()), w.rank, w.D),
        "lora_b": (w.slots, eb, w.N, w.rank),
        "base": (w.M, w.N),
    }


def bytes_per_set(w: ExpertWorkload) -> int:
    return w.dtype.itemsize * sum(torch.Size(s).numel() for s in shapes(w).values())


def shared_inputs(w: ExpertWorkload, device: torch.device) -> dict:
    """What all input sets of a batch have in common. Scalings are powers of two, exact wherever a peer folds them in."""
    ids, adapters = routing(w)
    return {
        "expert_ids": ids.to(device),
        "adapter_ids": adapters.to(device) if w.slots > 1 else None,
        "scalings": torch.tensor([(0.5, 1.0, 2.0)[slot % 3] for slot in range(w.slots)], device=device),
    }


def random_set(w: ExpertWorkload, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """x, A, B and base, scaled so that h and the delta are of order one."""
    generator = torch.Generator(device).manual_seed(seed)
    scale = {"x": 1.0, "lora_a": w.D**-0.5, "lora_b": w.rank**-0.5, "base": 1.0}
    return {
        name: torch.randn(shape, device=device, dtype=w.dtype, generator=generator).mul_(scale[name])
        for name, shape in shapes(w).items()
    }


def integer_set(w: ExpertWorkload, device: torch.device, seed: int = 1) -> dict[str, Tensor]:
    """The same tensors holding small integers: every product and float32 sum is exact, so there is one right answer."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randint(-2, 3, shape, device=device, dtype=torch.int8, generator=generator).to(w.dtype)
        for name, shape in shapes(w).items()
    }


def float64_delta(w: ExpertWorkload, x: Tensor, a: Tensor, b: Tensor, base: Tensor, shared: dict) -> Tensor:
    """base + delta of float64 tensors, an expert and slot at a time; differentiable. Looks at ids on the host."""
    ids = shared["expert_ids"].flatten().long()
    slots = torch.zeros_like(ids) if shared["adapter_ids"] is None else shared["adapter_ids"].long().repeat_interleave(w.top_k)
    pairs = ids * w.slots + slots
    order = torch.argsort(pairs, stable=True)
    values, counts = pairs[order].unique_consecutive(return_counts=True)
    parts = []
    for pair, rows in zip(values.tolist(), order.split(counts.tolist())):
        expert, slot = divmod(pair, w.slots)
        mine = x[rows if w.projection == "down" else rows // w.top_k]
        own_a, own_b = (t[slot, min(expert, t.shape[1] - 1)] for t in (a, b))
        if w.groups == 2:
            delta = torch.cat([mine @ own_a[half].t() @ part.t() for half, part in enumerate(own_b.chunk(2))], 1)
        else:
            delta = mine @ own_a.t() @ own_b.t()
        parts.append(float(shared["scalings"][slot]) * delta)
    return base.index_add(0, order, torch.cat(parts))


def exact_delta(w: ExpertWorkload, t: dict, shared: dict) -> Tensor:
    """The one right answer to an `integer_set`."""
    wide = (t[name].double() for name in ("x", "lora_a", "lora_b", "base"))
    return float64_delta(w, *wide, shared).float().to(w.dtype)


# --- the rows with published figures: the floor, vLLM's fused_moe_lora, sglang's best, its routing, grouped_mm sorted and whole ---

_TABLE = """
qwen3-30b gate_up 1    32 1  0.7   28.0   14.3   3.4    36.2   71.3
qwen3-30b down    1    32 1  0.4   12.9   7.8    3.4    26.5   53.4
qwen3-30b gate_up 8    32 1  4.2   32.7   17.0   3.2    54.6   80.6
qwen3-30b down    8    32 1  2.2   20.5   10.4   3.2    50.4   76.3
qwen3-30b gate_up 64   32 1  11.1  36.7   21.1   5.7    93.5   144.7
qwen3-30b down    64   32 1  6.3   35.7   17.9   5.7    95.0   141.6
qwen3-30b gate_up 256  32 1  13.9  44.2   24.0   6.8    92.7   171.9
qwen3-30b down    256  32 1  10.0  44.8   30.0   6.8    102.1  182.1
qwen3-30b gate_up 4096 32 1  61.5  168.6  104.0  12.4   145.3  789.0
qwen3-30b down    4096 32 1  79.5  177.7  92.1   12.4   287.5  942.2
qwen3-30b gate_up 1    32 4  0.7   26.9   14.3   3.4    43.6   82.0
qwen3-30b down    1    32 4  0.4   13.7   7.7    3.4    31.7   61.8
qwen3-30b gate_up 8    32 4  5.2   43.9   17.3   3.4    64.6   93.6
qwen3-30b down    8    32 4  2.7   27.5   11.1   3.4    60.9   89.2
qwen3-30b gate_up 64   32 4  28.5  65.0   37.9   5.0    203.9  260.3
qwen3-30b down    64   32 4  15.0  41.2   27.2   5.0    214.3  268.2
qwen3-30b gate_up 256  32 4  45.4  119.5  53.8   7.2    302.5  380.7
qwen3-30b down    256  32 4  25.8  86.7   44.6   7.2    323.2  405.8
qwen3-30b gate_up 4096 32 4  93.6  219.0  123.7  14.5   311.9  956.2
qwen3-30b down    4096 32 4  95.6  168.0  105.5  14.5   485.8  1144.4
dsv3      gate_up 1    32 1  2.2   99.9   23.3   3.5    56.6   92.5
dsv3      down    1    32 1  1.2   35.1   13.0   3.5    42.2   69.4
dsv3      gate_up 8    32 1  15.1  92.2   29.3   3.5    116.7  145.1
dsv3      down    8    32 1  7.9   50.0   36.8   3.5    131.8  158.1
dsv3      gate_up 64   32 1  63.9  227.7  94.8   5.4    381.7  454.0
dsv3      down    64   32 1  34.8  137.2  62.7   5.4    436.0  514.1
dsv3      gate_up 256  32 1  78.9  206.5  111.4  7.0    407.2  551.7
dsv3      down    256  32 1  50.7  146.4  76.4   7.0    516.7  699.9
dsv3      gate_up 4096 32 1  208.7 503.1  449.5  16.0   595.7  2242.6
dsv3      down    4096 32 1  284.8 583.9  301.5  16.0   1239.4 3210.7
"""


def _targets() -> list[ExpertWorkload]:
    rows = []
    for line in _TABLE.strip().splitlines():
        model, projection, tokens, rank, slots, floor, vllm, sglang, route, _, full = line.split()
        peers = {"vllm": float(vllm), "sglang + route": float(sglang) + float(route), "gmm full": float(full)}
        name = f"{model}-{projection}-r{rank}-S{slots}-T{tokens}"
        sizes = int(tokens), int(rank), int(slots)
        rows.append(ExpertWorkload(name, model, projection, *sizes, peers=peers, published_floor=float(floor)))
    return rows


def _extra(model: str, tokens: int, rank: int = 32, slots: int = 1, **changed) -> list[ExpertWorkload]:
    words = [changed["mix"]] if "mix" in changed else [f"shared_{changed['shared']}"] if "shared" in changed else []
    return [
        ExpertWorkload(
            "-".join(["extra", model, projection, *words, f"r{rank}-S{slots}-T{tokens}"]),
            model, projection, tokens, rank, slots, **changed,
        )  # fmt: skip
        for projection in ("gate_up", "down")
    ]


TARGETS = _targets()
EXTRA = [
    *(w for tokens in (8, 256, 4096) for w in _extra("qwen3-30b", tokens, mix="zipf")),
    *(w for tokens in (64, 4096) for w in _extra("qwen3-30b", tokens, mix="two")),
    *(w for tokens in (8, 4096) for w in _extra("glm46", tokens, 16)),
    *(w for tokens in (8, 256) for w in _extra("kimi-k2", tokens, 16, 4)),
    *(w for tokens in (8, 256, 4096) for w in _extra("qwen3-30b", tokens, shared="a")),
    *(w for tokens in (8, 256, 4096) for w in _extra("qwen3-30b", tokens, shared="b")),
    *(w for tokens in (16, 32, 4096) for w in _extra("qwen3-30b", tokens, 64)),
    *_extra("qwen3-30b", 65536 // 8, 16, 64),
]
EXPERTS = TARGETS + EXTRA
SKEWED = [  # beside uniform twins: see `twins`
    ExpertWorkload(f"skew-{model}-{projection}-{mix}-r32-S1-T{tokens}", model, projection, tokens, 32, 1, mix=mix, exponent=1.1)
    for model in ("qwen3-30b", "dsv3")
    for projection in ("gate_up", "down")
    for mix in ("two", "zipf")
    for tokens in (64, 256, 4096)
]
SKEW_BAR = 1.3  # times the uniform twin


def named(*names: str) -> list[ExpertWorkload]:
    by_name = {w.name: w for w in EXPERTS}
    return [by_name[name] for name in names]
