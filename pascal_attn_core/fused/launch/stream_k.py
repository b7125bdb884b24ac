"""Even distribution of the tiles of a call over the multiprocessors: which blocks a launch of the kinds ``tensor_even``
and ``volta_even`` has. From sizes alone.

64 equal tiles on 40 multiprocessors are two rounds, of which the second leaves 16 without a block. Here the keys of
some tiles are cut, as McNaughton's rule does it (R. McNaughton, "Scheduling with deadlines and loss functions", 1959):
the tiles fill one place of the card after the other, and a tile goes on in the next place where one is full. Tiles of
different sizes, those of a causal rule, are rather put where they fit, the longest first, and only what is left is cut.
Where there are more of them than a launch can list, the first ones begin, in the order of the heads. Listed blocks that
have most to do are launched first, so that each multiprocessor takes what fits when it is free. No block waits for
another one: whichever is the last of a tile adds the parts (``cuda/tensor_even.cuh``).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..geometry.tensor import MOST_PIECES

_MOST_PARTS, _MOST_SLOTS, _MOST_TILES, _MOST_KEY_TILES = 15, 1 << 12, 1 << 12, 0xFFFF  # that the words of a piece hold
_LEAST = 2  # tiles of keys of a part
# What a part costs, in keys that its block could multiply meanwhile. Writing or reading the sums of a row moves 4 (D +
# 2) bytes, at a fortieth of the 300 GB/s of a T4's memory for each multiprocessor. A key takes 4 D flop, of the 56
# TFLOP/s that the kernel reaches there. So a part costs 190 keys for any D, if nothing stays in the L2 cache.
PART_KEYS = 192
# And a block that begins a further part: its rows of Q are 2 D bytes each, and it waits for its first keys.
START_KEYS = 96


Span = tuple[int, int, int]  # a tile of rows, and the tiles of keys that a piece of it meets: the first, the end


class Piece(NamedTuple):
    """The work of one block.

    Attributes:
        tile: of rows, by its number in the call: batch, head, tile of the head.
        first, end: tiles of the keys that it meets.
        slot: place of the tile's first part in memory; part: its number of ``parts``.
    """

    tile: int
    first: int
    end: int
    slot: int = 0
    part: int = 0
    parts: int = 1

    def words(self, whole: int) -> tuple[int, int]:
        """The piece as ``piece_of`` of ``tensor_call.cuh`` reads it; whole: see :class:`Pieces`."""
        who = self.tile - whole | self.slot << 12 | self.part << 24 | self.parts << 28
        return who, self.first | self.end << 16

    def cost(self, cols: int) -> int:
        """In keys, of which a tile has ``cols``."""
        return _cost(self.first, self.end, self.parts, cols)


def _cost(first: int, end: int, parts: int, cols: int) -> int:
    """The cost of a piece, in keys: more than two parts are written by all and read by the last."""
    keys = (end - first) * cols
    return keys if parts == 1 else keys + PART_KEYS + (START_KEYS if first else 0) + (PART_KEYS if parts > 2 else 0)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The blocks of a launch.

    Attributes:
        whole: blocks that take one tile each, in their order, before those that are listed.
        listed: the others, those first that have most to do.
        keys: that the busiest place multiplies, or could have meanwhile.
    """

    whole: int
    listed: tuple[Piece, ...] = ()
    keys: int = 0

    @functools.cached_property
    def slots(self) -> int:
        """Parts in memory."""
        return sum(piece.parts > 1 for piece in self.listed)

    @property
    def blocks(self) -> int:
        return self.whole + len(self.listed)

    @functools.cached_property
    def listed_tiles(self) -> int:
        """Tiles that the listed blocks work on."""
        return len({piece.tile for piece in self.listed})

    @functools.cached_property
    def words(self) -> ctypes.Array[ctypes.c_uint]:
        """Two of each listed piece, and zeros: as the parameters of a launch hold them."""
        words = itertools.chain.from_iterable(piece.words(self.whole) for piece in self.listed)
        return (ctypes.c_uint * (2 * MOST_PIECES))(*words)


def part_floats(rows: int, head_dim: int) -> int:
    """Float32 numbers of a part of a tile of ``rows`` rows in memory: its sums, and from each of the four threads that
    share a row the row's maximum and that thread's sum of probabilities."""
    return rows * (head_dim + 8)


@functools.lru_cache(maxsize=1024)
def distribute(sizes: tuple[int, ...], units: int, cols: int, places: int) -> Pieces | None:
    """Return the blocks for ``units`` heads, each with row tiles that meet ``sizes`` tiles of ``cols`` keys, on a card
    that holds ``places`` blocks at a time. None: no cut is worth it, or the parameters of a launch do not hold them."""
    number, longest = len(sizes) * units, max(sizes, default=0)
    if number * longest == units * sum(sizes):  # equal ones: all but the last round and what is left over
        whole = max(0, number // places - 1) * places
        before = [whole // places * longest * cols] * places
    else:  # those that cannot be listed begin, and the longest of the others fill up what they leave
        whole = max(0, number + places - MOST_PIECES)
        before = [sizes[tile % len(sizes)] * cols for tile in range(min(whole, _MOST_TILES))]
    tiles = number - whole
    if not 0 < tiles <= MOST_PIECES - places or len(before) == _MOST_TILES or longest > _MOST_KEY_TILES or not longest:
        return None
    listed = [sizes[tile % len(sizes)] for tile in range(whole, number)]
    found = _cut(listed, cols, places)
    if found is None:
        return None
    pieces = [piece._replace(tile=piece.tile + whole) for piece in found]
    keys = busiest(itertools.chain(before, (piece.cost(cols) for piece in pieces)), places)
    return Pieces(whole, tuple(pieces), keys)


def busiest(costs: Iterable[int], places: int) -> int:
    """When the last of these blocks is done: each, in this order, takes the place that is free first."""
    free = [0] * places
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def _cut(sizes: Sequence[int], cols: int, places: int) -> list[Piece] | None:
    """The pieces of these tiles, longest first, for which :func:`busiest` is least of those that were tried; None where
    they are nothing but equal tiles, or cannot be listed."""
    best: tuple[int, list[Span]] | None = None
    for fill in (_one_after_the_other, _whole_ones_first):
        low, high = -(-sum(sizes) * cols // places), (max(sizes) + -(-sum(sizes) // places)) * cols
        while low < high:  # the least that a place may be given, in steps of half a tile of keys
            most = (low + high) // 2
            spans = fill(sizes, cols, places, most)
            if spans is None:
                low = most + max(1, cols // 2)
                continue
            high = most - max(1, cols // 2)
            keys = busiest(_costs(spans, cols), places)
            if best is None or keys < best[0]:
                best = keys, spans
    if best is None:
        return None
    pieces = sorted(_numbered(best[1]), key=lambda piece: -piece.cost(cols))
    slots, parts = sum(piece.parts > 1 for piece in pieces), max(piece.parts for piece in pieces)
    listable = len(pieces) <= MOST_PIECES and slots <= _MOST_SLOTS and parts <= _MOST_PARTS
    return pieces if listable and (slots or min(sizes) < max(sizes)) else None


def _part(left: int, rest: int, first: int, cols: int) -> int:
    """Tiles of keys of a part that begins at ``first`` and leaves some of ``rest`` tiles for another one, in a place
    with ``left`` keys to give; 0: not worth a block."""
    fits = min((left - PART_KEYS - (START_KEYS if first else 0)) // cols, rest - _LEAST)
    return fits if fits >= _LEAST else 0


def _one_after_the_other(sizes: Sequence[int], cols: int, places: int, most: int) -> list[Span] | None:
    """(tile, first, end) of pieces that fill one place after the other with ``most`` keys at most, or None."""
    spans, left, used = [], most, 1
    for tile, size in enumerate(sizes):
        first = 0
        while True:
            whole = (size - first) * cols + (PART_KEYS + START_KEYS if first else 0)
            if whole <= left:
                spans.append((tile, first, size))
                left -= whole
                break
            fits = _part(left, size - first, first, cols)
            if fits:
                spans.append((tile, first, first + fits))
                first += fits
            elif left == most:
                return None  # not even a place of its own is enough
            used, left = used + 1, most
            if used > places:
                return None
    return spans


def _whole_ones_first(sizes: Sequence[int], cols: int, places: int, most: int) -> list[Span] | None:
    """(tile, first, end) of pieces: best fit, longest first. Tiles that fit nowhere are cut, and their parts go to the
    emptiest places."""
    spans, room, to_cut = [], [(most, i) for i in range(places)], []
    for tile in sorted(range(len(sizes)), key=lambda tile: -sizes[tile]):
        at = bisect.bisect_left(room, (sizes[tile] * cols, 0))
        if at == places:
            to_cut.append(tile)
            continue
        left, place = room.pop(at)
        bisect.insort(room, (left - sizes[tile] * cols, place))
        spans.append((tile, 0, sizes[tile]))
    for tile in to_cut:
        first = 0
        while first < sizes[tile]:
            left, place = room.pop()
            whole = (sizes[tile] - first) * cols + PART_KEYS + (START_KEYS if first else 0)
            fits = sizes[tile] - first if whole <= left else _part(left, sizes[tile] - first, first, cols)
            if not fits:
                return None
            spans.append((tile, first, first + fits))
            first += fits
            bisect.insort(room, (left - min(left, fits * cols + PART_KEYS + (START_KEYS if first else 0)), place))
    return spans


def _costs(spans: Sequence[Span], cols: int) -> list[int]:
    """The costs of the pieces of these spans, the highest first."""
    parts = Counter(tile for tile, _, _ in spans)
    return sorted((_cost(first, end, parts[tile], cols) for tile, first, end in spans), reverse=True)


def _numbered(spans: Sequence[Span]) -> list[Piece]:
    """Pieces in the order of their tiles, with the places of their sums in memory."""
    pieces, slot = [], 0
    for tile, group in itertools.groupby(sorted(spans), key=lambda span: span[0]):
        of_tile = list(group)
        is_cut = len(of_tile) > 1
        for part, (_, first, end) in enumerate(of_tile):
            pieces.append(Piece(tile, first, end, slot if is_cut else 0, part, len(of_tile)))
        slot += len(of_tile) if is_cut else 0
    return pieces
