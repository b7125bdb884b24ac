"""The arguments with which ComfyUI's sampler would call a model, made as it makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Conditioning = list[Any]  # ComfyUI's: [[tensor [B, T, C], {"pooled_output": ...}], ...]
_TEXT_WIDTHS = ("context_dim", "context_in_dim", "text_dim", "cap_feat_dim", "caption_channels", "joint_attention_dim",
                "text_states_dim", "cross_attention_dim", "txt_dim", "text_hidden_dim", "text_embed_dim")  # fmt: skip
_POOLED_WIDTHS = ("vec_in_dim", "adm_in_channels", "pooled_projection_dim", "text_states_dim_2")


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


def guessed_conditioning(patcher: Any, tokens: int) -> Iterator[Conditioning]:
    """Prompts of ``tokens`` tokens such as the model may want, the likeliest first."""
    config = getattr(getattr(patcher.model, "model_config", None), "unet_config", {})
    widths = [config[name] for name in _TEXT_WIDTHS if isinstance(config.get(name), int)]
    embedder = config.get("context_embedder_config", {}).get("params", {}).get("in_features")
    if embedder:
        widths.append(embedder)
    widths += [w[0] for w in (config.get("context_dim"),) if isinstance(w, list) and w]
    if not widths:
        words, modules = ("txt", "text", "context", "caption", "cap_"), patcher.model.diffusion_model.named_modules()
        widths = [
            int(m.in_features) for name, m in modules if any(w in name for w in words) and hasattr(m, "in_features")
        ]
    pooled = [config[name] for name in _POOLED_WIDTHS if isinstance(config.get(name), int)]
    if "model_channels" in config:  # a UNet's vector holds sizes beside the pooled prompt
        pooled = []
    for width in dict.fromkeys(widths):
        for vector in dict.fromkeys([*pooled, 1280, 0]):
            extra = {"pooled_output": torch.zeros(1, vector)} if vector else {}
            yield [[torch.zeros(1, tokens, width), extra]]
            if not vector:
                mask = torch.ones(1, tokens, dtype=torch.int64)
                yield [[torch.zeros(1, tokens, width), {"attention_mask": mask}]]


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
