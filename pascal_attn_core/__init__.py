"""Pascal Attention: exact attention in O(N) memory on any GPU, by the fastest route available on it.

    from pascal_attn_core import sdpa
    out = sdpa(query, key, value)          # the arguments of torch's scaled_dot_product_attention

Importing it changes nothing and does not initialise CUDA. The functions ``patch_*`` change a pipeline, a model or the
process until ``remove()`` of the Patch that they return; each is loaded when it is first used.

To read the code, open ``attention.py`` (the public functions), ``config.py`` (what can be set) and ``call/`` (what a
call is, once it is checked) first; then ``routes/run.py``, whose first lines say how a route is chosen.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .attention import explain, sdpa, sdpa_backward, sdpa_with_lse
from .attention_map import attention_map
from .call import AttentionOutput
from .call.lazy_mask import LazyMask, mask_rule
from .compat import TiledAttention, recommended_tile_size, tiled_attention
from .config import AttentionConfig, UnsupportedAttention
from .observe.memory import measure_memory
from .observe.report import Report, record
from .patching.patch import Patch
from .version import __version__

if TYPE_CHECKING:
    from .diffusers import patch_attention as patch_attention
    from .diffusers import patch_pipeline as patch_pipeline
    from .ffn import patch_ffn
    from .flash_attn import patch_flash_attn
    from .flex import create_block_mask, flex_attention, patch_flex_attention
    from .gguf import patch_gguf
    from .int8 import patch_attention_int8, patch_linear_float16, patch_linear_int8
    from .sdpa_patch import patch_sdpa
    from .stand_ins import patch_imports, patch_sageattention, patch_xformers
    from .transformers import patch_transformers
    from .vae import patch_vae

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
    "create_block_mask",
    "explain",
    "flex_attention",
    "mask_rule",
    "measure_memory",
    "patch_attention_int8",
    "patch_ffn",
    "patch_flash_attn",
    "patch_flex_attention",
    "patch_gguf",
    "patch_imports",
    "patch_linear_float16",
    "patch_linear_int8",
    "patch_sageattention",
    "patch_sdpa",
    "patch_transformers",
    "patch_vae",
    "patch_xformers",
    "record",
    "recommended_tile_size",
    "sdpa",
    "sdpa_backward",
    "sdpa_with_lse",
    "tiled_attention",
]

# patch_attention and patch_pipeline are not in __all__: they need diffusers, which `import *` must not.
_LAZY = {
    "create_block_mask": "flex",
    "flex_attention": "flex",
    "patch_attention": "diffusers",
    "patch_attention_int8": "int8",
    "patch_ffn": "ffn",
    "patch_flash_attn": "flash_attn",
    "patch_flex_attention": "flex",
    "patch_gguf": "gguf",
    "patch_imports": "stand_ins",
    "patch_linear_float16": "int8",
    "patch_linear_int8": "int8",
    "patch_pipeline": "diffusers",
    "patch_sageattention": "stand_ins",
    "patch_sdpa": "sdpa_patch",
    "patch_transformers": "transformers",
    "patch_vae": "vae",
    "patch_xformers": "stand_ins",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
