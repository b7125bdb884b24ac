"""Pascal Attention: exact attention in O(N) memory on any GPU, by the fastest route available on it.

    from pascal_attn_core import sdpa
    out = sdpa(query, key, value)          # the arguments of torch's scaled_dot_product_attention

Importing it changes nothing and does not initialise CUDA.
"""

from .attention import explain, sdpa, sdpa_backward, sdpa_with_lse
from .attention_map import attention_map, saved_by_band
from .call import AttentionOutput
from .capture import capture
from .compat import TiledAttention, recommended_tile_size, tiled_attention
from .config import AttentionConfig, UnsupportedAttention
from .ffn import patch_ffn
from .int8 import patch_linear_int8
from .lazy_mask import LazyMask, mask_rule
from .observe.memory import measure_memory
from .observe.report import Report, record
from .patching.patch import Patch
from .vae import patch_vae
from .version import __version__

__all__ = [
    "AttentionConfig",
    "AttentionOutput",
    "LazyMask",
    "Patch",
    "Report",
    "TiledAttention",
    "UnsupportedAttention",
    "__version__",
    "attention_map",
    "capture",
    "explain",
    "mask_rule",
    "measure_memory",
    "patch_ffn",
    "patch_linear_int8",
    "patch_vae",
    "record",
    "recommended_tile_size",
    "saved_by_band",
    "sdpa",
    "sdpa_backward",
    "sdpa_with_lse",
    "tiled_attention",
]
