"""MLPs: ``flash_attn.modules.mlp``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..signatures import called_as
from .activations import swiglu


class Mlp(nn.Module):
    """``fc2(activation(fc1(x)))``; hidden_features is 4 * in_features where it is not given, activation GELU."""

    activation: Any
    _width = 1  # outputs of fc1, times hidden_features

    @called_as(
        "self in_features hidden_features=None out_features=None activation=None bias1=True bias2=True "
        "return_residual=False device=None dtype=None"
    )
    def __init__(
        self, in_features: int, hidden_features: Any, out_features: Any, bias1: bool, bias2: bool, **given: Any
    ) -> None:
        super().__init__()
        self.return_residual, self.activation = given.pop("return_residual"), given.pop("activation") or F.gelu
        hidden = hidden_features or 4 * in_features
        self.fc1 = nn.Linear(in_features, self._width * hidden, bias=bias1, **given)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, **given)

    def forward(self, x: Tensor) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        out = self.fc2(self.activation(self.fc1(x)))
        return (out, x) if self.return_residual else out


class GatedMlp(Mlp):
    """``fc2(y * activation(gate))`` where fc1 gives y and the gate, in this order; activation is the sigmoid where it
    is not given.

    hidden_features is 8 / 3 * in_features where it is not given, and rounded up to a multiple of ``multiple_of``.
    """

    _width = 2

    @called_as(
        "self in_features hidden_features=None out_features=None activation=None bias1=True bias2=True multiple_of=128 "
        "return_residual=False device=None dtype=None"
    )
    def __init__(self, in_features: int, hidden_features: Any, multiple_of: int, activation: Any, **given: Any) -> None:
        hidden = -(-(hidden_features or int(8 * in_features / 3)) // multiple_of) * multiple_of
        super().__init__(in_features, hidden, activation=activation or F.sigmoid, **given)

    def forward(self, x: Tensor) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        out = self.fc2(swiglu(gate, y) if self.activation is F.silu else y * self.activation(gate))
        return (out, x) if self.return_residual else out
