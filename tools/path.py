"""Prints the path of a call through this package, and the size and shape of the code.

python tools/path.py                             functions called, files entered, moves between files, per call
python tools/path.py --follow "one tile"         every function of one call, in order
python tools/path.py --house                     lines, modules, imports, long functions, fragments of docstrings
python tools/path.py --house --against v0.1.0    with the numbers at a git revision
python tools/path.py --house nodes/engine        with every place beneath that path
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from pascal_attn_core import AttentionConfig, sdpa  # noqa: E402
from tools.house import PRODUCT, print_house  # noqa: E402


class Step(NamedTuple):
    """One call of a Python function of this package."""

    file: str
    function: str


def way_of(call: Callable[[], Any]) -> list[Step]:
    """The functions that a call calls, in order, in its third run: the first two fill caches."""
    call()
    call()
    steps: list[Step] = []
    prefix = f"{ROOT}/"
    product = tuple(prefix + part for part in PRODUCT)

    def follow(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(product):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has no qualified names
            steps.append(Step(file.removeprefix(prefix), name))

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def calls() -> dict[str, Callable[[], Any]]:
    """The calls that are followed, by name."""
    short, one_tile = torch.randn(1, 2, 64, 64), torch.randn(1, 1, 512, 64)
    query, key = torch.randn(1, 4, 2048, 64), torch.randn(1, 2, 2048, 64)
    tiled, kernel = AttentionConfig(route="tiled"), AttentionConfig(route="torch")
    return {
        "short": lambda: sdpa(short, short, short),
        "one tile": lambda: sdpa(one_tile, one_tile, one_tile, config=tiled),
        "tiled": lambda: sdpa(query, query, query, config=tiled),
        "tiled, GQA, causal": lambda: sdpa(query, key, key, is_causal=True, enable_gqa=True, config=tiled),
        "auto": lambda: sdpa(query, query, query),
        "torch, GQA": lambda: sdpa(query, key, key, enable_gqa=True, config=kernel),
    }


def print_ways() -> None:
    """One line per call."""
    print(f"{'call':20s}{'functions':>10s}{'distinct':>10s}{'files':>7s}{'moves':>7s}  most visits to one file")
    with torch.no_grad():
        for name, call in calls().items():
            steps = way_of(call)
            visits = Counter(file for file, _ in groupby(step.file for step in steps))
            file, most = visits.most_common(1)[0]
            numbers = f"{len(steps):10d}{len(set(steps)):10d}{len(visits):7d}{visits.total() - 1:7d}"
            print(f"{name:20s}{numbers}  {most} x {file}")


def print_steps(name: str) -> None:
    """Each function of one call; the file where it changes."""
    with torch.no_grad():
        way = way_of(calls()[name])
    for file, steps in groupby(way, key=lambda step: step.file):
        print(file)
        for function, repeated in groupby(step.function for step in steps):
            count = len(list(repeated))
            print(f"    {function}" + (f"  x {count}" if count > 1 else ""))


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--follow", metavar="CALL", choices=list(calls()), help="print every function of this call")
    parser.add_argument("--against", metavar="REVISION", help="--house, beside this git revision")
    parser.add_argument("--house", metavar="PATH", nargs="?", const="", help="print the size and shape of the code")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.follow:
        print_steps(options.follow)
    elif options.house is not None or options.against:
        try:
            print_house(options.against, options.house or "")
        except subprocess.CalledProcessError as error:
            print(f"git: {error.stderr if isinstance(error.stderr, str) else error.stderr.decode()}", file=sys.stderr)
            return 1
    else:
        print_ways()
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may have seen enough
    sys.exit(main())
