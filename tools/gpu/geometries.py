"""Which geometries the sweep tries in place of a variant's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pascal_attn_core.fused.source import Geometry, Variant

_SCHEDULERS, _REGISTERS_OF_SCHEDULER = 4, 16384  # of a multiprocessor
_MOST_REGISTERS = 255  # of a thread
_THREADS = (64, 256)
_TILE = (8, 128)
_CHUNKS = (4, 8, 16, 32)
# Registers that are neither scores nor sums: operands, addresses, row statistics.
_OTHERS = 40
# Multiplications of a thread for each step along the reduced dimension: with fewer, shared memory is the limit, with
# more the registers.
_PRODUCT = (32, 64)


@dataclass(frozen=True)
class Candidate(Variant):
    """A variant with other tiles than those of the table."""

    tiles: Geometry = field(kw_only=True)

    @staticmethod
    def of(variant: Variant, tiles: Geometry) -> Candidate:
        return Candidate(variant.kind, variant.head_dim, variant.dtype, variant.mask, variant.padded, tiles=tiles)

    @functools.cached_property
    def geometry(self) -> Geometry:
        return self.tiles

    @functools.cached_property
    def name(self) -> str:
        plain = Variant(self.kind, self.head_dim, self.dtype, self.mask, self.padded)
        return f"{plain.name} {words(self.tiles)}"


def words(tiles: Geometry) -> str:
    """``"128x64 by 8x16, chunks 16/16, P in 2, 2 blocks"``."""
    return (
        f"{tiles.rows}x{tiles.cols} by {tiles.tx}x{tiles.ty}, chunks {tiles.depth}/{tiles.staged}, "
        f"P in {tiles.parts}, {tiles.blocks} block{'s'[: tiles.blocks > 1]}"
    )


def shapes(variant: Variant) -> list[Geometry]:
    """Tiles and thread grids up to twice and half the variant's own, each with the numbers of blocks that its sums and
    scores leave registers for. Some cannot be compiled: the source says which."""
    own = variant.geometry
    found = [own]
    scales = itertools.product((1, 0.5, 2), repeat=4)
    for row_scale, col_scale, x_scale, y_scale in scales:
        sizes = own.rows * row_scale, own.cols * col_scale, own.tx * x_scale, own.ty * y_scale
        rows, cols, tx, ty = map(int, sizes)
        if sizes == (rows, cols, tx, ty) and _is_sensible(variant, rows, cols, tx, ty):
            blocks = _blocks(variant, rows, cols, tx, ty)
            parts = max(1, min(own.parts, cols // tx // 4))  # each part has whole vectors of a thread's columns
            found += [replace(own, rows=rows, cols=cols, tx=tx, ty=ty, parts=parts, blocks=n) for n in blocks]
    return list(dict.fromkeys(found))


def details(tiles: Geometry) -> list[Geometry]:
    """These tiles with another depth of a chunk, other rows staged at a time, P in other parts, another number of
    blocks."""
    return list(dict.fromkeys(_details(tiles)))


def _details(tiles: Geometry) -> Iterator[Geometry]:
    for depth in _CHUNKS:
        if depth != tiles.depth and tiles.depth / 2 <= depth <= tiles.depth * 2:
            yield replace(tiles, depth=depth)
    for staged in _CHUNKS:
        if staged != tiles.staged and tiles.staged / 2 <= staged <= tiles.staged * 2:
            yield replace(tiles, staged=staged)
    for parts in (1, 2, 4):
        if parts != tiles.parts:
            yield replace(tiles, parts=parts)
    for blocks in (tiles.blocks - 1, tiles.blocks + 1):
        if blocks > 0:
            yield replace(tiles, blocks=blocks)


def _is_sensible(variant: Variant, rows: int, cols: int, tx: int, ty: int) -> bool:
    own = variant.geometry
    if not _THREADS[0] <= tx * ty <= _THREADS[1] or not all(_TILE[0] <= size <= _TILE[1] for size in (rows, cols)):
        return False
    product = rows // ty * (cols // tx)
    own_product = own.rows // own.ty * (own.cols // own.tx)
    return min(_PRODUCT[0], own_product) <= product <= max(_PRODUCT[1], own_product) and variant.head_dim % tx == 0


def _blocks(variant: Variant, rows: int, cols: int, tx: int, ty: int) -> list[int]:
    """The most blocks on a multiprocessor with the fewest registers for a thread that may suffice for what it keeps,
    and with the next number of registers."""
    kept = rows // ty * (cols // tx + variant.head_dim // tx) + _OTHERS
    most: dict[int, int] = {}  # registers of a thread -> blocks
    for blocks in range(1, 9):
        warps = -(-blocks * tx * ty // 32 // _SCHEDULERS)
        registers = min(_MOST_REGISTERS, _REGISTERS_OF_SCHEDULER // (32 * warps) // 8 * 8)
        if registers >= kept:
            most[registers] = blocks
    return sorted(most.values())[-2:] or [1]
