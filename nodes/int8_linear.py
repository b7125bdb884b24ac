"""Node: Pascal Int8 Linear, the older one of Pascal 8-Bit."""

from __future__ import annotations

from typing import Any

from .comfy import comfy_kitchen, inputs
from .patches import int8


class PascalInt8Linear(inputs.PascalNode):
    """MODEL -> MODEL: the linear layers of the diffusion model in 8-bit integers."""

    DEPRECATED = True
    DESCRIPTION = (
        "The older form of Pascal 8-Bit, which runs attention in 8 bits as well. Not exact: the relative error per "
        "linear layer is typically about 1 %, and the report shows the errors measured on your model. When bypassed, "
        "the model is exactly the original."
    )
    SEARCH_ALIASES = inputs.aliases(
        "int8, quantize, quantization, dp4a, speed, faster, low vram, w8a8, pascal, gtx 1080"
    )
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The model with its linear layers in 8 bits. Connect it to the sampler.",
        "Which layers will run in 8 bits, and which stay in float and why. What a run did, with each layer's error, "
        "time and memory, is in Pascal Attention Report.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        limit = (
            "Largest relative error allowed in a layer's output, measured on its own inputs. A layer above it stays in "
            "float. Typical errors are 0.01 to 0.02."
        )
        include = (
            "Only these layers, separated by commas: names of blocks or layers (double_blocks.3, img_mlp), or shell "
            "patterns for whole names (*.ff.*). Empty = the layers of the repeated blocks, without embeddings, norms "
            "and modulation."
        )
        exclude = "Layers that stay in float, given in the same way. Empty = none."
        weights = (
            "Where the float weights are kept while the model is loaded. host: they move to system memory, which frees "
            "memory on the card. keep: they stay on the card; loading is faster."
        )
        files = (
            "For files whose layers are already in int8. auto: this package computes them on NVIDIA cards below "
            "compute capability 7.5, where ComfyUI has no kernel for them. always: this package computes them on every "
            "device. off: ComfyUI computes them."
        )
        more = inputs.ADVANCED
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch. A clone is patched; the original is not changed."}),
                "max_error": ("FLOAT", {"default": 0.05, "min": 0.0, "max": 1.0, "step": 0.001, "tooltip": limit}),
                "include": ("STRING", {"default": "", "tooltip": include, **more}),
                "exclude": ("STRING", {"default": "", "tooltip": exclude, **more}),
                "weights": (["host", "keep"], {"default": "host", "tooltip": weights, **more}),
                "int8_files": (list(comfy_kitchen.CHOICES), {"default": "auto", "tooltip": files, **more}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(
        self,
        model: Any,
        max_error: float,
        include: str,
        exclude: str,
        weights: str,
        int8_files: str = "auto",
        unique_id: str | None = None,
    ) -> tuple[Any, str]:
        return int8.patch(model, int8.Int8Settings(max_error, include, exclude, weights, int8_files), unique_id)
