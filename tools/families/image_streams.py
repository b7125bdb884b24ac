"""Image transformers in which text and image are two streams that attend jointly: Stable Diffusion 3, Flux and kin."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family, before_031


def _packed(draw: Draw, text: int = 9, width: int = 16, **more: Any) -> dict[str, Any]:
    """A packed image with its grid and a text, as Flux and its kin take them."""
    image_ids, text_ids = draw.grid(1, 3, 4), torch.zeros(text, 3)
    if before_031():
        image_ids, text_ids = image_ids.expand(2, -1, -1), text_ids.expand(2, -1, -1)
    return {
        "hidden_states": draw(2, 12, 4),
        "encoder_hidden_states": draw(2, text, width),
        "timestep": draw.uniform(2),
        "img_ids": image_ids,
        "txt_ids": text_ids,
        **more,
    }


def _flux2_ids(draw: Draw, text: int) -> dict[str, Any]:
    return {"img_ids": draw.grid(1, 3, 4, 1), "txt_ids": draw.grid(1, 1, 1, text)}


def _joint_mask(draw: Draw) -> dict[str, Any]:
    both = torch.cat([draw.padding(2, 9), torch.ones(2, 12, dtype=torch.bool)], dim=1)
    return {"joint_attention_kwargs": {"attention_mask": both[:, None, None, :]}}


def _sd3(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 8, 8),
        "encoder_hidden_states": draw(2, 9, 16),
        "pooled_projections": draw(2, 12),
        "timestep": draw.time(2),
    }


def _qwen(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 12, 16),
        "encoder_hidden_states": draw(2, 9, 16),
        "encoder_hidden_states_mask": draw.padding(2, 9),
        "timestep": draw.uniform(2),
        "img_shapes": [[(1, 3, 4)]] * 2,
    }


def _fibo(draw: Draw) -> dict[str, Any]:
    inputs = _packed(draw, width=32)
    layers = [inputs["encoder_hidden_states"][..., :16], inputs["encoder_hidden_states"][..., 16:]]
    return {**inputs, "text_encoder_layers": layers, **_joint_mask(draw)}


def _fibo2(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 8, 8),
        "timestep": draw.uniform(2),
        "encoder_hidden_states": draw(2, 2, 9, 16),
        "encoder_attention_mask": draw.padding(2, 9),
        "context_latents": [draw(2, 4, 4, 8)],
    }


def _hunyuan_image(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 4, 4),
        "timestep": draw.time(2).float(),
        "encoder_hidden_states": draw(2, 7, 16),
        "encoder_attention_mask": draw.padding(2, 7),
        "encoder_hidden_states_2": draw(2, 6, 8),
        "encoder_attention_mask_2": draw.padding(2, 6),
    }


def _joyimage_plus(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 3, 16, 1, 2, 2),
        "encoder_hidden_states": draw(1, 9, 16),
        "timestep": draw.time(1).float(),
        "shape_list": [[(1, 1, 1), (1, 1, 2)]],
    }


_FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": [4, 4, 8],
}
_POOLED = {**_FLUX, "pooled_projection_dim": 12}
_SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 12,
    "out_channels": 4,
    "pos_embed_max_size": 8,
}
_QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (8, 4, 4),
}
_JOY = {
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 16,
    "num_layers": 1,
    "rope_dim_list": [4, 6, 6],
    "theta": 256,
}

FAMILIES = [
    Family("SD3Transformer2DModel", _SD3, _sd3, "SD3"),
    Family("SD3Transformer2DModel", {**_SD3, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}, _sd3, "SD3.5"),
    Family(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        lambda draw: {
            "hidden_states": draw(2, 4, 8, 8),
            "encoder_hidden_states": draw(2, 9, 16),
            "timestep": draw.uniform(2),
        },
    ),
    Family("FluxTransformer2DModel", _POOLED, lambda draw: _packed(draw, pooled_projections=draw(2, 12))),
    Family(
        "Flux2Transformer2DModel",
        {**_FLUX, "axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 32},
        lambda draw: {**_packed(draw), **_flux2_ids(draw, 9), "guidance": draw.uniform(2)},
    ),
    Family(
        "Flux3Transformer2DModel",
        {
            "in_channels": 4,
            "cond_in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "timestep_channels": 32,
            "mlp_ratio": 2.0,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        lambda draw: {
            **_packed(draw),
            **_flux2_ids(draw, 9),
            "image_cond_hidden_states": draw(2, 6, 4),
            "image_cond_ids": draw.grid(1, 2, 3, 1) + 10,
        },
    ),
    Family(
        "ChromaTransformer2DModel",
        {**_FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        lambda draw: _packed(draw, attention_mask=torch.cat([draw.padding(2, 9), draw.padding(2, 14)[:, :12]], 1)),
    ),
    Family("BriaTransformer2DModel", {**_FLUX, "pooled_projection_dim": None}, _packed),
    Family(
        "BriaFiboTransformer2DModel",
        {**_FLUX, "joint_attention_dim": 32, "text_encoder_dim": 16, "pooled_projection_dim": None},
        _fibo,
    ),
    Family(
        "BriaFibo2Transformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "cap_feat_dim": 16,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 1,
            "min_num_gist_tokens": 4,
            "max_num_gist_tokens": 8,
            "gist_step": 2,
            "gist_min_text_len": 4,
            "gist_max_text_len": 8,
            "axes_dims": (8, 4, 4),
            "axes_lens": (64, 32, 32),
        },
        _fibo2,
    ),
    Family(
        "LongCatImageTransformer2DModel",
        _POOLED,
        lambda draw: _packed(draw, guidance=draw.uniform(2)),
    ),
    Family("OvisImageTransformer2DModel", {**_FLUX, "out_channels": 4}, _packed),
    Family("QwenImageTransformer2DModel", _QWEN, _qwen),
    Family(
        "QwenImage21Transformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "context_in_dim": 16,
            "mlp_ratio": 2,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda draw: {
            "hidden_states": draw(2, 4 + 16, 8),
            "encoder_hidden_states": draw(2, 9, 16),
            "encoder_hidden_states_mask": draw.padding(2, 9),
            "timestep": draw.uniform(2),
            "img_shapes": [[(1, 2, 2), (1, 4, 4)]] * 2,
            "img_mask": torch.tensor([[0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1]] * 2).bool(),  # 4 tokens a slot
        },
    ),
    Family(
        "NucleusMoEImageTransformer2DModel",
        {**_QWEN, "moe_enabled": False, "capacity_factors": [8.0]},
        _qwen,
    ),
    Family(
        "HunyuanImageTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "rope_axes_dim": (4, 4),
        },
        _hunyuan_image,
    ),
    Family(
        "JoyImageEditTransformer3DModel",
        _JOY,
        lambda draw: {
            "hidden_states": draw(2, 16, 1, 4, 6),
            "encoder_hidden_states": draw(2, 9, 16),
            "timestep": draw.time(2).float(),
        },
    ),
    Family("JoyImageEditPlusTransformer3DModel", _JOY, _joyimage_plus),
]
