"""The arguments with which ComfyUI's sampler would call a model, made as it makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Conditioning = list[Any]  # ComfyUI's: [[tensor [B, T, C], {"pooled_output": ...}], ...]


@dataclass(frozen=True)
class Latent:
    """A latent as the sampler packs it.

    Attributes:
        samples: ``[B, C, ...]``; of several streams (video and sound) one packed tensor.
        shapes: of each stream.
    """

    samples: Tensor
    shapes: list[Any]

    @staticmethod
    def of(patcher: Any, latent: dict[str, Any]) -> Latent:
        """A LATENT, with the channels and dimensions that the model wants."""
        import comfy.sample
        import comfy.utils

        samples = latent["samples"]
        ratios = (latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal"))
        try:
            samples = comfy.sample.fix_empty_latent_channels(patcher, samples, *ratios)
        except TypeError:  # up to ComfyUI 0.8
            samples = comfy.sample.fix_empty_latent_channels(patcher, samples)
        if getattr(samples, "is_nested", False):
            packed, shapes = comfy.utils.pack_latents(samples.unbind())
            return Latent(packed.float().cpu(), shapes)
        return Latent(samples.float().cpu(), [samples.shape])


def prompts(conditioning: Conditioning) -> list[dict[str, Any]]:
    """The conditioning on the CPU in the form that the model's ``extra_conds`` takes; without ControlNets and hooks."""
    import comfy.sampler_helpers

    left_out = ("control", "hooks", "gligen", "area", "mask")
    return [
        {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in cond.items()
            if name not in left_out
        }
        for cond in comfy.sampler_helpers.convert_cond(conditioning)
    ]


def arguments(model: nn.Module, latent: Latent, cond: dict[str, Any], copies: int) -> tuple[Tensor, Tensor, dict]:
    """x, sigma and the keyword arguments of ``apply_model`` for ``copies`` prompts in one batch."""
    import comfy.samplers

    x, cpu = latent.samples, torch.device("cpu")
    options = {"latent_image": x, "denoise_mask": None, "seed": 0, "latent_shapes": latent.shapes}
    # the sampler hands all of this on to the model by name
    conds = comfy.samplers.encode_model_conds(model.extra_conds, [cond], x, cpu, "positive", **options)
    sigma = torch.full((x.shape[0],), float(model.model_sampling.sigma_max))  # type: ignore[union-attr, arg-type]
    part = comfy.samplers.get_area_and_mult({**conds[0], "uuid": 0}, x, sigma)
    given = comfy.samplers.cond_cat([part.conditioning] * copies)
    return torch.cat([x] * copies), torch.cat([sigma] * copies), given
