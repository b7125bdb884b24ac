"""The report as text and as a picture: what was gained, a summary, facts of the machine, sections for each run."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

from PIL import Image

from ...pascal_attn_core.machine.facts import describe_facts
from ...pascal_attn_core.observe.report import shares_text
from ..engine.runs import PASSED, CallKind, CallTally, Run
from .findings import Findings, Shown, clock_text
from .gain import gain_line, is_gain
from .picture import Row, Section, draw
from .rows import BlockRow, block_rows, kinds_of
from .words import duration_text, plural, shape_text, share_text, size_text

_WIDTH = 110
_LABEL = 12
_MOST_GROUPS, _MOST_KINDS = 60, 40
_MOST_NOTES = 4  # in the picture: layer by layer only the text says it


def report_text(findings: Findings, selftest: str = "") -> str:
    """The whole report. All but its head is a block for a bug report: facts of the machine, of each run its settings,
    what happened and a line per kind of call, and the block of the self-test; nothing about files or prompts."""
    lines = [gained(findings), *_warnings(findings), "", "PASCAL ATTENTION REPORT"]
    told = [*map(_summary_of, findings.shown), *findings.remarks]
    lines += [line for text in told for line in textwrap.wrap(text, _WIDTH)]
    lines += ["", "--- for a bug report, copy from here ---", *describe_facts(findings.machine)]
    lines += [f"{name:{_LABEL}s}{value}" for name, value in findings.host.items()]
    lines.append(f"{'written':{_LABEL}s}{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(findings.when))}")
    for shown in findings.shown:
        for section in _sections_of(shown, findings):
            lines += ["", f"=== {section.title} ===", *_printed(section)]
        kinds = kinds_of(shown.run)
        lines += ["", *(_kind_text(kind, tally) for kind, tally in kinds[:_MOST_KINDS])] if kinds else []
        lines += [f"... and {len(kinds) - _MOST_KINDS} more kinds of calls"] if len(kinds) > _MOST_KINDS else []
    lines += ["", "=== self-test ===", selftest] if selftest else []
    return "\n".join([*lines, "--- to here ---"])


def draw_report(findings: Findings) -> Image.Image:
    heads = [("WARNING", findings.alarms, "bad"), ("Note", findings.remarks, "caution")]
    head = [Section(title, [Row("", text) for text in texts], tone) for title, texts, tone in heads if texts]
    runs = [shown.run for shown in findings.shown]
    tone = "good" if is_gain(runs, findings.host.get("attention", "")) and all(run.is_exact for run in runs) else ""
    sections = [section for shown in findings.shown for section in _sections_of(shown, findings, _MOST_NOTES)]
    return draw(gained(findings), _facts(findings), [*head, *sections], tone=tone)


def _facts(findings: Findings) -> str:
    """``"Pascal Attention Report, 2026-11-23 18:30, GTX 1080 Ti (sm_61), torch 2.13.0, ..."``."""
    machine = findings.machine
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(findings.when))
    facts = [f"Pascal Attention {machine.package} Report", when]
    facts += [info.name + (f" ({info.arch})" if info.arch else "") for info in machine.devices]
    return ", ".join([*facts, f"torch {machine.build.version}", *(" ".join(item) for item in findings.host.items())])


def gained(findings: Findings) -> str:
    """One sentence: the user's gain, or the reason why there was nothing to gain."""
    return gain_line([shown.run for shown in findings.shown], findings.host.get("attention", ""))


def _sections_of(shown: Shown, findings: Findings, most_notes: int | None = None) -> list[Section]:
    """The sections about a run: what happened, and in which blocks of the model."""
    blocks = [_block_section(shown)] if shown.run.tallies else []
    return [_section(shown, findings.memory, most_notes), *blocks]


def _warnings(findings: Findings) -> list[str]:
    if not findings.alarms:
        return []
    rule = "!" * 40
    wrapped = [textwrap.wrap(text, _WIDTH, initial_indent="!! ", subsequent_indent="   ") for text in findings.alarms]
    return ["", rule, *(line for lines in wrapped for line in lines), rule]


def _summary_of(shown: Shown) -> str:
    run = shown.run
    parts = [run.line(), *([time_text(run)] if run.elapsed_ms else [])]
    if run.extra_bytes is not None:
        parts.append(f"largest extra memory {size_text(run.extra_bytes)}, math {size_text(run.math_bytes)}")
    parts += [] if run.exactness is None else [run.exactness.verdict]
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


def _section(shown: Shown, memory: dict[str, int], most_notes: int | None) -> Section:
    run, devices = shown.run, ", ".join(sorted(shown.run.devices) or [shown.run.device])
    rows = [Row("", shown.remark, tone="caution"), Row("settings", run.settings), Row("device", devices)]
    rows += [Row("gained", text, tone="good" if run.is_exact else "caution") for text in run.gains]
    if run.tallies:
        rows += _call_rows(run)
        rows.append(Row("shared", shares_text(run.shares)))
        rows.append(Row("time", time_text(run), run.share if run.elapsed_ms else None))
    elif run.elapsed_s:
        rows.append(Row("time", duration_text(run.elapsed_s)))
    if run.tallies or run.gains:
        rows += _memory_rows(run, memory)
    rows += _trouble_rows(run)
    if run.exactness is not None:
        rows.append(Row("exactness", run.exactness.text(), tone=run.exactness.tone))
    rows += [Row("WARNING", text, tone="bad") for text in run.warnings]
    rows += [Row("note", text) for text in run.notes[:most_notes]]
    node = "" if run.unique_id is None else f", node {run.unique_id}"
    return Section(f"{shown.title}{node}, {clock_text(run.started)}", [row for row in rows if row.text])


def _call_rows(run: Run) -> Iterator[Row]:
    calls = run.count()
    yield Row("calls", f"{calls:,}: {run.count('taken'):,} taken, {run.count(PASSED):,} passed to ComfyUI")
    for why, count in run.counted(lambda kind: f"{kind.route}: {kind.why}", "taken").items():
        yield Row("taken", f"{count:,} x {why}", count / calls)
    for why, count in run.reasons(PASSED).items():
        yield Row("passed", f"{count:,} x {why}", count / calls, "caution")


def _memory_rows(run: Run, memory: dict[str, int]) -> Iterator[Row]:
    card = memory.get(run.device, 0)
    peak = "peak of ComfyUI since its start" if run.device.startswith("cpu") else "peak of torch's memory in the run"
    found = [
        (run.extra_bytes, "the most that one call took besides inputs and output"),
        (run.math_bytes or None, "the least that math attention would store for the largest call"),
        (run.peak_bytes or None, peak),
        (card or None, f"total memory of {run.device}"),
    ]
    most = max((num_bytes or 0 for num_bytes, _ in found), default=0)
    label = "memory"
    for num_bytes, what in found:
        if num_bytes is not None:
            tone = "bad" if 0 < card < num_bytes else ""
            yield Row(label, f"{size_text(num_bytes)}: {what}", num_bytes / most if most else None, tone)
            label = ""


def _trouble_rows(run: Run) -> Iterator[Row]:
    tallies = list(run.tallies.items())
    halvings = sum(tally.budget_halvings for _, tally in tallies)
    if halvings:
        text = f"halved {plural(halvings, 'time')}, because the device was out of memory"
        yield Row("budget", text, tone="caution")
    repaired = sum(tally.repaired for _, tally in tallies)
    if repaired:
        yield Row("repaired", f"{plural(repaired, 'output')} not finite, recomputed in float32", tone="caution")


def _block_section(shown: Shown) -> Section:
    """One row for each group of equal neighbours; its bar is its share of attention's time, or of the calls where
    nothing was timed."""
    groups, timed = block_rows(shown.run), shown.run.elapsed_ms > 0
    amounts = [group.elapsed_ms if timed else float(group.blocks * group.calls.total()) for group in groups]
    most = max(amounts, default=0.0)
    rows = [Row(group.name, _group_text(group), amount / most) for group, amount in zip(groups, amounts) if most]
    left_out = len(rows) - _MOST_GROUPS
    rows[_MOST_GROUPS:] = [Row("...", f"and {left_out} more rows")] if left_out > 0 else []
    return Section(f"{shown.title}: {'time' if timed else 'calls'} by block", rows)


def _group_text(group: BlockRow) -> str:
    each = f"{group.blocks} blocks, each " if group.blocks > 1 else ""
    parts = ", ".join(f"{count:,} {what}" for what, count in group.calls.items())
    return each + parts + (f"; {duration_text(group.elapsed_ms / 1e3)}" if group.elapsed_ms else "")


def _printed(section: Section) -> Iterator[str]:
    """A section's rows as lines, the texts below each other."""
    indent = max(_LABEL, min(28, max((len(row.label) + 2 for row in section.rows), default=0)))
    for row in section.rows:
        label = row.label
        if len(label) >= indent:
            yield label
            label = ""
        yield from textwrap.wrap(row.text, _WIDTH, initial_indent=f"{label:{indent}s}", subsequent_indent=" " * indent)


def _kind_text(kind: CallKind, tally: CallTally) -> str:
    facts = [
        f"{tally.count:6d} x {kind.route or 'passed to ComfyUI'}",
        shape_text(kind),
        f"by {kind.via}",
        duration_text(tally.elapsed_ms / 1e3) if tally.elapsed_ms else "",
        "" if tally.extra_bytes is None else f"+{size_text(tally.extra_bytes)}",
        f"{tally.bounded_blocks / tally.blocks:.0%} bounded" if tally.blocks else "",
        f"budget halved {tally.budget_halvings}x" if tally.budget_halvings else "",
        f"{tally.repaired} repaired" if tally.repaired else "",
    ]
    return f"{', '.join(filter(None, facts))}: {kind.why}"
