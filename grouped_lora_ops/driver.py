"""Kernel launches through the CUDA driver that are described once and repeated cheaply.

A `Tape` records what one call of an op allocates and launches, with every pointer traced to an argument or to an
allocation. `Call` repeats that with other tensors of the same description: only data pointers are filled in. Both the
description of arguments (`describe`) and the repetition exist twice: in csrc/launcher.c (a key of 9 arguments 0.3 µs, a
launch 0.4 µs beside the driver's own time) and here in Python and ctypes for where that was not built (2.5 and 2.2 to 2.6 µs).
Nothing here touches a CUDA context or loads the driver before the first launch.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def _built_launcher():
    """csrc/launcher.c as a module, if it was built, fits this torch and reads a tensor right."""
    try:
        from . import _launcher

        _launcher.setup(4, Tensor, Tensor.__dlpack_c_exchange_api__)
        probe = torch.zeros(2, 3, dtype=torch.float32, device="cpu").t()
        read = _launcher.describe((probe, None))
    except (ImportError, AttributeError, RuntimeError, ValueError):  # not built, or from an older launcher.c; another DLPack
        return None
    wanted = struct.pack("=c5B2i4qc", b"t", 0, probe.data_ptr() & -probe.data_ptr() & 15, 2, 2, 32, 1, 0, 3, 2, 1, 3, b"n")
    return _launcher if read == wanted else None


_launcher = _built_launcher()
MAX_ATTRIBUTES = 2
_CLUSTER, _STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a 64-byte union, of which a dimension triple and a flag are used."""

    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("dim", ctypes.c_uint32 * 3), ("rest", ctypes.c_uint32 * 13)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint32),
    ]


@functools.cache
def library():
    """libcuda, opened at the first launch or load. OSError where there is no driver."""
    lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lib.cuModuleLoadData.argtypes = [ctypes.POINTER(pointer), ctypes.c_char_p]
    lib.cuModuleGetFunction.argtypes = [ctypes.POINTER(pointer), pointer, ctypes.c_char_p]
    lib.cuModuleGetGlobal_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(size), pointer, ctypes.c_char_p]
    lib.cuMemcpyDtoH_v2.argtypes = [pointer, ctypes.c_uint64, size]
    lib.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    lib.cuLaunchKernelEx.argtypes = [ctypes.POINTER(Config), pointer, ctypes.POINTER(pointer), pointer]
    lib.cuCtxGetCurrent.argtypes = [ctypes.POINTER(pointer)]
    lib.cuCtxPushCurrent_v2.argtypes = [pointer]
    lib.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(pointer)]
    lib.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    if hasattr(lib, "cuTensorMapEncodeTiled"):  # from CUDA 12 on
        wide, narrow = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
        lib.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, ctypes.c_uint32, pointer, wide, wide, narrow, narrow, *[ctypes.c_int] * 4]
    return lib


def check(code: int, what: str) -> None:
    """RuntimeError with the driver's own words unless code is CUDA_SUCCESS."""
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"grouped_lora: {what}: {(text.value or b'unknown error').decode()} (CUDA error {code}).")


def context() -> int:
    """The current CUDA context of this thread, 0 for none."""
    current = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
    return current.value or 0


def ensure_context() -> int:
    """The current context; in a thread that has none yet, that of torch's current device."""
    current = context()
    if not current:
        torch.cuda.set_device(torch.cuda.current_device())
        current = context()
    return current


def stream_of(device: int) -> int:
    """torch's current stream of a CUDA device, as the driver's handle."""
    return torch._C._cuda_getCurrentRawStream(device)


class Launch(NamedTuple):
    """One kernel launch with the tensors left out."""

    function: int  # CUfunction
    grid: tuple[int, int, int]  # blocks
    threads: int
    cluster: tuple[int, int, int]  # blocks; (1, 1, 1) for none, or where the kernel names its cluster itself
    shared: int  # bytes of dynamic shared memory
    pdl: bool  # may start before the kernel ahead of it in the stream ends
    data: bytes  # all parameters, each at its alignment
    offsets: tuple[int, ...]  # where each parameter starts in data
    slots: tuple[tuple[int, int], ...]  # (offset in data, operand): pointers to fill in


def pack(layout: str, values: Sequence) -> tuple[bytes, list[tuple[int, Tensor]]]:
    """A C struct from struct's letters in native alignment, and where its non-null pointers are.

    layout: one letter a field, "P" for a pointer, with a count before it for an array ("PPq4i"). values: flat; a pointer
    is given as a Tensor or None.
    """
    offsets, prefix = [], "@"
    for count, letter in re.findall(r"(\d*)(\w)", layout):
        for _ in range(int(count or 1)):
            prefix += letter
            offsets.append((struct.calcsize(prefix) - struct.calcsize("@" + letter), letter))
    if len(offsets) != len(values):
        raise ValueError(f"grouped_lora: {len(values)} values for the {len(offsets)} fields of {layout!r}.")
    tensors = [(at, value) for (at, letter), value in zip(offsets, values) if letter == "P" and value is not None]
    numbers = [
        (0 if value is None else value.data_ptr()) if letter == "P" else value for (_, letter), value in zip(offsets, values)
    ]
    return struct.pack(prefix + "0q", *numbers), tensors


_TYPES, _SWIZZLE_128, _PROMOTE_256 = {1: 0, 2: 9}, 3, 3  # CUtensorMapDataType by size (bytes, bf16), CUtensorMapSwizzle, CUtensorMapL2promotion


def _encode(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], itemsize: int) -> list[int]:
    rank = len(sizes)
    room = ctypes.create_string_buffer(128 + 64)
    start = (ctypes.addressof(room) + 63) // 64 * 64
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    code = library().cuTensorMapEncodeTiled(
        start, _TYPES[itemsize], rank, address, (wide * rank)(*sizes), (wide * (rank - 1))(*strides), (narrow * rank)(*box),
        (narrow * rank)(*[1] * rank), 0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    check(code, "a tensor map")
    return list(struct.unpack("@16Q", ctypes.string_at(start, 128)))


@functools.cache
def has_tensor_maps() -> bool:
    """Whether this driver makes tensor maps whose first word is the address, on which no other word depends."""
    if not hasattr(library(), "cuTensorMapEncodeTiled"):
        return False
    first, second = (_encode(address, (64, 64), (128,), (64, 8), 2) for address in (1 << 30, 3 << 30))
    return first[0] == 1 << 30 and second[0] == 3 << 30 and first[1:] == second[1:]


def tensor_map(t: Tensor, order: Sequence[int], box: Sequence[int], pad: int = 0) -> list[int]:
    """The 16 words of a tensor map of t (bf16, or elements of a byte), axes in `order`, the first of unit stride, swizzled rows of 128
    bytes; axes of size 1 behind them, up to `pad` in all.

    Its first word is t's address, so a launch gives t as the pointer there. Only where `has_tensor_maps`.
    """
    strides, last = [], 16
    for axis in order[1:]:
        last = t.element_size() * t.stride(axis) if t.shape[axis] > 1 else last  # an axis of size 1 has no stride that counts
        strides.append(last)
    more = max(0, pad - len(order))
    sizes = [t.shape[axis] for axis in order] + [1] * more
    return _encode(t.data_ptr(), sizes, strides + [last] * more, [*box, *[1] * more], t.element_size())


# --- the description of a call ---


def describe_in_python(args: tuple):
    """A key of everything that checks and launch choices read of a call's arguments: None where there is no such key.

    Of a tensor: shape, strides, dtype, device, the alignment of its address up to 16 bytes, and which arguments share an
    address. An int, a bool, a float, a str and a list of int by value. Addresses and contents are no part of it.
    """
    key, seen = [], []
    for value in args:
        if value is None:
            key.append(None)
        elif isinstance(value, Tensor):
            address = value.data_ptr()
            seen.append(address)
            key.append((value.shape, value.stride(), value.dtype, value.get_device(), address & -address & 15))
        elif type(value) in (int, str):
            key.append(value)
        elif type(value) in (bool, float):  # with its type and bits: True == 1 == 1.0, 0.0 == -0.0, and a NaN is not itself
            key.append((type(value), struct.pack("=d", value)))
        elif isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
            key.append(tuple(value))
        else:
            return None
    if len(set(seen)) != len(seen):
        key.append(tuple([seen.index(address) for address in seen]))
    return tuple(key)


# --- the repetition of a call ---


class _CallInPython:
    """The launches of a call; `run` as csrc/launcher.c has it."""

    def __init__(self, context: int, operands: int, launches: tuple, apart: tuple):
        self.context, self.operands, self.apart = context, operands, apart
        self.lock = threading.Lock()  # parameters are filled in place
        lib, self.current = library(), ctypes.c_void_p()
        self.current_ref, self.launch = ctypes.byref(self.current), lib.cuLaunchKernelEx
        self.get_context, self.push_context, self.pop_context = lib.cuCtxGetCurrent, lib.cuCtxPushCurrent_v2, lib.cuCtxPopCurrent_v2
        self.prepared = [self._prepare(launch) for launch in launches]
        used = [operand for launch in launches for _, operand in launch.slots] + [i for pair in apart for i in pair[:2]]
        self.used = tuple(sorted(set(used)))

    @staticmethod
    def _prepare(launch: Launch):
        buffer = ctypes.create_string_buffer(launch.data, max(1, len(launch.data)))
        start = ctypes.addressof(buffer)
        parameters = (ctypes.c_void_p * len(launch.offsets))(*[start + at for at in launch.offsets])
        slots = [(ctypes.c_uint64.from_buffer(buffer, at), operand) for at, operand in launch.slots]
        attributes = (Attribute * MAX_ATTRIBUTES)()
        count = 0
        if launch.cluster != (1, 1, 1):
            attributes[count].id, attributes[count].dim[:] = _CLUSTER, launch.cluster
            count += 1
        if launch.pdl:
            attributes[count].id, attributes[count].dim[0] = _STREAM_SERIALIZATION, 1
            count += 1
        config = Config(launch.grid, (launch.threads, 1, 1), launch.shared, None, attributes, count)
        return config, ctypes.byref(config), ctypes.c_void_p(launch.function), parameters, slots, buffer

    def run(self, stream: int, args: tuple, made: tuple) -> int:
        operands = args + made
        if len(operands) != self.operands:
            raise ValueError("another call's operands")
        pointers = [0] * self.operands
        for i in self.used:
            pointers[i] = operands[i].data_ptr()
        for a, b, span_a, span_b, known in self.apart:
            first, second = pointers[a], pointers[b]
            if first < second + span_b and second < first + span_a and second - first != known:
                return -1
        with self.lock:
            code = self.get_context(self.current_ref)
            pushed = code == 0 and (self.current.value or 0) != self.context
            if pushed:
                code = self.push_context(self.context)
                pushed = code == 0
            if code == 0:
                for config, config_ref, function, parameters, slots, _ in self.prepared:
                    config.stream = stream
                    for slot, operand in slots:
                        slot.value = pointers[operand]
                    code = self.launch(config_ref, function, parameters, None)
                    if code:
                        break
            if pushed:
                self.pop_context(self.current_ref)
        return code


@functools.cache
def _entry_points(lib) -> tuple[int, int, int, int]:
    names = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    return tuple([ctypes.cast(getattr(lib, name), ctypes.c_void_p).value for name in names])


def call(context: int, operands: int, launches: tuple, apart: tuple = ()):
    """A call that `run` repeats: launches in order in a context, on numbered operands (arguments, then allocations).

    apart: (operand, operand, bytes of one, bytes of the other, distance) of operands that may not share memory; at that
    distance they are known not to, though their ranges interleave. See `run`.
    """
    if _launcher is None:
        return _CallInPython(context, operands, launches, apart)
    return _launcher.make(_entry_points(library()), context, operands, launches, apart)


def run_in_python(call: _CallInPython, stream: int, args: tuple, made: tuple) -> int:
    return call.run(stream, args, made)


# describe(args) -> key; run(call, stream, args, made) -> 0, the driver's error, or −1 where operands that must lie apart
# may overlap, in which case nothing was launched
describe = _launcher.describe if _launcher else describe_in_python
run = _launcher.run if _launcher else run_in_python


def launch(launch: Launch, stream: int) -> None:
    """Launch once, with the pointers that are in launch.data."""
    check(run(call(ensure_context(), 0, (launch._replace(slots=()),)), stream, (), ()), "a kernel launch failed")


# --- the recording of a call ---


class Tape:
    """What one call of an op allocates and launches.

    refused: something happened that a repetition would miss, so that the call is not to be repeated from here.
    """

    def __init__(self, args: tuple):
        self.args = args
        self.made: list[Tensor] = []  # held to the end: no address is used twice
        self.zeroed: list[int] = []  # places in made of what holds zeros before the first launch
        self.copied: dict[int, int] = {}  # places in made of what holds a copy of an argument before the first launch, and that one's place
        self.cast: list[tuple[Tensor, Tensor]] = []  # (result, what was made), of `cast`
        self.launches: list[Launch] = []
        self.places: dict[int, int] = {}  # of args, then made, by address
        for place, t in enumerate(args):
            if isinstance(t, Tensor):
                self.places.setdefault(t.data_ptr(), place)
        self.refused = False
        self.hooked = False  # holds a Triton launch, which profilers may want to hear of

    def refuse(self) -> None:
        self.refused = True

    def own(self, t: Tensor) -> Tensor:
        """t, which this call has just made."""
        self.places.setdefault(t.data_ptr(), len(self.args) + len(self.made))
        self.made.append(t)
        return t

    def add(self, launch: Launch, tensors: list[tuple[int, Tensor]]) -> None:
        """A launch whose data holds the addresses of tensors at (offset, tensor)."""
        slots = []
        for at, t in tensors:
            address = t.data_ptr()
            if address == 0:
                continue  # an empty tensor
            place = self.places.get(address)
            if place is None:
                return self.refuse()  # a copy made on the way
            slots.append((at, place))
        self.launches.append(launch._replace(slots=tuple(slots)))


_local = threading.local()
recordings = 0  # tapes that are running, in all threads


def tape() -> Tape | None:
    """This thread's running tape."""
    return getattr(_local, "tape", None)


_count = threading.Lock()


class recording:
    """`with recording(args) as tape`: what this thread's calls allocate and launch goes to the tape; not nested."""

    def __init__(self, args: tuple):
        self.tape = Tape(args)

    def __enter__(self) -> Tape:
        global recordings
        self.outer = tape()
        if self.outer is not None:
            self.outer.refuse()
        _local.tape = self.tape
        with _count:
            recordings += 1
        return self.tape

    def __exit__(self, *error) -> None:
        global recordings
        _local.tape = self.outer
        with _count:
            recordings -= 1


def refuse() -> None:
    """What the running tape holds is not all that this call writes: it is not to be repeated."""
    running = tape()
    if running is not None:
        running.refuse()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, known to the running tape."""
    made = torch.empty(shape, dtype=dtype, device=device)
    running = tape()
    return made if running is None else running.own(made)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, known to the running tape: a repeated call fills it before it launches anything."""
    made = torch.zeros(shape, dtype=dtype, device=device)
    running = tape()
    if running is not None:
        running.zeroed.append(len(running.made))
        running.own(made)
    return made


def copied(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in dtype, a new tensor; of an argument, known to the running tape: a repeated call copies it before it launches anything."""
    made = t.to(dtype, copy=True)
    running = tape()
    if running is not None:
        place = next((i for i, argument in enumerate(running.args) if argument is t), None)
        if place is not None:
            running.copied[len(running.made)] = place
            running.own(made)
    return made


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t, made by this call and written already, in dtype, as one of its results: a repeated call does the same behind its launches."""
    result = t.to(dtype)
    running = tape()
    if running is not None and result is not t:
        running.cast.append((result, t))
    return result


# --- Triton's compiled kernels ---

_TRITON = ("3.6", "3.7", "3.8", "3.9")  # releases whose kernels take their parameters, then two scratch pointers
_SIZES = {"i32": "i", "i64": "q", "u32": "I", "u64": "Q", "i1": "b", "i8": "b", "i16": "h", "u1": "B", "u8": "B", "u16": "H", "fp32": "f"}


@functools.cache
def _triton_is_known() -> bool:
    import triton

    return torch.version.hip is None and triton.__version__.startswith(tuple([f"{release}." for release in _TRITON]))


class Parameters(NamedTuple):
    """How a compiled kernel's parameters lie in memory."""

    layout: struct.Struct
    places: tuple  # (position among the values, offset, whether it is a pointer), in order
    offsets: tuple  # of all parameters, the scratch pointers too


def parameters_of(compiled) -> Parameters | None:
    """None for a kernel whose launch is left to Triton."""
    if not _triton_is_known():  # nor what its metadata holds
        return None
    m = compiled.metadata
    plain = m.num_ctas == 1 and not m.launch_cooperative_grid and m.global_scratch_size == 0 and m.profile_scratch_size == 0
    sanitized = bool(getattr(m, "instrumentation_mode", ""))  # from Triton 3.8 on one of the sanitizers adds parameters
    if sanitized or not plain:
        return None
    letters, places, offsets = "@", [], []
    for i, kind in enumerate(compiled.src.signature.values()):
        if kind == "constexpr":
            continue
        letter = "Q" if kind[0] == "*" else _SIZES.get(kind)
        if letter is None:
            return None
        at = struct.calcsize(letters + "0" + letter)  # aligned
        letters += letter
        places.append((i, at, kind[0] == "*"))
        offsets.append(at)
    first = struct.calcsize(letters + "0Q")
    return Parameters(struct.Struct(letters + "QQ"), tuple(places), (*offsets, first, first + 8))


def triton_launch(compiled, found: Parameters | None, grid: tuple, values: Sequence) -> tuple[Launch, list[tuple[int, Tensor]]] | None:
    """A launch of a compiled kernel and the tensors whose addresses it holds, as `Tape.add` takes them; None where Triton alone
    may launch it. found: `parameters_of` it; values: all arguments, constexprs included."""
    if found is None or len(compiled.src.signature) != len(values):
        return None
    numbers, tensors = [], []
    for i, at, pointer in found.places:
        value = values[i]
        if pointer:
            if not isinstance(value, Tensor):
                return None
            tensors.append((at, value))
            value = value.data_ptr()
        numbers.append(value)
    m = compiled.metadata
    data = found.layout.pack(*numbers, 0, 0)
    return Launch(compiled.function, grid, 32 * m.num_warps, (1, 1, 1), m.shared, bool(m.launch_pdl), data, found.offsets, ()), tensors


def record_triton(compiled, grid: tuple, values: Sequence) -> None:
    """Put a launch of Triton's that has just happened on the running tape. values: all arguments, constexprs included."""
    running = tape()
    if running is not None:
        record(triton_launch(compiled, parameters_of(compiled), grid, values))


def record(launched: tuple[Launch, list[tuple[int, Tensor]]] | None) -> None:
    """The same, of `triton_launch`'s."""
    running = tape()
    if running is None:
        return
    if launched is None:
        return running.refuse()
    running.hooked = True
    grid = launched[0].grid
    if grid[0] * grid[1] * grid[2]:
        running.add(*launched)


@functools.cache
def _triton_runtime():
    from triton import knobs

    return knobs.runtime


def triton_hooks() -> bool:
    """Whether a profiler wants to hear of Triton's launches: in a chain of calls, or in the chain's place."""
    runtime = _triton_runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
