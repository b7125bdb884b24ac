"""Which lines that only run on a card do these tests not reach? ``python tools/device_lines.py [TEST ...]`` runs them
(default: ``TESTS``, on the fake cards and the strict stand-ins for drivers) and lists the lines.

A line counts if its code, without comments and docstrings, says ``cuda`` or ``hip``, or if it is in ``fused/gpu``, and
if it belongs to a function. As ``-p tools.device_lines`` it is the plugin of pytest that notes which of them are run,
in the processes too that tests start on fake cards; not in the threads that torch's autograd makes.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTED = "DEVICE_LINES"  # variable of the environment: the file for the lines that were run
TESTS = (
    "tests/unit/fused/test_on_cards.py",
    *(f"tests/unit/fused/test_{name}.py" for name in ("driver", "hip", "kernels", "nvrtc", "hip_code", "trial")),
    *(f"tests/unit/core/test_{name}.py" for name in ("device", "amd_system", "timing", "torch_route", "memory")),
    "tests/unit/several",
    "tests/contract/test_torch_faults.py",
    *(f"tests/unit/cli/test_{name}.py" for name in ("info", "bench", "second_card")),
)
_WORDS = re.compile("cuda|hip", re.IGNORECASE)
_BY_BYTES = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def device_lines() -> dict[str, dict[int, str]]:
    """File -> number of the line -> its text."""
    found = {}
    for folder in ("pascal_attn_core", "nodes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            every = name.startswith("pascal_attn_core/fused/gpu/")
            lines = text.splitlines()
            numbers = set(_in_functions(compile(text, name, "exec"))) & (
                _says(text) if not every else set(range(1, 9999))
            )
            if numbers:
                found[name] = {number: lines[number - 1].strip() for number in sorted(numbers)}
    return found


def _says(text: str) -> set[int]:
    """Lines whose code says one of the words: not in a comment, nor in a string that is a statement of its own."""
    found, begins = set(), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = begins and token.type == tokenize.STRING
        begins = token.type in _BY_BYTES
        if not begins and not is_docstring and _WORDS.search(token.string):
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def _in_functions(code: CodeType, is_function: bool = False) -> Iterator[int]:
    """Lines with code, of functions: what stands in modules and classes is run by their import."""
    if is_function:
        yield from (line for _, _, line in code.co_lines() if line not in (None, code.co_firstlineno))
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _in_functions(each, is_function or bool(each.co_flags & 2))  # CO_NEWLOCALS: no class


def watch(path: str) -> None:
    """Note which of the lines are run from here on, in this process and its threads, at the end of a file."""
    wanted = {str(ROOT / name): set(lines) for name, lines in device_lines().items()}
    file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  until the process ends

    def of_lines(missing: set[int], frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_lineno in missing:
            missing.discard(frame.f_lineno)
            file.write(f"{frame.f_code.co_filename}:{frame.f_lineno}\n")
        return local[frame.f_code.co_filename]

    local = {name: functools.partial(of_lines, missing) for name, missing in wanted.items()}

    def of_calls(frame: FrameType, event: str, argument: Any) -> Any:
        return local.get(frame.f_code.co_filename)

    sys.settrace(of_calls)
    threading.settrace(of_calls)


def pytest_configure(config: Any) -> None:
    watch(os.environ[NOTED])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, help="arguments of pytest")
    tests = parser.parse_args().tests
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "lines"
        noted.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.device_lines", *tests]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, NOTED: str(noted)})
        ran = {line.removeprefix(f"{ROOT}{os.sep}") for line in noted.read_text().splitlines()}
    lines = {f"{name}:{n}": text for name, found in device_lines().items() for n, text in found.items()}
    left = [f"{where}: {text}" for where, text in lines.items() if where not in ran]
    print("\n".join([*left, f"{len(left)} of {len(lines)} lines are not reached"]))
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
