"""`python -m bench.session`: what failed is named although the clock stopped the run, short time leaves steps out, the exit status."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import once, session  # noqa: E402

MADE_UP = """
import time, pytest
def test_good(): pass
@pytest.mark.parametrize("what", ["a b", "µ"])
def test_bad(what): assert what == "none"
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
def test_hangs(): time.sleep({seconds})
def test_never(): assert False
"""
AT_THE_END = """
import pathlib
def pytest_sessionfinish(): pathlib.Path(__file__).with_name("kept.json").write_text("{}")
"""


def suite(folder: Path, *more: str, seconds: float = 60) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "test_made_up.py").write_text(MADE_UP.format(seconds=seconds))
    (folder / "conftest.py").write_text(AT_THE_END)
    plain = ["-v", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}", "--tb=short", *more]
    return [sys.executable, "-m", "pytest", *plain, str(folder)]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def names(found: list[str]) -> list[str]:
    return sorted(name.split("::")[1] for name in found)


ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts faster
FAILING = sorted(["test_bad[a b]", r"test_bad[\xb5]", "test_error"])


@pytest.mark.parametrize("spread", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["one process", "xdist"])
def test_what_failed_is_named_when_the_clock_stops_the_run(spread, tmp_path, monkeypatch):
    if spread:
        pytest.importorskip("xdist")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    step = session.Step("tests", suite(tmp_path / "suite", *spread), 60, environment=ALONE)
    for limit in (4.0, 8.0, 40.0):  # a busy machine needs longer to start pytest
        log, said = io.BytesIO(), []
        outcome = session.run_step(step, limit, log, said.append, grace=5.0)
        if outcome.running:
            break
    assert outcome.result == session.FAILED and names(outcome.failing) == FAILING
    assert names(outcome.running) == ["test_hangs"]
    assert f"stopped at {limit:.0f} s" in outcome.note and "1 passed" in outcome.note
    assert names([text.removeprefix("  failing: ") for text in said]) == FAILING
    assert outcome.seconds < limit + 6 and (tmp_path / "suite" / "kept.json").exists()  # interrupted, not killed
    assert "test_good" in log.getvalue().decode()
    shown = session.table([outcome])
    assert all(
        any(name in line for line in shown.splitlines() if line.startswith("failing: tests: ")) for name in FAILING
    )
    assert "running when stopped: tests: " in shown and session.exit_status([outcome]) == 1


def test_a_step_that_ignores_the_interrupt_is_killed(tmp_path):
    program = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    start, log = time.monotonic(), io.BytesIO()
    outcome = session.run_step(session.Step("stubborn", python(program), 60), 1.0, log, grace=1.0)
    assert outcome.result == session.STOPPED and time.monotonic() - start < 10
    assert b"up" in log.getvalue()


def test_steps_are_left_out_when_time_is_short():
    said = []
    steps = [
        session.Step("quick", python("pass"), 2),
        session.Step("absent", [], 1, "there is no such program"),
        session.Step("long", python("raise SystemExit(1)"), 600),
        session.Step("last", python("pass"), 2),
    ]
    outcomes = session.run_steps(steps, 1.0, io.BytesIO(), said.append)
    assert [o.result for o in outcomes] == [session.PASSED, session.ABSENT, session.LEFT_OUT, session.PASSED]
    assert len(said) == 4 and "600 set aside" in said[2]
    assert session.exit_status(outcomes) == 3 and session.exit_status([outcomes[0], outcomes[1]]) == 0


def test_a_step_gets_what_is_left_and_no_more():
    start = time.monotonic()
    (outcome,) = session.run_steps(
        [session.Step("slow", python("import time; time.sleep(60)"), 2)], 2.5 / 60, io.BytesIO(), print, 1.0
    )
    assert outcome.result == session.STOPPED and time.monotonic() - start < 10
    assert session.exit_status([outcome]) == 3


def test_an_exit_status_is_a_failure():
    (outcome,) = session.run_steps([session.Step("bad", python("raise SystemExit(7)"), 2)], 1.0, io.BytesIO(), print)
    assert (outcome.result, outcome.note) == (session.FAILED, "exit status 7") and session.exit_status([outcome]) == 1


def test_the_command_writes_a_log_and_obeys_a_signal(tmp_path):
    """Started where SIGINT is ignored, as shells start what runs in the background; told to end while a step runs."""
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path.insert(0, {str(ROOT)!r})
from bench import session
made_up = [session.Step("tests", {suite(tmp_path / "suite")!r}, 50, environment={ALONE!r}), session.Step("host", {python("pass")!r}, 1)]
session.all_steps = lambda *args: made_up
keep = ["--archive", {str(tmp_path / "all.tar.gz")!r}]
sys.exit(session.main(["--out", {str(tmp_path / "out")!r}, "--commit", "abc", "--minutes", "2", "--steps", "tests,host", *keep]))
"""
    process = subprocess.Popen(python(program), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and names([line.strip().removeprefix("failing: ") for line in lines]) == FAILING
    assert "running when stopped: tests: " in shown and "left out  the session was told to end" in shown
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["session.log"]
    text = (tmp_path / "out" / "session.log").read_text()
    assert text.startswith("commit abc, 2 minutes") and "running when stopped" in text
    assert packed(tmp_path / "all.tar.gz") == {"out/session.log": text}
    assert (tmp_path / "suite" / "kept.json").exists()


def packed(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as found:
        return {member.name: found.extractfile(member).read().decode() for member in found}


def test_the_archive_holds_what_is_there_and_not_itself(tmp_path):
    (tmp_path / "out" / "deeper").mkdir(parents=True)
    (tmp_path / "out" / "a.json").write_text("{}")
    (tmp_path / "out" / "deeper" / "b.json").write_text("[]")
    for archive in (tmp_path / "new folder" / "all.tar.gz", tmp_path / "out" / "all.tar.gz"):
        for _ in range(2):
            session.pack(tmp_path / "out", archive)
    want = {"out/a.json": "{}", "out/deeper/b.json": "[]"}
    assert packed(tmp_path / "out" / "all.tar.gz") == packed(tmp_path / "new folder" / "all.tar.gz") == want
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["all.tar.gz"]


def test_the_archive_has_a_step_when_the_next_begins(tmp_path, monkeypatch):
    out, archive = tmp_path / "out", tmp_path / "all.tar.gz"
    look = f"import tarfile; names = tarfile.open({str(archive)!r}).getnames(); print(names); assert 'out/first.json' in names"
    steps = [
        session.Step("compile", python(f"open({str(out / 'first.json')!r}, 'w').write('1')"), 5),
        session.Step("host", python(look), 5),
        session.Step("tax", python(f"open({str(out / 'last.json')!r}, 'w').write('2'); raise SystemExit(4)"), 5),
    ]
    monkeypatch.setattr(session, "all_steps", lambda *args: steps)
    before = signal.getsignal(signal.SIGTERM)
    try:
        given = ["--out", str(out), "--commit", "abc", "--minutes", "2", "--steps", "compile,host,tax", "--archive", str(archive)]
        assert session.main(given) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    found = packed(archive)
    assert (found["out/first.json"], found["out/last.json"]) == ("1", "2")
    assert found["out/session.log"] == (out / "session.log").read_text() and "exit status 4" in found["out/session.log"]
    assert re.search(r"^host +\d+ s  passed", found["out/session.log"], re.M)


def test_a_file_that_cannot_be_imported_and_a_worker_that_dies_are_named():
    watcher = session.Watcher()
    for line in (
        "tests/test_a.py::test_dies ",
        "[gw1] node down: Not properly terminated",
        "worker 'gw1' crashed while running 'tests/test_a.py::test_dies[x y]'",
        "[gw0] [ 50%] PASSED tests/test_a.py::test_fine ",
        "=========================== short test summary info ============================",
        "ERROR tests/test_b.py - ModuleNotFoundError: No module named 'x'",
        "FAILED tests/test_a.py::test_dies[x y] - worker crashed",
    ):
        watcher.line(line)
    assert list(watcher.failing) == ["tests/test_a.py::test_dies[x y]", "tests/test_b.py"]
    assert watcher.counts == {"FAILED": 1, "PASSED": 1}


def test_the_steps_name_files_and_workloads_that_exist(tmp_path):
    steps = session.all_steps(tmp_path, "abc", 4)
    default = [step for step in steps if step.name not in session.ASKED_FOR]
    assert [step.name for step in steps][:4] == ["tests", "compile", "sanitize", "racecheck"]
    written = [
        Path(step.command[step.command.index("--bench-json") + 1]).name
        for step in default
        if "--bench-json" in step.command
    ]
    assert written == [f"{step.name}.json" for step in default[3:]] and len(written) + 1 <= 8  # with the log
    for step in steps:
        for part in step.command:
            if part.startswith("bench/"):
                assert (ROOT / part).exists(), part
    some = session.all_steps(tmp_path, "abc", 4, ["compile", "host", "expert_mlp"])
    called = next(step.command for step in some if step.name == "compile")
    assert called[called.index("--suites") + 1] == "expert_mlp,delta"
    suites = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    assert set(once.SUITES) == suites - {"host"}
    for suite_name, few in once.FEW.items():
        assert set(few) <= {w.name for w in once.SUITES[suite_name][0][0]}


@pytest.mark.parametrize("suite_name", once.SUITES)
def test_each_suite_is_called_once(suite_name):
    tasks = once.tasks([suite_name], tiny=True)
    assert len({task[1:3] for task in tasks}) == len(tasks) == sum(len(rows) for rows, _ in once.SUITES[suite_name])
    of_each_part = {task[1]: task for task in tasks}
    assert [once.call_once(task) for task in of_each_part.values()] == [None] * len(once.SUITES[suite_name])


def test_a_call_that_raises_is_named(monkeypatch):
    def broken(w, device, whole):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(once.SUITES, "linear", [(once.SUITES["linear"][0][0], broken)])
    assert once.call_once(("linear", 0, 0, True)) == "linear wo_a_g4-r16-S8-T1: RuntimeError: no such kernel"
