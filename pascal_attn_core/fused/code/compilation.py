"""One compilation, whatever it computes, as the kernels' loader, checks and packs need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..geometry import amd as amd_geometry
from ..geometry.traits import Traits, traits_of
from .kinds import FEW, PRODUCT_FORMATS, TABLE, TOO_NEW, TWO_SCALES

DTYPES = ("float32", "float16", "bfloat16")


class Compilation:
    """A text of kernels with macros. Immutable and hashable: a frozen dataclass.

    Attributes:
        kind: names the text, a key of :data:`.kinds.TABLE`; dtype: one of DTYPES.
        arch: "" for NVIDIA, else AMD's architecture.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: str
    dtype: str
    arch: str

    @property
    def name(self) -> str:
        """Unique among all compilations, for people and for files."""
        return f"{self.kind}-{self.dtype}"

    @property
    def functions(self) -> tuple[str, ...]:
        """The kernels in it, the one that gives the kind its name first."""
        return TABLE[self.kind].functions

    @property
    def pack(self) -> str:
        """The pack of an architecture that it ships in."""
        return self.kind.replace("_", "-")

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of a block of the first function that is asked for at launch."""
        return 0

    @property
    def on_tensor_cores(self) -> bool:
        """Whether it multiplies there."""
        return TABLE[self.kind].on_tensor_cores

    @property
    def traits(self) -> Traits:
        return traits_of(self.kind)

    @property
    def is_small(self) -> bool:
        """Whether it is for few query rows: its tiles hold those of a group of heads, the keys may be cut."""
        return self.traits.is_small

    @property
    def cuts_keys(self) -> bool:
        """Whether its keys may be cut into ranges, with a block for each and a kernel that joins them: then the tiles
        of a launch must stay together."""
        return self.is_small or self.kind == amd_geometry.RANGES

    @property
    def is_even(self) -> bool:
        """Whether the blocks of a launch are listed in its parameters."""
        return self.traits.is_even

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it is for NVIDIA's devices of this compute capability."""
        return not self.arch and TABLE[self.kind].least <= capability < TABLE[self.kind].below

    def macros(self) -> dict[str, object]:
        """The macros that the text is compiled with."""
        return {"PA_DTYPE": DTYPES.index(self.dtype)}


@dataclass(frozen=True)
class DtypeVariant(Compilation):
    """A text for one dtype, on NVIDIA devices. It holds linear layers in 8-bit integers, which read x and write
    outputs in that dtype, or the expansions of all GGUF formats, which compute in it."""

    kind: str
    dtype: str
    arch: str = ""


@dataclass(frozen=True)
class GgufLinearVariant(Compilation):
    """The product with the GGUF blocks of one format; with 8 rows also that of few rows of x, and the rounding of x.

    Attributes:
        format: one of PRODUCT_FORMATS.
        rows: of the outputs of a thread, 8 or 4, by 8 columns.
        dtype: sums are float32, tensors of any dtype.
    """

    kind: str
    format: str
    rows: int
    dtype: str = "float32"
    arch: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.format}-{self.rows}{self.arch and f'-{self.arch}'}"

    @property
    def threads(self) -> int:
        """Threads of a block of the first function."""
        return 1024 // self.rows

    @property
    def functions(self) -> tuple[str, ...]:
        return ("pa_gguf_linear", *((*FEW, "pa_gguf_round", "pa_gguf_round_few") if self.rows == 8 else ()))

    def runs_on(self, capability: tuple[int, int]) -> bool:
        has_registers = self.format not in TWO_SCALES or capability < TOO_NEW[self.rows]
        return super().runs_on(capability) and has_registers

    def macros(self) -> dict[str, object]:
        found = {**super().macros(), "PA_FORMAT": PRODUCT_FORMATS.index(self.format), "PA_ROWS": self.rows}
        if not self.arch:
            return found
        wave = amd_geometry.wave_size(self.arch)  # of two blocks for a compute unit of Vega's, four of RDNA's
        waves = self.threads // (2 * wave if wave == 64 else wave)
        return {**found, "PA_AMD": 1, "PA_TX": 8, "PA_TY": self.threads // 8, "PA_WAVE": wave, "PA_WAVES": waves}
