"""Pascal Attention: exact attention in O(N) memory on any GPU, by the fastest route the card has.

    from pascal_attn_core import sdpa
    out = sdpa(query, key, value)          # the arguments of torch's scaled_dot_product_attention

Importing it changes nothing and starts no CUDA.
"""

from .config import AttentionConfig, UnsupportedAttention
from .dispatch import AttentionOutput, sdpa

__version__ = "0.1.0"

__all__ = ["AttentionConfig", "AttentionOutput", "UnsupportedAttention", "sdpa"]
