"""Attention overrides that other nodes set before ours: whether ours may replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AUTO, REPLACE, KEEP = "auto", "replace it", "run it first"
CHOICES = [AUTO, REPLACE, KEEP]

# Overrides that compute plain attention and change nothing about it, by the last words of their qualified name.
_KJNODES = tuple(f"attention_override_{kind}" for kind in ("sage", "flash", "pytorch", "xformers"))


def name_of(function: Any) -> str:
    """``"pack.module.function"``."""
    module = str(getattr(function, "__module__", "") or "").replace("\\", "/")
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{module.rpartition('custom_nodes/')[2].rpartition('custom_nodes.')[2]}.{name}"


def only_computes(override: Callable[..., Any]) -> bool:
    """Whether an override is known to compute attention as any other function would: Sage, flash, a backend chosen by
    ComfyUI's own node. Sparse attention, masks added, maps captured, and whatever is not known, change the result or
    need to see every call."""
    name, module = getattr(override, "__qualname__", ""), getattr(override, "__module__", "") or ""
    if module == "comfy.model_patcher" and ".set_model_optimized_attention." in name:
        return all(_is_of_the_host(cell.cell_contents) for cell in override.__closure__ or ())
    return "kjnodes" in module.lower() and name.endswith(_KJNODES)


def _is_of_the_host(function: Any) -> bool:
    return getattr(function, "__module__", "") == "comfy.ldm.modules.attention"


def runs_first(override: Callable[..., Any] | None, choice: str) -> bool:
    """Whether every call goes to ``override`` first, and ours gets what it passes on."""
    if override is None or choice == REPLACE:
        return False
    return choice == KEEP or not only_computes(override)
