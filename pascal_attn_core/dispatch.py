"""placeholder"""
from __future__ import annotations
from typing import NamedTuple
import torch.nn.functional as F
from torch import Tensor

class AttentionOutput(NamedTuple):
    out: Tensor
    lse: Tensor

def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, alignment="upper_left", window=None, config=None):
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
