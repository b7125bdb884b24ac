"""Collectives with gradients: ``flash_attn.utils.distributed``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..options import FlashArgumentError


def all_gather_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """(the inputs of all ranks, concatenated along dimension 0, handle of the operation); no gradients."""
    world = torch.distributed.get_world_size(process_group)
    output = input_.new_empty(world * input_.shape[0], *input_.shape[1:])
    gather = _renamed("all_gather_single", "all_gather_into_tensor")
    handle = gather(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def reduce_scatter_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """(this rank's part along dimension 0 of the sum over all ranks, handle of the operation); no gradients."""
    world = torch.distributed.get_world_size(process_group)
    if input_.shape[0] % world:
        raise FlashArgumentError(f"dimension 0 must be a multiple of {world} (the ranks), got {list(input_.shape)}")
    output = input_.new_empty(input_.shape[0] // world, *input_.shape[1:])
    scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    handle = scatter(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def all_reduce_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """(the sum over all ranks, written into the input where that is contiguous; handle); no gradients."""
    input_ = input_.contiguous()
    return input_, torch.distributed.all_reduce(input_, group=process_group, async_op=async_op)


class _Collective(torch.autograd.Function):
    """A collective whose gradient is computed by another one; without one the gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Any, collective: Any, backward: Any) -> Tensor:
        ctx.group, ctx.collective, ctx.backward_by = process_group, collective, backward
        result: Tensor = collective(input_, process_group)[0]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.backward_by is None:
            return grads[0], None, None, None
        return _Collective.apply(grads[0], ctx.group, ctx.backward_by, ctx.collective), None, None, None


def all_gather(input_: Tensor, process_group: Any) -> Tensor:
    """The inputs of all ranks, concatenated along dimension 0."""
    result: Tensor = _Collective.apply(input_, process_group, all_gather_raw, reduce_scatter_raw)
    return result


def reduce_scatter(input_: Tensor, process_group: Any) -> Tensor:
    """This rank's part along dimension 0 of the sum over all ranks."""
    result: Tensor = _Collective.apply(input_, process_group, reduce_scatter_raw, all_gather_raw)
    return result


def all_reduce(input_: Tensor, process_group: Any) -> Tensor:
    """The sum over all ranks; each rank's gradient is that of the sum."""
    # a copy: the backward pass of what made the input may need it
    result: Tensor = _Collective.apply(input_.clone(), process_group, all_reduce_raw, None)
    return result


def sync_shared_params(model: torch.nn.Module, process_group: Any) -> None:
    """Parameters marked ``_shared_params`` get the values that the first rank has."""
    source = torch.distributed.get_global_rank(process_group, 0)
    with torch.no_grad():
        for _, param in _marked(model, "_shared_params"):
            torch.distributed.broadcast(param, src=source, group=process_group)


def allreduce_sequence_parallel_grad(model: torch.nn.Module, process_group: Any) -> None:
    """Gradients of parameters marked ``_sequence_parallel`` are summed over all ranks, in place."""
    with torch.no_grad():
        for _, param in _marked(model, "_sequence_parallel"):
            if param.grad is not None:
                torch.distributed.all_reduce(param.grad, group=process_group)


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This rank's share of ``dim`` in units of ``multiple_of``; where it is uneven the first ranks take one more."""
    each, more = divmod(dim // multiple_of, world_size)
    return (each + (local_rank < more)) * multiple_of


def _marked(model: torch.nn.Module, mark: str) -> list[tuple[str, torch.nn.Parameter]]:
    # in one order on all ranks, which may have different numbers of parameters
    return sorted((name, p) for name, p in model.named_parameters() if getattr(p, mark, False))


def _renamed(name: str, before: str) -> Any:
    """A function of torch.distributed by the name that it has since torch 2.13, or the one before."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before)
