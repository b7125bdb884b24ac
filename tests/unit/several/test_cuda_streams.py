"""A part on another CUDA device, on streams and events that only write down what waits for what.

Tensors lie on the CPU and are copied at once; which stream a copy would be in is worked out by torch's own rules
(aten/src/ATen/native/cuda/Copy.cu).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from pascal_attn_core.routes import several
from pascal_attn_core.routes.several import Helper, Tensors

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
        read, written = (tensor.untyped_storage().data_ptr() for tensor in (source, target))
        copied = Copied(stream, stream.done | self.host, read, written)
        self.copies.append(copied)
        stream.done = stream.done | {copied}
        self._current[to].done |= stream.done
        return _copy(target, source)


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


DEVICES = pytest.mark.parametrize("away", [AWAY, HOME])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(several, "torch", FakeTorch(fake))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source, **options: fake.copy(target, source, **options))
    return fake


def _part(cuda: FakeCuda, away: torch.device) -> tuple[Tensor, Tensor]:
    """Work of the caller, a part that is begun behind it, and more work of the caller beside it."""
    source, target, fake = torch.randn(8, 12)[:, :6], torch.zeros(8, 12)[:, :6], FakeTorch(cuda)
    cuda.copy(target, torch.ones(8, 6))

    def compute(tensors: Tensors) -> Tensors:
        assert tensors[1] is None
        made = fake.empty_like(tensors[0], away)
        cuda.copy(made, tensors[0])  # stands for a kernel: it reads one and writes the other, in the current stream
        made += 1
        return [made]

    helper = Helper(HOME, away)
    with ThreadPoolExecutor(1) as pool:
        errand = helper.start(pool, [source, None], [target, None], compute)
    errand.result()
    return source + 1, target


@DEVICES
def test_everything_that_touches_the_same_memory_is_ordered(cuda: FakeCuda, away: torch.device) -> None:
    expected, target = _part(cuda, away)
    assert torch.equal(target, expected)
    conflicts = 0
    for first, second in itertools.combinations(cuda.copies, 2):
        if first.writes in (second.reads, second.writes) or first.reads == second.writes:
            conflicts += 1
            assert first in second.before or second in first.before
    assert conflicts == 3
    assert set(cuda.copies[1:]) <= cuda.host  # it was waited for


@DEVICES
def test_what_the_caller_has_begun_comes_first_and_nothing_is_in_its_streams(cuda, away: torch.device) -> None:
    callers = {cuda.current_stream(device) for device in (HOME, AWAY)}
    _part(cuda, away)
    begun, *own = cuda.copies
    assert all(begun in copied.before for copied in own)
    assert not {copied.stream for copied in own} & callers
    assert {cuda.current_stream(device) for device in (HOME, AWAY)} == callers


def test_a_device_that_is_lost_while_it_is_waited_for_is_an_error(cuda: FakeCuda, monkeypatch: Any) -> None:
    helper, waited = Helper(HOME, AWAY), Mock()
    monkeypatch.setattr(helper.streams[1], "synchronize", Mock(side_effect=RuntimeError("CUDA error: device lost")))
    monkeypatch.setattr(helper.streams[0], "synchronize", waited)
    with pytest.raises(RuntimeError, match="device lost"):
        helper.run([torch.ones(2)], [torch.zeros(2)], lambda tensors: tensors)
    assert waited.called
