"""Node: Pascal Attention Report."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from ..pascal_attn_core.machine.facts import complaints, look_around
from ..pascal_attn_core.selftest import Selftest, describe
from ..pascal_attn_core.selftest import check as run_selftest
from .comfy import host, inputs
from .comfy.inputs import ANY
from .engine import runs
from .reporting.exactness import check
from .reporting.findings import Findings, choose_runs
from .reporting.picture import as_image, save_preview
from .reporting.text import draw_report, report_text

log = logging.getLogger("pascal_attn")
_SELFTEST_SECONDS = 30.0


class PascalAttentionReport(inputs.PascalNode):
    """Anything -> the same: what attention did in the runs before it, as picture and text."""

    DESCRIPTION = (
        "The first line shows what was gained, in MiB and seconds, or why nothing was. Below it: calls taken and calls "
        "passed to ComfyUI per block and why, routes, time, memory, warnings, and an exactness check against float64. "
        "Put it after the sampler (LATENT) or the decoder (IMAGE). It changes nothing."
    )
    SEARCH_ALIASES = ("attention statistics", "bug report", "diagnose", "memory chart", "exactness", "pascal", "slow")
    RETURN_TYPES = (ANY, "IMAGE", "STRING")
    RETURN_NAMES = ("value", "chart", "report")
    OUTPUT_TOOLTIPS = (
        "The input, unchanged.",
        "The report without its calls by kind as an image, 1600 pixels wide.",
        "The report as text, with a block at its end to paste into a bug report.",
    )
    FUNCTION = "report"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        value = "The sampler's LATENT, the decoder's IMAGE, or anything else that is produced at the end of the run."
        exactness = (
            "Compares up to 64 rows of each run's largest call with float64, and shows the error next to that of plain "
            "attention. Takes milliseconds."
        )
        selftest = (
            "Also checks every route and kernel on this card against float64, for at most half a minute, and adds the "
            "result to the text. pascal-attn selftest on the command line also times the routes."
        )
        return {
            "required": {"exactness_check": ("BOOLEAN", {"default": True, "tooltip": exactness})},
            "optional": {
                "value": (ANY, {"tooltip": value}),
                "selftest": ("BOOLEAN", {"default": False, "tooltip": selftest, **inputs.ADVANCED}),
            },
            "hidden": {"unique_id": "UNIQUE_ID", "prompt": "PROMPT"},
        }

    @classmethod
    def IS_CHANGED(cls, **given: Any) -> float | str:
        """It runs again when what it is connected to does; unconnected, in each prompt."""
        return "" if "value" in given else float("nan")

    def report(
        self,
        exactness_check: bool = True,
        value: Any = None,
        unique_id: str | None = None,
        prompt: dict[str, Any] | None = None,
        selftest: bool = False,
    ) -> dict[str, Any]:
        """``value`` as it came, the chart ``[1, height, width, 3]`` and the text."""
        findings = gather(prompt or {}, unique_id, exactness_check=exactness_check)
        tested = _selftest(unique_id) if selftest else None
        if tested is not None and not tested.is_right:
            findings.alarms.insert(0, tested.verdict)
        text = report_text(findings, describe(tested) if tested else "")
        image = as_image(draw_report(findings))
        if tested:
            host.send_status(f"self-test: {tested.verdict}", unique_id)
        return {"ui": {"text": [text], "images": save_preview(image)}, "result": (value, image, text)}


def gather(prompt: dict[str, Any], unique_id: str | None, *, exactness_check: bool) -> Findings:
    machine = look_around(asks_devices=False)
    shown, remarks = choose_runs(runs.remembered(), prompt, host.prompt_id(), unique_id)
    for entry in shown if exactness_check else ():
        check(entry.run)
    alarms = complaints(machine) + [text for entry in shown for text in entry.said(entry.alarms)]
    for alarm in alarms:
        log.warning("pascal_attn: report: %s", alarm)
    alarms += [text for entry in shown for text in entry.said(entry.run.warnings)]
    return Findings(machine, shown, alarms, remarks, host.versions())


def _selftest(unique_id: str | None) -> Selftest:
    """Every route and kernel on the device that ComfyUI computes on; the user's Cancel ends it."""
    end = time.monotonic() + _SELFTEST_SECONDS

    def left(_: str) -> float:
        host.throw_if_interrupted()
        return end - time.monotonic()

    with torch.inference_mode(False), torch.no_grad():
        return run_selftest(host.compute_device(), left, lambda text: host.send_status(f"self-test: {text}", unique_id))
