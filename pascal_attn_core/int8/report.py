"""Report: the state of each layer of a patched model, its error, its time and its memory."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from ..machine.device import MIB
from ..patching.patch import OFF, ON, REFUSED, UNABLE, WAITING, AnyReport, alike


class Int8ReportLine(NamedTuple):
    """The state of one layer.

    Attributes:
        name: qualified; kind: its class; shape: of its weight, () for attention.
        state: as in :class:`..patching.patch.State`: on = in 8 bits; refused = in float: measured, or no call of it can
            be in 8 bits; off = not chosen.
        why: one sentence, or "".
        error: relative error of the layer's product with the weight that the host stores, or of attention's output, on
            real inputs, the largest of this run; None = not measured.
        rotation: columns of a group that is rotated before rounding; 0 = none.
        way: what computes it: "kernel", "int_mm" or "float", for attention "kernel" or "operators"; why_way: why
            nothing faster does.
        float_ms, int8_ms: of the call that it was measured with, as it was and as it is; None = not timed.
        float_bytes, int8_bytes: of its weight, as the host stores it and in 8 bits.
        calls: number of calls in 8 bits in this run.
        latest: the error that was measured last in this run; None = none was.
        went_back: to float, because of the error of a later call.
        worst_row: the largest relative error of one row of this run, of attention of one row of one head.
        format: of its weight as the host stores it, ``"float8_e4m3fn"`` or ``"Q4_K"`` for example; "" for attention.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    state: str
    why: str
    error: float | None = None
    rotation: int = 0
    way: str = ""
    why_way: str = ""
    float_ms: float | None = None
    int8_ms: float | None = None
    float_bytes: int = 0
    int8_bytes: int = 0
    calls: int = 0
    latest: float | None = None
    worst_row: float | None = None
    format: str = ""
    went_back: bool = False

    @property
    def is_as_stored(self) -> bool:
        """Whether the weight is multiplied as the host stores it."""
        return self.float_bytes == self.int8_bytes


@dataclass(frozen=True)
class Int8Report(AnyReport):
    """The state of each layer.

    Attributes:
        max_error: above which a layer stays in float.
        weights: where the float weights are: "keep", "host" or "free"; "" for attention, and in float16.
        what: the layers; precision: what they are multiplied in.
    """

    lines: list[Int8ReportLine]
    max_error: float
    weights: str
    what: str = "linear layers"
    precision: str = "int8"

    @property
    def able(self) -> int:
        """The number of layers that were chosen and can run in 8 bits."""
        return len(self.lines) - self.count(OFF) - self.count(UNABLE)

    @property
    def is_exact(self) -> bool:
        """Whether no layer is in 8 bits."""
        return not self.of(ON)

    @property
    def reasons(self) -> list[str]:
        """Why layers that are not in 8 bits are not, but for those that were not chosen."""
        return sorted({line.why for line in self.lines if line.state not in (ON, OFF)})

    @property
    def times(self) -> tuple[int, float, float, float]:
        """The number of layers in 8 bits that were timed, the milliseconds of one call of each as it was and as it is,
        and the seconds that all their calls gained."""
        timed = [(line.float_ms, line.int8_ms, line.calls) for line in self.of(ON) if line.float_ms and line.int8_ms]
        before, after = (sum(each[i] for each in timed) for i in (0, 1))
        return len(timed), before, after, sum((was - now) * calls for was, now, calls in timed) / 1e3

    @property
    def worst(self) -> Int8ReportLine | None:
        """The layer in 8 bits with the largest error; None = none has been measured."""
        measured = [line for line in self.of(ON) if line.error is not None]
        return max(measured, key=lambda line: line.error or 0.0, default=None)

    @property
    def median_error(self) -> float | None:
        """The median error of the layers in 8 bits; None = none has been measured."""
        errors = [line.error for line in self.of(ON) if line.error is not None]
        return statistics.median(errors) if errors else None

    def sentence(self) -> str:
        """A summary of all layers: their number, errors, times and memory."""
        on = self.of(ON)
        text = f"{len(on)} of {self.able} {self.what} in {self.precision}"
        worst, median = self.worst, self.median_error
        if worst is not None and median is not None:
            text += f", not exact: relative error per layer {median:.2%} (median), at most {worst.error:.2%}"
        count, before, after, seconds = self.times
        if count:
            text += f"; {abs(seconds):.2f} s {'more' if seconds < 0 else 'less'} than in float"
            text += f" (one call of each of {count}: {before:.1f} -> {after:.1f} ms)"
        linear = [line for line in on if line.shape]
        rounded = [(line.float_bytes, line.int8_bytes) for line in linear if not line.is_as_stored]
        if rounded and self.weights:
            before, after = (sum(sizes) / MIB for sizes in zip(*rounded))
            text += f"; weights {before:.1f} -> {after:.1f} MiB" + _WEIGHTS[self.weights]
        if len(rounded) < len(linear) and self.weights:
            size = sum(line.int8_bytes for line in linear if line.is_as_stored) / MIB
            text += f"; GGUF weights {size:.1f} MiB, as the file has them"
        if self.count(REFUSED):
            text += f"; {self.count(REFUSED)} stay in float"
        if self.count(WAITING):
            text += f"; {self.count(WAITING)} not measured yet"
        return text

    def text(self) -> str:
        """The sentence, and one line per layer; equal neighbours (``blocks.0``, ``blocks.1`` ...) are one line."""
        rows = [self.sentence() if self.lines else f"no {self.what} found"]
        own = (ON, REFUSED)  # each of these layers has a line of its own
        texts = ((f"({line.kind}): {line.state}{_facts(line)}", line.state in own and line.name) for line in self.lines)
        rows += [f"  {names} {text}" for (text, _), names in alike(zip(texts, (line.name for line in self.lines)))]
        ways = {(line.way, line.why_way) for line in self.of(ON) if not line.way.startswith("kernel")}
        rows += [f"  computed by {COMPUTED_BY[way]}: {why}" for way, why in sorted(ways) if way]
        return "\n".join(rows)


def _facts(line: Int8ReportLine) -> str:
    parts = [line.why] if line.why else []
    if line.state == ON:
        parts += [" -> ".join(map(str, reversed(line.shape)))] if line.shape else []
        if line.format:
            before = "" if line.is_as_stored else f"{line.float_bytes / MIB:.2f} -> "
            parts.append(f"{line.format}, {before}{line.int8_bytes / MIB:.2f} MiB")
        if line.error is not None:
            last = "" if line.latest is None or line.latest == line.error else f" (last {line.latest:.2%})"
            parts.append(f"error {line.error:.2%}{last}")
        if line.worst_row is not None:
            parts.append(f"worst row {line.worst_row:.2%}")
        if line.rotation:
            parts.append(f"rotated by {line.rotation}")
        if line.float_ms is not None:
            parts.append(f"{line.float_ms:.2f} -> {line.int8_ms:.2f} ms")
    return f": {', '.join(parts)}" if parts else ""


_WEIGHTS = {
    "keep": ", the float ones kept beside them",
    "host": ", the float ones in host memory",
    "free": ", the float ones discarded",
}
COMPUTED_BY = {
    "kernel": "the int8 kernel",
    "kernel_4x8": "the int8 kernel",
    "int_mm": "torch._int_mm",
    "float": "weights expanded to float, which saves no time",
    "operators": "the operators that define it, which is slow and for checks",
}
