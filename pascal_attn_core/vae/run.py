"""One decoding or encoding in bands: what is computed when, in how many bands, and what it took."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .lazy import Known, Lazy, Pointwise, aten
from .room import Queues, Room, Value
from .trees import leaves
from .windows import Moments


class NotInBands(Exception):
    """This model does something that cannot be followed in bands; the message says what."""


@dataclass
class Figures:
    """What a run did.

    Attributes:
        layers: values that were computed in bands or in one piece.
        bands: of all layers together.
        most_bands: of one layer.
        whole: operators that ran whole, how often each.
        retries: out-of-memory errors after which fewer rows were taken.
        host_bytes: most bytes in host memory at once.
        expected_bytes: most bytes on the device at once, by calculation.
    """

    layers: int = 0
    bands: int = 0
    most_bands: int = 0
    whole: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    host_bytes: int = 0
    expected_bytes: int = 0


class Run:
    """
    Args:
        device: where it computes.
        budget: bytes on the device for one band and the values that are kept there.
        keep: where values lie, see :class:`.room.Room`.
        least_bands: cut everything that can be cut into so many, for proofs.
        rows: at most so many elements per band, for tests; None = as many as the budget allows.
        on_band: called after each band.
        queues: see :class:`.room.Room`.
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
        queues: Queues | None = None,
    ):
        self.device = torch.device("meta") if is_rehearsal else device
        self.budget, self.rows, self.on_band, self.is_rehearsal = budget, rows, on_band, is_rehearsal
        self.least_bands = least_bands
        # a CPU has no other memory than the host's
        self.room = Room(self.device, "device" if keep == "auto" and device.type != "cuda" else keep, budget, queues)
        self.figures = Figures()
        self._last_try: Lazy | None = None

    def known(self, tensor: Tensor) -> Known:
        """A tensor on the device as a node."""
        tensor = tensor.detach()
        return Known(tensor.to("meta"), Value(tensor.to("meta") if self.is_rehearsal else tensor, self.room))

    def copied(self, node: Lazy) -> Lazy:
        """What a model copies in order to let go of the rest (frames for the next call): memory of its own."""
        held = node.value.held_bytes() if node.value is not None else node.leaf_bytes()
        if 2 * held < 3 * node.nbytes or not node.nbytes:
            return node
        if node.value is None:
            self.evaluate(node)
            return node
        copy = Pointwise(node.like, aten.clone.default, (node,), {})
        self.evaluate(copy)
        return copy

    def settled(self, node: Lazy) -> Lazy:
        """A node whose heavy work, if it holds any, is done."""
        if node.is_pending:
            self.evaluate(node)
        return node

    def evaluate(
        self,
        node: Lazy,
        moments: Moments | None = None,
        *,
        at_home: bool = False,
    ) -> Value:
        """Compute a node and keep it.

        Args:
            moments: take in each piece, in order; a node that is kept already is read for them.
            at_home: on the device whatever its size, since it is a result.
        """
        if node.value is not None and moments is None:
            return node.value
        dim = self._dim(node, moments)
        total = node.size(dim)
        stays = at_home or self.room.stays(node.nbytes)
        count = self._count(node, dim, moments, node.nbytes if stays and node.value is None else 0)
        target = node.value
        self.figures.layers += 1
        low = bands = 0
        if self.is_rehearsal:
            target = target or self.room.place_for(node.like, dim, on_host=not stays)
            low, bands = total, -(-total // count)
        while low < total:
            high = min(total, low + count)
            try:
                if high < total:
                    self._read_ahead(node, dim, high, min(total, high + count))
                target = self._band(node, dim, low, high, target, moments, stays)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                count = self._fewer(node, dim, count, error)
                continue
            low, bands = high, bands + 1
            if self.on_band is not None:
                self.on_band()
        self.room.settle()
        self.figures.bands += bands
        self.figures.most_bands = max(self.figures.most_bands, bands)
        self.figures.host_bytes = self.room.host_peak
        assert target is not None or total == 0
        if target is None:
            target = self.room.place_for(node.like, dim, on_host=False)
        if node.value is None:
            node.keep(target)
        return target

    def _band(
        self,
        node: Lazy,
        dim: int,
        low: int,
        high: int,
        target: Value | None,
        moments: Moments | None,
        stays: bool,
    ) -> Value | None:
        """One range of a node. Whatever it has done when memory runs out may be done again."""
        piece = node.read(dim, low, high, {})
        if node.value is None:
            if stays and (low, high) == (0, node.size(dim)) and node.is_fresh and not node.may_alias:
                target = self.room.home(piece)
            else:
                target = target or self.room.place_for(node.like, dim, on_host=not stays)
                target.write(dim, low, piece)
        if moments is not None:
            moments.add(piece)
        return target

    def _fewer(self, node: Lazy, dim: int, count: int, error: Exception) -> int:
        """After an out-of-memory error: half as many rows, then values to host memory, then the error."""
        self.figures.retries += 1
        for value, *_ in node.leaves(dim, 0, node.size(dim)):
            value.forget_ahead()
        error.__traceback__ = None  # its frames hold the pieces
        self._free()
        unit = max(node.granule(dim), 1)
        if count > unit:
            return max(unit, count // 2 // unit * unit)
        if self.room.make_room() or self._last_try is not node:
            self._last_try = node
            return count
        raise error

    def _read_ahead(self, node: Lazy, dim: int, low: int, high: int) -> None:
        if self.room.queues is not None:
            for value, *where in node.leaves(dim, low, high):
                value.read_ahead(*where)

    def _dim(self, node: Lazy, moments: Moments | None) -> int:
        """The dimension to cut: rows, then frames, then columns; the first of which a band fits the budget."""
        dims = node.like.dim()
        order = (
            [dims - 2, *range(2, dims - 2), dims - 1] if dims >= 4 else sorted(range(dims), key=lambda d: -node.size(d))
        )
        uncut = () if moments is None else moments.uncut
        found = [dim for dim in order if dim not in uncut and node.size(dim) > 1 and node.granule(dim)]
        if not found:
            return 0
        costs = {dim: self._cost(node, dim, min(node.granule(dim), node.size(dim)), moments) for dim in found}
        return next((dim for dim in found if costs[dim] <= self._room_for_bands()), min(found, key=lambda d: costs[d]))

    def _room_for_bands(self, kept: int = 0) -> int:
        return max(self.budget - self.room.held - kept, self.budget // 4)

    def _cost(self, node: Lazy, dim: int, count: int, moments: Moments | None) -> int:
        """Bytes on the device while so many elements are read, in the middle of the tensor."""
        unit = max(node.granule(dim), 1)
        low = (node.size(dim) - count) // 2 // unit * unit
        most, held = node.cost(dim, low, min(low + count, node.size(dim)))
        if moments is None:
            return most
        elements = node.like.numel() // max(node.size(dim), 1) * count
        return max(most, held + moments.scratch(elements, node.like.dtype))

    def _count(self, node: Lazy, dim: int, moments: Moments | None, kept: int) -> int:
        """Elements per band: the fewest bands of equal size that fit the budget.

        Args:
            kept: bytes on the device that the bands are collected in; one band is its own place.
        """
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
        expected = self.room.held + (kept if count < total else 0) + self._cost(node, dim, min(count, total), moments)
        self.figures.expected_bytes = max(self.figures.expected_bytes, expected)
        return max(count, 1)

    def whole(self, node: Lazy) -> Tensor:
        """All of a node on the device, contiguous."""
        if node.value is None:
            self.evaluate(node, at_home=True)
        value = node.value
        assert value is not None
        return self.patiently(lambda: self.room.bring(value).contiguous())

    def patiently(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; where it runs out of memory, it is done once more after room has been made."""
        try:
            return work()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
        self.figures.retries += 1
        self._free()
        self.room.make_room()
        return work()

    def _free(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "out of memory" in text or "can't allocate memory" in text


@contextmanager
def same_random_numbers(arguments: Any, device: torch.device) -> Iterator[None]:
    """What the block draws from torch's generators and from those among ``arguments`` leaves no trace."""
    generators = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
