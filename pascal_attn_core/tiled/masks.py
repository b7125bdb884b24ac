"""Which keys a query may attend to: the causal rule and sliding window (:class:`Band`), and masks read tile by tile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, distinct
from ..call.flex_rules import FULL, SKIPPED, BlockRule, ScoreRule, ScoreTile
from ..call.lazy_mask import LazyMask
from ..machine.device import CPU_LIKE
from .layout import Units, is_padding
from .plan import Walk
from .tiles import Ranges, even_ranges

_DIAGONAL_TOKENS = 128  # a causal block's diagonal is cut into sub-blocks of this many query tokens

# A float32 weight below 2^-150 is zero. A key whose bias lies (60 + 60 + 150) bits below the largest bias of its row
# therefore has weight zero, if both scores are inside +-60 bits. In natural units that is 270 * ln 2 = 187.2, rounded
# up; for float64 the same with 2^-1075.
_SWALLOWS = 16.0  # a bias up to this costs a score no more digits than the scores themselves have lost
NEGLIGIBLE = {torch.float32: 200.0, torch.float64: 840.0}


class Band(NamedTuple):
    """Query i sees keys ``i + offset - left ... i + offset + right``; None = no bound on that side."""

    left: int | None
    right: int | None
    offset: int

    @staticmethod
    def of(call: AttentionCall) -> Band:
        return Band(call.left, call.right, call.offset)

    @property
    def is_everything(self) -> bool:
        return self.left is None and self.right is None

    def key_range(self, q0: int, q1: int, seq_len_kv: int) -> tuple[int, int]:
        """First and one-past-last key that any query of ``q0 ... q1 - 1`` sees; empty if last <= first."""
        first, last = 0, seq_len_kv
        if self.left is not None:
            first = max(0, min(seq_len_kv, q0 + self.offset - self.left))
        if self.right is not None:
            last = max(0, min(seq_len_kv, q1 + self.offset + self.right))
        return first, last

    def diagonals(self, q0: int, q1: int, j0: int, j1: int) -> tuple[int | None, int | None]:
        """(upper, lower) arguments of ``tril_`` and ``triu_`` for one tile; None where that side cuts nothing."""
        upper = lower = None
        if self.right is not None and j1 - 1 > q0 + self.offset + self.right:
            upper = q0 + self.offset + self.right - j0
        if self.left is not None and j0 < q1 - 1 + self.offset - self.left:
            lower = q0 + self.offset - self.left - j0
        return upper, lower


class TileState(Enum):
    """The effect of a mask on one tile."""

    EMPTY = 0  # no query of the tile may look at any of its keys
    FULL = 1  # the mask changes nothing here
    MIXED = 2


class MaskTiles:
    """One mask ``[U, G, L, S]`` (an expanded view), bool (True = takes part) or float (added), read tile by tile.

    ``look``: values may be looked at. A mask that is the same for all rows (key padding) then is, once; others tile by
    tile on a CPU (a GPU would wait every time).
    """

    def __init__(self, mask: Tensor, *, look: bool):
        self.mask = mask
        sizes, strides = mask.shape, mask.stride()
        self.same_for_units = sizes[0] == 1 or strides[0] == 0
        # Looking at a tile costs one pass over it: only where that serves several heads.
        reuse = (sizes[0] if self.same_for_units else 1) * (sizes[1] if strides[1] == 0 else 1)
        self._look_at_keys = look and is_padding(mask)
        self._look_at_tiles = look and mask.device.type in CPU_LIKE and reuse > 1 and not is_padding(mask)
        self._states: dict[tuple[int, ...], TileState] = {}
        self._ranges: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def parts(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> list[Part]:
        """The mask of one tile, ``[u1 - u0, G, q1 - q0, j1 - j0]``, a view."""
        return [Part(0, self.mask[u0:u1, :, q0:q1, j0:j1])]

    def key_range(self, u0: int, u1: int, q0: int = 0, q1: int = 0) -> tuple[int, int]:
        """First and one-past-last key that the mask leaves to any query of these units, whichever queries are at hand.
        Only a mask that is the same for all rows is looked at; for the others the answer is everything."""
        return self._keys(u0, u1)[:2]

    def state(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> TileState:
        """The effect of the mask on one tile of keys within :meth:`key_range`; MIXED where it is not looked at."""
        if self._look_at_keys:
            return TileState.FULL if self._keys(u0, u1)[2] else TileState.MIXED
        if not self._look_at_tiles:
            return TileState.MIXED
        units = (0, 1) if self.same_for_units else (u0, u1)
        key = (*units, q0, q1, j0, j1)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _read(distinct(self.parts(*key)[0].values))
        return state

    def _keys(self, u0: int, u1: int) -> tuple[int, int, bool]:
        """Key range of these units, and whether the mask changes nothing within it."""
        if not self._look_at_keys:
            return 0, self.mask.shape[-1], False
        units = (0, 1) if self.same_for_units else (u0, u1)
        found = self._ranges.get(units)
        if found is None:
            rows = distinct(self.mask[units[0] : units[1], :, :1])
            first, last, full = _key_range(rows.flatten(0, 2))
            if rows.shape[-1] < self.mask.shape[-1]:  # one value for all keys
                last = self.mask.shape[-1] if last else 0
            found = self._ranges[units] = first, last, full
        return found


def _key_range(rows: Tensor) -> tuple[int, int, bool]:
    """First and one-past-last key that any row of a mask ``[N, S]`` takes, and whether all rows take all between."""
    is_bool = rows.dtype == torch.bool
    allowed = (rows if is_bool else rows != -torch.inf).any(dim=0).view(torch.uint8)
    first, last = int(allowed.argmax()), len(allowed) - int(allowed.flip(0).argmax())
    if not allowed[first]:
        return 0, 0, True
    inside = rows[:, first:last]
    return first, last, bool((inside if is_bool else inside == 0).all())


def _read(tile: Tensor) -> TileState:
    if tile.dtype == torch.bool:
        low, high = (bool(x) for x in torch.aminmax(tile.view(torch.uint8)))
        return TileState.FULL if low else TileState.MIXED if high else TileState.EMPTY
    least, most = (float(x) for x in torch.aminmax(tile))
    if least == most == 0.0:
        return TileState.FULL
    return TileState.EMPTY if most == -torch.inf else TileState.MIXED


def padding_as_bool(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """A float key-padding mask (0 and something very negative) as a bool mask, for scores known to be bounded.

    Args:
        mask: float ``[U, G, L, S]``.
        dtype: the dtype of the sums, float32 or float64.
    Returns:
        (bool ``[U, G, L, S]`` view, bias ``[U, G, 1]`` view of the keys that take part), or None if the mask differs
        between rows or the keys that matter do not all have the same bias.
    Only for calls without a band, under which a row might see none of those keys. Leaving out a key whose weight is
    zero in ``dtype`` (see NEGLIGIBLE), and a bias that all remaining keys of a row share, changes no output.
    """
    if not is_padding(mask):
        return None
    rows = distinct(mask[:, :, :1]).to(dtype)
    top = rows.amax(dim=-1, keepdim=True)
    keep = (rows >= top - NEGLIGIBLE[dtype]) & (rows != -torch.inf)
    # Where even the largest bias is so low that it swallows the scores' digits, plain arithmetic sees equal scores.
    swallowed = (top.abs() > _SWALLOWS) & (top != -torch.inf)
    if bool(((rows != top) & keep | top.isnan() | swallowed).any()):
        return None
    return keep.expand(mask.shape), top[..., 0].expand(*mask.shape[:2], 1)


class Part(NamedTuple):
    """The values of a mask for some keys of a tile, from ``first`` on: bool or float ``[u, G, tokens, keys]``."""

    first: int
    values: Tensor

    def of(self, scores: Tensor) -> Tensor:
        """The scores of these keys, a view."""
        keys = self.values.shape[-1]
        return scores if keys == scores.shape[-1] else scores[..., self.first : self.first + keys]


class Rule(NamedTuple):
    """The restrictions of one tile.

    upper, lower: arguments of ``tril_`` and ``triu_`` that cut it to the band; masks: the parts of the mask that change
    something, all bool or all float; score: what is made of the tile's scores first. None = nothing.
    """

    upper: int | None = None
    lower: int | None = None
    masks: Sequence[Part] = ()
    score: ScoreTile | None = None


FREE = Rule()  # every query of the tile may look at every key


class Place(NamedTuple):
    """Which query heads of which batch element units are; unit 0 here has the number ``first_unit`` in the call."""

    num_kv_heads: int
    groups: int
    first_unit: int

    def of(self, u0: int, u1: int) -> tuple[int, tuple[int, int]]:
        """(batch element, first and one-past-last query head) of units of one batch element."""
        batch, head = divmod(self.first_unit + u0, self.num_kv_heads)
        return batch, (head * self.groups, (head + u1 - u0) * self.groups)


class LazyTiles:
    """A :class:`LazyMask` as seen by units: tiles ``[u, G, tokens, keys]`` of units of one batch element. ``look``:
    tiles are looked at, so that empty ones are skipped."""

    def __init__(self, mask: LazyMask, place: Place, *, look: bool):
        self.mask, self.place, self.look = mask, place, look
        self._tile: Tensor | None = None

    def key_range(self, u0: int, u1: int, q0: int, q1: int) -> tuple[int, int]:
        """First and one-past-last key that the mask leaves, as far as that is known without asking the rule."""
        return 0, sys.maxsize

    def state(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> TileState:
        """The effect of the mask on one tile; MIXED where it is not looked at."""
        self._tile = None
        self._tile = tile = self._evaluate(u0, u1, q0, q1, j0, j1)
        is_empty = self.look and tile.device.type in CPU_LIKE and _read(distinct(tile)) is TileState.EMPTY
        return TileState.EMPTY if is_empty else TileState.MIXED

    def parts(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> list[Part]:
        """The parts of one tile that the mask changes: expanded views of what the rule says. Asked once."""
        tile, self._tile = self._tile, None
        return [Part(0, self._evaluate(u0, u1, q0, q1, j0, j1) if tile is None else tile)]

    def _evaluate(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> Tensor:
        batch, heads = self.place.of(u0, u1)
        batch %= self.mask.shape[0]  # of several leading dimensions the mask has the last one
        return self.mask.tile(batch, heads, (q0, q1), (j0, j1)).unflatten(0, (u1 - u0, self.place.groups))


class BlockTiles(LazyTiles):
    """A ``BlockMask``: tiles of blocks that it skips, or leaves whole, are known without asking its rule."""

    mask: BlockRule

    def runs(self, u0: int, u1: int, q0: int, q1: int, keys: tuple[int, int]) -> Ranges:
        """The keys, among these, of blocks that are not skipped."""
        batch, heads = self.place.of(u0, u1)
        return self.mask.runs(batch, heads, (q0, q1), keys, besides=SKIPPED)

    def state(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> TileState:
        batch, heads = self.place.of(u0, u1)
        states = set(self.mask.columns(batch, heads, (q0, q1), (j0, j1)))
        return TileState.EMPTY if states == {SKIPPED} else TileState.FULL if states == {FULL} else TileState.MIXED

    def parts(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> list[Part]:
        batch, heads = self.place.of(u0, u1)
        runs = self.mask.runs(batch, heads, (q0, q1), (j0, j1), besides=FULL)
        return [Part(k0 - j0, self._evaluate(u0, u1, q0, q1, k0, k1)) for k0, k1 in runs]


class Rules(NamedTuple):
    """The score rule, the band and one mask together, asked tile by tile.

    mask: bool or float; dtype: that of the sums; place: where the units are, for a score rule.
    """

    band: Band
    mask: MaskTiles | LazyTiles | None
    dtype: torch.dtype
    place: Place | None = None
    score: ScoreRule | None = None

    @staticmethod
    def of(call: AttentionCall, units: Units, *, look: bool) -> Rules:
        """The rules for some units of a call."""
        place = Place(call.num_kv_heads, call.groups, units.first)
        mask: MaskTiles | LazyTiles | None = None
        if isinstance(call.attn_mask, LazyMask):
            kind = BlockTiles if isinstance(call.attn_mask, BlockRule) else LazyTiles
            mask = kind(call.attn_mask, place, look=look)
        elif units.mask is not None:
            mask = MaskTiles(units.mask, look=look)
        return Rules(Band.of(call), mask, call.sums_dtype, place, call.score_rule)

    def key_range(self, u0: int, u1: int, q0: int, q1: int, seq_len_kv: int) -> tuple[int, int]:
        """First and one-past-last key worth visiting for these units and queries."""
        first, last = self.band.key_range(q0, q1, seq_len_kv)
        if self.mask is not None:
            low, high = self.mask.key_range(u0, u1, q0, q1)
            first, last = max(first, low), min(last, high)
        return first, last

    def rule(self, u0: int, u1: int, q0: int, q1: int, j0: int, j1: int) -> Rule | None:
        """The restrictions of this tile, or None if no query may look at any of its keys."""
        upper, lower = self.band.diagonals(q0, q1, j0, j1)
        state = TileState.FULL if self.mask is None else self.mask.state(u0, u1, q0, q1, j0, j1)
        if state is TileState.EMPTY:
            return None
        masks: Sequence[Part] = ()
        if self.mask is not None and state is TileState.MIXED:
            masks = self.mask.parts(u0, u1, q0, q1, j0, j1)
        score = None
        if self.score is not None and self.place is not None:
            score = ScoreTile(self.score, *self.place.of(u0, u1), (q0, q1), (j0, j1))
        return Rule(upper, lower, masks, score)


def block_schedule(
    rules: Rules | None, span: tuple[int, int], q0: int, q1: int, call: AttentionCall, walk: Walk
) -> list[tuple[int, int, Ranges]]:
    """The tiles of one query block, as (first token, last token, key ranges): first those of the whole block, then on a
    CPU those along its causal diagonal, cut into sub-blocks to waste little work on masked scores."""
    if rules is None:
        return [(0, q1 - q0, walk.key_ranges)]
    first, last = rules.key_range(*span, q0, q1, call.seq_len_kv)
    tokens, tiles, right = q1 - q0, walk.tiles, rules.band.right
    if isinstance(rules.mask, BlockTiles):
        runs = rules.mask.runs(*span, q0, q1, (first, last))
        return [(0, tokens, [keys for run in runs for keys in even_ranges(*run, tiles.kv_block)])]
    # A GPU would spend more on launching the sub-blocks than it saves by them.
    if right is None or call.query.device.type not in CPU_LIKE or tokens <= _DIAGONAL_TOKENS:
        return [(0, tokens, even_ranges(first, last, tiles.kv_block))]
    diagonal = q0 + rules.band.offset + right  # the last key that the first query sees
    whole_end = first + max(0, min(last, diagonal + 1) - first) // 64 * 64
    schedule = [(0, tokens, even_ranges(first, whole_end, tiles.kv_block))]
    most_keys = tiles.kv_block if walk.copies_kv else max(1, tiles.q_block * tiles.kv_block // _DIAGONAL_TOKENS)
    for t0 in range(0, tokens, _DIAGONAL_TOKENS) if whole_end < last else ():
        t1 = min(t0 + _DIAGONAL_TOKENS, tokens)
        schedule.append((t0, t1, even_ranges(whole_end, min(last, diagonal + t1), most_keys)))
    return schedule
