"""Memory that is free costs nothing: how much of a device's may be taken for what is no larger than the inputs."""

from __future__ import annotations

import time

import torch

from .device import LARGEST_BUFFER, free_bytes
from .runtime import Runtime, runtime_of

_SHARE = 4  # of the free memory a call may take one part
_ASK_SECONDS, _SHORT_SECONDS = 1.0, 60.0


class Room:
    """This part says what copies of one call may take where no budget is given: a quarter of the free memory, at
    least the default budget. It is asked once in a second, and after a lack of memory less is taken for a minute. Made
    by ``runtime.part(Room)``."""

    def __init__(self, runtime: Runtime):
        self._device, self._least = runtime.device, runtime.info.default_budget_bytes()
        self._most, self._asked = self._least, -_ASK_SECONDS
        self._cap, self._capped = LARGEST_BUFFER, 0.0

    def most_bytes(self) -> int:
        now = time.monotonic()
        if now >= self._asked + _ASK_SECONDS and not _captures(self._device):
            self._asked, self._most = now, max(self._least, _free(self._device) // _SHARE)
        return min(self._most, self._cap if now < self._capped else LARGEST_BUFFER)

    def ran_out(self) -> bool:
        """Memory was short: half of it is left to be taken. False where it was the least already."""
        most = self.most_bytes()
        self._cap, self._capped = max(self._least, most // 2), time.monotonic() + _SHORT_SECONDS
        return self._cap < most


def room_of(device: torch.device) -> int:
    """Bytes that a call on this device may take for copies of the size of its inputs, where no budget is given."""
    return runtime_of(device).part(Room).most_bytes()


def _free(device: torch.device) -> int:
    """Free memory of a device, with what torch's allocator holds unused; 0 where that is not known."""
    free = free_bytes(device) if device.type != "meta" else None
    if free is not None and device.type == "cuda":
        free += max(0, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return free or 0


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
