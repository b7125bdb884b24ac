"""The other devices that work for one, and what was found out about each: lost, short of memory, busy with its own."""

from __future__ import annotations

import logging
import threading
import time

import torch

from ..runtime import Runtime
from .lanes import Lanes, lanes_between

log = logging.getLogger("pascal_attn")
PAUSE_SECONDS = 10.0  # after the device ran out of memory
BUSY_SECONDS = 10.0  # after a call of its own was seen on it


class Helper:
    """One other device. Calls of several threads do not wait for each other: who comes second stays at home.

    Attributes:
        lost: why nothing is ever given to it again, "" while it works.
    """

    def __init__(self, home: torch.device, device: torch.device):
        self.home, self.device, self.lost = home, device, ""
        self._lanes: Lanes | None = None
        self._lock = threading.Lock()
        self._paused_until = self._busy_until = 0.0
        self._told: set[str] = set()

    def lanes(self) -> Lanes:
        """Made at the first call that needs them; to be used while the helper is taken only."""
        if self._lanes is None:
            self._lanes = lanes_between(self.home, self.device)
        return self._lanes

    def take(self) -> str:
        """Begin to use it, until :meth:`give_back`; otherwise why that is not possible now."""
        now = time.monotonic()
        if self.lost:
            return self.lost
        if now < self._paused_until:
            return f"{self.device} ran out of memory a moment ago"
        if now < self._busy_until:
            return f"{self.device} computes attention of its own, as in ComfyUI's work split over several cards"
        if not self._lock.acquire(blocking=False):
            return f"{self.device} computes a part of another thread's call"
        return ""

    def give_back(self) -> None:
        self._lock.release()

    def is_busy(self) -> None:
        """A call whose tensors are on the device was seen."""
        self._busy_until = time.monotonic() + BUSY_SECONDS

    def failed(self, error: Exception) -> str:
        """Remember what went wrong there, and say it once in the log; returns the sentence."""
        if is_out_of_memory(error):
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            sentence = f"{self.device} ran out of memory: its part was computed on {self.home}"
        else:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.lost = f"{self.device} failed in an earlier call ({reason})"
            sentence = (
                f"{self.device} failed ({reason}): its part was computed on {self.home}, and so is everything from now "
                "on"
            )
        self._lanes = None
        self.tell(sentence)
        return sentence

    def tell(self, sentence: str) -> None:
        """Write a sentence into the log, once."""
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("%s", sentence)


class Helpers:
    """Those of one device; a part of its :class:`~pascal_attn_core.runtime.Runtime`."""

    def __init__(self, runtime: Runtime):
        self.home = runtime.device
        self._known: dict[tuple[torch.device, int], Helper] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device, number: int = 0) -> Helper:
        """
        Args:
            number: where a configuration names a device several times, which of them.
        """
        found = self._known.get((device, number))
        if found is None:
            with self._lock:
                found = self._known.setdefault((device, number), Helper(self.home, device))
        return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, has no memory left."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "CUDA error: out of memory" in text)
