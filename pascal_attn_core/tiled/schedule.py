"""Which units share a step, and which tiles a block of queries visits."""

from __future__ import annotations

import torch

from ..call import AttentionCall
from ..device import CPU_LIKE
from ..lazy_mask import LazyMask
from .layout import Units
from .masks import LazyTiles, Rules, diagonal_schedule
from .tiles import TilePlan

_DIAGONAL_TOKENS = 128  # a causal block's diagonal is cut into sub-blocks of so many query tokens


def has_bias(call: AttentionCall) -> bool:
    """Whether the mask is a float one."""
    return call.attn_mask is not None and call.attn_mask.dtype != torch.bool


def lazy_tiles(call: AttentionCall, units: Units) -> LazyTiles | None:
    """The mask as these units see it, if it is a rule."""
    if not isinstance(call.attn_mask, LazyMask):
        return None
    return LazyTiles(call.attn_mask, call.num_kv_heads, call.groups, units.index)


def unit_spans(units: Units, call: AttentionCall, step: int) -> list[tuple[int, int]]:
    """Ranges of at most ``step`` units; under a mask that is a rule none crosses from one batch element to the next."""
    period = call.num_kv_heads if isinstance(call.attn_mask, LazyMask) else len(units)
    spans, first = [], 0
    while first < len(units):
        end = first + period - (units.index + first) % period if period < len(units) else len(units)
        last = min(first + step, end, len(units))
        spans.append((first, last))
        first = last
    return spans


def block_schedule(
    rules: Rules, span: tuple[int, int], q0: int, q1: int, call: AttentionCall, plan: TilePlan, copies_kv: bool
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """The tiles of one query block: see :func:`pascal_attn_core.tiled.masks.diagonal_schedule`."""
    first, last = rules.key_range(*span, q0, q1, call.seq_len_kv)
    # A GPU would spend more on launching the sub-blocks than it saves by them.
    sub_tokens = _DIAGONAL_TOKENS if call.query.device.type in CPU_LIKE else 0
    sub_keys = plan.kv_block if copies_kv else max(1, plan.q_block * plan.kv_block // _DIAGONAL_TOKENS)
    return diagonal_schedule(rules.band, q0, q1, first, last, plan.kv_block, sub_tokens, sub_keys)
