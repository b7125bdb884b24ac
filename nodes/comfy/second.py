"""The devices over which a model's attention is shared out: kept in the clone's options, so that the nodes that set and
read them may come in either order."""

from __future__ import annotations

from typing import Any

import torch

KEY = "pascal_attn_devices"
_LEAST_TOKENS = 1024


def visible_cards() -> list[str]:
    """``["cuda:0", "cuda:1"]``; nothing is started for it but what ComfyUI has started."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def share_over(patcher: Any, devices: tuple[str, ...], least_tokens: int) -> None:
    """Write it into the options of a fresh clone."""
    options = patcher.model_options["transformer_options"] = patcher.model_options["transformer_options"].copy()
    options[KEY] = (devices, least_tokens)


def shared_over(patcher: Any) -> tuple[tuple[str, ...], int]:
    """(devices, least tokens) of a model; no devices where none were set."""
    found = patcher.model_options.get("transformer_options", {}).get(KEY)
    return ((), _LEAST_TOKENS) if found is None else found
