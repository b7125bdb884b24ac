"""Dropout, sum and normalisation in one call: ``flash_attn.ops.{triton.layer_norm,layer_norm,rms_norm}``.

    sum = dropout(x * rowscale) * layerscale + residual
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
_OLDER = (
    "x0 residual weight bias dropout_p epsilon rowscale=None layerscale=None prenorm=False residual_in_fp32=False "
    "return_dropout_mask=False"
)
_OLDER_NAMES = {"epsilon": "eps"}
_REFUSED = "x1 weight1 bias1 out residual_out"


@called_as(f"{_BEFORE} is_rms_norm=False {_AFTER}", refused=_REFUSED)
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, dropout_p: float,
    rowscale: Tensor | None, prenorm: bool, residual_in_fp32: bool, zero_centered_weight: bool, is_rms_norm: bool,
    return_dropout_mask: bool, out_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    """LayerNorm or RMSNorm of dropout(x * rowscale) + residual.

    Args:
        x: ``[..., N]``; residual: of its shape.
        weight, bias: ``[N]``.
        rowscale: ``[...]``, one factor for each row of x (stochastic depth). It gets no gradient.
        dropout_p: share of x that is dropped; pass 0 in evaluation.
        prenorm: return the sum too, in the dtype of residual; without one in float32 with ``residual_in_fp32``, else in
            that of x.
        zero_centered_weight: the factors are weight + 1.
        out_dtype: of the output; None = that of x.
    Returns:
        out ``[..., N]``, or the tuple (out, sum with prenorm, and with ``return_dropout_mask`` the bool mask of what
        was kept, None where nothing is dropped, and None).
    Raises:
        TypeError, ValueError: arguments that do not fit together.
        NotImplementedError: x1, weight1 or bias1 is given, as in parallel blocks, or out or residual_out.
    """
    _check(x, weight, bias, residual)
    total, mask = _summed(x, residual, dropout_p, rowscale)
    factor = weight.to(total.dtype) + (1.0 if zero_centered_weight else 0.0)
    shift = None if bias is None else bias.to(total.dtype)
    if is_rms_norm:
        normed = F.rms_norm(total, list(x.shape[-1:]), factor, eps)
        normed = normed if shift is None else normed + shift
    else:
        normed = F.layer_norm(total, x.shape[-1:], factor, shift, eps)
    results: list[Tensor | None] = [normed.to(x.dtype if out_dtype is None else out_dtype)]
    if prenorm:
        wide = torch.promote_types(x.dtype, torch.float32) if residual_in_fp32 else x.dtype
        results.append(total.to(wide if residual is None else residual.dtype))
    if return_dropout_mask:
        results += [mask, None]
    return results[0] if len(results) == 1 else tuple(results)


@called_as(f"{_BEFORE} {_AFTER}", refused=_REFUSED)
def rms_norm_fn(**given: Any) -> Any:
    """:func:`layer_norm_fn` with RMSNorm, and without its argument ``is_rms_norm``."""
    return layer_norm_fn(**given, is_rms_norm=True)


@called_as(_OLDER, renamed=_OLDER_NAMES)
def dropout_add_layer_norm(**given: Any) -> Any:
    """LayerNorm of dropout(x0 * rowscale) * layerscale + residual.

    Args:
        x0: ``[..., N]``; residual: of its shape.
        rowscale: ``[...]``, without a gradient; layerscale: ``[N]``, with one.
        prenorm: return the sum too, in the dtype of residual; without one in float32 with ``residual_in_fp32``, else in
            that of x0.
        return_dropout_mask: return a uint8 mask too, 1 = kept.
    Returns:
        out ``[..., N]`` in the dtype of x0, or the tuple (out, sum, mask) of what is asked for.
    """
    return _older(**given, is_rms_norm=False)


@called_as(_OLDER, renamed=_OLDER_NAMES)
def dropout_add_rms_norm(**given: Any) -> Any:
    """:func:`dropout_add_layer_norm` with RMSNorm."""
    return _older(**given, is_rms_norm=True)


def _older(x0: Tensor, layerscale: Tensor | None, return_dropout_mask: bool, **given: Any) -> Any:
    """:func:`layer_norm_fn` of x0 * layerscale, with one mask, of bytes."""
    x, residual = x0, given["residual"]
    if layerscale is not None:
        check_layout(x0.shape[-1:], layerscale=layerscale)
        wide = torch.promote_types(x0.dtype, torch.float32)
        x = x0.to(wide) * layerscale.to(wide)
    out, *total, mask, _ = layer_norm_fn(x, **given, out_dtype=x0.dtype, return_dropout_mask=True)
    if residual is None and not given["residual_in_fp32"]:
        total = [t.to(x0.dtype) for t in total]
    masks = [torch.ones_like(x0, dtype=torch.uint8) if mask is None else mask.to(torch.uint8)]
    results = (out, *total, *(masks if return_dropout_mask else ()))
    return results if len(results) > 1 else out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension, returned in the dtype of x."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, returned in the dtype of x."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


@called_as(
    "x norm_weight norm_bias linear_weight linear_bias residual=None eps=1e-6 prenorm=False residual_in_fp32=False "
    "is_rms_norm=False",
    renamed={"norm_weight": "weight", "norm_bias": "bias"},
)
def layer_norm_linear_fn(linear_weight: Tensor, linear_bias: Tensor | None, prenorm: bool, **norm: Any) -> Any:
    """A linear layer ``linear_weight [M, N]`` after :func:`layer_norm_fn`, in the dtype of x or of autocast.

    Returns:
        ``[..., M]``, with ``prenorm`` (that, the sum).
    """
    normed, total = layer_norm_fn(**norm, prenorm=True)
    bias = None if linear_bias is None else linear_bias.to(normed.dtype)
    out = F.linear(normed, linear_weight.to(normed.dtype), bias)
    return (out, total) if prenorm else out


class RMSNorm(torch.nn.RMSNorm):
    """``flash_attn.ops.triton.layer_norm.RMSNorm``: :func:`rms_norm_fn` with a weight ``[hidden_size]``."""

    @called_as("self hidden_size eps=1e-5 dropout_p=0.0 zero_centered_weight=False device=None dtype=None")
    def __init__(
        self, hidden_size: int, eps: float, dropout_p: float, zero_centered_weight: bool, **kinds: Any
    ) -> None:
        self.zero_centered_weight = zero_centered_weight
        super().__init__(hidden_size, eps, **kinds)
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Make the factors 1."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """``[..., hidden_size]``; see :func:`layer_norm_fn`."""
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        options = {"residual_in_fp32": residual_in_fp32, "zero_centered_weight": self.zero_centered_weight}
        given = self.weight, self.bias, residual
        return rms_norm_fn(x, *given, eps=self.eps, dropout_p=dropout_p, prenorm=prenorm, **options)


class OlderRMSNorm(RMSNorm):
    """``flash_attn.ops.rms_norm.RMSNorm``, whose constructor has fewer arguments."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


class DropoutAddLayerNorm(torch.nn.LayerNorm):
    """:func:`dropout_add_layer_norm` with a weight and a bias ``[hidden_size]``; ``p`` counts in training only."""

    rms = False

    @called_as("self hidden_size prenorm=False p=0.0 eps=1e-5 residual_in_fp32=False device=None dtype=None")
    def __init__(self, hidden_size: int, prenorm: bool, p: float, residual_in_fp32: bool, **given: Any) -> None:
        super().__init__(hidden_size, bias=not self.rms, **given)
        self.prenorm, self.p, self.residual_in_fp32 = prenorm, p, residual_in_fp32

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """out ``[..., hidden_size]``, with ``prenorm`` (out, sum)."""
        function = dropout_add_rms_norm if self.rms else dropout_add_layer_norm
        dropout_p = self.p if self.training else 0.0
        sums = {"prenorm": self.prenorm, "residual_in_fp32": self.residual_in_fp32}
        return function(x0, residual, self.weight, self.bias, dropout_p, self.eps, **sums)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """:class:`DropoutAddLayerNorm` with RMSNorm, without a bias."""

    rms = True


# ---- how it is computed ----------------------------------------------------------------------------------------------


def _summed(
    x: Tensor, residual: Tensor | None, dropout_p: float, rowscale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(the input of the norm in float32 or float64, the mask of what was kept of x)."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    mask = None
    if rowscale is not None:
        if rowscale.numel() != x.shape[:-1].numel():
            raise FlashArgumentError(f"rowscale must be {list(x.shape[:-1])}, got {list(rowscale.shape)}")
        total = total * rowscale.detach().reshape(*x.shape[:-1], 1).to(total.dtype)
    if not 0.0 <= dropout_p < 1.0:
        raise FlashArgumentError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    if dropout_p:
        mask = torch.rand_like(total) >= dropout_p
        total = total.masked_fill(~mask, 0.0) / (1.0 - dropout_p)
    return total if residual is None else total + residual.to(total.dtype), mask


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a tensor of floating point numbers, got {getattr(x, 'dtype', type(x).__name__)}")
    check_layout(x.shape[-1:], weight=weight, **({} if bias is None else {"bias": bias}))
    if residual is not None:
        check_layout(x.shape, residual=residual)
