"""The product with the weights of a GGUF file and rows of x in 8 bits: the ways to compute it on one device, and which
of them a call takes. Not exact: x is rounded, the weights are the file's. Definition: ``fused/launch/gguf_definition``.

- ``kernel_4x8``, ``kernel``: this package's, by dp4a, in two shapes: 4 x 8 and 8 x 8 outputs of a thread.
- ``int_mm``: the definition, by :func:`torch._int_mm` on a CPU, some rows at a time.
- ``float``: the weights are expanded, some rows at a time, and multiplied in float; x is not rounded.

The fastest when they were timed, once for this size; where nothing was timed, the first that can run. Of the two shapes
that is the one that models of a GTX 1080 Ti, an MI50 and an RX 6800 find faster.
"""

from __future__ import annotations

import functools
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..contest.timing_table import Found
from ..contest.ways import ProductKind, Way, Ways
from ..fused.code.compilation import Compilation
from ..fused.code.source import gguf_variants
from ..fused.launch import gguf_definition
from ..fused.linear import GgufLinearCall, run_product, why_no_product
from ..fused.trust.kernels import Kernels, KernelUnavailable
from ..machine.device import MIB
from ..machine.runtime import runtime_of
from ..reference.gguf_blocks import FORMATS
from . import matrix
from .matrix import GgufMatrix

WAYS = ("kernel_4x8", "kernel", "int_mm", "float")
_BAND_BYTES = 16 * MIB  # of what exists of some rows of x at a time
_MOST_TIMED_ROWS = {"cpu": 256}  # more take as many times as long


class GgufCall(NamedTuple):
    """``out = x W^T + bias``: x ``[M, K]``; W ``[N, K]``, rows of whole blocks; bias float ``[N]``, or None; out
    ``[M, N]``, of x's dtype, contiguous, which is written."""

    x: Tensor
    weight: GgufMatrix
    bias: Tensor | None
    out: Tensor


def why_not(name: str, columns: int) -> str:
    """Why weights of a format, with this many columns, are not multiplied in 8 bits; "" = they are."""
    if name == "BF16":
        return "its format BF16 holds no whole numbers"
    if name == "Q2_K":
        return "its format Q2_K has a minimum for every 16 weights: folding them costs what 8 bits save"
    if columns % FORMATS[name].weights:
        return f"its width must be a multiple of {FORMATS[name].weights} for {name}, got {columns}"
    return ""


def _why_no_kernel(call: GgufCall, shape: int) -> str:
    return why_no_product(call.x.device, call.weight.format, call.x.shape[0], shape)


def by_kernel(call: GgufCall, shape: int) -> None:
    """Compute a call by the kernel of a shape; see :func:`..fused.linear.run_product` for what it raises."""
    x, weight, bias, out = call
    x = x if x.stride(-1) == 1 else x.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    run_product(GgufLinearCall(x, weight.data, weight.format, bias, out), shape)


def _why_no_int_mm(call: GgufCall) -> str:
    kind = call.x.device.type
    return "" if kind == "cpu" else f"the definition runs on a CPU, not on {kind}"


def by_int_mm(call: GgufCall) -> None:
    """Compute a call by the definition."""
    x, weight, bias, out = call
    slices = weight.slices()
    # A row of x in float32 twice, and in 8 bits; of a slice the sums, and the result with its next value in float64.
    step = max(16, _BAND_BYTES // (9 * x.shape[1] + 32 * (slices[0].stop - slices[0].start)))
    for start in range(0, x.shape[0], step):
        band = gguf_definition.round_rows(x[start : start + step])
        for some in slices:
            sums = gguf_definition.product(band, weight.parts(some), weight.format)
            out[start : start + step, some] = sums if bias is None else sums + bias[some].float()


def by_float(call: GgufCall) -> None:
    """Compute a call by expanding the weight."""
    x, weight, bias, out = call
    weight = weight._replace(dtype=x.dtype)
    out.copy_(matrix.product(x, weight, None if bias is None else bias.to(x.dtype)))


class GgufWays(Ways[ProductKind]):
    """The ways to compute a call. Made by ``runtime.part(GgufWays)``."""

    file_kind, kind_type, rivals = "gguf-linear", ProductKind, WAYS
    table: ClassVar = {
        "kernel_4x8": (functools.partial(_why_no_kernel, shape=4), functools.partial(by_kernel, shape=4)),
        "kernel": (functools.partial(_why_no_kernel, shape=8), functools.partial(by_kernel, shape=8)),
        "int_mm": (_why_no_int_mm, by_int_mm),
        "float": (lambda call: "", by_float),
    }

    def kind_of(self, call: GgufCall) -> ProductKind:
        return ProductKind.of(call.x, call.weight.shape[0], call.weight.format)

    def kernels(self) -> tuple[Compilation, ...]:
        return gguf_variants(self.runtime.part(Kernels).variant_arch)

    def times(self, call: GgufCall, names: list[str]) -> Found | None:
        most = _MOST_TIMED_ROWS.get(self.device.type, call.x.shape[0])
        return super().times(call._replace(x=call.x[:most], out=call.out[:most]), names)


def product(x: Tensor, weight: GgufMatrix, bias: Tensor | None, way: str = "auto") -> Tensor:
    """The product ``[..., N]`` of x ``[..., K]``, in its dtype, without gradients, by one of WAYS or by "auto", which
    also takes over from a way that is not available any more."""
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    call = GgufCall(x.reshape(-1, x.shape[-1]), weight, bias, out.view(-1, weight.shape[0]))
    if not out.numel():
        return out
    ways = runtime_of(x.device).part(GgufWays)
    try:
        (ways.compute if way == "auto" else ways.table[way][1])(call)
    except KernelUnavailable:
        ways.compute(call)
    return out


def way_for(x: Tensor, weight: GgufMatrix) -> Way:
    """The way that an input like ``x`` ``[..., K]`` takes."""
    flat = x.reshape(-1, x.shape[-1])
    call = GgufCall(flat, weight, None, flat.new_empty(flat.shape[0], weight.shape[0]))
    return runtime_of(x.device).part(GgufWays).chosen(call)
