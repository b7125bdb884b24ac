"""``python -m tools.gpu`` (``make gpu``): all that is worth running on a card, into docs/gpu/<card>/<part>.json."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from . import child, results
from .parts import BAD, FAILED, FULL, LASTING, NOT_RUN, PARTS, TINY, UNFINISHED, Job, Outcome, Part, Sizes

SECONDS = 540.0
_FACTS_SECONDS = 120.0


class Run(NamedTuple):
    """Facts and limits that all parts have in common.

    Attributes:
        facts: of :mod:`.machine`.
        folder: of the card.
        end: the moment, of ``time.monotonic``, at which everything is over.
        again: run parts that have a result too.
    """

    facts: dict[str, Any]
    folder: Path
    device: str
    sizes: Sizes
    end: float
    python: tuple[str, ...]
    env: dict[str, str]
    again: bool = False


def run_parts(run: Run, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """Run the parts that have no result yet, one after the other, and write each result at once; what each file holds
    now, by part.

    A part's time is its share of all that is left: what one does not need is the next ones'. One that had too little
    gets twice of that.
    """
    held = {part.name: results.conditions(run.facts, part.made_from, run.sizes.name) for part in parts}
    known = {part.name: results.read(run.folder / f"{part.name}.json") for part in parts}
    for name, content in known.items():
        if content.get("conditions") != held[name]:
            known[name] = {}
    todo = [part for part in parts if run.again or known[part.name].get("state") not in LASTING]
    found = {}
    for part in parts:
        if part not in todo:
            found[part.name] = known[part.name]
            say(part.name, f"{found[part.name]['state']} (before): {found[part.name]['summary']}")
            continue
        weight = sum(each.weight for each in todo[todo.index(part) :])
        left = max(0.0, run.end - time.monotonic())
        seconds = max(left * part.weight / weight, min(left, 2 * known[part.name].get("limit", 0.0)))
        before = {} if run.again else known[part.name].get("figures", {})
        found[part.name] = run_part(run, part, seconds, held[part.name], before)
    return found


def run_part(
    run: Run, part: Part, seconds: float, conditions: dict[str, str], before: dict[str, Any]
) -> dict[str, Any]:
    """Run one part and write its result; what the file holds."""
    if sys.stderr.isatty():
        print(f"\r\033[K{part.name}: at most {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    began, moment = time.monotonic(), datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory(prefix="pascal-attn-gpu-") as scratch:
        job = Job(run.python, run.device, run.sizes, began + seconds, Path(scratch), before, run.env)

        def write(outcome: Outcome) -> dict[str, Any]:
            content = {
                "part": part.name,
                "state": outcome.state,
                "summary": outcome.summary,
                "command": job.commands,
                "began": moment.isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - began, 1),
                "limit": round(seconds, 1),
                **run.facts,
                "commit": results.commit(),
                "conditions": conditions,
                "figures": outcome.figures,
            }
            results.write(run.folder / f"{part.name}.json", content, _private(scratch))
            return content

        try:
            outcome = part.run(job)
        except KeyboardInterrupt:
            figures = results.read(job.progress) if job.progress else {}
            if figures:
                write(Outcome(UNFINISHED, "interrupted", figures))
            raise
        except Exception as error:  # the next parts go on; whatever it is belongs into the file
            outcome = Outcome(FAILED, f"{type(error).__name__}: {error}"[:200], {})
        content = write(outcome)
    say(part.name, f"{outcome.state}: {outcome.summary}", content["seconds"])
    for line in outcome.table:
        print("  " + line)
    return content


def _private(scratch: str) -> dict[str, str]:
    words = {scratch: "OUT", str(results.ROOT): "."}
    with contextlib.suppress(RuntimeError):  # no home
        home = Path.home()
        if home != Path(home.anchor):
            words[str(home)] = "~"
    return words


def say(name: str, text: str, seconds: float | None = None) -> None:
    """One line for one part."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
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
    """The facts of :mod:`.machine`; None, and a sentence to stderr, where torch cannot use the device."""
    command = [*python, "-m", "tools.gpu.machine", "--device", device]
    ended = child.run(command, _FACTS_SECONDS, cwd=results.ROOT, env=env)
    if ended.status == 0:
        return json.loads(ended.last_line)
    print(f"gpu: torch cannot use the device {device}: {ended.last_line or ended.words}", file=sys.stderr)
    return None


def environment(device: str) -> tuple[str, dict[str, str]]:
    """The device's name in the parts' processes, and their environment: what is run finds this very tree, and of
    several cards only the one that was asked for, since the tests take the first."""
    env = dict(os.environ)
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
        "finished is.",
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
            folder, sizes = results.folder_for(card, options.out.absolute()), TINY if options.tiny else FULL
            run = Run(facts, folder, device, sizes, start + options.seconds, python, env, options.again)
            return conclude(run_parts(run, parts), folder)
    except OSError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ngpu: interrupted; what was done stays, the same command goes on with the rest", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
