"""The store of activations between two layers: on the device of the run, or in host memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..observe.memory import uncounted

KEEP = ("auto", "device", "host")
_IN_FLIGHT = 2  # bands on their way to host memory at once


class Value:
    """A tensor that has been computed, on the device or in host memory, from where it is copied to be read. There the
    dimension that it was written along lies outermost, so that each range of it is one block."""

    def __init__(self, tensor: Tensor, store: ActivationStore, *, on_host: bool = False):
        self.tensor, self.owner, self.on_host = tensor, store, on_host
        self.ahead: dict[tuple[int, int, int], Any] = {}  # ranges that were brought to the device and not read yet

    def _range(self, dim: int, low: int, high: int) -> Tensor:
        return self.tensor.narrow(dim, low, high - low) if self.tensor.dim() else self.tensor

    def read(self, dim: int, low: int, high: int) -> Tensor:
        """A range of the value on the device; a view where it lies there."""
        if not self.on_host:
            return self._range(dim, low, high)
        ahead = self.ahead.pop((dim, low, high), None)
        if ahead is not None and self.owner.queues is not None:
            return self.owner.queues.arrived(ahead)
        return self.owner.fetch(self._range(dim, low, high), dim)

    def read_bytes(self, dim: int, low: int, high: int) -> int:
        """New memory on the device for a range."""
        if not self.on_host:
            return 0
        size = self.tensor.shape[dim] if self.tensor.dim() else 1
        return self.tensor.numel() * self.tensor.element_size() // max(size, 1) * (high - low)

    def read_ahead(self, dim: int, low: int, high: int) -> None:
        """Begin to bring a range to the device, where that goes beside other work."""
        if self.on_host and self.owner.queues is not None and (dim, low, high) not in self.ahead:
            self.ahead[dim, low, high] = self.owner.queues.send(self._range(dim, low, high), dim)

    def write(self, dim: int, low: int, piece: Tensor) -> None:
        """Put a range in its place."""
        if not self.tensor.dim():
            self.tensor.copy_(piece)
            return
        place = self.tensor.narrow(dim, low, piece.shape[dim])
        if self.on_host:
            self.owner.store(piece, place, dim)
        else:
            place.copy_(piece)


class Queues:
    """Copies between host memory and a CUDA device beside its computation, in two streams of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._flying: deque[Any] = deque()

    def fetch(self, piece: Tensor, dim: int) -> Tensor:
        """A range of a value in host memory, on the device, in the order of the current stream."""
        block = piece.movedim(dim, 0) if piece.dim() else piece
        block = block.contiguous().to(self.device, non_blocking=True)
        return block.movedim(0, dim) if piece.dim() else block

    def send(self, piece: Tensor, dim: int) -> tuple[Tensor, Any]:
        """Begin to fetch a range beside the computation."""
        with torch.cuda.stream(self._coming):
            return self.fetch(piece, dim), self._coming.record_event()

    def arrived(self, sent: tuple[Tensor, Any]) -> Tensor:
        """The range that :meth:`send` began to fetch; what is computed from now on waits for it."""
        block, event = sent
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        block.record_stream(current)
        return block

    def store(self, piece: Tensor, place: Tensor, dim: int) -> None:
        """Begin to copy a range to its place in host memory, after what has been computed so far."""
        while len(self._flying) >= _IN_FLIGHT:
            self._flying.popleft().synchronize()
        block = piece.movedim(dim, 0).contiguous()
        self._going.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._going):
            place.movedim(dim, 0).copy_(block, non_blocking=True)
            block.record_stream(self._going)
            self._flying.append(self._going.record_event())

    def settle(self) -> None:
        """Let what is fetched and sent from now on wait for all that is being stored."""
        torch.cuda.current_stream(self.device).wait_stream(self._going)
        self._coming.wait_stream(self._going)


class ActivationStore:
    """The activations of one run: ``keep`` is ``"device"``, ``"host"``, or ``"auto"``, which is the device while values
    take at most half of the budget together. ``queues`` is a :class:`Queues` or a stand-in; None = one on CUDA, none
    elsewhere."""

    def __init__(self, device: torch.device, keep: str, budget: int, queues: Any = None):
        self.device, self.keep, self.budget = device, keep, budget
        self.held = self.host_held = self.host_peak = 0  # bytes on the device; in host memory now, and at most so far
        self.queues = Queues(device) if queues is None and device.type == "cuda" else queues
        self._values: weakref.WeakSet[Value] = weakref.WeakSet()

    def place_for(self, like: Tensor, dim: int, *, on_host: bool) -> Value:
        """Memory for a value that is written along ``dim``."""
        if on_host:
            return Value(self.host_memory(like.shape, like.dtype, dim), self, on_host=True)
        return self.on_device(torch.empty(like.shape, dtype=like.dtype, device=self.device))

    def stays(self, nbytes: int) -> bool:
        return self.keep == "device" or (self.keep == "auto" and self.held + nbytes <= self.budget // 2)

    def on_device(self, tensor: Tensor) -> Value:
        """A value that lies on the device already."""
        value = Value(tensor, self)
        nbytes = tensor.numel() * tensor.element_size()
        self.held += nbytes
        weakref.finalize(tensor.untyped_storage(), self._left, nbytes)
        self._values.add(value)
        return value

    def _left(self, nbytes: int, host_bytes: int = 0) -> None:
        self.held -= nbytes
        self.host_held -= host_bytes

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype, dim: int) -> Tensor:
        """Host memory for a tensor, ``dim`` outermost; pinned where the device copies from it."""
        order = [dim, *(each for each in range(len(shape)) if each != dim)] if shape else []
        sizes = [shape[each] for each in order]
        if self.device.type == "cuda":
            try:
                tensor = torch.empty(sizes, dtype=dtype, pin_memory=True)
            except RuntimeError:  # no more memory can be pinned: copies wait for the host, no more
                tensor = torch.empty(sizes, dtype=dtype)
        else:
            with uncounted():
                tensor = torch.empty(sizes, dtype=dtype, device=self.device)
        nbytes = tensor.numel() * tensor.element_size()
        self.host_held += nbytes
        self.host_peak = max(self.host_peak, self.host_held)
        weakref.finalize(tensor.untyped_storage(), self._left, 0, nbytes)
        return tensor.permute([order.index(each) for each in range(len(shape))])

    def fetch(self, piece: Tensor, dim: int) -> Tensor:
        """A range of a value in host memory, on the device."""
        if self.queues is not None:
            return self.queues.fetch(piece, dim)
        return piece.contiguous() if not piece.is_contiguous() else piece.clone()

    def bring(self, value: Value) -> Tensor:
        """The whole of a value, on the device."""
        return self.fetch(value.tensor, 0) if value.on_host else value.tensor

    def store(self, piece: Tensor, place: Tensor, dim: int) -> None:
        """Copy a range to its place in host memory."""
        if self.queues is None:
            place.copy_(piece)
        else:
            self.queues.store(piece, place, dim)

    def settle(self) -> None:
        """Let what is read from now on come after what has been stored."""
        if self.queues is not None:
            self.queues.settle()

    def make_room(self) -> bool:
        """After an out-of-memory error: move values from the device to host memory. False = there are none."""
        moved = False
        for value in list(self._values):
            if not value.on_host and value.tensor.numel() and self.device.type == "cuda":
                kept = self.host_memory(value.tensor.shape, value.tensor.dtype, 0).copy_(value.tensor)
                value.tensor, value.on_host, moved = kept, True, True
        self.keep = "host"
        return moved
