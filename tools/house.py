"""Size and shape of the code: lines, modules and the imports between them, long functions, fragments of docstrings.

``python tools/path.py --house`` prints it. What is an import is said in tests/unit/core/test_layers.py.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("__init__.py", "pascal_attn_core", "nodes")
AREAS = {"product": PRODUCT, "tools": ("tools",), "tests": ("tests",)}
CODE = (".py", ".cu", ".cuh", ".js")
MOST_LINES = 40  # of a function, its docstring not counted
MOST_VALUES = 8  # parameters of a function, positional values of a call
# The beginnings of docstrings that are no sentence and continue the name above them.
FRAGMENT = re.compile(
    r"(?:Of|Those|What|The same|The other|Likewise|Also|Again|And|But|Such|Its|Their|Ones|As above|Same)\b"
    # a few words that begin with a preposition: "By name.", "In the order in which they are entered."
    r"|(?:In|By|At|On|From|With|Without|For|To|As|Per|After|Before|Between)\b[^,:]{0,60}\Z"
)

Files = dict[str, str]  # text by name


class Place(NamedTuple):
    """One thing in the code that the summary counts."""

    file: str
    line: int
    kind: str
    text: str


def files_here(*paths: str) -> Files:
    """Code files that git knows or could know, as they are now."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    there = [name for name in sorted(set(names)) if name.endswith(CODE) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in there}


def files_at(revision: str, *paths: str) -> Files:
    """Code files at a git revision."""
    archive = subprocess.run(["git", "archive", revision, *paths], cwd=ROOT, capture_output=True, check=True).stdout
    files: Files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(CODE) else None
            if content is not None:
                files[member.name] = content.read().decode()
    return files


def places_in(name: str, text: str) -> Iterator[Place]:
    """Long functions, long signatures, long positional calls and fragments in one Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            if len(node.args) > MOST_VALUES:
                yield Place(name, node.lineno, "call", f"{len(node.args)} positional values")
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            continue
        docstring = ast.get_docstring(node) or ""
        first = re.split(r"[.;]\s|[.;]?\Z|\n\n", docstring, maxsplit=1)[0]
        if FRAGMENT.match(first):
            yield Place(name, node.body[0].lineno, "fragment", docstring.splitlines()[0])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            spoken = node.body[0].end_lineno - node.body[0].lineno + 1 if docstring else 0  # type: ignore[operator]
            lines = node.end_lineno - node.lineno + 1 - spoken  # type: ignore[operator]
            if lines > MOST_LINES:
                yield Place(name, node.lineno, "long", f"{node.name}: {lines} lines")
            signature = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([each for each in signature if each not in ("self", "cls")])
            if count > MOST_VALUES:
                yield Place(name, node.lineno, "parameters", f"{node.name}: {count} parameters")


KINDS = {
    "long": f"functions above {MOST_LINES} lines",
    "parameters": f"functions with more than {MOST_VALUES} parameters",
    "call": f"calls with more than {MOST_VALUES} positional values",
    "fragment": "docstrings that are fragments",
}


def figures(files: Files) -> dict[str, Counter[str]]:
    """For each row of the summary, the number in each area."""
    found = {"Python files": Counter[str](), "lines of Python": Counter[str]()}
    found |= {title: Counter[str]() for title in KINDS.values()}
    for name, text in files.items():
        if name.endswith(".py"):
            area = next(area for area, paths in AREAS.items() if name.split("/")[0] in paths)
            found["Python files"][area] += 1
            found["lines of Python"][area] += text.count("\n")
            for place in places_in(name, text):
                found[KINDS[place.kind]][area] += 1
    return found


def unit_of(module: tuple[str, ...]) -> str:
    """The module or package at the top two levels that a module is in: all of the nodes are one."""
    return ".".join(module[:2] if module[0] == "pascal_attn_core" else module[:1])


def print_imports() -> None:
    """Modules and packages at the top two levels, and the import edges between them."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "core"))
    import test_layers as layers

    edges: set[tuple[str, str]] = set()
    units: set[str] = set()
    for file in layers.FILES:
        text = (ROOT / file).read_text(encoding="utf-8")
        here = unit_of(layers.module_of(file))
        units.add(here)
        targets = (unit_of(target) for target in layers.imports_of(file, text) if target[0] in layers.TOPS)
        edges |= {(here, target) for target in targets if target != here}
    counts = f"{len(units)} modules and packages at the top two levels, {len(edges)} import edges between them"
    print(f"{counts}, {len(layers.FLOORS)} layers")


def print_house(revision: str | None, folder: str) -> None:
    """The summary, here and at a revision; with a folder, every place beneath it."""
    paths = [path for area in AREAS.values() for path in area]
    files = files_here(*paths)
    now, before = figures(files), figures(files_at(revision, *paths)) if revision else None
    if before:
        print(f"now, and in brackets at {revision}")
    print(f"{'':46s}" + "".join(f"{area:>18s}" for area in AREAS))
    for title, counts in now.items():
        old = [f" ({before[title][area]:,})" if before else "" for area in AREAS]
        print(f"{title:46s}" + "".join(f"{f'{counts[area]:,}{past}':>18s}" for area, past in zip(AREAS, old)))
    print_imports()
    for name, text in files.items():
        if folder and name.endswith(".py") and name.startswith(folder):
            for place in sorted(places_in(name, text), key=lambda place: place.line):
                print(f"{name}:{place.line}: {place.text}")
