"""In place of NVRTC, for any geometry: a cubin without machine code, and a log as ptxas writes it."""

from pascal_attn_core.fused.code.source import DTYPES, KINDS, MASKS, Geometry, Variant, source
from pascal_attn_core.fused.code.source import AnyGeometry as Tiles
from pascal_attn_core.fused.geometry.gradient import GradientGeometry
from pascal_attn_core.fused.geometry.tensor import TensorGeometry
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.runtime import CompileError
from tools.gpu.geometries import Candidate

from ..fused.driver import cubin

_TILES = ("PA_BR", "PA_BC", "PA_TX", "PA_TY", "PA_KC", "PA_VC", "PA_PSPLIT", "PA_MINB", "PA_AHEAD")
_OF_A_KIND = ("PA_SPLIT", "PA_KEYS", "PA_PACKED", "PA_CAPPED")
_REGISTERS = 65536


class AnyGeometry:
    version = (12, 6)

    def __init__(self) -> None:
        self.compiled: list[Variant] = []

    def compile(self, text: str, arch: int, macros: dict[str, object]) -> nvrtc.Compiled:
        numbers = {name: value for name, value in macros.items() if isinstance(value, int)}
        tiles = _tiles(numbers)
        kind = next(kind for kind in KINDS if source(kind) == text and _own(kind).items() <= macros.items())
        dtype, mask = DTYPES[numbers["PA_DTYPE"]], MASKS[numbers["PA_MASK"]]
        variant = Candidate(kind, numbers["PA_D"], dtype, mask, bool(numbers["PA_PAD"]), tiles=tiles)
        self.compiled.append(variant)
        registers = min(255, _REGISTERS // (tiles.threads * tiles.blocks) // 8 * 8)
        if isinstance(tiles, Geometry):
            shared = 8 * tiles.depth * (tiles.rows + tiles.cols)
        else:
            shared = variant.own_bytes + (0 if variant.dynamic_bytes else variant.tile_bytes)
        of_function = f"0 bytes spill stores\nUsed {registers} registers, {shared} bytes smem\n"
        return nvrtc.Compiled(cubin(variant, arch, registers, shared), of_function * len(variant.functions))


def _tiles(numbers: dict[str, int]) -> Tiles:
    if "PA_SC" in numbers:
        warps, tiles, cols, at_once, blocks = (numbers[f"PA_{name}"] for name in ("WARPS", "MT", "BC", "SC", "MINB"))
        return GradientGeometry(tiles, (numbers["PA_XREG"], numbers["PA_XXREG"]), warps, cols, at_once, blocks)
    if "PA_QREG" in numbers:
        names = ("WARPS", "MT", "BC", "QREG", "MINB", "COUNTERS", "INTEGER_PACKED")
        *sizes, counters, packed = (numbers[f"PA_{name}"] for name in names)
        return TensorGeometry(*sizes, bool(counters), packed)
    *sizes, ahead = (numbers[name] for name in _TILES)
    found = Geometry(*sizes, ahead=bool(ahead))
    if found.cols // found.tx % 4 or found.rows // found.ty % 4:
        raise CompileError('NVRTC_ERROR_COMPILATION\nerror: #error directive: "unsupported tile geometry"')
    return found


def _own(kind: str) -> dict[str, object]:
    """The macros by which a kind is known among those of the same text."""
    macros = Variant(kind, 64, "float16").macros()
    return {name: value for name, value in macros.items() if name in _OF_A_KIND or name.endswith("_NAME")}
