"""Names that flash-attn had before 2.0: ``flash_attn_unpadded_*`` and ``flash_attn.flash_attention``.

``causal`` is upper-left in them, as it was there: query i sees the keys 0 ... i of its sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import flash_attn as functions
from ..options import FlashArgumentError, check_layout, flash_options
from ..signatures import called_as, options_of
from ..varlen import padded_lse, varlen_attend
from .padding import pad_input, unpad_input


@called_as(
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale=None causal=False "
    "return_attn_probs=False deterministic=False",
    ignored="max_seqlen_k",
)
def flash_attn_unpadded_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    return_attn_probs: bool, **given: Any,
) -> Any:  # fmt: skip
    """:func:`~pascal_attn_core.flash_attn.flash_attn_varlen_func` with the causal rule of flash-attn 1.

    Returns:
        ``[total_q, H, D]``, with ``return_attn_probs`` (that, lse ``[B, H, max_seqlen_q]``, -inf after the end of each
        sequence, None).
    """
    options = flash_options(**given)
    options = options._replace(rules=options.rules._replace(alignment="upper_left"))
    out, lse = varlen_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options, with_lse=return_attn_probs)
    if lse is None:
        return out
    return out, padded_lse(lse, cu_seqlens_q.tolist(), max_seqlen_q, -torch.inf), None


@options_of(flash_attn_unpadded_func, 3)
def flash_attn_unpadded_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_unpadded_func` with ``kv [total_k, 2, H, D]``."""
    check_layout(("total", 2, "heads", "head_dim"), kv=kv)
    return flash_attn_unpadded_func(q, *kv.unbind(1), *options, **named)


@options_of(flash_attn_unpadded_func, 7)
def flash_attn_unpadded_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """:func:`flash_attn_unpadded_func` with ``qkv [total, 3, H, D]``."""
    check_layout(("total", 3, "heads", "head_dim"), qkv=qkv)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_unpadded_func(*qkv.unbind(1), *lengths, *options, **named)


class FlashAttention(nn.Module):
    """Self-attention of packed queries, keys and values, with padding."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0):
        super().__init__()
        self.softmax_scale, self.dropout_p = softmax_scale, attention_dropout

    def forward(
        self,
        qkv: Tensor,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """(output, None).

        Args:
            qkv: ``[B, S, 3, H, D]``, with ``cu_seqlens`` and ``max_s`` ``[total, 3, H, D]``.
            key_padding_mask: bool ``[B, S]``, True = a token; the output is 0 at padding.
        """
        if need_weights:
            raise FlashArgumentError("need_weights must be False: no matrix of probabilities exists")
        dropout_p = self.dropout_p if self.training else 0.0
        options: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": causal}
        if cu_seqlens is not None:
            longest = qkv.shape[0] if max_s is None else max_s
            return flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, longest, dropout_p, **options), None
        check_layout(("B", "tokens", 3, "heads", "head_dim"), qkv=qkv)
        batch, tokens = qkv.shape[:2]
        if key_padding_mask is None:
            return functions.flash_attn_qkvpacked_func(qkv, dropout_p, **options), None
        packed, indices, ends, longest, _ = unpad_input(qkv, key_padding_mask)
        out = flash_attn_unpadded_qkvpacked_func(packed, ends, longest, dropout_p, **options)
        return pad_input(out, indices, batch, tokens), None


class FlashMHA(nn.Module):
    """:class:`FlashAttention` with its projections ``Wqkv`` and ``out_proj``."""

    @called_as(
        "self embed_dim num_heads bias=True batch_first=True attention_dropout=0.0 causal=False device=None dtype=None",
        refused="batch_first",
    )
    def __init__(self, embed_dim: int, num_heads: int, attention_dropout: float, causal: bool, **given: Any) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise FlashArgumentError(f"embed_dim must be a multiple of num_heads ({num_heads}), got {embed_dim}")
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.head_dim = embed_dim // num_heads
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, **given)
        self.inner_attn = FlashAttention(attention_dropout=attention_dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **given)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """(``[B, S, embed_dim]``, None)."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        out, weights = self.inner_attn(qkv, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(-2)), weights
