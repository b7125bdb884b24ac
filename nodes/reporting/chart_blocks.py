"""A column per block of the model: its time by route, and whether calls were passed to ComfyUI."""

from __future__ import annotations

from ..engine.runs import Run
from .board import FAINT, INK, MUTED, Board, fitted, line_height, nice_ticks, text_width
from .chart_parts import LABEL, PASSED_COLOUR, ROUTE_COLOURS, SMALL, draw_legend
from .rows import BlockRow, block_rows, range_name
from .words import duration_text, round_text

_HEIGHT, _AXIS = 170, 84
_WIDEST, _FEW = 110.0, 6


def draw_blocks(board: Board, run: Run) -> None:
    """Time per block, or calls per block where none was timed."""
    rows = block_rows(run)
    timed = run.elapsed_ms > 0
    heights = [_heights(row, timed=timed) for row in rows]
    board.space(22)
    board.reserve(_HEIGHT + 150)
    board.text(board.left, board.y, "Time in attention per block" if timed else "Calls per block", LABEL, bold=True)
    board.space(line_height(LABEL) + 8)
    if len(rows) <= _FEW:
        _draw_bars(board, rows, heights, timed=timed)
    else:
        _draw_columns(board, rows, heights, timed=timed)


def _draw_bars(board: Board, rows: list[BlockRow], heights: list[dict[str, float]], *, timed: bool) -> None:
    """One bar in a line for each of a few blocks."""
    names = [row.name or "unnamed" for row in rows]
    room = min(380.0, max(text_width(name, LABEL) for name in names))
    left, longest = board.left + room + 14, max(sum(parts.values()) for parts in heights) or 1.0
    width = board.right - left - 110
    for name, parts in zip(names, heights):
        board.reserve(34)
        board.text(board.left + room, board.y + 3, fitted(name, room, LABEL, keeps_end=True), LABEL, align="right")
        x, total = left, sum(parts.values())
        for route, value in parts.items():
            length = width * value / longest
            board.box(x, board.y + 3, length, 22, _colour(route))
            x += length
        text = duration_text(total / 1e3) if timed and total else "not timed" if timed else f"{total:,g}"
        board.text(board.right, board.y + 3, text, LABEL, align="right")
        board.space(34)


def _draw_columns(board: Board, rows: list[BlockRow], heights: list[dict[str, float]], *, timed: bool) -> None:
    """A column for each of many blocks."""
    left, width = board.left + _AXIS, board.right - board.left - _AXIS
    top = max(sum(parts.values()) for parts in heights) or 1.0
    _draw_axis(board, left, width, top, timed=timed)
    pitch = min(width / len(rows), _WIDEST)
    baseline = board.y + _HEIGHT
    for index, parts in enumerate(heights):
        y, x = baseline, left + index * pitch
        for route, value in parts.items():
            height = _HEIGHT * value / top
            board.box(x, y - height, _column(pitch), height, _colour(route))
            y -= height
    board.y = baseline + 3
    passed = timed and any(row.passed for row in rows)
    if passed:
        _draw_left(board, rows, left, pitch)
    _draw_names(board, rows, left, pitch)
    if passed:
        draw_legend(board, left, width, [(PASSED_COLOUR, "in these blocks calls were passed to ComfyUI (not timed)")])


def _colour(route: str) -> str:
    return PASSED_COLOUR if route == _LEFT else ROUTE_COLOURS.get(route, MUTED)


_LEFT = "passed to ComfyUI"


def _heights(row: BlockRow, *, timed: bool) -> dict[str, float]:
    if timed:
        return dict(row.elapsed_ms)
    return {**{route: float(count) for route, count in row.routes.items()}, _LEFT: float(sum(row.passed.values()))}


def _column(pitch: float) -> float:
    return max(1.0, pitch - (2 if pitch >= 6 else 1 if pitch >= 3 else 0))


def _draw_axis(board: Board, left: float, width: float, top: float, *, timed: bool) -> None:
    unit = _unit_ms(top) if timed else 1.0
    for value in (unit * tick for tick in nice_ticks(top / unit) if timed or tick == int(tick)):
        y = board.y + _HEIGHT * (1 - value / top)
        board.line(left, y, left + width, y, FAINT)
        text = "0" if not value else round_text(duration_text(value / 1e3)) if timed else f"{value:,g}"
        board.text(left - 10, y - line_height(SMALL) / 2, text, SMALL, MUTED, align="right")


def _unit_ms(top: float) -> float:
    """A second, minute or hour in milliseconds: in which of them the ticks shall be round."""
    return next(unit for unit in (3.6e6, 6e4, 1e3) if top >= 1.5 * unit or unit == 1e3)


def _draw_left(board: Board, rows: list[BlockRow], left: float, pitch: float) -> None:
    """A strip below the columns: blocks in which calls were passed to ComfyUI."""
    for index, row in enumerate(rows):
        if row.passed:
            board.box(left + index * pitch, board.y, _column(pitch), 9, PASSED_COLOUR)
    board.space(12)


def _draw_names(board: Board, rows: list[BlockRow], left: float, pitch: float) -> None:
    """Each family of neighbours once under a bracket, with its first and last number where there is room."""
    start = 0
    while start < len(rows):
        end = start
        while end + 1 < len(rows) and rows[end + 1].family == rows[start].family and rows[start].family:
            end += 1
        x, width = left + start * pitch, (end - start + 1) * pitch - 2
        board.line(x, board.y + 3, x + max(1.0, width - 1), board.y + 3, MUTED)
        _draw_family(board, rows[start : end + 1], x, width)
        start = end + 1
    board.space(line_height(SMALL) + 10)


def _draw_family(board: Board, rows: list[BlockRow], x: float, width: float) -> None:
    whole, short = range_name(rows), rows[0].parts[0].strip(" .").rpartition(".")[2]
    for text in (whole, f"{short} ({len(rows)})", short):
        if text and text_width(text, SMALL) <= width:
            break
    else:
        text = fitted(whole, width, SMALL, keeps_end=True) if width > 40 else ""
    if text:
        board.text(x + width / 2, board.y + 7, text, SMALL, INK, align="middle")
