"""Sizes of the tiles of the kernels on plain cores of NVIDIA's."""

from __future__ import annotations

from dataclasses import dataclass

from .tables import Tiles, read_tables
from .traits import traits_of


@dataclass(frozen=True)
class Geometry(Tiles):
    """Sizes of the tiles of kernels on plain cores: see the head of ``common.cuh``.

    Attributes:
        rows, cols: of the tile that stays and of the one that moves; tx, ty: the block's threads.
        depth, staged, parts, ahead: PA_KC, PA_VC, PA_PSPLIT, PA_AHEAD.
        blocks: that shall fit a multiprocessor, or a compute unit.
    """

    named = (
        "PA_BR=rows PA_BC=cols PA_TX=tx PA_TY=ty PA_KC=depth PA_VC=staged PA_PSPLIT=parts PA_MINB=blocks PA_AHEAD=ahead"
    )

    rows: int
    cols: int
    tx: int
    ty: int
    depth: int = 16
    staged: int = 16
    parts: int = 2
    blocks: int = 2
    ahead: bool = False

    @property
    def threads(self) -> int:
        return self.tx * self.ty

    def tile_bytes(self, head_dim: int) -> int:
        """SMEM_TILE of ``product.cuh``."""
        row_buffers = 2 if self.depth < head_dim else 1
        column_buffers = 2 if self.staged < max(self.rows, self.cols) else 1
        rows = row_buffers * self.depth * (self.rows + self.cols)
        cols = self.cols // self.parts * self.rows + column_buffers * self.staged * head_dim
        return 4 * max(rows, cols)


PLAIN_TABLES = read_tables("plain", Geometry)
HEAD_DIMS = tuple(PLAIN_TABLES["forward"])
GRAD_ALL_HEAD_DIMS = tuple(PLAIN_TABLES["grad_all"])
INT8_HEAD_DIMS = tuple(PLAIN_TABLES["int8"])


def plain_geometry(kind: str, head_dim: int, dtype: str, mask: str, *, padded: bool) -> Geometry:
    """The tiles of the kernel of this kind. Masks, padding and float32 take registers: where too few are left, the
    table of smaller tiles holds."""
    wide, float32, is_masked = head_dim >= 112, dtype == "float32", padded or mask != "none"
    tight_mask = (mask == "float" and (float32 or wide)) or (mask == "bool" and float32 and wide)
    if kind == "int8" or traits_of(kind).is_small:
        return PLAIN_TABLES["int8" if kind == "int8" else "split"][head_dim]
    if kind == "grad_all":
        suffix = "-tight" if is_masked else "-bfloat16" if dtype == "bfloat16" else ""
        return PLAIN_TABLES[f"grad_all{suffix}"][head_dim]
    tight = {
        "forward": padded or tight_mask,
        "capped": True,
        "grad_query": float32 and padded and mask == "float",
        "grad_key_value": is_masked if float32 else padded and mask == "float",
    }[kind]
    suffix = "-tight" if tight else "-masked" if is_masked else ""
    return PLAIN_TABLES[("forward" if kind == "capped" else kind) + suffix][head_dim]
