"""The compilations of the kernels that expand blocks of GGUF files, ``cuda/gguf_expand.cu``, and of those that multiply
them by rows of x in 8 bits, ``cuda/gguf_linear.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..geometry import amd as amd_geometry
from .compilation import Compilation
from .linear_source import LEAST_CAPABILITY

KIND = "gguf_expand"
FILES = ("base.cuh", "elements.cuh", "gguf_expand.cu")
_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
KERNELS = {name: f"pa_gguf_{name.lower()}" for name in _FORMATS}  # format -> function
THREADS, WEIGHTS_OF_THREAD = 256, 4


@dataclass(frozen=True)
class GgufVariant(Compilation):
    """The functions of all formats for one dtype of the arithmetic.

    Attributes:
        kind: ``"gguf_expand"``; dtype: one of ``source.DTYPES``.
        arch: "", since these are NVIDIA's.
    """

    kind: str
    dtype: str
    arch: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.dtype}"

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(KERNELS.values())

    @property
    def pack(self) -> str:
        return "gguf"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return True

    def macros(self) -> dict[str, object]:
        return {"PA_DTYPE": ("float32", "float16", "bfloat16").index(self.dtype)}


# ---- products --------------------------------------------------------------------------------------------------------

LINEAR_KIND = "gguf_linear"
LINEAR_FILES = ("base.cuh", "elements.cuh", "codes.cuh", "gguf_linear.cu")
# In the order of the text's numbers.
PRODUCT_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q3_K")
# Formats with two scales for 32 weights, and from which capability on NVIDIA's compiler has too few registers for their
# sums, by rows of the outputs of a thread.
_TWO_SCALES, _TOO_NEW = ("Q6_K", "Q3_K"), {8: (9, 0), 4: (7, 0)}


class GgufTile(NamedTuple):
    """The part of a product that a block computes: rows of x, rows of the weight, threads."""

    rows: int
    cols: int
    threads: int


FEW = {"pa_gguf_few": GgufTile(4, 16, 256), "pa_gguf_some": GgufTile(16, 8, 256)}


@dataclass(frozen=True)
class GgufLinearVariant(Compilation):
    """The product with the blocks of one format; with 8 rows also that of few rows of x, and the rounding of x.

    Attributes:
        kind: ``"gguf_linear"``; format: one of PRODUCT_FORMATS.
        rows: of the outputs of a thread, 8 or 4, by 8 columns.
        dtype: sums are float32, tensors of any dtype.
        arch: "" for NVIDIA, else AMD's architecture.
    """

    kind: str
    format: str
    rows: int
    dtype: str = "float32"
    arch: str = ""

    @property
    def name(self) -> str:
        arch = self.arch and f"-{self.arch}"
        return f"{self.kind}-{self.format}-{self.rows}{arch}"

    @property
    def threads(self) -> int:
        """Threads of a block of the first function."""
        return 1024 // self.rows

    @property
    def functions(self) -> tuple[str, ...]:
        return ("pa_gguf_linear", *((*FEW, "pa_gguf_round", "pa_gguf_round_few") if self.rows == 8 else ()))

    @property
    def pack(self) -> str:
        return "gguf-linear"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        has_registers = self.format not in _TWO_SCALES or capability < _TOO_NEW[self.rows]
        return not self.arch and capability >= LEAST_CAPABILITY and has_registers

    def macros(self) -> dict[str, object]:
        found: dict[str, object] = {
            "PA_DTYPE": 0,
            "PA_FORMAT": PRODUCT_FORMATS.index(self.format),
            "PA_ROWS": self.rows,
        }
        if not self.arch:
            return found
        wave = amd_geometry.wave_size(self.arch)  # of two blocks for a compute unit of Vega's, four of RDNA's
        waves = self.threads // (2 * wave if wave == 64 else wave)
        return {**found, "PA_AMD": 1, "PA_TX": 8, "PA_TY": self.threads // 8, "PA_WAVE": wave, "PA_WAVES": waves}
