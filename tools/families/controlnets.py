"""ControlNets: networks beside a model, with attention of their own."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from . import image, image_single, image_streams, unets
from .family import Draw, Family, reinitialise

_CONTROL: dict[str, Any] = {
    "in_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "conditioning_embedding_out_channels": (8, 8),
}


def _of(families: list[Family], model: str) -> Family:
    return next(family for family in families if family.model == model)


_FLUX = _of(image_streams.FAMILIES, "FluxTransformer2DModel")
_SD3 = _of(image_streams.FAMILIES, "SD3Transformer2DModel")
_QWEN = _of(image_streams.FAMILIES, "QwenImageTransformer2DModel")
_SANA = _of(image.FAMILIES, "SanaTransformer2DModel")
_HUNYUAN = _of(image.FAMILIES, "HunyuanDiT2DModel")
_Z_IMAGE = _of(image_single.FAMILIES, "ZImageTransformer2DModel")
_UNET = _of(unets.FAMILIES, "UNet2DConditionModel")


def _controlled(draw: Draw, size: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "sample": draw(2, 4, 8, 8),
        "timestep": 10,
        "encoder_hidden_states": draw(2, 7, 16),
        "controlnet_cond": draw(2, 3, size, size),
        **more,
    }


def _union(draw: Draw) -> dict[str, Any]:
    return {
        **_controlled(draw),
        "controlnet_cond": [draw(2, 3, 16, 16)],
        "control_type": torch.eye(6)[[1, 1]],
        "control_type_idx": [1],
    }


def _sparse(draw: Draw) -> dict[str, Any]:
    return {
        "sample": draw(1, 4, 3, 8, 8),
        "timestep": 10,
        "encoder_hidden_states": draw(unets.motion_texts(), 7, 16),
        "controlnet_cond": draw(1, 3, 3, 16, 16),
        "conditioning_mask": torch.ones(1, 1, 3, 16, 16),
    }


def _cosmos(draw: Draw) -> dict[str, Any]:
    return {
        "controls_latents": draw(1, 16, 1, 8, 8),
        "latents": draw(1, 16, 1, 8, 8),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": (draw(1, 9, 32), draw(1, 4, 32)),
        "condition_mask": torch.ones(1, 1, 1, 8, 8),
        "padding_mask": torch.zeros(1, 1, 8, 8),
    }


def _resize_without_torchvision(controlnet: Any) -> None:
    """diffusers imports torchvision for one nearest-neighbour resize, where it is installed."""
    module = sys.modules[type(controlnet).__module__]
    if not hasattr(module, "transforms"):
        functional = SimpleNamespace(resize=lambda image, size, interpolation: F.interpolate(image, size))
        module.transforms = SimpleNamespace(  # type: ignore[attr-defined]
            functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest")
        )


def _share_z_image(controlnet: Any) -> None:
    controlnet.from_transformer(controlnet, reinitialise(_Z_IMAGE.build()))


FAMILIES = [
    Family("ControlNetModel", _CONTROL, lambda d: _controlled(d, attention_mask=None)),
    Family(
        "ControlNetUnionModel",
        {
            **_CONTROL,
            "addition_time_embed_dim": 8,
            "num_trans_channel": 16,
            "num_trans_head": 2,
            "num_proj_channel": 16,
        },
        _union,
    ),
    Family(
        "UNetControlNetXSModel",
        {
            "sample_size": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "upcast_attention": False,
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
            "ctrl_conditioning_embedding_out_channels": (4, 4),
        },
        _controlled,
    ),
    Family(
        "SparseControlNetModel",
        {
            **_CONTROL,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "conditioning_channels": 3,
            "motion_num_attention_heads": 2,
            "use_simplified_condition_embedding": False,
        },
        _sparse,
    ),
    Family(
        "FluxControlNetModel",
        _FLUX.settings,
        lambda draw: {**_FLUX.inputs(draw), "controlnet_cond": draw(2, 12, 4)},
    ),
    Family(
        "SD3ControlNetModel",
        {**_SD3.settings, "num_layers": 1},
        lambda draw: {**_SD3.inputs(draw), "controlnet_cond": draw(2, 4, 8, 8)},
    ),
    Family(
        "QwenImageControlNetModel",
        {**_QWEN.settings},
        lambda draw: {**_QWEN.inputs(draw), "controlnet_cond": draw(2, 12, 16)},
    ),
    Family(
        "SanaControlNetModel",
        _SANA.settings,
        lambda draw: {**_SANA.inputs(draw), "controlnet_cond": draw(2, 4, 8, 8)},
    ),
    Family(
        "HunyuanDiT2DControlNetModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "transformer_num_layers": 4,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "hidden_size": 16,
            "text_len": 6,
            "text_len_t5": 7,
        },
        lambda draw: {**_HUNYUAN.inputs(draw), "controlnet_cond": draw(2, 4, 8, 8)},
    ),
    Family(
        "CosmosControlNetModel",
        {
            "n_controlnet_blocks": 1,
            "in_channels": 18,
            "latent_channels": 18,
            "model_channels": 32,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "mlp_ratio": 2,
            "text_embed_dim": 32,
            "adaln_lora_dim": 4,
            "max_size": (4, 32, 32),
            "img_context_dim_in": 32,
            "img_context_dim_out": 32,
        },
        _cosmos,
        prepare=_resize_without_torchvision,
    ),
    Family(
        "ZImageControlNetModel",
        {
            "control_layers_places": [0],
            "control_refiner_layers_places": [0],
            "control_in_dim": 16,
            "dim": 32,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
        },
        lambda draw: {**_Z_IMAGE.inputs(draw), "control_context": [draw(16, 1, 8, 8), draw(16, 1, 16, 16)]},
        prepare=_share_z_image,
    ),
]
