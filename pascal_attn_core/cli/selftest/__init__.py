"""``pascal-attn selftest``: whether everything is right on this machine, and how fast, as one block to paste."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from ...machine.facts import ClockWatch
from ...selftest import Selftest, check, describe, document
from .. import check_numbers, check_output, write_figures
from ..bench.clock import device_named, quiet_torch
from ..tables import progress_of
from .speed import run_speed

SECONDS = 60.0
_show = progress_of("")
# What a part may have used of the time when it ends; a part that needs less leaves the rest to the next ones.
_UNTIL = {"kernels": 0.25, "checks": 0.6, "speed": 0.95}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``selftest``."""
    parser.description = (
        "Compares every route and every shipped kernel with float64 on this machine, times the routes on "
        "the shapes of real models, and prints one block to paste. Needs nothing but torch. The exit status is 0 if "
        "everything was right, 1 if something was wrong."
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit (default: 60)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    parser.add_argument("--no-speed", action="store_true", help="only check for correctness, time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    check_numbers(options, "seconds", "threads")
    check_output(options.json)
    device = device_named(options.device)
    with quiet_torch(options.threads):
        found = selftest(device, options.seconds, speed=not options.no_speed)
    print(describe(found))
    write_figures(options.json, {"command": options.command_line, **document(found)})
    return 0 if found.is_right else 1


def selftest(device: torch.device, seconds: float = SECONDS, *, speed: bool = True) -> Selftest:
    """Check and time everything on ``device``; progress goes to stderr where that is a terminal.

    Args:
        seconds: that it may take. What does not fit is left out and named; no check is begun after them.
        speed: time the routes too.
    """
    start = time.monotonic()

    def left(part: str) -> float:
        return start + (_UNTIL[part] if speed else 1.0) * seconds - time.monotonic()

    found = check(device, left, _show)
    if speed:
        with ClockWatch(device) as watch:
            found.speed = found.collect("speed", run_speed(device, lambda: left("speed")), left, _show)
        found.during = watch.highest
    _show("")
    found.seconds = time.monotonic() - start
    return found
