"""Video transformers: Cosmos, Kandinsky, MiniMax, Motif, Sana."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family
from .video import clip


def _cosmos(draw: Draw, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 2, 8, 8),
        "timestep": draw.time(1),
        "encoder_hidden_states": draw(1, 9, 16),
        "attention_mask": draw.padding(1, 9),
        "fps": 16,
        "padding_mask": torch.zeros(1, 1, 8, 8),
        **more,
    }


def _cosmos3(draw: Draw) -> dict[str, Any]:
    vision = torch.arange(5, 5 + 12)
    return {
        "input_ids": draw.ints(32, 5),
        "text_indexes": torch.arange(5),
        "position_ids": torch.arange(17).repeat(3, 1),
        "und_len": 5,
        "sequence_length": 17,
        "vision_tokens": [draw(1, 2, 1, 3, 4)],
        "vision_token_shapes": [(1, 3, 4)],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision,
        "vision_timesteps": draw.uniform(12),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }


def _kandinsky5(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 2, 4, 4, 4),
        "encoder_hidden_states": draw(2, 7, 16),
        "timestep": draw.time(2).float(),
        "pooled_projections": draw(2, 12),
        "visual_rope_pos": [torch.arange(2), torch.arange(2), torch.arange(2)],
        "text_rope_pos": torch.arange(7),
    }


def _kandinsky6(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 2, 4, 4, 9),
        "encoder_hidden_states": draw(2, 7, 16),
        "encoder_attention_mask": draw.padding(2, 7),
        "pooled_projections": draw(2, 12),
        "timestep": draw.time(2).float(),
        "audio_hidden_states": draw(2, 5, 6),
    }


def _minimax(draw: Draw) -> dict[str, Any]:
    text, audio, video = 4, 6, 8
    tags = torch.tensor([1] * text + [2] * audio + [0] * video)
    tokens = torch.arange(text + audio + video)
    place = (tags == 0) * torch.arange(text + audio + video)
    return {
        "hidden_states": draw(2, video, 16),
        "audio_hidden_states": draw(2, audio, 6),
        "encoder_hidden_states": draw(2, text, 8),
        "timestep": torch.tensor([0.7, 0.3]),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": torch.stack([tokens, place % 4, place % 2], dim=1).float(),
        "video_indices": tokens[tags == 0],
        "audio_indices": tokens[tags == 2],
        "text_indices": tokens[tags == 1],
    }


def _sana_wm(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 2, 4, 4),
        "timestep": draw.time(2).float()[:, None, None].expand(2, 1, 2),
        "encoder_hidden_states": draw(2, 1, 9, 16),
        "mask": draw.padding(2, 9).long()[:, None, None],
    }


_COSMOS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 1,
    "mlp_ratio": 2,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 16, 16),
    "rope_scale": (2.0, 1.0, 1.0),
}

FAMILIES = [
    Family(
        "CosmosTransformer3DModel",
        {**_COSMOS, "concat_padding_mask": False, "extra_pos_embed_type": "learnable"},
        _cosmos,
        "Cosmos",
    ),
    Family(
        "CosmosTransformer3DModel",
        {
            **_COSMOS,
            "in_channels": 5,
            "concat_padding_mask": False,
            "extra_pos_embed_type": None,
            "img_context_dim_in": 12,
            "img_context_dim_out": 24,
            "img_context_num_tokens": 4,
        },
        lambda draw: _cosmos(
            draw,
            attention_mask=None,
            condition_mask=torch.ones(1, 1, 2, 8, 8),
            encoder_hidden_states=(draw(1, 9, 16), draw(1, 4, 12)),
        ),
        "Cosmos 2.5",
    ),
    Family(
        "Cosmos3OmniTransformer",
        {
            "head_dim": 12,
            "hidden_act": "relu2",
            "hidden_size": 24,
            "intermediate_size": 24,
            "latent_channel": 2,
            "latent_patch_size": 1,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "patch_latent_dim": 2,
            "qk_norm_for_text": False,
            "rms_norm_eps": 1e-05,
            "rope_axes_dim": [2, 2, 2],
            "vocab_size": 32,
        },
        _cosmos3,
    ),
    Family(
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 12,
            "time_dim": 16,
            "out_visual_dim": 4,
            "model_dim": 32,
            "ff_dim": 32,
            "num_text_blocks": 1,
            "num_visual_blocks": 1,
            "axes_dims": (4, 6, 6),
        },
        _kandinsky5,
    ),
    Family(
        "Kandinsky6Transformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 12,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 32,
            "num_text_blocks": 1,
            "num_visual_blocks": 1,
            "axes_dims": (4, 6, 6),
            "in_audio_dim": 6,
            "out_audio_dim": 6,
        },
        _kandinsky6,
    ),
    Family(
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 6,
            "patch_size": (1, 2, 2),
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        _minimax,
    ),
    Family(
        "MotifVideoTransformer3DModel",
        {
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_decoder_layers": 0,
            "patch_size": 2,
            "patch_size_t": 1,
            "text_embed_dim": 16,
            "image_embed_dim": 4,
            "rope_axes_dim": (4, 4, 4),
        },
        lambda draw: clip(draw, channels=9, encoder_attention_mask=draw.padding(2, 9)),
    ),
    Family(
        "SanaVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 16,
            "sample_size": 8,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        lambda draw: clip(draw, encoder_attention_mask=draw.padding(2, 9)),
    ),
    Family(
        "SanaWMTransformer3DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "image_size": 32,
            "caption_channels": 16,
            "mlp_ratio": 2.0,
            "chunk_plucker_post_attn_blocks": 2,
        },
        _sana_wm,
    ),
    Family(
        "Kandinsky6SRTransformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 32,
            "num_visual_blocks": 1,
            "axes_dims": (8, 4, 4),
            "nabla_window": (3, 3, 3),
        },
        lambda draw: {"hidden_states": draw(1, 2, 16, 16, 9), "timestep": draw.time(1).float()},
    ),
]
