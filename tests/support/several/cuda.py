"""Streams and events as torch has them for CUDA, without CUDA: who is current where, and what waits for what.

Tensors lie on the CPU and are copied at once; which stream a copy would be in is worked out by torch's own rules
(aten/src/ATen/native/cuda/Copy.cu).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HOME, AWAY = torch.device("cuda", 0), torch.device("cuda", 1)
_copy = torch.Tensor.copy_


@dataclass(eq=False)
class Copied:
    """A copy: in which stream, what is over when it begins, and the storages it touches."""

    stream: FakeStream
    before: set[Copied]
    reads: int
    writes: int


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: torch.device):
        self.cuda, self.device = cuda, torch.device(device)
        self.done: set[Copied] = set()  # over when the next thing in it begins

    def wait_stream(self, other: FakeStream) -> None:
        self.done |= other.done

    def synchronize(self) -> None:
        self.cuda.host |= self.done


@dataclass
class FakeCuda:
    """This class stands in place of ``torch.cuda``.

    Attributes:
        places: device of each storage that was made through ``FakeTorch``; all others are at home.
        host: copies that the host knows to be over.
    """

    places: dict[int, torch.device] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    host: set[Copied] = field(default_factory=set)
    kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current = {device: FakeStream(self, device) for device in (HOME, AWAY)}
        self._device = HOME

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, device)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current[device]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device
        yield
        self._device = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current[stream.device] = self._current[stream.device], stream
        with self.device(stream.device):
            yield
        self._current[stream.device] = before

    def place(self, tensor: Tensor) -> torch.device:
        return self.places.get(tensor.untyped_storage().data_ptr(), HOME)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``target.copy_(source)``."""
        to, of = self.place(target), self.place(source)
        stream = self._current[of]
        stream.done |= self._current[to].done
        copied = Copied(stream, stream.done | self.host, *_addresses(source, target))
        self.copies.append(copied)
        stream.done = stream.done | {copied}
        self._current[to].done |= stream.done
        return _copy(target, source)


def _addresses(source: Tensor, target: Tensor) -> tuple[int, int]:
    return source.untyped_storage().data_ptr(), target.untyped_storage().data_ptr()


class FakeTorch:
    """In place of the name ``torch`` in a module: ``cuda`` is the fake, and tensors of other devices lie on the CPU."""

    def __init__(self, cuda: FakeCuda):
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        made = torch.empty_like(tensor)
        self.cuda.places[made.untyped_storage().data_ptr()] = device
        self.cuda.kept.append(made)  # no address is given out twice
        return made
