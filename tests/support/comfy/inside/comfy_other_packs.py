"""Tiny files in the formats that other packs load. Imported by the host's interpreter only."""

from pathlib import Path

import safetensors.torch
import torch
from comfy_tiny_models import host_class, host_settings, random_weights

WIDTH, CONTEXT = 320, 768  # of the tiny SD1.5 model


def write_ipadapter(path: str, embeds: str, width: int = 32, tokens: int = 4) -> None:
    """An IPAdapter for the two cross attentions of that model which the pack patches, and a picture's embedding."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {
        "image_proj.proj.weight": drawn(tokens * CONTEXT, width),
        "image_proj.proj.bias": drawn(tokens * CONTEXT),
    }
    tensors |= {"image_proj.norm.weight": torch.ones(CONTEXT), "image_proj.norm.bias": torch.zeros(CONTEXT)}
    for number in (1, 31):  # the first block of the input, and the middle
        tensors |= {f"ip_adapter.{number}.to_{part}_ip.weight": drawn(WIDTH, CONTEXT) for part in "kv"}
    safetensors.torch.save_file(tensors, _made(path))
    torch.save(torch.randn(1, width, generator=generator), _made(embeds))


def tiny_controlnet() -> torch.nn.Module:
    """A ControlNet of the tiny SD1.5 model's shape."""
    sizes = {"image_size": 32, "in_channels": 4, "model_channels": WIDTH, "hint_channels": 3, "context_dim": CONTEXT}
    lists = {"num_res_blocks": [1], "channel_mult": [1], "transformer_depth": [1], "transformer_depth_middle": 1}
    more = {"use_spatial_transformer": True, "num_heads": 8, "legacy": False}
    return host_class("comfy.cldm.cldm", "ControlNet")(**sizes, **lists, **more, **host_settings())


def write_controlnet(path: str) -> None:
    safetensors.torch.save_file(random_weights(tiny_controlnet()), _made(path))


def _made(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path
