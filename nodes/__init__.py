"""The nodes of the pack, one per module."""

from __future__ import annotations

from .attention_patch import PascalAttentionPatch

NODE_CLASS_MAPPINGS = {
    "PascalAttentionPatch": PascalAttentionPatch,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "PascalAttentionPatch": "Pascal Attention Patch",
}
