"""The estimate the other way round: the largest picture, video and batch that fit, found by bisection.

One call of the model is traced at two sizes; every size that occurs in it (tokens, bytes) is a straight line through
the two, so that the call at any other size is known without tracing it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .figures import Figures, Host
from .trace import ModelCall

WAYS = ("as ComfyUI is", "with Pascal Attention Patch")
_CELLS = 8  # step of a latent's height and width: what every model can cut into patches and halve
_LARGEST_SIDE = 2048  # cells
_MOST_FRAMES, _MOST_BATCH = 1024, 256


class Size(NamedTuple):
    """A size along one axis: its amount, to which tokens are proportional, the shape of the latent, and its words."""

    amount: int
    shape: tuple[int, ...]
    words: str


class Axis(NamedTuple):
    """An axis along which a latent may grow: the size it has now, and all sizes, smallest first."""

    name: str
    now: Size
    sizes: list[Size]


class Fit(NamedTuple):
    """The largest size that fits, None where not even the smallest does; and whether a larger one was tried."""

    size: Size | None
    is_bounded: bool

    @property
    def words(self) -> str:
        return "nothing" if self.size is None else f"{self.size.words}{'' if self.is_bounded else ' or more'}"


def axes_of(shape: Sequence[int], pixels: int, frames: int) -> list[Axis]:
    """The axes of a latent ``[B, C, (T,) H, W]``; along each the other sizes stay as they are.

    Args:
        pixels: of the picture for each cell of the latent's height and width.
        frames: of the video for each of the latent's frames but the first.
    """
    *front, height, width = shape

    def picture(h: int, w: int) -> Size:
        return Size(h * w, (*front, h, w), f"{w * pixels} x {h * pixels}")

    def video(t: int) -> Size:
        return Size(t, (*front[:2], t, height, width), f"{(t - 1) * frames + 1} frames")

    def batch(b: int) -> Size:
        return Size(b, (b, *shape[1:]), f"batch of {b}")

    scaled = [short / min(height, width) for short in range(_CELLS, _LARGEST_SIDE + 1, _CELLS)]
    pairs = [[max(_CELLS, round(side * by / _CELLS) * _CELLS) for side in (height, width)] for by in scaled]
    axes = [
        Axis("resolution", picture(height, width), [picture(*pair) for pair in pairs if max(pair) <= _LARGEST_SIDE])
    ]
    if len(shape) == 5:
        axes.append(Axis("frames", video(front[2]), [video(t) for t in range(1, _MOST_FRAMES + 1)]))
    return [*axes, Axis("batch", batch(shape[0]), [batch(b) for b in range(1, _MOST_BATCH + 1)])]


def find_largest(axis: Axis, trace: Callable[[tuple[int, ...]], ModelCall], host: Host, room: int) -> list[Fit]:
    """For each of ``WAYS`` the largest size whose evaluation takes at most ``room`` bytes besides the weights.

    Args:
        trace: one call of the model on a latent of a shape; asked for two of them.
    Returns:
        An empty list where the two calls are not of one kind, so that nothing follows for other sizes.
    """
    smaller = [size for size in axis.sizes if size.amount <= axis.now.amount / 2]
    other = smaller[-1] if smaller else next(size for size in axis.sizes if size.amount >= 2 * axis.now.amount)
    at = line_through(axis.now.amount, trace(axis.now.shape), other.amount, trace(other.shape))
    if at is None:
        return []
    return [bisected(axis.sizes, functools.partial(_peak, at, host, way), room) for way in range(len(WAYS))]


def _peak(at: Callable[[int], ModelCall], host: Host, way: int, size: Size) -> int:
    return Figures(at(size.amount), host).peaks[way]


def bisected(sizes: Sequence[Size], bytes_of: Callable[[Size], int], room: int) -> Fit:
    """The largest of ``sizes`` that takes at most ``room`` bytes."""
    count = bisect_right(sizes, room, key=bytes_of)
    return Fit(sizes[count - 1] if count else None, count < len(sizes))


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

    def moved(a: Any, b: Any, n: int) -> Any:
        names = [name for name in vars(a) if isinstance(getattr(a, name), (int, tuple)) and name != "masked"]
        return replace(a, **{name: between(getattr(a, name), getattr(b, name), n) for name in names})

    def at(n: int) -> ModelCall:
        return ModelCall(
            [moved(a, b, n) for a, b in zip(one.attention, two.attention)],
            [moved(a, b, n) for a, b in zip(one.ffn, two.ffn)],
            between(one.other_bytes, two.other_bytes, n),
        )

    return at
