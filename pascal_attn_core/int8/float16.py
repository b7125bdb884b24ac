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
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..contest.timing_table import median_times
from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.patch import OFF, ON, REFUSED, WAITING, Patch, PatchReport, State, require_sites
from ..patching.selectors import denoisers_of, require_matches
from ..reference.checks import in_float64
from .find import find_linear, shape_of
from .judged import Int8Options, Judged, limit_of
from .measure import sample_of

_NORM = 64.0


def patch_linear_float16(
    model: Any, *, include: Any = None, exclude: Any = None, max_error: float = 0.002
) -> Float16Patch:
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
        self.options = Int8Options(limit_of(max_error), "", median_times, only_faster=True)
        self._include, self._exclude = include, exclude
        self._forwards: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Float16Forward]] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakKeyDictionary[nn.Module, Float16Layer] = weakref.WeakKeyDictionary()

    @property
    def max_error(self) -> float:
        return self.options.max_error

    def attach(self, model: nn.Module) -> int:
        """Let the linear layers of ``model`` be tried. Returns their number."""
        self.detach(model)
        chosen = [found for found in find_linear(model, self._include, self._exclude) if not found.state]
        for found in chosen:
            layer = self._layers.setdefault(found.module, Float16Layer(found.name, "", self.options))
            layer.shape = shape_of(found.module)
            self._forwards[found.module] = weakref.ref(put_in(found.module, functools.partial(Float16Forward, layer)))
        return len(chosen)

    def detach(self, model: nn.Module) -> list[str]:
        """Undo :meth:`attach`; returns what could not be undone."""
        left = []
        for module in model.modules():
            reference = self._forwards.pop(module, None)
            forward = None if reference is None else reference()
            if forward is not None:
                forward.layer = None
                left += take_out(forward)
        return left

    def restart(self) -> None:
        """A run begins: calls and checks are counted from here on."""
        for layer in list(self._layers.values()):
            layer.watch.restart()

    def report(self, model: nn.Module) -> PatchReport:
        """The state of each linear layer of ``model``."""
        states = []
        for found in find_linear(model, self._include, self._exclude):
            layer = self._layers.get(found.module)
            left = found.state, found.why
            state = left if found.state else (WAITING, _NOT_YET) if layer is None else layer.told()
            states.append(State(found.name or "(the model)", *state))
        return PatchReport(states)


_NOT_YET = "no call in float32 yet"


class Float16Layer(Judged):
    """The state of one layer."""

    def takes(self, whole: Callable[..., Tensor], x: Tensor) -> bool:
        """Whether a call with ``x`` ``[..., K]`` runs in float16. Its first one is where the layer is tried."""
        if self.state != REFUSED:
            self.look(x, functools.partial(self._error, whole, x), functools.partial(self._time, whole, x))
        return self.state == ON

    def _error(self, whole: Callable[..., Tensor], x: Tensor, most: int) -> float:
        rows, counts = sample_of(x, most, self.watch.calls)
        exact = in_float64(whole(rows))
        wrong = in_float64(in_float16(whole, rows)) - exact
        squares = torch.stack([part.square().sum(dim=1) for part in (wrong, exact)]) @ counts  # of each branch
        return torch.where(squares[0] == 0, 0.0, squares[0] / squares[1]).amax().sqrt().nan_to_num(math.inf).item()

    def _time(self, whole: Callable[..., Tensor], x: Tensor) -> None:
        self.time((x.shape, self.shape, x.device), [lambda: whole(x), lambda: in_float16(whole, x)], x.device)

    def told(self) -> tuple[str, str]:
        """The state in the words that all patches share, and why."""
        if self.times is None or self.went_back:
            return self.state, self.why or _NOT_YET
        before, after = self.times
        error = 0.0 if self.watch.largest is None else self.watch.largest
        found = f"error {error:.3%}, {after:.2f} ms in float16, {before:.2f} in float32"
        return (ON, found) if self.state == ON else (OFF, f"float16 is not faster: {found}")

    def decide(self) -> None:
        super().decide()
        if self.state == ON and self.times is not None and not self.times.in_int8 < self.times.in_float:
            self.state = REFUSED


class Float16Forward(ReplacedForward):
    """The forward of one linear layer, which decides whether a call runs in float16; None = none does."""

    __slots__ = ("layer",)

    def __init__(self, layer: Float16Layer | None, module: nn.Module, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        layer, x = self.layer, args[0] if len(args) == 1 and not kwargs else None
        if layer is None or type(x) is not Tensor or x.dtype != torch.float32 or not x.numel():
            return self.whole(*args, **kwargs)
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.module.parameters())):
            return self.whole(x)
        if torch.compiler.is_compiling() or not layer.takes(self.whole, x):
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
