"""AMD's architectures, and the sizes of the tiles of the kernels there.

An architecture is a string, and a :class:`..code.source.Variant` holds it as ``arch`` ("" = NVIDIA):

- ``"gfx906"``, ``"gfx1031"``, ...: what the card is.
- ``"gfx1030-no-dot"``: code for a card that calls itself gfx1030, without dot products of float16 pairs, because it is
  known to be something else (``HSA_OVERRIDE_GFX_VERSION``) or not known what it is. Such an instruction on a card that
  has none ends the process.

:func:`kernel_arch` makes the string from what the runtime says of a card and what the system says it is. What is
compiled, and shipped, is code for one of :data:`ARCHS`, the string's :func:`base`: within a family the instructions are
the same, so :func:`..code.amd_code.renamed` gives the code object the name that the card reports, :func:`target`. Only
:data:`COMPILED` has to be compiled for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plain import Geometry
from .tables import read_tables

ARCHS = ("gfx900", "gfx906", "gfx1010", "gfx1012", "gfx1030", "gfx1102")
# Architectures with the instructions of one of ARCHS. Code for gfx1102 works around the faults of all of gfx11, in no
# more registers than each has (LLVM, "User Guide for AMDGPU Backend", gfx11-generic).
_SAME = {
    **dict.fromkeys(("gfx902", "gfx909", "gfx90c"), "gfx900"),
    "gfx1011": "gfx1012",
    **dict.fromkeys(("gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"), "gfx1030"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"), "gfx1102"),
}
# Those that are like one of ARCHS but for some instructions, or their encoding: compiled on the machine.
COMPILED = {"gfx904": "gfx900", "gfx1013": "gfx1010", "gfx1200": "gfx1102", "gfx1201": "gfx1102"}
# Architectures with dot products, and whose code is for a card that may lack them: from gfx11 on all cards have them.
_WITHOUT_DOTS = {"gfx906": "gfx900", "gfx1012": "gfx1010", "gfx1030": "gfx1010"}
_HAVE_DOTS = (*_WITHOUT_DOTS, "gfx1102")
NO_DOT = "-no-dot"
# The kernels write every multiply-add as one. Loop strength
# reduction keeps addresses of its own in registers that the sums need.
_OPTIONS = ("-O3", "-ffp-contract=on", "-mcode-object-version=4", "-mllvm", "-disable-lsr")
# gfx1010's code runs on gfx1030 as well (NO_DOT), which has no v_mac_f32: clang divides 64-bit integers with it.
_OPTIONS_RDNA1 = ("-Xclang", "-target-feature", "-Xclang", "-mad-mac-f32-insts")
LDS_BYTES = 64 << 10  # shared memory that a block may have


def kernel_arch(reported: str, true: str | None) -> str | None:
    """The architecture of the kernels for a card, or None: there are none for it.

    Args:
        reported: what the runtime says, ``gcnArchName``, with or without features: "gfx906:sramecc+:xnack-".
        true: what the card is by the system, not by the environment; None = not known.
    """
    name = reported.split(":")[0]
    if name not in ARCHS and name not in _SAME and name not in COMPILED:
        return None
    known = true is not None and base(true.split(":")[0]) == base(name)
    return name if known or base(name) not in _WITHOUT_DOTS else name + NO_DOT


def target(arch: str) -> str:
    """The name that a code object must have for the card to load it."""
    return arch.removesuffix(NO_DOT)


def base(arch: str) -> str:
    """Which of ARCHS the tiles, and the code but for the name, are those of; ``arch`` itself if it is unknown."""
    name = target(arch)
    name = _SAME.get(name, COMPILED.get(name, name))
    return _WITHOUT_DOTS[name] if arch.endswith(NO_DOT) else name


def compile_target(arch: str) -> str:
    """The architecture that a compiler is told to make code for."""
    return arch if arch in COMPILED else base(arch)


def options(arch: str) -> tuple[str, ...]:
    """Options of the compiler, besides macros and :func:`compile_target`."""
    return (*_OPTIONS, *options_beyond_all(arch))


def options_beyond_all(arch: str) -> tuple[str, ...]:
    """The part of :func:`options` that other architectures do not have."""
    return _OPTIONS_RDNA1 if base(arch) == "gfx1010" else ()


def has_dots(arch: str) -> bool:
    """Whether kernels for it use dot products, of float16 pairs and of four bytes."""
    return base(arch) in _HAVE_DOTS


def wmma(arch: str) -> int:
    """The generation of its instructions for products of matrices, 11 or 12; 0: it has none."""
    name = compile_target(arch)
    return int(name[3:5]) if name.startswith(("gfx11", "gfx12")) else 0


def wave_size(arch: str) -> int:
    """Lanes that execute together."""
    return 64 if target(arch).startswith("gfx9") else 32


@dataclass(frozen=True)
class AmdGeometry(Geometry):
    """See the head of ``common.cuh``.

    Attributes:
        waves: of a SIMD, for which the compiler leaves registers.
        pairs: PA_PAIRS; keep: PA_KEEP.
    """

    named = (
        "PA_BR=rows PA_BC=cols PA_TX=tx PA_TY=ty PA_KC=depth PA_VC=staged PA_PSPLIT=parts "
        "PA_WAVES=waves PA_PAIRS=pairs PA_KEEP=keep PA_AHEAD=ahead"
    )

    waves: int = 2
    pairs: int = 0
    keep: bool = False

    def tile_bytes(self, head_dim: int) -> int:
        """SMEM_TILE of ``product.cuh``, in bytes."""
        words, row_words = self._words(self.depth), self._words(head_dim)
        staying = (-(-head_dim // self.depth) if self.keep else 2) * words * self.rows
        rows = 2 * words * self.cols + (0 if self.keep else staying)
        probs = self.cols // self.parts * self.rows // (2 if self.pairs == 2 else 1)
        return 4 * (max(rows, probs + 2 * self.staged * row_words) + (staying if self.keep else 0))

    def _words(self, elements: int) -> int:
        return elements // 2 if self.pairs else elements

    def macros(self, head_dim: int) -> dict[str, object]:
        return {"PA_AMD": 1, **super().macros(head_dim)}


_READ = read_tables("amd", AmdGeometry)


def _tables(*families: str) -> dict[str, dict[int, AmdGeometry]]:
    """The tables of these families, which come before a colon in their names."""
    named = ((full.partition(":"), table) for full, table in _READ.items())
    return {name: table for (family, _, name), table in named if family in families}


TABLES = {
    "gfx900": _tables("vega", "gfx900"),
    "gfx906": _tables("vega", "gfx906"),
    **dict.fromkeys(("gfx1010", "gfx1012", "gfx1030"), _tables("rdna")),
    "gfx1102": _tables("rdna"),
}
KINDS = ("forward", "split", "grad_query", "grad_key_value", "capped", "capped_split", "int8")
WMMA_KINDS = ("wmma", "wmma_packed", "wmma_small")  # on the matrix units of gfx11 and gfx12: see tensor.txt
RANGES = "ranges"  # a kind of AMD's alone: keys in ranges at the tiles of "forward", see tail_rows.py
RANGES_HEAD_DIMS = (40, 64, 80, 96, 128)


def has_ranges(head_dim: int, dtype: str, mask: str, *, padded: bool) -> bool:
    """Whether there is a kernel of kind RANGES. In float32 its sums would be longer than those of the others."""
    return head_dim in RANGES_HEAD_DIMS and dtype == "float16" and mask == "none" and not padded


def blocks_of_unit(arch: str, geometry: AmdGeometry) -> int:
    """Blocks of the forward kernels without a mask that a compute unit of four SIMDs, of RDNA a workgroup processor,
    holds by their registers. Their shared memory leaves room for as many (docs/fused-amd-static.txt)."""
    return 4 * geometry.waves * wave_size(arch) // geometry.threads


def amd_geometry(arch: str, kind: str, head_dim: int, dtype: str, mask: str, *, padded: bool) -> AmdGeometry:
    """The tiles of the kernel of a kind on an architecture; a KeyError where there is none of this kind or head_dim."""
    if kind == RANGES:
        if not has_ranges(head_dim, dtype, mask, padded=padded):
            raise KeyError(f"{kind}, {head_dim}, {dtype}, {mask}")
        own = TABLES[base(arch)].get(RANGES, {})
        if head_dim in own:
            return own[head_dim]
        kind = "forward"
    tables = TABLES[base(arch)]
    is_tight = padded or mask != "none" or kind == "capped"
    kind = {"capped": "forward", "capped_split": "split"}.get(kind, kind)
    if is_tight and f"{kind}-tight" in tables:
        kind = f"{kind}-tight"
    if kind != "int8" and dtype == "float16" and has_dots(arch):
        dtype = "pairs"
    return tables.get(f"{kind}-{dtype}", tables[kind])[head_dim]
