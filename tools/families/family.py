"""One model family at a tiny size: how to build it, and the inputs of a call."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Draw:
    """Random inputs, the same ones each time: ``draw.normal(2, 4, 8, 8)``."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def generator(self) -> torch.Generator:
        """The source of all the numbers, for a model that draws some itself."""
        return self.random

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.random)

    def time(self, batch: int) -> Tensor:
        """Timesteps out of 1000, as whole numbers."""
        return 1 + self.ints(999, batch)

    @staticmethod
    def padding(batch: int, length: int) -> Tensor:
        """bool ``[batch, length]``, True = a real token: each row ends in padding of a different length."""
        lengths = torch.tensor([length - 2 - (3 * row) % max(1, length - 3) for row in range(batch)])
        return torch.arange(length) < lengths[:, None]

    @staticmethod
    def grid(*sizes: int) -> Tensor:
        """Positions ``[tokens, len(sizes)]`` of a grid, last axis fastest, as floats."""
        return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes)).float()

    @staticmethod
    def rotary(tokens: int, dim: int, *batch: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[*batch, tokens, dim]`` of rotary positions in neighbouring pairs."""
        angles = torch.arange(tokens)[:, None] * 10 ** -torch.linspace(0, 2, dim // 2)
        angles = angles.repeat_interleave(2, dim=1).expand(*batch, tokens, dim)
        return angles.cos(), angles.sin()

    @staticmethod
    def ids(positions: Tensor) -> Tensor:
        """Positions of a Flux, which had a batch axis before diffusers 0.31."""
        return positions.expand(2, -1, -1) if before_031() else positions

    @staticmethod
    def texts(frames: int) -> int:
        """Number of texts that a motion model takes for a clip: one before diffusers 0.31, then one for each frame."""
        return 1 if before_031() else frames

    @staticmethod
    def lumina_rotary() -> Tensor:
        """Rotary positions that Lumina-Next takes."""
        from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

        return get_2d_rotary_pos_embed_lumina(8, 384, 384)

    @staticmethod
    def animate_cache() -> Any:
        """Empty cache of Wan Animate 2."""
        from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

        return WanAnimate2KVCache(1)

    @staticmethod
    def omnigen_mask() -> Tensor:
        """Mask of 12 causal tokens of text (the second row begins with 3 of padding), a time and 16 of an image."""
        tokens = 12 + 1 + 16
        seen = torch.ones(tokens, tokens).tril()
        seen[13:] = 1
        mask = seen.repeat(2, 1, 1)
        mask[1, :, :3] = 0
        mask[1, :3] = torch.eye(tokens)[:3]
        return mask


# The largest value of constructor arguments of these names, where a model's default is a whole number or absent.
SIZES = {
    name: size
    for size, names in {
        1: "depth layers_per_block n_refiner_layers num_hidden_layers num_key_value_heads num_layers "
        "num_refiner_layers num_res_blocks num_single_layers num_text_blocks num_visual_blocks",
        2: "audio_num_attention_heads motion_num_attention_heads n_heads n_kv_heads num_attention_heads "
        "num_attention_pooler_hidden_layers num_cross_attention_heads num_heads num_kv_heads sliding_window",
        4: "adaln_lora_dim audio_attention_head_dim audio_in_channels audio_out_channels base_dim encoder_dim "
        "in_channels in_visual_dim latent_channels out_channels out_visual_dim patch_size spatial_compression_ratio "
        "temporal_compression_ratio z_dim",
        8: "attention_head_dim audio_acoustic_hidden_dim audio_cross_attention_dim c_r cross_attention_dim_t5 "
        "cross_attention_head_dim head_dim io_channels latent_dim max_text_seq_length norm_num_groups "
        "pos_embed_max_size sample_height sample_size sample_width time_embed_dim",
        12: "global_cond_dim in_text_dim2 pooled_projection_dim text_hidden_dim",
        16: "cap_feat_dim caption_channels caption_projection_dim cond_token_dim context_in_dim cross_attention_dim "
        "decoder_dim freq_dim in_text_dim joint_attention_dim text_dim text_embed_dim time_dim timestep_features_dim",
        32: "dim embed_dim ff_dim ffn_dim hidden_size intermediate_size model_dim rope_max_seq_len vocab_size",
    }.items()
    for name in names.split()
}


class NotInThisVersion(Exception):
    """The installed diffusers does not have this family."""


@dataclass(frozen=True)
class Family:
    """A model class of diffusers at one tiny configuration.

    Attributes:
        model: name of the class in ``diffusers``, or of a module below it and the class.
        sizes: arguments of the constructor; those that it does not name are the defaults, made small by ``SIZES``.
        inputs: makes the arguments of ``forward``.
        variant: which form of the family, where there are several.
        prepare: changes the model once it is built.
    """

    model: str
    sizes: dict[str, Any]
    inputs: Callable[[Draw], dict[str, Any]]
    variant: str = ""
    prepare: Callable[[Any], None] | None = None

    @property
    def name(self) -> str:
        name = self.model.rpartition(".")[2]
        return f"{name} ({self.variant})" if self.variant else name

    def model_class(self) -> Any:
        """The class, or None where the installed diffusers does not have it."""
        module, _, name = self.model.rpartition(".")
        try:
            return getattr(importlib.import_module(f"diffusers.{module}" if module else "diffusers"), name, None)
        except ImportError:
            return None

    def build(self) -> nn.Module:
        """The model in evaluation mode, with weights that all affect the output.

        Raises:
            NotInThisVersion: the installed diffusers has no such class or not this form of it.
        """
        cls = self.model_class()
        known = inspect.signature(cls.__init__).parameters if cls is not None else {}
        unknown = set(self.sizes) - set(known)
        if cls is None or unknown:
            raise NotInThisVersion(
                f"{self.model} has no {', '.join(unknown)}" if cls is not None else f"no {self.model}"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = cls(**{**_small(known), **self.sizes})
        if self.prepare is not None:
            self.prepare(model)
        return reinitialise(model)

    def as_given(self) -> nn.Module:
        """The model of these sizes and no others, with the weights that diffusers gives it."""
        return self.model_class()(**self.sizes)

    def arguments(self, dtype: torch.dtype = torch.float32, draw: Draw | None = None) -> dict[str, Any]:
        """Fresh arguments for one call, floats in ``dtype``."""
        return _cast(self.inputs(draw or Draw()), dtype)


def _small(parameters: Mapping[str, inspect.Parameter]) -> dict[str, int]:
    """The arguments of a constructor that ``SIZES`` limits."""
    small = {}
    for name in parameters.keys() & SIZES.keys():
        default = parameters[name].default
        if default is inspect.Parameter.empty:
            small[name] = SIZES[name]
        elif type(default) is int:
            small[name] = min(default, SIZES[name])
    return small


def before_031() -> bool:
    """Whether the installed diffusers is older than 0.31, which changed what some models take."""
    import diffusers

    return tuple(int(part) for part in diffusers.__version__.split(".")[:2]) < (0, 31)


def reinitialise(model: nn.Module, *, gain: float = 1.2, seed: int = 7) -> nn.Module:
    """Random weights under which attention, masks and positions all move the output; the model in evaluation mode."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random)
        if parameter.ndim >= 2 and parameter.numel():
            values *= gain / math.sqrt(parameter[0].numel())
        elif ("norm" in name and name.endswith("weight")) or name.endswith((".gamma", ".alpha")):
            values = 1 + 0.2 * values
        else:
            values *= 0.1
        parameter.data = values
    return model.eval()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value
