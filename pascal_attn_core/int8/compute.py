"""The linear layer in 8 bits and its gradients, as plain functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fused.linear import LinearCall
from ..reference.int8_rows import Int8Matrix
from .backends import GATED, expanded, row_slices, run


def forward(
    x: Tensor, weight: Int8Matrix, bias: Tensor | None, activation: str, out_dtype: torch.dtype, way: str
) -> Tensor:
    """:func:`.product.int8_linear` without gradients."""
    out = x.new_empty(result_shape(x, weight.codes, activation), dtype=out_dtype)
    flat = x.reshape(-1, x.shape[-1])
    if out.numel():
        run(LinearCall(flat, weight, bias, activation, out.view(-1, out.shape[-1])), way)
    return out


def result_shape(x: Tensor, codes: Tensor, activation: str) -> tuple[int, ...]:
    """The shape of the result for ``[..., K]`` and codes ``[N, K]``."""
    return (*x.shape[:-1], codes.shape[0] // (2 if activation in GATED else 1))


def gradient_of_input(grad: Tensor, codes: Tensor, scales: Tensor, rotation: int, dtype: torch.dtype) -> Tensor:
    """``grad W``, W expanded some rows at a time: ``[..., N]`` -> ``[..., K]``."""
    weight, (rows, columns) = Int8Matrix(codes, scales, rotation), codes.shape
    flat = grad.reshape(-1, rows)
    out = torch.zeros(flat.shape[0], columns, dtype=torch.float32, device=grad.device)
    for part in row_slices(weight, rows):
        out += flat[:, part] @ expanded(weight, part, grad.dtype)
    return out.to(dtype).view(*grad.shape[:-1], columns)


def remember(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, rotation: int) -> None:
    """Keep what :func:`gradients` needs."""
    ctx.save_for_backward(codes, scales)
    ctx.rotation, ctx.dtype, ctx.bias_dtype = rotation, x.dtype, None if bias is None else bias.dtype


def gradients(ctx: Any, grad: Tensor, of_input: Callable[..., Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and bias; ``of_input`` is :func:`gradient_of_input`, or the operator for it."""
    grad_x = of_input(grad, *ctx.saved_tensors, ctx.rotation, ctx.dtype) if ctx.needs_input_grad[0] else None
    wants_bias = ctx.needs_input_grad[3]
    grad_bias = grad.flatten(0, -2).sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None
    return grad_x, grad_bias


class Linear(torch.autograd.Function):
    """The layer without an activation, with the gradients of x and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        rotation: int,
        out_dtype: torch.dtype,
        way: str,
    ) -> Tensor:
        remember(ctx, x, codes, scales, bias, rotation)
        return forward(x, Int8Matrix(codes, scales, rotation), bias, "none", out_dtype, way)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_bias = gradients(ctx, grad, gradient_of_input)
        return grad_x, None, None, grad_bias, None, None, None
