"""A small drawing board over Pillow: text that is measured before it is drawn, bars, and nothing that overlaps."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

BACKGROUND, INK, MUTED, FAINT, PANEL = "#ffffff", "#1d2530", "#606b78", "#e4e8ec", "#f5f7f9"
RED, RED_PANEL, AMBER, AMBER_PANEL = "#b3261e", "#fdecea", "#8a5a00", "#fff6e0"
# Pillow's own font knows little more than ASCII.
_SPELT = str.maketrans({"×": "x", "→": "->", "≥": ">=", "≤": "<=", "–": "-", "—": "-", "−": "-", "µ": "u", "…": "..."})


@cache
def font_of(size: int) -> Any:
    """Pillow's own scalable font; its small fixed one where Pillow is older than 10.1."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def spelt(text: str) -> str:
    """The text in letters that the font has, on one line."""
    return " ".join(text.translate(_SPELT).encode("ascii", "replace").decode().split())


def text_width(text: str, size: int) -> float:
    """Pixels."""
    return float(font_of(size).getlength(spelt(text)))


def fitted(text: str, width: float, size: int, *, keeps_end: bool = False) -> str:
    """The text, cut with ``...`` where it is wider than ``width``; "" if not even that fits."""
    text = spelt(text)
    if text_width(text, size) <= width:
        return text

    def cut(length: int) -> str:
        return "..." + text[len(text) - length :].lstrip() if keeps_end else text[:length].rstrip() + "..."

    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text_width(cut(middle), size) <= width else (low, middle - 1)
    return cut(low) if low else ""


def wrapped(text: str, width: float, size: int) -> list[str]:
    """The text in lines no wider than ``width``; a word that is wider is cut."""
    lines: list[str] = []
    for word in spelt(text).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(fitted(word, width, size))
    return lines


def nice_ticks(top: float, most: int = 4) -> list[float]:
    """Round numbers from 0 up to ``top``, at most ``most`` besides 0."""
    if top <= 0 or not math.isfinite(top):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if top / (power * factor) <= most)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


class Board:
    """A picture that grows downwards: ``y`` is where the next thing goes."""

    def __init__(self, width: int, margin: int):
        self.width, self.margin = width, margin
        self.left, self.right = margin, width - margin
        self.y = float(margin)
        self.picture = Image.new("RGB", (width, 1024), BACKGROUND)
        self._draw = ImageDraw.Draw(self.picture)

    def _grow(self, height: int) -> None:
        picture = Image.new("RGB", (self.width, height), BACKGROUND)
        picture.paste(self.picture, (0, 0))
        self.picture, self._draw = picture, ImageDraw.Draw(picture)

    def reserve(self, height: float) -> None:
        """There is room for so many pixels below ``y``."""
        if self.y + height + self.margin > self.picture.height:
            self._grow(int(max(2 * self.picture.height, self.y + height + self.margin)))

    def finished(self) -> Image.Image:
        """The picture down to ``y``."""
        self.reserve(0)
        return self.picture.crop((0, 0, self.width, math.ceil(self.y + self.margin)))

    # ---- strokes, in absolute positions ----

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle; one that is not empty is at least a pixel wide and high."""
        if width <= 0 or height <= 0:
            return
        left, top = round(x), round(y)
        right, bottom = max(left, round(x + width) - 1), max(top, round(y + height) - 1)
        self._draw.rectangle((left, top, right, bottom), fill=colour)

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str, width: int = 1) -> None:
        self._draw.line((round(x), round(y), round(to_x), round(to_y)), fill=colour, width=width)

    def dashes(self, x: float, y: float, to_y: float, colour: str) -> None:
        """A vertical dashed line."""
        while y < to_y:
            self.line(x, y, x, min(y + 5, to_y), colour, 2)
            y += 9

    def text(
        self, x: float, y: float, text: str, size: int, colour: str = INK, *, align: str = "left", bold: bool = False
    ) -> None:
        """One line; ``y`` is the top of its line box, ``x`` its left end, right end or middle."""
        text, font = spelt(text), font_of(size)
        x -= {"left": 0.0, "right": 1.0, "middle": 0.5}[align] * text_width(text, size)
        for shift in (0, 1) if bold else (0,):  # the font has one weight
            self._draw.text((round(x) + shift, round(y)), text, fill=colour, font=font)

    # ---- things that take their room ----

    def space(self, height: float) -> None:
        self.y += height

    def paragraph(self, text: str, size: int, colour: str = INK, *, indent: float = 0, bold: bool = False) -> None:
        """Wrapped text."""
        for line in wrapped(text, self.right - self.left - indent, size):
            self.reserve(line_height(size))
            self.text(self.left + indent, self.y, line, size, colour, bold=bold)
            self.y += line_height(size)

    def banner(self, title: str, sentences: list[str], size: int, colour: str, panel: str) -> None:
        """Sentences on a coloured ground under a bold title."""
        pad = 14
        width = self.right - self.left - 2 * pad - 6
        lines = [line for sentence in sentences for line in _bullet(sentence, width, size)]
        height = 2 * pad + line_height(size + 3) + len(lines) * line_height(size)
        self.reserve(height)
        self.box(self.left, self.y, self.right - self.left, height, panel)
        self.box(self.left, self.y, 6, height, colour)
        y = self.y + pad
        self.text(self.left + pad + 6, y, title, size + 3, colour, bold=True)
        y += line_height(size + 3)
        for shift, line in lines:
            self.text(self.left + pad + 6 + shift, y, line, size)
            y += line_height(size)
        self.y += height


def line_height(size: int) -> int:
    """Pixels from one line to the next."""
    return round(size * 1.4)


def _bullet(sentence: str, width: float, size: int) -> list[tuple[float, str]]:
    indent = text_width("- ", size)
    lines = wrapped(sentence, width - indent, size)
    return [(0.0 if i == 0 else indent, f"- {line}" if i == 0 else line) for i, line in enumerate(lines)]
