"""A mask that is a rule, not a tensor: evaluated for one tile at a time, so that no L*S mask exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class LazyMask:
    """Goes where ``attn_mask`` goes in :func:`pascal_attn_core.sdpa`.

    Args:
        shape: (B, Hq or 1, L, S).
        rule: called with int64 index tensors batch ``[b, 1, 1, 1]``, head ``[1, h, 1, 1]``, query ``[1, 1, q, 1]`` and
            key ``[1, 1, 1, k]``; returns what a mask holds there, broadcastable to ``[b, h, q, k]``: bool (True = takes
            part) or float (added). It may be called again for the gradients and must then give the same. No gradient
            flows into it.
        device: of the index tensors and the result.
        dtype: of the result.
    What the rule itself allocates is not counted in the memory budget.
    """

    ndim = 4
    requires_grad = False

    def __init__(
        self,
        shape: Sequence[int],
        rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bool,
    ):
        if len(shape) != 4:
            raise ValueError(f"shape must be (B, H, L, S), got {tuple(shape)}")
        self.shape, self.rule = torch.Size(shape), rule
        self.device, self.dtype = torch.device(device), dtype

    def dim(self) -> int:
        return 4

    def tile(self, batch: int, heads: tuple[int, int], queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[heads, queries, keys]`` of one batch element; ranges are first and one-past-last."""
        indices = torch.tensor([batch if self.shape[0] > 1 else 0], device=self.device)
        spans = [(0, 1) if self.shape[1] == 1 else heads, queries, keys]
        ranges = [indices, *(torch.arange(*span, device=self.device) for span in spans)]
        shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        values = self.rule(*(r.view(s) for r, s in zip(ranges, shapes)))
        lengths = (1, heads[1] - heads[0], queries[1] - queries[0], keys[1] - keys[0])
        return values.expand(lengths)[0]

    def dense(self) -> Tensor:
        """The tensor ``[B, Hq or 1, L, S]`` that this stands for: O(L*S) memory."""
        batch, heads, queries, keys = self.shape
        return torch.stack([self.tile(b, (0, heads), (0, queries), (0, keys)) for b in range(batch)])
