"""Wan 2.1 and 2.2, what was built on it, and LTX."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family

_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 1,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}
_NORMED = {**_WAN, "qk_norm": "rms_norm_across_heads"}
_IMAGE = {"image_dim": 16, "added_kv_proj_dim": 24}
_LTX2 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 1,
    "caption_channels": 16,
    "rope_double_precision": False,
}


def _wan(draw: Draw, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 2, 8, 8),
        "timestep": draw.time(2),
        "encoder_hidden_states": draw(2, 9, 16),
        **more,
    }


def _framewise(draw: Draw, frames: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, frames, 4, 8, 8),
        "timestep": draw.time(1).float().expand(1, frames),
        "r_timestep": torch.full((1, frames), 2.0),
        "encoder_hidden_states": draw(1, 9, 16),
    }


def _animate(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 12, 6, 8, 8),
        "timestep": draw.time(1),
        "encoder_hidden_states": draw(1, 9, 16),
        "encoder_hidden_states_image": draw(1, 7, 16),
        "pose_hidden_states": draw(1, 4, 5, 8, 8),
        "face_pixel_values": draw(1, 3, 17, 16, 16),
    }


def _animate2(draw: Draw) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [draw(16, 2, 4, 4)],
        "timestep": torch.tensor([7.0]),
        "encoder_hidden_states": [draw(8, 32)],
        "condition_latents": [draw(20, 2, 4, 4)],
        "encoder_hidden_states_image": draw(1, 4, 1280),
        "kv_cache": WanAnimate2KVCache(1),
        "kv_cache_mode": "extract",
        "seq_len": 8,
        "offset_grid_sizes": torch.tensor([[2, 2, 2]]),
    }


def _helios(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 2, 16, 16),
        "timestep": draw.time(1),
        "encoder_hidden_states": draw(1, 9, 16),
        "indices_hidden_states": torch.tensor([[6.0, 7.0]]),
        "indices_latents_history_short": torch.tensor([[5.0]]),
        "indices_latents_history_mid": torch.tensor([[4.0]]),
        "indices_latents_history_long": torch.arange(4.0)[None],
        "latents_history_short": draw(1, 4, 1, 16, 16),
        "latents_history_mid": draw(1, 4, 1, 16, 16),
        "latents_history_long": draw(1, 4, 4, 16, 16),
    }


def _ltx(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 2 * 4 * 4, 4),
        "encoder_hidden_states": draw(2, 9, 16),
        "timestep": draw.time(2),
        "encoder_attention_mask": draw.padding(2, 9),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def _ltx2(draw: Draw) -> dict[str, Any]:
    return {
        **_ltx(draw),
        "audio_hidden_states": draw(2, 5, 4),
        "audio_encoder_hidden_states": draw(2, 9, 16),
        "audio_encoder_attention_mask": draw.padding(2, 9),
        "timestep": draw.time(2).float(),
        "audio_num_frames": 5,
        "fps": 25.0,
    }


def _wm_refiner(draw: Draw) -> dict[str, Any]:
    cos, sin = draw.rotary(32, 16)
    return {
        "hidden_states": draw(2, 32, 4),
        "encoder_hidden_states": draw(2, 9, 16),
        "timestep": draw.time(2).float(),
        "video_rotary_emb": (cos[None].expand(2, -1, -1), sin[None].expand(2, -1, -1)),
        "encoder_attention_mask": draw.padding(2, 9),
    }


FAMILIES = [
    Family("WanTransformer3DModel", _NORMED, _wan, "text to video"),
    Family(
        "WanTransformer3DModel",
        {**_NORMED, **_IMAGE},
        # the model takes the last 512 tokens for the text
        lambda draw: _wan(draw, encoder_hidden_states=draw(2, 512, 16), encoder_hidden_states_image=draw(2, 5, 16)),
        "image to video",
    ),
    Family(
        "WanVACETransformer3DModel",
        {**_NORMED, "num_layers": 2, "vace_layers": [0, 1], "vace_in_channels": 12},
        lambda draw: _wan(draw, control_hidden_states=draw(2, 12, 2, 8, 8)),
    ),
    Family(
        "WanAnimateTransformer3DModel",
        {
            **_NORMED,
            "num_layers": 2,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 16,
            "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        _animate,
    ),
    Family(
        "WanAnimate2Transformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "text_len": 8,
            "in_dim": 36,
            "dim": 32,
            "ffn_dim": 32,
            "freq_dim": 16,
            "text_dim": 32,
            "out_dim": 16,
            "num_heads": 2,
            "num_layers": 1,
            "cross_attn_norm": True,
            "use_img_emb": True,
        },
        _animate2,
    ),
    Family("SkyReelsV2Transformer3DModel", _NORMED, _wan),
    Family("ChronoEditTransformer3DModel", {**_NORMED, "rope_temporal_skip_len": 8}, _wan),
    Family(
        "AnyFlowTransformer3DModel",
        {**_WAN, "gate_value": 0.25, "deltatime_type": "r"},
        lambda draw: _framewise(draw, 2),
    ),
    Family(
        "AnyFlowFARTransformer3DModel",
        {
            **_WAN,
            "compressed_patch_size": (1, 4, 4),
            "full_chunk_limit": 3,
            "gate_value": 0.25,
            "deltatime_type": "r",
        },
        lambda draw: {**_framewise(draw, 4), "chunk_partition": [2, 2]},
    ),
    Family(
        "HeliosTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 1,
            "cross_attn_norm": True,
            "rope_dim": (4, 4, 4),
            "has_multi_term_memory_patch": True,
            "guidance_cross_attn": True,
            "zero_history_timestep": True,
        },
        _helios,
    ),
    Family(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 1,
            "caption_channels": 16,
        },
        _ltx,
    ),
    Family("LTX2VideoTransformer3DModel", _LTX2, _ltx2),
    Family("SanaWMLTX2RefinerTransformer3DModel", _LTX2, _wm_refiner),
]
