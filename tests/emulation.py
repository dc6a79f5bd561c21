"""Kernels of csrc/ on the CPU: their source made C++, and compiled with the headers of this folder in the place of CUDA's."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest


def replaced(text: str, *edits: tuple[str, str, int]) -> str:
    """text with every (pattern, by, times) done: what is not plain C++ occurs just so often."""
    for pattern, by, times in edits:
        text, found = re.subn(pattern, lambda _, by=by: by, text)
        assert found == times, pattern
    return text


def compiled(folder: Path, stem: str, text: str, names: Iterable[str] = ()) -> ctypes.CDLL:
    """A library of `text`, whose functions run_<name> return what went wrong."""
    (folder / f"{stem}.cpp").write_text(text)
    # no fma but those that the source asks for: what rounds twice on the GPU must do so here
    # -O1: a third less to compile than -O2, and what runs is no slower
    command = ["g++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", folder / f"{stem}.so", folder / f"{stem}.cpp"], check=True)
    library = ctypes.CDLL(str(folder / f"{stem}.so"))
    for name in names:
        getattr(library, f"run_{name}").restype = ctypes.c_char_p
    return library


def needs_compiler() -> None:
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
