"""Activations: ``flash_attn.ops.activations``.

Computed in float32 (float64 for float64) and rounded once; GELU is its tanh form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def gelu_fwd(x: Tensor) -> Tensor:
    """GELU, in the dtype of x."""
    return F.gelu(_exact(x), approximate="tanh").to(x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """GELU of ``y [..., D] + bias [D]``, in the dtype of y."""
    return F.gelu(_exact(y) + _exact(bias), approximate="tanh").to(y.dtype)


# Autograd functions in flash-attn, plain differentiable code here.
bias_gelu_impl = bias_gelu
fast_gelu_impl = gelu_fwd


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x) ** 2, in the dtype of x."""
    return F.relu(_exact(x)).square().to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y, in the dtype of x."""
    return (F.silu(_exact(x)) * _exact(y)).to(x.dtype)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y; x and y are kept for the backward pass, not the float32 numbers in between."""
    result: Tensor = checkpoint(swiglu_fwd, x, y, use_reentrant=False, preserve_rng_state=False)
    return result


class SwiGLUFunction:
    """``SwiGLUFunction.apply`` is :func:`swiglu`, for code that calls the autograd function by its name."""

    apply = staticmethod(swiglu)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
