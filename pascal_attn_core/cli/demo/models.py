"""The demo's two models: real diffusers pipelines at real token counts, few channels, random weights, no download."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PROMPT = (1, 16, 32)  # tokens and channels of what a text encoder would give


@dataclass(frozen=True)
class Case:
    """One model and one generation with it.

    Attributes:
        name: short name, used in file names.
        title: what it is, for tables.
        model: the classes at work.
        tokens, num_heads, head_dim: of the widest self-attention.
        build: makes the pipeline, on the CPU in float32.
        arguments: keywords of its call, ``latents`` and the device aside.
        latents_shape: shape of the starting latents.
        warm_up: keywords that turn the call into a very small one with the same attention layers.
        small: shape of its latents.
        decode: pipeline, latents -> pictures as uint8 arrays [height, width, 3], in the order of time.
    """

    name: str
    title: str
    model: str
    tokens: int
    num_heads: int
    head_dim: int
    build: Callable[[], Any]
    arguments: dict[str, Any]
    latents_shape: tuple[int, ...]
    warm_up: dict[str, Any]
    small: tuple[int, ...]
    decode: Callable[[Any, Tensor], list[Any]]

    @property
    def math_bytes(self) -> int:
        """What math attention stores at once: the scores and the probabilities in float32, one bool per score."""
        return self.num_heads * self.tokens**2 * (4 + 4 + 1)


def image_case(*, quick: bool = False, steps: int = 2) -> Case:
    """Stable Diffusion's UNet at 1024x1024: 16,384 tokens in its widest self-attention (quick: 256x256)."""
    side = 256 if quick else 1024
    latents = side // 8
    return Case(
        name="image",
        title=f"image {side}x{side}",
        model="StableDiffusionPipeline, UNet2DConditionModel",
        tokens=latents**2,
        num_heads=2,
        head_dim=40,
        build=_image_pipeline,
        arguments={
            "prompt_embeds": torch.randn(_PROMPT, generator=torch.Generator().manual_seed(0)),
            "height": side,
            "width": side,
            "num_inference_steps": steps,
            "guidance_scale": 1.0,
        },
        latents_shape=(1, 4, latents, latents),
        warm_up={"height": 128, "width": 128},
        small=(1, 4, 16, 16),
        decode=_decode_image,
    )


def video_case(*, quick: bool = False, steps: int = 2) -> Case:
    """Wan's video transformer at 832x480, 17 frames: 7,800 tokens, heads of 128 channels (quick: 256x192, 9 frames)."""
    height, width, frames = (192, 256, 9) if quick else (480, 832, 17)
    time = (frames - 1) // 4 + 1
    return Case(
        name="video",
        title=f"video {width}x{height}, {frames} frames",
        model="WanPipeline, WanTransformer3DModel",
        tokens=time * (height // 16) * (width // 16),
        num_heads=2,
        head_dim=128,
        build=_video_pipeline,
        arguments={
            "prompt_embeds": torch.randn(_PROMPT, generator=torch.Generator().manual_seed(0)),
            "height": height,
            "width": width,
            "num_frames": frames,
            "num_inference_steps": steps,
            "guidance_scale": 1.0,
        },
        latents_shape=(1, 16, time, height // 8, width // 8),
        warm_up={"height": 64, "width": 64, "num_frames": 5},
        small=(1, 16, 2, 8, 8),
        decode=_decode_video,
    )


def starting_latents(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """Slow waves with some noise on them, so that the pictures show shapes, and attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    axes = [torch.linspace(-1, 1, size) for size in shape[2:]]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    latents = torch.randn(shape, generator=generator) * 0.35
    for channel in range(shape[1]):
        for _ in range(3):
            direction = torch.randn(len(axes), generator=generator) * 4
            phase = torch.rand((), generator=generator) * 2 * math.pi
            latents[:, channel] += torch.sin(torch.tensordot(direction, grid, dims=1) + phase) * 0.6
    return latents


def _image_pipeline() -> Any:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    with _seeded():
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
        pipe = StableDiffusionPipeline(
            unet=_make_every_weight_matter(unet),
            vae=_make_smooth(vae),
            text_encoder=None,
            tokenizer=None,
            scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    return _ready(pipe)


def _video_pipeline() -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    with _seeded():
        transformer = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=128,
            num_layers=2,
            ffn_dim=512,
            text_dim=32,
            patch_size=(1, 2, 2),
            in_channels=16,
            out_channels=16,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
        )
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=16,
            dim_mult=[1, 1, 1],
            num_res_blocks=0,
            temperal_downsample=[True, True],  # sic
            patch_size=2,  # a quarter of the pixels in its slow 3-D convolutions
            in_channels=12,
            out_channels=12,
            scale_factor_spatial=8,
        )
        pipe = WanPipeline(
            transformer=_make_every_weight_matter(transformer),
            vae=_make_smooth(vae),
            text_encoder=None,
            tokenizer=None,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        )
    return _ready(pipe)


def _decode_image(pipe: Any, latents: Tensor) -> list[Any]:
    with torch.no_grad():
        return _pictures(pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample)


def _decode_video(pipe: Any, latents: Tensor) -> list[Any]:
    """The first five frames: the decoder's 3-D convolutions are slow on a CPU."""
    with torch.no_grad():
        video = pipe.vae.decode(latents[:, :, :2].to(pipe.vae.dtype)).sample
    return _pictures(video[0].transpose(0, 1))


def _pictures(batch: Tensor) -> list[Any]:
    """[N, 3, H, W] -> uint8 arrays, each channel stretched to the same contrast: random weights have no meaningful
    exposure."""
    batch = batch.float().cpu()
    mean, spread = batch.mean((2, 3), keepdim=True), batch.std((2, 3), keepdim=True)
    levels = ((batch - mean) / (spread + 1e-6) * 0.22 + 0.5).clamp(0, 1) * 255
    return list(levels.round().byte().permute(0, 2, 3, 1).numpy())


@contextmanager
def _seeded(seed: int = 0) -> Iterator[None]:
    """A block whose random numbers are the same each time and which leaves the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _make_every_weight_matter(model: Any, *, gain: float = 1.2, seed: int = 7) -> Any:
    """Random weights under which attention affects the result: by default it is close to uniform, and zero gates hide
    it."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            weight.data = noise * (gain / math.sqrt(weight[0].numel()))
        elif "norm" in name and name.endswith("weight"):
            weight.data = 1 + 0.2 * noise
        else:
            weight.data = 0.1 * noise
    return model


def _make_smooth(vae: Any) -> Any:
    """Convolutions that blur: a decoder of plain random weights turns every latent into the same speckles."""
    vae.decoder.conv_out.bias.data.zero_()
    for name, weight in vae.named_parameters():
        if weight.ndim < 4:
            continue
        mix = torch.randn(weight.shape[:2])
        if name == "decoder.conv_out.weight":
            mix = mix[:3].repeat_interleave(len(mix) // 3, dim=0) * 0.3  # far from the limits at which Wan's VAE clips
        blur = torch.ones(())
        for size in weight.shape[2:]:
            line = torch.tensor([math.comb(size - 1, i) for i in range(size)], dtype=torch.float32)
            blur = blur[..., None] * line
        kernel = (blur / blur.sum()).reshape(weight.shape[2:])
        weight.data = mix.reshape(*mix.shape, *[1] * kernel.ndim) * kernel / math.sqrt(weight.shape[1])
    return vae


def _ready(pipe: Any) -> Any:
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe
