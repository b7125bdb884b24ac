"""One decoding or encoding in bands: what is computed when, in how many bands, and what it took."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..machine.out_of_memory import out_of_memory
from .lazy import Known, Lazy, Pointwise, aten, leaves
from .store import ActivationStore, Value
from .windows import Moments


@dataclass
class Figures:
    """The figures of a run."""

    layers: int = 0  # values that were computed in bands or in one piece
    bands: int = 0  # of all layers together
    whole: Counter[str] = field(default_factory=Counter)  # operators that ran whole, how often each
    retries: int = 0  # out-of-memory errors after which fewer rows were taken
    host_bytes: int = 0  # most in host memory at once
    expected_bytes: int = 0  # most on the device at once, by calculation


class BandedRun:
    """One decoding or encoding.

    Args:
        budget: bytes on the device for one band and the values that are kept there.
        keep, queues: see :class:`.store.ActivationStore`.
        least_bands: cut everything that can be cut into this many bands, for proofs.
        rows: most elements per band, for tests; None = as many as the budget allows.
        is_rehearsal: shapes only: nothing is computed, the figures are what the run will take.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int,
        *,
        keep: str = "auto",
        least_bands: int = 1,
        rows: int | None = None,
        on_band: Callable[[], None] | None = None,
        is_rehearsal: bool = False,
        queues: Any = None,
    ):
        self.device = torch.device("meta") if is_rehearsal else device
        self.budget, self.rows, self.on_band, self.is_rehearsal = budget, rows, on_band, is_rehearsal
        self.least_bands = least_bands
        if keep == "auto" and device.type != "cuda":
            keep = "device"  # a CPU has no other memory than the host's
        self.store = ActivationStore(self.device, keep, budget, queues)
        self.figures = Figures()
        self._last_try: Lazy | None = None
        # What the model has been given, and what it has made of that, by id, the oldest first.
        self.tensors: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.unsteady: set[int] = set()  # ids of weights that may change while the model runs

    def known(self, tensor: Tensor) -> Known:
        """A tensor on the device as a node."""
        tensor = tensor.detach()
        return Known(tensor.to("meta"), Value(tensor.to("meta") if self.is_rehearsal else tensor, self.store))

    def copied(self, node: Lazy) -> Lazy:
        """A copy by which a model lets go of the rest (frames for the next call): memory of its own."""
        held = node.leaf_bytes() if node.value is None else node.value.tensor.untyped_storage().nbytes()
        if 2 * held < 3 * node.nbytes or not node.nbytes:
            return node
        copy = node if node.value is None else Pointwise(node.like, aten.clone.default, (node,), {})
        self.evaluate(copy)
        return copy

    def settled(self, node: Lazy) -> Lazy:
        """A node whose heavy work, if it holds any, is done."""
        if node.is_pending:
            self.evaluate(node)
        return node

    def evaluate(self, node: Lazy, moments: Moments | None = None, *, on_device: bool = False) -> Value:
        """Compute a node and keep it, a result on the device whatever its size. Moments take in each piece, in order;
        a node that is kept already is read for them."""
        if node.value is not None and moments is None:
            return node.value
        node.check_given()
        dim = self._dim(node, moments)
        stays = on_device or self.store.stays(node.nbytes)
        count = self._count(node, dim, moments, node.nbytes if stays and node.value is None else 0)
        self.figures.layers += 1
        if self.is_rehearsal:
            target, bands = node.value, -(-node.size(dim) // count)
        else:
            with self.as_recorded():
                target, bands = self._bands(node, dim, count, moments, stays)
        self.store.settle()
        self.figures.bands += bands
        self.figures.host_bytes = self.store.host_peak
        if target is None:
            target = self.store.place_for(node.like, dim, on_host=not stays and bool(bands))
        if node.value is None:
            node.keep(target)
        return target

    def as_recorded(self) -> AbstractContextManager:
        """Switch autocast off for the computation: an operator has been through autocast before it is recorded."""
        kind = self.device.type
        is_on = kind != "meta" and torch.is_autocast_enabled(kind)
        return torch.autocast(kind, enabled=False) if is_on else nullcontext()

    def _bands(
        self, node: Lazy, dim: int, count: int, moments: Moments | None, stays: bool
    ) -> tuple[Value | None, int]:
        """Compute a node in bands of ``count``: (where it lies, None if it is empty; the number of bands)."""
        target, total = node.value, node.size(dim)
        low = bands = 0
        while low < total:
            high = min(total, low + count)
            try:
                if high < total and self.store.queues is not None:
                    for value, *where in node.leaves(dim, high, min(total, high + count)):
                        value.read_ahead(*where)
                target = self._band(node, dim, (low, high), target, moments, stays)
            except out_of_memory() as error:
                count = self._fewer(node, dim, count, error)
                continue
            low, bands = high, bands + 1
            if self.on_band is not None:
                self.on_band()
        return target, bands

    def _band(
        self, node: Lazy, dim: int, part: tuple[int, int], target: Value | None, moments: Moments | None, stays: bool
    ) -> Value | None:
        """One range of a node. Whatever it has done when memory runs out may be done again."""
        piece = node.read(dim, *part, {})
        if node.value is None:
            if stays and part == (0, node.size(dim)) and node.is_fresh and not node.may_alias:
                target = self.store.on_device(piece)
            else:
                target = target or self.store.place_for(node.like, dim, on_host=not stays)
                target.write(dim, part[0], piece)
        if moments is not None:
            moments.add(piece)
        return target

    def _fewer(self, node: Lazy, dim: int, count: int, error: Exception) -> int:
        """After an out-of-memory error: half as many rows, then values to host memory, then the error."""
        self.figures.retries += 1
        for value, *_ in node.leaves(dim, 0, node.size(dim)):
            value.ahead.clear()
        error.__traceback__ = None  # its frames hold the pieces
        self._free()
        unit = max(node.granule(dim), 1)
        if count > unit:
            return max(unit, count // 2 // unit * unit)
        if self.store.make_room() or self._last_try is not node:
            self._last_try = node
            return count
        raise error

    def _dim(self, node: Lazy, moments: Moments | None) -> int:
        """The dimension to cut: rows, then frames, then columns; the first of which a band fits the budget."""
        dims = node.like.dim()
        order = [dims - 2, *range(2, dims - 2), dims - 1]
        if dims < 4:
            order = sorted(range(dims), key=lambda d: -node.size(d))
        uncut = () if moments is None else moments.uncut
        found = [dim for dim in order if dim not in uncut and node.size(dim) > 1 and node.granule(dim)]
        if not found:
            return 0
        costs = {dim: self._cost(node, dim, min(node.granule(dim), node.size(dim)), moments) for dim in found}
        return next((dim for dim in found if costs[dim] <= self._room_for_bands()), min(found, key=lambda d: costs[d]))

    def _room_for_bands(self, kept: int = 0) -> int:
        return max(self.budget - self.store.held - kept, self.budget // 4)

    def _cost(self, node: Lazy, dim: int, count: int, moments: Moments | None) -> int:
        """Bytes on the device while ``count`` elements are read, in the middle of the tensor."""
        unit = max(node.granule(dim), 1)
        low = (node.size(dim) - count) // 2 // unit * unit
        most, held = node.cost(dim, low, min(low + count, node.size(dim)))
        if moments is None:
            return most
        elements = node.like.numel() // max(node.size(dim), 1) * count
        return max(most, held + moments.scratch(elements, node.like.dtype))

    def _count(self, node: Lazy, dim: int, moments: Moments | None, kept: int) -> int:
        """Elements per band: the fewest bands of equal size that fit the budget, beside the ``kept`` bytes that they
        are collected in; one band is its own place."""
        total, unit = node.size(dim), node.granule(dim)
        if not unit or total <= unit:
            count = total
        else:
            steps = -(-total // unit)
            low, high = 1, steps  # units per band: low fits, or is all there is to take
            while low < high:
                middle = (low + high + 1) // 2
                beside = kept if middle < steps else 0
                if self._cost(node, dim, min(middle * unit, total), moments) <= self._room_for_bands(beside):
                    low = middle
                else:
                    high = middle - 1
            if self.rows is not None:
                low = max(1, min(low, self.rows // unit))
            bands = min(max(-(-steps // low), self.least_bands), steps)
            count = -(-steps // bands) * unit
        expected = self.store.held + (kept if count < total else 0) + self._cost(node, dim, min(count, total), moments)
        self.figures.expected_bytes = max(self.figures.expected_bytes, expected)
        return max(count, 1)

    def whole(self, node: Lazy) -> Tensor:
        """The whole of a node on the device, contiguous."""
        if node.value is None:
            self.evaluate(node, on_device=True)
        value: Any = node.value
        return self.patiently(lambda: self.store.bring(value).contiguous())

    def patiently(self, work: Callable[[], Any]) -> Any:
        """Return ``work()``; where it runs out of memory, it is done once more after values have moved to the host."""
        try:
            return work()
        except out_of_memory() as error:
            error.__traceback__ = None
        self.figures.retries += 1
        self._free()
        self.store.make_room()
        return work()

    def _free(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


@contextmanager
def same_random_numbers(arguments: Any, device: torch.device) -> Iterator[None]:
    """The block leaves torch's generators and those among ``arguments`` as they were."""
    generators = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
