"""GgufMatrix: the weight of a linear layer as its file has it, expanded some rows at a time where it is multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contest.ways import ProductKind, Ways
from ..fused.code.compilation import Compilation
from ..fused.code.source import gguf_variants
from ..fused.linear import ExpandCall, run_expand, why_no_expansion
from ..machine.runtime import runtime_of
from ..reference.gguf_blocks import FORMATS, Parts, expand

# Weights that exist in float at a time; with what expanding them takes, up to 9 and 36 MiB. A GPU wants long slices, a
# CPU such as fit into its caches.
_SLICE = {"cpu": 1 << 20}
_MOST_SLICE = 1 << 22


class GgufMatrix(NamedTuple):
    """A weight ``[N, K]`` in blocks.

    Attributes:
        data: its bytes, uint8 of any shape, contiguous.
        format: a key of :data:`..reference.gguf_blocks.FORMATS`.
        shape: N and K.
        arithmetic, table: see :func:`..reference.gguf_blocks.expand`.
        dtype: that the expanded weights are rounded to.
    """

    data: Tensor
    format: str
    shape: tuple[int, int]
    arithmetic: torch.dtype
    table: torch.dtype
    dtype: torch.dtype

    def slices(self) -> list[slice]:
        """All rows in slices of whole blocks: rows may end within a block."""
        (rows, columns), weights = self.shape, FORMATS[self.format].weights
        least = weights // math.gcd(weights, columns)
        step = max(1, slice_weights(self.data.device) // (columns * least)) * least
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def rows(self, some: slice) -> Tensor:
        """One of the slices, expanded."""
        blocks = self._blocks(some)
        return expanded(blocks, self.format, self.arithmetic, self.table, self.dtype).view(-1, self.shape[1])

    def parts(self, some: slice) -> Parts:
        """One of the slices of a matrix whose rows are whole blocks, as what its blocks hold, in float32."""
        scales, codes, minima = FORMATS[self.format].unpack(self._blocks(some), torch.float32, torch.int8)
        shape = some.stop - some.start, -1
        return Parts(scales.reshape(shape), codes.reshape(shape), None if minima is None else minima.reshape(shape))

    def at(self, rows: Tensor | slice) -> GgufMatrix:
        """A matrix of these rows of one whose rows are whole blocks."""
        data = self.data.view(self.shape[0], -1)[rows]
        return self._replace(data=data, shape=(len(data), self.shape[1]))

    def gradient_of_input(self, grad: Tensor) -> Tensor:
        """``grad W`` ``[..., K]`` for ``grad`` ``[..., N]``, W expanded again."""
        parts = (grad[..., some] @ self.rows(some).to(grad.dtype) for some in self.slices())
        out = next(parts)
        for part in parts:
            out = out.float()
            out += part
        return out

    def _blocks(self, some: slice) -> Tensor:
        weights, size, _ = FORMATS[self.format]
        first, end = (row * self.shape[1] // weights for row in (some.start, some.stop))
        return self.data.view(-1, size)[first:end]


def slice_weights(device: torch.device) -> int:
    """How many weights may exist in float at a time."""
    return _SLICE.get(device.type, _MOST_SLICE)


def product(x: Tensor, weight: GgufMatrix, bias: Tensor | None) -> Tensor:
    """``F.linear(x, W, bias)`` without gradients."""
    slices = weight.slices()
    if len(slices) == 1:
        return F.linear(x, weight.rows(slices[0]), bias)
    out = None
    for some in slices:
        part = F.linear(x, weight.rows(some), None if bias is None else bias[some])
        out = part.new_empty(*x.shape[:-1], weight.shape[0]) if out is None else out
        out[..., some] = part
    assert out is not None
    return out


Product = Callable[[Tensor, GgufMatrix, Tensor | None], Tensor]


def linear(x: Tensor, weight: GgufMatrix, bias: Tensor | None, forward: Product = product) -> Tensor:
    """``F.linear(x, W, bias)``, computed by ``forward``, differentiable by x and bias: the gradients are those of the
    exact product, for which W is expanded again, not kept."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))  # once, not for each slice
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return LinearWithGradients.apply(x, bias, lambda x, bias: forward(x, weight, bias), weight.gradient_of_input)
    return forward(x, weight, bias)


class LinearWithGradients(torch.autograd.Function):
    """``compute(x, bias)``, a linear layer, with its gradients by x and bias; ``of_input(grad)`` is ``grad W``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        compute: Callable[[Tensor, Tensor | None], Tensor],
        of_input: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.of_input, ctx.dtype, ctx.bias_dtype = of_input, x.dtype, None if bias is None else bias.dtype
        return compute(x, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = ctx.of_input(grad).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = gradient_of_bias(grad, ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None, None


def gradient_of_bias(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a layer's bias ``[N]`` from that of its result ``[..., N]``."""
    return grad.flatten(0, -2).sum(dim=0, dtype=torch.float32).to(dtype)


def _why_no_kernel(call: ExpandCall) -> str:
    return why_no_expansion(call.blocks.device, call.format, call.arithmetic, call.out.dtype)


def _by_operators(call: ExpandCall) -> None:
    call.out.copy_(expand(call.blocks, call.format, call.arithmetic, table=call.table))


class ExpandWays(Ways[ProductKind]):
    """Our kernel and torch's operators, with the same bits. Made by ``runtime.part(ExpandWays)``."""

    file_kind, kind_type, rivals = "gguf", ProductKind, ("kernel", "operators")
    table: ClassVar = {"kernel": (_why_no_kernel, run_expand), "operators": (lambda call: "", _by_operators)}

    def kind_of(self, call: ExpandCall) -> ProductKind:
        return ProductKind.of(call.out, 0, f"{call.format} by {call.arithmetic}")

    def kernels(self) -> tuple[Compilation, ...]:
        return gguf_variants()


def expanded(blocks: Tensor, name: str, arithmetic: torch.dtype, table: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The weights in blocks, ``[n, weights]``, rounded to a dtype; see :func:`..reference.gguf_blocks.expand`."""
    is_real = type(blocks) is Tensor and not torch.compiler.is_compiling()
    if is_real and not why_no_expansion(blocks.device, name, arithmetic, dtype):
        out = torch.empty(len(blocks), FORMATS[name].weights, dtype=dtype, device=blocks.device)
        runtime_of(blocks.device).part(ExpandWays).compute(ExpandCall(blocks, name, arithmetic, table, out))
        return out
    return expand(blocks, name, arithmetic, table=table).to(dtype)
