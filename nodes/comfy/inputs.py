"""Inputs that several nodes have, in the same words."""

from __future__ import annotations

from typing import Any

from ...pascal_attn_core import AttentionConfig


class AnyType(str):
    """The type ``*`` of sockets that take anything: it differs from no other, where a host compares types by name."""

    def __ne__(self, other: object) -> bool:
        return False


ANY = AnyType("*")
# Folded away until it is asked for by the front end's Nodes 2.0; its classic canvas shows it. The order of inputs stays
# as it is: saved workflows hold their values in it.
ADVANCED = {"advanced": True}
ROUTES = ["auto", "fused", "torch", "tiled"]
_ROUTE = (
    "auto: the fastest exact route for each call. fused: our own kernel (NVIDIA; AMD's Vega, MI50, RX 5000/6000). "
    "torch: PyTorch's own fused kernel. tiled: plain PyTorch operators, works on every device. A call that the chosen "
    "route cannot take uses auto; the report shows which."
)
_BUDGET = "Largest extra memory of one attention call in MiB. 0 = chosen from the card (64 on a GPU)."
_GUARD = (
    "Checks every attention output. If one is not finite (a black image), it is recomputed in float32 and the report "
    "names the block."
)


class PascalNode:
    """The base class of the nodes: their place in ComfyUI's menu, and the name of the method that most of them run."""

    CATEGORY = "model/patch/attention"
    FUNCTION = "patch"


def aliases(text: str) -> tuple[str, ...]:
    """``"vram, p40"``: words by which ComfyUI's search finds a node."""
    return tuple(text.split(", "))


def route() -> tuple[list[str], dict[str, Any]]:
    return ROUTES, {"default": "auto", "tooltip": _ROUTE, **ADVANCED}


def budget_mib() -> tuple[str, dict[str, Any]]:
    return "INT", {"default": 0, "min": 0, "max": 65536, "step": 1, "tooltip": _BUDGET, **ADVANCED}


def nan_guard() -> tuple[str, dict[str, Any]]:
    return "BOOLEAN", {"default": True, "tooltip": _GUARD, **ADVANCED}


def config(route: str, budget_mib: int, tile_size: int = 0) -> AttentionConfig:
    """The core's configuration for these inputs; 0 = chosen there."""
    return AttentionConfig(route=route, budget_mib=budget_mib or None, kv_block=tile_size or None)
