"""The CUDA source: text files in ``fused/cuda``, joined into one text per kernel, and the macros of each variant."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..geometry import amd as amd_geometry
from ..geometry.amd import AmdGeometry
from ..geometry.gradient import GRADIENT_TABLES, WMMA, GradientGeometry, gradient_geometry, gradient_head_dims
from ..geometry.plain import GRAD_ALL_HEAD_DIMS, HEAD_DIMS, INT8_HEAD_DIMS, PLAIN_TABLES, Geometry, plain_geometry
from ..geometry.tensor import (
    EVEN_HEAD_DIM,
    FLOAT_MASK_HEAD_DIM,
    TENSOR_HEAD_DIMS,
    TENSOR_TABLES,
    VOLTA_HEAD_DIMS,
    WMMA_TABLES,
    TensorGeometry,
    tensor_geometry,
)
from ..geometry.traits import traits_of
from .compilation import DTYPES, Compilation, DtypeVariant, GgufLinearVariant
from .kinds import GGUF_EXPAND, GGUF_LINEAR, INT8_LINEAR, KINDS, PRODUCT_FORMATS, TABLE

FOLDER = Path(__file__).parents[1] / "cuda"


MASKS = ("none", "bool", "float")
STATIC_BYTES = 48 << 10  # shared memory that a kernel may have without asking the driver


AnyGeometry = Geometry | TensorGeometry | GradientGeometry


@dataclass(frozen=True)
class Variant(Compilation):
    """One compilation of attention: a kernel kind for one head_dim of the table, dtype and kind of mask.

    Attributes:
        kind: one of KINDS, or of AMD's alone.
        head_dim: one of HEAD_DIMS, on tensor cores of TENSOR_HEAD_DIMS.
        dtype: one of DTYPES; mask: one of MASKS.
        padded: head_dim or head_dim_v of the tensors is smaller, or, on tensor cores, their rows can only be read 8
            bytes at a time.
        arch: "" for NVIDIA, else AMD's architecture: see :mod:`..geometry.amd`.
    """

    kind: str
    head_dim: int
    dtype: str
    mask: str = "none"
    padded: bool = False
    arch: str = ""

    @functools.cached_property
    def name(self) -> str:
        arch = self.arch and f"-{self.arch}"
        return f"{self.kind}-{self.head_dim}{'-padded' if self.padded else ''}-{self.dtype}-{self.mask}{arch}"

    @property
    def threads(self) -> int:
        return self.geometry.threads

    @property
    def pack(self) -> str:
        return self.kind if self.kind == "int8" else f"{self.head_dim}{'-tensor' if self.on_tensor_cores else ''}"

    @functools.cached_property
    def geometry(self) -> AnyGeometry:
        if self.arch and not self.on_tensor_cores:
            at = self.arch, self.kind, self.head_dim, self.dtype, self.mask
            return amd_geometry.amd_geometry(*at, padded=self.padded)
        if self.on_tensor_cores and self.is_gradient:
            return gradient_geometry(self.kind, self.head_dim, self.mask, padded=self.padded)
        if self.on_tensor_cores:
            return tensor_geometry(self.kind, self.head_dim, self.mask, padded=self.padded)
        return plain_geometry(self.kind, self.head_dim, self.dtype, self.mask, padded=self.padded)

    @property
    def is_gradient(self) -> bool:
        return self.traits.is_gradient

    @property
    def gradients(self) -> slice:
        """Which of the gradients of query, key and value it computes."""
        return slice(1, 3) if self.traits.of_keys else slice(0, 3 if self.kind == "grad_all" else 1)

    @property
    def lift(self) -> float:
        """Factor of the probabilities, and of their sums, in a forward kernel: LIFT of ``amd_softmax.cuh``."""
        g = self.geometry
        return 128.0 if isinstance(g, AmdGeometry) and g.pairs == 2 else 1.0

    @property
    def exists(self) -> bool:
        if self.kind == amd_geometry.RANGES:
            return bool(self.arch) and amd_geometry.has_ranges(self.head_dim, self.dtype, self.mask, padded=self.padded)
        if self.kind == "grad_all":
            return not self.arch and self.head_dim in GRAD_ALL_HEAD_DIMS
        if self.kind == "int8":
            has_dots = not self.arch or amd_geometry.has_dots(self.arch)
            return self.head_dim in INT8_HEAD_DIMS and self.mask != "float" and not self.padded and has_dots
        if self.traits.generation == "wmma":
            return bool(amd_geometry.wmma(self.arch)) and self.kind in amd_geometry.WMMA_KINDS
        if self.is_even:
            return self.mask != "float" and self.head_dim <= EVEN_HEAD_DIM
        return not (self.on_tensor_cores and self.mask == "float" and self.head_dim > FLOAT_MASK_HEAD_DIM)

    @property
    def flush_tiles(self) -> int:
        """Tiles after which float32 sums are moved to the output, 0 = never: for sums of some 512 numbers."""
        if self.dtype != "float32" or self.cuts_keys or self.kind == "int8":
            return 0
        return 512 // self.geometry.cols

    @property
    def tile_bytes(self) -> int:
        """Shared memory of a block for the tiles of its products. Some kernels have some more."""
        if self.kind == "int8":  # a byte for each number of Q, K, V and P
            rows, cols = self.geometry.rows, self.geometry.cols
            return self.head_dim * (rows + 2 * cols) + rows * cols
        return self.geometry.tile_bytes(self.head_dim)

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of a block of the first function that is asked for at launch: beyond 48 KiB all tiles."""
        if self.arch or isinstance(self.geometry, Geometry):
            return 0
        return self.tile_bytes if self.tile_bytes + self.own_bytes > STATIC_BYTES else 0

    @property
    def own_bytes(self) -> int:
        """Shared memory of a block besides the tiles, at most, on tensor cores."""
        g = self.geometry
        assert not isinstance(g, Geometry)
        return g.own_bytes if isinstance(g, TensorGeometry) else g.own_bytes(self.kind, self.mask)

    @property
    def functions(self) -> tuple[str, ...]:
        of_mask = TABLE[self.kind].mask_function
        return (*super().functions, *((of_mask,) if of_mask and self.mask != "none" else ()))

    def macros(self) -> dict[str, object]:
        padded, geometry = self.padded, self.geometry
        if isinstance(geometry, Geometry) and not self.arch:
            # A number of chunks known when compiling makes ptxas keep more in registers than there are.
            padded = padded or (self.head_dim == 512 and self.mask != "none" and self.dtype == "float32")
        found: dict[str, object] = {
            "PA_D": self.head_dim,
            **super().macros(),
            "PA_MASK": MASKS.index(self.mask),
            "PA_PAD": int(padded),
            **geometry.macros(self.head_dim),
            **TABLE[self.kind].macros,
        }
        if self.arch:
            found["PA_WAVE"] = amd_geometry.wave_size(self.arch)
        if self.arch and self.on_tensor_cores:
            found["PA_WMMA"] = amd_geometry.wmma(self.arch)
        if isinstance(geometry, Geometry):
            return {**found, "PA_FLUSH": self.flush_tiles}
        return {**found, "PA_DYNAMIC": int(self.dynamic_bytes > 0)}


def amd_variants(arch: str) -> Iterator[Variant]:
    """Every variant that a call can ask for on AMD's architecture."""
    for kind in amd_geometry.KINDS:
        for variant in all_variants():
            of_arch = replace(variant, arch=arch)
            if variant.kind == kind and of_arch.exists:
                yield of_arch
    for head_dim in amd_geometry.RANGES_HEAD_DIMS:
        yield Variant(amd_geometry.RANGES, head_dim, "float16", arch=arch)
    if amd_geometry.wmma(arch):
        every = itertools.product(amd_geometry.WMMA_KINDS, WMMA.head_dims, WMMA.dtypes, MASKS, (False, True))
        yield from (v for v in (Variant(*of, arch=arch) for of in every) if v.mask != "bool" or v.kind != "wmma_packed")


def all_variants() -> Iterator[Variant]:
    """Every variant that a call can ask for on NVIDIA's cards."""
    for kind in KINDS:
        is_tensor, traits = TABLE[kind].on_tensor_cores, traits_of(kind)
        is_gradient = traits.is_gradient
        of_tensor = VOLTA_HEAD_DIMS if traits.generation == "volta" else TENSOR_HEAD_DIMS
        if is_gradient and is_tensor:
            of_tensor = gradient_head_dims(kind)
        dims = of_tensor if is_tensor else HEAD_DIMS
        masks = tuple(m for m in MASKS if m != "bool") if traits.is_packed else MASKS
        dtypes = ("float16",) if is_tensor else DTYPES
        for head_dim, padded, dtype, mask in itertools.product(dims, (False, True), dtypes, masks):
            variant = Variant(kind, head_dim, dtype, mask, padded)
            if variant.exists and not (is_gradient and head_dim > 256):
                yield variant


def linear_variants() -> tuple[DtypeVariant, ...]:
    """Every variant of the linear layer in 8-bit integers."""
    return tuple(DtypeVariant(INT8_LINEAR, dtype) for dtype in DTYPES)


def gguf_variants(arch: str = "") -> tuple[Compilation, ...]:
    """Every variant for GGUF weights: of their expansion, of which none ships, then of their product; ``arch``: on
    AMD's devices, which have only the latter."""
    expansions = (DtypeVariant(GGUF_EXPAND, dtype) for dtype in DTYPES if not arch)
    return (*expansions, *gguf_linear_variants(arch))


def gguf_linear_variants(arch: str = "") -> tuple[GgufLinearVariant, ...]:
    """Every variant of the product with GGUF weights and x in 8 bits; ``arch``: on AMD's devices."""
    if arch and not amd_geometry.has_dots(arch):
        return ()
    return tuple(GgufLinearVariant(GGUF_LINEAR, name, rows, arch=arch) for name in PRODUCT_FORMATS for rows in (8, 4))


def from_row(row: Sequence[Any]) -> Compilation:
    """The compilation whose fields these are, in their order: see :func:`dataclasses.astuple`."""
    makers: dict[str, Any] = dict.fromkeys((INT8_LINEAR, GGUF_EXPAND), DtypeVariant)
    makers[GGUF_LINEAR] = GgufLinearVariant
    return makers.get(row[0], Variant)(*row)


@functools.cache
def source(kind: str, arch: str = "") -> str:
    """The text of a kernel kind, without any include; for AMD's architectures with what their compilers lack."""
    names = (*(("hip.cuh",) if arch else ()), *TABLE[kind].files)
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


@functools.cache
def _code(kind: str, arch: str = "") -> str:
    """The source without comments and empty lines, which no machine code depends on."""
    lines = (line.split("//")[0].rstrip() for line in source(kind, arch).splitlines())
    return "\n".join(filter(None, lines))


@functools.cache
def digest(variant: Compilation) -> str:
    """Hash of everything of ours that a variant's machine code depends on."""
    text = _code(variant.kind, variant.arch) + repr(sorted(variant.macros().items()))
    if variant.arch:
        text += "".join(amd_geometry.options_beyond_all(variant.arch))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def digest_of(variants: tuple[Compilation, ...]) -> str:
    """Hash of some kernels: another one, and what was found out of them no longer holds."""
    return hashlib.sha256("".join(map(digest, variants)).encode()).hexdigest()[:16]


@functools.cache
def kernels_digest(arch: str = "") -> str:
    """Hash of all kernels of attention and their geometries: another one, and what was measured no longer holds."""
    kinds, tables = KINDS, repr((PLAIN_TABLES, TENSOR_TABLES, GRADIENT_TABLES))
    if arch:
        kinds = *amd_geometry.KINDS, amd_geometry.RANGES, *amd_geometry.WMMA_KINDS
        tables = repr((amd_geometry.TABLES, WMMA_TABLES))
    text = "".join(_code(kind, arch) for kind in kinds) + tables
    return hashlib.sha256(text.encode()).hexdigest()[:16]
