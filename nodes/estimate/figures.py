"""From the calls of one model evaluation to memory: with and without the patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...pascal_attn_core import AttentionConfig
from ...pascal_attn_core.call import check_call
from ...pascal_attn_core.fused.gpu.vendors import has_kernels
from ...pascal_attn_core.machine.device import MIB, DeviceInfo
from ...pascal_attn_core.tiled.plan import plan_call
from .trace import AttentionShape, FfnShape, ModelCall

_MATH = 0  # torch.nn.attention.SDPBackend.MATH
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Host:
    """How ComfyUI would compute without the patches.

    Attributes:
        device, info: where.
        attention: the name of its attention function; "" for torch's SDPA.
        ffn_budget_mib, ffn_tokens: what Pascal FFN Chunking takes by default on this card.
    """

    device: torch.device
    info: DeviceInfo
    attention: str
    ffn_budget_mib: int
    ffn_tokens: int = 1024


@dataclass(frozen=True)
class Figures:
    """Bytes besides the weights. ``attention`` and ``ffn`` are the largest call's extra memory; ``total`` is the most
    at any moment, the model's other tensors included.

    Attributes:
        why: how the largest attention call is computed without the patch.
    """

    attention: AttentionShape | None
    ffn: FfnShape | None
    attention_without: int
    attention_with: int
    ffn_without: int
    ffn_with: int
    total_without: int
    total_with: int
    why: str


def figures(call: ModelCall, host: Host) -> Figures:
    """Memory that the calls of one model evaluation need."""
    needs = {shape: need_of(shape, host) for shape in set(call.attention)}
    attention = max(call.attention, key=lambda shape: shape.score_bytes, default=None)
    return Figures(
        attention,
        max(call.ffn, key=lambda shape: shape.extra_bytes, default=None),
        max((need.without for need in needs.values()), default=0),
        max((need.patched for need in needs.values()), default=0),
        max((shape.extra_bytes for shape in call.ffn), default=0),
        max((chunked_bytes(shape, host) for shape in call.ffn), default=0),
        peak_bytes(call, host, needs),
        peak_bytes(call, host, needs, patched=True, chunked=True),
        "" if attention is None else needs[attention].why,
    )


def peak_bytes(
    call: ModelCall,
    host: Host,
    needs: dict[AttentionShape, Need] | None = None,
    *,
    patched: bool = False,
    chunked: bool = False,
) -> int:
    """The most bytes besides the weights at any moment of one model evaluation.

    Args:
        needs: what :func:`need_of` says of each attention call; None = it is asked.
        patched, chunked: with Pascal Attention Patch, with Pascal FFN Chunking.
    """
    needs = needs or {shape: need_of(shape, host) for shape in set(call.attention)}
    moments = [call.other_bytes]
    for shape in call.attention:
        moments.append(shape.live_bytes + (needs[shape].patched if patched else needs[shape].without))
    for layer in call.ffn:
        moments.append(layer.live_bytes + (chunked_bytes(layer, host) if chunked else layer.extra_bytes))
    return max(moments)


def chunked_bytes(shape: FfnShape, host: Host) -> int:
    """Bytes that Pascal FFN Chunking would leave of a call's extra memory."""
    if len(shape.shape) < 2 or shape.shape[-2] < host.ffn_tokens:
        return shape.extra_bytes
    return min(shape.extra_bytes, host.ffn_budget_mib * MIB)


def patched_bytes(shape: AttentionShape, info: DeviceInfo) -> int:
    """Extra memory of the tiled route, which no other route exceeds by design; laid out as ComfyUI's models do."""
    query, key, value = (_laid_out(sizes, shape.dtype) for sizes in (shape.query, shape.key, shape.value))
    try:
        call = check_call(query, key, value, enable_gqa=shape.query[1] != shape.key[1])
        return plan_call(call, info, AttentionConfig()).extra_bytes
    except (TypeError, ValueError):
        return shape.score_bytes  # left to ComfyUI


def _laid_out(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    batch, heads, tokens, width = sizes
    return torch.empty(batch, tokens, heads, width, dtype=dtype, device="meta").transpose(1, 2)


class Need(NamedTuple):
    """Extra memory of an attention call in bytes: at least ``without`` the patch, at most ``patched``, and why."""

    without: int
    patched: int
    why: str


def need_of(shape: AttentionShape, host: Host) -> Need:
    """Memory that one attention call takes besides its inputs and result."""
    patched = patched_bytes(shape, host.info)
    if host.attention:
        return Need(0, patched, f"ComfyUI's {host.attention} splits it according to the free memory")
    takes = fused_takes(shape, host.device)
    if takes is None:
        return Need(0, patched, "PyTorch does not report how it would compute this call here")
    if not takes:
        why = "PyTorch has no fused kernel for it here and stores the score matrix"
        if host.info.kind == "hip" and has_kernels(host.info):
            why += "; the patch has a kernel that does not store it, and tiles"
        return Need(shape.score_bytes, min(patched, shape.score_bytes), why)
    why = "PyTorch has a fused kernel for it here, which stores no score matrix"
    return Need(0, 0, f"{why}; the patch uses it too") if host.info.is_gpu else Need(0, patched, why)


def fused_takes(shape: AttentionShape, device: torch.device) -> bool | None:
    """Whether torch's SDPA has a fused kernel for such a call on this device, asked with a few tokens; None = it does
    not say."""
    ask = getattr(torch, "_fused_sdp_choice", None)
    if ask is None:
        return None
    sizes = (
        (1, tensor[1], min(_PROBE_TOKENS, tensor[2]), tensor[3]) for tensor in (shape.query, shape.key, shape.value)
    )
    try:
        query, key, value = (torch.zeros(size, dtype=shape.dtype, device=device) for size in sizes)
        mask = query.new_zeros(1, 1, query.shape[2], key.shape[2]) if shape.masked else None
        return ask(query, key, value, mask, 0.0, False, enable_gqa=shape.query[1] != shape.key[1]) != _MATH
    except (RuntimeError, TypeError):
        return None
