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
from ..reference.int8_rows import quantize_rows
from . import stored
from .backends import backend_for
from .exchange import Exchange, FloatWeight, Source, ordinary_tensors
from .judged import Int8Options, Judged, has_numbers, is_captured
from .measure import FEW_ROWS, Errors, Sample, best_rotation, errors_by_rotation, outputs_of, relative_error, sample_of
from .product import int8_linear
from .report import Int8ReportLine
from .weight import InFloat, Int8Weight

log = logging.getLogger("pascal_attn")
WEIGHTS = ("keep", "host", "free")
_COMPILED = "compiled calls are neither counted nor measured"
_REPLACED = "its weight was replaced, for example by a host that loads the float weight for each call"


class Int8Layer(Judged):
    """The state of one linear layer.

    Attributes:
        missed: why it is in float although it was decided for 8 bits; "" = it is not.
        is_compiled: whether torch.compile has taken it into a graph, which computes in 8 bits without us.
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
        self.missed, self.is_compiled = "", False
        self.rotation, self.backend = 0, Way("", "")
        self.device: torch.device | None = None
        self.source = Source()
        self._exchange: Exchange | None = None  # while the module has a weight in 8 bits
        self._errors: dict[int, Errors] = {}  # the largest so far, by rotation

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
    def is_on(self) -> bool:
        """Whether the layer runs in 8 bits now."""
        return self.state == ON and self._exchange is not None

    @property
    def was_replaced(self) -> bool:
        """Whether the weight in 8 bits was replaced with another one."""
        return self._exchange is not None and self.weight is None

    @property
    def is_offloaded(self) -> bool:
        weight = self._parameter
        return weight is not None and self.device is not None and weight.device.type != self.device.type

    def line(self, name: str = "") -> Int8ReportLine:
        line = super().line(name)
        if self.was_replaced or self.missed:
            line = line._replace(state=REFUSED, why=_REPLACED if self.was_replaced else self.missed)
        elif self.state == ON:
            line = line._replace(why=line.why or (_COMPILED if self.is_compiled else self.source.note))
        return line._replace(
            rotation=self.rotation,
            way=self.backend.name,
            why_way=self.backend.why,
            float_bytes=self.float_bytes,
            int8_bytes=self.int8_bytes,
            format=self.format,
        )

    # ---- in and out ----

    def attach(self, module: nn.Module, source: Source) -> None:
        self.source, self.missed = source, ""
        if self.state == WAITING:
            self._await(module)
        elif self.state == ON:
            try:
                self._read_in(module)
            except out_of_memory():
                self.missed = "out of memory while rounding it"

    def _await(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(Hook(self, "on_first_input"), with_kwargs=True)

    def detach(self) -> str:
        """Raises torch.OutOfMemoryError where the float weight must stay in host memory, and its host cannot use it."""
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

    def _read_in(self, module: nn.Module) -> None:
        assert self.device is not None
        found = self.source.read(module, self.device)
        matrix = quantize_rows(stored.values(found.matrix), self.rotation)
        self._unhook(module)
        parameter = module._parameters["weight"]
        assert parameter is not None
        is_elsewhere = self.device.type != parameter.device.type
        weights = "keep" if is_elsewhere else self.options.weights
        if is_elsewhere:
            if self.int8_bytes <= self.options.room[self.device]:
                self.options.room[self.device] -= self.int8_bytes
            else:
                matrix = matrix.to(torch.device("cpu"))
        elif weights != "keep":
            self.options.room[self.device] += self.float_bytes - self.int8_bytes
        in_float = InFloat(found.original if weights != "free" else None, self.source.lora)
        weight = Int8Weight(matrix, parameter.dtype, in_float=in_float, follows=weights == "keep", layer=self)
        self._exchange = Exchange(module, found, weight, weights)
        module._register_state_dict_hook(Hook(self, "on_state_dict"))

    def _unhook(self, module: nn.Module, *kinds: dict[int, Any]) -> None:
        """Remove the hooks of this layer, all or those of some kinds."""
        for hooks in kinds or (module._forward_pre_hooks, module._forward_hooks, module._state_dict_hooks):
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
        if self.state != WAITING or not isinstance(x, Tensor) or not has_numbers(x) or x.shape[-1:] != self.shape[1:]:
            return
        reason = self._not_now(module, x)
        if reason:
            self.why = reason
            return
        self.device = x.device
        with ordinary_tensors():
            x = x.clone() if x.is_inference() else x
            read = functools.cache(functools.partial(self.source.read, module, x.device))
            self.judge((x,), functools.partial(self._measure, x, read), functools.partial(self._time, x, read))
        if self.is_on:
            module.register_forward_hook(Hook(self, "on_first_output"))

    def on_first_output(self, module: nn.Module, *_: Any) -> None:
        """The call by whose input the layer was decided is over."""
        self._unhook(module, module._forward_hooks)
        if self.is_on and not self.watch.calls and not torch.compiler.is_compiling():
            self.why = "its module does not multiply by it as a linear layer does"
            self.go_back()
            self.went_back = False

    def _not_now(self, module: nn.Module, x: Tensor) -> str:
        weight = module._parameters.get("weight")
        if weight is None or weight.is_meta:
            return "its weight is absent when it is called: a hook loads it"
        if reason := stored.why_not(module, weight):
            return reason
        if weight.device != x.device and not self.source.casts:
            return f"its weight is on {weight.device}, its input on {x.device}"
        if self.is_trained(weight):
            return self.why
        if in_backward() or is_captured(x):
            return "it cannot be measured while a graph is captured, or within a backward pass"
        return ""

    def _measure(self, x: Tensor, read: Callable[[], FloatWeight], rows: int) -> Errors:
        """The errors of a call of a layer that waits, with the better rotation."""
        with torch.autocast(x.device.type, enabled=False):
            self._errors = errors_by_rotation(sample_of(x, rows, seed=0), stored.values(read().matrix))
        self.rotation = best_rotation(self._errors, self.options.max_error)
        return self._errors[self.rotation]

    def _time(self, x: Tensor, read: Callable[[], FloatWeight]) -> None:
        weight = stored.values(read().matrix)
        matrix = quantize_rows(weight, self.rotation)
        self.int8_bytes = matrix.codes.numel() + 4 * matrix.scales.numel()
        self.backend, module = backend_for(x, matrix), self.module
        parameter = None if module is None else module._parameters.get("bias")
        bias = None if parameter is None else parameter.to(x.device, x.dtype)
        attempts = (
            lambda: F.linear(x, stored.values(read().matrix).to(x.dtype), bias),
            lambda: int8_linear(x, matrix, bias),
        )
        with torch.autocast(x.device.type, enabled=False):
            self.time((x.shape, x.dtype, x.device, self.shape, self.format, self.rotation), attempts, x.device)

    def start(self) -> None:
        module = self.module
        assert module is not None
        self._read_in(module)

    def refuse(self, why: str) -> None:
        super().refuse(why)
        if self._exchange is None and self.module is not None:
            self._unhook(self.module)

    # ---- checking ----

    def recheck(self, x: Tensor, weight: Int8Weight) -> Tensor:
        """A call in 8 bits begins. Where :class:`.watch.ErrorWatch` says so, its error is measured, and a layer above
        the limit is rotated, or goes back to float. Returns the weight to compute the call with: in a call of training
        the module's own."""
        self.missed = ""
        if not has_numbers(x) or in_backward():
            return weight
        if self.is_trained(weight):
            return self._trained(weight)
        self.look((x,), functools.partial(self._check, x, weight), lambda: None)
        own = self.weight
        return own if own is not None and own.matrix.rotation != weight.matrix.rotation else weight

    def _trained(self, weight: Int8Weight) -> Tensor:
        """The module's own weight, if it still exists: it waits again."""
        module = self.module
        if module is None or self.weight is None or weight.original is None:
            return weight
        self.is_another()
        self.go_back()
        self.state, self.why, self.went_back = WAITING, "its weight is being trained", False
        self._await(module)
        return module._parameters["weight"].requires_grad_()  # type: ignore[union-attr]

    def _check(self, x: Tensor, weight: Int8Weight, rows: int) -> Errors:
        """The errors of a call in 8 bits: on few rows of few outputs; on more rows, of all outputs, and if they are too
        large, with another rotation."""
        seed = self.watch.calls
        with torch.autocast(x.device.type, enabled=False):
            sample = sample_of(x, rows, seed)
            exact, matrix = weight.rows(outputs_of(weight.shape[0], rows, seed), x.device)
            found = relative_error(sample, exact, matrix)
            if weight.original is None:  # then only what rounding the input costs was seen
                found = found.or_larger(self._errors.get(self.rotation))
            elif rows != FEW_ROWS and found.judged > self.options.max_error:
                found = self._rotated(x, sample, weight, exact) or found
        return found

    def _rotated(self, x: Tensor, sample: Sample, weight: Int8Weight, exact: Tensor) -> Errors | None:
        """The errors with the rotation that brings them below the limit, which the weight is given; None = there is
        none."""
        module = self.module
        if module is None or self.weight is None:
            return None
        errors = errors_by_rotation(sample, exact)
        self._errors = {size: found.or_larger(self._errors.get(size)) for size, found in errors.items()}
        rotation = best_rotation(self._errors, self.options.max_error)
        if rotation == self.rotation or not self._errors[rotation].judged <= self.options.max_error:
            return None
        with ordinary_tensors():
            matrix = quantize_rows(exact, rotation)
            self.backend, self.times, self.rotation = backend_for(x, matrix), None, rotation
            rotated = weight.like(matrix.to(weight.device), weight.in_float)
            module._parameters["weight"] = nn.Parameter(rotated, requires_grad=False)
        return errors[rotation]

    def is_another(self) -> None:
        super().is_another()
        self._errors.clear()

    def go_back(self) -> None:
        """Give the module its float weight; without memory for it, calls are computed in float from host memory."""
        module, exchange, weight = self.module, self._exchange, self.weight
        if weight is not None and weight.original is None:  # there is nothing to go back to
            return
        super().go_back()
        if module is None or exchange is None or weight is None:
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
