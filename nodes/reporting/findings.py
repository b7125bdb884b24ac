"""The runs that a report is about, and its remarks where there is none."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from ...pascal_attn_core.machine.facts import Machine
from ..comfy.prompt import Prompt, kind_of, links, without_effect
from ..engine.runs import CallKind, CallTally, Run

#: nodes whose runs are reported: their titles, and the part of their runs (two workflows may number nodes alike)
PATCHES = {
    "PascalAttentionPatch": ("Pascal Attention Patch", "diffusion model"),
    "PascalVAEAttention": ("Pascal VAE Attention", "VAE"),
    "PascalTextEncoderAttention": ("Pascal Text Encoder Attention", "text encoder"),
    "PascalFFNChunking": ("Pascal FFN Chunking", "feed-forward"),
    "Pascal8Bit": ("Pascal 8-Bit", "int8"),
}


_UNFINISHED = "not finished: the figures cover the run so far"
_NOT_RUN = (
    "has not run in this prompt: ComfyUI used the results in its cache, or this report does not stand behind what "
    "samples or decodes. Connect the sampler's LATENT or the decoder's IMAGE to it. Its most recent earlier run is "
    "shown, if one is on record."
)
_MOST_GROUPS = 6  # of blocks, in a row


class Shown(NamedTuple):
    """One run in a report, and a remark ("" = of this prompt, and complete)."""

    run: Run
    remark: str = ""

    @property
    def title(self) -> str:
        """``"Flux, diffusion model"``; what the subject says already is not repeated."""
        subject, part = self.run.subject, self.run.part
        return subject if part.lower() in subject.lower() else f"{subject}, {part}"

    @property
    def alarms(self) -> list[str]:
        """Sentences that a user must not miss and that are in no log yet; a run's own warnings are there already."""
        run, found = self.run, []
        if run.finished and not (run.tallies or run.gains or run.notes or run.warnings):
            found.append("no attention call reached the patch")
        if run.exactness is not None and run.exactness.is_exact is False:
            found.append(run.exactness.text)
        return found

    def said(self, sentences: list[str]) -> list[str]:
        """The sentences, with the name of what they are about."""
        name = self.title + (f" ({self.remark})" if self.remark else "")
        return [f"{name}: {sentence}" for sentence in sentences]


def kinds_of(run: Run) -> list[tuple[CallKind, CallTally, str]]:
    """The run's calls by kind with the block left out (``kind.block`` is ""), and the blocks that make them; most time
    first, then most calls."""
    found: dict[CallKind, tuple[CallTally, list[str]]] = {}
    for kind, tally in list(run.tallies.items()):
        whole, blocks = found.setdefault(replace(kind, block=""), (CallTally(), []))
        whole.merge(tally)
        blocks.append(kind.block)
    rows = [(kind, whole, blocks_text(blocks)) for kind, (whole, blocks) in found.items()]
    return sorted(rows, key=lambda row: (-row[1].elapsed_ms, -row[1].count))


def blocks_text(names: list[str]) -> str:
    """``"double 0 to double 18, single 3"``: neighbours whose names differ in numbers only as one."""
    groups = [list(group) for _, group in groupby(names, key=lambda name: re.sub(r"\d+", "", name))]
    texts = [" to ".join(dict.fromkeys([group[0], group[-1]])) for group in groups]
    more = len(texts) - _MOST_GROUPS
    return ", ".join(texts[:_MOST_GROUPS]) + (f" and {more} more" if more > 0 else "")


@dataclass(eq=False)
class Findings:
    """Everything that a report says; text and picture are made of this alone.

    Attributes:
        shown: the runs, oldest first.
        alarms: sentences for the top, in red.
        remarks: sentences below them: what is missing and why.
        machine: the facts of the computer.
        host: of ComfyUI, by name: ``{"ComfyUI": "0.33.0", "attention": "attention_pytorch"}``.
    """

    machine: Machine
    shown: list[Shown] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    host: dict[str, str] = field(default_factory=dict)


def choose_runs(
    known: list[Run], prompt: Prompt, prompt_id: str, report_id: str | None
) -> tuple[list[Shown], list[str]]:
    """The runs of this prompt, the newest earlier run of each patch that did not run in it, and remarks.

    Args:
        known: all runs that are remembered, oldest first.
        prompt: ComfyUI's prompt: ``{node id: {"class_type": ..., "inputs": {...}}}``.
        prompt_id: of the prompt being executed.
        report_id: the report's own node.
    """
    shown = [Shown(run, "" if run.finished else _UNFINISHED) for run in known if run.prompt_id == prompt_id]
    newest = {(run.unique_id, run.part): run for run in known}
    patches = [node for node in prompt if kind_of(prompt, node) in PATCHES]
    earlier, remarks = [], []
    for node in patches:
        title, part = PATCHES[kind_of(prompt, node)]
        last = newest.get((node, part))
        if last is not None and last.prompt_id == prompt_id:
            continue
        why = without_effect(prompt, node)
        remarks.append(f"{title} (node {node}) " + (f"has no effect: {why}." if why else _NOT_RUN))
        if last is not None and not why:
            earlier.append(Shown(last, f"of an earlier prompt, at {clock_text(last.started)}"))
    if not patches and not shown:
        remarks.append(
            "There is no Pascal node that patches anything in this prompt (bypassed and muted nodes count as absent)."
        )
    if report_id is not None and report_id in prompt and "value" not in links(prompt, report_id):
        remarks.append(
            "Nothing is connected to this report: ComfyUI decided when it ran, possibly before the sampler. Connect "
            "the sampler's LATENT or the decoder's IMAGE."
        )
    return sorted(earlier, key=lambda entry: entry.run.started) + shown, remarks


def clock_text(seconds: float) -> str:
    """``"20:41:03"``, local time."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
