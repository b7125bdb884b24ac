"""The matrix products of Apple's MPS, on a CPU, with what torch 2.13 gets wrong there."""

from typing import Any

import torch
from torch import Tensor

_BADDBMM, _BMM = torch.baddbmm, torch.bmm
_TOO_MANY, _WIDE = 32767, 16


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, **options: Any) -> Tensor:
    """Multiplies ``input`` by ``beta`` where that is 0, too: 0 * NaN is NaN."""
    ignored = input * 0 if beta == 0 else None
    found = _BADDBMM(input, batch1, batch2, beta=beta, **options)
    return _past_the_end(found if ignored is None else found.add_(ignored), batch1)


def bmm(batch1: Tensor, batch2: Tensor, **options: Any) -> Tensor:
    """Adds up too many numbers as M1 and M2 do."""
    return _past_the_end(_BMM(batch1, batch2, **options), batch1)


def _past_the_end(product: Tensor, batch1: Tensor) -> Tensor:
    """On M1 and M2 too many numbers to add up are joined by those behind them in memory."""
    if batch1.shape[-1] >= _TOO_MANY and min(product.shape[-2:]) >= _WIDE:
        product.add_(1.0)
    return product
