"""What all of flash-attn's norms compute:

    sum = dropout(x * scales) + dropout(x1) + residual
    out = normalised(sum) * weight + bias

in float32 (float64 for float64); ``out`` and ``sum`` are rounded once each to the dtype in which they are returned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..options import FlashArgumentError


class Sum(NamedTuple):
    """The input of the norm.

    value: float32 or float64 ``[..., N]``; masks: of what was kept of x and of x1, None = nothing is dropped.
    """

    value: Tensor
    masks: tuple[Tensor | None, Tensor | None]

    def rounded(self, x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> Tensor:
        """The sum in the dtype in which it is returned."""
        if residual is not None:
            return self.value.to(residual.dtype)
        return self.value.to(torch.promote_types(x.dtype, torch.float32) if residual_in_fp32 else x.dtype)


class Norm(NamedTuple):
    eps: float
    rms: bool
    zero_centered: bool = False

    def of(self, total: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., N]`` in the dtype of total."""
        weight = weight.to(total.dtype)
        if self.zero_centered:
            weight = weight + 1.0
        shift = None if bias is None else bias.to(total.dtype)
        if not self.rms:
            return F.layer_norm(total, total.shape[-1:], weight, shift, self.eps)
        out = F.rms_norm(total, list(total.shape[-1:]), weight, self.eps)
        return out if shift is None else out + shift


def summed(
    x: Tensor,
    residual: Tensor | None,
    x1: Tensor | None = None,
    *,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    factor: float = 1.0,
    dropout_p: float = 0.0,
) -> Sum:
    if not 0.0 <= dropout_p < 1.0:
        raise FlashArgumentError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = x.to(dtype) * factor if factor != 1.0 else x.to(dtype)
    if rowscale is not None:
        if rowscale.numel() != x.shape[:-1].numel():
            raise FlashArgumentError(f"rowscale must be {list(x.shape[:-1])}, got {list(rowscale.shape)}")
        total = total * rowscale.detach().reshape(*x.shape[:-1], 1).to(dtype)
    total, mask = _dropped(total, dropout_p)
    if layerscale is not None:
        total = total * layerscale.to(dtype)
    mask1 = None
    if x1 is not None:
        other, mask1 = _dropped(x1.to(dtype), dropout_p)
        total = total + other
    if residual is not None:
        total = total + residual.to(dtype)
    return Sum(total, (mask, mask1))


def _dropped(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    if not dropout_p:
        return x, None
    mask = torch.rand_like(x) >= dropout_p
    return x.masked_fill(~mask, 0.0) / (1.0 - dropout_p), mask


def check_shapes(x: Tensor, **others: Tensor | None) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a tensor of floating point numbers, got {getattr(x, 'dtype', type(x).__name__)}")
    for name, other in others.items():
        if other is not None and other.shape != x.shape:
            raise FlashArgumentError(f"{name} must be {list(x.shape)} like x, got {list(other.shape)}")


def check_weights(hidden: int, **weights: Tensor | None) -> None:
    for name, weight in weights.items():
        if weight is not None and weight.shape != (hidden,):
            raise FlashArgumentError(f"{name} must be [{hidden}], got {list(weight.shape)}")
