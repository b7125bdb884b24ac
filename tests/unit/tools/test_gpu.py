"""The frame of ``python -m tools.gpu``, with small processes as its parts: what is run, stopped and written."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_support import fresh
from attn_support.fused import emulation
from attn_support.randomness import at_night

from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import Runtime
from tools.gpu import __main__ as command
from tools.gpu import precompile, results
from tools.gpu.__main__ import Run, conclude, main, run_parts
from tools.gpu.parts import FAILED, FULL, RIGHT, UNFINISHED, WRONG, Job, Outcome, Part

CARD = "NVIDIA GeForce GTX 1080 Ti"
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
    described = {"name": card, "kind": "cuda", "capability": [6, 1], "memory_mib": 11264}
    return {"card": described, "versions": {**known, **versions}, "kernels": {"all": 9, "to_compile": 2}, "commit": ""}


def part(name: str, code: str = "print('done')", *, weight: float = 1.0, share: int = 0) -> Part:
    """A part that runs a program, which is right if it ends with status 0."""

    def run(job: Job) -> Outcome:
        ended = job.run("-c", code, str(job.scratch / "file"))
        states = {0: RIGHT, None: UNFINISHED, 3: UNFINISHED, 1: WRONG}
        return Outcome(states.get(ended.status, FAILED), ended.last_line or ended.words, {"before": job.before})

    return Part(name, weight, ("tools/gpu/told.py",), run, share)


def runs(folder: Path, *, seconds: float = 20.0, again: bool = False, places: int = 2, **of_facts: str) -> Run:
    found = facts(**of_facts)
    card = results.folder_for(found["card"]["name"], folder)
    python = sys.executable, "-S"
    return Run(found, card, "cuda", FULL, time.monotonic() + seconds, python, dict(os.environ), again, places)


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


def _grows(run: Callable[[Job], Outcome]) -> Callable[[Job], Outcome]:
    """A part whose figures grow: what is known of it before its end."""

    def grows(job: Job) -> Outcome:
        job.judge = lambda ended: Outcome(UNFINISHED, ended.words, {"jobs": ["one"]}, bad=["a: it is wrong"])
        return run(job)._replace(figures={"jobs": ["one"]})

    return grows


def _interrupted(folder: str, number: str) -> None:
    """The command, of which the second of three parts hangs, gets a signal; the figures of that part grow in a file."""
    noted, said = Path(folder) / "process", io.StringIO()
    second = Path(folder) / "out" / "nvidia-geforce-gtx-1080-ti" / "second.json"

    def interrupt() -> None:
        while not (noted.exists() and noted.read_text() and second.exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), int(number))

    hangs = part("second", HANGS.replace("sys.argv[1]", repr(str(noted))))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setattr(command, "ask_facts", lambda *arguments: facts())
        grows = dataclasses.replace(hangs, run=_grows(hangs.run))
        patch.setattr(command, "PARTS", [part("first"), grows, part("third")])
        threading.Thread(target=interrupt, daemon=True).start()
        with contextlib.redirect_stderr(said):
            assert main(["--out", str(Path(folder) / "out")], (sys.executable, "-S")) == 130
    assert "interrupted; what was done stays" in said.getvalue()


@posix_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_leaves_what_is_done_and_no_file_in_part(tmp_path: Path, number: int) -> None:
    noted = tmp_path / "process"
    if number == signal.SIGKILL:
        with pytest.raises(AssertionError):
            fresh.call(_interrupted, str(tmp_path), str(int(number)))
        os.kill(int(noted.read_text()), signal.SIGKILL)  # nobody could end it
    else:
        fresh.call(_interrupted, str(tmp_path), str(int(number)))
        assert _is_gone(int(noted.read_text()))
    written = sorted(path.name for path in (tmp_path / "out" / "nvidia-geforce-gtx-1080-ti").iterdir())
    assert written == ["first.json", "second.json"]
    assert stored(tmp_path / "out", "first")["state"] == RIGHT
    second = stored(tmp_path / "out", "second")
    assert second["state"] == UNFINISHED
    assert second["summary"] == ("cut short" if number == signal.SIGKILL else "waiting")
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


SMALL = Variant("split", 32, "float16", "float")


def _source_of(version: tuple[int, int]) -> str:
    """Where a card whose machine has an NVRTC of this version takes the machine code from."""
    gpu = CudaRuntime(find_compiler=lambda arch: SimpleNamespace(version=version))
    return Kernels(Runtime(torch.device("cpu"), emulation.CARD), gpu=gpu).existing_code(SMALL)[1]


@at_night
@pytest.mark.skipif(nvrtc.find(61) is None, reason="needs an NVRTC that compiles for sm_61")
def test_a_card_finds_what_was_compiled_without_it(tmp_path, monkeypatch, capsys) -> None:
    library = nvrtc.find(61)
    assert library is not None
    version = library.version
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precompile, "variants_of", lambda kernels: [SMALL, Variant("forward", 32, "float32")])
    assert _source_of(version) == f"NVRTC {version[0]}.{version[1]}"
    command = ["precompile", "--arch", "61", "--nvrtc", library.path, "--processes", "1"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"1 kernels to be compiled into {tmp_path / 'pascal-attention'}\n1 of 1\n"
    assert _source_of(version) == "disk cache"
    assert _source_of((version[0], version[1] + 1)) != "disk cache"
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("0 kernels to be compiled")
