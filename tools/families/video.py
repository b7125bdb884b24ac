"""Video transformers: CogVideoX, HunyuanVideo, Mochi, Allegro, EasyAnimate, Latte."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family


def clip(draw: Draw, channels: int = 4, text: int = 16, **more: Any) -> dict[str, Any]:
    """Frames as ``[batch, channels, frames, height, width]`` and a text."""
    return {
        "hidden_states": draw(2, channels, 2, 8, 8),
        "encoder_hidden_states": draw(2, 9, text),
        "timestep": draw.time(2),
        **more,
    }


def _cogvideox(draw: Draw, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 2, 4, 8, 8),
        "encoder_hidden_states": draw(2, 8, 8),
        "timestep": draw.time(2),
        **more,
    }


def _hunyuan(draw: Draw, channels: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, channels, 2, 4, 4),
        "timestep": draw.time(2).float(),
        "encoder_hidden_states": draw(2, 9, 16),
        "encoder_attention_mask": draw.padding(2, 9),
        "pooled_projections": draw(2, 8),
        **more,
    }


def _framepack(draw: Draw) -> dict[str, Any]:
    return {
        **_hunyuan(draw, guidance=draw.time(2).float()),
        "hidden_states": draw(2, 4, 3, 4, 4),
        "image_embeds": draw(2, 5, 16),
        "indices_latents": torch.arange(3.0) + 10,
        "latents_clean": draw(2, 4, 2, 4, 4),
        "indices_latents_clean": torch.tensor([0.0, 9.0]),
        "latents_history_2x": draw(2, 4, 2, 4, 4),
        "indices_latents_history_2x": torch.tensor([7.0, 8.0]),
        "latents_history_4x": draw(2, 4, 8, 4, 4),
        "indices_latents_history_4x": torch.arange(8.0),
    }


def _hunyuan15(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 1, 4, 4),
        "timestep": draw.time(2).float(),
        "encoder_hidden_states": draw(2, 9, 16),
        "encoder_attention_mask": draw.padding(2, 9),
        "encoder_hidden_states_2": draw(2, 6, 8),
        "encoder_attention_mask_2": draw.padding(2, 6),
        "image_embeds": torch.zeros(2, 3, 12),
    }


def _allegro(draw: Draw) -> dict[str, Any]:
    frequencies = [draw.rotary(length, 4) for length in (2, 4, 4)]
    return clip(
        draw,
        attention_mask=torch.ones(2, 2, 8, 8),
        encoder_attention_mask=draw.padding(2, 9).float(),
        image_rotary_emb=(frequencies, draw.grid(2, 4, 4).long().T[:, None].unbind()),
    )


_COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 4,
    "text_embed_dim": 8,
    "num_layers": 1,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 8,
}
_HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}

FAMILIES = [
    Family("CogVideoXTransformer3DModel", _COGVIDEOX, _cogvideox, "CogVideoX"),
    Family(
        "CogVideoXTransformer3DModel",
        {**_COGVIDEOX, "patch_size_t": 2, "use_rotary_positional_embeddings": True},
        lambda draw: _cogvideox(draw, image_rotary_emb=draw.rotary(16, 16)),
        "CogVideoX 1.5",
    ),
    Family(
        "ConsisIDTransformer3DModel",
        {
            **_COGVIDEOX,
            "cross_attn_interval": 1,
            "is_train_face": True,
            "cross_attn_dim_head": 4,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 4,
            "LFE_vit_dim": 4,
            "LFE_depth": 5,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 2,
            "LFE_output_dim": 21,
            "LFE_ff_mult": 1,
            "LFE_num_scale": 1,
        },
        lambda draw: _cogvideox(draw, id_vit_hidden=[draw(2, 3, 4)], id_cond=draw(2, 4)),
    ),
    Family(
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN,
        lambda draw: _hunyuan(draw, guidance=draw.time(2).float()),
        "text to video",
    ),
    Family(
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "in_channels": 4, "guidance_embeds": False, "image_condition_type": "token_replace"},
        _hunyuan,
        "image to video",
    ),
    Family(
        "HunyuanVideoFramepackTransformer3DModel",
        {**_HUNYUAN, "patch_size": 2, "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        _framepack,
    ),
    Family(
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "mlp_ratio": 2.0,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "image_embed_dim": 12,
            "rope_axes_dim": (2, 2, 4),
            "target_size": 16,
            "task_type": "t2v",
        },
        _hunyuan15,
    ),
    Family(
        "MochiTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 9,
        },
        lambda draw: clip(draw, encoder_attention_mask=draw.padding(2, 9)),
    ),
    Family(
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "cross_attention_dim": 24,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
            "caption_channels": 16,
        },
        _allegro,
    ),
    Family(
        "EasyAnimateTransformer3DModel",
        {
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "in_channels": 4,
            "mmdit_layers": 1,
            "num_layers": 1,
            "out_channels": 4,
            "patch_size": 2,
            "sample_height": 8,
            "sample_width": 8,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "time_position_encoding_type": "3d_rope",
        },
        clip,
    ),
    Family(
        "LatteTransformer3DModel",
        {
            "sample_size": 8,
            "num_layers": 1,
            "patch_size": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_channels": 16,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "out_channels": 8,
            "video_length": 2,
        },
        clip,
    ),
    Family(
        "TransformerTemporalModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "num_layers": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
        },
        lambda draw: {"hidden_states": draw(4, 16, 4, 4), "num_frames": 4, "encoder_hidden_states": draw(16, 5, 16)},
    ),
]
