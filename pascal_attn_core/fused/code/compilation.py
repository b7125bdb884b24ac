"""One compilation, whatever it computes, as the kernels' loader, checks and packs need it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Compilation(ABC):
    """A text of kernels with macros. Immutable and hashable: a frozen dataclass.

    Attributes:
        kind: names the text, see :func:`.source.source`; dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        arch: "" for NVIDIA, else AMD's architecture.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: str
    dtype: str
    arch: str

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique among all compilations, for people and for files."""

    @property
    @abstractmethod
    def functions(self) -> tuple[str, ...]:
        """The kernels in it, the one that gives the kind its name first."""

    @property
    @abstractmethod
    def pack(self) -> str:
        """The pack of an architecture that it ships in."""

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of a block of the first function that is asked for at launch."""
        return 0

    @property
    def on_tensor_cores(self) -> bool:
        """Whether it multiplies there."""
        return False

    @property
    def is_small(self) -> bool:
        """Whether it is for few query rows."""
        return False

    @property
    def cuts_keys(self) -> bool:
        """Whether the tiles of a launch must stay together: its grid is not only tiles."""
        return False

    @property
    def is_even(self) -> bool:
        """Whether the blocks of a launch are listed in its parameters."""
        return False

    @abstractmethod
    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it is for NVIDIA's devices of this compute capability."""

    @abstractmethod
    def macros(self) -> dict[str, object]:
        """The macros that the text is compiled with."""
