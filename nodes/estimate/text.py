"""The memory estimate as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...pascal_attn_core.machine.device import MIB
from ..tiles.choice import name_of
from .figures import Figures, Host
from .largest import WAYS, Largest, Size
from .trace import AttentionShape, FfnShape, ModelCall

GIB = 1 << 30


@dataclass(frozen=True)
class Subject:
    """What is estimated: the model's name, the shapes of the latent, prompts per batch, how the calls were found, and
    bytes of weights, of free and of all memory."""

    name: str
    latent: Sequence[Sequence[int]]
    copies: int
    how: str
    weight_bytes: int
    free_bytes: int
    total_bytes: int


def text_of(call: ModelCall, found: Figures, host: Host, subject: Subject) -> str:
    """All of it, a line per fact."""
    latents = " and ".join(" x ".join(map(str, shape)) for shape in subject.latent)
    batch = "prompt and negative prompt in one batch" if subject.copies == 2 else "one prompt at a time"
    lines = [
        f"Memory estimate: {subject.name}, latent {latents}, {batch}, on {host.info.name or host.device}.",
        *_attention(call, found),
        *_ffn(call, found, host),
        f"Other tensors of the model: {_mib(call.other_bytes)} at most. The patches do not change them.",
        f"Peak besides the weights: {_mib(found.total_without)} without the patches, {_mib(found.total_with)} with "
        "both.",
        *_fit(found, subject),
        subject.how,
        "Counted: the tensors of one model evaluation, and the temporary memory of attention and feed-forward layers. "
        "Not counted: weights and copies of weights in transit, workspace of individual kernels, ControlNets, VAE, "
        "text encoder, previews, other programs, and memory lost to fragmentation.",
    ]
    return "\n".join(lines)


def largest_text(found: Sequence[Largest], room: int, streamed: bool, decode: Size | None, asked_decode: bool) -> str:
    """What fits, a line for each axis.

    Args:
        room: bytes besides what else is loaded, and besides the weights unless they are ``streamed``.
        decode: the largest picture that the VAE decodes in one piece; None = none, where ``asked_decode``.
    """
    beside = "with the weights streamed from system memory" if streamed else "beside all weights of the model"
    lines = [f"The largest size that fits into {_mib(max(0, room))} {beside}, along one axis at a time:"]
    for axis in found:
        words = "; ".join(
            f"{way} {_size(size, bounded)}" for (way, *_), size, bounded in zip(WAYS, axis.fits, axis.is_bounded)
        )
        lines.append(f"  {axis.axis} (now {axis.now.words}): {words}")
    if asked_decode:
        lines.append(f"  decoding in one piece, by ComfyUI's own estimate of its VAE: {_size(decode, True)}")
    return "\n".join(lines)


def _size(size: Size | None, is_bounded: bool) -> str:
    return "nothing" if size is None else f"{size.words}{'' if is_bounded else ' or more'}"


def _attention(call: ModelCall, found: Figures) -> list[str]:
    if found.attention is None:
        return ["Attention: no call found."]
    counted = f"{len(call.attention)} calls, {len(set(call.attention))} different; the largest "
    counted = "the largest call about " if call.is_rough else counted
    without = f"at least {_mib(found.attention_without)}" if found.attention_without else "no score matrix"
    lines = [
        f"Attention: {counted}{_words(found.attention)}. Its score matrix is {_mib(found.attention.score_bytes)}.",
        f"  without the patch: {without} ({found.why})",
        f"  with Pascal Attention Patch: {_mib(found.attention_with)} at most",
    ]
    if call.unread:
        lines.append(f"  {len(call.unread)} more calls could not be read ({call.unread[0]})")
    return lines


def _ffn(call: ModelCall, found: Figures, host: Host) -> list[str]:
    if found.ffn is None:
        return ["Feed-forward: no layer found that could be chunked."]
    counted = "the largest call about " if call.is_rough else f"{len(call.ffn)} calls; the largest "
    return [
        f"Feed-forward: {counted}{_ffn_words(found.ffn)}.",
        f"  without the patch: {_mib(found.ffn_without)}",
        f"  with Pascal FFN Chunking (budget {host.ffn_budget_mib} MiB): {_mib(found.ffn_with)}",
    ]


def _fit(found: Figures, subject: Subject) -> list[str]:
    if not subject.total_bytes:
        return []
    weights = subject.weight_bytes
    lines = [
        f"Memory: {subject.total_bytes / GIB:.1f} GiB, of which {subject.free_bytes / GIB:.1f} GiB are free now; the "
        f"model's weights take {weights / GIB:.1f} GiB."
    ]
    for words, need in (("Without the patches", found.total_without), ("With both", found.total_with)):
        left = subject.total_bytes - need
        if left < 0:
            lines.append(f"  {words}: does not fit; {_mib(-left)} too much even without any weights on the card.")
        elif left < weights:
            lines.append(f"  {words}: {left / GIB:.1f} GiB remain for weights; ComfyUI streams the rest.")
        else:
            lines.append(f"  {words}: fits with all weights on the card, {_mib(left - weights)} to spare.")
    return lines


def _words(shape: AttentionShape) -> str:
    batch, heads, queries, width = shape.query
    mask = ", masked" if shape.masked else ""
    return (
        f"{batch} x {heads} heads x {queries} queries x {shape.key[2]} keys of {width} in {name_of(shape.dtype)}{mask}"
    )


def _ffn_words(shape: FfnShape) -> str:
    return f"{shape.name} ({shape.kind}) on {' x '.join(map(str, shape.shape))} in {name_of(shape.dtype)}"


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count < 100 * MIB else f"{count / MIB:.0f} MiB"
