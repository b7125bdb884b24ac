"""The memory estimate as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..reporting.words import plural, size_text
from .figures import WAYS, Axis, Figures, Fit, Subject
from .trace import AttentionShape, FfnShape

_COUNTED = (
    "Counted: the tensors of one model evaluation, and the temporary memory of attention and feed-forward layers. "
    "Not counted: copies of weights in transit, workspace of individual kernels, ControlNets, what the "
    "text encoder and the VAE compute, previews, other programs, and memory lost to fragmentation."
)


def text_of(found: Figures, latent: Sequence[Sequence[int]]) -> str:
    """The verdict, then a line per fact."""
    subject = found.subject
    latents = " and ".join(" x ".join(map(str, shape)) for shape in latent)
    batch = "prompt and negative prompt in one batch" if found.call.copies == 2 else "one prompt at a time"
    without, patched = map(size_text, found.peaks)
    lines = [
        f"{subject.name}: {_verdict(found)}",
        f"Latent {latents}, {batch}, on {subject.info.name or subject.device}.",
        _calls("Attention", found, AttentionShape),
        _calls("Feed-forward", found, FfnShape),
        f"Other tensors of the model: {size_text(found.call.other_bytes)} at most. The patch does not change them.",
        f"Peak besides the weights: {without} without the patch, {patched} with it.",
        _COUNTED,
    ]
    return "\n".join(lines)


def need_text(found: Figures) -> str:
    without, patched = map(size_text, found.peaks)
    return f"needs {without} besides its weights" + (f", {patched} with the patch" if found.saved_bytes > 0 else "")


def _verdict(found: Figures) -> str:
    subject = found.subject
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


def _calls(what: str, found: Figures, kind: type) -> str:
    calls = found.call.of(kind)
    if not calls:
        return f"{what}: no call found."
    largest = max(calls, key=lambda each: each.extra_bytes)
    without, patched = (max(way) for way in zip(*(found.needs[each].sizes for each in calls)))
    least = f"at least {size_text(without)}" if without else "nothing"
    sizes = f"{least} without the patch, {size_text(patched)} at most with it"
    return f"{what}: {plural(len(calls), 'call')}, {sizes}; the largest {largest.text}: {found.needs[largest].why}."


def largest_text(found: Iterable[tuple[Axis, Sequence[Fit]]], subject: Subject, decode: Fit | None) -> str:
    """Say what fits, a line for each axis. ``decode``: the largest picture that the VAE decodes in one piece; None = no
    VAE was given."""
    streamed = subject.is_streamed
    beside = "with the weights streamed from system memory" if streamed else "beside all weights of the model"
    lines = [f"The largest size that fits into {size_text(subject.room)} {beside}, along one axis at a time:"]
    for axis, fits in found:
        if fits:
            ways = "; ".join(f"{way} {fit.words}" for way, fit in zip(WAYS, fits))
            lines.append(f"  {axis.name} (now {axis.now.words}): {ways}")
    if decode is not None:
        lines.append(f"  decoding in one piece, by ComfyUI's own estimate of its VAE: {decode.words}")
    return "\n".join(lines)
