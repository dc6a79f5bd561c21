#!/usr/bin/env python3
"""Set up what a command needs in a virtual environment, then run the command there.

    python3 bootstrap.py examples/decode_loop.py         # the example
    python3 bootstrap.py -m pytest                       # the tests
    python3 bootstrap.py [options] ARGUMENTS OF PYTHON

Options, before the arguments:
    --venv DIR                the environment (default: .venv beside this file); one that exists is used as it is
    --torch auto|cpu|cuda     which build of torch to install (default: auto, see below)
    --extra NAME              also install this extra of pyproject.toml (may be repeated)

Which torch: a torch >= 2.11 that the environment already has is kept. Otherwise a machine with a visible NVIDIA GPU
gets the ordinary torch of the package index. A Linux machine without one gets a CPU build, `torch==VERSION+cpu`, which
pip finds on download.pytorch.org or wherever else it has been told to look. macOS and Windows get the ordinary torch,
which is a CPU build there. Only where no CPU build is to be had does a Linux machine without a GPU get the ordinary one.

A second run starts the command at once: a stamp in the environment says that this file, pyproject.toml, setup.py,
csrc/launcher.c and the options have not changed since. Uses the standard library only.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.abspath(__file__))
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
OLDEST_TORCH = (2, 11)
CPU_VERSIONS = ("2.13.0", "2.12.1", "2.12.0", "2.11.0")  # first the one that the tests are run with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT = 8  # seconds, spent once
# The tests run the kernels in Triton's interpreter: in this release of it, which fails with numpy >= 2.4.
CPU_PINS = ("triton==3.6.0; sys_platform == 'linux'", "numpy<2.4")


class Failure(Exception):
    """Something the user can put right; the text is one sentence that says how."""


def say(text):
    print("bootstrap: " + text, file=sys.stderr, flush=True)


def parse(argv):
    """(options, arguments of python), or (None, []) for --help; options end at the first argument without '--'."""
    options = {"venv": os.path.join(ROOT, ".venv"), "torch": "auto", "extra": []}
    rest = list(argv)
    while rest and rest[0].startswith("--"):
        name, equals, value = rest.pop(0)[2:].partition("=")
        if name == "help":
            return None, []
        if name not in options:
            raise Failure(f"unknown option --{name}; there are --venv DIR, --torch auto|cpu|cuda and --extra NAME.")
        if not equals:
            if not rest:
                raise Failure(f"--{name} needs a value.")
            value = rest.pop(0)
        if name == "extra":
            options["extra"].append(value)
        else:
            options[name] = value
    if options["torch"] not in ("auto", "cpu", "cuda"):
        raise Failure(f"--torch must be auto, cpu or cuda; got {options['torch']}.")
    options["venv"] = os.path.abspath(os.path.expanduser(options["venv"]))
    return options, rest


def check_python(version=sys.version_info):
    running = f"Python {version[0]}.{version[1]}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise Failure(f"{running} is too old; use Python 3.10 to 3.13, for example `python3.12 bootstrap.py ...`.")
    if tuple(version[:2]) > NEWEST_PYTHON:
        say(f"{running} is newer than what this project is tested with (3.10 to 3.13).")


def gpu_visible():
    """Whether an NVIDIA GPU is here: nvidia-smi lists one, or its device file and the driver's library exist."""
    smi = shutil.which("nvidia-smi")
    if smi:
        try:
            run = subprocess.run([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
            return run.returncode == 0 and b"GPU " in run.stdout
        except (OSError, subprocess.TimeoutExpired):
            pass
    if not any(os.path.exists(device) for device in ("/dev/nvidia0", "/dev/dxg")):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def index_reachable(url=CPU_INDEX + "/torch/", timeout=CPU_INDEX_TIMEOUT):
    """Whether a page of the index can be read. pip itself would try for minutes, and again for every package."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as page:
            return page.status == 200
    except urllib.error.HTTPError:
        return False
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # it answers; whether to trust it is for pip to say
    except (OSError, ValueError):
        return False


def torch_attempts(kind, system=None, reachable=index_reachable):
    """([pip arguments to try in turn], what to say before the last of them); kind is 'cuda' or 'cpu'."""
    ordinary = ["torch>=" + ".".join(map(str, OLDEST_TORCH))]
    if kind == "cuda" or (system or platform.system()) != "Linux":
        return [ordinary], ""
    if reachable():
        where, why = ["--extra-index-url", CPU_INDEX], "pip finds none there for this Python and processor"
    else:
        where, why = ["--retries", "1"], "download.pytorch.org cannot be reached and pip finds none elsewhere"
    return [[f"torch=={version}+cpu", *where] for version in CPU_VERSIONS] + [ordinary], (
        f"no CPU build of torch is to be had ({why}), so the ordinary build is installed, which may bring several "
        "gigabytes of CUDA libraries that will not be used."
    )


def pip_environment():
    """os.environ without the settings that send packages elsewhere than into the virtual environment."""
    elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONHOME")
    environment = {key: value for key, value in os.environ.items() if key not in elsewhere}
    environment.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return environment


def pip_install(python, arguments, may_be_missing=False):
    """pip install; False if it found no such version and may_be_missing. Any other trouble is a Failure."""
    command = [python, "-m", "pip", "install", "--no-input", *arguments]
    run = subprocess.run(command, env=pip_environment(), stderr=subprocess.PIPE if may_be_missing else None)
    if run.returncode == 0:
        return True
    message = (run.stderr or b"").decode(errors="replace")
    # Where a constraint of the user's names the package, pip calls a version that it does not find a conflict.
    if may_be_missing and any(words in message for words in ("No matching distribution found", "ResolutionImpossible")):
        return False
    sys.stderr.write(message)
    raise Failure(
        f"pip could not install {arguments[0]} (its message is above); "
        "check the network and the free disk space, then run the same command again."
    )


def installed_torch(python):
    """(version, CUDA version or '', whether it can use a GPU) of the environment's torch; None if it has none."""
    code = (
        "import torch; print('torch', torch.__version__, torch.version.cuda or '', torch.cuda.is_available(), sep=';')"
    )
    run = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=os.path.dirname(python)
    )
    words = run.stdout.decode().strip().split(";")
    if run.returncode or len(words) != 4:
        return None
    return words[1], words[2], words[3] == "True"


def new_enough(version):
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST_TORCH


def install_torch(python, kind):
    """Leave a torch >= 2.11 in the environment; True if it is a CPU build."""
    present = installed_torch(python)
    if present and new_enough(present[0]):
        if kind == "cuda" and not present[1]:
            say(
                f"torch {present[0]} in this environment is a CPU build and is kept; delete the environment to change that."
            )
        return not present[1]
    attempts, warning = torch_attempts(kind)
    for attempt in attempts[:-1]:
        say("installing " + attempt[0])
        if pip_install(python, attempt, may_be_missing=True):
            return True
    if warning:
        say(warning)
    say("installing " + attempts[-1][0])
    pip_install(python, attempts[-1])
    present = installed_torch(python)
    if present is None:
        raise Failure(f"torch was installed but cannot be imported; `{python} -c 'import torch'` says why.")
    if kind == "cuda" and not present[2]:
        say(
            f"torch {present[0]} (CUDA {present[1]}) cannot use the GPU here; the NVIDIA driver is probably older than it needs."
        )
    return not present[1]


def venv_python(venv):
    return os.path.join(venv, "Scripts", "python.exe") if os.name == "nt" else os.path.join(venv, "bin", "python")


def make_venv(venv):
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise Failure(
                f"this Python has no {module} module; install it (Debian and Ubuntu: `apt install python3-venv`), "
                "then run the same command again."
            )
    say(f"making a virtual environment in {venv}")
    fresh = not os.path.exists(venv)
    run = subprocess.run([sys.executable, "-m", "venv", venv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if run.returncode:
        if fresh:
            shutil.rmtree(venv, ignore_errors=True)
        raise Failure("python -m venv failed: " + " ".join(run.stdout.decode(errors="replace").split()))


def stamp(options, kind):
    """What the environment was set up for; whatever changes it makes the next run install again."""
    digest = hashlib.sha256()
    for name in ("bootstrap.py", "pyproject.toml", "setup.py", os.path.join("csrc", "launcher.c")):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read() + b"\0")
    digest.update(repr((ROOT, sorted(set(options["extra"])), kind)).encode())
    return digest.hexdigest()


def prepare(options):
    """The environment's python, with everything installed."""
    kind = options["torch"]
    if kind == "auto":
        kind = "cuda" if gpu_visible() else "cpu"
    python = venv_python(options["venv"])
    stamp_file = os.path.join(options["venv"], "grouped_lora_ops.stamp")
    wanted = stamp(options, kind)
    if os.path.exists(python) and os.path.exists(stamp_file):
        with open(stamp_file) as file:
            if file.read() == wanted:
                return python
    if not os.path.exists(python):
        make_venv(options["venv"])
    if options["torch"] == "auto":
        say("an NVIDIA GPU is visible" if kind == "cuda" else "no NVIDIA GPU is visible")
    cpu_build = install_torch(python, kind)
    extras = ",".join(sorted({"test", *options["extra"]}))
    say(f"installing grouped_lora_ops[{extras}]")
    pip_install(python, [f"--editable={ROOT}[{extras}]", *(CPU_PINS if cpu_build else ())])
    with open(stamp_file, "w") as file:
        file.write(wanted)
    return python


def main(argv):
    try:
        options, arguments = parse(argv)
        if not arguments:
            print(__doc__)
            return 0 if options is None else 2
        check_python()
        command = [prepare(options), *arguments]
    except Failure as failure:
        say(str(failure))
        return 1
    except OSError as error:
        say(f"{error}; check permissions and the free disk space, then run the same command again.")
        return 1
    except KeyboardInterrupt:
        return 130
    if os.name == "nt":
        return subprocess.call(command)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
