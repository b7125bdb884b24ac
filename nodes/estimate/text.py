"""The memory estimate as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..reporting.words import plural, size_text
from .figures import Figures
from .largest import WAYS, Axis, Fit

Largest = Sequence[tuple[Axis, Sequence[Fit]]]
_COUNTED = (
    "Counted: the tensors of one model evaluation, and the temporary memory of attention and feed-forward layers. "
    "Not counted: copies of weights in transit, workspace of individual kernels, ControlNets, what the "
    "text encoder and the VAE compute, previews, other programs, and memory lost to fragmentation."
)


@dataclass(frozen=True)
class Subject:
    """The subject of an estimate.

    Attributes:
        name: of the model.
        latent: the shape of each stream of the latent.
        weight_bytes: all weights of the model.
        available_bytes: what is free on the card, and what this model already takes there; 0 = not known.
        total_bytes: all memory of the card.
    """

    name: str
    latent: Sequence[Sequence[int]]
    weight_bytes: int
    available_bytes: int
    total_bytes: int

    @property
    def is_streamed(self) -> bool:
        """Whether not even the weights alone are known to fit."""
        return self.weight_bytes >= self.available_bytes

    @property
    def room(self) -> int:
        """Bytes for everything but the weights, or beside streamed weights."""
        return self.available_bytes - (0 if self.is_streamed else self.weight_bytes)


def text_of(found: Figures, subject: Subject) -> str:
    """The verdict, then a line per fact."""
    latents = " and ".join(" x ".join(map(str, shape)) for shape in subject.latent)
    batch = "prompt and negative prompt in one batch" if found.call.copies == 2 else "one prompt at a time"
    without, patched = map(size_text, found.peaks)
    lines = [
        f"{subject.name}: {_verdict(found, subject)}",
        f"Latent {latents}, {batch}, on {found.host.info.name or found.host.device}.",
        _calls("Attention", found, found.call.attention),
        _calls("Feed-forward", found, found.call.ffn),
        f"Other tensors of the model: {size_text(found.call.other_bytes)} at most. The patch does not change them.",
        f"Peak besides the weights: {without} without the patch, {patched} with it.",
        _COUNTED,
    ]
    if unread := found.call.unread:
        lines.append(f"{len(unread)} more attention calls could not be read ({unread[0]}).")
    return "\n".join(lines)


def need_text(found: Figures) -> str:
    without, patched = map(size_text, found.peaks)
    return f"needs {without} besides its weights" + (f", {patched} with the patch" if found.saved_bytes > 0 else "")


def _verdict(found: Figures, subject: Subject) -> str:
    if not subject.available_bytes:
        return f"{need_text(found)}; how much memory there is is not known."
    without, patched = (_fit(need, subject) for need in found.peaks)
    memory = f"{size_text(subject.available_bytes)} of {size_text(subject.total_bytes)} are available"
    if found.saved_bytes <= 0:
        return f"{without}; {memory}. The patch saves nothing here."
    return f"{without} without the patch, {patched} with it; {memory}."


def _fit(need: int, subject: Subject) -> str:
    available, weights = subject.available_bytes, subject.weight_bytes
    if need > available:
        return f"does not fit ({size_text(need - available)} too much even with no weights on the card)"
    if need + weights > available:
        return f"fits with {size_text(available - need)} of {size_text(weights)} weights on the card, the rest streamed"
    return f"fits ({size_text(need + weights)} with its weights)"


def _calls(what: str, found: Figures, calls: Sequence[Any]) -> str:
    if not calls:
        return f"{what}: no call found."
    largest = max(calls, key=lambda each: each.extra_bytes)
    without, patched = found.most(calls)
    least = f"at least {size_text(without)}" if without else "nothing"
    sizes = f"{least} without the patch, {size_text(patched)} at most with it"
    return f"{what}: {plural(len(calls), 'call')}, {sizes}; the largest {largest.text}: {found.needs[largest].why}."


def largest_text(found: Largest, subject: Subject, decode: Fit | None) -> str:
    """Say what fits, a line for each axis. ``decode``: the largest picture that the VAE decodes in one piece; None = no
    VAE was given."""
    streamed = subject.is_streamed
    beside = "with the weights streamed from system memory" if streamed else "beside all weights of the model"
    lines = [f"The largest size that fits into {size_text(subject.room)} {beside}, along one axis at a time:"]
    for axis, fits in found:
        ways = "; ".join(f"{way} {fit.words}" for way, fit in zip(WAYS, fits))
        lines.append(f"  {axis.name} (now {axis.now.words}): {ways}")
    if decode is not None:
        lines.append(f"  decoding in one piece, by ComfyUI's own estimate of its VAE: {decode.words}")
    return "\n".join(lines)
