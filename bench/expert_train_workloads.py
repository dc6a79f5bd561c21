"""What is measured of layers of experts in training, forward and backward with the base frozen: the floor under each, the tensors.

`expert_delta` over gate_up (x a row a token) and over down (x and a router weight a row a route), with the gradients of x, A, B, base
and the router weights; `expert_mlp` with those of x, all factors and the router weights. The floor is max(bytes / 4.3 TB/s,
flops / 790 TFLOP/s): forward as in `expert_workloads` and `expert_linear_workloads`; backward dy, x, A and B, and the base
weights, read once more, dx written, dA and dB of every slot and expert written, zeros too. Of a layer the products with the base
weights count twice, since they have no gradient, those of LoRA three times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import grouped_lora_ops as glo

from . import expert_linear_workloads as layers
from . import expert_workloads as deltas
from .expert_linear_workloads import LayerWorkload
from .expert_workloads import ExpertWorkload
from .workloads import FLOPS_PER_US, HBM_BYTES_PER_US

TIMES_TORCH = 0.5  # the bar: half the time of autograd over PyTorch's own way
FACTORS = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")


@dataclass(frozen=True)
class TrainedDelta(ExpertWorkload):
    """`expert_delta` of one projection."""

    def facts(self, op: str) -> dict:
        return super().facts(op) | {"floor_us": floor_us(self)}


@dataclass(frozen=True)
class TrainedLayer(LayerWorkload):
    """`expert_mlp`, router weights after down."""

    def facts(self, op: str) -> dict:
        return super().facts("expert_mlp") | {"floor_us": floor_us(self)}


Trained = TrainedDelta | TrainedLayer


def leaves(w: Trained) -> tuple[str, ...]:
    """What has gradients, in the order in which a step returns them."""
    if w.projection == "mlp":
        return ("x", "topk_weights", *FACTORS)
    return ("x", "lora_a", "lora_b", "base", *(("row_weights",) if w.projection == "down" else ()))


def cost(w: Trained) -> tuple[int, int]:
    """(bytes, flops) that a step cannot do without."""
    size, pairs = w.dtype.itemsize, deltas.active_pairs(w)[0]
    parts = w.parts if w.projection == "mlp" else [w]
    rows_in, rows_out = w.M if w.projection == "down" else w.T, w.T if w.projection == "mlp" else w.M
    width_in, width_out = parts[0].D, parts[-1].N
    nbytes = size * (3 * rows_in * width_in + (2 if w.projection == "mlp" else 3) * rows_out * width_out)
    flops = 0
    for part in parts:
        factors = w.rank * (part.groups * part.D + part.N)
        nbytes += size * factors * (2 * pairs + w.slots * w.experts)
        flops += 3 * 2 * w.M * factors
        if w.projection == "mlp":
            nbytes += 2 * size * layers.experts_that_occur(w) * part.N * part.D
            flops += 2 * 2 * w.M * part.N * part.D
    return nbytes, flops


def floor_us(w: Trained) -> float:
    nbytes, flops = cost(w)
    return max(nbytes / HBM_BYTES_PER_US, flops / FLOPS_PER_US[w.dtype])


# --- tensors ---


def bytes_per_set(w: Trained) -> int:
    """With a copy of the factors, which PyTorch's way wants in another order, and their gradients."""
    shapes = layers.shapes(w) if w.projection == "mlp" else deltas.shapes(w)
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    return w.dtype.itemsize * (sum(sizes.values()) + 2 * sum(n for name, n in sizes.items() if "lora" in name))


def with_router_weights(w: Trained, t: dict, weights: Tensor) -> dict[str, Tensor]:
    """weights [T, K] as the op takes them."""
    if w.projection == "mlp":
        return {**t, "topk_weights": weights}
    return {**t, "row_weights": weights.reshape(-1)} if w.projection == "down" else t


def random_set(w: Trained, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    made = layers.random_set(w, device, seed) if w.projection == "mlp" else deltas.random_set(w, device, seed)
    generator = torch.Generator(device).manual_seed(1000 + seed)
    return with_router_weights(w, made, torch.rand(w.T, w.top_k, device=device, generator=generator))


def grad_of(w: Trained, device: torch.device, integers: bool = False) -> Tensor:
    """dy: [T, H] of a layer, [M, N] of a projection."""
    shape = (w.T, w.hidden) if w.projection == "mlp" else (w.M, w.N)
    generator = torch.Generator(device).manual_seed(3)
    if integers:  # the gradient of a projection's h needs more than 8 bits with sums over 768, too
        most = 1 if w.projection == "mlp" else 3
        return torch.randint(-most, most + 1, shape, device=device, dtype=torch.int8, generator=generator).to(w.dtype)
    return torch.randn(shape, device=device, dtype=w.dtype, generator=generator)


def integer_set(w: Trained, device: torch.device) -> dict[str, Tensor]:
    """Small integers, router weights of ¼, ½ and 1: every product and float32 sum of forward and backward is exact.

    h and its gradient need more than the 8 bits that bf16 has, so that rounding them shows, but not more than 16, which is what a
    kernel that multiplies bf16 operands must keep of them.
    """
    weights = torch.exp2(-(torch.arange(w.M, device=device) % 3).float()).view(w.T, w.top_k)
    if w.projection == "mlp":
        made = _layers_integers(w, device)
    else:
        made = deltas.integer_set(w, device)
        generator = torch.Generator(device).manual_seed(2)  # wider, so that h is beyond 256 where D is 768, too
        made["x"] = torch.randint(-3, 4, made["x"].shape, device=device, dtype=torch.int8, generator=generator).to(
            w.dtype
        )
    return with_router_weights(w, made, weights)


def _layers_integers(w: TrainedLayer, device: torch.device) -> dict[str, Tensor]:
    """Of a layer: sums over the hidden and over the inner axis have some 4 (weights) or 8 terms (factors), whichever way the
    product goes, as a gradient is a product of what came before. That leaves h and its gradient few bits, so some ranks have
    entries far larger than others: a quarter of them in A, with a B of zeros, so that nothing but the gradient of B reads such an
    h; another in B, with an A of zeros."""
    hidden, inner = w.shape[0], w.shape[1]
    one_in = {"x": 1, "gate_up_weight": hidden // 4, "gate_up_lora_a": hidden // 8, "gate_up_lora_b": inner // 8,
              "down_weight": hidden // 4, "down_lora_a": inner // 8, "down_lora_b": hidden // 8}  # fmt: skip
    made, quarter = layers.integer_set(w, device, one_in=one_in), w.rank // 4
    a_rank, b_rank = slice(quarter), slice(quarter, 2 * quarter)
    for name in (
        "gate_up_weight",
        "gate_up_lora_b",
    ):  # half a step of gate, by a scaling of ½, must leave silu exact, too
        made[name][:, :, :inner].mul_(2) if "lora" in name else made[name][:, :inner].mul_(2)
    for prefix, larger in (("gate_up_", 32), ("down_", 64)):
        a, b = made[f"{prefix}lora_a"], made[f"{prefix}lora_b"]
        a[..., a_rank, ::2].mul_(64)
        b[..., a_rank].zero_()
        b[..., 1::2, b_rank].mul_(larger)
        a[..., b_rank, :].zero_()
    return made


def exact_answer(w: Trained, t: dict, shared: dict, grad: Tensor) -> tuple[Tensor, ...]:
    """y and the gradients of `leaves`, by the reference, formula by formula: of a projection in float64, rounded once; of a
    layer, whose stages round, in float32, which is exact on an `integer_set`."""
    ids, given = shared["expert_ids"], (shared["adapter_ids"], shared["scalings"])
    if w.projection == "mlp":
        args = (t["x"], ids, t["topk_weights"], t["gate_up_weight"], t["down_weight"], *(t[n] for n in FACTORS), *given)
        options = (
            None,
            None,
            "swiglu",
            None,
            "post_down",
            None,
            None,
        )  # biases, activation, its limit, placement, ranks, plan
        y, h1 = glo.reference.expert_mlp_train(*args, router_weight="post_down")
        needs = [True, True, False, False, True, True, True, True, False, False]
        grads = glo.reference.expert_mlp_backward(grad, h1, *args, *options, needs)
        return y, *(g for g, need in zip(grads, needs) if need)
    weights = t.get("row_weights")
    x, a, b, base = (t[name].double() for name in ("x", "lora_a", "lora_b", "base"))
    y = glo.reference.expert_delta(x, a, b, ids, *given, base=base, row_weights=weights)
    needs = [True, True, True, weights is not None]
    dx, da, db, dw = glo.reference.expert_delta_backward(
        grad.double(), x, a, b, ids, *given, weights, None, None, needs
    )
    wide = (y, dx, da, db, grad.double())
    return (*(part.to(w.dtype) for part in wide), *(() if dw is None else (dw,)))


# --- the workloads ---

MODELS, RANKS, SLOTS, TOKENS = ("qwen3-30b", "dsv3"), (16, 32), (1, 4), 4096
TRAINING: list[Trained] = [
    kind(f"train-{model}-{projection}-r{rank}-S{slots}-T{TOKENS}", model, projection, TOKENS, rank, slots)
    for model in MODELS
    for projection, kind in (("gate_up", TrainedDelta), ("down", TrainedDelta), ("mlp", TrainedLayer))
    for rank in RANKS
    for slots in SLOTS
]
