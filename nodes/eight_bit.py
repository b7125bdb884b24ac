"""Node: Pascal 8-Bit."""

from __future__ import annotations

from typing import Any

from .comfy import comfy_kitchen, inputs, others
from .patches import int8
from .patches.int8_attention import AUTO, CHOICES

# What the inputs do, as their tooltips say it.
_ATTENTION = (
    "Attention in 8 bits. auto: on devices that have the 8-bit kernel, in the layers in which it is faster. "
    "always: on a CPU too, where it is slow and for checks. off: attention is not touched."
)
_ATTENTION_LIMIT = (
    "Largest relative error allowed in an attention layer's output, measured on its own inputs. A layer above "
    "it stays exact. Typical errors are 0.001 to 0.013."
)
_LIMIT = (
    "Largest relative error allowed in a linear layer's output, measured on its own inputs. A layer above it "
    "stays in float. Typical errors are 0.01 to 0.02."
)
_INCLUDE = (
    "Only these layers, separated by commas: names of blocks or layers (double_blocks.3, img_mlp), or shell "
    "patterns for whole names (*.ff.*). Empty = the layers of the repeated blocks, without embeddings, norms "
    "and modulation."
)
_EXCLUDE = "Layers that stay in float, given in the same way. Empty = none."
_WEIGHTS = (
    "Where the float weights are kept while the model is loaded. host: they move to system memory, which frees "
    "memory on the card. keep: they stay on the card; loading is faster."
)
_FILES = (
    "For files whose layers are already in int8. auto: this package computes them on NVIDIA cards below "
    "compute capability 7.5, where ComfyUI has no kernel for them. always: this package computes them on every "
    "device. off: ComfyUI computes them."
)
_EARLIER = (
    "What to do if another node has patched attention before this one. auto: a patch that may change the result "
    "(sparse attention, masks, maps) runs first, and this node receives the calls that it passes on; one that only "
    "computes attention receives the calls that this node does not take."
)
_LINEAR = "Linear layers in 8 bits: the inputs below are about them."


class Pascal8Bit(inputs.PascalNode):
    """MODEL -> MODEL: attention and linear layers of the diffusion model in 8-bit integers, not exact."""

    DESCRIPTION = (
        "Not exact: the relative error is typically 0.1 to 1.3 % per attention layer and 1 % per linear layer; the "
        "first line of the report shows the errors measured on your model, and the seconds gained. Runs attention and "
        "the linear layers of the model's blocks in 8-bit integers, which GTX 10xx, P40 and later cards multiply up to "
        "four times as fast as float32. Each layer is measured on its own inputs, in the first steps and in later "
        "ones, and stays exact if its error is too large; attention also if 8 bits are slower. LoRAs stay in float. "
        "When bypassed, the model is exactly the original."
    )
    SEARCH_ALIASES = inputs.aliases(
        "8-bit attention, sage attention, sageattention, int8, int8 linear, quantize, quantization, dp4a, speed, "
        "faster, low vram, w8a8, pascal, gtx 1080, p40"
    )
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The model with attention and linear layers in 8 bits. Connect it to the sampler.",
        "Which layers will run in 8 bits, and which stay in float and why. What a run did, with each layer's error, "
        "time and memory, is in Pascal Attention Report.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        more = inputs.ADVANCED
        error = {"min": 0.0, "max": 1.0, "step": 0.001}
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch. A clone is patched; the original is not changed."}),
                "attention": (list(CHOICES), {"default": AUTO, "tooltip": _ATTENTION}),
                "attention_max_error": ("FLOAT", {"default": 0.02, "tooltip": _ATTENTION_LIMIT, **error}),
                "linear_layers": ("BOOLEAN", {"default": True, "tooltip": _LINEAR}),
                "max_error": ("FLOAT", {"default": 0.05, "tooltip": _LIMIT, **error}),
                "include": ("STRING", {"default": "", "tooltip": _INCLUDE, **more}),
                "exclude": ("STRING", {"default": "", "tooltip": _EXCLUDE, **more}),
                "weights": (["host", "keep"], {"default": "host", "tooltip": _WEIGHTS, **more}),
                "int8_files": (list(comfy_kitchen.CHOICES), {"default": "auto", "tooltip": _FILES, **more}),
            },
            "optional": {"earlier_patch": (others.CHOICES, {"default": others.AUTO, "tooltip": _EARLIER, **more})},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(self, model: Any, unique_id: str | None = None, **wanted: Any) -> tuple[Any, str]:
        return int8.patch(model, int8.Int8Settings(**wanted), unique_id)


_INPUTS = Pascal8Bit.INPUT_TYPES()["required"].items()
DEFAULTS = int8.Int8Settings(**{name: options["default"] for name, (_, options) in _INPUTS if "default" in options})
