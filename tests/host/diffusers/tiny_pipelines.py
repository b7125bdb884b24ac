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
    _need("WanPipeline")
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


def sd3() -> Tiny:
    transformer = d.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    pipe = d.StableDiffusion3Pipeline(
        transformer=reinitialise(transformer),
        vae=_vae(4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=None,
        text_encoder_2=None,
        text_encoder_3=None,
        tokenizer=None,
        tokenizer_2=None,
        tokenizer_3=None,
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
    )
    text = {
        "prompt_embeds": _random(1, 12, 32),
        "negative_prompt_embeds": _random(1, 12, 32, seed=2),
        "pooled_prompt_embeds": _random(1, 64),
        "negative_pooled_prompt_embeds": _random(1, 64, seed=2),
    }
    return _tiny(pipe, "transformer", (1, 4, 8, 8), text, height=16, width=16)


def ltx() -> Tiny:
    _need("LTXPipeline")
    transformer = d.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    four, five = (8,) * 4, (1,) * 5
    vae = d.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=four,
        decoder_block_out_channels=four,
        layers_per_block=five,
        decoder_layers_per_block=five,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    pipe = d.LTXPipeline(
        transformer=reinitialise(transformer),
        vae=reinitialise(vae),
        text_encoder=None,
        tokenizer=None,
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
    )
    return _tiny(pipe, "transformer", (1, 8, 1, 4, 4), _padded(9, 32), height=32, width=32, num_frames=9)


def cogvideox() -> Tiny:
    transformer = d.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=2,
        sample_width=2,
        sample_height=2,
        sample_frames=9,
        max_text_seq_length=16,
    )
    vae = d.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    pipe = d.CogVideoXPipeline(
        transformer=reinitialise(transformer),
        vae=reinitialise(vae),
        text_encoder=None,
        tokenizer=None,
        scheduler=d.DDIMScheduler(),
    )
    text = {"prompt_embeds": _random(1, 16, 32), "negative_prompt_embeds": _random(1, 16, 32, seed=2)}
    return _tiny(pipe, "transformer", (1, 4, 2, 2, 2), text, height=16, width=16, num_frames=9)


def hunyuanvideo() -> Tiny:
    _need("HunyuanVideoPipeline")
    transformer = d.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    vae = d.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    pipe = d.HunyuanVideoPipeline(
        transformer=reinitialise(transformer),
        vae=reinitialise(vae),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    text = {
        "prompt_embeds": _random(1, 9, 16),
        "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0]]),
        "pooled_prompt_embeds": _random(1, 8),
    }
    return _tiny(pipe, "transformer", (1, 4, 2, 2, 2), text, height=16, width=16, num_frames=5)


#: the pipelines that are run as a whole
BUILD: dict[str, Callable[[], Tiny]] = {
    "sd15": sd15,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "wan": wan,
    "ltx": ltx,
    "cogvideox": cogvideox,
    "hunyuanvideo": hunyuanvideo,
}


def _need(name: str) -> None:
    if not hasattr(d, name):
        pytest.skip(f"diffusers {d.__version__} has no {name}")


def _padded(tokens: int, width: int) -> dict[str, Tensor]:
    """Embeddings of a prompt and of none, and their masks."""
    mask = torch.ones(1, tokens, dtype=torch.bool)
    mask[:, tokens - 3 :] = False
    none = torch.zeros(1, tokens, dtype=torch.bool)
    none[:, :2] = True
    return {
        "prompt_embeds": _random(1, tokens, width),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": _random(1, tokens, width, seed=2),
        "negative_prompt_attention_mask": none,
    }


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
