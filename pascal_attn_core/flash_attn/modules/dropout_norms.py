"""The older norms: ``flash_attn.ops.layer_norm`` and ``flash_attn.ops.rms_norm``. See :mod:`.norm_sums`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .norm_sums import Norm, check_shapes, check_weights, summed

__all__ = [
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
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


def _as_bytes(mask: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.uint8) if mask is None else mask.to(torch.uint8)
