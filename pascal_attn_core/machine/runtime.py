"""The knowledge of this process about one device: the owner of all that is loaded, verified, timed, planned or capped
there.

A part of it is an object of a class of its own (:class:`..routes.tiled.Walks`,
:class:`..fused.trust.kernels.Kernels` ...) and is made when it is first needed. For other facts about a device, or
other kernels on it, make a :class:`Runtime` with them and install it by :func:`using`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from .device import DeviceInfo, device_info

Part = TypeVar("Part")


class Runtime:
    """The parts of one device; ``info`` holds the facts that shapes and routes are chosen by."""

    def __init__(
        self,
        device: torch.device | str,
        info: DeviceInfo | None = None,
        parts: Mapping[type, Callable[[Runtime], Any]] | None = None,
    ):
        """
        Args:
            info: instead of the device's own facts.
            parts: factories that replace a part's constructor, such as a subclass.
        """
        self.device = torch.device(device)
        self.info = device_info(self.device) if info is None else info
        self._makers = dict(parts or {})
        self._parts: dict[type, Any] = {}
        self._lock = threading.RLock()

    def part(self, kind: type[Part]) -> Part:
        """The part of a class, made as ``kind(self)`` at the first call."""
        found = self._parts.get(kind)
        if found is None:
            with self._lock:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = self._makers.get(kind, kind)(self)
        return found


_runtimes: dict[torch.device, Runtime] = {}
_lock = threading.Lock()
epoch = 0  # in another one, what was found out before on any device may hold no longer


def begin_epoch() -> None:
    global epoch
    with _lock:
        epoch += 1


def runtime_of(device: torch.device) -> Runtime:
    """The runtime of a device; ``"cuda"`` without an index is the current CUDA device."""
    found = _runtimes.get(device)
    if found is None:
        if device.type == "cuda" and device.index is None:
            return runtime_of(torch.device("cuda", torch.cuda.current_device()))
        with _lock:
            found = _runtimes.setdefault(device, Runtime(device))
    return found


def runtimes() -> list[Runtime]:
    with _lock:
        return list(_runtimes.values())


@contextlib.contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Let ``runtime`` be the one of its device, in all threads, while the block runs."""
    with _lock:
        before = _runtimes.get(runtime.device)
        _runtimes[runtime.device] = runtime
    begin_epoch()
    try:
        yield runtime
    finally:
        with _lock:
            if before is None:
                del _runtimes[runtime.device]
            else:
                _runtimes[runtime.device] = before
        begin_epoch()
