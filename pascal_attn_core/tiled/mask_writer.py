"""Writing a mask into a tile of scores, in place and without a temporary of the tile's size.

On a CPU ``torch.where`` and ``masked_fill_`` with a bool mask run element by element, up to twenty times slower than
the exponentials beside them. There the mask is widened to words, a few rows at a time, and combined with the
bits of the scores as integers, which is exact for every value, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..call import distinct
from ..machine.device import CPU_LIKE
from .masks import Rule
from .tiles import MASK_WORDS

_WORD = {torch.float32: torch.int32, torch.float64: torch.int64}
_NEG_INF_BITS = {torch.float32: 0xFF800000 - (1 << 32), torch.float64: 0xFFF0000000000000 - (1 << 64)}


def rows_by_token(rows: Tensor, groups: int) -> Tensor:
    """``[u, rows, X]``, ordered by token, then by head of the group, as ``[u, tokens, G, X]``."""
    return rows.view(rows.shape[0], rows.shape[1] // groups, groups, rows.shape[2])


def _cut_to_band(tile: Tensor, rule: Rule) -> Tensor:
    """A tile with zeros outside the rule's band, in place."""
    if rule.upper is not None:
        tile.tril_(rule.upper)
    if rule.lower is not None:
        tile.triu_(rule.lower)
    return tile


class MaskWriter:
    """Writes zeros or -inf over the scores of one call that a :class:`Rule` forbids, at most ``max_scores`` at a time.
    They come as ``[u, rows, keys]`` with rows ordered by token, then by head of the group."""

    def __init__(self, groups: int, dtype: torch.dtype, device: torch.device, *, max_scores: int):
        self.groups, self.dtype, self.device = groups, dtype, device
        self.words = None
        if device.type in CPU_LIKE:
            self.words = torch.empty(min(MASK_WORDS, max_scores), dtype=_WORD[dtype], device=device)
        self.fills = {value: torch.full((), value, dtype=dtype, device=device) for value in (0.0, -math.inf)}
        self._keep: tuple[tuple, Tensor] | None = None

    def forbid(self, scores: Tensor, rule: Rule, value: float) -> None:
        """Put ``value`` (0 or -inf) where the rule's band or bool mask forbids to look."""
        if rule.upper is not None or rule.lower is not None:
            self._forbid_band(scores, rule, value)
        for part in rule.masks:
            if part.values.dtype == torch.bool:
                self._write(part.of(scores), part.values.transpose(1, 2), value)

    def add(self, scores: Tensor, rule: Rule) -> None:
        """Add the rule's float mask, of any float dtype."""
        for part in rule.masks:
            if part.values.dtype != torch.bool:
                self._add(part.of(scores), part.values.transpose(1, 2))

    def _add(self, scores: Tensor, bias: Tensor) -> None:
        """``bias``: ``[u, tokens, G, keys]``."""
        by_token = rows_by_token(scores, self.groups)
        if self.words is None or bias.dtype == self.dtype:
            by_token.add_(bias)
            return
        for part, values in self._parts(by_token, bias, self.words.view(self.dtype)):
            part.add_(values)

    def _forbid_band(self, scores: Tensor, rule: Rule, value: float) -> None:
        if self.groups == 1 and self.words is not None and value == 0.0:
            _cut_to_band(scores, rule)
            return
        keep = self._band_keep(scores.shape[1] // self.groups, scores.shape[2], rule)
        self._write(scores, keep[None, :, None, :], value)

    def _band_keep(self, tokens: int, keys: int, rule: Rule) -> Tensor:
        """Tiles along a diagonal are alike: the last one is kept."""
        name = (tokens, keys, rule.upper, rule.lower)
        if self._keep is None or self._keep[0] != name:
            self._keep = None
            keep = torch.ones(tokens, keys, dtype=torch.bool, device=self.device)
            self._keep = (name, _cut_to_band(keep, rule))
        return self._keep[1]

    def _write(self, scores: Tensor, keep: Tensor, value: float) -> None:
        """``keep`` broadcasts to ``[u, tokens, G, keys]``."""
        by_token = rows_by_token(scores, self.groups)
        if self.words is None:
            torch.where(keep, by_token, self.fills[value], out=by_token)
            return
        # The bits times one or zero: copied from bool, since a True that came by view() may be any byte but 0.
        for part, words in self._parts(by_token.view(_WORD[self.dtype]), keep, self.words):
            part.mul_(words)
            if value:
                part.bitwise_or_(words.sub_(1).bitwise_and_(_NEG_INF_BITS[self.dtype]))

    def _parts(self, tile: Tensor, values: Tensor, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of ``[u, tokens, G, keys]``, each with its part of the values that broadcast to it, copied into the
        buffer: all of them where that has room, or all units or one, some of their tokens, and where one token is too
        long some of its keys."""
        own = distinct(values)
        if own.numel() <= buffer.numel():
            yield tile, buffer[: own.numel()].view(own.shape).copy_(own)
            return
        units, tokens, groups, keys = tile.shape
        room, values = buffer.numel(), values.expand(tile.shape)
        together = units * groups * keys <= room
        spans = [slice(0, units)] if together else [slice(u, u + 1) for u in range(units)]
        step = max(1, room // ((units if together else 1) * groups * keys))
        key_step = keys if groups * keys <= room else max(1, room // groups)
        for span in spans:
            for token in (slice(t, t + step) for t in range(0, tokens, step)):
                for key in (slice(j, j + key_step) for j in range(0, keys, key_step)):
                    own = distinct(values[span, token, :, key])
                    yield tile[span, token, :, key], buffer[: own.numel()].view(own.shape).copy_(own)
