"""LowRank: the adapters of a layer, in float beside its weight in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class LowRank:
    """``x -> x down^T up^T``, in x's dtype.

    Attributes:
        down: float ``[R, K]``.
        up: float ``[N, R]``, with the adapter's factor in it.
    """

    def __init__(self, down: Tensor, up: Tensor):
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
            raise ValueError(f"down and up must be [R, K] and [N, R], got {list(down.shape)} and {list(up.shape)}")
        self.down, self.up = down, up

    def __call__(self, x: Tensor) -> Tensor:
        down, up = (part.to(x.device, x.dtype) for part in (self.down, self.up))
        return F.linear(F.linear(x, down), up)

    def matrix(self) -> Tensor:
        """The matrix that it adds to the weight, float32 ``[N, K]``."""
        return self.up.float() @ self.down.float()

    def to(self, device: torch.device) -> LowRank:
        """This adapter on a device."""
        return LowRank(self.down.to(device), self.up.to(device))


def joined(adapters: Sequence[tuple[Tensor, Tensor, float]]) -> LowRank | None:
    """Adapters ``(down [R, K], up [N, R], factor)`` on one layer as one; None = there is none."""
    if not adapters:
        return None
    downs = [down.float() for down, _, _ in adapters]
    ups = [up.float() * factor for _, up, factor in adapters]
    return LowRank(torch.cat(downs), torch.cat(ups, dim=1))
