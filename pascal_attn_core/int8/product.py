"""``act(x W^T + bias)`` with W in 8 bits and x rounded to 8 bits row by row. What computes it: :mod:`.backends`.

With ``acc`` the exact integer sums, all backends but ``float`` give ``float(acc) * (x_scale * w_scale) + bias`` in
float32, each step rounded on its own, then the activation, then one rounding to the output's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..fused.code.kinds import MOST_COLUMNS
from ..gguf.matrix import LinearWithGradients
from ..reference.int8_rows import Int8Matrix, check_rotation
from .backends import ACTIVATIONS, BACKENDS, FLOATS, GATED, activated, forward, gradient_of_input


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
        way: the backend, one of BACKENDS, or "auto" = the first that can run.
    Returns:
        ``[..., N]``. Differentiable in x and bias, as if the rounding of x were not there; the weight is constant.
    Extra memory: about 16 MiB on a CPU, 128 MiB elsewhere; what 32 rows take, where that is more.
    Raises:
        TypeError, ValueError: an argument that cannot be used.
        NotImplementedError: the backend that was asked for cannot run.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    _check(x, weight, bias, activation, out_dtype, way)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if needs_grad and activation != "none":
        sums = int8_linear(x, weight, bias, out_dtype=torch.float32, way=way)
        return activated(sums, activation).to(out_dtype)
    is_traced = torch._C._get_tracing_state() is not None
    if torch.compiler.is_compiling() or is_traced or isinstance(x, FakeTensor) or torch._C._len_torch_dispatch_stack():
        from .operator import linear  # not before: where two copies of this package are loaded, both would register it

        return linear(x, weight.codes, weight.scales, bias, weight.rotation, activation, out_dtype, way)
    if needs_grad:
        dtype = x.dtype  # x itself need not live until the backward pass
        return LinearWithGradients.apply(
            x,
            bias,
            lambda x, bias: forward(x, weight, bias, "none", out_dtype, way),
            lambda grad: gradient_of_input(grad, *weight, dtype),
        )
    return forward(x, weight, bias, activation, out_dtype, way)


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
    if way != "auto" and way not in BACKENDS:
        raise ValueError(f"way must be 'auto' or one of {', '.join(BACKENDS)}, got {way!r}")
    if activation in GATED and rows % 2:
        raise ValueError(f"activation {activation!r} needs a weight with an even number of rows, got {rows}")
    devices = {t.device for t in (x, codes, scales, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"x, weight and bias must be on one device, got {', '.join(sorted(map(str, devices)))}")
    check_rotation(rotation, columns)
