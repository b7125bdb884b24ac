"""Chunked feed-forward modules of a ComfyUI model: attached while it is loaded; how each of them ran."""

from __future__ import annotations

import logging
from typing import Any

from ...pascal_attn_core.ffn.binding import FfnBinding
from ...pascal_attn_core.ffn.report import FfnReport
from ...pascal_attn_core.patching.hosts import CastingLayers, register
from ..comfy import host
from ..engine.runs import Run
from .injection import Injection, network_of

MIB = 1 << 20
SHARE = 32  # of the card's memory, for one feed-forward call
LEAST_MIB, MOST_MIB = 64, 1024
log = logging.getLogger("pascal_attn")
_CASTING_CODE = (
    "comfy.ops", "comfy.model_management", "comfy.memory_management", "comfy.pinned_memory", "comfy.quant_ops",
    "comfy_kitchen", "comfy_aimdo",
)  # fmt: skip
register(CastingLayers("comfy_cast_weights", _CASTING_CODE))


class Chunking(Injection):
    key, part = f"{host.KEY}_ffn", "feed-forward"
    binding: FfnBinding

    def begin(self, patcher: Any) -> None:
        self.binding.restart_report()

    def describe(self, run: Run, patcher: Any) -> None:
        report = self.binding.report(network_of(patcher))
        tell = run.gain if report.count("chunked") else run.note
        tell(_headline(report, self.binding.settings.min_tokens))
        for sentence in report.text().splitlines()[1:]:
            run.note(sentence.strip())
        for line in report.lines:
            if line.state == "refused" and run.warn(f"{line.kind} runs whole: {line.why}"):
                log.warning("pascal_attn: %s: %s (%s) runs whole: %s", self.subject, line.name, line.kind, line.why)


def _headline(report: FfnReport, min_tokens: int) -> str:
    chunked, able = report.count("chunked"), len(report.lines) - report.count("cannot be")
    text = f"{chunked} of {able} feed-forward modules chunked"
    words = {"whole": "fit the budget whole", "refused": "refused", "cannot be": "cannot be: fused blocks"}
    words["waiting"] = f"had no call of {min_tokens} tokens"
    others = (f"{report.count(state)} {what}" for state, what in words.items() if report.count(state))
    return ", ".join([text, *others])


def budget_from(total_bytes: int) -> int:
    """MiB for one feed-forward call on a card of this size."""
    return max(LEAST_MIB, min(MOST_MIB, total_bytes // SHARE // MIB))
