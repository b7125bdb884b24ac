"""Int8Binding: the linear layers of models in 8 bits, put in and taken out as often as their host wants."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..contest.timing_table import median_times
from ..gguf.hosts import host_of
from ..machine.out_of_memory import out_of_memory
from ..patching.patch import OFF
from ..patching.selectors import Found
from .exchange import Source, ordinary_tensors
from .find import find_linear, line_of
from .gguf_layer import GgufLayer, GgufMultiplier
from .judged import Int8Options, Layers, limit_of
from .layer import WEIGHTS, Hook, Int8Layer
from .report import Int8Report
from .weight import Int8Weight

_Chosen = tuple[str, weakref.ref[nn.Module], str, str]  # the name that it had, why it was left alone
Sources = Callable[[str, nn.Module], Source]


class Int8Binding(Layers[Int8Layer]):
    """Linear layers in 8 bits. What was decided for a layer (8 bits or float, rotation, error, times) is kept while it
    is detached: attached again, its weight is only rounded again.

    It serves several copies of a model (one per device) and keeps none of them alive. Options are those of
    :func:`.patch_linear_int8`.
    """

    def __init__(
        self,
        *,
        max_error: float = 0.05,
        include: Any = None,
        exclude: Any = None,
        weights: str = "host",
        only_faster: bool = False,
    ):
        limit = limit_of(max_error)
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
        super().__init__(Int8Options(limit, weights, median_times, only_faster))
        self._include, self._exclude = include, exclude
        self._chosen: weakref.WeakKeyDictionary[nn.Module, list[_Chosen]] = weakref.WeakKeyDictionary()

    def attach(self, model: nn.Module, source_of: Sources = lambda name, module: Source()) -> int:
        """Let the linear layers of ``model`` run in 8 bits, each from the source that ``source_of`` its qualified name
        gives. Returns the number of those that can. A second call looks at the sources again.

        Where the host keeps some float weights in host memory, their int8 weights go to the device as far as other
        float weights have made room there, and are copied to it in each call otherwise.
        """
        chosen: list[_Chosen] = []
        entering: list[tuple[Int8Layer, Source]] = []
        with self.options.lock, ordinary_tensors():
            self.detach(model)
            for found in find_linear(model, self._include, self._exclude):
                source = source_of(found.name, found.module)
                if source.why_not and not found.state:
                    found = found._replace(state=OFF, why=source.why_not)
                chosen.append((found.name, weakref.ref(found.module), found.state, found.why))
                if not found.state:
                    layer = self._layers[found.module] = self._known(found)
                    entering.append((layer, source))
            self._chosen[model] = chosen
            self.options.room.clear()
            try:
                # Those whose float weights make room for others come first.
                for layer, source in sorted(entering, key=lambda each: each[0].is_offloaded):
                    layer.attach(source)
            except BaseException:
                self.detach(model)
                raise
        return len(entering)

    def detach(self, model: nn.Module) -> list[str]:
        """Undo :meth:`attach`: modules, parameters and where they are, as before. Returns what could not be. With a
        torch.OutOfMemoryError there is no memory for a float weight where it was; the others are back."""
        failure, left = None, []
        with self.options.lock, ordinary_tensors():
            for layer in self.layers_of(model):
                try:
                    left.append(layer.detach())
                except out_of_memory() as error:
                    failure = error
        if failure is not None:
            raise failure
        return list(filter(None, left))

    def report(self, model: nn.Module) -> Int8Report:
        """The state of each layer of ``model`` in this run; before it was ever attached, which layers it is about."""
        chosen = self._chosen.get(model)
        if chosen is None:
            found = list(find_linear(model, self._include, self._exclude))
        else:  # by the modules: adapters that wrap one give it another name
            known = ((name, ref(), state, why) for name, ref, state, why in chosen)
            found = [Found(name, module, state, why) for name, module, state, why in known if module is not None]
        return self.report_of([line_of(each) if each.state else self._known(each).line(each.name) for each in found])

    def _known(self, found: Found) -> Int8Layer:
        layer, name = self._layers.get(found.module), found.name or "(the model)"
        if layer is None and host_of(found.module) is not None:
            return GgufLayer(name, found.module, self.options)
        return layer or Int8Layer(name, found.module, self.options)


def take_off(model: nn.Module) -> None:
    """Detach what any binding has put into ``model``."""
    with ordinary_tensors():
        for module in list(model.modules()):
            weight = module._parameters.get("weight")
            layers = [hook.layer for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]
            layers += [weight.layer] if isinstance(weight, Int8Weight) else []
            layers += [value.layer for value in vars(module).values() if isinstance(value, GgufMultiplier)]
            for layer in layers:
                layer.detach()
