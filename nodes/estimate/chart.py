"""The largest that fits, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..reporting.board import FAINT, INK, MUTED, Board, fitted, line_height, text_width
from .largest import WAYS, Largest

if TYPE_CHECKING:
    from PIL import Image

_WIDTH, _MARGIN, _LARGE, _BODY = 1200, 40, 30, 20
_STEP = 34
_COLOURS = ("#c3cad2", "#2f6fba", "#e08a1e", "#009e73")


def draw_largest(found: Sequence[Largest], title: str) -> Image.Image:
    """A group of bars for each axis, one bar for each way; a line at the size of today."""
    board = Board(_WIDTH, _MARGIN)
    board.paragraph(title, _LARGE, bold=True)
    if not found:
        board.space(16)
        board.paragraph("No estimate for other sizes: see the text.", _BODY, MUTED)
    left = board.left + max(text_width(way, _BODY) for way, *_ in WAYS) + 16
    width = board.right - left - 190
    for axis in found:
        board.space(26)
        board.reserve(60 + _STEP * len(WAYS))
        board.text(board.left, board.y, f"{axis.axis}, now {axis.now.words}", _BODY, bold=True)
        board.space(line_height(_BODY) + 10)
        top = board.y
        most = max([axis.now.amount, *(size.amount for size in axis.fits if size is not None)])
        for (way, *_), size, bounded, colour in zip(WAYS, axis.fits, axis.is_bounded, _COLOURS):
            board.text(left - 16, board.y + 2, fitted(way, left - 16 - board.left, _BODY), _BODY, align="right")
            length = 0.0 if size is None else width * size.amount / most
            board.box(left, board.y + 2, width, _STEP - 10, FAINT)
            board.box(left, board.y + 2, length, _STEP - 10, colour)
            text = "nothing" if size is None else size.words + ("" if bounded else " or more")
            board.text(board.right, board.y + 2, text, _BODY, INK, align="right")
            board.space(_STEP)
        board.dashes(left + width * axis.now.amount / most, top - 4, board.y, INK)
    return board.finished()
