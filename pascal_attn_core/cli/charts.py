"""The output of commands: tables and a status line on a terminal, and charts drawn by matplotlib without a window."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..plots import on_any_page

COLOURS = ("#8c96a3", "#c0504d", "#2a7f62", "#7cc0a4")
Bar = tuple[str, float | None, str]  # its label, its value, and a note that is written where there is no value


def bar_chart(
    path: Path,
    panels: Sequence[tuple[str, str, Sequence[Bar]]],
    *,
    title: str,
    footer: str = "",
    colours: Sequence[str] = COLOURS,
) -> None:
    """Horizontal bars in a grid of panels, two in a row, written as a PNG.

    Args:
        panels: title, unit and bars of each panel. A panel whose values span more than a factor of 100 has a
            logarithmic scale.
        title, footer: lines above and below all panels.
        colours: of the bars, in turn.
    """
    from matplotlib.figure import Figure

    height = 1.5 + 0.55 * sum(len(bars) for _, _, bars in panels[::2]) + 0.7 * len(panels) / 2
    columns = min(2, len(panels))
    with on_any_page():
        figure = Figure(figsize=(13, height), layout="constrained")
        axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
        for (panel_title, unit, bars), axis in zip(panels, axes.flat):
            _draw_bars(axis, unit, bars, colours)
            axis.set_title(panel_title, fontsize=11, x=-0.2, ha="left")
        figure.suptitle(title, fontsize=15, fontweight="bold")
        figure.supxlabel(footer, fontsize=9)
        figure.savefig(path, dpi=120)


def _draw_bars(axis: Any, unit: str, bars: Sequence[Bar], colours: Sequence[str]) -> None:
    labels, values, notes = zip(*bars)
    known = [value for value in values if value] or [1.0]
    left, right = 0.0, 1.28 * max(known)  # room for the figure after the longest bar
    if max(known) > 100 * min(known):
        axis.set_xscale("log", base=16 if unit == "MiB" else 10)
        axis.xaxis.set_major_formatter(lambda value, _: amount(value, unit))
        axis.minorticks_off()
        left, right = min(known) / 3, max(known) * 6
    drawn = axis.barh(range(len(bars)), [value or left for value in values], color=list(colours))
    texts = [note if value is None else amount(value, unit) for value, note in zip(values, notes)]
    axis.bar_label(drawn, texts, padding=5)
    axis.set(xlim=(left, right), xlabel="logarithmic" if left else unit)
    axis.set_yticks(range(len(bars)), labels)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def amount(value: float, unit: str) -> str:
    """``"45.7 MiB"``, ``"40.0 GiB"``: from 1,024 MiB on in GiB."""
    return f"{short_number(value / 1024)} GiB" if unit == "MiB" and value >= 1024 else f"{short_number(value)} {unit}"


def short_number(value: float) -> str:
    """1,234 / 12.3 / 1.23: about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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
