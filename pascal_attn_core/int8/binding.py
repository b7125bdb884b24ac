"""Linear layers in 8 bits for hosts that take their patches off and put them back between runs."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..routes.timing_table import median_times
from .branch import LowRank
from .find import Found, find_linear
from .layer import FLOAT, INT8, WAITING, Hook, Layer, Settings
from .quantize import Int8Matrix, quantize_rows
from .report import Int8Report, report_line
from .weight import Int8Weight

log = logging.getLogger("pascal_attn")
REMOVED = object()  # in Source.overrides: the attribute is taken off


class Source:
    """Where the float weight of one layer is, as its host keeps it; this one is for modules that nobody manages.

    It must not refer to the module: what is remembered of a module must not keep it alive.

    Attributes:
        note: what the report says of the layer beside its numbers.
        why_not: why the layer has to be left to its host now, "left: ..."; "" = it need not.
    """

    note, why_not = "", ""

    def weight(self, module: nn.Module, device: torch.device) -> Tensor:
        """The matrix that is rounded, ``[N, K]``, on ``device``."""
        parameter = module._parameters["weight"]
        assert parameter is not None
        return parameter.detach().to(device)

    def original(self) -> Tensor | None:
        """That matrix where it is stored, if it is not the module's parameter."""
        return None

    def branch(self, device: torch.device) -> LowRank | None:
        """What is added beside it, in float."""
        return None

    def bias(self, module: nn.Module, device: torch.device) -> Tensor | None:
        """What takes the place of the module's bias; None = nothing."""
        return None

    def overrides(self, module: nn.Module) -> dict[str, Any]:
        """Instance attributes that the module has while its weight is in 8 bits; REMOVED = none of that name."""
        return {}

    def stays_in_host_memory(self, module: nn.Module) -> bool:
        """The float weight cannot return to its device, which is out of memory. Whether the host can do with that."""
        return False


class Room:
    """Bytes on a device that int8 weights may take whose float weights are elsewhere: what others have made free."""

    def __init__(self, size: int = 0):
        self.bytes = size

    def take(self, size: int) -> bool:
        """Whether there is room for ``size`` bytes; if so, it is taken."""
        if size > self.bytes:
            return False
        self.bytes -= size
        return True


class Int8Binding:
    """:func:`.patch_linear_int8` for repeated attaching and detaching. What was decided for a layer (8 bits or float,
    rotation, error, times) is kept in between: attached again, its weight is only rounded again.

    It serves several copies of a model (one per device) and keeps none of them alive. One binding is attached to a
    module at a time: attaching a second one detaches the first.

    Args:
        weights: "host" = the float weights move to host memory while it is attached; "keep" = they stay.
        max_error, include, exclude: as in :func:`.patch_linear_int8`.
    """

    def __init__(
        self,
        *,
        max_error: float = 0.05,
        include: Any = None,
        exclude: Any = None,
        weights: str = "host",
    ):
        if weights not in ("host", "keep"):
            raise ValueError(f"weights must be host or keep, got {weights!r}")
        self.settings = Settings(float(max_error), weights, median_times)
        self._include, self._exclude = include, exclude
        self._layers: weakref.WeakKeyDictionary[nn.Module, BoundLayer] = weakref.WeakKeyDictionary()
        self._chosen: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()

    def attach(self, model: nn.Module, source_of: Callable[[str, nn.Module], Source] | None = None) -> int:
        """Let the linear layers of ``model`` run in 8 bits; returns how many of them can. A second call looks at the
        sources again.

        Args:
            source_of: where the weight of the layer with this qualified name is; None = in its parameter.

        Where the host keeps some float weights in host memory, their int8 weights go to the device as far as other
        float weights have made room there, and are copied to it in each call otherwise.
        """
        take_off(model)
        room = Room()
        with self.settings.lock, _ordinary_tensors():
            try:
                entering = self._look(model, source_of or (lambda name, module: Source()), room)
                # Those whose float weights make room for others come first.
                for layer in sorted(entering, key=lambda layer: layer.is_offloaded):
                    layer.enter()
            except BaseException:
                self.detach(model)
                raise
        return len(entering)

    def _look(self, model: nn.Module, source_of: Callable[[str, nn.Module], Source], room: Room) -> list[BoundLayer]:
        chosen: dict[str, str] = {}
        entering = []
        for name, module, why_not in find_linear(model, self._include, self._exclude):
            source = None if why_not else source_of(name, module)
            chosen[name] = why_not if source is None else source.why_not
            if source is not None and not source.why_not:
                entering.append(self._layer(name, module, source, room))
        self._chosen[model] = chosen
        return entering

    def _layer(self, name: str, module: nn.Module, source: Source, room: Room) -> BoundLayer:
        layer = self._layers.get(module)
        if layer is None:
            layer = self._layers[module] = BoundLayer(name or "(the model)", module, self.settings)
        layer.source, layer.room = source, room
        return layer

    def detach(self, model: nn.Module) -> int:
        """Undo :meth:`attach`: modules, parameters and where they are, as before. Returns for how many layers."""
        left, failure = 0, None
        with self.settings.lock, _ordinary_tensors():
            for layer in [self._layers.get(module) for module in model.modules()]:
                try:
                    left += layer is not None and layer.leave()
                except torch.OutOfMemoryError as error:  # the others can still be put back
                    failure = error
        if failure is not None:
            raise failure
        return left

    def restart(self) -> None:
        """Calls are counted from here on."""
        for layer in list(self._layers.values()):
            layer.calls_before = layer.calls

    def report(self, model: nn.Module) -> Int8Report:
        """The state of each layer of ``model``, which has been attached before; calls since :meth:`restart`."""
        chosen = self._chosen.get(model)
        if chosen is None:
            return Int8Report(self.preview(model).lines, self.settings.max_error, self.settings.weights)
        lines = []
        for name, why_not in chosen.items():
            module = model.get_submodule(name)
            layer = None if why_not else self._layers.get(module)
            line = report_line(Found(name, module, why_not), layer)
            if layer is not None:
                note = layer.source.note if line.state == INT8 else ""
                line = line._replace(calls=layer.calls - layer.calls_before, why=line.why or note)
                line = line._replace(state=FLOAT, why=layer.missed) if layer.missed else line
            lines.append(line)
        return Int8Report(lines, self.settings.max_error, self.settings.weights)

    def preview(self, model: nn.Module) -> Int8Report:
        """The same before any call: which layers it is about, and what is known of them from earlier runs."""
        lines = []
        for found in find_linear(model, self._include, self._exclude):
            layer = self._layers.get(found.module)
            if layer is None and not found.why_not:
                layer = BoundLayer(found.name or "(the model)", found.module, self.settings)
            lines.append(report_line(found, layer))
        return Int8Report(lines, self.settings.max_error, self.settings.weights)


class BoundLayer(Layer):
    """A layer under a binding. In float it is the host's own affair: nothing of ours is in its module."""

    def __init__(self, name: str, module: nn.Module, settings: Settings):
        super().__init__(name, module, settings)
        self.source, self.room = Source(), Room()
        self.calls_before = 0
        self.missed = ""  # why it is in float for the time being
        self.device: torch.device | None = None  # that it computes on
        self._home: torch.device | None = None  # of the parameter
        self._bias: Any = REMOVED
        self._held: dict[str, Any] = {}  # attributes of the module that are overridden

    @property
    def is_on(self) -> bool:
        return super().is_on and self._parameter is not None

    @property
    def was_replaced(self) -> bool:
        return self._parameter is not None and super().was_replaced

    @property
    def is_offloaded(self) -> bool:
        """Whether its float weight is not on the device that it computes on, as far as that is known."""
        module = self.module
        weight = None if module is None else module._parameters.get("weight")
        return weight is not None and self.device is not None and weight.device.type != self.device.type

    # ---- in and out ----

    def enter(self) -> None:
        """The host has loaded the model."""
        module, self.missed = self.module, ""
        assert module is not None
        if self.state == WAITING:
            module.register_forward_pre_hook(Hook(self, "arrived"), with_kwargs=True)
        elif self.state == INT8:
            assert self.device is not None
            try:
                self._replace(module, quantize_rows(self.source.weight(module, self.device), self.rotation))
            except torch.OutOfMemoryError:
                self.missed = "out of memory while rounding it"

    def leave(self) -> bool:
        """The host is about to change the model. Returns whether anything of ours was in it."""
        module, parameter = self.module, self._parameter
        if module is None:
            return False
        was_in = self._unhook(module) or parameter is not None
        if parameter is not None:
            self._put_back(module, parameter)
        self.source, self.room = Source(), Room()  # they hold tensors of the host
        return was_in

    def _put_back(self, module: nn.Module, parameter: nn.Parameter) -> None:
        if isinstance(module._parameters.get("weight"), Int8Weight):
            module._parameters["weight"] = parameter
        if self._bias is not REMOVED:
            module._parameters["bias"] = self._bias
        for name, value in self._held.items():
            if value is REMOVED:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
        home, self._home = self._home, None
        self._parameter, self._bias, self._held = None, REMOVED, {}
        if home is None or parameter.device == home:
            return
        try:
            move(parameter, home)
        except torch.OutOfMemoryError:
            if not self.source.stays_in_host_memory(module):
                raise
            log.warning("%s: its float weight stays in host memory: %s is out of memory", self.name, home)

    def _replace(self, module: nn.Module, matrix: Int8Matrix) -> None:
        parameter = module._parameters["weight"]
        assert parameter is not None
        self.device = device = matrix.codes.device
        size = matrix.codes.numel() + 4 * matrix.scales.numel()
        if device.type != parameter.device.type:
            if not self.room.take(size):
                matrix = Int8Matrix(matrix.codes.cpu(), matrix.scales.cpu(), matrix.rotation)
        elif self.settings.weights == "host":
            self.room.bytes += self.float_bytes - size
        branch, bias = self.source.branch(device), self.source.bias(module, device)
        overrides = self.source.overrides(module)
        # Nothing can fail from here on.
        self._parameter, self._home = parameter, parameter.device
        if self.settings.weights == "host" and parameter.device.type != "cpu":
            move(parameter, torch.device("cpu"))
        for name, value in overrides.items():
            self._held[name] = module.__dict__.get(name, REMOVED)
            if value is REMOVED:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
        if bias is not None:
            self._bias = module._parameters["bias"]
            module._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
        original = self.source.original()
        original = parameter.detach() if original is None else original
        new = Int8Weight(matrix, parameter.dtype, original=original, state=self, branch=branch)
        module._parameters["weight"] = nn.Parameter(new, requires_grad=False)
        module._register_state_dict_hook(Hook(self, "saving"))

    def saving(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self._parameter is not None and isinstance(state.get(f"{prefix}weight"), Int8Weight):
            state[f"{prefix}weight"] = self._parameter.detach()

    # ---- deciding ----

    def _not_now(self, module: nn.Module, x: Tensor) -> str:
        weight = module._parameters.get("weight")
        is_elsewhere = weight is not None and weight.device != x.device and not weight.is_meta
        return "" if is_elsewhere and type(weight) is nn.Parameter else super()._not_now(module, x)

    def _exact(self, module: nn.Module, device: torch.device) -> Tensor:
        return self.source.weight(module, device).detach()

    def _check(self, rows: Tensor, weight: Int8Weight) -> None:
        super()._check(rows, weight)
        module = self.module
        if self.state == FLOAT and module is not None and self._parameter is not None:
            with _ordinary_tensors():
                self._unhook(module)
                self._put_back(module, self._parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundLayer:
        """A copy of the model has layers that leave their modules as they were before; the binding does not know it."""
        if id(self) in memo:
            return memo[id(self)]
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, BoundLayer)
        copied.source, copied.room = Source(), Room()
        copied._parameter = copy.deepcopy(self._parameter, memo)
        copied._bias = REMOVED if self._bias is REMOVED else copy.deepcopy(self._bias, memo)
        held = {name: value for name, value in self._held.items() if value is not REMOVED}
        copied._held = {name: REMOVED for name in self._held} | copy.deepcopy(held, memo)
        return copied


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Its values, whoever else holds the parameter."""
    parameter.data = parameter.detach().to(device)


def take_off(model: nn.Module) -> None:
    """Remove what any binding has put into ``model``."""
    with _ordinary_tensors():
        for module in list(model.modules()):
            weight = module._parameters.get("weight")
            layers = [hook.layer for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]
            layers += [weight.state] if isinstance(weight, Int8Weight) else []
            for layer in layers:
                if isinstance(layer, BoundLayer):
                    layer.leave()


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Weights made here can be used outside of inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        yield
