"""Report: the state of each feed-forward module of a patched model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..patching.patch import OFF, ON, WAITING, AnyReport, State, alike, states_of
from .find import Found
from .plan import WHOLE, Site


class FfnReportLine(NamedTuple):
    """The state of a module: its qualified name, its class, ``"chunked"``, ``"whole"``, ``"refused"``, ``"waiting"``
    (not called yet with enough tokens) or ``"cannot be"``, and why."""

    name: str
    kind: str
    state: str
    why: str


@dataclass(frozen=True)
class FfnReport(AnyReport):
    """The state of each feed-forward module."""

    lines: list[FfnReportLine]

    @property
    def states(self) -> list[State]:
        """The state of each module in the words that all patches share."""
        return states_of(self.lines, {"chunked": ON, "whole": OFF, "waiting": WAITING})

    def count(self, state: str) -> int:
        """How many modules are in this state."""
        return sum(line.state == state for line in self.lines)

    def text(self) -> str:
        """A heading and one line per module; equal neighbours (``blocks.0``, ``blocks.1`` ...) are one line."""
        states = {line.state: self.count(line.state) for line in self.lines}
        heading = ", ".join(f"{count} {state}" for state, count in states.items())
        rows = [f"{len(self.lines)} feed-forward modules: {heading}" if self.lines else "no feed-forward modules found"]
        for (kind, state, why), names in alike((line[1:], line.name) for line in self.lines):
            rows.append(f"  {names} ({kind}): {state}{': ' if why else ''}{why}")
        return "\n".join(rows)


def report_line(found: Found, site: Site | None) -> FfnReportLine:
    """The state of one module. ``site`` holds its plans; None for a module that cannot be run in slices."""
    name, module, why_not = found
    kind = type(module).__name__
    if site is None:
        return FfnReportLine(name, kind, "cannot be", why_not.removeprefix("cannot be: "))
    plans = list(site.used.values())
    sliced = [plan for plan in plans if plan.sizes]
    refused = [plan for plan in plans if plan.refused]
    chosen = (sliced or refused or plans or [WHOLE])[-1]
    state = "chunked" if sliced else "refused" if refused else "whole" if plans else "waiting"
    if state == "waiting" and getattr(module, "_compiled_call_impl", None) is not None:
        return FfnReportLine(name, kind, state, "is compiled (module.compile()); tried when it is called uncompiled")
    return FfnReportLine(name, kind, state, chosen.why)
