"""How much memory of a device is free, and how much of it a call may take for what is no larger than its inputs."""

from __future__ import annotations

import time
from pathlib import Path

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
            self._asked, self._most = now, max(self._least, (available_bytes(self._device) or 0) // _SHARE)
        return min(self._most, self._cap if now < self._capped else LARGEST_BUFFER)

    def ran_out(self) -> bool:
        """Memory was short: half of it is left to be taken. False where it was the least already."""
        most = self.most_bytes()
        self._cap, self._capped = max(self._least, most // 2), time.monotonic() + _SHORT_SECONDS
        return self._cap < most


def room_of(device: torch.device) -> int:
    """Bytes that a call on this device may take for copies of the size of its inputs, where no budget is given."""
    return runtime_of(device).part(Room).most_bytes()


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Memory that this process may still allocate, or None where that is unknown.

    On a GPU what its driver reports as free plus what torch's allocator holds unused; on Linux the kernel's estimate
    (``MemAvailable``), or what is left under the limit of a control group if that is less.
    """
    device = torch.device(device)
    if device.type != "cpu":
        free, memory = free_bytes(device), getattr(torch, device.type, None)
        if free is None or memory is None:
            return None
        if device.type == "mps":
            return free + memory.driver_allocated_memory() - memory.current_allocated_memory()
        return free + memory.memory_reserved(device) - memory.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    amounts = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    return min([amounts.get("MemAvailable", amounts["MemFree"]), *_room_in_control_groups()])


def _room_in_control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Bytes left under each limit of this process's control group and its parents; page cache counts as free."""
    try:
        paths = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    room = []
    for _, controllers, path in paths:
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        base = root / "memory" if is_v1 else root
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            group = base.joinpath(*parts[:depth])
            try:
                limit, used = ((group / name).read_text().strip() for name in names)
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue  # not visible inside a container, or without limits
            if limit != "max":
                room.append(int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return room


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
