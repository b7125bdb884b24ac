"""``act(x W^T + bias)`` with W in 8 bits and x rounded to 8 bits row by row. What computes it: :mod:`.ways`.

With ``acc`` the exact integer sums, all but the way ``float`` give ``float(acc) * (x_scale * w_scale) + bias`` in
float32, each step rounded on its own, then the activation, then one rounding to the output's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quantize import MOST_COLUMNS, Int8Matrix, check_rotation
from .ways import ACTIVATIONS, FLOATS, GATED, WAYS, Call, activated, expanded, row_slices, run


def int8_linear(
    x: Tensor,
    weight: Int8Matrix,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    way: str = "auto",
) -> Tensor:
    """A linear layer in 8 bits. Not exact: with rows of about normal distribution both factors err by about 1 %.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16.
        weight: ``[N, K]``, from :func:`.quantize_rows`; for gated activations ``[2 N, K]``, values first, then gates.
        bias: ``[N]`` or ``[2 N]``, float, or None.
        activation: "none", "gelu", "gelu_tanh", "silu", "geglu", "geglu_tanh" or "swiglu".
        out_dtype: of the result; None = that of x.
        way: one of WAYS, or "auto" = the first that can run.
    Returns:
        ``[..., N]``. Differentiable in x and bias, as if the rounding of x were not there; the weight is constant.
    Extra memory: about 16 MiB on a CPU, 128 MiB elsewhere; what 32 rows take, where that is more.
    Raises:
        TypeError, ValueError: an argument that cannot be used.
        NotImplementedError: the way that was asked for cannot run.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    _check(x, weight, bias, activation, out_dtype, way)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if needs_grad and activation != "none":
        sums = _op(x, weight.codes, weight.scales, bias, weight.rotation, "none", torch.float32, way)
        return activated(sums, activation).to(out_dtype)
    return _op(x, weight.codes, weight.scales, bias, weight.rotation, activation, out_dtype, way)


def _check(
    x: Tensor, weight: Int8Matrix, bias: Tensor | None, activation: str, out_dtype: torch.dtype, way: str
) -> None:
    codes, scales, rotation = weight
    if x.dtype not in FLOATS or out_dtype not in FLOATS:
        raise TypeError(f"x and out_dtype must be float32, float16 or bfloat16, got {x.dtype} and {out_dtype}")
    if codes.dtype != torch.int8 or codes.dim() != 2 or scales.dtype != torch.float32:
        raise TypeError(
            f"weight must have int8 codes [N, K] and float32 scales, got {codes.dtype} {list(codes.shape)} and "
            f"{scales.dtype}"
        )
    rows, columns = codes.shape
    if x.dim() < 1 or x.shape[-1] != columns:
        raise ValueError(f"x must be [..., {columns}] for a weight {[rows, columns]}, got {list(x.shape)}")
    if not 1 <= columns <= MOST_COLUMNS:
        raise ValueError(f"weight must have 1 to {MOST_COLUMNS} columns, so that sums fit 32 bits, got {columns}")
    if tuple(scales.shape) not in ((rows,), (1,)):
        raise ValueError(f"scales must be [{rows}] or [1], got {list(scales.shape)}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ValueError(f"bias must be [{rows}], got {list(bias.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if way != "auto" and way not in WAYS:
        raise ValueError(f"way must be 'auto' or one of {', '.join(WAYS)}, got {way!r}")
    if activation in GATED and rows % 2:
        raise ValueError(f"activation {activation!r} needs a weight with an even number of rows, got {rows}")
    devices = {t.device for t in (x, codes, scales, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"x, weight and bias must be on one device, got {', '.join(sorted(map(str, devices)))}")
    check_rotation(rotation, columns)


# ---- the operator ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("pascal_attn::int8_linear", mutates_args=())
def _op(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    rotation: int,
    activation: str,
    out_dtype: torch.dtype,
    way: str,
) -> Tensor:
    weight = Int8Matrix(codes, scales, rotation)
    rows = codes.shape[0] // (2 if activation in GATED else 1)
    out = x.new_empty((*x.shape[:-1], rows), dtype=out_dtype)
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] and rows:
        run(Call(flat, weight, bias, activation, out.view(-1, rows)), way)
    return out


@_op.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    rotation: int,
    activation: str,
    out_dtype: torch.dtype,
    way: str,
) -> Tensor:
    rows = codes.shape[0] // (2 if activation in GATED else 1)
    return x.new_empty((*x.shape[:-1], rows), dtype=out_dtype)


@torch.library.custom_op("pascal_attn::int8_linear_backward", mutates_args=())
def _backward_op(grad: Tensor, codes: Tensor, scales: Tensor, rotation: int, dtype: torch.dtype) -> Tensor:
    """The gradient of x: ``grad W``, W expanded some rows at a time."""
    weight = Int8Matrix(codes, scales, rotation)
    flat = grad.reshape(-1, grad.shape[-1])
    out = torch.zeros(flat.shape[0], codes.shape[1], dtype=torch.float32, device=grad.device)
    for rows in row_slices(weight, codes.shape[0]):
        part = expanded(weight, rows, grad.dtype)
        out += flat[:, rows] @ part
    return out.to(dtype).view(*grad.shape[:-1], codes.shape[1])


@_backward_op.register_fake
def _(grad: Tensor, codes: Tensor, scales: Tensor, rotation: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], codes.shape[1]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scales, bias, rotation, activation, *_ = inputs
    assert activation == "none"
    ctx.save_for_backward(codes, scales)
    ctx.rotation, ctx.dtype, ctx.bias_dtype = rotation, x.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales = ctx.saved_tensors
    grad_x = _backward_op(grad, codes, scales, ctx.rotation, ctx.dtype) if ctx.needs_input_grad[0] else None
    grad_bias = None
    if ctx.needs_input_grad[3]:
        grad_bias = grad.flatten(0, -2).sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
    return grad_x, None, None, grad_bias, None, None, None, None


_op.register_autograd(_gradients, setup_context=_save)
