"""``python -m tools.gpu`` (``make gpu``): all that is worth running on a card, into docs/gpu/<card>/<part>.json."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from . import child, results
from .parts import BAD, FAILED, FULL, LASTING, NOT_RUN, PARTS, TINY, UNFINISHED, Job, Outcome, Part, Sizes

SECONDS = 540.0
_FACTS_SECONDS = 120.0
_BEAT = 1.0  # seconds, after which each file has what was found
_MIB_OF_PROCESS = 1200  # memory of a card that a process may need


class Run(NamedTuple):
    """Facts and limits that all parts have in common.

    Attributes:
        facts: of :mod:`.card`.
        folder: of the card.
        end: the moment, of ``time.monotonic``, at which everything is over.
        again: run parts that have a result too.
        processes: that may use the card at once.
    """

    facts: dict[str, Any]
    folder: Path
    device: str
    sizes: Sizes
    end: float
    python: tuple[str, ...]
    env: dict[str, str]
    again: bool = False
    processes: int = 1

    def path(self, part: Part) -> Path:
        return self.folder / f"{part.name}.json"

    def conditions(self, part: Part) -> dict[str, str]:
        return results.conditions(self.facts, part.made_from, self.sizes["name"][0])

    def known(self, part: Part) -> dict[str, Any]:
        """The content of a part's file, if it holds under the present conditions."""
        content = results.read(self.path(part))
        return content if content.get("conditions") == self.conditions(part) else {}


class Running:
    """A part that runs: its file grows with it. ``beside``: all parts that run at the same time; ``known``: what its
    file held."""

    def __init__(self, run: Run, part: Part, beside: Sequence[Part], seconds: float, known: dict[str, Any]):
        self.run, self.part, self.limit, self.conditions = run, part, seconds, run.conditions(part)
        self.began, self.moment = time.monotonic(), datetime.now(timezone.utc)
        self.outcome, self.content = Outcome(UNFINISHED, "", {}), known
        before = {} if run.again else known.get("figures", {})
        env, processes = run.env, run.processes
        if part.share:
            processes = max(1, round(processes * part.share / sum(each.share for each in beside)))
            env = {**env, "OMP_NUM_THREADS": "1"}  # as many processes as processors
        scratch = Path(tempfile.mkdtemp(prefix="pascal-attn-gpu-"))
        self.job = Job(run.python, run.device, run.sizes, self.began + seconds, scratch, before, env, processes)

    def take(self, outcome: Outcome) -> None:
        """Write an outcome, and say what is wrong that was not before."""
        seconds = time.monotonic() - self.began
        for line in outcome.bad:
            if line not in self.outcome.bad:
                say(self.part.name, f"WRONG {line}", seconds)
        self.outcome = outcome
        self.content = {
            "part": self.part.name,
            "state": outcome.state,
            "summary": outcome.summary,
            "command": self.job.commands,
            "began": self.moment.isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "limit": round(self.limit, 1),
            **self.run.facts,
            "conditions": self.conditions,
            "figures": outcome.figures,
        }
        results.write(self.run.path(self.part), self.content, _private(str(self.job.scratch)))

    def grow(self) -> None:
        """Take what is known so far, if it is more than before."""
        outcome = self.job.so_far()
        if outcome.figures and outcome != self.outcome:
            self.take(outcome)

    def finish(self, future: Future[Outcome]) -> None:
        """Take the last word."""
        try:
            outcome = future.result()
        except Exception as error:  # the next parts go on; whatever it is belongs into the file
            outcome = Outcome(FAILED, f"{type(error).__name__}: {error}"[:200], {})
        self.take(outcome)
        say(self.part.name, f"{outcome.state}: {outcome.summary}", self.content["seconds"])
        shutil.rmtree(self.job.scratch, ignore_errors=True)


def run_parts(run: Run, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """Run the parts that have no result yet, those about right and wrong side by side, then each of the others alone,
    and write each result as it grows; what each file holds now, by part.

    A part's time is its share of all that is left: what one does not need is the next ones'. One that had too little
    gets twice of that.
    """
    known = {part.name: run.known(part) for part in parts}
    todo = [part for part in parts if run.again or known[part.name].get("state") not in LASTING]
    for part in parts:
        if part not in todo:
            say(part.name, f"{known[part.name]['state']} (before): {known[part.name]['summary']}")
    groups = [[part for part in todo if part.share], *([part] for part in todo if not part.share)]
    weights = [max((part.weight for part in group), default=0.0) for group in groups]
    for number, group in enumerate(groups):
        left = max(0.0, run.end - time.monotonic())
        share = left * weights[number] / (sum(weights[number:]) or 1.0)
        limits = [max(share, min(left, 2 * known[part.name].get("limit", 0.0))) for part in group]
        running = [Running(run, part, group, limit, known[part.name]) for part, limit in zip(group, limits)]
        run_together(running)
        known |= {each.part.name: each.content for each in running}
    return known


def run_together(running: Sequence[Running]) -> None:
    """Run parts at the same time to their end; an interrupt ends all their processes."""
    with ThreadPoolExecutor(len(running) or 1) as pool:
        left = {pool.submit(each.part.run, each.job): each for each in running}
        try:
            while left:
                most = max(each.job.left for each in left.values())
                show(f"{', '.join(each.part.name for each in left.values())}: at most {most:.0f} s")
                for future in wait(left, _BEAT, FIRST_COMPLETED).done:
                    left.pop(future).finish(future)
                for each in left.values():
                    each.grow()
        finally:
            for each in left.values():
                each.job.stop.set()
            for future, each in left.items():
                each.finish(future)


def _private(scratch: str) -> dict[str, str]:
    words = {scratch: "OUT", str(results.ROOT): "."}
    with contextlib.suppress(RuntimeError):  # no home
        home = Path.home()
        if home != Path(home.anchor):
            words[str(home)] = "~"
    return words


def show(text: str) -> None:
    """A line for a terminal, in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def say(name: str, text: str, seconds: float | None = None) -> None:
    """One line for one part."""
    show("")
    took = "" if seconds is None else f"{seconds:.0f} s"
    print(f"{name:15s}{took:>6s}  {text}", flush=True)


def conclude(found: dict[str, dict[str, Any]], folder: Path) -> int:
    """Say what was wrong, and what to commit; the exit status."""
    bad = [name for name, content in found.items() if content["state"] in BAD]
    not_run = [name for name, content in found.items() if content["state"] == NOT_RUN]
    unfinished = [name for name, content in found.items() if content["state"] == UNFINISHED]
    if not_run:
        print(f"not run: {', '.join(not_run)}")
    if unfinished:
        print(f"to be continued: {', '.join(unfinished)}")
    words = ", ".join(f"{name} ({found[name]['state']})" for name in bad)
    print(f"WRONG: {words}" if bad else "all that was run is right")
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(results.ROOT)
    print("commit these files: " + " ".join(f"{(folder / name).as_posix()}.json" for name in found))
    return 1 if bad else 0


def ask_facts(python: Sequence[str], device: str, env: dict[str, str]) -> dict[str, Any] | None:
    """The facts of :mod:`.card`; None, and a sentence to stderr, where torch cannot use the device."""
    command = [*python, "-m", "tools.gpu.card", "--device", device]
    with tempfile.TemporaryDirectory() as folder:
        ended = child.run(command, _FACTS_SECONDS, cwd=results.ROOT, env=env, output=Path(folder) / "output")
    if ended.status == 0:
        return {**json.loads(ended.last_line), "commit": results.commit()}
    print(f"gpu: torch cannot use the device {device}: {ended.last_line or ended.words}", file=sys.stderr)
    return None


def words_of_kernels(facts: dict[str, Any]) -> str:
    """How many kernels there are for the card, and how many must still be compiled."""
    total, left = facts["kernels"]["all"], facts["kernels"]["to_compile"]
    advice = ""
    if left and facts["card"]["kind"] == "cuda":
        arch = "".join(map(str, facts["card"]["capability"]))
        advice = f"; python -m tools.gpu precompile --arch {arch} does that before, on any machine"
    return f"{total} kernels, {left} of them to be compiled{advice}"


def num_processes(memory_mib: int) -> int:
    """As many as there are processors, and as the card has memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory_mib // _MIB_OF_PROCESS)) if memory_mib else cores


def environment(device: str) -> tuple[str, dict[str, str]]:
    """The device's name in the parts' processes, and their environment: what is run finds this very tree, and of
    several cards only the one that was asked for, since the tests take the first."""
    env = dict(os.environ)
    env["PYTHONUNBUFFERED"] = "1"  # what a process prints is known when it is ended
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(results.ROOT), env.get("PYTHONPATH"))))
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdigit():
        return device, env
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # torch counts those
        index = next(iter(visible.split(",")[int(index) :]), "")
    env["CUDA_VISIBLE_DEVICES"] = index
    return "cuda", env


@contextlib.contextmanager
def _ends_like_an_interrupt() -> Iterator[None]:
    """While the block runs, the signal to terminate is an interrupt: the running part's processes are ended too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description="Runs everything that is worth running on a card and writes docs/gpu/<card>/<part>.json. A part "
        "that has a result for this card, driver, torch and source is not run again; one that was stopped or not "
        "finished is. On any machine, 'python -m tools.gpu precompile' compiles the kernels before.",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts (default: {SECONDS:g})")
    parser.add_argument("--parts", help=f"comma-separated, of {','.join(names)} (default: all)")
    parser.add_argument("--again", action="store_true", help="run parts that have a result too")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1, cpu")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="default: docs/gpu")
    parser.add_argument("--tiny", action="store_true", help="whether everything runs, at sizes that say nothing else")
    return parser


def main(argv: Sequence[str] | None = None, python: tuple[str, ...] = (sys.executable,)) -> int:
    """0: all is right, or was not run; 1: something is wrong; 2: invalid arguments or no such device; 130: interrupted.

    Args:
        argv: the arguments after the program's name; None = those of the process.
        python: the command that runs Python for each part.
    """
    start = time.monotonic()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["precompile"]:
        from .precompile import main as precompile  # which needs torch

        return precompile(argv[1:])
    names = [part.name for part in PARTS]
    options = _parser(names).parse_args(argv)
    wanted = options.parts.split(",") if options.parts else names
    unknown = [name for name in wanted if name not in names]
    if unknown or not 0 < options.seconds < math.inf:
        wrong = f"--seconds must be greater than 0, got {options.seconds}"
        wrong = f"--parts must be of {', '.join(names)}, got {', '.join(unknown)}" if unknown else wrong
        print(f"gpu: {wrong}", file=sys.stderr)
        return 2
    parts = [part for part in PARTS if part.name in wanted]
    try:
        with _ends_like_an_interrupt():
            device, env = environment(options.device)
            facts = ask_facts(python, device, env)
            if facts is None:
                return 2
            card, versions = facts["card"]["name"], facts["versions"]
            print(f"{card}, driver {versions['driver'] or 'none'}, torch {versions['torch']}", flush=True)
            print(words_of_kernels(facts), flush=True)
            folder, sizes = results.folder_for(card, options.out.absolute()), TINY if options.tiny else FULL
            how = {"again": options.again, "processes": num_processes(facts["card"]["memory_mib"])}
            run = Run(facts, folder, device, sizes, start + options.seconds, python, env, **how)
            return conclude(run_parts(run, parts), folder)
    except OSError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ngpu: interrupted; what was done stays, the same command goes on with the rest", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
