"""Runs every candidate of ``pascal-attn bench`` on one call, interleaved: time, memory and error."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ...capture import CapturedCall
from ...config import UnsupportedAttention
from ...observe.memory import Measurement, available_bytes, measure
from ...observe.report import record
from ..oracle import reference_gradients, reference_rows, spread_rows
from .candidates import BASELINE, Attend, Candidate, torch_kernel
from .clock import Clock
from .products import best_products

PRODUCTS = "bare products"
_SHARE_OF_MEMORY = 0.7


@dataclass(frozen=True)
class Settings:
    """How long to measure, and what.

    Attributes:
        rounds: timed rounds at most; each round calls every candidate once.
        seconds: a candidate gets fewer rounds once they would take it longer than this.
        max_operators: leave out a candidate that would launch more than this.
        error_rows: query rows compared with the float64 reference, all heads; None = all rows.
        backward: time forward and backward together.
        products: time the bare matrix products too.
    """

    rounds: int = 5
    seconds: float = 10.0
    max_operators: int = 200_000
    error_rows: int | None = 256
    backward: bool = False
    products: bool = True


@dataclass
class Result:
    """The result of one candidate on one call. None = not known; ``note`` says why.

    Attributes:
        seconds: the median over rounds; times: every round.
        ratio: the median over rounds of its time divided by the baseline's time in the same round.
        share_of_products: time of the bare products divided by its time: 1.0 = nothing but matrix products.
        extra_bytes: peak memory besides inputs and outputs.
        flops: floating point operations per second that the call needs (:func:`needed_operations`).
        launches: operators that compute something.
        error: largest difference to float64 divided by the largest value of the reference.
        max_abs_error: the same, not divided.
        bounded: share of the tiled query blocks that needed no running maximum.
        ran: routes taken, or the kernel that torch picked.
    """

    name: str
    seconds: float | None = None
    times: list[float] = field(default_factory=list)
    ratio: float | None = None
    share_of_products: float | None = None
    extra_bytes: int | None = None
    flops: float | None = None
    launches: int | None = None
    error: float | None = None
    max_abs_error: float | None = None
    bounded: float | None = None
    ran: str = ""
    note: str = ""


@dataclass
class _Lane:
    """One candidate on its way through the rounds."""

    result: Result
    run: Callable[[], Any]
    rounds: int = 0
    calls: int = 1


def race(
    call: CapturedCall,
    candidates: list[Candidate],
    clock: Clock,
    settings: Settings,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Run every candidate on one call.

    Args:
        progress: called with the current step, for a status line.
    Returns:
        one result per candidate in their order, and last that of the bare products if the settings ask for them.
    """
    oracle = _Oracle(call, settings)
    results, lanes = [], []
    for candidate in candidates:
        progress(candidate.name)
        result = Result(candidate.name)
        results.append(result)
        lane = _enter(result, candidate, call, clock, settings, oracle)
        if lane is not None:
            lanes.append(lane)
    if settings.products and lanes and call.query.dim() == 4:
        progress(PRODUCTS)
        run, blocking = best_products(call, clock, backward=settings.backward)
        result = Result(PRODUCTS, ran="x".join(map(str, blocking)))
        results.append(result)
        lanes.append(_plan(_Lane(result, run), clock, settings))
    _run_rounds(lanes, clock, progress)
    _compare(results)
    for result in results:
        if result.seconds:
            result.flops = needed_operations(call, backward=settings.backward) / result.seconds
    return results


def needed_operations(call: CapturedCall, *, backward: bool = False) -> int:
    """Operations of the products that the definition has, a multiply-add counted as two: 2 products forward, and 5 more
    for the gradients, one of them Q K^T again. What ``is_causal`` forbids is not counted, what a mask forbids is."""
    (rows, head_dim), keys, head_dim_v = call.query.shape[-2:], call.key.shape[-2], call.value.shape[-1]
    visible = sum(min(row + 1, keys) for row in range(rows)) if call.is_causal else rows * keys
    products = (4 * head_dim + 3 * head_dim_v) if backward else head_dim + head_dim_v
    return 2 * math.prod(call.query.shape[:-2]) * visible * products


def _enter(
    result: Result, candidate: Candidate, call: CapturedCall, clock: Clock, settings: Settings, oracle: _Oracle
) -> _Lane | None:
    """The first two calls: one plain, which decides how many follow, and one that is measured and checked."""
    result.note = _too_much(candidate, call, settings)
    if result.note:
        return None
    try:
        attend = candidate.prepare(call)
        with record() as report:
            lane = _plan(_Lane(result, oracle.step(attend)), clock, settings)
        _check(result, oracle.checked_step(attend), call.query.device, oracle)
    except UnsupportedAttention as error:
        result.note = "; ".join(error.reasons)
        return None
    except (torch.cuda.OutOfMemoryError, MemoryError):
        result.note = "out of memory"
        return None
    except Exception as error:  # other packages' code: whatever it raises goes into its cell of the table
        result.note = _in_one_line(error)
        return None
    if candidate.is_ours:
        result.bounded, result.ran = report.bounded_share(), "+".join(report.routes())
    elif candidate.name == BASELINE:
        result.ran = torch_kernel(call)
    return lane


def _check(result: Result, step: Callable[[], Any], device: torch.device, oracle: _Oracle) -> None:
    """Memory, operators and error of one more call."""
    try:
        found, scratch = _measure(step, device)
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        out = step()  # it runs, but not while its operators are watched
        result.note = f"memory not measured: {_in_one_line(error)}"
    else:
        out = found.out
        result.extra_bytes, result.launches = max(found.extra_bytes, scratch), found.launches
    result.error, result.max_abs_error = oracle.errors(out)


def _in_one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:90]


def _too_much(candidate: Candidate, call: CapturedCall, settings: Settings) -> str:
    operators = candidate.operators(call)
    if operators > settings.max_operators:
        return f"skipped: about {operators:,} operators"
    needed = candidate.extra_bytes(call) * (2 if settings.backward else 1)
    available = available_bytes(call.query.device)
    if available is not None and needed > _SHARE_OF_MEMORY * available:
        return f"skipped: needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"
    return ""


def _plan(lane: _Lane, clock: Clock, settings: Settings) -> _Lane:
    first = clock.seconds(lane.run)
    if first < 1.0:  # the very first call may load or compile something
        first = min(first, clock.seconds(lane.run))
    lane.calls = max(1, min(50, math.ceil(0.02 / max(first, 1e-6))))
    lane.rounds = max(0, min(settings.rounds, int(settings.seconds / (first * lane.calls))))
    if not lane.rounds:
        lane.result.times = [first]
        lane.result.note = "first call only"
    return lane


def _run_rounds(lanes: list[_Lane], clock: Clock, progress: Callable[[str], None]) -> None:
    last = max((lane.rounds for lane in lanes), default=0)
    for number in range(last):
        progress(f"round {number + 1} of {last}")
        shift = number % len(lanes)  # no candidate always runs after the same one
        for lane in lanes[shift:] + lanes[:shift]:
            if number < lane.rounds:
                lane.result.times.append(clock.seconds(lane.run, lane.calls))


def _compare(results: list[Result]) -> None:
    """Fill in medians and ratios. A ratio is taken within each round, so that a clock that drifts cancels out."""
    for result in results:
        if result.times:
            result.seconds = statistics.median(result.times)
    by_name = {result.name: result for result in results}
    for result in results:
        result.ratio = _paired_ratio(result, by_name.get(BASELINE))
        products = by_name.get(PRODUCTS)
        inverse = _paired_ratio(result, products)
        result.share_of_products = 1 / inverse if inverse else None


def _paired_ratio(result: Result, other: Result | None) -> float | None:
    if other is None or not result.times or not other.times:
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(result.times, other.times))


class _Oracle:
    """The work of a candidate, and the check of its result."""

    def __init__(self, call: CapturedCall, settings: Settings):
        self.call, self.backward = call, settings.backward
        self.rows = spread_rows(call.query.shape[-2], settings.error_rows)
        self.tensors = (call.query, call.key, call.value)
        if not self.backward:
            self.expected: tuple[Tensor, ...] = (reference_rows(call, self.rows),)
            return
        self.tensors = tuple(t.detach().clone().requires_grad_() for t in self.tensors)  # type: ignore[assignment]
        size = (*call.query.shape[:-1], call.value.shape[-1])
        generator = torch.Generator().manual_seed(1)
        self.grad = torch.randn(size, generator=generator).to(call.query)
        # The output gradient is zero but in some rows: the same work for every candidate, far less for the reference.
        rows = self.rows.to(self.grad.device)
        self.sparse_grad = torch.zeros_like(self.grad)
        self.sparse_grad[..., rows, :] = self.grad[..., rows, :]
        self.expected = reference_gradients(call, self.rows, self.grad[..., rows, :])

    def step(self, attend: Attend) -> Callable[[], Any]:
        """The work to time."""
        return self._step(attend, self.grad if self.backward else None)

    def checked_step(self, attend: Attend) -> Callable[[], Any]:
        """The same work with an output that :meth:`errors` can judge."""
        return self._step(attend, self.sparse_grad if self.backward else None)

    def _step(self, attend: Attend, grad: Tensor | None) -> Callable[[], Any]:
        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*self.tensors)

        def forward_backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attend(*self.tensors), self.tensors, grad)

        return forward if grad is None else forward_backward

    def errors(self, found: Any) -> tuple[float, float]:
        """(relative to the largest value, absolute), the worse over the outputs."""
        pairs = []
        outputs = found if self.backward else (found[..., self.rows.to(found.device), :],)
        for out, expected in zip(outputs, self.expected):
            if out.shape != expected.shape:
                raise ValueError(f"output must have shape {tuple(expected.shape)}, got {tuple(out.shape)}")
            absolute = (out.detach().to(expected) - expected).abs().max().item() if out.numel() else 0.0
            largest = expected.abs().max().item() if out.numel() else 1.0
            pairs.append((absolute / largest if largest else absolute, absolute))
        return max(pairs, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def _measure(step: Callable[[], Any], device: torch.device) -> tuple[Measurement, int]:
    """Memory and operators of one call, and the extra bytes that the allocator saw.

    On a CPU the two differ by what a kernel takes and frees inside itself.
    """

    def call(_: Tensor) -> Any:
        return step()

    probe = torch.empty(0, device=device)  # gives measure() the device
    if device.type != "cpu":
        return measure(call, probe), 0
    os.putenv("KINETO_LOG_LEVEL", "6")  # some builds of the profiler write two lines to stderr at every start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        found = measure(call, probe)
    return found, _allocator_peak(trace) - (found.peak_bytes - found.extra_bytes)


def _allocator_peak(trace: Any) -> int:
    try:
        events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    except AttributeError:  # not public; without it scratch memory inside kernels is not seen
        return 0
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
