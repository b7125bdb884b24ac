"""Report: the state of each feed-forward module of a patched model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..patching.patch import OFF, ON, REFUSED, WAITING, AnyReport, alike
from ..patching.selectors import Found
from .plan import FfnSite, Slicing


class FfnReportLine(NamedTuple):
    """The state of a module: its qualified name, its class, a :class:`..patching.patch.State` (waiting: not called yet
    with enough tokens; off: its calls fit the budget whole), and why."""

    name: str
    kind: str
    state: str
    why: str


@dataclass(frozen=True)
class FfnReport(AnyReport):
    """The state of each feed-forward module."""

    lines: list[FfnReportLine]

    def text(self) -> str:
        """A heading and one line per module; equal neighbours (``blocks.0``, ``blocks.1`` ...) are one line."""
        states = {line.state: self.count(line.state) for line in self.lines}
        heading = ", ".join(f"{count} {state}" for state, count in states.items())
        rows = [f"{len(self.lines)} feed-forward modules: {heading}" if self.lines else "no feed-forward modules found"]
        for (kind, state, why), names in alike((line[1:], line.name) for line in self.lines):
            rows.append(f"  {names} ({kind}): {state}{': ' if why else ''}{why}")
        return "\n".join(rows)


def report_line(found: Found, site: FfnSite | None) -> FfnReportLine:
    """The state of one module. ``site`` holds its plans; None for a module that cannot be run in slices."""
    name, module, state, why = found
    kind = type(module).__name__
    if site is None:
        return FfnReportLine(name, kind, state, why)
    plans = list(site.used.values())
    sliced = [plan for plan in plans if plan.sizes]
    refused = [plan for plan in plans if plan.refused]
    chosen = (sliced or refused or plans or [Slicing((), "")])[-1]
    state = ON if sliced else REFUSED if refused else OFF if plans else WAITING
    if state == WAITING and getattr(module, "_compiled_call_impl", None) is not None:
        return FfnReportLine(name, kind, state, "is compiled (module.compile()), and runs whole")
    return FfnReportLine(name, kind, state, chosen.why)
