"""A report as a picture: a headline, then sections of rows in columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

BACKGROUND, RULE = "#ffffff", "#d5dbe1"
TONES = {"": "#1d2530", "muted": "#606b78", "good": "#1f7a4d", "caution": "#8a5a00", "bad": "#b3261e"}
WIDTH, GAP, MARGIN = 1600, 48, 44
BODY, TITLE, LINE, HEADLINE = 20, 28, 34, 54
_LABEL, _SPACE = 130, 28  # the width kept for labels, the height of a gap
_MOST_ROWS, _MOST_HEIGHT = 20, 6000
# Pillow's own font knows little more than ASCII.
_SPELT = str.maketrans({"×": "x", "→": "->", "≥": ">=", "≤": "<=", "–": "-", "—": "-", "−": "-", "µ": "u", "…": "..."})


class Row(NamedTuple):
    """A row has a label ("" where the row above says it), a text, and a tone: a name in ``TONES``."""

    label: str
    text: str
    tone: str = ""


class Section(NamedTuple):
    """Rows under a title. One with a tone goes over the whole width; such ones come before the others."""

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
    right, width = whole - MARGIN, (whole - 2 * MARGIN - (count - 1) * GAP) // count
    picture = Image.new("RGB", (whole, _MOST_HEIGHT), BACKGROUND)
    canvas = ImageDraw.Draw(picture)
    y = _write(canvas, headline, MARGIN, MARGIN, right, HEADLINE * whole // WIDTH, tone)
    for line in lines:
        y = _write(canvas, line, MARGIN, y, right, LINE * whole // WIDTH)
    ends = [_write(canvas, subtitle, MARGIN, y, right, BODY, "muted")] * count
    for section in sections:
        column = ends.index(min(ends))
        x = MARGIN + column * (width + GAP)
        end = _add(canvas, section, x, ends[column] + _SPACE, right if section.tone else x + width)
        ends = [end] * count if section.tone else [*ends[:column], end, *ends[column + 1 :]]
    return picture.crop((0, 0, whole, min(_MOST_HEIGHT, max(ends) + MARGIN)))


def _add(canvas: ImageDraw.ImageDraw, section: Section, x: int, y: int, right: int) -> int:
    """Draw a section from ``y`` on, between ``x`` and ``right``; returns where it ends."""
    canvas.rectangle((x, y, right - 1, y + 1), fill=TONES[section.tone] if section.tone else RULE)
    write = partial(_write, canvas, right=right, size=BODY)
    y = _write(canvas, section.title, x, y + 8, right, TITLE, section.tone) + 12
    for label, text, tone in section.rows[:_MOST_ROWS]:
        write(label, x, y, tone="muted")
        y = write(text, x + (_LABEL if label else 0), y, tone=tone)
    more = len(section.rows) - _MOST_ROWS
    return write(f"and {more:,} more, see the text", x, y, tone="muted") if more > 0 else y


def _write(canvas: ImageDraw.ImageDraw, text: str, x: int, y: int, right: int, size: int, tone: str = "") -> int:
    """Draw a text in as many lines as it takes; returns where it ends."""
    for line in _wrapped(text, right - x, size):
        for shift in (0, 1) if size >= TITLE else (0,):  # the font has one weight
            canvas.text((x + shift, y), line, fill=TONES[tone], font=_font(size))
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
