"""The calls of a run by block of the model, and by kind in all blocks together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...pascal_attn_core.observe.report import add_shares
from ..engine.runs import CallKind, CallTally, Run


@dataclass
class BlockRow:
    """The calls of one block, or of neighbouring blocks of one family in which the same happened.

    Attributes:
        name: ``"double 3"``, ``"layers.0-11.attn"``.
        routes: calls taken in each block, by route.
        passed: calls passed to ComfyUI in each block, by reason.
        elapsed_ms: time in the calls taken, of all blocks.
        blocks: number of blocks.
    """

    name: str
    routes: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    elapsed_ms: float = 0.0
    blocks: int = 1

    @property
    def calls(self) -> int:
        """Number of calls in all blocks."""
        return self.blocks * (sum(self.routes.values()) + sum(self.passed.values()))

    @property
    def family(self) -> str:
        """``"double "`` of ``"double 3"``, ``"layers.*.attn"`` of ``"layers.3.attn"``: neighbours of one family are
        written as one. "" where the name holds no number."""
        before, number, after = self.parts
        return f"{before}{'*' if after else ''}{after}" if number else ""

    @property
    def parts(self) -> tuple[str, str, str]:
        """The name in three: up to the number, the number (``"4.0"`` in ``"input 4.0"``), and the rest."""
        if " " in self.name:
            before, space, number = self.name.rpartition(" ")
            return before + space, number, ""
        match = re.fullmatch(r"(.*\.)?(\d+(?:-\d+)?)(\..*)?", self.name)
        return (match[1] or "", match[2], match[3] or "") if match else (self.name, "", "")


def block_rows(run: Run) -> list[BlockRow]:
    """One row per block, in the order in which the blocks came first."""
    rows: dict[str, BlockRow] = {}
    for kind, tally in list(run.tallies.items()):
        row = rows.setdefault(kind.block, BlockRow(kind.block))
        if kind.outcome == "taken":
            row.routes[kind.route] = row.routes.get(kind.route, 0) + tally.count
            row.elapsed_ms += tally.elapsed_ms
        else:
            row.passed[kind.why] = row.passed.get(kind.why, 0) + tally.count
    return list(rows.values())


def grouped(rows: list[BlockRow]) -> list[BlockRow]:
    """Neighbours put together."""
    groups: list[BlockRow] = []
    last = BlockRow("")
    for row in rows:
        if groups and row.family and (last.family, last.routes, last.passed) == (row.family, row.routes, row.passed):
            before, first, after = groups[-1].parts
            elapsed, blocks = groups[-1].elapsed_ms + row.elapsed_ms, groups[-1].blocks + 1
            name = f"{before}{first.partition('-')[0]}-{row.parts[1]}{after}"
            groups[-1] = replace(row, name=name, elapsed_ms=elapsed, blocks=blocks)
        else:
            groups.append(row)
        last = row
    return groups


def kinds_of(run: Run) -> list[tuple[CallKind, CallTally]]:
    """The run's calls with the block left out (``kind.block`` is ""), most time first, then most calls."""
    sums: dict[CallKind, CallTally] = {}
    for kind, tally in list(run.tallies.items()):
        kind = replace(kind, block="")
        sums[kind] = _added(sums.get(kind, CallTally()), tally)
    return sorted(sums.items(), key=lambda item: (-item[1].elapsed_ms, -item[1].count))


def together(runs: Sequence[Run]) -> Run:
    """Several runs of one node as one: everything added up, one after the other."""
    first = runs[0]
    whole = Run(first.subject, first.part, first.settings, first.device, first.unique_id, first.prompt_id)
    whole.started, whole.finished = first.started, all(run.finished for run in runs)
    whole.elapsed_s = sum(run.elapsed_s for run in runs)
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    whole.peak_bytes = max(peaks, default=None)
    for run in runs:
        whole.devices |= run.devices
        for keep, texts in ((whole.warn, run.warnings), (whole.note, run.notes), (whole.gain, run.gains)):
            for text in texts:
                keep(text)
        whole.is_exact &= run.is_exact
        for kind, tally in list(run.tallies.items()):
            whole.tallies[kind] = _added(whole.tallies.get(kind, CallTally()), tally)
    return whole


def _added(a: CallTally, b: CallTally) -> CallTally:
    sums = {name: getattr(a, name) + getattr(b, name) for name in vars(a) if name not in ("extra_bytes", "shares")}
    known = [tally.extra_bytes for tally in (a, b) if tally.extra_bytes is not None]
    shares: dict[str, int] = {}
    for tally in (a, b):
        add_shares(shares, tally.shares)
    return CallTally(**sums, extra_bytes=max(known, default=None), shares=shares)
