"""Image transformers that attend to the text by cross attention or beside the image."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family


def latent(draw: Draw, channels: int = 4, text: int = 16, **more: Any) -> dict[str, Any]:
    """An image, a text and a time, as most of these models take them."""
    return {
        "hidden_states": draw(2, channels, 8, 8),
        "encoder_hidden_states": draw(2, 9, text),
        "timestep": draw.time(2),
        **more,
    }


def _sizes(draw: Draw) -> dict[str, Any]:
    return {
        "original_size": draw.ints(64, 2, 2),
        "target_size": draw.ints(64, 2, 2),
        "crop_coords": draw.ints(8, 2, 2),
    }


def _hunyuan_dit(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 8, 8),
        "encoder_hidden_states": draw(2, 6, 8),
        "text_embedding_mask": draw.padding(2, 6).float(),
        "encoder_hidden_states_t5": draw(2, 7, 8),
        "text_embedding_mask_t5": draw.padding(2, 7).float(),
        "timestep": draw.time(2).float(),
        "image_meta_size": draw.ints(99, 2, 6).float(),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": draw.rotary(16, 8),
    }


def _lumina_next(draw: Draw) -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {
        "hidden_states": draw(2, 4, 8, 8),
        "encoder_hidden_states": draw(2, 9, 16),
        "timestep": draw.uniform(2),
        "encoder_mask": draw.padding(2, 9),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 384, 384),
        "cross_attention_kwargs": {},
    }


def _omnigen(draw: Draw) -> dict[str, Any]:
    tokens = 12 + 1 + 16
    seen = torch.ones(tokens, tokens).tril()
    seen[13:] = 1
    mask = seen.repeat(2, 1, 1)
    mask[1, :, :3] = 0
    mask[1, :3] = torch.eye(tokens)[:3]
    return {
        "hidden_states": draw(2, 4, 8, 8),
        "timestep": draw.uniform(2),
        "input_ids": draw.ints(50, 2, 12),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask,
        "position_ids": torch.arange(tokens).repeat(2, 1),
    }


def _hidream(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 8, 8),
        "encoder_hidden_states_t5": draw(2, 6, 8),
        "encoder_hidden_states_llama3": draw(2, 2, 6, 4),
        "pooled_embeds": draw(2, 8),
        "timesteps": draw.time(2),
    }


_ADA_SINGLE = {
    "num_layers": 1,
    "patch_size": 2,
    "sample_size": 8,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "in_channels": 4,
    "cross_attention_dim": 16,
    "out_channels": 8,
}
_SANA = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 16,
    "sample_size": 8,
}

FAMILIES = [
    Family(
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "num_embeds_ada_norm": 8,
        },
        lambda draw: {"hidden_states": draw(2, 4, 8, 8), "timestep": draw.time(2), "class_labels": draw.ints(4, 2)},
    ),
    Family(
        "Transformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
        },
        lambda draw: {
            "hidden_states": draw(2, 16, 8, 8),
            "encoder_hidden_states": draw(2, 7, 16),
            "encoder_attention_mask": draw.padding(2, 7),
        },
    ),
    Family(
        "PixArtTransformer2DModel",
        {**_ADA_SINGLE, "caption_channels": 12, "use_additional_conditions": False},
        lambda draw: latent(
            draw,
            text=12,
            encoder_attention_mask=draw.padding(2, 9),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    ),
    Family("SanaTransformer2DModel", _SANA, lambda d: latent(d, encoder_attention_mask=d.padding(2, 9))),
    Family(
        "HunyuanDiT2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "hidden_size": 16,
            "text_len": 6,
            "text_len_t5": 7,
        },
        _hunyuan_dit,
    ),
    Family(
        "LuminaNextDiT2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "learn_sigma": False,
            "cross_attention_dim": 16,
        },
        _lumina_next,
    ),
    Family(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (64, 64, 64),
            "cap_feat_dim": 16,
        },
        lambda draw: latent(draw, timestep=draw.uniform(2), encoder_attention_mask=draw.padding(2, 9)),
    ),
    Family(
        "OmniGenTransformer2DModel",
        {
            "in_channels": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 100,
            "time_step_dim": 4,
            "rope_scaling": {"long_factor": [1, 2], "short_factor": [1, 2]},
        },
        _omnigen,
    ),
    Family(
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_channels": [8, 4],
            "text_emb_dim": 8,
            "num_routed_experts": 2,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (32, 32),
            "llama_layers": (0, 1),
            "force_inference_output": True,
        },
        _hidream,
    ),
    Family(
        "CogView3PlusTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "out_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 2,
            "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        lambda draw: latent(draw, **_sizes(draw)),
    ),
    Family(
        "CogView4Transformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "out_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 4,
        },
        lambda draw: latent(draw, **_sizes(draw), attention_mask=draw.padding(2, 9).long()),
    ),
    Family(
        "GlmImageTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "prior_vq_quantizer_codebook_size": 64,
        },
        lambda draw: latent(
            draw,
            prior_token_id=draw.ints(64, 2, 16),
            prior_token_drop=torch.zeros(2, 16, dtype=torch.bool),
            target_size=draw.ints(64, 2, 2).float(),
            crop_coords=draw.ints(8, 2, 2).float(),
        ),
    ),
]
