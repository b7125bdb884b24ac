"""Linear layers and MLPs: ``flash_attn.ops.fused_dense``. torch's own products, whose gradients autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..options import FlashArgumentError, on_one_device
from .activations import sqrelu_fwd

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_approx": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sqrelu": sqrelu_fwd,
}


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: None = None,
    sequence_parallel: bool = True,
) -> Any:
    """``x [..., N] @ weight [M, N].T + bias [M]``.

    Args:
        return_residual: return (output, x).
    Raises:
        NotImplementedError: process_group is given.
    """
    on_one_device(process_group)
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:
    """Two linear layers with an activation between them.

    Args:
        x: ``[..., N]``; weight1 ``[hidden, N]``; weight2 ``[M, hidden]``.
        activation: "gelu_approx", "relu" or "sqrelu".
        save_pre_act, checkpoint_lvl: with False, or above 0, the backward pass computes all in between once more,
            instead of keeping it.
        return_residual: return (output, x).
        heuristic: ignored, for compatibility.
    """
    on_one_device(process_group)
    _check_mlp(activation, checkpoint_lvl)
    act = _ACTIVATIONS[activation]

    def both(inner: Tensor) -> Tensor:
        return F.linear(act(F.linear(inner, weight1, bias1)), weight2, bias2)

    if checkpoint_lvl or not save_pre_act:
        out = checkpoint(both, x, use_reentrant=False, preserve_rng_state=False)
    else:
        out = both(x)
    return (out, x) if return_residual else out


class FusedDense(nn.Linear):
    """:func:`fused_dense_func` as a module."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


class FusedMLP(nn.Module):
    """:func:`fused_mlp_func` as a module with ``fc1`` and ``fc2``."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_mlp(activation, checkpoint_lvl)
        out_features, hidden_features = out_features or in_features, hidden_features or in_features * 4
        self.activation, self.return_residual, self.checkpoint_lvl = activation, return_residual, checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor, process_group: None = None) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        return fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            activation=self.activation,
            save_pre_act=self.training,
            return_residual=self.return_residual,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=process_group,
        )


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """The share of ``dim`` that a rank has of a split layer, in units of ``multiple_of``; where it is uneven the first
    ranks have one unit more."""
    each, more = divmod(dim // multiple_of, world_size)
    return (each + (local_rank < more)) * multiple_of


def _check_mlp(activation: str, checkpoint_lvl: int) -> None:
    if activation not in _ACTIVATIONS:
        raise FlashArgumentError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    if checkpoint_lvl not in (0, 1, 2):
        raise FlashArgumentError(f"checkpoint_lvl must be 0, 1 or 2, got {checkpoint_lvl!r}")
