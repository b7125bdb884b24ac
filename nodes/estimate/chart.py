"""The largest that fits, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..reporting.picture import Row, Section, draw
from .largest import WAYS, Axis, Fit

if TYPE_CHECKING:
    from PIL import Image


def draw_largest(found: Sequence[tuple[Axis, Sequence[Fit]]], title: str) -> Image.Image:
    """A section for each axis, in it a row for each way, the bar of which is its largest size."""
    subtitle = "" if found else "No estimate for other sizes: see the text."
    return draw(title, subtitle, [_section(axis, fits) for axis, fits in found])


def _section(axis: Axis, fits: Sequence[Fit]) -> Section:
    most = max([axis.now.amount, *(fit.size.amount for fit in fits if fit.size is not None)])
    rows = [Row("now", axis.now.words, axis.now.amount / most, "caution")]
    rows += [Row(way, fit.words, fit.size.amount / most if fit.size else 0.0) for (way, *_), fit in zip(WAYS, fits)]
    return Section(axis.name, rows)
