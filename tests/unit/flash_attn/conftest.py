"""Every call by the tiled route with small tiles: ``tiled`` in ``attn_support.flash_attn.oracle``."""

from attn_support.flash_attn.oracle import tiled

__all__ = ["tiled"]
