"""The command line: ``pascal-attn info | selftest | bench | run | demo``."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..machine.storage import write_object

# Each command is a module with add_options(parser) and run(options), which returns the exit status. It is imported only
# when it is needed, so that `pascal-attn info` works, and starts fast, with torch alone.
COMMANDS = {
    "info": "one block of facts about this machine, to paste into a bug report",
    "selftest": "check and time every route and kernel on this machine; prints one block to paste",
    "bench": "time every route and torch's own kernels on typical shapes",
    "run": "run a program with its attention computed by this package, and report when it ends",
    "demo": "a small pipeline before and after, with the memory it took",
}


class CommandError(Exception):
    """A user's mistake: printed without a traceback, exit code 2."""


_MAX_THREADS = 1024  # far more of them end the process


def check_numbers(options: argparse.Namespace, *names: str) -> None:
    """Raise CommandError for a count below 1, a time that is not above 0 and finite, or too many threads."""
    for name in names:
        value, option = getattr(options, name), "--" + name.replace("_", "-")
        if isinstance(value, float) and not 0 < value < math.inf:
            raise CommandError(f"{option} must be greater than 0 and finite, got {value}")
        if isinstance(value, int) and value < 1:
            raise CommandError(f"{option} must be at least 1, got {value}")
        if name == "threads" and value > _MAX_THREADS:
            raise CommandError(f"{option} must be at most {_MAX_THREADS}, got {value}")


def check_output(path: Path | None) -> None:
    """Raise CommandError where no file can be written, which a long run would find at its end; None = none is."""
    if path is not None and not path.absolute().parent.is_dir():
        raise CommandError(f"the folder of {path} does not exist")
    if path is not None and path.is_dir():
        raise CommandError(f"{path} must be a file, not a folder")


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Write what ``--json`` asks for, None = nothing, or raise CommandError."""
    try:
        if path is not None:
            write_object(path, figures)
    except OSError as error:
        raise CommandError(f"cannot write: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default the one that the process's arguments name, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments[0] if arguments else "")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    if options.command is None:
        parser.print_help()
        return 2
    options.command_line = " ".join(["pascal-attn", *arguments])
    try:
        return int(options.func(options) or 0)
    except CommandError as error:
        print(f"pascal-attn {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the pipe, such as `| head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"pascal-attn {options.command}: interrupted", file=sys.stderr)
        return 130


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pascal-attn", description="Exact attention in O(N) memory for GPUs without flash attention."
    )
    parser.add_argument("--version", action="version", version=f"pascal-attn {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=summary)
        if name == wanted:
            module = importlib.import_module(f".{name.replace('-', '_')}", __name__)
            module.add_options(command)
            command.set_defaults(func=module.run)
    return parser
