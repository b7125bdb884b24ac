"""A report as a picture: a headline, and below it sections of rows."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TONES = {"": "#1d2530", "muted": "#606b78", "good": "#1f7a4d", "caution": "#8a5a00", "bad": "#b3261e"}
HEADLINE, LARGE, BODY = 54, 34, 20  # sizes of letters: the first two are read on a node, a third of the picture
_WIDTH, _MARGIN, _LABEL = 1600, 44, 130
_MOST_ROWS, _MOST_HEIGHT = 20, 6000


class Row(NamedTuple):
    """A row has a label ("" where the row above says it), a text, and a tone: a name in ``TONES``."""

    label: str
    text: str
    tone: str = ""


class Section(NamedTuple):
    """Rows under a title ("" = none), in letters of a size."""

    title: str
    rows: Sequence[Row]
    tone: str = ""
    size: int = BODY


def draw(sections: Sequence[Section]) -> Image.Image:
    """The picture, 1600 pixels wide. Of a section the first 20 rows are drawn."""
    picture = Image.new("RGB", (_WIDTH, _MOST_HEIGHT), "white")
    canvas, y = ImageDraw.Draw(picture), _MARGIN // 2
    for title, rows, tone, size in sections:
        y += size // 2
        if title:
            canvas.rectangle((_MARGIN, y, _WIDTH - _MARGIN, y + 1), fill=TONES[tone or "muted"])
            y = _write(canvas, title, _MARGIN, y + size // 2, size + 8, tone)
        for row in rows[:_MOST_ROWS]:
            _write(canvas, row.label, _MARGIN, y, size, "muted")
            y = _write(canvas, row.text, _MARGIN + (_LABEL if row.label else 0), y, size, row.tone)
        if len(rows) > _MOST_ROWS:
            y = _write(canvas, f"and {len(rows) - _MOST_ROWS:,} more, see the text", _MARGIN, y, size, "muted")
    return picture.crop((0, 0, _WIDTH, min(_MOST_HEIGHT, y + _MARGIN)))


def _write(canvas: ImageDraw.ImageDraw, text: str, x: int, y: int, size: int, tone: str) -> int:
    """Draw a text, in letters that the font has, from ``x`` to the right margin; returns where it ends."""
    text, font = text.encode("ascii", "replace").decode(), _font(size)
    letters = 0.9 * (_WIDTH - _MARGIN - x) * len(text) / max(1.0, font.getlength(text))
    for line in textwrap.wrap(text, max(1, int(letters))):
        canvas.text((x, y), line, fill=TONES[tone], font=font, stroke_width=size // HEADLINE)  # the font has one weight
        y += round(size * 1.4)
    return y


@cache
def _font(size: int) -> Any:
    """Pillow's own scalable font; its small fixed one where Pillow is older than 10.1."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def as_image(picture: Image.Image) -> Tensor:
    """The picture as ComfyUI's IMAGE: ``[1, height, width, 3]``, float32 from 0 to 1."""
    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)[None]


def save_preview(image: Tensor) -> list[dict[str, str]]:
    """Let ComfyUI's preview node write an IMAGE to its folder of temporary files; returns what the front end asks for,
    nothing outside of ComfyUI."""
    preview = getattr(sys.modules.get("nodes"), "PreviewImage", None)
    return [] if preview is None else preview().save_images(image, "pascal_attention_report")["ui"]["images"]
