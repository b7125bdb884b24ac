"""One linear layer under one patch: it waits for its first inputs, is measured with them, and then runs in 8 bits or
stays as it is."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..machine.own_thread import in_backward, inputs_are_made_up
from .measure import Clock, Times, best_rotation, errors_by_rotation, relative_error, sample_of, times_of
from .quantize import Int8Matrix, quantize_rows
from .ways import FLOATS, Way, way_for
from .weight import Int8Weight

log = logging.getLogger("pascal_attn")
WEIGHTS = ("keep", "host", "free")
_MOST_FAILURES = 3  # for lack of memory
WAITING, INT8, FLOAT = "waiting", "int8", "float"


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class Settings:
    """The options of one patch; shared by its layers and by those of deep copies.

    Attributes:
        times: of calls that have been timed, by shape, dtype and device: layers of one shape are timed once.
        gathers: whether inputs are being collected (``calibrate``): layers decide when that is over.
    """

    max_error: float
    weights: str
    clock: Clock
    enabled: bool = True
    gathers: bool = False
    times: dict[Any, Times] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self


class Layer:
    """The state of one layer.

    Attributes:
        state: "waiting" for inputs, "int8", or "float": it stays as it was.
        why: one sentence.
        error: relative error on the inputs that it was measured with, the largest of all checks; None = not measured.
        rotation: see :mod:`.quantize`.
        times: of the call that it was decided with; None = not timed.
        way: what computes it, see :data:`.ways.WAYS`, and why nothing faster does.
        float_bytes, int8_bytes: of its weight.
        calls: in 8 bits, so far.
    """

    def __init__(self, name: str, module: nn.Module, settings: Settings):
        self.name, self.settings = name, settings
        self._module = weakref.ref(module)
        self.kind, weight = type(module).__name__, module.weight
        assert isinstance(weight, Tensor)
        self.shape = tuple(weight.shape)
        self.float_bytes, self.int8_bytes = weight.numel() * weight.element_size(), 0
        self.state, self.why = WAITING, "not called yet"
        self.error: float | None = None
        self.rotation, self.way, self.calls = 0, Way("", ""), 0
        self.times: Times | None = None
        self._errors: dict[int, float] = {}  # the largest so far, by rotation
        self._parameter: nn.Parameter | None = None  # what was there before us
        self._seen: _Kind | None = None  # the last inputs that were collected
        self._failures = 0

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    @property
    def weight(self) -> Int8Weight | None:
        """The weight in 8 bits, where the module has it: hosts may replace it."""
        module = self.module
        weight = None if module is None else module._parameters.get("weight")
        return weight if isinstance(weight, Int8Weight) and weight.state is self else None

    @property
    def is_on(self) -> bool:
        """Whether the layer is to run in 8 bits."""
        return self.settings.enabled and self.state == INT8

    @property
    def was_replaced(self) -> bool:
        """Whether somebody else has put another weight in the place of the one in 8 bits."""
        return self.state == INT8 and self.weight is None

    # ---- in and out ----

    def attach(self) -> None:
        """Wait for the first inputs."""
        module = self.module
        assert module is not None
        module.register_forward_pre_hook(Hook(self, "arrived"), with_kwargs=True)

    def detach(self) -> list[str]:
        """Put the module back as it was; returns what could not be."""
        module, parameter, self._parameter = self.module, self._parameter, None
        if module is None:
            return []
        self._unhook(module)
        weight = self.weight
        if weight is None:
            return [f"the weight of {self.name} was replaced in the meantime"] if self.state == INT8 else []
        self.state, self.why = FLOAT, "the patch was removed"
        if parameter is None or weight.original is None:
            module._parameters["weight"] = nn.Parameter(weight.float_matrix())
            return []
        parameter.data = weight.original.detach().to(weight.device, weight.dtype)
        module._parameters["weight"] = parameter
        return []

    # ---- deciding ----

    def arrived(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the module begins."""
        x = args[0] if args else kwargs.get("input")
        if not self.settings.enabled or self.state != WAITING or not isinstance(x, Tensor) or not _has_numbers(x):
            return
        reason = self._not_now(module, x)
        if reason:
            self.why = reason
            return
        with self.settings.lock, torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if self.state != WAITING:
                return
            try:
                if torch.is_inference_mode_enabled():
                    with torch.inference_mode(False):  # the weight must be usable outside of it
                        self._measure(module, x.clone())
                else:
                    self._measure(module, x)
            except torch.OutOfMemoryError:
                self._failures += 1
                self.why = "out of memory while measuring it"
                if self._failures == _MOST_FAILURES:
                    self.state = FLOAT
                    self._unhook(module)

    def _not_now(self, module: nn.Module, x: Tensor) -> str:
        weight = module._parameters.get("weight")
        if weight is None or weight.is_meta:
            return "its weight is absent when it is called: a hook loads it"
        if type(weight) is not nn.Parameter:
            return f"its weight is a {type(weight).__name__}"
        if weight.device != x.device:
            return f"its weight is on {weight.device}, its input on {x.device}"
        if module.training and weight.requires_grad and torch.is_grad_enabled():
            return "its weight is being trained"
        if in_backward() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return "it cannot be measured while a graph is captured, or within a backward pass"
        return ""

    def _measure(self, module: nn.Module, x: Tensor) -> None:
        exact = self._exact(module, x.device)
        for size, error in errors_by_rotation(x, exact).items():
            self._errors[size] = max(error, self._errors.get(size, 0.0))
        if self.settings.gathers:
            self._seen = _Kind(tuple(x.shape), x.dtype, x.device)
        else:
            self._decide(module, x, exact)

    def _exact(self, module: nn.Module, device: torch.device) -> Tensor:
        """The float matrix that is rounded, on the device of the inputs."""
        weight = module._parameters["weight"]
        assert weight is not None
        return weight.detach()

    def decide(self) -> None:
        """Inputs have been collected: decide with them. Without any, the layer waits on."""
        module, seen, self._seen = self.module, self._seen, None
        if module is not None and seen is not None and self.state == WAITING:
            with self.settings.lock, torch.no_grad():
                x = torch.randn(seen.shape, device=seen.device).to(seen.dtype)
                self._decide(module, x, self._exact(module, x.device))

    def _decide(self, module: nn.Module, x: Tensor, exact: Tensor) -> None:
        """By the errors that have been measured; ``x`` is like the input of a call, to be timed with."""
        settings, parameter = self.settings, module._parameters.get("bias")
        bias = None if parameter is None else parameter.to(x.device)
        self.rotation = best_rotation(self._errors, settings.max_error)
        self.error = self._errors[self.rotation]
        if not self.error <= settings.max_error:
            self._unhook(module)
            self.state, self.why = FLOAT, f"its error {self.error:.2%} is above {settings.max_error:.2%}"
            return
        matrix = quantize_rows(exact, self.rotation)
        self.int8_bytes = matrix.codes.numel() + 4 * matrix.scales.numel()
        self.way = way_for(x, matrix)
        kind = _Kind(tuple(x.shape), x.dtype, x.device), self.shape, exact.dtype, self.rotation
        if kind not in settings.times:
            settings.times[kind] = times_of(x, exact, bias, matrix, settings.clock)
        self.times = settings.times[kind]
        self._unhook(module)
        self._replace(module, matrix)
        self.state, self.why = INT8, ""

    def _replace(self, module: nn.Module, matrix: Int8Matrix) -> None:
        keeps, weight = self.settings.weights, module._parameters["weight"]
        assert weight is not None
        original: Tensor | None = None
        if keeps == "keep":
            self._parameter = weight
            original = weight
        elif keeps == "host":
            self._parameter = weight
            # Gives the device's memory back, whoever else holds the parameter.
            original = weight.data = weight.detach().to("cpu")
        new = Int8Weight(matrix, weight.dtype, original=original, follows=keeps == "keep", state=self)
        module._parameters["weight"] = nn.Parameter(new, requires_grad=False)
        module._register_state_dict_hook(Hook(self, "saving"))

    def _unhook(self, module: nn.Module) -> bool:
        """Take our hooks off; whether there were any."""
        had_any = False
        for hooks in (module._forward_pre_hooks, module._state_dict_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook) and hook.layer is self]:
                had_any = True
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        return had_any

    def saving(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """A state dict holds the float weight, under its own name."""
        weight = state.get(f"{prefix}weight")
        if isinstance(weight, Int8Weight):
            state[f"{prefix}weight"] = weight.float_matrix() if weight.original is None else weight.original.detach()

    # ---- checking ----

    def saw(self, x: Tensor, weight: Int8Weight) -> None:
        """A call ran in 8 bits. After 2, 4, 8 ... calls its error is measured again."""
        if not _has_numbers(x) or in_backward():
            return
        self.calls += 1
        if self.calls & (self.calls - 1) or self.calls == 1 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            self._check(sample_of(x), weight)

    def _check(self, rows: Tensor, weight: Int8Weight) -> None:
        exact = weight.own_matrix().to(rows.device)
        error = relative_error(rows, exact, weight.matrix_on(rows.device))
        if weight.original is None:  # then only what rounding the input costs is left to see
            assert self.error is not None
            error = max(error, self.error)
        self.error = max(error, self.error or 0.0)
        if error <= self.settings.max_error:
            return
        where = f"its error was {error:.2%} in call {self.calls}, above {self.settings.max_error:.2%}"
        if weight.original is not None:
            self.state = FLOAT
        if self.why != where:
            log.warning("%s: %s", self.name, where)
        self.why = where

    # ---- copies ----

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        if id(self) in memo:
            return memo[id(self)]
        copied = copy.copy(self)
        memo[id(self)] = copied
        module = self.module
        copied._errors = dict(self._errors)
        copied._parameter = None
        copied._module = weakref.ref(copy.deepcopy(module, memo)) if module is not None else self._module
        return copied


class Hook:
    """A hook of a layer's module that is copied with it; in a pickle it is one that does nothing, since a file must not
    depend on this package."""

    def __init__(self, layer: Layer, name: str):
        self.layer, self.name = layer, name

    def __call__(self, *args: Any) -> None:
        getattr(self.layer, self.name)(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(copy.deepcopy(self.layer, memo), self.name)


def _has_numbers(x: Tensor) -> bool:
    """Whether a tensor is one of a user's call that really happens, with an element at least."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or type(x) not in (Tensor, nn.Parameter):
        return False
    if torch._C._get_tracing_state() is not None:  # what is measured would become a part of the trace
        return False
    if inputs_are_made_up() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not x.is_meta and x.dtype in FLOATS and x.numel() > 0
