"""The report as a picture: a summary per run, time per block, memory."""

from __future__ import annotations

import time

from PIL import Image

from ._chart import AMBER, AMBER_PANEL, FAINT, INK, MUTED, RED, RED_PANEL, Board, fitted, line_height
from ._chart_blocks import draw_blocks
from ._chart_parts import HANDED_ON, ROUTE_COLOURS, Part, draw_memory, draw_stack
from ._report_find import Findings, Shown, clock_text
from ._report_words import duration_text, peak_label, plural, size_text
from ._runs import Run

WIDTH, MARGIN = 1200, 44
BODY, SMALL, HEADING, TITLE = 18, 15, 26, 34
_MOST_RUNS, _MOST_SENTENCES = 6, 8
_GREEN = "#1f7a4d"


def draw_report(findings: Findings) -> Image.Image:
    """The whole picture, 1200 pixels wide and as high as it needs."""
    board = Board(WIDTH, MARGIN)
    _draw_title(board, findings)
    if findings.alarms:
        board.space(18)
        board.banner("WARNING", _first(findings.alarms), BODY, RED, RED_PANEL)
    if findings.remarks:
        board.space(18)
        board.banner("Note", _first(findings.remarks), BODY, AMBER, AMBER_PANEL)
    for shown in findings.shown[-_MOST_RUNS:]:
        _draw_run(board, shown, findings.memory.get(shown.run.device, 0))
    left_out = len(findings.shown) - _MOST_RUNS
    if left_out > 0:
        board.space(24)
        board.paragraph(f"{plural(left_out, 'earlier run')} in the text alone.", BODY, MUTED)
    return board.finished()


def _first(sentences: list[str]) -> list[str]:
    more = len(sentences) - _MOST_SENTENCES
    return sentences[:_MOST_SENTENCES] + ([f"and {more} more, see the text"] if more > 0 else [])


def _draw_title(board: Board, findings: Findings) -> None:
    board.text(board.left, board.y, "Pascal Attention Report", TITLE, bold=True)
    stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(findings.when))
    board.text(board.right, board.y + 14, stamp, BODY, MUTED, align="right")
    board.space(line_height(TITLE) + 6)
    machine = findings.machine
    cards = [info.name + (f" ({info.arch})" if info.arch else "") for info in machine.devices]
    facts = [*cards, f"torch {machine.build.version}", f"Pascal Attention {machine.package}"]
    facts += [f"{name} {value}" for name, value in findings.host.items()]
    board.paragraph(", ".join(facts), BODY, MUTED)


def _draw_run(board: Board, shown: Shown, card_bytes: int) -> None:
    run = shown.run
    board.space(30)
    board.reserve(140)
    board.line(board.left, board.y, board.right, board.y, FAINT, 2)
    board.space(20)
    _draw_heading(board, shown)
    if run.tallies:
        _draw_sums(board, run)
        if run.count("taken"):
            draw_blocks(board, run)
        _draw_memory(board, run, card_bytes)
    _draw_sentences(board, shown)


def _draw_heading(board: Board, shown: Shown) -> None:
    run = shown.run
    whole = duration_text(run.elapsed_s) if run.elapsed_s else "not finished"
    room = board.right - board.left - 240
    board.text(board.left, board.y, fitted(shown.title, room, HEADING), HEADING, bold=True)
    board.text(board.right, board.y, whole, HEADING, align="right")
    board.space(line_height(HEADING) + 2)
    node = "" if run.unique_id is None else f"node {run.unique_id}, "
    board.paragraph(f"{node}{clock_text(run.started)}, {run.device}: {run.settings}", BODY, MUTED)
    if shown.remark:
        board.paragraph(shown.remark, BODY, AMBER, bold=True)


def _draw_sums(board: Board, run: Run) -> None:
    """Two bars side by side: the calls by route, and attention's share of the time."""
    board.space(18)
    gap = 48
    half = (board.right - board.left - gap) / 2
    calls = [Part(route, count, f"{count:,}", ROUTE_COLOURS.get(route, MUTED)) for route, count in run.routes().items()]
    handed_on = run.count("handed on")
    calls.append(Part("handed on to ComfyUI", handed_on, f"{handed_on:,}", HANDED_ON))
    top = board.y
    draw_stack(board, board.left, half, plural(run.count(), "attention call"), calls)
    board.y, below = top, board.y
    if run.elapsed_ms and run.elapsed_s:
        attention = run.elapsed_ms / 1e3 / max(1, len(run.devices))
        rest = max(0.0, run.elapsed_s - attention)
        parts = [
            Part("attention taken", attention, duration_text(attention), INK),
            Part("everything else", rest, duration_text(rest), HANDED_ON),
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
    sentences = [(f"{count:,} handed on: {why}", INK) for why, count in list(run.reasons("handed on").items())[:4]]
    halvings = sum(tally.budget_halvings for tally in run.tallies.values())
    repaired = sum(tally.repaired for tally in run.tallies.values())
    if halvings:
        sentences.append((f"Memory budget halved {plural(halvings, 'time')}: the device was out of memory", AMBER))
    if repaired:
        sentences.append((f"{plural(repaired, 'output')} not finite, computed again in float32", AMBER))
    if shown.exactness is not None:
        sentences.append((f"Exactness: {shown.exactness.text()}", _GREEN if shown.exactness.is_exact else RED))
    sentences += [(text, INK) for text in _first(run.notes)]
    board.space(14 if sentences else 0)
    for text, colour in sentences:
        board.reserve(line_height(BODY))
        board.box(board.left, board.y + 6, 9, 9, colour)
        board.paragraph(text, BODY, indent=20)
        board.space(3)
