"""Exact attention tile by tile: the inner loop of Algorithm 1 of FlashAttention-2, in its order.

For a block of query rows Q the keys and values are visited in tiles K, V. With m the running maximum of each row, l the
running sum and O the running output, a tile updates them to

    S  = rule(scale * Q K^T) + mask
    m' = max(m, rowmax S)
    P  = exp(S - m')
    l  = exp(m - m') l + rowsum P
    O  = exp(m - m') O + P V

and after the last tile out = O / l and lse = m + log l. Only one tile of S and P exists at a time.
The rule is the caller's own (``score_mod`` of FlexAttention), if there is one.
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023.) Scores are
counted in bits (multiplied by log2 e), because exp2 is several times faster than exp on a CPU.

**Bounded blocks** need no maximum. By Cauchy-Schwarz every score of a block obeys
|s| <= |scale| * log2(e) * max|q_i| * max|k_j| =: bits. With bits <= 60, 2^s lies in [2^-60, 2^60]: it neither overflows
nor underflows in float32. The sum of at most 2^31 of them stays below 2^91, and with |v| <= 2^(66 - log2 S) the sums in
O stay below 2^126. Softmax does not depend on the number subtracted from the scores, and floating-point numbers have
the same relative precision at every magnitude. So omitting the subtraction changes nothing but the rounding of s
itself, which both forms share. Only values below 1e-20 round to zero sooner.
Four operators a tile remain: product, exp2, sum, product. Keys that a row must not see are set to zero after exp2; a
row that sees none ends with l = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .masks import Rule
from .products import LN_2, LOG2_E, TileProducts


class Softmax:
    """The state of some query rows, in views that every tile updates in place: query ``[u, rows, D]``, row_sum (l)
    ``[u, rows, 1]`` and acc (O) ``[u, rows, Dv]``. Dropout is drawn by codes ``[u, rows]``, or None."""

    def __init__(self, tile: TileProducts, query: Tensor, acc: Tensor, row_sum: Tensor, code: Tensor | None):
        self.tile, self.query, self.acc, self.row_sum, self.code = tile, query, acc, row_sum, code

    def accumulate(self, probs: Tensor, value: Tensor, first_key: int, fresh: bool) -> None:
        """Add a tile's probabilities and their product with the values; ``fresh``: the first tile of these rows."""
        if fresh:
            torch.sum(probs, dim=-1, keepdim=True, out=self.row_sum)
        else:
            self.row_sum.add_(probs.sum(dim=-1, keepdim=True))
        if self.code is not None:  # dropout: l counts what it drops, O does not
            probs.mul_(self.tile.coins(probs.shape, self.code, first_key))
        value = self.tile.converted(value)
        if fresh:
            torch.bmm(probs, value, out=self.acc)
        else:
            torch.baddbmm(self.acc, probs, value, out=self.acc)

    def clear(self) -> None:
        """The state of rows that see no key."""
        self.acc.zero_()
        self.row_sum.zero_()

    def normalize(self) -> None:
        """out = O / l; zero for rows that see no key."""
        total = self.row_sum.masked_fill_(self.row_sum == 0, 1.0) if self.tile.rows_may_be_empty else self.row_sum
        if self.code is not None:
            total.mul_(self.tile.kept_share)
        self.acc.div_(total)

    def _rows(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        code = None if self.code is None else self.code[:, first:last]
        return self.query[:, first:last], self.acc[:, first:last], self.row_sum[:, first:last], code


class OnlineSoftmax(Softmax):
    """Any rows, under a running maximum row_max (m) ``[u, rows, 1]``."""

    def __init__(self, *state: object, row_max: Tensor):
        super().__init__(*state)  # type: ignore[arg-type]
        self.row_max = row_max

    def add(self, key: Tensor, value: Tensor, rule: Rule, first_key: int, fresh: bool) -> None:
        """Visit one tile of keys and values ``[u, keys, ...]``; ``fresh``: the first one of these rows."""
        tile = self.tile
        scores = tile.scores(self.query, key, tile.unit)
        tile.mask(scores, rule)
        new_max = scores.amax(dim=-1, keepdim=True)
        if not fresh:
            torch.maximum(new_max, self.row_max, out=new_max)
        # A row that has seen no key yet has the maximum -inf: subtracting a finite number instead keeps it there.
        shift = new_max.clamp_min(torch.finfo(tile.dtype).min) if tile.rows_may_be_empty else new_max
        probs = tile.exp_(scores.sub_(shift))
        if not fresh:
            self._rescale(shift)
        self.row_max.copy_(new_max)
        self.accumulate(probs, value, first_key, fresh)

    def _rescale(self, shift: Tensor) -> None:
        decay = self.tile.exp_(self.row_max.sub_(shift))
        self.row_sum.mul_(decay)
        self.acc.mul_(decay)

    def add_sinks(self, sinks: Tensor) -> None:
        """Count a further score of each row, ``[u, rows, 1]`` in natural units, in the denominator only."""
        sinks.mul_(self.tile.unit)
        shift = torch.maximum(self.row_max, sinks).clamp_min_(torch.finfo(self.tile.dtype).min)  # as in add
        self._rescale(shift)
        self.row_sum.add_(self.tile.exp_(sinks.sub_(shift)))
        self.row_max.copy_(shift)

    def lse(self, log_sum: Tensor) -> Tensor:
        """m + log l, written over log l."""
        return log_sum.add_(self.row_max, alpha=1.0 if self.tile.unit == 1.0 else LN_2)

    def clear(self) -> None:
        super().clear()
        self.row_max.fill_(-math.inf)

    def part(self, first: int, last: int) -> OnlineSoftmax:
        """The state of some of the rows."""
        return OnlineSoftmax(self.tile, *self._rows(first, last), row_max=self.row_max[:, first:last])


class BoundedSoftmax(Softmax):
    """Rows whose scores are known to lie within +-60 bits: no maximum."""

    def add(self, key: Tensor, value: Tensor, rule: Rule, first_key: int, fresh: bool) -> None:
        probs = self.tile.scores(self.query, key, LOG2_E).exp2_()
        self.tile.forbid(probs, rule, 0.0)
        self.accumulate(probs, value, first_key, fresh)

    def add_sinks(self, sinks: Tensor) -> None:
        self.row_sum.add_(sinks.mul_(LOG2_E).exp2_())

    def lse(self, log_sum: Tensor) -> Tensor:
        return log_sum

    def part(self, first: int, last: int) -> BoundedSoftmax:
        return BoundedSoftmax(self.tile, *self._rows(first, last))
