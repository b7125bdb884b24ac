"""Judged: the judge of a layer that is not exact, in 8 bits or in float16. The layer waits for inputs and is measured
with them. It is on as long as its error stays within the limit."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..contest.timing_table import Clock
from ..machine.out_of_memory import out_of_memory
from ..machine.own_thread import inputs_are_made_up
from ..patching.patch import ON, REFUSED, WAITING
from .backends import FLOATS
from .measure import FEW_ROWS, SAMPLE_ROWS, Times
from .report import Int8ReportLine
from .watch import ErrorWatch

log = logging.getLogger("pascal_attn")
_MOST_FAILURES = 3  # for lack of memory


@dataclass(eq=False)
class Int8Options:
    """The options of one patch, and what its layers share.

    Attributes:
        only_faster: whether layers that are not faster in 8 bits stay in float.
        gathers: whether inputs are being collected (``calibrate``): layers decide when that is over.
        has_warned: whether a weight in 8 bits was found to be trained.
        times: of calls that have been timed, by shape, dtype and device: layers of one shape are timed once.
        room: bytes on a device that float weights have left, for weights in 8 bits whose float weights are elsewhere.
    """

    max_error: float
    weights: str
    clock: Clock
    only_faster: bool = False
    enabled: bool = True
    gathers: bool = False
    has_warned: bool = False
    times: dict[Hashable, Times] = field(default_factory=dict)
    room: Counter[torch.device] = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.RLock)


def limit_of(max_error: Any) -> float:
    """The limit of errors as a float; a TypeError or a ValueError where it is no number from 0 to 1."""
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)):
        raise TypeError(f"max_error must be a number, got {max_error!r}")
    if not 0 <= max_error <= 1:
        raise ValueError(f"max_error must be a share from 0 to 1 (0.05 for 5 %), got {max_error}")
    return float(max_error)


class Judged:
    """The state of one layer.

    Attributes:
        state: as in :class:`..patching.patch.State`: waiting for inputs; on = in 8 bits; refused = it stays as it was.
        why: one sentence; went_back: it was on until the error of a later call.
        watch: its calls in 8 bits in this run, and the errors found in it.
        times: of the call that it was decided with; None = not timed.
        shape: of its weight, () for attention.
    """

    shape: tuple[int, ...] = ()

    def __init__(self, name: str, kind: str, options: Int8Options):
        self.name, self.kind, self.options = name, kind, options
        self.state, self.why, self.watch = WAITING, "", ErrorWatch()
        self.times: Times | None = None
        self.went_back, self._failures = False, 0

    def admits(self, error: float) -> bool:
        """Whether the error that was measured first is within the limit; else the layer stays in float."""
        if error <= self.options.max_error:
            return True
        self.state, self.why = REFUSED, f"its error {error:.2%} is above {self.options.max_error:.2%}"
        return False

    def look(self, x: Tensor, measure: Callable[[int], float], time: Callable[[], None]) -> None:
        """Count a call with input ``x``. If it is to be checked, measure its error, and decide by it.

        Args:
            measure: the relative error on at most this many rows of the call. It is called with few rows first; with
                more if that error seems too large, or if nothing is known yet.
            time: times the call both ways, where the layer has still to be decided.
        """
        is_due = self.watch.check_now(x.shape[:-1].numel())
        is_new, error = self.state == WAITING, math.inf
        if not (is_due or is_new) or is_captured(x):
            return
        try:
            with self.options.lock, torch.no_grad():
                for most in (FEW_ROWS, SAMPLE_ROWS)[is_new:]:
                    error = error if error <= self.options.max_error else measure(most)
                if is_new and error <= self.options.max_error:
                    time()
        except out_of_memory():
            if is_new:
                self.failed()
            return  # it is measured in a later call
        self.watch.saw(error)
        if self.options.gathers:
            return
        if is_new:
            self.decide()
        elif not error <= self.options.max_error:
            self.warn_of(error)
            self.state, self.went_back = REFUSED, True

    def decide(self) -> None:
        """Decide by the largest error that was measured, and by the times; without an error, the layer waits on."""
        error = self.watch.largest
        if error is not None and self.state == WAITING and self.admits(error):
            self.state, self.why = ON, ""

    def failed(self) -> None:
        """The first measurement ran out of memory. After three such calls the layer stays exact."""
        self._failures, self.why = self._failures + 1, "out of memory while measuring it"
        if self._failures == _MOST_FAILURES:
            self.state = REFUSED

    def warn_of(self, error: float) -> None:
        """Say that the error of a later call is above the limit."""
        self.why = f"its error was {error:.2%} in call {self.watch.calls}, above {self.options.max_error:.2%}"
        log.warning("%s: %s", self.name, self.why)

    def time(self, key: Hashable, attempts: list[Callable[[], Any]], device: torch.device) -> None:
        """Time a call in float and in 8 bits, once for all layers with this key."""
        if key not in self.options.times:
            with torch.no_grad():
                self.options.times[key] = Times(*self.options.clock(attempts, device))
        self.times = self.options.times[key]

    def line(self, name: str | None = None) -> Int8ReportLine:
        """The line of this layer in the report; ``name`` instead of its own."""
        state, why = self.state, self.why
        if state == ON and not self.options.enabled:
            state, why = REFUSED, "the patch was removed"
        return Int8ReportLine(
            name=self.name if name is None else name,
            kind=self.kind,
            shape=self.shape,
            state=state,
            why=why,
            error=self.watch.largest,
            float_ms=None if self.times is None else self.times.in_float,
            int8_ms=None if self.times is None else self.times.in_int8,
            calls=self.watch.calls,
            latest=self.watch.latest,
            went_back=self.went_back,
        )


def is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, during which no number can be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor is one of a user's call that really happens, with at least one element."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or type(x) not in (Tensor, nn.Parameter):
        return False
    if torch._C._get_tracing_state() is not None:  # what is measured would become a part of the trace
        return False
    if inputs_are_made_up() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not x.is_meta and x.dtype in FLOATS and x.numel() > 0
