"""Autoencoders whose encoder or decoder attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .family import Draw, Family


def _sample(*shape: int) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"sample": draw(*shape)}


_KL: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
_WAN = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_HUNYUAN = {
    "latent_channels": 4,
    "block_out_channels": (16, 16, 16),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
}

FAMILIES = [
    Family("AutoencoderKL", _KL, _sample(2, 3, 16, 16)),
    Family("AutoencoderKLFlux2", _KL, _sample(2, 3, 16, 16)),
    Family(
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (16, 32),
            "layers_per_down_block": 1,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (16, 32),
            "layers_per_up_block": 1,
            "norm_num_groups": 8,
        },
        lambda draw: {"sample": draw(2, 3, 16, 16), "mask": (draw(2, 1, 16, 16) > 0).float()},
    ),
    Family(
        "AutoencoderKLTemporalDecoder",
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4},
        lambda draw: {"sample": draw(2, 3, 16, 16), "num_frames": 2},
    ),
    Family("VQModel", {**_KL, "latent_channels": 3, "num_vq_embeddings": 16}, _sample(2, 3, 16, 16)),
    Family(
        "ConsistencyDecoderVAE",
        {
            "encoder_block_out_channels": (16, 32),
            "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
            "encoder_norm_num_groups": 8,
            "decoder_add_attention": False,
            "decoder_block_out_channels": (16, 32),
            "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
            "decoder_layers_per_block": 1,
            "decoder_norm_num_groups": 8,
            "decoder_time_embedding_type": "learned",
            "decoder_num_train_timesteps": 1024,
            "latent_channels": 4,
        },
        lambda draw: {"sample": draw(2, 3, 16, 16), "generator": draw.random},
    ),
    Family("AutoencoderKLWan", _WAN, _sample(1, 3, 5, 16, 16), "Wan 2.1"),
    Family(
        "AutoencoderKLWan",
        {**_WAN, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 4},
        _sample(1, 3, 5, 16, 16),
        "Wan 2.2",
    ),
    Family("AutoencoderKLQwenImage", _WAN, _sample(1, 3, 1, 16, 16)),
    Family("AutoencoderKLQwenImage21", {**_WAN, "decoder_base_dim": 4}, _sample(1, 4, 1, 16, 16)),
    Family(
        "AutoencoderKLHunyuanVideo",
        {
            "latent_channels": 4,
            "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
            "block_out_channels": (8, 8, 8, 8),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        _sample(1, 3, 9, 16, 16),
    ),
    Family("AutoencoderKLHunyuanVideo15", {**_HUNYUAN, "temporal_compression_ratio": 4}, _sample(1, 3, 5, 16, 16)),
    Family(
        "AutoencoderKLHunyuanImageRefiner",
        {**_HUNYUAN, "temporal_compression_ratio": 4},
        _sample(1, 3, 5, 16, 16),
    ),
    Family(
        "AutoencoderKLHunyuanImage",
        {**_HUNYUAN, "block_out_channels": (32, 32, 32), "in_channels": 3, "out_channels": 3, "sample_size": 16},
        _sample(2, 3, 16, 16),
    ),
    Family(
        "AutoencoderKLMochi",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
        },
        _sample(1, 3, 7, 16, 16),
    ),
    Family(
        "AutoencoderKLAllegro",
        {
            "latent_channels": 4,
            "block_out_channels": (16, 16, 16, 16),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "sample_size": 16,
        },
        _sample(1, 3, 24, 16, 16),
        prepare=lambda model: model.enable_tiling(),
    ),
    Family(
        "AutoencoderKLCosmos",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8, 8, 8),
            "decode_block_out_channels": (8, 8, 8, 8),
            "attention_resolutions": (8,),
            "resolution": 64,
            "num_layers": 1,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
            "patch_size": 4,
        },
        _sample(1, 3, 9, 32, 32),
    ),
    Family(
        "AutoencoderVidTok",
        {"ch": 32, "ch_mult": [1, 2, 2, 2], "z_channels": 4, "num_res_blocks": 1, "regularizer": "kl"},
        _sample(1, 3, 17, 16, 16),
    ),
    Family(
        "AutoencoderKLMiniMaxH3",
        {
            "latent_channels": 4,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "spatial_downsample_factors": (2, 2),
            "temporal_downsample_factors": (2, 2),
            "norm_num_groups": 8,
            "decoder_num_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 8,
            "decoder_num_register_tokens": 2,
            "decoder_ffn_mult": 2,
            "clip_length": 17,
            "token_drop": 3,
            "latents_mean": (0.0,) * 4,
            "latents_std": (1.0,) * 4,
        },
        _sample(1, 3, 22, 8, 8),
    ),
    Family(
        "AutoencoderKLMiniMaxH3Audio",
        {
            "encoder_dim": 4,
            "encoder_rates": (2, 2),
            "latent_dim": 32,
            "latent_channels": 8,
            "num_attention_heads": 2,
            "decoder_dim": 16,
            "decoder_rates": (2, 2),
            "decoder_kernel_sizes": (4, 4),
            "resblock_kernel_sizes": (3, 7),
            "resblock_dilation_sizes": ((1, 3), (1, 3)),
            "latents_mean": [0.0] * 8,
            "latents_std": [1.0] * 8,
        },
        _sample(2, 1, 48),
    ),
    Family(
        "AutoencoderKLKVAEAudio",
        {
            "encoder_dim": 4,
            "encoder_rates": [2, 2],
            "latent_dim": 16,
            "codebook_dim": 4,
            "decoder_dim": 16,
            "decoder_rates": [2, 2],
            "attn_num_heads": 2,
        },
        _sample(2, 1, 64),
    ),
    Family(
        "AutoencoderSAME",
        {
            "patch_size": 4,
            "encoder_channels": 16,
            "encoder_c_mults": [1, 2],
            "encoder_strides": [2, 2],
            "encoder_transformer_depths": [1, 1],
            "latent_dim": 8,
            "use_differential_attention": True,
            "dim_heads": 8,
            "ff_mult": 2,
        },
        _sample(2, 2, 128),
    ),
    Family(
        "MMAudioVAE",
        {"mel_bins": 8, "latent_channels": 4, "hidden_channels": 16, "layers_per_block": 1},
        _sample(2, 8192),
    ),
    Family(
        "AutoencoderRAE",
        {
            "encoder_type": "dinov2",
            "encoder_hidden_size": 64,
            "encoder_patch_size": 8,
            "encoder_num_hidden_layers": 1,
            "encoder_input_size": 32,
            "patch_size": 4,
            "image_size": 16,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 32,
        },
        _sample(2, 3, 32, 32),
        # the encoder is a model of Transformers, which has an interface of its own
        prepare=lambda model: model.encoder.set_attn_implementation("eager"),
    ),
    Family(
        "AutoencoderDC",
        {
            "in_channels": 3,
            "latent_channels": 4,
            "attention_head_dim": 4,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
            "decoder_act_fns": "silu",
        },
        _sample(2, 3, 16, 16),
    ),
    Family(
        "LTX2VideoDiffusionDecoderModel",
        {
            "latent_channels": 4,
            "patch_size": 2,
            "decoder_head_dim": 16,
            "decoder_stage_channels": (32, 32, 16, 16, 16),
            "decoder_stage_depths": (1, 1, 1, 1, 1),
            "decoder_stage_kernels": ((3, 3, 3),) * 4,
            "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 2, 2), (1, 1, 1)),
            "decoder_upsample_channel_reductions": (1, 2, 1, 1),
            "decoder_stage5_kernel": (3, 3, 3),
            "decoder_t_emb_dim": 32,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
        },
        lambda draw: {"z": draw(1, 4, 2, 3, 3), "generator": draw.random},
    ),
]
