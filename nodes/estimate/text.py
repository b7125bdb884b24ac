"""The memory estimate as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..reporting.words import dtype_text, size_text
from .figures import Figures, Host
from .largest import WAYS, Axis, Fit
from .trace import AttentionShape, FfnShape, ModelCall


@dataclass(frozen=True)
class Subject:
    """The subject of an estimate.

    Attributes:
        name: of the model.
        latent: the shape of each stream of the latent.
        copies: prompts in one batch.
        how: how the calls were found, as a sentence.
        weight_bytes: all weights of the model.
        available_bytes: what is free on the card, and what this model already takes there; 0 = not known.
        total_bytes: all memory of the card.
    """

    name: str
    latent: Sequence[Sequence[int]]
    copies: int
    how: str
    weight_bytes: int
    available_bytes: int
    total_bytes: int


def text_of(call: ModelCall, found: Figures, host: Host, subject: Subject) -> str:
    """The verdict, then a line per fact."""
    latents = " and ".join(" x ".join(map(str, shape)) for shape in subject.latent)
    batch = "prompt and negative prompt in one batch" if subject.copies == 2 else "one prompt at a time"
    lines = [
        f"{subject.name}: {verdict(found, subject)}",
        f"Latent {latents}, {batch}, on {host.info.name or host.device}.",
        *_attention(call, found),
        *_ffn(call, found, host),
        f"Other tensors of the model: {size_text(call.other_bytes)} at most. The patches do not change them.",
        f"Peak besides the weights: {size_text(found.total_without)} without the patches, "
        f"{size_text(found.total_with)} with both.",
        subject.how,
        "Counted: the tensors of one model evaluation, and the temporary memory of attention and feed-forward layers. "
        "Not counted: copies of weights in transit, workspace of individual kernels, ControlNets, VAE, text encoder, "
        "previews, other programs, and memory lost to fragmentation.",
    ]
    return "\n".join(lines)


def verdict(found: Figures, subject: Subject) -> str:
    """Whether it fits, with and without the patches."""
    if not subject.available_bytes:
        return f"{need_text(found)}; how much memory there is is not known."
    without, patched = (_fit(need, subject) for need in (found.total_without, found.total_with))
    memory = f"{size_text(subject.available_bytes)} of {size_text(subject.total_bytes)} are available"
    if found.total_with >= found.total_without:
        return f"{without}; {memory}. The patches save nothing here."
    return f"{without} without the patches, {patched} with both; {memory}."


def need_text(found: Figures) -> str:
    """Says what is needed besides the weights."""
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


def _attention(call: ModelCall, found: Figures) -> list[str]:
    if found.attention is None:
        return ["Attention: no call found."]
    counted = f"{len(call.attention)} calls, {len(set(call.attention))} different; the largest "
    without = f"at least {size_text(found.attention_without)}" if found.attention_without else "no score matrix"
    lines = [
        f"Attention: {counted}{_words(found.attention)}. Its score matrix is {size_text(found.attention.score_bytes)}.",
        f"  without the patch: {without} ({found.why})",
        f"  with Pascal Attention Patch: {size_text(found.attention_with)} at most",
    ]
    if call.unread:
        lines.append(f"  {len(call.unread)} more calls could not be read ({call.unread[0]})")
    return lines


def _ffn(call: ModelCall, found: Figures, host: Host) -> list[str]:
    if found.ffn is None:
        return ["Feed-forward: no layer found that could be chunked."]
    return [
        f"Feed-forward: {len(call.ffn)} calls; the largest {_ffn_words(found.ffn)}.",
        f"  without the patch: {size_text(found.ffn_without)}",
        f"  with Pascal FFN Chunking (budget {host.ffn_budget_mib} MiB): {size_text(found.ffn_with)}",
    ]


def _words(shape: AttentionShape) -> str:
    batch, heads, queries, width = shape.query
    sizes = f"{batch} x {heads} heads x {queries} queries x {shape.key[2]} keys of {width}"
    return f"{sizes} in {dtype_text(shape.dtype)}{', masked' if shape.masked else ''}"


def _ffn_words(shape: FfnShape) -> str:
    return f"{shape.name} ({shape.kind}) on {' x '.join(map(str, shape.shape))} in {dtype_text(shape.dtype)}"
