"""bootstrap.py: which torch a machine gets, what is asked of pip, what a second run skips, how errors read."""

import importlib.util
import os
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "bootstrap.py"


@pytest.fixture
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_options_end_at_the_first_argument_of_python(bootstrap):
    options, rest = bootstrap.parse(["--venv", "v", "--extra=peft", "--extra", "cuda", "-m", "pytest", "--torch", "x"])
    assert options == {"venv": os.path.abspath("v"), "torch": "auto", "extra": ["peft", "cuda"]}
    assert rest == ["-m", "pytest", "--torch", "x"]


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--tor", "cpu"], "unknown option --tor; there are --venv DIR, --torch auto|cpu|cuda and --extra NAME."),
        (["--torch", "rocm", "x.py"], "--torch must be auto, cpu or cuda; got rocm."),
        (["--venv"], "--venv needs a value."),
    ],
)
def test_bad_options(bootstrap, capsys, argv, sentence):
    assert bootstrap.main(argv) == 1
    assert capsys.readouterr().err == f"bootstrap: {sentence}\n"


def test_python_versions(bootstrap, capsys):
    with pytest.raises(bootstrap.Failure, match=r"^Python 3\.9 is too old; use Python 3\.10 to 3\.13, for example"):
        bootstrap.check_python((3, 9, 18))
    bootstrap.check_python((3, 10, 0))
    bootstrap.check_python((3, 13, 9))
    assert capsys.readouterr().err == ""
    bootstrap.check_python((3, 14, 0))
    assert "newer than what this project is tested with" in capsys.readouterr().err


def test_torch_for_a_gpu_and_for_systems_without_cuda_builds_is_the_ordinary_one(bootstrap):
    for kind, system in [("cuda", "Linux"), ("cpu", "Darwin"), ("cpu", "Windows"), ("cuda", "Windows")]:
        attempts, warning = bootstrap.torch_attempts(kind, system, reachable=lambda: pytest.fail("no index is needed"))
        assert (attempts, warning) == ([["torch>=2.11"]], "")


def test_torch_without_a_gpu_is_a_cpu_build_first(bootstrap):
    attempts, warning = bootstrap.torch_attempts("cpu", "Linux", reachable=lambda: True)
    assert attempts[0] == ["torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert all("+cpu" in attempt[0] for attempt in attempts[:-1])
    assert attempts[-1] == ["torch>=2.11"]
    assert warning.startswith("no CPU build of torch is to be had (pip finds none there")

    attempts, warning = bootstrap.torch_attempts("cpu", "Linux", reachable=lambda: False)
    assert attempts[0] == [
        "torch==2.13.0+cpu",
        "--retries",
        "1",
    ]  # a wheel folder or a mirror of the user's may have it
    assert "https" not in str(attempts)
    assert warning.startswith("no CPU build of torch is to be had (download.pytorch.org cannot be reached")


def test_versions(bootstrap):
    assert [bootstrap.new_enough(v) for v in ("2.10.0", "2.11.0", "2.13.0+cpu", "3.0.0a0+git12", "1.13.1")] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_an_index_that_does_not_answer_is_not_reachable(bootstrap):
    assert not bootstrap.index_reachable("http://127.0.0.1:9/", timeout=2)
    assert not bootstrap.index_reachable("https://host.invalid/", timeout=2)


def test_a_certificate_is_left_to_pip(bootstrap, monkeypatch):
    def urlopen(url, timeout):
        raise urllib.error.URLError(bootstrap.ssl.SSLCertVerificationError("self-signed"))

    monkeypatch.setattr(bootstrap.urllib.request, "urlopen", urlopen)
    assert bootstrap.index_reachable()


@pytest.mark.parametrize(
    "script, expected",
    [("echo 'GPU 0: NVIDIA H200 (UUID: x)'", True), ("echo 'No devices found'", False), ("exit 9", False)],
)
@pytest.mark.skipif(os.name == "nt", reason="a shell script stands in for nvidia-smi")
def test_gpu_visible_asks_nvidia_smi(bootstrap, monkeypatch, tmp_path, script, expected):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert bootstrap.gpu_visible() is expected


class Machine:
    """A machine whose pip knows some requirements; records what is asked of it."""

    def __init__(self, bootstrap, monkeypatch, tmp_path, available, torch=None, gpu=False):
        self.asked, self.torch = [], torch
        python = bootstrap.venv_python(str(tmp_path / "venv"))

        def pip_install(python, arguments, may_be_missing=False):
            self.asked.append(arguments)
            if arguments[0].startswith("torch"):
                if arguments[0] not in available:
                    assert may_be_missing
                    return False
                self.torch = available[arguments[0]]
            return True

        def make_venv(venv):
            Path(python).parent.mkdir(parents=True)
            Path(python).touch()

        monkeypatch.setattr(bootstrap, "pip_install", pip_install)
        monkeypatch.setattr(bootstrap, "make_venv", make_venv)
        monkeypatch.setattr(bootstrap, "installed_torch", lambda python: self.torch)
        monkeypatch.setattr(bootstrap, "gpu_visible", lambda: gpu)
        monkeypatch.setattr(bootstrap.platform, "system", lambda: "Linux")
        monkeypatch.setattr(bootstrap.os, "execv", lambda path, command: self.asked.append(command))
        monkeypatch.setattr(
            bootstrap,
            "torch_attempts",
            lambda kind, attempts=bootstrap.torch_attempts: attempts(kind, "Linux", lambda: False),
        )
        self.run = lambda *options: bootstrap.main(["--venv", str(tmp_path / "venv"), *options, "x.py"])
        self.command = [python, "x.py"]
        self.editable = f"--editable={bootstrap.ROOT}[test]"
        self.pins = list(bootstrap.CPU_PINS)


def test_cpu_build_is_taken_and_pinned_and_the_second_run_installs_nothing(bootstrap, monkeypatch, tmp_path):
    cpu = ("2.12.1+cpu", "", False)
    machine = Machine(bootstrap, monkeypatch, tmp_path, {"torch==2.12.1+cpu": cpu, "torch>=2.11": None})
    machine.run()
    assert [a[0] for a in machine.asked[:2]] == ["torch==2.13.0+cpu", "torch==2.12.1+cpu"]
    assert machine.asked[2:] == [[machine.editable, *machine.pins], machine.command]
    machine.asked.clear()
    machine.run()
    assert machine.asked == [machine.command]
    machine.run("--extra", "peft")  # other wishes: install again, but keep torch
    assert machine.asked[1:] == [[machine.editable.replace("[test]", "[peft,test]"), *machine.pins], machine.command]


def test_a_failed_install_leaves_no_stamp(bootstrap, monkeypatch, tmp_path):
    machine = Machine(bootstrap, monkeypatch, tmp_path, {"torch==2.13.0+cpu": ("2.13.0+cpu", "", False)})
    install = bootstrap.pip_install

    def fail(python, arguments, may_be_missing=False):
        if arguments[0].startswith("--editable"):
            raise bootstrap.Failure("no network")
        return install(python, arguments, may_be_missing)

    monkeypatch.setattr(bootstrap, "pip_install", fail)
    assert machine.run() == 1
    monkeypatch.setattr(bootstrap, "pip_install", install)
    machine.asked.clear()
    machine.run()
    assert machine.asked == [[machine.editable, *machine.pins], machine.command]


def test_ordinary_torch_is_the_last_resort_without_a_gpu(bootstrap, monkeypatch, tmp_path, capsys):
    machine = Machine(bootstrap, monkeypatch, tmp_path, {"torch>=2.11": ("2.13.0", "13.0", False)})
    machine.run()
    assert machine.asked[-3:] == [["torch>=2.11"], [machine.editable], machine.command]
    assert "no CPU build of torch is to be had" in capsys.readouterr().err


def test_a_gpu_gets_the_ordinary_torch(bootstrap, monkeypatch, tmp_path, capsys):
    machine = Machine(bootstrap, monkeypatch, tmp_path, {"torch>=2.11": ("2.13.0", "13.0", False)}, gpu=True)
    machine.run()
    assert machine.asked == [["torch>=2.11"], [machine.editable], machine.command]
    assert "cannot use the GPU here" in capsys.readouterr().err


def test_a_torch_that_is_there_is_kept(bootstrap, monkeypatch, tmp_path, capsys):
    machine = Machine(bootstrap, monkeypatch, tmp_path, {}, torch=("2.11.0+cu130", "13.0", True))
    machine.run()
    assert machine.asked == [[machine.editable], machine.command]
    machine = Machine(bootstrap, monkeypatch, tmp_path / "2", {}, torch=("2.11.0+cpu", "", False), gpu=True)
    machine.run()
    assert machine.asked == [[machine.editable, *machine.pins], machine.command]
    assert "is a CPU build and is kept" in capsys.readouterr().err


def test_pip_failure_is_one_sentence(bootstrap, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert not bootstrap.pip_install(sys.executable, ["no-such-package-here==1"], may_be_missing=True)
    with pytest.raises(
        bootstrap.Failure, match=r"^pip could not install no-such-package-here==1 \(its message is above\)"
    ):
        bootstrap.pip_install(sys.executable, ["no-such-package-here==1"])
    assert "No matching distribution" in capfd.readouterr().err


def test_a_version_that_is_not_there_is_missing_under_a_constraint_too(bootstrap, monkeypatch, tmp_path):
    """pip then says ResolutionImpossible, not that nothing matches: the next build is to be tried all the same."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("no-such-package-here<=2\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    assert not bootstrap.pip_install(sys.executable, ["no-such-package-here==1"], may_be_missing=True)


def test_pip_settings_that_install_elsewhere_are_dropped(bootstrap, monkeypatch):
    monkeypatch.setenv("PIP_TARGET", "elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.invalid/simple")
    environment = bootstrap.pip_environment()
    assert "PIP_TARGET" not in environment and environment["PIP_USER"] == "0"
    assert environment["PIP_INDEX_URL"] == "https://mirror.invalid/simple"


def test_a_python_without_venv_says_so(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else True)
    with pytest.raises(
        bootstrap.Failure, match=r"^this Python has no ensurepip module; install it \(Debian and Ubuntu: "
    ):
        bootstrap.make_venv(str(tmp_path / "venv"))
    assert not (tmp_path / "venv").exists()


def test_without_arguments_it_explains_itself():
    run = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True)
    assert run.returncode == 2 and "examples/decode_loop.py" in run.stdout
