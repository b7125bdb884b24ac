"""Whether the tests notice a mistake: the kernels or the Python code with one place made wrong, under the tests.

    python tools/mutants.py                       all of the kernels, some minutes or more each
    python tools/mutants.py --python              all of the Python code
    python tools/mutants.py int32_batch_offset    these

They are listed in ``mutants.txt``. Each runs in a copy of the checkout, under all tests of the profile nightly
up to the first that fails. Missing barriers are hardly among them: tests named
test_a_kernel_without_any_one_barrier_is_wrong remove each in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("__init__.py", "pascal_attn_core", "nodes", "tests", "tools", "docs", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One place of the source, and how it is made wrong.

    Attributes:
        file: path from the checkout's root.
        right: what stands there, once; wrong: what is put there.
        is_noticed: False: no number that a test could look at changes, or hardly.
        tests: files or folders whose tests should notice.
    """

    file: str
    right: str
    wrong: str
    is_noticed: bool
    tests: tuple[str, ...]


def read_mutants(text: str) -> dict[str, Mutant]:
    """The mutants of a list like ``mutants.txt``, whose first lines tell its form, by name."""
    found: dict[str, Mutant] = {}
    file, name, tests = "", "", ()
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            file, _, rest = line[1:].partition("]")
            tests = tuple(f"tests/{test}" for test in rest.split())
        elif line[0] in "-+":
            side = "right" if line[0] == "-" else "wrong"
            before = getattr(found[name], side)
            found[name] = replace(found[name], **{side: f"{before}\n{line[1:]}" if before else line[1:]})
        elif not line.startswith("#"):
            name, _, note = line.partition(" (")
            found[name] = Mutant(file, "", "", not note, tests)
    return found


MUTANTS = read_mutants(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file.

    Raises:
        ValueError: the place is not there, or not once.
    """
    text = (root / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.right)} times {mutant.right!r}, want one")
    return text.replace(mutant.right, mutant.wrong)


def first_failure(mutant: Mutant) -> str:
    """The first of its tests that fails, "" if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        (copy / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "nightly"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if lines:
        return lines[0].split(" ", 1)[1].split(" - ")[0]
    if done.returncode < 0:
        return f"the tests ended with signal {-done.returncode}"  # an address that nothing lies at
    raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of mutants.txt")
    parser.add_argument("--python", action="store_true", help="those of the Python code, not of the kernels")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in MUTANTS]
    if unknown:
        parser.error(f"there is no mutant {', '.join(unknown)}; there are {', '.join(MUTANTS)}")
    all_of_them = [name for name in MUTANTS if MUTANTS[name].file.endswith(".py") == arguments.python]
    missed = []
    for name in arguments.names or all_of_them:
        begin = time.monotonic()
        test = first_failure(MUTANTS[name])
        if not test and MUTANTS[name].is_noticed:
            missed.append(name)
        print(f"{name:32} {time.monotonic() - begin:5.0f} s  {test or 'not noticed'}", flush=True)
    if missed:
        raise SystemExit(f"not noticed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
