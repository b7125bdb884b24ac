"""The parts of a run, in their order, and how each outcome is judged."""

from __future__ import annotations

import itertools
import json
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import child, sanitizer, told
from .results import ROOT, read
from .table import table

# What an outcome can be. The first two hold until something changes; after the others the part is run again.
# Unfinished: it ran out of time, and nothing was wrong so far.
RIGHT, WRONG, FAILED, UNFINISHED, NOT_RUN = "right", "wrong", "failed", "unfinished", "not run"
LASTING = (RIGHT, WRONG)
BAD = (WRONG, FAILED)
# What a part needs for its own beginning and end.
_MARGIN = 12.0
_NO_DEVICE, _NO_TESTS = 2, 5  # exit statuses of our programs, of pytest


class Outcome(NamedTuple):
    """summary: in one line; figures: for the file; table: lines for the terminal; bad: what is wrong, a line for
    each."""

    state: str
    summary: str
    figures: dict[str, Any]
    table: Sequence[str] = ()
    bad: Sequence[str] = ()


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
    variants: tuple[str, ...] = ()
    sanitized: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


_SHAPES = "sdxl,sd15,flux,gqa,causal,mask_padding,decode,cross77,sdxl_bf16,vae,mask_bool,mask_bias,wan"
# Those on a card, random calls among them.
TESTS = ("tests/gpu", "tests/contract/test_fuzz.py", "tests/host/diffusers/test_on_gpu.py")
TESTS += ("tests/unit/core/test_observe.py",)
FULL = Sizes(
    "full",
    # the part "selftest" is that test
    tests=(*TESTS, "--deselect", "tests/gpu/test_selftest_on_gpu.py", "--fuzz-calls", "2000"),
    selftest_seconds=60.0,
    forward=("--shapes", _SHAPES, "--rounds", "3", "--seconds", "1"),
    backward=("--backward", "--shapes", _SHAPES, "--rounds", "3", "--seconds", "1"),
    linear=("--linear", "--shapes", "all", "--rounds", "5", "--seconds", "1"),
)
_OWN = ("--shape", "Hq=2,L=70,D=32", "--candidates", "fused,torch,tiled", "--rounds", "1", "--seconds", "0.1")
TINY = Sizes(
    "tiny",
    tests=("tests/gpu", "-n", "0", "-k", "every_architecture or autocast"),
    selftest=("--no-speed", "--threads", "1"),
    selftest_seconds=2.0,
    forward=_OWN,
    backward=("--backward", *_OWN, "--candidates", "torch,tiled"),
    linear=("--linear", "--shapes", "llm-decode", "--rounds", "1", "--seconds", "0.1"),
    demo=("--quick", "--only", "image", "--steps", "1"),
    variants=("--names", "forward-32-float32-none,split-32-float16-none"),
    sanitized=("--names", "forward-64-float32-none"),
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
    _numbers: Iterator[int] = field(default_factory=itertools.count)

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
        text = shlex.join([*before, "python", *arguments])
        if text not in self.commands:
            self.commands.append(text)
        limit = self.left if seconds is None else min(seconds, self.left)
        command, output = [*prefix, *self.python, *arguments], self.scratch / f"output-{next(self._numbers)}"
        whole = {**self.env, **(env or {})}
        return child.run(command, limit, cwd=ROOT, env=whole, output=output, stop=self.stop)

    def judged(self, judge: Callable[[child.Ended], Outcome], *arguments: str, **options: Any) -> Outcome:
        """The outcome of :meth:`run`, which grows meanwhile."""
        self.judge = judge
        return judge(self.run(*arguments, **options))

    def so_far(self) -> Outcome:
        """The outcome if nothing more came."""
        if self.judge is not None:
            return self.judge(child.CUT)
        lines = [line for path in sorted(self.scratch.glob("output-*")) for line in child.tail(path).splitlines()]
        return Outcome(UNFINISHED, child.CUT.words, {"output": lines} if lines else {})

    def told(self, name: str = "told") -> Path:
        """A folder for what processes tell; what passed before is told there."""
        folder = self.scratch / name
        folder.mkdir()
        told.tell_before(folder, self.before)
        return folder


@dataclass(frozen=True)
class Part:
    """weight: its share of the time, in units of those of the parts behind it; made_from: files and folders that its
    result depends on; share: of the processors, in units of those of the parts beside it. 0: it is timed, alone."""

    name: str
    weight: float
    made_from: tuple[str, ...]
    run: Callable[[Job], Outcome]
    share: int = 0


def _variants(job: Job) -> Outcome:
    """Every kernel against its definition; those that were right before are left out."""
    watch = told.Watch(job.told())
    job.judge = lambda ended: _judge_told(ended, watch.look())
    with ThreadPoolExecutor(job.processes) as pool:
        shares = [pool.submit(_share, job, watch.folder, number + 1) for number in range(job.processes)]
        ended = [share.result() for share in shares]
    worst = next((each for each in ended if each.status), ended[0])
    if worst.status == _NO_DEVICE:
        return Outcome(NOT_RUN, worst.last_line, {})
    return _judge_told(next((each for each in ended if each.status is None), worst), watch.look())


def _share(job: Job, folder: Path, number: int) -> child.Ended:
    """A share of the kernels: one process after the other, each begun where a kernel has ended the one before it."""
    writer = f"share-{number}"
    while True:
        known = len(told.read(folder, writer).ended)
        given = ("--told", str(folder), "--share", f"{number}/{job.processes}", *job.sizes.variants)
        ended = job.run("-m", "tools.gpu.variants", "--device", job.device, *given)
        if ended.status in (0, _NO_DEVICE, None):
            return ended
        for name in told.read(folder, writer).begun:
            line = {"test": name, "outcome": "failed", "seconds": round(ended.seconds, 3)}
            told.tell(folder, writer, **line, message=f"it has ended its process: {ended.words}")
        if len(told.read(folder, writer).ended) == known:
            return ended


def _tests(job: Job) -> Outcome:
    """Tests that have passed before are left out."""
    watch = told.Watch(job.told())
    given = ("-p", "no:cacheprovider", "-p", "tools.gpu.recorder", "--told", str(watch.folder))
    given += ("--until", f"{time.time() + job.left - _MARGIN:.0f}", "-n", str(job.processes), "--dist", "load")
    # A child process for the first use of each kind of call would take longer than the tests.
    options: dict[str, Any] = {"env": {"PASCAL_ATTN_TRUST": "1"}}
    return job.judged(
        lambda ended: _judge_told(ended, watch.look()),
        *("-m", "pytest", "-m", "gpu", *given, *job.sizes.tests),
        **options,
    )


def _judge_told(ended: child.Ended, known: told.Told) -> Outcome:
    figures, left = known.figures(), known.left
    counts = Counter(figures["counts"])
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])
    if left:
        said = f"{said or 'none had ended'} of {figures['collected']}; the same command goes on with the others"
    elif "errors" in figures:
        said += f"; errors up to {max(figures['errors'].values()):.2f} of what is allowed"
    bad = [f"{line['test']}: {_gist(line['message'])}" for line in figures["failures"]]
    if bad:
        return Outcome(FAILED if left else WRONG, said, figures, bad=bad)  # failed: the others are still to be run
    if ended.status not in (0, _NO_TESTS, None):
        return _failed(ended, figures)
    if left or (ended.status is None and not counts):
        return Outcome(UNFINISHED, said or ended.words, figures)
    if not counts["passed"]:
        return Outcome(NOT_RUN, next(iter(figures["skipped"]), "no test was found"), figures)
    return Outcome(RIGHT, said, figures)


def _gist(message: str) -> str:
    """The line of a message that says what is wrong."""
    lines = message.strip().splitlines() or [""]
    return next((line.removeprefix("E").strip() for line in lines if line.startswith("E  ")), lines[-1])[:200]


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

    def judge(ended: child.Ended) -> Outcome:
        figures = read(path)
        return _benched(ended, figures, words(figures))

    return job.judged(judge, "-m", "tools.peers", "--device", job.device, "--json", str(path), *arguments)


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
    sought = sanitizer.find(job.env)
    if sought.path is None:
        why = f"{sanitizer.NAME} not found (looked in {', '.join(sought.looked_in)})"
        return Outcome(NOT_RUN, why, {})
    found: dict[str, dict[str, Any]] = {}
    program, rounds = sought.path, -(-len(sanitizer.RUNS) // job.processes)

    def run(number: int, name: str) -> None:
        tool, kernels = sanitizer.RUNS[name]
        folder = job.told(name)
        given = ("--device", job.device, "--told", str(folder), "--names", kernels, *job.sizes.sanitized)
        ended = job.run(
            *("-m", "tools.gpu.variants", *given),
            prefix=sanitizer.command(program, tool),
            # One allocation for each tensor, so that what lies behind it belongs to no tensor.
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            seconds=job.left / (rounds - number // job.processes),
        )
        found[name] = _sanitized(name, ended, told.read(folder))

    job.judge = lambda ended: _judge_tools(dict(found))
    with ThreadPoolExecutor(job.processes) as pool:
        for future in [pool.submit(run, *each) for each in enumerate(sanitizer.RUNS)]:
            future.result()
    return _judge_tools(found)


def _judge_tools(found: dict[str, dict[str, Any]]) -> Outcome:
    states = [each["state"] for each in found.values()]
    worst = next((state for state in (FAILED, WRONG, UNFINISHED) if state in states), RIGHT)
    is_whole = len(found) == len(sanitizer.RUNS)
    if not is_whole or (worst == WRONG and UNFINISHED in states):
        worst = FAILED if worst in BAD else UNFINISHED  # run again
    words = [f"{name}: {each['words']}" for name, each in found.items()]
    bad = [text for text, state in zip(words, states) if state in BAD]
    return Outcome(worst, ", ".join(words), found, bad=bad)


def _sanitized(name: str, ended: child.Ended, known: told.Told) -> dict[str, Any]:
    errors, wrong = sanitizer.errors_in(ended.output), [line["test"] for line in known.with_outcome("failed")]
    is_false = name == sanitizer.FALSE_ALARMS
    state, words = RIGHT, "no errors"
    if ended.status is None:
        state, words = UNFINISHED, ended.words
    elif wrong:
        state, words = WRONG, ", ".join(wrong)
    elif errors:
        state, words = RIGHT if is_false else WRONG, f"{errors} error{'s'[: errors != 1]}"
        words += " that are known to be none" if is_false else ""
    elif ended.status != 0 or errors is None:
        state, words = FAILED, f"{ended.words}: {ended.last_line}" if ended.status else "it gave no summary"
    line = {"state": state, "errors": errors, "words": words, "ended": ended.words, "seconds": ended.seconds}
    return {**line, "output": ended.output.splitlines()}


def _rates(job: Job) -> Outcome:
    path = job.scratch / "rates.json"
    ended = job.run("-m", "tools.gpu.rates", "--device", job.device, "--json", str(path))
    if ended.status == _NO_DEVICE:
        return Outcome(NOT_RUN, ended.last_line, {})
    return _benched(ended, read(path), ended.last_line)


def _sweep(job: Job) -> Outcome:
    """A candidate may end its process; the next process goes on behind it."""
    path = job.scratch / "sweep.json"
    job.judge = lambda ended: _swept(ended, read(path))
    if job.before:
        path.write_text(json.dumps({name: value for name, value in job.before.items() if name != "output"}))
    while True:  # until a process ends in order, or twice at the same place
        trying = read(path).get("trying", "")
        seconds = max(0.0, job.left - _MARGIN)
        given = ("--device", job.device, "--json", str(path), "--seconds", f"{seconds:.0f}", *job.sizes.sweep)
        ended = job.run("-m", "tools.gpu.sweep", *given)
        died_again = read(path).get("trying", "") in ("", trying)
        if ended.status in (0, 2, 3, None) or died_again or job.left < _MARGIN:
            return _swept(ended, read(path), died_again)


def _swept(ended: child.Ended, figures: dict[str, Any], died_again: bool = False) -> Outcome:
    jobs = figures.get("jobs", [])
    left, total = len(figures.get("not_reached", [])), len(jobs) + len(figures.get("not_reached", []))
    wrong = [f"{each['job']} ({each['shipped_note']})" for each in jobs if each["shipped_note"]]
    lost = figures.get("lost", {})
    said = f"{len(jobs)} of {total} kernels" + (f", {len(lost)} ended their process" if lost else "")
    shown = table(jobs) if jobs else []
    if wrong:
        said += f"; the shipped geometry does not run: {', '.join(wrong)}"
        # failed: the others are still to be run
        return Outcome(FAILED if left else WRONG, said, figures, shown, wrong)
    if ended.status == 0:
        return Outcome(RIGHT, said, figures, shown)
    if ended.status == _NO_DEVICE:
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
_OF_TESTS = ("nodes", "tools/families", "tests/support", "tests/conftest.py", *TESTS)
# First what is right or wrong, side by side, then what is timed. Weights are seconds of nine minutes.
PARTS = (
    Part("variants", 200, _TOOL, _variants, share=3),
    Part("tests", 200, (*_CORE, *_OF_TESTS), _tests, share=11),
    Part("sanitizer", 200, _TOOL, _sanitizer, share=2),
    Part("rates", 15, _TOOL, _rates),
    Part("selftest", 65, _CORE, _selftest),
    Part("bench-forward", 70, _CORE, lambda job: _bench(job, job.sizes.forward, _ratios)),
    Part("bench-backward", 60, _CORE, lambda job: _bench(job, job.sizes.backward, _ratios)),
    Part("bench-linear", 35, _CORE, lambda job: _bench(job, job.sizes.linear, _linear_ratios)),
    Part("demo", 30, _CORE, _demo),
    Part("sweep", 65, _TOOL, _sweep),
)
