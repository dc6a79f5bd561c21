"""`expert_mlp` on a GPU, stage by stage, and its gradients. Arguments are checked already."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import driver
from .._checks_experts import Mlp
from ..reference import expert_activation
from . import common
from .expert_common import kept_shape
from .expert_grads import bias_grad, factor_grads, input_rows, per_expert, rows_by_cuda, wanted, weight_grad
from .expert_launch import (
    Routing,
    activated_projection,
    by_cuda,
    projection,
    routing,
    run_dot,
    summed,
    weighted_rows,
)


class Layer(Mlp):
    """The arguments of `expert_mlp`, and its stages."""

    __slots__ = ()

    def prepared(self) -> Layer:
        return self._replace(ranks=common.contiguous(self.ranks), scalings=common.contiguous(self.scalings))

    def routing(self, sort: bool = False) -> Routing:
        factor = self.gate_up_a if self.gate_up_a is not None else self.down_a
        if factor is None:  # a plan is cut by the slots of the layer's adapters, which this call does not know
            return routing(self.topk_ids, None, self.w_down.shape[0], 0, None, sort)
        return routing(self.topk_ids, self.adapter_ids, self.w_down.shape[0], factor.shape[0], self.plan, sort)

    @property
    def weights(self) -> Tensor:  # [M]
        return self.topk_weights.reshape(-1)

    def inputs(self, name: str, to: Routing) -> Tensor:
        """What gate_up reads: x, or under `input` x · weight of every route, rounded."""
        if self.router_weight != "input":
            return self.x
        return weighted_rows(name, self.x, self.weights, to, self.x.dtype)

    def hidden(self, name: str, to: Routing, x: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """h1 with its bias, [M, U]; x: `inputs`, if they are there; keep: as in `operands`."""
        x, bias = self.inputs(name, to) if x is None else x, self.b_gate_up
        factors = (self.gate_up_a, self.gate_up_b)
        return projection(name, x, self.w_gate_up, *factors, to, self.scalings, bias, None, self.ranks, True, None, keep)

    def halves(self, h1: Tensor) -> Tensor:
        """h1 as [M, 2, I]; [M, 1, I] where the activation is not gated."""
        return h1.unflatten(1, (1 if self.activation == "relu2" else 2, self.w_down.shape[2]))

    def activated(self, name: str, h1: Tensor, to: Routing) -> Tensor:
        """a of every route, [M, I]."""
        a = driver.empty((h1.shape[0], self.w_down.shape[2]), h1.dtype, h1.device)
        if a.numel():
            from ..kernels import expert_rows as kernels

            weights = self.weights if self.router_weight == "pre_down" else None
            kernels.activation(
                name, self.halves(h1), a, to.ids, weights, to.experts, self.activation, self.activation_limit
            )
        return a

    def down(
        self, name: str, a: Tensor, to: Routing, out: Tensor | None = None, keep: Tensor | None = None, kept: Tensor | None = None
    ) -> Tensor:
        """h2 with its bias, [M, H]; keep, kept: as in `operands`."""
        weights = self.weights if self.router_weight == "pre_down" and self.b_down is not None else None
        factors = (self.down_a, self.down_b)
        return projection(
            name, a, self.w_down, *factors, to, self.scalings, self.b_down, weights, self.ranks, True, out, keep, kept
        )

    def activated_at_once(self, name: str, x: Tensor, to: Routing) -> Tensor:
        """a from x of `inputs`, without h1 in memory: the bits of `hidden` and `activated`."""
        weights = self.weights if self.router_weight == "pre_down" else None
        return activated_projection(
            name, x, self.w_gate_up, self.gate_up_a, self.gate_up_b, to, self.scalings, self.b_gate_up,
            weights, self.ranks, self.activation, self.activation_limit,
        )  # fmt: skip

    def combined(self, name: str, a: Tensor, to: Routing, room: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """y from a: down, written to room [M, H] if there is one, then the sum over k."""
        weights = self.weights if self.router_weight == "post_down" else None
        return summed(name, self.down(name, a, to, room, keep), self.x, to, weights)

    def rooms(self) -> tuple[Tensor, Tensor]:
        """Where training keeps scaling · A x of gate_up and of down; empty where it keeps none."""
        pairs = (self.gate_up_a, self.gate_up_b), (self.down_a, self.down_b)
        shapes = [kept_shape(self.x, *pair, self.topk_ids, self.w_down.shape[0]) for pair in pairs]
        return tuple([driver.empty(shape, self.x.dtype, self.x.device) for shape in shapes])


def mlp(*args) -> Tensor:
    name, layer = "expert_mlp", Layer(*args).prepared()
    to = layer.routing()
    x = layer.inputs(name, to)
    if by_cuda(name, x, layer.w_gate_up, layer.gate_up_a, layer.gate_up_b, to, layer.b_gate_up):  # which leaves the activation to another
        a = layer.activated(name, layer.hidden(name, to, x), to)
    else:
        a = layer.activated_at_once(name, x, to)
    # weighted inputs, read for the last time, make room for h2 of the same size
    return layer.combined(name, a, to, None if x is layer.x else x)


def mlp_train(*args) -> tuple[Tensor, ...]:
    """(y, h1, scaling · A x of gate_up and of down (`rooms`), the plan made here): what `mlp_backward` takes."""
    name, layer = "expert_mlp", Layer(*args).prepared()
    lora = layer.gate_up_a is not None or layer.down_a is not None
    to, rooms = layer.routing(lora), layer.rooms()
    keep = [room if room.dim() == 4 else None for room in rooms]
    h1 = layer.hidden(name, to, keep=keep[0])
    y = layer.combined(name, layer.activated(name, h1, to), to, keep=keep[1])
    made = to.plan if lora and layer.plan is None else driver.empty((0,), torch.int32, layer.x.device)
    return y, h1, *rooms, made


def mlp_backward(
    grad_y: Tensor, h1: Tensor | None, h_gate_up: Tensor | None, h_down: Tensor | None, made: Tensor | None, *args
) -> tuple[Tensor, ...]:
    """The ten gradients of `reference.expert_mlp_backward`, with its stages and rounding points."""
    name, layer, needs = "expert_mlp_backward", Layer(*args[:-1]).prepared(), args[-1]
    need_x, need_w, need_wgu, need_wd, need_gua, need_gub, need_da, need_db, need_bgu, need_bd = needs
    if made is not None and made.numel():
        layer = layer._replace(plan=made)
    h_gate_up, h_down = (None if h is None or h.dim() != 4 else h for h in (h_gate_up, h_down))
    x, ranks, scalings = layer.x, layer.ranks, layer.scalings
    pre, post, at_input = (layer.router_weight == word for word in ("pre_down", "post_down", "input"))
    differentiable = (x, layer.topk_weights, *layer[3:9], layer.b_gate_up, layer.b_down)
    if 0 in (layer.topk_ids.numel(), layer.w_down.shape[0], x.shape[1]):
        return tuple([wanted(t, need, x) for t, need in zip(differentiable, needs)])
    to = layer.routing(need_gua or need_gub or need_da or need_db)
    by_expert = per_expert(to) if need_wgu or need_wd or need_bgu or need_bd else None
    weights, nothing = layer.weights, common.nothing(x)
    if h1 is None:
        h1 = layer.hidden(name, to)
    a = layer.activated(name, h1, to)
    dw = driver.zeros((to.routes,), torch.float32, x.device) if need_w else None
    d_wd = d_bd = d_wgu = d_bgu = d_gua = d_gub = dx = nothing

    g2 = weighted_rows(name, grad_y, weights, to, x.dtype) if post else grad_y  # [M, H], or [T, H] for all routes of t
    if need_w and post:
        run_dot(name, layer.down(name, a, to, kept=h_down), grad_y, dw, to)
    if need_bd:
        d_bd = bias_grad(name, g2, layer.b_down, by_expert, weights if pre else None)
    if need_w and pre and layer.b_down is not None:
        run_dot(name, g2, layer.b_down, dw, to, True)

    need_h1 = need_x or need_wgu or need_gua or need_gub or need_bgu or (need_w and at_input)
    need_a = need_h1 or (need_w and pre)
    if present(layer.down_a) and a.shape[1] and (need_a or need_da or need_db):
        factors = (layer.down_a, layer.down_b)
        halves = rows_by_cuda(name, g2, layer.w_down, layer.down_a, to, x.dtype)
        found = factor_grads(name, g2, a, *factors, to, scalings, None, ranks, [need_da, need_db, False], h_down, halves)
        v, d_da, d_db = found.v, found.da, found.db
    else:
        v, d_da, d_db = None, wanted(layer.down_a, need_da, x), wanted(layer.down_b, need_db, x)
    if need_wd:
        d_wd = weight_grad(name, g2, a, layer.w_down, by_expert)
    if need_a:
        ga = input_rows(name, g2, layer.w_down, layer.down_a, v, to, ranks, None, x.dtype)
        g1 = driver.empty(h1.shape, x.dtype, x.device)
        if g1.numel():
            from ..kernels import expert_rows as kernels

            kernels.activation_backward(
                name, layer.halves(h1), ga, layer.halves(g1), dw if pre else None, to.ids, weights if pre else None,
                to.experts, layer.activation, layer.activation_limit, expert_activation.PASSES_AT_LIMIT,
            )  # fmt: skip
    if need_h1:
        inputs = layer.inputs(name, to)
        dtype = x.dtype if at_input else torch.float32
        if need_bgu:
            d_bgu = bias_grad(name, g1, layer.b_gate_up, by_expert)
        if present(layer.gate_up_a) and g1.shape[1] and (need_x or need_gua or need_gub or need_w):
            factors = (layer.gate_up_a, layer.gate_up_b)
            halves = rows_by_cuda(name, g1, layer.w_gate_up, layer.gate_up_a, to, dtype)
            found = factor_grads(name, g1, inputs, *factors, to, scalings, None, ranks, [need_gua, need_gub, False], h_gate_up, halves)
            v, d_gua, d_gub = found.v, found.da, found.db
        else:
            v, d_gua, d_gub = None, wanted(layer.gate_up_a, need_gua, x), wanted(layer.gate_up_b, need_gub, x)
        if need_wgu:
            d_wgu = weight_grad(name, g1, inputs, layer.w_gate_up, by_expert)
        if need_x or (need_w and at_input):
            gx = input_rows(name, g1, layer.w_gate_up, layer.gate_up_a, v, to, ranks, None, dtype)
            if at_input and need_w:
                run_dot(name, gx, x, dw, to)
            if need_x:
                dx = summed(name, gx, x, to, weights if at_input else None)
    d_weights = driver.cast(dw, layer.topk_weights.dtype).view(layer.topk_weights.shape) if need_w else nothing
    return dx, d_weights, d_wgu, d_wd, d_gua, d_gub, d_da, d_db, d_bgu, d_bd


def present(factor: Tensor | None) -> bool:
    """Whether a pair is given and has any rank and slot."""
    return factor is not None and factor.shape[0] > 0 and factor.shape[-2] > 0
