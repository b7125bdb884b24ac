"""Packing of padded batches: ``flash_attn.bert_padding``."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """``tensor[indices]`` along the first dimension: ``[N, ...]`` and whole numbers ``[M]`` -> ``[M, ...]``."""
    return tensor.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``values [M, ...]`` at the rows ``indices [M]`` of zeros ``[first_axis_dim, ...]``."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that take part, concatenated.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask: ``[B, S]``, 1 or True = takes part; unused_mask likewise = has a place, but takes no part.
    Returns:
        (tokens ``[total, ...]``; indices int64 ``[total]``, their places in ``[B * S]``; cu_seqlens int32 ``[B + 1]``;
        the longest length; int32 ``[B]``, how many of each sequence take part).
    """
    takes_place = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = takes_place.sum(dim=-1, dtype=torch.int32)
    indices = takes_place.flatten().nonzero()[:, 0]
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    taking_part = attention_mask.sum(dim=-1, dtype=torch.int32)
    return tokens, indices, ends, max(lengths.tolist(), default=0), taking_part


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: ``[total, ...]`` and its indices -> ``[batch, seqlen, ...]``, else zeros."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
