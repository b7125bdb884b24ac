"""Sequences of different lengths in one tensor, never padded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ..call import Arguments, accumulate_dtype, prepared
from .options import PACKED, FlashArgumentError, FlashOptions, attend, check_layout, check_whole_numbers
from .packed import packed_attend

_Result = tuple[Tensor, Tensor | None]


class _Run(NamedTuple):
    """Neighbouring sequences ``first ... last - 1`` of the same lengths, computed as one batch."""

    first: int
    last: int
    q_len: int
    k_len: int

    @property
    def size(self) -> int:
        return self.last - self.first


def varlen_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: FlashOptions,
    *,
    with_lse: bool,
) -> _Result:
    """Attention within each sequence.

    Args:
        q: ``[total_q, Hq, D]``; k ``[total_k, Hkv, D]``; v ``[total_k, Hkv, Dv]``.
        cu_seqlens_q, cu_seqlens_k: whole numbers ``[B + 1]``, read once (one synchronisation on a GPU).
    Returns:
        (out ``[total_q, Hq, Dv]``, zero after the last sequence; lse ``[Hq, total_q]`` or None).
    """
    check_layout(PACKED, q=q, k=k, v=v)
    q_ends, k_ends = read_lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    lengths = [(q1 - q0, k1 - k0) for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:])]
    options.check_slopes(len(lengths), q.shape[1])
    runs = [_Run(first, last, *lengths[first]) for first, last in neighbours(lengths)]
    if sum(run.q_len > 0 for run in runs) > 1:
        result = packed_attend(q, k, v, q_ends, k_ends, options, with_lse=with_lse)
        if result is not None:
            return result
    q, k, v, *_ = prepared(Arguments(q, k, v))
    pieces = _attend_runs(runs, q, k, v, options, with_lse=with_lse)
    if len(runs) == 1 and runs[0].size * runs[0].q_len == q.shape[0] > 0:
        return next(pieces)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return _concatenated(list(pieces), q, v.shape[-1], with_lse)
    return _written(pieces, q, v.shape[-1], with_lse)


def _attend_runs(
    runs: list[_Run], q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, *, with_lse: bool
) -> Iterator[_Result]:
    """(out ``[tokens, Hq, Dv]``, lse ``[Hq, tokens]`` or None) of each run that has queries."""
    queries = _split(q, [run.size * run.q_len for run in runs])
    keys, values = (_split(t, [run.size * run.k_len for run in runs]) for t in (k, v))
    for run, *tensors in zip(runs, queries, keys, values):
        if run.q_len:
            query, key, value = (rearrange(t, "(b n) h d -> b n h d", b=run.size) for t in tensors)
            out, lse = attend(query, key, value, options.part(run.first, run.last), with_lse=with_lse)
            yield rearrange(out, "b n h d -> (b n) h d"), None if lse is None else rearrange(lse, "b h n -> h (b n)")


def _concatenated(pieces: list[_Result], q: Tensor, head_dim_v: int, with_lse: bool) -> _Result:
    """The pieces concatenated, followed by zeros (lse: -inf) up to ``total_q``; gradients flow."""
    rest = q.shape[0] - sum(out.shape[0] for out, _ in pieces)
    out = torch.cat([*(out for out, _ in pieces), q.new_zeros(rest, q.shape[1], head_dim_v)])
    if not with_lse:
        return out, None
    return out, torch.cat([*(lse for _, lse in pieces if lse is not None), _without_keys(q, rest)], dim=1)


def _written(pieces: Iterator[_Result], q: Tensor, head_dim_v: int, with_lse: bool) -> _Result:
    """The result of :func:`_concatenated` with never two copies of the output at once; for calls without gradients."""
    out, start = q.new_zeros(q.shape[0], q.shape[1], head_dim_v), 0
    lse = _without_keys(q, q.shape[0]) if with_lse else None
    for part, part_lse in pieces:
        end = start + part.shape[0]
        out[start:end] = part
        if lse is not None and part_lse is not None:
            lse[:, start:end] = part_lse
        start = end
    return out, lse


def _without_keys(q: Tensor, tokens: int) -> Tensor:
    """lse of tokens without keys, ``[Hq, tokens]``."""
    return q.new_full((q.shape[1], tokens), -torch.inf, dtype=accumulate_dtype(q.dtype))


def _split(tensor: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    # one split, not several slices: each slice's gradient would be a tensor as large as all of them
    return tensor.split([*sizes, tensor.shape[0] - sum(sizes)])[: len(sizes)]


def neighbours(lengths: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(first, one past the last) of neighbouring sequences of the same lengths, which are computed as one batch."""
    for _, group in itertools.groupby(range(len(lengths)), lambda i: lengths[i]):
        members = list(group)
        yield members[0], members[-1] + 1


def read_lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> tuple[list[int], list[int]]:
    """Where each sequence of queries and of keys starts, and the last ends; checked against the tokens there are."""
    check_whole_numbers(("B + 1",), cu_seqlens_q=cu_seqlens_q)
    check_whole_numbers(cu_seqlens_q.shape, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_q is cu_seqlens_k:
        q_ends = k_ends = cu_seqlens_q.tolist()
    else:
        q_ends, k_ends = torch.stack([cu_seqlens_q.long(), cu_seqlens_k.to(cu_seqlens_q.device).long()]).tolist()
    for name, ends, total in (("cu_seqlens_q", q_ends, total_q), ("cu_seqlens_k", k_ends, total_k)):
        shown = ends if len(ends) <= 16 else [*ends[:8], "...", *ends[-8:]]
        if ends[:1] != [0] or sorted(ends) != ends:
            raise FlashArgumentError(f"{name} must start at 0 and never decrease, got {shown}")
        if ends[-1] > total:
            raise FlashArgumentError(f"{name} must end within the {total} tokens, got {shown}")
    return q_ends, k_ends


def padded_lse(lse: Tensor, ends: list[int], longest: int) -> Tensor:
    """``lse [H, total]`` as ``[B, H, longest]``, zero after the end of each sequence."""
    sizes = [last - first for first, last in itertools.pairwise(ends)]
    if max(sizes, default=0) > longest:
        raise FlashArgumentError(f"max_seqlen_q must be at least {max(sizes)}, got {longest}")
    parts = lse[:, : ends[-1]].split(sizes, 1)
    return torch.stack([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])
