"""Finding, compiling and loading the kernels of csrc/, without a GPU: compilers and the driver are stand-ins where one is missing."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import fake_gpu
import pytest
import torch

from grouped_lora_ops import _builds, cuda, driver, launch_linear
from grouped_lora_ops.ops import prepared

ROOT = Path(__file__).parents[1]
NVCC = shutil.which("nvcc")
STEMS = _builds.stems(ROOT / "csrc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
SOURCE = """#include "probe.cuh"
struct Params { const float *x; float *y; int n; };
extern "C" __device__ const int shared_probe = 1234;
extern "C" __global__ void probe(const __grid_constant__ Params p) { if (threadIdx.x < p.n) p.y[threadIdx.x] = FACTOR * p.x[threadIdx.x]; }
"""


class Driver(fake_gpu.FakeGpu):
    """libcuda with modules. `refused`: images it does not load."""

    def __init__(self):
        super().__init__()
        self.images, self.attributes, self.refused = [], [], ()

    def cuModuleLoadData(self, out, image):
        if image in self.refused:
            return 218
        self.images.append(image)
        out._obj.value = 0xA000 + len(self.images)
        return 0

    def cuModuleGetFunction(self, out, module, name):
        if name != b"probe":
            return 500
        out._obj.value = module + 0x100
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))
        return 0

    def cuModuleGetGlobal_v2(self, address, size, module, name):
        address._obj.value, size._obj.value = 0xB0, 4
        return 0 if name == b"shared_probe" else 500

    def cuMemcpyDtoH_v2(self, out, address, size):
        assert (address.value, size) == (0xB0, 4)
        out._obj.value = 1234
        return 0


class House:
    """A package with one kernel, a cache, and whatever compilers a test puts there."""

    def __init__(self, tmp_path, monkeypatch):
        self.package, self.cache = tmp_path / "package", tmp_path / "cache"
        self.csrc = self.package / "csrc"
        self.csrc.mkdir(parents=True)
        (self.csrc / "probe.cu").write_text(SOURCE)
        (self.csrc / "probe.cuh").write_text("#define FACTOR 2.0f\n")
        self.compiled, self.compilers, self.arch = [], [self.compiler()], "sm_90"
        self.driver = Driver()
        monkeypatch.setattr(cuda, "PACKAGE", self.package)
        monkeypatch.setattr(cuda, "compilers", lambda: iter(self.compilers))
        monkeypatch.setattr(cuda, "arch_of", lambda device: self.arch)
        monkeypatch.setattr(cuda, "_modules", {})
        monkeypatch.setattr(driver, "library", lambda: self.driver)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setenv("GROUPED_LORA_CACHE_DIR", str(self.cache))

    def compiler(self, name="NVRTC", version="1", error=None):
        def compile(csrc, stem, arch):
            if error:
                raise error
            self.compiled.append((name, version, arch))
            text = (csrc / f"{stem}.cu").read_text() + "".join(path.read_text() for path in _builds.headers(csrc))
            return f"{name} {version} {arch} {text}".encode()

        return cuda.Compiler(name, version, compile)

    def load(self, fresh=True, device=0):
        """The module as a new process loads it."""
        if fresh:
            cuda._modules.clear()
        return cuda.module("delta", "probe", device)

    def pack(self, cubin=b"packaged", **changes):
        """Put a cubin into the package, with the index that setup.py writes."""
        folder = self.package / "cubins"
        folder.mkdir(exist_ok=True)
        key = _builds.source_key(self.csrc, "probe", "sm_90a")
        entry = {"source": key, "sha256": hashlib.sha256(cubin).hexdigest(), **changes}
        (folder / _builds.INDEX).write_text(json.dumps({"probe.sm_90a": entry}))
        (folder / "probe.sm_90a.cubin").write_bytes(cubin)


@pytest.fixture
def house(tmp_path, monkeypatch):
    return House(tmp_path, monkeypatch)


# --- where a cubin comes from ---


def test_the_package_comes_first_then_the_cache_then_a_compiler(house):
    assert house.load().origin == "NVRTC" and len(house.compiled) == 1
    assert house.load().origin == "cache" and len(house.compiled) == 1
    house.pack()
    assert house.load().origin == "package" and house.driver.images[-1] == b"packaged"
    assert len(house.compiled) == 1


@pytest.mark.parametrize("changes", [{"source": "0" * 64}, {"sha256": "0" * 64}], ids=["other sources", "broken"])
def test_a_packaged_cubin_of_other_sources_or_a_broken_one_is_left(house, changes):
    house.pack(**changes)
    assert house.load().origin == "NVRTC"


def test_an_index_that_is_not_json_is_left(house):
    house.pack()
    (house.package / "cubins" / _builds.INDEX).write_text("{")
    assert house.load().origin == "NVRTC"


def test_a_cubin_that_the_driver_refuses_is_not_the_end(house):
    house.pack()
    house.driver.refused = (b"packaged",)
    assert house.load().origin == "NVRTC"


def test_whatever_a_cubin_is_made_from_is_in_its_key(house, monkeypatch):
    house.load()
    (house.csrc / "probe.cuh").write_text("#define FACTOR 3.0f\n")
    house.load()
    (house.csrc / "probe.cu").write_text(SOURCE + "\n")
    house.load()
    house.compilers = [house.compiler(version="2")]
    house.load()
    house.compilers = [house.compiler(name="nvcc", version="2")]
    house.load()
    house.arch = "sm_86"
    house.load()
    monkeypatch.setattr(_builds, "OPTIONS", ("--std=c++20",))
    house.load()
    assert len(house.compiled) == 7 == len(list(house.cache.iterdir()))
    assert [arch for _, _, arch in house.compiled][-2:] == ["sm_80", "sm_80"]
    house.load()
    assert len(house.compiled) == 7


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"\x7fELF" + b, lambda b: b[:-9] + b"x" + b[-8:]])
def test_a_damaged_cache_file_is_made_anew(house, damage):
    house.load()
    (path,) = house.cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert house.load().origin == "NVRTC" and len(house.compiled) == 2
    assert path.read_bytes() == whole and house.driver.images[0] == house.driver.images[1]


def test_a_cache_that_cannot_be_written_is_no_error(house, monkeypatch, tmp_path):
    house.cache.write_text("a file where the folder should be")
    assert house.load().origin == "NVRTC" and house.load().origin == "NVRTC"
    monkeypatch.delenv("GROUPED_LORA_CACHE_DIR")

    def no_home():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert house.load().origin == "NVRTC"
    monkeypatch.setenv("GROUPED_LORA_CACHE_DIR", str(tmp_path / "full"))

    def no_space(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    assert house.load().origin == "NVRTC"
    assert list((tmp_path / "full").iterdir()) == []


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("GROUPED_LORA_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cuda.cache_folder() == tmp_path / ".cache" / "grouped_lora_ops"


# --- where there is none ---


def test_without_any_compiler_one_sentence_says_so(house):
    house.compilers = []
    assert house.load() is None
    assert cuda.why_not("probe", 0) == (
        "grouped_lora: no CUDA kernels of probe on sm_90, Triton's are used: no packaged build, and neither CuPy's NVRTC "
        "(pip install cupy-cuda13x) nor nvcc to make one."
    )
    house.compilers = [house.compiler()]
    assert house.load(fresh=False) is None, "not tried again at every call"


def test_compilers_that_fail_are_named(house):
    house.compilers = [house.compiler(error=RuntimeError("libnvrtc.so.13 not found")), house.compiler("nvcc")]
    assert house.load().origin == "nvcc"
    house.compilers[1] = house.compiler("nvcc", version="2", error=OSError("no host compiler"))
    assert house.load() is None
    assert cuda.why_not("probe", 0).endswith("NVRTC: libnvrtc.so.13 not found; nvcc: no host compiler.")


def test_cpu_tensors_have_no_cuda_kernels(house):
    assert house.load(device=None) is None and not house.compiled


def test_missing_sources_and_a_missing_driver(house, monkeypatch):
    (house.csrc / "probe.cu").unlink()
    assert house.load() is None
    assert "no source (" in cuda.why_not("probe", 0)

    def no_library():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "library", no_library)
    assert house.load() is None
    assert "no driver (libcuda.so.1: cannot" in cuda.why_not("probe", 0)


@pytest.mark.parametrize("arch", ["sm_75", "sm_103", "sm_110", "sm_130"])
def test_a_gpu_without_a_build(house, arch):
    house.arch = arch
    assert house.load() is None and not house.compiled
    assert f"on {arch}, Triton's are used: the kernels are built for sm_80, sm_90a, sm_100a, sm_120 only" in cuda.why_not("probe", 0)


def test_which_build_runs_on_which_gpu():
    builds = {"sm_80": "sm_80", "sm_86": "sm_80", "sm_89": "sm_80", "sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120", "sm_121": "sm_120"}
    assert {arch: _builds.build_for(arch) for arch in builds} == builds
    assert set(builds.values()) == set(_builds.ARCHS)


def test_which_compilers_a_machine_has(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert list(cuda.compilers()) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "cupy" or None)
    monkeypatch.setattr(cuda, "_installed", lambda name: "14.2.0" if name == "cupy-cuda13x" else None)
    (nvrtc,) = cuda.compilers()
    assert (nvrtc.name, nvrtc.version) == ("NVRTC", "cupy-cuda13x 14.2.0")


# --- loading ---


def test_nothing_is_loaded_inside_a_capture_and_the_capture_can_be_retried(house, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError) as error:
        house.load()
    assert str(error.value) == (
        "grouped_lora.delta: a kernel for this shape is not loaded yet and nothing is compiled inside a CUDA graph capture; "
        "prepare the shape with grouped_lora_ops.warmup(...) or call the op once outside the capture, then capture again."
    )
    assert not house.compiled and not house.driver.images
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    module = house.load()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert house.load(fresh=False) is module


def test_one_module_per_device_and_one_load_for_many_threads(house):
    modules, barrier = [], threading.Barrier(6)

    def work(device):
        barrier.wait()
        modules.append((device, house.load(fresh=False, device=device)))

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({id(m) for _, m in modules}) == 2 and len(house.driver.images) == 2
    assert len(house.compiled) == 1, "the second device finds the first one's cubin in the cache"


def test_a_thread_without_a_context_has_one_before_a_module_is_asked(house, monkeypatch):
    house.load()
    house.driver.context = 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(house.driver, "context", 0xC0 + device))
    assert house.load(fresh=False).function("delta", "probe") and house.driver.context == 0xC3
    house.driver.context = 0xC1
    house.load(fresh=False)
    assert house.driver.context == 0xC1, "one that is there stays"


def test_a_kernel_is_not_asked_for_the_first_time_inside_a_capture(house, monkeypatch):
    module = house.load()
    known = module.function("delta", "probe")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert module.function("delta", "probe") == known
    for ask in (lambda: module.function("delta", "probe", 100_000), lambda: module.constant("delta", "shared_probe")):
        with pytest.raises(RuntimeError, match=r"grouped_lora.delta: .*warmup"):
            ask()


def test_a_kernel_keeps_the_shared_memory_it_was_allowed(house):
    """Launches of one kernel differ in how much they take (csrc/plan.cu's by its sizes): a later, smaller one is no new limit."""
    module = house.load()
    for shared in (100_000, 60_000, 100_000, 120_000, 60_000):
        module.function("plan", "probe", shared=shared)
    assert [value for _, attribute, value in house.driver.attributes if attribute == 8] == [100_000, 120_000]


def test_of_two_threads_the_one_that_wants_more_shared_memory_has_it(house, monkeypatch):
    module, set_attribute, threads = house.load(), house.driver.cuFuncSetAttribute, []

    def slow(function, attribute, value):
        if value == 60_000:  # the other thread comes before this one's word has reached the driver
            threads.append(threading.Thread(target=module.function, args=("plan", "probe", 100_000)))
            threads[0].start()
            threads[0].join(0.2)
        return set_attribute(function, attribute, value)

    monkeypatch.setattr(house.driver, "cuFuncSetAttribute", slow)
    module.function("plan", "probe", 60_000)
    threads[0].join()
    assert [value for _, attribute, value in house.driver.attributes if attribute == 8] == [60_000, 100_000]


def test_functions_attributes_and_constants(house):
    module = house.load()
    small = module.function("delta", "probe", shared=48 << 10)
    assert not house.driver.attributes
    big = module.function("delta", "probe", shared=200_000, wide_cluster=True)
    assert house.driver.attributes == [(big, 8, 200_000), (big, 14, 1)]
    assert small == big == module.function("delta", "probe", shared=200_000, wide_cluster=True) and len(house.driver.attributes) == 2
    assert module.constant("delta", "shared_probe") == 1234 == module.constant("delta", "shared_probe")
    with pytest.raises(RuntimeError, match=r"no kernel other: made up \(CUDA error 500\)"):
        module.function("delta", "other")
    with pytest.raises(RuntimeError, match="no constant other"):
        module.constant("delta", "other")


@pytest.mark.parametrize("way", ["C", "ctypes"])
def test_an_op_made_of_cuda_kernels_is_repeated(house, monkeypatch, way):
    """A struct of pointers and sizes: the repetition fills in the pointers of new tensors, of scratch and of the result."""
    if way == "C" and driver._launcher is None:
        pytest.skip("csrc/launcher.c was not built")
    gpu = fake_gpu.install(monkeypatch, way)
    house.driver.cuLaunchKernelEx = gpu.cuLaunchKernelEx
    monkeypatch.setattr(driver, "library", lambda: house.driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    seen = []

    class Params(ctypes.Structure):
        _fields_ = [(n, ctypes.c_void_p) for n in ("x", "none", "scratch", "y")] + [("n", ctypes.c_int32), ("sizes", ctypes.c_int32 * 2)]

    gpu.run_kernel = lambda launch, parameters: seen.append((launch, Params.from_buffer_copy(ctypes.string_at(parameters[0], 48))))

    @prepared.prepared
    def op(x, sizes):
        y = driver.empty(x.shape, x.dtype, x.device)
        scratch = driver.empty((7,), torch.float32, x.device)
        function = cuda.module("delta", "probe", 0).function("delta", "probe", 100_000)
        values = (x.unsqueeze(1), None, scratch, y, x.numel(), *sizes)
        cuda.launch(function, (4, 1, 1), 256, "4P i 2i", values, cluster=(4, 1, 1), shared=100_000, pdl=True)
        return y

    tensors, results = [torch.zeros(3, 5) for _ in range(3)], []
    for x in tensors:
        results.append(op(x, [2, 3]))
        launch, p = seen[-1]
        assert (p.x, p.none, p.y, p.n, list(p.sizes)) == (x.data_ptr(), None, results[-1].data_ptr(), 15, [2, 3])
        assert p.scratch not in (p.x, p.y, None, 0)
        assert (launch.grid, launch.block, launch.shared) == ((4, 1, 1), (256, 1, 1), 100_000)
        assert launch.attributes == {4: (4, 1, 1), 6: (1, 0, 0)} and launch.stream == fake_gpu.STREAM
    assert len({r.data_ptr() for r in results}) == 3
    monkeypatch.setattr(cuda, "launch", None)  # the ordinary way is not taken any more
    op(tensors[0], [2, 3])
    with pytest.raises(TypeError):
        op(tensors[0], [3, 2])


def test_processes_that_start_at_once_share_a_cache(house, tmp_path):
    """Each compiles, renames into place and finds a whole file, whoever was first."""
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from grouped_lora_ops import cuda\n"
        "cuda.PACKAGE = Path(sys.argv[1])\n"
        "compiler = cuda.Compiler('NVRTC', '1', lambda csrc, stem, arch: b'x' * 3_000_000)\n"
        "cuda.compilers = lambda: iter([compiler])\n"
        "Path(sys.argv[2], str(os.getpid())).touch()\n"
        "while len(os.listdir(sys.argv[2])) < 2: time.sleep(0.001)\n"
        "for _ in range(20):\n"
        "    origin, cubin = next(cuda.cubins('probe', 'sm_90a', []))\n"
        "    assert cubin == b'x' * 3_000_000, origin\n"
        "    for path in cuda.cache_folder().glob('*.cubin'): path.unlink(missing_ok=True)\n"
        "next(cuda.cubins('probe', 'sm_90a', []))\n"
    )
    ready = tmp_path / "ready"
    ready.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(house.package), str(ready)]
    started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert [path.suffix for path in house.cache.iterdir()] == [".cubin"], "no temporary files are left"


def test_an_import_opens_no_driver_and_starts_no_compiler():
    code = (
        "import ctypes, subprocess\n"
        "open_library = ctypes.CDLL.__init__\n"
        "def guarded(self, name, *a, **k):\n"
        "    assert 'cuda' not in str(name), name\n"
        "    open_library(self, name, *a, **k)\n"
        "import torch\n"
        "ctypes.CDLL.__init__ = guarded\n"
        "subprocess.Popen.__init__ = None\n"
        "import grouped_lora_ops.cuda, sys\n"
        "assert not torch.cuda.is_initialized() and 'cupy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- setup.py ---


def build(tmp_path, archs, path=None):
    """`setup.py build` without torch; returns the built package and what was printed."""
    code = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'setup.py'; exec(compile(open('setup.py').read(), 'setup.py', 'exec'))"
    env = {**os.environ, "GROUPED_LORA_BUILD_ARCHS": archs}
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    out = tmp_path / "lib"
    code = code.replace("open('setup.py')", "open(__file__)").replace("import sys;", f"import sys; __file__ = {str(ROOT / 'setup.py')!r};")
    command = [sys.executable, "-c", code, "build", "--build-lib", str(out), "--build-temp", str(tmp_path / "temp")]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out / "grouped_lora_ops", run.stdout


def test_a_build_without_nvcc_carries_the_sources(tmp_path):
    package, _ = build(tmp_path, archs="")
    files = {path.name for path in (package / "csrc").iterdir()}
    assert files == {p.name for p in (ROOT / "csrc").iterdir() if p.suffix in (".cu", ".cuh")}
    assert not (package / "cubins").exists()
    assert _builds.sources(package) == package / "csrc" and _builds.sources(ROOT / "grouped_lora_ops") == ROOT / "csrc"
    if shutil.which("cc") and driver._launcher is not None:
        assert list(package.glob("_launcher.abi3.*"))


def test_a_build_with_nvcc_carries_cubins_that_the_loader_takes(tmp_path, monkeypatch):
    """With an nvcc that knows no sm_120: that one is left to the first use."""
    fake = tmp_path / "bin"
    fake.mkdir()
    nvcc = fake / "nvcc"
    nvcc.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "arch = [a for a in sys.argv if 'gencode' in a][0]\n"
        "if 'sm_120' in arch: sys.exit('nvcc fatal: Unsupported gpu architecture')\n"
        "open(sys.argv[sys.argv.index('-o') + 1], 'w').write(arch)\n"
    )
    nvcc.chmod(0o755)
    package, printed = build(tmp_path, archs="sm_90a sm_120", path=fake)
    monkeypatch.setattr(cuda, "PACKAGE", package)
    for stem in STEMS:
        assert cuda.packaged(stem, "sm_90a", _builds.source_key(ROOT / "csrc", stem, "sm_90a")) == b"-gencode=arch=compute_90a,code=sm_90a"
        assert cuda.packaged(stem, "sm_120", _builds.source_key(ROOT / "csrc", stem, "sm_120")) is None
        assert f"no cubin of {stem} for sm_120: nvcc fatal: Unsupported gpu architecture" in printed


# --- with nvcc ---


@needs_nvcc
def test_a_compile_of_our_own_is_loaded(house, monkeypatch):
    house.compilers = [cuda.Compiler("nvcc", "1", cuda._nvcc(NVCC))]
    assert house.load().origin == "nvcc"
    (image,) = house.driver.images
    assert image[:4] == b"\x7fELF" and image[18:20] == (190).to_bytes(2, "little") and b"probe" in image
    assert house.load().origin == "cache" and house.driver.images[1] == image
    (house.csrc / "probe.cuh").write_text("#error broken on purpose\n")
    assert house.load() is None
    assert re.search(r"nvcc: .*probe\.cuh.*error: .*broken on purpose", cuda.why_not("probe", 0))


@needs_nvcc
@pytest.mark.parametrize("arch", _builds.ARCHS)
@pytest.mark.parametrize("stem", STEMS)
def test_every_source_compiles_for_every_architecture_without_spills(tmp_path, stem, arch):
    said = _builds.nvcc(NVCC, ROOT / "csrc" / f"{stem}.cu", arch, tmp_path / "out.cubin", "-Xptxas", "-v")
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers and max(registers) <= 255 and len(frames) >= len(registers)
    names = re.findall(r"Function properties for (\w+)", said)
    spills = {name: int(frame[0]) for name, frame in zip(names, frames) if frame != ("0", "0", "0")}
    assert len(names) == len(frames) and spills.items() <= (SPILLS.items() if arch == "sm_90a" else set()), said
    assert "serialized" not in said, "wgmma, by ptxas (C7510, C7520): a product or a change of its sum stands behind a branch"
    assert_parameters_fit(stem, tmp_path / "out.cubin")
    if stem in MOST_REGISTERS:
        assert_for_hopper_alone(stem, (tmp_path / "out.cubin").read_bytes(), arch, registers)


def constant_in(cubin: bytes, name: str) -> int:
    """The value of an `extern "C" __device__ const int` as the cubin's ELF has it."""
    sections, size, count = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections + i * size) for i in range(count)]
    for _, kind, _, _, at, length, link, _, _, entry in headers:
        if kind != 2:  # a table of symbols
            continue
        for start in range(at, at + length, entry):
            text, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", cubin, start)
            begin = headers[link][4] + text
            if cubin[begin : cubin.index(b"\0", begin)] == name.encode():
                _, kind, _, _, offset, *_ = headers[section]
                zeros = kind == 8  # a section that takes no room
                return 0 if zeros else struct.unpack_from("<i", cubin, offset + value)[0]
    raise KeyError(name)


# bytes of a stack: a register or a few, once a block, of kernels that leave room for a second block, or have 512 threads
SPILLS = {"stream_64_32_64": 8, "stream_64_32_64_e4m3": 8, "stream_64_64_64_e4m3": 24}
# linear: 384 threads that have all registers of a multiprocessor; stream: 288 (e4m3: up to 512), and others beside them
MOST_REGISTERS = {"linear": 168, "stream": 168}


def assert_for_hopper_alone(stem: str, cubin: bytes, arch: str, registers: list[int]):
    """csrc/linear.cu, csrc/stream.cu: shared memory within a block's; elsewhere nothing."""
    hopper = arch == "sm_90a"
    assert constant_in(cubin, "available") == hopper
    assert max(registers) <= (MOST_REGISTERS[stem] if hopper else 16)
    names = set(re.findall(r"const int (shared_bytes\w*)", (ROOT / "csrc" / f"{stem}.cu").read_text()))
    for name in names:
        shared = constant_in(cubin, name)
        assert 0 < shared <= (launch_linear.STREAM_FIXED if stem == "stream" else 227 << 10) if hopper else shared == 0, name
    assert names


def assert_parameters_fit(stem, cubin):
    """The struct that ops/<stem>_cuda.py packs is as long as the one that the kernels take."""
    triton = importlib.util.find_spec("triton")
    if triton is None or importlib.util.find_spec(f"grouped_lora_ops.ops.{stem}_cuda") is None:
        return
    tool = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-elf", cubin], capture_output=True, text=True, check=True).stdout
    # the offset is not 0 where the struct is aligned to 64 bytes: constant memory has other things ahead of it
    sizes = {int(size, 16) for size in re.findall(r"Ordinal\s*:\s*0x0\s*Offset\s*:\s*0x\w+\s*Size\s*:\s*0x(\w+)", text)}
    layout = importlib.import_module(f"grouped_lora_ops.ops.{stem}_cuda").LAYOUT
    fields = "".join([letter * int(count or 1) for count, letter in re.findall(r"(\d*)(\w)", layout)])
    assert sizes == {len(driver.pack(layout, [None if letter == "P" else 0 for letter in fields])[0])}


def test_nvrtc_compiles_what_nvcc_compiles(house):
    pytest.importorskip("cupy")
    assert cuda._nvrtc(house.csrc, "probe", "sm_90a")[:4] == b"\x7fELF"
    (house.csrc / "probe.cuh").write_text("#error broken on purpose\n")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        cuda._nvrtc(house.csrc, "probe", "sm_90a")
