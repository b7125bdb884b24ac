"""The nodes of the pack, one per module."""

from __future__ import annotations

from .attention_patch import PascalAttentionPatch
from .ffn_chunking import PascalFFNChunking
from .report import PascalAttentionReport
from .text_encoder_attention import PascalTextEncoderAttention
from .vae_attention import PascalVAEAttention

NODE_CLASS_MAPPINGS = {
    "PascalAttentionPatch": PascalAttentionPatch,
    "PascalAttentionReport": PascalAttentionReport,
    "PascalFFNChunking": PascalFFNChunking,
    "PascalVAEAttention": PascalVAEAttention,
    "PascalTextEncoderAttention": PascalTextEncoderAttention,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "PascalAttentionPatch": "Pascal Attention Patch",
    "PascalAttentionReport": "Pascal Attention Report",
    "PascalFFNChunking": "Pascal FFN Chunking",
    "PascalVAEAttention": "Pascal VAE Attention",
    "PascalTextEncoderAttention": "Pascal Text Encoder Attention",
}
