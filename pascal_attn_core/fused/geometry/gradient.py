"""Sizes of the tiles of the gradient kernels on tensor cores."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from .amd import wmma
from .tables import Tiles, read_tables
from .tensor import TENSOR_HEAD_DIMS, VOLTA_HEAD_DIMS, WMMA_HEAD_DIMS, pitch
from .traits import traits_of


@dataclass(frozen=True)
class GradientGeometry(Tiles):
    """See the head of ``tensor_gradient.cuh``.

    Attributes:
        warps: of a block; tiles: of 16 rows, per warp.
        cols: columns of a tile; at_once: of them that are worked on at a time.
        in_registers: 16-byte columns of the two tensors of the rows that stay there, even numbers.
        blocks: that shall fit a multiprocessor.
    """

    named = "PA_WARPS=warps PA_MT=tiles PA_BC=cols PA_SC=at_once PA_MINB=blocks"

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
        passing = [self.rows * pitch(min(8, kept)) if kept else 0 for kept in self.in_registers]
        left = [self.rows * pitch(chunks - kept) if kept < chunks else 0 for kept in self.in_registers]
        return max(4 * self.cols * pitch(chunks), *passing) + sum(left)

    def own_bytes(self, kind: str, mask: str) -> int:
        """Shared memory besides the tiles: numbers of the moving queries, words of the mask, the block's place."""
        stats = 8 * self.cols * (3 if mask == "float" else 2) if traits_of(kind).of_keys else 0
        words = 0 if mask == "none" else 2 * 4 * self.rows * self.cols // 32
        return stats + words + 64

    def macros(self, head_dim: int) -> dict[str, object]:
        return super().macros(head_dim) | dict(zip(("PA_XREG", "PA_XXREG"), self.in_registers))


GRADIENT_TABLES = read_tables("gradient", GradientGeometry)
GRADIENT_HEAD_DIMS = tuple(GRADIENT_TABLES["query"])
VOLTA_GRADIENT_HEAD_DIMS = tuple(GRADIENT_TABLES["volta-query"])


def gradient_geometry(kind: str, head_dim: int, mask: str, *, padded: bool) -> GradientGeometry:
    """The tiles of the kernel of this kind, one of gradients."""
    generation, _, of_keys, is_capped, is_packed, *_ = traits_of(kind)
    is_volta = generation == "volta"
    suffixes: tuple[str, ...] = ()
    if not of_keys:
        is_tight = padded or is_packed or is_capped or mask != "none"
        suffixes = ("capped",) if is_capped and not is_volta else ("tight",) if is_tight else ()
    elif not is_volta:
        of_mask, of_padding = (mask,) * (mask != "none"), ("padded",) * (padded and mask != "float")
        suffixes = ("capped",) if is_capped else ("packed", *of_mask) if is_packed else (*of_mask, *of_padding)
    name = "-".join((*(("volta",) if is_volta else ()), "key_value" if of_keys else "query", *suffixes))
    return GRADIENT_TABLES[name][head_dim]


def gradient_head_dims(kind: str) -> tuple[int, ...]:
    """The head_dims that there are kernels of this kind for."""
    return VOLTA_GRADIENT_HEAD_DIMS if traits_of(kind).generation == "volta" else GRADIENT_HEAD_DIMS


class Generation(NamedTuple):
    """Cards whose matrix units one family of kernels is for: the first word of its kinds, the head_dims of its tables,
    those whose gradients are computed there as well, and the dtypes of the tensors."""

    name: str
    head_dims: tuple[int, ...]
    gradient_head_dims: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("float16",)


VOLTA = Generation("volta", VOLTA_HEAD_DIMS, VOLTA_GRADIENT_HEAD_DIMS)
TURING = Generation("tensor", TENSOR_HEAD_DIMS, GRADIENT_HEAD_DIMS)
WMMA = Generation("wmma", WMMA_HEAD_DIMS, dtypes=("float16", "bfloat16"))


@functools.cache
def generation_of(capability: tuple[int, int] | None, arch: str = "") -> Generation | None:
    """The generation of a card by NVIDIA's compute capability or AMD's architecture; None: it has no matrix units that
    there are kernels for."""
    if arch:
        return WMMA if wmma(arch) else None
    if capability is None or capability < (7, 0):
        return None
    return VOLTA if capability < (7, 5) else TURING
