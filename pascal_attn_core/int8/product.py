"""``act(x W^T + bias)`` with W in 8 bits and x rounded to 8 bits row by row.

Three ways, the first that can run:

- ``kernel``: this package's, by dp4a (NVIDIA of compute capability 6.1, and 7.0 or newer).
- ``int_mm``: :func:`torch._int_mm` on slices of rows, so that its 32-bit integers never exist as a whole.
- ``float``: W is expanded, some rows at a time, and multiplied in float; x is not rounded. It needs no more memory, but
  saves no time.

With ``acc`` the exact integer sums, the first two give ``float(acc) * (x_scale * w_scale) + bias`` in float32, each
step rounded on its own, then the activation, then one rounding to the output's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import MIB
from .quantize import MOST_COLUMNS, Int8Matrix, check_rotation, quantize_rows

# Gated ones take a weight of 2 N rows, the values first, then the gates: value * act(gate).
GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", *GATED)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WAYS = ("kernel", "int_mm", "float")
# Of one slice of the work: what is in a CPU's caches is read once; a GPU wants long ones.
_SLICE_BYTES = {"cpu": 16 * MIB}
_MOST_SLICE_BYTES = 128 * MIB


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


def activated(sums: Tensor, activation: str) -> Tensor:
    """``sums`` ``[..., N]`` or ``[..., 2 N]`` -> ``[..., N]``."""
    if activation in GATED:
        value, gate = sums.chunk(2, dim=-1)
        return value * activated(gate, GATED[activation])
    if activation == "none":
        return sums
    if activation == "silu":
        return F.silu(sums)
    return F.gelu(sums, approximate="tanh" if activation == "gelu_tanh" else "none")


def way_of(x: Tensor, weight: Int8Matrix) -> tuple[str, str]:
    """Which of WAYS a call takes, and why none before it: ``("int_mm", "the int8 kernel needs a GPU ...")``."""
    reasons: list[str] = []
    for way, why_not in _WHY_NOT.items():
        reason = why_not(x, weight)
        if not reason:
            return way, "; ".join(reasons)
        reasons.append(reason)
    raise AssertionError("a weight can always be expanded")


def ways_of(x: Tensor, weight: Int8Matrix) -> list[str]:
    """Those of WAYS that can run."""
    return [way for way, why_not in _WHY_NOT.items() if not why_not(x, weight)]


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
        if way == "auto":
            way, _ = way_of(flat, weight)
        elif reason := _WHY_NOT[way](flat, weight):
            raise NotImplementedError(f"way {way!r} cannot compute this call: {reason}")
        _RUN[way](flat, weight, bias, activation, out.view(-1, rows))
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
    for rows in _row_slices(weight, codes.shape[0]):
        part = _expanded(weight, rows, grad.dtype)
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


# ---- the ways --------------------------------------------------------------------------------------------------------


def _why_no_kernel(x: Tensor, weight: Int8Matrix) -> str:
    return "the int8 kernel needs an NVIDIA GPU with dp4a"


def _why_no_int_mm(x: Tensor, weight: Int8Matrix) -> str:
    if x.device.type == "cpu":
        return ""
    if x.device.type != "cuda" or torch.version.hip:
        return f"torch._int_mm is not there on {x.device.type}"
    if weight.codes.shape[0] % 8 or weight.codes.shape[1] % 8:
        return f"torch._int_mm needs sizes that are multiples of 8, got {list(weight.codes.shape)}"
    return ""


def _why_no_float(x: Tensor, weight: Int8Matrix) -> str:
    return ""


def by_int_mm(x: Tensor, weight: Int8Matrix, bias: Tensor | None, activation: str, out: Tensor) -> None:
    """x ``[M, K]`` -> out ``[M, N]``, some rows of x at a time."""
    codes = weight.codes.t()
    wide = None if bias is None else bias.float()
    rows, columns = weight.codes.shape
    # Integers, floats and the activation's result; of x a float32 copy or four, while it is rotated, and its codes.
    step = max(32, _slice_bytes(x.device) // (12 * rows + (17 if weight.rotation else 9) * columns))
    for start in range(0, x.shape[0], step):
        part = quantize_rows(x[start : start + step], weight.rotation)
        count, rounded = part.codes.shape[0], part.codes
        if x.is_cuda and count <= 16:  # cuBLAS wants more rows
            rounded = F.pad(rounded, (0, 0, 0, 32 - count))
        sums = torch._int_mm(rounded, codes)[:count].float()
        sums.mul_(part.scales[:, None] * weight.scales)
        if wide is not None:
            sums.add_(wide)
        out[start : start + step] = activated(sums, activation)


def by_float(x: Tensor, weight: Int8Matrix, bias: Tensor | None, activation: str, out: Tensor) -> None:
    """x ``[M, K]`` -> out ``[M, N]``, some rows of the weight at a time."""
    gates = out.shape[1]  # where the gates begin
    for rows in _row_slices(weight, out.shape[1]):
        parts = [rows, slice(rows.start + gates, rows.stop + gates)] if activation in GATED else [rows]
        wide = torch.cat([_expanded(weight, part, x.dtype) for part in parts])
        added = None if bias is None else torch.cat([bias[part] for part in parts]).to(x.dtype)
        step = max(32, _slice_bytes(x.device) // (12 * wide.shape[0]))
        for start in range(0, x.shape[0], step):
            sums = F.linear(x[start : start + step], wide, added).float()
            out[start : start + step, rows] = activated(sums, activation)


def _slice_bytes(device: torch.device) -> int:
    return _SLICE_BYTES.get(device.type, _MOST_SLICE_BYTES)


def _row_slices(weight: Int8Matrix, rows: int) -> list[slice]:
    """The first ``rows`` of a weight in slices."""
    # In float32, while it is rotated, and in x's dtype.
    step = max(1, _slice_bytes(weight.codes.device) // ((20 if weight.rotation else 8) * weight.codes.shape[1]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _expanded(weight: Int8Matrix, rows: slice, dtype: torch.dtype) -> Tensor:
    scales = weight.scales if weight.scales.numel() == 1 else weight.scales[rows]
    return Int8Matrix(weight.codes[rows], scales, weight.rotation).float().to(dtype)


_WHY_NOT = {"kernel": _why_no_kernel, "int_mm": _why_no_int_mm, "float": _why_no_float}
_RUN = {"int_mm": by_int_mm, "float": by_float}
