"""The runs that a report is about, and its remarks where there is none."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ...pascal_attn_core.machine.facts import Machine
from ..comfy.prompt import Prompt, kind_of, links, reached, without_effect
from ..engine.runs import Run
from .rows import together
from .words import title_of

#: nodes whose runs are reported: their titles, and the part of their runs (two workflows may number nodes alike)
PATCHES = {
    "PascalAttentionPatch": ("Pascal Attention Patch", "diffusion model"),
    "PascalVAEAttention": ("Pascal VAE Attention", "VAE"),
    "PascalTextEncoderAttention": ("Pascal Text Encoder Attention", "text encoder"),
    "PascalFFNChunking": ("Pascal FFN Chunking", "feed-forward"),
    "Pascal8Bit": ("Pascal 8-Bit", "int8"),
    "PascalInt8Linear": ("Pascal Int8 Linear", "int8"),
}


@dataclass(frozen=True, eq=False)
class Shown:
    """One run in a report, or several of one node together: a remark ("" = of this prompt, and complete), and how many
    runs there were."""

    run: Run
    remark: str = ""
    times: int = 1

    @property
    def title(self) -> str:
        """``"Flux, diffusion model"``, ``"SD1ClipModel, text encoder, 2 runs"``."""
        return title_of(self.run) + (f", {self.times} runs" if self.times > 1 else "")


def merged(shown: list[Shown]) -> list[Shown]:
    """Runs of one node with one model as one: positive and negative prompt, the tiles of an upscaler."""
    groups: dict[tuple, list[Shown]] = {}
    for entry in shown:
        run = entry.run
        key = (run.unique_id or id(run), run.subject, run.part, run.settings, run.device, entry.remark)
        groups.setdefault(key, []).append(entry)
    found = []
    for group in groups.values():
        whole = group[0].run if len(group) == 1 else together([entry.run for entry in group])
        checks = [entry.run.exactness for entry in group if entry.run.exactness is not None]
        whole.exactness = max(checks, key=lambda check: (not check.is_exact, check.kind.math_bytes), default=None)
        found.append(Shown(whole, group[0].remark, len(group)))
    return found


@dataclass(eq=False)
class Findings:
    """Everything that a report says; text and picture are made of this alone.

    Attributes:
        shown: the runs, oldest first.
        alarms: sentences for the top, in red.
        remarks: sentences below them: what is missing and why.
        machine: the facts of the computer.
        host: of ComfyUI, by name: ``{"ComfyUI": "0.33.0", "attention": "attention_pytorch"}``.
        memory: bytes of all memory by device, ``{"cuda:0": 11811160064}``.
        when: seconds since the epoch.
    """

    machine: Machine
    shown: list[Shown] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    host: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    when: float = field(default_factory=time.time)


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
    remarks = []
    patches = {node: kind_of(prompt, node) for node in prompt if kind_of(prompt, node) in PATCHES}
    seen = {entry.run.unique_id for entry in shown}
    earlier = []
    for node, kind in patches.items():
        if node in seen:
            continue
        title, part = PATCHES[kind]
        why = _without_effect(prompt, node, report_id)
        if not why:
            own = (run for run in reversed(known) if (run.unique_id, run.part) == (node, part))
            last = next((run for run in own if run.prompt_id != prompt_id), None)
            if last is not None:
                earlier.append(Shown(last, f"of an earlier prompt, at {clock_text(last.started)}"))
            why = _why_absent(prompt, node, report_id, last)
        remarks.append(f"{title} (node {node}) {why}")
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


_UNFINISHED = "not finished: the figures cover the run so far"


def clock_text(seconds: float) -> str:
    """``"20:41:03"``, local time."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _without_effect(prompt: Prompt, node: str, report_id: str | None) -> str:
    """Why nothing can have run with what ``node`` patches before this report, whatever is in ComfyUI's cache."""
    why = without_effect(prompt, node)
    if why:
        return f"has no effect: {why}."
    value = links(prompt, str(report_id)).get("value")
    if value is not None and node in reached(prompt, value, lambda kind: kind in PATCHES):
        return (
            "has not run yet: nothing between it and this report computes anything. Connect the sampler's LATENT or "
            "the decoder's IMAGE to the report."
        )
    return ""


def _why_absent(prompt: Prompt, node: str, report_id: str | None, last: Run | None) -> str:
    known = "" if last is None else " Its most recent earlier run is shown."
    if not any(node in links(prompt, other).values() for other in prompt):
        return f"did nothing: its output is not connected.{known}"
    if report_id is not None and node in reached(prompt, report_id):
        known = known or " It has no earlier run on record."
        return f"had nothing to do in this prompt: ComfyUI used the results in its cache.{known}"
    return (
        "has not run yet: this report is not connected after what the node patches, or ComfyUI used the results in "
        f"its cache.{known}"
    )
