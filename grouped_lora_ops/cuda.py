"""The kernels of csrc/: found or compiled, loaded on a device, launched on torch's current stream.

A cubin comes from the first of these that has one: the package (`cubins/`, where setup.py found nvcc); the disk cache
(GROUPED_LORA_CACHE_DIR, else ~/.cache/grouped_lora_ops); NVRTC through CuPy; nvcc on PATH. Where none has, `module` returns
None, `why_not` says why in one sentence, and the caller uses its Triton kernel.

Nothing is loaded or compiled inside a stream capture, and nothing at import.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import _builds, driver

PACKAGE = Path(__file__).parent
_MAGIC = b"grouped_lora_ops cubin 1\n"  # a cached file: this, the sha256 of the rest, the cubin


class Compiler(NamedTuple):
    name: str
    version: str  # part of the cache key
    compile: Callable[[Path, str, str], bytes]  # (csrc, stem, arch) → cubin; any exception is a reason


# --- where cubins come from ---


def packaged(stem: str, arch: str, key: str) -> bytes | None:
    """The package's cubin, if it was made from the sources that are here now and is whole."""
    folder = PACKAGE / "cubins"
    try:
        entry = json.loads((folder / _builds.INDEX).read_text())[f"{stem}.{arch}"]
        cubin = (folder / f"{stem}.{arch}.cubin").read_bytes()
    except (OSError, ValueError, KeyError):
        return None
    whole = entry["source"] == key and entry["sha256"] == hashlib.sha256(cubin).hexdigest()
    return cubin if whole else None


def cache_folder() -> Path | None:
    """Where compiled cubins are kept; None where there is no home to keep them in."""
    chosen = os.environ.get("GROUPED_LORA_CACHE_DIR")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "grouped_lora_ops"
    except RuntimeError:
        return None


def _cached(path: Path | None) -> bytes | None:
    try:
        data = path.read_bytes() if path is not None else b""
    except OSError:
        return None
    head, cubin = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    return cubin if cubin and head == _MAGIC + hashlib.sha256(cubin).digest() else None


def _keep(path: Path | None, cubin: bytes) -> None:
    """Write under a temporary name, then rename: another process sees the whole file or none. A read-only disk is no error."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


def _nvrtc(csrc: Path, stem: str, arch: str) -> bytes:
    from cupy.cuda import nvrtc  # 0.4 s, so only to compile

    files = _builds.headers(csrc)
    text = (csrc / f"{stem}.cu").read_text()
    contents, names = [f.read_bytes() for f in files], [f.name.encode() for f in files]
    program = nvrtc.createProgram(text, f"{stem}.cu", contents, names)
    try:
        nvrtc.compileProgram(program, (*_builds.OPTIONS, f"--gpu-architecture={arch}"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(_builds.first_error(nvrtc.getProgramLog(program)) or str(error)) from None
    finally:
        nvrtc.destroyProgram(program)


def _nvcc(path: str) -> Callable[[Path, str, str], bytes]:
    def compile(csrc: Path, stem: str, arch: str) -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch) / f"{stem}.cubin"
            _builds.nvcc(path, csrc / f"{stem}.cu", arch, output)
            return output.read_bytes()

    return compile


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def compilers() -> Iterator[Compiler]:
    """The compilers of this machine, best first: NVRTC needs 0.1 s where nvcc needs 1 to 4. Nothing is imported to ask."""
    if importlib.util.find_spec("cupy") is not None:
        names = ("cupy-cuda13x", "cupy-cuda12x", "cupy", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
        versions = [f"{name} {version}" for name in names if (version := _installed(name))]
        yield Compiler("NVRTC", ", ".join(versions), _nvrtc)
    path = shutil.which("nvcc")
    if path is not None:
        run = subprocess.run([path, "--version"], capture_output=True, text=True)
        yield Compiler("nvcc", run.stdout, _nvcc(path))


def cubins(stem: str, arch: str, reasons: list[str]) -> Iterator[tuple[str, bytes]]:
    """(where from, cubin) for a build like "sm_90a", each way in turn; what stood in a way's way is added to reasons."""
    csrc = _builds.sources(PACKAGE)
    try:
        key = _builds.source_key(csrc, stem, arch)
    except OSError as error:
        reasons.append(f"no source ({error})")
        return
    cubin = packaged(stem, arch, key)
    if cubin is not None:
        yield "package", cubin
    folder, found = cache_folder(), False
    for compiler in compilers():
        found = True
        name = hashlib.sha256(f"{key}\0{compiler.name}\0{compiler.version}".encode()).hexdigest()[:32]
        path = None if folder is None else folder / f"{stem}.{arch}.{name}.cubin"
        cubin = _cached(path)
        if cubin is not None:
            yield "cache", cubin
        try:
            cubin = compiler.compile(csrc, stem, arch)
        except Exception as error:  # a broken CuPy, a missing host compiler, a full disk: the next way may do
            reasons.append(f"{compiler.name}: {error}")
            continue
        _keep(path, cubin)
        yield compiler.name, cubin
    if not found:
        reasons.append("no packaged build, and neither CuPy's NVRTC (pip install cupy-cuda13x) nor nvcc to make one")


# --- loaded modules ---


def _not_inside_a_capture(op: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"grouped_lora.{op}: a kernel for this shape is not loaded yet and nothing is compiled inside a CUDA "
            "graph capture; prepare the shape with grouped_lora_ops.warmup(...) or call the op once outside the "
            "capture, then capture again."
        )


class Module:
    """A cubin loaded on one device. `origin` says where it came from: package, cache, NVRTC or nvcc.

    CUDA may load a kernel only when it is first asked for, so inside a capture an unknown one is refused.
    """

    def __init__(self, handle: int, origin: str):
        self.handle, self.origin = handle, origin
        self._functions: dict[tuple, int] = {}
        self._shared: dict[str, int] = {}  # the most dynamic shared memory that each kernel was allowed so far
        self._constants: dict[str, int] = {}
        self._asking = threading.Lock()  # for what is asked first: of two threads the one that wants less may not have the last word

    def function(self, op: str, name: str, shared: int = 0, wide_cluster: bool = False) -> int:
        """The handle of a kernel, allowed `shared` bytes of dynamic shared memory and clusters of more than 8 blocks."""
        key = (name, shared, wide_cluster)
        found = self._functions.get(key)
        if found is not None:
            return found
        _not_inside_a_capture(op)
        with self._asking:
            lib, out = driver.library(), ctypes.c_void_p()
            driver.check(lib.cuModuleGetFunction(ctypes.byref(out), self.handle, name.encode()), f"no kernel {name}")
            found = out.value or 0
            if hasattr(lib, "cuFuncLoad"):  # from CUDA 12.4 on
                driver.check(lib.cuFuncLoad(ctypes.c_void_p(found)), f"loading {name}")
            if shared > max(48 << 10, self._shared.get(name, 0)):  # beyond 48 KB it must be asked for; less would take it away again
                code = lib.cuFuncSetAttribute(found, driver._MAX_DYNAMIC_SHARED, shared)
                driver.check(code, f"{shared} bytes of shared memory for {name}")
                self._shared[name] = shared
            if wide_cluster:
                driver.check(lib.cuFuncSetAttribute(found, driver._NON_PORTABLE_CLUSTER, 1), f"a wide cluster for {name}")
            self._functions[key] = found
        return found

    def constant(self, op: str, name: str) -> int:
        """The value of an `extern "C" __device__ const int`, copied from the device the first time."""
        found = self._constants.get(name)
        if found is not None:
            return found
        _not_inside_a_capture(op)
        address, size, value = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int32()
        lib = driver.library()
        code = lib.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self.handle, name.encode())
        driver.check(code, f"no constant {name}")
        driver.check(lib.cuMemcpyDtoH_v2(ctypes.byref(value), address, 4), f"reading {name}")
        return self._constants.setdefault(name, value.value)


_modules: dict[tuple[str, int], Module | str] = {}  # (stem, device) → the module, or why there is none
_loading = threading.Lock()


@functools.cache
def arch_of(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _load(stem: str, device: int) -> Module | str:
    arch = arch_of(device)
    build = _builds.build_for(arch)
    reasons: list[str] = []
    try:
        driver.ensure_context()
    except OSError as error:
        reasons.append(f"no driver ({error})")
    if build is None:
        reasons.append(f"the kernels are built for {', '.join(_builds.ARCHS)} only")
    if not reasons:
        for origin, cubin in cubins(stem, build, reasons):
            handle = ctypes.c_void_p()
            code = driver.library().cuModuleLoadData(ctypes.byref(handle), cubin)
            if code == 0:
                return Module(handle.value or 0, origin)
            reasons.append(f"the driver refused the cubin from {origin} (CUDA error {code})")
    return f"grouped_lora: no CUDA kernels of {stem} on {arch}, Triton's are used: {'; '.join(reasons)}."


def module(op: str, stem: str, device: int | None) -> Module | None:
    """The kernels of csrc/<stem>.cu on a device, which must be the current one; None where they cannot be had.

    Loads, and compiles where it must, at the first call. RuntimeError in place of that inside a stream capture. device
    None, that of CPU tensors in Triton's interpreter, has none.
    """
    if device is None:
        return None
    found = _modules.get((stem, device))
    if found is None:
        _not_inside_a_capture(op)
        with _loading:
            found = _modules.get((stem, device))
            if found is None:
                found = _modules[stem, device] = _load(stem, device)
    if isinstance(found, str):
        return None
    driver.ensure_context()  # in a thread of its own torch makes none for device 0, and a module is asked nothing without (pytorch#195256)
    return found


def why_not(stem: str, device: int) -> str | None:
    """The sentence for a `module` that is None, once it was asked for; None where it is there."""
    found = _modules.get((stem, device))
    return found if isinstance(found, str) else None


def launch(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    layout: str,
    values: Sequence,
    *,
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    pdl: bool = False,
) -> None:
    """Launch a kernel whose one parameter is a plain struct, on the current stream of the current device.

    layout, values: the struct's fields as `driver.pack` takes them, pointers given as Tensors or None; a pointer's
    tensor must be one of the op's arguments (or a view from its start) or made by `driver.empty`, else the call is not
    prepared for repetition. cluster: (1, 1, 1) where the kernel itself names its cluster.
    """
    data, tensors = driver.pack(layout, values)
    one = driver.Launch(function, grid, threads, cluster, shared, pdl, data, (0,), ())
    driver.launch(one, driver.stream_of(torch.cuda.current_device()))
    tape = driver.tape()
    if tape is not None:
        tape.add(one, tensors)
