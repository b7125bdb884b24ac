"""Linear layers and MLPs: ``flash_attn.ops.fused_dense``. torch's own products, whose gradients autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..options import FlashArgumentError
from .activations import sqrelu_fwd
from .parallel import enter_group, get_dim_for_local_rank, leave_group, reduce_scatter

__all__ = [
    "ColumnParallelLinear",
    "FusedDense",
    "FusedMLP",
    "ParallelFusedMLP",
    "RowParallelLinear",
    "fused_dense_func",
    "fused_mlp_func",
]

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
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:
    """``x [..., N] @ weight [M, N].T + bias [M]``.

    Args:
        return_residual: return (output, x).
        process_group: weight is this rank's part of the outputs; with ``sequence_parallel`` x is this rank's part of
            the rows and is gathered first.
    """
    out = F.linear(enter_group(x, process_group, sequence_parallel), weight, bias)
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
        save_pre_act, checkpoint_lvl: what the backward pass recomputes instead of keeping it: 1 the activation, 2
            (or no save_pre_act) its input too.
        return_residual: return (output, x).
        heuristic: ignored, for compatibility.
        process_group, sequence_parallel: see :func:`fused_dense_func`; the output is to be summed over ranks.
    """
    _check_mlp(activation, checkpoint_lvl)
    level = checkpoint_lvl if save_pre_act else 2
    act = _ACTIVATIONS[activation]

    def second(pre_act: Tensor) -> Tensor:
        return F.linear(act(pre_act), weight2, bias2)

    def both(inner: Tensor) -> Tensor:
        return second(F.linear(inner, weight1, bias1))

    inner = enter_group(x, process_group, sequence_parallel)
    if not torch.is_grad_enabled() or not level:
        out = both(inner)
    elif level == 1:
        out = _recomputed(second, F.linear(inner, weight1, bias1))
    else:
        out = _recomputed(both, inner)
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


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose outputs are split over ranks, in units of ``multiple_of``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Any,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        local = _local("out_features", out_features, process_group, multiple_of)
        super().__init__(in_features, local, bias=bias, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs for all rows; with sequence_parallel x is this rank's rows."""
        out: Tensor = fused_dense_func(
            x, self.weight, self.bias, process_group=self.process_group, sequence_parallel=self.sequence_parallel
        )
        return out


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are split over ranks, in units of ``multiple_of``; only the first has the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Any,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        local = _local("in_features", in_features, process_group, multiple_of)
        first = torch.distributed.get_rank(process_group) == 0
        super().__init__(local, out_features, bias=bias and first, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """The sum over ranks; with sequence_parallel this rank's rows of it."""
        return leave_group(F.linear(x, self.weight, self.bias), self.process_group, self.sequence_parallel)


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

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """``[..., out_features]``, with return_residual (that, x)."""
        out = _mlp_of(self, x, process_group, True)
        if process_group is not None:
            out = reduce_scatter(out, process_group)
        return (out, x) if self.return_residual else out


class ParallelFusedMLP(nn.Module):
    """:class:`FusedMLP` whose hidden features are split over ranks."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: str = "gelu_approx",
        process_group: Any = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_mlp(activation, checkpoint_lvl)
        if process_group is None:
            raise FlashArgumentError("process_group must be given, got None; without one use FusedMLP")
        out_features, hidden_features = out_features or in_features, hidden_features or in_features * 4
        self.activation, self.checkpoint_lvl, self.heuristic = activation, checkpoint_lvl, heuristic
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        kinds: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, process_group, bias=bias1, **kinds)
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **kinds)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., out_features]``; with sequence_parallel of this rank's rows."""
        out = _mlp_of(self, x, self.process_group, self.sequence_parallel)
        return leave_group(out, self.process_group, self.sequence_parallel)


def _mlp_of(module: Any, x: Tensor, process_group: Any, sequence_parallel: bool) -> Tensor:
    out: Tensor = fused_mlp_func(
        x,
        module.fc1.weight,
        module.fc2.weight,
        module.fc1.bias,
        module.fc2.bias,
        activation=module.activation,
        save_pre_act=module.training,
        checkpoint_lvl=module.checkpoint_lvl,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
    )
    return out


def _recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return result


def _check_mlp(activation: str, checkpoint_lvl: int) -> None:
    if activation not in _ACTIVATIONS:
        raise FlashArgumentError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    if checkpoint_lvl not in (0, 1, 2):
        raise FlashArgumentError(f"checkpoint_lvl must be 0, 1 or 2, got {checkpoint_lvl!r}")


def _local(name: str, features: int, process_group: Any, multiple_of: int) -> int:
    if features % multiple_of:
        raise FlashArgumentError(f"{name} must be a multiple of {multiple_of}, got {features}")
    world, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
    return get_dim_for_local_rank(features, world, rank, multiple_of)
