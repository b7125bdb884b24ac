"""The calls of a run by block of the model, and by kind in all blocks together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..engine.runs import CallKind, CallTally, Run


@dataclass
class BlockRow:
    """The calls of one block, or of neighbouring blocks in which the same happened.

    Attributes:
        name: ``"double 3"``, ``"double 0 to double 18"``.
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
    """Neighbours whose names differ in numbers only, and in which the same happened, as one row."""
    groups = []
    for _, group in groupby(rows, key=lambda row: (re.sub(r"\d+", "", row.name), row.routes, row.passed)):
        alike = list(group)
        name = " to ".join(dict.fromkeys([alike[0].name, alike[-1].name]))
        elapsed_ms = sum(row.elapsed_ms for row in alike)
        groups.append(replace(alike[0], name=name, elapsed_ms=elapsed_ms, blocks=len(alike)))
    return groups


def kinds_of(run: Run) -> list[tuple[CallKind, CallTally]]:
    """The run's calls with the block left out (``kind.block`` is ""), most time first, then most calls."""
    sums: dict[CallKind, CallTally] = {}
    for kind, tally in list(run.tallies.items()):
        sums.setdefault(replace(kind, block=""), CallTally()).merge(tally)
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
            whole.tally(kind).merge(tally)
    return whole
