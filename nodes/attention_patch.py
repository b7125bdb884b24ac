"""Node: Pascal Attention Patch."""

from __future__ import annotations

from typing import Any

from torch import nn

from .comfy import host, inputs, others
from .comfy.others import AUTO, name_of, runs_first
from .comfy.prompt import without_effect
from .engine.engine import Engine, PatchSettings, left_off
from .patches.attention import install
from .patches.override import OVERRIDE, previous_of

OVERRIDE_ONLY, WHOLE_MODEL = "attention override", "whole model"


class PascalAttentionPatch:
    """MODEL -> MODEL: every attention call of the diffusion model by the fastest exact route of this card."""

    DESCRIPTION = (
        "Computes the model's attention exactly, without ever storing the whole score matrix: on GTX 9xx/10xx, P40, "
        "P100, V100, Vega, MI50 and RX 5000/6000 cards it saves memory where ComfyUI or PyTorch would fall back to a "
        "method that does. It picks the fastest route for each call and reports which one and why. Works with images "
        "and video, UNets and transformers, LoRAs and other attention patches. When bypassed, the model is exactly the "
        "original."
    )
    CATEGORY = "model/patch/attention"
    SEARCH_ALIASES = (
        "flash attention",
        "sdpa",
        "low vram",
        "out of memory",
        "pascal",
        "gtx 1080",
        "p40",
        "mi50",
        "radeon",
        "rocm",
        "black image",
    )
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with its attention patched. Connect it to the sampler.",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        tile = (
            "Keys per tile of the tiled route. 0 = derived from the card's L2 cache. Accepts the output of Pascal Tile "
            "Size."
        )
        keys = (
            "Calls with fewer keys are passed to ComfyUI, which is fast at them, unless their score matrix would "
            "exceed the memory budget. 0 = take every call."
        )
        coverage = (
            "auto, whole model: every attention call, both the calls that ComfyUI offers to patches and those that "
            "some models make without it. attention override: only the calls that ComfyUI offers to patches, for "
            "comparison."
        )
        earlier = (
            "What to do if another node has patched attention before this one. auto: a patch that only computes "
            "attention (Sage, flash, ComfyUI's backend node) is replaced, and receives the calls that this node does "
            "not take; a patch that may change the result (sparse attention, masks, maps) runs first, and this node "
            "receives the calls it passes on."
        )
        more = inputs.ADVANCED
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch. A clone is patched; the original is not changed."}),
                "route": inputs.route(),
                "budget_mib": inputs.budget_mib(),
                "tile_size": ("INT", {"default": 0, "min": 0, "max": 65536, "step": 1, "tooltip": tile, **more}),
                "coverage": ([AUTO, OVERRIDE_ONLY, WHOLE_MODEL], {"default": AUTO, "tooltip": coverage, **more}),
                "min_keys": ("INT", {"default": 1024, "min": 0, "max": 1048576, "step": 1, "tooltip": keys, **more}),
                "nan_guard": inputs.nan_guard(),
            },
            "optional": {"earlier_patch": (others.CHOICES, {"default": AUTO, "tooltip": earlier, **more})},
            "hidden": {"unique_id": "UNIQUE_ID", "prompt": "PROMPT"},
        }

    def patch(
        self,
        model: Any,
        route: str,
        budget_mib: int,
        tile_size: int,
        coverage: str,
        min_keys: int,
        nan_guard: bool,
        earlier_patch: str = AUTO,
        unique_id: str | None = None,
        prompt: dict[str, Any] | None = None,
    ) -> tuple[Any]:
        """A clone of ``model`` with our override in front of the one it had, or behind it."""
        settings = PatchSettings(inputs.config(route, budget_mib, tile_size), min_keys, nan_guard)
        patched = model.clone()
        diffusion_model = patched.get_model_object("diffusion_model")
        engine = Engine(settings, host.name_of_model(patched.model), "diffusion model", unique_id)
        before = previous_of(patched.model_options.get("transformer_options", {}).get(OVERRIDE))
        behind = runs_first(before, earlier_patch)
        install(patched, engine, before, whole_model=coverage != OVERRIDE_ONLY, behind=behind)
        blocks = count_blocks(diffusion_model)
        line = f"{blocks} blocks of {engine.subject}, {engine.describe()}{left_off(settings.config)}"
        if before is not None:
            line += f"; {name_of(before)} {'runs before this node' if behind else 'is replaced'}"
        unused = without_effect(prompt or {}, str(unique_id))
        if unused:
            line += f"; WITHOUT EFFECT: {unused}"
        host.say(line, unique_id)
        return (patched,)


def count_blocks(model: nn.Module) -> int:
    """Number of entries of the model's lists of blocks that hold attention."""
    names = [name for name, module in model.named_modules() if _is_attention(module)]
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = set()
    for name in names:
        parents = [entry for entry in lists if name.startswith(f"{entry}.")]
        if parents:
            outer = min(parents, key=len)
            blocks.add((outer, name[len(outer) + 1 :].partition(".")[0]))
        else:
            blocks.add((name, ""))
    return len(blocks)


_PROJECTIONS = ({"to_q", "to_k"}, {"q", "k"}, {"qkv"}, {"to_qkv"}, {"q_proj", "k_proj"}, {"wq", "wk"}, {"linear1"})


def _is_attention(module: nn.Module) -> bool:
    children = {name for name, _ in module.named_children()}
    kind = type(module).__name__
    return any(names <= children for names in _PROJECTIONS) or kind.endswith(("Attention", "AttentionBlock"))
