"""Embeddings of tokens and patches: ``flash_attn.modules.embedding`` and ``flash_attn.layers.patch_embed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..options import FlashArgumentError
from .dense import FusedDense


class GPT2Embeddings(nn.Module):
    """Embeddings of tokens and, where max_position_embeddings is above 0, of positions.

    With word_embed_proj_dim tokens are embedded in that many numbers and projected.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kinds: dict[str, Any] = {"device": device, "dtype": dtype}
        word_dim = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, word_dim, padding_idx=padding_idx, **kinds)
        self.project_in = None if word_embed_proj_dim is None else nn.Linear(word_dim, embed_dim, bias=False, **kinds)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **kinds)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """``[B, L]`` -> ``[B, L, embed_dim]``."""
        out: Tensor = self.word_embeddings(input_ids)
        if self.project_in is not None:
            out = self.project_in(out)
        if self.max_position_embeddings > 0:
            places = torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
            out = out + self.position_embeddings(places)
        return out


class PatchEmbed(nn.Module):
    """Patches of an image, each projected by one linear layer; its weight is ``[embed_dim, channels * patch area]``."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], Any] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ):
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.patch_size = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        self.grid_size = self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        linear = FusedDense if fused_bias_fc and bias else nn.Linear
        self.proj = linear(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> ``[B, patches, embed_dim]``, without flatten ``[B, rows, columns, embed_dim]``."""
        if tuple(x.shape[2:]) != self.img_size:
            raise FlashArgumentError(f"x must be [B, C, {self.img_size[0]}, {self.img_size[1]}], got {list(x.shape)}")
        height, width = self.patch_size
        x = x.unflatten(3, (-1, width)).unflatten(2, (-1, height))
        x = self.proj(x.permute(0, 2, 4, 1, 3, 5).flatten(3))
        if self.flatten:
            x = x.flatten(1, 2)
        out: Tensor = self.norm(x)
        return out
