"""The compilations of the kernels that expand blocks of GGUF files, ``cuda/gguf_expand.cu``."""

from __future__ import annotations

from dataclasses import dataclass

from .compilation import Compilation

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
