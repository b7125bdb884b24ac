"""Times attempts at the same work in turns, measures the memory and the error of each, and writes all as text."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ... import UnsupportedAttention, record
from ...contest.timing_table import milliseconds
from ...machine.device import MIB
from ...machine.out_of_memory import is_out_of_memory
from ...machine.room import available_bytes
from ...observe.memory import measure
from ...selftest.cases import in_one_line
from .. import CommandError
from ..charts import short_number


def device_named(name: str | None) -> torch.device:
    """The device of ``--device``, by default cuda if there is one, else cpu; CommandError if torch cannot use it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = f"{str(error).splitlines()[0]}; `pascal-attn info` names the torch for this machine"
        raise CommandError(f"--device must be a device that torch can use: {why}") from error
    return device


def clock_name(device: torch.device) -> str:
    """The clock of :func:`.milliseconds` on this device, for the heading of a table."""
    if device.type == "cuda":
        return "CUDA events"
    return "thread time" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall time"


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


_SHARE_OF_MEMORY = 0.7  # of what is free, that an entrant may take
Step = Callable[[], Any]


@dataclass(frozen=True)
class BenchSettings:
    """How long to measure, and what.

    Attributes:
        rounds: timed rounds at most; each round calls every entrant once. 0 = the first call alone is timed.
        seconds: an entrant gets fewer rounds once they would take it longer than this.
        error_rows: query rows compared with the float64 reference, all heads.
        backward: time forward and backward together.
    """

    rounds: int = 5
    seconds: float = 10.0
    error_rows: int = 256
    backward: bool = False


@dataclass
class Result:
    """The result of one entrant. None = not known; ``note`` says why.

    Attributes:
        seconds: the median over rounds; times: every round; ratio: the median of its time over the first entrant's.
        extra_bytes: peak memory besides inputs and outputs; what a kernel takes and frees inside itself is not seen on
            a CPU.
        flops: floating point operations per second that the work needs.
        error: difference to float64, relative to the reference.
        ran: the routes taken, or the kernel that torch picked.
    """

    name: str
    seconds: float | None = None
    times: list[float] = field(default_factory=list)
    ratio: float | None = None
    extra_bytes: int | None = None
    flops: float | None = None
    error: float | None = None
    ran: str = ""
    note: str = ""


@dataclass(frozen=True)
class Named:
    """The subject of a table: its name, where it comes from, and its sizes in words."""

    name: str
    what: str
    text: str


class Entrant(NamedTuple):
    """One attempt.

    Attributes:
        prepare: makes, outside of the time measured, the step that is timed and the one that is measured and checked:
            the same, or the same on other numbers.
        note: why it is left out.
    """

    name: str
    prepare: Callable[[], tuple[Step, Step]]
    ran: str = ""
    note: str = ""


class _Lane(NamedTuple):
    """One entrant on its way through the rounds."""

    result: Result
    step: Step
    rounds: int
    calls: int


def compete(
    entrants: Sequence[Entrant],
    error_of: Callable[[Any], float],
    operations: int,
    device: torch.device,
    settings: BenchSettings,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """The result of each entrant, in their order; the first is the unit of the ratios.

    Args:
        error_of: the error of what the work returns.
        operations: that the work needs; 0 = not known.
        progress: called with the current step, for a status line, and with "" at the end.
    """
    results: list[Result] = []
    lanes: list[_Lane] = []
    for entrant in entrants:
        progress(entrant.name)
        results.append(Result(entrant.name, ran=entrant.ran, note=entrant.note))
        lanes += [] if entrant.note else _enter(results[-1], entrant, error_of, device, settings)
    last = max((lane.rounds for lane in lanes), default=0)
    for number in range(last):
        progress(f"round {number + 1} of {last}")
        shift = number % len(lanes)  # no entrant always runs after the same one
        for lane in lanes[shift:] + lanes[:shift]:
            if number < lane.rounds:
                lane.result.times.append(milliseconds(lane.step, device, lane.calls) / 1e3)
    progress("")
    for result in results:
        if result.times:
            result.seconds = statistics.median(result.times)
            result.flops = operations / result.seconds or None
            # Within each round, so that a clock that drifts cancels out.
            ratios = [mine / theirs for mine, theirs in zip(result.times, results[0].times)]
            result.ratio = statistics.median(ratios) if ratios else None
    return results


def _enter(
    result: Result, entrant: Entrant, error_of: Callable[[Any], float], device: torch.device, settings: BenchSettings
) -> list[_Lane]:
    """The first calls: plain ones, which decide how many follow, and one that is measured and checked."""
    try:
        step, checked = entrant.prepare()
        with record() as report:
            first = milliseconds(step, device) / 1e3
            if first < 1.0:  # the very first call may load or compile something
                first = min(first, milliseconds(step, device) / 1e3)
        found = measure(lambda _: checked(), torch.empty(0, device=device))  # a tensor gives measure() the device
        result.error = error_of(found.out)
    except UnsupportedAttention as error:
        result.note = "; ".join(error.reasons)
        return []
    except Exception as error:  # other packages' code: whatever it raises goes into its cell of the table
        result.note = "out of memory" if is_out_of_memory(error) else in_one_line(error)[:90]
        return []
    result.extra_bytes, result.ran = found.extra_bytes, result.ran or "+".join(report.routes())
    calls = max(1, min(50, math.ceil(0.02 / max(first, 1e-6))))
    rounds = min(settings.rounds, int(settings.seconds / (first * calls)))
    if not rounds:
        result.times, result.note = [first], "first call only" if settings.rounds else ""
    return [_Lane(result, step, rounds, calls)]


def no_room(needed: int, device: torch.device) -> str:
    """The note of an entrant that needs so many bytes; "" where there is room for it."""
    available = available_bytes(device)
    if available is None or needed <= _SHARE_OF_MEMORY * available:
        return ""
    return f"skipped: needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


# ---- as text ---------------------------------------------------------------------------------------------------------

COLUMNS = ("", "ms", "vs torch", "TFLOP/s", "extra MiB", "error", "")


def result_row(result: Result, peak_flops: float = 0.0) -> list[str]:
    """One line of a table under :data:`COLUMNS`. peak_flops: most operations per second of the device, 0 = unknown."""
    flops = result.flops or 0.0
    share = f" ({flops / peak_flops:.0%})" if peak_flops else ""
    return [
        result.name,
        "-" if result.seconds is None else short_number(result.seconds * 1e3),
        "-" if result.ratio is None else short_number(result.ratio),
        f"{flops / 1e12:.{1 if flops >= 1e13 else 3}f}{share}" if flops else "-",
        "-" if result.extra_bytes is None else f"{result.extra_bytes / MIB:.2f}",
        "-" if result.error is None else f"{result.error:.1e}",
        ", ".join(filter(None, (result.ran, result.note))),
    ]


def geometric_means(reports: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per candidate: the geometric mean of its ratios to the baseline, and over how many shapes."""
    ratios: dict[str, list[float]] = {}
    for report in reports:
        for result in report["results"]:
            if result["ratio"]:
                ratios.setdefault(result["name"], []).append(result["ratio"])
    return {
        name: {"ratio": statistics.geometric_mean(values), "shapes": len(values)} for name, values in ratios.items()
    }


def versions(*others: str) -> dict[str, str]:
    """The versions of Python, torch, this package and those of ``others`` that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("pascal-attention", *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
