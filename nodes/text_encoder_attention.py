"""Node: Pascal Text Encoder Attention."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from .comfy import host, inputs
from .comfy.objects import is_innermost, replace_functions
from .engine.engine import Engine, PatchSettings, left_off
from .engine.meter import not_finite
from .patches.replacements import Sites, located, whole_call


class PascalTextEncoderAttention(inputs.PascalNode):
    """CLIP -> CLIP: attention of the text encoder by the fastest exact route of this device."""

    DESCRIPTION = (
        "Computes the text encoder's attention exactly, without ever storing the whole score matrix: CLIP, T5 and "
        "language models (Llama, Gemma, Qwen and others), with their masks. For out-of-memory errors while encoding a "
        "long prompt, or a prompt with images, on cards for which ComfyUI has no PyTorch attention. LoRAs and clip "
        "skip work before and after it. When bypassed, the text encoder is exactly the original."
    )
    SEARCH_ALIASES = ("clip", "t5", "prompt", "text encode", "out of memory", "nan", "low vram", "pascal", "p40")
    RETURN_TYPES = ("CLIP",)
    OUTPUT_TOOLTIPS = ("The text encoder with its attention patched. Connect it to CLIP Text Encode.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        clip = "The text encoder to patch. A clone is patched; the original is not changed."
        return {
            "required": {
                "clip": ("CLIP", {"tooltip": clip}),
                "route": inputs.route(),
                "budget_mib": inputs.budget_mib(),
                "nan_guard": inputs.nan_guard(),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(
        self, clip: Any, route: str, budget_mib: int, nan_guard: bool, unique_id: str | None = None
    ) -> tuple[Any]:
        """A clone of ``clip`` whose attention is ours; ``clip`` itself where none was found."""
        settings = PatchSettings(inputs.config(route, budget_mib), min_keys=0, nan_guard=nan_guard)
        patched, line = patched_clip(clip, settings, unique_id)
        host.say("; ".join(filter(None, [left_off(settings.config), line])), unique_id)
        return (patched,)


def patched_clip(clip: Any, settings: PatchSettings, unique_id: str | None) -> tuple[Any, str]:
    """A clone of ``clip`` whose attention is ours, and a sentence about it; ``clip`` itself where none was found."""
    model = getattr(clip, "cond_stage_model", None)
    if not isinstance(model, nn.Module) or not hasattr(getattr(clip, "patcher", None), "add_object_patch"):
        raise TypeError(f"clip must be a CLIP of ComfyUI, got {type(clip).__name__}; use a Load CLIP node of ComfyUI")
    engine = Engine(settings, type(model).__name__, "text encoder", unique_id)
    sites = _sites(engine, model)
    if sites.blocks:
        clip = clip.clone()
        replace_functions(clip.patcher, lambda model: _sites(engine, model).replacements)
    return clip, sites.status("text encoder")


def _sites(engine: Engine, model: nn.Module) -> Sites:
    def watch(args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if engine.run.count() == 0:
            engine.run.note("this model computes attention itself, not by a function of ComfyUI's or PyTorch's")
        encoded = result if isinstance(result, (tuple, list)) else (result,)
        if engine.settings.nan_guard and not_finite(value for value in encoded if isinstance(value, Tensor)):
            engine.warn("the encoded text holds NaN or infinity: start ComfyUI with --fp32-text-enc")

    sites = Sites(engine, model, lambda module: [("forward", located)] if is_innermost(module) else [])
    sites.replacements["encode_token_weights"] = functools.partial(whole_call, sites=sites, watch=watch)
    return sites
