"""The calls of a run by block of the model, and by kind in all blocks together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...pascal_attn_core.observe.report import add_shares
from ..engine.runs import CallKind, CallTally, Run


@dataclass(frozen=True)
class BlockRow:
    """The calls of one block.

    Attributes:
        name: ``"double 3"``.
        routes: calls taken, by route.
        passed: calls passed to ComfyUI, by reason.
        elapsed_ms: time in the calls taken, by route.
    """

    name: str
    routes: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    elapsed_ms: dict[str, float] = field(default_factory=dict)

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
        match = re.fullmatch(r"(.*\.)?(\d+)(\..*)?", self.name)
        return (match[1] or "", match[2], match[3] or "") if match else (self.name, "", "")


@dataclass(frozen=True)
class BlockGroup:
    """Neighbouring blocks of one family in which the same happened."""

    rows: tuple[BlockRow, ...]

    @property
    def name(self) -> str:
        """``"double 0-18"``, ``"layers.0-11.attn"``."""
        return range_name(self.rows)

    @property
    def elapsed_ms(self) -> float:
        return sum(sum(row.elapsed_ms.values()) for row in self.rows)

    @property
    def calls(self) -> int:
        return sum(sum(row.routes.values()) + sum(row.passed.values()) for row in self.rows)


def range_name(rows: Sequence[BlockRow]) -> str:
    """Blocks of one family by the first and the last of them."""
    if len(rows) == 1:
        return rows[0].name
    before, first, after = rows[0].parts
    return f"{before}{first}-{rows[-1].parts[1]}{after}"


def block_rows(run: Run) -> list[BlockRow]:
    """One row per block, in the order in which the blocks came first."""
    rows: dict[str, BlockRow] = {}
    for kind, tally in list(run.tallies.items()):
        row = rows.setdefault(kind.block, BlockRow(kind.block))
        if kind.outcome == "taken":
            row.routes[kind.route] = row.routes.get(kind.route, 0) + tally.count
            row.elapsed_ms[kind.route] = row.elapsed_ms.get(kind.route, 0.0) + tally.elapsed_ms
        else:
            row.passed[kind.why] = row.passed.get(kind.why, 0) + tally.count
    return list(rows.values())


def grouped(rows: list[BlockRow]) -> list[BlockGroup]:
    """Neighbours put together."""
    groups: list[list[BlockRow]] = []
    for row in rows:
        last = groups[-1][-1] if groups else None
        if last is not None and row.family and _same(last, row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [BlockGroup(tuple(group)) for group in groups]


def _same(a: BlockRow, b: BlockRow) -> bool:
    return (a.family, a.routes, a.passed) == (b.family, b.routes, b.passed)


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
        whole.warnings += [text for text in run.warnings if text not in whole.warnings]
        whole.notes += [text for text in run.notes if text not in whole.notes]
        whole.gains += [text for text in run.gains if text not in whole.gains]
        whole.is_exact &= run.is_exact
        for kind, tally in list(run.tallies.items()):
            whole.tallies[kind] = _added(whole.tallies.get(kind, CallTally()), tally)
    return whole


def _added(a: CallTally, b: CallTally) -> CallTally:
    known = [tally.extra_bytes for tally in (a, b) if tally.extra_bytes is not None]
    shares: dict[str, int] = {}
    for tally in (a, b):
        add_shares(shares, tally.shares)
    return CallTally(
        a.count + b.count,
        a.elapsed_ms + b.elapsed_ms,
        max(known, default=None),
        a.blocks + b.blocks,
        a.bounded_blocks + b.bounded_blocks,
        a.budget_halvings + b.budget_halvings,
        a.repaired + b.repaired,
        shares,
    )
