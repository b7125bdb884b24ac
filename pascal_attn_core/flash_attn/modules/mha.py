"""Attention with its projections and its cache: ``flash_attn.modules.mha``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ... import flash_attn as functions
from ..options import FlashArgumentError
from ..signatures import called_as
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
        layer_idx: the name of this layer's cache in generation.
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
            mixer_subset: with cross_attn the queries are x[:, mixer_subset].
            inference_params: keys and values are cached, see
                :class:`~pascal_attn_core.flash_attn.modules.generation.InferenceParams`.
            kwargs: for the inner attention.
        Returns:
            of the shape of x, with return_residual (that, x).
        """
        self._check(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        lengths = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        kwargs = {**(lengths if self.use_flash_attn else {"key_padding_mask": key_padding_mask}), **kwargs}
        if not self.cross_attn and self.num_heads_kv == self.num_heads:
            tensors = (self.Wqkv(x).unflatten(-1, (3, -1, self.head_dim)),)
            context = self._attend(self.inner_attn, tensors, inference_params, kwargs)
        else:
            if self.cross_attn:
                q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
                kv = self.Wkv(x if x_kv is None else x_kv)
            else:
                q, kv = self.Wqkv(x).split([self.embed_dim, 2 * self.num_heads_kv * self.head_dim], -1)
                if cu_seqlens is not None:
                    kwargs = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **kwargs}
            q, kv = q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, -1, self.head_dim))
            context = self._attend(self.inner_cross_attn, (q, kv), inference_params, kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _check(
        self, x_kv: Any, key_padding_mask: Any, cu_seqlens: Any, max_seqlen: Any, mixer_subset: Any, params: Any
    ) -> None:
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise FlashArgumentError("x_kv and mixer_subset must be None without cross_attn")
        if cu_seqlens is not None:
            if not self.use_flash_attn or self.rotary_emb_dim:
                raise FlashArgumentError("cu_seqlens needs use_flash_attn and no rotary embedding")
            if max_seqlen is None:
                raise FlashArgumentError("max_seqlen must be given with cu_seqlens, got None")
        if key_padding_mask is not None and (self.use_flash_attn or cu_seqlens is not None):
            raise FlashArgumentError("key_padding_mask must be None with use_flash_attn; unpad the input instead")
        if params is not None and (key_padding_mask is not None or cu_seqlens is not None):
            raise FlashArgumentError("inference_params must come without key_padding_mask and cu_seqlens")

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty cache ``[batch_size, max_seqlen, 2, num_heads_kv, head_dim]``."""
        weight: Tensor = self.out_proj.weight
        shape = batch_size, max_seqlen, 2, self.num_heads_kv_local, self.head_dim
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _attend(
        self, inner: nn.Module, tensors: tuple[Tensor, ...], inference_params: Any, kwargs: dict[str, Any]
    ) -> Any:
        """``qkv [..., 3, heads, head_dim]``, or q and kv -> ``[..., heads, head_dim]``."""
        if self.rotary_emb_dim > 0:
            places, params = {}, inference_params
            if params is not None:
                offset = params.seqlen_offset if params.lengths_per_sample is None else params.lengths_per_sample
                places = {"seqlen_offset": offset, "max_seqlen": params.max_seqlen}
            rotated = self.rotary_emb(*tensors, **places)
            tensors = rotated if isinstance(rotated, tuple) else (rotated,)
        if inference_params is not None:
            q, kv = tensors if len(tensors) == 2 else (tensors[0][:, :, 0], tensors[0][:, :, 1:])
            return self._attend_cached(q, kv, inference_params)
        if self.checkpointing:
            return checkpoint(inner, *tensors, use_reentrant=False, **kwargs)
        return inner(*tensors, **kwargs)

    def _attend_cached(self, q: Tensor, kv: Tensor, inference_params: Any) -> Any:
        inner: Any = self.inner_cross_attn
        if self.layer_idx is None:
            raise FlashArgumentError("layer_idx must be given to the constructor for generation, got None")
        if inference_params.seqlen_offset == 0:
            return inner(q, update_kv_cache(kv, inference_params, self.layer_idx))
        if self.layer_idx not in inference_params.key_value_memory_dict:
            raise FlashArgumentError(f"layer {self.layer_idx} has no cache although seqlen_offset is above 0")
        first = inference_params.batch_size_offset
        rows = slice(first, first + q.shape[0])
        cache = inference_params.key_value_memory_dict[self.layer_idx][rows]
        lengths = inference_params.lengths_per_sample
        lengths = inference_params.seqlen_offset if lengths is None else lengths[rows]
        (k_cache, v_cache), (k, v) = cache.unbind(2), kv.unbind(2)
        return functions.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **inner.rules())


def update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: int) -> Tensor:
    """flash-attn's ``_update_kv_cache``: write ``kv [B, N, 2, H, D]`` at (batch_size_offset, seqlen_offset).

    Returns:
        ``[B, seqlen_offset + N, 2, H, D]``, a view of the cache, which is made where there is none.
    """
    caches = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        shape = inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:]
        caches[layer_idx] = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    cache: Tensor = caches[layer_idx]
    first, start = inference_params.batch_size_offset, inference_params.seqlen_offset
    last, end = first + kv.shape[0], start + kv.shape[1]
    if last > cache.shape[0] or end > cache.shape[1]:
        raise FlashArgumentError(
            f"the cache must have room for {last} sequences of {end} tokens, got {cache.shape[0]} of {cache.shape[1]}"
        )
    cache[first:last, start:end] = kv
    return cache[first:last, :end]
