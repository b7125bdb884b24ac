"""A report as a picture: a headline, then sections of rows in columns, with a bar below a row that has one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

BACKGROUND, INK, MUTED, RULE = "#ffffff", "#1d2530", "#606b78", "#d5dbe1"
TONES = {"": "#2f6fba", "good": "#1f7a4d", "caution": "#8a5a00", "bad": "#b3261e"}
GROUNDS = {"caution": "#fff6e0", "bad": "#fdecea"}
WIDTH, GAP, MARGIN = 1600, 48, 44
BODY, TITLE, HEADLINE = 20, 28, 54
_LABEL, _BAR = 130, 10  # the width kept for labels, the height of a bar with the space below it
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
    width = whole - 2 * MARGIN
    column = (width - (count - 1) * GAP) // count
    size = HEADLINE * whole // WIDTH
    above = [*_wrapped(headline, width, size, TONES[tone] if tone else INK), *_wrapped(subtitle, width, BODY, MUTED)]
    for section in sections:
        above += [_SPACE, *_section_lines(section, width)] if section.tone else []
    columns = _columns([_section_lines(section, column) for section in in_columns], count)
    top = MARGIN + _height(above) + _SPACE.height
    picture = Image.new("RGB", (whole, top + max(map(_height, columns)) + MARGIN), BACKGROUND)
    canvas = ImageDraw.Draw(picture)
    _paint(canvas, above, MARGIN, MARGIN, width)
    for index, lines in enumerate(columns):
        _paint(canvas, lines, MARGIN + index * (column + GAP), top, column)
    return picture


class _Line(NamedTuple):
    """One line of the picture: its height, texts as (x, text, size, colour), and what lies behind or below them."""

    height: int
    texts: tuple[tuple[int, str, int, str], ...] = ()
    bar: tuple[int, float, str] | None = None  # x, length in pixels, colour
    ground: str = ""
    is_title: bool = False


_SPACE = _Line(28)


def _section_lines(section: Section, width: int) -> list[_Line]:
    ground, left = GROUNDS.get(section.tone, ""), 16 if section.tone else 0
    inner = width - 2 * left
    title = (left, _fitted(section.title, inner, TITLE), TITLE, TONES[section.tone] if section.tone else INK)
    lines = [_Line(_step(TITLE) + 12, (title,), is_title=True)]
    for row in section.rows[:_MOST_ROWS]:
        lines += _row_lines(row, left, inner)
    left_out = len(section.rows) - _MOST_ROWS
    if left_out > 0:
        lines.append(_Line(_step(BODY), ((left, f"and {left_out:,} more, see the text", BODY, MUTED),)))
    return [line._replace(ground=ground) for line in lines]


def _row_lines(row: Row, left: int, width: int) -> Iterator[_Line]:
    """A row's label beside its text, or above it where the label is long; then its bar."""
    label, x = _spelt(row.label), left + (_LABEL if row.label or row.share is not None else 0)
    texts: tuple[tuple[int, str, int, str], ...] = ((left, label, BODY, MUTED),) if label else ()
    if _width(label, BODY) > _LABEL - 10:
        yield _Line(_step(BODY), ((left, _fitted(label, width, BODY), BODY, MUTED),))
        texts = ()
    colour = TONES[row.tone] if row.tone else INK
    for line in _wrapped(row.text, left + width - x, BODY, colour):
        moved = tuple((x, text, size, ink) for _, text, size, ink in line.texts)
        yield line._replace(texts=texts + moved)
        texts = ()
    if row.share is not None:
        length = max(2.0, (left + width - x) * min(1.0, row.share)) if row.share > 0 else 0.0
        yield _Line(_BAR, bar=(x, length, TONES[row.tone]))


def _columns(sections: Sequence[list[_Line]], count: int) -> list[list[_Line]]:
    """The sections one below the other, each in the column that ends higher."""
    columns: list[list[_Line]] = [[] for _ in range(count)]
    for lines in sections:
        column = min(columns, key=_height)
        column += [_SPACE, *lines] if column else lines
    return columns


def _height(lines: Sequence[_Line]) -> int:
    return sum(line.height for line in lines)


def _paint(canvas: ImageDraw.ImageDraw, lines: Sequence[_Line], left: int, y: int, width: int) -> None:
    for line in lines:
        if line.ground:
            canvas.rectangle((left, y, left + width - 1, y + line.height - 1), fill=line.ground)
        elif line.is_title:
            canvas.line((left, y - 8, left + width - 1, y - 8), fill=RULE, width=2)
        for x, text, size, colour in line.texts:
            for shift in (0, 1) if line.is_title or size > TITLE else (0,):  # the font has one weight
                canvas.text((left + x + shift, y), text, fill=colour, font=_font(size))
        if line.bar is not None:
            x, length, colour = line.bar
            canvas.rectangle((left + x, y, left + width - 1, y + 3), fill=RULE)
            if length:
                canvas.rectangle((left + x, y, left + x + round(length) - 1, y + 3), fill=colour)
        y += line.height


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


def _step(size: int) -> int:
    """Pixels from one line to the next."""
    return round(size * 1.4)


def _fitted(text: str, width: float, size: int) -> str:
    """The text, cut with ``...`` where it is wider than ``width``."""
    text = whole = _spelt(text)
    while text and _width(text, size) > width:
        whole = whole[: min(len(whole) - 1, int(len(whole) * width / _width(text, size)))]
        text = f"{whole.rstrip()}..." if whole else ""
    return text


def _wrapped(text: str, width: int, size: int, colour: str) -> list[_Line]:
    """The text in lines no wider than ``width``; a word that is wider is cut."""
    lines: list[str] = []
    for word in _spelt(text).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(_fitted(word, width, size))
    return [_Line(_step(size), ((0, line, size, colour),)) for line in lines]


# ---- for ComfyUI ----


def as_image(picture: Image.Image) -> Tensor:
    """The picture as ComfyUI's IMAGE: ``[1, height, width, 3]``, float32 from 0 to 1."""
    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)[None]


def save_preview(picture: Image.Image) -> dict[str, str] | None:
    """Write the picture to ComfyUI's folder of temporary files, as its preview node does, and return what the front end
    asks for; None where there is no such folder."""
    try:
        import folder_paths
    except ImportError:
        return None
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        "pascal_attention_report", folder_paths.get_temp_directory(), picture.width, picture.height
    )
    file = f"{name}_{counter:05}_.png"
    picture.save(os.path.join(folder, file), compress_level=4)
    return {"filename": file, "subfolder": subfolder, "type": "temp"}
