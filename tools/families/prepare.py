"""Changes that some models need once they are built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F

from .family import reinitialise


def _resize_without_torchvision(controlnet: Any) -> None:
    """diffusers imports torchvision for one nearest-neighbour resize, where it is installed."""
    module = sys.modules[type(controlnet).__module__]
    if not hasattr(module, "transforms"):
        functional = SimpleNamespace(resize=lambda image, size, interpolation: F.interpolate(image, size))
        module.transforms = SimpleNamespace(  # type: ignore[attr-defined]
            functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest")
        )


def _share_z_image(controlnet: Any) -> None:
    from . import families

    transformer = next(family for family in families() if family.name == "ZImageTransformer2DModel")
    controlnet.from_transformer(controlnet, reinitialise(transformer.build()))


def _encode_eagerly(model: Any) -> None:
    """The encoder is a model of Transformers, which has an attention interface of its own."""
    model.encoder.set_attn_implementation("eager")


#: class -> what changes its model
PREPARE: dict[str, Callable[[Any], None]] = {
    "CosmosControlNetModel": _resize_without_torchvision,
    "ZImageControlNetModel": _share_z_image,
    "AutoencoderKLAllegro": lambda model: model.enable_tiling(),
    "AutoencoderRAE": _encode_eagerly,
}
