"""The queues in which another device is given work: copies there, computation, copies back.

What is put into one lane runs in order, and beside what is in the others. On CUDA a lane is a stream and a mark an
event; on a CPU everything is done at once, in the thread that asks.

====================  ==================================================================================
lane                  what is in it
====================  ==================================================================================
``SEND``              home, from its memory to pinned memory of the host
``RECEIVE``           the other device, from there to its own memory
``RUN``               the other device, computation
``RETURN``            the other device, from its memory to pinned memory
``LAND``              home, from there into the result
====================  ==================================================================================

Where one device reads the other's memory directly (peer access), ``SEND`` and ``RECEIVE`` make one copy together, and
so do ``RETURN`` and ``LAND``.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

Mark = Any


class Lane(enum.Enum):
    SEND = "send"
    RECEIVE = "receive"
    RUN = "run"
    RETURN = "return"
    LAND = "land"


class Place(enum.Enum):
    """Where a tensor lies: the caller's device, the other one, or pinned memory of the host."""

    HOME = "home"
    AWAY = "away"
    PINNED = "pinned"


AT_HOME = (Lane.SEND, Lane.LAND)


class Lanes(ABC):
    """
    Attributes:
        home, away: the two devices.
        is_direct: whether one copy takes a tensor from one to the other.
    """

    home: torch.device
    away: torch.device
    is_direct = True

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Entered by the thread that puts work into the lanes, around all of it."""

    @abstractmethod
    def follow_caller(self) -> None:
        """Called by the caller's own thread: what is put into ``SEND`` and ``LAND`` from now on runs after all that the
        caller has put into its device's current stream so far."""

    @abstractmethod
    def settle(self) -> None:
        """The host waits for what this thread has put into the current streams of both devices."""

    @abstractmethod
    def on(self, *lanes: Lane) -> AbstractContextManager[None]:
        """What the block computes is put into these lanes."""

    @abstractmethod
    def mark(self, lane: Lane) -> Mark:
        """Reached when all that the lane holds now is done."""

    @abstractmethod
    def after(self, lane: Lane, mark: Mark) -> None:
        """What is put into the lane from now on waits for the mark."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """The host waits for the mark.

        Raises:
            RuntimeError: the device has failed meanwhile.
        """

    @abstractmethod
    def empty_like(self, tensor: Tensor, place: Place, lane: Lane) -> Tensor:
        """Memory of the shape, dtype and order of dimensions of ``tensor``, without gaps, first used in that lane."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, *lanes: Lane) -> None:
        """Put a copy into a lane, or into two that make it together."""

    @abstractmethod
    def drain(self) -> None:
        """The host waits until nothing is left in any lane. Errors of the device are not raised."""

    @abstractmethod
    def spent(self) -> tuple[float, float]:
        """Milliseconds that the other device has spent in copies, and in ``RUN``, since this was asked last. Only asked
        when nothing is left in the lanes."""


class HostLanes(Lanes):
    """For a CPU: each thing is done when it is put in."""

    def __init__(self, home: torch.device, away: torch.device):
        self.home, self.away = home, away
        self._copy_ms = self._run_ms = 0.0

    def open(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow_caller(self) -> None:
        pass

    def settle(self) -> None:
        pass

    @contextmanager
    def on(self, *lanes: Lane) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if Lane.RUN in lanes:
            self._run_ms += 1e3 * (time.perf_counter() - began)

    def mark(self, lane: Lane) -> Mark:
        return None

    def after(self, lane: Lane, mark: Mark) -> None:
        pass

    def wait(self, mark: Mark) -> None:
        pass

    def empty_like(self, tensor: Tensor, place: Place, lane: Lane) -> Tensor:
        return torch.empty_like(tensor, device=self.home if place == Place.HOME else self.away)

    def copy(self, target: Tensor, source: Tensor, *lanes: Lane) -> None:
        began = time.perf_counter()
        target.copy_(source)
        self._copy_ms += 1e3 * (time.perf_counter() - began)

    def drain(self) -> None:
        pass

    def spent(self) -> tuple[float, float]:
        spent, self._copy_ms, self._run_ms = (self._copy_ms, self._run_ms), 0.0, 0.0
        return spent


class CudaLanes(Lanes):
    """For two CUDA devices, or one that is named twice: five streams of their own.

    Args:
        is_direct: None = where the driver allows it.
    """

    def __init__(self, home: torch.device, away: torch.device, *, is_direct: bool | None = None):
        self.home, self.away = home, away
        if is_direct is None:
            is_direct = home == away or torch.cuda.can_device_access_peer(home, away)
        self.is_direct = is_direct
        self._streams = {lane: torch.cuda.Stream(home if lane in AT_HOME else away) for lane in Lane}
        self._clocks: list[tuple[bool, Any, Any]] = []  # whether it was a copy, its start and its end

    @contextmanager
    def open(self) -> Iterator[None]:
        with torch.cuda.device(self.away):
            yield

    def follow_caller(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.home))
        for lane in AT_HOME:
            self._streams[lane].wait_event(event)

    def settle(self) -> None:
        for device in (self.home, self.away):
            torch.cuda.current_stream(device).synchronize()

    @contextmanager
    def on(self, *lanes: Lane) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.home if lanes[-1] in AT_HOME else self.away))
            for lane in lanes:
                stack.enter_context(torch.cuda.stream(self._streams[lane]))
            if Lane.RUN not in lanes:
                yield
                return
            with self._clock(Lane.RUN, is_copy=False):
                yield

    @contextmanager
    def _clock(self, lane: Lane, *, is_copy: bool) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._streams[lane])
        yield
        end.record(self._streams[lane])
        self._clocks.append((is_copy, start, end))

    def mark(self, lane: Lane) -> Mark:
        event = torch.cuda.Event()
        event.record(self._streams[lane])
        return event

    def after(self, lane: Lane, mark: Mark) -> None:
        self._streams[lane].wait_event(mark)

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def empty_like(self, tensor: Tensor, place: Place, lane: Lane) -> Tensor:
        if place == Place.PINNED:
            like = torch.empty_like(tensor, device="meta")
            return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
        with self.on(lane):
            return torch.empty_like(tensor, device=self.home if place == Place.HOME else self.away)

    def copy(self, target: Tensor, source: Tensor, *lanes: Lane) -> None:
        # Torch puts a copy between devices into the current stream of the source, and lets that of the target wait.
        timed = next((lane for lane in lanes if lane not in AT_HOME), None)
        with self.on(*lanes):
            if timed is None:
                target.copy_(source, non_blocking=True)
                return
            with self._clock(timed, is_copy=True):
                target.copy_(source, non_blocking=True)

    def drain(self) -> None:
        for stream in self._streams.values():
            try:
                stream.synchronize()
            except RuntimeError:  # a device that is lost has nothing left to wait for
                continue

    def spent(self) -> tuple[float, float]:
        clocks, self._clocks = self._clocks, []
        sums = {True: 0.0, False: 0.0}
        for is_copy, start, end in clocks:
            sums[is_copy] += start.elapsed_time(end)
        return sums[True], sums[False]


def lanes_between(home: torch.device, away: torch.device) -> Lanes:
    """The lanes of this kind of devices.

    Raises:
        ValueError: the devices are of kinds between which nothing is shared out.
    """
    if home.type == away.type == "cuda":
        return CudaLanes(home, away)
    if home.type == away.type == "cpu":
        return HostLanes(home, away)
    raise ValueError(f"devices must be CUDA devices, or all of them CPUs, got {home} and {away}")
