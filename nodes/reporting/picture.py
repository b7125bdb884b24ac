"""A report as a picture: a headline, then sections of rows in columns, with a bar below a row that has one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

BACKGROUND, INK, MUTED, RULE = "#ffffff", "#1d2530", "#606b78", "#d5dbe1"
TONES = {"": "#2f6fba", "good": "#1f7a4d", "caution": "#8a5a00", "bad": "#b3261e"}
GROUNDS = {"caution": "#fff6e0", "bad": "#fdecea"}
WIDTH, GAP, MARGIN = 1600, 48, 44
BODY, TITLE, HEADLINE = 20, 28, 54
_LABEL, _BAR, _SPACE = 130, 10, 28  # the width kept for labels, the heights of a bar with the space below, of a gap
_MOST_ROWS = 20
# Pillow's own font knows little more than ASCII.
_SPELT = str.maketrans({"×": "x", "→": "->", "≥": ">=", "≤": "<=", "–": "-", "—": "-", "−": "-", "µ": "u", "…": "..."})


@dataclass(frozen=True)
class Row:
    """One row of a report.

    Attributes:
        label: what the row is about; "" where the row above says it.
        text: what there is to say.
        share: length of the bar below the text as a share of the longest possible one; None = no bar.
        tone: a name in ``TONES``.
    """

    label: str
    text: str
    share: float | None = None
    tone: str = ""


@dataclass(frozen=True)
class Section:
    """Rows under a title. One with a tone goes over the whole width, above the columns of the others."""

    title: str
    rows: Sequence[Row]
    tone: str = ""


def draw(headline: str, subtitle: str, sections: Sequence[Section], *, tone: str = "") -> Image.Image:
    """The picture: 1600 pixels wide, from three sections on 2400, in at most three columns.

    The headline is as large as it must be to be read on a node, which shows the picture at a third of its size or less;
    the rest is read when it is opened.
    """
    in_columns = [section for section in sections if not section.tone]
    count = max(1, min(3, len(in_columns)))
    whole = WIDTH * 3 // 2 if count == 3 else WIDTH
    head = _Column(whole - 2 * MARGIN)
    head.write(headline, HEADLINE * whole // WIDTH, TONES[tone] if tone else INK)
    head.write(subtitle, BODY, MUTED)
    columns = [_Column((head.width - (count - 1) * GAP) // count) for _ in range(count)]
    for section in sections:
        (head if section.tone else min(columns, key=lambda column: column.height)).add(section)
    top = MARGIN + head.height + _SPACE
    picture = Image.new("RGB", (whole, top + max(column.height for column in columns) + MARGIN), BACKGROUND)
    canvas = ImageDraw.Draw(picture)
    head.paint(canvas, MARGIN, MARGIN)
    for index, column in enumerate(columns):
        column.paint(canvas, MARGIN + index * (column.width + GAP), top)
    return picture


class _Column:
    """Sections below each other, laid out before they are painted.

    Attributes:
        width, height: in pixels; the height so far.
    """

    def __init__(self, width: int):
        self.width, self.height = width, 0
        self._boxes: list[tuple[tuple[int, int, int, int], str]] = []  # left, top, right, bottom; colour
        self._texts: list[tuple[int, int, str, int, str]] = []  # x, y, text, size, colour

    def add(self, section: Section) -> None:
        """A title and rows; in one with a tone they stand on a ground."""
        self.height += _SPACE if self.height else 0
        top, left = self.height, 16 if section.tone else 0
        self.write(section.title, TITLE, TONES[section.tone] if section.tone else INK, left)
        self.height += 12
        for row in section.rows[:_MOST_ROWS]:
            self._add_row(row, left)
        if len(section.rows) > _MOST_ROWS:
            self.write(f"and {len(section.rows) - _MOST_ROWS:,} more, see the text", BODY, MUTED, left)
        if section.tone:
            self._boxes.insert(0, ((0, top, self.width, self.height), GROUNDS[section.tone]))
        else:
            self._boxes.append(((0, top - 8, self.width, top - 6), RULE))

    def _add_row(self, row: Row, left: int) -> None:
        """A row's label beside its text, or above it where the label is long; then its bar."""
        start, x = self.height, left + (_LABEL if row.label or row.share is not None else 0)
        self.write(row.label, BODY, MUTED, left)
        if _width(_spelt(row.label), BODY) <= _LABEL - 10:
            self.height = start
        self.write(row.text, BODY, TONES[row.tone] if row.tone else INK, x, left)
        if row.share is not None:
            y, right = self.height, self.width - left
            self._boxes.append(((x, y, right, y + 4), RULE))
            if row.share > 0:
                length = max(2, round((right - x) * min(1.0, row.share)))
                self._boxes.append(((x, y, x + length, y + 4), TONES[row.tone]))
            self.height += _BAR

    def write(self, text: str, size: int, colour: str, left: int = 0, right: int | None = None) -> None:
        """The text in as many lines as it takes, between margins of ``left`` and ``right`` (as ``left``) pixels."""
        for line in _wrapped(text, self.width - left - (left if right is None else right), size):
            self._texts.append((left, self.height, line, size, colour))
            self.height += round(size * 1.4)

    def paint(self, canvas: ImageDraw.ImageDraw, x: int, y: int) -> None:
        for (left, top, right, bottom), colour in self._boxes:
            canvas.rectangle((x + left, y + top, x + right - 1, y + bottom - 1), fill=colour)
        for left, top, text, size, colour in self._texts:
            for shift in (0, 1) if size >= TITLE else (0,):  # the font has one weight
                canvas.text((x + left + shift, y + top), text, fill=colour, font=_font(size))


# ---- text, measured before it is drawn ----


@cache
def _font(size: int) -> Any:
    """Pillow's own scalable font; its small fixed one where Pillow is older than 10.1."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def _spelt(text: str) -> str:
    """The text in letters that the font has, on one line."""
    return " ".join(text.translate(_SPELT).encode("ascii", "replace").decode().split())


def _width(text: str, size: int) -> float:
    return float(_font(size).getlength(text))


def _wrapped(text: str, width: int, size: int) -> list[str]:
    """The text in lines no wider than ``width``; a word that is wider is cut."""
    lines: list[str] = []
    for word in _spelt(text).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer, size) <= width:
            lines[-1] = longer
            continue
        while len(word) > 3 and _width(word, size) > width:
            word = f"{word[:-4]}..."
        lines.append(word)
    return lines


# ---- for ComfyUI ----


def as_image(picture: Image.Image) -> Tensor:
    """The picture as ComfyUI's IMAGE: ``[1, height, width, 3]``, float32 from 0 to 1."""
    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)[None]


def save_preview(image: Tensor) -> list[dict[str, str]]:
    """Let ComfyUI's preview node write an IMAGE to its folder of temporary files; returns what the front end asks for,
    nothing outside of ComfyUI."""
    preview = getattr(sys.modules.get("nodes"), "PreviewImage", None)
    return [] if preview is None else preview().save_images(image, "pascal_attention_report")["ui"]["images"]
