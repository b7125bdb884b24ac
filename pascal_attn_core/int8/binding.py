"""The layers of models that are not exact: a binding puts them in and takes them out as often as its host wants, a
patch does so once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Generic, TypeVar

from torch import nn

from ..contest.timing_table import median_times
from ..gguf.hosts import host_of
from ..machine.out_of_memory import out_of_memory
from ..patching.patch import OFF, Patch, require_sites
from ..patching.run_start import at_run_start
from ..patching.selectors import Found, denoisers_of, require_matches
from .exchange import Source, ordinary_tensors
from .find import find_linear
from .gguf_layer import GgufLayer
from .judged import Int8Options, Judged, limit_of
from .layer import WEIGHTS, Int8Layer
from .report import Int8Report, Int8ReportLine

Layer = TypeVar("Layer", bound=Judged)
Sources = Callable[[str, nn.Module], Source]
_Chosen = tuple[str, weakref.ref[nn.Module], str, str]  # the name that it had, why it was left alone


class Binding(Generic[Layer]):
    """This keeps what was decided for a layer (whether it is on, rotation, error, times) while it is detached. It
    serves several copies of a model (one per device) and keeps none of them alive.

    Args:
        max_error, include, exclude, only_faster: as in :func:`..patch_linear_int8`.
        weights: as there; "" where they stay as they are.
    """

    what, precision = "linear layers", "int8"

    def __init__(
        self, *, max_error: float, include: Any = None, exclude: Any = None, weights: str = "", only_faster: bool = True
    ):
        self.options = Int8Options(limit_of(max_error), weights, median_times, only_faster)
        self.chosen = {"include": include, "exclude": exclude}
        self._layers: MutableMapping[Any, Layer] = weakref.WeakKeyDictionary()
        self._chosen: weakref.WeakKeyDictionary[nn.Module, list[_Chosen]] = weakref.WeakKeyDictionary()

    def find(self, model: nn.Module) -> Iterable[Found]:
        """The layers of a model, and those that are left alone."""
        return find_linear(model, **self.chosen)

    def make(self, name: str, module: nn.Module) -> Layer:
        """The layer of a module that has none."""
        raise NotImplementedError

    def attach(self, model: nn.Module, source_of: Sources = lambda name, module: Source()) -> int:
        """Let the layers of ``model`` be tried, each with the source of its weight that ``source_of`` its qualified
        name gives. Returns the number of those that can. A second call looks at the sources again.

        Where the host keeps some float weights in host memory, their int8 weights go to the device as far as other
        float weights have made room there, and are copied to it in each call otherwise.
        """
        chosen: list[_Chosen] = []
        entering: list[tuple[Layer, nn.Module, Source]] = []
        with self.options.lock, ordinary_tensors():
            self.detach(model)
            for found in self.find(model):
                source = source_of(found.name, found.module)
                if source.why_not and not found.state:
                    found = found._replace(state=OFF, why=source.why_not)
                chosen.append((found.name, weakref.ref(found.module), found.state, found.why))
                if not found.state:
                    layer = self._layers[found.module] = self._known(found)
                    entering.append((layer, found.module, source))
            self._chosen[model] = chosen
            self.options.room.clear()
            try:
                # Those whose float weights make room for others come first.
                for layer, module, source in sorted(entering, key=lambda each: each[0].is_offloaded):
                    layer.attach(module, source)
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

    def restart(self) -> None:
        """A run begins: calls and checks are counted from here on."""
        for layer in list(self._layers.values()):
            layer.watch.restart()

    def layers_of(self, model: nn.Module) -> list[Layer]:
        """The layers of ``model`` that were ever attached."""
        return [self._layers[module] for module in model.modules() if module in self._layers]

    def report(self, model: nn.Module) -> Int8Report:
        """The state of each layer of ``model`` in this run; before it was ever attached, which layers it is about."""
        chosen = self._chosen.get(model)
        if chosen is None:
            found = list(self.find(model))
        else:  # by the modules: adapters that wrap one give it another name
            known = ((name, ref(), state, why) for name, ref, state, why in chosen)
            found = [Found(name, module, state, why) for name, module, state, why in known if module is not None]
        return self.report_of([self._line(each) for each in found])

    def _line(self, found: Found) -> Int8ReportLine:
        if not found.state:
            return self._known(found).line(found.name)
        shape = tuple(getattr(found.module._parameters.get("weight"), "shape", ()))
        return Int8ReportLine(found.name, type(found.module).__name__, shape, found.state, found.why)

    def report_of(self, lines: list[Int8ReportLine]) -> Int8Report:
        """The report with these lines."""
        return Int8Report(lines, self.options.max_error, self.options.weights, self.what, self.precision)

    def _known(self, found: Found) -> Layer:
        return self._layers.get(found.module) or self.make(found.name or "(the model)", found.module)


class Int8Patch(Patch):
    """The change made by :func:`..patch_linear_int8`, :func:`..patch_attention_int8` or
    :func:`..float16.patch_linear_float16`."""

    def __init__(self, kind: str, model: nn.Module, binding: Binding, sites: int, forget: Callable[[], None]):
        self._model, self._binding = model, binding

        def undo() -> list[str]:
            binding.options.enabled = False
            forget()
            left = binding.detach(model)
            return [left[-1] + (f"; so were {len(left) - 1} more" if len(left) > 1 else "")] if left else []

        super().__init__(f"{binding.precision} {binding.what} of {kind}", undo, sites=sites)

    def report(self) -> Int8Report:
        """The state of each layer so far."""
        return self._binding.report(self._model)


def patched(target: Any, binding: Binding) -> Int8Patch:
    """Put the layers of a binding, whose include and exclude must choose something, into a model or a pipeline."""
    model = denoisers_of(target)
    require_matches(model, **binding.chosen)
    count = binding.attach(model)
    return require_sites(Int8Patch(type(target).__name__, model, binding, count, at_run_start(target, binding.restart)))


class Int8Binding(Binding[Int8Layer]):
    """Linear layers in 8 bits. Options are those of :func:`..patch_linear_int8`."""

    def __init__(self, *, weights: str = "host", only_faster: bool = False, **more: Any):
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
        super().__init__(weights=weights, only_faster=only_faster, **more)

    def make(self, name: str, module: nn.Module) -> Int8Layer:
        return (Int8Layer if host_of(module) is None else GgufLayer)(name, module, self.options)
