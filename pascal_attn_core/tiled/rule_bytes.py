"""How much memory the caller's own functions take (``score_mod`` and ``mask_mod`` of FlexAttention, the rule of a
``LazyMask``). It cannot be known from outside, so it is read off a small tile."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall
from ..call.flex_rules import BlockRule, ScoreRule, ScoreTile, referred, state_of, tensors_read
from ..call.lazy_mask import LazyMask
from ..observe.memory import Follower

_SIDE = 32  # queries and keys of the small tile
_HEADS = 16
_MOST_KINDS = 64  # of calls that are remembered for a function


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
    sides, heads = (min(_SIDE, call.seq_len_q), min(_SIDE, call.seq_len_kv)), min(_HEADS, call.num_heads)
    if call.score_rule is not None and not call.is_empty:
        rule = call.score_rule
        kind = backward, call.query.device.type, call.sums_dtype, heads, *sides
        score, pair = _once(rule.score_mod, rule.tensors, kind, lambda: _of_scores(rule, heads, sides, backward))
    if isinstance(call.attn_mask, BlockRule) and not call.is_empty:
        mask = call.attn_mask
        place = torch.zeros((), dtype=torch.int64, device=mask.device)
        read = tensors_read(mask.rule, *[place] * 4)[0] if state_of(mask.rule) is None else []
        asked = _once(mask.rule, read, ("mask", mask.device.type, *sides), lambda: bytes_asked(mask.asked, mask.device))
        # The part of the mask that is written for a tile: once, or for each head.
        score, pair = (score + 1, pair) if mask.by_head else (score, pair + 1)
        kept = mask.kept_bytes
    elif isinstance(call.attn_mask, LazyMask) and not call.is_empty:
        lazy = call.attn_mask
        tile = "lazy", lazy.device.type, lazy.dtype, heads, *sides, *(size == 1 for size in lazy.shape)
        more = _once(lazy.rule, lazy.tensors, tile, lambda: _split(functools.partial(_of_tile, lazy), heads, sides))
        score, pair = score + more[0], pair + more[1]
    return RuleBytes(score, pair, asked, kept) if score or pair else NO_RULES


def _once(function: Any, read: Sequence[Tensor], kind: tuple, find: Callable[[], Any]) -> Any:
    """The result of ``find``, remembered for a function, or for a method and its object, as long as the numbers that
    it refers to and the shapes of the tensors that it reads are the same."""
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    values = [*getattr(owner, "__dict__", {}).values()]
    try:
        values += referred(function) if isinstance(function, FunctionType) else []
        known = _known.setdefault(function, {})
    except (TypeError, ValueError):  # it cannot be weakly referenced, or refers to what is not there yet
        return find()
    numbers = tuple(value for value in values if type(value) in (bool, int, float))
    kind = (*kind, id(owner), numbers, *(t.shape for t in read))
    if kind not in known:
        if len(known) == _MOST_KINDS:
            known.clear()
        known[kind] = find()
    return known[kind]


def _of_scores(rule: ScoreRule, heads: int, sides: tuple[int, int], backward: bool) -> tuple[int, int]:
    """(bytes per score, bytes per query and key) of a score rule."""
    works = (_in_graph, _backward) if backward else (_forward,)
    found = [_split(functools.partial(_peak, rule, work), heads, sides) for work in works]
    return max(score for score, _ in found), max(pair for _, pair in found)


def _split(peak: Callable[[int, tuple[int, int]], int], most: int, sides: tuple[int, int]) -> tuple[int, int]:
    """(bytes per score, bytes per query and key) of a rule, from its peaks for tiles of some heads and of half the
    queries.

    A rule first computes what depends on query and key only, then what depends on the head. The larger of both counts,
    so the peak bends upwards with the number of heads: a line with the slope of its end lies nowhere below it. Bytes
    that are the same for every tile, such as the dense gradient of a table, no tile can reduce: they do not count.
    """
    fewer = 1 if most < _HEADS else most // 2
    half = (sides[0] // 2, sides[1]) if sides[0] > 1 else (1, sides[1] // 2)
    size, less = sides[0] * sides[1], half[0] * half[1]
    one, few, many = (peak(heads, sides) for heads in (1, fewer, most))
    fewer_queries = peak(1, half) if less else 0
    score = -(-(many - few) // (size * (most - fewer))) if most > fewer else 0
    return max(0, score), max(0, -(-(one - fewer_queries) // (size - less)) - score)


def _forward(tile: ScoreTile, scores: Tensor) -> Any:
    return tile(scores)


def _in_graph(tile: ScoreTile, scores: Tensor) -> Any:
    with torch.enable_grad():
        return tile(scores.requires_grad_().clone())


def _backward(tile: ScoreTile, scores: Tensor) -> Any:
    sums = [torch.zeros_like(t) for t in tile.rule.captured]
    return sums, tile.add_gradients(scores, torch.ones_like(scores).transpose(1, 2), sums)


def _of_tile(mask: LazyMask, heads: int, sides: tuple[int, int]) -> int:
    with torch.no_grad(), Follower(mask.device.type) as seen:
        found = mask.tile(0, (0, heads), (0, sides[0]), (0, sides[1]))
    del found
    return seen.peak


def _peak(rule: ScoreRule, work: Callable[[ScoreTile, Tensor], Any], heads: int, sides: tuple[int, int]) -> int:
    scores = rule.like.new_zeros(heads, sides[0], 1, sides[1])
    tile = ScoreTile(rule, 0, (0, heads), (0, sides[0]), (0, sides[1]))
    with torch.no_grad(), Follower(scores.device.type) as seen:
        found = work(tile, scores)
    del found
    return seen.peak


def bytes_asked(asked: Callable[..., Tensor], device: torch.device) -> int:
    """Bytes that a mask's function allocates for each element, its result among them."""
    with torch.no_grad(), Follower(device.type) as seen:
        keep = asked(0, 0, *[torch.zeros(_SIDE, dtype=torch.int64, device=device)] * 2)
    del keep
    return -(-seen.peak // _SIDE**2)
