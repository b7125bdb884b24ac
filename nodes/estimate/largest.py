"""The estimate the other way round: the largest picture, video and batch that fit, found by arithmetic.

One call of the model is followed at two sizes; every size that occurs in it (tokens, bytes) is a straight line through
the two, so that the call at any other size is known without following it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .figures import Host, peak_bytes
from .trace import AttentionShape, FfnShape, ModelCall

#: what is combined: its name, with Pascal Attention Patch, with Pascal FFN Chunking
WAYS = (
    ("as ComfyUI is", False, False),
    ("with Pascal Attention Patch", True, False),
    ("with Pascal FFN Chunking", False, True),
    ("with both", True, True),
)
_CELLS = 8  # a latent's height and width in steps of so many cells: what every model can cut into patches and halve
_LARGEST_SIDE = 2048  # cells
_MOST_FRAMES, _MOST_BATCH = 1024, 256


class Size(NamedTuple):
    """A size along one axis: its amount, to which tokens are proportional, the shape of the latent, and its words."""

    amount: int
    shape: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class Largest:
    """The largest sizes along one axis.

    Attributes:
        axis: ``"resolution"``, ``"frames"`` or ``"batch"``.
        now: the size of the latent that was given.
        fits: for each of WAYS the largest size that fits, None if not even the smallest does.
        is_bounded: for each of WAYS, whether a larger one was tried and does not fit.
    """

    axis: str
    now: Size
    fits: tuple[Size | None, ...]
    is_bounded: tuple[bool, ...]


def sizes_of(axis: str, shape: Sequence[int], pixels: int, frames: int) -> list[Size]:
    """The sizes along an axis, smallest first, in which the others stay as they are in ``shape`` ``[B, C, (T,) H, W]``.

    Args:
        pixels: of the picture for each cell of the latent's height and width.
        frames: of the video for each of the latent's frames but the first.
    """
    *front, height, width = shape
    if axis == "resolution":
        sides = []
        for short in range(_CELLS, _LARGEST_SIDE + 1, _CELLS):
            factor = short / min(height, width)
            h, w = (max(_CELLS, round(side * factor / _CELLS) * _CELLS) for side in (height, width))
            if max(h, w) <= _LARGEST_SIDE:
                sides.append(Size(h * w, (*front, h, w), f"{w * pixels} x {h * pixels}"))
        return sides
    if axis == "frames":
        return [
            Size(t, (*front[:2], t, height, width), f"{(t - 1) * frames + 1} frames")
            for t in range(1, _MOST_FRAMES + 1)
        ]
    return [Size(b, (b, *shape[1:]), f"batch of {b}") for b in range(1, _MOST_BATCH + 1)]


def size_now(axis: str, shape: Sequence[int], pixels: int, frames: int) -> Size:
    """The size along an axis that a latent of this shape has."""
    *front, height, width = shape
    if axis == "resolution":
        return Size(height * width, tuple(shape), f"{width * pixels} x {height * pixels}")
    if axis == "frames":
        return Size(front[2], tuple(shape), f"{(front[2] - 1) * frames + 1} frames")
    return Size(shape[0], tuple(shape), f"batch of {shape[0]}")


def axes_of(shape: Sequence[int]) -> list[str]:
    """The axes of a latent along which it may grow."""
    return ["resolution", *(["frames"] if len(shape) == 5 else []), "batch"]


def find_largest(
    axis: str, sizes: Sequence[Size], now: Size, follow: Callable[[Size], ModelCall], host: Host, room: int
) -> Largest | None:
    """The largest of ``sizes`` whose evaluation takes at most ``room`` bytes besides the weights.

    Args:
        follow: one call of the model at a size; asked for two of them.
    Returns:
        None where the two calls are not of one kind, so that nothing follows for others.
    """
    other = _another(sizes, now)
    at = line_through(now.amount, follow(now), other.amount, follow(other))
    if at is None:
        return None

    def bytes_of(size: Size, patched: bool, chunked: bool) -> int:
        return peak_bytes(at(size.amount), host, patched=patched, chunked=chunked)

    counts = [bisect_right(sizes, room, key=lambda size: bytes_of(size, *way[1:])) for way in WAYS]
    fits = tuple(sizes[count - 1] if count else None for count in counts)
    return Largest(axis, now, fits, tuple(count < len(sizes) for count in counts))


def largest_decode(sizes: Sequence[Size], bytes_of: Callable[[tuple[int, ...]], int], room: int) -> Size | None:
    """The largest of ``sizes`` whose latent is decoded in at most ``room`` bytes; None if not even the smallest is."""
    count = bisect_right(sizes, room, key=lambda size: bytes_of(size.shape))
    return sizes[count - 1] if count else None


def _another(sizes: Sequence[Size], now: Size) -> Size:
    """A size that is far enough from the present one: about half of it, or twice."""
    smaller = [size for size in sizes if size.amount <= now.amount / 2]
    return smaller[-1] if smaller else next(size for size in sizes if size.amount >= 2 * now.amount)


def line_through(n1: int, one: ModelCall, n2: int, two: ModelCall) -> Callable[[int], ModelCall] | None:
    """The call at any amount from two of them; None if they do not make the same calls in the same order."""
    same_attention = [(a.dtype, a.masked) for a in one.attention] == [(a.dtype, a.masked) for a in two.attention]
    same_ffn = [(f.name, f.dtype) for f in one.ffn] == [(f.name, f.dtype) for f in two.ffn]
    if n1 == n2 or not (one.attention and same_attention and same_ffn):
        return None

    def between(a: Any, b: Any, n: int) -> Any:
        if isinstance(a, tuple):
            return tuple(between(x, y, n) for x, y in zip(a, b))
        return max(0, round(a + (b - a) * (n - n1) / (n2 - n1)))

    def moved(a: AttentionShape | FfnShape, b: AttentionShape | FfnShape, n: int) -> Any:
        names = [name for name in vars(a) if isinstance(getattr(a, name), (int, tuple)) and name != "masked"]
        return replace(a, **{name: between(getattr(a, name), getattr(b, name), n) for name in names})

    def at(n: int) -> ModelCall:
        return ModelCall(
            [moved(a, b, n) for a, b in zip(one.attention, two.attention)],
            [moved(a, b, n) for a, b in zip(one.ffn, two.ffn)],
            between(one.other_bytes, two.other_bytes, n),
            is_rough=one.is_rough,
        )

    return at
