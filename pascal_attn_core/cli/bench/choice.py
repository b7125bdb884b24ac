"""Reads the options of ``pascal-attn bench`` that name something: listed things by patterns, sizes of one's own."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

_MAX_SIZE = (1 << 31) - 1
Thing = TypeVar("Thing", bound=Any)  # anything with a name


def choose(
    what: str, things: Iterable[Thing], patterns: str, quick: Sequence[str] = (), prefix: str = ""
) -> list[Thing]:
    """The things named by a comma-separated list of names or patterns (``"sd*,gqa"``, ``"quick"``, ``"all"``), each
    once, in the order of the patterns. ``prefix`` may be left out of a name.

    Raises:
        ValueError: a pattern names nothing.
    """
    by_name = {thing.name: thing for thing in things}
    chosen: dict[str, Thing] = {}
    for pattern in filter(None, map(str.strip, patterns.split(","))):
        wanted = "*" if pattern == "all" else pattern
        found = [n for n in by_name if fnmatch.fnmatch(n, wanted) or fnmatch.fnmatch(n.removeprefix(prefix), wanted)]
        found = list(quick) if pattern == "quick" else found
        if not found:
            known = ", ".join(["all", *(["quick"] if quick else []), *by_name])
            raise ValueError(f"{what} must be one of [{known}] or a pattern, got {pattern!r}")
        chosen |= {name: by_name[name] for name in found}
    return list(chosen.values())


def read_sizes(text: str, names: Iterable[str], needed: Iterable[str]) -> dict[str, int]:
    """``"L=2048,D=64"`` -> ``{"L": 2048, "D": 64}``.

    Raises:
        ValueError: an unknown or missing name, one that is given twice, or a number that is no size.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or name not in names or name in sizes:
            again = " once" if name in sizes else ""
            raise ValueError(f"--shape must name each of {list(names)}{again} as in L=2048, got {part.strip()!r}")
        if not number.isascii() or not number.isdigit() or len(number) > 10 or not 1 <= int(number) <= _MAX_SIZE:
            raise ValueError(f"{name} in --shape must be a whole number from 1 to {_MAX_SIZE}, got {number!r}")
        sizes[name] = int(number)
    missing = [name for name in needed if name not in sizes]
    if missing:
        raise ValueError(f"--shape must give {', '.join(missing)}, got {text!r}")
    return sizes
