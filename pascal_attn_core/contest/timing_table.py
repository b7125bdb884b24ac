"""Contests between several ways to do the same work on one device, timed once per kind of call and kept on disk."""

from __future__ import annotations

import functools
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..config import cache_folder, switched_on
from ..machine.out_of_memory import with_room
from ..machine.own_thread import in_backward, in_own_thread
from ..machine.runtime import Runtime, begin_epoch
from ..machine.storage import name_for, read_object, write_object

log = logging.getLogger("pascal_attn")
NO_TIMING = "PASCAL_ATTN_NO_TIMING"
RETRY_SECONDS = 60.0  # after a timing that failed: no memory, no kernel
ROUNDS = 3
Kind = TypeVar("Kind", bound=NamedTuple)
Found = dict[str, float]  # milliseconds of each attempt, by its name
Attempt = Callable[[], Any]
Clock = Callable[[list[Attempt], torch.device], list[float]]
_SECTION = "milliseconds"  # of the file
_process = os.getpid()  # a worker that was forked later has another number


class CallKind(NamedTuple):
    """Attention calls that are taken to be alike. Counts of tokens and rows are powers of two, at most those of the
    timed call.

    Attributes:
        kernel: the variant of the fused kernel (head_dim, dtype, kind of mask).
        q_tokens, kv_tokens: of a sequence.
        groups: query heads per key/value head.
        rows: query rows of all heads and batches together.
        mask: "" none, "keys" one row for all queries, "queries" a row for each.
        against: what ours is timed against on a GPU: ``"torch"``, ``"plain"`` (torch storing all scores; with the name
            of a route, that one is timed), or, of our kernel on tensor cores, everything: ``"tensor"``.
    """

    kernel: str
    head_dim: int
    head_dim_v: int
    q_tokens: int
    kv_tokens: int
    groups: int
    rows: int
    mask: str
    is_causal: bool
    gradients: bool = False
    against: str = ""


class Contest(Generic[Kind]):
    """Milliseconds of several attempts at the same small work, by the attempt's name, for each kind of call; several
    threads may ask at once. Subclasses say what a kind is, and on what the times depend.

    Attributes:
        known: the times; None where they could not be found out, which is not stored.
        kind_type: the class of the kinds.
        file_kind: the first part of the file's name.
    """

    kind_type: type[Any]
    file_kind = "timings"

    def __init__(
        self,
        runtime: Runtime,
        *,
        clock: Clock | None = None,
        folder: Callable[[], Path | None] = cache_folder,
        is_on: bool | None = None,
    ):
        """
        Args:
            clock: as :func:`median_times`.
            folder: gives the folder of the file, or None: nothing is stored.
            is_on: whether anything is timed, and what was timed before counts; None = as PASCAL_ATTN_NO_TIMING says.
        """
        self.runtime, self.device, self.info = runtime, runtime.device, runtime.info
        self.clock, self.folder = median_times if clock is None else clock, folder
        self.is_on = not switched_on(NO_TIMING) if is_on is None else is_on
        self._postponed: dict[Kind, Callable[[], Found | None]] = {}
        self._again: dict[Kind, float] = {}  # when kinds whose timing failed may be timed again
        self._lock = threading.RLock()

    @functools.cached_property
    def known(self) -> dict[Kind, Found | None]:
        return dict(self._load()) if self.is_on else {}

    def find(self, kind: Kind, measure: Callable[[], Found | None], *, may_wait: bool = False) -> Found | None:
        """The answer for a kind, from ``measure`` where none is known; it runs once, in a thread of its own.

        Args:
            may_wait: within a backward pass, where nothing is timed, ``measure`` may be kept, and is run when something
                is asked for the first time after it.
        Returns:
            The answer, or None: ``measure`` returned None or failed (it is tried again after RETRY_SECONDS), or nothing
            may be measured now. That is so while a graph is captured, in a forked worker, and in a backward pass, where
            a timing of gradients would wait for its end.
        """
        known = self.known
        if (kind in known and not self._postponed and not self._again) or not self.is_on or os.getpid() != _process:
            return known.get(kind)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return known.get(kind)
        if in_backward():
            if kind not in known and may_wait:
                self._postponed[kind] = measure
                begin_epoch()  # so that something is asked
            return known.get(kind)
        with self._lock:
            for each in [each for each, due in self._again.items() if time.monotonic() >= due]:
                del self._again[each]
                known.pop(each, None)
            waiting, self._postponed = {**self._postponed, kind: measure}, {}
            for each, work in waiting.items():
                if each not in known:
                    known[each] = self._found(each, work)
                    begin_epoch()
                    self.save()
            return known[kind]

    def _found(self, kind: Kind, measure: Callable[[], Found | None]) -> Found | None:
        try:
            return with_room(functools.partial(in_own_thread, measure, self.device))
        except (RuntimeError, MemoryError) as reason:  # a timing does not end the user's call
            if getattr(reason, "loses_device", False):
                raise
            log.info("not timed on %s for %s: %s", self.device, kind, reason)
            self._again[kind] = time.monotonic() + RETRY_SECONDS
            return None

    # ---- on disk -----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Store what is known. What another process has stored meanwhile takes precedence, so that both decide the same
        way."""
        self.known.update(self._load())
        path = self._path()
        if path is None:
            return
        rows = [{"kind": kind._asdict(), "times": found} for kind, found in self.known.items() if found is not None]
        try:
            write_object(path, {**self.conditions(), _SECTION: rows})
        except OSError as error:
            log.info("the timings could not be stored in %s: %s", path.parent, error)

    def _load(self) -> dict[Kind, Found]:
        """The file's content; one that cannot be read, or is nowhere, counts as empty."""
        path = self._path()
        try:
            rows = [] if path is None else read_object(path)[_SECTION]
            return {self.kind_type(**row["kind"]): _found_in(dict(row["times"])) for row in rows}
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return {}

    def _path(self) -> Path | None:
        """The file of a device, under the conditions of now."""
        folder = self.folder()
        return None if folder is None else folder / self.file_name()

    def file_name(self) -> str:
        return name_for(self.file_kind, self.conditions())

    def conditions(self) -> dict[str, str]:
        """All that the answers depend on besides the kind of call."""
        raise NotImplementedError

    def timed(self, kind: Kind, attempts: Mapping[str, Attempt]) -> Found | None:
        """Time them in turn. None if there are none."""
        if not attempts:
            return None
        times = zip(attempts, self.clock(list(attempts.values()), self.device))
        found = {name: float(f"{time:.5g}") for name, time in times}
        words = ", ".join(f"{name} {time:.2f} ms" for name, time in found.items())
        log.info("timed once on %s: %s for %s", self.device, words, kind)
        return found


def _found_in(times: Mapping[str, Any]) -> Found:
    """The times in a row of the file; one of :meth:`Contest._load`'s errors where they are none."""
    if not all(type(time) in (int, float) and 0 < time < math.inf for time in times.values()):
        raise ValueError(f"times must be finite numbers above 0, got {times}")
    return {name: float(time) for name, time in times.items()}


def median_times(attempts: list[Attempt], device: torch.device) -> list[float]:
    """Median milliseconds of each, timed in turn, after one run of each that warms up."""
    rounds = [[milliseconds(attempt, device) for attempt in attempts] for _ in range(1 + ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds[1:])]


def milliseconds(attempt: Attempt, device: torch.device, calls: int = 1) -> float:
    """Mean milliseconds of one of several calls in a row.

    On CUDA it is the time between two events of the device's stream. On a CPU with one thread it is that thread's own
    time, which other processes disturb least; else wall time, between two synchronisations.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)  # the current device may be another one
        start.record(stream)
        for _ in range(calls):
            attempt()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) / calls
    now = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    _wait_for(device)
    began = now()
    for _ in range(calls):
        attempt()
    _wait_for(device)
    return 1e3 * (now() - began) / calls


def _wait_for(device: torch.device) -> None:
    if device.type in ("mps", "xpu"):
        getattr(torch, device.type).synchronize()


def kind_text(kind: Any) -> str:
    """``"kernel forward-64-float32-none, head_dim 64, q_tokens 512, is_causal True"``: what is neither zero nor
    empty."""
    return ", ".join(f"{name} {value}" for name, value in kind._asdict().items() if value)


def power_of_two(count: int) -> int:
    """The smallest one that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()
