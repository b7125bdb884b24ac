"""Reads the tables of tile sizes, ``*.txt`` beside this file: a geometry for each kind of kernel and head_dim.

Each family of kernel texts has a dataclass of its own for them: the sizes have other names and macros there, and other
shared memory follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

FOLDER = Path(__file__).parent
Geometry = TypeVar("Geometry")


class Tiles:
    """The base of these dataclasses; ``named``: macros and their sizes, ``"PA_BR=rows PA_BC=cols"``."""

    named: ClassVar[str]

    def macros(self, head_dim: int) -> dict[str, object]:
        pairs = (pair.partition("=") for pair in self.named.split())
        return {macro: int(getattr(self, size)) for macro, _, size in pairs}


def read_tables(name: str, make: Callable[..., Geometry]) -> dict[str, dict[int, Geometry]]:
    """The tables of one file by name, and in each the geometries by head_dim, ascending.

    The first line names the columns: head_dims, then the arguments of ``make``. A line in brackets begins a table and
    names it; several names stand for equal tables. ``#`` begins a comment.
    """
    lines = (line.split("#")[0].strip() for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines())
    (_, *columns), *rest = map(str.split, filter(None, lines))
    tables: dict[str, dict[int, Geometry]] = {}
    names: list[str] = []
    for words in rest:
        if words[0].startswith("["):
            names = [word.strip("[],") for word in words]
            tables.update((table, {}) for table in names)
            continue
        geometry = make(**dict(zip(columns, map(_value, words[1:]))))
        for table in names:
            tables[table].update(dict.fromkeys(map(int, words[0].split(",")), geometry))
    return {table: dict(sorted(found.items())) for table, found in tables.items()}


def _value(word: str) -> Any:
    """``"yes"`` and ``"no"``, a number, or numbers as ``"4/2"``."""
    if word in ("yes", "no"):
        return word == "yes"
    return tuple(map(int, word.split("/"))) if "/" in word else int(word)
