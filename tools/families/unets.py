"""UNets: Stable Diffusion 1 and 2, XL, video, audio, super resolution; the older ones without text too."""

from __future__ import annotations

from typing import Any

from .family import Draw, Family, before_031

_TWO_LEVELS: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
}
_UNET: dict[str, Any] = {
    **_TWO_LEVELS,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
}


def _text_inputs(draw: Draw) -> dict[str, Any]:
    return {
        "sample": draw(2, 4, 8, 8),
        "timestep": 10,
        "encoder_hidden_states": draw(2, 7, 16),
        "encoder_attention_mask": draw.padding(2, 7),
    }


def _xl_inputs(draw: Draw) -> dict[str, Any]:
    condition = {"text_embeds": draw(2, 8), "time_ids": draw.ints(64, 2, 6).float()}
    return {**_text_inputs(draw), "added_cond_kwargs": condition}


def _added_kv_inputs(draw: Draw) -> dict[str, Any]:
    return {**_text_inputs(draw), "attention_mask": None}


def motion_texts() -> int:
    """How many texts a motion model takes for one clip of three frames: one before diffusers 0.31, then one a frame."""
    return 1 if before_031() else 3


def _motion_inputs(draw: Draw) -> dict[str, Any]:
    return {"sample": draw(1, 4, 3, 8, 8), "timestep": 10, "encoder_hidden_states": draw(motion_texts(), 7, 16)}


def _video_inputs(draw: Draw) -> dict[str, Any]:
    return {"sample": draw(2, 4, 3, 8, 8), "timestep": 10, "encoder_hidden_states": draw(2, 7, 16)}


_XL = {
    "use_linear_projection": True,
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 56,
}
_ADDED_KV = {
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "attention_head_dim": 8,
    "only_cross_attention": False,
}
_DEEPFLOYD = {
    **_ADDED_KV,
    "only_cross_attention": (True, False),
    "cross_attention_norm": "group_norm",
    "encoder_hid_dim": 16,
    "cross_attention_dim": 32,
    "class_embed_type": "timestep",
}
_K_BLOCKS = {
    "down_block_types": ("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
    "mid_block_type": None,
    "up_block_types": ("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 2,
    "norm_num_groups": None,
    "resnet_time_scale_shift": "scale_shift",
    "time_embedding_type": "fourier",
    "timestep_post_act": "gelu",
    "conv_in_kernel": 1,
    "conv_out_kernel": 1,
    "attention_head_dim": 8,
}
_AUDIO = {
    "cross_attention_dim": (16, 32),
    "class_embed_type": "simple_projection",
    "projection_class_embeddings_input_dim": 12,
    "class_embeddings_concat": True,
}
_VIDEO = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "attention_head_dim": 8,
}
_MOTION = {
    **_TWO_LEVELS,
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    "num_attention_heads": 2,
    "motion_num_attention_heads": 2,
}

FAMILIES = [
    Family("UNet2DConditionModel", _UNET, _text_inputs, "Stable Diffusion 1.5"),
    Family("UNet2DConditionModel", {**_UNET, "use_linear_projection": True}, _text_inputs, "Stable Diffusion 2"),
    Family("UNet2DConditionModel", {**_UNET, **_XL}, _xl_inputs, "SDXL"),
    Family("UNet2DConditionModel", {**_UNET, **_ADDED_KV}, _added_kv_inputs, "Kandinsky 2"),
    Family(
        "UNet2DConditionModel",
        {**_UNET, **_DEEPFLOYD},
        lambda draw: {**_added_kv_inputs(draw), "class_labels": draw.time(2)},
        "DeepFloyd IF",
    ),
    Family("UNet2DConditionModel", {**_UNET, **_K_BLOCKS}, _text_inputs, "latent upscaler"),
    Family(
        "UNet2DConditionModel",
        {**_UNET, **_AUDIO},
        lambda draw: {
            "sample": draw(2, 4, 8, 8),
            "timestep": 10,
            "encoder_hidden_states": None,
            "class_labels": draw(2, 12),
        },
        "AudioLDM",
    ),
    Family(
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda draw: {"sample": draw(2, 3, 8, 8), "timestep": 10},
    ),
    Family("UNet3DConditionModel", {**_TWO_LEVELS, **_VIDEO}, _video_inputs),
    Family(
        "I2VGenXLUNet",
        {**_TWO_LEVELS, **_VIDEO, "num_attention_heads": None},
        lambda draw: {
            **_video_inputs(draw),
            "fps": draw.ints(30, 2),
            "image_latents": draw(2, 4, 3, 8, 8),
            "image_embeddings": draw(2, 16),
        },
    ),
    Family("UNetMotionModel", _MOTION, _motion_inputs, "AnimateDiff"),
    Family(
        "UNetSpatioTemporalConditionModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 1,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "cross_attention_dim": 16,
            "num_attention_heads": (2, 4),
            "projection_class_embeddings_input_dim": 24,
            "addition_time_embed_dim": 8,
        },
        lambda draw: {
            "sample": draw(2, 3, 4, 8, 8),
            "timestep": 10,
            "encoder_hidden_states": draw(2, 5, 16),
            "added_time_ids": draw.ints(60, 2, 3).float(),
        },
        "Stable Video Diffusion",
    ),
    Family(
        "Kandinsky3UNet",
        {
            "in_channels": 4,
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 4,
            "layers_per_block": 2,
            "block_out_channels": (16, 32),
            "cross_attention_dim": 16,
            "encoder_hid_dim": 12,
        },
        lambda draw: {
            "sample": draw(2, 4, 16, 16),
            "timestep": 10,
            "encoder_hidden_states": draw(2, 7, 12),
            "encoder_attention_mask": draw.padding(2, 7),
        },
    ),
    Family(
        "StableCascadeUNet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 16,
            "block_out_channels": (16, 16),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "clip_text_pooled_in_channels": 16,
            "timestep_ratio_embedding_dim": 8,
            "clip_seq": 2,
        },
        lambda draw: {
            "sample": draw(2, 4, 8, 8),
            "timestep_ratio": draw.uniform(2),
            "clip_text_pooled": draw(2, 1, 16),
        },
    ),
    Family(
        "DreamLiteUNetModel",
        {
            "sample_size": 8,
            "block_out_channels": (16, 32, 32),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            "num_kv_heads": 1,
            "ff_mult": 2,
            "use_linear_projection": True,
        },
        _text_inputs,
    ),
    Family(
        "UVit2DModel",
        {
            "hidden_size": 16,
            "cond_embed_dim": 16,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": 16,
            "vocab_size": 32,
            "codebook_size": 32,
            "in_channels": 16,
            "block_out_channels": 16,
            "num_res_blocks": 1,
            "downsample": True,
            "upsample": True,
            "block_num_heads": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "sample_size": 8,
        },
        lambda draw: {
            "input_ids": draw.ints(32, 2, 8, 8),
            "encoder_hidden_states": draw(2, 7, 16),
            "pooled_text_emb": draw(2, 16),
            "micro_conds": draw.ints(60, 2, 5).float(),
        },
        "aMUSEd",
    ),
]
