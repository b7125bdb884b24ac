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
        buffers: places for K and V.
        blocks: that shall fit a multiprocessor.
        counters: warps wait for each other's counters, not at a barrier.
    """

    warps: int = 8
    tiles: int = 2
    cols: int = 64
    in_registers: int = 0
    buffers: int = 2
    blocks: int = 1
    counters: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps

    def tile_bytes(self, head_dim: int) -> int:
        """SMEM_BYTES of ``tensor_tiles.cuh``."""
        chunks, kept = head_dim // 8, self._kept(head_dim)
        moving = max(2 * self.buffers * self.cols * _pitch(chunks), self.rows * _pitch(min(kept, 8)))
        return moving + (self.rows * _pitch(chunks - kept) if kept < chunks else 0)

    def macros(self, head_dim: int) -> dict[str, object]:
        return {
            "PA_WARPS": self.warps,
            "PA_MT": self.tiles,
            "PA_BC": self.cols,
            "PA_QREG": self._kept(head_dim),
            "PA_BUFFERS": self.buffers,
            "PA_COUNTERS": int(self.counters),
            "PA_MINB": self.blocks,
        }

    def _kept(self, head_dim: int) -> int:
        return min(self.in_registers or head_dim // 8, head_dim // 8)


def _pitch(pieces: int) -> int:
    """PANEL_PITCH of ``tensor_tiles.cuh``: bytes of a row of so many 16-byte pieces in shared memory."""
    return 16 * (pieces if pieces % 8 == 0 or pieces == 4 else pieces | 1)


_WIDE = TensorGeometry()
# Two tiles of 16 rows per warp, so that each block of K or V that is read serves two products.
_TURING = {
    **dict.fromkeys((32, 40), _WIDE),
    **dict.fromkeys((64, 80), TensorGeometry(counters=True)),
    96: TensorGeometry(cols=32, in_registers=4, counters=True),
    128: TensorGeometry(cols=32, in_registers=9, counters=True),
    256: TensorGeometry(tiles=1, cols=32),
}
TENSOR_HEAD_DIMS = tuple(_TURING)
# Columns behind head_dim, masks, and sequences whose lengths lie in memory take registers.
_TURING_TIGHT = {
    **_TURING,
    80: TensorGeometry(cols=32, counters=True),
    128: TensorGeometry(tiles=1, cols=32, counters=True),
    256: TensorGeometry(tiles=1, cols=32, in_registers=16, warps=4),
}
_TURING_SMALL = {
    **dict.fromkeys((32, 40, 64, 80, 96, 128), TensorGeometry(warps=4, tiles=1, cols=32, blocks=2)),
    256: TensorGeometry(warps=4, tiles=1, cols=32),
}
_VOLTA = {
    **dict.fromkeys((32, 64, 80), TensorGeometry(cols=32)),
    96: TensorGeometry(cols=32, in_registers=8),
    128: TensorGeometry(cols=32, in_registers=6),
}
VOLTA_HEAD_DIMS = tuple(_VOLTA)
_VOLTA_TIGHT = _VOLTA
_VOLTA_SMALL = {dim: replace(g, warps=2, blocks=2) for dim, g in _VOLTA.items()}
TENSOR_TABLES = (_TURING, _TURING_TIGHT, _TURING_SMALL, _VOLTA, _VOLTA_TIGHT, _VOLTA_SMALL)


def tensor_geometry(kind: str, head_dim: int, mask: str, *, padded: bool) -> TensorGeometry:
    """Of the kernel of this kind, one of those that are named after a generation."""
    generation, _, suffix = kind.partition("_")
    plain, tight, small = TENSOR_TABLES[:3] if generation == "tensor" else TENSOR_TABLES[3:]
    if suffix == "small":
        return small[head_dim]
    return (tight if padded or mask != "none" or suffix == "packed" else plain)[head_dim]
