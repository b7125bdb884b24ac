"""Packing of padded batches: ``flash_attn.bert_padding``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..options import check_whole_numbers


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """``tensor[indices]`` along the first dimension: ``[N, ...]`` and whole numbers ``[M]`` -> ``[M, ...]``."""
    return tensor.index_select(0, indices)


def index_first_axis_residual(tensor: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(:func:`index_first_axis`, tensor): gradients of both are added."""
    return index_first_axis(tensor, indices), tensor.view_as(tensor)


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
    return *_packed(hidden_states, takes_place, lengths), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """:func:`unpad_input` for rows that hold several concatenated sequences.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask_in_length: whole numbers ``[B, S]``: the lengths of the sequences of each row, in order, zeros
            between or after them. ``[[2, 3, 0, 0, 0, 0]]``: tokens 0 and 1, then 2 to 4; token 5 takes no part.
    Returns:
        (tokens ``[total, ...]``; indices int64 ``[total]``; cu_seqlens int32 ``[sequences + 1]``; the longest length).
    """
    check_whole_numbers(("B", "S"), attention_mask_in_length=attention_mask_in_length)
    filled = attention_mask_in_length.sum(dim=-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[1], device=filled.device)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _packed(hidden_states, places < filled, lengths)


def _packed(hidden_states: Tensor, takes_place: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = takes_place.flatten().nonzero()[:, 0]
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, ends, max(lengths.tolist(), default=0)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: ``[total, ...]`` and its indices -> ``[batch, seqlen, ...]``, else zeros."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
