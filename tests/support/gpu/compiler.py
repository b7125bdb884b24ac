"""In place of NVRTC, for any geometry: a cubin without machine code, and a log as ptxas writes it."""

from __future__ import annotations

from pascal_attn_core.fused import nvrtc
from pascal_attn_core.fused.gpu_runtime import CompileError
from pascal_attn_core.fused.source import DTYPES, KINDS, MASKS, Geometry, Variant, source
from tools.gpu.geometries import Candidate

from ..fused.driver import cubin

_TILES = ("PA_BR", "PA_BC", "PA_TX", "PA_TY", "PA_KC", "PA_VC", "PA_PSPLIT", "PA_MINB")
_REGISTERS = 65536


class AnyGeometry:
    """
    Attributes:
        compiled: so far.
    """

    version = (12, 6)

    def __init__(self) -> None:
        self.compiled: list[Variant] = []

    def compile(self, text: str, arch: int, macros: dict[str, object]) -> nvrtc.Compiled:
        numbers = {name: value for name, value in macros.items() if isinstance(value, int)}
        tiles = Geometry(*(numbers[name] for name in _TILES))
        if tiles.cols // tiles.tx % 4 or tiles.rows // tiles.ty % 4:
            raise CompileError('NVRTC_ERROR_COMPILATION\nerror: #error directive: "unsupported tile geometry"')
        flags = numbers.get("PA_SPLIT"), numbers.get("PA_INT8")
        kind = next(kind for kind in KINDS if source(kind) == text and _flags(kind) == flags)
        dtype, mask = DTYPES[numbers["PA_DTYPE"]], MASKS[numbers["PA_MASK"]]
        variant = Candidate(kind, numbers["PA_D"], dtype, mask, bool(numbers["PA_PAD"]), tiles=tiles)
        self.compiled.append(variant)
        registers = min(255, _REGISTERS // (tiles.threads * tiles.blocks) // 8 * 8)
        shared = 8 * tiles.depth * (tiles.rows + tiles.cols)
        of_function = f"0 bytes spill stores\nUsed {registers} registers, {shared} bytes smem\n"
        return nvrtc.Compiled(cubin(variant, arch, registers, shared), of_function * len(variant.functions))


def _flags(kind: str) -> tuple[object, object]:
    macros = Variant(kind, 64, "float32").macros()
    return macros.get("PA_SPLIT"), macros.get("PA_INT8")
