"""Which geometries the sweep tries in place of a variant's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pascal_attn_core.fused.code.source import AnyGeometry, Geometry, Variant
from pascal_attn_core.fused.geometry.gradient import GradientGeometry
from pascal_attn_core.fused.geometry.tensor import TensorGeometry

_SCHEDULERS, _REGISTERS_OF_SCHEDULER = 4, 16384  # of a multiprocessor
_MOST_REGISTERS = 255  # of a thread
_THREADS = (64, 256)
_TILE = (8, 128)
_DEPTHS = (4, 8, 12, 16, 24, 32, 40)
_STAGED = (4, 8, 16, 32, 64, 128)
_SHARED_KIB = {"volta": 96, "tensor": 64}
# Registers that are neither scores nor sums: operands, addresses, row statistics.
_OTHERS = 40
# Multiplications of a thread for each step along the reduced dimension: with fewer, shared memory is the limit, with
# more the registers.
_PRODUCT = (32, 64)


@dataclass(frozen=True)
class Candidate(Variant):
    """A variant with other tiles than those of the table."""

    tiles: AnyGeometry = field(kw_only=True)

    @staticmethod
    def of(variant: Variant, tiles: AnyGeometry) -> Candidate:
        return Candidate(variant.kind, variant.head_dim, variant.dtype, variant.mask, variant.padded, tiles=tiles)

    @functools.cached_property
    def geometry(self) -> AnyGeometry:
        return self.tiles

    @functools.cached_property
    def name(self) -> str:
        return f"{self.plain.name} {words(self.tiles)}"

    @property
    def plain(self) -> Variant:
        """The variant, with the tiles of the table."""
        return Variant(self.kind, self.head_dim, self.dtype, self.mask, self.padded)


def fits(candidate: Variant) -> bool:
    """Whether a block of kernels on tensor cores has the shared memory that it needs, and whether the source of 8-bit
    attention takes these tiles."""
    if candidate.kind == "int8":
        return _whole_words(candidate.geometry, candidate.head_dim)
    if not candidate.on_tensor_cores:
        return True
    most = _SHARED_KIB["volta" if candidate.traits.generation == "volta" else "tensor"] << 10
    return candidate.geometry.blocks * (candidate.tile_bytes + candidate.own_bytes) <= most


def _whole_words(tiles: AnyGeometry, head_dim: int) -> bool:
    """The shape that int8_pack.cuh asks of tiles: each thread has whole words of each tile and chunk."""
    assert isinstance(tiles, Geometry)
    of_row, of_column, channels = head_dim // 4, tiles.cols // 4, head_dim // tiles.tx
    pieces, rest = divmod(tiles.cols * of_row, 4 * tiles.threads)
    chunks = of_row // tiles.depth, of_column // tiles.staged
    fours = tiles.rows // tiles.ty, tiles.cols // tiles.tx, channels, tiles.depth, tiles.staged
    whole = [of_row % tiles.depth, of_column % tiles.staged, tiles.ty % 8, tiles.cols % 32, rest]
    return channels <= 8 and all(chunks) and not any([*whole, *(n % 4 for n in fours), *(pieces % n for n in chunks)])


def words(tiles: AnyGeometry) -> str:
    """``"rows 128, cols 64, tx 8, ..."``."""
    return ", ".join(f"{name} {value}" for name, value in vars(tiles).items())


def shapes(variant: Variant) -> list[AnyGeometry]:
    """Tiles and thread grids up to twice and half the variant's own, each with the numbers of blocks that its sums and
    scores leave registers for; on tensor cores, warps and tiles of other sizes. Some cannot be compiled: the source or
    the card's shared memory says which."""
    own = variant.geometry
    if not isinstance(own, Geometry):
        return list(dict.fromkeys([own, *_on_tensor_cores(own)]))
    found: list[AnyGeometry] = [own]
    scales = itertools.product((1, 0.5, 2), repeat=4)
    for row_scale, col_scale, x_scale, y_scale in scales:
        sizes = own.rows * row_scale, own.cols * col_scale, own.tx * x_scale, own.ty * y_scale
        rows, cols, tx, ty = map(int, sizes)
        if sizes == (rows, cols, tx, ty) and _is_sensible(variant, rows, cols, tx, ty):
            blocks = _blocks(variant, rows, cols, tx, ty)
            parts = max(1, min(own.parts, cols // tx // 4))  # each part has whole vectors of a thread's columns
            found += [replace(own, rows=rows, cols=cols, tx=tx, ty=ty, parts=parts, blocks=n) for n in blocks]
    return list(dict.fromkeys(found))


def _on_tensor_cores(own: TensorGeometry | GradientGeometry) -> Iterator[AnyGeometry]:
    sizes = [(n, 3 - blocks) for n, blocks in ((8, 2), (4, 1))]  # one block of 8 warps, or two of 4
    for (warps, blocks), tiles, cols in itertools.product(sizes, (2, 1), (64, 32)):
        sized = replace(own, warps=warps, blocks=blocks, tiles=tiles, cols=cols)
        if isinstance(sized, GradientGeometry):
            yield from (replace(sized, at_once=at_once) for at_once in (16, 32) if at_once <= cols)
        else:
            yield from (replace(sized, counters=counters) for counters in (own.counters, not own.counters))


def details(tiles: AnyGeometry, head_dim: int) -> list[AnyGeometry]:
    """These tiles for kernels of a head_dim with another depth of a chunk, other rows staged at a time, P in other
    parts, another number of blocks, factors read ahead or not; on tensor cores with more or less in registers, and
    other shares rounded by integer arithmetic."""
    if isinstance(tiles, TensorGeometry):
        kept = [max(1, tiles.in_registers + more) for more in (-3, -2, -1, 1, 2, 3)] if tiles.in_registers else []
        found = [*({"in_registers": n} for n in kept), *({"integer_packed": n} for n in range(5))]
        return [other for change in found if (other := replace(tiles, **change)) != tiles]
    if isinstance(tiles, GradientGeometry):
        (x, xx), steps = tiles.in_registers, (-2, 0, 2)
        pairs = [(max(0, x + a), max(0, xx + b)) for a, b in itertools.product(steps, steps)]
        return [replace(tiles, in_registers=pair) for pair in dict.fromkeys(pairs) if pair != tiles.in_registers]
    return list(dict.fromkeys(_details(tiles, head_dim)))


def _details(tiles: Geometry, head_dim: int) -> Iterator[Geometry]:
    depths = {head_dim, *(depth for depth in _DEPTHS if head_dim % depth == 0)}
    yield from (replace(tiles, depth=depth) for depth in _neighbours(depths, tiles.depth))
    staged_rows = (staged for staged in _STAGED if staged <= max(tiles.rows, tiles.cols))
    yield from (replace(tiles, staged=staged) for staged in _neighbours(staged_rows, tiles.staged))
    for parts in (1, 2, 4):
        if parts != tiles.parts:
            yield replace(tiles, parts=parts)
    for blocks in (tiles.blocks - 1, tiles.blocks + 1):
        if blocks > 0:
            yield replace(tiles, blocks=blocks)
    yield replace(tiles, ahead=not tiles.ahead)


def _neighbours(numbers: Iterable[int], number: int) -> list[int]:
    """The next smaller and the next larger one, as far as there are."""
    ordered = sorted({*numbers, number})
    at = ordered.index(number)
    return ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2]


def _is_sensible(variant: Variant, rows: int, cols: int, tx: int, ty: int) -> bool:
    own = variant.geometry
    assert isinstance(own, Geometry)
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
