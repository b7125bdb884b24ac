"""Decoding with a cache of keys and values that is written in place: flash-attn's ``flash_attn_with_kvcache``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .modules.rotary import apply_rotary
from .options import TOKENS, FlashArgumentError, FlashOptions, attend, check_layout, check_whole_numbers
from .varlen import neighbours

_CAPACITY = "(tokens of k_cache)"


@dataclass(frozen=True, eq=False)
class KvCache:
    """The places of the keys of each sequence of a batch.

    Attributes:
        k, v: ``[B, tokens, Hkv, D]``.
        lengths: tokens of each sequence before the new ones.
    """

    k: Tensor
    v: Tensor
    lengths: list[int]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.k.shape[1]

    def groups(self) -> Iterator[tuple[int, int]]:
        """Neighbouring sequences that form one batch in the cache: (first, one past the last)."""
        return neighbours(self.lengths)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Append the new tokens ``[B, N, Hkv, D]`` to those that are there."""
        for first, last in self.groups():
            start, tokens = self.lengths[first], k.shape[1]
            for cache, new in ((self.k, k), (self.v, v)):
                cache[first:last, start : start + tokens] = new[first:last]

    def keys(self, first: int, last: int, new: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences, views ``[b, S, Hkv, D]``."""
        end = self.lengths[first] + new
        return self.k[first:last, :end], self.v[first:last, :end]


def cache_of(k_cache: Tensor, v_cache: Tensor, batch: int, cache_seqlens: int | Tensor | None) -> KvCache:
    """The cache of a batch, its arguments checked and its tensor of lengths read once."""
    check_layout((batch, *TOKENS[1:]), k_cache=k_cache)
    check_layout((*k_cache.shape[:3], "head_dim"), v_cache=v_cache)
    cache = KvCache(k_cache, v_cache, [])
    if isinstance(cache_seqlens, Tensor):
        check_whole_numbers((batch,), cache_seqlens=cache_seqlens)
        cache.lengths.extend(cache_seqlens.tolist())
    else:
        cache.lengths.extend([cache.capacity if cache_seqlens is None else cache_seqlens] * batch)
    if any(not 0 <= length <= cache.capacity for length in cache.lengths):
        raise FlashArgumentError(f"cache_seqlens must be from 0 to {cache.capacity} {_CAPACITY}, got {cache.lengths}")
    return cache


def check_new_tokens(cache: KvCache, q: Tensor, k: Tensor | None, v: Tensor | None) -> int:
    """The number of new tokens; raises TypeError or ValueError where k and v do not fit into the cache."""
    if k is None and v is None:
        return 0
    check_layout(TOKENS, k=k, v=v)
    assert k is not None
    assert v is not None
    tokens = k.shape[1]
    for name, new, old in (("k", k, cache.k), ("v", v, cache.v)):
        check_layout((q.shape[0], tokens, *old.shape[2:]), **{name: new})
        if new.dtype != old.dtype:
            raise FlashArgumentError(f"{name} must be {old.dtype} like its cache, got {new.dtype}")
    if max(cache.lengths, default=0) + tokens > cache.capacity:
        raise FlashArgumentError(
            f"the cache must have room for {tokens} new tokens after {cache.lengths}, got {cache.capacity} {_CAPACITY}"
        )
    return tokens


def cached_attend(
    q: Tensor, cache: KvCache, new: int, options: FlashOptions, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of ``q [B, L, Hq, D]`` over its cache: (out ``[B, L, Hq, Dv]``, lse ``[B, Hq, L]`` or None)."""
    parts = [
        attend(q[first:last], *cache.keys(first, last, new), options.part(first, last), with_lse=with_lse)
        for first, last in cache.groups()
    ]
    if not parts:
        raise FlashArgumentError(f"q must hold at least one sequence, got shape {tuple(q.shape)}")
    if len(parts) == 1:
        return parts[0]
    outs, all_lse = zip(*parts)
    return torch.cat(outs), torch.cat(all_lse) if with_lse else None


def rotated(x: Tensor, cos: Tensor, sin: Tensor | None, cache: KvCache, *, interleaved: bool, in_turn: bool) -> Tensor:
    """``[B, N, H, D]`` rotated by the positions after those in the cache: one after the other if ``in_turn``, otherwise
    all by the first."""
    check_layout(("tokens", "rotary_dim / 2"), rotary_cos=cos, rotary_sin=sin)
    assert sin is not None
    last = max(cache.lengths) + (x.shape[1] if in_turn else 1)
    if last > cos.shape[0]:
        raise FlashArgumentError(f"rotary_cos must have {last} tokens, got {cos.shape[0]}")
    offsets = torch.tensor(cache.lengths, device=x.device)
    tokens = x if in_turn else x.flatten(1, 2)[:, None]  # as heads of one token
    return apply_rotary(tokens, cos, sin, offsets, interleaved=interleaved).view_as(x)
