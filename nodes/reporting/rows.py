"""The calls of a run by block of the model, and by kind in all blocks together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..engine.runs import PASSED, CallKind, CallTally, Run


@dataclass
class BlockRow:
    """The calls of one block, or of neighbouring blocks in which the same happened.

    Attributes:
        name: ``"double 3"``, ``"double 0 to double 18"``.
        calls: number of calls in each block by what happened: a route, or ``"passed to ComfyUI (<why>)"``.
        elapsed_ms: time in the calls taken, of all blocks.
        blocks: number of blocks.
    """

    name: str
    calls: Counter[str] = field(default_factory=Counter)
    elapsed_ms: float = 0.0
    blocks: int = 1


def block_rows(run: Run) -> list[BlockRow]:
    """A row for each block, in the order in which they came first; neighbours whose names differ in numbers only, and
    in which the same happened, as one."""
    rows: dict[str, BlockRow] = {}
    for kind, tally in list(run.tallies.items()):
        row = rows.setdefault(kind.block, BlockRow(kind.block))
        row.calls[kind.route if kind.outcome == "taken" else f"{PASSED} ({kind.why})"] += tally.count
        row.elapsed_ms += tally.elapsed_ms
    groups = []
    for (_, calls), group in groupby(rows.values(), key=lambda row: (re.sub(r"\d+", "", row.name), row.calls)):
        alike = list(group)
        name = " to ".join(dict.fromkeys([alike[0].name, alike[-1].name]))
        groups.append(BlockRow(name, calls, sum(row.elapsed_ms for row in alike), len(alike)))
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
    for run in runs:
        whole.elapsed_s += run.elapsed_s
        whole.devices |= run.devices
        whole.is_exact &= run.is_exact
        if run.peak_bytes is not None:
            whole.saw_memory(run.peak_bytes)
        for keep, texts in ((whole.warn, run.warnings), (whole.note, run.notes), (whole.gain, run.gains)):
            for text in texts:
                keep(text)
        for kind, tally in list(run.tallies.items()):
            whole.tally(kind).merge(tally)
    return whole
