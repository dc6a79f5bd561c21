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
def expert_of(t, k, there, ids, E, i_t, i_k):
    """The expert of route k of token t, E where it is masked or not `there`."""
    e = tl.load(ids + t.to(tl.int64) * i_t + k * i_k, mask=there, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit
def routed(m, ids, M, K, E, i_t, i_k):
    """The experts of routes m, E where they are masked."""
    return expert_of(m // K, m % K, m < M, ids, E, i_t, i_k)


@triton.jit
def tile_of(W, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows [ROWS], columns [1, BLOCK]) of a program: blocks of W columns follow one another, then rows."""
    blocks = tl.cdiv(W, BLOCK)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    return rows, (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None]


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


# Strides and sizes of the last axis come in vectors of VEC elements, which UNIT says lie side by side (see `tile.py`). A program has
# ROWS routes or tokens, so many that its threads have several vectors of 16 bytes on their way.


@triton.jit(do_not_specialize=("M", "K", "E", "U", "i_t", "i_k", "h_m", "h_g", "h_u", "w_m", "o_m"))
def activation_kernel(
    h, out, ids, weights, limit: "fp32", M: "i32", K: "i32", E: "i32", U: "i32", i_t: "i64", i_k: "i64",
    h_m: "i64", h_g: "i64", h_u: "i64", w_m: "i64", o_m: "i64",
    ACT: tl.constexpr, CLAMP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = act(h[m]) (· weight): a program per (block of U, ROWS routes). Masked routes are not read and get zeros."""
    U = U * VEC
    if UNIT:
        h_u = 1
    m, u = tile_of(U, ROWS, BLOCK)
    OUT: tl.constexpr = out.dtype.element_ty
    live = routed(m, ids, M, K, E, i_t, i_k) < E
    wide_m = m.to(tl.int64)
    mask = live[:, None] & (u < U)
    h_ptrs = h + (wide_m * (h_m * VEC))[:, None] + u * h_u
    gate = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if ACT != RELU2:
        up = tl.load(h_ptrs + h_g * VEC, mask=mask, other=0.0).to(tl.float32)
    a = activate(gate, up, limit, ACT, CLAMP)
    if weights is not None:
        a = a * tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)[:, None]
    a = tl.where(mask, a, 0.0)
    tl.store(out + (wide_m * (o_m * VEC))[:, None] + u, round_to(a, OUT), mask=(m < M)[:, None] & (u < U))


@triton.jit(do_not_specialize=("M", "K", "E", "U", "i_t", "i_k", "h_m", "h_g", "h_u", "a_m", "g_m", "g_g", "w_m"))
def activation_backward_kernel(
    h, grad, out, dw, ids, weights, limit: "fp32", M: "i32", K: "i32", E: "i32", U: "i32", i_t: "i64", i_k: "i64",
    h_m: "i64", h_g: "i64", h_u: "i64", a_m: "i64", g_m: "i64", g_g: "i64", w_m: "i64",
    ACT: tl.constexpr, CLAMP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = act'(h[m])ᵀ (grad[m] · weight); dw[m] += <act(h[m]), grad[m]>: a program per ROWS routes. Masked ones get zeros."""
    U = U * VEC
    if UNIT:
        h_u = 1
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide_m = m.to(tl.int64)[:, None]
    OUT: tl.constexpr = out.dtype.element_ty
    live = (routed(m, ids, M, K, E, i_t, i_k) < E)[:, None]
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for u0 in range(0, U, BLOCK):
        u = u0 + tl.arange(0, BLOCK)[None]
        mask = (u < U) & live
        inside = (u < U) & (m < M)[:, None]
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
        tl.store(o_ptrs, round_to(tl.where(mask, d_gate, 0.0), OUT), mask=inside)
        if ACT != RELU2:
            tl.store(o_ptrs + g_g * VEC, round_to(tl.where(mask, d_up, 0.0), OUT), mask=inside)
    if dw is not None:
        tl.store(dw + m, tl.load(dw + m, mask=m < M, other=0.0) + tl.sum(total, 1), mask=m < M)


@triton.jit(do_not_specialize=("M", "K", "E", "D", "x_div", "i_t", "i_k", "x_t", "x_d", "w_m", "o_m"))
def weighted_kernel(
    x, out, ids, weights, M: "i32", K: "i32", E: "i32", D: "i32", x_div: "i32", i_t: "i64", i_k: "i64",
    x_t: "i64", x_d: "i64", w_m: "i64", o_m: "i64", VEC: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] = x[m // x_div] · weight[m], rounded: a program per (block of D, ROWS routes). Masked routes get zeros."""
    D = D * VEC
    if UNIT:
        x_d = 1
    m, d = tile_of(D, ROWS, BLOCK)
    live = (routed(m, ids, M, K, E, i_t, i_k) < E)[:, None]
    wide_m = m.to(tl.int64)[:, None]
    weight = tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)
    v = tl.load(x + (wide_m // x_div) * (x_t * VEC) + d * x_d, mask=(d < D) & live, other=0.0).to(tl.float32) * weight
    tl.store(out + wide_m * (o_m * VEC) + d, round_to(v, out.dtype.element_ty), mask=(d < D) & (m < M)[:, None])


@triton.jit(do_not_specialize=("T", "K", "E", "D", "i_t", "i_k", "r_m", "r_d", "w_m", "o_t"))
def combine_kernel(
    rows, out, ids, weights, T: "i32", K: "i32", E: "i32", D: "i32", i_t: "i64", i_k: "i64",
    r_m: "i64", r_d: "i64", w_m: "i64", o_t: "i64",
    VEC: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k rows[t·K + k] (· weight) in float32, in the order of k, rounded once. Masked routes are not read.

    AHEAD of a token's routes are on their way at once.
    """
    D = D * VEC
    if UNIT:
        r_d = 1
    t, d = tile_of(D, ROWS, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, K, AHEAD):
        for i in tl.static_range(AHEAD):
            k = first + i
            live = (expert_of(t, k, (t < T) & (k < K), ids, E, i_t, i_k) < E)[:, None]
            wide_m = (t.to(tl.int64) * K + k)[:, None]
            v = tl.load(rows + wide_m * (r_m * VEC) + d * r_d, mask=(d < D) & live, other=0.0).to(tl.float32)
            if weights is not None:
                v = v * tl.load(weights + wide_m * w_m, mask=live, other=0.0).to(tl.float32)
            total += v
    o_ptrs = out + (t.to(tl.int64) * (o_t * VEC))[:, None] + d
    tl.store(o_ptrs, round_to(total, out.dtype.element_ty), mask=(d < D) & (t < T)[:, None])


@triton.jit(do_not_specialize=("M", "K", "E", "D", "p_div", "q_div", "i_t", "i_k", "p_m", "p_d", "q_m", "q_e", "q_d"))
def row_dot_kernel(
    p, q, out, ids, M: "i32", K: "i32", E: "i32", D: "i32", p_div: "i32", q_div: "i32", i_t: "i64", i_k: "i64",
    p_m: "i64", p_d: "i64", q_m: "i64", q_e: "i64", q_d: "i64",
    VEC: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m] += <p[m // p_div], q[m // q_div] or q[expert of m]> in float32: a program per ROWS routes. Masked ones are not read."""
    D = D * VEC
    if UNIT:
        p_d = 1
        q_d = 1
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = routed(m, ids, M, K, E, i_t, i_k)
    live = expert < E
    wide_m = m.to(tl.int64)
    p_rows = (p + (wide_m // p_div) * (p_m * VEC))[:, None]
    q_rows = (q + (wide_m // q_div) * (q_m * VEC) + expert.to(tl.int64) * (q_e * VEC))[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for d0 in range(0, D, BLOCK):
        d = d0 + tl.arange(0, BLOCK)[None]
        mask = live[:, None] & (d < D)
        a = tl.load(p_rows + d * p_d, mask=mask, other=0.0).to(tl.float32)
        total += a * tl.load(q_rows + d * q_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m, tl.load(out + m, mask=live, other=0.0) + tl.sum(total, 1), mask=live)


PROGRAMS = 4 if INTERPRETED else 1024  # rows share a program where that leaves so many
AHEAD = 2  # routes of a token that are read at once


def _sizes(ids: Tensor, experts: int) -> tuple:
    return ids.shape[0] * ids.shape[1], ids.shape[1], experts


def _tile(rows: int, size: int, elements: int, split: bool = True) -> tuple[int, int, int]:
    """(ROWS, BLOCK, programs), up to so many elements of the two together (H200, T = 4096 and 256: of 1024, 2048 and 4096 the fastest).

    A program takes a block of `size`, or (not split) all of it, block by block, for a sum over it: by so many threads a row whatever the
    number of rows, so that the sum has one order.
    """
    widths = (128,) if INTERPRETED else (1024, 512, 256, 128)
    block = next((width for width in widths if cdiv(size, width) * width <= 1.1 * size), 128)
    blocks, each = cdiv(size, block) if split else 1, 1
    while 2 * each * block <= elements and (not split or cdiv(rows, 2 * each) * blocks >= PROGRAMS):
        each *= 2
    return each, block, cdiv(rows, each) * blocks


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
    rows, block, programs = _tile(*out.shape, 2048)
    unit, vec = _vectors(h, out)
    launch(
        name, activation_kernel, (programs, 1, 1),
        (h, out, ids, weights, 0.0 if limit is None else float(limit), *_sizes(ids, experts), out.shape[1] // vec, *ids.stride(),
         _stride(h, vec), _halves(h, vec), h.stride(2), 0 if weights is None else weights.stride(0), _stride(out, vec)),
        (ACTIVATIONS[act], limit is not None, vec, unit, rows, block), 4, 1,
    )  # fmt: skip


def activation_backward(
    name: str, h: Tensor, grad: Tensor, out: Tensor, dw: Tensor | None, ids: Tensor, weights: Tensor | None, experts: int,
    act: str, limit: float | None, passes_at_limit: bool,
):  # fmt: skip
    """out [M, 1 or 2, I] from grad [M, I]; dw [M] float32 is added to. passes_at_limit: the clamp's gradient at the limit itself is 1."""
    rows, block, programs = _tile(*grad.shape, 1024, split=False)
    unit, vec = _vectors(h, grad, out)
    launch(
        name, activation_backward_kernel, (programs, 1, 1),
        (h, grad, out, dw, ids, weights, 0.0 if limit is None else float(limit), *_sizes(ids, experts), grad.shape[1] // vec,
         *ids.stride(), _stride(h, vec), _halves(h, vec), h.stride(2), _stride(grad, vec), _stride(out, vec), _halves(out, vec),
         0 if weights is None else weights.stride(0)),
        (ACTIVATIONS[act], 0 if limit is None else 1 if passes_at_limit else 2, vec, unit, rows, block), 4, 1,
    )  # fmt: skip


def weighted(name: str, x: Tensor, out: Tensor, ids: Tensor, weights: Tensor, experts: int):
    """out [M, D] = x [T or M, D] · weights [M]."""
    each, block, programs = _tile(*out.shape, 4096)
    unit, vec = _vectors(x, out)
    launch(
        name, weighted_kernel, (programs, 1, 1),
        (x, out, ids, weights, *_sizes(ids, experts), out.shape[1] // vec, ids.shape[1] if x.shape[0] != out.shape[0] else 1,
         *ids.stride(), *_row(x, vec), weights.stride(0), _stride(out, vec)),
        (vec, unit, each, block), 4, 1,
    )  # fmt: skip


def combine(name: str, rows: Tensor, out: Tensor, ids: Tensor, weights: Tensor | None, experts: int):
    """out [T, D] = Σ_k rows [M, D] (· weights [M])."""
    each, block, programs = _tile(*out.shape, 1024)
    unit, vec = _vectors(rows, out)
    launch(
        name, combine_kernel, (programs, 1, 1),
        (rows, out, ids, weights, *ids.shape, experts, out.shape[1] // vec, *ids.stride(), *_row(rows, vec),
         0 if weights is None else weights.stride(0), _stride(out, vec)),
        (vec, unit, each, block, AHEAD), 4, 1,
    )  # fmt: skip


def row_dot(name: str, p: Tensor, q: Tensor, out: Tensor, ids: Tensor, experts: int, per_expert: bool = False):
    """out [M] += <p, q> of every route: p [M or T, D], q [M or T, D], or [E, D] with per_expert."""
    routes, top_k = ids.shape[0] * ids.shape[1], ids.shape[1]
    each, block, programs = _tile(routes, p.shape[1], 2048, split=False)
    unit, vec = _vectors(p, q)
    q_strides = (0, _stride(q, vec)) if per_expert else (_stride(q, vec), 0)
    launch(
        name, row_dot_kernel, (programs, 1, 1),
        (p, q, out, ids, *_sizes(ids, experts), p.shape[1] // vec, 1 if p.shape[0] == routes else top_k,
         1 if per_expert or q.shape[0] == routes else top_k, *ids.stride(), *_row(p, vec), *q_strides, q.stride(1)),
        (vec, unit, each, block), 4, 1,
    )  # fmt: skip
