"""How much memory the caller's own functions take (``score_mod`` and ``mask_mod`` of FlexAttention). It cannot be known
from outside, so it is read off a small tile."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall
from ..call.flex_rules import BlockRule, ScoreRule, ScoreTile
from ..observe.memory import Follower

_SIDE = 32  # queries and keys of the small tile
_HEADS = 16


class RuleBytes(NamedTuple):
    """Bytes that rules allocate for a tile.

    Attributes:
        score: per score; pair: per query and key, whichever the head.
        asked: per element for which a ``mask_mod`` is asked at once.
        kept: of blocks that are known from now on.
    """

    score: int = 0
    pair: int = 0
    asked: int = 0
    kept: int = 0


NO_RULES = RuleBytes()
_known: weakref.WeakKeyDictionary[Any, dict[tuple, Any]] = weakref.WeakKeyDictionary()


def rule_bytes(call: AttentionCall, *, backward: bool) -> RuleBytes:
    """The bytes that the rules of a call allocate in its forward pass, or in that of its gradients."""
    score = pair = asked = kept = 0
    sides = min(_SIDE, call.seq_len_q), min(_SIDE, call.seq_len_kv)
    if call.score_rule is not None and not call.is_empty:
        kind = backward, call.query.device.type, call.sums_dtype, min(_HEADS, call.num_heads), *sides
        score, pair = _once(call.score_rule.score_mod, kind, lambda: _of_scores(call, call.score_rule, sides, backward))
    if isinstance(call.attn_mask, BlockRule) and not call.is_empty:
        mask = call.attn_mask
        asked = _once(mask.rule, ("mask", mask.device.type, *sides), lambda: _of_mask(mask, sides))
        # The part of the mask that is written for a tile: once, or for each head.
        score, pair = (score + 1, pair) if mask.by_head else (score, pair + 1)
        kept = mask.kept_bytes
    return RuleBytes(score, pair, asked, kept) if score or pair else NO_RULES


def _once(function: Any, kind: tuple, find: Callable[[], Any]) -> Any:
    """The result of ``find``, remembered for a function, or for the one that a method is bound to."""
    try:
        known = _known.setdefault(getattr(function, "__func__", function), {})
    except TypeError:  # it cannot be weakly referenced
        return find()
    if kind not in known:
        known[kind] = find()
    return known[kind]


def _of_scores(call: AttentionCall, rule: Any, sides: tuple[int, int], backward: bool) -> tuple[int, int]:
    """(bytes per score, bytes per query and key) of a score rule, from tiles of some heads.

    A rule first computes what depends on query and key only, then what depends on the head. The larger of both counts,
    so the peak bends upwards with the number of heads: a line with the slope of its end lies nowhere below it.
    """
    most = min(_HEADS, call.num_heads)
    fewer = 1 if most == call.num_heads else most // 2
    one, few, many = (_peak(rule, heads, sides, backward) for heads in (1, fewer, most))
    size = sides[0] * sides[1]
    per_score = -(-(many - few) // (size * (most - fewer))) if most > fewer else 0
    return per_score, max(0, -(-one // size) - per_score)


def _peak(rule: ScoreRule, heads: int, sides: tuple[int, int], backward: bool) -> int:
    scores = rule.like.new_zeros(heads, sides[0], 1, sides[1])
    tile = ScoreTile(rule, 0, (0, heads), (0, sides[0]), (0, sides[1]))
    with torch.no_grad(), Follower(scores.device.type) as seen:
        found = tile.gradients(scores, torch.ones_like(scores).transpose(1, 2)) if backward else tile(scores)
    del found
    return seen.peak


def _of_mask(mask: BlockRule, sides: tuple[int, int]) -> int:
    """Bytes per element."""
    with torch.no_grad(), Follower(mask.device.type) as seen:
        keep: Tensor = mask.asked(0, 0, *(torch.arange(side, device=mask.device) for side in sides))
    del keep
    return -(-seen.peak // (sides[0] * sides[1]))
