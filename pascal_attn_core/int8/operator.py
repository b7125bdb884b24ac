"""The linear layer in 8 bits as one custom operator, ``pascal_attn::int8_linear``, with a fake and an autograd formula:
what torch.compile, fake tensors and dispatch modes see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gguf.matrix import gradient_of_bias
from ..reference.int8_rows import Int8Matrix
from .backends import forward, gradient_of_input, result_shape


# torch 2.4 cannot read a schema from annotations that are text.
@torch.library.custom_op(
    "pascal_attn::int8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scales, Tensor? bias, SymInt rotation, str activation, "
    "ScalarType out_dtype, str way) -> Tensor",
)
def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, rotation: int, *others: Any) -> Tensor:
    """The operator behind :func:`.product.int8_linear`; it has gradients only without an activation."""
    return forward(x, Int8Matrix(codes, scales, rotation), bias, *others)


@linear.register_fake
def _(x: Tensor, codes: Tensor, *others: Any) -> Tensor:
    _scales, _bias, _rotation, activation, dtype, _way = others
    return x.new_empty(result_shape(x, codes, activation), dtype=dtype)


_of_input = torch.library.custom_op(
    "pascal_attn::int8_linear_backward",
    gradient_of_input,
    mutates_args=(),
    schema="(Tensor grad, Tensor codes, Tensor scales, SymInt rotation, ScalarType dtype) -> Tensor",
)


@_of_input.register_fake
def _(grad: Tensor, codes: Tensor, scales: Tensor, rotation: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], codes.shape[1]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scales, bias, rotation, activation, *_ = inputs
    assert activation == "none"
    ctx.save_for_backward(codes, scales)
    ctx.rotation, ctx.dtype, ctx.bias_dtype = rotation, x.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = _of_input(grad, *ctx.saved_tensors, ctx.rotation, ctx.dtype) if ctx.needs_input_grad[0] else None
    grad_bias = gradient_of_bias(grad, ctx.bias_dtype) if ctx.needs_input_grad[3] else None
    return grad_x, None, None, grad_bias, None, None, None, None


linear.register_autograd(_gradients, setup_context=_save)
