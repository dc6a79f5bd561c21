"""Prepared calls: what an op's first call with some shapes did, repeated for later tensors of the same shapes.

A CUDA implementation checks its arguments, allocates, chooses and launches; that is 150 to 250 µs of Python for a delta
at T = 1, and up to 420 for the expert ops. All of it depends on what `driver.describe` puts into a key: shapes, strides, dtypes,
devices, alignment up to 16 bytes, which arguments are absent and which share an address, numbers and words. So the first call
records its allocations and launches on a tape, and a call with the same key allocates anew, fills in the data pointers and
launches on torch's current stream. What is large is allocated in between, when it is first needed, and let go when it was needed last.
Backwards and training forwards are repeated in the same way; what torch computes for them (gradients of base weights and biases,
factors that all experts share) is not on a tape, so such calls take the ordinary way.
Contents are never part of it: ids, ranks, scalings and weights are read by the kernels.

What depends on addresses or on the mode is looked at in every call: operands that may overlap `out`, and operands that
require grad, take the ordinary way, whose checks then speak. So do calls under GROUPED_LORA_CHECK=1 and, where Triton
kernels are launched, under a profiler that hooks Triton's launches. A call that copies on the way (strided ranks; but a float32
master copy of a factor is cast anew in each), fills or sorts without a kernel of ours, or runs in Triton's interpreter is not prepared.

A prepared call that the dispatcher would hand to the CUDA implementation and to nothing else goes there by itself
(`straight`): the dispatcher and its boxing of arguments cost 8 µs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _checks, driver
from . import common

LIMIT = 4096  # prepared calls an op holds, about 3 KB each, of expert_mlp 15; the oldest leaves. A quarter of that where results are several,
# as of backwards: about 50 KB each for expert_mlp
LARGE = 8 << 20  # bytes of what is allocated when it is first needed, and let go when it was needed last

_tables: list[dict] = []
_filling = threading.Lock()


class Result(NamedTuple):
    """One of several results: what was made at `index`, as it is or cast, seen so."""

    index: int
    shape: tuple
    strides: tuple
    offset: int
    dtype: torch.dtype | None  # None: its own

    def of(self, made: tuple) -> Tensor:
        t = made[self.index]
        return torch.as_strided(t if self.dtype is None else t.to(self.dtype), self.shape, self.strides, self.offset)


class Step(NamedTuple):
    """Some of a call's launches, what is allocated ahead of them, and what nobody needs behind them."""

    first: int
    end: int
    fresh: tuple
    over: tuple
    call: object = None


def _steps(tape: driver.Tape, result: int | tuple) -> list[Step]:
    """Where large tensors lie between launches, so that no more of them are held at once than must be; [] where none do."""
    results = {one if isinstance(one, int) else one.index for one in (result if isinstance(result, tuple) else (result,))}
    last_launch = len(tape.launches) - 1
    lives: dict[int, tuple[int, int]] = {}  # of what was made: its first launch and its last
    for number, launch in enumerate(tape.launches):
        for _, operand in launch.slots:
            i = operand - len(tape.args)
            if i >= 0:
                lives[i] = (lives.get(i, (number,))[0], number)
    large = {i for i, t in enumerate(tape.made) if t.numel() * t.element_size() >= LARGE and i in lives}
    if not any(i not in results for i in large):
        return []
    begins = {0, *[lives[i][0] for i in large], *[lives[i][1] + 1 for i in large - results]}
    starts = sorted(begin for begin in begins if begin <= last_launch)
    steps = []
    for first, end in zip(starts, [*starts[1:], last_launch + 1]):
        fresh = [i for i in range(len(tape.made)) if (lives[i][0] if i in large else 0) in range(first, end)]
        steps.append(Step(first, end, tuple(fresh), tuple([i for i in large - results if lives[i][1] in range(first, end)])))
    return steps


def _place(tape: driver.Tape, t: Tensor) -> int | None:
    """That of t in tape.made."""
    return next((i for i, made in enumerate(tape.made) if made is t), None)


def _result(tape: driver.Tape, t: Tensor) -> int | Result | None:
    """Where a result comes from: a place in tape.made, a view of what is there or of its cast; None where it is something else."""
    place = _place(tape, t)
    if place is not None:
        return place
    storage = t.untyped_storage().data_ptr()
    whole = [(made, i, None) for i, made in enumerate(tape.made)]
    whole += [(cast, place, cast.dtype) for cast, source in tape.cast if (place := _place(tape, source)) is not None]
    for root, i, dtype in whole:
        if storage and root.untyped_storage().data_ptr() == storage and root.dtype == t.dtype and root.is_contiguous():
            return Result(i, tuple(t.shape), t.stride(), t.storage_offset(), dtype)
    return None


class Prepared:
    """One recorded call: what to allocate, which of it is the result (a place, or one for each of several), and the launches.

    Made while the device of the tensors is current: the context of that moment is the one the kernels belong to.
    """

    __slots__ = ("made", "zeroed", "copied", "result", "call", "device", "hooked", "steps")

    def __init__(self, tape: driver.Tape, result: int | tuple, apart: tuple):
        self.zeroed, self.copied = frozenset(tape.zeroed), dict(tape.copied)
        self.made, self.result = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tape.made], result
        self.device = tape.args[0].get_device()
        self.hooked = tape.hooked
        self.steps = [] if apart else _steps(tape, result)
        parts = [tape.launches] if not self.steps else [tape.launches[step.first : step.end] for step in self.steps]
        operands, context = len(tape.args) + len(tape.made), driver.ensure_context()
        calls = [driver.call(context, operands, tuple(part), apart) for part in parts]
        self.call = calls[0]
        self.steps = [step._replace(call=one) for step, one in zip(self.steps, calls)]

    def _allocate(self, i: int, args: tuple) -> Tensor:
        """torch.empty_strided takes 1.0 µs where torch.empty takes 1.2."""
        shape, strides, dtype, device = self.made[i]
        made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if i in self.copied:
            return made.copy_(args[self.copied[i]])
        return made.zero_() if i in self.zeroed else made

    def allocate(self, args: tuple) -> tuple:
        """The result and what lies between launches."""
        if self.zeroed or self.copied:
            return tuple([self._allocate(i, args) for i in range(len(self.made))])
        empty = torch.empty_strided
        return tuple([empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype, device in self.made])

    def repeat(self, args: tuple) -> tuple | None:
        """Allocate and launch; returns the allocations, or None where out may overlap an operand: nothing was launched."""
        if self.steps:
            return self._repeat_in_steps(args)
        made = self.allocate(args)
        code = driver.run(self.call, driver.stream_of(self.device), args, made)
        if code:
            if code < 0:
                return None
            driver.check(code, "a kernel launch failed")
        return made

    def _repeat_in_steps(self, args: tuple) -> tuple:
        made: list = [None] * len(self.made)
        stream = driver.stream_of(self.device)
        for step in self.steps:
            for i in step.fresh:
                made[i] = self._allocate(i, args)
            code = driver.run(step.call, stream, args, tuple(made))
            if code:
                driver.check(code, "a kernel launch failed")
            for i in step.over:
                made[i] = None
        return tuple(made)

    def results(self, made: tuple) -> Tensor | tuple:
        if isinstance(self.result, int):
            return made[self.result]
        return tuple([made[one] if isinstance(one, int) else one.of(made) for one in self.result])


def forget() -> None:
    """Drop all prepared calls: for tests, which change how launches are chosen."""
    for table in _tables:
        table.clear()


def _record(run: Callable, args: tuple, key, table: dict, in_place: int):
    with common.device_of(args[0]):
        with driver.recording(args) as tape:
            result = run(*args)
        if isinstance(result, tuple):
            at = tuple([_result(tape, t) for t in result])
        else:
            at = 0 if result is None else _place(tape, result)
        found = at is not None and (isinstance(at, int) or None not in at)
        if key is not None and found and tape.launches and not tape.refused:
            prepared = Prepared(tape, at, _apart(args, in_place))
            with _filling:
                while len(table) >= (LIMIT if isinstance(at, int) else LIMIT // 4):
                    del table[next(iter(table))]
                table[key] = prepared
    return result


def _apart(args: tuple, in_place: int) -> tuple:
    """Which operands out may not overlap, as `driver.call` takes it; at their present distance they do not."""
    out, start = args[0], args[0].data_ptr()
    operands = [(i, args[i]) for i in range(1, in_place)]
    return tuple([(0, i, _checks.span(out), _checks.span(t), t.data_ptr() - start) for i, t in operands])


def prepared(run: Callable, needs: int | None = None) -> Callable:
    """A CUDA implementation that returns a new tensor, or several, which it makes with `driver.empty` (or `zeros`, `copied`, `cast`).

    In a call that launches anything, every write must be one of our launches: torch's own kernels are not on the tape. Where one
    of them writes what `driver.empty` made, `driver.refuse` must be called; a copy that a launch reads refuses by itself.

    needs: which argument is a list of bools, which `driver.describe` does not know.
    `table` of the result holds its prepared calls, `__wrapped__` is the ordinary way.
    """
    table: dict = {}
    _tables.append(table)
    ordinary = common.on_device(run)

    @functools.wraps(run)
    def call(*args, **kwargs):
        if kwargs or _checks.CHECK_IDS:
            return ordinary(*args, **kwargs)
        described = args
        if needs is not None and needs < len(args):
            described = (*args[:needs], [int(need) for need in args[needs]], *args[needs + 1 :])
        key, found = _find(table, described)
        if found is None:
            return _record(run, args, key, table, 0)
        return found.results(found.repeat(args))

    call.table = table
    return call


def _find(table: dict, args: tuple) -> tuple:
    """The key of a call, and the prepared call if it may be repeated now."""
    key = driver.describe(args)
    found = table.get(key)
    if found is None or driver.recordings or (found.hooked and driver.triton_hooks()):
        return key, None
    return key, found


def prepared_in_place(operands: int) -> Callable:
    """The same for one that writes its first argument; the first `operands` arguments may not require grad, nor overlap it."""

    def decorate(run: Callable) -> Callable:
        table: dict = {}
        _tables.append(table)
        ordinary = common.on_device(run)
        increment_version, grad_enabled = torch.autograd.graph.increment_version, torch.is_grad_enabled

        @functools.wraps(run)
        def call(*args, **kwargs):
            if kwargs or _checks.CHECK_IDS:
                return ordinary(*args, **kwargs)
            if grad_enabled() and any(t.requires_grad for t in args[:operands]):
                return ordinary(*args)
            key, found = _find(table, args)
            if found is None:
                return _record(run, args, key, table, operands)
            if found.repeat(args) is None:  # may overlap: the exact check decides
                return ordinary(*args)
            increment_version(args[0])

        call.table = table
        return call

    return decorate


# --- past the dispatcher ---


try:
    _include, _exclude = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    _function_mode, _profiled = torch._C._is_torch_function_mode_enabled, torch.autograd._profiler_enabled
    _include().raw_repr()
except AttributeError:  # another torch: every call goes through the dispatcher
    _include = None
_grad_enabled = torch.is_grad_enabled


def _dispatch_state() -> tuple[int, int]:
    """What this thread has switched on and off for the dispatcher: modes, autocast, functorch's layers, inference mode."""
    return _include().raw_repr(), _exclude().raw_repr()


def _plain_states() -> frozenset:
    """The states of a thread where nothing is switched on, in and outside inference mode."""
    states = []

    def look() -> None:
        states.append(_dispatch_state())
        with torch.inference_mode():
            states.append(_dispatch_state())

    if _include is not None:
        thread = threading.Thread(target=look)  # a new one has switched nothing on
        thread.start()
        thread.join()
    return frozenset(states)


_PLAIN = _plain_states()


_VALUES = frozenset((type(None), list, int, float, str))  # what the dispatcher hands on as it is


def _on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def _undispatched(args: tuple) -> bool:
    """Whether the dispatcher would do nothing with these arguments but call the CUDA implementation, if one was prepared for
    their like (then they are dense, and on one GPU if the first is)."""
    if _grad_enabled() or _include is None or not isinstance(args[0], Tensor) or not _on_gpu(args[0]):
        return False
    if _dispatch_state() not in _PLAIN or _function_mode() or _profiled():
        return False
    for t in args:
        kind = type(t)
        if kind is Tensor or kind is Parameter:
            if t.is_neg():
                return False
        elif kind not in _VALUES:
            return False
    return True


def straight(implementation: Callable, in_place: bool = False, op=None) -> Callable:
    """straight(cuda)(*args) → (whether it is done, result): a prepared call repeated without the dispatcher.

    Only out of autograd's sight (inference mode, no_grad) and with plain tensors; everything else is left to the op: a first
    call, subclasses, modes, autocast, tracing, a profiler. op: where an argument has another default than None, or may be
    None and has no default.
    """
    table, increment_version = implementation.table, torch.autograd.graph.increment_version
    defaults = (None,) * 32  # of the last arguments, the last first
    if op is not None:
        defaults = tuple([a.default_value for a in op._schema.arguments[::-1] if a.has_default_value()])

    def call(*args):
        if torch.compiler.is_compiling() or _checks.CHECK_IDS or not _undispatched(args):
            return False, None
        last = len(args)
        for default in defaults:  # the dispatcher leaves out what stands at its default
            value = args[last - 1]
            if value is not default and not (type(value) is str and value == default):
                break
            last -= 1
        args = args[:last]
        try:
            found = _find(table, args)[1]
        except RuntimeError:  # a sparse tensor has no strides
            return False, None
        made = None if found is None else found.repeat(args)
        if made is None:
            return False, None
        if in_place:
            increment_version(args[0])
            return True, None
        return True, made[found.result]

    return call
