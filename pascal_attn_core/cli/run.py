"""``pascal-attn run``: any program, unchanged, with the process-wide switch on, and a report at its end."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from pathlib import Path

from .. import patch_flex_attention, patch_imports, patch_sdpa, record
from ..stand_ins import STAND_INS
from . import CommandError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a Python script, or with -m a module, as python would, with every call of torch's "
        "scaled_dot_product_attention and flex_attention computed by Pascal Attention, and `import flash_attn`, "
        "`sageattention` and `xformers` giving our functions unless a real package is there that can run. When the "
        "program ends, prints to stderr how many calls took which route, and why. The exit status is the program's. "
        "Child processes of the program are not affected."
    )
    parser.usage = "pascal-attn run [option ...] (script.py | -m module) [argument ...]"
    parser.add_argument("--no-report", action="store_true", help="print nothing at the end")
    text = "take the place of packages that are installed, too"
    parser.add_argument("--replace", action="store_const", const=True, help=text)
    for name in STAND_INS:
        flag, text = f"--no-{name.replace('_', '-')}", f"leave `import {name}` alone"
        parser.add_argument(flag, dest="without", action="append_const", const=name, default=[], help=text)
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    parser.add_argument("program", metavar="script.py | module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="argument", help="for the program")


def run(options: argparse.Namespace) -> int:
    script = Path(options.program)
    if not options.is_module and not script.exists():
        raise CommandError(f"there is no file {options.program}; to run a module, use -m {options.program}")
    switch = patch_sdpa()
    if not switch.sites:
        print("pascal-attn run: PASCAL_ATTN_DISABLE is set: attention stays torch's", file=sys.stderr)
    imports = patch_imports(without=options.without, replace=options.replace)
    patches = [switch, imports]
    left_alone = imports.left_alone
    with contextlib.suppress(ImportError):  # before torch 2.5
        patches.append(patch_flex_attention())
    with record() as report:
        try:
            return _run(options)
        finally:
            for patch in patches:
                patch.remove()
            if not options.no_report and not isinstance(sys.exc_info()[1], CommandError):
                sys.stdout.flush()
                text = report.text() if report.routes() else "no attention call was seen in this process"
                print(f"pascal-attn run: {text}", file=sys.stderr)
                for name, why in left_alone.items():
                    print(f"pascal-attn run: left alone: {name}: {why}; --replace takes its place", file=sys.stderr)


def _run(options: argparse.Namespace) -> int:
    """The program as ``__main__``, with its own arguments and the module path that python would give it."""
    argv, path = sys.argv, sys.path[:]
    first = os.getcwd() if options.is_module else str(Path(options.program).resolve().parent)
    sys.argv, sys.path[:0] = [options.program, *options.arguments], [first]
    try:
        if options.is_module:
            _run_module(options.program)
        else:
            runpy.run_path(options.program, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def _run_module(name: str) -> None:
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if error.name in (None, name.partition(".")[0], name) and "No module named" in str(error):
            raise CommandError(str(error)) from error
        raise
