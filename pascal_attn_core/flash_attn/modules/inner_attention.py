"""Attention without projections: the inner modules of ``flash_attn.modules.mha``. All of them run in O(N) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import flash_attn as functions
from ...call.lazy_mask import LazyMask
from ..options import TOKENS, FlashArgumentError, attend, check_layout, flash_options, unpacked
from ..signatures import called_as

# What flash-attn adds to the scores of padding.
_PADDING = -10000.0
_INNER = "self causal=False softmax_scale=None attention_dropout=0.0"


def get_alibi_slopes(nheads: int) -> list[float]:
    """ALiBi's slopes: 2 ** (-8 i / n) for the n heads of the next power of two below, then every other one of 2 n."""
    closest = 1 << (nheads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / closest) for i in range(closest)]
    between = [2.0 ** (-8.0 * (i + 1) / (2 * closest)) for i in range(0, 2 * closest, 2)]
    return slopes + between[: nheads - closest]


class _Inner(nn.Module):
    """The base of the four kinds of inner attention."""

    def __init__(self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0):
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    @property
    def dropout_p(self) -> float:
        return self.drop.p if self.training else 0.0

    def rules(self, causal: bool | None = None) -> dict[str, Any]:
        return {"softmax_scale": self.softmax_scale or None, "causal": self.causal if causal is None else causal}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool | None, mask: Any) -> Tensor:
        return attend(q, k, v, flash_options(self.dropout_p, **self.rules(causal)), mask=mask)[0]


class _FlashInner(_Inner):
    """The base of the two that take what flash-attn's functions do."""

    alibi_slopes: Tensor | None

    @called_as(f"{_INNER} window_size=(-1,-1) alibi_slopes=None deterministic=False")
    def __init__(self, window_size: tuple[int, int], alibi_slopes: Any, deterministic: bool, **given: Any) -> None:
        super().__init__(**given)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def rules(self, causal: bool | None = None) -> dict[str, Any]:
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.float()
        return {**super().rules(causal), "window_size": self.window_size, "alibi_slopes": slopes}


class FlashSelfAttention(_FlashInner):
    """:func:`~pascal_attn_core.flash_attn.flash_attn_qkvpacked_func` as a module, in any dtype and on any device."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Any:
        """``[B, L, 3, H, D]`` -> ``[B, L, H, D]``, with ``cu_seqlens`` ``[total, 3, H, D]`` -> ``[total, H, D]``."""
        options = {**self.rules(causal), "deterministic": self.deterministic}
        if cu_seqlens is None:
            return functions.flash_attn_qkvpacked_func(qkv, self.dropout_p, **options)
        return functions.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, self.dropout_p, **options)


class FlashCrossAttention(_FlashInner):
    """:func:`~pascal_attn_core.flash_attn.flash_attn_kvpacked_func` as a module, in any dtype and on any device."""

    @called_as(f"{_INNER} alibi_slopes=None window_size=(-1,-1) deterministic=False")
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Any:
        """q ``[B, L, Hq, D]`` and kv ``[B, S, 2, Hkv, D]``, or ``[total, ...]`` of each with cu_seqlens of both."""
        options = {**self.rules(causal), "deterministic": self.deterministic}
        if cu_seqlens is None:
            return functions.flash_attn_kvpacked_func(q, kv, self.dropout_p, **options)
        if cu_seqlens_k is None:
            raise FlashArgumentError("cu_seqlens_k must be given with cu_seqlens, got None")
        return functions.flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, self.dropout_p, **options
        )


class SelfAttention(_Inner):
    """Attention with a padding mask. Scores of padding get -10000, as in flash-attn; ``causal`` hides later keys."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """qkv ``[B, L, 3, H, D]``; key_padding_mask bool ``[B, L]``, True = a token. Returns ``[B, L, H, D]``."""
        q, k, v = unpacked(qkv)
        return self.attend(q, k, v, causal, _padding(key_padding_mask, q, k))


class CrossAttention(_Inner):
    """Attention with a padding mask; ``causal`` is lower-right, counted from the last key that is no padding."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """q ``[B, L, Hq, D]``, kv ``[B, S, 2, Hkv, D]``, key_padding_mask bool ``[B, S]``; ``[B, L, Hq, D]``."""
        check_layout(TOKENS, q=q)
        check_layout(("B", "tokens", 2, "heads", "head_dim"), kv=kv)
        k, v = kv.unbind(2)
        padding, keep = _padding(key_padding_mask, q, k), key_padding_mask
        if keep is None or not self.rules(causal)["causal"]:
            return self.attend(q, k, v, causal, padding)
        last = keep.sum(-1) - q.shape[1]

        def rule(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = keep[batch_idx, kv_idx] & (kv_idx <= q_idx + last[batch_idx])
            return torch.where(seen, 0.0, _PADDING).to(q.dtype)

        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return self.attend(q, k, v, False, LazyMask(shape, rule, device=q.device, dtype=q.dtype))


def _padding(keep: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask ``[B, 1, 1, S]`` that is added to the scores."""
    if keep is None:
        return None
    check_layout(k.shape[:2], key_padding_mask=keep)
    if keep.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool (True = a token), got {keep.dtype}")
    return torch.where(keep, 0.0, _PADDING).to(q.dtype)[:, None, None]
