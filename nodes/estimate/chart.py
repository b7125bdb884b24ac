"""The largest that fits, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..reporting.picture import Row, Section, draw
from .largest import WAYS, Largest

if TYPE_CHECKING:
    from PIL import Image


def draw_largest(found: Sequence[Largest], title: str) -> Image.Image:
    """A section for each axis, in it a row for each way, the bar of which is its largest size."""
    return draw(
        title, "" if found else "No estimate for other sizes: see the text.", [_section(axis) for axis in found]
    )


def _section(axis: Largest) -> Section:
    most = max([axis.now.amount, *(size.amount for size in axis.fits if size is not None)])
    rows = [Row("now", axis.now.words, axis.now.amount / most, "caution")]
    for (way, *_), size, bounded in zip(WAYS, axis.fits, axis.is_bounded):
        if size is None:
            rows.append(Row(way, "nothing fits", 0.0))
        else:
            rows.append(Row(way, size.words + ("" if bounded else " or more"), size.amount / most))
    return Section(axis.axis, rows)
