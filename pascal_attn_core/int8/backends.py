"""The linear layer in 8 bits as functions of tensors: the backends that compute it on one device, and which of them a
call takes.

- ``kernel``: this package's, by dp4a (NVIDIA of compute capability 6.1, and 7.0 or newer).
- ``int_mm``: :func:`torch._int_mm` on slices of rows, so that its 32-bit integers never exist as a whole.
- ``float``: W is expanded, some rows at a time, and multiplied in float; x is not rounded. It needs no more memory, but
  saves no time.

The first that can run; where the first two both can, the one that was faster when they were timed, once for this size.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contest.ways import ProductKind, Way, Ways
from ..fused.code.compilation import Compilation
from ..fused.code.source import linear_variants
from ..fused.launch.fields import UNBOUNDED
from ..fused.linear import LinearCall, run_linear, why_not
from ..machine.device import MIB
from ..machine.runtime import runtime_of
from ..reference.int8_rows import Int8Matrix, quantize_rows

# Gated ones take a weight of 2 N rows, the values first, then the gates: value * act(gate).
GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", *GATED)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = ("kernel", "int_mm", "float")
# Sizes of one slice of the work: what is in a CPU's caches is read once; a GPU wants long slices.
_SLICE_BYTES = {"cpu": 16 * MIB}
_MOST_SLICE_BYTES = 128 * MIB


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


def forward(
    x: Tensor, weight: Int8Matrix, bias: Tensor | None, activation: str, out_dtype: torch.dtype, way: str
) -> Tensor:
    """:func:`.product.int8_linear` without gradients."""
    out = x.new_empty(result_shape(x, weight.codes, activation), dtype=out_dtype)
    if not out.numel():
        return out
    call = LinearCall(x.reshape(-1, x.shape[-1]), weight, bias, activation, out.view(-1, out.shape[-1]))
    if way == "auto":
        runtime_of(x.device).part(LinearWays).compute(call)
        return out
    why_not_this, compute = LinearWays.table[way]
    if reason := why_not_this(call):
        raise NotImplementedError(f"way {way!r} cannot compute this call: {reason}")
    compute(call)
    return out


def result_shape(x: Tensor, codes: Tensor, activation: str) -> tuple[int, ...]:
    """The shape of the result for ``[..., K]`` and codes ``[N, K]``."""
    return (*x.shape[:-1], codes.shape[0] // (2 if activation in GATED else 1))


def backend_for(x: Tensor, weight: Int8Matrix) -> Way:
    """The backend that an input like ``x`` ``[..., K]`` takes."""
    flat = x.reshape(-1, x.shape[-1])
    call = LinearCall(flat, weight, None, "none", flat.new_empty(flat.shape[0], weight.codes.shape[0]))
    return runtime_of(x.device).part(LinearWays).chosen(call)


def backend_on(device: torch.device) -> Way:
    """The first backend that can run on a device, for layers of ordinary sizes in float16, as far as is known without a
    trial or a timing."""
    reasons = why_not(device, columns=64, untried=True)
    if not reasons:
        return Way("kernel", "")
    reason = runtime_of(device).part(LinearWays).why_no_int_mm
    return Way("float", "; ".join([*reasons, reason])) if reason else Way("int_mm", "; ".join(reasons))


# ---- what can --------------------------------------------------------------------------------------------------------


def _why_no_kernel(call: LinearCall) -> str:
    x, weight = call.x, call.weight
    if weight.codes.shape[0] >= UNBOUNDED:
        return f"the int8 linear kernel needs fewer than {UNBOUNDED} rows, got {weight.codes.shape[0]}"
    dtypes = (x.dtype, call.out.dtype)
    return "; ".join(why_not(x.device, columns=weight.codes.shape[1], rotation=weight.rotation, dtypes=dtypes))


def _why_no_int_mm(call: LinearCall) -> str:
    x, (rows, columns) = call.x, call.weight.codes.shape
    if x.device.type == "cuda" and (rows % 8 or columns % 8):
        return f"torch._int_mm needs sizes that are multiples of 8, got {[rows, columns]}"
    return runtime_of(x.device).part(LinearWays).why_no_int_mm


# ---- what they do ----------------------------------------------------------------------------------------------------


def by_kernel(call: LinearCall) -> None:
    """Raises KernelUnavailable, DriverError: see :func:`..fused.linear.run_linear`."""
    x, weight, bias, activation, out = call
    x = x if x.stride(-1) == 1 or x.shape[1] == 1 else x.contiguous()
    if bias is not None:
        bias = (bias if bias.dtype in FLOATS else bias.float()).contiguous()
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    run_linear(LinearCall(x, Int8Matrix(codes, scales, weight.rotation), bias, activation, out))


def by_int_mm(call: LinearCall) -> None:
    """Compute a call some rows of x at a time."""
    x, weight, bias, activation, out = call
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


def by_float(call: LinearCall) -> None:
    """Compute a call some rows of the weight at a time."""
    x, weight, bias, activation, out = call
    gates = out.shape[1]  # where the gates begin
    for rows in row_slices(weight, out.shape[1]):
        parts = [rows, slice(rows.start + gates, rows.stop + gates)] if activation in GATED else [rows]
        wide = torch.cat([expanded(weight, part, x.dtype) for part in parts])
        added = None if bias is None else torch.cat([bias[part] for part in parts]).to(x.dtype)
        step = max(32, _slice_bytes(x.device) // (12 * wide.shape[0]))
        for start in range(0, x.shape[0], step):
            sums = F.linear(x[start : start + step], wide, added).float()
            out[start : start + step, rows] = activated(sums, activation)


def _slice_bytes(device: torch.device) -> int:
    return _SLICE_BYTES.get(device.type, _MOST_SLICE_BYTES)


def row_slices(weight: Int8Matrix, rows: int) -> list[slice]:
    """The first ``rows`` of a weight in slices."""
    # In float32, while it is rotated, and in x's dtype.
    step = max(1, _slice_bytes(weight.codes.device) // ((20 if weight.rotation else 8) * weight.codes.shape[1]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def expanded(weight: Int8Matrix, rows: slice, dtype: torch.dtype) -> Tensor:
    """These rows of a weight, in float."""
    scales = weight.scales if weight.scales.numel() == 1 else weight.scales[rows]
    return Int8Matrix(weight.codes[rows], scales, weight.rotation).float().to(dtype)


def gradient_of_input(grad: Tensor, codes: Tensor, scales: Tensor, rotation: int, dtype: torch.dtype) -> Tensor:
    """``grad W``, W expanded some rows at a time: ``[..., N]`` -> ``[..., K]``."""
    weight, (rows, columns) = Int8Matrix(codes, scales, rotation), codes.shape
    flat = grad.reshape(-1, rows)
    out = torch.zeros(flat.shape[0], columns, dtype=torch.float32, device=grad.device)
    for part in row_slices(weight, rows):
        out += flat[:, part] @ expanded(weight, part, grad.dtype)
    return out.to(dtype).view(*grad.shape[:-1], columns)


class LinearWays(Ways[ProductKind]):
    """The backends of a device. Made by ``runtime.part(LinearWays)``."""

    file_kind, kind_type, rivals = "int8-linear", ProductKind, ("kernel", "int_mm")
    table: ClassVar = {
        "kernel": (_why_no_kernel, by_kernel),
        "int_mm": (_why_no_int_mm, by_int_mm),
        "float": (lambda call: "", by_float),
    }

    def kind_of(self, call: LinearCall) -> ProductKind:
        return ProductKind.of(call.x, call.weight.codes.shape[0], f"rotation {call.weight.rotation}")

    def kernels(self) -> tuple[Compilation, ...]:
        return linear_variants()

    @functools.cached_property
    def why_no_int_mm(self) -> str:
        """Why torch._int_mm does not work on the device; "" = it does."""
        ones = torch.ones(32, 32, dtype=torch.int8, device=self.device)
        try:
            torch._int_mm(ones, ones)
        except (RuntimeError, NotImplementedError) as error:
            return f"torch._int_mm: {str(error).strip().splitlines()[0][:120]}"
        return ""
