"""Dropout, sum and normalisation in one call: ``flash_attn.ops.{triton.layer_norm,layer_norm,rms_norm}``.

    sum = dropout(x * rowscale) + residual
    out = normalised(sum) * weight + bias

in float32 (float64 for float64); ``out`` and ``sum`` are rounded once each to the dtype in which they are returned.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..options import FlashArgumentError, check_layout
from ..signatures import called_as

_BEFORE = (
    "x weight bias residual=None x1=None weight1=None bias1=None eps=1e-6 dropout_p=0.0 rowscale=None prenorm=False "
    "residual_in_fp32=False zero_centered_weight=False"
)
_AFTER = "return_dropout_mask=False out_dtype=None out=None residual_out=None"
_REFUSED = "x1 weight1 bias1 zero_centered_weight return_dropout_mask out_dtype out residual_out"
_OLDER = (
    "x0 residual weight bias dropout_p epsilon rowscale=None layerscale=None prenorm=False residual_in_fp32=False "
    "return_dropout_mask=False"
)
_OLDER_RULES: dict[str, Any] = {
    "renamed": {"x0": "x", "epsilon": "eps"},
    "refused": "layerscale return_dropout_mask",
}


@called_as(f"{_BEFORE} is_rms_norm=False {_AFTER}", refused=_REFUSED)
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, dropout_p: float,
    rowscale: Tensor | None, prenorm: bool, residual_in_fp32: bool, is_rms_norm: bool,
) -> Any:  # fmt: skip
    """LayerNorm or RMSNorm of dropout(x * rowscale) + residual.

    Args:
        x: ``[..., N]``; residual: of its shape.
        weight, bias: ``[N]``.
        rowscale: ``[...]``, one factor for each row of x (stochastic depth). It gets no gradient.
        dropout_p: share of x that is dropped; pass 0 in evaluation.
        prenorm: return the sum too, in the dtype of residual; without one in float32 with ``residual_in_fp32``, else in
            that of x.
    Returns:
        out ``[..., N]`` in the dtype of x, with prenorm (out, sum).
    Raises:
        TypeError, ValueError: arguments that do not fit together.
        NotImplementedError: an argument is not supported: x1, weight1, bias1, zero_centered_weight,
            return_dropout_mask, out_dtype, out, residual_out.
    """
    _check(x, weight, bias, residual)
    total = _summed(x, residual, dropout_p, rowscale)
    factor, shift = weight.to(total.dtype), None if bias is None else bias.to(total.dtype)
    if is_rms_norm:
        normed = F.rms_norm(total, list(x.shape[-1:]), factor, eps)
        normed = normed if shift is None else normed + shift
    else:
        normed = F.layer_norm(total, x.shape[-1:], factor, shift, eps)
    if not prenorm:
        return normed.to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32) if residual_in_fp32 else x.dtype
    return normed.to(x.dtype), total.to(wide if residual is None else residual.dtype)


@called_as(f"{_BEFORE} {_AFTER}", refused=_REFUSED)
def rms_norm_fn(**given: Any) -> Any:
    """:func:`layer_norm_fn` with RMSNorm, and without its argument ``is_rms_norm``."""
    return layer_norm_fn(**given, is_rms_norm=True)


@called_as(_OLDER, **_OLDER_RULES)
def dropout_add_layer_norm(**given: Any) -> Any:
    """:func:`layer_norm_fn` under the names of older versions; ``x0`` is its x, ``epsilon`` its eps."""
    return layer_norm_fn(**given)


@called_as(_OLDER, **_OLDER_RULES)
def dropout_add_rms_norm(**given: Any) -> Any:
    """:func:`dropout_add_layer_norm` with RMSNorm."""
    return layer_norm_fn(**given, is_rms_norm=True)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, returned in the dtype of x."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


class RMSNorm(torch.nn.RMSNorm):
    """``flash_attn.ops.triton.layer_norm.RMSNorm``: :func:`rms_norm_fn` with a weight ``[hidden_size]``."""

    @called_as(
        "self hidden_size eps=1e-5 dropout_p=0.0 zero_centered_weight=False device=None dtype=None",
        refused="zero_centered_weight",
    )
    def __init__(self, hidden_size: int, eps: float, dropout_p: float, **kinds: Any) -> None:
        super().__init__(hidden_size, eps, **kinds)
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """``[..., hidden_size]``; see :func:`layer_norm_fn`."""
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        options = {"eps": self.eps, "dropout_p": dropout_p, "prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        return rms_norm_fn(x, self.weight, self.bias, residual, **options)


class OlderRMSNorm(RMSNorm):
    """``flash_attn.ops.rms_norm.RMSNorm``, whose constructor has fewer arguments."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


class DropoutAddRMSNorm(torch.nn.RMSNorm):
    """:func:`dropout_add_rms_norm` with a weight ``[hidden_size]``; ``p`` counts in training only."""

    @called_as("self hidden_size prenorm=False p=0.0 eps=1e-5 residual_in_fp32=False device=None dtype=None")
    def __init__(
        self, hidden_size: int, prenorm: bool, p: float, eps: float, residual_in_fp32: bool, **kinds: Any
    ) -> None:
        super().__init__(hidden_size, eps, **kinds)
        self.prenorm, self.p, self.residual_in_fp32 = prenorm, p, residual_in_fp32
        self.register_parameter("bias", None)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """out ``[..., hidden_size]``, with ``prenorm`` (out, sum)."""
        dropout_p = self.p if self.training else 0.0
        sums = {"prenorm": self.prenorm, "residual_in_fp32": self.residual_in_fp32}
        return dropout_add_rms_norm(x0, residual, self.weight, None, dropout_p, self.eps, **sums)


# ---- how it is computed ----------------------------------------------------------------------------------------------


def _summed(x: Tensor, residual: Tensor | None, dropout_p: float, rowscale: Tensor | None) -> Tensor:
    """The input of the norm in float32 or float64."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    if rowscale is not None:
        if rowscale.numel() != x.shape[:-1].numel():
            raise FlashArgumentError(f"rowscale must be {list(x.shape[:-1])}, got {list(rowscale.shape)}")
        total = total * rowscale.detach().reshape(*x.shape[:-1], 1).to(total.dtype)
    total = F.dropout(total, dropout_p)
    return total if residual is None else total + residual.to(total.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a tensor of floating point numbers, got {getattr(x, 'dtype', type(x).__name__)}")
    check_layout(x.shape[-1:], weight=weight, **({} if bias is None else {"bias": bias}))
    if residual is not None:
        check_layout(x.shape, residual=residual)
