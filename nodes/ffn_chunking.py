"""Node: Pascal FFN Chunking."""

from __future__ import annotations

import logging
from typing import Any

from ..pascal_attn_core.ffn.binding import FfnBinding
from ..pascal_attn_core.ffn.report import FfnReport
from ..pascal_attn_core.machine.device import MIB
from ..pascal_attn_core.patching.hosts import register
from ..pascal_attn_core.patching.patch import OFF, ON, REFUSED, UNABLE, WAITING
from .comfy import host, inputs
from .engine.runs import Run
from .patches.injection import Injection, install, network_of

LEAST_TOKENS = 1024
SHARE = 32  # of the card's memory, for one feed-forward call
LEAST_MIB, MOST_MIB = 64, 1024
log = logging.getLogger("pascal_attn")
_CASTING_CODE = (
    "comfy.ops", "comfy.model_management", "comfy.memory_management", "comfy.pinned_memory", "comfy.quant_ops",
    "comfy_kitchen", "comfy_aimdo",
)  # fmt: skip
register("comfy_cast_weights", _CASTING_CODE)


class PascalFFNChunking(inputs.PascalNode):
    """MODEL -> MODEL: the feed-forward layers over a part of the tokens at a time."""

    DESCRIPTION = (
        "Runs the model's feed-forward layers on a chunk of the tokens at a time, so that their wide intermediate "
        "tensors (at least four times as wide as the tokens) never exist for all tokens at once. The result is the "
        "same: only operators that are known to treat every token independently are chunked, and a layer with any "
        "other runs unchunked. For out-of-memory errors while sampling large images and long videos. Works with LoRAs; "
        "the model's weights and their names stay as they are. When bypassed, the model is exactly the original."
    )
    SEARCH_ALIASES = ("chunk feed forward", "ffn", "mlp", "out of memory", "low vram", "video", "wan", "flux", "pascal")
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The model with its feed-forward layers chunked. Connect it to the sampler.",
        "Which layers may be chunked, and which cannot be and why. What a run did is shown on the "
        "node, in the log and in Pascal Attention Report.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        budget = (
            "Largest extra memory of one feed-forward call in MiB, besides its input and output. The smallest number "
            f"of chunks that stays within the budget is used; a call that fits runs unchunked. 0 = 1/{SHARE} of "
            f"the card's memory, clamped to {LEAST_MIB}-{MOST_MIB} MiB."
        )
        tokens = (
            "Calls with fewer tokens run unchunked. A 1024 x 1024 image has 4096 tokens in most models. Each chunk "
            "reads the layer's weights again, which takes time when they are offloaded."
        )
        more = inputs.ADVANCED
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch. A clone is patched; the original is not changed."}),
                "budget_mib": ("INT", {"default": 0, "min": 0, "max": 65536, "step": 1, "tooltip": budget, **more}),
                "min_tokens": ("INT", {"default": LEAST_TOKENS, "min": 2, "max": 1048576, "tooltip": tokens, **more}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(self, model: Any, budget_mib: int, min_tokens: int, unique_id: str | None = None) -> tuple[Any, str]:
        """A clone of ``model`` with chunked feed-forward layers, and what can be said of each before a run."""
        patched = model.clone()
        report, line = chunk(patched, budget_mib, min_tokens, unique_id)
        host.say(line, unique_id)
        return patched, report.text()


class Chunking(Injection):
    """The feed-forward modules of one node, chunked while their model is loaded."""

    key, part = f"{host.KEY}_ffn", "feed-forward"
    binding: FfnBinding

    def begin(self, patcher: Any) -> None:
        self.binding.restart_report()

    def describe(self, run: Run, patcher: Any) -> None:
        report = self.binding.report(network_of(patcher))
        tell = run.gain if report.count(ON) else run.note
        tell(_headline(report, self.binding.settings.min_tokens))
        for sentence in report.text().splitlines()[1:]:
            run.note(sentence.strip())
        for line in report.lines:
            if line.state == REFUSED and run.warn(f"{line.kind} runs whole: {line.why}"):
                log.warning("pascal_attn: %s: %s (%s) runs whole: %s", self.subject, line.name, line.kind, line.why)


def _headline(report: FfnReport, min_tokens: int) -> str:
    chunked, able = report.count(ON), len(report.lines) - report.count(UNABLE)
    text = f"{chunked} of {able} feed-forward modules chunked"
    words = {OFF: "fit the budget whole", REFUSED: "refused", UNABLE: "cannot be: fused blocks"}
    words[WAITING] = f"had no call of {min_tokens} tokens"
    others = (f"{report.count(state)} {what}" for state, what in words.items() if report.count(state))
    return ", ".join([text, *others])


def budget_from(total_bytes: int) -> int:
    """MiB for one feed-forward call on a card of this size."""
    return max(LEAST_MIB, min(MOST_MIB, total_bytes // SHARE // MIB))


def chunk(
    patched: Any, budget_mib: int, min_tokens: int, unique_id: str | None, *, is_quiet: bool = False
) -> tuple[FfnReport, str]:
    """Let the feed-forward layers of a fresh clone run in chunks. Returns what can be said of each before a run, and
    a sentence about all."""
    budget = budget_mib or budget_from(host.free_and_total_bytes(patched.load_device)[1])
    binding = FfnBinding(budget_mib=budget, min_tokens=min_tokens)
    settings = f"budget {budget} MiB, from {min_tokens} tokens"
    chunking = Chunking(binding, host.name_of_model(patched.model), settings, unique_id)
    chunking.is_quiet = is_quiet
    install(patched, chunking)
    report = binding.report(network_of(patched))
    return report, status(report, chunking.subject, settings)


def status(report: FfnReport, subject: str, settings: str) -> str:
    """``"38 feed-forward modules of Flux, budget 344 MiB, from 1024 tokens; 38 cannot be chunked (...)"``."""
    able = len(report.lines) - report.count(UNABLE)
    text = f"{able} feed-forward modules of {subject}, {settings}"
    kinds = {line.kind for line in report.lines if line.state == UNABLE}
    if kinds:
        text += f"; {report.count(UNABLE)} cannot be chunked ({', '.join(sorted(kinds))})"
    return text if able else f"0 feed-forward modules of {subject} can be chunked{text.partition(settings)[2]}"
