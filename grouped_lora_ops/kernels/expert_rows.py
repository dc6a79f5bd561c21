"""What happens to whole routes outside the products: weights, sums over a token's routes, activations, products of rows."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch_experts import cdiv
from .tile import INTERPRETED, launch, round_to, vector_width

SWIGLU = tl.constexpr(0)
SWIGLUOAI = tl.constexpr(1)
GEGLU_TANH = tl.constexpr(2)
RELU2 = tl.constexpr(3)
ACTIVATIONS = {"swiglu": 0, "swigluoai": 1, "geglu_tanh": 2, "relu2": 3}


@triton.jit
def routed(m, ids, M, K, E, i_t, i_k):
    """The expert of route m, E where it is masked."""
    e = tl.load(ids + (m // K).to(tl.int64) * i_t + (m % K) * i_k, mask=m < M, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit
def exp(v):
    return tl.exp(v)


@triton.jit
def sigmoid(v):
    return 1.0 / (1.0 + exp(-v))


@triton.jit
def tanh(v):
    """From e^(−2|v|), which cannot overflow."""
    t = exp(-2.0 * tl.abs(v))
    t = (1.0 - t) / (1.0 + t)
    return tl.where(v < 0, -t, t)


@triton.jit
def gelu(v):
    """(gelu(v), gelu'(v)) by the tanh formula."""
    inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    t = tanh(inner)
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * v * v)
    return 0.5 * v * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * slope


@triton.jit
def activate(gate, up, limit, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """The activation of float32 gate and up (relu2: of gate)."""
    if CLAMP:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACT == SWIGLU:
        return gate * sigmoid(gate) * up
    elif ACT == SWIGLUOAI:
        return gate * sigmoid(gate * 1.702) * (up + 1.0)
    elif ACT == GEGLU_TANH:
        value, _ = gelu(gate)
        return value * up
    else:
        relu = tl.where(gate > 0, gate, tl.where(gate == gate, 0.0, gate))
        return relu * relu


@triton.jit
def activate_backward(grad, gate, up, limit, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """(d gate, d up); zero where a clamp is active, by CLAMP = 2 at the limit itself, too."""
    raw_gate = gate
    raw_up = up
    if CLAMP:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    d_up = grad
    if ACT == SWIGLU:
        s = sigmoid(gate)
        d_gate = grad * up * s * (1.0 + gate * (1.0 - s))
        d_up = grad * gate * s
    elif ACT == SWIGLUOAI:
        s = sigmoid(gate * 1.702)
        inner = grad * (up + 1.0)
        d_gate = inner * s * (1.0 + 1.702 * gate * (1.0 - s))
        d_up = grad * gate * s
    elif ACT == GEGLU_TANH:
        value, slope = gelu(gate)
        d_gate = grad * up * slope
        d_up = grad * value
    else:
        d_gate = tl.where(gate > 0, grad * 2.0 * gate, 0.0)
    if CLAMP == 1:
        d_gate = tl.where(raw_gate <= limit, d_gate, 0.0)
        d_up = tl.where((raw_up <= limit) & (raw_up >= -limit), d_up, 0.0)
    elif CLAMP == 2:
        d_gate = tl.where(raw_gate < limit, d_gate, 0.0)
        d_up = tl.where((raw_up < limit) & (raw_up > -limit), d_up, 0.0)
    return d_gate, d_up


# Strides and sizes of the last axis come in vectors of VEC elements, which UNIT says lie side by side (see `tile.py`).


@triton.jit(do_not_specialize=("M", "K", "E", "U", "i_t", "i_k", "h_m", "h_g", "h_u", "w_m", "o_m"))
def activation_kernel(
    h, out, ids, weights, limit: "fp32", M: "i32", K: "i32", E: "i32", U: "i32", i_t: "i64", i_k: "i64",
    h_m: "i64", h_g: "i64", h_u: "i64", w_m: "i64", o_m: "i64",
    ACT: tl.constexpr, CLAMP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = act(h[m]) (· weight): a program per (block of U, route). Masked routes get zeros."""
    U = U * VEC
    if UNIT:
        h_u = 1
    blocks = tl.cdiv(U, BLOCK)
    m = tl.program_id(0) // blocks
    u = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    wide_m = m.to(tl.int64)
    OUT: tl.constexpr = out.dtype.element_ty
    o_ptrs = out + wide_m * (o_m * VEC) + u
    if routed(m, ids, M, K, E, i_t, i_k) == E:
        tl.store(o_ptrs, tl.zeros((BLOCK,), OUT), mask=u < U)
        return
    h_ptrs = h + wide_m * (h_m * VEC) + u * h_u
    gate = tl.load(h_ptrs, mask=u < U, other=0.0).to(tl.float32)
    up = gate
    if ACT != RELU2:
        up = tl.load(h_ptrs + h_g * VEC, mask=u < U, other=0.0).to(tl.float32)
    a = activate(gate, up, limit, ACT, CLAMP)
    if weights is not None:
        a = a * tl.load(weights + wide_m * w_m).to(tl.float32)
    tl.store(o_ptrs, round_to(a, OUT), mask=u < U)


@triton.jit(do_not_specialize=("M", "K", "E", "U", "i_t", "i_k", "h_m", "h_g", "h_u", "a_m", "g_m", "g_g", "w_m"))
def activation_backward_kernel(
    h, grad, out, dw, ids, weights, limit: "fp32", M: "i32", K: "i32", E: "i32", U: "i32", i_t: "i64", i_k: "i64",
    h_m: "i64", h_g: "i64", h_u: "i64", a_m: "i64", g_m: "i64", g_g: "i64", w_m: "i64",
    ACT: tl.constexpr, CLAMP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = act'(h[m])ᵀ (grad[m] · weight); dw[m] += <act(h[m]), grad[m]>: a program per route. Masked routes get zeros."""
    U = U * VEC
    if UNIT:
        h_u = 1
    m = tl.program_id(0)
    wide_m = m.to(tl.int64)
    OUT: tl.constexpr = out.dtype.element_ty
    live = routed(m, ids, M, K, E, i_t, i_k) < E
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for u0 in range(0, U, BLOCK):
        u = u0 + tl.arange(0, BLOCK)
        mask = (u < U) & live
        h_ptrs = h + wide_m * (h_m * VEC) + u * h_u
        gate = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if ACT != RELU2:
            up = tl.load(h_ptrs + h_g * VEC, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + wide_m * (a_m * VEC) + u, mask=mask, other=0.0).to(tl.float32)
        if dw is not None:
            total += tl.where(mask, activate(gate, up, limit, ACT, CLAMP) * g, 0.0)
        if weights is not None:
            g = g * weight
        d_gate, d_up = activate_backward(g, gate, up, limit, ACT, CLAMP)
        o_ptrs = out + wide_m * (g_m * VEC) + u
        tl.store(o_ptrs, round_to(tl.where(mask, d_gate, 0.0), OUT), mask=u < U)
        if ACT != RELU2:
            tl.store(o_ptrs + g_g * VEC, round_to(tl.where(mask, d_up, 0.0), OUT), mask=u < U)
    if dw is not None:
        tl.store(dw + m, tl.load(dw + m) + tl.sum(total, 0))


@triton.jit(do_not_specialize=("M", "K", "E", "D", "x_div", "i_t", "i_k", "x_t", "x_d", "w_m", "o_m"))
def weighted_kernel(
    x, out, ids, weights, M: "i32", K: "i32", E: "i32", D: "i32", x_div: "i32", i_t: "i64", i_k: "i64",
    x_t: "i64", x_d: "i64", w_m: "i64", o_m: "i64", VEC: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = x[m // x_div] · weight[m], rounded: a program per (block of D, route). Masked routes get zeros."""
    D = D * VEC
    if UNIT:
        x_d = 1
    blocks = tl.cdiv(D, BLOCK)
    m = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = routed(m, ids, M, K, E, i_t, i_k) < E
    wide_m = m.to(tl.int64)
    weight = tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)
    v = tl.load(x + (wide_m // x_div) * (x_t * VEC) + d * x_d, mask=(d < D) & live, other=0.0).to(tl.float32) * weight
    tl.store(out + wide_m * (o_m * VEC) + d, round_to(v, out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=("M", "K", "E", "D", "i_t", "i_k", "r_m", "r_d", "w_m", "o_t"))
def combine_kernel(
    rows, out, ids, weights, M: "i32", K: "i32", E: "i32", D: "i32", i_t: "i64", i_k: "i64",
    r_m: "i64", r_d: "i64", w_m: "i64", o_t: "i64", VEC: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k rows[t·K + k] (· weight) in float32, in the order of k, rounded once. Masked routes are not read."""
    D = D * VEC
    if UNIT:
        r_d = 1
    blocks = tl.cdiv(D, BLOCK)
    t = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        m = t * K + k
        live = routed(m, ids, M, K, E, i_t, i_k) < E
        wide_m = m.to(tl.int64)
        v = tl.load(rows + wide_m * (r_m * VEC) + d * r_d, mask=(d < D) & live, other=0.0).to(tl.float32)
        if weights is not None:
            v = v * tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)
        total += v
    tl.store(out + t.to(tl.int64) * (o_t * VEC) + d, round_to(total, out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=("M", "K", "E", "D", "p_div", "q_div", "i_t", "i_k", "p_m", "p_d", "q_m", "q_e", "q_d"))
def row_dot_kernel(
    p, q, out, ids, M: "i32", K: "i32", E: "i32", D: "i32", p_div: "i32", q_div: "i32", i_t: "i64", i_k: "i64",
    p_m: "i64", p_d: "i64", q_m: "i64", q_e: "i64", q_d: "i64", VEC: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] += <p[m // p_div], q[m // q_div] or q[expert of m]> in float32: a program per route. Masked routes are not read."""
    D = D * VEC
    if UNIT:
        p_d = 1
        q_d = 1
    m = tl.program_id(0)
    expert = routed(m, ids, M, K, E, i_t, i_k)
    if expert == E:
        return
    wide_m = m.to(tl.int64)
    p_row = p + (wide_m // p_div) * (p_m * VEC)
    q_row = q + (wide_m // q_div) * (q_m * VEC) + expert.to(tl.int64) * (q_e * VEC)
    total = tl.zeros((BLOCK,), tl.float32)
    for d0 in range(0, D, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        a = tl.load(p_row + d * p_d, mask=d < D, other=0.0).to(tl.float32)
        total += a * tl.load(q_row + d * q_d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + m, tl.load(out + m) + tl.sum(total, 0))


def _sizes(ids: Tensor, experts: int) -> tuple:
    return ids.shape[0] * ids.shape[1], ids.shape[1], experts


def _block(size: int) -> int:
    return 128 if size <= 128 or INTERPRETED else 512 if size <= 1024 else 1024


def _vectors(*tensors: Tensor) -> tuple[bool, int]:
    """(whether the last axes lie side by side, elements a load can take of all of them)."""
    unit = all(t.stride(-1) == 1 for t in tensors)
    if not unit:
        return False, 1
    return True, math.gcd(*[vector_width(t, t.dim() - 1, t.shape[-1]) for t in tensors])


def _stride(t: Tensor | None, vec: int) -> int:
    """The stride of the first axis in vectors."""
    return 0 if t is None or t.shape[0] <= 1 else t.stride(0) // vec


def _row(t: Tensor, vec: int) -> tuple:
    return _stride(t, vec), t.stride(-1)


def _halves(t: Tensor, vec: int) -> int:
    """The stride from gate to up, in vectors."""
    return t.stride(1) // vec if t.shape[1] > 1 else 0


def activation(name: str, h: Tensor, out: Tensor, ids: Tensor, weights: Tensor | None, experts: int, act: str, limit: float | None):
    """out [M, I] = act of h [M, 1 or 2, I] (· weights [M])."""
    inner, block = out.shape[1], _block(out.shape[1])
    unit, vec = _vectors(h, out)
    launch(
        name, activation_kernel, (cdiv(inner, block) * out.shape[0], 1, 1),
        (h, out, ids, weights, 0.0 if limit is None else float(limit), *_sizes(ids, experts), inner // vec, *ids.stride(),
         _stride(h, vec), _halves(h, vec), h.stride(2), 0 if weights is None else weights.stride(0), _stride(out, vec)),
        (ACTIVATIONS[act], limit is not None, vec, unit, block), 4, 1,
    )  # fmt: skip


def activation_backward(
    name: str, h: Tensor, grad: Tensor, out: Tensor, dw: Tensor | None, ids: Tensor, weights: Tensor | None, experts: int,
    act: str, limit: float | None, passes_at_limit: bool,
):  # fmt: skip
    """out [M, 1 or 2, I] from grad [M, I]; dw [M] float32 is added to. passes_at_limit: the clamp's gradient at the limit itself is 1."""
    inner = grad.shape[1]
    unit, vec = _vectors(h, grad, out)
    launch(
        name, activation_backward_kernel, (grad.shape[0], 1, 1),
        (h, grad, out, dw, ids, weights, 0.0 if limit is None else float(limit), *_sizes(ids, experts), inner // vec,
         *ids.stride(), _stride(h, vec), _halves(h, vec), h.stride(2), _stride(grad, vec), _stride(out, vec), _halves(out, vec),
         0 if weights is None else weights.stride(0)),
        (ACTIVATIONS[act], 0 if limit is None else 1 if passes_at_limit else 2, vec, unit, _block(inner)), 4, 1,
    )  # fmt: skip


def weighted(name: str, x: Tensor, out: Tensor, ids: Tensor, weights: Tensor, experts: int):
    """out [M, D] = x [T or M, D] · weights [M]."""
    size, block = out.shape[1], _block(out.shape[1])
    unit, vec = _vectors(x, out)
    launch(
        name, weighted_kernel, (cdiv(size, block) * out.shape[0], 1, 1),
        (x, out, ids, weights, *_sizes(ids, experts), size // vec, ids.shape[1] if x.shape[0] != out.shape[0] else 1,
         *ids.stride(), *_row(x, vec), weights.stride(0), _stride(out, vec)),
        (vec, unit, block), 4, 1,
    )  # fmt: skip


def combine(name: str, rows: Tensor, out: Tensor, ids: Tensor, weights: Tensor | None, experts: int):
    """out [T, D] = Σ_k rows [M, D] (· weights [M])."""
    size, block = out.shape[1], _block(out.shape[1])
    unit, vec = _vectors(rows, out)
    launch(
        name, combine_kernel, (cdiv(size, block) * out.shape[0], 1, 1),
        (rows, out, ids, weights, *_sizes(ids, experts), size // vec, *ids.stride(), *_row(rows, vec),
         0 if weights is None else weights.stride(0), _stride(out, vec)),
        (vec, unit, block), 4, 1,
    )  # fmt: skip


def row_dot(name: str, p: Tensor, q: Tensor, out: Tensor, ids: Tensor, experts: int, per_expert: bool = False):
    """out [M] += <p, q> of every route: p [M or T, D], q [M or T, D], or [E, D] with per_expert."""
    routes, top_k = ids.shape[0] * ids.shape[1], ids.shape[1]
    unit, vec = _vectors(p, q)
    q_strides = (0, _stride(q, vec)) if per_expert else (_stride(q, vec), 0)
    launch(
        name, row_dot_kernel, (routes, 1, 1),
        (p, q, out, ids, *_sizes(ids, experts), p.shape[1] // vec, 1 if p.shape[0] == routes else top_k,
         1 if per_expert or q.shape[0] == routes else top_k, *ids.stride(), *_row(p, vec), *q_strides, q.stride(1)),
        (vec, unit, _block(p.shape[1])), 4, 1,
    )  # fmt: skip
