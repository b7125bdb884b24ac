"""Linear layers and MLPs: ``flash_attn.ops.fused_dense``. torch's own products, whose gradients autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..options import FlashArgumentError
from ..signatures import called_as
from .activations import sqrelu_fwd
from .mlp import Mlp

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
    """``x [..., N] @ weight [M, N].T + bias [M]``, with ``return_residual`` (that, x).

    Raises:
        NotImplementedError: process_group is given.
    """
    _on_one_device(process_group)
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
    _on_one_device(process_group)
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

    @called_as("self in_features out_features bias=True return_residual=False device=None dtype=None")
    def __init__(self, return_residual: bool, **given: Any) -> None:
        super().__init__(**given)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


class FusedMLP(Mlp):
    """:func:`fused_mlp_func` as a module with ``fc1`` and ``fc2``."""

    @called_as(
        "self in_features hidden_features=None out_features=None bias1=True bias2=True activation='gelu_approx' "
        "return_residual=False checkpoint_lvl=0 heuristic='auto' device=None dtype=None"
    )
    def __init__(self, activation: str, checkpoint_lvl: int, heuristic: int | str, **given: Any) -> None:
        _check_mlp(activation, checkpoint_lvl)
        super().__init__(activation=activation, **given)
        self.checkpoint_lvl, self.heuristic = checkpoint_lvl, heuristic

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


def _on_one_device(process_group: None) -> None:
    if process_group is not None:
        raise NotImplementedError("process_group is not supported by Pascal Attention: models are not split")


def _check_mlp(activation: str, checkpoint_lvl: int) -> None:
    if activation not in _ACTIVATIONS:
        raise FlashArgumentError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    if checkpoint_lvl not in (0, 1, 2):
        raise FlashArgumentError(f"checkpoint_lvl must be 0, 1 or 2, got {checkpoint_lvl!r}")
