"""The report as one list of sections, which is printed as text and drawn as a picture, below what was gained."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator

from PIL import Image

from ...pascal_attn_core.machine.facts import describe_facts, line
from ...pascal_attn_core.observe.report import shares_text
from ..engine.runs import PASSED, CallKind, CallTally, Run
from .findings import Findings, Shown, clock_text, kinds_of
from .gain import gain_line
from .picture import HEADLINE, LARGE, Row, Section, draw
from .words import duration_text, plural, shape_text, share_text, size_text

_WIDTH = 110
_LABEL = 12
_MOST_KINDS = 40
_MOST_LINES = 4  # below the headline of the picture, one for each run


def report_text(findings: Findings, selftest: str = "") -> str:
    """The whole report. All but its head is a block for a bug report: facts of the machine, the sections of each run,
    and the block of the self-test; nothing about files or prompts."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    lines = [headline(findings), *_printed(_heads(findings)), "", "--- for a bug report, copy from here ---"]
    lines += ["PASCAL ATTENTION REPORT", *describe_facts(findings.machine)]
    lines += [line(name, value) for name, value in [*findings.host.items(), ("written", when)]]
    lines += _printed(_sections(findings, with_kinds=True))
    if selftest:
        lines += ["", "=== self-test ===", selftest]
    return "\n".join([*lines, "--- to here ---"])


def draw_report(findings: Findings) -> Image.Image:
    """The report without its calls by kind."""
    runs, gained = [shown.run for shown in findings.shown], headline(findings)
    is_good = gained.startswith("Gained") and all(run.is_exact for run in runs)
    about = ", ".join([describe_facts(findings.machine)[0], *map(" ".join, findings.host.items())])
    first = Section("", [Row("", gained, "good" if is_good else "")], size=HEADLINE)
    lines = Section("", [Row("", run.line()) for run in runs[:_MOST_LINES]], size=LARGE)
    heads = [first, lines, Section("", [Row("", about, "muted")]), *_heads(findings)]
    return draw([*heads, *_sections(findings, with_kinds=False)])


def headline(findings: Findings) -> str:
    """One sentence: the user's gain, or the reason why there was nothing to gain."""
    return gain_line([shown.run for shown in findings.shown], findings.host.get("attention", ""))


def _printed(sections: Iterable[Section]) -> Iterator[str]:
    """Sections as lines, the texts of their rows below each other."""
    indent = " " * _LABEL
    for section in sections:
        yield from ("", f"=== {section.title} ===")
        for row in section.rows:
            label = f"{row.label:{_LABEL}s}"
            yield from textwrap.wrap(row.text, _WIDTH, initial_indent=label, subsequent_indent=indent)


def _heads(findings: Findings) -> Iterator[Section]:
    """Yield the alarms, then the remarks."""
    for title, texts, tone in (("WARNING", findings.alarms, "bad"), ("Note", findings.remarks, "caution")):
        if texts:
            yield Section(title, [Row("", text) for text in texts], tone)


# ---- the facts of each run -------------------------------------------------------------------------------------------


def _sections(findings: Findings, *, with_kinds: bool) -> Iterator[Section]:
    """Yield a section for each run: what happened, and its calls by kind."""
    for shown in findings.shown:
        rows = [row for row in _rows(shown) if row.text] + (_kind_rows(shown.run) if with_kinds else [])
        node = "" if shown.run.unique_id is None else f", node {shown.run.unique_id}"
        yield Section(f"{shown.title}{node}, {clock_text(shown.run.started)}", rows)


def _rows(shown: Shown) -> Iterator[Row]:
    """Yield a row for each fact about a run; rows without a text are left out."""
    run = shown.run
    yield Row("", shown.remark, "caution")
    yield Row("settings", run.settings)
    yield Row("device", ", ".join(sorted(run.devices) or [run.device]))
    for text in run.gains:
        yield Row("gained", text, "good" if run.is_exact else "caution")
    if run.tallies:
        yield Row("calls", run.counts)
        yield Row("shared", shares_text(run.shares))
    if run.tallies or run.elapsed_s:
        yield Row("time", _time_text(run))
    if run.tallies or run.gains:
        yield Row("memory", _memory_text(run))
    if halvings := run.total("budget_halvings"):
        text = f"halved {plural(halvings, 'time')}, because the device was out of memory"
        yield Row("budget", text, "caution")
    if repaired := run.total("repaired"):
        yield Row("repaired", f"{plural(repaired, 'output')} not finite, recomputed in float32", "caution")
    if run.exactness is not None:
        is_exact, text = run.exactness
        yield Row("exactness", text, {True: "good", False: "bad", None: "caution"}[is_exact])
    for text in run.warnings:
        yield Row("WARNING", text, "bad")
    for text in run.notes:
        yield Row("note", text)


def _time_text(run: Run) -> str:
    """``"4.52 s in attention of 12.3 s (37%)"``."""
    if not run.elapsed_ms:
        return duration_text(run.elapsed_s) + ("; attention was not timed" if run.tallies else "")
    several = f" on {len(run.devices)} devices" if len(run.devices) > 1 else ""
    of = "" if run.share is None else f" of {duration_text(run.elapsed_s)}{several} ({share_text(run.share)})"
    return f"{duration_text(run.elapsed_ms / 1e3)} in attention{of}"


def _memory_text(run: Run) -> str:
    """``"at most 63 MiB in a call besides inputs and output; the peak of torch's memory in the run was 7 GiB"``."""
    of = "ComfyUI since its start" if run.device.startswith("cpu") else "torch's memory in the run"
    facts = (
        (run.extra_bytes, "at most {} in a call besides inputs and output"),
        (run.math_bytes or None, "math attention would store at least {} in the largest call"),
        (run.peak_bytes or None, f"the peak of {of} was {{}}"),
    )
    return "; ".join(fact.format(size_text(size)) for size, fact in facts if size is not None)


def _kind_rows(run: Run) -> list[Row]:
    """A row for each kind of call."""
    rows = [
        Row(kind.outcome if kind.is_taken else "passed", _kind_text(kind, tally, blocks))
        for kind, tally, blocks in kinds_of(run)
    ]
    more = [Row("...", f"and {len(rows) - _MOST_KINDS} more kinds of calls")] if len(rows) > _MOST_KINDS else []
    return rows[:_MOST_KINDS] + more


def _kind_text(kind: CallKind, tally: CallTally, blocks: str) -> str:
    facts = [
        f"{tally.count:,} x {kind.route or PASSED}",
        shape_text(kind),
        duration_text(tally.elapsed_ms / 1e3) if tally.elapsed_ms else "",
        "" if tally.extra_bytes is None else f"+{size_text(tally.extra_bytes)}",
        f"in {blocks}" if blocks else "",
    ]
    return f"{', '.join(filter(None, facts))}: {kind.why}"
