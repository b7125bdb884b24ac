"""The memory estimate as text, and the largest sizes as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

from ..reporting.picture import Row, Section, draw
from ..reporting.words import dtype_text, size_text
from .figures import Figures
from .largest import WAYS, Axis, Fit


@dataclass(frozen=True)
class Subject:
    """The subject of an estimate.

    Attributes:
        name: of the model.
        latent: the shape of each stream of the latent.
        copies: prompts in one batch.
        weight_bytes: all weights of the model.
        available_bytes: what is free on the card, and what this model already takes there; 0 = not known.
        total_bytes: all memory of the card.
        others: weights of what runs before and after sampling, in bytes, and whether they are moved to the card.
    """

    name: str
    latent: Sequence[Sequence[int]]
    copies: int
    weight_bytes: int
    available_bytes: int
    total_bytes: int
    others: Mapping[str, tuple[int, bool]] = field(default_factory=dict)


def text_of(found: Figures, subject: Subject) -> str:
    """The verdict, then a line per fact."""
    latents = " and ".join(" x ".join(map(str, shape)) for shape in subject.latent)
    batch = "prompt and negative prompt in one batch" if subject.copies == 2 else "one prompt at a time"
    lines = [
        f"{subject.name}: {verdict(found, subject)}",
        f"Latent {latents}, {batch}, on {found.host.info.name or found.host.device}.",
        *_attention(found),
        *_ffn(found),
        f"Other tensors of the model: {size_text(found.call.other_bytes)} at most. The patches do not change them.",
        f"Peak besides the weights: {size_text(found.total_without)} without the patches, "
        f"{size_text(found.total_with)} with both.",
        *_weights(subject),
        "Counted: the tensors of one model evaluation, and the temporary memory of attention and feed-forward layers. "
        "Not counted: copies of weights in transit, workspace of individual kernels, ControlNets, what the "
        "text encoder and the VAE compute, previews, other programs, and memory lost to fragmentation.",
    ]
    return "\n".join(lines)


def _weights(subject: Subject) -> list[str]:
    """One line on the weights of the model, the text encoder and the VAE, where one of these was given."""
    if not subject.others:
        return []
    said = [f"model {size_text(subject.weight_bytes)}"]
    for name, (size, on_card) in subject.others.items():
        too_much = size - subject.available_bytes if on_card and subject.available_bytes else 0
        said.append(f"{name} {size_text(size)}" + ("" if on_card else " (stays in system memory)"))
        if too_much > 0:
            said[-1] += f" ({size_text(too_much)} too much, that part is streamed)"
    return [f"Weights: {', '.join(said)}. ComfyUI takes one off the card where the next one needs the memory."]


def verdict(found: Figures, subject: Subject) -> str:
    if not subject.available_bytes:
        return f"{need_text(found)}; how much memory there is is not known."
    without, patched = (_fit(need, subject) for need in (found.total_without, found.total_with))
    memory = f"{size_text(subject.available_bytes)} of {size_text(subject.total_bytes)} are available"
    if found.total_with >= found.total_without:
        return f"{without}; {memory}. The patches save nothing here."
    return f"{without} without the patches, {patched} with both; {memory}."


def need_text(found: Figures) -> str:
    saved = f", {size_text(found.total_with)} with the patches" if found.total_with < found.total_without else ""
    return f"needs {size_text(found.total_without)} besides its weights{saved}"


def _fit(need: int, subject: Subject) -> str:
    available, weights = subject.available_bytes, subject.weight_bytes
    if need > available:
        return f"does not fit ({size_text(need - available)} too much even with no weights on the card)"
    if need + weights > available:
        return f"fits with {size_text(available - need)} of {size_text(weights)} weights on the card, the rest streamed"
    return f"fits ({size_text(need + weights)} with its weights)"


def largest_text(found: Sequence[tuple[Axis, Sequence[Fit]]], room: int, streamed: bool, decode: Fit | None) -> str:
    """Says what fits, a line for each axis.

    Args:
        room: bytes that are available, without the weights unless they are ``streamed``.
        decode: the largest picture that the VAE decodes in one piece; None = no VAE was given.
    """
    beside = "with the weights streamed from system memory" if streamed else "beside all weights of the model"
    lines = [f"The largest size that fits into {size_text(max(0, room))} {beside}, along one axis at a time:"]
    for axis, fits in found:
        ways = "; ".join(f"{way} {fit.words}" for (way, *_), fit in zip(WAYS, fits))
        lines.append(f"  {axis.name} (now {axis.now.words}): {ways}")
    if decode is not None:
        lines.append(f"  decoding in one piece, by ComfyUI's own estimate of its VAE: {decode.words}")
    return "\n".join(lines)


def draw_largest(found: Sequence[tuple[Axis, Sequence[Fit]]], title: str) -> Image.Image:
    """A section for each axis, in it a row for each way, the bar of which is its largest size."""
    subtitle = "" if found else "No estimate for other sizes: see the text."
    sections = []
    for axis, fits in found:
        most = max([axis.now.amount, *(fit.size.amount for fit in fits if fit.size is not None)])
        rows = [Row("now", axis.now.words, axis.now.amount / most, "caution")]
        rows += [Row(way, fit.words, fit.size.amount / most if fit.size else 0.0) for (way, *_), fit in zip(WAYS, fits)]
        sections.append(Section(axis.name, rows))
    return draw(title, subtitle, sections)


def _attention(found: Figures) -> list[str]:
    call, largest = found.call, found.attention
    if largest is None:
        return ["Attention: no call found."]
    stored, (batch, heads, queries, width) = found.of_attention(patched=False), largest.query
    sizes = f"{batch} x {heads} heads x {queries} queries x {largest.key[2]} keys of {width}"
    words = f"{sizes} in {dtype_text(largest.dtype)}{', masked' if largest.masked else ''}"
    without = f"at least {size_text(stored)}" if stored else "no score matrix"
    lines = [
        f"Attention: {len(call.attention)} calls, {len(found.needs)} different; the largest {words}. "
        f"Its score matrix is {size_text(largest.score_bytes)}.",
        f"  without the patch: {without} ({found.needs[largest].why})",
        f"  with Pascal Attention Patch: {size_text(found.of_attention(patched=True))} at most",
    ]
    if call.unread:
        lines.append(f"  {len(call.unread)} more calls could not be read ({call.unread[0]})")
    return lines


def _ffn(found: Figures) -> list[str]:
    layer, budget = found.ffn, found.host.ffn_budget_mib
    if layer is None:
        return ["Feed-forward: no layer found that could be chunked."]
    words = f"{layer.name} ({layer.kind}) on {' x '.join(map(str, layer.shape))} in {dtype_text(layer.dtype)}"
    return [
        f"Feed-forward: {len(found.call.ffn)} calls; the largest {words}.",
        f"  without the patch: {size_text(found.of_ffn(chunked=False))}",
        f"  with Pascal FFN Chunking (budget {budget} MiB): {size_text(found.of_ffn(chunked=True))}",
    ]
