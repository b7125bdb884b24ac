"""Writing a mask into a tile of scores, in place and without a temporary of the tile's size.

On a CPU ``torch.where`` and ``masked_fill_`` with a bool mask run element by element, up to twenty times slower than
the exponentials beside them. There the mask is widened to words, a few rows at a time, and combined with the
bits of the scores as integers, which is exact for every value, NaN included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .device import CPU_LIKE
from .masks import Rule, band_keep
from .tiles import MASK_WORDS

_WORD = {torch.float32: torch.int32, torch.float64: torch.int64}
_NEG_INF_BITS = {torch.float32: 0xFF800000 - (1 << 32), torch.float64: 0xFFF0000000000000 - (1 << 64)}


class MaskWriter:
    """Writes zeros or -inf over the scores of one call that a :class:`Rule` forbids.

    Scores come as ``[u, rows, keys]`` with rows ordered by token, then by head of the group.
    """

    def __init__(self, groups: int, dtype: torch.dtype, device: torch.device, *, masked: bool, max_scores: int):
        """
        Args:
            masked: the call has a bool mask, or a band over several heads of a group; max_scores: of one tile.
        """
        self.groups, self.dtype, self.device = groups, dtype, device
        on_cpu = device.type in CPU_LIKE
        count = min(MASK_WORDS, max_scores) if masked and on_cpu else 0
        self.words = torch.empty(count, dtype=_WORD[dtype], device=device) if on_cpu else None
        self.fills = {value: torch.full((), value, dtype=dtype, device=device) for value in (0.0, -math.inf)}
        self._keep: tuple[tuple, Tensor] | None = None

    def forbid(self, scores: Tensor, rule: Rule, value: float) -> None:
        """Put ``value`` (0 or -inf) where the rule's band or bool mask forbids to look."""
        if rule.upper is not None or rule.lower is not None:
            self._forbid_band(scores, rule, value)
        if rule.mask is not None and rule.mask.dtype == torch.bool:
            self._write(scores, rule.mask.transpose(1, 2), value)

    def add(self, scores: Tensor, bias: Tensor, factor: float = 1.0) -> None:
        """Add a float mask ``[u, G, tokens, keys]`` times a factor."""
        self.by_token(scores).add_(bias.transpose(1, 2), alpha=factor)

    def by_token(self, scores: Tensor) -> Tensor:
        """``[u, rows, keys]`` as ``[u, tokens, G, keys]``."""
        return scores.view(scores.shape[0], scores.shape[1] // self.groups, self.groups, scores.shape[2])

    def _forbid_band(self, scores: Tensor, rule: Rule, value: float) -> None:
        if self.groups == 1 and self.words is not None and value == 0.0:
            if rule.upper is not None:
                scores.tril_(rule.upper)
            if rule.lower is not None:
                scores.triu_(rule.lower)
            return
        keep = self._band_keep(scores.shape[1] // self.groups, scores.shape[2], rule)
        self._write(scores, keep[None, :, None, :], value)

    def _band_keep(self, tokens: int, keys: int, rule: Rule) -> Tensor:
        """Tiles along a diagonal are alike: the last one is kept."""
        name = (tokens, keys, rule.upper, rule.lower)
        if self._keep is None or self._keep[0] != name:
            self._keep = None
            self._keep = (name, band_keep(tokens, keys, rule.upper, rule.lower, self.device))
        return self._keep[1]

    def _write(self, scores: Tensor, keep: Tensor, value: float) -> None:
        """``keep`` broadcasts to ``[u, tokens, G, keys]``."""
        by_token = self.by_token(scores)
        if self.words is None:
            torch.where(keep, by_token, self.fills[value], out=by_token)
            return
        bits, ones = by_token.view(_WORD[self.dtype]), keep.view(torch.uint8).expand(by_token.shape)
        units, tokens, groups, keys = bits.shape
        # As much at a time as the buffer holds: all units or one, some of their tokens, and of one token some keys.
        room = self.words.numel()
        together = units * groups * keys <= room
        spans = [slice(None)] if together else [slice(u, u + 1) for u in range(units)]
        step = max(1, room // ((units if together else 1) * groups * keys))
        key_step = keys if groups * keys <= room else max(1, room // groups)
        for span in spans:
            for first in range(0, tokens, step):
                for key in range(0, keys, key_step):
                    part = bits[span, first : first + step, :, key : key + key_step]
                    words = self.words[: part.numel()].view(part.shape)
                    words.copy_(ones[span, first : first + step, :, key : key + key_step])
                    part.mul_(words)  # the bits times one or zero
                    if value:
                        part.bitwise_or_(words.sub_(1).bitwise_and_(_NEG_INF_BITS[self.dtype]))
