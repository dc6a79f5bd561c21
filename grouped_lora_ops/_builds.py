"""How csrc/*.cu becomes cubins: architectures, options, names and keys. Standard library only: setup.py loads this file
by its path, before torch is there; cuda.py uses it at run time.

    python grouped_lora_ops/_builds.py sm_90a …

puts cubins into a checkout, as a wheel has them; they are used as long as the sources stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # what a wheel carries
OPTIONS = ("--std=c++17",)  # understood by nvcc and NVRTC alike
INDEX = "index.json"  # beside packaged cubins: {"delta.sm_90a": {"source": key, "sha256": …}}


def build_for(arch: str) -> str | None:
    """The build that runs on a GPU: "sm_89" → "sm_80" (the same major version), "sm_90" → "sm_90a"; None: there is none."""
    number = int(re.sub(r"\D", "", arch))
    if 80 <= number < 90:
        return "sm_80"
    return {90: "sm_90a", 100: "sm_100a", 120: "sm_120", 121: "sm_120"}.get(number)


def sources(package: Path) -> Path:
    """csrc: inside an installed package, beside the package in a checkout."""
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def stems(csrc: Path) -> list[str]:
    return sorted([path.stem for path in csrc.glob("*.cu")])


def headers(csrc: Path) -> list[Path]:
    return sorted(csrc.glob("*.cuh"))


def source_key(csrc: Path, stem: str, arch: str) -> str:
    """What a cubin was made from: source, headers, options, architecture. OSError where the source is missing."""
    digest = hashlib.sha256(json.dumps([stem, arch, OPTIONS]).encode())
    for path in (csrc / f"{stem}.cu", *headers(csrc)):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def nvcc(compiler: str, source: Path, arch: str, output: Path, *more: str) -> str:
    """Compile source to a cubin; returns what nvcc said. RuntimeError with its first error where it failed."""
    code = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    command = [compiler, *OPTIONS, code, "-cubin", "-o", str(output), *more, str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(first_error(run.stdout + run.stderr) or f"nvcc ended with status {run.returncode}")
    return run.stdout + run.stderr


def first_error(log: str) -> str:
    """The first line of a compiler's log that speaks of an error, else its first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def make_cubins(compiler: str, csrc: Path, archs: list[str], folder: Path) -> None:
    """One cubin per source and architecture, and the index that says what each was made from."""
    folder.mkdir(exist_ok=True)

    def make(job):
        stem, arch = job
        output = folder / f"{stem}.{arch}.cubin"
        try:
            nvcc(compiler, csrc / f"{stem}.cu", arch, output)
        except RuntimeError as error:  # an nvcc too old for an architecture: it is compiled at first use
            print(f"no cubin of {stem} for {arch}: {error}")
            return None
        key = source_key(csrc, stem, arch)
        return f"{stem}.{arch}", {"source": key, "sha256": hashlib.sha256(output.read_bytes()).hexdigest()}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(make, [(stem, arch) for stem in stems(csrc) for arch in archs]))
    (folder / INDEX).write_text(json.dumps(dict(filter(None, made)), indent=1))


if __name__ == "__main__":
    found = shutil.which("nvcc")
    if found is None:
        sys.exit("nvcc is not on PATH")
    package = Path(__file__).resolve().parent
    make_cubins(found, sources(package), sys.argv[1:] or list(ARCHS), package / "cubins")
