"""Report: what the calls of a patched VAE did."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.device import MIB
from ..patching.patch import OFF, ON, REFUSED, WAITING, AnyReport, State
from .run import Figures

_WORDS = {ON: "in bands", OFF: "as it is", REFUSED: "refused"}


@dataclass(frozen=True)
class VaeCall:
    """One call: on = in bands, off = as it is, or refused, and why."""

    method: str
    shape: tuple[int, ...]  # of the input
    state: str
    why: str
    seconds: float
    figures: Figures | None = None  # if it ran in bands

    def text(self) -> str:
        head = f"{self.method} of {list(self.shape)}: {_WORDS[self.state]}{', ' if self.why else ''}{self.why}"
        if self.figures is None:
            return f"{head} ({self.seconds:.1f} s)"
        f = self.figures
        host = f", {f.host_bytes / MIB:.0f} MiB in host memory" if f.host_bytes else ""
        retries = f", rows per band reduced {f.retries} times after running out of memory" if f.retries else ""
        lines = [
            f"{head}: {f.layers} layers in {f.bands} bands (at most {f.most_bands}), at most "
            f"{f.expected_bytes / MIB:.0f} MiB on the device by calculation{host}{retries} ({self.seconds:.1f} s)"
        ]
        if f.whole:
            names = ", ".join(f"{name} ({count})" for name, count in sorted(f.whole.items()))
            lines.append(f"  computed whole, since not supported in bands: {names}")
        return "\n".join(lines)


@dataclass(frozen=True)
class VaeReport(AnyReport):
    """All calls so far, of the methods that are patched."""

    calls: list[VaeCall]
    methods: tuple[str, ...] = ()

    @property
    def states(self) -> list[State]:
        """The state of each method after its latest call, in the words that all patches share."""
        latest = {call.method: call for call in self.calls}
        called = [State(name, call.state, call.why) for name, call in latest.items()]
        return called + [State(name, WAITING) for name in self.methods if name not in latest]

    def text(self) -> str:
        return "\n".join(call.text() for call in self.calls) if self.calls else "the VAE has not been called yet"
