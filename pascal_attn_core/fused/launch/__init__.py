"""Launches: how a call becomes kernels with grids and parameters."""

from __future__ import annotations

from collections.abc import Mapping
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

    @staticmethod
    def over(
        variant: Compilation,
        function: str,
        grid: tuple[int, int, int],
        threads: int,
        params: type[Params],
        tensors: Mapping[str, Tensor | None],
        numbers: Mapping[str, float],
        work: int = 0,
    ) -> Launch:
        """The launch with these tensors' addresses (0 for None) and these numbers as its parameters."""
        addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        keep = tuple(tensor for tensor in tensors.values() if tensor is not None)
        return Launch(variant, function, grid, threads, params(**addresses, **numbers), keep, work)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block that is asked for at launch."""
        return self.variant.dynamic_bytes if self.function == self.variant.functions[0] else 0
