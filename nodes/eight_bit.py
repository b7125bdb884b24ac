"""Node: Pascal 8-Bit."""

from __future__ import annotations

from typing import Any

from .comfy import inputs
from .int8_linear import PascalInt8Linear
from .patches import int8
from .patches.int8_attention import AUTO, CHOICES


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
    SEARCH_ALIASES = ("8-bit attention", "sage attention", "sageattention", *PascalInt8Linear.SEARCH_ALIASES, "p40")
    RETURN_TYPES = PascalInt8Linear.RETURN_TYPES
    RETURN_NAMES = PascalInt8Linear.RETURN_NAMES
    OUTPUT_TOOLTIPS = (
        "The model with attention and linear layers in 8 bits. Connect it to the sampler.",
        PascalInt8Linear.OUTPUT_TOOLTIPS[1],
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        attention = (
            "Attention in 8 bits. auto: on devices that have the 8-bit kernel, in the layers in which it is faster. "
            "always: on a CPU too, where it is slow and for checks. off: attention is not touched."
        )
        limit = (
            "Largest relative error allowed in an attention layer's output, measured on its own inputs. A layer above "
            "it stays exact. Typical errors are 0.001 to 0.013."
        )
        linear = "Linear layers in 8 bits: the inputs below are about them."
        older = PascalInt8Linear.INPUT_TYPES()["required"]
        return {
            "required": {
                "model": older.pop("model"),
                "attention": (list(CHOICES), {"default": AUTO, "tooltip": attention}),
                "attention_max_error": (
                    "FLOAT",
                    {"default": 0.02, "min": 0.0, "max": 1.0, "step": 0.001, "tooltip": limit},
                ),
                "linear_layers": ("BOOLEAN", {"default": True, "tooltip": linear}),
                **older,
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(
        self,
        model: Any,
        attention: str,
        attention_max_error: float,
        linear_layers: bool,
        unique_id: str | None = None,
        **of_linear_layers: Any,
    ) -> tuple[Any, str]:
        of_attention: dict[str, Any] = {"attention": attention, "attention_max_error": attention_max_error}
        return int8.patch(model, _settings(linear_layers, **of_linear_layers, **of_attention), unique_id)


def _settings(linear_layers: bool, **others: Any) -> int8.Int8Settings:
    return int8.Int8Settings(**others, linear=linear_layers)


_INPUTS = Pascal8Bit.INPUT_TYPES()["required"].items()
DEFAULTS = _settings(**{name: options["default"] for name, (_, options) in _INPUTS if "default" in options})
