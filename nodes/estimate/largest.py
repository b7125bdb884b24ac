"""The estimate the other way round: the largest picture, video and batch that fit, found by bisection.

One call of the model is traced at two sizes; every size that occurs in it (tokens, bytes) is a straight line through
the two, so that the call at any other size is known without tracing it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils._pytree import tree_flatten, tree_unflatten

from .figures import Figures, Subject
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


def axes_of(shapes: Sequence[Sequence[int]], form: Any) -> list[Axis]:
    """The axes of a latent ``[B, C, (T,) H, W]``; along each the other sizes stay as they are. A latent of several
    streams, whose sizes depend on each other, has none.

    Args:
        form: ComfyUI's latent format, which knows how many pixels and frames one cell of the latent stands for.
    """
    if len(shapes) != 1 or len(shapes[0]) not in (4, 5):
        return []
    shape, pixels = shapes[0], getattr(form, "spacial_downscale_ratio", 8)
    frames = getattr(form, "temporal_downscale_ratio", 4)
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


def find_largest(
    axis: Axis, now: ModelCall, trace: Callable[[tuple[int, ...]], ModelCall | str], subject: Subject
) -> list[Fit]:
    """For each of ``WAYS`` the largest size whose evaluation fits.

    Args:
        now: the call of the model at the size that the axis has now.
        trace: that call on a latent of a shape; a sentence where it cannot be traced.
    Returns:
        An empty list where the calls at two sizes are not of one kind, so that nothing follows for other sizes.
    """
    smaller = [size for size in axis.sizes if size.amount <= axis.now.amount / 2]
    other = smaller[-1] if smaller else next(size for size in axis.sizes if size.amount >= 2 * axis.now.amount)
    then = trace(other.shape)
    at = None if isinstance(then, str) else line_through(axis.now.amount, now, other.amount, then)
    if at is None:
        return []

    def peak(way: int, size: Size) -> int:
        return Figures(at(size.amount), subject).peaks[way]

    return [bisected(axis.sizes, functools.partial(peak, way), subject.room) for way in range(len(WAYS))]


def bisected(sizes: Sequence[Size], bytes_of: Callable[[Size], int], room: int) -> Fit:
    """The largest of ``sizes`` that takes at most ``room`` bytes."""
    count = bisect_right(sizes, room, key=bytes_of)
    return Fit(sizes[count - 1] if count else None, count < len(sizes))


def line_through(n1: int, one: ModelCall, n2: int, two: ModelCall) -> Callable[[int], ModelCall] | None:
    """The call at any amount from two of them; None if they do not make the same calls in the same order."""
    (first, form), (second, other) = tree_flatten(one[:2]), tree_flatten(two[:2])
    if form != other or any(a != b for a, b in zip(first, second) if type(a) is not int):
        return None

    def at(n: int) -> ModelCall:
        by = (n - n1) / (n2 - n1)
        sizes = [max(0, round(a + (b - a) * by)) if type(a) is int else a for a, b in zip(first, second)]
        return ModelCall(*tree_unflatten(sizes, form))

    return at
