"""Launches: how a call becomes kernels with grids and parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..code.compilation import Compilation
from ..code.params import Params


class Launch(NamedTuple):
    """One kernel launch. ``keep`` holds tensors that must live until it has been queued; ``work`` is about the number
    of its multiplications."""

    variant: Compilation
    function: str
    grid: tuple[int, int, int]
    threads: int
    params: Params
    keep: tuple[Tensor, ...] = ()
    work: int = 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block that is asked for at launch."""
        return self.variant.dynamic_bytes if self.function == self.variant.functions[0] else 0
