"""Attention of a lazy query: its rows in bands; key and value are read in parts where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention import sdpa, sdpa_with_lse
from ..config import default_config
from ..machine.device import MIB
from .lazy import Lazy, Want

_LEAST_MIB = 1 / 16


class Attention(Lazy):
    """``[*batch, H, L, D]``, ``[*batch, Hkv, S, D]``, ``[*batch, Hkv, S, Dv]`` -> ``[*batch, H, L, Dv]``.

    Args:
        options: further arguments of :func:`sdpa`.
        limit: bytes of key and value that are read at once, and bytes for what is computed from them.
    """

    is_heavy = True

    def __init__(self, query: Lazy, key: Lazy, value: Lazy, mask: Tensor | None, options: dict[str, Any], limit: int):
        super().__init__(query.like.new_empty((*query.shape[:-1], value.shape[-1])), (query, key, value))
        self.mask, self.limit = mask, limit
        config = options.pop("config", None) or default_config()
        least = limit / MIB if config.budget_mib is None else min(config.budget_mib, limit / MIB)
        self.options = {**options, "config": replace(config, budget_mib=max(least, _LEAST_MIB))}
        rows = key.size(key.like.dim() - 2)
        per_row = (key.nbytes + value.nbytes) // max(rows, 1)
        is_plain = not options.get("is_causal") and options.get("window") is None and mask is None
        self.keys = min(rows, max(256, limit // max(per_row, 1))) if is_plain else rows

    def own_granule(self, dim: int) -> int:
        query, key, value = self.inputs
        rank = self.like.dim()
        if dim == rank - 2:
            return query.granule(dim) if not self.options.get("is_causal") and not self.options.get("window") else 0
        same = rank == key.like.dim() and dim < rank - 3 and key.size(dim) == value.size(dim) == self.size(dim)
        return 1 if same and self.mask is None and query.granule(dim) == 1 else 0

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        query, *others = self.inputs
        is_whole = self.is_whole(dim, low, high)
        of_query = query.whole() if is_whole else Want(query, dim, low, high)
        if not is_whole and dim < self.like.dim() - 3:
            return [of_query, *(Want(node, dim, low, high) for node in others)]
        return [of_query, *(Want(node, node.like.dim() - 2, 0, self.keys) for node in others)]

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        query, key, value = pieces
        _, keys, values = self.inputs
        mask, row = self.mask, self.like.dim() - 2
        if mask is not None and dim == row and not self.is_whole(dim, low, high) and mask.shape[-2] > 1:
            mask = mask.narrow(-2, low, high - low)
        rows = keys.size(keys.like.dim() - 2)
        if key.shape[-2] == rows:
            return sdpa(query, key, value, mask, **self.options)
        out, lse = sdpa_with_lse(query, key, value, **self.options)
        for start in range(self.keys, rows, self.keys):
            del key, value
            stop = min(start + self.keys, rows)
            key, value = (node.read(node.like.dim() - 2, start, stop, {}) for node in (keys, values))
            more, more_lse = sdpa_with_lse(query, key, value, **self.options)
            both = torch.logaddexp(lse, more_lse)
            out = out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1)
            lse = both
        return out.to(self.like.dtype)

    def scratch(self, given: int, made: int) -> int:
        scores = made // max(self.like.shape[-1], 1) * self.keys
        return 2 * made + min(self.limit, 3 * scores)
