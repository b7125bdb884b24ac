"""The clock of ``pascal-attn bench``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds that a function takes on one device.

    On a CPU with one thread it is that thread's own time, which other processes disturb least; with more threads it
    is wall time. On CUDA it is the time between two events; on other devices wall time between two synchronisations.
    """

    def __init__(self, device: torch.device, threads: int):
        self.device = device
        self._now = time.thread_time if device.type == "cpu" and threads == 1 else time.perf_counter

    @property
    def kind(self) -> str:
        """In words, for the heading of a table."""
        if self.device.type == "cuda":
            return "CUDA events"
        return "thread time" if self._now is time.thread_time else "wall time"

    def seconds(self, fn: Callable[[], Any], calls: int = 1) -> float:
        """Mean seconds of one call."""
        if self.device.type == "cuda":
            return self._cuda_seconds(fn, calls)
        self._synchronize()
        start = self._now()
        for _ in range(calls):
            fn()
        self._synchronize()
        return (self._now() - start) / calls

    def _cuda_seconds(self, fn: Callable[[], Any], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def _synchronize(self) -> None:
        if self.device.type in ("mps", "xpu"):
            getattr(torch, self.device.type).synchronize()


@contextmanager
def quiet_torch(threads: int) -> Iterator[None]:
    """Use this many CPU threads and no TF32 within a block."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_num_threads(), matmul.allow_tf32
    torch.set_num_threads(threads)
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32 = before[1]
