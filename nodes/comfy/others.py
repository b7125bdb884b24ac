"""Attention overrides that other nodes set before ours: whether ours may replace them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from . import host

AUTO, REPLACE, KEEP = "auto", "replace it", "run it first"
CHOICES = [AUTO, REPLACE, KEEP]

# Overrides that compute plain attention and change nothing about it, by the last words of their qualified name.
_KJNODES = tuple(f"attention_override_{kind}" for kind in ("sage", "flash", "pytorch", "xformers"))


def name_of(function: Any) -> str:
    """``"Patch Sage Attention KJ (ComfyUI-KJNodes)"``: the node whose class made the function, and its pack; the
    function's own name where no node's class did."""
    module = str(getattr(function, "__module__", "") or "")
    words = getattr(function, "__qualname__", type(function).__name__).split(".")
    inside = re.split(r"custom_nodes[/\\\\.]", module)[-1]
    pack = "ComfyUI" if module.startswith("comfy") else re.split(r"[/\\\\.]", inside)[0]
    return f"{host.node_title(module, words[0]) or words[-1]} ({pack.replace('_x_', '.')})"


def only_computes(override: Callable[..., Any]) -> bool:
    """Whether an override is known to compute attention as any other function would: Sage, flash, a backend chosen by
    ComfyUI's own node. Sparse attention, masks added, maps captured, and whatever is not known, change the result or
    need to see every call."""
    name, module = getattr(override, "__qualname__", ""), getattr(override, "__module__", "") or ""
    if module == "comfy.model_patcher" and ".set_model_optimized_attention." in name:
        held = (cell.cell_contents for cell in override.__closure__ or ())
        return all(getattr(function, "__module__", "") == "comfy.ldm.modules.attention" for function in held)
    return "kjnodes" in module.lower() and name.endswith(_KJNODES)


def runs_first(override: Callable[..., Any] | None, choice: str) -> bool:
    """Whether every call goes to ``override`` first, and ours gets what it passes on."""
    if override is None or choice == REPLACE:
        return False
    return choice == KEEP or not only_computes(override)
