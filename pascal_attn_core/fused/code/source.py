"""The CUDA source: text files in ``fused/cuda``, joined into one text per kernel, and the macros of each variant."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..geometry import amd as amd_geometry
from ..geometry.amd import AmdGeometry
from ..geometry.gradient import GRADIENT_TABLES, GradientGeometry, gradient_geometry, gradient_head_dims
from ..geometry.tables import read_tables
from ..geometry.tensor import (
    EVEN_HEAD_DIM,
    FLOAT_MASK_HEAD_DIM,
    MOST_PIECES,
    TENSOR_HEAD_DIMS,
    TENSOR_TABLES,
    VOLTA_HEAD_DIMS,
    TensorGeometry,
    tensor_geometry,
)
from . import linear_source
from .compilation import Compilation
from .linear_source import LinearVariant

FOLDER = Path(__file__).parents[1] / "cuda"


class Kind(NamedTuple):
    """A kind of kernels.

    Attributes:
        files: its text, in this order: each uses those before it.
        macros: those that all its variants have.
        functions: in it.
        on_tensor_cores: it multiplies there: float16, tables of its own.
        least, below: compute capabilities that it is for.
        mask_function: of masked variants on tensor cores, the one that turns the mask into bits.
    """

    files: tuple[str, ...]
    macros: dict[str, object]
    functions: tuple[str, ...]
    on_tensor_cores: bool = False
    least: tuple[int, int] = (5, 0)
    below: tuple[int, int] = (99, 0)
    mask_function: str = "pa_mask_bits"


_PLAIN = ("base.cuh", "common.cuh", "elements.cuh", "lanes.cuh", "band.cuh", "product.cuh", "sequence.cuh")
_ON_LANES = ("base.cuh", "band.cuh", "sequence.cuh", "warp.cuh")


def _tensor_kinds(
    name: str, fragments: tuple[str, ...], least: tuple[int, int], below: tuple[int, int]
) -> dict[str, Kind]:
    """Whole calls, also with keys cut so that they fill the card, packed sequences, and few query rows, on the tensor
    cores of one generation."""

    def kind(suffix: str, *, packed: bool = False, small: bool = False, even: bool = False) -> Kind:
        function = f"pa_{name}{suffix}"
        macros = {"PA_PACKED": int(packed), "PA_SPLIT": int(small), "PA_FORWARD_NAME": function}
        if even:
            macros |= {"PA_EVEN": 1, "MOST_PIECES": MOST_PIECES}
        files = (*_ON_LANES, "tensor_lanes.cuh", "tensor_call.cuh", "tensor_tiles.cuh", *fragments, "mask_bits.cuh",
                 "tensor_masks.cuh", *(("tensor_even.cuh",) if even else ()), "tensor_forward.cu",
                 *(("combine.cuh",) if small else ()))  # fmt: skip
        combine = f"pa_{name}_combine"
        if small:
            macros["PA_COMBINE_NAME"] = combine
        functions = (function, combine) if small else (function,)
        return Kind(files, macros, functions, True, least, below, "pa_even_bits" if even else "pa_mask_bits")

    kinds = {
        name: kind(""),
        f"{name}_packed": kind("_packed", packed=True),
        f"{name}_small": kind("_small", small=True),
        f"{name}_even": kind("_even", even=True),
    }
    return {**kinds, f"{name}_barrier": kind("_barrier")} if name == "tensor" else kinds


def _gradient_kinds(
    generation: str, fragments: tuple[str, ...], least: tuple[int, int], below: tuple[int, int]
) -> dict[str, Kind]:
    """The gradients of query, and of key and value, on the tensor cores of one generation."""
    files = (*_ON_LANES, "gradients.cuh", "tensor_lanes.cuh", "tensor_gradient.cuh", *fragments, "mask_bits.cuh",
             "gradient_masks.cuh", "tensor_gradient.cu")  # fmt: skip
    found = {}
    for of_keys, name in enumerate((f"{generation}_grad_query", f"{generation}_grad_key_value")):
        for capped, packed in itertools.product((0, 1), (0, 1)):
            suffix = "_capped" * capped + "_packed" * packed
            macros: dict[str, object] = {"PA_KEYS": of_keys, "PA_CAPPED": capped, "PA_PACKED": packed}
            macros["PA_GRADIENT_NAME"] = f"pa_{name}{suffix}"
            functions = (f"pa_{name}{suffix}", *(() if of_keys else ("pa_tensor_delta",)))
            found[name + suffix] = Kind(files, macros, functions, True, least, below, "pa_gradient_bits")
    return found


_KINDS = {
    "forward": Kind(
        (*_PLAIN, "masks.cuh", "amd_softmax.cuh", "forward.cu"),
        {"PA_SPLIT": 0, "PA_INT8": 0, "PA_FORWARD_NAME": "pa_forward"},
        ("pa_forward",),
    ),
    "split": Kind(
        (*_PLAIN, "masks.cuh", "amd_softmax.cuh", "forward.cu", "combine.cuh"),
        {"PA_SPLIT": 1, "PA_INT8": 0, "PA_FORWARD_NAME": "pa_forward_split", "PA_COMBINE_NAME": "pa_combine"},
        ("pa_forward_split", "pa_combine"),
    ),
    "grad_query": Kind(
        (*_PLAIN, "masks.cuh", "gradients.cuh", "backward.cuh", "delta.cuh", "grad_query.cu"),
        {},
        ("pa_delta", "pa_grad_query"),
    ),
    "grad_key_value": Kind(
        (*_PLAIN, "masks.cuh", "gradients.cuh", "backward.cuh", "grad_key_value.cu"), {}, ("pa_grad_key_value",)
    ),
    "grad_all": Kind(
        (*_PLAIN, "masks.cuh", "gradients.cuh", "backward.cuh", "delta.cuh", "query_sums.cuh", "grad_key_value.cu"),
        {"PA_ALL": 1},
        ("pa_grad_all", "pa_delta", "pa_round_query"),
        below=(8, 0),
    ),
    "int8": Kind(
        (*_PLAIN, "masks.cuh", "int8.cuh", "amd_softmax.cuh", "forward.cu"),
        {"PA_SPLIT": 0, "PA_INT8": 1, "PA_FORWARD_NAME": "pa_forward_int8"},
        ("pa_quantize", "pa_forward_int8"),
        least=(6, 1),
    ),
    "capped": Kind(
        (*_PLAIN, "masks.cuh", "amd_softmax.cuh", "forward.cu"),
        {"PA_SPLIT": 0, "PA_INT8": 0, "PA_CAPPED": 1, "PA_FORWARD_NAME": "pa_capped"},
        ("pa_capped",),
    ),
    "capped_split": Kind(
        (*_PLAIN, "masks.cuh", "amd_softmax.cuh", "forward.cu", "combine.cuh"),
        {
            "PA_SPLIT": 1,
            "PA_INT8": 0,
            "PA_CAPPED": 1,
            "PA_FORWARD_NAME": "pa_capped_split",
            "PA_COMBINE_NAME": "pa_capped_combine",
        },
        ("pa_capped_split", "pa_capped_combine"),
    ),
    **_tensor_kinds("volta", ("volta.cuh",), (7, 0), (7, 5)),
    **_tensor_kinds("tensor", ("turing.cuh", "turing_forward.cuh"), (7, 5), (99, 0)),
    **_gradient_kinds("tensor", ("turing.cuh", "turing_gradient.cuh"), (7, 5), (99, 0)),
    **_gradient_kinds("volta", ("volta.cuh",), (7, 0), (7, 5)),
}
KINDS = tuple(_KINDS)  # of attention
_KINDS[linear_source.KIND] = Kind(
    linear_source.FILES, {}, linear_source.FUNCTIONS, least=linear_source.LEAST_CAPABILITY
)
ALL_KINDS = tuple(_KINDS)
_KINDS[amd_geometry.RANGES] = _KINDS["split"]._replace(
    macros=_KINDS["split"].macros | {"PA_RANGES": 1, "PA_FORWARD_NAME": "pa_forward_ranges"},
    functions=("pa_forward_ranges", "pa_combine"),
)


def is_tensor_gradient(kind: str) -> bool:
    """Whether kernels of this kind compute gradients on tensor cores."""
    return _KINDS[kind].on_tensor_cores and "grad" in kind


DTYPES = ("float32", "float16", "bfloat16")
MASKS = ("none", "bool", "float")
STATIC_BYTES = 48 << 10  # shared memory that a kernel may have without asking the driver


@dataclass(frozen=True)
class Geometry:
    """Sizes of the tiles of kernels on plain cores: see the head of ``common.cuh``."""

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


AnyGeometry = Geometry | TensorGeometry | GradientGeometry | AmdGeometry
_TABLES = read_tables("plain", Geometry)
HEAD_DIMS = tuple(_TABLES["forward"])
GRAD_ALL_HEAD_DIMS = tuple(_TABLES["grad_all"])


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
    def pack(self) -> str:
        return f"{self.head_dim}{'-tensor' if self.on_tensor_cores else ''}"

    @functools.cached_property
    def geometry(self) -> AnyGeometry:
        if self.arch:
            at = self.arch, self.kind, self.head_dim, self.dtype, self.mask
            return amd_geometry.amd_geometry(*at, padded=self.padded)
        if self.on_tensor_cores and self.is_gradient:
            return gradient_geometry(self.kind, self.head_dim, self.mask, padded=self.padded)
        if self.on_tensor_cores:
            return tensor_geometry(self.kind, self.head_dim, self.mask, padded=self.padded)
        return self._table()[self.head_dim]

    @property
    def on_tensor_cores(self) -> bool:
        return _KINDS[self.kind].on_tensor_cores

    @property
    def is_gradient(self) -> bool:
        return "grad" in self.kind

    @property
    def gradients(self) -> slice:
        """Which of the gradients of query, key and value it computes."""
        return slice(1, 3) if "key_value" in self.kind else slice(0, 3 if self.kind == "grad_all" else 1)

    @functools.cached_property
    def with_barrier(self) -> Variant | None:
        """The same kernel with a barrier for each tile, where its warps wait for each other's counters."""
        g = self.geometry
        has_counters = self.kind == "tensor" and isinstance(g, TensorGeometry) and g.counters
        return replace(self, kind="tensor_barrier") if has_counters else None

    @property
    def lift(self) -> float:
        """What a forward kernel multiplies probabilities, and their sums, by: LIFT of ``amd_softmax.cuh``."""
        g = self.geometry
        return 128.0 if isinstance(g, AmdGeometry) and g.pairs == 2 else 1.0

    @property
    def is_small(self) -> bool:
        """Whether it is for few query rows: its tiles hold those of a group of heads, the keys may be cut."""
        return self.kind.endswith(("split", "small"))

    @property
    def cuts_keys(self) -> bool:
        """Whether its keys may be cut into ranges, with a block for each and a kernel that joins them."""
        return self.is_small or self.kind == amd_geometry.RANGES

    @property
    def exists(self) -> bool:
        """Whether there is such a kernel."""
        if self.kind == amd_geometry.RANGES:
            return bool(self.arch) and amd_geometry.has_ranges(self.head_dim, self.dtype, self.mask, padded=self.padded)
        if self.kind == "grad_all":
            return not self.arch and self.head_dim in GRAD_ALL_HEAD_DIMS
        if self.is_even:
            return self.mask != "float" and self.head_dim <= EVEN_HEAD_DIM
        return not (self.on_tensor_cores and self.mask == "float" and self.head_dim > FLOAT_MASK_HEAD_DIM)

    @property
    def is_even(self) -> bool:
        """Whether the blocks of a launch are listed, so that all multiprocessors end together (``stream_k.py``)."""
        return self.kind.endswith("_even")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it is a kernel for NVIDIA's devices of this compute capability."""
        kind = _KINDS[self.kind]
        return not self.arch and kind.least <= capability < kind.below

    def _table(self) -> dict[int, Geometry]:
        """Masks, padding and float32 take registers: where too few are left, the table of smaller tiles."""
        wide, float32, is_masked = self.head_dim >= 112, self.dtype == "float32", self.padded or self.mask != "none"
        tight_mask = (self.mask == "float" and (float32 or wide)) or (self.mask == "bool" and float32 and wide)
        if self.kind in ("int8", "split", "capped_split"):
            return _TABLES[self.kind.removeprefix("capped_")]
        if self.kind == "grad_all":
            suffix = "-tight" if is_masked else "-bfloat16" if self.dtype == "bfloat16" else ""
            return _TABLES[f"grad_all{suffix}"]
        tight = {
            "forward": self.padded or tight_mask,
            "capped": True,
            "grad_query": float32 and self.padded and self.mask == "float",
            "grad_key_value": is_masked if float32 else self.padded and self.mask == "float",
        }[self.kind]
        suffix = "-tight" if tight else "-masked" if is_masked else ""
        return _TABLES[f"{self.kind.replace('capped', 'forward')}{suffix}"]

    @property
    def flush_tiles(self) -> int:
        """Tiles after which float32 sums are moved to the output, 0 = never: for sums of some 512 numbers."""
        if self.dtype != "float32" or self.cuts_keys or self.kind == "int8":
            return 0
        return 512 // self.geometry.cols

    @property
    def tile_bytes(self) -> int:
        """Shared memory of a block for the tiles of its products. Some kernels have some more."""
        return self.geometry.tile_bytes(self.head_dim)

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of a block of the first function that is asked for at launch: beyond 48 KiB all tiles."""
        if isinstance(self.geometry, Geometry | AmdGeometry):
            return 0
        return self.tile_bytes if self.tile_bytes + self.own_bytes > STATIC_BYTES else 0

    @property
    def own_bytes(self) -> int:
        """Shared memory of a block besides the tiles, at most, on tensor cores."""
        g = self.geometry
        assert not isinstance(g, Geometry | AmdGeometry)
        return g.own_bytes if isinstance(g, TensorGeometry) else g.own_bytes(self.kind, self.mask)

    @property
    def functions(self) -> tuple[str, ...]:
        """The kernels in it, the one that gives the kind its name first."""
        kind = _KINDS[self.kind]
        of_mask = (kind.mask_function,) if self.on_tensor_cores and self.mask != "none" else ()
        return (*kind.functions, *of_mask)

    def macros(self) -> dict[str, object]:
        g = self.geometry
        common = {"PA_D": self.head_dim, "PA_DTYPE": DTYPES.index(self.dtype), "PA_MASK": MASKS.index(self.mask)}
        if isinstance(g, AmdGeometry):
            own = {"PA_PAD": int(self.padded), "PA_FLUSH": self.flush_tiles, **g.macros()}
            return {**common, **own, "PA_WAVE": amd_geometry.wave_size(self.arch), **_KINDS[self.kind].macros}
        if not isinstance(g, Geometry):
            own = {"PA_PAD": int(self.padded), "PA_DYNAMIC": int(self.dynamic_bytes > 0), **g.macros(self.head_dim)}
            return {**common, **own, **_KINDS[self.kind].macros}
        # A number of chunks known when compiling makes ptxas keep more in registers than there are.
        unknown_dim = self.padded or (self.head_dim == 512 and self.mask != "none" and self.dtype == "float32")
        return {
            **common,
            "PA_PAD": int(unknown_dim),
            "PA_BR": g.rows,
            "PA_BC": g.cols,
            "PA_TX": g.tx,
            "PA_TY": g.ty,
            "PA_KC": g.depth,
            "PA_VC": g.staged,
            "PA_PSPLIT": g.parts,
            "PA_MINB": g.blocks,
            "PA_AHEAD": int(g.ahead),
            "PA_FLUSH": self.flush_tiles,
            **_KINDS[self.kind].macros,
        }


def amd_variants(arch: str) -> Iterator[Variant]:
    """Every variant that a call can ask for on AMD's architecture."""
    for kind in amd_geometry.KINDS:
        for variant in all_variants():
            if variant.kind == kind:
                yield replace(variant, arch=arch)
    for head_dim in amd_geometry.RANGES_HEAD_DIMS:
        yield Variant(amd_geometry.RANGES, head_dim, "float16", arch=arch)


def all_variants() -> Iterator[Variant]:
    """Every variant that a call can ask for on NVIDIA's cards."""
    for kind in KINDS:
        is_tensor, is_gradient = _KINDS[kind].on_tensor_cores, "grad" in kind
        of_tensor = VOLTA_HEAD_DIMS if kind.startswith("volta") else TENSOR_HEAD_DIMS
        if is_gradient and is_tensor:
            of_tensor = gradient_head_dims(kind)
        dims = of_tensor if is_tensor else HEAD_DIMS
        masks = tuple(m for m in MASKS if m != "bool") if kind.endswith("packed") else MASKS
        for head_dim in dims:
            if is_gradient and head_dim > 256:
                continue
            for padded in (False, True) if kind != "int8" else (False,):
                for dtype in ("float16",) if is_tensor else DTYPES:
                    for mask in masks:
                        variant = Variant(kind, head_dim, dtype, mask, padded)
                        if not variant.exists:
                            continue
                        if kind != "tensor_barrier" or replace(variant, kind="tensor").with_barrier:
                            yield variant


def linear_variants() -> tuple[LinearVariant, ...]:
    """Every variant of the linear layer in 8-bit integers."""
    return tuple(LinearVariant(linear_source.KIND, dtype) for dtype in DTYPES)


def from_row(row: Sequence[Any]) -> Compilation:
    """The compilation whose fields these are, in their order: see :func:`dataclasses.astuple`."""
    return (LinearVariant if row[0] == linear_source.KIND else Variant)(*row)


@functools.cache
def source(kind: str, arch: str = "") -> str:
    """The text of a kernel kind, without any include; for AMD's architectures with what their compilers lack."""
    names = (*(("hip.cuh",) if arch else ()), *_KINDS[kind].files)
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
def kernels_digest(arch: str = "") -> str:
    """Hash of all kernels of attention and their geometries: another one, and what was measured no longer holds."""
    if arch:
        texts = [_code(kind, arch) for kind in (*amd_geometry.KINDS, amd_geometry.RANGES)]
        return hashlib.sha256(("".join(texts) + repr(amd_geometry.TABLES)).encode()).hexdigest()[:16]
    return hashlib.sha256(
        ("".join(map(_code, KINDS)) + repr((_TABLES, TENSOR_TABLES, GRADIENT_TABLES))).encode()
    ).hexdigest()[:16]
