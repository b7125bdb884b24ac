"""The report as text: what was gained, a summary, a section per run, a block for a bug report."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable

from ...pascal_attn_core.machine.facts import describe_facts
from ...pascal_attn_core.observe.report import shares_text
from ..engine.runs import PASSED, CallKind, CallTally, Run
from .findings import Findings, Shown, clock_text
from .gain import gain_line
from .rows import BlockGroup, block_rows, grouped, kinds_of
from .words import duration_text, peak_label, plural, shape_text, share_text, size_text

_WIDTH = 110
_LABEL = 12
_MOST_GROUPS, _MOST_KINDS = 60, 40


def report_text(findings: Findings) -> str:
    """All of it."""
    lines = [gained(findings), *_warnings(findings), "", "PASCAL ATTENTION REPORT"]
    lines += [line for text in summary(findings) for line in textwrap.wrap(text, _WIDTH)]
    for shown in findings.shown:
        lines += ["", *_section(shown, findings.memory)]
    return "\n".join([*lines, "", *bug_report(findings)])


def gained(findings: Findings) -> str:
    """What the user gained, or why nothing was to be gained: one sentence."""
    return gain_line([shown.run for shown in findings.shown], findings.host.get("attention", ""))


def summary(findings: Findings) -> list[str]:
    """A sentence per run, and what is missing."""
    return [*(_summary_of(shown) for shown in findings.shown), *findings.remarks]


def _warnings(findings: Findings) -> list[str]:
    if not findings.alarms:
        return []
    rule = "!" * 40
    wrapped = [textwrap.wrap(text, _WIDTH, initial_indent="!! ", subsequent_indent="   ") for text in findings.alarms]
    return ["", rule, *(line for lines in wrapped for line in lines), rule]


def _summary_of(shown: Shown) -> str:
    run = shown.run
    parts = [run.line()]
    if run.elapsed_ms:
        parts.append(time_text(run))
    if run.extra_bytes is not None:
        parts.append(f"largest extra memory {size_text(run.extra_bytes)}, math {size_text(run.math_bytes)}")
    if shown.exactness is not None:
        parts.append("exact within rounding" if shown.exactness.is_exact else "NOT EXACT")
    return "; ".join(parts) + (f" ({shown.remark})" if shown.remark else "")


def time_text(run: Run) -> str:
    """``"4.52 s in attention of 12.3 s (37%)"``."""
    if not run.elapsed_ms:
        return f"{duration_text(run.elapsed_s)}; attention was not timed"
    text = f"{duration_text(run.elapsed_ms / 1e3)} in attention"
    if run.share is None:
        return text
    several = f" on {len(run.devices)} devices" if len(run.devices) > 1 else ""
    return f"{text} of {duration_text(run.elapsed_s)}{several} ({share_text(run.share)})"


def _section(shown: Shown, memory: dict[str, int]) -> list[str]:
    run = shown.run
    node = "" if run.unique_id is None else f", node {run.unique_id}"
    lines = [f"=== {shown.title}{node}, {clock_text(run.started)} ==="]
    rows = [("", shown.remark), ("settings", run.settings), ("device", ", ".join(sorted(run.devices) or [run.device]))]
    rows += [("bands", text) for text in run.bands]
    if run.tallies:
        rows += _call_rows(run)
        rows.append(("shared", shares_text(run.shares)))
        rows += [("time", time_text(run)), *_memory_rows(run, memory), *_trouble_rows(run)]
    elif run.elapsed_s:
        rows.append(("time", duration_text(run.elapsed_s)))
        rows += _memory_rows(run, memory) if run.bands else []
    if shown.exactness is not None:
        rows.append(("exactness", shown.exactness.text()))
    rows += [("WARNING", text) for text in run.warnings] + [("note", text) for text in run.notes]
    lines += [line for label, text in rows if text for line in _row(label, text)]
    return lines + _block_lines(run)


def _call_rows(run: Run) -> list[tuple[str, str]]:
    rows = [("calls", f"{run.count():,}: {run.count('taken'):,} taken, {run.count(PASSED):,} passed to ComfyUI")]
    rows += [("taken", f"{count:,} x {why}") for why, count in _routes_and_reasons(run).items()]
    return rows + [("passed", f"{count:,} x {why}") for why, count in run.reasons(PASSED).items()]


def _routes_and_reasons(run: Run) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind, tally in list(run.tallies.items()):
        if kind.outcome == "taken":
            text = f"{kind.route}: {kind.why}"
            counts[text] = counts.get(text, 0) + tally.count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _memory_rows(run: Run, memory: dict[str, int]) -> Iterable[tuple[str, str]]:
    if run.extra_bytes is not None:
        yield "memory", f"{size_text(run.extra_bytes)}: the most that one call took besides inputs and output"
    if run.math_bytes:
        yield "", f"{size_text(run.math_bytes)}: the least that math attention would store for the largest call"
    if run.peak_bytes:
        yield "", f"{size_text(run.peak_bytes)}: {peak_label(run)}"
    if memory.get(run.device):
        yield "", f"{size_text(memory[run.device])}: total memory of {run.device}"


def _trouble_rows(run: Run) -> Iterable[tuple[str, str]]:
    tallies = list(run.tallies.items())
    halvings = sum(tally.budget_halvings for _, tally in tallies)
    if halvings:
        yield "budget", f"halved {plural(halvings, 'time')}, because the device was out of memory"
    repaired = {kind.block: tally.repaired for kind, tally in tallies if tally.repaired}
    if repaired:
        blocks = ", ".join(f"{block} ({count}x)" for block, count in list(repaired.items())[:12])
        more = f" and {len(repaired) - 12} more blocks" if len(repaired) > 12 else ""
        yield (
            "repaired",
            f"{plural(sum(repaired.values()), 'output')} not finite, recomputed in float32: {blocks}{more}",
        )


def _block_lines(run: Run) -> list[str]:
    groups = grouped(block_rows(run))
    lines = ["blocks"] if groups else []
    width = min(28, max((len(group.name) for group in groups), default=0))
    for group in groups[:_MOST_GROUPS]:
        lines.append(f"  {group.name:{width}s}  {_group_text(group)}")
    if len(groups) > _MOST_GROUPS:
        lines.append(f"  ... and {len(groups) - _MOST_GROUPS} more rows")
    return lines


def _group_text(group: BlockGroup) -> str:
    row, parts = group.rows[0], []
    for route, count in row.routes.items():
        parts.append(f"{count:,} {route}")
    for why, count in row.passed.items():
        parts.append(f"{count:,} passed to ComfyUI ({why})")
    each = f"{len(group.rows)} blocks, each " if len(group.rows) > 1 else ""
    time_spent = f"; {duration_text(group.elapsed_ms / 1e3)}" if group.elapsed_ms else ""
    return each + ", ".join(parts) + time_spent


# ---- the block for a bug report ----


def bug_report(findings: Findings) -> list[str]:
    """Facts of the machine, settings, and a line per kind of call; nothing about files or prompts."""
    lines = ["--- for a bug report, copy from here ---", *describe_facts(findings.machine)]
    lines += [f"{name:{_LABEL}s}{value}" for name, value in findings.host.items()]
    lines.append(f"{'written':{_LABEL}s}{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(findings.when))}")
    for shown in findings.shown:
        run = shown.run
        lines += ["", f"{shown.title} on {run.device}: {run.settings}", f"  {_summary_of(shown)}"]
        lines += [f"  {line}" for line in _kind_lines(run)]
        lines += [f"  shared: {shares_text(run.shares)}"] if run.shares else []
        lines += [f"  {text}" for _, text in _memory_rows(run, findings.memory)]
        lines += [f"  exactness: {shown.exactness.text()}"] if shown.exactness is not None else []
        lines += [f"  WARNING: {text}" for text in run.warnings] + [f"  note: {text}" for text in run.notes]
    return [*lines, "--- to here ---"]


def _kind_lines(run: Run) -> list[str]:
    kinds = kinds_of(run)
    lines = [_kind_text(kind, tally) for kind, tally in kinds[:_MOST_KINDS]]
    if len(kinds) > _MOST_KINDS:
        lines.append(f"... and {len(kinds) - _MOST_KINDS} more kinds of calls")
    return lines


def _kind_text(kind: CallKind, tally: CallTally) -> str:
    facts = [f"{tally.count:6d} x {kind.route or 'passed to ComfyUI'}", shape_text(kind), f"by {kind.via}"]
    if tally.elapsed_ms:
        facts.append(f"{duration_text(tally.elapsed_ms / 1e3)}")
    if tally.extra_bytes is not None:
        facts.append(f"+{size_text(tally.extra_bytes)}")
    if tally.blocks:
        facts.append(f"{tally.bounded_blocks / tally.blocks:.0%} bounded")
    if tally.budget_halvings:
        facts.append(f"budget halved {tally.budget_halvings}x")
    if tally.repaired:
        facts.append(f"{tally.repaired} repaired")
    return ", ".join(fact for fact in facts if fact) + f": {kind.why}"


def _row(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - _LABEL)
    return [f"{label if i == 0 else '':{_LABEL}s}{line}" for i, line in enumerate(lines)]
