"""One command for a GPU that is lent for some minutes: tests, compilation, sanitizer, then the suites, each with a limit out of what is left.

    python -m bench.session --out DIR --minutes 9                            every step that is not marked "asked for"
    python -m bench.session --out DIR --minutes 9 --steps compile,expert_mlp,expert_linear --archive DIR.tar.gz
    python -m bench.session --list                                           the steps and the seconds set aside for each

DIR gets session.log (everything that the steps printed, then the table) and <suite>.json of each suite, which `python -m
grouped_lora_ops report` reads. A step gets at most twice the seconds set aside for it, and is left out where less than half
of them is left; at its limit it is interrupted, and killed if it has not ended GRACE seconds later. Tests are named as they
fail, so a run that is stopped loses none; so are those that were running when it was stopped.

--archive packs DIR into one file, where few files can be brought back: after each step, so that a session that is killed loses only the
step under way, and at the end.

The exit status is 1 where something failed, 3 where nothing did but a step was stopped or left out for time, else 0.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import results

ROOT = Path(__file__).resolve().parent.parent
GRACE = 10.0
NAMED = 60  # tests that are named in the table; the log names all
PASSED, FAILED, STOPPED, LEFT_OUT, ABSENT = "passed", "failed", "stopped", "left out", "not here"


@dataclass(frozen=True)
class Step:
    name: str
    command: Sequence[str]  # empty: it cannot run here
    seconds: float  # set aside for it
    about: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    step: Step
    result: str
    seconds: float = 0.0
    note: str = ""
    failing: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)  # when it was stopped
    told: bool = False  # the session itself was told to end


# --- what pytest -v prints, while it prints it ---

_WORD = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|RERUN"
_OF_WORKER = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({_WORD}) (\S+?\.py::.*?)\s*$")  # pytest-xdist
_OF_ONE = re.compile(rf"^(\S+?\.py::.*?) ({_WORD})(?: \(.*\))?\s*(?:\[ *\d+%\])?\s*$")
_STARTED = re.compile(r"^(\S+?\.py::.*?)\s*$")
_NOT_COLLECTED = re.compile(r"^ERROR (\S+\.py)(?: - .*)?$")  # of the summary, or while collecting
_CRASHED = re.compile(r"crashed while running ['\"](\S+?\.py::.*?)['\"]\s*$")


class Watcher:
    """Names of tests that failed and of those under way, from the lines of `pytest -v`, with pytest-xdist or without."""

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.say = say
        self.failing: dict[str, None] = {}  # in order
        self.running: dict[str, None] = {}
        self.counts: dict[str, int] = {}
        self._over = False

    def line(self, text: str) -> None:
        if text.startswith(("=====", "_____")) and ("FAILURES" in text or "ERRORS" in text or "summary" in text):
            self._over = True  # tracebacks and summaries repeat names, cut short
        if crashed := _CRASHED.search(text):
            self._done(crashed[1], FAILED.upper())
        elif broken := _NOT_COLLECTED.match(text):
            self._fails(broken[1])
        elif self._over:
            return
        elif of_worker := _OF_WORKER.match(text):
            self._done(of_worker[2], of_worker[1])
        elif of_one := _OF_ONE.match(text):
            self._done(of_one[1], of_one[2])
        elif started := _STARTED.match(text):
            self.running[started[1]] = None

    def unfinished(self, text: str) -> None:
        """What stands on the last line, which has no end: the test under way where there is no pytest-xdist."""
        if started := _STARTED.match(text):
            self.running[started[1]] = None

    def _done(self, name: str, word: str) -> None:
        self.running.pop(name, None)
        self.counts[word] = self.counts.get(word, 0) + 1
        if word in ("FAILED", "ERROR"):
            self._fails(name)

    def _fails(self, name: str) -> None:
        if name not in self.failing:
            self.failing[name] = None
            if len(self.failing) <= NAMED:
                self.say(f"  failing: {name}")

    @property
    def note(self) -> str:
        order = [word for word in _WORD.split("|") if self.counts.get(word)]
        return ", ".join(f"{self.counts[word]} {word.lower()}" for word in order)


# --- running ---


def run_step(step: Step, limit: float, log, say: Callable[[str], None] = print, grace: float = GRACE) -> Outcome:
    """Run it for `limit` seconds at most, with its output to `log` as it comes."""
    watcher, tail, decoded = Watcher(say), "", codecs.getincrementaldecoder("utf-8")("replace")
    start = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | step.environment
    log.write(f"\n##### {step.name}: {' '.join(step.command)}   (at most {limit:.0f} s)\n".encode())
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=environment, start_new_session=True, preexec_fn=_hear_interrupts, **pipes
    )

    def read() -> None:
        nonlocal tail
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            log.write(piece)
            log.flush()
            *lines, tail = (tail + decoded.decode(piece)).split("\n")
            for line in lines:
                watcher.line(line.rstrip("\r"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    stopped, told = False, False
    try:
        process.wait(limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        stopped, told = True, isinstance(reason, KeyboardInterrupt)
        reached = list(watcher.running), tail
        _end(process, grace)
    reader.join(grace)  # a process that the step left behind may hold the pipe open
    if stopped:
        watcher.running = dict.fromkeys(reached[0])
        watcher.unfinished(reached[1])
    failing = list(watcher.failing)
    code = process.returncode
    broken = failing or (not stopped and code not in (0, 5))  # 5: pytest found no tests
    result = FAILED if broken else STOPPED if stopped else PASSED
    why = (
        "the session was told to end"
        if told
        else f"stopped at {limit:.0f} s"
        if stopped
        else f"exit status {code}"
        if code
        else ""
    )
    note = "; ".join(filter(None, (watcher.note, why)))
    return Outcome(
        step, result, time.monotonic() - start, note, failing, list(watcher.running) if stopped else [], told
    )


def _hear_interrupts() -> None:
    """In the step: where we were started in the background, SIGINT is ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen, grace: float) -> None:
    """Interrupt the process, so that pytest writes what it has; kill it and its children if that takes too long."""
    for number, patience in ((signal.SIGINT, grace), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def run_steps(
    steps: Sequence[Step],
    minutes: float,
    log,
    say: Callable[[str], None] = print,
    grace: float = GRACE,
    after: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Each step in its time; `after` is called behind each."""
    end = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    for step in steps:
        left = end - time.monotonic() - grace
        if not step.command:
            outcomes.append(Outcome(step, ABSENT, note=step.about))
        elif any(outcome.told for outcome in outcomes):
            outcomes.append(Outcome(step, LEFT_OUT, note="the session was told to end"))
        elif left < step.seconds / 2:
            outcomes.append(Outcome(step, LEFT_OUT, note=f"{max(left, 0):.0f} s left, {step.seconds:.0f} set aside"))
        else:
            outcomes.append(run_step(step, min(left, 2 * step.seconds), log, say, grace))
        say(_line(outcomes[-1]))
        log.flush()
        after()
    return outcomes


def _line(outcome: Outcome) -> str:
    failing = f"{len(outcome.failing)} failing" if outcome.failing else ""
    note = "; ".join(filter(None, (failing, outcome.note)))
    return f"{outcome.step.name:14}{outcome.seconds:7.0f} s  {outcome.result:10}{note}".rstrip()


def table(outcomes: list[Outcome], named: int | None = None) -> str:
    """step, seconds, result; then the names of failing tests and of those that were running when their step was stopped."""
    lines = [f"{'step':14}{'seconds':>9}  result", *map(_line, outcomes)]
    for title, key in (("failing", "failing"), ("running when stopped", "running")):
        names = [(outcome.step.name, name) for outcome in outcomes for name in getattr(outcome, key)]
        lines += [f"{title}: {step}: {name}" for step, name in names[:named]]
        if named is not None and len(names) > named:
            lines.append(f"{title}: … and {len(names) - named} more, in session.log")
    return "\n".join(lines)


def exit_status(outcomes: list[Outcome]) -> int:
    found = {outcome.result for outcome in outcomes}
    return 1 if FAILED in found else 3 if found & {STOPPED, LEFT_OUT} else 0


def pack(folder: Path, archive: Path) -> None:
    """The folder as a .tar.gz, which is never there half written; an archive inside the folder is not packed into itself."""
    unfinished = archive.with_name(f".{archive.name}.part")
    own = {archive.resolve(), unfinished.resolve()}
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(unfinished, "w:gz") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.resolve() not in own:
                packed.add(path, arcname=str(Path(folder.name) / path.relative_to(folder)))
    unfinished.replace(archive)


# --- the steps ---

SUITES = {  # name: (files, further arguments, seconds set aside, asked for)
    "delta": ("delta", ["-k", "not extra", "--contenders", "ours,torch"], 100, False),
    "linear": ("linear", ["--contenders", "ours"], 60, False),
    "expert_delta": ("expert_delta", ["-k", "not extra", "--contenders", "ours,torch"], 120, False),
    "expert_linear": ("expert_linear", ["--contenders", "ours"], 150, False),
    "expert_mlp": ("expert_mlp", ["--contenders", "ours"], 120, False),
    "wgrad": ("wgrad", ["--contenders", "ours,torch"], 60, False),
    "host": ("host", [], 45, False),
    "expert_train": ("expert_train", [], 150, True),
    "curve": ("curve", [], 80, True),
    "tax": ("tax", [], 180, True),
    "parts": ("shrink expand plan", ["--contenders", "ours,torch"], 90, True),
    "extra": ("delta expert_delta", ["-k", "extra", "--contenders", "ours,torch"], 150, True),
}
ASKED_FOR = ("racecheck", *(name for name, (*_, asked) in SUITES.items() if asked))


def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return found or (str(beside) if beside.exists() else None)


def all_steps(
    out: Path, commit: str, workers: int, chosen: Sequence[str] | None = None, tiny: bool = False
) -> list[Step]:
    """Every step in its order; the compile step prepares the suites that are `chosen`, or all that need not be asked for."""
    python, small = sys.executable, ["--tiny"] if tiny else []
    pytest = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    spread = ["-n", str(workers)] if importlib.util.find_spec("xdist") else []
    steps = [Step("tests", [*pytest, "-m", "gpu", *spread, "--tb=short", "tests"], 300, "pytest -m gpu")]
    timed = [name for name in SUITES if name in (chosen or ())] or [name for name in SUITES if name not in ASKED_FOR]
    stems = [stem for name in timed for stem in SUITES[name][0].split()]
    called = ",".join(dict.fromkeys("delta" if stem == "host" else stem for stem in stems))
    compile_all = [python, "-m", "bench.once", "--workers", str(workers), "--suites", called, *small]
    steps.append(Step("compile", compile_all, 90, "each workload of the suites that follow, once"))
    for name, tool, seconds in (("sanitize", "memcheck", 60), ("racecheck", "racecheck", 120)):
        program = sanitizer()
        about = f"compute-sanitizer {tool} on a few calls" if program else "there is no compute-sanitizer"
        checked = [program, "--tool", tool, "--error-exitcode", "9", python, "-m", "bench.once", "--few", *small]
        # PyTorch's own pool would hide an access past the end of a tensor
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        steps.append(Step(name, checked if program else [], seconds, about, alone))
    for name, (stems, more, seconds, _) in SUITES.items():
        files = [f"bench/bench_{stem}.py" for stem in stems.split()]
        kept = ["--bench-json", str(out / f"{name}.json"), "--bench-commit", commit]
        about = " ".join(["pytest", *files, *more])
        steps.append(Step(name, [*pytest, *files, *more, *small, *kept], seconds, about))
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the log and the JSON files")
    parser.add_argument("--commit", help="commit to record where the sources are not in a git checkout")
    parser.add_argument("--minutes", type=float, default=9.0, help="when everything has to be over (default: 9)")
    parser.add_argument("--steps", help="comma-separated, in any order; default: all that are not marked")
    parser.add_argument(
        "--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that test and compile"
    )
    parser.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="pack the folder into this file, too")
    parser.add_argument("--list", action="store_true", help="print the steps and the seconds set aside for each")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, on the CPU where there is no GPU: tests the scripts"
    )
    options = parser.parse_args(arguments)
    out = (options.out or Path("session")).resolve()
    names = [step.name for step in all_steps(out, "", 1)]
    chosen = options.steps.split(",") if options.steps else [name for name in names if name not in ASKED_FOR]
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--steps: unknown {', '.join(unknown)}; there are {', '.join(names)}")
    commit = options.commit or results.commit()
    steps = [
        step
        for step in all_steps(out, commit, options.workers, chosen, options.tiny)
        if options.list or step.name in chosen
    ]
    if options.list:
        for step in steps:
            print(
                f"{step.name:14}{step.seconds:5.0f} s  {'(asked for) ' if step.name in ASKED_FOR else ''}{step.about}"
            )
        return 0
    if options.out is None:
        parser.error("--out is needed")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        if options.archive:
            pack(out, options.archive)

    def try_to_keep() -> None:
        with contextlib.suppress(OSError):  # a full disk: what follows is measured all the same, and the last one raises
            keep()

    try:
        with (out / "session.log").open("ab") as log:
            log.write(f"commit {commit}, {options.minutes:g} minutes, {results.now()}\n".encode())
            outcomes = run_steps(steps, options.minutes, log, lambda text: print(text, flush=True), after=try_to_keep)
            log.write(f"\n##### {results.now()}\n{table(outcomes)}\n".encode())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told to end twice: the archive is made all the same
        keep()
    print("\n" + table(outcomes, NAMED))
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
