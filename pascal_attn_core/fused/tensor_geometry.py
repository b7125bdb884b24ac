"""Sizes of the tiles of the kernels on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TensorGeometry:
    """See the head of ``tensor_call.cuh``.

    Attributes:
        warps: of a block; tiles: of 16 query rows, per warp.
        cols: keys of a tile.
        in_registers: 16-byte columns of Q that stay there; 0 = all.
        blocks: that shall fit a multiprocessor.
        counters: warps wait for each other's counters, not at a barrier.
        integer_packed: of four tiles of 8 keys, those whose probabilities are rounded by integer arithmetic.
        bounds: the range of tiles within the band is read from shared memory for each tile: listed blocks only.
    """

    warps: int = 8
    tiles: int = 2
    cols: int = 64
    in_registers: int = 0
    blocks: int = 1
    counters: bool = False
    integer_packed: int = 0
    bounds: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps

    @property
    def own_bytes(self) -> int:
        """Of counters and bounds, in shared memory beside the tiles."""
        return (8 * self.warps if self.counters else 0) + (8 if self.bounds else 0)

    def tile_bytes(self, head_dim: int) -> int:
        """SMEM_BYTES of ``tensor_tiles.cuh``."""
        chunks, kept = head_dim // 8, self._kept(head_dim)
        moving = max(4 * self.cols * _pitch(chunks), self.rows * _pitch(min(kept, 8)))
        return moving + (self.rows * _pitch(chunks - kept) if kept < chunks else 0)

    def macros(self, head_dim: int) -> dict[str, object]:
        return {
            **({"PA_BOUNDS": 1} if self.bounds else {}),
            "PA_WARPS": self.warps,
            "PA_MT": self.tiles,
            "PA_BC": self.cols,
            "PA_QREG": self._kept(head_dim),
            "PA_COUNTERS": int(self.counters),
            "PA_MINB": self.blocks,
            "PA_INTEGER_PACKED": self.integer_packed,
        }

    def _kept(self, head_dim: int) -> int:
        return min(self.in_registers or head_dim // 8, head_dim // 8)


def _pitch(pieces: int) -> int:
    """PANEL_PITCH of ``tensor_lanes.cuh``: bytes of a row of so many 16-byte pieces in shared memory."""
    return 16 * pieces


# Two tiles of 16 rows per warp, so that each block of K or V that is read serves two products. What ptxas makes of one
# geometry or another is no smooth function: these are the fastest by tools/tensor_model.py of those that do not spill.
_PAIR_OF_BLOCKS = TensorGeometry(warps=4, cols=32, blocks=2)
_TURING = {
    32: replace(_PAIR_OF_BLOCKS, cols=64, integer_packed=4),
    40: replace(_PAIR_OF_BLOCKS, cols=64, counters=True, integer_packed=4),
    64: TensorGeometry(in_registers=4, counters=True, integer_packed=3),
    80: replace(_PAIR_OF_BLOCKS, integer_packed=2),
    96: replace(_PAIR_OF_BLOCKS, in_registers=9, integer_packed=4),
    128: TensorGeometry(cols=32, in_registers=9, counters=True, integer_packed=3),
    256: TensorGeometry(tiles=1, cols=32, integer_packed=3),
}
TENSOR_HEAD_DIMS = tuple(_TURING)
FLOAT_MASK_HEAD_DIM = 128  # up to which numbers can be added to the scores: beyond there is no register left for them
EVEN_HEAD_DIM = 128  # up to which the blocks of a launch can be listed, without such masks
# Masks take registers.
_TURING_BOOL = {
    **_TURING,
    40: TensorGeometry(in_registers=4, counters=True, integer_packed=4),
    64: replace(_TURING[64], in_registers=6),
    80: replace(_PAIR_OF_BLOCKS, in_registers=9, counters=True, integer_packed=3),
    96: replace(_PAIR_OF_BLOCKS, counters=True, integer_packed=4),
    128: TensorGeometry(cols=32, in_registers=10, integer_packed=4),
    256: replace(_TURING[256], integer_packed=4),
}
_TURING_FLOAT = {
    32: TensorGeometry(counters=True, integer_packed=3),
    40: TensorGeometry(counters=True, integer_packed=4),
    64: TensorGeometry(counters=True),
    80: _PAIR_OF_BLOCKS,
    96: TensorGeometry(cols=32, in_registers=4, counters=True, integer_packed=3),
    128: TensorGeometry(cols=32, in_registers=8),
}
_TURING_PADDED = {**_TURING, 96: _TURING_FLOAT[96], 128: TensorGeometry(cols=32, in_registers=9)}
_TURING_PACKED = {**_TURING_PADDED, 80: _PAIR_OF_BLOCKS, 128: TensorGeometry(cols=32, in_registers=8)}
_TURING_PACKED_PADDED = {**_TURING_PACKED, 128: TensorGeometry(cols=32, in_registers=9)}
_TURING_SMALL = {
    **dict.fromkeys((32, 40, 64, 80, 96, 128), TensorGeometry(warps=4, tiles=1, cols=32, blocks=2)),
    256: TensorGeometry(tiles=1, cols=32),
}
# Where the geometry with counters spills without them.
_TURING_BARRIER = {
    96: TensorGeometry(cols=32, in_registers=3, integer_packed=3),
    128: TensorGeometry(cols=32, in_registers=11, integer_packed=3),
}
# Blocks that are listed know their tile from memory, not from uniform registers: the fastest of those that then do not
# spill.
_TURING_EVEN = {
    32: replace(_PAIR_OF_BLOCKS, cols=64, integer_packed=4),
    40: replace(_PAIR_OF_BLOCKS, cols=64, in_registers=4, counters=True, integer_packed=4),
    64: _TURING[64],
    80: replace(_PAIR_OF_BLOCKS, integer_packed=4, bounds=True),
    96: replace(_PAIR_OF_BLOCKS, in_registers=9, integer_packed=3),
    128: TensorGeometry(cols=32, in_registers=11, counters=True, integer_packed=4, bounds=True),
}
_TURING_EVEN_PADDED = {
    32: _TURING_EVEN[32],
    40: replace(_TURING_EVEN[40], integer_packed=3),
    64: TensorGeometry(in_registers=3, counters=True, integer_packed=4),
    80: replace(_PAIR_OF_BLOCKS, integer_packed=4),
    96: TensorGeometry(cols=32, in_registers=6, counters=True, integer_packed=2),
    128: TensorGeometry(cols=32, in_registers=11, integer_packed=4, bounds=True),
}
_TURING_EVEN_BOOL = {
    32: _TURING_BOOL[32],
    40: _TURING_BOOL[40],
    64: TensorGeometry(in_registers=5, counters=True, integer_packed=4),
    80: replace(_TURING_BOOL[80], integer_packed=4),
    96: replace(_TURING_BOOL[96], bounds=True),
    128: TensorGeometry(cols=32, in_registers=11, integer_packed=4),
}
_TURING_EVEN_BOOL_PADDED = {
    **_TURING_EVEN_BOOL,
    96: TensorGeometry(cols=32, in_registers=4, counters=True, integer_packed=2, bounds=True),
}
_VOLTA = {
    32: TensorGeometry(integer_packed=2),
    64: TensorGeometry(in_registers=3, integer_packed=2),
    80: TensorGeometry(in_registers=1, integer_packed=2),
    96: TensorGeometry(in_registers=2, integer_packed=4),
    128: TensorGeometry(cols=32, in_registers=1, integer_packed=2),
}
VOLTA_HEAD_DIMS = tuple(_VOLTA)
_VOLTA_TIGHT = {
    32: TensorGeometry(cols=32, integer_packed=2),
    64: TensorGeometry(cols=32, in_registers=4, integer_packed=2),
    80: TensorGeometry(cols=32, in_registers=4, integer_packed=2),
    96: TensorGeometry(cols=32, in_registers=2, integer_packed=2),
    128: TensorGeometry(cols=32, in_registers=1),
}
_VOLTA_EVEN = {**_VOLTA, 96: TensorGeometry(in_registers=1, integer_packed=2)}
_VOLTA_EVEN_BOOL = {**_VOLTA_TIGHT, 128: TensorGeometry(cols=32, in_registers=1, integer_packed=2)}
_VOLTA_FLOAT = {**_VOLTA_TIGHT, 128: TensorGeometry(tiles=1, cols=32, in_registers=8)}
_VOLTA_SMALL = {
    **dict.fromkeys((32, 64, 80, 96), TensorGeometry(warps=4, tiles=1, cols=32, blocks=2)),
    128: TensorGeometry(warps=4, tiles=1, cols=32, in_registers=8, blocks=2),
}
TENSOR_TABLES = {
    "tensor": _TURING,
    "tensor bool": _TURING_BOOL,
    "tensor float": _TURING_FLOAT,
    "tensor padded": _TURING_PADDED,
    "tensor packed": _TURING_PACKED,
    "tensor packed float": {**_TURING_FLOAT, 80: _PAIR_OF_BLOCKS},
    "tensor packed padded": _TURING_PACKED_PADDED,
    "tensor small": _TURING_SMALL,
    "tensor even": _TURING_EVEN,
    "tensor even padded": _TURING_EVEN_PADDED,
    "tensor even bool": _TURING_EVEN_BOOL,
    "tensor even bool padded": _TURING_EVEN_BOOL_PADDED,
    "tensor barrier": _TURING_BARRIER,
    "volta": _VOLTA,
    **dict.fromkeys(("volta bool", "volta padded", "volta packed"), _VOLTA_TIGHT),
    **dict.fromkeys(("volta float", "volta packed float"), _VOLTA_FLOAT),
    "volta small": _VOLTA_SMALL,
    "volta even": _VOLTA_EVEN,
    "volta even padded": _VOLTA_TIGHT,
    "volta even bool": _VOLTA_EVEN_BOOL,
}


def tensor_geometry(kind: str, head_dim: int, mask: str, *, padded: bool) -> TensorGeometry:
    """Of the kernel of this kind, one of those that are named after a generation."""
    generation, _, suffix = kind.partition("_")
    if suffix == "barrier":
        own = tensor_geometry(generation, head_dim, mask, padded=padded)
        return _TURING_BARRIER.get(head_dim) or replace(own, counters=False)
    last = ("padded" if padded else "") if mask == "none" else mask
    both = f"{mask} padded" if padded else last
    names = (
        " ".join(filter(None, words))
        for words in ((generation, suffix, both), (generation, suffix, last), (generation, suffix), (generation, last))
    )
    return next((TENSOR_TABLES[name] for name in names if name in TENSOR_TABLES), TENSOR_TABLES[generation])[head_dim]
