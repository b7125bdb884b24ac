"""Sizes of the tiles of the kernels on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from .tables import Tiles, read_tables

MOST_PIECES = 400  # blocks that the parameters of a launch can list, of which CUDA takes 4 KiB


@dataclass(frozen=True)
class TensorGeometry(Tiles):
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

    named = "PA_WARPS=warps PA_MT=tiles PA_BC=cols PA_COUNTERS=counters PA_MINB=blocks PA_INTEGER_PACKED=integer_packed"

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
        """Shared memory of counters and bounds, beside the tiles."""
        return (8 * self.warps if self.counters else 0) + (8 if self.bounds else 0)

    def tile_bytes(self, head_dim: int) -> int:
        """SMEM_BYTES of ``tensor_tiles.cuh``."""
        chunks, kept = head_dim // 8, self._kept(head_dim)
        moving = max(4 * self._key_or_value_bytes(chunks), self.rows * self.pitch(min(kept, 8)))
        return moving + (self.rows * self.pitch(chunks - kept) if kept < chunks else 0)

    def pitch(self, pieces: int) -> int:
        """PANEL_PITCH of ``tensor_lanes.cuh``: bytes of a row of this many 16-byte pieces in shared memory."""
        return pitch(pieces)

    def _key_or_value_bytes(self, chunks: int) -> int:
        """TILE_BYTES of ``tensor_tiles.cuh``."""
        return self.cols * self.pitch(chunks)

    def macros(self, head_dim: int) -> dict[str, object]:
        bounds: dict[str, object] = {"PA_BOUNDS": 1} if self.bounds else {}
        return {**super().macros(head_dim), **bounds, "PA_QREG": self._kept(head_dim)}

    def _kept(self, head_dim: int) -> int:
        return min(self.in_registers or head_dim // 8, head_dim // 8)


class WmmaGeometry(TensorGeometry):
    """On AMD's matrix units, whose waves are named warps here; ``blocks``: of a workgroup processor of four SIMDs."""

    def pitch(self, pieces: int) -> int:
        return pitch(pieces | 1)

    def _key_or_value_bytes(self, chunks: int) -> int:
        return max(super()._key_or_value_bytes(chunks), 8 * chunks * self.pitch(self.cols // 8))

    def macros(self, head_dim: int) -> dict[str, object]:
        own = {"PA_AMD": 1, "PA_TX": 32, "PA_TY": self.warps, "PA_WAVES": max(1, self.blocks * self.warps // 4)}
        return {**super().macros(head_dim), **own}


def pitch(pieces: int) -> int:
    """PANEL_PITCH of ``tensor_lanes.cuh`` on NVIDIA's cards."""
    return 16 * pieces


TENSOR_TABLES = read_tables("tensor", TensorGeometry)
WMMA_TABLES = read_tables("wmma", WmmaGeometry)
TENSOR_HEAD_DIMS = tuple(TENSOR_TABLES["tensor"])
VOLTA_HEAD_DIMS = tuple(TENSOR_TABLES["volta"])
WMMA_HEAD_DIMS = tuple(WMMA_TABLES["wmma"])
FLOAT_MASK_HEAD_DIM = 128  # up to which numbers can be added to the scores: beyond there is no register left for them
EVEN_HEAD_DIM = 128  # up to which the blocks of a launch can be listed, without such masks


def tensor_geometry(kind: str, head_dim: int, mask: str, *, padded: bool) -> TensorGeometry:
    """The tiles of the kernel of this kind, one of those that are named after a generation."""
    generation, _, suffix = kind.partition("_")
    last = ("padded" if padded else "") if mask == "none" else mask
    both = f"{mask}-padded" if padded else last
    names = (
        "-".join(filter(None, words))
        for words in ((generation, suffix, both), (generation, suffix, last), (generation, suffix), (generation, last))
    )
    tables = WMMA_TABLES if generation == "wmma" else TENSOR_TABLES
    return next(tables[name][head_dim] for name in (*names, generation) if head_dim in tables.get(name, ()))
