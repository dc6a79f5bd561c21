"""What is measured of `expert_linear` and `expert_mlp`: layers of experts with their base weights, the floor under each, the tensors.

The floor is max(bytes / 4.3 TB/s, flops / 790 TFLOP/s) as in `workloads`: x, the weights of the experts that occur and A and
B of the (expert, slot) pairs that occur read once, y written once. The bar is PyTorch's base alone, measured beside it.

Weights are large (dsv3: 22.5 GB a layer), so a set's tensors are made expert by expert and there are as many sets as half the
free memory holds, at most as many as together read more than the L2 holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import expert_workloads, measure
from .expert_workloads import ExpertWorkload, active_pairs, routing
from .workloads import FLOPS_PER_US, HBM_BYTES_PER_US

TOKENS = (1, 8, 64, 256, 4096)
GATE = 128.0  # what gate's integers are multiplied by: sigmoid(128 n) is 0, ½ or 1 in float32, so silu of them is exact


@dataclass(frozen=True)
class LayerWorkload(ExpertWorkload):
    """An `ExpertWorkload` with base weights: the projection that it names for expert_linear, both for expert_mlp ("mlp")."""

    def part(self, projection: str) -> LayerWorkload:
        return replace(self, projection=projection)

    @property
    def parts(self) -> list[LayerWorkload]:
        return [self.part("gate_up"), self.part("down")] if self.projection == "mlp" else [self]

    def tiny(self) -> LayerWorkload:
        return replace(super().tiny(), T=1 if self.T == 1 else 9)

    @property
    def hidden(self) -> int:
        return self.shape[0]

    def bar(self, op: str) -> float:
        """How many times PyTorch's base alone it may take."""
        if op == "expert_mlp" or self.T <= 64:
            return 1.0
        return 1.04 if self.rank <= 16 else 1.1

    def facts(self, op: str) -> dict:
        """What a row of the results says about the workload."""
        return {
            "T": self.T,
            "K": self.top_k,
            "E": self.experts,
            "D": self.hidden if op == "expert_mlp" else self.D,
            "N": self.hidden if op == "expert_mlp" else self.N,
            "rank": self.rank,
            "slots": self.slots,
            "active": active_pairs(self)[0],
            "layout": self.projection,
            "dtype": str(self.dtype).removeprefix("torch."),
            "floor_us": None if op == "host" else floor_us(self),
            "bar_us": None,
            "best_peer": None,
            "best_peer_us": None,
        }


def experts_that_occur(w: LayerWorkload) -> int:
    return int(routing(w)[0].unique().numel())


def cost(w: LayerWorkload) -> tuple[int, int]:
    """(bytes, flops) that the layer, or its one projection, cannot do without. Between two projections nothing is counted."""
    pairs, experts, size = active_pairs(w)[0], experts_that_occur(w), w.dtype.itemsize
    rows_in = w.M if w.projection == "down" else w.T
    rows_out = w.T if w.projection == "mlp" else w.M
    nbytes = size * (rows_in * w.parts[0].D + rows_out * w.parts[-1].N)
    flops = 0
    for part in w.parts:
        factors = w.rank * (part.groups * part.D + part.N)
        nbytes += size * (experts * part.N * part.D + pairs * factors)
        flops += 2 * w.M * (part.N * part.D + factors)
    return nbytes, flops


def floor_us(w: LayerWorkload) -> float:
    nbytes, flops = cost(w)
    return max(nbytes / HBM_BYTES_PER_US, flops / FLOPS_PER_US[w.dtype])


def shapes(w: LayerWorkload) -> dict[str, tuple[int, ...]]:
    """x, and of every projection its weight, A and B: `gate_up_weight`, …, or without a prefix where there is one."""
    found = {"x": (w.M if w.projection == "down" else w.T, w.parts[0].D)}
    for part in w.parts:
        prefix = f"{part.projection}_" if w.projection == "mlp" else ""
        own = expert_workloads.shapes(part)
        found[f"{prefix}weight"] = (w.experts, part.N, part.D)
        found |= {f"{prefix}{name}": own[name] for name in ("lora_a", "lora_b")}
    return found


def bytes_per_set(w: LayerWorkload) -> int:
    """With the copy of the factors that `grouped_mm` wants where there are several slots."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes(w).items()}
    again = sum(size for name, size in sizes.items() if "lora" in name) if w.slots > 1 else 0
    return w.dtype.itemsize * (sum(sizes.values()) + again)


def set_count(w: LayerWorkload, free_bytes: int | None, most: int = 16) -> int:
    """Sets that together read more than the L2 holds and fit half the free memory; 0: not even one fits."""
    wanted = measure.sets_for(cost(w)[0], most=most)
    return wanted if free_bytes is None else min(wanted, int(free_bytes / 2) // bytes_per_set(w))


def shared_inputs(w: LayerWorkload, device: torch.device) -> dict:
    """What all input sets have in common. Router weights [T, K] float32; expert_linear's down multiplies by them, too."""
    generator = torch.Generator().manual_seed(expert_workloads.IDS_SEED)
    weights = torch.rand(w.T, w.top_k, generator=generator)
    return {**expert_workloads.shared_inputs(w, device), "topk_weights": weights.to(device)}


def with_exact_weights(shared: dict) -> dict:
    """The same with router weights of ¼, ½ and 1."""
    at = torch.arange(shared["topk_weights"].numel(), device=shared["topk_weights"].device) % 3
    return {**shared, "topk_weights": torch.exp2(-at.float()).view_as(shared["topk_weights"])}


def slices(t: Tensor) -> Iterator[Tensor]:
    """Pieces of t to fill one after the other: of x itself, of a weight each expert's, of a factor each pair's."""
    yield from (t.flatten(0, 1) if t.dim() > 3 else t if t.dim() == 3 else (t,))


def random_set(w: LayerWorkload, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Scaled so that h, the base and the delta are of order one."""
    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for name, shape in shapes(w).items():
        scale = 1.0 if name == "x" else shape[-1] ** -0.5
        made[name] = torch.randn(shape, device=device, dtype=w.dtype, generator=generator).mul_(scale)
    return made


def one_in_of_layer(w: LayerWorkload) -> dict[str, int]:
    """How many entries of a layer's integers one that is not 0 is among, in a forward: see `integer_set`."""
    hidden, inner = w.shape[0], w.shape[1]
    return {"x": 1, "gate_up_weight": hidden // 8, "gate_up_lora_a": hidden // 16, "gate_up_lora_b": w.rank // 8,
            "down_weight": 1, "down_lora_a": inner // 16, "down_lora_b": w.rank // 8}  # fmt: skip


def integer_set(
    w: LayerWorkload, device: torch.device, seed: int = 1, one_in: dict[str, int] | None = None
) -> dict[str, Tensor]:
    """Small integers: every product and float32 sum is exact, so the roundings of the stages leave one right answer.

    One projection: −2 … 2 everywhere. Two: ±1, and 0 but for one in `one_in` entries. x and W_down have no zeros, of the other
    factors' entries as many are ±1 that h1, and a of the exact silu, stay far below 2¹⁶ and all sums below 2²⁴; gate's rows
    are multiplied by GATE.
    """
    generator = torch.Generator(device).manual_seed(seed)
    inner, one_in = w.shape[1], one_in or one_in_of_layer(w)
    made = {}
    for name, shape in shapes(w).items():
        t = made[name] = torch.empty(shape, device=device, dtype=w.dtype)
        for piece in slices(t):
            if w.projection != "mlp":
                drawn = torch.randint(-2, 3, piece.shape, device=device, dtype=torch.int8, generator=generator)
            else:
                among = 2 * max(1, one_in[name])
                v = torch.randint(0, among, piece.shape, device=device, dtype=torch.int16, generator=generator)
                drawn = (v == 1).to(torch.int8) - (v == 0).to(torch.int8)
            piece.copy_(drawn)
    if w.projection == "mlp":
        made["gate_up_weight"][:, :inner].mul_(GATE)
        made["gate_up_lora_b"][:, :, :inner].mul_(GATE)
    return made


def _layers(*projections: str) -> list[LayerWorkload]:
    rows = []
    for model in ("qwen3-30b", "dsv3"):
        for projection in projections:
            family = model if projection == "mlp" else f"{model}-{projection}"
            for rank in (16, 64):
                for slots in (1, 4):
                    for tokens in TOKENS:
                        name = f"{family}-r{rank}-S{slots}-T{tokens}"
                        rows.append(LayerWorkload(name, model, projection, tokens, rank, slots))
    return rows


EXPERT_LINEAR = _layers("gate_up", "down")
EXPERT_MLP = _layers("mlp")
