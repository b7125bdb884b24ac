"""From the calls of one model evaluation to memory, with and without Pascal Attention Patch at its defaults; and the
other way round, the largest picture, video and batch that fit, found by bisection.

One call of the model is traced at two sizes; every size that occurs in it (tokens, bytes) is a straight line through
the two, so that the call at any other size is known without tracing it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...pascal_attn_core import AttentionConfig
from ...pascal_attn_core.call import AttentionCall, check_call
from ...pascal_attn_core.fused.gpu import has_kernels
from ...pascal_attn_core.machine.device import MIB, DeviceInfo
from ...pascal_attn_core.routes import torch_kernel
from ...pascal_attn_core.tiled.plan import plan_call
from .trace import AttentionShape, FfnShape, ModelCall

_PROBE_TOKENS = 64
WAYS = ("as ComfyUI is", "with Pascal Attention Patch")
_CELLS = 8  # step of a latent's height and width: what every model can cut into patches and halve
_LARGEST_SIDE = 2048  # cells
_MOST_FRAMES, _MOST_BATCH = 1024, 256


@dataclass(frozen=True)
class Subject:
    """A model on a card, in ComfyUI as it is without the patch.

    Attributes:
        name: of the model.
        weight_bytes: all weights of the model.
        available_bytes: what is free on the card, and what this model already takes there; 0 = not known.
        total_bytes: all memory of the card.
        device, info: where it runs.
        attention: the name of ComfyUI's attention function; "" for torch's SDPA.
        ffn_budget_mib, ffn_tokens: with which the patch chunks feed-forward layers on this card.
    """

    name: str
    weight_bytes: int
    available_bytes: int
    total_bytes: int
    device: torch.device
    info: DeviceInfo
    attention: str
    ffn_budget_mib: int
    ffn_tokens: int = 1024

    @property
    def is_streamed(self) -> bool:
        """Whether not even the weights alone are known to fit."""
        return self.weight_bytes >= self.available_bytes

    @property
    def room(self) -> int:
        """Bytes for everything but the weights, or beside streamed weights."""
        return self.available_bytes - (0 if self.is_streamed else self.weight_bytes)


class Need(NamedTuple):
    """Extra memory of a call in bytes: at least, without the patch, and at most, with it; and why."""

    sizes: tuple[int, int]
    why: str


class Figures:
    """Memory of one evaluation of a model besides its weights, in bytes.

    Attributes:
        call, subject: what the evaluation does, and where.
        needs: of each kind of call.
        peaks: the most at any moment, the model's other tensors included, without the patch and with it.
    """

    def __init__(self, call: ModelCall, subject: Subject):
        self.call, self.subject = call, subject
        self.needs = {each: _need_of(each, subject) for each in {each for each, _ in call.calls}}
        taken = [[live + size for size in self.needs[each].sizes] for each, live in call.calls]
        self.peaks = [max(way) for way in zip([call.other_bytes] * 2, *taken)]

    @property
    def saved_bytes(self) -> int:
        """How much lower the peak is with the patch."""
        return self.peaks[0] - self.peaks[1]


def _need_of(call: AttentionShape | FfnShape, subject: Subject) -> Need:
    """Memory that one call takes besides its inputs and result."""
    if isinstance(call, AttentionShape):
        return _attention_need(call, subject)
    is_whole = len(call.shape) < 2 or call.shape[-2] < subject.ffn_tokens
    chunked = call.extra_bytes if is_whole else min(call.extra_bytes, subject.ffn_budget_mib * MIB)
    return Need((call.extra_bytes, chunked), f"the patch chunks it, budget {subject.ffn_budget_mib} MiB")


def _attention_need(shape: AttentionShape, subject: Subject) -> Need:
    try:  # no other route exceeds the tiled one, by design
        patched = plan_call(_call_of(shape, "meta"), subject.info, AttentionConfig()).extra_bytes
    except (TypeError, ValueError):
        patched = shape.extra_bytes  # left to ComfyUI
    if subject.attention:
        return Need((0, patched), f"ComfyUI's {subject.attention} splits it according to the free memory")
    if not fused_takes(shape, subject.device):
        why = "PyTorch has no fused kernel for it here and stores the score matrix"
        if subject.info.kind == "hip" and has_kernels(subject.info):
            why += "; the patch has a kernel that does not store it, and tiles"
        return Need((shape.extra_bytes, min(patched, shape.extra_bytes)), why)
    why = "PyTorch has a fused kernel for it here, which stores no score matrix"
    return Need((0, 0), f"{why}; the patch uses it too") if subject.info.is_gpu else Need((0, patched), why)


def fused_takes(shape: AttentionShape, device: torch.device) -> bool:
    """Whether torch's SDPA has a fused kernel for such a call on this device, asked with a few tokens."""
    try:
        call = _call_of(shape, device, most_tokens=_PROBE_TOKENS)
    except (TypeError, ValueError):
        return False
    mask = call.query.new_zeros(1, 1, call.seq_len_q, call.seq_len_kv) if shape.masked else None
    return torch_kernel.fused_takes(call, call.query, call.key, call.value, mask)


def _call_of(shape: AttentionShape, device: torch.device | str, most_tokens: int = 1 << 62) -> AttentionCall:
    """The call on tensors as ComfyUI's models lay them out, with the first of its tokens.

    Raises:
        TypeError, ValueError: the shapes do not fit together.
    """
    query, key, value = (
        torch.zeros(batch, min(most_tokens, tokens), heads, width, dtype=shape.dtype, device=device).transpose(1, 2)
        for batch, heads, tokens, width in (shape.query, shape.key, shape.value)
    )
    return check_call(query, key, value, enable_gqa=shape.query[1] != shape.key[1])


# ---- the largest size that fits ----


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
    """Find for each of ``WAYS`` the largest size whose evaluation fits.

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
