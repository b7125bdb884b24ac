"""The ways to compute one kind of call on a device, and which of them a call takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..fused.code.compilation import Compilation
from ..fused.code.source import digest_of
from ..fused.trust.kernels import Kernels, KernelUnavailable
from .timing_table import Contest, Found, Kind, power_of_two


class Way(NamedTuple):
    """The way that computes a call, and why none of those before it does."""

    name: str
    why: str


class ProductKind(NamedTuple):
    """Products of x with a weight that take about as long as each other: rows of x up to a power of two, the rest
    exactly; ``weight``: how it is stored."""

    rows: int
    columns: int
    outs: int
    dtype: str
    weight: str

    @staticmethod
    def of(x: Tensor, outs: int, weight: str) -> ProductKind:
        """The kind of a product of x ``[M, K]`` with a weight of this many rows."""
        rows, columns = x.shape
        return ProductKind(power_of_two(rows), columns, outs, str(x.dtype).removeprefix("torch."), weight)


class Ways(Contest[Kind]):
    """The ways to compute calls, tuples whose ``out`` is written. A call takes the first that can run, or where several
    of ``rivals`` can, the one that was fastest when they were timed. Made by ``runtime.part``.

    Attributes:
        table: for each way, the preferred ones first, two functions of a call: one says why the way cannot compute it
            ("" = it can), one computes it.
        rivals: the ways that are timed.
    """

    table: ClassVar[Mapping[str, tuple[Callable[[Any], str], Callable[[Any], object]]]]
    rivals: tuple[str, ...]

    def kind_of(self, call: Any) -> Kind:
        """The kind of a call, by which its time is known."""
        raise NotImplementedError

    def kernels(self) -> tuple[Compilation, ...]:
        """Our kernels among the ways: with others the times no longer hold."""
        raise NotImplementedError

    def conditions(self) -> dict[str, str]:
        kernels, has_kernels = self.runtime.part(Kernels), self.info.kind in ("cuda", "hip")
        known = {"card": self.info.name, "arch": kernels.arch if has_kernels else "", "torch": torch.__version__}
        return {**known, "kernels": digest_of(self.kernels())}

    def times(self, call: Any, names: list[str]) -> Found | None:
        """Milliseconds of these ways for calls like this one; None = not known."""
        kind = self.kind_of(call)

        def measure() -> Found | None:
            own = call._replace(out=torch.empty_like(call.out))
            with torch.no_grad():
                return self.timed(kind, {name: functools.partial(self.table[name][1], own) for name in names})

        return self.find(kind, measure)

    def able(self, call: Any) -> list[str]:
        return [name for name, (why_not, _) in self.table.items() if not why_not(call)]

    def chosen(self, call: Any) -> Way:
        reasons = {name: why_not(call) for name, (why_not, _) in self.table.items()}
        able = [name for name, reason in reasons.items() if not reason]
        rivals, best = [name for name in able if name in self.rivals], able[0]
        times = self.times(call, rivals) if len(rivals) > 1 else None
        if times:
            best = min(rivals, key=lambda name: times.get(name, math.inf))
            for name in rivals[: rivals.index(best)]:
                reasons[name] = f"{name} took {times.get(name, math.inf) / times[best]:.2f} times as long as {best}"
        before = list(reasons)[: list(reasons).index(best)]
        return Way(best, "; ".join(dict.fromkeys(reasons[name] for name in before)))

    def compute(self, call: Any) -> None:
        """Compute a call by its way; one that turns out to be unavailable has a reason from then on."""
        while True:
            try:
                self.table[self.chosen(call).name][1](call)
                return
            except KernelUnavailable:
                continue
