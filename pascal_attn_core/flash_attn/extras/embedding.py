"""Embeddings of tokens and patches: ``flash_attn.modules.embedding`` and ``flash_attn.layers.patch_embed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..options import FlashArgumentError
from .dense import FusedDense
from .parallel import leave_group

__all__ = [
    "BertEmbeddings",
    "ColumnParallelEmbedding",
    "GPT2Embeddings",
    "ParallelGPT2Embeddings",
    "PatchEmbed",
    "VocabParallelEmbedding",
]


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
            out = out + self.position_embeddings(_positions(input_ids, position_ids))
        return out


class BertEmbeddings(nn.Module):
    """Embeddings of tokens and, where their numbers are above 0, of positions and of token types."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kinds: dict[str, Any] = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx, **kinds)
        self.max_position_embeddings, self.type_vocab_size = max_position_embeddings, type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **kinds)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **kinds)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """``[B, L]`` -> ``[B, L, embed_dim]``; token types are 0 where they are not given."""
        out: Tensor = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            out = out + self.position_embeddings(_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            out = out + self.token_type_embeddings(
                torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            )
        return out


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are split over ranks: zeros for tokens of other ranks; their sum is the embedding."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        process_group: Any = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ):
        world = 1 if process_group is None else torch.distributed.get_world_size(process_group)
        if num_embeddings % world:
            raise FlashArgumentError(f"num_embeddings must be a multiple of {world} (the ranks), got {num_embeddings}")
        if world > 1 and padding_idx is not None:
            raise FlashArgumentError(f"padding_idx must be None with several ranks, got {padding_idx}")
        super().__init__(num_embeddings // world, embedding_dim, padding_idx, *args, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """``[...]`` -> ``[..., embedding_dim]``."""
        if self.process_group is None:
            return super().forward(input)
        local = input - torch.distributed.get_rank(self.process_group) * self.num_embeddings
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        return super().forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0)


class ColumnParallelEmbedding(nn.Embedding):
    """An embedding whose numbers are split over ranks: each has its part of them."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, process_group: Any = None, **kwargs: Any):
        world = 1 if process_group is None else torch.distributed.get_world_size(process_group)
        if embedding_dim % world:
            raise FlashArgumentError(f"embedding_dim must be a multiple of {world} (the ranks), got {embedding_dim}")
        super().__init__(num_embeddings, embedding_dim // world, *args, **kwargs)
        self.process_group = process_group


class ParallelGPT2Embeddings(nn.Module):
    """:class:`GPT2Embeddings` split over ranks."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: Any,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kinds: dict[str, Any] = {"process_group": process_group, "device": device, "dtype": dtype}
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, **kinds)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(max_position_embeddings, embed_dim, **kinds)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, combine_batch_seqlen_dim: bool = False
    ) -> Tensor:
        """``[B, L]`` -> ``[B, L, embed_dim]``, or with combine_batch_seqlen_dim ``[B * L, embed_dim]``.

        With several ranks and sequence_parallel dimension 0 is this rank's part of that.
        """
        out: Tensor = self.word_embeddings(input_ids)
        world = torch.distributed.get_world_size(self.process_group)
        if self.max_position_embeddings > 0:
            positions = self.position_embeddings(_positions(input_ids, position_ids))
            first = torch.distributed.get_rank(self.process_group) * positions.shape[-1]
            behind = out.shape[-1] - first - positions.shape[-1]
            out = out + nn.functional.pad(positions, (first, behind))
        if combine_batch_seqlen_dim:
            out = out.flatten(0, 1)
        return out if world == 1 else leave_group(out, self.process_group, self.sequence_parallel)


def _positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids


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
