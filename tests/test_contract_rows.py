"""Every promise and every known fault has tests that exist, and most of them run without a GPU."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from contract_rows import FAULTS, ON_GPU, PROMISES

HERE = Path(__file__).parent


@functools.cache
def functions_of(stem: str) -> dict[str, bool]:
    """{test function: whether it needs a GPU} of a test file."""
    tree = ast.parse((HERE / f"test_{stem}.py").read_text(encoding="utf-8"))
    marks = [ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    whole = any("mark.gpu" in mark for mark in marks)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return {f.name: whole or any("mark.gpu" in ast.unparse(d) for d in f.decorator_list) for f in functions}


@pytest.mark.parametrize("row", [*PROMISES, *FAULTS])
def test_its_tests_exist(row):
    *names, last = {**PROMISES, **FAULTS}[row]
    names = names if last == ON_GPU else [*names, last]
    assert names
    need_gpu = []
    for name in names:
        stem, function = name.split("::")
        assert function in functions_of(stem), f"tests/test_{stem}.py has no {function}"
        need_gpu.append(functions_of(stem)[function])
    assert all(need_gpu) == (last == ON_GPU), "a row says that it needs a GPU where all of its tests do, and only there"


def test_no_row_is_there_twice():
    numbers = [n for row in FAULTS for n in row.split(":")[0].split(", ")]
    assert len(numbers) == len(set(numbers)) and numbers == sorted(numbers, key=int)
