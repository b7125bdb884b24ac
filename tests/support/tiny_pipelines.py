"""Real, tiny diffusers pipelines of the models in ``tools/families``; prompts are given as embeddings."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers as d
import pytest
import torch
from torch import Tensor, nn

from tools.families import Family, NotInThisVersion, families, reinitialise, sections
from tools.families.proof import Calls

__all__ = ["BUILD", "FAMILIES", "SOME", "Tiny", "assert_same", "do", "reinitialise", "stock_calls", "stock_of"]

FAMILIES = {family.name: family for family in families()}
_ALL = {family.name: family for those in sections().values() for family in those}  # also those without attention
#: families for what takes too long with all
SOME = [
    "UNet2DConditionModel (SDXL)",
    "SD3Transformer2DModel (SD3)",
    "FluxTransformer2DModel",
    "WanTransformer3DModel (text to video)",
    "LTXVideoTransformer3DModel",
    "CogVideoXTransformer3DModel (CogVideoX)",
    "HunyuanVideoTransformer3DModel (text to video)",
    "QwenImageTransformer2DModel",
    "AutoencoderKL",
]


def stock_calls(function: Callable[[], Any]) -> tuple[Any, Calls]:
    """The result of a function, and its calls of torch's scaled_dot_product_attention."""
    with Calls() as calls:
        return function(), calls


def do(*steps: Callable[[], Any], backwards: bool) -> None:
    """Take the steps from first to last, or the other way round."""
    for step in reversed(steps) if backwards else steps:
        step()


def assert_same(ours: Tensor, stock: Tensor) -> None:
    """Raises unless two float32 results differ by rounding only: 1e-4 of their size, through a whole network."""
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4 * stock.abs().max().item())


def require(model: nn.Module, method: str) -> None:
    """Skip the test where this version of diffusers has no such method on this model."""
    if not hasattr(model, method):
        pytest.skip(f"{type(model).__name__} of diffusers {d.__version__} has no {method}")


def family(name: str) -> Family:
    """The family; the test is skipped where this diffusers does not have it."""
    if FAMILIES[name].model_class() is None:
        pytest.skip(f"this diffusers has no {name}")
    return FAMILIES[name]


def model(name: str, **sizes: Any) -> Any:
    """A model of the family, with these arguments in the place of the family's."""
    try:
        return dataclasses.replace(_ALL[name], sizes=_ALL[name].sizes | sizes).build()
    except NotInThisVersion as missing:
        pytest.skip(f"diffusers {d.__version__}: {missing}")


def tiny_unet(**changes: Any) -> Any:
    return model("UNet2DConditionModel (Stable Diffusion 1.5)", **changes)


def run_unet(unet: Any, seed: int = 0, **arguments: Any) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    sample, text = torch.randn(2, 4, 8, 8, generator=random), torch.randn(2, 7, 16, generator=random)
    with torch.no_grad():
        return unet(sample, 10, encoder_hidden_states=text, **arguments).sample


@dataclass
class Tiny:
    """A pipeline and the arguments of one short run of it."""

    pipe: Any
    denoiser_name: str
    latent_shape: tuple[int, ...]
    text: dict[str, Tensor]
    arguments: dict[str, Any]

    @property
    def denoiser(self) -> Any:
        return getattr(self.pipe, self.denoiser_name)

    def run(self) -> Tensor:
        """Latents of a whole run, and an image decoded from fixed latents, as one vector."""
        start = torch.Generator().manual_seed(0)
        with torch.no_grad():
            latents = self.pipe(**self.arguments, **self.text, generator=start, output_type="latent")[0]
            image = self.pipe.vae.decode(_random(*self.latent_shape), return_dict=False)[0]
        return torch.cat([latents.flatten(), image.flatten()])


def _tiny(
    name: str,
    denoiser: Any,
    vae: Any,
    scheduler: Any,
    latent_shape: tuple[int, ...],
    text: dict[str, Tensor],
    *,
    parts: dict[str, Any] | None = None,
    **arguments: Any,
) -> Tiny:
    """The pipeline of this name; components that are not given are absent."""
    if not hasattr(d, name):
        pytest.skip(f"diffusers {d.__version__} has no {name}")
    pipeline_class = getattr(d, name)
    given = list(inspect.signature(pipeline_class.__init__).parameters.values())[1:]
    absent = {parameter.name: None for parameter in given if parameter.default is parameter.empty}
    denoiser_name = "unet" if "unet" in absent else "transformer"
    components = {**absent, denoiser_name: denoiser, "vae": vae, "scheduler": scheduler, **(parts or {})}
    pipe = pipeline_class(**components)
    pipe.set_progress_bar_config(disable=True)
    return Tiny(pipe, denoiser_name, latent_shape, text, {"num_inference_steps": 2, **arguments})


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _prompt(tokens: int, width: int, pooled: int = 0, *, negative: bool = True) -> dict[str, Tensor]:
    """Embeddings of a prompt and, for guidance, of none."""
    shapes = {"prompt_embeds": (1, tokens, width)} | ({"pooled_prompt_embeds": (1, pooled)} if pooled else {})
    found = {name: _random(*shape) for name, shape in shapes.items()}
    return found | ({f"negative_{name}": _random(*shape, seed=2) for name, shape in shapes.items()} if negative else {})


def sd15() -> Tiny:
    scheduler = d.DDIMScheduler(clip_sample=False, steps_offset=1)
    parts = {"requires_safety_checker": False}
    return _tiny("StableDiffusionPipeline", tiny_unet(), model("AutoencoderKL"), scheduler, (1, 4, 8, 8),
                 _prompt(7, 16), parts=parts, height=32, width=32)  # fmt: skip


def sdxl() -> Tiny:
    unet, scheduler = model("UNet2DConditionModel (SDXL)"), d.EulerDiscreteScheduler()
    parts = {"add_watermarker": False, "force_zeros_for_empty_prompt": False}
    return _tiny("StableDiffusionXLPipeline", unet, model("AutoencoderKL"), scheduler, (1, 4, 8, 8),
                 _prompt(7, 16, 8), parts=parts, height=32, width=32)  # fmt: skip


def sd3() -> Tiny:
    transformer, scheduler = model("SD3Transformer2DModel (SD3)"), d.FlowMatchEulerDiscreteScheduler()
    vae = model("AutoencoderKL", shift_factor=0.06, scaling_factor=1.5)
    return _tiny("StableDiffusion3Pipeline", transformer, vae, scheduler, (1, 4, 8, 8),
                 _prompt(12, 16, 12), height=16, width=16)  # fmt: skip


def flux() -> Tiny:
    vae = model("AutoencoderKL", latent_channels=1, shift_factor=0.06, scaling_factor=1.5)
    return _tiny("FluxPipeline", model("FluxTransformer2DModel"), vae, d.FlowMatchEulerDiscreteScheduler(),
                 (1, 1, 8, 8), _prompt(12, 16, 12, negative=False), height=32, width=32)  # fmt: skip


def wan() -> Tiny:
    transformer, vae = model("WanTransformer3DModel (text to video)"), model("AutoencoderKLWan (Wan 2.1)")
    return _tiny("WanPipeline", transformer, vae, d.FlowMatchEulerDiscreteScheduler(shift=7.0), (1, 4, 1, 4, 4),
                 _prompt(16, 16), height=32, width=32, num_frames=5)  # fmt: skip


def ltx() -> Tiny:
    vae = model("AutoencoderKLLTXVideo", latent_channels=4)
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    masks = {
        "prompt_attention_mask": torch.arange(9)[None] < 6,
        "negative_prompt_attention_mask": torch.arange(9)[None] < 2,
    }
    return _tiny("LTXPipeline", model("LTXVideoTransformer3DModel"), vae, d.FlowMatchEulerDiscreteScheduler(),
                 (1, 4, 1, 4, 4), _prompt(9, 16) | masks, height=32, width=32, num_frames=9)  # fmt: skip


def cogvideox() -> Tiny:
    transformer = model("CogVideoXTransformer3DModel (CogVideoX)", num_layers=2)
    return _tiny("CogVideoXPipeline", transformer, model("AutoencoderKLCogVideoX"), d.DDIMScheduler(),
                 (1, 4, 2, 2, 2), _prompt(8, 8), height=16, width=16, num_frames=9)  # fmt: skip


def hunyuanvideo() -> Tiny:
    transformer = model("HunyuanVideoTransformer3DModel (text to video)")
    text = _prompt(9, 16, 8, negative=False) | {"prompt_attention_mask": (torch.arange(9)[None] < 6).long()}
    return _tiny("HunyuanVideoPipeline", transformer, model("AutoencoderKLHunyuanVideo"),
                 d.FlowMatchEulerDiscreteScheduler(shift=7.0), (1, 4, 2, 2, 2), text,
                 height=16, width=16, num_frames=5)  # fmt: skip


#: the pipelines that are run as a whole
BUILD: dict[str, Callable[[], Tiny]] = {
    each.__name__: each for each in (sd15, sdxl, sd3, flux, wan, ltx, cogvideox, hunyuanvideo)
}


@functools.cache
def stock_of(name: str) -> tuple[Tensor, Calls]:
    """The output of a pipeline without ours, and its calls of torch's attention: run once for all tests."""
    return stock_calls(BUILD[name]().run)
