"""From a checked call to its tile shape, and to the walk that the calls of its kind take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import AttentionCall, distinct
from ..call.flex_rules import BlockRule
from ..config import AttentionConfig
from ..machine.device import MIB, DeviceInfo
from .layout import UnitViews, copies, is_padding, unit_spans, unit_views, worth_looking
from .rule_bytes import NO_RULES, rule_bytes
from .tiles import Ranges, TilePlan, Workload, even_ranges, plan_tiles

_MIN_BOUNDED_ROWS = 64  # with fewer rows the norms of K cost as much as its product with them


def workload(call: AttentionCall, *, backward: bool = False) -> Workload:
    acc_dtype = call.sums_dtype
    copies_query, copies_kv, copies_out = copies(call)
    mask = call.attn_mask if isinstance(call.attn_mask, Tensor) else None
    has_band = call.left is not None or call.right is not None
    window = None
    if call.left is not None:
        window = call.left + 1 + (call.right or 0)
    elif isinstance(call.attn_mask, BlockRule):
        window = call.attn_mask.window
    return Workload(
        units=call.batch_size * call.num_kv_heads,
        groups=call.groups,
        seq_len_q=call.seq_len_q,
        seq_len_kv=call.seq_len_kv,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        acc_size=acc_dtype.itemsize,
        copies_query=copies_query,
        copies_kv=copies_kv,
        copies_out=copies_out,
        writes_mask=has_band or call.attn_mask is not None,
        rules=NO_RULES if mask is call.attn_mask and call.score_rule is None else rule_bytes(call, backward=backward),
        has_band=has_band,
        mask_keys=math.prod(distinct(mask).shape) if mask is not None and is_padding(mask) else 0,
        dropout=call.dropout_p > 0,
        causal=call.right is not None,
        window=window,
        softcap=call.softcap is not None,
        backward=backward,
        mask_grad=backward and call.needs_mask_grad,
    )


def plan_call(
    call: AttentionCall,
    info: DeviceInfo,
    config: AttentionConfig,
    *,
    most_bytes: int | None = None,
    backward: bool = False,
) -> TilePlan:
    """The tile shape for a call under a configuration, and with at most ``most_bytes`` if that is less."""
    work = workload(call, backward=backward)
    if config.budget_mib is None:
        budget = info.default_budget_bytes(backward=backward)
    else:
        budget = int(config.budget_mib * MIB)
    if most_bytes is not None:
        budget = min(budget, most_bytes)
    return plan_tiles(info, work, budget, q_block=config.q_block, kv_block=config.kv_block)


@dataclass(frozen=True, eq=False, slots=True)
class Walk:
    """The part of a pass over a call in tiles that follows from its sizes, strides, dtypes and tile shape alone:
    one serves all calls of a kind. It holds no tensor.

    Attributes:
        tiles: the tile shape.
        dtype: of scores and sums.
        groups: query heads per key/value head.
        copies_query, copies_kv, copies_out: whether blocks of them are copied to or from a buffer.
        has_bias: there is a float mask or a score rule.
        is_masked: a mask, a band or a score rule restricts the keys, so a row may see none.
        may_bound: it pays to find out whether blocks are bounded.
        is_empty: there is no score.
        views: of the call's tensors as units, in the forward pass.
        spans: of units that share every step.
        q_ranges: query tokens of each block.
        key_ranges: keys of each tile where every query sees every key.
    """

    tiles: TilePlan
    dtype: torch.dtype
    groups: int
    copies_query: bool
    copies_kv: bool
    copies_out: bool
    has_bias: bool
    is_masked: bool
    may_bound: bool
    is_empty: bool
    views: UnitViews
    spans: Ranges
    q_ranges: Ranges
    key_ranges: Ranges

    @staticmethod
    def of(call: AttentionCall, tiles: TilePlan) -> Walk:
        views = unit_views(call)
        return Walk(
            tiles,
            call.sums_dtype,
            call.groups,
            *copies(call),
            has_bias=call.has_bias,
            is_masked=call.attn_mask is not None or call.has_band or call.score_rule is not None,
            may_bound=call.seq_len_q * call.groups >= _MIN_BOUNDED_ROWS and worth_looking(call),
            is_empty=call.num_scores == 0,
            views=views,
            spans=unit_spans(views.size, call, tiles.units),
            q_ranges=even_ranges(0, call.seq_len_q, tiles.q_block),
            key_ranges=even_ranges(0, call.seq_len_kv, tiles.kv_block),
        )
