"""Node: Pascal Text Encoder Attention."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from .comfy import host, inputs
from .comfy.objects import Make, Replacements, replace_functions
from .comfy.sites import argument_leaves, calls_directly, has_softcap, host_names
from .engine.engine import Engine, PatchSettings
from .engine.watch import not_finite
from .patches.replacements import Replacement, status, warn_if_replaced, whole_call
from .patches.scope import Scope

_WHOLE = ("encode_token_weights", "generate")


class PascalTextEncoderAttention:
    """CLIP -> CLIP: attention of the text encoder by the fastest exact route of this device."""

    DESCRIPTION = (
        "Computes the text encoder's attention exactly, without ever storing the whole score matrix: CLIP, T5 and "
        "language models (Llama, Gemma, Qwen and others), with their masks. For out-of-memory errors while encoding a "
        "long prompt, or a prompt with images, on cards for which ComfyUI has no PyTorch attention. LoRAs and clip "
        "skip work before and after it. When bypassed, the text encoder is exactly the original."
    )
    CATEGORY = "model/patch/attention"
    SEARCH_ALIASES = ("clip", "t5", "prompt", "text encode", "out of memory", "nan", "low vram", "pascal", "p40")
    RETURN_TYPES = ("CLIP",)
    OUTPUT_TOOLTIPS = ("The text encoder with its attention patched. Connect it to CLIP Text Encode.",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
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
        model = getattr(clip, "cond_stage_model", None)
        if not isinstance(model, nn.Module) or not hasattr(getattr(clip, "patcher", None), "add_object_patch"):
            raise TypeError(
                f"clip must be a CLIP of ComfyUI, got {type(clip).__name__}; use a Load CLIP node of ComfyUI"
            )
        settings = PatchSettings(inputs.config(route, budget_mib), min_keys=0, nan_guard=nan_guard, min_queries=2)
        engine = Engine(settings, type(model).__name__, "text encoder", unique_id)
        sites = _Sites(engine, model)
        host.say(status(engine, len(sites.blocks) + len(sites.direct), "text encoder"), unique_id)
        if not sites.blocks and not sites.direct:
            return (clip,)
        patched = clip.clone()
        replace_functions(patched.patcher, lambda model: _Sites(engine, model).replacements)
        return (patched,)


class _Sites:
    """Where a text encoder computes attention, and what replaces it; the attributes are those of a VAE's sites."""

    def __init__(self, engine: Engine, model: nn.Module):
        scope = Scope()
        leaves = {name: position for name, _, position in argument_leaves(model)}
        outside = set(calls_directly(model, leaves))
        found: Replacements = {}
        for name, module in model.named_modules():
            ours = Replacement(engine, scope, name)
            if name in outside and host_names(type(module)):
                found[_forward(name)] = ours.named
            elif has_softcap(module):
                found[_forward(name)] = ours.softcapped
            elif name in leaves:
                found[_forward(name)] = functools.partial(ours.given, leaves[name])
        self.blocks = sorted(name.rpartition(".")[0] for name in found)
        self.direct = calls_directly(model, self.blocks)
        catches = bool(self.direct)  # only then: Python is asked about every torch function below
        whole = {n: _whole(engine, scope, model, list(found), catches) for n in _WHOLE if hasattr(model, n)}
        self.replacements = {**found, **whole}


def _forward(name: str) -> str:
    return f"{name}.forward".lstrip(".")


def _whole(engine: Engine, scope: Scope, model: nn.Module, names: list[str], catches: bool) -> Make:
    def watch(args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        warn_if_replaced(engine, model, names)
        encoded = result if isinstance(result, (tuple, list)) else (result,)
        if engine.settings.nan_guard and not_finite(value for value in encoded if isinstance(value, Tensor)):
            engine.warn("the encoded text holds NaN or infinity: start ComfyUI with --fp32-text-enc")

    return functools.partial(whole_call, engine=engine, scope=scope, watch=watch, catches=catches)
