"""The parts of a run, in their order, and how each outcome is judged."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import child, sanitizer, told
from .results import ROOT, read

# What an outcome can be. The first two hold until something changes; after the others the part is run again.
# Unfinished: it ran out of time, and nothing was wrong so far.
RIGHT, WRONG, FAILED, UNFINISHED, NOT_RUN = "right", "wrong", "failed", "unfinished", "not run"
LASTING = (RIGHT, WRONG)
BAD = (WRONG, FAILED)
# What a part needs for its own beginning and end.
_MARGIN = 12.0
_SECONDS_OF_SELFTEST = 60.0
_NO_DEVICE, _NO_TESTS = 2, 5  # exit statuses of our programs, of pytest


class Outcome(NamedTuple):
    """summary: in one line; figures: for the file; bad: what is wrong, a line for each."""

    state: str
    summary: str
    figures: dict[str, Any]
    bad: Sequence[str] = ()


# Arguments of the commands, by part; ``name`` is one of the conditions of a result.
Sizes = Mapping[str, tuple[str, ...]]
# Tests on a card, random calls among them; the part "selftest" is one of them.
_SELFTEST, _OBSERVE = "tests/gpu/test_selftest_on_gpu.py", "tests/unit/core/test_observe.py"
TESTS = ("tests/gpu", "tests/contract/test_fuzz.py", "tests/host/diffusers/test_on_gpu.py", _OBSERVE)
_SHAPES = "sdxl,sd15,flux,gqa,causal,mask_padding,decode,cross77,sdxl_bf16,vae,mask_bool,mask_bias,wan"
_FULL = ("--shapes", _SHAPES, "--rounds", "3", "--seconds", "1")
FULL: Sizes = {
    "name": ("full",),
    "tests": (*TESTS, "-m", "gpu and not timed", "--deselect", _SELFTEST, "--fuzz-calls", "2000"),
    "timed-tests": ("tests/gpu", "-m", "gpu and timed", "-n", "1"),
    "bench-forward": _FULL,
    "bench-backward": ("--backward", *_FULL),
    "bench-linear": ("--linear", "--shapes", "all", "--rounds", "5", "--seconds", "1"),
}
_OWN = ("--shape", "Hq=2,L=70,D=32", "--candidates", "fused,torch,tiled", "--rounds", "1", "--seconds", "0.1")
TINY: Sizes = {
    "name": ("tiny",),
    "tests": ("tests/gpu", "-m", "gpu", "-n", "0", "-k", "every_architecture or autocast"),
    "timed-tests": ("tests/gpu", "-m", "gpu and timed", "-n", "0", "-k", "every_architecture"),
    "selftest": ("--no-speed", "--threads", "1", "--seconds", "2"),
    "bench-forward": _OWN,
    "bench-backward": ("--backward", *_OWN, "--candidates", "torch,tiled"),
    "bench-linear": ("--linear", "--shapes", "llm-decode", "--rounds", "1", "--seconds", "0.1"),
    "demo": ("--quick", "--only", "image", "--steps", "1"),
    "variants": ("--names", "forward-32-float32-none,split-32-float16-none"),
    "sanitizer": ("--names", "forward-64-float32-none"),
}


@dataclass
class Job:
    """The conditions under which a part runs.

    Attributes:
        python: the command that runs Python.
        end: the moment, of ``time.monotonic``, at which the part is stopped.
        scratch: an empty folder.
        before: the figures of an earlier run that did not come to its end.
        env: the environment of its processes.
        processes: how many it may run at once.
        stop: ends them when it is set.
        commands: what has been run, for the reader.
        judge: how a process ended -> the outcome, by what has been written so far. None: what it printed is all.
    """

    python: tuple[str, ...]
    device: str
    sizes: Sizes
    end: float
    scratch: Path
    before: dict[str, Any]
    env: dict[str, str]
    processes: int = 1
    stop: threading.Event = field(default_factory=threading.Event)
    commands: list[str] = field(default_factory=list)
    judge: Callable[[child.Ended], Outcome] | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def run(self, *arguments: str, prefix: Sequence[str] = (), seconds: float = math.inf, **env: str) -> child.Ended:
        """Run Python with these arguments, at most to the end of the part, or this many seconds."""
        text = shlex.join([*(Path(word).name for word in prefix[:1]), *prefix[1:], "python", *arguments])
        if text not in self.commands:
            self.commands.append(text)
        handle, output = tempfile.mkstemp(dir=self.scratch, prefix="output-")
        os.close(handle)
        command, seconds = [*prefix, *self.python, *arguments], min(seconds, self.left)
        return child.run(command, seconds, Path(output), cwd=ROOT, env={**self.env, **env}, stop=self.stop)

    def judged(self, judge: Callable[[child.Ended], Outcome], *arguments: str, **options: Any) -> Outcome:
        """The outcome of :meth:`run`, which grows meanwhile."""
        self.judge = judge
        return judge(self.run(*arguments, **options))

    def so_far(self) -> Outcome:
        """The outcome if nothing more came."""
        if self.judge is not None:
            return self.judge(child.CUT)
        lines = [line for path in self.scratch.glob("output-*") for line in child.tail(path).splitlines()]
        return Outcome(UNFINISHED, child.CUT.words, {"output": lines} if lines else {})

    def watch(self, name: str = "told") -> told.Watch:
        """A new folder for what processes tell."""
        return told.Watch(self.scratch / name, self.before)


@dataclass(frozen=True)
class Part:
    """weight: its share of the time, relative to the parts behind it. made_from: files and folders that its result
    depends on. share: of the processors, relative to the parts beside it; 0: it is timed, alone."""

    name: str
    weight: float
    made_from: tuple[str, ...]
    run: Callable[[Job], Outcome]
    share: int = 0


def _variants(job: Job) -> Outcome:
    """Kernels one by one, in processes that any of them may end; what is known of before is left out."""
    watch = job.watch()
    job.judge = lambda ended: _judge_told(ended, watch.look())
    with ThreadPoolExecutor(job.processes) as pool:
        shares = [f"{number + 1}/{job.processes}" for number in range(job.processes)]
        ends = list(pool.map(lambda share: _share(job, watch.folder, share), shares))
    ended = next((each for each in ends if each.status is None), max(ends, key=lambda each: each.status != 0))
    return Outcome(NOT_RUN, ended.last_line, {}) if ended.status == _NO_DEVICE else job.judge(ended)


def _share(job: Job, folder: Path, share: str) -> child.Ended:
    """A share of the kernels: one process after the other, each begun where a kernel has ended the one before it."""
    teller = told.Teller(folder, f"share-{share.partition('/')[0]}")
    given = ("--told", str(folder), "--share", share, *job.sizes.get("variants", ()))
    while True:
        known = len(told.read(folder, teller.writer).ended)
        ended = job.run("-m", "tools.gpu.card", "--device", job.device, *given)
        if ended.status in (0, _NO_DEVICE, None):
            return ended
        for line in told.read(folder, teller.writer).begun.values():
            teller.lose(line, ended.seconds, f"it has ended its process: {ended.words}")
        if len(told.read(folder, teller.writer).ended) == known:
            return ended


def _tests(job: Job, part: str) -> Outcome:
    """Tests that have passed before are left out."""
    watch = job.watch()
    given = ("-p", "no:cacheprovider", "-p", "tools.gpu.recorder", "--told", str(watch.folder))
    until = f"{time.time() + job.left - _MARGIN:.0f}"
    command = ("-m", "pytest", *given, "--until", until, "-n", str(job.processes), "--dist", "load", *job.sizes[part])
    # A child process for the first use of each kind of call would take longer than the tests.
    return job.judged(lambda ended: _judge_told(ended, watch.look()), *command, PASCAL_ATTN_TRUST="1")


def _judge_told(ended: child.Ended, known: told.Told) -> Outcome:
    figures, left = known.figures(), known.left
    counts = Counter(figures["counts"])
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])
    if left:
        said = f"{said or 'none had ended'} of {figures['collected']}; the same command goes on with the others"
    elif errors := [line["error"] for line in known.ended.values() if "error" in line]:
        said += f"; errors up to {max(errors):.2f} of what is allowed"
    bad = [f"{line['test']}: {_gist(line['message'])}" for line in figures["failures"]]
    if bad:
        # failed: the others are still to be run
        return Outcome(FAILED if left else WRONG, said, figures, bad)
    if ended.status not in (0, _NO_TESTS, None):
        return _failed(ended, figures)
    if left or (ended.status is None and not counts):
        return Outcome(UNFINISHED, said or ended.words, figures)
    if not counts["passed"]:
        return Outcome(NOT_RUN, next(iter(figures["skipped"]), "nothing was found"), figures)
    return Outcome(RIGHT, said, figures)


def _gist(message: str) -> str:
    """The line of a message that says what is wrong."""
    lines = message.strip().splitlines() or [""]
    return next((line.removeprefix("E").strip() for line in lines if line.startswith("E  ")), lines[-1])[:200]


def _selftest(job: Job) -> Outcome:
    path = job.scratch / "selftest.json"
    seconds = max(1.0, min(_SECONDS_OF_SELFTEST, job.left - 2 * _MARGIN))
    given = ("--device", job.device, "--seconds", f"{seconds:g}", "--json", str(path), *job.sizes.get("selftest", ()))
    ended = job.run("-m", "pascal_attn_core", "selftest", *given)
    figures = read(path)
    if not figures:
        return _failed(ended, figures)
    is_unfinished = figures["verdict"].startswith("UNFINISHED")
    return Outcome(RIGHT if ended.status == 0 else UNFINISHED if is_unfinished else WRONG, figures["verdict"], figures)


def _bench(job: Job, part: str, words: Callable[[dict[str, Any]], str]) -> Outcome:
    """``words``: what was done by the figures, "" = nothing."""
    path = job.scratch / "bench.json"
    given = ("-m", "tools.peers", "--device", job.device, "--json", str(path), *job.sizes[part])

    def outcome(ended: child.Ended) -> Outcome:
        figures = read(path)
        said = words(figures)
        if ended.status is None:
            return Outcome(UNFINISHED, f"{ended.words}; {said or 'no shape was done'}", figures)
        return Outcome(RIGHT, said, figures) if ended.status == 0 and said else _failed(ended, figures)

    return job.judged(outcome, *given)


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
    given = ("--device", job.device, "--out", str(out), *job.sizes.get("demo", ()))
    ended = job.run("-m", "pascal_attn_core", "demo", *given)
    figures = read(out / "results.json")
    if ended.status != 0 or not figures:
        return _failed(ended, figures)
    return Outcome(RIGHT, "; ".join(_demo_line(report) for report in figures["models"]), figures)


def _demo_line(report: dict[str, Any]) -> str:
    times = {row["name"]: row["seconds"] for row in report["results"]}
    seconds = ", ".join(f"{name} -" if took is None else f"{name} {took:.1f} s" for name, took in times.items())
    return f"{report['model']['name']}: {seconds}"


def _call_cost(job: Job) -> Outcome:
    ended = job.run("tools/call_cost.py", "--on", "card", "--device", job.device)
    if ended.status:
        return Outcome(NOT_RUN, ended.last_line, {}) if ended.status == _NO_DEVICE else _failed(ended, {})
    lines = ended.output.splitlines()
    return Outcome(RIGHT if ended.status == 0 else UNFINISHED, f"{len(lines)} kinds of calls", {"output": lines})


def _sanitizer(job: Job) -> Outcome:
    places = [job.env.get("PATH", ""), *map(str, sanitizer.folders(job.env))]
    program = shutil.which(sanitizer.NAME, path=os.pathsep.join(places))
    if program is None:
        return Outcome(NOT_RUN, f"{sanitizer.NAME} not found (looked in {', '.join(['PATH', *places[1:]])})", {})
    found: dict[str, dict[str, Any]] = {}
    rounds = -(-len(sanitizer.RUNS) // job.processes)

    def run(number: int, name: str) -> None:
        (tool, kernels), watch = sanitizer.RUNS[name], job.watch(name)
        given = ("--told", str(watch.folder), "--names", kernels, *job.sizes.get("sanitizer", ()))
        ended = job.run(
            *("-m", "tools.gpu.card", "--device", job.device, *given),
            prefix=sanitizer.command(program, tool),
            seconds=job.left / (rounds - number // job.processes),
            # One allocation for each tensor, so that what lies behind it belongs to no tensor.
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
        wrong = [line["test"] for line in watch.look().with_outcome("failed")]
        found[name] = _sanitized(ended, wrong, is_known=name == sanitizer.FALSE_ALARMS)

    job.judge = lambda ended: _judge_sanitizer(dict(found))
    with ThreadPoolExecutor(job.processes) as pool:
        list(pool.map(run, itertools.count(), sanitizer.RUNS))
    return _judge_sanitizer(found)


def _judge_sanitizer(found: dict[str, dict[str, Any]]) -> Outcome:
    states = {each["state"] for each in found.values()}
    if len(found) < len(sanitizer.RUNS):
        states.add(UNFINISHED)
    words = {name: f"{name}: {each['words']}" for name, each in found.items()}
    bad = [words[name] for name, each in found.items() if each["state"] in BAD]
    worst = next((state for state in (FAILED, WRONG, UNFINISHED) if state in states), RIGHT)
    if worst == WRONG and UNFINISHED in states:
        worst = FAILED  # run again
    return Outcome(worst, ", ".join(words.values()), found, bad=bad)


def _sanitized(ended: child.Ended, wrong: list[str], is_known: bool) -> dict[str, Any]:
    """``wrong``: kernels; ``is_known``: errors are known to be none."""
    errors = sanitizer.errors_in(ended.output)
    state, words = RIGHT, "no errors"
    if ended.status is None:
        state, words = UNFINISHED, ended.words
    elif wrong:
        state, words = WRONG, f"wrong: {', '.join(wrong)}"
    elif errors:
        state = RIGHT if is_known else WRONG
        words = f"{errors} error{'s'[: errors != 1]}{', known false alarms' * is_known}"
    elif ended.status != 0 or errors is None:
        state, words = FAILED, f"{ended.words}: {ended.last_line}" if ended.status else "it gave no summary"
    line = {"state": state, "errors": errors, "words": words, "ended": ended.words, "seconds": ended.seconds}
    return {**line, "output": ended.output.splitlines()}


def _failed(ended: child.Ended, figures: dict[str, Any]) -> Outcome:
    if ended.status is None and not ended.remains:
        return Outcome(UNFINISHED, ended.words, figures)
    figures = {**figures, "output": ended.output.splitlines()}
    return Outcome(FAILED, f"{ended.words}: {ended.last_line}"[:200], figures)


_CORE = ("pascal_attn_core",)
_TOOL = ("pascal_attn_core", "tools/gpu")
_OF_TESTS = ("nodes", "tools/families", "tests/support", "tests/conftest.py", *TESTS)
# First what is right or wrong, side by side, then what is timed. Weights are seconds of nine minutes.
PARTS = (
    Part("variants", 200, _TOOL, _variants, share=3),
    Part("tests", 200, (*_CORE, *_OF_TESTS), lambda job: _tests(job, "tests"), share=11),
    Part("sanitizer", 200, _TOOL, _sanitizer, share=2),
    Part("selftest", 60, _CORE, _selftest),
    Part("timed-tests", 15, (*_CORE, *_OF_TESTS), lambda job: _tests(job, "timed-tests")),
    Part("bench-forward", 70, _CORE, lambda job: _bench(job, "bench-forward", _ratios)),
    Part("bench-backward", 60, _CORE, lambda job: _bench(job, "bench-backward", _ratios)),
    Part("bench-linear", 35, _CORE, lambda job: _bench(job, "bench-linear", _linear_ratios)),
    Part("call-cost", 10, (*_CORE, "tools/call_cost.py"), _call_cost),
    Part("demo", 30, _CORE, _demo),
)
