"""Lazy tensors whose elements depend on a neighbourhood: convolutions, upsampling, pooling; and sums of group norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import accumulate_dtype
from ..reference.checks import in_float64
from .lazy import Aligned, Lazy, Want, aten, captured


class Convolution(Lazy):
    """``aten::convolution``: cut along its spatial dimensions, where each range needs a few elements more."""

    is_heavy = True
    arguments = ("weight", "bias")

    def __init__(self, like: Tensor, node: Lazy, weight: Tensor, bias: Tensor | None, *rest: Any):
        super().__init__(like, (node,))
        spatial, (stride, padding, dilation, self.transposed, output_padding, self.groups) = like.dim() - 2, rest

        def each(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values) * spatial if len(values) == 1 else tuple(values)

        (self.weight, self.bias), self.given = captured((weight, bias))
        self.stride, self.padding, self.dilation = each(stride), each(padding), each(dilation)
        self.output_padding = each(output_padding)

    def own_granule(self, dim: int) -> int:
        return int(dim >= 2 and self.inputs[0].granule(dim) == 1)

    def _range(self, dim: int, low: int, high: int) -> tuple[int, int]:
        """The elements of the input that a range needs; those below 0 and above its end are padding."""
        axis = dim - 2
        stride, padding = self.stride[axis], self.padding[axis]
        reach = self.dilation[axis] * (self.weight.shape[dim] - 1)
        if self.transposed:
            return -((reach - low - padding) // stride), (high - 1 + padding) // stride + 1
        return low * stride - padding, (high - 1) * stride - padding + reach + 1

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        node = self.inputs[0]
        if dim < 2:
            return [node.whole()]
        first, last = self._range(dim, low, high)
        size = node.size(dim)
        first = min(max(first, 0), size - 1)
        return [Want(node, dim, first, max(min(last, size), first + 1))]

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        piece = pieces.pop()
        padding = list(self.padding)
        if dim < 2:
            return self._run(piece, padding, self.output_padding)
        want = self.wants(dim, low, high)[0]
        return (self._transposed if self.transposed else self._forward)(piece, padding, dim, low, high, want)

    def _forward(self, piece: Tensor, padding: list[int], dim: int, low: int, high: int, want: Want) -> Tensor:
        first, last = self._range(dim, low, high)
        before, after = want.low - first, last - want.high
        axis = dim - 2
        if before == after and before >= 0:
            padding[axis] = before
            return self._run(piece, padding, self.output_padding)
        padding[axis] = 0
        if before < 0 or after < 0:  # nothing but padding, beyond one end
            piece = piece.new_zeros([*piece.shape[:dim], last - first, *piece.shape[dim + 1 :]])
        elif before or after:
            piece = torch.constant_pad_nd(piece, [0, 0] * (piece.dim() - 1 - dim) + [before, after])
        return self._run(piece, padding, self.output_padding)

    def _transposed(self, piece: Tensor, padding: list[int], dim: int, low: int, high: int, want: Want) -> Tensor:
        axis = dim - 2
        start = low + self.padding[axis] - want.low * self.stride[axis]  # of the range in what the piece gives
        padding[axis] = 0
        extra = list(self.output_padding)
        extra[axis] = 0
        out = self._run(piece, padding, extra, with_bias=False)
        begin, end = min(max(start, 0), out.shape[dim]), min(max(start + high - low, 0), out.shape[dim])
        out = out.narrow(dim, begin, end - begin)
        if end - begin < high - low:  # elements that no input reaches
            pads = [max(-start, 0) if end > begin else 0, 0]
            pads[1] = high - low - (end - begin) - pads[0]
            out = torch.constant_pad_nd(out, [0, 0] * (out.dim() - 1 - dim) + pads)
        return out if self.bias is None else out + self.bias.view(-1, *[1] * (out.dim() - 2))

    def _run(
        self, piece: Tensor, padding: Sequence[int], output_padding: Sequence[int], *, with_bias: bool = True
    ) -> Tensor:
        bias = self.bias if with_bias else None
        has_onednn = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
        if piece.device.type == "cpu" and piece.dtype == torch.float32 and not self.transposed and has_onednn:
            # of small pieces torch takes another kernel than of the whole, which is slower and unfolds its input
            return torch.mkldnn_convolution(piece, self.weight, bias, padding, self.stride, self.dilation, self.groups)
        return aten.convolution(
            piece, self.weight, bias, self.stride, padding, self.dilation, self.transposed, output_padding,
            self.groups,
        )  # fmt: skip

    def scratch(self, given: int, made: int) -> int:
        return 2 * given if any(self.padding) else 0  # rows of padding are joined to a copy, which the kernel may copy


class Resized(Aligned):
    """Upsampling and pooling by whole factors.

    Args:
        func: takes the input, whole or a range of it, and returns it resized by ``factors``.
        factors: (outputs, inputs) per dimension: (2, 1) where two elements come from one, (1, 2) the other way round.
        halo: elements of the input beside a range that it depends on.
    """

    def __init__(
        self, like: Tensor, node: Lazy, func: Callable[[Tensor], Tensor], factors: Sequence[tuple[int, int]], halo: int
    ):
        super().__init__(like, (node,))
        self.func, self.factors, self.halo = func, tuple(factors), halo

    def own_granule(self, dim: int) -> int:
        unit = super().own_granule(dim)
        return unit if self.factors[dim] == (1, 1) else int(unit == 1)

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        if self.is_whole(dim, low, high) or self.factors[dim] == (1, 1):
            return super().wants(dim, low, high)
        node, (made, taken) = self.inputs[0], self.factors[dim]
        first, last = low // made * taken, ((high - 1) // made + 1) * taken
        return [Want(node, dim, max(first - self.halo, 0), min(last + self.halo, node.size(dim)))]

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        want = self.wants(dim, low, high)[0]
        out = self.func(pieces.pop())
        if self.is_whole(dim, low, high):
            return out
        made, taken = self.factors[dim]
        start = low - want.low // taken * made
        return out if out.shape[dim] == high - low else out.narrow(dim, start, high - low)

    def scratch(self, given: int, made: int) -> int:
        return made if self.halo else 0


class Moments:
    """Mean and variance of each group of channels, gathered over pieces in the order they come (Chan, Golub, LeVeque
    1979): of each piece as torch's own kernel computes them, between pieces in float64. ``[N, C, ...]`` ->
    ``[N, groups]``.
    """

    #: dimensions that no piece may be a range of
    uncut = (0, 1)

    def __init__(self, batch: int, groups: int):
        self.batch, self.groups, self.count = batch, groups, 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0
        self._per_channel: list[Any] = []  # weight, bias, mean and variance, ``[N * C]``

    @staticmethod
    def scratch(elements: int, dtype: torch.dtype) -> int:
        """Bytes that :meth:`add` takes for ``elements``: a copy, and the result of torch's kernel."""
        return 2 * elements * (8 if dtype == torch.float64 else 4)

    def add(self, piece: Tensor) -> None:
        """Take in a range of the elements of each channel."""
        channels, inner = piece.shape[1], math.prod(piece.shape[2:])
        if piece.dtype not in (torch.float32, torch.float64):
            piece = piece.float()
        # with eps 0, so that 1 / rstd^2 is the variance
        _, mean, rstd = torch.native_group_norm(
            piece.contiguous(), None, None, self.batch, channels, inner, self.groups, 0.0
        )
        mean, variance = in_float64(mean), in_float64(rstd) ** -2
        count = inner * channels // self.groups
        total, delta = self.count + count, mean - self.mean
        squares = self.squares + variance * count + delta**2 * (self.count * count / total)
        # all of it or, where memory runs out on the way, nothing
        self.mean, self.squares, self.count = self.mean + delta * (count / total), squares, total

    def normalised(self, eps: float, piece: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A range ``[N, C, ...]`` after the group norm, once all sums have been gathered. ``weight`` and ``bias`` are
        the same for all ranges."""
        channels, dtype = piece.shape[1], accumulate_dtype(piece.dtype)
        if not self._per_channel:
            both = (t.to(dtype).to(piece.device) for t in (self.mean, self.squares / self.count))
            moments = (t.repeat_interleave(channels // self.groups, -1).flatten() for t in both)
            scales = (None if t is None else t.to(dtype).repeat(self.batch) for t in (weight, bias))
            self._per_channel = [*scales, *moments]
        scale, shift, mean, variance = self._per_channel
        folded = piece.reshape(1, -1, *piece.shape[2:])  # each channel of each sample has a mean of its own
        return torch.batch_norm(folded, scale, shift, mean, variance, False, 0.0, eps, True).view(piece.shape)
