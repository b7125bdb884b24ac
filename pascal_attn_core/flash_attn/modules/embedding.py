"""Embeddings of tokens and patches: ``flash_attn.modules.embedding`` and ``flash_attn.layers.patch_embed``."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..options import check_layout
from ..signatures import called_as


class GPT2Embeddings(nn.Module):
    """Embeddings of tokens and, where max_position_embeddings is above 0, of positions.

    With word_embed_proj_dim tokens are embedded in that many numbers and projected.
    """

    @called_as(
        "self embed_dim vocab_size max_position_embeddings padding_idx=None word_embed_proj_dim=None device=None "
        "dtype=None"
    )
    def __init__(
        self, embed_dim: int, vocab_size: int, max_position_embeddings: int, padding_idx: int | None,
        word_embed_proj_dim: int | None, **kinds: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        width = word_embed_proj_dim or embed_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx, **kinds)
        self.project_in = None if word_embed_proj_dim is None else nn.Linear(width, embed_dim, bias=False, **kinds)
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

    @called_as(
        "self img_size=224 patch_size=16 in_chans=3 embed_dim=768 norm_layer=None flatten=True bias=True "
        "fused_bias_fc=False",
        ignored="fused_bias_fc",
    )
    def __init__(
        self, img_size: Any, patch_size: Any, in_chans: int, embed_dim: int, norm_layer: Any, flatten: bool, bias: bool
    ) -> None:
        super().__init__()
        self.img_size = (img_size,) * 2 if isinstance(img_size, int) else tuple(img_size)
        self.patch_size = height, width = (patch_size,) * 2 if isinstance(patch_size, int) else tuple(patch_size)
        self.grid_size = self.img_size[0] // height, self.img_size[1] // width
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        self.proj = nn.Linear(in_chans * height * width, embed_dim, bias=bias)
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> ``[B, patches, embed_dim]``, without flatten ``[B, rows, columns, embed_dim]``."""
        check_layout(("B", "C", *self.img_size), x=x)
        height, width = self.patch_size
        x = self.proj(rearrange(x, "b c (h p) (w q) -> b h w (c p q)", p=height, q=width))
        out: Tensor = self.norm(x.flatten(1, 2) if self.flatten else x)
        return out
