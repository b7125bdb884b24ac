"""The demo's two models: real diffusers pipelines at real token counts, few channels, random weights, no download."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One model and one generation with it.

    Attributes:
        tokens, num_heads, head_dim: of the widest self-attention.
        build: makes the pipeline, on the CPU in float32.
        arguments: keywords of its call, ``latents`` and the device aside.
    """

    title: str
    tokens: int
    num_heads: int
    head_dim: int
    build: Callable[[], Any]
    arguments: dict[str, Any]
    latents_shape: tuple[int, ...]

    @property
    def math_bytes(self) -> int:
        """Bytes that math attention stores at once: scores and probabilities in float32, one bool per score."""
        return self.num_heads * self.tokens**2 * (4 + 4 + 1)


def image_case(*, quick: bool = False, steps: int = 2) -> Case:
    """Stable Diffusion's UNet at 1024x1024: 16,384 tokens in its widest self-attention (quick: 256x256)."""
    side = 256 if quick else 1024
    return Case(
        title=f"image {side}x{side}, UNet2DConditionModel",
        tokens=(side // 8) ** 2,
        num_heads=2,
        head_dim=40,
        build=_image_pipeline,
        arguments=_arguments(steps, height=side, width=side),
        latents_shape=(1, 4, side // 8, side // 8),
    )


def video_case(*, quick: bool = False, steps: int = 2) -> Case:
    """Wan's video transformer at 832x480, 17 frames: 7,800 tokens, heads of 128 channels (quick: 256x192, 9 frames)."""
    height, width, frames = (192, 256, 9) if quick else (480, 832, 17)
    time = (frames - 1) // 4 + 1
    return Case(
        title=f"video {width}x{height}, {frames} frames, WanTransformer3DModel",
        tokens=time * (height // 16) * (width // 16),
        num_heads=2,
        head_dim=128,
        build=_video_pipeline,
        arguments=_arguments(steps, height=height, width=width, num_frames=frames),
        latents_shape=(1, 16, time, height // 8, width // 8),
    )


CASES = {"image": image_case, "video": video_case}


def _arguments(steps: int, **sizes: int) -> dict[str, Any]:
    """Keywords of a pipeline's call, with what a text encoder would give for 16 tokens."""
    prompt = torch.randn((1, 16, 32), generator=torch.Generator().manual_seed(0))
    return {"prompt_embeds": prompt, "num_inference_steps": steps, "guidance_scale": 1.0, **sizes}


@torch.random.fork_rng(devices=[])
def _image_pipeline() -> Any:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(80, 160),
        layers_per_block=1,
        attention_head_dim=2,  # the number of heads, in this class
        cross_attention_dim=32,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae = AutoencoderKL(
        sample_size=1024,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=8,
        mid_block_add_attention=False,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    others = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    return _ready(
        StableDiffusionPipeline(vae=vae, unet=unet, scheduler=scheduler, requires_safety_checker=False, **others)
    )


@torch.random.fork_rng(devices=[])
def _video_pipeline() -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=128,
        num_layers=2,
        ffn_dim=512,
        text_dim=32,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    vae = AutoencoderKLWan(
        base_dim=8,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[True, True],  # sic
        patch_size=2,  # a quarter of the pixels in its slow 3-D convolutions
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=8,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return _ready(WanPipeline(None, None, vae=vae, scheduler=scheduler, transformer=transformer))


def _ready(pipe: Any) -> Any:
    """The pipeline in evaluation mode, with random weights under which attention affects the result: by default it is
    close to uniform, and zero gates hide it."""
    generator = torch.Generator().manual_seed(7)
    for part in filter(lambda part: isinstance(part, torch.nn.Module), pipe.components.values()):
        for name, weight in part.eval().named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.data = noise * (1.2 / math.sqrt(weight[0].numel()))
            else:
                weight.data = 1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.1 * noise
    pipe.set_progress_bar_config(disable=True)
    return pipe
