"""Judged: the judge of a layer that is not exact, in 8 bits or in float16. The layer waits for inputs and is measured
with them. It is on as long as its error stays within the limit.

waiting -> judged by its first inputs -> on, or refused
on -> measured again when :mod:`.watch` says so, or when its weight is another one -> on, or refused (it went back)
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..contest.timing_table import Clock
from ..machine.out_of_memory import out_of_memory
from ..machine.own_thread import inputs_are_made_up
from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.patch import ON, REFUSED, WAITING
from .backends import FLOATS
from .exchange import Source
from .measure import FEW_ROWS, RARE, SAMPLE_ROWS, Errors, Times
from .report import Int8ReportLine
from .watch import ErrorWatch

log = logging.getLogger("pascal_attn")
_MOST_FAILURES = 3  # after so many first measurements that lacked memory a layer stays exact
_UNKNOWN = Errors(math.inf, math.inf, math.inf)


@dataclass(eq=False)
class Int8Options:
    """The options of one patch, and what its layers share.

    Attributes:
        only_faster: whether layers that are not faster in 8 bits stay in float.
        has_warned: whether a weight was found to be trained.
        times: of calls that have been timed, by shape, dtype and device: layers of one shape are timed once.
        room: bytes on a device that float weights have left, for weights in 8 bits whose float weights are elsewhere.
    """

    max_error: float
    weights: str
    clock: Clock
    only_faster: bool = False
    enabled: bool = True
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


class LayerForward(ReplacedForward):
    """The forward of a module whose calls are a layer's business; ``layer`` None = they no longer are."""

    __slots__ = ("layer",)
    layer: Any

    def __init__(self, layer: Any, module: nn.Module, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.layer = layer


class Judged:
    """The state of one layer.

    Attributes:
        state: as in :class:`..patching.patch.State`: waiting for inputs; on = not exact; refused = it stays as it was.
        why: one sentence; went_back: it was on until the error of a later call.
        watch: its calls in this run, and the errors found in them.
        times: of the call that it was decided with; None = not timed.
        shape: of its weight, () for attention.
        forward: what is put in as the forward of its module; a layer with another way in has its own attach and detach.
        is_offloaded: whether its float weight is not on the device that it computes on, as far as that is known.
    """

    shape: tuple[int, ...] = ()
    forward: type[LayerForward]
    _put_in: weakref.ref[LayerForward] | None = None

    def __init__(self, name: str, kind: str, options: Int8Options):
        self.name, self.kind, self.options = name, kind, options
        self.state, self.why, self.watch = WAITING, "", ErrorWatch()
        self.times: Times | None = None
        self.went_back, self._failures = False, 0

    @property
    def is_offloaded(self) -> bool:
        return False

    def attach(self, module: nn.Module, source: Source) -> None:
        """Wait for inputs of a module, or go on with what was decided; ``source``: of its weight."""
        self._put_in = weakref.ref(put_in(module, functools.partial(self.forward, self)))

    def detach(self) -> str:
        """Put the module back as it was; returns what could not be, "" = nothing."""
        forward, self._put_in = None if self._put_in is None else self._put_in(), None
        if forward is None:
            return ""
        forward.layer = None
        return "; ".join(take_out(forward))

    def look(
        self, inputs: Sequence[Tensor], measure: Callable[[int], Errors], time: Callable[[], None], keys: int = 0
    ) -> None:
        """Count a call, and if it is to be checked, :meth:`judge` the layer; ``keys``: see :mod:`.watch`."""
        if self.watch.check_now(inputs[0], keys) or self.state == WAITING:
            self.judge(inputs, measure, time)

    def judge(self, inputs: Sequence[Tensor], measure: Callable[[int], Errors], time: Callable[[], None]) -> None:
        """Measure the error of a call, and decide by it.

        Args:
            inputs: the tensors that it is called with. If they are not finite, an error would say nothing.
            measure: the errors on at most this many rows of the call. It is called with few rows first; with more if
                that error seems too large, or if nothing is known yet.
            time: times the call both ways, where the layer has still to be decided.
        """
        if is_captured(inputs[0]):
            return
        is_new, found = self.state == WAITING, _UNKNOWN
        try:
            with self.options.lock, torch.no_grad():
                if is_new != (self.state == WAITING):  # another thread has decided
                    return
                if not all(bool(x.isfinite().all()) for x in inputs):
                    self.why = "its inputs are not finite" if is_new else self.why
                    return
                for most in (FEW_ROWS, SAMPLE_ROWS)[is_new:]:
                    found = found if self._admits(found) else measure(most)
                if is_new and self._admits(found):
                    time()
                self.watch.saw(found)
                if is_new:
                    self._decide(found)
                elif not self._admits(found):
                    self._exceeds(found)
        except out_of_memory():  # it is measured, or goes back, in a later call
            if is_new:
                self._failures, self.why = self._failures + 1, "out of memory while measuring it"
                if self._failures == _MOST_FAILURES:
                    self.refuse(self.why)

    def _admits(self, found: Errors) -> bool:
        return found.judged <= self.options.max_error

    def _excess(self, found: Errors, call: int = 0) -> str:
        limit, is_whole = self.options.max_error, not found.error <= self.options.max_error
        what, error = ("its error", found.error) if is_whole else (f"its error in one row of {RARE}", found.rows)
        return f"{what} {error:.2%}{f' in call {call}' if call else ''} is above {limit:.2%}"

    def _decide(self, found: Errors) -> None:
        times = self.times
        if not self._admits(found):
            self.refuse(self._excess(found))
        elif self.options.only_faster and times is not None and not times.after < times.before:
            self.refuse(f"not faster: {times.after:.2f} ms, {times.before:.2f} ms as it was")
        else:
            self.start()
            self.state, self.why = ON, ""

    def start(self) -> None:
        """The layer is about to be on."""

    def refuse(self, why: str) -> None:
        """The layer stays as it was, or is again what it was."""
        self.state, self.why = REFUSED, why

    def _exceeds(self, found: Errors) -> None:
        """The error of a later call is above the limit."""
        why = self._excess(found, self.watch.calls)
        if not self.why:
            log.warning("%s: %s", self.name, why)
        self.why = self.why or why
        self.go_back()

    def go_back(self) -> None:
        """Because of the error of a later call, the layer is again what it was."""
        self.refuse(self.why)
        self.went_back = True

    def is_another(self) -> None:
        """Take note that the layer has another weight from now on, which the next call is judged with."""
        self.watch.forget()

    def is_trained(self, weight: Tensor | None) -> bool:
        """Whether a call is one of training, which is computed as without the patch; a warning says so once."""
        if weight is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return False
        self.why = "its weight is being trained" if self.state == WAITING else self.why
        if not self.options.has_warned:
            self.options.has_warned = True
            log.warning(
                "%s: its weight asks for a gradient, so it stays as it is, as others may; call the model under "
                "torch.no_grad(), or with weights that ask for none",
                self.name,
            )
        return True

    def time(self, key: Hashable, attempts: Sequence[Callable[[], Any]], device: torch.device) -> None:
        """Time a call as it was and as it would be, once for all layers with this key."""
        if key not in self.options.times:
            self.options.times[key] = Times(*self.options.clock([*attempts], device))
        self.times = self.options.times[key]

    def line(self, name: str = "") -> Int8ReportLine:
        """The line of this layer in the report; ``name`` instead of its own."""
        state, why, latest = self.state, self.why, self.watch.latest
        if state == ON and not self.options.enabled:
            state, why = REFUSED, "the patch was removed"
        error, _, worst_row = self.watch.largest or (None, None, None)
        float_ms, int8_ms = self.times or (None, None)
        return Int8ReportLine(
            name=name or self.name,
            kind=self.kind,
            shape=self.shape,
            state=state,
            why=why or ("not called yet" if state == WAITING else ""),
            error=error,
            float_ms=float_ms,
            int8_ms=int8_ms,
            calls=self.watch.calls,
            latest=None if latest is None else latest.error,
            worst_row=worst_row,
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
