"""The CUDA source: text files beside this one, joined into one text per kernel, and the macros of each variant."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent / "cuda"
# Kernel kind -> (files, macros, functions in it). Order of the files matters: each uses those before it.
_KINDS: dict[str, tuple[tuple[str, ...], dict[str, object], tuple[str, ...]]] = {
    "forward": (
        ("common.cuh", "product.cuh", "masks.cuh", "forward.cu"),
        {"PA_SPLIT": 0, "PA_INT8": 0, "PA_FORWARD_NAME": "pa_forward"},
        ("pa_forward",),
    ),
    "split": (
        ("common.cuh", "product.cuh", "masks.cuh", "forward.cu"),
        {"PA_SPLIT": 1, "PA_INT8": 0, "PA_FORWARD_NAME": "pa_forward_split"},
        ("pa_forward_split", "pa_combine"),
    ),
    "grad_query": (
        ("common.cuh", "product.cuh", "masks.cuh", "backward.cuh", "grad_query.cu"),
        {},
        ("pa_delta", "pa_grad_query"),
    ),
    "grad_key_value": (
        ("common.cuh", "product.cuh", "masks.cuh", "backward.cuh", "grad_key_value.cu"),
        {},
        ("pa_grad_key_value",),
    ),
    "int8": (
        ("common.cuh", "product.cuh", "masks.cuh", "int8.cuh", "forward.cu"),
        {"PA_SPLIT": 0, "PA_INT8": 1, "PA_FORWARD_NAME": "pa_forward_int8"},
        ("pa_quantize", "pa_forward_int8"),
    ),
}
KINDS = tuple(_KINDS)
DTYPES = ("float32", "float16", "bfloat16")
MASKS = ("none", "bool", "float")


@dataclass(frozen=True)
class Geometry:
    """Sizes of the tiles: see the head of ``common.cuh``."""

    rows: int
    cols: int
    tx: int
    ty: int
    depth: int = 16
    staged: int = 16
    parts: int = 2
    blocks: int = 2

    @property
    def threads(self) -> int:
        return self.tx * self.ty


_WIDE = Geometry(128, 64, 8, 16)
_HIGH = Geometry(64, 128, 16, 8)
# The most work per byte of shared memory that fits the registers, and what masks and padding leave room for.
_FORWARD = {
    32: _WIDE,
    40: Geometry(128, 64, 8, 16, depth=8),
    48: _WIDE,
    64: _WIDE,
    72: Geometry(128, 64, 8, 16, depth=8),
    80: Geometry(128, 64, 8, 16, depth=8),
    96: _HIGH,
    112: _HIGH,
    128: _HIGH,
    160: Geometry(64, 64, 16, 8, staged=8, parts=1),
    192: Geometry(64, 64, 16, 8, staged=8, parts=1),
    256: Geometry(64, 128, 16, 16, staged=8, blocks=1),
    512: Geometry(64, 64, 16, 16, staged=4, parts=1, blocks=1),
}
_FORWARD_MASKED = {
    **_FORWARD,
    32: Geometry(64, 64, 8, 16, depth=8),
    **dict.fromkeys((48, 64, 80, 96), _HIGH),
    **dict.fromkeys((40, 72), Geometry(64, 64, 8, 16, depth=8)),
}
# Columns behind head_dim, and float32 masks under float32 tensors, take the most registers.
_FORWARD_TIGHT = {**_FORWARD_MASKED, **dict.fromkeys((32, 48, 64, 80, 96, 112, 128), Geometry(64, 64, 16, 8, parts=1))}
# Few query rows: small tiles, many of them.
_SPLIT = {
    **dict.fromkeys((32, 48, 64, 80, 96, 112, 128), Geometry(16, 64, 16, 4, parts=1, blocks=6)),
    **dict.fromkeys((40, 72), Geometry(32, 64, 8, 8, depth=8, parts=1, blocks=4)),
    **dict.fromkeys((160, 192, 256), Geometry(16, 64, 16, 4, staged=8, parts=1, blocks=4)),
    512: Geometry(32, 64, 16, 8, staged=4, parts=1, blocks=2),
}
_GRAD_QUERY = {
    **dict.fromkeys((32, 48, 64, 80, 96), Geometry(64, 64, 16, 8, parts=1)),
    **dict.fromkeys((40, 72), Geometry(64, 64, 8, 16, depth=8)),
    **dict.fromkeys((112, 128), Geometry(64, 64, 16, 8, depth=8, staged=8, parts=1)),
    **dict.fromkeys((160, 192, 256), Geometry(64, 64, 16, 16, staged=8, parts=1, blocks=1)),
}
_GRAD_QUERY_TIGHT = {**_GRAD_QUERY, **dict.fromkeys((112, 128), _GRAD_QUERY[160])}
_GRAD_KEY_VALUE = {
    **dict.fromkeys((32, 48, 64, 80), Geometry(64, 64, 16, 8, parts=1)),
    96: Geometry(64, 64, 16, 8, depth=8, parts=1),
    **dict.fromkeys((40, 72), Geometry(64, 64, 8, 16, depth=8)),
    **dict.fromkeys((112, 128), Geometry(64, 128, 16, 16, blocks=1)),
    **dict.fromkeys((160, 192), Geometry(32, 64, 16, 8, staged=8, parts=1)),
    256: Geometry(64, 64, 16, 16, staged=8, parts=1, blocks=1),
}
_GRAD_KEY_VALUE_TIGHT = {
    **_GRAD_KEY_VALUE,
    **dict.fromkeys((80, 96), Geometry(64, 64, 16, 16, parts=1, blocks=1)),
    256: Geometry(64, 64, 16, 16, staged=4, parts=1, blocks=1),
}
HEAD_DIMS = tuple(_FORWARD)
# Like masked calls; a chunk of 16 words holds 64 elements of a row.
_INT8 = {dim: replace(geometry, depth=16) for dim, geometry in _FORWARD_TIGHT.items()}
_TABLES = (
    *(_FORWARD, _FORWARD_MASKED, _FORWARD_TIGHT, _SPLIT, _INT8),
    *(_GRAD_QUERY, _GRAD_QUERY_TIGHT, _GRAD_KEY_VALUE, _GRAD_KEY_VALUE_TIGHT),
)


@dataclass(frozen=True)
class Variant:
    """One compilation: a kernel kind for one head_dim of the table, dtype and kind of mask.

    Attributes:
        kind: one of KINDS.
        head_dim: one of HEAD_DIMS.
        dtype: one of DTYPES; mask: one of MASKS.
        padded: head_dim or head_dim_v of the tensors is smaller.
    """

    kind: str
    head_dim: int
    dtype: str
    mask: str = "none"
    padded: bool = False

    @functools.cached_property
    def name(self) -> str:
        return f"{self.kind}-{self.head_dim}{'-padded' if self.padded else ''}-{self.dtype}-{self.mask}"

    @functools.cached_property
    def geometry(self) -> Geometry:
        return self._table()[self.head_dim]

    def _table(self) -> dict[int, Geometry]:
        """Masks, padding and float32 take registers: where too few are left, the table of smaller tiles."""
        wide, float32 = self.head_dim >= 112, self.dtype == "float32"
        if self.kind == "grad_query":
            return _GRAD_QUERY_TIGHT if float32 and self.padded and self.mask == "float" else _GRAD_QUERY
        if self.kind == "grad_key_value":
            tight = self.padded or self.mask != "none" if float32 else self.padded and self.mask == "float"
            return _GRAD_KEY_VALUE_TIGHT if tight else _GRAD_KEY_VALUE
        if self.kind != "forward":
            return _INT8 if self.kind == "int8" else _SPLIT
        tight = (
            self.padded or (self.mask == "float" and (float32 or wide)) or (self.mask == "bool" and float32 and wide)
        )
        return _FORWARD_TIGHT if tight else _FORWARD if self.mask == "none" else _FORWARD_MASKED

    @property
    def flush_tiles(self) -> int:
        """Tiles after which float32 sums are moved to the output, 0 = never: for sums of some 512 numbers."""
        if self.dtype != "float32" or self.kind in ("split", "int8"):
            return 0
        return 512 // self.geometry.cols

    @property
    def tile_bytes(self) -> int:
        """Shared memory of a block for the tiles of its products: SMEM_TILE of ``product.cuh``. Some kernels have some
        more."""
        g = self.geometry
        rows = 2 * g.depth * (g.rows + g.cols)
        cols = g.cols // g.parts * g.rows + 2 * g.staged * self.head_dim
        return 4 * max(rows, cols)

    @property
    def functions(self) -> tuple[str, ...]:
        return _KINDS[self.kind][2]

    def macros(self) -> dict[str, object]:
        g = self.geometry
        # A number of chunks known when compiling makes ptxas keep more in registers than there are.
        unknown_dim = self.padded or (self.head_dim == 512 and self.mask != "none" and self.dtype == "float32")
        return {
            "PA_D": self.head_dim,
            "PA_DTYPE": DTYPES.index(self.dtype),
            "PA_MASK": MASKS.index(self.mask),
            "PA_PAD": int(unknown_dim),
            "PA_BR": g.rows,
            "PA_BC": g.cols,
            "PA_TX": g.tx,
            "PA_TY": g.ty,
            "PA_KC": g.depth,
            "PA_VC": g.staged,
            "PA_PSPLIT": g.parts,
            "PA_MINB": g.blocks,
            "PA_FLUSH": self.flush_tiles,
            **_KINDS[self.kind][1],
        }


@functools.cache
def source(kind: str) -> str:
    """The text of a kernel kind, without any include."""
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in _KINDS[kind][0])


@functools.cache
def _code(kind: str) -> str:
    """The source without comments and empty lines, which no machine code depends on."""
    lines = (line.split("//")[0].rstrip() for line in source(kind).splitlines())
    return "\n".join(filter(None, lines))


@functools.cache
def digest(variant: Variant) -> str:
    """Hash of everything of ours that a variant's machine code depends on."""
    text = _code(variant.kind) + repr(sorted(variant.macros().items()))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def kernels_digest() -> str:
    """Hash of all kernels and their geometries: another one, and what was measured of them no longer holds."""
    return hashlib.sha256(("".join(map(_code, KINDS)) + repr(_TABLES)).encode()).hexdigest()[:16]
