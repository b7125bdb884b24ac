"""Linear layers of a float32 model, multiplied in float16 with a scale per row. Not exact, therefore opt-in.

Hosts run models whose activations exceed float16's range (65504) in float32 on cards without bfloat16, such as
Qwen-Image on Volta and Turing, whose float16 units are several times as fast.

A linear layer is affine: ``y(x) = s (y(x / s) - y(0)) + y(0)``. For each row of x, s is the power of two that brings
the norm of the row to between 32 and 64: then no sum exceeds 64 times the norm of a row of the weight (Cauchy and
Schwarz), and the scaling itself rounds nothing. The layer's own code runs, under autocast, so that hosts cast, expand
and patch weights as usual; y(0) is the last row of the same product.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..machine.out_of_memory import out_of_memory
from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.patch import OFF, ON, REFUSED, WAITING, Patch, PatchReport, State, require_sites
from ..patching.selectors import require_matches
from ..patching.targets import denoisers_of
from ..reference.checks import in_float64, rows_to_check
from ..routes.timing_table import median_times
from .find import find_linear
from .judged import is_captured, limit_of
from .measure import SAMPLE_ROWS

_NORM = 64.0


def patch_linear_float16(
    model: Any, *, include: Any = None, exclude: Any = None, max_error: float = 0.002
) -> Float16Patch:
    """Multiply the linear layers of a float32 ``model`` in float16, with a scale per row. Not exact.

    Each layer is tried in its first call with float32 input, and stays as it is if its error is above ``max_error``, or
    if float16 is not faster on the device. Calls with other dtypes, and those that need gradients, run as before.

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
    target, model = model, denoisers_of(model)
    binding = Float16Binding(include=include, exclude=exclude, max_error=max_error)
    require_matches(model, include=include, exclude=exclude)
    return require_sites(Float16Patch(type(target).__name__, model, binding))


class Float16Patch(Patch):
    """The patch that :func:`patch_linear_float16` returns."""

    def __init__(self, kind: str, model: nn.Module, binding: Float16Binding):
        self._model, self._binding = model, binding
        undo = functools.partial(binding.detach, model)
        super().__init__(f"float16 linear layers of {kind}", undo, sites=binding.attach(model))

    def report(self) -> PatchReport:
        """The state of each layer so far."""
        return self._binding.report(self._model)


class Float16Binding:
    """Linear layers in float16, put in and taken out as often as their host wants; what was found of a layer is kept.
    Options are those of :func:`patch_linear_float16`."""

    def __init__(self, *, include: Any = None, exclude: Any = None, max_error: float = 0.002):
        self.max_error, self.clock = limit_of(max_error), median_times
        self._include, self._exclude, self._lock = include, exclude, threading.RLock()
        self._forwards: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Float16Forward]] = weakref.WeakKeyDictionary()
        self._found: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._times: dict[Any, list[float]] = {}  # of float32 and float16: layers of one shape are timed once

    def attach(self, model: nn.Module) -> int:
        """Let the linear layers of ``model`` be tried. Returns their number."""
        self.detach(model)
        modules = [found.module for found in find_linear(model, self._include, self._exclude) if not found.why_not]
        for module in modules:
            self._forwards[module] = weakref.ref(put_in(module, functools.partial(Float16Forward, self)))
        return len(modules)

    def detach(self, model: nn.Module) -> list[str]:
        """Undo :meth:`attach`; returns what could not be undone."""
        left = []
        for module in model.modules():
            reference = self._forwards.pop(module, None)
            forward = None if reference is None else reference()
            if forward is not None:
                forward.binding = None
                left += take_out(forward)
        return left

    def report(self, model: nn.Module) -> PatchReport:
        """The state of each linear layer of ``model``."""
        layers = list(find_linear(model, self._include, self._exclude))
        states = [(OFF, each.why_not) if each.why_not else self._found.get(each.module, _NOT_YET) for each in layers]
        return PatchReport([State(each.name or "(the model)", *state) for each, state in zip(layers, states)])

    def takes(self, module: nn.Module, whole: Callable[..., Tensor], x: Tensor) -> bool:
        """Whether a call of a layer with ``x`` ``[..., K]`` runs in float16; its first one is where it is tried."""
        with self._lock:
            if module not in self._found and not is_captured(x):
                try:
                    self._found[module] = self._tried(whole, x)
                except out_of_memory():
                    self._found[module] = REFUSED, "out of memory while it was tried"
            return self._found.get(module, _NOT_YET)[0] == ON

    def _tried(self, whole: Callable[..., Tensor], x: Tensor) -> tuple[str, str]:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows[rows_to_check(rows, SAMPLE_ROWS)]
        exact = in_float64(whole(rows))
        error = ((in_float64(in_float16(whole, rows)) - exact).norm() / exact.norm()).nan_to_num(math.inf).item()
        if not error <= self.max_error:
            return REFUSED, f"its error {error:.3%} is above {self.max_error:.3%}"
        kind = x.shape, exact.shape[-1], x.device
        if kind not in self._times:
            self._times[kind] = self.clock([lambda: whole(x), lambda: in_float16(whole, x)], x.device)
        before, after = self._times[kind]
        found = f"error {error:.3%}, {after:.2f} ms in float16, {before:.2f} in float32"
        return (ON, found) if after < before else (OFF, f"float16 is not faster: {found}")


_NOT_YET = WAITING, "no call in float32 yet"


class Float16Forward(ReplacedForward):
    """The forward of one linear layer; its binding decides whether calls run in float16, None = none do."""

    __slots__ = ("binding",)

    def __init__(self, binding: Float16Binding | None, module: nn.Module, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.binding = binding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        binding, x = self.binding, args[0] if len(args) == 1 and not kwargs else None
        if binding is None or type(x) is not Tensor or x.dtype != torch.float32 or not x.numel():
            return self.whole(*args, **kwargs)
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.module.parameters())):
            return self.whole(x)
        if torch.compiler.is_compiling() or not binding.takes(self.module, self.whole, x):
            return self.whole(x)
        return in_float16(self.whole, x)


def in_float16(layer: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``layer(x)`` for an affine layer and float32 ``x`` ``[..., K]`` in float32, multiplied in float16 as the module's
    docstring says."""
    rows = x.reshape(-1, x.shape[-1])
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    scales = torch.exp2(torch.frexp(norms / _NORM).exponent)
    half = rows.new_zeros(rows.shape[0] + 1, rows.shape[1], dtype=torch.float16)
    torch.div(rows, scales, out=half[:-1])
    with torch.autocast(x.device.type, dtype=torch.float16):
        out = layer(half).float()
    at_zero = out[-1].clone()
    return out[:-1].sub_(at_zero).mul_(scales).add_(at_zero).view(*x.shape[:-1], -1)
