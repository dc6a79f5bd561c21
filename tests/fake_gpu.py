"""A GPU that is not there: libcuda's launch and context calls, answered in Python.

Launched kernels run in Triton's interpreter on the tensors whose addresses the launch's parameter bytes hold, so a wrong
pointer, stride or size in a prepared call gives a wrong result, as on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
from types import SimpleNamespace

import torch

from grouped_lora_ops import driver

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
DTYPES = {kind: dtype for dtype, kind in POINTERS.items()}
STREAM, INVALID_HANDLE = 0x57, 400
pointer = ctypes.POINTER


class FakeGpu:
    """Stands in for `driver.library()`. `launches`: what the driver was asked to launch, newest last."""

    def __init__(self):
        self.context, self.home = 0xC0, 0  # of the current device; of the tensors' device, where that is another
        self.pushed: list[int] = []
        self.owners: dict[int, int] = {}  # kernel → the context that it was loaded in
        self.launches: list[SimpleNamespace] = []
        self.kernels: dict[int, tuple] = {}  # handle → (kernel, kinds, constants)
        self.tensors: dict[int, torch.Tensor] = {}  # address → tensor
        self.errors: list[BaseException] = []
        self.fail_with, self.quiet = 0, False  # quiet: `triton` records without running
        self.run_kernel = self._interpret
        void = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, pointer(driver.Config), void, pointer(void), void)(self._launch)
        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, pointer(void))(self._get)
        self.cuCtxPushCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, void)(self._push)
        self.cuCtxPopCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, pointer(void))(self._pop)

    def cuGetErrorString(self, code, out):
        out._obj.value = b"made up"
        return 0

    def now(self) -> int:
        """The current context."""
        return self.pushed[-1] if self.pushed else self.context

    @contextlib.contextmanager
    def device_of(self, t):
        """`common.device_of` of tensors that lie on another device than the current one."""
        outer, self.context = self.context, self.home
        try:
            yield
        finally:
            self.context = outer

    def _get(self, out):
        out[0] = self.now()
        return 0

    def _push(self, context):
        self.pushed.append(context)
        return 0

    def _pop(self, out):
        out[0] = self.pushed.pop()
        return 0

    def _launch(self, config, function, parameters, extra):
        try:
            c = config.contents
            attributes = {c.attributes[i].id: tuple(c.attributes[i].dim) for i in range(c.count)}
            seen = SimpleNamespace(
                grid=tuple(c.grid), block=tuple(c.block), shared=c.shared, stream=c.stream, attributes=attributes,
                function=function, context=self.now(), values=[],
            )  # fmt: skip
            self.launches.append(seen)
            if self.fail_with:
                return self.fail_with
            if self.owners.setdefault(function, seen.context) != seen.context:
                return INVALID_HANDLE
            self.run_kernel(seen, parameters)
        except BaseException as error:  # ctypes would print and forget it
            self.errors.append(error)
            return 999
        return 0

    def _interpret(self, seen, parameters):
        kernel, kinds, constants = self.kernels[seen.function]
        numbers, values = iter(range(200)), []
        for i, kind in enumerate(kinds):
            if kind == "constexpr":
                values.append(constants[i])
            elif kind[0] == "*":
                address = ctypes.c_uint64.from_address(parameters[next(numbers)]).value
                t = self.tensors[address] if address else torch.empty(0, dtype=DTYPES[kind])
                values.append(t.view(torch.uint8) if kind == "*u8" else t)
                assert POINTERS[values[-1].dtype] == kind
            else:
                values.append(C_TYPES[kind].from_address(parameters[next(numbers)]).value)
        for _ in range(2):  # Triton's scratch pointers
            assert ctypes.c_uint64.from_address(parameters[next(numbers)]).value == 0
        seen.values = values
        kernel[seen.grid](*values)

    def triton(self, name, kernel, grid, args, constants, num_warps, num_stages, pdl=False):
        """`kernels.tile.launch` as on a GPU: runs the kernel and records the launch."""
        assert self.home in (0, self.now()), "a kernel is launched on another device than that of its tensors"
        if not self.quiet:
            kernel[grid](*args, *constants)
        values = (*args, *constants)
        annotations = [p.annotation for p in inspect.signature(kernel.fn).parameters.values()]
        kinds = [
            "constexpr" if v is None or i >= len(args) else POINTERS[v.dtype] if isinstance(v, torch.Tensor) else annotations[i]
            for i, v in enumerate(values)
        ]
        handle = 0xF000 + len(self.kernels)
        self.kernels[handle], self.owners[handle] = (kernel, kinds, values), self.now()
        metadata = SimpleNamespace(
            num_ctas=1, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0,
            launch_pdl=pdl, num_warps=num_warps, shared=1024 * num_stages,
        )  # fmt: skip
        source = SimpleNamespace(signature=dict(enumerate(kinds)))
        driver.record_triton(SimpleNamespace(metadata=metadata, src=source, function=handle), grid, values)


def install(monkeypatch, way: str) -> FakeGpu:
    """way: "C" or "ctypes", the two implementations of describe and run."""
    gpu = FakeGpu()
    if way == "ctypes":
        monkeypatch.setattr(driver, "_launcher", None)
        monkeypatch.setattr(driver, "describe", driver.describe_in_python)
    run = driver._launcher.run if way == "C" else driver.run_in_python

    def watched(call, stream, args, made):
        for t in (*args, *made):
            if isinstance(t, torch.Tensor):
                gpu.tensors[t.data_ptr()] = t
        code = run(call, stream, args, made)
        gpu.tensors.clear()
        if gpu.errors:
            raise gpu.errors.pop()
        return code

    monkeypatch.setattr(driver, "run", watched)
    monkeypatch.setattr(driver, "library", lambda: gpu)
    monkeypatch.setattr(driver, "stream_of", lambda device: STREAM)
    experts = [f"expert_{stem}" for stem in ("plan", "shrink", "expand", "delta", "linear", "gate_up", "rows", "wgrad")]
    for stem in ("shrink", "expand", "delta", "plan", "linear", "wgrad", "dequantize", *experts):
        monkeypatch.setattr(importlib.import_module(f"grouped_lora_ops.kernels.{stem}"), "launch", gpu.triton)
    return gpu
