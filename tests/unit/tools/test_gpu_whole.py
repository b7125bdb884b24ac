"""Every part of ``python -m tools.gpu`` on a CPU, with the stand-in for the driver in place of the card."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.fused.emulation import GXX
from attn_support.gpu import guard
from attn_support.randomness import at_night, is_random

from tools.gpu import __main__ as command
from tools.gpu.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support" / "gpu"
pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or GXX is None, reason="needs fork, and g++ to build the stand-in for the driver"
)
PARTS = "variants,tests,selftest,bench-forward,bench-backward,sanitizer"
PARTS += ",bench-linear" * is_random()  # costly
# Runs the command that it is given, as the real one does, and writes the lines that the real one ends with.
SANITIZER = """#!{python} -S
import subprocess, sys
tool, command = sys.argv[2], sys.argv[7:]
assert sys.argv[1] == "--tool" and sys.argv[3] == "--error-exitcode", sys.argv
status = subprocess.run(command).returncode
if tool == "racecheck":
    print("========= Error: Race reported between Write access at pa_forward+0x120 and Read access at pa_forward+0x80")
    print("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)")
    sys.exit(int(sys.argv[4]))
print("========= ERROR SUMMARY: 0 errors")
sys.exit(status)
"""


@contextlib.contextmanager
def _python(folder: Path, device: str, **variables: str) -> Iterator[tuple[str, ...]]:
    """In the place of Python: forks of one process that has imported torch."""
    path = folder / "socket"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, SUPPORT / "server.py", path, device]
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield sys.executable, "-S", str(SUPPORT / "client.py"), str(path)
    server.kill()
    server.wait()
    server.stdout.close()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with _python(tmp_path_factory.mktemp("server"), "cpu") as command:
        yield command


@pytest.fixture(scope="module")
def ran(python: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files of a run of all parts but the demo: part -> its file."""
    folder = tmp_path_factory.mktemp("gpu")
    sanitizer = folder / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(SANITIZER.format(python=sys.executable))
    sanitizer.chmod(sanitizer.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(sanitizer.parent), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        status = main(["--device", "cpu", "--tiny", "--parts", PARTS, "--out", str(folder / "out")], python)
    card = folder / "out" / "gtx-1080-ti"
    return {"status": status, **{path.stem: json.loads(path.read_text()) for path in card.iterdir()}}


def test_every_part_was_run_and_written(ran: dict[str, Any]) -> None:
    assert ran["status"] == 1
    parts = {name: content for name, content in ran.items() if name != "status"}
    other = {"tests": "not run", "sanitizer": "wrong"}
    assert {name: part["state"] for name, part in parts.items()} == {**dict.fromkeys(parts, "right"), **other}
    assert parts.keys() == set(PARTS.split(","))
    for content in parts.values():
        assert content["card"]["name"] == "GTX 1080 Ti"
        assert content["versions"]["torch"] == torch.__version__
        assert all("python -m " in command for command in content["command"])
        assert 0 < content["seconds"] < content["limit"] + 10
        assert str(ROOT) not in json.dumps(content)
    assert ran["tests"]["summary"] == "needs a CUDA GPU, and torch.cuda.is_available() is False"
    assert ran["tests"]["figures"]["counts"] == {"skipped": len(list((ROOT / "tests" / "gpu").glob("test_*.py")))}


def test_the_selftest_and_the_benchmarks_have_their_figures(ran: dict[str, Any]) -> None:
    assert ran["selftest"]["figures"]["verdict"].startswith("PASS")
    for name, candidates in (("bench-forward", {"fused", "tiled"}), ("bench-backward", {"tiled"})):
        [shape] = ran[name]["figures"]["shapes"]
        found = {result["name"]: result for result in shape["results"]}
        for each in candidates:
            result = found[f"ours-{each}"]
            assert result["ran"] == each
            assert result["seconds"] > 0
            assert result["error"] < 1e-5
        assert ran[name]["figures"]["settings"]["backward"] == (name == "bench-backward")


def test_the_sanitizer_runs_the_kernels_once_with_each_tool(ran: dict[str, Any]) -> None:
    figures = ran["sanitizer"]["figures"]
    errors = {tool: (found["state"], found["errors"]) for tool, found in figures.items()}
    of_racecheck = {"racecheck": ("wrong", 1), "racecheck of counters": ("right", 1)}
    assert errors == {"memcheck": ("right", 0), **of_racecheck, "synccheck": ("right", 0)}
    assert figures["racecheck of counters"]["words"] == "1 error, known false alarms"
    assert all("forward-64-float32-none" in found["output"][0] for found in figures.values())
    assert all(command.startswith("compute-sanitizer --tool") for command in ran["sanitizer"]["command"])


FAULTS = {
    "split-32-float32-none": "is wrong",
    "split-32-bfloat16-none": "hangs",
    "split-32-float32-bool": "loses the context",
    "split-32-float16-bool": "ends its process",
}


def test_each_kernel_that_is_wrong_hangs_or_takes_the_card_along_is_named_at_once(
    python: tuple[str, ...], ran: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that are right have run before (``ran``): none of them is built now."""
    said: dict[str, float] = {}
    names = ",".join(["forward-32-float32-none", "split-32-float16-none", *FAULTS])
    monkeypatch.setattr(command, "TINY", {**command.TINY, "variants": ("--names", names, "--limit", "10")})
    monkeypatch.setattr(command, "say", lambda name, text, seconds=None: said.update({text: time.monotonic()}))
    monkeypatch.setattr(command, "num_processes", lambda memory: 2)
    monkeypatch.setenv("FAULTS", json.dumps(FAULTS))
    began = time.monotonic()
    assert main(["--device", "cpu", "--tiny", "--parts", "variants", "--out", str(tmp_path)], python) == 1
    *bad, last = said
    assert last.startswith("wrong: 2 passed, 4 failed")
    messages = {FAULTS[line.split()[1].removesuffix(":")]: line.partition(": ")[2] for line in bad}
    assert messages == {
        "is wrong": "wrong: inf times the error that is allowed",
        "hangs": "it hangs: ended after 10 s",
        "loses the context": "DriverError: an illegal memory access was encountered",
        "ends its process": "it has ended its process: exit status 1",
    }
    assert max(said.values()) - began < 100
    content = json.loads((tmp_path / "gtx-1080-ti" / "variants.json").read_text())
    assert content["state"] == "wrong"
    assert {line["test"] for line in content["figures"]["failures"]} == FAULTS.keys()


@pytest.mark.skipif(bool(guard.why_not()), reason=guard.why_not())
@at_night
@pytest.mark.parametrize("part", ["variants", "tests", "bench-forward", "bench-backward", "bench-linear"])
def test_each_part_is_right_on_a_card_not_here(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PASCAL_ATTN_TRUST": "1", "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with _python(tmp_path, "cuda", LD_PRELOAD=str(guard.library())) as command:
        status = main(["--device", "cuda", "--tiny", "--parts", part, "--out", str(tmp_path / "out")], command)
    content = json.loads((tmp_path / "out" / "nvidia-geforce-gtx-1080-ti" / f"{part}.json").read_text())
    assert (status, content["state"]) == (0, "right"), content
    assert content["card"]["arch"] == "sm_61"
