"""The walk over a call: which units, which blocks of queries, which tiles. What a tile does is in :mod:`.softmax`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Results, TiledStats, accumulate_dtype, empty_output
from ..observe.progress import current_checkpoint
from .bounds import BOUNDED_BITS, max_norm, query_limits
from .layout import Units, unit_spans, unit_views
from .masks import Rules, block_schedule, padding_as_bool
from .products import LN_2, LOG2_E, TileProducts
from .softmax import BoundedSoftmax, OnlineSoftmax
from .tiles import TilePlan, even_ranges

_MIN_BOUNDED_ROWS = 64  # with fewer rows the norms of K cost as much as its product with them


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
        trim_masks: skip keys and tiles that are fully masked.
        seed: int64 ``[1]`` from :func:`pascal_attn_core.tiled.dropout.draw_seed`, needed when ``call.dropout_p > 0``.
    """
    out = empty_output(call)
    acc_dtype = accumulate_dtype(out.dtype)
    lse = out.new_empty(out.shape[:-1], dtype=acc_dtype) if with_lse or for_grad else None
    log_sum = out.new_empty(out.shape[:-1], dtype=acc_dtype) if for_grad and call.has_bias else None
    if call.num_scores == 0 or (call.is_empty and lse is None):  # without head_dim_v there still is an lse
        out.zero_()
        for rows in (lse, log_sum):
            if rows is not None:
                rows.fill_(-math.inf)
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
    tile = TileProducts(call, plan, seed)
    stats = TiledStats() if stats is None else stats
    ranges = even_ranges(0, call.seq_len_q, plan.q_block)
    checkpoint, done, total = current_checkpoint(), 0, sum(len(group.spans) for group in groups) * len(ranges)
    for group in groups:
        for bounded in group.attend(tile, call, plan, ranges):
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
        rules = Rules.of(call, units, look=look)
        if call.has_bias and (units.mask is None or call.sinks is not None):
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
        self, tile: TileProducts, call: AttentionCall, plan: TilePlan, ranges: list[tuple[int, int]]
    ) -> Iterator[bool]:
        """Fill the outputs of these units, one range of queries after another; yields whether it was bounded."""
        limits = [0.0] * len(self.spans)
        if self.bounded is not None:
            keys = [self.bounded.key_range(*span, 0, call.seq_len_q, call.seq_len_kv) for span in self.spans]
            limits = query_limits(self.units, self.spans, keys, call.scale * LOG2_E, plan.kv_block, tile)
        for span, limit in zip(self.spans, limits):
            unit_range = _UnitRange(self, *span, tile, call, plan)
            for q0, q1 in ranges:
                yield unit_range.attend(q0, q1, limit)


class _UnitRange:
    """Some units that share every step: all of their query blocks against all of their keys."""

    def __init__(self, group: _Group, u0: int, u1: int, tile: TileProducts, call: AttentionCall, plan: TilePlan):
        units = group.units
        self.group, self.span, self.first_unit = group, (u0, u1), units.index + u0
        self.tile, self.call, self.plan = tile, call, plan
        self.query, self.key, self.value = units.query[u0:u1], units.key[u0:u1], units.value[u0:u1]
        out, lse, log_sum = units.extra
        assert out is not None
        self.out = out[u0:u1]
        self.lse, self.log_sum = (None if t is None else t[u0:u1] for t in (lse, log_sum))
        self.bias = None if group.bias is None else group.bias[u0:u1]
        self.tiles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, q0: int, q1: int, limit: float) -> bool:
        """Compute one query block; returns whether it was bounded. ``limit``: the largest |query row| for that."""
        query = self.tile.block_query(self.query[:, :, q0:q1])
        bounded = self.group.bounded if limit == math.inf or (limit > 0 and float(max_norm(query)) <= limit) else None
        softmax = self._softmax(query, q0, q1, bounded is not None)
        self._visit_tiles(softmax, q0, q1, self.group.rules if bounded is None else bounded)
        sinks = self.tile.sink_rows(self.first_unit, softmax.row_sum.shape)
        if sinks is not None:
            softmax.add_sinks(sinks)
        self._finish(softmax, q0, q1, None if bounded is None else self.bias)
        return bounded is not None

    def _softmax(self, query: Tensor, q0: int, q1: int, is_bounded: bool) -> OnlineSoftmax | BoundedSoftmax:
        stat = query.shape[0], query.shape[1], 1
        row_sum = query.new_empty(stat, dtype=self.tile.dtype)
        code = self.tile.row_codes(self.first_unit, query, self.call.seq_len_q, q0)
        state = self.tile, query, self.tile.block_acc(self.out[:, :, q0:q1]), row_sum, code
        return BoundedSoftmax(*state) if is_bounded else OnlineSoftmax(*state, row_max=torch.empty_like(row_sum))

    def _visit_tiles(self, softmax: OnlineSoftmax | BoundedSoftmax, q0: int, q1: int, rules: Rules) -> None:
        schedule = block_schedule(rules, self.span, q0, q1, self.call, self.plan, self.tile.copies_kv)
        seen_by_all = False
        for t0, t1, ranges in schedule:
            whole = t1 - t0 == q1 - q0
            part = softmax if whole else softmax.part(t0 * self.call.groups, t1 * self.call.groups)
            fresh = not seen_by_all
            for j0, j1 in ranges:
                rule = rules.rule(*self.span, q0 + t0, q0 + t1, j0, j1)
                if rule is not None:
                    part.add(*self._kv_tile(j0, j1), rule, j0, fresh)
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

    def _finish(self, softmax: OnlineSoftmax | BoundedSoftmax, q0: int, q1: int, bias: Tensor | None) -> None:
        """Turn the sums of a block into its output, lse and log_sum. ``bias``: added to lse."""
        if self.lse is not None:
            log_sum = softmax.row_sum.log2().mul_(LN_2)
            if self.log_sum is not None:
                self.log_sum[:, :, q0:q1].copy_(self.tile.by_head(log_sum)[..., 0])
            lse = self.lse[:, :, q0:q1].copy_(self.tile.by_head(softmax.lse(log_sum))[..., 0])
            if bias is not None:
                lse.add_(bias)
        softmax.normalize()
        if self.tile.copies_out:
            self.out[:, :, q0:q1].copy_(self.tile.by_head(softmax.acc))
