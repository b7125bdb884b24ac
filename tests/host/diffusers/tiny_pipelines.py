"""Real diffusers pipelines at tiny sizes: no hub, no text encoders (prompts are given as embeddings), no mocks.

Default initialisation hides attention: gates are zero, scores are all alike. ``reinitialise`` makes every weight count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers as d
import pytest
import torch
from torch import Tensor, nn


@dataclass
class Tiny:
    """A pipeline and the arguments of one short run of it."""

    pipe: Any
    arguments: dict[str, Any]
    latent_shape: tuple[int, ...]
    denoiser_name: str
    text: dict[str, Tensor] = field(default_factory=dict)

    @property
    def denoiser(self) -> Any:
        return getattr(self.pipe, self.denoiser_name)

    def run(self) -> Tensor:
        """Latents of a whole run, and an image decoded from fixed latents, as one vector."""
        start = torch.Generator().manual_seed(0)
        with torch.no_grad():
            latents = self.pipe(**self.arguments, **self.text, generator=start, output_type="latent")[0]
            fixed = torch.randn(self.latent_shape, generator=torch.Generator().manual_seed(1))
            image = self.pipe.vae.decode(fixed, return_dict=False)[0]
        return torch.cat([latents.flatten(), image.flatten()])


def require(model: nn.Module, method: str) -> None:
    """Skip the test where this version of diffusers has no such method on this model."""
    if not hasattr(model, method):
        pytest.skip(f"{type(model).__name__} of diffusers {d.__version__} has no {method}")


def reinitialise(model: nn.Module, *, gain: float = 1.2, seed: int = 7) -> nn.Module:
    """Random weights under which attention, masks and positions all move the output."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random)
        if parameter.ndim >= 2:
            values *= gain / math.sqrt(parameter[0].numel())
        elif "norm" in name and name.endswith("weight"):
            values = 1 + 0.2 * values
        else:
            values *= 0.1
        parameter.data = values
    return model.eval()


def tiny_unet(**changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    return reinitialise(d.UNet2DConditionModel(**{**settings, **changes}))


def tiny_flux_transformer() -> Any:
    model = d.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return reinitialise(model)


def sd15() -> Tiny:
    pipe = d.StableDiffusionPipeline(
        unet=tiny_unet(),
        vae=_vae(4),
        text_encoder=None,
        tokenizer=None,
        scheduler=d.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    text = {"prompt_embeds": _random(1, 7, 32), "negative_prompt_embeds": _random(1, 7, 32, seed=2)}
    return _tiny(pipe, "unet", (1, 4, 8, 8), text, height=32, width=32)


def sdxl() -> Tiny:
    unet = tiny_unet(
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
    )
    pipe = d.StableDiffusionXLPipeline(
        unet=unet,
        vae=_vae(4),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        scheduler=d.EulerDiscreteScheduler(),
        add_watermarker=False,
        force_zeros_for_empty_prompt=False,
    )
    text = {
        "prompt_embeds": _random(1, 7, 64),
        "negative_prompt_embeds": _random(1, 7, 64, seed=2),
        "pooled_prompt_embeds": _random(1, 32),
        "negative_pooled_prompt_embeds": _random(1, 32, seed=2),
    }
    return _tiny(pipe, "unet", (1, 4, 8, 8), text, height=32, width=32)


def flux() -> Tiny:
    pipe = d.FluxPipeline(
        transformer=tiny_flux_transformer(),
        vae=_vae(1, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
    )
    text = {"prompt_embeds": _random(1, 12, 32), "pooled_prompt_embeds": _random(1, 32)}
    return _tiny(pipe, "transformer", (1, 1, 8, 8), text, height=32, width=32)


def wan() -> Tiny:
    if not hasattr(d, "WanPipeline"):
        pytest.skip(f"diffusers {d.__version__} has no Wan")
    transformer = d.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    vae = d.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    pipe = d.WanPipeline(
        transformer=reinitialise(transformer),
        vae=reinitialise(vae),
        text_encoder=None,
        tokenizer=None,
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    text = {"prompt_embeds": _random(1, 16, 32), "negative_prompt_embeds": _random(1, 16, 32, seed=2)}
    return _tiny(pipe, "transformer", (1, 16, 1, 4, 4), text, height=32, width=32, num_frames=5)


#: the families that this library promises to serve
BUILD: dict[str, Callable[[], Tiny]] = {"sd15": sd15, "sdxl": sdxl, "flux": flux, "wan": wan}


def _vae(latent_channels: int, **settings: Any) -> nn.Module:
    vae = d.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        sample_size=32,
        **settings,
    )
    return reinitialise(vae)


def _tiny(pipe: Any, denoiser_name: str, latent_shape: tuple[int, ...], text: dict, **arguments: Any) -> Tiny:
    pipe.set_progress_bar_config(disable=True)
    return Tiny(pipe, {"num_inference_steps": 2, **arguments}, latent_shape, denoiser_name, text)


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
