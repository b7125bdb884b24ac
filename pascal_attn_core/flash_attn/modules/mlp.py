"""Linear layers and MLPs: ``flash_attn.ops.fused_dense``, ``FusedMLP`` and ``swiglu``, in torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..options import FlashArgumentError
from ..signatures import called_as

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_approx": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sqrelu": lambda x: F.relu(x).square(),
}


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y, computed in float32 (float64 for float64) and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.silu(x.to(wide)) * y.to(wide)).to(x.dtype)


@called_as(
    "x weight bias=None return_residual=False process_group=None sequence_parallel=True",
    ignored="sequence_parallel",
    refused="process_group",
)
def fused_dense_func(x: Tensor, weight: Tensor, bias: Tensor | None, return_residual: bool) -> Any:
    """``x [..., N] @ weight [M, N].T + bias [M]``, with ``return_residual`` (that, x).

    Raises:
        NotImplementedError: process_group is given.
    """
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


@called_as(
    "x weight1 weight2 bias1=None bias2=None activation='gelu_approx' save_pre_act=True return_residual=False "
    "checkpoint_lvl=0 heuristic=0 process_group=None sequence_parallel=True",
    ignored="save_pre_act checkpoint_lvl heuristic sequence_parallel",
    refused="process_group",
)
def fused_mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None, **options: Any
) -> Any:
    """Two linear layers with an activation between them.

    Args:
        x: ``[..., N]``; weight1 ``[hidden, N]``; weight2 ``[M, hidden]``.
        activation: "gelu_approx", "relu" or "sqrelu".
        return_residual: return (output, x).
        save_pre_act, checkpoint_lvl, heuristic: ignored, for compatibility.
    """
    first, second = partial(F.linear, weight=weight1, bias=bias1), partial(F.linear, weight=weight2, bias=bias2)
    return _mlp(x, first, second, **options)


def _mlp(x: Tensor, first: Any, second: Any, activation: str, return_residual: bool) -> Any:
    _check(activation)
    out = second(_ACTIVATIONS[activation](first(x)))
    return (out, x) if return_residual else out


def _check(activation: str) -> None:
    if activation not in _ACTIVATIONS:
        raise FlashArgumentError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")


class FusedDense(nn.Linear):
    """:func:`fused_dense_func` as a module."""

    @called_as("self in_features out_features bias=True return_residual=False device=None dtype=None")
    def __init__(self, return_residual: bool, **given: Any) -> None:
        super().__init__(**given)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


class FusedMLP(nn.Module):
    """:func:`fused_mlp_func` as a module with ``fc1`` and ``fc2``; hidden_features is 4 * in_features where it is not
    given."""

    @called_as(
        "self in_features hidden_features=None out_features=None bias1=True bias2=True activation='gelu_approx' "
        "return_residual=False checkpoint_lvl=0 heuristic='auto' device=None dtype=None",
        ignored="checkpoint_lvl heuristic",
    )
    def __init__(
        self, in_features: int, hidden_features: Any, out_features: Any, bias1: bool, bias2: bool, activation: str,
        return_residual: bool, **kinds: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        _check(activation)
        self.activation, self.return_residual = activation, return_residual
        hidden = hidden_features or 4 * in_features
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, **kinds)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, **kinds)

    @called_as("self x process_group=None", refused="process_group")
    def forward(self, x: Tensor) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        return _mlp(x, self.fc1, self.fc2, self.activation, self.return_residual)
