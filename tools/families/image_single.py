"""Image transformers that attend to text and image in one sequence."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family
from .image import latent


def _z_image(draw: Draw) -> dict[str, Any]:
    return {
        "x": [draw(16, 1, 8, 8), draw(16, 1, 16, 16)],
        "cap_feats": [draw(9, 16), draw(5, 16)],
        "t": draw.uniform(2),
    }


def _ernie(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 16, 4, 4),
        "timestep": draw.uniform(2),
        "text_bth": draw(2, 9, 16),
        "text_lens": torch.tensor([9, 5]),
    }


def _ideogram(draw: Draw) -> dict[str, Any]:
    text, image = 5, 9
    positions = torch.zeros(2, text + image, 3, dtype=torch.long)
    positions[:, :text] = torch.arange(text)[:, None]
    positions[:, text:] = 65536 + Draw.grid(1, 3, 3).long()
    segments = torch.ones(2, text + image, dtype=torch.long)
    segments[1, :2] = 0
    indicator = torch.full((2, text + image), 2)
    indicator[:, :text] = 3
    return {
        "hidden_states": draw(2, text + image, 8) * (torch.arange(text + image) >= text)[:, None],
        "encoder_hidden_states": draw(2, text + image, 12) * (torch.arange(text + image) < text)[:, None],
        "timestep": draw.uniform(2),
        "position_ids": positions,
        "segment_ids": segments,
        "indicator": indicator,
    }


def _krea(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 9, 8),
        "encoder_hidden_states": draw(2, 7, 2, 12),
        "timestep": draw.uniform(2),
        "position_ids": torch.cat([torch.zeros(7, 3), Draw.grid(1, 3, 3)]),
        "encoder_attention_mask": draw.padding(2, 7),
    }


def _prx(draw: Draw) -> dict[str, Any]:
    return latent(draw, text=16, timestep=draw.uniform(2), attention_mask=draw.padding(2, 9))


FAMILIES = [
    Family(
        "ZImageTransformer2DModel",
        {
            "in_channels": 16,
            "dim": 32,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        _z_image,
    ),
    Family(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 1,
            "ffn_hidden_size": 16,
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 1,
            "text_in_dim": 16,
            "rope_axes_dim": (8, 4, 4),
        },
        _ernie,
    ),
    Family(
        "Ideogram4Transformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "adaln_dim": 16,
            "llm_features_dim": 12,
            "rope_theta": 10000,
            "mrope_section": (2, 1, 1),
        },
        _ideogram,
    ),
    Family(
        "Krea2Transformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "timestep_embed_dim": 8,
            "text_hidden_dim": 12,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        _krea,
    ),
    Family(
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 1,
            "axes_dim": [8, 8],
        },
        _prx,
    ),
]
