"""Sizes of the tiles of the gradient kernels on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientGeometry:
    """See the head of ``tensor_gradient.cuh``.

    Attributes:
        warps: of a block; tiles: of 16 rows, per warp.
        cols: columns of a tile; at_once: of them that are worked on at a time.
        in_registers: 16-byte columns of the two tensors of the rows that stay there, even numbers.
        blocks: that shall fit a multiprocessor.
    """

    tiles: int
    in_registers: tuple[int, int]
    warps: int = 8
    cols: int = 32
    at_once: int = 16
    blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps

    def tile_bytes(self, head_dim: int) -> int:
        """SMEM_BYTES of ``tensor_gradient.cuh``."""
        chunks = head_dim // 8
        passing = [self.rows * _pitch(min(8, kept)) if kept else 0 for kept in self.in_registers]
        left = [self.rows * _pitch(chunks - kept) if kept < chunks else 0 for kept in self.in_registers]
        return max(4 * self.cols * _pitch(chunks), *passing) + sum(left)

    def own_bytes(self, kind: str, mask: str) -> int:
        """Shared memory besides the tiles: numbers of the moving queries, words of the mask, the block's place."""
        stats = 8 * self.cols * (3 if mask == "float" else 2) if "key_value" in kind else 0
        words = 0 if mask == "none" else 2 * 4 * self.rows * self.cols // 32
        return stats + words + 64

    def macros(self, head_dim: int) -> dict[str, object]:
        return {
            "PA_WARPS": self.warps,
            "PA_MT": self.tiles,
            "PA_BC": self.cols,
            "PA_SC": self.at_once,
            "PA_XREG": self.in_registers[0],
            "PA_XXREG": self.in_registers[1],
            "PA_MINB": self.blocks,
        }


def _pitch(pieces: int) -> int:
    """PANEL_PITCH of ``tensor_lanes.cuh``: bytes of a row of so many 16-byte pieces in shared memory."""
    return 16 * pieces


def _whole(head_dim: int, tiles: int, cols: int = 32) -> GradientGeometry:
    return GradientGeometry(tiles, (head_dim // 8, head_dim // 8), cols=cols)


# Two tiles of 16 rows per warp, so that each block that is read serves two products, as far as there are registers.
_QUERY = {
    **{dim: _whole(dim, 2, 64) for dim in (32, 48, 64)},
    80: _whole(80, 2),
    96: GradientGeometry(2, (12, 6)),
    128: _whole(128, 1),
}
_KEY_VALUE = {
    **{dim: _whole(dim, 2, 64) for dim in (32, 48)},
    64: GradientGeometry(2, (4, 2)),
    **{dim: _whole(dim, 1, 64) for dim in (80, 96)},
    128: GradientGeometry(1, (12, 6)),
}
GRADIENT_HEAD_DIMS = tuple(_QUERY)
# A lane holds twice as many operands of the rows: most are read from shared memory, which gives twice as much.
_VOLTA_QUERY = {
    64: GradientGeometry(2, (2, 2), at_once=32),
    **dict.fromkeys((96, 128), GradientGeometry(1, (8, 8), at_once=32)),
}
_VOLTA_QUERY_TIGHT = {**_VOLTA_QUERY, 64: GradientGeometry(2, (4, 0), at_once=32)}
_VOLTA_KEY_VALUE = {
    64: GradientGeometry(2, (0, 2)),
    96: GradientGeometry(1, (8, 4), at_once=32),
    128: GradientGeometry(1, (4, 4), cols=16),
}
_VOLTA_KEY_VALUE_FLOAT_PADDED = {**_VOLTA_KEY_VALUE, 64: GradientGeometry(2, (0, 0))}
_VOLTA_KEY_VALUE_CAPPED = {**_VOLTA_KEY_VALUE, 96: GradientGeometry(1, (4, 4), at_once=32)}
VOLTA_GRADIENT_HEAD_DIMS = tuple(_VOLTA_QUERY)
# Columns behind head_dim, masks, and sequences whose lengths lie in memory take registers, and of a mask a block reads
# no more words than it has threads.
_QUERY_TIGHT = {**_QUERY, **{dim: _whole(dim, 2) for dim in (32, 48, 64)}, 96: _whole(96, 1, 64)}
_KEY_VALUE_TIGHT = {**_KEY_VALUE, **{dim: _whole(dim, 2) for dim in (32, 48)}}
_QUERY_CAPPED = {**_QUERY_TIGHT, 80: _whole(80, 1)}
_KEY_VALUE_PADDED = {**_KEY_VALUE_TIGHT, 128: GradientGeometry(1, (8, 6), cols=16)}
_KEY_VALUE_BOOL = {**_KEY_VALUE_TIGHT, 64: GradientGeometry(2, (4, 4), cols=16)}
_KEY_VALUE_BOOL_PADDED = {**_KEY_VALUE_BOOL, 128: GradientGeometry(1, (8, 10))}
_KEY_VALUE_FLOAT = {
    **_KEY_VALUE_TIGHT,
    64: GradientGeometry(2, (4, 4)),
    128: GradientGeometry(1, (10, 6), cols=16),
}
_KEY_VALUE_PACKED = {**_KEY_VALUE_TIGHT, 64: GradientGeometry(2, (4, 4))}
_KEY_VALUE_PACKED_FLOAT = {**_KEY_VALUE_FLOAT, 64: _whole(64, 1)}
_KEY_VALUE_CAPPED = {
    **_KEY_VALUE_TIGHT,
    64: _whole(64, 1),
    96: GradientGeometry(1, (12, 10)),
    128: GradientGeometry(1, (6, 4), cols=16),
}
GRADIENT_TABLES = (
    *(_VOLTA_QUERY, _VOLTA_QUERY_TIGHT),
    *(_VOLTA_KEY_VALUE, _VOLTA_KEY_VALUE_FLOAT_PADDED, _VOLTA_KEY_VALUE_CAPPED),
    *(_QUERY, _QUERY_TIGHT, _QUERY_CAPPED, _KEY_VALUE, _KEY_VALUE_PADDED, _KEY_VALUE_BOOL, _KEY_VALUE_BOOL_PADDED),
    *(_KEY_VALUE_FLOAT, _KEY_VALUE_PACKED, _KEY_VALUE_PACKED_FLOAT, _KEY_VALUE_CAPPED),
)


def gradient_geometry(kind: str, head_dim: int, mask: str, *, padded: bool) -> GradientGeometry:
    """Of the kernel of this kind, whose name has ``grad`` in it."""
    packed, capped = kind.endswith("packed"), "capped" in kind
    is_tight = padded or packed or capped or mask != "none"
    if kind.startswith("volta"):
        if "key_value" not in kind:
            return (_VOLTA_QUERY_TIGHT if is_tight else _VOLTA_QUERY)[head_dim]
        if capped:
            return _VOLTA_KEY_VALUE_CAPPED[head_dim]
        return (_VOLTA_KEY_VALUE_FLOAT_PADDED if padded and mask == "float" else _VOLTA_KEY_VALUE)[head_dim]
    if "key_value" not in kind:
        return (_QUERY_CAPPED if capped else _QUERY_TIGHT if is_tight else _QUERY)[head_dim]
    if capped:
        return _KEY_VALUE_CAPPED[head_dim]
    if packed:
        return (_KEY_VALUE_PACKED if mask == "none" else _KEY_VALUE_PACKED_FLOAT)[head_dim]
    if mask == "float":
        return _KEY_VALUE_FLOAT[head_dim]
    if mask == "bool":
        return (_KEY_VALUE_BOOL_PADDED if padded else _KEY_VALUE_BOOL)[head_dim]
    return (_KEY_VALUE_PADDED if padded else _KEY_VALUE)[head_dim]


def gradient_head_dims(kind: str) -> tuple[int, ...]:
    """That there are kernels of this kind for."""
    return VOLTA_GRADIENT_HEAD_DIMS if kind.startswith("volta") else GRADIENT_HEAD_DIMS
