"""The older norms: ``flash_attn.ops.layer_norm`` and ``flash_attn.ops.rms_norm``. See :mod:`.norm_sums`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..options import FlashArgumentError
from .norm_sums import Norm, Sum, check_shapes, check_weights, summed

__all__ = [
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_layer_norm_subset",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "dropout_add_rms_norm_subset",
    "layer_norm",
    "rms_norm",
]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension, returned in the dtype of x."""
    result: Tensor = dropout_add_layer_norm(x, None, weight, bias, 0.0, epsilon)
    return result


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, returned in the dtype of x."""
    result: Tensor = dropout_add_rms_norm(x, None, weight, None, 0.0, epsilon)
    return result


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    rms: bool = False,
) -> Any:
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
    check_shapes(x0, residual=residual)
    check_weights(x0.shape[-1], weight=weight, bias=bias, layerscale=layerscale)
    total = summed(x0, residual, rowscale=rowscale, layerscale=layerscale, dropout_p=dropout_p)
    results = [Norm(epsilon, rms).of(total.value, weight, bias).to(x0.dtype)]
    if prenorm:
        results.append(total.rounded(x0, residual, residual_in_fp32))
    if return_dropout_mask:
        results.append(_as_bytes(total.masks[0], x0))
    return results[0] if len(results) == 1 else tuple(results)


def dropout_add_layer_norm_subset(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: Tensor | None = None,
    x0_subset: Tensor | None = None,
    out_subset: Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    rms: bool = False,
) -> Any:
    """:func:`dropout_add_layer_norm` where stochastic depth has left out rows of x0, and leaves out rows of the output.

    Args:
        x0: ``[rows of x0, N]``, only those that take part; residual: ``[..., N]``.
        x0_subset: whole numbers, one for each row of the sum: 1 + its row in x0, 0 = it has none.
        out_subset: whole numbers likewise: 1 + its row in the output, 0 = it is not in the output.
        rowscale_const: factor of x0.
        out_numrows: rows of the output.
    Returns:
        out ``[out_numrows, N]``, or the tuple (out, sum ``[rows, N]`` or of the shape of residual, mask of the shape of
        x0) of what is asked for.
    """
    if (x0_subset is None) != (out_subset is None):
        raise FlashArgumentError("x0_subset and out_subset must be given together, got one of them")
    hidden = x0.shape[-1]
    check_weights(hidden, weight=weight, bias=bias, layerscale=layerscale)
    rows = x0.reshape(-1, hidden)
    part = summed(rows, None, layerscale=layerscale, factor=rowscale_const, dropout_p=dropout_p)
    value = part.value
    if x0_subset is not None:
        value = _picked(torch.cat([value.new_zeros(1, hidden), value]), x0_subset, "x0_subset")
    if residual is not None:
        if residual.shape[-1] != hidden or residual.numel() != value.numel():
            raise FlashArgumentError(f"residual must hold {list(value.shape)}, got {list(residual.shape)}")
        value = value + residual.reshape(-1, hidden).to(value.dtype)
    total = Sum(value, part.masks)
    out = Norm(epsilon, rms).of(value, weight, bias).to(x0.dtype)
    if out_subset is not None:
        if out_subset.numel() != value.shape[0]:
            raise FlashArgumentError(f"out_subset must be [{value.shape[0]}], got {list(out_subset.shape)}")
        # row 0 takes what is left out
        target = out.new_zeros(out_numrows + 1, hidden)
        out = target.index_copy(0, out_subset.reshape(-1).long(), out)[1:]
    results = [out.reshape(-1, *x0.shape[1:])]
    if prenorm:
        rounded = total.rounded(x0, residual, residual_in_fp32)
        results.append(rounded.reshape(residual.shape if residual is not None else (-1, *x0.shape[1:])))
    if return_dropout_mask:
        results.append(_as_bytes(part.masks[0], x0).reshape(x0.shape))
    return results[0] if len(results) == 1 else tuple(results)


def dropout_add_layer_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    rms: bool = False,
) -> Any:
    """Two LayerNorms of the same sum dropout(x0) + dropout(x1) + residual.

    Returns:
        (out0, out1 or None without weight1), and behind them the sum with ``prenorm`` and two uint8 masks (1 = kept)
        with ``return_dropout_mask``.
    """
    check_shapes(x0, x1=x1, residual=residual)
    check_weights(x0.shape[-1], weight0=weight0, bias0=bias0, weight1=weight1, bias1=bias1)
    total, norm = summed(x0, residual, x1, dropout_p=dropout_p), Norm(epsilon, rms)
    results: list[Tensor | None] = [norm.of(total.value, weight0, bias0).to(x0.dtype)]
    results.append(None if weight1 is None else norm.of(total.value, weight1, bias1).to(x0.dtype))
    if prenorm:
        results.append(total.rounded(x0, residual, residual_in_fp32))
    if return_dropout_mask:
        results += [_as_bytes(mask, x0) for mask in total.masks]
    return tuple(results)


dropout_add_rms_norm = partial(dropout_add_layer_norm, rms=True)
dropout_add_rms_norm_subset = partial(dropout_add_layer_norm_subset, rms=True)
dropout_add_rms_norm_parallel_residual = partial(dropout_add_layer_norm_parallel_residual, rms=True)


class RMSNorm(torch.nn.Module):
    """``flash_attn.ops.rms_norm.RMSNorm``: :func:`rms_norm` with a weight ``[hidden_size]``."""

    weight: torch.nn.Parameter

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]``."""
        return rms_norm(x, self.weight, self.eps)


class DropoutAddLayerNorm(torch.nn.Module):
    """:func:`dropout_add_layer_norm` with a weight and a bias ``[hidden_size]``; ``p`` counts in training only."""

    rms = False
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bias = None if self.rms else torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """out ``[..., hidden_size]``, with ``prenorm`` (out, sum)."""
        dropout_p = self.p if self.training else 0.0
        sums = {"prenorm": self.prenorm, "residual_in_fp32": self.residual_in_fp32, "rms": self.rms}
        return dropout_add_layer_norm(x0, residual, self.weight, self.bias, dropout_p, self.eps, **sums)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """:class:`DropoutAddLayerNorm` with RMSNorm, without a bias."""

    rms = True


def _picked(rows: Tensor, subset: Tensor, name: str) -> Tensor:
    if subset.is_floating_point():
        raise TypeError(f"{name} must be whole numbers, got {subset.dtype}")
    return rows.index_select(0, subset.reshape(-1).long())


def _as_bytes(mask: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.uint8) if mask is None else mask.to(torch.uint8)
