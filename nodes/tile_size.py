"""Node: Pascal Tile Size."""

from __future__ import annotations

from typing import Any

import torch

from ..pascal_attn_core.machine.device import device_info
from ..pascal_attn_core.machine.runtime import runtime_of
from .comfy import host, inputs
from .reporting.words import dtype_text
from .tiles.choice import CannotMeasure, Card, Shape, TileSizes, fastest, plan_for, sentence, within_limits

FROM_CARD, MEASURE, AGAIN = "from the card", "measure", "measure again"
_AS_COMFYUI = "as ComfyUI computes"


class PascalTileSize(inputs.PascalNode):
    """-> INT, STRING: keys per tile of the tiled route on this card, and why."""

    DESCRIPTION = (
        "How many keys the tiled route of Pascal Attention Patch should process at a time on this card, and one "
        "sentence that explains why. Reads the L2 cache size and the free memory of ComfyUI's compute device, or times "
        "a few sizes once and stores the fastest. You need it only to inspect or to experiment: with tile_size at 0, "
        "the patch makes the same choice for each call by itself."
    )
    SEARCH_ALIASES = ("l2 cache", "block size", "benchmark attention", "tile")
    RETURN_TYPES = ("INT", "STRING")
    RETURN_NAMES = ("tile_size", "explanation")
    OUTPUT_TOOLTIPS = (
        "Keys per tile, for the input tile_size of Pascal Attention Patch. 0 = the patch chooses best by itself.",
        "The choice in one sentence, with the numbers it comes from.",
    )
    FUNCTION = "choose"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        mode = (
            f"{FROM_CARD}: computed from the card's properties, without measuring. {MEASURE}: times a few sizes on the "
            f"card, for at most four seconds, and stores the result in ComfyUI's user folder. {AGAIN}: measures even "
            "if there is a stored result."
        )
        dtype = f"Data type of attention. {_AS_COMFYUI}: what ComfyUI picks on this card for a float16 model."
        tokens = "Tokens of the largest attention call: 4096 for 1024 x 1024 in most models, 32760 for 5 s of 480p Wan."
        budget = "Largest extra memory of one call in MiB, as on Pascal Attention Patch. 0 = chosen from the card."
        return {
            "required": {"mode": ([FROM_CARD, MEASURE, AGAIN], {"default": FROM_CARD, "tooltip": mode})},
            "optional": {
                "tokens": ("INT", {"default": 4096, "min": 1, "max": 1048576, "tooltip": tokens}),
                "heads": ("INT", {"default": 24, "min": 1, "max": 1024, "tooltip": "Attention heads of the model."}),
                "head_dim": ("INT", {"default": 64, "min": 1, "max": 1024, "tooltip": "Channels of one head."}),
                "dtype": ([_AS_COMFYUI, "float16", "bfloat16", "float32"], {"default": _AS_COMFYUI, "tooltip": dtype}),
                "budget_mib": ("INT", {"default": 0, "min": 0, "max": 65536, "tooltip": budget}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def choose(
        self,
        mode: str,
        tokens: int = 4096,
        heads: int = 24,
        head_dim: int = 64,
        dtype: str = _AS_COMFYUI,
        budget_mib: int = 0,
        unique_id: str | None = None,
    ) -> tuple[int, str]:
        device = host.compute_device()
        if dtype == _AS_COMFYUI:
            dtype = dtype_text(host.compute_dtype(device))
        shape = Shape(dtype, tokens, heads, head_dim, budget_mib)
        card = Card(device_info(device), *host.free_and_total_bytes(device))
        size, text = _from_card(card, shape) if mode == FROM_CARD else _measured(card, shape, device, mode == AGAIN)
        host.say(text, unique_id, f"{size:,} keys per tile" if size else "0: the patch chooses best by itself")
        return size, text


def _from_card(card: Card, shape: Shape, remark: str = "") -> tuple[int, str]:
    plan = plan_for(card, shape)
    return plan.kv_block, sentence(card, shape, plan) + remark


def _measured(card: Card, shape: Shape, device: torch.device, again: bool) -> tuple[int, str]:
    planned = plan_for(card, shape)
    try:
        timed = within_limits(card, shape)
        times = runtime_of(device).part(TileSizes).of(timed, planned.kv_block, again=again)
    except CannotMeasure as reason:
        return _from_card(card, shape, f" It could not be measured: {reason}.")
    keys = fastest(times)
    words = f"{keys} keys per tile are fastest" if keys else "the tiled route is fastest with its own choice"
    with_what = f" with {timed.text()}" if timed != shape else ""
    listed = ", ".join(f"{size}: {ms} ms" for size, ms in times.items())
    return keys, sentence(card, shape, planned, f"{words}, as measured{with_what} ({listed})")
