"""xformers' masks, ``xformers.ops.fmha.attn_bias``: a causal rule, a window and blocks, never a matrix.

Names, constructors and meaning are those of xformers 0.0.35, but masks hold numbers only, so ``device`` has no effect,
and ``make_local_attention`` adds a window to a mask without a class of its own. Keys that are padded, have gaps or
lie in pages, as where language models are served, are not provided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class AttentionBias:
    """A mask that may be ``attn_bias``; the base class of all.

    Attributes:
        is_causal, alignment, window: as in :func:`pascal_attn_core.sdpa`; with blocks within each of them.
        bias: a tensor that is added to the scores, or None.
    """

    is_causal = False
    alignment = "upper_left"
    window: tuple[int, int] | None = None
    bias: Tensor | None = None

    def to(self, device: torch.device | str) -> AttentionBias:
        """The mask for tensors on ``device``."""
        return self if self.bias is None else LowerTriangularMaskWithTensorBias(self.bias.to(device))


class LowerTriangularMask(AttentionBias):
    """Query i sees the keys up to i."""

    is_causal = True

    def __init__(self, device: Any = None):
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """:class:`LowerTriangularMask` with a tensor that broadcasts to ``[B, H, M, Mkv]``."""

    def __init__(self, bias: Tensor):
        self.bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal; the last query sees the last key."""

    is_causal, alignment = True, "lower_right"

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The mask in which a query sees only its nearest ``window_size`` keys."""
        return _local(LowerTriangularFromBottomRightLocalAttentionMask(), window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """:meth:`LowerTriangularFromBottomRightMask.make_local_attention` returns it; programs ask for its class, as for
    that of the blocks."""


class LocalAttentionFromBottomRightMask(AttentionBias):
    """A query sees ``window_left`` keys before its place and ``window_right`` after it; the last places agree."""

    alignment = "lower_right"

    def __init__(self, window_left: int, window_right: int):
        if window_left < 0 or window_right < 0:
            raise ValueError(f"window_left and window_right must be at least 0, got {window_left} and {window_right}")
        self.window = window_left, window_right


@dataclass
class SeqInfo:
    """Where the blocks lie along a dimension.

    Attributes:
        seqstart_py: the first token of each block, then the number of tokens there are.
    """

    seqstart_py: list[int]

    @staticmethod
    def from_seqlens(seqlens: Sequence[int]) -> SeqInfo:
        """Blocks one after the other."""
        return SeqInfo([0, *itertools.accumulate(int(length) for length in seqlens)])


@dataclass(eq=False)
class BlockDiagonalMask(AttentionBias):
    """Queries of a block see the keys of the block of the same number."""

    q_seqinfo: SeqInfo
    k_seqinfo: SeqInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> BlockDiagonalMask:
        """The mask for blocks of these lengths; ``kv_seqlen``: those of the keys, None = those of the queries."""
        info = SeqInfo.from_seqlens(q_seqlen)
        return cls(info, info if kv_seqlen is None else SeqInfo.from_seqlens(kv_seqlen))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """(the mask, tensors ``[b, tokens, ...]`` one after the other ``[1, sum of b * tokens, ...]``)."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])])
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of :meth:`from_tensor_list` for an output ``[1, tokens, ...]``; otherwise each block alone."""
        starts = self.q_seqinfo.seqstart_py
        if tensor.shape[:2] != (1, starts[-1]):
            raise ValueError(f"the tensor must be [1, {starts[-1]}, ...], got {list(tensor.shape)}")
        sizes = [1] * (len(starts) - 1) if self._batch_sizes is None else self._batch_sizes
        ends = [starts[blocks] for blocks in itertools.accumulate(sizes)]
        parts = tensor.tensor_split(ends[:-1], dim=1)
        return [part.reshape(size, -1, *part.shape[2:]) for size, part in zip(sizes, parts)]

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Causal within each block."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Causal within each block; its last query sees its last key."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """:meth:`make_causal`; a query sees only its nearest ``window_size`` keys."""
        mask = BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)
        return _local(mask, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """:meth:`make_causal_from_bottomright`; a query sees only its nearest ``window_size`` keys."""
        mask = BlockDiagonalCausalLocalAttentionFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)
        return _local(mask, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal within each block."""

    is_causal = True


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """:meth:`BlockDiagonalMask.make_local_attention` returns it."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal within each block; its last query sees its last key."""

    is_causal, alignment = True, "lower_right"


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """:meth:`BlockDiagonalMask.make_local_attention_from_bottomright` returns it."""


def _local(mask: Any, window_size: int) -> Any:
    if window_size < 1:
        raise ValueError(f"window_size must be at least 1, got {window_size}")
    mask.window = window_size - 1, 0
    return mask
