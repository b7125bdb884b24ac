"""From the calls of one model evaluation to memory: with and without Pascal Attention Patch at its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...pascal_attn_core import AttentionConfig
from ...pascal_attn_core.call import AttentionCall, check_call
from ...pascal_attn_core.fused.gpu import has_kernels
from ...pascal_attn_core.machine.device import MIB, DeviceInfo
from ...pascal_attn_core.routes import torch_kernel
from ...pascal_attn_core.tiled.plan import plan_call
from .trace import AttentionShape, FfnShape, ModelCall

_PROBE_TOKENS = 64


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
