"""Activations and their gradients: ``flash_attn.ops.activations``.

Computed in float32 (float64 for float64) and rounded once; GELU is its tanh form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_fwd(x: Tensor) -> Tensor:
    """GELU, in the dtype of x."""
    return F.gelu(_exact(x), approximate="tanh").to(x.dtype)


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of x where g is that of :func:`gelu_fwd`."""
    grad, x_exact = _exact(g, x), _exact(x, g)
    return torch.ops.aten.gelu_backward(grad, x_exact, approximate="tanh").to(x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """GELU of ``y [..., D] + bias [D]``, in the dtype of y."""
    return F.gelu(_exact(y) + _exact(bias), approximate="tanh").to(y.dtype)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``y [B, D]`` and ``bias [D]`` where g is that of :func:`bias_gelu`."""
    total = _exact(y) + _exact(bias)
    grad = torch.ops.aten.gelu_backward(g.to(total.dtype), total, approximate="tanh")
    return grad.to(y.dtype), grad.sum(0).to(bias.dtype)


# Autograd functions in flash-attn, plain differentiable code here.
bias_gelu_impl = bias_gelu
fast_gelu_impl = gelu_fwd


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x >= 0, else 0, in the dtype of x."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x) ** 2, in the dtype of x."""
    return F.relu(_exact(x)).square().to(x.dtype)


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of x where g is that of :func:`sqrelu_fwd`."""
    return (2.0 * _exact(g) * F.relu(_exact(x))).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y, in the dtype of x."""
    return (F.silu(_exact(x)) * _exact(y)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y where g is that of :func:`swiglu_fwd`."""
    exact_x, exact_g = _exact(x), _exact(g)
    sigmoid = torch.sigmoid(exact_x)
    grad_x = sigmoid * (1 + exact_x * (1 - sigmoid)) * exact_g * _exact(y)
    return grad_x.to(x.dtype), (exact_x * sigmoid * exact_g).to(y.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """Keeps x and y for the backward pass, not the float32 numbers in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return swiglu_bwd(x, y, grads[0])


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y with gradients; x and y of one shape."""
    result: Tensor = SwiGLUFunction.apply(x, y)
    return result


def _exact(x: Tensor, other: Tensor | None = None) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype if other is None else torch.promote_types(dtype, other.dtype))
