"""What torch itself does to the arguments of its attention first: its causal bias objects, and autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from .interception import PLAIN
from .lazy_mask import LazyMask
from .tiled.layout import autocast_on


def prepared(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | LazyMask | None, is_causal: bool, alignment: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | LazyMask | None, bool, str]:
    """(query, key, value, attn_mask, is_causal, alignment) as :func:`pascal_attn_core.call.check_call` takes them."""
    if attn_mask is not None and type(attn_mask) not in PLAIN and isinstance(attn_mask, Tensor):
        attn_mask, is_causal, alignment = _unwrap_causal_bias(query, key, attn_mask, is_causal, alignment)
    if isinstance(query, Tensor) and autocast_on(query):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)
        attn_mask = _cast(attn_mask, dtype) if isinstance(attn_mask, Tensor) else attn_mask
    return query, key, value, attn_mask, is_causal, alignment


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast of one argument: float tensors except float64. What is no tensor is left for the check to refuse."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _unwrap_causal_bias(
    query: Tensor, key: Tensor, attn_mask: Tensor, is_causal: bool, alignment: str
) -> tuple[Tensor | None, bool, str]:
    """torch.nn.attention.bias.causal_upper_left / causal_lower_right, which are rules in the dress of a tensor."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, alignment
    if is_causal:
        raise ValueError("is_causal must be False with a CausalBias as attn_mask, got True")
    sizes, needed = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if sizes != needed:
        raise ValueError(f"a CausalBias must be made for (L, S) = {needed}, got {sizes}")
    return None, True, "lower_right" if attn_mask.variant == CausalVariant.LOWER_RIGHT else "upper_left"
