"""MLPs: ``flash_attn.modules.mlp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import swiglu


class Mlp(nn.Module):
    """``fc2(activation(fc1(x)))``; hidden_features is 4 * in_features where it is not given."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = in_features * 4 if hidden_features is None else hidden_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        out = self.fc2(self.activation(self.fc1(x)))
        return (out, x) if self.return_residual else out


class GatedMlp(nn.Module):
    """``fc2(y * activation(gate))`` where fc1 gives y and the gate, in this order.

    hidden_features is 8 / 3 * in_features where it is not given, and rounded up to a multiple of ``multiple_of``.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        out = self.fc2(swiglu(gate, y) if self.activation is F.silu else y * self.activation(gate))
        return (out, x) if self.return_residual else out
