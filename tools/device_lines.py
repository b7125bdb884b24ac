"""Which lines that only run on a card do the tests not reach? ``python tools/device_lines.py [TEST ...]`` runs them
(default: ``TESTS``; among them are those on the fake cards and on the strict stand-ins for drivers), lists the lines,
and compares them with ``UNREACHED``: the exit status is 1 where another one is not reached, or one of those is.

A line counts if its code, without comments and docstrings, says ``cuda`` or ``hip``, or if it is in ``fused/gpu``, and
if it belongs to a function. As ``-p tools.device_lines`` it is the plugin of pytest that notes which of them are run,
in the processes too that tests start on fake cards; not in the threads that torch's autograd makes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTED = "DEVICE_LINES"  # variable of the environment: the file for the lines that were run
TESTS = ("tests/unit", "tests/contract", "tests/host/diffusers")
# Function -> how many of its lines are not reached, and why.
UNREACHED = {
    "pascal_attn_core/fused/gpu/runtime.py:Driver._relaxed_capture": (2, "ROCm 5.2 lacks the function; needs a card"),
}
_WORDS = re.compile("cuda|hip", re.IGNORECASE)
_BY_BYTES = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def device_lines() -> dict[str, dict[int, tuple[str, str]]]:
    """File -> number of the line -> its function and its text."""
    found = {}
    for folder in ("pascal_attn_core", "nodes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            functions, lines = dict(_in_functions(compile(text, name, "exec"))), text.splitlines()
            counted = set(functions) if name.startswith("pascal_attn_core/fused/gpu/") else _says(text) & set(functions)
            if counted:
                found[name] = {number: (functions[number], lines[number - 1].strip()) for number in sorted(counted)}
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


def _in_functions(code: CodeType, name: str = "") -> Iterator[tuple[int, str]]:
    """Lines with code, and the functions to which they belong, what is nested in one being its part: what stands in
    modules and classes is run by their import."""
    if name and code.co_flags & 2:  # CO_NEWLOCALS: no class
        yield from ((line, name) for _, _, line in code.co_lines() if line not in (None, code.co_firstlineno))
    for each in code.co_consts:
        if isinstance(each, CodeType):
            is_part = code.co_flags & 2 or each.co_name.startswith("<")
            yield from _in_functions(each, name if is_part and name else f"{name}.{each.co_name}".lstrip("."))


def _by_function(name: str, lines: set[int]) -> dict[int, set[int]]:
    """Lines among these that each function of a file has, by the function's first line."""
    codes: list[CodeType] = [compile((ROOT / name).read_text(encoding="utf-8"), str(ROOT / name), "exec")]
    found: dict[int, set[int]] = {}
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        found.setdefault(code.co_firstlineno, set()).update({line for _, _, line in code.co_lines() if line} & lines)
    return found


def watch(path: str) -> None:
    """Note which of the lines are run from here on, in this process and its threads, at the end of a file."""
    wanted = {str(ROOT / name): _by_function(name, set(lines)) for name, lines in device_lines().items()}
    file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  until the process ends

    def of_lines(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        missing = wanted[code.co_filename][code.co_firstlineno]
        if frame.f_lineno in missing:
            missing.discard(frame.f_lineno)
            file.write(f"{code.co_filename}:{frame.f_lineno}\n")
        return of_lines if missing else None

    def of_calls(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        functions = wanted.get(code.co_filename)
        return of_lines if functions and functions.get(code.co_firstlineno) else None

    sys.settrace(of_calls)
    threading.settrace(of_calls)


def pytest_configure(config: Any) -> None:
    watch(os.environ[NOTED])


def differences(left: Iterable[str]) -> list[str]:
    """Functions of which more or fewer lines are not reached than ``UNREACHED`` says.

    Args:
        left: the function of each line that is not reached.
    """
    counts = Counter(left)
    stated = {name: count for name, (count, _) in UNREACHED.items()}
    return [
        f"{name}: {counts[name]} lines are not reached, {stated.get(name, 0)} in UNREACHED"
        for name in sorted({*counts, *stated})
        if counts[name] != stated.get(name, 0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, help="arguments of pytest")
    tests = parser.parse_args().tests
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "lines"
        noted.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.device_lines", *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, NOTED: str(noted)})
        ran = {line.removeprefix(f"{ROOT}{os.sep}") for line in noted.read_text().splitlines()}
    lines = {
        f"{file}:{n}": (f"{file}:{name}", text)
        for file, found in device_lines().items()
        for n, (name, text) in found.items()
    }
    left = {where: line for where, line in lines.items() if where not in ran}
    for where, (function, text) in left.items():
        print(f"{where}: {text}  [{UNREACHED.get(function, (0, 'new'))[1]}]")
    print(f"{len(left)} of {len(lines)} lines are not reached")
    wrong = differences(function for function, _ in left.values())
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
