"""VAEs, text encoders, a full checkpoint and LoRAs beside the diffusion models of ``comfy_tiny_models``."""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
from typing import Any

import torch
from comfy_tiny_models import Built, StateDict, host_class, host_settings, model, random_weights, sd15, wan_t2v


def kl_autoencoder(z_channels: int, channels: int) -> StateDict:
    build = host_class("comfy.ldm.models.autoencoder", "AutoencoderKL")
    shape = {"double_z": True, "z_channels": z_channels, "resolution": 256, "in_channels": 3, "out_ch": 3}
    depth = {"ch": channels, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    return random_weights(build(ddconfig={**shape, **depth}, embed_dim=z_channels), seed=2)


def decoder_only(weights: StateDict) -> StateDict:
    return {name: w for name, w in weights.items() if not name.startswith(("encoder.", "quant_conv"))}


@model("vae_kl", "vae", sizes=({"channels": 32}, {"channels": 128}))
def vae_kl(channels: int) -> Built:
    """A decoder: one attention block, head_dim = 4 * channels."""
    return Built(decoder_only(kl_autoencoder(4, channels)))


@model("vae_kl_full", "vae")
def vae_kl_full() -> Built:
    """Encoder and decoder in the published width (hosts fix the width of the encoder)."""
    return Built(kl_autoencoder(4, 128))


@model("vae_flux", "vae", sizes=({"channels": 32}, {"channels": 128}))
def vae_flux(channels: int) -> Built:
    weights = decoder_only(kl_autoencoder(16, channels))
    return Built({name: w for name, w in weights.items() if not name.startswith("post_quant_conv")})


@model("vae_wan", "vae", sizes=({"dim": 8}, {"dim": 96}))  # older hosts know the published width only
def vae_wan(dim: int) -> Built:
    build = host_class("comfy.ldm.wan.vae", "WanVAE")
    config = {"dim": dim, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
    assert "temperal_downsample" in inspect.signature(build).parameters
    network = build(**config, temperal_downsample=[False, True, True], dropout=0.0)
    return Built(random_weights(network, seed=3))


def host_json(module: str, file: str) -> dict[str, Any]:
    folder = pathlib.Path(inspect.getfile(importlib.import_module(module))).parent
    return json.loads((folder / file).read_text())


@model("sd15_checkpoint", "checkpoints", sizes=({"channels": 32}, {"channels": 128}))
def sd15_checkpoint(channels: int) -> Built:
    """UNet, CLIP-L at its published size, and a VAE decoder, for CheckpointLoaderSimple."""
    settings = host_settings()
    clip_class = host_class("comfy.clip_model", "CLIPTextModel")
    config = host_json("comfy.sd1_clip", "sd1_clip_config.json")
    clip = random_weights(clip_class(config, settings["dtype"], settings["device"], settings["operations"]), seed=1)
    parts = {
        "model.diffusion_model.": sd15().tensors,
        "cond_stage_model.transformer.": {n: w for n, w in clip.items() if "text_projection" not in n},
        "first_stage_model.": vae_kl(channels).tensors,
    }
    return Built({prefix + name: w for prefix, weights in parts.items() for name, w in weights.items()})


@model("t5", "text_encoders")
def t5() -> Built:
    """T5 base, for CLIPLoader with type stable_audio."""
    build = host_class("comfy.text_encoders.t5", "T5")
    settings = host_settings()
    config = host_json("comfy.text_encoders.t5", "t5_config_base.json")
    return Built(random_weights(build(config, settings["dtype"], settings["device"], settings["operations"]), seed=5))


def lora_of(weights: StateDict, rank: int = 4, seed: int = 9) -> Built:
    """A LoRA on every matrix of an attention projection or feed-forward, in the names that Kohya's trainer writes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        if not name.endswith(".weight") or weight.ndim != 2:
            continue
        target = "lora_unet_" + name[: -len(".weight")].replace(".", "_")
        rows, columns = weight.shape
        tensors[f"{target}.lora_up.weight"] = torch.randn(rows, rank, generator=generator).mul_(0.2).half()
        tensors[f"{target}.lora_down.weight"] = (
            torch.randn(rank, columns, generator=generator).div_(columns**0.5).half()
        )
    return Built(tensors)


@model("lora_sd15", "loras")
def lora_sd15() -> Built:
    return lora_of(sd15().tensors)


@model("lora_wan_t2v", "loras")
def lora_wan_t2v() -> Built:
    return lora_of(wan_t2v().tensors)
