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

BACKGROUND, RULE = "#ffffff", "#d5dbe1"
TONES = {"": "#1d2530", "muted": "#606b78", "good": "#1f7a4d", "caution": "#8a5a00", "bad": "#b3261e"}
BARS = {**TONES, "": "#2f6fba"}
WIDTH, GAP, MARGIN = 1600, 48, 44
BODY, TITLE, LINE, HEADLINE = 20, 28, 34, 54
_LABEL, _BAR, _SPACE = 130, 10, 28  # the width kept for labels, the heights of a bar with the space below, of a gap
_MOST_ROWS, _MOST_HEIGHT = 20, 6000
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


def draw(
    headline: str, subtitle: str, sections: Sequence[Section], *, lines: Sequence[str] = (), tone: str = ""
) -> Image.Image:
    """The picture: 1600 pixels wide, from three sections on 2400, in at most three columns.

    A node shows the picture at a third of its size or less. The headline, and the ``lines`` below it, are large enough
    to be read there; the rest is read when it is opened.
    """
    count = max(1, min(3, sum(not section.tone for section in sections)))
    whole = WIDTH * 3 // 2 if count == 3 else WIDTH
    page = _Page(whole)
    y = page.write(headline, MARGIN, MARGIN, whole - MARGIN, HEADLINE * whole // WIDTH, tone)
    for line in lines:
        y = page.write(line, MARGIN, y, whole - MARGIN, LINE * whole // WIDTH)
    y = page.write(subtitle, MARGIN, y, whole - MARGIN, BODY, "muted")
    for section in sections:
        if section.tone:
            y = page.add(section, MARGIN, y + _SPACE, whole - MARGIN)
    width = (whole - 2 * MARGIN - (count - 1) * GAP) // count
    ends = [y] * count
    for section in sections:
        if not section.tone:
            column = ends.index(min(ends))
            x = MARGIN + column * (width + GAP)
            ends[column] = page.add(section, x, ends[column] + _SPACE, x + width)
    return page.picture.crop((0, 0, whole, min(_MOST_HEIGHT, max(ends) + MARGIN)))


class _Page:
    """A picture painted from the top down. What is put on it lies between ``x`` and ``right``, from ``y`` on.

    Each method returns where it ends.
    """

    def __init__(self, width: int):
        self.picture = Image.new("RGB", (width, _MOST_HEIGHT), BACKGROUND)
        self._canvas = ImageDraw.Draw(self.picture)

    def add(self, section: Section, x: int, y: int, right: int) -> int:
        self._canvas.rectangle((x, y, right - 1, y + 1), fill=TONES[section.tone] if section.tone else RULE)
        y = self.write(section.title, x, y + 8, right, TITLE, section.tone) + 12
        for row in section.rows[:_MOST_ROWS]:
            y = self._add_row(row, x, y, right)
        if len(section.rows) > _MOST_ROWS:
            y = self.write(f"and {len(section.rows) - _MOST_ROWS:,} more, see the text", x, y, right, BODY, "muted")
        return y

    def _add_row(self, row: Row, x: int, y: int, right: int) -> int:
        """A row's label, its text beside it, and its bar below."""
        self.write(row.label, x, y, right, BODY, "muted")
        x += _LABEL if row.label or row.share is not None else 0
        y = self.write(row.text, x, y, right, BODY, row.tone)
        if row.share is None:
            return y
        length = min(1.0, row.share) * (right - x)
        for end, colour in ((right, RULE), (x + max(2, round(length)) if length else x, BARS[row.tone])):
            if end > x:
                self._canvas.rectangle((x, y, end - 1, y + 3), fill=colour)
        return y + _BAR

    def write(self, text: str, x: int, y: int, right: int, size: int, tone: str = "") -> int:
        """The text in as many lines as it takes."""
        for line in _wrapped(text, right - x, size):
            for shift in (0, 1) if size >= TITLE else (0,):  # the font has one weight
                self._canvas.text((x + shift, y), line, fill=TONES[tone], font=_font(size))
            y += round(size * 1.4)
        return y


# ---- text, measured before it is drawn ----


@cache
def _font(size: int) -> Any:
    """Pillow's own scalable font; its small fixed one where Pillow is older than 10.1."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def _wrapped(text: str, width: int, size: int) -> list[str]:
    """The text in letters that the font has, in lines no wider than ``width``; a word that is wider is cut."""
    lines: list[str] = []
    for word in text.translate(_SPELT).encode("ascii", "replace").decode().split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _font(size).getlength(longer) <= width:
            lines[-1] = longer
            continue
        while len(word) > 3 and _font(size).getlength(word) > width:
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
