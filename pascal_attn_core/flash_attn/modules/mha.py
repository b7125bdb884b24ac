"""Attention with its projections: ``flash_attn.modules.mha``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..options import FlashArgumentError
from ..signatures import called_as, refuse
from . import inner_attention as inners
from .rotary import RotaryEmbedding

# Arguments of MHA that are attributes of it.
_KEPT = ["causal", "layer_idx", "rotary_emb_dim", "use_flash_attn", "checkpointing", "cross_attn", "return_residual"]


class LinearResidual(nn.Linear):
    """A linear layer that returns (output, input)."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input), input


class MHA(nn.Module):
    """Multi-head self- or cross-attention with its projections.

    Args:
        num_heads_kv: key and value heads; None = num_heads.
        cross_attn: queries come from x, keys and values from x_kv.
        layer_idx: an attribute only, for programs that read it.
        dwconv: must be False: the convolution after the projection is not supported.
        rotary_emb_dim: numbers of each head that are rotated, 0 = none; see
            :class:`~pascal_attn_core.flash_attn.modules.rotary.RotaryEmbedding` for the other three.
        use_alibi, window_size: with use_flash_attn only.
        fused_bias_fc: ignored, for compatibility.
        use_flash_attn: take sequences of different lengths (cu_seqlens); else a key_padding_mask. Memory is O(N) in
            both.
        return_residual: return (output, x).
        checkpointing: compute the attention again in the backward pass.
    """

    layer_idx: Any
    rotary_emb_dim: int

    @called_as(
        "self embed_dim num_heads num_heads_kv=None cross_attn=False qkv_proj_bias=True out_proj_bias=True dropout=0.0 "
        "softmax_scale=None causal=False layer_idx=None dwconv=False rotary_emb_dim=0 rotary_emb_base=10000.0 "
        "rotary_emb_scale_base=None rotary_emb_interleaved=False use_alibi=False window_size=(-1,-1) "
        "fused_bias_fc=False use_flash_attn=False return_residual=False checkpointing=False device=None dtype=None",
        ignored="fused_bias_fc",
        refused="dwconv",
    )
    def __init__(self, embed_dim: int, num_heads: int, num_heads_kv: int | None, **given: Any) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.num_heads_kv = self.num_heads_kv_local = num_heads if num_heads_kv is None else num_heads_kv
        for name in _KEPT:
            setattr(self, name, given[name])
        self._check_sizes()
        alibi, window, kinds = given["use_alibi"], given["window_size"], {"device": given["device"]}
        if not self.use_flash_attn and (alibi or tuple(window) != (-1, -1)):
            raise FlashArgumentError("use_alibi and window_size need use_flash_attn=True (as in flash-attn)")
        if self.rotary_emb_dim > 0:
            rotary = {name: given[f"rotary_emb_{name}"] for name in ("base", "scale_base", "interleaved")}
            self.rotary_emb = RotaryEmbedding(self.rotary_emb_dim, **rotary, **kinds)
        inner = {"causal": self.causal, "softmax_scale": given["softmax_scale"], "attention_dropout": given["dropout"]}
        kinds["dtype"] = given["dtype"]
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if self.cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=given["qkv_proj_bias"], **kinds)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=given["qkv_proj_bias"], **kinds)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=given["qkv_proj_bias"], **kinds)
        if self.use_flash_attn:
            slopes = torch.tensor(inners.get_alibi_slopes(num_heads), device=kinds["device"]) if alibi else None
            inner |= {"alibi_slopes": slopes, "window_size": window}
        flash = self.use_flash_attn
        self.inner_attn: nn.Module = (inners.FlashSelfAttention if flash else inners.SelfAttention)(**inner)
        self.inner_cross_attn: nn.Module = (inners.FlashCrossAttention if flash else inners.CrossAttention)(**inner)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=given["out_proj_bias"], **kinds)

    def _check_sizes(self) -> None:
        if self.embed_dim % self.num_heads:
            raise FlashArgumentError(
                f"embed_dim must be a multiple of num_heads, got {self.embed_dim}, {self.num_heads}"
            )
        if self.num_heads % self.num_heads_kv:
            raise FlashArgumentError(f"num_heads must be a multiple of num_heads_kv ({self.num_heads_kv})")
        if self.cross_attn and self.rotary_emb_dim:
            raise FlashArgumentError("rotary_emb_dim must be 0 with cross_attn (as in flash-attn)")

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Attention of x.

        Args:
            x: ``[B, L, embed_dim]``, with ``cu_seqlens`` ``[total, embed_dim]``.
            x_kv: ``[B, S, embed_dim]``, for cross_attn; None = x.
            key_padding_mask: bool ``[B, S]``, True = a token; only without use_flash_attn.
            cu_seqlens, max_seqlen: ``[B + 1]`` and a number, only with use_flash_attn and without rotary embedding.
            mixer_subset, inference_params: must be None: there are neither subsets of queries nor caches.
            kwargs: for the inner attention.
        Returns:
            of the shape of x, with return_residual (that, x).
        """
        refuse(mixer_subset=mixer_subset, inference_params=inference_params)
        self._check(x_kv, key_padding_mask, cu_seqlens, max_seqlen)
        lengths = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        kwargs = {**(lengths if self.use_flash_attn else {"key_padding_mask": key_padding_mask}), **kwargs}
        tensors = self._projected(x, x_kv)
        inner = self.inner_attn if len(tensors) == 1 else self.inner_cross_attn
        if len(tensors) == 2 and cu_seqlens is not None and not self.cross_attn:
            kwargs = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **kwargs}
        attend = functools.partial(checkpoint, inner, use_reentrant=False) if self.checkpointing else inner
        out = self.out_proj(attend(*tensors, **kwargs).flatten(-2))
        return (out, x) if self.return_residual else out

    def _projected(self, x: Tensor, x_kv: Tensor | None) -> tuple[Tensor, ...]:
        """qkv ``[..., 3, heads, head_dim]``, or q ``[..., heads, head_dim]`` and kv ``[..., 2, heads, head_dim]``."""
        if self.cross_attn:
            q, kv = self.Wq(x), self.Wkv(x if x_kv is None else x_kv)
        elif self.num_heads_kv == self.num_heads:
            qkv = self.Wqkv(x).unflatten(-1, (3, -1, self.head_dim))
            return (self.rotary_emb(qkv) if self.rotary_emb_dim > 0 else qkv,)
        else:
            q, kv = self.Wqkv(x).split([self.embed_dim, 2 * self.num_heads_kv * self.head_dim], -1)
        q, kv = q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, -1, self.head_dim))
        return self.rotary_emb(q, kv) if self.rotary_emb_dim > 0 else (q, kv)

    def _check(self, x_kv: Any, key_padding_mask: Any, cu_seqlens: Any, max_seqlen: Any) -> None:
        if not self.cross_attn and x_kv is not None:
            raise FlashArgumentError("x_kv must be None without cross_attn")
        if cu_seqlens is not None:
            if not self.use_flash_attn or self.rotary_emb_dim:
                raise FlashArgumentError("cu_seqlens needs use_flash_attn and no rotary embedding")
            if max_seqlen is None:
                raise FlashArgumentError("max_seqlen must be given with cu_seqlens, got None")
        if key_padding_mask is not None and self.use_flash_attn:
            raise FlashArgumentError("key_padding_mask must be None with use_flash_attn; unpad the input instead")
