"""Models that diffusers' pipelines define themselves: conditioners, connectors, older UNets and priors."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family

_ACE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 2,
}
_ACE_POOL = {**_ACE, "audio_acoustic_hidden_dim": 8, "num_attention_pooler_hidden_layers": 2}


def _ace_condition(draw: Draw) -> dict[str, Any]:
    return {
        "text_hidden_states": draw(2, 9, 12),
        "text_attention_mask": draw.padding(2, 9),
        "lyric_hidden_states": draw(2, 11, 12),
        "lyric_attention_mask": draw.padding(2, 11),
        "refer_audio_acoustic_hidden_states_packed": draw(2, 10, 8),
        "refer_audio_order_mask": torch.tensor([0, 1]),
    }


def _audioldm2(draw: Draw) -> dict[str, Any]:
    return {
        "sample": draw(2, 4, 8, 8),
        "timestep": 10,
        "encoder_hidden_states": draw(2, 7, 16),
        "encoder_attention_mask": draw.padding(2, 7),
        "encoder_hidden_states_1": draw(2, 6, 12),
        "encoder_attention_mask_1": draw.padding(2, 6),
    }


def _unidiffuser(draw: Draw) -> dict[str, Any]:
    return {
        "latent_image_embeds": draw(2, 4, 8, 8),
        "image_embeds": draw(2, 1, 12),
        "prompt_embeds": draw(2, 7, 16),
        "timestep_img": draw.time(2),
        "timestep_text": draw.time(2),
    }


FAMILIES = [
    Family(
        "AudioLDM2UNet2DConditionModel",
        {
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": ([None, 16, 12], [None, 16, 12]),
            "attention_head_dim": 2,
        },
        _audioldm2,
    ),
    Family(
        "AceStepConditionEncoder",
        {
            **_ACE,
            "text_hidden_dim": 12,
            "timbre_hidden_dim": 8,
            "num_lyric_encoder_hidden_layers": 2,
            "num_timbre_encoder_hidden_layers": 2,
        },
        _ace_condition,
    ),
    Family(
        "AceStepAudioTokenizer",
        {**_ACE_POOL, "fsq_dim": 16, "fsq_input_levels": [5, 5]},
        lambda draw: {"hidden_states": draw(2, 4, 5, 8)},
    ),
    Family("AceStepAudioTokenDetokenizer", _ACE_POOL, lambda draw: {"hidden_states": draw(2, 4, 16)}),
    Family(
        "pipelines.ltx2.connectors.LTX2TextConnectors",
        {
            "caption_channels": 16,
            "text_proj_in_factor": 3,
            "video_connector_num_attention_heads": 2,
            "video_connector_attention_head_dim": 8,
            "video_connector_num_layers": 1,
            "video_connector_num_learnable_registers": 4,
            "audio_connector_num_attention_heads": 2,
            "audio_connector_attention_head_dim": 8,
            "audio_connector_num_layers": 1,
            "audio_connector_num_learnable_registers": 4,
            "connector_rope_base_seq_len": 32,
            "rope_double_precision": False,
        },
        lambda draw: {
            "text_encoder_hidden_states": draw(2, 8, 16 * 3),
            "attention_mask": draw.padding(2, 8).flip(1).long(),
        },
    ),
    Family(
        "pipelines.ltx2.duration_head.LTX2DurationHead",
        {
            "video_cross_attention_dim": 16,
            "audio_cross_attention_dim": 12,
            "pooler_hidden_dim": 16,
            "num_pooler_heads": 2,
            "mlp_hidden_dim": 16,
        },
        lambda draw: {"video_tokens": draw(2, 9, 16), "audio_tokens": draw(2, 7, 12)},
    ),
    Family(
        "UniDiffuserModel",
        {
            "text_dim": 16,
            "clip_img_dim": 12,
            "num_text_tokens": 7,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "norm_num_groups": 4,
        },
        _unidiffuser,
    ),
    Family(
        "pipelines.deprecated.wuerstchen.modeling_wuerstchen_prior.WuerstchenPrior",
        {"c_in": 4, "c": 16, "c_cond": 12, "c_r": 8, "depth": 1, "nhead": 2},
        lambda draw: {"x": draw(2, 4, 6, 6), "r": draw.uniform(2), "c": draw(2, 7, 12)},
    ),
    Family(
        "pipelines.deprecated.wuerstchen.modeling_wuerstchen_diffnext.WuerstchenDiffNeXt",
        {
            "c_r": 8,
            "c_cond": 16,
            "c_hidden": [16, 16],
            "nhead": [-1, 2],
            "blocks": [1, 1],
            "level_config": ["CT", "CTA"],
            "inject_effnet": [False, True],
            "effnet_embd": 4,
            "clip_embd": 12,
        },
        lambda draw: {"x": draw(2, 4, 8, 8), "r": draw.uniform(2), "effnet": draw(2, 4, 4, 4), "clip": draw(2, 5, 12)},
    ),
    Family(
        "DreamLiteTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
        },
        lambda draw: {
            "hidden_states": draw(2, 16, 6, 6),
            "encoder_hidden_states": draw(2, 7, 16),
            "encoder_attention_mask": draw.padding(2, 7),
        },
    ),
    Family(
        "UNet1DModel",
        {"sample_size": 64, "time_embedding_type": "positional", "extra_in_channels": 32},
        lambda draw: {"sample": draw(2, 2, 64), "timestep": draw.time(2)},
        "Dance Diffusion",
    ),
    Family(
        "AutoencoderKLLTX2Audio",
        {
            "latent_channels": 4,
            "base_channels": 16,
            "ch_mult": (1, 2),
            "resolution": 16,
            "num_res_blocks": 1,
            "norm_type": "pixel",
            "mid_block_add_attention": True,
            "mel_bins": 16,
        },
        lambda draw: {"sample": draw(2, 2, 8, 16)},
    ),
]
