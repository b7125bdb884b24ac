"""Attention with its projections: ``flash_attn.modules.mha.MHA``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ... import flash_attn as functions
from ..options import FlashArgumentError
from ..signatures import called_as


class MHA(nn.Module):
    """Multi-head self- or cross-attention with its projections, in O(N) memory.

    Args:
        num_heads_kv: key and value heads; None = num_heads.
        cross_attn: queries come from x, keys and values from x_kv.
        layer_idx, fused_bias_fc, use_flash_attn and the other rotary_emb_*: ignored, for compatibility.
        dwconv, rotary_emb_dim, use_alibi, return_residual, checkpointing: not supported.
    """

    @called_as(
        "self embed_dim num_heads num_heads_kv=None cross_attn=False qkv_proj_bias=True out_proj_bias=True dropout=0.0 "
        "softmax_scale=None causal=False layer_idx=None dwconv=False rotary_emb_dim=0 rotary_emb_base=10000.0 "
        "rotary_emb_scale_base=None rotary_emb_interleaved=False use_alibi=False window_size=(-1,-1) "
        "fused_bias_fc=False use_flash_attn=False return_residual=False checkpointing=False device=None dtype=None",
        ignored="layer_idx rotary_emb_base rotary_emb_scale_base rotary_emb_interleaved fused_bias_fc use_flash_attn",
        refused="dwconv rotary_emb_dim use_alibi return_residual checkpointing",
    )
    def __init__(
        self, embed_dim: int, num_heads: int, num_heads_kv: int | None, cross_attn: bool, qkv_proj_bias: bool,
        out_proj_bias: bool, dropout: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
        **kinds: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % heads_kv:
            raise FlashArgumentError(
                "embed_dim must be a multiple of num_heads, and num_heads of num_heads_kv, got "
                f"{embed_dim}, {num_heads}, {heads_kv}"
            )
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, heads_kv
        self.head_dim, self.causal, self.cross_attn = embed_dim // num_heads, causal, cross_attn
        self.dropout_p, self.softmax_scale, self.window_size = dropout, softmax_scale, window_size
        kv_dim = 2 * self.head_dim * heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **kinds)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **kinds)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **kinds)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **kinds)

    @called_as(
        "self x x_kv=None key_padding_mask=None cu_seqlens=None max_seqlen=None mixer_subset=None "
        "inference_params=None",
        refused="key_padding_mask mixer_subset inference_params",
    )
    def forward(self, x: Tensor, x_kv: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        """Attention of x.

        Args:
            x: ``[B, L, embed_dim]``, with ``cu_seqlens`` ``[total, embed_dim]``.
            x_kv: ``[B, S, embed_dim]``, for cross_attn; None = x.
            cu_seqlens, max_seqlen: as for :func:`~pascal_attn_core.flash_attn.flash_attn_varlen_func`.
            key_padding_mask, mixer_subset, inference_params: must be None: they are not supported.
        Returns:
            of the shape of x.
        """
        if x_kv is not None and (not self.cross_attn or cu_seqlens is not None):
            raise FlashArgumentError("x_kv must be None without cross_attn and with cu_seqlens")
        if self.cross_attn:
            q, kv = self.Wq(x), self.Wkv(x if x_kv is None else x_kv)
        else:
            q, kv = self.Wqkv(x).split([self.embed_dim, 2 * self.num_heads_kv * self.head_dim], -1)
        q, (k, v) = q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        options: dict[str, Any] = {
            "dropout_p": self.dropout_p if self.training else 0.0,
            **{name: getattr(self, name) for name in ("softmax_scale", "causal", "window_size")},
        }
        if cu_seqlens is None:
            out = functions.flash_attn_func(q, k, v, **options)
        else:
            lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
            out = functions.flash_attn_varlen_func(q, k, v, *lengths, **options)
        assert isinstance(out, Tensor)
        return self.out_proj(out.flatten(-2))
