"""How long a call takes on one device and on several, from the pace of each: arithmetic, no tensor.

What is copied to another device crosses while the piece before it is computed there, and what comes back while the next
one is, so only the first copy there and the last one back are not hidden, unless the copies take longer than the
computation (a PCIe x1 riser). The copies there and back do not share the link: PCIe carries both ways at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..device import DeviceInfo

# What is assumed of a machine on which nothing was timed.
PEAK_SHARE = 0.55  # of a card's float32 peak that attention reaches
LINK_BYTES = 6e9  # per second each way: PCIe 3.0 x8, pinned
START_MS = 0.3  # of a part away: thread, first launch, last wait
PIECES = 4  # that the part of another device is cut into
WORTH = 0.95  # of the time at home: what takes longer stays there


@dataclass(frozen=True)
class Pace:
    """Milliseconds of one unit (a key/value head, or a block of query rows) of a call on another device.

    Attributes:
        run_ms: computation.
        in_ms, back_ms: copies there and back.
        common_ms: of the copy of what all units need, once a call.
        start_ms: of whatever else a call there costs, once.
    """

    run_ms: float
    in_ms: float = 0.0
    back_ms: float = 0.0
    common_ms: float = 0.0
    start_ms: float = 0.0


class Load(NamedTuple):
    """What a unit of a call is made of: float32 operations, bytes there, bytes back; and bytes that all units need."""

    flops: float
    in_bytes: int
    back_bytes: int
    common_bytes: int = 0


def cut_pieces(units: int, pieces: int = PIECES) -> list[int]:
    """Units of each piece, the sizes as equal as can be; never more pieces than units."""
    count = max(1, min(pieces, units))
    return [units // count + (i < units % count) for i in range(count)]


def time_away(pace: Pace, pieces: Sequence[int]) -> float:
    """Milliseconds until the results of all pieces are at home: what :class:`.errand.Errand` puts into its lanes, each
    lane in order. The host gives out a piece when the one before the last is back."""
    if not pieces:
        return 0.0
    issued = pace.start_ms
    received = issued + pace.common_ms + pieces[0] * pace.in_ms
    computed = returned = before = issued
    for number, units in enumerate(pieces):
        arrived = received
        if number + 1 < len(pieces):
            received = max(received, issued) + pieces[number + 1] * pace.in_ms
        computed = max(arrived, computed, issued) + units * pace.run_ms
        before, returned = returned, max(computed, returned) + units * pace.back_ms
        if number:
            issued = max(issued, before)
    return returned


def shared_ms(home_ms: float, paces: Sequence[Pace], counts: Sequence[int]) -> float:
    """Milliseconds of a call of which ``counts[0]`` units stay at home and ``counts[1 + i]`` go to the device of
    ``paces[i]``; ``home_ms`` is that of one unit at home."""
    away = (time_away(pace, cut_pieces(units)) for pace, units in zip(paces, counts[1:]) if units)
    return max([counts[0] * home_ms, *away])


@functools.lru_cache(maxsize=4096)
def best_counts(units: int, home_ms: float, paces: tuple[Pace, ...]) -> tuple[int, ...]:
    """How many units each device takes, home first, so that the last one is done as early as can be. Home keeps one at
    least: its memory is where the results are."""
    counts = [1] + [0] * len(paces)
    for _ in range(units - 1):
        tried = []
        for place in range(len(counts)):
            more = [count + (place == i) for i, count in enumerate(counts)]
            own = more[0] * home_ms if place == 0 else time_away(paces[place - 1], cut_pieces(more[place]))
            tried.append((own, place))
        counts[min(tried)[1]] += 1
    # One more or less at home may be better: the time away does not grow evenly with the number of pieces.
    options = [counts]
    for place in range(1, len(counts)):
        for step in (-1, 1):
            other = [count + step * ((i == place) - (i == 0)) for i, count in enumerate(counts)]
            if min(other[1:]) >= 0 and other[0] >= 1:
                options.append(other)
    options.append([units] + [0] * len(paces))
    best: list[int] = min(options, key=lambda each: shared_ms(home_ms, paces, each))
    return tuple(best)


def modelled(
    load: Load, home: DeviceInfo, away: Sequence[DeviceInfo], link: float = LINK_BYTES
) -> tuple[float, tuple[Pace, ...]]:
    """(milliseconds of a unit at home, the paces of the others) where nothing was timed: from the cards' float32 peak
    and the bytes that cross at ``link`` per second. Where a card is not known, all are taken to be equally fast and
    copies to cost nothing."""
    if not all(info.fp32_flops for info in (home, *away)):
        return 1.0, tuple(Pace(1.0) for _ in away)

    def run_ms(info: DeviceInfo) -> float:
        return 1e3 * load.flops / (PEAK_SHARE * info.fp32_flops)

    in_ms, back_ms, common_ms = (1e3 * size / link for size in (load.in_bytes, load.back_bytes, load.common_bytes))
    return run_ms(home), tuple(Pace(run_ms(info), in_ms, back_ms, common_ms, START_MS) for info in away)


def modelled_gain(units: int, load: Load, home: DeviceInfo, away: DeviceInfo, link: float = LINK_BYTES) -> float:
    """How many times as fast attention is on both cards as on the first, by :func:`modelled`; 1.0 where it is not."""
    home_ms, paces = modelled(load, home, [away], link)
    counts = best_counts(units, home_ms, paces)
    gain = units * home_ms / shared_ms(home_ms, paces, counts)
    return gain if gain * WORTH >= 1 else 1.0
