"""The parts of a run, in their order, and how each outcome is judged."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import child, sanitizer
from .results import ROOT, read
from .table import table

# What an outcome can be. The first two hold until something changes; after the others the part is run again.
# Unfinished: it ran out of time, and nothing was wrong so far.
RIGHT, WRONG, FAILED, UNFINISHED, NOT_RUN = "right", "wrong", "failed", "unfinished", "not run"
LASTING = (RIGHT, WRONG)
BAD = (WRONG, FAILED)
# What a part needs for its own beginning and end.
_MARGIN = 12.0
_SLOWEST = 10
_INTERRUPTED, _NO_TESTS = 2, 5  # exit statuses of pytest


class Outcome(NamedTuple):
    """summary: in one line; figures: for the file; table: lines for the terminal."""

    state: str
    summary: str
    figures: dict[str, Any]
    table: Sequence[str] = ()


@dataclass(frozen=True)
class Sizes:
    """How large everything is run: arguments of the commands. ``name`` is one of the conditions of a result."""

    name: str
    tests: tuple[str, ...]
    selftest_seconds: float
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    linear: tuple[str, ...]
    selftest: tuple[str, ...] = ()
    demo: tuple[str, ...] = ()
    sanitized: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


_SHAPES = "sdxl,sd15,flux,gqa,causal,mask_padding,decode,cross77,sdxl_bf16,vae,mask_bool,mask_bias,wan"
FULL = Sizes(
    "full",
    # the part "selftest" is that test
    tests=("--deselect", "tests/gpu/test_selftest_on_gpu.py"),
    selftest_seconds=60.0,
    forward=("--shapes", _SHAPES, "--rounds", "3", "--seconds", "1"),
    backward=("--backward", "--shapes", _SHAPES, "--rounds", "3", "--seconds", "1"),
    linear=("--linear", "--shapes", "all", "--rounds", "5", "--seconds", "1"),
)
_OWN = ("--shape", "Hq=2,L=70,D=32", "--candidates", "fused,torch,tiled", "--rounds", "1", "--seconds", "0.1")
TINY = Sizes(
    "tiny",
    tests=("-k", "every_architecture or autocast"),
    selftest=("--no-speed", "--threads", "1"),
    selftest_seconds=2.0,
    forward=_OWN,
    backward=("--backward", *_OWN, "--candidates", "torch,tiled"),
    linear=("--linear", "--shapes", "llm-decode", "--rounds", "1", "--seconds", "0.1"),
    demo=("--quick", "--only", "image", "--steps", "1"),
    sanitized=("--most", "1"),
    sweep=("--jobs=forward-32-float32-none", "--tokens=70", "--waves=0", "--rounds=1", "--most=1", "--processes=1"),
)


@dataclass
class Job:
    """The conditions under which a part runs.

    Attributes:
        python: the command that runs Python.
        end: the moment, of ``time.monotonic``, at which the part is stopped.
        scratch: an empty folder.
        before: the figures of an earlier run that did not come to its end.
        env: the environment of its processes.
        commands: what has been run, for the reader.
        progress: the file in which the figures grow, where an interrupt shall leave those so far.
    """

    python: tuple[str, ...]
    device: str
    sizes: Sizes
    end: float
    scratch: Path
    before: dict[str, Any]
    env: dict[str, str]
    commands: list[str] = field(default_factory=list)
    progress: Path | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def run(
        self,
        *arguments: str,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> child.Ended:
        """Run Python with these arguments, at most to the end of the part, or this many seconds."""
        before = [Path(prefix[0]).name, *prefix[1:]] if prefix else []
        self.commands.append(shlex.join([*before, "python", *arguments]))
        limit = self.left if seconds is None else min(seconds, self.left)
        command = [*prefix, *self.python, *arguments]
        return child.run(command, limit, cwd=ROOT, env={**self.env, **(env or {})})


@dataclass(frozen=True)
class Part:
    """weight: its share of the time, in units of those of the parts behind it; made_from: files and folders that its
    result depends on."""

    name: str
    weight: float
    made_from: tuple[str, ...]
    run: Callable[[Job], Outcome]


def _tests(job: Job) -> Outcome:
    """Tests that have passed before are left out. One that ends its process, or for which there was not enough time, is
    run after all the others next time."""
    path, known = job.scratch / "tests.jsonl", job.scratch / "before.json"
    passed, lost = dict(job.before.get("seconds", {})), list(job.before.get("lost", []))
    known.write_text(json.dumps({"passed": list(passed), "lost": lost}))
    seconds = max(0.0, job.left - _MARGIN)
    given = ("-p", "no:cacheprovider", "-p", "tools.gpu.recorder", "--record", str(path), "--before", str(known))
    given += ("--seconds", f"{seconds:.0f}", *job.sizes.tests)
    # A child process for the first use of each kind of call would take longer than the tests.
    ended = job.run("-m", "pytest", "-m", "gpu", "tests/gpu", *given, env={"PASCAL_ATTN_TRUST": "1"})
    lines = _lines_of(path)
    tests = [line for line in lines if "test" in line]
    begun = next((line["begun"] for line in reversed(lines) if "begun" in line), None)
    if begun is not None and all(line["test"] != begun for line in tests):  # it has taken its process along
        if ended.status is not None or begun in lost:
            tests.append({"test": begun, "outcome": "failed", "seconds": ended.seconds, "message": ended.words})
        lost.append(begun)
    # A test may be told of twice: its call, and what failed when it was put away.
    outcomes = dict.fromkeys(passed, "passed")
    for line in tests:
        outcomes[line["test"]] = max(
            line["outcome"], outcomes.get(line["test"], ""), key=("", "passed", "skipped", "failed").index
        )
    passed |= {line["test"]: line["seconds"] for line in tests if outcomes[line["test"]] == "passed"}
    counts = Counter(outcomes.values())
    collected = next((line["collected"] for line in lines if "collected" in line), 0)
    figures: dict[str, Any] = {
        "collected": collected,
        "counts": dict(counts),
        "failures": [line for line in tests if line["outcome"] == "failed"],
        "skipped": dict(Counter(line["message"] for line in tests if line["outcome"] == "skipped")),
        "slowest": sorted(tests, key=lambda line: -line["seconds"])[:_SLOWEST],
        "seconds": passed,
        "lost": list(dict.fromkeys(lost)),
    }
    return _judge_tests(ended, figures, collected - sum("::" in name for name in outcomes))  # some are whole modules


def _judge_tests(ended: child.Ended, figures: dict[str, Any], left: int) -> Outcome:
    """``left``: tests without an outcome."""
    counts = Counter(figures["counts"])
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])
    if left:
        said = f"{said or 'none had ended'} of {figures['collected']}; the same command goes on with the others"
    if counts["failed"]:
        return Outcome(FAILED if left else WRONG, said, figures)  # failed: the others are still to be run
    if left and ended.status in (None, _INTERRUPTED):
        return Outcome(UNFINISHED, said, figures)
    if ended.status not in (0, _NO_TESTS):
        return _failed(ended, figures)
    if not counts["passed"]:
        return Outcome(NOT_RUN, next(iter(figures["skipped"]), "no test was found"), figures)
    return Outcome(RIGHT, said, figures)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """Lines that the tests wrote; the last one may be cut."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _selftest(job: Job) -> Outcome:
    path = job.scratch / "selftest.json"
    seconds = max(1.0, min(job.sizes.selftest_seconds, job.left - 2 * _MARGIN))
    given = ("--device", job.device, "--seconds", f"{seconds:g}", "--json", str(path), *job.sizes.selftest)
    ended = job.run("-m", "pascal_attn_core", "selftest", *given)
    figures = read(path)
    if not figures:
        return _failed(ended, figures)
    is_unfinished = figures["verdict"].startswith("UNFINISHED")
    return Outcome(RIGHT if ended.status == 0 else UNFINISHED if is_unfinished else WRONG, figures["verdict"], figures)


def _bench(job: Job, arguments: tuple[str, ...], words: Callable[[dict[str, Any]], str]) -> Outcome:
    """``words``: what was done by the figures, "" = nothing."""
    path = job.scratch / "bench.json"
    ended = job.run("-m", "tools.peers", "--device", job.device, "--json", str(path), *arguments)
    figures = read(path)
    return _benched(ended, figures, words(figures))


def _benched(ended: child.Ended, figures: dict[str, Any], said: str) -> Outcome:
    """``said``: what was done, "" = nothing."""
    if ended.status is None:
        return Outcome(UNFINISHED, f"{ended.words}; {said or 'no shape was done'}", figures)
    return Outcome(RIGHT, said, figures) if ended.status == 0 and said else _failed(ended, figures)


def _ratios(figures: dict[str, Any]) -> str:
    means = figures.get("geometric_means", {})
    ratios = ", ".join(
        f"{name.removeprefix('ours-')} {means[name]['ratio']:.2f}"
        for name in ("ours-auto", "ours-fused-tensor", "ours-fused", "ours-tiled")
        if name in means
    )
    count = len(figures.get("shapes", []))
    return f"{count} shape{'s'[: count != 1]}; in units of {figures.get('baseline')}: {ratios}" if count else ""


def _linear_ratios(figures: dict[str, Any]) -> str:
    found = [
        f"{report['layer']['name']} {result['ratio']:.2f} ({result['ran']})"
        for report in figures.get("layers", [])
        for result in report["results"]
        if result["name"] == "int8" and result["ratio"]
    ]
    return f"int8 in units of float32: {', '.join(found)}" if found else ""


def _demo(job: Job) -> Outcome:
    out = job.scratch / "demo"
    ended = job.run("-m", "pascal_attn_core", "demo", "--device", job.device, "--out", str(out), *job.sizes.demo)
    figures = read(out / "results.json")
    if ended.status != 0 or not figures:
        return _failed(ended, figures)
    return Outcome(RIGHT, "; ".join(_demo_line(report) for report in figures["models"]), figures)


def _demo_line(report: dict[str, Any]) -> str:
    times = {row["name"]: row["seconds"] for row in report["results"]}
    seconds = ", ".join(f"{name} -" if took is None else f"{name} {took:.1f} s" for name, took in times.items())
    return f"{report['model']['name']}: {seconds}"


def _sanitizer(job: Job) -> Outcome:
    found = sanitizer.find(job.env)
    if found.path is None:
        why = f"{sanitizer.NAME} not found (looked in {', '.join(found.looked_in)})"
        return Outcome(NOT_RUN, why, {})
    figures: dict[str, Any] = {}
    states, said = [], []
    for number, tool in enumerate(sanitizer.TOOLS):
        ended = job.run(
            *("-m", "tools.gpu.sanitized", "--device", job.device, *job.sizes.sanitized),
            prefix=sanitizer.command(found.path, tool),
            # One allocation for each tensor, so that what lies behind it belongs to no tensor.
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            seconds=job.left / (len(sanitizer.TOOLS) - number),
        )
        errors = sanitizer.errors_in(ended.output)
        state, words = _sanitized(ended, errors)
        states.append(state)
        said.append(f"{tool}: {words}")
        figures[tool] = {"state": state, "errors": errors, "ended": ended.words, "seconds": ended.seconds}
        figures[tool]["output"] = ended.output.splitlines()
    worst = next((state for state in (FAILED, WRONG, UNFINISHED) if state in states), RIGHT)
    if worst == WRONG and UNFINISHED in states:
        worst = FAILED  # run again
    return Outcome(worst, ", ".join(said), figures)


def _sanitized(ended: child.Ended, errors: int | None) -> tuple[str, str]:
    if ended.status is None:
        return UNFINISHED, ended.words
    if errors:
        return WRONG, f"{errors} error{'s'[: errors != 1]}"
    if ended.status != 0:
        return FAILED, f"{ended.words}: {ended.last_line}"
    return (FAILED, "it gave no summary") if errors is None else (RIGHT, "no errors")


def _rates(job: Job) -> Outcome:
    path = job.scratch / "rates.json"
    ended = job.run("-m", "tools.gpu.rates", "--device", job.device, "--json", str(path))
    if ended.status == 2:
        return Outcome(NOT_RUN, ended.last_line, {})
    return _benched(ended, read(path), ended.last_line)


def _sweep(job: Job) -> Outcome:
    """A candidate may end its process; the next process goes on behind it."""
    path = job.scratch / "sweep.json"
    job.progress = path
    if job.before:
        path.write_text(json.dumps({name: value for name, value in job.before.items() if name != "output"}))
    while True:  # until a process ends in order, or twice at the same place
        trying = read(path).get("trying", "")
        seconds = max(0.0, job.left - _MARGIN)
        given = ("--device", job.device, "--json", str(path), "--seconds", f"{seconds:.0f}", *job.sizes.sweep)
        ended = job.run("-m", "tools.gpu.sweep", *given)
        figures = read(path)
        died_again = figures.get("trying", "") in ("", trying)
        if ended.status in (0, 2, 3, None) or died_again or job.left < _MARGIN:
            break
    jobs = figures.get("jobs", [])
    left, total = len(figures.get("not_reached", [])), len(jobs) + len(figures.get("not_reached", []))
    wrong = [each["job"] for each in jobs if each["shipped_note"]]
    lost = figures.get("lost", {})
    said = f"{len(jobs)} of {total} kernels" + (f", {len(lost)} ended their process" if lost else "")
    shown = table(jobs) if jobs else []
    if wrong:
        said += f"; the shipped geometry does not run: {', '.join(wrong)}"
        return Outcome(FAILED if left else WRONG, said, figures, shown)  # failed: the others are still to be run
    if ended.status == 0:
        return Outcome(RIGHT, said, figures, shown)
    if ended.status == 2:
        return Outcome(NOT_RUN, ended.last_line, figures)
    if (ended.status in (3, None) or not died_again) and left:
        return Outcome(UNFINISHED, f"{said}; the same command goes on with the others", figures, shown)
    return _failed(ended, figures)


def _failed(ended: child.Ended, figures: dict[str, Any]) -> Outcome:
    if ended.status is None and not ended.remains:
        return Outcome(UNFINISHED, ended.words, figures)
    figures = {**figures, "output": ended.output.splitlines()}
    return Outcome(FAILED, f"{ended.words}: {ended.last_line}"[:200], figures)


_CORE = ("pascal_attn_core",)
_TOOL = ("pascal_attn_core", "tools/gpu")
PARTS = (
    Part("rates", 20, _TOOL, _rates),
    Part("selftest", 80, _CORE, _selftest),
    Part("tests", 130, ("pascal_attn_core", "nodes", "tests/gpu", "tests/support", "tests/conftest.py"), _tests),
    Part("bench-forward", 75, _CORE, lambda job: _bench(job, job.sizes.forward, _ratios)),
    Part("bench-backward", 60, _CORE, lambda job: _bench(job, job.sizes.backward, _ratios)),
    Part("bench-linear", 40, _CORE, lambda job: _bench(job, job.sizes.linear, _linear_ratios)),
    Part("demo", 40, _CORE, _demo),
    Part("sanitizer", 75, _TOOL, _sanitizer),
    Part("sweep", 80, _TOOL, _sweep),
)
