"""THE HEART: exact attention, tile by tile, with online softmax.

For a block of query rows the keys are visited in tiles. With s the scores of a tile in bits (times log2 e, so that
exp2 serves, which is several times faster than exp on a CPU):

    new_max = max(row_max, max_j s)               the running maximum
    probs   = 2^(s - new_max)
    row_sum = row_sum * 2^(row_max - new_max) + sum_j probs
    acc     = acc     * 2^(row_max - new_max) + probs @ V
    out = acc / row_sum,  lse = (row_max + log2 row_sum) * ln 2

(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.)

**Bounded blocks** need no maximum at all. By Cauchy-Schwarz every score of a block obeys
|s| <= |scale| * log2(e) * max|q_i| * max|k_j| =: bits. With bits <= 60, 2^s lies in [2^-60, 2^60]: it neither
overflows nor underflows in float32, the sum of at most 2^31 of them stays below 2^91, and with |v| <= 2^(66 - log2 S)
the sums in acc stay below 2^126. Softmax does not depend on the number subtracted from the scores, and floating-point
numbers have the same relative precision at every magnitude, so leaving the subtraction out changes nothing but the
rounding of s itself, which both forms share (values so small that 2^-60 times them underflows, below 1e-20, round to
zero sooner). Four operators a tile remain: product, exp2, sum, product. Keys that a
row may not see are set to zero after exp2; a row that sees none ends with row_sum = 0.

Query heads that share a key/value head are rows of the same product, so K and V are never expanded. Rows are ordered
by token, then by head of the group: a range of tokens is a range of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Results, TiledStats, accumulate_dtype, empty_output
from ..observe.progress import current_checkpoint
from .bounds import BOUNDED_BITS, max_norm, query_limits
from .dropout import BYTES_PER_SCORE, block_row_codes, draw_coins, key_codes
from .layout import Units, copies, unit_views
from .mask_writer import MaskWriter
from .masks import Band, Rule, Rules, padding_as_bool
from .schedule import block_schedule, has_bias, lazy_tiles, unit_spans
from .tiles import TilePlan, even_ranges

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -math.inf
_MIN_BOUNDED_ROWS = 64  # with fewer rows the norms of K cost as much as its product with them


@dataclass(slots=True)
class _Rows:
    """Running state of some query rows, views ``[u, rows, ...]`` that every tile updates in place."""

    query: Tensor
    acc: Tensor
    row_sum: Tensor
    row_max: Tensor | None
    code: Tensor | None

    def part(self, first: int, last: int) -> _Rows:
        row_max, code = (None if t is None else t[:, first:last] for t in (self.row_max, self.code))
        return _Rows(self.query[:, first:last], self.acc[:, first:last], self.row_sum[:, first:last], row_max, code)

    def clear(self) -> None:
        """The state of rows that see no key."""
        self.acc.zero_()
        self.row_sum.zero_()
        if self.row_max is not None:
            self.row_max.fill_(NEG_INF)


@torch.no_grad()
def tiled_forward(
    call: AttentionCall,
    plan: TilePlan,
    *,
    with_lse: bool = False,
    for_grad: bool = False,
    softmax: str = "auto",
    readable: bool = True,
    trim_masks: bool = True,
    seed: Tensor | None = None,
    stats: TiledStats | None = None,
) -> Results:
    """Attention of a checked call in tiles of the given shape.

    Args:
        plan: from :func:`pascal_attn_core.tiled.tiles.plan_tiles` for this call; its ``extra_bytes`` are kept.
        with_lse: also return the natural logarithm of the softmax's denominator.
        for_grad: return what the gradients need: lse, and log_sum where there is a float mask.
        softmax: "auto", or "online" for no bounded blocks.
        readable: values may be read by the host (norms for the bound, masks): not while a CUDA graph is captured, not
            on the meta device.
        trim_masks: leave out keys and tiles that the mask leaves to nobody.
        seed: int64 ``[1]`` from :func:`pascal_attn_core.tiled.dropout.draw_seed`, needed when ``call.dropout_p > 0``.
    """
    out = empty_output(call)
    acc_dtype = accumulate_dtype(out.dtype)
    lse = out.new_empty(out.shape[:-1], dtype=acc_dtype) if with_lse or for_grad else None
    log_sum = out.new_empty(out.shape[:-1], dtype=acc_dtype) if for_grad and has_bias(call) else None
    if call.num_scores == 0 or (call.is_empty and lse is None):  # without head_dim_v there still is an lse
        out.zero_()
        for rows in (lse, log_sum):
            if rows is not None:
                rows.fill_(NEG_INF)
        if lse is not None and call.sinks is not None:
            lse.copy_(call.sinks[:, None] if lse.dim() > 1 else call.sinks)
        return Results(out, lse, log_sum, seed)
    may_bound = readable and softmax == "auto" and call.seq_len_q * call.groups >= _MIN_BOUNDED_ROWS
    if may_bound and call.sinks is not None:
        may_bound = float(call.sinks.detach().abs().amax()) * LOG2_E <= BOUNDED_BITS
    look = readable and trim_masks and plan.scans_mask
    groups = [
        _Group.of(units, call, plan, look, may_bound) for units in unit_views(call, per_query=(out, lse, log_sum))
    ]
    tile_math = TileMath(call, plan, seed)
    stats = TiledStats() if stats is None else stats
    ranges = even_ranges(0, call.seq_len_q, plan.q_block)
    checkpoint, done, total = current_checkpoint(), 0, sum(len(group.spans) for group in groups) * len(ranges)
    for group in groups:
        for bounded in group.attend(tile_math, call, plan, ranges):
            stats.blocks += 1
            stats.bounded_blocks += bounded
            done += 1
            if checkpoint is not None:
                checkpoint(done, total)
    return Results(out, lse, log_sum, seed)


class _Group(NamedTuple):
    """Units whose dimensions could be merged, with the rules for their tiles.

    bounded: the rules in bounded blocks, None if there can be none.
    bias: ``[U, G, 1]``, what all keys that these rules leave share.
    """

    units: Units
    spans: list[tuple[int, int]]
    rules: Rules
    bounded: Rules | None
    bias: Tensor | None

    @staticmethod
    def of(units: Units, call: AttentionCall, plan: TilePlan, look: bool, may_bound: bool) -> _Group:
        spans = unit_spans(units, call, plan.units)
        dtype = accumulate_dtype(call.query.dtype)
        rules = Rules(Band.of(call), units.mask, dtype, look=look, lazy=lazy_tiles(call, units))
        if has_bias(call) and (units.mask is None or call.sinks is not None):
            may_bound = False
        bounded, bias = rules if may_bound else None, None
        if may_bound and units.mask is not None and units.mask.dtype != torch.bool:
            # A bounded block knows bool masks only: a float mask must be the padding of keys in disguise.
            padding = padding_as_bool(units.mask, rules.dtype) if look and rules.band.is_everything else None
            bounded = None
            if padding is not None:
                bounded, bias = Rules(rules.band, padding[0], rules.dtype, look=True), padding[1]
        for each in {rules, bounded} - {None}:
            each.prepare(spans)  # type: ignore[union-attr]
        return _Group(units, spans, rules, bounded, bias)

    def attend(
        self, tile_math: TileMath, call: AttentionCall, plan: TilePlan, ranges: list[tuple[int, int]]
    ) -> Iterator[bool]:
        """Fill the outputs of these units, one range of queries after another; yields whether it was bounded."""
        limits = [0.0] * len(self.spans)
        if self.bounded is not None:
            keys = [self.bounded.key_range(*span, 0, call.seq_len_q, call.seq_len_kv) for span in self.spans]
            limits = query_limits(self.units, self.spans, keys, call.scale * LOG2_E, plan.kv_block, tile_math)
        for span, limit in zip(self.spans, limits):
            unit_range = _UnitRange(self, *span, tile_math, call, plan)
            for q0, q1 in ranges:
                yield unit_range.attend(q0, q1, limit)


class TileMath:
    """The buffers of one call, and what is done to one tile."""

    def __init__(self, call: AttentionCall, plan: TilePlan, seed: Tensor | None, *, for_backward: bool = False):
        self.dtype, self.device = accumulate_dtype(call.query.dtype), call.query.device
        self.groups, self.scale, self.dropout_p, self.seed = call.groups, call.scale, call.dropout_p, seed
        # Scores are counted in bits, so that exp2 serves. But a bias may be as low as -finfo.max, which log2(e) would
        # push to -inf: under a float mask they are counted in natural units.
        self.unit = 1.0 if has_bias(call) else LOG2_E
        self.softcap, self.sinks = call.softcap, call.sinks
        self.rows_may_be_empty = call.attn_mask is not None or not Band.of(call).is_everything
        self.copies_query, self.copies_kv, self.copies_out = copies(call)
        rows, keys = plan.units * plan.q_block * call.groups, plan.units * plan.kv_block
        self.scores = self.buffer(rows * plan.kv_block)
        self.query = self.buffer(rows * call.head_dim if self.copies_query else 0)
        self.acc = self.buffer(rows * call.head_dim_v if self.copies_out and not for_backward else 0)
        widest = call.head_dim if for_backward else max(call.head_dim, call.head_dim_v)
        self.kv = self.buffer(keys * widest if self.copies_kv else 0)
        self.scratch = self.buffer(rows * plan.kv_block * BYTES_PER_SCORE if call.dropout_p else 0, torch.uint8)
        self.masks = MaskWriter(
            call.groups, self.dtype, self.device, masked=self.rows_may_be_empty, max_scores=self.scores.numel()
        )

    def buffer(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory of so many elements."""
        return torch.empty(size, dtype=dtype or self.dtype, device=self.device)

    def bounded_tile(self, rows: _Rows, key: Tensor, value: Tensor, rule: Rule, first_key: int, fresh: bool) -> None:
        """Add a tile whose scores are known to lie within +-60 bits. ``fresh``: the first one of these rows."""
        scores = self.capped(self.product(rows.query, key, self.factor(LOG2_E)), LOG2_E)
        scores.exp2_()
        self.masks.forbid(scores, rule, 0.0)
        self._accumulate(rows, scores, value, first_key, fresh)

    def online_tile(self, rows: _Rows, key: Tensor, value: Tensor, rule: Rule, first_key: int, fresh: bool) -> None:
        """Add a tile under a running maximum."""
        scores = self.capped(self.product(rows.query, key, self.factor(self.unit)), self.unit)
        if rule.mask is not None and rule.mask.dtype != torch.bool:
            self.masks.add(scores, rule.mask)
        self.masks.forbid(scores, rule, NEG_INF)
        assert rows.row_max is not None
        new_max = scores.amax(dim=-1, keepdim=True)
        if not fresh:
            torch.maximum(new_max, rows.row_max, out=new_max)
        # A row that has seen no key yet has the maximum -inf: subtracting a finite number instead keeps it there.
        shift = new_max.clamp_min(torch.finfo(self.dtype).min) if self.rows_may_be_empty else new_max
        self.exp2_(scores.sub_(shift))
        if not fresh:
            rescale = self.exp2_(rows.row_max.sub_(shift))
            rows.row_sum.mul_(rescale)
            rows.acc.mul_(rescale)
        rows.row_max.copy_(new_max)
        self._accumulate(rows, scores, value, first_key, fresh)

    def exp2_(self, scores: Tensor) -> Tensor:
        """e to the scores, in place, whichever unit they are in."""
        return (scores.mul_(LOG2_E) if self.unit == 1.0 else scores).exp2_()

    def product(self, query: Tensor, key: Tensor, factor: float, *, converted: bool = False) -> Tensor:
        """query @ key^T * factor in the score buffer, ``[u, rows, keys]``."""
        key = key if converted else self.converted(key)
        shape = (query.shape[0], query.shape[1], key.shape[1])
        scores = self.scores[: math.prod(shape)].view(shape)
        return torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=factor, out=scores)

    def factor(self, unit: float) -> float:
        """What query . key is multiplied by: to scores in the given unit, or to what tanh takes."""
        return self.scale * unit if self.softcap is None else self.scale / self.softcap

    def capped(self, scores: Tensor, unit: float) -> Tensor:
        """softcap * tanh(scores / softcap) in the given unit, in place. It is no larger than the score itself, so a
        bound for the score holds for it."""
        return scores if self.softcap is None else scores.tanh_().mul_(self.softcap * unit)

    def add_sinks(self, rows: _Rows, first_unit: int) -> None:
        """Count the sink of each head in the sums of a block, as one more key without a value."""
        if self.sinks is None:
            return
        sink = self.sink_rows(first_unit, rows.row_sum.shape)
        if rows.row_max is None:
            rows.row_sum.add_(sink.mul_(LOG2_E).exp2_())
            return
        sink.mul_(self.unit)
        shift = torch.maximum(rows.row_max, sink).clamp_min_(torch.finfo(self.dtype).min)  # as in online_tile
        rescale = self.exp2_(rows.row_max.sub_(shift))
        rows.acc.mul_(rescale)
        rows.row_sum.mul_(rescale).add_(self.exp2_(sink.sub_(shift)))
        rows.row_max.copy_(shift)

    def sink_rows(self, first_unit: int, shape: torch.Size) -> Tensor:
        """The sinks of a block's rows, ``[u, rows, 1]``."""
        assert self.sinks is not None
        heads = self.sinks.detach().to(self.dtype).view(-1, self.groups)
        units = torch.arange(first_unit, first_unit + shape[0], device=heads.device) % heads.shape[0]
        return heads[units].repeat(1, shape[1] // self.groups)[..., None]

    def converted(self, part: Tensor) -> Tensor:
        """A slice of key or value as the products take it: in the dtype of the sums, rows contiguous."""
        return self.kv[: part.numel()].view(part.shape).copy_(part) if self.copies_kv else part

    def by_head(self, rows: Tensor) -> Tensor:
        """``[u, rows, X]`` as ``[u, G, tokens, X]``, the shape of an output's block."""
        return self.masks.by_token(rows).transpose(1, 2)

    def _accumulate(self, rows: _Rows, probs: Tensor, value: Tensor, first_key: int, fresh: bool) -> None:
        if fresh:
            torch.sum(probs, dim=-1, keepdim=True, out=rows.row_sum)
        else:
            rows.row_sum.add_(probs.sum(dim=-1, keepdim=True))
        coins = self.coins(probs.shape, rows.code, first_key)
        if coins is not None:
            probs.mul_(coins)
        value = self.converted(value)
        if fresh:
            torch.bmm(probs, value, out=rows.acc)
        else:
            torch.baddbmm(rows.acc, probs, value, out=rows.acc)

    def row_codes(self, first_unit: int, query: Tensor, seq_len_q: int, q0: int) -> Tensor | None:
        """Dropout codes of a block's rows, None without dropout."""
        if self.seed is None:
            return None
        return block_row_codes(self.seed, first_unit, query.shape, self.groups, seq_len_q, q0)

    def coins(self, shape: torch.Size, row_code: Tensor | None, first_key: int) -> Tensor | None:
        """Dropout's zeros and ones for a tile, None without dropout; valid until the next tile."""
        if row_code is None or self.seed is None:
            return None
        keys = key_codes(self.seed, first_key, first_key + shape[2])
        return draw_coins(shape, row_code, keys, self.dropout_p, self.scratch)

    def block_query(self, query: Tensor) -> Tensor:
        """``[u, G, tokens, D]`` as rows ``[u, tokens * G, D]`` ordered by token, then by head."""
        if not self.copies_query:
            return query[:, 0] if self.groups == 1 else query[:, :, 0]
        tokens_first = query.transpose(1, 2)
        block = self.query[: query.numel()].view(tokens_first.shape).copy_(tokens_first)
        return block.view(query.shape[0], query.shape[1] * query.shape[2], query.shape[3])

    def block_acc(self, out: Tensor) -> Tensor:
        """Where the sums of a block are made: in the output itself ``[u, G, tokens, Dv]`` where that is possible."""
        if not self.copies_out:
            return out[:, 0] if self.groups == 1 else out[:, :, 0]
        return self.acc[: out.numel()].view(out.shape[0], out.shape[1] * out.shape[2], out.shape[3])

    def finish(self, rows: _Rows, out: Tensor, lse: Tensor | None, log_sum: Tensor | None, bias: Tensor | None) -> None:
        """Turn the sums of a block into its output, lse and log_sum. ``bias``: added to lse."""
        if lse is not None:
            total = rows.row_sum.log2().mul_(LN_2)
            if log_sum is not None:
                log_sum.copy_(self.by_head(total)[..., 0])
            if rows.row_max is not None:
                total.add_(rows.row_max, alpha=1.0 if self.unit == 1.0 else LN_2)
            lse.copy_(self.by_head(total)[..., 0])
            if bias is not None:
                lse.add_(bias)
        total = rows.row_sum.masked_fill_(rows.row_sum == 0, 1.0) if self.rows_may_be_empty else rows.row_sum
        if self.dropout_p:
            total.mul_(1.0 - self.dropout_p if self.dropout_p < 1 else math.inf)
        rows.acc.div_(total)
        if self.copies_out:
            out.copy_(self.by_head(rows.acc))


class _UnitRange:
    """Some units that share every step: all of their query blocks against all of their keys."""

    def __init__(self, group: _Group, u0: int, u1: int, tile_math: TileMath, call: AttentionCall, plan: TilePlan):
        units = group.units
        self.group, self.span, self.first_unit = group, (u0, u1), units.index + u0
        self.math, self.call, self.plan = tile_math, call, plan
        self.query, self.key, self.value = units.query[u0:u1], units.key[u0:u1], units.value[u0:u1]
        out, lse, log_sum = units.extra
        assert out is not None
        self.out = out[u0:u1]
        self.lse, self.log_sum = (None if t is None else t[u0:u1] for t in (lse, log_sum))
        self.bias = None if group.bias is None else group.bias[u0:u1]
        self.tiles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, q0: int, q1: int, limit: float) -> bool:
        """Compute one query block; returns whether it was bounded. ``limit``: the largest |query row| for that."""
        query = self.math.block_query(self.query[:, :, q0:q1])
        bounded = self.group.bounded if limit == math.inf or (limit > 0 and float(max_norm(query)) <= limit) else None
        out = self.out[:, :, q0:q1]
        rows = self._rows(query, self.math.block_acc(out), q0, bounded is not None)
        if bounded is None:
            self._visit_tiles(rows, q0, q1, self.group.rules, self.math.online_tile)
        else:
            self._visit_tiles(rows, q0, q1, bounded, self.math.bounded_tile)
        self.math.add_sinks(rows, self.first_unit)
        lse, log_sum = (None if t is None else t[:, :, q0:q1] for t in (self.lse, self.log_sum))
        self.math.finish(rows, out, lse, log_sum, None if bounded is None else self.bias)
        return bounded is not None

    def _visit_tiles(self, rows: _Rows, q0: int, q1: int, rules: Rules, add_tile: Callable[..., None]) -> None:
        schedule = block_schedule(rules, self.span, q0, q1, self.call, self.plan, self.math.copies_kv)
        seen_by_all = False
        for t0, t1, ranges in schedule:
            whole = t1 - t0 == q1 - q0
            part = rows if whole else rows.part(t0 * self.call.groups, t1 * self.call.groups)
            fresh = not seen_by_all
            for j0, j1 in ranges:
                rule = rules.rule(*self.span, q0 + t0, q0 + t1, j0, j1)
                if rule is not None:
                    add_tile(part, *self._kv_tile(j0, j1), rule, j0, fresh)
                    fresh = False
            if whole:
                seen_by_all = not fresh
            if fresh and not (whole and len(schedule) > 1):
                part.clear()

    def _kv_tile(self, j0: int, j1: int) -> tuple[Tensor, Tensor]:
        tile = self.tiles.get((j0, j1))
        if tile is None:
            tile = self.tiles[j0, j1] = (self.key[:, j0:j1], self.value[:, j0:j1])
        return tile

    def _rows(self, query: Tensor, acc: Tensor, q0: int, bounded: bool) -> _Rows:
        stat = query.shape[0], query.shape[1], 1
        code = self.math.row_codes(self.first_unit, query, self.call.seq_len_q, q0)
        row_max = None if bounded else query.new_empty(stat, dtype=self.math.dtype)
        return _Rows(query, acc, query.new_empty(stat, dtype=self.math.dtype), row_max, code)
