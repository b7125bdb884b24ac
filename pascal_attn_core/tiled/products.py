"""The buffers of one call and what is done with one tile of it, as the forward and the backward pass share it; and the
bound on the scores under which :mod:`.softmax` needs no running maximum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..call import AttentionCall
from ..machine.device import CPU_LIKE
from .dropout import BYTES_PER_SCORE, block_row_codes, draw_coins, key_codes
from .layout import Units
from .mask_writer import MaskWriter, rows_by_token
from .masks import Rule
from .plan import Walk
from .tiles import Ranges

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

BOUNDED_BITS = 60.0
# 2^60 * 2^log2(S) * |v| must stay below the largest number of the sums' dtype, 2^127 or 2^1023.
_VALUE_BITS = {torch.float32: 66.0, torch.float64: 960.0}


class TileProducts:
    """Query heads that share a key/value head are rows of the same product, so K and V are never expanded. Rows are
    ordered by token, then by head of the group: a range of tokens is a range of rows.

    Attributes:
        unit: what scores are multiplied by: log2(e), so that exp2 serves; 1 under a float mask, whose values may be as
            low as -finfo.max, which log2(e) would push to -inf.
        rows_may_be_empty: a row may see no key.
        kept_share: of the probabilities, by dropout; inf where none is kept, so that dividing by it gives zero.
        masks: writes masks and bands over scores; None where there are none.
    """

    def __init__(self, call: AttentionCall, walk: Walk, seed: Tensor | None, *, for_backward: bool = False):
        self.dtype, self.device, self.groups = walk.dtype, call.query.device, walk.groups
        self.scale, self.dropout_p, self.seed = call.scale, call.dropout_p, seed
        self.kept_share = 1.0 - call.dropout_p if call.dropout_p < 1 else math.inf
        self.unit = 1.0 if walk.has_bias else LOG2_E
        # Where probabilities may be many subnormal numbers; a float mask would pay for a pass that it seldom needs.
        self.least_bits = None if call.score_rule is None else math.log2(torch.finfo(self.dtype).tiny)
        self.softcap, self.sinks = call.softcap, call.sinks
        self.rows_may_be_empty = walk.is_masked
        self.copies_query, self.copies_kv, self.copies_out = walk.copies_query, walk.copies_kv, walk.copies_out
        tiles = walk.tiles
        rows, keys = tiles.units * tiles.q_block * walk.groups, tiles.units * tiles.kv_block
        self.keys_at_once = tiles.kv_block
        self.score_buffer, self.zero = self.buffer(rows * tiles.kv_block), self.buffer(1).zero_()
        self.query_buffer = self.buffer(rows * call.head_dim if self.copies_query else 0)
        self.acc_buffer = self.buffer(rows * call.head_dim_v if self.copies_out and not for_backward else 0)
        widest = call.head_dim if for_backward else max(call.head_dim, call.head_dim_v)
        self.kv_buffer = self.buffer(keys * widest if self.copies_kv else 0)
        self.scratch = self.buffer(rows * tiles.kv_block * BYTES_PER_SCORE if call.dropout_p else 0, torch.uint8)
        self.masks: MaskWriter | None = None
        if walk.is_masked and (call.attn_mask is not None or call.has_band):
            self.masks = MaskWriter(walk.groups, self.dtype, self.device, max_scores=rows * tiles.kv_block)

    def buffer(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """``size`` uninitialised elements, of the sums' dtype by default."""
        return torch.empty(size, dtype=dtype or self.dtype, device=self.device)

    # ---- scores ------------------------------------------------------------------------------------------------------

    def scores(self, query: Tensor, key: Tensor, unit: float) -> Tensor:
        """Scaled and capped scores ``[u, rows, keys]`` in the given unit. The cap makes no score larger, so a bound for
        the score holds for it."""
        if self.softcap is None:
            return self.product(query, self.converted(key), self.scale * unit)
        return self.tanh(query, self.converted(key)).mul_(self.softcap * unit)

    def tanh(self, query: Tensor, key: Tensor) -> Tensor:
        """tanh(scores / softcap)."""
        assert self.softcap is not None
        return self.product(query, key, self.scale / self.softcap).tanh_()

    def product(self, query: Tensor, key: Tensor, factor: float, start: Tensor | None = None) -> Tensor:
        """query @ key^T * factor in the score buffer, ``[u, rows, keys]``; added to ``start`` ``[u, rows, 1]``."""
        shape = (query.shape[0], query.shape[1], key.shape[1])
        scores = self.score_buffer[: math.prod(shape)].view(shape)
        return self.product_into(scores, query, key, factor, start)

    def product_into(self, out: Tensor, left: Tensor, right: Tensor, factor: float, start: Tensor | None) -> Tensor:
        """left @ right^T * factor in ``out``; added to ``start``, which may be ``out`` itself."""
        if start is not None:
            return torch.baddbmm(start, left, right.transpose(1, 2), alpha=factor, out=out)
        if not factor:  # torch 2.4 on ARM writes nothing then
            return out.zero_()
        # Not the buffer itself: before torch 2.14 MPS multiplies the input by beta, and 0 * NaN is NaN.
        return torch.baddbmm(self.zero, left, right.transpose(1, 2), beta=0, alpha=factor, out=out)

    def mask(self, scores: Tensor, rule: Rule) -> None:
        """Change the scores as the tile's rule says; -inf where it forbids a key."""
        self.change(scores, rule)
        self.forbid(scores, rule, -math.inf)

    def change(self, scores: Tensor, rule: Rule) -> None:
        """Apply the tile's score rule to the scores and add its float mask, where it has them."""
        if rule.score is not None:
            self.by_head(scores).copy_(rule.score(rows_by_token(scores, self.groups)))
        if self.masks is not None:
            self.masks.add(scores, rule)

    def forbid(self, scores: Tensor, rule: Rule, value: float) -> None:
        """Put ``value`` (0 or -inf) where the tile's rule forbids a key."""
        if self.masks is not None:
            self.masks.forbid(scores, rule, value)

    def exp_(self, scores: Tensor) -> Tensor:
        """e to the scores, in place, whichever unit they are in."""
        return self.exp2_(scores.mul_(LOG2_E)) if self.unit == 1.0 else scores.exp2_()

    def exp2_(self, scores: Tensor) -> Tensor:
        """2 to the scores, in place. Under a score rule zero instead of subnormal numbers: a bias by distance (ALiBi)
        makes many of them, and products with them take several times as long on a CPU."""
        if self.least_bits is not None:
            torch.threshold_(scores, self.least_bits, -math.inf)
        return scores.exp2_()

    # ---- layout ------------------------------------------------------------------------------------------------------

    def converted(self, part: Tensor) -> Tensor:
        """A slice of key or value as the products take it: in the dtype of the sums, rows contiguous."""
        return self.kv_buffer[: part.numel()].view(part.shape).copy_(part) if self.copies_kv else part

    def by_head(self, rows: Tensor) -> Tensor:
        """``[u, rows, X]`` as ``[u, G, tokens, X]``, the shape of an output's block."""
        return rows_by_token(rows, self.groups).transpose(1, 2)

    def rows(self, part: Tensor, buffer: Tensor) -> Tensor:
        """``[u, G, tokens, X]`` as rows ``[u, tokens * G, X]`` ordered by token, then by head: a view, or a copy in the
        buffer where blocks of the query are copied."""
        if not self.copies_query:
            return part[:, 0] if self.groups == 1 else part[:, :, 0]
        tokens_first = part.transpose(1, 2)
        copied = buffer[: part.numel()].view(tokens_first.shape).copy_(tokens_first)
        return copied.view(part.shape[0], part.shape[1] * part.shape[2], part.shape[3])

    def block_acc(self, out: Tensor) -> Tensor:
        """Where the sums of a block are made: in the output itself ``[u, G, tokens, Dv]`` where that is possible."""
        if not self.copies_out:
            return out[:, 0] if self.groups == 1 else out[:, :, 0]
        return self.acc_buffer[: out.numel()].view(out.shape[0], out.shape[1] * out.shape[2], out.shape[3])

    # ---- the bound ---------------------------------------------------------------------------------------------------

    def query_limits(self, units: Units, spans: Ranges, key_ranges: Ranges) -> list[float]:
        """Per span of units: the largest |query row| for which every |score| is at most BOUNDED_BITS and no sum of
        2^score * value can overflow. 0 = no row qualifies; inf = all of its rows do.

        Args:
            key_ranges: per span, the keys that any query may look at.
        On a GPU, where each look at a value waits for the device, the queries themselves are included and the answer is
        inf or 0, from one look for all spans.
        """
        on_gpu = self.device.type not in CPU_LIKE
        bits = []
        for (u0, u1), (j0, j1) in zip(spans, key_ranges):
            if j1 <= j0:
                bits.append(torch.zeros((), dtype=self.dtype, device=self.device))
                continue
            most = self._key_norm(units.key[u0:u1, j0:j1]) * abs(self.scale * LOG2_E)
            if on_gpu:
                query = units.query[u0:u1].flatten(0, 1)
                most = most * torch.linalg.vector_norm(query, dim=-1, dtype=self.dtype).amax()
            bits.append(torch.where(_values_fit(units.value[u0:u1, j0:j1], self.dtype), most, math.inf))
        if on_gpu:
            return [math.inf if b <= BOUNDED_BITS else 0.0 for b in torch.stack(bits).tolist()]
        return [BOUNDED_BITS / b if b > 0 else math.inf if b == 0 else 0.0 for b in map(float, bits)]

    def is_bounded(self, query: Tensor, limit: float) -> bool:
        """Whether all rows ``[u, rows, D]`` are within a limit of :meth:`query_limits`."""
        return limit == math.inf or (limit > 0 and float(_max_norm(query)) <= limit)

    def _key_norm(self, keys: Tensor) -> Tensor:
        norms = [
            _max_norm(self.converted(keys[:, first : first + self.keys_at_once]))
            for first in range(0, keys.shape[1], self.keys_at_once)
        ]
        return norms[0] if len(norms) == 1 else torch.stack(norms).amax()

    # ---- sinks and dropout -------------------------------------------------------------------------------------------

    def sink_rows(self, first_unit: int, shape: torch.Size) -> Tensor | None:
        """The sinks of a block's rows in natural units, ``[u, rows, 1]``; None without sinks."""
        if self.sinks is None:
            return None
        heads = self.sinks.detach().to(self.dtype).view(-1, self.groups)
        units = torch.arange(first_unit, first_unit + shape[0], device=heads.device) % heads.shape[0]
        return heads[units].repeat(1, shape[1] // self.groups)[..., None]

    def row_codes(self, first_unit: int, query: Tensor, seq_len_q: int, q0: int) -> Tensor | None:
        """Dropout codes of a block's rows, None without dropout."""
        if self.seed is None:
            return None
        return block_row_codes(self.seed, first_unit, query.shape, self.groups, seq_len_q, q0)

    def coins(self, shape: torch.Size, row_code: Tensor, first_key: int) -> Tensor:
        """Dropout's zeros and ones for a tile; valid until the next tile."""
        assert self.seed is not None
        keys = key_codes(self.seed, first_key, first_key + shape[2])
        return draw_coins(shape, row_code, keys, self.dropout_p, self.scratch)


def _max_norm(rows: Tensor) -> Tensor:
    """Largest Euclidean norm among the rows of ``[..., N, D]``: a 0-dim tensor, not finite if some value is not."""
    return torch.linalg.vector_norm(rows, dim=-1).amax()


def _values_fit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether no sum of 2^score * value can overflow: a 0-dim bool tensor."""
    if value.dtype == torch.float16 or not value.numel():  # at most 65504 = 2^16
        return torch.ones((), dtype=torch.bool, device=value.device)
    limit = 2.0 ** (_VALUE_BITS[dtype] - math.log2(max(2, value.shape[1])))
    low, high = torch.aminmax(value)
    return (low >= -limit) & (high <= limit)
