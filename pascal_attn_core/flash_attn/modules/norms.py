"""Dropout, sum and normalisation in one call: ``flash_attn.ops.triton.layer_norm``. See :mod:`.norm_sums`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..options import FlashArgumentError
from .norm_sums import Norm, check_shapes, check_weights, summed

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """LayerNorm or RMSNorm of dropout(x * rowscale) + dropout(x1) + residual.

    Args:
        x: ``[..., N]``; residual, x1: of its shape.
        weight, bias: ``[N]``; weight1, bias1: ``[N]``, of a second output from the same sum.
        rowscale: ``[...]``, one factor for each row of x (stochastic depth); not with x1. It gets no gradient.
        dropout_p: share of x and of x1 that is dropped; pass 0 in evaluation.
        prenorm: return the sum too, in the dtype of residual; without one in float32 with ``residual_in_fp32``, else in
            that of x.
        zero_centered_weight: the factors are weight + 1.
        out_dtype: of the output; None = that of x.
        out, residual_out: tensors of the shape of x into which the results are written, and which are returned.
    Returns:
        out ``[..., N]``, or the tuple (out, out1 with weight1, sum with prenorm, and with ``return_dropout_mask`` the
        two bool masks of what was kept, None where nothing is dropped).
    Raises:
        TypeError, ValueError: arguments that do not fit together.
    """
    check_shapes(x, residual=residual, x1=x1, out=out, residual_out=residual_out)
    check_weights(x.shape[-1], weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    if rowscale is not None and x1 is not None:
        raise FlashArgumentError("rowscale must be None with x1 (as in flash-attn), got both")
    total = summed(x, residual, x1, rowscale=rowscale, dropout_p=dropout_p)
    norm = Norm(eps, is_rms_norm, zero_centered_weight)
    dtype = x.dtype if out_dtype is None else out_dtype
    results: list[Tensor | None] = [_into(out, norm.of(total.value, weight, bias).to(dtype))]
    if weight1 is not None:
        results.append(norm.of(total.value, weight1, bias1).to(dtype))
    if prenorm:
        results.append(_into(residual_out, total.rounded(x, residual, residual_in_fp32)))
    elif residual_out is not None:
        _into(residual_out, total.rounded(x, residual, residual_in_fp32))
    if return_dropout_mask:
        results += total.masks
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(*args: Any, **kwargs: Any) -> Any:
    """:func:`layer_norm_fn` with RMSNorm, and without its argument ``is_rms_norm``."""
    before, after = args[:_IS_RMS], args[_IS_RMS:]
    return layer_norm_fn(*before, **dict(zip(_BEHIND_IS_RMS, after)), is_rms_norm=True, **kwargs)


_NAMES = tuple(inspect.signature(layer_norm_fn).parameters)
_IS_RMS = _NAMES.index("is_rms_norm")
_BEHIND_IS_RMS = _NAMES[_IS_RMS + 1 :]


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """A linear layer ``linear_weight [M, N]`` behind :func:`layer_norm_fn`, in the dtype of x or of autocast.

    Returns:
        ``[..., M]``, with ``prenorm`` (that, the sum).
    """
    normed, total = layer_norm_fn(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps=eps,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    bias = None if linear_bias is None else linear_bias.to(normed.dtype)
    out = F.linear(normed, linear_weight.to(normed.dtype), bias)
    return (out, total) if prenorm else out


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """LayerNorm as flash-attn's tests define it: see :func:`_reference`."""
    return _reference(False, x, weight, bias, *args, **kwargs)


def rms_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """RMSNorm as flash-attn's tests define it: see :func:`_reference`."""
    return _reference(True, x, weight, bias, *args, **kwargs)


class RMSNorm(torch.nn.Module):
    """``flash_attn.ops.triton.layer_norm.RMSNorm``: :func:`rms_norm_fn` with a weight ``[hidden_size]``."""

    weight: torch.nn.Parameter
    bias: None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """``[..., hidden_size]``; see :func:`layer_norm_fn`."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def _reference(
    rms: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Any:
    """:func:`layer_norm_fn` with masks that are given, each step in the dtype of x, or with ``upcast`` in float32."""
    out_dtype = x.dtype
    if upcast:
        x, weight = x.float(), weight.float()
        bias, residual, x1, weight1, bias1 = (
            None if t is None else t.float() for t in (bias, residual, x1, weight1, bias1)
        )
    if rowscale is not None:
        x = x * rowscale[..., None]
    total = _dropped_by(x, dropout_mask, dropout_p)
    if x1 is not None:
        total = total + _dropped_by(x1, dropout_mask1, dropout_p)
    if residual is not None:
        total = (total + residual).to(x.dtype)
    norm = Norm(eps, rms, zero_centered_weight)
    results = [norm.of(total, weight, bias).to(out_dtype)]
    if weight1 is not None:
        results.append(norm.of(total, weight1, bias1).to(out_dtype))
    if prenorm:
        results.append(total)
    return results[0] if len(results) == 1 else tuple(results)


def _dropped_by(x: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    if not dropout_p:
        return x
    return F.dropout(x, dropout_p) if mask is None else x.masked_fill(~mask, 0.0) / (1.0 - dropout_p)


def _into(target: Tensor | None, value: Tensor) -> Tensor:
    return value if target is None else target.copy_(value)
