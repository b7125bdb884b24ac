"""Int8Layer: one linear layer under one patch. It waits for its first inputs, is measured with them, and then runs in
8 bits or stays in float; while it runs in 8 bits, its error is measured again now and then."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..contest.ways import Way
from ..machine.out_of_memory import is_out_of_memory, out_of_memory
from ..machine.own_thread import in_backward
from ..patching.patch import ON, REFUSED, WAITING
from ..reference.int8_rows import Int8Matrix, quantize_rows
from . import stored
from .backends import backend_for
from .exchange import Exchange, FloatWeight, Source, ordinary_tensors
from .judged import Int8Options, Judged, has_numbers, is_captured
from .measure import (
    FEW_OUTPUTS,
    FEW_ROWS,
    SAMPLE_ROWS,
    Sample,
    best_rotation,
    errors_by_rotation,
    relative_error,
    sample_of,
)
from .product import int8_linear
from .report import Int8ReportLine
from .weight import InFloat, Int8Weight

log = logging.getLogger("pascal_attn")
WEIGHTS = ("keep", "host", "free")
_REPLACED = "its weight was replaced, for example by a host that loads the float weight for each call"


class Int8Layer(Judged):
    """The state of one linear layer.

    Attributes:
        missed: why it is in float although it was decided for 8 bits; "" = it is not.
        rotation: see :mod:`..reference.int8_rows`.
        backend: what computes it, and why nothing faster does.
        device: that it computes on; None = not known yet.
        format: of its weight where the host stores it, see :func:`.stored.format_of`.
        float_bytes, int8_bytes: sizes of its weight, stored by the host and in 8 bits.
    """

    def __init__(self, name: str, module: nn.Module, options: Int8Options):
        super().__init__(name, type(module).__name__, options)
        self._module, weight = weakref.ref(module), module.weight
        assert isinstance(weight, Tensor)
        self.shape = tuple(weight.shape)
        self.format, self.float_bytes, self.int8_bytes = stored.format_of(weight), stored.bytes_of(weight), 0
        self.why, self.missed = "not called yet", ""
        self.rotation, self.backend = 0, Way("", "")
        self.device: torch.device | None = None
        self.source = Source()
        self._exchange: Exchange | None = None  # while the module has a weight in 8 bits
        self._errors: dict[int, float] = {}  # the largest so far, by rotation
        self._seen: Callable[[], Tensor] | None = None  # makes an input like the last that was collected

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    @property
    def weight(self) -> Int8Weight | None:
        """The weight in 8 bits, where the module has it: hosts may replace it."""
        weight = self._parameter
        return weight if isinstance(weight, Int8Weight) and weight.layer is self else None

    @property
    def _parameter(self) -> Tensor | None:
        module = self.module
        return None if module is None else module._parameters.get("weight")

    @property
    def error(self) -> float | None:
        """The largest error of this run; before its first call, the largest that was measured."""
        return self._errors.get(self.rotation) if self.watch.largest is None else self.watch.largest

    @property
    def is_on(self) -> bool:
        """Whether the layer runs in 8 bits now."""
        return self.state == ON and self._exchange is not None

    @property
    def was_replaced(self) -> bool:
        """Whether the weight in 8 bits was replaced with another one."""
        return self._exchange is not None and self.weight is None

    @property
    def is_offloaded(self) -> bool:
        """Whether its float weight is not on the device that it computes on, as far as that is known."""
        weight = self._parameter
        return weight is not None and self.device is not None and weight.device.type != self.device.type

    def line(self, name: str | None = None) -> Int8ReportLine:
        line = super().line(name)
        if self.was_replaced or self.missed:
            line = line._replace(state=REFUSED, why=_REPLACED if self.was_replaced else self.missed)
        elif self.state == ON:
            line = line._replace(why=line.why or self.source.note)
        return line._replace(
            error=self.error,
            rotation=self.rotation,
            way=self.backend.name,
            why_way=self.backend.why,
            float_bytes=self.float_bytes,
            int8_bytes=self.int8_bytes,
            format=self.format,
        )

    # ---- in and out ----

    def attach(self, source: Source) -> None:
        """Wait for the first inputs; a layer that was decided for 8 bits before is only rounded again."""
        module = self.module
        assert module is not None
        self.source, self.missed = source, ""
        if self.state == WAITING:
            module.register_forward_pre_hook(Hook(self, "on_first_input"), with_kwargs=True)
        elif self.state == ON:
            assert self.device is not None
            try:
                found = source.read(module, self.device)
                self._put(module, found, quantize_rows(stored.values(found.matrix), self.rotation))
            except out_of_memory():
                self.missed = "out of memory while rounding it"

    def detach(self) -> str:
        """Put the module back as it was. Returns what could not be, "" = nothing; a torch.OutOfMemoryError where the
        float weight has to stay in host memory, and the host cannot work with that."""
        module, exchange, source = self.module, self._exchange, self.source
        was_replaced, weight = self.was_replaced, self.weight
        self._exchange, self.source = None, Source()  # they hold tensors of the host
        if module is None:
            return ""
        self._unhook(module)
        try:
            if exchange is not None:
                exchange.undo(module, weight)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not source.stays_in_host_memory(module):
                raise
            log.warning("%s: its float weight stays in host memory: its device is out of memory", self.name)
        return f"the weight of {self.name} was replaced in the meantime" if was_replaced else ""

    def _put(self, module: nn.Module, found: FloatWeight, matrix: Int8Matrix) -> None:
        parameter = module._parameters["weight"]
        assert parameter is not None
        self.device = matrix.codes.device
        is_elsewhere = self.device.type != parameter.device.type
        weights = "keep" if is_elsewhere else self.options.weights
        if is_elsewhere:
            if self.int8_bytes <= self.options.room[self.device]:
                self.options.room[self.device] -= self.int8_bytes
            else:
                matrix = matrix.to(torch.device("cpu"))
        elif weights != "keep":
            self.options.room[self.device] += self.float_bytes - self.int8_bytes
        in_float = InFloat(found.original if weights != "free" else None, self.source.lora_on(self.device))
        weight = Int8Weight(matrix, parameter.dtype, in_float=in_float, follows=weights == "keep", layer=self)
        exchange = Exchange(weights)
        exchange.put(module, found, weight)
        self._exchange = exchange
        module._register_state_dict_hook(Hook(self, "on_state_dict"))

    def _unhook(self, module: nn.Module) -> None:
        for hooks in (module._forward_pre_hooks, module._state_dict_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook) and hook.layer is self]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    def on_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """A state dict holds the float weight, under its own name."""
        weight = state.get(f"{prefix}weight")
        if isinstance(weight, Int8Weight):
            state[f"{prefix}weight"] = self.host_values(weight)

    def host_values(self, weight: Int8Weight) -> Tensor:
        """The float values that the module has without us."""
        return weight.float_matrix() if self._exchange is None else self._exchange.values(weight)

    # ---- deciding ----

    def on_first_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the module begins."""
        x = args[0] if args else kwargs.get("input")
        if self.state != WAITING or not isinstance(x, Tensor) or not has_numbers(x):
            return
        reason = self._not_now(module, x)
        if reason:
            self.why = reason
            return
        with self.options.lock, torch.autocast(x.device.type, enabled=False):
            if self.state != WAITING:
                return
            is_inference = torch.is_inference_mode_enabled()
            try:
                with ordinary_tensors():
                    self._measure(module, x.clone() if is_inference else x)
            except out_of_memory():
                self.failed()
                if self.state == REFUSED:
                    self._unhook(module)

    def _not_now(self, module: nn.Module, x: Tensor) -> str:
        weight = module._parameters.get("weight")
        if weight is None or weight.is_meta:
            return "its weight is absent when it is called: a hook loads it"
        if reason := stored.why_not(module, weight):
            return reason
        if weight.device != x.device and not self.source.casts:
            return f"its weight is on {weight.device}, its input on {x.device}"
        if module.training and weight.requires_grad and torch.is_grad_enabled():
            return "its weight is being trained"
        if in_backward() or is_captured(x):
            return "it cannot be measured while a graph is captured, or within a backward pass"
        return ""

    def _measure(self, module: nn.Module, x: Tensor) -> None:
        found = self.source.read(module, x.device)
        self._note(errors_by_rotation(sample_of(x, SAMPLE_ROWS, seed=0), stored.values(found.matrix)))
        if self.options.gathers:
            self._seen = functools.partial(torch.ones, x.shape, dtype=x.dtype, device=x.device)
        else:
            self._decide(module, x, found)

    def _note(self, errors: dict[int, float]) -> None:
        for size, error in errors.items():
            self._errors[size] = max(error, self._errors.get(size, 0.0))

    def decide(self) -> None:
        """Inputs have been collected: decide with them. Without any, the layer waits on."""
        module, seen, self._seen = self.module, self._seen, None
        if module is not None and seen is not None and self.state == WAITING:
            with self.options.lock, ordinary_tensors():
                x = seen()
                self._decide(module, x, self.source.read(module, x.device))

    def _decide(self, module: nn.Module, x: Tensor, found: FloatWeight) -> None:
        """Decide by the errors that have been measured; ``x`` is like the input of a call, to be timed with."""
        options = self.options
        self.rotation = best_rotation(self._errors, options.max_error)
        error = self._errors[self.rotation]
        if not self.admits(error):
            self._unhook(module)
            return
        matrix = quantize_rows(stored.values(found.matrix), self.rotation)
        self.int8_bytes = matrix.codes.numel() + 4 * matrix.scales.numel()
        self.backend = backend_for(x, matrix)
        parameter = module._parameters.get("bias")
        bias = None if parameter is None else parameter.to(x.device, x.dtype)
        attempts = [
            lambda: F.linear(x, stored.values(found.matrix).to(x.dtype), bias),
            lambda: int8_linear(x, matrix, bias),
        ]
        self.time((x.shape, x.dtype, x.device, self.shape, self.format, self.rotation), attempts, x.device)
        self._unhook(module)
        if self._is_no_faster():
            return
        self._put(module, found, matrix)
        self.watch.saw(error)
        self.state, self.why = ON, ""

    def _is_no_faster(self) -> bool:
        """Whether the layer stays in float because 8 bits save it no time."""
        if not self.options.only_faster or self.times is None or self.times.in_int8 < self.times.in_float:
            return False
        self.state, self.why = REFUSED, "8 bits are not faster for it"
        return True

    # ---- checking ----

    def recheck(self, x: Tensor, weight: Int8Weight) -> Int8Weight:
        """A call in 8 bits begins. Where :class:`.watch.ErrorWatch` says so, its error is measured, and a layer above
        the limit is rotated, or goes back to float. Returns the weight to compute the call with."""
        if not has_numbers(x) or in_backward():
            return weight
        if torch.is_grad_enabled() and weight.requires_grad and not self.options.has_warned:
            self.options.has_warned = True
            log.warning("%s: its weight is in 8 bits and gets no gradient; remove the patch to train it", self.name)
        if not self.watch.check_now(x.numel() // x.shape[-1]) or is_captured(x):
            return weight
        try:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                return self._checked(x, weight)
        except out_of_memory():
            return weight  # it is measured, or goes back to float, in a later call

    def _checked(self, x: Tensor, weight: Int8Weight) -> Int8Weight:
        """Measure with few rows and outputs, and where the error seems too large, as thoroughly as at first."""
        limit, seed = self.options.max_error, self.watch.calls
        some = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(seed))[:FEW_OUTPUTS]
        error = relative_error(sample_of(x, FEW_ROWS, seed), *weight.rows(some, x.device))
        if error > limit:
            sample, (exact, matrix) = sample_of(x, SAMPLE_ROWS, seed), weight.rows(slice(None), x.device)
            error = relative_error(sample, exact, matrix)
            rotated = self._rotated(x, sample, weight, exact) if error > limit else None
            if rotated is not None:
                return rotated
        if weight.original is None:  # then only what rounding the input costs was seen
            error = max(error, self._errors[self.rotation])
        self.watch.saw(error)
        if error <= limit:
            return weight
        if not self.why:
            self.warn_of(error)
        if weight.original is not None:
            self.state, self.went_back = REFUSED, True
            self._go_back(weight)
        return weight

    def _rotated(self, x: Tensor, sample: Sample, weight: Int8Weight, exact: Tensor) -> Int8Weight | None:
        """The weight with the rotation that brings the error below the limit; None = there is none."""
        module = self.module
        if module is None or self.weight is None or weight.original is None:
            return None
        errors = errors_by_rotation(sample, exact)
        self._note(errors)
        rotation = best_rotation(self._errors, self.options.max_error)
        if rotation == self.rotation or not self._errors[rotation] <= self.options.max_error:
            return None
        with ordinary_tensors():
            matrix = quantize_rows(exact, rotation)
            self.backend, self.times, self.rotation = backend_for(x, matrix), None, rotation
            rotated = weight.with_matrix(matrix.to(weight.device))
            module._parameters["weight"] = nn.Parameter(rotated, requires_grad=False)
        self.watch.saw(errors[rotation])
        return rotated

    def _go_back(self, weight: Int8Weight) -> None:
        """Give the module its float weight; without memory for it, the call is computed in float from host memory."""
        module, exchange = self.module, self._exchange
        if module is None or exchange is None or self.weight is None:
            return
        with ordinary_tensors():
            exchange.bring_back(weight)
            self._unhook(module)
            exchange.undo(module, weight)
            self._exchange = None


class Hook:
    """A hook of a layer's module; in copies and pickles it is one that does nothing, since a file must not depend on
    this package."""

    def __init__(self, layer: Int8Layer, name: str):
        self.layer, self.name = layer, name

    def __call__(self, *args: Any) -> None:
        getattr(self.layer, self.name)(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
