"""Parts of the report's picture: a bar in pieces with its legend, bars of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .board import FAINT, INK, MUTED, PANEL, RED, Board, fitted, line_height, nice_ticks, text_width
from .words import round_text

# Blue, orange, green and purple that are told apart without seeing red and green.
ROUTE_COLOURS = {"fused": "#009e73", "torch": "#2f6fba", "tiled": "#e08a1e", "math": "#9b59a8", "": "#4b5563"}
PASSED_COLOUR = "#c3cad2"
LABEL, SMALL = 18, 15


@dataclass(frozen=True)
class Part:
    """A piece of a bar, or a bar: its name, value, the value as text, and colour."""

    name: str
    value: float
    text: str
    colour: str


def draw_stack(board: Board, left: float, width: float, title: str, parts: Sequence[Part]) -> None:
    """A title, one bar of all parts, and their legend."""
    board.reserve(160)
    board.text(left, board.y, fitted(title, width, LABEL), LABEL, bold=True)
    board.space(line_height(LABEL) + 4)
    total = sum(part.value for part in parts)
    shown = [part for part in parts if part.value]
    board.box(left, board.y, width, 26, PANEL)
    x = left
    for part in shown:
        length = width * part.value / total
        board.box(x, board.y, max(2.0, length), 26, part.colour)
        x += length
    board.space(34)
    draw_legend(board, left, width, [(part.colour, f"{part.name} {part.text}") for part in shown])


def draw_legend(board: Board, left: float, width: float, entries: Sequence[tuple[str, str]]) -> None:
    """Coloured squares with names, in as many lines as they need."""
    x, step = left, line_height(SMALL) + 3
    for colour, text in entries:
        text = fitted(text, width - 20, SMALL)
        needed = 20 + text_width(text, SMALL)
        if x > left and x + needed > left + width:
            x = left
            board.space(step)
        board.box(x, board.y + 5, 12, 12, colour)
        board.text(x + 20, board.y, text, SMALL, INK)
        x += needed + 24
    board.space(step)


def draw_memory(board: Board, title: str, bars: Sequence[Part], card_bytes: int, words: Callable[[float], str]) -> None:
    """Horizontal bars, and a dashed line at the memory of the card. What differs by more than a factor of a hundred
    is drawn to a logarithmic scale, which is said."""
    values = [bar.value for bar in bars] + ([card_bytes] if card_bytes else [])
    scale = _Scale(min(values), max(values))
    board.space(22)
    step = 34
    board.reserve(90 + step * len(bars))
    note = " (logarithmic scale)" if scale.is_log else ""
    board.text(board.left, board.y, title, LABEL, bold=True)
    board.text(board.left + text_width(title, LABEL) + 8, board.y + 2, note, SMALL, MUTED)
    board.space(line_height(LABEL) + 8)
    left = board.left + min(380.0, 16 + max(text_width(bar.name, LABEL) for bar in bars))
    width = board.right - left - 110
    top, bottom = board.y, board.y + step * len(bars)
    _draw_ticks(board, scale, left, width, top, bottom, words)
    for bar in bars:
        over = bool(card_bytes) and bar.value > card_bytes
        length = width * scale.place(bar.value)
        board.text(left - 14, board.y + 3, fitted(bar.name, left - 14 - board.left, LABEL), LABEL, align="right")
        board.box(left, board.y + 3, max(2.0, length), step - 12, bar.colour)
        text = words(bar.value)
        board.text(board.right, board.y + 3, text, LABEL, RED if over else INK, align="right", bold=over)
        board.space(step)
    if card_bytes:
        x = left + width * scale.place(card_bytes)
        board.dashes(x, top - 4, bottom + 4, INK)
        text = f"this device: {words(card_bytes)}"
        board.text(x, top - 6 - line_height(SMALL), text, SMALL, align="middle")
    board.space(line_height(SMALL) + 10)


def _draw_ticks(
    board: Board, scale: _Scale, left: float, width: float, top: float, bottom: float, words: Callable[[float], str]
) -> None:
    for value in scale.ticks():
        x = left + width * scale.place(value)
        board.line(x, top, x, bottom, FAINT)
        text = round_text(words(value)) if value else "0"
        board.text(x, bottom + 4, text, SMALL, MUTED, align="middle")


class _Scale:
    """From a value to its place between 0 and 1."""

    def __init__(self, smallest: float, largest: float):
        self.is_log = largest > 100 * smallest
        self.low = math.log2(smallest) - 1.5 if self.is_log else 0.0
        self.high = math.log2(largest) if self.is_log else largest

    def place(self, value: float) -> float:
        at = math.log2(max(value, 1.0)) if self.is_log else value
        return min(1.0, max(0.0, (at - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        """Powers of two or round binary numbers, about five."""
        if not self.is_log:
            unit = 2.0 ** (10 * max(0, math.floor(math.log2(max(1.0, self.high / 2)) / 10)))
            return [unit * tick for tick in nice_ticks(self.high / unit)]
        first, last = math.ceil(self.low), math.floor(self.high)
        step = max(1, math.ceil((last - first) / 6))
        return [2.0**power for power in range(first, last + 1, step)]
