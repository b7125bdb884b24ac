"""Tables and progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table as aligned text. The first and the last column are text, those between are figures."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows)]
    lines = [title]
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    lines.insert(2, "-" * (sum(widths[:-1]) + 2 * (len(widths) - 1) + min(widths[-1], 20)))
    print("\n".join(lines) + "\n")


def progress_of(name: str) -> Callable[[str], None]:
    """A status line that begins with ``name``, on a terminal."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{name}{text}" if text else "\r\033[K", end="", file=sys.stderr, flush=True)

    return show
