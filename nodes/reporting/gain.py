"""The gain of a run, or why there was nothing to gain: the report's first line, and the line on a node.

Nothing is estimated. MiB are those of one call: what torch's own function would have stored, its score matrix, less
what the call took here; seconds are those of calls whose route was timed on this machine against torch's kernel. What
ComfyUI's own attention would have taken on a host that does not use torch's is not known, and said to be so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.runs import MIB, CallKind, CallTally, Run
from .words import duration_text, plural

SDPA = "attention_pytorch"  # ComfyUI's name of its function that calls torch's
_LEAST_BYTES, _LEAST_SECONDS = 8 * MIB, 0.1  # less is not worth telling


@dataclass(frozen=True)
class Gain:
    """The gain of one run.

    Attributes:
        torch_bytes, our_bytes: score matrix in torch's function, and extra memory here, of the call in which the two
            differ most; 0, 0 if no call differs. ``our_bytes`` is None where it was not measured.
        seconds: seconds saved in all calls that were timed against torch's kernel.
        repaired: number of outputs that were not finite and were computed again.
    """

    torch_bytes: int = 0
    our_bytes: int | None = 0
    seconds: float = 0.0
    repaired: int = 0

    @property
    def saved_bytes(self) -> int:
        return self.torch_bytes - (self.our_bytes or 0)

    def text(self) -> str:
        """``"1,670 MiB less memory in the largest call (64 instead of 1,734 MiB), 41 s less in attention (timed on this
        machine)"``; "" if there is nothing worth telling."""
        parts = []
        if self.saved_bytes >= _LEAST_BYTES and self.our_bytes is None:
            parts.append(f"{mib(self.torch_bytes)} MiB of scores not stored in the largest call")
        elif self.saved_bytes >= _LEAST_BYTES:
            figures = f"{mib(self.our_bytes or 0)} instead of {mib(self.torch_bytes)} MiB"
            parts.append(f"{mib(self.saved_bytes)} MiB less memory in the largest call ({figures})")
        if self.seconds >= _LEAST_SECONDS:
            parts.append(f"{duration_text(self.seconds)} less in attention (timed on this machine)")
        if self.repaired:
            parts.append(f"{plural(self.repaired, 'output')} saved from NaN")
        return ", ".join(parts)


def mib(num_bytes: float) -> str:
    """``"1,734"``, ``"2.5"``, ``"under 1"``."""
    value = num_bytes / MIB
    if 0 < value < 1:
        return "under 1"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def gain_of(run: Run, attention: str) -> Gain:
    """The gain of a run over ComfyUI's own function ``attention``."""
    taken = [(kind, tally) for kind, tally in list(run.tallies.items()) if kind.outcome == "taken"]
    repaired = sum(tally.repaired for _, tally in taken)
    if attention != SDPA:
        return Gain(repaired=repaired)
    stored = [(kind.math_bytes, tally.extra_bytes) for kind, tally in taken if kind.torch_stores]
    most = max(stored, key=lambda pair: pair[0] - (pair[1] or 0), default=(0, 0))
    return Gain(most[0], most[1], sum(_seconds(kind, tally) for kind, tally in taken), repaired)


def _seconds(kind: CallKind, tally: CallTally) -> float:
    return 0.0 if not kind.over_torch else tally.elapsed_ms / 1e3 * (1 / kind.over_torch - 1)


def gain_line(runs: Sequence[Run], attention: str) -> str:
    """One sentence for all runs of a report: ``"Gained: ..."``, or why nothing was."""
    text = _gained(runs, attention)
    return f"Gained: {text}." if text else f"{nothing_because(runs, attention)}."


def is_gain(runs: Sequence[Run], attention: str) -> bool:
    """Whether ``gain_line`` has a gain to tell."""
    return bool(_gained(runs, attention))


def _gained(runs: Sequence[Run], attention: str) -> str:
    gains = [gain_of(run, attention) for run in runs]
    most = max(gains, key=lambda gain: gain.saved_bytes, default=Gain())
    seconds, repaired = sum(gain.seconds for gain in gains), sum(gain.repaired for gain in gains)
    text = Gain(most.torch_bytes, most.our_bytes, seconds, repaired).text()
    return "; ".join([*(sentence for run in runs for sentence in run.gains[:1]), *filter(None, [text])])


def nothing_because(runs: Sequence[Run], attention: str) -> str:
    """Why nothing was gained, without a full stop."""
    calling = [run for run in runs if run.tallies]
    if not calling:
        why = "; ".join(run.notes[0] for run in runs if run.notes)
        return f"Nothing gained: {why or 'no attention call reached a patch'}"
    taken = [(kind, tally) for run in calling for kind, tally in list(run.tallies.items()) if kind.outcome == "taken"]
    if not taken:
        return f"Nothing to gain: {_why_none_taken(calling)}"
    if attention == SDPA and all(kind.torch_stores is False for kind, _ in taken):
        return "Nothing to gain: PyTorch's own kernel takes every call here, with or without this node"
    known = [tally.extra_bytes for _, tally in taken if tally.extra_bytes is not None]
    most = f"{mib(max(known))} MiB extra at most in a call" if known else "No call stored its scores"
    scores = max(kind.math_bytes for kind, _ in taken)
    most = most[:1].upper() + most[1:]
    if scores >= _LEAST_BYTES:
        most += f", whose scores are {mib(scores)} MiB"
    other = "PyTorch's attention" if attention == SDPA else f"ComfyUI's {attention}"
    return f"{most}; what {other} would have needed here was not measured"


def _why_none_taken(runs: Sequence[Run]) -> str:
    counts = sum((Counter(run.counted(lambda kind: kind.why)) for run in runs), Counter[str]())
    ((why, count),), total = counts.most_common(1), counts.total()
    return f"{'all' if count == total else f'{count:,} of'} {plural(total, 'call')} passed to ComfyUI: {why}"
