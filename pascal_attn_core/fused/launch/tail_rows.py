"""The last rows of a call on AMD cards. Blocks of one size run in waves, as many at a time as the card holds. The last
wave often leaves most of the card idle. Its rows, the same number from every head, are therefore split along the keys:
several blocks compute partial results of one row, which are then merged."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from ...call import AttentionCall
from ..code.source import Variant
from ..geometry.amd import AmdGeometry, blocks_of_unit

MAX_RANGES = 16
MAX_PART_BYTES = 16 << 20  # that the parts may take before they are joined
# What a block costs beside its tiles of keys, and what the two further launches cost, in tiles of a full unit.
_START, _LAUNCHES = 0.5, 1.0
# A unit with one of r blocks takes this share of the time of r, and linearly more with more. tools/models/amd.py finds
# 0.59 for one of two on gfx906, and 0.38, 0.57 and 0.77 for one, two and three of four on gfx1030.
_ALONE = 0.2
# Multiply-adds of float16 in the time in which memory gives a byte, by the figures of an MI50 (26.5 TFLOP/s, 1 TB/s).
_PER_BYTE = 13
_WORTH = 0.98  # of the time without ranges


class TailRows(NamedTuple):
    """The rows of every head from ``first`` on are computed by ``variant`` with the keys in ``ranges`` ranges."""

    variant: Variant
    first: int
    ranges: int

    def part_bytes(self, call: AttentionCall) -> int:
        """Memory for the parts of a call's last rows, until they are joined."""
        rows = call.batch_size * call.num_heads * (call.seq_len_q - self.first)
        return self.ranges * rows * _row_bytes(call)

    def calls(self, call: AttentionCall) -> tuple[AttentionCall, AttentionCall]:
        """The rows before ``first``, and those from there on, as calls without a band."""
        query, first = call.query, self.first
        return (
            replace(call, query=query[..., :first, :], seq_len_q=first),
            replace(call, query=query[..., first:, :], seq_len_q=call.seq_len_q - first),
        )


def tail_rows(call: AttentionCall, whole: Variant, ranges: Variant, units: int) -> TailRows | None:
    """The rows of a call that should be computed with their keys in ranges, if any: by ``ranges``, the others by
    ``whole``. ``units``: compute units of the device, of RDNA workgroup processors."""
    if whole.kind != "forward" or not ranges.exists or call.has_band:
        return None
    geometry = whole.geometry
    assert isinstance(geometry, AmdGeometry)
    places = units * blocks_of_unit(whole.arch, geometry)
    heads, row_bytes = call.batch_size * call.num_heads, _row_bytes(call)
    found = _cheapest(
        heads, -(-call.seq_len_q // geometry.rows), -(-call.seq_len_kv // geometry.cols), units, places, geometry,
        row_bytes,
    )  # fmt: skip
    return None if found is None else TailRows(ranges, found[0] * geometry.rows, found[1])


def _row_bytes(call: AttentionCall) -> int:
    """Bytes of a row in a part: its sums, maximum and sum of probabilities in float32."""
    return 4 * (call.head_dim_v + 2)


@functools.lru_cache(maxsize=1024)
def _cheapest(
    heads: int, row_tiles: int, key_tiles: int, units: int, places: int, geometry: AmdGeometry, row_bytes: int
) -> tuple[int, int] | None:
    """(tiles of rows of each head that are computed as ever, ranges of keys of the others), or None."""

    def time(blocks: int, tiles: int) -> float:
        """The time of blocks that have ``tiles`` tiles of keys each, in tiles of a unit that is full."""
        rounds, rest = divmod(blocks, places)
        last = _ALONE + (1 - _ALONE) * -(-rest // units) * units / places if rest else 0.0
        return (rounds + last) * (tiles + _START)

    best, chosen = _WORTH * time(heads * row_tiles, key_tiles), None
    for taken in range(1, min(row_tiles - 1, places // heads + 1) + 1):
        as_ever = time(heads * (row_tiles - taken), key_tiles) + _LAUNCHES
        for ranges in range(2, min(MAX_RANGES, key_tiles // 2) + 1):
            blocks, tiles = heads * taken * ranges, -(-key_tiles // ranges)
            part_bytes = blocks * geometry.rows * row_bytes
            if part_bytes > MAX_PART_BYTES or (ranges - 1) * tiles >= key_tiles:
                continue
            joining = 2 * part_bytes * _PER_BYTE / (places * geometry.rows * geometry.cols * row_bytes / 2)
            cost = as_ever + time(blocks, tiles) + joining
            if cost < best:
                best, chosen = cost, (row_tiles - taken, ranges)
    return chosen
