"""A weight that is multiplied by its parent, not by its module, and adds the delta there.

DeepSeek-V4's own implementation never calls `wo_a`: it computes `einsum("bsgd,grd->bsgr", o, wo_a.weight.view(G, N, D))`,
so that a forward hook on the module never fires. `stand_in` gives such a parent a tensor that knows whose weight it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_VIEWS = {"view", "reshape", "unflatten", "_unsafe_view", "view_as"}
_SAME = {"to", "contiguous", "detach", "clone", "type_as", "float", "bfloat16", "half", "alias"}
_MATMUL = {"matmul", "__matmul__", "bmm", "__rmatmul__"}


class LoraWeight(torch.Tensor):
    """The weight of a LoraLinear with a role for every axis: g, n and d; f: the flat G·N."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            handler = _HANDLERS.get(name)
            found = None if handler is None else handler(func, args, kwargs)
            if found is None:
                found = func(*args, **kwargs)
                if name not in ("__get__", "__set__", "requires_grad_") and _holds_tensors(found):
                    _refuse(name)
                if name == "__get__" and isinstance(found, Tensor):
                    found = _property(func, args[0], found)
            return found


def stand_in(weight: Tensor, owner) -> Tensor:
    """weight [N, D] (grouped [G·N, D]) as a tensor whose products with x have owner's delta added.

    Products: `linear`, `matmul` (`@`, `bmm`) with the weight on the right, `einsum` of two operands. Before it, views to
    [G, N, D], permutations, casts. Sizes, dtype, device and addresses can be read. Any other use that makes a tensor
    raises RuntimeError, since it would lose the adapter without a word.
    """
    return _tag(weight.as_subclass(LoraWeight), owner, "fd" if owner.grouped else "nd")


def _tag(t: Tensor, owner, roles: str) -> LoraWeight:
    t = t.as_subclass(LoraWeight)
    t.owner, t.roles = owner, roles
    return t


def _holds_tensors(found) -> bool:
    return isinstance(found, Tensor) or (isinstance(found, (tuple, list)) and any(isinstance(f, Tensor) for f in found))


def _refuse(name: str):
    raise RuntimeError(
        f"grouped_lora_ops.nn: {name} on the weight of a module with adapters would lose them; multiply with it by linear, "
        "matmul or einsum, or call the module."
    )


def _property(func, weight, found):
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ("T", "mT"):
        return _tag(found, weight.owner, weight.roles[:-2] + weight.roles[:-3:-1])
    if name in ("grad", "_grad"):
        return found
    _refuse(name)


def _view(func, args, kwargs):
    weight = args[0]
    made = func(*args, **kwargs)
    if made.shape == weight.shape:
        return _tag(made, weight.owner, weight.roles)
    part = weight.owner.buffer.parts[0]
    if weight.roles == "fd" and made.dim() == 3 and made.shape[-1] == weight.shape[-1]:
        groups = part.groups.stop - part.groups.start
        if made.shape[0] == groups:
            return _tag(made, weight.owner, "gnd")
    _refuse(func.__name__)


def _same(func, args, kwargs):
    if not isinstance(args[0], LoraWeight):
        return None
    return _tag(func(*args, **kwargs), args[0].owner, args[0].roles)


def _transpose(func, args, kwargs):
    weight, (i, j) = args[0], (args[1:] or (kwargs["dim0"], kwargs["dim1"]))
    roles = list(weight.roles)
    roles[i], roles[j] = roles[j], roles[i]
    return _tag(func(*args, **kwargs), weight.owner, "".join(roles))


def _permute(func, args, kwargs):
    weight, made = args[0], func(*args, **kwargs)
    order = args[1:] or (kwargs["dims"],)
    order = order[0] if isinstance(order[0], (tuple, list, torch.Size)) else order
    return _tag(made, weight.owner, "".join(weight.roles[i] for i in order))


def _t(func, args, kwargs):
    return _tag(func(*args, **kwargs), args[0].owner, args[0].roles[::-1])


def _linear(func, args, kwargs):
    x, weight = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("input", "weight")))
    if isinstance(x, LoraWeight) or not isinstance(weight, LoraWeight) or weight.roles != "nd":
        _refuse("linear")
    return weight.owner.add_delta(x, func(*args, **kwargs))


def _matmul(func, args, kwargs):
    """x [..., D] @ w [D, N], or x [..., G, T, D] @ w [G, D, N]."""
    x, weight = args[:2]
    if not isinstance(weight, LoraWeight) or isinstance(x, LoraWeight) or weight.roles not in ("dn", "gdn"):
        _refuse(func.__name__)
    y = func(*args, **kwargs)
    if weight.roles == "dn":
        return weight.owner.add_delta(x, y)
    x = x.expand(*y.shape[:-1], x.shape[-1])
    return weight.owner.add_delta(x.transpose(-3, -2), y.transpose(-3, -2)).transpose(-3, -2)


def _einsum(func, args, kwargs):
    """Roles say which letters are groups, rows and columns; what is left of x are tokens."""
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        _refuse("einsum")
    inputs, out = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    mine = [i for i, t in enumerate(operands) if isinstance(t, LoraWeight)]
    if len(mine) != 1:
        _refuse("einsum")
    weight, x = operands[mine[0]], operands[1 - mine[0]]
    letter = dict(zip(weight.roles, terms[mine[0]]))
    ours = terms[1 - mine[0]]
    g, n, d = (letter.get(role, "") for role in "gnd")
    tokens = [c for c in out if c not in g + n]
    if "f" in weight.roles or sorted(ours) != sorted(tokens + [*g, d]) or sorted(out) != sorted([*tokens, *g, n]):
        _refuse("einsum")
    y = func(*args, **kwargs)
    x = x.permute([ours.index(c) for c in (*tokens, *g, d)])
    order = [*tokens, *g, n]
    y = weight.owner.add_delta(x, y.permute([out.index(c) for c in order]))
    return y.permute([order.index(c) for c in out])


_HANDLERS = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "permute": _permute,
    "t": _t,
    "linear": _linear,
    **dict.fromkeys(_MATMUL, _matmul),
    "einsum": _einsum,
}
