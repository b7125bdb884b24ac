"""Charts of the command line, drawn by matplotlib without a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#8c96a3", "#c0504d", "#2a7f62", "#7cc0a4")
_TEXT = "#22282f"


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value (None = none, then only the note is written) and a note instead of the figure."""

    label: str
    value: float | None
    note: str = ""


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
            logarithmic scale, with a note.
        title, footer: lines above and below all panels.
        colours: of the bars, in turn.
    """
    figure = _figure(width=13, height=1.5 + 0.55 * sum(len(bars) for _, _, bars in panels[::2]) + 0.7 * len(panels) / 2)
    columns = min(2, len(panels))
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    for (panel_title, unit, bars), axis in zip(panels, axes.flat):
        _draw_bars(axis, panel_title, unit, bars, colours)
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_TEXT)
    if footer:
        figure.supxlabel(footer, fontsize=9, color="#5a6570")
    figure.savefig(path, dpi=120)


def _figure(*, width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _draw_bars(axis: Any, title: str, unit: str, bars: Sequence[Bar], colours: Sequence[str]) -> None:
    values = [bar.value for bar in bars if bar.value]
    largest, smallest = max(values, default=1.0), min(values, default=1.0)
    is_log = largest > 100 * smallest
    positions = range(len(bars))
    axis.barh(positions, [bar.value or 0 for bar in bars], color=list(colours), height=0.66)
    axis.set_yticks(positions, [bar.label for bar in bars], fontsize=11, color=_TEXT)
    axis.invert_yaxis()
    if is_log:
        axis.set_xscale("log")
        axis.set_xlim(smallest / 3, largest * 6)
    else:
        axis.set_xlim(0, largest * 1.28)  # room for the figure after the longest bar
    left = smallest / 3 if is_log else 0.0
    for position, bar in zip(positions, bars):
        text = bar.note if bar.value is None else f"{short_number(bar.value)} {unit}"
        axis.annotate(
            text, (bar.value or left, position), xytext=(5, 0), textcoords="offset points", va="center", color=_TEXT
        )
    axis.set_title(title, fontsize=12, loc="left", color=_TEXT)
    axis.set_xlabel(f"{unit}, logarithmic" if is_log else unit, fontsize=10, color=_TEXT)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=9)
    axis.grid(axis="x", color="#e3e7eb", linewidth=0.8)
    axis.set_axisbelow(True)


def short_number(value: float) -> str:
    """1,234 / 12.3 / 1.23: about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
