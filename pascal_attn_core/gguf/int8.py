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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..fused.gguf import GgufLinearCall, gguf_digest, run_product, why_no_product
from ..fused.launch import gguf_definition
from ..fused.trust.kernels import Kernels, KernelUnavailable
from ..machine.device import MIB
from ..machine.runtime import runtime_of
from ..reference.gguf_blocks import FORMATS
from ..routes.timing_table import Contest, power_of_two
from . import matrix
from .matrix import GgufMatrix

WAYS = ("kernel_4x8", "kernel", "int_mm", "float")
_BAND_BYTES = 16 * MIB  # of what exists of some rows of x at a time
_MOST_TIMED_ROWS = {"cpu": 256}  # more take as many times as long


class GgufCall(NamedTuple):
    """``out = x W^T + bias``.

    Attributes:
        x: ``[M, K]``; out: ``[M, N]``, of x's dtype, contiguous; it is written.
        weight: ``[N, K]``, rows of whole blocks.
        bias: float ``[N]``, or None.
    """

    x: Tensor
    weight: GgufMatrix
    bias: Tensor | None
    out: Tensor


class Way(NamedTuple):
    """The way that computes a call, one of WAYS, and why none before it does."""

    name: str
    why: str


def why_not(name: str, columns: int) -> str:
    """Why weights of a format, with this many columns, are not multiplied in 8 bits; "" = they are."""
    if name == "BF16":
        return "its format BF16 holds no whole numbers"
    if name == "Q2_K":
        return "its format Q2_K has a minimum for every 16 weights: folding them costs what 8 bits save"
    if columns % FORMATS[name].weights:
        return f"its width must be a multiple of {FORMATS[name].weights} for {name}, got {columns}"
    return ""


def product(x: Tensor, weight: GgufMatrix, bias: Tensor | None, way: str = "auto") -> Tensor:
    """The product ``[..., N]`` in x's dtype, without gradients.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16.
        way: one of WAYS, or "auto".
    """
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    call = GgufCall(x.reshape(-1, x.shape[-1]), weight, bias, out.view(-1, weight.shape[0]))
    while out.numel():
        try:
            _RUN[way_of(call).name if way == "auto" else way](call)
            break
        except KernelUnavailable:  # from now on way_of knows
            way = "auto"
    return out


def way_for(x: Tensor, weight: GgufMatrix) -> Way:
    """The way that an input like ``x`` ``[..., K]`` takes."""
    return way_of(_call_of(x, weight))


def ways_for(x: Tensor, weight: GgufMatrix) -> list[str]:
    """The ways that can compute a call with such an input."""
    return [name for name, why in _WHY_NOT.items() if not why(_call_of(x, weight))]


def _call_of(x: Tensor, weight: GgufMatrix) -> GgufCall:
    flat = x.reshape(-1, x.shape[-1])
    return GgufCall(flat, weight, None, flat.new_empty(flat.shape[0], weight.shape[0]))


def way_of(call: GgufCall) -> Way:
    """The way that a call takes."""
    reasons = {name: why(call) for name, why in _WHY_NOT.items()}
    able = [name for name, reason in reasons.items() if not reason]
    times = runtime_of(call.x.device).part(GgufTimings).times(call, able) if len(able) > 1 else None
    chosen = min(able, key=lambda name: times.get(name, float("inf"))) if times else able[0]
    for name in able[: able.index(chosen)]:
        assert times is not None
        reasons[name] = f"{name} took {times[name] / times[chosen]:.2f} times as long as {chosen}"
    return Way(chosen, "; ".join(dict.fromkeys(reasons[name] for name in WAYS[: WAYS.index(chosen)])))


class GgufKind(NamedTuple):
    """Calls that take about as long as each other: rows of x up to a power of two, and the rest exactly."""

    rows: int
    columns: int
    outs: int
    dtype: str
    format: str


class GgufTimings(Contest[GgufKind]):
    """The times of each way, for each kind of call. Made by ``runtime.part(GgufTimings)``."""

    file_kind, kind_type = "gguf-linear", GgufKind

    def times(self, call: GgufCall, ways: list[str]) -> dict[str, float] | None:
        """Milliseconds by way; None = not known."""
        most = _MOST_TIMED_ROWS.get(self.device.type, call.x.shape[0])
        call = call._replace(x=call.x[:most], out=call.out[:most])
        dtype = str(call.x.dtype).removeprefix("torch.")
        kind = GgufKind(power_of_two(call.x.shape[0]), *call.weight.shape[::-1], dtype, call.weight.format)
        return self.find(kind, lambda: self._measure(kind, call, ways))

    def _measure(self, kind: GgufKind, call: GgufCall, ways: list[str]) -> dict[str, float] | None:
        call = call._replace(out=torch.empty_like(call.out))
        with torch.no_grad():
            return self.timed(kind, {name: functools.partial(_RUN[name], call) for name in ways})

    def conditions(self) -> dict[str, str]:
        arch = self.runtime.part(Kernels).arch if self.device.type == "cuda" else ""
        return {
            "card": self.info.name,
            "arch": arch,
            "torch": torch.__version__,
            "kernels": gguf_digest(arch if arch.startswith("gfx") else ""),
        }


# ---- the ways --------------------------------------------------------------------------------------------------------


def _why_no_kernel(call: GgufCall, shape: int) -> str:
    return why_no_product(call.x.device, call.weight.format, call.x.shape[0], shape)


def by_kernel(call: GgufCall, shape: int) -> None:
    """Compute a call by the kernel of a shape.

    Raises:
        KernelUnavailable, DriverError: see :func:`..fused.gguf.run_product`.
    """
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


_WHY_NOT: dict[str, Callable[[GgufCall], str]] = {
    "kernel_4x8": functools.partial(_why_no_kernel, shape=4),
    "kernel": functools.partial(_why_no_kernel, shape=8),
    "int_mm": _why_no_int_mm,
    "float": lambda call: "",
}
_RUN: dict[str, Callable[[GgufCall], None]] = {
    "kernel_4x8": functools.partial(by_kernel, shape=4),
    "kernel": functools.partial(by_kernel, shape=8),
    "int_mm": by_int_mm,
    "float": by_float,
}
