"""The frame of ``python -m tools.gpu``, with small processes as its parts: what is run, stopped and written."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attn_support import fresh

from tools.gpu import __main__ as command
from tools.gpu import parts, results
from tools.gpu.__main__ import Run, conclude, environment, main, run_parts
from tools.gpu.parts import FAILED, FULL, PARTS, RIGHT, UNFINISHED, WRONG, Job, Outcome, Part

ROOT = Path(__file__).resolve().parents[3]
CARD = "NVIDIA GeForce GTX 1080 Ti"
BY_NAME = {part.name: part for part in PARTS}
HANGS = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(other.pid))
print("waiting", flush=True)
time.sleep(600)
"""
posix_only = pytest.mark.skipif(os.name != "posix", reason="looks for processes as POSIX does")


def facts(card: str = CARD, **versions: str) -> dict[str, Any]:
    known = {"torch": "2.13.0+cu126", "driver": "560.35", "pascal-attention": "1.0"}
    return {"card": {"name": card}, "versions": {**known, **versions}}


def part(name: str, code: str = "print('done')", *, weight: float = 1.0, made_from: str = "tools/gpu/table.py") -> Part:
    """A part that runs a program, which is right if it ends with status 0."""

    def run(job: Job) -> Outcome:
        ended = job.run("-c", code, str(job.scratch / "file"))
        states = {0: RIGHT, None: UNFINISHED, 3: UNFINISHED, 1: WRONG}
        return Outcome(states.get(ended.status, FAILED), ended.last_line or ended.words, {"before": job.before})

    return Part(name, weight, (made_from,), run)


def runs(folder: Path, *, seconds: float = 20.0, again: bool = False, **of_facts: str) -> Run:
    found = facts(**of_facts)
    card = results.folder_for(found["card"]["name"], folder)
    python = sys.executable, "-S"
    return Run(found, card, "cuda", FULL, time.monotonic() + seconds, python, dict(os.environ), again)


def stored(folder: Path, name: str, card: str = "nvidia-geforce-gtx-1080-ti") -> dict[str, Any]:
    return json.loads((folder / card / f"{name}.json").read_text())


def test_a_part_is_run_once_for_a_card_and_its_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def began(**of_facts: Any) -> str:
        run_parts(runs(tmp_path, **of_facts), [part("one")])
        content = stored(tmp_path, "one")
        return content["began"] + str(content["seconds"]) + str(content["limit"]) + str(content["versions"])

    first = began()
    assert began() == first
    assert "right (before): done" in capsys.readouterr().out
    for change in ({"driver": "570.1"}, {"torch": "2.14"}, {"pascal-attention": "1.1"}):
        assert began(**change) != first
        first = began(**change)
        assert began(**change) == first


def states(found: dict[str, Any]) -> list[str]:
    return [content["state"] for content in found.values()]


def test_what_went_wrong_is_told_again_but_what_did_not_end_is_run_again(tmp_path: Path) -> None:
    parts = [part("wrong", "raise SystemExit(1)"), part("broken", "raise SystemExit(9)")]
    assert states(run_parts(runs(tmp_path), parts)) == [WRONG, FAILED]
    mended = [part("wrong"), part("broken")]
    assert states(run_parts(runs(tmp_path), mended)) == [WRONG, RIGHT]
    assert states(run_parts(runs(tmp_path, again=True), mended)) == [RIGHT, RIGHT]


def test_only_the_card_that_was_asked_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in environment("cuda")[1]
    device, env = environment("cuda:1")
    assert (device, env["CUDA_VISIBLE_DEVICES"]) == ("cuda", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert environment("cuda:1")[1]["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment("cuda:2")[1]["CUDA_VISIBLE_DEVICES"] == ""
    assert environment("cpu")[0] == "cpu"


def _is_gone(process: int) -> bool:
    for _ in range(100):
        try:
            os.kill(process, 0)
            # An orphan that nobody has waited for is a zombie, which the kernel's table still lists.
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


@posix_only
def test_a_part_that_hangs_is_stopped_with_its_children_and_the_next_one_runs(tmp_path: Path) -> None:
    noted = tmp_path / "process"
    hangs = part("hangs", HANGS.replace("sys.argv[1]", repr(str(noted))))
    found = run_parts(runs(tmp_path / "out", seconds=3.0), [hangs, part("next")])
    assert states(found) == [UNFINISHED, RIGHT]
    assert 1.0 <= found["hangs"]["seconds"] < 2.5
    assert found["hangs"]["summary"] == "waiting"
    assert _is_gone(int(noted.read_text()))


def test_a_part_that_raises_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    def broken(job: Job) -> Outcome:
        raise OSError("no such program")

    found = run_parts(runs(tmp_path), [Part("broken", 1.0, ("tools/gpu",), broken), part("next")])
    assert states(found) == [FAILED, RIGHT]
    assert found["broken"]["summary"] == "OSError: no such program"


def _interrupted(folder: str, number: str) -> None:
    """The command, of which the second of three parts hangs, gets a signal; the figures of that part grow in a file."""
    noted, said = Path(folder) / "process", io.StringIO()

    def interrupt() -> None:
        while not (noted.exists() and noted.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), int(number))

    hangs = part("second", HANGS.replace("sys.argv[1]", repr(str(noted))))

    def grows(job: Job) -> Outcome:
        job.progress = job.scratch / "figures.json"
        job.progress.write_text('{"jobs": ["one"]}')
        return hangs.run(job)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ask_facts", lambda *arguments: facts())
        patch.setattr(command, "PARTS", [part("first"), dataclasses.replace(hangs, run=grows), part("third")])
        threading.Thread(target=interrupt, daemon=True).start()
        with contextlib.redirect_stderr(said):
            assert main(["--out", str(Path(folder) / "out")], (sys.executable, "-S")) == 130
    assert "interrupted; what was done stays" in said.getvalue()


@posix_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_what_is_done_and_no_file_in_part(tmp_path: Path, number: int) -> None:
    fresh.call(_interrupted, str(tmp_path), str(int(number)))
    assert _is_gone(int((tmp_path / "process").read_text()))
    written = sorted(path.name for path in (tmp_path / "out" / "nvidia-geforce-gtx-1080-ti").iterdir())
    assert written == ["first.json", "second.json"]
    assert stored(tmp_path / "out", "first")["state"] == RIGHT
    second = stored(tmp_path / "out", "second")
    assert (second["state"], second["summary"]) == (UNFINISHED, "interrupted")
    assert second["figures"] == {"jobs": ["one"]}


def test_the_last_lines_name_what_was_wrong_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part("one"), part("two", "raise SystemExit(1)"), part("three", "raise SystemExit(3)")]
    run = runs(tmp_path)
    found = run_parts(run, parts)
    capsys.readouterr()
    assert conclude(found, run.folder) == 1
    *_, continued, wrong, files = capsys.readouterr().out.splitlines()
    assert continued == "to be continued: three"
    assert wrong == "WRONG: two (wrong)"
    assert files == "commit these files: " + " ".join(str(run.folder / f"{name}.json") for name in found)
    assert conclude({"one": found["one"], "three": found["three"]}, run.folder) == 0


def test_no_path_of_the_machine_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    code = f"import sys; print(sys.argv[1], {str(ROOT)!r} + '/tools', '/home/somebody/x')"
    content = run_parts(runs(tmp_path), [part("one", code)])["one"]
    assert str(ROOT) in content["summary"]
    assert stored(tmp_path, "one")["summary"] == "OUT/file ./tools ~/x"
    assert stored(tmp_path, "one")["command"][0].startswith("python -c")


def test_arguments_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts", "tests,swep"]) == 2
    assert "got swep" in capsys.readouterr().err
    assert main(["--seconds", "0"]) == 2


def test_without_the_device_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('RuntimeError: no NVIDIA driver'); sys.exit(1)"
    assert main(["--out", str(tmp_path)], (sys.executable, "-S", "-c", code)) == 2
    assert "torch cannot use the device cuda: RuntimeError: no NVIDIA driver" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _job(tmp_path: Path, program: str, **changed: Any) -> Job:
    """Job of a part whose processes are this program."""
    program_file = tmp_path / "program.py"
    program_file.write_text("import json, sys\narguments = sys.argv[1:]\n" + program)
    (tmp_path / "scratch").mkdir()
    given = {"before": {}, "env": dict(os.environ), "end": time.monotonic() + 60.0, **changed}
    return Job((sys.executable, "-S", str(program_file)), "cuda", FULL, scratch=tmp_path / "scratch", **given)


_TESTS = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

def ran(name):
    with open({log!r}, "a") as file:
        file.write(name + "\\n")

@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_slow(number):
    ran(f"slow {{number}}")

{others}
"""
_PYTEST = (
    "import pytest; sys.exit(pytest.main([{folder!r} if each == 'tests/gpu' else each for each in arguments[2:]]))"
)


def _tests_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: str
) -> tuple[Callable[..., Outcome], Callable[[], list[str]]]:
    """The part on tests of its own: runs it for so many seconds with what was found before; what has run since."""
    monkeypatch.setattr(parts, "_MARGIN", 4.0)
    log, folder = tmp_path / "log", tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(_TESTS.format(log=str(log), others=others))

    def run(seconds: float, before: dict[str, Any] | None = None) -> Outcome:
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
        given = {"before": before or {}, "end": time.monotonic() + seconds}
        job = _job(tmp_path, _PYTEST.format(folder=str(folder)), **given, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return BY_NAME["tests"].run(dataclasses.replace(job, python=tuple(p for p in job.python if p != "-S")))

    def ran() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    return run, ran


def test_tests_are_run_as_far_as_the_time_goes_and_then_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, ran = _tests_of(monkeypatch, tmp_path, "def test_long():\n    ran('long'); time.sleep(3)")
    first = run(4 + 2)
    assert (first.state, first.summary) == (UNFINISHED, "1 passed of 3; the same command goes on with the others")
    assert ran() == ["long"]
    second = run(60, first.figures)
    assert (second.state, second.summary) == (RIGHT, "3 passed")
    assert ran() == ["slow 0", "slow 1"]


# Seconds that the parts need on a card beside an old processor. Tests and sweep go on where they were.
_NEEDED = {"rates": 20.0, "selftest": 90.0, "tests": 3500.0, "bench-forward": 100.0, "bench-backward": 100.0,
           "bench-linear": 100.0, "demo": 60.0, "sanitizer": 0.0, "sweep": 1500.0}  # fmt: skip


def test_it_takes_nine_minutes_however_slow_the_card_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock is simulated: what a part needs passes at once, until it is done or stopped."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    for name in ("hash_of", "commit"):
        monkeypatch.setattr(results, name, lambda *arguments: "")
    for module in (command, parts):
        monkeypatch.setattr(module, "time", clock)

    def slow(part: Part) -> Part:
        def run(job: Job) -> Outcome:
            needed = job.before.get("left", _NEEDED[part.name])
            took = min(needed, max(0.0, job.left))
            clock.now += took
            left = needed - took if part.name in ("tests", "sweep") or took == needed else needed
            return Outcome(UNFINISHED if left else RIGHT, "", {"left": left})

        return dataclasses.replace(part, run=run)

    for _ in range(12):
        began = clock.now
        run = runs(tmp_path)._replace(end=began + command.SECONDS)
        found = run_parts(run, [slow(part) for part in PARTS])
        assert clock.now - began <= command.SECONDS + 1e-6
    assert {content["state"] for content in found.values()} == {RIGHT}
    assert clock.now == began  # nothing is run again
