"""Node: Pascal Second Card."""

from __future__ import annotations

from typing import Any

from ..pascal_attn_core.machine.device import device_info
from .comfy import host, inputs
from .comfy.by_name import OVERRIDE
from .comfy.others import AUTO
from .engine.engine import Engine, PatchSettings
from .patches.attention import install
from .patches.override import engine_of


class PascalSecondCard(inputs.PascalNode):
    """MODEL -> MODEL: a second card computes some of the attention heads of every large call."""

    DESCRIPTION = (
        "Another card in the same computer computes a share of the attention: some heads of each large call are copied "
        "to it and the results copied back while the first card computes the rest. The model stays where it is: the "
        "second card needs memory for those heads only. It may be slower than the first: its share is found by timing. "
        "For large images and videos, at any cfg. With two cards of the same kind the result is bit for bit that of "
        "one where query, key and value are dense in memory; otherwise it is exact within rounding. With one card, or "
        "when the second one fails, everything is computed on the first."
    )
    SEARCH_ALIASES = inputs.aliases(
        "multi gpu, multigpu, two cards, second gpu, sequence parallel, pascal, p40, faster"
    )
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with its attention shared by two cards. Connect it to the sampler.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        model = (
            "The model to patch. A clone is patched; the original is not changed. Works before or after Pascal "
            "Attention Patch."
        )
        device = (
            "The card that helps, by PyTorch's numbering. auto: the first one that does not hold the model. Start "
            "ComfyUI without --cuda-device, which hides the other cards."
        )
        least = (
            "Calls with fewer tokens stay on the first card: copying them takes as long as computing them. A 1024 x "
            "1024 image has 4096 tokens in most models."
        )
        number = {"default": 2048, "min": 1, "max": 1048576, "step": 1, "tooltip": least, **inputs.ADVANCED}
        return {
            "required": {
                "model": ("MODEL", {"tooltip": model}),
                "device": ([AUTO, *host.visible_cards()], {"default": AUTO, "tooltip": device}),
                "least_tokens": ("INT", number),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, device: str) -> bool:
        """Every name is valid: a workflow made on a machine with more cards runs here too, without them."""
        return True

    def patch(
        self, model: Any, device: str = AUTO, least_tokens: int = 2048, unique_id: str | None = None
    ) -> tuple[Any]:
        """A clone of ``model`` whose attention is shared out, by Pascal Attention Patch's engine: that of the patch
        which the model has, or one with the patch's defaults. The model itself where there is no second card."""
        home = str(model.load_device)
        other, why = _other_card(home, device)
        if not other:
            host.say(f"second card: {why}: the model is returned unchanged", unique_id)
            return (model,)
        patched = model.clone()
        host.share_over(patched, (home, other), least_tokens)
        if engine_of(patched.model_options["transformer_options"].get(OVERRIDE)) is None:
            engine = Engine(PatchSettings(), host.name_of_model(patched.model), "diffusion model", unique_id)
            install(patched, engine, AUTO, whole_model=True)
        name = device_info(other).name
        host.say(f"second card: {other} ({name}) helps {home} in calls of at least {least_tokens} tokens", unique_id)
        return (patched,)


def _other_card(home: str, wanted: str) -> tuple[str, str]:
    """(the card that helps, ""), or ("", why there is none)."""
    cards = host.visible_cards()
    others = [card for card in cards if card != home]
    if home not in cards:
        return "", f"the model is on {home}, not on a card"
    if not others:
        return "", "there is only one card (ComfyUI's --cuda-device and CUDA_VISIBLE_DEVICES hide others)"
    if wanted == AUTO:
        return others[0], ""
    if wanted == home:
        return "", f"{wanted} holds the model itself; choose another card, or {AUTO}"
    return (wanted, "") if wanted in others else ("", f"there is no {wanted} here, only {' and '.join(others)}")
