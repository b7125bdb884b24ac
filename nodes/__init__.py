"""The nodes of the pack, one per module."""

from __future__ import annotations

from .attention_patch import PascalAttentionPatch
from .eight_bit import Pascal8Bit
from .ffn_chunking import PascalFFNChunking
from .flash_attn_functions import PascalFlashAttnFunctions, install_if_asked
from .memory_estimate import PascalMemoryEstimate
from .report import PascalAttentionReport
from .second_card import PascalSecondCard
from .text_encoder_attention import PascalTextEncoderAttention
from .vae_attention import PascalVAEAttention

NODE_CLASS_MAPPINGS = {
    "PascalAttentionPatch": PascalAttentionPatch,
    "PascalAttentionReport": PascalAttentionReport,
    "PascalMemoryEstimate": PascalMemoryEstimate,
    "PascalFFNChunking": PascalFFNChunking,
    "Pascal8Bit": Pascal8Bit,
    "PascalVAEAttention": PascalVAEAttention,
    "PascalTextEncoderAttention": PascalTextEncoderAttention,
    "PascalSecondCard": PascalSecondCard,
    "PascalFlashAttnFunctions": PascalFlashAttnFunctions,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "PascalAttentionPatch": "Pascal Attention Patch",
    "PascalAttentionReport": "Pascal Attention Report",
    "PascalMemoryEstimate": "Pascal Memory Estimate",
    "PascalFFNChunking": "Pascal FFN Chunking",
    "Pascal8Bit": "Pascal 8-Bit",
    "PascalVAEAttention": "Pascal VAE Attention",
    "PascalTextEncoderAttention": "Pascal Text Encoder Attention",
    "PascalSecondCard": "Pascal Second Card",
    "PascalFlashAttnFunctions": "Pascal Flash-Attn Functions",
}

install_if_asked()  # PASCAL_ATTN_FLASH=1: before the packs whose folders come later are imported
