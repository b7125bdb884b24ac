"""Linear layers of a float32 model, multiplied in float16 with a scale per row. Not exact, therefore opt-in.

Hosts run models whose activations exceed float16's range (65504) in float32 on cards without bfloat16, such as
Qwen-Image on Volta and Turing, whose float16 units are several times as fast.

A linear layer is affine: ``y(x) = s (y(x / s) - y(0)) + y(0)``. For each row of x, s is the power of two that brings
the norm of the row to between 32 and 64: then no sum exceeds 64 times the norm of a row of the weight (Cauchy and
Schwarz), and the scaling itself rounds nothing. The layer's own code runs under autocast, so that hosts cast, expand
and patch weights as usual. It runs without the bias of the module, which is added in float32. What else there is of
y(0) is the last row of the same product.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..patching.patch import ON, REFUSED
from .binding import Binding, Int8Patch, patched
from .find import shape_of
from .judged import Int8Options, Judged, LayerForward, has_numbers
from .measure import Errors, errors_of, row_squares, sample_of
from .stored import Seen

_NORM = 64.0
_SMALLEST = 2.0**-100  # rows below it are rounded more coarsely


def patch_linear_float16(
    model: Any, *, include: Any = None, exclude: Any = None, max_error: float = 0.002
) -> Int8Patch:
    """Multiply the linear layers of a float32 ``model`` in float16, with a scale per row. Not exact.

    Each layer is tried in its first call with float32 input, and stays as it is if its error is above ``max_error``, or
    if float16 is not faster on the device. The error is measured again now and then (:mod:`.watch` says when). Calls
    with other dtypes, and those that need gradients, run as before.

    Args:
        model, include, exclude: as in :func:`..patch_linear_int8`.
        max_error: relative error (root of the sum of squares) on at most 512 rows of the layer's input, above which it
            stays in float32. Typical errors are 0.0002 to 0.0005.
    Returns:
        A Patch with ``report()``: the error and the milliseconds of each layer, or why it stays in float32.
    Extra memory: the input and the output of one layer in float16.
    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an invalid argument, a pattern that chooses nothing, or no linear layer.
    """
    return patched(model, Float16Binding(max_error=max_error, include=include, exclude=exclude))


class Float16Forward(LayerForward):
    """The forward of one linear layer, whose layer decides whether a call runs in float16."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        layer, x = self.layer, args[0] if len(args) == 1 and not kwargs else None
        if layer is None or type(x) is not Tensor or x.dtype != torch.float32 or not x.numel():
            return self.whole(*args, **kwargs)
        if torch.compiler.is_compiling() or not has_numbers(x) or any(map(layer.is_trained, self.module.parameters())):
            return self.whole(x)
        if (torch.is_grad_enabled() and x.requires_grad) or not layer.takes(self, x):
            return self.whole(x)
        return self.in_float16(x)

    def in_float16(self, x: Tensor) -> Tensor:
        """A call in float16. A bias of the module is added after it, in float32: beside a large one, float16 would
        leave little of the product."""
        module, bias = self.module, self.module._parameters.get("bias")
        if bias is None or self.inner is not None:
            return in_float16(self.whole, x)
        twin = object.__new__(type(module))
        vars(twin).update(vars(module), _parameters={**module._parameters, "bias": None})
        return in_float16(types.MethodType(type(module).forward, twin), x).add_(bias.to(x.device, x.dtype))


class Float16Layer(Judged):
    """The state of one layer."""

    forward = Float16Forward

    def __init__(self, name: str, module: nn.Module, options: Int8Options):
        super().__init__(name, type(module).__name__, options)
        self.shape, self._seen = shape_of(module), Seen()

    def takes(self, forward: Float16Forward, x: Tensor) -> bool:
        """Whether a call with ``x`` ``[..., K]`` runs in float16. Its first one is where the layer is tried."""
        weight = forward.module._parameters.get("weight")
        if self.state != REFUSED:
            if weight is not None and self._seen.changes(weight):
                self.is_another()
            self.look((x,), functools.partial(self._errors, forward, x), functools.partial(self._time, forward, x))
        return self.state == ON

    def _errors(self, forward: Float16Forward, x: Tensor, most: int) -> Errors:
        rows, counts = sample_of(x, most, self.watch.calls)
        exact = forward.whole(rows)
        return errors_of(row_squares(forward.in_float16(rows) - exact), row_squares(exact), counts)

    def _time(self, forward: Float16Forward, x: Tensor) -> None:
        attempts = functools.partial(forward.whole, x), functools.partial(forward.in_float16, x)
        self.time((x.shape, self.shape, x.device), attempts, x.device)


class Float16Binding(Binding[Float16Layer]):
    """Linear layers in float16. Options are those of :func:`patch_linear_float16`."""

    precision = "float16"

    def make(self, name: str, module: nn.Module) -> Float16Layer:
        return Float16Layer(name, module, self.options)


def in_float16(layer: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``layer(x)`` for an affine layer and float32 ``x`` ``[..., K]`` in float32, multiplied in float16 as the module's
    docstring says."""
    rows = x.reshape(-1, x.shape[-1])
    half = rows.new_zeros(rows.shape[0] + 1, rows.shape[1], dtype=torch.float16)
    # First by the largest number of a row: the squares of some would be infinite in float32.
    scales = _power_of_two(torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True).clamp_min(_SMALLEST))
    torch.div(rows, scales, out=half[:-1])
    more = _power_of_two(torch.linalg.vector_norm(half[:-1], dim=1, keepdim=True, dtype=torch.float32)).clamp_min(1.0)
    half[:-1].div_(more)
    with torch.autocast(x.device.type, dtype=torch.float16):
        out = layer(half).float()
    at_zero = out[-1].clone()
    return out[:-1].sub_(at_zero).mul_(scales.mul_(more)).add_(at_zero).view(*x.shape[:-1], -1)


def _power_of_two(norms: Tensor) -> Tensor:
    """The powers of two by which numbers of this size are divided to be between 32 and 64."""
    return torch.exp2(torch.frexp(norms / _NORM).exponent)
