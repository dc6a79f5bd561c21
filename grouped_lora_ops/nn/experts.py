"""The routed experts of a transformers model with LoRA, through transformers' own registry of experts implementations."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ..layouts import ExpertStorage
from ..ops import expert_delta, expert_mlp, expert_plan
from ..reference.expert_activation import ACTIVATIONS, activate
from .factors import BankFactors, LoraFactors
from .linear import without_autocast
from .routing import PLAN_ROWS, Routing

NAME = "grouped_lora"  # in transformers' registry
_WHERE = "grouped_lora_ops.nn"
ORDERED = ("grouped_mm", "batched_mm")  # transformers' implementations whose order of routes is known


def registry():
    """transformers' experts functions by name. ImportError, with what to do, where this version has none."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"{_WHERE}: experts are attached through transformers' registry of experts implementations (transformers ≥ 5.0), "
            "which is not installed; name selectors without experts."
        ) from error
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    return ALL_EXPERTS_FUNCTIONS


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for every experts module whose config names NAME."""
    lora = self.__dict__.get("_grouped_lora")
    if lora is None:
        raise RuntimeError(
            f"{_WHERE}: {NAME} is the experts implementation, but nothing is attached to this module; models that share a config "
            "object share its implementation: give each its own."
        )
    return lora(self, hidden_states, top_k_index, top_k_weights)


class ExpertsLora:
    """What is attached to one experts module: its factors, and how they join its computation.

    mode "parent": transformers' function that the model was configured with, `grouped_mm` or `batched_mm`, computes all
    that it computed, for any activation, bias or storage, and the deltas join behind its two products (behind their
    bias). A zero delta changes no bit of it.
    mode "fused": `expert_mlp`, one op with its own rounding points (sums in float32, routes summed in slot order), on the
    parameters where they lie. A zero delta changes no bit of the same op without LoRA, the model's own function differs
    by rounding. gate_up and down need the same scaling in every slot.
    mode "none": the parent's function; nothing of this module is adapted.
    """

    def __init__(
        self,
        module: nn.Module,
        parent: str | None,
        mode: str,
        storage: ExpertStorage | None = None,
        up: BankFactors | LoraFactors | None = None,
        down: BankFactors | LoraFactors | None = None,
        routing: Routing | None = None,
    ):
        self.parent, self.mode, self.up, self.down, self.routing = parent, mode, up, down, routing
        self.storage = storage
        if mode == "parent":
            if not _order_is_known(parent):
                raise RuntimeError(f'{_WHERE}: {parent} of this transformers orders routes in another way; use experts="fused".')
        elif mode == "fused":
            self.activation, self.limit = _activation(module, storage)

    def __call__(self, module: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        run = self._fused if self.mode == "fused" else self._parent
        return run(module, x, topk_ids, topk_weights)

    def _trained(self) -> bool:
        return isinstance(self.up, LoraFactors) or isinstance(self.down, LoraFactors)

    # ---- the parent's function, with the deltas in it ------------------------------------------------------------------

    def _parent(self, module, x, topk_ids, topk_weights):
        functions = registry()
        forward = functions.get(self.parent, None) or type(module).forward.__wrapped__  # eager: the class's own
        tokens, top_k = topk_ids.shape
        if self.mode == "none" or self.routing.idle(tokens, x.device, self._trained()):
            return forward(module, x, topk_ids, topk_weights)
        ids, _ = self.routing.rows(tokens, x.device)
        flat = topk_ids.reshape(-1)
        if self.parent == "grouped_mm":
            order = torch.sort(flat)[1]
            routes, rows = flat[order][:, None], order // top_k
            ids, inputs = ids[rows], x[rows]
        else:
            routes, ids = flat[:, None], ids.repeat_interleave(top_k)
            inputs = x.repeat_interleave(top_k, 0)
        plan = None
        if len(flat) > PLAN_ROWS:
            plan = expert_plan(routes, ids, module.num_experts, self.routing.num_slots)

        def add(y, inputs, factors, interleaved=False):
            if factors is None:
                return y
            a, b, scalings, ranks = factors.stacks(inputs)
            halves = y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else y
            with without_autocast(y.device):  # grouped_mm knows no autocast: its next operand must keep its dtype
                inputs = inputs.to(y.dtype)
                y = expert_delta(inputs, a, b, routes, ids, scalings, base=halves.contiguous(), ranks=ranks, plan=plan)
            return y.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if interleaved else y

        seen = []

        def first(y):
            return add(y, inputs, self.up, module.has_gate and not module.is_concatenated)

        def gate(y):
            seen.append(module._apply_gate(first(y)))
            return seen[-1]

        def activation(y):
            seen.append(module.act_fn(first(y)))
            return seen[-1]

        def norm(y):
            y = add(y, seen[-1], self.down)
            return module.post_expert_norm(y) if module.has_post_expert_norm else y

        return forward(_Through(module, gate, activation, norm), x, topk_ids, topk_weights)

    # ---- one op --------------------------------------------------------------------------------------------------------

    def _fused(self, module, x, topk_ids, topk_weights):
        if topk_weights.dtype not in (x.dtype, torch.float32):
            topk_weights = topk_weights.float()
        ids = scalings = None
        factors: list[Tensor | None] = [None] * 4
        if not self.routing.idle(len(x), x.device, self._trained()):
            ids, _ = self.routing.rows(len(x), x.device)
            for i, source in enumerate((self.up, self.down)):
                if source is not None:
                    factors[2 * i], factors[2 * i + 1], scalings, _ = source.stacks(x)  # tails past ranks are zero
        up, down, up_bias, down_bias = _weights(module)
        return expert_mlp(
            x,
            topk_ids,
            topk_weights,
            up,
            down,
            *factors,
            ids,
            scalings,
            b_gate_up=up_bias,
            b_down=down_bias,
            activation=self.activation,
            activation_limit=self.limit,
            router_weight=self.storage.router_weight,
        ).to(x.dtype)


class _Through:
    """An experts module as transformers' function sees it, with other activations and a norm behind down."""

    has_post_expert_norm = True

    def __init__(self, module, gate, activation, norm):
        self._module, self._apply_gate, self.act_fn, self.post_expert_norm = module, gate, activation, norm

    def __getattr__(self, name):
        return getattr(self._module, name)


def _weights(module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The parameters as views in the forms that `expert_mlp` takes: [E, 2I, H] or [E, 2, I, H], [E, H, I], biases."""
    up = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias, down_bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias), module.down_proj_bias
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if module.has_gate and not module.is_concatenated:
        up = up.unflatten(1, (-1, 2)).transpose(1, 2)
        up_bias = None if up_bias is None else up_bias.unflatten(1, (-1, 2)).transpose(1, 2)
    return up, down, up_bias, down_bias


def _activation(module: nn.Module, storage: ExpertStorage) -> tuple[str, float | None]:
    """The op's activation that is the module's own, found by trying them on numbers that reach every clamp."""
    if module.has_post_expert_norm:
        raise ValueError(f'{_WHERE}: a norm behind the experts is no part of expert_mlp; use experts="parent".')
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 16, generator=generator) * torch.tensor([0.5, 20.0]).repeat_interleave(32)[:, None]
    with torch.no_grad():
        stored = h.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if module.has_gate and not module.is_concatenated else h
        want = module._apply_gate(stored) if module.has_gate else module.act_fn(h)
    limits = {None, *(float(v) for v in (getattr(module, "limit", None),) if isinstance(v, (int, float)) and v > 0)}
    for name in sorted(ACTIVATIONS, key=lambda n: n != storage.activation):
        for limit in limits if name in ("swiglu", "swigluoai") else (None,):
            got = activate(h, name, limit)
            if got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-4):
                return name, limit
    raise ValueError(f'{_WHERE}: expert_mlp has no activation like that of {type(module).__name__}; use experts="parent".')


@functools.lru_cache
def _order_is_known(parent: str) -> bool:
    """Run transformers' function on three experts and see that products come in the order assumed, through both hooks."""
    functions = registry()
    if parent not in ORDERED or parent not in functions:
        return False
    experts, hidden, inner = 3, 8, 8
    g = torch.Generator().manual_seed(0)
    x, up = torch.randn(5, hidden, generator=g), torch.randn(experts, 2 * inner, hidden, generator=g)
    ids = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
    down, seen = torch.randn(experts, hidden, inner, generator=g), {}

    def gate(y):
        seen["gate"] = y
        return y[:, :inner]

    def norm(y):
        seen["norm"] = y
        return y

    flags = dict(has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True, _is_expert_parallel=False)
    module = SimpleNamespace(num_experts=experts, gate_up_proj=up, down_proj=down, has_post_expert_norm=True, **flags)
    module._apply_gate, module.post_expert_norm = gate, norm
    with torch.no_grad():
        functions[parent](module, x, ids, torch.ones(5, 2))
    flat = ids.reshape(-1)
    order = torch.sort(flat)[1] if parent == "grouped_mm" else torch.arange(10)
    want = torch.einsum("mnd,md->mn", up[flat[order]], x[order // 2])
    done = torch.einsum("mnd,md->mn", down[flat[order]], want[:, :inner])
    pairs = ((seen.get("gate"), want), (seen.get("norm"), done))
    return all(got is not None and torch.allclose(got, w, rtol=1e-3, atol=1e-3) for got, w in pairs)
