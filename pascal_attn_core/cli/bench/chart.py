"""The chart of ``pascal-attn bench --png``: time and memory of every candidate, one row per shape."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

MIB = 1 << 20
_FLOOR_MIB = 0.01
_INK, _FAINT, _GRID = "#1f2328", "#6e7781", "#e3e6ea"
_TIME_TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
_MEMORY_TICKS = (0.01, 0.1, 1, 10, 100, 1000, 10_000, 100_000)


@dataclass(frozen=True)
class _Series:
    """Candidates drawn with the same mark, in one lane of every row."""

    label: str
    pattern: str
    color: str
    marker: str
    size: float = 7.0
    hollow: bool = False


SERIES = (
    _Series("ours, auto", "ours-auto", "#0b5fff", "o", 9),
    _Series("ours, fused", "ours-fused", "#0b5fff", "*", 11),
    _Series("ours, tiled", "ours-tiled", "#0b5fff", "D", 6.5, hollow=True),
    _Series("ours, tiled, always online softmax", "ours-tiled-online", "#6aa5ff", "d", 7, hollow=True),
    _Series("torch math", "torch-math", "#57606a", "X", 8),
    _Series("noflash-attention, tiers 1-3", "noflash-*", "#8250df", "^", 8),
    _Series("pascal-attn, tiles 64-256", "pascal-attn-*", "#d9730d", "s", 7),
)
_PRODUCTS = "bare products"
_BASELINE: dict[str, Any] = {"color": _FAINT, "lw": 1.4, "ls": (0, (3, 2)), "zorder": 1}
_LIMIT: dict[str, Any] = {"color": _INK, "lw": 1.4, "zorder": 2}


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the figures of one run.

    Args:
        document: what ``--json`` writes.
        path: an image file; its suffix decides the format.
    """
    reports = document["shapes"]
    series = [s for s in SERIES if any(_points(report, s.pattern, "ratio") for report in reports)]
    height = 1.9 + len(reports) * (0.30 + 0.115 * max(1, len(series)))
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": _INK, "axes.edgecolor": _GRID}):
        figure, (times, memory) = plt.subplots(
            1, 2, figsize=(13, height), sharey=True, width_ratios=(1.25, 1), layout="constrained"
        )
        _draw_times(times, reports, series)
        _draw_memory(memory, document, series)
        _label_rows(times, reports)
        for axes in (times, memory):
            _tidy(axes, len(reports))
        figure.suptitle(_title(document), x=0.01, ha="left", fontsize=13, fontweight="bold")
        handles = [Line2D([], [], **_BASELINE, label="torch's own function")]
        handles += [Line2D([], [], **_LIMIT, label="bare matrix products"), *map(_handle, series)]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, handletextpad=0.5)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _draw_times(axes: Axes, reports: list[dict[str, Any]], series: list[_Series]) -> None:
    for row, report in enumerate(reports):
        for product in _points(report, _PRODUCTS, "ratio"):
            axes.plot([product] * 2, [row - 0.4, row + 0.4], **_LIMIT)
        for lane, one in enumerate(series):
            _draw_points(axes, _points(report, one.pattern, "ratio"), _height(row, lane, len(series)), one)
    axes.axvline(1.0, **_BASELINE)
    axes.set_title("time relative to torch's own function; left is faster", loc="left", fontsize=10)
    _log_ticks(axes, _TIME_TICKS, lambda value: f"{value:g}x")


def _draw_memory(axes: Axes, document: dict[str, Any], series: list[_Series]) -> None:
    reports = document["shapes"]
    for row, report in enumerate(reports):
        for torch_mib in _mebibytes(report, document["baseline"]):
            axes.plot([torch_mib] * 2, [row - 0.4, row + 0.4], **_BASELINE)
        for lane, one in enumerate(series):
            _draw_points(axes, _mebibytes(report, one.pattern), _height(row, lane, len(series)), one)
    axes.set_title("peak memory besides inputs and outputs, MiB", loc="left", fontsize=10)
    _log_ticks(axes, _MEMORY_TICKS, lambda value: "0" if value <= _FLOOR_MIB else f"{value:,g}")


def _draw_points(axes: Axes, points: list[float], height: float, one: _Series) -> None:
    if len(points) > 1:
        axes.plot([min(points), max(points)], [height] * 2, color=one.color, lw=1.2, alpha=0.35, zorder=2)
    axes.plot(points, [height] * len(points), ls="", zorder=3, **_style(one))


def _style(one: _Series) -> dict[str, Any]:
    return {
        "marker": one.marker,
        "markersize": one.size,
        "markeredgewidth": 1.5 if one.hollow else 0.8,
        "markerfacecolor": "white" if one.hollow else one.color,
        "markeredgecolor": one.color if one.hollow else "white",
    }


def _handle(one: _Series) -> Line2D:
    return Line2D([], [], ls="", label=one.label, **_style(one))


def _points(report: dict[str, Any], pattern: str, field: str) -> list[float]:
    results = (r for r in report["results"] if fnmatch.fnmatchcase(r["name"], pattern))
    return sorted(r[field] for r in results if r[field] is not None)


def _mebibytes(report: dict[str, Any], pattern: str) -> list[float]:
    return [max(_FLOOR_MIB, value / MIB) for value in _points(report, pattern, "extra_bytes")]


def _height(row: int, lane: int, lanes: int) -> float:
    return row - 0.36 + 0.72 * (lane + 0.5) / lanes


def _label_rows(axes: Axes, reports: list[dict[str, Any]]) -> None:
    axes.set_yticks([])
    axes.set_ylim(len(reports) - 0.5, -0.5)
    for row, report in enumerate(reports):
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right"}
        axes.text(-0.02, row - 0.03, report["shape"]["name"], va="bottom", fontweight="bold", **place)
        axes.text(-0.02, row + 0.05, report["text"], va="top", fontsize=8.5, color=_FAINT, **place)


def _log_ticks(axes: Axes, ticks: tuple[float, ...], text: Any) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    shown = [tick for tick in ticks if low * 0.8 <= tick <= high * 1.2]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _tidy(axes: Axes, rows: int) -> None:
    axes.grid(axis="x", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_INK)
    for row in range(0, rows, 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#f6f8fa", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _title(document: dict[str, Any]) -> str:
    machine, settings = document["machine"], document["settings"]
    what = "forward + backward" if settings["backward"] else "forward"
    threads = f", {machine['threads']} thread{'s'[: machine['threads'] > 1]}" if machine["device"] == "cpu" else ""
    return f"Attention, {what}, on {machine['name']}{threads}, torch {document['versions']['torch']}"
