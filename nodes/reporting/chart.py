"""The report as a picture: what was gained, a summary per run, time per block, memory."""

from __future__ import annotations

import time

from PIL import Image

from ..engine.runs import PASSED, Run
from .board import AMBER, AMBER_PANEL, FAINT, INK, MUTED, RED, RED_PANEL, Board, fitted, line_height, text_width
from .chart_blocks import draw_blocks
from .chart_parts import PASSED_COLOUR, ROUTE_COLOURS, Part, draw_memory, draw_stack
from .findings import Findings, Shown, clock_text
from .gain import gain_line
from .words import duration_text, peak_label, plural, size_text

WIDTH, MARGIN, _GAP = 1600, 44, 48
BODY, LARGE, HEADING, TITLE = 18, 28, 36, 54
_MOST_RUNS, _MOST_SENTENCES = 6, 8
_GREEN = "#1f7a4d"


def draw_report(findings: Findings) -> Image.Image:
    """The whole picture: 1600 pixels wide, from three runs on 2400, so that it is wider than high, as the node is.

    The first line is as large as it must be to be read on the node itself, where the picture is shown at a third of its
    size or less; the rest is read when it is opened.
    """
    board = Board(width_for(len(findings.shown)), MARGIN)
    _draw_title(board, findings)
    if findings.alarms:
        board.space(18)
        board.banner("WARNING", _first(findings.alarms), LARGE, RED, RED_PANEL)
    if findings.remarks:
        board.space(18)
        board.banner("Note", _first(findings.remarks), BODY, AMBER, AMBER_PANEL)
    _draw_runs(board, findings)
    left_out = len(findings.shown) - _MOST_RUNS
    if left_out > 0:
        board.space(24)
        board.paragraph(f"{plural(left_out, 'earlier run')} in the text only.", BODY, MUTED)
    return board.finished()


def width_for(runs: int) -> int:
    """Pixels: of two columns, or of three."""
    return WIDTH if runs < 3 else WIDTH * 3 // 2


def _first(sentences: list[str]) -> list[str]:
    more = len(sentences) - _MOST_SENTENCES
    return sentences[:_MOST_SENTENCES] + ([f"and {more} more, see the text"] if more > 0 else [])


def _draw_title(board: Board, findings: Findings) -> None:
    gained = gain_line([shown.run for shown in findings.shown], findings.host.get("attention", ""))
    is_gain = gained.startswith("Gained")
    size = TITLE * board.width // WIDTH
    board.paragraph(gained, size, _GREEN if is_gain else INK, bold=True)
    board.space(10)
    board.text(board.left, board.y, "Pascal Attention Report", BODY, bold=True)
    stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(findings.when))
    board.text(board.right, board.y, stamp, BODY, MUTED, align="right")
    board.space(line_height(BODY))
    machine = findings.machine
    cards = [info.name + (f" ({info.arch})" if info.arch else "") for info in machine.devices]
    facts = [*cards, f"torch {machine.build.version}", f"Pascal Attention {machine.package}"]
    facts += [f"{name} {value}" for name, value in findings.host.items()]
    board.paragraph(", ".join(facts), BODY, MUTED)


def _draw_runs(board: Board, findings: Findings) -> None:
    """One below the other, each in the column that ends higher."""
    shown = findings.shown[-_MOST_RUNS:]
    columns = min(3, len(shown))
    if not columns:
        return
    left, right = board.left, board.right
    width = (right - left - _GAP * (columns - 1)) / columns
    ends = [board.y] * columns
    for entry in shown:
        column = ends.index(min(ends))
        board.left = round(left + column * (width + _GAP))
        board.right, board.y = round(board.left + width), ends[column]
        _draw_run(board, entry, findings.memory.get(entry.run.device, 0))
        ends[column] = board.y
    board.left, board.right, board.y = left, right, max(ends)


def _draw_run(board: Board, shown: Shown, card_bytes: int) -> None:
    run = shown.run
    board.space(30)
    board.reserve(140)
    board.line(board.left, board.y, board.right, board.y, FAINT, 2)
    board.space(20)
    _draw_heading(board, shown)
    if run.tallies:
        _draw_result(board, shown)
        _draw_sums(board, run)
        if run.count("taken"):
            draw_blocks(board, run)
        _draw_memory(board, run, card_bytes)
    _draw_sentences(board, shown)


def _draw_heading(board: Board, shown: Shown) -> None:
    run = shown.run
    whole = duration_text(run.elapsed_s) if run.elapsed_s else "not finished"
    room = board.right - board.left - text_width(whole, HEADING) - 24
    board.text(board.left, board.y, fitted(shown.title, room, HEADING), HEADING, bold=True)
    board.text(board.right, board.y, whole, HEADING, align="right")
    board.space(line_height(HEADING) + 2)
    node = "" if run.unique_id is None else f"node {run.unique_id}, "
    board.paragraph(f"{node}{clock_text(run.started)}, {run.device}: {run.settings}", BODY, MUTED)
    if shown.remark:
        board.paragraph(shown.remark, BODY, AMBER, bold=True)


def _draw_result(board: Board, shown: Shown) -> None:
    """How many calls were taken, by which routes, and whether exactly."""
    run = shown.run
    parts = [f"{run.count('taken'):,} of {plural(run.count(), 'call')} taken"]
    if run.extra_bytes is not None:
        parts.append(f"at most {size_text(run.extra_bytes)} extra")
    if shown.exactness is not None:
        parts.append("exact within rounding" if shown.exactness.is_exact else "NOT EXACT")
    board.space(6)
    board.paragraph(", ".join(parts), LARGE)


def _draw_sums(board: Board, run: Run) -> None:
    """Two bars side by side: the calls by route, and attention's share of the time."""
    board.space(18)
    gap = 48
    half = (board.right - board.left - gap) / 2
    calls = [Part(route, count, f"{count:,}", ROUTE_COLOURS.get(route, MUTED)) for route, count in run.routes().items()]
    passed = run.count(PASSED)
    calls.append(Part("passed to ComfyUI", passed, f"{passed:,}", PASSED_COLOUR))
    top = board.y
    draw_stack(board, board.left, half, plural(run.count(), "attention call"), calls)
    board.y, below = top, board.y
    if run.elapsed_ms and run.elapsed_s:
        attention = run.elapsed_ms / 1e3 / max(1, len(run.devices))
        rest = max(0.0, run.elapsed_s - attention)
        parts = [
            Part("attention taken", attention, duration_text(attention), INK),
            Part("everything else", rest, duration_text(rest), PASSED_COLOUR),
        ]
        draw_stack(board, board.left + half + gap, half, "Time of the run", parts)
    board.y = max(board.y, below)


def _draw_memory(board: Board, run: Run, card_bytes: int) -> None:
    extra = [] if run.extra_bytes is None else [Part("Attention: extra memory", run.extra_bytes, "", _GREEN)]
    too_much = bool(card_bytes) and run.math_bytes > card_bytes
    math = Part("Math attention: score matrix", run.math_bytes, "", RED if too_much else "#98a2ad")
    label = peak_label(run)
    peak = Part(label[:1].upper() + label[1:], run.peak_bytes or 0, "", "#5b7fa6")
    bars = [part for part in (*extra, math, peak) if part.value]
    if bars:
        draw_memory(board, "Memory", bars, card_bytes, size_text)


def _draw_sentences(board: Board, shown: Shown) -> None:
    run = shown.run
    sentences = [(f"{count:,} passed to ComfyUI: {why}", INK) for why, count in list(run.reasons(PASSED).items())[:4]]
    halvings = sum(tally.budget_halvings for tally in run.tallies.values())
    repaired = sum(tally.repaired for tally in run.tallies.values())
    if halvings:
        sentences.append((f"Memory budget halved {plural(halvings, 'time')}: the device was out of memory", AMBER))
    if repaired:
        sentences.append((f"{plural(repaired, 'output')} not finite, recomputed in float32", AMBER))
    if shown.exactness is not None:
        sentences.append((f"Exactness: {shown.exactness.text()}", _GREEN if shown.exactness.is_exact else RED))
    sentences += [(text, INK) for text in _first(run.notes)]
    board.space(14 if sentences else 0)
    for text, colour in sentences:
        board.reserve(line_height(BODY))
        board.box(board.left, board.y + 6, 9, 9, colour)
        board.paragraph(text, BODY, indent=20)
        board.space(3)
