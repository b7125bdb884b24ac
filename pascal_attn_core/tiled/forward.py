"""The walk over a call: which units, which blocks of queries, which tiles. What a tile does is in :mod:`.softmax`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Results, TiledStats, empty_output, may_read
from ..config import AttentionConfig
from ..observe.progress import this_thread
from .layout import Units, UnitViews
from .masks import FREE, MaskTiles, Rules, block_schedule, padding_as_bool
from .plan import Walk
from .products import BOUNDED_BITS, LN_2, LOG2_E, TileProducts
from .softmax import BoundedSoftmax, OnlineSoftmax
from .tiles import Ranges


@torch.no_grad()
def tiled_forward(
    call: AttentionCall,
    walk: Walk,
    config: AttentionConfig,
    *,
    with_lse: bool,
    for_grad: bool,
    seed: Tensor | None,
    stats: TiledStats,
) -> Results:
    """Attention of a checked call in tiles of the given shape.

    Args:
        walk: of this kind of call; the ``extra_bytes`` of its tile shape are kept.
        for_grad: return what the gradients need: lse, and log_sum where there is a float mask. Under a score rule
            log_sum comes with every lse.
        seed: int64 ``[1]`` from :func:`pascal_attn_core.tiled.dropout.draw_seed`, needed when ``call.dropout_p > 0``.
    """
    readable, out = may_read(call), empty_output(call)
    lse = out.new_empty(out.shape[:-1], dtype=walk.dtype) if with_lse or for_grad else None
    log_sum = None
    if lse is not None and (call.score_rule is not None or (for_grad and walk.has_bias)):
        log_sum = torch.empty_like(lse)
    results = Results(out, lse, log_sum, seed)
    if walk.is_empty or (call.head_dim_v == 0 and lse is None):  # without head_dim_v there still is an lse
        return _without_keys(call, results)
    may_bound = readable and config.softmax == "auto" and walk.may_bound
    if may_bound and call.sinks is not None:
        may_bound = float(call.sinks.detach().abs().amax()) * LOG2_E <= BOUNDED_BITS
    look = readable and config.trim_masks and walk.tiles.scans_mask
    parts = units_of(call, walk.views, (out, lse, log_sum))
    groups = [_Group.of(units, call, walk, look, may_bound) for units in parts]
    tile = TileProducts(call, walk, seed)
    checkpoint, done = this_thread.checkpoint, 0
    total = len(groups) * len(walk.spans) * len(walk.q_ranges)
    for group in groups:
        limits = [0.0] * len(walk.spans)
        if group.key_ranges is not None:
            limits = tile.query_limits(group.units, walk.spans, group.key_ranges)
        for span, limit in zip(walk.spans, limits):
            unit_range = _UnitRange(group, span, tile, call, walk)
            for q0, q1 in walk.q_ranges:
                stats.bounded_blocks += unit_range.attend(q0, q1, limit)
                stats.blocks += 1
                done += 1
                if checkpoint is not None:
                    checkpoint(done, total)
    return results


def _without_keys(call: AttentionCall, results: Results) -> Results:
    results.out.zero_()
    for rows in (results.lse, results.log_sum):
        if rows is not None:
            rows.fill_(-math.inf)
    if results.lse is not None and call.sinks is not None:
        results.lse.copy_(call.sinks[:, None] if results.lse.dim() > 1 else call.sinks)
    return results


def units_of(
    call: AttentionCall, views: UnitViews, per_query: Sequence[Tensor | None], per_key: Sequence[Tensor] = ()
) -> Iterator[Units]:
    """The call cut into units, each with its part of further tensors.

    Args:
        views: of this kind of call, by :func:`.layout.unit_views`.
        per_query: ``[*batch, Hq, L, ...]`` (output, lse, gradients of query), seen as ``[U, G, L, ...]``.
        per_key: ``[*batch, Hkv, S, ...]``, seen as ``[U, S, ...]``.
    """
    given = (call.query, call.key, call.value, call.attn_mask)
    inputs = [t.expand(full).view(shape) for t, (full, shape) in zip(given, views.inputs)]  # type: ignore[union-attr]
    extra = [None if t is None else t.view(*views.per_query, *t.shape[views.lead :]) for t in per_query]
    extra += [t.view(*views.per_key, *t.shape[-2:]) for t in per_key]
    for number, index in enumerate(product(*map(range, views.walked))):
        query, key, value, *masks = (t[index] for t in inputs)
        others = [None if t is None else t[index] for t in extra]
        yield Units(query, key, value, masks[0] if masks else None, others, number * views.size)


class _Group(NamedTuple):
    """Units whose dimensions could be merged, with the rules for their tiles.

    rules: None where every query sees every key; bounded: those of bounded blocks.
    key_ranges: what bounded blocks may look at, per span of units; None if no block may be bounded.
    bias: ``[U, G, 1]``, what all keys that the rules of bounded blocks leave share.
    """

    units: Units
    rules: Rules | None = None
    bounded: Rules | None = None
    key_ranges: Ranges | None = None
    bias: Tensor | None = None

    @staticmethod
    def of(units: Units, call: AttentionCall, walk: Walk, look: bool, may_bound: bool) -> _Group:
        if not walk.is_masked:
            return _Group(units, key_ranges=[(0, call.seq_len_kv)] * len(walk.spans) if may_bound else None)
        rules = Rules.of(call, units, look=look)
        if isinstance(rules.mask, MaskTiles):
            for span in walk.spans:
                rules.mask.key_range(*span)  # looked at once, before the call's buffers are there
        if not may_bound or (walk.has_bias and (units.mask is None or call.sinks is not None)):
            return _Group(units, rules)
        bounded, bias = rules, None
        if units.mask is not None and walk.has_bias:
            # A bounded block knows bool masks only: a float mask must be the padding of keys in disguise.
            padding = padding_as_bool(units.mask, rules.dtype) if look and rules.band.is_everything else None
            if padding is None:
                return _Group(units, rules)
            bounded, bias = Rules(rules.band, MaskTiles(padding[0], look=True), rules.dtype), padding[1]
        keys = [bounded.key_range(*span, 0, call.seq_len_q, call.seq_len_kv) for span in walk.spans]
        return _Group(units, rules, bounded, keys, bias)


class _UnitRange:
    """Some units that share every step: all of their query blocks against all of their keys."""

    def __init__(self, group: _Group, span: tuple[int, int], tile: TileProducts, call: AttentionCall, walk: Walk):
        units, (u0, u1) = group.units, span
        self.group, self.span, self.first_unit = group, span, units.first + u0
        self.tile, self.call, self.walk = tile, call, walk
        self.query, self.key, self.value = units.query[u0:u1], units.key[u0:u1], units.value[u0:u1]
        out, lse, log_sum = units.extra
        self.out = out[u0:u1]
        self.lse, self.log_sum, self.bias = (None if t is None else t[u0:u1] for t in (lse, log_sum, group.bias))
        self.kv_tiles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, q0: int, q1: int, limit: float) -> bool:
        """Compute one query block; returns whether it was bounded. ``limit``: the largest |query row| for that."""
        softmax = self._softmax(q0, q1, limit)
        is_bounded, groups = isinstance(softmax, BoundedSoftmax), self.walk.groups
        rules = self.group.bounded if is_bounded else self.group.rules
        schedule = [(0, q1 - q0, self.walk.key_ranges)]
        if rules is not None:
            schedule = block_schedule(rules, self.span, q0, q1, self.call, self.walk)
        seen_by_all = False
        for t0, t1, ranges in schedule:
            whole = t1 - t0 == q1 - q0
            part = softmax if whole else softmax.part(t0 * groups, t1 * groups)
            fresh = not seen_by_all
            for j0, j1 in ranges:
                rule = FREE if rules is None else rules.rule(*self.span, q0 + t0, q0 + t1, j0, j1)
                if rule is None:
                    continue
                kv = self.kv_tiles.get((j0, j1))
                if kv is None:
                    kv = self.kv_tiles[j0, j1] = (self.key[:, j0:j1], self.value[:, j0:j1])
                part.add(*kv, rule, j0, fresh)
                fresh = False
            if whole:
                seen_by_all = not fresh
            if fresh and not (whole and len(schedule) > 1):
                part.clear()
        sinks = self.tile.sink_rows(self.first_unit, softmax.row_sum.shape)
        if sinks is not None:
            softmax.add_sinks(sinks)
        self._finish(softmax, q0, q1, self.bias if is_bounded else None)
        return is_bounded

    def _softmax(self, q0: int, q1: int, limit: float) -> OnlineSoftmax | BoundedSoftmax:
        """The state of one query block before the first tile."""
        tile, out = self.tile, self.out[:, :, q0:q1]
        query = tile.rows(self.query[:, :, q0:q1], tile.query_buffer)
        is_bounded = tile.is_bounded(query, limit)
        code = tile.row_codes(self.first_unit, query, self.call.seq_len_q, q0)
        row_sum = query.new_empty((query.shape[0], query.shape[1], 1), dtype=tile.dtype)
        state = tile, query, tile.block_acc(out), row_sum, code
        return BoundedSoftmax(*state) if is_bounded else OnlineSoftmax(*state, row_max=torch.empty_like(row_sum))

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
