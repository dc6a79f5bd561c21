"""`python -m grouped_lora_ops`: its commands, and what an unknown or failing one says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from grouped_lora_ops import __main__ as entry
from grouped_lora_ops import __version__

ROOT = Path(__file__).parents[1]


def test_without_a_command_all_of_them_are_named(capsys):
    assert entry.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in entry.COMMANDS)


def test_the_version(capsys):
    assert entry.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_an_unknown_command_is_an_error_that_names_the_others(capsys):
    assert entry.main(["docter"]) == 2
    assert "there is no command 'docter'; there are " in capsys.readouterr().err


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_has_a_module_that_explains_itself(name, capsys):
    module = importlib.import_module(f"grouped_lora_ops.{entry.COMMANDS[name][0]}")
    assert callable(module.add_arguments) and callable(module.run) and module.__doc__
    with pytest.raises(SystemExit) as done:
        entry.main([name, "--help"])
    assert done.value.code == 0 and f"{entry.PROG} {name}" in capsys.readouterr().out


def test_an_error_is_one_sentence_and_no_traceback(monkeypatch, capsys):
    doctor = importlib.import_module("grouped_lora_ops.doctor")

    def fails(options):
        raise FileNotFoundError("nothing.json does not exist")

    monkeypatch.setattr(doctor, "run", fails)
    assert entry.main(["doctor"]) == 2
    assert capsys.readouterr().err == f"{entry.PROG} doctor: nothing.json does not exist\n"


def test_a_command_imports_no_other(tmp_path):
    code = (
        "import sys, grouped_lora_ops.__main__ as m; m.main(['doctor', '--json']); "
        "sys.exit(any(n in sys.modules for n in ('matplotlib', 'grouped_lora_ops.report', 'grouped_lora_ops.tune')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f'"{sys.executable}" -m grouped_lora_ops doctor --json | head -1',
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "{\n" and done.stderr == ""
